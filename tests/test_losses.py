"""Properties of the policy losses."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusal import refused
from row_loss import loss_config, row_loss

from qerl_jax.errors import UserError
from qerl_jax.rl import losses

LENGTHS = [7, 4, 0, 1, 6, 3]
SIZES = {"max_new_tokens": 9, "micro_batch_rows": 2}  # the micro-batches have 11, 1 and 9 tokens


@dataclasses.dataclass
class Case:
    """Arguments of `policy_loss` that exercise every term."""

    logprobs: np.ndarray
    inputs: dict[str, np.ndarray]

    def rows(self, start, stop):
        return Case(self.logprobs[start:stop], {k: v[start:stop] for k, v in self.inputs.items()})

    def loss(self, config, **replaced):
        inputs = self.inputs | replaced
        (loss, metrics), gradient = value_and_grad(jnp.asarray(self.logprobs), inputs, config)
        return float(loss), np.asarray(gradient), metrics


@functools.partial(jax.jit, static_argnames="config")
def value_and_grad(logprobs, inputs, config):
    """The loss and its metrics, and the gradient; one program for all cases of a config."""

    def loss(logprobs):
        return row_loss(logprobs, config=config, **inputs)

    return jax.value_and_grad(loss, has_aux=True)(logprobs)


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
            "weights": losses.token_weights(mask, aggregation, **SIZES),
        },
    )


def token_case(difference, advantage):
    """Makes a case of one token with log(new / old) = difference and weight 1."""
    one = np.ones((1, 1), np.float32)
    inputs = {"mask": one, "weights": one, "advantages": np.array([advantage], np.float32)}
    return Case(-one, inputs | {"old_logprobs": -one - np.float32(difference)})


def summarize(metrics):
    summary = losses.summarize_metrics(metrics)
    return {name: float(value) for name, value in summary.items()}


ALL_OPTIONS = [
    {},
    {"kl_coef": 0.04},
    {"kl_coef": 0.04, "kl_grad": "unbiased", "tis_cap": 1.1},
]
# By default, other options with one loss whose ratio is that of tokens, and one of sequences.
CASES = [
    pytest.param(
        *(name, options),
        marks=pytest.mark.slow if options and name not in ("grpo", "gspo") else (),
    )
    for options in ALL_OPTIONS
    for name in losses.LOSSES
]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_parts_add_up(name, options):
    config = loss_config(name, **options)
    case = make_case(config.aggregation)
    loss, gradient, metrics = case.loss(config)
    parts = [case.rows(i, i + 2).loss(config) for i in (0, 2, 4)]
    assert sum(part[0] for part in parts) == pytest.approx(loss, rel=1e-5)
    np.testing.assert_allclose(np.concatenate([part[1] for part in parts]), gradient, rtol=1e-6)
    total = functools.reduce(losses.add_metrics, (part[2] for part in parts))
    whole = summarize(metrics)
    assert whole["ratio_max"] > 1.3
    for key, value in losses.summarize_metrics(total).items():
        assert float(value) == pytest.approx(whole[key], rel=1e-5), key


@pytest.mark.parametrize(
    ("aggregation", "denominators"),
    [
        ("token", [6, 6, 6, 6, 6]),
        ("sequence", [15, 5, 1, 10, 1]),
        ("sequence_sum", [5, 5, 5, 5, 5]),
        ("constant", [45, 45, 45, 45, 45]),
        # Three micro-batches; the last one has one row, which has no token.
        ("micro_batch", [12, 12, 6, 6, 1]),
    ],
)
def test_token_weights(aggregation, denominators):
    mask = np.array([[1, 1, 1, 0], [1, 0, 0, 0], [0] * 4, [1, 1, 0, 0], [0] * 4], np.float32)
    weights = losses.token_weights(mask, aggregation, **SIZES)
    np.testing.assert_allclose(weights, mask / np.array(denominators)[:, None], rtol=1e-6)
    assert weights.dtype == np.float32


@pytest.mark.parametrize(
    ("aggregation", "missing"),
    [("constant", "max_new_tokens"), ("micro_batch", "micro_batch_rows")],
)
def test_sizes_that_an_aggregation_needs(aggregation, missing):
    with pytest.raises(ValueError, match=missing):
        losses.token_weights(np.ones((2, 2), np.float32), aggregation, **SIZES | {missing: None})


@pytest.mark.parametrize("sizes", [{}, SIZES])
def test_an_unknown_aggregation_is_not_micro_batch(sizes):
    with pytest.raises(UserError, match="unknown aggregation 'sequences': choose from token"):
        losses.token_weights(np.ones((2, 2), np.float32), "sequences", **sizes)


def by_the_equations(name, new, now, inputs, *, dual_clip, kl_coef, tis_cap):
    """Computes a loss in float64, token by token; terms without a gradient are taken at `now`."""
    old, ref, rollout = (
        np.asarray(inputs[k], np.float64)
        for k in ("old_logprobs", "ref_logprobs", "rollout_logprobs")
    )
    low, high = 1 - 0.2, 1 + 0.28
    rows = []
    for i, length in enumerate(LENGTHS):
        advantage, tokens = float(inputs["advantages"][i]), []
        for t in range(length):
            if name == "gspo_token":  # its value is a constant, its gradient that of the token
                value = np.exp(sum(now[i, k] - old[i, k] for k in range(length)) / length)
                ratio = value * np.exp(new[i, t] - now[i, t])
            elif name == "gspo":
                ratio = np.exp(sum(new[i, k] - old[i, k] for k in range(length)) / length)
            else:
                ratio = np.exp(new[i, t] - old[i, t])
            if name == "cispo":
                weight = min(max(np.exp(now[i, t] - old[i, t]), low), high)
                loss = -weight * advantage * new[i, t]
            elif name == "sapo":
                gate = 1.0 if advantage > 0 else 1.05
                loss = -4 / gate / (1 + np.exp(-gate * (ratio - 1))) * advantage
            else:
                loss = -min(ratio * advantage, min(max(ratio, low), high) * advantage)
                if dual_clip is not None and advantage < 0:
                    loss = min(loss, -dual_clip * advantage)
            if name == "opsm" and advantage < 0:
                loss *= np.mean([rollout[i, k] - now[i, k] for k in range(length)]) <= 0.5
            if tis_cap is not None:
                loss *= min(np.exp(old[i, t] - rollout[i, t]), tis_cap)
            gap = ref[i, t] - new[i, t]
            tokens.append(loss + kl_coef * (np.exp(gap) - gap - 1))
        rows.append(tokens)

    def token_mean(rows):
        return sum(map(sum, rows)) / max(1, sum(map(len, rows)))

    if name in ("grpo", "gspo", "gspo_token", "sapo", "opsm"):
        return np.mean([sum(tokens) / max(1, len(tokens)) for tokens in rows])
    if name in ("dapo", "cispo"):
        return token_mean(rows)
    if name == "dr_grpo":
        return sum(map(sum, rows)) / (len(rows) * SIZES["max_new_tokens"])
    size = SIZES["micro_batch_rows"]
    return np.mean([token_mean(rows[i : i + size]) for i in range(0, len(rows), size)])


@pytest.mark.parametrize("name", losses.LOSSES)
@pytest.mark.parametrize(
    "options",
    [
        {},  # for 'grpo' this is QeRL's loss, the recipe 'paper'
        {"kl_coef": 0.1},
        {"tis_cap": 1.1, "kl_coef": 0.1},
        {"dual_clip": 1.2, "tis_cap": 1.1},
    ],
)
def test_losses_by_their_equations(name, options):
    if name in ("cispo", "sapo"):
        options = {k: v for k, v in options.items() if k != "dual_clip"}
    config = loss_config(name, **options)
    case = make_case(config.aggregation)
    loss, gradient, _ = case.loss(config)
    rest = {"dual_clip": None, "kl_coef": 0.0, "tis_cap": None} | options
    now = case.logprobs.astype(np.float64)

    def equation(new):
        return by_the_equations(name, new, now, case.inputs, **rest)

    assert loss == pytest.approx(equation(now), rel=1e-5, abs=1e-7)
    expected = np.zeros_like(now)
    for position in np.ndindex(now.shape):
        step = np.zeros_like(now)
        step[position] = 1e-6
        expected[position] = (equation(now + step) - equation(now - step)) / 2e-6
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-7)


def test_gspo_clips_whole_sequences():
    config = loss_config("gspo", clip_low=0.1, clip_high=0.1)
    case = make_case("sequence")
    # The token ratios are far from 1; their geometric means are 1.05, 1.2, 1, 1.2, 0.8 and 0.95.
    means = np.array([1.05, 1.2, 1.0, 1.2, 0.8, 0.95])
    wobble = np.where(np.arange(7) % 2, 2.0, -2.0) * (
        np.arange(7) < np.array(LENGTHS)[:, None] // 2 * 2
    )
    case.inputs["old_logprobs"] = (case.logprobs - np.log(means)[:, None] - wobble).astype(
        np.float32
    )
    case.inputs["advantages"] = np.array([1, -1, 1, 1, -1, -1], np.float32)
    _, gradient, metrics = case.loss(config)
    mask = case.inputs["mask"] > 0
    # Above 1.1 with a positive advantage and below 0.9 with a negative one, no gradient is left.
    assert [bool(row.any()) for row in gradient] == [True, True, False, False, False, True]
    assert all(np.unique(row[row != 0]).size == 1 for row in gradient if row.any())
    summary = summarize(metrics)
    assert summary["clip_fraction_high"] == pytest.approx(1 / mask.sum())
    assert summary["clip_fraction_low"] == pytest.approx(6 / mask.sum())
    assert summary["ratio_max"] == pytest.approx(1.2, rel=1e-5)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize(("ratio", "weight"), [(0.1, 0.8), (1.1, 1.1), (9.0, 5.0)])
def test_cispo_clips_the_weight_and_keeps_the_gradient(advantage, ratio, weight):
    config = loss_config("cispo", clip_low=0.2, clip_high=4.0)
    loss, gradient, metrics = token_case(np.log(ratio), advantage).loss(config)
    assert loss == pytest.approx(weight * advantage, rel=1e-5)  # the log-probability is -1
    assert gradient.item() == pytest.approx(-weight * advantage, rel=1e-5)
    assert summarize(metrics)["clip_fraction"] == (weight != ratio)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_masked_positions_may_hold_anything(name, options):
    config = loss_config(name, **options)
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
def test_an_empty_mask(name):
    config = loss_config(name, kl_coef=0.1, tis_cap=2.0)
    case = make_case()
    nothing = np.zeros_like(case.inputs["mask"])
    weights = losses.token_weights(nothing, config.aggregation, **SIZES)
    loss, gradient, metrics = case.loss(config, mask=nothing, weights=weights)
    assert loss == 0.0
    assert not gradient.any()
    assert all(np.isnan(value) for value in summarize(metrics).values())  # Nothing was measured.


@pytest.mark.parametrize("name", losses.LOSSES)
def test_gradient_on_policy_is_the_policy_gradient(name):
    config = loss_config(name)
    case = make_case(config.aggregation)
    _, gradient, metrics = case.loss(config, old_logprobs=None)
    advantages, weights = case.inputs["advantages"], case.inputs["weights"]
    np.testing.assert_allclose(gradient, -advantages[:, None] * weights, rtol=1e-6)
    # The fifth row has advantage 0.
    assert not gradient[4].any()
    summary = summarize(metrics)
    assert summary["ratio_mean"] == summary["ratio_max"] == 1.0
    assert summary.get("clip_fraction", 0.0) == 0.0  # 'sapo' clips nothing


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "passes", "clipped"),
    [
        (1.25, 1.0, -1.25, True, ""),  # clip-higher does not clip it
        (1.30, 1.0, -1.28, False, "high"),
        (0.70, 1.0, -0.70, True, ""),
        (0.10, 1.0, -0.10, True, ""),
        (0.70, -1.0, 0.80, False, "low"),
        (1.30, -1.0, 1.30, True, ""),
        (0.70, 0.0, 0.0, False, ""),
        (2.9, -1.0, 2.9, True, ""),
        (3.1, -1.0, 3.0, False, "dual"),
        (np.exp(25.0), -1.0, 3.0, False, "dual"),
        (3.1, 1.0, -1.28, False, "high"),
    ],
)
def test_clipping(ratio, advantage, loss, passes, clipped):
    config = loss_config("dapo", clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    value, gradient, metrics = token_case(np.log(ratio), advantage).loss(config)
    assert value == pytest.approx(loss, rel=1e-5, abs=1e-9)
    expected = -ratio * advantage if passes else 0.0
    assert gradient.item() == pytest.approx(expected, rel=1e-5, abs=1e-9)
    summary = summarize(metrics)
    for bound in ("low", "high", "dual"):
        assert summary[f"clip_fraction_{bound}"] == (clipped == bound)
    assert summary["clip_fraction"] == (clipped in ("low", "high"))


@pytest.mark.parametrize(("gap", "has_gradient"), [(2.5, True), (2.7, False), (25.0, False)])
def test_clipped_k3_has_no_gradient_beyond_ten(gap, has_gradient):
    config = loss_config("dapo", kl_coef=0.5, kl_grad="k3_clipped")
    case = token_case(0.0, advantage=0.0)
    loss, gradient, metrics = case.loss(config, ref_logprobs=np.full((1, 1), gap - 1, np.float32))
    near = min(gap, 20.0)
    k3 = np.exp(near) - near - 1
    assert loss == pytest.approx(0.5 * min(k3, 10.0), rel=1e-5)
    assert gradient.item() == pytest.approx(0.5 * has_gradient * (1 - np.exp(near)), rel=1e-5)
    assert summarize(metrics)["kl"] == pytest.approx(k3, rel=1e-5)  # the logged KL is not clipped


FAR_LOSSES = [
    *({"name": name} for name in losses.LOSSES),
    *({"name": "grpo", "kl_coef": 0.1, "kl_grad": kl_grad} for kl_grad in losses.KL_GRADS),
    {"name": "dapo", "dual_clip": 3.0},
    {"name": "dapo", "tis_cap": 2.0, "kl_coef": 0.1},
    {"name": "dapo", "tis_cap": float("inf")},
    {"name": "gspo", "kl_coef": 0.1, "kl_grad": "unbiased"},
]


@pytest.mark.parametrize("options", FAR_LOSSES, ids=str)
def test_log_ratios_of_any_size_have_finite_gradients(options):
    """One far token would make the gradient of the whole update NaN, and the update is skipped."""
    config = loss_config(**options)
    for gap in (19.0, 50.0, 89.0, 500.0):
        for advantage, sign in itertools.product((-1.0, 1.0), (-1.0, 1.0)):
            case = token_case(sign * gap, advantage)
            inputs = {"ref_logprobs": case.logprobs - np.float32(sign * gap)}
            inputs["rollout_logprobs"] = inputs["ref_logprobs"]
            loss, gradient, metrics = case.loss(config, **inputs)
            assert np.isfinite(loss)
            assert np.isfinite(gradient).all()
            assert all(np.isfinite(value) for value in summarize(metrics).values())
            ratio = np.float64(np.exp(np.clip(sign * gap, -20, 20)))
            assert summarize(metrics)["ratio_mean"] == pytest.approx(ratio, rel=1e-5)


def test_a_policy_that_is_nan_is_not_clamped():
    config = loss_config("grpo", kl_coef=0.1)
    case = token_case(0.0, 1.0)
    case.logprobs[:] = np.nan
    loss, gradient, _ = case.loss(config, ref_logprobs=np.full((1, 1), -1.0, np.float32))
    assert np.isnan(loss)
    assert np.isnan(gradient).all()


def test_the_clamp_changes_no_bit_of_closer_policies():
    x = jnp.asarray(np.random.default_rng(0).uniform(-20, 20, 4096), jnp.float32)
    for ours, plain in (
        (losses._exp, jnp.exp),
        (lambda x: losses.k3(-x, jnp.zeros_like(x)), lambda x: jnp.expm1(x) - x),
    ):
        np.testing.assert_array_equal(jax.jit(ours)(x), jax.jit(plain)(x))
        slopes = (jax.jit(jax.grad(lambda x, f=f: f(x).sum()))(x) for f in (ours, plain))
        np.testing.assert_array_equal(*slopes)


@pytest.mark.parametrize(
    ("rollout", "weight"),
    [(-1.0, 1.0), (-1.5, np.exp(0.5)), (-9.0, 2.0), (-0.5, np.exp(-0.5)), (np.nan, 1.0)],
)
def test_importance_weight_is_truncated_and_before_the_kl(rollout, weight):
    config = loss_config("dapo", tis_cap=2.0, kl_coef=0.1)
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
        distance = abs(rollout + 1.0)  # not measured without a record
        assert summary["logprob_diff_mean"] == pytest.approx(distance, nan_ok=True)
        assert summary["logprob_diff_max"] == pytest.approx(distance, nan_ok=True)


def test_rollout_is_only_measured_without_a_cap():
    case = make_case()
    config = loss_config("dapo")
    without = case.loss(config, rollout_logprobs=None)
    measured = case.loss(config)
    assert measured[0] == without[0]
    assert summarize(measured[2])["logprob_diff_max"] > 0
    assert "tis_weight" not in measured[2]


def test_bfloat16_inputs_are_computed_in_float32():
    case = make_case()
    config = loss_config("dapo", kl_coef=0.04)
    loss, _ = row_loss(jnp.asarray(case.logprobs, jnp.bfloat16), config=config, **case.inputs)
    assert loss.dtype == jnp.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "ppo"}, "'ppo'.*grpo, dapo"),
        ({"dual_clip": 1.0}, "dual_clip is 1.0"),
        ({"name": "cispo", "dual_clip": 3.0}, "dual_clip is 3.0.*does not clip the ratio"),
        ({"dual_clip": float("nan")}, "dual_clip is nan"),
    ],
)
def test_bad_options(options, message):
    refused(message, loss_config, **{"name": "dapo"} | options)


def test_an_aggregation_replaces_the_one_of_the_loss():
    assert loss_config("grpo").aggregation == "sequence"
    config = loss_config("gspo", aggregation="token")
    assert (config.aggregation, config.ratio) == ("token", "sequence")


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({"kl_coef": 0.1}, "ref_logprobs"),
        ({"tis_cap": 2.0}, "rollout_logprobs"),
        ({"teacher_coef": 1.0}, "teacher_logprobs"),
    ],
)
def test_missing_inputs(options, missing):
    with pytest.raises(ValueError, match=missing):
        make_case().loss(loss_config("dapo", **options), **{missing: None})


def test_row_sums_by_hand():
    rows = jnp.array([0, 0, 0, 1, 3, 3, 4])
    x = jnp.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0])
    expected = [7.0, 7.0, 7.0, 8.0, 48.0, 48.0, 64.0]
    np.testing.assert_array_equal(losses.row_sums(x, rows), expected)
    gradient = jax.grad(lambda x: (losses.row_sums(x, rows) * jnp.arange(7.0)).sum())(x)
    np.testing.assert_array_equal(gradient, [3.0, 3.0, 3.0, 3.0, 9.0, 9.0, 6.0])


def test_the_off_policy_mask_leaves_out_rows_of_a_negative_advantage():
    """A token without a record counts as no difference; the mask has no gradient."""
    config = loss_config("opsm")
    case = make_case("sequence")
    case.inputs["rollout_logprobs"] = case.logprobs + np.array(
        [[0.9], [0.9], [0.9], [0.4], [0.9], [0.9]], np.float32
    )
    case.inputs["advantages"] = np.array([1, -1, 1, -1, -1, -1], np.float32)
    case.inputs["rollout_logprobs"][5, 0] = np.nan  # two of three tokens: a mean of 0.6
    _, gradient, metrics = case.loss(config)
    assert [bool(row.any()) for row in gradient] == [True, False, False, True, False, False]
    masked = LENGTHS[1] + LENGTHS[4] + LENGTHS[5]
    assert summarize(metrics)["off_policy_masked"] == pytest.approx(masked / sum(LENGTHS))
    case.inputs["rollout_logprobs"][5, 1] = np.nan  # one of three: 0.3
    assert case.loss(config)[1][5].any()
    # It applies to every loss, and the KL stays.
    config = loss_config("dapo", off_policy_delta=0.5, kl_coef=0.1)
    assert case.loss(config)[1][1].any()
