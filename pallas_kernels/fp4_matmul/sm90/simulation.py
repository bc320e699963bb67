"""What the blocks that share a tile do at their end, in jnp: the interpreter lacks it."""

import jax
import jax.numpy as jnp

from pallas_kernels.fp4_matmul.sm90 import swiglu
from pallas_kernels.fp4_matmul.sm90.schedule import Plan
from pallas_kernels.fp4_matmul.tiling import TILE_ROWS


def add_partial(
    plan: Plan,
    y: jax.Array,
    partial: jax.Array,
    bias: jax.Array | None,
    factor: jax.Array | None,
) -> jax.Array:
    """Adds up the partial sums of shared tiles.

    Args:
        plan: who shares what.
        y: [M, N], or [M, N / 2] behind SwiGLU, without the shared tiles.
        partial: float32 [places, rows, 64, tile_m].
        bias: [N], or None.
        factor: float32 [tile_m] of the norm before SwiGLU, or None.
    """
    config = plan.config
    with jax.ensure_compile_time_eval():
        xa_partials = [plan.share(block, i) for block in range(plan.sharing) for i in (0, 1)]
        # By tile: the first place of its partial sums, and how many they are.
        shared = {
            int(tile): (plan.slot(int(first), int(tile)), int(n))
            for tile, first, n, *_ in xa_partials
            if n
        }
    if plan.split > 1:
        with jax.ensure_compile_time_eval():
            ends = [
                (b, plan.piece(b, plan.pieces(b) - 1)) for b in range(0, plan.blocks, plan.split)
            ]
            shared = {int(t): (b, plan.split) for b, (t, _, n) in ends if n < plan.steps}
    for tile, (slot, sharers) in shared.items():
        with jax.ensure_compile_time_eval():
            m_tile, n_tile = (int(i) for i in plan.coordinates(tile))
        total = partial[slot : slot + sharers].sum(axis=0)
        if factor is not None:
            with jax.ensure_compile_time_eval():
                row_tiles = [int(plan.row_tile(n_tile, row)) for row in range(config.warpgroups_n)]
            for row_tile, value in zip(row_tiles, total, strict=True):
                rows = slice(row_tile * plan.height, (row_tile + 1) * plan.height)
                part = swiglu.apply(value, factor, simulated=True)[: len(y)]
                y = y.at[:, rows].set(part) if row_tile < plan.row_tiles else y
            continue
        total = total.reshape(-1, config.tile_m)
        rows = slice(
            n_tile * config.warpgroups_n * TILE_ROWS, (n_tile + 1) * config.warpgroups_n * TILE_ROWS
        )
        tokens = slice(m_tile * config.tile_m, (m_tile + 1) * config.tile_m)
        part = y[tokens, rows]
        total = total[: part.shape[1], : part.shape[0]].T
        if bias is not None:
            total += bias[rows][: part.shape[1]].astype(jnp.float32)
        y = y.at[tokens, rows].set(total.astype(y.dtype))
    return y


def begin_norm(
    y: jax.Array, residual: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The sum of a product and the stream, the same scaled, and its mean squares [1, M]."""
    total = (y.astype(jnp.float32) + residual.astype(jnp.float32)).astype(y.dtype)
    wide = total.astype(jnp.float32)
    return total, (wide * scale).astype(y.dtype), jnp.mean(wide * wide, axis=1)[None]
