"""Policies in MXFP4 and in NF4, from a checkpoint to gradients and completions."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusal import refused
from tiny_checkpoints import model_config, random_tensors, write_folder
from tiny_model import random_lora, random_tokens
from tiny_rollout import TinyTokenizer

from qerl_jax.policy import aqn, transformer
from qerl_jax.policy.layers.kinds import fused_of
from qerl_jax.policy.policy import Policy
from qerl_jax.policy.quant import QuantTensor
from qerl_jax.rollout.config import EngineConfig, SamplingConfig
from qerl_jax.rollout.sampler import Sampler
from qerl_jax.weights.load import load
from qerl_jax.weights.names import layer_module

FORMATS = ("mxfp4", "nf4")
GOLDEN = pathlib.Path(__file__).parent / "golden"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Returns a checkpoint whose projections fill the blocks of every format, and its tensors."""
    config = model_config("qwen2", num_layers=1, embed_dim=64, mlp_dim=128, head_dim=16)
    tensors = random_tensors(config)
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            tensors[name] = tensor / np.sqrt(tensor.shape[1]).astype(tensor.dtype)
    return write_folder(tmp_path_factory.mktemp("formats"), config, tensors), tensors


# `test_golden_mxfp4` reads MXFP4 by default, whose codes are those of NVFP4.
@pytest.fixture(
    scope="module",
    params=[pytest.param(f, marks=pytest.mark.slow if f == "mxfp4" else ()) for f in FORMATS],
)
def model(request, checkpoint):
    loaded = load(str(checkpoint[0]), format=request.param, dtype="float32")
    weights = [
        layer[fused] for layer in loaded.params["layers"] for fused in fused_of(loaded.config, 0)
    ]
    assert all(isinstance(weight, QuantTensor) for weight in weights)
    assert {weight.format for weight in weights} == {request.param}
    return loaded


def test_dequantized_layers_are_close_to_the_checkpoint(model, checkpoint):
    for number, layer in enumerate(transformer.dequantize_params(model.params)["layers"]):
        for fused, members in fused_of(model.config, 0).items():
            source = [checkpoint[1][f"{layer_module(number, name)}.weight"] for name in members]
            source = np.concatenate(source).astype(np.float32)
            assert layer[fused].shape == source.shape
            error = np.linalg.norm(layer[fused] - source) / np.linalg.norm(source)
            assert 0.05 < error < 0.15


def test_logits_and_gradients_are_those_of_the_dequantized_policy(model):
    noisy = aqn.perturb_norms(jax.random.key(0), model.params, 3e-2)
    tokens, lengths = random_tokens(2, 7), jnp.array([7, 4])

    @jax.jit
    def logits_and_gradient(params, lora):
        def loss(lora):
            logits = transformer.forward(params, lora, tokens, lengths, config=model.config)
            return jnp.sum(jnp.sin(logits[0])), logits

        return jax.grad(loss, has_aux=True)(lora)

    lora = random_lora(model.config)
    packed = logits_and_gradient(noisy, lora)
    dense = logits_and_gradient(transformer.dequantize_params(noisy), lora)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4)
    jax.tree.map(close, packed, dense)
    assert all(np.abs(leaf).max() > 1e-2 for leaf in jax.tree.leaves(packed[0].layers))


def test_dequantizing_once_or_in_each_step_gives_equal_rollouts(model):
    noisy = aqn.perturb_norms(jax.random.key(0), model.params, 3e-2)
    step, once = (
        Sampler(
            model.config,
            TinyTokenizer((2, 7, 9)),
            SamplingConfig(max_new_tokens=6, temperature=4.0),
            EngineConfig(dequantize=dequantize),
            group_size=2,
        ).rollout(jax.random.key(1), Policy(noisy, random_lora(model.config)), [[3, 1, 4], [1, 5]])
        for dequantize in ("step", "once")
    )
    np.testing.assert_array_equal(step.tokens, once.tokens)
    np.testing.assert_array_equal(step.lengths, once.lengths)
    np.testing.assert_allclose(step.logprobs, once.logprobs, atol=1e-4)
    assert len({tuple(row) for row in step.tokens.tolist()}) == 4


def test_inputs_that_do_not_fill_a_block_name_the_layer(tmp_path):
    config = model_config("llama", num_heads=8, head_dim=8, embed_dim=96)
    folder = write_folder(tmp_path, config, random_tensors(config))
    message = r"layer \d, q_proj/k_proj/v_proj: nf4 needs a multiple of 64 .*\(64, 96\)"
    refused(message, load, str(folder), format="nf4")
