"""The consumer warpgroups: main loop, adapter, and epilogue or fix-up of each work tile."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fp4_matmul import layout
from pallas_kernels.fp4_matmul.sm90 import epilogue, fixup, mainloop
from pallas_kernels.fp4_matmul.sm90.context import Consumer, Kernel, over_tokens
from pallas_kernels.fp4_matmul.sm90.make_partials import compute_partials
from pallas_kernels.fp4_matmul.sm90.schedule import adds_adapter


def consume(kernel: Kernel, *, warpgroup: Any, registers: int) -> None:
    """Runs a consumer warpgroup: it dequantizes, multiplies, and stores the result.

    `warpgroup` is its index among the consumers, `registers` the number of those of a thread.
    """
    schedule = kernel.schedule
    rows = schedule.config.warpgroups_n
    block = schedule.this_block()
    row, k_slice = lax.rem(warpgroup, rows), lax.div(warpgroup, rows)
    consumer = Consumer(
        **vars(kernel),
        warpgroup=warpgroup,
        registers=registers,
        block=block,
        row=row,
        row_of_tile=row + schedule.first_row(),
        k_slice=k_slice,
    )
    begun = jnp.int32(0)
    if kernel.xa_partials is not None and kernel.xa_partials.a is not None:
        with jax.named_scope("shrink"):
            begun = compute_partials(consumer, kernel.xa_partials)

    @pl.loop(0, schedule.num_work_tiles(block), init_carry=begun)
    def consume_work_tile(index, done):
        return _consume_work_tile(consumer, index, done)

    if schedule.split_tiles and not schedule.simulated:

        @pl.when(k_slice == 0)
        def add_split_tiles():
            with jax.named_scope("fix up"):
                fixup.add_split_tiles(consumer)

    if schedule.config.slices > 1:

        @pl.when((k_slice > 0) & (schedule.num_work_tiles(block) > 0))
        def await_reading_of_the_last_sums():
            plgpu.barrier_wait(kernel.smem.sums_empty.at[row])

    # A CTA may end once its shared memory has been read.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _consume_work_tile(consumer: Consumer, index: Any, done: Any) -> Any:
    """Computes a work tile, and returns the number of stages that the CTA has used after it."""
    schedule, gmem = consumer.schedule, consumer.gmem
    tile_m = schedule.config.tile_m
    tile, first, count = schedule.work_tile(consumer.block, index)
    m_tile, n_tile = schedule.coordinates(tile)
    row_tile = schedule.row_tile(n_tile, consumer.row_of_tile)
    row_start = consumer.row_start(row_tile)
    divisor = epilogue.load_divisors(consumer, row_start)
    bias = epilogue.load_bias(consumer, row_tile)
    b = None
    # B is loaded early if there are registers for it, as a late load is waited for.
    spare = consumer.registers - schedule.config.registers()
    if gmem.b is not None and spare >= gmem.b.shape[1] // 4:
        b = mainloop.load_adapter(consumer, row_start)

    with jax.named_scope("multiply"):
        value, slot = mainloop.multiply_stages(consumer, done, count)
    if schedule.config.slices > 1:
        with jax.named_scope("add slices"):
            value = fixup.add_slices(consumer, value, index)
    token = m_tile * tile_m
    residual = None
    if schedule.stores_whole_tiles:
        residual = epilogue.load_residual(consumer, token, tile_m, row_tile)
    unit = layout.E4M3_UNIT if schedule.config.e4m3 else layout.UNIT
    value *= over_tokens(unit / divisor, tile_m)
    if gmem.b is not None:
        with jax.named_scope("add adapter"):
            value = mainloop.add_adapter(consumer, value, b, slot, first, row_start)
    _finish_work_tile(consumer, index, value, (tile, count, token, row_tile), bias, residual)
    return done + count + (jnp.where(adds_adapter(first), 1, 0) if gmem.b is not None else 0)


def _finish_work_tile(
    consumer: Consumer,
    index: Any,
    value: jax.Array,
    work: tuple[Any, Any, Any, Any],
    bias: jax.Array | None,
    residual: jax.Array | None,
) -> None:
    """Stores a whole tile, or passes on the sums [64, tile_m] of a split one.

    `work` has the tile, the number of steps of the work tile, the first token, and the row tile.
    The bias [64] and the residual [64, tile_m] to add may be None.
    """
    schedule, block, k_slice = consumer.schedule, consumer.block, consumer.k_slice
    tile, count, token, row_tile = work
    if schedule.paired and not schedule.simulated:
        # Not before a tile is stored: x A^T is added up before the factor.
        @pl.when((k_slice == 0) & (index == schedule.first_stored(block)))
        def await_factor():
            plgpu.barrier_wait(consumer.smem.factor_full)

    @pl.when((k_slice == 0) & (count == schedule.steps))
    def store_whole_tile():
        with jax.named_scope("store"):
            epilogue.store(consumer, value, bias, token, row_tile, residual)

    if schedule.in_clusters:

        @pl.when((k_slice == 0) & (count < schedule.steps))
        def add_cluster_parts():
            with jax.named_scope("add parts"):
                fixup.add_cluster_parts(consumer, value, bias, token, row_tile)

    if consumer.gmem.partial is not None:

        @pl.when((k_slice == 0) & (count < schedule.steps))
        def publish_partial():
            fixup.publish_partial(consumer, value, tile)

    if schedule.split_tiles and not schedule.simulated:
        # Once for both tiles, for to publish takes longer than to compute a stage.
        @pl.when((k_slice == 0) & (index == schedule.num_split_work_tiles(block) - 1))
        def arrive_at_split_tiles():
            with jax.named_scope("publish"):
                fixup.arrive_at_split_tiles(consumer)
