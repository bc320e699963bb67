"""What kernels of wgmma share, and those of attention: products of tiles, the pipeline of keys."""

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.segments import ALIGNMENT, BLOCK, Segments, windowed

ROWS = 64  # rows of a consumer warpgroup's tile
CONSUMERS = 2  # consumer warpgroups of a CTA
STAGES = 2  # of a pipeline, if shared memory holds them
WIDE = 128  # dimensions of a head from which on fewer keys are in shared memory, and fewer stages
CONSUMER_REGISTERS = 240
PRODUCER_REGISTERS = 24
LOG2_E = 1.4426950408889634
# How operands of wgmma lie in shared memory.
OPERAND = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
TILE = plgpu.Layout.WGMMA  # layout of a product
BY_ROW = TILE.reduce(1)  # layout of one number for each row of a product
BY_COLUMN = TILE.reduce(0)
PARAMETERS = plgpu.CompilerParams(
    approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
)


def operand(*shape: int) -> Any:
    """The type of operands of wgmma in shared memory."""
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=OPERAND)


def meet(barrier: Any) -> None:
    """Waits for all threads that arrive at a barrier."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def product(a: Any, b: Any) -> jax.Array:
    """The float32 product of two matrices in shared memory, [64, columns of b]."""

    def multiply(acc):
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def add_product(acc: jax.Array, a: jax.Array, b: Any, *, simulated: bool) -> jax.Array:
    """Adds a product to float32 [64, n]: of [64, m] in registers and bfloat16 [m, n] in memory.

    The former is rounded to bfloat16. The interpreter's wgmma takes no registers.
    """
    a = a.astype(jnp.bfloat16)
    if simulated:
        return acc + jnp.dot(a, b[...], preferred_element_type=jnp.float32)

    def multiply(total):
        total[...] = acc
        plgpu.wgmma(total, a, b)
        return total[...]

    return pl.run_scoped(multiply, plgpu.ACC((acc.shape[0], acc.shape[1]), acc.dtype))


def filled(shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
    """A float32 array of equal numbers in a layout."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def iota(shape: tuple[int, ...], dimension: int, layout: Any) -> jax.Array:
    """The index along a dimension, int32, in a layout."""
    return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=layout)


def over_columns(numbers: jax.Array, columns: int) -> jax.Array:
    """Repeats one number for each row."""
    return lax.broadcast_in_dim(numbers, (numbers.shape[0], columns), (0,))


def over_rows(numbers: jax.Array, rows: int) -> jax.Array:
    """Repeats one number for each column."""
    return lax.broadcast_in_dim(numbers, (rows, numbers.shape[0]), (1,))


