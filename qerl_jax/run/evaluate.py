"""Greedy pass@1 of the clean policy on held-out problems."""

import dataclasses
import sys
from collections.abc import Callable, Sequence

import jax
import numpy as np

from qerl_jax.data import Prompt
from qerl_jax.policy.lora import Lora
from qerl_jax.rl.rewards import Reward, score
from qerl_jax.rollout.engine import SamplingConfig, generate
from qerl_jax.run.collect import decode
from qerl_jax.weights.load import LoadedModel


def greedy_accuracy(
    model: LoadedModel,
    lora: Lora | None,
    problems: Sequence[Prompt],
    *,
    correctness: Reward,
    time_limit: float,
    sampling: SamplingConfig,
    prompt_width: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> float:
    """The share of problems whose greedy completion is correct.

    Args:
        model: the policy, without noise.
        lora: its adapter, or None.
        problems: the prompts.
        correctness: the reward that judges a completion; more than 0.5 is correct, missing is not.
        time_limit: seconds for one judgement.
        sampling: limits, and the rows that decode together; the temperature is ignored.
        prompt_width: see `engine.generate`.
        on_progress: see `engine.generate`.
    """
    rollout = generate(
        jax.random.key(0),
        model.params,
        lora,
        [prompt.ids for prompt in problems],
        config=model.config,
        sampling=dataclasses.replace(sampling, temperature=0.0, top_k=0, top_p=1.0),
        eos_ids=model.tokenizer.eos_ids,
        pad_id=model.tokenizer.pad_id,
        prompt_width=prompt_width,
        on_progress=on_progress,
    )
    scores = score(
        {"correctness": (correctness, 1.0)},
        [prompt.text for prompt in problems],
        decode(model, rollout),
        [prompt.problem.answer for prompt in problems],
        rollout.lengths,
        rollout.finished,
        time_limit=time_limit,
    )
    for error in scores.errors:
        print(f"warning: {error}", file=sys.stderr, flush=True)
    return float((np.nan_to_num(scores.total) > 0.5).mean())
