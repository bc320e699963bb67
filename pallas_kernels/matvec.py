"""y = x W^T for a dense weight W; for a single token in the time that reading W takes."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels import device

# A warp adds up whole outputs alone, where XLA and the libraries divide the inputs among CTAs and
# leave the sums to a second kernel.
_OUTPUTS = 4  # of a CTA: one for each warp
_INPUTS = 256  # columns of a tile: 16 bytes of a row for each thread
_LANES = 32
# Tiles requested at a time: with more, fewer CTAs share an SM. Of a small weight it has few, whose
# warps wait for few tiles: measured on an H200 with gpt-oss-20b.
_TILES, _TILES_OF_FEW = 2, 4
_FEW_CTAS, _FEW_INPUTS = 10, 4096  # CTAs of an SM, and inputs
_LIBRARY_PRODUCTS = 10_000_000  # from this size of a weight on XLA leaves a single row to a library


def dot(x: jax.Array, weight: jax.Array, dtype: DTypeLike | None = None) -> jax.Array:
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


def matmul(x: jax.Array, weight: jax.Array, dtype: DTypeLike | None = None) -> jax.Array:
    """Returns x W^T, accumulated in float32; without derivatives.

    Args:
        x: [M, K].
        weight: dense weight [N, K].
        dtype: dtype of the result; None for x's dtype.

    Returns:
        [M, N]; by `matvec` for one bfloat16 token on an NVIDIA GPU, otherwise by XLA.
    """
    if _is_single(x, weight):
        return matvec(x, weight, dtype or x.dtype)
    return dot(x, weight, dtype)


def _is_single(x: jax.Array, weight: jax.Array) -> bool:
    """Whether `matvec` multiplies a weight."""
    single = len(x) == 1 and x.dtype == weight.dtype == jnp.bfloat16
    return single and device.supports_warpgroup()


def adds_lora(x: jax.Array, weight: jax.Array, b: jax.Array) -> bool:
    """Whether `matvec` multiplies a weight [N, K] and adds an adapter with B [N, R]."""
    whole = b.dtype == jnp.bfloat16 and b.shape[1] % _LANES == 0
    return (
        whole
        and min(weight.shape) >= _INPUTS
        and weight.shape[1] % 8 == 0
        and _is_single(x, weight)
    )


def ranks_of(a: jax.Array) -> int:
    """The columns of B that `matvec` reads for A [R, K], if B has them: 32 times a power of two."""
    return _LANES << (pl.cdiv(len(a), _LANES) - 1).bit_length()


def matvec(
    x: jax.Array,
    weight: jax.Array,
    dtype: DTypeLike = jnp.bfloat16,
    *,
    lora: tuple[jax.Array, jax.Array] | None = None,
    bias: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Returns x W^T + (x A^T) B^T + bias for one token, accumulated in float32.

    Args:
        x: bfloat16 [1, K].
        weight: bfloat16 [N, K].
        dtype: dtype of the result.
        lora: x A^T [1, R] and B [N, R''] in bfloat16, R <= R'', where `adds_lora`.
        bias: [N].
        interpret: whether to simulate the kernel on a CPU.

    Returns:
        [1, N].
    """
    # Loaded when needed: it uses an API of jax that may change.
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels import warpgroup

    def ranks_layout(ranks):
        tiles = ((_OUTPUTS, ranks), (ranks // _LANES,))
        return plgpu.Layout.TILED(
            plgpu.Tiling(tiles), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
        )

    layout = plgpu.Layout.TILED(
        plgpu.Tiling(((_OUTPUTS, _INPUTS), (8,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
    )
    outputs, inputs = weight.shape
    if outputs < _OUTPUTS or inputs < _INPUTS or inputs % 8:
        # Threads read 16 bytes, of whole tiles. No model has such a weight.
        missing = max(0, _OUTPUTS - outputs), -inputs % _INPUTS
        weight = jnp.pad(weight, ((0, missing[0]), (0, missing[1])))
        x = jnp.pad(x, ((0, 0), (0, missing[1])))
        bias = bias if bias is None else jnp.pad(bias, (0, missing[0]))
    n, k = weight.shape
    few = k <= _FEW_INPUTS and pl.cdiv(n, _OUTPUTS) <= _FEW_CTAS * device.num_sms()
    count = _TILES_OF_FEW if few else _TILES

    def body(threads, operands, _, y):
        x, weight, adapter, bias = operands
        # The last CTA repeats outputs of the one before, if their number is not a multiple.
        rows = pl.ds(jnp.minimum(threads.cta[0] * _OUTPUTS, n - _OUTPUTS), _OUTPUTS)

        def add(acc, starts, counted=0):
            """Adds tiles from these columns on, without columns that are counted already."""
            places = [pl.ds(start, _INPUTS) for start in starts]
            tiles = [threads.load(weight.at[rows, place], layout) for place in places]
            for place, tile in zip(places, tiles, strict=True):
                token = threads.load(x.at[0, place], layout.reduce(0)).astype(jnp.float32)
                product = tile.astype(jnp.float32) * lax.broadcast_in_dim(token, tile.shape, (1,))
                if counted:
                    column = threads.iota(tile.shape, 1, layout)
                    product = jnp.where(column >= counted, product, 0.0)
                acc += product
            return acc

        def step(i, acc):
            return add(acc, [(i * count + j) * _INPUTS for j in range(count)])

        added = None
        if adapter is not None:
            xa, b = adapter
            ranks = ranks_layout(xa.shape[1])
            factors = b.at[rows, pl.ds(0, xa.shape[1])]
            factors = threads.load(factors, ranks).astype(jnp.float32)
            token = threads.load(xa.at[0, :], ranks.reduce(0)).astype(jnp.float32)
            added = jnp.sum(factors * lax.broadcast_in_dim(token, factors.shape, (1,)), axis=1)
        acc = threads.cast(jnp.zeros((_OUTPUTS, _INPUTS), jnp.float32), layout)
        whole = k // _INPUTS
        acc = lax.fori_loop(0, whole // count, step, acc)
        acc = add(acc, [j * _INPUTS for j in range(whole // count * count, whole)])
        if k % _INPUTS:
            acc = add(acc, [k - _INPUTS], counted=_INPUTS - k % _INPUTS)
        total = jnp.sum(acc, axis=1)
        if added is not None:
            total += threads.cast(added, layout.reduce(1))
        if bias is not None:
            total += threads.load(bias.at[rows], layout.reduce(1)).astype(jnp.float32)
        threads.store(y.at[0, rows], total.astype(y.dtype))

    y = warpgroup.run(
        body,
        "matvec",
        (pl.cdiv(n, _OUTPUTS),),
        (x, weight, lora, bias),
        jax.ShapeDtypeStruct((1, n), dtype),
        interpret=interpret,
    )
    return y[:, :outputs]
