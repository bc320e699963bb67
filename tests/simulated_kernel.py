"""The Hopper kernel simulated on a CPU, with a search for races."""

import contextlib
import functools

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from fp4_oracles import float64
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import device
from pallas_kernels import fp4_matmul as fp4
from pallas_kernels.fp4_matmul import dispatch, sm90

ROUNDING = 2e-3  # relative error of results stored in bfloat16


def random_weight(n, k, form="nvfp4"):
    rng = np.random.default_rng(n + k)
    packed = jnp.asarray(rng.integers(0, 256, (n, k // 2), np.uint8))
    if form == "mxfp4":
        scales = rng.integers(110, 125, (n, k // 32), np.uint8).view(ml_dtypes.float8_e8m0fnu)
        return fp4.Fp4Weight(packed, jnp.asarray(scales))
    scales = rng.integers(1, 127, (n, k // 16), np.uint8).view(ml_dtypes.float8_e4m3fn)
    divisors = jnp.asarray(rng.uniform(1000, 3000, n), jnp.float32)
    return fp4.Fp4Weight(packed, jnp.asarray(scales), divisors)


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.bfloat16)


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
