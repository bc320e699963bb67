r"""Rewards as plain functions: the interface for user functions, and the built-in rewards.

A reward is a function `f(prompt, completion, answer, num_tokens, finished) -> float | None`. It
takes the prompt and the completion as text, the reference answer of the problem, the length of the
completion in tokens, and whether the completion ended with an end-of-sequence token. It returns
None if it does not apply to this completion. A config names a reward by its import path,
`package.module:function`.

The built-in rewards search for a *marked* answer, as `answers.last_marked` does: the last boxes,
`\boxed{...}`, or the last `<answer>...</answer>`, whichever ends later.
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
from qerl_jax.rl.answers import (
    completion_number,
    join_digits,
    last_boxed,
    last_marked,
    last_tagged,
    marked_number,
    whole_number,
)

Reward = Callable[[str, str, str, int, bool], float | None]

_ARGUMENTS = "(prompt, completion, answer, num_tokens, finished)"
_TOLERANCE = Decimal("1e-6")
_LARGEST = 3e38  # largest absolute value of a reward, because training computes in float32
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


# --- Correctness ----------------------------------------------------------------------------------


def _same_number(number: Decimal | None, answer: str) -> float:
    expected = marked_number(answer)
    if expected is None:
        raise ValueError(
            f"the answer {answer[:50]!r} is not a number: use exact_answer or math_answer"
        )
    return float(number is not None and abs(number - expected) <= _TOLERANCE)


def numeric_answer(
    prompt: str, completion: str, answer: str, num_tokens: int, finished: bool
) -> float:
    r"""Returns 1.0 if the completion's number equals the answer within 1e-6, else 0.0.

    The completion's number is the last number in the marked answer. Without a mark, it is the last
    number on the line after `####`, and without `####` the last number in the text. A mark without
    a number is wrong.
    Example: `3 * 6 = 18 dollars.` is right for `18`; `I count 18. \boxed{1999}` is wrong.
    """
    return _same_number(completion_number(completion), answer)


def tagged_answer(
    prompt: str, completion: str, answer: str, num_tokens: int, finished: bool
) -> float:
    """Returns 1.0 if the last number in the last `<answer>...</answer>` is the answer, else 0.0.

    The numbers are equal if they differ by at most 1e-6.
    Example: `<think>9 + 9</think> <answer>18</answer>` is right for `18`; a bare `18` is wrong.
    """
    return _same_number(marked_number(last_tagged(completion) or ""), answer)


def boxed_answer(
    prompt: str, completion: str, answer: str, num_tokens: int, finished: bool
) -> float:
    r"""Returns 1.0 if the last number in the last balanced `\boxed{...}` is the answer, else 0.0.

    The numbers are equal if they differ by at most 1e-6.
    Example: `so \boxed{1{,}000}` is right for `1000`; `so 1000` is wrong.
    """
    return _same_number(marked_number(last_boxed(completion) or ""), answer)


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
    math-verify searches the last 500 characters. A reference that math-verify cannot read is an
    error, and the reward is missing.
    Example: `\boxed{\frac{1}{2}}`, `<answer>1/2</answer>` and `It is $0.5$.` are right for `0.5`.
    """
    found, expected = last_marked(completion), _formula(answer)
    if found is None:
        return float(math_process.verify(expected, completion[-500:]))
    found = _formula(found)
    number, value = whole_number(found), whole_number(expected)
    if number is not None and value is not None:
        return float(abs(number - value) <= _TOLERANCE)
    # An empty text only makes math-verify refuse a reference that it cannot read.
    equal = found == expected
    text = f"\\boxed{{{found}}}" if found and not equal else ""
    return float(math_process.verify(expected, text) or equal)


def _formula(text: str) -> str:
    return join_digits(text.strip().removesuffix(".").strip("*$ "))


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
    return float(whole_number(completion) is not None)


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
