"""The error that means: what was asked for cannot be done, and the message says what to change."""

import math
from collections.abc import Mapping


class UserError(Exception):
    """Bad input: a config value, a file, a folder. Shown as one line, without a traceback."""


def check_limits(limits: Mapping[str, tuple[float, ...]]) -> None:
    """Refuses numbers out of range, NaN and infinities among them.

    Args:
        limits: of flags or config fields by name: what was given, the least, and the most if there
            is one.

    Raises:
        UserError: one is out of range.
    """
    for name, (value, least, *most) in limits.items():
        if not least <= value < math.inf or any(value > limit for limit in most):
            allowed = f"from {least} to {most[0]}" if most else f"at least {least}"
            raise UserError(f"{name}={value}: it must be {allowed}")


def first_line(error: BaseException) -> str:
    """The first line of an error's message; '' when it has none."""
    return (str(error).strip().splitlines() or [""])[0]
