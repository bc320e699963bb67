"""How rewards are called: columns, lists, time limits of their own, and rewards that wait."""

import asyncio
import functools
import math
import sys
import threading
import time

import numpy as np
import pytest
from refusal import refused

from qerl_jax.errors import UserError
from qerl_jax.rewards import calls
from qerl_jax.rewards import score as scoring
from qerl_jax.rewards.calls import Timed, call_of
from qerl_jax.rewards.functions import environment_reward
from qerl_jax.rewards.references import needs_answer
from qerl_jax.rewards.scored import Completion
from qerl_jax.rewards.table import table_of

ROWS = [{"question": "q0", "answer": "a b #### 5", "tests": [1, 2]}, {"answer": "6", "tests": [3]}]


def score(reward, rows=ROWS, time_limit=0.5, **options):
    texts = [f"text {index}" for index in range(len(rows))]
    return scoring.score(
        {"r": (reward, 1.0)},
        [f"prompt {index}" for index in range(len(rows))],
        texts,
        [str(index + 5) for index in range(len(rows))],
        np.arange(len(rows)) + 3,
        np.ones(len(rows), bool),
        columns=rows,
        time_limit=time_limit,
        **options,
    )


def wanted(prompt, completion, answer, num_tokens, finished, tests):
    return len(tests) + num_tokens


def with_default(prompt, completion, answer, num_tokens, finished, tests, *, question="none"):
    return float(question == "q0")


def everything(prompt, completion, answer, num_tokens, finished, **columns):
    """The names of arguments are not columns: `answer` is the short answer."""
    assert "answer" not in columns
    return len(columns) + float(answer)


def renamed(p, c, a, n, f, **columns):
    return len(columns)


async def awaited(prompt, completion, answer, num_tokens, finished, tests):
    await asyncio.sleep(0)
    return len(tests)


def lists(completions, answers, tests, finished):
    assert completions == ["text 0", "text 1"]
    assert finished == [True, True]
    return [len(t) + int(a) for t, a in zip(tests, answers, strict=True)]


def of_trl(completions, answer, **columns):
    """As in TRL, `answer` is the raw column; `**columns` holds the rest."""
    assert columns["prompts"] == ["prompt 0", "prompt 1"]
    assert columns["question"] == ["q0", None]
    return [float(text.endswith("5")) for text in answer]


def of_messages(conversations, answers):
    """Without an environment a conversation is the completion alone."""
    assert [one[0]["content"] for one in conversations] == ["text 0", "text 1"]
    return [len(one) + int(a) for one, a in zip(conversations, answers, strict=True)]


async def awaited_lists(prompts, completions):
    return np.array([0.5, 1.5])


@pytest.mark.parametrize(
    ("reward", "values"),
    [
        (wanted, [5, 5]),
        (with_default, [1, 0]),
        (everything, [7, 7]),
        (renamed, [3, 2]),
        (awaited, [2, 1]),
        (lists, [7, 7]),
        (of_trl, [1, 0]),
        (of_messages, [6, 7]),
        (awaited_lists, [0.5, 1.5]),
        (functools.partial(wanted, tests=[]), [3, 4]),
        (Timed(awaited, 2.0), [2, 1]),
    ],
)
def test_columns_reach_the_rewards(reward, values):
    scores = score(reward, [{}, {}] if isinstance(reward, functools.partial) else ROWS)
    assert scores.errors == []
    np.testing.assert_array_equal(scores.total, values)


def test_rows_without_a_needed_column_are_refused_before_training():
    calls.check_columns("r", with_default, ROWS)
    rows = [*ROWS, {"question": "q", "answer": "7"}]
    with pytest.raises(UserError, match=r"'r' takes the argument 'tests', .* 1 of 3 problems lack"):
        calls.check_columns("r", with_default, rows)
    assert calls.columns_read([wanted, lists], ROWS) == {"tests"}
    assert calls.columns_read([everything], ROWS) == {"question", "tests"}


def test_what_only_an_environment_gives_is_refused_without_one():
    words = "'turns', which only a run with an environment gives: set environment.function"
    refused(words, calls.check_columns, "r", lambda conversations, turns: [], ROWS)


