"""The grouped product of bfloat16 rows and weights on a Hopper GPU, by Pallas's Mosaic GPU backend.

A CTA has units of work one after the other: up to two tiles of 64 rows with the same expert, times
`_COLUMNS` columns of its weight. A producer warpgroup has the TMA fill a pipeline of stages, and
each of two consumer warpgroups multiplies one of the tiles. The same kernel multiplies by a weight
as it is stored and by its transpose, as wgmma reads either.
"""

import concurrent.futures
import functools
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.experts.table import HOPPER_TILE, Table

_ROWS = HOPPER_TILE  # of a tile, and of wgmma
_CONSUMERS = 2
_COLUMNS = 256  # of the weight that a CTA multiplies at a time, if these divide its columns
_STEP = 64  # length of the part of a dot product in a stage
_STAGES = 4
_STORED = 64  # columns of a result that are stored at a time
_CONSUMER_REGISTERS = 240
_PRODUCER_REGISTERS = 24
_OPERAND = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


class Units(NamedTuple):
    """The units of work of a table: its tiles, in twos of the same expert.

    Attributes:
        first: int32 [tiles], the first tile of each unit; of those after the last one any.
        ends: int32 [E + 1], the number of units of the experts before each one. The unused tiles
            are units of the expert that the table names.
    """

    first: jax.Array
    ends: jax.Array


def units(table: Table, experts: int) -> Units:
    """Returns the units of work of a table."""
    owner, count = table.owner, len(table.owner)
    index = jnp.arange(count, dtype=jnp.int32)
    group = jnp.where(index < table.used, owner, experts)
    starts = jnp.concatenate([jnp.ones(1, bool), group[1:] != group[:-1]])
    begin = lax.cummax(jnp.where(starts, index, 0))
    is_first = (index - begin) % _CONSUMERS == 0
    place = jnp.where(is_first, jnp.cumsum(is_first) - 1, count)
    first = jnp.zeros(count, jnp.int32).at[place].set(index, mode="drop", unique_indices=True)
    before = is_first[:, None] & (owner[:, None] < jnp.arange(experts + 1))
    return Units(first, before.sum(axis=0, dtype=jnp.int32))


