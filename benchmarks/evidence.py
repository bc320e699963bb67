"""Draws the figures of docs/evidence.md, and writes its tables, from benchmarks/results/.

    uv run python -m benchmarks.evidence

reads gsm8k.json and the metrics of its runs, gsm8k/*.jsonl.gz, and writes docs/evidence_curves.svg,
docs/evidence_accuracy.svg and the generated part of docs/evidence.md. The description of a figure
holds its data as JSON, or for the curves their digest.
"""

import gzip
import hashlib
import json
import pathlib
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import pictures
from benchmarks.gsm8k import RESULTS, metrics_file, read_results, run_name
from benchmarks.result_tables import markdown
from benchmarks.tables import replace_part
from qerl_jax.run.statistics import half_interval, paired_difference

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DOCS = pathlib.Path(__file__).resolve().parents[1] / "docs"
# Arms that the others are compared with, one after the other: 16 bits, NVFP4 without noise, QLoRA
# and full fine-tuning.
_REFERENCES = ("bf16-lora", "nvfp4-lora", "nf4-lora", "bf16-full")
# Panels of the curves: key of the metrics, label, and whether zeros are left out.
_PANELS = {
    "accuracy": "accuracy at temperature 1",
    "entropy": "entropy, nats",
    "mixed_groups": "share of mixed groups",
    "noise_kl": "KL(noisy, clean), nats",
    "length": "completion length, tokens",
    "logprob_diff_mean": "rollout against trainer",
}
_WINDOW = 5  # steps of the moving average of the curves
_FEWEST_SEEDS = 3  # that have an interval; two seeds that end alike would have none at all

Runs = dict[str, list[dict[str, Any]]]  # arm -> its runs, a row of gsm8k.json with `about` each


def runs_by_arm(content: dict[str, Any]) -> Runs:
    """The rows of gsm8k.json by arm, each with what else is known of its run."""
    runs: Runs = {}
    for row in content["rows"]:
        about = content["runs"][run_name(row["arm"], row["seed"])]
        runs.setdefault(row["arm"], []).append(row | {"about": about})
    return runs


# --- Tables -------------------------------------------------------------------------------------


def accuracy_table(runs: Runs) -> str:
    """What each arm reaches, as means over its seeds."""
    lines = []
    for arm, rows in runs.items():
        ends = [_evaluation(row, "end") for row in rows]
        starts = [_evaluation(row, "start") for row in rows]
        mismatch = [row["about"]["largest_mismatch_without_noise"] for row in rows]
        present = [value for value in mismatch if value is not None]
        lines.append(
            [
                f"`{arm}`" + (" (main)" if rows[0]["main"] else ""),
                ", ".join(str(row["seed"]) for row in rows),
                f"{rows[0]['learning_rate']:.0e}",
                _mean([row["pass1_start"] for row in rows]),
                _mean_and_interval([row["pass1_end"] for row in rows]),
                _mean([row["ci95"] for row in rows]),
                f"{_well_formed_mean(starts, 'share')} -> {_well_formed_mean(ends, 'share')}",
                f"{_well_formed_mean(starts, 'accuracy')} -> {_well_formed_mean(ends, 'accuracy')}",
                _mean([row["pass16"] for row in rows]),
                _mean([end["mean_tokens"] for end in ends], ".0f"),
                f"{max(present):.4f}" if present else "-",
                _mean([row["device_minutes"] for row in rows]),
            ]
        )
    header = (
        "arm", "seeds", "learning rate", "pass@1 at the start", "at the end", "± problems",
        "right form", "accuracy of the right form", "pass@16", "tokens", "largest mismatch",
        "minutes",
    )  # fmt: skip
    return markdown(header, lines)


def difference_table(runs: Runs) -> str:
    """Every pair of an arm and a reference, problem by problem and over the seeds."""
    lines = []
    for number, reference in enumerate(_REFERENCES):
        if reference not in runs:
            continue
        for arm, rows in runs.items():
            if arm not in _REFERENCES[: number + 1]:
                pair = rows, runs[reference]
                names = f"`{reference}`", f"`{arm}`"
                lines.append([*names, _over_problems(*pair), _over_seeds(*pair)])
    return markdown(["from", "to", "over problems", "over seeds"], lines)


