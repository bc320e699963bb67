"""Reads GGUF files (llama.cpp's format) as Hugging Face tensors.

GGUF renames the tensors, stores quantized blocks, interleaves the rows of Llama's q and k
projections for its own rotary convention, and has its own order of the value heads of Qwen3.5's
recurrent layers. This module returns tensors that are dequantized, under Hugging Face names and in
Hugging Face row order.
"""

import dataclasses
import functools
import math
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import gguf
import ml_dtypes
import numpy as np

from qerl_jax.errors import UserError
from qerl_jax.policy.config import (
    ExpertsConfig,
    ModelConfig,
    RecurrentConfig,
    RopeScaling,
    YarnScaling,
)
from qerl_jax.policy.layers.attention import rotary_frequencies
from qerl_jax.policy.layers.kinds import PACKED
from qerl_jax.weights import names
from qerl_jax.weights.gguf_header import GgufTensor, read_header

# Model types by the names of their architectures.
ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "qwen35": "qwen3_5",
    "qwen35moe": "qwen3_5_moe",
    "gpt-oss": "gpt_oss",
}
ROPE_FREQS = "rope_freqs.weight"
# The divisors of the weights in NVFP4, in the order of general.tensor_extra.name, in files that
# this project wrote: a scale that multiplies, which llama.cpp has, is not exactly their inverse.
DIVISORS = "qerl.nvfp4_divisors"
ROPE_SCALING = "qerl.rope_scaling"  # the fields of `RopeScaling`, whose divisors a file has
_EXTRA_NAMES = "general.tensor_extra.name"
_PACKED_KINDS = {
    "nvfp4": gguf.GGMLQuantizationType.NVFP4,
    "mxfp4": gguf.GGMLQuantizationType.MXFP4,
}
_SWIGLU_LIMIT = 7.0  # of gpt-oss, which is in llama.cpp's code
# Weights dequantized at once. It bounds the float32 copies of a large embedding, and it is large
# enough that many threads work in NumPy's loops and do not wait for Python's lock.
_CHUNK_WEIGHTS = 1 << 20
GLOBAL_NAMES = {
    "token_embd.weight": names.EMBED,
    "output_norm.weight": names.NORM,
    "output.weight": names.HEAD,
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "q_proj",
    "attn_k": "k_proj",
    "attn_v": "v_proj",
    "attn_output": "o_proj",
    "attn_q_norm": "q_norm",
    "attn_k_norm": "k_norm",
    "ffn_gate": "gate_proj",
    "ffn_up": "up_proj",
    "ffn_down": "down_proj",
}
# Of a mixture of experts. Tensors of routed experts stack those of all of them, [E, N, K]; by their
# names those of the projections of an expert.
EXPERT_LAYER_NAMES = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
# gpt-oss, by the module in a layer; biases of gate and up become one tensor.
_GPT_OSS_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps": "mlp.experts.gate_proj_bias",
    "ffn_up_exps": "mlp.experts.up_proj_bias",
    "ffn_down_exps": "mlp.experts.down_proj_bias",
}
_STACKED_NAMES = {
    "ffn_gate_exps.weight": ("gate_proj",),
    "ffn_up_exps.weight": ("up_proj",),
    "ffn_gate_up_exps.weight": ("gate_proj", "up_proj"),
    "ffn_down_exps.weight": ("down_proj",),
}
# Qwen3.5 (llama.cpp, conversion/qwen.py), by the whole name in a layer.
QWEN3_5_NAMES = {
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
    "attn_gate.weight": "linear_attn.in_proj_z.weight",
    "ssm_beta.weight": "linear_attn.in_proj_b.weight",
    "ssm_alpha.weight": "linear_attn.in_proj_a.weight",
    "ssm_out.weight": "linear_attn.out_proj.weight",
    "ssm_conv1d.weight": "linear_attn.conv1d.weight",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm.weight": "linear_attn.norm.weight",
}


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """An open GGUF file."""

    path: pathlib.Path
    metadata: Mapping[str, Any]
    config: ModelConfig
    tensors: Mapping[str, GgufTensor]  # by Hugging Face name, still quantized
    ignored: tuple[str, ...] = ()  # what the file holds besides, such as 'the MTP head'

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor in Hugging Face's order, outputs first."""
        shape = self.tensors[name].shape
        if name.endswith("mlp.shared_expert_gate.weight") and len(shape) == 1:
            return (1, *shape)
        return (shape[0], 1, *shape[1:]) if name.endswith("conv1d.weight") else shape

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        """Returns a dequantized tensor in Hugging Face's row order, by its Hugging Face name.

        Raises:
            UserError: the tensor has a number format that cannot be dequantized.
        """
        tensor = self.tensors[name]
        # Vectors of Qwen3.5 become others before they are rounded.
        out = np.empty(tensor.shape, dtype if len(tensor.shape) > 1 else np.float32)
        try:
            with np.errstate(over="ignore", invalid="ignore"):  # the caller checks for infinities
                step = max(1, _CHUNK_WEIGHTS * len(out) // max(1, out.size))
                for row in range(0, len(out), step):
                    values = _dequantize(tensor.data[row : row + step], tensor.kind)
                    if tensor.divisors is not None:
                        values = values / tensor.divisors
                    out[row : row + step] = values
        except NotImplementedError as error:
            raise UserError(
                f"{self.path}: {tensor.name!r:.200} has the type {tensor.kind.name}, "
                "which cannot be dequantized"
            ) from error
        if heads := self._interleaved(name):
            return _split_halves(out, heads)
        if self.config.recurrent is not None:
            with np.errstate(divide="ignore", invalid="ignore"):
                out = _undo_qwen3_5(out, name, self.config)
        return out.astype(dtype, copy=False).reshape(self.shape(name))

    def _interleaved(self, name: str) -> int:
        """The number of heads with rows in GGUF's order; 0 for a tensor in Hugging Face's order."""
        if self.config.model_type != "llama" or not name.endswith(
            ("q_proj.weight", "k_proj.weight")
        ):
            return 0
        is_query = name.endswith("q_proj.weight")
        return self.config.num_heads if is_query else self.config.num_kv_heads

    @property
    def packed_form(self) -> str:
        """The format that is read as it is: 'mxfp4' of gpt-oss, 'nvfp4' of others."""
        return "mxfp4" if self.config.model_type == "gpt_oss" else "nvfp4"

    def packed_modules(self) -> frozenset[str]:
        """The modules in `packed_form`, of weights that the policy packs: of whole fused groups."""
        kind = _PACKED_KINDS[self.packed_form]
        groups = [
            group
            for layer in range(self.config.num_layers)
            for array, group in names.stored_tensors(self.config, layer).items()
            if array in PACKED
        ]
        return frozenset(
            name.removesuffix(".weight")
            for group in groups
            if all(n in self.tensors and self.tensors[n].kind == kind for n in group)
            for name in group
        )

    def unpack(self, module: str) -> dict[str, np.ndarray]:
        """Returns the tensors of a packed module as compressed-tensors has them, by name."""
        name = f"{module}.weight"
        tensor, heads = self.tensors[name], self._interleaved(name)
        if self.packed_form == "mxfp4":
            # The scale of 32 inputs, then the codes of the first 16 in the low bits.
            blocks = tensor.data.reshape(len(tensor.data), -1, 17)
            codes = np.concatenate([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], axis=-1)
            packed = codes[..., 0::2] | codes[..., 1::2] << 4
            return {
                f"{module}.weight_packed": packed.reshape(len(packed), -1),
                f"{module}.weight_scale": blocks[..., 0],
            }
        data = _split_halves(tensor.data, heads) if heads else tensor.data
        blocks = data.reshape(len(data), -1, 36)  # four scales, and the codes of four blocks
        scales, halves = blocks[..., :4], blocks[..., 4:].reshape(len(data), -1, 8)
        codes = np.concatenate([halves & 15, halves >> 4], axis=-1)
        divisor = np.float32(1) if tensor.divisors is None else tensor.divisors
        return {
            f"{module}.weight_packed": (codes[..., 0::2] | codes[..., 1::2] << 4).reshape(
                len(data), -1
            ),
            f"{module}.weight_scale": np.array(scales)
            .reshape(len(data), -1)
            .view(ml_dtypes.float8_e4m3fn),
            f"{module}.weight_global_scale": np.reshape(divisor, 1),
        }


def open_gguf(path: pathlib.Path | str) -> GgufFile:
    """Opens a GGUF file and reads its metadata; tensors are read later by `GgufFile.read`.

    Raises:
        UserError: the file is missing, truncated or not a GGUF file, or its architecture or one of
            its settings is not supported; the message names it.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    status = path.stat()
    return _open_cached(path, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=1)
def _open_cached(path: pathlib.Path, modified: int, size: int) -> GgufFile:
    """Opens a file as `open_gguf` does, and keeps the last one.

    A run reads the architecture first and the weights later, and reading the vocabulary takes more
    than a second. `modified` and `size` tell a file from another one at the same path.
    """
    del modified, size
    metadata, tensors = read_header(path)
    tensors = _with_divisors(path, metadata, tensors)
    rope_freqs = tensors.pop(ROPE_FREQS, None)
    if metadata.get("split.count", 1) != 1:
        raise UserError(
            f"{path}: one of {metadata['split.count']!r:.50} parts of a model; merge them with "
            "llama-gguf-split"
        )
    config = _config(path, metadata, tensors)
    if rope_freqs is not None:
        scaling = _llama3_scaling(path, rope_freqs, config, metadata.get(ROPE_SCALING))
        config = dataclasses.replace(config, rope_scaling=scaling)
    # A head for several tokens (MTP) comes after the last layer, and counts as one.
    blocks = metadata[f"{metadata['general.architecture']}.block_count"]
    head = range(config.num_layers, blocks)
    text = {name: tensor for name, tensor in tensors.items() if _layer_of(name) not in head}
    return GgufFile(
        path=path,
        metadata=metadata,
        config=config,
        tensors=_hf_tensors(path, text, config),
        ignored=("the MTP head",) if len(text) < len(tensors) else (),
    )


def _with_divisors(
    path: pathlib.Path, metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor]
) -> dict[str, GgufTensor]:
    """Returns the tensors without those of scales, which become divisors of their weights.

    Scales of activations are left out: the policy quantizes weights alone.
    """
    packed, exact = metadata.get(_EXTRA_NAMES), metadata.get(DIVISORS)
    of_file = np.array(exact if isinstance(exact, list) else [], np.float32)
    starts, start = {}, 0
    for name in packed if isinstance(packed, list) else []:
        starts[name], shape = start, tensors[name].shape if name in tensors else ()
        start += shape[0] if len(shape) == 3 else 1
    found = {}
    for name, tensor in tensors.items():
        if name.endswith((".scale", ".input_scale")):
            continue
        scale = tensors.get(f"{name.removesuffix('.weight')}.scale")
        if scale is not None:
            count = tensor.shape[0] if len(tensor.shape) == 3 else 1
            if scale.data.dtype != np.float32 or scale.shape != (count,):
                raise UserError(
                    f"{path}: {scale.name!r:.200} has the type {scale.kind.name} and the shape "
                    f"{scale.shape}, must be F32 and {(count,)}"
                )
            with np.errstate(all="ignore"):
                divisors = np.float32(1) / scale.data
                own = of_file[starts.get(name, 0) :][:count]
                divisors = own if np.array_equal(1 / own, scale.data) else divisors
            tensor = dataclasses.replace(tensor, divisors=divisors)
        found[name] = tensor
    return found


def _dequantize(data: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """As `gguf.dequantize`, which calls Python for every 16 rows, but in one piece."""
    blocks = getattr(gguf.quants, kind.name, None)
    if blocks is None:
        return gguf.dequantize(data, kind)
    blocks.init_grid()
    return blocks.dequantize_rows(data)


def _config(
    path: pathlib.Path, metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor]
) -> ModelConfig:
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UserError(
            f"{path}: the architecture {architecture!r:.50} is not supported; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    get = functools.partial(_value, path, metadata, architecture)
    num_heads = get("attention.head_count")
    embed_dim = get("embedding_length")
    head_dim = get("attention.key_length", default=embed_dim // max(num_heads, 1))
    of_family = _hybrid(path, get, tensors) if architecture in ("qwen35", "qwen35moe") else {}
    if architecture == "gpt-oss":
        of_family = _gpt_oss(path, get, tensors)
    is_mixture = architecture.endswith("moe") or architecture == "gpt-oss"
    experts = _experts(path, get, architecture) if is_mixture else None
    plain = {
        "expert_count": experts.count if experts else 0,
        "attention.value_length": head_dim,
        "rope.dimension_count": of_family.get("rotary_dim", head_dim),
        "rope.scaling.type": "yarn" if of_family.get("rope_scaling") else "none",
        "rope.scale_linear": 1.0,
        "attention.sliding_window": of_family.get("window", 0),
    }
    _reject_unsupported(path, get, plain)
    if "token_embd.weight" not in tensors:
        raise UserError(f"{path}: the tensor 'token_embd.weight' is missing")
    fields: dict[str, Any] = {
        "model_type": ARCHITECTURES[architecture],
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "embed_dim": embed_dim,
        "mlp_dim": experts.active_width if experts else get("feed_forward_length"),
        "num_layers": get("block_count") - get("nextn_predict_layers", default=0),
        "num_heads": num_heads,
        "num_kv_heads": get("attention.head_count_kv", default=num_heads),
        "head_dim": head_dim,
        "rope_theta": _decimal(get("rope.freq_base", kind=float, default=10000.0)),
        "rope_scaling": None,
        "norm_eps": _decimal(get("attention.layer_norm_rms_epsilon", kind=float)),
        "tie_embeddings": "output.weight" not in tensors,
        "attention_bias": architecture in ("qwen2", "gpt-oss"),
        "qk_norm": architecture.startswith("qwen3"),
        "max_position": get("context_length"),
        "experts": experts,
    }
    try:
        return ModelConfig(**(fields | of_family))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _experts(path: pathlib.Path, get: functools.partial, architecture: str) -> ExpertsConfig:
    """Returns the shapes of the experts; llama.cpp makes their weights add up to 1."""
    has_shared = architecture == "qwen35moe"
    try:
        return ExpertsConfig(
            count=get("expert_count"),
            top_k=get("expert_used_count"),
            width=get("expert_feed_forward_length"),
            shared_width=get("expert_shared_feed_forward_length") if has_shared else 0,
            normalized=get("expert_weights_norm", kind=bool, default=True),
        )
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _gpt_oss(
    path: pathlib.Path, get: functools.partial, tensors: Mapping[str, GgufTensor]
) -> dict[str, Any]:
    """Returns the fields that only gpt-oss has.

    The limits of YaRN are not rounded, as in the published config.json; llama.cpp rounds them.
    """
    scaling = None
    if get("rope.scaling.type", kind=str, default="none") == "yarn":
        factor = _decimal(get("rope.scaling.factor", kind=float))
        if not factor >= 1:
            raise UserError(f"{path}: rope.scaling.factor={factor} is less than 1")
        original = get("rope.scaling.original_context_length")
        fast, slow = (
            _decimal(get(f"rope.scaling.yarn_beta_{name}", kind=float, default=default))
            for name, default in (("fast", 32.0), ("slow", 1.0))
        )
        try:
            scaling = YarnScaling(
                *(factor, fast, slow, original),
                truncate=False,
                attention_factor=0.1 * math.log(factor) + 1,
            )
        except UserError as error:
            raise UserError(f"{path}: {error}") from error
    layers = {_layer_of(name) for name in tensors if ".attn_sinks." in name}
    return {
        "rope_scaling": scaling,
        "sinks": True,
        "window": get("attention.sliding_window"),
        "window_layers": tuple(sorted(number for number in layers if number % 2 == 0)),
        "other_biases": True,
        "swiglu_limit": _SWIGLU_LIMIT,
    }


def _hybrid(
    path: pathlib.Path, get: functools.partial, tensors: Mapping[str, GgufTensor]
) -> dict[str, Any]:
    """Returns the fields of a model of which some layers are recurrent."""
    value_heads = get("ssm.time_step_rank")
    shapes = {
        "key_heads": get("ssm.group_count"),
        "value_heads": value_heads,
        "key_dim": get("ssm.state_size"),
        "value_dim": get("ssm.inner_size") // max(value_heads, 1),
        "window": get("ssm.conv_kernel"),
    }
    try:
        recurrent = RecurrentConfig(**shapes)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return {
        "recurrent": recurrent,
        "recurrent_layers": tuple(sorted(_layer_of(x) for x in tensors if x.endswith(".ssm_a"))),
        "rotary_dim": get("rope.dimension_count"),
        "gated_attention": True,
        "centered_norms": True,
    }


def _reject_unsupported(
    path: pathlib.Path, get: functools.partial, plain: Mapping[str, Any]
) -> None:
    for key, supported in plain.items():
        value = get(key, kind=type(supported), default=supported)
        if value != supported:
            raise UserError(f"{path}: {key}={value!r:.50} is not supported; supported: {supported}")


def _value(
    path: pathlib.Path,
    metadata: Mapping[str, Any],
    architecture: str,
    key: str,
    *,
    kind: type = int,
    default: Any = None,
) -> Any:
    value = metadata.get(f"{architecture}.{key}", default)
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise UserError(
            f"{path}: the metadata '{architecture}.{key}' is {value!r:.50}, must be of the type "
            f"{kind.__name__}"
        )
    return value


def _decimal(value: float) -> float:
    """Returns the shortest decimal of a stored float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _llama3_scaling(
    path: pathlib.Path, tensor: GgufTensor, config: ModelConfig, stored: Any
) -> RopeScaling | None:
    """Recovers Llama 3's scaling from the frequency divisors [H/2] that a file stores.

    `stored` is what the file says of it, None if nothing.
    """
    factors = tensor.data
    message = f"{path}: '{ROPE_FREQS}' is not the frequency scaling of Llama 3"
    if factors.dtype != np.float32 or factors.shape != (config.head_dim // 2,):
        raise UserError(message)
    if np.all(factors == 1):
        return None
    if not np.isfinite(factors).all() or not factors.min() > 0:
        raise UserError(message)
    if stored is None:
        # Llama 3.1, 3.2 and 3.3 differ only in the factor, the divisor of the lowest frequencies.
        stored = [factors.max(), 1.0, 4.0, 8192.0]
    values = np.asarray(stored)
    if values.shape != (4,) or values.dtype.kind != "f" or not np.isfinite(values).all():
        raise UserError(f"{path}: the metadata '{ROPE_SCALING}' are not four numbers")
    factor, low, high, positions = map(_decimal, values)
    scaling = RopeScaling(factor, low, high, original_max_position=int(positions))
    scaled = rotary_frequencies(dataclasses.replace(config, rope_scaling=scaling))
    expected = rotary_frequencies(config) / scaled
    if not np.allclose(factors, expected, rtol=1e-4):
        raise UserError(message)
    return scaling


def _layer_of(name: str) -> int:
    """Returns the number of the layer of a tensor, or -1."""
    match = re.match(r"blk\.(0|[1-9]\d{0,5})\.", name, re.ASCII)
    return int(match[1]) if match else -1


def _hf_tensors(
    path: pathlib.Path, tensors: Mapping[str, GgufTensor], config: ModelConfig
) -> dict[str, GgufTensor]:
    """Returns the tensors by Hugging Face name, those of experts cut into views of each of them."""
    found: dict[str, GgufTensor] = {}
    for name, tensor in tensors.items():
        layer, members = _layer_of(name), _STACKED_NAMES.get(name.split(".", 2)[-1], ())
        modules = [
            module
            for modules in names.expert_modules(config, max(layer, 0)).values()
            for module in modules
            if layer >= 0 and module.rpartition(".")[2] in members
        ]
        if not modules:
            found[_hf_name(path, name, config)] = tensor
            continue
        rows = len(modules) * tensor.shape[-2] // len(members) if len(tensor.shape) == 3 else 0
        if rows != math.prod(tensor.shape[:-1]) or tensor.shape[-2] % len(members):
            raise UserError(
                f"{path}: {name!r:.200} has the shape {tensor.shape}, must be one weight of each "
                f"of the {len(modules) // len(members)} experts"
            )
        parts = tensor.data.reshape(len(modules), -1, tensor.data.shape[-1])
        shape, divisors = (parts.shape[1], tensor.shape[-1]), [None] * len(modules)
        if tensor.divisors is not None:
            divisors = np.repeat(tensor.divisors, len(members))
        found |= {
            f"{module}.weight": dataclasses.replace(
                tensor, shape=shape, data=data, divisors=divisor
            )
            for module, data, divisor in zip(modules, parts, divisors, strict=True)
        }
    for gate in [name for name in found if name.endswith(".gate_proj_bias")]:
        if up := found.pop(gate.replace(".gate_", ".up_"), None):
            both = [tensor.data for tensor in (found.pop(gate), up)]
            if both[0].shape != both[1].shape:
                raise UserError(
                    f"{path}: {up.name!r:.200} has the shape {up.shape}, that of gate another one"
                )
            data = np.stack(both, axis=1)
            name = gate.replace(".gate_", ".gate_up_")
            found[name] = dataclasses.replace(up, shape=data.shape, data=data)
    return found


def _hf_name(path: pathlib.Path, name: str, config: ModelConfig) -> str:
    if name in GLOBAL_NAMES:
        return GLOBAL_NAMES[name]
    layer, rest = _layer_of(name), name.split(".", 2)[-1]
    if layer >= 0 and config.recurrent is not None and rest in QWEN3_5_NAMES:
        return f"model.layers.{layer}.{QWEN3_5_NAMES[rest]}"
    module, _, parameter = rest.partition(".")
    if layer >= 0 and config.model_type == "gpt_oss" and module in _GPT_OSS_NAMES:
        own = _GPT_OSS_NAMES[module]
        is_whole = module == "attn_sinks" or module.endswith("_exps")
        return f"model.layers.{layer}.{own}" + ("" if is_whole else f".{parameter}")
    if layer >= 0 and config.experts is not None and module in EXPERT_LAYER_NAMES:
        return f"model.layers.{layer}.{EXPERT_LAYER_NAMES[module]}.{parameter}"
    if layer < 0 or module not in LAYER_NAMES or parameter not in ("weight", "bias"):
        raise UserError(f"{path}: the tensor {name!r:.200} is not part of a supported architecture")
    return f"{names.layer_module(layer, LAYER_NAMES[module])}.{parameter}"


def _split_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undoes GGUF's row order, which puts row i of a head next to row i + H/2."""
    outputs, inputs = weight.shape
    pairs = weight.reshape(heads, outputs // heads // 2, 2, inputs)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(outputs, inputs)


def _undo_qwen3_5(tensor: np.ndarray, name: str, config: ModelConfig) -> np.ndarray:
    """Undoes what llama.cpp's converter does to Qwen3.5 (conversion/qwen.py).

    It stores norms as the scales that multiply, -exp(A_log), and the value heads in the order in
    which the first ones of all key heads come first, where Hugging Face has those of a key head
    together. The tensor is dequantized, and named as by Hugging Face.
    """
    shapes = config.recurrent
    assert shapes is not None
    module, _, part = name.partition("linear_attn.")
    if not part:
        offset = names.centered_at(config, module.removesuffix(".weight").rpartition(".")[2])
        return tensor - offset if offset else tensor
    if part == "norm.weight":
        return tensor
    if part == "A_log":
        tensor = np.log(-tensor)
    rows = tensor.T if part == "out_proj.weight" else tensor
    # Queries and keys, which keep their order, are in front of the values.
    start = len(rows) - shapes.values if len(rows) == shapes.channels else 0
    ratio = shapes.value_heads // shapes.key_heads
    heads = rows[start:].reshape(ratio, shapes.key_heads, -1).swapaxes(0, 1)
    rows = np.concatenate([rows[:start], heads.reshape(rows[start:].shape)])
    return rows.T if part == "out_proj.weight" else rows
