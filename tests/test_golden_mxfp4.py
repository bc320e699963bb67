"""MXFP4 bytes and values equal those of torchao's floor rule (generator: golden/make_mxfp4.py)."""

import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from qerl_jax.policy.quant import dequantize, quantize

GOLDEN = np.load(pathlib.Path(__file__).parent / "golden" / "mxfp4.npz")
SOURCE = GOLDEN["source"].view(ml_dtypes.bfloat16)


@pytest.mark.parametrize("members", [1, 3])
def test_bytes(members):
    quantized = quantize(np.split(SOURCE, members), format="mxfp4")
    np.testing.assert_array_equal(quantized.packed, GOLDEN["packed"])
    np.testing.assert_array_equal(quantized.scales.view(np.uint8), GOLDEN["scales"])
    assert quantized.scales.dtype == ml_dtypes.float8_e8m0fnu


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values(dtype, jit):
    quantized = quantize([SOURCE], format="mxfp4")
    function = jax.jit(dequantize, static_argnums=1) if jit else dequantize
    values = np.asarray(function(quantized, jnp.dtype(dtype)))
    # The values have two significant bits, so bfloat16 holds them exactly.
    np.testing.assert_array_equal(values.astype(np.float32), GOLDEN["values"])


def test_where_compressed_tensors_chooses_another_scale():
    amax = np.abs(SOURCE.astype(np.float32)).reshape(len(SOURCE), -1, 32).max(axis=-1)
    rounded_up = 2 * np.frexp(amax)[0] >= 1.75
    assert 0.1 < rounded_up.mean() < 0.9
    scales = quantize([SOURCE], format="mxfp4").scales.view(np.uint8)
    np.testing.assert_array_equal(GOLDEN["compressed_tensors"], scales + rounded_up)
