"""A live line of progress on the terminal."""

import math
import shutil
import sys
import time
from collections.abc import Callable
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
