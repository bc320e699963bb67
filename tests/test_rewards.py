"""Rewards: reading and comparing answers, and surviving rewards that misbehave."""

import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from decimal import Decimal

import numpy as np
import pytest

from qerl_jax.errors import UserError
from qerl_jax.rewards import answers, calls, functions
from qerl_jax.rewards import score as scoring


def call(reward, completion, answer="18"):
    return reward("question", completion, answer, 5, True)


def score(functions, count=1, time_limit=0.2):
    texts = ["text"] * count
    named = {name: (function, 1.0) for name, function in functions.items()}
    return scoring.score(
        named, texts, texts, texts, [3] * count, [True] * count, time_limit=time_limit
    )


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("18", "18"),
        ("-3", "-3"),
        ("\u22123", "-3"),
        ("+5", "5"),
        ("3.50", "3.5"),
        (".5", "0.5"),
        ("1,000", "1000"),
        ("1{,}000", "1000"),
        (r"1,\!000", "1000"),
        ("12,345,678.9", "12345678.9"),
        ("1,00,000", "100000"),  # the groups of India
        ("12,34,567.8", "1234567.8"),
        ("1,0000", "10000"),  # the groups of China and Japan
        ("1,2,3", "3"),
        ("-1,2", "2"),
        ("3, 4", "4"),
        ("$18", "18"),
        (r"\$18", "18"),
        ("-$18", "-18"),
        ("$-18", "-18"),
        ("18 dollars", "18"),
        ("5%", "5"),
        ("It is 18.", "18"),
        ("18.\n", "18"),
        ("1.5e3", "1500"),
        ("5-3", "3"),
        ("10 - 3 = 7", "7"),
        ("4 - 7 = -3", "-3"),
        ("48/2 = 24", "24"),
        ("1/2", None),
        (r"\frac{1}{2}", None),
        (r"\frac12", None),
        (r"\dfrac{1+\sqrt{5}}{2}", None),
        (r"\tfrac\pi2", None),
        (r"{x \over 2}", None),
        ("It is H2O", None),
        ("AZYUK2A", None),
        ("an area of 18 m2", "18"),
        ("12x12 = 144", "144"),
        (r"6\times3", "3"),
        ("", None),
        ("none", None),
        ("9" * 10_000, "9" * 10_000),
    ],
)
def test_last_number(text, number):
    assert answers.last_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("18", "18"),
        ("12 500", "12500"),
        (r"1\ 000", "1000"),
        ("1~000", "1000"),
        ("-1 234 567.5 dollars", "-1234567.5"),
        ("1\u202f000", "1000"),
        (r"1\;000", "1000"),
        ("1 00", None),  # a list
        ("x = 18", "18"),
        ("18 = x", "18"),
        (r"3 \times 6 = 18", "18"),
        (r"\approx 18", "18"),
        (r"18 \text{ m}^2", "18"),
        (r"18\ \mathrm{cm}^{3}", "18"),
        ("18 m/s^2", "18"),
        (r"18^\circ", "18"),
        (r"18\%", "18"),
        (r"\mathbf{18}", "18"),
        (r"\left(18\right)", "18"),
        ("- 18", "-18"),
        ("**18**", "18"),
        ("Answer: 18", "18"),
        ("5 apples and 3 pears are 8", "8"),
        ("It costs $18/hour (18 dollars an hour)", "18"),
        (r"\frac{\sqrt{3}}{2}", None),
        (r"\sqrt{5}", None),
        (r"2\pi", None),
        (r"\pi/2", None),
        (r"\log_2 8", None),
        ("x^2", None),
        ("2^{10}", None),
        ("x + 2", None),
        ("2x", None),
        ("2(x+1)", None),
        ("f(2)", None),
        ("10-3", None),
        ("10\u20133", None),
        ("5*10**3", None),
        ("3!+2", None),
        ("4!", None),
        ("5\u00b2", None),
        ("18 cm\u00b2", "18"),
        ("2i", None),
        ("2e", None),
        ("18 e-mails", "18"),
        ("3:4", None),
        (r"\pm 2", None),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", None),
        (r"2\frac{1}{2}", None),
        ("3, 5", None),
        ("3,5", None),
        (r"2 \text{ and } 3", None),
        ("(1, 2)", None),
        ("x = 2, y = 3", None),
        ("H2O", None),
        ("", None),
    ],
)
def test_marked_number(text, number):
    assert answers.marked_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("text", "boxed", "tagged", "marked"),
    [
        ("", None, None, None),
        (r"\boxed{18}", "18", None, "18"),
        (r"\boxed {18}", "18", None, "18"),
        (r"first \boxed{1}, then \boxed{2}", "2", None, "2"),
        (r"First part \boxed{3}. Second part \boxed{4}.", "4", None, "4"),
        (r"\boxed{0}. \boxed{1} and \boxed{-2}", "1, -2", None, "1, -2"),
        (r"$x=\boxed{2}$ or $x=\boxed{-2}$", "2, -2", None, "2, -2"),
        (r"\boxed{3}, \boxed{5}, \text{and } \boxed{7}.", "3, 5, 7", None, "3, 5, 7"),
        ("\\[\\boxed{18}\\]\n\n$$\\boxed{18}$$", "18", None, "18"),
        (r"\boxed{1} \boxed{}", "", None, ""),
        (r"\fbox{8}", "8", None, "8"),
        (r"\fbox{7} \boxed{8} \fbox{9}", "8", None, "8"),
        (r"so $x = \boxed 8$.", "8", None, "8"),
        (r"$\boxed 5\sqrt 2$, as", r"5\sqrt 2", None, r"5\sqrt 2"),
        (r"\boxed -8. It", "-8", None, "-8"),
        (r"\(\fbox\frac{1}{2}\)", r"\frac{1}{2}", None, r"\frac{1}{2}"),
        (r"use a \boxed answer", None, None, None),
        (r"\boxed{a \boxed{3}}", r"a \boxed{3}", None, r"a \boxed{3}"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", None, r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}", None, r"\{1, 2\}"),
        (r"\boxed{1} \boxed{2", "1", None, "1"),
        (r"\boxed{ {5 }", None, None, None),
        ("} } \\boxed{7} {", "7", None, "7"),
        (r"\boxed{}", "", None, ""),
        ("<answer>18</answer>", None, "18", "18"),
        ("<answer>1</answer><answer> 2 </answer>", None, " 2 ", " 2 "),
        ("<answer>1<answer>2</answer>", None, "2", "2"),
        ("<answer>18", None, None, None),
        ("18</answer>", None, None, None),
        (r"\boxed{1} <answer>2</answer>", "1", "2", "2"),
        (r"<answer>2</answer> \boxed{1}", "1", "2", "1"),
        (r"<answer>\boxed{3}</answer>", "3", r"\boxed{3}", "3"),
    ],
)
def test_marks(text, boxed, tagged, marked):
    assert answers.last_boxed(text) == boxed
    assert answers.last_tagged(text) == tagged
    assert answers.last_marked(text) == marked


