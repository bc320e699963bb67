"""A mixture of experts on a GPU: its kernels against float32 on the CPU, equal logits, and replay.

uv run --extra cuda pytest -n 0 -m gpu tests/test_experts_gpu.py
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fp4_oracles import random_weight
from packed_cases import packed_ids
from tiny_checkpoints import model_config

from benchmarks.rollout.random_policy import random_lora, random_params
from pallas_kernels import device, experts, fp4_matmul
from pallas_kernels.attention import segments
from pallas_kernels.experts import api, mma, self_test
from pallas_kernels.experts.mma import GroupedConfig
from pallas_kernels.experts.table import MIN_TILE
from qerl_jax.policy import lora, transformer
from qerl_jax.policy.config import ExpertsConfig
from qerl_jax.policy.layers import kinds
from qerl_jax.policy.layers.part import Own
from qerl_jax.policy.quant import QuantTensor, dequantize
from qerl_jax.weights.layer_memory import compact_layers

pytestmark = pytest.mark.gpu
on_hopper = pytest.mark.skipif(device.cuda_capability() != 9.0, reason="needs a Hopper GPU")


def config_of(family):
    """A few experts whose weights are whole tiles of the kernels."""
    whole = model_config(family, vocab_size=1024, embed_dim=256, head_dim=64, max_position=512)
    shared = whole.experts.shared_width and 128
    experts = ExpertsConfig(32, 4, 128, shared, normalized=True)
    return dataclasses.replace(whole, experts=experts, mlp_dim=experts.active_width)


def policy_of(config):
    params = random_params(jax.random.key(0), config, format="nvfp4")
    layers = compact_layers(params["layers"])
    assert all(layer["experts_gate_up"].tiles is not None for layer in layers)
    return params | {"layers": layers}


def relative_error(found, want):
    found, want = np.asarray(found, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(found - want) / np.linalg.norm(want)


def routes_of(tokens, count, skewed):
    """Eight experts for each token; those of a skewed router are often the same ones."""
    rng = np.random.default_rng(tokens)
    scores = rng.gumbel(size=(tokens, count)) - skewed * np.arange(count)
    return jnp.asarray(np.argsort(-scores, axis=1)[:, :8], jnp.int32)


@pytest.mark.parametrize(
    ("tokens", "skewed", "form", "limit"),
    [
        *((1, 0, "nvfp4", 0.0), (8, 0.3, "mxfp4", 0.0), (40, 0, "nvfp4", 0.0)),
        *((64, 0.3, "nvfp4", 0.0), (256, 0, "mxfp4", 0.0), (256, 0.3, "nvfp4", 0.0)),
        *((1, 0, "mxfp4", 0.5), (8, 0, "mxfp4", 0.5), (64, 0.3, "mxfp4", 0.5)),
        *((256, 0, "mxfp4", 0.5), (256, 0.3, "mxfp4", 0.5)),
    ],
)
def test_products_of_a_decode_step(tokens, skewed, form, limit):
    """In the schedules that they get, some with adapters: against float32, and the same again.

    Those with a limit have biases, and rows that are no whole tiles.
    """
    count, inputs, width = 72, 2112 if limit else 2048, 192
    rng = np.random.default_rng(0)
    gate_up, down = (
        random_weight(rng, count * outputs, columns, form)
        for outputs, columns in ((2 * width, inputs), (inputs, width))
    )
    own_table = experts.table(routes_of(tokens, count, skewed), experts=count)
    assert len(own_table.source) == MIN_TILE * len(own_table.owner)  # those of the kernel
    x = jax.random.normal(jax.random.key(0), (tokens, inputs), jnp.bfloat16) / 1024
    weights = jax.random.uniform(jax.random.key(1), (8 * tokens,))
    assert api.has_kernel(form)

    rank = 12 if skewed else 0
    adapters = [
        [jax.random.normal(jax.random.key(i), (count, *shape)) / 32 for shape in shapes]
        for i, shapes in enumerate(
            (((rank, inputs), (2 * width, rank)), ((rank, width), (inputs, rank)))
        )
    ]

    biases = [
        jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) / 4
        for i, shape in enumerate(((count, 2, width), (count, inputs)))
    ]

    @jax.jit
    def added(x, weights, gate_up, down, adapters, table):
        own = tuple(map(tuple, adapters)) if rank else (None, None)
        own = experts.Gated(gate_up, down, own, tuple(biases) if limit else None)
        rows, _ = experts.mlp(x, own, table, weights, width=width, limit=limit)
        return experts.to_pairs(rows, table)

    packed = fp4_matmul.to_tiles(gate_up), fp4_matmul.to_tiles(down)
    adapters = jax.tree.map(lambda own: own.astype(jnp.bfloat16), adapters)
    y = added(x, weights, *packed, adapters, own_table)
    with jax.default_matmul_precision("highest"):
        dense = [fp4_matmul.dequantize(weight, jnp.float32) for weight in (gate_up, down)]
        wide = [x.astype(jnp.float32), jax.tree.map(lambda own: own.astype(jnp.float32), adapters)]
        wanted = added(wide[0], weights, *dense, wide[1], own_table)
    assert relative_error(y, wanted) < 8e-3
    for _ in range(3):
        np.testing.assert_array_equal(added(x, weights, *packed, adapters, own_table), y)


@pytest.mark.parametrize(
    "config",
    [
        GroupedConfig(64, 128, 2),
        GroupedConfig(64, 256, 3),
        GroupedConfig(64, 512, 2),
        GroupedConfig(16, 512, 3),
        GroupedConfig(16, 512, 2),
        GroupedConfig(64, 128, 4, tiles=2),
        GroupedConfig(64, 128, 3, tiles=6),
        pytest.param(GroupedConfig(64, 128, 2, tiles=5, wgmma=True), marks=on_hopper),
        pytest.param(GroupedConfig(64, 128, 3, tiles=2, wgmma=True), marks=on_hopper),
    ],
    ids=str,
)
def test_schedules(config):
    """Each computes what another one does, except for the order of sums."""
    count, inputs, width = 16, 1408, 192
    weight = fp4_matmul.to_tiles(random_weight(np.random.default_rng(0), count * 384, inputs))
    own_table = experts.table(routes_of(48, count, 0.2), experts=count)
    x = jax.random.normal(jax.random.key(0), (48, inputs), jnp.bfloat16) / 1024
    weights = jax.random.uniform(jax.random.key(1), (8 * 48,))
    found, wanted = (
        jax.jit(lambda *args, config=c: mma.gated_matmul(*args, width=width, config=config))(
            x, weight, own_table, weights
        )[own_table.place]
        for c in (config, GroupedConfig(64, 128, 3))
    )
    assert relative_error(found, wanted) < 2e-3


@pytest.mark.parametrize("form", ["nvfp4", "mxfp4"])
def test_the_self_test_finds_no_error(form):
    assert self_test.relative_error(mma, form) < 5e-3


# A decode step; some tiles for each expert; several blocks of tiles for each product.
@pytest.mark.parametrize("tokens", [1, 8, 300, 5000])
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe"])
def test_a_layer_and_its_gradient_are_those_of_the_cpu(family, tokens):
    config = config_of(family)
    layer = policy_of(config)["layers"][0]
    mlp = kinds.layer_of(config, 0).mlp.mlp
    x, gradient = jax.random.normal(jax.random.key(1), (2, 1, tokens, config.embed_dim))

    def run(layer, x, gradient, routes=None):
        (added, chosen), vjp = jax.vjp(lambda x: mlp(Own(layer, {}, config), x, routes), x)
        zeros = np.zeros(chosen.shape, jax.dtypes.float0)
        return added, chosen, vjp((gradient, zeros))[0]

    narrow = (a.astype(jnp.bfloat16) for a in (x, gradient))
    added, chosen, back = jax.jit(run)(layer, *narrow)
    with jax.default_device(jax.devices("cpu")[0]):
        dense = {
            name: np.asarray(
                dequantize(leaf, jnp.float32) if isinstance(leaf, QuantTensor) else leaf, np.float32
            )
            for name, leaf in layer.items()
        }
        narrow = (np.asarray(a.astype(jnp.bfloat16), np.float32) for a in (x, gradient))
        want, own, want_back = jax.jit(run)(dense, *narrow, np.asarray(chosen))
    assert relative_error(added, want) < 1e-2
    assert relative_error(back, want_back) < 1e-2
    # In bfloat16 near ties of the states may fall the other way.
    assert (np.sort(own) == np.sort(chosen)).all(axis=-1).mean() > 0.9


@pytest.mark.parametrize("rows", [1, 8, 8192])
def test_of_equal_logits_the_lower_experts_are_taken(rows):
    config = config_of("qwen3_moe")
    layer = policy_of(config)["layers"][0]
    layer["router"] = jnp.concatenate([layer["router"][:1], -layer["router"][:1]] * 16)
    mlp = kinds.layer_of(config, 0).mlp.mlp
    x = jax.random.normal(jax.random.key(1), (rows, 1, config.embed_dim), jnp.bfloat16)
    _, routes = jax.jit(lambda x: mlp(Own(layer, {}, config), x))(x)
    np.testing.assert_array_equal(routes, routes[..., :1] % 2 + np.arange(0, 8, 2))


@pytest.mark.parametrize("expert_rank", [0, 8])
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe"])
def test_steps_are_those_of_a_buffer_with_their_routes(family, expert_rank):
    config, (rows, prompt, steps) = config_of(family), (8, 24, 40)
    params = policy_of(config)
    adapter = random_lora(jax.random.key(1), config, rank=32, expert_rank=expert_rank)
    tokens = jax.random.randint(jax.random.key(2), (rows, prompt + steps), 0, config.vocab_size)
    fused = lora.fuse(adapter, config, jnp.bfloat16)
    prefill = jax.jit(transformer.prefill, static_argnames=("config", "cache_positions"))
    step = jax.jit(transformer.decode_step, static_argnames="config")
    lengths = jnp.full(rows, prompt)
    logits, cache, first = prefill(
        params, adapter, tokens[:, :prompt], lengths, config=config, cache_positions=128
    )
    found, routes = [logits], [first]
    for n in range(prompt, prompt + steps):
        logits, cache, chosen = step(params, fused, tokens[:, n], cache, config=config)
        found.append(logits)
        routes.append(chosen[:, :, None])
    routes = jnp.concatenate(routes, axis=2)

    ids = packed_ids(*[(prompt + steps,)] * rows, total=rows * (prompt + steps))

    @jax.jit
    def packed(params, adapter, tokens, routes):
        positions = jnp.tile(jnp.arange(prompt + steps), rows)
        hidden, own = transformer.packed_hidden_states(
            params, adapter, tokens.reshape(-1), positions, segments(ids), config=config,
            routes=routes.reshape(config.num_layers, -1, routes.shape[-1]),
        )  # fmt: skip
        return transformer.logits(params, hidden), own

    want, _ = packed(params, adapter, tokens, routes)
    want = want.reshape(rows, prompt + steps, -1)[:, prompt - 1 :]
    found = jax.nn.log_softmax(jnp.stack(found, axis=1))
    assert abs(found - jax.nn.log_softmax(want)).mean() < 0.02
