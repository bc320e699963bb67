"""One measurement at a time on a GPU that several commands share."""

import contextlib
import fcntl
import pathlib
import tempfile
import time
from collections.abc import Iterator

_PAUSE = 0.01  # seconds in which somebody who waits gets it, before who had it asks again


@contextlib.contextmanager
def sole_use() -> Iterator[None]:
    """Keeps other commands of this machine from the GPU, those that ask for it like this.

    A command that has it must not ask again.
    """
    path = pathlib.Path(tempfile.gettempdir()) / "sole_use_of_gpu.lock"
    if not path.exists():
        path.touch()
    with path.open(encoding="utf-8") as file:  # which may be another user's
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    time.sleep(_PAUSE)
