r"""What a policy is asked in an evaluation: problems, the prompt around them, and who judges.

A task is named after a benchmark of the table below, a JSONL file, or `run`: the problems that a
run held out. A benchmark comes from the Hugging Face hub, or from a local copy of its fields.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qerl_jax.data import Problem, load_problems
from qerl_jax.errors import UserError, first_line
from qerl_jax.rl import rewards
from qerl_jax.rl.rewards import last_boxed, last_marked, last_number, last_tagged

SYSTEM_PROMPT = r"Please reason step by step, and put your final answer within \boxed{}."
RUN = "run"

_NUMBER = "qerl_jax.rl.rewards:numeric_answer"
_MATH = "qerl_jax.rl.rewards:math_answer"
_BOXED = "qerl_jax.rl.rewards:boxed_format"
_NEW_TOKENS = 1024  # of files
_ALL = 10**9


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A published test set: the split `test` of a dataset on the hub.

    Attributes:
        hub: its id.
        fields: where the question and the answer are, for whoever makes a local copy.
        judge: the reward that says whether a completion is correct.
        max_new_tokens: the longest completion, unless another is asked for.
    """

    hub: str
    fields: tuple[str, str]
    judge: str
    max_new_tokens: int


# GSM8K's answer ends in `#### NUMBER`, the solution of math-ai/aime24 is \boxed{NUMBER}.
BENCHMARKS = {
    "gsm8k": Benchmark("openai/gsm8k", ("question", "answer"), _NUMBER, 1024),
    "math500": Benchmark("HuggingFaceH4/MATH-500", ("problem", "answer"), _MATH, 4096),
    "aime24": Benchmark("math-ai/aime24", ("problem", "solution"), _MATH, 4096),
    "aime25": Benchmark("math-ai/aime25", ("problem", "answer"), _MATH, 4096),
    "amc23": Benchmark("math-ai/amc23", ("question", "answer"), _MATH, 4096),
}


