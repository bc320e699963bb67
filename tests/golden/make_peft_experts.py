"""Writes peft_experts/: PEFT adapters of the mixtures of make_experts.py, and the adapted logits.

Of each model FAMILY/default is an adapter of the targets that a mixture has by default, and
FAMILY/stacked one that also changes its routed experts (target_parameters); both are folders that
PEFT saved, with B not zero. FAMILY/logits.safetensors holds `ids` [T] and float32 logits [T, V]
under the names of the folders. The script shows as well which layout PEFT reads of a file with a
tensor for each expert: of Qwen3-MoE the same adapter, of the others one without its experts.

Needs Python 3.12, torch==2.15.0 (CPU), transformers==5.24.0, peft==0.21.2, safetensors==0.8.0:

    python tests/golden/make_peft_experts.py
"""

import json
import pathlib
import tempfile

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

HERE = pathlib.Path(__file__).parent
FOLDER = HERE / "peft_experts"
RANK, ALPHA = 2, 4
TARGETS = {
    "qwen3_moe": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "qwen3_5_moe": [
        *("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj"),
        *("shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj"),
    ],
    "gpt_oss": ["q_proj", "k_proj", "v_proj", "o_proj"],
}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def base_model(family):
    options = {"dtype": torch.float32, "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(HERE / family, **options).eval()


def per_expert(folder, out, count):
    """Writes a stacked adapter with a pair of matrices for each projection of an expert."""
    found = {}
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        root, is_expert, rest = name.partition(".experts.")
        if not is_expert:
            found[name] = tensor
            continue
        matrix = rest.removesuffix(".weight")[-1]
        members = ("gate_proj", "up_proj") if "base_layer" in rest else ("down_proj",)
        for e in range(count):
            own = tensor.reshape(count, RANK, -1)[e]
            if matrix == "B":
                own = tensor.reshape(len(tensor), RANK, count)[..., e]
            parts = own.chunk(len(members)) if matrix == "B" else [own] * len(members)
            for member, part in zip(members, parts, strict=True):
                found[f"{root}.experts.{e}.{member}.lora_{matrix}.weight"] = part.clone()
    save_file(found, out / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    config["target_parameters"] = None
    config["target_modules"] += ["gate_proj", "up_proj", "down_proj"]
    (out / "adapter_config.json").write_text(json.dumps(config))


@torch.no_grad()
def main():
    torch.set_num_threads(1)
    for seed, (family, targets) in enumerate(TARGETS.items()):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(90, (13,), generator=generator)
        tensors = {"ids": ids.to(torch.int32)}
        for name, parameters in (("default", None), ("stacked", EXPERTS)):
            config = LoraConfig(
                r=RANK,
                lora_alpha=ALPHA,
                target_modules=targets,
                target_parameters=parameters,
                task_type="CAUSAL_LM",
            )
            model = get_peft_model(base_model(family), config)
            for key, parameter in model.named_parameters():
                if "lora_" in key:
                    size = 0.2 if "lora_B" in key else parameter.shape[1] ** -0.5
                    parameter.copy_(size * torch.randn(parameter.shape, generator=generator))
            folder = FOLDER / family / name
            model.save_pretrained(folder)
            (folder / "README.md").unlink(missing_ok=True)
            path = folder / "adapter_config.json"
            written = json.loads(path.read_text())
            written["target_modules"].sort()
            written["base_model_name_or_path"] = family
            path.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")
            again = PeftModel.from_pretrained(base_model(family), folder)
            tensors[name] = again(ids[None]).logits[0].contiguous()
            assert torch.equal(tensors[name], model(ids[None]).logits[0])
        with tempfile.TemporaryDirectory() as scratch:
            per_expert(folder, pathlib.Path(scratch), 8)
            again = PeftModel.from_pretrained(base_model(family), scratch)
            difference = (again(ids[None]).logits[0] - tensors["stacked"]).abs().max().item()
            assert (difference < 1e-4) == (family == "qwen3_moe"), difference
        save_file(tensors, FOLDER / family / "logits.safetensors")
        effect = (tensors["stacked"] - tensors["default"]).abs().max().item()
        print(family, json.dumps({"per expert": difference, "effect": effect}))


if __name__ == "__main__":
    main()
