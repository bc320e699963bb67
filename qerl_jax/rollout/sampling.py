"""Drawing the next token: temperature, top-k, top-p, and what the training needs to know of it."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from qerl_jax.errors import UserError

_BLOCK = 128  # tokens of which one is drawn


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How to sample.

    Attributes:
        max_new_tokens: C, the longest completion.
        temperature: 0 is greedy.
        top_k: 0 is off.
        top_p: 1 is off.
        stop: strings that end a completion, see `engine.generate`.
        chunk_steps: decode steps between two looks at which rows have ended.
        max_rows: rows that decode together; the others wait. 0 is as many as the memory holds.
        kv_cache_bytes: memory for keys and values, which bounds the rows too. 0 is no bound beside
            max_rows, and without that what the device has left.
        kv_cache_dtype: what keys and values are stored in, see `budget.cache_dtype`.
        dequantize: 'once' dequantises the packed weights once for a rollout, which needs room for a
            dense copy; 'step' does so in each step. Neither concerns weights that a kernel reads.

    Raises:
        UserError: a value out of its range.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    chunk_steps: int = 16
    max_rows: int = 0
    kv_cache_bytes: int = 0
    kv_cache_dtype: str = ""
    dequantize: str = "once"

    def __post_init__(self) -> None:
        limits = {
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "temperature": (0 <= self.temperature < math.inf, "a number of at least 0"),
            "top_k": (self.top_k >= 0, "at least 0"),
            "top_p": (0 < self.top_p <= 1, "over 0 and at most 1"),
            "stop": ("" not in self.stop, "strings that are not empty"),
            "chunk_steps": (self.chunk_steps >= 1, "at least 1"),
            "max_rows": (self.max_rows >= 0, "at least 0"),
            "kv_cache_bytes": (self.kv_cache_bytes >= 0, "at least 0"),
            "dequantize": (self.dequantize in ("once", "step"), "'once' or 'step'"),
        }
        for name, (holds, expected) in limits.items():
            if not holds:
                raise UserError(f"{name} is {getattr(self, name)!r}, expected {expected}")


def row_keys(key: jax.Array, rows: jax.Array, positions: jax.Array) -> jax.Array:
    """One key per row from (key, row, position), so that draws do not depend on the batching.

    Args:
        key: the key of the rollout.
        rows: int32 [B], the identity of each row.
        positions: int32 [B], the index of the token to draw within its completion.
    """
    fold = jax.vmap(
        lambda row, position: jax.random.fold_in(jax.random.fold_in(key, row), position)
    )
    return fold(rows, positions)


def sample(
    keys: jax.Array,
    logits: jax.Array,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Draws one token per row.

    Args:
        keys: [B] keys, see `row_keys`.
        logits: float32 [B, V].
        temperature: divides the logits; 0 takes the largest.
        top_k: draw among the k largest only; 0 among all.
        top_p: draw among the smallest set of largest tokens that holds this probability.

    Returns:
        int32 [B] tokens, float32 [B] log-probabilities of them and float32 [B] entropies in nats.
        Both are of softmax(logits / temperature) before top-k and top-p (temperature 1 if 0):
        the distribution whose log-probabilities the trainer computes.
    """
    scaled = logits / (temperature or 1.0)
    blocks = _in_blocks(scaled)
    log_masses, top, log_total, entropies = _summary(blocks)
    if temperature == 0:
        tokens = jnp.argmax(logits, axis=-1)
    else:
        if 0 < top_k < logits.shape[-1] or top_p < 1.0:
            logprobs = (scaled - top) - log_total
            blocks = _in_blocks(_truncate(logprobs, top_k=top_k, top_p=top_p))
            log_masses, *_ = _summary(blocks)
        tokens = _draw(keys, blocks, log_masses)
    chosen = (jnp.take_along_axis(scaled, tokens[:, None], axis=-1) - top) - log_total
    return tokens.astype(jnp.int32), chosen[:, 0], entropies


def _in_blocks(logits: jax.Array) -> jax.Array:
    """[B, V] as [B, N, _BLOCK], padded with -inf."""
    padding = -logits.shape[-1] % _BLOCK
    padded = jnp.pad(logits, ((0, 0), (0, padding)), constant_values=-jnp.inf)
    return padded.reshape(len(logits), -1, _BLOCK)


def _summary(blocks: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """What a softmax needs to know of logits [B, N, _BLOCK], of which some are finite.

    They are read twice, for the maxima of blocks and for sums of exponentials below them, where a
    softmax of rows reads them three times.

    Returns:
        Logarithms of the sums of exponentials [B, N]; the largest logit [B, 1]; by how much the
        logarithm of the sum over the row exceeds it, [B, 1]; and entropies [B] in nats.
    """

    def finite(x):
        return jnp.where(x == -jnp.inf, 0.0, x)

    # Behind a barrier, or XLA takes the maximum of the row from all logits again.
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


def _draw(keys: jax.Array, blocks: jax.Array, log_masses: jax.Array) -> jax.Array:
    """int32 [B] tokens by their probabilities: a block by its mass, and a token of the block.

    Both by the Gumbel-max trick. Noise for every token would take longer than all else that is done
    with its logit.
    """
    count = log_masses.shape[-1]
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (count + _BLOCK,)))(keys)
    block = jnp.argmax(log_masses + noise[:, :count], axis=-1)
    chosen = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return block * _BLOCK + jnp.argmax(chosen + noise[:, count:], axis=-1)


def entropy(logprobs: jax.Array) -> jax.Array:
    """Entropy in nats, [...], of normalised log-probabilities [..., V]."""
    return -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)


def _truncate(logprobs: jax.Array, *, top_k: int, top_p: float) -> jax.Array:
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
    """The largest t for which the weights of all tokens with a probability >= t reach the target.

    Bisection instead of a sort: floats from 0 to 1 are ordered as their bits are, 30 of them, so 30
    sums find the very number, at a cost that does not depend on how many tokens are kept.

    Args:
        probs: float32 [B, V], from 0 to 1.
        weights: float32 [B, V], 0 or more.
        target: 0 where even all tokens do not reach it.

    Returns:
        float32 [B, 1].
    """

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low) // 2
        kept = probs >= jax.lax.bitcast_convert_type(middle, jnp.float32)
        enough = jnp.sum(jnp.where(kept, weights, 0.0), axis=-1, keepdims=True) >= target
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    low = jnp.zeros((probs.shape[0], 1), jnp.int32)
    above_one = jax.lax.bitcast_convert_type(jnp.float32(1.0), jnp.int32) + 1
    low, _ = jax.lax.fori_loop(0, 30, halve, (low, jnp.full_like(low, above_one)))
    return jax.lax.bitcast_convert_type(low, jnp.float32)
