"""What a simulation computes in jnp outside of the kernel, as the interpreter lacks it."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.fp4_matmul import reference
from pallas_kernels.fp4_matmul.epilogues import AddRmsNorm
from pallas_kernels.fp4_matmul.sm90 import swiglu
from pallas_kernels.fp4_matmul.sm90.schedule import TileSchedule
from pallas_kernels.fp4_matmul.tiling import TILE_ROWS


def shrink(product: Any) -> jax.Array | None:
    """Returns x A^T [M, R] of a `kernel.Product`, or None without an adapter."""
    x, b, xa_partials = product.x, product.b, product.xa_partials
    if product.a is not None:
        xa_partials = jnp.dot(x, product.a.T, preferred_element_type=jnp.float32)[None]
    if xa_partials is None or b is None:
        return product.xa
    return reference.sum_xa_partials(xa_partials, x, b)


def add_partial(
    schedule: TileSchedule,
    y: jax.Array,
    partial: jax.Array,
    bias: jax.Array | None,
    factor: jax.Array | None,
) -> jax.Array:
    """Adds up the partial sums of split tiles [slots, warpgroups_n, 64, tile_m], in y.

    y is [M, N], or [M, N / 2] with SwiGLU, whose norm's factor is float32 [m_tiles tile_m]. The
    bias is [N].
    """
    for tile, (slot, peers) in _split_tiles(schedule).items():
        with jax.ensure_compile_time_eval():
            m_tile, n_tile = (int(i) for i in schedule.coordinates(tile))
        total = partial[slot : slot + peers].sum(axis=0)
        if factor is not None:
            y = _put_swiglu(schedule, y, total, (m_tile, n_tile), factor)
        else:
            y = _put_tile(schedule, y, total, (m_tile, n_tile), bias)
    return y


def _split_tiles(schedule: TileSchedule) -> dict[int, tuple[int, int]]:
    """The first slot of the partial sums of each split tile, and their number."""
    with jax.ensure_compile_time_eval():
        if schedule.split > 1:
            ends = [
                (block, schedule.work_tile(block, schedule.num_work_tiles(block) - 1))
                for block in range(0, schedule.blocks, schedule.split)
            ]
            return {
                int(end.tile): (block, schedule.split)
                for block, end in ends
                if end.steps < schedule.steps
            }
        fixups = [
            schedule.fixup(block, i) for block in range(schedule.splitting_blocks) for i in (0, 1)
        ]
        return {
            int(fixup.tile): (
                schedule.partial_slot(int(fixup.first_peer), int(fixup.tile)),
                int(fixup.peers),
            )
            for fixup in fixups
            if fixup.peers
        }


def _put_swiglu(
    schedule: TileSchedule,
    y: jax.Array,
    total: jax.Array,
    tile: tuple[int, int],
    factor: jax.Array,
) -> jax.Array:
    """Puts SwiGLU of a tile [warpgroups_n, 64, tile_m] into y."""
    tile_m, (m_tile, n_tile) = schedule.config.tile_m, tile
    tokens = slice(m_tile * tile_m, (m_tile + 1) * tile_m)
    for row, value in enumerate(total):
        with jax.ensure_compile_time_eval():
            row_tile = int(schedule.row_tile(n_tile, row))
        height = schedule.tile_outputs
        part = swiglu.apply(value, factor[tokens], simulated=True)[: len(y[tokens])]
        if row_tile < schedule.row_tiles:
            y = y.at[tokens, row_tile * height : (row_tile + 1) * height].set(part)
    return y


def _put_tile(
    schedule: TileSchedule,
    y: jax.Array,
    total: jax.Array,
    tile: tuple[int, int],
    bias: jax.Array | None,
) -> jax.Array:
    """Puts a tile [warpgroups_n, 64, tile_m], with bias, into y."""
    config, (m_tile, n_tile) = schedule.config, tile
    height = config.warpgroups_n * TILE_ROWS
    rows = slice(n_tile * height, (n_tile + 1) * height)
    tokens = slice(m_tile * config.tile_m, (m_tile + 1) * config.tile_m)
    part = y[tokens, rows]
    total = total.reshape(-1, config.tile_m)[: part.shape[1], : part.shape[0]].T
    if bias is not None:
        total += bias[rows][: part.shape[1]].astype(jnp.float32)
    return y.at[tokens, rows].set(total.astype(y.dtype))


def add_rmsnorm(y: jax.Array, epilogue: AddRmsNorm) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The results of an epilogue for a product, with one partial of the mean squares."""
    total = (y.astype(jnp.float32) + epilogue.residual.astype(jnp.float32)).astype(y.dtype)
    wide = total.astype(jnp.float32)
    return total, (wide * epilogue.scale).astype(y.dtype), jnp.mean(wide * wide, axis=1)[None]
