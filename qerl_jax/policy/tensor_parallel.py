"""Tensor parallelism: what one of several devices holds of a layer, and where they meet.

The projections that read the residual stream (q, k, v, gate, up) are cut by their outputs, those
that write to it (o, down) by their inputs, and embedding and head by the vocabulary
(https://arxiv.org/abs/1909.08053). A device has whole heads with their keys and values, and
computes attention and SwiGLU alone; one sum over the devices ends each of the two blocks of a
layer. LoRA's A and B are cut with their projection: the same sum carries the adapter's part. A
recurrent layer is cut by key heads with their value heads, states and channels of the convolution.
B of in_proj_qkv, whose rows are queries, keys and values, lies whole on every device, which takes
its rows (`own_channels`).

The functions of the policy run on each device inside a `shard_map` over the axis `TENSOR`, with the
`ModelConfig` that `shard_of` returns: its numbers of heads, its MLP and its vocabulary are those of
one device. Without cut weights (`config.shards` is 1) none of these functions does anything.

The kernel of gate, up and SwiGLU reads whole tiles of gate and of up. Where the part of a device
does not fill its last tile, as 7392 columns of Qwen2.5-72B on 4 devices, the device has weights of
zero after it: outputs of gate and up, and the inputs of down that belong to them. SwiGLU makes
zeros of these, so no result changes. Adapters have no such part until `lora.fuse` adds it.

JAX cannot know inside of a `shard_map` whether the devices have equal gradients. `enter_shards` and
`leave_shards` therefore define theirs: a gradient is added up where a replicated array enters the
computation of one device, and stays as it is where the sum leaves it. So the gradient of an array
that lies whole on every device is on each device a part, whose sum is the gradient.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import fp4_matmul
from pallas_kernels.fp4_matmul.tiling import TILE_ROWS
from qerl_jax.errors import UserError
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.quant import QuantTensor, tile_order

TENSOR = "tensor"  # the axis of the mesh that weights are cut along
_RECURRENT_ROWS = ("in_proj", "conv", "a_log", "dt_bias")
BY_ROWS = ("qkv_proj", "qkv_bias", "gate_up_proj", "embed_tokens", "lm_head", *_RECURRENT_ROWS)
BY_COLUMNS = ("o_proj", "down_proj", "out_proj")


def shard_of(config: ModelConfig, shards: int, *, format: str = "bf16") -> ModelConfig:
    """Returns the architecture that each device computes, whose MLP is padded to whole tiles.

    Args:
        config: the architecture of the whole policy.
        shards: number of devices that a weight is cut into.
        format: number format of the projections; the inputs of a shard are whole blocks of it.

    Raises:
        UserError: the number does not divide the heads, the kv heads, the MLP's width, the
            vocabulary or the key heads of recurrent layers, or it cuts a block of inputs that share
            a scale.
    """
    if shards == 1:
        return config
    fields = {
        "num_heads": "query heads",
        "num_kv_heads": "kv heads",
        "mlp_dim": "columns of the MLP",
        "vocab_size": "tokens of the vocabulary",
    }
    numbers: dict[str, Any] = {name: getattr(config, name) for name in fields}
    heads = {} if config.recurrent is None else {"key_heads": config.recurrent.key_heads}
    fields["key_heads"] = "key heads of the recurrent layers"
    for name, number in (numbers | heads).items():
        if number % shards:
            raise UserError(
                f"mesh.tensor={shards} does not divide the {number} {fields[name]} of the model: "
                "every device takes the same number, pass a divisor"
            )
    parts = {name: number // shards for name, number in numbers.items()}
    block = fp4_matmul.FORMATS[format].block if format in fp4_matmul.FORMATS else 1
    inputs = {"o_proj": parts["num_heads"] * config.head_dim, "down_proj": parts["mlp_dim"]}
    for name, columns in inputs.items():
        if columns % block:
            raise UserError(
                f"mesh.tensor={shards} cuts the {shards * columns} inputs of {name} into "
                f"{columns}, which are no whole blocks of {block} as {format} has them: pass a "
                "smaller number, or model.format=bf16"
            )
    parts["mlp_dim"] += -parts["mlp_dim"] % TILE_ROWS
    if (recurrent := config.recurrent) is not None:
        parts["recurrent"] = dataclasses.replace(
            recurrent,
            key_heads=recurrent.key_heads // shards,
            value_heads=recurrent.value_heads // shards,
        )
    return dataclasses.replace(config, shards=shards, **parts)


def enter_shards(x: jax.Array, config: ModelConfig) -> jax.Array:
    """Returns x, which all devices have, for the computation of one; adds up its gradient."""
    return x if config.shards == 1 else _enter(x)


def leave_shards(x: jax.Array, config: ModelConfig) -> jax.Array:
    """Returns the sum of x over the devices, whose gradient each device takes as it is."""
    return x if config.shards == 1 else _leave(x)


@jax.custom_vjp
def _enter(x):
    return x


_enter.defvjp(lambda x: (x, None), lambda _, gradient: (jax.lax.psum(gradient, TENSOR),))


@jax.custom_vjp
def _leave(x):
    return jax.lax.psum(x, TENSOR)


_leave.defvjp(lambda x: (_leave(x), None), lambda _, gradient: (gradient,))


def embed(table: jax.Array, tokens: jax.Array, config: ModelConfig) -> jax.Array:
    """Returns the rows of an embedding [V, D] for token ids [...], each from its device."""
    if config.shards == 1:
        return table[tokens]
    index, is_own = own_tokens(tokens, config)
    return leave_shards(jnp.where(is_own[..., None], table[index], 0), config)


def own_tokens(tokens: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Returns where tokens lie in the vocabulary of this device, and whether they do.

    A token of another device has any index.
    """
    if config.shards == 1:
        return tokens, jnp.ones(tokens.shape, bool)
    index = tokens - jax.lax.axis_index(TENSOR) * config.vocab_size
    is_own = (index >= 0) & (index < config.vocab_size)
    return jnp.where(is_own, index, 0), is_own


