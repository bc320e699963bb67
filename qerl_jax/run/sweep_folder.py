"""Sweeps: their runs, each in a process of its own, and their results as one table."""

import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qerl_jax.config.sweep import ConfigOverrides
from qerl_jax.errors import UserError, first_line
from qerl_jax.run.folder import RunFolder
from qerl_jax.run.jobs import Job, run_jobs
from qerl_jax.run.metrics import read_evaluations, read_losses, read_steps
from qerl_jax.run.statistics import half_interval
from qerl_jax.system.jsonl import is_number
from qerl_jax.system.safe_files import read_bytes

# The columns of the table, and how a run's rows of metrics give them.
MEASURES = {
    "reward": "mean over the last fifth of the steps",
    "accuracy": "greedy pass@1 after the last step",
    "entropy": "entropy of the sampling policy in nats, mean over the last fifth of the steps",
    "noise_kl": "KL of the noisy against the clean policy, mean over the steps that measured it",
    "eval_loss": "loss of held-out rows of text after the last step, in nats",
}
_TITLES = {"noise_kl": "noise KL", "eval_loss": "held-out loss"}  # the others are their names
_PROVENANCE = ("git", "device", "versions")


@dataclasses.dataclass(frozen=True)
class Run:
    """A run of a sweep."""

    name: str  # overrides and a hash of the config; also the name of the folder
    overrides: ConfigOverrides  # fields that the sweep sets, with their values
    config: dict[str, Any]  # the resolved config, as plain data
    folder: Path
    command: tuple[str, ...]  # arguments of Python, from `-m` on, that start this run alone

    @property
    def setting(self) -> str:
        """The overrides without the seed, as text."""
        fields = [f"{field}={v}" for field, v in self.overrides.items() if field != "seed"]
        return ", ".join(fields) or "as configured"


def is_finished(run: Run) -> bool:
    """Whether the run has taken its steps, or more, and written the files that follow them."""
    return (RunFolder(run.folder).finished_steps() or 0) >= run.config["steps"]


def train_all(
    runs: Sequence[Run], folder: Path, devices: Sequence[str | None] = (None,)
) -> dict[str, str]:
    """Runs each unfinished run in a process of its own; returns name and reason of the failures.

    The values of CUDA_VISIBLE_DEVICES are those of `devices_of`: as many runs at a time. The folder
    is that of the sweep.

    Raises:
        StoppedError: one of `STOP_SIGNALS` arrived; the runs have saved.
    """
    jobs = [
        Job(
            name=run.name,
            title=f"run {number}/{len(runs)} {run.name}",
            command=run.command,
            run=run.folder,
            is_finished=functools.partial(is_finished, run),
            progress=functools.partial(_last_step, run),
            result=functools.partial(_last_result, run),
        )
        for number, run in enumerate(runs, start=1)
    ]
    return run_jobs(jobs, folder, devices)


def _last_result(run: Run) -> str:
    row = next(reversed(_steps(RunFolder(run.folder))), {})
    name = "loss" if "reward" not in row and "loss" in row else "reward"  # learns from text
    value = row.get(name)
    return f"last {name} {value:.3f}" if is_number(value) else f"last {name} missing"


def _last_step(run: Run) -> str:
    folder = RunFolder(run.folder)
    rows = _steps(folder) if folder.metrics.exists() else []
    return f"{run.name} step {rows[-1]['step'] if rows else 0}/{run.config['steps']}"


