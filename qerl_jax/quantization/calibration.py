"""Calibrates a model for NVFP4: GPTQ layer after layer, on the inputs that the layers will see.

The device holds one layer at a time and the activations of the whole text, so that models are
calibrated that would not fit in 16 bits. The inputs of a projection come from the projections that
are quantized already, so that it also makes up for their errors.
"""

import dataclasses
import functools
from collections.abc import Hashable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.compile.aot import compile_operations
from qerl_jax.compile.operation import Operation, Programs, abstract, commit
from qerl_jax.errors import UserError
from qerl_jax.policy import transformer
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.layers import kinds
from qerl_jax.policy.layers.attention import rotary_angles
from qerl_jax.policy.layers.kinds import FUSED, Layer, member_bounds, projection_shapes
from qerl_jax.policy.quant import QuantTensor, check_inputs, dequantize, quantize_on_device
from qerl_jax.quantization.gptq import SAME_PROGRAM, block_scales, gptq, pack_codes
from qerl_jax.quantization.rounding import PackedLayer
from qerl_jax.weights import names
from qerl_jax.weights.checkpoint import Checkpoint
from qerl_jax.weights.load import DTYPES, each_layer, name_in_errors, read_layer

_ROWS = range(4, 9)  # text windows that run through a layer together
_DAMPING = (0.01, 0.1, 1.0)  # one after the other, until the moments have a factor


@dataclasses.dataclass(frozen=True)
class CalibrationOptions:
    """What GPTQ does in addition to rounding columns one after the other."""

    grow: bool = True  # whether scales of blocks may grow, see `gptq.block_scales`
    orders: bool = True  # whether columns are taken by descending energy, see `gptq.gptq`
    damping: float = _DAMPING[0]  # added to the diagonal of the moments, relative to its mean
    # Whether the errors of outputs are measured, also those of rounding: a few more products.
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
            windows as many are used as fill equal batches.
        options: what GPTQ does.

    Yields:
        The layers in order. With `reports_errors` they have the errors of the outputs on the text,
        and those of rounding the projection, whose inputs come from the same calibrated layers.

    Raises:
        UserError: the inputs of a projection fill no whole blocks, a weight is not finite, or the
            moments of a projection's inputs are not.
    """
    config = checkpoint.config
    shapes = projection_shapes(config)
    for fused in FUSED.keys() & kinds.fused_counts(config).keys():
        check_inputs(shapes[FUSED[fused][0]], "nvfp4")
    rows = _batch_rows(len(tokens))
    tokens = tokens[: len(tokens) // rows * rows]
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    embedding = checkpoint.read(names.EMBED, DTYPES["bfloat16"])
    x = jnp.asarray(embedding[tokens], dtype).reshape(-1, rows, tokens.shape[1], config.embed_dim)
    del embedding
    read = functools.partial(read_layer, checkpoint, dtype=DTYPES["bfloat16"])
    programs_of: dict[Layer, Programs] = {}
    for number, dense in enumerate(each_layer(read, config.num_layers, label="calibrating")):
        layer = {
            name: jnp.asarray(array, None if names.is_wide(name) else dtype)
            for name, array in dense.items()
        }
        kind = kinds.layer_of(config, number)
        if kind not in programs_of:
            programs_of[kind] = _programs(kind, layer, x, options, config)
        programs = programs_of[kind]
        arrays, errors, rounded_errors = dict(dense), {}, {}
        for fused in (fused for fused in FUSED if fused in layer):
            members = FUSED[fused]
            hessian = programs["moments", fused](layer, x)
            with name_in_errors(checkpoint, number, fused):
                packed = _quantize(layer[fused], hessian, options, programs, fused)
            if options.reports_errors:
                bounds = member_bounds(fused, config)
                ratios = _output_errors(layer[fused], packed, hessian, bounds)
                errors |= dict(zip(members, ratios, strict=True))
                rounded = quantize_on_device(jnp.split(layer[fused], bounds), format="nvfp4")
                ratios = _output_errors(layer[fused], rounded, hessian, bounds)
                rounded_errors |= dict(zip(members, ratios, strict=True))
            layer[fused] = programs["dense", fused](packed)
            arrays[fused] = packed
            del hessian  # The moments of the next projection need the memory.
        x = programs["outputs"](layer, x)
        yield PackedLayer(jax.device_get(arrays), errors, rounded_errors)


def _batch_rows(windows: int) -> int:
    """Returns how many windows form a batch, so that equal batches leave few windows out."""
    sizes = range(min(windows, _ROWS[0]), _ROWS[-1] + 1)
    return max(sizes, key=lambda rows: (windows // rows * rows, rows))


def _programs(
    kind: Layer, layer: dict, x: jax.Array, options: CalibrationOptions, config: ModelConfig
) -> Programs:
    """Returns the programs of a layer; on a GPU all are compiled now, several at a time.

    All layers of a kind have the same shapes, and so do their inputs `x`.
    """
    arrays, rows = abstract(layer), abstract(x)
    table: dict[Hashable, Operation] = {}

    def add(name: Hashable, function: Any, static: dict[str, Any], *arguments: Any) -> Operation:
        table[name] = Operation.of_shapes(f"calibration {name}", function, static, *arguments)
        return table[name]

    for fused in (fused for fused in FUSED if fused in arrays):
        weight = arrays[fused]
        moments = {"name": fused, "kind": kind, "config": config}
        hessian = add(("moments", fused), _moments, moments, arrays, rows).eval_shape()
        scaling = add(("scales", fused), _scales, {"grow": options.grow}, weight, hessian)
        scales, divisor, _ = scaling.eval_shape()
        static = {"orders": options.orders}
        damping = jax.ShapeDtypeStruct((), jnp.float32)
        arguments = weight, hessian, scales, divisor, damping
        codes, _ = add(("gptq", fused), gptq, static, *arguments).eval_shape()
        packed = add(("pack", fused), _pack, {}, codes, scales, divisor).eval_shape()
        add(("dense", fused), _dense, {"dtype": weight.dtype}, packed)
    add("outputs", _outputs, {"kind": kind, "config": config}, arrays, rows)
    if jax.default_backend() != "gpu":
        return Programs(table)
    table = {
        name: operation._replace(arguments=functools.partial(_on, x.sharding, operation))
        for name, operation in table.items()
    }
    return Programs(table, compile_operations(commit(x), table.values()))


def _on(sharding: jax.sharding.Sharding, operation: Operation) -> tuple[Any, ...]:
    """Returns the arguments of an operation as arrays of a device."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        operation.arguments(),
    )


