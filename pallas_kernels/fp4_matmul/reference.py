"""The definition of an NVFP4 weight, and the product by dequantise-and-dot for any backend."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Array = Any  # jax.Array; in a cotangent, NumPy float0

BLOCK = 16  # inputs that share a scale


class Fp4Weight(NamedTuple):
    """A frozen [N, K] weight as it lies in an NVFP4 checkpoint, with one global scale a row.

    Attributes:
        packed: uint8 [N, K/2], two E2M1 codes a byte, the even column in the low nibble.
        scales: float8_e4m3fn [N, K/16].
        global_scale: float32 [N], a divisor.
    """

    packed: Array
    scales: Array
    global_scale: Array


def dequantize(weight: Fp4Weight, dtype: jnp.dtype) -> jax.Array:
    """W[n, k] = e2m1(code[n, k]) * (scale[n, k // 16] / global_scale[n]), in float32, [N, K]."""
    outputs, half = weight.packed.shape
    # The arithmetic stays in 8 bits up to the last moment: it is several times faster on a CPU.
    codes = jnp.stack([weight.packed & 15, weight.packed >> 4], axis=-1)
    magnitude = codes & 7
    doubled = jnp.where(
        magnitude < 4, magnitude, jnp.where(magnitude < 6, 2 * magnitude - 4, 4 * magnitude - 16)
    ).astype(jnp.int8)
    doubled = jnp.where(codes > 7, -doubled, doubled)
    # XLA would turn a division by a broadcast into a product with the reciprocal: other rounding.
    divisors = jnp.broadcast_to(weight.global_scale[:, None], weight.scales.shape)
    divisors = jax.lax.optimization_barrier(divisors)
    scales = 0.5 * weight.scales.astype(jnp.float32) / divisors
    blocks = doubled.reshape(outputs, 2 * half // BLOCK, BLOCK).astype(jnp.float32)
    return (blocks * scales[..., None]).astype(dtype).reshape(outputs, 2 * half)


def matmul(x: jax.Array, weight: Fp4Weight) -> jax.Array:
    """Returns x [..., K] times the transposed weight, [..., N], accumulated in float32."""
    x, weight = _bind(x, weight)
    return dot(x, dequantize(weight, x.dtype))


def matmul_transposed(dy: jax.Array, weight: Fp4Weight) -> jax.Array:
    """Returns dy [..., N] times the weight, [..., K]: the gradient of `matmul` by x."""
    dy, weight = _bind(dy, weight)
    return jax.lax.dot_general(
        dy,
        dequantize(weight, dy.dtype),
        (((dy.ndim - 1,), (0,)), ((), ())),
        preferred_element_type=jnp.float32,
    ).astype(dy.dtype)


def _bind(x: jax.Array, weight: Fp4Weight) -> tuple[jax.Array, Fp4Weight]:
    """Makes the packed bytes depend on x.

    XLA otherwise moves the dequantisation out of a loop whose weights stay the same, a scan over
    micro-batches or a chunk of decode steps, and holds a dense copy of the whole model.
    """
    x, packed = jax.lax.optimization_barrier((x, weight.packed))
    return x, weight._replace(packed=packed)


def dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns x [..., K] times a dense [N, K] weight transposed, accumulated in float32."""
    return jax.lax.dot_general(
        x,
        weight,
        (((x.ndim - 1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
    ).astype(x.dtype)
