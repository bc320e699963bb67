"""Samples, their distribution, and their log-probabilities."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.errors import UserError
from qerl_jax.rollout.config import EngineConfig, SamplingConfig
from qerl_jax.rollout.sampling import _truncate, row_keys, sample

ROWS = 20000
PROBABILITIES = np.array([0.05, 0.35, 0.2, 0.3, 0.1])
KEY = jax.random.key(0)


def sampled(logits, *, key=KEY, rows=None, position=0, **options):
    rows = jnp.arange(len(logits)) if rows is None else jnp.asarray(rows)
    keys = row_keys(key, rows, jnp.full_like(rows, position))
    return sample(keys, jnp.asarray(logits, jnp.float32), **options)


def random_logits(rows=64, vocabulary=16):
    return 2 * np.random.default_rng(0).standard_normal((rows, vocabulary), np.float32)


def distribution(temperature=1.0, kept=range(5)):
    """The probabilities of the kept tokens, tempered and normalized."""
    weights = np.where(np.isin(np.arange(5), list(kept)), PROBABILITIES ** (1 / temperature), 0)
    return weights / weights.sum()


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"temperature": 0.6}, [0, 1, 2, 3, 4]),
        ({"temperature": 1.7}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 1}, [1]),
        ({"top_k": 5}, [0, 1, 2, 3, 4]),
        ({"top_k": 9}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.6}, [1, 3]),
        ({"top_p": 0.7}, [1, 2, 3]),
        ({"top_p": 0.96}, [0, 1, 2, 3, 4]),
        ({"top_p": 1e-6}, [1]),
        # Tempered: 0.64 and 0.31 are the largest.
        ({"top_p": 0.5, "temperature": 0.3}, [1]),
        # Of the three largest, renormalized: 0.41, 0.35, 0.24.
        ({"top_k": 3, "top_p": 0.7}, [1, 3]),
        ({"top_k": 3, "top_p": 0.8}, [1, 2, 3]),
        ({"min_p": 0.5}, [1, 2, 3]),
        ({"min_p": 0.6}, [1, 3]),
        ({"min_p": 1.0}, [1]),
        ({"min_p": 0.1}, [0, 1, 2, 3, 4]),
        # Tempered: 0.2 / 0.35 becomes 0.33.
        ({"min_p": 0.5, "temperature": 0.5}, [1, 3]),
        # Of the three that min_p leaves, renormalized: 0.41, 0.35, 0.24.
        ({"min_p": 0.5, "top_p": 0.76}, [1, 3]),
        ({"min_p": 0.6, "top_k": 3}, [1, 3]),
    ],
    ids=str,
)
def test_distribution(options, kept):
    options = {"temperature": 1.0} | options
    tokens, _, _ = sampled(np.tile(np.log(PROBABILITIES), (ROWS, 1)), **options)
    counts = np.bincount(tokens, minlength=5)
    expected = distribution(options["temperature"], kept)
    np.testing.assert_array_equal(np.flatnonzero(counts), kept)
    # Exceeded with probability 1e-4 at four degrees of freedom.
    chi_square = np.sum((counts[kept] - ROWS * expected[kept]) ** 2 / (ROWS * expected[kept]))
    assert chi_square < 23.5


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"top_k": 200}, marks=pytest.mark.slow),
        pytest.param({"top_p": 0.8}, marks=pytest.mark.slow),
    ],
    ids=["all", "top-k", "top-p"],
)
def test_distribution_over_many_blocks(options):
    """More tokens than one block has, some blocks far less likely, the last one not full."""
    rng = np.random.default_rng(2)
    logits = rng.standard_normal(300) + np.repeat([0.0, -4.0, 1.0], 100)
    logits[100:110] += 4
    tokens, logprobs, entropies = sampled(
        np.tile(logits, (5 * ROWS, 1)), temperature=1.0, **options
    )
    probs = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose(logprobs, np.log(probs)[tokens], atol=1e-5)
    np.testing.assert_allclose(entropies, -(probs * np.log(probs)).sum(), atol=1e-5)
    order = np.argsort(-probs)
    kept = order[: options.get("top_k", 300)]
    kept = kept[probs[kept].cumsum() - probs[kept] < options.get("top_p", 1.0)]
    counts = np.bincount(tokens, minlength=300)
    assert set(np.flatnonzero(counts)) <= set(kept)
    expected = len(tokens) * probs[kept] / probs[kept].sum()
    # Exceeded with probability 1e-4: the normal approximation of as many degrees of freedom.
    chi_square = np.sum((counts[kept] - expected) ** 2 / expected)
    freedom = len(kept) - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)


def masked(logits):
    """Masks a whole block, and all tokens but one of a second block."""
    logits[:, :128] = -np.inf
    logits[:, 129:256] = -np.inf
    return logits


@pytest.mark.parametrize(
    ("temperature", "greedy"),
    [(1.0, True), (0.5, False), pytest.param(1.0, False, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    ("vocabulary", "change"),
    [
        (384, lambda logits: logits),
        (385, lambda logits: logits),
        (384, masked),
        (300, lambda logits: logits + 1000),
        (300, lambda logits: 30 * logits),
        (300, np.zeros_like),
    ],
    ids=["whole blocks", "one more", "masked", "offset", "far apart", "equal"],
)
def test_logprobs_and_entropies_over_many_blocks(vocabulary, change, temperature, greedy):
    rng = np.random.default_rng(3)
    logits = change(rng.standard_normal((64, vocabulary)).astype(np.float32))
    options = {"temperature": temperature, "greedy": greedy}
    options |= {"top_k": 3, "top_p": 0.5, "min_p": 0.5} if greedy else {}  # which change nothing
    tokens, logprobs, entropies = sampled(logits, **options)
    scaled = logits.astype(np.float64) / temperature
    scaled -= scaled.max(axis=1, keepdims=True)
    expected = scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(logprobs, expected[np.arange(64), tokens], atol=2e-6, rtol=1e-6)
    terms = np.exp(expected) * np.where(np.isfinite(expected), expected, 0)
    np.testing.assert_allclose(entropies, -terms.sum(axis=1), atol=5e-6)
    if greedy:
        np.testing.assert_array_equal(tokens, logits.argmax(axis=1))
    # The rows that are sampled together do not matter.
    some, *_ = sampled(logits[[7, 3]], rows=[7, 3], **options)
    np.testing.assert_array_equal(some, tokens[np.array([7, 3])])


@pytest.mark.parametrize("truncation", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}], ids=str)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_logprobs_and_entropies_are_those_before_the_truncation(temperature, truncation):
    logits = random_logits()
    tokens, logprobs, entropies = sampled(logits, temperature=temperature, **truncation)
    scaled = logits.astype(np.float64) / temperature
    expected = scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(logprobs, expected[np.arange(64), tokens], atol=1e-5)
    np.testing.assert_allclose(entropies, -(np.exp(expected) * expected).sum(axis=1), atol=1e-5)
    assert tokens.dtype == jnp.int32
    assert logprobs.dtype == entropies.dtype == jnp.float32


@pytest.mark.parametrize("spread", [0.5, 4.0, 20.0])
@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 7},
        {"top_p": 0.9},
        {"top_k": 40, "top_p": 0.7},
        {"min_p": 0.2},
        {"min_p": 0.01, "top_p": 0.8},
    ],
)
def test_truncation_keeps_what_a_sort_would_keep(options, spread):
    """Among many tokens, next to each other in probability or far apart."""
    logits = spread * np.random.default_rng(1).standard_normal((8, 3000)).astype(np.float32)
    kept = np.isfinite(
        _truncate(jax.nn.log_softmax(logits), **{"top_k": 0, "top_p": 1.0, "min_p": 0.0} | options)
    )
    order = np.argsort(-logits, axis=1)
    probs = np.exp(np.take_along_axis(logits, order, axis=1).astype(np.float64))
    probs[:, options.get("top_k", 3000) :] = 0
    probs[probs < options.get("min_p", 0.0) * probs[:, :1]] = 0
    before = probs.cumsum(axis=1) - probs
    expected = (probs > 0) & (before < options.get("top_p", 1.0) * probs.sum(axis=1, keepdims=True))
    np.testing.assert_array_equal(np.take_along_axis(kept, order, axis=1), expected)


def test_a_sample_depends_on_key_row_and_position_alone():
    logits = np.tile(random_logits(1), (64, 1))
    tokens, _, _ = sampled(logits, temperature=1.0)
    assert len(set(tokens.tolist())) > 3
    chosen = [40, 3, 17]
    some, _, _ = sampled(logits[:3], rows=chosen, temperature=1.0)
    np.testing.assert_array_equal(some, tokens[jnp.array(chosen)])
    for change in ({"position": 1}, {"key": jax.random.key(1)}, {"rows": np.arange(64) + 64}):
        other, _, _ = sampled(logits, temperature=1.0, **change)
        assert (other != tokens).sum() > 16


def test_keys_of_rows_and_positions_are_all_different():
    rows, positions = np.divmod(np.arange(64), 8)
    keys = jax.random.key_data(row_keys(KEY, jnp.asarray(rows), jnp.asarray(positions)))
    assert len(np.unique(keys, axis=0)) == 64


SAMPLING = functools.partial(SamplingConfig, max_new_tokens=4)


@pytest.mark.parametrize(
    ("config", "name", "value"),
    [
        (SAMPLING, "max_new_tokens", 0),
        (SAMPLING, "temperature", -1.0),
        (SAMPLING, "temperature", float("nan")),
        (SAMPLING, "temperature", float("inf")),
        (SAMPLING, "top_k", -1),
        (SAMPLING, "top_p", 0.0),
        (SAMPLING, "top_p", 1.5),
        (SAMPLING, "top_p", float("nan")),
        (SAMPLING, "min_p", -0.1),
        (SAMPLING, "min_p", 1.5),
        (SAMPLING, "min_p", float("nan")),
        (SAMPLING, "stop", ("###", "")),
        (EngineConfig, "chunk_steps", 0),
        (EngineConfig, "max_rows", -1),
        (EngineConfig, "kv_cache_bytes", -1),
        (EngineConfig, "dequantize", "never"),
        (EngineConfig, "prompt_width", -1),
    ],
)
def test_values_out_of_range(config, name, value):
    with pytest.raises(UserError, match=f"^{name} is .*, expected "):
        config(**{name: value})
