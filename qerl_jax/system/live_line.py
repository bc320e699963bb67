"""A live line of progress on the terminal."""

import contextlib
import math
import shutil
import sys
import threading
import time
from collections.abc import Callable, Generator
from typing import Protocol, TextIO

from qerl_jax.errors import visible

_QUIET_SECONDS = 1.0  # what ends earlier leaves no line


class Progress(Protocol):
    """The state of work that takes long."""

    @property
    def text(self) -> str:
        """The state as a line of text; '' for work that failed."""
        ...

    @property
    def seconds(self) -> float:
        """Seconds since the work began."""
        ...

    @property
    def done(self) -> bool:
        """Whether the work has ended."""
        ...


def progress_line(
    stream: TextIO | None = None, *, every: float = 5.0
) -> Callable[[Progress], None]:
    """Returns a function that shows the state of work, called often and once in the end.

    On a terminal one line is rewritten in place; elsewhere a line is written at most every few
    seconds. The last state stays as a line, unless the work failed or took less than a second.

    Args:
        stream: where to write; stderr when None.
        every: the least time between two lines where no line can be rewritten, in seconds.
    """
    stream = sys.stderr if stream is None else stream
    live, last = LiveLine(stream), 0.0

    def show(state: Progress) -> None:
        nonlocal last
        if state.done:
            live.clear()
            if state.text and state.seconds >= _QUIET_SECONDS:
                print(visible(state.text), file=stream, flush=True)
        elif stream.isatty():
            live.update(state.text)
        elif state.seconds - last >= every:
            last = state.seconds
            print(visible(state.text), file=stream, flush=True)

    return show


class LiveLine:
    """A line of progress that is rewritten in place on a terminal, and silent elsewhere.

    Args:
        stream: where to write; stderr when None.
        interval: the least time between two writes, in seconds.
    """

    def __init__(self, stream: TextIO | None = None, *, interval: float = 0.1):
        self._stream = sys.stderr if stream is None else stream
        self._interval = interval
        self._enabled = self._stream.isatty()
        self._last = -math.inf

    def update(self, text: str) -> None:
        """Shows `text` in place of the last text, for example 'rollout 37/64 rows, 512 tok/s'."""
        now = time.monotonic()
        if not self._enabled or now - self._last < self._interval:
            return
        self._last = now
        columns = shutil.get_terminal_size().columns
        self._stream.write(f"\r\x1b[K{visible(text)[: columns - 1]}")
        self._stream.flush()

    def clear(self) -> None:
        """Removes the line; call it before printing anything else."""
        if self._enabled:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._last = -math.inf


@contextlib.contextmanager
def waiting(
    text: str, *, stream: TextIO | None = None, every: float = 5.0, shows: bool = True
) -> Generator[Callable[[str], None]]:
    """Says what is waited for while the block runs, with the seconds since it began.

    On a terminal one line is rewritten in place and removed in the end; elsewhere a line is written
    every few seconds. A thread does it, so that work shows that never calls back.

    Args:
        text: what is waited for, such as 'compiling programs'.
        stream: where to write; stderr when None.
        every: the time between two lines where no line can be rewritten, in seconds.
        shows: whether anything is written; of several processes one does.

    Yields:
        A function that replaces the text.
    """
    stream = sys.stderr if stream is None else stream
    live, began, current, ends = LiveLine(stream), time.monotonic(), [text], threading.Event()

    def show() -> None:
        while not ends.wait(_QUIET_SECONDS if stream.isatty() else every):
            line = f"{current[0]}, {time.monotonic() - began:.0f} s"
            with contextlib.suppress(OSError, ValueError):  # The stream is closed.
                if stream.isatty():
                    live.update(line)
                else:
                    print(visible(line), file=stream, flush=True)

    def say(text: str) -> None:
        current[0] = text

    thread = threading.Thread(target=show, daemon=True)
    if shows:
        thread.start()
    try:
        yield say
    finally:
        ends.set()
        if shows:
            thread.join()
            live.clear()
