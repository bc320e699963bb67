"""Which fields of a config may change when a run is resumed; the rows of `fields` say it."""

import json
from typing import Any

from ml_collections import ConfigDict

from qerl_jax.config.fields import ROWS, LinkedDefault, ModelDefault, row_of


def is_source(field: str) -> bool:
    """Whether a field, such as 'data.path', says where the weights or the problems are."""
    row = row_of(field)
    return row is not None and row.resume == "source"


def is_free(field: str) -> bool:
    """Whether a field, such as 'log.wandb', does not change how a run trains."""
    row = row_of(field)
    return row is not None and row.resume == "free"


def moves_only_memory(field: str, config: ConfigDict) -> bool:
    """Whether a field of this config moves only memory or time."""
    row = row_of(field)
    if row is None or row.resume != "memory":
        return False
    return row.fixed_if is None or not row.fixed_if.holds(config)


def with_defaults(saved: dict[str, Any], current: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a saved config, with the defaults of fields that it lacks.

    A run of an earlier version lacks fields, and what it did is what their defaults do.

    Args:
        saved: fields of the saved config by flattened name.
        current: those of the new config.
    """
    rows = {name: ROWS[name] for name in current if name in ROWS and name not in saved}
    return saved | {
        name: list(row.default) if isinstance(row.default, tuple) else row.default
        for name, row in rows.items()
        if not isinstance(row.default, ModelDefault | LinkedDefault)
    }


def differences(
    saved: dict[str, Any], current: dict[str, Any], config: ConfigDict
) -> tuple[dict[str, str], dict[str, str]]:
    """Compares two configs by flattened name.

    Returns:
        The fields that move only memory or time, and all other fields that may not change, each
        with a text such as '8 -> 4'.
    """
    saved = with_defaults(saved, current)
    memory_changes: dict[str, str] = {}
    other_changes: dict[str, str] = {}
    for field in sorted(saved.keys() | current.keys()):
        same = field in saved and field in current and saved[field] == current[field]
        if not same and not is_free(field):
            changes = memory_changes if moves_only_memory(field, config) else other_changes
            changes[field] = f"{_show(saved, field)} -> {_show(current, field)}"
    return memory_changes, other_changes


def _show(fields: dict[str, Any], key: str) -> str:
    return json.dumps(fields[key], ensure_ascii=False) if key in fields else "(absent)"
