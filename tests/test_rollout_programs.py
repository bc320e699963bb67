"""Programs of a rollout that are compiled ahead of time, and the dtypes of its cache."""

import collections
import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_rollout
from tiny_rollout import KEY, TinyTokenizer

from pallas_kernels.decode import to_cache
from qerl_jax.compile.operation import commit
from qerl_jax.policy.architectures import ARCHITECTURES
from qerl_jax.policy.layers import kinds
from qerl_jax.policy.policy import Policy
from qerl_jax.rollout import decode, programs, shapes
from qerl_jax.rollout.config import EngineConfig, SamplingConfig

policy = functools.partial(tiny_rollout.policy, layers=1)
rollout = functools.partial(tiny_rollout.rollout, layers=1)
sampler = functools.partial(tiny_rollout.sampler, layers=1)
EOS = (3, 4, 5, 6)


def test_all_programs_are_compiled_ahead():
    _, params, lora = policy()
    options = {"max_new_tokens": 22, "chunk_steps": 4, "max_rows": 6, "prompt_width": 9}
    options |= {"group_size": 4, "eos_ids": EOS}
    seen = []
    executables = (
        sampler(**options)
        .compiled(
            jax.random.key(9),
            Policy(params, lora),
            num_prompts=3,
            on_progress=lambda *done: seen.append(done),
        )
        .executables
    )
    assert seen == [(n, len(executables)) for n in range(1, len(executables) + 1)]
    noisy = jax.jit(lambda params: jax.tree.map(lambda x: x * 1.01, params))(params)
    options |= {"params": noisy, "key": jax.random.key(1)}
    ahead = rollout(**options, executables=executables)
    with pytest.raises(RuntimeError, match=r"operation \('decode', 6, .*compile the operations"):
        rollout(**options | {"chunk_steps": 5}, executables=executables)
    # Programs compiled ahead of time are those that jit compiles.
    jax.tree.map(np.testing.assert_array_equal, ahead, rollout(**options))


def test_rollouts_of_fewer_prompts_have_the_same_programs():
    """One prompt of two completions in a batch of six rows, which is compacted once."""
    _, params, lora = policy()
    options = {"max_new_tokens": 22, "chunk_steps": 4, "max_rows": 6, "prompt_width": 9}
    options |= {"num_prompts": 3, "compact": "once", "eos_ids": EOS, "group_size": 2}
    ahead = sampler(**options).compiled(KEY, Policy(params, lora), num_prompts=3)
    decodes = [key for key in ahead.executables if key[0] == "decode"]
    assert sorted(key[1] for key in decodes) == [4, 6]
    found = ahead.rollout(KEY, Policy(params, lora), tiny_rollout.PROMPTS[1:2], ids=[1])
    whole = rollout(max_new_tokens=22, group_size=2, key=KEY, eos_ids=EOS)
    np.testing.assert_array_equal(found.tokens, whole.tokens[2:4])


def test_committed_and_uncommitted_arrays_have_the_same_programs():
    _, params, _ = policy()
    rollout(max_new_tokens=5)
    held = jax.device_put(params, jax.devices()[0])
    assert held["norm"].committed != params["norm"].committed
    sizes = decode.prefill._cache_size(), decode.decode_chunk._cache_size()
    rollout(max_new_tokens=5, params=held)
    assert sizes == (decode.prefill._cache_size(), decode.decode_chunk._cache_size())


