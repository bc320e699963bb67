"""One optimizer step on packed buffers.

These functions are compiled, each once for a run, because all buffers have one shape:

    zero_totals      gradient, loss and metrics of no buffer
    add_gradient     those of one more buffer; also returns its log-probabilities
    old_logprobs     the log-probabilities of a buffer before the first update of its rollout
    apply_gradient   the step of the optimizer
    buffer_logprobs, teacher_logprobs, buffer_kl, buffer_loss, own_routes_difference
                     a forward pass under a frozen policy
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from pallas_kernels.attention import PADDING
from qerl_jax.errors import UserError
from qerl_jax.policy import aqn
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.lora import Lora
from qerl_jax.policy.trainable import Trainable, current_policy
from qerl_jax.rl.logprobs import packed_kl, packed_logprobs
from qerl_jax.rl.losses import (
    LossConfig,
    LossTokens,
    Metrics,
    add_metrics,
    policy_loss,
    summarize_metrics,
    zero_metrics,
)
from qerl_jax.rl.packing import PackedBuffer, empty_buffer
from qerl_jax.system.import_path import import_function, names_function, source_of, user_errors

_ANY_SIZE = 128  # positions of a buffer whose metrics are never computed
_UNKNOWN = -20.0  # largest log-probability of a token that a teacher has no row for, in nats
_EXPERT_TOKENS = "expert_tokens"  # a pair among the metrics of a mixture of experts


@struct.dataclass
class TrainState:
    """Everything that an update changes."""

    trainable: Trainable  # parameters that are trained
    opt_state: optax.OptState  # state of the optimizer
    # int32 number of updates that were skipped since the last finite one.
    skipped_in_a_row: jax.Array


@dataclasses.dataclass(frozen=True)
class UpdateConfig:
    """Static options of an update."""

    model: ModelConfig  # architecture of the policy
    loss: LossConfig  # definition of the loss
    # Products of a layer that the backward pass computes again, as in
    # `transformer.packed_hidden_states`.
    recompute: tuple[str, ...] = ()
    replays_routes: bool = False  # whether buffers have the experts of the rollout's tokens
    teacher: ModelConfig | None = None  # architecture of the teacher, or None without one


@struct.dataclass
class Totals:
    """Sums over the buffers of an update."""

    loss: jax.Array  # float32 loss
    gradient: Any  # gradient of the loss, a tree like the `Trainable`
    metrics: Metrics  # metrics of `policy_loss` and train_entropy, combined by `add_metrics`


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Options of the optimizer."""

    learning_rate: float  # learning rate after the warm-up
    # Course of the learning rate after the warm-up: 'constant', or a decay to `final_fraction *
    # learning_rate` along a 'cosine' or a 'linear' curve.
    schedule: str
    final_fraction: float  # fraction of the learning rate that remains at the end of the decay
    # Number N of updates of the linear warm-up, in which update i = 0, 1, ... has (i + 1) / (N + 1)
    # of the learning rate, so that the first update is not lost.
    warmup_updates: int
    total_updates: int  # number of updates until the decay ends, warm-up included
    b1: float  # decay rate of the first moment
    b2: float  # decay rate of the second moment
    eps: float  # constant that is added to the root of the second moment
    # Decoupled weight decay, multiplied by the learning rate; norms and biases do not decay.
    weight_decay: float
    max_grad_norm: float  # largest global gradient norm; larger gradients are scaled down to it
    # 'adamw', or the import path 'package.module:function' of a user function, which makes the
    # optimizer after the clip, as in `make_optimizer`.
    name: str = "adamw"


@functools.cache
def make_optimizer(optimizer_config: OptimizerConfig) -> optax.GradientTransformation:
    """Returns AdamW or the optimizer of a user, preceded by a clip of the global gradient norm.

    A user function is called as `f(learning_rate)` with a function from the number of the update,
    a traced scalar from 0 on, to its learning rate. It returns an optax.GradientTransformation
    whose updates are added to the parameters. For equal options the optimizer is the same object,
    so that runs of a process share traced updates.

    Raises:
        UserError: the schedule or the name is unknown; a user function cannot be imported, raises,
            or returns something else.
    """
    rate, warmup = optimizer_config.learning_rate, optimizer_config.warmup_updates
    steps = max(1, optimizer_config.total_updates - warmup)
    decays = {
        "constant": lambda: optax.constant_schedule(rate),
        "cosine": lambda: optax.cosine_decay_schedule(
            rate, steps, alpha=optimizer_config.final_fraction
        ),
        "linear": lambda: optax.linear_schedule(
            rate, optimizer_config.final_fraction * rate, steps
        ),
    }
    if optimizer_config.schedule not in decays:
        raise UserError(
            f"unknown optimizer.schedule {optimizer_config.schedule!r}: choose from "
            f"{', '.join(decays)}"
        )
    decay = decays[optimizer_config.schedule]()

    def rate_of_update(count):
        warm = (count + 1) / (warmup + 1)
        return jnp.where(count < warmup, rate * warm, decay(count - warmup))

    if names_function(optimizer_config.name):
        clip = optax.clip_by_global_norm(optimizer_config.max_grad_norm)
        return optax.chain(clip, _custom_optimizer(optimizer_config.name, rate_of_update))
    if optimizer_config.name != "adamw":
        raise UserError(
            f"unknown optimizer.name {optimizer_config.name!r}: choose adamw, or name a function, "
            "package.module:function"
        )
    return optax.chain(
        optax.clip_by_global_norm(optimizer_config.max_grad_norm),
        optax.adamw(
            rate_of_update,
            b1=optimizer_config.b1,
            b2=optimizer_config.b2,
            eps=optimizer_config.eps,
            weight_decay=optimizer_config.weight_decay,
            mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree),
        ),
    )


