"""The greedy accuracy of a policy, which a training run watches, and the parts that it is made of.

`evaluate` uses the same parts: what a run reports is what the command measures.
"""

import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import jax
import numpy as np

from qerl_jax.data.environments import RunEnvironments, conversation_columns
from qerl_jax.data.prompts import Prompt
from qerl_jax.environments.roles import FAILURE
from qerl_jax.policy.policy import Policy
from qerl_jax.processes.group import ALONE, Processes
from qerl_jax.rewards.functions import Reward
from qerl_jax.rewards.score import score
from qerl_jax.rewards.scored import Scores
from qerl_jax.rollout.completions import detokenize
from qerl_jax.rollout.replicas import deal
from qerl_jax.rollout.sampler import Sampler, shared_tokens

_SHOWN = 2  # answers that a run shows before and after it


@dataclasses.dataclass(frozen=True)
class GreedyScore:
    """How a policy answers greedily.

    Attributes:
        accuracy: fraction of the completions with a score that are correct; NaN without any.
        truncated: fraction of completions that the limit on new tokens cut off.
        missing: number of completions without a score, because a reward failed. They count neither
            as right nor as wrong, so that scores over other problems are not comparable.
        answers: the first completions of this process, as values for JSON: `question`, `answer`,
            `completion`, `finished`, and `correct`, which is None without a score.
    """

    accuracy: float
    truncated: float
    missing: int = 0
    answers: Sequence[Mapping[str, Any]] = ()


def greedy_accuracy(
    sampler: Sampler,
    policy: Policy,
    prompts: Sequence[Prompt],
    *,
    correctness: Reward,
    time_limit: float,
    processes: Processes = ALONE,
    on_progress: Callable[[int, int], None] | None = None,
    on_wait: Callable[[], None] | None = None,
    environments: RunEnvironments | None = None,
) -> GreedyScore:
    """Returns the fraction of prompts whose greedy completion is correct, or cut off.

    Args:
        sampler: samples the completions, always greedily. Where several processes share the
            prompts, its `engine.num_prompts` is the largest share of a group of devices.
        policy: the policy, without noise.
        prompts: prompts to complete.
        correctness: reward that scores a completion. A completion is correct if its reward is more
            than 0.5.
        time_limit: time limit for one call of the reward in seconds.
        processes: the processes of the run, each of which completes a part of the prompts.
        on_progress: callback for the number of completions that have ended and the number of
            sampled tokens, called after every chunk but the last.
        on_wait: as in `score.Scoring`.
        environments: what the policy talks to; None without environments.
    """
    shares = deal([len(prompt.ids) for prompt in prompts], processes.count)
    own_prompts = [prompts[i] for i in shares[processes.index]]
    own_correct, finished, texts = np.zeros(0), np.zeros(0, bool), list[str]()
    if own_prompts:  # There may be fewer prompts than processes.
        key, episodes = jax.random.key(0, impl="threefry2x32"), None
        if environments is not None:
            own_prompts, episodes = environments.begin(key, own_prompts, 1, on_wait)
        ids = [prompt.ids for prompt in own_prompts]
        with (
            contextlib.nullcontext() if episodes is None else episodes,
            contextlib.closing(sampler.greedy().steps(key, policy, ids, dialog=episodes)) as steps,
        ):
            for step in steps:
                if on_progress is not None and step.ended_rows < step.rows:
                    on_progress(step.ended_rows, step.tokens)
        rollout = step.rollout
        texts, columns = detokenize(rollout, sampler.tokenizer.decode), None
        failed: set[int] = set()
        if episodes is not None:
            texts = [episode.answer for episode in episodes.episodes]
            columns = [
                {**prompt.problem.columns, **conversation_columns(episode)}
                for prompt, episode in zip(own_prompts, episodes.episodes, strict=True)
            ]
            failed.update(np.flatnonzero(rollout.endings == FAILURE).tolist())
        scores = score_completions(
            {"correct": correctness},
            own_prompts,
            texts,
            rollout.sampled_lengths,
            rollout.finished,
            columns=columns,
            unscored=failed,
            time_limit=time_limit,
            on_wait=on_wait,
        )
        own_correct, finished = is_correct(scores.parts["correct"]), rollout.finished
        if episodes is not None:
            for error in episodes.failures():
                print(f"warning: {error}", file=sys.stderr, flush=True)
    results = processes.exchange({"right": own_correct, "finished": finished})
    correct = np.concatenate([share["right"] for share in results])
    judged = correct[~np.isnan(correct)]
    return GreedyScore(
        accuracy=float(judged.mean()) if judged.size else math.nan,
        truncated=float(1 - np.mean(np.concatenate([share["finished"] for share in results]))),
        missing=correct.size - judged.size,
        answers=[
            {
                "question": prompt.problem.question,
                "answer": prompt.problem.answer,
                "completion": text,
                "finished": bool(ended),
                "correct": None if np.isnan(right) else bool(right),
            }
            for prompt, text, ended, right in zip(
                own_prompts[:_SHOWN], texts, finished, own_correct, strict=False
            )
        ],
    )


def tokens_of_examples(prompts: Sequence[Prompt], examples: Sequence[str]) -> int:
    """How many tokens an evaluation prefills once for all prompts: those of solved examples.

    What all prompts begin with rounds differently when it is shared. So rollouts compute whole
    prompts, as updates do, and a system prompt alone, which is short, is not shared.

    Args:
        prompts: all prompts of the evaluation.
        examples: the solved examples that they begin with; empty without.
    """
    return shared_tokens([prompt.ids for prompt in prompts]) if prompts and examples else 0


def score_completions(
    scorers: Mapping[str, Reward],
    prompts: Sequence[Prompt],
    completions: Sequence[str],
    lengths: Sequence[int] | np.ndarray,
    finished: Sequence[bool] | np.ndarray,
    *,
    columns: Sequence[Mapping[str, Any]] | None = None,
    unscored: Set[int] = frozenset(),
    time_limit: float,
    on_wait: Callable[[], None] | None = None,
) -> Scores:
    """Scores completions, one per prompt, and prints a warning for each kind of failure.

    Args:
        scorers: rewards by name.
        prompts: B prompts.
        completions: B completions as text.
        lengths: B completion lengths in tokens.
        finished: B flags, True where the completion ended by itself.
        columns: B rows of columns; None for those of the problems.
        unscored: as in `score.score`.
        time_limit: time limit for one call of a reward in seconds, for rewards without their own.
        on_wait: as in `score.Scoring`.

    Returns:
        The scores, unweighted.
    """
    scores = score(
        {name: (scorer, 1.0) for name, scorer in scorers.items()},
        [prompt.text for prompt in prompts],
        completions,
        [prompt.problem.answer for prompt in prompts],
        lengths,
        finished,
        columns=columns or [prompt.problem.columns for prompt in prompts],
        unscored=unscored,
        time_limit=time_limit,
        on_wait=on_wait,
    )
    for error in scores.errors:
        print(f"warning: {error}", file=sys.stderr, flush=True)
    return scores


def is_correct(values: np.ndarray) -> np.ndarray:
    """Returns 1.0 where a score is more than 0.5, 0.0 where not, and NaN where it is missing."""
    return np.where(np.isnan(values), np.nan, values > 0.5)
