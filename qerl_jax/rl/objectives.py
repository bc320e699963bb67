"""The loss of a single token, before the weighted sum over the tokens of an update."""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.errors import UserError
from qerl_jax.system.import_path import import_function, names_function, user_errors

_CLIPS = ("clip_low", "clip_high", "dual_clip")
# The form of the loss of a token, and the fields of `losses.LossConfig` that it reads.
OBJECTIVES: dict[str, tuple[str, ...]] = {
    "clipped_ratio": _CLIPS,
    "clipped_weight": _CLIPS,
    "soft_gate": ("sapo_temperature_pos", "sapo_temperature_neg"),
}

Metrics = dict[str, jax.Array | tuple[jax.Array, jax.Array]]

_USAGE = (
    "it is called as f(ratio, advantages, logprobs, mask) with arrays of one shape, under jax.jit, "
    "and returns the loss of each token"
)


def token_loss(
    logprobs: jax.Array,
    ratio: jax.Array,
    advantages: jax.Array,
    in_loss: jax.Array,
    tokens: jax.Array,
    *,
    objective: str,
    **options: Any,
) -> tuple[jax.Array, Metrics]:
    """Returns L of `losses.policy_loss` and the metrics of the ratio.

    Args:
        logprobs: float32 [M] log-probabilities of the tokens, 0 outside the mask.
        ratio: float32 [M] probability ratios.
        advantages: [M] advantages.
        in_loss: bool [M] mask.
        tokens: float32 number of tokens in the loss.
        objective: a name of `OBJECTIVES`, or the import path of a user function.
        **options: the fields of `LossConfig` that `OBJECTIVES` lists for the objective.

    Returns:
        float32 [M] losses, whose values outside the mask do not count, and the metrics.

    Raises:
        UserError: a user function fails, or returns another shape.
    """
    advantages = advantages.astype(jnp.float32)
    if objective == "soft_gate":
        return _gated_loss(ratio, advantages, **options), _ratio_metrics(ratio, in_loss, tokens)
    if names_function(objective):
        loss = custom_loss(objective, ratio, advantages, logprobs, in_loss)
        return masked(loss, in_loss), _ratio_metrics(ratio, in_loss, tokens)
    return _clipped_loss(
        logprobs,
        ratio,
        advantages,
        in_loss,
        tokens,
        is_weight=objective == "clipped_weight",
        **options,
    )


def custom_loss(
    function: str,
    ratio: jax.Array,
    advantages: jax.Array,
    logprobs: jax.Array,
    in_loss: jax.Array,
) -> jax.Array:
    """Returns the losses of tokens [M], computed by a user function of JAX.

    Args:
        function: import path 'package.module:function'.
        ratio: float32 [M] probability ratios; 1 in the first update on a rollout.
        advantages: float32 [M] advantages.
        logprobs: float32 [M] log-probabilities of the policy that is trained.
        in_loss: bool [M] mask; the function gets it as float32.

    Raises:
        UserError: the function cannot be imported, raises, or returns another shape.
    """
    compute = import_function(function, what="loss")
    with user_errors(f"loss {function!r}", _USAGE):
        loss = jnp.asarray(compute(ratio, advantages, logprobs, in_loss.astype(jnp.float32)))
    if loss.shape != ratio.shape:
        raise UserError(
            f"loss {function!r}: it returned the shape {loss.shape} for {ratio.shape[0]} tokens; "
            f"{_USAGE}"
        )
    return loss.astype(jnp.float32)


def check_custom_loss(function: str) -> None:
    """Traces a user function, so that a mistake in it is an error before training.

    Raises:
        UserError: as in `custom_loss`.
    """
    jax.eval_shape(lambda *a: custom_loss(function, *a), *_four_tokens())


def custom_loss_digest(function: str) -> str:
    """Returns a digest of what a user function computes, for the names of compiled programs.

    Its import path stays the same where its code, or a number that it reads, has changed.

    Raises:
        UserError: as in `custom_loss`.
    """
    lowered = jax.jit(lambda *a: custom_loss(function, *a)).lower(*_four_tokens())
    return hashlib.sha256(lowered.as_text().encode()).hexdigest()


def _four_tokens() -> tuple[jax.ShapeDtypeStruct, ...]:
    """The arguments of `custom_loss` after the function, for four tokens."""
    values = jax.ShapeDtypeStruct((4,), np.float32)
    return values, values, values, jax.ShapeDtypeStruct((4,), np.bool_)


