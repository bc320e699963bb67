"""A new run that begins where another one is: `init_from` of the config.

The new run takes the other's adapter, optimizer state and position in the data, and counts its own
steps from 0. All of it lies in its own folder before it trains, so the other run may vanish. The
other run is only read, whether it is finished, stopped or under way.
"""

import dataclasses
import json
import os
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from qerl_jax.data.from_config import training_digests
from qerl_jax.data.order import Cursor, read_cursor
from qerl_jax.errors import UserError
from qerl_jax.policy.policy import Policy
from qerl_jax.policy.sharding import shard
from qerl_jax.policy.trainable import Trainable, checksum, current_policy
from qerl_jax.rl.train_step import TrainState, init_state
from qerl_jax.run.checkpoints import read_latest
from qerl_jax.run.folder import (
    BEST,
    OpenRun,
    RunFolder,
    config_dict,
    flatten,
    origin_of,
    read_run,
    record_fact,
)
from qerl_jax.run.saved_fields import check_meta, check_run
from qerl_jax.system.jsonl import read_number
from qerl_jax.system.safe_files import read_bytes
from qerl_jax.training.initial_policy import policy_digest
from qerl_jax.training.setup import Setup
from qerl_jax.training.step import Progress
from qerl_jax.weights.peft import load_peft_adapter, save_peft_adapter

# Folded into the key of the run, and then a checksum of the parameters that it begins with: the
# noise and the draws of the other run, whose seed is the same where the position in the data goes
# on, are not drawn again.
KEY_ORIGIN = 2**32 - 2
_REMEDY = "begin from a run that has ended, or start again"
_ATTEMPTS, _PAUSE = 8, 0.25  # reads of a run that saves meanwhile, and the seconds between two
# The fields that say what the trained parameters are. The scale of the adapter is among them: the
# same parameters with another scale are another policy.
_SAME_FIELDS = (
    "model.format",
    "model.calibration",
    "lora.rank",
    "lora.alpha",
    "lora.rslora",
    "lora.targets",
    "train.parameters",
)


def check_origin(config: ConfigDict) -> None:
    """Refuses a run to begin from that does not fit the config, before a model is loaded.

    Args:
        config: the resolved config; without `init_from` nothing is checked.

    Raises:
        UserError: the run cannot be read, has nothing to begin from, or trains other parameters.
    """
    if not config.init_from:
        return
    folder, best = origin_of(config.init_from)
    saved = _saved_config(folder)
    saved_fields, fields = flatten(saved), flatten(config_dict(config))
    changes = {
        name: (saved_fields.get(name), fields[name])
        for name in _SAME_FIELDS
        if saved_fields.get(name) != fields[name]
    }
    if fields["train.parameters"] == "full":
        changes = {name: v for name, v in changes.items() if not name.startswith("lora.")}
    if changes:
        text = ", ".join(
            f"{name}: {json.dumps(a)} -> {json.dumps(b)}" for name, (a, b) in changes.items()
        )
        other = "begin without its adapter"
        if saved_fields["train.parameters"] == "full":
            other = f"begin from its model, --config.model.source={folder.model(best=best)}"
        raise UserError(
            f"init_from={config.init_from}: the run trains other parameters ({text}); keep these "
            f"fields, or {other}"
        )
    if config.train.parameters == "full" and (best or config.rl.kl_coef):
        reason = BEST if best else f"rl.kl_coef={config.rl.kl_coef}"
        raise UserError(
            f"init_from={config.init_from} with train.parameters='full' and {reason}: a run begins "
            f"so from the model alone, --config.model.source={folder.model(best=best)}"
        )
    if best and not folder.adapter(best=True).is_dir():
        raise UserError(
            f"init_from={config.init_from}: the run has no best adapter yet; leave out {BEST} to "
            "begin from its last checkpoint"
        )