@dataclasses.dataclass(frozen=True)
class Task:
    """Problems, and how a policy is asked and judged.

    Attributes:
        name: of the task, and of its file of completions.
        source: where the problems come from.
        problems: all of them.
        system_prompt: the system message; '' leaves it to the chat template.
        question_suffix: put behind every question.
        judge: import path of the reward that says whether a completion is correct.
        format_judge: import path of the one that says whether it has the right form, or ''.
        max_new_tokens: the longest completion.
    """

    name: str
    source: str
    problems: list[Problem]
    system_prompt: str
    question_suffix: str
    judge: str
    format_judge: str
    max_new_tokens: int

    @property
    def fingerprint(self) -> str:
        """sha256 over all questions and answers."""
        text = json.dumps([dataclasses.astuple(problem) for problem in self.problems])
        return hashlib.sha256(text.encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class Overrides:
    """What replaces a task's own settings: VALUE for all tasks, or TASK=VALUE for one.

    Attributes:
        data: TASK=FILE.jsonl only, a local file instead of the hub's data.
        system_prompt: see `Task`.
        question_suffix: see `Task`.
        judge: see `Task`.
        format_judge: see `Task`.
        max_new_tokens: see `Task`.
    """

    data: Sequence[str] = ()
    system_prompt: Sequence[str] = ()
    question_suffix: Sequence[str] = ()
    judge: Sequence[str] = ()
    format_judge: Sequence[str] = ()
    max_new_tokens: Sequence[str] = ()


def make_tasks(
    names: Sequence[str], *, run: Mapping[str, Any] | None, overrides: Overrides
) -> list[Task]:
    """Loads the problems of tasks and settles how they are asked and judged.

    A benchmark has its own judge, so that every policy is judged alike. A file and `run` have the
    run's, where there is one; else a file is judged by number where all its answers are numbers,
    and by math-verify where they are not. System prompt, suffix and the judge of the format are the
    run's, where there is one; else `SYSTEM_PROMPT`, none, and whether there is a box.

    Args:
        names: of `BENCHMARKS`, files that end in .jsonl, or 'run'; none is the run's own problems,
            or GSM8K.
        run: the config of the run that the policy comes from, or None.
        overrides: what to do otherwise.

    Raises:
        UserError: there is no such task, or its problems cannot be loaded.
    """
    names = names or ([RUN] if run is not None else ["gsm8k"])
    files = {Path(name).stem: name for name in names if name.endswith(".jsonl")}
    short = [Path(name).stem if name.endswith(".jsonl") else name for name in names]
    for name in short:
        if short.count(name) > 1:
            raise UserError(f"--tasks={','.join(names)}: {name} is there twice; rename a file")
        if name not in files and name not in (*BENCHMARKS, RUN):
            raise UserError(
                f"--tasks={name}: no such task; there are {', '.join(BENCHMARKS)}, {RUN} (what a "
                "run held out), and local files FILE.jsonl"
            )
    chosen = {
        field.name: _by_task(f"--{field.name.replace('_', '-')}", given, short)
        for field in dataclasses.fields(overrides)
        if (given := getattr(overrides, field.name))
    }
    files |= chosen.pop("data", {})
    return [
        _make_task(
            name,
            files.get(name),
            run,
            {field: by[name] for field, by in chosen.items() if name in by},
        )
        for name in short
    ]


def _by_task(flag: str, given: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Splits [TASK=]VALUE; what names a task wins over what does not."""
    common, own = {}, {}
    for text in given:
        name, equals, value = text.partition("=")
        if equals and name in names:
            own[name] = value
        elif flag == "--data":
            raise UserError(
                f"--data={text}: write it as TASK=FILE.jsonl, TASK one of {', '.join(names)}"
            )
        else:
            common = dict.fromkeys(names, text)
    return common | own


def _make_task(
    name: str, file: str | None, run: Mapping[str, Any] | None, chosen: Mapping[str, str]
) -> Task:
    benchmark = BENCHMARKS.get(name)
    if file is not None:
        source, problems = file, load_problems("", eval_path=file, split="eval", eval_size=_ALL)
    elif benchmark is not None:
        source, problems = benchmark.hub, _load_hub(name, benchmark)
    else:
        source, problems = RUN, _held_out(run)
    settings = {
        "system_prompt": SYSTEM_PROMPT,
        "question_suffix": "",
        "judge": _NUMBER if _all_numbers(problems) else _MATH,
        "format_judge": _BOXED,
        "max_new_tokens": str(benchmark.max_new_tokens if benchmark else _NEW_TOKENS),
    }
    if run is not None:
        settings |= _run_settings(run)
    if benchmark is not None:
        settings["judge"] = benchmark.judge
    settings |= chosen
    if not settings["judge"]:
        raise UserError(f"{name}: nothing judges it, pass --judge=MODULE:FUNCTION")
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


def _all_numbers(problems: Sequence[Problem]) -> bool:
    return all(rewards.number_only_format("", p.answer, "", 0, True) for p in problems)


def _load_hub(name: str, benchmark: Benchmark) -> list[Problem]:
    try:
        return load_problems("", eval_source=benchmark.hub, split="eval", eval_size=_ALL)
    except UserError as error:
        reason = first_line(error.__cause__ or error)
        raise UserError(
            f"{benchmark.hub}: cannot load it from the Hugging Face hub ({reason}); pass a local "
            f"copy, an object with {' and '.join(benchmark.fields)} a line: "
            f"--data={name}=FILE.jsonl"
        ) from error


def _held_out(run: Mapping[str, Any] | None) -> list[Problem]:
    """The evaluation problems of a run, as its training had them."""
    if run is None:
        raise UserError(
            f"--tasks={RUN}: the policy is not a run folder, so it held out no problems"
        )
    data, size = run["data"], run["eval"]["problems"]
    if not run["eval"]["every"] and not data["eval_path"] and not data.get("eval_source"):
        raise UserError(
            "the run held out no problems (eval.every=0); pass a benchmark or a file with --tasks"
        )
    try:
        return load_problems(
            data["source"],
            path=data["path"],
            eval_source=data.get("eval_source", ""),
            eval_path=data["eval_path"],
            split="eval",
            eval_size=size,
            levels=data.get("levels", ()),
            max_question_chars=data.get("max_question_chars", 0),
            options=data["options"],
        )
    except UserError as error:
        raise UserError(
            f"the problems that the run held out cannot be loaded ({first_line(error)}); pass a "
            f"copy of them: --data={RUN}=FILE.jsonl"
        ) from error


def _run_settings(run: Mapping[str, Any]) -> dict[str, str]:
    """How a run asks and judges."""
    functions = {name: reward["function"] for name, reward in run["rewards"].items()}
    return {
        "system_prompt": run["data"]["system_prompt"],
        "question_suffix": run["data"]["question_suffix"],
        "judge": functions.get("correctness", ""),
        "format_judge": functions.get("format", ""),
        "max_new_tokens": str(run["eval"]["max_new_tokens"]),
    }


# --- The answer of a completion -------------------------------------------------------------------


def extracted_answer(completion: str, judge: str) -> str | None:
    r"""What a completion's answer is taken to be: shown beside the verdict, and what votes.

    It is looked for where the built-in judges look for it; any other judge is taken to read the
    marked answer, `\boxed{}` or `<answer>`, or else the last line. Numbers are written alike
    (`1,000.0` is `1000`), other answers lose spaces, dollar signs and a final full stop.

    Args:
        completion: the text.
        judge: import path of the reward that judges it.

    Returns:
        None where there is none. (Of a completion without a mark math-verify reads the end by
        itself: it may be correct all the same.)
    """
    marked = last_marked(completion)
    match judge.removeprefix("qerl_jax.rl.rewards:"):
        case "numeric_answer":
            if marked is None and "####" in completion:
                marked = completion.rpartition("####")[2].strip().partition("\n")[0]
            return _number(completion if marked is None else marked)
        case "boxed_answer":
            return _number(last_boxed(completion) or "")
        case "tagged_answer":
            return _number(last_tagged(completion) or "")
        case "exact_answer":
            return (completion if marked is None else marked).strip()
        case "math_answer":
            found = marked or ""
        case _:
            found = completion.strip().rpartition("\n")[2] if marked is None else marked
    if rewards.number_only_format("", found, "", 0, True):
        return _number(found)
    return "".join(found.replace("$", "").split()).removesuffix(".") or None


def _number(text: str) -> str | None:
    number = last_number(text)
    return None if number is None else f"{number.normalize():f}"