@pytest.mark.parametrize(
    ("completion", "answer", "numeric", "tag", "box"),
    [
        ("", "18", 0, 0, 0),
        ("18", "18", 1, 0, 0),
        ("1999", "18", 0, 0, 0),
        ("<answer>1999</answer>", "18", 0, 0, 0),
        ("18", "1999", 0, 0, 0),
        ("3 * 6 = 18 dollars.", "18", 1, 0, 0),
        ("<think>9+9</think> <answer>$18</answer> 7", "18", 1, 1, 0),
        (r"first 7, so \boxed{18}.", "18", 1, 0, 1),
        (r"I count 18. \boxed{1999}", "18", 0, 0, 0),
        (r"\boxed{18} or \boxed{19}", "18", 0, 0, 0),
        (r"\boxed{1{,}000}", "1,000", 1, 0, 1),
        (r"\boxed{1} or \boxed{18}", "18", 0, 0, 0),
        (r"\fbox{18} of 20", "18", 1, 0, 1),
        (r"$\boxed 18$ of 20", "18", 1, 0, 1),
        (r"\boxed{\boxed{18}}", "18", 1, 0, 1),
        (r"<answer>12 500</answer>", "12,500", 1, 1, 0),
        ("#### 1~000", "1000", 1, 0, 0),
        (r"\boxed{\frac{1+\sqrt{5}}{2}}", "2", 0, 0, 0),
        ("H2O", "2", 0, 0, 0),
        ("It costs 1,00,000 rupees.", "100000", 1, 0, 0),
        (r"\boxed{}  18", "18", 0, 0, 0),
        (r"\boxed{18", "18", 1, 0, 0),
        ("9 + 9\n#### 18\nand 3 more", "18", 1, 0, 0),
        ("#### 1,000", "1000", 1, 0, 0),
        ("18.0000001", "18", 1, 0, 0),
        ("18.00001", "18", 0, 0, 0),
        ("1234567891", "1234567890", 0, 0, 0),
        ("-3", "3", 0, 0, 0),
        ("<answer>\u22123.0</answer>", "-3", 1, 1, 0),
        ("<answer>1/18</answer>", "18", 0, 0, 0),
        ("1" * 10_000, "1" * 10_000, 1, 0, 0),
        ("1" * 9_999 + "2", "1" * 10_000, 0, 0, 0),
        ("1e999", "18", 0, 0, 0),
        ("<answer>3.1e-9</answer>", "3.1e-10", 0, 0, 0),
        (r"\boxed{3.1e-10}", "3.1e-10", 1, 0, 1),
        (r"\boxed{0.00000000031}", "3.1e-10", 1, 0, 1),
        ("0", "5e-20", 0, 0, 0),
        ("5e-20", "0", 0, 0, 0),
        ("-3e-9", "3e-9", 0, 0, 0),
        ("0.0001235", "0.0001234", 0, 0, 0),
        ("0.000012345001", "0.000012345", 1, 0, 0),
        ("0.166667", "0.16666666667", 1, 0, 0),
        ("0.016667", "0.01666666667", 1, 0, 0),
        ("9007199254740993", "9007199254740992", 0, 0, 0),
        ("-0", "0", 1, 0, 0),
    ],
)
def test_numeric_rewards(completion, answer, numeric, tag, box):
    assert call(functions.numeric_answer, completion, answer) == numeric
    assert call(functions.tagged_answer, completion, answer) == tag
    assert call(functions.boxed_answer, completion, answer) == box


