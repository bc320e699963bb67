"""Reads the JSON files of a checkpoint."""

import json
import pathlib
from typing import Any

from qerl_jax.errors import UserError, first_line
from qerl_jax.system.safe_files import read_bytes

_MAX_BYTES = 16 << 20


def read_object(path: pathlib.Path, *, remedy: str = "restore it") -> dict[str, Any]:
    """Reads the JSON object in a file; the remedy is for the error of a missing one.

    Raises:
        UserError: the file cannot be read, is too large, or does not hold a JSON object.
    """
    try:
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise UserError(f"{path}: {size} bytes; at most {_MAX_BYTES} are read")
        return parse_object(path, read_bytes(path))
    except FileNotFoundError as error:
        raise UserError(f"{path.parent} has no {path.name}: {remedy}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def parse_object(path: pathlib.Path, text: bytes) -> dict[str, Any]:
    """Parses a JSON object from the bytes of a file, which errors name.

    Raises:
        UserError: the bytes do not hold a JSON object, or a key occurs twice in an object.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys)
        # JSON allows an escape for half a surrogate pair, which cannot be encoded as text.
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: malformed JSON: {first_line(error):.300}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: malformed JSON: expected an object")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key occurs twice")
    return value
