"""The first half of a step: sample completions, score them, compare them within their groups."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from qerl_jax.data import Cursor, Prompt, next_problems
from qerl_jax.errors import UserError
from qerl_jax.policy.lora import Lora
from qerl_jax.rl.advantages import group_advantages
from qerl_jax.rl.rewards import Reward, Scores, overlong_penalty, score
from qerl_jax.rollout.completions import Rollout
from qerl_jax.rollout.config import EngineConfig, SamplingConfig
from qerl_jax.rollout.engine import detokenize, generate_steps, live_fraction
from qerl_jax.rollout.programs import Executables
from qerl_jax.rollout.scheduler import Statistics
from qerl_jax.weights.load import LoadedModel


@dataclasses.dataclass(frozen=True)
class CollectConfig:
    """How a step's completions are made.

    Attributes:
        prompts_per_step: P.
        group_size: G, completions of each prompt.
        sampling: distribution and length of the completions.
        engine: how the engine samples.
        rewards: function and weight by name.
        time_limit: seconds for one call of a reward.
        overlong_buffer: tokens before the limit where the length penalty begins; 0 is off.
        overlong_weight: factor of the length penalty, which is -1 at the limit.
        advantage_scale: see `advantages.group_advantages`.
        advantage_eps: likewise.
        rounds: rollouts that a step may make to replace groups whose rewards are all equal (DAPO's
            dynamic sampling); 1 replaces none.
        data_seed: of the order of the problems.
    """

    prompts_per_step: int
    group_size: int
    sampling: SamplingConfig
    engine: EngineConfig
    rewards: Mapping[str, tuple[Reward, float]]
    time_limit: float
    overlong_buffer: int
    overlong_weight: float
    advantage_scale: str
    advantage_eps: float
    rounds: int
    data_seed: int


@dataclasses.dataclass(frozen=True)
class Experience:
    """The B = P G scored completions of a step; the rows of a group are neighbours.

    Attributes:
        prompts: B prompts.
        texts: B completions as text.
        rollout: B completions as tokens.
        scores: their rewards.
        advantages: float32 [B].
        metrics: what to log, over everything that was sampled, replaced groups included.
    """

    prompts: list[Prompt]
    texts: list[str]
    rollout: Rollout
    scores: Scores
    advantages: np.ndarray
    metrics: dict[str, float]


def collect(
    key: jax.Array,
    model: LoadedModel,
    params: dict,
    lora: Lora | None,
    problems: Sequence[Prompt],
    cursor: Cursor,
    *,
    config: CollectConfig,
    executables: Executables | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[Experience, Cursor]:
    """Makes a step's experience.

    With several rounds, groups without any difference in reward are replaced by groups of further
    prompts, until P informative ones are there or the rounds are used up; what is missing then is
    filled with uninformative groups, so that the shapes stay.

    Args:
        key: of all draws of this step.
        model: the architecture and the tokenizer.
        params: the policy that samples, noise included.
        lora: its adapter, or None.
        problems: the training prompts.
        cursor: the place of the next one.
        config: how.
        executables: programs of the rollouts, as in `engine.generate_steps`.
        on_progress: called with the rows that have ended and the tokens sampled in all rounds,
            after every chunk but the last of a rollout.

    Returns:
        The experience, and the cursor after it.

    Raises:
        UserError: every reward of every completion of a rollout failed.
    """
    groups, group_size = config.prompts_per_step, config.group_size
    prompts, rollouts, rollout_seconds = [], [], 0.0
    costs: list[Statistics] = []
    parts: list[Scores] = []
    texts: list[str] = []
    for index in range(config.rounds):
        drawn, cursor = next_problems(problems, cursor, groups, seed=config.data_seed)
        drawn_tokens = sum(int(rollout.lengths.sum()) for rollout in rollouts)
        started = time.perf_counter()
        for step in generate_steps(
            jax.random.fold_in(key, index),
            params,
            lora,
            [prompt.ids for prompt in drawn],
            config=model.config,
            sampling=config.sampling,
            tokenizer=model.tokenizer,
            engine=config.engine,
            group_size=group_size,
            executables=executables,
        ):
            if on_progress is not None and step.ended_rows < step.rows:
                on_progress(step.ended_rows, drawn_tokens + step.tokens)
        rollout = step.rollout
        costs.append(step.statistics)
        rollout_seconds += time.perf_counter() - started
        rows = [prompt for prompt in drawn for _ in range(group_size)]
        decoded = detokenize(rollout, model.tokenizer.decode)
        prompts += rows
        texts += decoded
        rollouts.append(rollout)
        parts.append(_score(rows, decoded, rollout, config))
        total = np.concatenate([scores.total for scores in parts]).reshape(-1, group_size)
        informative = group_advantages(total, scale="none").any(axis=1)
        if informative.sum() >= groups:
            break
    rollout = jax.tree.map(lambda *x: np.concatenate(x), *rollouts)
    scores = _concatenate(parts)
    metrics = _metrics(rollout, scores, informative) | {
        "rollout_tokens": int(rollout.lengths.sum()),
        "rollout_live_share": live_fraction(costs),
        "rollout_seconds": rollout_seconds,
        "rollout_tokens_per_second": float(rollout.lengths.sum()) / rollout_seconds,
    }
    chosen = np.sort(np.argsort(~informative, stable=True)[:groups])
    rows = (chosen[:, None] * group_size + np.arange(group_size)).reshape(-1)
    scores = Scores(
        total=scores.total[rows],
        parts={name: values[rows] for name, values in scores.parts.items()},
        errors=scores.errors,
    )
    advantages = group_advantages(
        scores.total.reshape(groups, group_size),
        scale=config.advantage_scale,
        eps=config.advantage_eps,
    )
    return Experience(
        prompts=[prompts[row] for row in rows],
        texts=[texts[row] for row in rows],
        rollout=jax.tree.map(lambda x: x[rows], rollout),
        scores=scores,
        advantages=advantages.reshape(-1),
        metrics=metrics,
    ), cursor


def _score(
    prompts: list[Prompt], texts: list[str], rollout: Rollout, config: CollectConfig
) -> Scores:
    scores = score(
        config.rewards,
        [prompt.text for prompt in prompts],
        texts,
        [prompt.problem.answer for prompt in prompts],
        rollout.lengths,
        rollout.finished,
        time_limit=config.time_limit,
    )
    if np.isnan(scores.total).all():
        if scores.errors:
            raise UserError(
                f"no completion has a reward, nothing can be learned: {scores.errors[0]}; mend it "
                "and run the same command again"
            )
        scores.errors.append("no completion has a reward: every function that counts returned None")
    if not config.overlong_buffer:
        return scores
    limit = config.sampling.max_new_tokens
    penalty = np.array(
        [overlong_penalty(int(n), limit, config.overlong_buffer) for n in rollout.lengths]
    )
    return Scores(
        total=scores.total + config.overlong_weight * penalty,
        parts=scores.parts | {"overlong": penalty},
        errors=scores.errors,
    )


def _concatenate(parts: list[Scores]) -> Scores:
    return Scores(
        total=np.concatenate([scores.total for scores in parts]),
        parts={
            name: np.concatenate([scores.parts[name] for scores in parts])
            for name in parts[0].parts
        },
        errors=[error for scores in parts for error in scores.errors],
    )


def _metrics(rollout: Rollout, scores: Scores, informative: np.ndarray) -> dict[str, float]:
    tokens = max(1, int(rollout.lengths.sum()))
    groups = scores.total.reshape(len(informative), -1)
    metrics = {
        "reward": _mean(scores.total),
        "reward_std": float(np.mean([_std(group) for group in groups])),
        "accuracy": _mean(scores.parts.get("correctness", np.array([]))),
        "format": _mean(scores.parts.get("format", np.array([]))),
        "length": float(rollout.lengths.mean()),
        "finished": float(rollout.finished.mean()),
        "entropy": float(rollout.entropies.sum() / tokens),
        "advantage_zero_groups": float(np.mean(~informative)),
        "sampled_groups": len(informative),
        "rewards_missing": int(sum(np.isnan(values).sum() for values in scores.parts.values())),
    }
    return metrics | {f"reward/{name}": _mean(values) for name, values in scores.parts.items()}


def _mean(values: np.ndarray) -> float:
    present = values[~np.isnan(values)]
    return float(present.mean()) if present.size else float("nan")


def _std(values: np.ndarray) -> float:
    present = values[~np.isnan(values)]
    return float(present.std(ddof=1)) if present.size > 1 else 0.0
