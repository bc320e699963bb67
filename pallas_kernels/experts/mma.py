"""The grouped FP4 product of a decode step: each tile of eight rows by the weight of its expert.

    hidden[R, F] = silu(x W_gate^T) * (x W_up^T) * w      `gated_matmul`
    y[R, N] = x W^T                                       `matmul`

A CTA multiplies the rows of an expert by some of its outputs. It is made of the parts of
`fp4_matmul.mma`: it reads the table for the expert and for the rows of x, which cp.async takes from
wherever they are. CTAs of unused tiles end at once, and so do those whose tile an earlier CTA
multiplies. Gate and up of the same outputs are in one CTA, and no sum leaves its CTA.

Where tiles are few, so are CTAs of 64 outputs: there a CTA has 16, and its four warps divide the
columns.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels import warp_mma, warpgroup
from pallas_kernels.device import num_sms
from pallas_kernels.experts.table import Table
from pallas_kernels.fp4_matmul import layout
from pallas_kernels.fp4_matmul.layout import Fp4Tiles
from pallas_kernels.fp4_matmul.mma import copies
from pallas_kernels.fp4_matmul.mma.epilogue import ACC
from pallas_kernels.fp4_matmul.mma.kernel import multiply_stage
from pallas_kernels.fp4_matmul.mma_schedule import SHARED_MEMORY, MmaConfig
from pallas_kernels.fp4_matmul.sm90.synchronize import opaque
from pallas_kernels.fp4_matmul.tiling import TILE_COLUMNS, TILE_ROWS
from pallas_kernels.warpgroup import WARPS, Warpgroup

TILE = 8  # rows of a tile of the table
STRIP = TILE_ROWS // WARPS  # outputs of a warp
_FEW_TILES = 16  # of the table, with which few CTAs have 64 outputs
_MOST_TILES = 4
_LOG2_E = 1.4426950408889634
# The sums of 16 outputs, which all warps have; a thread has the same ones as in ACC.
_STRIP_SUMS = plgpu.Layout.TILED(
    plgpu.Tiling(((STRIP, 8), (8, 8), (2,))),
    warp_dims=(plgpu.Replicated(WARPS),),
    lane_dims=(-3, -2),
    vector_dim=-1,
)


@dataclasses.dataclass(frozen=True)
class GroupedConfig:
    """A schedule."""

    rows: int = 64  # outputs of a CTA, of gate and of up each: 64 or a multiple, or 16
    columns: int = 256  # columns of a step: 128, 256 or 512, the last one with 16 outputs
    stages: int = 3  # number of steps that shared memory holds
    tiles: int = 1  # tiles of an expert that a CTA multiplies at a time

    @property
    def apart(self) -> bool:
        """Whether the warps of a CTA divide the columns instead of the outputs."""
        return self.rows == STRIP

    @property
    def tokens(self) -> int:
        """Rows of x of a CTA."""
        return TILE * self.tiles

    def row_tiles(self, parts: int) -> int:
        """Rows of tiles of the weight that a CTA reads, with gate and up as two parts."""
        return parts * max(1, self.rows // TILE_ROWS)

    def shared(self, parts: int) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Shapes and dtypes of what is in shared memory."""
        tiles = self.columns // TILE_COLUMNS // (WARPS if self.apart else 1)
        weight = self.stages, self.row_tiles(parts), tiles
        pitch = MmaConfig(columns=self.columns).pitch()
        types: dict[str, tuple[tuple[int, ...], Any]] = {
            "x": ((self.stages, self.tokens, pitch), jnp.bfloat16),
            "codes": ((*weight, WARPS, layout.CODE_WORDS // WARPS), jnp.uint32),
            "scales": ((*weight, layout.SCALE_WORDS), jnp.uint32),
            "chosen": ((self.tokens,), jnp.int32),
        }
        if parts == 2:
            types["factors"] = (self.tokens,), jnp.float32
        if self.apart:
            types["sums"] = (self.row_tiles(parts), TILE_ROWS, self.tokens), jnp.float32
        return types

    def problem(self, outputs: int, parts: int) -> str | None:
        """Why experts with this number of outputs, gate and up together, cannot have it."""
        if (self.rows % TILE_ROWS and not self.apart) or outputs % (self.rows * parts):
            return f"rows is {self.rows}, expected 16 or a multiple of 64 that divides {outputs}"
        if self.columns not in ((512,) if self.apart else (128, 256, 512)):
            return f"columns is {self.columns}, expected 128, 256 or 512, with 16 rows 512"
        if self.stages < 2 or self.tiles < 1:
            return f"{self.stages} stages and {self.tiles} tiles, expected at least 2 and 1"
        types = self.shared(parts).values()
        size = sum(math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in types)
        if size > SHARED_MEMORY:
            return f"{size} bytes of shared memory, limit {SHARED_MEMORY}"
        return None


def choose(table: Table, outputs: int, weight: Fp4Tiles, *, parts: int) -> GroupedConfig:
    """The schedule for experts with this number of outputs, gate and up together.

    It is made from times of Qwen3-30B-A3B and Qwen3.6-35B-A3B on an H200.
    """
    pairs, experts = len(table.place), weight.shape[0] // outputs
    # As many as most experts have, when routes are uniform.
    tiles = min(_MOST_TILES, math.ceil((pairs / experts + TILE / 2) / TILE))
    if tiles > 1:
        wide = parts == 1 and outputs % (2 * TILE_ROWS) == 0
        return GroupedConfig(2 * TILE_ROWS if wide else TILE_ROWS, TILE_COLUMNS, 3, tiles)
    if parts == 2 and len(table.owner) <= _FEW_TILES:
        return GroupedConfig(STRIP, 512, 2)
    touched = experts * (1 - (1 - 1 / experts) ** pairs)
    ctas = touched * outputs // parts // TILE_ROWS
    if parts == 2:  # An SM has five CTAs at a time, or with four stages four.
        return GroupedConfig(TILE_ROWS, TILE_COLUMNS, 3 if ctas <= 5 * num_sms() else 4)
    if ctas <= 16 * num_sms():
        return GroupedConfig(TILE_ROWS, 2 * TILE_COLUMNS, 3)
    return GroupedConfig(TILE_ROWS, TILE_COLUMNS, 4)


def gated_matmul(
    x: jax.Array,
    weight: Fp4Tiles,
    table: Table,
    row_weights: jax.Array,
    *,
    width: int,
    config: GroupedConfig,
    interpret: bool = False,
) -> jax.Array:
    """As `experts.gated_matmul`, for bfloat16 x and tiles of eight rows."""
    top_k = len(row_weights) // len(x)
    kernel = _Kernel(config, 2 * width, 2, len(row_weights), top_k)
    return _run(kernel, x, weight, table, {"row_weights": row_weights}, interpret)


def matmul(
    x: jax.Array,
    weight: Fp4Tiles,
    table: Table,
    *,
    outputs: int,
    config: GroupedConfig,
    interpret: bool = False,
) -> jax.Array:
    """As `experts.grouped_matmul`, for bfloat16 x and tiles of eight rows."""
    kernel = _Kernel(config, outputs, 1, len(table.place), None)
    return _run(kernel, x, weight, table, {}, interpret)


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """What is known when a kernel is compiled."""

    config: GroupedConfig
    outputs: int  # of an expert, those of gate and up together
    parts: int  # 2 for gate and up, or 1
    pairs: int
    top_k: int | None  # pairs of a row of x, in their order; None if x has the rows of the table


def _run(kernel, x, weight, table, extra, interpret):
    config, outputs, parts = kernel.config, kernel.outputs, kernel.parts
    row_tiles, column_tiles, _ = weight.codes.shape
    assert len(table.source) == TILE * len(table.owner)
    assert x.shape[1] % layout.BLOCK == 0
    assert not (problem := config.problem(outputs, parts)), problem
    operands = extra | {
        "x": x,
        "codes": weight.codes.reshape(row_tiles, column_tiles, 4, 256),
        "scales": weight.scales,
        "divisor": weight.divisor,
        "source": table.source,
        "owner": table.owner,
        "used": table.used.reshape(1),
    }
    whole = len(table.owner) if config.tiles == 1 else weight.shape[0] // outputs
    return warpgroup.run(
        functools.partial(_body, kernel),
        "experts_gated_matmul" if parts == 2 else "experts_matmul",
        (outputs // parts // config.rows, whole),  # CTAs of unused tiles are among the others.
        operands,
        jax.ShapeDtypeStruct((len(table.source), outputs // parts), x.dtype),
        scratch=config.shared(parts),
        interpret=interpret,
    )


def _body(kernel: _Kernel, threads: Warpgroup, operands, _, y, **shared) -> None:
    """What a CTA does: a tile, or an expert's tiles, some at a time."""
    tiles = kernel.config.tiles
    if tiles == 1:
        tile = threads.cta[1]
        used, owner = _choose_rows(kernel, threads, operands, tile, shared["chosen"])

        @pl.when(tile < used)
        def multiply():
            _multiply(kernel, threads, operands, (tile, owner), y, shared)

        return
    first, count = _tiles_of(threads, operands, threads.cta[1])

    def multiply_some(i, _):
        # Addresses that the compiler knew before the loop would be in registers, and an SM would
        # have three CTAs instead of four.
        owner = _opaque(threads, threads.cta[1])
        tile = first + i * tiles
        threads.meet()  # The rows of the tiles before are no longer read.
        _choose_rows(kernel, threads, operands, tile, shared["chosen"])
        _multiply(kernel, threads, operands, (tile, owner), y, shared)
        return 0

    lax.fori_loop(0, (count + tiles - 1) // tiles, multiply_some, 0)


def _multiply(kernel: _Kernel, threads: Warpgroup, operands, place, y, shared) -> None:
    """Multiplies the chosen rows, those of a tile and after it, and stores the results.

    `place` are the tile and its owner.
    """
    config, chosen, (tile, owner) = kernel.config, shared["chosen"], place
    stages = copies.Stages(**{name: shared[name] for name in copies.Stages._fields})
    column_tiles, per_step = operands["codes"].shape[1], config.columns // TILE_COLUMNS
    steps = -(-column_tiles // per_step)
    block, x, parts = threads.cta[0], operands["x"], kernel.parts
    rows = _row_tiles(kernel, owner, block)

    def start_copies(step):
        if config.tiles > 1:
            step = _opaque(threads, step)
        column, stage = step * per_step, stages.at(step)
        start, end = column * TILE_COLUMNS, column_tiles * TILE_COLUMNS
        copies.start_x(threads, x, stage.x, start, end, found)
        for i, row in enumerate(rows):
            source = operands["codes"].at[row], operands["scales"].at[row]
            target = stage.codes.at[i], stage.scales.at[i]
            if config.apart:
                strip = lax.rem(block, WARPS)
                copies.start_strips(threads, source, target, strip, column, column_tiles)
            else:
                copies.start_tiles(threads, source, target, column, column_tiles)

    threads.meet()  # All threads see which rows are chosen.
    found = copies.chosen_rows(threads, chosen, kernel.top_k or 1, config.columns)
    ahead = min(steps, config.stages - (steps > config.stages))
    for step in range(ahead):
        start_copies(jnp.int32(step))
        copies.close_group(threads)
    if parts == 2:
        _load_factors(threads, operands["row_weights"], chosen, shared["factors"])

    def multiply_step(step, sums):
        copies.wait(threads, ahead - 1)
        threads.meet()  # All copies are there, and the stage of the step before is free.

        @pl.when(step + ahead < steps)
        def start_next():
            start_copies(step + ahead)

        copies.close_group(threads)
        return multiply_stage(threads, stages.at(step), sums, apart=config.apart)

    zeros = threads.cast(jnp.zeros((TILE_ROWS, config.tokens), jnp.float32), ACC)
    sums = lax.fori_loop(0, steps, multiply_step, [zeros] * len(rows))
    sums = _whole_sums(kernel, threads, sums, shared)
    inside = lax.rem(block, WARPS) * STRIP if config.apart else 0
    height, count = STRIP if config.apart else TILE_ROWS, config.row_tiles(1)
    for i in range(count):
        results = [
            _divided(threads, operands["divisor"], total, row * TILE_ROWS + inside)
            for row, total in zip(rows[i::count], sums[i::count], strict=True)
        ]
        if parts == 2:
            gate, up = results
            results = [_gated(threads, gate, up, shared["factors"])]
        value = results[0].astype(y.dtype)
        _store(threads, y, value, chosen, tile * TILE, (block * count + i) * height)


def _opaque(threads: Warpgroup, number):
    return number if threads.simulated else opaque(number)


def _row_tiles(kernel: _Kernel, owner, block) -> list:
    """Row tiles of the weight of a block, those of gate before those of up."""
    config, count = kernel.config, kernel.config.row_tiles(1)
    first = owner * (kernel.outputs // TILE_ROWS)
    first += block // WARPS if config.apart else block * count
    per_part = kernel.outputs // kernel.parts // TILE_ROWS
    return [first + part * per_part + i for part in range(kernel.parts) for i in range(count)]


def _whole_sums(kernel: _Kernel, threads: Warpgroup, sums, shared):
    """The sums over all columns: where the warps divide them, of 16 outputs, in all warps."""
    if not kernel.config.apart:
        return sums
    for target, value in zip(range(len(sums)), sums, strict=True):
        threads.store(shared["sums"].at[target], value)
    threads.meet()

    def whole(i):
        parts = (shared["sums"].at[i, pl.ds(STRIP * warp, STRIP)] for warp in range(WARPS))
        first, *others = (threads.load(part, _STRIP_SUMS) for part in parts)
        return functools.reduce(jnp.add, others, first)

    return [whole(i) for i in range(len(sums))]


def _layout_of(sums):
    return ACC if len(sums) == TILE_ROWS else _STRIP_SUMS


def _divided(threads: Warpgroup, divisor: Any, sums: jax.Array, row: Any) -> jax.Array:
    """The product [outputs, tokens] of the sums of some rows of the weight."""
    rows = divisor.at[pl.ds(row, len(sums))]
    factor = layout.UNIT / threads.load(rows, _layout_of(sums).reduce(1))
    return sums * lax.broadcast_in_dim(factor, sums.shape, (0,))


def _gated(threads: Warpgroup, gate: jax.Array, up: jax.Array, factors: Any) -> jax.Array:
    """SwiGLU, times the factor of each token. Gate and up are rounded as products are."""
    gate, up = (half.astype(jnp.bfloat16).astype(jnp.float32) for half in (gate, up))
    factor = threads.load(factors, _layout_of(gate).reduce(0))
    active = gate / (1.0 + jnp.exp2(-_LOG2_E * gate))
    return active * up * lax.broadcast_in_dim(factor, gate.shape, (1,))


def _tiles_of(threads: Warpgroup, operands, owner) -> tuple[Any, Any]:
    """The first one and the number of the tiles of an expert; used tiles are in their order."""
    owners, used = operands["owner"], operands["used"]
    (tiles,) = owners.shape
    if threads.simulated:
        found, there = owners[...], jnp.arange(tiles) < used[0]
        return tuple(
            (there & is_so).sum(dtype=jnp.int32) for is_so in (found < owner, found == owner)
        )
    splat = plgpu.Layout.WG_SPLAT
    number = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=splat)
    turns = range(-(-tiles // 32))  # Each warp reads all.
    names = ", ".join(f"own{i}" for i in turns)

    @plgpu.inline_mgpu(arg_types=([plgpu.RefType()] * 2, splat), return_type=[number] * 2)
    def count(_, arrays, owner):
        i32 = ir.IntegerType.get_signless(32)
        found = mgpu.utils.inline_ptx(
            "{ .reg .pred there, before, same; .reg .b32 lane, index, used, less, equal; "
            f".reg .b32 {names}; .reg .b64 at; and.b32 lane, $5, 31; ld.global.u32 used, [$3]; "
            + "".join(
                f"add.u32 index, lane, {32 * i}; min.u32 index, index, {tiles - 1}; "
                f"mad.wide.u32 at, index, 4, $2; ld.global.u32 own{i}, [at]; "
                for i in turns
            )
            + "mov.b32 less, 0; mov.b32 equal, 0; "
            + "".join(
                f"add.u32 index, lane, {32 * i}; setp.lt.u32 there, index, used; "
                f"setp.lt.and.u32 before, own{i}, $4, there; @before add.u32 less, less, 1; "
                f"setp.eq.and.u32 same, own{i}, $4, there; @same add.u32 equal, equal, 1; "
                for i in turns
            )
            + "".join(
                f"redux.sync.add.u32 ${i}, {name}, 0xffffffff; "
                for i, name in enumerate(("less", "equal"))
            )
            + "}",
            *(copies.pointer(array) for array in arrays),
            owner.registers.item(),
            mgpu.utils.thread_idx(),
            result_types=[i32] * 2,
            has_side_effects=True,
            convergent=True,
        )
        return [mgpu.FragmentedArray.splat(x, (), is_signed=True) for x in found]

    return count([owners, used], owner)


def _choose_rows(kernel: _Kernel, threads: Warpgroup, operands, tile, chosen) -> tuple[Any, Any]:
    """Finds the rows of a CTA's tiles that have a pair of the expert of the first one.

    `chosen` gets the pair of each, or the row itself where x has the rows of the table; of others
    it gets -1. Returns the number of used tiles and the expert.
    """
    names = "used", "owner", "source"
    tokens, pairs, rows = kernel.config.tokens, kernel.pairs, operands["source"].shape[0]
    if threads.simulated:
        used, owners, source = (operands[name][...] for name in names)
        row = tile * TILE + jnp.arange(tokens)
        inside = jnp.minimum(row, rows - 1)
        of_tile, pair = inside // TILE, source[inside]
        there = (row < rows) & (of_tile < used) & (owners[of_tile] == owners[tile]) & (pair < pairs)
        chosen[...] = jnp.where(there, row if kernel.top_k is None else pair, -1)
        return used[0], owners[tile]
    splat = plgpu.Layout.WG_SPLAT
    number = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=splat)
    kept = "row" if kernel.top_k is None else "pair"

    @plgpu.inline_mgpu(
        arg_types=([plgpu.RefType()] * 3, plgpu.RefType(), splat), return_type=[number] * 2
    )
    def choose(_, arrays, chosen, tile):
        i32 = ir.IntegerType.get_signless(32)
        # All reads are started before the first one is waited for.
        numbers = mgpu.utils.inline_ptx(
            "{ .reg .pred mine, there; .reg .b32 row, pair, tile, other; .reg .b64 at; "
            "mad.lo.u32 row, $6, 8, $7; "
            f"min.u32 pair, row, {rows - 1}; shr.u32 tile, pair, 3; "
            "mad.wide.u32 at, pair, 4, $4; ld.global.u32 pair, [at]; "
            "mad.wide.u32 at, tile, 4, $3; ld.global.u32 other, [at]; "
            "mad.wide.u32 at, $6, 4, $3; ld.global.u32 $1, [at]; ld.global.u32 $0, [$2]; "
            f"setp.lt.u32 there, row, {rows}; setp.lt.and.u32 there, tile, $0, there; "
            f"setp.eq.and.u32 there, other, $1, there; setp.lt.and.u32 there, pair, {pairs}, there;"
            f" selp.b32 pair, {kept}, -1, there; setp.lt.u32 mine, $7, {tokens}; "
            "@mine st.shared.u32 [$5], pair; }",
            *(copies.pointer(array) for array in arrays),
            arith.addi(
                copies.address(chosen), arith.muli(mgpu.utils.thread_idx(), mgpu.utils.c(4, i32))
            ),
            tile.registers.item(),
            mgpu.utils.thread_idx(),
            result_types=[i32] * 2,
            has_side_effects=True,
        )
        return [mgpu.FragmentedArray.splat(x, (), is_signed=True) for x in numbers]

    return choose([operands[name] for name in names], chosen, tile)


def _load_factors(threads: Warpgroup, row_weights: Any, chosen: Any, factors: Any) -> None:
    """Loads the weights of the chosen pairs, and zeros for others."""
    if threads.simulated:
        pair = chosen[...]
        factors[...] = jnp.where(pair < 0, 0, row_weights[...][jnp.maximum(pair, 0)])
        return

    @plgpu.inline_mgpu(arg_types=[plgpu.RefType()] * 3)
    def load(_, row_weights, chosen, factors):
        i32 = ir.IntegerType.get_signless(32)
        own = arith.muli(mgpu.utils.thread_idx(), mgpu.utils.c(4, i32))
        (tokens,) = ir.MemRefType(chosen.type).shape
        mgpu.utils.inline_ptx(
            "{ .reg .pred mine, there; .reg .b32 pair, weight; .reg .b64 at; "
            f"setp.lt.u32 mine, $3, {tokens}; mov.b32 pair, 0; @mine ld.shared.u32 pair, [$0]; "
            "setp.ge.and.s32 there, pair, 0, mine; max.s32 pair, pair, 0; "
            "mad.wide.u32 at, pair, 4, $2; mov.b32 weight, 0; "
            "@there ld.global.u32 weight, [at]; @mine st.shared.u32 [$1], weight; }",
            arith.addi(copies.address(chosen), own),
            arith.addi(copies.address(factors), own),
            copies.pointer(row_weights),
            mgpu.utils.thread_idx(),
            has_side_effects=True,
        )

    load(row_weights, chosen, factors)


def _store(threads: Warpgroup, y: Any, value: jax.Array, chosen: Any, row: Any, column: Any):
    """Stores outputs bfloat16 [outputs, tokens] to y, from a row and a column on.

    Rows that are not chosen keep what they have.
    """
    (height, tokens), columns = value.shape, y.shape[1]
    if threads.simulated:
        rows = jnp.where(chosen[...] < 0, y.shape[0], row + jnp.arange(tokens))
        index = rows[:, None], column + jnp.arange(height)
        y[...] = y[...].at[index].set(value.T, mode="drop")
        return
    splat = plgpu.Layout.WG_SPLAT
    references = plgpu.RefType(), plgpu.RefType()

    @plgpu.inline_mgpu(arg_types=(*references, _layout_of(value), splat, splat))
    def store(_, y, chosen, value, row, column):
        i32 = ir.IntegerType.get_signless(32)
        c = functools.partial(mgpu.utils.c, ty=i32)
        thread = mgpu.utils.thread_idx()
        warp, lane = arith.shrui(thread, c(5)), arith.andi(thread, c(31))
        # After the transposition a thread has two outputs of a token.
        token = arith.shrui(lane, c(2))
        output = arith.addi(column.registers.item(), arith.shli(arith.andi(lane, c(3)), c(1)))
        if height == TILE_ROWS:
            output = arith.addi(output, arith.muli(warp, c(STRIP)))
        start = arith.muli(arith.addi(row.registers.item(), token), c(columns))
        start = copies.advanced(copies.pointer(y), arith.muli(arith.addi(start, output), c(2)))
        numbers = arith.addi(copies.address(chosen), arith.muli(token, c(4)))
        for group, halves in enumerate(value.registers.reshape(-1, 2)):
            there = arith.cmpi(
                arith.CmpIPredicate.sge, copies.read_shared(numbers, 4 * 8 * group), c(0)
            )
            if height == STRIP:  # All warps have the same.
                there = arith.andi(there, arith.cmpi(arith.CmpIPredicate.eq, warp, c(0)))
            for half, register in enumerate(halves):
                (pair,) = warp_mma.words(register)
                pair = mgpu.utils.inline_ptx(
                    "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;",
                    pair,
                    result_types=i32,
                    has_side_effects=True,
                    convergent=True,
                )
                mgpu.utils.inline_ptx(
                    f"st.global.u32 [$0+{2 * 8 * (group * columns + half)}], $1;",
                    start,
                    pair,
                    predicate=there,
                    has_side_effects=True,
                )

    store(y, chosen, value, row, column)
