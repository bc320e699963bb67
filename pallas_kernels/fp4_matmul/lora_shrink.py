"""LoRA shrink: x A^T, where a kernel computes x [M, K] tile by tile.

The product is a sum over K, and a CTA has a few columns. Their contribution is a partial: the
kernel that reads the product adds up the partials, in a fixed order, and no CTA waits for another.

A CTA executes its code once, so its speed depends on how little code it has. Each of its warps has
a quarter of the columns, multiplies it by A as it was computed, in registers, and adds its sums to
those of the other warps in shared memory.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_kernels import warp_mma, warpgroup
from pallas_kernels.fp4_matmul import e4m3
from pallas_kernels.fp4_matmul.tiling import PARTIAL_COLUMNS
from pallas_kernels.warpgroup import WARPS, Layout

COLUMNS = 128  # columns of x of a CTA
_RANK = PARTIAL_COLUMNS  # rows of A of a CTA, at most
_WARP_COLUMNS = 32  # columns of a warp, before it continues with those after the other warps'
_VECTOR = 8  # columns that a thread reads at a time


def round_rows(
    x: jax.Array, a: jax.Array | None, *, interpret: bool = False
) -> tuple[e4m3.Rounded, jax.Array | None]:
    """Rounds x [M, K] in bfloat16, K a multiple of COLUMNS, and multiplies it by A [R, K].

    The partials are those of `shrink`, of x times the powers of two; None without A.
    """

    def load(refs, tile):
        def value(tile):
            return tile.load(refs["x"])

        return tile.round(value(tile), tile.powers(value), refs["pairs"], refs["inverse"])

    m, k = x.shape
    results = rounded_shapes(m, k)
    outs = shrink_tiles("round_rows", load, {"x": x}, results, a, (m, k), interpret=interpret)
    return e4m3.Rounded(outs["pairs"], outs["inverse"]), outs["xa_partials"]


def rounded_shapes(m: int, k: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The results of `Tile.round` by name, for x [M, K]."""
    return {
        "pairs": jax.ShapeDtypeStruct((m, k // 2), jnp.bfloat16),
        "inverse": jax.ShapeDtypeStruct((m,), jnp.float32),
    }


def shrink(x: jax.Array, a: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Returns partials of x A^T, for x [M, K] and A [R, K] in bfloat16.

    They are float32 [S, M, R'], whose sum over S is x A^T; R' is the next multiple of
    PARTIAL_COLUMNS from R on, and the columns from R on are 0.
    """

    def load(refs, tile):
        return tile.load(refs["x"])

    x = padded(x, COLUMNS)
    m, k = x.shape
    return shrink_tiles("lora_shrink", load, {"x": x}, {}, a, (m, k), interpret=interpret)[
        "xa_partials"
    ]


@dataclasses.dataclass(frozen=True)
class Tile:
    """The rows and columns of x that a CTA computes.

    Tiles lie inside x. Where its rows or columns are no multiple of a tile's, the last tile begins
    earlier and repeats what another CTA computes, and stores the same.
    """

    threads: warpgroup.Warpgroup  # the threads of the CTA
    rows: Any  # slice of the rows, their number a power of two
    column: Any  # first column
    width: int  # number of columns
    index: Any  # index of the tile along the columns
    repeated: Any  # number of columns that the tile before has too, or None if there never are any
    # Whether the CTA is the first with these rows and columns, which stores the tile; there is one
    # CTA for every `_RANK` rows of A.
    first: Any = True

    @property
    def layout(self) -> Layout:
        """How [rows, width] lies in registers."""
        return tile_layout(self.rows.size, self.width)

    def columns(self, offset: int = 0) -> Any:
        """The slice of the columns, in an array that begins some columns earlier."""
        return pl.ds(self.column + offset, self.width)

    def load(self, ref: Any, offset: int = 0) -> jax.Array:
        """Loads the tile of an array, which begins some columns later than x."""
        return self.threads.load(ref.at[self.rows, self.columns(offset)], self.layout)

    def load_columns(self, ref: Any) -> jax.Array:
        """Loads the columns of a vector, and repeats them for each row."""
        numbers = self.threads.load(ref.at[self.columns()], self.layout.reduce(0))
        return lax.broadcast_in_dim(numbers, (self.rows.size, self.width), (1,))

    def load_head(self, ref: Any) -> jax.Array:
        """Loads the rows of an array [M, width], or its first columns."""
        return self.threads.load(ref.at[self.rows, pl.ds(0, self.width)], self.layout)

    def load_rows(self, ref: Any) -> jax.Array:
        """Loads the rows of a vector."""
        return self.threads.load(ref.at[self.rows], self.layout.reduce(1))

    def over_columns(self, numbers: jax.Array) -> jax.Array:
        """Repeats one number of each row for each column."""
        return lax.broadcast_in_dim(numbers, (self.rows.size, self.width), (0,))

    def store(self, ref: Any, value: jax.Array) -> None:
        """Writes the tile of an array."""
        self.threads.store(ref.at[self.rows, self.columns()], value)

    def powers(self, value: Callable[["Tile"], jax.Array]) -> tuple[jax.Array, jax.Array]:
        """`e4m3.powers` of the rows, of which `value` computes any tile: the same in all CTAs."""
        first = dataclasses.replace(self, column=0, width=e4m3.SAMPLE, index=0, repeated=None)
        return e4m3.powers(value(first))

    def round(
        self, value: jax.Array, powers: tuple[jax.Array, jax.Array], pairs: Any, inverses: Any
    ) -> jax.Array:
        """Stores the tile as `e4m3.Rounded`; returns it times the powers of two, in bfloat16."""
        power, inverse = powers
        value = (value.astype(jnp.float32) * self.over_columns(power)).astype(jnp.bfloat16)

        @pl.when(self.first)
        def store():
            columns = pl.ds(lax.div(self.column, 2), self.width // 2)
            self.threads.store(pairs.at[self.rows, columns], _rounded_pairs(self, value))

        @pl.when((self.index == 0) & self.first)
        def store_inverses():
            self.threads.store(inverses.at[self.rows], inverse)

        return value

    def once(self, value: jax.Array) -> jax.Array:
        """Sets columns to zero that another tile counts."""
        if self.repeated is None:
            return value
        column = self.threads.iota(value.shape, 1, self.layout)
        return jnp.where(column >= self.repeated, value, jnp.zeros_like(value))


@functools.cache
def tile_layout(rows: int, width: int, vector: int = _VECTOR) -> Layout:
    """How a tile lies in registers.

    A thread has eight columns of a row (`vector`), a warp 32 columns of eight rows. With fewer
    rows, threads share a row; with less than 128 columns, warps share columns.
    """
    rows = min(rows, warp_mma.ROWS)
    columns = _WARP_COLUMNS // _VECTOR * vector  # of a warp
    warps = min(WARPS, width // columns)
    shared_rows = (plgpu.Replicated(warp_mma.ROWS // rows),) if rows < warp_mma.ROWS else ()
    if warps == 1:
        tiling = ((rows, columns), (vector,))
        warp_dims, row = (plgpu.Replicated(WARPS),), -3
    else:
        tiling = ((rows, warps * columns), (columns,), (vector,))
        shared = (plgpu.Replicated(WARPS // warps),) if warps < WARPS else ()
        warp_dims, row = (-3, *shared), -4
    lane_dims = (*shared_rows, *((row,) if rows > 1 else ()), -2)
    return plgpu.Layout.TILED(
        plgpu.Tiling(tiling), warp_dims=warp_dims, lane_dims=lane_dims, vector_dim=-1
    )


def _rounded_pairs(tile: Tile, value: jax.Array) -> jax.Array:
    """A tile [rows, width] of bfloat16 as `e4m3.pairs` [rows, width / 2]."""
    rows, width = value.shape
    if tile.threads.simulated:
        return e4m3.pairs(e4m3.in_register_order(value.astype(jnp.float8_e4m3fn)))
    layout = tile_layout(rows, width // 2, vector=_VECTOR // 2)
    result = plgpu.ShapeDtypeStruct((rows, width // 2), value.dtype, layout=layout)

    @plgpu.inline_mgpu(arg_types=(tile.layout,), return_type=result)
    def rounded(_, value):
        i32 = ir.IntegerType.get_signless(32)
        odd = arith.andi(mgpu.utils.thread_idx(), mgpu.utils.c(1, i32))
        odd = arith.cmpi(arith.CmpIPredicate.eq, odd, mgpu.utils.c(1, i32))
        registers = []
        for register in value.registers.flat:
            pairs = warp_mma.words(register)
            first, second = (_rounded_words(*pairs[i : i + 2]) for i in (0, 2))
            # Of 16 columns the thread with the first eight has the first eight numbers, two by two
            # of its own columns and of those of the other thread.
            other = mgpu.utils.shfl_bfly(arith.select(odd, first, second), 1)
            own = arith.select(odd, second, first)
            words = [
                mgpu.utils.inline_ptx(
                    "prmt.b32 $0, $1, $2, $3;",
                    own,
                    other,
                    arith.select(odd, *(mgpu.utils.c(x, i32) for x in selectors)),
                    result_types=i32,
                )
                for selectors in ((0x1054, 0x5410), (0x3276, 0x7632))
            ]
            kind = ir.VectorType.get((_VECTOR // 2,), ir.BF16Type.get())
            registers.append(vector.bitcast(kind, warp_mma.vector_of(words)))
        return warp_mma.array(registers, layout, result.shape)

    return rounded(value)


def _rounded_words(*words: Any) -> Any:
    """Two pairs of bfloat16 as four numbers in e4m3."""
    halves = "".join(
        f"shl.b32 low, ${i + 1}, 16; and.b32 high, ${i + 1}, 0xFFFF0000; "
        f"cvt.rn.satfinite.e4m3x2.f32 pair{i}, high, low; "
        for i in range(2)
    )
    code = f"{{ .reg .b16 pair<2>; .reg .b32 low, high; {halves}mov.b32 $0, {{pair0, pair1}}; }}"
    return mgpu.utils.inline_ptx(code, *words, result_types=ir.IntegerType.get_signless(32))


def tile_rows(m: int) -> int:
    """Number of rows of a tile of x [M, K]: a power of two, no more than M."""
    most = min(m, 16 if m <= 128 else 32)
    return 1 << most.bit_length() - 1


def padded(x: jax.Array, width: int) -> jax.Array:
    """An array [..., K] with zeros after its columns: a tile must not be wider than the array.

    The columns of a model are multiples of eight, more than a tile's: they stay as they are.
    """
    columns = max(width, -(-x.shape[-1] // _VECTOR) * _VECTOR)
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, columns - x.shape[-1]),))


def shrink_tiles(
    name: str,
    value: Callable[[dict, Tile], jax.Array],
    operands: dict[str, jax.Array],
    results: dict[str, jax.ShapeDtypeStruct],
    a: jax.Array | tuple[jax.Array | None, jax.Array] | None,
    shape: tuple[int, int],
    *,
    block: int = COLUMNS,
    interpret: bool,
) -> dict[str, Any]:
    """Computes x [M, K] tile by tile, and its products with A and with a router.

    Args:
        name: name of the kernel.
        value: function of references by name and of a `Tile`, which returns the tile of x in
            bfloat16 and may store results.
        operands: whole operands of `value` by name.
        results: shapes of the results of `value` by name.
        a: bfloat16 [R, K], or None; not yet `padded`. Or a pair of it and of a router's weight,
            bfloat16 [E, K].
        shape: shape [M, K] of x, `padded`.
        block: number of columns of a tile.
        interpret: whether to simulate the kernel on a CPU.

    Returns:
        The results by name, "xa_partials" of `shrink`, None without A, and "logit_partials", the
        same of a router.
    """
    m, width = shape
    rows, blocks = tile_rows(m), pl.cdiv(width, block)
    grid = pl.cdiv(m, rows), blocks
    a, router = a if isinstance(a, tuple) else (a, None)
    factors, scratch = [], {}
    for factor, names in ((a, ("a", "xa_partials")), (router, ("router", "logit_partials"))):
        if factor is not None:
            first = factors[-1].end if factors else 0
            ranks = pl.cdiv(len(factor), warp_mma.ROWS) * warp_mma.ROWS
            factors.append(_Factor(*names, first, first + pl.cdiv(ranks, _RANK), ranks))
            factor = padded(jnp.pad(factor, ((0, ranks - len(factor)), (0, 0))), block)
            columns = pl.cdiv(ranks, PARTIAL_COLUMNS) * PARTIAL_COLUMNS
            partials = jax.ShapeDtypeStruct((blocks, m, columns), jnp.float32)
            operands, results = operands | {names[0]: factor}, results | {names[1]: partials}
    if factors:
        grid = *grid, factors[-1].end
        warps = min(WARPS, block // _WARP_COLUMNS)
        scratch["sums"] = (warps, max(rows, warp_mma.ROWS), _RANK), jnp.float32

    def body(threads, operands, _, results, sums=None):
        i, index, *parts = threads.cta
        refs = operands | results
        start = jnp.minimum(index * block, width - block)
        tile = Tile(
            threads=threads,
            rows=pl.ds(jnp.minimum(i * rows, m - rows), rows),
            column=start,
            width=block,
            index=index,
            repeated=index * block - start if width % block else None,
        )
        if sums is None:
            value(refs, tile)
            return
        part = parts[0]
        tile = dataclasses.replace(tile, first=part == 0)
        loads = [functools.partial(factor.load, refs, tile, part) for factor in factors]
        is_first = part < factors[0].end
        loaded = loads[0]() if len(loads) == 1 else lax.cond(is_first, *loads)
        product = _multiply(tile, tile.once(value(refs, tile)), loaded)
        total = _sum_of_warps(threads, product, sums, rows)
        stores = [functools.partial(factor.store, refs, tile, part, total) for factor in factors]
        if len(stores) == 1:
            stores[0]()
        else:
            pl.when(is_first)(stores[0])
            pl.when(~is_first)(stores[1])

    outs = warpgroup.run(body, name, grid, operands, results, scratch=scratch, interpret=interpret)
    return {"xa_partials": None} | outs


class _Factor(NamedTuple):
    """What multiplies tiles of x: A, or the weight of a router."""

    operand: str  # its name
    result: str  # the name of its partials
    first: int  # index of its first CTA, of those with the same tile
    end: int  # index after that of its last one
    ranks: int  # number of rows, a multiple of eight

    def load(self, refs: dict, tile: Tile, part: Any) -> list[jax.Array]:
        """Requests the rows of a CTA by eights, the last ones in place of any that do not exist."""
        starts = [
            jnp.minimum((part - self.first) * _RANK + i, self.ranks - warp_mma.ROWS)
            for i in range(0, _RANK, warp_mma.ROWS)
        ]
        layout = tile_layout(warp_mma.ROWS, tile.width)
        rows = [(pl.ds(i, warp_mma.ROWS), tile.columns()) for i in starts]
        return [tile.threads.load(refs[self.operand].at[place], layout) for place in rows]

    def store(self, refs: dict, tile: Tile, part: Any, total: jax.Array) -> None:
        """Stores the products with the rows of a CTA, and zeros for rows that do not exist."""
        first = (part - self.first) * _RANK
        if self.ranks % _RANK:
            column = first + tile.threads.iota(total.shape, 1, _dense_layout(len(total)))
            total = jnp.where(column < self.ranks, total, jnp.zeros_like(total))
        place = tile.index, tile.rows, pl.ds(first, _RANK)
        tile.threads.store(refs[self.result].at[place], total)


def _multiply(tile: Tile, tokens: jax.Array, factors: list[jax.Array]) -> jax.Array:
    """The product of a tile [rows, width] with rows of A, by eights [8, width], of each warp.

    It is float32 [warps, rows, 32], the sums of each warp. Fewer than eight rows are repeated.
    """
    rows, width = tokens.shape
    warps = min(WARPS, width // _WARP_COLUMNS)
    shape = warps, max(rows, warp_mma.ROWS), _RANK
    if tile.threads.simulated:
        parts = [
            x.reshape(len(x), -1, warps, _WARP_COLUMNS) for x in (tokens, jnp.concatenate(factors))
        ]
        sums = jnp.einsum("rcwk,ncwk->wrn", *parts, preferred_element_type=jnp.float32)
        return jnp.tile(sums, (1, shape[1] // rows, 1))
    layouts = tile_layout(rows, width), [tile_layout(warp_mma.ROWS, width)] * len(factors)
    layout = _sums_layout(warps)
    result = plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.float32), layout=layout)

    @plgpu.inline_mgpu(arg_types=layouts, return_type=result)
    def multiply(_, tokens, factors):
        count = width // (_WARP_COLUMNS * warps)
        # By rows in eights and by 32 columns, the pairs of a thread.
        a = [list(map(warp_mma.words, row)) for row in tokens.registers.reshape(-1, count)]
        b = [list(map(warp_mma.words, x.registers.flat)) for x in factors]
        zero = warp_mma.zero(ir.F32Type.get())
        none = [[warp_mma.zero(ir.IntegerType.get_signless(32))] * 4] * count
        sums = []
        for i in range(0, len(a), 2):
            lower = a[i + 1] if i + 1 < len(a) else none
            tiles = []
            for column in b:
                acc = (zero,) * 4
                for upper_words, lower_words, words in zip(a[i], lower, column, strict=True):
                    for j in (0, 2):
                        pairs = [x[j + k] for k in (0, 1) for x in (upper_words, lower_words)]
                        acc = warp_mma.add_product(acc, pairs, words[j : j + 2])
                tiles.append(acc)
            for first in (0, 2)[: len(a) - i]:
                sums += [warp_mma.vector_of(acc[first : first + 2]) for acc in tiles]
        return warp_mma.array(sums, layout, shape)

    return multiply(tokens, factors)


def _sums_layout(warps: int) -> Layout:
    """How the sums of each warp [warps, rows, ranks] lie in registers."""
    shared = (plgpu.Replicated(WARPS // warps),) if warps < WARPS else ()
    return plgpu.Layout.TILED(
        plgpu.Tiling(((warps, warp_mma.ROWS, warp_mma.ROWS), (2,))),
        warp_dims=(*((-4,) if warps > 1 else ()), *shared),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )


def _sum_of_warps(
    threads: warpgroup.Warpgroup, sums: jax.Array, space: Any, rows: int
) -> jax.Array:
    """Adds up the warps' sums [warps, 8 rows or more, 32] in shared memory: float32 [rows, 32]."""
    threads.store(space, sums)
    threads.meet()
    layout = _dense_layout(rows)
    parts = [threads.load(space.at[warp, pl.ds(0, rows)], layout) for warp in range(sums.shape[0])]
    return sum(parts[1:], start=parts[0])


@functools.cache
def _dense_layout(rows: int) -> Layout:
    """How sums [rows, 32] lie in registers if threads have as few as possible."""
    numbers = min(4, max(1, rows * _RANK // 128))  # of a thread
    warps = min(WARPS, rows)
    lanes = min(rows // warps, numbers)  # rows of a warp
    if lanes > 1:
        tiling = ((WARPS * lanes, _RANK), (lanes, _RANK), (numbers,))
        warp_dims, lane_dims = (-5,), (-3, -2)
    else:
        tiling, lane_dims = ((warps, _RANK), (numbers,)), (-2,)
        shared = (plgpu.Replicated(WARPS // warps),) if warps < WARPS else ()
        warp_dims = (*((-3,) if warps > 1 else ()), *shared)
    return plgpu.Layout.TILED(
        plgpu.Tiling(tiling), warp_dims=warp_dims, lane_dims=lane_dims, vector_dim=-1
    )
