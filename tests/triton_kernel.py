"""What the tests of Triton kernels share: backends, random arguments, and a comparison."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