def _custom_optimizer(
    function: str, rate: Callable[[jax.Array], jax.Array]
) -> optax.GradientTransformation:
    """Returns the optimizer that a user function makes, after a try on one matrix and one norm."""
    make = import_function(function, what="optimizer")
    usage = (
        "it is called as f(learning_rate) with a function from the number of the update to its "
        "learning rate, and returns an optax.GradientTransformation"
    )
    with user_errors(f"optimizer {function!r}", usage):
        optimizer = make(rate)
        if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
            raise TypeError(f"it returned a {type(optimizer).__name__}")
        tree = {"matrix": jnp.ones((4, 4)), "norm": jnp.ones(4)}

        def update(tree: dict) -> Any:
            return optimizer.update(tree, optimizer.init(tree), tree)[0]

        shapes = jax.tree.map(jnp.shape, jax.eval_shape(update, tree))
        if shapes != jax.tree.map(jnp.shape, tree):
            raise TypeError("its updates have other shapes than the parameters")
    return optimizer


def custom_optimizer_digest(
    config: OptimizerConfig, optimizer: optax.GradientTransformation, state: TrainState
) -> str:
    """Returns a digest of what the optimizer of a user computes, for the names of programs."""
    trainable: Any = state.trainable
    lowered = jax.jit(optimizer.update).lower(trainable, state.opt_state, trainable)
    source = source_of(import_function(config.name, what="optimizer"))
    return hashlib.sha256(f"{source}\0{lowered.as_text()}".encode()).hexdigest()


def init_state(trainable: Trainable, optimizer: optax.GradientTransformation) -> TrainState:
    """Returns the state before the first update."""
    return TrainState(
        trainable=trainable,
        opt_state=optimizer.init(trainable),  # pyrefly: ignore[bad-argument-type]
        skipped_in_a_row=jnp.int32(0),
    )


@functools.partial(jax.jit, static_argnames="update_config")
def zero_totals(trainable: Trainable, *, update_config: UpdateConfig) -> Totals:
    """Returns the totals before the first buffer."""
    buffer = empty_buffer(_ANY_SIZE)
    if update_config.loss.kl_coef:
        buffer = dataclasses.replace(buffer, ref_logprobs=buffer.old_logprobs)
    if update_config.teacher is not None:
        buffer = dataclasses.replace(buffer, teacher_logprobs=buffer.old_logprobs)
    _, metrics = jax.eval_shape(
        functools.partial(_loss, loss_config=update_config.loss),
        buffer.mask,
        buffer.mask,
        buffer,
        True,
    )
    if update_config.model.experts is not None:
        routes = update_config.model.empty_routes(_ANY_SIZE)
        chosen = np.moveaxis(routes, 1, 0)
        if update_config.replays_routes:
            buffer = dataclasses.replace(buffer, routes=routes)
        metrics |= jax.eval_shape(
            functools.partial(_routing, model=update_config.model), chosen, buffer
        )
    gradient = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), trainable)
    return Totals(loss=jnp.float32(0), gradient=gradient, metrics=zero_metrics(metrics))


