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

`fp4_matmul.FORMATS` holds the formats as data. All quantizers round to nearest, without calibration
data.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import struct

from pallas_kernels import fp4_matmul
from pallas_kernels.fp4_matmul import FORMATS
from qerl_jax.errors import UserError

Array = Any  # np.ndarray while loading, jax.Array in the policy

BLOCK = fp4_matmul.BLOCK  # inputs that share an FP8 scale in NVFP4
_E2M1_MAX = 6.0
_E4M3_MAX = 448.0
_BFLOAT16 = ml_dtypes.bfloat16
_E4M3 = ml_dtypes.float8_e4m3fn
_E8M0 = ml_dtypes.float8_e8m0fnu
_E8M0_BIAS = 127


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
        tiles: the same weight in the order of the Hopper kernel, as `tile_order` returns it, or
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
    if format not in _QUANTIZERS:
        raise UserError(f"format={format!r}: must be one of {', '.join(_QUANTIZERS)}")
    return _QUANTIZERS[format](weights)


def quantize_nvfp4(weights: Sequence[np.ndarray]) -> QuantTensor:
    """Rounds a fused group, as in `quantize`, to NVFP4 as llm-compressor's NVFP4A16 does.

    The scales are computed in bfloat16 where llm-compressor does so, which makes the bytes equal.
    All members get the same global scale, the smallest one that any member would have alone.
    """
    weights = _rounded(weights, "nvfp4")
    global_scale = min(_global_scale(w) for w in weights)
    packed, scales = zip(*(_pack_nvfp4(w, global_scale) for w in weights), strict=True)
    rows = sum(w.shape[0] for w in weights)
    return QuantTensor(
        packed=np.concatenate(packed),
        scales=np.concatenate(scales),
        global_scale=np.full(rows, global_scale, np.float32),
    )


def quantize_mxfp4(weights: Sequence[np.ndarray]) -> QuantTensor:
    """Rounds a fused group, as in `quantize`, to MXFP4 as OCP Microscaling v1.0, section 6.3, does.

    The scale of a block is 2^(floor(log2(amax)) - 2), so that the largest weight is 4 to 8 times
    the scale; a weight of more than 6 times the scale becomes 6 times the scale. compressed-tensors
    takes the next power of two where amax is at least 1.75 times a power of two.
    """
    packed, scales = zip(*(_pack_mxfp4(w) for w in _rounded(weights, "mxfp4")), strict=True)
    return QuantTensor(packed=np.concatenate(packed), scales=np.concatenate(scales))


def quantize_nf4(weights: Sequence[np.ndarray]) -> QuantTensor:
    """Rounds a fused group, as in `quantize`, to NF4 as bitsandbytes' `quantize_4bit` does.

    The scale of a block is its largest magnitude. The scales themselves are not quantized
    (bitsandbytes calls that `compress_statistics`; it gives 4.127 bits a weight). Where a whole
    block is zero, the bytes are those of bitsandbytes' CPU code; its CUDA kernels write another
    code, which also means zero.
    """
    packed, scales = zip(*(_pack_nf4(w) for w in _rounded(weights, "nf4")), strict=True)
    return QuantTensor(packed=np.concatenate(packed), scales=np.concatenate(scales))


_QUANTIZERS = {"nvfp4": quantize_nvfp4, "mxfp4": quantize_mxfp4, "nf4": quantize_nf4}


def dequantize(weight: QuantTensor, dtype: jnp.dtype) -> jax.Array:
    """Returns the weight [N, K] of a QuantTensor in `dtype`, computed in float32."""
    stored = checkpoint_order(weight)
    rows = fp4_matmul.Fp4Weight(stored.packed, stored.scales, stored.global_scale)
    return fp4_matmul.dequantize(rows, dtype)


def tile_order(weight: QuantTensor) -> QuantTensor:
    """Returns the weight in the order of the Hopper kernel, or the weight itself.

    NF4 weights have no such order, and neither have MXFP4 weights whose scales lie too far apart.
    """
    rows = fp4_matmul.Fp4Weight(weight.packed, weight.scales, weight.global_scale)
    try:
        return QuantTensor(tiles=fp4_matmul.to_tiles(rows))
    except ValueError:
        return weight


def in_machine_order(layer: dict) -> dict:
    """Returns a layer of the policy with its packed projections in the order of this machine.

    The order is that of the Hopper kernel where the kernel runs, otherwise that of checkpoints.
    """
    if not fp4_matmul.supports_device():
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


