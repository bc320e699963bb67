"""The policy's own consistency; its logits are compared with transformers' in test_golden_*."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_checkpoints import VOCAB
from tiny_model import KINDS, random_lora, random_tokens, tiny_policy

from pallas_kernels import device
from pallas_kernels.fp4_matmul import dispatch
from qerl_jax.policy import aqn, transformer
from qerl_jax.policy import lora as lora_lib
from qerl_jax.policy.layers import kinds
from qerl_jax.policy.quant import QuantTensor, tile_order

LENGTHS = np.array([10, 7, 4], np.int32)
TOKENS = random_tokens(3, 12)


@functools.cache
def logits_of(model_type, quantized=False, tie_embeddings=False):
    """A policy, its adapter and its logits at every position."""
    config, params = tiny_policy(model_type, quantized=quantized, tie_embeddings=tie_embeddings)
    lora = random_lora(config)
    return config, params, lora, forward(params, lora, config)


def forward(params, lora, config, tokens=TOKENS):
    return np.asarray(transformer.forward(params, lora, tokens, LENGTHS, config=config))


def assert_valid_close(actual, expected, atol):
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(actual[row, :length], expected[row, :length], atol=atol)


@pytest.mark.parametrize(
    ("model_type", "quantized", "tie_embeddings"),
    [
        ("qwen2", False, False),
        ("qwen3", True, False),
        *(pytest.param(k, False, k == "qwen3", marks=pytest.mark.slow) for k in ("qwen3", "llama")),
    ],
)
def test_decoding_gives_the_logits_of_forward_at_every_position(
    model_type, quantized, tie_embeddings
):
    config, params, lora, expected = logits_of(model_type, quantized, tie_embeddings)
    prompts = np.array([3, 1, 2], np.int32)
    logits, cache, _ = transformer.prefill(
        params, lora, TOKENS[:, :4], prompts, config=config, cache_positions=16
    )
    lora_layers = lora_lib.fuse(lora, config, jnp.float32)
    step = jax.jit(functools.partial(transformer.decode_step, config=config))
    seen = 0
    for number in range(LENGTHS.max()):
        positions = prompts + number
        for row in np.flatnonzero(positions <= LENGTHS):
            want = expected[row, positions[row] - 1]
            np.testing.assert_allclose(logits[row], want, atol=1e-4)
            seen += 1
        tokens = TOKENS[np.arange(3), np.minimum(positions, TOKENS.shape[1] - 1)]
        logits, cache, _ = step(params, lora_layers, jnp.asarray(tokens), cache)
        np.testing.assert_array_equal(cache.lengths, positions + 1)
    assert seen == (LENGTHS - prompts + 1).sum()


@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.slow), 8])
def test_several_positions_give_the_logits_of_forward(count):
    """The last row waits, and one reaches the end of the cache."""
    config, params, lora, expected = logits_of("qwen3", True)
    filled, end = np.array([3, 5, 0], np.int32), 10
    _, cache, _ = transformer.prefill(
        params, lora, TOKENS[:, :end], np.array([3, 5, 2]), config=config, cache_positions=end
    )
    cache = cache.replace(lengths=jnp.asarray(filled))
    places = filled[:, None] + np.arange(count)
    tokens = TOKENS[np.arange(3)[:, None], np.minimum(places, TOKENS.shape[1] - 1)]
    tokens[2, 1:] = (tokens[2, 1:] + 1) % VOCAB  # others than those that the cache has
    run = jax.jit(functools.partial(transformer.decode_positions, config=config))
    logits, new, _ = run(params, lora_lib.fuse(lora, config, jnp.float32), tokens, cache)
    np.testing.assert_array_equal(new.lengths, filled)
    for row, column in zip(*np.nonzero(places < np.minimum(LENGTHS, end)[:, None]), strict=True):
        if filled[row] or column == 0:
            want = expected[row, places[row, column]]
            np.testing.assert_allclose(logits[row, column], want, atol=1e-4)
    # The row that waits keeps what it has, but for its first position.
    for before, after in zip(*map(jax.tree.leaves, (cache.layers, new.layers)), strict=True):
        np.testing.assert_array_equal(after[2, :, 1:], before[2, :, 1:])
        np.testing.assert_array_equal(after[0, :, 3 + count :], before[0, :, 3 + count :])
        assert np.isfinite(after).all()


@pytest.mark.parametrize("model_type", KINDS)
def test_padding_does_not_matter(model_type):
    config, params, lora, expected = logits_of(model_type)
    other = np.where(np.arange(12) < LENGTHS[:, None], TOKENS, (TOKENS + 7) % VOCAB)
    assert (other != TOKENS).any()
    assert_valid_close(forward(params, lora, config, other), expected, atol=0)
    wider = np.pad(TOKENS, ((0, 0), (0, 4)), constant_values=5)
    assert_valid_close(forward(params, lora, config, wider), expected, atol=1e-5)


def test_a_token_changes_what_follows_it_only():
    config, params, lora, expected = logits_of("qwen3")
    changed = TOKENS.copy()
    changed[:, 2] = (changed[:, 2] + 1) % VOCAB
    logits = forward(params, lora, config, changed)
    np.testing.assert_array_equal(logits[:, :2], expected[:, :2])
    assert (np.abs(logits - expected)[:, 2:4].max(axis=-1) > 1e-3).all()


def test_dequantized_layers_give_the_same_logits():
    config, params, lora, expected = logits_of("qwen3", quantized=True)
    dense = transformer.dequantize_params(params)
    assert isinstance(params["layers"][0]["o_proj"], QuantTensor)
    for layer in dense["layers"]:
        for name in kinds.fused_of(config, 0):
            assert isinstance(layer[name], jax.Array)
            assert layer[name].dtype == jnp.float32
    assert_valid_close(forward(dense, lora, config), expected, atol=1e-5)


def test_many_rows_get_dense_copies_of_weights_that_a_kernel_reads_for_few(monkeypatch):
    _, params = tiny_policy(quantized=True)
    tiles = [
        {
            name: tile_order(leaf) if isinstance(leaf, QuantTensor) else leaf
            for name, leaf in layer.items()
        }
        for layer in params["layers"]
    ]
    monkeypatch.setattr(dispatch, "device_kernel", lambda: "mma")
    policy, most = params | {"layers": tiles}, dispatch.mma_schedule.MAX_ROWS
    assert not transformer.packed_weights(policy, rows=most)
    assert transformer.dequantize_params(policy, rows=most) == policy
    dense = transformer.dequantize_params(policy, rows=most + 1)
    chex.assert_trees_all_equal(dense, transformer.dequantize_params(params))


def test_dense_weights_in_float32_have_the_values_of_bfloat16(monkeypatch):
    config, params, *_ = logits_of("qwen3", quantized=True)
    params = params | {"embed_tokens": params["embed_tokens"].astype(jnp.bfloat16)}
    found = []
    for has_amx in (True, False):
        monkeypatch.setattr(device, "_has_amx", lambda has_amx=has_amx: has_amx)
        found.append(transformer.dequantize_params(params))
    narrow, wide = found
    for name in kinds.fused_of(config, 0):
        values, stored = narrow["layers"][0][name], wide["layers"][0][name]
        assert (values.dtype, stored.dtype) == (jnp.bfloat16, jnp.float32)
        np.testing.assert_array_equal(values.astype(jnp.float32), stored)
    head = params.get("lm_head", params["embed_tokens"])
    np.testing.assert_array_equal(head.astype(jnp.float32), wide["lm_head"])
    assert wide["lm_head"].dtype == jnp.float32
    assert "lm_head" not in narrow or narrow["lm_head"] is params["lm_head"]


def test_quantization_changes_the_policy():
    *_, expected = logits_of("qwen3")
    *_, quantized = logits_of("qwen3", quantized=True)
    assert 1e-2 < np.abs(quantized - expected).max() < 5


@pytest.mark.parametrize("form", aqn.FORMS)
def test_noise_changes_the_logits_and_none_does_not(form):
    config, params, lora, expected = logits_of("qwen3", quantized=True)

    def noisy(sigma):
        perturbed = aqn.perturb_norms(jax.random.key(3), params, sigma, form=form)
        return forward(perturbed, lora, config)

    np.testing.assert_array_equal(noisy(0.0).view(np.uint32), expected.view(np.uint32))
    small, large = (np.abs(noisy(sigma) - expected).max() for sigma in (1e-4, 1e-2))
    assert 1e-5 < small < large / 20
    assert large > 1e-2


def test_bfloat16_policies_have_float32_logits_and_norms():
    config, params, _, expected = logits_of("llama")
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim == 2 else x, params)
    hidden = transformer.hidden_states(narrow, None, TOKENS, LENGTHS, config=config)
    assert hidden.dtype == jnp.bfloat16
    logits = transformer.logits(narrow, hidden)
    assert logits.dtype == jnp.float32
    expected = forward(params, None, config)
    assert_valid_close(logits, expected, atol=0.1 * np.abs(expected).max())
