"""Steps that several generators share; each imports what its stage has."""

import pathlib


def save_random_adapter(folder, rng, config, *, size, base_model):
    """Writes an adapter of random numbers of all projections, in the project's environment."""
    import numpy as np

    from qerl_jax.policy.layers.kinds import projection_shapes
    from qerl_jax.policy.lora import Lora, LoraConfig
    from qerl_jax.policy.trainable import Trainable
    from qerl_jax.weights.peft import save_peft_adapter

    lora_config = LoraConfig(rank=4, alpha=8.0)
    layers = [
        {
            projection: {
                "a": rng.standard_normal((4, k), np.float32) / np.float32(k**0.5),
                "b": rng.standard_normal((n, 4), np.float32) * np.float32(size),
            }
            for projection, (n, k) in projection_shapes(config).items()
        }
        for _ in range(config.num_layers)
    ]
    trainable = Trainable(lora=Lora(layers=layers, scale=lora_config.scale), params={})
    save_peft_adapter(folder, trainable, lora_config, base_model=base_model)


def read_decompressed(path: pathlib.Path):
    """A model of transformers, in float32 after compressed-tensors has decompressed it."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    model(torch.ones((1, 1), dtype=torch.long))  # decompresses
    return torch.nn.Module.float(model)  # the method of a quantized model refuses


def greedy(model, prompt: list[int], new_tokens: int) -> dict:
    """Greedy tokens, and at each step the best logit less the second best."""
    import torch

    ids = torch.tensor([prompt])
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=new_tokens,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack([logits[0].topk(2).values for logits in output.logits])
    margins = [round(m, 5) for m in (best[:, 0] - best[:, 1]).tolist()]
    print(len(prompt), "smallest margin", min(margins))
    return {"tokens": output.sequences[0, ids.shape[1] :].tolist(), "margins": margins}


def logits_of(config, tensors, ids):
    """Logits [T, V] of a model of transformers with these float32 weights."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model(ids[None]).logits[0].contiguous()
