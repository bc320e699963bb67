"""Adapters: initialization, scale, and stacking to fit the stored weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import KINDS, random_lora, random_tokens, tiny_policy

from qerl_jax.errors import UserError
from qerl_jax.policy import lora as lora_lib
from qerl_jax.policy import transformer
from qerl_jax.policy.layers.kinds import FUSED, PROJECTIONS, projection_shapes
from qerl_jax.policy.lora import LoraConfig

TARGETS = [PROJECTIONS, ("q_proj", "v_proj", "down_proj"), ("k_proj",), ("up_proj", "o_proj")]


@pytest.mark.parametrize("model_type", KINDS)
@pytest.mark.parametrize("targets", TARGETS, ids=",".join)
def test_fused_adapters_equal_those_of_the_projections(targets, model_type):
    config, _ = tiny_policy(model_type)
    lora = random_lora(config, targets=targets, scale=0.7)
    shapes = projection_shapes(config)
    fused = lora_lib.fuse(lora, config, jnp.float32)
    assert len(fused) == config.num_layers
    for adapters, layer in zip(fused, lora.layers, strict=True):
        assert set(adapters) == {f for f in FUSED if set(FUSED[f]) & set(targets)}
        for name, (a, b) in adapters.items():
            x = np.random.default_rng(3).standard_normal((5, a.shape[1]))
            expected = [
                0.7 * x @ np.float64(layer[member]["a"]).T @ np.float64(layer[member]["b"]).T
                if member in layer
                else np.zeros((5, shapes[member][0]))
                for member in FUSED[name]
            ]
            actual = x @ np.float64(a).T @ np.float64(b).T
            np.testing.assert_allclose(actual, np.concatenate(expected, axis=1), atol=1e-5)


def test_the_scale_is_multiplied_in_float32():
    config, _ = tiny_policy()
    lora = random_lora(config, targets=("o_proj",), scale=0.3)
    a, b = lora_lib.fuse(lora, config, jnp.bfloat16)[0]["o_proj"]
    factors = lora.layers[0]["o_proj"]
    np.testing.assert_array_equal(a, (0.3 * factors["a"]).astype(jnp.bfloat16))
    np.testing.assert_array_equal(b, factors["b"].astype(jnp.bfloat16))
    assert a.dtype == b.dtype == jnp.bfloat16


def test_no_adapter():
    config, _ = tiny_policy()
    assert lora_lib.fuse(None, config, jnp.float32) == [{}, {}]


@pytest.mark.parametrize(("rslora", "scale"), [(False, 2.0), (True, 8.0)])
def test_scale(rslora, scale):
    lora_config = LoraConfig(rank=16, alpha=32, rslora=rslora)
    assert lora_config.scale == scale
    config, _ = tiny_policy()
    assert lora_lib.init(jax.random.key(0), config, lora_config).scale == scale


@pytest.mark.parametrize("model_type", KINDS)
def test_initialization(model_type):
    config, _ = tiny_policy(model_type)
    lora = lora_lib.init(jax.random.key(0), config, LoraConfig(rank=8, alpha=16))
    seen = set()
    for layer in lora.layers:
        assert tuple(layer) == PROJECTIONS
        for name, (outputs, inputs) in projection_shapes(config).items():
            a, b = layer[name]["a"], layer[name]["b"]
            assert a.dtype == b.dtype == jnp.float32
            assert a.shape == (8, inputs)
            assert b.shape == (outputs, 8)
            assert not b.any()
            bound = inputs**-0.5
            assert 0.95 * bound < jnp.abs(a).max() <= bound
            assert abs(float(a.mean())) < 0.2 * bound
            assert float(a.std()) == pytest.approx(bound / 3**0.5, rel=0.1)
            seen.add(float(a[0, 0]) / bound)
    assert len(seen) == 14


def test_initialization_of_a_projection_does_not_depend_on_the_others():
    config, _ = tiny_policy()
    key = jax.random.key(0)
    every = lora_lib.init(key, config, LoraConfig(rank=4, alpha=8))
    some = lora_lib.init(key, config, LoraConfig(rank=4, alpha=8, targets=("up_proj", "k_proj")))
    for layer, full in zip(some.layers, every.layers, strict=True):
        assert set(layer) == {"k_proj", "up_proj"}
        for name in layer:
            np.testing.assert_array_equal(layer[name]["a"], full[name]["a"])
    other = lora_lib.init(jax.random.key(1), config, LoraConfig(rank=4, alpha=8))
    assert not np.array_equal(other.layers[0]["q_proj"]["a"], every.layers[0]["q_proj"]["a"])


@pytest.mark.parametrize("quantized", [False, True])
def test_a_new_adapter_changes_nothing_and_a_trained_one_does(quantized):
    config, params = tiny_policy(quantized=quantized)
    tokens, lengths = random_tokens(2, 8), jnp.array([8, 5])

    def logits(lora):
        return transformer.forward(params, lora, tokens, lengths, config=config)

    new = lora_lib.init(jax.random.key(0), config, LoraConfig(rank=4, alpha=8))
    np.testing.assert_array_equal(logits(new), logits(None))
    assert np.abs(logits(random_lora(config)) - logits(None)).max() > 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank=0"),
        ({"targets": ("q_proj", "query")}, "query.*q_proj"),
        ({"targets": ()}, r"targets=\(\)"),
        # What no adapter folder could hold:
        ({"targets": ("q_proj", "q_proj")}, r"lora\.targets="),
        ({"targets": ("o_proj", "k_proj", "o_proj")}, r"lora\.targets="),
        ({"alpha": float("nan")}, r"lora\.alpha="),
        ({"alpha": 1e7}, r"lora\.alpha="),
        ({"expert_rank": -1}, r"lora\.expert_rank=-1"),
    ],
)
def test_bad_configs(options, message):
    with pytest.raises(UserError, match=message):
        LoraConfig(**{"rank": 8, "alpha": 16.0} | options)
