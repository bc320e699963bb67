"""Rows that decode together: slots that are refilled and compacted, their memory and programs."""

import functools
import itertools
import json
import weakref
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_checkpoints
import tiny_rollout
from refusal import refused
from tiny_model import random_tokens
from tiny_rollout import KEY, PAD, PROMPTS, TinyTokenizer, configs, letters

from qerl_jax.errors import UserError
from qerl_jax.policy import transformer
from qerl_jax.policy.layers.part import PlannedBuffer
from qerl_jax.rollout import decode, shapes
from qerl_jax.rollout.completions import Completions
from qerl_jax.rollout.config import EngineConfig, SamplingConfig
from qerl_jax.rollout.decode import Samples
from qerl_jax.rollout.progress import live_fraction
from qerl_jax.rollout.row import Row
from qerl_jax.weights.tokenizer import from_folder

policy = functools.partial(tiny_rollout.policy, layers=1)
progress = functools.partial(tiny_rollout.progress, layers=1)
rollout = functools.partial(tiny_rollout.rollout, layers=1)
last = functools.partial(tiny_rollout.last, layers=1)
EOS = (3, 4, 5, 6)  # Rows of 24 tokens end early, and at different times.
LONG = {"max_new_tokens": 24, "group_size": 4, "eos_ids": EOS, "chunk_steps": 4}


