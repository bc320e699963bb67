"""Sampling the next token: temperature, min-p, top-k, top-p, log-probability and entropy."""

import jax
import jax.numpy as jnp

_BLOCK = 128  # tokens per block; a block is sampled first, then one of its tokens


def row_keys(key: jax.Array, rows: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns keys [B] from (key, row, position), so that samples do not depend on the batching."""
    fold = jax.vmap(
        lambda row, position: jax.random.fold_in(jax.random.fold_in(key, row), position)
    )
    return fold(rows, positions)


def sample(
    keys: jax.Array,
    logits: jax.Array,
    *,
    temperature: float | jax.Array,
    greedy: bool = False,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Samples one token per row, with the keys [B] of `row_keys` and logits float32 [B, V].

    The options are those of `SamplingConfig`, but the temperature is above 0.

    Returns:
        int32 [B] tokens, their float32 [B] log-probabilities, and float32 [B] entropies in nats.
        Log-probabilities and entropies belong to softmax(logits / temperature) before min-p,
        top-k and top-p: the distribution that the trainer computes with.
    """
    # XLA may store the results of a division, which it counts as expensive; a product it repeats.
    scaled = logits * (1.0 / temperature)
    blocks = _in_blocks(scaled)
    log_masses, top, log_total, entropies = _summary(blocks)
    if greedy:
        tokens = jnp.argmax(logits, axis=-1)
    else:
        if 0 < top_k < logits.shape[-1] or top_p < 1.0 or min_p > 0.0:
            logprobs = (scaled - top) - log_total
            blocks = _in_blocks(_truncate(logprobs, top_k=top_k, top_p=top_p, min_p=min_p))
            log_masses, *_ = _summary(blocks)
        tokens = _sample_blocks(keys, blocks, log_masses)
    token_logprobs = (jnp.take_along_axis(scaled, tokens[:, None], axis=-1) - top) - log_total
    return tokens.astype(jnp.int32), token_logprobs[:, 0], entropies


def _in_blocks(logits: jax.Array) -> jax.Array:
    """Reshapes logits [B, V] to [B, N, _BLOCK], padded with -inf."""
    padding = -logits.shape[-1] % _BLOCK
    padded = jnp.pad(logits, ((0, 0), (0, padding)), constant_values=-jnp.inf)
    return padded.reshape(len(logits), -1, _BLOCK)


def _summary(blocks: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Computes the statistics of a softmax over logits [B, N, _BLOCK], some of which are finite.

    The logits are read twice, for the maxima of blocks and for the sums of exponentials below the
    maxima; a softmax over rows would read them three times.

    Returns:
        Log-sum-exp of each block [B, N]; largest logit of each row [B, 1]; log-sum-exp of each row
        minus its largest logit [B, 1]; and entropies [B] in nats.
    """

    def finite(x):
        return jnp.where(x == -jnp.inf, 0.0, x)

    # Without the barrier XLA computes the maximum of the row from all logits again.
    tops = jax.lax.optimization_barrier(jnp.max(blocks, axis=-1))
    below = blocks - finite(tops)[..., None]
    weights = jnp.exp(below)
    masses = jnp.sum(weights, axis=-1)
    moments = jnp.sum(weights * finite(below), axis=-1)
    top = jnp.max(tops, axis=-1, keepdims=True)
    scales = jnp.exp(tops - top)
    total = jnp.sum(scales * masses, axis=-1, keepdims=True)
    mean = jnp.sum(scales * (moments + finite(tops - top) * masses), axis=-1, keepdims=True) / total
    log_total = jnp.log(total)
    return tops + jnp.log(masses), top, log_total, (log_total - mean)[:, 0]


def _sample_blocks(keys: jax.Array, blocks: jax.Array, log_masses: jax.Array) -> jax.Array:
    """Samples int32 [B] tokens: first a block by its probability, then a token of the block.

    Both use the Gumbel-max trick. Noise for every token would take longer than all other work on
    its logit.
    """
    count = log_masses.shape[-1]
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (count + _BLOCK,)))(keys)
    block = jnp.argmax(log_masses + noise[:, :count], axis=-1)
    logits = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return block * _BLOCK + jnp.argmax(logits + noise[:, count:], axis=-1)


def _truncate(logprobs: jax.Array, *, top_k: int, top_p: float, min_p: float) -> jax.Array:
    if min_p > 0.0:
        probs = jnp.exp(logprobs)
        threshold = min_p * jnp.max(probs, axis=-1, keepdims=True)
        logprobs = jnp.where(probs >= threshold, logprobs, -jnp.inf)
    if 0 < top_k < logprobs.shape[-1]:
        probs = jnp.exp(logprobs)
        threshold = _largest_threshold(probs, jnp.ones_like(probs), top_k)
        logprobs = jnp.where(probs >= threshold, logprobs, -jnp.inf)
    if top_p < 1.0:
        probs = jax.nn.softmax(logprobs)
        # The token that crosses top_p belongs to the set.
        threshold = _largest_threshold(probs, probs, top_p)
        logprobs = jnp.where(probs >= threshold, logprobs, -jnp.inf)
    return logprobs


def _largest_threshold(probs: jax.Array, weights: jax.Array, target: float) -> jax.Array:
    """Finds the largest t for which the weights of tokens with a probability >= t reach the target.

    It bisects instead of sorting: floats from 0 to 1 are ordered as their 30 bits are, so 30 sums
    find the exact threshold, at a cost that does not depend on how many tokens are kept.

    Returns:
        float32 [B, 1] thresholds; 0 where all tokens together do not reach the target.
    """

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low) // 2
        is_kept = probs >= jax.lax.bitcast_convert_type(middle, jnp.float32)
        enough = jnp.sum(jnp.where(is_kept, weights, 0.0), axis=-1, keepdims=True) >= target
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    low = jnp.zeros((probs.shape[0], 1), jnp.int32)
    above_one = jax.lax.bitcast_convert_type(jnp.float32(1.0), jnp.int32) + 1
    low, _ = jax.lax.fori_loop(0, 30, halve, (low, jnp.full_like(low, above_one)))
    return jax.lax.bitcast_convert_type(low, jnp.float32)
