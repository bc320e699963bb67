"""Who decodes together: seats that are refilled and closed up, their memory, and their programs."""

import functools
import itertools
import weakref
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_engine
from test_engine import KEY, PAD, PROMPTS
from tiny_model import random_tokens

from pallas_kernels.decode import to_cache
from qerl_jax import buckets
from qerl_jax.errors import UserError
from qerl_jax.rollout import budget, decode
from qerl_jax.rollout.ahead import compile_ahead
from qerl_jax.rollout.engine import SamplingConfig, generate, live_share

policy = functools.partial(test_engine.policy, layers=1)
rollout = functools.partial(test_engine.rollout, layers=1)
EOS = (3, 4, 5, 6)  # Rows of 24 tokens end early, and at different times.
LONG = {"max_new_tokens": 24, "group_size": 4, "eos_ids": EOS, "chunk_steps": 4}


@functools.cache
def together():
    """All twelve rows from the start, and never fewer seats."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "_smaller_batches", lambda rows: [])
        return rollout(**LONG)


@pytest.fixture
def chunks(monkeypatch):
    """The numbers of seats of the chunks that are decoded."""
    together()  # Its chunks are none of these.
    seen, decode_chunk = [], decode.decode_chunk

    def recording(key, params, fused_lora, batch, needed, **options):
        seen.append(len(needed))
        return decode_chunk(key, params, fused_lora, batch, needed, **options)

    monkeypatch.setattr(decode, "decode_chunk", recording)
    return seen


def rules_of(config, *, max_new_tokens):
    return decode.Rules(
        config=config,
        eos_ids=EOS,
        max_new_tokens=max_new_tokens,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        dequantize="once",
    )


def same(result, expected, *, atol=1e-4):
    """The same draws, and log-probabilities but for rounding."""
    for name in ("tokens", "lengths", "finished"):
        np.testing.assert_array_equal(getattr(result, name), getattr(expected, name))
    np.testing.assert_allclose(result.logprobs, expected.logprobs, atol=atol)
    np.testing.assert_allclose(result.entropies, expected.entropies, atol=atol)


# --- Seats ----------------------------------------------------------------------------------------


def test_the_rows_of_these_tests_end_at_different_times():
    lengths = together().lengths
    assert len(set(lengths.tolist())) > 5
    assert together().finished.any()
    assert not together().finished.all()


@pytest.mark.parametrize(
    ("max_rows", "chunk_steps"),
    [
        (1, 8),
        (3, 2),
        (0, 4),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in ((8, 4), (0, 23))),
    ],
)
def test_rows_draw_the_same_whoever_decodes_beside_them(chunks, max_rows, chunk_steps):
    costs, progress = [], []
    result = rollout(
        **LONG | {"chunk_steps": chunk_steps},
        max_rows=max_rows,
        on_statistics=costs.append,
        on_progress=lambda done, tokens: progress.append((done, tokens)),
    )
    same(result, together())
    assert chunks[0] == (max_rows or 12)
    steps = -(-23 // -(-23 // chunk_steps))
    assert costs[0].decoded == sum(chunks) * steps
    assert costs[0].live == result.lengths.sum() - 12
    assert live_share(costs) == costs[0].live / costs[0].decoded
    assert progress == sorted(progress)


def test_a_prompt_is_read_once_however_its_rows_are_seated(monkeypatch):
    monkeypatch.setattr(budget, "_READ_TOKENS", 1)  # one prompt at a time
    costs = []
    same(rollout(**LONG, max_rows=3, on_statistics=costs.append), together())
    assert costs[0].prompts_read == 3


def test_what_was_read_is_gone_when_others_are_read(monkeypatch):
    expected, kept, read_prompts = together(), [], decode.read_prompts

    def recording(*arguments, **options):
        assert all(keys() is None for keys in kept)
        read = read_prompts(*arguments, **options)
        kept.append(weakref.ref(read.cache.keys[0]))
        return read

    monkeypatch.setattr(decode, "read_prompts", recording)
    monkeypatch.setattr(budget, "_READ_TOKENS", 1)  # one prompt at a time, all at once seated
    same(rollout(**LONG), expected)
    assert len(kept) == 3


def test_prompts_are_read_in_full_batches_of_few_widths(monkeypatch):
    shapes, read_prompts = [], decode.read_prompts

    def recording(params, lora, tokens, lengths, **options):
        shapes.append(tokens.shape)
        return read_prompts(params, lora, tokens, lengths, **options)

    monkeypatch.setattr(decode, "read_prompts", recording)
    monkeypatch.setattr(budget, "_READ_TOKENS", 3 * 96)
    monkeypatch.setattr(buckets, "_NARROWEST", 16)
    prompts = [list(random_tokens(length, seed=length)) for length in (90, 40, 9, 8, 30)]
    result = rollout(prompts, max_rows=2, prompt_width=96)
    assert shapes == [(3, 96), (3, 48)]
    monkeypatch.undo()
    same(result, rollout(prompts))


def test_seats_close_up_when_nobody_waits(chunks):
    costs = []
    rollout(**LONG, max_rows=8, on_statistics=costs.append)
    full = chunks.count(8)
    assert full > 2
    assert chunks[:full] == [8] * full
    assert chunks[full:] == sorted(chunks[full:], reverse=True)
    assert set(chunks) <= {8, 6, 4}
    assert 4 in chunks
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "_smaller_batches", lambda rows: [])
        rollout(**LONG, max_rows=8, on_statistics=costs.append)
    assert costs[0].live == costs[1].live
    assert costs[0].decoded < costs[1].decoded
    assert live_share(costs[:1]) > live_share(costs[1:]) > 0.3


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 7, 12, 100, 128, 1000])
def test_batches_are_not_far_apart(rows):
    batches = [rows, *budget._smaller_batches(rows)]
    assert batches[-1] == min(rows, 4)
    for larger, smaller in itertools.pairwise(batches):
        assert smaller < larger <= (1.25 if smaller >= 64 else 1.5) * smaller


def test_a_gpu_stops_shrinking_earlier(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert budget._smaller_batches(128) == [112, 96, 80, 64, 48, 32]
    assert budget._smaller_batches(32) == []


def test_the_next_chunk_is_on_its_way_before_the_last_one_is_looked_at(monkeypatch):
    events, decode_chunk, device_get = [], decode.decode_chunk, jax.device_get

    def dispatch(*arguments, **options):
        events.append("decode")
        return decode_chunk(*arguments, **options)

    def look(drawn):
        events.append(f"look at {drawn.tokens.shape[1]}")
        return device_get(drawn)

    monkeypatch.setattr(decode, "decode_chunk", dispatch)
    monkeypatch.setattr(jax, "device_get", look)
    rollout(max_new_tokens=10, chunk_steps=3)
    # The last chunk is known to be the last.
    assert events == [
        "decode", "look at 1", "decode", "look at 3", "decode", "look at 3", "look at 3"
    ]  # fmt: skip


def test_a_seat_that_nobody_needs_reads_nothing():
    """Chunks are as fast as the rows that are left."""
    config, params, lora = policy()
    rules = rules_of(config, max_new_tokens=24)
    batch = decode.empty_batch(4, 40, config=config, dtype=jnp.dtype(jnp.float32))
    batch = batch.replace(
        cache=batch.cache.replace(lengths=jnp.array([5, 7, 9, 11])),
        rows=jnp.arange(4),
        counts=jnp.array([1, 1, 22, 1]),
        done=jnp.array([False, False, False, True]),
    )
    needed = np.array([True, False, True, True])
    fused = decode.fuse_adapter(lora, config=config, dtype=jnp.dtype(jnp.float32))
    batch, drawn = decode.decode_chunk(KEY, params, fused, batch, needed, rules=rules, steps=4)
    # One decodes, one is not needed any more, one has its last tokens, one had ended.
    assert not np.isin(drawn.tokens[0], EOS).any()
    assert batch.done.tolist() == [False, True, True, True]
    assert batch.cache.lengths.tolist() == [9, 0, 0, 0]


def test_draws_follow_the_prompts_identity():
    picked = rollout(PROMPTS[::-1], **LONG, prompt_ids=[2, 1, 0])
    rows = np.arange(12).reshape(3, 4)[::-1].reshape(-1)
    same(picked, jax.tree.map(lambda x: x[rows], together()))
    assert (rollout(**LONG, prompt_ids=[5, 6, 7]).tokens != together().tokens).mean() > 0.5


def test_tokens_so_far_are_those_of_all_rows():
    looks = []
    result = rollout(**LONG, max_rows=8, on_tokens=lambda *look: looks.append(look))
    lengths = np.array([lengths for _, lengths in looks])
    assert (np.diff(lengths, axis=0) >= 0).all()
    np.testing.assert_array_equal(lengths[0], [1] * 8 + [0] * 4)
    np.testing.assert_array_equal(lengths[-1], result.lengths)
    for tokens, lengths in looks:
        inside = np.arange(24) < lengths[:, None]
        np.testing.assert_array_equal(tokens, np.where(inside, result.tokens, PAD))


# --- Stop strings ---------------------------------------------------------------------------------


def letters(ids):
    """Every token is two letters of its own."""
    return "".join(f"{chr(ord('a') + i % 16)}{chr(ord('A') + i // 16)}" for i in ids)


def test_a_stop_string_is_found_behind_tokens_without_text():
    def text(ids):
        return letters([i for i in ids if i not in silent])

    ids = together().tokens[np.argmax(together().lengths)]
    silent = set(ids[3:16].tolist()) - {ids[2], ids[16]}
    stop = text(ids[:17])[-4:]
    assert len(text(ids[2:17])) == 4
    assert len(text(ids[13:17])) == 2
    for chunk_steps in (2, 23):
        result = rollout(**LONG | {"chunk_steps": chunk_steps}, stop=(stop,), decode_text=text)
        assert result.lengths[np.argmax(together().lengths)] == 17


@pytest.mark.parametrize(("max_rows", "chunk_steps"), [(0, 5), (0, 23), (5, 2)])
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


# --- Memory ---------------------------------------------------------------------------------------

SLOTS = 16 + 24  # of the longest prompt in its bucket, and its completion
POSITION = 2 * 1 * 2 * 16 * 4  # keys and values, layers, heads, dimensions, bytes


def plan(*, prompts=3, longest=9, group_size=4, reserve=0, **options):
    config, params, _ = policy()
    sampling = SamplingConfig(**{"max_new_tokens": 24, "chunk_steps": 4} | options)
    return budget.make_plan(
        params,
        prompts=prompts,
        longest=longest,
        group_size=group_size,
        config=config,
        sampling=sampling,
        reserve=reserve,
    )


def test_rows_wait_for_memory(chunks):
    one = (SLOTS + 16) * POSITION
    same(rollout(**LONG, kv_cache_bytes=one), together())
    assert set(chunks) == {1}
    three = 3 * SLOTS * POSITION + 16 * POSITION
    assert plan(kv_cache_bytes=three).batches[0] == 3
    assert plan(kv_cache_bytes=three - 1).batches[0] == 2
    assert plan(kv_cache_bytes=three, max_rows=2).batches[0] == 2
    assert plan(kv_cache_bytes=10**9).batches[0] == 12
    with pytest.raises(UserError, match=rf"kv_cache_bytes={one - 1}.* {one} bytes; raise it") as e:
        rollout(**LONG, kv_cache_bytes=one - 1)
    assert "\n" not in str(e.value)


def test_an_8_bit_cache_takes_a_quarter_of_the_memory(chunks):
    one = (SLOTS + 16) * POSITION
    rollout(**LONG, kv_cache_bytes=one // 4, kv_cache_dtype="float8")
    assert set(chunks) == {1}
    four = 4 * SLOTS * POSITION // 4 + 16 * POSITION // 4
    assert plan(kv_cache_bytes=four, kv_cache_dtype="float8").batches[0] == 4


def test_rows_follow_from_what_the_device_has_left(monkeypatch):
    class Device:
        def memory_stats(self):
            return {"bytes_limit": 400_000, "bytes_in_use": 150_000}

    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    row = SLOTS * POSITION + 4 * 4 * 48
    prompts = 9 * 16 * POSITION
    assert (360_000 - 150_000 - prompts) // row == 15
    assert plan(prompts=9).batches[0] == 12
    assert plan(prompts=3).batches[0] == 12
    assert plan(prompts=9, reserve=7 * row).batches[0] == 8
    # What was asked for is not measured.
    assert plan(prompts=9, max_rows=33).batches[0] == 33
    assert plan(prompts=9, kv_cache_bytes=10**9).batches[0] == 36


def test_a_device_with_memory_for_one_row_or_none(monkeypatch):
    needed = SLOTS * POSITION + 4 * 4 * 48 + 16 * POSITION
    memory = {"bytes_limit": 400_000, "bytes_in_use": 360_000 - needed}
    device = mock.Mock(memory_stats=lambda: memory)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert (plan(prompts=9).batches, plan(prompts=9).prompts) == ((1,), 1)
    with pytest.raises(UserError, match="beside the policy and what trains it"):
        plan(prompts=9, reserve=1)
    memory["bytes_in_use"] += 1
    with pytest.raises(UserError, match=f"no memory for one row of {SLOTS} positions") as e:
        plan(prompts=9)
    assert "\n" not in str(e.value)


def test_a_chunk_holds_the_cache_once():
    config, params, lora = policy(layers=3)
    rules = rules_of(config, max_new_tokens=2000)
    batch = decode.empty_batch(8, 2048, config=config, dtype=jnp.dtype(jnp.float32))
    size = sum(x.nbytes for x in jax.tree.leaves(batch.cache))
    fused = decode.fuse_adapter(lora, config=config, dtype=jnp.dtype(jnp.float32))
    lowered = decode.decode_chunk.lower(
        KEY, params, fused, batch, np.ones(8, bool), rules=rules, steps=4
    )
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size  # of one layer


@pytest.mark.slow
def test_ten_thousand_prompts_in_little_memory():
    config, params, lora = policy()
    rng = np.random.default_rng(0)
    prompts = [rng.integers(48, size=n).tolist() for n in rng.integers(1, 17, size=10_000)]
    held = []

    def on_progress(done, tokens):
        held.append(sum(x.nbytes for x in jax.live_arrays()))

    limit = 64 * SLOTS * POSITION
    before = sum(x.nbytes for x in jax.live_arrays())
    result = generate(
        KEY,
        params,
        lora,
        prompts,
        config=config,
        sampling=SamplingConfig(max_new_tokens=24, chunk_steps=8, kv_cache_bytes=limit),
        eos_ids=EOS,
        pad_id=PAD,
        on_progress=on_progress,
    )
    assert (result.finished | (result.lengths == 24)).all()
    assert len(held) > 400
    # The cache; logits of prompts that were read, and what two chunks drew.
    assert max(held) - before < limit + 500_000
    assert max(held[-100:]) <= max(held[:100])


# --- An 8-bit cache -------------------------------------------------------------------------------


def test_large_keys_are_cut_off():
    x = jnp.array([1e4, -1e4, 448.0, 0.3, jnp.inf], jnp.float32)
    stored = to_cache(x, jnp.dtype(jnp.float8_e4m3fn)).astype(jnp.float32)
    np.testing.assert_array_equal(stored, [448.0, -448.0, 448.0, 0.3125, 448.0])


@pytest.mark.parametrize(
    ("dtype", "least", "most"), [("bfloat16", 1e-5, 0.05), ("float8", 0.01, 1)]
)
def test_a_cache_of_fewer_bits_changes_the_logprobs_a_little(dtype, least, most):
    exact = rollout(temperature=0.0, max_new_tokens=4)
    rounded = rollout(temperature=0.0, max_new_tokens=4, kv_cache_dtype=dtype)
    # The first token follows from the prompt as it is read.
    np.testing.assert_array_equal(rounded.logprobs[:, 0], exact.logprobs[:, 0])
    alike = (rounded.tokens == exact.tokens).cumprod(axis=1).astype(bool)
    assert alike[:, :2].all()
    difference = np.abs(rounded.logprobs - exact.logprobs)[alike]
    assert least < difference.max() < most


# --- What cannot be done --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        ([], {}, "no prompt"),
        ([[1, 2], []], {}, "prompt 1 is empty"),
        ([[1] * 120], {}, "a prompt of 120 tokens and 9 new ones.* 128 positions"),
        ([[1]], {"prompt_width": 120}, "a prompt of 120 tokens"),
        ([[1]], {"kv_cache_bytes": 100}, "kv_cache_bytes=100: one row of 24 positions"),
        ([[1]], {"kv_cache_dtype": "int4"}, "kv_cache_dtype='int4'.*'float8'"),
        ([[1]], {"stop": ("x",)}, "stop strings need decode_text"),
    ],
)
def test_what_cannot_be_done_is_one_line(prompts, options, words):
    with pytest.raises(UserError, match=words) as caught:
        rollout(prompts, **options)
    assert "\n" not in str(caught.value)


# --- Programs -------------------------------------------------------------------------------------


def test_all_programs_are_compiled_ahead():
    config, params, lora = policy()
    options = {"max_new_tokens": 22, "group_size": 4, "eos_ids": EOS, "max_rows": 6}
    seen = []
    programs = compile_ahead(
        jax.random.key(9),
        params,
        lora,
        prompts=3,
        prompt_width=9,
        config=config,
        sampling=SamplingConfig(max_new_tokens=22, chunk_steps=4, max_rows=6),
        eos_ids=EOS,
        group_size=4,
        on_progress=lambda *done: seen.append(done),
    )
    total = seen[0][1]
    assert seen == [(n, total) for n in range(1, total + 1)]
    noisy = jax.jit(lambda params: jax.tree.map(lambda x: x * 1.01, params))(params)
    again = {"params": noisy, "key": jax.random.key(1), "compiled": True}
    ahead = rollout(**options, **again, compiled_ahead=programs)
    with pytest.raises(RuntimeError, match=r"jit\(decode_chunk\).*slots=40"):
        rollout(**options, compiled=True, compiled_ahead=programs, chunk_steps=5)
    # What was compiled ahead is what jit would compile, too.
    jitted = rollout(**options, **again)
    for x, y in zip(jax.tree.leaves(ahead), jax.tree.leaves(jitted), strict=True):
        np.testing.assert_array_equal(x, y)


def test_bound_and_unbound_arrays_have_the_same_programs():
    _, params, _ = policy()
    rollout(max_new_tokens=5)
    bound = jax.device_put(params, jax.devices()[0])
    assert bound["norm"].committed != params["norm"].committed
    rollout(max_new_tokens=5, params=bound, compiled=True)
