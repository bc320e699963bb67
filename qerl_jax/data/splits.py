"""Problems: which are trained on and which are held out.

A source is a local file or folder, `reasoning_gym:TASK` or `qerl_jax:sums` (generated, needs no
network), or a dataset on the Hugging Face hub (`openai/gsm8k`, or `owner/name:configuration`).
"""

import dataclasses
import datetime
import decimal
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from qerl_jax.config.fields import GENERATED, HELD_OUT, evaluates_separately
from qerl_jax.data import sources as problem_sources
from qerl_jax.data.mixture import MixtureSource, divide
from qerl_jax.data.prompts import Problem
from qerl_jax.data.sources import Selection
from qerl_jax.errors import UserError
from qerl_jax.rewards.functions import Reward

MOST_HELD_OUT = 256  # largest number of evaluation problems where no number is given
_IS_HELD_OUT = "held out for evaluation"
_LARGEST_PART = 10  # At most a tenth of the training problems is held out where no number is given.


@dataclasses.dataclass(frozen=True)
class ProblemConfig:
    r"""Where training and evaluation problems come from, and which of them are kept.

    A question that several rows have is one evaluation problem. The evaluation problems come from
    the first of these sources that is given or exists:

    * `eval_path`: its first problems;
    * `eval_source`, if it is a hub id: the first problems of its test split;
    * `source`, if it is a hub dataset with a test split and `eval_source` is not 'held_out': the
      first problems of that split;
    * the training problems: the last problems of a file or train split, or the first generated
      problems, which are then not trained on. Questions of a hub dataset's test split are not
      trained on either.
    """

    source: str = ""  # `reasoning_gym:TASK`, `qerl_jax:sums` or a hub id; not used if `path` is set
    # Path of a file or folder of training problems, as in `problem_sources.read_problems`. Each row
    # has `question` (or `problem`, `prompt`) and `answer` (or `solution`). A question is a text or
    # a list of chat messages. An answer whose last line is `#### NUMBER`, as in GSM8K, is that
    # number; a solution marks its answer in this way or by `\boxed{}`.
    path: str = ""
    train_split: str = "train"  # split of the dataset on the hub, or of the folder, to train on
    eval_source: str = ""  # hub id of a dataset with evaluation problems, 'held_out', or ''
    eval_path: str = ""  # path of a file or folder of evaluation problems
    # Largest number of evaluation problems. None takes at most `eval_most`, and at most a tenth of
    # the training problems if they are held out (of fewer than ten, one).
    eval_size: int | None = 0
    # Largest number of evaluation problems where `eval_size` is None.
    eval_most: int = MOST_HELD_OUT
    # Whether it is a source of a mixture, with its share of the evaluation problems.
    is_part: bool = False
    # Functions that score completions of the problems, as in `Selection`.
    rewards: Sequence[Reward] | None = None
    # Difficulties to train on, compared with the field `level` (`3` or `Level 3`); () selects all.
    levels: Sequence[int] = ()
    max_question_chars: int = 0  # largest length of a training question; 0 means no limit
    # Names of the fields `question`, `answer` and `level`, as in `Selection`.
    fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
    reads: Callable[..., Selection] = Selection  # what reads a row
    # What reads a row of the evaluation problems that are not held out.
    reads_evaluation: Callable[..., Selection] = Selection
    # Options of the generated task.
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    seed: int = 0  # seed of the generated problems
    # Number of distinct training problems to generate; a task with fewer problems gives fewer.
    size: int = 10_000

    @functools.cached_property
    def training(self) -> Selection:
        """The selection of training problems."""
        levels = frozenset(self.levels)
        return self.reads(self.rewards, levels, self.max_question_chars, self.fields)

    @functools.cached_property
    def evaluation(self) -> Selection:
        """The selection of evaluation problems that are not held out."""
        return self.reads_evaluation(self.rewards, fields=self.fields)

    def separate_evaluation(self) -> list[Problem]:
        """Returns the evaluation problems that have a source of their own; [] without one."""
        separate = evaluates_separately(self.eval_source, self.eval_path)
        if self.eval_size == 0 or not separate:
            return []
        count = self.eval_most if self.eval_size is None else self.eval_size
        if self.eval_path:
            problems = problem_sources.read_problems(self.eval_path, self.evaluation, split="test")
        else:
            splits = problem_sources.load_hub_splits(self.eval_source, "data.eval_path", "test")
            problems = self.read_test(splits["test"], self.eval_source)
        return _nonempty(
            _distinct(problems)[:count],
            f"{self.eval_path or self.eval_source}: no evaluation problems: "
            f"{_why_none(self.evaluation)}",
        )

    def read_test(self, rows: Iterable[Any], source: str) -> list[Problem]:
        """Returns the evaluation problems in the rows of the test split of a dataset."""
        return problem_sources.read_rows(rows, f"{source}[test]", self.evaluation)


