"""Clipped policy-gradient losses, in float32, as sums that add up over the tokens of an update.

A loss is `sum(weights * per_token_loss)`. The weights carry the aggregation and its denominator.
They are computed once, from the mask of all rows of an update (`token_weights`), so the parts of
an update only add: losses, gradients and metrics do not depend on how the rows are split.
"""

import dataclasses
import hashlib
import inspect
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.errors import UserError
from qerl_jax.system.import_path import import_function, names_function, source_of, user_errors

# The named losses differ in these fields of LossConfig only.
LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"aggregation": "sequence"},  # arXiv 2402.03300, Eq. 3
    "dapo": {"aggregation": "token"},  # arXiv 2503.14476, Eq. 8
    "bnpo": {"aggregation": "micro_batch"},  # what QeRL's released code calls DAPO
    "dr_grpo": {"aggregation": "constant"},  # arXiv 2503.20783, with advantage_scale 'none'
    "gspo": {"aggregation": "sequence", "ratio": "sequence"},  # arXiv 2507.18071, Eq. 5
    "gspo_token": {"aggregation": "sequence", "ratio": "sequence_token"},  # the same, Eq. 13
    "cispo": {"aggregation": "token", "objective": "clipped_weight"},  # arXiv 2506.13585, Eq. 4
    "sapo": {"aggregation": "sequence", "objective": "soft_gate"},  # arXiv 2511.20347, Eq. 5
    # arXiv 2512.02556, Eq. 7: GRPO with the off-policy sequence mask; delta as TRL suggests it.
    "opsm": {"aggregation": "sequence", "off_policy_delta": 0.5},
}

AGGREGATIONS = ("token", "sequence", "sequence_sum", "constant", "micro_batch")
KL_GRADS = ("k3", "k3_clipped", "unbiased")

_K3_CLIP = 10.0  # the bound that verl uses
# Nats to which verl clamps a log ratio before it takes the exponential: e^89 overflows float32, and
# then a gradient is NaN even where it is multiplied by the 0 of a clip.
_LOG_RATIO_CLIP = 20.0

Metrics = dict[str, jax.Array | tuple[jax.Array, jax.Array]]

