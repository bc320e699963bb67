"""Writes GGUF files (llama.cpp's format), models and adapters: the inverse of `gguf`.

Weights in NVFP4 keep their codes and scales (GGUF's type 40), and the global scale is a tensor of
its own, as llama.cpp's converter writes it. Names, row order and metadata are those of the
converter, conversion/*.py of llama.cpp.
"""

import concurrent.futures
import dataclasses
import math
import pathlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import gguf
import jax
import ml_dtypes
import numpy as np

from qerl_jax.errors import UserError
from qerl_jax.policy.config import ModelConfig, RopeScaling
from qerl_jax.policy.layers.kinds import PACKED, STACKS
from qerl_jax.policy.lora import Lora
from qerl_jax.policy.quant import QuantTensor, dequantize, quantize
from qerl_jax.system.staging import make_readable
from qerl_jax.weights import names
from qerl_jax.weights.gguf import (
    ARCHITECTURES,
    DIVISORS,
    EXPERT_LAYER_NAMES,
    GLOBAL_NAMES,
    LAYER_NAMES,
    QWEN3_5_NAMES,
    ROPE_FREQS,
    ROPE_SCALING,
)
from qerl_jax.weights.tokenizer import Tokenizer, to_gguf

Kind = gguf.GGMLQuantizationType
# What `types_of` takes, by the names of formats.
KINDS = {"nvfp4": Kind.NVFP4, "mxfp4": Kind.MXFP4, "q8_0": Kind.Q8_0, "bf16": Kind.BF16}
_FILE_TYPES = {
    Kind.NVFP4: gguf.LlamaFileType.MOSTLY_NVFP4,
    Kind.MXFP4: gguf.LlamaFileType.MOSTLY_MXFP4_MOE,
    Kind.Q8_0: gguf.LlamaFileType.MOSTLY_Q8_0,
    Kind.BF16: gguf.LlamaFileType.MOSTLY_BF16,
}
_CHUNK_WEIGHTS = 1 << 20  # that a thread encodes at once
# Names of all tensors of a layer by those in a checkpoint.
_OF_LAYER = {hf: ours for ours, hf in {**LAYER_NAMES, **EXPERT_LAYER_NAMES}.items()}
_OF_QWEN3_5 = {hf: ours for ours, hf in QWEN3_5_NAMES.items()}


class _Packed(NamedTuple):
    """A weight in NVFP4, as compressed-tensors stores it."""

    codes: np.ndarray  # uint8 [N, K/2]
    scales: np.ndarray  # float8 [N, K/16]
    divisor: np.ndarray  # float32 [1]


def architecture(config: ModelConfig) -> str:
    """Returns llama.cpp's name of an architecture.

    Raises:
        UserError: llama.cpp has none that computes the same.
    """
    experts, recurrent = config.experts, config.recurrent
    if experts is not None and not experts.normalized:
        raise UserError(
            "llama.cpp makes the weights of the chosen experts add up to 1 (norm_topk_prob), which "
            "this model does not; export with --format=merged"
        )
    if config.model_type == "gpt_oss":
        raise UserError(
            "GGUF files of gpt_oss are read, not written: export with --format=merged, and let "
            "llama.cpp's convert_hf_to_gguf.py make one of that"
        )
    if recurrent is not None and recurrent.key_dim != recurrent.value_dim:
        raise UserError(
            f"llama.cpp has recurrent layers with keys and values of one width, and this model has "
            f"{recurrent.key_dim} and {recurrent.value_dim}; export with --format=merged"
        )
    if config.model_type in ("llama", "mistral"):
        return "llama"
    if config.rope_scaling is not None:
        raise UserError(
            "llama.cpp scales the rotary frequencies of Llama and Mistral alone as Llama 3 does, "
            f"and this is a {config.model_type}; export with --format=merged"
        )
    return next(name for name, kind in ARCHITECTURES.items() if kind == config.model_type)


