"""The rows of benchmarks/results/gsm8k.json by arm, and how far arms are apart.

Differences have 95 % intervals: over problems by the paired difference of the means over the seeds,
which takes the runs as given; over seeds by Welch's t, which says what another run would do.
"""

import gzip
import json
import pathlib
from typing import Any, NamedTuple

import numpy as np

from benchmarks.gsm8k import metrics_file, run_name
from qerl_jax.run.statistics import half_interval, paired_difference

FEWEST_SEEDS = 3  # that have an interval; two seeds that end alike would have none at all

Row = dict[str, Any]  # of gsm8k.json, with `about`
Runs = dict[str, list[Row]]  # arm -> its rows


def runs_by_arm(content: dict[str, Any]) -> Runs:
    """The rows of gsm8k.json by arm, each with what else is known of its run."""
    runs: Runs = {}
    for row in content["rows"]:
        about = content["runs"][run_name(row["arm"], row["seed"])]
        runs.setdefault(row["arm"], []).append(row | {"about": about})
    return runs


def read_metrics(path: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of the steps in a compressed metrics.jsonl."""
    lines = gzip.decompress(path.read_bytes()).decode("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [row for row in rows if "eval_seconds" not in row]


def steps_of(row: Row, results: pathlib.Path) -> list[dict[str, Any]]:
    """The metrics of the steps of a row of gsm8k.json, with the share of mixed groups.

    Args:
        row: the row.
        results: folder of gsm8k.json, beside which the metrics of the runs lie.
    """
    steps = read_metrics(metrics_file(results, run_name(row["arm"], row["seed"])))
    return [step | {"mixed_groups": 1.0 - step["advantage_zero_groups"]} for step in steps]


# --- Differences --------------------------------------------------------------------------------


class Difference(NamedTuple):
    """A difference and the ends of its 95 % interval."""

    value: float
    low: float
    high: float


def difference_text(difference: Difference | None, spec: str = "+.1f") -> str:
    """A difference and its interval, for a table; '-' for None."""
    if difference is None:
        return "-"
    value, low, high = (f"{part:{spec}}" for part in difference)
    return f"{value} [{low}, {high}]"


def over_problems(reference: list[Row], rows: list[Row], part: str = "end") -> Difference:
    """The paired difference in points of greedy accuracy.

    Args:
        reference: the runs that the others are compared with.
        rows: the others.
        part: 'start' or 'end'.
    """
    difference = paired_difference(_by_problem(rows, part), _by_problem(reference, part))
    return Difference(*(100 * value for value in difference))


def _by_problem(rows: list[Row], part: str) -> np.ndarray:
    """[P] mean accuracy of each problem, over the seeds."""
    digits = [list(map(int, evaluation(row, part)["correct"])) for row in rows]
    return np.array(digits, np.float64).mean(axis=0)


def over_seeds(reference: list[float], values: list[float]) -> Difference | None:
    """The difference of the means by Welch's t; None where one has too few seeds."""
    if min(len(values), len(reference)) < FEWEST_SEEDS:
        return None
    from scipy import stats

    interval = stats.ttest_ind(values, reference, equal_var=False).confidence_interval(0.95)
    value = float(np.mean(values) - np.mean(reference))
    return Difference(value, float(interval.low), float(interval.high))


def over_common_seeds(reference: dict[int, float], values: dict[int, float]) -> Difference | None:
    """The mean of the differences by seed with Student's t; None where too few are common."""
    common = sorted(reference.keys() & values.keys())
    if len(common) < FEWEST_SEEDS:
        return None
    differences = np.array([values[seed] - reference[seed] for seed in common])
    mean, half = float(differences.mean()), half_interval(differences)
    return Difference(mean, mean - half, mean + half)


def unpaired(reference: dict[str, float], value: dict[str, float]) -> Difference:
    """The difference of two proportions in points, with Newcombe's interval.

    Args:
        reference: `value`, `low` and `high` in percent.
        value: the same of the other.
    """
    difference = value["value"] - reference["value"]
    low = np.hypot(value["value"] - value["low"], reference["high"] - reference["value"])
    high = np.hypot(value["high"] - value["value"], reference["value"] - reference["low"])
    return Difference(difference, difference - float(low), difference + float(high))


def evaluation(row: Row, part: str) -> dict[str, Any]:
    """An evaluation of a run: 'start', 'end', 'start-samples' or 'samples'."""
    return row["about"]["evaluations"][part]


def ends(rows: list[Row]) -> list[float]:
    """Greedy accuracy of each seed after training, in percent."""
    return [row["pass1_end"] for row in rows]


def first_entropies(rows: list[Row], results: pathlib.Path) -> dict[int, float]:
    """Seed -> entropy in nats of the first step, on the prompts that the seed draws."""
    return {row["seed"]: steps_of(row, results)[0]["entropy"] for row in rows}


def entropy_difference(
    reference: list[Row], rows: list[Row], results: pathlib.Path
) -> Difference | None:
    """The difference of the entropy of the first step, which a seed takes on the same prompts."""
    return over_common_seeds(*(first_entropies(part, results) for part in (reference, rows)))


def halves(rows: list[Row], results: pathlib.Path, name: str) -> tuple[list[float], list[float]]:
    """Means of a metric over the first and over the second half of the steps, for each seed."""
    values = [[step[name] for step in steps_of(row, results)] for row in rows]
    first = [float(np.mean(part[: (len(part) + 1) // 2])) for part in values]
    return first, [float(np.mean(part[len(part) // 2 :])) for part in values]


def mean_sample(rows: list[Row], part: str, name: str) -> dict[str, float]:
    """A measure of sampled completions: means over the rows of its value and its interval."""
    measures = [evaluation(row, part)[name] for row in rows]
    return {
        key: float(np.mean([measure[key] for measure in measures]))
        for key in ("value", "low", "high")
    }


def sample_values(rows: list[Row], part: str, name: str) -> list[float]:
    """A measure of sampled completions in percent, for each row."""
    return [evaluation(row, part)[name]["value"] for row in rows]
