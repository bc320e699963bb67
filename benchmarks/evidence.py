"""Draws the figures of docs/evidence.md, and writes its tables, for `benchmarks.tables`.

They are made of benchmarks/results/gsm8k.json and of the metrics of its runs, gsm8k/*.jsonl.gz. The
description of a figure holds its data as JSON, or for the curves their digest.
"""

import hashlib
import json
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import long_runs, pictures
from benchmarks.claims import claims_table, missing_arms
from benchmarks.differences import FEWEST_SEEDS, evaluation, runs_by_arm, steps_of
from benchmarks.evidence_tables import (
    accuracy_table,
    cost_text,
    difference_table,
    exploration_table,
    grid_table,
    same_rate_table,
    served_text,
    sources_table,
)
from benchmarks.gsm8k import read_results
from benchmarks.result_tables import replace_part

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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


# --- Text ---------------------------------------------------------------------------------------


def page_parts(content: dict[str, Any], results: pathlib.Path) -> dict[str, str]:
    """The generated parts of docs/evidence.md by name.

    Args:
        content: content of gsm8k.json.
        results: its folder.
    """
    runs = runs_by_arm(content)
    claims = [claims_table(runs, results)]
    if missing := missing_arms(runs):
        claims.append(f"Not run yet: {', '.join(f'`{arm}`' for arm in missing)}.")
    return {
        "cost": cost_text(runs, results),
        "noise": same_rate_table(runs, results) or "Not measured yet.",
        "long": _long_text(results),
        "math": _math_text(results),
        "evidence": _results_text(content, results),
        "claims": "\n\n".join(claims),
    }


def _long_text(results: pathlib.Path) -> str:
    """What is said of the runs of many steps."""
    rows = long_runs.read_rows(results)
    if not rows:
        return "No long run yet."
    parts = [
        f"Greedy accuracy on {rows[0]['problems']} test problems in percent, a number for each "
        f"seed ({_cards_and_commits(rows)}; runs shared a card, so that minutes are more than "
        "those of a run alone):",
        long_runs.table(rows),
        long_runs.ends_text(rows),
        "![Accuracy of long runs](evidence_steps.svg)",
    ]
    if noise := long_runs.noise_table(rows):
        parts += ["What noise changes at the same learning rate, over seeds:", noise]
    return "\n\n".join(filter(None, parts))


def _math_text(results: pathlib.Path) -> str:
    """What is said of the runs on competition mathematics."""
    rows = long_runs.read_rows(results, long_runs.MATH)
    if not rows:
        return "No run yet."
    return "\n\n".join(
        [
            f"Greedy accuracy on the {rows[0]['problems']} problems of MATH-500 in percent, a "
            f"number for each seed ({_cards_and_commits(rows)}; runs shared a card at first):",
            long_runs.table(rows),
            "Training, means over the seeds; the length penalty is 0 for a completion that ends "
            f"before the buffer, and -1 at the limit. A step trains on "
            f"{rows[0]['config']['rollout']['prompts_per_step']} groups:",
            long_runs.metrics_table(rows),
            "![Training on competition mathematics](evidence_math.svg)",
        ]
    )


def _cards_and_commits(rows: Sequence[dict[str, Any]]) -> str:
    """The cards and the commits of runs."""
    cards = ", ".join(sorted({row["device"]["kind"] for row in rows}))
    commits = ", ".join(sorted({row["git"]["commit"][:8] for row in rows}))
    return f"{cards}; commit {commits}"


