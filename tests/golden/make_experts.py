"""Writes qwen3_moe/, qwen3_5_moe/ and gpt_oss/: tiny random mixtures, and transformers' results.

The folders are checkpoints as published on a model hub, in float32: of Qwen3-MoE with a tensor for
each projection of each expert, of Qwen3.5-MoE with all experts of a layer in one tensor, below the
names of a model with a vision tower. gpt_oss_mxfp4/ is gpt_oss/ as it is published, with experts
in MXFP4: random blocks, whose values gpt_oss/ has. Next to them is outputs.safetensors, with

    ids_0, ids_1             rows of token ids of different lengths
    logits_0, ...            float32 [T, V], of each row alone
    hidden_0_0, ...          float32 [T, D], of row and layer: the output of each layer
    routes_0_0, ...          int32 [T, k], of row and layer: the experts, the likeliest first
    plain_logits_0           of Qwen3-MoE: the logits with norm_topk_prob=false
    loss_ids_0, ...          rows that share their first tokens as the completions of a group
    loss_weights, loss, gradient.NAME     as in make_qwen3_5.py

and next to those of gpt_oss long.safetensors: its weights with the rotation, the window and the
limit of gpt-oss-20b, whose YaRN begins with 4,096 positions, and a longer row:

    ids [T], positions [P], logits [P, V]     logits at some positions

Needs Python 3.12, torch==2.15.0 (CPU), transformers==5.24.0, safetensors==0.8.0:

    python tests/golden/make_experts.py
"""

import json
import pathlib

import torch
from safetensors.torch import save_file
from tiny_tokenizer import write_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

HERE = pathlib.Path(__file__).parent
VOCAB, LENGTHS = 96, (3, 40)
PROMPT, COMPLETIONS = 9, (2, 14, 5)
EXPERTS = {
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
COMMON = EXPERTS | {
    "attention_bias": False,
    "dtype": "float32",
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 32,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "vocab_size": VOCAB,
}
CONFIGS = {
    "qwen3_moe": COMMON
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "intermediate_size": 48,
        "max_window_layers": 2,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "norm_topk_prob": True,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "qwen3_5_moe": {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": COMMON
        | {
            "attn_output_gate": True,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_value_head_dim": 12,
            "mamba_ssm_dtype": "float32",
            "model_type": "qwen3_5_moe_text",
            "mtp_num_hidden_layers": 1,
            "partial_rotary_factor": 0.25,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [1, 1, 0],
                "partial_rotary_factor": 0.25,
                "rope_theta": 10000.0,
                "rope_type": "default",
            },
            "shared_expert_intermediate_size": 32,
        },
        "tie_word_embeddings": False,
        "vision_config": {"depth": 1, "hidden_size": 8, "model_type": "qwen3_5_moe_vision"},
    },
    # Rows are shorter and longer than the window, and than the context before YaRN. Most of gate
    # and up are beyond the limit.
    "gpt_oss": COMMON
    | {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "experts_per_token": 3,
        "intermediate_size": 64,
        "layer_types": ["sliding_attention", "full_attention"],
        "max_position_embeddings": 128,
        "model_type": "gpt_oss",
        "num_local_experts": 8,
        "rope_scaling": {
            "beta_fast": 4.0,
            "beta_slow": 1.0,
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150.0,
        "sliding_window": 6,
        "swiglu_limit": 0.7,
    },
}
LONG = {
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000.0,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
}
MXFP4 = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}


def random_values(name, shape, generator, *, centered):
    """Values of a parameter with which no term of the forward pass is neutral."""
    values = torch.randn(shape, generator=generator)
    if name.endswith("linear_attn.norm.weight") or ("norm" in name and not centered):
        return 1 + 0.5 * values
    if "norm" in name or name.endswith(("bias", "conv1d.weight")):
        return 0.5 * values
    if name.endswith("sinks"):
        return values
    if name.endswith("A_log"):
        return values - 1
    return values if "embed_tokens" in name else values / shape[-1] ** 0.5


