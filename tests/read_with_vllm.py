"""Reads exports as vLLM does, on a CPU; run by test_vllm_readers.py under a Python that has vLLM.

    python tests/read_with_vllm.py adapter FOLDER MAX_LORA_RANK
    python tests/read_with_vllm.py checkpoint FOLDER
    python tests/read_with_vllm.py experts FOLDER MAX_LORA_RANK COUNT IS_3D_LORA_WEIGHT
    python tests/read_with_vllm.py names FOLDER COUNT
    python tests/read_with_vllm.py weights FOLDER

Prints one JSON object: for an adapter its options and the shapes of each module's A and B, for a
checkpoint the quantization that vLLM detects; for an adapter of a number of routed experts also A
and the scaled B of gate, down and up [E, ., .] by the name of a layer; for the names of a
checkpoint the parameters of routed experts that they fill, with the expert and the shard. Weights
in NVFP4 go dequantized, as vLLM multiplies by them without a kernel, to FOLDER/weights.npz.
"""

import json
import pathlib
import sys
import types

import numpy as np
import safetensors
import torch
from vllm.config.lora import LoRAConfig
from vllm.lora import lora_model
from vllm.lora.lora_weights import PackedLoRALayerWeights
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.utils import nvfp4_emulation_utils as nvfp4

MODULES = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
)


def load_adapter(folder, max_lora_rank, modules):
    helper = PEFTHelper.from_local_dir(str(folder), max_position_embeddings=None)
    helper.validate_legal(LoRAConfig(max_lora_rank=max_lora_rank))
    lora_model.PIN_MEMORY = False  # pinned memory needs a GPU
    model = lora_model.LoRAModel.from_local_checkpoint(
        str(folder), {*MODULES, *modules}, helper, lora_model_id=1, device="cpu",
        dtype=torch.float32,
    )  # fmt: skip
    return helper, model


def read_adapter(folder, max_lora_rank):
    helper, model = load_adapter(folder, max_lora_rank, ())
    return {
        "rank": helper.r,
        "scale": helper.vllm_lora_scaling_factor,
        "modules": {
            name: [list(weights.lora_a.shape), list(weights.lora_b.shape)]
            for name, weights in model.loras.items()
        },
    }


def expert_mapping(count, **options):
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    return RoutedExperts.build_expert_params_mapping(
        "gate_proj", "down_proj", "up_proj", count, **options
    )


def read_experts(folder, max_lora_rank, count, stacked):
    """What `LoRAModelManager` makes of the adapters of experts, and `FusedMoEWithLoRA` takes."""
    from vllm.lora.model_manager import LoRAModelManager

    replaced = [name.rstrip(".") for _, name, *_ in expert_mapping(count)]
    _, model = load_adapter(folder, max_lora_rank, {"experts", *replaced})
    layers = {name.partition(".experts")[0] for name in model.loras if ".experts" in name}
    config = types.SimpleNamespace(architectures=["Qwen3_5MoeForCausalLM"])
    manager = types.SimpleNamespace(
        model=types.SimpleNamespace(config=config),
        _get_lora_layer_weights=lambda lora, name: lora.get_lora(name),
        _pop_lora_weights=lambda lora, names: None,
    )
    module = types.SimpleNamespace(local_num_experts=count, global_num_experts=count, ep_rank=0)
    found = {}
    for layer in sorted(layers):
        name = f"{layer}.experts"
        if stacked:
            for pair in (model.loras[name], model.loras[f"{name}.base_layer"]):
                pair.optimize()
            LoRAModelManager._convert_3d_to_2d_moe_lora(manager, model, module, name)
            packed = model.loras[name]
        else:
            parts = [model.get_lora(f"{layer}.{part}") for part in replaced]
            packed = PackedLoRALayerWeights.pack_moe(parts, name)
            packed.optimize()
        pairs = zip(packed.lora_a, packed.lora_b, strict=True)
        found[layer] = [[a.tolist(), b.tolist()] for a, b in pairs]
    return found


def read_names(folder, count):
    """The parameters that the tensors of routed experts fill, as `RoutedExperts.load_weights`."""
    found = {}
    with safetensors.safe_open(folder / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            if ".experts." not in name:
                continue
            is_fused = len(file.get_slice(name).get_shape()) == 3
            mapping = expert_mapping(count, include_fused=is_fused)
            found[name] = [
                [name.replace(part, param).rpartition("routed_experts.")[2], expert, shard]
                for param, part, expert, shard in mapping
                if part in name
            ]
    return found


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


def read_weights(folder):
    """Dequantizes as `CompressedTensorsW4A16Fp4` does, with the inverse of the global scale."""
    found = {}
    with safetensors.safe_open(folder / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            module, packed, _ = name.partition(".weight_packed")
            if packed:
                divisor = file.get_tensor(f"{module}.weight_global_scale")
                codes, scales = file.get_tensor(name), file.get_tensor(f"{module}.weight_scale")
                weight = nvfp4.dequantize_to_dtype(
                    codes, scales, 1 / divisor, torch.float32, block_size=16, swizzle=False
                )
                found[module] = weight.numpy()
    np.savez(folder / "weights.npz", **found)
    return len(found)


if __name__ == "__main__":
    kind, folder, *numbers = sys.argv[1], pathlib.Path(sys.argv[2]), *map(int, sys.argv[3:])
    readers = {
        "adapter": read_adapter,
        "checkpoint": read_checkpoint,
        "experts": read_experts,
        "names": read_names,
        "weights": read_weights,
    }
    print(json.dumps(readers[kind](folder, *numbers)))
