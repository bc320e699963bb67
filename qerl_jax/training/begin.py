"""How a run begins: at step 0, or at its latest checkpoint."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from ml_collections import ConfigDict

from qerl_jax.compile.count import Compilations
from qerl_jax.config.fields import has_own_evaluation
from qerl_jax.data.from_config import EVAL, TRAIN, by_source, mixture_of, problem_digests
from qerl_jax.data.order import Cursor, read_cursor
from qerl_jax.errors import UserError
from qerl_jax.evaluation.load_policy import warn_of_another_base
from qerl_jax.evaluation.prompts import check_prompts, digest_of_prompts
from qerl_jax.policy.kl_control import SigmaState
from qerl_jax.policy.sharding import shard
from qerl_jax.processes.group import Processes
from qerl_jax.rewards.functions import Reward
from qerl_jax.rl.losses import custom_loss_digest
from qerl_jax.rl.train_step import init_state
from qerl_jax.run.checkpoints import Checkpoints
from qerl_jax.run.folder import OpenRun, config_dict, flatten, record_sources
from qerl_jax.run.metrics import MetricsLog, read_all_evaluations
from qerl_jax.run.provenance import versions
from qerl_jax.run.saved_fields import check_meta
from qerl_jax.system.import_path import names_function
from qerl_jax.system.safe_files import remove_tree
from qerl_jax.training.init_from import begin_from, restore_origin
from qerl_jax.training.initial_policy import check_reference, first_trainable
from qerl_jax.training.run import Run
from qerl_jax.training.saving import policy_folder, save_checkpoint
from qerl_jax.training.setup import Setup
from qerl_jax.training.step import Progress
from qerl_jax.weights.peft import read_peft_config


def check_starts(
    config: ConfigDict, rewards: Mapping[str, tuple[Reward, float]], processes: Processes
) -> None:
    """Refuses processes that were started in different ways, before a folder is made.

    Args:
        config: the resolved config.
        rewards: function and weight by name.
        processes: processes of the run.

    Raises:
        UserError: they differ.
    """
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
    processes = setup.processes
    restored = checkpoints.restore_latest(setup.state_shapes)
    prompts = by_source(setup.collect.order, setup.train_prompts) | {EVAL: setup.eval_prompts}
    whole_rows = bool(setup.config.environment.function)
    digests = problem_digests(prompts, setup.rewards, whole_rows=whole_rows)
    prompts_digest = digest_of_prompts((*setup.train_prompts, *setup.eval_prompts))
    _check_processes(setup, digests, None if restored is None else restored[0], prompts_digest)
    if restored is None:
        if log is not None:
            log.truncate(-1)
            folder.best.unlink(missing_ok=True)
            # Of a start that ended before its first checkpoint; no record says what it is.
            if (best := policy_folder(folder, setup.config, best=True)).exists():
                remove_tree(best)
        if setup.config.init_from:
            setup, progress = begin_from(setup, folder, digests)
        else:
            trainable = first_trainable(
                setup.config, setup.model, setup.method.lora_config, setup.key
            )
            init, names = setup.config.lora.init, (setup.config.model.source, setup.model.source)
            if init and trainable.lora is not None and processes.writes:
                warn_of_another_base(init, read_peft_config(init)[1], names)
            state = init_state(trainable, setup.method.optimizer)
            progress = Progress(step=0, state=state, cursor=Cursor())
        # Committed to its devices, as a restored state is: both compile to the same programs.
        state = shard(progress.state, setup.mesh)
        progress = dataclasses.replace(progress, state=state)
    else:
        setup = restore_origin(setup, folder)
        step, state, meta = restored
        check_meta(folder.checkpoints, meta)
        if meta["fingerprint"] != setup.model.fingerprint:
            raise UserError(
                f"the weights of {setup.config.model.source} are not the weights that this run "
                "began with; restore them or pass another --workdir"
            )
        _check_model_files(setup, meta)
        check_reference(setup.config, meta["reference"], setup.reference_digest)
        _check_problems(setup.config, meta["problems"], digests)
        check_prompts(
            meta["prompts"],
            prompts_digest,
            model=setup.config.model.source,
            what="this run",
            option="--workdir",
        )
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
        record_sources(folder, setup.config)
    run = Run(
        setup,
        folder,
        checkpoints,
        log,
        progress,
        evaluations,
        digests,
        prompts_digest,
        compilations,
    )
    if progress.step < setup.config.steps:
        checkpoints.require_space(progress.state)  # A full disk would cost the steps until a save.
    if setup.config.init_from and restored is None:
        save_checkpoint(run)
        checkpoints.wait()  # From here on the run needs nothing of the other one.
    return run


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
        "buffer_tokens of the memory plan": setup.memory.buffer_tokens,
        "recompute of the memory plan": list(setup.update.recompute),
    }
    objective = setup.update.loss.objective
    if names_function(objective):  # Its path says nothing of the code that a host has under it.
        digest = custom_loss_digest(objective, setup.memory.buffer_tokens)
        facts[f"code of {objective}"] = digest[:16]
    remedy = "give all of them the same model, problems, code and GPU memory"
    setup.processes.check_same(facts, remedy)


def _check_model_files(setup: Setup, meta: Mapping[str, Any]) -> None:
    """Refuses other values in config.json or generation_config.json beside the same weights."""
    end_ids = list(setup.model.tokenizer.eos_ids)
    for name, value, what in (
        ("architecture", setup.model.config.digest, "the architecture (config.json)"),
        ("end_ids", end_ids, "the tokens that end a reply (generation_config.json)"),
    ):
        if meta.get(name, value) != value:  # A checkpoint of an earlier version has neither.
            raise UserError(
                f"{what} of {setup.config.model.source} is not what this run began with; restore "
                "the file or pass another --workdir"
            )


def _check_problems(
    config: ConfigDict, saved: Mapping[str, str], current: Mapping[str, str]
) -> None:
    """Refuses problems that are not the problems of a checkpoint.

    Args:
        config: the resolved config.
        saved: digests of the problems by split when the checkpoint was saved.
        current: digests of the problems of this start.
    """
    mixture = mixture_of(config)
    places = {f"{TRAIN}/{name}": source.origin for name, source in mixture.items()}
    places |= {TRAIN: config.data.path or config.data.source}
    if has_own_evaluation(config.data):
        places[EVAL] = config.data.eval_path or config.data.eval_source
    else:
        places[EVAL] = "data.mixture" if mixture else places[TRAIN]
    for split, digest in current.items():
        if saved.get(split) != digest:
            name, place = "evaluation" if split == EVAL else "training", places[split]
            raise UserError(
                f"the {name} problems of {place} are not the problems that this run began with; "
                "restore them, or pass another --workdir to begin a run with the new ones"
            )
