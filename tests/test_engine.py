"""Rollouts: greedy decoding, ends, chunks, and log-probabilities that the trainer computes too.

Which rows decode together, and in what memory, is tested in test_rollout_slots.py.
"""

import functools
import os
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_rollout import KEY, PAD, PROMPTS, TinyTokenizer, policy, progress, rollout, sampler

from qerl_jax.compile.operation import MissingProgramError
from qerl_jax.evaluation.complete import generate
from qerl_jax.policy import aqn, transformer
from qerl_jax.policy.policy import Policy
from qerl_jax.rl.batch import make_batch
from qerl_jax.rl.logprobs import completion_logprobs
from qerl_jax.rollout.config import EngineConfig, SamplingConfig
from qerl_jax.rollout.sampling import row_keys, sample
from qerl_jax.rollout.scheduler import pad_prompts


@functools.cache
def greedy():
    """The nine likeliest next tokens of each prompt, one forward pass a token."""
    config, params, lora = policy()
    forward = jax.jit(functools.partial(transformer.forward, config=config))
    rows = [list(prompt) for prompt in PROMPTS]
    for _ in range(9):
        logits = forward(params, lora, *pad_prompts(rows, width=20, pad_id=0))
        for row, ids in enumerate(rows):
            ids.append(int(logits[row, len(ids) - 1].argmax()))
    return np.array([ids[-9:] for ids in rows])


@pytest.mark.parametrize(("max_new_tokens", "chunk_steps"), [(1, 4), (6, 4), (9, 16), (9, 3)])
def test_greedy_decoding(max_new_tokens, chunk_steps):
    result = rollout(temperature=0.0, max_new_tokens=max_new_tokens, chunk_steps=chunk_steps)
    np.testing.assert_array_equal(result.tokens, greedy()[:, :max_new_tokens])
    np.testing.assert_array_equal(result.lengths, np.full(3, max_new_tokens))
    assert not result.finished.any()
    assert result.tokens.dtype == result.lengths.dtype == np.int32
    assert result.logprobs.shape == result.entropies.shape == (3, max_new_tokens)


def expected_lengths(eos_ids):
    """Tokens up to the first end of each greedy row, and whether there is one."""
    ends = np.isin(greedy(), eos_ids)
    finished = ends.any(axis=1)
    return np.where(finished, ends.argmax(axis=1) + 1, 9), finished


@pytest.mark.parametrize(
    ("chunk_steps", "picks"), [(1, [(0, 3)]), (4, [(0, 2), (1, 6)]), (4, [(0, 0), (2, 8)])]
)
def test_a_completion_ends_with_any_eos(chunk_steps, picks):
    eos_ids = tuple(int(greedy()[pick]) for pick in picks)
    lengths, finished = expected_lengths(eos_ids)
    assert finished.any()
    result = rollout(temperature=0.0, eos_ids=eos_ids, chunk_steps=chunk_steps)
    np.testing.assert_array_equal(result.lengths, lengths)
    np.testing.assert_array_equal(result.finished, finished)
    inside = np.arange(9) < lengths[:, None]
    np.testing.assert_array_equal(result.tokens, np.where(inside, greedy(), PAD))
    assert (result.logprobs[inside] < 0).all()
    assert (result.entropies[inside] > 0).all()
    assert not result.logprobs[~inside].any()
    assert not result.entropies[~inside].any()


def test_decoding_stops_when_every_row_has_ended():
    eos_ids = tuple(greedy()[:, 3].tolist())
    lengths, _ = expected_lengths(eos_ids)
    assert lengths.max() <= 4
    steps = list(progress(temperature=0.0, eos_ids=eos_ids, chunk_steps=2))
    # After one token, three and five; two more chunks are not needed.
    assert [(step.ended_rows, step.tokens) for step in steps] == [
        ((lengths <= sampled).sum(), np.minimum(lengths, sampled).sum()) for sampled in (1, 3, 5)
    ]
    assert {step.rows for step in steps} == {3}


@pytest.mark.parametrize("dequantize", ["step", pytest.param("once", marks=pytest.mark.slow)])
def test_results_do_not_depend_on_the_chunks(dequantize):
    options = {"quantized": True, "group_size": 2, "eos_ids": (3, 4, 5, 6), "top_p": 0.9}
    results = [
        rollout(chunk_steps=steps, dequantize=how, **options)
        for steps, how in ((1, "step"), (3, dequantize))
    ]
    first, second = results
    assert first.finished.any()
    for name in ("tokens", "lengths", "finished"):
        np.testing.assert_array_equal(getattr(second, name), getattr(first, name))
    for name in ("logprobs", "entropies"):
        np.testing.assert_allclose(getattr(second, name), getattr(first, name), atol=1e-5)


def test_groups_are_neighbors_and_their_members_differ():
    result = rollout(group_size=4)
    assert len({tuple(row) for row in result.tokens.tolist()}) == 12
    # The first token has one distribution in a group and another one in the next group.
    first = result.entropies[:, 0].reshape(3, 4)
    assert (first == first[:, :1]).all()
    assert len(set(first[:, 0].tolist())) == 3


