"""Calibrates a model for NVFP4: GPTQ layer after layer, on the inputs that the layers will see.

The device holds one layer at a time and the activations of the whole text, so that models are
calibrated that would not fit in 16 bits. The inputs of a projection come from the projections that
are quantized already, so that it also makes up for their errors.

An expert has the moments of its own tokens. Those of gate and up are mixed with the moments of all
tokens, the more, the fewer tokens it has. A down projection reads what its expert alone computes:
one with fewer tokens than inputs is rounded to the nearest. The moments of all experts of a layer
would take gigabytes, so a part of the experts is quantized at a time.
"""

import dataclasses
import functools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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
from qerl_jax.policy.layers.kinds import FUSED, PACKED, STACKS, Layer, member_bounds
from qerl_jax.policy.layers.part import Stack
from qerl_jax.policy.quant import QuantTensor, dequantize, quantize_on_device
from qerl_jax.quantization.gptq import (
    SAME_PROGRAM,
    block_scales,
    gptq,
    gptq_of_experts,
    pack_codes,
)
from qerl_jax.quantization.rounding import ExpertLoad, PackedLayer
from qerl_jax.weights import names
from qerl_jax.weights.checkpoint import Checkpoint
from qerl_jax.weights.load import (
    DTYPES,
    LoadedModel,
    check_formats,
    each_layer,
    name_in_errors,
    read_layer,
)

Grids = Mapping[str, QuantTensor]  # weights by name, whose scales other weights get

_ROWS = range(4, 9)  # text windows that run through a layer together
_DAMPING = (0.01, 0.1, 1.0)  # one after the other, until the moments have a factor
_MOMENT_BYTES = 1 << 29  # of the moments of experts that exist at a time


@dataclasses.dataclass(frozen=True)
class CalibrationOptions:
    """What GPTQ does in addition to rounding columns one after the other."""

    grow: bool = True  # whether scales of blocks may grow, see `gptq.block_scales`
    orders: bool = True  # whether columns are taken by descending energy, see `gptq.gptq`
    damping: float = _DAMPING[0]  # added to the diagonal of the moments, relative to its mean
    # Tokens of all experts that the moments of an expert's gate and up have in addition to its own,
    # relative to the number of inputs.
    shared_tokens: float = 1.0
    # Whether the errors of outputs are measured, also those of rounding: a few more products.
    reports_errors: bool = False


