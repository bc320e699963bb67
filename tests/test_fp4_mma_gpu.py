"""The kernel for every GPU since Ampere, on one: products against float64.

uv run --extra cuda pytest -n 0 -m gpu tests/test_fp4_mma_gpu.py
"""

import functools

import pytest
from fp4_oracles import check_dequantize, check_derivatives
from hopper_cases import (
    ROUNDING,
    check_layers_in_a_loop,
    check_product,
    whole_products,
)

from pallas_kernels import device
from pallas_kernels import fp4_matmul as fp4
from pallas_kernels.fp4_matmul import dispatch, mma, self_test
from pallas_kernels.fp4_matmul.mma_schedule import MmaConfig

pytestmark = pytest.mark.gpu

SHAPES = [
    (1, 256, 1024),
    (3, 37888, 3584),
    (1, 4608, 3584),
    (8, 4608, 3584),
    (8, 37888, 3584),
    (8, 3584, 18944),
    (16, 3584, 18944),
    (33, 576, 576),
    (40, 1024, 8960),
    (64, 136, 160),
    (64, 3584, 18944),
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
    yield from whole_products(SHAPES)
    for config in CONFIGS:
        for m, n, k in ((5, 576, 576), (16, 2056, 1520), (23, 1024, 8960)):
            yield config, (m, n, k), True, "nvfp4"


@pytest.mark.parametrize(("config", "shape", "adapter", "form"), list(products()), ids=str)
def test_product(config, shape, adapter, form):
    check_product("mma", config, shape, adapter, form)


@pytest.mark.parametrize("form", ["nvfp4", "mxfp4"])
def test_dequantize(form):
    check_dequantize(mma.dequantize, 4608, 3616, form)


def test_layers_in_a_loop():
    """The counters of the parts are zero after every call."""
    config = MmaConfig(64, 256, 3, 4)
    check_layers_in_a_loop(functools.partial(fp4.fp4_matmul, implementation="mma", config=config))


@pytest.mark.parametrize("m", [24, 192])
def test_derivatives(m):
    matmul = functools.partial(fp4.fp4_matmul, implementation="mma")
    check_derivatives(matmul, (m,), 1536, 1024, 32)


@pytest.mark.parametrize("form", ["nvfp4", "mxfp4"])
def test_the_self_test_finds_no_error(form):
    assert self_test.relative_error_of_mma(dispatch.mma_kernel().matmul, form) < ROUNDING
