"""The gradient of packed self-attention on a Hopper GPU, by Pallas's Mosaic GPU backend.

Nothing is added atomically, and the order of every sum is fixed: queries have a kernel, and keys
and values another one.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import dkv_sm90, dq_sm90
from pallas_kernels.attention.segments import Segments


def gradients(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    *,
    window: int = 0,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradients by q [T, N, H], k and v [T, K, H], in bfloat16.

    `out` and `lse` are the results of `forward_sm90.attend`, `d_out` [T, N, H] is the gradient by
    the former. `interpret` simulates the kernels.
    """
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1).T
    operands = q, k, v, d_out, lse, delta, segments
    options = {"window": window, "interpret": interpret}
    dq = dq_sm90.gradient(*operands, **options)
    return dq, *dkv_sm90.gradients(*operands, **options)
