"""PEFT loads an exported adapter and computes the same logits.

This test needs torch, transformers and peft, which the project does not depend on:

    uv run --with torch --with peft pytest -m slow tests/test_peft_reload.py
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.policy import lora as lora_lib
from qerl_jax.policy import transformer
from qerl_jax.policy.layers import kinds
from qerl_jax.policy.trainable import Trainable
from qerl_jax.weights.load import load
from qerl_jax.weights.peft import fill_peft_adapter

GOLDEN = pathlib.Path(__file__).parent / "golden"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "options"),
    [
        ("qwen2", {}),
        ("qwen3", {"rslora": True}),
        ("mistral", {}),
        ("llama3", {"targets": ("q_proj", "v_proj", "down_proj")}),
        ("qwen3_5", {}),
        ("qwen3_moe", {}),
        ("qwen3_5_moe", {}),
        ("qwen3_moe", {"expert_rank": 4}),
        ("qwen3_5_moe", {"expert_rank": 3, "rslora": True}),
        ("qwen3_5_moe", {"expert_rank": 6, "targets": ()}),
        ("qwen3_moe, a pair for each expert", {"expert_rank": 3}),
        ("qwen3_moe, a pair for each expert", {"expert_rank": 4, "rslora": True}),
    ],
)
def test_peft_computes_the_same_logits(base, options, tmp_path):
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")

    base, _, of_each = base.partition(", ")
    folder = GOLDEN / (base if (GOLDEN / base).exists() else f"logits_{base}")
    model = load(str(folder), format="bf16", dtype="float32")
    options = {"targets": tuple(kinds.projection_shapes(model.config))} | options
    lora_config = lora_lib.LoraConfig(rank=4, alpha=8, **options)
    lora = lora_lib.init(jax.random.key(0), model.config, lora_config)
    lora = jax.tree.map(lambda x: x + 0.05 * jax.random.normal(jax.random.key(1), x.shape), lora)
    fill_peft_adapter(
        tmp_path, Trainable(lora, {}), lora_config, base_model=str(folder), stacked=not of_each
    )

    ids = np.arange(2, 15, dtype=np.int32)[None]
    lengths = jnp.array([ids.shape[1]])
    logits = transformer.forward(model.params, lora, ids, lengths, config=model.config)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        without = theirs(torch.tensor(ids, dtype=torch.long)).logits.numpy()
        adapted = peft.PeftModel.from_pretrained(theirs, tmp_path)
        expected = adapted(torch.tensor(ids, dtype=torch.long)).logits.numpy()
    assert np.abs(expected - without).max() > 0.1
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)
