"""The FP4 product by mma.sync: cp.async, dequantization in registers, a sum over CTAs.

    y[M, N] = x[M, K] W[N, K]^T + xa[M, R] B[N, R]^T + bias,   M <= 64

The weight is the first operand of mma.sync, 16 rows high for each warp, and the tokens are its
narrow side. A CTA is four warps with a tile of 64 rows of W, or several, and a part of the columns;
it goes through them in steps:

    cp.async  x, codes and scales from global to shared memory, `stages` - 1 steps ahead
    ldmatrix  the second operands of mma.sync; the first ones are dequantized in registers, from
              codes that lie in tile order as a thread needs them

All instructions exist from Ampere on, and all GPUs run the same ones: nothing here knows of the TMA
or of wgmma. Where several CTAs divide the columns, each writes its sums, and the warp that comes
last adds them up, always in the same order.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from pallas_kernels import warp_mma, warpgroup
from pallas_kernels.fp4_matmul import layout
from pallas_kernels.fp4_matmul.layout import Fp4Tiles
from pallas_kernels.fp4_matmul.mma import codes as mma_codes
from pallas_kernels.fp4_matmul.mma import copies, epilogue
from pallas_kernels.fp4_matmul.mma.epilogue import ACC
from pallas_kernels.fp4_matmul.mma_schedule import MAX_ROWS, MmaConfig, padded_tokens
from pallas_kernels.fp4_matmul.sm90.codes import CODES, dequantize_reference, scales_layout
from pallas_kernels.fp4_matmul.sm90.synchronize import opaque
from pallas_kernels.fp4_matmul.tiling import TILE_COLUMNS, TILE_ROWS
from pallas_kernels.warpgroup import WARPS, Warpgroup

RANKS = 32  # columns of B of two products, which a thread reads by eights
_RANKS_AT_A_TIME = 128  # columns of B in registers, at most
# B: the rows of each warp. A thread has eight columns of its rows r and r + 8, for each 32 columns.
_B = plgpu.Layout.TILED(
    plgpu.Tiling(((TILE_ROWS, RANKS), (TILE_ROWS // WARPS, RANKS), (8, 8))),
    warp_dims=(-6,),
    lane_dims=(-2, -3),
    vector_dim=-1,
)
# x A^T, which all warps have: a thread has the same eight columns of a token.
_XA = plgpu.Layout.TILED(
    plgpu.Tiling(((8, RANKS), (8,))),
    warp_dims=(plgpu.Replicated(WARPS),),
    lane_dims=(-3, -2),
    vector_dim=-1,
)


def matmul(
    x: jax.Array,
    weight: Fp4Tiles,
    *,
    config: MmaConfig,
    xa: jax.Array | None = None,
    b: jax.Array | None = None,
    bias: jax.Array | None = None,
    dtype: Any = jnp.bfloat16,
    interpret: bool = False,
) -> jax.Array:
    """Returns x W^T + xa B^T + bias, [M, N] in bfloat16 or float32, for M <= 64.

    x is bfloat16 [M, K], x A^T bfloat16 [M, R] and B bfloat16 [N, R'']; what only one of the two
    has of columns counts as zero. The bias is [N].
    """
    (m, k), (n, _) = x.shape, weight.shape
    row_tiles, column_tiles, _ = weight.codes.shape
    assert m <= MAX_ROWS
    assert k % layout.BLOCK == 0
    assert config.problem(m) is None
    blocks = pl.cdiv(row_tiles, config.row_tiles)
    tokens, rows = padded_tokens(m), row_tiles * TILE_ROWS

    def pad_rows(array):
        """Pads to whole tiles of rows; with ones, by which one can divide."""
        padding = ((0, rows - len(array)), *((0, 0) for _ in array.shape[1:]))
        return jnp.pad(array, padding, constant_values=1) if rows > len(array) else array

    operands = {
        "x": x,
        "codes": weight.codes.reshape(row_tiles, column_tiles, 4, 256),
        "scales": weight.scales,
        "divisor": pad_rows(weight.divisor),
    }
    if b is not None and xa is not None:
        columns = pl.cdiv(xa.shape[1], RANKS) * RANKS
        missing = max(0, columns - b.shape[1])
        operands["b"] = jnp.pad(pad_rows(b), ((0, 0), (0, missing)))
        operands["xa"] = jnp.pad(xa, ((0, tokens - m), (0, columns - xa.shape[1])))
    if bias is not None:
        operands["bias"] = pad_rows(bias)
    results = {"y": jax.ShapeDtypeStruct((m, n), dtype)}
    if config.split > 1:
        # Zero before and after every call: all calls of a program use the same array.
        operands["counters"] = jnp.zeros((blocks, WARPS), jnp.int32)
        shape = blocks * config.row_tiles, config.split, TILE_ROWS, tokens
        results["partial"] = jax.ShapeDtypeStruct(shape, jnp.float32)
    return warpgroup.run(
        functools.partial(_body, config),
        "fp4_matmul_mma",
        (blocks, config.split),
        operands,
        results,
        scratch=copies.Stages.types(config, m, weight.scales.shape[-1])._asdict(),
        interpret=interpret,
    )["y"]


def _body(config: MmaConfig, threads: Warpgroup, operands, _, results, **shared) -> None:
    """What a CTA does."""
    stages = copies.Stages(**shared)
    block, part = threads.cta
    row_tiles, column_tiles = operands["codes"].shape[:2]
    per_part = -(-column_tiles // config.split)
    steps = -(-per_part // config.column_tiles)
    first = part * per_part
    end = jnp.minimum(first + per_part, column_tiles)
    # The last CTA repeats the last tile of rows instead of those that do not exist.
    own = [block * config.row_tiles + i for i in range(config.row_tiles)]
    tiles = [jnp.minimum(row, row_tiles - 1) for row in own]

    def start_copies(step):
        column, stage = first + step * config.column_tiles, stages.at(step)
        copies.start_x(threads, operands["x"], stage.x, column * TILE_COLUMNS, end * TILE_COLUMNS)
        for i, tile in enumerate(tiles):
            rows = operands["codes"].at[tile], operands["scales"].at[tile]
            targets = stage.codes.at[i], stage.scales.at[i]
            copies.start_tiles(threads, rows, targets, column, end)
        copies.close_group(threads)

    for step in range(config.stages - 1):
        start_copies(jnp.int32(step))
    divisors = [epilogue.load_rows(threads, operands["divisor"], tile) for tile in tiles]

    def first_sums(tile, divisor):
        """Those of the adapter, in the first part, over what the sums will be multiplied by."""
        product = adapter(threads, operands, tile, stages.x.shape[1])
        if "b" not in operands:
            return product
        factor = divisor * jnp.where(part == 0, 1 / layout.UNIT, 0.0)
        return product * lax.broadcast_in_dim(factor, product.shape, (0,))

    sums = list(map(first_sums, tiles, divisors))

    def multiply_step(step, sums):
        copies.wait(threads, config.stages - 2)
        threads.meet()  # All copies are there, and the stage of the step before is free.
        start_copies(step + config.stages - 1)
        return multiply_stage(threads, stages.at(step), sums)

    sums = lax.fori_loop(0, steps, multiply_step, sums)

    def store(i, total):
        bias = None
        if "bias" in operands:
            bias = epilogue.load_rows(threads, operands["bias"], tiles[i])
        epilogue.store(threads, results["y"], total, divisors[i], bias, own[i])

    if config.split == 1:
        for i, total in enumerate(sums):
            store(i, total)
        return
    for row, total in zip(own, sums, strict=True):
        threads.store(results["partial"].at[row, part], total)

    @pl.when(epilogue.is_last(threads, operands["counters"], block, part, config.split))
    def add_parts():
        for i, row in enumerate(own):
            store(i, epilogue.add_parts(threads, results["partial"].at[row]))


def adapter(threads: Warpgroup, operands: dict, tile: Any, tokens: int) -> jax.Array:
    """The product xa B^T of a tile of rows, float32 [64, tokens], or zeros without an adapter."""
    zeros = threads.cast(jnp.zeros((TILE_ROWS, tokens), jnp.float32), ACC)
    if "b" not in operands:
        return zeros
    product, rows = zeros, pl.ds(tile * TILE_ROWS, TILE_ROWS)
    rank = operands["xa"].shape[1]

    def add(i, product):
        columns = pl.ds(i * RANKS, RANKS)
        b = threads.load(operands["b"].at[rows, columns], _B)
        xa = threads.load(operands["xa"].at[:, columns], _XA)
        return product + _multiply_adapter(threads, b, xa)

    if rank > _RANKS_AT_A_TIME and not threads.simulated:
        product = lax.fori_loop(0, opaque(jnp.int32(rank // RANKS)), add, product)
    else:
        for i in range(rank // RANKS):
            product = add(i, product)
    return product


def _multiply_adapter(threads: Warpgroup, b: jax.Array, xa: jax.Array) -> jax.Array:
    """The product of B [64, R] and x A^T [tokens, R]: float32 [64, tokens]."""
    if threads.simulated:
        return jnp.dot(b, xa.T, preferred_element_type=jnp.float32)
    (tokens, rank), shape = xa.shape, (TILE_ROWS, len(xa))
    result = plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.float32), layout=ACC)

    @plgpu.inline_mgpu(arg_types=(_B, _XA), return_type=result)
    def multiply(_, b, xa):
        # By 32 columns: the pairs of a thread, in its rows r and r + 8, and in a token.
        rows = [list(map(warp_mma.words, x)) for x in b.registers.reshape(rank // RANKS, 2)]
        columns = xa.registers.reshape(tokens // 8, rank // RANKS)
        out = []
        for group in columns:
            acc = (warp_mma.zero(ir.F32Type.get()),) * 4
            for (upper, lower), register in zip(rows, group, strict=True):
                words = warp_mma.words(register)
                for j in (0, 2):
                    pairs = [x[j + i] for i in (0, 1) for x in (upper, lower)]
                    acc = warp_mma.add_product(acc, pairs, words[j : j + 2])
            out += [warp_mma.vector_of(acc[:2]), warp_mma.vector_of(acc[2:])]
        return warp_mma.array(out, ACC, shape)

    return multiply(b, xa)


def multiply_stage(
    threads: Warpgroup,
    stage: copies.Stages,
    sums: list[jax.Array],
    *,
    apart: bool = False,
    halves: bool = False,
    wgmma: bool = False,
) -> list[jax.Array]:
    """Adds the products of the tiles of a stage to the sums of their rows, float32 [64, tokens].

    With `halves` only half of a tile is dequantized at a time, which takes fewer registers.
    With `apart` the four warps have the same rows, and each the columns of another tile, see
    `copies.start_strips`: a sum has 16 rows of each of them. With `wgmma` a warpgroup multiplies at
    once, a tile after the other.
    """
    row_tiles, column_tiles = stage.codes.shape[:2]
    scales = scales_layout(stage.scales.shape[-1])
    if wgmma:
        return [_multiply_at_once(threads, total, stage, row) for row, total in enumerate(sums)]
    for column in range(column_tiles):
        pairs = [
            (
                threads.load(stage.codes.at[row, column], CODES),
                threads.load(stage.scales.at[row, column], scales),
            )
            for row in range(row_tiles)
        ]
        parts = [(0,), (1,)] if halves else [(0, 1)]
        sums = _multiply(threads, sums, pairs, stage.x, column, apart, parts)
    return sums


def _multiply_at_once(threads: Warpgroup, total: Any, stage: copies.Stages, row: int) -> jax.Array:
    """Adds the products of a tile, of a stage of one column of tiles, to their sums by wgmma."""
    codes, scales = stage.codes.at[row, 0], stage.scales.at[row, 0]
    layouts = CODES, scales_layout(scales.shape[-1])
    pair = threads.load(codes, layouts[0]), threads.load(scales, layouts[1])
    if threads.simulated:
        return _multiply(threads, [total], [pair], stage.x, 0, False, [(0, 1)])[0]
    shape = total.shape
    result = plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.float32), layout=ACC)

    @plgpu.inline_mgpu(arg_types=(ACC, layouts, plgpu.RefType()), return_type=result)
    def multiply(_, total, pair, x):
        codes, scales = (list(array.registers.flat) for array in pair)
        steps = mma_codes.operands(codes, scales)
        acc = [number for both in total.registers.flat for number in warp_mma.numbers(both)]
        acc = warp_mma.add_warpgroup_product(acc, steps, *copies.descriptor(x))
        pairs = [warp_mma.vector_of(acc[i : i + 2]) for i in range(0, len(acc), 2)]
        return warp_mma.array(pairs, ACC, shape)

    return multiply(total, pair, stage.x)


def _multiply(
    threads: Warpgroup,
    sums: list,
    pairs: list,
    stage: Any,
    column: int,
    apart: bool,
    portions: Sequence[tuple[int, ...]],
) -> list[jax.Array]:
    """Adds the products of tiles in a column, pairs of codes [4, 256] and scales, to their sums.

    The sums are float32 [64, tokens] of each tile. `stage` holds columns of x in shared memory, and
    `column` is the index of the tiles' columns in it, or with `apart` of those of four tiles.
    `portions` are the parts of the columns that are dequantized one after the other.
    """
    if threads.simulated:
        tiles = WARPS if apart else 1
        start = column * tiles * TILE_COLUMNS
        x = stage[:, start : start + tiles * TILE_COLUMNS].reshape(-1, tiles, TILE_COLUMNS)

        def product(tile):
            weight = dequantize_reference(*tile).reshape(tiles, -1, TILE_COLUMNS)
            y = jnp.einsum("wrk,mwk->wrm", weight, x, preferred_element_type=jnp.float32)
            return y.reshape(TILE_ROWS, -1)

        return [acc + product(tile) for acc, tile in zip(sums, pairs, strict=True)]
    shape = sums[0].shape
    result = plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.float32), layout=ACC)
    pair = CODES, scales_layout(*pairs[0][1].shape)
    layouts = [ACC] * len(sums), [pair] * len(sums), plgpu.RefType()

    @plgpu.inline_mgpu(arg_types=layouts, return_type=[result] * len(sums))
    def multiply(_, sums, pairs, stage):
        def operands(parts):
            return [
                mma_codes.operands(list(codes.registers.flat), list(scales.registers.flat), parts)
                for codes, scales in pairs
            ]

        rows = operands(portions[0])
        accs: list[list[Any]] = [
            [warp_mma.numbers(upper) + warp_mma.numbers(lower) for upper, lower in pairs]
            for pairs in (acc.registers.reshape(-1, 2) for acc in sums)
        ]
        first = column * (WARPS if apart else 1)
        for number, parts in enumerate(portions):
            if number:
                # Later reads stay after it, so that fewer registers wait for their products.
                mgpu.utils.inline_ptx("bar.warp.sync 0xffffffff;", has_side_effects=True)
                rows = operands(parts)
            for group in range(shape[1] // 8):
                columns = copies.read(stage, group, first, parts=parts, apart=apart)
                for step, words in enumerate(columns):
                    for acc, operand in zip(accs, rows, strict=True):
                        acc[group] = warp_mma.add_product(acc[group], operand[step], words)
        out = []
        for acc in accs:
            halves = [warp_mma.vector_of(x[i : i + 2]) for x in acc for i in (0, 2)]
            out.append(warp_mma.array(halves, ACC, shape))
        return out

    return list(multiply(list(sums), list(map(tuple, pairs)), stage))
