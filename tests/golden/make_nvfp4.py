"""Writes nvfp4_*/: tiny NVFP4A16 checkpoints made by llm-compressor, and the logits of each.

Each folder is a compressed-tensors checkpoint (config.json, model.safetensors, a tokenizer) plus
source_bf16.safetensors, the bfloat16 model that was quantized, and logits.safetensors: `ids` [T]
and the float32 logits [T, V] that transformers computes from the decompressed weights, once as
compressed-tensors decompresses them (`logits_bf16`: each weight rounded to bfloat16 after its
scales) and once without that rounding (`logits_float32`).

Besides random weights, the source has difficult cases for a quantizer: blocks of zeros and of
negative zeros, blocks whose scale underflows, an outlier, rounding ties, and fused projections that
differ in their largest weight. llm-compressor quantizes each expert of a mixture alone and stores a
tensor for each of its projections.

Needs Python 3.11, torch==2.13.0 (CPU), llmcompressor==0.14.0.1 (with compressed-tensors==0.19.0 and
transformers==5.17.0), safetensors==0.8.0:

    python tests/golden/make_nvfp4.py [NAME ...]

Without a name it writes all folders.
"""

import json
import pathlib
import re
import sys
import tempfile

import torch
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from safetensors.torch import load_file, save_file
from shared import logits_of
from tiny_tokenizer import write_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

HERE = pathlib.Path(__file__).parent
COMMON = {
    "hidden_size": 32,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {
    "qwen2": COMMON | {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": COMMON | {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": False},
    "llama": COMMON | {"model_type": "llama", "tie_word_embeddings": False},
    "qwen3_5": COMMON
    | {
        "model_type": "qwen3_5_text",
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 8,
        "tie_word_embeddings": False,
    },
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
CONFIGS |= {
    "qwen3_moe": CONFIGS["qwen3"] | EXPERTS | {"model_type": "qwen3_moe", "norm_topk_prob": True},
    "qwen3_5_moe": CONFIGS["qwen3_5"]
    | EXPERTS
    | {"model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 32},
}
# What llm-compressor's examples leave in 16 bits; of a mixture but its shared expert.
IGNORED = {"qwen3_5": ["re:.*lm_head", "re:.*linear_attn.*"]}
IGNORED["qwen3_moe"] = ["lm_head", "re:.*mlp.gate$"]
IGNORED["qwen3_5_moe"] = [*IGNORED["qwen3_5"], "re:.*mlp.gate$", "re:.*shared_expert_gate$"]


def randomize(model, generator):
    """Fills every parameter; the weights of different projections have different sizes."""
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            centered = "qwen3_5" in model.config.model_type and "linear_attn" not in name
            values = 0.5 * values + (0 if centered else 1)
        elif name.endswith(("A_log", "dt_bias", "conv1d.weight")):
            values = 0.5 * values
        elif "linear_attn" in name:
            values = values / parameter.shape[1] ** 0.5
        elif name.endswith("bias"):
            values = 0.5 * values
        elif "_proj" in name:
            stacked = values.flatten(0, -3) if values.ndim > 2 else values[None]
            for expert in stacked:
                members = 2 if name.endswith("experts.gate_up_proj") else 1
                for member in expert.chunk(members):
                    make_difficult(member, generator)
        elif name.endswith("mlp.gate.weight"):
            values = 2 * values / parameter.shape[1] ** 0.5
        parameter.copy_(values)


def make_difficult(values, generator):
    """Gives a projection, of random numbers, a size of its own and the difficult cases."""
    size = 0.5 + torch.rand((), generator=generator)
    values *= size / values.shape[1] ** 0.5
    values[0, :16] = 0
    values[1, :16] = -0.0
    values[2, :16] *= 1e-4
    values[3, 16:32] *= 1e-6
    values[4, 5] = 4 * size
    # Sixteenths of the block's largest weight, which are ties between code points.
    values[5, 16:32] = torch.arange(-8, 8) / 8 * size


def stacked_experts(tensors):
    """Returns the tensors with those of all experts of a layer in one, as transformers has them."""
    found, experts = {}, {}
    for name, tensor in tensors.items():
        if not (match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)_proj\.weight", name)):
            found[name] = tensor
            continue
        experts.setdefault(match[1], {})[match[3], int(match[2])] = tensor
    for module, own in experts.items():
        count = 1 + max(number for _, number in own)
        rows = [torch.cat([own["gate", e], own["up", e]]) for e in range(count)]
        found[f"{module}.gate_up_proj"] = torch.stack(rows)
        found[f"{module}.down_proj"] = torch.stack([own["down", e] for e in range(count)])
    return found


def decoded(tensors, dtype):
    """Returns dense tensors: codes times scales in float32, rounded to `dtype`."""
    plain = {}
    for name, value in tensors.items():
        if name.endswith(".weight_packed"):
            prefix = name.removesuffix("_packed")
            rows, columns = value.shape[0], 2 * value.shape[1]
            codes = unpack_fp4_from_uint8(value, rows, columns, dtype=torch.float32)
            scales = tensors[prefix + "_scale"].float() / tensors[prefix + "_global_scale"]
            weight = codes.reshape(rows, -1, 16) * scales[..., None]
            plain[prefix] = weight.reshape(rows, columns).to(dtype).float()
        elif not name.endswith(("_scale", "_global_scale")):
            plain[name] = value.float()
    return stacked_experts(plain)


@torch.no_grad()
def main():
    torch.set_num_threads(1)
    for seed, (name, options) in enumerate(CONFIGS.items()):
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        folder = HERE / f"nvfp4_{name}"
        generator = torch.Generator().manual_seed(seed)
        config = AutoConfig.for_model(**options)
        model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
        randomize(model, generator)
        with tempfile.TemporaryDirectory() as scratch:
            model.save_pretrained(scratch)
            source = load_file(f"{scratch}/model.safetensors")
            model = AutoModelForCausalLM.from_pretrained(scratch, dtype=torch.bfloat16)
            with torch.enable_grad():
                ignored = IGNORED.get(name, ["lm_head"])
                recipe = QuantizationModifier(targets="Linear", scheme="NVFP4A16", ignore=ignored)
                oneshot(model=model, recipe=recipe)
            model.save_pretrained(folder, save_compressed=True)
        for path in folder.iterdir():
            if path.name not in ("config.json", "model.safetensors"):
                path.unlink()
        write_tokenizer(folder, options["vocab_size"])
        save_file(source, folder / "source_bf16.safetensors")

        quantized = load_file(folder / "model.safetensors")
        ids = torch.randint(options["vocab_size"], (12,), generator=generator)
        rounded = decoded(quantized, torch.bfloat16)
        if "moe" not in name:  # transformers cannot read packed experts
            by_library = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
            by_library(ids[None])  # decompresses
            for key, weight in by_library.state_dict().items():
                if key.endswith("_proj.weight"):
                    assert torch.equal(weight.float(), rounded[key]), key
        tensors = {
            "ids": ids.to(torch.int32),
            "logits_bf16": logits_of(config, rounded, ids),
            "logits_float32": logits_of(config, decoded(quantized, torch.float32), ids),
        }
        save_file(tensors, folder / "logits.safetensors")
        largest = (tensors["logits_bf16"] - tensors["logits_float32"]).abs().max().item()
        print(name, json.dumps({"tensors": len(quantized), "rounding moves logits by": largest}))


if __name__ == "__main__":
    main()
