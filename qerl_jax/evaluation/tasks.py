r"""Tasks of an evaluation: problems, the prompt around them, and the scorers of completions.

The name of a task is a benchmark of the table below, a file of problems, or `run` for the problems
that a run held out. A benchmark comes from the Hugging Face hub, or from a local copy of its
fields.
"""

import dataclasses
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from qerl_jax.config.fields import has_own_evaluation, learns_from_text
from qerl_jax.data.mixture import MixtureSource, read_mixture
from qerl_jax.data.prompts import Problem, PromptConfig, prompt_config
from qerl_jax.data.sources import FILE_TYPES, check_generated
from qerl_jax.data.splits import ProblemConfig, digest_of_problems, load_mixture, load_split
from qerl_jax.data.texts import text_source
from qerl_jax.errors import UserError, first_line
from qerl_jax.evaluation.flags import template_arguments
from qerl_jax.evaluation.scorers import check_scorers, reader, run_scorers
from qerl_jax.rewards import functions
from qerl_jax.rewards.answers import (
    answer_part,
    completion_number,
    last_boxed,
    last_marked,
    last_tagged,
    marked_number,
)
from qerl_jax.rewards.calls import columns_read, is_built_in
from qerl_jax.rewards.functions import Reward
from qerl_jax.run.checkpoints import read_latest_meta
from qerl_jax.run.folder import RunFolder
from qerl_jax.run.saved_fields import check_meta

SYSTEM_PROMPT = r"Please reason step by step, and put your final answer within \boxed{}."
RUN = "run"

