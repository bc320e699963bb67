"""Writes qwen3_5/: a tiny random Qwen3.5 and what transformers computes with it.

The folder is a checkpoint as published on a model hub: config.json with a section for the text and
one for the vision tower, model.safetensors in float32 with a tensor of a vision tower and one of an
MTP head, a tokenizer. Beside it lies outputs.safetensors, of the text model in float32:

    ids_0, ids_1, ids_2      rows of token ids of different lengths
    logits_0, ...            float32 [T, V], of each row alone and without padding
    hidden_0_0, ...          float32 [T, D], of row and layer: the output of each layer
    loss_ids_0, ...          rows that share their first tokens as the completions of a group
    loss_weights             float32, weights of the log-probabilities of a row's tokens
    gradient.NAME            gradient of the weighted log-probabilities of these rows by a parameter

Needs Python 3.12, torch==2.15.0 (CPU), transformers==5.23.0, safetensors==0.8.0:

    python tests/golden/make_qwen3_5.py
"""

import json
import pathlib

import torch
from safetensors.torch import load_file, save_file
from tiny_tokenizer import write_tokenizer
from transformers import AutoModelForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

HERE = pathlib.Path(__file__).parent
# A row longer than a chunk of 64 tokens, one that ends inside of the convolution's window.
LENGTHS = (3, 150, 67)
# The group of the packed buffer: tokens of the prompt, and of each completion.
PROMPT, COMPLETIONS = 70, (2, 64, 9)
# Parameters whose gradients are kept.
GRADIENTS = (
    "layers.0.linear_attn.in_proj_qkv.weight",
    "layers.0.linear_attn.in_proj_z.weight",
    "layers.0.linear_attn.in_proj_b.weight",
    "layers.0.linear_attn.in_proj_a.weight",
    "layers.0.linear_attn.out_proj.weight",
    "layers.0.linear_attn.conv1d.weight",
    "layers.0.linear_attn.A_log",
    "layers.0.linear_attn.dt_bias",
    "layers.0.linear_attn.norm.weight",
    "layers.0.input_layernorm.weight",
    "layers.1.linear_attn.in_proj_qkv.weight",
    "layers.2.self_attn.q_proj.weight",
    "layers.2.self_attn.k_proj.weight",
    "layers.2.self_attn.q_norm.weight",
    "layers.2.self_attn.o_proj.weight",
    "layers.2.mlp.gate_proj.weight",
)

TEXT = {
    "attention_bias": False,
    "attn_output_gate": True,
    "dtype": "float32",
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 12,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 256,
    "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "output_gate_type": "swish",
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [1, 1, 0],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000.0,
        "rope_type": "default",
    },
    "vocab_size": 96,
}
CONFIG = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": TEXT,
    "tie_word_embeddings": False,
    "vision_config": {"depth": 1, "hidden_size": 8, "model_type": "qwen3_5_vision"},
}


def randomize(model, generator):
    """Fills every parameter so that no term of the forward pass is neutral."""
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if name.endswith("linear_attn.norm.weight"):
            values = 1 + 0.5 * values
        elif "norm" in name:
            values = 0.5 * values  # the scale less 1
        elif name.endswith("A_log"):
            # Decays of a token between almost none and almost all of the state.
            values = values - 1
        elif name.endswith(("dt_bias", "conv1d.weight")):
            values = 0.5 * values
        elif "embed_tokens" not in name:
            values = values / parameter.shape[1] ** 0.5
        parameter.data.copy_(values)


def packed_rows(generator):
    """Returns the rows of a group: the same prompt before completions of different lengths."""
    prompt = torch.randint(TEXT["vocab_size"], (PROMPT,), generator=generator)
    for length in COMPLETIONS:
        yield torch.cat([prompt, torch.randint(TEXT["vocab_size"], (length,), generator=generator)])


def main():
    torch.set_num_threads(1)
    folder = HERE / "qwen3_5"
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(5)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**TEXT))
    randomize(model, generator)
    state = {
        name.replace("model.", "model.language_model.", 1): tensor.contiguous()
        for name, tensor in model.state_dict().items()
    }
    state["model.visual.patch_embed.proj.weight"] = torch.zeros(4)
    state["mtp.fc.weight"] = torch.zeros(4)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    write_tokenizer(folder, TEXT["vocab_size"])

    # transformers reads the text model of the folder as we do.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    loaded = {name.replace("model.", "model.language_model.", 1) for name in model.state_dict()}
    assert loaded <= set(load_file(folder / "model.safetensors"))
    tensors = {}
    with torch.no_grad():
        for row, length in enumerate(LENGTHS):
            ids = torch.randint(TEXT["vocab_size"], (length,), generator=generator)
            tensors[f"ids_{row}"] = ids.to(torch.int32)
            states = []
            hooks = [
                layer.register_forward_hook(lambda _, __, out, states=states: states.append(out))
                for layer in model.model.layers
            ]
            tensors[f"logits_{row}"] = model(ids[None]).logits[0].contiguous()
            for hook in hooks:
                hook.remove()
            for layer, hidden in enumerate(states):
                tensors[f"hidden_{row}_{layer}"] = hidden[0].contiguous()
    rows = list(packed_rows(generator))
    weights = torch.rand(max(COMPLETIONS), generator=generator) - 0.3
    tensors["loss_weights"] = weights
    total = torch.zeros(())
    for number, ids in enumerate(rows):
        tensors[f"loss_ids_{number}"] = ids.to(torch.int32)
        logprobs = torch.log_softmax(model(ids[None]).logits[0], dim=-1)[PROMPT - 1 : -1]
        taken = logprobs.gather(1, ids[PROMPT:, None])[:, 0]
        total = total + (weights[: len(taken)] * taken).sum()
    total.backward()
    tensors["loss"] = total.detach()
    parameters = dict(model.model.named_parameters())
    tensors |= {f"gradient.{name}": parameters[name].grad.contiguous() for name in GRADIENTS}
    save_file(tensors, folder / "outputs.safetensors")
    print("loss", total.item())


if __name__ == "__main__":
    main()
