"""x A^T in shares, one of every 128 columns, made before the main product.

32 columns of a share are a unit. Most blocks of threads make one unit or none: the first stage of
their pipeline has the tokens, a warpgroup that computes reads its part of A and multiplies.
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

from pallas_kernels.fp4_matmul.sm90.schedule import Plan
from pallas_kernels.fp4_matmul.sm90.synchronize import opaque
from pallas_kernels.fp4_matmul.sm90.xa_partials import Shares
from pallas_kernels.fp4_matmul.tiling import PARTIAL_COLUMNS, TILE_COLUMNS, TILE_ROWS

# 32 rows of A as the operand of wgmma, which has 64: two warps have the same.
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


def fill_for_shares(plan: Plan, gm: dict[str, Any], sm: dict[str, Any], given: Shares) -> Any:
    """Copies the tokens of this block's units to its first stage, if it has any.

    Returns:
        How many stages that fills.
    """
    block, full = plan.this_block(), sm["full"].at[0]
    turns = plan.turns_of_shares(*given.a.shape)
    makes = block < given.makers

    @pl.when(makes)
    def _():
        tokens = pl.ds(0, plan.config.tile_m)
        for turn in range(turns):
            share, _ = given.unit(block, turn)
            columns = pl.ds(share * TILE_COLUMNS, TILE_COLUMNS)
            plgpu.copy_gmem_to_smem(gm["x"].at[tokens, columns], sm["x"].at[0, turn], full)
        for _ in range(plan.arrivals - turns):
            plgpu.barrier_arrive(full)

    return jnp.where(makes, 1, 0)


def make_shares(plan: Plan, sm: dict[str, Any], warpgroup: Any, given: Shares) -> Any:
    """Makes this block's units, a warpgroup one at a time; all that compute call it.

    Returns:
        How many stages that empties.
    """
    warpgroups, full = plan.config.warpgroups, sm["full"].at[0]
    turns = plan.turns_of_shares(*given.a.shape)
    makes = plan.this_block() < given.makers

    def await_tokens():
        with jax.named_scope("await stage"):
            plgpu.barrier_wait(full)

    @pl.loop(0, jnp.where(makes, lax.div(turns - warpgroup + warpgroups - 1, warpgroups), 0))
    def _(i):
        turn = opaque(warpgroup + i * warpgroups)
        share, part = given.unit(opaque(plan.this_block()), turn)
        last = given.xa_partials.shape[0] - 1
        ranks = pl.ds(part * PARTIAL_COLUMNS, PARTIAL_COLUMNS)

        def product(acc):
            start = jnp.minimum(share, last) * TILE_COLUMNS
            # A is asked for before anything is awaited.
            operands = [_load_a(given.a.at[ranks, pl.ds(start + j, 64)]) for j in (0, 64)]

            @pl.when(i == 0)
            def _():
                await_tokens()

            for j, operand in enumerate(operands):
                plgpu.wgmma(acc, operand, sm["x"].at[0, turn, :, pl.ds(64 * j, 64)].T)
            plgpu.wgmma_wait(0)
            return acc[...]

        value = pl.run_scoped(product, plgpu.ACC((TILE_ROWS, plan.config.tile_m), jnp.float32))

        @pl.when(share <= last)
        def _():
            given.xa_partials.at[share, :, ranks][...] = _transposed(value)

        plgpu.barrier_arrive(sm["made"])

    @pl.when(makes)
    def _():
        @pl.when(warpgroup >= turns)
        def _():
            await_tokens()

        plgpu.barrier_arrive(sm["empty"].at[0])

    return jnp.where(makes, 1, 0)


def _load_a(a: Any) -> jax.Array:
    """A [32, 64] in global memory twice, as an operand of wgmma."""
    operand = plgpu.ShapeDtypeStruct((TILE_ROWS, 64), a.dtype, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(_TWICE,), return_type=operand)
    def twice(_, a):
        out = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(operand.shape), dtype=object)
        out.flat[:] = a.registers.flat[:]
        return mgpu.FragmentedArray(_registers=out, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return twice(plgpu.load(a, layout=_TWICE, optimized=False))


def _transposed(value: jax.Array) -> jax.Array:
    """The product [64, T] of `_load_a`'s operand as [T, 32]."""
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
