"""The epilogue of a consumer warpgroup: divisors, bias, SwiGLU, residual and RMSNorm, store."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fp4_matmul.sm90 import add_rmsnorm, swiglu
from pallas_kernels.fp4_matmul.sm90.context import Consumer, load_rows, over_tokens
from pallas_kernels.fp4_matmul.tiling import TILE_ROWS


def load_divisors(consumer: Consumer, row_start: Any) -> jax.Array:
    """The divisors of a row tile, float32 [64]."""
    divisor = consumer.gmem.divisor
    if consumer.schedule.paired:
        rows = consumer.paired_rows(row_start)
        return swiglu.load_numbers(divisor, *rows, simulated=consumer.schedule.simulated)
    return load_rows(divisor.at[pl.ds(row_start, TILE_ROWS)])


def load_bias(consumer: Consumer, row_tile: Any) -> jax.Array | None:
    """The bias of a row tile, [64], or None."""
    if consumer.gmem.bias is None:
        return None
    return load_rows(consumer.gmem.bias.at[pl.ds(consumer.row_start(row_tile), TILE_ROWS)])


def load_residual(consumer: Consumer, token: Any, width: int, row_tile: Any) -> jax.Array | None:
    """The residual of a row tile and `width` tokens from one on, bfloat16 [64, width], or None."""
    if consumer.gmem.residual is None:
        return None
    tokens, rows = pl.ds(token, width), pl.ds(consumer.row_start(row_tile), TILE_ROWS)
    return add_rmsnorm.load(consumer.gmem.residual.at[tokens, rows])


def store(
    consumer: Consumer,
    value: jax.Array,
    bias: jax.Array | None,
    token: Any,
    row_tile: Any,
    residual: jax.Array | None,
) -> None:
    """Starts to store the outputs of a row tile, for T tokens from one on.

    The product with the adapter is float32 [64, T]. Its bias [64], and the residual [64, T] to add
    to it, may be None.
    """
    schedule, gmem = consumer.schedule, consumer.gmem
    width, height = value.shape[1], schedule.tile_outputs
    tokens, rows = pl.ds(token, width), pl.ds(row_tile * height, height)
    if schedule.paired:
        factor = gmem.factor if schedule.simulated else consumer.smem.factor
        value = swiglu.apply(value, factor.at[tokens], simulated=schedule.simulated)
    elif bias is not None:
        value += over_tokens(bias.astype(jnp.float32), width)
    if gmem.y.dtype == jnp.float32:
        plgpu.store(gmem.y.at[rows, tokens], value, optimized=False)
        return
    results = [(value, gmem.y)]
    if residual is not None:
        total, scaled = _add_rmsnorm(consumer, value, residual, tokens, row_tile)
        results = [(total, gmem.y), (scaled, gmem.scaled)]
    _copy_out(consumer, results, tokens, rows, width)


def _add_rmsnorm(
    consumer: Consumer, value: jax.Array, residual: jax.Array, tokens: pl.Slice, row_tile: Any
) -> tuple[jax.Array, jax.Array]:
    """The sum of product and residual, and the sum scaled; writes the partial mean squares."""
    schedule, gmem = consumer.schedule, consumer.gmem
    scale = load_rows(gmem.scale.at[pl.ds(consumer.row_start(row_tile), TILE_ROWS)])
    total, scaled, sums = add_rmsnorm.add(value, residual, scale)
    sums *= 1 / gmem.scale.shape[0]
    if schedule.n_tiles * schedule.rows > schedule.row_tiles:
        inside = jnp.broadcast_to(row_tile < schedule.row_tiles, sums.shape)
        sums = jnp.where(inside, sums, jnp.zeros_like(sums))
    count = add_rmsnorm.PARTIALS_OF_ROW_TILE
    target = gmem.square_partials.at[pl.ds(row_tile * count, count), tokens]
    plgpu.store(target, sums, optimized=False)
    return total, scaled


def _copy_out(
    consumer: Consumer,
    results: list[tuple[jax.Array, Any]],
    tokens: pl.Slice,
    rows: pl.Slice,
    width: int,
) -> None:
    """Rounds values to bfloat16 and starts their copies to global memory by the TMA."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # The last copy has been read.
    staged = consumer.smem.y
    buffers = [staged.at[consumer.row, pl.ds(i * width, width)] for i in range(len(results))]
    for (value, _), buffer in zip(results, buffers, strict=True):
        if consumer.schedule.paired:
            buffer[...] = value
        else:
            buffer.T[...] = plgpu.layout_cast(
                value.astype(jnp.bfloat16), plgpu.Layout.WGMMA_TRANSPOSED
            )
    plgpu.commit_smem()
    for (_, target), buffer in zip(results, buffers, strict=True):
        plgpu.copy_smem_to_gmem(buffer, target.at[tokens, rows])
