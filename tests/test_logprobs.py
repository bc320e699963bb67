"""Log-probabilities of completions, and the exact KL between two policies."""

import functools
import re

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from row_batch import row_batch
from tiny_checkpoints import VOCAB
from tiny_model import random_lora, random_tokens, tiny_policy

from qerl_jax.environments import roles
from qerl_jax.policy import aqn, transformer
from qerl_jax.rl import logprobs as logprobs_lib
from qerl_jax.rl.packing import pack

TOKENS = random_tokens(3, 16)
PROMPT_LENGTHS = np.array([3, 1, 9], np.int32)
LENGTHS = np.array([10, 6, 14], np.int32)
WIDTH = 8
MASK = np.arange(WIDTH) < (LENGTHS - PROMPT_LENGTHS)[:, None]
# Conversations: the policy sampled some tokens, and an environment wrote the others.
SAMPLED = MASK & (np.arange(WIDTH) % 4 != 1)
# Chunks have 5 rows of float32 logits, which do not divide 24 rows.
SMALL_CHUNKS = 5 * 4 * VOCAB


@functools.cache
def policy():
    config, params = tiny_policy("qwen3", quantized=True, mlp_dim=64, num_layers=1)
    noisy = aqn.perturb_norms(jax.random.key(0), params, 0.2, final_norm=True)
    return config, params, noisy, random_lora(config)


@pytest.fixture(params=[None, SMALL_CHUNKS])
def chunk_bytes(request, monkeypatch):
    """The bytes of a chunk, or None for the default, with which all fit in one."""
    if request.param:
        monkeypatch.setattr(logprobs_lib, "_CHUNK_BYTES", request.param)
    return request.param


def completion_logprobs(params, lora, temperature=1.0):
    return logprobs_lib.completion_logprobs(
        params,
        lora,
        TOKENS,
        PROMPT_LENGTHS,
        LENGTHS,
        width=WIDTH,
        model_config=policy()[0],
        temperature=temperature,
    )


def log_softmax(params, lora, temperature):
    """float64 [B, C, V] at the positions that predict the completions, 0 outside of the mask."""
    logits = transformer.forward(params, lora, TOKENS, LENGTHS, config=policy()[0])
    logits = np.asarray(logits, np.float64) / temperature
    out = np.zeros((3, WIDTH, VOCAB))
    for row, prompt in enumerate(PROMPT_LENGTHS):
        for c in range(LENGTHS[row] - prompt):
            at = logits[row, prompt + c - 1]
            out[row, c] = at - at.max() - np.log(np.exp(at - at.max()).sum())
    return out


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_gathered_from_the_tempered_softmax(temperature, chunk_bytes):
    _, params, _, lora = policy()
    logprobs, entropies = completion_logprobs(params, lora, temperature)
    assert logprobs.shape == entropies.shape == (3, WIDTH)
    assert logprobs.dtype == entropies.dtype == jnp.float32
    assert np.isfinite(logprobs).all()
    assert np.isfinite(entropies).all()
    expected = log_softmax(params, lora, temperature)
    for row, c in np.argwhere(MASK):
        token = TOKENS[row, PROMPT_LENGTHS[row] + c]
        assert logprobs[row, c] == pytest.approx(expected[row, c, token], abs=1e-4)
    np.testing.assert_allclose(
        entropies[MASK], -(np.exp(expected) * expected).sum(axis=-1)[MASK], atol=1e-4
    )


def test_logits_are_held_in_chunks(monkeypatch):
    monkeypatch.setattr(logprobs_lib, "_CHUNK_BYTES", SMALL_CHUNKS)
    _, params, _, lora = policy()

    def shapes(jaxpr):
        for equation in jaxpr.eqns:
            yield from (variable.aval.shape for variable in equation.outvars)
            for inner in jax.extend.core.jaxprs_in_params(equation.params):
                yield from shapes(inner)

    jaxpr = jax.make_jaxpr(lambda lora: completion_logprobs(params, lora))(lora).jaxpr
    rows = {shape[0] for shape in shapes(jaxpr) if len(shape) == 2 and shape[1] == VOCAB}
    assert rows == {5}


