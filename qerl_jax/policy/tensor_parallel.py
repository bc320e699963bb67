"""Tensor parallelism: what one of several devices holds of a layer.

The projections that read the residual stream (q, k, v, gate, up) are cut by their outputs, those
that write to it (o, down) by their inputs, and embedding and head by the vocabulary
(https://arxiv.org/abs/1909.08053); `layers.part` says where each kind of layer states it. A device
has whole heads with their keys and values, and computes attention and SwiGLU alone; one sum over
the devices ends each of the two parts of a layer (`collectives`). LoRA's A and B are cut with their
projection: the same sum carries the adapter's part. A recurrent layer is cut by key heads with
their value heads, states and channels of the convolution. B of in_proj_qkv, whose rows are queries,
keys and values, lies whole on every device, which takes its rows (`collectives.own_rows`).

The functions of the policy run on each device with the `ModelConfig` that `shard_of` returns: its
numbers of heads, its MLP and its vocabulary are those of one device.

The kernel of gate, up and SwiGLU reads whole tiles of gate and of up. Where the part of a device
does not fill its last tile, as 7392 columns of Qwen2.5-72B on 4 devices, the device has weights of
zero after it: outputs of gate and up, and the inputs of down that belong to them. SwiGLU makes
zeros of these, so no result changes. Adapters have no such part until `lora.fuse` adds it.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import fp4_matmul
from qerl_jax.errors import UserError
from qerl_jax.policy.collectives import divided
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.layers import kinds
from qerl_jax.policy.quant import QuantTensor, tile_order

_TABLES = ("embed_tokens", "lm_head")  # cut by their rows


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
    parts, fields = kinds.parts_of(config), {}
    for part in parts:
        fields |= part.shard(config, shards)
    fields["vocab_size"] = divided(config.vocab_size, shards, "tokens of the vocabulary")
    block = fp4_matmul.FORMATS[format].block if format in fp4_matmul.FORMATS else 1
    shapes = kinds.projection_shapes(config)
    for weight in (weight for part in parts for weight in part.WEIGHTS):
        columns = shapes[weight.members[0]][1]
        if weight.packed and not weight.by_rows and columns // shards % block:
            raise UserError(
                f"mesh.tensor={shards} cuts the {columns} inputs of {weight.name} into "
                f"{columns // shards}, which are no whole blocks of {block} as {format} has them: "
                "pass a smaller number, or model.format=bf16"
            )
    return dataclasses.replace(config, shards=shards, **fields)


def cut(name: str, leaf: Any, config: ModelConfig, shards: int) -> list[Any]:
    """Cuts an array of the parameter tree.

    Nothing is rounded: codes and scales are slices of those of the whole weight. Of q, k, v and of
    gate, up each shard has its own part of each, so that it is a fused weight again. The parts of
    gate, up and down are padded to the width of `shard_of`.

    Args:
        name: name of the array in the tree; a norm, for example, lies whole on every device.
        leaf: the array or packed weight, which is in the order of checkpoints.
        config: the architecture of the whole policy.
        shards: number of devices that it is cut into.

    Returns:
        What each device holds, packed weights in the order of this machine.
    """
    weight, array = kinds.WEIGHTS.get(name), kinds.ARRAYS.get(name)
    by_rows = name in _TABLES or any(kind.by_rows for kind in (weight, array) if kind is not None)
    if weight is None and not by_rows:
        return [leaf] * shards
    members, padding = (), 0
    if array is not None and array.parts is not None:
        members = array.parts(config)
    if weight is not None:
        whole, own = (kinds.projection_shapes(c) for c in (config, shard_of(config, shards)))
        stacked = {member: rows(config) for member, rows in weight.stacked}
        members = tuple(x for m in weight.members for x in stacked.get(m, whole[m][:1]))
        first, axis = weight.members[0], 0 if by_rows else 1
        padding = own[first][axis] - whole[first][axis] // shards
    parts = _slices(leaf, members=members, by_rows=by_rows, shards=shards, padding=padding)
    if not isinstance(leaf, QuantTensor) or fp4_matmul.device_kernel() == "xla":
        return parts
    tiled = [tile_order(part) for part in parts]
    # All devices run one program: they have one order.
    return tiled if all(part.tiles is not None for part in tiled) else parts


@functools.partial(jax.jit, static_argnames=("members", "by_rows", "shards", "padding"))
def _slices(
    leaf: Any, *, members: tuple[int, ...], by_rows: bool, shards: int, padding: int
) -> list[Any]:
    """Returns the shards of an array, or of each array of a packed weight.

    Rows are cut in each of the fused members, () for one; columns as a whole. After each part there
    are `padding` rows or columns of zeros.
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
