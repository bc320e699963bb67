"""The error that means: what was asked for cannot be done, and the message says what to change."""

import contextlib
import math
from collections.abc import Generator, Mapping


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
            if value == math.inf:
                allowed = f"finite and {allowed}"
            raise UserError(f"{name}={value}: it must be {allowed}")


@contextlib.contextmanager
def memory_errors(message: str) -> Generator[None]:
    """Turns what JAX raises where a device has no memory left into a UserError.

    Args:
        message: what did not fit, and what to lower.
    """
    try:
        yield
    except Exception as error:
        # By name, as this module is imported where JAX is not.
        if type(error).__name__ != "JaxRuntimeError" or "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise UserError(f"the device is out of memory: {message}") from error


def first_line(error: BaseException) -> str:
    """The first line of an error's message; '' when it has none."""
    return (str(error).strip().splitlines() or [""])[0]
