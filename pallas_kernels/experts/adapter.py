"""The adapters of experts in the kernel of `mma`: products of a few ranks by single warps.

What multiplies by A leaves partial sums of x A^T, float32 [S, R, r] for R rows of the table; what
multiplies by B adds them up, in order, and rounds them to bfloat16. Ranks are multiples of eight.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels import warp_mma
from pallas_kernels.fp4_matmul.mma import copies
from pallas_kernels.fp4_matmul.mma.epilogue import ACC
from pallas_kernels.fp4_matmul.sm90.synchronize import opaque
from pallas_kernels.fp4_matmul.tiling import TILE_ROWS
from pallas_kernels.warpgroup import WARPS, Warpgroup

RANKS = 16  # of a product of a warp
_COLUMNS = 32  # of x, of two products of a warp
_STEPS = 4  # of `_COLUMNS`, of a warp
COLUMNS = WARPS * _STEPS * _COLUMNS  # of x, of a partial sum
_IN_FLIGHT = 16  # partial sums that a thread requests before it adds them up
# 16 rows, which all warps have; a thread has the same ones as in ACC.
STRIP_SUMS = plgpu.Layout.TILED(
    plgpu.Tiling(((RANKS, 8), (8, 8), (2,))),
    warp_dims=(plgpu.Replicated(WARPS),),
    lane_dims=(-3, -2),
    vector_dim=-1,
)
_SPLAT = plgpu.Layout.WG_SPLAT


def shrink(
    threads: Warpgroup, x: Any, a: Any, chosen: tuple[Any, int], first: Any, place: tuple[Any, Any]
) -> jax.Array:
    """The products of 16 rows of an expert's A with some columns of x, which the warps divide.

    Args:
        threads: the CTA.
        x: bfloat16 [T, K].
        a: bfloat16 [E, r, K].
        chosen: int32 [tokens] in shared memory, what divided by the number after it are the rows of
            x; nothing is read for negative ones.
        first: the first of the rows, a multiple of 16.
        place: the expert, and which part of the columns: those from `COLUMNS` times it on.

    Returns:
        float32 [64, tokens], 16 rows of each warp; zeros for rows that A does not have.
    """
    (numbers, divisor), (owner, part) = chosen, place
    (_, rank, columns), (tokens,) = a.shape, numbers.shape
    if threads.simulated:
        token = jnp.maximum(numbers[...], 0) // divisor
        own = jnp.where(numbers[...][:, None] < 0, jnp.nan, x[...][token])
        own = jnp.pad(own, ((0, 0), (0, COLUMNS)))
        wide = jnp.pad(a[owner], ((0, RANKS), (0, COLUMNS)))
        wide = lax.dynamic_slice(wide, (first, part * COLUMNS), (RANKS, COLUMNS))
        own = lax.dynamic_slice_in_dim(own, part * COLUMNS, COLUMNS, axis=1)
        wide, own = (y.reshape(len(y), WARPS, -1).astype(jnp.float32) for y in (wide, own))
        return jnp.einsum("rwk,mwk->wrm", wide, own).reshape(TILE_ROWS, tokens)
    result = plgpu.ShapeDtypeStruct((TILE_ROWS, tokens), jnp.dtype(jnp.float32), layout=ACC)

    @plgpu.inline_mgpu(arg_types=([plgpu.RefType()] * 3, [_SPLAT] * 3), return_type=result)
    def multiply(_, arrays, place):
        a, x, numbers = arrays
        first, owner, part = (number.registers.item() for number in place)
        thread = mgpu.utils.thread_idx()
        column = arith.muli(arith.shrui(thread, _i32(5)), _i32(_STEPS * _COLUMNS))
        column = arith.addi(column, arith.muli(part, _i32(COLUMNS)))
        column = arith.addi(column, arith.muli(arith.andi(thread, _i32(3)), _i32(8)))

        def read(array, row, exists):
            """Eight numbers of each step in a row, as pairs."""
            start = arith.addi(arith.muli(row, _i32(columns)), column)
            start = copies.advanced(copies.pointer(array), arith.muli(start, _i32(2)))
            steps = []
            for step in range(0, _STEPS * _COLUMNS, _COLUMNS):
                there = arith.andi(_less(column, columns - step), exists)
                steps.append(_load(start, 2 * step, "b32", 4, there))
            return steps

        halves = []
        for row in _rows_of(first, rank):
            begin = arith.addi(arith.muli(owner, _i32(rank)), row)
            halves.append(read(a, begin, _less(row, rank)))
        own = arith.addi(copies.address(numbers), arith.muli(_group(), _i32(4)))
        sums = []
        for place in range(0, tokens, 8):
            found = copies.read_shared(own, 4 * place)
            exists = arith.cmpi(arith.CmpIPredicate.sge, found, _i32(0))
            words = read(x, arith.divui(found, _i32(divisor)), exists)
            acc = (warp_mma.zero(ir.F32Type.get()),) * 4
            for *ranks, pairs in zip(*halves, words, strict=True):
                for i in (0, 2):  # products of two words
                    acc = _add_product(acc, [half[i : i + 2] for half in ranks], pairs[i : i + 2])
            sums.append(acc)
        return _array(sums)

    return multiply([a, x, numbers], [first, owner, part])


def shrink_outputs(
    threads: Warpgroup, value: jax.Array, a: Any, first: Any, place: tuple[Any, Any]
) -> jax.Array:
    """As `shrink`, where x are the outputs bfloat16 [64, tokens] of a CTA.

    `place` are the expert, and the first one of these columns.
    """
    (_, rank, columns), tokens, (owner, column) = a.shape, value.shape[1], place
    if threads.simulated:
        own = jnp.pad(a[owner], ((0, RANKS), (0, 0)))
        own = lax.dynamic_slice(own, (first, column), (RANKS, TILE_ROWS)).astype(jnp.float32)
        outputs = value.astype(jnp.float32).reshape(WARPS, -1, tokens)
        y = jnp.einsum("rwk,wkm->wrm", own.reshape(RANKS, WARPS, -1), outputs)
        return y.reshape(TILE_ROWS, tokens)
    result = plgpu.ShapeDtypeStruct((TILE_ROWS, tokens), jnp.dtype(jnp.float32), layout=ACC)

    @plgpu.inline_mgpu(arg_types=(ACC, plgpu.RefType(), [_SPLAT] * 3), return_type=result)
    def multiply(_, value, a, place):
        first, owner, column = (number.registers.item() for number in place)
        column = arith.addi(arith.addi(column, _strip()), _pair())
        halves = []
        for row in _rows_of(first, rank):
            start = arith.addi(arith.muli(owner, _i32(rank)), row)
            start = arith.addi(arith.muli(start, _i32(columns)), column)
            start = copies.advanced(copies.pointer(a), arith.muli(start, _i32(2)))
            exists = _less(row, rank)
            halves.append([*(_load(start, 2 * i, "b32", 1, exists)[0] for i in (0, 8))])
        sums = []
        for registers in value.registers.reshape(-1, 2):
            words = [transposed(warp_mma.words(register)[0]) for register in registers]
            sums.append(_add_product((warp_mma.zero(ir.F32Type.get()),) * 4, halves, words))
        return _array(sums)

    return multiply(value, a, [first, owner, column])


def store_partial(
    threads: Warpgroup, partials: Any, rows: Callable[[Any], jax.Array], scratch: Any, place: Any
) -> None:
    """Stores the sums over the warps as a part of `partials`, float32 [S, R, r].

    Args:
        threads: the CTA.
        partials: where they are stored.
        rows: function from a number of ranks to what `shrink` returns for the 16 after it.
        scratch: float32 [64, tokens] in shared memory.
        place: the part, the first row, and int32 [tokens] in shared memory, negative for rows that
            are not stored.
    """

    def store(first, _):
        threads.meet()  # No thread still reads what was there.
        threads.store(scratch, rows(first))
        threads.meet()
        strips = (scratch.at[pl.ds(RANKS * warp, RANKS)] for warp in range(WARPS))
        whole, *others = (threads.load(strip, STRIP_SUMS) for strip in strips)
        _store_ranks(threads, partials, functools.reduce(jnp.add, others, whole), first, place)
        return 0

    _over_ranks(threads, partials.shape[2], store, 0)


def _store_ranks(threads: Warpgroup, partials: Any, value: jax.Array, start: Any, place) -> None:
    (part, row, chosen), (_, rows, rank), tokens = place, partials.shape, value.shape[1]
    if threads.simulated:
        index = jnp.where(chosen[...] < 0, rows, row + jnp.arange(tokens))
        columns = start + jnp.arange(RANKS)
        given = partials[...].at[part, index[:, None], columns].set(value.T, mode="drop")
        partials[...] = given
        return

    @plgpu.inline_mgpu(arg_types=([plgpu.RefType()] * 2, STRIP_SUMS, [_SPLAT] * 3))
    def store(_, arrays, value, place):
        partials, chosen = arrays
        start, part, row = (number.registers.item() for number in place)
        first = _less(mgpu.utils.thread_idx(), 32)
        index = arith.addi(arith.addi(arith.muli(part, _i32(rows)), row), _pair())
        index = arith.addi(arith.muli(index, _i32(rank)), arith.addi(start, _group()))
        own = copies.advanced(copies.pointer(partials), arith.muli(index, _i32(4)))
        numbers = arith.addi(copies.address(chosen), arith.muli(_pair(), _i32(4)))
        exists = [arith.andi(first, _less(rank_row, rank)) for rank_row in _rows_of(start, rank)]
        for group, halves in enumerate(value.registers.reshape(-1, 2)):
            for odd in (0, 1):
                found = copies.read_shared(numbers, 4 * (8 * group + odd))
                there = arith.cmpi(arith.CmpIPredicate.sge, found, _i32(0))
                for half, is_rank in enumerate(exists):
                    mgpu.utils.inline_ptx(
                        f"st.global.f32 [$0+{4 * ((8 * group + odd) * rank + 8 * half)}], $1;",
                        own,
                        warp_mma.numbers(halves[half])[odd],
                        predicate=arith.andi(there, is_rank),
                        has_side_effects=True,
                    )

    store([partials, chosen], value, [start, part, row])


def expand(
    threads: Warpgroup, partials: Any, b: Any, row: Any, sums: Sequence[jax.Array], tiles: list
) -> list[jax.Array]:
    """Adds the products of x A^T of some rows, from one on, with B [N, r''] in tiles of its rows.

    The sums are float32 [64, tokens] for each of the tiles.
    """
    (parts, rows, rank), columns, shape = partials.shape, b.shape[1], sums[0].shape
    if threads.simulated:
        index = jnp.minimum(row + jnp.arange(shape[1]), rows - 1)
        xa = partials[:, index].sum(axis=0).astype(b.dtype)

        def product(tile):
            own = b[pl.ds(tile * TILE_ROWS, TILE_ROWS), :rank]
            return jnp.dot(own, xa.T, preferred_element_type=jnp.float32)

        return [total + product(tile) for total, tile in zip(sums, tiles, strict=True)]
    count = len(tiles)
    results = [plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.float32), layout=ACC)] * count

    @plgpu.inline_mgpu(
        arg_types=([plgpu.RefType()] * 2, [ACC] * count, [_SPLAT] * (2 + count)),
        return_type=results,
    )
    def multiply(_, arrays, sums, numbers):
        b, partials = arrays
        first, row, *tiles = (number.registers.item() for number in numbers)
        # A thread has pairs of neighbors among the ranks, the second one eight after the first.
        pairs = [arith.addi(arith.addi(first, _i32(i)), _pair()) for i in range(0, RANKS, 8)]
        pairs = [(pair, _less(pair, rank)) for pair in pairs[: min(2, rank // 8)]]
        operands = []
        for tile in tiles:
            own = arith.addi(arith.addi(arith.muli(tile, _i32(TILE_ROWS)), _strip()), _group())
            halves = [[], []]
            for pair, exists in pairs:
                start = arith.addi(arith.muli(own, _i32(columns)), pair)
                start = copies.advanced(copies.pointer(b), arith.muli(start, _i32(2)))
                for i, half in enumerate(halves):
                    half.append(_load(start, 2 * 8 * i * columns, "b32", 1, exists)[0])
            operands.append(halves)
        out = [[] for _ in tiles]
        totals = [x.registers.reshape(-1, 2) for x in sums]
        for place in range(shape[1] // 8):
            own = arith.addi(row, arith.addi(_group(), _i32(8 * place)))
            own = arith.muli(arith.minui(own, _i32(rows - 1)), _i32(rank))
            xa = []
            for pair, exists in pairs:
                start = arith.muli(arith.addi(own, pair), _i32(4))
                start = copies.advanced(copies.pointer(partials), start)
                xa.append(_sum_of_parts(start, parts, rows * rank, exists))
            for accs, halves, total in zip(out, operands, totals, strict=True):
                acc = [x for half in total[place] for x in warp_mma.numbers(half)]
                accs.append(_add_product(acc, halves, xa))
        return [_array(accs) for accs in out]

    def add(first, sums):
        return list(multiply([b, partials], list(sums), [first, row, *tiles]))

    return _over_ranks(threads, rank, add, list(sums))


def _over_ranks(threads: Warpgroup, rank: int, body: Callable, carry: Any) -> Any:
    """Calls a function for each 16 ranks, with the number of those before them."""
    count = -(-rank // RANKS)
    if count == 1:
        return body(jnp.int32(0), carry)
    # Unrolled, the loop would hold too many registers.
    turns = count if threads.simulated else opaque(jnp.int32(count))
    return lax.fori_loop(0, turns, lambda i, carry: body(i * RANKS, carry), carry)


def _add_product(acc: Sequence[Any], halves: Sequence, words: Sequence[Any]) -> tuple[Any, ...]:
    """Adds a product of a warp; what is missing of the rows, or of the words, is zero.

    `halves` are two words of row `group`, and of the row eight after it.
    """
    none = [_i32(0)] * 2
    rows = [[*half, *none][:2] for half in (*halves, none)][:2]
    return warp_mma.add_product(acc, [row[i] for i in (0, 1) for row in rows], [*words, *none][:2])


def _array(sums: list) -> mgpu.FragmentedArray:
    """Accumulators of a warp as [64, tokens] in the layout ACC."""
    halves = [warp_mma.vector_of(acc[i : i + 2]) for acc in sums for i in (0, 2)]
    return warp_mma.array(halves, ACC, (TILE_ROWS, 8 * len(sums)))


def _rows_of(first: ir.Value, rank: int) -> list[ir.Value]:
    """A thread's rows among 16 ranks, or eight where there are no more."""
    return [arith.addi(arith.addi(first, _i32(i)), _group()) for i in range(0, min(rank, RANKS), 8)]


