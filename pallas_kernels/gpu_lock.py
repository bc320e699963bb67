"""One measurement at a time on a GPU that several commands use."""

import contextlib
import fcntl
import pathlib
import tempfile
import time
from collections.abc import Iterator

_PAUSE = 0.01  # seconds for a waiting command to take the lock before this one asks again


@contextlib.contextmanager
def sole_use() -> Iterator[None]:
    """Holds the lock by which commands of this machine take turns on the GPU.

    A command that holds the lock must not ask for it again.
    """
    path = pathlib.Path(tempfile.gettempdir()) / "sole_use_of_gpu.lock"
    if not path.exists():
        path.touch()
    with path.open(encoding="utf-8") as file:  # the file of any user
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    time.sleep(_PAUSE)
