"""SIGTERM and SIGINT as a request to stop at the next safe point."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


class StoppedError(Exception):
    """A signal asked the run to end; its progress is saved."""

    def __init__(self, signum: int):
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.exit_code = 128 + signum


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collects SIGTERM and SIGINT instead of ending the process; the second SIGINT interrupts.

    Yields:
        The list of the signals that have arrived; it grows while the block runs.
    """
    signals: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return

    def handle(signum, frame):
        del frame
        if signals and signum == signal.SIGINT:
            raise KeyboardInterrupt
        signals.append(signum)
        # The signal may arrive while the process writes to stderr, which then refuses a second
        # write, or after the terminal was closed. The run is saved all the same.
        with contextlib.suppress(OSError, RuntimeError, ValueError, AttributeError):
            text = f"\n{signal.Signals(signum).name}: saving and stopping"
            print(text, file=sys.stderr, flush=True)

    handlers = {signum: signal.signal(signum, handle) for signum in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield signals
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


def after_parent(signum: int) -> Callable[[], None]:
    """Returns a `preexec_fn` by which Linux sends the new process a signal when this one dies."""
    if sys.platform != "linux":
        return lambda: None
    libc, parent = ctypes.CDLL(None), os.getpid()

    def ask() -> None:
        libc.prctl(_PARENT_DEATH_SIGNAL, signum)
        if os.getppid() != parent:  # It has died before.
            os._exit(1)

    return ask
