"""Problems: their sources, the order in which they are trained on, and how a prompt is written.

A source is a local JSONL file, `reasoning_gym:TASK` (generated, needs no network), or a dataset on
the Hugging Face hub (`openai/gsm8k`, or `owner/name:configuration`).
"""

import dataclasses
import itertools
import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from absl import logging

from qerl_jax.errors import UserError, first_line
from qerl_jax.rl.rewards import last_boxed
from qerl_jax.weights.tokenizer import Tokenizer

_GENERATED = "reasoning_gym:"
_QUESTION_FIELDS = ("question", "problem", "prompt")
_ANSWER_FIELDS = ("answer", "solution")
_HUB_CONFIGURATIONS = {"openai/gsm8k": "main"}  # for datasets without a default on the hub


@dataclasses.dataclass(frozen=True)
class Problem:
    """A question and its short reference answer (`72`, not the solution that leads to it)."""

    question: str
    answer: str


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A problem as the model reads it: the rendered chat and its token ids."""

    problem: Problem
    text: str
    ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Cursor:
    """The position of the next training problem; `dataclasses.asdict` makes it storable in JSON."""

    epoch: int = 0
    index: int = 0


def load_problems(
    source: str,
    *,
    path: str = "",
    eval_source: str = "",
    eval_path: str = "",
    split: Literal["train", "eval"] = "train",
    eval_size: int = 0,
    levels: Sequence[int] = (),
    max_question_chars: int = 0,
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
    size: int = 10_000,
) -> list[Problem]:
    """Loads the training or the evaluation problems; no question is in both.

    The evaluation problems come from the first of these places that is given or exists:

    * `eval_path`: its first problems;
    * `eval_source`: the first problems of its test split;
    * `source`, if it is a hub dataset with a test split: the first problems of that split;
    * the training problems: the last problems of a file or train split, or the first generated
      problems, which are then not trained on.

    The same arguments give the same problems in the same order.

    Args:
        source: `reasoning_gym:TASK` or a hub id; not used if `path` is set.
        path: path of a JSONL file of training problems. Each line is an object with `question` and
            `answer` (or `problem` and `solution`). A worked answer ends in `#### NUMBER`, as in
            GSM8K.
        eval_source: hub id of a dataset with evaluation problems.
        eval_path: path of a JSONL file of evaluation problems.
        split: 'train' or 'eval', the problems to return.
        eval_size: largest number of evaluation problems.
        levels: difficulties to train on, compared with the field `level` (`3` or `Level 3`); ()
            selects all.
        max_question_chars: largest length of a training question; 0 means no limit.
        options: options of the reasoning_gym task.
        seed: seed of the generated problems.
        size: number of distinct training problems to generate; a task with fewer problems gives
            fewer.

    Raises:
        UserError: the source is unknown, unreachable, malformed, or holds no problem for the split.
    """
    separate = None  # evaluation problems that do not come from the training source
    if eval_size and (eval_path or eval_source):
        where = eval_path or eval_source
        found = _read_jsonl(eval_path) if eval_path else _load_hub_test(eval_source, eval_size)
        separate = _nonempty(found[:eval_size], f"{where}: no evaluation problems")
        if split == "eval":
            return separate
    held_out_size = 0 if separate else eval_size
    keep = _Filter(levels=frozenset(levels), max_question_chars=max_question_chars)
    if path:
        where = path
        train, evaluation = _hold_out_last(_read_jsonl(path, keep), held_out_size)
    elif source.startswith(_GENERATED):
        where = source
        if keep.levels:
            raise UserError(
                f"{source}: data.levels={sorted(keep.levels)}, but generated problems have no level"
            )
        problems = _generate(source, options or {}, seed=seed, size=size + held_out_size)
        train, evaluation = problems[held_out_size:], problems[:held_out_size]
        train = [problem for problem in train if keep.length(problem)]
    else:
        where = source
        train, evaluation = _load_hub(source, held_out_size, keep)
    if separate:
        train = _without(train, separate)
    message = (
        f"{where}: no problems for {split} (eval_size={eval_size}, levels={tuple(levels)}, "
        f"max_question_chars={max_question_chars}): give more, filter less or hold out fewer"
    )
    return _nonempty(train if split == "train" else evaluation, message)


@dataclasses.dataclass(frozen=True)
class _Filter:
    """Selects the problems to train on by the options of `load_problems`."""

    levels: frozenset[int] = frozenset()
    max_question_chars: int = 0

    def level(self, row: Mapping[str, Any], where: str) -> bool:
        """Tells whether the difficulty of a row is among the levels."""
        if not self.levels:
            return True
        found = re.fullmatch(r"(?:Level )?([0-9]+)", str(row.get("level")))
        if found is None:
            raise UserError(
                f"{where}: data.levels={sorted(self.levels)}, but the level of this problem is "
                f"{row.get('level')!r}: a number or 'Level NUMBER' is needed"
            )
        return int(found[1]) in self.levels

    def length(self, problem: Problem) -> bool:
        """Tells whether a question is short enough."""
        return not 0 < self.max_question_chars < len(problem.question)


def _nonempty[T](problems: list[T], message: str) -> list[T]:
    if not problems:
        raise UserError(message)
    return problems


def _without(problems: Iterable[Problem], others: Iterable[Problem]) -> list[Problem]:
    questions = {problem.question for problem in others}
    return [problem for problem in problems if problem.question not in questions]


def _hold_out_last(problems: list[Problem], size: int) -> tuple[list[Problem], list[Problem]]:
    cut = max(len(problems) - size, 0)
    return _without(problems[:cut], problems[cut:]), problems[cut:]


# --- Local files ----------------------------------------------------------------------------------


def _read_jsonl(path: str, keep: _Filter = _Filter()) -> list[Problem]:
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{path}: cannot read the problems: {error.strerror}") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: not a JSON object in UTF-8: {error}") from error
        if not isinstance(row, dict):
            raise UserError(f"{where}: a JSON object is needed, not {type(row).__name__}")
        rows.append((where, row))
    _nonempty(rows, f"{path}: no problems: the file is empty")
    return _problems(rows, keep)


def _problems(rows: Iterable[tuple[str, Any]], keep: _Filter) -> list[Problem]:
    """Reads pairs of a place and a row; leaves out rows with an empty answer, with one warning."""
    problems, unanswered = [], []
    for where, row in rows:
        problem = _problem(row, where)
        if not (keep.level(row, where) and keep.length(problem)):
            continue
        if problem.answer:
            problems.append(problem)
        else:
            unanswered.append(where)
    if unanswered:
        logging.warning(
            "Left out %d problems with an empty answer; the first: %s.",
            len(unanswered),
            unanswered[0],
        )
    return problems


def _problem(row: Mapping[str, Any], where: str) -> Problem:
    question = _field(row, _QUESTION_FIELDS, where)
    if not question.strip():
        raise UserError(f"{where}: the question is empty")
    answer = _field(row, _ANSWER_FIELDS, where)
    if "####" in answer:
        answer = answer.rpartition("####")[2].replace(",", "")
    elif "answer" not in row:
        answer = last_boxed(answer) or answer
    return Problem(question, answer.strip())


def _field(row: Mapping[str, Any], names: Sequence[str], where: str) -> str:
    name = next((name for name in names if name in row), None)
    if name is None:
        raise UserError(
            f"{where}: no field {' or '.join(names)}; it has {', '.join(row) or 'none'}"
        )
    value = row[name]
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise UserError(f"{where}: {name} must be a string, not {value!r:.50}")
    return value


# --- Generated problems ---------------------------------------------------------------------------


def _generate(source: str, options: Mapping[str, Any], *, seed: int, size: int) -> list[Problem]:
    """Returns up to `size` problems with different questions, in the order of their generation."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of packages that reasoning_gym imports
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

    task = source.removeprefix(_GENERATED)
    if task not in DATASETS:
        raise UserError(f"{source}: no such task; there are {', '.join(sorted(DATASETS))}")
    fields = {field.name for field in dataclasses.fields(DATASETS[task][1])} - {"seed", "size"}
    for name in options:
        if name not in fields:
            raise UserError(f"{source}: no option {name!r}; it has {', '.join(sorted(fields))}")
    draws = 4 * size  # enough to draw nearly every question of a task that has few
    try:
        entries = reasoning_gym.create_dataset(task, **options, seed=seed, size=draws)
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(f"{source}: options {dict(options)}: {error}") from error
    answers: dict[str, str] = {}
    for index in range(draws):
        entry = entries[index]
        if not isinstance(entry["answer"], str):
            raise UserError(f"{source}: its problems have no single answer to compare with")
        answers.setdefault(entry["question"], entry["answer"])
        if len(answers) == size:
            break
    return list(itertools.starmap(Problem, answers.items()))


