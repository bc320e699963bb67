"""Updates and decode steps on several H200s, compiled without them: no weight moves.

uv run --group aot pytest -n 0 -m aot
"""

import dataclasses
import functools
import re
import types

import h200
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from h200 import array, tiles
from jax.sharding import NamedSharding
from row_loss import loss_config

from pallas_kernels import attention
from pallas_kernels import decode as decode_kernels
from pallas_kernels.decode import layer as decode_layer
from pallas_kernels.fp4_matmul import dispatch
from qerl_jax.memory.update_plan import update_memory
from qerl_jax.policy import lora, sizes
from qerl_jax.policy.architectures import ARCHITECTURES
from qerl_jax.policy.layers.kinds import PROJECTIONS, fused_of, projection_shapes
from qerl_jax.policy.lora import LoraConfig
from qerl_jax.policy.quant import QuantTensor
from qerl_jax.policy.sharding import abstract_on, specs
from qerl_jax.policy.tensor_parallel import shard_of
from qerl_jax.policy.trainable import Trainable
from qerl_jax.rl import data_parallel
from qerl_jax.rl.packing import empty_buffer
from qerl_jax.rl.train_step import UpdateConfig, init_state
from qerl_jax.rollout import decode, tensor_parallel
from qerl_jax.rollout.config import EngineConfig, SamplingConfig

pytestmark = pytest.mark.aot

COLLECTIVE = re.compile(
    r" = \(*(\w+)\[([\d,]*)\].* (all-gather|all-to-all|all-reduce|reduce-scatter|collective-\w+)"
    r"(?:-start)?\("
)
LORA = LoraConfig(rank=32, alpha=32.0)
NO_TEXT = types.SimpleNamespace(eos_ids=(1,))  # a tokenizer for the engine


@pytest.fixture(scope="module")
def compile_for_mesh(request):
    """Compiles for H200s: for two that rows are dealt out to (1), or 2 or 4 with cut weights."""
    with h200.compiler(devices=max(2, request.param), tensor=request.param) as compiled:
        yield compiled


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    monkeypatch.setattr(dispatch, "supports_device", lambda: True)
    monkeypatch.setattr(attention, "supports_device", lambda *_: True)
    monkeypatch.setattr(decode_kernels, "supports_device", lambda _: True)
    monkeypatch.setattr(decode_layer, "_sm90_attention_agrees", lambda: True)


def architecture(name, layers):
    return dataclasses.replace(ARCHITECTURES[name], num_layers=layers)


def policy(config, mesh):
    """The shapes of the policy in NVFP4 on a mesh."""
    shards = mesh.shape["tensor"]
    own = shard_of(config, shards)
    shapes = projection_shapes(own)

    def projection(members):
        outputs = sum(shapes[name][0] for name in members)
        return QuantTensor(tiles=tiles(outputs, shapes[members[0]][1]))

    norm, table = array(own.embed_dim, dtype=np.float32), array(own.vocab_size, own.embed_dim)
    layer = {fused: projection(members) for fused, members in fused_of(own, 0).items()}
    layer |= {"input_layernorm": norm, "post_attention_layernorm": norm}
    layer["qkv_bias"] = array(sum(shapes[name][0] for name in ("q_proj", "k_proj", "v_proj")))
    params = {"embed_tokens": table, "norm": norm, "layers": [layer] * own.num_layers}
    if not own.tie_embeddings:
        params["lm_head"] = table

    def whole(x, spec):
        factors = [shards if name == "tensor" else 1 for name in spec]
        factors += [1] * (len(x.shape) - len(factors))
        shape = tuple(size * factor for size, factor in zip(x.shape, factors, strict=True))
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(whole, params, specs(params, shards))


def adapter(config):
    return jax.eval_shape(lambda: lora.init(jax.random.key(0), config, LORA))


def collectives(program):
    """Kind, dtype and shape of what moves between devices."""
    found = map(COLLECTIVE.search, program.as_text().splitlines())
    return [(match[3], match[1], match[2]) for match in found if match]


