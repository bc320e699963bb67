"""The training loop.

A step draws problems, samples completions from the noisy policy, scores them, and updates the
adapter; then it logs one row and, now and then, evaluates and saves. Everything random follows from
the seed and the step, so a run that is killed and started again repeats what it lost, bit for bit.
"""

import contextlib
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from qerl_jax.data import Cursor
from qerl_jax.errors import UserError, memory_errors
from qerl_jax.evaluation.greedy import greedy_accuracy
from qerl_jax.policy import aqn
from qerl_jax.policy.lora import Lora
from qerl_jax.policy.trainable import current_policy
from qerl_jax.rl.batch import longest_first, make_batch, micro_batches
from qerl_jax.rl.rewards import Reward, resolve
from qerl_jax.rl.train_step import (
    TrainState,
    batch_logprobs,
    init_state,
    mean_kl,
    train_step,
)
from qerl_jax.rollout.ahead import compilations, compile_ahead
from qerl_jax.rollout.programs import Programs
from qerl_jax.run.checkpoints import Checkpoints
from qerl_jax.run.compilation_cache import programs_in
from qerl_jax.run.folder import RunFolder, fingerprint, open_run, write_atomic
from qerl_jax.run.metrics import LiveLine, MetricsLog, format_row
from qerl_jax.run.plots import plot_run
from qerl_jax.run.signals import StoppedError, stop_signals
from qerl_jax.training.collect import Experience, collect
from qerl_jax.training.setup import Setup, first_trainable, prepare
from qerl_jax.training.validate import check
from qerl_jax.weights.peft import save_peft_adapter
from qerl_jax.weights.save import checkpoint_tensors, companion_files, write_checkpoint

_SKIPS_THAT_STOP = 3
_STEPS_THAT_COMPILE = 2  # of a process; to compile a rollout again in a later one is an error
_SUMMARY = "summary.json"  # written last: the run is finished


@dataclasses.dataclass
class _Progress:
    """What changes, and is in the checkpoints.

    Attributes:
        step: finished steps.
        state: what is trained and its optimiser.
        cursor: the place of the next problem.
        best_accuracy: of the evaluations so far.
        unlogged: row of metrics and samples of the last step while its evaluation is due.
    """

    step: int
    state: TrainState
    cursor: Cursor
    best_accuracy: float
    unlogged: tuple[dict, list[dict]] | None = None


def train(
    config: ConfigDict,
    *,
    workdir: str | Path | None = None,
    rewards: Mapping[str, tuple[Reward, float]] | None = None,
) -> Path:
    """Trains, resumes, or says that there is nothing left to do.

    Args:
        config: see `experiments/configs/defaults.py`.
        workdir: the run folder; None names it after the config.
        rewards: function and weight by name, instead of those that the config names.

    Returns:
        The run folder: metrics.jsonl, completions.jsonl, curves.png, summary.json, checkpoints,
        TensorBoard's files, the PEFT adapter `adapter`, and `best_adapter` once an evaluation is
        better than the one before training; `model` and `best_model` where all parameters are
        trained.

    Raises:
        UserError: something asked for cannot be done.
        StoppedError: SIGTERM or SIGINT arrived; the last whole step is saved.
    """
    check(config)
    rewards = rewards or {
        name: (resolve(reward.function), reward.weight) for name, reward in config.rewards.items()
    }
    with (
        memory_errors(
            f"lower --config.train.micro_batch_rows={config.train.micro_batch_rows} or, if it was "
            "the rollout that did not fit, --config.rollout.max_rows"
        ),
        open_run(workdir, config) as run,
        Checkpoints(run.path / "checkpoints", keep=config.checkpoint.keep) as checkpoints,
    ):
        if checkpoints.steps and _is_finished(run, checkpoints.steps[-1], config.steps):
            _announce_finished(run, checkpoints.steps[-1], config)
            return run.path
        setup = prepare(config, rewards, schedule_steps=run.schedule_steps)
        progress = _restore(setup, checkpoints) or _start(setup)
        with (
            programs_in(run.path / "programs"),
            MetricsLog(
                run.path,
                tensorboard=config.log.tensorboard,
                wandb=config.log.wandb,
                trackio=config.log.trackio,
                run_name=f"{run.path.name}-{fingerprint(config)}",
            ) as log,
            stop_signals() as received,
            contextlib.ExitStack() as trace,
        ):
            log.truncate(progress.step - bool(progress.unlogged))
            try:
                _run_steps(setup, progress, run, checkpoints, log, received, trace)
            except StoppedError:
                _save(setup, progress, checkpoints)
                checkpoints.wait()
                print(f"saved after step {progress.step}; the same command continues", flush=True)
                raise
        _finish(setup, progress, run)
    return run.path


