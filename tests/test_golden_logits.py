"""The policy's logits equal those of transformers (generator: golden/make_logits.py)."""

import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from qerl_jax.policy import lora as lora_lib
from qerl_jax.policy import transformer
from qerl_jax.rollout.scheduler import pad_prompts
from qerl_jax.weights.load import load

GOLDEN = pathlib.Path(__file__).parent / "golden"
MODELS = ("qwen2", "qwen3", "llama3", "llama_tied", "mistral")


def golden(name):
    """Returns the model in float32, rows of ids padded to one width, and the logits of each row."""
    model = load(str(GOLDEN / f"logits_{name}"), format="bf16", dtype="float32")
    expected = load_file(GOLDEN / f"logits_{name}" / "logits.safetensors")
    rows = [expected[f"ids_{i}"] for i in range(3)]
    tokens, lengths = pad_prompts(rows, width=max(map(len, rows)) + 3, pad_id=77)
    logits = [expected[f"logits_{i}"] for i in range(3)]
    return model, jnp.asarray(tokens), jnp.asarray(lengths), logits


@pytest.mark.parametrize("name", MODELS)
def test_forward(name):
    model, tokens, lengths, expected = golden(name)
    logits = transformer.forward(model.params, None, tokens, lengths, config=model.config)
    for row, want in enumerate(expected):
        np.testing.assert_allclose(logits[row, : len(want)], want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_prefill_and_decode(name):
    model, tokens, lengths, expected = golden(name)
    prompt = 3
    logits, cache, _ = transformer.prefill(
        model.params,
        None,
        tokens[:, :prompt],
        jnp.full_like(lengths, prompt),
        config=model.config,
        cache_positions=tokens.shape[1],
    )
    adapters = lora_lib.fuse(None, model.config, jnp.float32)
    for position in range(prompt, int(lengths.max()) + 1):
        for row, want in enumerate(expected):
            if position <= len(want):
                np.testing.assert_allclose(logits[row], want[position - 1], atol=1e-4, rtol=0)
        logits, cache, _ = transformer.decode_step(
            model.params, adapters, tokens[:, position], cache, config=model.config
        )