_NUMBER = "qerl_jax.rewards.functions:numeric_answer"
_MATH = "qerl_jax.rewards.functions:math_answer"
_BOXED = "qerl_jax.rewards.functions:boxed_format"
# Rewards that compare values, not texts.
_COMPARING = {
    f"{reward.__module__}:{reward.__name__}": reward
    for reward in (
        functions.numeric_answer,
        functions.boxed_answer,
        functions.tagged_answer,
        functions.math_answer,
    )
}
_NEW_TOKENS = 1024  # default limit on new tokens for tasks that are files
_PROMPT_FIELDS = ("system_prompt", "question_suffix", "chat_template_args")  # of an override
_ALL = 10**9  # number of problems that takes all of a task


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A published test set: the split `test` of a dataset on the hub."""

    hub: str  # hub id of the dataset
    # Names of the fields with the question and the answer, which a local copy needs.
    fields: tuple[str, str]
    scorer: str  # import path of the reward that decides whether a completion is correct
    max_new_tokens: int  # default limit on new tokens per completion


# An answer of GSM8K ends in `#### NUMBER`; a solution of math-ai/aime24 is \boxed{NUMBER}.
BENCHMARKS = {
    "gsm8k": Benchmark("openai/gsm8k", ("question", "answer"), _NUMBER, 1024),
    "math500": Benchmark("HuggingFaceH4/MATH-500", ("problem", "answer"), _MATH, 4096),
    "aime24": Benchmark("math-ai/aime24", ("problem", "solution"), _MATH, 4096),
    "aime25": Benchmark("math-ai/aime25", ("problem", "answer"), _MATH, 4096),
    "amc23": Benchmark("math-ai/amc23", ("question", "answer"), _MATH, 4096),
}


@dataclasses.dataclass(frozen=True)
class Task:
    """Problems with their prompt and their scorers."""

    name: str  # name of the task and of its file of completions
    source: str  # hub id or file that the problems come from, or 'run'
    problems: list[Problem]  # all problems of the task
    prompt: PromptConfig  # how the problems are written
    scorer: str  # import path or URL of the reward that decides whether a completion is correct
    # Import path or URL of the reward that decides whether a completion has the right format; ''
    # scores no format.
    format_scorer: str
    max_new_tokens: int  # limit on new tokens per completion
    stop: tuple[str, ...] = ()  # strings that end a completion
    kv_cache_dtype: str = ""  # dtype of the stored keys and values, as in `EngineConfig`
    # Further arguments of `calls.resolve` for `scorer` and `format_scorer`.
    options: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)

    @property
    def problems_digest(self) -> str:
        """SHA-256 of all questions and answers."""
        return digest_of_problems(self.problems)


@dataclasses.dataclass(frozen=True)
class TaskOverrides:
    """Settings that replace the settings of tasks.

    Each item is VALUE for all tasks, or TASK=VALUE for one task.
    """

    # Local files that replace the data of the hub, always as TASK=FILE.jsonl.
    data: Sequence[str] = ()
    system_prompt: Sequence[str] = ()  # system messages; '' leaves it to the chat template
    question_suffix: Sequence[str] = ()  # texts that are appended to every question
    # Import paths of rewards that decide whether a completion is correct.
    scorer: Sequence[str] = ()
    # Import paths of rewards that decide whether the format is right; '' scores no format.
    format_scorer: Sequence[str] = ()
    max_new_tokens: Sequence[str] = ()  # limits on new tokens per completion
    # Further variables of the chat template, as a JSON object.
    chat_template_args: Sequence[str] = ()
    # Names of environment variables with the token for scorers that are URLs, also several
    # separated by commas, see `scorers.check_scorers`.
    token_env: Sequence[str] = ()


def make_tasks(
    names: Sequence[str],
    *,
    run: Mapping[str, Any] | None,
    overrides: TaskOverrides,
    folder: Path | None = None,
    trusted: bool = False,
) -> list[Task]:
    """Loads the problems of tasks and determines their prompts and scorers.

    A benchmark has a fixed scorer and a fixed limit on new tokens, so that every policy is measured
    in the same way. A file and `run` have the scorer and the limit of the run, if the policy comes
    from a run. Without a run, a file is scored by number if all its answers are numbers, and by
    math-verify otherwise. The system message, the suffix, the scorer of the format, the stop
    strings and the dtype of keys and values come from the run; without a run they are
    `SYSTEM_PROMPT`, no suffix, `boxed_format`, no stop strings, and the dtype of the model.

    Problems whose answer the scorer needs and cannot read are left out and counted on the screen.

    Args:
        names: names of `BENCHMARKS`, files that end in .jsonl, .json or .parquet, or 'run'. Without
            names, the task is 'run' if the policy comes from a run, and GSM8K otherwise.
        run: config of the run that the policy comes from, or None.
        overrides: settings that replace the settings of the tasks.
        folder: folder of that run. The problems that it held out are compared with the problems
            that its newest checkpoint was saved with; None does not compare them.
        trusted: whether the run is the user's own, or its folder is trusted. Else it has the
            project's own rewards, or those of the command line.

    Returns:
        The tasks in the order of their names.

    Raises:
        UserError: a task does not exist, its problems cannot be loaded, or a setting is invalid.
    """
    names = names or ([RUN] if run is not None else ["gsm8k"])
    files = {Path(name).stem: name for name in names if name.endswith(FILE_TYPES)}
    short_names = [Path(name).stem if name.endswith(FILE_TYPES) else name for name in names]
    for name in short_names:
        if short_names.count(name) > 1:
            raise UserError(f"--tasks={','.join(names)}: {name} occurs twice; rename a file")
        if name not in files and name not in (*BENCHMARKS, RUN):
            raise UserError(
                f"--tasks={name}: no such task; choose from {', '.join(BENCHMARKS)}, {RUN} (the "
                "problems that a run held out), and local files FILE.jsonl"
            )
    by_field = {
        field.name: _by_task(field.name, values, short_names)
        for field in dataclasses.fields(overrides)
        if (values := getattr(overrides, field.name))
    }
    files |= by_field.pop("data", {})
    return [
        _make_task(
            name,
            files.get(name),
            run,
            folder,
            {field: by_task[name] for field, by_task in by_field.items() if name in by_task},
            trusted=trusted,
        )
        for name in short_names
    ]


def _by_task(setting: str, values: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Returns the values of a setting by task; TASK=VALUE takes precedence over VALUE."""
    common, specific = {}, {}
    for text in values:
        name, equals, value = text.partition("=")
        several = setting == "token_env"
        if equals and name in names:
            specific[name] = f"{specific[name]},{value}" if several and name in specific else value
        elif setting == "data":
            raise UserError(
                f"--data={text}: write it as TASK=FILE.jsonl, where TASK is one of "
                f"{', '.join(names)}"
            )
        else:
            text = ",".join([*list(common.values())[:1], text]) if several else text
            common = dict.fromkeys(names, text)
    return common | specific