def compiled_update(compile_for_mesh, name, layers, tokens):
    """The programs of an update: of the gradient of a buffer, and of the step of the optimizer."""
    config, mesh, optimizer = architecture(name, layers), compile_for_mesh.mesh, optax.adamw(1e-3)
    state = jax.eval_shape(lambda x: init_state(Trainable(x, {}), optimizer), adapter(config))
    functions = data_parallel.functions(UpdateConfig(config, loss_config("grpo")), optimizer, mesh)
    state = abstract_on(state, mesh)
    totals = functions["zero_totals"].eval_shape(state.trainable)
    totals = data_parallel.abstract_totals(totals, mesh)
    buffer = data_parallel.abstract_buffer(empty_buffer(tokens), mesh)
    arguments = totals, state.trainable, policy(config, mesh), None, buffer
    return (
        compile_for_mesh(functions["add_gradient"], *arguments, np.bool_(True), np.float32(1)),
        compile_for_mesh(functions["apply_gradient"], state, totals),
    )


@pytest.mark.parametrize("compile_for_mesh", [1, 2], indirect=True)
def test_an_update(compile_for_mesh):
    gradient, step = compiled_update(compile_for_mesh, "qwen2.5-coder-1.5b", 1, 1024)
    assert gradient.as_text().count("mosaic_gpu") > 10
    parts = [kind for kind, dtype, _ in collectives(step) if kind != "all-reduce"]
    assert sorted(parts) == ["all-gather", "all-to-all"]
    if compile_for_mesh.mesh.shape["tensor"] == 1:
        assert not collectives(gradient)
        return
    sums = [shape for _, dtype, shape in collectives(gradient) if dtype == "bf16"]
    # Embedding, o and down; in the backward pass head, gate and up. Nothing before q, k, v is
    # trained in this layer, the first one.
    assert len(sums) == 5
    assert all(shape.endswith("1024,1536") for shape in sums)
    assert {kind for kind, *_ in collectives(gradient)} == {"all-reduce"}
    assert {dtype for _, dtype, _ in collectives(gradient)} == {"bf16", "f32"}


@pytest.mark.parametrize("compile_for_mesh", [2], indirect=True)
def test_the_memory_of_an_update_is_the_planned_one(compile_for_mesh):
    gradient, _ = compiled_update(compile_for_mesh, "qwen2.5-72b", 2, 4480)
    own = shard_of(architecture("qwen2.5-72b", 2), 2)
    fused = sizes.fused_adapter_bytes(own, rank=LORA.rank, targets=PROJECTIONS, itemsize=2)
    plan = update_memory(own, tokens=4480, recompute=(), itemsize=2, adapter=fused)
    assert gradient.memory_analysis().temp_size_in_bytes == pytest.approx(plan.bytes, rel=0.02)


@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize("compile_for_mesh", [2, 4], indirect=True)
def test_a_decode_step(compile_for_mesh, rows):
    mesh, shards = compile_for_mesh.mesh, compile_for_mesh.mesh.shape["tensor"]
    config, functions = architecture("qwen2.5-72b", 1), tensor_parallel.functions(mesh)
    own = shard_of(config, shards, format="nvfp4")
    fused = functions.fuse_adapter.eval_shape(adapter(config), model_config=own, dtype=jnp.bfloat16)
    state = jax.eval_shape(
        functools.partial(decode.empty_state, rows, 448, model_config=own, dtype=jnp.bfloat16)
    )
    program = compile_for_mesh(
        functions.decode_chunk,
        jax.eval_shape(lambda: jax.random.key(0)),
        policy(config, mesh),
        *abstract_on((fused, state), mesh),
        decode.CacheRows(array(rows, dtype=jnp.int32), array(rows, dtype=bool)),
        array(dtype=jnp.float32),
        config=decode.decode_config(
            own, SamplingConfig(max_new_tokens=144), EngineConfig(), NO_TEXT
        ),
        steps=16,
    )
    *sums, logits = sorted(collectives(program), key=lambda found: found[0] == "all-gather")
    assert logits[:2] == ("all-gather", "f32")
    # One for the embedding, and one for each of the two blocks of the layer.
    assert sums == [("all-reduce", "bf16", f"{rows},8192")] * 3
    cache = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.layers)) // shards
    assert program.memory_analysis().alias_size_in_bytes >= cache  # which is updated in place
    text = program.as_text()
    assert "jit(decode_layer)/linears/fp4_matmul_sm90" in text
    # Attention is unsplit where rows and their heads of keys occupy the SMs; SwiGLU is the epilogue
    # of a product of eight rows, also where the MLP of a device had to be padded (4 devices).
    assert ("attention_sm90" in text) == (rows == 32 and shards == 2)
    assert ("jit(decode_layer)/mlp/swiglu" in text) == (rows == 1)
    assert "jit(decode_layer)/linears/jit(_pad)" not in text
