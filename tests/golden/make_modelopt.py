"""Writes modelopt_*/: tiny NVFP4 checkpoints of NVIDIA's ModelOpt, and their dequantized weights.

Each folder is a checkpoint as ModelOpt exports it (config.json, hf_quant_config.json,
model.safetensors) from the bfloat16 model in nvfp4_*/source_bf16.safetensors, with a tokenizer and
expected.safetensors: every projection as ModelOpt dequantizes it, in float32 and under its own
name, `ids` [T], and the float32 `logits` [T, V] that transformers computes from these weights.

- modelopt_qwen2: tied head; 4-bit activations (their input_scale is stored) and an FP8 KV cache.
- modelopt_qwen3: 4-bit activations; the MLP of layer 1 is excluded and stays in bfloat16.
- modelopt_llama: weights alone.

Needs Python 3.11, torch==2.13.0 (CPU), nvidia-modelopt==0.47.0, transformers==5.19.0, requests,
accelerate==1.15.0, safetensors==0.8.0:

    python tests/golden/make_modelopt.py
"""

import copy
import json
import pathlib
import tempfile

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from safetensors.torch import load_file, save_file
from shared import logits_of
from tiny_tokenizer import write_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

HERE = pathlib.Path(__file__).parent
EXCLUDED = {"quantizer_name": "*layers.1.mlp*", "enable": False}
RECIPES = {
    "qwen2": (mtq.NVFP4_DEFAULT_CFG, mtq.FP8_KV_CFG["quant_cfg"]),
    "qwen3": (mtq.NVFP4_DEFAULT_CFG, [EXCLUDED]),
    "llama": (mtq.W4A16_NVFP4_CFG, []),
}


def write_source(folder, name):
    """Writes the bfloat16 model from which the NVFP4 goldens of llm-compressor were made."""
    config = json.loads((HERE / f"nvfp4_{name}" / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    source = load_file(HERE / f"nvfp4_{name}" / "source_bf16.safetensors")
    save_file(source, folder / "model.safetensors", metadata={"format": "pt"})


def dequantized(tensors):
    """Returns every packed projection as ModelOpt dequantizes it."""
    weights = {}
    for name, scale_2 in tensors.items():
        if not name.endswith(".weight_scale_2"):
            continue
        weight = name.removesuffix("_scale_2")
        packed = tensors[weight]
        shape = torch.Size((packed.shape[0], 2 * packed.shape[1]))
        weights[weight] = NVFP4QTensor(shape, torch.float32, packed).dequantize(
            dtype=torch.float32,
            scale=tensors[f"{weight}_scale"],
            double_scale=scale_2,
            block_sizes={-1: 16},
        )
    return weights


@torch.no_grad()
def main():
    torch.set_num_threads(1)
    for seed, (name, (recipe, changes)) in enumerate(RECIPES.items()):
        folder = HERE / f"modelopt_{name}"
        generator = torch.Generator().manual_seed(seed)
        recipe = copy.deepcopy(recipe)
        recipe["quant_cfg"] = [*recipe["quant_cfg"], *changes]
        with tempfile.TemporaryDirectory() as scratch:
            write_source(pathlib.Path(scratch), name)
            model = AutoModelForCausalLM.from_pretrained(scratch, dtype=torch.bfloat16)
        calibration = torch.randint(64, (4, 16), generator=generator)
        model = mtq.quantize(model, recipe, lambda model, ids=calibration: model(ids))
        export_hf_checkpoint(model, export_dir=folder)
        (folder / "generation_config.json").unlink()
        write_tokenizer(folder, 64)

        tensors = load_file(folder / "model.safetensors")
        weights = dequantized(tensors)
        plain = {
            key: value.float()
            for key, value in tensors.items()
            if not key.endswith(("_scale", "_scale_2")) and value.dtype != torch.uint8
        }
        ids = torch.randint(64, (12,), generator=generator)
        config = AutoConfig.from_pretrained(folder)
        del config.quantization_config
        expected = {
            "ids": ids.to(torch.int32),
            "logits": logits_of(config, plain | weights, ids),
        }
        save_file(weights | expected, folder / "expected.safetensors")
        print(name, json.dumps({"tensors": len(tensors), "packed": len(weights)}))


if __name__ == "__main__":
    main()
