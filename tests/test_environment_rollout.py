"""Rows that talk to an environment: token ids, limits, slots that wait, and log-probabilities."""

import dataclasses
import functools
import itertools
import time
import types

import jax
import numpy as np
import pytest
import tiny_rollout
from tiny_model import random_lora, random_tokens, tiny_policy
from tiny_rollout import KEY, PROMPTS, TURNS, Dialog, conversation_logprobs

from qerl_jax.environments.roles import CONTEXT, DONE, ENVIRONMENT, OPEN, SAMPLED, TOKENS, Reply
from qerl_jax.policy.layers import attention
from qerl_jax.policy.policy import Policy
from qerl_jax.rollout import row as rows
from qerl_jax.rollout import scheduler, shapes
from qerl_jax.rollout.scheduler import Scheduler

EOS = tuple(range(20, 30))  # a third of the vocabulary: turns end soon
GROUP = 4


@functools.cache
def policy(model="qwen3"):
    """An architecture and a policy: one layer of attention, after a recurrent one in Qwen3.5."""
    layers = {"num_layers": 2, "recurrent_layers": (0,)} if model == "qwen3_5" else {}
    config, params = tiny_policy(model, **({"num_layers": 1} | layers))
    return config, Policy(params, random_lora(config))


def sampler_of(model="qwen3", limits=TURNS, **options):
    sampler = tiny_rollout.sampler(
        **({"max_new_tokens": 14, "eos_ids": EOS, "group_size": GROUP} | options)
    )
    return dataclasses.replace(sampler, turns=limits, model_config=policy(model)[0])


def converse(dialog, limits=TURNS, model="qwen3", **options):
    sampler = sampler_of(model, limits, **options)
    *_, last = sampler.steps(KEY, policy(model)[1], PROMPTS, dialog=dialog)
    return last


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5"])
def model(request):
    return request.param


@pytest.fixture(scope="module")
def instant(model):
    dialog = Dialog()
    return dialog, converse(dialog, model=model)


def test_tokens_are_those_that_were_sampled_and_replied(instant):
    dialog, last = instant
    rollout = last.rollout
    assert max(len(sampled) for sampled in dialog.turns.values()) == TURNS.max_turns
    for row, sampled in dialog.turns.items():
        ids, roles = [], []
        for number, turn in enumerate(sampled, start=1):
            if ids:
                count = 2 + (row + number - 1) % 7
                ids += random_tokens(count, seed=100 * row + number - 1).tolist()
                roles += [ENVIRONMENT] * count
            assert len(turn.ids) <= TURNS.turn_tokens
            assert turn.complete == (turn.ids[-1] in EOS)
            assert not set(turn.ids[:-1]) & set(EOS)
            ids += turn.ids
            roles += [SAMPLED] * len(turn.ids)
        length = rollout.lengths[row]
        assert rollout.tokens[row, :length].tolist() == ids
        assert rollout.roles[row, :length].tolist() == roles
        assert not rollout.roles[row, length:].any()
        assert rollout.finished[row] == (rollout.endings[row] == DONE)
    assert set(rollout.endings.tolist()) == {DONE, TOKENS}
    assert (rollout.sampled_lengths <= 14).all()


def test_logprobs_are_those_of_the_whole_conversations(model, instant):
    _, last = instant
    rollout = last.rollout
    prompts = [prompt for prompt in PROMPTS for _ in range(GROUP)]
    logprobs, entropies = conversation_logprobs(*policy(model), prompts, rollout)
    sampled = rollout.roles == SAMPLED
    np.testing.assert_allclose(rollout.logprobs[sampled], logprobs[sampled], atol=2e-5)
    np.testing.assert_allclose(rollout.entropies[sampled], entropies[sampled], atol=2e-5)
    assert not rollout.logprobs[~sampled].any()


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("qwen3", {}),
        ("qwen3", {"max_rows": 5}),
        ("qwen3", {"max_rows": 1, "chunk_steps": 2}),
        # `test_recurrent` has slots whose states are those of other rows before.
        pytest.param("qwen3_5", {"max_rows": 1, "chunk_steps": 2}, marks=pytest.mark.slow),
    ],
    indirect=["model"],
    ids=["slots for all", "few slots", "one slot", "one slot, recurrent"],
)
def test_episodes_do_not_depend_on_time_or_slots(model, instant, options):
    """With the same slots they are equal to the last bit, whatever the environments' time."""
    fast, slow = (
        converse(Dialog(seconds), model=model, **options).rollout for seconds in (0.0, 0.03)
    )
    jax.tree.map(np.testing.assert_array_equal, slow, fast)
    expected = instant[1].rollout
    for name in ("tokens", "lengths", "roles", "endings", "finished"):
        np.testing.assert_array_equal(getattr(slow, name), getattr(expected, name), name)
    np.testing.assert_allclose(slow.logprobs, expected.logprobs, atol=2e-5)