@functools.partial(jax.jit, static_argnames="update_config", donate_argnames="totals")
def add_gradient(
    totals: Totals,
    trainable: Trainable,
    params: dict,
    noise: aqn.Noise | None,
    buffer: PackedBuffer,
    first: jax.Array,
    temperature: jax.Array,
    *,
    update_config: UpdateConfig,
) -> tuple[Totals, jax.Array]:
    """Adds the loss, the gradient and the metrics of one buffer.

    It is called once per buffer. In a scan over buffers XLA keeps what the backward pass should
    compute again: 158 GB instead of 18 GB for a 7B model with 8 rows of 4416 tokens on an H200.

    In the `first` update on the rollout the policy is the old policy: the log-probabilities of this
    forward pass are the old ones, and the ratio is 1. The totals of the buffers before are donated.

    Returns:
        The totals with this buffer, and float32 [N] log-probabilities of the old policy.
    """

    def buffer_loss(trainable):
        logprobs, entropies, chosen = packed_logprobs(
            current_policy(params, trainable, noise),
            trainable.lora,
            buffer,
            model_config=update_config.model,
            temperature=temperature,
            recompute=update_config.recompute,
            entropy_gradient=update_config.loss.entropy_coef != 0,
        )
        value, metrics = _loss(logprobs, entropies, buffer, first, loss_config=update_config.loss)
        if chosen is not None:
            metrics |= _routing(chosen, buffer, model=update_config.model)
        return value, (metrics, logprobs)

    (value, (metrics, logprobs)), gradient = jax.value_and_grad(buffer_loss, has_aux=True)(
        trainable
    )
    totals = Totals(
        loss=totals.loss + value,
        gradient=jax.tree.map(jnp.add, totals.gradient, gradient),
        metrics=add_metrics(totals.metrics, metrics),
    )
    return totals, jnp.where(first, logprobs, buffer.old_logprobs)


@functools.partial(jax.jit, static_argnames="update_config")
def old_logprobs(
    trainable: Trainable,
    params: dict,
    noise: aqn.Noise | None,
    buffer: PackedBuffer,
    temperature: jax.Array,
    *,
    update_config: UpdateConfig,
) -> jax.Array:
    """Returns float32 [N] log-probabilities under the policy that `add_gradient` would train."""
    return packed_logprobs(
        current_policy(params, trainable, noise),
        trainable.lora,
        buffer,
        model_config=update_config.model,
        temperature=temperature,
    )[0]


def _loss(logprobs, entropies, buffer, first, *, loss_config):
    """Returns the loss of a buffer and its metrics."""
    old_logprobs = jnp.where(first, jax.lax.stop_gradient(logprobs), buffer.old_logprobs)
    tokens = LossTokens(
        advantages=buffer.advantages,
        mask=buffer.mask,
        weights=buffer.weights,
        rows=buffer.rows,
        old_logprobs=old_logprobs,
        ref_logprobs=buffer.ref_logprobs,
        rollout_logprobs=buffer.rollout_logprobs,
        teacher_logprobs=buffer.teacher_logprobs,
    )
    entropies_with_gradient = entropies if loss_config.entropy_coef else None
    value, metrics = policy_loss(
        logprobs, tokens, config=loss_config, entropies=entropies_with_gradient
    )
    entropy = jnp.where(buffer.mask > 0, jax.lax.stop_gradient(entropies), 0.0).sum()
    return value, metrics | {"train_entropy": (entropy, buffer.mask.sum())}


def _routing(chosen, buffer, *, model):
    """Metrics of the routes of a buffer, given those [L, N, k] that the routers choose.

    `expert_tokens` has the tokens of each expert [L, E], of which `_summarize` makes the rest.
    """
    is_token, metrics = buffer.segments.ids != PADDING, {}
    taken, count = chosen, is_token.sum().astype(jnp.float32)
    if buffer.routes is not None:
        taken = jnp.moveaxis(buffer.routes, 1, 0).astype(chosen.dtype)
        same = (taken[..., :, None] == chosen[..., None, :]).any(axis=-1).all(axis=-1)
        differ = (~same & is_token).sum().astype(jnp.float32)
        metrics["routes_differ"] = differ, count * model.num_layers
    has_expert = taken[..., None] == jnp.arange(model.experts.count)
    tokens = (has_expert & is_token[:, None, None]).sum(axis=(1, 2)).astype(jnp.float32)
    return metrics | {_EXPERT_TOKENS: (tokens, count)}


def _summarize(metrics):
    """The scalars of the metrics of an update.

    Of the tokens of the experts, the largest part over that of uniform routes, and the number of
    experts without a token; NaN where there are no tokens.
    """
    scalars = summarize_metrics(metrics)
    if (shares := scalars.pop(_EXPERT_TOKENS, None)) is not None:
        uniform = shares.sum(axis=-1, keepdims=True) / shares.shape[-1]
        scalars["expert_load_max"] = (shares / uniform).max()
        unused = (shares == 0).sum().astype(jnp.float32)
        scalars["experts_unused"] = jnp.where(jnp.isnan(shares[0, 0]), jnp.nan, unused)
    return scalars


