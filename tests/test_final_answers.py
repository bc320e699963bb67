"""Which answer of a completion counts, and which answers and rewards are equal.

Generator of the oracles, TRL, lm-eval and math-verify: golden/make_peer_answers.py.
"""

import json
import pathlib

import numpy as np
import pytest
from tiny_run import write_tiny

from qerl_jax.data.prompts import Problem, encode_prompts
from qerl_jax.evaluation.summary import format_table, task_figures
from qerl_jax.evaluation.tasks import extracted_answer, same_answer
from qerl_jax.rewards import functions
from qerl_jax.rewards import score as scoring
from qerl_jax.rewards.answers import answer_part
from qerl_jax.rl.advantages import gdpo_advantages, group_advantages
from qerl_jax.weights.load import load

PEERS = json.loads((pathlib.Path(__file__).parent / "golden" / "peer_answers.json").read_text())
REWARDS = "qerl_jax.rewards.functions:"
OPENED = "<|assistant|><think>\n"


def ids(entries):
    return range(len(entries))


# --- Reasoning ------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", PEERS["completions"], ids=ids(PEERS["completions"]))
@pytest.mark.parametrize("prompt", ["", OPENED])
def test_the_answer_follows_the_reasoning_as_in_trl_and_lm_eval(case, prompt):
    found = answer_part(prompt, case["completion"])
    # lm-eval takes a completion that was cut off for an answer, TRL does not.
    assert found.strip() == (case["lm_eval"] if "</think>" in case["completion"] else "")
    reward = functions.math_answer(prompt, case["completion"], case["answer"], 9, True)
    assert reward == case["trl"]


@pytest.mark.parametrize(
    ("prompt", "completion", "answer"),
    [
        ("", r"\boxed{5}", r"\boxed{5}"),
        (OPENED, r"Maybe \boxed{5}", ""),
        (OPENED, r"Maybe \boxed{5}</think> 6", " 6"),
        (OPENED, r"<think>Maybe \boxed{5}", ""),
        ("<think>\n\n</think>\n\n", r"\boxed{5}", r"\boxed{5}"),  # Qwen3 without reasoning
        ("Write <think> first. <assistant>", r"\boxed{5}", r"\boxed{5}"),
        ("", "<think>a</think> 6 <think>7", " 6 "),
        ("", "6 <think>7", ""),
        ("", "<think>a</think> 6, and </think> ends it", " 6, and </think> ends it"),
        (OPENED, "a</think> 6, and </think> ends it", " 6, and </think> ends it"),
        ("", "<think>a</think>\n</think> 6", " 6"),
        ("", "<think>a</think> 6 <think>b</think> 7 </think>", " 7 </think>"),
    ],
)
def test_reasoning_that_is_not_closed_is_no_answer(prompt, completion, answer):
    assert answer_part(prompt, completion) == answer


@pytest.mark.parametrize("name", ["numeric_answer", "boxed_answer", "math_answer", "exact_answer"])
def test_no_scorer_reads_a_draft(name):
    scorer = getattr(functions, name)
    extracted = lambda text, prompt="": extracted_answer(text, REWARDS + name, prompt)  # noqa: E731
    for prompt, text in (
        ("", r"<think>Maybe \boxed{5}? No: check 3 + 4"),
        (OPENED, r"Maybe \boxed{5}? No: check 3 + 4"),
        ("", r"<think>First \boxed{5}. No.</think> I do not know."),
    ):
        assert scorer(prompt, text, "5", 9, False) == 0.0
        assert extracted(text, prompt) in (None, "Idonotknow", "I do not know.")
    final = r"<think>First \boxed{3}.</think> So \boxed{4}."
    assert scorer("", final, "4", 9, True) == 1.0
    assert scorer("", final, "3", 9, True) == 0.0
    assert extracted(final) == "4"


def test_an_answer_may_quote_the_end_of_reasoning():
    text = r"<think>a</think> \boxed{4}, after </think>"
    assert functions.boxed_answer("", text, "4", 9, True) == 1.0
    quoted = "<think>a</think> <answer></think></answer>"
    assert functions.exact_answer("", quoted, "</think>", 9, True) == 1.0


