"""Tiny random checkpoints for tests, as folders of a model hub and as GGUF files."""

import json
import pathlib
import shutil

import gguf
import ml_dtypes
import numpy as np
import tokenizers
from safetensors.numpy import save_file

from qerl_jax.policy import config as config_lib
from qerl_jax.policy.layers import kinds
from qerl_jax.policy.quant import quantize_nvfp4
from qerl_jax.weights import names

VOCAB = 48
NVFP4 = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "ignore": ["lm_head"],
}


def model_config(model_type="llama", **changes):
    """Returns an architecture of 2 layers.

    For Qwen3 and Mistral head_dim is not embed_dim / num_heads, as in Qwen3-0.6B and Mistral-Nemo.
    """
    fields = {
        "model_type": model_type,
        "vocab_size": VOCAB,
        "embed_dim": 32,
        "mlp_dim": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16 if model_type in ("qwen3", "mistral") else 8,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "norm_eps": 1e-6,
        "tie_embeddings": False,
        "attention_bias": model_type == "qwen2",
        "qk_norm": model_type == "qwen3",
        "max_position": 128,
    }
    if model_type.endswith("_moe"):
        shared = 16 if model_type == "qwen3_5_moe" else 0
        experts = config_lib.ExpertsConfig(6, 2, 16, shared, normalized=True)
        fields |= {"experts": experts, "mlp_dim": experts.active_width, "qk_norm": True}
    if model_type == "gpt_oss":
        experts = config_lib.ExpertsConfig(6, 2, 32, 0, normalized=True)
        fields |= {
            "experts": experts,
            "mlp_dim": experts.active_width,
            "rope_scaling": config_lib.YarnScaling(4.0, 32.0, 1.0, 32, True, 1.2),
            "attention_bias": True,
            "sinks": True,
            "window": 8,
            "window_layers": (0,),
            "other_biases": True,
            "swiglu_limit": 1.5,
        }
    if model_type in config_lib.NESTED_TYPES:
        # As in Qwen3.5 the last layer of a group is attention; a key head has two value heads.
        fields |= {
            "num_layers": 3,
            "qk_norm": True,
            "recurrent": config_lib.RecurrentConfig(2, 4, 8, 12, 4),
            "recurrent_layers": (0, 1),
            "rotary_dim": 4,
            "gated_attention": True,
            "centered_norms": True,
        }
    return config_lib.ModelConfig(**(fields | changes))


def random_tensors(config, *, dtype=ml_dtypes.bfloat16, seed=0):
    """Returns every tensor of an unquantized checkpoint."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal(shape, np.float32).astype(dtype)
        for name, shape in names.expected_shapes(config).items()
    }


def stacked(config, tensors, stacks=("experts_gate_up", "experts_down")):
    """Returns the tensors with those of all experts of a layer in one each, also packed ones.

    The stack 'gate_proj' or 'up_proj' is that of one projection, as llama.cpp has it.
    """
    found = dict(tensors)
    for layer in range(config.num_layers):
        for stack, modules in names.expert_modules(config, layer).items():
            path, _, whole = names.stacked_tensor(layer, stack).rpartition(".")
            members = kinds.STACKS[stack].members
            whole = {whole: members} if stack in stacks else {m: (m,) for m in members}
            for name, own in whole.items():
                parts = [m for m in modules if m.rpartition(".")[2] in own]
                for suffix in ("", "_packed", "_scale", "_global_scale"):
                    if f"{parts[0]}.weight{suffix}" in found:
                        rows = np.stack([found.pop(f"{part}.weight{suffix}") for part in parts])
                        shape = config.experts.count, -1, *rows.shape[2:]
                        found[f"{path}.{name}{suffix}"] = rows.reshape(shape)
    return found


def write_folder(folder, config, tensors, **config_extra):
    """Writes config.json, model.safetensors, tokenizer.json and generation_config.json."""
    folder = pathlib.Path(folder)
    folder.mkdir(exist_ok=True)
    hf = config_lib.to_hf_config(config) | config_extra
    (folder / "config.json").write_text(json.dumps(hf))
    ends = {"eos_token_id": [VOCAB - 2, VOCAB - 1]}  # Qwen2.5 and Llama 3 name several, too.
    (folder / "generation_config.json").write_text(json.dumps(ends))
    save_file(tensors, folder / "model.safetensors")
    write_tokenizer(folder)
    return folder


def write_packed(folder, config, tensors, *, dense=(), also=(), change=None, **quantization):
    """Writes a compressed-tensors folder with every projection of `tensors` quantized alone.

    Args:
        folder: target path.
        config: the architecture.
        tensors: the dense tensors by Hugging Face name.
        dense: parts of names; projections with such a part stay dense.
        also: names of other tensors to quantize.
        change: function that is called with the stored tensors and may change them.
        quantization: fields of the quantization_config to set.
    """
    stored = {}
    for name, tensor in tensors.items():
        projection = "_proj.weight" in name and not any(part in name for part in dense)
        if not projection and name not in also:
            stored[name] = tensor
            continue
        packed = quantize_nvfp4([tensor])
        stored[f"{name}_packed"] = np.asarray(packed.packed)
        # The safetensors package cannot write FP8 from NumPy, so the header is patched below.
        stored[f"{name}_scale"] = np.asarray(packed.scales).view(np.uint8)
        stored[f"{name}_global_scale"] = np.asarray(packed.global_scale)[:1]
    if change is not None:
        change(stored)
    write_folder(folder, config, stored, quantization_config=NVFP4 | quantization)
    path = folder / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    for name, entry in header.items():
        if name.endswith(("weight_scale", "proj_scale")):
            entry["dtype"] = "F8_E4M3"
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    return folder


def write_golden_source(folder, name):
    """Writes the bfloat16 model that llm-compressor quantized to golden/nvfp4_NAME."""
    golden = pathlib.Path(__file__).parent / "golden" / f"nvfp4_{name}"
    folder.mkdir(exist_ok=True)
    config = json.loads((golden / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(golden / "source_bf16.safetensors", folder / "model.safetensors")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(golden / file, folder)
    return folder


def write_tokenizer(folder, **settings):
    """Writes a tokenizer whose words t0, t1, ... are the ids 0, 1, ...; its end is <|im_end|>."""
    vocabulary = {f"t{i}": i for i in range(VOCAB - 2)}
    vocabulary |= {"<|endoftext|>": VOCAB - 2, "<|im_end|>": VOCAB - 1}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="t0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def gguf_metadata(pre, tokens, merges=(), **extra):
    """The fields of a GGUF file that make a tokenizer."""
    special = [token.startswith("<|") for token in tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if s else 1 for s in special],
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.eos_token_id": special.index(True),
    } | extra


def byte_tokens(*more):
    """Returns a vocabulary of the 256 byte tokens, in GPT-2's printable form, and more tokens."""
    return [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), *more]


