"""The life of a run: it starts or resumes, takes steps, evaluates, saves, and stops on a signal.

`step.py` is the method. Everything random follows from the seed and the step, so a run that is
killed and started again repeats the lost steps bit for bit.

After each step the loop logs the row of the step, evaluates every `eval.every` steps, and saves. An
evaluation that a signal interrupts is missing in metrics.jsonl, and the resumed run makes it.
"""

import contextlib
import inspect
import json
import statistics
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from qerl_jax.compile.count import count_compilations
from qerl_jax.compile.operation import MissingProgramError, Programs
from qerl_jax.compile.run_cache import keep_programs
from qerl_jax.config.fields import learns_from_text
from qerl_jax.data.problem_list import with_problems
from qerl_jax.data.prompts import Problem
from qerl_jax.errors import UserError, memory_errors
from qerl_jax.evaluation.greedy import greedy_accuracy
from qerl_jax.memory.report import out_of_memory
from qerl_jax.policy.policy import Policy
from qerl_jax.policy.trainable import current_policy
from qerl_jax.processes.folder import open_run_together
from qerl_jax.processes.group import Processes
from qerl_jax.processes.launch import connect
from qerl_jax.rewards.calls import announce_hosts
from qerl_jax.rewards.from_config import PYTHON_REWARDS, reward_entries, rewards_of
from qerl_jax.rewards.functions import Reward
from qerl_jax.rewards.table import Rewards, table_of
from qerl_jax.run.checkpoints import Checkpoints
from qerl_jax.run.folder import OpenRun, record_fact
from qerl_jax.run.lines import format_row, line_columns
from qerl_jax.run.metrics import MetricsLog, check_trackers
from qerl_jax.run.ownership import adopt, trusts
from qerl_jax.run.saved_fields import check_run
from qerl_jax.run.trackers import tracker_name
from qerl_jax.system.import_path import names_function, user_errors
from qerl_jax.system.live_line import waiting
from qerl_jax.system.safe_files import read_bytes
from qerl_jax.system.signals import StoppedError, stop_signals
from qerl_jax.training.begin import begin, check_origin, check_same_start
from qerl_jax.training.collect import NoRewardError
from qerl_jax.training.compile import compile_programs
from qerl_jax.training.saving import (
    Run,
    announce_finished,
    best_so_far,
    finish,
    lowest_loss,
    policy_folder,
    sample_lines,
    sample_rows,
    save,
    save_best,
)
from qerl_jax.training.setup import prepare, settle_text
from qerl_jax.training.step import StepResult, check_noise, take_step
from qerl_jax.training.text_step import TextResult, held_out_loss, take_text_step
from qerl_jax.training.validate import check_extension, command_to_go_on, validate
from qerl_jax.weights.chat_template import template_date

OnStep = Callable[[dict[str, Any]], object]

_SKIPS_THAT_STOP = 3
_ON_STEP = "it is a function, not an async one, that is called with a dict of a step's metrics"


class _StepError(UserError):
    """A step that cannot be taken, such as one in which a user function fails."""


# A BrokenPipeError is that of a print, as after `| head`, or `| tee` whose terminal was closed.
_ENDS_THAT_SAVE = StoppedError, MissingProgramError, NoRewardError, _StepError, BrokenPipeError


