"""W4A8, simulated: its rounding, a decode step, and runs whose rollouts alone round."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny_model
from warpgroup_kernel import use_decode_kernels

from pallas_kernels import decode
from pallas_kernels.fp4_matmul import fp8
from qerl_jax.policy import lora as lora_lib
from qerl_jax.policy import transformer
from qerl_jax.policy.layers.kinds import PROJECTIONS
from qerl_jax.policy.layers.linear import linear
from qerl_jax.policy.quant import EVERY, dequantize, quantize, tile_order, to_fp8
from qerl_jax.run.metrics import read_steps
from qerl_jax.training.loop import train

E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
E2M1 = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def e4m3(x):
    return x.astype(E4M3).astype(np.float32)


def rounded_weight(weight):
    """The values of an NVFP4 weight after rounding to e4m3, by NumPy alone."""
    packed = np.asarray(weight.packed)
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)
    values = np.where(codes > 7, -1, 1) * E2M1[codes & 7]
    scales = np.repeat(np.asarray(weight.scales).astype(np.float32), 16, axis=1)
    return e4m3(values * scales / 8) * (8 / np.asarray(weight.global_scale, np.float64))[:, None]


def rounded_tokens(x):
    scale = np.abs(x).max(-1, keepdims=True).astype(np.float32) / np.float32(448)
    return e4m3(x / scale) * scale.astype(np.float64)


def test_round_e4m3_is_the_conversion():
    rng = np.random.default_rng(0)
    x = rng.standard_normal(100_000) * 2.0 ** rng.integers(-14, 9, 100_000)
    every = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)
    every = np.sort(every[np.isfinite(every)])
    x = np.concatenate([x, every, (every[1:] + every[:-1]) / 2]).clip(-448, 448)
    x = x.astype(np.float32)
    np.testing.assert_array_equal(jax.jit(fp8.round_e4m3)(x), e4m3(x))


@pytest.mark.parametrize("order", ["checkpoint", "tiles"])
def test_a_product_with_an_adapter(order):
    rng = np.random.default_rng(0)
    weight = quantize([rng.standard_normal((n, 256)) * s for n, s in ((64, 0.1), (64, 3))],
                      format="nvfp4")  # fmt: skip
    stored = jax.tree.map(jnp.asarray, weight)
    stored = tile_order(stored) if order == "tiles" else stored
    dense = to_fp8(stored, jnp.bfloat16)
    expected = rounded_weight(weight)
    np.testing.assert_allclose(
        np.float64(dense.codes) * np.float64(dense.factor)[:, None], expected, rtol=1e-6
    )
    plain = np.asarray(dequantize(stored, jnp.float32))
    error = np.sqrt(((expected - plain) ** 2).sum() / (plain**2).sum())
    assert 0.01 < error < 0.04  # about 2.6 %
    x = (rng.standard_normal((3, 5, 256)) * rng.uniform(0.01, 30, (3, 5, 1))).astype(BF16)
    a, b = (rng.standard_normal(shape).astype(BF16) / 16 for shape in ((32, 256), (128, 32)))
    bias = rng.standard_normal(128).astype(np.float32)
    wide = x.astype(np.float64)
    product = rounded_tokens(np.float32(x)) @ expected.T
    added = (wide @ a.astype(np.float64).T) @ b.astype(np.float64).T + bias
    y = jax.jit(linear)(x, dense, adapter=(a, b), bias=bias)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float64(y), product + added, rtol=6e-3, atol=6e-3 * wide.max())
    exact = np.asarray(fp8.product(x, dense))
    np.testing.assert_allclose(exact, product, rtol=1e-4, atol=1e-5 * np.abs(product).max())
    unrounded = wide @ expected.T
    assert np.abs(product - unrounded).max() > 1e-3 * np.abs(unrounded).max()
    # The gradient is that of the rounded weight, as if x were not rounded.
    dy = rng.standard_normal((3, 5, 128)).astype(BF16)
    (dx,) = jax.vjp(lambda x: fp8.product(x, dense).astype(x.dtype), jnp.asarray(x))[1](dy)
    assert dx.dtype == jnp.bfloat16
    dx_expected = dy.astype(np.float64) @ expected
    np.testing.assert_allclose(np.float64(dx), dx_expected, atol=1e-2 * np.abs(dx_expected).max())


def fp8_policy(compute):
    config, params = tiny_model.tiny_policy("qwen2", embed_dim=256, mlp_dim=320, head_dim=32)
    params["layers"] = [
        {
            name: jax.tree.map(jnp.asarray, quantize([np.asarray(x)], format="nvfp4"))
            if x.ndim == 2
            else x
            for name, x in weights.items()
        }
        for weights in params["layers"]
    ]
    params["embed_tokens"] = params["embed_tokens"].astype(compute)
    packed = transformer.packed_weights(params, rows=EVERY)
    assert len(packed) == 4 * config.num_layers
    dense = [to_fp8(weight, compute) for weight in packed]
    return config, params, transformer.dequantize_params(params, lambda _: dense, rows=EVERY)


def test_log_probs_of_a_layer_are_numpys():
    """Of the layers of a policy in float32, replaced one product after the other by NumPy's."""
    config, packed, params = fp8_policy(jnp.float32)
    tokens, lengths = tiny_model.random_tokens(2, 9), jnp.asarray([9, 9])
    arguments = {"config": config}
    actual = jax.nn.log_softmax(transformer.forward(params, None, tokens, lengths, **arguments))
    plain = jax.nn.log_softmax(transformer.forward(packed, None, tokens, lengths, **arguments))
    layers = zip(packed["layers"], params["layers"], strict=True)
    reference = {
        dense.codes.tobytes(): rounded_weight(weights[name])
        for weights, own in layers
        for name, dense in own.items()
        if isinstance(dense, fp8.Fp8Weight)
    }

    def by_numpy(x, weight):
        def product(x, codes):
            return np.float32(rounded_tokens(x) @ reference[np.asarray(codes).tobytes()].T)

        shape = jax.ShapeDtypeStruct((*x.shape[:-1], weight.shape[0]), jnp.float32)
        return jax.pure_callback(product, shape, x, weight.codes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8, "product", by_numpy)
        jax.clear_caches()
        expected = jax.nn.log_softmax(
            transformer.forward(params, None, tokens, lengths, **arguments)
        )
    jax.clear_caches()
    # A number next to the middle of two e4m3 numbers may be rounded to either.
    rounding = np.abs(plain - actual).mean()
    assert rounding > 3e-3
    assert np.abs(actual - expected).mean() < 0.1 * rounding


