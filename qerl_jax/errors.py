"""The error for requests that cannot be fulfilled; its message says what to change."""

import contextlib
import errno
import math
import re
from collections.abc import Generator, Mapping

# What a terminal obeys or a reader cannot see: control characters but for line feed and tab, half
# of a surrogate pair, and the characters that reverse the direction of the text after them.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)
_FULL = errno.ENOSPC, errno.EDQUOT  # a full disk, and a full quota of the user


class UserError(Exception):
    """Bad input, such as a config value, a file or a folder; shown as one line, no traceback."""


def check_limits(limits: Mapping[str, tuple[float, ...]]) -> None:
    """Refuses numbers out of range, including NaN and infinities.

    Args:
        limits: value, lower limit and, optionally, upper limit of each flag or config field, by
            name; an upper limit of infinity allows infinity.

    Raises:
        UserError: a value is out of range.
    """
    for name, (value, lower, *upper) in limits.items():
        if not lower <= value or not (value <= upper[0] if upper else value < math.inf):
            bounded = upper and upper[0] < math.inf
            expected = f"from {lower} to {upper[0]}" if bounded else f"at least {lower}"
            if value == math.inf:
                expected = f"finite and {expected}"
            raise UserError(f"{name}={value}: it must be {expected}")


def check_unicode(text: str, location: str) -> None:
    """Refuses text that cannot be written as UTF-8, such as half of an escaped pair in JSON.

    Args:
        text: text from a file, a config or the command line.
        location: what the message calls the text, such as 'train.jsonl:3: question'.

    Raises:
        UserError: the text holds a lone surrogate.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{location}: not valid Unicode: character {error.start + 1} is the lone surrogate "
            f"{ascii(text[error.start])[1:-1]}; write the text in UTF-8"
        ) from error


@contextlib.contextmanager
def memory_errors(message: str) -> Generator[None]:
    """Turns JAX's error for a device out of memory into a UserError.

    Args:
        message: what did not fit, and which option to lower.
    """
    try:
        yield
    except Exception as error:
        # The class is compared by name: this module must not import JAX.
        if type(error).__name__ != "JaxRuntimeError" or "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise UserError(f"the device is out of memory: {message}") from error


def user_text(error: BaseException) -> str:
    """What an error says of bad input or of a full disk, to which the user has a remedy.

    Returns:
        The text; '' for another error.
    """
    if isinstance(error, OSError) and error.errno in _FULL:
        return f"no disk space: {error.filename or error}; free some and run the command again"
    return str(error) if isinstance(error, UserError) else ""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, safe to print; '' for an error without a message."""
    return visible((str(error).strip().splitlines() or [""])[0])


def visible(text: object) -> str:
    r"""The text with control characters as escapes, such as `\x1b`; lines and tabs stay."""
    return _UNSAFE.sub(lambda match: ascii(match[0])[1:-1], str(text))
