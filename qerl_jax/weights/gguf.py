"""Reads GGUF files (llama.cpp's format) as Hugging Face tensors.

GGUF renames the tensors, stores quantized blocks, and interleaves the rows of Llama's q and k
projections for its own rotary convention. This module returns tensors that are dequantized, under
Hugging Face names and in Hugging Face row order.
"""

import dataclasses
import functools
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np

from qerl_jax.errors import UserError
from qerl_jax.policy.attention import rotary_frequencies
from qerl_jax.policy.config import ModelConfig, RopeScaling
from qerl_jax.weights import names
from qerl_jax.weights.gguf_header import GgufTensor, read_header

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_ROPE_FREQS = "rope_freqs.weight"
# Weights dequantized at once. It bounds the float32 copies of a large embedding, and it is large
# enough that many threads work in NumPy's loops and do not wait for Python's lock.
_CHUNK_WEIGHTS = 1 << 20
_GLOBAL_NAMES = {
    "token_embd.weight": names.EMBED,
    "output_norm.weight": names.NORM,
    "output.weight": names.HEAD,
}
_LAYER_NAMES = {
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


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """An open GGUF file.

    Attributes:
        path: the path of the file.
        metadata: the key-value pairs of the file.
        config: the architecture.
        tensors: the stored tensors by Hugging Face name, still quantized.
    """

    path: pathlib.Path
    metadata: Mapping[str, Any]
    config: ModelConfig
    tensors: Mapping[str, GgufTensor]

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor in Hugging Face's order, outputs first."""
        return self.tensors[name].shape

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        """Returns a dequantized tensor in Hugging Face's row order.

        Args:
            name: Hugging Face name of the tensor.
            dtype: dtype of the result.

        Raises:
            UserError: the tensor has a number format that cannot be dequantized.
        """
        tensor = self.tensors[name]
        out = np.empty(self.shape(name), dtype)
        try:
            with np.errstate(over="ignore", invalid="ignore"):  # the caller checks for infinities
                step = max(1, _CHUNK_WEIGHTS * len(out) // max(1, out.size))
                for row in range(0, len(out), step):
                    rows = slice(row, row + step)
                    out[rows] = _dequantize(tensor.data[rows], tensor.kind)
        except NotImplementedError as error:
            raise UserError(
                f"{self.path}: {tensor.name!r:.200} has the type {tensor.kind.name}, "
                "which cannot be dequantized"
            ) from error
        if self.config.model_type == "llama":
            if name.endswith("q_proj.weight"):
                return _split_halves(out, self.config.num_heads)
            if name.endswith("k_proj.weight"):
                return _split_halves(out, self.config.num_kv_heads)
        return out


def open_gguf(path: pathlib.Path | str) -> GgufFile:
    """Opens a GGUF file and reads its metadata; tensors are read later by `GgufFile.read`.

    Args:
        path: the path of the file.

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
    rope_freqs = tensors.pop(_ROPE_FREQS, None)
    if metadata.get("split.count", 1) != 1:
        raise UserError(
            f"{path}: one of {metadata['split.count']!r:.50} parts of a model; merge them with "
            "llama-gguf-split"
        )
    config = _config(path, metadata, tensors)
    if rope_freqs is not None:
        scaling = _llama3_scaling(path, rope_freqs, config)
        config = dataclasses.replace(config, rope_scaling=scaling)
    hf_tensors = {_hf_name(path, name): tensor for name, tensor in tensors.items()}
    return GgufFile(path=path, metadata=metadata, config=config, tensors=hf_tensors)


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
    _reject_unsupported(path, get, head_dim)
    if "token_embd.weight" not in tensors:
        raise UserError(f"{path}: the tensor 'token_embd.weight' is missing")
    fields: dict[str, Any] = {
        "model_type": architecture,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "embed_dim": embed_dim,
        "mlp_dim": get("feed_forward_length"),
        "num_layers": get("block_count"),
        "num_heads": num_heads,
        "num_kv_heads": get("attention.head_count_kv", default=num_heads),
        "head_dim": head_dim,
        "rope_theta": _decimal(get("rope.freq_base", kind=float, default=10000.0)),
        "rope_scaling": None,
        "norm_eps": _decimal(get("attention.layer_norm_rms_epsilon", kind=float)),
        "tie_embeddings": "output.weight" not in tensors,
        "attention_bias": architecture == "qwen2",
        "qk_norm": architecture == "qwen3",
        "max_position": get("context_length"),
    }
    try:
        return ModelConfig(**fields)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _reject_unsupported(path: pathlib.Path, get: functools.partial, head_dim: int) -> None:
    plain = {
        "expert_count": 0,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        "rope.scaling.type": "none",
        "rope.scale_linear": 1.0,
        "attention.sliding_window": 0,
    }
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
    path: pathlib.Path, tensor: GgufTensor, config: ModelConfig
) -> RopeScaling | None:
    """Recovers Llama 3's scaling from the frequency divisors [H/2] that a file stores."""
    factors = tensor.data
    message = f"{path}: '{_ROPE_FREQS}' is not the frequency scaling of Llama 3"
    if factors.dtype != np.float32 or factors.shape != (config.head_dim // 2,):
        raise UserError(message)
    if np.all(factors == 1):
        return None
    if not np.isfinite(factors).all() or not factors.max(initial=0) > 1:
        raise UserError(message)
    # Llama 3.1, 3.2 and 3.3 differ only in the factor, the divisor of the lowest frequencies.
    scaling = RopeScaling(
        factor=_decimal(factors.max()),
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position=8192,
    )
    scaled = rotary_frequencies(dataclasses.replace(config, rope_scaling=scaling))
    expected = rotary_frequencies(config) / scaled
    if not np.allclose(factors, expected, rtol=1e-4):
        raise UserError(message)
    return scaling


def _hf_name(path: pathlib.Path, name: str) -> str:
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    match = re.fullmatch(r"blk\.(0|[1-9]\d{0,5})\.(\w+)\.(weight|bias)", name, re.ASCII)
    if match is None or match[2] not in _LAYER_NAMES:
        raise UserError(f"{path}: the tensor {name!r:.200} is not part of a supported architecture")
    return f"{names.layer_module(int(match[1]), _LAYER_NAMES[match[2]])}.{match[3]}"


def _split_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undoes GGUF's row order, which puts row i of a head next to row i + H/2."""
    outputs, inputs = weight.shape
    pairs = weight.reshape(heads, outputs // heads // 2, 2, inputs)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(outputs, inputs)