def load_split(
    config: ProblemConfig, *, split: Literal["train", "eval"] = "train"
) -> list[Problem]:
    """Loads the training or the evaluation problems.

    Raises:
        UserError: as in `load_splits`.
    """
    train, evaluation = load_splits(config, train=split == "train")
    return train if split == "train" else evaluation


def load_splits(
    config: ProblemConfig, *, train: bool = True
) -> tuple[list[Problem], list[Problem]]:
    """Loads the training and the evaluation problems; no question is in both.

    The same arguments give the same problems in the same order. Rows that are left out are counted
    on the screen.

    Raises:
        UserError: the source is unknown, unreachable, malformed, or holds no problem for a split
            that is wanted.
    """
    separate = config.separate_evaluation()
    if separate and not train:
        return [], separate
    held_out_size = 0 if separate else config.eval_size
    if config.path:
        problems = problem_sources.read_problems(
            config.path, config.training, split=config.train_split
        )
        problems, evaluation = _hold_out_last(problems, held_out_size, config.eval_most)
    elif config.source.startswith(GENERATED):
        problems, evaluation = _generate(config, held_out_size)
    else:
        problems, evaluation = _load_hub(config, held_out_size)
    if separate:
        _nonempty(problems, _too_few(config, "train", 0, separate=True))
        problems = _remove_questions(problems, config.training.asked_in(separate, problems))
        evaluation = separate
    if train:
        _nonempty(problems, _too_few(config, "train", len(evaluation), separate=bool(separate)))
    if config.eval_size != 0 or not train:
        _nonempty(evaluation, _too_few(config, "eval", len(problems), separate=bool(separate)))
    return problems, evaluation


def _take_turns(parts: Sequence[Sequence[Problem]]) -> list[Problem]:
    """Returns all problems so that each beginning has about the same fraction of every part."""
    shares = [((i + 0.5) / len(part), part[i]) for part in parts for i in range(len(part))]
    return [problem for _, problem in sorted(shares, key=lambda share: share[0])]


def load_mixture(
    sources: Mapping[str, MixtureSource], config: ProblemConfig
) -> tuple[dict[str, list[Problem]], list[Problem]]:
    """Loads the problems of several sources; no question is trained on and evaluated.

    Without a source of their own, the evaluation problems come from every source in the way of
    `load_splits`, in numbers that follow from the weights: a source that is rarely drawn may have
    none. They take turns, so that the first of them, which a limit takes, are of all sources.

    Args:
        sources: the sources by name, at least one.
        config: what is common to the sources: rewards, lengths and evaluation problems.
            `eval_size` is that of all sources together, `fields` are those of evaluation problems
            with a source of their own. Each source has its own path, split, levels, fields and
            options.

    Returns:
        The training problems by the name of the source, and the evaluation problems.

    Raises:
        UserError: as in `load_splits`; no source is empty.
    """
    separate = evaluates_separately(config.eval_source, config.eval_path)
    size_of_all, evaluation = config.eval_size, list[Problem]()
    if separate and size_of_all != 0:
        evaluation = load_split(config, split="eval")
    shares = divide(MOST_HELD_OUT if size_of_all is None else size_of_all, sources)
    train, held_out = {}, list[list[Problem]]()
    for name, source in sources.items():
        size = None if size_of_all is None and shares[name] else shares[name]
        source_config = dataclasses.replace(
            config,
            source=source.source,
            path=source.path,
            train_split=source.split,
            eval_source="" if separate else config.eval_source,
            eval_path="",
            eval_size=0 if separate else size,
            eval_most=shares[name],
            is_part=True,
            levels=source.levels,
            fields=source.fields,
            options=source.options,
        )
        train[name], problems = load_splits(source_config)
        held_out.append(problems)
    evaluation = _distinct([*evaluation, *_take_turns(held_out)])
    for name, source in sources.items():
        train[name] = _nonempty(
            not_held_out(train[name], evaluation),
            f"data.mixture.{name}: all questions of {source.origin} are evaluated: take it out, "
            "hold out fewer, or give evaluations their own --config.data.eval_path",
        )
    return train, evaluation


def _too_few(config: ProblemConfig, split: str, others: int, *, separate: bool) -> str:
    """Returns why a split has no problems: how many there are, and which field takes them.

    `others` is the number of problems of the other split.
    """
    source = config.path or config.source
    if split == "train" and others and separate:
        return (
            f"{source}: no problems for train, as {config.eval_path or config.eval_source} "
            "(data.eval_path, data.eval_source) has all of its questions: add others"
        )
    if split == "train" and others:
        if config.is_part:
            asked = f"its share of eval.problems, {config.eval_size or others},"
            lower = "pass a lower --config.eval.problems"
        else:
            asked = f"eval.problems={config.eval_size}" if config.eval_size else "an evaluation"
            fewer = f"pass --config.eval.problems={others - 1} or lower"
            lower = fewer if others > 1 else "add some"
        return (
            f"{source}: no problems for train: it has {others} different questions, and {asked} "
            f"holds out all of them: {lower}, an own --config.data.eval_path, or "
            "--config.eval.every=0"
        )
    # Problems to evaluate may be read as they are, or held out of those to train on.
    selection = (
        config.evaluation if split == "eval" and config.evaluation.left_out else config.training
    )
    return f"{source}: no problems for {split}: {_why_none(selection)}"


