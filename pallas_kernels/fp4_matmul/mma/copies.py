"""Columns of x on their way through shared memory: cp.async in, ldmatrix out."""

from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.fp4_matmul.mma.codes import STEPS
from pallas_kernels.fp4_matmul.tiling import TILE_COLUMNS
from pallas_kernels.warpgroup import WARPS, Warpgroup

_CHUNK = 8  # numbers of a copy of a thread, 16 bytes
_THREADS = 32 * WARPS


def start(threads: Warpgroup, x: Any, stage: Any, column: Any, end: Any) -> None:
    """Starts to copy columns of x to a stage, and closes the group of copies.

    Args:
        threads: the threads of the CTA.
        x: bfloat16 [M, K] in global memory.
        stage: bfloat16 [M', P] in shared memory, M' the next multiple of 8 from M on; P is the
            number of columns and what lies between two rows.
        column: the first column.
        end: columns from here on, and rows from M on, become zero.
    """
    (m, k), (tokens, pitch) = x.shape, stage.shape
    width = pitch - pitch % TILE_COLUMNS
    end = jnp.minimum(end, k)
    if threads.simulated:
        whole = jnp.pad(x[...], ((0, tokens - m), (0, 0)))
        index = column + jnp.arange(width)
        stage[:, :width] = jnp.where(index < end, whole[:, jnp.minimum(index, k - 1)], 0)
        return
    chunks = width // _CHUNK  # of a row
    assert chunks <= _THREADS
    rows = _THREADS // chunks  # of x, that the threads copy at a time

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT, plgpu.Layout.WG_SPLAT)
    )
    def copy(_, x, stage, column, end):
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        thread = mgpu.utils.thread_idx()
        row = arith.divui(thread, mgpu.utils.c(chunks, i32))
        chunk = arith.remui(thread, mgpu.utils.c(chunks, i32))
        offset = arith.muli(chunk, mgpu.utils.c(_CHUNK, i32))
        first = arith.addi(column.registers.item(), offset)
        inside = arith.cmpi(arith.CmpIPredicate.slt, first, end.registers.item())
        size = arith.select(inside, mgpu.utils.c(2 * _CHUNK, i32), mgpu.utils.c(0, i32))
        place = arith.addi(arith.muli(row, mgpu.utils.c(k, i32)), first)
        source = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(x))
        source = arith.addi(source, arith.extsi(i64, arith.muli(place, mgpu.utils.c(2, i32))))
        target = address(stage)
        target = arith.addi(target, arith.muli(row, mgpu.utils.c(2 * pitch, i32)))
        target = arith.addi(target, arith.muli(offset, mgpu.utils.c(2, i32)))
        for start in range(0, tokens, rows):
            count = size
            if start + rows > m:
                there = arith.cmpi(arith.CmpIPredicate.slt, row, mgpu.utils.c(m - start, i32))
                count = arith.select(there, size, mgpu.utils.c(0, i32))
            places = f"[$0+{2 * start * pitch}], [$1+{2 * start * k}]"
            mgpu.utils.inline_ptx(
                f"cp.async.cg.shared.global {places}, 16, $2;",
                target,
                source,
                count,
                has_side_effects=True,
            )
        mgpu.utils.inline_ptx("cp.async.commit_group;", has_side_effects=True)

    copy(x, stage, column, end)


def wait(threads: Warpgroup, groups: int) -> None:
    """Waits until all but the last groups of this thread's copies are there."""
    if threads.simulated:
        return

    @plgpu.inline_mgpu()
    def await_copies(_):
        mgpu.utils.inline_ptx(f"cp.async.wait_group {groups};", has_side_effects=True)

    await_copies()


def address(shared: Any) -> ir.Value:
    """The address of an array in shared memory, i32."""
    i32 = ir.IntegerType.get_signless(32)
    return llvm.ptrtoint(i32, mgpu.utils.memref_ptr(shared))


def read(stage: Any, group: int, column_tile: int) -> list[tuple[ir.Value, ir.Value]]:
    """The second operands of the products of a tile's columns and eight tokens.

    Args:
        stage: a stage of `start`.
        group: index of the eight tokens.
        column_tile: index of the tile's columns in the stage.

    Returns:
        For each step of 16 columns two pairs of bfloat16.
    """
    i32 = ir.IntegerType.get_signless(32)
    pitch = ir.MemRefType(stage.type).shape[1]
    lane = arith.andi(mgpu.utils.thread_idx(), mgpu.utils.c(31, i32))
    row = arith.andi(lane, mgpu.utils.c(7, i32))
    eight = arith.shrui(lane, mgpu.utils.c(3, i32))  # a matrix of eight columns
    place = arith.addi(
        arith.muli(row, mgpu.utils.c(2 * pitch, i32)), arith.muli(eight, mgpu.utils.c(16, i32))
    )
    base = arith.addi(address(stage), place)
    words = []
    for i in range(STEPS // 2):
        offset = 2 * (8 * group * pitch + TILE_COLUMNS * column_tile + 32 * i)
        words += mgpu.utils.inline_ptx(
            f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$0, $1, $2, $3}}, [$4+{offset}];",
            base,
            result_types=[i32] * 4,
            has_side_effects=True,
            convergent=True,
        )
    return list(zip(words[::2], words[1::2], strict=True))