@pytest.mark.parametrize(
    ("max_rows", "compact", "counts", "with_drafts"),
    [
        (0, "often", {"decode": 19, "compact": 18, "prefill": 3, "insert": 1}, (3, 7, 1)),
        (256, "often", {"decode": 11, "compact": 10, "prefill": 3, "insert": 3}, (3, 7, 3)),
        (256, "once", {"decode": 2, "compact": 1, "prefill": 3, "insert": 3}, (1, 2, 3)),
        (32, "once", {"decode": 1, "prefill": 3, "insert": 2}, (1, 3, 2)),
    ],
)
@pytest.mark.parametrize("drafts", ["off", "auto"])
def test_a_7b_policy_has_few_programs(max_rows, compact, counts, with_drafts, drafts, monkeypatch):
    """64 prompts of 256 tokens with 16 completions each, as in the benchmark of rollouts.

    Drafts add smaller batches, their own chunks, and what brings the tokens of rows to the device.
    """
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    config = ARCHITECTURES["qwen2.5-7b"]
    embedding = jax.ShapeDtypeStruct(
        (config.vocab_size, config.embed_dim), jnp.bfloat16, sharding=KEY.sharding
    )
    params = {"embed_tokens": embedding, "layers": []}
    sampling = SamplingConfig(max_new_tokens=1024)
    engine = EngineConfig(max_rows=max_rows, prompt_width=256, compact=compact, drafts=drafts)
    planned = shapes.plan_shapes(
        params,
        num_prompts=64,
        longest=256,
        group_size=16,
        model_config=config,
        sampling=sampling,
        engine=engine,
    )
    config = decode.decode_config(config, sampling, engine, TinyTokenizer())
    table = programs.operations(KEY, Policy(params, None), planned, config)
    names = [name if isinstance(name, str) else name[0] for name in table]
    counts = collections.Counter(counts | {"fuse_adapter": 1})
    if drafts == "auto":
        smaller, chunks, begins = with_drafts
        counts += {"compact": smaller, "draft": chunks, "begin": begins}
    assert collections.Counter(names) == counts


@pytest.mark.parametrize(
    ("model", "positions", "gathered", "calls"),
    [
        ("qwen2.5-1.5b", 704, 4, 14),
        ("qwen2.5-1.5b", 2304, 2, 28),
        ("qwen2.5-7b", 704, 2, 28),
        ("qwen2.5-7b", 2304, 1, 56),
        ("qwen3.5-4b", 704, 1, 64),
    ],
)
def test_a_compaction_has_few_programs_as_far_as_logits_have_more_bytes(
    model, positions, gathered, calls
):
    """XLA starts 32 programs before the first one has ended."""
    config, dtype = ARCHITECTURES[model], jnp.dtype(jnp.bfloat16)
    rows = jax.tree.leaves(kinds.row_shapes(config, positions, dtype))
    assert shapes.gathered_arrays(config, positions, dtype) == gathered
    largest = max(x.size * x.dtype.itemsize for x in rows)
    assert gathered == 1 or gathered * largest <= shapes.logits_bytes(config)
    planned = shapes.RolloutShapes(positions, (8, 4), 16, 1, (64,), (8,), dtype)
    batches = programs.compactions(config, planned)
    assert sorted(number for _, numbers in batches for number in numbers) == [*range(len(rows))]
    assert len(batches) == calls
    for _, numbers in batches:
        assert len({(rows[number].shape, rows[number].dtype) for number in numbers}) == 1


def test_a_rollout_leaves_no_arrays():
    """A policy of a step that waits for the garbage collector would fill the device."""
    _, params, _ = policy()
    rollout(params=params)
    gc.collect()
    gc.disable()
    try:
        before = len(jax.live_arrays())
        rollout(params=jax.tree.map(jnp.copy, params))
        assert len(jax.live_arrays()) == before
    finally:
        gc.enable()


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
    # The first token follows from the prefill, which is exact.
    np.testing.assert_array_equal(rounded.logprobs[:, 0], exact.logprobs[:, 0])
    alike = (rounded.tokens == exact.tokens).cumprod(axis=1).astype(bool)
    assert alike[:, :2].all()
    difference = np.abs(rounded.logprobs - exact.logprobs)[alike]
    assert least < difference.max() < most


def test_only_arrays_without_a_device_of_their_own_are_committed():
    (first, *_) = jax.devices()
    loose, held = jnp.arange(3), jax.device_put(jnp.arange(4), first)
    found = commit({"loose": loose, "held": held, "host": np.arange(2)})
    assert found["held"] is held
    assert (loose.committed, found["loose"].committed) == (False, True)
    assert {name: x.tolist() for name, x in found.items()} == {
        "loose": [0, 1, 2],
        "held": [0, 1, 2, 3],
        "host": [0, 1],
    }
