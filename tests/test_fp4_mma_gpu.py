"""The kernel for every GPU since Ampere, on one: products against float64 and the Hopper kernel.

uv run --extra cuda pytest -n 0 -m gpu tests/test_fp4_mma_gpu.py
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fp4_oracles import float64, product_and_derivatives
from hopper_cases import ROUNDING, check_dequantize, check_product, random_weight

from pallas_kernels import device
from pallas_kernels import fp4_matmul as fp4
from pallas_kernels.fp4_matmul import dispatch, mma, self_test
from pallas_kernels.fp4_matmul.mma_schedule import MmaConfig

pytestmark = pytest.mark.gpu

SHAPES = [
    (1, 256, 1024),
    (3, 37888, 3584),
    (8, 4608, 3584),
    (8, 3584, 18944),
    (16, 3584, 18944),
    (33, 576, 576),
    (40, 1024, 8960),
    (64, 136, 160),
    (64, 37888, 3584),
]
CONFIGS = [
    MmaConfig(64, 128, 2, 1),
    MmaConfig(64, 128, 6, 2),
    MmaConfig(64, 256, 3, 3),
    MmaConfig(64, 512, 2, 2),
    MmaConfig(128, 128, 4, 2),
    MmaConfig(128, 256, 2, 1),
    MmaConfig(192, 128, 3, 2),
]


@pytest.fixture(autouse=True, scope="module")
def a_gpu():
    if device.cuda_capability() < 8.0:
        pytest.skip("needs an NVIDIA GPU since Ampere")


def products():
    """What a caller gets in every shape and format; every kind of schedule in ragged shapes."""
    for shape in SHAPES:
        for form in ("nvfp4", "mxfp4"):
            for adapter in (False, True):
                yield None, shape, adapter, form
    for config in CONFIGS:
        for m, n, k in ((5, 576, 576), (16, 2056, 1520), (23, 1024, 8960)):
            yield config, (m, n, k), True, "nvfp4"


@pytest.mark.parametrize(("config", "shape", "adapter", "form"), list(products()), ids=str)
def test_product(config, shape, adapter, form):
    check_product("mma", config, shape, adapter, form)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 4608, 3584), (8, 37888, 3584), (64, 3584, 18944)])
def test_other_implementations_agree(m, n, k):
    rng = np.random.default_rng()
    weight = random_weight(rng, n, k)
    x = jnp.asarray(rng.standard_normal((m, k)), jnp.bfloat16)
    names = ["mma", "xla"] + ["mosaic"] * (device.cuda_capability() == 9.0)
    results = [
        float64(jax.jit(functools.partial(fp4.fp4_matmul, implementation=name))(x, y))
        for name, y in zip(
            names, [fp4.to_tiles(weight), weight, fp4.to_tiles(weight)], strict=False
        )
    ]
    for other in results[1:]:
        assert np.linalg.norm(other - results[0]) / np.linalg.norm(other) < 2 * ROUNDING


@pytest.mark.parametrize("form", ["nvfp4", "mxfp4"])
def test_dequantize(form):
    check_dequantize(mma.dequantize, 4608, 3616, form)


def test_layers_in_a_loop():
    """The counters of the parts are zero after every call."""
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

    config = MmaConfig(64, 256, 3, 4)
    kernel = functools.partial(fp4.fp4_matmul, implementation="mma", config=config)
    tiles = [fp4.to_tiles(weight) for weight in layers]
    first = steps(kernel, tiles)
    np.testing.assert_array_equal(float64(first), float64(steps(kernel, tiles)))
    expected = float64(steps(functools.partial(fp4.fp4_matmul, implementation="xla"), layers))
    assert np.linalg.norm(float64(first) - expected) < 0.2 * np.linalg.norm(expected)


@pytest.mark.parametrize("m", [24, 192])
def test_derivatives(m):
    rng = np.random.default_rng()
    n, k, rank = 1536, 1024, 32
    weight = random_weight(rng, n, k)
    x, a, b, bias, dy = (
        jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
        for shape in ((m, k), (rank, k), (n, rank), (n,), (m, n))
    )
    tiles = fp4.to_tiles(weight)

    @jax.jit
    def gradients(x, lora, bias, dy):
        def run(x, lora, bias):
            return fp4.fp4_matmul(x, tiles, lora=lora, bias=bias, implementation="mma")

        y, backward = jax.vjp(run, x, lora, bias)
        return y, *backward(dy)

    y, dx, (da, db), dbias = gradients(x, (a, b), bias, dy)
    actual = {"y": y, "dx": dx, "dA": da, "dB": db, "dbias": dbias}
    for name, want in product_and_derivatives(x, weight, (a, b), bias, dy).items():
        error = np.linalg.norm(float64(actual[name]) - want) / np.linalg.norm(want)
        assert error < 6e-3, (name, error)


def test_the_self_test_finds_no_error():
    assert self_test.relative_error_of_mma(dispatch.mma_kernel().matmul) < ROUNDING