_USAGE = (
    "it is called as f(ratio, advantages, logprobs, mask) with arrays of one shape, under jax.jit, "
    "and rows=ROWS if it has an argument of that name, and returns the loss of each token"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Defines a policy loss.

    The rows of `config.fields` have the defaults and the limits.
    """

    # How the token losses become one: a name that `token_weights` lists, or the import path
    # 'package.module:function' of a user function, as in `custom_weights`.
    aggregation: str
    # Granularity of the probability ratio between the new and the old policy: 'token' for one ratio
    # per token, 'sequence' for the geometric mean over the tokens of a row, or 'sequence_token' for
    # the value of that mean with the gradient of the token's own ratio.
    ratio: str = "token"
    # Form of the loss of a token. 'clipped_ratio' is PPO's clipped surrogate; 'clipped_weight' is
    # REINFORCE weighted with the clipped ratio, in which every token keeps a gradient; 'soft_gate'
    # is SAPO's sigmoid of the ratio. The import path 'package.module:function' names a user
    # function, as in `custom_loss`.
    objective: str = "clipped_ratio"
    # Distance from 1 at which the ratio is clipped from below, at 1 - clip_low; 1 or more never
    # clips.
    clip_low: float
    # Distance from 1 at which the ratio is clipped from above, at 1 + clip_high; a value larger
    # than clip_low is DAPO's clip-higher.
    clip_high: float
    # Largest factor that a negative advantage is multiplied with (arXiv 1912.09729), above 1; None
    # sets no bound. Only 'clipped_ratio' takes one.
    dual_clip: float | None = None
    sapo_temperature_pos: float  # temperature of 'soft_gate' where the advantage is positive
    sapo_temperature_neg: float  # the same where it is not
    # Mean difference of log-probabilities, in nats, beyond which a row with a negative advantage is
    # masked, as in `off_policy_mask`; None masks none.
    off_policy_delta: float | None = None
    kl_coef: float  # factor of the KL to the reference policy; 0 leaves the KL out
    # How the KL is estimated. 'k3' is the plain estimator, whose gradient differs from the gradient
    # of the KL. 'k3_clipped' is k3 bounded by 10, without a gradient beyond 10. 'unbiased' is k3
    # times the ratio, whose expected gradient is the gradient of the KL, but not with the ratio of
    # a sequence (as in TRL).
    kl_grad: str
    # Upper bound of the truncated importance weight (TIS), the probability ratio of the old policy
    # to the policy that sampled; None applies no weight.
    tis_cap: float | None = None
    entropy_coef: float  # factor of the entropy bonus; 0 leaves it out
    teacher_coef: float = 0.0  # factor of the reverse KL to the teacher; 0 leaves it out

    def __post_init__(self):
        if names_function(self.aggregation):
            import_function(self.aggregation, what="loss weight")
        if names_function(self.objective):
            check_custom_loss(self.objective)
        if self.dual_clip is not None:
            if not self.dual_clip > 1.0:
                raise UserError(f"dual_clip is {self.dual_clip}: it must be greater than 1")
            if self.objective != "clipped_ratio":
                raise UserError(
                    f"dual_clip is {self.dual_clip}, but this loss does not clip the ratio as PPO "
                    "does: leave it out (rl.dual_clip=0)"
                )


def loss_config(name: str, *, aggregation: str = "", **options) -> LossConfig:
    """Returns the config of a named loss.

    Args:
        name: name of the loss, a key of `LOSSES`, or the import path 'package.module:function' of a
            user function, whose losses are averaged over all tokens.
        aggregation: aggregation that replaces the one in `LOSSES`; '' keeps it.
        **options: fields of LossConfig; None keeps what `LOSSES` says.

    Returns:
        The config.

    Raises:
        UserError: the name is unknown, or an option is out of range.
    """
    if names_function(name):
        row: dict[str, Any] = {"aggregation": "token", "objective": name}
    elif name in LOSSES:
        row = dict(LOSSES[name])
    else:
        raise UserError(
            f"unknown loss {name!r}: choose from {', '.join(LOSSES)}, or name a function, "
            "package.module:function"
        )
    if aggregation:
        row["aggregation"] = aggregation
    return LossConfig(**row | {key: value for key, value in options.items() if value is not None})


def token_weights(
    mask: np.ndarray,
    aggregation: str,
    *,
    max_new_tokens: int | None = None,
    micro_batch_rows: int | None = None,
) -> np.ndarray:
    """Returns the weight of each token in the loss, computed on the host.

        'token'         1 / (tokens of the batch)
        'sequence'      1 / (tokens of the row * rows of the batch)
        'sequence_sum'  1 / (rows of the batch)
        'constant'      1 / (max_new_tokens * rows of the batch)
        'micro_batch'   1 / (tokens of the micro-batch * micro-batches of the batch)

    Only tokens in the mask are counted. A row that is masked out entirely adds no tokens but still
    counts as a row, as in TRL. A batch without any tokens has weights of 0. The last micro-batch
    counts as much as the others, even if it has fewer rows.

    Returns:
        float32 [B, C] weights, 0 outside the mask.

    Raises:
        UserError: the aggregation is unknown.
        ValueError: an argument that the aggregation needs is missing.
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
    if aggregation not in AGGREGATIONS:
        names = ", ".join(AGGREGATIONS)
        raise UserError(f"unknown aggregation {aggregation!r}: choose from {names}")
    if micro_batch_rows is None:
        raise ValueError("the aggregation 'micro_batch' needs micro_batch_rows")
    starts = np.arange(0, rows, micro_batch_rows)
    tokens = np.add.reduceat(mask.sum(axis=1), starts).clip(1) * len(starts)
    return mask / np.repeat(tokens, micro_batch_rows)[:rows, None]


def custom_weights(
    mask: np.ndarray, function: str, *, advantages: np.ndarray, logprobs: np.ndarray
) -> np.ndarray:
    """Returns the weight of each token in the loss, computed by a user function.

    The function is called on the host, once per rollout, as `f(mask, advantages, logprobs)` with
    the arrays [B, C], [B] and [B, C] of all rows; a token without a recorded log-probability has
    NaN. It returns what `token_weights` returns, and chooses the denominator.

    Returns:
        float32 [B, C] weights, 0 outside the mask.

    Raises:
        UserError: the function cannot be imported, raises, returns another shape, or returns a
            weight that is not finite for a token in the loss.
    """
    weights = np.where(
        mask > 0, _compute_user_weights(function, mask, advantages, logprobs), np.float32(0)
    )
    if not np.isfinite(weights).all():
        raise UserError(f"loss weight {function!r}: a weight of a token in the loss is not finite")
    return weights


def check_custom_weights(function: str, rows: int) -> None:
    """Calls a user function on a made-up batch, so that a mistake is an error before training.

    Args:
        function: import path 'package.module:function'.
        rows: B of the run, whose groups the function may look for.

    Raises:
        UserError: the function cannot be imported, raises, or returns another shape.
    """
    columns, row = np.arange(8), np.arange(rows)
    mask = (columns <= row[:, None] % 8).astype(np.float32)
    advantages = np.where(row % 2, 1.0, -1.0).astype(np.float32)
    _compute_user_weights(function, mask, advantages, -mask * (1 + columns.astype(np.float32)))


def _compute_user_weights(
    function: str, mask: np.ndarray, advantages: np.ndarray, logprobs: np.ndarray
) -> np.ndarray:
    compute = import_function(function, what="loss weight")
    usage = "it is called as f(mask, advantages, logprobs) and returns an array like the mask"
    with user_errors(f"loss weight {function!r}", usage):
        weights = np.asarray(compute(mask.copy(), advantages.copy(), logprobs.copy()), np.float32)
    if weights.shape != mask.shape:
        raise UserError(
            f"loss weight {function!r}: it returned the shape {weights.shape}, [B, C] is "
            f"{mask.shape}: return an array like the mask"
        )
    return weights


def k3(logprobs: jax.Array, ref_logprobs: jax.Array) -> jax.Array:
    """Estimates KL(policy | reference) at each sampled token as exp(ref - new) - (ref - new) - 1.

    The difference is clamped to 20 nats on either side, beyond which there is no gradient.

    Returns:
        The estimates in nats, in the shape of the arguments, never negative.
    """
    difference = ref_logprobs - logprobs
    far = jnp.abs(difference) > _LOG_RATIO_CLIP
    difference = jnp.where(far, jax.lax.stop_gradient(_clip(difference)), difference)
    return jnp.expm1(difference) - difference


@flax.struct.dataclass
class LossTokens:
    """What a loss reads of M tokens of an update besides their log-probabilities."""

    advantages: jax.Array  # [M] advantages
    mask: jax.Array  # [M] mask, 1 for the tokens in the loss
    weights: jax.Array  # [M] weights of the tokens, from `token_weights`
    # int32 [M] row of each token, ascending; a row is complete. Only the ratios of a sequence and
    # off_policy_delta read it.
    rows: jax.Array
    # [M] log-probabilities under the policy before the first update of this rollout. None stands
    # for those of the policy, which makes the ratio exactly 1.
    old_logprobs: jax.Array | None = None
    # [M] log-probabilities under the reference policy; needed if kl_coef is not 0.
    ref_logprobs: jax.Array | None = None
    # [M] log-probabilities that the sampler recorded; needed if tis_cap or off_policy_delta is set.
    # NaN marks a token without a record, whose w is 1.
    rollout_logprobs: jax.Array | None = None
    # [M] log-probabilities under the teacher; needed if teacher_coef is not 0.
    teacher_logprobs: jax.Array | None = None


def policy_loss(
    logprobs: jax.Array,
    tokens: LossTokens,
    *,
    config: LossConfig,
    entropies: jax.Array | None = None,
) -> tuple[jax.Array, Metrics]:
    """Returns the loss of some tokens of an update, and their metrics.

    Let A be the advantage, r = exp(new - old) the probability ratio of a token (or, with
    ratio='sequence', exp of the mean of new - old over the tokens of the row), and
    c(r) = clip(r, 1 - clip_low, 1 + clip_high). The loss of a token is

        M w L + kl_coef KL - entropy_coef H

                             L = -min(r A, c(r) A)                 'clipped_ratio'
                             L = -stop_gradient(c(r)) A new        'clipped_weight'
                             L = -sigmoid(g (r - 1)) 4 / g A       'soft_gate'
                             L = f(r, A, new, mask[, rows])        a user function

    where g is sapo_temperature_pos if A > 0, else sapo_temperature_neg. M is 0 for a row that
    off_policy_delta masks, else 1. With a teacher A is the advantage of the token,
    A - teacher_coef (old - teacher), in which nothing has a gradient.
    KL is the estimate that kl_grad selects, and H the entropy of the distribution that the token
    was drawn from, as in PPO (arXiv 1707.06347, Eq. 9). With dual_clip, L is at most -dual_clip A
    if A is negative. The factor w = min(exp(old - rollout), tis_cap) corrects for a policy that
    sampled with other kernels or with noise, and therefore differs from the old one; without
    tis_cap, w is 1.

    Log-probabilities outside the mask may have any value, NaN included. The logarithm of every
    ratio is clamped to 20 nats on either side before the exponential, as in verl.

    Args:
        logprobs: [M] log-probabilities of the sampled tokens under the policy that is trained.
        tokens: what else the loss reads of the tokens.
        config: definition of the loss.
        entropies: [M] entropies of the policy that is trained, in nats, with their gradient; needed
            if entropy_coef is not 0.

    Returns:
        The loss, a float32 scalar, and the metrics. The losses of all tokens of an update add up
        to the loss of the update. A metric is a pair (sum over tokens, number of tokens) or a
        maximum, -inf over no token; `add_metrics` and `summarize_metrics` combine the metrics of
        the parts of an update.

    Raises:
        ValueError: ref_logprobs, rollout_logprobs or entropies are needed but missing.
        UserError: a user function fails.
    """
    _check_needs(config, tokens, entropies)
    ref_logprobs, rollout_logprobs = tokens.ref_logprobs, tokens.rollout_logprobs
    in_loss = tokens.mask > 0
    logprobs = masked(logprobs, in_loss)
    old_logprobs = logprobs if tokens.old_logprobs is None else masked(tokens.old_logprobs, in_loss)
    old_logprobs = jax.lax.stop_gradient(old_logprobs)
    log_ratio = _log_ratio(logprobs, old_logprobs, in_loss, tokens.rows, config.ratio)
    ratio = _exp(log_ratio)
    count = _count_tokens(in_loss)
    tokens, teacher_metrics = _taught(tokens, old_logprobs, in_loss, config.teacher_coef)
    loss, metrics = _token_loss(logprobs, ratio, tokens, in_loss, config=config)
    metrics |= teacher_metrics
    if config.off_policy_delta is not None and rollout_logprobs is not None:
        keep = off_policy_mask(
            logprobs,
            rollout_logprobs,
            tokens.advantages,
            in_loss,
            tokens.rows,
            delta=config.off_policy_delta,
        )
        metrics["off_policy_masked"] = (masked(1.0 - keep, in_loss).sum(), count)
        loss = loss * keep
    if rollout_logprobs is not None:
        difference, difference_metrics = _rollout_difference(
            old_logprobs, rollout_logprobs, in_loss
        )
        metrics |= difference_metrics
        if config.tis_cap is not None:
            importance = jnp.minimum(_exp(difference), config.tis_cap)
            loss = loss * importance
            metrics["tis_weight"] = (masked(importance, in_loss).sum(), count)
            capped = (difference > jnp.log(config.tis_cap)).astype(jnp.float32)
            metrics["tis_capped"] = (masked(capped, in_loss).sum(), count)
    if ref_logprobs is not None:
        kl = k3(logprobs, jax.lax.stop_gradient(masked(ref_logprobs, in_loss)))
        metrics["kl"] = (kl.sum(), count)
        if config.kl_grad == "k3_clipped":
            kl = jnp.minimum(kl, _K3_CLIP)
        elif config.kl_grad == "unbiased":
            kl = kl * ratio
        loss = loss + config.kl_coef * kl
    if entropies is not None:
        loss = loss - config.entropy_coef * masked(entropies, in_loss)
    return (tokens.weights * loss).sum(), jax.lax.stop_gradient(metrics)


def _check_needs(config: LossConfig, tokens: LossTokens, entropies: jax.Array | None) -> None:
    """Raises a ValueError where an array that the loss needs is missing."""
    for field, array_name, array in (
        ("kl_coef", "ref_logprobs", tokens.ref_logprobs),
        ("tis_cap", "rollout_logprobs", tokens.rollout_logprobs),
        ("off_policy_delta", "rollout_logprobs", tokens.rollout_logprobs),
        ("entropy_coef", "entropies", entropies),
        ("teacher_coef", "teacher_logprobs", tokens.teacher_logprobs),
    ):
        if getattr(config, field) and array is None:
            raise ValueError(f"{field}={getattr(config, field)} needs {array_name}")


def _taught(
    tokens: LossTokens, old_logprobs: jax.Array, in_loss: jax.Array, coef: float
) -> tuple[LossTokens, Metrics]:
    """Returns the tokens with the advantages that a teacher adds, and its metric.

    On samples of the old policy, -(old - teacher) as advantage has the gradient of the reverse KL,
    KL(policy | teacher), in expectation; its mean estimates the KL (k1).
    """
    if not coef or tokens.teacher_logprobs is None:
        return tokens, {}
    distance = old_logprobs - jax.lax.stop_gradient(masked(tokens.teacher_logprobs, in_loss))
    advantages = tokens.advantages - coef * distance
    metrics: Metrics = {"teacher/reverse_kl": (distance.sum(), _count_tokens(in_loss))}
    return dataclasses.replace(tokens, advantages=advantages), metrics


def _clip(log_ratio: jax.Array) -> jax.Array:
    """Returns a log ratio whose exponential is finite; NaN stays NaN."""
    return jnp.clip(log_ratio, -_LOG_RATIO_CLIP, _LOG_RATIO_CLIP)


@jax.custom_jvp
def _exp(log_ratio: jax.Array) -> jax.Array:
    """Returns exp of a clipped log ratio, without a gradient where the clip changes it.

    The gradient of `jnp.clip` is a factor of its own, by which XLA would round others differently.
    """
    return jnp.exp(_clip(log_ratio))


@_exp.defjvp
def _exp_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    ratio = _exp(*primals)
    slope = jnp.where(jnp.abs(primals[0]) > _LOG_RATIO_CLIP, 0.0, ratio)
    return ratio, tangents[0] * slope


def _log_ratio(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    in_loss: jax.Array,
    rows: jax.Array,
    granularity: str,
) -> jax.Array:
    """Returns log r of `policy_loss` [M]."""
    log_ratio = logprobs - old_logprobs
    if granularity == "token":
        return log_ratio
    length = jnp.maximum(row_sums(in_loss.astype(jnp.float32), rows), 1.0)
    log_ratio = row_sums(log_ratio, rows) / length
    if granularity == "sequence":
        return log_ratio
    # The value is 0 and the gradient is that of the token.
    zero_with_gradient = logprobs - jax.lax.stop_gradient(logprobs)
    return jax.lax.stop_gradient(log_ratio) + zero_with_gradient


def _rollout_difference(
    old_logprobs: jax.Array, rollout_logprobs: jax.Array, in_loss: jax.Array
) -> tuple[jax.Array, Metrics]:
    """Returns old - rollout [M], 0 for tokens without a record, and its metrics."""
    has_record = in_loss & ~jnp.isnan(rollout_logprobs)
    difference = jnp.where(has_record, old_logprobs - rollout_logprobs, 0.0).astype(jnp.float32)
    distance = jnp.abs(difference)
    return difference, {
        "logprob_diff_mean": (distance.sum(), has_record.sum().astype(jnp.float32)),
        "logprob_diff_max": _max(distance, has_record),
        # k3 of KL(policy that sampled | old policy), in nats a token.
        "rollout_kl": (
            (jnp.expm1(difference) - difference).sum(),
            has_record.sum().astype(jnp.float32),
        ),
    }


def add_metrics(total: Metrics, part: Metrics) -> Metrics:
    """Combines the metrics of two parts of an update: sums and counts add up, maxima compete."""

    def combine(left: Any, right: Any) -> Any:
        if isinstance(right, tuple):
            return left[0] + right[0], left[1] + right[1]
        return jnp.maximum(left, right)

    return {name: combine(total[name], value) for name, value in part.items()}


def summarize_metrics(metrics: Metrics) -> dict[str, jax.Array]:
    """Returns the scalars of the combined metrics of an update.

    Returns:
        Scalars by name: the mean over all tokens of each pair, and the maxima; NaN where there are
        no tokens, as nothing was measured.
    """

    def summarize(value: Any) -> jax.Array:
        if isinstance(value, tuple):
            total, count = value
            return jnp.where(count > 0, total / jnp.maximum(count, 1.0), jnp.nan)
        return jnp.where(value == -jnp.inf, jnp.nan, value)

    return {name: summarize(value) for name, value in metrics.items()}


def zero_metrics(shapes: Metrics) -> Metrics:
    """Returns the metrics of no token, which change nothing in `add_metrics`."""
    return {
        name: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), value)
        if isinstance(value, tuple)
        else jnp.full(value.shape, -jnp.inf, value.dtype)
        for name, value in shapes.items()
    }


