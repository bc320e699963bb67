"""Packed self-attention on a Hopper GPU, by Pallas's Mosaic GPU backend.

A CTA has a tile of 128 queries of one head. A producer warpgroup has the TMA copy the blocks of
keys and values that the tile visits; two consumer warpgroups, of 64 queries each, run an online
softmax over them. The tiles with the most blocks start first.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import tiles_sm90 as tiles
from pallas_kernels.attention.segments import BLOCK, Segments
from pallas_kernels.attention.tiles_sm90 import CONSUMERS, ROWS, KeyBlocks

_STAGES = 2
_LOWEST = -1e30  # the largest score of a row before its first key


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments,
    *,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Does what `attend_packed` does.

    Args:
        q: bfloat16 [T, N, H] queries.
        k: bfloat16 [T, K, H] keys.
        v: bfloat16 [T, K, H] values.
        segments: segments of the buffer.
        interpret: simulate the kernel with these parameters.

    Returns:
        bfloat16 [T, N, H], and the binary logarithm of each row's sum of the exponentials of its
        scores, float32 [N, T].
    """
    length, heads, head_dim = q.shape

    def body(q, k, v, key_runs, ends, out, lse, **shared):
        cta = _Cta(
            q=q, k=k, v=v, ends=ends, out=out, lse=lse, **shared,
            head=lax.axis_index("head"),
            blocks=KeyBlocks.load(key_runs, lax.axis_index("rank")),
            simulated=interpret is not None,
        )  # fmt: skip
        tiles.run(cta)

    full = plgpu.Barrier(num_barriers=_STAGES)
    empty = plgpu.Barrier(num_barriers=_STAGES, num_arrivals=CONSUMERS)
    kernel = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((heads, length), jnp.float32),
        ),
        scratch_types={
            "q_sm": tiles.operand(CONSUMERS, ROWS, head_dim),
            "k_sm": tiles.operand(_STAGES, BLOCK, head_dim),
            "v_sm": tiles.operand(_STAGES, BLOCK, head_dim),
            "ends_sm": plgpu.SMEM((_STAGES, BLOCK), jnp.int32),
            "lse_sm": plgpu.SMEM((CONSUMERS, ROWS), jnp.float32),
            "q_full": plgpu.Barrier(num_barriers=CONSUMERS),
            "k_full": dataclasses.replace(full, num_arrivals=2),
            "v_full": full,
            "k_empty": empty,
            "v_empty": empty,
        },
        grid=(length // BLOCK, heads),
        grid_names=("rank", "head"),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name="packed_attention_sm90",
        compiler_params=tiles.PARAMETERS,
        interpret=interpret,
    )
    return kernel(q, k, v, segments.key_runs, segments.ends)


@dataclasses.dataclass(frozen=True)
class _Cta:
    """A CTA: its operands and results in global memory, and its shared memory.

    Attributes:
        q: [T, N, H] queries.
        k: [T, K, H] keys.
        v: [T, K, H] values.
        ends: int32 [T], `Segments.ends`.
        out: [T, N, H] result.
        lse: float32 [N, T] result.
        q_sm: [2, 64, H] queries of each consumer, and its result in the end.
        k_sm: [stages, 128, H] keys.
        v_sm: [stages, 128, H] values.
        ends_sm: int32 [stages, 128] ends of the keys.
        lse_sm: float32 [2, 64] second result of each consumer.
        q_full: a barrier per consumer that tells when its queries have arrived.
        k_full: a barrier per stage that tells when its keys have arrived.
        v_full: a barrier per stage that tells when its values have arrived.
        k_empty: a barrier per stage that tells when its keys have been read.
        v_empty: a barrier per stage that tells when its values have been read.
        head: index of the query head.
        blocks: blocks of keys to visit.
        simulated: the interpreter runs the kernel.
    """

    q: Any
    k: Any
    v: Any
    ends: Any
    out: Any
    lse: Any
    q_sm: Any
    k_sm: Any
    v_sm: Any
    ends_sm: Any
    lse_sm: Any
    q_full: Any
    k_full: Any
    v_full: Any
    k_empty: Any
    v_empty: Any
    head: Any
    blocks: KeyBlocks
    simulated: bool

    def produce(self) -> None:
        """Copies the blocks of keys and values."""
        tiles.produce_keys_and_values(self, _STAGES)

    def consume(self, warpgroup: Any) -> None:
        """Computes the attention of 64 queries."""
        head_dim = self.q.shape[2]
        first = self.blocks.tile * BLOCK + warpgroup * ROWS
        place = pl.ds(first, ROWS), self.head
        q_sm, lse_sm = self.q_sm.at[warpgroup], self.lse_sm.at[warpgroup]
        plgpu.copy_gmem_to_smem(self.q.at[place], q_sm, self.q_full.at[warpgroup])
        queries = first + tiles.iota((ROWS,), 0, tiles.BY_ROW)
        plgpu.barrier_wait(self.q_full.at[warpgroup])
        scale = head_dim**-0.5 * tiles.LOG2_E

        def visit(i, carry):
            total, weight, largest = carry
            stage = lax.rem(i, _STAGES)
            plgpu.barrier_wait(self.k_full.at[stage])
            scores = tiles.product(q_sm, self.k_sm.at[stage].T)
            scores = self.blocks.masked(scores, i, queries, self.ends_sm.at[stage])
            plgpu.barrier_arrive(self.k_empty.at[stage])
            top = jnp.maximum(largest, scale * jnp.max(scores, axis=1))
            weights = jnp.exp2(scale * scores - tiles.over_columns(top, BLOCK))
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
        total, weight, largest = lax.fori_loop(0, self.blocks.count, visit, start)
        q_sm[...] = (total * tiles.over_columns(1 / weight, head_dim)).astype(jnp.bfloat16)
        lse_sm[...] = largest + tiles.LOG2_E * jnp.log(weight)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_sm, self.out.at[place])
        plgpu.copy_smem_to_gmem(lse_sm, self.lse.at[self.head, place[0]])
        plgpu.wait_smem_to_gmem(0)