def begin_from(
    setup: Setup, folder: OpenRun, problem_digests: Mapping[str, str]
) -> tuple[Setup, Progress]:
    """Begins a run from another one: reads it, prints what it takes over, and records it.

    Args:
        setup: the parts of the new run.
        folder: the folder of the new run.
        problem_digests: digests of its problems by split.

    Returns:
        The setup, whose reference policy is the one that training starts from, and the progress
        before the first step.

    Raises:
        UserError: the other run has no readable checkpoint, or has another base.
    """
    config = setup.config
    origin, best = origin_of(config.init_from)
    step, state, meta = _read_together(setup, origin, best=best)
    check_meta(origin.checkpoints, meta)
    if meta["fingerprint"] != setup.model.fingerprint:
        raise UserError(
            f"init_from={config.init_from}: the run was trained on other weights than those of "
            f"{config.model.source}; pass its --config.model.source"
        )
    architecture = setup.model.config.digest
    if meta.get("architecture", architecture) != architecture:
        raise UserError(
            f"init_from={config.init_from}: the architecture (config.json) of "
            f"{config.model.source} is not that of the run; pass its --config.model.source"
        )
    reset_reason = _optimizer_reset_reason(config, _saved_config(origin), best=best)
    cursor, cursor_note = _cursor(setup, origin, meta, problem_digests)
    if reset_reason:
        state = init_state(state.trainable, setup.method.optimizer)
    state = _reset_schedule(state)
    print(
        f"beginning from {'the best adapter' if best else 'the checkpoint'} of step {step} of "
        f"{origin.path}; {reset_reason or 'its optimizer state goes on'}; {cursor_note}",
        flush=True,
    )
    origin_checksum = checksum(state.trainable)
    if setup.processes.writes:
        record_fact(
            folder,
            "init_from",
            {
                "run": str(origin.path.resolve()),
                "step": step,
                "best": best,
                "optimizer": not reset_reason,
                "cursor": cursor.without_scores().to_json(),
                "checksum": origin_checksum,
            },
        )
        if config.rl.kl_coef:
            save_peft_adapter(
                folder.first_adapter,
                state.trainable,
                setup.method.lora_config,
                base_model=setup.model.source,
            )
    facts = {"step": step, "cursor": cursor.to_json(), "parameters": origin_checksum}
    setup.processes.check_same(facts, _REMEDY)
    setup = restore_origin(setup, folder, origin_checksum)
    return setup, Progress(step=0, state=state, cursor=cursor)


def _read_together(
    setup: Setup, origin: RunFolder, *, best: bool
) -> tuple[int, TrainState, dict[str, Any]]:
    """Reads what the run begins from, the same in all processes, though the other run may save.

    Process 0 chooses the checkpoint.

    Returns:
        The step, the state, with the best adapter if that is asked for, and the meta object of the
        checkpoint.

    Raises:
        UserError: process 0 cannot read one, or the other processes cannot read the same one.
    """
    exchange, chosen = setup.processes.exchange_json, None
    for _ in range(_ATTEMPTS):
        checkpoint = identity = None
        try:
            checkpoint = read_latest(origin.checkpoints, setup.state_shapes, step=chosen)
        except UserError:
            if setup.processes.writes:
                raise
        if checkpoint is not None:
            number, state, meta = checkpoint
            if best:
                step, trainable = _read_best(setup, origin)
                checkpoint = step, dataclasses.replace(state, trainable=trainable), meta
            identity = [number, checkpoint[0], checksum(checkpoint[1].trainable)]
        first, *others = exchange(identity)
        if first is None:
            raise UserError(
                f"init_from={setup.config.init_from}: the run has no checkpoint yet; it writes one "
                "every checkpoint.every steps and when SIGTERM stops it"
            )
        if checkpoint is not None and all(other == first for other in others):
            return checkpoint
        chosen = None if setup.processes.writes else first[0]
        time.sleep(_PAUSE)
    raise UserError(
        f"init_from={setup.config.init_from}: the processes read other checkpoints than process 0; "
        f"{_REMEDY}"
    )


def _read_best(setup: Setup, origin: RunFolder) -> tuple[int, Trainable]:
    """Reads the best adapter of a run, and its step, which are those of one save.

    A run replaces the folder first, and then writes best.json with the checksum of the adapter.

    Raises:
        UserError: they cannot be read, or do not belong together.
    """
    path = origin.adapter(best=True)
    for attempt in range(_ATTEMPTS):
        try:
            place = path.stat()
            step = int(read_number(origin.best, "step"))
            saved = read_number(origin.best, "checksum")
            trainable = load_peft_adapter(path, setup.model.config, setup.method.lora_config)
            replaced = not os.path.samestat(place, path.stat())
        except (OSError, UserError):
            if attempt == _ATTEMPTS - 1:
                raise
        else:
            if not replaced and saved == checksum(trainable):
                return step, trainable
        time.sleep(_PAUSE)
    raise UserError(
        f"init_from={setup.config.init_from}: {path} and {origin.best.name} are of different "
        f"steps, as after the run was killed between both: go on with the run, or leave out {BEST}"
    )


