r"""Measures the update of transformers + PEFT: a policy gradient of a LoRA adapter on full rows.

    python -m benchmarks.peers.update --model=qwen2.5-7b --folder=7b --ours=ours.json
    python -m benchmarks.peers.update --model=qwen2.5-7b --format=nf4 --folder=7b --ours=...

It needs torch 2.11.0, transformers 5.17.0 and peft 0.21.2, and with --format=nf4 (QLoRA)
bitsandbytes 0.50.2. An update processes --rows rows of --prompt and --new-tokens tokens, of which
the completion's are in the loss: forward pass, log-probabilities (in chunks, so that the logits
never lie in memory at once), backward pass, fused AdamW. Weights, activations and the adapter are
in bf16, and attention is fused in PyTorch. The update is tried with each number of rows per pass
(`micro`) that divides --rows, with and without the recomputation of the layers (`checkpointing`).
What does not fit is left out, and the fastest is written. Our row is `benchmarks.step` in NVFP4 at
the same lengths.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.peers import rows
from qerl_jax.commands import cli

_REQUIREMENTS = "torch==2.11.0 transformers==5.17.0 peft==0.21.2"
_NF4 = " bitsandbytes==0.50.2 accelerate==1.15.0"
_HEAD_TOKENS = 2048  # tokens whose logits are in memory at a time


def make_parser(
    module: str = "benchmarks.peers.update", description: str | None = __doc__
) -> argparse.ArgumentParser:
    """The arguments of a peer that trains."""
    parser = rows.make_parser(module, description)
    formats = "base weights (default: bf16)"
    parser.add_argument("--format", choices=("bf16", "nf4"), default="bf16", help=formats)
    return parser


def load_policy(arguments: argparse.Namespace) -> Any:
    """A PEFT model on the GPU: linear layers in bf16 or NF4, an adapter of --lora-rank in bf16.

    By default PEFT keeps the adapter of a bf16 base in float32, and converts the input of every
    projection to it. TRL trains the adapter of a quantized base in bf16; here all adapters are.
    """
    import torch  # pyrefly: ignore[missing-import]
    from peft import LoraConfig, get_peft_model  # pyrefly: ignore[missing-import]
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from benchmarks.random_checkpoint import model_folder
    from qerl_jax.policy.lora import PROJECTIONS

    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    model = AutoModelForCausalLM.from_pretrained(
        model_folder(arguments.folder, arguments.model),
        dtype=torch.bfloat16,
        attn_implementation="sdpa",
        device_map={"": 0 if torch.cuda.is_available() else "cpu"},
        **({"quantization_config": quantization} if arguments.format == "nf4" else {}),
    )
    rank = arguments.lora_rank
    adapter = LoraConfig(
        r=rank, lora_alpha=rank, target_modules=list(PROJECTIONS), task_type="CAUSAL_LM"
    )
    model = get_peft_model(model, adapter)
    for value in model.parameters():
        if value.requires_grad:
            value.data = value.data.to(torch.bfloat16)
    return model


def take_update(
    model: Any, optimizer: Any, tokens: Any, advantages: Any, *, prompt: int, micro: int
) -> None:
    """Takes a step along the policy gradient of `tokens` [B, T] with `advantages` [B].

    Each row begins with `prompt` tokens; a forward and backward pass has `micro` rows.
    """
    import torch  # pyrefly: ignore[missing-import]
    from torch.utils.checkpoint import checkpoint  # pyrefly: ignore[missing-import]

    body, head = model.get_base_model().model, model.get_output_embeddings()
    optimizer.zero_grad(set_to_none=True)
    for part, advantage in zip(tokens.split(micro), advantages.split(micro), strict=True):
        hidden = body(input_ids=part, use_cache=False).last_hidden_state[:, prompt - 1 : -1]
        chunks = hidden.flatten(0, 1).split(_HEAD_TOKENS)
        targets = part[:, prompt:].flatten().split(_HEAD_TOKENS)
        logprobs = torch.cat(
            [
                checkpoint(_logprobs, head, chunk, target, use_reentrant=False)
                for chunk, target in zip(chunks, targets, strict=True)
            ]
        ).view(len(part), -1)
        ratio = torch.exp(logprobs - logprobs.detach())
        loss = -(ratio * advantage[:, None]).sum() / (len(tokens) * logprobs.shape[1])
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def _logprobs(head: Any, hidden: Any, targets: Any) -> Any:
    """Log-probabilities [M] of targets [M] after hidden states [M, D]."""
    logits = head(hidden).float()
    return logits.gather(-1, targets[:, None])[:, 0] - logits.logsumexp(-1)


def reset_peak() -> None:
    """Frees what nothing uses any more and begins a new measurement of the peak."""
    import torch  # pyrefly: ignore[missing-import]

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def measured(update: Callable[[], None], steps: int) -> dict[str, float]:
    """The median seconds of an update after a first one, and its peak memory."""
    import torch  # pyrefly: ignore[missing-import]

    reset_peak()
    seconds = []
    for _ in range(steps + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        update()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() / 1e9
    return {"update_s": statistics.median(seconds[1:]), "peak_gb": peak}


def measure(model: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """The fastest update: its seconds, peak memory and options.

    Raises:
        UserError: none of the updates fits into the memory.
    """
    import torch  # pyrefly: ignore[missing-import]

    from qerl_jax.errors import UserError

    count, device = arguments.rows, next(model.parameters()).device
    parameters = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
    shape = count, arguments.prompt + arguments.new_tokens
    tokens = torch.randint(1, model.config.vocab_size, shape, device=device)
    advantages = torch.randn(count, device=device)
    results: list[dict[str, Any]] = []
    for checkpointing in (True, False):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            model.gradient_checkpointing_disable()
        for micro in (number for number in range(1, count + 1) if count % number == 0):

            def update(micro: int = micro) -> None:
                prompt = arguments.prompt
                take_update(model, optimizer, tokens, advantages, prompt=prompt, micro=micro)

            try:
                result = measured(update, arguments.steps)
            except torch.OutOfMemoryError:
                optimizer.zero_grad(set_to_none=True)
                break  # More rows per pass do not fit either.
            results.append(result | {"micro": micro, "checkpointing": checkpointing})
            print(results[-1], flush=True)
    if not results:
        raise UserError(f"--rows={count}: not even one row per pass fits into the memory")
    return min(results, key=lambda row: row["update_s"])


def run(arguments: argparse.Namespace) -> None:
    """Runs the benchmark with the parsed arguments."""
    row = rows.begin(arguments, _REQUIREMENTS + (_NF4 if arguments.format == "nf4" else ""))
    row |= {"peer": "transformers + PEFT", "rollout_format": "", "rollout_s": None, "step_s": None}
    row |= {"format": arguments.format, "attention": "sdpa"}
    model = load_policy(arguments)
    model.enable_input_require_grads()
    model.train()
    rows.save(arguments, "benchmarks.peers.update", row | measure(model, arguments))


if __name__ == "__main__":
    cli.run_command(make_parser(), run)