@pytest.mark.parametrize(
    "model", ["qwen3", pytest.param("qwen3_5", marks=pytest.mark.slow)], indirect=True
)
def test_a_row_that_waits_long_gives_up_its_slot(model, instant, monkeypatch):
    """One slot for twelve rows: others have their turns in it while a row waits."""
    monkeypatch.setattr(rows, "_PATIENCE", 0.02)
    order, dialog = [], Dialog()
    submit, replies = dialog.submit, dialog.replies
    dialog.submit = lambda turn: (order.append(turn.row), submit(turn))
    # No row has a reply before three rows wait, however slow the machine is.
    dialog.replies = lambda seconds: replies(seconds) if order[2:] else time.sleep(seconds) or []
    last = converse(dialog, model=model, max_rows=1, chunk_steps=2)
    assert last.statistics.waiting_seconds > 0
    # The rows take turns: no row has its second turn right after its first.
    assert order[:3] == [0, 1, 2]
    for name in ("tokens", "lengths", "roles", "endings"):
        expected = getattr(instant[1].rollout, name)
        np.testing.assert_array_equal(getattr(last.rollout, name), expected, name)


def test_replies_are_prefilled_in_blocks_and_in_the_width_of_their_own(model, instant, monkeypatch):
    """A block of tokens sees as many scores as fit, and a short reply has a narrow program."""
    monkeypatch.setattr(shapes, "_NARROWEST", 3)
    monkeypatch.setattr(attention, "_SCORES", 4 * 2 * 4 * 48 * 3)  # three tokens of two rows
    assert shapes.extensions(8, TURNS.reply_tokens) == ((2, 8), (2, 16))
    widths, extend = [], Scheduler._extend
    monkeypatch.setattr(
        Scheduler,
        "_extend",
        lambda self, rows, width: widths.append(width) or extend(self, rows, width),
    )
    rollout = converse(Dialog(), model=model, max_rows=8).rollout
    assert set(widths) == {8, 16}
    for name in ("tokens", "lengths", "roles", "endings"):
        np.testing.assert_array_equal(getattr(rollout, name), getattr(instant[1].rollout, name))
    np.testing.assert_allclose(rollout.logprobs, instant[1].rollout.logprobs, atol=2e-5)


@pytest.mark.parametrize("narrowest", [1, 2, 3, 64])
def test_the_widths_of_extensions_ascend(narrowest, monkeypatch):
    monkeypatch.setattr(shapes, "_NARROWEST", narrowest)
    for reply in (1, 6, 7, 100, 254, 5000):
        sizes = shapes.extensions(8, reply)
        counts, widths = zip(*sizes, strict=True)
        assert list(widths) == sorted(set(widths))
        assert widths[-1] == shapes.bucket(reply + 2)
        assert all(1 <= count <= 2 for count in counts)


