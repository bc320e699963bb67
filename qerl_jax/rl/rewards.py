r"""Rewards as plain functions: the interface for user functions, and the built-in rewards.

A reward is a function `f(prompt, completion, answer, num_tokens, finished) -> float | None`. It
takes the prompt and the completion as text, the reference answer of the problem, the length of the
completion in tokens, and whether the completion ended with an end-of-sequence token. It returns
None if it does not apply to this completion. A config names a reward by its import path,
`package.module:function`.

The built-in rewards search for a *marked* answer: the last balanced `\boxed{...}` or the last
`<answer>...</answer>`, whichever ends later.
"""

import collections
import contextlib
import dataclasses
import inspect
import os
import re
import signal
import threading
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from decimal import Decimal
from types import FrameType

import numpy as np

from qerl_jax.errors import UserError, first_line
from qerl_jax.import_path import import_function
from qerl_jax.rl import math_process

Reward = Callable[[str, str, str, int, bool], float | None]

_ARGUMENTS = "(prompt, completion, answer, num_tokens, finished)"
_TOLERANCE = Decimal("1e-6")
_LARGEST = 3e38  # largest absolute value of a reward, because training computes in float32
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)}])[-+])?\\?\$?"  # `5-3` holds an operator, not a sign
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3}(?![0-9]))+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?P<exponent>[eE][-+]?[0-9]{1,3}(?![0-9]))?"
    r"(?P<fraction> ?/ ?[0-9]+)?"
)
_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
_BOX_TOKEN = re.compile(r"\\boxed\s*\{|\\[{}]|[{}]")
_THINK = re.compile(r"<think>.*</think>\s*<answer>.*</answer>", re.DOTALL)


@dataclasses.dataclass
class Scores:
    """The rewards of B completions.

    Attributes:
        total: float64 [B] weighted sums of the rewards that are present; NaN where no reward with a
            non-zero weight is present.
        parts: float64 [B] unweighted values of each reward, by name; NaN where a reward is missing.
        errors: one line for each distinct failure, with its count.
    """

    total: np.ndarray
    parts: dict[str, np.ndarray]
    errors: list[str]


class _OutOfTimeError(BaseException):
    """Raised at the time limit; no Exception, so that `except Exception` cannot catch it."""


def resolve(path: str) -> Reward:
    """Imports a reward function.

    Args:
        path: import path, `package.module:function`.

    Returns:
        The function.

    Raises:
        UserError: the module or the function does not exist, or the function does not take the five
            arguments of a reward.
    """
    function = import_function(path, what="reward")
    try:
        inspect.signature(function).bind("", "", "", 0, True)
    except (TypeError, ValueError) as error:
        raise UserError(f"reward {path!r}: it must take {_ARGUMENTS}: {error}") from error
    if function is math_answer:
        # The worker takes seconds to start, which would exceed the time limit of the first call.
        math_process.verify("1", "1")
    return function


def score(
    rewards: Mapping[str, tuple[Reward, float]],
    prompts: Sequence[str],
    completions: Sequence[str],
    answers: Sequence[str],
    num_tokens: Sequence[int] | np.ndarray,
    finished: Sequence[bool] | np.ndarray,
    *,
    time_limit: float,
) -> Scores:
    """Scores B completions with every reward.

    A reward that raises, exceeds the time limit, or returns a value that is not a finite number is
    missing (NaN) for that completion, and `errors` reports it. A reward that returns None is
    missing without a report.

    Args:
        rewards: reward functions and their weights, by name.
        prompts: B prompts as text.
        completions: B completions as text.
        answers: B reference answers.
        num_tokens: B completion lengths in tokens.
        finished: B flags, True where the completion ended by itself.
        time_limit: time limit for one call in seconds; 0 sets no limit. The limit works by SIGALRM
            and therefore only in the main thread: other threads have no limit.

    Returns:
        The rewards of each completion.
    """
    lengths, flags = np.asarray(num_tokens).tolist(), np.asarray(finished).tolist()
    rows = list(zip(prompts, completions, answers, lengths, flags, strict=True))
    parts = {name: np.full(len(rows), np.nan) for name in rewards}
    messages: dict[tuple[str, str, str], str] = {}
    counts: dict[tuple[str, str, str], int] = collections.Counter()
    for name, (function, _) in rewards.items():
        for index, row in enumerate(rows):
            try:
                with _limited(time_limit):
                    value = function(*row)
                parts[name][index] = np.nan if value is None else _finite(value)
            except _OutOfTimeError:
                failure = (name, "time", "")
                message = f"exceeded the time limit of {time_limit:g} s"
            except (Exception, SystemExit) as error:
                failure = (name, type(error).__name__, _place(error))
                message = f"{type(error).__name__}: {first_line(error)[:200]} ({_place(error)})"
            else:
                continue
            messages.setdefault(failure, message)
            counts[failure] += 1

    # A reward of weight 0 is only logged: it does not make up for a missing reward.
    weighted = [weight * parts[name] for name, (_, weight) in rewards.items() if weight]
    present = ~np.isnan(weighted).all(axis=0) if weighted else np.zeros(len(rows), bool)
    total = np.where(present, np.nansum(weighted, axis=0), np.nan)
    errors = [
        f"reward {failure[0]!r} is missing for {count} of {len(rows)} completions: "
        f"{messages[failure]}"
        for failure, count in counts.items()
    ]
    return Scores(total=total, parts=parts, errors=errors)


