"""Calibrates a model for NVFP4: GPTQ layer after layer, on the inputs that the layers will see.

The device holds one layer at a time and the activations of the whole text, so that models are
calibrated that would not fit in 16 bits. The inputs of a projection are those that
the quantized projections before it give, so that it also makes up for their errors.
"""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.errors import UserError
from qerl_jax.policy import transformer
from qerl_jax.policy.attention import rotary_angles
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.lora import FUSED, member_bounds
from qerl_jax.policy.quant import QuantTensor, dequantize
from qerl_jax.quantization.gptq import SAME_PROGRAM, block_scales, gptq, pack_codes
from qerl_jax.quantization.rounding import PackedLayer
from qerl_jax.weights import names
from qerl_jax.weights.checkpoint import Checkpoint
from qerl_jax.weights.load import DTYPES, each_layer, read_layer

_ROWS = 8  # text windows that run through a layer together
_DAMPING = (0.01, 0.1, 1.0)  # one after the other, until the moments have a factor


@dataclasses.dataclass(frozen=True)
class CalibrationOptions:
    """What GPTQ does beside rounding columns one after the other.

    Attributes:
        grow: whether scales of blocks may grow, see `gptq.block_scales`.
        damping: what is added to the diagonal of the moments, relative to its mean.
        reports_errors: whether the errors of outputs are measured, which takes two more products.
    """

    grow: bool = True
    damping: float = _DAMPING[0]
    reports_errors: bool = False


def calibrated_layers(
    checkpoint: Checkpoint,
    tokens: np.ndarray,
    options: CalibrationOptions = CalibrationOptions(),
) -> Iterator[PackedLayer]:
    """Quantizes the layers of a checkpoint to NVFP4 by GPTQ.

    Args:
        checkpoint: the model, with weights that are not packed.
        tokens: int32 [B, T] token ids, one window of the text in each row. Of more than eight
            windows as many are used as fill batches of eight.
        options: what GPTQ does.

    Yields:
        The layers in order. Their errors are those of the outputs on the text: the mean square of
        the error relative to the mean square of the output. Without `reports_errors` no
        error is measured.

    Raises:
        UserError: a weight is not finite, or the moments of a projection's inputs are not.
    """
    config = checkpoint.config
    rows = min(_ROWS, len(tokens))
    tokens = tokens[: len(tokens) // rows * rows]
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    embedding = checkpoint.read(names.EMBED, DTYPES["bfloat16"])
    x = jnp.asarray(embedding[tokens], dtype).reshape(-1, rows, tokens.shape[1], config.embed_dim)
    del embedding
    read = functools.partial(read_layer, checkpoint, dtype=DTYPES["bfloat16"])
    for number, dense in enumerate(each_layer(read, config.num_layers, label="calibrating")):
        layer = {name: _on_device(name, array, dtype) for name, array in dense.items()}
        arrays, errors = dict(dense), {}
        for fused, members in FUSED.items():
            hessian = _moments(layer, x, name=fused, config=config)
            try:
                packed, quantized, ratios = _quantize(
                    dense[fused], hessian, member_bounds(fused, config), options
                )
            except UserError as error:
                where = f"layer {number}, {'/'.join(members)}"
                raise UserError(f"{checkpoint.path}: {where}: {error}") from error
            layer[fused] = quantized.astype(dtype)
            arrays[fused] = packed
            errors |= dict(zip(members, ratios, strict=True)) if ratios else {}
        x = _outputs(layer, x, config=config)
        yield PackedLayer(jax.device_get(arrays), errors)


def _on_device(name: str, array: np.ndarray, dtype: jnp.dtype) -> jax.Array:
    return jnp.asarray(array) if name.endswith("norm") else jnp.asarray(array, dtype)


def _quantize(
    weight: np.ndarray, hessian: jax.Array, bounds: list[int], options: CalibrationOptions
) -> tuple[QuantTensor, jax.Array, list[float]]:
    """Returns a fused weight in NVFP4, its values, and the error of each member's outputs."""
    wide = jnp.asarray(weight, jnp.float32)
    if not (np.isfinite(float(jnp.abs(wide).max())) and jnp.isfinite(jnp.trace(hessian))):
        raise UserError("the weights, or the activations in front of them, are not finite")
    scales, divisor = block_scales(wide, jnp.diagonal(hessian), grow=options.grow)
    for damping in (options.damping, *_DAMPING[1:]):
        codes, is_finite = gptq(wide, hessian, scales, divisor, damping)
        if is_finite:
            break
    else:
        raise UserError("the inputs have moments without a Cholesky factor")
    rows = jnp.full(len(wide), divisor)
    packed = QuantTensor(packed=pack_codes(codes), scales=scales, global_scale=rows)
    quantized = dequantize(packed, jnp.float32)
    if not options.reports_errors:
        return packed, quantized, []
    squares = jax.device_get(_output_squares(wide, quantized, hessian))
    parts = [np.split(rows, bounds) for rows in squares]
    ratios = [float(a.sum() / max(b.sum(), 1e-30)) for a, b in zip(*parts, strict=True)]
    return packed, quantized, ratios


@functools.partial(jax.jit, compiler_options=SAME_PROGRAM)
def _output_squares(
    weight: jax.Array, quantized: jax.Array, hessian: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the mean squares [N] of the errors of each output, and of the output."""
    error = weight - quantized
    return jnp.sum((error @ hessian) * error, axis=1), jnp.sum((weight @ hessian) * weight, axis=1)


@functools.partial(jax.jit, static_argnames=("name", "config"), compiler_options=SAME_PROGRAM)
def _moments(layer: dict, x: jax.Array, *, name: str, config: ModelConfig) -> jax.Array:
    """Returns the mean of x x^T, float32 [K, K], over the inputs of a projection.

    Args:
        layer: the layer, in which the projections before this one are quantized.
        x: inputs [batches, B, T, D] of the layer.
        name: name of the fused projection.
        config: the architecture.
    """

    def add(total: jax.Array, batch: jax.Array) -> tuple[jax.Array, None]:
        _, inputs = _run(layer, batch, config)
        rows = inputs[name].reshape(-1, inputs[name].shape[-1])
        product = jax.lax.dot_general(
            rows,
            rows,
            (((0,), (0,)), ((), ())),
            precision=_precision(rows.dtype),
            preferred_element_type=jnp.float32,
        )
        return total + product, None

    width = layer[name].shape[1]
    total, _ = jax.lax.scan(add, jnp.zeros((width, width), jnp.float32), x)
    return total / (x.size // x.shape[-1])


def _precision(dtype: jnp.dtype) -> jax.lax.Precision:
    """Products of bfloat16 numbers are exact in float32 already; those of float32 need not be."""
    return jax.lax.Precision.DEFAULT if dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST


@functools.partial(
    jax.jit, static_argnames="config", donate_argnames="x", compiler_options=SAME_PROGRAM
)
def _outputs(layer: dict, x: jax.Array, *, config: ModelConfig) -> jax.Array:
    """Returns the outputs [batches, B, T, D] of a layer."""
    return jax.lax.map(lambda batch: _run(layer, batch, config)[0], x)


def _run(layer: dict, x: jax.Array, config: ModelConfig) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the outputs of a layer, and the inputs of its projections by name."""
    positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    lengths = jnp.full(x.shape[:1], x.shape[1], jnp.int32)
    angles = rotary_angles(positions, config)
    return transformer.layer_with_inputs(layer, x, lengths, angles, config=config)
