"""The fields on the page docs/config.md, from the rows of `qerl_jax.config.fields`."""

import textwrap

from qerl_jax.config.describe import describe_row
from qerl_jax.config.fields import FIELDS, Field, Section

_COLUMNS = 110


def config_fields() -> str:
    """A heading and a paragraph for each field, in sections."""
    parts, heading = [], ""
    for row in FIELDS:
        if (section := _heading(row)) != heading:
            heading = section
            parts.append(f"## {heading}")
        if isinstance(row, Field):
            parts += [f"### `{row.name}`", _wrapped(_entry(row))]
        elif row.help:
            name = f"`{row.name}`: " if "." in row.name else ""
            parts.append(_wrapped(name + _escaped(row.help)))
    return "\n\n".join(parts)


def _heading(row: Section | Field) -> str:
    """The section of a row; a field beside the sections belongs to the run or to the rewards."""
    first = row.name.partition(".")[0]
    if first.startswith("reward"):
        return "rewards"
    return first if isinstance(row, Section) or "." in row.name else "run"


def _entry(row: Field) -> str:
    """What the row of a field says of it."""
    text = row.help if row.help.endswith((".", ")", ":")) else f"{row.help}."
    return _escaped(" ".join([text, *describe_row(row)]))


def _escaped(text: str) -> str:
    return text.replace("<", "\\<").replace("*", "\\*")


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _COLUMNS, break_long_words=False, break_on_hyphens=False)