def own_channels(rows: jax.Array, config: ModelConfig) -> jax.Array:
    """Returns those rows of queries, keys and values of a recurrent layer that this device has.

    Args:
        rows: [channels, ...] of the whole layer.
        config: the architecture of one device.
    """
    if config.shards == 1:
        return rows
    assert config.recurrent is not None
    sizes, index = config.recurrent.members, jax.lax.axis_index(TENSOR)
    ends = list(itertools.accumulate(config.shards * size for size in sizes))
    parts = zip(jnp.split(rows, ends[:-1]), sizes, strict=True)
    own = [jax.lax.dynamic_slice_in_dim(part, index * size, size) for part, size in parts]
    return jnp.concatenate(own)


def over_vocabulary(function: Any, x: jax.Array, config: ModelConfig) -> jax.Array:
    """Returns `jax.lax.psum` or `pmax` of x over the devices' parts of the vocabulary."""
    return x if config.shards == 1 else function(x, TENSOR)


def whole_vocabulary(logits: jax.Array, config: ModelConfig) -> jax.Array:
    """Returns logits [..., V] of all tokens, given those of this device."""
    if config.shards == 1:
        return logits
    return jax.lax.all_gather(logits, TENSOR, axis=logits.ndim - 1, tiled=True)


def cut(name: str, leaf: Any, config: ModelConfig, shards: int) -> list[Any]:
    """Cuts an array of the parameter tree.

    Nothing is rounded: codes and scales are slices of those of the whole weight. Of q, k, v and of
    gate, up each shard has its own part of each, so that it is a fused weight again. The parts of
    gate, up and down are padded to the width of `shard_of`.

    Args:
        name: name of the array in the tree; one that is not in `BY_ROWS` or `BY_COLUMNS` lies whole
            on every device.
        leaf: the array or packed weight, which is in the order of checkpoints.
        config: the architecture of the whole policy.
        shards: number of devices that it is cut into.

    Returns:
        What each device holds, packed weights in the order of this machine.
    """
    if name not in (*BY_ROWS, *BY_COLUMNS):
        return [leaf] * shards
    kv_heads = config.num_kv_heads * config.head_dim
    heads = config.num_heads * config.head_dim * (2 if config.gated_attention else 1)
    qkv = heads, kv_heads, kv_heads
    members = {"qkv_proj": qkv, "qkv_bias": qkv, "gate_up_proj": (config.mlp_dim,) * 2}
    if (recurrent := config.recurrent) is not None:
        gates = recurrent.values, recurrent.value_heads, recurrent.value_heads
        members |= {"conv": recurrent.members, "in_proj": (*recurrent.members, *gates)}
    padding = 0
    if name in ("gate_up_proj", "down_proj"):
        padding = shard_of(config, shards).mlp_dim - config.mlp_dim // shards
    parts = _slices(
        leaf,
        members=members.get(name, ()),
        by_rows=name in BY_ROWS,
        shards=shards,
        padding=padding,
    )
    if not isinstance(leaf, QuantTensor) or fp4_matmul.device_kernel() == "xla":
        return parts
    tiled = [tile_order(part) for part in parts]
    # All devices run one program: they have one order.
    return tiled if all(part.tiles is not None for part in tiled) else parts


@functools.partial(jax.jit, static_argnames=("members", "by_rows", "shards", "padding"))
def _slices(
    leaf: Any, *, members: tuple[int, ...], by_rows: bool, shards: int, padding: int
) -> list[Any]:
    """The shards of an array, or of each array of a packed weight.

    Args:
        leaf: the array or packed weight.
        members: numbers of rows of the fused members; () for one.
        by_rows: whether rows are cut, and not columns.
        shards: number of shards.
        padding: number of rows of zeros after each part, or of columns.
    """

    def rows(array: jax.Array) -> list[jax.Array]:
        sizes = members or (len(array),)
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return [
            jnp.concatenate(
                [
                    _pad_end(
                        array[start + shard * (size // shards) :][: size // shards], 0, padding
                    )
                    for start, size in zip(starts, sizes, strict=True)
                ]
            )
            for shard in range(shards)
        ]

    def columns(array: jax.Array) -> list[jax.Array]:
        # The divisor of each row is the same for all of its columns.
        if array.ndim == 1:
            return [array] * shards
        # Several columns share a byte of codes, or a scale.
        number = padding * array.shape[1] // leaf.shape[1]
        return [_pad_end(part, 1, number) for part in jnp.split(array, shards, axis=1)]

    leaves, treedef = jax.tree.flatten(leaf)
    shards_of_leaves = [rows(array) if by_rows else columns(array) for array in leaves]
    return [treedef.unflatten(part) for part in zip(*shards_of_leaves, strict=True)]


def _pad_end(array: jax.Array, axis: int, number: int) -> jax.Array:
    """An array of weights, codes or scales [N, .] with zeros at its end, or divisors with ones."""
    if array.ndim == 1:
        value = jnp.ones((), array.dtype)
    else:  # Zero bits: MXFP4's scales have no zero, and a conversion of 0 would give NaN.
        bits = jnp.zeros((), f"uint{8 * array.dtype.itemsize}")
        value = jax.lax.bitcast_convert_type(bits, array.dtype)
    widths = [(0, number if i == axis else 0, 0) for i in range(array.ndim)]
    return jax.lax.pad(array, value, widths)
