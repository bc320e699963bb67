"""The error that means: what was asked for cannot be done, and the message says what to change."""


class UserError(Exception):
    """Bad input: a config value, a file, a folder. Shown as one line, without a traceback."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message; '' when it has none."""
    return (str(error).strip().splitlines() or [""])[0]