@pytest.mark.parametrize("count", [1, 3])
def test_the_kernels_of_a_decode_step(count, monkeypatch):
    config, packed, params = fp8_policy(jnp.bfloat16)
    lora = tiny_model.random_lora(config, targets=PROJECTIONS)
    lora_layers = lora_lib.fuse(lora, config, jnp.bfloat16)
    prompts, lengths = tiny_model.random_tokens(3, 9), jnp.asarray([9, 1, 5])
    tokens = prompts[:, 0] if count == 1 else prompts[:, :count]

    def step(params):
        jax.clear_caches()
        run = transformer.decode_step if count == 1 else transformer.decode_positions
        _, cache, _ = transformer.prefill(
            params, lora, prompts, lengths, config=config, cache_positions=16
        )
        run = jax.jit(functools.partial(run, config=config))
        return np.asarray(jax.nn.log_softmax(run(params, lora_layers, tokens, cache)[0]))

    monkeypatch.setattr(decode, "supports_device", lambda _: False)
    plain, rounded = step(packed), step(params)
    products = []

    def unrounded(x):
        products.append(x.shape)
        return x, jnp.ones((*x.shape[:-1], 1), jnp.float32)

    # Rounding tokens enlarges the difference of two bfloat16 numbers about five times.
    monkeypatch.setattr(fp8, "round_tokens", unrounded)
    expected = step(params)
    use_decode_kernels(monkeypatch, True)
    plain_by_kernels = step(packed)
    products.clear()
    actual = step(params)
    jax.clear_caches()
    # q, k and v; the output; gate and up; and down.
    assert products[-4:] == [(3 * count, width) for width in (256, 128, 256, 320)]
    assert np.abs(expected - plain).mean() > 0.05
    assert np.abs(rounded - expected).mean() > 0.05
    assert np.abs(actual - expected).mean() < 1.5 * np.abs(plain_by_kernels - plain).mean()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_runs(tiny, tmp_path, dtype):
    base = {"steps": 2, "aqn.schedule": "off", "eval.every": 2, "model.dtype": dtype}
    arms = {
        "plain": {},
        "rollout": {"rollout.dequantize": "fp8", "aqn.correction": "tis"},
        "both": {"rollout.dequantize": "fp8_both"},
    }
    steps = {
        name: read_steps(train(tiny.config(base | arm), workdir=tmp_path / name) / "metrics.jsonl")
        for name, arm in arms.items()
    }
    for name, rows in steps.items():
        print(name, [{k: row[k] for k in ("logprob_diff_mean", "rollout_kl")} for row in rows])
    for plain, rollout, both in zip(*steps.values(), strict=True):
        assert rollout["logprob_diff_mean"] > 5 * plain["logprob_diff_mean"]
        assert rollout["logprob_diff_mean"] > 5e-3
        assert rollout["tis_weight"] != 1
        assert 0 <= rollout["tis_capped"] <= 1
        assert rollout["rollout_kl"] > 0
        if dtype == "float32":
            assert both["logprob_diff_mean"] < 0.2 * rollout["logprob_diff_mean"]
        assert both["grad_norm"] > 0
