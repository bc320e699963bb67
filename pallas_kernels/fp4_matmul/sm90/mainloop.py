"""The main loop of a consumer warpgroup: await a stage, dequantize it to registers, multiply."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.fp4_matmul.sm90 import swiglu
from pallas_kernels.fp4_matmul.sm90.codes import (
    CODES,
    dequantize_paired_tile,
    dequantize_reference,
    dequantize_tile,
    round_reference,
    scales_layout,
)
from pallas_kernels.fp4_matmul.sm90.context import Consumer, load_rows
from pallas_kernels.fp4_matmul.sm90.multiply import add_product
from pallas_kernels.fp4_matmul.sm90.schedule import adds_adapter
from pallas_kernels.fp4_matmul.sm90.xa_partials import load_b, operand
from pallas_kernels.fp4_matmul.tiling import TILE_ROWS


def multiply_stages(consumer: Consumer, done: Any, count: Any) -> tuple[jax.Array, Any]:
    """Multiplies this warpgroup's tiles of the next `count` stages; the CTA has used `done` before.

    Returns the float32 products [64, tile_m], and the slot after the last stage.
    """
    schedule, config = consumer.schedule, consumer.schedule.config
    first = lax.rem(done, config.stages)
    dequantized = ()
    if config.ahead:
        _await_stage(consumer, first)
        dequantized = _dequantize(consumer, first, consumer.k_slice)

    acc = _zeros(consumer, config.tile_m, jnp.float32)

    @pl.loop(0, count, init_carry=(acc, first, *dequantized))
    def carry(i, carry):
        acc, slot, *dequantized = carry
        if not config.ahead:
            _await_stage(consumer, slot)
            dequantized = _dequantize(consumer, slot, consumer.k_slice)
        acc = _multiply_tile(consumer, acc, slot, 0, dequantized)
        for j in range(config.slices, schedule.tiles_per_stage, config.slices):
            weight = _dequantize(consumer, slot, j + consumer.k_slice)
            acc = _multiply_tile(consumer, acc, slot, j, weight)
        dequantized = _dequantize_ahead(consumer, i, count, slot) if config.ahead else ()
        # Where a loop turns back, ptxas reuses registers that a product in flight still reads.
        plgpu.wgmma_wait(0)
        consumer.release(slot)
        return acc, schedule.next_slot(slot), *dequantized

    return carry[:2]


def _zeros(consumer: Consumer, columns: int, dtype: DTypeLike) -> jax.Array:
    value = jnp.zeros((TILE_ROWS, columns), dtype)
    if consumer.schedule.simulated:
        return value
    return plgpu.layout_cast(value, plgpu.Layout.WGMMA)


def _await_stage(consumer: Consumer, slot: Any) -> None:
    with jax.named_scope("await stage"):
        plgpu.barrier_wait(consumer.smem.full.at[slot])


def _dequantize(consumer: Consumer, slot: Any, j: Any) -> Any:
    """The weights of tile j of a stage, columns 0..63 and 64..127, [64, 64] each."""
    schedule, smem, row = consumer.schedule, consumer.smem, consumer.row
    e4m3 = schedule.config.e4m3
    if schedule.simulated:
        place = (slot, slice(None), row, j) if schedule.paired else (slot, row, j)
        codes, scales = smem.codes[place], smem.scales[place]
        if schedule.paired:
            codes = codes.swapaxes(0, 1).reshape(4, 256)
            scales = scales.swapaxes(0, 1).reshape(-1)
        dequantize = round_reference if e4m3 else dequantize_reference
        return tuple(jnp.split(dequantize(codes, scales), 2, axis=1))
    if schedule.paired:
        place = slot, slice(None), row, j
        return dequantize_paired_tile(smem.codes.at[place], smem.scales.at[place], rounds=e4m3)
    return dequantize_tile(
        plgpu.load(smem.codes.at[slot, row, j], layout=CODES),
        plgpu.load(smem.scales.at[slot, row, j], layout=scales_layout(smem.scales.shape[-1])),
        rounds=e4m3,
    )


def _multiply_tile(consumer: Consumer, acc: jax.Array, slot: Any, j: int, weight: Any) -> jax.Array:
    """Adds the two products of tile j, counted from the warpgroup's first tile of the stage."""
    config = consumer.schedule.config
    for half, operand_a in enumerate(weight):
        tokens = slot, consumer.k_slice, j, half
        options = {"e4m3": config.e4m3, "simulated": consumer.schedule.simulated}
        acc = add_product(acc, operand_a, consumer.smem.x, *tokens, **options)
        if config.in_flight:
            plgpu.wgmma_wait(config.in_flight)
    return acc


def _dequantize_ahead(consumer: Consumer, i: Any, count: Any, slot: Any) -> tuple:
    """The first tile of the stage after stage i, or zeros after the last stage.

    It is a branch, or ptxas would dequantize when the products of stage i have ended.
    """
    schedule = consumer.schedule

    def first_tile():
        _await_stage(consumer, schedule.next_slot(slot))
        return tuple(_dequantize(consumer, schedule.next_slot(slot), consumer.k_slice))

    def nothing():
        return (_zeros(consumer, 32 if schedule.config.e4m3 else 64, jnp.bfloat16),) * 2

    return lax.cond(i < count - 1, first_tile, nothing)


def load_adapter(consumer: Consumer, row_start: Any) -> list[Any]:
    """Loads B [64, R] in parts of 64 columns; with partials of x A^T, as `load_b` reads it."""
    b = consumer.gmem.b
    rows = pl.ds(row_start, TILE_ROWS)
    columns = [pl.ds(column, 64) for column in range(0, b.shape[1], 64)]
    paired = consumer.schedule.paired
    if consumer.xa_partials is not None:
        halves = consumer.paired_rows(row_start) if paired else [rows]
        return [load_b(*(b.at[half, part] for half in halves)) for part in columns]
    if paired:  # and simulated
        gate, up = consumer.paired_rows(row_start)
        return [swiglu.interleave(b[gate, part], b[up, part]) for part in columns]
    return [load_rows(b.at[rows, part]) for part in columns]


def add_adapter(
    consumer: Consumer, acc: jax.Array, b: list[Any] | None, slot: Any, first: Any, row_start: Any
) -> jax.Array:
    """Adds B xa^T to the accumulator [64, tile_m], if the work tile begins a tile.

    B, with rows from `row_start` on, is the result of `load_adapter` if it was loaded before the
    main loop, or None. If the work tile begins a tile, whose first step tells, the slot's stage
    holds xa.
    """
    config, smem, partials = consumer.schedule.config, consumer.smem, consumer.xa_partials

    @pl.loop(0, jnp.where(adds_adapter(first), 1, 0), init_carry=acc)
    def acc(_, acc):
        # B is requested before the wait.
        columns = load_adapter(consumer, row_start) if b is None else b
        # The slices that do not multiply wait too, as for every stage: a warpgroup that skips a
        # phase takes its arrivals for those of the next round of the pipeline.
        plgpu.barrier_wait(smem.full.at[slot])
        multiplies = 1 if config.slices == 1 else jnp.where(consumer.k_slice == 0, 1, 0)

        @pl.loop(0, multiplies, init_carry=acc)
        def acc(_, acc):
            for j, part in enumerate(columns):
                weight = part if partials is None else operand(part, slot)
                tokens = slot, 0, *((j, 0) if config.e4m3 else (j // 2, j % 2))
                acc = add_product(
                    acc, weight, smem.x, *tokens, simulated=consumer.schedule.simulated
                )
            plgpu.wgmma_wait(0)
            return acc

        consumer.release(slot)
        return acc

    return acc