def types_of(
    config: ModelConfig, *, packed: Kind, dense: Kind, widened: Collection[str] = ()
) -> dict[str, Kind]:
    """Chooses the number format of each tensor of a checkpoint, by its Hugging Face name.

    Vectors, routers and convolutions are in float32, as llama.cpp reads them. A weight whose inputs
    fill no whole blocks of its format has another one: Q8_0 in place of NVFP4, BF16 otherwise.

    Args:
        config: the architecture.
        packed: format of the weights that a format of four bits packs.
        dense: format of the others, such as the embedding.
        widened: modules of weights that are in `dense` as well.
    """
    kinds: dict[str, Kind] = {}
    for layer in range(-1, config.num_layers):
        for array, tensors in names.stored_tensors(config, layer).items():
            wanted = packed if array in PACKED else dense
            kinds |= {t: dense if t.removesuffix(".weight") in widened else wanted for t in tensors}
    for name, shape in names.expected_shapes(config).items():
        part = name.partition(".mlp.")[2]
        wide = part in ("gate.weight", "shared_expert_gate.weight") or ".conv1d." in name
        kinds[name] = (
            Kind.F32 if wide or len(shape) == 1 else _fitting(kinds[name], shape[-1], dense)
        )
    return kinds


def _fitting(kind: Kind, inputs: int, dense: Kind) -> Kind:
    """Returns the first of some formats whose blocks the inputs fill."""
    return next(k for k in (kind, dense, Kind.BF16) if inputs % gguf.GGML_QUANT_SIZES[k][0] == 0)


