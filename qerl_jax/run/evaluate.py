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
    rows: int,
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
        sampling: limits; the temperature is ignored.
        rows: problems that decode together.
        prompt_width: see `engine.generate`.
        on_progress: called with the problems that are done and the tokens so far.
    """
    sampling = dataclasses.replace(sampling, temperature=0.0, top_k=0, top_p=1.0)

    def correct(batch: list[Prompt], before: int) -> np.ndarray:
        # A full batch of rows keeps the compiled shapes; the surplus is cut off again.
        padded = batch + batch[:1] * (rows - len(batch))
        rollout = generate(
            jax.random.key(0),
            model.params,
            lora,
            [prompt.ids for prompt in padded],
            config=model.config,
            sampling=sampling,
            eos_ids=model.tokenizer.eos_ids,
            pad_id=model.tokenizer.pad_id,
            prompt_width=prompt_width,
            on_progress=on_progress and (lambda done, tokens: on_progress(before + done, tokens)),
        )
        rollout = jax.tree.map(lambda x: x[: len(batch)], rollout)
        scores = score(
            {"correctness": (correctness, 1.0)},
            [prompt.text for prompt in batch],
            decode(model, rollout),
            [prompt.problem.answer for prompt in batch],
            rollout.lengths,
            rollout.finished,
            time_limit=time_limit,
        )
        for error in scores.errors:
            print(f"warning: {error}", file=sys.stderr, flush=True)
        return np.nan_to_num(scores.total) > 0.5

    starts = range(0, len(problems), rows)
    judged = [correct(list(problems[start : start + rows]), start) for start in starts]
    return float(np.concatenate(judged).mean())
