"""The run folder: its files, its name, its lock, and the config of its run."""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from ml_collections import ConfigDict

from qerl_jax.config import resume
from qerl_jax.errors import UserError, visible
from qerl_jax.run.ownership import has_own_tag, write_config
from qerl_jax.run.provenance import provenance
from qerl_jax.run.saved_fields import is_shallow
from qerl_jax.system.atomic import TEMPORARY
from qerl_jax.system.jsonl import read_number, read_rows_of_steps
from qerl_jax.system.locks import InUseError, hold
from qerl_jax.system.paths import user_path
from qerl_jax.system.safe_files import (
    check_file,
    check_folder,
    check_tree,
    open_to_write,
    read_bytes,
    read_text,
)
from qerl_jax.system.staging import scratch_of

BEST = ":best"  # what `init_from` ends with for the best adapter of a run
_REMEDY = "pass a --workdir"  # where the run folder cannot be locked, see `locks.hold`
_HOLDER_BYTES = 300  # of the name of a process


class _Inside:
    """The path of something in a run folder."""

    def __init__(self, name: str):
        self._name = name

    def __get__(self, folder: "RunFolder", owner: type | None = None) -> Path:
        return folder.path / self._name


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """The paths of the files of a run, which need not exist."""

    path: Path  # the folder, for example runs/sums-smollm2-135m-paper-1a2b3c4d

    # The resolved config, versions, commit, device and command line of the first start. A later
    # start changes only fields that move only memory or time, and lists their old values as
    # `changes`. The last field is the tag by which `ownership` recognizes it.
    config = _Inside("config.json")
    lock = _Inside("lock")  # a process locks it while it trains here
    # The text that a calibrated base was made from: int32 [B, T] token ids.
    calibration = _Inside("calibration_tokens.npy")
    teacher_calibration = _Inside("teacher_calibration_tokens.npy")  # of a calibrated teacher
    checkpoints = _Inside("checkpoints")  # the folder of `checkpoints.Checkpoints`
    programs = _Inside("programs")  # compiled ones, see `compile.run_cache.keep_programs`
    metrics = _Inside("metrics.jsonl")  # rows of steps and evaluations, see `metrics`
    completions = _Inside("completions.jsonl")  # some of those of each step
    tensorboard = _Inside("tensorboard")  # the folder of TensorBoard's files
    profile = _Inside("profile")  # the folder of the profiler's traces
    curves = _Inside("curves.png")  # the picture that `plots.plot_run` draws
    # Steps, best accuracy and peak memory; written last, so it marks a finished run.
    summary = _Inside("summary.json")
    # Step and accuracy of the best evaluation, and checksum of `adapter(best=True)`.
    best = _Inside("best.json")
    evaluations = _Inside("evaluations")  # the folder of evaluations on benchmarks
    exports = _Inside("exports")  # the folder of exports for other tools
    # The adapter that the run began from, where the KL to it is part of the loss.
    first_adapter = _Inside("first_adapter")
    # The scored sessions of agents since the last checkpoint, see `training.kept_sessions`.
    sessions = _Inside("sessions")
    wandb = _Inside("wandb")  # the folder that Weights & Biases makes

    def adapter(self, *, best: bool = False) -> Path:
        """The PEFT adapter of the last step, or of the best evaluation."""
        return self.path / ("best_adapter" if best else "adapter")

    def model(self, *, best: bool = False) -> Path:
        """The model of the last step, or of the best evaluation, where all parameters train."""
        return self.path / ("best_model" if best else "model")

    def files(self) -> list[Path]:
        """The paths of files."""
        return [
            *(self.config, self.calibration, self.lock, self.metrics, self.completions),
            *(self.curves, self.summary, self.best, self.teacher_calibration),
        ]

    def filled_by_libraries(self) -> list[Path]:
        """The paths of folders in which files are written, overwritten and removed."""
        return [self.checkpoints, self.programs, self.sessions, self.tensorboard, self.profile]

    def replaced_as_a_whole(self) -> list[Path]:
        """The paths of folders that appear complete, see `staging.staged_folder`."""
        policies = [
            make(best=best) for make in (self.adapter, self.model) for best in (False, True)
        ]
        return [self.first_adapter, *policies]

    def finished_steps(self) -> int | None:
        """Number of steps of a finished run; None while a run is not finished.

        Raises:
            UserError: summary.json is damaged.
        """
        if not self.summary.exists():
            return None
        return int(read_number(self.summary, "steps"))


