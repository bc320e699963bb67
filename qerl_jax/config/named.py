"""Installed configs by name, for programs: what --config=NAME:PRESET is on the command line."""

import importlib

from ml_collections import ConfigDict

from qerl_jax.config.experiments import NAMES
from qerl_jax.config.models import STAND_IN
from qerl_jax.errors import UserError

_DEFAULT = "grpo_gsm8k"


def get_config(name: str = STAND_IN) -> ConfigDict:
    """Returns a config, whose fields can be set: `config.steps = 100`.

    Args:
        name: 'MODEL[,RECIPE]', such as 'qwen2.5-7b' or 'qwen2.5-7b,trl', for GRPO on GSM8K; or
            'EXPERIMENT:MODEL[,RECIPE]', such as 'dapo_math:qwen2.5-7b', or 'EXPERIMENT' alone.

    Raises:
        UserError: there is no such experiment, model or recipe.
    """
    experiment, colon, preset = name.partition(":")
    if not colon and name not in NAMES:
        experiment, preset = _DEFAULT, name
    if experiment not in NAMES:
        raise UserError(
            f"unknown config {name!r}: write MODEL[,RECIPE], or EXPERIMENT:MODEL[,RECIPE] with an "
            f"experiment from {', '.join(NAMES)}"
        )
    module = importlib.import_module(f"qerl_jax.config.experiments.{experiment}")
    return module.get_config(preset) if preset else module.get_config()
