"""Sweeps: many runs as lists of overrides.

A config file that describes a sweep has a `get_sweep()` and a `get_config()`:

    from qerl_jax.config.sweep import chain, product

    def get_sweep():
        return product(
            chain(
                {"aqn.schedule": ["off"]},
                {"aqn.schedule": ["exponential", "cosine"], "aqn.sigma_start": [5e-3, 1e-2]},
            ),
            {"seed": [0, 1, 2]},
        )

An item of the list, such as {'aqn.schedule': 'off', 'seed': 0}, is one run. Runs that differ only
in `seed` repeat one setting.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from qerl_jax.errors import UserError

ConfigOverrides = dict[str, Any]
# Lists of values by field, for all combinations; or a list of overrides.
Part = Mapping[str, Sequence[Any]] | Sequence[ConfigOverrides]


def product(*parts: Part) -> list[ConfigOverrides]:
    """All combinations of the parts; the last part varies fastest.

    Raises:
        UserError: two parts set the same field, or a field has no list of values.
    """
    return [_merge(items) for items in itertools.product(*map(_expand, parts))]


def chain(*parts: Part) -> list[ConfigOverrides]:
    """The parts one after another.

    Raises:
        UserError: a field has no list of values.
    """
    return list(itertools.chain(*map(_expand, parts)))


def zipped(fields: Mapping[str, Sequence[Any]]) -> list[ConfigOverrides]:
    """Fields that change together: the first values of all fields, then the second values, ...

    Raises:
        UserError: the fields have lists of different lengths, or a field has no list of values.
    """
    lengths = {field: len(_values(field, values)) for field, values in fields.items()}
    if len(set(lengths.values())) > 1:
        raise UserError(f"zipped fields need the same number of values, they have {lengths}")
    return [dict(zip(fields, row, strict=True)) for row in zip(*fields.values(), strict=True)]


def _expand(part: Part) -> list[ConfigOverrides]:
    if not isinstance(part, Mapping):
        return list(part)
    lists = [[{field: value} for value in _values(field, part[field])] for field in part]
    return [_merge(items) for items in itertools.product(*lists)]


def _values(field: str, values: Any) -> Sequence[Any]:
    if not isinstance(values, list | range):
        raise UserError(f"the sweep over {field} needs a list of values, not {values!r}")
    return values


def _merge(items: Iterable[ConfigOverrides]) -> ConfigOverrides:
    merged: ConfigOverrides = {}
    for item in items:
        for field, value in item.items():
            if field in merged:
                raise UserError(f"a run of the sweep sets {field} twice: {merged[field]}, {value}")
            merged[field] = value
    return merged