def _quantize(
    weight: jax.Array,
    hessian: jax.Array,
    options: CalibrationOptions,
    programs: Programs,
    fused: str,
) -> QuantTensor:
    """Returns a fused weight in NVFP4."""
    scales, divisor, is_finite = programs["scales", fused](weight, hessian)
    if not is_finite:
        raise UserError("the weights, or the activations in front of them, are not finite")
    for damping in (options.damping, *(more for more in _DAMPING if more > options.damping)):
        codes, is_finite = programs["gptq", fused](
            weight, hessian, scales, divisor, jnp.float32(damping)
        )
        if is_finite:
            return programs["pack", fused](codes, scales, divisor)
    raise UserError("the inputs have moments without a Cholesky factor")


@functools.partial(jax.jit, static_argnames="grow")
def _scales(
    weight: jax.Array, hessian: jax.Array, *, grow: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns what `block_scales` does, and whether weight and moments are finite."""
    wide = weight.astype(jnp.float32)
    is_finite = jnp.isfinite(jnp.abs(wide).max()) & jnp.isfinite(jnp.trace(hessian))
    scales, divisor = block_scales(wide, jnp.diagonal(hessian), grow=grow)
    return scales, divisor, is_finite


@jax.jit
def _pack(codes: jax.Array, scales: jax.Array, divisor: jax.Array) -> QuantTensor:
    rows = jnp.full(len(codes), divisor)
    return QuantTensor(packed=pack_codes(codes), scales=scales, global_scale=rows)


@functools.partial(jax.jit, static_argnames="dtype")
def _dense(packed: QuantTensor, *, dtype: jnp.dtype) -> jax.Array:
    return dequantize(packed, dtype)


def _output_errors(
    weight: jax.Array, packed: QuantTensor, hessian: jax.Array, bounds: list[int]
) -> list[float]:
    """Returns the relative error of the outputs of each member of a fused weight."""
    squares = jax.device_get(_output_squares(weight, packed, hessian))
    parts = [np.split(rows, bounds) for rows in squares]
    return [float(np.sqrt(a.sum() / max(b.sum(), 1e-30))) for a, b in zip(*parts, strict=True)]


@functools.partial(jax.jit, compiler_options=SAME_PROGRAM)
def _output_squares(
    weight: jax.Array, packed: QuantTensor, hessian: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the mean squares [N] of the errors of each output, and of the output."""
    wide = weight.astype(jnp.float32)

    def squares(rows: jax.Array) -> jax.Array:
        # The error is small where columns make up for each other: in float32 throughout.
        outputs = jnp.matmul(rows, hessian, precision=jax.lax.Precision.HIGHEST)
        return jnp.sum(outputs * rows, axis=1)

    return squares(wide - dequantize(packed, jnp.float32)), squares(wide)


@functools.partial(
    jax.jit, static_argnames=("name", "kind", "config"), compiler_options=SAME_PROGRAM
)
def _moments(
    layer: dict, x: jax.Array, *, name: str, kind: Layer, config: ModelConfig
) -> jax.Array:
    """Returns the mean of x x^T, float32 [K, K], over the inputs of the fused projection `name`.

    In the layer, with inputs x [batches, B, T, D], the projections before it are quantized.
    """

    def add(total: jax.Array, batch: jax.Array) -> tuple[jax.Array, None]:
        _, inputs = _run(kind, layer, batch, config)
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
    jax.jit, static_argnames=("kind", "config"), donate_argnames="x", compiler_options=SAME_PROGRAM
)
def _outputs(layer: dict, x: jax.Array, *, kind: Layer, config: ModelConfig) -> jax.Array:
    """Returns the outputs [batches, B, T, D] of a layer."""
    return jax.lax.map(lambda batch: _run(kind, layer, batch, config)[0], x)


def _run(
    kind: Layer, layer: dict, x: jax.Array, config: ModelConfig
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the outputs of a layer, and the inputs of its projections by name."""
    positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    lengths = jnp.full(x.shape[:1], x.shape[1], jnp.int32)
    angles = rotary_angles(positions, config)
    return transformer.layer_with_inputs(kind, layer, x, lengths, angles, config=config)
