"""Group-relative advantages."""

import numpy as np

from qerl_jax.errors import UserError

SCALES = ("group", "batch", "none")


def group_advantages(rewards: np.ndarray, *, scale: str = "group", eps: float = 1e-4) -> np.ndarray:
    """Returns each reward less its group's mean, divided by a standard deviation plus `eps`.

    GRPO's advantage (arXiv 2402.03300, Eq. 3 ff.), in float64 and with Bessel's correction. A
    missing reward takes no part in the statistics and has advantage 0. A group whose rewards are
    all equal has advantage exactly 0, not rounding noise divided by `eps`; so has a group with a
    single reward.

    Args:
      rewards: [P, G]; a value that is not finite (NaN, usually) is a missing reward.
      scale: the standard deviation to divide by: of the 'group', of the whole 'batch' (of its
        rewards, not of their distances from the group's mean), or 'none'.
      eps: added to the standard deviation.

    Returns:
      float32 [P, G], the advantage of every token of a completion.

    Raises:
      UserError: an unknown scale.
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
