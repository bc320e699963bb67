"""A mixture of experts, compiled for an H200 without one: no dense copy of all experts exists.

uv run --group aot pytest -n 0 -m aot
"""

import collections
import dataclasses
import functools
import re

import h200
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from row_loss import loss_config

from benchmarks.rollout import random_policy
from pallas_kernels import decode as decode_kernels
from pallas_kernels.decode import layer as decode_layer
from pallas_kernels.experts import api, dense_sm90
from pallas_kernels.experts.table import Table
from pallas_kernels.fp4_matmul import dispatch
from qerl_jax.config.models import lora_targets
from qerl_jax.policy import lora, transformer
from qerl_jax.policy.architectures import ARCHITECTURES
from qerl_jax.policy.layers import kinds
from qerl_jax.policy.lora import LoraConfig
from qerl_jax.policy.quant import QuantTensor
from qerl_jax.policy.trainable import Trainable
from qerl_jax.rl import train_step
from qerl_jax.rl.packing import empty_buffer
from qerl_jax.rl.train_step import UpdateConfig, init_state

pytestmark = pytest.mark.aot
DENSE_STACK = 2 * 256 * 1024 * 2048  # bytes of all experts' gate and up of a layer in bfloat16


def policy(model="qwen3.6-35b-a3b", layers=2, recurrent=(0,)):
    """Layers of a mixture in the order of the kernels, as shapes."""
    config = dataclasses.replace(
        ARCHITECTURES[model], num_layers=layers, recurrent_layers=recurrent, vocab_size=4096
    )
    table = h200.array(config.vocab_size, config.embed_dim)

    def layer_of(number):
        make = functools.partial(
            random_policy._random_layer,
            model_config=config,
            number=number,
            format="nvfp4",
            dtype=jnp.dtype(jnp.bfloat16),
        )
        layer = jax.eval_shape(lambda key: make(key), jax.random.key(0))
        return {
            name: QuantTensor(tiles=h200.tiles(x.packed.shape[0], 2 * x.packed.shape[1]))
            if isinstance(x, QuantTensor)
            else x
            for name, x in layer.items()
        }

    params = {
        "embed_tokens": table,
        "lm_head": table,
        "norm": h200.array(config.embed_dim, dtype=jnp.float32),
        "layers": [layer_of(number) for number in range(layers)],
    }
    own = LoraConfig(rank=32, alpha=32.0, targets=lora_targets(model))
    return config, params, jax.eval_shape(lambda: lora.init(jax.random.key(0), config, own))


@pytest.mark.parametrize("transposed", [False, True])
def test_the_grouped_product(transposed, capfd):
    """It spills no registers, changes its result where that is, and no product waits for one."""
    tiles, experts, (outputs, inputs) = 1308, 64, (1024, 2048)
    numbers = functools.partial(h200.array, dtype=jnp.int32)
    table = Table(numbers(8), numbers(64 * tiles), numbers(tiles), numbers())
    work = dense_sm90.Units(numbers(tiles), numbers(257))
    wide, narrow = (inputs, outputs)[::-1] if transposed else (inputs, outputs)

    @functools.partial(jax.jit, donate_argnums=5)
    def run(x, weight, table, work, experts, y, scales):
        options = {"outputs": outputs, "transposed": transposed, "num_sms": 132}
        scales = None if transposed else scales
        return dense_sm90.product(x, weight, table, work, experts, y, scales, **options)

    with h200.compiler() as compile_for_h200:
        compiled = compile_for_h200(
            run,
            *(h200.array(64 * tiles, wide), h200.array(experts * outputs, inputs)),
            *(table, work, numbers(2), h200.array(64 * tiles, narrow)),
            h200.array(256 * outputs, dtype=jnp.float32),
        )
    report = "".join(capfd.readouterr())
    assert "grouped_matmul_sm90" in report
    assert set(re.findall(r"(\d+) bytes spill stores", report)) == {"0"}
    assert "Potential Performance Loss" not in report
    assert " copy(" not in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**10


