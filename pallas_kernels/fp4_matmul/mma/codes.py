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

from pallas_kernels import warp_mma
from pallas_kernels.fp4_matmul import layout
from pallas_kernels.fp4_matmul.sm90.codes import (
    CODES,
    dequantize_reference,
    scaled_pairs,
    scales_layout,
)
from pallas_kernels.fp4_matmul.tiling import TILE_COLUMNS, TILE_ROWS
from pallas_kernels.warpgroup import Warpgroup

STEPS = 8  # of 16 columns, in a tile
# Results of mma.sync and of wgmma are alike: each warp has 16 rows, a thread pairs of columns.
PAIRS = plgpu.Layout.WGMMA


def dequantize_tile(threads: Warpgroup, codes: jax.Array, scales: jax.Array) -> jax.Array:
    """Dequantizes codes [4, 256] and scales to a bfloat16 tile [64, 128], over UNIT."""
    if threads.simulated:
        return dequantize_reference(codes, scales)
    shape = TILE_ROWS, TILE_COLUMNS
    result = plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.bfloat16), layout=PAIRS)

    layouts = CODES, scales_layout(*scales.shape)

    @plgpu.inline_mgpu(arg_types=layouts, return_type=result)
    def dequantize(_, codes, scales):
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        steps = operands(list(codes.registers.flat), list(scales.registers.flat))
        pairs = [mgpu.utils.bitcast(word, pair) for step in steps for word in step]
        return warp_mma.array(pairs, PAIRS, shape)

    return dequantize(codes, scales)


def operands(
    codes: Sequence[Any], scales: Sequence[Any], parts: Sequence[int] = (0, 1)
) -> list[list[Any]]:
    """The first operands of the products of a tile, for `warp_mma.add_product`.

    Codes are vectors of four words, scales of two, one of row r and one of row r + 8 each. For each
    step of 16 columns there are four pairs of bfloat16, over UNIT. The steps are those of the first
    half of the columns, part 0, and of the second one, part 1.
    """
    steps: list[list[Any]] = [[None] * 4 for _ in range(STEPS)]
    scale_bits = f"mov.b32 $0, {layout.SCALE_BITS};"
    multiply = "{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, scale, zero; }"
    for half, part, q, pair in scaled_pairs(codes, scales, scale_bits, multiply, parts):
        steps[4 * part + q // 2][half + q % 2 * 2] = pair
    return [step for step in steps if step[0] is not None]
