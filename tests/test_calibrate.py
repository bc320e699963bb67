"""Activation-aware scaling: equal logits before rounding, closer logits after it."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from qerl_jax.export.quantize import pack_layer, round_layers, write_packed
from tiny_checkpoints import VOCAB, model_config, random_tensors, write_folder

from qerl_jax.export import calibrate
from qerl_jax.policy import transformer
from qerl_jax.policy.quant import dequantize, quantize_nvfp4
from qerl_jax.weights.checkpoint import open_checkpoint
from qerl_jax.weights.load import load

MODELS = ("llama", "qwen2", "qwen3")
BFLOAT16 = ml_dtypes.bfloat16


@pytest.fixture
def source(tmp_path):
    """Returns a function from a model type to a folder whose activations have outliers."""

    def make(model_type):
        config = model_config(model_type, embed_dim=64, mlp_dim=96)
        rng = np.random.default_rng(1)
        tensors = {}
        for name, tensor in random_tensors(config).items():
            values = tensor.astype(np.float32)
            if name.endswith("_proj.weight"):
                values /= values.shape[1] ** 0.5
            elif "layernorm" in name:
                values = 0.2 + 0.1 * np.abs(values)
                values[rng.choice(64, 4, replace=False)] *= 20
            elif "norm" in name:
                values = 1 + 0.1 * values
            tensors[name] = values.astype(BFLOAT16)
        return write_folder(tmp_path / model_type, config, tensors)

    return make


def tokens(seed, rows=12):
    return np.random.default_rng(seed).integers(0, VOCAB, (rows, 24), np.int32)


def logits(params, ids, config):
    lengths = jnp.full(len(ids), ids.shape[1], jnp.int32)
    return np.asarray(transformer.forward(params, None, jnp.asarray(ids), lengths, config=config))


@pytest.mark.parametrize(
    "model_type", ["qwen2", *(pytest.param(t, marks=pytest.mark.slow) for t in ("qwen3", "llama"))]
)
def test_scaling_alone_does_not_change_the_logits(source, model_type):
    folder = str(source(model_type))
    model = load(folder, format="bf16", dtype="float32")
    layers = list(calibrate.scaled_layers(open_checkpoint(folder), tokens(0), clip=False))
    for layer, original in zip(layers, model.params["layers"], strict=True):
        scaled = layer.arrays
        assert scaled.keys() == original.keys()
        for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "input_layernorm"):
            assert np.abs(scaled[name] / original[name] - 1).max() > 0.1, name
        for name in ("input_layernorm", "post_attention_layernorm"):
            np.testing.assert_array_equal(scaled[name], scaled[name].astype(BFLOAT16))
    arrays = [jax.tree.map(jnp.asarray, layer.arrays) for layer in layers]
    scaled = model.params | {"layers": arrays}
    ids = tokens(1)
    np.testing.assert_allclose(
        logits(scaled, ids, model.config),
        logits(model.params, ids, model.config),
        atol=2e-3,
        rtol=0,
    )


def test_logits_on_other_tokens_become_closer(tmp_path, source):
    folder = str(source("qwen2"))
    checkpoint = open_checkpoint(folder)
    scaled = list(calibrate.scaled_layers(checkpoint, tokens(0)))
    layers = [pack_layer(checkpoint, i, layer.arrays) for i, layer in enumerate(scaled)]
    for layer in scaled:
        for name, error in layer.errors.items():
            assert 0.3 < error / layer.rounded_errors[name] < 1.02, name
            assert 0.02 < layer.rounded_errors[name] < 0.2
    write_packed(tmp_path / "calibrated", checkpoint, layers)
    write_packed(tmp_path / "rounded", checkpoint, round_layers(checkpoint))
    config, ids = checkpoint.config, tokens(1)
    exact = logits(load(folder, format="bf16", dtype="float32").params, ids, config)
    calibrated, rounded = (
        np.square(logits(load(str(tmp_path / name), dtype="float32").params, ids, config) - exact)
        for name in ("calibrated", "rounded")
    )
    assert calibrated.mean() < 0.8 * rounded.mean()


def test_rounding_in_the_search_is_nearly_that_of_the_quantizer():
    weight = np.random.default_rng(0).standard_normal((64, 96), np.float32).astype(BFLOAT16)
    searched = np.asarray(calibrate._round(jnp.asarray(weight, jnp.float32)))
    packed = np.asarray(dequantize(quantize_nvfp4([weight]), jnp.float32))
    moved = np.abs(searched - packed) > 0.02 * np.abs(packed) + 1e-6
    assert moved.mean() < 0.05
    error = np.linalg.norm(searched - weight.astype(np.float32))
    assert error == pytest.approx(np.linalg.norm(packed - weight.astype(np.float32)), rel=0.02)


def test_clipping_does_not_raise_the_error_that_it_minimizes():
    rng = np.random.default_rng(2)
    weight = jnp.asarray(rng.standard_t(3, (32, 64)), jnp.float32)
    inputs = rng.standard_normal((200, 64), np.float32) * np.linspace(0.1, 3, 64, dtype=np.float32)
    moment = jnp.asarray(inputs.T @ inputs)
    clipped = calibrate._clip(weight, moment)
    assert (np.abs(clipped) <= np.abs(weight)).all()
    assert (np.sign(clipped) == np.sign(weight)).all()
    scale = calibrate._global_scale(weight)

    def error(candidate):
        rounded = calibrate._round_blocks(candidate.reshape(32, 4, 16), scale)
        changed = np.asarray(rounded - weight.reshape(32, 4, 16))
        blocks = np.asarray(moment).reshape(4, 16, 4, 16)
        own = np.stack([blocks[i, :, i] for i in range(4)])
        return np.einsum("nia,iab,nib->ni", changed, own, changed)

    assert (error(clipped) <= error(weight) * 1.0001).all()
    assert error(clipped).sum() < 0.95 * error(weight).sum()