def fill_gguf(
    path: pathlib.Path,
    tensors: Iterable[tuple[str, np.ndarray]],
    config: ModelConfig,
    tokenizer: Tokenizer,
    kinds: Mapping[str, Kind],
    *,
    name: str,
) -> None:
    """Writes a model into a new file, one tensor after the other as they come.

    Args:
        path: the file.
        tensors: pairs of a name and an array, as `save.checkpoint_tensors` yields them, dense ones
            in float32.
        config: the architecture.
        tokenizer: its tokenizer.
        kinds: the format of each tensor, see `types_of`.
        name: name of the model in the file.

    Raises:
        UserError: llama.cpp has no such architecture or tokenizer.
    """
    writer = gguf.GGUFWriter(path, architecture(config))
    shapes = _shapes(config, kinds)
    packed = [place for place, (_, kind) in shapes.items() if kind == Kind.NVFP4]
    for place in packed:
        shapes[_scale(place)] = shapes[place][0][:-2] or (1,), Kind.F32
    if config.rope_scaling is not None:
        shapes[ROPE_FREQS] = (config.head_dim // 2,), Kind.F32
    _add_metadata(writer, config, name, {kind for _, kind in shapes.values()})
    for key, value in to_gguf(tokenizer, config.vocab_size).items():
        _add(writer, key, value)
    if config.rope_scaling is not None:
        _add(writer, ROPE_SCALING, list(map(float, dataclasses.astuple(config.rope_scaling))))
    count = sum(math.prod(shapes[_scale(place)][0]) for place in packed)
    if packed:
        # The policy quantizes weights alone; a GPU that multiplies numbers of NVFP4 would round
        # activations to 4 bits as well.
        _add(writer, "general.tensor_extra.name", packed)
        _add(writer, "general.tensor_extra.prec_a4", [False] * len(packed))
        _add(writer, DIVISORS, [0.0] * count)  # Last: they are known when all tensors are.
    offsets, end = {}, 0
    for place, (shape, kind) in shapes.items():
        size = gguf.quant_shape_to_byte_shape(shape, kind)
        writer.add_tensor_info(place, size, np.dtype(np.uint8), math.prod(size), kind)
        offsets[place] = end
        end += writer.ggml_pad(math.prod(size), writer.data_alignment)
    metadata_end, start = _write_header(writer, path)
    divisors = {place: np.ones(shapes[_scale(place)][0], np.float32) for place in packed}
    with open(path, "r+b") as file:
        file.truncate(start + end)

        def put(position: int, data: np.ndarray) -> int:
            file.seek(position)
            return position + file.write(np.ascontiguousarray(data).data.cast("B"))

        for tensor, value in _grouped(tensors):
            for place, expert, part in _placed(tensor, value, config):
                kind = shapes[place][1]
                size = math.prod(gguf.quant_shape_to_byte_shape(shapes[place][0][-2:], kind))
                position = start + offsets[place] + expert * size
                if isinstance(part, _Packed):
                    if kind == Kind.NVFP4:
                        divisors[place][expert] = part.divisor[0]
                    else:
                        rows = np.repeat(part.divisor, len(part.codes))
                        weight = QuantTensor(part.codes, part.scales, rows)
                        part = np.asarray(dequantize(weight, np.float32))
                for data in _encoded(part, kind):
                    position = put(position, data)
        for place, values in divisors.items():
            put(start + offsets[_scale(place)], 1 / values)
        if config.rope_scaling is not None:
            put(start + offsets[ROPE_FREQS], rope_factors(config))
        if packed:
            put(metadata_end - 4 * count, np.concatenate(list(divisors.values())))
    make_readable(path)


def fill_gguf_adapter(path: pathlib.Path, lora: Lora, config: ModelConfig, *, name: str) -> None:
    """Writes an adapter alone into a new file, in float32, as convert_lora_to_gguf.py does.

    llama.cpp divides alpha by the rank. That of an adapter with rsLoRA is therefore written times
    the root of the rank, which the converter leaves out.

    Args:
        path: the file.
        lora: the adapter.
        config: the architecture.
        name: name of the adapter in the file.

    Raises:
        UserError: llama.cpp has no such architecture.
    """
    writer = gguf.GGUFWriter(path, architecture(config))
    writer.add_type("adapter")
    writer.add_name(name)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_string("adapter.type", "lora")
    parts = [
        part
        for number, layer in enumerate(lora.layers)
        for name, pair in layer.items()
        for part in _adapter_parts(number, name, pair, config)
    ]
    rank = parts[0][1].shape[-2]
    alpha = lora.scale * rank
    writer.add_float32("adapter.lora.alpha", alpha or 1.0)  # llama.cpp takes 0 for a factor of 1.
    for place, a, b in parts:
        # The file has one alpha, which llama.cpp divides by the rank of each.
        factor = np.float32(b.shape[-1] / rank if alpha else 0)
        writer.add_tensor(f"{place}.lora_a", np.ascontiguousarray(a))
        writer.add_tensor(f"{place}.lora_b", np.ascontiguousarray(b * factor))
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    make_readable(path)


def _adapter_parts(
    number: int, name: str, pair: Mapping[str, jax.Array], config: ModelConfig
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yields names in the file, A and B of an adapter; those of all experts are one tensor."""
    a, b = (np.asarray(jax.device_get(pair[matrix]), np.float32) for matrix in "ab")
    if name in STACKS:
        members = STACKS[name].members
        for member, part in zip(members, np.split(b, len(members), axis=1), strict=True):
            yield _name(f"model.layers.{number}.mlp.experts.0.{member}.weight", config), a, part
        return
    tensor = f"{names.layer_module(number, name)}.weight"
    rows, columns = _orders(tensor, config)
    yield _name(tensor, config), a[:, columns], b[rows]


def rope_factors(config: ModelConfig) -> np.ndarray:
    """Returns the divisors of the rotary frequencies, float32 [H/2], of Llama 3's scaling."""
    scaling = config.rope_scaling
    assert isinstance(scaling, RopeScaling)
    frequencies = config.rope_theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / scaling.factor + smooth)).astype(np.float32)


def _write_header(writer: gguf.GGUFWriter, path: pathlib.Path) -> tuple[int, int]:
    """Writes all but the tensors; returns where the metadata end, and where tensors begin."""
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    assert writer.fout is not None
    metadata_end = writer.fout[0].tell()
    writer.write_ti_data_to_file()
    start = writer.ggml_pad(writer.fout[0].tell(), writer.data_alignment)
    writer.close()
    return metadata_end, start


