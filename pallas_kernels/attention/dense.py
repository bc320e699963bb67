"""Packed self-attention by XLA, with a dense mask; a query block at a time in long buffers."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.segments import Segments

MAX_SCORES = 2**25  # scores that exist at a time: 128 MB in float32
_MIN_ROWS = 64  # queries of a block, at least


def softmax(scores: jax.Array, sinks: jax.Array | None = None) -> jax.Array:
    """Returns the softmax of float32 scores [..., S], one of which at least is finite.

    Sinks of the shape [...], to which they are broadcast, are one more score each, whose weight is
    left out.
    """
    if sinks is None:
        return jax.nn.softmax(scores)
    own = jnp.broadcast_to(sinks.astype(scores.dtype)[..., None], (*scores.shape[:-1], 1))
    return jax.nn.softmax(jnp.concatenate([scores, own], axis=-1))[..., :-1]


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments,
    *,
    sinks: jax.Array | None = None,
    window: int = 0,
) -> jax.Array:
    """Does what `attend_packed` does, on any device and in any dtype."""
    length, heads, _ = q.shape
    rows = length
    while rows * length * heads > MAX_SCORES and rows % 2 == 0 and rows > _MIN_ROWS:
        rows //= 2
    if rows == length:
        return _attend_block(q, k, v, segments, jnp.int32(0), sinks=sinks, window=window)
    # The gradients of keys and values are sums over the blocks: they are added in float32.
    wide = [x.astype(jnp.float32) for x in (k, v)]

    @jax.checkpoint
    def attend_block(block):
        keys, values = (x.astype(k.dtype) for x in wide)
        queries = lax.dynamic_slice_in_dim(q, block * rows, rows)
        first = block * rows
        return _attend_block(queries, keys, values, segments, first, sinks=sinks, window=window)

    out = lax.map(attend_block, jnp.arange(length // rows, dtype=jnp.int32))
    return out.reshape(q.shape)


def _attend_block(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments,
    first: jax.Array,
    *,
    sinks: jax.Array | None,
    window: int,
) -> jax.Array:
    """Attention of queries [R, N, H], the first of which has the index `first`."""
    rows, heads, head_dim = q.shape
    length, kv_heads, _ = k.shape
    group = heads // kv_heads
    query = first + jnp.arange(rows)[:, None]
    visible = (jnp.arange(length) <= query) & (query < segments.ends)
    if window:
        assert segments.positions is not None, "a window needs positions"
        own = lax.dynamic_slice_in_dim(segments.positions, first, rows)
        visible &= own[:, None] - segments.positions < window
    # One matrix product for each key head: its queries are the rows of a matrix.
    grouped = q.reshape(rows, kv_heads, group, head_dim).transpose(1, 2, 0, 3)
    grouped = grouped.reshape(kv_heads, group * rows, head_dim)
    scores = jnp.einsum("krh,skh->krs", grouped, k, preferred_element_type=jnp.float32)
    scores = head_dim**-0.5 * scores.reshape(kv_heads, group, rows, length)
    of_heads = None if sinks is None else sinks.reshape(kv_heads, group, 1)
    weights = softmax(jnp.where(visible, scores, -jnp.inf), of_heads)
    weights = weights.astype(v.dtype).reshape(kv_heads, group * rows, length)
    out = jnp.einsum("krs,skh->krh", weights, v, preferred_element_type=jnp.float32)
    out = out.reshape(kv_heads, group, rows, head_dim).transpose(2, 0, 1, 3)
    return out.reshape(q.shape).astype(q.dtype)
