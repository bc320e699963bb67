"""Text of a model or a data set, broken into lines of a column."""

import unicodedata


def width(text: str) -> int:
    """Columns that a text takes on a terminal: two for wide characters, none for combining ones."""
    return sum(
        0
        if unicodedata.combining(character)
        else 1 + (unicodedata.east_asian_width(character) in "WF")
        for character in text
    )


def wrap(text: str, columns: int) -> list[str]:
    """The lines of a safe text, broken at spaces where possible; none is wider than the column."""
    lines = []
    for line in text.expandtabs(4).split("\n"):
        start = 0
        while (end := _fitting(line, start, columns)) < len(line):
            # A break is at a space, unless there are only spaces before it.
            space = line.rfind(" ", start + 1, end + 1)
            cut = space if space > start and line[start:space].strip() else end
            lines.append(line[start:cut].rstrip())
            start = cut + (line[cut] == " ")
        lines.append(line[start:])
    return lines


def _fitting(line: str, start: int, columns: int) -> int:
    """The end of the longest part of a line from `start` on that fits into some columns."""
    end, left = start, columns
    while end < len(line) and (left := left - width(line[end])) >= 0:
        end += 1
    return end


def pad(text: str, columns: int) -> str:
    """The text filled with spaces up to a width."""
    return text + " " * max(0, columns - width(text))


def shorten(text: str, columns: int) -> str:
    """A line of safe text, or its beginning and three dots where it is wider than the columns."""
    if _fitting(text, 0, columns) == len(text):
        return text
    return f"{text[: _fitting(text, 0, columns - 3)]}..."
