"""The gradient of packed self-attention by the queries, on a Hopper GPU.

A CTA has a tile of 128 queries of one head, and visits blocks of keys as the forward pass does. It
computes the softmax weights again, of the scores and the saved log-sum-exp.
"""

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


def gradient(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    d_out: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    segments: Segments,
    *,
    window: int = 0,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """Returns the gradient by q, bfloat16 [T, N, H].

    `d_out` [T, N, H] is the gradient by the attention, `lse` float32 [N, T] the log-sum-exp in base
    2, and `delta` float32 [N, T] are the sums of attention times its gradient. Of sinks only the
    former knows.
    """
    length, heads, head_dim = q.shape
    size, stages = (BLOCK, STAGES) if head_dim <= tiles.WIDE else (BLOCK // 2, 1)
    segments, more = tiles.window_of(segments, window)
    limits = {"limits_sm": plgpu.SMEM((stages, size), jnp.int32)} if window else {}
    operands = {"q": q, "k": k, "v": v, "d_out": d_out, "lse": lse, "delta": delta}
    (dq,) = tiles.launch(
        _QueryTile,
        "packed_attention_dq_sm90",
        blocks=functools.partial(KeyBlocks.load, size=size),
        operands=operands | {"runs": segments.key_runs, "ends": segments.ends} | more,
        results={"dq": jax.ShapeDtypeStruct(q.shape, q.dtype)},
        shared={
            "q_sm": tiles.operand(CONSUMERS, ROWS, head_dim),  # queries, and in the end the result
            "d_out_sm": tiles.operand(CONSUMERS, ROWS, head_dim),
            "k_sm": tiles.operand(stages, size, head_dim),
            "v_sm": tiles.operand(stages, size, head_dim),
            "ends_sm": plgpu.SMEM((stages, size), jnp.int32),
            "tile_full": plgpu.Barrier(num_barriers=CONSUMERS, num_arrivals=2),
            "k_full": plgpu.Barrier(num_barriers=stages, num_arrivals=3 if window else 2),
            "v_full": plgpu.Barrier(num_barriers=stages),
            "k_empty": plgpu.Barrier(num_barriers=stages, num_arrivals=CONSUMERS),
            "v_empty": plgpu.Barrier(num_barriers=stages, num_arrivals=CONSUMERS),
        }
        | limits,
        grid=(length // BLOCK, heads),
        interpret=interpret,
    )
    return dq


class _QueryTile(tiles.QueryTile):
    """A CTA of the gradient by the queries."""

    def consume(self, warpgroup: Any) -> None:
        """Computes the gradient by 64 queries."""
        head_dim = self.q.shape[2]
        first = self.blocks.tile * BLOCK + warpgroup * ROWS
        rows = pl.ds(first, ROWS)
        q_sm, d_out_sm = self.q_sm.at[warpgroup], self.d_out_sm.at[warpgroup]
        full = self.tile_full.at[warpgroup]
        plgpu.copy_gmem_to_smem(self.q.at[rows, self.head], q_sm, full)
        plgpu.copy_gmem_to_smem(self.d_out.at[rows, self.head], d_out_sm, full)
        lse, delta = (
            plgpu.load(x.at[self.head, rows], layout=tiles.BY_ROW, optimized=False)
            for x in (self.lse, self.delta)
        )
        queries, window = first + tiles.iota((ROWS,), 0, tiles.BY_ROW), self.window(rows)
        plgpu.barrier_wait(full)
        scale, size, stages = head_dim**-0.5, self.blocks.size, self.k_sm.shape[0]

        def visit(i, dq):
            stage = lax.rem(i, stages)
            k_sm, v_sm = self.k_sm.at[stage], self.v_sm.at[stage]
            plgpu.barrier_wait(self.k_full.at[stage])
            scores = tiles.product(q_sm, k_sm.T)
            ends = self.ends_sm.at[stage]
            scores = self.blocks.masked(scores, i, queries, ends, window(stage))
            scores *= scale * tiles.LOG2_E
            weights = jnp.exp2(scores - tiles.over_columns(lse, size))
            plgpu.barrier_wait(self.v_full.at[stage])
            d_weights = tiles.product(d_out_sm, v_sm.T)
            plgpu.barrier_arrive(self.v_empty.at[stage])
            d_scores = weights * (d_weights - tiles.over_columns(delta, size))
            dq = tiles.add_product(dq, d_scores, k_sm, simulated=self.simulated)
            plgpu.barrier_arrive(self.k_empty.at[stage])
            return dq

        start = tiles.filled((ROWS, head_dim), 0.0, tiles.TILE)
        dq = lax.fori_loop(0, self.blocks.count, visit, start)
        q_sm[...] = (scale * dq).astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_sm, self.dq.at[rows, self.head])
        plgpu.wait_smem_to_gmem(0)
