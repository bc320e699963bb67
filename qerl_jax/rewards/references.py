r"""Reference answers: which rewards need one, and which answers a reward can read.

A problem whose reference answer no scorer can read would give every completion a reward of 0.
"""

import dis
import functools
import inspect
import re
import types
from typing import Any

from qerl_jax.rewards import functions
from qerl_jax.rewards.answers import last_boxed, marked_number
from qerl_jax.rewards.calls import call_of, plain
from qerl_jax.rewards.functions import Reward
from qerl_jax.rewards.url import UrlReward

_NUMBERS = (functions.numeric_answer, functions.boxed_answer, functions.tagged_answer)
# The rewards that compare the answer of a completion with the reference answer.
COMPARING = (*_NUMBERS, functions.exact_answer, functions.whole_answer, functions.math_answer)
_ANSWER_POSITION = 2  # of the arguments (prompt, completion, answer, num_tokens, finished)
_LATEX_COMMAND = re.compile(r"\\(?:begin|end)\{\w+\*?\}|\\[a-zA-Z]+")
_WORD = re.compile(r"[^\W\d_]{2,}")
_SENTENCE_END = re.compile(r"[.!?](?:\s|$)")
_SENTENCE_WORDS = 3
_MANY_WORDS = 8  # a sentence even where it has no end
_WRAPPER = re.compile(r"\\(?:text|textrm|textbf|mathrm|mathbf|mbox|q?quad|space)(?![a-zA-Z])")


def needs_answer(reward: Reward) -> bool:
    """Returns whether a reward uses its reference answer.

    A function written in Python uses it if its code, or that of the function which it wraps, loads
    the argument; one that takes lists as `**columns`, if its code names `answers`. Any other
    callable, and a function that takes its arguments as `*args`, is assumed to use it; a server, to
    do without where a row has none.
    """
    reward = plain(reward)
    if isinstance(reward, UrlReward):
        return False
    call, (function, position) = call_of(reward), _function_of(reward)

    def argument(one: Any) -> str:
        """Returns the name of the argument with the answer; '' if it has none."""
        code = getattr(one, "__code__", None)
        if code is None:
            return ""
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if call.takes_lists:
            return "answers" if "answers" in names else ""
        return names[position] if position < code.co_argcount else ""

    function = inspect.unwrap(function, stop=lambda one: bool(argument(one)))
    code, name = getattr(function, "__code__", None), argument(function)
    if call.takes_lists and "answers" not in call.lists:
        return call.takes_all and (code is None or "answers" in _constants(code))
    if code is None or not name:
        return True
    return any(
        name in (loaded if isinstance(loaded, tuple) else (loaded,))
        for loaded in (op.argval for op in dis.get_instructions(code) if "LOAD" in op.opname)
    )


def _function_of(reward: Reward) -> tuple[Any, int]:
    """The function that a reward calls, and the position of the answer among its arguments."""
    position = _ANSWER_POSITION
    while isinstance(reward, functools.partial):
        position, reward = position + len(reward.args), reward.func
    if not inspect.isroutine(reward) and not inspect.isclass(reward):
        position, reward = position + 1, type(reward).__call__
    return reward, position + inspect.ismethod(reward)


def _constants(code: types.CodeType) -> set[Any]:
    """The constants of code and of the functions in it."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_consts).union(*map(_constants, inner))


def can_read(reward: Reward, answer: str) -> bool:
    r"""Returns whether a reward can compare completions with a reference answer.

    The rewards that compare numbers need a number in the answer. `math_answer` needs an expression:
    an empty box and sentences without a box are none. Neither reads a solution that ends in `####`
    without a number. Every other reward takes any text.
    Example: `math_answer` reads `\frac{1}{2}` and `no solution`, not `Let x = 2. Then it holds.`
    """
    reward = plain(reward)
    if reward not in (*_NUMBERS, functions.math_answer):
        return True
    if answer.endswith("####"):
        return False
    if reward in _NUMBERS:
        return marked_number(answer) is not None
    boxed = last_boxed(answer)
    if boxed is None and is_prose(answer):
        return False
    content = _WRAPPER.sub("", answer if boxed is None else boxed)
    return bool(content.strip("\\{}$.,:;?! \t\n"))


def is_prose(text: str) -> bool:
    """Returns whether a text has a sentence of three words, or eight words: no short answer."""
    plain = _LATEX_COMMAND.sub(" ", text)
    words = len(_WORD.findall(plain))
    ends = _SENTENCE_END.search(plain) is not None
    return words >= (_SENTENCE_WORDS if ends else _MANY_WORDS)