def in_blocks(state, generator):
    """Gives the experts of gpt-oss the values of random MXFP4, and returns the state with that."""
    packed = dict(state)
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = packed.pop(name).shape
        shape = experts, outputs, inputs // 32
        blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 125, shape, generator=generator, dtype=torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        state[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        assert state[name].shape == (experts, inputs, outputs)
    return packed


def as_published(family, state):
    """The tensors of a model as its family is published."""
    published = {}
    for name, tensor in state.items():
        if family == "gpt_oss":
            published[name] = tensor.contiguous()
        elif family == "qwen3_5_moe":
            published[name.replace("model.", "model.language_model.", 1)] = tensor.contiguous()
        elif ".experts." not in name:
            published[name] = tensor
        else:
            block, _, weight = name.rpartition(".")
            for number, expert in enumerate(tensor):
                halves = expert.chunk(2) if weight == "gate_up_proj" else [expert]
                members = ("gate_proj", "up_proj") if len(halves) == 2 else ("down_proj",)
                for member, half in zip(members, halves, strict=True):
                    published[f"{block}.{number}.{member}.weight"] = half.contiguous()
    if family == "qwen3_5_moe":
        published["model.visual.patch_embed.proj.weight"] = torch.zeros(4)
        published["mtp.fc.weight"] = torch.zeros(4)
    return published


def outputs_of(model, generator):
    """What transformers computes for rows, and the gradients of a group's log-probabilities."""
    tensors, found = {}, {}
    for number, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda _, __, out, n=number: found.update({f"hidden_{n}": out}))
        router = layer.mlp.gate if hasattr(layer.mlp, "gate") else layer.mlp.router
        router.register_forward_hook(
            lambda _, __, out, n=number: found.update({f"routes_{n}": out[2]})
        )
    with torch.no_grad():
        for row, length in enumerate(LENGTHS):
            ids = torch.randint(VOCAB, (length,), generator=generator)
            tensors[f"ids_{row}"] = ids.to(torch.int32)
            tensors[f"logits_{row}"] = model(ids[None]).logits[0].contiguous()
            for name, value in found.items():
                kind, layer = name.split("_")
                value = value.to(torch.int32) if kind == "routes" else value[0]
                tensors[f"{kind}_{row}_{layer}"] = value.contiguous()
    prompt = torch.randint(VOCAB, (PROMPT,), generator=generator)
    weights = torch.rand(max(COMPLETIONS), generator=generator) - 0.3
    tensors["loss_weights"], total = weights, torch.zeros(())
    for number, length in enumerate(COMPLETIONS):
        ids = torch.cat([prompt, torch.randint(VOCAB, (length,), generator=generator)])
        tensors[f"loss_ids_{number}"] = ids.to(torch.int32)
        logprobs = torch.log_softmax(model(ids[None]).logits[0], dim=-1)[PROMPT - 1 : -1]
        taken = logprobs.gather(1, ids[PROMPT:, None])[:, 0]
        total = total + (weights[:length] * taken).sum()
    total.backward()
    tensors["loss"] = total.detach()
    for name, parameter in model.model.named_parameters():
        frozen = ".experts.", ".gate.", ".router.", ".sinks"
        if not any(part in f"{name}." for part in frozen):  # in training
            tensors[f"gradient.{name}"] = parameter.grad.contiguous()
    return tensors


def write_long_row(folder):
    """Writes long.safetensors."""
    config = AutoConfig.for_model(**(CONFIGS["gpt_oss"] | LONG))
    options = {"dtype": torch.float32, "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, **options).eval()
    ids = torch.randint(VOCAB, (4300,), generator=torch.Generator().manual_seed(7))
    positions = torch.cat([torch.arange(99, 4200, 300), torch.arange(4230, 4300)])
    with torch.no_grad():
        logits = model(ids[None]).logits[0, positions].contiguous()
    tensors = {"ids": ids.to(torch.int32), "positions": positions.to(torch.int32)}
    save_file(tensors | {"logits": logits}, folder / "long.safetensors")


def main():
    torch.set_num_threads(1)
    for seed, (family, config) in enumerate(CONFIGS.items()):
        folder = HERE / family
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        write_tokenizer(folder, VOCAB)
        generator = torch.Generator().manual_seed(seed)
        options = {"dtype": torch.float32, "experts_implementation": "eager"}
        # The classes and their configs are those that transformers takes for the folder.
        text = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder).get_text_config(),
            **options,
        )
        state = {
            name: random_values(name, tensor.shape, generator, centered=family != "qwen3_moe")
            for name, tensor in text.state_dict().items()
        }
        if family == "gpt_oss":
            packed_folder = HERE / f"{family}_mxfp4"
            packed_folder.mkdir(exist_ok=True)
            own = config | {"quantization_config": MXFP4}
            (packed_folder / "config.json").write_text(json.dumps(own, indent=2) + "\n")
            write_tokenizer(packed_folder, VOCAB)
            packed = {name: x.contiguous() for name, x in in_blocks(state, generator).items()}
            save_file(packed, packed_folder / "model.safetensors", metadata={"format": "pt"})
        published = as_published(family, state)
        save_file(published, folder / "model.safetensors", metadata={"format": "pt"})
        model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
        assert all(torch.equal(model.state_dict()[name], state[name]) for name in state)
        tensors = outputs_of(model, generator)
        if family == "qwen3_moe":
            model.config.norm_topk_prob = False
            for layer in model.model.layers:
                layer.mlp.gate.norm_topk_prob = False
            with torch.no_grad():
                logits = model(tensors["ids_0"][None].long()).logits[0]
            assert not torch.allclose(logits, tensors["logits_0"])
            tensors["plain_logits_0"] = logits.contiguous()
        save_file(tensors, folder / "outputs.safetensors")
        if family == "gpt_oss":
            write_long_row(folder)
        print(family, "loss", tensors["loss"].item())


if __name__ == "__main__":
    main()