@dataclasses.dataclass(frozen=True)
class OpenRun(RunFolder):
    """A run folder whose lock this process holds."""

    # Number of steps that the schedules of learning rate and noise span: `config.steps` of the
    # first start. A later start with more steps extends the run and leaves the schedules alone.
    schedule_steps: int
    resumed: bool  # whether a step of this run was logged or saved before
    # Fields that are `resume.is_source` and not as before. The caller compares fingerprints, then
    # calls `record_sources`.
    moved: tuple[str, ...] = ()
    # What to print of changed fields that move only memory or time, once the start is not refused.
    note: str = ""


def origin_of(init_from: str) -> tuple[RunFolder, bool]:
    """The folder that `init_from` of a config names, and whether it asks for the best adapter."""
    path = init_from.removesuffix(BEST)
    return RunFolder(user_path(path)), path != init_from


def config_dict(config: ConfigDict) -> dict[str, Any]:
    """The config as a plain dict that JSON gives back unchanged (tuples become lists).

    Raises:
        UserError: a field holds a value that JSON cannot represent.
    """
    return _plain(config.to_dict(), "config")


def config_digest(config: ConfigDict) -> str:
    """Eight hex digits that identify the config, without the fields that may change in a run."""
    fields = {
        field: value
        for field, value in flatten(config_dict(config)).items()
        if not resume.is_free(field) and not resume.moves_only_memory(field, config)
    }
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:8]


def default_folder(config: ConfigDict) -> Path:
    """`runs/EXPERIMENT-PRESET-FINGERPRINT`, relative to the working directory."""
    return Path("runs") / f"{config.experiment}-{config.preset}-{config_digest(config)}"


@contextlib.contextmanager
def open_run(path: str | Path | None, config: ConfigDict) -> Iterator[OpenRun]:
    """Creates or reopens a run folder and holds its lock until the block ends.

    Args:
        path: the folder; None means `default_folder(config)`.
        config: the resolved config. In a run that has begun it must equal the saved config, except
            for the fields that are free, as `resume.is_free` says, and for those that move only
            memory or time. A run without any step takes the new config.

    A start that fails before its first step removes the folder that it made.

    Yields:
        The open run.

    Raises:
        UserError: the folder cannot be made, is in use, holds other files, or holds a run with
            another config.
    """
    folder = RunFolder(default_folder(config) if path is None else user_path(path))
    absolute = folder.path.absolute()
    new_folders = [part for part in (absolute, *absolute.parents) if not part.exists()]
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        _check_ours(folder)  # before the lock, so that a folder of something else is untouched
        check_paths(folder)
    except OSError as error:
        raise UserError(f"cannot use {folder.path} as a run folder: {error}") from error
    with _lock_run(folder.path), _remove_if_block_fails(folder, new_folders):
        saved_run = read_run(folder.config)
        resumed = saved_run is not None and _has_begun(folder)
        _check_no_outputs(folder)
        if resumed:
            schedule_steps = saved_run["schedule_steps"]
            moved, note = _take_changes(folder, saved_run, config)
        else:
            moved, note = (), ""
            schedule_steps = config.steps
            content = {"config": config_dict(config), "schedule_steps": schedule_steps}
            content |= provenance()
            write_config(folder.config, content)
        steps = saved_steps(folder.checkpoints)
        try:
            yield OpenRun(folder.path, schedule_steps, resumed, moved, note)
        except UserError:
            # A start that is refused has taken no step with the fields that it changed.
            same_steps = saved_steps(folder.checkpoints) == steps
            if resumed and same_steps and read_run(folder.config) != saved_run:
                write_config(folder.config, saved_run, signs=has_own_tag(saved_run))
            raise


def record_sources(folder: OpenRun, config: ConfigDict) -> None:
    """Records in config.json where the weights and the problems of a run are now."""
    saved_run = json.loads(read_bytes(folder.config))
    has_tag, new_config = has_own_tag(saved_run), config_dict(config)
    for field in folder.moved:
        _copy_field(field, new_config, saved_run["config"])
    write_config(folder.config, saved_run, signs=has_tag)


def _copy_field(name: str, source: dict[str, Any], target: dict[str, Any]) -> None:
    """Gives a field, such as 'data.path', its value in another config; absent there, none."""
    *sections, last = name.split(".")
    for section in sections:
        source, target = source.get(section, {}), target.setdefault(section, {})
    target.pop(last, None)
    target |= {last: source[last]} if last in source else {}


def record_fact(folder: RunFolder, name: str, fact: dict[str, Any]) -> None:
    """Records a fact in config.json next to the config, such as where the run began from."""
    saved_run = json.loads(read_bytes(folder.config))
    write_config(folder.config, saved_run | {name: fact}, signs=has_own_tag(saved_run))