@pytest.mark.parametrize("rows_on_host", [0, 2])
@pytest.mark.parametrize(
    "model", ["qwen3", pytest.param("qwen3_5", marks=pytest.mark.slow)], indirect=True
)
def test_the_host_holds_what_waiting_rows_have_filled_up_to_a_bound(
    model, instant, monkeypatch, rows_on_host
):
    """One slot for twelve rows, of which as many as fit on the host wait there."""
    monkeypatch.setattr(rows, "_PATIENCE_ALONE", 0.0)
    config, positions = policy(model)[0], 24
    row = shapes.kept_bytes(config, positions, np.dtype(np.float32))
    held, evict = [], Scheduler._evict

    def recording(self, row):
        evict(self, row)
        held.append([sum(x.nbytes for x in live.kept) for live in self._live if live.kept])

    monkeypatch.setattr(Scheduler, "_evict", recording)
    limits = dataclasses.replace(TURNS, host_cache_bytes=rows_on_host * row)
    last = converse(Dialog(0.02), limits, model=model, max_rows=1, chunk_steps=2)
    assert max(map(sum, held), default=0) <= rows_on_host * row
    assert bool(held) == bool(rows_on_host)
    # A row that has filled few positions of 48 takes no more.
    assert min((size for sizes in held for size in sizes), default=0) <= row
    for name in ("tokens", "lengths", "roles", "endings"):
        expected = getattr(instant[1].rollout, name)
        np.testing.assert_array_equal(getattr(last.rollout, name), expected, name)


def test_rows_that_end_together_leave_their_slots_together(monkeypatch):
    """No slot waits beside others that decode, though each look at the clock takes a while."""
    looks = itertools.count()
    clock = types.SimpleNamespace(
        monotonic=lambda: next(looks) * rows._PATIENCE_ALONE / 4, perf_counter=time.perf_counter
    )
    monkeypatch.setattr(scheduler, "time", clock)
    due = []

    def submit(turn):
        reply = Reply(turn.row, [1, 2], OPEN) if turn.space else Reply(turn.row, (), DONE)
        due.append((clock.monotonic() + 4 * rows._PATIENCE_ALONE, reply))

    def replies(_):
        now = clock.monotonic()
        ready = [x for x in due if x[0] <= now]
        due[:] = [x for x in due if x[0] > now]
        return [reply for _, reply in ready]

    dialog = types.SimpleNamespace(submit=submit, replies=replies)
    last = converse(dialog, max_rows=GROUP, eos_ids=(), chunk_steps=TURNS.turn_tokens)
    assert last.rollout.lengths.min() > TURNS.turn_tokens + 2
    assert last.statistics.idle == 0


def test_the_context_ends_a_row():
    limits = dataclasses.replace(TURNS, context_tokens=12)
    rollout = converse(Dialog(), limits).rollout
    assert CONTEXT in rollout.endings
    assert rollout.lengths.max() <= 12
    # A row in which a token could still be sampled did not end by their limit.
    assert not np.any((rollout.endings == TOKENS) & (rollout.sampled_lengths < 14))


@pytest.mark.parametrize(
    "model", ["qwen3", pytest.param("qwen3_5", marks=pytest.mark.slow)], indirect=True
)
def test_every_program_is_compiled_before(model):
    _, made = policy(model)
    sampler = sampler_of(model, prompt_width=9, max_rows=6)
    compiled = sampler.compiled(KEY, made, num_prompts=3)
    expected = converse(Dialog(), model=model, max_rows=6, prompt_width=9).rollout
    rollout = compiled.rollout(KEY, made, PROMPTS, dialog=Dialog(0.01))
    np.testing.assert_array_equal(rollout.tokens, expected.tokens)
    names = {name if isinstance(name, str) else name[0] for name in compiled.executables}
    assert {"take", "put", "extend", "resume"} <= names


def test_one_turn_is_a_rollout_without_environment():
    """The first turns of a conversation are the completions of a rollout of one turn."""
    alone = sampler_of(limits=None, max_new_tokens=6).rollout(KEY, policy()[1], PROMPTS)
    limits = dataclasses.replace(TURNS, max_turns=1)
    dialog = Dialog()
    dialog.submit = lambda turn: dialog.due.append((0.0, Reply(turn.row, (), DONE)))
    rollout = converse(dialog, limits).rollout
    np.testing.assert_array_equal(rollout.tokens[:, :6], alone.tokens)
    np.testing.assert_array_equal(rollout.lengths, alone.lengths)
    # The caches have different lengths, and some processors then sum in another order.
    np.testing.assert_allclose(rollout.logprobs[:, :6], alone.logprobs, atol=2e-6)