def _add_metadata(
    writer: gguf.GGUFWriter, config: ModelConfig, name: str, kinds: Collection[Kind]
) -> None:
    """Adds what is not the tokenizer's: the architecture, as the converter writes it."""
    writer.add_type("model")
    writer.add_name(name)
    writer.add_file_type(next(value for kind, value in _FILE_TYPES.items() if kind in kinds))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    values: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": config.max_position,
        "embedding_length": config.embed_dim,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.freq_base": float(config.rope_theta),
    }
    if writer.arch == "llama":
        values |= {"vocab_size": config.vocab_size, "rope.dimension_count": config.head_dim}
    if experts := config.experts:
        values |= {
            "expert_count": experts.count,
            "expert_used_count": experts.top_k,
            "expert_feed_forward_length": experts.width,
        }
        if experts.shared_width:
            values["expert_shared_feed_forward_length"] = experts.shared_width
    else:
        values["feed_forward_length"] = config.mlp_dim
    if recurrent := config.recurrent:
        # Positions of a text are equal in all three sections of the rotary frequencies.
        half = config.rotary_dim // 2
        is_recurrent = [layer in config.recurrent_layers for layer in range(config.num_layers)]
        values |= {
            "ssm.conv_kernel": recurrent.window,
            "ssm.state_size": recurrent.key_dim,
            "ssm.group_count": recurrent.key_heads,
            "ssm.time_step_rank": recurrent.value_heads,
            "ssm.inner_size": recurrent.values,
            "attention.recurrent_layers": is_recurrent,
            "rope.dimension_count": config.rotary_dim,
            "rope.dimension_sections": [(half + 2) // 3, (half + 1) // 3, half // 3, 0],
        }
    for key, value in values.items():
        _add(writer, f"{writer.arch}.{key}", value)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif type(value) is int:
        writer.add_uint32(key, value)
    else:
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))


def _shapes(
    config: ModelConfig, kinds: Mapping[str, Kind]
) -> dict[str, tuple[tuple[int, ...], Kind]]:
    """Returns the shape, outputs first, and the format of each tensor of the file by its name."""
    shapes: dict[str, tuple[tuple[int, ...], Kind]] = {}
    for tensor, shape in names.expected_shapes(config).items():
        place = _name(tensor, config)
        if ".mlp.experts." in tensor:
            assert config.experts is not None
            shape = (config.experts.count, *shape)
        elif ".conv1d." in tensor:
            shape = shape[0], shape[2]
        shapes[place] = shape, kinds[tensor]
    return shapes


def _scale(place: str) -> str:
    """The name of the tensor with the global scale of a weight."""
    return f"{place.removesuffix('.weight')}.scale"


def _name(tensor: str, config: ModelConfig) -> str:
    """Returns the name in the file of a tensor of a checkpoint."""
    if tensor in GLOBAL_NAMES.values():
        return next(ours for ours, hf in GLOBAL_NAMES.items() if hf == tensor)
    _, _, layer, rest = tensor.split(".", 3)
    if config.recurrent is not None and rest in _OF_QWEN3_5:
        return f"blk.{layer}.{_OF_QWEN3_5[rest]}"
    module, _, parameter = rest.rpartition(".")
    block, _, projection = module.rpartition(".")
    if block.startswith("mlp.experts"):
        return f"blk.{layer}.{_OF_LAYER[projection]}_exps.{parameter}"
    return f"blk.{layer}.{_OF_LAYER.get(module) or _OF_LAYER[projection]}.{parameter}"


def _grouped(
    tensors: Iterable[tuple[str, np.ndarray]],
) -> Iterator[tuple[str, np.ndarray | _Packed]]:
    """Yields the tensors with the three of a packed weight as one, which follow one another."""
    pending = []
    for name, value in tensors:
        if name.endswith(("_packed", "weight_scale", "weight_global_scale")):
            pending.append(value)
            if len(pending) == len(_Packed._fields):
                yield name.removesuffix("_global_scale"), _Packed(*pending)
                pending = []
        else:
            yield name, value


def _placed(
    tensor: str, value: np.ndarray | _Packed, config: ModelConfig
) -> Iterator[tuple[str, int, np.ndarray | _Packed]]:
    """Yields where the parts of a tensor go: names in the file, experts, and values as they are."""
    path, _, last = tensor.removesuffix(".weight").rpartition(".")
    if isinstance(value, np.ndarray) and path.endswith(".experts"):  # of all experts
        members = next(s.members for s in STACKS.values() if s.tensor.endswith(f".{last}"))
        for expert, own in enumerate(value):
            for member, part in zip(members, np.split(own, len(members)), strict=True):
                yield _name(f"{path}.{expert}.{member}.weight", config), expert, part
        return
    expert = int(path.rpartition(".")[2]) if ".mlp.experts." in tensor else 0
    yield _name(tensor, config), expert, _in_file_order(tensor, value, config)


