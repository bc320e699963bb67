"""The gradients of packed self-attention by keys and values, on a Hopper GPU.

A CTA has a tile of 128 keys, or a part of what the tile has to do, and visits blocks of queries of
all heads that share the keys. It computes the softmax weights again, of the scores and the saved
log-sum-exp. A second kernel adds up the sums of the parts of each divided tile, in order.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import tiles_sm90 as tiles
from pallas_kernels.attention.segments import BLOCK, STEP, Segments
from pallas_kernels.attention.tiles_sm90 import CONSUMERS, ROWS, STAGES


def gradients(
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
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients by k and v, bfloat16 [T, K, H], of the arguments of `dq_sm90`."""
    length, kv_heads, head_dim = k.shape
    count = length // BLOCK
    partial = jax.ShapeDtypeStruct((count, kv_heads, BLOCK, head_dim), jnp.float32)
    gradient = jax.ShapeDtypeStruct(k.shape, k.dtype)

    group = q.shape[1] // kv_heads
    # Registers hold the gradients of 128 columns: a CTA has half of a wide head.
    parts, stages = (1, STAGES) if head_dim <= tiles.WIDE else (2, 1)

    def blocks(runs, unit):
        return _QueryBlocks(*(runs[unit, i] for i in range(6)), group=group)

    segments, more = tiles.window_of(segments, window)
    positions = {"positions_sm": plgpu.SMEM((stages, STEP), jnp.int32)} if window else {}
    operands = {"q": q, "k": k, "v": v, "d_out": d_out, "lse": lse, "delta": delta}
    dk, dv, dk_parts, dv_parts = tiles.launch(
        _KeyTile,
        "packed_attention_dkv_sm90",
        blocks=blocks,
        operands=operands | {"runs": segments.query_runs, "ends": segments.ends} | more,
        # Of tiles that are not divided, and the sums of the parts of the others.
        results={"dk": gradient, "dv": gradient, "dk_parts": partial, "dv_parts": partial},
        shared={
            "k_sm": tiles.operand(CONSUMERS, ROWS, head_dim),  # keys, and in the end their gradient
            "v_sm": tiles.operand(CONSUMERS, ROWS, head_dim),
            "q_sm": tiles.operand(stages, STEP, head_dim),
            "d_out_sm": tiles.operand(stages, STEP, head_dim),
            "lse_sm": plgpu.SMEM((stages, STEP), jnp.float32),
            "delta_sm": plgpu.SMEM((stages, STEP), jnp.float32),
            "tile_full": plgpu.Barrier(num_barriers=CONSUMERS, num_arrivals=2),
            "full": plgpu.Barrier(num_barriers=stages, num_arrivals=5 if window else 4),
            "empty": plgpu.Barrier(num_barriers=stages, num_arrivals=CONSUMERS),
        }
        | positions,
        grid=(2 * count, kv_heads * parts),
        interpret=interpret,
    )
    return _add_parts(dk, dv, dk_parts, dv_parts, segments.sums, interpret)