def train(
    config: ConfigDict,
    *,
    workdir: str | Path | None = None,
    problems: Iterable[Mapping[str, Any]] | None = None,
    rewards: Rewards | None = None,
    on_step: OnStep | None = None,
    trust: bool = False,
) -> Path:
    """Trains or resumes a run, or says that the run is finished.

    Args:
        config: the resolved config, see `qerl_jax/config/build.py`.
        workdir: the run folder; None names it after the config.
        problems: training problems, dicts as `data.problem_list.with_problems` takes them, instead
            of those that the config names. Some are held out for evaluations.
        rewards: functions, or functions and weights by name, as `rewards.table.table_of` takes
            them, instead of the rewards that the config names. The run folder keeps their names,
            weights and import paths.
        on_step: called after each step with its row of metrics.jsonl, a dict, in the process that
            writes the run folder. What it returns or changes is not read; an exception of it ends
            the run after that step.
        trust: whether the compiled programs of a run of another person, which this command resumes,
            are executed; the folder becomes the user's own. The rewards are those of the config in
            any case.

    Returns:
        The run folder: metrics.jsonl, completions.jsonl, curves.png, summary.json, checkpoints,
        TensorBoard's files, the PEFT adapter `adapter`, and `best_adapter` once an evaluation is
        better than the one before training; `model` and `best_model` where all parameters are
        trained.

    Raises:
        UserError: the config asks for something that cannot be done; a program is missing after the
            first step, no completion of a step has a reward, or a user function fails in or after
            a step. The last whole step is saved.
        StoppedError: one of `STOP_SIGNALS` arrived; the last whole step is saved.
    """
    config = with_problems(config, problems)
    validate(config)
    config, texts = settle_text(config)
    check_trackers(config)
    if on_step is not None and (not callable(on_step) or inspect.iscoroutinefunction(on_step)):
        raise UserError(f"on_step={on_step!r:.60}: {_ON_STEP}")
    is_text = learns_from_text(config)
    if rewards is not None and is_text:
        raise UserError("rewards with sft.rows_per_step: nothing is sampled, leave out the rewards")
    table = None if rewards is None else table_of(rewards)
    python_rewards = reward_entries(table)
    named = {} if is_text else dict(rewards_of(config, table))
    with (
        connect(devices=config.mesh.data * config.mesh.tensor) as processes,
        memory_errors("the weights do not fit next to what else it holds: free some memory"),
    ):
        check_same_start(config, named, processes)
        if processes.writes:
            announce_hosts(reward for reward, _ in named.values())
        with open_run_together(workdir, config, processes) as folder:
            if trusts(trust) and processes.writes:
                adopt(folder.path)
            parts = folder, config, named, processes, python_rewards
            _train_in(*parts, texts=texts, on_step=on_step, trust=trusts(trust))
        return folder.path


def _train_in(
    folder: OpenRun,
    config: ConfigDict,
    rewards: Mapping[str, tuple[Reward, float]],
    processes: Processes,
    python_rewards: dict[str, dict[str, Any]],
    *,
    texts: Mapping[str, list[Problem]] | None,
    on_step: OnStep | None,
    trust: bool,
) -> None:
    keep, exchange = config.checkpoint.keep, processes.exchange_json
    with Checkpoints(folder.checkpoints, keep=keep, exchange=exchange) as checkpoints:
        last = checkpoints.steps[-1] if checkpoints.steps else -1
        finished = last >= config.steps and folder.finished_steps() == last
        last, finished = processes.broadcast_from_first([last, finished])
        if finished:
            if config.steps < last:
                print(f"steps={config.steps}: the run has taken {last}, nothing is trained")
            announce_finished(folder, last, config)
            return
        target = policy_folder(folder, config)
        check_extension(config, schedule_steps=folder.schedule_steps, target=target)
        if last < 0:
            check_origin(config)
        saved = json.loads(read_bytes(folder.config)) if processes.writes else {}
        if processes.writes:
            check_run(folder.config, saved)
        created = processes.broadcast_from_first(saved.get("created"))
        with template_date(created):  # A resumed run has the same prompts.
            steps = folder.schedule_steps
            setup = prepare(
                config,
                rewards,
                schedule_steps=steps,
                processes=processes,
                folder=folder,
                problems=texts,
            )
        with (
            memory_errors(out_of_memory(setup.memory, config, setup.model.config)),
            keep_programs(folder.programs, trusted=trust, writes=processes.writes),
            _metrics_log(folder, config, processes) as log,
            stop_signals() as received,
            count_compilations() as compilations,
        ):
            processes.received = received
            run = begin(setup, folder, checkpoints, log, compilations)
            # A run that begins from another one has saved already.
            processes.has_checkpoint |= run.progress.step > 0
            if processes.writes and python_rewards != saved.get(PYTHON_REWARDS, {}):
                record_fact(folder, PYTHON_REWARDS, python_rewards)
            try:
                _train_steps(run, on_step)
            except _ENDS_THAT_SAVE as error:
                if isinstance(error, UserError) and not run.progress.step:
                    raise  # There is nothing to save, and the run may begin with other rewards.
                if processes.count == 1 or isinstance(error, StoppedError | NoRewardError):
                    # All processes stop, or have the same completions; they save together.
                    save(run, stops=True)
                    step = run.progress.step
                    goes_on = "the same command continues"
                    if processes.count > 1:
                        goes_on += f": {processes.command}"
                    elif not python_rewards:
                        goes_on += f": {command_to_go_on(folder.path, steps=config.steps)}"
                    print(f"saved after step {step}; {goes_on}", flush=True)
                if not isinstance(error, MissingProgramError):
                    raise
                raise UserError(
                    f"{error}; after the first step a run compiles nothing: please report this "
                    f"with {folder.path}/config.json"
                ) from error
        finish(run)


