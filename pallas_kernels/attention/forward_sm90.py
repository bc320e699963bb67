"""Packed self-attention on a Hopper GPU, by Pallas's Mosaic GPU backend.

A CTA has a tile of 128 queries of one head. A producer warpgroup has the TMA copy the blocks of
keys and values that the tile visits; two consumer warpgroups, of 64 queries each, run an online
softmax over them. The tiles with the most blocks start first.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import tiles_sm90 as tiles
from pallas_kernels.attention.segments import BLOCK, Segments
from pallas_kernels.attention.tiles_sm90 import CONSUMERS, ROWS, STAGES, KeyBlocks

_LOWEST = -1e30  # the largest score of a row before its first key


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments,
    *,
    sinks: jax.Array | None = None,
    window: int = 0,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Does what `attend_packed` does.

    Returns bfloat16 [T, N, H], and the binary logarithm of each row's sum of the exponentials of
    its scores, that of its sink included, float32 [N, T].
    """
    length, heads, head_dim = q.shape
    size = BLOCK if head_dim <= tiles.WIDE else BLOCK // 2
    full = plgpu.Barrier(num_barriers=STAGES)
    empty = plgpu.Barrier(num_barriers=STAGES, num_arrivals=CONSUMERS)
    segments, more = tiles.window_of(segments, window)
    limits = {"limits_sm": plgpu.SMEM((STAGES, size), jnp.int32)} if window else {}
    if sinks is not None:
        more |= {"sinks": sinks.astype(jnp.float32)}
    operands = {"q": q, "k": k, "v": v, "runs": segments.key_runs, "ends": segments.ends}
    out, lse = tiles.launch(
        _QueryTile,
        "packed_attention_sm90",
        blocks=functools.partial(KeyBlocks.load, size=size),
        operands=operands | more,
        results={
            "out": jax.ShapeDtypeStruct(q.shape, q.dtype),
            "lse": jax.ShapeDtypeStruct((heads, length), jnp.float32),
        },
        shared={
            "q_sm": tiles.operand(CONSUMERS, ROWS, head_dim),  # queries, and in the end the result
            "k_sm": tiles.operand(STAGES, size, head_dim),
            "v_sm": tiles.operand(STAGES, size, head_dim),
            "ends_sm": plgpu.SMEM((STAGES, size), jnp.int32),
            "lse_sm": plgpu.SMEM((CONSUMERS, ROWS), jnp.float32),
            "q_full": plgpu.Barrier(num_barriers=CONSUMERS),
            "k_full": dataclasses.replace(full, num_arrivals=3 if window else 2),
            "v_full": full,
            "k_empty": empty,
            "v_empty": empty,
        }
        | limits,
        grid=(length // BLOCK, heads),
        interpret=interpret,
    )
    return out, lse


class _QueryTile(tiles.QueryTile):
    """A CTA of the forward pass."""

    def consume(self, warpgroup: Any) -> None:
        """Computes the attention of 64 queries."""
        head_dim = self.q.shape[2]
        first = self.blocks.tile * BLOCK + warpgroup * ROWS
        place = pl.ds(first, ROWS), self.head
        q_sm, lse_sm = self.q_sm.at[warpgroup], self.lse_sm.at[warpgroup]
        plgpu.copy_gmem_to_smem(self.q.at[place], q_sm, self.q_full.at[warpgroup])
        queries, window = first + tiles.iota((ROWS,), 0, tiles.BY_ROW), self.window(place[0])
        plgpu.barrier_wait(self.q_full.at[warpgroup])
        scale = head_dim**-0.5 * tiles.LOG2_E

        def visit(i, carry):
            total, weight, largest = carry
            stage = lax.rem(i, STAGES)
            plgpu.barrier_wait(self.k_full.at[stage])
            scores = tiles.product(q_sm, self.k_sm.at[stage].T)
            ends = self.ends_sm.at[stage]
            scores = self.blocks.masked(scores, i, queries, ends, window(stage))
            plgpu.barrier_arrive(self.k_empty.at[stage])
            top = jnp.maximum(largest, scale * jnp.max(scores, axis=1))
            weights = jnp.exp2(scale * scores - tiles.over_columns(top, self.blocks.size))
            keep = jnp.exp2(largest - top)
            weight = keep * weight + jnp.sum(weights, axis=1)
            total = tiles.over_columns(keep, head_dim) * total
            plgpu.barrier_wait(self.v_full.at[stage])
            total = tiles.add_product(total, weights, self.v_sm.at[stage], simulated=self.simulated)
            plgpu.barrier_arrive(self.v_empty.at[stage])
            return total, weight, top

        start = (
            tiles.filled((ROWS, head_dim), 0.0, tiles.TILE),
            tiles.filled((ROWS,), 0.0, tiles.BY_ROW),
            tiles.filled((ROWS,), _LOWEST, tiles.BY_ROW),
        )
        if hasattr(self, "sinks"):
            one, zero = (tiles.filled((ROWS,), x, tiles.BY_ROW) for x in (1.0, 0.0))
            start = start[0], one, zero + tiles.LOG2_E * self.sinks[self.head]
        total, weight, largest = lax.fori_loop(0, self.blocks.count, visit, start)
        q_sm[...] = (total * tiles.over_columns(1 / weight, head_dim)).astype(jnp.bfloat16)
        lse_sm[...] = largest + tiles.LOG2_E * jnp.log(weight)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_sm, self.out.at[place])
        plgpu.copy_smem_to_gmem(lse_sm, self.lse.at[self.head, place[0]])
        plgpu.wait_smem_to_gmem(0)
