"""What a command is called: `qerl-evaluate`, or `python -m experiments.evaluate` in a checkout.

Texts name commands as an installation does. What is printed goes through `command_name` or
`name_commands`, so that the reader can type it.
"""

import os
import re
import sys
from pathlib import Path

# Module of `experiments` by the name of the command.
MODULES = {
    "train": "grpo_gsm8k",
    "evaluate": "evaluate",
    "sample": "sample",
    "show": "show",
    "export": "export",
    "plan": "plan",
    "quantize": "quantize",
    "sweep": "sweep",
}
_ROOT = Path(__file__).resolve().parents[2]
_COMMAND = re.compile(rf"\bqerl-({'|'.join(MODULES)})\b")


def command_name(name: str) -> str:
    """Returns what the reader types for a command, a key of `MODULES` such as 'evaluate'.

    Returns:
        `qerl-evaluate`; `python -m experiments.evaluate` in a process that runs from a checkout of
        the repository and was not started as an installed command.
    """
    is_script = os.path.basename(sys.argv[0] if sys.argv else "").startswith("qerl-")
    module = MODULES[name]
    if is_script or not (_ROOT / "experiments" / f"{module}.py").is_file():
        return f"qerl-{name}"
    return f"python -m experiments.{module}"


def name_commands(text: str) -> str:
    """Returns a text with every `qerl-NAME` in it as the reader types it."""
    return _COMMAND.sub(lambda match: command_name(match[1]), text)