@contextlib.contextmanager
def _remove_if_block_fails(folder: RunFolder, new_folders: Sequence[Path]) -> Iterator[None]:
    """After an exception, removes folders that are new if nothing in them is worth keeping.

    The new folders go from the run folder, whose lock this process holds, to its farthest parent.
    """
    try:
        yield
    except BaseException:
        if new_folders and not _has_begun(folder):
            shutil.rmtree(folder.programs, ignore_errors=True)  # JAX's cache has them too.
            own_files = {folder.lock, folder.config, folder.calibration}
            own_files.add(folder.teacher_calibration)
            with contextlib.suppress(OSError):  # A folder that is not empty stays.
                for path in [path for path in folder.path.iterdir() if path.is_dir()]:
                    path.rmdir()
                if set(folder.path.iterdir()) <= own_files:
                    for path in own_files:
                        path.unlink(missing_ok=True)
                    for path in new_folders:
                        path.rmdir()
        raise


def lock_holder(path: Path) -> str | None:
    """The process that trains in a run folder, as 'process 123 on host', or None.

    Raises:
        UserError: the lock is a link or another odd type, or cannot be opened or locked.
    """
    file = RunFolder(path).lock
    try:
        lock = open_to_write(file, "r+")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"cannot use {path} as a run folder: {error}") from error
    with lock:
        try:
            with hold(lock.fileno(), file, remedy=_REMEDY):
                return None
        except InUseError as error:
            return _read_holder(lock, error)


@contextlib.contextmanager
def _lock_run(path: Path) -> Iterator[None]:
    """Holds the lock of a run folder, and names this process in it."""
    file = RunFolder(path).lock
    with contextlib.ExitStack() as stack:
        try:
            lock = stack.enter_context(open_to_write(file, "a+"))
            try:
                stack.enter_context(hold(lock.fileno(), file, remedy=_REMEDY))
            except InUseError as error:
                raise UserError(
                    f"{path} is in use by {_read_holder(lock, error)}; wait for it, stop it, or "
                    "pass another --workdir"
                ) from error
            os.ftruncate(lock.fileno(), 0)
            os.write(lock.fileno(), f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        except OSError as error:
            raise UserError(f"cannot use {path} as a run folder: {error}") from error
        yield


def _read_holder(lock: IO[str], error: InUseError) -> str:
    if error.here:
        return "another run of this process"
    text = os.pread(lock.fileno(), _HOLDER_BYTES, 0).decode(errors="replace")
    return visible(text).strip() or "another process"


def _check_ours(folder: RunFolder) -> None:
    """Refuses a folder that is neither empty nor the folder of a run.

    config.json alone does not make a run folder: models, exports and other trainers have one too.
    """
    if folder.config.exists():
        if read_run(folder.config) is None:
            raise UserError(
                f"{folder.path} is not a run folder: no run wrote its {folder.config.name}; pass a "
                f"new or empty folder as --workdir, or restore {folder.config.name} if a run was "
                "there"
            )
        return
    others = sorted(p.name for p in folder.path.iterdir() if not _is_remnant_of_start(folder, p))
    if others and not folder.config.exists():  # Another start may have written it by now.
        raise UserError(
            f"{folder.path} is not a run folder: it has no {folder.config.name} but holds "
            f"{others[0]}; pass a new or empty folder as --workdir"
        )


def check_paths(folder: RunFolder) -> None:
    """Refuses a run folder with a link, or another odd type, where a run writes or removes.

    Raises:
        UserError: the path of a file or a folder, or one inside a folder that libraries fill, is
            something else.
    """
    for path in (*folder.files(), *folder.path.glob(f"{folder.lock.name}.*")):
        check_file(path)
    for path in folder.filled_by_libraries():
        check_tree(path)
    for path in folder.replaced_as_a_whole():
        check_folder(path)
        check_folder(scratch_of(path))
    for path in (folder.evaluations, folder.exports, folder.wandb):
        check_folder(path)


def _is_remnant_of_start(folder: RunFolder, path: Path) -> bool:
    """Whether a start that ended before it wrote config.json left this file."""
    if path == folder.lock:
        return (
            re.fullmatch(r"(process \d+ on .*\n)?", read_text(path, errors="replace")) is not None
        )
    return path.name.startswith(f"{folder.config.name}.") and path.name.endswith(TEMPORARY)


def _check_no_outputs(folder: RunFolder) -> None:
    """Refuses to begin a run in place of one whose checkpoints are gone.

    The first policy is written once a checkpoint is on disk. Only the best one can be earlier, in a
    start that was killed; that one has logged a step.
    """
    if saved_steps(folder.checkpoints):
        return
    outputs = [folder.summary, folder.adapter(), folder.model()]
    if not _has_begun(folder):
        outputs += [folder.adapter(best=True), folder.model(best=True)]
    for path in outputs:
        if path.exists():
            raise UserError(
                f"{folder.path} holds {path.name} but no checkpoint to resume from; training would "
                "overwrite it: pass a new or empty folder as --workdir"
            )


def read_run(path: Path) -> dict[str, Any] | None:
    """Returns the content of a config.json that a run wrote, or None for any other file."""
    try:
        content = json.loads(read_bytes(path))
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or not isinstance(content.get("config"), dict):
        return None
    if not is_shallow(content):
        return None
    return content if type(content.get("schedule_steps")) is int else None


def saved_steps(checkpoints: Path) -> set[int]:
    """The steps that have a complete checkpoint in a folder, which need not exist."""
    names = (path.name for path in checkpoints.glob("*") if path.is_dir())
    return {int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name)}