@functools.partial(jax.jit, static_argnames="optimizer", donate_argnames="state")
def apply_gradient(
    state: TrainState, totals: Totals, *, optimizer: optax.GradientTransformation
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Takes the step of the optimizer, unless the loss or the gradient is not finite.

    Without any buffer the gradient is zero, and the optimizer takes its step.

    The state before the update is donated.

    Returns:
        The new state and scalar metrics: loss, grad_norm (before the clip), update_skipped,
        train_entropy, and the metrics of `policy_loss`; of a mixture of experts also routes_differ
        (the part of all tokens and layers in which the routers would choose others than the
        rollout), expert_load_max and experts_unused.
    """
    grad_norm = optax.tree.norm(totals.gradient)
    finite = jnp.isfinite(grad_norm) & jnp.isfinite(totals.loss)
    before: Any = state.trainable  # The annotations of optax do not accept dataclasses as trees.
    updates, opt_state = optimizer.update(totals.gradient, state.opt_state, before)
    trainable = optax.apply_updates(before, updates)
    trainable, opt_state = jax.tree.map(
        lambda updated, previous: jnp.where(finite, updated, previous),
        (trainable, opt_state),
        (before, state.opt_state),
    )
    state = TrainState(
        trainable=trainable,
        opt_state=opt_state,
        skipped_in_a_row=jnp.where(finite, 0, state.skipped_in_a_row + 1),
    )
    return state, {
        "loss": totals.loss,
        "grad_norm": grad_norm,
        "update_skipped": ~finite,
        **_summarize(totals.metrics),
    }


@functools.partial(jax.jit, static_argnames="model_config")
def buffer_logprobs(
    params: dict,
    lora: Lora | None,
    buffer: PackedBuffer,
    temperature: jax.Array,
    *,
    model_config: ModelConfig,
) -> jax.Array:
    """Returns float32 [N] log-probabilities of the predicted tokens, without a gradient."""
    return packed_logprobs(
        params, lora, buffer, model_config=model_config, temperature=temperature
    )[0]


@functools.partial(jax.jit, static_argnames="model_config")
def teacher_logprobs(
    params: dict,
    lora: Lora | None,
    buffer: PackedBuffer,
    temperature: jax.Array,
    *,
    model_config: ModelConfig,
) -> jax.Array:
    """Returns what `buffer_logprobs` returns, under a teacher, which routes tokens by itself.

    A token id that the teacher has no row for is one that it hardly ever writes. Where it is read,
    its last one is read in its place, which in most models is a row of padding.
    """
    last = model_config.vocab_size * model_config.shards - 1
    known = dataclasses.replace(
        buffer,
        tokens=jnp.minimum(buffer.tokens, last),
        targets=jnp.minimum(buffer.targets, last),
        routes=None,
    )
    logprobs = buffer_logprobs(params, lora, known, temperature, model_config=model_config)
    return jnp.where(buffer.targets > last, jnp.minimum(logprobs, _UNKNOWN), logprobs)


@functools.partial(jax.jit, static_argnames="model_config")
def buffer_kl(
    params: dict,
    other_params: dict,
    lora: Lora | None,
    buffer: PackedBuffer,
    temperature: jax.Array,
    *,
    model_config: ModelConfig,
) -> jax.Array:
    """Returns the sum over a buffer of the exact KL, as `packed_kl` does."""
    return packed_kl(
        params, other_params, lora, buffer, model_config=model_config, temperature=temperature
    )


@functools.partial(jax.jit, static_argnames="model_config")
def buffer_loss(
    params: dict,
    lora: Lora | None,
    buffer: PackedBuffer,
    temperature: jax.Array,
    *,
    model_config: ModelConfig,
) -> jax.Array:
    """Returns the float32 sum over the predicted tokens of a buffer of -log-prob, in nats."""
    logprobs, *_ = packed_logprobs(
        params, lora, buffer, model_config=model_config, temperature=temperature
    )
    return -jnp.where(buffer.mask > 0, logprobs, 0.0).sum()


@functools.partial(jax.jit, static_argnames="model_config")
def own_routes_difference(
    params: dict,
    lora: Lora | None,
    buffer: PackedBuffer,
    temperature: jax.Array,
    *,
    model_config: ModelConfig,
) -> tuple[jax.Array, jax.Array]:
    """Returns how far log-probabilities are from the rollout's if the routers choose by themselves.

    Returns:
        float32 sum over the predicted tokens of a buffer of |log-prob - recorded log-prob|, in
        nats, and float32 number of tokens.
    """
    free = dataclasses.replace(buffer, routes=None)
    logprobs, *_ = packed_logprobs(
        params, lora, free, model_config=model_config, temperature=temperature
    )
    has_record = (buffer.mask > 0) & ~jnp.isnan(buffer.rollout_logprobs)
    distance = jnp.abs(logprobs - buffer.rollout_logprobs)
    return jnp.where(has_record, distance, 0.0).sum(), has_record.sum().astype(jnp.float32)