def exploration_table(runs: Runs, results: pathlib.Path) -> str:
    """How much each arm explores and what it finds, as means over its seeds.

    Args:
        runs: the runs by arm.
        results: folder of gsm8k.json, beside which the metrics of the runs lie.
    """
    lines = []
    for arm, rows in runs.items():
        metrics = [_steps(row, results) for row in rows]
        first = float(np.mean([steps[0]["entropy"] for steps in metrics]))
        mixed = [100 * (1 - share) for share in _halves(metrics, "advantage_zero_groups")]
        lines.append(
            [
                f"`{arm}`",
                ", ".join(f"{value:.3f}" for value in (first, *_halves(metrics, "entropy"))),
                ", ".join(f"{value:.0f}" for value in mixed),
                ", ".join(f"{value:.3f}" for value in _halves(metrics, "reward")),
                *(_sampled(rows, name) for name in ("accuracy", "pass@16", "pass@64")),
            ]
        )
    header = (
        "arm", "entropy: first step, halves", "mixed groups", "reward", "pass@1, sampled",
        "pass@16", "pass@64",
    )  # fmt: skip
    return markdown(header, lines)


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
    """Commit, device and command of each run."""
    lines = [
        [
            f"`{run_name(arm, row['seed'])}`",
            (row["about"]["git"]["commit"] or "unknown")[:8],
            row["about"]["device"]["kind"],
            f"`{row['about']['command']}`",
        ]
        for arm, rows in runs.items()
        for row in rows
    ]
    return markdown(("run", "commit", "device", "command"), lines)


def results_text(content: dict[str, Any], results: pathlib.Path) -> str:
    """The generated part of docs/evidence.md.

    Args:
        content: content of gsm8k.json.
        results: its folder.
    """
    runs, parts = runs_by_arm(content), []
    if content["grids"]:
        parts += [
            "Greedy accuracy on the held-out training problems in percent, by learning rate:",
            grid_table(content["grids"]),
        ]
    if not runs:
        return "\n\n".join([*parts, "No arm has run yet."])
    problems = ", ".join(sorted({str(row["n"]) for row in content["rows"]}))
    return "\n\n".join(
        [
            *parts,
            f"Greedy accuracy on {problems} test problems, in percent. A mean over "
            f"{_FEWEST_SEEDS} seeds or more has half of its 95 % interval by Student's t; "
            "`± problems` is half of the interval of one run over the problems (Wilson). The "
            "mismatch is the mean absolute difference of the "
            "log-probabilities of rollout and trainer, the largest of all steps without noise.",
            accuracy_table(runs),
            "Differences in points from one arm to another: over problems with the interval of the "
            "paired difference of the means over seeds, and over seeds with the interval by "
            f"Welch's t, where both arms have {_FEWEST_SEEDS} seeds.",
            difference_table(runs),
            "Exploration: the entropy in nats of the first step, and means over each half of the "
            "steps of the entropy, the share in percent of mixed groups, and the reward. A group "
            "is mixed if the rewards of its completions differ: some are right and some are "
            "wrong, or some lack the right form. The rollouts of an arm with noise are noisy. "
            "pass@k at temperature 1 is of 200 test problems, before and after training, without "
            "noise.",
            exploration_table(runs, results),
            "![Curves of the arms](evidence_curves.svg)",
            "![Accuracy of the arms](evidence_accuracy.svg)",
            sources_table(runs),
        ]
    )


def _evaluation(row: dict[str, Any], part: str) -> dict[str, Any]:
    return row["about"]["evaluations"][part]


