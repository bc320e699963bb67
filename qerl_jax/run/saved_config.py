"""The config of a saved run, with which --workdir=RUN resumes it without --config."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from qerl_jax.config.build import defaults
from qerl_jax.errors import UserError
from qerl_jax.rewards.from_config import PYTHON_REWARDS
from qerl_jax.run.folder import RunFolder, read_run
from qerl_jax.run.ownership import has_own_tag, trusts, unless_own
from qerl_jax.run.saved_fields import check_run

_TABLES = ("rewards", "data.mixture", "data.options", "data.chat_template_args", "data.fields")


def is_saved_run(path: Path) -> bool:
    """Returns whether a folder holds a config.json that a run wrote."""
    return read_run(RunFolder(path).config) is not None


def saved_config(path: Path, *, trust: bool) -> ConfigDict:
    """Returns the config of a saved run, in the types of the fields.

    Args:
        path: the run folder.
        trust: whether the command has --trust. A run of another person is data: its config names
            functions, files and servers, and without --trust it is not taken.

    Raises:
        UserError: the run is that of another person, was trained with rewards that were given in
            Python, or holds what no run writes.
    """
    file = RunFolder(path).config
    saved = read_run(file)
    if saved is None:
        raise UserError(f"{path} is not a run folder: no run wrote its {file.name}")
    if not has_own_tag(saved) and not trusts(trust):
        raise UserError(
            f"{path} holds a run of another person, whose config may name any function: pass "
            "--config to say what it trains, or --trust to take what its folder names "
            f"({unless_own()})"
        )
    check_run(file, saved)
    if saved.get(PYTHON_REWARDS):
        raise UserError(
            f"{path} was trained with rewards that were given in Python: resume it there, with "
            "train(config, workdir=..., rewards=...)"
        )
    config = defaults()
    with config.unlocked():
        _update(config, saved["config"], "")
    return config.lock()


def _update(config: ConfigDict, saved: Mapping[str, Any], prefix: str) -> None:
    for name, value in saved.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and path not in _TABLES and name in config:
            if not isinstance(config[name], ConfigDict):
                raise UserError(f"the config.json of the run holds an object as {path}")
            _update(config[name], value, f"{path}.")
            continue
        if name in config:
            del config[name]  # with its type, and its link to another field
        config[name] = _from_json(value)


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_from_json, value))
    if isinstance(value, Mapping):
        return ConfigDict({name: _from_json(inner) for name, inner in value.items()})
    return value
