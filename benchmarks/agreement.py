r"""How far the rollout engine is from the trainer's forward pass, on real weights and prompts.

    uv run --extra cuda python -m benchmarks.agreement MODEL --data=gsm8k_test.jsonl \
        --out=benchmarks/results/agreement.json

The engine completes the prompts at temperature 0 and at 1. The forward pass that trains then reads
prompt and completion. At temperature 0 it says which token it would have chosen; where that is
another one, the two logits are a tie within the rounding of bfloat16, or something is wrong: the
largest gap between them is reported. At temperature 1 the log-probabilities are compared token by
token.
"""

import argparse
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.data import encode_prompts, load_problems
from qerl_jax.errors import UserError
from qerl_jax.policy import transformer
from qerl_jax.rl.logprobs import completion_logprobs
from qerl_jax.rollout.engine import Rollout, SamplingConfig, generate
from qerl_jax.run.folder import provenance, without_folders, write_atomic
from qerl_jax.run.random_policy import random_lora
from qerl_jax.run.tasks import SYSTEM_PROMPT
from qerl_jax.weights.load import load


def whole_rows(prompts: list[list[int]], rollout: Rollout) -> tuple[np.ndarray, np.ndarray]:
    """Prompts with their completions, int32 [B, T], and the lengths [B] of the prompts."""
    lengths = np.array([len(prompt) for prompt in prompts])
    tokens = np.zeros((len(prompts), max(lengths + rollout.lengths)), np.int32)
    for row, prompt, drawn, length in zip(
        tokens, prompts, rollout.tokens, rollout.lengths, strict=True
    ):
        row[: len(prompt) + length] = [*prompt, *drawn[:length]]
    return tokens, lengths


def compare(model, lora, prompts: list[list[int]], *, new_tokens: int, seed: int) -> dict:
    """The figures of the module's docstring."""

    def sampled(temperature: float) -> tuple[Rollout, np.ndarray, np.ndarray]:
        rollout = generate(
            jax.random.key(seed),
            model.params,
            lora,
            prompts,
            config=model.config,
            sampling=SamplingConfig(max_new_tokens=new_tokens, temperature=temperature),
            eos_ids=model.tokenizer.eos_ids,
            pad_id=model.tokenizer.pad_id,
        )
        return rollout, *whole_rows(prompts, rollout)

    @jax.jit
    def gaps(params, lora, tokens, lengths):
        """How much the chosen logit of every position exceeds that of the next token."""
        logits = transformer.forward(params, lora, tokens, lengths, config=model.config)
        taken = jnp.take_along_axis(logits[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
        return logits[:, :-1].max(axis=-1) - taken

    greedy, tokens, begins = sampled(0.0)
    ends = begins + greedy.lengths
    position = np.arange(tokens.shape[1] - 1)[None, :]
    drawn = (position >= begins[:, None] - 1) & (position < ends[:, None] - 1)
    gap = np.asarray(gaps(model.params, lora, tokens, ends))[drawn]

    rollout, tokens, begins = sampled(1.0)
    logprobs, _ = completion_logprobs(
        model.params,
        lora,
        jnp.asarray(tokens),
        jnp.asarray(begins),
        jnp.asarray(begins + rollout.lengths),
        width=rollout.tokens.shape[1],
        config=model.config,
        temperature=1.0,
    )
    mask = np.arange(rollout.tokens.shape[1]) < rollout.lengths[:, None]
    difference = np.abs(np.asarray(logprobs) - rollout.logprobs)[mask]
    return {
        "prompts": len(prompts),
        "greedy_tokens": int(drawn.sum()),
        "greedy_differ": int((gap > 0).sum()),
        "greedy_largest_gap": round(float(gap.max()), 4),
        "sampled_tokens": int(mask.sum()),
        "logprob_diff_mean": round(float(difference.mean()), 5),
        "logprob_diff_p99": round(float(np.quantile(difference, 0.99)), 5),
    }


def main() -> None:
    """Parses the command line, prints the figures and writes them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a folder, a .gguf file or a hub id")
    parser.add_argument("--data", required=True, help="FILE.jsonl with question and answer")
    parser.add_argument("--format", default="nvfp4")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--lora-rank", type=int, default=32, help="of a random adapter; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args()
    model = load(args.model, format=args.format)
    encoded = encode_prompts(
        load_problems("", path=args.data)[: args.prompts],
        model.tokenizer,
        system_prompt=SYSTEM_PROMPT,
        max_prompt_tokens=model.config.max_position - args.new_tokens,
    )
    key = jax.random.key(args.seed)
    lora = random_lora(key, model.config, rank=args.lora_rank) if args.lora_rank else None
    result = compare(
        model, lora, [p.ids for p in encoded], new_tokens=args.new_tokens, seed=args.seed
    )
    print(json.dumps(result), flush=True)
    result |= {"format": args.format, "lora_rank": args.lora_rank} | provenance()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(args.out, without_folders(json.dumps(result, indent=1)) + "\n")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
