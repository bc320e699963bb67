"""The Hopper kernel: copy engine, decode in registers, wgmma.

    y[M, N] = x[M, K] W[N, K]^T + xa[M, R] B[N, R]^T + bias

The decoded weight is the register operand of wgmma, 64 outputs high; the tokens are its narrow
side, read from shared memory. So the accumulator is [64, tile_m] and one kernel serves one token
and thousands.

A block of threads is persistent. One warpgroup copies stages of codes, scales and tokens to shared
memory; the others wait for a stage, decode their tiles of it (`layout` explains the bits) and
multiply. The only roundings are those of the float32 accumulation and of the stored bfloat16. At
the end of a tile the accumulator is scaled by the divisors of its rows, xa B^T is added as one more
step of K, and what several warpgroups or blocks of threads share is added up in a fixed order.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from pallas_kernels.fp4_matmul import layout
from pallas_kernels.fp4_matmul.layout import Fp4Tiles
from pallas_kernels.fp4_matmul.tiling import (
    SHARE_COLUMNS,
    SHARE_ROWS,
    TILE_COLUMNS,
    TILE_ROWS,
    TileConfig,
    compute_registers,
    copy_registers,
)

# A tile of codes: warp w has the rows 16 w.., a lane the words 4 c.. of its rows r and r + 8.
_CODES = plgpu.Layout.TILED(
    plgpu.Tiling(((4, 256), (128,), (16,), (4,))),
    warp_dims=(-5,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)
# A tile of scales: both words of the rows r and r + 8, the same in the four lanes of a row.
_SCALES = plgpu.Layout.TILED(
    plgpu.Tiling(((128,), (32,), (16,), (2,))),
    warp_dims=(-4,),
    lane_dims=(-2, plgpu.Replicated(4)),
    vector_dim=-1,
)
# A part of a share of x A^T: warp w has row w, a lane one of 32 columns.
_SHARE = plgpu.Layout.TILED(
    plgpu.Tiling(((SHARE_ROWS, SHARE_COLUMNS), (1,))),
    warp_dims=(-3,),
    lane_dims=(-2,),
    vector_dim=-1,
)
_SHARES_IN_FLIGHT = 8
_LOCKS = 4096
_HALF = plgpu.ShapeDtypeStruct((TILE_ROWS, 64), jnp.bfloat16, layout=plgpu.Layout.WGMMA)
_OPERAND = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def matmul(
    x: jax.Array,
    weight: Fp4Tiles,
    *,
    config: TileConfig,
    multiprocessors: int,
    xa: jax.Array | None = None,
    shares: jax.Array | None = None,
    b: jax.Array | None = None,
    bias: jax.Array | None = None,
    dtype: jnp.dtype = jnp.bfloat16,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """Returns x W^T + xa B^T + bias.

    Args:
        x: bfloat16 [M, K].
        weight: [N, K].
        config: the tiling.
        multiprocessors: blocks of threads that run at a time.
        xa: bfloat16 [M, R], x A^T; R a multiple of 64 up to config.block_k.
        shares: in its place float32 [S, M', R'], whose sum over S it is; M' is M in whole
            SHARE_ROWS, R' <= R a multiple of SHARE_COLUMNS.
        b: bfloat16 [N, R].
        bias: [N].
        dtype: of the result, bfloat16 or float32.
        interpret: simulate on a CPU. The decode is then plain jnp; the partial sums of a shared
            tile are added up outside of the kernel.

    Returns:
        [M, N].
    """
    n = weight.shape[0]
    tokens, k = x.shape
    row_tiles = weight.codes.shape[0]
    padded = row_tiles * TILE_ROWS
    # The copy engine wants whole or single tiles of 8 rows and 64 columns.
    m = tokens if tokens <= 8 else -(-tokens // 8) * 8
    simulated = interpret is not None
    rank = 0 if b is None else b.shape[1]
    plan = make_plan(config, m, row_tiles, k, multiprocessors)

    def rows_of(array):
        """Padded to whole tiles of rows; with ones, by which one can divide."""
        padding = ((0, padded - n), *((0, 0) for _ in array.shape[1:]))
        return jnp.pad(array, padding, constant_values=1)

    operands = {
        "x": jnp.pad(x, ((0, m - tokens), (0, -k % 64))),
        "codes": weight.codes.reshape(*weight.codes.shape[:2], 4, 256),
        "scales": weight.scales,
        "divisor": rows_of(weight.divisor),
    }
    # The copy engine transposes 16 bits. What it does not store has room for whole tiles.
    transposed = dtype == jnp.float32
    shape = plan.n_tiles * config.rows * TILE_ROWS, plan.m_tiles * config.tile_m
    results = {"y": jax.ShapeDtypeStruct(shape if transposed else (m, padded), dtype)}
    if b is not None:
        assert rank % 64 == 0
        assert rank <= config.block_k
        operands["b"] = rows_of(b)
    if shares is not None and simulated:
        xa = jnp.pad(shares.sum(axis=0)[:tokens], ((0, 0), (0, rank - shares.shape[2])))
        xa = xa.astype(x.dtype)
        shares = None
    if xa is not None:
        operands["xa"] = jnp.pad(xa, ((0, m - tokens), (0, 0)))
    if shares is not None:
        operands["shares"] = shares
        results["xa"] = jax.ShapeDtypeStruct((-(-tokens // 8) * 8, rank), jnp.bfloat16)
    if bias is not None:
        operands["bias"] = rows_of(bias)
    if plan.shared:
        shape = (plan.slots, config.rows, TILE_ROWS, config.tile_m)
        results["partial"] = jax.ShapeDtypeStruct(shape, jnp.float32)
    if plan.shared or shares is not None:
        # Zero before and after every call, for the kernel leaves them as it found them: so all
        # calls of a program share them, and their size hardly depends on the call. The first one
        # is that of the shares.
        locks = -(-(1 + plan.shared * config.rows) // _LOCKS) * _LOCKS
        operands["locks"] = jnp.zeros(locks, jnp.int32)
    body = functools.partial(_body, plan, (*operands, *results), simulated)
    kernel = plgpu.kernel(
        body,
        out_type=tuple(results.values()),
        scratch_types=_scratch(plan, rank, simulated),
        grid=(plan.blocks,),
        grid_names=("block",),
        num_threads=plan.config.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="fp4_matmul_sm90",
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        interpret=interpret,
    )
    outs = dict(zip(results, kernel(*operands.values()), strict=True))
    y = outs["y"].T[:, :padded] if transposed else outs["y"]
    if plan.shared and simulated:
        y = _add_partial(plan, y, outs["partial"], operands.get("bias"))
    return y[:tokens, :n]


def dequantize(
    weight: Fp4Tiles,
    *,
    inputs: int,
    multiprocessors: int,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """The weight in bfloat16, [N, K]: for products with its transpose by another library.

    Args:
        weight: [N, K].
        inputs: K.
        multiprocessors: blocks of threads that run at a time.
        interpret: simulate on a CPU.
    """
    rows, stages, buffers = 4, 4, 2
    simulated = interpret is not None
    n = weight.shape[0]
    row_tiles, column_tiles, _ = weight.codes.shape
    shape = row_tiles * TILE_ROWS, column_tiles * TILE_COLUMNS
    units = -(-row_tiles // rows) * column_tiles
    blocks = min(units, multiprocessors)

    def place(block, i):
        """Row tile and column tile of a block's i-th unit."""
        unit = block + i * blocks
        return lax.div(unit, column_tiles) * rows, lax.rem(unit, column_tiles)

    def body(codes_gm, scales_gm, divisor_gm, out_gm, *, codes_sm, scales_sm, out_sm, full, empty):
        warpgroup, block = lax.axis_index("warpgroup"), lax.axis_index("block")
        count = lax.div(units - block + blocks - 1, blocks)

        @pl.when(warpgroup == rows)
        def _():
            plgpu.set_max_registers(copy_registers(rows), action="decrease")

            @pl.loop(0, count)
            def _(i):
                slot = lax.rem(i, stages)

                @pl.when(i >= stages)
                def _():
                    plgpu.barrier_wait(empty.at[slot])
                    if not simulated:
                        _fence_async_proxy(nvvm.ProxyKind.async_shared)

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
                    value = _decode_reference(codes_sm[slot, warpgroup], scales_sm[slot, warpgroup])
                    halves = value[:, :64], value[:, 64:]
                else:
                    halves = _decode(
                        plgpu.load(codes_sm.at[slot, warpgroup], layout=_CODES),
                        plgpu.load(scales_sm.at[slot, warpgroup], layout=_SCALES),
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
                (buffers, rows, TILE_ROWS, TILE_COLUMNS), jnp.bfloat16, transforms=_OPERAND
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


@dataclasses.dataclass(frozen=True)
class Plan:
    """Who computes what. A step is one stage of K.

    A block computes whole tiles. When streamed, every block has the same number of them, and the
    tiles left over are shared: their steps form a line that is cut into equal runs, one a block.
    A run is no longer than a tile, so it touches two at most, and a block begins with it: its
    partial sums are on their way while it computes whole tiles.
    """

    config: TileConfig
    m_tiles: int
    n_tiles: int
    row_tiles: int
    steps: int  # of a tile
    blocks: int

    @property
    def tiles(self) -> int:
        """Tiles of the result."""
        return self.m_tiles * self.n_tiles

    @property
    def shared(self) -> int:
        """The first tiles, as many as are left over, are shared."""
        return self.tiles % self.blocks if self.config.stream else 0

    @property
    def sharing(self) -> int:
        """The first blocks, as many as have a run of shared steps."""
        return min(self.blocks, self.shared * self.steps)

    @property
    def slots(self) -> int:
        """Places for partial sums."""
        return self.sharing + self.shared - 1

    @property
    def most_sharers(self) -> int:
        """A bound on the blocks that share a tile: the inner ones have whole runs of it."""
        shortest = self.shared * self.steps // self.sharing
        return -(-(self.steps - 1) // shortest) + 1

    @property
    def unit(self) -> int:
        """Tokens that a sharer adds up at a time: if possible, each sharer has at most one unit.

        Up to 64, of which a thread holds 32 sums.
        """
        longest = -(-self.shared * self.steps // self.sharing)
        fewest_sharers = -(-self.steps // longest)
        tokens = min(64, -(-self.config.tile_m // (8 * fewest_sharers)) * 8)
        return next(unit for unit in range(tokens, 0, -8) if self.config.tile_m % unit == 0)

    @property
    def units(self) -> int:
        """Units of a tile."""
        return self.config.tile_m // self.unit

    @property
    def per_stage(self) -> int:
        """Tiles of 128 columns in a stage."""
        return self.config.block_k // TILE_COLUMNS

    def coordinates(self, tile) -> tuple[Any, Any]:
        """Tile of tokens and tile of outputs; tiles that run together share what is in the L2."""
        if self.m_tiles == 1:
            return jnp.int32(0), tile
        return plgpu.planar_snake(tile, (self.m_tiles, self.n_tiles), 0, 8)

    def pieces(self, block):
        """How many tiles, or parts of tiles, a block computes."""
        if not self.shared:
            return lax.div(self.tiles - block + self.blocks - 1, self.blocks)
        return self.shared_pieces(block) + self.tiles // self.blocks

    def shared_pieces(self, block):
        """How many of them, the first ones, are of shared tiles: 0 to 2."""
        first, last = self._first_step(block), self._first_step(block + 1) - 1
        return lax.div(last, self.steps) - lax.div(first, self.steps) + 1

    def piece(self, block, index):
        """The tile of a piece, its first step of K and its number of steps."""
        if not self.shared:
            return block + index * self.blocks, 0, self.steps
        first, end = self._first_step(block), self._first_step(block + 1)
        tile = lax.div(first, self.steps) + index
        begin = jnp.maximum(first, tile * self.steps)
        count = jnp.minimum(end, (tile + 1) * self.steps) - begin
        behind = index - self.shared_pieces(block)
        shared = behind < 0
        return (
            jnp.where(shared, tile, self.shared + block + behind * self.blocks),
            jnp.where(shared, begin - tile * self.steps, 0),
            jnp.where(shared, count, self.steps),
        )

    def share(self, block, index):
        """Whom a block adds up a tile with, and what of it.

        Args:
            block: the block.
            index: of the piece, 0 or 1.

        Returns:
            The tile; the first block that shares it; how many do, or 0 if the piece is a whole tile
            or there is none; the first of the units that this block adds up, and the one after the
            last.
        """
        tile, _, count = self.piece(block, index)
        partial = (index < self.shared_pieces(block)) & (count < self.steps)
        tile = jnp.where(partial, tile, 0)
        first, last = self._block_of(tile * self.steps), self._block_of((tile + 1) * self.steps - 1)
        sharers = last - first + 1
        begin, end = (lax.div((block - first + i) * self.units, sharers) for i in (0, 1))
        return tile, first, *(jnp.where(partial, i, 0) for i in (sharers, begin, end))

    def slot(self, block, tile):
        """Where a block leaves its partial sum of a tile; along the line, one of both rises."""
        return block + tile

    def _first_step(self, block):
        return lax.div(jnp.minimum(block, self.sharing) * self.shared * self.steps, self.sharing)

    def _block_of(self, step):
        """The last block that begins at or before a step."""
        return lax.div((step + 1) * self.sharing - 1, self.shared * self.steps)


def make_plan(config: TileConfig, m: int, row_tiles: int, k: int, multiprocessors: int) -> Plan:
    """The plan for M tokens, tiles of 64 rows and K columns."""
    m_tiles, n_tiles = -(-m // config.tile_m), -(-row_tiles // config.rows)
    steps = -(-k // config.block_k)
    work = m_tiles * n_tiles * (steps if config.stream else 1)
    return Plan(config, m_tiles, n_tiles, row_tiles, steps, min(work, multiprocessors))


def _scratch(plan: Plan, adapter: int, simulated: bool) -> dict:
    config = plan.config
    stage = (config.stages, config.rows, plan.per_stage)
    arrivals = 2 + plan.per_stage  # codes, scales, tokens by 128 columns
    scratch = {
        "x": plgpu.SMEM(
            (config.stages, plan.per_stage, config.tile_m, TILE_COLUMNS),
            jnp.bfloat16,
            transforms=_OPERAND,
        ),
        "codes": plgpu.SMEM((*stage, 4, 256), jnp.uint32),
        "scales": plgpu.SMEM((*stage, 128), jnp.uint32),
        "y": plgpu.SMEM((config.rows, config.tile_m, TILE_ROWS), jnp.bfloat16, transforms=_OPERAND),
        "full": plgpu.Barrier(num_barriers=config.stages, num_arrivals=arrivals),
        "empty": plgpu.Barrier(num_barriers=config.stages, num_arrivals=plan.config.warpgroups),
    }
    if adapter:
        scratch["xa_full"] = plgpu.Barrier(
            num_barriers=config.stages, num_arrivals=adapter_tiles(adapter)
        )
    if config.slices > 1:
        swizzle = plgpu.find_swizzle(config.tile_m * 32)
        scratch |= {
            "sums": plgpu.SMEM(
                (config.slices - 1, config.rows, TILE_ROWS, config.tile_m),
                jnp.float32,
                transforms=(
                    plgpu.TilingTransform((8, swizzle // 4)),
                    plgpu.SwizzleTransform(swizzle),
                ),
            ),
            "sums_full": plgpu.Barrier(num_barriers=config.rows, num_arrivals=config.slices - 1),
            "sums_empty": plgpu.Barrier(num_barriers=config.rows),
        }
    if simulated:
        scratch["a"] = plgpu.SMEM(
            (plan.config.warpgroups, TILE_ROWS, TILE_COLUMNS), jnp.bfloat16, transforms=_OPERAND
        )
    return scratch


def _body(plan: Plan, names: tuple[str, ...], simulated: bool, *refs, **sm):
    gm = dict(zip(names, refs, strict=True))
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == plan.config.warpgroups)
    def _():
        plgpu.set_max_registers(copy_registers(plan.config.warpgroups), action="decrease")
        _copy(plan, gm, sm, simulated)

    @pl.when(warpgroup < plan.config.warpgroups)
    def _():
        plgpu.set_max_registers(compute_registers(plan.config.warpgroups), action="increase")
        _compute(plan, gm, sm, simulated, warpgroup)


def adapter_tiles(rank: int) -> int:
    """Copies of 128 columns of xa; what they read beyond its columns is zero, and not used."""
    return -(-rank // TILE_COLUMNS)


def _ends_tile(plan, first, count):
    """Whether a piece holds the last step of its tile: the one that adds xa B^T."""
    return first + count == plan.steps


def _copy(plan: Plan, gm: dict[str, Any], sm: dict[str, Any], simulated: bool):
    """The warpgroup that fills the stages."""
    config = plan.config
    block = lax.axis_index("block")

    def acquire(i):
        slot = lax.rem(i, config.stages)

        @pl.when(i >= config.stages)
        def _():
            plgpu.barrier_wait(sm["empty"].at[slot])
            if not simulated:
                _fence_async_proxy(nvvm.ProxyKind.async_shared)

        return slot

    @pl.loop(0, plan.pieces(block), init_carry=jnp.int32(0))
    def total(index, done):
        tile, first, count = plan.piece(block, index)
        m_tile, n_tile = plan.coordinates(tile)
        tokens = pl.ds(m_tile * config.tile_m, config.tile_m)

        @pl.loop(0, count)
        def _(i):
            slot = acquire(done + i)
            columns = (first + i) * plan.per_stage
            tiles = (
                pl.ds(n_tile * config.rows, config.rows),
                pl.ds(columns, plan.per_stage),
            )
            plgpu.copy_gmem_to_smem(
                gm["codes"].at[tiles], sm["codes"].at[slot], sm["full"].at[slot]
            )
            plgpu.copy_gmem_to_smem(
                gm["scales"].at[tiles], sm["scales"].at[slot], sm["full"].at[slot]
            )
            for j in range(plan.per_stage):
                part = pl.ds((columns + j) * TILE_COLUMNS, TILE_COLUMNS)
                plgpu.copy_gmem_to_smem(
                    gm["x"].at[tokens, part], sm["x"].at[slot, j], sm["full"].at[slot]
                )
            if "shares" in gm:
                # While the first stages arrive.
                @pl.when((index == 0) & (i == jnp.minimum(count, config.stages) - 1))
                def _():
                    _add_shares(plan, gm)

        done += count
        if "b" not in gm:
            return done
        ends = _ends_tile(plan, first, count)

        @pl.when(ends)
        def _():
            slot = acquire(done)
            for j in range(adapter_tiles(gm["xa"].shape[1])):
                part = pl.ds(j * TILE_COLUMNS, TILE_COLUMNS)
                plgpu.copy_gmem_to_smem(
                    gm["xa"].at[tokens, part], sm["x"].at[slot, j], sm["xa_full"].at[slot]
                )

        return done + jnp.where(ends, 1, 0)

    # A kernel must not end before all arrivals at its barriers.
    for i in range(config.stages):

        @pl.when(i < total)
        def _(i=i):
            plgpu.barrier_wait(sm["empty"].at[lax.rem(total - 1 - i, config.stages)])


def _add_shares(plan: Plan, gm: dict[str, Any]):
    """Writes this block's parts of x A^T, and waits for those of the others."""
    block = _opaque(lax.axis_index("block"))
    count, rows, width = gm["shares"].shape
    columns = gm["xa"].shape[1] // SHARE_COLUMNS
    parts = rows // SHARE_ROWS * columns
    adders = min(plan.blocks, parts)
    batches = -(-count // _SHARES_IN_FLIGHT)
    batch = -(-count // batches)

    @pl.loop(0, lax.div(parts - block + plan.blocks - 1, plan.blocks))
    def _(turn):
        part = block + turn * plan.blocks
        row, column = lax.div(part, columns) * SHARE_ROWS, lax.rem(part, columns) * SHARE_COLUMNS
        place = pl.ds(row, SHARE_ROWS), pl.ds(column, SHARE_COLUMNS)
        zero = plgpu.layout_cast(jnp.zeros((SHARE_ROWS, SHARE_COLUMNS), jnp.float32), _SHARE)

        # What is behind the adapter's rank is zero.
        @pl.loop(0, jnp.where(column < width, batches, 0), init_carry=zero)
        def total(i, total):
            # The last batch begins with what has been added before, if it is not whole.
            begin = jnp.minimum(i * batch, count - batch)
            added = i * batch - begin
            for j in range(batch):
                share = gm["shares"].at[begin + j, *place]
                value = plgpu.load(share, layout=_SHARE, optimized=False)
                if batches * batch > count:
                    value = jnp.where(jnp.broadcast_to(j >= added, value.shape), value, zero)
                total += value
            return total

        gm["xa"].at[place][...] = total.astype(jnp.bfloat16)

    locks = [gm["locks"].at[pl.ds(0, 1)]] * 2

    def numbers(number):
        return [jnp.int32(number), jnp.int32(0)]

    @pl.when(block < adders)
    def _():
        _fence_async_proxy(nvvm.ProxyKind.async_global)
        _arrive(locks, numbers(1))

    _wait(locks, numbers(adders), numbers(plan.blocks))
    _fence_async_proxy(nvvm.ProxyKind.async_global)


def _compute(plan: Plan, gm: dict[str, Any], sm: dict[str, Any], simulated: bool, warpgroup):
    """A warpgroup that decodes and multiplies."""
    config = plan.config
    block = lax.axis_index("block")
    row, part = lax.rem(warpgroup, config.rows), lax.div(warpgroup, config.rows)
    per_slice = plan.per_stage // config.slices
    spare = compute_registers(config.warpgroups) - config.registers()
    accumulator = plgpu.ACC((TILE_ROWS, config.tile_m), jnp.float32)

    def operands(slot, j):
        """The decoded weights of tile j of a stage, columns 0..63 and 64..127, [64, 64] each."""
        if simulated:
            sm["a"][warpgroup] = _decode_reference(
                sm["codes"][slot, row, j], sm["scales"][slot, row, j]
            )
            plgpu.commit_smem()
            return [sm["a"].at[warpgroup, :, pl.ds(start, 64)] for start in (0, 64)]
        return _decode(
            plgpu.load(sm["codes"].at[slot, row, j], layout=_CODES),
            plgpu.load(sm["scales"].at[slot, row, j], layout=_SCALES),
        )

    def multiply(acc, done, count):
        @pl.loop(0, count)
        def _(i):
            slot = lax.rem(done + i, config.stages)
            plgpu.barrier_wait(sm["full"].at[slot])
            for j in range(per_slice):
                tile = j * config.slices + part
                for half, operand in enumerate(operands(slot, tile)):
                    tokens = sm["x"].at[slot, tile, :, pl.ds(64 * half, 64)]
                    plgpu.wgmma(acc, operand, tokens.T)
                    if simulated:
                        plgpu.wgmma_wait(0)
                    elif config.in_flight:
                        plgpu.wgmma_wait(config.in_flight)
            # Where a loop turns back, ptxas gives away registers that a product in flight reads.
            plgpu.wgmma_wait(0)
            release(done + i)

    def release(stage):
        plgpu.barrier_arrive(sm["empty"].at[lax.rem(stage, config.stages)])

    def add_slices(value, index):
        """The sum of the slices' accumulators, in the warpgroup of the first."""

        def collect(value):
            plgpu.barrier_wait(sm["sums_full"].at[row])
            for other in range(config.slices - 1):
                value += plgpu.load(sm["sums"].at[other, row], layout=plgpu.Layout.WGMMA)
            plgpu.barrier_arrive(sm["sums_empty"].at[row])
            return value

        def publish(value):
            @pl.when(index > 0)
            def _():
                plgpu.barrier_wait(sm["sums_empty"].at[row])

            sm["sums"][part - 1, row] = value
            plgpu.barrier_arrive(sm["sums_full"].at[row])
            return value

        return lax.cond(part == 0, collect, publish, value)

    def read(name, *place):
        """A matrix [64, .], or a number for each of its rows, from global memory."""
        source = gm[name].at[place]
        axis = plgpu.Layout.WGMMA if len(source.shape) == 2 else plgpu.Layout.WGMMA.reduce(1)
        return plgpu.load(source, layout=axis, optimized=False)

    def over_tokens(numbers, tokens=config.tile_m):
        return lax.broadcast_in_dim(numbers, (TILE_ROWS, tokens), (0,))

    def adapter(row_start):
        """B [64, R] in parts of 64 columns."""
        return [
            read("b", pl.ds(row_start, TILE_ROWS), pl.ds(column, 64))
            for column in range(0, gm["b"].shape[1], 64)
        ]

    def add_adapter(acc, b, done, ends, row_start):
        """Adds B xa^T if ends is 1; xa is in the next stage of the pipeline."""
        slot = lax.rem(done, config.stages)

        @pl.loop(0, ends)
        def _(_):
            # Those that do not multiply wait too: an arrival that is early by a whole round of the
            # pipeline would count for what the stage held before.
            plgpu.barrier_wait(sm["xa_full"].at[slot])

        @pl.loop(0, ends if config.slices == 1 else jnp.where(part == 0, ends, 0))
        def _(_):
            for j, columns in enumerate(adapter(row_start) if b is None else b):
                if simulated:
                    sm["a"][warpgroup, :, :64] = columns
                    plgpu.commit_smem()
                    columns = sm["a"].at[warpgroup, :, pl.ds(0, 64)]
                plgpu.wgmma(acc, columns, sm["x"].at[slot, j // 2, :, pl.ds(j % 2 * 64, 64)].T)
                if simulated:
                    plgpu.wgmma_wait(0)
            plgpu.wgmma_wait(0)

        @pl.loop(0, ends)
        def _(_):
            plgpu.barrier_arrive(sm["empty"].at[slot])

        return acc[...]

    def store(value, bias, token, row_tile):
        """Stores the outputs [64, .] of a row tile, of the tokens from one on."""
        width = value.shape[1]
        if bias is not None:
            value += over_tokens(bias.astype(jnp.float32), width)
        tokens, rows = pl.ds(token, width), pl.ds(row_tile * TILE_ROWS, TILE_ROWS)
        if gm["y"].dtype == jnp.float32:
            gm["y"].at[rows, tokens][...] = value
        else:
            copy_out(value, gm["y"].at[tokens, rows])

    def copy_out(value, place):
        """Starts to store a value, transposed and rounded."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the last one
        rounded = sm["y"].at[row, pl.ds(0, value.shape[1])]
        rounded.T[...] = plgpu.layout_cast(
            value.astype(jnp.bfloat16), plgpu.Layout.WGMMA_TRANSPOSED
        )
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(rounded, place)

    def bias_of(row_tile):
        """A row tile beyond the weight has the last one's bias; what it stores is dropped."""
        start = jnp.minimum(row_tile, plan.row_tiles - 1) * TILE_ROWS
        return read("bias", pl.ds(start, TILE_ROWS)) if "bias" in gm else None

    def locks():
        """Those of the two tiles that this block may share."""
        tiles = [plan.share(block, index)[0] for index in (0, 1)]
        return [gm["locks"].at[pl.ds(1 + tile * config.rows + row, 1)] for tile in tiles]

    def add_partial():
        """Adds up this block's units of the tiles that it shares, in the order of the sharers."""
        shares = [plan.share(block, index) for index in (0, 1)]
        awaited = [jnp.where(begin < end, sharers, 0) for _, _, sharers, begin, end in shares]
        waiters = [jnp.minimum(sharers, plan.units) for sharers in awaited]
        _wait(locks(), awaited, waiters)
        # What a batch reads is in flight together, in registers of the accumulator and operands.
        room = max(1, (compute_registers(config.warpgroups) - 64) // (plan.unit // 2))
        batches = -(-plan.most_sharers // min(8, room))
        batch = -(-plan.most_sharers // batches)

        @pl.loop(0, 2)
        def _(index):
            tile, first, sharers, begin, end = plan.share(block, index)
            m_tile, n_tile = plan.coordinates(tile)
            row_tile = n_tile * config.rows + row

            @pl.loop(begin, end)
            def _(unit):
                tokens = pl.ds(unit * plan.unit, plan.unit)
                zero = jnp.zeros((TILE_ROWS, plan.unit), jnp.float32)

                @pl.loop(0, lax.div(sharers + batch - 1, batch), init_carry=zero)
                def total(i, total):
                    for j in range(batch):
                        sharer = i * batch + j
                        slot = plan.slot(first + jnp.minimum(sharer, sharers - 1), tile)
                        value = read("partial", slot, row, slice(None), tokens)
                        # What fills the last batch has been added before.
                        counts = jnp.broadcast_to(sharer < sharers, value.shape)
                        total += jnp.where(counts, value, zero)
                    return total

                token = m_tile * config.tile_m + unit * plan.unit
                store(total, bias_of(row_tile), token, row_tile)

    @pl.loop(0, plan.pieces(block), init_carry=jnp.int32(0))
    def _(index, done):
        tile, first, count = plan.piece(block, index)
        m_tile, n_tile = plan.coordinates(tile)
        row_tile = n_tile * config.rows + row
        row_start = jnp.minimum(row_tile, plan.row_tiles - 1) * TILE_ROWS
        divisor = read("divisor", pl.ds(row_start, TILE_ROWS))
        bias = bias_of(row_tile)
        # Early if there are registers, as what comes late is waited for.
        b = adapter(row_start) if "b" in gm and spare >= gm["b"].shape[1] // 4 else None
        ends = jnp.where(_ends_tile(plan, first, count), 1, 0)

        def compute(acc):
            multiply(acc, done, count)
            value = acc[...]
            if config.slices > 1:
                value = add_slices(value, index)
            value *= over_tokens(layout.UNIT / divisor)
            if "b" not in gm:
                return value
            if simulated:  # which cannot store to an accumulator
                product = pl.run_scoped(
                    lambda acc: add_adapter(acc, b, done + count, ends, row_start), accumulator
                )
                return value + product
            acc[...] = value
            return add_adapter(acc, b, done + count, ends, row_start)

        value = pl.run_scoped(compute, accumulator)

        @pl.when((part == 0) & (count == plan.steps))
        def _():
            store(value, bias, m_tile * config.tile_m, row_tile)

        if plan.shared:

            @pl.when((part == 0) & (count < plan.steps))
            def _():
                gm["partial"].at[plan.slot(block, tile), row][...] = value

        if plan.shared and not simulated:
            # Once for both tiles, for to publish takes longer than to compute a stage.
            @pl.when((part == 0) & (index == plan.shared_pieces(block) - 1))
            def _():
                _arrive(locks(), [plan.share(block, i)[2] for i in (0, 1)])

        return done + count + (ends if "b" in gm else 0)

    if plan.shared and not simulated:

        @pl.when(part == 0)
        def _():
            add_partial()

    if config.slices > 1:
        # The last sums have been read.
        @pl.when((part > 0) & (plan.pieces(block) > 0))
        def _():
            plgpu.barrier_wait(sm["sums_empty"].at[row])

    plgpu.wait_smem_to_gmem(0)


def _add_partial(plan: Plan, y, partial, bias):
    """What the blocks that share tiles do at their end, in jnp."""
    config = plan.config
    with jax.ensure_compile_time_eval():
        shares = [plan.share(block, i) for block in range(plan.sharing) for i in (0, 1)]
        # By tile: the first block that shares it, and how many do.
        shared = {int(tile): (int(first), int(n)) for tile, first, n, *_ in shares if n}
    for tile, (first, sharers) in shared.items():
        with jax.ensure_compile_time_eval():
            m_tile, n_tile = (int(i) for i in plan.coordinates(tile))
        slot = plan.slot(first, tile)
        total = partial[slot : slot + sharers].sum(axis=0)
        total = total.reshape(-1, config.tile_m)
        rows = slice(n_tile * config.rows * TILE_ROWS, (n_tile + 1) * config.rows * TILE_ROWS)
        tokens = slice(m_tile * config.tile_m, (m_tile + 1) * config.tile_m)
        part = y[tokens, rows]
        total = total[: part.shape[1], : part.shape[0]].T
        if bias is not None:
            total += bias[rows][: part.shape[1]].astype(jnp.float32)
        y = y.at[tokens, rows].set(total.astype(y.dtype))
    return y


def _decode_reference(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """A tile of codes [4, 256] and scales [128] as bfloat16 [64, 128], over UNIT."""
    words = codes.reshape(TILE_ROWS, 4, 2, 2).swapaxes(1, 2)  # row, half, lane, word
    raw = jnp.stack(layout.pair_bits(words[..., 0], words[..., 1]), axis=2)
    raw = jnp.stack([raw, raw >> 16], axis=-1).reshape(TILE_ROWS, TILE_COLUMNS)
    # Not as the subnormal numbers that these bits are: a CPU takes them for zero.
    index = (raw >> 6 & 7).astype(jnp.float32)
    magnitude = jnp.where(index < 4, index / 2, jnp.where(index < 6, index - 2, 2 * index - 8))
    values = jnp.where(raw >> 15 & 1, -magnitude, magnitude)
    first, second = layout.scale_bits(scales.reshape(TILE_ROWS, 2))
    bits = jnp.stack([first, first >> 16, second, second >> 16], axis=-1) & 0xFFFF
    bits = (bits | layout.SCALE_BITS & 0xFFFF).astype(jnp.uint16).reshape(TILE_ROWS, -1)
    scales = jax.lax.bitcast_convert_type(bits, jnp.bfloat16).astype(jnp.float32) * 2.0**-126
    blocks = values.reshape(TILE_ROWS, -1, layout.BLOCK) * scales[..., None]
    return blocks.reshape(TILE_ROWS, TILE_COLUMNS).astype(jnp.bfloat16)


def _decode(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """The same in registers: each thread ends with the operands of its wgmma instructions."""

    @plgpu.inline_mgpu(
        arg_types=(_CODES, _SCALES),
        return_type=(_HALF, _HALF),
    )
    def decode(_, codes, scales):
        i32 = ir.IntegerType.get_signless(32)
        pair_type = ir.VectorType.get((2,), ir.BF16Type.get())

        def constant(value):
            return arith.constant(i32, ir.IntegerAttr.get(i32, value - (value >> 31 << 32)))

        def rotate(word, left):
            if left <= 6:  # No bit of the mask wraps around; a plain shift has a pipe of its own.
                return arith.shli(word, constant(left)) if left else word
            return mgpu.utils.inline_ptx(
                f"shf.l.wrap.b32 $0, $1, $1, {left};", word, result_types=i32
            )

        mask, mix, unmix = constant(layout.MASK), constant(layout.MIX), constant(~layout.MIX)
        scale_mask = constant(layout.SCALE_MASK)
        # A constant that ptxas cannot see through: it would move one into a register for each use.
        scale_bits = mgpu.utils.inline_ptx(
            f"{{ .reg .b32 all; activemask.b32 all; and.b32 $0, all, {layout.SCALE_BITS}; }}",
            result_types=i32,
        )
        out = [np.empty((1, 8, 1, 1, 2, 1, 1, 1, 1), dtype=object) for _ in range(2)]
        for half in range(2):  # the rows r and r + 8
            words = codes.registers.flat[half]
            scale_words = scales.registers.flat[half]
            for part in range(2):  # columns 0..63 and 64..127
                first = vector.extract(words, [], [2 * part])
                second = vector.extract(words, [], [2 * part + 1])
                mixed = arith.ori(arith.andi(first, mix), arith.andi(second, unmix))
                sources = (first, first, first, second, second, second, mixed, mixed)
                scale_word = vector.extract(scale_words, [], [part])
                pairs = [
                    arith.ori(arith.andi(rotate(scale_word, turn), scale_mask), scale_bits)
                    for turn in (0, 8)
                ]
                for q, (word, turn) in enumerate(zip(sources, layout.ROTATIONS, strict=True)):
                    raw = arith.andi(rotate(word, turn), mask)
                    which = "low" if q // 2 % 2 == 0 else "high"
                    # ptxas makes the moves a choice of operand halves.
                    value = mgpu.utils.inline_ptx(
                        "{ .reg .b16 low, high; .reg .b32 scale; mov.b32 {low, high}, $2; "
                        f"mov.b32 scale, {{{which}, {which}}}; mul.rn.bf16x2 $0, $1, scale; }}",
                        raw,
                        pairs[q // 4],
                        result_types=i32,
                    )
                    out[part][0, q, 0, 0, half] = mgpu.utils.bitcast(value, pair_type)
        return tuple(
            mgpu.FragmentedArray(_registers=part, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)
            for part in out
        )

    return decode(codes, scales)


def _fence_async_proxy(kind: nvvm.ProxyKind) -> None:
    """Orders what threads read and wrote in shared or global memory, and copies."""

    @plgpu.inline_mgpu()
    def fence(_):
        shared = kind == nvvm.ProxyKind.async_shared
        nvvm.fence_proxy(kind, space=nvvm.SharedSpace.shared_cta if shared else None)

    fence()


def _opaque(number: jax.Array) -> jax.Array:
    """An int32 that the compiler knows nothing of: what is made of it stays where it is.

    It would be made outside of the loops around, in registers that their copies need.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WG_SPLAT,),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT),
    )
    def move(_, number):
        value = llvm.inline_asm(
            ir.IntegerType.get_signless(32),
            [number.registers.item()],
            "mov.b32 $0, $1;",
            "=r,r",
            has_side_effects=True,
        )
        return mgpu.FragmentedArray.splat(value, (), is_signed=True)

    return move(number)


def _arrive(locks, sharers) -> None:
    """Publishes what the warpgroup wrote to global memory and counts at two locks.

    Args:
        locks: both int32 [1] in global memory.
        sharers: how many arrive at each; without any, the lock is left alone.
    """
    _with_locks(
        "bar.sync $1, 128; @mine fence.acq_rel.gpu; "
        "@mine red.relaxed.gpu.global.add.u32 [lock], 1;",
        locks,
        sharers,
        sharers,
    )


def _wait(locks, sharers, waiters) -> None:
    """Waits until all sharers have arrived at two locks; the warpgroup then sees what they wrote.

    Who has waited counts too. The last one counts to zero, for the next call: no lock is zero
    again while someone waits at it.

    Args:
        locks: both int32 [1] in global memory.
        sharers: how many arrive at each; without any, the lock is left alone.
        waiters: how many wait.
    """
    _with_locks(
        "again: @mine ld.acquire.gpu.global.u32 count, [lock]; "
        "setp.lt.and.u32 early, count, sharers, mine; @early bra again; "
        "add.u32 count, sharers, waiters; sub.u32 count, count, 1; "
        "@mine red.relaxed.gpu.global.inc.u32 [lock], count; "
        "bar.warp.sync 0xffffffff; bar.sync $1, 128;",
        locks,
        sharers,
        waiters,
    )


def _with_locks(code: str, locks, sharers, waiters) -> None:
    """Runs PTX in which `mine` holds in lanes 0 and 1 of a warpgroup, each with one of two locks.

    But not in one whose lock has no sharers. $1 is the warpgroup's barrier.
    """
    number = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=([plgpu.RefType()] * 2, [number] * 4))
    def run(_, locks, numbers):
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [
                mgpu.utils.thread_idx(),
                mgpu.utils.warpgroup_barrier_idx(sync=False),
                *(mgpu.utils.memref_ptr(lock) for lock in locks),
                *(number.registers.item() for number in numbers),
            ],
            "{ .reg .pred mine, early; .reg .b32 lane, count, sharers, waiters; .reg .b64 lock; "
            "and.b32 lane, $0, 127; setp.eq.u32 mine, lane, 1; "
            "selp.b64 lock, $3, $2, mine; selp.b32 sharers, $5, $4, mine; "
            "selp.b32 waiters, $7, $6, mine; "
            f"setp.lt.u32 mine, lane, 2; setp.ne.and.u32 mine, sharers, 0, mine; {code} }}",
            "r,r,l,l,r,r,r,r,~{memory}",
            has_side_effects=True,
            convergent=True,
        )

    run(locks, [*sharers, *waiters])
