"""The run folder: its files, its name, its lock, and the config of its run."""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from qerl_jax.errors import UserError
from qerl_jax.run.atomic import write_atomic
from qerl_jax.run.jsonl import read_jsonl
from qerl_jax.run.provenance import provenance

# Sections of the config that do not change how a run trains.
_FREE = ("steps", "log", "checkpoint", "profile")


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """Where the files of a run lie; they need not exist.

    Attributes:
        path: the folder, for example runs/grpo_gsm8k-smollm2-135m-paper-1a2b3c4d.
    """

    path: Path

    @property
    def config(self) -> Path:
        """The resolved config, versions, commit, device and command line; written once."""
        return self.path / "config.json"

    @property
    def lock(self) -> Path:
        """The file that a process locks while it trains here."""
        return self.path / "lock"

    @property
    def checkpoints(self) -> Path:
        """The folder of `checkpoints.Checkpoints`."""
        return self.path / "checkpoints"

    @property
    def programs(self) -> Path:
        """The folder of compiled programs, see `compilation_cache.programs_in`."""
        return self.path / "programs"

    @property
    def metrics(self) -> Path:
        """Rows of steps and evaluations, see `metrics`."""
        return self.path / "metrics.jsonl"

    @property
    def completions(self) -> Path:
        """Some of the completions of each step."""
        return self.path / "completions.jsonl"

    @property
    def tensorboard(self) -> Path:
        """The folder of TensorBoard's files."""
        return self.path / "tensorboard"

    @property
    def profile(self) -> Path:
        """The folder of the profiler's traces."""
        return self.path / "profile"

    @property
    def curves(self) -> Path:
        """The picture that `plots.plot_run` draws."""
        return self.path / "curves.png"

    @property
    def summary(self) -> Path:
        """Steps, best accuracy and peak memory; written last, so it marks a finished run."""
        return self.path / "summary.json"

    @property
    def best(self) -> Path:
        """Step and accuracy of the best evaluation, whose policy `adapter(best=True)` holds."""
        return self.path / "best.json"

    @property
    def evaluations(self) -> Path:
        """The folder of evaluations on benchmarks."""
        return self.path / "evaluations"

    @property
    def exports(self) -> Path:
        """The folder of exports for other tools."""
        return self.path / "exports"

    def adapter(self, *, best: bool = False) -> Path:
        """The PEFT adapter of the last step, or of the best evaluation."""
        return self.path / ("best_adapter" if best else "adapter")

    def model(self, *, best: bool = False) -> Path:
        """The model of the last step, or of the best evaluation, where all parameters train."""
        return self.path / ("best_model" if best else "model")

    def finished_steps(self) -> int | None:
        """Number of steps of a finished run; None while a run is not finished."""
        if not self.summary.exists():
            return None
        return json.loads(self.summary.read_text(encoding="utf-8"))["steps"]


@dataclasses.dataclass(frozen=True)
class OpenRun(RunFolder):
    """A run folder whose lock this process holds.

    Attributes:
        schedule_steps: number of steps that the schedules of learning rate and noise span:
            `config.steps` of the first start. A later start with more steps extends the run and
            leaves the schedules alone.
        resumed: whether a step of this run was logged or saved before.
    """

    schedule_steps: int
    resumed: bool


def config_dict(config: ConfigDict) -> dict[str, Any]:
    """The config as a plain dict that JSON gives back unchanged (tuples become lists).

    Raises:
        UserError: a field holds a value that JSON cannot represent.
    """
    return _plain(config.to_dict(), "config")


def fingerprint(config: ConfigDict) -> str:
    """Eight hex digits that identify the config, without `steps`: a run can be extended."""
    fields = config_dict(config)
    fields.pop("steps", None)
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:8]


def default_folder(config: ConfigDict) -> Path:
    """`runs/EXPERIMENT-PRESET-FINGERPRINT`, relative to the working directory."""
    return Path("runs") / f"{config.experiment}-{config.preset}-{fingerprint(config)}"