@dataclasses.dataclass(frozen=True)
class KeyBlocks:
    """The blocks of 128 keys that a tile of 128 queries visits."""

    tile: Any  # index of the tile
    prompt: Any  # first key of the prompt's run
    prompt_blocks: Any  # number of blocks of the prompt's run
    prompt_from: Any  # first full block of the prompt's run
    prompt_to: Any  # end of the full blocks of the prompt's run
    own: Any  # first key of the tile's own run; the prompt's run ends before it
    blocks: Any  # number of blocks of the own run
    full_from: Any  # first full block of the own run
    full_to: Any  # end of the full blocks of the own run
    size: int = BLOCK  # keys of a block: half of them, twice as many blocks, for wide heads

    @classmethod
    def load(cls, key_runs: Any, rank: Any, *, size: int) -> "KeyBlocks":
        """Reads a row of `Segments.key_runs` in global memory."""
        runs = cls(*(key_runs[rank, i] for i in range(9)), size=size)
        if size == BLOCK:
            return runs
        counts = ("prompt_blocks", "prompt_from", "prompt_to", "blocks", "full_from", "full_to")
        more = {name: getattr(runs, name) * (BLOCK // size) for name in counts}
        return dataclasses.replace(runs, **more)

    @property
    def count(self) -> Any:
        """The number of blocks that are visited."""
        return self.prompt_blocks + self.blocks

    def first_key(self, i: Any) -> Any:
        """The first key of the i-th block."""
        in_own = i - self.prompt_blocks
        key = jnp.where(in_own < 0, self.prompt + i * self.size, self.own + in_own * self.size)
        return pl.multiple_of(key, ALIGNMENT)

    def is_full(self, i: Any) -> Any:
        """Whether every query of the tile sees every key of the i-th block."""
        in_own = i - self.prompt_blocks
        full_of_prompt = (i >= self.prompt_from) & (i < self.prompt_to)
        return full_of_prompt | ((in_own >= self.full_from) & (in_own < self.full_to))

    def masked(
        self, scores: jax.Array, i: Any, queries: jax.Array, ends: Any, window: Any = None
    ) -> jax.Array:
        """The scores [64, size] of the i-th block, and -inf where a query does not see a key.

        `queries` [64] has the index of each query, `ends` [size], in shared memory, the
        `Segments.ends` of each key. `window` has the positions of the queries [64] and, in shared
        memory, for each key the first position whose query does not see it [size].
        """

        def hide():
            end = plgpu.load(ends, layout=BY_COLUMN)
            # The last block of the prompt's run may hold keys of the own run, too.
            bound = jnp.where(i < self.prompt_blocks, self.own - 1, 2**31 - 1)
            last = jnp.minimum(queries, bound) - self.first_key(i)
            seen = iota(scores.shape, 1, TILE) <= over_columns(last, self.size)
            seen &= over_columns(queries, self.size) < over_rows(end, ROWS)
            if window is not None:
                limit = plgpu.load(window[1], layout=BY_COLUMN)
                seen &= over_columns(window[0], self.size) < over_rows(limit, ROWS)
            return jnp.where(seen, scores, -jnp.inf)

        return lax.cond(self.is_full(i), lambda: scores, hide)


class Cta(types.SimpleNamespace):
    """A CTA of a kernel: references by the names that `launch` gets, and what it computes.

    A barrier `..._full` tells when something has arrived in shared memory, `..._empty` when it has
    been read. `head` is the index along the second axis of the grid, `blocks` what the CTA visits,
    `simulated` whether the interpreter runs the kernel.
    """

    def produce(self) -> None:
        """What the producer warpgroup does."""
        raise NotImplementedError

    def consume(self, warpgroup: Any) -> None:
        """What a consumer warpgroup does."""
        raise NotImplementedError

    def run(self) -> None:
        """Runs the producer and the consumers."""
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == CONSUMERS)
        def produce():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            self.produce()

        @pl.when(warpgroup < CONSUMERS)
        def consume():
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            self.consume(warpgroup)


class QueryTile(Cta):
    """A CTA with a tile of 128 queries of one head."""

    def window(self, rows: Any) -> Callable[[Any], Any]:
        """Returns the function from a stage to the window that `KeyBlocks.masked` takes."""
        if not hasattr(self, "limits"):
            return lambda stage: None
        positions = plgpu.load(self.positions.at[rows], layout=BY_ROW, optimized=False)
        return lambda stage: (positions, self.limits_sm.at[stage])

    def produce(self) -> None:
        """Copies the blocks of keys and values that the tile visits."""
        kv_head = lax.div(self.head, self.q.shape[1] // self.k.shape[1])

        def copy_keys(i, stage):
            keys, full = pl.ds(self.blocks.first_key(i), self.blocks.size), self.k_full.at[stage]
            plgpu.copy_gmem_to_smem(self.k.at[keys, kv_head], self.k_sm.at[stage], full)
            plgpu.copy_gmem_to_smem(self.ends.at[keys], self.ends_sm.at[stage], full)
            if hasattr(self, "limits"):
                plgpu.copy_gmem_to_smem(self.limits.at[keys], self.limits_sm.at[stage], full)

        def copy_values(i, stage):
            keys, full = pl.ds(self.blocks.first_key(i), self.blocks.size), self.v_full.at[stage]
            plgpu.copy_gmem_to_smem(self.v.at[keys, kv_head], self.v_sm.at[stage], full)

        channels = [(self.k_empty, copy_keys), (self.v_empty, copy_values)]
        produce(channels, self.blocks.count, self.k_sm.shape[0])


def window_of(segments: Segments, window: int) -> tuple[Segments, dict[str, Any]]:
    """Returns the segments whose blocks a kernel visits, and its operands for a window."""
    if not window:
        return segments, {}
    assert segments.positions is not None, "a window needs positions"
    operands = {"positions": segments.positions, "limits": segments.positions + window}
    return windowed(segments, window), operands


def launch(
    cta: type[Cta],
    name: str,
    *,
    blocks: Callable[[Any, Any], Any],
    operands: dict[str, jax.Array],
    results: dict[str, jax.ShapeDtypeStruct],
    shared: dict[str, Any],
    grid: tuple[int, int],
    interpret: plgpu.InterpretGPUParams | None,
) -> tuple[jax.Array, ...]:
    """Runs a kernel, whose CTAs are of the class `cta`; returns its results.

    `blocks` is a function of the operand "runs" and the CTA's index along the first axis of the
    grid, which returns the blocks to visit. Operands, the shapes of the results, and shared memory
    with its barriers come by name. The second axis of the grid is that of heads.
    """

    def body(*refs, **shared_refs):
        refs = dict(zip((*operands, *results), refs, strict=True)) | shared_refs
        head = lax.axis_index("head")
        visited = blocks(refs["runs"], lax.axis_index("index"))
        cta(**refs, blocks=visited, head=head, simulated=interpret is not None).run()

    return plgpu.kernel(
        body,
        out_type=tuple(results.values()),
        scratch_types=shared,
        grid=grid,
        grid_names=("index", "head"),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=PARAMETERS,
        interpret=interpret,
    )(*operands.values())


def produce(channels: list[tuple[Any, Any]], count: Any, stages: int) -> None:
    """Has the TMA fill the stages of a pipeline, and waits until all are free again.

    For each part of a stage, `channels` has the barriers that tell when it is free, and a function
    of a step and its stage that starts the copies. `count` is the number of steps,
    `stages` that of stages.
    """

    @pl.loop(0, count)
    def fill(i):
        stage = lax.rem(i, stages)
        for empty, copy in channels:

            @pl.when(i >= stages)
            def await_consumers(empty=empty):
                plgpu.barrier_wait(empty.at[stage])
                plgpu.commit_smem()

            copy(i, stage)

    # A kernel must not end before all arrivals at its barriers.
    @pl.loop(jnp.maximum(count - stages, 0), count)
    def observe_last_phases(i):
        for empty, _ in channels:
            plgpu.barrier_wait(empty.at[lax.rem(i, stages)])
