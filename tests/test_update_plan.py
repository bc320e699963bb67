"""The plan of an update's memory: its bytes, and the buffers that it chooses."""

import dataclasses

import jax.numpy as jnp
import pytest
from refusal import refused

from qerl_jax.config.models import lora_targets
from qerl_jax.memory import update_plan
from qerl_jax.memory.update_plan import (
    RECOMPUTATIONS,
    Kernels,
    LongestRows,
    plan_update,
    recomputation,
    update_memory,
)
from qerl_jax.policy import sizes
from qerl_jax.policy.architectures import ARCHITECTURES
from qerl_jax.policy.lora import LoraConfig
from qerl_jax.policy.transformer import PRODUCTS

GB, BF16 = 10**9, jnp.dtype("bfloat16")
ROWS = LongestRows(prompt=100, new_tokens=2048, group_size=8, num_prompts=1)


def plan(model="qwen2.5-7b", rows=ROWS, **changes):
    options = {
        "adapter": GB // 4,
        "dtype": BF16,
        "buffer_tokens": 0,
        "recompute": None,
        "free": 65 * GB,
    }
    return plan_update(ARCHITECTURES[model], rows, **options | changes)


@pytest.mark.parametrize(
    ("model", "layers", "tokens", "recompute", "measured"),
    # temp_size_in_bytes of `train_step.add_gradient` with NVFP4 weights and LoRA of rank 32,
    # compiled for a Hopper GPU without one by jax 0.11.2, and with recomputation on an H200 by jax
    # 0.12, where XLA tunes products.
    [
        ("qwen2.5-7b", 28, 4224, (), 13296812616),
        ("qwen2.5-14b", 48, 4224, (), 21032353352),
        ("qwen2.5-32b", 64, 2176, (), 22577626184),
        ("qwen3-4b", 36, 16384, ("gate_up_proj",), 20.814 * GB),
        ("qwen3-4b", 36, 65536, ("qkv_proj", "o_proj", "gate_up_proj"), 42.783 * GB),
        ("qwen3-8b", 36, 120064, PRODUCTS, 64.110 * GB),
    ],
)
def test_the_bytes_are_those_of_the_compiled_program(model, layers, tokens, recompute, measured):
    config = dataclasses.replace(ARCHITECTURES[model], num_layers=layers)
    targets = LoraConfig(rank=32, alpha=32.0).targets
    adapter = sizes.fused_adapter_bytes(config, rank=32, targets=targets, itemsize=2)
    found = update_memory(config, tokens=tokens, recompute=recompute, dtype=BF16, adapter=adapter)
    assert 0.98 * measured < found.bytes < 1.03 * measured


@pytest.mark.parametrize(
    ("model", "layers", "recompute", "measured"),
    # The same with 8,320 tokens. Rows of experts are larger than what fits between them, so XLA
    # loses more or less memory.
    [
        ("qwen3.6-35b-a3b", 4, ("gate_up_proj",), 3632366712),
        ("qwen3.6-35b-a3b", 16, (), 10957101960),
        ("qwen3-30b-a3b", 8, (), 5384583192),
        ("qwen3-30b-a3b", 16, (), 10014781720),
    ],
)
def test_the_bytes_of_mixtures_are_about_those_of_the_program(model, layers, recompute, measured):
    found = of_mixture(model, layers, 8320, recompute, Kernels(layers=False))
    assert 0.93 * measured < found < 1.08 * measured


def of_mixture(model, layers, tokens, recompute, kernels):
    """Returns the planned bytes of an update of the first layers of a mixture."""
    whole, targets = ARCHITECTURES[model], lora_targets(model)
    recurrent = tuple(layer for layer in whole.recurrent_layers if layer < layers)
    config = dataclasses.replace(whole, num_layers=layers, recurrent_layers=recurrent)
    adapter = sizes.fused_adapter_bytes(config, rank=32, targets=targets, itemsize=2)
    options = {"recompute": recompute, "dtype": BF16, "adapter": adapter, "kernels": kernels}
    return update_memory(config, tokens=tokens, **options).bytes