# --- The hub --------------------------------------------------------------------------------------


def _load_hub(source: str, eval_size: int, keep: _Filter) -> tuple[list[Problem], list[Problem]]:
    splits = _hub_splits(source, "data.path")
    if "train" not in splits:
        raise UserError(f"{source}: no split 'train'; it has {', '.join(map(str, splits))}")
    train = _rows(splits["train"], f"{source}[train]", keep)
    if "test" not in splits:
        return _hold_out_last(train, eval_size)
    evaluation = _rows(itertools.islice(splits["test"], eval_size), f"{source}[test]")
    return _without(train, evaluation), evaluation


def _load_hub_test(source: str, size: int) -> list[Problem]:
    splits = _hub_splits(source, "data.eval_path")
    if "test" not in splits:
        raise UserError(f"{source}: no split 'test'; it has {', '.join(map(str, splits))}")
    return _rows(itertools.islice(splits["test"], size), f"{source}[test]")


def _hub_splits(source: str, local_field: str) -> Any:
    """Loads the splits of a dataset on the hub, by name.

    Error messages advise to set the config field `local_field` to a local file instead.
    """
    import datasets

    name, _, configuration = source.partition(":")
    try:
        return datasets.load_dataset(name, configuration or _HUB_CONFIGURATIONS.get(name))
    except Exception as error:
        reason = first_line(error) or type(error).__name__
        raise UserError(
            f"{source}: cannot load it from the Hugging Face hub ({reason}); pass a "
            f"local copy of the same fields, --config.{local_field}=FILE.jsonl, or train on "
            "generated problems, --config.data.source=reasoning_gym:gsm_symbolic"
        ) from error