def _halves(metrics: list[list[dict[str, Any]]], name: str) -> tuple[float, float]:
    """Means of a metric over the first and over the second half of the steps, over all seeds."""
    values = [[step[name] for step in steps] for steps in metrics]
    first = np.mean([np.mean(part[: (len(part) + 1) // 2]) for part in values])
    second = np.mean([np.mean(part[len(part) // 2 :]) for part in values])
    return float(first), float(second)


def _sampled(rows: list[dict[str, Any]], name: str) -> str:
    """A measure of the sampled completions in percent, before and after training."""
    start, end = (
        [_evaluation(row, part)[name]["value"] for row in rows]
        for part in ("start-samples", "samples")
    )
    return f"{_mean(start)} -> {_mean(end)}"


def _mean(values: list[float], spec: str = ".1f") -> str:
    return f"{np.mean(values):{spec}}" if values else "-"


def _mean_and_interval(values: list[float]) -> str:
    enough = len(values) >= _FEWEST_SEEDS
    half = f" ± {half_interval(np.array(values)):.1f}" if enough else ""
    return f"{np.mean(values):.1f}{half}"


def _well_formed_mean(evaluations: list[dict[str, Any]], name: str) -> str:
    values = [evaluation["well_formed"][name] for evaluation in evaluations]
    return _mean([value for value in values if value is not None])


def _over_problems(rows: list[dict[str, Any]], reference: list[dict[str, Any]]) -> str:
    """The paired difference, where the answers of all runs were recorded by problem."""
    if any("correct" not in _evaluation(row, "end") for row in (*rows, *reference)):
        return "not recorded"
    mean, low, high = paired_difference(_by_problem(rows), _by_problem(reference))
    return f"{100 * mean:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"


def _by_problem(rows: list[dict[str, Any]]) -> np.ndarray:
    """[P] mean accuracy of each problem at the end, over the seeds."""
    digits = [list(map(int, _evaluation(row, "end")["correct"])) for row in rows]
    return np.array(digits, np.float64).mean(axis=0)


def _over_seeds(rows: list[dict[str, Any]], reference: list[dict[str, Any]]) -> str:
    """The difference of the means with its interval by Welch's t, where both have enough seeds."""
    if (seeds := min(len(rows), len(reference))) < _FEWEST_SEEDS:
        return "one seed" if seeds == 1 else f"{seeds} seeds"
    from scipy import stats

    a, b = ([row["pass1_end"] for row in part] for part in (rows, reference))
    interval = stats.ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
    return f"{np.mean(a) - np.mean(b):+.1f} [{interval.low:+.1f}, {interval.high:+.1f}]"


# --- Figures ------------------------------------------------------------------------------------


def read_metrics(path: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of the steps in a compressed metrics.jsonl."""
    lines = gzip.decompress(path.read_bytes()).decode("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [row for row in rows if "eval_seconds" not in row]


def _steps(row: dict[str, Any], results: pathlib.Path) -> list[dict[str, Any]]:
    """The metrics of the steps of a row of gsm8k.json."""
    return read_metrics(metrics_file(results, run_name(row["arm"], row["seed"])))


def curves_data(content: dict[str, Any], results: pathlib.Path) -> dict[str, Any]:
    """For each panel and arm, the values of each seed by step; None where nothing was measured."""
    data: dict[str, Any] = {panel: {} for panel in _PANELS}
    for row in content["rows"]:
        steps = _steps(row, results)
        for step in steps:
            step["mixed_groups"] = 1.0 - step["advantage_zero_groups"]
        for panel in _PANELS:
            values = [step.get(panel) for step in steps]
            series = [None if value is None else float(f"{value:.4g}") for value in values]
            data[panel].setdefault(row["arm"], []).append(series)
    return data


def digest(data: dict[str, Any]) -> str:
    """Identifies the data of a figure."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def accuracy_data(content: dict[str, Any]) -> dict[str, Any]:
    """For each arm the accuracy of each seed, the mean at the start, and pass@k."""
    data = {}
    for arm, rows in runs_by_arm(content).items():
        samples = [_evaluation(row, "samples") for row in rows]
        ks = sorted(int(name[5:]) for name in samples[0] if name.startswith("pass@"))
        pass_at = {
            k: np.mean([evaluation[f"pass@{k}"]["value"] for evaluation in samples]) for k in ks
        }
        data[arm] = {
            "start": round(float(np.mean([row["pass1_start"] for row in rows])), 2),
            "ends": [round(row["pass1_end"], 2) for row in rows],
            "ci95": round(float(np.mean([row["ci95"] for row in rows])), 2),
            "pass_at": {
                "1": round(
                    float(np.mean([evaluation["accuracy"]["value"] for evaluation in samples])), 2
                )
            }
            | {str(k): round(float(value), 2) for k, value in pass_at.items()},
        }
    return data


def draw_curves(data: dict[str, Any]) -> "Figure":
    """Six panels over the steps; a thick line is the mean of an arm's seeds, smoothed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6.4), layout="constrained")
    all_axes = figure.subplots(2, 3).reshape(-1)
    for axes, (panel, label) in zip(all_axes, _PANELS.items(), strict=True):
        for number, (arm, seeds) in enumerate(data[panel].items()):
            length = max(map(len, seeds))
            table = [seed + [None] * (length - len(seed)) for seed in seeds]
            values = np.array(table, np.float64)  # None becomes NaN.
            measured = np.isfinite(values).any(axis=0)
            if not measured.any() or (panel == "noise_kl" and not np.nansum(values)):
                continue
            steps = 1 + np.flatnonzero(measured)
            mean = np.nanmean(values[:, measured], axis=0)
            axes.plot(steps, _smooth(mean), color=f"C{number % 10}", linewidth=1.8, label=arm)
        axes.set(xlabel="step", title=label)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e6e6e6")
    handles, labels = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    return figure


def draw_accuracy(data: dict[str, Any]) -> "Figure":
    """Accuracy at the start and of each seed at the end; pass@k of each arm."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 1.8 + 0.36 * len(data)), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, (arm, part) in enumerate(data.items()):
        color = f"C{number % 10}"
        mean = float(np.mean(part["ends"]))
        left.plot(part["start"], number, "o", color="white", markeredgecolor=color)
        left.errorbar(mean, number, xerr=part["ci95"], fmt="D", color=color, capsize=3)
        left.plot(part["ends"], [number + 0.25] * len(part["ends"]), ".", color=color)
        ks = [int(k) for k in part["pass_at"]]
        right.plot(ks, list(part["pass_at"].values()), "o-", color=color, markersize=3, label=arm)
    left.set_yticks(range(len(data)), list(data))
    left.set_ylim(len(data) - 0.5, -0.5)
    left.set(title="greedy accuracy, %: start (open), mean and seeds at the end")
    right.set(xscale="log", xlabel="k", title="pass@k at temperature 1, %")
    right.set_xticks(ks, [str(k) for k in ks])
    right.set_xticks([], minor=True)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e6e6e6")
    return figure


def _smooth(values: np.ndarray) -> np.ndarray:
    """Moving average over up to `_WINDOW` values, shorter at both ends."""
    weights = np.ones(min(_WINDOW, len(values)))
    sums = np.convolve(values, weights, mode="same")
    return sums / np.convolve(np.ones(len(values)), weights, mode="same")


def write_page(results: pathlib.Path, docs: pathlib.Path) -> None:
    """Writes the generated part of evidence.md and, if there are runs, the figures."""
    content, page = read_results(results), docs / "evidence.md"
    text = replace_part(
        page.read_text(encoding="utf-8"),
        "evidence",
        results_text(content, results),
        page="docs/evidence.md",
        command="benchmarks.evidence",
    )
    page.write_text(text, encoding="utf-8")
    if not content["rows"]:
        return
    curves, accuracy = curves_data(content, results), accuracy_data(content)
    pictures.save(draw_curves(curves), docs / "evidence_curves.svg", {"sha256": digest(curves)})
    pictures.save(draw_accuracy(accuracy), docs / "evidence_accuracy.svg", accuracy)


if __name__ == "__main__":
    write_page(RESULTS, _DOCS)
