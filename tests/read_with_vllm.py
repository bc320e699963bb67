"""Reads exports as vLLM does, on a CPU; run by test_vllm_readers.py under a Python that has vLLM.

    python tests/read_with_vllm.py adapter FOLDER MAX_LORA_RANK
    python tests/read_with_vllm.py checkpoint FOLDER

Prints one JSON object: for an adapter its options and the shapes of each module's A and B, for a
checkpoint the quantization that vLLM detects.
"""

import json
import pathlib
import sys

import torch
from vllm.config.lora import LoRAConfig
from vllm.lora import lora_model
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def read_adapter(folder, max_lora_rank):
    helper = PEFTHelper.from_local_dir(str(folder), max_position_embeddings=None)
    helper.validate_legal(LoRAConfig(max_lora_rank=max_lora_rank))
    lora_model.PIN_MEMORY = False  # pinned memory needs a GPU
    model = lora_model.LoRAModel.from_local_checkpoint(
        str(folder), set(MODULES), helper, lora_model_id=1, device="cpu", dtype=torch.float32
    )
    return {
        "rank": helper.r,
        "scale": helper.vllm_lora_scaling_factor,
        "modules": {
            name: [list(weights.lora_a.shape), list(weights.lora_b.shape)]
            for name, weights in model.loras.items()
        },
    }


def read_checkpoint(folder):
    hf = json.loads((folder / "config.json").read_text())
    config = CompressedTensorsConfig.from_config(hf["quantization_config"])
    layer = torch.nn.Linear(1, 1)
    layer_name = "model.layers.0.self_attn.q_proj"
    scheme = config.get_scheme_dict(layer, layer_name)
    return {
        "name": config.get_name(),
        "nvfp4": config._is_nvfp4_format(scheme["weights"]),
        "activations": scheme["input_activations"],
        "format": scheme["format"],
        "head": config.get_scheme_dict(layer, "lm_head"),
    }


if __name__ == "__main__":
    kind, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    found = read_adapter(folder, int(sys.argv[3])) if kind == "adapter" else read_checkpoint(folder)
    print(json.dumps(found))
