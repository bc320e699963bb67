"""Rotary positions and attention against plain NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_checkpoints import model_config

from pallas_kernels.attention import attend_packed
from qerl_jax.policy.config import RopeScaling, from_hf_config, to_hf_config
from qerl_jax.policy.layers import attention as attention_lib
from qerl_jax.policy.layers.attention import (
    attend,
    attend_to_cache,
    rotary_angles,
    rotary_frequencies,
    rotate,
)

H = 16


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def attention(query, keys, values):
    """One query [N, H] over its visible keys and values [S, K, H], in float64."""
    query, keys, values = (np.asarray(x, np.float64) for x in (query, keys, values))
    group = query.shape[0] // keys.shape[1]
    out = np.zeros_like(query)
    for head in range(query.shape[0]):
        scores = keys[:, head // group] @ query[head] / np.sqrt(query.shape[1])
        weights = np.exp(scores - scores.max())
        out[head] = weights / weights.sum() @ values[:, head // group]
    return out


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 2), (3, 1)])
def test_causal_attention_over_ragged_rows(heads, kv_heads):
    lengths = [7, 1, 4]
    q = draw(3, 7, heads, H)
    k, v = draw(3, 7, kv_heads, H, seed=1), draw(3, 7, kv_heads, H, seed=2)
    out = attend(*(jnp.asarray(x) for x in (q, k, v)), jnp.array(lengths))
    assert out.shape == q.shape
    assert np.isfinite(out).all()
    for row, length in enumerate(lengths):
        for t in range(length):
            expected = attention(q[row, t], k[row, : t + 1], v[row, : t + 1])
            np.testing.assert_allclose(out[row, t], expected, atol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
def test_decoding_attention_over_the_filled_positions(heads, kv_heads):
    lengths = [9, 1, 6]
    q = draw(3, 1, heads, H)
    k, v = draw(3, 9, kv_heads, H, seed=1), draw(3, 9, kv_heads, H, seed=2)
    k_cache, v_cache = (jnp.asarray(x).swapaxes(1, 2) for x in (k, v))
    out = attend_to_cache(jnp.asarray(q), k_cache, v_cache, jnp.array(lengths))
    for row, length in enumerate(lengths):
        expected = attention(q[row, 0], k[row, :length], v[row, :length])
        np.testing.assert_allclose(out[row, 0], expected, atol=1e-5)


def test_frequencies():
    frequencies = rotary_frequencies(model_config("qwen3", rope_theta=1e6))
    assert frequencies.dtype == np.float32
    np.testing.assert_allclose(frequencies, 1e6 ** (-np.arange(8) / 8), rtol=1e-5)


def test_llama3_scaling():
    # Llama 3.2's, computed by transformers 5.23: kept, blended and divided frequencies.
    config = model_config(
        head_dim=64, rope_theta=500000.0, rope_scaling=RopeScaling(32.0, 1.0, 4.0, 8192)
    )
    expected = {
        0: 1.0,
        1: 0.663601279258728,
        14: 0.0032114461064338684,
        15: 0.0012905480107292533,
        16: 0.000429556705057621,
        17: 9.708286233944818e-05,
        18: 1.9461638657958247e-05,
        31: 9.418306490260875e-08,
    }
    frequencies = rotary_frequencies(config)
    np.testing.assert_allclose(frequencies[list(expected)], list(expected.values()), rtol=1e-5)


@pytest.mark.parametrize(
    ("head_dim", "theta", "scaling", "factor", "expected"),
    [  # gpt-oss-20b's, and one with rounded limits, computed by transformers 5.24
        (
            *(64, 150000.0, {"factor": 32.0, "truncate": False}, 1.3465735902799727),
            (1.0, 0.15532298, 0.05081327, 0.019335, 0.00679496, 0.0010526022),
        ),
        (
            *(32, 1e4, {"factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0}, 1.0259286501478284),
            (1.0, 0.05623413, 0.0085, 0.0017392527, 0.00025000001, 4.4456985e-05),
        ),
    ],
)
def test_yarn_scaling(head_dim, theta, scaling, factor, expected):
    """Frequencies and the factor of cosines and sines, which no other test of rotations has."""
    original = 4096 if factor > 1.3 else 8192
    by_dims = {} if factor > 1.3 else {"mscale": 0.7, "mscale_all_dim": 0.5}
    hf = to_hf_config(model_config("gpt_oss", head_dim=head_dim, rope_theta=theta)) | {
        "rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": original}
        | scaling
        | by_dims
    }
    config = from_hf_config(hf)
    frequencies = rotary_frequencies(config)[[0, 5, 8, 10, 12, 15]]
    np.testing.assert_allclose(frequencies, expected, rtol=1e-5)
    cosines, sines = rotary_angles(jnp.array([[0, 5000]]), config)
    np.testing.assert_allclose(np.hypot(cosines, sines), factor, rtol=1e-6)


def rotated(x, positions, config):
    return np.asarray(rotate(jnp.asarray(x), rotary_angles(jnp.asarray(positions), config)))


def test_rotation_pairs_the_halves():
    config = model_config("qwen3")
    x, positions = draw(2, 5, 3, H), np.array([[0, 1, 2, 3, 4], [7, 100, 8, 1, 0]])
    out = rotated(x, positions, config)
    turns = positions[..., None, None] * 10000.0 ** (-np.arange(0, H, 2) / H)
    expected = (x[..., : H // 2] + 1j * x[..., H // 2 :]) * np.exp(1j * turns)
    np.testing.assert_allclose(out[..., : H // 2], expected.real, atol=1e-5)
    np.testing.assert_allclose(out[..., H // 2 :], expected.imag, atol=1e-5)
    np.testing.assert_array_equal(out[0, 0], x[0, 0])


def test_products_depend_on_the_distance_alone():
    config = model_config("qwen3")
    q, k = draw(1, 1, 1, H), draw(1, 1, 1, H, seed=1)

    def product(i, j):
        return float(np.sum(rotated(q, [[i]], config) * rotated(k, [[j]], config)))

    assert product(9, 4) == pytest.approx(product(25, 20), abs=1e-5)
    assert product(9, 4) != pytest.approx(product(9, 5), abs=1e-2)


def test_rotation_keeps_the_type_and_rounds_once():
    config = model_config("qwen3")
    x = jnp.asarray(draw(1, 3, 2, H), jnp.bfloat16)
    angles = rotary_angles(jnp.array([[40, 41, 42]]), config)
    out = rotate(x, angles)
    assert out.dtype == jnp.bfloat16
    wide = rotate(x.astype(jnp.float32), angles)
    np.testing.assert_array_equal(out, wide.astype(jnp.bfloat16))


@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("window", [0, 24])
def test_rows_with_sinks_are_groups_of_a_packed_buffer(window, device, monkeypatch):
    """With the kernel, and where XLA computes the buffer, the results are those of blocks."""
    if device != jax.default_backend():
        pytest.skip(f"needs a {device}")
    lengths = jnp.array([1, 64, 40, 7], jnp.int32)
    dtype = jnp.bfloat16 if device == "gpu" else jnp.float32
    queries = jax.random.normal(jax.random.key(0), (4, 64, 8, 64), dtype)
    keys, values = jax.random.normal(jax.random.key(1), (2, 4, 64, 2, 64), dtype)
    sinks = jax.random.normal(jax.random.key(2), (8,), dtype)
    results, calls = [], []

    def packed(*args, **options):
        calls.append(options)
        return attend_packed(*args, **options)

    monkeypatch.setattr(attention_lib, "attend_packed", packed)
    for packs in (True, False):
        monkeypatch.setattr(attention_lib, "supports_attention", lambda _, packs=packs: packs)
        run = jax.jit(lambda *args: attend(*args, lengths, sinks=sinks, window=window))
        results.append(np.asarray(run(queries, keys, values), np.float64))
    assert len(calls) == 1
    ours, expected = (
        np.concatenate([x[:n] for x, n in zip(y, lengths, strict=True)]) for y in results
    )
    tolerance = 1e-2 if device == "gpu" else 1e-6
    assert np.linalg.norm(ours - expected) <= tolerance * np.linalg.norm(expected)


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")
def test_cudnn_attention_is_the_attention_of_xla(monkeypatch):
    lengths = jnp.array([1, 7, 200, 256], jnp.int32)
    queries = jax.random.normal(jax.random.key(0), (4, 256, 8, 64), jnp.bfloat16)
    keys, values = jax.random.normal(jax.random.key(1), (2, 4, 256, 2, 64), jnp.bfloat16)
    valid = (jnp.arange(256) < lengths[:, None])[..., None, None]

    def run():
        attended = jax.jit(lambda *args: attend(*args, lengths))(queries, keys, values)
        return [jnp.where(valid, attended, 0.0)]

    assert attention_lib._use_cudnn(queries)
    ours = run()
    monkeypatch.setattr(attention_lib, "_use_cudnn", lambda queries: False)
    for a, b in zip(ours, run(), strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        assert np.linalg.norm(a - b) <= 2e-2 * np.linalg.norm(b)