def _make_task(
    name: str,
    file: str | None,
    run: Mapping[str, Any] | None,
    folder: Path | None,
    overrides: Mapping[str, str],
    *,
    trusted: bool,
) -> Task:
    benchmark = BENCHMARKS.get(name)
    settings: dict[str, Any] = {
        "prompt": PromptConfig(system_prompt=SYSTEM_PROMPT),
        "format_scorer": _BOXED,
        "max_new_tokens": str(_NEW_TOKENS),
    }
    if run is not None:
        settings |= _run_settings(run)
    if benchmark is not None:
        settings |= {
            "scorer": benchmark.scorer,
            "max_new_tokens": str(benchmark.max_new_tokens),
        }
        settings.get("options", {}).pop("scorer", None)  # those of the run's own scorer
    options = check_scorers(settings, overrides, trusted=trusted)
    texts: dict[str, Any] = {f: overrides[f] for f in _PROMPT_FIELDS if f in overrides}
    if "chat_template_args" in texts:
        texts["chat_template_args"] = template_arguments(texts["chat_template_args"])
    others = {f: overrides[f] for f in overrides if f not in ("token_env", *_PROMPT_FIELDS)}
    prompt = dataclasses.replace(settings["prompt"], **texts)
    settings |= others | {"options": options, "prompt": prompt}
    if settings.get("scorer") == "":
        reward = {} if run is None else run["rewards"].get("correctness", {})
        from_python = reward.get("function") == ""
        reason = " that can be imported, the run's was given in Python" if from_python else ""
        raise UserError(f"{name}: it has no scorer{reason}; pass --judge=MODULE:FUNCTION")
    # Without a scorer, the answers decide.
    scorers = [reader(settings["scorer"])] if "scorer" in settings else None
    if file is not None:
        source = file
        problem_config = ProblemConfig(eval_path=file, eval_size=_ALL, rewards=scorers)
        problems = load_split(problem_config, split="eval")
    elif benchmark is not None:
        source, problems = benchmark.hub, _load_hub(name, benchmark, scorers)
    else:
        flag_values = None if trusted else overrides.values()
        source, problems = RUN, _held_out_problems(run, folder, scorers, flag_values=flag_values)
    if scorers is None:
        is_number = functions.number_only_format
        all_numbers = all(is_number("", p.answer, "", 0, True) for p in problems)
        settings["scorer"] = _NUMBER if all_numbers else _MATH
    max_new_tokens = settings.pop("max_new_tokens")
    if not re.fullmatch("[1-9][0-9]*", max_new_tokens):
        raise UserError(f"--max-new-tokens={max_new_tokens}: it must be a number of at least 1")
    return Task(
        name=name,
        source=source,
        problems=problems,
        max_new_tokens=int(max_new_tokens),
        **settings,
    )


def _load_hub(name: str, benchmark: Benchmark, scorers: Sequence[Reward] | None) -> list[Problem]:
    problem_config = ProblemConfig(eval_source=benchmark.hub, eval_size=_ALL, rewards=scorers)
    try:
        return load_split(problem_config, split="eval")
    except UserError as error:
        reason = first_line(error.__cause__ or error)
        raise UserError(
            f"{benchmark.hub}: cannot load it from the Hugging Face hub ({reason}); pass a local "
            f"copy with {' and '.join(benchmark.fields)} on each line: --data={name}=FILE.jsonl"
        ) from error


def training_problems(run: Mapping[str, Any], *, trusted: bool) -> list[Problem]:
    """Returns the training problems of a run, of all sources of a mixture, as in its training.

    Args:
        run: the config of the run.
        trusted: whether what the run names is called and read.

    Raises:
        UserError: the run is not trusted, or its problems cannot be loaded.
    """
    if not trusted:
        raise UserError(
            "the run of another person names the files and functions of its training problems; "
            "pass --trust to read them"
        )
    size = (run["eval"]["problems"] or None) if run["eval"]["every"] else 0
    functions = [reward["function"] for reward in run["rewards"].values()]
    problem_config = _problems_of(run, size, list(map(reader, functions)))
    if sources := read_mixture(run["data"]):
        by_name, _ = load_mixture(sources, problem_config)
        return [problem for problems in by_name.values() for problem in problems]
    return load_split(problem_config, split="train")


def _problems_of(
    run: Mapping[str, Any], eval_size: int | None, rewards: Sequence[Reward]
) -> ProblemConfig:
    data = run["data"]
    config = ProblemConfig(
        source=data["source"],
        path=data["path"],
        eval_source=data["eval_source"],
        eval_path=data["eval_path"],
        eval_size=eval_size,
        rewards=rewards,
        levels=data["levels"],
        max_question_chars=data["max_question_chars"],
        fields=data["fields"],
        options=data["options"],
    )
    if learns_from_text(run):
        return dataclasses.replace(config, rewards=(), **text_source(run))
    return config


