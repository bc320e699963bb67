"""Dequantizes codes and scales in registers to the operands of mma.sync.

A thread's codes in tile order are its operands of mma.sync exactly as they are those of wgmma. The
Hopper kernel multiplies them by their scales with mul.bf16x2, which older GPUs lack: here it is a
fused multiply-add of -0, which rounds alike and keeps the sign of zero.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_kernels import warp_mma
from pallas_kernels.fp4_matmul import layout
from pallas_kernels.fp4_matmul.sm90.codes import CODES, SCALES, dequantize_reference
from pallas_kernels.fp4_matmul.tiling import TILE_COLUMNS, TILE_ROWS
from pallas_kernels.warpgroup import Warpgroup

STEPS = 8  # of 16 columns, in a tile
# Results of mma.sync and of wgmma are alike: each warp has 16 rows, a thread pairs of columns.
PAIRS = plgpu.Layout.WGMMA


def dequantize_tile(threads: Warpgroup, codes: jax.Array, scales: jax.Array) -> jax.Array:
    """Dequantizes codes [4, 256] and scales [128] to a bfloat16 tile [64, 128], over UNIT."""
    if threads.simulated:
        return dequantize_reference(codes, scales)
    shape = TILE_ROWS, TILE_COLUMNS
    result = plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.bfloat16), layout=PAIRS)

    @plgpu.inline_mgpu(arg_types=(CODES, SCALES), return_type=result)
    def dequantize(_, codes, scales):
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        steps = operands(list(codes.registers.flat), list(scales.registers.flat))
        pairs = [mgpu.utils.bitcast(word, pair) for step in steps for word in step]
        return warp_mma.array(pairs, PAIRS, shape)

    return dequantize(codes, scales)


def operands(codes: Sequence[Any], scales: Sequence[Any]) -> list[list[Any]]:
    """The first operands of the products of a tile, for `warp_mma.add_product`.

    Args:
        codes: vectors of four words, one of row r and one of row r + 8.
        scales: vectors of two words, one of row r and one of row r + 8.

    Returns:
        For each step of 16 columns four pairs of bfloat16, over UNIT.
    """
    i32 = ir.IntegerType.get_signless(32)

    def constant(value):
        return arith.constant(i32, ir.IntegerAttr.get(i32, value - (value >> 31 << 32)))

    def rotate(word, left):
        if left <= 6:  # No bit of the mask wraps around, and plain shifts have a separate pipe.
            return arith.shli(word, constant(left)) if left else word
        return mgpu.utils.inline_ptx(f"shf.l.wrap.b32 $0, $1, $1, {left};", word, result_types=i32)

    mask = constant(layout.MASK)
    mix = mgpu.utils.inline_ptx(f"mov.b32 $0, {layout.MIX};", result_types=i32)
    scale_mask, scale_bits = constant(layout.SCALE_MASK), constant(layout.SCALE_BITS)
    steps: list[list[Any]] = [[None] * 4 for _ in range(STEPS)]
    for half in range(2):  # the rows r and r + 8
        for part in range(2):  # columns 0..63 and 64..127
            first, second = (vector.extract(codes[half], [], [2 * part + i]) for i in (0, 1))
            mixed = arith.xori(arith.andi(arith.xori(first, second), mix), second)
            sources = (first, first, first, second, second, second, mixed, mixed)
            word = vector.extract(scales[half], [], [part])
            pairs = [
                arith.ori(arith.andi(rotate(word, turn), scale_mask), scale_bits) for turn in (0, 8)
            ]
            for q, (source, turn) in enumerate(zip(sources, layout.ROTATIONS, strict=True)):
                raw = arith.andi(rotate(source, turn), mask)
                which = "low" if q // 2 % 2 == 0 else "high"
                # ptxas turns the moves into the choice of an operand's half.
                steps[4 * part + q // 2][half + q % 2 * 2] = mgpu.utils.inline_ptx(
                    "{ .reg .b16 low, high; .reg .b32 scale, zero; mov.b32 {low, high}, $2; "
                    f"mov.b32 scale, {{{which}, {which}}}; mov.b32 zero, 0x80008000; "
                    "fma.rn.bf16x2 $0, $1, scale, zero; }",
                    raw,
                    pairs[q // 4],
                    result_types=i32,
                )
    return steps
