"""The LoRA shrink x A^T inside the kernel: a partial of every 128 columns, before the main loop.

32 columns of a partial are a unit. Most CTAs make one unit or none: the first stage of their
pipeline has the tokens, a consumer warpgroup reads its part of A and multiplies.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from pallas_kernels.fp4_matmul.sm90.context import Consumer, Kernel, window
from pallas_kernels.fp4_matmul.sm90.synchronize import opaque
from pallas_kernels.fp4_matmul.sm90.xa_partials import XaPartials
from pallas_kernels.fp4_matmul.tiling import PARTIAL_COLUMNS, TILE_COLUMNS, TILE_ROWS

# 32 rows of A as the operand of wgmma, which has 64: two warps have the same rows.
_TWICE = plgpu.Layout.TILED(
    plgpu.Tiling(((32, 8), (16, 8), (8, 8), (2,))),
    warp_dims=(plgpu.Replicated(2), -7),
    lane_dims=(-3, -2),
    vector_dim=-1,
)
# The accumulator of that product, transposed: tokens by 32 columns of x A^T.
_TRANSPOSED = plgpu.Layout.TILED(
    plgpu.Tiling(((8, 32), (8, 16), (8, 8), (2, 1))),
    warp_dims=(plgpu.Replicated(2), -7),
    lane_dims=(-3, -4),
    vector_dim=-1,
)


def copy_tokens_for_partials(kernel: Kernel, given: XaPartials) -> Any:
    """Has the TMA copy the tokens of this CTA's units to its first stage, if it has any.

    Returns the number of stages that this fills.
    """
    schedule, gmem, smem = kernel.schedule, kernel.gmem, kernel.smem
    block, full = schedule.this_block(), smem.full.at[0]
    turns = schedule.shrink_turns(*given.a.shape)
    makes = block < given.makers

    @pl.when(makes)
    def copy_tokens():
        tokens = window(0, schedule.config.tile_m)
        for turn in range(turns):
            partial, _ = given.unit(block, turn)
            columns = pl.ds(partial * TILE_COLUMNS, TILE_COLUMNS)
            plgpu.copy_gmem_to_smem(gmem.x.at[tokens, columns], smem.x.at[0, turn], full)
        for _ in range(schedule.arrivals - turns):
            plgpu.barrier_arrive(full)

    return jnp.where(makes, 1, 0)


def compute_partials(consumer: Consumer, given: XaPartials) -> Any:
    """Makes this CTA's units, a warpgroup one at a time; every consumer warpgroup calls it.

    Returns the number of stages that this empties.
    """
    schedule, smem, warpgroup = consumer.schedule, consumer.smem, consumer.warpgroup
    warpgroups, full = schedule.config.warpgroups, smem.full.at[0]
    turns = schedule.shrink_turns(*given.a.shape)
    makes = schedule.this_block() < given.makers

    def await_tokens():
        with jax.named_scope("await stage"):
            plgpu.barrier_wait(full)

    @pl.loop(0, jnp.where(makes, lax.div(turns - warpgroup + warpgroups - 1, warpgroups), 0))
    def make_unit(i):
        turn = opaque(warpgroup + i * warpgroups)
        partial, part = given.unit(opaque(schedule.this_block()), turn)
        last = given.partials.shape[0] - 1
        ranks = pl.ds(part * PARTIAL_COLUMNS, PARTIAL_COLUMNS)

        def product(acc):
            start = jnp.minimum(partial, last) * TILE_COLUMNS
            # A is requested before the wait.
            operands = [_load_a(given.a.at[ranks, pl.ds(start + j, 64)]) for j in (0, 64)]
            pl.when(i == 0)(await_tokens)
            for j, operand in enumerate(operands):
                plgpu.wgmma(acc, operand, smem.x.at[0, turn, :, pl.ds(64 * j, 64)].T)
            plgpu.wgmma_wait(0)
            return acc[...]

        tile_m = schedule.config.tile_m
        value = pl.run_scoped(product, plgpu.ACC((TILE_ROWS, tile_m), jnp.float32))

        @pl.when(partial <= last)
        def write_unit():
            target = given.partials.at[partial, :, ranks]
            plgpu.store(target, _transposed(value), optimized=False)

        plgpu.barrier_arrive(smem.partials_made)

    @pl.when(makes)
    def release_stage():
        pl.when(warpgroup >= turns)(await_tokens)
        plgpu.barrier_arrive(smem.empty.at[0])

    return jnp.where(makes, 1, 0)


def _load_a(a: Any) -> jax.Array:
    """Loads A [32, 64] from global memory, twice, as an operand of wgmma."""
    operand = plgpu.ShapeDtypeStruct((TILE_ROWS, 64), a.dtype, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(_TWICE,), return_type=operand)
    def twice(_, a):
        out = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(operand.shape), dtype=object)
        out.flat[:] = a.registers.flat[:]
        return mgpu.FragmentedArray(_registers=out, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return twice(plgpu.load(a, layout=_TWICE, optimized=False))


def _transposed(value: jax.Array) -> jax.Array:
    """The product [64, T] of the operand of `_load_a`, transposed to [T, 32]."""
    tokens = value.shape[1]
    result = plgpu.ShapeDtypeStruct((tokens, PARTIAL_COLUMNS), value.dtype, layout=_TRANSPOSED)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=result)
    def transposed(_, value):
        layout = _TRANSPOSED.to_mgpu()
        one = layout.registers_element_type(ir.F32Type.get())
        out = np.empty(layout.registers_shape(result.shape), dtype=object)
        for i in range(tokens // 8):
            for half in range(2):  # the rows r and r + 8
                pair = value.registers[0, i, 0, 0, half, 0, 0, 0, 0]
                for column in range(2):
                    number = vector.extract(pair, [], [column])
                    place = i, 0, 0, 0, 0, half, 0, 0, column, 0
                    out[place] = vector.broadcast(one, number)
        return mgpu.FragmentedArray(_registers=out, _layout=layout, _is_signed=None)

    return transposed(value)
