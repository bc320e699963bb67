"""What an evaluation measured and how sure it is of it: pass@k, majority votes, intervals.

The problems of a benchmark are a sample of the problems that there could be, and the completions of
one problem are more alike than those of two. So the unit is the problem: every figure is a mean of
one value in [0, 1] a problem, and its uncertainty is the spread of these values.
"""

import collections
import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

Z95 = NormalDist().inv_cdf(0.975)


def wilson_interval(mean: float, trials: float, *, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval of a proportion: inside [0, 1], and never without width.

    Args:
        mean: the share of successes.
        trials: how many independent trials it comes from; need not be whole.
        z: the normal quantile; the default is for 95 %.

    Returns:
        Its lower and upper end. (Wilson 1927; Brown, Cai and DasGupta 2001, equation 4.)
    """
    spread = z * math.sqrt(mean * (1 - mean) / trials + (z / trials / 2) ** 2)
    centre, scale = mean + z * z / trials / 2, 1 + z * z / trials
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def interval(values: np.ndarray, *, samples: int, z: float = Z95) -> tuple[float, float]:
    """The interval of a mean over problems, each of which was sampled several times.

    Wilson's interval at the effective number of trials, mean (1 - mean) / se^2, where se is the
    standard error over problems (the clustered one, as samples of a problem are a cluster). It lies
    between the number of problems, where all samples of a problem agree, and the number of
    completions, where they are as different as those of different problems. With one sample a
    problem it is Wilson's interval itself.

    Args:
        values: [P], one value in [0, 1] a problem, for example the share of its correct samples.
        samples: how many samples each value comes from.
        z: see `wilson_interval`.

    Returns:
        Its lower and upper end. (Kott and Carr 1997; for the standard error Miller 2024,
        arXiv 2411.00640, equation 4.)
    """
    mean, problems = float(values.mean()), len(values)
    variance = standard_error(values) ** 2
    effective = mean * (1 - mean) / variance if variance else math.inf
    if mean in (0.0, 1.0):  # Nothing is known of the spread.
        effective = problems
    return wilson_interval(mean, min(max(effective, problems), problems * samples), z=z)


def standard_error(values: np.ndarray) -> float:
    """The standard error of the mean of [P] independent values; infinite for a single one."""
    if len(values) < 2:
        return math.inf
    return float(values.std(ddof=1)) / math.sqrt(len(values))


def paired_difference(
    new: np.ndarray, old: np.ndarray, *, z: float = Z95
) -> tuple[float, float, float]:
    """mean(new - old) over the same [P] problems, and the ends of its normal interval.

    Far narrower than the difference of two intervals: what makes a problem hard is in both.
    """
    mean, error = float((new - old).mean()), standard_error(new - old)
    return mean, max(-1.0, mean - z * error), min(1.0, mean + z * error)


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The chance that at least one of k samples, drawn out of those there are, is correct.

    The unbiased estimator 1 - C(n - c, k) / C(n, k) of Chen et al. 2021 (arXiv 2107.03374,
    equation 1).

    Args:
        samples: n, at least k.
        correct: c, how many of them are correct.
        k: how many are drawn.
    """
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def majority(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """Whether the most frequent answer is correct; a tie counts with the share that is.

    Args:
        answers: the answer of each sample; None does not vote.
        correct: whether it is correct.

    Returns:
        A value in [0, 1]; 0 where there is no answer at all.
    """
    voters = collections.defaultdict(list)
    for answer, verdict in zip(answers, correct, strict=True):
        if answer is not None:
            voters[answer].append(verdict)
    most = max(map(len, voters.values()), default=0)
    winners = [np.mean(verdicts) for verdicts in voters.values() if len(verdicts) == most]
    return float(np.mean(winners)) if winners else 0.0


def half_interval(values: np.ndarray) -> float:
    """Half the width of the 95 % interval of the mean of n > 1 values, by Student's t."""
    from scipy import stats

    return float(stats.t.ppf(0.975, len(values) - 1)) * standard_error(values)
