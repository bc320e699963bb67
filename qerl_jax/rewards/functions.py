r"""Rewards as plain functions: the interface for user functions, and the built-in rewards.

A reward is a function `f(prompt, completion, answer, num_tokens, finished) -> float | None`. It
takes the prompt and the completion as text, the reference answer of the problem, the length of the
completion in tokens, and whether the completion ended with an end-of-sequence token. It returns
None if it does not apply to this completion. A config names a reward by its import path,
`package.module:function`. `rewards/calls.py` has the other forms of a reward.

The built-in rewards read what follows the reasoning, as `answers.answer_part` does, and search it
for a *marked* answer, as `answers.last_marked` does: the last boxes, `\boxed{...}`, or the last
`<answer>...</answer>`, whichever ends later.
"""

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from qerl_jax.rewards import math_process
from qerl_jax.rewards.answers import (
    answer_part,
    completion_number,
    join_digits,
    last_boxed,
    last_marked,
    last_tagged,
    marked_number,
    opens_reasoning,
    same_number,
    whole_number,
)

Reward = Callable[..., Any]

LARGEST = 3e38  # largest absolute value of a reward, because training computes in float32
_EQUATION = re.compile(r"[0-9][0-9 .+*/-]* = -?[0-9]+(?:\.[0-9]+)?")
_THINK = re.compile(r"<think>.*</think>\s*<answer>.*</answer>", re.DOTALL)


# --- Correctness ----------------------------------------------------------------------------------


def _equals(number: Decimal | None, answer: str) -> float:
    reference = marked_number(answer)
    if reference is None:
        raise ValueError(
            f"the answer {answer[:50]!r} is not a number: use exact_answer or math_answer"
        )
    return float(number is not None and same_number(number, reference))


def numeric_answer(
    prompt: str, completion: str, answer: str, num_tokens: int, finished: bool
) -> float:
    r"""Returns 1.0 if the completion's number equals the answer, as in `same_number`, else 0.0.

    The completion's number is the last number in the marked answer. Without a mark, it is the last
    number on the line after `####`, and without `####` the last number in the text. A mark without
    a number is wrong.
    Example: `3 * 6 = 18 dollars.` is right for `18`; `I count 18. \boxed{1999}` is wrong.

    Args:
        prompt: the prompt as text; one that ends in `<think>` begins reasoning.
        completion: the completion as text.
        answer: the reference answer, a number.
        num_tokens: not used; every reward of one completion takes it.
        finished: not used either.
    """
    return _equals(completion_number(answer_part(prompt, completion)), answer)


def tagged_answer(
    prompt: str, completion: str, answer: str, num_tokens: int, finished: bool
) -> float:
    """Returns 1.0 if the last number in the last `<answer>...</answer>` is the answer, else 0.0.

    The numbers are compared by `answers.same_number`.
    Example: `<think>9 + 9</think> <answer>18</answer>` is right for `18`; a bare `18` is wrong.
    """
    return _equals(marked_number(last_tagged(answer_part(prompt, completion)) or ""), answer)


def boxed_answer(
    prompt: str, completion: str, answer: str, num_tokens: int, finished: bool
) -> float:
    r"""Returns 1.0 if the last number in the last balanced `\boxed{...}` is the answer, else 0.0.

    The numbers are compared by `answers.same_number`.
    Example: `so \boxed{1{,}000}` is right for `1000`; `so 1000` is wrong.
    """
    return _equals(marked_number(last_boxed(answer_part(prompt, completion)) or ""), answer)


def exact_answer(
    prompt: str, completion: str, answer: str, num_tokens: int, finished: bool
) -> float:
    """Returns 1.0 if the marked answer equals the reference answer, else 0.0.

    Without a mark, all that follows the reasoning is compared. Both texts are stripped.
    Example: ` yes ` is right for `yes`; `yes, it is` is wrong, `<answer>yes</answer>` is right.
    """
    final = answer_part(prompt, completion)
    prediction = last_marked(final)
    return float((final if prediction is None else prediction).strip() == answer.strip())


def whole_answer(
    prompt: str, completion: str, answer: str, num_tokens: int, finished: bool
) -> float:
    """Returns 1.0 if the completion is the reference answer and ended by itself, else 0.0.

    Reasoning may come before it. Both texts are stripped, and no mark is read.
    Example: ` 3 + 4 = 7` is right for `3 + 4 = 7`; `7`, and `3 + 4 = 7. So` are wrong.
    """
    return float(finished and answer_part(prompt, completion).strip() == answer.strip())