def _held_out_problems(
    run: Mapping[str, Any] | None,
    folder: Path | None,
    scorers: Sequence[Reward] | None,
    *,
    flag_values: Collection[str] | None,
) -> list[Problem]:
    """Returns the evaluation problems of a run, the same as during its training.

    Of a run that is not trusted, only rewards that are among `flag_values`, the values of the
    command line, or built in, are imported; None imports all.
    """
    if run is None:
        raise UserError(
            f"--tasks={RUN}: the policy is not a run folder, so there are no held-out problems"
        )
    if learns_from_text(run):
        raise UserError(
            "the run learned from text, and its held-out rows have no scorer; pass questions "
            "with answers, --tasks=FILE.jsonl or a benchmark such as --tasks=gsm8k"
        )
    data, size = run["data"], run["eval"]["problems"]
    if not run["eval"]["every"] and not has_own_evaluation(data):
        raise UserError(
            "the run held out no problems (eval.every=0); pass a benchmark or a file with --tasks"
        )
    if not has_own_evaluation(data):
        only = MixtureSource(path=data["path"], source=data["source"])
        for part in read_mixture(data).values() or (only,):
            check_generated(part.origin, scorers or ())
    functions = [reward["function"] for reward in run["rewards"].values()]
    may_import = [flag_values is None or f in flag_values or is_built_in(f) for f in functions]
    readers = [reader(f, imports=imports) for f, imports in zip(functions, may_import, strict=True)]
    problem_config = _problems_of(run, size or None, readers)
    try:
        # Problems with a source of their own are loaded without the sources of the training.
        if sources := {} if has_own_evaluation(data) else read_mixture(data):
            _, problems = load_mixture(sources, problem_config)
        else:
            problems = load_split(problem_config, split="eval")
    except UserError as error:
        raise UserError(
            f"the problems that the run held out cannot be loaded ({first_line(error)}); pass "
            f"these problems as a file: --data={RUN}=FILE.jsonl"
        ) from error
    if folder is not None and all(may_import):  # else nothing tells which columns they read
        checkpoints = RunFolder(folder).checkpoints
        if meta := read_latest_meta(checkpoints):
            check_meta(checkpoints, meta)
        # A run without evaluations has the fingerprint of no problems.
        columns = columns_read(readers, [problem.columns for problem in problems])
        if run["environment"]["function"]:  # It gets whole rows.
            columns = {name for problem in problems for name in problem.columns}
        digest = digest_of_problems(problems, columns)
        if meta and run["eval"]["every"] and meta["problems"].get("eval") != digest:
            raise UserError(
                f"the problems that {folder} held out have changed since, so that it may have "
                "trained on some of them; restore them, or pass them as a file: "
                f"--data={RUN}=FILE.jsonl"
            )
    return problems


def _run_settings(run: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of tasks that a run decides."""
    scorers = run_scorers(run)
    if learns_from_text(run):
        del scorers["scorer"]  # It has none; the answers of a file decide.
    return {
        "prompt": prompt_config(run["data"]),
        "max_new_tokens": str(run["eval"]["max_new_tokens"]),
        "stop": tuple(run["rollout"]["stop"]),
        "kv_cache_dtype": run["rollout"]["kv_cache_dtype"],
        **scorers,
    }


# --- The answer of a completion -------------------------------------------------------------------


def extracted_answer(completion: str, scorer: str, prompt: str = "") -> str | None:
    r"""Extracts the answer of a completion, which is saved with its scores and counts as its vote.

    The answer is extracted in the way of the built-in scorers, from what follows the reasoning. Any
    other scorer is assumed to read the marked answer, `\boxed{}` or `<answer>`, or else the last
    line. Numbers are normalized: `1,000.0` becomes `1000`. Other answers lose spaces, dollar signs
    and a final period.

    Returns:
        The answer, or None if no answer is found. (A completion without a mark may still be
        correct, because `math_answer` lets math-verify read its end.)
    """
    completion = answer_part(prompt, completion)
    marked = last_marked(completion)
    match scorer.removeprefix("qerl_jax.rewards.functions:"):
        case "numeric_answer":
            return _digits(completion_number(completion))
        case "boxed_answer":
            return _digits(marked_number(last_boxed(completion) or ""))
        case "tagged_answer":
            return _digits(marked_number(last_tagged(completion) or ""))
        case "exact_answer":
            return (completion if marked is None else marked).strip() or None
        case "whole_answer":
            return completion.strip() or None
        case "math_answer":
            answer = marked or ""
        case _:
            answer = completion.strip().rpartition("\n")[2] if marked is None else marked
    if functions.number_only_format("", answer, "", 0, True):
        return _digits(marked_number(answer))
    return "".join(answer.replace("$", "").split()).removesuffix(".") or None


def same_answer(scorer: str) -> Callable[[str, str], bool]:
    r"""Returns a function that tells whether two extracted answers are equal, as a scorer judges.

    Numbers and formulas are compared by the built-in scorers: `\frac12` equals `0.5` for
    `math_answer`. For any other scorer equal answers are equal texts.
    """
    reward = _COMPARING.get(scorer)
    if reward is None:
        return operator.eq

    def same(answer: str, other: str) -> bool:
        try:
            # `math_answer` reads it as a whole, the others the number in it.
            text = f"<answer>\\boxed{{{answer}}}</answer>"
            return answer == other or reward("", text, other, 0, True) > 0.5
        except (ValueError, TimeoutError):  # One of the two cannot be read, or takes too long.
            return False

    return same


def _digits(number: Decimal | None) -> str | None:
    # `Decimal.normalize` would round a long number.
    if number is None:
        return None
    text = f"{number:f}"
    return text.rstrip("0").removesuffix(".") if "." in text else text
