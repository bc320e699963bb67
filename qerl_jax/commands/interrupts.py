"""Ctrl-C while a command imports its modules: one line and exit code 130, as at any other time.

Python raises a KeyboardInterrupt in whatever it executes. In an import that ends in a traceback of
the import system, an extension module turns it into an ImportError, or a callback swallows it.
Nothing is worth cleaning up there, so the process ends at once.
"""

import os
import signal
from types import FrameType

_IMPORT_SYSTEM = "<frozen importlib"


def end_imports_on_interrupt() -> None:
    """Ends the process in one line when SIGINT arrives during an import; else nothing changes.

    A process that ignores SIGINT, as one that a shell started in the background, still ignores it.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _handle)


def _handle(signum: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_filename.startswith(_IMPORT_SYSTEM):
            os.write(2, b"interrupted\n")
            os._exit(128 + signum)
        frame = frame.f_back
    raise KeyboardInterrupt
