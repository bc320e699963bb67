"""What the runs of benchmarks/results/gsm8k.json say, as tables and sentences."""

import itertools
import json
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from benchmarks.differences import (
    FEWEST_SEEDS,
    Difference,
    Row,
    Runs,
    difference_text,
    ends,
    entropy_difference,
    evaluation,
    first_entropies,
    halves,
    mean_sample,
    over_problems,
    over_seeds,
    sample_values,
    unpaired,
)
from benchmarks.result_tables import markdown
from benchmarks.step_tables import short_name
from qerl_jax.run.statistics import half_interval

BF16, ROUNDED, CALIBRATED = "bf16-lora", "nvfp4-rounded-lora", "nvfp4-lora"
# At the rate of the arms with noise in calibrated NVFP4: without noise, and with more entropy.
SAME_RATE, _CONTROLS = "nvfp4-lora-lr5e-5", ("nvfp4-lora-temperature", "nvfp4-lora-entropy")
# How the pages call the weights of these arms.
WEIGHTS = {BF16: "bf16", CALIBRATED: "calibrated NVFP4", ROUNDED: "NVFP4 rounded to nearest"}

# Arms with noise, by what follows the name of the arm without it.
NOISE = {
    "-aqn-paper": "with the paper's schedule",
    "-aqn-kl0.01": "at a KL of 0.01",
}


# --- What four bits cost ------------------------------------------------------------------------


def cost_sentence(runs: Runs) -> str:
    """What four bits cost, with intervals, in a few sentences."""
    arms = [arm for arm in WEIGHTS if arm in runs]
    if BF16 not in runs or len(arms) < 2:
        return "What four bits cost was not measured."
    first = runs[BF16][0]
    before, after = (
        [f"{np.mean([row[name] for row in runs[arm]]):.1f}" for arm in arms]
        for name in ("pass1_start", "pass1_end")
    )
    weights = [f"{value} % in {WEIGHTS[arm]}" for value, arm in zip(before, arms, strict=True)]
    sentences = [
        f"Of {first['n']:,} GSM8K test problems Qwen2.5-Coder-1.5B solves {_series(weights)}; "
        f"after {first['steps']} steps with LoRA {_series(after)} %."
    ]
    for arm, name in ((CALIBRATED, "Calibrated"), (ROUNDED, "Rounded to nearest")):
        if arm in runs:
            sentences.append(f"{name}, four bits cost {_cost(runs[BF16], runs[arm])}.")
    return " ".join(sentences)


def noise_sentence(runs: Runs) -> str:
    """What adaptive quantization noise gains after training, with intervals, in a few sentences."""
    gains = {base: _gains(base, base, runs) for base in (CALIBRATED, ROUNDED)}
    texts = [f"in {WEIGHTS[base]} by {_gain_text(part)}" for base, part in gains.items() if part]
    if not texts:
        return "What noise gains was not measured."
    sentences = [
        "Adaptive quantization noise (AQN) changes the accuracy after training, in points with "
        f"95 % intervals over seeds, {'; '.join(texts)}."
    ]
    calibrated = f"In {WEIGHTS[CALIBRATED]}, a GPU's default,"
    if not gains[CALIBRATED]:
        sentences.append(f"{calibrated} it was not measured yet.")
    elif all(gain.low <= 0 <= gain.high for gain, _ in gains[CALIBRATED].values()):
        sentences.append(f"{calibrated} no gain differs clearly from 0.")
    compared = [arm for base in gains for arm in (base, *gains[base])]
    same = _gains(SAME_RATE, CALIBRATED, runs)
    if same:
        text = f"at one rate, the gains in {WEIGHTS[CALIBRATED]} are {_gain_text(same)}"
        sentences.append(f"Each arm has its best learning rate; {text}.")
    elif len({runs[arm][0]["learning_rate"] for arm in compared if arm in runs}) > 1:
        sentences.append("Each arm has its best learning rate, so a part may be the rate.")
    return " ".join(sentences)


def _gains(reference: str, base: str, runs: Runs) -> dict[str, tuple[Difference, str]]:
    """How far arms with noise end above a reference, and the text that follows the difference.

    Args:
        reference: the arm that they are compared with.
        base: the arm of the same weights without noise.
        runs: the runs by arm.

    Returns:
        By the name of the arm, of those that have run. Of few seeds a difference is over problems.
    """
    gains = {}
    for suffix, name in NOISE.items():
        arm = f"{base}{suffix}"
        if reference in runs and arm in runs:
            gain, few = over_seeds(ends(runs[reference]), ends(runs[arm])), ""
            if gain is None:
                gain = over_problems(runs[reference], runs[arm])
                few = f" (over problems, {len(runs[arm])} seeds)"
            gains[arm] = gain, f"{few} {name}"
    return gains


