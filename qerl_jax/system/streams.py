"""Standard streams: whether they are terminals, what they can encode, and those that are closed."""

import contextlib
import io
import os
import sys
from typing import TextIO

# Half of a surrogate pair and characters that few encodings have: what an error handler must take.
_HARDEST = "\ud800\u2581\U0001f600"


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream is a terminal; one that is closed, or was when Python started, is not."""
    return stream is not None and not stream.closed and stream.isatty()


def encodable(text: str, stream: TextIO | None) -> str:
    """Returns a text as a stream shows it, with a replacement for what its encoding lacks."""
    encoding = getattr(stream, "encoding", None)
    if stream is None or not encoding:  # A buffer of text, which takes any.
        return text
    return text.encode(encoding, _handler(stream)).decode(encoding, "replace")


def open_standard_streams() -> None:
    """Gives a command standard streams that are open, and that write any text and read any bytes.

    Python has None for a stream that the shell has closed, as by `2>&-`: printing to it fails or
    goes to stdout, and the next file that is opened gets the number of the stream, with all that
    libraries write there.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # the lowest number that is free
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))
        elif not isinstance(stream, io.TextIOWrapper):
            continue
        elif name != "stdin":
            stream.reconfigure(errors=_handler(stream))
        elif stream.errors == "strict":
            # What is no text becomes surrogates, which are refused by name where they matter.
            stream.reconfigure(errors="surrogateescape")


def drop_unwritten(stream: TextIO) -> None:
    """Discards what a stream cannot write, which would fail again when Python ends."""
    try:
        stream.flush()
    except OSError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _handler(stream: TextIO) -> str:
    """Returns the error handler of a stream, or 'replace' where its own one raises an error."""
    with contextlib.suppress(UnicodeError, LookupError):
        _HARDEST.encode(stream.encoding, stream.errors or "strict")
        return stream.errors or "strict"
    return "replace"
