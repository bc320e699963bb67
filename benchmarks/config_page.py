"""The page docs/config.md: every field of a config, from the rows of `qerl_jax.config.fields`."""

import textwrap

from qerl_jax.config.describe import describe_row
from qerl_jax.config.fields import FIELDS, Field, Section

_COLUMNS = 110
_INTRODUCTION = """\
# Config

`uv run python -m benchmarks.tables` writes this page from the rows of `qerl_jax/config/fields.py`.
`--config.rl.loss=dapo` sets a field, `--explain=rl.loss` prints what this page says of it and its
value in the config, `--print_config` prints all values. The defaults are the paper's values for
GSM8K, where the paper gives one; a preset, a recipe and an experiment set other values.

Setting a field that needs something is an error in a run without it. Where a field does not say
that a run may go on with another value, its value stays once the run has taken a step. NAME stands
for a name that you choose."""


def config_page() -> str:
    """The text of docs/config.md."""
    parts, heading = [_INTRODUCTION], ""
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