def _has_begun(folder: RunFolder) -> bool:
    """Whether a step was logged or saved; a start that failed before leaves nothing to keep."""
    if saved_steps(folder.checkpoints):
        return True
    rows = read_rows_of_steps(folder.metrics) if folder.metrics.exists() else []
    return any(row["step"] > 0 for row in rows)


def check_run_folder(path: Path, config: ConfigDict) -> int:
    """Refuses what `open_run` refuses, without making or changing anything.

    Whether another process trains in the folder, which need not exist, is not looked up.

    Returns:
        The number of steps that the schedules span, as in `OpenRun`.

    Raises:
        UserError: as in `open_run`.
    """
    folder = RunFolder(path)
    existing = next(part for part in (path.absolute(), *path.absolute().parents) if part.exists())
    if not existing.is_dir():
        raise UserError(f"cannot use {path} as a run folder: {existing} is a file")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"cannot use {path} as a run folder: {existing} cannot be written")
    if not path.exists():
        return config.steps
    _check_ours(folder)
    check_paths(folder)
    _check_no_outputs(folder)
    saved_run = read_run(folder.config)
    if saved_run is None or not _has_begun(folder):
        return config.steps
    _compare(folder, saved_run, config)
    return saved_run["schedule_steps"]


def _take_changes(
    folder: RunFolder, saved_run: dict[str, Any], config: ConfigDict
) -> tuple[tuple[str, ...], str]:
    """Compares the saved config with the new one, and saves the changes that are allowed.

    Returns the fields that are `resume.is_source` and changed, which are not saved yet, and what to
    print of the others.

    Raises:
        UserError: a field changed that changes how the run trains.
    """
    allowed_changes, moved = _compare(folder, saved_run, config)
    if not allowed_changes or (folder.finished_steps() or 0) >= config.steps:
        return moved, ""  # A finished run takes no step with new values.
    changes = visible(", ".join(f"{field}: {change}" for field, change in allowed_changes.items()))
    note = (
        f"changed: {changes}. These fields move only memory or time, so the run continues, but "
        "from here on its numbers are no longer bit for bit those of an uninterrupted run"
    )
    new_config = config_dict(config)
    history = {"changes": [*saved_run.get("changes", []), allowed_changes]}
    # The number of steps stays the one of the first start, as without such a change.
    new_config["steps"] = saved_run["config"].get("steps", new_config.get("steps"))
    for field in moved:
        _copy_field(field, saved_run["config"], new_config)
    content = saved_run | {"config": new_config} | history
    write_config(folder.config, content, signs=has_own_tag(saved_run))
    return moved, note


def _compare(
    folder: RunFolder, saved_run: dict[str, Any], config: ConfigDict
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Returns the changes that move only memory or time, and the changed `resume.is_source` fields.

    Raises:
        UserError: a field changed that changes how the run trains.
    """
    old_fields, new_fields = flatten(saved_run["config"]), flatten(config_dict(config))
    allowed_changes, refused_changes = resume.differences(old_fields, new_fields, config)
    moved = tuple(filter(resume.is_source, refused_changes))
    refused_changes = {f: text for f, text in refused_changes.items() if f not in moved}
    if refused_changes:
        changes = ", ".join(f"{field}: {change}" for field, change in refused_changes.items())
        begin = f"--config.init_from={folder.path}"
        remedy = f"restore these values or pass another --workdir, with {begin} to begin from here"
        raise UserError(f"{folder.path} holds a run of another config ({changes}); {remedy}")
    return allowed_changes, moved


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


def flatten(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The fields of a config by flattened name, such as 'aqn.form'."""
    flat = {}
    for key, value in fields.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