def gguf_name(name, arch="llama"):
    """Returns llama.cpp's name of a Hugging Face tensor, by the table of the gguf package."""
    arch = gguf.constants.MODEL_ARCH[arch.upper().replace("-", "_")]
    table = gguf.get_tensor_name_map(arch, 8)
    return table.get_name(name.replace(".dt_bias", ".dt_proj.bias"), (".weight", ".bias"))


def _as_qwen35(name, tensor, config):
    """Changes a tensor as `modify_tensors` of llama.cpp's converter does (conversion/qwen.py)."""
    shapes, part = config.recurrent, name.rpartition("linear_attn.")[2]

    def tiled(values, axis, width):
        heads = np.moveaxis(values, axis, 0)
        heads = heads.reshape(shapes.key_heads, -1, width, *heads.shape[1:]).swapaxes(0, 1)
        return np.moveaxis(heads.reshape(-1, *heads.shape[3:]), 0, axis)

    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        q, k, v = np.split(tensor.squeeze(), np.array([1, 2]) * shapes.key_heads * shapes.key_dim)
        return np.concatenate([q, k, tiled(v, 0, shapes.value_dim)])
    if part in ("in_proj_z.weight", "out_proj.weight"):
        return tiled(tensor, int(part == "out_proj.weight"), shapes.value_dim)
    if part in ("in_proj_a.weight", "in_proj_b.weight", "dt_bias"):
        return tiled(tensor, 0, 1)
    if part == "A_log":
        return -np.exp(tiled(tensor, 0, 1))
    return tensor + 1 if part.endswith("norm.weight") and part == name else tensor


def published_gpt_oss(config, tensors):
    """Returns tensors by the names of `names.expert_tensors` as gpt-oss is published.

    Dense experts are [E, K, N], packed ones blocks and scales, with gate and up in turn.
    """
    found = dict(tensors)
    for layer in range(config.num_layers):
        for stack, modules in names.expert_modules(config, layer).items():
            base, members = names.stacked_tensor(layer, stack), len(kinds.STACKS[stack].members)
            for suffix, stored in {"": "", "_packed": "_blocks", "_scale": "_scales"}.items():
                if f"{modules[0]}.weight{suffix}" not in found:
                    continue
                parts = [found.pop(f"{module}.weight{suffix}") for module in modules]
                parts = np.stack(parts).reshape(config.experts.count, members, *parts[0].shape)
                rows = names.interleaved(parts)
                if suffix == "_packed":
                    rows = rows.reshape(*rows.shape[:2], -1, 16)
                found[f"{base}{stored}"] = rows if suffix else rows.swapaxes(1, 2)
        bias = f"{names.stacked_tensor(layer, 'experts_gate_up')}_bias"
        found[bias] = names.interleaved(found[bias])
    return {name: np.ascontiguousarray(tensor) for name, tensor in found.items()}


