"""Where problems come from: JSONL files, datasets on the Hugging Face hub, and generators."""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from qerl_jax import hub
from qerl_jax.errors import UserError, check_unicode, first_line
from qerl_jax.paths import user_path
from qerl_jax.rl.answers import last_boxed
from qerl_jax.rl.references import can_read, is_prose, needs_answer
from qerl_jax.rl.rewards import Reward, math_answer, number_only_format

GENERATED = "reasoning_gym:"
_QUESTION_FIELDS = ("question", "problem", "prompt")
_ANSWER_FIELDS = ("answer", "solution")
_HUB_CONFIGURATIONS = {"openai/gsm8k": "main"}  # for datasets without a default on the hub


@dataclasses.dataclass(frozen=True)
class Problem:
    """A question and its short reference answer (`72`, not the solution that leads to it)."""

    question: str
    answer: str


class _LeftOutError(Exception):
    """The reason why a row is left out, as in 'left out 2 problems with REASON'."""


@dataclasses.dataclass(frozen=True)
class Selection:
    """Which problems of a source are kept.

    Attributes:
        rewards: functions that score completions of the problems. A problem is left out if one of
            them needs its answer and cannot read it. None stands for `math_answer`.
        levels: difficulties to keep, compared with the field `level`; an empty set keeps all.
        max_question_chars: largest length of a question; 0 means no limit.
    """

    rewards: Sequence[Reward] | None = None
    levels: frozenset[int] = frozenset()
    max_question_chars: int = 0

    @functools.cached_property
    def scorers(self) -> list[Reward]:
        """The rewards that need an answer."""
        if self.rewards is None:
            return [math_answer]
        return [reward for reward in self.rewards if needs_answer(reward)]

    def read(self, row: Mapping[str, Any], where: str) -> Problem:
        """Reads a row of a file or of a dataset.

        Raises:
            UserError: the row is malformed.
            _LeftOutError: the problem is not kept.
        """
        question = _field(row, _QUESTION_FIELDS, where)
        if not question.strip():
            raise UserError(f"{where}: the question is empty")
        needed = bool(self.scorers)
        answer = _field(row, _ANSWER_FIELDS, where, default=None if needed else "")
        self._check_level(row, where)
        return self.keep(Problem(question, _short_answer(answer, "answer" not in row, needed)))

    def keep(self, problem: Problem) -> Problem:
        """Returns a problem that is kept; raises a _LeftOutError for any other."""
        if 0 < self.max_question_chars < len(problem.question):
            raise _LeftOutError(f"a question over {self.max_question_chars} characters")
        if not problem.answer and self.scorers:
            raise _LeftOutError("an empty answer")
        for scorer in self.scorers:
            if not can_read(scorer, problem.answer):
                raise _LeftOutError(f"an answer that {scorer.__name__} cannot read")
        return problem

    def _check_level(self, row: Mapping[str, Any], where: str) -> None:
        if not self.levels:
            return
        found = re.fullmatch(r"(?:Level )?([0-9]+)", str(row.get("level")))
        if found is None:
            raise UserError(
                f"{where}: data.levels={sorted(self.levels)}, but the level of this problem is "
                f"{row.get('level')!r}: a number or 'Level NUMBER' is needed"
            )
        if int(found[1]) not in self.levels:
            raise _LeftOutError(f"a level other than {', '.join(map(str, sorted(self.levels)))}")


def _short_answer(text: str, solution: bool, needed: bool) -> str:
    r"""Returns the short answer of a row.

    An answer whose last line is `#### NUMBER`, the form of GSM8K, is that number. A solution is
    otherwise the content of its last box. Any other text is the answer as it stands.

    Args:
        text: text of the field `answer` or `solution`.
        solution: whether the text is a solution, which leads to an answer.
        needed: whether the answer is needed; if not, a solution may lack it.
    """
    text = text.strip()
    last_line = text.rpartition("\n")[2].strip()
    number = last_line.removeprefix("####").strip()
    if last_line != number and number_only_format("", number, "", 0, True):
        return number.replace(",", "")
    if not solution:
        return text
    boxed = last_boxed(text)
    if boxed is None and needed and is_prose(text):
        raise _LeftOutError(
            r"a solution that marks no answer by \boxed{} or a last line '#### NUMBER'"
        )
    return (text if boxed is None else boxed).strip()


