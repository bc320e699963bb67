"""x A^T in shares: the kernel in the interpreter and, on an NVIDIA GPU, compiled."""

import functools

import jax
import numpy as np
import pytest
from triton_kernel import BACKENDS, normal

from pallas_kernels import projection


@pytest.mark.parametrize("interpret", BACKENDS)
@pytest.mark.parametrize(("m", "k", "rank"), [(1, 1100, 32), (19, 576, 96), (130, 200, 40)])
def test_project(m, k, rank, interpret):
    x, a = normal(1, m, k), normal(2, rank, k)
    run = jax.jit(functools.partial(projection.project, interpret=interpret))
    shares = np.asarray(run(x, a), np.float64)
    assert shares.shape == (-(-k // projection.COLUMNS), m, -(-rank // 32) * 32)
    expected = np.asarray(x, np.float64) @ np.asarray(a, np.float64).T
    np.testing.assert_allclose(shares.sum(axis=0)[:, :rank], expected, rtol=0, atol=2e-4)
    assert not shares[:, :, rank:].any()
