"""Checkpoints out: writes folders in Hugging Face's layout, which transformers and vLLM read.

A checkpoint is a folder of safetensors files and their companions: config.json, the tokenizer and
the generation config. Tensors go from the parameter tree to the file one layer at a time.
"""

import itertools
import json
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from qerl_jax.errors import UserError
from qerl_jax.policy.config import ModelConfig, text_config_json, to_hf_config
from qerl_jax.policy.layers.kinds import STACKS, fused_of, projection_shapes, stack_shapes
from qerl_jax.policy.quant import QuantTensor, checkpoint_order, dequantize
from qerl_jax.system import json_file
from qerl_jax.system.safe_files import read_bytes
from qerl_jax.system.staging import make_readable, staged_folder
from qerl_jax.weights import names
from qerl_jax.weights import tokenizer as tokenizer_lib
from qerl_jax.weights.checkpoint import Checkpoint
from qerl_jax.weights.load import DTYPES, LoadedModel
from qerl_jax.weights.safetensors import INDEX_FILE, SINGLE_FILE

SHARD_BYTES = 5_000_000_000
# The entry that llm-compressor writes into config.json for its scheme NVFP4A16: 4-bit weights in
# blocks of 16, activations not quantized.
QUANTIZATION_CONFIG: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "format": "nvfp4-pack-quantized",
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": 16,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "tensor_group",
                "symmetric": True,
                "type": "float",
            },
        }
    },
    "format": "nvfp4-pack-quantized",
    "global_compression_ratio": None,
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
# That of gpt-oss as it is published, with experts in MXFP4.
MXFP4_CONFIG: dict[str, Any] = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}
# Greedy decoding; a program that samples has the distribution of the policy itself.
_SAMPLING = {"do_sample": False, "temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0}
# Files that are copied from the folder from which a model was loaded.
_COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
)


def write_checkpoint(
    folder: pathlib.Path | str,
    tensors: Iterable[tuple[str, np.ndarray]],
    *,
    files: Mapping[str, bytes],
    max_shard_bytes: int = SHARD_BYTES,
    replace: bool = False,
) -> None:
    """Writes a checkpoint folder; it appears complete or not at all.

    The tensors are taken one by one; at most the tensors of one shard are in memory.

    Args:
        folder: target path; must not exist or be an empty folder, unless `replace` is set.
        tensors: pairs of a name and an array, each name once.
        files: contents of the companions by file name.
        max_shard_bytes: largest number of tensor bytes in one file. A single file is called
            model.safetensors; several are called model-00001-of-0000N.safetensors and so on, and
            have an index.
        replace: whether to replace an existing folder.

    Raises:
        UserError: the folder exists or cannot be written, for example because the disk is full.
    """
    with staged_folder(folder, replace=replace) as new_folder:
        fill_checkpoint(new_folder, tensors, files=files, max_shard_bytes=max_shard_bytes)


