"""The claims of the paper, each with the comparisons of arms that speak for or against it."""

import pathlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from benchmarks.differences import (
    Difference,
    Row,
    Runs,
    difference_text,
    ends,
    entropy_difference,
    halves,
    mean_sample,
    over_problems,
    over_seeds,
    sample_values,
    unpaired,
)
from benchmarks.evidence_tables import BF16, CALIBRATED, NOISE, ROUNDED, SAME_RATE
from benchmarks.result_tables import markdown


class _Measure(NamedTuple):
    """What arms are compared by.

    Attributes:
        name: what the table calls it.
        spec: format of its differences.
        compare: the differences of rows from those of a reference, over problems and over seeds,
            each None where it cannot be said.
        before: whether it is taken before training, so that neither the seed nor the rate matters.
    """

    name: str
    spec: str
    compare: Callable[
        [list[Row], list[Row], pathlib.Path], tuple[Difference | None, Difference | None]
    ]
    before: bool = False


class _Claim(NamedTuple):
    """A claim, and the pairs of arms that it compares.

    Attributes:
        text: what the paper says.
        measure: what it says it of.
        pairs: reference and arm of each comparison.
        equal: whether it says that the arms are equal; otherwise the arm has more.
    """

    text: str
    measure: _Measure
    pairs: list[tuple[str, str]]
    equal: bool = False


def _half(name: str, number: int) -> Callable[..., tuple[None, Difference | None]]:
    def compare(
        reference: list[Row], rows: list[Row], results: pathlib.Path
    ) -> tuple[None, Difference | None]:
        a, b = (halves(part, results, name)[number] for part in (reference, rows))
        return None, over_seeds(a, b)

    return compare


_ACCURACY = _Measure(
    "pass@1 after, points",
    "+.1f",
    lambda a, b, _: (over_problems(a, b), over_seeds(ends(a), ends(b))),
)
_ENTROPY = _Measure(
    "entropy of the first step, nats",
    "+.3f",
    lambda a, b, results: (None, entropy_difference(a, b, results)),
    before=True,
)
_FOUND_BEFORE = _Measure(
    "pass@64 before, points",
    "+.1f",
    lambda a, b, _: (
        unpaired(*(mean_sample(part, "start-samples", "pass@64") for part in (a, b))),
        None,
    ),
    before=True,
)
_FOUND = _Measure(
    "pass@64 after, points",
    "+.1f",
    lambda a, b, _: (None, over_seeds(*(sample_values(p, "samples", "pass@64") for p in (a, b)))),
)
_MIXED = _Measure("share of mixed groups, second half", "+.2f", _half("mixed_groups", 1))
_REWARD = _Measure("reward, first half", "+.3f", _half("reward", 0))

_QUANTIZED = [(BF16, CALIBRATED), (BF16, ROUNDED)]
# The held-out problems chose a KL of 0.01; one of 0.03 says what more noise does.
_CALIBRATED_NOISY = [f"{CALIBRATED}{noise}" for noise in (*NOISE, "-aqn-kl0.03")]
_ROUNDED_NOISY = [f"{ROUNDED}{noise}" for noise in NOISE]
_NOISY = _CALIBRATED_NOISY + _ROUNDED_NOISY
_AT_ONE_RATE = [(SAME_RATE, arm) for arm in _CALIBRATED_NOISY]
_AT_BEST_RATES = [(CALIBRATED, arm) for arm in _CALIBRATED_NOISY]
_ELSEWHERE = [(arm.partition("-aqn")[0], arm) for arm in (*_ROUNDED_NOISY, f"{BF16}-aqn")]
_CLAIMS = [
    _Claim("quantization raises the entropy", _ENTROPY, _QUANTIZED),
    _Claim("and so finds more, before training", _FOUND_BEFORE, _QUANTIZED),
    _Claim("and after it", _FOUND, [(BF16, SAME_RATE), *_QUANTIZED]),
    _Claim("noise adds to the exploration", _MIXED, _AT_ONE_RATE + _ELSEWHERE),
    _Claim("with noise the reward grows faster", _REWARD, _AT_ONE_RATE + _ELSEWHERE),
    _Claim(
        "and the final accuracy is higher", _ACCURACY, _AT_ONE_RATE + _AT_BEST_RATES + _ELSEWHERE
    ),
    _Claim("it is higher than with 16-bit LoRA", _ACCURACY, [(BF16, arm) for arm in _NOISY]),
    _Claim("it is higher than with QLoRA", _ACCURACY, [("nf4-lora", arm) for arm in _NOISY]),
    _Claim(
        "it matches full fine-tuning", _ACCURACY, [("bf16-full", arm) for arm in _NOISY], equal=True
    ),
]


def claims_table(runs: Runs, results: pathlib.Path) -> str:
    """A line for each comparison whose arms have run, with a verdict.

    Args:
        runs: the runs by arm.
        results: folder of gsm8k.json.
    """
    lines = []
    for claim in _CLAIMS:
        label = f"{claim.text} ({claim.measure.name})"
        for reference, arm in claim.pairs:
            if reference in runs and arm in runs:
                pair = runs[reference], runs[arm]
                problems, seeds = claim.measure.compare(*pair, results)
                spec = claim.measure.spec
                lines.append(
                    [
                        label,
                        f"`{reference}` -> `{arm}`",
                        difference_text(problems, spec),
                        difference_text(seeds, spec),
                        _verdict(claim, problems, seeds, pair),
                    ]
                )
                label = ""
        if label:
            lines.append([label, "not run yet", "", "", ""])
    header = ("claim of the paper", "from -> to", "over problems", "over seeds", "verdict")
    return markdown(header, lines)


def missing_arms(runs: Runs) -> list[str]:
    """The arms of the claims that have not run."""
    arms = [arm for claim in _CLAIMS for pair in claim.pairs for arm in pair]
    return [arm for arm in dict.fromkeys(arms) if arm not in runs]


def _verdict(
    claim: _Claim,
    problems: Difference | None,
    seeds: Difference | None,
    pair: tuple[list[Row], list[Row]],
) -> str:
    """What the intervals say of a claim, and in brackets what to keep in mind."""
    notes = []
    difference = seeds or problems
    verdict = _sign(difference, equal=claim.equal)
    by_problems = _sign(problems, equal=claim.equal)
    if seeds is None and not claim.measure.before:
        notes.append("few seeds")
    elif seeds and verdict == "undecided" != by_problems:
        notes.append(f"{by_problems} by these seeds")
    same_rate = pair[0][0]["learning_rate"] == pair[1][0]["learning_rate"]
    if not (same_rate or claim.measure.before or pair[0][0]["arm"] == "bf16-full"):
        notes.append("another rate")
    if any(rows[0]["arm"].startswith("nvfp4-rounded") for rows in pair):
        notes.append("rounded")
    return verdict + (f" ({'; '.join(notes)})" if notes else "")


def _sign(difference: Difference | None, *, equal: bool) -> str:
    if difference is None:
        return "undecided"
    if difference.low <= 0 <= difference.high:
        return "not contradicted" if equal else "undecided"
    if np.sign(difference.value) < 0:
        return "contradicted"
    return "exceeded" if equal else "supported"