def test_the_other_scorers_and_formats_read_no_draft_either():
    tagged = "<think><answer>3</answer></think> <answer>4</answer>"
    assert functions.tagged_answer("", tagged, "4", 9, True) == 1.0
    assert functions.tagged_answer("", "<think><answer>4</answer>", "4", 9, True) == 0.0
    assert functions.boxed_format("", r"<think>\boxed{4}</think> 4", "4", 9, True) == 0.0
    assert functions.number_only_format("", "<think>2 + 2</think> 4", "4", 9, True) == 1.0
    assert functions.number_only_format(OPENED, "2 + 2</think> 4", "4", 9, True) == 1.0
    assert functions.number_only_format(OPENED, "4", "4", 9, True) == 0.0
    # Without a box the last number counted, also that of the reasoning.
    unmarked = "<think>First \\boxed{3}. No.</think> The answer is $4$."
    assert functions.numeric_answer("", unmarked, "4", 9, True) == 1.0
    assert functions.numeric_answer("", unmarked, "3", 9, True) == 0.0


@pytest.mark.parametrize(
    ("prompt", "completion", "right"),
    [
        (OPENED, "9 + 9 = 18</think> <answer>18</answer>", 1.0),
        ("<|assistant|>", "9 + 9 = 18</think> <answer>18</answer>", 0.0),
        (OPENED, "<think>9 + 9 = 18</think> <answer>18</answer>", 0.0),  # opened twice
        (OPENED, "9 + 9 = 18</think> so <answer>18</answer>", 0.0),
        ("Write <think> first.", "<think>a</think> <answer>18</answer>", 1.0),
    ],
)
def test_the_prompt_may_open_the_reasoning(prompt, completion, right):
    assert functions.think_format(prompt, completion, "18", 9, True) == right