def _gain_text(gains: dict[str, tuple[Difference, str]]) -> str:
    return _series([f"{difference_text(gain)}{text}" for gain, text in gains.values()])


def _cost(reference: list[Row], rows: list[Row]) -> str:
    """By how much runs end below others, with intervals."""
    intervals = [
        f"{-difference.high:.1f} to {-difference.low:.1f} over {name}"
        for name, difference in (
            ("problems", over_problems(reference, rows)),
            ("seeds", over_seeds(ends(reference), ends(rows))),
        )
        if difference is not None
    ]
    cost = np.mean(ends(reference)) - np.mean(ends(rows))
    return f"{cost:.1f} points (95 % interval: {', '.join(intervals)})"


def _series(parts: list[str]) -> str:
    return f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0]


def cost_table(runs: Runs, results: pathlib.Path) -> str:
    """The arms that differ in their weights alone, before and after training."""
    lines = []
    for arm in WEIGHTS:
        if arm not in runs:
            lines.append([f"`{arm}`", WEIGHTS[arm], "not run yet", *[""] * 6])
            continue
        rows = runs[arm]
        first, last = first_entropies(rows, results), halves(rows, results, "entropy")[1]
        lines.append(
            [
                f"`{arm}`",
                WEIGHTS[arm],
                str(len(rows)),
                _mean([row["pass1_start"] for row in rows]),
                _mean_and_interval(ends(rows)),
                f"{np.mean(list(first.values())):.3f} -> {np.mean(last):.3f}",
                *(sampled(rows, name) for name in ("pass@16", "pass@64")),
                minutes_text(rows),
            ]
        )
    header = (
        "arm", "weights", "seeds", "pass@1 before", "pass@1 after", "entropy, nats", "pass@16",
        "pass@64", "minutes",
    )  # fmt: skip
    return markdown(header, lines)


def cost_differences(runs: Runs, results: pathlib.Path) -> str:
    """The differences of weights in 4 bits from those in bf16, measure by measure."""
    arms = [arm for arm in (CALIBRATED, ROUNDED) if arm in runs]
    reference = runs[BF16]
    measures: dict[str, Callable[[list[Row]], Difference | None]] = {
        "pass@1 before, over problems": lambda rows: over_problems(reference, rows, "start"),
        "pass@1 after, over problems": lambda rows: over_problems(reference, rows),
        "pass@1 after, over seeds": lambda rows: over_seeds(ends(reference), ends(rows)),
        "entropy of the first step, nats, over seeds": lambda rows: entropy_difference(
            reference, rows, results
        ),
    }
    for name in ("pass@16", "pass@64"):
        measures |= {
            f"{name} before": lambda rows, name=name: unpaired(
                *(mean_sample(part, "start-samples", name) for part in (reference, rows))
            ),
            f"{name} after, over seeds": lambda rows, name=name: over_seeds(
                *(sample_values(part, "samples", name) for part in (reference, rows))
            ),
        }
    lines = []
    for name, difference in measures.items():
        spec = "+.3f" if "nats" in name else "+.1f"
        lines.append([name, *(difference_text(difference(runs[arm]), spec) for arm in arms)])
    return markdown(("difference from `bf16-lora`", *(f"`{arm}`" for arm in arms)), lines)


def exploration_sentence(runs: Runs, results: pathlib.Path) -> str:
    """Whether quantization explores by itself, by the entropy before training."""
    differences = {
        arm: entropy_difference(runs[BF16], runs[arm], results) for arm in WEIGHTS if arm in runs
    }
    rounded, calibrated = differences.get(ROUNDED), differences.get(CALIBRATED)
    if rounded is None:
        return "Whether quantization itself explores was not measured."
    text = (
        "The paper says that quantization itself raises the entropy and so explores. Rounding to "
        f"nearest {_raises(rounded)} before training"
    )
    if calibrated is None:
        return f"{text}; calibrated weights were not measured yet."
    text = f"{text}, calibration to the same format {_raises(calibrated)}."
    if rounded.low > 0 >= calibrated.low:
        text += (
            " Rounding alone supported the claim: the entropy came from the errors of the weights, "
            "not from the four bits."
        )
    return text


def _raises(entropy: Difference) -> str:
    """What a difference of the entropy says of the weights."""
    verb = "does not measurably change"
    if entropy.low > 0 or entropy.high < 0:
        verb = "raises" if entropy.low > 0 else "lowers"
    return f"{verb} it ({difference_text(entropy, '+.3f')} nats)"