# --- The loss of a single token -------------------------------------------------------------------


def _token_loss(
    logprobs: jax.Array,
    ratio: jax.Array,
    tokens: LossTokens,
    in_loss: jax.Array,
    *,
    config: LossConfig,
) -> tuple[jax.Array, Metrics]:
    """Returns L of `policy_loss` and the metrics of the ratio.

    All arrays are [M]; the log-probabilities are 0 outside the mask.

    Returns:
        float32 [M] losses, whose values outside the mask do not count, and the metrics.

    Raises:
        UserError: a user function fails, or returns another shape.
    """
    advantages = tokens.advantages.astype(jnp.float32)
    if config.objective == "soft_gate":
        loss = _gated_loss(ratio, advantages, config)
        return loss, _ratio_metrics(ratio, in_loss)
    if names_function(config.objective):
        loss = custom_loss(config.objective, ratio, advantages, logprobs, in_loss, tokens.rows)
        return masked(loss, in_loss), _ratio_metrics(ratio, in_loss)
    return _clipped_loss(logprobs, ratio, advantages, in_loss, config=config)


def custom_loss(
    function: str,
    ratio: jax.Array,
    advantages: jax.Array,
    logprobs: jax.Array,
    in_loss: jax.Array,
    rows: jax.Array,
) -> jax.Array:
    """Returns the losses of tokens [M], computed by a user function of JAX.

    The function gets `in_loss` as float32 and, if it has an argument `rows`, the row of each token
    by name: ascending, and complete.

    Raises:
        UserError: the function cannot be imported, raises, or returns another shape.
    """
    compute = import_function(function, what="loss")
    with user_errors(f"loss {function!r}", _USAGE):
        named = {"rows": rows} if "rows" in inspect.signature(compute).parameters else {}
        mask = in_loss.astype(jnp.float32)
        loss = jnp.asarray(compute(ratio, advantages, logprobs, mask, **named))
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
    values, in_loss, rows = _shapes_of_tokens(4)
    jax.eval_shape(lambda *a: custom_loss(function, *a), values, values, values, in_loss, rows)


