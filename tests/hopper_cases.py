"""Tilings, random weights and comparisons for tests of the kernels on a GPU."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from fp4_oracles import exact, float64

from pallas_kernels import fp4_matmul as fp4
from pallas_kernels.fp4_matmul.tiling import TileConfig

ROUNDING = 2e-3  # relative error of results stored in bfloat16
# One tiling of every kind; `None` is the one that a caller gets.
CONFIGS = [
    None,
    TileConfig(16, warpgroups_n=1),
    TileConfig(16, warpgroups_n=4, block_k=256, stages=4, in_flight=1),
    TileConfig(16, warpgroups_n=5, block_k=256, stages=3),
    TileConfig(16, warpgroups_n=6, stages=4),
    TileConfig(16, warpgroups_n=2, slices=2, block_k=512, stages=3, in_flight=1),
    TileConfig(16, warpgroups_n=1, slices=4, block_k=512, stages=3),
    TileConfig(16, warpgroups_n=2, stages=6, stream_k=True),
    TileConfig(16, warpgroups_n=3, stages=6, stream_k=True),
    TileConfig(16, warpgroups_n=1, slices=4, block_k=512, stages=3, stream_k=True),
    TileConfig(16, warpgroups_n=2, stages=6, split=2),
    TileConfig(16, warpgroups_n=1, slices=2, block_k=256, stages=6, split=3),
    TileConfig(32, warpgroups_n=3, block_k=256, stages=3, split=4),
    TileConfig(16, warpgroups_n=1, block_k=256, stages=4, in_flight=2, split=2, ahead=True),
    TileConfig(64, warpgroups_n=3, block_k=256, stages=3, in_flight=2, split=2, ahead=True),
    TileConfig(64, warpgroups_n=2, block_k=256, stages=3, stream_k=True, in_flight=1, ahead=True),
    TileConfig(64, warpgroups_n=3, block_k=128, stages=4, split=4),
    TileConfig(64, warpgroups_n=4, stages=5),
    TileConfig(64, warpgroups_n=3, stages=5, stream_k=True),
    TileConfig(64, warpgroups_n=4, stages=5, stream_k=True),
    TileConfig(96, warpgroups_n=4, stages=3),
    TileConfig(128, warpgroups_n=3, stages=3),
    TileConfig(128, warpgroups_n=2, stages=3, stream_k=True),
    TileConfig(192, warpgroups_n=2, stages=2),
    TileConfig(256, warpgroups_n=2, stages=2),
]


def skip_unless_hopper():
    device = jax.devices()[0]
    if device.platform != "gpu" or device.compute_capability != "9.0":
        pytest.skip(f"needs a Hopper GPU, this is {device.device_kind}")


def random_weight(rng, n, k, form="nvfp4"):
    packed = jnp.asarray(rng.integers(0, 256, (n, k // 2), np.uint8))
    if form == "mxfp4":
        scales = rng.integers(110, 125, (n, k // 32), np.uint8).view(ml_dtypes.float8_e8m0fnu)
        return fp4.Fp4Weight(packed, jnp.asarray(scales))
    scales = rng.integers(1, 127, (n, k // 16), np.uint8).view(ml_dtypes.float8_e4m3fn)
    divisors = jnp.asarray(rng.uniform(1000, 3000, n), jnp.float32)
    return fp4.Fp4Weight(packed, jnp.asarray(scales), divisors)


def check_product(implementation, config, shape, adapter, form):
    """Compares a product with the exact one, and with itself."""
    m, n, k = shape
    rng = np.random.default_rng()  # other data every time
    weight = random_weight(rng, n, k, form)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)

    x, lora, bias = normal(m, k), (0.1 * normal(48, k), normal(n, 48)), normal(n)
    tiles = fp4.to_tiles(weight)
    extra = {"lora": lora, "bias": bias} if adapter else {}
    run = jax.jit(functools.partial(fp4.fp4_matmul, implementation=implementation, config=config))
    results = [np.asarray(run(x, tiles, **extra)) for _ in range(4)]
    expected = float64(exact(x, weight, **extra))
    error = np.linalg.norm(float64(results[0]) - expected) / np.linalg.norm(expected)
    assert error < ROUNDING
    for again in results[1:]:  # a difference would be a race
        np.testing.assert_array_equal(results[0].view(np.uint16), again.view(np.uint16))


def check_dequantize(dequantize, n, k, form):
    """Compares a kernel that dequantizes with the definition."""
    weight = random_weight(np.random.default_rng(), n, k, form)
    if form == "nvfp4":  # of exact values, which are rounded once
        weight = weight._replace(global_scale=jnp.full(n, 2.0**11))
    actual = dequantize(fp4.to_tiles(weight), inputs=k)
    np.testing.assert_array_equal(float64(actual), float64(fp4.dequantize(weight, jnp.bfloat16)))
