"""Files and folders at paths that another user may have filled, such as a run folder.

A folder that was copied, downloaded or unpacked may hold a symbolic link, a pipe or a device where
a file is written, or where a folder is emptied. What is written here goes through no link, and
nothing waits for a pipe: such a path is refused, and what a link names stays as it is. The path of
a folder that a user names may itself pass through links; the paths inside of it may not.
"""

import hashlib
import io
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from qerl_jax.errors import UserError

_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_file(path: Path) -> None:
    """Refuses the path of a file if it is something else; a missing file is accepted.

    Raises:
        UserError: a link, a folder or another odd type is there.
    """
    _check(path, stat.S_IFREG)


def check_folder(path: Path) -> None:
    """Refuses the path of a folder if it is something else; a missing folder is accepted.

    Raises:
        UserError: a link, a file or another odd type is there.
    """
    _check(path, stat.S_IFDIR)


def check_inside(root: Path, path: Path) -> None:
    """Refuses the path of a folder below `root` if a part of it is no plain folder.

    The root may be a link, the folder need not exist, and one elsewhere is not looked at.

    Raises:
        UserError: a part below `root` is a link, a file or another odd type.
    """
    if path.is_relative_to(root):
        for part in (*reversed(path.relative_to(root).parents), path.relative_to(root)):
            if part.parts:
                check_folder(root / part)


def check_tree(folder: Path) -> None:
    """Refuses a folder that is, or holds at any depth, something else than files and folders.

    A library that writes, overwrites and removes in a folder may follow links in it.

    Raises:
        UserError: the folder, or a path in it, is a link or another odd type.
    """
    check_folder(folder)
    for entry in _entries(folder):
        if not entry.is_dir(follow_symlinks=False):
            check_file(Path(entry.path))


def open_to_write(path: Path, mode: str, *, encoding: str | None = None) -> IO[Any]:
    """Opens a file as `open` does, through no link.

    Raises:
        UserError: a link, a folder or another odd type is there.
        OSError: as `open` raises it.
    """
    check_file(path)
    return open(path, mode, encoding=encoding, opener=_open_no_link)


def open_to_read(path: Path) -> io.BufferedReader:
    """Opens a file to read bytes; a link to a file is followed.

    Raises:
        UserError: it is a folder, a pipe or another odd type, for which a reader could wait.
        OSError: as `open` raises it.
    """
    check_readable(path)
    return open(path, "rb", opener=_open_at_once)


def check_readable(path: Path) -> None:
    """Refuses to read what is no file, nor a link to one.

    Raises:
        UserError: it is a folder, a pipe or another odd type.
        OSError: it is missing, or its type cannot be read.
    """
    kind = stat.S_IFMT(os.stat(path).st_mode)
    if kind != stat.S_IFREG:
        raise UserError(f"{path} is {_KINDS.get(kind, 'no file')}, not a file: remove it")


def read_bytes(path: Path) -> bytes:
    """Reads a file whole; raises as `open_to_read` does."""
    with open_to_read(path) as file:
        return file.read()


def sha256_of(path: Path) -> str:
    """Returns the SHA-256 of a file in hex digits; raises as `open_to_read` does."""
    with open_to_read(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_text(path: Path, *, errors: str = "strict") -> str:
    """Reads a file of UTF-8 whole; raises as `open_to_read` does, and UnicodeDecodeError."""
    return read_bytes(path).decode("utf-8", errors).replace("\r\n", "\n")


def make_folder(path: Path) -> None:
    """Makes a folder and its missing parents; one that exists stays.

    Raises:
        UserError: a link, a file or another odd type is there.
        OSError: it cannot be made.
    """
    check_folder(path)
    path.mkdir(parents=True, exist_ok=True)


def remove_tree(path: Path) -> None:
    """Removes a file, or a folder with all that it holds.

    Raises:
        UserError: the path itself is a link or another odd type; links inside are removed as such.
        OSError: it cannot be removed.
    """
    if path.is_dir():
        check_folder(path)
        shutil.rmtree(path)  # It follows no link.
    else:
        check_file(path)
        path.unlink()


def _check(path: Path, expected_kind: int) -> None:
    try:
        kind = stat.S_IFMT(os.lstat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return
    if kind != expected_kind:
        raise UserError(
            f"{path} is {_KINDS.get(kind, 'of an odd type')} and not {_KINDS[expected_kind]}: "
            "nothing is written or removed there; move it away and run the command again"
        )


def _open_no_link(name: str, flags: int) -> int:
    return _open_at_once(name, flags | os.O_NOFOLLOW)


def _open_at_once(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NONBLOCK, 0o666)


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Everything in a folder at any depth, through no link."""
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:  # It was never made, or another process has just removed it.
        return
    for entry in entries:
        yield entry
        if entry.is_dir(follow_symlinks=False):
            yield from _entries(Path(entry.path))
