"""Locks of open files and folders, which end when these are closed, or their process ends.

A lock belongs to the opened file: two runs of one process exclude each other as two processes do,
and a file that is opened and closed elsewhere in the process, such as by a copy of its folder,
keeps its lock. POSIX locks (`fcntl.lockf`) belong to the process and do neither.
"""

import contextlib
import errno
import fcntl
import os
import struct
import threading
from collections.abc import Callable, Generator
from pathlib import Path

from qerl_jax.errors import UserError

_held: dict[int, os.stat_result] = {}  # what each descriptor has locked
# Held while a thread locks and notes it in `_held`, so that another one sees both or neither.
_one_thread = threading.Lock()


class InUseError(Exception):
    """Another run or command holds the lock; `here` says whether in this process."""

    def __init__(self, *, here: bool):
        super().__init__("in use")
        self.here = here


@contextlib.contextmanager
def hold(
    descriptor: int, path: Path, *, remedy: str, on_wait: Callable[[], None] | None = None
) -> Generator[None]:
    """Locks an open file or folder while the block runs, alone among all processes and threads.

    Args:
        descriptor: the open file or folder; a file is open for writing.
        path: where it was opened.
        remedy: what the error of a file system without locks tells the user to do.
        on_wait: called before this process waits for a lock that is held; None is not to wait.

    Raises:
        InUseError: another process or thread holds the lock, or has removed the path.
        UserError: the file system has no locks, or they do not work.
    """
    about = os.fstat(descriptor)
    try:
        with _one_thread:
            here = any(os.path.samestat(about, other) for other in _held.values())
            is_locked = _try_to_lock(descriptor)
            if is_locked:
                _note(descriptor, about, path)
        if not is_locked:
            if on_wait is None:
                raise InUseError(here=here)
            on_wait()
            _lock(descriptor, waits=True)
            with _one_thread:
                _note(descriptor, about, path)
    except OSError as error:
        raise UserError(
            f"{path} cannot be locked: {error.strerror}; {remedy} on a file system with locks, "
            "such as a local disk (NFS needs its lock service, Lustre the mount option flock)"
        ) from error
    if descriptor not in _held:  # The holder before has removed it.
        raise InUseError(here=here)
    try:
        yield
    finally:
        with _one_thread:
            del _held[descriptor]


def _note(descriptor: int, about: os.stat_result, path: Path) -> None:
    """Notes that a descriptor has locked what its path still names."""
    with contextlib.suppress(OSError):
        if os.path.samestat(about, os.stat(path)):
            _held[descriptor] = about


def _try_to_lock(descriptor: int) -> bool:
    """Locks what a descriptor has opened; False where the lock is held."""
    try:
        _lock(descriptor, waits=False)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True


def _lock(descriptor: int, *, waits: bool) -> None:
    """Locks what a descriptor has opened.

    Raises:
        OSError: EAGAIN or EACCES where the lock is held; others where locks do not work.
    """
    if hasattr(fcntl, "F_OFD_SETLK"):  # Linux
        request = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLKW if waits else fcntl.F_OFD_SETLK, request)
            return
        except OSError as error:
            # A folder, which cannot be open for writing; or a kernel without these locks.
            if error.errno not in (errno.EBADF, errno.EINVAL):
                raise
    fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))


def _leave_to_parent() -> None:
    """Closes the locked files of a child without a program of its own, which would keep the locks.

    So a killed run can be resumed while its orphans still run.
    """
    global _one_thread
    _one_thread = threading.Lock()  # Another thread of the parent may have held it.
    for descriptor in _held:
        os.close(descriptor)  # First, as the limit of open files may leave no other number.
        null = os.open(os.devnull, os.O_RDWR)
        if null != descriptor:
            os.dup2(null, descriptor, inheritable=False)
            os.close(null)
    _held.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
