"""NF4 bytes and values equal those of bitsandbytes (generator: golden/make_nf4.py)."""

import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.fp4_matmul import FORMATS
from qerl_jax.policy.quant import dequantize, quantize

GOLDEN = np.load(pathlib.Path(__file__).parent / "golden" / "nf4.npz")


def source(name):
    return GOLDEN[f"{name}.source"].view(ml_dtypes.bfloat16)


@pytest.mark.parametrize("name", ["weights", "ratios"])
def test_bytes(name):
    quantized = quantize([source(name)], format="nf4")
    np.testing.assert_array_equal(quantized.packed.reshape(-1), GOLDEN[f"{name}.packed"])
    np.testing.assert_array_equal(quantized.scales.reshape(-1), GOLDEN[f"{name}.absmax"])
    assert quantized.scales.dtype == np.float32


def test_a_fused_group_has_the_bytes_of_its_members():
    members = np.split(source("weights"), [8, 9])
    quantized = quantize(members, format="nf4")
    np.testing.assert_array_equal(quantized.packed.reshape(-1), GOLDEN["weights.packed"])
    np.testing.assert_array_equal(quantized.scales.reshape(-1), GOLDEN["weights.absmax"])


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values(dtype, jit):
    quantized = quantize([source("weights")], format="nf4")
    function = jax.jit(dequantize, static_argnums=1) if jit else dequantize
    values = np.asarray(function(quantized, jnp.dtype(dtype)))
    expected = GOLDEN[f"weights.{dtype}"].view(values.dtype)
    # XLA may flush the row of subnormal numbers to zero.
    rows = np.abs(source("weights")).max(axis=1) > 1e-30
    assert np.count_nonzero(~rows) == 1
    np.testing.assert_array_equal(values[rows], expected[rows])
    assert np.abs(values[~rows].astype(np.float32)).max() < 2e-37


def test_the_ratios_reach_every_decision_bound():
    weight = source("ratios").astype(np.float64).reshape(128, -1, 64)
    ratios = weight / np.abs(weight).max(axis=-1, keepdims=True)
    codebook = np.array(FORMATS["nf4"].codebook)
    for bound in (codebook[:-1] + codebook[1:]) / 2:
        above = ratios > bound
        distances = np.abs(ratios - bound)
        assert distances[above].min() < 2e-3
        assert distances[~above].min() < 2e-3
