"""Four-bit weights: the NVFP4 format, its quantiser and the packed tensor that the policy stores.

NVFP4 (https://arxiv.org/abs/2509.25149) writes a weight as `code * scale / global_scale`: a 4-bit
E2M1 code, an FP8 (E4M3) scale for every 16 consecutive inputs, one float32 divisor for the tensor.
The bytes are those of llm-compressor's NVFP4A16 checkpoints, bit for bit.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import struct

from pallas_kernels import fp4_matmul
from qerl_jax.errors import UserError

Array = Any  # NumPy while loading, jax.Array in the policy

BLOCK = fp4_matmul.BLOCK  # inputs that share an FP8 scale
_E2M1_MAX = 6.0
_E4M3_MAX = 448.0
_BFLOAT16 = ml_dtypes.bfloat16
_E4M3 = ml_dtypes.float8_e4m3fn


@struct.dataclass
class QuantTensor:
    """A frozen [N, K] weight in 4 bits; N outputs, K inputs.

    Attributes:
        packed: uint8 [N, K/2], two codes a byte, the even column in the low nibble.
        scales: float8_e4m3fn [N, K/16], positive.
        global_scale: float32 [N], the divisor of each row. Rows of one checkpoint tensor share it;
            fused projections (q, k, v and gate, up) may differ from one another.
        format: the name of the number format.
    """

    packed: Array
    scales: Array
    global_scale: Array
    format: str = struct.field(pytree_node=False, default="nvfp4")

    @property
    def shape(self) -> tuple[int, int]:
        """The logical shape (N, K)."""
        return self.packed.shape[0], 2 * self.packed.shape[1]


def quantize_nvfp4(weights: Sequence[np.ndarray]) -> QuantTensor:
    """Rounds the members of one fused group to NVFP4, as llm-compressor's NVFP4A16 does.

    The scales are computed in bfloat16 where llm-compressor does so, which makes the bytes equal.
    The members share one global scale, the smallest of theirs.

    Args:
        weights: bfloat16 [N_i, K] each, for example [q, k, v].

    Returns:
        A QuantTensor of NumPy arrays with the rows of all members stacked, [sum N_i, K].

    Raises:
        UserError: K is not a multiple of 16, or a weight is not finite.
    """
    inputs = weights[0].shape[1]
    if inputs % BLOCK:
        raise UserError(
            f"NVFP4 needs a multiple of {BLOCK} inputs per row, got a weight of shape "
            f"{weights[0].shape}; load the model with --config.model.format=bf16"
        )
    weights = [np.asarray(w, _BFLOAT16) for w in weights]
    global_scale = min(_global_scale(w) for w in weights)
    packed, scales = zip(*(_pack(w, global_scale) for w in weights), strict=True)
    rows = sum(w.shape[0] for w in weights)
    return QuantTensor(
        packed=np.concatenate(packed),
        scales=np.concatenate(scales),
        global_scale=np.full(rows, global_scale, np.float32),
    )


def dequantize(weight: QuantTensor, dtype: jnp.dtype) -> jax.Array:
    """The weight [N, K] that a QuantTensor stands for, computed in float32."""
    return fp4_matmul.dequantize(kernel_weight(weight), dtype)


def kernel_weight(weight: QuantTensor) -> fp4_matmul.Fp4Weight:
    """The arrays of a QuantTensor as the matmul takes them."""
    return fp4_matmul.Fp4Weight(weight.packed, weight.scales, weight.global_scale)


def _global_scale(weight: np.ndarray) -> np.float32:
    """bfloat16(bfloat16(1 / amax) * 2688), where 2688 = 448 * 6."""
    amax = np.float32(np.max(np.abs(weight)))
    if not np.isfinite(amax):
        raise UserError(f"a weight of shape {weight.shape} holds values that are not finite")
    if amax == 0:
        return np.float32(1.0)
    reciprocal = np.float32(_BFLOAT16(np.float32(1.0) / amax))
    return np.float32(_BFLOAT16(reciprocal * np.float32(_E4M3_MAX * _E2M1_MAX)))


def _pack(weight: np.ndarray, global_scale: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Returns the packed codes uint8 [N, K/2] and scales float8_e4m3fn [N, K/16]."""
    outputs, inputs = weight.shape
    blocks = weight.astype(np.float32).reshape(outputs, inputs // BLOCK, BLOCK)
    amax = np.abs(blocks).max(axis=-1)
    ideal = (amax / np.float32(_E2M1_MAX)).astype(_BFLOAT16).astype(np.float32) * global_scale
    scales = np.clip(ideal, 0.0, _E4M3_MAX).astype(_E4M3)
    scales = np.where(scales == 0, _E4M3(0.125), scales)
    blocks /= (scales.astype(np.float32) / global_scale)[..., None]
    codes = _e2m1_codes(blocks).reshape(outputs, inputs)
    return codes[:, 0::2] | (codes[:, 1::2] << 4), scales


def _e2m1_codes(values: np.ndarray) -> np.ndarray:
    """The 4-bit codes (sign, 3-bit magnitude index) nearest to float32 values, ties to even."""
    magnitude = np.abs(values)
    codes = (values < 0).astype(np.uint8) << 3
    for index, midpoint in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        # The tie goes to the even one of the two neighbouring codes.
        codes += magnitude > midpoint if index % 2 == 0 else magnitude >= midpoint
    return codes
