"""The two products of attention, by each warp for its own cache positions, and their layouts.

A warp has 16 of a block's 64 positions. A thread reads keys and values by eight dimensions of a
position at a time, which its operands of mma.sync then are: of keys, eight neighbors along the sum;
of values, eight columns of the result, in pairs with the same columns of the next position.
"""

import functools
import itertools
import operator
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from pallas_kernels import warp_mma
from pallas_kernels.warpgroup import WARPS, Layout, Warpgroup

BLOCK = 64  # cache positions of a block
_POSITIONS = BLOCK // WARPS  # of a warp
HEADS = warp_mma.ROWS  # the number of query heads is a multiple
# Numbers of each head, warp and position of the warp [heads, warps, positions].
SCORES = plgpu.Layout.TILED(
    plgpu.Tiling(((HEADS, WARPS, 8), (2,))), warp_dims=(-3,), lane_dims=(-4, -2), vector_dim=-1
)


def _vector(head_dim: int) -> int:
    """Number of neighboring dimensions of a thread."""
    return min(8, head_dim // 8)


@functools.cache
def query_layout(head_dim: int) -> Layout:
    """How half of the dimensions of queries [heads, H/2] lie in registers; all warps have them."""
    vector = _vector(head_dim)
    return plgpu.Layout.TILED(
        plgpu.Tiling(((HEADS, 4 * vector), (vector,))),
        warp_dims=(plgpu.Replicated(WARPS),),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )


@functools.cache
def key_layout(head_dim: int) -> Layout:
    """How half of the dimensions of a block of keys [64, H/2] lie in registers."""
    vector = _vector(head_dim)
    width = 4 * vector
    return plgpu.Layout.TILED(
        plgpu.Tiling(((BLOCK, width), (_POSITIONS, width), (8, vector))),
        warp_dims=(-6,),
        lane_dims=(-2, -3),
        vector_dim=-1,
    )


@functools.cache
def value_layout(head_dim: int) -> Layout:
    """How a block of values [64, H] lies in registers."""
    vector = _vector(head_dim)
    width = 8 * vector
    return plgpu.Layout.TILED(
        plgpu.Tiling(((BLOCK, width), (_POSITIONS, width), (8, width), (2, vector))),
        warp_dims=(-8,),
        lane_dims=(-3, -4),
        vector_dim=-1,
    )


@functools.cache
def total_layout(head_dim: int) -> Layout:
    """How the sums of values [heads, warps, H] lie in registers, those of each warp in its own.

    Their registers have 16 bytes: with more, shared memory is written and read in unequal orders.
    """
    vector = _vector(head_dim)
    return plgpu.Layout.TILED(
        plgpu.Tiling(((HEADS, WARPS, 8 * vector), (2 * vector,), (4,))),
        warp_dims=(-4,),
        lane_dims=(-5, -3),
        vector_dim=-1,
    )


def scores(
    threads: Warpgroup, queries: tuple[jax.Array, ...], keys: tuple[jax.Array, ...]
) -> jax.Array:
    """The products of queries and keys.

    Args:
        threads: the threads of the CTA.
        queries: two halves, bfloat16 [heads, H/2].
        keys: two halves, bfloat16 [64, H/2].

    Returns:
        float32 [heads, warps, 16], of the positions of each warp.
    """
    heads, half = queries[0].shape
    shape = heads, WARPS, _POSITIONS
    if threads.simulated:
        both = [jnp.concatenate(halves, axis=1) for halves in (queries, keys)]
        product = jnp.einsum("hd,pd->hp", *both, preferred_element_type=jnp.float32)
        return product.reshape(shape)
    layouts = (query_layout(2 * half),) * 2, (key_layout(2 * half),) * 2
    result = plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.float32), layout=SCORES)

    @plgpu.inline_mgpu(arg_types=layouts, return_type=result)
    def multiply(_, queries, keys):
        # By heads in eights and by positions in eights, the pairs of a thread along the sum.
        a = list(map(operator.add, *(_words(x, heads // 8) for x in queries)))
        b = list(map(operator.add, *(_words(x, 2, last=True) for x in keys)))
        out = []
        for upper, lower in _row_tiles(a):
            accs = []
            for columns in b:
                acc = _zeros()
                for j in range(0, len(columns), 2):
                    pairs = [rows[j + k] for k in (0, 1) for rows in (upper, lower or _none(j + 2))]
                    acc = warp_mma.add_product(acc, pairs, columns[j : j + 2])
                accs.append(acc)
            for first in (0, 2) if lower else (0,):
                out += [warp_mma.vector_of(acc[first : first + 2]) for acc in accs]
        return warp_mma.array(out, SCORES, shape)

    return multiply(tuple(queries), tuple(keys))


def add_values(
    threads: Warpgroup, total: jax.Array, weights: jax.Array, values: jax.Array
) -> jax.Array:
    """Adds the products of weights and values, those of each warp's positions to its sums.

    Args:
        threads: the threads of the CTA.
        total: float32 [heads, warps, H].
        weights: bfloat16 [heads, warps, 16].
        values: bfloat16 [64, H].

    Returns:
        The new sums.
    """
    heads, _, head_dim = total.shape
    if threads.simulated:
        values = values.reshape(WARPS, _POSITIONS, head_dim)
        operands = (x.astype(jnp.float32) for x in (weights, values))
        return total + jnp.einsum("hwp,wpd->hwd", *operands)
    layouts = total_layout(head_dim), SCORES, value_layout(head_dim)
    result = plgpu.ShapeDtypeStruct(total.shape, total.dtype, layout=layouts[0])

    @plgpu.inline_mgpu(arg_types=layouts, return_type=result)
    def multiply(_, total, weights, values):
        chunks = head_dim // (8 * _vector(head_dim))
        # By heads in eights, in turn for the positions 0 to 7 and 8 to 15.
        a = _words(weights, heads // 8)
        # By columns, by positions in eights, the pairs of positions.
        registers = values.registers.reshape(chunks, 2, 2)
        b = [
            [_columns(*map(warp_mma.words, two)) for two in registers[chunk]]
            for chunk in range(chunks)
        ]
        # By heads in eights, by columns, and by the thread's parts of them.
        acc = [
            [[_flat(map(warp_mma.numbers, half)) for half in two] for two in row]
            for row in total.registers.reshape(heads // 8, chunks, 2, -1)
        ]
        for i, (upper, lower) in enumerate(_row_tiles(a)):
            pairs = [rows[k] for k in (0, 1) for rows in (upper, lower or _none(2))]
            for chunk, halves in enumerate(b):
                parts = [half for row in acc[2 * i : 2 * i + 2] for half in row[chunk]]
                for j, words in enumerate(zip(*halves, strict=True)):
                    old = [part[j] for part in parts]
                    new = warp_mma.add_product((old + _zeros())[:4], pairs, words)
                    for part, number in zip(parts, new, strict=False):
                        part[j] = number
        numbers = _flat(half for row in acc for two in row for half in two)
        out = [warp_mma.vector_of(numbers[i : i + 4]) for i in range(0, len(numbers), 4)]
        return warp_mma.array(out, layouts[0], total.shape)

    return multiply(total, weights, values)


def _words(x: mgpu.FragmentedArray, rows: int, *, last: bool = False) -> list[list]:
    """The pairs of a thread, of each of its rows.

    Args:
        x: an array of bfloat16.
        rows: number of rows of the thread.
        last: whether the rows are the last dimension of the registers, not the first.
    """
    registers = x.registers.reshape(-1, rows).T if last else x.registers.reshape(rows, -1)
    return [_flat(map(warp_mma.words, row)) for row in registers]


def _flat(lists: Iterable[list]) -> list:
    return list(itertools.chain.from_iterable(lists))


def _columns(even: list, odd: list) -> list:
    """Of pairs of columns at two positions, the pair of positions for each column."""
    i32 = ir.IntegerType.get_signless(32)
    return [
        mgpu.utils.inline_ptx(f"prmt.b32 $0, $1, $2, {select};", *words, result_types=i32)
        for words in zip(even, odd, strict=True)
        for select in ("0x5410", "0x7632")
    ]


def _row_tiles(rows: list) -> list[tuple]:
    """Rows by twos, the second None after the last row."""
    return [(rows[i], rows[i + 1] if i + 1 < len(rows) else None) for i in range(0, len(rows), 2)]


def _none(count: int) -> list:
    """Pairs of heads that do not exist."""
    return [warp_mma.zero(ir.IntegerType.get_signless(32))] * count


def _zeros() -> list:
    return [warp_mma.zero(ir.F32Type.get())] * 4
