"""Merged weights compute the same as the weights with a separate adapter."""

import gguf_cases
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import random_lora, random_tokens, tiny_policy

from qerl_jax.export.merge import calibrated_merge, merged_layers
from qerl_jax.policy import transformer
from qerl_jax.policy.layers.kinds import FUSED, PROJECTIONS, fused_of
from qerl_jax.policy.lora import Lora, merge_layer
from qerl_jax.policy.quant import QuantTensor, dequantize
from qerl_jax.weights.load import load


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


# --- Merges in 4 bits by GPTQ ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("family", gguf_cases.FAMILIES)
def test_a_calibrated_merge_keeps_an_update_that_rounding_loses(family, tmp_path):
    """One of a hundredth of the distance between numbers, on weights that are on the grid."""
    folder = gguf_cases.write_folder(tmp_path / "model", family, packed=True)
    model = load(str(folder), dtype="float32")
    lora = Lora(layers=gguf_cases.adapter_of(family).layers, scale=0.002)
    tokens = np.random.default_rng(0).integers(0, 260, (8, 32)).astype(np.int32)
    kept, lost = {}, {}
    merged = list(calibrated_merge(model, lora, tokens, retention=kept))
    list(merged_layers(model, lora, format="nvfp4", retention=lost))
    assert kept.keys() == lost.keys() == {name for layer in lora.layers for name in layer}
    for name in FUSED["qkv_proj"]:
        assert 0.6 < kept[name].kept_fraction < 1.4
        assert lost[name].kept_fraction < 0.5
    for ours, theirs in zip(merged, model.params["layers"], strict=True):
        for name, weight in theirs.items():
            if isinstance(weight, QuantTensor):  # the scales of the base, and all of its experts
                np.testing.assert_array_equal(ours[name].scales, weight.scales)
                np.testing.assert_array_equal(ours[name].global_scale, weight.global_scale)
                if name.startswith("experts"):
                    np.testing.assert_array_equal(ours[name].packed, weight.packed)


@pytest.mark.slow
def test_a_calibrated_merge_of_no_update_is_the_base(tmp_path):
    model = load(str(gguf_cases.write_folder(tmp_path / "model", "llama", packed=True)))
    lora = Lora(layers=gguf_cases.adapter_of("llama").layers, scale=0.0)
    tokens = np.random.default_rng(0).integers(0, 260, (8, 32)).astype(np.int32)
    kept = {}
    merged = list(calibrated_merge(model, lora, tokens, retention=kept))
    assert kept == {}
    for ours, theirs in zip(merged, model.params["layers"], strict=True):
        for name in FUSED.keys() & theirs.keys():
            values = (np.asarray(dequantize(x, np.float32)) for x in (ours[name], theirs[name]))
            np.testing.assert_array_equal(*values)