def test_numeric_reward_needs_a_numeric_answer():
    with pytest.raises(ValueError, match="'yes' is not a number: use exact_answer"):
        call(functions.numeric_answer, "18", "yes")


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        (" yes\n", 1),
        ("Yes", 0),
        ("yes, it is", 0),
        ("", 0),
        ("I say <answer> yes </answer>", 1),
        (r"no \boxed{yes}", 1),
        ("yes <answer>no</answer>", 0),
    ],
)
def test_exact_answer(completion, value):
    assert call(functions.exact_answer, completion, "yes") == value


@pytest.mark.parametrize(
    ("completion", "finished", "whole", "equation"),
    [
        (" 3 + 4 = 7\n", True, 1, 1),
        ("3 + 4 = 7", False, 0, 0),
        ("3 + 4 = 8", True, 0, 1),
        ("4 + 3 = 7", True, 0, 1),
        ("3 * 4.5 - 1 = 12.5", True, 0, 1),
        ("3 + 4 = 7.", True, 0, 0),
        ("3 + 4 = 7\n7", True, 0, 0),
        ("x = 7", True, 0, 0),
        ("7", True, 0, 0),
        ("<answer>3 + 4 = 7</answer>", True, 0, 0),
        ("<think>7</think> 3 + 4 = 7", True, 1, 1),
    ],
)
def test_the_whole_answer_in_the_asked_form(completion, finished, whole, equation):
    arguments = ("", completion, "3 + 4 = 7", 9, finished)
    assert functions.whole_answer(*arguments) == whole
    assert functions.equation_format(*arguments) == equation


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [
        (r"\boxed{\frac{1}{2}}", "0.5", 1),
        ("<answer>1/2</answer>", "0.5", 1),
        ("<answer>42</answer>", "42", 1),
        ("<answer>$42$.</answer>", "42", 1),
        ("<answer>1,000</answer>", "1000", 1),
        (r"\boxed{025}", "25", 1),
        (r"\boxed{41}. \boxed{42}", "42", 1),
        (r"\boxed{41} \boxed{42}", "42", 0),
        (r"$x=\boxed{2}$ or $x=\boxed{-2}$", r"\pm 2", 1),
        (r"\boxed{1} and \boxed{-2}", "1,-2", 1),
        (r"\boxed{3}, \boxed{5}, \boxed{7}", "7", 0),
        (r"\boxed{12 500}", "12500", 1),
        (r"\boxed{1\ 000}", "1000", 1),
        (r"\boxed{1,00,000}", "100000", 1),
        (r"\boxed{12500x}", "12\\ 500x", 1),
        (r"\boxed{\frac12}", "0.5", 1),
        (r"\fbox{8}", "8", 1),
        (r"\boxed 8", "8", 1),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}.", 1),
        (r"\boxed{42} \boxed{41}", "42", 0),
        (r"\boxed{\left(3, \frac{\pi}{2}\right)}", r"\left( 3, \frac{\pi}{2} \right)", 1),
        (r"\boxed{(3,\pi/2)}", r"\left( 3, \frac{\pi}{2} \right)", 1),
        (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}", 1),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", 1),
        ("It is $0.5$.", r"\frac{1}{2}", 1),
        ("The answer is 41.", "42", 0),
        (r"\boxed{1999}", "18", 0),
        (r"\boxed{}", "0", 0),
        (r"\boxed{42", "42", 0),
        ("", "42", 0),
    ],
)
def test_math_answer(completion, answer, value):
    assert call(functions.math_answer, completion, answer) == value