@pytest.mark.parametrize("kernel", ["mosaic", "mma"])
def test_an_update_dequantizes_experts_in_parts(kernel, monkeypatch):
    monkeypatch.setattr(dispatch, "supports_mma_device", lambda: kernel == "mma")
    monkeypatch.setattr(dispatch, "supports_device", lambda: kernel == "mosaic")
    jax.clear_caches()
    config, params, adapter = policy()
    state = jax.eval_shape(lambda x: init_state(Trainable(x, {}), optax.adamw(1e-3)), adapter)
    update = UpdateConfig(config, loss_config("grpo"), recompute=transformer.PRODUCTS)
    totals = jax.eval_shape(
        functools.partial(train_step.zero_totals, update_config=update), state.trainable
    )
    with h200.compiler() as compile_for_h200:
        gradient = compile_for_h200(
            train_step.add_gradient,
            *(totals, state.trainable, params, None, empty_buffer(1024)),
            *(np.bool_(True), np.float32(1)),
            update_config=update,
        )
    assert gradient.memory_analysis().temp_size_in_bytes < DENSE_STACK


def test_steps_dequantize_experts_in_parts(monkeypatch):
    monkeypatch.setattr(dispatch, "supports_device", lambda: True)
    jax.clear_caches()
    config, params, adapter = policy()
    sizes = {"config": config, "cache_positions": 256}

    def generate(params, adapter, tokens, lengths):
        logits, cache, routes = transformer.prefill(params, adapter, tokens, lengths, **sizes)
        fused = lora.fuse(adapter, config, jnp.bfloat16)

        def step(carry, _):
            logits, cache = carry
            tokens = logits.argmax(axis=-1).astype(jnp.int32)
            *carry, chosen = transformer.decode_step(params, fused, tokens, cache, config=config)
            return tuple(carry), (tokens, chosen)

        return jax.lax.scan(step, (logits, cache), length=8)[1], routes

    tokens, lengths = (h200.array(*shape, dtype=jnp.int32) for shape in ((32, 16), (32,)))
    with h200.compiler() as compile_for_h200:
        compiled = compile_for_h200(generate, params, adapter, tokens, lengths)
    assert compiled.memory_analysis().temp_size_in_bytes < DENSE_STACK


@pytest.mark.parametrize("rows", [1, 8, 256])
@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "gpt-oss-20b"])
def test_a_layer_of_a_step_has_few_kernels(model, rows, monkeypatch, capfd):
    """The router's product and the sum over the experts are parts of norms.

    Biases and the clamped SwiGLU of gpt-oss are parts of the kernels of experts.
    """
    monkeypatch.setattr(decode_kernels, "supports_device", lambda _: True)
    monkeypatch.setattr(decode_layer, "_sm90_attention_agrees", lambda: True)
    monkeypatch.setattr(decode_layer, "_experts_agree", lambda: True)
    monkeypatch.setattr(api, "has_kernel", lambda _: True)
    monkeypatch.setattr(dispatch, "supports_mma_device", lambda: False)
    monkeypatch.setattr(dispatch, "supports_device", lambda: True)
    counts = []
    for layers in (2, 3):
        jax.clear_caches()
        config, params, adapter = policy(model, layers, ())
        dtype = jnp.dtype(jnp.bfloat16)
        fused = jax.eval_shape(functools.partial(lora.fuse, config=config, dtype=dtype), adapter)
        kept = kinds.row_shapes(config, 448, dtype)
        kept = jax.tree.map(lambda x: h200.array(rows, *x.shape, dtype=x.dtype), kept)
        cache = transformer.Cache(kept, h200.array(rows, dtype=jnp.int32))

        def step(params, fused, tokens, cache, config=config):
            return transformer.decode_step(params, fused, tokens, cache, config=config)

        with h200.compiler() as compile_for_h200:
            compiled = compile_for_h200(
                step, params, fused, h200.array(rows, dtype=jnp.int32), cache
            )
        assert compiled.memory_analysis().temp_size_in_bytes < DENSE_STACK / 10
        names = re.findall(
            r'custom_call_target="mosaic_gpu\w*".*?op_name="[^"]*/(\w+)/mpmd_map"',
            compiled.as_text(),
        )
        counts.append(collections.Counter(names))
    added = counts[1] - counts[0]
    if model == "gpt-oss-20b":  # whose other weights are dense
        added = {name: added[name] for name in added if "expert" in name}
    else:
        assert [added.pop(name) for name in ("add_rmsnorm", "fp4_matmul_sm90")] == [2, 2]
        assert [added.pop(name) for name in ("attend", "merge_parts")] == [1, 1]
    assert added == {
        "route_experts": 1,
        **({"experts_gated_matmul": 1, "experts_matmul": 1} if rows == 1 else {"experts_mlp": 1}),
    }
    report = "".join(capfd.readouterr())
    assert "experts_m" in report
    assert set(re.findall(r"(\d+) bytes spill stores", report)) == {"0"}