def _rounded(weights: Sequence[np.ndarray], format: str) -> list[np.ndarray]:
    """Returns the weights in bfloat16 after checking that their inputs fill whole blocks."""
    inputs, block = weights[0].shape[1], FORMATS[format].block
    if inputs % block:
        raise UserError(
            f"{format} needs a multiple of {block} inputs per row, got a weight of shape "
            f"{weights[0].shape}; load the model in bf16 (in a run: "
            "--config.model.format=bf16)"
        )
    return [np.asarray(w, _BFLOAT16) for w in weights]


def _global_scale(weight: np.ndarray) -> np.float32:
    """Returns bfloat16(bfloat16(1 / amax) * 2688), where 2688 = 448 * 6."""
    amax = np.float32(np.max(np.abs(weight)))
    _check_finite(amax, weight)
    if amax == 0:
        return np.float32(1.0)
    with np.errstate(over="ignore"):
        reciprocal = np.float32(_BFLOAT16(np.float32(1.0) / amax))
        scale = np.float32(_BFLOAT16(reciprocal * np.float32(_E4M3_MAX * _E2M1_MAX)))
    # Below an amax of 8e-36 the product overflows; compressed-tensors then writes 1.0 as well.
    return scale if np.isfinite(scale) else np.float32(1.0)


def _pack_nvfp4(weight: np.ndarray, global_scale: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Returns the packed codes uint8 [N, K/2] and scales float8_e4m3fn [N, K/16]."""
    blocks, amax = _blocks(weight, "nvfp4")
    ideal = (amax / np.float32(_E2M1_MAX)).astype(_BFLOAT16).astype(np.float32) * global_scale
    scales = np.clip(ideal, 0.0, _E4M3_MAX).astype(_E4M3)
    scales = np.where(scales == 0, _E4M3(0.125), scales)
    blocks /= (scales.astype(np.float32) / global_scale)[..., None]
    return _pack(_e2m1_codes(blocks), "nvfp4"), scales


def _pack_mxfp4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the packed codes uint8 [N, K/2] and scales float8_e8m0fnu [N, K/32]."""
    blocks, amax = _blocks(weight, "mxfp4")
    # The mantissa of frexp lies in [0.5, 1), and the largest power of two in E2M1 is 4.
    exponents = np.where(amax > 0, np.frexp(amax)[1] - 3, -_E8M0_BIAS)
    exponents = np.maximum(exponents, -_E8M0_BIAS)
    blocks *= np.ldexp(np.float32(1.0), -exponents)[..., None]
    scales = (exponents + _E8M0_BIAS).astype(np.uint8).view(_E8M0)
    return _pack(_e2m1_codes(blocks), "mxfp4"), scales


def _pack_nf4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the packed codes uint8 [N, K/2] and scales float32 [N, K/64]."""
    blocks, amax = _blocks(weight, "nf4")
    # bitsandbytes multiplies by the reciprocal, which it bounds. A division would give the same
    # codes: no ratio of two bfloat16 numbers is within 1e-6 of a midpoint.
    blocks *= (np.float32(1.0) / np.maximum(amax, np.float32(1e-38)))[..., None]
    codebook = np.array(FORMATS["nf4"].codebook, np.float32)
    codes = np.zeros(blocks.shape, np.uint8)
    for midpoint in (codebook[:-1] + codebook[1:]) / 2:
        codes += blocks > midpoint
    return _pack(codes, "nf4"), amax


def _blocks(weight: np.ndarray, format: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns float32 weights [N, K/block, block] and the largest magnitudes [N, K/block]."""
    blocks = weight.astype(np.float32).reshape(len(weight), -1, FORMATS[format].block)
    amax = np.abs(blocks).max(axis=-1)
    _check_finite(amax, weight)
    return blocks, amax


def _check_finite(amax: np.ndarray | np.float32, weight: np.ndarray) -> None:
    if not np.isfinite(amax).all():
        raise UserError(f"a weight of shape {weight.shape} holds values that are not finite")


def _pack(codes: np.ndarray, format: str) -> np.ndarray:
    """Packs codes [N, K/block, block] into bytes [N, K/2], two codes in each."""
    codes = codes.reshape(len(codes), -1)
    even, odd = codes[:, 0::2], codes[:, 1::2]
    return even << 4 | odd if FORMATS[format].high_first else even | odd << 4


def _e2m1_codes(values: np.ndarray) -> np.ndarray:
    """Returns the 4-bit codes (sign, 3-bit magnitude index) nearest to float32 values.

    Ties go to the even code.
    """
    magnitude = np.abs(values)
    codes = (values < 0).astype(np.uint8) << 3
    for index, midpoint in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        # A tie goes to the even one of the two neighboring codes.
        codes += magnitude > midpoint if index % 2 == 0 else magnitude >= midpoint
    return codes
