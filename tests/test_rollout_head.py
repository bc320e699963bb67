"""The output head of a rollout in 4 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
from tiny_model import tiny_policy

from qerl_jax.errors import UserError
from qerl_jax.policy.quant import dequantize, quantize
from qerl_jax.policy.transformer import dequantize_params, forward, logits
from qerl_jax.rollout import head as head_lib
from qerl_jax.rollout.head import rollout_head
from qerl_jax.training.loop import train


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_logits_are_those_of_the_rounded_head(kind, monkeypatch):
    monkeypatch.setattr(head_lib, "_ROWS", 20)
    config, params = tiny_policy(kind)
    source = params.get("lm_head", params["embed_tokens"])
    head = rollout_head(params, "nvfp4")
    assert source.shape == head["lm_head"].shape
    assert len(source) % 20
    parts = [quantize([source[i : i + 20]], format="nvfp4") for i in range(0, len(source), 20)]
    rounded = jnp.concatenate([dequantize(part, jnp.float32) for part in parts])
    np.testing.assert_array_equal(dequantize(head["lm_head"], jnp.float32), rounded)
    tokens = jnp.arange(5)[None]
    sampled = forward(params | head, None, tokens, jnp.array([5]), config=config)
    expected = forward(params | {"lm_head": rounded}, None, tokens, jnp.array([5]), config=config)
    np.testing.assert_allclose(sampled, expected, atol=1e-5)
    exact = forward(params, None, tokens, jnp.array([5]), config=config)
    error = np.linalg.norm(sampled - exact) / np.linalg.norm(exact)
    assert 0.01 < error < 0.15


def test_the_head_is_dequantized_once():
    config, params = tiny_policy("llama")
    params = params | rollout_head(params, "nvfp4")
    dense = jax.jit(dequantize_params)(params)
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.standard_normal((3, config.embed_dim), np.float32))
    np.testing.assert_allclose(logits(dense, hidden), logits(params, hidden), atol=1e-5)


def test_head_formats():
    _, params = tiny_policy("llama")
    assert rollout_head(params, "") == {}
    with pytest.raises(UserError, match="head_format='fp8': '' or 'nvfp4'"):
        rollout_head(params, "fp8")


@pytest.mark.slow  # 10 s
def test_a_run_logs_what_the_rounding_does_to_the_log_probabilities(tiny, tmp_path):
    changes = {"rollout.head_format": "nvfp4", "aqn.schedule": "off", "steps": 2}
    run = train(tiny.config(changes), workdir=tmp_path / "run")
    rows = tiny_run.results(run)
    assert all(1e-3 < row["logprob_diff_max"] < 1 for row in rows)
    exact = train(tiny.config(changes | {"rollout.head_format": ""}), workdir=tmp_path / "exact")
    assert tiny_run.results(exact)[0]["logprob_diff_max"] < 1e-4
    # The held-out problems are solved by the policy itself.
    assert tiny_run.evaluations(run)[0] == tiny_run.evaluations(exact)[0]
