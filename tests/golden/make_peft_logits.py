"""Writes peft_logits/: PEFT adapters of the model in logits_qwen2/, and the adapted logits.

plain/, rslora/ and norms/ are folders that PEFT saved (rank 4, alpha 8, all seven projections, B
not zero); only the order of target_modules and the name of the base are made reproducible. norms/
also holds the norms of the layers (modules_to_save), which differ from those of the base.
logits.safetensors holds `ids` [T] and float32 logits [T, V] under the names of the folders.

Needs Python 3.11, torch==2.13.0 (CPU), transformers==5.23.0, peft==0.21.2, safetensors==0.8.0, and
logits_qwen2/ (make_logits.py):

    python tests/golden/make_peft_logits.py
"""

import json
import pathlib

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

HERE = pathlib.Path(__file__).parent
BASE = HERE / "logits_qwen2"
FOLDER = HERE / "peft_logits"
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
NORMS = ["input_layernorm", "post_attention_layernorm"]


def base_model():
    return AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)


@torch.no_grad()
def main():
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(96, (13,), generator=generator)
    tensors = {"ids": ids.to(torch.int32)}
    for name in ("plain", "rslora", "norms"):
        config = LoraConfig(
            r=4,
            lora_alpha=8,
            use_rslora=name == "rslora",
            target_modules=TARGETS,
            task_type="CAUSAL_LM",
            modules_to_save=NORMS if name == "norms" else None,
        )
        model = get_peft_model(base_model(), config)
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                size = 0.1 if "lora_B" in key else parameter.shape[1] ** -0.5
                parameter.copy_(size * torch.randn(parameter.shape, generator=generator))
            elif parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        folder = FOLDER / name
        model.save_pretrained(folder)
        (folder / "README.md").unlink(missing_ok=True)
        path = folder / "adapter_config.json"
        written = json.loads(path.read_text())
        written["target_modules"].sort()
        written["base_model_name_or_path"] = BASE.name
        path.write_text(json.dumps(written, indent=2, sort_keys=True))

        base = base_model()
        without = base(ids[None]).logits[0]
        model = PeftModel.from_pretrained(base, folder).eval()
        tensors[name] = model(ids[None]).logits[0].contiguous()
        print(name, "the adapter moves logits by", (tensors[name] - without).abs().max().item())
    save_file(tensors, FOLDER / "logits.safetensors")


if __name__ == "__main__":
    main()
