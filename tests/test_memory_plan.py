"""The plan of an update's memory: its bytes, and the buffers that it chooses."""

import dataclasses

import pytest

from qerl_jax.errors import UserError
from qerl_jax.policy.architectures import ARCHITECTURES
from qerl_jax.policy.transformer import PRODUCTS
from qerl_jax.training.memory_plan import (
    LongestRows,
    plan_update,
    recomputation,
    update_bytes,
)

GB = 10**9
ROWS = LongestRows(prompt=100, new_tokens=2048, group_size=8, prompts=1)


def plan(model="qwen2.5-7b", rows=ROWS, **changes):
    options = {
        "weights": 6 * GB,
        "training": 2 * GB,
        "itemsize": 2,
        "buffer_tokens": 0,
        "recompute": None,
        "device_bytes": 80 * GB,
    }
    return plan_update(ARCHITECTURES[model], rows, **options | changes)


@pytest.mark.parametrize(
    ("model", "tokens", "measured"),
    # temp_size_in_bytes of the compiled program, NVFP4 with LoRA 32 on an H100, jax 0.11.2
    [("qwen2.5-coder-1.5b", 8192, 13457520920), ("qwen2.5-7b", 8320, 27175342104)],
)
def test_the_bytes_are_those_of_the_compiled_program(model, tokens, measured):
    found = update_bytes(ARCHITECTURES[model], tokens=tokens, recompute=(), itemsize=2)
    assert 0.97 * measured < found < 1.1 * measured


def test_a_buffer_suits_the_longest_batch():
    found = plan()
    # Two rows and their prompt, rounded up to tiles of 128.
    assert (found.buffer_tokens, found.recompute) == (4224, ())
    assert found.buffer_tokens >= 99 + 2 * 2048
    assert found.peak == 8 * GB + found.update


def test_less_memory_computes_more_again():
    sizes = [plan("qwen2.5-32b", device_bytes=n * GB) for n in (140, 30, 18)]
    saved = [PRODUCTS.index(p.recompute[-1]) + 1 if p.recompute else 0 for p in sizes]
    assert saved == sorted(saved)
    assert all(p.peak <= 0.92 * n * GB for p, n in zip(sizes, (140, 30, 18), strict=True))
    assert plan("qwen2.5-32b", device_bytes=18 * GB).recompute == PRODUCTS
    with pytest.raises(UserError, match=r"2176 tokens takes .* GB .*the device has 12.0 GB: lower"):
        plan("qwen2.5-32b", device_bytes=12 * GB)


def test_a_wanted_size_is_kept():
    found = plan(buffer_tokens=3000, recompute=("o_proj",))
    assert (found.buffer_tokens, found.recompute) == (3072, ("o_proj",))
    with pytest.raises(UserError, match=r"buffer_tokens=2146 is less than the 2147 tokens"):
        plan(buffer_tokens=2146)


def test_on_a_cpu_a_buffer_is_about_a_group():
    short = LongestRows(prompt=41, new_tokens=16, group_size=8, prompts=8)
    assert plan(rows=short, device_bytes=None).buffer_tokens == 168
    long = dataclasses.replace(short, new_tokens=300)
    assert plan(rows=long, device_bytes=None).buffer_tokens == 512
    longest = dataclasses.replace(short, new_tokens=600)
    assert plan(rows=longest, device_bytes=None).buffer_tokens == 640


def test_recomputation():
    assert recomputation("auto") is None
    assert recomputation("none") == ()
    assert recomputation("all") == PRODUCTS
    assert recomputation("o_proj, qkv_proj") == ("qkv_proj", "o_proj")
    with pytest.raises(UserError, match=r"'mlp': choose .*gate_up_proj"):
        recomputation("mlp")
