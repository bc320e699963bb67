"""Properties of the policy losses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.errors import UserError
from qerl_jax.rl import losses

LENGTHS = [7, 4, 0, 1, 6, 3]


@dataclasses.dataclass
class Case:
    """Arguments of `policy_loss`, with something of everything in them."""

    logprobs: np.ndarray
    inputs: dict[str, np.ndarray]

    def rows(self, start, stop):
        return Case(self.logprobs[start:stop], {k: v[start:stop] for k, v in self.inputs.items()})

    def loss(self, config, **replaced):
        inputs = self.inputs | replaced
        value_and_grad = jax.value_and_grad(
            lambda logprobs: losses.policy_loss(logprobs, config=config, **inputs), has_aux=True
        )
        (loss, metrics), gradient = value_and_grad(jnp.asarray(self.logprobs))
        return float(loss), np.asarray(gradient), metrics


def make_case(aggregation="token"):
    rng = np.random.default_rng(0)
    shape = (len(LENGTHS), 7)
    mask = (np.arange(7) < np.array(LENGTHS)[:, None]).astype(np.float32)
    new = -3 * rng.random(shape, np.float32)
    old, ref, rollout = (new + 0.4 * rng.standard_normal(shape, np.float32) for _ in range(3))
    return Case(
        new,
        {
            "old_logprobs": old,
            "ref_logprobs": ref,
            "rollout_logprobs": rollout,
            "advantages": np.array([1.0, -1.0, 0.5, 2.0, 0.0, -0.5], np.float32),
            "mask": mask,
            "weights": losses.token_weights(mask, aggregation),
        },
    )


def token_case(difference, advantage):
    """One token with log(new / old) = difference and weight 1."""
    one = np.ones((1, 1), np.float32)
    inputs = {"mask": one, "weights": one, "advantages": np.array([advantage], np.float32)}
    return Case(-one, inputs | {"old_logprobs": -one - np.float32(difference)})


def summarize(metrics):
    summary = losses.summarize_metrics(jax.tree.map(lambda x: x[None], metrics))
    return {name: float(value) for name, value in summary.items()}


ALL_OPTIONS = [
    {},
    {"kl_coef": 0.04},
    {"kl_coef": 0.04, "kl_grad": "unbiased", "tis_cap": 1.1},
]


@pytest.mark.parametrize("name", losses.LOSSES)
@pytest.mark.parametrize("options", ALL_OPTIONS)
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_micro_batches_add_up(name, options, rows):
    config = losses.loss_config(name, **options)
    case = make_case(config.aggregation)
    loss, gradient, metrics = case.loss(config)
    parts = [case.rows(i, i + rows).loss(config) for i in range(0, len(LENGTHS), rows)]
    assert sum(part[0] for part in parts) == pytest.approx(loss, rel=1e-5)
    np.testing.assert_allclose(np.concatenate([part[1] for part in parts]), gradient, rtol=1e-6)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *(part[2] for part in parts))
    whole = summarize(metrics)
    assert whole["ratio_max"] > 1.3
    for key, value in losses.summarize_metrics(stacked).items():
        assert float(value) == pytest.approx(whole[key], rel=1e-5), key


def test_token_weights():
    mask = np.array([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]], np.float32)
    by_token, by_row = (losses.token_weights(mask, name) for name in ("token", "sequence"))
    np.testing.assert_allclose(by_token, mask / 4)
    np.testing.assert_allclose(by_row, mask / [[9], [3], [1]])
    assert by_token.dtype == by_row.dtype == np.float32


@pytest.mark.parametrize("name", losses.LOSSES)
@pytest.mark.parametrize("options", ALL_OPTIONS)
def test_masked_positions_may_hold_anything(name, options):
    config = losses.loss_config(name, **options)
    case = make_case(config.aggregation)
    loss, gradient, metrics = case.loss(config)
    outside = case.inputs["mask"] == 0
    for value in (np.nan, np.inf, -np.inf, 1e4, -1e4):
        spoiled = make_case(config.aggregation)
        spoiled.logprobs[outside] = value
        for key in ("old_logprobs", "ref_logprobs", "rollout_logprobs"):
            spoiled.inputs[key][outside] = -value
        spoiled_loss, spoiled_gradient, spoiled_metrics = spoiled.loss(config)
        assert spoiled_loss == loss
        np.testing.assert_array_equal(spoiled_gradient, gradient)
        jax.tree.map(np.testing.assert_array_equal, spoiled_metrics, metrics)
    assert not gradient[outside].any()


@pytest.mark.parametrize("name", losses.LOSSES)
def test_nothing_in_the_mask(name):
    config = losses.loss_config(name, kl_coef=0.1, tis_cap=2.0)
    case = make_case()
    nothing = np.zeros_like(case.inputs["mask"])
    weights = losses.token_weights(nothing, config.aggregation)
    loss, gradient, metrics = case.loss(config, mask=nothing, weights=weights)
    assert loss == 0.0
    assert not gradient.any()
    assert all(value == 0.0 for value in summarize(metrics).values())


@pytest.mark.parametrize("name", losses.LOSSES)
def test_gradient_on_policy_is_the_policy_gradient(name):
    config = losses.loss_config(name)
    case = make_case(config.aggregation)
    _, gradient, metrics = case.loss(config, old_logprobs=None)
    advantages, weights = case.inputs["advantages"], case.inputs["weights"]
    np.testing.assert_allclose(gradient, -advantages[:, None] * weights, rtol=1e-6)
    # The fifth row has advantage 0.
    assert not gradient[4].any()
    summary = summarize(metrics)
    assert summary["ratio_mean"] == summary["ratio_max"] == 1.0
    assert summary["clip_fraction"] == 0.0


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "passes", "low", "high"),
    [
        (1.25, 1.0, -1.25, True, 0, 0),  # clip-higher leaves it room
        (1.30, 1.0, -1.28, False, 0, 1),
        (0.70, 1.0, -0.70, True, 0, 0),
        (0.70, -1.0, 0.80, False, 1, 0),
        (1.30, -1.0, 1.30, True, 0, 0),
        (0.70, 0.0, 0.0, False, 0, 0),
    ],
)
def test_clipping(ratio, advantage, loss, passes, low, high):
    config = losses.LossConfig("token", clip_low=0.2, clip_high=0.28)
    value, gradient, metrics = token_case(np.log(ratio), advantage).loss(config)
    assert value == pytest.approx(loss, rel=1e-5, abs=1e-9)
    expected = -ratio * advantage if passes else 0.0
    assert gradient.item() == pytest.approx(expected, rel=1e-5, abs=1e-9)
    summary = summarize(metrics)
    assert (summary["clip_fraction_low"], summary["clip_fraction_high"]) == (low, high)
    assert summary["clip_fraction"] == low + high


@pytest.mark.parametrize("kl_grad", losses.KL_GRADS)
def test_kl_gradients(kl_grad):
    config = losses.LossConfig("token", kl_coef=1.0, kl_grad=kl_grad)
    case = token_case(0.3, advantage=0.0)
    ref = np.full((1, 1), -1.5, np.float32)
    loss, gradient, metrics = case.loss(config, ref_logprobs=ref)
    k3 = np.exp(-0.5) + 0.5 - 1
    slope = 1 - np.exp(-0.5)
    if kl_grad == "unbiased":
        assert loss == pytest.approx(np.exp(0.3) * k3, rel=1e-5)
        # The ratio's own derivative makes it the KL's gradient: r (new - ref).
        slope = np.exp(0.3) * 0.5
    else:
        assert loss == pytest.approx(k3, rel=1e-5)
        assert slope == pytest.approx(0.3935, abs=1e-4)
    assert gradient.item() == pytest.approx(slope, rel=1e-5)
    assert summarize(metrics)["kl"] == pytest.approx(k3, rel=1e-5)


def test_k3_of_close_policies():
    difference = np.float32(1e-3)
    assert float(losses.k3(jnp.float32(0.0), difference)) == pytest.approx(5e-7, rel=1e-2)


@pytest.mark.parametrize(
    ("rollout", "weight"),
    [(-1.0, 1.0), (-1.5, np.exp(0.5)), (-9.0, 2.0), (-0.5, np.exp(-0.5)), (np.nan, 1.0)],
)
def test_importance_weight_is_truncated_and_before_the_kl(rollout, weight):
    config = losses.LossConfig("token", tis_cap=2.0, kl_coef=0.1)
    case = token_case(0.0, advantage=1.0)
    inputs = {
        "rollout_logprobs": np.full((1, 1), rollout, np.float32),
        "ref_logprobs": np.full((1, 1), -1.5, np.float32),
    }
    k3, slope = np.exp(-0.5) + 0.5 - 1, 1 - np.exp(-0.5)
    for old in ({}, {"old_logprobs": None}):
        loss, gradient, metrics = case.loss(config, **inputs, **old)
        assert loss == pytest.approx(-weight + 0.1 * k3, rel=1e-5)
        assert gradient.item() == pytest.approx(-weight + 0.1 * slope, rel=1e-5)
        summary = summarize(metrics)
        assert summary["tis_weight"] == pytest.approx(weight, rel=1e-5)
        distance = 0.0 if np.isnan(rollout) else abs(rollout + 1.0)
        assert summary["logprob_diff_mean"] == pytest.approx(distance)
        assert summary["logprob_diff_max"] == pytest.approx(distance)


def test_rollout_is_only_measured_without_a_cap():
    case = make_case()
    config = losses.loss_config("dapo")
    without = case.loss(config, rollout_logprobs=None)
    measured = case.loss(config)
    assert measured[0] == without[0]
    assert summarize(measured[2])["logprob_diff_max"] > 0
    assert "tis_weight" not in measured[2]


def test_bfloat16_inputs_are_computed_in_float32():
    case = make_case()
    config = losses.loss_config("dapo", kl_coef=0.04)
    loss, _ = losses.policy_loss(
        jnp.asarray(case.logprobs, jnp.bfloat16), config=config, **case.inputs
    )
    assert loss.dtype == jnp.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "ppo"}, "'ppo'.*grpo, dapo"),
        ({"kl_grad": "k1"}, "'k1'.*unbiased"),
        ({"clip_low": -0.1}, "clip_low is -0.1"),
        ({"tis_cap": 0.0}, "tis_cap is 0.0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(UserError, match=message):
        losses.loss_config(**{"name": "dapo"} | options)


@pytest.mark.parametrize(
    ("options", "missing"),
    [({"kl_coef": 0.1}, "ref_logprobs"), ({"tis_cap": 2.0}, "rollout_logprobs")],
)
def test_missing_inputs(options, missing):
    with pytest.raises(ValueError, match=missing):
        make_case().loss(losses.loss_config("dapo", **options), **{missing: None})
