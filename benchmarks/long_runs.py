"""Collects runs of many steps, scored as they go: accuracy by step and by minute.

    for seed in 0 1 2; do for arm in bf16-lora nvfp4-lora nvfp4-lora-aqn-paper; do
        uv run --extra cuda python -m experiments.grpo_gsm8k \
            --config=experiments/arms/evidence.py:$arm --config.seed=$seed --config.steps=200 \
            --config.eval.every=40 --config.eval.problems=1000 \
            --config.data.eval_path=gsm8k_test_first1000.jsonl --workdir=runs/long/$arm-s$seed
    done; done
    uv run python -m benchmarks.long_runs runs/long/*

The result is benchmarks/results/long_runs.json, one row for each run; a run replaces the row of the
same arm, seed and learning rate. Sixty steps, as in gsm8k.json, cannot tell an arm that learns more
from one that only learns faster. Minutes are those of the steps, without evaluations.

`--name=dapo_math` collects the arms of experiments/arms/evidence_math.py in dapo_math.json.
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.differences import FEWEST_SEEDS, difference_text, over_seeds
from benchmarks.result_tables import markdown
from benchmarks.run_summary import describe_run
from benchmarks.step import merge
from qerl_jax.errors import UserError
from qerl_jax.run.folder import RunFolder
from qerl_jax.run.metrics import read_evaluations, read_steps
from qerl_jax.system import json_file
from qerl_jax.system.paths import user_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS = pathlib.Path("benchmarks/results")
GSM8K, MATH = "long_runs", "dapo_math"
_WINDOW = 10  # steps over which the metrics of a run are averaged
# Metric -> its name in the table and in the picture of the metrics.
_METRICS = {
    "reward": "reward",
    "accuracy": "accuracy",
    "length": "tokens of a completion",
    "finished": "finished completions",
    "reward/overlong": "length penalty",
    "sampled_groups": "groups sampled",
    "advantage_zero_groups": "groups of equal reward",
    "entropy": "entropy, nats",
}


def row_of(run: pathlib.Path) -> dict[str, Any]:
    """The row of a run: accuracy in percent and minutes by step, and means of metrics of 10 steps.

    Raises:
        UserError: the run is not finished, or was not evaluated.
    """
    folder = RunFolder(run)
    if folder.finished_steps() is None:
        raise UserError(f"{run}: it is not finished; continue it with its command")
    about, steps = describe_run(run), read_steps(folder.metrics)
    evaluations = read_evaluations(folder.metrics)
    if len(evaluations) < 2:
        raise UserError(f"{run}: it has {len(evaluations)} evaluations; set eval.every")
    config, seconds = about["config"], np.cumsum([0.0, *(step["step_seconds"] for step in steps)])
    return {
        "arm": config["preset"],
        "seed": config["seed"],
        "steps": len(steps),
        "problems": config["eval"]["problems"],
        "learning_rate": config["optimizer"]["learning_rate"],
        "accuracy": {str(step): 100 * value for step, value in evaluations.items()},
        "minutes": {str(step): float(seconds[step]) / 60 for step in evaluations},
        "means": {
            name: [
                float(np.mean([step[name] for step in steps[start : start + _WINDOW]]))
                for start in range(0, len(steps), _WINDOW)
            ]
            for name in _METRICS
            if name in steps[0]
        },
        **about,
    }


def read_rows(results: pathlib.Path, name: str = GSM8K) -> list[dict[str, Any]]:
    """The rows of NAME.json in a folder of results; none where there is no file yet."""
    path = results / f"{name}.json"
    return json_file.read_object(path)["rows"] if path.exists() else []


def by_arm(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows by arm and learning rate, as in 'nvfp4-lora, 5e-05', in their order."""
    arms: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        arms.setdefault(_label(row["arm"], row["learning_rate"]), []).append(row)
    return arms


