"""A live line of progress on the terminal."""

import contextlib
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from typing import Protocol, TextIO

from qerl_jax.errors import visible
from qerl_jax.system.streams import encodable, is_terminal

_QUIET_SECONDS = 1.0  # what ends earlier leaves no line
_CLEAR = "\r\x1b[K"
# The program of a process that writes each line of its input after a text.
_PASS_ON = """
import sys
for line in sys.stdin.buffer:
    sys.stdout.buffer.write(sys.argv[1].encode() + line.rstrip(b"\\n") + b"\\n")
    sys.stdout.flush()
"""


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
                _say(state.text, stream)
        elif is_terminal(stream):
            live.update(state.text)
        elif state.seconds - last >= every:
            last = state.seconds
            _say(state.text, stream)

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
        self._enabled = is_terminal(self._stream)
        self._last = -math.inf

    def update(self, text: str) -> None:
        """Shows `text` in place of the last text, for example 'rollout 37/64 rows, 512 tok/s'."""
        now = time.monotonic()
        if not self._enabled or now - self._last < self._interval:
            return
        self._last = now
        columns = shutil.get_terminal_size().columns
        line = encodable(visible(text), self._stream)[: columns - 1]
        self._stream.write(f"{_CLEAR}{line}")
        self._stream.flush()

    def clear(self) -> None:
        """Removes the line; call it before printing anything else."""
        if self._enabled:
            self._stream.write(_CLEAR)
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
    began, current, ends = time.monotonic(), [text], threading.Event()
    on_terminal = is_terminal(stream)

    def show() -> None:
        with contextlib.ExitStack() as stack:
            live = None
            while not ends.wait(_QUIET_SECONDS if on_terminal else every):
                line = f"{current[0]}, {time.monotonic() - began:.0f} s"
                with contextlib.suppress(OSError, ValueError):  # The stream is closed.
                    if not on_terminal:
                        _say(line, stream)
                        continue
                    live = live or stack.enter_context(_live_line_below_others(stream))
                    live.update(line)

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


def _say(text: str, stream: TextIO | None) -> None:
    if stream is not None:  # `print` would write to stdout.
        print(visible(text), file=stream, flush=True)


@contextlib.contextmanager
def _live_line_below_others(stream: TextIO) -> Generator[LiveLine]:
    """Yields a live line of a terminal; what else is written to stderr meanwhile is above it.

    XLA, for example, says in C++ that a compilation is slow, and writes to the descriptor of
    stderr. The descriptor becomes a pipe to a process that clears the live line before each line.
    It is a process, not a thread, because it also shows the last words of one that crashes.
    """
    with contextlib.ExitStack() as stack:
        if stream is sys.stderr and stream.fileno() == 2:
            stream = stack.enter_context(_stderr_above(stream))
        live = LiveLine(stream)
        stack.callback(live.clear)
        yield live


@contextlib.contextmanager
def _stderr_above(stream: TextIO) -> Generator[TextIO]:
    stream.flush()
    with open(os.dup(2), "w", encoding=stream.encoding, errors=stream.errors) as terminal:
        process = subprocess.Popen(
            [sys.executable, "-ISc", _PASS_ON, _CLEAR],
            stdin=subprocess.PIPE,
            stdout=terminal,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for this process.
        )
        assert process.stdin is not None
        with process.stdin as pipe:
            os.dup2(pipe.fileno(), 2)
        try:
            yield terminal
        finally:
            with contextlib.suppress(OSError):
                stream.flush()
            os.dup2(terminal.fileno(), 2)
            # Processes that were started meanwhile may keep the pipe.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_QUIET_SECONDS)
