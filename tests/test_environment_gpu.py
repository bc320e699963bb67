"""Conversations on a GPU: the log-probs of later turns agree with the trainer's as the first one's.

uv run --extra cuda pytest -n 0 -m gpu tests/test_environment_gpu.py
"""

import jax
import numpy as np
import pytest
from tiny_checkpoints import model_config
from tiny_model import random_tokens
from tiny_rollout import conversation_logprobs

from benchmarks.environments import Timer
from benchmarks.rollout.random_policy import random_lora, random_params
from benchmarks.rollout.subject import NO_TEXT
from qerl_jax.environments.roles import SAMPLED
from qerl_jax.policy.policy import Policy
from qerl_jax.rollout.config import EngineConfig, SamplingConfig, TurnConfig
from qerl_jax.rollout.sampler import Sampler
from qerl_jax.weights.layer_memory import compact_layers

pytestmark = pytest.mark.gpu
TURNS, TOKENS, REPLY = 3, 40, 9
CONFIG = model_config(
    "qwen2",
    vocab_size=2048,
    embed_dim=512,
    mlp_dim=2048,
    num_heads=12,
    num_kv_heads=2,
    head_dim=128,
    max_position=512,
)


# Batches of other sizes have other kernels, see `pallas_kernels.decode.layer`.
@pytest.mark.parametrize("rows", [8, 32, 128])
@pytest.mark.parametrize("format", ["nvfp4", "bf16"])
def test_logprobs_of_every_turn_agree_with_the_trainer(rows, format):
    params = random_params(jax.random.key(0), CONFIG, format=format)
    params |= {"layers": compact_layers(params["layers"])}
    policy = Policy(params, random_lora(jax.random.key(1), CONFIG, rank=32))
    sampler = Sampler(
        CONFIG,
        NO_TEXT,  # No token ends a turn: all turns of a row have TOKENS.
        SamplingConfig(max_new_tokens=TURNS * TOKENS),
        EngineConfig(max_rows=rows),
        turns=TurnConfig(TURNS, TOKENS, REPLY, TURNS * (TOKENS + REPLY + 1)),
    )
    prompts = [random_tokens(70 + n % 30, seed=n).tolist() for n in range(rows)]
    dialog = Timer(0.0, TURNS, random_tokens(REPLY, seed=9).tolist())
    rollout = sampler.rollout(jax.random.key(2), policy, prompts, dialog=dialog)
    logprobs, _ = conversation_logprobs(CONFIG, policy, prompts, rollout)
    sampled = rollout.roles == SAMPLED
    assert (sampled.sum(axis=1) == TURNS * TOKENS).all()
    difference = np.abs(rollout.logprobs - np.asarray(logprobs))[sampled]
    by_turn = difference.reshape(rows, TURNS, TOKENS)
    # What a turn begins with is prefilled in the middle of a row, with roundings of its own.
    assert by_turn[:, 0].mean() < 0.01
    assert by_turn[:, 1:].mean() < 0.01
    assert by_turn[:, 1:, 0].mean() < 0.02
    assert by_turn.max() < 0.3
