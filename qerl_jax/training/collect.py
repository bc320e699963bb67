"""The first half of a step: sample completions and score them."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from qerl_jax.data.agents import session_metrics
from qerl_jax.data.environments import conversation_metrics
from qerl_jax.data.order import (
    Cursor,
    Order,
    draw_turns,
    order_metrics,
    record_results,
    refill_turns,
    source_metrics,
    take_turns,
)
from qerl_jax.data.prompt_rollout import AnyEnvironments, PromptRollout
from qerl_jax.data.prompts import Prompt
from qerl_jax.environments.episodes import failures
from qerl_jax.errors import UserError
from qerl_jax.policy.policy import Policy
from qerl_jax.rewards.scored import Scores
from qerl_jax.rl.advantages import gdpo_advantages, group_advantages
from qerl_jax.rollout.progress import draft_metrics, live_fraction
from qerl_jax.rollout.replicas import deal
from qerl_jax.rollout.sampler import Sampler
from qerl_jax.training.experience import Experience, Peers, choose, concatenate, gather


class NoRewardError(UserError):
    """Every reward of every completion of a step is missing: nothing can be learned from it."""


TOTAL = "total"  # the metric of dynamic sampling that is the weighted sum of all rewards


@dataclasses.dataclass(frozen=True)
class CollectConfig:
    """Options of a step's completions."""

    prompts_per_step: int  # P, number of prompts that a step trains on
    prompts_per_rollout: int  # number of prompts of each rollout of a step, at least P
    sampler: Sampler  # samples G completions per prompt
    # Function from a number of completions, and `on_wait` by name, to the `score.Scoring` of them
    # with all rewards.
    scoring: Callable[..., contextlib.AbstractContextManager[Any]]
    reward_weights: Mapping[str, float]  # weights of the rewards by name
    # Function from the number of tokens of a completion to its length penalty, or None for none.
    length_penalty: Callable[[int], float] | None
    length_penalty_weight: float  # factor of the length penalty, which is -1 at the limit
    # Number of rollouts that a step may make to replace uninformative groups (DAPO's dynamic
    # sampling); 1 replaces none.
    rounds: int
    # Name of the reward that must differ within an informative group, as in
    # `dynamic_sampling_metric`.
    metric: str
    order: Order  # rule by which the prompts are drawn
    advantage: str  # as in `rl.advantage`; with 'gdpo' its sums count where the metric is 'total'
    advantage_eps: float  # `eps` of the advantages
    # What the policy talks to; None without environments.
    environments: AnyEnvironments | None = None
    needs_rewards: bool = True  # whether nothing can be learned without any reward

    @property
    def weights(self) -> dict[str, float]:
        """The weights of the parts of the total, the length penalty included, by name."""
        penalty = {"overlong": self.length_penalty_weight} if self.length_penalty else {}
        return dict(self.reward_weights) | penalty


def dynamic_sampling_metric(
    name: str, weights: Mapping[str, float], *, has_length_penalty: bool
) -> str:
    """Returns the metric by which dynamic sampling tells informative groups from other groups.

    DAPO keeps the groups in which some completions are correct and some are not, 0 < correct < G
    (arXiv 2503.14476, Eq. 11). For a metric with more values than two, a group is kept if the
    values differ, as in verl's `filter_groups.metric`.

    Args:
        name: name of a reward, 'overlong' for the length penalty, 'total' for the weighted sum, or
            '' for the reward 'correctness'. If no reward of this name has a weight, '' stands for
            'total'.
        weights: weights of the rewards, by name.
        has_length_penalty: whether the length penalty is on.

    Returns:
        The name of a reward, 'overlong' or 'total'.

    Raises:
        UserError: there is no such metric.
    """
    if not name:
        return "correctness" if weights.get("correctness") else TOTAL
    names = (*weights, *(["overlong"] if has_length_penalty else []), TOTAL)
    if name not in names:
        raise UserError(
            f"unknown rl.dynamic_sampling_metric {name!r}: choose from {', '.join(names)}, or '' "
            "for correctness"
        )
    return name


