"""What tests of the kernels of one warpgroup share: backends, arguments, and a comparison."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import decode
from pallas_kernels.decode import (
    attention,
    attention_queries,
    delta,
    gated_attention,
    layer,
    norms,
)
from pallas_kernels.experts import route
from pallas_kernels.fp4_matmul.mma import dense

on_gpu = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")
BACKENDS = [
    pytest.param(True, id="interpreter"),
    pytest.param(False, marks=[pytest.mark.gpu, on_gpu], id="gpu"),
]


def normal(seed, *shape):
    """Draws normal numbers in bfloat16."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def wide(x):
    """Converts to float64."""
    return np.asarray(x, np.float64)


def assert_close(actual, expected, tolerance=4e-3):
    """Asserts that the relative error is small."""
    error = np.linalg.norm(wide(actual) - expected) / np.linalg.norm(expected)
    assert error < tolerance


def use_decode_kernels(monkeypatch, interpret):
    """Makes the layer take the kernels of `decode`, in the interpreter if told so."""
    monkeypatch.setattr(decode, "supports_device", lambda _: True)
    for kernel in ("_experts_agree", "delta_agrees"):
        monkeypatch.setattr(layer, kernel, lambda: True)
    monkeypatch.setattr(dense, "supports", dense.fits)
    monkeypatch.setattr(dense, "_SIZES", (0, 2**31))
    for module, names in (
        (route, ("route",)),
        (norms, ("add_rmsnorm", "swiglu")),
        (attention, ("attend", "attend_whole", "merge_parts")),
        (attention_queries, ("write", "attend")),
        (delta, ("step",)),
        (dense, ("matmul",)),
        (gated_attention, ("split",)),
    ):
        for name in names:
            kernel = functools.partial(getattr(module, name), interpret=interpret)
            monkeypatch.setattr(module, name, kernel)
