"""Evaluates policies on tasks: completes problems, scores the completions and counts.

An evaluation is a folder:

    results.json     settings, versions, commit, command, and the figures of every task
    gsm8k.jsonl      every completion of a task with its scores, appended while the task runs

The same command continues an interrupted evaluation. Completions that are in the file are scored
again but not generated again.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from qerl_jax.compile.run_cache import keep_programs
from qerl_jax.data.prompt_rollout import AnyEnvironments, Ended, PromptRollout
from qerl_jax.data.prompts import Prompt
from qerl_jax.environments.episodes import Episode
from qerl_jax.environments.roles import ENDINGS, FAILURE
from qerl_jax.errors import UserError, memory_errors, visible
from qerl_jax.evaluation import results_folder
from qerl_jax.evaluation.greedy import is_correct, score_completions, tokens_of_examples
from qerl_jax.evaluation.load_policy import (
    LoadedPolicy,
    describe_policy,
    open_policy,
    read_run,
    trusts_run,
)
from qerl_jax.evaluation.results_folder import EvaluateConfig
from qerl_jax.evaluation.run_environments import (
    check_trusted,
    environments_of,
    has_environment,
    turns_of,
)
from qerl_jax.evaluation.summary import bounds, format_table, task_figures
from qerl_jax.evaluation.task_prompts import TaskPrompts, encode_task
from qerl_jax.evaluation.tasks import RUN, Task, extracted_answer, make_tasks, same_answer
from qerl_jax.memory.report import check_sampler
from qerl_jax.policy.layers.part import PlannedBuffer
from qerl_jax.rewards.calls import announce_hosts, check_columns, resolve
from qerl_jax.rewards.functions import Reward
from qerl_jax.rewards.scored import Completion
from qerl_jax.rollout.config import EngineConfig, SamplingConfig, TurnConfig
from qerl_jax.rollout.progress import RolloutProgress
from qerl_jax.rollout.sampler import Sampler
from qerl_jax.rollout.shapes import bytes_left, dequantize_mode, fit_rows, row_positions
from qerl_jax.run.folder import RunFolder
from qerl_jax.run.lines import line_columns
from qerl_jax.run.ownership import trusts
from qerl_jax.run.statistics import paired_difference
from qerl_jax.system.atomic import write_atomic
from qerl_jax.system.jsonl import read_jsonl
from qerl_jax.system.live_line import LiveLine, waiting
from qerl_jax.system.paths import user_path
from qerl_jax.system.safe_files import check_tree, open_to_write
from qerl_jax.system.signals import StoppedError, stop_signals
from qerl_jax.weights.chat_template import template_date
from qerl_jax.weights.checkpoint import read_architecture
from qerl_jax.weights.load import LoadedModel

_CPU_ROWS = 32
_ROLLOUT_TOKENS = 2**26  # tokens of all completions of a rollout, each 12 bytes on the host
_MOST_ROWS = 256  # with more, waiting for the longest row costs more than the larger batch gains


def evaluate(config: EvaluateConfig) -> list[Path]:
    """Evaluates policies on tasks, or continues an interrupted evaluation.

    Sampled completions depend on the seed and the problems alone. An evaluation that was continued,
    or that decodes another number of rows together, has the same completions as an uninterrupted
    one, up to rounding.

    Args:
        config: what to evaluate, and how.

    Returns:
        The folder of each policy.

    Raises:
        UserError: a setting is invalid, or a policy or a task cannot be loaded.
        StoppedError: one of `STOP_SIGNALS` arrived; the completions that have ended are saved.
    """
    results_folder.validate(config)
    source = user_path(config.source)
    if not source.exists():
        read_architecture(config.source)  # A mistake in the name, before problems are loaded.
    run = read_run(source)
    results_folder.folders_of(config)  # One that is missing, before the others are evaluated.
    trusted = trusts_run(source, run, trust=config.trust)
    tasks = make_tasks(
        config.tasks,
        run=run and run["config"],
        overrides=config.overrides,
        folder=source,
        trusted=trusted,
    )
    check_trusted(run, trusted=trusted)
    scorers = {
        task.name: _resolve_scorers(task, converses=task.source == RUN and has_environment(run))
        for task in tasks
    }
    announce_hosts(scorer for task_scorers in scorers.values() for scorer in task_scorers.values())
    folders: list[Path] = []
    baseline: dict[str, np.ndarray] = {}
    table = []
    with (
        stop_signals() as received,
        keep_programs(_program_folder(source) if run else None, trusted=trusts(config.trust)),
    ):
        bases: dict[tuple, LoadedModel] = {}
        options = {"base": config.base, "format": config.format, "dtype": config.dtype}
        for adapter in config.adapters[1:]:  # Before the first one is evaluated.
            if policy := describe_policy(config.source, adapter=adapter, **options):
                _, folder = results_folder.locate_results(policy, config)
                results_folder.check_folder(folder, policy, tasks, config)
        for adapter in config.adapters:
            # A policy whose completions are all there is not loaded.
            policy = describe_policy(config.source, adapter=adapter, **options)
            if policy is None or not _is_complete(policy, tasks, config):
                del policy
                policy = open_policy(config.source, adapter=adapter, bases=bases, **options)
            name, folder = results_folder.locate_results(policy, config)
            conversations = environments_of(run, policy.model.tokenizer, trusted=trusted)
            prompts = _encode_tasks(policy, tasks, folder, config, conversations)
            digests = {task: task_prompts.digest for task, task_prompts in prompts.items()}
            results = results_folder.open_folder(folder, policy, tasks, digests, config)
            print(visible(f"{name or config.source}: {folder}"), flush=True)
            for task in tasks:
                job = _Job(
                    policy,
                    task,
                    prompts[task.name].prompts,
                    scorers[task.name],
                    config,
                    environments=conversations if task.source == RUN else None,
                )
                entry = results["tasks"][task.name]
                # A policy of `load_policy.describe_policy` has no weights.
                if not isinstance(policy.model.params["embed_tokens"], jax.ShapeDtypeStruct):
                    entry["max_rows"] = entry.get("max_rows") or _estimate_rows(job)
                results_folder.save_results(folder, results)
                path = folder / f"{task.name}.jsonl"
                rows = _complete(job, path, max_rows=entry.get("max_rows", 0), received=received)
                figures, values = task_figures(rows, same_answer(task.scorer))
                if missing := figures["not_judged"]:
                    print(
                        f"{visible(task.name)}: {missing} completions have no score and count "
                        "neither as right nor as wrong; the same command scores them again",
                        flush=True,
                    )
                # A problem without a score for one of the policies takes no part.
                both = ~np.isnan(values - baseline.get(task.name, values))
                if folders and both.any():
                    difference = paired_difference(values[both], baseline[task.name][both])
                    figures["difference"] = {"to": str(folders[0])} | bounds(*difference)
                baseline.setdefault(task.name, values)
                entry |= figures
                results_folder.save_results(folder, results)
                table.append((name, task.name, figures))
            folders.append(folder)
            del policy, job  # The next policy needs the memory.
    print("\n" + visible(format_table(table, line_columns())), flush=True)
    return folders


def _encode_tasks(
    policy: LoadedPolicy,
    tasks: Sequence[Task],
    folder: Path,
    config: EvaluateConfig,
    environments: AnyEnvironments | None,
) -> dict[str, TaskPrompts]:
    """Returns the prompts of the training, or else of the first start, where they have a date."""

    def encode(task: Task) -> TaskPrompts:
        if environments is None or task.source != RUN or policy.run is None:
            return encode_task(policy.model, task, config.limit)
        turns = turns_of(policy.run, task.max_new_tokens)
        prompt = dataclasses.replace(task.prompt, tools=environments.prompts.tools)
        return encode_task(
            policy.model,
            dataclasses.replace(task, prompt=prompt),
            config.limit,
            new_tokens=turns.context_tokens if turns else 0,
        )

    with template_date(policy.created or results_folder.first_start(folder)):
        return {task.name: encode(task) for task in tasks}


def _is_complete(policy: LoadedPolicy, tasks: Sequence[Task], config: EvaluateConfig) -> bool:
    """Whether the folder of a policy holds all completions of all tasks."""
    _, folder = results_folder.locate_results(policy, config)
    for task in tasks:
        path = folder / f"{task.name}.jsonl"
        count = min(len(task.problems), config.limit or len(task.problems))
        wanted = {(p, s) for p in range(count) for s in range(config.samples)}
        lines = read_jsonl(path) if path.exists() else []
        if wanted - {_sample_id(path, line) for line in lines}:
            return False
    return True


def _program_folder(run: Path) -> Path:
    """Returns the folder of the compiled programs of a run, in which nothing leads elsewhere."""
    programs = RunFolder(run).programs
    check_tree(programs)
    return programs


def _resolve_scorers(task: Task, *, converses: bool) -> dict[str, Reward]:
    scorers = {"correct": resolve(task.scorer, **task.options.get("scorer", {}))}
    if task.format_scorer:
        options = task.options.get("format_scorer", {})
        scorers["format"] = resolve(task.format_scorer, **options)
    rows = [problem.columns for problem in task.problems]
    for name, scorer in scorers.items():
        check_columns(f"{task.name}: {name}", scorer, rows, converses=converses)
    return scorers


# --- Completing a task ----------------------------------------------------------------------------

_Rows = dict[tuple[int, int], dict[str, Any]]  # (problem, sample) -> a line of the task's file


@dataclasses.dataclass(frozen=True)
class _Job:
    """One policy on one task."""

    policy: LoadedPolicy  # policy to evaluate
    task: Task  # task to complete
    prompts: Sequence[Prompt]  # P prompts of the task
    # Rewards that score a completion: 'correct' and, if the task has one, 'format'.
    scorers: Mapping[str, Reward]
    config: EvaluateConfig  # settings of the evaluation, with S samples per prompt
    # What the policy talks to; None for completions of one turn.
    environments: AnyEnvironments | None = None

    @property
    def turns(self) -> TurnConfig | None:
        """The limits of conversations with an environment."""
        if self.environments is None or self.policy.run is None:
            return None
        return turns_of(self.policy.run, self.task.max_new_tokens)


def _complete(
    job: _Job, path: Path, *, max_rows: int, received: list[int]
) -> list[list[dict[str, Any]]]:
    """Completes what is not in the file yet, and scores all completions.

    The problems decode in one rollout, the longest prompts first: a problem takes the slot of one
    that has ended. An evaluation of very many tokens is divided into several rollouts. All of them
    use the same programs, which are compiled before, and so does an evaluation that is continued.

    Returns:
        The lines of the file for P prompts, with S samples each.
    """
    samples, prompts = job.config.samples, job.prompts
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i].ids))
    sample_ids = {(problem, sample) for problem in order for sample in range(samples)}
    lines = read_jsonl(path) if path.exists() else []
    rows: _Rows = {_sample_id(path, row): row for row in lines}
    rows |= _score(
        job, [row for sample_id, row in rows.items() if sample_id in sample_ids], received
    )
    write_atomic(path, _lines(rows))  # This drops an incomplete last line.
    incomplete = {problem for problem, _ in sample_ids - rows.keys()}
    if problems := [problem for problem in order if problem in incomplete]:
        _complete_problems(job, path, rows, problems, max_rows=max_rows, received=received)
    write_atomic(path, _lines(dict(sorted(rows.items()))))
    return [[rows[problem, s] for s in range(samples)] for problem in range(len(prompts))]


def _complete_problems(
    job: _Job,
    path: Path,
    rows: _Rows,
    problems: list[int],
    *,
    max_rows: int,
    received: list[int],
) -> None:
    """Completes problems, scores the completions and adds them to `rows` and to the file.

    The longest prompts come first in `problems`.
    """
    samples, total = job.config.samples, len(job.prompts) * job.config.samples
    # Problems whose completions the host holds in one rollout.
    size = max(1, min(_ROLLOUT_TOKENS // (samples * job.task.max_new_tokens), len(job.prompts)))
    engine = dataclasses.replace(
        _engine(job),
        max_rows=min(max_rows, size * samples),
        prompt_width=_prompt_width(job),
        num_prompts=size,
        prefill_prompts=_fit(job, max_rows)[1],
        shared_tokens=tokens_of_examples(
            job.prompts, () if job.turns else job.task.prompt.examples
        ),
        compact="once",
    )

    def completed() -> list[dict[str, Any]]:
        return [row for (p, s), row in rows.items() if p < len(job.prompts) and s < samples]

    live = LiveLine()
    remedy = f"--max-rows={engine.max_rows}, --samples={samples} or --max-new-tokens"
    with memory_errors(f"{engine.max_rows} rows do not fit; lower {remedy}"):
        sampler = _compile(job, _sampler(job, engine), received)
        for line in check_sampler(sampler, _key(job), job.policy.policy, remedy=remedy):
            print(f"warning: {line}", file=sys.stderr, flush=True)
        for first in range(0, len(problems), size):
            began = time.perf_counter()
            watch = _watch(live, job.task.name, len(completed()), total, received)
            batch = problems[first : first + size]
            for drafts in _completions(job, batch, sampler, watch):
                additions = [d for d in drafts if (d["problem"], d["sample"]) not in rows]
                rows |= _append(job, path, additions, received)
                scores = [row["correct"] for row in completed()]
                correct = [score for score in scores if score is not None]
                share = f"{100 * np.mean(correct):.1f}" if correct else "-"
                rate = sum(draft["tokens"] for draft in drafts) / (time.perf_counter() - began)
                began = time.perf_counter()
                live.clear()
                print(
                    f"{visible(job.task.name)} {len(scores)}/{total} completions, "
                    f"{share} % correct so far, {rate:.0f} tok/s",
                    flush=True,
                )


def _prompt_width(job: _Job) -> int:
    width = max(len(prompt.ids) for prompt in job.prompts)
    return width if job.environments is None else max(width, job.environments.max_prompt_tokens)


def _sample_id(path: Path, row: Any) -> tuple[int, int]:
    """Returns the numbers of problem and sample of a line; refuses what no evaluation wrote."""
    match row:
        case {
            "problem": int(problem),
            "sample": int(sample),
            "completion": str(),
            "tokens": int(),
            "finished": bool(),
        }:
            return problem, sample
    raise UserError(f"{path} is damaged: a line is not that of a completion; pass another --out")


def _append(
    job: _Job, path: Path, drafts: Sequence[Mapping[str, Any]], received: list[int]
) -> _Rows:
    """Scores completions and appends them to the file, without scores where a signal arrives."""
    rows: _Rows = {(draft["problem"], draft["sample"]): dict(draft) for draft in drafts}
    try:
        rows = _score(job, drafts, received)
    finally:
        with open_to_write(path, "a", encoding="utf-8") as file:
            file.write(_lines(rows))
    return rows


def _watch(
    live: LiveLine, name: str, num_before: int, total: int, received: list[int]
) -> Callable[[int, int], None]:
    """Returns a callback that shows the progress of a batch and ends it after a signal."""
    began = time.perf_counter()

    def on_progress(ended: int, tokens: int) -> None:
        if received:
            live.clear()
            print("the same command continues", flush=True)
            raise StoppedError(received[0])
        rate = tokens / (time.perf_counter() - began)
        live.update(f"{name} {num_before + ended}/{total} completions, {rate:.0f} tok/s")

    return on_progress


def _compile(job: _Job, sampler: Sampler, received: list[int]) -> Sampler:
    """Compiles the programs of a task, or loads them from the cache."""
    began = time.perf_counter()
    policy, size = job.policy.policy, sampler.engine.num_prompts
    label = visible(f"{job.task.name}: compiling programs")
    with waiting(label) as say:

        def on_progress(count: int, total: int) -> None:
            if received:
                raise StoppedError(received[0])
            say(f"{label}, {count}/{total} ready")

        sampler = sampler.compiled(_key(job), policy, num_prompts=size, on_progress=on_progress)
    executables = sampler.executables
    assert executables is not None
    print(
        f"{job.task.name} compiled {len(executables.compiled)} of {len(executables)} programs in "
        f"{time.perf_counter() - began:.0f} s",
        flush=True,
    )
    return sampler


def _completions(
    job: _Job,
    problems: list[int],
    sampler: Sampler,
    on_progress: Callable[[int, int], None],
) -> Generator[list[dict[str, Any]]]:
    """Yields the completions of problems that are generated together, in parts as they end.

    Before a StoppedError of `on_progress` leaves the generator, it yields all that have ended.
    """
    rollout = PromptRollout(
        sampler,
        _key(job),
        job.policy.policy,
        [job.prompts[problem] for problem in problems],
        ids=problems,
        environments=job.environments,
    )

    def drafts(progress: RolloutProgress) -> list[dict[str, Any]]:
        taken = rollout.take(progress)
        return [_draft(job, problems, row, ended) for row, ended in taken.items()]

    with rollout:
        for progress in rollout:
            has_ended = progress.ended_rows == progress.rows
            if has_ended or progress.ended_rows - len(rollout.texts) >= sampler.engine.max_rows:
                yield drafts(progress)
            if has_ended:
                return
            try:
                on_progress(progress.ended_rows, progress.tokens)
            except StoppedError:
                if ended := drafts(progress):
                    yield ended
                raise


def _draft(job: _Job, problems: list[int], row: int, ended: Ended) -> dict[str, Any]:
    """Returns the line of a completion of a rollout of these problems, without its scores."""
    index, sample = divmod(row, job.config.samples)
    problem, episode = job.prompts[problems[index]].problem, ended.episode
    draft = {
        "task": job.task.name,
        "problem": problems[index],
        "sample": sample,
        "question": problem.question,
        "gold": problem.answer,
        "completion": ended.text,
        "tokens": ended.tokens,
        "finished": ended.finished,
    }
    if episode is None:
        return draft
    return draft | {
        "conversation": [{"role": role, "text": text} for role, text in episode.parts],
        "ending": ENDINGS[episode.ending],
        "environment_reward": episode.reward,
        "environments": episode.facts,
        "messages": episode.messages,
        **({"error": episode.error} if episode.error else {}),
    }


def _key(job: _Job) -> jax.Array:
    return jax.random.key(job.config.seed, impl="threefry2x32")


def _sampler(job: _Job, engine: EngineConfig) -> Sampler:
    sampling = SamplingConfig(
        max_new_tokens=job.task.max_new_tokens,
        temperature=results_folder.temperature_of(job.config),
        top_p=job.config.top_p,
        stop=job.task.stop,
    )
    model = job.policy.model
    options = model.config, model.tokenizer, sampling, engine, job.config.samples
    return Sampler(*options, turns=job.turns)


def _score(job: _Job, drafts: Sequence[Mapping[str, Any]], received: list[int]) -> _Rows:
    """Returns completions with their extracted answer and their scores.

    The scores 'correct' and 'format' are True, False, or None where the score is missing. A signal
    that arrives while a scorer works ends the scoring.
    """

    def on_wait() -> None:
        if received:
            raise StoppedError(received[0])

    scores = score_completions(
        job.scorers,
        [_to_score(job, draft) for draft in drafts],
        # As in training, no scorer gets a conversation whose environment failed.
        unscored={i for i, d in enumerate(drafts) if d.get("ending") == ENDINGS[FAILURE]},
        time_limit=results_folder.time_limit_of(job.config, job.policy.run),
        on_wait=on_wait,
    )
    rows: _Rows = {}
    for i, draft in enumerate(drafts):
        outcomes: dict[str, bool | None] = {"correct": None, "format": None}
        for name, values in scores.parts.items():
            outcomes[name] = None if np.isnan(values[i]) else bool(is_correct(values[i]))
        prompt = job.prompts[draft["problem"]].text
        answer = extracted_answer(draft["completion"], job.task.scorer, prompt)
        rows[draft["problem"], draft["sample"]] = {**draft, "extracted": answer, **outcomes}
    return rows


def _to_score(job: _Job, draft: Mapping[str, Any]) -> Completion:
    """Returns what scorers get of a completion, from its line in the file."""
    episode = None
    if job.environments is not None:
        parts = [(turn["role"], turn["text"]) for turn in draft["conversation"]]
        reward, facts = draft["environment_reward"], draft["environments"]
        episode = Episode(parts, draft.get("messages", []), reward=reward, facts=facts)
    prompt, text = job.prompts[draft["problem"]], draft["completion"]
    return Ended(prompt, text, draft["tokens"], draft["finished"], episode).to_score()


def _estimate_rows(job: _Job) -> int:
    """Estimates how many rows fit into the memory of the device, `_CPU_ROWS` if it is unknown.

    The result is at least 1: the estimate is rough, so one row may fit even if it says otherwise.
    """
    if bytes_left(job.policy.model.params, engine=_engine(job)) is None:
        return _CPU_ROWS
    return max(1, _fit(job, _MOST_ROWS)[0])


def _fit(job: _Job, max_rows: int) -> tuple[int, int]:
    """`fit_rows` of a task, with at most `max_rows`."""
    model, turns, engine = job.policy.model, job.turns, _engine(job)
    width, positions = row_positions(
        _prompt_width(job), turns.context_tokens if turns else job.task.max_new_tokens
    )
    return fit_rows(
        model.config,
        dataclasses.replace(engine, max_rows=max_rows),
        num_prompts=len(job.prompts),
        group_size=_MOST_ROWS,  # One problem has as many samples as that, so that more may follow.
        width=width,
        positions=positions,
        buffer=PlannedBuffer(model.params["embed_tokens"].dtype),
        free=bytes_left(model.params, engine=engine),
        reply_tokens=turns.longest_reply if turns else 0,
    )


def _engine(job: _Job) -> EngineConfig:
    return EngineConfig(
        dequantize=dequantize_mode(job.policy.model.params),
        kv_cache_dtype=job.task.kv_cache_dtype,
    )


def _lines(rows: _Rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows.values())
