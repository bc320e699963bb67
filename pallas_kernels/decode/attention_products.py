"""The two products of attention, by each warp for its own cache positions, and their layouts.

A warp has 16 of a block's 64 positions. Products have 16 rows and 8 columns, and query heads are
the columns, because a group has few. A thread reads keys and values by eight dimensions of a
position at a time, which its operands of mma.sync then are: of keys, eight neighbors along the sum;
of values, eight rows of the result, in pairs with the same rows of the next position.
"""

import functools
import itertools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels import warp_mma
from pallas_kernels.warpgroup import WARPS, Layout, Warpgroup

BLOCK = 64  # cache positions of a block
_POSITIONS = BLOCK // WARPS  # of a warp
HEADS = warp_mma.ROWS  # the number of query heads is a multiple
# Numbers of each head, warp and position of the warp [heads, warps, positions]: as results of a
# product whose rows are positions, so that a thread has two heads.
SCORES = plgpu.Layout.TILED(
    plgpu.Tiling(((HEADS, WARPS, 8), (2, WARPS, 1))),
    warp_dims=(-2,),
    lane_dims=(-4, -6),
    vector_dim=-1,
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
    tiles = (HEADS, WARPS, 8 * vector), (2, WARPS, vector)
    if vector > 4:
        return plgpu.Layout.TILED(
            plgpu.Tiling((*tiles, (4,))), warp_dims=(-3,), lane_dims=(-5, -7), vector_dim=-1
        )
    return plgpu.Layout.TILED(
        plgpu.Tiling(tiles), warp_dims=(-2,), lane_dims=(-4, -6), vector_dim=-1
    )


def scores(
    threads: Warpgroup, queries: tuple[jax.Array, ...], keys: tuple[jax.Array, ...]
) -> jax.Array:
    """The products of queries [heads, H/2] and keys [64, H/2], two halves of each in bfloat16.

    They are float32 [heads, warps, 16], of the positions of each warp.
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
        # By heads in eights and by positions in eights, the pairs of a thread along the sum; the
        # halves are sums of their own, so that no product waits for all others.
        columns = zip(*(_words(x, heads // 8) for x in queries), strict=True)
        rows = [_words(x, 2, last=True) for x in keys]
        out = []
        for halves in columns:
            sums = []
            for (upper, lower), column in zip(rows, halves, strict=True):
                acc = [warp_mma.zero(ir.F32Type.get())] * 4
                for j in range(0, len(column), 2):
                    pairs = [x[j + k] for k in (0, 1) for x in (upper, lower)]
                    acc = warp_mma.add_product(acc, pairs, column[j : j + 2])
                sums.append(acc)
            out += [warp_mma.vector_of([x]) for x in map(arith.addf, *sums)]
        return warp_mma.array(out, SCORES, shape)

    return multiply(tuple(queries), tuple(keys))


def add_values(
    threads: Warpgroup,
    total: jax.Array,
    keep: jax.Array,
    weights: jax.Array,
    values: jax.Array,
) -> jax.Array:
    """Adds the products of weights and values, those of each warp's positions to its sums.

    The sums `total` are float32 [heads, warps, H], and `keep` [heads, warps] the factors of the old
    ones. The weights, float32 [heads, warps, 16], are rounded; the values are bfloat16 [64, H].
    """
    heads, _, head_dim = total.shape
    if threads.simulated:
        values = values.reshape(WARPS, _POSITIONS, head_dim)
        operands = weights.astype(jnp.bfloat16).astype(jnp.float32), values.astype(jnp.float32)
        return keep[:, :, None] * total + jnp.einsum("hwp,wpd->hwd", *operands)
    layout = total_layout(head_dim)
    layouts = layout, SCORES.reduce(2), SCORES, value_layout(head_dim)
    result = plgpu.ShapeDtypeStruct(total.shape, total.dtype, layout=layout)

    @plgpu.inline_mgpu(arg_types=layouts, return_type=result)
    def multiply(_, total, keep, weights, values):
        chunks = head_dim // (8 * _vector(head_dim))
        # By dimensions, the pairs of positions 0 to 7 and of positions 8 to 15.
        rows = [
            [_columns(*map(warp_mma.words, two)) for two in chunk]
            for chunk in values.registers.reshape(chunks, 2, 2)
        ]
        out = []
        for numbers, factors, old in zip(
            _numbers(weights, heads // 8),
            _numbers(keep, heads // 8),
            _numbers(total, heads // 8),
            strict=True,
        ):
            # Of two heads each: positions in eights, and by turning them, heads by positions.
            columns = [_turned(numbers[i + 1], numbers[i]) for i in (0, 2)]
            width = len(old) // chunks // 2
            for chunk, (low, high) in enumerate(rows):
                pairs = [old[(2 * chunk + i) * width :][:width] for i in (0, 1)]
                pairs = [
                    [arith.mulf(x, y) for x in part] for part, y in zip(pairs, factors, strict=True)
                ]
                for j in range(0, width, 2):
                    acc = [part[j + k] for k in (0, 1) for part in pairs]
                    words = low[j], low[j + 1], high[j], high[j + 1]
                    acc = warp_mma.add_product(acc, words, columns)
                    for k, part in itertools.product((0, 1), (0, 1)):
                        pairs[part][j + k] = acc[2 * k + part]
                out += _flat(pairs)
        vectors = [warp_mma.vector_of(out[i : i + 4]) for i in range(0, len(out), 4)]
        return warp_mma.array(vectors, layout, total.shape)

    return multiply(total, keep, weights, values)


def _numbers(x: mgpu.FragmentedArray, parts: int) -> list[list]:
    """The numbers of a thread, in parts of its registers."""
    return [_flat(map(warp_mma.numbers, part)) for part in x.registers.reshape(parts, -1)]


def _turned(upper: ir.Value, lower: ir.Value) -> ir.Value:
    """Exchanges rows and columns of an 8 x 8 matrix, from float32 to bfloat16.

    `upper` are the numbers of the odd columns, `lower` those of the even ones.
    """
    ptx = (
        "{ .reg .b32 pair; cvt.rn.bf16x2.f32 pair, $1, $2;"
        " movmatrix.sync.aligned.m8n8.trans.b16 $0, pair; }"
    )
    i32 = ir.IntegerType.get_signless(32)
    return mgpu.utils.inline_ptx(ptx, upper, lower, result_types=i32)


def _words(x: mgpu.FragmentedArray, rows: int, *, last: bool = False) -> list[list]:
    """The pairs of bfloat16 of each of a thread's rows, the registers' first dimension or last."""
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
