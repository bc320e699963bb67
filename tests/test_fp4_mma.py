"""The kernel for every GPU since Ampere, simulated on a CPU, against float64."""

import functools
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fp4_oracles import check_dequantize, check_derivatives, float64
from simulated_kernel import (
    ROUNDING,
    check_kernel,
    normal,
    random_weight,
    relative_error,
)

from pallas_kernels import device
from pallas_kernels import fp4_matmul as fp4
from pallas_kernels.fp4_matmul import dispatch, mma, mma_schedule, self_test, tiling
from pallas_kernels.fp4_matmul.mma_schedule import MmaConfig

VARIANTS = {
    "whole tiles": ((8, 128, 512), MmaConfig(64, 256, 3), 0, "nvfp4"),
    "an adapter, parts": ((8, 64, 384), MmaConfig(64, 128, 2, split=3), 64, "nvfp4"),
    "nothing fills a tile": ((11, 200, 480), MmaConfig(128, 256, 2, split=2), 32, "nvfp4"),
    "one row, parts of unequal size": ((1, 136, 1056), MmaConfig(64, 512, 2, split=2), 0, "mxfp4"),
    "64 rows": ((64, 64, 160), MmaConfig(64, 128, 3), 96, "mxfp4"),
}

CACHED = (
    *(dispatch.supports_device, dispatch.supports_mma_device),
    *(dispatch._supports_mxfp4, dispatch._warn_once),
)
SLOW_VARIANTS = "whole tiles", "one row, parts of unequal size", "64 rows"


@pytest.fixture(autouse=True)
def the_choice_is_asked_anew():
    yield
    for cached in CACHED:
        cached.cache_clear()


@pytest.fixture
def simulated_api(monkeypatch):
    """Makes `fp4_matmul` run the simulated kernel."""
    kernel = types.SimpleNamespace(
        matmul=functools.partial(mma.matmul, interpret=True),
        dequantize=functools.partial(mma.dequantize, interpret=True),
    )
    monkeypatch.setattr(dispatch, "mma_kernel", lambda: kernel)
    monkeypatch.setattr(device, "num_sms", lambda: 2)


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [
        ("nothing fills a tile", "float32"),
        ("an adapter, parts", "bfloat16"),
        *(pytest.param(name, "bfloat16", marks=pytest.mark.slow) for name in SLOW_VARIANTS),
    ],
)
def test_kernel(variant, dtype):
    shape, config, rank, form = VARIANTS[variant]
    assert config.problem(shape[0]) is None
    check_kernel(mma.matmul, shape, config, rank, form=form, dtype=dtype, interpret=True)


@pytest.mark.parametrize("form", ["nvfp4", pytest.param("mxfp4", marks=pytest.mark.slow)])
def test_dequantize(form):
    check_dequantize(functools.partial(mma.dequantize, interpret=True), 136, 192, form, seed=0)


@pytest.mark.usefixtures("simulated_api")
@pytest.mark.parametrize("m", [pytest.param(3, marks=pytest.mark.slow), mma_schedule.MAX_ROWS + 2])
def test_product_and_derivatives(m):
    """Of many rows the product, x A^T B^T and the bias are rounded one after the other."""
    matmul = functools.partial(fp4.fp4_matmul, implementation="mma")
    check_derivatives(matmul, (m,), 64, 128, 4, seed=0)


