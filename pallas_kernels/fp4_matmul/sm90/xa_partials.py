"""Partials of x A^T: CTAs make them, add up some of the sum each, and wait for all of it.

A partial is the product of 128 columns, or the caller gives the partials. Their sum is written, 32
columns at a time, in the order in which a thread has the columns of B when it reads 16 bytes of
each of its two rows. The columns that a step of wgmma wants of a thread, 2 c, 2 c + 1, 2 c + 8 and
2 c + 9 for c = 0..3, lie apart, and a warp that read four bytes at a time would request every line
of its 16 rows eight times.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm, vector

from pallas_kernels.fp4_matmul.sm90.synchronize import arrive, fence_async_proxy, opaque, wait
from pallas_kernels.fp4_matmul.tiling import MIN_PARTIALS, PARTIAL_COLUMNS

# A warp has every fourth partial of a row, a lane one of its columns.
_PARTIALS = plgpu.Layout.TILED(
    plgpu.Tiling(((MIN_PARTIALS, PARTIAL_COLUMNS), (1,))),
    warp_dims=(-3,),
    lane_dims=(-2,),
    vector_dim=-1,
)
# Column 8 c + 4 s + 2 b + a of the sum is column 16 s + 8 b + 2 c + a of what is written.
_WRITTEN = plgpu.Layout.TILED(
    plgpu.Tiling(((32,), (16,), (8,), (2,), (1,))),
    warp_dims=(plgpu.Replicated(4),),
    lane_dims=(-3, -5, -4, -2),
    vector_dim=-1,
)
# B: a lane has the columns 8 c.. of its rows r and r + 8, for each 32 columns.
_READ = plgpu.Layout.TILED(
    plgpu.Tiling(((64, 64), (16, 64), (8, 64), (32,), (8,))),
    warp_dims=(-8,),
    lane_dims=(-4, -2),
    vector_dim=-1,
)
# The same for 32 rows of B, of which a lane has one.
_READ_HALF = plgpu.Layout.TILED(
    plgpu.Tiling(((32, 64), (8, 64), (32,), (8,))),
    warp_dims=(-6,),
    lane_dims=(-4, -2),
    vector_dim=-1,
)
_PARTIALS_IN_FLIGHT = 32
SUM_BYTES = 4 * MIN_PARTIALS * PARTIAL_COLUMNS  # shared memory to add up the sums of the warps


class XaPartials(NamedTuple):
    """Partials of x A^T in global memory, and where their sum goes."""

    partials: Any  # float32 [S, M', R'], M' >= M and S >= MIN_PARTIALS
    # bfloat16 [M', R], R >= R'; its columns have the order that `operand` wants, and those from R'
    # on become 0.
    xa: Any
    lock: Any  # int32 [1], lock of the sum
    rows: int  # M
    blocks: int  # number of CTAs that make partials or add them up, which are the first ones
    # bfloat16 [R', K], A of which the kernel makes the partials; None if they are given.
    a: Any = None
    made_lock: Any = None  # int32 [1], lock of the partials that the kernel makes

    @property
    def parts(self) -> int:
        """Number of parts of the sum: one CTA at a time adds up PARTIAL_COLUMNS of a row."""
        return self.rows * (self.xa.shape[1] // PARTIAL_COLUMNS)

    @property
    def makers(self) -> int:
        """Number of CTAs that make partials, PARTIAL_COLUMNS columns of one at a time."""
        count, _, columns = self.partials.shape
        return min(self.blocks, count * (columns // PARTIAL_COLUMNS))

    def unit(self, block: Any, turn: Any) -> tuple[Any, Any]:
        """The partial, which may not exist, and the part of its columns that a CTA makes."""
        unit, parts = block + turn * self.blocks, self.partials.shape[2] // PARTIAL_COLUMNS
        return lax.div(unit, parts), lax.rem(unit, parts)


def reduce_partials(block: Any, given: XaPartials, made: Any) -> None:
    """Writes this CTA's parts of x A^T and counts at the lock, if there are any.

    The reducer warpgroup calls it. If the kernel makes the partials, this CTA's own ones arrive at
    the barrier `made`.
    """
    block = opaque(block)
    if given.a is not None:
        _await_made(block, given, made)
    xa, blocks, parts = given.xa, given.blocks, given.parts
    columns = xa.shape[1] // PARTIAL_COLUMNS

    @pl.loop(0, jnp.where(block < blocks, lax.div(parts - block + blocks - 1, blocks), 0))
    def add_up_part(turn):
        part = block + turn * blocks
        row = lax.div(part, columns)
        column = (part - row * columns) * PARTIAL_COLUMNS
        total = _sum(given.partials, row, column)
        target = xa.at[row, pl.ds(column, PARTIAL_COLUMNS)]
        plgpu.store(target, _rounded(total.sum(axis=0)), optimized=False)

    @pl.when(block < min(blocks, parts))
    def count_at_lock():
        fence_async_proxy(nvvm.ProxyKind.async_global)
        arrive([given.lock], [jnp.int32(1)])


def _await_made(block: Any, given: XaPartials, made: Any) -> None:
    """Waits until all partials that the CTA adds up are made, after it has counted its own."""

    @pl.when(block < given.makers)
    def count_own_partials():
        plgpu.barrier_wait(made)
        arrive([given.made_lock], [jnp.int32(1)])

    waiters = min(given.blocks, given.parts)
    makers = jnp.where(block < waiters, given.makers, 0)
    wait([given.made_lock], [makers], [jnp.int32(waiters)])


def _sum(partials: Any, row: Any, column: Any) -> jax.Array:
    """Sums of the partials of a row and PARTIAL_COLUMNS columns from one on, one for each warp.

    The sums are zero where the partials do not have the columns.
    """
    count, _, width = partials.shape
    batch = -(-count // -(-count // _PARTIALS_IN_FLIGHT))
    batch = min(-(-batch // MIN_PARTIALS), count // MIN_PARTIALS) * MIN_PARTIALS
    batches = -(-count // batch)
    zero = plgpu.layout_cast(jnp.zeros((MIN_PARTIALS, PARTIAL_COLUMNS), jnp.float32), _PARTIALS)

    @pl.loop(0, jnp.where(column < width, batches, 0), init_carry=zero)
    def total(i, total):
        # The last batch begins with what has been added before, if it is not whole.
        begin = jnp.minimum(i * batch, count - batch)
        for j in range(0, batch, MIN_PARTIALS):
            partial = partials.at[
                pl.ds(begin + j, MIN_PARTIALS), row, pl.ds(column, PARTIAL_COLUMNS)
            ]
            value = plgpu.load(partial, layout=_PARTIALS, optimized=False)
            if batches * batch > count:
                index = plgpu.broadcasted_iota(jnp.int32, value.shape, 0, layout=_PARTIALS)
                value = jnp.where(begin + j + index >= i * batch, value, zero)
            total += value
        return total

    return total


def await_xa(given: XaPartials, blocks: int) -> None:
    """Waits until all of x A^T is there for the TMA. Each of the CTAs calls it once."""
    reducers = min(given.blocks, given.parts)
    wait([given.lock], [jnp.int32(reducers)], [jnp.int32(blocks)])
    fence_async_proxy(nvvm.ProxyKind.async_global)


def load_b(*b: Any) -> list[jax.Array]:
    """Loads B [64, 64] from global memory, or two [32, 64] whose rows take turns by eights.

    The registers, in the order of columns that `reduce_partials` writes, are for `operand`.
    """
    return [plgpu.load(part, layout=_layout(len(b)), optimized=False) for part in b]


def operand(read: Sequence[jax.Array], late: jax.Array) -> jax.Array:
    """B [64, 64], as `load_b` has read it, as an operand of wgmma.

    `late`, int32 and not negative, is known when the operand is wanted and not before. ptxas would
    otherwise put the words in order right after the load, and so wait for them.
    """
    result = plgpu.ShapeDtypeStruct((64, 64), jnp.dtype(jnp.bfloat16), layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(
        arg_types=([_layout(len(read))] * len(read), plgpu.Layout.WG_SPLAT), return_type=result
    )
    def regroup(_, read, late):
        registers = [register for part in read for register in part.registers.flat]
        i32, pair = ir.IntegerType.get_signless(32), ir.VectorType.get((2,), ir.BF16Type.get())
        words = ir.VectorType.get((4,), i32)
        zero = mgpu.utils.inline_ptx("shr.u32 $0, $1, 31;", late.registers.item(), result_types=i32)
        out = np.empty((1, 8, 1, 1, 2, 1, 1, 1, 1), dtype=object)
        for half in range(2):  # the rows r and r + 8
            for part in range(2):  # columns 0..31 and 32..63
                register = mgpu.utils.bitcast(registers[2 * half + part], words)
                for i in range(4):
                    word = arith.ori(vector.extract(register, [], [i]), zero)
                    out[0, 4 * part + i, 0, 0, half] = mgpu.utils.bitcast(word, pair)
        return mgpu.FragmentedArray(_registers=out, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return regroup(list(read), late)


def _layout(parts: int) -> Any:
    return _READ if parts == 1 else _READ_HALF


def _rounded(sums: jax.Array) -> jax.Array:
    """The sums [32] as bfloat16, each in its lane: the numbers in the order of `_WRITTEN`."""

    @plgpu.inline_mgpu(
        arg_types=(_PARTIALS.reduce(0),),
        return_type=plgpu.ShapeDtypeStruct(sums.shape, jnp.dtype(jnp.bfloat16), layout=_WRITTEN),
    )
    def rounded(_, sums):
        layout = _WRITTEN.to_mgpu()
        one = layout.registers_element_type(ir.BF16Type.get())
        registers = np.empty(layout.registers_shape(sums.shape), dtype=object)
        (registers.flat[0],) = (arith.truncf(one, sum_) for sum_ in sums.registers.flat)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return rounded(sums)