@pytest.mark.parametrize(
    ("model", "layers", "rank", "hopper", "measured"),
    [
        ("qwen3-30b-a3b", 4, 8, False, 4159216184),
        ("qwen3-30b-a3b", 4, 32, False, 4705508152),
        ("qwen3-30b-a3b", 8, 32, False, 7364482360),
        ("qwen3.6-35b-a3b", 4, 8, False, 5486900904),
        ("qwen3.6-35b-a3b", 4, 8, True, 4529975752),
    ],
)
def test_the_bytes_of_adapters_of_experts_are_planned(model, layers, rank, hopper, measured):
    """The same with adapters of experts, which add 1.1 to 2 GB."""
    whole = ARCHITECTURES[model]
    recurrent = tuple(layer for layer in whole.recurrent_layers if layer < layers)
    config = dataclasses.replace(whole, num_layers=layers, recurrent_layers=recurrent)
    options = {"rank": 32, "targets": lora_targets(model), "expert_rank": rank}
    adapter = sizes.fused_adapter_bytes(config, itemsize=2, **options)
    options = {"kernels": Kernels(layers=hopper), "adapts_experts": True}
    found = update_memory(config, tokens=8320, recompute=(), dtype=BF16, adapter=adapter, **options)
    assert 0.98 * measured < found.bytes < 1.15 * measured


@pytest.mark.parametrize(
    ("model", "layers", "tokens", "recompute", "measured"),
    # The same with the kernels of experts and of recurrent layers, by jax 0.12.0.1; mixtures on an
    # H200.
    [
        ("qwen3-30b-a3b", 48, 8448, (), 23275729664),
        ("qwen3.6-35b-a3b", 12, 8448, (), 8120709288),
        ("qwen3.6-35b-a3b", 4, 8320, ("gate_up_proj",), 3447040408),
        ("qwen3.5-27b", 4, 4352, (), 3542620248),
        ("qwen3.5-27b", 12, 4352, (), 8220011096),
        ("qwen3.5-27b", 4, 4352, ("gate_up_proj",), 2887684176),
        ("qwen3.5-27b", 8, 4352, ("gate_up_proj",), 4014780752),
    ],
)
def test_the_bytes_with_the_kernels_of_a_hopper_gpu(model, layers, tokens, recompute, measured):
    found = of_mixture(model, layers, tokens, recompute, Kernels())
    assert 0.97 * measured < found < 1.03 * measured


def test_experts_computed_again_take_the_time_of_those_chosen():
    # A token has 8 experts of gate, up and down, and attention of 32 heads and 2 x 4 for keys.
    third, attention = 8 * 768 * 2048, 2048 * (40 + 32) * 128
    found = update_plan._relative_time(ARCHITECTURES["qwen3-30b-a3b"], ("gate_up_proj",))
    assert found == pytest.approx(1 + 2 * third / (2 * (3 * third + attention)))


def test_a_buffer_suits_the_longest_batch():
    found = plan()
    # Two rows and their prompt, rounded up to tiles of 128.
    assert (found.buffer_tokens, found.recompute) == (4224, ())
    assert found.buffer_tokens >= 99 + 2 * 2048
    assert found.bytes == found.activations + max(found.head, found.layer)


def test_less_memory_computes_more_again():
    free = (120, 24, 6)
    found = [plan("qwen2.5-32b", free=n * GB) for n in free]
    saved = [RECOMPUTATIONS.index(p.recompute) for p in found]
    assert saved == sorted(saved)
    assert all(p.bytes <= n * GB for p, n in zip(found, free, strict=True))
    assert found[-1].recompute == PRODUCTS
    # Where nothing fits, it is what needs the least memory.
    least = plan("qwen2.5-32b", free=GB)
    assert (least.buffer_tokens, least.recompute) == (2176, PRODUCTS)
    assert least.bytes > GB


def test_attention_of_long_rows_is_computed_again_last():
    rows = LongestRows(prompt=256, new_tokens=65280, group_size=2, num_prompts=1)
    found = [plan("qwen3-4b", rows, free=n * GB).recompute for n in (76, 44, 30)]
    again = ("qkv_proj", "o_proj", "gate_up_proj")
    assert found == [("gate_up_proj", "o_proj"), again, PRODUCTS]


def test_a_wanted_size_is_kept():
    found = plan(buffer_tokens=3000, recompute=("o_proj",))
    assert (found.buffer_tokens, found.recompute) == (3072, ("o_proj",))
    refused(r"buffer_tokens=2146 is less than the 2147 tokens", plan, buffer_tokens=2146)


def test_on_a_cpu_a_buffer_is_about_a_group():
    short = LongestRows(prompt=41, new_tokens=16, group_size=8, num_prompts=8)
    assert plan(rows=short, free=None).buffer_tokens == 168
    long = dataclasses.replace(short, new_tokens=300)
    assert plan(rows=long, free=None).buffer_tokens == 512
    longest = dataclasses.replace(short, new_tokens=600)
    assert plan(rows=longest, free=None).buffer_tokens == 640


def test_recomputation():
    assert recomputation("auto") is None
    assert recomputation("none") == ()
    assert recomputation("all") == PRODUCTS
    assert recomputation("o_proj, qkv_proj") == ("qkv_proj", "o_proj")
    refused(r"'mlp': choose .*gate_up_proj", recomputation, "mlp")
