"""What a run writes while it trains: metrics, completions, and the lines on the terminal.

`metrics.jsonl` and `completions.jsonl` are the record: one JSON object a line, flushed, floats with
all their digits. TensorBoard, W&B and trackio are views of the same rows.
"""

import importlib
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

import numpy as np

from qerl_jax.errors import UserError
from qerl_jax.run.folder import write_atomic

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
    "rollout": ("length", "finished", "entropy", "rollout_tokens", "rollout_live_share"),
    "noise": ("sigma", "perturbed_norms", "noise_kl"),
    "eval": ("eval_accuracy", "eval_accuracy_before"),
}
_SECTION_OF = {key: section for section, keys in _SECTIONS.items() for key in keys}


class MetricsLog:
    """Writes the rows of a run; use it as a context manager.

    Args:
        folder: the run folder.
        tensorboard: also write `folder/tensorboard`.
        wandb: also log to Weights & Biases.
        trackio: also log to trackio.
        run_name: the name of the run there; the same name resumes it.

    Raises:
        UserError: the package of a wanted logger is missing.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        tensorboard: bool,
        wandb: bool,
        trackio: bool,
        run_name: str,
    ):
        self._folder = Path(folder)
        self._metrics_path = self._folder / "metrics.jsonl"
        self._completions_path = self._folder / "completions.jsonl"
        self._tensorboard = tensorboard
        self._purge_step: int | None = None
        self._writer: Any = None
        self._trackers: list[ModuleType] = []
        if wandb:
            module = _optional_module("wandb")
            module.init(
                project="qerl-jax",
                name=run_name,
                id=run_name,
                resume="allow",
                dir=str(self._folder),
                config=_saved_config(self._folder),
            )
            self._trackers.append(module)
        if trackio:
            module = _optional_module("trackio")
            module.init(
                project="qerl-jax",
                name=run_name,
                resume="allow",
                config=_saved_config(self._folder),
            )
            self._trackers.append(module)

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    def truncate(self, last_step: int) -> None:
        """Drops the rows after `last_step` and a torn last line; call it before the first `write`.

        Args:
            last_step: the step of the restored checkpoint; 0 drops everything.
        """
        for path in (self._metrics_path, self._completions_path):
            if path.exists():
                rows = [row for row in read_metrics(path) if row["step"] <= last_step]
                write_atomic(path, "".join(_line(row) for row in rows))
        self._purge_step = last_step + 1

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends one row; it must have `step`.

        Values are numbers, booleans, strings or None, as Python, NumPy or JAX scalars. NaN and
        infinities are written as null.
        """
        row = _json_value(row, "row")
        _append(self._metrics_path, [row])
        step = row["step"]
        scalars = {k: v for k, v in row.items() if isinstance(v, int | float) and k != "step"}
        if self._tensorboard:
            writer = self._tensorboard_writer()
            for key, value in scalars.items():
                writer.add_scalar(_tag(key), float(value), step)
        for tracker in self._trackers:
            tracker.log({_tag(key): value for key, value in scalars.items()}, step=step)

    def write_completions(self, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        """Appends sample completions of a step: prompt, completion, answer, reward, ..."""
        rows = [{"step": step} | _json_value(sample, "sample") for sample in samples]
        _append(self._completions_path, rows)

    def close(self) -> None:
        """Flushes and closes TensorBoard, W&B and trackio."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        while self._trackers:
            self._trackers.pop().finish()

    def _tensorboard_writer(self) -> Any:
        if self._writer is None:
            from tensorboardX import SummaryWriter

            # The file is otherwise named by host and second: a quick restart would overwrite it.
            self._writer = SummaryWriter(
                str(self._folder / "tensorboard"),
                purge_step=self._purge_step,
                flush_secs=10,
                filename_suffix=f".{os.getpid()}.{time.monotonic_ns()}",
            )
        return self._writer


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Reads a JSONL file that a run wrote; a torn last line is left out.

    Raises:
        UserError: the file is missing, or a line before the last is not JSON.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    while lines and not lines[-1].strip():
        lines.pop()
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            if number == len(lines):
                break
            raise UserError(f"{path} is damaged: line {number} is not JSON ({error})") from error
    return rows


def format_row(row: Mapping[str, Any], total_steps: int) -> str:
    """One readable line for a row of metrics; what the row does not have is left out.

    Reads step, reward, accuracy, format (or reward/format), length, entropy, sigma, grad_norm,
    rollout_tokens_per_second, train_tokens_per_second, remaining_seconds, eval_accuracy and
    update_skipped.
    """
    width = len(str(total_steps))
    parts = [f"step {row['step']:>{width}}/{total_steps}"]

    def add(label: str, key: str, spec: str, unit: str = "") -> None:
        if key in row:
            parts.append(f"{label} {_number(row[key], spec)}{unit}")

    add("reward", "reward", "6.3f")
    add("acc", "accuracy", ".2f")
    add("format", "format" if "format" in row else "reward/format", ".2f")
    add("len", "length", "5.1f")
    add("entropy", "entropy", ".3f")
    add("sigma", "sigma", ".1e")
    add("grad", "grad_norm", ".3g")
    rates = [
        f"{label} {_rate(row[key])}"
        for label, key in (
            ("rollout", "rollout_tokens_per_second"),
            ("train", "train_tokens_per_second"),
        )
        if key in row
    ]
    if rates:
        parts.append(" ".join(rates) + " tok/s")
    if "remaining_seconds" in row:
        parts.append(f"left {_duration(row['remaining_seconds'])}")
    add("eval", "eval_accuracy", ".3f")
    if row.get("update_skipped"):
        parts.append("UPDATE SKIPPED")
    return "  ".join(parts)


class LiveLine:
    """A line of progress that is rewritten in place on a terminal, and silent elsewhere.

    Args:
        stream: where to write; stderr when None.
        interval: the least time between two writes, in seconds.
    """

    def __init__(self, stream: TextIO | None = None, *, interval: float = 0.1):
        self._stream = sys.stderr if stream is None else stream
        self._interval = interval
        self._enabled = self._stream.isatty()
        self._last = -math.inf

    def update(self, text: str) -> None:
        """Shows `text` instead of what was shown before, say 'rollout 37/64 rows, 512 tok/s'."""
        now = time.monotonic()
        if not self._enabled or now - self._last < self._interval:
            return
        self._last = now
        columns = shutil.get_terminal_size().columns
        self._stream.write(f"\r\x1b[K{text[: columns - 1]}")
        self._stream.flush()

    def clear(self) -> None:
        """Removes the line; call it before printing anything else."""
        if self._enabled:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._last = -math.inf


def _append(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(_line(row) for row in rows))


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def _json_value(value: Any, name: str) -> Any:
    """Python's own types for a JSON value; NaN and infinities become None."""
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
    if key.startswith("reward/"):  # of one function, whose name may be that of a metric
        return key.replace("reward/", "rewards/", 1)
    if "/" in key:
        return key
    if key.endswith(("_seconds", "_per_second")):
        return f"time/{key}"
    return f"{_SECTION_OF.get(key, 'train')}/{key}"


def _optional_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"log.{name} is on and {name} is not installed; run `uv sync --extra {name}` "
            f"or pass --config.log.{name}=false"
        ) from error


def _saved_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    return json.loads(path.read_text(encoding="utf-8"))["config"] if path.exists() else {}


def _number(value: Any, spec: str) -> str:
    return "-" if value is None or not math.isfinite(value) else format(float(value), spec)


def _rate(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:.0f}" if value < 9999.5 else f"{value / 1000:.1f}k"


def _duration(seconds: float | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return "-"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"
