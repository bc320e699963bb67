"""Measures whether a run learns: Welch's t of its rewards, last fifth of the steps against first.

    for seed in 0 1 2; do
        uv run python -m experiments.grpo_gsm8k --config.seed=$seed --workdir=runs/learn-$seed
        uv run python -m experiments.grpo_gsm8k --config.seed=$seed --workdir=runs/control-$seed \
            --config.optimizer.learning_rate=0.0
    done
    uv run python -m benchmarks.learning runs/learn-* --control runs/control-* \
        --out=benchmarks/results/learning_sums.json

The steps of all seeds are pooled. A run that learns has a t far above 3; the control, with a
learning rate of 0, stays below 2. The file also holds the reward of every step of every seed, from
which `benchmarks/pictures.py` draws a curve.
"""

import argparse
import json
import math
import pathlib

import numpy as np

from benchmarks import common
from benchmarks.run_summary import describe_run
from qerl_jax.commands import cli
from qerl_jax.errors import UserError
from qerl_jax.run.folder import RunFolder
from qerl_jax.run.metrics import read_evaluations, read_steps
from qerl_jax.system.atomic import write_json
from qerl_jax.system.jsonl import read_jsonl
from qerl_jax.system.paths import user_path


def welch_t(a: np.ndarray, b: np.ndarray) -> float:
    """Welch's t statistic of mean(a) - mean(b), unequal variances."""
    error = a.var(ddof=1) / a.size + b.var(ddof=1) / b.size
    return float((a.mean() - b.mean()) / math.sqrt(error))


def summarize(folders: list[pathlib.Path]) -> dict:
    """Compares the last with the first fifth of the steps, over all runs, one for each seed.

    Raises:
        UserError: the runs differ in length, or have less than 10 steps.
    """
    metrics = [RunFolder(folder).metrics for folder in folders]
    runs = [read_steps(path) for path in metrics]
    if len({len(rows) for rows in runs}) != 1 or len(runs[0]) < 10:
        raise UserError(
            f"the runs have {[len(rows) for rows in runs]} steps: pass runs of equal length, at "
            "least 10 steps"
        )
    fifth = len(runs[0]) // 5
    summary: dict = {"runs": len(runs), "steps": len(runs[0])}
    for key in ("reward", "accuracy"):
        values = np.array([[row[key] for row in rows] for rows in runs])
        first, last = values[:, :fifth].reshape(-1), values[:, -fifth:].reshape(-1)
        summary[key] = {
            "first_fifth": float(first.mean()),
            "last_fifth": float(last.mean()),
            "welch_t": welch_t(last, first),
        }
    evaluations = [read_evaluations(path) for path in metrics]
    steps = {"before": 0, "after": summary["steps"]}
    by_seed = {when: [accuracy[step] for accuracy in evaluations] for when, step in steps.items()}
    means = {when: float(np.mean(values)) for when, values in by_seed.items()}
    summary["eval_accuracy"] = means | {"by_seed": by_seed}
    summary["eval_truncated"] = {when: _truncated(metrics, step) for when, step in steps.items()}
    summary["minutes"] = float(np.mean([_seconds(path) / 60 for path in metrics]))
    summary["by_step"] = {"reward": [[row["reward"] for row in rows] for rows in runs]}
    return summary | describe_run(folders[0])


def _truncated(metrics: list[pathlib.Path], step: int) -> float:
    """The mean part of the completions that the evaluations of a step cut off."""
    rows = [row for path in metrics for row in read_jsonl(path) if row["step"] == step]
    return float(np.mean([row["eval_truncated"] for row in rows if "eval_truncated" in row]))


def _seconds(metrics: pathlib.Path) -> float:
    """The seconds of all steps and of the evaluations after them."""
    rows = [row for row in read_jsonl(metrics) if row["step"] > 0]
    return sum(row.get("step_seconds", 0) + row.get("eval_seconds", 0) for row in rows)


def make_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    parser = common.make_parser("benchmarks.learning", __doc__)
    add = parser.add_argument
    add("runs", type=user_path, nargs="+", help="run folders, one for each seed")
    control = "run folders of the control, one for each seed"
    add("--control", type=user_path, nargs="+", required=True, help=control)
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Writes the JSON file and prints the comparison."""
    result = {"learning": summarize(arguments.runs), "control": summarize(arguments.control)}
    write_json(arguments.out, result)
    print(json.dumps({name: part["reward"] for name, part in result.items()}, indent=2))


if __name__ == "__main__":
    cli.run_command(make_parser(), run)