def _in_file_order(
    tensor: str, value: np.ndarray | _Packed, config: ModelConfig
) -> np.ndarray | _Packed:
    """Returns the values of a tensor as llama.cpp has them: what `GgufFile.read` undoes."""
    rows, columns = _orders(tensor, config)
    if isinstance(value, _Packed):
        return _Packed(value.codes[rows], value.scales[rows], value.divisor)
    value = value[rows] if value.ndim == 1 else value[rows][:, columns]
    if tensor.endswith(".A_log"):
        return -np.exp(value.astype(np.float32))
    module = tensor.removesuffix(".weight").rpartition(".")[2]
    if "linear_attn" not in tensor and (offset := names.centered_at(config, module)):
        return value.astype(np.float32) + np.float32(offset)
    return value.squeeze(1) if ".conv1d." in tensor else value


def _orders(tensor: str, config: ModelConfig) -> tuple[Any, Any]:
    """Returns which rows, and which columns, of a tensor of a checkpoint come one after another.

    llama.cpp puts row i of a head of Llama's queries and keys next to row i + H/2. Of the value
    heads of Qwen3.5's recurrent layers, the first ones of all key heads come first.
    """
    whole, part = slice(None), tensor.rpartition("linear_attn.")[2].removesuffix(".weight")
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(
        part.rpartition("self_attn.")[2]
    )
    if heads and architecture(config) == "llama":
        rows = np.arange(heads * config.head_dim).reshape(heads, 2, -1)
        return rows.swapaxes(1, 2).reshape(-1), whole
    shapes = config.recurrent
    if shapes is None or "linear_attn." not in tensor or part == "norm":
        return whole, whole
    width = 1 if part in ("in_proj_a", "in_proj_b", "A_log", "dt_bias") else shapes.value_dim
    values = np.arange(shapes.value_heads * width).reshape(shapes.key_heads, -1, width)
    values = values.swapaxes(0, 1).reshape(-1)
    if part == "out_proj":
        return whole, values
    if part in ("in_proj_qkv", "conv1d"):
        first = shapes.channels - shapes.values
        values = np.concatenate([np.arange(first), first + values])
    return values, whole


def _encoded(value: np.ndarray | _Packed, kind: Kind) -> Iterator[np.ndarray]:
    """Yields the bytes of a tensor, a few rows at a time, which several threads encode."""
    if isinstance(value, _Packed):
        scales = value.scales.view(np.uint8)
        yield _blocks(value.codes, scales.reshape(len(scales), -1, 4), 16)
        return
    step = max(1, _CHUNK_WEIGHTS * len(value) // max(1, value.size))

    def encode(row: int) -> np.ndarray:
        rows = np.asarray(value[row : row + step], np.float32)
        if kind == Kind.F32:
            return rows
        if kind == Kind.BF16:
            return rows.astype(ml_dtypes.bfloat16).view(np.uint16)
        if kind == Kind.MXFP4:
            weight = quantize([rows], format="mxfp4")
            return _blocks(weight.packed, weight.scales.view(np.uint8)[..., None], 32)
        return gguf.quants.Q8_0.quantize_rows(rows)

    with concurrent.futures.ThreadPoolExecutor() as threads:
        yield from threads.map(encode, range(0, len(value), step))


def _blocks(packed: np.ndarray, scales: np.ndarray, block: int) -> np.ndarray:
    """Returns blocks of scales and codes: byte j of a block of 2n codes has the codes j and j + n.

    Args:
        packed: uint8 [N, K/2], two codes in each byte, the first one in the low half.
        scales: uint8 [N, K/(n block), n], those of n blocks of codes come before them.
        block: codes that have one scale.
    """
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1, block)
    halves = codes[..., : block // 2] | codes[..., block // 2 :] << 4
    halves = halves.reshape(*scales.shape[:2], -1)
    return np.concatenate([scales, halves], axis=-1)
