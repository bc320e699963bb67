"""The rows that a run logs: metrics.jsonl and completions.jsonl, and views of them elsewhere.

The two files are the record: one JSON object per line, flushed, floats with all their digits.
TensorBoard, W&B and trackio show the same rows.

    {"step": 20, "reward": 0.41, ..., "step_seconds": 11.8, ...}         a step, when it ends
    {"step": 20, "eval_accuracy": 0.55, "eval_answers": [...], ...}      an evaluation after it
    {"step": 0, "eval_accuracy_before": 0.35, ...}                       the one before training
    {"step": 20, "eval_loss": 0.61, ...}                                 of held-out rows of text
"""

import contextlib
import importlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from qerl_jax.errors import UserError
from qerl_jax.run.event_file import EventFile
from qerl_jax.run.folder import RunFolder
from qerl_jax.system.atomic import write_atomic
from qerl_jax.system.jsonl import is_number, read_jsonl, read_rows_of_steps
from qerl_jax.system.safe_files import open_to_write, read_bytes

_SECTIONS = {
    "reward": (
        "reward",
        "reward_std",
        "accuracy",
        "format",
        "advantage_zero_groups",
        "sampled_groups",
        "rewards_missing",
    ),
    "rollout": (
        "length",
        "finished",
        "entropy",
        "temperature",
        "rollout_tokens",
        "rollout_live_share",
        "rollout_tokens_per_row_step",
        "rollout_draft_acceptance",
    ),
    "noise": (
        "sigma",
        "perturbed_norms",
        "noise_kl",
        "noise_kl_target",
        "sigma_at_bound",
        "noise_kl_not_finite",
    ),
    "eval": (
        *("eval_accuracy", "eval_accuracy_before", "eval_loss", "eval_truncated", "eval_missing"),
    ),
}
_SECTION_OF = {key: section for section, keys in _SECTIONS.items() for key in keys}


