"""Group-relative advantages."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qerl_jax.errors import UserError
from qerl_jax.system.import_path import import_function, user_errors

SCALES = ("group", "batch", "none")
ADVANTAGES = ("grpo", "gdpo")


def group_advantages(rewards: np.ndarray, *, scale: str = "group", eps: float = 1e-4) -> np.ndarray:
    """Returns the advantage of each completion: its reward relative to the rewards of its group.

    GRPO's advantage (arXiv 2402.03300, Eq. 3 ff.),

        A = (reward - mean of the group) / (standard deviation + eps),

    in float64 and with Bessel's correction. A missing reward takes no part in the statistics and
    has advantage 0. A group whose rewards are all equal, as in `differ`, has advantage exactly 0
    instead of rounding noise divided by `eps`, and so has a group with a single reward.

    Args:
        rewards: [P, G] rewards; a value that is not finite (usually NaN) is a missing reward.
        scale: standard deviation to divide by. 'group' is the standard deviation of the group's
            rewards, 'batch' is the standard deviation of all rewards of the batch (not of their
            distances from the group means), and 'none' leaves out the division.
        eps: constant that is added to the standard deviation.

    Returns:
        float32 [P, G] advantages; every token of a completion shares its value.

    Raises:
        UserError: the scale is unknown, or the rewards are not groups of one size.
    """
    if scale not in SCALES:
        raise UserError(f"unknown advantage scale {scale!r}: choose from {', '.join(SCALES)}")
    rewards = _groups(rewards)
    is_present = np.isfinite(rewards)
    count = is_present.sum(axis=1, keepdims=True)
    rewards = np.where(is_present, rewards, 0.0)
    mean = rewards.sum(axis=1, keepdims=True) / np.maximum(count, 1)
    advantages = np.where(is_present, rewards - mean, 0.0)
    if scale == "group":
        variance = (advantages**2).sum(axis=1, keepdims=True) / np.maximum(count - 1, 1)
        deviation = np.sqrt(variance) + eps
        advantages = advantages / np.where(deviation > 0, deviation, 1.0)
    elif scale == "batch":
        std = rewards[is_present].std(ddof=1) if is_present.sum() > 1 else 0.0
        advantages = advantages / ((std + eps) or 1.0)
    return np.where(differ(rewards, is_present), advantages, 0.0).astype(np.float32)


def _groups(rewards: Any) -> np.ndarray:
    """Returns rewards as float64 [P, G]; refuses a flat list, and groups of unequal length."""
    try:
        array = np.asarray(rewards, np.float64)
    except ValueError as error:
        lengths = sorted({np.size(group) for group in rewards})
        raise UserError(
            f"the groups of rewards have {', '.join(map(str, lengths))} rewards: all groups need "
            "the same number"
        ) from error
    if array.ndim != 2:
        raise UserError(
            f"the rewards have the shape {array.shape}: [P, G] is needed, P groups of G rewards, "
            "such as scores.total.reshape(-1, group_size)"
        )
    return array


def differ(rewards: np.ndarray, is_present: np.ndarray) -> np.ndarray:
    """Returns whether rewards differ by more than rounding: 0.3 and 0.1 + 0.2 are equal.

    They are equal where the largest and the smallest differ by at most 1e-8, and 1e-12 of their
    size. TRL counts a group as one without a difference if its standard deviation is at most 1e-8.

    A reward takes part where `is_present` [P, G].

    Returns:
        bool [P, 1].
    """
    highest = np.where(is_present, rewards, -np.inf).max(axis=1, keepdims=True)
    lowest = np.where(is_present, rewards, np.inf).min(axis=1, keepdims=True)
    size = np.where(is_present, np.abs(rewards), 0.0).max(axis=1, keepdims=True)
    return highest - lowest > 1e-8 + 1e-12 * size


def gdpo_advantages(
    rewards: Mapping[str, np.ndarray], weights: Mapping[str, float], *, eps: float = 1e-4
) -> np.ndarray:
    """Returns GDPO's advantage of each completion (arXiv 2601.05242, Eq. 4 to 6).

    Each reward is normalized within its group, the results are summed with their weights, and the
    sums are normalized over the batch:

        A = (S - mean of S) / (standard deviation of S + eps),    S = sum of w_n A_n,

    where A_n are the advantages of `group_advantages` for the reward n. Rewards whose sum is equal
    thus stay apart. A missing reward adds 0 to S; a completion without any reward with a weight
    has advantage 0, and so have the completions of a group whose sums are equal, as in `differ`.

    Args:
        rewards: [P, G] rewards by name; a value that is not finite is a missing reward.
        weights: weights of the rewards by name; a reward without one, or of weight 0, is left out.
        eps: constant that is added to the standard deviations.

    Returns:
        float32 [P, G] advantages.

    Raises:
        UserError: no reward has a weight.
    """
    nonzero_weights = {name: weight for name, weight in weights.items() if weight}
    if not nonzero_weights:
        raise UserError("rl.advantage='gdpo': no reward has a weight")
    parts = {
        name: group_advantages(rewards[name], scale="group", eps=eps) for name in nonzero_weights
    }
    has_reward = np.any([np.isfinite(rewards[name]) for name in nonzero_weights], axis=0)
    weighted = [weight * parts[name].astype(np.float64) for name, weight in nonzero_weights.items()]
    sums = np.sum(weighted, axis=0)
    present_sums = sums[has_reward]
    std = present_sums.std(ddof=1) if len(present_sums) > 1 else 0.0
    advantages = (sums - (present_sums.mean() if len(present_sums) else 0.0)) / ((std + eps) or 1.0)
    return np.where(has_reward & differ(sums, has_reward), advantages, 0.0).astype(np.float32)


def custom_advantages(
    function: str, rewards: np.ndarray, parts: Mapping[str, np.ndarray]
) -> np.ndarray:
    """Returns the advantage of each completion, computed by a user function on the host.

    The function is called once per step, as `f(rewards, parts)`.

    Args:
        function: import path 'package.module:function'.
        rewards: [P, G] weighted sums of the rewards; NaN without a reward.
        parts: [P, G] values of each reward by name, without its weight; NaN where it is missing.

    Returns:
        float32 [P, G] advantages; 0 where there is no reward.

    Raises:
        UserError: the function cannot be imported, raises, returns another shape, or returns an
            advantage that is not finite for a completion with a reward.
    """
    compute = import_function(function, what="advantage")
    usage = "it is called as f(rewards, parts) and returns an array like the rewards, [P, G]"
    with user_errors(f"advantage {function!r}", usage):
        copies = {name: np.array(part, np.float64) for name, part in parts.items()}
        advantages = np.asarray(compute(np.array(rewards, np.float64), copies), np.float32)
    if advantages.shape != rewards.shape:
        raise UserError(
            f"advantage {function!r}: it returned the shape {advantages.shape}, [P, G] is "
            f"{rewards.shape}: return an array like the rewards"
        )
    advantages = np.where(np.isfinite(rewards), advantages, np.float32(0))
    if not np.isfinite(advantages).all():
        raise UserError(
            f"advantage {function!r}: an advantage of a completion with a reward is not finite"
        )
    return advantages


def check_custom_advantages(
    function: str, *, groups: int, group_size: int, names: Sequence[str]
) -> None:
    """Calls a user function on rewards of 0 and 1, so that a mistake is an error before training.

    Args:
        function: import path 'package.module:function'.
        groups: P of the run.
        group_size: G of the run.
        names: names of the rewards.

    Raises:
        UserError: as in `custom_advantages`.
    """
    rewards = np.arange(groups * group_size).reshape(groups, group_size) % 2.0
    custom_advantages(function, rewards, dict.fromkeys(names, rewards))