def _sum_of_parts(start: ir.Value, parts: int, size: int, exists: ir.Value) -> ir.Value:
    """A pair of bfloat16: the sums over the parts, of some numbers each, of two neighbors."""
    total = [warp_mma.zero(ir.F32Type.get())] * 2
    for begin in range(0, parts, _IN_FLIGHT):
        some = range(begin, min(begin + _IN_FLIGHT, parts))
        for numbers in [_load(start, 4 * i * size, "f32", 2, exists) for i in some]:
            total = [arith.addf(a, b) for a, b in zip(total, numbers, strict=True)]
    i32 = ir.IntegerType.get_signless(32)
    return mgpu.utils.inline_ptx("cvt.rn.bf16x2.f32 $0, $2, $1;", *total, result_types=i32)


def _load(start: ir.Value, offset: int, kind: str, count: int, exists: ir.Value) -> list:
    """Numbers of four bytes from global memory, or zeros."""
    i32 = ir.IntegerType.get_signless(32)
    number = ir.F32Type.get() if kind == "f32" else i32
    names = [f"n{i}" for i in range(count)]
    many = f"v{count}." if count > 1 else ""
    target = f"{{{', '.join(names)}}}" if count > 1 else names[0]
    loaded = mgpu.utils.inline_ptx(
        f"{{ .reg .pred there; .reg .{kind} {', '.join(names)}; "
        f"setp.ne.u32 there, ${count + 1}, 0; "
        + "".join(f"mov.b32 {name}, 0; " for name in names)
        + f"@there ld.global.{many}{kind} {target}, [${count}+{offset}]; "
        + "".join(f"mov.b32 ${i}, {name}; " for i, name in enumerate(names))
        + "}",
        start,
        arith.extui(i32, exists),
        result_types=[number] * count,
        has_side_effects=True,
    )
    return list(loaded)


def transposed(pair: ir.Value) -> ir.Value:
    """The transpose of eight by eight bfloat16 that a warp has, as a pair of each thread."""
    return mgpu.utils.inline_ptx(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;",
        pair,
        result_types=ir.IntegerType.get_signless(32),
        has_side_effects=True,
        convergent=True,
    )


def _group() -> ir.Value:
    return arith.shrui(arith.andi(mgpu.utils.thread_idx(), _i32(31)), _i32(2))


def _pair() -> ir.Value:
    return arith.shli(arith.andi(mgpu.utils.thread_idx(), _i32(3)), _i32(1))


def _strip() -> ir.Value:
    """The first of a warp's 16 rows of a tile."""
    return arith.muli(arith.shrui(mgpu.utils.thread_idx(), _i32(5)), _i32(TILE_ROWS // WARPS))


def _less(number: ir.Value, limit: int) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.slt, number, _i32(limit))


def _i32(value: int) -> ir.Value:
    return mgpu.utils.c(value, ir.IntegerType.get_signless(32))