def _rows(rows: Iterable[Any], where: str, keep: _Filter = _Filter()) -> list[Problem]:
    return _problems(((f"{where}:{number}", row) for number, row in enumerate(rows, 1)), keep)


# --- The order of training ------------------------------------------------------------------------


def next_problems[T](
    problems: Sequence[T], cursor: Cursor, n: int, *, seed: int
) -> tuple[list[T], Cursor]:
    """Takes the next n problems: every epoch is a new permutation, and no problem is left out.

    Args:
        problems: the training problems (or prompts).
        cursor: the position at which the last call ended.
        n: number of problems to take; they may reach into the next epoch or over several epochs.
        seed: seed of the permutations; each one depends only on (seed, epoch).

    Returns:
        The problems, and the cursor for the next call.

    Raises:
        UserError: the cursor lies past the end of the problems, or there are no problems.
    """
    epoch, index = cursor.epoch, cursor.index
    if not problems or index >= len(problems):
        raise UserError(
            f"the data cursor is at problem {index} of {len(problems)}: "
            "the training data is not what the run began with"
        )
    taken: list[T] = []
    while len(taken) < n:
        order = np.random.default_rng((seed, epoch)).permutation(len(problems))
        part = order[index : index + n - len(taken)]
        taken += [problems[i] for i in part]
        index += len(part)
        if index == len(problems):
            epoch, index = epoch + 1, 0
    return taken, Cursor(epoch, index)


# --- Prompts --------------------------------------------------------------------------------------


def render_prompt(
    problem: Problem,
    tokenizer: Tokenizer,
    *,
    system_prompt: str = "",
    question_suffix: str = "",
) -> str:
    """Writes a problem as a chat that waits for the assistant.

    Args:
        problem: the problem.
        tokenizer: tokenizer with the chat template.
        system_prompt: the system message; with '' the template decides.
        question_suffix: text that is appended to the question without a space in between.

    Raises:
        UserError: the tokenizer has no chat template, or the template rejects the messages.
    """
    messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
    messages.append({"role": "user", "content": problem.question + question_suffix})
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    tokenizer.check_kept(messages, text)
    return text


def encode_prompts(
    problems: Sequence[Problem],
    tokenizer: Tokenizer,
    *,
    system_prompt: str = "",
    question_suffix: str = "",
    max_prompt_tokens: int,
    remedy: str = "instead of data.max_prompt_tokens={limit} pass "
    "--config.data.max_prompt_tokens={longest}",
) -> list[Prompt]:
    """Renders and tokenizes problems.

    Args:
        problems: the problems to render.
        tokenizer: tokenizer with the chat template.
        system_prompt: the system message; with '' the template decides.
        question_suffix: text that is appended to every question without a space in between.
        max_prompt_tokens: largest number of tokens in a prompt.
        remedy: advice for the error message; {limit} and {longest} are replaced by the number of
            tokens allowed and the number of tokens in the longest prompt.

    Raises:
        UserError: a prompt is longer than the limit.
    """
    prompts = []
    for problem in problems:
        text = render_prompt(
            problem, tokenizer, system_prompt=system_prompt, question_suffix=question_suffix
        )
        prompts.append(Prompt(problem, text, tuple(tokenizer.encode(text))))
    lengths = [len(prompt.ids) for prompt in prompts]
    over = sum(length > max_prompt_tokens for length in lengths)
    if over:
        advice = remedy.format(limit=max_prompt_tokens, longest=max(lengths))
        raise UserError(
            f"{over} of {len(prompts)} prompts are over {max_prompt_tokens} tokens, the longest "
            f"has {max(lengths)}; {advice}, or take them out"
        )
    return prompts
