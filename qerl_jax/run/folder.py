"""The run folder: its name, its lock, and the config that it belongs to.

runs/grpo_gsm8k-smollm2-135m-paper-1a2b3c4d/
  config.json        the resolved config, versions, commit, device, command line (written once)
  lock               held while a process trains here
  checkpoints/       see `checkpoint.py`
  metrics.jsonl, completions.jsonl, tensorboard/    see `metrics.py`
  curves.png         see `plots.py`
  summary.json       steps, best accuracy, peak memory; written last
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from qerl_jax.errors import UserError

_PACKAGES = ("qerl-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
_FREE = ("steps", "log", "checkpoint", "profile")  # what does not change how a run goes
_SOURCE_ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """An open run folder; the process that has it holds the lock.

    Attributes:
        path: the folder.
        schedule_steps: the steps that learning rate and noise schedules span: `config.steps` of the
          first start. A later start with more steps extends the run and leaves the schedules alone.
        resumed: whether the folder held this run before, with a step or more.
    """

    path: Path
    schedule_steps: int
    resumed: bool


def config_dict(config: ConfigDict) -> dict[str, Any]:
    """The config as a plain dict that JSON gives back unchanged (tuples become lists).

    Raises:
        UserError: a field holds something that JSON has no form for.
    """
    return _plain(config.to_dict(), "config")


def fingerprint(config: ConfigDict) -> str:
    """Eight hex digits that name the config; `steps` is left out, so that a run can be extended."""
    fields = config_dict(config)
    fields.pop("steps", None)
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:8]


def default_folder(config: ConfigDict) -> Path:
    """`runs/EXPERIMENT-PRESET-FINGERPRINT`, relative to the working directory."""
    return Path("runs") / f"{config.experiment}-{config.preset}-{fingerprint(config)}"


@contextlib.contextmanager
def open_run(path: str | Path | None, config: ConfigDict) -> Iterator[RunFolder]:
    """Creates or reopens a run folder and holds its lock until the block ends.

    Args:
        path: the folder; None means `default_folder(config)`.
        config: the resolved config. In a run that has begun it must equal the saved one, but for
            `steps` and for how it is logged, saved and profiled; a run without a step yet takes the
            new one.

    Yields:
        The open `RunFolder`.

    Raises:
        UserError: the folder cannot be made, is in use, holds something else, or holds a run of
          another config.
    """
    path = default_folder(config) if path is None else Path(path)
    config_path = path / "config.json"
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not config_path.exists():
            _check_empty(path)
        lock = (path / "lock").open("a+")
    except OSError as error:
        raise UserError(f"cannot use {path} as a run folder: {error}") from error
    with lock:
        _acquire(lock, path)
        resumed = config_path.exists() and _has_begun(path)
        if resumed:
            schedule_steps = _check_same_run(config_path, config)
        else:
            schedule_steps = config.steps
            described = {"config": config_dict(config), "schedule_steps": schedule_steps}
            described |= provenance()
            write_atomic(config_path, json.dumps(described, indent=2) + "\n")
        yield RunFolder(path=path, schedule_steps=schedule_steps, resumed=resumed)


def lock_holder(path: Path) -> str | None:
    """Who trains in a run folder, as 'process 123 on host'; None when nobody does."""
    try:
        lock = (path / "lock").open("a+")
    except FileNotFoundError:
        return None
    with lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return _read_holder(lock)
    return None


def provenance() -> dict[str, Any]:
    """Where results come from: versions, commit, device, command line and time."""
    import jax

    devices = jax.devices()
    return {
        "versions": {"python": platform.python_version()} | {p: _version(p) for p in _PACKAGES},
        "git": _git_state(),
        "device": {
            "platform": devices[0].platform,
            "kind": devices[0].device_kind,
            "count": len(devices),
        },
        "command": shlex.join(sys.orig_argv),
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def without_folders(text: str) -> str:
    """`text` with its absolute paths cut to their last part: for results that are published."""
    return re.sub(r"(?<![\w.:/])/(?:[^\s/\"]+/)+", "", text)


def require_free_space(path: str | Path, num_bytes: int) -> None:
    """Raises a UserError when the file system of `path` has less than `num_bytes` bytes free."""
    free = shutil.disk_usage(path).free
    if free < num_bytes:
        raise UserError(
            f"no disk space: {path} needs {num_bytes / 1e9:.2f} GB and has {free / 1e9:.2f} GB "
            "free; make room and run the same command again"
        )


def write_atomic(path: Path, text: str) -> None:
    """Replaces a file by `text`: at any instant the path holds the old content or the new."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _acquire(lock, path: Path) -> None:
    # A POSIX lock, not flock: a child made by fork (a reward worker, say) does not inherit it, so
    # a killed run can be resumed while its orphans are still dying.
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


def _check_empty(path: Path) -> None:
    others = sorted(p.name for p in path.iterdir() if p.name not in ("lock", "config.json.tmp"))
    if others:
        raise UserError(
            f"{path} is not a run folder: it has no config.json but holds {others[0]}; "
            "pass a new or empty folder as --workdir"
        )


def _has_begun(path: Path) -> bool:
    """Whether a step was logged or saved; a start that failed before leaves nothing to keep."""
    metrics, checkpoints = path / "metrics.jsonl", path / "checkpoints"
    logged = metrics.exists() and metrics.stat().st_size > 0
    return logged or (checkpoints.is_dir() and any(p.is_dir() for p in checkpoints.iterdir()))


def _check_same_run(config_path: Path, config: ConfigDict) -> int:
    """Compares the saved config with this one; returns the saved schedule length."""
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
        "of them (name a function by its import path, 'package.module:function')"
    )


def _flatten(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in fields.items():
        if isinstance(value, dict) and value:
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_state() -> dict[str, Any] | None:
    """Commit and dirty flag of the source tree; None when neither git nor QERL_COMMIT knows it."""
    if commit := os.environ.get("QERL_COMMIT"):
        return {"commit": commit, "dirty": None}
    if not (_SOURCE_ROOT / ".git").exists():
        return None
    try:
        commit = _git("rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(_git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    result = subprocess.run(
        ["git", "-C", str(_SOURCE_ROOT), *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=10,
    )
    return result.stdout.strip()
