"""What a policy can do: problems that it was not trained on, completed, judged and counted.

`greedy_accuracy` is the number that a training run watches, `evaluate` the command. An evaluation
is a folder:

    results.json     settings, versions, commit, command, and the figures of every task
    gsm8k.jsonl      every completion of a task with its verdicts, appended while it runs

The same command continues an interrupted evaluation: what is completed is judged again, not
generated again.
"""

import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from qerl_jax.buckets import bucket
from qerl_jax.data import Prompt, encode_prompts
from qerl_jax.errors import UserError, memory_errors
from qerl_jax.evaluation import results_folder as evaluation
from qerl_jax.evaluation.load_policy import Policy, open_policy, read_run
from qerl_jax.evaluation.results_folder import EvaluateConfig
from qerl_jax.evaluation.summary import bounds, format_table, task_figures
from qerl_jax.evaluation.tasks import Task, extracted_answer, make_tasks
from qerl_jax.policy.lora import Lora
from qerl_jax.rl.rewards import Reward, Scores, resolve, score
from qerl_jax.rollout.budget import dense_bytes, rows_left
from qerl_jax.rollout.engine import Rollout, SamplingConfig, detokenize, generate
from qerl_jax.run.atomic import write_atomic
from qerl_jax.run.jsonl import read_jsonl
from qerl_jax.run.signals import StoppedError, stop_signals
from qerl_jax.run.terminal import LiveLine
from qerl_jax.statistics import paired_difference
from qerl_jax.weights.load import LoadedModel

_CPU_ROWS = 32
_MOST_ROWS = 256  # beyond, waiting for the longest row costs more than it gains


