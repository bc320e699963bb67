"""Log-probabilities of completions under a policy, without holding all logits at once.

Where weights are cut between devices, each has the logits of its part of the vocabulary. Maxima and
sums over the vocabulary are then those of all devices, a number for each token.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from qerl_jax.policy import transformer
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.lora import Lora
from qerl_jax.policy.tensor_parallel import over_vocabulary, own_tokens
from qerl_jax.rl.packing import PackedBuffer

_CHUNK_BYTES = 256 << 20  # size of the float32 logits that are held at a time
_NORMALIZER = "normalizer"  # name of what the backward pass keeps of a softmax


def packed_logprobs(
    params: dict,
    lora: Lora | None,
    buffer: PackedBuffer,
    *,
    config: ModelConfig,
    temperature: float | jax.Array,
    recompute: tuple[str, ...] = (),
    entropy_gradient: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns the log-probability of each predicted token and the entropy of its distribution.

    Args:
        params: parameters of the policy.
        lora: LoRA of the policy, or None.
        buffer: buffer of N positions.
        config: architecture of the policy.
        temperature: sampling temperature, above 0.
        recompute: products of a layer that the backward pass computes again, as in
            `transformer.packed_hidden_states`.
        entropy_gradient: whether the entropies have a gradient, which costs one more pass over
            the logits.

    Returns:
        float32 [N] log-probabilities and float32 [N] entropies, in nats, in the order of
        `buffer.targets`. Both are finite and have no meaning outside the mask.
    """
    hidden = _predicting_states(params, lora, buffer, config=config, recompute=recompute)
    return _map_chunks(
        lambda hidden, ids: _chosen_and_entropy(
            params, hidden, ids, temperature, config, entropy_gradient=entropy_gradient
        ),
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
    temperature: float | jax.Array,
) -> jax.Array:
    """Returns the sum of KL(policy | other policy) over the predicted tokens of a buffer.

    The KL is exact: it sums over the whole vocabulary. Both policies use the same LoRA.

    Args:
        params: parameters of the policy.
        other_params: parameters of the other policy.
        lora: LoRA of both policies, or None.
        buffer: buffer of N positions.
        config: architecture of both policies.
        temperature: sampling temperature, above 0.

    Returns:
        float32 scalar, in nats.
    """
    hidden, other = (
        _predicting_states(p, lora, buffer, config=config) for p in (params, other_params)
    )

    def exact_kl(hidden, other):
        logprobs = _log_softmax(params, hidden, temperature, config)
        other_logprobs = _log_softmax(other_params, other, temperature, config)
        own = jnp.sum(jnp.exp(logprobs) * (logprobs - other_logprobs), axis=-1)
        return over_vocabulary(jax.lax.psum, own, config)

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
    temperature: float | jax.Array,
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
        temperature: sampling temperature, above 0.

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
        lambda hidden, ids: _chosen_and_entropy(params, hidden, ids, temperature, config),
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


def _chosen_and_entropy(params, hidden, ids, temperature, config, *, entropy_gradient=False):
    logits = _tempered_logits(params, hidden, temperature)
    return _choose(logits, ids, config, entropy_gradient)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _choose(logits, ids, config, entropy_gradient):
    """Log-probabilities [M] of ids under logits [M, V], and entropies [M].

    Few passes over the logits: one for the maxima, one for both sums, and one backward. The
    entropies have a gradient only if asked for.
    """
    chosen, entropies, _ = _statistics(logits, ids, config)
    return chosen, entropies


def _statistics(logits, ids, config):
    highest = over_vocabulary(jax.lax.pmax, logits.max(axis=-1), config)
    weights = jnp.exp(logits - highest[:, None])
    total = over_vocabulary(jax.lax.psum, weights.sum(axis=-1), config)
    normalizer = highest + jnp.log(total)
    own, is_own = own_tokens(ids, config)
    chosen = jnp.take_along_axis(logits, own[:, None], axis=-1)[:, 0]
    if config.shards > 1:
        chosen = over_vocabulary(jax.lax.psum, jnp.where(is_own, chosen, 0.0), config)
    # A token of probability 0 adds nothing: its logit may be -inf.
    moments = jnp.where(weights > 0, weights * logits, 0.0).sum(axis=-1)
    mean = over_vocabulary(jax.lax.psum, moments, config) / total
    return chosen - normalizer, normalizer - mean, normalizer


def _choose_fwd(logits, ids, config, entropy_gradient):
    chosen, entropies, normalizer = _statistics(logits, ids, config)
    kept = checkpoint_name(entropies, _NORMALIZER) if entropy_gradient else None
    return (chosen, entropies), (logits, ids, checkpoint_name(normalizer, _NORMALIZER), kept)


def _choose_bwd(config, entropy_gradient, saved, gradients):
    logits, ids, normalizer, entropies = saved
    gradient, of_entropy = gradients
    logprobs = logits - normalizer[:, None]
    probabilities = jnp.exp(logprobs)
    own, is_own = own_tokens(ids, config)
    is_chosen = jnp.arange(logits.shape[-1]) == own[:, None]
    if config.shards > 1:
        is_chosen &= is_own[:, None]
    result = gradient[:, None] * (is_chosen - probabilities)
    if entropy_gradient:
        # dH/dz = -p (log p + H). A token of probability 0 adds nothing: its logit may be -inf.
        above = jnp.where(probabilities > 0, logprobs + entropies[:, None], 0.0)
        result -= of_entropy[:, None] * probabilities * above
    return result, None


_choose.defvjp(_choose_fwd, _choose_bwd)


def _log_softmax(params, hidden, temperature, config):
    logits = _tempered_logits(params, hidden, temperature)
    if config.shards == 1:
        return jax.nn.log_softmax(logits)
    highest = over_vocabulary(jax.lax.pmax, logits.max(axis=-1, keepdims=True), config)
    below = logits - highest
    total = jnp.exp(below).sum(axis=-1, keepdims=True)
    return below - jnp.log(over_vocabulary(jax.lax.psum, total, config))


def _tempered_logits(params, hidden, temperature):
    # As in the sampler, to the bit.
    return transformer.logits(params, hidden) * (1.0 / temperature)


def logits_chunk(vocab_size: int) -> int:
    """Returns how many tokens have their logits in memory at a time."""
    return max(1, _CHUNK_BYTES // (4 * vocab_size))


def _map_chunks(function, args, *, count, vocab_size):
    """Applies `function` to arrays [M, ...] in chunks, to bound the logits in memory.

    With several chunks, the backward pass recomputes the logits of a chunk instead of storing them,
    and chunks that begin at `count` or later are not computed: their results are zeros.
    """
    total = args[0].shape[0]
    chunks = -(-total // logits_chunk(vocab_size))
    if chunks == 1:
        return function(*args)
    size = -(-total // chunks)

    def split(x):
        padding = ((0, chunks * size - total),) + ((0, 0),) * (x.ndim - 1)
        return jnp.pad(x, padding).reshape(chunks, size, *x.shape[1:])

    def zeros(*args):
        shapes = jax.eval_shape(function, *args)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    keep = jax.checkpoint_policies.save_only_these_names(_NORMALIZER)

    @functools.partial(jax.checkpoint, policy=keep)
    def chunk(first, *args):
        return jax.lax.cond(first < count, function, zeros, *args)

    outputs = jax.lax.map(
        lambda part: chunk(*part), (size * jnp.arange(chunks), *(split(x) for x in args))
    )
    return jax.tree.map(lambda x: x.reshape(-1)[:total], outputs)
