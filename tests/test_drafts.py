"""Drafts: what is guessed, that the tokens are those without drafts, and how long drafts are."""

import dataclasses
import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_rollout
import tiny_run
from refusal import refused
from tiny_model import random_lora, random_tokens, tiny_policy
from tiny_rollout import KEY, PROMPTS, TURNS, Dialog

from qerl_jax.environments.roles import OPEN
from qerl_jax.policy.architectures import ARCHITECTURES
from qerl_jax.policy.policy import Policy
from qerl_jax.rollout import decode, drafts, shapes
from qerl_jax.rollout.config import EngineConfig
from qerl_jax.rollout.drafts import NOTHING, DraftLength
from qerl_jax.rollout.progress import Statistics, draft_metrics
from qerl_jax.rollout.scheduler import Scheduler
from qerl_jax.training.loop import train

last = functools.partial(tiny_rollout.last, layers=1)
EOS = (3, 4)
LONG = {"max_new_tokens": 24, "group_size": 4, "eos_ids": EOS, "chunk_steps": 4, "max_rows": 5}


def same_tokens(found, expected):
    for name in ("tokens", "lengths", "finished"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), name)


# --- What is guessed ------------------------------------------------------------------------------


def brute_force(rows, own, count):
    """The guesses after the last token of row `own` of a group, by definition."""
    mine, best = rows[own], (0, False, 0, 0)
    for member, row in enumerate(rows):
        for end in range(1, len(row)):
            length = 0
            while length < min(8, end, len(mine)) and (
                row[end - 1 - length] == mine[len(mine) - 1 - length]
            ):
                length += 1
            best = max(best, (length, member == own, end, member) if length else best)
    length, _, end, member = best
    if not length:
        return [NOTHING] * count
    if member == own:
        return [mine[end + i % (len(mine) - end)] for i in range(count)]
    return [*rows[member][end : end + count], *[NOTHING] * count][:count]


