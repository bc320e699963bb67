"""The SwiGLU epilogue: a thread has outputs of the gate and the outputs that they multiply.

Row tiles are paired for it: by eights, their rows are rows of the gate and of the other half of the
weight in turn, as a thread has the rows r and r + 8 of the accumulator. The normalization before
the product is deferred: its factor is applied here, and `mean_squares` adds it up meanwhile.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

_LOG2_E = 1.4426950408889634
_ROWS = 32  # rows of a paired tile in each half of the weight

# A number for each of 32 rows: a warp has eight, a lane one.
_NUMBERS = plgpu.Layout.TILED(
    plgpu.Tiling(((_ROWS,), (8,), (1,))),
    warp_dims=(-3,),
    lane_dims=(-2, plgpu.Replicated(4)),
    vector_dim=-1,
)
# Half of an accumulator, transposed to tokens by 32 outputs.
_TRANSPOSED = plgpu.Layout.TILED(
    plgpu.Tiling(((8, _ROWS), (8, 8), (2, 1))),
    warp_dims=(-5,),
    lane_dims=(-3, -4),
    vector_dim=-1,
)


def load_numbers(numbers: Any, gates: Any, others: Any, *, simulated: bool) -> jax.Array:
    """Loads a number for each row [64] of a paired tile from [N] in global memory.

    `gates` are the tile's 32 rows of the gate, `others` those of the other half. The interpreter
    takes no inline code.
    """
    if simulated:
        return interleave(numbers[gates], numbers[others])
    result = plgpu.ShapeDtypeStruct(
        (2 * _ROWS,), numbers.dtype, layout=plgpu.Layout.WGMMA.reduce(1)
    )

    @plgpu.inline_mgpu(arg_types=([_NUMBERS] * 2,), return_type=result)
    def both(_, halves):
        layout = plgpu.Layout.WGMMA.reduce(1).to_mgpu()
        out = np.empty(layout.registers_shape(result.shape), dtype=object)
        out.flat[:] = [half.registers.item() for half in halves]
        return mgpu.FragmentedArray(_registers=out, _layout=layout, _is_signed=None)

    return both(
        [plgpu.load(numbers.at[i], layout=_NUMBERS, optimized=False) for i in (gates, others)]
    )


def apply(value: jax.Array, factor: Any, *, simulated: bool) -> jax.Array:
    """SwiGLU of a paired tile, bfloat16 [T, 32] of a float32 product [64, T].

    The factor of the product's norm, float32 [T], is in shared memory. The interpreter takes no
    inline code.
    """
    if simulated:
        gate, up = (x.reshape(_ROWS, -1).T for x in value.reshape(4, 2, 8, -1).swapaxes(0, 1))
        factor = factor[...]
    else:
        gate, up = _halves(value)
        factor = plgpu.load(factor, layout=_TRANSPOSED.reduce(1))
    over = lax.broadcast_in_dim(factor, gate.shape, (0,))
    # Rounded where a projection of normalized tokens would be.
    gate, up = ((x * over).astype(jnp.bfloat16).astype(jnp.float32) for x in (gate, up))
    active = (gate / (1.0 + jnp.exp2(-_LOG2_E * gate))).astype(jnp.bfloat16)
    return (active.astype(jnp.float32) * up).astype(jnp.bfloat16)


def interleave(gate: jax.Array, other: jax.Array) -> jax.Array:
    """The rows [64] of a paired tile: 32 of the gate and 32 of the other half, by eights."""
    shape = _ROWS // 8, 8, *gate.shape[1:]
    both = jnp.stack([gate.reshape(shape), other.reshape(shape)], axis=1)
    return both.reshape(2 * _ROWS, *gate.shape[1:])


def _halves(value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Divides [64, T] into the gate and the other half, both transposed to [T, 32]."""
    result = plgpu.ShapeDtypeStruct((value.shape[1], _ROWS), value.dtype, layout=_TRANSPOSED)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=(result, result))
    def halves(_, value):
        layout = _TRANSPOSED.to_mgpu()
        one = layout.registers_element_type(ir.F32Type.get())
        both = []
        for half in range(2):
            out = np.empty(layout.registers_shape(result.shape), dtype=object)
            for i in range(result.shape[0] // 8):
                pair = value.registers[0, i, 0, 0, half, 0, 0, 0, 0]
                for column in range(2):
                    number = vector.extract(pair, [], [column])
                    out.flat[2 * i + column] = vector.broadcast(one, number)
            both.append(mgpu.FragmentedArray(_registers=out, _layout=layout, _is_signed=None))
        return tuple(both)

    return halves(value)