def _run_steps(
    setup: Setup,
    progress: _Progress,
    run: RunFolder,
    checkpoints: Checkpoints,
    log: MetricsLog,
    received: list[int],
    trace: contextlib.ExitStack,
) -> None:
    config, live = setup.config, LiveLine()
    evaluating = bool(setup.eval_prompts)
    first_traced = max(config.profile.start, progress.step + 1)
    durations: list[float] = []

    def watch(total: int, what: str):
        began = time.perf_counter()

        def on_progress(done: int, tokens: int) -> None:
            if received:
                raise StoppedError(received[0])
            rate = tokens / (time.perf_counter() - began)
            live.update(f"{what} {done}/{total} rows, {rate:.0f} tok/s")

        return on_progress

    def evaluate(step: int) -> float:
        trainable = progress.state.trainable
        accuracy = greedy_accuracy(
            dataclasses.replace(setup.model, params=current_policy(setup.model.params, trainable)),
            trainable.lora,
            setup.eval_prompts,
            correctness=setup.collect.rewards["correctness"][0],
            time_limit=config.reward_time_limit,
            sampling=setup.eval_sampling,
            prompt_width=setup.collect.prompt_width,
            on_progress=watch(len(setup.eval_prompts), f"evaluation after step {step}:"),
        )
        if accuracy > progress.best_accuracy:
            progress.best_accuracy = accuracy
            if step:
                _save_trained(setup, progress, run.path, "best_")
        return accuracy

    before = {}
    if evaluating and progress.step == 0:
        before["eval_accuracy_before"] = evaluate(0)
        live.clear()
        print(f"greedy accuracy before training: {before['eval_accuracy_before']:.3f}", flush=True)
    programs: Programs = {}
    if progress.step < config.steps:
        programs = _compile_rollouts(setup, progress, live, received)
    while progress.unlogged or progress.step < config.steps:
        began = time.perf_counter()
        if not progress.unlogged:
            number = progress.step + 1
            if config.profile.start and number == first_traced <= config.profile.stop:
                trace.enter_context(jax.profiler.trace(str(run.path / "profile")))
            rows = config.rollout.prompts_per_step * config.rollout.group_size
            row, experience = _step(
                setup,
                progress,
                watch(rows, f"step {number}/{config.steps} rollout"),
                live,
                programs,
                compiled=len(durations) >= _STEPS_THAT_COMPILE,
            )
            if number == config.profile.stop:
                trace.close()
            samples = _samples(experience, config.rollout.group_size, config.log.completions)
            progress.unlogged = {"step": number} | row | before, samples
            before = {}
            live.clear()
            for error in experience.scores.errors:
                print(f"warning: {error}", file=sys.stderr, flush=True)
        number = progress.step
        row, samples = progress.unlogged
        if evaluating and (number % config.eval.every == 0 or number == config.steps):
            row["eval_accuracy"] = evaluate(number)
        durations.append(time.perf_counter() - began)
        row["step_seconds"] = durations[-1]
        row["remaining_seconds"] = statistics.median(durations[-10:]) * (config.steps - number)
        live.clear()
        print(format_row(row, config.steps), flush=True)
        log.write(row)
        log.write_completions(number, samples)
        progress.unlogged = None
        skips = int(progress.state.skipped_in_a_row)
        due = number % config.checkpoint.every == 0 or number == config.steps
        if due or skips >= _SKIPS_THAT_STOP:
            _save(setup, progress, checkpoints)
        if skips >= _SKIPS_THAT_STOP:
            raise UserError(
                f"the gradients of {skips} updates in a row were not finite, up to step {number}; "
                "lower --config.optimizer.learning_rate in a new run"
            )
        if received:
            raise StoppedError(received[0])


def _compile_rollouts(
    setup: Setup, progress: _Progress, live: LiveLine, received: list[int]
) -> Programs:
    """Compiles what the rollouts need, so that no step waits for it."""
    began, trainable = time.perf_counter(), progress.state.trainable

    def on_progress(done: int, total: int) -> None:
        if received:
            raise StoppedError(received[0])
        live.update(f"rollout programs {done}/{total}")

    with compilations() as compiled:
        programs = compile_ahead(
            setup.key,
            current_policy(setup.model.params, trainable) | setup.rollout_head,
            trainable.lora,
            prompts=setup.collect.prompts_per_step,
            prompt_width=setup.collect.prompt_width,
            config=setup.model.config,
            sampling=setup.collect.sampling,
            eos_ids=setup.model.tokenizer.eos_ids,
            group_size=setup.collect.group_size,
            on_progress=on_progress,
        )
    live.clear()
    seconds = time.perf_counter() - began
    counts = f"compiled {len(compiled)} of {len(programs)} rollout programs"
    print(f"{counts} in {seconds:.0f} s", flush=True)
    return programs