@functools.cache
def together():
    """All twelve rows from the start, without compaction."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shapes, "_smaller_batches", lambda rows, compact: [])
        result = rollout(**LONG)
    assert len(set(result.lengths.tolist())) > 5  # They end at different times.
    assert set(result.finished.tolist()) == {False, True}
    return result


@pytest.fixture
def chunks(monkeypatch):
    """The numbers of rows of the chunks that are decoded."""
    together()  # Its chunks are not recorded.
    seen, decode_chunk = [], decode.decode_chunk

    def recording(key, params, lora_layers, state, cache_rows, *others, **options):
        slots, active, _ = cache_rows
        assert len(state.layers[0].keys) == len(slots) == len(active)
        seen.append(len(active))
        return decode_chunk(key, params, lora_layers, state, cache_rows, *others, **options)

    monkeypatch.setattr(decode, "decode_chunk", recording)
    return seen


def decode_config(model, *, max_new_tokens):
    sampling = SamplingConfig(max_new_tokens=max_new_tokens)
    return decode.decode_config(model, sampling, EngineConfig(), TinyTokenizer(EOS))


def same(result, expected, *, atol=1e-4):
    """The same tokens, and the same log-probabilities but for rounding."""
    for name in ("tokens", "lengths", "finished"):
        np.testing.assert_array_equal(getattr(result, name), getattr(expected, name))
    np.testing.assert_allclose(result.logprobs, expected.logprobs, atol=atol)
    np.testing.assert_allclose(result.entropies, expected.entropies, atol=atol)


# --- Slots ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_rows", "chunk_steps"),
    [
        (3, 2),
        (0, 4),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in ((1, 8), (8, 4), (0, 23))),
    ],
)
def test_samples_do_not_depend_on_the_rows_that_decode_together(chunks, max_rows, chunk_steps):
    steps = list(progress(**LONG | {"chunk_steps": chunk_steps}, max_rows=max_rows))
    result, work = steps[-1].rollout, steps[-1].statistics
    same(result, together())
    assert chunks[0] == (max_rows or 12)
    assert work.decoded == sum(chunks) * -(-23 // -(-23 // chunk_steps))
    assert work.live == result.lengths.sum() - 12
    assert live_fraction([work]) == work.live / work.decoded
    seen = [(step.ended_rows, step.tokens) for step in steps]
    assert seen == sorted(seen)
    assert seen[-1] == (12, result.lengths.sum())


def test_a_prompt_is_prefilled_once_however_its_rows_are_inserted(monkeypatch):
    monkeypatch.setattr(shapes, "_PREFILL_TOKENS", 1)  # one prompt at a time
    end = last(**LONG, max_rows=3)
    same(end.rollout, together())
    assert end.statistics.prefilled_prompts == 3


def test_prefilled_prompts_are_freed_before_others_are_prefilled(monkeypatch):
    expected, kept, prefill = together(), [], decode.prefill

    def recording(*arguments, **options):
        assert all(keys() is None for keys in kept)
        prefilled = prefill(*arguments, **options)
        kept.append(weakref.ref(prefilled.cache.layers[0].keys))
        return prefilled

    monkeypatch.setattr(decode, "prefill", recording)
    monkeypatch.setattr(shapes, "_PREFILL_TOKENS", 1)  # one prompt at a time, all rows inserted
    same(rollout(**LONG), expected)
    assert len(kept) == 3


def test_prompts_are_prefilled_in_full_batches_of_few_widths(monkeypatch):
    seen, prefill = [], decode.prefill

    def recording(params, lora, tokens, lengths, **options):
        prefilled = prefill(params, lora, tokens, lengths, **options)
        seen.append((tokens.shape, prefilled.cache.layers[0].keys.shape[2]))
        return prefilled

    monkeypatch.setattr(decode, "prefill", recording)
    monkeypatch.setattr(shapes, "_PREFILL_TOKENS", 3 * 96)
    monkeypatch.setattr(shapes, "_NARROWEST", 16)
    prompts = [list(random_tokens(length, seed=length)) for length in (90, 40, 9, 8, 30)]
    result = rollout(prompts, max_rows=2, prompt_width=96)
    # Keys and values have one width, so that one program inserts them.
    assert seen == [((3, 96), 96), ((3, 48), 96)]
    monkeypatch.undo()
    same(result, rollout(prompts))


def test_tokens_that_all_prompts_begin_with_are_computed_once(monkeypatch):
    options = {"group_size": 2, "max_rows": 3}
    seen, prefill = [], transformer.prefill

    def recording(params, lora, tokens, lengths, **static):
        seen.append(tokens.shape)
        return prefill(params, lora, tokens, lengths, **static)

    prompts = [[7, *random_tokens(20, seed=0), *prompt] for prompt in PROMPTS]
    expected = rollout(prompts, **options)
    monkeypatch.setattr(transformer, "prefill", recording)
    same(rollout(prompts, shared_tokens=21, **options), expected)
    assert seen == [(1, 21)]


def test_the_batch_is_compacted_when_no_row_waits(chunks):
    work = [last(**LONG, max_rows=8).statistics]
    full = chunks.count(8)
    assert full > 2
    assert chunks[:full] == [8] * full
    assert chunks[full:] == sorted(chunks[full:], reverse=True)
    assert set(chunks) <= {8, 6, 4}
    assert 4 in chunks
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shapes, "_smaller_batches", lambda rows, compact: [])
        work.append(last(**LONG, max_rows=8).statistics)
    assert work[0].live == work[1].live
    assert work[0].decoded < work[1].decoded
    assert live_fraction(work[:1]) > live_fraction(work[1:]) > 0.3


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 7, 12, 100, 128, 1000])
def test_batch_sizes_are_not_far_apart(rows):
    batches = [rows, *shapes._smaller_batches(rows, "often")]
    assert batches[-1] == min(rows, 4)
    for larger, smaller in itertools.pairwise(batches):
        assert smaller < larger <= (1.25 if smaller >= 64 else 1.5) * smaller


def test_a_gpu_stops_compacting_earlier(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert shapes._smaller_batches(128, "often") == [112, 96, 80, 64, 48, 32]
    assert shapes._smaller_batches(32, "often") == []


def test_the_next_chunk_is_in_flight_before_the_last_one_is_drained(monkeypatch):
    events, decode_chunk, device_get = [], decode.decode_chunk, jax.device_get

    def dispatch(*arguments, **options):
        events.append("decode")
        return decode_chunk(*arguments, **options)

    def drain(samples):
        events.append(f"drain {samples.tokens.shape[1]}")
        return device_get(samples)

    monkeypatch.setattr(decode, "decode_chunk", dispatch)
    monkeypatch.setattr(jax, "device_get", drain)
    rollout(max_new_tokens=10, chunk_steps=3)
    # The last chunk is known to be the last.
    assert events == [
        "decode", "drain 1", "decode", "drain 3", "decode", "drain 3", "drain 3"
    ]  # fmt: skip


def test_a_row_that_is_not_active_attends_to_nothing():
    """Chunks are as fast as the rows that are left."""
    model, params, lora = policy()
    config = decode_config(model, max_new_tokens=24)
    state = decode.empty_state(5, 40, model_config=model, dtype=jnp.dtype(jnp.float32))
    # Slot 1 was compacted away.
    slots = np.array([0, 2, 3, 4], np.int32)
    state = state.replace(
        layers=jax.tree.map(lambda x: x[slots], state.layers),
        lengths=jnp.array([5, 1, 7, 9, 11]),
        rows=jnp.array([0, 9, 1, 2, 3]),
        counts=jnp.array([1, 1, 1, 22, 1]),
        ended=jnp.array([False, False, False, False, True]),
    )
    rows = decode.CacheRows(slots, np.array([True, False, True, True]))
    layers = decode.fuse_adapter(lora, model_config=model, dtype=jnp.dtype(jnp.float32))
    state, samples = decode.decode_chunk(
        KEY, params, layers, state, rows, np.float32(1), config=config, steps=4
    )
    # One row decodes, one is not active any more, one has its last tokens, one had ended.
    assert not np.isin(samples.tokens[0], EOS).any()
    assert state.ended.tolist() == [False, False, True, True, True]
    assert state.lengths.tolist() == [9, 1, 0, 0, 0]


def test_samples_follow_the_identity_of_the_prompt():
    picked = rollout(PROMPTS[::-1], **LONG, ids=[2, 1, 0])
    rows = np.arange(12).reshape(3, 4)[::-1].reshape(-1)
    same(picked, jax.tree.map(lambda x: x[rows], together()))
    assert (rollout(**LONG, ids=[5, 6, 7]).tokens != together().tokens).mean() > 0.5


def test_tokens_so_far_are_those_of_all_rows():
    looks = []
    for step in progress(**LONG, max_rows=8):
        result = step.rollout
        looks.append((result.tokens.copy(), result.lengths.copy()))
    lengths = np.array([lengths for _, lengths in looks])
    assert (np.diff(lengths, axis=0) >= 0).all()
    np.testing.assert_array_equal(lengths[0], [1] * 8 + [0] * 4)
    np.testing.assert_array_equal(lengths[-1], result.lengths)
    for tokens, lengths in looks:
        inside = np.arange(24) < lengths[:, None]
        np.testing.assert_array_equal(tokens, np.where(inside, result.tokens, PAD))


# --- Stop strings ---------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_steps", [2, pytest.param(23, marks=pytest.mark.slow)])
def test_a_stop_string_is_found_across_tokens_without_text(chunk_steps):
    def text(ids):
        return letters([i for i in ids if i not in silent])

    ids = together().tokens[np.argmax(together().lengths)]
    silent = set(ids[3:16].tolist()) - {ids[2], ids[16]}
    stop = text(ids[:17])[-4:]
    assert len(text(ids[2:17])) == 4
    assert len(text(ids[13:17])) == 2
    result = rollout(**LONG | {"chunk_steps": chunk_steps}, stop=(stop,), decode_text=text)
    assert result.lengths[np.argmax(together().lengths)] == 17


@pytest.mark.parametrize(
    ("max_rows", "chunk_steps"), [pytest.param(0, 5, marks=pytest.mark.slow), (0, 23), (5, 2)]
)
def test_a_stop_string_ends_a_completion_after_its_last_token(max_rows, chunk_steps):
    whole = together()
    # Of two long rows, parts of three tokens, and the end of two.
    first, second = np.flatnonzero(whole.lengths > 12)[:2]
    stop = (letters(whole.tokens[first, 3:6])[1:-1], letters(whole.tokens[second, 8:10])[1:])
    result = rollout(
        **LONG | {"chunk_steps": chunk_steps},
        max_rows=max_rows,
        stop=stop,
        decode_text=letters,
    )
    cut = 0
    for row in range(12):
        ids = whole.tokens[row, : whole.lengths[row]]
        ends = [n + 1 for n in range(len(ids)) if any(s in letters(ids[: n + 1]) for s in stop)]
        length = ends[0] if ends else len(ids)
        cut += length < len(ids)
        assert result.lengths[row] == length
        assert result.finished[row] == (bool(ends) or whole.finished[row])
        np.testing.assert_array_equal(result.tokens[row, :length], ids[:length])
        np.testing.assert_allclose(
            result.logprobs[row, :length], whole.logprobs[row, :length], atol=1e-4
        )
        assert (result.tokens[row, length:] == PAD).all()
        assert not result.logprobs[row, length:].any()
        assert not result.entropies[row, length:].any()
    assert cut >= 2


@pytest.mark.parametrize(
    ("stop", "length"),
    [
        (("<|im_end|>",), 3),
        (("t9", "<|im_end|>"), 3),
        (("t4", "<|im_end|>"), 2),
        (("t4 <|im_end|> t5",), 4),  # text around it
        (("t4 t5",), 4),  # text without it, which reads on across it
        (("im_end",), 6),  # no text of the completion
        (("t9",), 6),
    ],
)
@pytest.mark.parametrize("chunk", [1, 2, 6])
def test_a_stop_string_may_hold_a_special_token(stop, length, chunk, tmp_path):
    """Such a token has no text, so that only the text with special tokens shows it."""
    tiny_checkpoints.write_tokenizer(tmp_path, eos_token="<|endoftext|>")
    settings = {"eos_token_id": tiny_checkpoints.VOCAB - 2}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    tokenizer = from_folder(tmp_path)
    assert tokenizer.has_special("a<|im_end|>")
    assert not tokenizer.has_special("t4 t5")
    ids = np.array([[3, 4, tiny_checkpoints.VOCAB - 1, 5, 6, 7]], np.int32)
    zeros = np.zeros((1, chunk), np.float32)
    completions = Completions(1, SamplingConfig(max_new_tokens=6, stop=stop), tokenizer)
    row, ended = Row(0, identity=0, group=0, prompt=[1]), {}
    row.begin_turn(0, 6)
    while not ended:
        start = completions.rollout.lengths[0]
        part = ids[:, start : start + chunk]
        ended = completions.append([row], np.zeros(1, int), Samples(part, zeros, zeros))
    np.testing.assert_array_equal(completions.turn(row).ids, ids[0, :length])
    assert ended == {row: length < 6}


# --- Memory ---------------------------------------------------------------------------------------

POSITIONS = 16 + 24  # the longest prompt in its bucket, and its completion
POSITION = 2 * 1 * 2 * 16 * 4  # keys and values, layers, heads, dimensions, bytes


def plan(*, prompts=3, longest=9, group_size=4, **options):
    config, params, _ = policy()
    sampling, engine, _ = configs({"max_new_tokens": 24, "chunk_steps": 4} | options)
    return shapes.plan_shapes(
        params,
        num_prompts=prompts,
        longest=longest,
        group_size=group_size,
        model_config=config,
        sampling=sampling,
        engine=engine,
    )


def test_rows_wait_for_memory(chunks):
    one = (POSITIONS + 16) * POSITION
    same(rollout(**LONG, kv_cache_bytes=one), together())
    assert set(chunks) == {1}
    three = 3 * POSITIONS * POSITION + 16 * POSITION
    assert plan(kv_cache_bytes=three).batch_sizes[0] == 3
    assert plan(kv_cache_bytes=three - 1).batch_sizes[0] == 2
    assert plan(kv_cache_bytes=three, max_rows=2).batch_sizes[0] == 2
    assert plan(kv_cache_bytes=10**9).batch_sizes[0] == 12
    with pytest.raises(UserError, match=rf"kv_cache_bytes={one - 1}.* {one} bytes; raise it") as e:
        rollout(**LONG, kv_cache_bytes=one - 1)
    assert "\n" not in str(e.value)


def test_an_8_bit_cache_takes_a_quarter_of_the_memory(chunks):
    one = (POSITIONS + 16) * POSITION
    rollout(**LONG, kv_cache_bytes=one // 4, kv_cache_dtype="float8")
    assert set(chunks) == {1}
    four = 4 * POSITIONS * POSITION // 4 + 16 * POSITION // 4
    assert plan(kv_cache_bytes=four, kv_cache_dtype="float8").batch_sizes[0] == 4


def prefill_of(prompts):
    config, _, _ = policy()
    dtype = jnp.dtype(jnp.float32)
    options = {"width": 16, "dtype": dtype, "buffer": PlannedBuffer(dtype)}
    return shapes.prefill_bytes(config, num_prompts=prompts, **options)


@pytest.fixture
def memory(monkeypatch):
    """What the device says of its memory."""
    stats = {"bytes_limit": 10**9, "bytes_in_use": 0}
    device = mock.Mock(memory_stats=lambda: stats)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    return stats


def test_rows_follow_from_what_the_device_has_left(memory):
    row = POSITIONS * POSITION + 4 * 4 * 48
    assert plan(prompts=9).batch_sizes[0] == 36
    memory["bytes_in_use"] = 9 * 10**8 - prefill_of(9) - 15 * row
    assert plan(prompts=9).batch_sizes[0] == 12  # of 15
    assert plan(prompts=3).batch_sizes[0] == 12
    memory["bytes_in_use"] += 7 * row
    assert plan(prompts=9).batch_sizes[0] == 8
    # A given number of rows or bytes is not compared with the device's memory.
    assert plan(prompts=9, max_rows=33).batch_sizes[0] == 33
    assert plan(prompts=9, kv_cache_bytes=10**9).batch_sizes[0] == 36


def test_a_device_with_memory_for_one_row_or_none(memory):
    needed = POSITIONS * POSITION + 4 * 4 * 48 + prefill_of(1)
    memory["bytes_in_use"] = 9 * 10**8 - needed
    assert (plan(prompts=9).batch_sizes, plan(prompts=9).prefill_batch) == ((1,), 1)
    memory["bytes_in_use"] += 1
    refused(f"memory for the policy and one row of {POSITIONS} positions", plan, prompts=9)


def test_a_prefill_has_at_most_the_given_number_of_prompts():
    assert plan(prompts=9, prefill_prompts=4).prefill_batch == 3  # three of three
    assert plan(prompts=9).prefill_batch == 9


def test_a_chunk_holds_the_cache_once():
    model, params, lora = policy(layers=3)
    config = decode_config(model, max_new_tokens=2000)
    state = decode.empty_state(8, 2048, model_config=model, dtype=jnp.dtype(jnp.float32))
    size = sum(x.nbytes for x in jax.tree.leaves(state.layers))
    layers = decode.fuse_adapter(lora, model_config=model, dtype=jnp.dtype(jnp.float32))
    rows = decode.CacheRows(np.arange(8, dtype=np.int32), np.ones(8, bool))
    lowered = decode.decode_chunk.lower(
        KEY, params, layers, state, rows, np.float32(1), config=config, steps=4
    )
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size  # of one layer


@pytest.mark.parametrize(("calls", "together"), [(16, [1] * 6), (2, [3, 3]), (4, [2, 2, 2])])
def test_a_compaction_holds_few_arrays_twice(calls, together, monkeypatch):
    held, found, gather_rows = [], [], decode.gather_rows

    def recording(arrays, indices):
        row = arrays[0].shape[1:]
        held.append(sum(y.nbytes for y in jax.live_arrays() if y.shape[1:] == row))
        found.append(len(arrays))
        return gather_rows(arrays, indices)

    whole = rollout(**LONG | {"layers": 3})
    monkeypatch.setattr(decode, "gather_rows", recording)
    monkeypatch.setattr(shapes, "_COMPACTION_CALLS", calls)
    monkeypatch.setattr(shapes, "logits_bytes", lambda _: 1 << 20)
    again = rollout(**LONG | {"layers": 3})
    jax.tree.map(np.testing.assert_array_equal, again, whole)
    row, number = POSITIONS * 2 * 16 * 4, len(together)
    assert found[:number] == together
    # Arrays shrink from 12 to 8 rows before the next ones are gathered.
    before = np.cumsum([0, *together[:-1]])
    assert held[:number] == ((6 * 12 - 4 * before) * row).tolist()


@pytest.mark.slow
def test_ten_thousand_prompts_in_little_memory():
    rng = np.random.default_rng(0)
    prompts = [rng.integers(48, size=n).tolist() for n in rng.integers(1, 17, size=10_000)]
    limit = 64 * POSITIONS * POSITION
    before = sum(x.nbytes for x in jax.live_arrays())
    held = []
    options = {"max_new_tokens": 24, "eos_ids": EOS, "chunk_steps": 8}
    for step in progress(prompts, **options, kv_cache_bytes=limit):
        held.append(sum(x.nbytes for x in jax.live_arrays()))
        result = step.rollout
    assert (result.finished | (result.lengths == 24)).all()
    assert len(held) > 400
    # The cache; logits of prefilled prompts, and the samples of two chunks.
    assert max(held) - before < limit + 500_000
    assert max(held[-100:]) <= max(held[:100])


# --- What cannot be done --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        ([], {}, "no prompt"),
        ([[1, 2], []], {}, "prompt 1 is empty"),
        ([[1, 2], [3, 48]], {}, "prompt 1 has token ids from 3 to 48, .* from 0 to 47"),
        ([[1, -5]], {}, "prompt 0 has token ids from -5 to 1"),
        ([[1, 2]], {"group_size": 0}, "group_size is 0, expected at least 1"),
        ([[1] * 120], {}, "a prompt of 120 tokens and 9 new ones.* 128 positions"),
        ([[1]], {"prompt_width": 120}, "a prompt of 120 tokens"),
        ([[1, 2, 3], [1, 2, 4]], {"shared_tokens": 3}, "only 2 tokens are the same.* pass 0"),
        ([[1, 2], [1, 2, 4]], {"shared_tokens": 2}, "shared_tokens=2: only 1 tokens"),
        ([[1]], {"key": jax.random.key(5, impl="rbg")}, "a key of .*rbg.* impl='threefry2x32'"),
        ([[1]], {"kv_cache_bytes": 100}, "kv_cache_bytes=100: one row of 24 positions"),
        ([[1]], {"kv_cache_dtype": "int4"}, "kv_cache_dtype='int4'.*'float8'"),
    ],
)
def test_what_cannot_be_done_is_one_line(prompts, options, words):
    refused(words, rollout, prompts, **options)
