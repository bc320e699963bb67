"""The mixture of sources that a config may train on: the table and its command line.

    --config.data.mixture.math.path=math.jsonl --config.data.mixture.math.weight=3
    --config.data.mixture.sums.source=reasoning_gym:chain_sum

draws three of four problems from the file. A source without a weight has the weight 1.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ml_collections import ConfigDict

from qerl_jax.config.fields import GENERATED, keys_of
from qerl_jax.errors import UserError
from qerl_jax.system.paths import user_path

_FIELDS = ("question", "answer", "level")
# The keys of a source with values of their types.
_KEYS: dict[str, Any] = {key: row.default for key, row in keys_of("data.mixture").items()}


@dataclasses.dataclass(frozen=True)
class MixtureSource:
    """A source of a mixture."""

    path: str = ""  # file or folder of the problems, or ''
    source: str = ""  # hub id or `reasoning_gym:TASK`, where there is no path
    # Its part of the draws, relative to the weights of the other sources.
    weight: float = _KEYS["weight"]
    split: str = _KEYS["split"]  # split of the dataset on the hub or of the folder
    levels: tuple[int, ...] = ()  # difficulties to train on, as `data.levels`
    # Names of the fields `question`, `answer` and `level`, as `data.fields`.
    fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # Options of the reasoning_gym task.
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def origin(self) -> str:
        """The path or the source."""
        return self.path or self.source


def name_sources(config: ConfigDict, fields: Iterable[str]) -> None:
    """Adds the sources and their keys that a command line is about to set.

    A config without a mixture stays as it is.

    Raises:
        UserError: a source has no such key.
    """
    data = config.get("data")
    table = None if data is None else data.get("mixture")
    for field in fields:
        parts = field.split(".")
        if parts[:2] != ["data", "mixture"] or table is None or len(parts) < 4:
            continue
        name, key, inner = parts[2], parts[3], ".".join(parts[4:])
        _check_keys(name, [key])
        if inner and (key != "fields" or inner not in _FIELDS):
            choices = ", ".join(f"fields.{name}" for name in _FIELDS)
            raise UserError(f"data.mixture.{name} has no '{key}.{inner}'; it has {choices}")
        with table.unlocked():
            if name not in table:
                table[name] = ConfigDict()
            if key not in table[name]:
                value = _KEYS[key]
                table[name][key] = ConfigDict(value) if isinstance(value, dict) else value
            if inner and inner not in table[name][key]:
                table[name][key][inner] = ""


def read_mixture(data: Mapping[str, Any]) -> dict[str, MixtureSource]:
    """Reads the mixture of a config: sources by name, in the order of their names; {} without one.

    Args:
        data: the section `data` of a config, with the table `mixture` as a plain dict.

    Raises:
        UserError: a source lacks what it needs, has a key that it does not read or a value that is
            not valid, or there is a `data.path` and a mixture.
    """
    table = data["mixture"]
    if table and data["path"]:
        raise UserError(
            f"data.path={data['path']} and data.mixture ({', '.join(table)}): make the path a "
            "source of the mixture, --config.data.mixture.NAME.path"
        )
    return {name: _read_source(name, table[name]) for name in sorted(table)}


def divide(total: int, sources: Mapping[str, MixtureSource]) -> dict[str, int]:
    """Divides a number among the sources by their weights, largest remainders first."""
    weights = sum(source.weight for source in sources.values())
    exact = {name: total * source.weight / weights for name, source in sources.items()}
    counts = {name: int(value) for name, value in exact.items()}
    by_remainder = sorted(exact, key=lambda name: counts[name] - exact[name])
    for name in by_remainder[: total - sum(counts.values())]:
        counts[name] += 1
    return counts


def _read_source(name: str, entry: Any) -> MixtureSource:
    where = f"data.mixture.{name}"
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise UserError(f"{where}: a name has letters, digits, '_' and '-', as metrics have it")
    if not isinstance(entry, dict):
        raise UserError(
            f"{where}={entry!r:.60}: give it a path or a source, {{'path': 'FILE.jsonl', "
            "'weight': 1.0}"
        )
    _check_keys(name, entry)
    for key, value in entry.items():
        types = (int, float) if key == "weight" else type(_KEYS[key])
        types = (tuple, list) if key == "levels" else types
        if not isinstance(value, types) or isinstance(value, bool):
            raise UserError(f"{where}.{key}={value!r:.60} must be of the kind of {_KEYS[key]!r}")
    source = MixtureSource(**entry)
    if not 0 < source.weight < math.inf:
        raise UserError(
            f"{where}.weight={source.weight}: it must be positive and finite; leave out a source "
            "that is not to be drawn"
        )
    if bool(source.path) == bool(source.source):
        raise UserError(
            f"{where}: give it a path or a source, not {'both' if source.path else 'neither'}"
        )
    if unknown := source.fields.keys() - set(_FIELDS):
        raise UserError(
            f"{where}.fields has no {', '.join(sorted(unknown))}; it has {', '.join(_FIELDS)}"
        )
    _check_read(where, source, entry)
    return source


def _check_keys(name: str, keys: Iterable[str]) -> None:
    for key in keys:
        if key not in _KEYS:
            raise UserError(f"data.mixture.{name} has no {key!r}; it has {', '.join(_KEYS)}")


def _check_read(where: str, source: MixtureSource, keys: Iterable[str]) -> None:
    """Refuses keys that this kind of source does not read."""
    if source.path:
        file = user_path(source.path).is_file()
        unread = ("options", "split") if file else ("options",)
        kind = "a file" if file else "a folder"
    elif source.source.startswith(GENERATED):
        unread, kind = ("split", "levels", "fields"), "generated problems"
    else:
        unread, kind = ("options",), "a dataset on the hub"
    for key in keys:
        if key in unread:
            raise UserError(f"{where}.{key} is set and not read: {source.origin} is {kind}")
