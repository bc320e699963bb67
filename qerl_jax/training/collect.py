"""The first half of a step: sample completions and score them."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from qerl_jax.data.order import Cursor, Order, draw, order_metrics, record, source_metrics
from qerl_jax.data.splits import Prompt
from qerl_jax.errors import UserError
from qerl_jax.policy.lora import Lora
from qerl_jax.processes.group import ALONE, Processes
from qerl_jax.rewards.functions import Reward, overlong_penalty
from qerl_jax.rewards.score import Completion, Scores, Scoring
from qerl_jax.rl.advantages import group_advantages
from qerl_jax.rollout.completions import Rollout
from qerl_jax.rollout.config import EngineConfig, SamplingConfig
from qerl_jax.rollout.engine import RolloutProgress, detokenize, live_fraction
from qerl_jax.rollout.programs import Executables
from qerl_jax.rollout.replicas import generate_steps
from qerl_jax.rollout.scheduler import Statistics
from qerl_jax.training.gather import Scored, gathered, own_prompts
from qerl_jax.weights.load import LoadedModel


class NoRewardError(UserError):
    """Every reward of every completion of a step is missing: nothing can be learned from it."""


TOTAL = "total"  # the metric of dynamic sampling that is the weighted sum of all rewards


@dataclasses.dataclass(frozen=True)
class CollectConfig:
    """Options of a step's completions.

    Attributes:
        prompts_per_step: P, number of prompts per step.
        group_size: G, number of completions per prompt.
        sampling: options of the completions.
        engine: options of the engine.
        rewards: function and weight by name.
        time_limit: seconds for one call of a reward without a limit of its own.
        overlong_buffer: number of tokens before the limit where the length penalty begins; 0
            turns it off.
        overlong_weight: factor of the length penalty, which is -1 at the limit.
        rounds: number of rollouts that a step may make to replace uninformative groups (DAPO's
            dynamic sampling); 1 replaces none.
        metric: name of the reward that must differ within an informative group, as in
            `dynamic_sampling_metric`.
        order: rule by which the prompts are drawn.
        advantage: 'grpo' or 'gdpo'; with 'gdpo' a group is informative if any reward differs.
    """

    prompts_per_step: int
    group_size: int
    sampling: SamplingConfig
    engine: EngineConfig
    rewards: Mapping[str, tuple[Reward, float]]
    time_limit: float
    overlong_buffer: int
    overlong_weight: float
    rounds: int
    metric: str
    order: Order
    advantage: str

    @property
    def weights(self) -> dict[str, float]:
        """The weights of the parts of the total, the length penalty included, by name."""
        weights = {name: weight for name, (_, weight) in self.rewards.items()}
        return weights | ({"overlong": self.overlong_weight} if self.overlong_buffer else {})


@dataclasses.dataclass(frozen=True)
class Experience:
    """The B = P G scored completions of a step; the rows of a group are neighbors.

    Attributes:
        prompts: B prompts.
        texts: B completions as text.
        rollout: B completions as tokens.
        scores: rewards of the B completions.
        metrics: values to log, over everything that was sampled, replaced groups included.
    """

    prompts: list[Prompt]
    texts: list[str]
    rollout: Rollout
    scores: Scores
    metrics: dict[str, float]


@dataclasses.dataclass(frozen=True)
class _Round:
    """The scored completions of one rollout.

    Attributes:
        places: P places of the prompts among the training prompts.
        prompts: B prompts.
        texts: B completions as text.
        rollout: B completions as tokens.
        scores: rewards of the B completions.
        statistics: work of the engine, by rollout.
        seconds: duration of the rollout.
    """

    places: list[int]
    prompts: list[Prompt]
    texts: list[str]
    rollout: Rollout
    scores: Scores
    statistics: list[Statistics]
    seconds: float


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
    model: LoadedModel,
    params: dict,
    lora: Lora | None,
    prompts: Sequence[Prompt],
    cursor: Cursor,
    *,
    config: CollectConfig,
    processes: Processes = ALONE,
    executables: Executables | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    on_wait: Callable[[], None] | None = None,
) -> tuple[Experience, Cursor]:
    """Samples and scores the completions of a step.

    A completion is scored as soon as it has ended, while the others are still decoded.

    With several rounds, groups without any difference in the metric are replaced by groups of
    further prompts, until there are P informative groups or the rounds are used up. Missing groups
    are then filled with uninformative ones, so that all steps have the same shapes. The groups of a
    round in which every reward failed are uninformative ones.

    Args:
        key: key of all draws of this step.
        model: architecture and tokenizer.
        params: parameters of the policy that samples, noise included, on one device or
            replicated.
        lora: adapter of the policy, or None.
        prompts: the training prompts.
        cursor: position in the prompts.
        config: options.
        processes: the processes of the run, each of which samples and scores a part.
        executables: compiled rollout programs, as in `replicas.generate_steps`.
        on_progress: called with the number of finished rows of a rollout and the number of tokens
            of all rounds, after every chunk but the last of a rollout.
        on_wait: called while rewards work, as in `score.Scoring`.

    Returns:
        The experience, and the cursor after it.

    Raises:
        NoRewardError: every reward of every completion of the step failed.
    """
    before, taken = cursor, list[int]()

    def sample(index: int, cursor: Cursor, tokens: int) -> tuple[_Round, Cursor]:
        places, cursor = draw(config.order, cursor, config.prompts_per_step, without=taken)
        taken.extend(places)
        drawn = [prompts[place] for place in places]
        lengths = [len(prompt.ids) for prompt in drawn]
        own = own_prompts(lengths, processes)
        rows = [drawn[i] for i in own for _ in range(config.group_size)]
        texts = _Texts(rows, model, config)
        started = time.perf_counter()
        steps = generate_steps(
            jax.random.fold_in(key, index),
            params,
            lora,
            [drawn[i].ids for i in own],
            config=model.config,
            sampling=config.sampling,
            tokenizer=model.tokenizer,
            engine=config.engine,
            group_size=config.group_size,
            prompt_ids=own.tolist(),
            executables=executables,
        )
        with (
            contextlib.closing(steps),
            Scoring(
                config.rewards, len(rows), time_limit=config.time_limit, on_wait=on_wait
            ) as scoring,
        ):
            for progress in steps:
                if on_progress is not None and progress.ended_rows < progress.rows:
                    on_progress(progress.ended_rows, tokens + progress.tokens)
                scoring.add(texts.ended(progress))
            seconds = time.perf_counter() - started
            # The last progress has the whole rollout.
            made = Scored(progress.rollout, scoring.finish(), [progress.statistics], seconds)
        made = gathered(made, lengths, model.tokenizer.pad_id, processes)
        found = [texts.found[row] for row in range(len(rows))]
        if processes.count > 1:
            rows = [prompt for prompt in drawn for _ in range(config.group_size)]
            found = detokenize(made.rollout, model.tokenizer.decode)
        scores = _penalized(made.scores, made.rollout, config)
        cursor = record(config.order, cursor, places, _correct(scores, config))
        done = _Round(places, rows, found, made.rollout, scores, made.statistics, made.seconds)
        return done, cursor

    rounds, informative, cursor = _sample_rounds(sample, cursor, config)
    sampled = _concatenate(rounds)
    _check_rewards(sampled.scores)
    made = _choose(sampled, informative, config)
    curriculum = order_metrics(config.order, before, cursor, taken)
    return dataclasses.replace(made, metrics=made.metrics | curriculum), cursor


class _Texts:
    """The completions of a rollout as text, each from when it has ended.

    Attributes:
        found: texts by row.
    """

    def __init__(self, prompts: list[Prompt], model: LoadedModel, config: CollectConfig):
        self.found: dict[int, str] = {}
        self._prompts, self._tokenizer = prompts, model.tokenizer
        self._limit = config.sampling.max_new_tokens

    def ended(self, progress: RolloutProgress) -> dict[int, Completion]:
        """Returns the completions that have ended since the last call, by row."""
        rollout = progress.rollout
        ended = rollout.finished | (rollout.lengths == self._limit)
        if progress.ended_rows == progress.rows:
            ended = np.ones(progress.rows, bool)
        new = {}
        for row in np.flatnonzero(ended).tolist():
            if row in self.found:
                continue
            length, prompt = int(rollout.lengths[row]), self._prompts[row]
            self.found[row] = self._tokenizer.decode(rollout.tokens[row, :length].tolist())
            new[row] = Completion(
                prompt.text,
                self.found[row],
                prompt.problem.answer,
                length,
                bool(rollout.finished[row]),
                prompt.problem.columns,
            )
        return new


def _sample_rounds(
    sample: Callable[[int, Cursor, int], tuple[_Round, Cursor]],
    cursor: Cursor,
    config: CollectConfig,
) -> tuple[list[_Round], np.ndarray, Cursor]:
    """DAPO's dynamic sampling: samples until P groups are informative or the rounds are used up.

    A group is informative when the metric of its completions differs.

    Args:
        sample: makes a round from its index, the cursor and the number of tokens sampled so far.
        cursor: position of the next prompt.
        config: options.

    Returns:
        The rounds, bool [groups] that marks the informative groups, and the cursor.
    """
    rounds: list[_Round] = []
    informative = np.zeros(0, bool)
    while informative.sum() < config.prompts_per_step and len(rounds) < config.rounds:
        tokens = sum(int(done.rollout.lengths.sum()) for done in rounds)
        done, cursor = sample(len(rounds), cursor, tokens)
        rounds.append(done)
        informative = np.concatenate([_informative(done.scores, config) for done in rounds])
    return rounds, informative, cursor


def _informative(scores: Scores, config: CollectConfig) -> np.ndarray:
    """Returns bool [groups]: whether the metric of dynamic sampling differs within a group."""
    if config.metric in scores.parts:
        return _differ(scores.parts[config.metric], config.group_size)
    return _total_differs(scores, config)


def _total_differs(scores: Scores, config: CollectConfig) -> np.ndarray:
    """Returns bool [groups]: whether the advantages of a group are not all 0."""
    if config.advantage == "grpo":
        return _differ(scores.total, config.group_size)
    parts = [scores.parts[name] for name, weight in config.weights.items() if weight]
    return np.any([_differ(part, config.group_size) for part in parts], axis=0)


def _differ(values: np.ndarray, group_size: int) -> np.ndarray:
    """Returns bool [groups]: whether the values that are present differ within a group."""
    return group_advantages(values.reshape(-1, group_size), scale="none").any(axis=1)


def _choose(sampled: _Round, informative: np.ndarray, config: CollectConfig) -> Experience:
    """P of the sampled groups: informative ones first, each kind in the order of sampling."""
    metrics = _metrics(sampled, config) | {
        "rollout_tokens": int(sampled.rollout.lengths.sum()),
        "rollout_live_share": live_fraction(sampled.statistics),
        "rollout_seconds": sampled.seconds,
        "reward_seconds": sampled.scores.seconds,
        "rollout_tokens_per_second": float(sampled.rollout.lengths.sum()) / sampled.seconds,
    }
    groups = np.sort(np.argsort(~informative, stable=True)[: config.prompts_per_step])
    rows = (groups[:, None] * config.group_size + np.arange(config.group_size)).reshape(-1)
    scores = dataclasses.replace(
        sampled.scores,
        total=sampled.scores.total[rows],
        parts={name: values[rows] for name, values in sampled.scores.parts.items()},
    )
    return Experience(
        prompts=[sampled.prompts[row] for row in rows],
        texts=[sampled.texts[row] for row in rows],
        rollout=jax.tree.map(lambda x: x[rows], sampled.rollout),
        scores=scores,
        metrics=metrics,
    )


def _check_rewards(scores: Scores) -> None:
    """Refuses a step in which every reward failed; of its rounds, any may lack all rewards."""
    if not np.isnan(scores.total).all():
        return
    if scores.errors:
        raise NoRewardError(
            f"no completion has a reward, nothing can be learned: {scores.errors[0]}; fix it and "
            "run the same command again"
        )
    scores.errors.append("no completion has a reward: every function with a weight returned None")


def _penalized(scores: Scores, rollout: Rollout, config: CollectConfig) -> Scores:
    """Adds the length penalty.

    A completion without a reward has none, which would be an advantage with GDPO.
    """
    if not config.overlong_buffer:
        return scores
    limit = config.sampling.max_new_tokens
    penalty = np.array(
        [overlong_penalty(int(n), limit, config.overlong_buffer) for n in rollout.lengths]
    )
    penalty = np.where(np.isnan(scores.total), np.nan, penalty)
    return dataclasses.replace(
        scores,
        total=scores.total + config.overlong_weight * penalty,
        parts=scores.parts | {"overlong": penalty},
    )


def _concatenate(rounds: list[_Round]) -> _Round:
    scores = [done.scores for done in rounds]
    return _Round(
        places=[place for done in rounds for place in done.places],
        prompts=[prompt for done in rounds for prompt in done.prompts],
        texts=[text for done in rounds for text in done.texts],
        rollout=jax.tree.map(lambda *x: np.concatenate(x), *(done.rollout for done in rounds)),
        scores=Scores(
            total=np.concatenate([part.total for part in scores]),
            parts={
                name: np.concatenate([part.parts[name] for part in scores])
                for name in scores[0].parts
            },
            errors=[error for part in scores for error in part.errors],
            seconds=sum(part.seconds for part in scores),
        ),
        statistics=[one for done in rounds for one in done.statistics],
        seconds=sum(done.seconds for done in rounds),
    )


def _correct(scores: Scores, config: CollectConfig) -> np.ndarray:
    """Returns float [P, G]: 1 where a completion is correct, NaN where its score is missing."""
    found = scores.parts.get("correctness", np.full(len(scores.total), np.nan))
    return np.where(np.isnan(found), np.nan, found > 0.5).reshape(-1, config.group_size)


def _metrics(sampled: _Round, config: CollectConfig) -> dict[str, float]:
    rollout, scores = sampled.rollout, sampled.scores
    tokens = max(1, int(rollout.lengths.sum()))
    groups = scores.total.reshape(-1, config.group_size)
    metrics = {
        "reward": _mean(scores.total),
        "reward_std": float(np.mean([_std(group) for group in groups])),
        "accuracy": _mean(scores.parts.get("correctness", np.array([]))),
        "format": _mean(scores.parts.get("format", np.array([]))),
        "length": float(rollout.lengths.mean()),
        "finished": float(rollout.finished.mean()),
        "entropy": float(rollout.entropies.sum() / tokens),
        "advantage_zero_groups": float(np.mean(~_total_differs(scores, config))),
        "sampled_groups": len(groups),
        "rewards_missing": int(sum(np.isnan(scores.parts[name]).sum() for name in config.rewards)),
    }
    metrics |= {f"reward/{name}": _mean(values) for name, values in scores.parts.items()}
    values = {"reward": groups} | (
        {"accuracy": scores.parts["correctness"].reshape(groups.shape)}
        if "correctness" in scores.parts
        else {}
    )
    return metrics | source_metrics(config.order, sampled.places, values)


def _mean(values: np.ndarray) -> float:
    present = values[~np.isnan(values)]
    return float(present.mean()) if present.size else float("nan")


def _std(values: np.ndarray) -> float:
    present = values[~np.isnan(values)]
    return float(present.std(ddof=1)) if present.size > 1 else 0.0