@contextlib.contextmanager
def _limited(seconds: float) -> Generator[None]:
    """Raises _OutOfTimeError in the block after `seconds`, and restores SIGALRM at the end."""
    if seconds <= 0 or threading.current_thread() is not threading.main_thread():
        yield
        return
    active = True

    def interrupt(signum: int, frame: FrameType | None) -> None:
        del signum, frame
        if active:
            raise _OutOfTimeError

    handler = signal.signal(signal.SIGALRM, interrupt)
    # The timer repeats, because a bare `except:` can swallow the first exception.
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        active = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)


def _finite(value: float) -> float:
    number = float(value)
    if not abs(number) <= _LARGEST:
        raise ValueError(f"it returned {number:g}; a reward is a number up to {_LARGEST:g}")
    return number


def _place(error: BaseException) -> str:
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    return f"{os.path.basename(frame.f_code.co_filename)}:{line}"


# --- Finding the answer ---------------------------------------------------------------------------


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last balanced `\boxed{...}`, or None if there is no box.

    Example: `\boxed{2} or \boxed{\frac{1}{2}}` gives `\frac{1}{2}`.
    """
    span = _last_boxed_span(text)
    return None if span is None else text[span[0] : span[1]]


def last_tagged(text: str) -> str | None:
    """Returns the content of the last closed `<answer>...</answer>`, or None without such a tag."""
    span = _last_tagged_span(text)
    return None if span is None else text[span[0] : span[1]]


def last_marked(text: str) -> str | None:
    r"""Returns the marked answer, or None if the text has no mark.

    The marked answer is the content of the last `\boxed{...}` or the last `<answer>...</answer>`,
    whichever ends later. A box inside the tags is opened: `<answer>\boxed{18}</answer>` gives `18`.
    """
    spans = [span for span in (_last_boxed_span(text), _last_tagged_span(text)) if span]
    if not spans:
        return None
    start, end = max(spans, key=lambda span: span[1])
    inner = last_boxed(text[start:end])
    return text[start:end] if inner is None else inner


def _last_boxed_span(text: str) -> tuple[int, int] | None:
    if "\\boxed" not in text:
        return None
    span = None
    opened: list[int | None] = []  # per open brace: start of its box, None without a box
    for token in _BOX_TOKEN.finditer(text):
        if token[0].startswith("\\boxed"):
            opened.append(token.end())
        elif token[0] == "{":
            opened.append(None)
        elif token[0] == "}" and opened:
            start = opened.pop()
            if start is not None:
                span = (start, token.start())
    return span


def _last_tagged_span(text: str) -> tuple[int, int] | None:
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return None if start < 0 else (start + len("<answer>"), end)


def last_number(text: str) -> Decimal | None:
    r"""Returns the exact value of the last number in a text, or None if there is no number.

    Reads `-3`, `3.50`, `1,000`, `1{,}000`, `$18`, `18 dollars`, `5%`, `1.5e3` and Unicode's minus.
    Also returns None if the last number is a fraction (`1/2`, `\frac{1}{2}`), whose value is not 2.
    """
    last = None
    for last in _NUMBER.finditer(_plain(text)):  # noqa: B007
        pass
    return None if last is None else _value(last)


def _plain(text: str) -> str:
    text = text.replace("\u2212", "-").replace("{,}", ",").replace("\\!", "").replace("\\,", "")
    return _FRACTION.sub(r"\1/\2", text)


def _value(match: re.Match[str]) -> Decimal | None:
    if match["fraction"]:
        return None
    digits = match["digits"].replace(",", "")
    return Decimal(f"{match['sign'] or ''}{digits}{match['exponent'] or ''}")


def _whole_number(text: str) -> Decimal | None:
    match = _NUMBER.fullmatch(_plain(text).strip())
    return None if match is None else _value(match)


def _same_number(number: Decimal | None, answer: str) -> float:
    expected = last_number(answer)
    if expected is None:
        raise ValueError(
            f"the answer {answer[:50]!r} is not a number: use exact_answer or math_answer"
        )
    return float(number is not None and abs(number - expected) <= _TOLERANCE)


# --- Correctness ----------------------------------------------------------------------------------


def numeric_answer(
    prompt: str, completion: str, answer: str, num_tokens: int, finished: bool
) -> float:
    r"""Returns 1.0 if the completion's number equals the answer within 1e-6, else 0.0.

    The completion's number is the last number in the marked answer. Without a mark, it is the last
    number on the line after `####`, and without `####` the last number in the text. A mark without
    a number is wrong.
    Example: `3 * 6 = 18 dollars.` is right for `18`; `I count 18. \boxed{1999}` is wrong.
    """
    found = last_marked(completion)
    if found is None and "####" in completion:
        found = completion.rpartition("####")[2].strip().partition("\n")[0]
    return _same_number(last_number(completion if found is None else found), answer)


def tagged_answer(
    prompt: str, completion: str, answer: str, num_tokens: int, finished: bool
) -> float:
    """Returns 1.0 if the last number in the last `<answer>...</answer>` is the answer, else 0.0.

    The numbers are equal if they differ by at most 1e-6.
    Example: `<think>9 + 9</think> <answer>18</answer>` is right for `18`; a bare `18` is wrong.
    """
    return _same_number(last_number(last_tagged(completion) or ""), answer)


def boxed_answer(
    prompt: str, completion: str, answer: str, num_tokens: int, finished: bool
) -> float:
    r"""Returns 1.0 if the last number in the last balanced `\boxed{...}` is the answer, else 0.0.

    The numbers are equal if they differ by at most 1e-6.
    Example: `so \boxed{1{,}000}` is right for `1000`; `so 1000` is wrong.
    """
    return _same_number(last_number(last_boxed(completion) or ""), answer)


def exact_answer(
    prompt: str, completion: str, answer: str, num_tokens: int, finished: bool
) -> float:
    """Returns 1.0 if the marked answer equals the reference answer, else 0.0.

    Without a mark, the whole completion is compared. Both texts are stripped.
    Example: ` yes ` is right for `yes`; `yes, it is` is wrong, `<answer>yes</answer>` is right.
    """
    found = last_marked(completion)
    return float((completion if found is None else found).strip() == answer.strip())


def math_answer(
    prompt: str, completion: str, answer: str, num_tokens: int, finished: bool
) -> float:
    r"""Returns 1.0 if math-verify finds the completion's answer equal to the reference, else 0.0.

    Reads the marked answer: `<answer>42</answer>` counts like `\boxed{42}`. Without a mark,
    math-verify searches the last 500 characters.
    Example: `\boxed{\frac{1}{2}}`, `<answer>1/2</answer>` and `It is $0.5$.` are right for `0.5`.
    """
    found = last_marked(completion)
    if found is None:
        return float(math_process.verify(answer, completion[-500:]))
    found = found.strip().removesuffix(".").strip("*$ ")
    if found == answer.strip():
        return 1.0
    number, expected = _whole_number(found), _whole_number(answer)
    if number is not None and expected is not None:
        return float(abs(number - expected) <= _TOLERANCE)
    return float(bool(found) and math_process.verify(answer, f"\\boxed{{{found}}}"))


# --- Format and length ----------------------------------------------------------------------------


def think_format(
    prompt: str, completion: str, answer: str, num_tokens: int, finished: bool
) -> float:
    """Returns 1.0 if the completion has QeRL's layout, else 0.0.

    In this layout each tag occurs once, and there is no text before, between or after the tags.
    Example: `<think>9 + 9 = 18</think> <answer>18</answer>`.
    """
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    once = all(completion.count(tag) == 1 for tag in tags)
    return float(once and _THINK.fullmatch(completion.strip()) is not None)


def boxed_format(
    prompt: str, completion: str, answer: str, num_tokens: int, finished: bool
) -> float:
    r"""Returns 1.0 if the last balanced `\boxed{...}` is not empty, else 0.0.

    Example: `It is \boxed{18}.`
    """
    return float(bool((last_boxed(completion) or "").strip()))


def number_only_format(
    prompt: str, completion: str, answer: str, num_tokens: int, finished: bool
) -> float:
    """Returns 1.0 if the completion is one number and nothing else, else 0.0.

    Example: `-1,000.5` is right; `It is 18.` is wrong.
    """
    return float(_whole_number(completion) is not None)


def overlong_penalty(num_tokens: int, max_tokens: int, buffer: int) -> float:
    """Returns DAPO's soft overlong punishment (arXiv 2503.14476, Eq. 13), from 0 down to -1.

    Args:
        num_tokens: length of the completion in tokens.
        max_tokens: longest allowed length in tokens, L in the paper.
        buffer: number of tokens before the limit over which the punishment grows, L_cache in the
            paper.

    Returns:
        0 up to max_tokens - buffer tokens, from there a linear decrease to -1 at max_tokens, and -1
        beyond.
    """
    if num_tokens <= max_tokens - buffer:
        return 0.0
    if num_tokens > max_tokens:
        return -1.0
    return (max_tokens - buffer - num_tokens) / buffer
