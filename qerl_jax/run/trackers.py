"""The name of a run at Weights & Biases and trackio, which belongs to its folder.

Runs of one config are separate runs there: under a common name, the later rows of one of them would
be dropped. config.json keeps the name, so that a resumed run has the one that it began with.
"""

import json
import re
import secrets
from pathlib import Path

from qerl_jax.errors import UserError
from qerl_jax.run.folder import OpenRun, RunFolder, record_fact
from qerl_jax.system.safe_files import read_bytes

_FACT = "trackers"  # in config.json
_LONGEST = 100  # characters of the name of the folder; W&B takes 128 in all


def tracker_name(folder: OpenRun) -> str:
    """Returns the name of a run at services, and records a new one in its config.json.

    A folder that was moved keeps its name. A copy of a folder that is still there gets another.

    Raises:
        UserError: the config.json of a run that has begun has no name.
    """
    record = _read(folder) if folder.resumed else {}
    if record is None:
        raise UserError(
            f"{folder.config} has no {_FACT!r}, the name of the run at W&B and trackio, which "
            "every run records: restore the file, or pass another --workdir"
        )
    path = str(folder.path.resolve())
    if record.get("folder") == path:
        return record["name"]
    if not record or _read(RunFolder(Path(record["folder"]))) == record:
        plain_name = re.sub(r"[^\w.,=+-]", "-", folder.path.resolve().name)[:_LONGEST]
        record = {"name": f"{plain_name}-{secrets.token_hex(4)}"}
    record = {"name": record["name"], "folder": path}
    record_fact(folder, _FACT, record)
    return record["name"]


def _read(folder: RunFolder) -> dict[str, str] | None:
    """What the config.json of a run says; None where it says nothing, or is absent."""
    try:
        return json.loads(read_bytes(folder.config)).get(_FACT)
    except (OSError, UserError, ValueError, AttributeError, RecursionError):
        return None