def cost_text(runs: Runs, results: pathlib.Path) -> str:
    """The generated part of docs/evidence.md on what four bits cost.

    Args:
        runs: the runs by arm.
        results: folder of gsm8k.json.
    """
    if BF16 not in runs or len(runs.keys() & WEIGHTS.keys()) < 2:
        return cost_sentence(runs)
    parts = [
        cost_sentence(runs),
        cost_table(runs, results),
        cost_differences(runs, results),
        exploration_sentence(runs, results),
    ]
    return "\n\n".join(parts)


def sampled(rows: list[Row], name: str) -> str:
    """A measure of the sampled completions in percent, before and after training."""
    return " -> ".join(
        _mean(sample_values(rows, part, name)) for part in ("start-samples", "samples")
    )


def minutes_text(rows: list[Row]) -> str:
    """Minutes of the steps of a run, by device."""
    minutes: dict[str, list[float]] = {}
    for row in rows:
        minutes.setdefault(short_name(row["about"]["device"]["kind"]), []).append(
            row["device_minutes"]
        )
    return ", ".join(f"{np.mean(values):.1f} ({name})" for name, values in sorted(minutes.items()))


def _mean(values: list[float], spec: str = ".1f") -> str:
    return f"{np.mean(values):{spec}}" if values else "-"


def _mean_and_interval(values: list[float]) -> str:
    enough = len(values) >= FEWEST_SEEDS
    half = f" ± {half_interval(np.array(values)):.1f}" if enough else ""
    return f"{np.mean(values):.1f}{half}"


# --- All arms -----------------------------------------------------------------------------------


def accuracy_table(runs: Runs) -> str:
    """What each arm reaches, as means over its seeds."""
    lines = []
    for arm, rows in runs.items():
        after, before = ([evaluation(row, part) for row in rows] for part in ("end", "start"))
        mismatch = [row["about"]["largest_mismatch_without_noise"] for row in rows]
        present = [value for value in mismatch if value is not None]
        lines.append(
            [
                f"`{arm}`" + (" (main)" if rows[0]["main"] else ""),
                ", ".join(str(row["seed"]) for row in rows),
                f"{rows[0]['learning_rate']:.0e}",
                _mean([row["pass1_start"] for row in rows]),
                _mean_and_interval(ends(rows)),
                _mean([row["ci95"] for row in rows]),
                *(
                    " -> ".join(_well_formed_mean(part, name) for part in (before, after))
                    for name in ("share", "accuracy")
                ),
                _mean([part["mean_tokens"] for part in after], ".0f"),
                f"{max(present):.4f}" if present else "-",
                minutes_text(rows),
            ]
        )
    header = (
        "arm", "seeds", "learning rate", "pass@1 before", "after", "± problems", "right form",
        "accuracy of the right form", "tokens", "largest mismatch", "minutes",
    )  # fmt: skip
    return markdown(header, lines)


def _well_formed_mean(evaluations: list[dict[str, Any]], name: str) -> str:
    values = [part["well_formed"][name] for part in evaluations]
    return _mean([value for value in values if value is not None])


def difference_table(runs: Runs) -> str:
    """The pairs of arms that answer a question, problem by problem and over the seeds."""
    lines = [
        [
            f"`{reference}`",
            f"`{arm}`",
            difference_text(over_problems(runs[reference], runs[arm])),
            difference_text(over_seeds(ends(runs[reference]), ends(runs[arm]))),
        ]
        for reference in runs
        for arm in runs
        if _is_compared(reference, arm)
    ]
    return markdown(["from", "to", "over problems", "over seeds"], lines)


def _is_compared(reference: str, arm: str) -> bool:
    """Whether an arm is compared with another: bf16, its own without noise, and the baselines."""
    if reference == BF16:
        return arm != BF16
    if reference in (CALIBRATED, ROUNDED) and arm.startswith(f"{reference}-"):
        return True
    if reference in (SAME_RATE, *_CONTROLS):
        return _has_the_rate_of(reference, arm)
    if reference in ("nf4-lora", "bf16-full"):
        return arm.startswith("nvfp4-")
    return (reference, arm) == (ROUNDED, CALIBRATED)


