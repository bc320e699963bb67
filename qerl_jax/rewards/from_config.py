"""The rewards that a config names: the table, its command line, and its functions.

    --config.rewards.short.function=my_rewards:short --config.rewards.short.weight=0.1

adds a reward, with the weight 1 by default.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from ml_collections import ConfigDict

from qerl_jax.errors import UserError, check_limits
from qerl_jax.rewards.calls import resolve, reward_entry
from qerl_jax.rewards.functions import Reward

# The optional keys of a reward, as in `calls.resolve`, with their defaults.
OPTIONS: dict[str, Any] = {"time_limit": 0.0, "retries": 2, "token_env": ""}

# Where config.json has the rewards that the last start was given in Python.
PYTHON_REWARDS = "python_rewards"

# Names that metrics and `rl.dynamic_sampling_metric` have for other things.
_TAKEN = {"overlong": "the length penalty", "total": "the weighted sum of all rewards"}


def name_rewards(config: ConfigDict, fields: Iterable[str]) -> None:
    """Adds the rewards and their optional keys that a command line is about to set.

    A config without rewards stays as it is.

    Raises:
        UserError: a reward has no such key.
    """
    table = config.get("rewards")
    for field in fields:
        section, _, rest = field.partition(".")
        name, _, key = rest.partition(".")
        if section != "rewards" or table is None or not key:
            continue
        if key not in ("function", "weight", *OPTIONS):
            raise UserError(
                f"rewards.{name} has no {key!r}; it has function, weight, {', '.join(OPTIONS)}"
            )
        with table.unlocked():
            if name not in table:
                table[name] = {"function": "", "weight": 1.0}
        if key in OPTIONS and key not in table[name]:
            with table[name].unlocked():
                table[name][key] = OPTIONS[key]


def check_rewards(config: ConfigDict) -> None:
    """Validates the table of rewards of a config.

    Raises:
        UserError: there is no reward, one has the name of something else, lacks a key or has
            another one, or none has a weight.
    """
    rewards = config.rewards.to_dict()
    if not rewards:
        raise UserError(
            "sft.rows_per_step=0: without a reward it must be at least 1, as a run learns from "
            "rewards or from rows of text: pass --config.sft.rows_per_step=16, or "
            "--config.rewards.NAME.function=package.module:function"
        )
    for name, reward in rewards.items():
        _check_name(name)
        keys = reward.keys() if isinstance(reward, dict) else set()
        if not {"function", "weight"} <= keys <= {"function", "weight", *OPTIONS}:
            raise UserError(
                f"rewards.{name}={reward!r}: give it a function and a weight, "
                "{'function': 'package.module:function', 'weight': 1.0}, and at most "
                f"{', '.join(OPTIONS)}"
            )
        if not reward["function"]:
            others = [other for other in rewards if rewards[other].get("function")]
            raise UserError(
                f"there is no reward {name!r} (there are {', '.join(others) or 'none'}): add it "
                f"with --config.rewards.{name}.function=package.module:function, or a URL"
            )
    _check_weights({name: reward["weight"] for name, reward in rewards.items()})


def _check_name(name: str) -> None:
    if name in _TAKEN:
        raise UserError(
            f"rewards.{name}: {name!r} is the name of {_TAKEN[name]} (rl.overlong_buffer, "
            "rl.dynamic_sampling_metric); give the reward another name"
        )


def _check_weights(weights: Mapping[str, float]) -> None:
    if not any(weights.values()):
        raise UserError(
            f"no reward has a weight ({', '.join(weights)}), nothing can be learned: set one, such "
            "as rewards.correctness.weight=1"
        )


def rewards_of(
    config: ConfigDict, python_rewards: Mapping[str, tuple[Reward, float]] | None
) -> Mapping[str, tuple[Reward, float]]:
    """Returns the rewards of a run: those given in Python, or those that the config names.

    Raises:
        UserError: as in `check_rewards` and `configured_rewards`.
    """
    if not python_rewards:
        return configured_rewards(config)
    for name, (_, weight) in python_rewards.items():
        _check_name(name)
        check_limits({f"the weight of the reward {name}": (weight, -1e6, 1e6)})
    _check_weights({name: weight for name, (_, weight) in python_rewards.items()})
    return python_rewards


def reward_entries(
    python_rewards: Mapping[str, tuple[Reward, float]] | None,
) -> dict[str, dict[str, Any]]:
    """Returns rewards that were given in Python as the table of a config; {} where none were."""
    return {
        name: reward_entry(reward) | {"weight": float(weight)}
        for name, (reward, weight) in (python_rewards or {}).items()
    }


def configured_rewards(config: ConfigDict) -> dict[str, tuple[Reward, float]]:
    """Makes the rewards that a config names: function and weight by name."""
    rewards = {}
    for name, reward in config.rewards.items():
        options = {key: reward[key] for key in OPTIONS if key in reward}
        rewards[name] = (resolve(reward.function, **options), reward.weight)
    return rewards
