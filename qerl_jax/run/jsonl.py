"""JSONL: files of one JSON object per line, to which a process appends until it ends."""

import json
from pathlib import Path
from typing import Any

from qerl_jax.errors import UserError
from qerl_jax.safe_files import read_bytes


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """Reads a JSONL file; an incomplete last line, as a killed process leaves it, is left out.

    Raises:
        UserError: the file is missing, or a line before the last is not JSON.
    """
    path = Path(path)
    try:
        lines = read_bytes(path).split(b"\n")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    while lines and not lines[-1].strip():
        lines.pop()
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            if number == len(lines):
                break
            raise UserError(f"{path} is damaged: line {number} is not JSON ({error})") from error
    return rows
