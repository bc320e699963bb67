"""The whole weight in bfloat16, for products with its transpose by another library."""

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
    SCALES,
    decode_reference,
    decode_tile,
)
from pallas_kernels.fp4_matmul.sm90.synchronize import fence_async_proxy
from pallas_kernels.fp4_matmul.tiling import (
    TILE_COLUMNS,
    TILE_ROWS,
    compute_registers,
    helper_registers,
)


def dequantize(
    weight: Fp4Tiles,
    *,
    inputs: int,
    num_sms: int,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """The weight in bfloat16, [N, K]: for products with its transpose by another library.

    Args:
        weight: [N, K].
        inputs: K.
        num_sms: blocks of threads that run at a time.
        interpret: simulate on a CPU.
    """
    rows, stages, buffers = 4, 4, 2
    simulated = interpret is not None
    n = weight.shape[0]
    row_tiles, column_tiles, _ = weight.codes.shape
    shape = row_tiles * TILE_ROWS, column_tiles * TILE_COLUMNS
    units = -(-row_tiles // rows) * column_tiles
    blocks = min(units, num_sms)

    def place(block, i):
        """Row tile and column tile of a block's i-th unit."""
        unit = block + i * blocks
        return lax.div(unit, column_tiles) * rows, lax.rem(unit, column_tiles)

    def body(codes_gm, scales_gm, divisor_gm, out_gm, *, codes_sm, scales_sm, out_sm, full, empty):
        warpgroup, block = lax.axis_index("warpgroup"), lax.axis_index("block")
        count = lax.div(units - block + blocks - 1, blocks)

        @pl.when(warpgroup == rows)
        def _():
            plgpu.set_max_registers(helper_registers(rows), action="decrease")

            @pl.loop(0, count)
            def _(i):
                slot = lax.rem(i, stages)

                @pl.when(i >= stages)
                def _():
                    plgpu.barrier_wait(empty.at[slot])
                    if not simulated:
                        fence_async_proxy(nvvm.ProxyKind.async_shared)

                row, column = place(block, i)
                tiles = (pl.ds(row, rows), column)
                plgpu.copy_gmem_to_smem(codes_gm.at[tiles], codes_sm.at[slot], full.at[slot])
                plgpu.copy_gmem_to_smem(scales_gm.at[tiles], scales_sm.at[slot], full.at[slot])

            for i in range(stages):

                @pl.when(i < count)
                def _(i=i):
                    plgpu.barrier_wait(empty.at[lax.rem(count - 1 - i, stages)])

        @pl.when(warpgroup < rows)
        def _():
            plgpu.set_max_registers(compute_registers(rows), action="increase")

            @pl.loop(0, count)
            def _(i):
                slot, buffer = lax.rem(i, stages), lax.rem(i, buffers)
                row, column = place(block, i)
                row += warpgroup
                plgpu.barrier_wait(full.at[slot])
                if simulated:
                    value = decode_reference(codes_sm[slot, warpgroup], scales_sm[slot, warpgroup])
                    halves = value[:, :64], value[:, 64:]
                else:
                    halves = decode_tile(
                        plgpu.load(codes_sm.at[slot, warpgroup], layout=CODES),
                        plgpu.load(scales_sm.at[slot, warpgroup], layout=SCALES),
                    )
                plgpu.barrier_arrive(empty.at[slot])
                clamped = jnp.minimum(row, row_tiles - 1) * TILE_ROWS
                divisor = plgpu.load(
                    divisor_gm.at[pl.ds(clamped, TILE_ROWS)],
                    layout=plgpu.Layout.WGMMA.reduce(1),
                    optimized=False,
                )
                factor = lax.broadcast_in_dim(layout.UNIT / divisor, (TILE_ROWS, 64), (0,))
                plgpu.wait_smem_to_gmem(buffers - 1, wait_read_only=True)
                for half, value in enumerate(halves):
                    value = (value.astype(jnp.float32) * factor).astype(jnp.bfloat16)
                    out_sm[buffer, warpgroup, :, 64 * half : 64 * half + 64] = value
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(
                    out_sm.at[buffer, warpgroup],
                    out_gm.at[
                        pl.ds(row * TILE_ROWS, TILE_ROWS),
                        pl.ds(column * TILE_COLUMNS, TILE_COLUMNS),
                    ],
                )

            plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(shape, jnp.bfloat16),
        scratch_types={
            "codes_sm": plgpu.SMEM((stages, rows, 4, 256), jnp.uint32),
            "scales_sm": plgpu.SMEM((stages, rows, 128), jnp.uint32),
            "out_sm": plgpu.SMEM(
                (buffers, rows, TILE_ROWS, TILE_COLUMNS), jnp.bfloat16, transforms=OPERAND
            ),
            "full": plgpu.Barrier(num_barriers=stages, num_arrivals=2),
            "empty": plgpu.Barrier(num_barriers=stages, num_arrivals=rows),
        },
        grid=(blocks,),
        grid_names=("block",),
        num_threads=rows + 1,
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
        jnp.pad(weight.divisor, (0, shape[0] - n), constant_values=1),
    )
    return dense[:n, :inputs]