def collect(
    key: jax.Array,
    policy: Policy,
    prompts: Sequence[Prompt],
    cursor: Cursor,
    *,
    options: CollectConfig,
    processes: Peers,
    on_progress: Callable[[int, int], None] | None = None,
    on_wait: Callable[[], None] | None = None,
) -> tuple[Experience, dict[str, float], Cursor]:
    """Samples and scores the completions of a step.

    A completion is scored as soon as it has ended, while the others are still decoded.

    A rollout of more than P prompts leaves the P informative groups that come first. With several
    rounds, groups without any difference in the metric are replaced by groups of further prompts of
    the same source, until there are P informative groups or the rounds are used up. Missing groups
    are then filled with uninformative ones of the same source, so that all steps have the same
    shapes, and each source its share of them. The groups of a round in which every reward failed
    are uninformative ones.

    Args:
        key: key of all draws of this step.
        policy: the policy that samples, noise included, on one device or replicated.
        prompts: the training prompts.
        cursor: position in the prompts.
        options: options.
        processes: the processes of the run, each of which samples and scores a part.
        on_progress: called with the number of finished rows of a rollout and the number of tokens
            of all rounds, after every chunk but the last of a rollout.
        on_wait: called while rewards work, as in `score.Scoring`.

    Returns:
        The experience; values to log, over everything that was sampled, replaced groups included;
        and the cursor after it.

    Raises:
        NoRewardError: every reward of every completion of the step failed.
    """
    first_cursor, drawn_places = cursor, list[int]()

    def sample(
        index: int, cursor: Cursor, turns: Sequence[int], tokens: int
    ) -> tuple[Experience, Cursor]:
        places, cursor = draw_turns(options.order, cursor, turns, exclude=drawn_places)
        drawn_places.extend(places)
        round_prompts = [prompts[place] for place in places]
        shares = deal([len(prompt.ids) for prompt in round_prompts], processes.count)
        share = shares[processes.index]
        own_key, started = jax.random.fold_in(key, index), time.perf_counter()
        rollout = PromptRollout(
            options.sampler,
            own_key,
            policy,
            [round_prompts[i] for i in share],
            ids=share.tolist(),
            environments=options.environments,
            on_wait=on_wait,
        )
        count = len(share) * options.sampler.group_size
        with rollout, options.scoring(count, on_wait=on_wait) as scoring:
            for progress in rollout:
                if on_progress is not None and progress.ended_rows < progress.rows:
                    on_progress(progress.ended_rows, tokens + progress.tokens)
                ended = rollout.take(progress)
                scoring.add({i: one.to_score() for i, one in ended.items() if not one.has_failed})
            seconds = time.perf_counter() - started
            # The last progress has the whole rollout.
            experience = Experience(
                prompts=rollout.prompts,
                places=[places[i] for i in share],
                texts=[rollout.texts[row] for row in range(count)],
                **rollout.rows(progress),
                scores=scoring.finish(),
                statistics=[progress.statistics],
                seconds=seconds,
                episodes=rollout.episodes,
            )
        tokenizer = options.sampler.tokenizer
        experience = gather(
            experience, round_prompts, places, shares, tokenizer=tokenizer, processes=processes
        )
        experience.scores.errors += failures(
            [one.error for one in experience.episodes], agents=experience.owners is not None
        )
        scores = _add_length_penalty(experience.scores, experience.lengths, options)
        cursor = record_results(options.order, cursor, places, _correct(scores, options))
        return dataclasses.replace(experience, scores=scores), cursor

    turns, cursor = take_turns(options.order, cursor, options.prompts_per_step)
    rounds, informative, cursor = _sample_rounds(sample, cursor, turns, options)
    sampled = concatenate(rounds)
    _check_rewards(sampled.scores, options)
    trained = choose(sampled, _choose_groups(sampled.places, informative, turns, options.order))
    _check_rows(trained)
    metrics = _metrics(sampled, trained, options) | order_metrics(
        options.order, first_cursor, cursor, drawn_places
    )
    return trained, metrics, cursor


def _sample_rounds(
    sample: Callable[[int, Cursor, Sequence[int], int], tuple[Experience, Cursor]],
    cursor: Cursor,
    turns: Sequence[int],
    options: CollectConfig,
) -> tuple[list[Experience], np.ndarray, Cursor]:
    """DAPO's dynamic sampling: samples until P groups are informative or the rounds are used up.

    A group is informative when the metric of its completions differs. A later round draws from the
    sources that lack informative groups, so that a source whose groups are often uninformative
    keeps its share.

    Args:
        sample: samples a round from its index, the cursor, the sources of its draws and the number
            of tokens sampled so far.
        cursor: position of the next prompt.
        turns: sources of the P groups of the step.
        options: options.

    Returns:
        The rounds, bool [groups] that marks the informative groups, and the cursor.
    """
    rounds: list[Experience] = []
    informative, sources = np.zeros(0, bool), options.order.sources
    lack = quota = np.bincount(turns, minlength=len(sources))
    turns = [*turns, *refill_turns(quota, options.prompts_per_rollout - len(turns))]
    while lack.any() and len(rounds) < options.rounds:
        tokens = sum(int(one.lengths.sum()) for one in rounds)
        if rounds:
            turns = refill_turns(lack, options.prompts_per_rollout)
        experience, cursor = sample(len(rounds), cursor, turns, tokens)
        rounds.append(experience)
        informative = np.concatenate([_is_informative(one.scores, options) for one in rounds])
        numbers = options.order.sources_of([place for one in rounds for place in one.places])
        lack = (quota - np.bincount(numbers[informative], minlength=len(sources))).clip(0)
    return rounds, informative, cursor


def _choose_groups(
    places: Sequence[int], informative: np.ndarray, turns: Sequence[int], order: Order
) -> np.ndarray:
    """Returns the groups that a step trains on: of each source as many as it has turns.

    Informative groups go first, and each kind in the order of sampling.
    """
    numbers = order.sources_of(places)
    quota = np.bincount(turns, minlength=len(order.sources))
    by_kind = np.argsort(~informative, stable=True)
    of_sources = [by_kind[numbers[by_kind] == i][:count] for i, count in enumerate(quota)]
    return np.sort(np.concatenate(of_sources))


