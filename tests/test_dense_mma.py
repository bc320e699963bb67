"""The product of a few tokens with a dense weight, in the interpreter and on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from warpgroup_kernel import BACKENDS, normal, wide

from pallas_kernels import device
from pallas_kernels.fp4_matmul.mma import dense


@pytest.mark.parametrize("interpret", BACKENDS)
@pytest.mark.parametrize(
    ("m", "n", "k", "rank", "partials", "split"),
    [
        (8, 128, 720, 96, 5, 2),  # shares of partial sums are unequal
        (3, 64, 328, 24, 4, 3),  # columns end inside of a step
        (16, 64, 456, 32, 3, 1),
        (2, 64, 96, 0, 0, None),
        # The most ranks: as many as three projections of rank 128 have together.
        pytest.param(16, 64, 96, 384, 2, 1, marks=pytest.mark.slow),
    ],
)
def test_products(m, n, k, rank, partials, split, interpret):
    x, weight, bias = normal(1, m, k), normal(2, n, k), normal(3, n)
    expected = wide(x) @ wide(weight).T + wide(bias)
    lora = None
    if rank:
        b = normal(4, n, max(128, rank))
        xa = normal(5, partials, m, rank).astype(jnp.float32)
        lora = xa, b
        expected += wide(xa).sum(axis=0) @ wide(b)[:, :rank].T
    run = functools.partial(dense.matmul, bias=bias, split=split, interpret=interpret)
    y = jax.jit(run)(x, weight, lora=lora)
    assert y.shape == (m, n)
    assert y.dtype == jnp.bfloat16
    # Half a unit in the last place of the result, and the rounding of x A^T.
    tolerance = 2**-8 * (np.abs(expected) + 8 * np.sqrt(rank))
    assert (np.abs(wide(y) - expected) <= tolerance).all()


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((2, 5120, 2880), jnp.bfloat16, True),
        ((8, 5120, 2880, 384), jnp.bfloat16, True),
        ((8, 5120, 2880, 416), jnp.bfloat16, False),  # of q, k and v with ranks above 128
        ((16, 2880, 4096), jnp.bfloat16, True),
        ((1, 5120, 2880), jnp.bfloat16, False),  # `matvec` has it
        ((17, 5120, 2880), jnp.bfloat16, False),
        ((8, 5120, 1440), jnp.bfloat16, False),  # small
        ((8, 5120, 5760), jnp.bfloat16, False),  # large
        ((8, 5152, 2880), jnp.bfloat16, False),
        ((8, 5120, 2876), jnp.bfloat16, False),
        ((8, 5120, 2880), jnp.float32, False),
    ],
)
def test_which_products_it_has(shape, dtype, expected, monkeypatch):
    m, n, k, ranks = (*shape, 96)[:4]
    x, weight = (jax.ShapeDtypeStruct(size, dtype) for size in ((m, k), (n, k)))
    assert dense.fits(x, weight, ranks) == expected
    for capability in (7.5, 8.0):
        monkeypatch.setattr(device, "cuda_capability", lambda number=capability: number)
        assert dense.supports(x, weight, ranks) == (expected and capability >= 8.0)