@pytest.mark.usefixtures("simulated_api")
def test_what_a_caller_gets(monkeypatch):
    """On a GPU with this kernel: also the product in float32, and that with partials of x A^T."""
    monkeypatch.setattr(dispatch, "supports_mma_device", lambda: True)
    n, k = 136, 128
    weight, x = random_weight(n, k), normal(2, 3, k)
    tiles = fp4.to_tiles(weight)
    dense = float64(fp4.dequantize(weight, jnp.float32))
    assert dispatch.implementation_of(tiles, x) == "mma"
    y = fp4.fp4_matmul(x, tiles, dtype=jnp.float32)
    assert (y.shape, y.dtype) == ((2, 3, n), jnp.float32)
    assert relative_error(y, float64(x) @ dense.T) < 1e-5

    for rank in (24, 544):  # The adapter of the larger rank is added to the kernel's product.
        a, b = normal(rank, k), normal(n, rank, seed=1)
        xa_partials = np.random.default_rng(2).standard_normal((5, 6, -(-rank // 32) * 32))
        xa_partials[:, :, rank:] = 0
        xa = xa_partials.astype(np.float32)
        y = fp4.fp4_matmul(x, tiles, lora=(a, b), xa_partials=jnp.asarray(xa))
        expected = float64(x) @ dense.T
        expected += (xa_partials.sum(axis=0)[:, :rank] @ float64(b).T).reshape(2, 3, n)
        assert relative_error(y, expected) < 5e-3  # x A^T is rounded


@pytest.mark.slow  # 5 s
@pytest.mark.parametrize("form", ["nvfp4", "mxfp4"])
def test_the_self_test_while_tracing(form):
    errors = []
    matmul = functools.partial(mma.matmul, interpret=True)
    measure = functools.partial(self_test.relative_error_of_mma, matmul, form)
    jax.eval_shape(lambda x: (errors.append(measure()), x)[1], jnp.ones(1))
    assert errors[0] < ROUNDING


def test_the_kernel_of_each_gpu(monkeypatch):
    monkeypatch.setattr(self_test, "relative_error_of_mma", lambda *_: 0.0)
    for hopper_error, capability, choice, expected in (
        (0.0, 8.0, None, "mma"),
        (0.0, 8.9, None, "mma"),
        (0.0, 8.9, "mosaic", "xla"),
        (0.0, 8.9, "xla", "xla"),
        (0.0, 7.5, "mma", "xla"),
        (0.0, 9.0, None, "mosaic"),
        (0.0, 9.0, "mma", "mma"),
        (1.0, 9.0, None, "mma"),
    ):
        monkeypatch.setattr(device, "cuda_capability", lambda value=capability: value)
        monkeypatch.setattr(dispatch, "self_check", lambda error=hopper_error: error)
        monkeypatch.setattr(tiling, "verified", lambda *_: False)
        monkeypatch.delenv(dispatch.KERNEL_VARIABLE, raising=False)
        if choice:
            monkeypatch.setenv(dispatch.KERNEL_VARIABLE, choice)
        for cached in CACHED:
            cached.cache_clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # The kernel for Hopper is off.
            assert fp4.device_kernel() == expected
        assert fp4.reads_tiles(mma_schedule.MAX_ROWS)
        assert fp4.reads_tiles(mma_schedule.MAX_ROWS + 1) == (expected != "mma")
    monkeypatch.setenv(dispatch.KERNEL_VARIABLE, "cuda")
    with pytest.raises(ValueError, match="QERL_FP4_KERNEL is 'cuda', expected 'mosaic', 'mma'"):
        dispatch.chosen_kernel()


@pytest.mark.parametrize("error", [1.0, None])
def test_it_falls_back_with_one_line(error, monkeypatch):
    def relative_error(*_):
        if error is None:
            raise NotImplementedError("gone")
        return error

    monkeypatch.setattr(device, "cuda_capability", lambda: 8.9)
    monkeypatch.setenv(dispatch.KERNEL_VARIABLE, "mma")
    monkeypatch.setattr(self_test, "relative_error_of_mma", relative_error)
    for cached in CACHED:
        cached.cache_clear()
    with pytest.warns(match="off by 1.0e|NotImplementedError: gone"):
        assert fp4.device_kernel() == "xla"


@pytest.mark.parametrize(("capability", "kernel"), [(9.0, "mosaic"), (8.9, "mma")])
def test_a_kernel_that_is_wrong_in_mxfp4_multiplies_nvfp4(capability, kernel, monkeypatch):
    def relative_error(_, form):
        return {"nvfp4": 0.0, "mxfp4": 1.0}[form]

    for name in ("relative_error", "relative_error_of_mma"):
        monkeypatch.setattr(self_test, name, relative_error)
    monkeypatch.setattr(device, "cuda_capability", lambda: capability)
    monkeypatch.setattr(tiling, "verified", lambda *_: False)
    x = jax.ShapeDtypeStruct((8, 128), jnp.bfloat16)
    nvfp4, mxfp4 = (
        self_test.random_tiles(np.random.default_rng(0), 64, 128, form)
        for form in ("nvfp4", "mxfp4")
    )
    for cached in CACHED:
        cached.cache_clear()
    assert dispatch.implementation_of(nvfp4, x) == kernel
    with pytest.warns(match="MXFP4 is off by 1.0e[+]00, dequantizing instead"):
        assert dispatch.implementation_of(mxfp4, x) == "xla"
    assert dispatch.implementation_of(nvfp4, x) == kernel
    monkeypatch.setattr(tiling, "verified", lambda *_: True)
    dispatch._supports_mxfp4.cache_clear()
    if kernel == "mosaic":
        assert dispatch.implementation_of(mxfp4, x) == kernel


@pytest.mark.parametrize(
    ("m", "config", "message"),
    [
        (8, MmaConfig(96), "rows is 96, expected a multiple of 64"),
        (8, MmaConfig(64, 192), "columns is 192, expected 128, 256 or 512"),
        (8, MmaConfig(64, 128, 1), "1 stages and split 1, expected at least 2 and 1"),
        (64, MmaConfig(64, 512, 2), "169984 bytes of shared memory for 64 rows, limit 101376"),
    ],
)
def test_schedules_that_cannot_be(m, config, message):
    tiles = fp4.to_tiles(random_weight(64, 256))
    with pytest.raises(ValueError, match=message):
        fp4.fp4_matmul(normal(m, 256), tiles, implementation="mma", config=config)
    with pytest.raises(ValueError, match="is for implementation 'mma', not 'mosaic'"):
        fp4.fp4_matmul(normal(8, 256), tiles, implementation="mosaic", config=MmaConfig())