@pytest.mark.parametrize("answer", ["", "???", "x^2+"])
@pytest.mark.parametrize("completion", [r"\boxed{7}", "7", r"\boxed{???}"])
def test_math_answer_is_missing_where_the_reference_cannot_be_read(completion, answer):
    named = {"correctness": (functions.math_answer, 1.0)}
    scores = scoring.score(named, [""], [completion], [answer], [3], [True], time_limit=0)
    assert np.isnan(scores.total).all()
    (line,) = scores.errors
    assert f"math-verify cannot read the answer {answer!r}: use exact_answer" in line


@pytest.mark.parametrize(
    ("completion", "think", "boxed", "number_only"),
    [
        ("", 0, 0, 0),
        ("<think>a\nb</think> <answer>18</answer>\n", 1, 0, 0),
        ("<think></think><answer></answer>", 1, 0, 0),
        ("so <think>a</think><answer>18</answer>", 0, 0, 0),
        ("<think>a</think> so <answer>18</answer>", 0, 0, 0),
        ("<think>a</think><answer>18</answer> ok", 0, 0, 0),
        ("<think>a</think><answer>1</answer><answer>18</answer>", 0, 0, 0),
        ("<answer>18</answer><think>a</think>", 0, 0, 0),
        ("<think>a<answer>18</answer>", 0, 0, 0),
        (r"It is \boxed{18}.", 0, 1, 0),
        (r"\boxed{ }", 0, 0, 0),
        (r"\boxed{18", 0, 0, 0),
        (" -1,000.5 ", 0, 0, 1),
        ("18", 0, 0, 1),
        ("It is 18", 0, 0, 0),
        ("18 19", 0, 0, 0),
        ("1/2", 0, 0, 0),
    ],
)
def test_formats(completion, think, boxed, number_only):
    assert call(functions.think_format, completion) == think
    assert call(functions.boxed_format, completion) == boxed
    assert call(functions.number_only_format, completion) == number_only