def _label(arm: str, learning_rate: float) -> str:
    return f"{arm}, {learning_rate:.0e}"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Accuracy of every seed of each arm by step, and the minutes of the steps."""
    steps = sorted({step for row in rows for step in row["accuracy"]}, key=int)
    lines = [
        [
            f"`{runs[0]['arm']}`",
            f"{runs[0]['learning_rate']:.0e}",
            *(", ".join(f"{run['accuracy'][step]:.1f}" for run in runs) for step in steps),
            ", ".join(f"{run['minutes'][steps[-1]]:.0f}" for run in runs),
        ]
        for runs in by_arm(rows).values()
    ]
    names = ("before" if step == "0" else f"step {step}" for step in steps)
    return markdown(("arm", "learning rate", *names, "minutes"), lines)


def ends_text(rows: Sequence[dict[str, Any]]) -> str:
    """How far arms end from the first one, with intervals; '' where none has enough seeds."""
    ends = {arm: [_end(run) for run in runs] for arm, runs in by_arm(rows).items()}
    (first, reference), *others = ends.items()
    differences = {arm: over_seeds(reference, values) for arm, values in others}
    texts = [f"`{arm}` {difference_text(d)}" for arm, d in differences.items() if d is not None]
    if not texts:
        return ""
    return f"Points at the end above `{first}`, with 95 % intervals over seeds: {', '.join(texts)}."


def metrics_table(rows: Sequence[dict[str, Any]]) -> str:
    """Metrics of the first and of the last ten steps, means over the seeds of each arm."""
    arms = by_arm(rows)

    def change(name: str, runs: Sequence[dict[str, Any]]) -> str:
        first, last = (np.mean([run["means"][name][end] for run in runs]) for end in (0, -1))
        return f"{first:.3g} -> {last:.3g}"

    lines = [[label, *(change(name, runs) for runs in arms.values())]
             for name, label in _METRICS.items()]  # fmt: skip
    return markdown(("first ten steps -> last ten", *(f"`{arm}`" for arm in arms)), lines)


def noise_table(rows: Sequence[dict[str, Any]]) -> str:
    """What noise changes at the same learning rate, with intervals over seeds.

    Returns:
        A table with a column for each arm with noise that has enough seeds, and enough of them
        without noise at its learning rate; '' without such an arm.
    """
    arms = by_arm(rows)
    pairs = {}
    for arm, runs in arms.items():
        quiet, noise, _ = runs[0]["arm"].partition("-aqn-")
        reference = arms.get(_label(quiet, runs[0]["learning_rate"]), [])
        if noise and min(len(runs), len(reference)) >= FEWEST_SEEDS:
            pairs[arm] = (reference, runs)
    if not pairs:
        return ""

    def change(label: str, pair: tuple[list[dict[str, Any]], ...]) -> str:
        values = ([_measures(run)[label] for run in runs] for runs in pair)
        return difference_text(over_seeds(*values), "+.3g")

    lines = [
        [label, *(change(label, pair) for pair in pairs.values())] for label in _measures(rows[0])
    ]
    return markdown(("difference from the arm without noise", *(f"`{a}`" for a in pairs)), lines)


def _measures(run: dict[str, Any]) -> dict[str, float]:
    """What may change with noise: means over half of the steps, and the accuracy at the end."""
    halves = {
        f"{_METRICS[name]}, {half} half of the steps": float(np.mean(windows))
        for name in ("entropy", "advantage_zero_groups", "reward")
        for half, windows in zip(
            ("first", "second"), np.array_split(run["means"][name], 2), strict=True
        )
    }
    return halves | {"accuracy at the end, %": _end(run)}


def _end(run: dict[str, Any]) -> float:
    return run["accuracy"][str(run["steps"])]


def picture_data(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """For each arm, of each seed the steps, the minutes and the accuracy of its evaluations."""
    return {
        arm: [
            [[int(step), round(run["minutes"][step], 2), round(run["accuracy"][step], 1)]
             for step in run["accuracy"]]
            for run in runs
        ]
        for arm, runs in by_arm(rows).items()
    }  # fmt: skip


def draw(data: dict[str, Any]) -> "Figure":
    """Accuracy over the steps and over the minutes; a thin line for each seed of an arm."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for number, (arm, seeds) in enumerate(data.items()):
        for seed in seeds:
            *times, accuracy = zip(*seed, strict=True)
            for axes, values in zip(panels, times, strict=True):
                label = arm if seed is seeds[0] else None
                axes.plot(values, accuracy, "o-", color=f"C{number}", markersize=3, label=label)
    for axes, name in zip(panels, ("step", "minutes of the steps"), strict=True):
        axes.set(xlabel=name, title="greedy accuracy on test problems, %")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e6e6e6")
    panels[0].legend(frameon=False, loc="lower right")
    return figure


def metrics_data(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """For each metric and arm, of each seed the means of 10 steps."""
    return {
        name: {
            arm: [[float(f"{value:.4g}") for value in run["means"][name]] for run in runs]
            for arm, runs in by_arm(rows).items()
        }
        for name in _METRICS
    }


def draw_metrics(data: dict[str, Any]) -> "Figure":
    """A panel for each metric; a line for each seed of an arm."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    all_axes = figure.subplots(2, 4).reshape(-1)
    for axes, (name, arms) in zip(all_axes, data.items(), strict=True):
        for number, (arm, seeds) in enumerate(arms.items()):
            for seed in seeds:
                ends = _WINDOW * np.arange(1, len(seed) + 1)
                label = arm if seed is seeds[0] else None
                axes.plot(ends, seed, color=f"C{number}", label=label)
        axes.set(xlabel="step", title=_METRICS[name])
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e6e6e6")
    handles, labels = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the runs and writes their rows."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.long_runs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=user_path, help="run folders")
    name = f"file of the rows, NAME.json (default: {GSM8K})"
    parser.add_argument("--name", choices=(GSM8K, MATH), default=GSM8K, help=name)
    folder = f"its folder (default: {RESULTS})"
    parser.add_argument("--results", type=user_path, default=RESULTS, help=folder)
    arguments = parser.parse_args(argv)
    try:
        rows = [row_of(run) for run in arguments.runs]
    except UserError as error:
        sys.exit(f"error: {error}")
    for row in rows:
        merge(arguments.results / f"{arguments.name}.json", row, ("arm", "seed", "learning_rate"))
    print(table(read_rows(arguments.results, arguments.name)))


if __name__ == "__main__":
    main()