@functools.cache
def buffer(in_turns=False):
    """The three completions, packed; their targets are what was sampled, row after row."""
    batch = row_batch(
        [TOKENS[row, :prompt].tolist() for row, prompt in enumerate(PROMPT_LENGTHS)],
        np.stack([np.resize(TOKENS[r, p:], WIDTH) for r, p in enumerate(PROMPT_LENGTHS)]),
        LENGTHS - PROMPT_LENGTHS,
        np.ones(3, bool),
        np.ones(3),
        # The number of each token, which tells its place in the buffer.
        np.arange(3 * WIDTH).reshape(3, WIDTH),
        roles=np.where(SAMPLED, roles.SAMPLED, roles.ENVIRONMENT) if in_turns else None,
        mask_truncated=False,
        aggregation="token",
        pad_id=0,
    )
    (found,) = pack(batch, np.ones(3, bool), buffer_tokens=32)
    return found


def in_buffer(values, buffer):
    """Values [B, C] in the order of a buffer's targets."""
    numbers = buffer.rollout_logprobs[buffer.mask > 0].astype(int)
    return np.asarray(values).reshape(-1)[numbers]


@pytest.mark.parametrize("in_turns", [False, True])
def test_packed_logprobs_are_those_of_rows(in_turns, chunk_bytes):
    config, params, _, lora = policy()
    ours, count = buffer(in_turns), (SAMPLED if in_turns else MASK).sum()
    assert ours.mask.tolist() == [1.0] * count + [0.0] * (len(ours.mask) - count)
    rows = completion_logprobs(params, lora, 0.7)
    options = {"model_config": config, "temperature": 0.7}
    *packed, _ = logprobs_lib.packed_logprobs(params, lora, ours, **options)
    for whole, part in zip(rows, packed, strict=True):
        np.testing.assert_allclose(part[:count], in_buffer(whole, ours), atol=1e-5)
        assert np.isfinite(part).all()
    if chunk_bytes:  # The last chunks hold no target and are not computed.
        np.testing.assert_array_equal(packed[0][-5:], 0.0)


@pytest.mark.parametrize(
    ("entropy_gradient", "chunk_bytes"),
    [
        pytest.param(False, None, marks=pytest.mark.slow),
        (True, None),
        (False, SMALL_CHUNKS),
        pytest.param(True, SMALL_CHUNKS, marks=pytest.mark.slow),
    ],
    indirect=["chunk_bytes"],
)
@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_gradients_are_those_of_a_log_softmax(tied, chunk_bytes, entropy_gradient):
    """Those of the states by the adapter and the norms, and of the head, which may be tied."""
    config, params = tiny_policy("qwen2", tie_embeddings=tied, num_layers=1)
    lora, packed, (a, b) = random_lora(config), buffer(), np.random.default_rng(0).random((2, 32))
    options = {"model_config": config, "temperature": 0.7, "entropy_gradient": entropy_gradient}

    def loss(values):
        logprobs, entropies = values
        value = jnp.sum(packed.mask * (a * jnp.sin(logprobs) + b * jnp.cos(entropies)))
        return value, (logprobs * packed.mask, entropies * packed.mask)

    def ours(params, lora):
        return loss(logprobs_lib.packed_logprobs(params, lora, packed, **options)[:2])

    def direct(params, lora):
        hidden, _ = transformer.packed_hidden_states(
            params, lora, packed.tokens, packed.positions, packed.segments, config=config
        )
        head = params["embed_tokens" if tied else "lm_head"]
        logits = jnp.matmul(hidden[packed.order], head.T, precision="highest")
        whole = jax.nn.log_softmax(logits / 0.7)
        entropies = -(jnp.exp(whole) * whole).sum(axis=-1)
        if not entropy_gradient:
            entropies = jax.lax.stop_gradient(entropies)
        return loss((whole[jnp.arange(32), packed.targets], entropies))

    found, expected = (
        jax.jit(jax.grad(f, argnums=(0, 1), has_aux=True))(params, lora) for f in (ours, direct)
    )
    leaves = zip(*(jax.tree.leaves(tree) for tree in (found, expected)), strict=True)
    for gradient, wanted in leaves:
        scale = float(jnp.abs(wanted).max())
        assert scale > 1e-3
        np.testing.assert_allclose(gradient, wanted, atol=1e-5 * scale)


