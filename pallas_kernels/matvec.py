"""y = x W^T for a frozen dense weight W; for a single token in the time that its bytes take."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import device
from pallas_kernels.fp4_matmul import reference

# Of a warp. It shares nothing with another and adds up whole outputs, where XLA and the libraries
# divide the inputs among blocks of threads and leave the sums to a second kernel.
_OUTPUTS = 2
_INPUTS = 256  # of a tile, a row of it: 16 bytes for each thread
_TILES = 2  # requested at a time


def matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns x W^T, accumulated in float32; without derivatives.

    Args:
        x: [M, K].
        weight: [N, K].

    Returns:
        [M, N] in x's dtype; of one bfloat16 token by `matvec` on an NVIDIA GPU, otherwise by XLA.
    """
    single = len(x) == 1 and x.dtype == weight.dtype == jnp.bfloat16
    if single and device.supports_triton():
        return matvec(x, weight)
    return reference.dot(x, weight)


def matvec(x: jax.Array, weight: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Returns x W^T for one token, accumulated in float32.

    Args:
        x: bfloat16 [1, K].
        weight: bfloat16 [N, K].
        interpret: run on a CPU.

    Returns:
        bfloat16 [1, N].
    """
    # An API of jax that is to be removed, and loaded when needed.
    from jax.experimental.pallas import triton as plt

    n, k = weight.shape

    def body(x_ref, weight_ref, y_ref):
        rows = pl.program_id(0) * _OUTPUTS + jnp.arange(_OUTPUTS)

        def step(i, acc):
            tiles = []
            for part in range(_TILES):
                cols = (i * _TILES + part) * _INPUTS + jnp.arange(_INPUTS)
                place = weight_ref.at[rows[:, None], cols[None, :]]
                mask = (rows < n)[:, None] & (cols < k)[None, :]
                tiles.append((cols, plt.load(place, mask=mask, other=0.0)))
            for cols, tile in tiles:
                token = plt.load(x_ref.at[0, cols], mask=cols < k, other=0.0)
                acc += tile.astype(jnp.float32) * token.astype(jnp.float32)[None, :]
            return acc

        acc = jnp.zeros((_OUTPUTS, _INPUTS), jnp.float32)
        acc = lax.fori_loop(0, pl.cdiv(k, _TILES * _INPUTS), step, acc)
        plt.store(y_ref.at[0, rows], jnp.sum(acc, axis=1).astype(y_ref.dtype), mask=rows < n)

    return pl.pallas_call(
        body,
        grid=(pl.cdiv(n, _OUTPUTS),),
        out_shape=jax.ShapeDtypeStruct((1, n), x.dtype),
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        name="matvec",
        interpret=interpret,
    )(x, weight)
