"""Rounds a 16-bit checkpoint to NVFP4, and writes NVFP4 checkpoints, one layer at a time."""

import dataclasses
import itertools
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.errors import UserError
from qerl_jax.policy.layers.kinds import FUSED, STACKS, member_bounds, stack_shapes
from qerl_jax.policy.quant import QuantTensor, dequantize, quantize_nvfp4
from qerl_jax.weights import names
from qerl_jax.weights.checkpoint import Checkpoint
from qerl_jax.weights.load import DTYPES, each_layer, name_in_errors, read_layer
from qerl_jax.weights.save import (
    SHARD_BYTES,
    checkpoint_tensors,
    companion_files,
    fill_checkpoint,
)

_BFLOAT16 = DTYPES["bfloat16"]


class ExpertLoad(NamedTuple):
    """What the experts of a layer had to be calibrated by."""

    tokens: list[int]  # of each expert
    rounded: int  # experts with too few of them, which were rounded instead


@dataclasses.dataclass(frozen=True)
class PackedLayer:
    """A quantized layer; its errors are relative, ratios of root mean squares, by projection."""

    arrays: dict  # the layer of the parameter tree as NumPy arrays, its projections packed
    errors: dict[str, float]  # of the weights, or of the outputs on the text of a calibration
    # What rounding to the nearest would have caused in the outputs, where that was measured.
    rounded_errors: dict[str, float] = dataclasses.field(default_factory=dict)
    # By name of a stack of experts, where it was calibrated.
    loads: dict[str, ExpertLoad] = dataclasses.field(default_factory=dict)


def describe_loads(layers: Sequence[Mapping[str, ExpertLoad]]) -> str:
    """Returns a line for each layer: by how many tokens its experts were calibrated.

    Of a model without experts it is empty.
    """
    lines = []
    for number, loads in enumerate(layers):
        for name, (tokens, rounded) in loads.items():
            line = f"layer {number}, {name}: {min(tokens)} to {max(tokens)} tokens an expert"
            if rounded:
                line += f"; {rounded} of {len(tokens)} had too few of them, and were rounded"
            lines.append(line)
    return "\n".join(lines)


def round_layers(checkpoint: Checkpoint) -> Iterator[PackedLayer]:
    """Rounds the layers of a dense checkpoint to the nearest NVFP4 numbers, as llm-compressor does.

    Returns:
        An iterator over the quantized layers in order.

    Raises:
        UserError: a weight cannot be quantized.
    """

    def read(layer: int) -> PackedLayer:
        dense = read_layer(checkpoint, layer, dtype=_BFLOAT16, without=STACKS)
        packed = pack_layer(checkpoint, layer, dense)
        for stack in stack_shapes(checkpoint.config, layer):
            packed.arrays[stack], errors = round_experts(checkpoint, layer, stack)
            packed.errors.update(errors)
        return packed

    return each_layer(read, checkpoint.config.num_layers, label="quantizing")


def pack_layer(checkpoint: Checkpoint, layer: int, dense: dict) -> PackedLayer:
    """Quantizes the projections of a layer of NumPy arrays, which are rounded to bfloat16 first.

    Returns:
        The layer, with its errors measured on the weights.

    Raises:
        UserError: a weight cannot be quantized; it names the checkpoint and the layer.
    """
    arrays, errors = dict(dense), {}
    for fused in (fused for fused in FUSED if fused in dense):
        weight = np.asarray(dense[fused], _BFLOAT16)
        bounds = member_bounds(fused, checkpoint.config)
        with name_in_errors(checkpoint, layer, fused):
            arrays[fused] = quantize_nvfp4(np.split(weight, bounds))
        sums = (np.split(rows, bounds) for rows in jax.device_get(_squares(weight, arrays[fused])))
        for member, error_squares, weight_squares in zip(FUSED[fused], *sums, strict=True):
            errors[member] = float(np.sqrt(error_squares.sum() / max(weight_squares.sum(), 1e-30)))
    return PackedLayer(arrays, errors)


def round_experts(
    checkpoint: Checkpoint, layer: int, stack: str
) -> tuple[QuantTensor, dict[str, float]]:
    """Reads and quantizes the experts of a layer one after the other: a stack of `kinds.STACKS`.

    Returns:
        The stack, and the errors of the projections over all experts, measured on the weights.

    Raises:
        UserError: as in `pack_layer`.
    """
    members, parts, squares = STACKS[stack].members, [], []
    tensors = names.stored_tensors(checkpoint.config, layer)[stack]
    for group in itertools.batched(tensors, len(members)):
        weights = [checkpoint.read(tensor, _BFLOAT16) for tensor in group]
        with name_in_errors(checkpoint, layer, stack):
            parts.append(quantize_nvfp4(weights))
        sums = np.array(_squares(np.concatenate(weights), parts[-1]))  # of errors, and of weights
        squares.append(sums.reshape(2, len(members), -1).sum(axis=2))
    error_squares, weight_squares = np.sum(squares, axis=0)
    errors = np.sqrt(error_squares / np.maximum(weight_squares, 1e-30))
    weight = jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
    return weight, {f"experts.{m}": float(e) for m, e in zip(members, errors, strict=True)}


@jax.jit
def _squares(weight: jax.Array, packed: QuantTensor) -> tuple[jax.Array, jax.Array]:
    """Returns the sums of squares over each row [N] of the rounding error and of the weight."""
    weight = weight.astype(jnp.float32)
    difference = weight - dequantize(packed, jnp.float32)
    return jnp.sum(difference**2, axis=1), jnp.sum(weight**2, axis=1)


def fill_packed(
    folder: pathlib.Path,
    checkpoint: Checkpoint,
    layers: Iterable[PackedLayer],
    *,
    max_shard_bytes: int = SHARD_BYTES,
) -> list[dict[str, float]]:
    """Fills an empty folder with an NVFP4A16 checkpoint, as llm-compressor writes it.

    Memory holds the tensors of at most one file, the embedding and a few layers. All tensors
    outside of the layers are copied from the checkpoint in bfloat16.

    Returns:
        For every layer the error of each projection.

    Raises:
        UserError: values are not finite.
    """
    errors = []

    def arrays() -> Iterator[dict]:
        for number, layer in enumerate(layers):
            for name, array in layer.arrays.items():
                if not isinstance(array, QuantTensor):
                    _check_finite(checkpoint, f"layer {number}, {name}", array)
            errors.append(layer.errors)
            yield layer.arrays

    params = {
        "embed_tokens": checkpoint.read(names.EMBED, _BFLOAT16),
        "norm": checkpoint.read(names.NORM, np.dtype(np.float32)),
    }
    params["norm"] += np.float32(names.centered_at(checkpoint.config, "norm"))
    if not checkpoint.config.tie_embeddings:
        params["lm_head"] = checkpoint.read(names.HEAD, _BFLOAT16)
    for name, array in params.items():
        _check_finite(checkpoint, name, array)
    fill_checkpoint(
        folder,
        checkpoint_tensors(params | {"layers": arrays()}, checkpoint.config),
        files=companion_files(checkpoint, packed=True),
        max_shard_bytes=max_shard_bytes,
    )
    return errors


def _check_finite(checkpoint: Checkpoint, where: str, array: np.ndarray) -> None:
    if not np.isfinite(array).all():
        raise UserError(f"{checkpoint.path}: {where}: holds values that are not finite")