def exploration_table(runs: Runs, results: pathlib.Path) -> str:
    """How much each arm explores and what it finds, as means over its seeds.

    Args:
        runs: the runs by arm.
        results: folder of gsm8k.json, beside which the metrics of the runs lie.
    """
    lines = []
    for arm, rows in runs.items():
        first = float(np.mean(list(first_entropies(rows, results).values())))
        entropies, mixed, rewards = (
            [float(np.mean(half)) for half in halves(rows, results, name)]
            for name in ("entropy", "mixed_groups", "reward")
        )
        lines.append(
            [
                f"`{arm}`",
                ", ".join(f"{value:.3f}" for value in (first, *entropies)),
                ", ".join(f"{100 * value:.0f}" for value in mixed),
                ", ".join(f"{value:.3f}" for value in rewards),
                *(sampled(rows, name) for name in ("accuracy", "pass@16", "pass@64")),
            ]
        )
    header = (
        "arm", "entropy: first step, halves", "mixed groups", "reward", "pass@1, sampled",
        "pass@16", "pass@64",
    )  # fmt: skip
    return markdown(header, lines)


def same_rate_table(runs: Runs, results: pathlib.Path) -> str:
    """What noise changes at one learning rate, against none and against other exploration.

    Args:
        runs: the runs by arm.
        results: folder of gsm8k.json.

    Returns:
        A table with a line for each pair of arms that have run; '' without one.
    """
    measures: dict[str, Callable[[list[Row]], list[float]]] = {
        "entropy, nats, first half": lambda rows: halves(rows, results, "entropy")[0],
        "second half": lambda rows: halves(rows, results, "entropy")[1],
        "mixed groups, second half": lambda rows: halves(rows, results, "mixed_groups")[1],
        "pass@64 after, points": lambda rows: sample_values(rows, "samples", "pass@64"),
        "pass@1 after, points": ends,
    }
    lines = []
    for reference, arm in itertools.product((SAME_RATE, *_CONTROLS), runs):
        if reference in runs and _has_the_rate_of(reference, arm):
            cells = (
                difference_text(
                    over_seeds(values(runs[reference]), values(runs[arm])),
                    "+.1f" if "points" in name else "+.3f",
                )
                for name, values in measures.items()
            )
            lines.append([f"`{reference}`", f"`{arm}`", *cells])
    return markdown(("from", "to", *measures), lines) if lines else ""


def _has_the_rate_of(reference: str, arm: str) -> bool:
    """Whether an arm differs from a reference of its learning rate in how it explores."""
    has_noise = arm.startswith(f"{CALIBRATED}-aqn-")
    return has_noise or (reference == SAME_RATE and arm in _CONTROLS)


def grid_table(grids: dict[str, list[dict[str, Any]]]) -> str:
    """Held-out accuracy of each learning rate, by arm."""
    lines = [
        [
            f"`{arm}`",
            ", ".join(f"{row['learning_rate']:.0e}: {row['held_out_end']:.1f}" for row in rows),
            f"{rows[0]['held_out_start']:.1f}",
            f"{rows[0]['steps']}",
            (rows[0]["git"]["commit"] or "unknown")[:8],
        ]
        for arm, rows in grids.items()
    ]
    header = ("arm", "learning rate: at the end", "at the start", "steps", "commit")
    return markdown(header, lines)


def sources_table(runs: Runs) -> str:
    """Seeds, commits and devices of each arm, its calibrated weights, and its first command."""
    lines = []
    for arm, rows in runs.items():
        abouts = [row["about"] for row in rows]
        digests = [(about.get("calibration") or {}).get("digest", "-")[:8] for about in abouts]
        lines.append(
            [
                f"`{arm}`",
                ", ".join(str(row["seed"]) for row in rows),
                _distinct((about["git"]["commit"] or "unknown")[:8] for about in abouts),
                _distinct(short_name(about["device"]["kind"]) for about in abouts),
                _distinct(digests),
                f"`{abouts[0]['command']}`",
            ]
        )
    header = ("arm", "seeds", "commits", "devices", "calibrated weights", "command")
    return markdown(header, lines)


def _distinct(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))


def served_text(results: pathlib.Path) -> str:
    """What other engines reach with a base in NVFP4 and a trained adapter, which they loaded.

    Args:
        results: folder of the results of `benchmarks.peers.serve`; '' where it has none.
    """
    sentences = []
    for engine in ("vllm", "transformers"):
        path = results / f"served_{engine}.json"
        if not path.exists():
            continue
        result = json.loads(path.read_text(encoding="utf-8"))
        parts = result["difference"]["value"], *result["difference"]["interval"]
        difference = Difference(*(100 * part for part in parts))
        sentences.append(
            f"{result['packages']}: {100 * result[engine]['value']:.1f} % of {result['problems']} "
            f"test problems, here {100 * result['here']['value']:.1f} %, a difference of "
            f"{difference_text(difference)} points (commit {result['commit'][:8]})."
        )
    if not sentences:
        return ""
    start = "A base in NVFP4 and its trained adapter, exported, in other engines, greedily "
    return f"{start}(`benchmarks.peers.serve`): {' '.join(sentences)}"
