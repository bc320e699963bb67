"""The greedy accuracy of a policy, which a training run watches, and the parts that it is made of.

`evaluate` uses the same parts: what a run reports is what the command measures.
"""

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from operator import itemgetter
from typing import Any

import jax
import numpy as np

from qerl_jax.data.agents import RunAgents
from qerl_jax.data.prompt_rollout import AnyEnvironments, Ended, PromptRollout
from qerl_jax.data.prompts import Prompt
from qerl_jax.environments.episodes import failures
from qerl_jax.policy.policy import Policy
from qerl_jax.processes.group import ALONE, Processes
from qerl_jax.rewards.functions import Reward
from qerl_jax.rewards.score import Scoring
from qerl_jax.rewards.scored import Completion, Scores
from qerl_jax.rollout.replicas import deal
from qerl_jax.rollout.sampler import Sampler, shared_tokens

_SHOWN = 2  # answers that a run shows before and after it


@dataclasses.dataclass(frozen=True)
class GreedyScore:
    """How a policy answers greedily."""

    accuracy: float  # fraction of the completions with a score that are correct; NaN without any
    truncated: float  # fraction of completions that the limit on new tokens cut off
    # Number of completions without a score, because a reward failed. They count neither as right
    # nor as wrong, so that scores over other problems are not comparable.
    missing: int = 0
    # The completions of the first prompts, as values for JSON: `question`, `answer`, `completion`,
    # `finished`, and `correct`, which is None without a score.
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
    environments: AnyEnvironments | None = None,
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
    own_correct, ended, errors = np.zeros(0), dict[int, Ended](), list[str]()
    if own_prompts:  # There may be fewer prompts than processes.
        key = jax.random.key(0, impl="threefry2x32")
        rollout = PromptRollout(
            sampler.greedy(),
            key,
            policy,
            own_prompts,
            ids=shares[processes.index].tolist(),
            environments=environments,
            on_wait=on_wait,
        )
        with rollout:
            for progress in rollout:
                if on_progress is not None and progress.ended_rows < progress.rows:
                    on_progress(progress.ended_rows, progress.tokens)
        ended = rollout.take(progress)
        scores = score_completions(
            {"correct": correctness},
            [one.to_score() for one in ended.values()],
            unscored={row for row, one in enumerate(ended.values()) if one.has_failed},
            time_limit=time_limit,
            on_wait=on_wait,
        )
        own_correct = is_correct(scores.parts["correct"])
        errors = [episode.error for episode in rollout.episodes]
    shared = {
        "right": own_correct,
        "finished": np.array([one.finished for one in ended.values()], bool),
        "errors": np.array(json.dumps(errors)),
        "answers": np.array(json.dumps(_shown(ended, shares[processes.index], own_correct))),
    }
    results = processes.exchange(shared)
    answers = [pair for share in results for pair in json.loads(str(share["answers"]))]
    errors = [e for share in results for e in json.loads(str(share["errors"]))]
    for line in failures(errors, agents=isinstance(environments, RunAgents)):
        print(f"warning: {line}", file=sys.stderr, flush=True)
    correct = np.concatenate([share["right"] for share in results])
    judged = correct[~np.isnan(correct)]
    return GreedyScore(
        accuracy=float(judged.mean()) if judged.size else math.nan,
        truncated=float(1 - np.mean(np.concatenate([share["finished"] for share in results]))),
        missing=correct.size - judged.size,
        answers=[answer for _, answer in sorted(answers, key=itemgetter(0))[:_SHOWN]],
    )


def _shown(
    ended: Mapping[int, Ended], numbers: np.ndarray, correct: np.ndarray
) -> list[tuple[int, dict[str, Any]]]:
    """The first completions of a process as `GreedyScore.answers`, with their number among all."""
    rows = sorted(zip(ended, ended.values(), correct.tolist(), strict=True), key=itemgetter(0))
    return [
        (
            int(numbers[row]),
            {
                "question": one.prompt.problem.question,
                "answer": one.prompt.problem.answer,
                "completion": one.text,
                "finished": bool(one.finished),
                "correct": None if math.isnan(right) else bool(right),
            },
        )
        for row, one, right in rows[:_SHOWN]
    ]


def tokens_of_examples(prompts: Sequence[Prompt], examples: Sequence[str]) -> int:
    """How many tokens an evaluation prefills once for all prompts: those of solved examples.

    What all prompts begin with rounds differently when it is shared. So rollouts compute whole
    prompts, as updates do, and a system prompt alone, which is short, is not shared.
    """
    return shared_tokens([prompt.ids for prompt in prompts]) if prompts and examples else 0


def score_completions(
    scorers: Mapping[str, Reward],
    completions: Sequence[Completion],
    *,
    unscored: Set[int] = frozenset(),
    time_limit: float,
    on_wait: Callable[[], None] | None = None,
) -> Scores:
    """Scores completions, and prints a warning for each kind of failure.

    Those of the indices `unscored` go to no reward, and their scores are NaN. The time limit is
    that of one call, in seconds, for rewards without their own; `on_wait` is as in `score.Scoring`.

    Returns:
        The scores, unweighted.
    """
    rewards = {name: (scorer, 1.0) for name, scorer in scorers.items()}
    count = len(completions)
    with Scoring(rewards, count, time_limit=time_limit, on_wait=on_wait) as scoring:
        scoring.add({i: one for i, one in enumerate(completions) if i not in unscored})
        scores = scoring.finish()
    for error in scores.errors:
        print(f"warning: {error}", file=sys.stderr, flush=True)
    return scores


def is_correct(values: np.ndarray) -> np.ndarray:
    """Returns 1.0 where a score is more than 0.5, 0.0 where not, and NaN where it is missing."""
    return np.where(np.isnan(values), np.nan, values > 0.5)
