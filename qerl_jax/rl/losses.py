"""The clipped policy-gradient losses, in float32, as sums that add up over micro-batches.

A loss is `sum(weights * per_token_loss)`. The weights hold the aggregation and its denominator and
are computed once, from the mask of all rows of an update (`token_weights`). Micro-batches then only
add: losses, gradients and metrics do not depend on how the rows are split. The one exception is
'bnpo', which is defined by the split.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.errors import UserError
from qerl_jax.import_path import import_function, user_errors

# What distinguishes the losses: the fields of LossConfig that the name decides.
LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"aggregation": "sequence"},  # arXiv 2402.03300, Eq. 3
    "dapo": {"aggregation": "token"},  # arXiv 2503.14476, Eq. 8
    "bnpo": {"aggregation": "micro_batch"},  # what QeRL's released code calls DAPO
    "dr_grpo": {"aggregation": "constant"},  # arXiv 2503.20783, with advantage_scale 'none'
    "gspo": {"aggregation": "sequence", "ratio": "sequence"},  # arXiv 2507.18071, Eq. 5
    "cispo": {"aggregation": "token", "objective": "clipped_weight"},  # arXiv 2506.13585, Eq. 4
}

AGGREGATIONS = ("token", "sequence", "sequence_sum", "constant", "micro_batch")
RATIOS = ("token", "sequence")
OBJECTIVES = ("clipped_ratio", "clipped_weight")
KL_GRADS = ("k3", "k3_clipped", "unbiased")

_K3_CLIP = 10.0  # verl's

Metrics = dict[str, jax.Array | tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """A policy loss.

    Attributes:
      aggregation: how the losses of the tokens become one, see `token_weights`; or
        'package.module:function', see `own_weights`.
      ratio: of the new to the old policy: of each 'token', or one for the 'sequence', the geometric
        mean over its tokens.
      objective: 'clipped_ratio', PPO's, or 'clipped_weight', REINFORCE weighted with the clipped
        ratio, where every token keeps a gradient.
      clip_low: the ratio is clipped at 1 - clip_low from below (1 and more: never),
      clip_high: and at 1 + clip_high from above (larger than clip_low: DAPO's clip-higher).
      dual_clip: the most that a negative advantage is multiplied with (arXiv 1912.09729), above 1;
        None sets no bound. Only of 'clipped_ratio'.
      kl_coef: factor of the KL to the reference policy; 0 leaves it out.
      kl_grad: 'k3', the plain estimator, whose gradient is not that of the KL; 'k3_clipped', the
        same up to 10, beyond which it has no gradient; or 'unbiased', k3 times the ratio, whose
        gradient is, in expectation, the KL's.
      tis_cap: cap of the truncated importance weight from the rollout's policy to the old one; None
        applies no weight.
    """

    aggregation: str
    ratio: str = "token"
    objective: str = "clipped_ratio"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    kl_coef: float = 0.0
    kl_grad: str = "k3"
    tis_cap: float | None = None

    def __post_init__(self):
        own = ":" in self.aggregation
        if own:
            import_function(self.aggregation, what="loss weight")
        for name, choices in {
            "aggregation": (self.aggregation,) if own else AGGREGATIONS,
            "ratio": RATIOS,
            "objective": OBJECTIVES,
            "kl_grad": KL_GRADS,
        }.items():
            if getattr(self, name) not in choices:
                raise UserError(
                    f"unknown {name} {getattr(self, name)!r}: choose from {', '.join(choices)}"
                )
        for name in ("clip_low", "clip_high", "kl_coef"):
            if getattr(self, name) < 0.0:
                raise UserError(f"{name} is {getattr(self, name)}: it must be at least 0")
        if self.tis_cap is not None and self.tis_cap <= 0.0:
            raise UserError(f"tis_cap is {self.tis_cap}: it must be greater than 0")
        if self.dual_clip is not None:
            if self.dual_clip <= 1.0:
                raise UserError(f"dual_clip is {self.dual_clip}: it must be greater than 1")
            if self.objective == "clipped_weight":
                raise UserError(
                    f"dual_clip is {self.dual_clip}, but the weight of this loss is clipped "
                    "already: leave it out (rl.dual_clip=0)"
                )


def loss_config(name: str, *, aggregation: str = "", **options) -> LossConfig:
    """Returns the loss of this name (a row of `LOSSES`) with the other fields of LossConfig.

    Args:
      name: the row.
      aggregation: '' is the row's own.
      **options: what the row leaves open.

    Raises:
      UserError: an unknown name, an option out of range.
    """
    if name not in LOSSES:
        raise UserError(f"unknown loss {name!r}: choose from {', '.join(LOSSES)}")
    row = dict(LOSSES[name])
    if aggregation:
        row["aggregation"] = aggregation
    return LossConfig(**row, **options)


def token_weights(
    mask: np.ndarray,
    aggregation: str,
    *,
    max_new_tokens: int | None = None,
    micro_batch_rows: int | None = None,
) -> np.ndarray:
    """Returns the weight of each token in the loss, on the host.

        'token'         1 / (tokens of the batch)
        'sequence'      1 / (tokens of the row * rows of the batch)
        'sequence_sum'  1 / (rows of the batch)
        'constant'      1 / (max_new_tokens * rows of the batch)
        'micro_batch'   1 / (tokens of the micro-batch * micro-batches of the batch)

    A row that is masked out entirely has no tokens to count but remains a row, as in TRL. The
    weights of a batch without any tokens are 0. A last micro-batch with fewer rows counts as much
    as the others.

    Args:
      mask: float32 [B, C], all rows of one update: 1 for the tokens in the loss.
      aggregation: one of these.
      max_new_tokens: the most tokens that are sampled; needed by 'constant'.
      micro_batch_rows: consecutive rows that form a micro-batch; needed by 'micro_batch'.

    Returns:
      float32 [B, C], 0 outside of the mask.

    Raises:
      ValueError: what the aggregation needs is missing.
    """
    rows = len(mask)
    if aggregation == "token":
        return mask / mask.sum().clip(1)
    if aggregation == "sequence":
        return mask / (mask.sum(axis=1, keepdims=True).clip(1) * rows)
    if aggregation == "sequence_sum":
        return mask / np.float32(rows)
    if aggregation == "constant":
        if max_new_tokens is None:
            raise ValueError("the aggregation 'constant' needs max_new_tokens")
        return mask / np.float32(rows * max_new_tokens)
    if micro_batch_rows is None:
        raise ValueError("the aggregation 'micro_batch' needs micro_batch_rows")
    starts = np.arange(0, rows, micro_batch_rows)
    tokens = np.add.reduceat(mask.sum(axis=1), starts).clip(1) * len(starts)
    return mask / np.repeat(tokens, micro_batch_rows)[:rows, None]


def own_weights(
    mask: np.ndarray, function: str, *, advantages: np.ndarray, logprobs: np.ndarray
) -> np.ndarray:
    """Returns the weight of each token in the loss as a function of one's own gives it.

    It is called on the host, once for a rollout, as `f(mask, advantages, logprobs)` with the
    arrays of all rows, and returns what `token_weights` does: the denominator is its own to choose.

    Args:
      mask: float32 [B, C], 1 for the tokens in the loss.
      function: 'package.module:function'.
      advantages: float32 [B].
      logprobs: float32 [B, C], of the tokens as they were sampled; NaN where not recorded.

    Returns:
      float32 [B, C], 0 outside of the mask.

    Raises:
      UserError: it cannot be imported, raises, or gives no finite weight for a token in the loss.
    """
    own = import_function(function, what="loss weight")
    usage = "it is called as f(mask, advantages, logprobs) and returns an array like the mask"
    with user_errors(f"loss weight {function!r}", usage):
        weights = np.asarray(own(mask.copy(), advantages.copy(), logprobs.copy()), np.float32)
    if weights.shape != mask.shape:
        raise UserError(
            f"loss weight {function!r}: it returned the shape {weights.shape}, [B, C] is "
            f"{mask.shape}"
        )
    weights = np.where(mask > 0, weights, np.float32(0))
    if not np.isfinite(weights).all():
        raise UserError(f"loss weight {function!r}: a weight of a token in the loss is not finite")
    return weights


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

    With the ratio r = exp(new - old), of a token or as the mean over its sequence in the exponent,
    the advantage A and c(r) = clip(r, 1 - clip_low, 1 + clip_high), a token's loss is

        w L + kl_coef KL,    L = -min(r A, c(r) A)            'clipped_ratio'
                             L = -stop_gradient(c(r)) A new   'clipped_weight'

    where L of a negative advantage is at most -dual_clip A, and w = min(exp(old - rollout),
    tis_cap) corrects for a rollout policy that is not the old one (kernels, noise).
    Log-probabilities outside of the mask may have any value, NaN included. Nothing else is clamped:
    a ratio that overflows float32 makes the gradient non-finite.

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
    log_ratio = logprobs - old
    if config.ratio == "sequence":
        length = jnp.maximum(in_loss.sum(axis=1, keepdims=True), 1)
        log_ratio = log_ratio.sum(axis=1, keepdims=True) / length
    ratio = jnp.exp(log_ratio)
    advantages = advantages.astype(jnp.float32)[:, None]
    clipped_ratio = jnp.clip(ratio, 1.0 - config.clip_low, 1.0 + config.clip_high)
    low = in_loss & (ratio < 1.0 - config.clip_low)
    high = in_loss & (ratio > 1.0 + config.clip_high)
    if config.objective == "clipped_weight":
        token_loss = -jax.lax.stop_gradient(clipped_ratio) * advantages * logprobs
    else:
        token_loss = -jnp.minimum(ratio * advantages, clipped_ratio * advantages)
        low, high = low & (advantages < 0), high & (advantages > 0)

    tokens = in_loss.sum().astype(jnp.float32)
    metrics: Metrics = {
        "clip_fraction": ((low | high).sum().astype(jnp.float32), tokens),
        "clip_fraction_low": (low.sum().astype(jnp.float32), tokens),
        "clip_fraction_high": (high.sum().astype(jnp.float32), tokens),
        "ratio_mean": (masked(ratio).sum(), tokens),
        "ratio_max": masked(ratio).max(),
    }
    if config.dual_clip is not None:
        bound = -config.dual_clip * advantages
        beyond = in_loss & (advantages < 0) & (token_loss > bound)
        metrics["clip_fraction_dual"] = (beyond.sum().astype(jnp.float32), tokens)
        token_loss = jnp.where(advantages < 0, jnp.minimum(token_loss, bound), token_loss)
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
        if config.kl_grad == "k3_clipped":
            kl = jnp.minimum(kl, _K3_CLIP)
        elif config.kl_grad == "unbiased":
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
