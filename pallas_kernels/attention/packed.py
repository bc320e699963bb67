"""Attention within packed buffers, whose groups of completions share a prompt.

A buffer holds groups one after the other, the prompt of a group before its completions:

    prompt | completion 1 | completion 2 | .. | prompt of the next group | ..

A position sees the positions before it that lie in its own prompt or completion, or in the prompt
of its group. In the order of the buffer this is a causal mask with holes.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

PART_BITS = 12  # lowest bits of a segment id: 0 for the prompt of a group, else the completion
PADDING = -1  # segment id of positions without a token

_DENSE_BLOCK = 512  # queries whose scores [N, block, T] are held at a time


class Segments(NamedTuple):
    """Which positions of a buffer see each other.

    Attributes:
        ids: int32 [T] segment ids: group << PART_BITS | part, or PADDING.
    """

    ids: Any


def segments(ids: np.ndarray) -> Segments:
    """Returns the segments of a buffer.

    Args:
        ids: int [T] segment ids. The positions of a group lie together, and so do those of a part,
            in ascending order.
    """
    return Segments(np.asarray(ids, np.int32))


def attend_packed(
    queries: jax.Array, keys: jax.Array, values: jax.Array, segments: Segments
) -> jax.Array:
    """Grouped-query attention within a packed buffer, with a gradient.

    Args:
        queries: [T, N, H] queries.
        keys: [T, K, H] keys, N a multiple of K.
        values: [T, K, H] values.
        segments: which positions see each other.

    Returns:
        [T, N, H] attended values in the dtype of the values.
    """
    length, heads, head_dim = queries.shape
    kv_heads = keys.shape[1]
    blocks = -(-length // _DENSE_BLOCK)
    size = -(-length // blocks)
    places = jnp.arange(length)

    def attend_block(block):
        """Attention of some queries [S, N, H] to the whole buffer."""
        q, ids, place = block
        prompt = ids & -(1 << PART_BITS)
        visible = (segments.ids == ids[:, None]) | (segments.ids == prompt[:, None])
        visible &= places <= place[:, None]
        q = q.reshape(size, kv_heads, heads // kv_heads, head_dim)
        scores = jnp.einsum("tkgh,skh->kgts", q, keys, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(jnp.where(visible, head_dim**-0.5 * scores, -jnp.inf))
        out = jnp.einsum("kgts,skh->tkgh", weights.astype(values.dtype), values)
        return out.reshape(size, heads, head_dim)

    block = queries, segments.ids, places
    if blocks == 1:
        return attend_block(block)

    def split(x, fill):
        padding = ((0, blocks * size - length),) + ((0, 0),) * (x.ndim - 1)
        return jnp.pad(x, padding, constant_values=fill).reshape(blocks, size, *x.shape[1:])

    # The fill sees the padding of the buffer or, at the last place, something: no row is empty.
    fills = 0, segments.ids[-1], length - 1
    parts = tuple(split(x, fill) for x, fill in zip(block, fills, strict=True))
    out = jax.lax.map(jax.checkpoint(attend_block), parts)
    return out.reshape(blocks * size, heads, head_dim)[:length]