@dataclasses.dataclass(frozen=True)
class _QueryBlocks:
    """The blocks of 64 queries that a part of a tile of 128 keys visits.

    The blocks of all heads that share the keys follow one another, head by head. A part has a
    fraction of this sequence.
    """

    tile: Any  # index of the tile
    blocks: Any  # number of blocks of each head; the first one starts at the tile's first key
    part: Any  # index of the part
    parts: Any  # number of parts of the tile
    slot: Any  # where the sums of the part go, or -1 if they are the result
    full_to: Any  # end of the full blocks, which start at the third block
    group: int  # number of heads that share the keys

    @property
    def first(self) -> Any:
        """The index of the part's first block in the tile's sequence."""
        return lax.div(self.group * self.blocks * self.part, self.parts)

    @property
    def count(self) -> Any:
        """The number of the part's blocks."""
        return lax.div(self.group * self.blocks * (self.part + 1), self.parts) - self.first

    def head_and_block(self, i: Any) -> tuple[Any, Any]:
        """The head within the group, and the block's index, of the i-th block of the part."""
        i += self.first
        return lax.div(i, self.blocks), lax.rem(i, self.blocks)

    def masked(
        self, scores: jax.Array, block: Any, keys: jax.Array, ends: jax.Array, window: Any = None
    ) -> jax.Array:
        """The scores [64, 64] of keys and queries, and -inf where a query does not see a key.

        `keys` and `ends` [64] are the index and the `Segments.ends` of each key, from the tile's
        first. `window` has for each key the first position whose query does not see it [64] and,
        in shared memory, the positions of the queries [64].
        """

        def hide():
            start = block * STEP
            query = tiles.iota(scores.shape, 1, tiles.TILE)
            seen = tiles.over_columns(keys - start, STEP) <= query
            seen &= query < tiles.over_columns(ends - start, STEP)
            if window is not None:
                position = plgpu.load(window[1], layout=tiles.BY_COLUMN)
                seen &= tiles.over_rows(position, ROWS) < tiles.over_columns(window[0], STEP)
            return jnp.where(seen, scores, -jnp.inf)

        full = (block >= BLOCK // STEP) & (block < self.full_to)
        return lax.cond(full, lambda: scores, hide)


class _KeyTile(tiles.Cta):
    """A CTA of the gradients by keys and values: a part of a tile of 128 keys of one head.

    Of a wide head it has half of the columns of the gradients.
    """

    def __init__(self, **fields: Any):
        super().__init__(**fields)
        head_dim = self.k.shape[2]
        self.width = min(head_dim, tiles.WIDE)
        self.columns = None
        if head_dim > self.width:
            halves = head_dim // self.width
            self.columns = pl.ds(lax.rem(self.head, halves) * self.width, self.width)
            self.head = lax.div(self.head, halves)

    def part(self, ref: Any) -> Any:
        """The own columns of a reference."""
        return ref if self.columns is None else ref.at[..., self.columns]

    def run(self) -> None:
        """Runs the producer and the consumers, unless there is no such part."""
        pl.when(self.blocks.parts > 0)(super().run)

    def produce(self) -> None:
        """Copies the blocks of queries and of the gradient by the attention."""
        first = self.blocks.tile * BLOCK

        def copy(i, stage):
            head, block = self.blocks.head_and_block(i)
            head += self.head * self.blocks.group
            rows, full = pl.ds(first + block * STEP, STEP), self.full.at[stage]
            plgpu.copy_gmem_to_smem(self.q.at[rows, head], self.q_sm.at[stage], full)
            plgpu.copy_gmem_to_smem(self.d_out.at[rows, head], self.d_out_sm.at[stage], full)
            plgpu.copy_gmem_to_smem(self.lse.at[head, rows], self.lse_sm.at[stage], full)
            plgpu.copy_gmem_to_smem(self.delta.at[head, rows], self.delta_sm.at[stage], full)
            if hasattr(self, "positions"):
                plgpu.copy_gmem_to_smem(self.positions.at[rows], self.positions_sm.at[stage], full)

        tiles.produce([(self.empty, copy)], self.blocks.count, self.q_sm.shape[0])

    def consume(self, warpgroup: Any) -> None:
        """Computes the gradients by 64 keys and values."""
        head_dim = self.q.shape[2]
        first = self.blocks.tile * BLOCK
        rows = pl.ds(first + warpgroup * ROWS, ROWS)
        k_sm, v_sm = self.k_sm.at[warpgroup], self.v_sm.at[warpgroup]
        full = self.tile_full.at[warpgroup]
        plgpu.copy_gmem_to_smem(self.k.at[rows, self.head], k_sm, full)
        plgpu.copy_gmem_to_smem(self.v.at[rows, self.head], v_sm, full)
        keys = warpgroup * ROWS + tiles.iota((ROWS,), 0, tiles.BY_ROW)
        ends = plgpu.load(self.ends.at[rows], layout=tiles.BY_ROW, optimized=False) - first
        limits = None
        if hasattr(self, "limits"):
            limits = plgpu.load(self.limits.at[rows], layout=tiles.BY_ROW, optimized=False)
        plgpu.barrier_wait(full)
        scale = head_dim**-0.5

        def visit(i, carry):
            dk, dv = carry
            stage = lax.rem(i, self.q_sm.shape[0])
            q_sm, d_out_sm = self.q_sm.at[stage], self.d_out_sm.at[stage]
            plgpu.barrier_wait(self.full.at[stage])
            scores = tiles.product(k_sm, q_sm.T)
            window = None if limits is None else (limits, self.positions_sm.at[stage])
            block = self.blocks.head_and_block(i)[1]
            scores = self.blocks.masked(scores, block, keys, ends, window)
            lse = plgpu.load(self.lse_sm.at[stage], layout=tiles.BY_COLUMN)
            scores *= scale * tiles.LOG2_E
            weights = jnp.exp2(scores - tiles.over_rows(lse, ROWS))
            dv = tiles.add_product(dv, weights, self.part(d_out_sm), simulated=self.simulated)
            d_weights = tiles.product(v_sm, d_out_sm.T)
            delta = plgpu.load(self.delta_sm.at[stage], layout=tiles.BY_COLUMN)
            d_scores = weights * (d_weights - tiles.over_rows(delta, ROWS))
            dk = tiles.add_product(dk, d_scores, self.part(q_sm), simulated=self.simulated)
            plgpu.barrier_arrive(self.empty.at[stage])
            return dk, dv

        start = (tiles.filled((ROWS, self.width), 0.0, tiles.TILE),) * 2
        dk, dv = lax.fori_loop(0, self.blocks.count, visit, start)
        dk *= scale

        @pl.when(self.blocks.slot < 0)
        def store_result():
            for staged, x, target in ((k_sm, dk, self.dk), (v_sm, dv, self.dv)):
                target, x = target.at[rows, self.head], x.astype(jnp.bfloat16)
                if self.columns is not None:  # The TMA reads whole columns.
                    plgpu.store(self.part(target), x, optimized=False)
                    continue
                staged[...] = x
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(staged, target)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(self.blocks.slot >= 0)
        def store_part():
            place = self.blocks.slot, self.head, pl.ds(warpgroup * ROWS, ROWS)
            for parts, total in ((self.dk_parts, dk), (self.dv_parts, dv)):
                plgpu.store(self.part(parts.at[place]), total, optimized=False)


def _add_parts(dk, dv, dk_parts, dv_parts, sums, interpret):
    """Puts the results of divided tiles into dk and dv: sums over their parts, in order."""
    count, kv_heads, _, head_dim = dk_parts.shape

    def body(dk, dv, dk_parts, dv_parts, sums):
        tile, head, half = (lax.axis_index(name) for name in ("tile", "head", "half"))
        slot, parts = sums[tile, 0], sums[tile, 1]
        rows = pl.ds(half * ROWS, ROWS)

        @pl.when(parts > 0)
        def add():
            for target, source in ((dk, dk_parts), (dv, dv_parts)):

                def add_part(i, total, source=source):
                    return total + _load(source.at[slot + i, head, rows])

                start = tiles.filled((ROWS, head_dim), 0.0, tiles.TILE)
                total = lax.fori_loop(0, parts, add_part, start)
                target = target.at[pl.ds(tile * BLOCK + half * ROWS, ROWS), head]
                plgpu.store(target, total.astype(jnp.bfloat16), optimized=False)

    dk, dv = jax.new_ref(dk), jax.new_ref(dv)
    plgpu.kernel(
        body,
        out_type=(),
        grid=(count, kv_heads, 2),
        grid_names=("tile", "head", "half"),
        kernel_name="packed_attention_sums_sm90",
        compiler_params=tiles.PARAMETERS,
        interpret=interpret,
    )(dk, dv, dk_parts, dv_parts, sums)
    return jax.freeze(dk), jax.freeze(dv)


def _load(ref: Any) -> jax.Array:
    return plgpu.load(ref, layout=tiles.TILE, optimized=False)
