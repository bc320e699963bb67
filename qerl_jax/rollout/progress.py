"""How far a rollout is, and how much the device has worked for it."""

import dataclasses
from collections.abc import Collection, Sequence

import numpy as np

from qerl_jax.rollout.completions import Rollout


@dataclasses.dataclass(frozen=True)
class Statistics:
    """The work of a rollout."""

    # Number of prompts that were prefilled; it includes those that fill up a batch.
    prefilled_prompts: int
    decoded: int  # row-steps of all chunks, the steps of a chunk times its rows
    live: int  # row-steps that sampled a token of a completion
    idle: int = 0  # row-steps of slots whose rows waited for an environment
    waiting_seconds: float = 0.0  # time in which the device waited for environments
    drafted: int = 0  # tokens that were drafted in live row-steps
    accepted: int = 0  # tokens of completions that came from a draft


@dataclasses.dataclass(frozen=True)
class RolloutProgress:
    """A rollout so far."""

    ended: np.ndarray  # bool [B], whether a completion has ended
    tokens: int  # number of tokens sampled
    statistics: Statistics  # work of the device
    # The completions so far. The sampler writes to its arrays when the generator continues; after
    # the last step they are the result.
    rollout: Rollout

    @property
    def rows(self) -> int:
        """Number of completions."""
        return len(self.ended)

    @property
    def ended_rows(self) -> int:
        """Number of completions that have ended."""
        return int(self.ended.sum())


def combine(
    parts: Collection[RolloutProgress], ended: np.ndarray, rollout: Rollout
) -> RolloutProgress:
    """Returns the progress of several rollouts as one, with the completions of all of them."""
    work = zip(*(dataclasses.astuple(part.statistics) for part in parts), strict=True)
    return RolloutProgress(
        ended=ended,
        tokens=sum(part.tokens for part in parts),
        statistics=Statistics(*(sum(values) for values in work)),
        rollout=rollout,
    )


def live_fraction(work: Sequence[Statistics]) -> float:
    """Returns the fraction of all decoded row-steps that are live; 1 where none was decoded."""
    decoded = sum(statistics.decoded for statistics in work)
    return sum(statistics.live for statistics in work) / decoded if decoded else 1.0


def draft_metrics(work: Sequence[Statistics]) -> dict[str, float]:
    """Returns what drafts brought; nothing where no token was drafted.

    These are the tokens that a live row gained in a decode step, its own one included, and the
    share of the drafted tokens that were accepted.
    """
    drafted = sum(statistics.drafted for statistics in work)
    if not drafted:
        return {}
    accepted = sum(statistics.accepted for statistics in work)
    live = sum(statistics.live for statistics in work)
    return {
        "rollout_tokens_per_row_step": (live + accepted) / live,
        "rollout_draft_acceptance": accepted / drafted,
    }
