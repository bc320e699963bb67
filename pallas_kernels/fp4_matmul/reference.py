"""The definition of a weight in 4 bits, and its product by dequantize-and-dot on any backend."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.matvec import dot

Array = Any  # jax.Array; in a cotangent, NumPy float0

BLOCK = 16  # inputs that share a scale in NVFP4


@dataclasses.dataclass(frozen=True)
class Format:
    """A number format of 4 bits.

    Attributes:
        name: name in configs.
        codebook: the value of each of the 16 codes.
        block: number of inputs of a row that share a scale.
        scale_dtype: dtype of the scales. No two formats have the same one, so the dtype of a
            weight's scales determines its format.
        high_first: whether the even column is in the high nibble; otherwise it is in the low one.
        global_scale: whether every row also has a float32 divisor of its scales.
    """

    name: str
    codebook: tuple[float, ...]
    block: int
    scale_dtype: jnp.dtype
    high_first: bool
    global_scale: bool


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

# bitsandbytes' table: quantiles of a normal distribution (https://arxiv.org/abs/2305.14314).
_NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)

FORMATS = {
    form.name: form
    for form in (
        Format(
            "nvfp4", _E2M1, BLOCK, jnp.dtype("float8_e4m3fn"), high_first=False, global_scale=True
        ),
        Format(
            "mxfp4", _E2M1, 32, jnp.dtype("float8_e8m0fnu"), high_first=False, global_scale=False
        ),
        Format("nf4", _NF4, 64, jnp.dtype("float32"), high_first=True, global_scale=False),
    )
}


class Fp4Weight(NamedTuple):
    """A frozen [N, K] weight as it lies in a checkpoint; its format follows from `scales`.

    Attributes:
        packed: uint8 [N, K/2], two codes in a byte.
        scales: [N, K/block] in the format's scale_dtype.
        global_scale: float32 [N], divisors of the rows' scales (NVFP4), or None.
    """

    packed: Array
    scales: Array
    global_scale: Array = None


def format_of(scale_dtype: jnp.dtype) -> Format:
    """The format with scales of this dtype.

    Raises:
        ValueError: no format has such scales.
    """
    for form in FORMATS.values():
        if scale_dtype == form.scale_dtype:
            return form
    known = ", ".join(f"{form.scale_dtype} ({name})" for name, form in FORMATS.items())
    raise ValueError(f"scales are {scale_dtype}, expected {known}")


def dequantize(weight: Fp4Weight, dtype: DTypeLike) -> jax.Array:
    """Returns W[n, k] = codebook[code[n, k]] * scale[n, k // block], computed in float32.

    The scale of NVFP4 is `scales / global_scale`. The values of NF4 are those of bitsandbytes in
    every dtype.

    Args:
        weight: packed weight [N, K].
        dtype: dtype of the result.

    Returns:
        [N, K].
    """
    form = format_of(weight.scales.dtype)
    outputs, half = weight.packed.shape
    low, high = weight.packed & 15, weight.packed >> 4
    codes = jnp.stack([high, low] if form.high_first else [low, high], axis=-1)
    if form.codebook == _E2M1:
        values = _e2m1(codes)
    else:
        values = jnp.asarray(form.codebook, jnp.float32)[codes]
    scales = weight.scales.astype(jnp.float32)
    if weight.global_scale is not None:
        # XLA would make a division by a broadcast a product with the reciprocal: other rounding.
        divisors = jnp.broadcast_to(weight.global_scale[:, None], scales.shape)
        scales = scales / jax.lax.optimization_barrier(divisors)
    blocks = values.reshape(outputs, 2 * half // form.block, form.block)
    return (blocks * scales[..., None]).astype(dtype).reshape(outputs, 2 * half)


def _e2m1(codes: jax.Array) -> jax.Array:
    """The float32 values of E2M1 codes; computed in 8 bits first, which is faster on a CPU."""
    magnitude = codes & 7
    doubled = jnp.where(
        magnitude < 4, magnitude, jnp.where(magnitude < 6, 2 * magnitude - 4, 4 * magnitude - 16)
    ).astype(jnp.int8)
    return 0.5 * jnp.where(codes > 7, -doubled, doubled).astype(jnp.float32)


def matmul(x: jax.Array, weight: Fp4Weight, dtype: DTypeLike | None = None) -> jax.Array:
    """Returns x [..., K] times the transposed weight, [..., N], as `dot` does."""
    x, weight = _bind(x, weight)
    return dot(x, dequantize(weight, x.dtype), dtype)


def matmul_transposed(dy: jax.Array, weight: Fp4Weight) -> jax.Array:
    """Returns dy [..., N] times the weight, [..., K]: the gradient of `matmul` by x."""
    dy, weight = _bind(dy, weight)
    return jax.lax.dot_general(
        dy,
        dequantize(weight, dy.dtype),
        (((dy.ndim - 1,), (0,)), ((), ())),
        preferred_element_type=jnp.float32,
    ).astype(dy.dtype)


def sum_xa_partials(xa_partials: jax.Array, x: jax.Array, b: jax.Array) -> jax.Array:
    """Returns x A^T [M, R''] in x's dtype, of partials float32 [S, M, R'] and B [N, R'']."""
    product = xa_partials.sum(axis=0)[:, : b.shape[1]].astype(x.dtype)
    return jnp.pad(product, ((0, 0), (0, b.shape[1] - product.shape[1])))


def lora_product(
    x: jax.Array, lora: tuple[jax.Array, jax.Array], xa_partials: jax.Array | None = None
) -> jax.Array:
    """Returns (x A^T) B^T of an adapter A [R, K] and B [N, R''], as `dot` does, in x's dtype.

    Args:
        x: [..., K]; [M, K] with partials.
        lora: the adapter's A with LoRA's scale, and B, whose columns from R on are not used.
        xa_partials: float32 [S, M, R'], whose sum over S is x A^T, if it is known.

    Returns:
        [..., N].
    """
    a, b = lora
    if xa_partials is not None:
        xa = sum_xa_partials(xa_partials, x, b)
    else:
        b = b[:, : len(a)]
        xa = dot(x, a.astype(x.dtype))
    return dot(xa, b.astype(x.dtype))


def _bind(x: jax.Array, weight: Fp4Weight) -> tuple[jax.Array, Fp4Weight]:
    """Makes the packed bytes depend on x.

    XLA otherwise moves the dequantization out of a loop whose weights stay the same, a scan over
    micro-batches or a chunk of decode steps, and holds a dense copy of the whole model.
    """
    x, packed = jax.lax.optimization_barrier((x, weight.packed))
    return x, weight._replace(packed=packed)
