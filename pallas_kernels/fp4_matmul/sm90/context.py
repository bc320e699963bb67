"""What the warpgroups of the kernel share: the tile schedule, global and shared memory."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fp4_matmul.sm90.schedule import TileSchedule
from pallas_kernels.fp4_matmul.sm90.xa_partials import XaPartials


@dataclasses.dataclass(frozen=True)
class GlobalMemory:
    """References to operands and results; None where the product has no such array."""

    x: Any  # bfloat16 [M, K], tokens
    codes: Any  # uint32 codes of the weight in tile order
    scales: Any  # uint32 scales of the weight in tile order
    divisor: Any  # float32 [N], divisors of the weight's rows
    y: Any  # result [M, N]; [N, M] in float32, [M, N / 2] after SwiGLU
    factor: Any = None  # float32 [m_tiles tile_m], factor of the norm before SwiGLU, simulated
    # float32 [S, M], partial mean squares: read before SwiGLU, written with a residual.
    square_partials: Any = None
    residual: Any = None  # bfloat16 [M, N], residual to add the product to
    scale: Any = None  # float32 [N], scale of the norm after the residual
    b: Any = None  # bfloat16 [N, R], B of the adapter
    a: Any = None  # bfloat16 [R', K], A of the adapter, if the kernel computes x A^T
    xa_partials: Any = None  # float32 [S, M', R'], partials of x A^T
    xa: Any = None  # bfloat16 [M', R], x A^T
    bias: Any = None  # [N], bias
    locks: Any = None  # int32 locks of split tiles and of x A^T
    scaled: Any = None  # bfloat16 [M, N], sum of product and residual times the norm's scale
    partial: Any = None  # float32 [slots, warpgroups_n, 64, tile_m], partial sums of split tiles


@dataclasses.dataclass(frozen=True)
class SharedMemory:
    """References to shared memory and barriers; None where the kernel has no such array."""

    x: Any  # tokens of each stage
    codes: Any  # codes of each stage
    scales: Any  # scales of each stage
    y: Any  # results on their way to global memory
    full: Any  # barriers at which the copies of a stage arrive
    empty: Any  # barriers at which the consumer warpgroups arrive when they have read a stage
    factor: Any = None  # float32 [m_tiles tile_m], factor of the norm before SwiGLU
    # Barrier at which the reducer warpgroup arrives when the factor is written.
    factor_full: Any = None
    partials_made: Any = None  # barrier at which the CTA's own partials of x A^T arrive
    parts: Any = None  # sums of the other CTAs of the cluster
    parts_full: Any = None  # barriers at which these sums arrive
    sums: Any = None  # sums of the slices after the first
    sums_full: Any = None  # barriers at which these slices arrive
    sums_empty: Any = None  # barriers at which the first slice arrives when it has read the sums


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What every warpgroup of the kernel has."""

    schedule: TileSchedule  # tile schedule
    gmem: GlobalMemory  # operands and results
    smem: SharedMemory  # shared memory and barriers
    xa_partials: XaPartials | None  # partials of x A^T and where their sum goes, or None


@dataclasses.dataclass(frozen=True)
class Consumer(Kernel):
    """What a consumer warpgroup has."""

    warpgroup: Any  # index of the warpgroup among the consumers
    registers: int  # number of registers of each of its threads
    block: Any  # index of the CTA
    row: Any  # index of the warpgroup along the outputs
    k_slice: Any  # index of the warpgroup along the columns of a stage

    def row_start(self, row_tile):
        """The first row of a row tile in the weight; beyond the weight, that of the last one."""
        last = self.schedule.row_tiles - 1
        return jnp.minimum(row_tile, last) * self.schedule.tile_outputs

    def paired_rows(self, row_start) -> list[pl.Slice]:
        """Rows of the gate and of what it multiplies, in a paired row tile."""
        height = self.schedule.tile_outputs
        return [
            pl.ds(start, height)
            for start in (row_start, self.schedule.row_tiles * height + row_start)
        ]


def load_rows(source: Any) -> jax.Array:
    """A matrix [64, .], or a number for each of 64 rows, from global memory to registers."""
    axis = plgpu.Layout.WGMMA if len(source.shape) == 2 else plgpu.Layout.WGMMA.reduce(1)
    return plgpu.load(source, layout=axis, optimized=False)


def over_tokens(numbers: jax.Array, tokens: int) -> jax.Array:
    """A number for each row, repeated for every token: [rows, tokens]."""
    return lax.broadcast_in_dim(numbers, (*numbers.shape, tokens), (0,))


def window(index: Any, size: int) -> Any:
    """The slice number `index` of an array in slices of a size, which may end after the array.

    The TMA fills what lies beyond the array with zeros. JAX refuses such a slice where it begins at
    a Python number, and does not lower one that begins at a constant array: the start is computed.
    """
    return pl.ds(jnp.int32(index) * size, size)