@pytest.mark.parametrize(
    "reward",
    [
        lambda completions: [one[0]["content"] for one in completions],
        lambda completions: [one[-1].get("content") for one in completions],
    ],
)
def test_a_reward_that_takes_texts_for_messages_reads_how_to_get_them(reward):
    (error,) = score(reward, ROWS).errors
    assert error.endswith("; completions are texts: messages are the argument conversations")


def test_a_reward_that_changes_messages_changes_its_own():
    turns = [{"role": "assistant", "content": "t"}, {"role": "user", "content": "u"}]
    rewards = {
        "changes": (lambda conversations: [len(one.pop()) for one in conversations], 1.0),
        "reads": (lambda conversations: [len(one) for one in conversations], 1.0),
    }
    with scoring.Scoring(rewards, 1, time_limit=0) as block:
        block.add({0: Completion("p", "t", "", 1, True, {}, turns)})
        assert block.finish().total == [4.0]


@pytest.mark.parametrize("name", ["", "two\nlines", 3])
def test_a_reward_has_a_name_that_can_be_printed(name):
    refused("a reward is named .*: give it a name", table_of, {name: wanted})


def of_environments(environments, **columns):
    return [1.0 for _ in environments]


def by_keyword(completions, **columns):
    return [float(text in columns["answers"]) for text in completions]


def without_them(completions, answers):
    return [float(len(text)) for text in completions]


def configured(limit, prompt, completion, answer, num_tokens, finished, **columns):
    return len(completion) + limit + len(columns)


def wrapped(reward):
    """What a decorator makes of a reward."""

    @functools.wraps(reward)
    def call(*arguments, **columns):
        return reward(*arguments, **columns)

    return call


class Judge:
    """A reward with a state."""

    def __call__(self, prompt, completion, answer, num_tokens, finished, **columns):
        return float(len(columns))

    def by_answer(self, prompt, completion, answer, num_tokens, finished, **columns):
        return float(len(columns) + (completion == answer))

    def of_lists(self, completions, **columns):
        return [float(len(columns))] * len(completions)


@pytest.mark.parametrize(
    ("reward", "needs"),
    [
        (wanted, False),
        (everything, True),
        (lists, True),
        (of_trl, False),
        (of_environments, False),
        (awaited_lists, False),
        (by_keyword, True),
        (without_them, False),
        (functools.partial(configured, 1), False),
        (wrapped(wanted), False),
        (wrapped(everything), True),
        (wrapped(of_environments), False),
        (wrapped(lists), True),
        (Judge(), False),
        (Judge().by_answer, True),
        (Judge().of_lists, False),
        (lambda *arguments: 1.0, True),
        (len, True),
    ],
)
def test_which_rewards_need_a_reference_answer(reward, needs):
    assert needs_answer(reward) is needs
    assert needs_answer(Timed(reward, 1.0)) is needs


@pytest.mark.parametrize(
    "reward", [Judge(), Judge().by_answer, Judge().of_lists, functools.partial(configured, 1)]
)
def test_no_column_has_the_name_of_an_argument_that_is_bound(reward):
    rows = [{"self": 1, "limit": 2, "class": 3}] * 2
    scores = score(reward, rows)
    assert scores.errors == []
    assert not np.isnan(scores.total).any()


@pytest.mark.parametrize(
    ("reward", "column"),
    [
        (lists, "answers"),
        (awaited_lists, "prompts"),
        (of_environments, "environments"),
        (of_messages, "conversations"),
        (environment_reward, "environment_reward"),
    ],
)
def test_a_column_is_not_replaced_by_what_the_run_gives(reward, column):
    rows = [{"tests": [], "question": "q"}]
    calls.check_columns("r", reward, rows, converses=True)
    rows += [{"tests": [], "question": "q", column: "of the row"}]
    words = f"reward 'r' takes the argument '{column}', which the run gives, .* rename the column"
    refused(words, calls.check_columns, "r", reward, rows, converses=True)
    calls.check_columns("r", Judge(), rows, converses=True)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], "ValueError: it returned 1 rewards for 2 completions"),
        (1.0, "TypeError: 'float' object is not iterable"),
        ([1.0, "1"], "TypeError: it returned the text '1'; a reward is a number"),
        ("10", "TypeError: it returned a str, not a list of rewards"),
        ({0: 0.5, 1: 0.7}, "TypeError: it returned a dict, not a list of rewards"),
        ([1.0, math.inf], "ValueError: it returned inf"),
    ],
)
def test_bad_lists_are_missing_and_reported(returned, message):
    scores = score(lambda completions: returned)
    (line,) = scores.errors
    assert message in line
    assert np.isnan(scores.total[1])


