"""Files that hold their old content or the new one, whenever the process dies."""

import contextlib
import json
import os
import secrets
import socket
from collections.abc import Generator
from pathlib import Path
from typing import Any

from qerl_jax.system.safe_files import check_file, make_folder, open_to_write

TEMPORARY = ".tmp"  # the end of the names of files that are being written


def write_atomic(path: Path, text: str) -> None:
    """Replaces the content of a file by `text`, through a temporary file that is renamed."""
    with replace_file(path) as temporary, open_to_write(temporary, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, value: Any, *, indent: int = 2) -> None:
    """Replaces the content of a file by a value as JSON; makes the folder if it is missing."""
    make_folder(path.parent)
    write_atomic(path, json.dumps(value, indent=indent) + "\n")


@contextlib.contextmanager
def replace_file(path: Path) -> Generator[Path]:
    """Yields the path of a temporary file, which replaces `path` when the block succeeds.

    Processes that write the same file at the same time each have a temporary file, and the last
    rename wins. The name holds the host and the process, which tells the source of a file that a
    killed process left, and random digits, because containers may share both.

    Raises:
        UserError: the path holds a link, a folder or another odd type.
    """
    check_file(path)
    writer = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    temporary = path.with_name(f"{path.name}.{writer}{TEMPORARY}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
