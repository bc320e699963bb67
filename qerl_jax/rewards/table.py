"""Rewards that a program passes: functions alone, a list of them, or a table with weights."""

from collections.abc import Iterable, Mapping
from typing import Any

from qerl_jax.errors import UserError
from qerl_jax.rewards.functions import Reward

# What `train`, `open_session` and `score` take.
Rewards = Reward | Iterable[Reward] | Mapping[str, Reward | tuple[Reward, float]]

CORRECTNESS = "correctness"  # the reward that evaluations use


def table_of(rewards: Rewards) -> dict[str, tuple[Reward, float]]:
    """Returns rewards as a table: function and weight by name.

    Args:
        rewards: a table of functions, or of pairs of a function and a weight, by name; or one
            function or a list of functions, whose names are theirs. A function without a weight
            has weight 1. Where no function of a list is named `correctness`, the first one is that
            reward, by which evaluations score.

    Raises:
        UserError: there is no entry, an entry is no function, two functions have one name, or one
            has none.
    """
    if not callable(rewards) and not rewards:
        raise UserError("rewards is empty: pass functions, or None for those of the config")
    if isinstance(rewards, Mapping):
        entries: Mapping[Any, Any] = rewards
        return {name: _with_weight(name, reward) for name, reward in entries.items()}
    functions: list[Any] = [rewards] if callable(rewards) else list(rewards)
    table: dict[str, tuple[Reward, float]] = {}
    for number, function in enumerate(functions):
        name = getattr(function, "__name__", "")
        if not callable(function) or not name.isidentifier():
            raise UserError(
                f"reward {number} is {function!r:.60}: pass functions with a name, or a table such "
                "as {'short': (function, 0.1)}"
            )
        if name in table:
            raise UserError(
                f"two rewards are named {name!r}: pass a table such as {{'short': (function, 0.1)}}"
            )
        table[name] = (function, 1.0)
    if CORRECTNESS not in table:
        first, *others = table.items()
        table = {CORRECTNESS: first[1], **dict(others)}
    return table


def _with_weight(name: Any, reward: Any) -> tuple[Reward, float]:
    if not isinstance(name, str) or not name or not name.isprintable():
        raise UserError(f"a reward is named {name!r:.60}: give it a name of printable characters")
    if callable(reward):
        return reward, 1.0
    if not isinstance(reward, tuple) or len(reward) != 2 or not callable(reward[0]):
        raise UserError(
            f"the reward {name!r} is {reward!r:.60}: pass a function, or a function and its weight"
        )
    if not isinstance(reward[1], int | float):
        raise UserError(f"the weight of the reward {name!r} is {reward[1]!r:.60}, not a number")
    return reward