def _why_none(selection: Selection) -> str:
    """Returns why a selection has no problems: what was left out, with a remedy for each reason."""
    causes = [
        f"{count} with {reason} (remedy: {remedy})"
        for (reason, remedy), count in selection.left_out.most_common()
    ]
    return f"left out {', '.join(causes)}" if causes else "the source has none: take another one"


def _nonempty[T](problems: list[T], message: str) -> list[T]:
    if not problems:
        raise UserError(message)
    return problems


def not_held_out(problems: list[Problem], held_out: Iterable[Problem]) -> list[Problem]:
    """Returns the problems whose question is not held out; prints how many are left out."""
    return _remove_questions(problems, {problem.question for problem in held_out})


def _remove_questions(
    problems: list[Problem], questions: set[str], reason: str = _IS_HELD_OUT
) -> list[Problem]:
    remaining = [problem for problem in problems if problem.question not in questions]
    if len(remaining) < len(problems):
        count = len(problems) - len(remaining)
        problem_sources.print_left_out(count, f"whose question is {reason}")
    return remaining


def _held_out_size(size: int | None, available: int, limit: int) -> int:
    if size is not None:
        return size
    return max(1, min(limit, available // _LARGEST_PART))


def _hold_out_last(
    problems: list[Problem], size: int | None, limit: int
) -> tuple[list[Problem], list[Problem]]:
    """Divides problems; a question that several rows have is held out as one problem."""
    distinct = list(_by_question(reversed(problems)).values())[::-1]
    cut = max(len(distinct) - _held_out_size(size, len(distinct), limit), 0)
    train, evaluation = _by_question(distinct[:cut]), distinct[cut:]
    copies = sum(problem.question not in train for problem in problems) - len(evaluation)
    if copies:
        problem_sources.print_left_out(copies, f"whose question is {_IS_HELD_OUT}")
    return [problem for problem in problems if problem.question in train], evaluation


def _by_question(problems: Iterable[Problem]) -> dict[str, Problem]:
    """Returns the first problem with each question."""
    first: dict[str, Problem] = {}
    for problem in problems:
        first.setdefault(problem.question, problem)
    return first


def _distinct(problems: list[Problem]) -> list[Problem]:
    """Returns the problems without copies, which would count as independent; prints how many."""
    distinct = list(_by_question(problems).values())
    if copies := len(problems) - len(distinct):
        problem_sources.print_left_out(copies, "to evaluate that have the question of another")
    return distinct


def _generate(
    config: ProblemConfig, held_out_size: int | None
) -> tuple[list[Problem], list[Problem]]:
    if config.training.levels:
        raise UserError(
            f"{config.source}: data.levels={sorted(config.training.levels)}, but generated "
            "problems have no level"
        )
    size = config.size + (config.eval_most if held_out_size is None else held_out_size)
    problems = problem_sources.generate_problems(
        config.source, config.options, seed=config.seed, size=size, rewards=config.training.scorers
    )
    cut = _held_out_size(held_out_size, len(problems), config.eval_most)
    rows = [problem.columns for problem in problems]
    return (
        problem_sources.read_rows(rows[cut:], config.source, config.training),
        problem_sources.read_rows(rows[:cut], config.source, config.evaluation),
    )


def _load_hub(
    config: ProblemConfig, held_out_size: int | None
) -> tuple[list[Problem], list[Problem]]:
    source, split, limit = config.source, config.train_split, config.eval_most
    splits = problem_sources.load_hub_splits(source, "data.path", split)
    problems = problem_sources.read_rows(splits[split], f"{source}[{split}]", config.training)
    if "test" not in splits or split == "test":
        return _hold_out_last(problems, held_out_size, limit)
    if config.eval_source == HELD_OUT:
        test = problem_sources.questions_of(splits["test"], config.training)
        problems = _remove_questions(problems, test, "in the test split")
        return _hold_out_last(problems, held_out_size, limit)
    count = limit if held_out_size is None else held_out_size
    evaluation = _distinct(config.read_test(splits["test"], source))[:count]
    return not_held_out(problems, evaluation), evaluation


def digest_of_problems(problems: Iterable[Problem], columns: Iterable[str] = ()) -> str:
    """SHA-256 of all questions and answers in their order, and of columns that rewards read."""
    names = sorted(columns)

    def identity(problem: Problem) -> list[Any]:
        values = [[name, problem.columns.get(name)] for name in names]
        return [problem.question, problem.answer, *([values] if values else [])]

    text = json.dumps([identity(problem) for problem in problems], default=_as_text)
    return hashlib.sha256(text.encode()).hexdigest()


def _as_text(value: Any) -> str:
    """A value that JSON does not have, as the same text in every process."""
    if isinstance(value, bytes | datetime.date | datetime.time | decimal.Decimal):
        return str(value)
    return type(value).__name__
