r"""Measures the update of transformers + PEFT: a policy gradient of a LoRA adapter on full rows.

    python -m benchmarks.peers.update --model=qwen2.5-7b --folder=7b --ours=ours.json
    python -m benchmarks.peers.update --model=qwen2.5-7b --format=nf4 --folder=7b --ours=...

It needs torch 2.11.0, transformers 5.17.0 and peft 0.21.2, and with --format=nf4 (QLoRA)
bitsandbytes 0.50.2. An update processes --rows rows of --prompt and --new-tokens tokens, of which
the completion's are in the loss: forward pass, log-probabilities (in chunks, so that the logits
never lie in memory at once), backward pass, fused AdamW. Weights, activations and the adapter are
in bf16, and attention is fused in PyTorch. The update is tried with each number of rows per pass
(`micro`) that divides --rows, or only those of --micro, with and without the recomputation of the
layers (`checkpointing`). What does not fit is left out, and the fastest is written. Our row is
`benchmarks.step` in NVFP4 at the same lengths.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.peers import common
from qerl_jax.commands import cli

_PACKAGES = {"torch": "2.11.0", "transformers": "5.17.0", "peft": "0.21.2"}
_QUANTIZED = {"bitsandbytes": "0.50.2", "accelerate": "1.15.0"}
_HEAD_TOKENS = 2048  # tokens whose logits are in memory at a time


def make_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    parser = common.make_parser("benchmarks.peers.update", __doc__)
    add = parser.add_argument
    add("--format", choices=("bf16", "nf4"), default="bf16", help="base weights (default: bf16)")
    add("--micro", default="", help="comma-separated rows of a pass (default: every divisor)")
    add(
        "--attention",
        default="sdpa",
        help="attention of transformers, such as flash_attention_2 (default: sdpa)",
    )
    return parser


def take_update(
    model: Any, optimizer: Any, tokens: Any, advantages: Any, *, prompt: int, micro: int
) -> None:
    """Takes a step of the optimizer along the policy gradient.

    Args:
        model: a PEFT model.
        optimizer: the optimizer of its adapter.
        tokens: int64 [B, T] token ids of prompts and completions.
        advantages: float32 [B] advantages.
        prompt: tokens of a prompt.
        micro: rows of a forward and backward pass.
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


def micros_of(arguments: argparse.Namespace, rows: int) -> list[int]:
    """The numbers of rows per pass to try for an update, in rising order.

    Args:
        arguments: parsed arguments of the command.
        rows: rows of the update.

    Raises:
        UserError: --micro names no number that divides the rows.
    """
    from qerl_jax.errors import UserError

    divisors = [count for count in range(1, rows + 1) if rows % count == 0]
    names = arguments.micro.split(",") if arguments.micro else [str(count) for count in divisors]
    micros = [count for count in divisors if str(count) in names]
    if not micros:
        raise UserError(f"--micro={arguments.micro} names no number that divides {rows} rows")
    return micros


def measure(
    model: Any, arguments: argparse.Namespace, rows: int, micros: Sequence[int]
) -> dict[str, Any]:
    """The fastest update of these rows: its seconds, peak memory and options.

    Args:
        model: from `common.load_policy`.
        arguments: parsed arguments of the command.
        rows: rows of an update.
        micros: numbers of rows per pass, in rising order.

    Raises:
        UserError: none of the updates fits into the memory.
    """
    import torch  # pyrefly: ignore[missing-import]

    from qerl_jax.errors import UserError

    device = next(model.parameters()).device
    parameters = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
    vocab = model.config.vocab_size
    tokens = torch.randint(1, vocab, (rows, arguments.prompt + arguments.new_tokens), device=device)
    advantages = torch.randn(rows, device=device)
    results: list[dict[str, Any]] = []
    for checkpointing in (True, False):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            model.gradient_checkpointing_disable()
        for micro in micros:
            common.reset_peak()
            try:
                seconds = []
                for _ in range(arguments.steps + 1):
                    common.synchronize()
                    began = time.perf_counter()
                    take_update(
                        model,
                        optimizer,
                        tokens,
                        advantages,
                        prompt=arguments.prompt,
                        micro=micro,
                    )
                    common.synchronize()
                    seconds.append(time.perf_counter() - began)
            except torch.OutOfMemoryError:
                optimizer.zero_grad(set_to_none=True)
                break  # More rows per pass do not fit either.
            results.append(
                {
                    "update_s": statistics.median(seconds[1:]),
                    "peak_gb": common.peak_gb(),
                    "micro": micro,
                    "checkpointing": checkpointing,
                }
            )
            print(f"{rows} rows: {results[-1]}", flush=True)
    if not results:
        raise UserError(f"--rows={rows}: not even one row per pass fits into the memory")
    return min(results, key=lambda row: row["update_s"])


def run(arguments: argparse.Namespace) -> None:
    """Runs the benchmark with the parsed arguments."""
    counts = common.check(arguments)
    micros = {rows: micros_of(arguments, rows) for rows in counts}
    packages = common.installed(_PACKAGES | (_QUANTIZED if arguments.format == "nf4" else {}))
    our_rows = common.our_rows(arguments, counts)
    model = common.load_policy(
        common.model_folder(arguments),
        format=arguments.format,
        attention=arguments.attention,
        rank=arguments.lora_rank,
    )
    model.enable_input_require_grads()
    model.train()
    for rows in counts:
        row = {
            "peer": "transformers + PEFT",
            "packages": packages,
            "format": arguments.format,
            "rollout_format": "",
            "batch": rows,
            "rollout_s": None,
            "step_s": None,
            "attention": arguments.attention,
            **measure(model, arguments, rows, micros[rows]),
        }
        common.save_row(arguments, "benchmarks.peers.update", row, our_rows[rows])


if __name__ == "__main__":
    cli.run_command(make_parser(), run)
