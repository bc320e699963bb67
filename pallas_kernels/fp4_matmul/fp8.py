"""Products of W4A8, simulated: NVFP4 weights and activations rounded to e4m3, by XLA.

A kernel that unpacks NVFP4 in registers has code * scale of the block, divides by 8, which is
exact, and rounds to e4m3; the row's divisor multiplies the result. An e4m3 number is exact in
bfloat16, so a product of bfloat16 arrays that is accumulated in float32 has the terms of one in
FP8.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import matvec
from pallas_kernels.fp4_matmul import reference
from pallas_kernels.fp4_matmul.reference import Fp4Weight

LARGEST = 448.0  # of e4m3
DIVISOR = 8.0  # code * scale is at most 6 * 448
_SMALLEST_NORMAL, _SUBNORMAL_STEP = 2.0**-6, 2.0**-9


class Fp8Weight(NamedTuple):
    """A frozen weight [N, K] of which every number is an e4m3 number times that of its row."""

    codes: Any  # [N, K], the e4m3 numbers in the dtype of products
    factor: Any  # float32 [N]

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (N, K)."""
        return self.codes.shape


def round_e4m3(x: jax.Array) -> jax.Array:
    """Returns float32 numbers of at most 448 rounded to the nearest in e4m3, ties to even.

    A conversion there and back might be left out by XLA, and may round twice.
    """
    normal = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=3)
    subnormal = jnp.round(x / _SUBNORMAL_STEP) * _SUBNORMAL_STEP
    return jnp.where(jnp.abs(x) < _SMALLEST_NORMAL, subnormal, normal)


def from_fp4(weight: Fp4Weight, dtype: Any) -> Fp8Weight:
    """Returns an NVFP4 weight rounded to e4m3, its numbers stored in `dtype`."""
    values = reference.dequantize(weight._replace(global_scale=None), jnp.float32)
    codes = round_e4m3(values / DIVISOR).astype(dtype)
    return Fp8Weight(codes, DIVISOR / weight.global_scale)


def round_tokens(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns x [..., K] of each token as e4m3 numbers, in x's dtype, and scales [..., 1]."""
    wide = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=-1, keepdims=True)
    scale = jnp.maximum(largest, jnp.float32(1e-30)) / LARGEST
    codes = round_e4m3(jnp.clip(wide / scale, -LARGEST, LARGEST))
    return codes.astype(x.dtype), scale


@jax.custom_vjp
def product(x: jax.Array, weight: Fp8Weight) -> jax.Array:
    """Returns x W^T in float32, with x rounded token by token; the gradient ignores that."""
    codes, scale = round_tokens(x)
    rows = codes.reshape(-1, x.shape[-1])
    y = matvec.matmul(rows, weight.codes, jnp.float32).reshape(*x.shape[:-1], -1)
    return y * scale * weight.factor


def _product_fwd(x, weight):
    return product(x, weight), (weight, x[:0])


def _product_bwd(residuals, dy):
    weight, empty = residuals
    dy = (dy * weight.factor).astype(empty.dtype)
    return reference.dot(dy, weight.codes.T, empty.dtype), None


product.defvjp(_product_fwd, _product_bwd)
