"""x A^T in shares: blocks of threads make them, add up some of it each, and wait for all of it.

A share is the product of 128 columns; or shares are given. Their sum is written, 32 columns at a
time, in the order in which a thread has the columns of B when it reads 16 bytes of each of its two
rows: the columns that a step of wgmma wants of a thread, 2 c, 2 c + 1, 2 c + 8 and 2 c + 9 for
c = 0..3, lie apart, and a warp that read four bytes at a time would ask for every line of its 16
rows eight times.
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

# A warp has every fourth share of a row, a lane one of its columns.
_SHARES = plgpu.Layout.TILED(
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
# Of B: a lane has the columns 8 c.. of its rows r and r + 8, for each 32 columns.
_READ = plgpu.Layout.TILED(
    plgpu.Tiling(((64, 64), (16, 64), (8, 64), (32,), (8,))),
    warp_dims=(-8,),
    lane_dims=(-4, -2),
    vector_dim=-1,
)
# The same of 32 rows, of which a lane has one.
_READ_HALF = plgpu.Layout.TILED(
    plgpu.Tiling(((32, 64), (8, 64), (32,), (8,))),
    warp_dims=(-6,),
    lane_dims=(-4, -2),
    vector_dim=-1,
)
_SHARES_IN_FLIGHT = 32
SUM_BYTES = 4 * MIN_PARTIALS * PARTIAL_COLUMNS  # of shared memory, to add up what the warps have


class Shares(NamedTuple):
    """Shares of x A^T in global memory, and where their sum goes.

    Attributes:
        xa_partials: float32 [S, M', R'], M' >= M and S >= MIN_PARTIALS.
        xa: bfloat16 [M', R], R >= R'; its columns have the order that `operand` wants, and those
            from R' on become 0.
        lock: int32 [1].
        rows: M.
        adders: how many blocks make shares or add them up, the first ones.
        a: bfloat16 [R', K], of which they are made first; None if they are given.
        all_made: int32 [1], a lock for that.
    """

    xa_partials: Any
    xa: Any
    lock: Any
    rows: int
    adders: int
    a: Any = None
    all_made: Any = None

    @property
    def parts(self) -> int:
        """What one block at a time adds up: PARTIAL_COLUMNS columns of a row."""
        return self.rows * (self.xa.shape[1] // PARTIAL_COLUMNS)

    @property
    def makers(self) -> int:
        """Blocks that make shares, the first ones, PARTIAL_COLUMNS columns of a share at a time."""
        return min(
            self.adders, self.xa_partials.shape[0] * (self.xa_partials.shape[2] // PARTIAL_COLUMNS)
        )

    def unit(self, block: Any, turn: Any) -> tuple[Any, Any]:
        """Which share and which columns of it a block makes; there may be no such share."""
        unit, parts = block + turn * self.adders, self.xa_partials.shape[2] // PARTIAL_COLUMNS
        return lax.div(unit, parts), lax.rem(unit, parts)


def add_shares(block: Any, given: Shares, made: Any) -> None:
    """Writes this block's parts of x A^T and counts at the lock, if there are any.

    A warpgroup calls it.

    Args:
        block: the one that calls.
        given: what it adds up.
        made: a barrier at which this block's own shares arrive, if they are made here.
    """
    xa_partials, xa, adders = given.xa_partials, given.xa, given.adders
    block = opaque(block)
    count, _, width = xa_partials.shape
    columns = xa.shape[1] // PARTIAL_COLUMNS
    parts = given.parts
    batch = -(-count // -(-count // _SHARES_IN_FLIGHT))
    batch = min(-(-batch // MIN_PARTIALS), count // MIN_PARTIALS) * MIN_PARTIALS
    batches = -(-count // batch)

    if given.a is not None:

        @pl.when(block < given.makers)
        def _():
            plgpu.barrier_wait(made)
            arrive([given.all_made], [jnp.int32(1)])

        waiters = min(adders, parts)
        makers = jnp.where(block < waiters, given.makers, 0)
        wait([given.all_made], [makers], [jnp.int32(waiters)])

    @pl.loop(0, jnp.where(block < adders, lax.div(parts - block + adders - 1, adders), 0))
    def _(turn):
        part = block + turn * adders
        row = lax.div(part, columns)
        column = (part - row * columns) * PARTIAL_COLUMNS
        place = pl.ds(column, PARTIAL_COLUMNS)
        zero = plgpu.layout_cast(jnp.zeros((MIN_PARTIALS, PARTIAL_COLUMNS), jnp.float32), _SHARES)

        @pl.loop(0, jnp.where(column < width, batches, 0), init_carry=zero)
        def total(i, total):
            # The last batch begins with what has been added before, if it is not whole.
            begin = jnp.minimum(i * batch, count - batch)
            for j in range(0, batch, MIN_PARTIALS):
                share = xa_partials.at[pl.ds(begin + j, MIN_PARTIALS), row, place]
                value = plgpu.load(share, layout=_SHARES, optimized=False)
                if batches * batch > count:
                    index = plgpu.broadcasted_iota(jnp.int32, value.shape, 0, layout=_SHARES)
                    value = jnp.where(begin + j + index >= i * batch, value, zero)
                total += value
            return total

        xa.at[row, place][...] = _rounded(total.sum(axis=0))

    @pl.when(block < min(adders, parts))
    def _():
        fence_async_proxy(nvvm.ProxyKind.async_global)
        arrive([given.lock], [jnp.int32(1)])


def await_shares(given: Shares, blocks: int) -> None:
    """Waits until all of x A^T is there for the copy engine. Every one of the blocks calls it."""
    adders = min(given.adders, given.parts)
    wait([given.lock], [jnp.int32(adders)], [jnp.int32(blocks)])
    fence_async_proxy(nvvm.ProxyKind.async_global)


def load_b(*b: Any) -> list[jax.Array]:
    """Asks for B [64, 64] in global memory, or for twice [32, 64] whose rows take turns by eights.

    Returns:
        What `operand` takes. It fits what `add_shares` wrote.
    """
    return [plgpu.load(part, layout=_layout(len(b)), optimized=False) for part in b]


def operand(read: Sequence[jax.Array], late: jax.Array) -> jax.Array:
    """B [64, 64] as an operand of wgmma.

    Args:
        read: by `load_b`.
        late: int32, not negative, which is known when the operand is wanted and not before. ptxas
            would put the words in order as soon as they are asked for, and so wait for them.
    """
    result = plgpu.ShapeDtypeStruct((64, 64), jnp.bfloat16, layout=plgpu.Layout.WGMMA)

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
    """The sums [32] as bfloat16, each where it is: the numbers in the order of `_WRITTEN`."""

    @plgpu.inline_mgpu(
        arg_types=(_SHARES.reduce(0),),
        return_type=plgpu.ShapeDtypeStruct(sums.shape, jnp.bfloat16, layout=_WRITTEN),
    )
    def rounded(_, sums):
        layout = _WRITTEN.to_mgpu()
        one = layout.registers_element_type(ir.BF16Type.get())
        registers = np.empty(layout.registers_shape(sums.shape), dtype=object)
        (registers.flat[0],) = (arith.truncf(one, sum_) for sum_ in sums.registers.flat)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return rounded(sums)
