"""From a checkpoint in 16 bits to one in NVFP4, a layer at a time."""

import dataclasses
import pathlib
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.errors import UserError
from qerl_jax.policy.lora import FUSED, projection_shapes
from qerl_jax.policy.quant import QuantTensor, dequantize, quantize_nvfp4
from qerl_jax.weights import names
from qerl_jax.weights.load import DTYPES, Checkpoint, each_layer, read_layer
from qerl_jax.weights.save import checkpoint_tensors, companion_files, write_checkpoint

_BFLOAT16 = DTYPES["bfloat16"]


@dataclasses.dataclass(frozen=True)
class PackedLayer:
    """A quantised layer.

    Attributes:
        arrays: the layer of the parameter tree in NumPy, its projections packed.
        errors: what rounding changed in each projection, relative to it (root mean squares): in
            its weight, or where it was calibrated in its outputs on the text.
    """

    arrays: dict
    errors: dict[str, float]


def round_layers(checkpoint: Checkpoint) -> Iterator[PackedLayer]:
    """The layers of a checkpoint rounded to the nearest NVFP4 numbers, as llm-compressor does.

    Raises:
        UserError: a weight cannot be quantised.
    """

    def read(layer: int) -> PackedLayer:
        dense = read_layer(checkpoint, layer, format="bf16", dtype=_BFLOAT16)
        return pack_layer(checkpoint, layer, dense)

    return each_layer(read, checkpoint.config.num_layers, label="quantising")


def pack_layer(checkpoint: Checkpoint, layer: int, dense: dict) -> PackedLayer:
    """Quantises the projections of a layer.

    Args:
        checkpoint: what the layer comes from.
        layer: its number.
        dense: its NumPy arrays; the projections are rounded to bfloat16 first.

    Raises:
        UserError: a weight cannot be quantised.
    """
    shapes = projection_shapes(checkpoint.config)
    arrays, errors = dict(dense), {}
    for fused, members in FUSED.items():
        ends = np.cumsum([shapes[member][0] for member in members])
        weight = np.asarray(dense[fused], _BFLOAT16)
        try:
            arrays[fused] = quantize_nvfp4(np.split(weight, ends[:-1]))
        except UserError as error:
            where = f"layer {layer}, {'/'.join(members)}"
            raise UserError(f"{checkpoint.path}: {where}: {error}") from error
        changed, whole = jax.device_get(_squares(weight, arrays[fused]))
        for member, rows in zip(members, np.split(np.arange(len(weight)), ends[:-1]), strict=True):
            errors[member] = float(np.sqrt(changed[rows].sum() / max(whole[rows].sum(), 1e-30)))
    return PackedLayer(arrays, errors)


@jax.jit
def _squares(weight: jax.Array, packed: QuantTensor) -> tuple[jax.Array, jax.Array]:
    """The sums of squares of the rows [N] of what rounding changed, and of the weight."""
    weight = weight.astype(jnp.float32)
    changed = weight - dequantize(packed, jnp.float32)
    return jnp.sum(changed**2, axis=1), jnp.sum(weight**2, axis=1)


def write_packed(
    folder: pathlib.Path | str,
    checkpoint: Checkpoint,
    layers: Iterable[PackedLayer],
    *,
    max_shard_bytes: int = 5_000_000_000,
) -> list[dict[str, float]]:
    """Writes an NVFP4A16 checkpoint as llm-compressor does; it appears complete or not at all.

    No more than a file's worth of it is in memory at a time, beside the embedding and a few layers.

    Args:
        folder: where to; must not exist, or be empty.
        checkpoint: what the layers come from; the rest is copied from it in bfloat16.
        layers: its quantised layers in order.
        max_shard_bytes: see `write_checkpoint`.

    Returns:
        The errors of each layer's projections.

    Raises:
        UserError: the folder exists or cannot be written, or values are not finite.
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
        "norm": checkpoint.read(names.NORM, _BFLOAT16),
    }
    if not checkpoint.config.tie_embeddings:
        params["lm_head"] = checkpoint.read(names.HEAD, _BFLOAT16)
    for name, array in params.items():
        _check_finite(checkpoint, name, array)
    write_checkpoint(
        folder,
        checkpoint_tensors(params | {"layers": arrays()}, checkpoint.config),
        files=companion_files(checkpoint, packed=True),
        max_shard_bytes=max_shard_bytes,
    )
    return errors


def _check_finite(checkpoint: Checkpoint, where: str, array: np.ndarray) -> None:
    if not np.isfinite(array).all():
        raise UserError(f"{checkpoint.path}: {where}: holds values that are not finite")
