"""Group-relative advantages."""

import pathlib

import numpy as np
import pytest
from refusal import refused

from qerl_jax.rl.advantages import gdpo_advantages, group_advantages

NAN = np.nan
GOLDEN = pathlib.Path(__file__).parent / "golden"


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_equal_rewards_have_exactly_no_advantage(scale, dtype):
    # In float64 the mean of seven rewards of 2.2 is not 2.2.
    rewards = np.array([[0.2 + 2.0] * 7, [1, 2, 3, 4, 5, 6, 7]], dtype)
    advantages = group_advantages(rewards, scale=scale, eps=1e-12)
    assert not advantages[0].any()
    assert advantages[1].any()


@pytest.mark.parametrize(
    ("scale", "std"), [("group", [[1.0], [10.0]]), ("batch", np.sqrt(688 / 5)), ("none", 1.0)]
)
def test_scales(scale, std):
    # The six rewards have mean 11 and squared distances 100, 81, 64, 1, 81 and 361 from it.
    rewards = np.array([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]])
    expected = np.array([[-1.0, 0.0, 1.0], [-10.0, 0.0, 10.0]]) / np.array(std)
    advantages = group_advantages(rewards, scale=scale, eps=0.0)
    assert advantages.dtype == np.float32
    np.testing.assert_allclose(advantages, expected, rtol=1e-6)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_missing_rewards_take_no_part(scale):
    rewards = np.array([[1.0, NAN, 3.0, 8.0], [5.0, 6.0, NAN, 7.0]])
    advantages = group_advantages(rewards, scale=scale, eps=0.0)
    dense = group_advantages(np.array([[1.0, 3.0, 8.0], [5.0, 6.0, 7.0]]), scale=scale, eps=0.0)
    present = ~np.isnan(rewards)
    np.testing.assert_allclose(advantages[present], dense.ravel(), rtol=1e-6)
    assert not advantages[~present].any()


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize(
    "rewards",
    [[[2.0]], [[NAN, 2.0, NAN]], [[NAN, NAN]], [[NAN, 2.0, 2.0]], [[1.0], [2.0]], [[np.inf, 1.0]]],
)
def test_nothing_to_compare_is_no_advantage(scale, rewards):
    advantages = group_advantages(np.array(rewards), scale=scale)
    assert advantages.shape == np.shape(rewards)
    assert not advantages.any()


def test_offsets_do_not_matter():
    rewards = np.array([[0.0, 1.0, 0.5, 0.0]])
    np.testing.assert_allclose(
        group_advantages(rewards + 1e6), group_advantages(rewards), rtol=1e-6
    )


def test_unknown_scale():
    refused(r"'std'.*group", group_advantages, np.zeros((1, 2)), scale="std")


def test_gdpo_of_trl():
    """Generator: golden/make_trl_gdpo.py."""
    golden = np.load(GOLDEN / "trl_gdpo.npz")
    names = [str(index) for index in range(len(golden["weights"]))]
    rewards = {name: golden["rewards"][..., int(name)] for name in names}
    weights = dict(zip(names, golden["weights"].tolist(), strict=True))
    advantages = gdpo_advantages(rewards | {"logged": rewards["0"]}, weights | {"logged": 0.0})
    np.testing.assert_allclose(advantages, golden["advantages"], rtol=1e-4, atol=1e-6)
    assert not advantages[1].any()  # exactly 0, where TRL has rounding noise


def test_gdpo_of_rewards_that_cancel_out():
    rewards = np.array([[0.0, 1.0, 0.0, 1.0]])
    opposed, weights = {"a": rewards, "b": 1.0 - rewards}, {"a": 1.0, "b": 1.0}
    assert not gdpo_advantages(opposed, weights, eps=0.0).any()


def test_gdpo_without_a_weight_is_refused():
    refused("no reward has a weight", gdpo_advantages, {"a": np.zeros((1, 2))}, {"a": 0.0})