def _step(
    setup: Setup,
    progress: _Progress,
    on_progress,
    live: LiveLine,
    programs: Programs,
    *,
    compiled: bool,
):
    """One step; returns the row of metrics and the experience, and moves `progress` on."""
    config, trainable = setup.config, progress.state.trainable
    key = jax.random.fold_in(setup.key, progress.step)
    sigma = float(np.asarray(setup.sigma(progress.step)))
    noise = aqn.Noise(
        key=jax.random.fold_in(key, 0),
        sigma=jnp.float32(sigma),
        form=config.aqn.form,
        final_norm=config.aqn.final_norm,
    )
    clean = current_policy(setup.model.params, trainable)
    noisy = aqn.add_noise(clean, noise)
    perturbed = aqn.count_perturbed(clean, noisy)
    if sigma > 0 and not perturbed:
        raise UserError(f"the noise of sigma={sigma} changed no norm: float32 rounds it away")
    experience, cursor = collect(
        jax.random.fold_in(key, 1),
        setup.model,
        noisy | setup.rollout_head,
        trainable.lora,
        setup.train_prompts,
        progress.cursor,
        config=setup.collect,
        compiled_ahead=programs,
        compiled=compiled,
        on_progress=on_progress,
    )
    live.update(f"step {progress.step + 1}/{config.steps} update")
    began = time.perf_counter()
    batch = make_batch(
        [prompt.ids for prompt in experience.prompts],
        experience.rollout.tokens,
        experience.rollout.lengths,
        experience.rollout.finished,
        experience.advantages,
        experience.rollout.logprobs,
        mask_truncated=config.rl.mask_truncated,
        aggregation=setup.loss.aggregation,
        pad_id=setup.model.tokenizer.pad_id,
        micro_batch_rows=config.train.micro_batch_rows,
        max_prompt=setup.collect.prompt_width,
    )
    row = {"sigma": sigma, "perturbed_norms": perturbed}
    if config.aqn.kl_every and progress.step % config.aqn.kl_every == 0:
        row["noise_kl"] = _noise_kl(setup, noisy, clean, trainable.lora, batch)
    if config.aqn.correction == "noisy_forward":
        state, metrics = _update(setup, progress.state, noisy, batch, noise)
    else:
        state, metrics = _update(setup, progress.state, clean, batch, None)
    seconds = time.perf_counter() - began
    progress.step, progress.state, progress.cursor = progress.step + 1, state, cursor
    row |= experience.metrics | metrics
    row["train_seconds"] = seconds
    row["train_tokens_per_second"] = (
        float(batch.lengths.sum()) * config.rl.updates_per_rollout / seconds
    )
    return row, experience


def _update(setup: Setup, state: TrainState, policy: dict, batch, noise: aqn.Noise | None):
    """The optimiser steps on one rollout; returns the state and metrics as Python numbers.

    `policy` is the one before the first of them, with the noise that they are taken under.
    """
    config, model = setup.config, setup.model
    shared = {"config": model.config, "temperature": config.rollout.temperature}
    if setup.loss.aggregation != "micro_batch":  # whose loss depends on which rows are together
        batch = longest_first(batch)
    batches = micro_batches(batch, config.train.micro_batch_rows)

    def scored(params, lora, field):
        found = batch_logprobs(params, lora, batches, **shared)
        return [dataclasses.replace(m, **{field: x}) for m, x in zip(batches, found, strict=True)]

    if setup.loss.kl_coef:
        batches = scored(model.params, None, "ref_logprobs")
    if config.rl.updates_per_rollout > 1:
        batches = scored(policy, state.trainable.lora, "old_logprobs")
    history = []
    for _ in range(config.rl.updates_per_rollout):
        state, metrics = train_step(
            state,
            model.params,
            batches,
            loss=setup.loss,
            optimizer=setup.optimizer,
            remat=config.train.remat,
            noise=noise,
            **shared,
        )
        history.append(jax.device_get(metrics))
        if history[-1]["update_skipped"]:
            break  # The same rollout would give the same gradient.
    combine = {"update_skipped": np.sum, "ratio_max": np.max, "logprob_diff_max": np.max}
    return state, {
        name: combine.get(name, np.mean)([metrics[name] for metrics in history]).item()
        for name in history[0]
    }


