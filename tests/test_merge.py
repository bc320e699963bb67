"""Merged weights compute the same as the weights with a separate adapter."""

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import random_lora, random_tokens, tiny_policy

from qerl_jax.policy import transformer
from qerl_jax.policy.layers.kinds import PROJECTIONS, fused_of
from qerl_jax.policy.lora import merge_layer


@pytest.mark.parametrize(
    ("kind", "quantized", "targets"),
    [
        pytest.param("qwen2", False, PROJECTIONS, marks=pytest.mark.slow),
        ("qwen3", True, PROJECTIONS),
        ("llama", False, ("k_proj", "up_proj", "down_proj")),
        ("qwen3_5", True, (*PROJECTIONS, "in_proj_qkv", "in_proj_z", "out_proj")),
    ],
)
def test_merged_layers_compute_the_same(kind, quantized, targets):
    config, params = tiny_policy(kind, quantized=quantized)
    lora = random_lora(config, targets=targets)
    layers = [
        merge_layer(layer, adapters, config, scale=lora.scale)[0]
        for layer, adapters in zip(params["layers"], lora.layers, strict=True)
    ]
    tokens, lengths = random_tokens(2, 7), jnp.array([7, 7])
    merged = transformer.forward({**params, "layers": layers}, None, tokens, lengths, config=config)
    separate = transformer.forward(params, lora, tokens, lengths, config=config)
    without = transformer.forward(params, None, tokens, lengths, config=config)
    np.testing.assert_allclose(merged, separate, atol=2e-4)
    assert np.abs(separate - without).max() > 0.1


def test_the_updates_are_what_was_added():
    config, params = tiny_policy("qwen2")
    lora = random_lora(config, targets=("v_proj",))
    layer = params["layers"][0]
    merged, updates = merge_layer(layer, lora.layers[0], config, scale=lora.scale)
    for name in fused_of(config, 0):
        np.testing.assert_allclose(merged[name] - layer[name], updates[name], atol=1e-6)
    a, b = lora.layers[0]["v_proj"]["a"], lora.layers[0]["v_proj"]["b"]
    rows = len(b)
    np.testing.assert_allclose(updates["qkv_proj"][-rows:], lora.scale * b @ a, rtol=1e-5)
    assert not np.any(updates["qkv_proj"][:-rows])
    assert not np.any(updates["o_proj"])
    assert merged["input_layernorm"] is layer["input_layernorm"]