ARCHITECTURES = {
    "qwen3_5": "qwen35",
    "qwen3_moe": "qwen3moe",
    "qwen3_5_moe": "qwen35moe",
    "gpt_oss": "gpt-oss",
}


def write_gguf(
    path, config, tensors, *, metadata=None, rope_freqs=None, quantization=None, gate_up=False
):
    """Writes a GGUF file as llama.cpp's converter does.

    Llama's q and k rows are interleaved, and tensors of Qwen3.5 change as in `_as_qwen35`. Experts
    are stacked.

    Args:
        path: the path of the file.
        config: the architecture.
        tensors: float32 tensors by Hugging Face name.
        metadata: values by architecture key, to add or, with None, to leave out.
        rope_freqs: contents of rope_freqs.weight, or None.
        quantization: gguf type of the projections, or None for float32.
        gate_up: whether gate and up of experts are one tensor.
    """
    arch = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, arch)
    if config.recurrent:
        shapes = config.recurrent
        writer.add_ssm_conv_kernel(shapes.window)
        writer.add_ssm_state_size(shapes.key_dim)
        writer.add_ssm_group_count(shapes.key_heads)
        writer.add_ssm_time_step_rank(shapes.value_heads)
        writer.add_ssm_inner_size(shapes.values)
        writer.add_rope_dimension_count(config.rotary_dim)
        writer.add_rope_dimension_sections([1, 1, 0, 0])
        tensors = {name: _as_qwen35(name, tensor, config) for name, tensor in tensors.items()}
    values = {
        "block_count": config.num_layers,
        "context_length": config.max_position,
        "embedding_length": config.embed_dim,
        "feed_forward_length": config.mlp_dim,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.freq_base": config.rope_theta,
    }
    if experts := config.experts:
        if config.sinks:
            scaling = config.rope_scaling
            values |= {
                "attention.sliding_window": config.window,
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": scaling.factor,
                "rope.scaling.original_context_length": scaling.original_max_position,
            }
            tensors = {name.replace(".sinks", ".sinks.weight"): t for name, t in tensors.items()}
            for name in [name for name in tensors if name.endswith("gate_up_proj_bias")]:
                gate, up = tensors.pop(name).swapaxes(0, 1)
                base = name.removesuffix("gate_up_proj_bias")
                tensors |= {f"{base}gate_proj.bias": gate, f"{base}up_proj.bias": up}
            tensors = {n.replace("down_proj_bias", "down_proj.bias"): t for n, t in tensors.items()}
        tensors = stacked(config, tensors, ["experts_down", "experts_gate_up"][: 1 + gate_up])
        tensors = {n: t[0] if "shared_expert_gate" in n else t for n, t in tensors.items()}
        values |= {
            "feed_forward_length": None,
            "expert_count": experts.count,
            "expert_used_count": experts.top_k,
            "expert_feed_forward_length": experts.width,
            "expert_shared_feed_forward_length": experts.shared_width or None,
        }
    values |= metadata or {}
    for key, value in values.items():
        if isinstance(value, str):
            writer.add_string(f"{arch}.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{arch}.{key}", value)
        elif value is not None:
            writer.add_uint32(f"{arch}.{key}", value)
    words = [f"t{i}" for i in range(config.vocab_size - 2)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35" if config.recurrent else "qwen2")
    writer.add_token_list([*words, "<|endoftext|>", "<|im_end|>"])
    writer.add_token_types([1] * len(words) + [3, 3])
    writer.add_token_merges([])
    writer.add_eos_token_id(config.vocab_size - 1)
    heads = {"q_proj.weight": config.num_heads, "k_proj.weight": config.num_kv_heads}
    for name, tensor in tensors.items():
        for suffix, count in heads.items():
            if arch == "llama" and name.endswith(suffix):
                halves = tensor.reshape(count, 2, -1, tensor.shape[1])
                tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        if ".experts." in name and not name.endswith(".bias"):
            name = f"{name.removesuffix('.weight')}.weight"
        # Of gpt-oss the experts alone, as it is published.
        if quantization and "_proj.weight" in name and (not config.sinks or ".experts" in name):
            data = gguf.quantize(np.ascontiguousarray(tensor), quantization)
            writer.add_tensor(gguf_name(name, arch), data, raw_dtype=quantization)
        else:
            writer.add_tensor(gguf_name(name, arch), np.ascontiguousarray(tensor))
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