@contextlib.contextmanager
def open_run(path: str | Path | None, config: ConfigDict) -> Iterator[OpenRun]:
    """Creates or reopens a run folder and holds its lock until the block ends.

    Args:
        path: the folder; None means `default_folder(config)`.
        config: the resolved config. In a run that has begun it must equal the saved config, except
            for `steps` and the sections on logging, checkpoints and profiling. A run without any
            step takes the new config.

    Yields:
        The open run.

    Raises:
        UserError: the folder cannot be made, is in use, holds other files, or holds a run with
            another config.
    """
    folder = RunFolder(default_folder(config) if path is None else Path(path))
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        if not folder.config.exists():
            _check_empty(folder)
        lock = folder.lock.open("a+")
    except OSError as error:
        raise UserError(f"cannot use {folder.path} as a run folder: {error}") from error
    with lock:
        _acquire(lock, folder.path)
        resumed = folder.config.exists() and _has_begun(folder)
        if resumed:
            schedule_steps = _check_same_run(folder.config, config)
        else:
            schedule_steps = config.steps
            described = {"config": config_dict(config), "schedule_steps": schedule_steps}
            described |= provenance()
            write_atomic(folder.config, json.dumps(described, indent=2) + "\n")
        yield OpenRun(folder.path, schedule_steps=schedule_steps, resumed=resumed)


def lock_holder(path: Path) -> str | None:
    """The process that trains in a run folder, as 'process 123 on host', or None."""
    try:
        lock = RunFolder(path).lock.open("a+")
    except FileNotFoundError:
        return None
    with lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return _read_holder(lock)
    return None


def _acquire(lock, path: Path) -> None:
    # A POSIX lock, not flock: a forked child, such as a reward worker, does not inherit it, so a
    # killed run can be resumed while its orphans are still dying.
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise UserError(
            f"{path} is in use by {_read_holder(lock)}; wait for it, stop it, or pass another "
            "--workdir"
        ) from error
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    lock.flush()


def _read_holder(lock) -> str:
    lock.seek(0)
    return lock.read().strip() or "another process"


def _check_empty(folder: RunFolder) -> None:
    own = (folder.lock.name, f"{folder.config.name}.tmp")
    others = sorted(p.name for p in folder.path.iterdir() if p.name not in own)
    if others:
        raise UserError(
            f"{folder.path} is not a run folder: it has no {folder.config.name} but holds "
            f"{others[0]}; pass a new or empty folder as --workdir"
        )


def _has_begun(folder: RunFolder) -> bool:
    """Whether a step was logged or saved; a start that failed before leaves nothing to keep."""
    if folder.checkpoints.is_dir() and any(p.is_dir() for p in folder.checkpoints.iterdir()):
        return True
    rows = read_jsonl(folder.metrics) if folder.metrics.exists() else []
    return any(row["step"] > 0 for row in rows)


def _check_same_run(config_path: Path, config: ConfigDict) -> int:
    """Compares the saved config with the new one; returns the saved number of schedule steps."""
    try:
        saved = json.loads(config_path.read_text(encoding="utf-8"))
        old, schedule_steps = _flatten(saved["config"]), saved["schedule_steps"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{config_path} cannot be read ({type(error).__name__}: {error}); "
            "restore it or pass another --workdir"
        ) from error
    new = _flatten(config_dict(config))
    changes = [
        f"{key}: {_show(old, key)} -> {_show(new, key)}"
        for key in sorted(old.keys() | new.keys())
        if key.partition(".")[0] not in _FREE
        and (key not in old or key not in new or old[key] != new[key])
    ]
    if changes:
        raise UserError(
            f"{config_path.parent} holds a run of another config ({', '.join(changes)}); "
            "restore these values or pass another --workdir"
        )
    return schedule_steps


def _show(fields: dict[str, Any], key: str) -> str:
    return json.dumps(fields[key], ensure_ascii=False) if key in fields else "(absent)"


def _plain(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v, f"{name}.{k}") for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, f"{name}[{i}]") for i, v in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UserError(
        f"{name} is a {type(value).__name__}: a config holds numbers, strings, booleans and lists "
        "of these (name a function by its import path, 'package.module:function')"
    )


def _flatten(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in fields.items():
        if isinstance(value, dict) and value:
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
