"""Self-attention over packed buffers whose groups share a prompt, with its gradient.

On a Hopper GPU, bfloat16 heads of 64, 128 or 256 dimensions have kernels. They visit only the tiles
that are seen, and add up everything in a fixed order. Elsewhere XLA computes it with a dense mask.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.attention import dense
from pallas_kernels.attention.segments import BLOCK, PADDING, PART_BITS, Segments, segments
from pallas_kernels.device import cuda_capability

__all__ = [
    "HEAD_DIMS",
    "PADDING",
    "PART_BITS",
    "Segments",
    "attend_packed",
    "segments",
    "supports_attention",
    "supports_device",
]

HEAD_DIMS = 64, 128, 256  # of the heads that the kernels compute


def supports_device(dtype: jnp.dtype, head_dim: int) -> bool:
    """Whether the kernels exist for a dtype and a number of dimensions, and the device is Hopper.

    Args:
        dtype: dtype of queries, keys and values.
        head_dim: number of dimensions of a head.
    """
    return dtype == jnp.bfloat16 and head_dim in HEAD_DIMS and cuda_capability() == 9.0


def supports_attention(q: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Whether `attend_packed` runs the kernels for queries [T, N, H] on the default device."""
    length, _, head_dim = q.shape
    return length % BLOCK == 0 and supports_device(q.dtype, head_dim)


def attend_packed(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments,
    *,
    sinks: jax.Array | None = None,
    window: int = 0,
) -> jax.Array:
    """Attention in which a token sees its own completion and its group's prompt, causally.

    The scale of the scores is 1 / sqrt(H). The softmax is computed in float32. The gradient by q, k
    and v exists. Output at padding is finite, and its cotangent must be zero. For `jax.checkpoint`
    the result has the name 'attention'.

    Args:
        q: [T, N, H] queries.
        k: [T, K, H] keys; each is shared by N / K query heads that follow one another.
        v: [T, K, H] values.
        segments: segments of the buffer, of `segments`; with positions where there is a window.
        sinks: [N], a score of each query head without a value, which is one more term of the sum by
            which the softmax divides; None for none. It has no gradient.
        window: number of positions that a token sees, up to its own; 0 for all.

    Returns:
        [T, N, H] in the dtype of q.
    """
    if sinks is not None:
        sinks = lax.stop_gradient(sinks)
    if supports_attention(q):
        return _attend_sm90(q, k, v, segments, sinks, window)
    attended = dense.attend(q, k, v, segments, sinks=sinks, window=window)
    return checkpoint_name(attended, "attention")


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend_sm90(q, k, v, segments, sinks, window):
    return _forward(q, k, v, segments, sinks, window)[0]


def _forward(q, k, v, segments, sinks, window):
    # Mosaic GPU takes seconds to import, and only a Hopper GPU needs it.
    from pallas_kernels.attention import forward_sm90

    out, lse = forward_sm90.attend(q, k, v, segments, sinks=sinks, window=window)
    # The backward pass reads both, so a checkpoint policy saves both by one name.
    out, lse = checkpoint_name(out, "attention"), checkpoint_name(lse, "attention")
    return out, (q, k, v, segments, out, lse, sinks)


def _backward(window, saved, d_out):
    from pallas_kernels.attention import backward_sm90

    q, k, v, segments, out, lse, sinks = saved
    gradients = backward_sm90.gradients(q, k, v, segments, out, lse, d_out, window=window)
    no_gradient = functools.partial(np.zeros, dtype=jax.dtypes.float0)
    none = jax.tree.map(lambda x: no_gradient(x.shape), segments)
    return *gradients, none, None if sinks is None else jnp.zeros_like(sinks)


_attend_sm90.defvjp(_forward, _backward)