def test_the_prompt_that_a_reward_gets_ends_as_its_template(tmp_path):
    tiny = write_tiny(tmp_path, tmp_path / "cache")
    settings = json.loads((tiny.model / "tokenizer_config.json").read_text())
    settings["chat_template"] += "{% if add_generation_prompt %}<think>\n{% endif %}"
    (tiny.model / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load(str(tiny.model)).tokenizer
    (prompt,) = encode_prompts([Problem("t3", "18")], tokenizer, max_prompt_tokens=99)
    rewards = {name: (getattr(functions, name), 1.0) for name in ("think_format", "numeric_answer")}
    texts = ["9</think> <answer>18</answer>", r"Is it \boxed{18}?"]
    scores = scoring.score(
        rewards, [prompt.text] * 2, texts, ["18"] * 2, [9] * 2, [True, False], time_limit=0
    )
    assert scores.parts["think_format"].tolist() == [1.0, 0.0]
    assert scores.parts["numeric_answer"].tolist() == [1.0, 0.0]


# --- Votes and missing scores ---------------------------------------------------------------------


def row(correct, extracted="1", format=None):
    return {
        "correct": correct,
        "format": format,
        "extracted": extracted,
        "finished": True,
        "tokens": 1,
    }


def judged(texts, reference, name="math_answer"):
    scorer = getattr(functions, name)
    return [
        row(bool(scorer("", text, reference, 1, True)), extracted_answer(text, REWARDS + name))
        for text in texts
    ]


def test_answers_in_other_words_are_one_answer():
    halves = [r"\frac{1}{2}", r"\frac12", r"\dfrac{1}{2}", "0.5"]
    texts = [rf"\boxed{{{x}}}" for x in (*halves, "3", "3")]
    assert task_figures([judged(texts, r"\frac{1}{2}")])[0]["maj@6"]["value"] == 1.0
    wrong = judged(texts, "3")
    figures = task_figures([wrong], same_answer(REWARDS + "math_answer"))[0]
    assert figures["maj@6"]["value"] == 0.0
    assert task_figures([wrong])[0]["maj@6"]["value"] == 1.0  # as texts they are four answers


@pytest.mark.parametrize("case", PEERS["pairs"], ids=ids(PEERS["pairs"]))
def test_answers_are_equal_as_for_math_verify(case):
    first, second = case["answers"]
    assert same_answer(REWARDS + "math_answer")(second, first) == case["equal"]
    assert same_answer("other:judge")(second, first) == (first == second)


def test_answers_that_cannot_be_compared_are_apart():
    same = same_answer(REWARDS + "math_answer")
    assert not same("A# B#", "A#")
    assert same("A# B#", "A# B#")
    assert same_answer(REWARDS + "numeric_answer")("0.33333333", "0.3333333")
    assert not same_answer(REWARDS + "numeric_answer")("0.34", "0.33")


def test_missing_scores_are_neither_right_nor_wrong():
    figures, values = task_figures([[row(True)] for _ in range(5)] + [[row(None)]] * 5)
    assert figures["accuracy"]["value"] == 1.0
    assert (figures["problems"], figures["not_judged"]) == (10, 5)
    assert np.isnan(values).sum() == 5
    # The interval is that of five problems.
    assert figures["accuracy"] == task_figures([[row(True)]] * 5)[0]["accuracy"]
    assert "without a score" in format_table([("", "task", figures)])


def test_missing_scores_of_samples_and_formats():
    rows = [
        [row(True, "1", True), row(None, "2", None), row(None, "2", None)],
        [row(False, "3", False), row(True, "1", True), row(True, "1", None)],
    ]
    figures, values = task_figures(rows)
    assert values.tolist() == [1.0, 2 / 3]
    assert figures["maj@3"]["value"] == 1.0
    assert figures["pass@2"]["value"] == 1.0  # of the second problem, the first has one score
    assert figures["format"]["value"] == 0.75
    figures, _ = task_figures([[row(None)]])
    assert figures["accuracy"] == {"value": None, "low": None, "high": None}
    assert json.dumps(figures, allow_nan=False)
    assert " - " in format_table([("", "task", figures)])


def test_a_table_leaves_out_figures_until_it_fits():
    figures = [task_figures([[row(right, "1", True)] * 2] * 9)[0] for right in (True, False)]
    figures[1]["difference"] = {"value": -1.0, "low": -1.0, "high": -1.0}
    rows = [("base", "task", figures[0]), ("adapter", "task", figures[1])]
    whole = format_table(rows)
    assert format_table(rows, len(max(whole.splitlines(), key=len))) == whole
    titles = [format_table(rows, columns).splitlines()[0].split() for columns in (110, 80, 50, 9)]
    assert titles == [
        ["problems", "avg@2", "pass@2", "difference"],
        ["problems", "avg@2", "difference"],
        ["avg@2"],
        ["avg@2"],
    ]
    for columns in (110, 80, 50):
        assert max(map(len, format_table(rows, columns).splitlines())) <= columns


# --- Equal rewards --------------------------------------------------------------------------------


@pytest.mark.parametrize("case", PEERS["groups"], ids=ids(PEERS["groups"]))
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_rewards_are_equal_as_for_trl(case, scale):
    rewards = np.array([case["rewards"], [0.0, 1.0, 2.0, 3.0]])
    advantages = group_advantages(rewards, scale=scale, eps=0.0)
    assert advantages[0].any() != case["equal"]
    assert advantages[1].any()


@pytest.mark.parametrize("eps", [0.0, 1e-4])
def test_sums_that_are_equal_up_to_rounding_are_equal(eps):
    table = {"a": [1.0, 0, 1, 0], "b": [0.0, 1, 0, 1], "c": [0.0, 1, 0, 1]}  # 0.3 = 0.1 + 0.2
    weights = {"a": 0.3, "b": 0.1, "c": 0.2}
    read = lambda name: lambda p, completion, a, n, f: table[name][int(completion)]  # noqa: E731
    scores = scoring.score(
        {name: (read(name), weight) for name, weight in weights.items()},
        ["p"] * 4,
        list("0123"),
        ["a"] * 4,
        [1] * 4,
        [True] * 4,
        time_limit=1,
    )
    assert scores.total.max() > scores.total.min()
    assert not group_advantages(scores.total[None], eps=eps).any()
    parts = {name: np.array([values, [0.0, 1, 2, 3]]) for name, values in table.items()}
    advantages = gdpo_advantages(parts, weights, eps=eps)
    assert not advantages[0].any()
    assert advantages[1].any()