def product(
    x: jax.Array,
    weight: jax.Array,
    table: Table,
    work: Units,
    experts: jax.Array,
    y: jax.Array | None = None,
    scales: jax.Array | None = None,
    *,
    outputs: int,
    transposed: bool,
    num_sms: int,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """Returns the products of tiles with the weights of their owners.

    Args:
        x: bfloat16 [R, K], or [R, N] if `transposed`.
        weight: bfloat16 [E' N, K'], the weights of a range of experts one after the other, with
            K' - K columns of zeros. Where N is no multiple of 128, any 64 rows follow.
        table: which expert a tile belongs to.
        work: the units of the table.
        experts: int32 [2], the first of the experts of the weight, and the one after the last: an
            array, so that one kernel serves all ranges.
        y: the products of the tiles of other experts, which the kernel changes; None where the
            weight has all experts.
        scales: float32 [E N], factors of the outputs of all experts, which multiply before a result
            is rounded; None for ones.
        outputs: number N of outputs of an expert.
        transposed: whether to return x W instead of x W^T.
        num_sms: number of CTAs.
        interpret: how to simulate the kernel.

    Returns:
        bfloat16 [R, N], or [R, K'] if `transposed`; zeros in unused tiles. Where N is no multiple
        of 128, 64 columns without a meaning follow.
    """
    inputs = weight.shape[1]
    width = inputs if transposed else outputs + -outputs % (_COLUMNS // 2)
    columns = _COLUMNS if width % _COLUMNS == 0 else _COLUMNS // 2
    numbers = jnp.concatenate([work.ends[experts], experts[:1]])
    block = (columns, _STEP) if not transposed else (_STEP, columns)
    static = {"outputs": outputs, "columns": columns, "width": width, "transposed": transposed}

    arrays = {
        "x": x,
        "weight": weight,
        "first": work.first,
        "owner": table.owner,
        "used": table.used.reshape(1),
        "numbers": numbers,
    }
    if scales is not None:
        arrays["scales"] = jnp.pad(scales, (0, width - outputs)) if width > outputs else scales

    def body(*refs, **shared):
        named = dict(zip((*arrays, "y"), refs, strict=True)) | shared | static
        _Cta(**named, block=lax.axis_index("block"), blocks=num_sms).run()

    result = jax.ShapeDtypeStruct((len(x), width), x.dtype)
    run = plgpu.kernel(
        body,
        out_type=result if y is None else (),
        scratch_types={
            "x_sm": plgpu.SMEM((_STAGES, _CONSUMERS, _ROWS, _STEP), x.dtype, transforms=_OPERAND),
            "weight_sm": plgpu.SMEM((_STAGES, *block), x.dtype, transforms=_OPERAND),
            "y_sm": plgpu.SMEM((_CONSUMERS, 2, _ROWS, _STORED), x.dtype, transforms=_OPERAND),
            "full": plgpu.Barrier(num_barriers=_STAGES, num_arrivals=_CONSUMERS + 1),
            "empty": plgpu.Barrier(num_barriers=_STAGES, num_arrivals=_CONSUMERS),
        },
        grid=(num_sms,),
        grid_names=("block",),
        num_threads=_CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name="grouped_matmul_sm90",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
    )
    if y is None:
        return run(*arrays.values())
    changed = jax.new_ref(y)
    run(*arrays.values(), changed)
    return jax.freeze(changed)


class _Cta(types.SimpleNamespace):
    """A CTA: references by their names, and what it computes.

    `numbers` has the first unit, the one after the last, and the first expert of the weight.
    """

    scales: Any = None

    @property
    def count(self) -> Any:
        """The number of the CTA's units."""
        units = (self.numbers[1] - self.numbers[0]) * (self.width // self.columns)
        return lax.div(units - self.block + self.blocks - 1, self.blocks)

    def unit(self, i: Any) -> tuple[Any, Any, Any]:
        """Of the CTA's i-th unit: its first tile, its first column, and its number of steps."""
        index, parts = self.block + i * self.blocks, self.width // self.columns
        tile = self.first[self.numbers[0] + lax.div(index, parts)]
        column = pl.multiple_of(lax.rem(index, parts) * self.columns, self.columns)
        return tile, column, jnp.where(tile < self.used[0], self.x.shape[1] // _STEP, 0)

    def run(self) -> None:
        """Runs the producer and the consumers."""
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == _CONSUMERS)
        def produce():
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
            done = pl.loop(0, self.count, init_carry=jnp.int32(0))(self.fill)

            # A kernel must not end before all arrivals at its barriers.
            @pl.loop(jnp.maximum(done - _STAGES, 0), done)
            def observe_last_phases(i):
                plgpu.barrier_wait(self.empty.at[lax.rem(i, _STAGES)])

        @pl.when(warpgroup < _CONSUMERS)
        def consume():
            plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
            multiply = functools.partial(self.multiply, warpgroup)
            pl.loop(0, self.count, init_carry=jnp.int32(0))(multiply)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def fill(self, i: Any, done: Any) -> Any:
        """Has the TMA copy the stages of a unit; returns the number of all stages so far."""
        tile, column, steps = self.unit(i)
        row = (self.owner[tile] - self.numbers[2]) * self.outputs
        second = jnp.minimum(tile + 1, self.owner.shape[0] - 1)

        @pl.loop(0, steps)
        def fill(step):
            slot = lax.rem(done + step, _STAGES)

            @pl.when(done + step >= _STAGES)
            def await_consumers():
                plgpu.barrier_wait(self.empty.at[slot])

            inner, full = pl.ds(step * _STEP, _STEP), self.full.at[slot]
            for half, number in enumerate((tile, second)):
                source = self.x.at[pl.ds(number * _ROWS, _ROWS), inner]
                plgpu.copy_gmem_to_smem(source, self.x_sm.at[slot, half], full)
            if self.transposed:
                place = pl.ds(row + step * _STEP, _STEP), pl.ds(column, self.columns)
            else:
                place = pl.ds(row + column, self.columns), inner
            plgpu.copy_gmem_to_smem(self.weight.at[place], self.weight_sm.at[slot], full)

        return done + steps

    def multiply(self, warpgroup: Any, i: Any, done: Any) -> Any:
        """Computes the own tile of a unit, if it has one; returns the stages so far."""
        tile, column, steps = self.unit(i)
        own, tiles = tile + warpgroup, self.owner.shape[0]
        other = jnp.minimum(own, tiles - 1)
        is_mine = (own < tiles) & (self.owner[other] == self.owner[tile])
        is_mine &= (own < self.used[0]) == (tile < self.used[0])

        @pl.when(is_mine)
        def multiply():
            factors = None if self.scales is None else self.factors(other, column)
            accumulate = functools.partial(self.accumulate, warpgroup, done, steps)
            acc = pl.run_scoped(accumulate, plgpu.ACC((_ROWS, self.columns), jnp.float32))
            if factors is not None:
                acc *= lax.broadcast_in_dim(factors, acc.shape, (1,))
            self.store(warpgroup, acc.astype(self.x.dtype), other, column)

        @pl.when(~is_mine)
        def skip():
            @pl.loop(0, steps)
            def release(step):
                slot = lax.rem(done + step, _STAGES)
                plgpu.barrier_wait(self.full.at[slot])
                plgpu.barrier_arrive(self.empty.at[slot])

        return done + steps

    def accumulate(self, warpgroup: Any, done: Any, steps: Any, acc: Any) -> jax.Array:
        """The product of a tile [64, columns]; a stage is free when the next one multiplies."""

        @pl.loop(0, steps)
        def step(step):
            slot = lax.rem(done + step, _STAGES)
            plgpu.barrier_wait(self.full.at[slot])
            right = self.weight_sm.at[slot]
            plgpu.wgmma(acc, self.x_sm.at[slot, warpgroup], right if self.transposed else right.T)
            plgpu.wgmma_wait(1)

            @pl.when(step > 0)
            def release():
                plgpu.barrier_arrive(self.empty.at[lax.rem(done + step - 1, _STAGES)])

        plgpu.wgmma_wait(0)

        @pl.when(steps > 0)
        def release_last():
            plgpu.barrier_arrive(self.empty.at[lax.rem(done + steps - 1, _STAGES)])

        return acc[...]

    def factors(self, tile: Any, column: Any) -> jax.Array:
        """The factors of a tile's columns, requested before it is multiplied."""
        place = pl.ds(self.owner[tile] * self.outputs + column, self.columns)
        layout = plgpu.Layout.WGMMA.reduce(0)
        return plgpu.load(self.scales.at[place], layout=layout, optimized=False)

    def store(self, warpgroup: Any, value: jax.Array, tile: Any, column: Any) -> None:
        """Has the TMA copy a product to its place, some columns at a time."""
        for number, start in enumerate(range(0, self.columns, _STORED)):
            staged = self.y_sm.at[warpgroup, number % 2]
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            staged[...] = value[:, start : start + _STORED]
            plgpu.commit_smem()
            place = pl.ds(tile * _ROWS, _ROWS), pl.ds(column + start, _STORED)
            plgpu.copy_smem_to_gmem(staged, self.y.at[place])


def relative_error() -> float:
    """The largest relative error of small products, compared with their definition in float64."""
    rng, outputs, inputs = np.random.default_rng(0), 256, 384
    owner, used = np.array([0, 2, 2, 2, 2], np.int32), 4
    table = Table(*np.zeros((2, 1), np.int32), owner, np.int32(used))  # pyrefly: ignore
    weight = rng.standard_normal((3, outputs, inputs)).astype(jnp.bfloat16)
    errors = []
    for columns, equation in ((inputs, "tmk,tnk->tmn"), (outputs, "tmn,tnk->tmk")):
        x = rng.standard_normal((len(owner), _ROWS, columns)).astype(jnp.bfloat16)

        @jax.jit
        def run(x, weight, transposed=columns == outputs):
            own = units(table, len(weight)), jnp.array([0, len(weight)], jnp.int32)
            options = {"outputs": outputs, "transposed": transposed, "num_sms": 2}
            return product(x, weight.reshape(-1, inputs), table, *own, **options)

        # The caller may be tracing a program. Tracing belongs to a thread, so another one computes.
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            y = np.asarray(thread.submit(run, x.reshape(-1, columns), weight).result(), np.float64)
        want = np.einsum(equation, x.astype(np.float64), weight[owner].astype(np.float64))
        want[used:] = 0
        errors.append(np.linalg.norm(y - want.reshape(y.shape)) / np.linalg.norm(want))
    return float(np.max(errors))