@pytest.mark.parametrize("seed", range(6))
def test_guesses_are_those_of_a_search_by_definition(seed):
    """Few different tokens, so that there are long matches and several of a length."""
    rng = np.random.default_rng(seed)
    positions, tokens = 40, int(rng.integers(2, 9))
    groups = [
        [rng.integers(tokens, size=rng.integers(1, positions + 1)).tolist() for _ in range(3)]
        for _ in range(2)
    ]
    history = drafts.empty_history(2, 3, positions)
    whole = np.full((6, positions), NOTHING, np.int32)
    for place, row in enumerate(row for group in groups for row in group):
        whole[place, : len(row)] = row
    # Half of the tokens come later, as those that are sampled; row 6 is not there.
    order = np.array([4, 1, 6, 0, 2, 5, 3], np.int32)
    rows = np.vstack([whole, np.zeros((1, positions), np.int32)])[order]
    lengths = (rows != NOTHING).sum(axis=1)
    first = np.where(np.arange(positions) < lengths[:, None] // 2, rows, NOTHING)
    history = decode.begin_rows(history, order, first)
    later = np.stack([np.roll(row, -(n // 2)) for row, n in zip(rows, lengths, strict=True)])
    record = jax.jit(drafts.record)
    history = record(history, order, lengths // 2, later, lengths - lengths // 2)
    np.testing.assert_array_equal(history[:, :, 8:].reshape(6, -1), whole)
    guesses = np.asarray(jax.jit(drafts.guess, static_argnums=3)(history, order, lengths - 1, 7))
    for place, found in zip(order, guesses, strict=True):
        if place < 6:
            expected = brute_force(groups[place // 3], place % 3, 7)
            assert found.tolist() == expected, (place, groups[place // 3])


# --- The tokens are those without drafts ----------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"stop": ("dB",)},
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in (
                {"temperature": 0.0, "max_rows": 0},
                {"max_rows": 1},
                {"max_rows": 0, "chunk_steps": 7, "group_size": 3},
                {"max_rows": 0, "compact": "once"},
                {"stop": ("dB", "aA"), "eos_ids": (), "max_rows": 3},
                {"max_new_tokens": 2},
                {"max_new_tokens": 1},
                {"top_k": 4, "top_p": 0.9},
                {"quantized": True},
            )
        ),
    ],
    ids=str,
)
def test_tokens_are_those_without_drafts(options):
    """Slots are refilled, batches compacted, and rows end within drafts."""
    accepted = 0
    for seed, temperature in enumerate((0.25, 0.4, 1.0)):
        prompts = [random_tokens(n, seed=10 * seed + n).tolist() for n in (5, 2, 9)]
        changes = {"key": jax.random.key(seed), "temperature": temperature}
        run = functools.partial(last, prompts, **LONG | changes | options)
        off, on = run(drafts="off"), run(drafts="on")
        same_tokens(on.rollout, off.rollout)
        np.testing.assert_allclose(on.rollout.logprobs, off.rollout.logprobs, atol=1e-4)
        np.testing.assert_allclose(on.rollout.entropies, off.rollout.entropies, atol=1e-4)
        work, plain = on.statistics, off.statistics
        assert work.live + work.accepted == plain.live
        assert work.drafted >= 3 * work.accepted > 0 or work.live <= plain.live
        assert not plain.drafted
        accepted += work.accepted
    assert accepted > 0 or LONG["max_new_tokens"] != {**LONG, **options}["max_new_tokens"]


@pytest.fixture
def guessing(monkeypatch):
    """A function that replaces the guesses by tokens known before, changed by a function."""

    def replace(prompts, rollout, change):
        known = np.full((len(rollout.tokens), 64), 0, np.int32)
        for number, (tokens, length) in enumerate(
            zip(rollout.tokens, rollout.lengths, strict=True)
        ):
            prompt = prompts[number // LONG["group_size"]]
            known[number, : len(prompt) + length] = [*prompt, *tokens[:length]]

        def guess(history, places, newest, count):
            columns = newest[:, None] + 1 + jnp.arange(count)
            return change(jnp.asarray(known)[places[:, None], columns])

        monkeypatch.setattr(drafts, "guess", guess)
        decode.draft_chunk.clear_cache()

    yield replace
    decode.draft_chunk.clear_cache()


@pytest.mark.parametrize("right", [True, False])
def test_guesses_that_are_always_right_and_always_wrong(guessing, monkeypatch, right):
    monkeypatch.setattr(DraftLength, "choose", lambda self, rows, choices: max(choices))
    options = LONG | {"max_rows": 4}
    expected = last(**options, drafts="off")
    vocabulary = tiny_rollout.policy(layers=1)[0].vocab_size
    guessing(PROMPTS, expected.rollout, lambda x: x if right else (x + 1) % vocabulary)
    found = last(**options, drafts="on")
    same_tokens(found.rollout, expected.rollout)
    live, work = expected.rollout.lengths - 1, found.statistics
    if right:  # The first token comes from a prefill, and a step has eight.
        assert work.live == np.sum(-(-live // 8))
    else:
        assert (work.live, work.accepted) == (live.sum(), 0)
    assert draft_metrics([work])["rollout_tokens_per_row_step"] == live.sum() / work.live


def test_metrics_are_those_of_the_drafts():
    assert draft_metrics([Statistics(1, decoded=9, live=8)]) == {}
    work = [Statistics(1, decoded=9, live=8, drafted=24, accepted=4), Statistics(1, 9, live=2)]
    assert draft_metrics(work) == {
        "rollout_tokens_per_row_step": 1.4,
        "rollout_draft_acceptance": pytest.approx(1 / 6),
    }


# --- Environments ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"max_rows": 2, "stop": ("dB", "bB")},
        pytest.param({"max_rows": 5}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_turns_are_those_without_drafts_whatever_the_time(options):
    """Whatever the environments' time, they are equal to the last bit."""
    config, params = tiny_policy("qwen3", num_layers=1)
    policy = Policy(params, random_lora(config))

    def converse(dialog, mode):
        made = tiny_rollout.sampler(
            max_new_tokens=14, eos_ids=tuple(range(26, 30)), group_size=4, drafts=mode, **options
        )
        made = dataclasses.replace(made, turns=TURNS, model_config=config).at_temperature(0.3)
        *_, end = made.steps(KEY, policy, PROMPTS, dialog=dialog)
        return end

    fast, plain = (converse(Dialog(), mode) for mode in ("on", "off"))
    assert fast.statistics.accepted > 0
    slow = converse(Dialog(0.02), "on")
    jax.tree.map(np.testing.assert_array_equal, slow.rollout, fast.rollout)
    for name in ("live", "drafted", "accepted"):
        assert getattr(slow.statistics, name) == getattr(fast.statistics, name), name
    same_tokens(fast.rollout, plain.rollout)
    np.testing.assert_array_equal(fast.rollout.roles, plain.rollout.roles)
    np.testing.assert_allclose(fast.rollout.logprobs, plain.rollout.logprobs, atol=1e-4)


@dataclasses.dataclass
class Late(Dialog):
    """The environments of rows 0 and 8 reply when the other 10 rows have ended."""

    held: list = dataclasses.field(default_factory=list)
    ended: int = 0

    def replies(self, seconds):
        found = super().replies(seconds)
        self.held += [reply for reply in found if reply.row in (0, 8)]
        found = [reply for reply in found if reply.row not in (0, 8)]
        self.ended += sum(reply.ending != OPEN for reply in found)
        if self.ended == 10:
            found, self.held = found + self.held, []
        return found


def test_rows_that_decode_together_have_histories_of_their_own(monkeypatch):
    """Also where a row waits while more rows come than there are histories."""
    config, params = tiny_policy("qwen3", num_layers=1)
    places, found = Scheduler._places, []

    def recording(self, rows):
        result = places(self, rows)
        found.append(([row.number for row in rows], result[[row.cache_row for row in rows]]))
        return result

    monkeypatch.setattr(Scheduler, "_places", recording)
    made = tiny_rollout.sampler(max_new_tokens=14, group_size=4, drafts="on", max_rows=2)
    made = dataclasses.replace(made, turns=TURNS, model_config=config)
    *_, end = made.steps(KEY, Policy(params, random_lora(config)), PROMPTS, dialog=Late())
    assert end.ended.all()
    assert any(sorted(rows) == [0, 8] for rows, _ in found)
    for rows, own in found:
        assert len(set(own.tolist())) == len(rows), rows


# --- How long drafts are --------------------------------------------------------------------------


def test_drafts_are_as_long_as_they_pay():
    length = DraftLength()
    assert [length.choose(rows, (1, *drafts.lengths_of(rows))) for rows in (1, 8, 16, 32, 64)] == [
        8, 4, 4, 2, 1,
    ]  # fmt: skip
    for right in (0, 3):  # In two chunks, as while siblings have written little.
        for _ in range(2):
            length.observe(1 + (np.arange(32) < right)[:, None] * np.ones((1, 8), int), 2)
        chunks = 0
        while length.choose(32, (1, 2)) == 1:  # It is tried again before short completions end.
            chunks += 1
        assert 10 <= chunks <= 15
    for _ in range(20):  # Nothing is ever right.
        length.observe(np.ones((32, 16), int), 2)
    assert length.choose(32, (1, 2)) == length.choose(8, (1, 4, 8)) == 1
    for _ in range(20):  # Everything is always right.
        length.observe(np.full((8, 16), 4), 4)
    assert length.choose(8, (1, 4, 8)) == 8
    assert length.choose(128, (1,)) == 1


def test_steps_check_a_bounded_number_of_positions():
    for rows in range(1, 300):
        counts = drafts.lengths_of(rows)
        assert len(counts) <= 2
        assert all(rows * count <= 64 for count in counts)
    for rows, expected in ((1, 2), (4, 2), (5, 4), (24, 7), (32, 7), (100, 6)):
        sizes = [rows, *shapes._batches_to_draft(rows, "often")]
        assert sizes == sorted(set(sizes), reverse=True)
        assert len(shapes.draft_sizes(sizes)) == expected
    assert shapes._batches_to_draft(64, "once") == (8,)


@pytest.mark.parametrize(
    ("model", "on_gpu", "dtype", "uses"),
    [
        ("qwen2.5-7b", True, "bfloat16", True),
        ("qwen2.5-7b", False, "bfloat16", False),
        ("qwen2.5-7b", True, "float32", False),
        ("qwen3-30b-a3b", True, "bfloat16", False),
        ("qwen3.5-4b", True, "bfloat16", False),
    ],
)
def test_where_drafts_are_used(model, on_gpu, dtype, uses):
    config, kind = ARCHITECTURES[model], jnp.dtype(dtype)
    assert shapes.uses_drafts(EngineConfig(), config, kind, on_gpu=on_gpu) == uses
    assert not shapes.uses_drafts(EngineConfig(drafts="off"), config, kind, on_gpu=on_gpu)
    if config.recurrent_layers:
        options = {"on_gpu": on_gpu}
        words = "recurrent layers of a qwen3_5 cannot go back"
        refused(words, shapes.uses_drafts, EngineConfig(drafts="on"), config, kind, **options)
    else:
        assert shapes.uses_drafts(EngineConfig(drafts="on"), config, kind, on_gpu=on_gpu)


# --- Runs -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_with_drafts_that_is_killed_goes_on_bit_for_bit(tmp_path, compile_cache):
    tiny = tiny_run.write_tiny(tmp_path, compile_cache)
    changes = {"rollout.drafts": "on", "rollout.max_new_tokens": 24, "checkpoint.every": 2}
    whole, again = tmp_path / "whole", tmp_path / "again"
    train(tiny.config(changes), workdir=whole)
    rows = tiny_run.results(whole)
    assert all(row["rollout_tokens_per_row_step"] >= 1 for row in rows)
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoints/4")
    train(tiny.config(changes), workdir=again)
    assert tiny_run.results(again) == rows
    off = tmp_path / "off"
    train(tiny.config(changes | {"rollout.drafts": "off"}), workdir=off)
    first = [run_rows[0]["rollout_tokens"] for run_rows in (rows, tiny_run.results(off))]
    assert first[0] == first[1]
    assert "rollout_tokens_per_row_step" not in tiny_run.results(off)[0]
