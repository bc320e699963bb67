"""Checkpoints of the state of a run: saved in the background, verified when restored.

Orbax writes a checkpoint under a temporary name and renames it when it is complete, so a process
that is killed while it saves leaves the earlier checkpoints as they were. Orbax does not notice
altered bytes inside a complete checkpoint, so a CRC-32 of the arrays is saved with them.

Where a run has several processes, all of them hold the whole state and make the same calls of
`Checkpoints`: Orbax writes the arrays of process 0, and every process restores them. They exchange
which checkpoints they could not read, so that all of them resume from the same one.
"""

import contextlib
import dataclasses
import functools
import shutil
import sys
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from qerl_jax.errors import UserError, visible
from qerl_jax.run.folder import saved_steps
from qerl_jax.system.safe_files import check_tree, remove_tree

_MARGIN_BYTES = 64 * 2**20


def _orbax() -> Any:
    """Orbax, whose import takes seconds, where something is saved or restored."""
    from orbax.checkpoint import v1

    return v1


class Checkpoints:
    """The checkpoints of one run, at `folder/STEP`; use it as a context manager.

    Args:
        folder: folder of the checkpoints; made if missing. The remains of an interrupted save are
            removed, so the caller must hold the run's lock.
        keep: number of newest checkpoints that are kept.
        exchange: function that gives a value, which is JSON, to all processes of the run, and
            returns the values of all, in their order; the default is that of a single process.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep: int,
        exchange: Callable[[Any], list[Any]] = lambda value: [value],
    ):
        if keep < 1:
            raise UserError(f"checkpoint.keep is {keep}: at least 1 checkpoint must be kept")
        self._folder, self._exchange = Path(folder).resolve(), exchange
        # Orbax would do this in a thread that may outlive the interpreter.
        for scratch in self._folder.glob("*.orbax-checkpoint-tmp") if _is_first() else ():
            remove_tree(scratch)
        with _write_from_first_process():
            self._checkpointer = _orbax().training.Checkpointer(
                str(self._folder),
                preservation_policy=_orbax().training.preservation_policies.LatestN(keep),
            )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    @property
    def steps(self) -> list[int]:
        """The steps that have a checkpoint, ascending, including one that is being written."""
        return [checkpoint.step for checkpoint in self._checkpointer.checkpoints]

    def save(self, step: int, state: Any, meta: dict[str, Any]) -> None:
        """Saves in the background; returns when `state` is copied and may be donated.

        Waits for the previous save. Does nothing when `step` is saved already.

        Args:
            step: number of finished steps.
            state: a tree of arrays (typed PRNG keys included).
            meta: a small JSON object, given back by `restore_latest`.

        Raises:
            UserError: no disk space, or the previous save failed.
        """
        self.wait()
        if step in self.steps:
            return
        self.require_space(state)
        state = jax.tree.map(_one_copy, state)
        custom: dict[str, Any] = {"crc32": _crc32(state), "meta": meta}
        self._checkpointer.save_async(step, state, force=True, custom_metadata=custom)

    def require_space(self, state: Any) -> None:
        """Raises a UserError when the disk has no space for a checkpoint of `state`."""
        num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        require_free_space(self._folder, num_bytes + _MARGIN_BYTES)

    def wait(self) -> None:
        """Waits until the last save is on disk.

        Raises:
            UserError: the checkpoint could not be written. The earlier checkpoints are intact.
        """
        try:
            self._checkpointer.wait()
        except Exception as error:
            raise UserError(
                f"a checkpoint could not be written to {self._folder} ({_root_cause(error)}); "
                "the earlier ones are intact"
            ) from error

    def restore_latest(self, like: Any) -> tuple[int, Any, dict[str, Any]] | None:
        """Restores the newest checkpoint that is undamaged.

        A damaged checkpoint is reported on stderr and renamed to `damaged-STEP`, so that its step
        can be saved again; then the checkpoint before it is tried. A checkpoint counts as damaged
        in all processes if one of them cannot read it.

        Args:
            like: a state, or its `jax.eval_shape`, with the tree, shapes, dtypes and shardings of
                the result. An array without a sharding goes to the first device.

        Returns:
            The step, the state and the meta object; None when there is no checkpoint.

        Raises:
            UserError: there are checkpoints, and none can be read.
        """
        self.wait()
        abstract = jax.tree.map(_abstract, like)
        failures = {}
        # Process 0 decides: a network file system may show other steps to the others.
        steps, *_ = self._exchange(self.steps)
        for step in reversed(steps):
            checkpoint, reason = None, None
            try:
                checkpoint = self._load(step, abstract)
            except Exception as error:
                reason = _root_cause(error)
            reasons = self._exchange(reason)
            readers = [number for number, message in enumerate(reasons) if message is not None]
            if checkpoint is not None and not readers:
                self._rename_damaged(failures, step)
                return step, *checkpoint
            reader = f"process {readers[0]}: " if len(readers) < len(reasons) else ""
            failures[step] = f"{reader}{reasons[readers[0]]}"
        if failures:
            details = "; ".join(f"{step}: {reason}" for step, reason in failures.items())
            raise UserError(
                f"no checkpoint in {self._folder} can be read ({details}); "
                "to train from the start, pass another --workdir"
            )
        return None

    def close(self) -> None:
        """Waits for the last save and releases the threads; raises what `wait` raises."""
        try:
            self.wait()
        finally:
            self._checkpointer.close()

    def _load(self, step: int, abstract: Any) -> tuple[Any, dict[str, Any]]:
        found = self._checkpointer.metadata(step)
        return _checked(found, lambda: self._checkpointer.load(step, abstract))

    def _rename_damaged(self, failures: dict[int, str], restored_step: int) -> None:
        for step, reason in failures.items() if _is_first() else ():
            target = self._folder / f"damaged-{step}"
            number = 1
            while target.exists():
                number += 1
                target = self._folder / f"damaged-{step}-{number}"
            (self._folder / str(step)).rename(target)
            print(
                f"WARNING: the checkpoint of step {step} is damaged ({reason}) and is now at "
                f"{target}. Resuming from step {restored_step}.",
                file=sys.stderr,
                flush=True,
            )
        if failures:
            self._exchange(None)  # All processes see the folder after process 0 has renamed.
            self._checkpointer.reload()


def read_latest_meta(folder: str | Path) -> dict[str, Any]:
    """Returns the meta object of the newest checkpoint in a folder, {} without a readable one.

    It reads no arrays and changes nothing, so that a run may train in the meantime.
    """
    for step in sorted(saved_steps(Path(folder)), reverse=True):
        path = Path(folder) / str(step)
        # An incomplete or damaged checkpoint raises exceptions without a common class.
        with contextlib.suppress(Exception), _one_process_context():
            check_tree(path)
            custom: Any = _orbax().metadata(str(path.resolve())).custom_metadata
            return custom["meta"]
    return {}


def read_latest(
    folder: str | Path, like: Any, *, step: int | None = None
) -> tuple[int, Any, dict[str, Any]] | None:
    """Reads the newest undamaged checkpoint of a folder, and changes nothing there.

    A run may train in the meantime and remove the checkpoint that is being read; then the next one
    is read.

    Args:
        folder: folder of the checkpoints of a run.
        like: as in `Checkpoints.restore_latest`. Where an array has parts in other processes, this
            process gets the whole array on its first device.
        step: the step of the checkpoint to read, and no other; None is the newest.

    Returns:
        As `Checkpoints.restore_latest` does.

    Raises:
        UserError: there are checkpoints, and none can be read.
    """
    abstract = jax.tree.map(functools.partial(_abstract, local=True), like)
    reasons: dict[int, str] = {}
    for _ in range(3):
        steps = saved_steps(Path(folder))
        steps = steps if step is None else steps & {step}
        for number in sorted(steps - reasons.keys(), reverse=True):
            path = Path(folder) / str(number)
            # An incomplete or damaged checkpoint raises exceptions without a common class.
            try:
                return number, *_read(path, abstract)
            except Exception as error:
                reasons[number] = _root_cause(error)
    if reasons:
        details = "; ".join(f"{step}: {reason}" for step, reason in reasons.items())
        raise UserError(f"no checkpoint in {folder} can be read ({details})")
    return None


def _read(path: Path, abstract: Any) -> tuple[Any, dict[str, Any]]:
    """Reads the state and the meta object of a checkpoint, or raises any exception."""
    check_tree(path)  # Orbax would wait for a pipe.
    with _one_process_context():
        found = _orbax().metadata(str(path.resolve()))
        return _checked(found, lambda: _orbax().load(str(path.resolve()), abstract))


def _checked(found: Any, load: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """Loads a checkpoint with the metadata `found`; returns its state and its meta object.

    Raises:
        ValueError: it is not what a run has saved.
    """
    custom = found.custom_metadata
    if not isinstance(custom, dict) or not isinstance(custom.get("meta"), dict):
        raise ValueError("its metadata is missing")
    for array in jax.tree.leaves(found.metadata):
        storage = getattr(array, "storage_metadata", None)
        parts = (storage and storage.chunk_shape) or ()
        # Memory for a whole part is taken before it is read, and the process dies without it.
        if any(part > max(1, size) for part, size in zip(parts, array.shape, strict=True)):
            raise ValueError(f"an array of the shape {array.shape} is stored in parts of {parts}")
    state = load()
    if _crc32(state) != custom["crc32"]:
        raise ValueError("its arrays do not match their checksum")
    return state, custom["meta"]


def require_free_space(path: str | Path, num_bytes: int) -> None:
    """Raises a UserError when the file system of `path` has less than `num_bytes` bytes free."""
    free = shutil.disk_usage(path).free
    if free < num_bytes:
        raise UserError(
            f"no disk space: {path} needs {num_bytes / 1e9:.2f} GB and has {free / 1e9:.2f} GB "
            "free; free some and run the same command again"
        )


def _is_first() -> bool:
    return jax.process_index() == 0


def _write_from_first_process() -> contextlib.AbstractContextManager[Any]:
    """Lets Orbax write what all processes hold from the first one, and not a part from each."""
    if jax.process_count() == 1:
        return contextlib.nullcontext()
    options: Any = _orbax().options

    class AsyncOptions(options.AsyncOptions):
        def v0(self) -> Any:
            return dataclasses.replace(super().v0(), barrier_sync_fn=_wait_unless_failed)

    saving = options.ArrayOptions.Saving(use_replica_parallel=False)
    return _orbax().Context(
        array_options=options.ArrayOptions(saving=saving), async_options=AsyncOptions()
    )


def _wait_unless_failed(*, key: str, timeout_ms: int) -> None:
    """Waits for the other processes, as Orbax's own function; one that could not write does not.

    Orbax calls it in the `finally` of the thread that writes. There the others never come: they
    wait until this one has written, for twenty minutes, and hear of its error before that only if
    it raises. Orbax also calls it in the thread that asks for a save, which may do so while it
    handles an error, such as the signal that stops the run.
    """
    error = sys.exception()
    if error is not None and threading.current_thread() is not threading.main_thread():
        raise error
    from orbax.checkpoint import multihost

    multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)


def _one_process_context() -> contextlib.AbstractContextManager[Any]:
    """Lets Orbax read in this process without the other processes of the run."""
    if jax.process_count() == 1:
        return contextlib.nullcontext()
    process = jax.process_index()
    multiprocessing = _orbax().options.MultiprocessingOptions
    options = multiprocessing(primary_host=process, active_processes={process})
    return _orbax().Context(multiprocessing_options=options)


def _one_copy(leaf: Any) -> Any:
    """Returns an array that several devices hold as the first of them does.

    Of such an array Orbax would cut a part from each device, and compile programs to do so. Where
    other processes hold it too, Orbax must know of them.
    """
    if jax.process_count() > 1:
        return leaf
    is_on_several_devices = isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1
    if is_on_several_devices and leaf.is_fully_replicated:
        return leaf.addressable_shards[0].data
    return leaf


def _abstract(leaf: Any, *, local: bool = False) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or (local and not sharding.is_fully_addressable):
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _crc32(state: Any) -> int:
    """CRC-32 of the arrays' bytes, in tree order."""
    crc = 0
    for leaf in jax.tree.leaves(state):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        crc = zlib.crc32(np.ascontiguousarray(leaf).view(np.uint8), crc)
    return crc


def _root_cause(error: BaseException) -> str:
    """The first cause of an error, in one line of at most 200 characters."""
    while cause := error.__cause__ or error.__context__:
        error = cause
    text = visible(" ".join(str(error).split())) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
