"""The producer warpgroup: it has the TMA fill the stages of the pipeline."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import nvvm

from pallas_kernels.fp4_matmul.sm90.context import Kernel, window
from pallas_kernels.fp4_matmul.sm90.make_partials import copy_tokens_for_partials
from pallas_kernels.fp4_matmul.sm90.schedule import adds_adapter
from pallas_kernels.fp4_matmul.sm90.synchronize import fence_async_proxy, opaque
from pallas_kernels.fp4_matmul.sm90.xa_partials import await_xa
from pallas_kernels.fp4_matmul.tiling import TileConfig

# Bytes of the copies under way to a CTA, rounded up to whole stages, two at least. They are enough
# to keep the memory busy; more only queue there, and every other read of global memory waits after
# them.
_BYTES_IN_FLIGHT = 65536


def _stages_in_flight(config: TileConfig) -> int:
    """Number of stages whose copies may be under way."""
    return max(2, -(-_BYTES_IN_FLIGHT // config.stage_bytes()))


def produce(kernel: Kernel) -> None:
    """Runs the producer warpgroup: it copies codes, scales and tokens of all work tiles."""
    schedule, partials = kernel.schedule, kernel.xa_partials
    block = schedule.this_block()
    begun = jnp.int32(0)
    if partials is not None and partials.a is not None:
        begun = copy_tokens_for_partials(kernel, partials)

    # Code that runs once is slow: loops are not unrolled, and the code of a stage exists once.
    @pl.loop(0, schedule.num_work_tiles(block), init_carry=(begun, begun))
    def stop(index, carry):
        return _produce_work_tile(kernel, block, index, *carry)

    total, _ = stop
    # A kernel must not end before all arrivals at its barriers.
    _await_last(kernel, kernel.smem.empty, schedule.config.stages, total)
    # A thread that waits for one phase of a barrier must observe all of them.
    in_flight = _stages_in_flight(schedule.config)
    if in_flight < schedule.config.stages:
        _await_last(kernel, kernel.smem.full, in_flight, total)


def _produce_work_tile(
    kernel: Kernel, block: Any, index: Any, done: Any, slot: Any
) -> tuple[Any, Any]:
    """Fills the stages of a work tile, and one with x A^T if it begins a tile.

    Takes the number of stages filled before and the slot of the next one; returns them after it.
    """
    schedule = kernel.schedule
    tile, first, count = schedule.work_tile(block, index)

    @pl.loop(0, count if schedule.simulated else opaque(jnp.int32(count)), init_carry=slot)
    def slot(i, slot):
        _acquire(kernel, done + i, slot)
        _fill(kernel, slot, tile, first + i)
        return schedule.next_slot(slot)

    done += count
    partials = kernel.xa_partials
    if partials is not None:

        @pl.when(index == schedule.xa_awaited_after(block))
        def await_sum_of_partials():
            with jax.named_scope("await xa"):
                await_xa(partials, schedule.blocks)

    if kernel.gmem.b is None:
        return done, slot

    adapted = adds_adapter(first)

    @pl.when(adapted)
    def fill_with_xa():
        _acquire(kernel, done, slot)
        _fill_with_xa(kernel, slot, tile)

    after = jnp.where(adapted, schedule.next_slot(slot), slot)
    return done + jnp.where(adapted, 1, 0), after


def _acquire(kernel: Kernel, i: Any, slot: Any) -> None:
    """Waits until the slot of stage i is free."""
    schedule, smem = kernel.schedule, kernel.smem
    stages, in_flight = schedule.config.stages, _stages_in_flight(schedule.config)
    if in_flight < stages:

        @pl.when(i >= in_flight)
        def await_earlier_copies():
            earlier = slot - in_flight
            earlier = jnp.where(earlier < 0, earlier + stages, earlier)
            plgpu.barrier_wait(smem.full.at[earlier])

    @pl.when(i >= stages)
    def await_consumers():
        with jax.named_scope("await free stage"):
            plgpu.barrier_wait(smem.empty.at[slot])
        if schedule.simulated:
            plgpu.commit_smem()
        else:
            fence_async_proxy(nvvm.ProxyKind.async_shared)


def _fill(kernel: Kernel, slot: Any, tile: Any, step: Any) -> None:
    """Starts the copies of a step: codes, scales and tokens."""
    schedule, gmem, smem = kernel.schedule, kernel.gmem, kernel.smem
    rows, per_stage = schedule.config.warpgroups_n, schedule.tiles_per_stage
    _, n_tile = schedule.coordinates(tile)
    columns = step * per_stage
    tiles = pl.ds(schedule.row_tile(n_tile, schedule.first_row()), rows), pl.ds(columns, per_stage)
    if schedule.paired:
        first, half = schedule.whole_row_tiles(n_tile)
        tiles = slice(None), pl.ds(first, rows), tiles[1], pl.ds(half * 4, 4)
    full = smem.full.at[slot]
    plgpu.copy_gmem_to_smem(gmem.codes.at[tiles], smem.codes.at[slot], full)
    plgpu.copy_gmem_to_smem(gmem.scales.at[tiles], smem.scales.at[slot], full)
    _copy_tokens(kernel, gmem.x, slot, tile, columns, per_stage)


def _fill_with_xa(kernel: Kernel, slot: Any, tile: Any) -> None:
    """Starts the copies of x A^T, instead of the tokens of a step."""
    xa = kernel.gmem.xa
    copies = -(-xa.shape[1] // kernel.smem.x.shape[-1])
    _copy_tokens(kernel, xa, slot, tile, 0, copies)
    for _ in range(kernel.schedule.arrivals - copies):
        plgpu.barrier_arrive(kernel.smem.full.at[slot])


def _copy_tokens(kernel: Kernel, source: Any, slot: Any, tile: Any, first: Any, count: int) -> None:
    """Copies of a tile's columns; what is read beyond those of xa is zero, and not used."""
    schedule, smem = kernel.schedule, kernel.smem
    width = smem.x.shape[-1]
    m_tile, _ = schedule.coordinates(tile)
    rows = window(m_tile, schedule.config.tile_m)
    for j in range(count):
        place = rows, window(first + j, width)
        plgpu.copy_gmem_to_smem(
            source.at[place],
            smem.x.at[slot, j],
            smem.full.at[slot],
            collective_axes="member" if schedule.members > 1 else None,
        )


def _await_last(kernel: Kernel, barriers: Any, count: int, total: Any) -> None:
    """Observes the last phases of barriers, up to `count`, of `total` stages that were filled."""

    @pl.loop(jnp.maximum(total - count, 0), total)
    def observe_phase(i):
        plgpu.barrier_wait(barriers.at[lax.rem(i, kernel.schedule.config.stages)])