@pytest.mark.parametrize(
    ("num_tokens", "penalty"),
    [(0, 0.0), (79, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (101, -1.0)],
)
def test_overlong_penalty_is_dapo_equation_13(num_tokens, penalty):
    assert functions.overlong_penalty(num_tokens, 100, 20) == pytest.approx(penalty, abs=1e-12)


def test_overlong_penalty_without_buffer():
    assert [functions.overlong_penalty(n, 100, 0) for n in (99, 100, 101)] == [0.0, 0.0, -1.0]


@pytest.mark.parametrize("power", ["9^{9^{9^{9}}}", "99999999!", "(" * 3000 + "1" + ")" * 3000])
def test_math_answer_stays_under_the_time_limit(power):
    start = time.perf_counter()
    named = {"correctness": (functions.math_answer, 1.0)}
    scoring.score(named, [""], [rf"\boxed{{{power}}}"], ["7"], [3], [True], time_limit=0.3)
    assert time.perf_counter() - start < 3


def test_scores_are_weighted_sums_of_the_rewards_that_are_present():
    length = lambda prompt, completion, answer, num_tokens, finished: num_tokens  # noqa: E731
    not_for_long = lambda p, c, a, num_tokens, f: None if num_tokens > 2 else True  # noqa: E731
    texts = ["", "", ""]
    scores = scoring.score(
        {"length": (length, 0.5), "short": (not_for_long, 2.0)},
        texts,
        texts,
        texts,
        np.array([1, 2, 3]),
        np.array([True, True, False]),
        time_limit=1.0,
    )
    np.testing.assert_array_equal(scores.total, [2.5, 3.0, 1.5])
    np.testing.assert_array_equal(scores.parts["length"], [1.0, 2.0, 3.0])
    np.testing.assert_array_equal(scores.parts["short"], [1.0, 1.0, np.nan])
    assert scores.total.dtype == np.float64
    assert scores.errors == []


def test_arguments_reach_the_reward():
    seen = []
    named = {"spy": (lambda *arguments: seen.append(arguments), 1.0)}
    scores = scoring.score(
        named, ["p"], ["c"], ["a"], np.array([7]), np.array([False]), time_limit=1.0
    )
    assert seen == [("p", "c", "a", 7, False)]
    assert math.isnan(scores.total[0])


def spin(*_):
    while True:
        pass


def spin_and_catch(*_):
    while True:
        with contextlib.suppress(Exception):
            time.sleep(1)


def sleep(*_):
    time.sleep(30)


def backtrack(*_):
    return float(re.match(r"(a+)+$", "a" * 40 + "b") is not None)


@pytest.mark.parametrize("reward", [spin, spin_and_catch, sleep, backtrack])
def test_time_limit_interrupts(reward):
    start = time.perf_counter()
    scores = score({"slow": reward}, count=2, time_limit=0.1)
    assert time.perf_counter() - start < 2
    assert np.isnan(scores.total).all()
    assert scores.errors == [
        "reward 'slow' is missing for 2 of 2 completions: exceeded the time limit of 0.1 s"
    ]


def test_time_limit_restores_the_handler_and_the_timer():
    fired = []
    before = signal.signal(signal.SIGALRM, lambda *_: fired.append(True))
    outer = signal.setitimer(signal.ITIMER_REAL, 50)
    try:
        handler = signal.getsignal(signal.SIGALRM)
        score({"slow": sleep, "fine": lambda *_: 1.0}, time_limit=0.05)
        assert signal.getsignal(signal.SIGALRM) is handler
        assert 40 < signal.getitimer(signal.ITIMER_REAL)[0] <= 50
    finally:
        signal.setitimer(signal.ITIMER_REAL, *outer)
        signal.signal(signal.SIGALRM, before)
    assert fired == []


def test_outside_the_main_thread_there_is_no_limit():
    results = []
    slow = lambda *_: time.sleep(0.1) or 1.0  # noqa: E731
    thread = threading.Thread(target=lambda: results.append(score({"r": slow}, time_limit=0.02)))
    thread.start()
    thread.join()
    assert results[0].total.tolist() == [1.0]


def fail(*_):
    raise RuntimeError("no verdict\nsecond line")


def leave(*_):
    sys.exit(3)


def test_the_working_directory_stays(tmp_path, monkeypatch):
    def leaves(*_):
        os.chdir("/")
        return 1.0

    monkeypatch.chdir(tmp_path)
    assert score({"r": leaves}, count=1).errors == []
    assert os.getcwd() == str(tmp_path)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (fail, "RuntimeError: no verdict (test_rewards.py:"),
        (leave, "SystemExit: 3 (test_rewards.py:"),
        (lambda *_: float("nan"), "ValueError: it returned nan"),
        (lambda *_: float("inf"), "ValueError: it returned inf"),
        (lambda *_: -1e300, "ValueError: it returned -1e+300"),
        (lambda *_: "1.0", "TypeError: it returned the text '1.0'; a reward is a number"),
        (lambda: 1.0, "TypeError"),
    ],
)
def test_failures_are_missing_and_reported_once(reward, message):
    scores = score({"bad": reward, "good": lambda *_: 1.0}, count=3)
    assert np.isnan(scores.parts["bad"]).all()
    assert scores.parts["good"].tolist() == [1.0, 1.0, 1.0]
    assert np.isnan(scores.total).all()
    (line,) = scores.errors
    assert line.startswith("reward 'bad' is missing for 3 of 3 completions: " + message)
    assert "\n" not in line


