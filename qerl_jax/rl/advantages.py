"""Group-relative advantages."""

import numpy as np

from qerl_jax.errors import UserError

SCALES = ("group", "batch", "none")


def group_advantages(rewards: np.ndarray, *, scale: str = "group", eps: float = 1e-4) -> np.ndarray:
    """Returns the advantage of each completion: its reward relative to the rewards of its group.

    GRPO's advantage (arXiv 2402.03300, Eq. 3 ff.),

        A = (reward - mean of the group) / (standard deviation + eps),

    in float64 and with Bessel's correction. A missing reward takes no part in the statistics and
    has advantage 0. A group whose rewards are all equal has advantage exactly 0 instead of rounding
    noise divided by `eps`, and so has a group with a single reward.

    Args:
        rewards: [P, G] rewards; a value that is not finite (usually NaN) is a missing reward.
        scale: standard deviation to divide by. 'group' is the standard deviation of the group's
            rewards, 'batch' is the standard deviation of all rewards of the batch (not of their
            distances from the group means), and 'none' leaves out the division.
        eps: constant that is added to the standard deviation.

    Returns:
        float32 [P, G] advantages; every token of a completion shares its value.

    Raises:
        UserError: the scale is unknown.
    """
    if scale not in SCALES:
        raise UserError(f"unknown advantage scale {scale!r}: choose from {', '.join(SCALES)}")
    rewards = np.asarray(rewards, np.float64)
    present = np.isfinite(rewards)
    count = present.sum(axis=1, keepdims=True)
    rewards = np.where(present, rewards, 0.0)
    mean = rewards.sum(axis=1, keepdims=True) / np.maximum(count, 1)
    advantages = np.where(present, rewards - mean, 0.0)
    if scale == "group":
        variance = (advantages**2).sum(axis=1, keepdims=True) / np.maximum(count - 1, 1)
        advantages = advantages / (np.sqrt(variance) + eps)
    elif scale == "batch":
        std = rewards[present].std(ddof=1) if present.sum() > 1 else 0.0
        advantages = advantages / (std + eps)
    highest = np.where(present, rewards, -np.inf).max(axis=1, keepdims=True)
    lowest = np.where(present, rewards, np.inf).min(axis=1, keepdims=True)
    return np.where(highest > lowest, advantages, 0.0).astype(np.float32)