def _shapes_of_tokens(tokens: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The shapes of what a user function gets: values, mask and rows of tokens."""
    dtypes = (np.float32, np.bool_, np.int32)
    return tuple(jax.ShapeDtypeStruct((tokens,), dtype) for dtype in dtypes)


def custom_loss_digest(function: str, tokens: int = 4096) -> str:
    """Returns a digest of what a user function computes, for the names of compiled programs.

    Its import path stays the same where its code, or a number that it reads, has changed. The
    digest is that of its source, and of the program of its values and its gradients, which shows
    what it calls and closes over.

    Args:
        function: import path 'package.module:function'.
        tokens: number of tokens of a buffer, on which the program may depend.

    Raises:
        UserError: as in `custom_loss`.
    """

    def with_gradient(ratio, advantages, logprobs, in_loss, rows, cotangent):
        loss, pull_back = jax.vjp(
            lambda *a: custom_loss(function, a[0], advantages, a[1], in_loss, rows),
            ratio,
            logprobs,
        )
        return loss, pull_back(cotangent)

    values, in_loss, rows = _shapes_of_tokens(tokens)
    lowered = jax.jit(with_gradient).lower(values, values, values, in_loss, rows, values)
    source = source_of(import_function(function, what="loss"))
    return hashlib.sha256(f"{source}\0{lowered.as_text()}".encode()).hexdigest()


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
    without a record (NaN) counts as a difference of 0. All arrays are [M], and rows are complete.

    Returns:
        float32 [M], 0 for the tokens of a masked row and 1 for others; it has no gradient.
    """
    has_record = in_loss & ~jnp.isnan(rollout_logprobs)
    difference = jnp.where(has_record, rollout_logprobs - logprobs, 0.0).astype(jnp.float32)
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
    """Sums the tokens [M] of each row, and repeats the sum for each of its tokens; rows ascend.

    The order of the sums is fixed, which scatter-adds on a GPU do not promise.

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


def _count_tokens(in_loss: jax.Array) -> jax.Array:
    """Returns the float32 number of tokens in the loss."""
    return in_loss.sum().astype(jnp.float32)


def _max(x: jax.Array, measured: jax.Array) -> jax.Array:
    """Returns the maximum of some tokens, a float32 scalar; -inf of none."""
    return jnp.max(x, where=measured, initial=-jnp.inf).astype(jnp.float32)


def _ratio_metrics(ratio: jax.Array, in_loss: jax.Array) -> Metrics:
    return {
        "ratio_mean": (masked(ratio, in_loss).sum(), _count_tokens(in_loss)),
        "ratio_max": _max(ratio, in_loss),
    }


def _gated_loss(ratio: jax.Array, advantages: jax.Array, config: LossConfig) -> jax.Array:
    """Returns SAPO's L [M] (arXiv 2511.20347, Eq. 5 and 6): a sigmoid in place of the clip."""
    gate = jnp.where(advantages > 0, config.sapo_temperature_pos, config.sapo_temperature_neg)
    return -jax.nn.sigmoid(gate * (ratio - 1.0)) * (4.0 / gate) * advantages


def _clipped_loss(
    logprobs: jax.Array,
    ratio: jax.Array,
    advantages: jax.Array,
    in_loss: jax.Array,
    *,
    config: LossConfig,
) -> tuple[jax.Array, Metrics]:
    """Returns L of `policy_loss` [M] and the metrics of the ratio and its clipping.

    The clip fractions count the tokens whose gradient the clip removes. In 'clipped_weight' the
    clip removes no gradient, so they count the tokens whose ratio it changes.
    """
    lower, upper = 1.0 - config.clip_low, 1.0 + config.clip_high
    clipped_ratio = jnp.clip(ratio, lower, upper)
    low, high = in_loss & (ratio < lower), in_loss & (ratio > upper)
    tokens = _count_tokens(in_loss)
    if config.objective == "clipped_weight":
        loss = -jax.lax.stop_gradient(clipped_ratio) * advantages * logprobs
    else:
        loss = -jnp.minimum(ratio * advantages, clipped_ratio * advantages)
        low, high = low & (advantages < 0), high & (advantages > 0)

    metrics: Metrics = {
        "clip_fraction": ((low | high).sum().astype(jnp.float32), tokens),
        "clip_fraction_low": (low.sum().astype(jnp.float32), tokens),
        "clip_fraction_high": (high.sum().astype(jnp.float32), tokens),
        **_ratio_metrics(ratio, in_loss),
    }
    if config.dual_clip is not None:
        bound = -config.dual_clip * advantages
        beyond = in_loss & (advantages < 0) & (loss > bound)
        metrics["clip_fraction_dual"] = (beyond.sum().astype(jnp.float32), tokens)
        loss = jnp.where(advantages < 0, jnp.minimum(loss, bound), loss)
    return loss, metrics
