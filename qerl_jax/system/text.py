"""Text from outside, such as a completion or the message of a user's function, for a terminal."""

import re

# What a terminal obeys or a reader cannot see: control characters but for line feed and tab, half
# of a surrogate pair, and the characters that reverse the direction of the text after them.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)


def visible(text: object) -> str:
    r"""The text with control characters as escapes, such as `\x1b`; lines and tabs stay."""
    return _UNSAFE.sub(lambda found: ascii(found[0])[1:-1], str(text))