def fill_checkpoint(
    folder: pathlib.Path,
    tensors: Iterable[tuple[str, np.ndarray]],
    *,
    files: Mapping[str, bytes],
    max_shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes the files of a checkpoint into an empty folder.

    Args:
        folder: existing empty folder.
        tensors: pairs of a name and an array, as in `write_checkpoint`.
        files: contents of the companions by file name.
        max_shard_bytes: largest number of tensor bytes in one file, as in `write_checkpoint`.
    """
    shards: list[list[str]] = []
    pending: dict[str, np.ndarray] = {}
    pending_bytes = total_bytes = 0
    for name, tensor in tensors:
        if pending and pending_bytes + tensor.nbytes > max_shard_bytes:
            shards.append(_write_shard(folder / str(len(shards)), pending))
            pending, pending_bytes = {}, 0
        pending[name] = np.asarray(tensor, order="C")
        pending_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    shards.append(_write_shard(folder / str(len(shards)), pending))
    _name_shards(folder, shards, total_bytes)
    write_files(folder, files)


def write_files(folder: pathlib.Path, files: Mapping[str, bytes]) -> None:
    """Writes the companions of a checkpoint or an adapter into a folder, and folders in it."""
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def checkpoint_tensors(
    params: Mapping[str, Any],
    model_config: ModelConfig,
    *,
    dtype: str = "bfloat16",
    norms: str = "",
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors of a checkpoint under Hugging Face's names, fused projections split.

    NVFP4 projections keep their bytes and get the names of compressed-tensors: weight_packed
    [N, K/2], weight_scale [N, K/16] and weight_global_scale [1]. Projections packed in another
    format are dequantized. Packed experts have these tensors for each of their projections; dense
    ones are stored as the family publishes them, see `names.stacks_experts`, and so are those of
    gpt-oss in MXFP4, with the same bytes. A tied head is left out.

    Args:
        params: the parameter tree, on the device or in NumPy; `layers` may be an iterator, which
            is consumed layer by layer.
        model_config: the architecture.
        dtype: 'bfloat16' or 'float32', the dtype of every tensor that is not packed.
        norms: dtype of the norms; '' is that of the others. The policy has them in float32.

    Yields:
        Pairs of a name and a NumPy array.
    """
    weight_dtype, norm_dtype = DTYPES[dtype], DTYPES[norms or dtype]
    yield names.EMBED, _dense(params["embed_tokens"], weight_dtype)
    for number, layer in enumerate(params["layers"]):
        yield from _layer_tensors(number, layer, model_config, weight_dtype, norm_dtype)
    yield names.NORM, _dense(_stored(params["norm"], "norm", model_config), norm_dtype)
    if not model_config.tie_embeddings:
        yield names.HEAD, _dense(params["lm_head"], weight_dtype)


def companion_files(
    model: LoadedModel | Checkpoint,
    *,
    packed: bool,
    ignore: Sequence[str] = (),
    dtype: str = "bfloat16",
    trained: bool = False,
    blocks: bool = False,
) -> dict[str, bytes]:
    """Returns the companions of a checkpoint: config.json, generation_config.json, the tokenizer.

    The files of a model folder are copied as they are; only the number format in config.json is
    adapted, of a trained policy the sampling, and of a model with a vision tower the text model
    alone is described. A folder without a tokenizer is exported without
    one. For a GGUF file all companions are generated.

    Args:
        model: the model that is exported.
        packed: whether the projections are exported in NVFP4.
        ignore: paths of the modules of projections that stay dense; those that no format packs
            always do.
        dtype: 'bfloat16' or 'float32', the dtype of every tensor that is not packed.
        trained: whether the policy was trained. Its scores are greedy, with the stop tokens of the
            tokenizer, and the policy is not what the base's repetition penalty makes of it.
        blocks: whether the experts of gpt-oss are exported in MXFP4.

    Returns:
        Contents by file name.
    """
    ignore = [*dict.fromkeys([*names.dense_modules(model.config), *ignore])]
    if trained:
        assert model.tokenizer is not None, "a policy has a tokenizer"
        sampling = json.dumps(tokenizer_lib.token_ids(model.tokenizer) | _SAMPLING, indent=2)
        options = {"packed": packed, "dtype": dtype, "blocks": blocks}
        files = companion_files(model, ignore=ignore, **options)
        return files | {"generation_config.json": f"{sampling}\n".encode()}
    if not model.path.is_dir():
        assert model.tokenizer is not None, "only a folder can lack a tokenizer"
        return tokenizer_lib.to_files(model.tokenizer) | {
            "config.json": _config_json(
                to_hf_config(model.config) | tokenizer_lib.token_ids(model.tokenizer),
                _quantization(packed=packed, ignore=ignore, blocks=blocks),
                dtype=dtype,
            )
        }
    content = _read_companion(model.path, "config.json")
    whole = json_file.parse_object(model.path / "config.json", content)
    hf = text_config_json(whole)
    companions = [name for name in _COMPANIONS if (model.path / name).exists()]
    templates = (model.path / tokenizer_lib.TEMPLATES).glob("*.jinja")
    companions += [f"{tokenizer_lib.TEMPLATES}/{path.name}" for path in sorted(templates)]
    return {name: _read_companion(model.path, name) for name in companions} | {
        "config.json": content
        if hf is whole and _matches_format(hf, packed=packed, dtype=dtype, blocks=blocks)
        else _config_json(
            hf, _quantization(packed=packed, ignore=ignore, blocks=blocks), dtype=dtype
        )
    }


def is_nested(path: pathlib.Path) -> bool:
    """Whether a model folder, or file, holds a text model and a vision tower."""
    if not path.is_dir():
        return False
    hf = json_file.read_object(path / "config.json", remedy="pass a model folder")
    return text_config_json(hf) is not hf


def _read_companion(folder: pathlib.Path, name: str) -> bytes:
    """Reads a file that is copied: a link in a foreign folder could name a secret of the user."""
    path, home = folder / name, folder.resolve()
    # The hub's cache holds a model as folders of links to the files of all its revisions.
    homes = [home, *([home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [])]
    if not any(path.resolve().is_relative_to(parent) for parent in homes):
        raise UserError(
            f"{path} is a symbolic link to a file outside of its folder, which is not copied; put "
            "the file itself there"
        )
    return read_bytes(path)


def _write_shard(path: pathlib.Path, tensors: dict[str, np.ndarray]) -> list[str]:
    """Writes one file and returns the names of its tensors."""
    save_file(tensors, path, metadata={"format": "pt"})
    make_readable(path)
    return list(tensors)


def _name_shards(folder: pathlib.Path, shards: list[list[str]], total_bytes: int) -> None:
    """Gives the files their final names, which hold the number of files, and writes the index."""
    if len(shards) == 1:
        (folder / "0").rename(folder / SINGLE_FILE)
        return
    weight_map = {}
    for number, tensor_names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / str(number)).rename(folder / file)
        weight_map |= dict.fromkeys(tensor_names, file)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _layer_tensors(
    number: int,
    layer: Mapping[str, Any],
    model_config: ModelConfig,
    dtype: np.dtype,
    of_norms: np.dtype,
) -> Iterator[tuple[str, np.ndarray]]:
    shapes = projection_shapes(model_config)
    layer = jax.device_get(layer)
    others = _other_tensors(number, layer, model_config, dtype, of_norms)
    for fused, members in fused_of(model_config, number).items():
        modules = {names.layer_module(number, member): shapes[member][0] for member in members}
        for module, part in _parts(layer[fused], modules):
            yield from _module_tensors(module, part, dtype)
            if (bias := f"{module}.bias") in others:
                yield bias, others.pop(bias)
    for stack, expert_modules in names.expert_modules(model_config, number).items():
        weight, shape = layer[stack], stack_shapes(model_config, number)[stack]
        if names.interleaves(model_config):
            sizes = shape[0], len(STACKS[stack].members), shape[1], shape[2]
            yield from _interleaved_experts(
                names.stacked_tensor(number, stack), weight, sizes, dtype
            )
            continue
        is_packed = isinstance(weight, QuantTensor) and weight.format == "nvfp4"
        if is_packed or not names.stacks_experts(model_config):
            rows = shape[0] * shape[1] // len(expert_modules)
            for module, part in _parts(weight, dict.fromkeys(expert_modules, rows)):
                yield from _module_tensors(module, part, dtype)
        else:
            # One expert after the other, as float32 has twice the bytes of the tensor.
            experts = _parts(weight, dict.fromkeys(range(shape[0]), shape[1]))
            dense = [next(_module_tensors("", part, dtype))[1] for _, part in experts]
            yield names.stacked_tensor(number, stack), np.stack(dense)
    for norm in names.LAYER_NORMS:
        stored = _stored(layer[norm], norm, model_config)
        yield f"{names.layer_module(number, norm)}.weight", _dense(stored, of_norms)
    yield from others.items()


def _interleaved_experts(
    name: str, weight: Any, sizes: tuple[int, int, int, int], dtype: np.dtype
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors of a stack [E N, K] of gpt-oss, which keeps the bytes of MXFP4.

    The sizes are E, the number of members, N and K.
    """
    experts, members, rows, columns = sizes
    if isinstance(weight, QuantTensor) and weight.format == "mxfp4":
        stored = jax.device_get(checkpoint_order(weight))
        parts = stored.packed, stored.scales.view(np.uint8)
        codes, scales = (
            names.interleaved(x.reshape(experts, members, -1, x.shape[1])) for x in parts
        )
        yield f"{name}_blocks", codes.reshape(*scales.shape, 16)
        yield f"{name}_scales", scales
        return
    # One expert after the other, as float32 has twice the bytes of the tensor.
    dense = [
        next(_module_tensors("", part, dtype))[1].reshape(1, members, -1, columns)
        for _, part in _parts(weight, dict.fromkeys(range(experts), rows))
    ]
    yield name, np.stack([names.interleaved(expert)[0].T for expert in dense])


def _parts(weight: Any, rows: Mapping[Any, int]) -> Iterator[tuple[Any, Any]]:
    """Yields the parts of a weight, in the order of its rows, by the name of each."""
    if isinstance(weight, QuantTensor):
        weight = jax.device_get(checkpoint_order(weight))
    end = 0
    for name, count in rows.items():
        own = slice(end, end := end + count)
        yield name, jax.tree.map(lambda array, own=own: array[own], weight)


def _module_tensors(module: str, weight: Any, dtype: np.dtype) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors of one projection, which keeps the bytes of NVFP4."""
    if isinstance(weight, QuantTensor) and weight.format == "nvfp4":
        yield f"{module}.weight_packed", weight.packed
        yield f"{module}.weight_scale", weight.scales
        yield f"{module}.weight_global_scale", weight.global_scale[:1]
    else:
        if isinstance(weight, QuantTensor):
            weight = dequantize(weight, jnp.float32)
        yield f"{module}.weight", _dense(weight, dtype)


def _other_tensors(
    number: int,
    layer: Mapping[str, Any],
    model_config: ModelConfig,
    dtype: np.dtype,
    of_norms: np.dtype,
) -> dict[str, np.ndarray]:
    """Returns the tensors of a layer's parts that are no projections, by name."""
    found = {}
    for array, tensors in names.other_tensors(model_config, number).items():
        value, own_dtype = layer[array], dtype
        if names.may_be_centered(array):
            value, own_dtype = _stored(value, array, model_config), of_norms
        elif names.is_wide(array) and not _fits(value, dtype):
            # Gates that a file stored in float32 stay so, which transformers and vLLM read as well.
            own_dtype = np.dtype(np.float32)
        if names.interleaves(model_config) and np.ndim(value) == 3:
            value = names.interleaved(np.asarray(value))
        ends = list(itertools.accumulate(shape[0] for shape in tensors.values()))
        parts = np.split(_dense(value, own_dtype), ends[:-1])
        found |= dict(zip(tensors, parts, strict=True))
    return found


def _fits(value: Any, dtype: np.dtype) -> bool:
    """Whether a dtype holds the values of a float32 array as they are."""
    values = np.asarray(jax.device_get(value))
    return np.array_equal(values.astype(dtype).astype(values.dtype), values)


def _stored(value: Any, array: str, model_config: ModelConfig) -> Any:
    """Returns a norm as checkpoints store it: less 1 where the architecture has it so."""
    center = np.float32(names.centered_at(model_config, array))
    return np.asarray(jax.device_get(value), np.float32) - center if center else value


def _dense(value: Any, dtype: np.dtype) -> np.ndarray:
    return np.asarray(jax.device_get(value)).astype(dtype, copy=False)


def _matches_format(hf: Mapping[str, Any], *, packed: bool, dtype: str, blocks: bool) -> bool:
    """Tells whether a config.json already describes what is exported."""
    stored_dtype = hf.get("dtype", hf.get("torch_dtype"))
    quantization = hf.get("quantization_config")
    if blocks:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        return method == "mxfp4" and stored_dtype in (None, dtype)
    if not packed:
        return quantization is None and stored_dtype == dtype
    # A config that asks for quantized activations does not describe an export: only weights are
    # quantized.
    return stored_dtype == dtype and _quantizes_only_weights(quantization)


def _quantizes_only_weights(quantization: Any) -> bool:
    try:
        groups = quantization["config_groups"].values()
        return (
            quantization["quant_method"] == QUANTIZATION_CONFIG["quant_method"]
            and quantization["format"] == QUANTIZATION_CONFIG["format"]
            and all(group.get("input_activations") is None for group in groups)
        )
    except (AttributeError, KeyError, TypeError):
        return False


def _quantization(*, packed: bool, ignore: Sequence[str], blocks: bool) -> Mapping[str, Any] | None:
    """Returns the quantization_config of an export, or None for a dense one."""
    if blocks:
        return MXFP4_CONFIG
    ignored = [*QUANTIZATION_CONFIG["ignore"], *ignore]
    return QUANTIZATION_CONFIG | {"ignore": ignored} if packed else None


def _config_json(
    hf: Mapping[str, Any], quantization: Mapping[str, Any] | None, *, dtype: str
) -> bytes:
    # transformers 5 renamed torch_dtype to dtype, and reads both.
    key = "dtype" if "dtype" in hf else "torch_dtype"
    fields = {**hf, key: dtype}
    fields.pop("quantization_config", None)
    if quantization is not None:
        fields["quantization_config"] = quantization
    return (json.dumps(fields, indent=2) + "\n").encode()
