"""Four-bit weights: the number formats, their quantizers and the packed tensor of the policy.

A format writes a weight as a 4-bit code times the scale of its block. A block is a group of
consecutive inputs of a row:

    nvfp4  E2M1 codes and, for 16 inputs, an FP8 (E4M3) scale, divided by one float32 for the
           tensor: 4.5 bits a weight (https://arxiv.org/abs/2509.25149). The bytes equal those of
           llm-compressor's NVFP4A16.
    mxfp4  E2M1 codes and, for 32 inputs, a power of two (E8M0) as scale: 4.25 bits a weight (OCP
           Microscaling v1.0).
    nf4    quantiles of a normal distribution as codes and, for 64 inputs, a float32 scale: 4.5 bits
           a weight (https://arxiv.org/abs/2305.14314). The bytes equal those of bitsandbytes.

`fp4_matmul.FORMATS` holds the formats as data. All quantizers here round to nearest, without
calibration data; `quantization.gptq` finds codes and scales of NVFP4 by the inputs of a weight.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import struct
from jax.typing import DTypeLike

from pallas_kernels import fp4_matmul
from pallas_kernels.fp4_matmul import FORMATS
from qerl_jax.errors import UserError

Array = Any  # np.ndarray while loading, jax.Array in the policy

BLOCK = fp4_matmul.BLOCK  # inputs that share an FP8 scale in NVFP4
_E2M1_MAX = 6.0
_E4M3_MAX = 448.0
_BFLOAT16 = ml_dtypes.bfloat16
_E4M3 = ml_dtypes.float8_e4m3fn
_E8M0_BIAS = 127
_MAGNITUDE = 0x7FFF  # bits of a bfloat16 without its sign
_INFINITE_BITS = 0x7F80


@struct.dataclass
class QuantTensor:
    """A frozen [N, K] weight in 4 bits, with N outputs and K inputs.

    The dtype of the scales tells the format, so that no field can contradict the arrays.

    Attributes:
        packed: uint8 [N, K/2], two codes in each byte.
        scales: [N, K/block] in the format's scale_dtype, positive where a block is not zero.
        global_scale: float32 [N], the divisor of each row in NVFP4, or None in another format. The
            rows of one checkpoint tensor have the same divisor; fused projections (q, k, v and
            gate, up) may have different divisors.
        tiles: the same weight in the order of the kernels for GPUs, as `tile_order` returns it, or
            None. Where it is set, the other three attributes are None.
    """

    packed: Array = None
    scales: Array = None
    global_scale: Array = None
    tiles: fp4_matmul.Fp4Tiles | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """The logical shape (N, K)."""
        if self.tiles is not None:
            return self.tiles.shape
        return self.packed.shape[0], 2 * self.packed.shape[1]

    @property
    def format(self) -> str:
        """The name of the number format."""
        if self.tiles is not None:
            return self.tiles.format
        return fp4_matmul.format_of(self.scales.dtype).name


def quantize(weights: Sequence[np.ndarray], *, format: str) -> QuantTensor:
    """Rounds the members of one fused group to a format.

    Args:
        weights: members of shape [N_i, K], for example [q, k, v]; they are rounded to bfloat16
            first.
        format: 'nvfp4', 'mxfp4' or 'nf4'.

    Returns:
        A QuantTensor of NumPy arrays with the rows of all members stacked, [sum N_i, K].

    Raises:
        UserError: the format is unknown, K is not a multiple of its block, or a weight is not
            finite.
    """
    return jax.tree.map(np.array, quantize_on_device(weights, format=format))


def quantize_on_device(weights: Sequence[Array], *, format: str) -> QuantTensor:
    """Rounds a fused group, as in `quantize`, and leaves the result on the default device.

    NVFP4 rounds as llm-compressor's NVFP4A16 does. The scales are computed in bfloat16 where
    llm-compressor does so, which makes the bytes equal. All members get the same global scale, the
    smallest one that any member would have alone.

    MXFP4 rounds as OCP Microscaling v1.0, section 6.3, does. The scale of a block is
    2^(floor(log2(amax)) - 2), so that the largest weight is 4 to 8 times the scale; a weight of
    more than 6 times the scale becomes 6 times the scale. compressed-tensors takes the next power
    of two where amax is at least 1.75 times a power of two.

    NF4 rounds as bitsandbytes' `quantize_4bit` does. The scale of a block is its largest magnitude.
    The scales themselves are not quantized (bitsandbytes calls that `compress_statistics`; it gives
    4.127 bits a weight). Where a whole block is zero, the bytes are those of bitsandbytes' CPU
    code; its CUDA kernels write another code, which also means zero.

    The device only compares integers. A weight is one of 2^16 bfloat16 numbers, so NumPy computes
    in small tables which scale follows from a block's largest magnitude, and at which weight the
    next code begins. Float arithmetic on the device would change bytes: XLA flushes subnormal
    numbers on a CPU, and its division on a GPU is not rounded to nearest.

    Args:
        weights: members of shape [N_i, K], as in `quantize`.
        format: 'nvfp4', 'mxfp4' or 'nf4'.

    Returns:
        A QuantTensor of arrays on the device, [sum N_i, K].

    Raises:
        UserError: as in `quantize`.
    """
    if format not in FORMATS:
        raise UserError(f"format={format!r}: must be one of {', '.join(FORMATS)}")
    for weight in weights:
        check_inputs(weight.shape, format)
    bits = [[bfloat16_bits(weight)] for weight in weights]
    return quantize_bits(bits, format=format)


def quantize_bits(members: Sequence[Sequence[jax.Array]], *, format: str) -> QuantTensor:
    """Rounds a fused group that is on the device, as `quantize_on_device` does.

    Args:
        members: chunks of the rows of each member, uint16 [rows, K] with the bits of bfloat16
            weights.
        format: 'nvfp4', 'mxfp4' or 'nf4'.

    Returns:
        A QuantTensor of arrays on the device, [sum N_i, K].

    Raises:
        UserError: a weight is not finite.
    """
    bits = [chunk for chunks in members for chunk in chunks]
    chunk_maxima = iter(np.asarray(_largest_bits(bits)))
    largest = np.array([max(next(chunk_maxima) for _ in chunks) for chunks in members])
    for chunks, amax in zip(members, largest, strict=True):
        if amax >= _INFINITE_BITS:
            shape = (sum(map(len, chunks)), chunks[0].shape[1])
            raise UserError(f"a weight of shape {shape} holds values that are not finite")
    if format == "nf4":
        packed, scales = _encode(bits, None, _nf4_thresholds(), format=format)
        return QuantTensor(packed=packed, scales=scales)
    if format == "mxfp4":
        packed, scales = _encode(bits, *_mxfp4_tables(), format=format)
        return QuantTensor(packed=packed, scales=scales)
    global_scale = min(_global_scale(amax) for amax in _values(largest))
    packed, scales = _encode(bits, *_nvfp4_tables(global_scale), format=format)
    rows = np.full(len(packed), global_scale, np.float32)
    return QuantTensor(packed=packed, scales=scales, global_scale=jax.device_put(rows))


def quantize_nvfp4(weights: Sequence[np.ndarray]) -> QuantTensor:
    """Rounds a fused group to NVFP4, as in `quantize`."""
    return quantize(weights, format="nvfp4")


def dequantize(weight: QuantTensor, dtype: DTypeLike) -> jax.Array:
    """Returns the weight [N, K] of a QuantTensor in `dtype`, computed in float32."""
    stored = checkpoint_order(weight)
    rows = fp4_matmul.Fp4Weight(stored.packed, stored.scales, stored.global_scale)
    return fp4_matmul.dequantize(rows, dtype)


EVERY = -1  # as a number of rows: all packed weights are rounded to e4m3


def to_fp8(weight: QuantTensor, dtype: DTypeLike) -> fp4_matmul.fp8.Fp8Weight:
    """Returns an NVFP4 weight [N, K] rounded to e4m3, its numbers stored in `dtype`."""
    stored = checkpoint_order(weight)
    rows = fp4_matmul.Fp4Weight(stored.packed, stored.scales, stored.global_scale)
    return fp4_matmul.fp8.from_fp4(rows, dtype)


def rounds_to_fp8(dequantize: str) -> bool:
    """Whether a rollout that dequantizes so rounds weights and activations to e4m3."""
    return dequantize in ("fp8", "fp8_both")


def tile_order(weight: QuantTensor) -> QuantTensor:
    """Returns the weight in the order of the kernels for GPUs, or the weight itself.

    NF4 weights have no such order, and neither have MXFP4 weights whose scales lie too far apart.
    """
    rows = fp4_matmul.Fp4Weight(weight.packed, weight.scales, weight.global_scale)
    try:
        return QuantTensor(tiles=fp4_matmul.to_tiles(rows))
    except ValueError:
        return weight


def in_machine_order(layer: dict) -> dict:
    """Returns a layer of the policy with its packed projections in the order of this machine.

    The order is that of the kernels where one of them runs, otherwise that of checkpoints.
    """
    if fp4_matmul.device_kernel() == "xla":
        return layer
    return {
        name: tile_order(leaf) if isinstance(leaf, QuantTensor) else leaf
        for name, leaf in layer.items()
    }


def checkpoint_order(weight: QuantTensor) -> QuantTensor:
    """Returns the weight in the order of checkpoints, whatever its order in memory."""
    if weight.tiles is None:
        return weight
    return QuantTensor(*fp4_matmul.from_tiles(weight.tiles))


def kernel_weight(weight: QuantTensor) -> fp4_matmul.Fp4Weight | fp4_matmul.Fp4Tiles:
    """Returns the arrays of a QuantTensor as `fp4_matmul` takes them."""
    if weight.tiles is not None:
        return weight.tiles
    return fp4_matmul.Fp4Weight(weight.packed, weight.scales, weight.global_scale)


def check_inputs(shape: tuple[int, ...], format: str) -> None:
    """Checks that the inputs of a weight [N, K] fill whole blocks of a format.

    Raises:
        UserError: K is not a multiple of the block.
    """
    block = FORMATS[format].block
    if shape[1] % block:
        raise UserError(
            f"{format} needs a multiple of {block} inputs per row, got a weight of shape "
            f"{shape}; load the model in bf16 (in a run: --config.model.format=bf16)"
        )


def bfloat16_bits(weight: Array) -> jax.Array:
    """Returns the bits of a weight rounded to bfloat16, as uint16 [N, K] on the device.

    A device rounds by integers, as its own conversion may flush subnormal numbers.
    """
    if isinstance(weight, jax.Array):
        return _bfloat16_bits(weight)
    rounded = np.ascontiguousarray(np.asarray(weight, _BFLOAT16))
    return jax.device_put(rounded.view(np.uint16))


@jax.jit
def _bfloat16_bits(weight: jax.Array) -> jax.Array:
    if weight.dtype == jnp.bfloat16:
        return jax.lax.bitcast_convert_type(weight, jnp.uint16)
    bits = jax.lax.bitcast_convert_type(weight.astype(jnp.float32), jnp.uint32)
    nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    nan = bits & 0x7FFFFFFF > 0x7F800000
    return jnp.where(nan, 0x7FC0, nearest).astype(jnp.uint16)


def _global_scale(amax: np.float32) -> np.float32:
    """Returns bfloat16(bfloat16(1 / amax) * 2688), where 2688 = 448 * 6."""
    if amax == 0:
        return np.float32(1.0)
    with np.errstate(over="ignore"):
        reciprocal = np.float32(_BFLOAT16(np.float32(1.0) / amax))
        scale = np.float32(_BFLOAT16(reciprocal * np.float32(_E4M3_MAX * _E2M1_MAX)))
    # Below an amax of 8e-36 the product overflows; compressed-tensors then writes 1.0 as well.
    return scale if np.isfinite(scale) else np.float32(1.0)


def _values(bits: np.ndarray) -> np.ndarray:
    """Returns the float32 values of the bits of bfloat16 magnitudes."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


