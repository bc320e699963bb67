"""Drawing the next token: temperature, top-k, top-p, and what the training needs to know of it."""

import jax
import jax.numpy as jnp


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
    logprobs = jax.nn.log_softmax(logits / (temperature or 1.0))
    if temperature == 0:
        tokens = jnp.argmax(logits, axis=-1)
    else:
        kept = _truncate(logprobs, top_k=top_k, top_p=top_p)
        tokens = jax.vmap(jax.random.categorical)(keys, kept)
    chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    return tokens.astype(jnp.int32), chosen, entropy(logprobs)


def entropy(logprobs: jax.Array) -> jax.Array:
    """Entropy in nats, [...], of normalised log-probabilities [..., V]."""
    return -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)


def _truncate(logprobs: jax.Array, *, top_k: int, top_p: float) -> jax.Array:
    if 0 < top_k < logprobs.shape[-1]:
        threshold = jax.lax.top_k(logprobs, top_k)[0][:, -1:]
        logprobs = jnp.where(logprobs >= threshold, logprobs, -jnp.inf)
    if top_p < 1.0:
        ordered = jnp.sort(jax.nn.softmax(logprobs), axis=-1, descending=True)
        # The token that crosses top_p belongs to the set.
        inside = jnp.cumsum(ordered, axis=-1) - ordered < top_p
        threshold = jnp.min(jnp.where(inside, ordered, jnp.inf), axis=-1, keepdims=True)
        logprobs = jnp.where(jax.nn.softmax(logprobs) >= threshold, logprobs, -jnp.inf)
    return logprobs
