"""What a command is called: `qerl-evaluate`, or `python -m experiments.evaluate` in a checkout.

Texts name commands as an installation does. What is printed goes through `command_name` or
`name_commands`, so that the reader can type it.
"""

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
        the repository and was not started as an installed command. `train` is the experiment that
        this process runs, if it runs one, such as `python -m experiments.sft`.
    """
    started = Path(sys.argv[0] if sys.argv else "")
    is_script = started.name.startswith("qerl-")
    module = MODULES[name]
    is_experiment = started.resolve().parent == _ROOT / "experiments" and started.suffix == ".py"
    if name == "train" and is_experiment and started.stem not in MODULES.values():
        module = started.stem
    if is_script or not (_ROOT / "experiments" / f"{module}.py").is_file():
        return f"qerl-{name}"
    return f"python -m experiments.{module}"


def name_commands(text: str) -> str:
    """Returns a text with every `qerl-NAME` in it as the reader types it."""
    return _COMMAND.sub(lambda match: command_name(match[1]), text)
