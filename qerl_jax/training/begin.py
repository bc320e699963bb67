"""Where a run begins: at step 0, at its latest checkpoint, or where another run is (`init_from`).

A run that begins from another one takes its adapter, optimizer state and position in the data, and
counts its own steps from 0. All of it is in its own folder before it trains, so the other run may
vanish. The other run is only read, whether it is finished, stopped or training.

Why a resumed run equals an uninterrupted one: a step reads `Setup` and changes `Progress` alone, a
checkpoint holds all of `Progress`, and `_check_same` compares the digests of what `Setup` is made
of: weights, architecture, end tokens, problems, prompts. Versions, devices and the code of rewards
and losses are compared between processes, not with those before a kill.
"""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from qerl_jax.compile.count import Compilations
from qerl_jax.config.fields import has_own_evaluation, learns_from_text
from qerl_jax.config.resume import with_defaults
from qerl_jax.data.from_config import (
    EVAL,
    TRAIN,
    by_source,
    mixture_of,
    problem_digests,
    training_digests,
)
from qerl_jax.data.order import Cursor, read_cursor
from qerl_jax.errors import UserError
from qerl_jax.evaluation.load_policy import warn_of_another_base
from qerl_jax.evaluation.task_prompts import check_prompts, digest_of_prompts
from qerl_jax.policy.kl_control import SigmaState
from qerl_jax.policy.policy import Policy
from qerl_jax.policy.sharding import shard
from qerl_jax.policy.trainable import Trainable, checksum, current_policy
from qerl_jax.processes.group import Processes
from qerl_jax.rewards.functions import Reward
from qerl_jax.rl.losses import custom_loss_digest
from qerl_jax.rl.train_step import TrainState, init_state
from qerl_jax.rollout.config import has_agents, has_turns
from qerl_jax.run.checkpoints import Checkpoints, read_latest
from qerl_jax.run.folder import (
    BEST,
    OpenRun,
    RunFolder,
    config_dict,
    flatten,
    origin_of,
    read_run,
    record_fact,
    record_sources,
)
from qerl_jax.run.metrics import MetricsLog, read_all_evaluations
from qerl_jax.run.provenance import versions
from qerl_jax.run.saved_fields import check_meta, check_run
from qerl_jax.system.import_path import names_function
from qerl_jax.system.jsonl import read_number
from qerl_jax.system.safe_files import read_bytes, remove_tree
from qerl_jax.training.first_policy import first_trainable, policy_digest
from qerl_jax.training.kept_sessions import KeptSessions
from qerl_jax.training.saving import Run, policy_folder, save_checkpoint
from qerl_jax.training.setup import Setup
from qerl_jax.training.step import Progress
from qerl_jax.weights.names import interleaves
from qerl_jax.weights.peft import load_peft_adapter, read_peft_config, save_peft_adapter

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
    "lora.expert_rank",
    "train.parameters",
)


def check_same_start(
    config: ConfigDict, rewards: Mapping[str, tuple[Reward, float]], processes: Processes
) -> None:
    """Refuses processes that were started in different ways, before a folder is made."""
    if processes.count == 1:
        return
    facts = flatten(config_dict(config))
    facts |= {f"weight of the reward {name}": weight for name, (_, weight) in rewards.items()}
    facts |= {f"version of {name}": version for name, version in versions().items()}
    devices = jax.local_devices()
    facts |= {"number of devices": len(devices), "kind of device": devices[0].device_kind}
    processes.check_same(facts, "start all of them with the same command, versions and devices")


