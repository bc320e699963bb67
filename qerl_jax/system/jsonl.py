"""JSONL: files of one JSON object per line, to which a process appends until it ends."""

import json
from pathlib import Path
from typing import Any, TypeGuard

from qerl_jax.errors import UserError, first_line
from qerl_jax.system.safe_files import read_bytes


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """Reads a JSONL file; an incomplete last line, as a killed process leaves it, is left out.

    A damaged file may also hold lines of JSON that are no objects, which no run writes.

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
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                break
            raise UserError(f"{path} is damaged: line {number} is not JSON ({error})") from error
    return rows


def read_rows_of_steps(path: str | Path) -> list[dict[str, Any]]:
    """Reads a JSONL file in which every row names its step, as `read_jsonl` does.

    Raises:
        UserError: as `read_jsonl` raises it, or a row has no whole number as its step.
    """
    rows = read_jsonl(path)
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            raise UserError(f"{path} is damaged: line {number} has no whole number as its step")
    return rows


def read_number(path: Path, name: str) -> int | float:
    """Reads a number of the JSON object in a file by its key.

    Raises:
        UserError: the file is missing, or holds no such number.
    """
    try:
        found = json.loads(read_bytes(path))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {first_line(error)}; remove it") from error
    value = found.get(name) if isinstance(found, dict) else None
    if not is_number(value):
        raise UserError(f"{path} is damaged: it has no number {name!r}; remove it")
    return value


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether a value of a row is a number that can be drawn; null and NaN are missing values.

    Sums of numbers up to 1e300, which no run reaches, stay finite.
    """
    return isinstance(value, int | float) and type(value) is not bool and abs(value) <= 1e300
