"""Adapters in PEFT's format, in both directions (generator: golden/make_peft_logits.py)."""

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from qerl_jax.policy import transformer
from qerl_jax.policy.lora import LoraConfig
from qerl_jax.policy.trainable import current_policy
from qerl_jax.weights.load import load
from qerl_jax.weights.peft import load_peft_adapter, save_peft_adapter

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