def begin(
    setup: Setup,
    folder: OpenRun,
    checkpoints: Checkpoints,
    log: MetricsLog | None,
    compilations: Compilations,
) -> Run:
    """Starts a run, or restores the latest checkpoint and drops the rows after it."""
    config, processes = setup.config, setup.processes
    restored = checkpoints.restore_latest(setup.state_shapes)
    if has_agents(config):
        setup = _keep_sessions(setup, folder, None if restored is None else restored[0])
    prompts = by_source(setup.collect.order, setup.train_prompts) | {EVAL: setup.eval_prompts}
    whole_rows = has_turns(config)
    digests = problem_digests(prompts, setup.rewards, whole_rows=whole_rows)
    prompts_digest = digest_of_prompts((*setup.train_prompts, *setup.eval_prompts))
    _check_processes(setup, digests, None if restored is None else restored[0], prompts_digest)
    if restored is None:
        if log is not None:
            # Of a start that ended before its first checkpoint; no record says what it is. The rows
            # go last: without them another start would take the folder for someone else's.
            folder.best.unlink(missing_ok=True)
            if (best := policy_folder(folder, config, best=True)).exists():
                remove_tree(best)
            log.truncate(-1)
        if config.init_from:
            setup, progress = _begin_from(setup, folder, digests)
        else:
            progress = first_progress(setup)
            adapter, names = config.lora.init, (config.model.source, setup.model.source)
            if adapter and progress.state.trainable.lora is not None and processes.writes:
                warn_of_another_base(adapter, read_peft_config(adapter)[1], names)
    else:
        setup = _restore_origin(setup, folder)
        step, state, meta = restored
        check_meta(folder.checkpoints, meta)
        _check_same(setup, meta, digests, prompts_digest)
        if log is not None:
            log.truncate(step)
        print(f"resuming after step {step}", flush=True)
        noise = SigmaState(**meta["noise"])
        progress = Progress(step=step, state=state, cursor=read_cursor(meta["cursor"]), noise=noise)
    evaluations: dict[int, float | None] = {}
    if processes.writes and folder.metrics.exists():
        evaluations = read_all_evaluations(folder.metrics)
    if processes.count > 1:
        evaluations = dict(processes.broadcast_from_first(list(evaluations.items())))
    if processes.writes and folder.moved:
        record_sources(folder, config)
    run = Run(
        setup=setup,
        folder=folder,
        checkpoints=checkpoints,
        log=log,
        progress=progress,
        evaluations=evaluations,
        problem_digests=digests,
        prompts_digest=prompts_digest,
        compilations=compilations,
    )
    if progress.step < config.steps:
        checkpoints.require_space(progress.state)  # A full disk would cost the steps until a save.
    if config.init_from and restored is None:
        save_checkpoint(run)
        checkpoints.wait()  # From here on the run needs nothing of the other one.
    return run


def _keep_sessions(setup: Setup, folder: OpenRun, step: int | None) -> Setup:
    """Returns the setup with the sessions of steps after the restored one, and says so."""
    kept = KeptSessions(folder.sessions, setup.train_prompts, setup.processes)
    kept.forget(step)
    if step is not None:
        steps = ", ".join(str(number + 1) for number in kept.steps()) or "none"
        print(
            f"steps whose sessions are scored and kept: {steps}; those of later steps, also where "
            "they were in flight, are sampled again and may differ",
            flush=True,
        )
    return dataclasses.replace(setup, kept=kept)


def first_progress(setup: Setup) -> Progress:
    """Returns the progress before the first step of a run that begins alone."""
    trainable = first_trainable(setup.config, setup.model, setup.method.lora_config, setup.key)
    return _on_devices(setup, init_state(trainable, setup.method.optimizer), Cursor())


def _on_devices(setup: Setup, state: TrainState, cursor: Cursor) -> Progress:
    # Committed to its devices, as a restored state is: both compile to the same programs.
    return Progress(step=0, state=shard(state, setup.mesh), cursor=cursor)


# --- What must be the same ------------------------------------------------------------------------


