"""Makes the config of an experiment: the defaults, the experiment's differences, and a recipe.

An experiment's config file is a table of differences; `build` makes the config from

    MODEL[,RECIPE]     as in --config=grpo_gsm8k:qwen2.5-7b,trl

MODEL selects the weights. RECIPE selects noise, loss, advantages and optimizer: 'paper' (the
default), 'reference_code', 'trl', 'verl', or the paper's recipe with another loss, 'dr_grpo',
'gspo', 'cispo'. The sizes (prompts, groups, lengths, rank, steps) stay the experiment's; so do the
learning rate of the stand-in, which has no noise. Only 'first_run' changes sizes: it is the paper's
recipe with 100 steps, 1,024 new tokens and no noise. `qerl-plan` says what a run takes of a card's
memory.

`fields.py` has every field with its default.
"""

import functools
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from qerl_jax.config.fields import FIELDS, ROWS, Field, LinkedDefault, ModelDefault, Section
from qerl_jax.config.models import MODELS, SOURCES, STAND_IN
from qerl_jax.config.recipes import RECIPES
from qerl_jax.errors import UserError


def build(
    experiment: str,
    preset: str,
    *,
    settings: Mapping[str, Any],
    rewards: Mapping[str, Mapping[str, Any]],
    stand_in: Mapping[str, Any],
) -> ConfigDict:
    """Returns the locked config of an experiment.

    Values are set in this order, and later ones win: the fields' defaults, `settings`, the recipe,
    and `stand_in` if the model is the stand-in.

    Args:
        experiment: name of the experiment, with which the names of its run folders begin.
        preset: 'MODEL[,RECIPE]', with names from `MODELS` and `RECIPES`.
        settings: the experiment's values by flattened name.
        rewards: name -> 'function' and 'weight', as in the field `rewards`.
        stand_in: values that a model of 135M parameters needs, by flattened name.

    Raises:
        UserError: the model or the recipe does not exist.
    """
    model, comma, recipe = preset.partition(",")
    recipe = recipe if comma else "paper"
    if model not in SOURCES or recipe not in RECIPES:
        raise UserError(
            f"unknown preset {preset!r}: write MODEL or MODEL,RECIPE with a model from "
            f"{', '.join(MODELS)} and a recipe from {', '.join(RECIPES)}"
        )
    config = defaults(model)
    config.experiment = experiment
    config.preset = f"{model}-{recipe}"
    config.rewards.update({name: dict(reward) for name, reward in rewards.items()})
    config.update_from_flattened_dict(dict(settings))
    config.update_from_flattened_dict(RECIPES[recipe])
    if model == STAND_IN:
        config.update_from_flattened_dict(dict(stand_in))
    return config.lock()


_TYPES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    tuple: "a tuple",
}


class FieldTypeError(UserError, TypeError):
    """A value of another type than that of its field, also for code that expects a TypeError."""


class _Section(ConfigDict):
    """A config, or its section called `_name`, whose errors say what a field takes."""

    _name = ""

    def __setitem__(self, key: str, value: Any) -> None:
        name = f"{self._name}.{key}" if self._name else key
        if isinstance(value, dict | ConfigDict) and not isinstance(value, _Section):
            value = _section(name, value)
        try:
            super().__setitem__(key, value)
        except TypeError as error:
            raise FieldTypeError(_type_message(name, value, self[key])) from error

    def __eq__(self, other: object) -> bool:
        """Whether another config, also one of ml_collections itself, has the same values."""
        return ConfigDict(self) == other  # pyrefly: ignore[bad-argument-type]


def _type_message(name: str, value: Any, now: Any) -> str:
    """What is wrong with a value that a field cannot take, whose value is `now`."""
    wrong, row = f"{name}={value!r:.100}", ROWS.get(name)
    functions = value if isinstance(value, list | tuple) else [value]
    takes_functions = name.endswith(".function") or (row is not None and row.function)
    is_code = [
        isinstance(one, str) or (hasattr(one, "__qualname__") and getattr(one, "__module__", None))
        for one in functions  # A method of a built-in type has no module.
    ]
    if takes_functions and functions and all(is_code):
        paths = [
            one if isinstance(one, str) else f"{one.__module__}:{one.__qualname__}"
            for one in functions
        ]
        # No other process finds a lambda, or what is local, or of the program itself.
        hidden = any(path.startswith("__main__:") or "<" in path for path in paths)
        note = " (as soon as it is in a module)" if hidden else ""
        return (
            f"{wrong}: a config names functions and classes by their import paths, which other "
            f"processes and a resumed run import: pass {', '.join(paths)!r}{note}"
        )
    return f"{wrong} is of type {type(value).__name__}: it takes {_TYPES.get(type(now), 'a table')}"


def _section(name: str, values: Mapping[str, Any] | ConfigDict) -> ConfigDict:
    section = _Section()
    object.__setattr__(section, "_name", name)
    for key, value in values.items():
        section[key] = value
    return section


def defaults(model: str = STAND_IN) -> ConfigDict:
    """Returns a config of every field with its default."""
    config = _Section()
    for row in FIELDS:
        *sections, name = row.name.split(".")
        if "NAME" not in sections:  # The key of an entry that the user names has no default entry.
            functools.reduce(getattr, sections, config)[name] = _default(row, config, model)
    return config


def _default(row: Section | Field, config: ConfigDict, model: str) -> Any:
    default = {} if isinstance(row, Section) else row.default
    if isinstance(default, LinkedDefault):
        section, _, name = default.field.rpartition(".")
        return config[section].get_oneway_ref(name)
    if isinstance(default, ModelDefault):
        default = default.value(model)
    return _section(row.name, default) if isinstance(default, dict) else default
