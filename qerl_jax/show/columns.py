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
        while width(line) > columns:
            end, used = 0, 0
            while used + width(line[end]) <= columns:
                used += width(line[end])
                end += 1
            space = line.rfind(" ", 1, end + 1)
            cut = space if space > 0 and line[:space].strip() else end
            lines.append(line[:cut].rstrip())
            line = line[cut:].removeprefix(" ")
        lines.append(line)
    return lines


def pad(text: str, columns: int) -> str:
    """The text filled with spaces up to a width."""
    return text + " " * max(0, columns - width(text))


def shorten(text: str, columns: int) -> str:
    """A line of safe text, or its beginning and three dots where it is wider than the columns."""
    if width(text) <= columns:
        return text
    while text and width(text) > columns - 3:
        text = text[:-1]
    return f"{text}..."
