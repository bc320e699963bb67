r"""A second scorer: lm-evaluation-harness on the same completions of GSM8K.

On real completions of a model, its `flexible-extract` and `numeric_answer` agree; every difference
on the invented texts has a reason below. `strict-match` reads only the text after `####`, which a
base model writes after few-shot prompting; a chat model is not asked for it.
"""

import json
import pathlib

import pytest

from qerl_jax.rewards.functions import numeric_answer

GOLDEN = pathlib.Path(__file__).parent / "golden" / "lm_eval_gsm8k.json"
REAL = 56

# (completion, answer) -> whether `numeric_answer` accepts it; flexible-extract says the opposite.
FLEXIBLE_DIFFERS = {
    "it compares numbers, the harness compares texts": {
        ("It costs $18.00", "18"): True,
        ("#### 18.0", "18"): True,
        (r"\boxed{18.00}", "18"): True,
        ("The answer is .5", "0.5"): True,
        ("The answer is 007", "7"): True,
    },
    "it reads more notations of a number": {
        ("It is 2e3", "2000"): True,
        (r"\boxed{1{,}018}", "1018"): True,
        (r"\boxed{1\,018}", "1018"): True,
        ("It is 18..", "18"): True,
        (r"\boxed{12 500}", "12500"): True,
        (r"\boxed{12 500}", "500"): False,
        (r"\boxed{1\ 000}", "1000"): True,
        ("<answer>1~000</answer>", "1000"): True,
        ("Minus: \u22123", "-3"): True,
    },
    "commas that separate no groups of digits list numbers": {
        ("1,2,3", "3"): True,
        ("1,2,3", "123"): False,
        ("They are 12,13", "13"): True,
        ("They are 12,13", "1213"): False,
        (r"\boxed{3,5,7}", "357"): False,
    },
    "a marked list is no number": {
        (r"\boxed{3}, \boxed{5}, \boxed{7}", "7"): False,
        (r"\boxed{3, 5}", "5"): False,
    },
    "the last number of a marked expression is not its value": {
        (r"\boxed{x + 2}", "2"): False,
        (r"\boxed{2^{10}}", "10"): False,
        (r"\boxed{3 \times 6}", "6"): False,
    },
    "a digit in a unit or in a word is no number": {
        (r"\boxed{18 \text{ m}^2}", "18"): True,
        (r"\boxed{18 m2}", "18"): True,
        ("It is H2O", "2"): False,
        ("The code is AZYUK2A", "2"): False,
    },
    "a marked answer counts more than the text after it": {
        (r"\fbox{8} of 9", "8"): True,
        (r"$\boxed 8$ of 9", "8"): True,
        (r"\boxed{18} eggs in 2 days.", "18"): True,
        ("#### 18\nWhat are 2 and 3?", "18"): True,
        ("<answer>18</answer> in 2 days", "18"): True,
    },
    "a mark without a number is wrong": {
        (r"\boxed{eighteen}, that is 18", "18"): False,
    },
    "a minus between numbers is not a sign": {
        ("It is 5-3", "-3"): False,
        ("It is 5-3", "3"): True,
    },
    "the denominator is not the value of a fraction": {
        ("It is 1/2", "2"): False,
        (r"\boxed{\frac{1}{2}}", "2"): False,
        (r"\boxed{\frac{1+\sqrt{5}}{2}}", "2"): False,
        (r"\boxed{\cfrac{7}{2}}", "2"): False,
        (r"\boxed{7 \over 2}", "2"): False,
        (r"\boxed{\frac12}", "12"): False,
    },
}
# (completion, answer) -> whether `numeric_answer` accepts it; strict-match says the opposite. Each
# completion has a `####`.
STRICT_DIFFERS = {
    "it compares numbers, the harness compares texts": {
        ("#### 18.0", "18"): True,
    },
    "the last mark counts, in the harness the first": {
        ("#### 17\nNo: #### 18", "18"): True,
        ("#### 18\nNo: #### 17", "18"): False,
    },
    "the harness wants a bare number after a space": {
        ("#### $18", "18"): True,
        ("####18", "18"): True,
        ("#### The answer is 18", "18"): True,
    },
}


@pytest.fixture(scope="module")
def entries():
    found = json.loads(GOLDEN.read_text(encoding="utf-8"))
    for entry in found:
        entry["ours"] = numeric_answer("", entry["completion"], entry["answer"], 0, True) == 1.0
    return found


def differences(entries, name):
    return {
        (entry["completion"], entry["answer"]): entry["ours"]
        for entry in entries
        if entry["ours"] != entry[name]
    }


def merged(reasons):
    return {place: ours for places in reasons.values() for place, ours in places.items()}


def test_the_entries_cover_every_combination(entries):
    assert len({(entry["completion"], entry["answer"]) for entry in entries}) == len(entries) == 125
    scores = [(entry["strict"], entry["flexible"]) for entry in entries]
    assert {(True, True), (False, True), (False, False)} <= set(scores)
    real = [entry["flexible"] for entry in entries[:REAL]]
    assert 0 < sum(real) < REAL
    assert all(entry["completion"] for entry in entries[:REAL])


def test_flexible_extract_agrees_on_real_completions(entries):
    assert differences(entries[:REAL], "flexible") == {}


def test_differences_from_flexible_extract_are_these(entries):
    assert differences(entries, "flexible") == merged(FLEXIBLE_DIFFERS)


def test_differences_from_strict_match_are_these(entries):
    marked = [entry for entry in entries if "####" in entry["completion"]]
    assert len(marked) > 8
    assert differences(marked, "strict") == merged(STRICT_DIFFERS)


def test_strict_match_needs_the_mark(entries):
    assert not [e for e in entries if e["strict"] and "####" not in e["completion"]]
