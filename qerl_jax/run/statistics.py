"""Statistics of an evaluation and their uncertainty: pass@k, majority votes, intervals.

The problems of a benchmark are a sample of all possible problems, and completions of the same
problem are more alike than completions of different problems. The unit is therefore the problem:
every statistic is the mean of one value in [0, 1] per problem, and its uncertainty follows from the
spread of these values.
"""

import collections
import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

Z95 = NormalDist().inv_cdf(0.975)


def wilson_interval(mean: float, trials: float, *, z: float = Z95) -> tuple[float, float]:
    """Returns Wilson's score interval of a proportion: inside [0, 1] and never of zero width.

    Args:
        mean: fraction of successes.
        trials: number of independent trials; it need not be an integer.
        z: normal quantile; the default gives a 95 % interval.

    Returns:
        The lower and the upper end of the interval (Wilson 1927; Brown, Cai and DasGupta 2001,
        equation 4).
    """
    spread = z * math.sqrt(mean * (1 - mean) / trials + (z / trials / 2) ** 2)
    center, scale = mean + z * z / trials / 2, 1 + z * z / trials
    return max(0.0, (center - spread) / scale), min(1.0, (center + spread) / scale)


def interval(values: np.ndarray, *, samples: float, z: float = Z95) -> tuple[float, float]:
    """Returns the interval of a mean over problems that were each sampled several times.

    The result is Wilson's interval at the effective number of trials, mean (1 - mean) / se^2, where
    se is the standard error over problems (a clustered standard error, because the samples of a
    problem form a cluster). The effective number is between the number of problems, where all
    samples of a problem agree, and the number of completions, where samples of one problem differ
    as much as samples of different problems. With one sample per problem the result is the plain
    Wilson interval.

    Args:
        values: [P] one value in [0, 1] per problem, for example the fraction of correct samples.
        samples: mean number of samples per problem.
        z: normal quantile, as in `wilson_interval`.

    Returns:
        The lower and the upper end of the interval (Kott and Carr 1997; the standard error is that
        of Miller 2024, arXiv 2411.00640, equation 4).
    """
    mean, problems = float(values.mean()), len(values)
    variance = standard_error(values) ** 2
    effective = mean * (1 - mean) / variance if variance else math.inf
    if mean in (0.0, 1.0):  # The values do not show how samples of a problem differ.
        effective = problems
    return wilson_interval(mean, min(max(effective, problems), problems * samples), z=z)


def standard_error(values: np.ndarray) -> float:
    """Returns the standard error of the mean of [P] independent values, or inf for one value."""
    if len(values) < 2:
        return math.inf
    return float(values.std(ddof=1)) / math.sqrt(len(values))


def paired_difference(
    values: np.ndarray, baseline: np.ndarray, *, z: float = Z95
) -> tuple[float, float, float]:
    """Returns the mean of values - baseline over [P] problems and the ends of its normal interval.

    The interval is far narrower than the difference of two intervals, because the difficulty of
    each problem affects both values.

    Args:
        values: [P] one value in [0, 1] per problem.
        baseline: [P] values of the same problems.
        z: normal quantile, as in `wilson_interval`.
    """
    mean, error = float((values - baseline).mean()), standard_error(values - baseline)
    return mean, max(-1.0, mean - z * error), min(1.0, mean + z * error)


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Returns the chance that at least one of k samples, drawn from all n samples, is correct.

    The value is the unbiased estimator 1 - C(n - c, k) / C(n, k) of Chen et al. 2021 (arXiv
    2107.03374, equation 1).

    Args:
        samples: number n of samples, at least k.
        correct: number c of correct samples.
        k: number of samples that are drawn.
    """
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def majority(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """Returns how correct the most frequent answer is.

    Args:
        answers: the answer of each sample; None does not vote.
        correct: whether each sample is correct.

    Returns:
        A value in [0, 1]: the mean of `correct` over the samples with the most frequent answer,
        averaged over answers that tie; 0 where no sample has an answer.
    """
    scores = collections.defaultdict(list)
    for answer, score in zip(answers, correct, strict=True):
        if answer is not None:
            scores[answer].append(score)
    votes = max(map(len, scores.values()), default=0)
    winners = [np.mean(same) for same in scores.values() if len(same) == votes]
    return float(np.mean(winners)) if winners else 0.0


def half_interval(values: np.ndarray) -> float:
    """Returns half the width of the 95 % interval of the mean of n > 1 values, by Student's t."""
    from scipy import special  # scipy.stats, whose t.ppf is this function, takes seconds to import.

    return float(special.stdtrit(len(values) - 1, 0.975)) * standard_error(values)