@functools.lru_cache(maxsize=256)  # experts have many scales, and the same ones again
def _nvfp4_tables(global_scale: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Returns the scale byte [2^15] of each largest magnitude, and thresholds [256, 8] by byte."""
    amax = _values(np.arange(_INFINITE_BITS))
    with np.errstate(over="ignore"):
        ideal = (amax / np.float32(_E2M1_MAX)).astype(_BFLOAT16).astype(np.float32) * global_scale
    scales = np.clip(ideal, 0.0, _E4M3_MAX).astype(_E4M3)
    scales = np.where(scales == 0, _E4M3(0.125), scales)
    divisors = np.arange(256, dtype=np.uint8).view(_E4M3).astype(np.float32) / global_scale
    divisors[~(divisors > 0)] = 1.0  # bytes that no block has
    return _pad_table(scales.view(np.uint8)), _e2m1_thresholds(
        lambda values: values / divisors[:, None]
    )


@functools.lru_cache(maxsize=1)
def _mxfp4_tables() -> tuple[np.ndarray, np.ndarray]:
    """Returns the scale byte [2^15] of each largest magnitude, and thresholds [256, 8] by byte."""
    amax = _values(np.arange(_INFINITE_BITS))
    # The mantissa of frexp lies in [0.5, 1), and the largest power of two in E2M1 is 4.
    exponents = np.where(amax > 0, np.frexp(amax)[1] - 3, -_E8M0_BIAS)
    exponents = np.maximum(exponents, -_E8M0_BIAS)
    factors = np.ldexp(np.float32(1.0), _E8M0_BIAS - np.arange(256))
    return (
        _pad_table((exponents + _E8M0_BIAS).astype(np.uint8)),
        _e2m1_thresholds(lambda values: values * factors[:, None]),
    )


@functools.lru_cache(maxsize=1)
def _nf4_thresholds() -> np.ndarray:
    """Returns int16 [2^15, 15]: by largest magnitude, the first weight of each code above 0.

    A weight is the integer of its magnitude's bits, with the weight's sign.
    """
    codebook = np.array(FORMATS["nf4"].codebook, np.float32)
    midpoints = (codebook[:-1] + codebook[1:]) / 2
    amax = _values(np.arange(_INFINITE_BITS))
    # bitsandbytes multiplies by the reciprocal, which it bounds. A division would give the same
    # codes: no ratio of two bfloat16 numbers is within 1e-6 of a midpoint.
    factors = (np.float32(1.0) / np.maximum(amax, np.float32(1e-38)))[:, None]

    def above(keys: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            return np.copysign(_values(np.abs(keys)), keys) * factors > midpoints

    first = _first(above, (len(amax), len(midpoints)), low=1 - _INFINITE_BITS)
    return np.pad(first, ((0, (1 << 15) - len(first)), (0, 0)))


def _pad_table(table: np.ndarray) -> np.ndarray:
    return np.pad(table, (0, (1 << 15) - len(table)))


def _e2m1_thresholds(scaled: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Returns int16 [256, 8]: the bits of the first magnitude above 0, and of codes 1 to 7.

    `scaled` returns the ratios of float32 magnitudes [256, 8] to the scale of each row.
    """
    midpoints = np.array((0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), np.float32)
    # A tie goes to the even one of the two neighboring codes.
    tie_goes_up = np.array((0, 0, 1, 0, 1, 0, 1, 0), bool)

    def above(bits: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            ratios = scaled(_values(bits))
        return (ratios > midpoints) | tie_goes_up & (ratios == midpoints)

    return _first(above, (256, len(midpoints)), low=0)


def _first(
    above: Callable[[np.ndarray], np.ndarray], shape: tuple[int, ...], *, low: int
) -> np.ndarray:
    """Returns by bisection the least integers [shape] from `low` on for which `above` is true.

    Where `above` is true for no finite weight, the integer is that of infinity.
    """
    lower = np.full(shape, low, np.int32)
    upper = np.full(shape, _INFINITE_BITS, np.int32)
    while (lower < upper).any():
        middle = (lower + upper) // 2
        is_above = above(middle) | (middle == _INFINITE_BITS)
        upper = np.where(is_above, middle, upper)
        lower = np.where(is_above, lower, middle + 1)
    return upper.astype(np.int16)


@jax.jit
def _largest_bits(weights: Sequence[jax.Array]) -> jax.Array:
    """Returns the bits of the largest magnitude of each weight; those of NaN are the largest."""
    return jnp.stack([jnp.max(bits & _MAGNITUDE, initial=0) for bits in weights])


@functools.partial(jax.jit, static_argnames="format")
def _encode(
    weights: Sequence[jax.Array],
    scale_table: jax.Array | None,
    thresholds: jax.Array,
    *,
    format: str,
) -> tuple[jax.Array, jax.Array]:
    """Returns the packed codes uint8 [N, K/2] and the scales [N, K/block] of stacked weights.

    The weights are bits of bfloat16, uint16 [N_i, K]. `scale_table` has the scale byte of each
    largest magnitude, uint8 [2^15]; None in NF4. `thresholds` are int16 [2^15, 15] by largest
    magnitude in NF4, otherwise [256, 8] by scale byte.
    """
    form = FORMATS[format]
    bits = jnp.concatenate(weights)
    blocks = bits.reshape(len(bits), -1, form.block)
    magnitude = (blocks & _MAGNITUDE).astype(jnp.int16)
    negative = blocks > _MAGNITUDE
    amax = jnp.max(magnitude, axis=-1).astype(jnp.int32)
    if scale_table is None:
        scales = jax.lax.bitcast_convert_type(amax.astype(jnp.uint32) << 16, jnp.float32)
        limits = thresholds[amax]
        keys = jnp.where(negative, -magnitude, magnitude)
        codes = jnp.zeros(blocks.shape, jnp.uint8)
    else:
        scale_bytes = scale_table[amax]
        scales = jax.lax.bitcast_convert_type(scale_bytes, form.scale_dtype)
        limits = thresholds[scale_bytes]
        keys = magnitude
        codes = (negative & (keys >= limits[..., :1])).astype(jnp.uint8) << 3
        limits = limits[..., 1:]
    for index in range(limits.shape[-1]):
        codes += (keys >= limits[..., index, None]).astype(jnp.uint8)
    pairs = codes.reshape(len(bits), -1, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    return even << 4 | odd if form.high_first else even | odd << 4, scales
