"""Whose run a folder holds: the user's own, or that of another person.

config.json of a run carries a tag, a signature of its content with the user's key (`user_key`). A
folder without a valid tag is data: nothing that it names is imported, called or executed. The user
adopts it by --trust, or by QERL_TRUST_RUNS=1 where home folders do not last.
"""

import contextlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qerl_jax.system.atomic import write_json
from qerl_jax.system.user_key import is_signed, key_path, sign, why_no_key

TAG = "tag"  # the last field of config.json
VARIABLE = "QERL_TRUST_RUNS"
_PURPOSE = "run"


def write_config(path: Path, content: Mapping[str, Any], *, signs: bool = True) -> None:
    """Writes the config.json of a run, with a new tag if it `signs`.

    A run of another person that is written anew gets none, as it still holds what its folder named
    before.
    """
    plain = _without_tag(content)
    tag = sign(_canonical(plain), _PURPOSE) if signs else ""
    if signs and not tag and not trusts(False):
        print(
            f"warning: {path.parent} is not signed as your run, because {why_no_key()}; commands "
            f"that read it later take it for a run of another person: set XDG_CONFIG_HOME to a "
            f"folder that can be written, or {VARIABLE}=1",
            file=sys.stderr,
            flush=True,
        )
    write_json(path, plain | ({TAG: tag} if tag else {}))


def has_own_tag(content: Mapping[str, Any]) -> bool:
    """Returns whether the content of a config.json carries a valid tag of this user."""
    tag = content.get(TAG)
    if not isinstance(tag, str):
        return False
    try:
        return is_signed(_canonical(_without_tag(content)), _PURPOSE, tag)
    except (RecursionError, UnicodeError):  # a text that no run has written
        return False


def is_own(folder: Path) -> bool:
    """Returns whether a folder holds a run of this user."""
    try:
        content = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and has_own_tag(content)


def trusts(flag: bool) -> bool:
    """Returns whether the user trusts the folder of a command, by --trust or by the environment."""
    return flag or os.environ.get(VARIABLE) == "1"


def unless_own() -> str:
    """Returns what the refusal of a run of another person tells the user whose run it is."""
    key = key_path() or "a home folder"
    return (
        f"your run is not recognized if it began without {key} or with another one, and "
        f"{VARIABLE}=1 stands for --trust in all commands"
    )


def adopt(folder: Path) -> None:
    """Makes a run the user's own: signs its config.json and its compiled programs.

    Where the folder or the user's key cannot be written, nothing changes.
    """
    if not sign(b"", _PURPOSE):  # There is no key.
        return
    with contextlib.suppress(OSError):
        if not is_own(folder):
            content = json.loads((folder / "config.json").read_bytes())
            write_config(folder / "config.json", content)
        from qerl_jax.compile import program_cache  # It imports JAX, which few commands need.

        program_cache.sign_entries(folder / "programs")


def _without_tag(content: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in content.items() if name != TAG}


def _canonical(content: Mapping[str, Any]) -> bytes:
    """The content as it reads back from JSON, in one order of its keys."""
    return json.dumps(json.loads(json.dumps(content)), sort_keys=True).encode()