@pytest.mark.parametrize(
    ("dtype", "error", "shared"), [(jnp.float32, 1e-6, 3e-7), (jnp.bfloat16, 4e-3, 4e-4)]
)
def test_the_gradient_of_states_under_a_frozen_head(dtype, error, shared, monkeypatch):
    """It has the error of its dtype, and of what all tokens share, 1 / 0.9, that of a float32."""
    monkeypatch.setattr(logprobs_lib, "_CHUNK_BYTES", SMALL_CHUNKS)
    rng, count, tokens = np.random.default_rng(0), 250, 256
    config = policy()[0]
    hidden = jnp.asarray(4 * rng.standard_normal((tokens, 16)), dtype)
    head = jnp.asarray(rng.standard_normal((VOCAB, 16)), dtype)
    ids, weights = rng.integers(0, VOCAB, tokens), rng.standard_normal(tokens).astype(np.float32)

    def loss(hidden):
        logprobs, entropies = logprobs_lib._logprobs_and_entropies(
            {"embed_tokens": head}, hidden, jnp.asarray(ids), count, 0.9, config, False
        )
        return jnp.sum((weights * logprobs)[:count]), entropies

    program = jax.jit(jax.grad(loss, has_aux=True)).lower(hidden)
    # The temperature belongs to the kernels that read the logits.
    assert program.as_text().count("optimization_barrier") == 1
    found = np.asarray(program.compile()(hidden)[0], np.float64)
    states, matrix = (np.asarray(x, np.float64) for x in (hidden, head))
    logits = states @ matrix.T / 0.9
    odds = np.exp(logits - logits.max(axis=-1, keepdims=True))
    slopes = np.eye(VOCAB)[ids] - odds / odds.sum(axis=-1, keepdims=True)
    expected = weights[:, None] * (np.arange(tokens) < count)[:, None] * (slopes @ matrix) / 0.9
    scale = np.linalg.norm(expected)
    assert np.linalg.norm(found - expected) < error * scale
    assert abs((found * expected).sum() / scale**2 - 1) < shared


def test_a_frozen_head_is_not_copied_and_multiplies_once(monkeypatch):
    monkeypatch.setattr(logprobs_lib, "_CHUNK_BYTES", SMALL_CHUNKS)
    config, params, _, lora = policy()

    def loss(lora, params):
        chosen, *_ = logprobs_lib.packed_logprobs(
            params, lora, buffer(), model_config=config, temperature=1.0
        )
        return chosen.sum()

    logits = rf"= f32\[{SMALL_CHUNKS // (4 * VOCAB)},{VOCAB}\]\S* dot\("
    text = jax.jit(jax.grad(loss)).lower(lora, params).compile().as_text()
    head = f"f32[{VOCAB},{config.embed_dim}]"
    made = re.findall(rf" = {re.escape(head)}\S* ([\w-]+)\(", text)
    assert set(made) == {"parameter", "get-tuple-element"}
    results = [
        line.split(" conditional(")[0] for line in text.splitlines() if "conditional(" in line
    ]
    assert results
    assert not any(head in result for result in results)
    # The logits of a chunk are computed once.
    assert len(re.findall(logits, text)) == 1


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_kl_is_exact(temperature, chunk_bytes):
    config, params, noisy, lora = policy()
    found = logprobs_lib.packed_kl(
        noisy, params, lora, buffer(), model_config=config, temperature=temperature
    )
    p, q = log_softmax(noisy, lora, temperature), log_softmax(params, lora, temperature)
    expected = (np.exp(p) * (p - q)).sum(axis=-1)
    assert expected[MASK].min() > 1e-4
    np.testing.assert_allclose(found, expected[MASK].sum(), rtol=1e-4)
    reverse = (np.exp(q) * (q - p)).sum(axis=-1)
    assert abs(expected - reverse)[MASK].sum() > 1e-2


def test_kl_of_equal_policies_is_zero():
    config, params, _, lora = policy()
    kl = logprobs_lib.packed_kl(
        params, params, lora, buffer(), model_config=config, temperature=1.0
    )
    assert kl == 0