class _Grid(NamedTuple):
    """The scales that a weight near to a grid keeps, and what its targets are dithered by.

    An update that is small against the distance between two numbers would be lost: what GPTQ makes
    up for is less than that, most of all where inputs hardly correlate. With a dither that is as
    likely up as down, all of it is kept on average, and GPTQ makes up for the noise.
    """

    scales: jax.Array  # FP8 [N, K/16]
    divisors: jax.Array  # float32 [N, 1]
    dither: jax.Array  # float32 [N, K], from -0.5 to 0.5

    @classmethod
    def of(cls, weight: QuantTensor, layer: int, name: str) -> "_Grid":
        """Returns the grid of a weight in NVFP4, with the same dither each time."""
        key = jax.random.key(len(PACKED) * layer + list(PACKED).index(name), impl="threefry2x32")
        dither = jax.random.uniform(key, weight.shape, minval=-0.5, maxval=0.5)
        return cls(jnp.asarray(weight.scales), jnp.asarray(weight.global_scale)[:, None], dither)


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
        The layers, as `calibrate` does.

    Raises:
        UserError: the inputs of a projection fill no whole blocks, or as in `calibrate`.
    """
    check_formats(checkpoint, "nvfp4")
    read = functools.partial(read_layer, checkpoint, dtype=DTYPES["bfloat16"])
    layers = each_layer(read, checkpoint.config.num_layers, label="calibrating")
    embedding = checkpoint.read(names.EMBED, DTYPES["bfloat16"])
    x = _inputs(embedding, tokens)
    del embedding
    yield from calibrate(checkpoint, ((layer, {}) for layer in layers), x, options)


def calibrated_updates(
    model: LoadedModel,
    layers: Iterable[tuple[dict, Grids]],
    tokens: np.ndarray,
    options: CalibrationOptions = CalibrationOptions(),
) -> Iterator[PackedLayer]:
    """Quantizes other layers of a model, such as those with an adapter merged into them.

    Args:
        model: the model that has the embedding.
        layers: its layers and the grids of their weights, as in `calibrate`.
        tokens: int32 [B, T] token ids, as in `calibrated_layers`.
        options: what GPTQ does.

    Yields:
        The layers, as `calibrate` does.
    """
    x = _inputs(model.params["embed_tokens"], tokens)
    yield from calibrate(model, layers, x, options)


def calibrate(
    model: Checkpoint | LoadedModel,
    layers: Iterable[tuple[dict, Grids]],
    x: jax.Array,
    options: CalibrationOptions = CalibrationOptions(),
) -> Iterator[PackedLayer]:
    """Quantizes layers to NVFP4 by GPTQ, one after the other.

    Args:
        model: what has the layers.
        layers: the arrays of each layer of the parameter tree, and weights in NVFP4 by name. These
            are grids: an array of that name is quantized with their scales, which it is near to,
            and dithered, see `_Grid`. What is in NVFP4 among the arrays stays as it is.
        x: embeddings [batches, B, T, D] of the text.
        options: what GPTQ does.

    Yields:
        The layers in order. With `reports_errors` they have the errors of the outputs on the text,
        and those of rounding the projection, whose inputs come from the same calibrated layers.

    Raises:
        UserError: a weight is not finite, or the moments of a projection's inputs are not.
    """
    config, dtype = model.config, x.dtype
    programs_of: dict[tuple, Programs] = {}
    for number, (dense, grids) in enumerate(layers):
        layer = {name: _on_device(name, array, dtype) for name, array in dense.items()}
        kind = kinds.layer_of(config, number)
        grids = {name: _Grid.of(weight, number, name) for name, weight in grids.items()}
        key = kind, *grids
        if key not in programs_of:
            programs_of[key] = _programs(kind, layer, grids, x, options, config)
        programs = programs_of[key]
        arrays, errors, rounded_errors, loads = dict(dense), {}, {}, {}
        for name in _quantized_now(layer):
            with name_in_errors(model, number, name):
                if stack := STACKS.get(name):
                    found = _quantize_experts(layer, x, options, programs, stack, config)
                    loads[name] = found.load
                else:
                    grid = grids.get(name)
                    found = _quantize_fused(layer, grid, x, options, programs, name, config)
            if found.errors:
                errors |= found.errors[0]
                rounded_errors |= found.errors[1]
            layer[name] = programs["dense", name](found.packed)
            arrays[name] = found.packed
        x = programs["outputs"](layer, x)
        yield PackedLayer(jax.device_get(arrays), errors, rounded_errors, loads)


def _inputs(embedding: Any, tokens: np.ndarray) -> jax.Array:
    """Returns the embeddings [batches, B, T, D] of windows of a text."""
    rows = _batch_rows(len(tokens))
    tokens = tokens[: len(tokens) // rows * rows]
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    return jnp.asarray(embedding[tokens], dtype).reshape(
        -1, rows, *tokens.shape[1:], embedding.shape[1]
    )


def _on_device(name: str, array: Any, dtype: jnp.dtype) -> Any:
    """Returns an array of a layer as the layer computes with it.

    A weight that comes in float32 stays so until it is quantized: a small update of it counts.
    """
    if isinstance(array, QuantTensor):
        return array
    keeps = names.is_wide(name) or (name in FUSED and array.dtype == jnp.float32)
    return jnp.asarray(array, None if keeps else dtype)


def _quantized_now(layer: Mapping[str, Any]) -> list[str]:
    """Returns the names of the arrays that are quantized, in their order."""
    return [n for n in PACKED if n in layer and not isinstance(layer[n], QuantTensor)]


def _batch_rows(windows: int) -> int:
    """Returns how many windows form a batch, so that equal batches leave few windows out."""
    sizes = range(min(windows, _ROWS[0]), _ROWS[-1] + 1)
    return max(sizes, key=lambda rows: (windows // rows * rows, rows))


def _programs(
    kind: Layer,
    layer: dict,
    grids: Mapping[str, _Grid],
    x: jax.Array,
    options: CalibrationOptions,
    config: ModelConfig,
) -> Programs:
    """Returns the programs of a layer; on a GPU all are compiled now, several at a time.

    All layers of a kind have the same shapes, and so do their inputs `x`.
    """
    arrays, rows = abstract(layer), abstract(x)
    table: dict[Hashable, Operation] = {}

    def add(name: Hashable, function: Any, static: dict[str, Any], *arguments: Any) -> Operation:
        table[name] = Operation.of_shapes(f"calibration {name}", function, static, *arguments)
        return table[name]

    for name in _quantized_now(arrays):
        weight, moments = arrays[name], {"name": name, "kind": kind, "config": config}
        scale, round_columns = _scales, gptq
        if stack := STACKS.get(name):
            scale, round_columns = _scales_of_experts, gptq_of_experts
            count, outputs, inputs = _part_shape(stack, config)
            everyone = None
            if stack.reads:
                reads = moments | {"name": stack.reads}
                add(("moments", stack.reads), _moments, reads, arrays, rows)
                everyone = table["moments", stack.reads].eval_shape()
            first, static = jax.ShapeDtypeStruct((), jnp.int32), moments | {"count": count}
            own = add(("moments", name), _own_moments, static, arrays, rows, first).eval_shape()
            static = {"shared_tokens": options.shared_tokens}
            hessian = add(("mixed", name), _mixed, static, *own, everyone).eval_shape()
            weight = jax.ShapeDtypeStruct((count, outputs, inputs), weight.dtype)
        else:
            hessian = add(("moments", name), _moments, moments, arrays, rows).eval_shape()
        if grid := abstract(grids.get(name)):
            scales, divisor, _ = grid
        else:
            scaling = add(("scales", name), scale, {"grow": options.grow}, weight, hessian)
            scales, divisor, _ = scaling.eval_shape()
        static = {"orders": options.orders}
        damping = jax.ShapeDtypeStruct(hessian.shape[:-2], jnp.float32)
        arguments = weight, hessian, scales, divisor, damping, *([grid.dither] if grid else [])
        codes, _ = add(("gptq", name), round_columns, static, *arguments).eval_shape()
        packed = add(("pack", name), _pack, {}, codes, scales, divisor).eval_shape()
        if stack:
            packed = _whole(packed, len(arrays[name]) // len(packed.packed))
        dense = add(("dense", name), _dense, {"dtype": x.dtype}, packed).eval_shape()
        arrays = arrays | {name: dense}
    add("outputs", _outputs, {"kind": kind, "config": config}, arrays, rows)
    if jax.default_backend() != "gpu":
        return Programs(table)
    table = {
        name: operation._replace(
            arguments=lambda own=operation.arguments: abstract(own(), x.sharding)
        )
        for name, operation in table.items()
    }
    return Programs(table, compile_operations(commit(x), table.values()))


class _Quantized(NamedTuple):
    """A weight in NVFP4, as it is in `PackedLayer`."""

    packed: QuantTensor
    errors: list[dict[str, float]]  # its own and those of rounding, where they were measured
    load: ExpertLoad | None = None


def _quantize_fused(
    layer: dict,
    grid: _Grid | None,
    x: jax.Array,
    options: CalibrationOptions,
    programs: Programs,
    fused: str,
    config: ModelConfig,
) -> _Quantized:
    """Quantizes a fused weight of a layer with the inputs x."""
    weight, errors = layer[fused], []
    hessian = programs["moments", fused](layer, x)
    packed = _quantize(weight, hessian, grid, options, programs, fused)
    if options.reports_errors:
        bounds = member_bounds(fused, config)
        rounded = quantize_on_device(jnp.split(weight, bounds), format="nvfp4")
        for other in (packed, rounded):
            parts = _output_squares(weight, other, hessian)
            errors.append(_ratios(FUSED[fused], parts, bounds))
    return _Quantized(packed, errors)


def _quantize_experts(
    layer: dict,
    x: jax.Array,
    options: CalibrationOptions,
    programs: Programs,
    stack: Stack,
    config: ModelConfig,
) -> _Quantized:
    """Quantizes the weights of all experts of a layer with the inputs x, a part at a time."""
    experts, outputs, inputs = stack.shape(config)
    count = _part_shape(stack, config)[0]
    everyone = programs["moments", stack.reads](layer, x) if stack.reads else None
    parts, tokens, is_rounded, squares = [], [], [], []
    for start in range(0, experts, count):
        own = programs["moments", stack.name](layer, x, jnp.int32(start))
        weight = layer[stack.name].reshape(experts, outputs, inputs)
        weight = jax.lax.dynamic_slice_in_dim(weight, start, count)
        hessian = programs["mixed", stack.name](*own, everyone)
        packed = jax.device_get(_quantize(weight, hessian, None, options, programs, stack.name))
        del hessian
        few = (np.asarray(own[1]) < inputs) & (not stack.reads)
        if few.any() or options.reports_errors:
            rounded = [quantize_on_device([rows], format="nvfp4") for rows in weight]
            rounded = jax.device_get(jax.tree.map(lambda *a: jnp.concatenate(a), *rounded))
            packed = jax.tree.map(functools.partial(_chosen, few), rounded, packed)
            if options.reports_errors:
                squares.append([_output_squares(weight, w, own[0]) for w in (packed, rounded)])
        parts.append(packed)
        tokens.extend(np.asarray(own[1]).tolist())
        is_rounded.extend(few.tolist())
    packed = jax.tree.map(lambda *a: jnp.concatenate(a), *parts)
    load = ExpertLoad(tokens, sum(is_rounded))
    if not squares:
        return _Quantized(packed, [], load)
    members = [f"experts.{member}" for member in stack.members]
    bounds = [outputs // len(members) * number for number in range(1, len(members))]
    sums = jax.tree.map(lambda *a: np.concatenate(a).sum(axis=0), *jax.device_get(squares))
    return _Quantized(packed, [_ratios(members, pair, bounds) for pair in sums], load)


def _chosen(few: np.ndarray, these: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Returns the rows of these where bool `few` [E] is true of their expert, otherwise others."""
    is_these = np.repeat(few, len(these) // len(few))
    return np.where(is_these.reshape(-1, *[1] * (these.ndim - 1)), these, others)


def _part_shape(stack: Stack, config: ModelConfig) -> tuple[int, int, int]:
    """Returns the shape [E', N, K] of the experts that are quantized at a time."""
    experts, outputs, inputs = stack.shape(config)
    most = max(1, _MOMENT_BYTES // (4 * inputs**2))
    count = max(n for n in range(1, min(experts, most) + 1) if experts % n == 0)
    return count, outputs, inputs


def _whole(part: QuantTensor, parts: int) -> QuantTensor:
    """Returns the shapes of a weight that has some parts of equal shapes."""
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct((parts * len(a), *a.shape[1:]), a.dtype), part
    )


def _quantize(
    weight: jax.Array,
    hessian: jax.Array,
    grid: _Grid | None,
    options: CalibrationOptions,
    programs: Programs,
    name: str,
) -> QuantTensor:
    """Returns a fused weight in NVFP4, or those of several experts, one after the other."""
    dither = []
    if grid is None:
        scales, divisor, is_finite = programs["scales", name](weight, hessian)
        if not is_finite.all():
            raise UserError("the weights, or the activations in front of them, are not finite")
    else:
        scales, divisor, *dither = grid
    damping = jnp.full(hessian.shape[:-2], options.damping, jnp.float32)
    for more in (*(more for more in _DAMPING if more > options.damping), None):
        codes, is_finite = programs["gptq", name](
            weight, hessian, scales, divisor, damping, *dither
        )
        if is_finite.all():
            return programs["pack", name](codes, scales, divisor)
        if more is not None:
            damping = jnp.where(is_finite, damping, jnp.float32(more))
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


@functools.partial(jax.jit, static_argnames="grow")
def _scales_of_experts(
    weights: jax.Array, hessians: jax.Array, *, grow: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns what `_scales` does for each expert of [E, N, K]."""
    return jax.vmap(functools.partial(_scales, grow=grow))(weights, hessians)


@jax.jit
def _pack(codes: jax.Array, scales: jax.Array, divisor: jax.Array) -> QuantTensor:
    """Packs the codes [N, K] of a weight, or [E, N, K] of those of experts.

    A weight has one divisor, or one of each row, [N, 1].
    """
    rows = jnp.repeat(divisor, math.prod(codes.shape[:-1]) // divisor.size)
    codes, scales = (a.reshape(-1, a.shape[-1]) for a in (codes, scales))
    return QuantTensor(packed=pack_codes(codes), scales=scales, global_scale=rows)


@functools.partial(jax.jit, static_argnames="dtype")
def _dense(packed: QuantTensor, *, dtype: jnp.dtype) -> jax.Array:
    return dequantize(packed, dtype)


def _ratios(members: Sequence[str], squares: Any, bounds: list[int]) -> dict[str, float]:
    """Returns the relative error of the outputs of each member, of what `_output_squares` gives."""
    parts = zip(*(np.split(np.asarray(rows), bounds) for rows in squares), strict=True)
    ratios = (float(np.sqrt(a.sum() / max(b.sum(), 1e-30))) for a, b in parts)
    return dict(zip(members, ratios, strict=True))


@functools.partial(jax.jit, compiler_options=SAME_PROGRAM)
def _output_squares(
    weight: jax.Array, packed: QuantTensor, hessian: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the mean squares [N] of the errors of each output, and of the output.

    Of several experts, [E, N, K] with moments [E, K, K], they are [E, N].
    """
    wide = weight.astype(jnp.float32)

    def squares(rows: jax.Array) -> jax.Array:
        # The error is small where columns make up for each other: in float32 throughout.
        outputs = jnp.matmul(rows, hessian, precision=jax.lax.Precision.HIGHEST)
        return jnp.sum(outputs * rows, axis=-1)

    return squares(wide - dequantize(packed, jnp.float32).reshape(wide.shape)), squares(wide)


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
        return total + _product(inputs[name].reshape(-1, inputs[name].shape[-1])), None

    width = layer[name].shape[1]
    total, _ = jax.lax.scan(add, jnp.zeros((width, width), jnp.float32), x)
    return total / (x.size // x.shape[-1])


def _product(rows: jax.Array) -> jax.Array:
    """Returns the sum of x x^T, float32 [K, K], over rows [R, K]."""
    # Products of bfloat16 numbers are exact in float32 already; those of float32 need not be.
    exact = rows.dtype == jnp.bfloat16
    return jax.lax.dot_general(
        rows,
        rows,
        (((0,), (0,)), ((), ())),
        precision=jax.lax.Precision.DEFAULT if exact else jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


@functools.partial(
    jax.jit, static_argnames=("name", "kind", "config", "count"), compiler_options=SAME_PROGRAM
)
def _own_moments(
    layer: dict,
    x: jax.Array,
    first: jax.Array,
    *,
    name: str,
    kind: Layer,
    config: ModelConfig,
    count: int,
) -> tuple[jax.Array, jax.Array]:
    """Returns the sums of x x^T, float32 [E', K, K], over the own inputs of E' = `count` experts.

    They are those from `first` on; their numbers of inputs, int32 [E'], are returned, too. The
    layer and its inputs are as in `_moments`: the projections before are quantized, and the router,
    which never is, chooses by them.
    """

    def add(found: tuple, batch: jax.Array) -> tuple[tuple, None]:
        _, inputs = _run(kind, layer, batch, config)
        rows, owners = inputs[name], inputs["owners"]

        def add_tile(tile: jax.Array, sums: jax.Array) -> jax.Array:
            own = owners[tile, 0] - first
            total = jax.lax.dynamic_index_in_dim(sums, own, keepdims=False) + _product(rows[tile])
            return jax.lax.dynamic_update_index_in_dim(sums, total, own, axis=0)

        sums, tokens = found
        # The tiles are in the order of their experts.
        tiles = jnp.searchsorted(owners[:, 0], jnp.stack([first, first + count]))
        sums = jax.lax.fori_loop(tiles[0], tiles[1], add_tile, sums)
        is_own = owners[..., None] == first + jnp.arange(count)
        return (sums, tokens + is_own.sum(axis=(0, 1), dtype=jnp.int32)), None

    width = layer[name].shape[1]
    start = jnp.zeros((count, width, width), jnp.float32), jnp.zeros(count, jnp.int32)
    return jax.lax.scan(add, start, x)[0]


@functools.partial(jax.jit, static_argnames="shared_tokens")
def _mixed(
    sums: jax.Array, tokens: jax.Array, everyone: jax.Array | None, *, shared_tokens: float
) -> jax.Array:
    """Returns the moments [E, K, K] by which experts are quantized, from those of their tokens.

    `everyone` has the moments [K, K] of the tokens of all experts; None where they differ.
    """
    inputs, counts = sums.shape[-1], tokens[:, None, None].astype(jnp.float32)
    if everyone is None:  # Experts of few tokens are rounded instead.
        return jnp.where(counts < inputs, jnp.eye(inputs), sums / jnp.maximum(counts, 1))
    others = shared_tokens * inputs
    return (sums + others * everyone) / (counts + others)


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
