"""Adapters in PEFT's format, in both directions.

Generators: golden/make_peft_logits.py and golden/make_peft_experts.py.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trees
from refusal import refused
from safetensors.numpy import load_file

from qerl_jax.policy import lora as lora_lib
from qerl_jax.policy import transformer
from qerl_jax.policy.lora import LoraConfig
from qerl_jax.policy.trainable import current_policy
from qerl_jax.weights import names
from qerl_jax.weights.load import load
from qerl_jax.weights.peft import (
    expert_tensors,
    load_peft_adapter,
    read_peft_config,
    save_peft_adapter,
    take_experts,
)

GOLDEN = pathlib.Path(__file__).parent / "golden"
FOLDER = GOLDEN / "peft_logits"
ADAPTERS = {
    "plain": LoraConfig(rank=4, alpha=8),
    "rslora": LoraConfig(rank=4, alpha=8, rslora=True),
    "norms": LoraConfig(rank=4, alpha=8),
}


def load_base():
    return load(str(GOLDEN / "logits_qwen2"), format="bf16", dtype="float32")


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapted_logits(name):
    model = load_base()
    adapter = load_peft_adapter(FOLDER / name, model.config, ADAPTERS[name])
    params = current_policy(model.params, adapter)
    expected = load_file(FOLDER / "logits.safetensors")
    tokens = jnp.asarray(expected["ids"])[None]
    lengths = jnp.array([tokens.shape[1]])
    logits = transformer.forward(params, adapter.lora, tokens, lengths, config=model.config)
    np.testing.assert_allclose(logits[0], expected[name], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ADAPTERS)
def test_exports_equal_the_files_that_peft_writes(name, tmp_path):
    config = load_base().config
    adapter = load_peft_adapter(FOLDER / name, config, ADAPTERS[name])
    save_peft_adapter(tmp_path / name, adapter, ADAPTERS[name], base_model="logits_qwen2")

    ours = load_file(tmp_path / name / "adapter_model.safetensors")
    theirs = load_file(FOLDER / name / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert ours[key].dtype == value.dtype
        assert ours[key].tobytes() == value.tobytes()

    ours = json.loads((tmp_path / name / "adapter_config.json").read_text())
    theirs = json.loads((FOLDER / name / "adapter_config.json").read_text())
    ours["target_modules"].sort()
    assert ours == {key: theirs[key] for key in ours}


# --- Mixtures of experts --------------------------------------------------------------------------

EXPERTS = GOLDEN / "peft_experts"
MIXTURE_TARGETS = {
    "qwen3_moe": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "qwen3_5_moe": (
        *("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj"),
        *("shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj"),
    ),
}


def mixture(family):
    """The model, the options of its adapters, and the logits that transformers and PEFT compute."""
    model = load(str(GOLDEN / family), format="bf16", dtype="float32")
    options = LoraConfig(rank=2, alpha=4, targets=MIXTURE_TARGETS[family])
    return model, options, load_file(EXPERTS / family / "logits.safetensors")


def assert_logits(params, lora, config, expected, name):
    tokens = jnp.asarray(expected["ids"])[None]
    logits = transformer.forward(params, lora, tokens, jnp.array([13]), config=config)
    np.testing.assert_allclose(logits[0], expected[name], atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", MIXTURE_TARGETS)
def test_default_targets_of_a_mixture(family, tmp_path):
    model, options, expected = mixture(family)
    folder = EXPERTS / family / "default"
    assert set(read_peft_config(folder)[0].targets) == set(options.targets)
    adapter = load_peft_adapter(folder, model.config, options)
    assert_logits(model.params, adapter.lora, model.config, expected, "default")
    save_peft_adapter(tmp_path / "a", adapter, options, base_model=family)
    files = [path / "adapter_model.safetensors" for path in (tmp_path / "a", folder)]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("family", MIXTURE_TARGETS)
def test_adapters_of_routed_experts(family):
    """W + scale B A of each expert are what PEFT computes, and both layouts hold the same."""
    model, options, expected = mixture(family)
    config, folder = model.config, EXPERTS / family / "stacked"
    stored = load_file(folder / "adapter_model.safetensors")
    lora = load_adapter_of(stored, config, options)
    for number, layer in enumerate(model.params["layers"]):
        tensors = dict(stored)
        adapters = take_experts(folder, tensors, config, number, rank=2)
        assert len(stored) - len(tensors) == 4
        written = expert_tensors(adapters, config, number, stacked=True)
        assert written.keys() == stored.keys() - tensors.keys()
        for name, value in written.items():
            assert value.tobytes() == stored[name].tobytes()
        whole = expert_tensors(adapters, config, number, stacked=False)
        assert len(whole) == 2 * 3 * config.experts.count
        module = f"base_model.model.model.layers.{number}.mlp.experts.5.up_proj"
        assert whole[f"{module}.lora_B.weight"].shape == (config.experts.width, 2)
        other = dict(whole)
        again = take_experts(folder, other, config, number, rank=2)
        assert not other
        trees.assert_equal(again, adapters)
        whole[f"{module}.lora_A.weight"] = 2 * whole[f"{module}.lora_A.weight"]
        refused(
            "gate_proj and up_proj of an expert",
            *(take_experts, folder, whole, config, number),
            rank=2,
        )
        for stack, pair in adapters.items():
            update = options.scale * jnp.einsum("enr,erk->enk", pair["b"], pair["a"])
            layer[stack] = layer[stack] + update.reshape(layer[stack].shape)
    assert_logits(model.params, lora, config, expected, "stacked")
    words = "target_parameters .*this is no plain LoRA"
    refused(words, load_peft_adapter, folder, config, options)


def load_adapter_of(stored, config, options):
    """The adapter on the projections of a file that has others, too."""
    lora = lora_lib.init(jax.random.key(0), config, options)
    layers = [
        {
            projection: {m: stored[names.peft_tensor(number, projection, m)] for m in "ab"}
            for projection in layer
        }
        for number, layer in enumerate(lora.layers)
    ]
    return lora.replace(layers=layers)
