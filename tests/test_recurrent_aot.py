"""An update of recurrent layers, compiled for an H200 without one: the memory that it takes.

uv run --group aot pytest -n 0 -m aot
"""

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

from pallas_kernels import chunks_sm90
from pallas_kernels.fp4_matmul import dispatch
from qerl_jax.memory.update_plan import update_memory
from qerl_jax.policy import lora, sizes
from qerl_jax.policy.architectures import ARCHITECTURES
from qerl_jax.policy.lora import LoraConfig
from qerl_jax.policy.trainable import Trainable
from qerl_jax.rl import train_step
from qerl_jax.rl.packing import empty_buffer
from qerl_jax.rl.train_step import UpdateConfig, init_state

pytestmark = pytest.mark.aot


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kept", [1, 2])
def test_the_kernel_of_chunks(kept, reverse, capfd):
    """It spills no registers and copies nothing."""
    count, heads, rows = 132, 32, kept * chunks_sm90.WIDTH
    made, written = (64, 128) if reverse else (128, 64)
    wide = functools.partial(h200.array, dtype=jnp.float32)
    with h200.compiler() as compile_for_h200:
        compiled = compile_for_h200(
            functools.partial(chunks_sm90.run, reverse=reverse),
            *(wide(heads, rows, 128), h200.array(count, heads, made, rows)),
            *(h200.array(count, heads, rows, written), wide(count, heads, kept, kept)),
            [wide(count, heads, 64, 128)] * (1 if reverse else 2),
        )
    report = "".join(capfd.readouterr())
    assert "chunks_sm90" in report
    assert set(re.findall(r"(\d+) bytes spill stores", report)) == {"0"}
    assert "Potential Performance Loss" not in report
    assert " copy(" not in compiled.as_text()


def test_the_memory_of_an_update_is_the_planned_one(monkeypatch):
    """Arrays of zeros, equal in all layers, once existed for all layers at the same time."""
    layers = 8
    monkeypatch.setattr(dispatch, "supports_device", lambda: True)
    whole = ARCHITECTURES["qwen3.5-27b"]
    recurrent = tuple(layer for layer in whole.recurrent_layers if layer < layers)
    config = dataclasses.replace(whole, num_layers=layers, recurrent_layers=recurrent)
    params = h200.policy(config)
    own = LoraConfig(rank=32, alpha=32.0)
    adapter = jax.eval_shape(lambda: lora.init(jax.random.key(0), config, own))
    optimizer = optax.adamw(1e-3)
    state = jax.eval_shape(lambda x: init_state(Trainable(x, {}), optimizer), adapter)
    update = UpdateConfig(config, loss_config("grpo"), recompute=("gate_up_proj",))
    zero_totals = functools.partial(train_step.zero_totals, update_config=update)
    totals = jax.eval_shape(zero_totals, state.trainable)
    with h200.compiler() as compile_for_h200:
        gradient = compile_for_h200(
            train_step.add_gradient,
            *(totals, state.trainable, params, None, empty_buffer(4352)),
            *(np.bool_(True), np.float32(1)),
            update_config=update,
        )
    fused = sizes.fused_adapter_bytes(config, rank=32, targets=own.targets, itemsize=2)
    plan = update_memory(config, tokens=4352, recompute=update.recompute, itemsize=2, adapter=fused)
    assert gradient.memory_analysis().temp_size_in_bytes == pytest.approx(plan.bytes, rel=0.1)
