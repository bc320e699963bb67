"""y = x W^T for a dense weight W; for a single token in the time that reading W takes."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import device

# Sizes for one warp. It adds up whole outputs alone, where XLA and the libraries divide the inputs
# among CTAs and leave the sums to a second kernel.
_OUTPUTS = 2
_INPUTS = 256  # columns of a tile: 16 bytes of a row for each thread
_TILES = 2  # tiles requested at a time
_LIBRARY_PRODUCTS = 10_000_000  # from this size of a weight on XLA leaves a single row to a library


def dot(x: jax.Array, weight: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
    """Returns x W^T, accumulated in float32, by XLA.

    Args:
        x: [..., K].
        weight: dense weight [N, K], in x's dtype or in that of `device.product_dtype`.
        dtype: dtype of the result; None for x's dtype.

    Returns:
        [..., N].
    """
    dtype = dtype or x.dtype
    x = x.astype(jnp.promote_types(x.dtype, weight.dtype))
    # A GPU's libraries accumulate in float32 in any case. Asked for a float32 result they would
    # store it, and a second kernel would round it; for one row XLA would convert the whole weight
    # to float32. A row of few products XLA adds up itself, in products of the result's dtype.
    library = x.size > x.shape[-1] or weight.size >= _LIBRARY_PRODUCTS
    result = dtype if library and jax.default_backend() == "gpu" else jnp.float32
    return jax.lax.dot_general(
        x, weight, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=result
    ).astype(dtype)


def matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns x W^T, accumulated in float32; without derivatives.

    Args:
        x: [M, K].
        weight: dense weight [N, K].

    Returns:
        [M, N] in x's dtype; by `matvec` for one bfloat16 token on an NVIDIA GPU, otherwise by XLA.
    """
    single = len(x) == 1 and x.dtype == weight.dtype == jnp.bfloat16
    if single and device.supports_triton():
        return matvec(x, weight)
    return dot(x, weight)


def matvec(x: jax.Array, weight: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Returns x W^T for one token, accumulated in float32.

    Args:
        x: bfloat16 [1, K].
        weight: bfloat16 [N, K].
        interpret: whether to simulate the kernel on a CPU.

    Returns:
        bfloat16 [1, N].
    """
    # Loaded when needed: a backend of Pallas that jax is going to remove.
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