def _check_processes(
    setup: Setup, problem_digests: Mapping[str, str], step: int | None, prompts_digest: str = ""
) -> None:
    """Refuses processes that have other weights, problems or prompts, or plan other programs."""
    facts = {f"{split} problems": digest[:16] for split, digest in problem_digests.items()}
    facts |= {
        "step of the checkpoint": step,
        "weights": setup.model.fingerprint[:16],
        "prompts as token ids": prompts_digest[:16],
        "reference policy": setup.reference_digest,
        "teacher": setup.teacher_digest,
        "buffer_tokens of the memory plan": setup.memory.buffer_tokens,
        "recompute of the memory plan": list(setup.update.recompute),
    }
    objective = setup.update.loss.objective
    if names_function(objective):  # Its path says nothing of the code that a host has under it.
        digest = custom_loss_digest(objective, setup.memory.buffer_tokens)
        facts[f"code of {objective}"] = digest[:16]
    remedy = "give all of them the same model, problems, code and GPU memory"
    setup.processes.check_same(facts, remedy)


def _check_same(
    setup: Setup, meta: Mapping[str, Any], digests: Mapping[str, str], prompts_digest: str
) -> None:
    """Refuses a model, a reference, problems or prompts that are not those of a checkpoint."""
    config, source = setup.config, setup.config.model.source
    if meta["fingerprint"] != setup.model.fingerprint:
        raise UserError(
            f"the weights of {source} are not the weights that this run began with; restore them "
            "or pass another --workdir"
        )
    end_ids = list(setup.model.tokenizer.eos_ids)
    for name, value, what in (
        ("architecture", setup.model.config.digest, "the architecture (config.json)"),
        ("end_ids", end_ids, "the tokens that end a reply (generation_config.json)"),
    ):
        if meta.get(name) != value:
            raise UserError(
                f"{what} of {source} is not what this run began with; restore the file or pass "
                "another --workdir"
            )
    if meta["reference"] != setup.reference_digest:
        raise UserError(
            f"the adapter of lora.init={config.lora.init} is not the adapter that this run began "
            f"with, to which rl.kl_coef={config.rl.kl_coef} measures the KL; restore it or pass "
            "another --workdir"
        )
    if meta.get("teacher") != setup.teacher_digest:
        raise UserError(
            f"the teacher (teacher.source={config.teacher.source!r}, teacher.adapter="
            f"{config.teacher.adapter!r}) is not what this run began with; restore it or pass "
            "another --workdir"
        )
    mixture = mixture_of(config)
    origins = {f"{TRAIN}/{name}": part.origin for name, part in mixture.items()}
    origins |= {TRAIN: config.sft.completions_of or config.data.path or config.data.source}
    if has_own_evaluation(config.data):
        origins[EVAL] = config.data.eval_path or config.data.eval_source
    else:
        origins[EVAL] = "data.mixture" if mixture else origins[TRAIN]
    for split, digest in digests.items():
        if meta["problems"].get(split) != digest:
            raise UserError(
                f"the {'evaluation' if split == EVAL else 'training'} problems of {origins[split]} "
                "are not the problems that this run began with; restore them, or pass another "
                "--workdir to begin a run with the new ones"
            )
    check_prompts(
        meta["prompts"], prompts_digest, model=source, what="this run", option="--workdir"
    )


# --- From another run -----------------------------------------------------------------------------


def check_origin(config: ConfigDict) -> None:
    """Refuses a run to begin from that does not fit the config, before a model is loaded.

    Without `init_from` nothing is checked.
    """
    if not config.init_from:
        return
    folder, best = origin_of(config.init_from)
    fields = flatten(config_dict(config))
    saved_fields = with_defaults(flatten(_saved_config(folder)), fields)
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
        if saved_fields.get("train.parameters") == "full":
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
    if (old := saved_fields["data.system_prompt"]) != config.data.system_prompt:
        print(
            f"warning: init_from={config.init_from}: data.system_prompt was {old!r:.60} and is "
            f"{config.data.system_prompt!r:.60}: the policy was trained on other prompts",
            file=sys.stderr,
            flush=True,
        )