def math_answer(
    prompt: str, completion: str, answer: str, num_tokens: int, finished: bool
) -> float:
    r"""Returns 1.0 if math-verify finds the completion's answer equal to the reference, else 0.0.

    Reads the marked answer: `<answer>42</answer>` counts like `\boxed{42}`. Without a mark,
    math-verify searches the last 500 characters. A reference that math-verify cannot read is an
    error, and the reward is missing.
    Example: `\boxed{\frac{1}{2}}`, `<answer>1/2</answer>` and `It is $0.5$.` are right for `0.5`.
    """
    final, reference = answer_part(prompt, completion), _formula(answer)
    prediction = last_marked(final)
    if prediction is None:
        return float(math_process.verify(_without_e(reference), final[-500:]))
    prediction = _formula(prediction)
    number, value = whole_number(prediction), whole_number(reference)
    if number is not None and value is not None:
        return float(same_number(number, value))
    # An empty text only makes math-verify refuse a reference that it cannot read.
    equal = prediction == reference
    text = f"\\boxed{{{_without_e(prediction)}}}" if prediction and not equal else ""
    return float(math_process.verify(_without_e(reference), text) or equal)


def _formula(text: str) -> str:
    return join_digits(text.strip().removesuffix(".").strip("*$ "))


def _without_e(text: str) -> str:
    """A number such as `5e3` in LaTeX: math-verify takes the letter for Euler's number."""
    digits, letter, power = text.lower().partition("e")
    is_number = letter and whole_number(text) is not None
    return f"{digits} \\times 10^{{{power}}}" if is_number else text


# --- Format and length ----------------------------------------------------------------------------


def think_format(
    prompt: str, completion: str, answer: str, num_tokens: int, finished: bool
) -> float:
    """Returns 1.0 if the completion has QeRL's layout, else 0.0.

    In this layout each tag occurs once, and there is no text before, between or after the tags.
    The first tag may be the end of the prompt, where a chat template opens the reasoning.
    Example: `<think>9 + 9 = 18</think> <answer>18</answer>`.
    """
    if opens_reasoning(prompt):
        completion = "<think>" + completion
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    once = all(completion.count(tag) == 1 for tag in tags)
    return float(once and _THINK.fullmatch(completion.strip()) is not None)


def boxed_format(
    prompt: str, completion: str, answer: str, num_tokens: int, finished: bool
) -> float:
    r"""Returns 1.0 if the last balanced `\boxed{...}` is not empty, else 0.0.

    Example: `It is \boxed{18}.`
    """
    return float(bool((last_boxed(answer_part(prompt, completion)) or "").strip()))


def number_only_format(
    prompt: str, completion: str, answer: str, num_tokens: int, finished: bool
) -> float:
    """Returns 1.0 if the completion is one number and, but for reasoning, nothing else, else 0.0.

    Example: `-1,000.5` is right; `It is 18.` is wrong.
    """
    return float(whole_number(answer_part(prompt, completion)) is not None)


def equation_format(
    prompt: str, completion: str, answer: str, num_tokens: int, finished: bool
) -> float:
    """Returns 1.0 if the completion is an equation of numbers and ended by itself, else 0.0.

    Reasoning may come before it, and its right side is one number.
    Example: `3 + 4 = 8` is right; `3 + 4 = 7. So` is wrong.
    """
    final = answer_part(prompt, completion).strip()
    return float(finished and _EQUATION.fullmatch(final) is not None)


# --- Environments ---------------------------------------------------------------------------------


def environment_reward(
    prompt: str,
    completion: str,
    answer: str,
    num_tokens: int,
    finished: bool,
    *,
    environment_reward: float | None,
) -> float | None:
    """Returns what the environment rewarded, the sum over the turns; None where it did not.

    It is that of `step` of an environment of texts, and of `get_reward` at the end.
    """
    return environment_reward


# The rewards that a config may name; a run of another person may call no others.
BUILT_IN: tuple[Reward, ...] = (
    numeric_answer,
    tagged_answer,
    boxed_answer,
    exact_answer,
    whole_answer,
    math_answer,
    think_format,
    boxed_format,
    number_only_format,
    equation_format,
    environment_reward,
)

# Columns that a row has once its conversation with an environment has ended: its reward; the
# environment's attributes that are data, as an object; and the texts of the policy's turns.
CONVERSATION_COLUMNS = ("environment_reward", "environments", "turns")


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
