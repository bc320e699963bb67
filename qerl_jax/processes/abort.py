"""A last line where JAX's runtime aborts the process.

When process 0 is lost, the runtime of another process ends it at once, from a thread of C++, with
thirty lines that name no process. No Python code runs then but a handler of SIGABRT that ctypes
makes: a handler of the module `signal` waits for the main thread.
"""

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Generator

_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)


@contextlib.contextmanager
def line_on_abort(line: Callable[[], str | None]) -> Generator[None]:
    """Ends an aborted process with a line while the block runs; none for None, another reason."""

    def handle(signum: int) -> None:
        del signum
        text = line()
        if text is not None:
            os.write(2, f"{text}\n".encode())
            os._exit(1)

    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    handler = _HANDLER(handle)
    before = libc.signal(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))
    try:
        yield
    finally:
        libc.signal(signal.SIGABRT, before)