def _metrics_log(
    folder: OpenRun, config: ConfigDict, processes: Processes
) -> contextlib.AbstractContextManager[MetricsLog | None]:
    if not processes.writes:
        return contextlib.nullcontext()
    is_read = config.log.wandb or config.log.trackio or not folder.resumed
    return MetricsLog(
        folder.path,
        tensorboard=config.log.tensorboard,
        wandb=config.log.wandb,
        trackio=config.log.trackio,
        project=config.log.project,
        group=config.log.group,
        run_name=tracker_name(folder) if is_read else "",
    )


def _train_steps(run: Run, on_step: OnStep | None) -> None:
    config = run.setup.config
    check_noise(run.setup, run.progress)
    programs = _compile(run)
    if run.folder.note:
        print(run.folder.note, flush=True)
    _evaluate(run, programs)  # before training, or the evaluation that a signal interrupted
    durations: list[float] = []
    first_trace_step = max(config.profile.start, run.progress.step + 1)
    with contextlib.ExitStack() as trace:
        while run.progress.step < config.steps:
            began = time.perf_counter()
            number = run.progress.step + 1
            traces = config.profile.start and run.log is not None
            if traces and number == first_trace_step <= config.profile.stop:
                trace.enter_context(jax.profiler.trace(str(run.folder.profile)))
            label = f"step {number}/{config.steps}"
            with _step_errors():
                result = _take_step(run, programs, label)
            if number == config.profile.stop:
                trace.close()
            durations.append(time.perf_counter() - began)
            run.progress = result.progress
            _log_step(run, result, durations, on_step)
            _evaluate(run, programs)
            _save_or_stop(run)


def _take_step(run: Run, programs: Programs, label: str) -> StepResult | TextResult:
    def on_update() -> None:
        run.live.update(f"{label} update")

    if learns_from_text(run.setup.config):
        return take_text_step(run.setup, run.progress, programs=programs, on_update=on_update)
    rows = run.setup.collect.prompts_per_rollout * run.setup.config.rollout.group_size
    return take_step(
        run.setup,
        run.progress,
        programs=programs,
        on_rollout=_watch(run, f"{label} rollout", rows),
        on_update=on_update,
        on_wait=run.stop_if_asked,
    )


@contextlib.contextmanager
def _step_errors() -> Generator[None]:
    """Marks the errors of a step, before which the run can be saved."""
    try:
        yield
    except NoRewardError:
        raise
    except UserError as error:
        raise _StepError(*error.args) from error


def _log_step(
    run: Run, result: StepResult | TextResult, durations: list[float], on_step: OnStep | None
) -> None:
    """Logs and prints the row of a step and some of its completions, and hands on the row."""
    config, number = run.setup.config, run.progress.step
    row = {"step": number} | result.metrics
    row |= run.compilations.take()
    row["step_seconds"] = durations[-1]
    row["remaining_seconds"] = statistics.median(durations[-10:]) * (config.steps - number)
    group_size, order = config.rollout.group_size, run.setup.collect.order
    sampled = result if isinstance(result, StepResult) else None
    if run.log is not None:  # First, as a print fails once its reader has ended.
        row = run.log.write(row)
        if sampled:
            tokenizer = run.setup.model.tokenizer
            samples = sample_rows(
                sampled, group_size, config.log.completions, order, tokenizer=tokenizer
            )
            run.log.write_completions(number, samples)
    run.live.clear()
    for error in sampled.experience.scores.errors if sampled else ():
        print(f"warning: {error}", file=sys.stderr, flush=True)
    print(format_row(row, config.steps, line_columns()), flush=True)
    if run.log is None:
        return
    count = config.log.print_completions
    for line in sample_lines(sampled, group_size, count, order, line_columns()) if sampled else ():
        print(line, flush=True)
    if on_step is not None:
        with _step_errors(), user_errors(f"on_step after step {number}", _ON_STEP):
            on_step(row)


def _evaluation_is_due(run: Run) -> bool:
    config, step = run.setup.config, run.progress.step
    if not run.setup.eval_prompts or step in run.evaluations:
        return False
    return step % config.eval.every == 0 or step == config.steps