def test_a_token_is_the_sample_of_its_key_row_and_position():
    config, params, lora = policy()
    result = rollout(group_size=2, ids=[4, 0, 9])
    rows = [[*PROMPTS[row // 2], *result.tokens[row].tolist()] for row in range(6)]
    tokens, lengths = pad_prompts(rows, width=24, pad_id=PAD)
    logits = transformer.forward(params, lora, tokens, lengths, config=config)
    for row, identity in enumerate((8, 9, 0, 1, 18, 19)):
        before = len(PROMPTS[row // 2]) - 1
        keys = row_keys(KEY, jnp.full(9, identity), jnp.arange(9))
        tokens, logprobs, _ = sample(keys, logits[row, before : before + 9], temperature=1.0)
        np.testing.assert_array_equal(tokens, result.tokens[row])
        np.testing.assert_allclose(logprobs, result.logprobs[row], atol=1e-4)


@pytest.mark.parametrize(
    ("dequantize", "temperature"),
    [pytest.param("once", 1.0, marks=pytest.mark.slow), ("step", 0.6)],
)
def test_the_trainer_computes_the_logprobs_of_the_rollout(dequantize, temperature):
    config, params, lora = policy(quantized=True)
    noisy = aqn.perturb_norms(jax.random.key(1), params, 3e-2)
    result = rollout(
        params=noisy,
        quantized=True,
        group_size=4,
        eos_ids=(3, 4, 5),
        temperature=temperature,
        dequantize=dequantize,
    )
    assert result.finished.any()
    assert not result.finished.all()
    batch = make_batch(
        [prompt for prompt in PROMPTS for _ in range(4)],
        result,
        np.zeros(12),
        mask_truncated=False,
        aggregation="token",
        pad_id=PAD,
    )
    mask = batch.loss_mask > 0

    def difference(params):
        logprobs, entropies = completion_logprobs(
            params,
            lora,
            jnp.asarray(batch.tokens),
            batch.prompt_lengths,
            batch.lengths,
            width=9,
            model_config=config,
            temperature=temperature,
        )
        distances = np.abs(logprobs - result.logprobs), np.abs(entropies - result.entropies)
        return [distance[mask].max() for distance in distances]

    assert max(difference(noisy)) < 1e-4
    assert min(difference(params)) > 1e-2


def test_another_temperature_and_greedy_have_their_own_programs_or_the_same():
    _, params, lora = policy()
    warm = sampler(top_k=3, prompt_width=9).compiled(KEY, Policy(params, lora), num_prompts=3)
    cold = warm.at_temperature(0.5)
    assert (warm.sampling.temperature, cold.sampling.temperature) == (1.0, 0.5)
    expected = rollout(top_k=3, temperature=0.5, prompt_width=9)
    jax.tree.map(
        np.testing.assert_array_equal, cold.rollout(KEY, Policy(params, lora), PROMPTS), expected
    )
    likeliest = warm.greedy()
    assert likeliest.sampling == SamplingConfig(max_new_tokens=9, temperature=0.0)
    with pytest.raises(MissingProgramError):
        likeliest.rollout(KEY, Policy(params, lora), PROMPTS)


def test_the_public_function_samples_as_a_sampler_does():
    config, params, lora = policy()
    model = types.SimpleNamespace(config=config, tokenizer=TinyTokenizer((3, 4)))
    sampling, engine = SamplingConfig(max_new_tokens=9), EngineConfig(chunk_steps=4)
    options = {"sampling": sampling, "engine": engine, "group_size": 2}
    found = generate(KEY, model, Policy(params, lora), PROMPTS, **options)
    jax.tree.map(np.testing.assert_array_equal, found, rollout(group_size=2, eos_ids=(3, 4)))


EXITS_WITH_A_CHUNK_IN_FLIGHT = """
import jax, sys
from tiny_rollout import TinyTokenizer
from tiny_model import tiny_policy
from qerl_jax.policy.policy import Policy
from qerl_jax.rollout.config import EngineConfig, SamplingConfig
from qerl_jax.rollout.sampler import Sampler

config, params = tiny_policy("llama", max_position=4096)
ends = range(config.vocab_size) if sys.argv[1] == "ended" else ()
sampling, engine = SamplingConfig(max_new_tokens=2000), EngineConfig(chunk_steps=500)
sampler = Sampler(config, TinyTokenizer(ends), sampling, engine)
for progress in sampler.steps(jax.random.key(0), Policy(params, None), [[1, 2, 3]]):
    if sys.argv[1] == "closed":
        break
print("done")
"""


@pytest.mark.slow  # processes; the test below waits for the chunk
@pytest.mark.parametrize("how", ["closed", "ended"])
def test_a_process_may_exit_after_a_rollout(how):
    """A chunk is in flight when all rows have ended or the generator is closed: XLA would abort."""
    ended = subprocess.run(
        [sys.executable, "-c", EXITS_WITH_A_CHUNK_IN_FLIGHT, how],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert (ended.stdout, ended.returncode) == ("done\n", 0), ended.stderr


def test_a_generator_that_is_closed_waits_for_the_chunk_in_flight(monkeypatch):
    waited = []
    steps = progress(max_new_tokens=40)
    next(steps)
    monkeypatch.setattr(jax, "block_until_ready", lambda samples: waited.append(len(samples)))
    steps.close()
    assert waited == [1]
