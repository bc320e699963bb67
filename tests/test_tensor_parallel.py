"""Cut weights: which slices a device has, and what cannot be cut. `test_mesh` runs them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import random_lora, tiny_policy

from pallas_kernels import fp4_matmul
from pallas_kernels.fp4_matmul import tiling
from qerl_jax.errors import UserError
from qerl_jax.policy import lora, quant, sharding
from qerl_jax.policy.architectures import ARCHITECTURES
from qerl_jax.policy.layers.kinds import FUSED, fused_of, projection_shapes
from qerl_jax.policy.quant import checkpoint_order, dequantize, quantize
from qerl_jax.policy.sharding import COLUMNS, ROWS, WHOLE
from qerl_jax.policy.tensor_parallel import cut, shard_of

SHARDS = 2
# MXFP4 is cut as NVFP4 is.
SLOW_MXFP4 = pytest.param("mxfp4", marks=pytest.mark.slow)
# Whole blocks of 64 inputs as NF4 has them; the tiles of the kernel are not filled.
SIZES = {
    "embed_dim": 64,
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 16,
    "mlp_dim": 256,
    "num_layers": 1,
}


@functools.cache
def policy(format, **changes):
    config, params = tiny_policy("qwen2", **SIZES | changes)
    (layer,) = params["layers"]
    if format != "bf16":
        shapes = projection_shapes(config)
        for fused, members in fused_of(config, 0).items():
            rows = np.cumsum([shapes[name][0] for name in members])[:-1]
            parts = np.split(np.asarray(layer[fused]), rows)
            layer[fused] = jax.tree.map(jnp.asarray, quantize(parts, format=format))
    return config, layer


def values(leaf):
    return np.asarray(leaf if isinstance(leaf, jax.Array) else dequantize(leaf, jnp.float32))


def expected(name, whole, config, number):
    """The slice of a whole weight that a device has, taken projection by projection."""
    shapes, found = projection_shapes(config), []
    if name in ("o_proj", "down_proj"):
        return np.split(whole, SHARDS, axis=1)[number]
    members = FUSED["qkv_proj" if name == "qkv_bias" else name]
    begin = 0
    for rows in (shapes[member][0] for member in members):
        found.append(np.split(whole[begin : begin + rows], SHARDS)[number])
        begin += rows
    return np.concatenate(found)


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("format", ["nvfp4", SLOW_MXFP4, "nf4", "bf16"])
def test_a_shard_is_a_slice_of_each_projection(format, tiles, monkeypatch):
    config, layer = policy(format)
    monkeypatch.setattr(fp4_matmul, "device_kernel", lambda: "mosaic" if tiles else "xla")
    for name in (*fused_of(config, 0), "qkv_bias"):
        shards = cut(name, layer[name], config, SHARDS)
        for number, shard in enumerate(shards):
            np.testing.assert_array_equal(
                values(shard), expected(name, values(layer[name]), config, number)
            )
            if tiles and name in FUSED and format in ("nvfp4", "mxfp4"):
                assert shard.tiles is not None


def test_codes_and_scales_are_not_quantized_again(monkeypatch):
    config, layer = policy("nvfp4")
    down, packed = layer["down_proj"], []
    monkeypatch.setattr(fp4_matmul, "device_kernel", lambda: "mosaic")
    for shard in cut("down_proj", down, config, SHARDS):
        assert shard.shape == (config.embed_dim, config.mlp_dim // SHARDS)
        packed.append(checkpoint_order(shard))
    for name in ("packed", "scales"):
        joined = np.concatenate([np.asarray(getattr(part, name)) for part in packed], axis=1)
        assert joined.tobytes() == np.asarray(getattr(down, name)).tobytes()


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("format", ["nvfp4", SLOW_MXFP4, "bf16"])
def test_a_shard_is_padded_to_whole_tiles(format, tiles, monkeypatch):
    config, layer = policy(format, mlp_dim=192)
    monkeypatch.setattr(fp4_matmul, "device_kernel", lambda: "mosaic" if tiles else "xla")
    for name, axis in (("gate_up_proj", 0), ("down_proj", 1)):
        for number, shard in enumerate(cut(name, layer[name], config, SHARDS)):
            parts = np.split(values(shard), 2 if axis == 0 else 1, axis)
            own, zeros = zip(*(np.split(part, [96], axis) for part in parts), strict=True)
            np.testing.assert_array_equal(
                np.concatenate(own), expected(name, values(layer[name]), config, number)
            )
            assert all(part.shape[axis] == 32 and not part.any() for part in zeros)


def test_the_adapter_of_a_shard_is_padded_like_its_weights():
    config, _ = policy("bf16", mlp_dim=192)
    own = shard_of(config, SHARDS)
    adapter = random_lora(dataclasses.replace(own, mlp_dim=96))
    (fused,), (layer,) = lora.fuse(adapter, own, jnp.float32), adapter.layers
    gate, zeros, up, more = np.split(fused["gate_up_proj"][1], [96, 128, 224])
    rank = len(layer["gate_proj"]["a"])
    np.testing.assert_array_equal(gate[:, :rank], layer["gate_proj"]["b"])
    np.testing.assert_array_equal(up[:, rank:], layer["up_proj"]["b"])
    down, rest = np.split(fused["down_proj"][0], [96], axis=1)
    np.testing.assert_array_equal(down, adapter.scale * layer["down_proj"]["a"])
    assert zeros.shape[0] == more.shape[0] == rest.shape[1] == 32
    assert not any(part.any() for part in (zeros, more, rest))


def test_norms_are_whole_on_every_device():
    config, layer = policy("nvfp4")
    norm = layer["input_layernorm"]
    assert all(shard is norm for shard in cut("input_layernorm", norm, config, SHARDS))


def test_weights_without_an_order_for_the_kernel_are_all_in_that_of_checkpoints(monkeypatch):
    """One shard of MXFP4 scales may be too far apart, and all devices run one program."""
    config, layer = policy("nvfp4")
    monkeypatch.setattr(fp4_matmul, "device_kernel", lambda: "mosaic")
    calls = iter([quant.tile_order, lambda weight: weight])
    monkeypatch.setattr(
        "qerl_jax.policy.tensor_parallel.tile_order", lambda weight: next(calls)(weight)
    )
    shards = cut("qkv_proj", layer["qkv_proj"], config, SHARDS)
    assert [shard.tiles for shard in shards] == [None, None]


def test_the_architecture_of_a_device():
    config = ARCHITECTURES["qwen2.5-72b"]
    own = shard_of(config, 2, format="nvfp4")
    assert (own.shards, own.num_heads, own.num_kv_heads, own.head_dim) == (2, 32, 4, 128)
    assert (own.mlp_dim, own.vocab_size, own.embed_dim) == (14784, 76032, 8192)
    # 7392 columns are 115.5 tiles.
    assert shard_of(config, 4, format="nvfp4").mlp_dim == 7424
    assert shard_of(config, 1) is config


@pytest.mark.parametrize(
    ("changes", "shards", "format", "message"),
    [
        ({}, 3, "bf16", r"mesh\.tensor=3 .* the 8 query heads"),
        ({}, 4, "bf16", r"mesh\.tensor=4 .* the 2 kv heads"),
        ({"mlp_dim": 257}, 2, "bf16", r"mesh\.tensor=2 .* the 257 columns of the MLP"),
        ({"vocab_size": 49}, 2, "bf16", r"mesh\.tensor=2 .* the 49 tokens"),
        ({"mlp_dim": 48}, 2, "nvfp4", r"mesh\.tensor=2 cuts the 48 inputs of down_proj into 24, "
         r".* blocks of 16 as nvfp4"),
        ({"head_dim": 8}, 2, "nf4", r"mesh\.tensor=2 cuts the 64 inputs of o_proj into 32, "
         r".* blocks of 64 as nf4"),
    ],
)  # fmt: skip
def test_what_does_not_divide_is_refused(changes, shards, format, message):
    config, _ = tiny_policy("qwen2", **(SIZES | changes))
    with pytest.raises(UserError, match=message):
        shard_of(config, shards, format=format)


def test_every_array_has_a_rule():
    config, params = tiny_policy("qwen3", quantized=True, num_layers=1)
    found = sharding.specs(params, SHARDS)
    assert found["embed_tokens"] == found["lm_head"] == ROWS
    assert found["layers"][0]["qkv_proj"].global_scale == ROWS
    assert found["layers"][0]["down_proj"].packed == COLUMNS
    assert found["layers"][0]["down_proj"].global_scale == WHOLE
    assert found["layers"][0]["q_norm"] == found["norm"] == WHOLE
    adapter = sharding.specs(random_lora(config), SHARDS).layers[0]
    assert adapter["q_proj"] == {"a": WHOLE, "b": ROWS}
    assert adapter["down_proj"] == {"a": COLUMNS, "b": WHOLE}
    assert set(jax.tree.leaves(sharding.specs(params, 1))) == {WHOLE}


def test_an_array_without_a_rule_is_an_error():
    with pytest.raises(ValueError, match=r"no rule says how layers/0/other .*mesh\.tensor=2"):
        sharding.specs({"layers": [{"other": jnp.zeros(2)}]}, SHARDS)


@pytest.mark.parametrize("rows", [1, 8, 32, 64, 128, 4480])
@pytest.mark.parametrize("shards", [2, 4])
@pytest.mark.parametrize("model", ["qwen2.5-32b", "qwen2.5-72b"])
def test_the_kernel_has_a_tiling_for_shards(model, shards, rows):
    """Also for shards that no table has, and whose inputs end inside of a tile."""
    own = shard_of(ARCHITECTURES[model], shards, format="nvfp4")
    shapes = projection_shapes(own)
    for members in fused_of(own, 0).values():
        n, k = sum(shapes[name][0] for name in members), shapes[members[0]][1]
        rank = tiling.padded_rank(32 * len(members))
        config = tiling.choose(rows, n, k, rank=rank)
        assert config.problem() is None
        assert config.block_k >= rank
        assert n % tiling.TILE_ROWS == 0
    assert own.mlp_dim % tiling.TILE_ROWS == 0  # SwiGLU pairs tiles of gate and up.
