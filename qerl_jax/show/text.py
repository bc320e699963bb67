"""Text of a model or a data set, made safe to print, and broken into lines of a column."""

import re
import unicodedata

# What a terminal obeys or a reader cannot see: control characters but for line feed and tab, half
# of a surrogate pair, and the characters that reverse the direction of the text after them.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)


def visible(text: object) -> str:
    r"""The text with control characters as escapes, such as `\x1b`; lines and tabs stay."""
    return _UNSAFE.sub(lambda found: ascii(found[0])[1:-1], str(text))


def width(text: str) -> int:
    """Columns that a text takes on a terminal: two for wide characters, none for combining ones."""
    return sum(
        0
        if unicodedata.combining(character)
        else 1 + (unicodedata.east_asian_width(character) in "WF")
        for character in text
    )


def wrap(text: str, columns: int) -> list[str]:
    """The lines of a text, broken at spaces where that is possible; no line is wider than a column.

    Args:
        text: safe text, as `visible` returns it.
        columns: width of the column, at least 2.
    """
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