def _evaluate(run: Run, programs: Programs) -> None:
    """Measures and logs the greedy accuracy if the step has an evaluation that is not logged yet.

    A policy that is better than all before it is written as the best one. An evaluation in which
    scores are missing is not compared.
    """
    setup, config, step = run.setup, run.setup.config, run.progress.step
    if not _evaluation_is_due(run):
        return
    if learns_from_text(config):
        _evaluate_text(run, programs)
        return
    began, trainable = time.perf_counter(), run.progress.state.trainable
    score = greedy_accuracy(
        setup.eval_sampler,
        Policy(current_policy(setup.params, trainable), trainable.lora),
        setup.eval_prompts,
        correctness=setup.rewards["correctness"][0],
        time_limit=config.reward_time_limit,
        processes=setup.processes,
        on_progress=_watch(run, f"evaluation after step {step}:", len(setup.eval_prompts)),
        on_wait=run.stop_if_asked,
        environments=setup.collect.environments,
    )
    seconds = time.perf_counter() - began
    is_compared = run.log is not None and step > 0 and not score.missing
    if is_compared and score.accuracy > best_so_far(run):
        scores = {"accuracy": score.accuracy}
        save_best(run.folder, setup, trainable, step=step, score=scores)
    run.evaluations[step] = None if score.missing else score.accuracy
    key = "eval_accuracy" if step else "eval_accuracy_before"
    row = {"step": step, key: score.accuracy, "eval_truncated": score.truncated}
    row |= {"eval_missing": score.missing} if score.missing else {}
    row |= {"eval_seconds": seconds, "eval_answers": score.answers} | run.compilations.take()
    run.live.clear()
    print(format_row(row, config.steps, line_columns()), flush=True)
    if run.log is not None:
        run.log.write(row)


def _evaluate_text(run: Run, programs: Programs) -> None:
    """Measures and logs the loss of the held-out rows; the policy of the lowest is the best one."""
    step, prompts, began = run.progress.step, run.setup.eval_prompts, time.perf_counter()
    watch = _watch(run, f"evaluation after step {step}:", len(prompts))
    loss = held_out_loss(run.setup, run.progress, prompts, programs=programs, on_progress=watch)
    run.evaluations[step] = None  # of an accuracy
    row = {"step": step, "eval_loss": loss, "eval_seconds": time.perf_counter() - began}
    run.live.clear()
    print(format_row(row, run.setup.config.steps, line_columns()), flush=True)
    if run.log is None:
        return
    if step and loss < lowest_loss(run.folder):
        trainable = run.progress.state.trainable
        save_best(run.folder, run.setup, trainable, step=step, score={"loss": loss})
    run.log.write(row | run.compilations.take())


def _save_or_stop(run: Run) -> None:
    """Saves a checkpoint if the step has one; raises where the run must stop."""
    config, step = run.setup.config, run.progress.step
    skips = int(run.progress.state.skipped_in_a_row)
    due = step % config.checkpoint.every == 0 or step == config.steps
    if due or skips >= _SKIPS_THAT_STOP:
        save(run)
    if skips >= _SKIPS_THAT_STOP:
        remedy = "lower --config.optimizer.learning_rate in a new run"
        if names_function(config.rl.loss):
            remedy = f"check that {config.rl.loss} is finite for every token, or {remedy}"
        raise UserError(
            f"the gradients of {skips} updates in a row were not finite, up to step {step}; "
            f"{remedy}"
        )
    run.stop_if_asked()


def _compile(run: Run) -> Programs:
    """Compiles the programs of the run, so that no step and no evaluation waits for the compiler.

    The programs of rollouts become part of the run's samplers; those of updates are returned.
    """
    began, trains = time.perf_counter(), run.progress.step < run.setup.config.steps

    with waiting("compiling programs", shows=run.log is not None) as say:

        def on_progress(count: int, total: int) -> None:
            run.stop_if_asked()
            say(f"compiling programs, {count}/{total} ready")

        run.setup, programs = compile_programs(
            run.setup,
            run.progress.state,
            trains=trains,
            evaluates=bool(run.setup.eval_prompts) and (trains or _evaluation_is_due(run)),
            on_progress=on_progress,
        )
    if executables := run.setup.eval_sampler.executables:
        seconds = time.perf_counter() - began
        counts = f"compiled {len(executables.compiled)} of {len(executables)} programs"
        print(f"{counts} in {seconds:.0f} s", flush=True)
    return programs


def _watch(run: Run, label: str, total: int) -> Callable[[int, int], None]:
    """Shows the progress of a rollout of `total` rows, and ends it once a signal has arrived."""
    began = time.perf_counter()

    def on_progress(count: int, tokens: int) -> None:
        run.stop_if_asked()
        rate = tokens / (time.perf_counter() - began)
        run.live.update(f"{label} {count}/{total} rows, {rate:.0f} tok/s")

    return on_progress