def _field(
    row: Mapping[str, Any], names: Sequence[str], where: str, *, default: str | None = None
) -> str:
    name = next((name for name in names if name in row), None)
    if name is None and default is not None:
        return default
    if name is None:
        raise UserError(
            f"{where}: no field {' or '.join(names)}; it has {', '.join(row) or 'none'}"
        )
    value = row[name]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and (isinstance(value, int) or math.isfinite(value)):
        value = str(value)
    if not isinstance(value, str):
        raise UserError(
            f"{where}: {name} must be a string, not {value!r:.50}: write a string or a finite "
            "number"
        )
    check_unicode(value, f"{where}: {name}")
    return value


def _select(rows: Iterable[tuple[str, Mapping[str, Any]]], selection: Selection) -> list[Problem]:
    """Reads pairs of a place and a row; prints how many are left out, and why."""
    problems: list[Problem] = []
    left_out: dict[str, list[str]] = {}  # reason -> places
    for where, row in rows:
        try:
            problems.append(selection.read(row, where))
        except _LeftOutError as reason:
            left_out.setdefault(str(reason), []).append(where)
    for reason, places in left_out.items():
        print_left_out(len(places), f"with {reason}; the first: {places[0]}")
    return problems


def print_left_out(count: int, what: str) -> None:
    """Prints how many problems are left out."""
    print(f"left out {count} problem{'s' * (count != 1)} {what}", flush=True)


# --- Local files ----------------------------------------------------------------------------------


def read_jsonl_problems(path: str, selection: Selection) -> list[Problem]:
    """Reads the problems of a JSONL file.

    Raises:
        UserError: the file cannot be read, is empty, or holds a malformed line.
    """
    try:
        lines = user_path(path).read_bytes().splitlines()
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
    if not rows:
        raise UserError(f"{path}: no problems: the file is empty")
    return _select(rows, selection)


# --- Generated problems ---------------------------------------------------------------------------


def generate_problems(
    source: str, options: Mapping[str, Any], *, seed: int, size: int
) -> list[Problem]:
    """Returns up to `size` problems with different questions, in the order of their generation.

    Raises:
        UserError: the task does not exist, refuses the options, or has no single answers.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of packages that reasoning_gym imports
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

    task = source.removeprefix(GENERATED)
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


def select_generated(source: str, problems: Iterable[Problem], selection: Selection) -> list:
    """Returns the generated problems that are kept; prints how many are left out, and why."""
    rows = ((f"{source}:{n}", dataclasses.asdict(p)) for n, p in enumerate(problems, 1))
    return _select(rows, selection)


# --- The hub --------------------------------------------------------------------------------------


def load_hub_splits(source: str, local_field: str, *needed: str) -> Any:
    """Loads the splits of a dataset on the hub, by name.

    Args:
        source: `owner/name` or `owner/name:configuration`.
        local_field: config field that takes a local file instead, for the error message.
        needed: names of the splits that the dataset must have.

    Raises:
        UserError: the dataset cannot be loaded, or lacks a split.
    """
    import datasets

    name, _, configuration = source.partition(":")
    if user_path(name).exists():
        name = str(user_path(name))
        asking: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    elif mistake := hub.local_mistake(name):
        raise UserError(
            f"{source}: {mistake}; pass a file as --config.{local_field}=FILE.jsonl, or the hub id "
            "of a dataset"
        )
    else:
        asking = hub.asking(name)
    try:
        with asking:
            splits = datasets.load_dataset(name, configuration or _HUB_CONFIGURATIONS.get(name))
    except Exception as error:
        reason = first_line(error) or type(error).__name__
        raise UserError(
            f"{source}: cannot load it from the Hugging Face hub ({reason}); pass a "
            f"local copy of the same fields, --config.{local_field}=FILE.jsonl, or train on "
            "generated problems, --config.data.source=reasoning_gym:gsm_symbolic"
        ) from error
    for split in needed:
        if split not in splits:
            raise UserError(f"{source}: no split {split!r}; it has {', '.join(map(str, splits))}")
    return splits


def read_rows(rows: Iterable[Any], where: str, selection: Selection) -> list[Problem]:
    """Reads the rows of a split of a dataset.

    Raises:
        UserError: a row is malformed.
    """
    return _select(((f"{where}:{number}", row) for number, row in enumerate(rows, 1)), selection)


def questions_of(rows: Iterable[Mapping[str, Any]]) -> set[str]:
    """Returns the questions of a split whose rows may lack answers."""
    found = (next((row[name] for name in _QUESTION_FIELDS if name in row), None) for row in rows)
    return {question for question in found if isinstance(question, str)}
