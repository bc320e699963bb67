"""Sources opened for reading: their tensors are checked, and none of them has been read."""

import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from pallas_kernels.fp4_matmul import FORMATS
from qerl_jax.errors import UserError
from qerl_jax.policy.config import NESTED_TYPES, ModelConfig, from_hf_config
from qerl_jax.policy.layers.kinds import PACKED, stack_shapes
from qerl_jax.system import json_file
from qerl_jax.weights import gguf, names, packed, safetensors, tokenizer
from qerl_jax.weights.model_source import locate
from qerl_jax.weights.tokenizer import Tokenizer

# Tensors that some checkpoints store and that the policy does not use.
_IGNORED = (".rotary_emb.inv_freq", *packed.UNUSED)
_CHUNK_ROWS = 4096  # rows of the head that are compared at once


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A source opened for reading: its tensors fit the architecture, and none has been read yet."""

    path: pathlib.Path  # the folder or .gguf file
    source: str  # the name that exports write as base_model_name_or_path
    config: ModelConfig
    tokenizer: Tokenizer | None  # of the model; None for a folder without one
    # Memory-mapped tensors as the file stores them, by Hugging Face name; packed projections have
    # the names of compressed-tensors.
    tensors: Mapping[str, np.ndarray]
    # By the same names; a GGUF file stores blocks of bytes, whose own shape differs.
    shapes: Mapping[str, tuple[int, ...]]
    packed: frozenset[str]  # names of the modules that are stored in `packed_form`
    # Returns by name the tensors of such a module as compressed-tensors stores them.
    unpack: Callable[[str], Mapping[str, np.ndarray]]
    # `read(name, dtype)` returns a dense tensor in memory.
    read: Callable[[str, np.dtype], np.ndarray]
    # `chunks(name, dtype, memory)` yields a dense tensor by rows; `memory` returns memory of a
    # number of bytes, which a chunk may hold until the next one is requested.
    chunks: Callable[[str, np.dtype, Callable[[int], np.ndarray]], Iterator[np.ndarray]]
    packed_form: str = "nvfp4"  # or 'mxfp4'
    ignored: Sequence[str] = ()  # what else the source holds, such as 'the vision tower'


def open_checkpoint(source: str) -> Checkpoint:
    """Opens a source, as in `load.load`, and checks that its tensors fit its architecture.

    Raises:
        UserError: the source cannot be found or read, is incomplete or is not supported.
    """
    path, base_model = locate(source)
    open_source = _open_gguf if path.suffix == ".gguf" else _open_folder
    checkpoint = open_source(path, base_model)
    _check_tensors(checkpoint)
    return checkpoint


def read_architecture(source: str) -> ModelConfig:
    """Reads only the architecture of a source, as in `load.load`; of a hub id only the small files.

    Raises:
        UserError: the source cannot be found or read, or is not supported.
    """
    path, _ = locate(source, weights=False)
    return gguf.open_gguf(path).config if path.suffix == ".gguf" else _read_config(path)[1]


def _open_gguf(path: pathlib.Path, source: str) -> Checkpoint:
    file = gguf.open_gguf(path)
    modules = file.packed_modules()
    tensors = {name: tensor.data for name, tensor in file.tensors.items()}
    shapes = {name: file.shape(name) for name in tensors}
    for module in modules:
        data, (outputs, inputs) = tensors.pop(f"{module}.weight"), shapes.pop(f"{module}.weight")
        parts = data, data[:0], data[:0]  # whose bytes are those of the file
        block = FORMATS[file.packed_form].block
        sizes = (outputs, inputs // 2), (outputs, inputs // block), (1,)
        own = packed.tensors_of(module, file.packed_form)
        tensors |= dict(zip(own, parts, strict=False))
        shapes |= dict(zip(own, sizes, strict=False))
    return Checkpoint(
        path=path,
        source=source,
        config=file.config,
        tokenizer=tokenizer.from_gguf(file.metadata),
        tensors=tensors,
        shapes=shapes,
        packed=modules,
        unpack=file.unpack,
        read=file.read,
        chunks=lambda name, dtype, memory: iter([file.read(name, dtype)]),
        packed_form=file.packed_form,
        ignored=file.ignored,
    )


def _open_folder(path: pathlib.Path, source: str) -> Checkpoint:
    hf, config = _read_config(path)
    layout = packed.layout(path, hf, mxfp4=not config.packs_projections)
    form = "mxfp4" if layout == packed.MXFP4 else "nvfp4"
    tensors, ignored = safetensors.read_folder(path), []
    if config.model_type in NESTED_TYPES:
        tensors, ignored = names.text_tensors(tensors)
    tensors = names.expert_tensors(config, tensors)
    if layout == packed.MODELOPT:
        tensors = packed.from_modelopt(path, tensors)
    modules = frozenset() if layout is None else packed.packed_modules(tensors)
    if layout is not None and not modules:
        raise UserError(f"{path}: config.json says that weights are in {form.upper()}, but none is")

    def dense(name: str) -> np.ndarray:
        if tensors[name].dtype not in (ml_dtypes.bfloat16, np.float16, np.float32):
            raise UserError(f"{path}: '{name}' is {tensors[name].dtype}, must be bf16, f16 or f32")
        return tensors[name]

    def chunks(
        name: str, dtype: np.dtype, memory: Callable[[int], np.ndarray]
    ) -> Iterator[np.ndarray]:
        for rows in safetensors.row_chunks(dense(name), memory):
            yield rows.astype(dtype, copy=False)

    has_tokenizer = any((path / file).exists() for file in ("tokenizer.json", "vocab.json"))
    return Checkpoint(
        path=path,
        source=source,
        config=config,
        tokenizer=tokenizer.from_folder(path) if has_tokenizer else None,
        tensors=tensors,
        shapes={name: tensor.shape for name, tensor in tensors.items()},
        packed=modules,
        unpack=lambda module: {name: tensors[name] for name in packed.tensors_of(module, form)},
        read=lambda name, dtype: np.array(dense(name), dtype),
        chunks=chunks,
        packed_form=form,
        ignored=ignored,
    )


def _read_config(path: pathlib.Path) -> tuple[dict[str, Any], ModelConfig]:
    """The config.json of a folder, and its architecture."""
    if (path / "adapter_config.json").exists() and not (path / "config.json").exists():
        raise _not_a_model(path, "an adapter", "lora.init")
    hf = json_file.read_object(
        path / "config.json",
        remedy="pass a model folder that transformers saved, a .gguf file or a hub id",
    )
    if "schedule_steps" in hf:
        raise _not_a_model(path, "a run", "init_from")
    try:
        return hf, from_hf_config(hf)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _not_a_model(path: pathlib.Path, what: str, field: str) -> UserError:
    return UserError(
        f"{path} is {what}, not a model: name its base, and begin from it by --config.{field}, or "
        "learn from it by --config.teacher.adapter; an export in the format merged is one model"
    )


def _check_tensors(checkpoint: Checkpoint) -> None:
    """Checks the stored tensors against the architecture before any tensor is read."""
    path, config, shapes = checkpoint.path, checkpoint.config, checkpoint.shapes
    experts = max((count for count, _, _ in stack_shapes(config, 0).values()), default=1)
    if config.num_layers * experts > len(shapes):  # Before all of their names are made.
        raise UserError(
            f"{path}: the config asks for {config.num_layers} layers"
            + (f" of {experts} experts" if experts > 1 else "")
            + f", the checkpoint holds only {len(shapes)} tensors"
        )
    _check_packed(checkpoint)
    expected = names.expected_shapes(config, packed=checkpoint.packed, form=checkpoint.packed_form)
    missing = expected.keys() - shapes.keys()
    surplus = shapes.keys() - expected.keys() - {names.HEAD}
    surplus = {name for name in surplus if not name.endswith(_IGNORED)}
    if missing:
        lacks = f"{path}: the checkpoint lacks {_format_names(missing)}"
        if surplus:
            other = min(surplus)
            lacks += f", and the config does not have its '{other}' of the shape {shapes[other]}"
        raise UserError(lacks)
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise UserError(
                f"{path}: '{name}' has the shape {shapes[name]}, the config asks for {shape}"
            )
    if config.tie_embeddings and names.HEAD in shapes:
        _check_tied_head(checkpoint)
    if surplus:
        raise UserError(
            f"{path}: the checkpoint holds tensors that a "
            f"{config.model_type} of this config does not have: {_format_names(surplus)}"
        )
    if checkpoint.tokenizer is not None and checkpoint.tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"{path}: the tokenizer has {checkpoint.tokenizer.vocab_size} ids, the "
            f"embedding only {config.vocab_size} rows"
        )


def _check_tied_head(checkpoint: Checkpoint) -> None:
    """Checks that a stored head equals the embedding where the two are tied."""
    pair = [checkpoint.tensors[name] for name in (names.HEAD, names.EMBED)]
    for row in range(0, max(map(len, pair)), _CHUNK_ROWS):
        head, embed = (t[row : row + _CHUNK_ROWS].astype(np.float32) for t in pair)
        if not np.array_equal(head, embed):
            raise UserError(
                f"{checkpoint.path}: '{names.HEAD}' differs from '{names.EMBED}' under "
                "tie_word_embeddings=true; set it to false in config.json, or remove the tensor"
            )


def _check_packed(checkpoint: Checkpoint) -> None:
    """Checks that every fused group of layer projections is packed as a whole or not at all."""
    modules, form = set(checkpoint.packed), checkpoint.packed_form.upper()
    for layer in range(checkpoint.config.num_layers):
        arrays = names.stored_tensors(checkpoint.config, layer)
        for array in (array for array in PACKED if array in arrays):
            group = {tensor.removesuffix(".weight") for tensor in arrays[array]}
            if modules & group and not group <= modules:
                raise UserError(
                    f"{checkpoint.path}: {_format_names(modules & group)} is in {form} but "
                    f"{_format_names(group - modules)} is not; the policy stores them as one "
                    f"weight, so all must be in {form}"
                )
            modules -= group
    if modules:
        raise UserError(
            f"{checkpoint.path}: {_format_names(modules)} is in {form}, which is supported only "
            "for the projections of attention, MLP and experts: quantize the model again without it"
        )


def _format_names(tensor_names: set[str]) -> str:
    first = ", ".join(f"{name!r:.200}" for name in sorted(tensor_names)[:3])
    return first if len(tensor_names) <= 3 else f"{first} and {len(tensor_names) - 3} more"
