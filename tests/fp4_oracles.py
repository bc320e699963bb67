"""What products with weights in 4 bits are compared with."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels import fp4_matmul as fp4


def float64(x):
    return np.asarray(x).astype(np.float64)


def random_weight(rng, n, k, form="nvfp4"):
    packed = jnp.asarray(rng.integers(0, 256, (n, k // 2), np.uint8))
    if form == "mxfp4":
        scales = rng.integers(110, 125, (n, k // 32), np.uint8).view(ml_dtypes.float8_e8m0fnu)
        return fp4.Fp4Weight(packed, jnp.asarray(scales))
    scales = rng.integers(1, 127, (n, k // 16), np.uint8).view(ml_dtypes.float8_e4m3fn)
    divisors = jnp.asarray(rng.uniform(1000, 3000, n), jnp.float32)
    return fp4.Fp4Weight(packed, jnp.asarray(scales), divisors)


def check_dequantize(dequantize, n, k, form, seed=None):
    """Compares a kernel that dequantizes with the definition; other data every time, or by seed."""
    weight = random_weight(np.random.default_rng(seed), n, k, form)
    if form == "nvfp4":  # of exact values, which are rounded once
        weight = weight._replace(global_scale=jnp.full(n, 2.0**11))
    actual = dequantize(fp4.to_tiles(weight), inputs=k)
    np.testing.assert_array_equal(float64(actual), float64(fp4.dequantize(weight, jnp.bfloat16)))


@jax.jit
def exact(x, weight, lora=None, bias=None):
    """The product in float32 at the highest precision, from the dequantized weight."""
    dot = functools.partial(jnp.dot, precision="highest", preferred_element_type=jnp.float32)
    y = dot(x.astype(jnp.float32), fp4.dequantize(weight, jnp.float32).T)
    if lora is not None:
        a, b = (part.astype(jnp.float32) for part in lora)
        xa = jax.lax.reduce_precision(dot(x.astype(jnp.float32), a.T), 8, 7)  # bfloat16
        y += dot(xa, b.T) + bias.astype(jnp.float32)
    return y


def product_and_derivatives(x, weight, lora, bias, dy):
    """The product in float64, and its derivatives by x, A, B and the bias."""
    a, b = lora
    dense, through = float64(fp4.dequantize(weight, jnp.float32)), float64(dy) @ float64(b)
    xa = float64(x) @ float64(a).T
    return {
        "y": float64(x) @ dense.T + xa @ float64(b).T + float64(bias),
        "dx": float64(dy) @ dense + through @ float64(a),
        "dA": through.T @ float64(x),
        "dB": float64(dy).T @ xa,
        "dbias": float64(dy).sum(axis=0),
    }
