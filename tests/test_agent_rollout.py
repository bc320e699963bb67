"""Rows that agents ask for: equal to those of environments, in parts, on few slots, ended early."""

import itertools
import threading
import time
import types

import agent_cases
import jax
import numpy as np
import pytest
from agent_cases import LONGEST, ask, errors_of, limits, policy, rollout, sampler, tokens
from tiny_rollout import KEY, PROMPTS, TURNS, Dialog, conversation_logprobs

from qerl_jax.data.agents import AgentEpisodes
from qerl_jax.environments.gateway import Gateway, TokenPrompt
from qerl_jax.environments.roles import ENVIRONMENT, FAILURE, SAMPLED
from qerl_jax.rollout.turns import Sessions

GROUP = 2
OPTIONS = {"group_size": GROUP, "prefill_prompts": 2}


@pytest.fixture(scope="module", params=["qwen3", pytest.param("qwen3_5", marks=pytest.mark.slow)])
def model(request):
    return request.param


def dialog_episode(gateway, record, wait=0.0):
    """The conversation of `tiny_rollout.Dialog` with a row, as an agent has it."""
    row = record.job.number
    ids, sampled = list(PROMPTS[row // GROUP]), 0
    start = len(ids)
    for number in itertools.count(1):
        turn = ask(gateway, record, ids)
        ids += turn.ids
        sampled += len(turn.ids)
        reply = tokens(2 + (row + number) % 7, seed=100 * row + number)
        space = min(TURNS.reply_tokens, TURNS.context_tokens - (len(ids) - start) - 1)
        if number == TURNS.max_turns or sampled == 14 or len(reply) > space:
            break
        ids += reply
        time.sleep(wait * (1 + row % 3))
    return float(row)


def built_in(model):
    made = sampler(model, **OPTIONS)
    made = made.__class__(**{**vars(made), "turns": TURNS})
    *_, last = made.steps(KEY, policy(model)[1], PROMPTS, dialog=Dialog())
    return last.rollout


@pytest.mark.parametrize("options", [{}, {"wait": 0.03}, {"max_rows": 2}], ids=str)
def test_rows_are_those_of_an_environment_with_the_same_conversation(model, options):
    """Ids, masks and log-probs; to the last bit where there are as many slots."""
    wait = options.pop("wait", 0.0)
    gateway, last = rollout(
        lambda *session: dialog_episode(*session, wait=wait), model=model, **OPTIONS, **options
    )
    expected = built_in(model)
    for record in gateway.records():
        ((row, end),) = record.trained_rows()
        own, number = record.job.number, row.number
        assert record.reward == own
        assert row.ids[: row.prompt] == PROMPTS[own // GROUP]
        length = end - row.prompt
        assert length == expected.lengths[own]
        for name in ("tokens", "roles"):
            found = getattr(last.rollout, name)[number, :length]
            np.testing.assert_array_equal(found, getattr(expected, name)[own, :length], name)
        assert row.ids[row.prompt :] == expected.tokens[own, :length].tolist()
        found = last.rollout.logprobs[number, :length]
        difference = np.abs(found - expected.logprobs[own, :length]).max()
        assert difference == 0 if not options else difference < 2e-5
        sampled = np.concatenate([turn.logprobs for turn in row.turns])
        roles = last.rollout.roles[number, :length]
        np.testing.assert_array_equal(sampled, found[roles == SAMPLED])


def test_long_prompts_and_small_limits_have_the_logprobs_of_the_whole_rows(model):
    """Prompts beyond the prefill, replies beyond an extension, and limits of each request."""

    def episode(gateway, record):
        number = record.job.number
        ids = tokens((2, 3, LONGEST, LONGEST + 1, 25, 30)[number], seed=number)
        for turn, limit in enumerate((1 + number % 3, None, 2)):
            asked = ask(gateway, record, ids, max_tokens=limit)
            assert len(asked.ids) <= (limit or 6)
            ids += asked.ids
            if len(ids) > 30:
                break
            ids += tokens((0, 9, 3)[turn], seed=50 + turn)  # None, more than 8, a few.
        return 1.0

    gateway, last = rollout(episode, model=model, prefill_prompts=2)
    assert not errors_of(gateway)
    rollout_ = last.rollout
    prompts = [None] * len(rollout_.lengths)
    for record in gateway.records():
        ((row, end),) = record.trained_rows()
        prompts[row.number] = row.ids[: row.prompt]
        assert row.prompt <= LONGEST
        length = end - row.prompt
        assert row.ids[row.prompt : end] == rollout_.tokens[row.number, :length].tolist()
    assert sum(len(prompt) == LONGEST for prompt in prompts) >= 3
    logprobs, entropies = conversation_logprobs(*policy(model), prompts, rollout_)
    sampled = rollout_.roles == SAMPLED
    assert sampled.sum() > 20
    np.testing.assert_allclose(rollout_.logprobs[sampled], logprobs[sampled], atol=2e-5)
    np.testing.assert_allclose(rollout_.entropies[sampled], entropies[sampled], atol=2e-5)
    assert (rollout_.roles == ENVIRONMENT).any()


def test_a_row_is_finished_by_its_last_turn_that_trains():
    """A request without an answer, or an answer that lost, does not make it truncated."""

    def episode(gateway, record):
        first = ask(gateway, record, [1, 2])
        if record.job.number == 0:  # Of the two answers the last one trains, in a row of its own.
            ask(gateway, record, [1, 2, *first.ids, 3])
            ask(gateway, record, [1, 2, *first.ids, 3])
        else:
            prompt = TokenPrompt([1, 2, *first.ids, 3])
            gateway.ask(record, prompt, max_tokens=None, retry=False)
        complete[record.job.number] = first.complete
        return 0.0

    complete = {}
    gateway, last = rollout(episode, sessions=2, limit=limits(turn_tokens=0))
    runner = types.SimpleNamespace(start=lambda *_: None)
    server = types.SimpleNamespace(gateway=gateway)
    rows = AgentEpisodes(server, runner, None, [None] * 2).rows(last.rollout, pad_id=0)
    assert complete == {0: True, 1: True}
    assert rows.owners.tolist() == [0, 0, 1]
    assert rows.rollout.finished[[0, 2]].all()


def test_a_session_has_several_rows_at_the_same_time():
    """Parallel calls, a rewritten history and more rows than slots and than the first arrays."""

    def episode(gateway, record):
        number = record.job.number
        first = ask(gateway, record, tokens(4, seed=1))
        results = {}

        def call(index):
            prompt = tokens(5, seed=10 * number + index)
            results[index] = (prompt, ask(gateway, record, prompt))

        threads = [threading.Thread(target=call, args=(index,)) for index in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        prompt, answer = results[3]
        ask(gateway, record, [*prompt, *answer.ids, 7])
        ask(gateway, record, [*tokens(4, seed=1), *first.ids, 8])
        return 0.0

    gateway, last = rollout(episode, sessions=3, max_rows=2)
    assert not errors_of(gateway)
    rows = [row for record in gateway.records() for row, _ in record.trained_rows()]
    assert len(rows) == 3 * 6
    assert sorted(len(row.turns) for row in rows[:6]) == [1, 1, 1, 1, 2, 2]
    assert len({row.number for row in rows}) == len(rows) == len(last.ended[last.ended])
    # Rows with equal prompts in different sessions sample different tokens.
    firsts = {tuple(record.rows[0].turns[0].ids) for record in gateway.records()}
    assert len(firsts) > 1


def test_rows_without_memory_of_the_host_are_forgotten_and_begun_again():
    """One slot, and each session waits for two rows of its own before it continues the first."""

    def episode(gateway, record):
        first = tokens(4, seed=record.job.number)
        ids = [*first, *ask(gateway, record, first, max_tokens=2).ids]
        ask(gateway, record, tokens(5, seed=40 + record.job.number), max_tokens=2)
        ask(gateway, record, [*ids, 7], max_tokens=3)
        return 0.0

    gateway, last = rollout(episode, sessions=3, max_rows=1, host=0)
    assert not errors_of(gateway)
    rows = [row for record in gateway.records() for row, _ in record.trained_rows()]
    assert len(rows) == 9
    prompts = {row.number: row.ids[: row.prompt] for row in rows}
    logprobs, _ = conversation_logprobs(
        *policy(), [prompts[number] for number in range(9)], last.rollout.replace(**cut_to(last, 9))
    )
    for row in rows:
        for turn in row.turns:
            columns = slice(turn.start - row.prompt, turn.end - row.prompt)
            np.testing.assert_allclose(turn.logprobs, logprobs[row.number, columns], atol=2e-5)


def cut_to(last, rows):
    """The fields of the first rows of a rollout, whose arrays have more."""
    names = "tokens", "lengths", "logprobs", "roles"
    return {name: getattr(last.rollout, name)[:rows] for name in names}


def test_sessions_that_end_early_leave_their_slots():
    """While a row decodes, waits for a slot, or was never asked for."""
    gateway, others = Gateway(), threading.Event()

    def episode(gateway, record):
        number = record.job.number
        if number < 4:  # They ask and end without waiting; one slot takes their rows in turn.
            with agent_cases.LOCK:
                prompt = agent_cases.TokenPrompt(tokens(3, seed=number))
                turn = gateway.ask(record, prompt, max_tokens=None, retry=False)
            if number < 2:
                turn.future.result(timeout=60)
            raise RuntimeError("broken")
        if number == 4:
            return 1.0
        others.wait(30)
        return float(len(ask(gateway, record, tokens(3, seed=9)).ids))

    threading.Timer(0.5, others.set).start()
    gateway, last = rollout(episode, gateway=gateway, max_rows=1)
    records = gateway.records()
    assert [record.ending == FAILURE for record in records] == [True] * 5 + [False]
    assert errors_of(gateway)["RuntimeError('broken')"] == 4
    assert last.ended.sum() == sum(
        row.part is not None for record in records for row in record.rows
    )
    assert records[5].trained_rows()


def test_a_rollout_whose_agents_ask_for_nothing_ends():
    gateway, last = rollout(lambda *_: 1.0)
    assert last.tokens == 0
    assert len(errors_of(gateway)) == 1


@pytest.mark.slow
def test_a_new_length_compiles_nothing(monkeypatch):
    """After the programs of `compiled`, with which any other one would be an error."""
    made = sampler(max_rows=3, prefill_prompts=1)
    made = made.compiled(KEY, policy()[1], num_prompts=3)
    assert isinstance(made._turn_policy(Gateway()), Sessions)

    def episode(gateway, record):
        ids = tokens(3 + 7 * record.job.number, seed=1)
        for _ in range(2):
            ids += ask(gateway, record, ids, max_tokens=3).ids + tokens(10, seed=2)
        return 1.0

    monkeypatch.setattr(agent_cases, "sampler", lambda *_, **__: made)
    gateway, _ = rollout(episode, sessions=3, limit=limits(context=LONGEST + 32))
    assert not errors_of(gateway)
    jax.effects_barrier()
