"""Collects runs of many steps, scored as they go: accuracy by step and by minute.

    for seed in 0 1; do for arm in bf16-lora nvfp4-lora nvfp4-lora-aqn-paper; do
        uv run --extra cuda python -m experiments.grpo_gsm8k \
            --config=experiments/configs/evidence.py:$arm --config.seed=$seed --config.steps=200 \
            --config.eval.every=40 --config.eval.problems=1000 \
            --config.data.eval_path=gsm8k_test_first1000.jsonl --workdir=runs/long/$arm-s$seed
    done; done
    uv run python -m benchmarks.long_runs runs/long/*

The result is benchmarks/results/long_runs.json, one row for each run; a run replaces the row of the
same arm and seed. Sixty steps, as in gsm8k.json, cannot tell an arm that learns more from one that
only learns faster. Minutes are those of the steps, without evaluations.
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

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

OUT = pathlib.Path("benchmarks/results/long_runs.json")


def row_of(run: pathlib.Path) -> dict[str, Any]:
    """The row of a run: accuracy in percent and minutes, both by step.

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
        **about,
    }


def read_rows(results: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of long_runs.json in a folder of results; none where there is no file yet."""
    path = results / OUT.name
    return json_file.read_object(path)["rows"] if path.exists() else []


def by_arm(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows by arm, in their order."""
    arms: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        arms.setdefault(row["arm"], []).append(row)
    return arms


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Accuracy of every seed of each arm by step, and the minutes of the steps."""
    steps = sorted({step for row in rows for step in row["accuracy"]}, key=int)
    lines = [
        [
            f"`{arm}`",
            f"{runs[0]['learning_rate']:.0e}",
            *(", ".join(f"{run['accuracy'][step]:.1f}" for run in runs) for step in steps),
            ", ".join(f"{run['minutes'][steps[-1]]:.0f}" for run in runs),
        ]
        for arm, runs in by_arm(rows).items()
    ]
    names = ("before" if step == "0" else f"step {step}" for step in steps)
    return markdown(("arm", "learning rate", *names, "minutes"), lines)


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


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the runs and writes their rows."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.long_runs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=user_path, help="run folders")
    folder = "folder of long_runs.json (default: benchmarks/results)"
    parser.add_argument("--results", type=user_path, default=OUT.parent, help=folder)
    arguments = parser.parse_args(argv)
    try:
        rows = [row_of(run) for run in arguments.runs]
    except UserError as error:
        sys.exit(f"error: {error}")
    for row in rows:
        merge(arguments.results / OUT.name, row, ("arm", "seed"))
    print(table(read_rows(arguments.results)))


if __name__ == "__main__":
    main()
