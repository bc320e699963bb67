"""Columns of x and of the weight on their way through shared memory: cp.async in, ldmatrix out.

A thread copies the codes that it will read itself. Scales and tokens are those of others, too.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels import warp_mma
from pallas_kernels.fp4_matmul import layout
from pallas_kernels.fp4_matmul.mma.codes import STEPS
from pallas_kernels.fp4_matmul.mma_schedule import PITCH, MmaConfig, padded_tokens
from pallas_kernels.fp4_matmul.tiling import TILE_COLUMNS
from pallas_kernels.warpgroup import WARPS, Warpgroup

_CHUNK = 16  # bytes of a copy of a thread
_THREADS = 32 * WARPS
# Of a descriptor of wgmma: eight rows have 1,024 bytes, whose chunks are swizzled in 128 bytes.
_SWIZZLED = 1024 >> 4 << 32 | 1 << 62
_ROW = 16  # bytes of a row's codes that a thread has


class Stages(NamedTuple):
    """Arrays in shared memory, each with an element for every stage of the pipeline."""

    # bfloat16 [stages, M', P]; M' is the next multiple of 8 from M on, P the number of columns and
    # what lies between two rows.
    x: Any
    codes: Any  # uint32 [stages, row tiles, column tiles, 4, 256]
    scales: Any  # uint32 [stages, row tiles, column tiles, 128], or 64 in MXFP4

    @classmethod
    def types(cls, config: MmaConfig, m: int, words: int) -> "Stages":
        """Shapes and dtypes for x of M rows, and words of scales of a tile."""
        tiles = config.stages, config.row_tiles, config.column_tiles
        return cls(
            x=((config.stages, padded_tokens(m), config.pitch()), jnp.bfloat16),
            codes=((*tiles, 4, layout.CODE_WORDS // 4), jnp.uint32),
            scales=((*tiles, words), jnp.uint32),
        )

    def at(self, step: Any) -> "Stages":
        """The stage of a step."""
        slot = lax.rem(step, self.x.shape[0])
        return Stages(*(array.at[slot] for array in self))


def start_x(
    threads: Warpgroup,
    x: Any,
    stage: Any,
    column: Any,
    end: Any,
    chosen: jax.Array | None = None,
    *,
    swizzled: bool = False,
) -> None:
    """Starts to copy columns of x [M, K], from one on, to `Stages.x` of a stage.

    The columns from `end` on, and rows from M on, become zero. `chosen` says which rows of x they
    are, see `chosen_rows`: nothing is copied where it is negative. With `swizzled` the stage has
    128 columns, 64 of all rows before the others, whose chunks of 16 bytes are where wgmma expects
    them.
    """
    (m, k), (tokens, pitch) = x.shape, stage.shape
    width = pitch if swizzled else pitch - PITCH
    end = jnp.minimum(end, k)
    if threads.simulated:
        whole = jnp.pad(x[...], ((0, max(0, tokens - m)), (0, 0)))
        if chosen is not None:
            whole = jnp.where((chosen < 0)[:, None], jnp.nan, whole[jnp.maximum(chosen, 0)])
        index = column + jnp.arange(width)
        stage[:, :width] = jnp.where(index < end, whole[:, jnp.minimum(index, k - 1)], 0)
        return
    numbers = _CHUNK // 2
    chunks = width // numbers  # of a row
    rows = _THREADS // chunks  # of x, that the threads copy at a time
    row_bytes = 8 * _CHUNK if swizzled else 2 * pitch
    assert not swizzled or (width, rows) == (TILE_COLUMNS, 8)
    chosen_types = () if chosen is None else (_of_threads(len(chosen)),)

    @plgpu.inline_mgpu(
        arg_types=(
            *(plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT, plgpu.Layout.WG_SPLAT),
            *chosen_types,
        )
    )
    def copy(_, x, stage, column, end, *chosen_rows):
        thread = mgpu.utils.thread_idx()
        row, chunk = arith.divui(thread, _i32(chunks)), arith.remui(thread, _i32(chunks))
        first = arith.addi(column.registers.item(), arith.muli(chunk, _i32(numbers)))
        inside = arith.cmpi(arith.CmpIPredicate.slt, first, end.registers.item())

        def source_of(row):
            source = arith.addi(arith.muli(row, _i32(k)), first)
            return advanced(pointer(x), arith.muli(source, _i32(2)))

        source = source_of(row)
        target = arith.addi(address(stage), arith.muli(row, _i32(row_bytes)))
        if swizzled:
            half = arith.muli(arith.divui(chunk, _i32(8)), _i32(tokens * row_bytes))
            target = arith.addi(target, half)
            chunk = arith.xori(arith.remui(chunk, _i32(8)), row)
        target = arith.addi(target, arith.muli(chunk, _i32(_CHUNK)))
        for first_row in range(0, tokens, rows):
            there = inside
            if chosen is not None:
                (found,) = warp_mma.numbers(chosen_rows[0].registers[first_row // rows])
                exists = arith.cmpi(arith.CmpIPredicate.sge, found, _i32(0))
                _copy(target, source_of(found), first_row * row_bytes, 0, _CHUNK, inside, exists)
                continue
            if first_row + rows > m:
                exists = arith.cmpi(arith.CmpIPredicate.slt, row, _i32(m - first_row))
                there = arith.andi(inside, exists)
            _copy(target, source, first_row * row_bytes, 2 * first_row * k, _CHUNK, there)

    copy(x, stage, column, end, *(() if chosen is None else (chosen,)))


def chosen_rows(threads: Warpgroup, chosen: Any, divisor: int, width: int) -> jax.Array:
    """The rows of x that `start_x` copies, in steps of some columns, for each copy of a thread.

    `chosen` is an int32 [M'] in shared memory, which is divided for the row. Negative numbers stay
    negative: no token's product depends on those of others, so that they need none.
    """
    if threads.simulated:
        return chosen[...] // divisor
    (tokens,) = chosen.shape
    chunks = width // (_CHUNK // 2)
    kind = _of_threads(tokens * chunks)
    result = plgpu.ShapeDtypeStruct((tokens * chunks,), jnp.dtype(jnp.int32), layout=kind)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def load(_, chosen):
        row = arith.divui(mgpu.utils.thread_idx(), _i32(chunks))
        start = arith.addi(address(chosen), arith.muli(row, _i32(4)))
        rows = []
        for first in range(0, tokens, _THREADS // chunks):
            found = read_shared(start, 4 * first)
            exists = arith.cmpi(arith.CmpIPredicate.sge, found, _i32(0))
            found = arith.select(exists, arith.divui(found, _i32(divisor)), found)
            rows.append(warp_mma.vector_of([found]))
        registers = np.array(rows, dtype=object)
        return mgpu.FragmentedArray(_registers=registers, _layout=kind.to_mgpu(), _is_signed=True)

    return load(chosen)


def _of_threads(count: int) -> Any:
    """The layout of numbers of which the threads have one after the other."""
    return plgpu.Layout.WG_STRIDED((count,), vec_size=1)


def read_shared(address: ir.Value, offset: int) -> ir.Value:
    """A word of shared memory, i32, some bytes after an address."""
    return mgpu.utils.inline_ptx(
        f"ld.shared.u32 $0, [$1+{offset}];",
        address,
        result_types=ir.IntegerType.get_signless(32),
        has_side_effects=True,
    )


def start_strips(
    threads: Warpgroup,
    tiles: tuple[Any, Any],
    stage: tuple[Any, Any],
    strip: Any,
    column: Any,
    end: Any,
) -> None:
    """As `start_tiles`, of 16 rows of a row of tiles: its strip of this number, from 0 to 3.

    Each warp gets the strip of another tile: those of the tiles `column` + 4 i + w go to the rows
    of warp w in element i of the stage.
    """
    count = stage[0].shape[0]
    if threads.simulated:
        index = column + jnp.arange(count * WARPS)
        for array, target in zip(tiles, stage, strict=True):
            strips = array[...].reshape(array.shape[0], WARPS, -1)[:, strip]
            found = strips[jnp.minimum(index, array.shape[0] - 1)]
            found = jnp.where((index < end)[:, None], found, 0)
            target[...] = found.reshape(target.shape)
        return
    number, sizes = plgpu.Layout.WG_SPLAT, _tile_bytes(stage)

    @plgpu.inline_mgpu(arg_types=([plgpu.RefType()] * 2, [plgpu.RefType()] * 2, *[number] * 3))
    def copy(_, tiles, stage, strip, column, end):
        strip, column, end = (x.registers.item() for x in (strip, column, end))
        thread = mgpu.utils.thread_idx()
        warp, lane = arith.divui(thread, _i32(32)), arith.remui(thread, _i32(32))
        first = arith.addi(column, warp)
        for array, shared, size in zip(tiles, stage, sizes, strict=True):
            bytes_of = size // WARPS  # of a strip
            chunk = min(_ROW, max(4, bytes_of // 32))
            first_lanes = None
            if 32 * chunk > bytes_of:
                first_lanes = arith.cmpi(arith.CmpIPredicate.slt, lane, _i32(bytes_of // chunk))
            lanes = arith.muli(lane, _i32(chunk))
            source = advanced(pointer(array), arith.muli(first, _i32(size)))
            inside_tile = arith.addi(arith.muli(strip, _i32(bytes_of)), lanes)
            source = advanced(source, inside_tile)
            target = arith.addi(arith.muli(warp, _i32(bytes_of)), lanes)
            target = arith.addi(address(shared), target)
            for i in range(count):
                tile = arith.addi(first, _i32(i * WARPS))
                inside = arith.cmpi(arith.CmpIPredicate.slt, tile, end)
                for part in range(0, bytes_of, 32 * chunk):
                    to, start = i * size + part, i * WARPS * size + part
                    _copy(target, source, to, start, chunk, inside, first_lanes)

    copy(list(tiles), list(stage), strip, column, end)


def start_tiles(
    threads: Warpgroup, tiles: tuple[Any, Any], stage: tuple[Any, Any], column: Any, end: Any
) -> None:
    """Starts to copy tiles of the weight, neighbors in a row of them, to a stage.

    Codes [C, 4, 256] and scales [C, 128], or [C, 64], of the row go to those of the stage and of
    the row, from the tile `column` on; the tiles from `end` on become zero.
    """
    count = stage[0].shape[0]
    if threads.simulated:
        index = column + jnp.arange(count)
        for array, target in zip(tiles, stage, strict=True):
            found = array[...][jnp.minimum(index, array.shape[0] - 1)]
            inside = (index < end).reshape(-1, *[1] * (found.ndim - 1))
            target[...] = jnp.where(inside, found, 0)
        return
    sizes = _tile_bytes(stage)
    part = max(4, count * sizes[1] // _THREADS)  # bytes of scales of a thread
    number = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=([plgpu.RefType()] * 2, [plgpu.RefType()] * 2, number, number))
    def copy(_, tiles, stage, column, end):
        thread = mgpu.utils.thread_idx()
        column, end = column.registers.item(), end.registers.item()
        warp, lane = arith.divui(thread, _i32(32)), arith.remui(thread, _i32(32))
        own = arith.muli(warp, _i32(sizes[0] // WARPS))
        own = arith.addi(own, arith.muli(lane, _i32(_ROW)))
        source = advanced(pointer(tiles[0]), arith.muli(column, _i32(sizes[0])))
        source, target = advanced(source, own), arith.addi(address(stage[0]), own)
        for i in range(count):
            tile = arith.addi(column, _i32(i))
            inside = arith.cmpi(arith.CmpIPredicate.slt, tile, end)
            for half in range(2):  # the rows r and r + 8
                offset = i * sizes[0] + half * sizes[0] // WARPS // 2
                _copy(target, source, offset, offset, _ROW, inside)
        own = arith.muli(thread, _i32(part))
        source = advanced(pointer(tiles[1]), arith.muli(column, _i32(sizes[1])))
        source, target = advanced(source, own), arith.addi(address(stage[1]), own)
        tile = arith.addi(column, arith.divui(own, _i32(sizes[1])))
        inside = arith.cmpi(arith.CmpIPredicate.slt, tile, end)
        first_threads = None
        if part * _THREADS > count * sizes[1]:
            first_threads = arith.cmpi(arith.CmpIPredicate.slt, own, _i32(count * sizes[1]))
        _copy(target, source, 0, 0, part, inside, first_threads)

    copy(list(tiles), list(stage), column, end)


def _tile_bytes(stage: tuple[Any, Any]) -> tuple[int, int]:
    """Bytes of the codes and of the scales of a tile."""
    return 4 * layout.CODE_WORDS, 4 * stage[1].shape[-1]


def _copy(
    target: ir.Value,
    source: ir.Value,
    to: int,
    start: int,
    size: int,
    inside: ir.Value,
    exists: ir.Value | None = None,
) -> None:
    """Starts a copy of 4, 8 or 16 bytes to shared memory, or of zeros if they are not inside.

    What is added to the addresses, `to` and `start`, is known when the kernel is compiled. Nothing
    is copied if the bytes do not exist.
    """
    count = arith.select(inside, _i32(size), _i32(0))
    cached = "cg" if size == 16 else "ca"
    mgpu.utils.inline_ptx(
        f"cp.async.{cached}.shared.global [$0+{to}], [$1+{start}], {size}, $2;",
        target,
        source,
        count,
        predicate=exists,
        has_side_effects=True,
    )


def close_group(threads: Warpgroup) -> None:
    """Makes a group of the copies that this thread has started since the last one."""
    _run(threads, "cp.async.commit_group;")


def wait(threads: Warpgroup, groups: int) -> None:
    """Waits until all but the last groups of this thread's copies are there."""
    _run(threads, f"cp.async.wait_group {groups};")


def show_to_wgmma(threads: Warpgroup) -> None:
    """Lets wgmma see what this thread has copied to shared memory."""
    _run(threads, "fence.proxy.async.shared::cta;")


def descriptor(stage: Any) -> tuple[ir.Value, list[int]]:
    """The descriptor of a swizzled `Stages.x` for wgmma, and what each step adds to it."""
    i64 = ir.IntegerType.get_signless(64)
    (tokens, _) = ir.MemRefType(stage.type).shape
    start = arith.extui(i64, arith.shrui(address(stage), _i32(4)))
    kind = arith.constant(i64, ir.IntegerAttr.get(i64, _SWIZZLED))
    offsets = [8 * tokens * half + 2 * step for half in range(2) for step in range(STEPS // 2)]
    return arith.ori(start, kind), offsets


def _run(threads: Warpgroup, ptx: str) -> None:
    if threads.simulated:
        return

    @plgpu.inline_mgpu()
    def run(_):
        mgpu.utils.inline_ptx(ptx, has_side_effects=True)

    run()


def _i32(value: int) -> ir.Value:
    return mgpu.utils.c(value, ir.IntegerType.get_signless(32))


def pointer(array: Any) -> ir.Value:
    """The address of an array in global memory, i64."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(64), mgpu.utils.memref_ptr(array))


def advanced(pointer: ir.Value, count: ir.Value) -> ir.Value:
    """The address some bytes later."""
    return arith.addi(pointer, arith.extui(pointer.type, count))


def address(shared: Any) -> ir.Value:
    """The address of an array in shared memory, i32."""
    i32 = ir.IntegerType.get_signless(32)
    return llvm.ptrtoint(i32, mgpu.utils.memref_ptr(shared))


def read(
    stage: Any, group: int, column_tile: int, *, parts: Sequence[int] = (0, 1), apart: bool = False
) -> list[tuple[ir.Value, ir.Value]]:
    """The second operands of the products of eight tokens and of the columns of a tile.

    `stage` is `Stages.x` of a stage, in which the tile's columns have an index. With `apart` a warp
    reads the columns as many tiles later as its number says. For each step of 16 columns there are
    two pairs of bfloat16; `parts` are the halves of the columns that are read.
    """
    pitch = ir.MemRefType(stage.type).shape[1]
    lane = arith.remui(mgpu.utils.thread_idx(), _i32(32))
    row, eight = arith.remui(lane, _i32(8)), arith.divui(lane, _i32(8))  # of four matrices
    own = arith.addi(arith.muli(row, _i32(2 * pitch)), arith.muli(eight, _i32(_CHUNK)))
    base = arith.addi(address(stage), own)
    if apart:
        warp = arith.divui(mgpu.utils.thread_idx(), _i32(32))
        base = arith.addi(base, arith.muli(warp, _i32(2 * TILE_COLUMNS)))
    words = []
    for i in (STEPS // 4 * part + i for part in parts for i in range(STEPS // 4)):
        offset = 2 * (8 * group * pitch + TILE_COLUMNS * column_tile + 32 * i)
        words += read_matrices(base, offset)
    return list(zip(words[::2], words[1::2], strict=True))


def read_matrices(base: ir.Value, offset: int) -> list[ir.Value]:
    """Four 8 x 8 matrices of bfloat16, of which a lane says where a row begins: pairs, i32."""
    words: Any = mgpu.utils.inline_ptx(
        f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$0, $1, $2, $3}}, [$4+{offset}];",
        base,
        result_types=[ir.IntegerType.get_signless(32)] * 4,
        has_side_effects=True,
        convergent=True,
    )
    return words