def restore_origin(setup: Setup, folder: RunFolder, crc: int | None = None) -> Setup:
    """The setup of a run that began from another one: its own key, and its reference policy.

    The reference policy is the one that training starts from, whose adapter lies in the folder of
    the run. A run that began alone has its setup unchanged.

    Args:
        setup: the parts of the run.
        folder: the run folder.
        crc: checksum of the parameters that the run begins with; None reads what `begin_from`
            recorded.

    Raises:
        UserError: the adapter cannot be read, or config.json has no checksum.
    """
    if not setup.config.init_from:
        return setup
    if crc is None:
        origin = json.loads(read_bytes(folder.config)).get("init_from")
        crc = origin.get("checksum") if isinstance(origin, dict) else None
        if not (type(crc) is int and 0 <= crc < 2**32):
            raise UserError(
                f"{folder.config} is damaged: init_from.checksum is {crc!r:.60} and not a number "
                "of 32 bits; restore the file, or pass another --workdir"
            )
    key = jax.random.fold_in(jax.random.fold_in(setup.key, KEY_ORIGIN), crc)
    setup = dataclasses.replace(setup, key=key)
    if not setup.config.rl.kl_coef:
        return setup
    start = load_peft_adapter(folder.first_adapter, setup.model.config, setup.method.lora_config)
    reference = Policy(current_policy(setup.model.params, start), start.lora)
    if setup.mesh is not None:
        reference = shard(reference, setup.mesh)
    return dataclasses.replace(
        setup, reference=reference, reference_digest=policy_digest(reference)
    )


def _saved_config(folder: RunFolder) -> dict[str, Any]:
    saved = read_run(folder.config)
    if saved is None:
        raise UserError(
            f"init_from={folder.path} is not a run folder: no run wrote {folder.config}; pass "
            f"FOLDER of a run, or FOLDER{BEST} for its best adapter"
        )
    check_run(folder.config, saved)
    return saved["config"]


def _optimizer_reset_reason(config: ConfigDict, saved: Mapping[str, Any], *, best: bool) -> str:
    """The reason why the optimizer starts anew; '' if it keeps the state of the other run."""
    if best:
        return "the optimizer starts anew, as its state is that of the last step"
    saved_options = saved["optimizer"]
    options = config_dict(config)["optimizer"]
    changes = [
        name
        for name in sorted(saved_options.keys() | options.keys())
        if saved_options.get(name) != options.get(name)
    ]
    if not changes:
        return ""
    text = ", ".join(f"optimizer.{name}" for name in changes)
    return f"the optimizer starts anew, as {text} changed"


def _cursor(
    setup: Setup, origin: RunFolder, meta: Mapping[str, Any], problem_digests: Mapping[str, str]
) -> tuple[Cursor, str]:
    """The position at which the new run begins in its data, and a line about it."""
    saved_digests, digests = (
        training_digests(meta["problems"]),
        training_digests(problem_digests),
    )
    if saved_digests != digests:
        return Cursor(), "the training problems are others, so they start at the first"
    if _saved_config(origin)["seed"] != setup.config.seed:
        return Cursor(), "their order has another seed, so the problems start at the first"
    cursor = read_cursor(meta["cursor"])
    if not setup.collect.order.curriculum_share:
        cursor = cursor.without_scores()
    return cursor, "its position in the problems goes on"


def _reset_schedule(state: TrainState) -> TrainState:
    """The state with the schedule of the learning rate at its beginning.

    Adam's own count stays: it corrects the bias of the moments, which stay too.
    """

    def is_schedule(part: Any) -> bool:
        # A count alone: that of `optax.inject_hyperparams` has no public name.
        return isinstance(part, tuple) and getattr(part, "_fields", ()) == ("count",)

    def begin(part: Any) -> Any:
        return part._replace(count=jnp.zeros_like(part.count)) if is_schedule(part) else part

    schedules = jax.tree.map(begin, state.opt_state, is_leaf=is_schedule)
    return dataclasses.replace(state, opt_state=schedules, skipped_in_a_row=jnp.int32(0))
