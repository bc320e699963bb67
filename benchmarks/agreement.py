r"""How far the rollout engine is from the trainer's forward pass, on real weights and prompts.

    uv run --extra cuda python -m benchmarks.agreement MODEL --data=gsm8k_test.jsonl \
        --out=benchmarks/results/rollout.json

The engine completes the prompts at temperature 0 and at 1. The forward pass that trains then reads
prompt and completion. At temperature 0 it says which token it would have chosen; where that is
another one, the two logits are a tie within the rounding of bfloat16, or something is wrong: the
largest gap between them is reported. At temperature 1 the log-probabilities are compared token by
token. A row of --out, kind "agreement", has what `compare` returns. Where a copy has no history,
QERL_COMMIT names its commit.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.rollout.random_policy import random_lora
from benchmarks.rollout.results import merge, origin
from benchmarks.rollout.subject import first_problems, model_name
from qerl_jax.data import encode_prompts
from qerl_jax.errors import UserError, check_limits
from qerl_jax.evaluation.tasks import SYSTEM_PROMPT
from qerl_jax.policy import transformer
from qerl_jax.rl.batch import TrainBatch, make_batch
from qerl_jax.rl.logprobs import completion_logprobs
from qerl_jax.rollout.config import SamplingConfig
from qerl_jax.rollout.engine import generate
from qerl_jax.weights.load import FORMATS, load


def compare(model, lora, prompts: Sequence[Sequence[int]], *, new_tokens: int, seed: int) -> dict:
    """The figures of the module's docstring.

    Args:
        model: a LoadedModel.
        lora: its adapter, or None.
        prompts: token ids.
        new_tokens: the most of a completion.
        seed: of the draws.

    Returns:
        Of the tokens at temperature 0 how many there are, how many of them are not the likeliest in
        the forward pass, and by how much a logit is at most over theirs; of those at temperature 1
        how many there are, and the mean and the 99th percentile of the differences.
    """

    def sampled(temperature: float) -> TrainBatch:
        rollout = generate(
            jax.random.key(seed),
            model.params,
            lora,
            prompts,
            config=model.config,
            sampling=SamplingConfig(max_new_tokens=new_tokens, temperature=temperature),
            tokenizer=model.tokenizer,
        )
        return make_batch(
            prompts,
            rollout.tokens,
            rollout.lengths,
            rollout.finished,
            np.zeros(len(prompts)),
            rollout.logprobs,
            mask_truncated=False,
            aggregation="token",
            pad_id=model.tokenizer.pad_id,
        )

    @jax.jit
    def gaps(params, lora, tokens, lengths):
        """How much the chosen logit of every position exceeds that of the next token."""
        logits = transformer.forward(params, lora, tokens, lengths, config=model.config)
        taken = jnp.take_along_axis(logits[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
        return logits[:, :-1].max(axis=-1) - taken

    batch = sampled(0.0)
    position = np.arange(1, batch.tokens.shape[1])
    drawn = (position >= batch.prompt_lengths[:, None]) & (position < batch.lengths[:, None])
    gap = np.asarray(gaps(model.params, lora, batch.tokens, batch.lengths))[drawn]

    batch = sampled(1.0)
    mask = batch.loss_mask > 0
    logprobs, _ = completion_logprobs(
        model.params,
        lora,
        *map(jnp.asarray, (batch.tokens, batch.prompt_lengths, batch.lengths)),
        width=mask.shape[1],
        config=model.config,
        temperature=1.0,
    )
    difference = np.abs(np.asarray(logprobs) - batch.rollout_logprobs)[mask]
    return {
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
    parser.add_argument("--format", choices=FORMATS, default="nvfp4")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--lora-rank", type=int, default=32, help="of a random adapter; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args()
    limits = {
        "--prompts": (args.prompts, 1),
        "--new-tokens": (args.new_tokens, 2),
        "--lora-rank": (args.lora_rank, 0),
        "--seed": (args.seed, 0),
    }
    check_limits(limits)
    problems = first_problems(args.data, args.prompts)
    device = jax.devices()[0].device_kind
    merge(args.out, device, [])  # A file of another device is told before the work.
    model = load(args.model, format=args.format)
    encoded = encode_prompts(
        problems,
        model.tokenizer,
        system_prompt=SYSTEM_PROMPT,
        max_prompt_tokens=model.config.max_position - args.new_tokens,
        remedy="lower --new-tokens",
    )
    key = jax.random.key(args.seed)
    lora = random_lora(key, model.config, rank=args.lora_rank) if args.lora_rank else None
    result = compare(
        model, lora, [p.ids for p in encoded], new_tokens=args.new_tokens, seed=args.seed
    )
    print(json.dumps(result), flush=True)
    row = {
        "kind": "agreement",
        "model": model_name(args.model),
        "format": args.format,
        "lora_rank": args.lora_rank,
        "prompts": args.prompts,
        "max_new_tokens": args.new_tokens,
        "seed": args.seed,
    }
    merge(args.out, device, [row | result | origin("benchmarks.agreement")])


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
