"""The whole weight in bfloat16, for products with its transpose by another library."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import nvvm

from pallas_kernels.fp4_matmul import layout
from pallas_kernels.fp4_matmul.layout import Fp4Tiles
from pallas_kernels.fp4_matmul.sm90.codes import (
    CODES,
    OPERAND,
    dequantize_reference,
    dequantize_tile,
    scales_layout,
)
from pallas_kernels.fp4_matmul.sm90.synchronize import fence_async_proxy
from pallas_kernels.fp4_matmul.tiling import (
    TILE_COLUMNS,
    TILE_ROWS,
    compute_registers,
    helper_registers,
)

_ROWS = 4  # consumer warpgroups, a row tile each
_STAGES = 4  # depth of the pipeline
_BUFFERS = 2  # results of a warpgroup on their way to global memory


def dequantize(
    weight: Fp4Tiles,
    *,
    inputs: int,
    num_sms: int,
    part: tuple[jax.Array, int] | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """Returns the weight [N, K] in bfloat16; `inputs` is K.

    With a `part` it returns some whole tiles of rows: int32 [1], the first one, and their number.
    XLA would copy a slice of the weight, and compile a kernel for each.
    """
    n = weight.shape[0]
    row_tiles, column_tiles, _ = weight.codes.shape
    padding = row_tiles * TILE_ROWS - n
    first, n = ((), n) if part is None else (part[:1], part[1] * TILE_ROWS)
    row_tiles_out = -(-n // TILE_ROWS)
    shape = row_tiles_out * TILE_ROWS, column_tiles * TILE_COLUMNS
    units = -(-row_tiles_out // _ROWS) * column_tiles
    blocks = min(units, num_sms)
    kernel = plgpu.kernel(
        functools.partial(_body, row_tiles, units, blocks, interpret is not None),
        out_type=jax.ShapeDtypeStruct(shape, jnp.bfloat16),
        scratch_types={
            "codes_sm": plgpu.SMEM((_STAGES, _ROWS, 4, 256), jnp.uint32),
            "scales_sm": plgpu.SMEM((_STAGES, _ROWS, weight.scales.shape[-1]), jnp.uint32),
            "out_sm": plgpu.SMEM(
                (_BUFFERS, _ROWS, TILE_ROWS, TILE_COLUMNS), jnp.bfloat16, transforms=OPERAND
            ),
            "full": plgpu.Barrier(num_barriers=_STAGES, num_arrivals=2),
            "empty": plgpu.Barrier(num_barriers=_STAGES, num_arrivals=_ROWS),
        },
        grid=(blocks,),
        grid_names=("block",),
        num_threads=_ROWS + 1,
        thread_name="warpgroup",
        kernel_name="fp4_dequantize_sm90",
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        interpret=interpret,
    )
    dense = kernel(
        weight.codes.reshape(row_tiles, column_tiles, 4, 256),
        weight.scales,
        jnp.pad(weight.divisor, (0, padding), constant_values=1),
        *first,
    )
    return dense[:n, :inputs]


def _body(
    row_tiles: int,
    units: int,
    blocks: int,
    simulated: bool,
    codes_gm,
    scales_gm,
    divisor_gm,
    *first_and_out,
    codes_sm,
    scales_sm,
    out_sm,
    full,
    empty,
) -> None:
    """The kernel: a unit is `_ROWS` row tiles of a column tile."""
    *first, out_gm = first_and_out
    offset = first[0][0] if first else None

    def source(row):
        """The row tile of the weight of one of the result."""
        return row if offset is None else offset + row

    warpgroup, block = lax.axis_index("warpgroup"), lax.axis_index("block")
    count = lax.div(units - block + blocks - 1, blocks)
    column_tiles = out_gm.shape[1] // TILE_COLUMNS

    def tiles_of(i):
        """First row tile, and column tile, of the CTA's i-th unit."""
        unit = block + i * blocks
        return lax.div(unit, column_tiles) * _ROWS, lax.rem(unit, column_tiles)

    @pl.when(warpgroup == _ROWS)
    def produce():
        plgpu.set_max_registers(helper_registers(_ROWS), action="decrease")

        @pl.loop(0, count)
        def fill_stage(i):
            slot = lax.rem(i, _STAGES)

            @pl.when(i >= _STAGES)
            def await_consumers():
                plgpu.barrier_wait(empty.at[slot])
                if not simulated:
                    fence_async_proxy(nvvm.ProxyKind.async_shared)

            row, column = tiles_of(i)
            tiles = (pl.ds(source(row), _ROWS), column)
            plgpu.copy_gmem_to_smem(codes_gm.at[tiles], codes_sm.at[slot], full.at[slot])
            plgpu.copy_gmem_to_smem(scales_gm.at[tiles], scales_sm.at[slot], full.at[slot])

        for i in range(_STAGES):

            @pl.when(i < count)
            def observe_last_phase(i=i):
                plgpu.barrier_wait(empty.at[lax.rem(count - 1 - i, _STAGES)])

    @pl.when(warpgroup < _ROWS)
    def consume():
        plgpu.set_max_registers(compute_registers(_ROWS), action="increase")

        @pl.loop(0, count)
        def dequantize_unit(i):
            slot, buffer = lax.rem(i, _STAGES), lax.rem(i, _BUFFERS)
            row, column = tiles_of(i)
            row += warpgroup
            plgpu.barrier_wait(full.at[slot])
            halves = _halves(codes_sm, scales_sm, (slot, warpgroup), simulated)
            plgpu.barrier_arrive(empty.at[slot])
            factor = _factor(divisor_gm, jnp.minimum(source(row), row_tiles - 1) * TILE_ROWS)
            plgpu.wait_smem_to_gmem(_BUFFERS - 1, wait_read_only=True)
            for half, value in enumerate(halves):
                value = (value.astype(jnp.float32) * factor).astype(jnp.bfloat16)
                out_sm[buffer, warpgroup, :, 64 * half : 64 * half + 64] = value
            plgpu.commit_smem()
            target = (
                pl.ds(row * TILE_ROWS, TILE_ROWS),
                pl.ds(column * TILE_COLUMNS, TILE_COLUMNS),
            )
            plgpu.copy_smem_to_gmem(out_sm.at[buffer, warpgroup], out_gm.at[target])

        plgpu.wait_smem_to_gmem(0)


def _halves(codes: Any, scales: Any, place: tuple, simulated: bool) -> Any:
    """The columns 0..63 and 64..127 of a tile in shared memory, without the divisors."""
    if simulated:
        value = dequantize_reference(codes[place], scales[place])
        return value[:, :64], value[:, 64:]
    return dequantize_tile(
        plgpu.load(codes.at[place], layout=CODES),
        plgpu.load(scales.at[place], layout=scales_layout(scales.shape[-1])),
    )


def _factor(divisor: Any, first: Any) -> jax.Array:
    """What 64 rows of the weight are multiplied by, [64, 64]."""
    divisor = plgpu.load(
        divisor.at[pl.ds(first, TILE_ROWS)],
        layout=plgpu.Layout.WGMMA.reduce(1),
        optimized=False,
    )
    return lax.broadcast_in_dim(layout.UNIT / divisor, (TILE_ROWS, 64), (0,))
