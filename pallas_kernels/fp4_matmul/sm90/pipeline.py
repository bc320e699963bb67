"""The warpgroup that fills the stages of the pipeline."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import nvvm

from pallas_kernels.fp4_matmul.sm90.make_shares import fill_for_shares
from pallas_kernels.fp4_matmul.sm90.schedule import Plan
from pallas_kernels.fp4_matmul.sm90.synchronize import fence_async_proxy, opaque
from pallas_kernels.fp4_matmul.sm90.xa_partials import Shares, await_shares
from pallas_kernels.fp4_matmul.tiling import TILE_COLUMNS

# Of copies under way to a block of threads, rounded up to whole stages, two at least. It is enough
# to keep the memory busy; more only queue there, and whatever else is read from global memory waits
# behind them.
_BYTES_IN_FLIGHT = 65536


def adds_adapter(first: Any) -> Any:
    """Whether a piece adds xa B^T to its tile: the one with the first step.

    Of the shared pieces of a block only the last can be one: x A^T has time to be added up.
    """
    return first == 0


def fill_stages(
    plan: Plan, gm: dict[str, Any], sm: dict[str, Any], xa_partials: Shares | None
) -> None:
    """Copies codes, scales and tokens of all pieces of this block to shared memory.

    Args:
        plan: which pieces.
        gm: operands and results in global memory.
        sm: stages and barriers.
        xa_partials: of x A^T, or None.
    """
    config = plan.config
    stages_in_flight = max(2, -(-_BYTES_IN_FLIGHT // config.stage_bytes()))
    block = plan.this_block()

    def acquire(i, slot):
        """Waits until the slot of stage i is free."""
        if stages_in_flight < config.stages:

            @pl.when(i >= stages_in_flight)
            def _():
                earlier = slot - stages_in_flight
                earlier = jnp.where(earlier < 0, earlier + config.stages, earlier)
                plgpu.barrier_wait(sm["full"].at[earlier])

        @pl.when(i >= config.stages)
        def _():
            with jax.named_scope("await free stage"):
                plgpu.barrier_wait(sm["empty"].at[slot])
            if plan.simulated:
                plgpu.commit_smem()
            else:
                fence_async_proxy(nvvm.ProxyKind.async_shared)

    def copy_tokens(name, slot, tile, first, count):
        """Copies of 128 columns; what is read beyond the columns of xa is zero, and not used."""
        m_tile, _ = plan.coordinates(tile)
        rows = pl.ds(m_tile * config.tile_m, config.tile_m)
        for j in range(count):
            place = rows, pl.ds((first + j) * TILE_COLUMNS, TILE_COLUMNS)
            plgpu.copy_gmem_to_smem(gm[name].at[place], sm["x"].at[slot, j], sm["full"].at[slot])

    def fill(slot, tile, step):
        _, n_tile = plan.coordinates(tile)
        columns = step * plan.per_stage
        tiles = (
            pl.ds(n_tile * config.warpgroups_n, config.warpgroups_n),
            pl.ds(columns, plan.per_stage),
        )
        if plan.paired:
            first, half = plan.whole_row_tiles(n_tile)
            tiles = slice(None), pl.ds(first, config.warpgroups_n), tiles[1], pl.ds(half * 4, 4)
        full = sm["full"].at[slot]
        plgpu.copy_gmem_to_smem(gm["codes"].at[tiles], sm["codes"].at[slot], full)
        plgpu.copy_gmem_to_smem(gm["scales"].at[tiles], sm["scales"].at[slot], full)
        copy_tokens("x", slot, tile, columns, plan.per_stage)

    def fill_adapter(slot, tile):
        copies = -(-gm["xa"].shape[1] // TILE_COLUMNS)
        copy_tokens("xa", slot, tile, 0, copies)
        for _ in range(plan.arrivals - copies):
            plgpu.barrier_arrive(sm["full"].at[slot])

    begun = jnp.int32(0)
    if xa_partials is not None and xa_partials.a is not None:
        begun = fill_for_shares(plan, gm, sm, xa_partials)

    # Code that runs once is slow: loops are not unrolled, and what they do stands here once.
    @pl.loop(0, plan.pieces(block), init_carry=(begun, begun))
    def stop(index, carry):
        done, slot = carry
        tile, first, count = plan.piece(block, index)

        @pl.loop(0, count if plan.simulated else opaque(jnp.int32(count)), init_carry=slot)
        def slot(i, slot):
            acquire(done + i, slot)
            fill(slot, tile, first + i)
            return plan.next_slot(slot)

        done += count
        if xa_partials is not None:

            @pl.when(index == plan.awaited_behind(block))
            def _():
                with jax.named_scope("await shares"):
                    await_shares(xa_partials, plan.blocks)

        if "b" not in gm:
            return done, slot

        adapted = adds_adapter(first)

        @pl.when(adapted)
        def _():
            acquire(done, slot)
            fill_adapter(slot, tile)

        behind = jnp.where(adapted, plan.next_slot(slot), slot)
        return done + jnp.where(adapted, 1, 0), behind

    def await_last(name, count):
        """Observes the last phases of some barriers, as many as stages were filled."""
        total, _ = stop

        @pl.loop(jnp.maximum(total - count, 0), total)
        def _(i):
            plgpu.barrier_wait(sm[name].at[lax.rem(i, config.stages)])

    # A kernel must not end before all arrivals at its barriers.
    await_last("empty", config.stages)
    # Who waits for one phase of a barrier observes all of them.
    if stages_in_flight < config.stages:
        await_last("full", stages_in_flight)