def _is_informative(scores: Scores, options: CollectConfig) -> np.ndarray:
    """Returns bool [groups]: whether the metric of dynamic sampling differs within a group."""
    parts = scores.parts_of_groups(options.sampler.group_size)
    if options.metric in parts:
        return _differ(parts[options.metric], options.sampler.group_size)
    return _total_differs(scores, options)


def _total_differs(scores: Scores, options: CollectConfig) -> np.ndarray:
    """Returns bool [groups]: whether the advantages of a group are not all 0."""
    if options.advantage != "gdpo":  # A custom function gets the totals, too.
        return _differ(scores.total, options.sampler.group_size)
    parts = scores.parts_of_groups(options.sampler.group_size)
    return gdpo_advantages(parts, options.weights, eps=options.advantage_eps).any(axis=1)


def _differ(values: np.ndarray, group_size: int) -> np.ndarray:
    """Returns bool [groups]: whether the values that are present differ within a group."""
    return group_advantages(values.reshape(-1, group_size), scale="none").any(axis=1)


def _check_rows(experience: Experience) -> None:
    """Refuses a step of agents none of which got an answer from the policy."""
    if not len(experience.rollout.lengths):
        raise NoRewardError(
            "no agent of the groups of this step has got a turn from the policy, nothing can be "
            "learned: see why sessions failed, and run the same command again"
        )


def _check_rewards(scores: Scores, options: CollectConfig) -> None:
    """Refuses a step in which every reward failed; of its rounds, any may lack all rewards."""
    if not options.needs_rewards or not np.isnan(scores.total).all():
        return
    if scores.errors:
        raise NoRewardError(
            f"no completion has a reward, nothing can be learned: {scores.errors[0]}; fix it and "
            "run the same command again"
        )
    scores.errors.append("no completion has a reward: every function with a weight returned None")


def _add_length_penalty(scores: Scores, lengths: np.ndarray, options: CollectConfig) -> Scores:
    """Adds the length penalty.

    A completion without a reward has none, which would be an advantage with GDPO.
    """
    if options.length_penalty is None:
        return scores
    penalty = np.array([options.length_penalty(int(length)) for length in lengths])
    penalty = np.where(np.isnan(scores.total), np.nan, penalty)
    return dataclasses.replace(
        scores,
        total=scores.total + options.length_penalty_weight * penalty,
        parts=scores.parts | {"overlong": penalty},
    )


def _correct(scores: Scores, options: CollectConfig) -> np.ndarray:
    """Returns float [P, G]: 1 where a completion is correct, NaN where its score is missing."""
    values = scores.parts.get("correctness", np.full(len(scores.total), np.nan))
    return np.where(np.isnan(values), np.nan, values > 0.5).reshape(-1, options.sampler.group_size)


def _metrics(
    experience: Experience, trained: Experience, options: CollectConfig
) -> dict[str, float]:
    """Values to log of what was sampled, and of the part that the step trains on."""
    rollout, scores = experience.rollout, experience.scores
    lengths = experience.lengths
    tokens = max(1, int(lengths.sum()))
    groups = scores.total.reshape(-1, options.sampler.group_size)
    metrics = {
        "reward": _mean(scores.total),
        "reward_std": _mean(np.array([_std(group) for group in groups])),
        "accuracy": _mean(scores.parts.get("correctness", np.array([]))),
        "format": _mean(scores.parts.get("format", np.array([]))),
        "length": float(lengths.mean()),
        "finished": float(experience.finished.mean()),
        "entropy": float(rollout.entropies.sum() / tokens),
        "advantage_zero_groups": float(np.mean(~_total_differs(scores, options))),
        "sampled_groups": len(groups),
        "rewards_missing": int(
            sum(np.isnan(scores.parts[name]).sum() for name in options.reward_weights)
        ),
    }
    metrics |= {
        "rollout_tokens": int(lengths.sum()),
        "rollout_live_share": live_fraction(experience.statistics),
        "rollout_seconds": experience.seconds,
        "reward_seconds": scores.seconds,
        "rollout_tokens_per_second": float(lengths.sum()) / experience.seconds,
    }
    if experience.episodes:
        metrics |= conversation_metrics(experience.episodes, experience.statistics)
    metrics |= draft_metrics(experience.statistics)
    if experience.owners is not None:
        metrics |= session_metrics(experience.episodes, len(experience.owners))
    metrics |= {f"reward/{name}": _mean(values) for name, values in scores.parts.items()}
    values = {"reward": groups} | (
        {"accuracy": scores.parts["correctness"].reshape(groups.shape)}
        if "correctness" in scores.parts
        else {}
    )
    return metrics | source_metrics(options.order, experience.places, values, trained.places)


def _mean(values: np.ndarray) -> float:
    present = values[~np.isnan(values)]
    return float(present.mean()) if present.size else float("nan")


def _std(values: np.ndarray) -> float:
    present = values[~np.isnan(values)]
    return float(present.std(ddof=1)) if present.size > 1 else float("nan")
