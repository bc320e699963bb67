"""An update on two H200s, compiled without them: no weight moves, and the gradient moves once.

uv run --group aot pytest -n 0 -m aot
"""

import dataclasses
import re

import h200
import jax
import numpy as np
import optax
import pytest
from h200 import array, tiles

from pallas_kernels import attention, fp4_matmul
from pallas_kernels.fp4_matmul import dispatch
from qerl_jax.policy import lora
from qerl_jax.policy.architectures import ARCHITECTURES
from qerl_jax.policy.lora import FUSED, PROJECTIONS, LoraConfig, projection_shapes
from qerl_jax.policy.quant import QuantTensor
from qerl_jax.policy.trainable import Trainable
from qerl_jax.rl import data_parallel
from qerl_jax.rl.losses import loss_config
from qerl_jax.rl.packing import empty_buffer
from qerl_jax.rl.train_step import UpdateConfig, init_state
from qerl_jax.sharding import dealt

pytestmark = pytest.mark.aot

CONFIG = dataclasses.replace(ARCHITECTURES["qwen2.5-coder-1.5b"], num_layers=1)
COLLECTIVE = re.compile(
    r" = .* (all-gather|all-to-all|all-reduce|reduce-scatter|collective-\w+)(?:-start)?\("
)


@pytest.fixture(scope="module")
def compile_for_two():
    with h200.compiler(devices=2) as compiled:
        yield compiled


def policy():
    """The shapes of one layer of the 1.5B model in NVFP4, and of its head."""
    embed, shapes = CONFIG.embed_dim, projection_shapes(CONFIG)

    def projection(members):
        outputs = sum(shapes[name][0] for name in members)
        return QuantTensor(tiles=tiles(outputs, shapes[members[0]][1]))

    norm = array(embed, dtype=np.float32)
    layer = {fused: projection(members) for fused, members in FUSED.items()}
    layer |= {"input_layernorm": norm, "post_attention_layernorm": norm}
    layer["qkv_bias"] = array(sum(shapes[name][0] for name in FUSED["qkv_proj"]))
    return {"embed_tokens": array(CONFIG.vocab_size, embed), "norm": norm, "layers": [layer]}


def collectives(program):
    return [found[1] for found in map(COLLECTIVE.search, program.as_text().splitlines()) if found]


def test_an_update(compile_for_two, monkeypatch):
    for module in (fp4_matmul, dispatch):
        monkeypatch.setattr(module, "supports_device", lambda: True)
    monkeypatch.setattr(attention, "supports_device", lambda *_: True)
    mesh, optimizer = compile_for_two.mesh, optax.adamw(1e-3)
    adapter = jax.eval_shape(
        lambda: lora.init(
            jax.random.key(0),
            CONFIG,
            LoraConfig(rank=32, alpha=32.0, rslora=False, targets=PROJECTIONS),
        )
    )
    state = jax.eval_shape(lambda x: init_state(Trainable(x, {}), optimizer), adapter)
    functions = data_parallel.functions(UpdateConfig(CONFIG, loss_config("grpo")), optimizer, mesh)
    totals = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=dealt(mesh)),
        functions["zero_totals"].eval_shape(state.trainable),
    )
    buffer = data_parallel.abstract_buffer(empty_buffer(1024), mesh)
    program = compile_for_two(
        functions["add_gradient"],
        *(totals, state.trainable, policy(), None, buffer, np.bool_(True), np.float32(1)),
    )
    assert not collectives(program)
    assert program.as_text().count("mosaic_gpu") > 10
    program = compile_for_two(functions["apply_gradient"], state, totals)
    assert sorted(collectives(program)) == ["all-gather", "all-to-all"]
