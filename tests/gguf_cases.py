"""Tiny models and adapters that this project and llama.cpp's converters write as GGUF files."""

import hashlib
import json

import gguf
import numpy as np
import tiny_checkpoints

from qerl_jax.policy.config import ExpertsConfig, RecurrentConfig, RopeScaling
from qerl_jax.policy.layers.kinds import projection_shapes
from qerl_jax.policy.lora import Lora, LoraConfig, targets_of
from qerl_jax.policy.trainable import Trainable
from qerl_jax.weights import tokenizer
from qerl_jax.weights.peft import save_peft_adapter

# The embedding has more rows than the tokenizer has ids.
_SHAPES = {"embed_dim": 64, "mlp_dim": 128, "head_dim": 16, "vocab_size": 272}
_RECURRENT = {"recurrent": RecurrentConfig(2, 4, 16, 16, 4), "rotary_dim": 8}
_CHANGES = {
    "llama": {
        "rope_theta": 500000.0,
        "rope_scaling": RopeScaling(8.0, 1.0, 4.0, 8192),
        "head_dim": 64,
    },
    "mistral": {
        "rope_theta": 1000000.0,
        "rope_scaling": RopeScaling(2.5, 2.0, 8.0, 512),
        "head_dim": 32,
    },
    "qwen2": {"tie_embeddings": True},
    "qwen3_5": _RECURRENT,
    "qwen3_5_moe": _RECURRENT,
}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe")
LORA = LoraConfig(rank=4, alpha=8.0)


def config_of(family):
    changes = dict(_CHANGES.get(family, {}))
    if family.endswith("_moe"):
        experts = ExpertsConfig(6, 2, 64, 64 if family == "qwen3_5_moe" else 0, normalized=True)
        changes |= {"experts": experts, "mlp_dim": experts.active_width}
    return tiny_checkpoints.model_config(family, **_SHAPES | changes)


def tensors_of(family):
    """Random tensors in bfloat16, with products of about the size of their inputs."""
    tensors = tiny_checkpoints.random_tensors(config_of(family), seed=7)
    return {n: t / 8 if "norm" not in n else t for n, t in tensors.items()}


def tokenizer_of(family):
    """A byte-level BPE of a few merges, with a role for each special token and a template."""
    pre = {"llama": "llama-bpe", "mistral": "tekken"}.get(family, "qwen2")
    pre = "qwen35" if family.startswith("qwen3_5") else pre
    words = ["ab", "abc", "\u0120a", "<|begin|>", "<|im_end|>", "<|fim|>", "<tool>", "<pad>"]
    words.append("<|endoftext|>")  # transformers adds it to the tokenizers of some families
    tokens = tiny_checkpoints.byte_tokens(*words)
    metadata = tiny_checkpoints.gguf_metadata(pre, tokens, ["a b", "ab c", "\u0120 a"])
    ids = {name: tokens.index(text) for name, text in zip(("bos", "eos"), words[3:5], strict=True)}
    types = [1] * 259 + [3, 3, 3, 4, 3, 3]
    return tokenizer.from_gguf(
        metadata
        | {f"tokenizer.ggml.{name}_token_id": i for name, i in ids.items()}
        | {
            "tokenizer.ggml.padding_token_id": tokens.index("<pad>"),
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.add_bos_token": family == "llama",
            "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
        }
    )


def write_folder(folder, family, *, packed=False):
    """Writes a model folder, in bfloat16 or in the NVFP4 of compressed-tensors."""
    config, tensors = config_of(family), tensors_of(family)
    if family == "qwen3_5_moe" and not packed:
        tensors = tiny_checkpoints.stacked(config, tensors)
    if packed:
        tiny_checkpoints.write_packed(folder, config, tensors, dense=["linear_attn."])
    else:
        tiny_checkpoints.write_folder(folder, config, tensors)
    own = tokenizer_of(family)
    for name, content in tokenizer.to_files(own).items():
        (folder / name).write_bytes(content)
    hf = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(hf | tokenizer.token_ids(own)))
    return folder


def adapter_of(family):
    config, rng = config_of(family), np.random.default_rng(3)
    shapes = projection_shapes(config)

    def matrices(name):
        (n, k), draw = shapes[name], rng.standard_normal
        return {"a": draw((LORA.rank, k), np.float32), "b": draw((n, LORA.rank), np.float32)}

    layers = [
        {name: matrices(name) for name in targets_of(config, layer, shapes)}
        for layer in range(config.num_layers)
    ]
    return Lora(layers=layers, scale=LORA.scale)


def write_adapter(folder, family):
    """Writes an adapter as PEFT does; its targets are all projections."""
    lora = adapter_of(family)
    targets = tuple(dict.fromkeys(name for layer in lora.layers for name in layer))
    options = LoraConfig(rank=LORA.rank, alpha=LORA.alpha, targets=targets)
    save_peft_adapter(folder, Trainable(lora=lora, params={}), options, base_model="base")
    return folder


def describe(path):
    """What a GGUF file holds: its metadata, and type, shape and digest of each tensor by name."""
    reader = gguf.GGUFReader(path)
    metadata = {}
    for name, field in reader.fields.items():
        value = field.contents()
        if isinstance(value, list) and len(value) > 20:
            value = hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
        metadata[name] = value
    tensors = {}
    for tensor in reader.tensors:
        data = np.ascontiguousarray(tensor.data)
        if tensor.tensor_type == gguf.GGMLQuantizationType.F32:  # exp differs in the last digit
            data = np.round(data.astype(np.float64), 5).astype(np.float32) + np.float32(0)
        digest = hashlib.sha256(data.tobytes()).hexdigest()[:16]
        tensors[tensor.name] = [tensor.tensor_type.name, tensor.shape.tolist(), digest]
    return {"metadata": metadata, "tensors": tensors}