def _results_text(content: dict[str, Any], results: pathlib.Path) -> str:
    """The tables of all arms."""
    runs, parts = runs_by_arm(content), []
    if content["grids"]:
        parts += [
            "Greedy accuracy on the held-out training problems in percent, by learning rate:",
            grid_table(content["grids"]),
        ]
    if not runs:
        return "\n\n".join([*parts, "No arm has run yet."])
    problems = ", ".join(sorted({str(row["n"]) for row in content["rows"]}))
    served = served_text(results)
    return "\n\n".join(
        [
            *parts,
            f"Greedy accuracy on {problems} test problems, in percent. A mean over "
            f"{FEWEST_SEEDS} seeds or more has half of its 95 % interval by Student's t; "
            "`± problems` is half of the interval of one run over the problems (Wilson). The "
            "mismatch is the mean absolute difference of the log-probabilities of rollout and "
            "trainer, the largest of all steps without noise. Minutes are those of the steps.",
            accuracy_table(runs),
            f"Differences in points, over seeds where both arms have {FEWEST_SEEDS}:",
            difference_table(runs),
            "Exploration: the entropy in nats of the first step, and means over each half of the "
            "steps of the entropy, the share in percent of mixed groups, and the reward. The "
            "rollouts of an arm with noise are noisy; pass@k, before and after training, is "
            "without noise.",
            exploration_table(runs, results),
            *([served] if served else []),
            "![Curves of the arms](evidence_curves.svg)",
            "![Accuracy of the arms](evidence_accuracy.svg)",
            "Where the rows come from. The command is that of the first seed; the others differ in "
            "the seed and the folder.",
            sources_table(runs),
        ]
    )


# --- Figures ------------------------------------------------------------------------------------


def curves_data(content: dict[str, Any], results: pathlib.Path) -> dict[str, Any]:
    """For each panel and arm, the values of each seed by step; None where nothing was measured."""
    data: dict[str, Any] = {panel: {} for panel in _PANELS}
    for row in content["rows"]:
        steps = steps_of(row, results)
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
        samples = [evaluation(row, "samples") for row in rows]
        ks = sorted(int(name[5:]) for name in samples[0] if name.startswith("pass@"))
        pass_at = {k: np.mean([sample[f"pass@{k}"]["value"] for sample in samples]) for k in ks}
        data[arm] = {
            "start": round(float(np.mean([row["pass1_start"] for row in rows])), 2),
            "ends": [round(row["pass1_end"], 2) for row in rows],
            "ci95": round(float(np.mean([row["ci95"] for row in rows])), 2),
            "pass_at": {
                "1": round(float(np.mean([sample["accuracy"]["value"] for sample in samples])), 2)
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
            axes.plot(steps, _smooth(mean), **_style(number), linewidth=1.8, label=arm)
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
    for number, part in enumerate(data.values()):
        style = _style(number)
        color = style["color"]
        mean = float(np.mean(part["ends"]))
        left.plot(part["start"], number, "o", color="white", markeredgecolor=color)
        left.errorbar(mean, number, xerr=part["ci95"], fmt="D", color=color, capsize=3)
        left.plot(part["ends"], [number + 0.25] * len(part["ends"]), ".", color=color)
        ks = [int(k) for k in part["pass_at"]]
        right.plot(ks, list(part["pass_at"].values()), **style, marker="o", markersize=3)
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


def _style(number: int) -> dict[str, str]:
    """The line of an arm; ten have a color of their own, and the next ten dashes."""
    return {"color": f"C{number % 10}", "linestyle": ("-", "--")[number // 10]}


def _smooth(values: np.ndarray) -> np.ndarray:
    """Moving average over up to `_WINDOW` values, shorter at both ends."""
    weights = np.ones(min(_WINDOW, len(values)))
    sums = np.convolve(values, weights, mode="same")
    return sums / np.convolve(np.ones(len(values)), weights, mode="same")


def write_evidence(results: pathlib.Path, docs: pathlib.Path) -> None:
    """Writes the generated parts of evidence.md and, if there are runs, the figures."""
    content, page = read_results(results), docs / "evidence.md"
    text = page.read_text(encoding="utf-8")
    for name, part in page_parts(content, results).items():
        text = replace_part(text, name, part, page="docs/evidence.md")
    page.write_text(text, encoding="utf-8")
    if not content["rows"]:
        return
    curves, accuracy = curves_data(content, results), accuracy_data(content)
    pictures.save(draw_curves(curves), docs / "evidence_curves.svg", {"sha256": digest(curves)})
    pictures.save(draw_accuracy(accuracy), docs / "evidence_accuracy.svg", accuracy)
    if long := long_runs.picture_data(long_runs.read_rows(results)):
        pictures.save(long_runs.draw(long), docs / "evidence_steps.svg", long)
    if rows := long_runs.read_rows(results, long_runs.MATH):
        metrics = long_runs.metrics_data(rows)
        pictures.save(long_runs.draw_metrics(metrics), docs / "evidence_math.svg", metrics)
