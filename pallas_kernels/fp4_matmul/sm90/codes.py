"""Dequantizes codes and scales from shared memory to bfloat16 registers of wgmma."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_kernels.fp4_matmul import e4m3, layout
from pallas_kernels.fp4_matmul.tiling import TILE_COLUMNS, TILE_ROWS

# A tile of codes: warp w has the rows 16 w.., a lane has the words 4 c.. of its rows r and r + 8.
CODES = plgpu.Layout.TILED(
    plgpu.Tiling(((4, 256), (128,), (16,), (4,))),
    warp_dims=(-5,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)
# The same for 32 rows, of which a lane has one.
_HALF_CODES = plgpu.Layout.TILED(
    plgpu.Tiling(((4, 128), (16,), (4,))),
    warp_dims=(-4,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)
# How dense operands of wgmma lie in shared memory.
OPERAND = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_HALF = plgpu.ShapeDtypeStruct((TILE_ROWS, 64), jnp.dtype(jnp.bfloat16), layout=plgpu.Layout.WGMMA)
# The same in e4m3, of which two numbers have the bits of a bfloat16.
_E4M3_HALF = plgpu.ShapeDtypeStruct((TILE_ROWS, 32), _HALF.dtype, layout=plgpu.Layout.WGMMA)


def scales_layout(words: int) -> Any:
    """The layout of the scales of a tile [words]: a lane has those of its rows r and r + 8.

    Three other lanes have the same. There are one or two words for a row, of four scales each.
    """
    count = words // TILE_ROWS
    return plgpu.Layout.TILED(
        plgpu.Tiling(((words,), (16 * count,), (8 * count,), (count,))),
        warp_dims=(-4,),
        lane_dims=(-2, plgpu.Replicated(4)),
        vector_dim=-1,
    )


def _half_scales_layout(words: int) -> Any:
    """The same for 32 rows, [4, words], of which a lane has one."""
    return plgpu.Layout.TILED(
        plgpu.Tiling(((4, words), (words // 8,))),
        warp_dims=(-3,),
        lane_dims=(-2, plgpu.Replicated(4)),
        vector_dim=-1,
    )


def dequantize_reference(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """Dequantizes codes [4, 256] and scales in jnp: a bfloat16 tile [64, 128], over UNIT."""
    words = codes.reshape(TILE_ROWS, 4, 2, 2).swapaxes(1, 2)  # row, half, lane, word
    raw = jnp.stack(layout.pair_bits(words[..., 0], words[..., 1]), axis=2)
    raw = jnp.stack([raw, raw >> 16], axis=-1).reshape(TILE_ROWS, TILE_COLUMNS)
    # The bits are subnormal numbers, which a CPU takes for zero: hence by their index.
    index = (raw >> 6 & 7).astype(jnp.float32)
    magnitude = jnp.where(index < 4, index / 2, jnp.where(index < 6, index - 2, 2 * index - 8))
    values = jnp.where(raw >> 15 & 1, -magnitude, magnitude)
    first, second = layout.scale_bits(scales.reshape(TILE_ROWS, -1))
    bits = jnp.stack([first, first >> 16, second, second >> 16], axis=-1) & 0xFFFF
    bits = (bits | layout.SCALE_BITS & 0xFFFF).astype(jnp.uint16).reshape(TILE_ROWS, -1)
    scales = jax.lax.bitcast_convert_type(bits, jnp.bfloat16).astype(jnp.float32) * 2.0**-126
    blocks = values.reshape(*scales.shape, -1) * scales[..., None]
    return blocks.reshape(TILE_ROWS, TILE_COLUMNS).astype(jnp.bfloat16)


def round_reference(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """As `dequantize_reference`, rounded to e4m3 in units of E4M3_UNIT, as `e4m3.pairs`."""
    values = dequantize_reference(codes, scales).astype(jnp.float32)
    values *= layout.UNIT / layout.E4M3_UNIT
    return e4m3.pairs(e4m3.in_register_order(values.astype(jnp.float8_e4m3fn)))


def dequantize_tile(codes: jax.Array, scales: jax.Array, *, rounds: bool = False) -> Any:
    """Dequantizes a tile in registers: each thread ends with the operands of its wgmma.

    The codes [4, 256] are in the layout `CODES`, the scales in that of `scales_layout`. The
    results are bfloat16 [64, 64] of the columns 0..63, and of the columns 64..127, over UNIT; or
    e4m3, [64, 32] `e4m3.pairs` over E4M3_UNIT each.
    """
    layouts, half = (CODES, scales_layout(*scales.shape)), _E4M3_HALF if rounds else _HALF

    @plgpu.inline_mgpu(arg_types=layouts, return_type=(half, half))
    def dequantize(_, codes, scales):
        return _operands(codes.registers.flat, scales.registers.flat, rounds)

    return dequantize(codes, scales)


def dequantize_paired_tile(codes: Any, scales: Any, *, rounds: bool = False) -> Any:
    """Dequantizes a paired tile, whose rows are by eights those of two half tiles in turn.

    Codes [2, 4, 128] and scales [2, 4, 16], or [2, 4, 8], 32 rows of each half, are in shared
    memory. Returns the two halves of columns, as `dequantize_tile` does.
    """
    kind, result = _half_scales_layout(scales.shape[-1]), _E4M3_HALF if rounds else _HALF

    @plgpu.inline_mgpu(arg_types=([_HALF_CODES] * 2, [kind] * 2), return_type=(result, result))
    def dequantize(_, codes, scales):
        words, scale_words = ([half.registers.item() for half in x] for x in (codes, scales))
        return _operands(words, scale_words, rounds)

    return dequantize(
        [plgpu.load(codes.at[i], layout=_HALF_CODES) for i in (0, 1)],
        [plgpu.load(scales.at[i], layout=kind) for i in (0, 1)],
    )


def _operands(codes: Sequence, scales: Sequence, rounds: bool) -> tuple:
    """Both operands of wgmma, of the words of the rows r and r + 8."""
    pair_type = ir.VectorType.get((2,), ir.BF16Type.get())
    columns = 4 if rounds else 8
    out = [np.empty((1, columns, 1, 1, 2, 1, 1, 1, 1), dtype=object) for _ in range(2)]
    if rounds:
        numbers = _rounded_numbers(codes, scales)
    else:
        # ptxas must not see this constant: it would move one into a register for each use.
        hidden = f"{{ .reg .b32 all; activemask.b32 all; and.b32 $0, all, {layout.SCALE_BITS}; }}"
        numbers = scaled_pairs(codes, scales, hidden, "mul.rn.bf16x2 $0, $1, scale;")
    for half, part, q, value in numbers:
        out[part][0, q, 0, 0, half] = mgpu.utils.bitcast(value, pair_type)
    return tuple(
        mgpu.FragmentedArray(_registers=part, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)
        for part in out
    )


def _rounded_numbers(
    codes: Sequence[Any], scales: Sequence[Any]
) -> Iterator[tuple[int, int, int, Any]]:
    """Dequantizes the codes of a thread to e4m3, four at a time; the scales are those of NVFP4.

    Yields as `scaled_pairs` does, where the word of four numbers from 0 to 3 is in the pair's
    place, over E4M3_UNIT.
    """
    i32 = ir.IntegerType.get_signless(32)
    mask, added = _constant(layout.SCALE_MASK), _constant(layout.E4M3_SCALE_BITS)
    for half in range(2):
        for part in range(2):
            first, second = (vector.extract(codes[half], [], [2 * part + i]) for i in (0, 1))
            scale_word, raw = vector.extract(scales[half], [], [part]), raw_pairs(first, second)
            for turn in (0, 8):
                pair = arith.addi(arith.andi(_rotated(scale_word, turn), mask), added)
                for which in ("low", "high"):
                    value = mgpu.utils.inline_ptx(
                        _ROUND.format(which=which), next(raw), next(raw), pair, result_types=i32
                    )
                    yield half, part, turn // 4 + (which == "high"), value


# Two pairs of codes, $1 and $2, times one of the scales $3, as four numbers in e4m3. A pair of
# bfloat16 is a float32 as well, the upper one of the pair: the lower one decides where that is in
# the middle between two numbers in e4m3.
_ROUND = (
    "{{ .reg .b16 low, high, numbers<2>; .reg .b32 scale, both, lower; "
    "mov.b32 {{low, high}}, $3; mov.b32 scale, {{{which}, {which}}}; "
    + " ".join(
        f"mul.rn.bf16x2 both, ${pair + 1}, scale; shl.b32 lower, both, 16; "
        f"cvt.rn.satfinite.e4m3x2.f32 numbers{pair}, both, lower;"
        for pair in range(2)
    )
    + " mov.b32 $0, {{numbers0, numbers1}}; }}"
)


def scaled_pairs(
    codes: Sequence[Any],
    scales: Sequence[Any],
    scale_bits: str,
    multiply: str,
    parts: Sequence[int] = (0, 1),
) -> Iterator[tuple[int, int, int, Any]]:
    """Dequantizes the codes of a thread, two at a time.

    Codes are vectors of four words, scales of one or two, one of row r and one of row r + 8 each.
    `scale_bits` is PTX that sets $0 to `layout.SCALE_BITS`, and `multiply` PTX that sets $0 to the
    pair of codes $1 times the pair of scales `scale`. `parts` are those that are wanted.

    Yields:
        The half (rows r or r + 8), the part (columns 0 to 63 or 64 to 127), the number of the pair
        in them, from 0 to 7, and the pair of bfloat16 in a word, over UNIT.
    """
    i32 = ir.IntegerType.get_signless(32)
    scale_mask = _constant(layout.SCALE_MASK)
    added = mgpu.utils.inline_ptx(scale_bits, result_types=i32)
    for half in range(2):
        words, scale_words = codes[half], scales[half]
        for part in parts:
            first = vector.extract(words, [], [2 * part])
            second = vector.extract(words, [], [2 * part + 1])
            count = ir.VectorType(scale_words.type).shape[0]
            scale_word = vector.extract(scale_words, [], [part if count == 2 else 0])
            pairs = [
                arith.ori(arith.andi(_rotated(scale_word, turn), scale_mask), added)
                for turn in ((0, 8) if count == 2 else (8 * part,))
            ]
            for q, raw in enumerate(raw_pairs(first, second)):
                scale = q * count // 4  # of those of the pairs
                which = "high" if scale % 2 else "low"
                # ptxas turns the moves into the choice of an operand's half.
                value = mgpu.utils.inline_ptx(
                    "{ .reg .b16 low, high; .reg .b32 scale; mov.b32 {low, high}, $2; "
                    f"mov.b32 scale, {{{which}, {which}}}; {multiply} }}",
                    raw,
                    pairs[scale // 2],
                    result_types=i32,
                )
                yield half, part, q, value


def raw_pairs(first: Any, second: Any) -> Iterator[Any]:
    """The eight pairs of codes of two words, as bits of two bfloat16 of code * 2^-126."""
    mask = _constant(layout.MASK)
    mix = mgpu.utils.inline_ptx(
        f"mov.b32 $0, {layout.MIX};", result_types=ir.IntegerType.get_signless(32)
    )
    mixed = arith.xori(arith.andi(arith.xori(first, second), mix), second)
    sources = (first, first, first, second, second, second, mixed, mixed)
    for word, turn in zip(sources, layout.ROTATIONS, strict=True):
        yield arith.andi(_rotated(word, turn), mask)


def _rotated(word: Any, left: int) -> Any:
    if left <= 6:  # No bit of the mask wraps around, and plain shifts have a separate pipe.
        return arith.shli(word, _constant(left)) if left else word
    return mgpu.utils.inline_ptx(
        f"shf.l.wrap.b32 $0, $1, $1, {left};",
        word,
        result_types=ir.IntegerType.get_signless(32),
    )


def _constant(value: int) -> Any:
    i32 = ir.IntegerType.get_signless(32)
    return arith.constant(i32, ir.IntegerAttr.get(i32, value - (value >> 31 << 32)))