def test_a_completion_without_a_reward_that_failed_has_no_total():
    def fails_once(prompt, completion, answer, num_tokens, finished):
        return 1 / num_tokens

    def applies_once(prompt, completion, answer, num_tokens, finished):
        return None if num_tokens else 5.0

    rewards = {"r": (fails_once, 1.0), "s": (applies_once, 1.0), "t": (lambda *_: 2.0, 1.0)}
    texts = ["x"] * 3
    scores = scoring.score(rewards, texts, texts, texts, [1, 0, 2], [True] * 3)
    assert scores.total.tolist()[::2] == [3.0, 2.5]
    assert np.isnan(scores.total[1])
    # Nor does it take part where advantages are made of the single rewards.
    (group,) = scores.parts_of_groups(3)["t"]
    assert group[::2].tolist() == [2.0, 2.0]
    assert np.isnan(group[1])
    rewards["r"] = (fails_once, 0.0)  # only logged
    scores = scoring.score(rewards, texts, texts, texts, [1, 0, 2], [True] * 3)
    assert scores.total.tolist() == [2.0, 7.0, 2.0]


def test_keyboard_interrupt_passes_through():
    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score({"r": interrupt})


def test_unequal_lengths_are_refused():
    named = {"r": (functions.numeric_answer, 1.0)}
    with pytest.raises(UserError, match=r"1 .*2|2 .*1"):
        scoring.score(named, ["p"], ["c", "c"], ["1"], [1], [True], time_limit=1.0)


@pytest.mark.parametrize(
    "name",
    [
        "numeric_answer",
        "tagged_answer",
        "boxed_answer",
        "exact_answer",
        "whole_answer",
        "math_answer",
        "think_format",
        "boxed_format",
        "number_only_format",
        "equation_format",
    ],
)
def test_resolve_built_in(name):
    assert calls.resolve(f"qerl_jax.rewards.functions:{name}") is getattr(functions, name)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("numeric_answer", "write it as package.module:function"),
        ("qerl_jax.rewards.functions:", "write it as package.module:function"),
        ("qerl_jax.rl.missing:f", "cannot import qerl_jax.rl.missing: ModuleNotFoundError"),
        ("qerl_jax.rewards.functions:nothing", "has no function 'nothing'"),
        (
            "qerl_jax.rewards.functions:overlong_penalty",
            "it must take (prompt, completion, answer,",
        ),
    ],
)
def test_resolve_names_what_is_missing(path, message):
    with pytest.raises(UserError, match=re.escape(message)):
        calls.resolve(path)


def test_import_is_light():
    heavy = {"jax", "math_verify", "sympy", "httpx2"}
    code = f"import sys, qerl_jax.rewards.score; print({heavy} & set(sys.modules))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert output.stdout.strip() == "set()"
