"""Folders that appear complete or not at all."""

import contextlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Generator

from safetensors import SafetensorError

from qerl_jax.errors import UserError
from qerl_jax.system.locks import InUseError, hold
from qerl_jax.system.safe_files import check_folder, make_folder, remove_tree


def check_free(folder: pathlib.Path | str) -> None:
    """Refuses a target that exists, so that nothing is ever overwritten, or that cannot be made.

    An empty folder is accepted.

    Raises:
        UserError: the path is taken by a file or by a folder that is not empty, or as in
            `check_writable`.
    """
    folder = pathlib.Path(folder)
    check_writable(folder)
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists() or folder.is_symlink():
        raise UserError(f"{folder} exists already; remove it or choose another folder")


def check_writable(target: pathlib.Path) -> None:
    """Refuses a file or folder that cannot be written, before the work whose result it will hold.

    Both are made under another name and renamed, so that the parent must be writable. Missing
    parents are not made yet.

    Raises:
        UserError: nothing can be made in the nearest parent that exists, or it is a file.
    """
    try:
        parent = next(path for path in target.absolute().parents if path.exists())
        # It is tried: root writes where permissions say no, and no user on a read-only disk.
        tempfile.TemporaryFile(dir=parent).close()
    except OSError as error:
        raise UserError(
            f"{target}: could not be written: {error.strerror}; choose another path"
        ) from error


@contextlib.contextmanager
def staged_folder(folder: pathlib.Path | str, *, replace: bool = False) -> Generator[pathlib.Path]:
    """Yields an empty folder next to `folder`, which becomes `folder` when the block succeeds.

    When the block raises, its files are removed. The files of a killed process are removed by the
    next process that writes to the same path.

    Args:
        folder: target path; missing parents are created.
        replace: whether to replace an existing folder, by two renames, instead of refusing it.

    Raises:
        UserError: the target exists, it or the scratch folder is a link, another process writes
            to it, or the disk is full or broken.
    """
    folder = pathlib.Path(folder)
    if replace:
        check_folder(folder)
    else:
        check_free(folder)
    scratch = scratch_of(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock_scratch(scratch):
            new_folder = scratch / "new"
            new_folder.mkdir()
            yield new_folder
            for path in (*new_folder.rglob("*"), new_folder):
                _sync(path)
            if replace and folder.exists():
                os.replace(folder, scratch / "old")
            os.replace(new_folder, folder)
        _sync(folder.parent)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder}: could not be written: {error}") from error


def scratch_of(folder: pathlib.Path) -> pathlib.Path:
    """The folder in which `staged_folder` writes another one, next to it."""
    return folder.with_name(f".{folder.name}.partial")


def make_readable(path: pathlib.Path) -> None:
    """Gives a file the read and write permissions of its folder.

    safetensors creates files that only their owner can read.
    """
    path.chmod(path.parent.stat().st_mode & 0o666)


@contextlib.contextmanager
def _lock_scratch(scratch: pathlib.Path) -> Generator[None]:
    """Creates and locks an empty scratch folder, and removes it in the end."""
    make_folder(scratch)
    descriptor = os.open(scratch, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
    try:
        with hold(descriptor, scratch, remedy="write it to a folder"):
            try:
                for path in scratch.iterdir():  # left by a process that was killed
                    remove_tree(path)
                yield
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    except InUseError as error:
        writer = "this process" if error.here else "another process"
        raise UserError(f"{scratch} is in use: {writer} writes there; wait for it") from error
    finally:
        os.close(descriptor)


def _sync(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
