"""Writes logits_*/: tiny random models and the logits that transformers computes for them.

Each folder is a checkpoint as published on a model hub (config.json, model.safetensors in float32,
a tokenizer) plus logits.safetensors: `ids_0`, `ids_1`, `ids_2` of different lengths and float32
`logits_0`... [T, V], computed for each row separately and without padding.

Needs Python 3.11, torch==2.13.0 (CPU), transformers==5.23.0, safetensors==0.8.0:

    python tests/golden/make_logits.py [NAME ...]

Without a name it writes all folders.
"""

import json
import pathlib
import sys

import torch
from safetensors.torch import save_file
from tiny_tokenizer import write_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

HERE = pathlib.Path(__file__).parent
LENGTHS = (5, 17, 11)

COMMON = {
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 80,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "torch_dtype": "float32",
    "vocab_size": 96,
}
CONFIGS = {
    "qwen2": COMMON
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "max_window_layers": 2,
        "model_type": "qwen2",
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 256,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
    # head_dim is not hidden_size / num_attention_heads.
    "qwen3": COMMON
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 16,
        "max_window_layers": 2,
        "model_type": "qwen3",
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
    },
    # Llama 3's scaling keeps the first of the four rotary wavelengths (6, 30, 140, 660 positions),
    # blends the second and divides the frequency of the last two.
    "llama3": COMMON
    | {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "mlp_bias": False,
        "model_type": "llama",
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 64,
            "rope_type": "llama3",
        },
        "rope_theta": 500.0,
        "tie_word_embeddings": False,
    },
    # config.json has the form that transformers 5 writes.
    "llama_tied": COMMON
    | {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "dtype": "float32",
        "head_dim": 8,
        "mlp_bias": False,
        "model_type": "llama",
        "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
        "tie_word_embeddings": True,
    },
    # As Mistral-Nemo: head_dim is not hidden_size / num_attention_heads, and there is no window.
    "mistral": COMMON
    | {
        "architectures": ["MistralForCausalLM"],
        "head_dim": 16,
        "model_type": "mistral",
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
}


def randomize(model, generator):
    """Fills every parameter so that no term of the forward pass is neutral."""
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            values = 1 + 0.5 * values
        elif name.endswith("bias"):
            values = 0.5 * values
        elif "embed_tokens" not in name:
            values = 1.5 * values / parameter.shape[1] ** 0.5
        parameter.copy_(values)


@torch.no_grad()
def main():
    torch.set_num_threads(1)
    for seed, (name, config) in enumerate(CONFIGS.items()):
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        folder = HERE / f"logits_{name}"
        generator = torch.Generator().manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        randomize(model, generator)
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        write_tokenizer(folder, config["vocab_size"])

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        tensors, largest = {}, 0.0
        for row, length in enumerate(LENGTHS):
            ids = torch.randint(config["vocab_size"], (length,), generator=generator)
            tensors[f"ids_{row}"] = ids.to(torch.int32)
            logits = model(ids[None]).logits[0].contiguous()
            tensors[f"logits_{row}"] = logits
            largest = max(largest, logits.abs().max().item())
        save_file(tensors, folder / "logits.safetensors")
        print(name, "largest logit", largest)


if __name__ == "__main__":
    main()