def test_a_list_may_leave_completions_out():
    scores = score(lambda completions: [None, 2.0])
    assert scores.errors == []
    np.testing.assert_array_equal(scores.total, [np.nan, 2.0])


def test_128_rewards_that_wait_are_awaited_at_once():
    async def slow(prompt, completion, answer, num_tokens, finished):
        await asyncio.sleep(0.2)
        return num_tokens

    began = time.perf_counter()
    scores = score(slow, [{}] * 128, time_limit=5.0)
    assert time.perf_counter() - began < 1
    assert 0.2 < scores.seconds < 1
    np.testing.assert_array_equal(scores.total, np.arange(128) + 3)


async def never(prompt, completion, answer, num_tokens, finished):
    await asyncio.sleep(60)


async def blocking(prompt, completion, answer, num_tokens, finished):
    time.sleep(1)


async def leaving(prompt, completion, answer, num_tokens, finished):
    sys.exit(3)


async def canceled(prompt, completion, answer, num_tokens, finished):
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("reward", "cause"),
    [
        (never, "exceeded the time limit of 0.2 s"),
        (Timed(never, 0.1), "exceeded the time limit of 0.1 s"),
        (leaving, "SystemExit: 3"),
        (canceled, "CancelledError"),
    ],
)
def test_a_reward_that_waits_too_long_or_fails_is_missing(reward, cause):
    began = time.perf_counter()
    scores = score(reward, time_limit=0.2)
    assert time.perf_counter() - began < 2
    (line,) = scores.errors
    assert f"reward 'r' is missing for 2 of 2 completions: {cause}" in line
    assert score(awaited).errors == []  # The event loop goes on.


def wrapper(function):
    """A decorator that is no `async def` itself."""

    @functools.wraps(function)
    def call(*arguments, **keywords):
        return function(*arguments, **keywords)

    return call


@pytest.mark.parametrize(
    ("reward", "values"),
    [
        (functools.partial(awaited), [2, 1]),
        (wrapper(awaited), [2, 1]),
        (lambda p, c, a, n, f, tests: awaited(p, c, a, n, f, tests), [2, 1]),
        (wrapper(functools.partial(awaited)), [2, 1]),
        (Timed(wrapper(awaited), 1.0), [2, 1]),
        (wrapper(awaited_lists), [0.5, 1.5]),
    ],
)
def test_a_wrapper_of_a_reward_that_waits_is_awaited(reward, values):
    found = score(reward)
    assert found.errors == []
    assert found.parts["r"].tolist() == values


def test_wrapped_rewards_wait_together_and_have_a_time_limit():
    async def slow(prompt, completion, answer, num_tokens, finished):
        await asyncio.sleep(0.2)
        return 1.0

    began = time.perf_counter()
    found = score(wrapper(slow), ROWS * 32, time_limit=5.0)
    assert found.parts["r"].tolist() == [1.0] * 64
    assert time.perf_counter() - began < 2
    found = score(wrapper(never), time_limit=0.2)
    assert "exceeded the time limit of 0.2 s" in found.errors[0]


def test_a_list_of_calls_that_nobody_awaits_is_named(recwarn):
    found = score(lambda completions, tests: [awaited("", "", "", 0, True, t) for t in tests])
    (line,) = found.errors
    assert "it returned a call that waits; await it in the reward" in line
    assert np.isnan(found.parts["r"]).all()
    assert not recwarn.list


async def execute(code):
    exec(code, {"asyncio": asyncio})


async def gathering(prompt, completion, answer, num_tokens, finished, tests):
    await asyncio.gather(execute(tests))
    return 1.0


async def grouping(prompt, completion, answer, num_tokens, finished, tests):
    async with asyncio.TaskGroup() as group:
        group.create_task(execute(tests))
    return 1.0