def off_policy_mask(
    logprobs: jax.Array,
    rollout_logprobs: jax.Array,
    advantages: jax.Array,
    in_loss: jax.Array,
    rows: jax.Array,
    *,
    delta: float,
) -> jax.Array:
    """Returns the off-policy sequence mask of DeepSeek-V3.2 (arXiv 2512.02556, Eq. 8 and 9).

    A row with a negative advantage is masked if the policy that sampled gives its tokens a mean
    log-probability that is more than `delta` above that of the policy that is trained. A token
    without a record counts as a difference of 0.

    Args:
        logprobs: float32 [M] log-probabilities of the policy that is trained, 0 outside the mask.
        rollout_logprobs: [M] log-probabilities that the sampler recorded; NaN without a record.
        advantages: [M] advantages.
        in_loss: bool [M] mask.
        rows: int32 [M] row of each token, ascending; a row is complete.
        delta: largest mean difference in nats.

    Returns:
        float32 [M], 0 for the tokens of a masked row and 1 for others; it has no gradient.
    """
    recorded = in_loss & ~jnp.isnan(rollout_logprobs)
    difference = jnp.where(recorded, rollout_logprobs - logprobs, 0.0).astype(jnp.float32)
    length = jnp.maximum(row_sums(in_loss.astype(jnp.float32), rows), 1.0)
    keep = (advantages >= 0) | (row_sums(difference, rows) / length <= delta)
    return jax.lax.stop_gradient(keep.astype(jnp.float32))


def masked(x: jax.Array, in_loss: jax.Array) -> jax.Array:
    """Returns `x` in float32, with 0 outside the mask.

    Masking comes before any exp: a masked position must not become inf * 0 in the loss or in its
    gradient.
    """
    return jnp.where(in_loss, x, 0.0).astype(jnp.float32)


@jax.custom_vjp
def row_sums(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Sums the tokens of each row, and repeats the sum for each of its tokens.

    The order of the sums is fixed, which scatter-adds on a GPU do not promise.

    Args:
        x: float32 [M] values.
        rows: int32 [M] row of each value, ascending.

    Returns:
        float32 [M] sums.
    """

    def add(left, right):
        (left_row, left_sum), (right_row, right_sum) = left, right
        return right_row, right_sum + jnp.where(left_row == right_row, left_sum, 0.0)

    _, partial = jax.lax.associative_scan(add, (rows, x))
    last = jnp.searchsorted(rows, rows, side="right") - 1
    return partial[last]


def _row_sums_fwd(x, rows):
    return row_sums(x, rows), rows


def _row_sums_bwd(rows, gradient):
    return row_sums(gradient, rows), None  # The map is symmetric.


row_sums.defvjp(_row_sums_fwd, _row_sums_bwd)


def _ratio_metrics(ratio: jax.Array, in_loss: jax.Array, tokens: jax.Array) -> Metrics:
    return {
        "ratio_mean": (masked(ratio, in_loss).sum(), tokens),
        "ratio_max": masked(ratio, in_loss).max(),
    }


def _gated_loss(
    ratio: jax.Array,
    advantages: jax.Array,
    *,
    sapo_temperature_pos: float,
    sapo_temperature_neg: float,
) -> jax.Array:
    """Returns SAPO's L [M] (arXiv 2511.20347, Eq. 5 and 6): a sigmoid in place of the clip."""
    gate = jnp.where(advantages > 0, sapo_temperature_pos, sapo_temperature_neg)
    return -jax.nn.sigmoid(gate * (ratio - 1.0)) * (4.0 / gate) * advantages


def _clipped_loss(
    logprobs: jax.Array,
    ratio: jax.Array,
    advantages: jax.Array,
    in_loss: jax.Array,
    tokens: jax.Array,
    *,
    is_weight: bool,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> tuple[jax.Array, Metrics]:
    """Returns L of `policy_loss` [M] and the metrics of the ratio and its clipping.

    The clip fractions count the tokens whose gradient the clip removes. In 'clipped_weight' the
    clip removes no gradient, so they count the tokens whose ratio it changes.
    """
    clipped_ratio = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    low = in_loss & (ratio < 1.0 - clip_low)
    high = in_loss & (ratio > 1.0 + clip_high)
    if is_weight:
        loss = -jax.lax.stop_gradient(clipped_ratio) * advantages * logprobs
    else:
        loss = -jnp.minimum(ratio * advantages, clipped_ratio * advantages)
        low, high = low & (advantages < 0), high & (advantages > 0)

    metrics: Metrics = {
        "clip_fraction": ((low | high).sum().astype(jnp.float32), tokens),
        "clip_fraction_low": (low.sum().astype(jnp.float32), tokens),
        "clip_fraction_high": (high.sum().astype(jnp.float32), tokens),
        **_ratio_metrics(ratio, in_loss, tokens),
    }
    if dual_clip is not None:
        bound = -dual_clip * advantages
        beyond = in_loss & (advantages < 0) & (loss > bound)
        metrics["clip_fraction_dual"] = (beyond.sum().astype(jnp.float32), tokens)
        loss = jnp.where(advantages < 0, jnp.minimum(loss, bound), loss)
    return loss, metrics
