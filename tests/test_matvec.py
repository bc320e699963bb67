"""Products of a dense weight; the kernel for one token in the interpreter and on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from warpgroup_kernel import BACKENDS, normal

from pallas_kernels import device, matvec


@pytest.mark.parametrize("interpret", BACKENDS)
@pytest.mark.parametrize(
    ("n", "k", "rank"), [(64, 512, 0), (7, 1101, 0), (130, 40, 0), (258, 1056, 64)]
)
def test_matvec(n, k, rank, interpret):
    x, weight = normal(1, 1, k), normal(2, n, k)
    # B may have more columns than x A^T.
    lora = (normal(3, 1, rank), normal(4, n, rank + 32)) if rank else None
    bias = normal(5, n) if n % 2 == 0 else None
    run = jax.jit(functools.partial(matvec.matvec, interpret=interpret))
    y = run(x, weight, lora=lora, bias=bias)
    assert y.shape == (1, n)
    assert y.dtype == jnp.bfloat16
    expected = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    if lora:
        expected += np.asarray(lora[0], np.float64) @ np.asarray(lora[1], np.float64)[:, :rank].T
    if bias is not None:
        expected += np.asarray(bias, np.float64)
    # Half a unit in the last place of bfloat16, and sums of float32 before.
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, rtol=2**-8, atol=1e-4)


def test_the_columns_of_an_adapter():
    """Of B, which has more of them for other kernels, it reads a power of two times 32."""
    ranks = {8: 32, 32: 32, 33: 64, 96: 128, 129: 256}
    assert {rank: matvec.ranks_of(jnp.zeros((rank, 8))) for rank in ranks} == ranks


@pytest.mark.parametrize(
    ("rows", "dtype", "capability", "expected"),
    [
        (1, jnp.bfloat16, 9.0, True),
        (1, jnp.bfloat16, 8.0, True),
        (2, jnp.bfloat16, 9.0, False),
        (1, jnp.float32, 9.0, False),
        (1, jnp.bfloat16, 7.5, False),
        (1, jnp.bfloat16, 0.0, False),
    ],
)
def test_one_token_on_a_gpu_takes_the_kernel(rows, dtype, capability, expected, monkeypatch):
    monkeypatch.setattr(device, "cuda_capability", lambda: capability)
    x, weight = jnp.ones((rows, 64), dtype), jnp.ones((8, 64), dtype)
    program = str(jax.make_jaxpr(lambda *args: matvec.matmul(*args))(x, weight))  # not a cached one
    assert ("matvec" in program) == expected
    assert ("dot_general" in program) != expected


@pytest.mark.parametrize(
    ("backend", "flags", "dtype", "expected"),
    [
        ("cpu", "flags : avx2 avx512f avx512_bf16\n", jnp.bfloat16, jnp.float32),
        ("cpu", "flags : avx2 amx_bf16 amx_tile\n", jnp.bfloat16, jnp.bfloat16),
        ("cpu", None, jnp.bfloat16, jnp.float32),
        ("cpu", None, jnp.float32, jnp.float32),
        ("gpu", None, jnp.bfloat16, jnp.bfloat16),
    ],
)
def test_dense_weights_on_a_cpu_are_float32_without_amx(
    backend, flags, dtype, expected, tmp_path, monkeypatch
):
    if flags:
        (tmp_path / "cpuinfo").write_text(flags)
    monkeypatch.setattr(device, "_CPU", tmp_path / "cpuinfo")
    monkeypatch.setattr(device, "_has_amx", device._has_amx.__wrapped__)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert device.product_dtype(dtype) == expected


def test_a_float32_weight_has_the_products_and_gradients_of_a_bfloat16_one():
    x, weight, dy = normal(5, 3, 70), normal(6, 11, 70), normal(7, 3, 11)

    def product(x):
        return matvec.dot(x, weight.astype(jnp.float32))

    y, transposed = jax.vjp(product, x)
    (dx,) = transposed(dy)
    wide = [np.asarray(array, np.float64) for array in (x, weight, dy)]
    for found, expected in ((y, wide[0] @ wide[1].T), (dx, wide[2] @ wide[1])):
        assert found.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=2**-8, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2])
def test_matmul_on_a_gpu(rows):
    x, weight = normal(3, rows, 3584), normal(4, 512, 3584)
    y = np.asarray(jax.jit(matvec.matmul)(x, weight), np.float64)
    expected = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    np.testing.assert_allclose(y, expected, rtol=2**-8, atol=1e-3)