async def forgetting(prompt, completion, answer, num_tokens, finished, tests):
    asyncio.get_running_loop().call_soon(exec, tests, {"asyncio": asyncio})
    await asyncio.sleep(0.05)
    return 1.0


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("exit()", "SystemExit"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise BaseException('no')", "BaseException: no"),
        ("asyncio.get_running_loop().stop()", ""),
    ],
)
def test_a_task_that_exits_costs_its_reward_alone(code, cause):
    """Generated code may do so; asyncio raises it out of the event loop of all rewards."""
    rows = [{"tests": "x = 1"}, {"tests": code}, {"tests": "x = 2"}]
    for reward in (gathering, grouping, forgetting):
        if reward is forgetting and cause.startswith("BaseException"):
            continue  # It would be a message of asyncio on the terminal.
        began = time.perf_counter()
        scores = score(reward, rows=rows, time_limit=5)
        assert time.perf_counter() - began < 2
        caught = bool(cause) and reward is not forgetting
        np.testing.assert_array_equal(scores.parts["r"], [1.0, np.nan if caught else 1.0, 1.0])
        assert len(scores.errors) == caught
        if caught and reward is gathering:
            assert f"reward 'r' is missing for 1 of 3 completions: {cause}" in scores.errors[0]
    assert score(awaited).errors == []  # The event loop goes on.


def test_a_time_limit_of_its_own_is_that_of_a_call():
    def slow(prompt, completion, answer, num_tokens, finished):
        time.sleep(0.1)
        return 1.0

    def slow_lists(completions):
        time.sleep(5)

    assert score(Timed(slow, 2.0), time_limit=0.01).errors == []
    for endless in (0, float("inf")):
        assert score(Timed(slow, endless), ROWS[:1], time_limit=0.01).errors == []
    began = time.perf_counter()
    assert "time limit of 0.15 s" in score(Timed(slow_lists, 0.15), time_limit=9.0).errors[0]
    assert time.perf_counter() - began < 2


class StopError(Exception):
    """What a signal raises."""


def sleeping(prompt, completion, answer, num_tokens, finished):
    try:
        time.sleep(60)
    except Exception:
        return 1.0


@pytest.mark.parametrize("reward", [never, sleeping, lambda completions: time.sleep(60)])
def test_a_signal_ends_a_call_at_once(reward):
    received = []

    def on_wait():
        if received:
            raise StopError

    timer = threading.Timer(0.2, received.append, [15])
    timer.start()
    began = time.perf_counter()
    with pytest.raises(StopError):
        score(reward, time_limit=60, on_wait=on_wait)
    assert time.perf_counter() - began < 2


def test_a_reward_that_blocks_the_event_loop_costs_its_time_limit():
    began = time.perf_counter()
    scores = score(blocking, rows=[{}], time_limit=0.2)
    assert time.perf_counter() - began < 2
    assert "time limit of 0.2 s" in scores.errors[0]
    time.sleep(1)  # The loop is free again for the tests after this one.


def test_completions_are_scored_as_they_end():
    """A reward that waits is under way while other completions are still decoded."""
    started = threading.Event()

    async def early(prompt, completion, answer, num_tokens, finished):
        started.set()
        return num_tokens

    with scoring.Scoring({"r": (early, 2.0)}, 2, time_limit=1.0) as scores:
        scores.add({1: scoring.Completion("p", "c", "a", 4, True, {})})
        assert started.wait(5)
        scores.add({0: scoring.Completion("p", "c", "a", 3, True, {})})
        np.testing.assert_array_equal(scores.finish().total, [6, 8])


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("my/rewards.py:f", {}, "a file path is not an import path; write my.rewards:f"),
        ("rewards.py:f", {}, "write rewards:f"),
        ("qerl_jax.rewards.functions:think_format", {"retries": 1}, "are read for a URL"),
        ("qerl_jax.rewards.functions:think_format", {"token_env": "A"}, "are read for a URL"),
    ],
)
def test_resolve_names_what_is_wrong(path, options, message):
    with pytest.raises(UserError, match=message):
        calls.resolve(path, **options)


def test_resolve_takes_every_form(tmp_path, monkeypatch):
    (tmp_path / "forms.py").write_text(
        "def one(p, c, a, n, f, tests): ...\n"
        "async def waits(p, c, a, n, f): ...\n"
        "def lists(completions): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert call_of(calls.resolve("forms:one")).needed == ("tests",)
    assert call_of(calls.resolve("forms:waits", time_limit=3.0)).time_limit == 3.0
    assert call_of(calls.resolve("forms:lists")).takes_lists
    url = call_of(calls.resolve("http://127.0.0.1:1/score", retries=0))
    assert (url.takes_lists, url.waits, url.takes_all) == (True, True, True)