class MetricsLog:
    """Writes the rows of a run; use it as a context manager.

    Args:
        folder: the run folder.
        tensorboard: also write `folder/tensorboard`.
        wandb: also log to Weights & Biases.
        trackio: also log to trackio.
        run_name: name of the run at these services; the same name resumes it.
        project: project of the run at these services.
        group: group of the run at these services; '' is no group.

    Raises:
        UserError: the package of a wanted service is missing.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        tensorboard: bool,
        wandb: bool,
        trackio: bool,
        run_name: str,
        project: str = "qerl-jax",
        group: str = "",
    ):
        self._folder = RunFolder(Path(folder))
        self._tensorboard = tensorboard
        self._purge_step: int | None = None
        self._events: EventFile | None = None
        self._trackers: list[ModuleType] = []
        self._wandb: ModuleType | None = None
        options: dict[str, Any] = {"project": project, "name": run_name, "resume": "allow"}
        options |= {"config": _saved_config(self._folder)} | ({"group": group} if group else {})
        if wandb:
            self._wandb = _optional_module("wandb")
            self._wandb.init(id=run_name, dir=str(folder), **options)
            self._trackers.append(self._wandb)
        if trackio:
            module = _optional_module("trackio")
            module.init(**options)
            self._trackers.append(module)

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info) -> None:
        # Rows for TensorBoard that a full disk does not take must not hide the first error.
        with contextlib.nullcontext() if kind is None else contextlib.suppress(OSError):
            self.close()

    def truncate(self, last_step: int) -> None:
        """Drops later rows and an incomplete last line; call it before the first `write`.

        Args:
            last_step: the last step whose rows are kept; -1 drops all rows.
        """
        for path in (self._folder.metrics, self._folder.completions):
            if path.exists():
                rows = [row for row in read_rows_of_steps(path) if row["step"] <= last_step]
                write_atomic(path, "".join(_format_row(row) for row in rows))
        self._purge_step = last_step + 1

    def sync(self) -> None:
        """Brings the rows to the disk: a checkpoint must not outlive those of its steps."""
        for path in (self._folder.metrics, self._folder.completions):
            if path.exists():
                with open_to_write(path, "ab") as file:
                    os.fsync(file.fileno())

    def write(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Appends one row, which must have `step`, and returns it in Python's own types.

        Values are numbers, booleans, strings or None, as Python, NumPy or JAX scalars. NaN and
        infinities are written as null.
        """
        written = _json_value(row, "row")
        _append(self._folder.metrics, [written])
        step = written["step"]
        scalars = {k: v for k, v in written.items() if isinstance(v, int | float) and k != "step"}
        if self._tensorboard:
            if self._events is None:
                self._events = EventFile(self._folder.tensorboard, purge_step=self._purge_step)
            self._events.write({_tag(k): float(v) for k, v in scalars.items()}, step)
        for tracker in self._trackers:
            tracker.log({_tag(key): value for key, value in scalars.items()}, step=step)
        return written

    def write_completions(self, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        """Appends sample completions of a step: prompt, completion, answer, reward, ..."""
        rows = [{"step": step} | _json_value(sample, "sample") for sample in samples]
        _append(self._folder.completions, rows)
        if self._wandb is not None and rows:
            columns = list(dict.fromkeys(key for row in rows for key in row))
            cells = [[row.get(key) for key in columns] for row in rows]
            table = self._wandb.Table(columns=columns, data=cells)
            self._wandb.log({"completions": table}, step=step)

    def close(self) -> None:
        """Flushes and closes TensorBoard, W&B and trackio."""
        while self._trackers:
            self._trackers.pop().finish()
        if self._events is not None:
            events, self._events = self._events, None
            events.close()


def read_steps(path: str | Path) -> list[dict[str, Any]]:
    """The rows of steps in a metrics.jsonl, in the order of the steps.

    Raises:
        UserError: the file is missing or damaged.
    """
    return [row for row in _objects(path) if "eval_seconds" not in row]


def read_evaluations(path: str | Path) -> dict[int, float]:
    """The greedy accuracy by step in a metrics.jsonl; step 0 is before training.

    Evaluations in which scores are missing (`eval_missing`) are left out: they are not comparable.

    Raises:
        UserError: the file is missing or damaged.
    """
    evaluations = read_all_evaluations(path).items()
    return {step: accuracy for step, accuracy in evaluations if accuracy is not None}


def read_all_evaluations(path: str | Path) -> dict[int, float | None]:
    """As `read_evaluations`, with None for the evaluations in which scores are missing."""
    accuracies: dict[int, float | None] = {}
    for row in _objects(path):
        if type(step := row.get("step")) is not int:
            continue
        accuracy = row.get("eval_accuracy", row.get("eval_accuracy_before"))
        if is_number(accuracy) and not row.get("eval_missing"):
            accuracies[step] = accuracy
        elif "eval_seconds" in row:
            accuracies.setdefault(step, None)
    return accuracies


def read_losses(path: str | Path) -> dict[int, float]:
    """The loss of held-out rows of text by step in a metrics.jsonl; step 0 is before training.

    Raises:
        UserError: the file is missing or damaged.
    """
    return {
        row["step"]: row["eval_loss"]
        for row in _objects(path)
        if type(row.get("step")) is int and is_number(row.get("eval_loss"))
    }


def read_answers(path: str | Path) -> dict[int, list[dict[str, Any]]]:
    """The answers that evaluations logged, by step; step 0 is before training.

    Raises:
        UserError: the file is missing or damaged.
    """
    return {
        row["step"]: [answer for answer in answers if isinstance(answer, dict)]
        for row in _objects(path)
        if type(row.get("step")) is int and isinstance(answers := row.get("eval_answers"), list)
    }


def _objects(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a file without what no run writes."""
    return [row for row in read_jsonl(path) if isinstance(row, dict)]


def _append(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    with open_to_write(path, "a", encoding="utf-8") as file:
        file.write("".join(_format_row(row) for row in rows))


def _format_row(row: Mapping[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def _json_value(value: Any, name: str) -> Any:
    """The value in Python's own types, ready for JSON; NaN and infinities become None."""
    if isinstance(value, Mapping):
        return {str(k): _json_value(v, str(k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(v, name) for v in value]
    if hasattr(value, "item"):
        if np.size(value) != 1:
            raise TypeError(f"{name} has shape {np.shape(value)}: log a scalar")
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{name} is a {type(value).__name__}: log a number, a string or None")


def _tag(key: str) -> str:
    """The section and name under which TensorBoard and the trackers show a key."""
    if key.startswith("reward/"):  # A reward function may have the name of a metric.
        return key.replace("reward/", "rewards/", 1)
    if "/" in key:
        return key
    if key.endswith(("_seconds", "_per_second")):
        return f"time/{key}"
    return f"{_SECTION_OF.get(key, 'train')}/{key}"


def check_trackers(config: ConfigDict) -> None:
    """Raises a UserError for a tracker that is on and not installed."""
    for name in ("wandb", "trackio"):
        if config.log[name]:
            _optional_module(name)


def _optional_module(name: str) -> ModuleType:
    try:
        module = importlib.import_module(name)
        if not hasattr(module, "init"):  # A folder of this name, in which W&B keeps its runs.
            raise ImportError(f"{name} is a folder and no package")
        return module
    except ImportError as error:
        raise UserError(
            f"log.{name} is on and {name} is not installed; run `uv sync --extra {name}` "
            f"or pass --config.log.{name}=false"
        ) from error


def _saved_config(folder: RunFolder) -> dict[str, Any]:
    path = folder.config
    return json.loads(read_bytes(path))["config"] if path.exists() else {}