def settings(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """The runs by setting, in the order of the first run of each setting."""
    groups: dict[str, list[Run]] = {}
    names: dict[str, str] = {}
    for run in runs:
        key = json.dumps(run.config | {"seed": None}, sort_keys=True)
        groups.setdefault(names.setdefault(key, run.setting), []).append(run)
    return groups


def make_table(runs: Sequence[Run]) -> dict[str, Any]:
    """The results of a sweep, as a JSON object without any times.

    The same finished runs give the same table. A setting has, for each of `MEASURES`, the mean over
    its finished runs, half the width of the 95 % interval of the mean by Student's t (None with
    fewer than two runs), and the number of runs.

    Raises:
        UserError: the files of a run are damaged.
    """
    finished_runs = [run for run in runs if is_finished(run)]
    results = {
        run.name: _measure(RunFolder(run.folder), run.config["steps"]) for run in finished_runs
    }
    rows = []
    for name, group in settings(runs).items():
        finished_group = [run for run in group if run.name in results]
        rows.append(
            {
                "setting": name,
                "overrides": {k: v for k, v in group[0].overrides.items() if k != "seed"},
                "seeds": [run.config["seed"] for run in finished_group],
                "missing_seeds": [run.config["seed"] for run in group if run not in finished_group],
            }
            | {m: _over_seeds([results[run.name][m] for run in finished_group]) for m in MEASURES}
        )
    provenances: list[dict[str, Any]] = []
    for run in finished_runs:
        provenance = _provenance(RunFolder(run.folder))
        if provenance not in provenances:
            provenances.append(provenance)
    return {
        "measures": MEASURES,
        "settings": rows,
        "runs": [
            {"run": run.name, "overrides": run.overrides} | results[run.name]
            for run in finished_runs
        ],
        "missing": [run.name for run in runs if run.name not in results],
        "made_with": provenances,
    }


def format_table(table: Mapping[str, Any]) -> str:
    """The table in Markdown."""
    learns = any(row["eval_loss"]["mean"] is not None for row in table["settings"])
    measures = {name: text for name, text in MEASURES.items() if learns or name != "eval_loss"}
    titles = (_TITLES.get(name, name) for name in measures)
    lines = [f"| setting | runs | {' | '.join(titles)} |", f"|{'---|' * (2 + len(measures))}"]
    for row in table["settings"]:
        cells = [row["setting"], str(len(row["seeds"]))]
        cells += [_cell(row[m], ".1e" if m == "noise_kl" else ".3f") for m in measures]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "Mean over the runs ± half of its 95 % interval (Student's t). "]
    lines[-1] += "; ".join(f"{name}: {definition}" for name, definition in measures.items()) + "."
    if table["missing"]:
        lines += ["", f"Not finished: {', '.join(table['missing'])}."]
    return "\n".join(lines) + "\n"


def _measure(folder: RunFolder, steps: int) -> dict[str, float | None]:
    # A run that was extended by hand has further ones.
    rows = [row for row in _steps(folder) if row["step"] <= steps]
    if not rows:
        raise UserError(f"{folder.path} is damaged: it is finished and has no step; remove it")
    last = rows[-max(1, len(rows) // 5) :]
    return {
        "reward": _mean(row.get("reward") for row in last),
        "accuracy": read_evaluations(folder.metrics).get(rows[-1]["step"]),
        "entropy": _mean(row.get("entropy") for row in last),
        "noise_kl": _mean(row.get("noise_kl") for row in rows),
        "eval_loss": read_losses(folder.metrics).get(rows[-1]["step"]),
    }


def _provenance(folder: RunFolder) -> dict[str, Any]:
    """What a run was made with."""
    try:
        content = json.loads(read_bytes(folder.config))
        return {key: content[key] for key in _PROVENANCE}
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(
            f"{folder.config} is not the config of a run: {first_line(error)}"
        ) from error


def _steps(folder: RunFolder) -> list[dict[str, Any]]:
    """The rows of steps, without what no run writes."""
    return [row for row in read_steps(folder.metrics) if type(row.get("step")) is int]


def _mean(values: Iterable[Any]) -> float | None:
    present = [value for value in values if is_number(value)]
    return float(np.mean(present)) if present else None


def _over_seeds(values: Iterable[float | None]) -> dict[str, Any]:
    numbers = np.array([value for value in values if value is not None])
    n = len(numbers)
    return {
        "mean": float(numbers.mean()) if n else None,
        "interval": half_interval(numbers) if n > 1 else None,
        "n": n,
    }


def _cell(value: Mapping[str, Any], spec: str) -> str:
    if value["mean"] is None:
        return "-"
    interval = "" if value["interval"] is None else f" ± {value['interval']:{spec}}"
    return f"{value['mean']:{spec}}{interval}"
