"""Tilings, random weights and comparisons for tests of the kernels on a GPU."""

import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from fp4_oracles import exact, float64, random_weight

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


def whole_products(shapes):
    """What a caller gets in every shape and format, with and without an adapter."""
    for shape, form, adapter in itertools.product(shapes, ("nvfp4", "mxfp4"), (False, True)):
        yield None, shape, adapter, form


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


def check_layers_in_a_loop(kernel):
    """Compares steps over layers with XLA's, and with themselves: locks are zero after a call."""
    rng = np.random.default_rng()
    layers = [random_weight(rng, *shape) for shape in [(8192, 2048), (2048, 8192)] * 2]
    x = jnp.asarray(rng.standard_normal((24, 2048)), jnp.bfloat16)

    def steps(matmul, layers):
        def step(_, x):
            for weight in layers:
                y = matmul(x, weight).astype(jnp.float32)
                x = (y / jnp.abs(y).max()).astype(jnp.bfloat16)
            return x

        return jax.jit(lambda x: jax.lax.fori_loop(0, 8, step, x))(x)

    tiles = [fp4.to_tiles(weight) for weight in layers]
    first = steps(kernel, tiles)
    np.testing.assert_array_equal(float64(first), float64(steps(kernel, tiles)))
    expected = float64(steps(functools.partial(fp4.fp4_matmul, implementation="xla"), layers))
    assert np.linalg.norm(float64(first) - expected) < 0.2 * np.linalg.norm(expected)


def check_adapters(matmul, x, weight, given, expected):
    """Compares products with two adapters, and many with the first: locks are zero after a call.

    Each adapter is given as arguments of the product; expected are its x A^T in float64 and B.
    """
    tiles = fp4.to_tiles(weight)

    @jax.jit
    def run(x, tiles, given):
        both = [matmul(x, tiles, **adapter) for adapter in given]
        again = jax.lax.fori_loop(
            0, 20, lambda _, y: matmul(x + 0 * y[0, 0], tiles, **given[0]), both[0]
        )
        return both, again

    both, again = run(x, tiles, given)
    dense = float64(x) @ float64(fp4.dequantize(weight, jnp.float32)).T
    for y, (xa, b) in zip(both, expected, strict=True):
        want = dense + float64(xa.astype(ml_dtypes.bfloat16)) @ float64(b).T
        assert np.linalg.norm(float64(y) - want) / np.linalg.norm(want) < ROUNDING
    np.testing.assert_array_equal(float64(both[0]), float64(again))
