"""Problems: which are trained on and which are held out, and how a prompt is written.

A source is a local file or folder, `reasoning_gym:TASK` (generated, needs no network), or a dataset
on the Hugging Face hub (`openai/gsm8k`, or `owner/name:configuration`).
"""

import dataclasses
import datetime
import decimal
import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from qerl_jax.config.fields import GENERATED, HELD_OUT, evaluates_apart
from qerl_jax.data import sources as problem_sources
from qerl_jax.data.mixture import MixtureSource, divide
from qerl_jax.data.sources import Problem, Selection
from qerl_jax.errors import UserError, check_unicode
from qerl_jax.rewards.functions import Reward
from qerl_jax.weights.tokenizer import Tokenizer

MOST_HELD_OUT = 256  # largest number of evaluation problems where no number is given
_LARGEST_PART = 10  # At most a tenth of the training problems is held out where no number is given.


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A problem as the model reads it: the rendered chat and its token ids."""

    problem: Problem
    text: str
    ids: tuple[int, ...]


def load_problems(
    source: str, *, split: Literal["train", "eval"] = "train", **options: Any
) -> list[Problem]:
    """Loads the training or the evaluation problems.

    Args:
        source: as in `load_splits`.
        split: problems to return.
        **options: other arguments of `load_splits`.

    Raises:
        UserError: as in `load_splits`.
    """
    train, evaluation = load_splits(source, train=split == "train", **options)
    return train if split == "train" else evaluation


def load_splits(
    source: str,
    *,
    path: str = "",
    train_split: str = "train",
    eval_source: str = "",
    eval_path: str = "",
    eval_size: int | None = 0,
    eval_most: int = MOST_HELD_OUT,
    rewards: Sequence[Reward] | None = None,
    levels: Sequence[int] = (),
    max_question_chars: int = 0,
    fields: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
    size: int = 10_000,
    train: bool = True,
) -> tuple[list[Problem], list[Problem]]:
    r"""Loads the training and the evaluation problems; no question is in both.

    The evaluation problems come from the first of these places that is given or exists:

    * `eval_path`: its first problems;
    * `eval_source`, if it is a hub id: the first problems of its test split;
    * `source`, if it is a hub dataset with a test split and `eval_source` is not 'held_out': the
      first problems of that split;
    * the training problems: the last problems of a file or train split, or the first generated
      problems, which are then not trained on. Questions of a hub dataset's test split are not
      trained on either.

    The same arguments give the same problems in the same order. Rows that are left out are counted
    on the screen.

    Args:
        source: `reasoning_gym:TASK` or a hub id; not used if `path` is set.
        path: path of a file or folder of training problems, as in `problem_sources.read_problems`.
            Each row has `question` (or `problem`, `prompt`) and `answer` (or `solution`). A
            question is a text or a list of chat messages. An answer whose last line is `####
            NUMBER`, as in GSM8K, is that number; a solution marks its answer in this way or by
            `\boxed{}`.
        train_split: split of the dataset on the hub, or of the folder, to train on.
        eval_source: hub id of a dataset with evaluation problems, 'held_out', or ''.
        eval_path: path of a file or folder of evaluation problems.
        eval_size: largest number of evaluation problems. None takes at most `eval_most`,
            and at most a tenth of the training problems if they are held out (of fewer than ten,
            one).
        eval_most: largest number of evaluation problems where `eval_size` is None.
        rewards: functions that score completions of the problems, as in `Selection`.
        levels: difficulties to train on, compared with the field `level` (`3` or `Level 3`); ()
            selects all.
        max_question_chars: largest length of a training question; 0 means no limit.
        fields: names of the fields `question`, `answer` and `level`, as in `Selection`.
        options: options of the reasoning_gym task.
        seed: seed of the generated problems.
        size: number of distinct training problems to generate; a task with fewer problems gives
            fewer.
        train: whether training problems are wanted.

    Raises:
        UserError: the source is unknown, unreachable, malformed, or holds no problem for a split
            that is wanted.
    """
    asked = _Asked(
        source=source,
        path=path,
        eval_source=eval_source,
        eval_path=eval_path,
        train_split=train_split,
        eval_size=eval_size,
        eval_most=eval_most,
        evaluation=Selection(rewards, fields=fields or {}),
        training=Selection(rewards, frozenset(levels), max_question_chars, fields or {}),
    )
    separate = asked.separate_evaluation()
    if separate and not train:
        return [], separate
    held_out_size = 0 if separate else eval_size
    if path:
        found = problem_sources.read_problems(path, asked.training, split=train_split)
        problems, evaluation = _hold_out_last(found, held_out_size, eval_most)
    elif source.startswith(GENERATED):
        problems, evaluation = _generate(asked, options or {}, held_out_size, seed=seed, size=size)
    else:
        problems, evaluation = _load_hub(asked, held_out_size)
    if separate:
        problems, evaluation = not_held_out(problems, separate), separate
    message = (
        f"{path or source}: no problems for {{}} (eval_size={eval_size}, levels={tuple(levels)}, "
        f"max_question_chars={max_question_chars}): give more, filter less or hold out fewer"
    )
    if train:
        _nonempty(problems, message.format("train"))
    if eval_size != 0 or not train:
        _nonempty(evaluation, message.format("eval"))
    return problems, evaluation


def load_mixture(
    sources: Mapping[str, MixtureSource],
    *,
    eval_source: str = "",
    eval_path: str = "",
    eval_size: int | None = 0,
    rewards: Sequence[Reward] | None = None,
    max_question_chars: int = 0,
    fields: Mapping[str, str] | None = None,
) -> tuple[dict[str, list[Problem]], list[Problem]]:
    """Loads the problems of several sources; no question is trained on and evaluated.

    Without a place of their own, the evaluation problems come from every source in the way of
    `load_splits`, in numbers that follow from the weights: a source that is rarely drawn may have
    none.

    Args:
        sources: the sources by name, at least one.
        eval_source: hub id of a dataset with evaluation problems, 'held_out', or ''.
        eval_path: path of a file or folder of evaluation problems, or ''.
        eval_size: largest number of evaluation problems of all sources together, as in
            `load_splits`.
        rewards: functions that score completions of the problems, as in `Selection`.
        max_question_chars: largest length of a training question; 0 means no limit.
        fields: names of the fields of evaluation problems with a place of their own.

    Returns:
        The training problems by the name of the source, and the evaluation problems.

    Raises:
        UserError: as in `load_splits`; no source is empty.
    """
    own = evaluates_apart(eval_source, eval_path)
    evaluation: list[Problem] = []
    if own and eval_size != 0:
        evaluation = load_problems(
            "",
            split="eval",
            eval_source=eval_source,
            eval_path=eval_path,
            eval_size=eval_size,
            rewards=rewards,
            fields=fields,
        )
    shares = divide(MOST_HELD_OUT if eval_size is None else eval_size, sources)
    train = {}
    for name, source in sources.items():
        size = None if eval_size is None and shares[name] else shares[name]
        train[name], held_out = load_splits(
            source.source,
            path=source.path,
            train_split=source.split,
            eval_source="" if own else eval_source,
            eval_size=0 if own else size,
            eval_most=shares[name],
            rewards=rewards,
            levels=source.levels,
            max_question_chars=max_question_chars,
            fields=source.fields,
            options=source.options,
        )
        evaluation += held_out
    for name, source in sources.items():
        train[name] = _nonempty(
            not_held_out(train[name], evaluation),
            f"data.mixture.{name}: all questions of {source.origin} are evaluated: take it out, "
            "hold out fewer, or give evaluations their own --config.data.eval_path",
        )
    return train, evaluation


@dataclasses.dataclass(frozen=True)
class _Asked:
    """Arguments of `load_splits`.

    Attributes:
        source: hub id or generator of the training problems.
        path: file of the training problems, or ''.
        train_split: split of the source, or of the folder, to train on.
        eval_source: hub id of the evaluation problems, 'held_out', or ''.
        eval_path: file of the evaluation problems, or ''.
        eval_size: largest number of evaluation problems; None decides by their number.
        eval_most: largest number of them where `eval_size` is None.
        evaluation: selection of evaluation problems that are not held out.
        training: selection of training problems.
    """

    source: str
    path: str
    train_split: str
    eval_source: str
    eval_path: str
    eval_size: int | None
    eval_most: int
    evaluation: Selection
    training: Selection

    def separate_evaluation(self) -> list[Problem]:
        """Returns the evaluation problems that have a source of their own; [] without one."""
        apart = evaluates_apart(self.eval_source, self.eval_path)
        if self.eval_size == 0 or not apart:
            return []
        count = self.eval_most if self.eval_size is None else self.eval_size
        if self.eval_path:
            found = problem_sources.read_problems(self.eval_path, self.evaluation, split="test")
            found = found[:count]
        else:
            found = self.test_problems(self.eval_source, count)
        return _nonempty(found, f"{self.eval_path or self.eval_source}: no evaluation problems")

    def test_problems(self, source: str, count: int) -> list[Problem]:
        """Returns the first problems of the test split of a dataset on the hub."""
        splits = problem_sources.load_hub_splits(source, "data.eval_path", "test")
        rows = itertools.islice(splits["test"], count)
        return problem_sources.read_rows(rows, f"{source}[test]", self.evaluation)


def _nonempty[T](problems: list[T], message: str) -> list[T]:
    if not problems:
        raise UserError(message)
    return problems


def not_held_out(problems: list[Problem], held_out: Iterable[Problem]) -> list[Problem]:
    """Returns the problems whose question is not held out; prints how many are left out."""
    return _without(problems, {problem.question for problem in held_out})


def _without(
    problems: list[Problem], questions: set[str], place: str = "held out for evaluation"
) -> list[Problem]:
    kept = [problem for problem in problems if problem.question not in questions]
    if len(kept) < len(problems):
        problem_sources.print_left_out(len(problems) - len(kept), f"whose question is {place}")
    return kept


def _held_out_size(asked: int | None, available: int, most: int) -> int:
    if asked is not None:
        return asked
    return max(1, min(most, available // _LARGEST_PART))


def _hold_out_last(
    problems: list[Problem], asked: int | None, most: int
) -> tuple[list[Problem], list[Problem]]:
    cut = max(len(problems) - _held_out_size(asked, len(problems), most), 0)
    return not_held_out(problems[:cut], problems[cut:]), problems[cut:]


def _generate(
    asked: _Asked, options: Mapping[str, Any], held_out: int | None, *, seed: int, size: int
) -> tuple[list[Problem], list[Problem]]:
    if asked.training.levels:
        raise UserError(
            f"{asked.source}: data.levels={sorted(asked.training.levels)}, but generated problems "
            "have no level"
        )
    drawn = size + (asked.eval_most if held_out is None else held_out)
    problems = problem_sources.generate_problems(asked.source, options, seed=seed, size=drawn)
    cut = _held_out_size(held_out, len(problems), asked.eval_most)
    return (
        problem_sources.select_generated(asked.source, problems[cut:], asked.training),
        problem_sources.select_generated(asked.source, problems[:cut], asked.evaluation),
    )


def _load_hub(asked: _Asked, held_out: int | None) -> tuple[list[Problem], list[Problem]]:
    source, split, most = asked.source, asked.train_split, asked.eval_most
    splits = problem_sources.load_hub_splits(source, "data.path", split)
    problems = problem_sources.read_rows(splits[split], f"{source}[{split}]", asked.training)
    if "test" not in splits or split == "test":
        return _hold_out_last(problems, held_out, most)
    if asked.eval_source == HELD_OUT:
        test = problem_sources.questions_of(splits["test"], asked.training)
        problems = _without(problems, test, "in the test split")
        return _hold_out_last(problems, held_out, most)
    count = most if held_out is None else held_out
    rows = itertools.islice(splits["test"], count)
    evaluation = problem_sources.read_rows(rows, f"{source}[test]", asked.evaluation)
    return not_held_out(problems, evaluation), evaluation


def fingerprint(problems: Iterable[Problem], columns: Iterable[str] = ()) -> str:
    """SHA-256 of all questions and answers in their order, and of columns that rewards read."""
    names = sorted(columns)

    def identity(problem: Problem) -> list[Any]:
        found = [[name, problem.columns.get(name)] for name in names]
        return [problem.question, problem.answer, *([found] if found else [])]

    text = json.dumps([identity(problem) for problem in problems], default=_as_text)
    return hashlib.sha256(text.encode()).hexdigest()


def _as_text(value: Any) -> str:
    """A value that JSON does not have, as the same text in every process."""
    if isinstance(value, bytes | datetime.date | datetime.time | decimal.Decimal):
        return str(value)
    return type(value).__name__


# --- Prompts --------------------------------------------------------------------------------------


def render_prompt(
    problem: Problem,
    tokenizer: Tokenizer,
    *,
    system_prompt: str = "",
    question_suffix: str = "",
    chat_template_args: Mapping[str, Any] | None = None,
) -> str:
    """Writes a problem as a chat that waits for the assistant.

    Args:
        problem: the problem.
        tokenizer: tokenizer with the chat template.
        system_prompt: the system message; with '' the problem or the template decides.
        question_suffix: text that is appended to the last message without a space in between.
        chat_template_args: further variables of the chat template.

    Raises:
        UserError: the tokenizer has no chat template, the template rejects the messages or does not
            read an argument, a text is not valid Unicode, or there are two system messages.
    """
    for text, name in (
        (system_prompt, "the system message"),
        (problem.question, "the question"),
        (question_suffix, "the question suffix"),
    ):
        check_unicode(text, name)
    chat = list(problem.messages or [("user", problem.question)])
    if system_prompt and any(role == "system" for role, _ in chat):
        raise UserError(
            f"the problem {problem.question!r:.80} has a system message of its own, and "
            f"data.system_prompt is {system_prompt!r:.60}: pass --config.data.system_prompt="
        )
    role, content = chat.pop()
    chat.append((role, content + question_suffix))
    if system_prompt:
        chat.insert(0, ("system", system_prompt))
    messages = [{"role": role, "content": content} for role, content in chat]
    text = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, **(chat_template_args or {})
    )
    # A template may leave out the reasoning of an earlier answer, as that of Qwen3 does.
    tokenizer.check_kept([m for m in messages if m["role"] != "assistant"], text)
    return text


def encode_prompts(
    problems: Sequence[Problem],
    tokenizer: Tokenizer,
    *,
    system_prompt: str = "",
    question_suffix: str = "",
    chat_template_args: Mapping[str, Any] | None = None,
    max_prompt_tokens: int,
    what: str = "prompts",
    remedy: str = "instead of data.max_prompt_tokens={limit} pass "
    "--config.data.max_prompt_tokens={longest}",
) -> list[Prompt]:
    """Renders and tokenizes problems.

    Args:
        problems: the problems to render.
        tokenizer: tokenizer with the chat template.
        system_prompt: the system message, as in `render_prompt`.
        question_suffix: text that is appended to every question without a space in between.
        chat_template_args: further variables of the chat template.
        max_prompt_tokens: largest number of tokens in a prompt.
        what: name of the prompts in the error message.
        remedy: advice for the error message; {limit} and {longest} are replaced by the number of
            tokens allowed and the number of tokens in the longest prompt.

    Raises:
        UserError: a prompt is longer than the limit.
    """
    prompts = []
    for problem in problems:
        text = render_prompt(
            problem,
            tokenizer,
            system_prompt=system_prompt,
            question_suffix=question_suffix,
            chat_template_args=chat_template_args,
        )
        prompts.append(Prompt(problem, text, tuple(tokenizer.encode(text))))
    lengths = [len(prompt.ids) for prompt in prompts]
    over = sum(length > max_prompt_tokens for length in lengths)
    if over:
        advice = remedy.format(limit=max_prompt_tokens, longest=max(lengths))
        raise UserError(
            f"{over} of {len(prompts)} {what} are over {max_prompt_tokens} tokens, the longest "
            f"has {max(lengths)}; {advice}, or take them out"
        )
    return prompts
