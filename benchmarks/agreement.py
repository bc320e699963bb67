r"""Measures how far the rollout engine is from the trainer's forward pass, on real weights.

    uv run --extra cuda python -m benchmarks.agreement MODEL --data=gsm8k_test.jsonl \
        --out=benchmarks/results/rollout.json

The engine completes the prompts at temperature 0 and at 1, and the trainer's forward pass reads
prompt and completion. At temperature 0 it may prefer another token than the engine; the two logits
are then a tie within the rounding of bfloat16, or something is wrong, so the largest gap between
them is reported. At temperature 1 the log-probabilities are compared token by token. A row of
--out, kind "agreement", has what `compare` returns.
"""

import argparse
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import common
from benchmarks.rollout.random_policy import random_lora
from benchmarks.rollout.results import KEYS
from benchmarks.rollout.subject import first_problems, model_name
from qerl_jax.commands import cli
from qerl_jax.errors import check_limits
from qerl_jax.policy import transformer
from qerl_jax.policy.policy import Policy
from qerl_jax.rl.batch import TrainBatch, make_batch
from qerl_jax.rl.logprobs import completion_logprobs
from qerl_jax.rollout.config import SamplingConfig
from qerl_jax.rollout.sampler import Sampler
from qerl_jax.weights.load import load

_NEW_TOKENS, _RANK = 256, 32  # limit of a completion, and rank of a random adapter


def compare(model, lora, prompts: Sequence[Sequence[int]], *, new_tokens: int, seed: int) -> dict:
    """Compares sampled tokens with the forward pass, as the module explains."""

    def sample_batch(temperature: float) -> TrainBatch:
        sampling = SamplingConfig(max_new_tokens=new_tokens, temperature=temperature)
        sampler = Sampler(model.config, model.tokenizer, sampling)
        rollout = sampler.rollout(jax.random.key(seed), Policy(model.params, lora), prompts)
        return make_batch(
            prompts,
            rollout,
            np.zeros(len(prompts)),
            mask_truncated=False,
            aggregation="token",
            pad_id=model.tokenizer.pad_id,
        )

    @jax.jit
    def gaps(params, lora, tokens, lengths):
        """The largest logit of every position minus the logit of the next token."""
        logits = transformer.forward(params, lora, tokens, lengths, config=model.config)
        token_logits = jnp.take_along_axis(logits[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
        return logits[:, :-1].max(axis=-1) - token_logits

    batch = sample_batch(0.0)
    position = np.arange(1, batch.tokens.shape[1])
    is_new_token = (position >= batch.prompt_lengths[:, None]) & (position < batch.lengths[:, None])
    gap = np.asarray(gaps(model.params, lora, batch.tokens, batch.lengths))[is_new_token]

    batch = sample_batch(1.0)
    mask = batch.loss_mask > 0
    logprobs, _ = completion_logprobs(
        model.params,
        lora,
        *map(jnp.asarray, (batch.tokens, batch.prompt_lengths, batch.lengths)),
        width=mask.shape[1],
        model_config=model.config,
        temperature=1.0,
    )
    difference = np.abs(np.asarray(logprobs) - batch.rollout_logprobs)[mask]
    return {
        "greedy_tokens": int(is_new_token.sum()),
        "greedy_differ": int((gap > 0).sum()),
        "greedy_largest_gap": round(float(gap.max()), 4),
        "sampled_tokens": int(mask.sum()),
        "logprob_diff_mean": round(float(difference.mean()), 5),
        "logprob_diff_p99": round(float(np.quantile(difference, 0.99)), 5),
    }


def make_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    parser = common.make_parser("benchmarks.agreement", __doc__)
    add = parser.add_argument
    add("model", help="folder, .gguf file or hub id of the model")
    add("--data", required=True, help="FILE.jsonl with question and answer")
    add("--prompts", type=int, default=8, help="number of prompts (default: 8)")
    return parser


def run(args: argparse.Namespace) -> None:
    """Prints the figures and writes them."""
    check_limits({"--prompts": (args.prompts, 1)})
    device = jax.devices()[0].device_kind
    common.check_out(args.out, KEYS, device)
    model = load(args.model, format="nvfp4")
    prompts = first_problems(model, args.data, args.prompts, _NEW_TOKENS)
    lora = random_lora(jax.random.key(0), model.config, rank=_RANK)
    row = {
        "kind": "agreement",
        "model": model_name(args.model),
        "format": "nvfp4",
        "lora_rank": _RANK,
        "prompts": args.prompts,
        "max_new_tokens": _NEW_TOKENS,
        "seed": 0,
        **compare(model, lora, prompts, new_tokens=_NEW_TOKENS, seed=0),
        **common.origin("benchmarks.agreement"),
    }
    common.merge(args.out, row, KEYS, device)


if __name__ == "__main__":
    cli.run_command(make_parser(), run)
