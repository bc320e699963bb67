"""Log-probabilities of completions under a policy, without holding all logits at once."""

import jax
import jax.numpy as jnp

from qerl_jax.policy import transformer
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.lora import Lora
from qerl_jax.rl.packing import PackedBuffer
from qerl_jax.rollout.sampling import entropy

_CHUNK_BYTES = 256 << 20  # size of the float32 logits that are held at a time


def packed_logprobs(
    params: dict,
    lora: Lora | None,
    buffer: PackedBuffer,
    *,
    config: ModelConfig,
    temperature: float,
    recompute: tuple[str, ...] = (),
) -> tuple[jax.Array, jax.Array]:
    """Returns the log-probability of each predicted token and the entropy of its distribution.

    Args:
        params: parameters of the policy.
        lora: LoRA of the policy, or None.
        buffer: buffer of N positions.
        config: architecture of the policy.
        temperature: sampling temperature; 0 counts as 1.
        recompute: products of a layer that the backward pass computes again, as in
            `transformer.packed_hidden_states`.

    Returns:
        float32 [N] log-probabilities and float32 [N] entropies, in nats, in the order of
        `buffer.targets`. Both are finite and have no meaning outside the mask. The entropies have
        no gradient.
    """
    hidden = _predicting_states(params, lora, buffer, config=config, recompute=recompute)
    return _map_chunks(
        lambda hidden, ids: _chosen_and_entropy(params, hidden, ids, temperature),
        (hidden, buffer.targets),
        count=buffer.mask.sum(dtype=jnp.int32),
        vocab_size=config.vocab_size,
    )


def packed_kl(
    params: dict,
    other_params: dict,
    lora: Lora | None,
    buffer: PackedBuffer,
    *,
    config: ModelConfig,
    temperature: float,
) -> jax.Array:
    """Returns the sum of KL(policy | other policy) over the predicted tokens of a buffer.

    The KL is exact: it sums over the whole vocabulary. Both policies use the same LoRA.

    Args:
        params: parameters of the policy.
        other_params: parameters of the other policy.
        lora: LoRA of both policies, or None.
        buffer: buffer of N positions.
        config: architecture of both policies.
        temperature: sampling temperature; 0 counts as 1.

    Returns:
        float32 scalar, in nats.
    """
    hidden, other = (
        _predicting_states(p, lora, buffer, config=config) for p in (params, other_params)
    )

    def exact_kl(hidden, other):
        logprobs = _log_softmax(params, hidden, temperature)
        other_logprobs = _log_softmax(other_params, other, temperature)
        return jnp.sum(jnp.exp(logprobs) * (logprobs - other_logprobs), axis=-1)

    count = buffer.mask.sum(dtype=jnp.int32)
    kl = _map_chunks(exact_kl, (hidden, other), count=count, vocab_size=config.vocab_size)
    return jnp.sum(jnp.where(buffer.mask > 0, kl, 0.0))


def completion_logprobs(
    params: dict,
    lora: Lora | None,
    tokens: jax.Array,
    prompt_lengths: jax.Array,
    lengths: jax.Array,
    *,
    width: int,
    config: ModelConfig,
    temperature: float,
) -> tuple[jax.Array, jax.Array]:
    """Returns what `packed_logprobs` returns, for rows that are not packed.

    Args:
        params: parameters of the policy.
        lora: LoRA of the policy, or None.
        tokens: int32 [B, T] token ids, prompt and completion without a gap, padded on the right.
        prompt_lengths: int32 [B] prompt lengths in tokens, at least 1.
        lengths: int32 [B] lengths of prompt and completion together.
        width: number of columns C of the result, at least the length of the longest completion.
        config: architecture of the policy.
        temperature: sampling temperature; 0 counts as 1.

    Returns:
        float32 [B, C] log-probabilities and float32 [B, C] entropies, in nats. Column c belongs to
        completion token c; values past the end of a completion are finite and have no meaning.
        The entropies have no gradient.
    """
    hidden = transformer.hidden_states(params, lora, tokens, lengths, config=config)
    # Position t predicts token t + 1.
    targets = jnp.minimum(prompt_lengths[:, None] + jnp.arange(width), tokens.shape[1] - 1)
    hidden = jnp.take_along_axis(hidden, targets[..., None] - 1, axis=1)
    ids = jnp.take_along_axis(tokens, targets, axis=1)
    outputs = _map_chunks(
        lambda hidden, ids: _chosen_and_entropy(params, hidden, ids, temperature),
        (hidden.reshape(-1, hidden.shape[-1]), ids.reshape(-1)),
        count=jnp.int32(ids.size),
        vocab_size=config.vocab_size,
    )
    return tuple(x.reshape(ids.shape) for x in outputs)


def _predicting_states(params, lora, buffer, *, config, recompute=()):
    """Returns the hidden states [N, D] of a buffer in the order of its predicted tokens."""
    hidden = transformer.packed_hidden_states(
        params,
        lora,
        buffer.tokens,
        buffer.positions,
        buffer.segments,
        config=config,
        recompute=recompute,
    )
    # The order is a permutation, so the gradient adds nothing up.
    return hidden.at[buffer.order].get(unique_indices=True, mode="promise_in_bounds")


def _chosen_and_entropy(params, hidden, ids, temperature):
    logprobs = _log_softmax(params, hidden, temperature)
    chosen = jnp.take_along_axis(logprobs, ids[:, None], axis=-1)[:, 0]
    return chosen, jax.lax.stop_gradient(entropy(logprobs))


def _log_softmax(params, hidden, temperature):
    return jax.nn.log_softmax(transformer.logits(params, hidden) / (temperature or 1.0))


def _map_chunks(function, args, *, count, vocab_size):
    """Applies `function` to arrays [M, ...] in chunks, to bound the logits in memory.

    With several chunks, the backward pass recomputes the logits of a chunk instead of storing them,
    and chunks that begin at `count` or later are not computed: their results are zeros.
    """
    total = args[0].shape[0]
    chunks = -(-total // max(1, _CHUNK_BYTES // (4 * vocab_size)))
    if chunks == 1:
        return function(*args)
    size = -(-total // chunks)

    def split(x):
        padding = ((0, chunks * size - total),) + ((0, 0),) * (x.ndim - 1)
        return jnp.pad(x, padding).reshape(chunks, size, *x.shape[1:])

    def zeros(*args):
        shapes = jax.eval_shape(function, *args)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    @jax.checkpoint
    def chunk(first, *args):
        return jax.lax.cond(first < count, function, zeros, *args)

    outputs = jax.lax.map(
        lambda part: chunk(*part), (size * jnp.arange(chunks), *(split(x) for x in args))
    )
    return jax.tree.map(lambda x: x.reshape(-1)[:total], outputs)
