"""A policy in the kernel's tile order is the same policy; on a CPU through the definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import random_lora, tiny_policy

from pallas_kernels import fp4_matmul
from qerl_jax.policy import lora as lora_lib
from qerl_jax.policy import quant, transformer
from qerl_jax.policy.quant import QuantTensor
from qerl_jax.weights.save import checkpoint_tensors


def tiled(params):
    """The parameters with their packed projections in tile order."""
    return jax.tree.map(
        lambda leaf: quant.tile_order(leaf) if isinstance(leaf, QuantTensor) else leaf,
        params,
        is_leaf=lambda leaf: isinstance(leaf, QuantTensor),
    )


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "nf4"])
def test_orders(format):
    dense = np.random.default_rng(0).standard_normal((80, 192), np.float32)
    rows = jax.tree.map(jnp.asarray, quant.quantize([dense], format=format))
    tiles = quant.tile_order(rows)
    assert (tiles.tiles is None) == (format == "nf4")
    assert tiles.shape == (80, 192)
    assert tiles.format == format
    back = quant.checkpoint_order(tiles)
    np.testing.assert_array_equal(back.packed, rows.packed)
    np.testing.assert_array_equal(
        np.asarray(back.scales).view(np.uint8), np.asarray(rows.scales).view(np.uint8)
    )
    np.testing.assert_array_equal(
        quant.dequantize(tiles, jnp.float32), quant.dequantize(rows, jnp.float32)
    )


def test_weights_with_a_kernel_stay_packed():
    _, params = tiny_policy(quantized=True)
    tiles = tiled(params)
    assert transformer.dequantize_params(tiles)["layers"][0]["o_proj"].tiles is not None


def test_adapters_for_the_kernel_have_whole_parts(monkeypatch):
    config, _ = tiny_policy()
    lora = random_lora(config)
    plain = lora_lib.fuse(lora, config, jnp.float32)[0]
    monkeypatch.setattr(fp4_matmul, "device_kernel", lambda: "mosaic")
    for name, (a, b) in lora_lib.fuse(lora, config, jnp.float32)[0].items():
        assert b.shape[1] == 64
        rank = plain[name][0].shape[0]
        np.testing.assert_array_equal(a, plain[name][0])
        np.testing.assert_array_equal(b[:, :rank], plain[name][1])
        assert not b[:, rank:].any()


def test_files_hold_the_checkpoint_order():
    config, params = tiny_policy(quantized=True)
    expected = dict(checkpoint_tensors(params, config))
    actual = dict(checkpoint_tensors(tiled(params), config))
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert isinstance(actual[name], np.ndarray)
        assert actual[name].dtype == tensor.dtype
        np.testing.assert_array_equal(
            np.atleast_1d(actual[name]).view(np.uint8), np.atleast_1d(tensor).view(np.uint8)
        )