def _begin_from(
    setup: Setup, folder: OpenRun, problem_digests: Mapping[str, str]
) -> tuple[Setup, Progress]:
    """Begins a run from another one: reads it, prints what it takes over, and records it.

    Returns the setup, whose reference policy is the one that training starts from, and the progress
    before the first step.
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
    if meta.get("architecture") != setup.model.config.digest:
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
        f"{origin.path}; {reset_reason or 'its optimizer state is kept'}; {cursor_note}",
        flush=True,
    )
    origin_checksum = checksum(state.trainable)
    if setup.processes.writes:
        fact = {
            "run": str(origin.path.resolve()),
            "step": step,
            "best": best,
            "optimizer": not reset_reason,
            "cursor": cursor.without_scores().to_json(),
            "checksum": origin_checksum,
        }
        record_fact(folder, "init_from", fact)
        if config.rl.kl_coef:
            save_peft_adapter(
                folder.first_adapter,
                state.trainable,
                setup.method.lora_config,
                base_model=setup.model.source,
                interleaved=interleaves(setup.model.config),
            )
    facts = {"step": step, "cursor": cursor.to_json(), "parameters": origin_checksum}
    setup.processes.check_same(facts, _REMEDY)
    return _restore_origin(setup, folder, origin_checksum), _on_devices(setup, state, cursor)


def _read_together(
    setup: Setup, origin: RunFolder, *, best: bool
) -> tuple[int, TrainState, dict[str, Any]]:
    """Reads what the run begins from, the same in all processes, though the other run may save.

    Process 0 chooses the checkpoint. Returns the step, the state, with the best adapter if that is
    asked for, and the meta object of the checkpoint.
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
    """
    path = origin.adapter(best=True)
    for attempt in range(_ATTEMPTS):
        try:
            before = path.stat()
            step = int(read_number(origin.best, "step"))
            saved = read_number(origin.best, "checksum")
            trainable = load_peft_adapter(path, setup.model.config, setup.method.lora_config)
            replaced = not os.path.samestat(before, path.stat())
        except (OSError, UserError):
            if attempt == _ATTEMPTS - 1:
                raise
        else:
            if not replaced and saved == checksum(trainable):
                return step, trainable
        time.sleep(_PAUSE)
    raise UserError(
        f"init_from={setup.config.init_from}: {path} and {origin.best.name} are of different "
        f"steps, as after the run was killed between both: resume the run, or leave out {BEST}"
    )


def _restore_origin(setup: Setup, folder: RunFolder, crc: int | None = None) -> Setup:
    """The setup of a run that began from another one: its own key, and its reference policy.

    The reference policy is the one that training starts from, whose adapter is in the folder of the
    run. `crc` is the checksum of the parameters that the run begins with; None reads what
    `_begin_from` recorded. A run that began alone has its setup unchanged.
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


def _optimizer_reset_reason(config: ConfigDict, saved: dict[str, Any], *, best: bool) -> str:
    """The reason why the optimizer starts anew; '' if it keeps the state of the other run."""
    if best:
        return "the optimizer starts anew, as its state is that of the last step"
    if learns_from_text(config) != learns_from_text(saved):
        return "the optimizer starts anew, as one of the runs learns from rows of text"
    now = flatten(config_dict(config))
    before = with_defaults(flatten(saved), now)
    names = sorted(name for name in before.keys() | now.keys() if name.startswith("optimizer."))
    changes = [name for name in names if before.get(name) != now.get(name)]
    return f"the optimizer starts anew, as {', '.join(changes)} changed" if changes else ""


def _cursor(
    setup: Setup, origin: RunFolder, meta: Mapping[str, Any], problem_digests: Mapping[str, str]
) -> tuple[Cursor, str]:
    """The position at which the new run begins in its data, and a line about it."""
    if training_digests(meta["problems"]) != training_digests(problem_digests):
        return Cursor(), "the training problems are others, so they start at the first"
    if _saved_config(origin)["seed"] != setup.config.seed:
        return Cursor(), "their order has another seed, so the problems start at the first"
    cursor = read_cursor(meta["cursor"])
    if not setup.collect.order.curriculum_share:
        cursor = cursor.without_scores()
    return cursor, "its position in the problems is kept"


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