def _noise_kl(setup: Setup, noisy: dict, clean: dict, lora: Lora | None, batch) -> float:
    """KL of the noisy against the clean policy on rows from all over the batch."""
    count = setup.config.aqn.kl_rows
    stride = max(1, len(batch.lengths) // count)
    rows = jax.tree.map(lambda x: x[::stride][:count], batch)
    kl = mean_kl(
        noisy,
        clean,
        lora,
        rows,
        config=setup.model.config,
        temperature=setup.config.rollout.temperature,
    )
    return float(kl)


def _samples(experience: Experience, group_size: int, count: int) -> list[dict]:
    """Completions to show: the first of each group, as many as asked for, then the next of each."""
    order = np.arange(len(experience.texts)).reshape(-1, group_size).T.reshape(-1)[:count]
    return [
        {
            "prompt": experience.prompts[row].text,
            "completion": experience.texts[row],
            "answer": experience.prompts[row].problem.answer,
            "reward": float(experience.scores.total[row]),
            **{f"reward/{name}": float(v[row]) for name, v in experience.scores.parts.items()},
            "advantage": float(experience.advantages[row]),
            "tokens": int(experience.rollout.lengths[row]),
            "finished": bool(experience.rollout.finished[row]),
        }
        for row in order.tolist()
    ]


# --- The beginning and the end ------------------------------------------------------------------


def _start(setup: Setup) -> _Progress:
    trainable = first_trainable(setup.config, setup.model, setup.lora_config, setup.key)
    # Bound to its device, as a restored state is: both compile to the same programs.
    state = jax.device_put(init_state(trainable, setup.optimizer), jax.devices()[0])
    return _Progress(step=0, state=state, cursor=Cursor(), best_accuracy=-1.0)


def _restore(setup: Setup, checkpoints: Checkpoints) -> _Progress | None:
    restored = checkpoints.restore_latest(setup.state_shapes)
    if restored is None:
        return None
    step, state, meta = restored
    if meta["fingerprint"] != setup.model.fingerprint:
        raise UserError(
            f"the weights of {setup.config.model.source} are not those that this run began with; "
            "restore them or pass another --workdir"
        )
    print(f"resuming after step {step}", flush=True)
    return _Progress(
        step=step,
        state=state,
        cursor=Cursor(**meta["cursor"]),
        best_accuracy=meta["best_accuracy"],
        unlogged=meta["unlogged"],
    )


def _save(setup: Setup, progress: _Progress, checkpoints: Checkpoints) -> None:
    checkpoints.save(
        progress.step,
        progress.state,
        {
            "cursor": dataclasses.asdict(progress.cursor),
            "best_accuracy": progress.best_accuracy,
            "unlogged": progress.unlogged,
            "fingerprint": setup.model.fingerprint,
        },
    )


def _save_trained(setup: Setup, progress: _Progress, folder: Path, prefix: str = "") -> None:
    """Writes a PEFT adapter, or the whole model where all of it is trained."""
    trainable, model = progress.state.trainable, setup.model
    path = folder / f"{prefix}{_trained_name(setup.config)}"
    if trainable.lora is not None:
        save_peft_adapter(path, trainable, setup.lora_config, base_model=model.source)
        return
    dtype = setup.config.model.dtype
    policy = current_policy(model.params, trainable)
    write_checkpoint(
        path,
        checkpoint_tensors(policy, model.config, dtype=dtype),
        files=companion_files(model, packed=False, dtype=dtype),
        replace=True,
    )


def _trained_name(config: ConfigDict) -> str:
    return "model" if config.train.parameters == "full" else "adapter"


def _finish(setup: Setup, progress: _Progress, run: RunFolder) -> None:
    _save_trained(setup, progress, run.path)
    plot_run(run.path)
    memory = jax.local_devices()[0].memory_stats() or {}
    summary = {
        "steps": progress.step,
        "best_accuracy": progress.best_accuracy if setup.eval_prompts else None,
        "peak_memory_bytes": memory.get("peak_bytes_in_use"),  # of this process
    }
    write_atomic(run.path / _SUMMARY, json.dumps(summary, indent=2) + "\n")
    _announce_finished(run, progress.step, setup.config)


def _is_finished(run: RunFolder, last_checkpoint: int, steps: int) -> bool:
    """Whether the wanted steps are done and what follows the last checkpoint is written too."""
    path = run.path / _SUMMARY
    if last_checkpoint < steps or not path.exists():
        return False
    return json.loads(path.read_text(encoding="utf-8"))["steps"] == last_checkpoint


def _announce_finished(run: RunFolder, steps: int, config: ConfigDict) -> None:
    print(
        f"finished after {steps} steps: {run.path}/{_trained_name(config)}, {run.path}/curves.png; "
        f"to train on, pass --workdir={run.path} --config.steps={2 * steps}",
        flush=True,
    )
