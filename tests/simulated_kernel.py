"""The Hopper kernel simulated on a CPU, with a search for races."""

import contextlib
import functools

import fp4_oracles
import jax.numpy as jnp
import numpy as np
from fp4_oracles import float64
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import device
from pallas_kernels import fp4_matmul as fp4
from pallas_kernels.fp4_matmul import dispatch, sm90

ROUNDING = 2e-3  # relative error of results stored in bfloat16


def random_weight(n, k, form="nvfp4"):
    return fp4_oracles.random_weight(np.random.default_rng(n + k), n, k, form)


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.bfloat16)


def check_kernel(matmul, shape, config, rank, *, form="nvfp4", dtype="bfloat16", **options):
    """Compares a kernel's product, with an adapter and a bias if there is a rank, with float64."""
    m, n, k = shape
    weight, x, extra, dtype = random_weight(n, k, form), normal(m, k), {}, jnp.dtype(dtype)
    if rank:
        extra = {"xa": normal(m, rank, seed=1), "b": normal(n, rank, seed=2), "bias": normal(n)}
    y = matmul(x, fp4.to_tiles(weight), config=config, dtype=dtype, **options, **extra)
    assert y.shape == (m, n)
    assert y.dtype == dtype
    tolerance = ROUNDING if dtype == jnp.bfloat16 else 1e-5
    assert relative_error(y, product(x, weight, **extra)) < tolerance


def product(x, weight, *, xa=None, b=None, bias=0.0):
    """In float64: x W^T + xa B^T + bias."""
    y = float64(x) @ float64(fp4.dequantize(weight, jnp.float32)).T
    return y + float64(bias) if xa is None else y + float64(xa) @ float64(b).T + float64(bias)


def relative_error(actual, expected):
    return np.linalg.norm(float64(actual) - expected) / np.linalg.norm(expected)


@contextlib.contextmanager
def simulation():
    """Yields the parameters of a simulation; a race that it finds fails the test."""
    yield plgpu.InterpretGPUParams(detect_races=True)
    races = interpret_pallas_call.get_races()
    interpret_pallas_call.reset_gpu_interpret_mode_state()
    assert not races.races_found


def simulate_the_kernel(monkeypatch, simulated):
    """Makes `fp4_matmul` run the simulated kernel, on two SMs."""

    class Kernel:
        matmul = staticmethod(functools.partial(sm90.matmul, interpret=simulated))
        dequantize = staticmethod(functools.partial(sm90.dequantize, interpret=simulated))
        make_schedule = staticmethod(sm90.make_schedule)

    monkeypatch.setattr(dispatch, "kernel", lambda: Kernel)
    monkeypatch.setattr(device, "num_sms", lambda: 2)
