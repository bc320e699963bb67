"""Signals as a request to stop at the next safe point.

They are Ctrl-C, a terminal that is closed, and those with which job schedulers end a job or warn
that its time is nearly over. A signal that a process was started to ignore, as by nohup, is none.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator

PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux
_ENDS = signal.SIGTERM, signal.SIGINT
# A program may use these otherwise, such as to print its stacks; then they do not stop it.
_WARNINGS = signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU
STOP_SIGNALS = _ENDS + _WARNINGS


class StoppedError(Exception):
    """A signal asked the run to end; its progress is saved."""

    def __init__(self, signum: int):
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.exit_code = 128 + signum


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collects `STOP_SIGNALS` instead of ending the process; the second SIGINT interrupts.

    Yields:
        The list of the signals that have arrived; it grows while the block runs.
    """
    signals: list[int] = []

    def handle(signum, frame):
        del frame
        if signals and signum == signal.SIGINT:
            raise KeyboardInterrupt
        if signum not in signals:
            signals.append(signum)
            _say(signum, "saving and stopping")

    with _handled(handle, STOP_SIGNALS):
        yield signals


def exit_on_stop_signals() -> contextlib.AbstractContextManager[None]:
    """Lets `STOP_SIGNALS` end the process by an exception, so that unfinished folders are removed.

    SIGINT does so by itself.
    """
    numbers = [number for number in STOP_SIGNALS if number != signal.SIGINT]

    def handle(signum, frame):
        del frame
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)  # The folders are removed as a whole.
        _say(signum, "stopping")
        sys.exit(128 + signum)

    return _handled(handle, numbers)


@contextlib.contextmanager
def _handled(handle: Callable[..., None], numbers: Iterable[int]) -> Iterator[None]:
    """Handles those of the signals that this process does not ignore and has no other use for."""
    before = {number: signal.getsignal(number) for number in numbers}
    if threading.current_thread() is not threading.main_thread():
        before.clear()
    for number, handler in list(before.items()):
        if handler is signal.SIG_IGN or (number in _WARNINGS and handler is not signal.SIG_DFL):
            del before[number]
        else:
            signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            # None stands for a handler that is not Python's, which cannot be set again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _say(signum: int, what: str) -> None:
    """Prints what happens after a signal.

    It may arrive while the process writes to stderr, which then refuses a second write, or after
    the terminal was closed, to which every write fails. The run is saved all the same.
    """
    with contextlib.suppress(OSError, ValueError):
        poll = select.poll()
        for stream in (1, 2):
            poll.register(stream, 0)
        for stream, event in poll.poll(0):
            if event & (select.POLLERR | select.POLLHUP):
                with open(os.devnull, "wb") as null:
                    os.dup2(null.fileno(), stream)
    with contextlib.suppress(OSError, RuntimeError, ValueError, AttributeError):
        print(f"\n{signal.Signals(signum).name}: {what}", file=sys.stderr, flush=True)


def after_parent(signum: int) -> Callable[[], None]:
    """Returns a `preexec_fn` by which Linux sends the new process a signal when this one dies.

    The new process does not ignore that signal, even where this one does.
    """
    if sys.platform != "linux":
        return lambda: None
    libc, parent = ctypes.CDLL(None), os.getpid()

    def ask() -> None:
        if signum != signal.SIGKILL:
            signal.signal(signum, signal.SIG_DFL)
        libc.prctl(PARENT_DEATH_SIGNAL, signum)
        if os.getppid() != parent:  # It has died before.
            os._exit(1)

    return ask
