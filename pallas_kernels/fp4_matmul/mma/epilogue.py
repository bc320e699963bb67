"""From sums of products to results: divisor, bias, the sum over CTAs."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels import warp_mma
from pallas_kernels.fp4_matmul import layout
from pallas_kernels.fp4_matmul.mma.codes import PAIRS
from pallas_kernels.fp4_matmul.sm90.synchronize import opaque
from pallas_kernels.fp4_matmul.tiling import TILE_ROWS
from pallas_kernels.warpgroup import WARPS, Warpgroup

ACC = PAIRS  # sums [64, tokens]
_NUMBERS_IN_FLIGHT = 32  # of a thread, of other parts


def load_rows(threads: Warpgroup, vector: Any, tile: Any) -> jax.Array:
    """The numbers of a tile's rows, float32 [64]."""
    numbers = threads.load(vector.at[pl.ds(tile * TILE_ROWS, TILE_ROWS)], ACC.reduce(1))
    return numbers.astype(jnp.float32)


def is_last(threads: Warpgroup, counters: Any, block: Any, part: Any, parts: int) -> Any:
    """Whether this warp is the last one with its rows, and sees what the others stored.

    The counters, int32 [blocks, WARPS], are zero before and after the kernel. `block` and `part`
    are the CTA's indices along rows and columns.
    """
    if threads.simulated:  # CTAs run in order.
        return part == parts - 1
    result = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=plgpu.Layout.WG_SPLAT)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def count(_, counters):
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        thread = mgpu.utils.thread_idx()
        warp = arith.shrui(thread, mgpu.utils.c(5, i32))
        own = arith.extui(i64, arith.muli(warp, mgpu.utils.c(4, i32)))
        own = arith.addi(llvm.ptrtoint(i64, mgpu.utils.memref_ptr(counters)), own)
        lane = arith.andi(thread, mgpu.utils.c(31, i32))
        # The counter becomes zero again with the last warp.
        before = mgpu.utils.inline_ptx(
            "{ .reg .pred first; .reg .b32 before; setp.eq.u32 first, $2, 0; mov.b32 before, 0; "
            "fence.acq_rel.gpu; bar.warp.sync 0xffffffff; "
            f"@first atom.acq_rel.gpu.global.inc.u32 before, [$1], {parts - 1}; "
            "bar.warp.sync 0xffffffff; fence.acq_rel.gpu; "
            "shfl.sync.idx.b32 $0, before, 0, 31, 0xffffffff; }",
            own,
            lane,
            result_types=i32,
            has_side_effects=True,
            convergent=True,
        )
        return mgpu.FragmentedArray.splat(before, (), is_signed=True)

    return count(counters.at[block]) == parts - 1


def add_parts(threads: Warpgroup, partial: Any) -> jax.Array:
    """Adds up the sums of all parts, in order: float32 [64, tokens] of [parts, 64, tokens]."""
    parts, _, tokens = partial.shape
    batch = max(1, _NUMBERS_IN_FLIGHT // (TILE_ROWS * tokens // (32 * WARPS)))

    def add(start, count, total):
        loaded = [threads.load(partial.at[start + i], ACC) for i in range(count)]
        return functools.reduce(operator.add, loaded, total)

    def add_batch(i, total):
        return add(i * batch, batch, total)

    total = threads.cast(jnp.zeros((TILE_ROWS, tokens), jnp.float32), ACC)
    whole = parts // batch
    if whole > 1:  # Unrolled, all parts would be in registers that the products need.
        total = lax.fori_loop(
            0, whole if threads.simulated else opaque(jnp.int32(whole)), add_batch, total
        )
        return add(whole * batch, parts - whole * batch, total)
    return add(0, parts, total)


def store(
    threads: Warpgroup,
    y: Any,
    sums: jax.Array,
    divisor: jax.Array | None,
    bias: jax.Array | None,
    tile: Any,
) -> None:
    """Stores the results of a tile of rows, those that exist, to y [M, N] in global memory.

    The sums are float32 [64, tokens]; divisors, of packed weights, and bias of the rows are float32
    [64].
    """
    value = sums
    if divisor is not None:
        value *= lax.broadcast_in_dim(layout.UNIT / divisor, sums.shape, (0,))
    if bias is not None:
        value += lax.broadcast_in_dim(bias, sums.shape, (0,))
    (m, n), dtype = y.shape, y.dtype
    if threads.simulated:
        height = -(-n // TILE_ROWS) * TILE_ROWS
        whole = jnp.pad(y[...], ((0, value.shape[1] - m), (0, height - n)))
        start = jnp.minimum(tile * TILE_ROWS, height - TILE_ROWS)
        y[...] = lax.dynamic_update_slice(whole, value.T.astype(dtype), (0, start))[:m, :n]
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ACC, plgpu.Layout.WG_SPLAT))
    def store_existing(_, y, value, tile):
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        size = jnp.dtype(dtype).itemsize
        thread = mgpu.utils.thread_idx()
        lane = arith.andi(thread, mgpu.utils.c(31, i32))
        warp = arith.shrui(thread, mgpu.utils.c(5, i32))
        row = arith.muli(tile.registers.item(), mgpu.utils.c(TILE_ROWS, i32))
        row = arith.addi(row, arith.muli(warp, mgpu.utils.c(TILE_ROWS // WARPS, i32)))
        row = arith.addi(row, arith.shrui(lane, mgpu.utils.c(2, i32)))
        token = arith.muli(arith.andi(lane, mgpu.utils.c(3, i32)), mgpu.utils.c(2, i32))
        index = arith.addi(arith.muli(token, mgpu.utils.c(n, i32)), row)
        start = arith.extui(i64, arith.muli(index, mgpu.utils.c(size, i32)))
        start = arith.addi(llvm.ptrtoint(i64, mgpu.utils.memref_ptr(y)), start)
        kept = []
        for half in range(2):  # the rows r and r + 8
            limit = mgpu.utils.c(n - 8 * half, i32)
            kept.append(arith.cmpi(arith.CmpIPredicate.slt, row, limit))
        for group, two in enumerate(value.registers.reshape(-1, 2)):
            for half, register in enumerate(two):
                for odd, number in enumerate(warp_mma.numbers(register)):
                    inside, first = kept[half], 8 * group + odd
                    if first + 6 >= m:
                        limit = mgpu.utils.c(m - first, i32)
                        there = arith.cmpi(arith.CmpIPredicate.slt, token, limit)
                        inside = arith.andi(inside, there)
                    _store_number(start, size * (first * n + 8 * half), number, size, inside)

    store_existing(y, value, tile)


def _store_number(start: ir.Value, offset: int, number: ir.Value, size: int, inside: ir.Value):
    """Stores a number, of two bytes or four, if it is inside."""
    convert = ".reg .b16 narrow; cvt.rn.bf16.f32 narrow, $1; " if size == 2 else ""
    source = ("b16", "narrow") if size == 2 else ("f32", "$1")
    i32 = ir.IntegerType.get_signless(32)
    mgpu.utils.inline_ptx(
        f"{{ .reg .pred inside; {convert}setp.ne.u32 inside, $2, 0; "
        f"@inside st.global.{source[0]} [$0+{offset}], {source[1]}; }}",
        start,
        number,
        arith.extui(i32, inside),
        has_side_effects=True,
    )
