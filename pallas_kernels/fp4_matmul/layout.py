"""Tile order: the weight as the Hopper kernel reads it, a permutation of the checkpoint's bits.

The weight is cut into tiles of 64 rows and 128 columns; a tile is 1024 words of codes and 128 words
of scales, contiguous in memory. Word 16 r + 4 c + j of the codes belongs to row r and to the lane
with r = lane // 4 (modulo 8) and c = lane % 4, which needs the column pairs k = 8 p + 2 c, k + 1
for p = 0..15: exactly its operands of eight wgmma instructions. Words j = 0, 1 hold the pairs
p = 0..7 and j = 2, 3 the pairs p = 8..15.

A code s e e m becomes a bfloat16 by two moves, s to bit 15 and e e m to bits 8..6: that is
code * 2^-126 exactly, 0.5 as a subnormal. One `and` with MASK does it for both codes of a pair
after a rotation. Three pairs fit a word so that no bits overlap; four bits a half are left. The
left bits of two words, taken together, fit two more pairs:

    word 0 holds the pairs 0, 1, 2 rotated right by 0, 4, 10 bits
    word 1 holds the pairs 3, 4, 5 rotated right by 2, 6, 12 bits
    (word 0 & MIX | word 1 & ~MIX) holds the pairs 6, 7 rotated right by 8, 14 bits

A scale of 16 columns is a byte x = 8 e + m for the value 2^(e - 10) (1 + m / 8), 0 for zero, so
that the bits `x << 4 | 0x7000` are a bfloat16 of 2^107 times the scale. The scales of NVFP4 fit as
they are. Those of MXFP4, for 32 columns, are powers of two, relative to the largest scale of the
row, whose size goes into the row's divisor. A row of a tile has a word of four scales in MXFP4, and
two words in NVFP4.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.fp4_matmul import reference
from pallas_kernels.fp4_matmul.reference import BLOCK, Fp4Weight
from pallas_kernels.fp4_matmul.tiling import TILE_COLUMNS, TILE_ROWS

Array = Any

CODE_WORDS = TILE_ROWS * TILE_COLUMNS // 8
SCALE_WORDS = {"nvfp4": 2 * TILE_ROWS, "mxfp4": TILE_ROWS}  # of a tile

MASK = 0x81C081C0
MIX = 0x06030603
ROTATIONS = (0, 4, 10, 2, 6, 12, 8, 14)
SCALE_MASK = 0x0FF00FF0
SCALE_BITS = 0x70007000
# Factor of the dequantized weight, over the row's divisor: 2^126 / 2^107.
UNIT = 2.0**19
# The same of a weight that is rounded to e4m3: code times scale is at most 2688, 21 of these units.
# Smaller units would leave the range of bfloat16, in which code and scale are multiplied.
E4M3_UNIT = 2.0**7
# Added to the bits of two scales, it makes bfloat16 of 2^119 times the scales.
E4M3_SCALE_BITS = 0x76007600

# Bytes of the 8 smallest E4M3 numbers: zero and the subnormal ones. Later bytes are E4M3 + 24.
_SUBNORMAL = (0, 8, 16, 20, 24, 26, 28, 30)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("codes", "scales", "divisor"),
    meta_fields=("inputs", "format"),
)
@dataclasses.dataclass(frozen=True)
class Fp4Tiles:
    """A frozen [N, K] weight in tile order.

    Rows and columns are padded to whole tiles with zeros. A shard is a slice by rows (axis 0 of
    each array) or by columns (axis 1 of codes and scales) at the borders of tiles.

    Attributes:
        codes: uint32 [ceil(N/64), ceil(K/128), 1024].
        scales: uint32 [ceil(N/64), ceil(K/128), 128], or 64 in MXFP4.
        divisor: float32 [N], the global scale of each row in NVFP4; in MXFP4 2^(147 - E), where E
            is the largest exponent byte of the row, at least 21.
        inputs: number of columns K.
        format: "nvfp4" or "mxfp4".
    """

    codes: Array
    scales: Array
    divisor: Array
    inputs: int
    format: str

    @property
    def shape(self) -> tuple[int, int]:
        """The logical shape (N, K)."""
        return self.divisor.shape[0], self.inputs


def to_tiles(weight: Fp4Weight) -> Fp4Tiles:
    """Permutes a weight from checkpoint order to tile order.

    Every bit is kept except those of NVFP4 codes under a scale of zero: they become the code of
    zero, which is their value.

    Raises:
        ValueError: tile order cannot represent the format (NF4) or a scale: a negative one, NaN, or
            MXFP4 scales of a row further apart than 2^29.
    """
    form = reference.format_of(weight.scales.dtype)
    if form.name == "nvfp4":
        tiles, fits = _nvfp4_tiles(weight)
        expected = "scales of 0 to 448"
    elif form.name == "mxfp4":
        tiles, fits = _mxfp4_tiles(weight)
        expected = "scales of a row within 2^29 of each other"
    else:
        raise ValueError(f"to_tiles: the weight is {form.name}, expected nvfp4 or mxfp4")
    if not bool(fits):
        raise ValueError(f"to_tiles: the {form.name} weight does not fit, expected {expected}")
    return tiles


@jax.jit
def _nvfp4_tiles(weight: Fp4Weight) -> tuple[Fp4Tiles, jax.Array]:
    """The tiles, and whether they represent all scales."""
    scales = jax.lax.bitcast_convert_type(weight.scales, jnp.uint8)
    low = jnp.asarray(_SUBNORMAL, jnp.uint8)[jnp.minimum(scales, 7)]
    packed = jnp.where(jnp.repeat(scales == 0, BLOCK // 2, axis=1), 0, weight.packed)
    tiles = _tiles(packed, jnp.where(scales < 8, low, scales + 24), weight.global_scale, "nvfp4")
    return tiles, (scales <= 126).all()


@jax.jit
def _mxfp4_tiles(weight: Fp4Weight) -> tuple[Fp4Tiles, jax.Array]:
    """As `_nvfp4_tiles`. A block of zeros may have exponent byte 0 however large the others are."""
    exponents = jax.lax.bitcast_convert_type(weight.scales, jnp.uint8).astype(jnp.int32)
    blocks = weight.packed.reshape(*exponents.shape, -1)
    empty = (exponents == 0) & (blocks & 0x77 == 0).all(axis=-1)
    largest = jnp.max(jnp.where(empty, 0, exponents), axis=1, initial=21, keepdims=True)
    relative = exponents - largest + 30
    fits = (empty | (relative >= 1)) & (exponents < 255)
    scales = jnp.where(empty, 0, relative << 3).astype(jnp.uint8)
    divisor = jax.lax.bitcast_convert_type(274 - largest[:, 0] << 23, jnp.float32)
    return _tiles(weight.packed, scales, divisor, "mxfp4"), fits.all()


def _tiles(packed, scales, divisor, form) -> Fp4Tiles:
    """Arranges codes uint8 [N, K/2] and scales, bytes for equal blocks, in tile order."""
    n, half = packed.shape
    rows, columns = -(-n // TILE_ROWS), -(-2 * half // TILE_COLUMNS)

    def cut(array, width):
        """Reshapes [N, .] to [tile row, tile column, row, width], padded with zeros."""
        padding = ((0, rows * TILE_ROWS - n), (0, columns * width - array.shape[1]))
        tiles = jnp.pad(array, padding).reshape(rows, TILE_ROWS, columns, width)
        return tiles.swapaxes(1, 2)

    pairs = cut(packed, TILE_COLUMNS // 2).reshape(rows, columns, TILE_ROWS, 2, 8, 4)
    raw = _spread(pairs & 15) | _spread(pairs >> 4) << 16
    turned = [_rotate(raw[..., q, :], -turn) for q, turn in enumerate(ROTATIONS)]
    mixed = turned[6] | turned[7]
    words = jnp.stack(
        [
            turned[0] | turned[1] | turned[2] | mixed & jnp.uint32(MIX),
            turned[3] | turned[4] | turned[5] | mixed & ~jnp.uint32(MIX),
        ],
        axis=-1,
    )  # [..., 2, 4 lanes, 2]
    codes = words.swapaxes(-3, -2).reshape(rows, columns, CODE_WORDS)

    quads = cut(scales, 4 * SCALE_WORDS[form] // TILE_ROWS)
    quads = quads.reshape(rows, columns, SCALE_WORDS[form], 4).astype(jnp.uint32) << 4
    second = _rotate(quads[..., 2] | quads[..., 3] << 16, -8)
    return Fp4Tiles(
        codes=codes,
        scales=quads[..., 0] | quads[..., 1] << 16 | second,
        divisor=divisor,
        inputs=2 * half,
        format=form,
    )


@jax.jit
def from_tiles(tiles: Fp4Tiles) -> Fp4Weight:
    """Permutes a weight from tile order to checkpoint order, the inverse of `to_tiles`."""
    n, k = tiles.shape
    rows, columns, _ = tiles.codes.shape

    def join(array, width):
        """The inverse of `cut`."""
        whole = array.swapaxes(1, 2).reshape(rows * TILE_ROWS, columns * array.shape[-1])
        return whole[:n, :width]

    words = tiles.codes.reshape(rows, columns, TILE_ROWS, 4, 2, 2).swapaxes(3, 4)
    raw = jnp.stack(pair_bits(words[..., 0], words[..., 1]), axis=-2)
    low, high = _gather(raw), _gather(raw >> 16)
    packed = (low | high << 4).astype(jnp.uint8).reshape(rows, columns, TILE_ROWS, -1)

    pairs = scale_bits(tiles.scales)
    bytes_ = jnp.stack([pairs[0] >> 4, pairs[0] >> 20, pairs[1] >> 4, pairs[1] >> 20], axis=-1)
    bytes_ = (bytes_ & 255).astype(jnp.uint8).reshape(rows, columns, TILE_ROWS, -1)
    bytes_ = join(bytes_, k // (16 if tiles.format == "nvfp4" else 32))
    packed = join(packed, k // 2)
    if tiles.format == "mxfp4":
        largest = 274 - (jax.lax.bitcast_convert_type(tiles.divisor, jnp.int32) >> 23)
        bytes_ = bytes_.astype(jnp.int32) >> 3
        exponents = jnp.where(bytes_ == 0, 0, bytes_ + largest[:, None] - 30).astype(jnp.uint8)
        scales = jax.lax.bitcast_convert_type(exponents, jnp.float8_e8m0fnu)
        return Fp4Weight(packed, scales)
    low_scales = jnp.searchsorted(jnp.asarray(_SUBNORMAL, jnp.uint8), jnp.minimum(bytes_, 30))
    scales = jnp.where(bytes_ < 32, low_scales.astype(jnp.uint8), bytes_ - 24)
    scales = jax.lax.bitcast_convert_type(scales, jnp.float8_e4m3fn)
    return Fp4Weight(packed, scales, tiles.divisor)


def pair_bits(first: jax.Array, second: jax.Array) -> list[jax.Array]:
    """The eight pairs of two code words, each as the bits of two bfloat16 of code * 2^-126."""
    mixed = first & jnp.uint32(MIX) | second & ~jnp.uint32(MIX)
    sources = (first, first, first, second, second, second, mixed, mixed)
    return [
        _rotate(word, turn) & jnp.uint32(MASK)
        for word, turn in zip(sources, ROTATIONS, strict=True)
    ]


def scale_bits(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The four scales of each word, as two pairs of bfloat16 bits without SCALE_BITS."""
    mask = jnp.uint32(SCALE_MASK)
    return words & mask, _rotate(words, 8) & mask


def _spread(codes: jax.Array) -> jax.Array:
    """The sign to bit 15, the magnitude to bits 8..6."""
    codes = codes.astype(jnp.uint32)
    return (codes & 8) << 12 | (codes & 7) << 6


def _gather(bits: jax.Array) -> jax.Array:
    """The inverse of `_spread`."""
    return bits >> 12 & 8 | bits >> 6 & 7


def _rotate(words: jax.Array, left: int) -> jax.Array:
    left %= 32
    return words << left | words >> (32 - left) if left else words
