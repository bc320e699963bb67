"""The epilogue that adds a product to the residual and writes an RMSNorm's partial mean squares.

The kernel that reads the result applies the factor of the norm, one number for each token: see
`mean_squares.write_factor`. So no CTA waits for the outputs of another.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_kernels.fp4_matmul.tiling import TILE_ROWS

# Tokens by 64 outputs, each number in the lane in which the transposed accumulator has it.
_TRANSPOSED = plgpu.Layout.TILED(
    plgpu.Tiling(((8, TILE_ROWS), (8, 16), (8, 8), (2, 1))),
    warp_dims=(-7,),
    lane_dims=(-3, -4),
    vector_dim=-1,
)
# A number of each warp for each token: a lane has two numbers, and eight lanes the same ones.
_OF_WARPS = plgpu.Layout.TILED(
    plgpu.Tiling(((4, 8), (2,))),
    warp_dims=(-3,),
    lane_dims=(plgpu.Replicated(8), -2),
    vector_dim=-1,
)
PARTIALS_OF_ROW_TILE = 4  # partial mean squares of a row tile, one for each warp


def load(residual: Any) -> jax.Array:
    """Loads the residual [T, 64] from global memory, as the accumulator has it: [64, T]."""
    tokens = residual.shape[0]
    result = plgpu.ShapeDtypeStruct((TILE_ROWS, tokens), residual.dtype, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(_TRANSPOSED,), return_type=result)
    def transposed(_, read):
        out = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(result.shape), dtype=object)
        pair = mgpu.WGMMA_LAYOUT.registers_element_type(ir.BF16Type.get())
        for i in range(tokens // 8):
            for half in range(2):  # the rows r and r + 8
                numbers = [
                    vector.extract(read.registers[i, 0, 0, 0, 0, half, 0, 0, j, 0], [], [0])
                    for j in range(2)
                ]
                out[0, i, 0, 0, half, 0, 0, 0, 0] = vector.from_elements(pair, numbers)
        return mgpu.FragmentedArray(_registers=out, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return transposed(plgpu.load(residual, layout=_TRANSPOSED, optimized=False))


def add(
    value: jax.Array, residual: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The sum of a product and the residual, the sum scaled, and sums of the sum's squares.

    The product is float32 [64, T], with 64 outputs, the residual a result of `load`, and the scale
    of the norm float32 [64]. The results are float32: two [64, T], of which the first has values of
    bfloat16, and [4, T], one sum for the outputs of each warp.
    """
    # Rounded where a stored product would be.
    total = value.astype(jnp.bfloat16).astype(jnp.float32) + residual.astype(jnp.float32)
    total = total.astype(jnp.bfloat16).astype(jnp.float32)
    return total, total * lax.broadcast_in_dim(scale, total.shape, (0,)), _squares(total)


def _squares(value: jax.Array) -> jax.Array:
    """The sums of the squares of 16 outputs each: float32 [4, T] of [64, T]."""
    tokens = value.shape[1]
    shape = PARTIALS_OF_ROW_TILE, tokens
    result = plgpu.ShapeDtypeStruct(shape, value.dtype, layout=_OF_WARPS)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=result)
    def summed(_, value):
        layout = _OF_WARPS.to_mgpu()
        out = np.empty(layout.registers_shape(result.shape), dtype=object)
        pair = layout.registers_element_type(ir.F32Type.get())
        for i in range(tokens // 8):
            numbers = []
            for column in range(2):
                upper, lower = (
                    vector.extract(value.registers[0, i, 0, 0, half, 0, 0, 0, 0], [], [column])
                    for half in range(2)
                )
                sum_ = arith.addf(arith.mulf(upper, upper), arith.mulf(lower, lower))
                for distance in (4, 8, 16):
                    sum_ = arith.addf(sum_, mgpu.utils.shfl_bfly(sum_, distance))
                numbers.append(sum_)
            out.flat[i] = vector.from_elements(pair, numbers)
        return mgpu.FragmentedArray(_registers=out, _layout=layout, _is_signed=None)

    return summed(value)