def greedy_accuracy(
    model: LoadedModel,
    lora: Lora | None,
    problems: Sequence[Prompt],
    *,
    correctness: Reward,
    time_limit: float,
    sampling: SamplingConfig,
    prompt_width: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> float:
    """The share of problems whose greedy completion is correct.

    Args:
        model: the policy, without noise.
        lora: its adapter, or None.
        problems: the prompts.
        correctness: the reward that judges a completion; more than 0.5 is correct, missing is not.
        time_limit: seconds for one judgement.
        sampling: limits, and the rows that decode together; the temperature is ignored.
        prompt_width: see `engine.generate`.
        on_progress: see `engine.generate`.
    """
    rollout = _generate(
        jax.random.key(0),
        model,
        lora,
        problems,
        sampling=dataclasses.replace(sampling, temperature=0.0, top_k=0, top_p=1.0),
        prompt_width=prompt_width,
        on_progress=on_progress,
    )
    scores = _judge(
        {"correct": correctness},
        problems,
        detokenize(rollout, model.tokenizer.decode),
        rollout.lengths,
        rollout.finished,
        time_limit=time_limit,
    )
    return float(_passed(scores.parts["correct"]).mean())


def _generate(
    key: jax.Array,
    model: LoadedModel,
    lora: Lora | None,
    prompts: Sequence[Prompt],
    *,
    sampling: SamplingConfig,
    samples: int = 1,
    prompt_ids: Sequence[int] | None = None,
    prompt_width: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> Rollout:
    return generate(
        key,
        model.params,
        lora,
        [prompt.ids for prompt in prompts],
        config=model.config,
        sampling=sampling,
        eos_ids=model.tokenizer.eos_ids,
        pad_id=model.tokenizer.pad_id,
        group_size=samples,
        prompt_ids=prompt_ids,
        prompt_width=prompt_width,
        decode_text=model.tokenizer.decode,
        on_progress=on_progress,
    )


def _judge(
    judges: Mapping[str, Reward],
    prompts: Sequence[Prompt],
    completions: Sequence[str],
    lengths: Sequence[int] | np.ndarray,
    finished: Sequence[bool] | np.ndarray,
    *,
    time_limit: float,
) -> Scores:
    """Judges the completions of as many prompts; what a judge could not do is printed."""
    scores = score(
        {name: (judge, 1.0) for name, judge in judges.items()},
        [prompt.text for prompt in prompts],
        completions,
        [prompt.problem.answer for prompt in prompts],
        lengths,
        finished,
        time_limit=time_limit,
    )
    for error in scores.errors:
        print(f"warning: {error}", file=sys.stderr, flush=True)
    return scores


def _passed(values: np.ndarray) -> np.ndarray:
    return np.nan_to_num(values) > 0.5


# --- A whole evaluation ---------------------------------------------------------------------------


def evaluate(config: EvaluateConfig) -> list[Path]:
    """Evaluates policies on tasks, or continues where that was interrupted.

    Sampled completions follow from the seed and the problems: an evaluation that was continued, or
    whose rows decode in other numbers, has those of one that was not, up to rounding.

    Returns:
        The folder of each policy.

    Raises:
        UserError: something asked for cannot be done.
        StoppedError: SIGTERM or SIGINT arrived; the completions of all whole waves are saved.
    """
    evaluation.check(config)
    run = read_run(Path(config.source).expanduser())
    tasks = make_tasks(config.tasks, run=run and run["config"], overrides=config.overrides)
    judges = {task.name: _resolve(task) for task in tasks}
    folders: list[Path] = []
    first: dict[str, np.ndarray] = {}
    table = []
    with stop_signals() as received:
        for adapter in config.adapters:
            policy = open_policy(
                config.source,
                adapter=adapter,
                base=config.base,
                format=config.format,
                dtype=config.dtype,
            )
            prompts = {task.name: _prompts(policy.model, task, config.limit) for task in tasks}
            name, folder, results = evaluation.open_folder(policy, tasks, config)
            print(f"{name or config.source}: {folder}", flush=True)
            for task in tasks:
                job = _Job(policy, task, prompts[task.name], judges[task.name], config)
                entry = results["tasks"][task.name]
                entry["max_rows"] = entry.get("max_rows") or _fitting_rows(job)
                evaluation.save_results(folder, results)
                path = folder / f"{task.name}.jsonl"
                rows = _complete(job, path, max_rows=entry["max_rows"], received=received)
                figures, values = task_figures(rows)
                if folders:
                    difference = paired_difference(values, first[task.name])
                    figures["difference"] = {"to": str(folders[0])} | bounds(*difference)
                first.setdefault(task.name, values)
                entry |= figures
                evaluation.save_results(folder, results)
                table.append((name, task.name, figures))
            folders.append(folder)
            del policy, job  # The next one needs the memory.
    print("\n" + format_table(table), flush=True)
    return folders


def _resolve(task: Task) -> dict[str, Reward]:
    judges = {"correct": resolve(task.judge)}
    return judges | ({"format": resolve(task.format_judge)} if task.format_judge else {})


def _prompts(model: LoadedModel, task: Task, limit: int) -> list[Prompt]:
    """The prompts of a task; each leaves room for a completion."""
    prompts = encode_prompts(
        task.problems[: limit or None],
        model.tokenizer,
        system_prompt=task.system_prompt,
        question_suffix=task.question_suffix,
        max_prompt_tokens=sys.maxsize,
    )
    positions, lengths = model.config.max_position, [len(prompt.ids) for prompt in prompts]
    over = sum(length + task.max_new_tokens > positions for length in lengths)
    if over:
        raise UserError(
            f"{task.name}: {over} of {len(prompts)} prompts, of up to {max(lengths)} tokens, and "
            f"{task.max_new_tokens} new ones are over the model's {positions} positions: pass "
            f"--max-new-tokens={max(1, positions - max(lengths))}, or take them out"
        )
    return prompts


# --- Completing a task ----------------------------------------------------------------------------

_Rows = dict[tuple[int, int], dict[str, Any]]  # (problem, sample) -> a line of the task's file


@dataclasses.dataclass(frozen=True)
class _Job:
    """A policy at a task.

    Attributes:
        policy: the policy.
        task: the task.
        prompts: P prompts.
        judges: what judges a completion, 'correct' and perhaps 'format'.
        config: how to sample; S completions of each prompt.
    """

    policy: Policy
    task: Task
    prompts: Sequence[Prompt]
    judges: Mapping[str, Reward]
    config: EvaluateConfig


def _complete(
    job: _Job, path: Path, *, max_rows: int, received: list[int]
) -> list[list[dict[str, Any]]]:
    """Completes what is not in the file yet and judges all of it.

    Problems of similar length decode together, the longest first. A wave of which anything is
    missing is generated whole, so that it has the shapes that it would have had.

    Args:
        job: what to complete.
        path: the task's file of completions.
        max_rows: rows that decode together.
        received: the signals that arrived, see `signals.stop_signals`.

    Returns:
        The lines of the file for the P prompts, S each.
    """
    samples, longest_first = job.config.samples, _longest_first(job.prompts)
    size = min(max(1, max_rows // samples), len(longest_first))
    max_rows = min(max_rows, size * samples)  # fewer than the samples of a problem wait for seats
    wanted = {(problem, sample) for problem in longest_first for sample in range(samples)}
    found = read_jsonl(path) if path.exists() else []
    rows: _Rows = {(row["problem"], row["sample"]): row for row in found}
    rows |= _judged(job, [row for place, row in rows.items() if place in wanted])
    _write_rows(path, rows)  # without a torn last line
    live = LiveLine()
    for first in range(0, len(longest_first), size):
        wave = longest_first[first : first + size]
        missing = {(problem, sample) for problem in wave for sample in range(samples)} - rows.keys()
        if not missing:
            continue
        began, before = time.perf_counter(), len(wanted & rows.keys())
        watch = _watch(live, job.task.name, before, len(wanted), received)
        with memory_errors(
            f"{max_rows} rows do not fit; lower --max-rows={max_rows}, --samples={samples} or "
            "--max-new-tokens"
        ):
            drafts = _complete_wave(job, wave, size, max_rows, watch)
        rate = sum(draft["tokens"] for draft in drafts) / (time.perf_counter() - began)
        new = _judged(job, [d for d in drafts if (d["problem"], d["sample"]) in missing])
        with path.open("a", encoding="utf-8") as file:
            file.write(_lines(new))
        rows |= new
        correct = [rows[place]["correct"] is True for place in wanted & rows.keys()]
        live.clear()
        print(
            f"{job.task.name} {len(correct)}/{len(wanted)} completions, "
            f"{100 * np.mean(correct):.1f} % correct so far, {rate:.0f} tok/s",
            flush=True,
        )
    _write_rows(path, dict(sorted(rows.items())))
    return [[rows[problem, s] for s in range(samples)] for problem in range(len(job.prompts))]


def _longest_first(prompts: Sequence[Prompt]) -> list[int]:
    return sorted(range(len(prompts)), key=lambda i: -len(prompts[i].ids))


def _watch(
    live: LiveLine, name: str, before: int, total: int, received: list[int]
) -> Callable[[int, int], None]:
    """Shows how far a wave is; a signal ends it."""
    began = time.perf_counter()

    def on_progress(ended: int, tokens: int) -> None:
        if received:
            live.clear()
            print("the same command continues", flush=True)
            raise StoppedError(received[0])
        rate = tokens / (time.perf_counter() - began)
        live.update(f"{name} {before + ended}/{total} completions, {rate:.0f} tok/s")

    return on_progress


def _complete_wave(
    job: _Job,
    wave: list[int],
    size: int,
    max_rows: int,
    on_progress: Callable[[int, int], None],
) -> list[dict[str, Any]]:
    """The completions of problems that are generated together."""
    config, samples, prompts = job.config, job.config.samples, job.prompts
    filled = wave + wave[:1] * (size - len(wave))  # so that all waves have the same shape
    rollout = _generate(
        jax.random.key(config.seed, impl="threefry2x32"),
        job.policy.model,
        job.policy.lora,
        [prompts[problem] for problem in filled],
        sampling=SamplingConfig(
            max_new_tokens=job.task.max_new_tokens,
            temperature=evaluation.temperature_of(config),
            top_p=config.top_p,
            max_rows=max_rows,
            dequantize=_dequantize(job.policy.model),
        ),
        samples=samples,
        prompt_ids=filled,
        on_progress=on_progress,
    )
    texts = detokenize(rollout, job.policy.model.tokenizer.decode)
    return [
        {
            "task": job.task.name,
            "problem": problem,
            "sample": sample,
            "question": prompts[problem].problem.question,
            "gold": prompts[problem].problem.answer,
            "completion": texts[i * samples + sample],
            "tokens": int(rollout.lengths[i * samples + sample]),
            "finished": bool(rollout.finished[i * samples + sample]),
        }
        for i, problem in enumerate(wave)
        for sample in range(samples)
    ]


def _judged(job: _Job, drafts: Sequence[Mapping[str, Any]]) -> _Rows:
    """Completions with their verdicts: extracted answer, correct, format; None is not judged."""
    scores = _judge(
        job.judges,
        [job.prompts[draft["problem"]] for draft in drafts],
        [draft["completion"] for draft in drafts],
        [draft["tokens"] for draft in drafts],
        [draft["finished"] for draft in drafts],
        time_limit=job.config.time_limit,
    )
    rows: _Rows = {}
    for i, draft in enumerate(drafts):
        verdicts: dict[str, bool | None] = {"correct": None, "format": None}
        for name, values in scores.parts.items():
            verdicts[name] = None if np.isnan(values[i]) else bool(_passed(values[i]))
        answer = extracted_answer(draft["completion"], job.task.judge)
        rows[draft["problem"], draft["sample"]] = {**draft, "extracted": answer, **verdicts}
    return rows


def _fitting_rows(job: _Job) -> int:
    """How many rows fit into the memory of a GPU, by a rough count; few on anything else.

    At least one: that may fit, as the count is rough.
    """
    model = job.policy.model
    rows = rows_left(
        model.params,
        slots=bucket(max(len(prompt.ids) for prompt in job.prompts)) + job.task.max_new_tokens,
        config=model.config,
        sampling=SamplingConfig(
            max_new_tokens=job.task.max_new_tokens, dequantize=_dequantize(model)
        ),
    )
    return _CPU_ROWS if rows is None else min(max(1, rows), _MOST_ROWS)


def _dequantize(model: LoadedModel) -> str:
    """'once' where a dense copy of the layers takes at most a third of a GPU, see the engine."""
    memory = jax.local_devices()[0].memory_stats() or {}
    fits = 3 * dense_bytes(model.params) <= memory.get("bytes_limit", math.inf)
    return "once" if fits else "step"


def _write_rows(path: Path, rows: _Rows) -> None:
    write_atomic(path, _lines(rows))


def _lines(rows: _Rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows.values())
