"""Estimators and intervals, compared with scipy, closed forms and counting."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from qerl_jax.run.statistics import (
    interval,
    majority,
    paired_difference,
    pass_at_k,
    standard_error,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("successes", "trials"), [(0, 4), (1, 4), (120, 256), (256, 256), (7, 500)]
)
def test_wilson_interval_equals_that_of_scipy(successes, trials):
    expected = stats.binomtest(successes, trials).proportion_ci(method="wilson")
    low, high = wilson_interval(successes / trials, trials)
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=1e-12)


@pytest.mark.parametrize("successes", [0, 1, 5, 20])
def test_one_sample_per_problem_gives_the_wilson_interval(successes):
    values = np.array([1.0] * successes + [0.0] * (20 - successes))
    assert interval(values, samples=1) == wilson_interval(successes / 20, 20)


def test_samples_that_agree_count_as_one():
    values = np.array([1.0, 0.0, 0.0, 1.0, 1.0])
    assert interval(values, samples=64) == wilson_interval(0.6, 5)


def test_samples_that_do_not_depend_on_the_problem_count_each():
    # Every problem has the same fraction of correct samples, so problems do not differ.
    assert interval(np.full(10, 0.25), samples=8) == wilson_interval(0.25, 80)
    # All samples are correct, so the values do not show how samples of a problem differ.
    assert interval(np.full(10, 1.0), samples=8) == wilson_interval(1.0, 10)
    low, high = interval(np.full(10, 0.0), samples=8)
    assert low == pytest.approx(0, abs=1e-12)
    assert 0.2 < high < 0.3


def test_many_problems_give_the_clustered_normal_interval():
    rng = np.random.default_rng(0)
    values = rng.binomial(8, rng.beta(1, 1, 20_000)) / 8
    low, high = interval(values, samples=8)
    error = stats.sem(values)
    assert standard_error(values) == pytest.approx(error, rel=1e-12)
    assert low == pytest.approx(values.mean() - 1.959964 * error, abs=1e-5)
    assert high == pytest.approx(values.mean() + 1.959964 * error, abs=1e-5)


def test_coverage_of_the_interval():
    """93 % to 98 % of the intervals of 40 problems with 4 samples contain the true mean."""
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(2000):
        values = rng.binomial(4, rng.beta(0.6, 1.4, 40)) / 4
        low, high = interval(values, samples=4)
        hits += low <= 0.3 <= high
    assert 0.93 < hits / 2000 < 0.98


def test_a_single_problem_is_accepted():
    low, high = interval(np.array([0.5]), samples=4)
    assert (low, high) == wilson_interval(0.5, 1)
    assert standard_error(np.array([0.5])) == math.inf


def test_paired_difference_is_that_of_a_t_test():
    rng = np.random.default_rng(0)
    old = rng.integers(0, 2, 400).astype(float)
    new = np.where(rng.random(400) < 0.1, 1.0, old)
    mean, low, high = paired_difference(new, old)
    expected = stats.ttest_rel(new, old)
    assert mean == pytest.approx(new.mean() - old.mean())
    assert (high - low) / 2 == pytest.approx(1.959964 * mean / expected.statistic, rel=1e-6)
    assert low > 0
    unpaired = interval(new, samples=1)[0] - interval(old, samples=1)[1]
    assert low > unpaired


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("correct", [0, 1, 3, 5])
def test_pass_at_k_counts_subsets(correct, k):
    verdicts = [True] * correct + [False] * (5 - correct)
    subsets = [any(chosen) for chosen in itertools.combinations(verdicts, k)]
    assert pass_at_k(5, correct, k) == pytest.approx(sum(subsets) / len(subsets))


@pytest.mark.parametrize(
    ("answers", "correct", "expected"),
    [
        (["1", "2", "2"], [True, False, False], 0.0),
        (["2", "1", "2"], [True, False, True], 1.0),
        (["1", "2", "3"], [True, False, False], 1 / 3),
        (["1", "1", "2", "2", "3"], [True, True, False, False, True], 0.5),
        (["1", "1", "2"], [True, False, False], 0.5),  # a scorer may read more than the answer
        ([None, None, "7"], [False, False, True], 1.0),  # None does not vote
        ([None, None], [False, True], 0.0),
    ],
)
def test_majority(answers, correct, expected):
    assert majority(answers, correct) == pytest.approx(expected)
