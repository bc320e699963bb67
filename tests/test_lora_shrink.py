"""Partials of x A^T: the kernel in the interpreter and, on an NVIDIA GPU, compiled."""

import functools

import jax
import numpy as np
import pytest
from warpgroup_kernel import BACKENDS, normal

from pallas_kernels.fp4_matmul import lora_shrink


@pytest.mark.parametrize("interpret", BACKENDS)
@pytest.mark.parametrize(("m", "k", "rank"), [(1, 1100, 32), (19, 576, 96), (130, 200, 40)])
def test_shrink(m, k, rank, interpret):
    x, a = normal(1, m, k), normal(2, rank, k)
    run = jax.jit(functools.partial(lora_shrink.shrink, interpret=interpret))
    xa_partials = np.asarray(run(x, a), np.float64)
    assert xa_partials.shape == (-(-k // lora_shrink.COLUMNS), m, -(-rank // 32) * 32)
    expected = np.asarray(x, np.float64) @ np.asarray(a, np.float64).T
    np.testing.assert_allclose(xa_partials.sum(axis=0)[:, :rank], expected, rtol=0, atol=2e-4)
    assert not xa_partials[:, :, rank:].any()
