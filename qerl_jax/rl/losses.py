"""The clipped policy-gradient losses, in float32, as sums that add up over micro-batches.

A loss is `sum(weights * per_token_loss)`. The weights hold the aggregation and its denominator and
are computed once, from the mask of all rows of an update (`token_weights`). Micro-batches then only
add: losses, gradients and metrics do not depend on how the rows are split.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.errors import UserError

# What distinguishes the losses: the fields of LossConfig that the name decides.
LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"aggregation": "sequence"},  # arXiv 2402.03300, Eq. 3
    "dapo": {"aggregation": "token"},  # arXiv 2503.14476, Eq. 8
}

AGGREGATIONS = ("token", "sequence")
KL_GRADS = ("k3", "unbiased")

Metrics = dict[str, jax.Array | tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """A policy loss.

    Attributes:
      aggregation: 'token', the mean over all tokens, or 'sequence', the mean over the rows of each
        row's mean.
      clip_low: the ratio is clipped at 1 - clip_low from below,
      clip_high: and at 1 + clip_high from above (larger than clip_low: DAPO's clip-higher).
      kl_coef: factor of the KL to the reference policy; 0 leaves it out.
      kl_grad: 'k3', the plain estimator, whose gradient is not that of the KL, or 'unbiased', k3
        times the ratio, whose gradient is, in expectation.
      tis_cap: cap of the truncated importance weight from the rollout's policy to the old one; None
        applies no weight.
    """

    aggregation: str
    clip_low: float = 0.2
    clip_high: float = 0.28
    kl_coef: float = 0.0
    kl_grad: str = "k3"
    tis_cap: float | None = None

    def __post_init__(self):
        if self.aggregation not in AGGREGATIONS:
            raise UserError(
                f"unknown aggregation {self.aggregation!r}: choose from {', '.join(AGGREGATIONS)}"
            )
        if self.kl_grad not in KL_GRADS:
            raise UserError(f"unknown kl_grad {self.kl_grad!r}: choose from {', '.join(KL_GRADS)}")
        for name in ("clip_low", "clip_high", "kl_coef"):
            if getattr(self, name) < 0.0:
                raise UserError(f"{name} is {getattr(self, name)}: it must be at least 0")
        if self.tis_cap is not None and self.tis_cap <= 0.0:
            raise UserError(f"tis_cap is {self.tis_cap}: it must be greater than 0")


def loss_config(name: str, **options) -> LossConfig:
    """Returns the loss of this name (a row of `LOSSES`) with the other fields of LossConfig.

    Raises:
      UserError: an unknown name, an option out of range.
    """
    if name not in LOSSES:
        raise UserError(f"unknown loss {name!r}: choose from {', '.join(LOSSES)}")
    return LossConfig(**LOSSES[name], **options)


def token_weights(mask: np.ndarray, aggregation: str) -> np.ndarray:
    """Returns the weight of each token in the loss, on the host.

    'token' gives 1 / (tokens of the batch), 'sequence' 1 / (tokens of the row * rows of the batch).
    A row that is masked out entirely has no tokens to count but remains a row, as in TRL. The
    weights of a batch without any tokens are 0.

    Args:
      mask: float32 [B, C], all rows of one update: 1 for the tokens in the loss.
      aggregation: see LossConfig.

    Returns:
      float32 [B, C], 0 outside of the mask.
    """
    if aggregation == "token":
        return mask / mask.sum().clip(1)
    return mask / (mask.sum(axis=1, keepdims=True).clip(1) * len(mask))


def k3(logprobs: jax.Array, ref_logprobs: jax.Array) -> jax.Array:
    """Estimates KL(policy | reference) at each sampled token: exp(ref - new) - (ref - new) - 1."""
    difference = ref_logprobs - logprobs
    return jnp.expm1(difference) - difference


def policy_loss(
    logprobs: jax.Array,
    *,
    old_logprobs: jax.Array | None,
    advantages: jax.Array,
    mask: jax.Array,
    weights: jax.Array,
    config: LossConfig,
    ref_logprobs: jax.Array | None = None,
    rollout_logprobs: jax.Array | None = None,
) -> tuple[jax.Array, Metrics]:
    """Returns the loss of some rows of an update, and their metrics.

    With the ratio r = exp(new - old) and the advantage A, a token's loss is

        -w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + kl_coef KL

    where w = min(exp(old - rollout), tis_cap) corrects for a rollout policy that is not the old one
    (kernels, noise). Log-probabilities outside of the mask may have any value, NaN included.
    Nothing else is clamped: a ratio that overflows float32 makes the gradient non-finite.

    Args:
      logprobs: [B, C], of the sampled tokens under the policy that is trained.
      old_logprobs: [B, C], under the policy before the first update of this rollout. None stands
        for the values of `logprobs`: the ratio is exactly 1.
      advantages: [B].
      mask: [B, C], 1 for the tokens in the loss.
      weights: [B, C], the rows' part of `token_weights`.
      config: the loss.
      ref_logprobs: [B, C], under the reference policy; needed where kl_coef is not 0.
      rollout_logprobs: [B, C], as the sampler recorded them; needed where tis_cap is set. A token
        with NaN counts as not recorded: it has importance weight 1.

    Returns:
      The loss, a float32 scalar: its sum over all rows of an update is the update's loss. The
      metrics, for `summarize_metrics`: pairs (sum over tokens, number of tokens), and maxima.

    Raises:
      ValueError: ref_logprobs or rollout_logprobs are missing but needed.
    """
    if config.kl_coef and ref_logprobs is None:
        raise ValueError(f"kl_coef={config.kl_coef} needs ref_logprobs")
    if config.tis_cap is not None and rollout_logprobs is None:
        raise ValueError(f"tis_cap={config.tis_cap} needs rollout_logprobs")
    in_loss = mask > 0

    def masked(x):
        # Before any exp: a masked position must not become inf * 0 in the loss or its gradient.
        return jnp.where(in_loss, x, 0.0).astype(jnp.float32)

    logprobs = masked(logprobs)
    old = jax.lax.stop_gradient(logprobs if old_logprobs is None else masked(old_logprobs))
    ratio = jnp.exp(logprobs - old)
    advantages = advantages.astype(jnp.float32)[:, None]
    clipped_ratio = jnp.clip(ratio, 1.0 - config.clip_low, 1.0 + config.clip_high)
    token_loss = -jnp.minimum(ratio * advantages, clipped_ratio * advantages)

    tokens = in_loss.sum().astype(jnp.float32)
    low = in_loss & (ratio < 1.0 - config.clip_low) & (advantages < 0)
    high = in_loss & (ratio > 1.0 + config.clip_high) & (advantages > 0)
    metrics: Metrics = {
        "clip_fraction": ((low | high).sum().astype(jnp.float32), tokens),
        "clip_fraction_low": (low.sum().astype(jnp.float32), tokens),
        "clip_fraction_high": (high.sum().astype(jnp.float32), tokens),
        "ratio_mean": (masked(ratio).sum(), tokens),
        "ratio_max": masked(ratio).max(),
    }
    if rollout_logprobs is not None:
        recorded = in_loss & ~jnp.isnan(rollout_logprobs)
        difference = jnp.where(recorded, old - rollout_logprobs, 0.0).astype(jnp.float32)
        distance = jnp.abs(difference)
        metrics["logprob_diff_mean"] = (distance.sum(), recorded.sum().astype(jnp.float32))
        metrics["logprob_diff_max"] = distance.max()
        if config.tis_cap is not None:
            importance = jnp.minimum(jnp.exp(difference), config.tis_cap)
            token_loss = token_loss * importance
            metrics["tis_weight"] = (masked(importance).sum(), tokens)
    if ref_logprobs is not None:
        kl = k3(logprobs, jax.lax.stop_gradient(masked(ref_logprobs)))
        metrics["kl"] = (kl.sum(), tokens)
        if config.kl_grad == "unbiased":
            kl = kl * ratio
        token_loss = token_loss + config.kl_coef * kl
    return (weights * token_loss).sum(), jax.lax.stop_gradient(metrics)


def summarize_metrics(metrics: Mapping[str, jax.Array | tuple[jax.Array, jax.Array]]) -> dict:
    """Returns the means and maxima over micro-batches.

    Args:
      metrics: as of `policy_loss`, stacked over the micro-batches (as `jax.lax.scan` returns them):
        pairs ([N] sums, [N] counts), and [N] maxima.

    Returns:
      Scalars by name; a mean over nothing is 0.
    """
    return {
        name: value[0].sum() / jnp.maximum(value[1].sum(), 1.0)
        if isinstance(value, tuple)
        else value.max()
        for name, value in metrics.items()
    }
