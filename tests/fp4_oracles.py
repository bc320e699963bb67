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


def check_derivatives(matmul, tokens, n, k, rank, *, tolerance=6e-3, seed=None):
    """Compares a product of x [*tokens, K] and its derivatives with those in float64."""
    rng = np.random.default_rng(seed)
    weight = random_weight(rng, n, k)
    x, a, b, bias, dy = (
        jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
        for shape in ((*tokens, k), (rank, k), (n, rank), (n,), (*tokens, n))
    )
    tiles = fp4.to_tiles(weight)

    @jax.jit
    def gradients(x, lora, bias, dy):
        def run(x, lora, bias):
            return matmul(x, tiles, lora=lora, bias=bias)

        y, backward = jax.vjp(run, x, lora, bias)
        return y, *backward(dy)

    y, dx, (da, db), dbias = gradients(x, (a, b), bias, dy)
    rows, d_rows = float64(x).reshape(-1, k), float64(dy).reshape(-1, n)
    dense, through = float64(fp4.dequantize(weight, jnp.float32)), d_rows @ float64(b)
    xa = rows @ float64(a).T
    for name, found, like, want in (
        ("y", y, dy, rows @ dense.T + xa @ float64(b).T + float64(bias)),
        ("dx", dx, x, d_rows @ dense + through @ float64(a)),
        ("dA", da, a, through.T @ rows),
        ("dB", db, b, d_rows.T @ xa),
        ("dbias", dbias, bias, d_rows.sum(axis=0)),
    ):
        assert (found.shape, found.dtype) == (like.shape, jnp.bfloat16), name
        error = np.linalg.norm(float64(found).reshape(want.shape) - want) / np.linalg.norm(want)
        assert error < tolerance, (name, error)
