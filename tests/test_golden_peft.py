"""Adapters in PEFT's format, in both directions.

Generators: golden/make_peft_logits.py and golden/make_peft_experts.py.
"""

import dataclasses
import json
import pathlib
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import trees
from refusal import refused
from safetensors.numpy import load_file, save_file

from qerl_jax.policy import transformer
from qerl_jax.policy.lora import LoraConfig
from qerl_jax.policy.trainable import current_policy
from qerl_jax.weights import names
from qerl_jax.weights.load import load
from qerl_jax.weights.peft import (
    fill_peft_adapter,
    load_peft_adapter,
    read_peft_config,
    save_peft_adapter,
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
PARAMETERS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
MIXTURE_TARGETS = {
    "qwen3_moe": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "qwen3_5_moe": (
        *("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj"),
        *("shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj"),
    ),
    "gpt_oss": ("q_proj", "k_proj", "v_proj", "o_proj"),
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


@pytest.mark.parametrize(
    "family", ["qwen3_moe", "qwen3_5_moe", pytest.param("gpt_oss", marks=pytest.mark.slow)]
)
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
def test_adapters_of_routed_experts(family, tmp_path):
    """The logits are those of PEFT, and both layouts hold the same."""
    model, options, expected = mixture(family)
    options, folder = dataclasses.replace(options, expert_rank=2), EXPERTS / family / "stacked"
    assert read_peft_config(folder)[0] == dataclasses.replace(
        options, targets=tuple(sorted(options.targets))
    )
    adapter = load_peft_adapter(folder, model.config, options)
    assert_logits(model.params, adapter.lora, model.config, expected, "stacked")
    interleaved = names.interleaves(model.config)
    written = {"base_model": family, "interleaved": interleaved}
    save_peft_adapter(tmp_path / "stacked", adapter, options, **written)
    files = [path / "adapter_model.safetensors" for path in (tmp_path / "stacked", folder)]
    assert files[0].read_bytes() == files[1].read_bytes()
    ours = json.loads((tmp_path / "stacked" / "adapter_config.json").read_text())
    theirs = json.loads((folder / "adapter_config.json").read_text())
    for config in (ours, theirs):
        config["target_modules"].sort()
        config["target_parameters"].sort()
    assert ours == {key: theirs[key] for key in ours}

    other = tmp_path / "other"
    other.mkdir()
    fill_peft_adapter(other, adapter, options, base_model=family, stacked=False)
    trees.assert_equal(load_peft_adapter(other, model.config, options), adapter)
    assert set(read_peft_config(other)[0].targets) == set(options.targets)
    stored = load_file(other / "adapter_model.safetensors")
    up = "base_model.model.model.layers.1.mlp.experts.5.up_proj.lora_{}.weight".format
    matrices = model.config.num_layers * model.config.experts.count * 3 * 2
    assert sum(".experts." in name for name in stored) == matrices
    assert stored[up("B")].shape == (model.config.experts.width, 2)
    save_file(stored | {up("A"): 2 * stored[up("A")]}, other / "adapter_model.safetensors")
    refused("gate_proj and up_proj of an expert", load_peft_adapter, other, model.config, options)
    none = dataclasses.replace(options, expert_rank=0)
    refused(
        "expert_rank is 2, the config asks for 0", load_peft_adapter, folder, model.config, none
    )


@pytest.mark.parametrize(
    ("changes", "expert_rank"),
    [
        ({"target_parameters": ["experts.down_proj", "gate_up_proj"]}, 2),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters"),
        ({"target_parameters": [*PARAMETERS, "mlp.gate.weight"]}, "target_parameters"),
        ({"target_modules": None}, 2),
        ({"rank_pattern": {r".*\.experts\.gate_up_proj": 4}}, "one rank"),
        ({"rank_pattern": dict.fromkeys(PARAMETERS, 4)}, "lora_alpha / r of the projections"),
        ({"rank_pattern": dict.fromkeys(PARAMETERS, 4),
          "alpha_pattern": dict.fromkeys(PARAMETERS, 8)}, 4),
        # of target_modules=['gate_proj', 'up_proj', 'down_proj']
        ({"rank_pattern": {r".*\.gate_up_proj": 4}, "alpha_pattern": {r".*\.gate_up_proj": 8},
          "target_parameters": ["down_proj", "gate_up_proj"]}, "all routed experts must have one"),
        ({"rank_pattern": dict.fromkeys(PARAMETERS, "4")}, "one rank"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern is {'q_proj': 4}, the config"),
        ({"r": 0}, "one rank"),
        ({"lora_alpha": 10**400}, "one rank"),
    ],
)  # fmt: skip
def test_options_of_adapters_of_experts(changes, expert_rank, tmp_path):
    """What other files than ours may say, and what is refused."""
    path = EXPERTS / "qwen3_moe" / "stacked" / "adapter_config.json"
    options = json.loads(path.read_text()) | changes
    (tmp_path / "adapter_config.json").write_text(json.dumps(options))
    if isinstance(expert_rank, str):
        refused(expert_rank, read_peft_config, tmp_path)
    else:
        assert read_peft_config(tmp_path)[0].expert_rank == expert_rank


@pytest.mark.parametrize(("name", "rank"), [("default", 0), ("stacked", 2)])
def test_names_of_projections_are_those_of_the_shared_expert(name, rank, tmp_path):
    """So PEFT writes target_modules=['gate_proj'] of Qwen3.5-MoE, whose experts are no modules."""
    folder = EXPERTS / "qwen3_5_moe" / name
    options = json.loads((folder / "adapter_config.json").read_text())
    options["target_modules"] = [name.rpartition(".")[2] for name in options["target_modules"]]
    (tmp_path / "adapter_config.json").write_text(json.dumps(options))
    shutil.copy(folder / "adapter_model.safetensors", tmp_path)
    found = read_peft_config(tmp_path)[0]
    assert (set(found.targets), found.expert_rank) == (set(MIXTURE_TARGETS["qwen3_5_moe"]), rank)
    model, own, expected = mixture("qwen3_5_moe")
    own = dataclasses.replace(own, expert_rank=rank)
    adapter = load_peft_adapter(tmp_path, model.config, own)
    assert_logits(model.params, adapter.lora, model.config, expected, name)

    options["modules_to_save"] = ["input_layernorm", "post_attention_layernorm"]
    (tmp_path / "adapter_config.json").write_text(json.dumps(options))
    refused("a qwen3_5_moe stores minus 1", load_peft_adapter, tmp_path, model.config, own)
