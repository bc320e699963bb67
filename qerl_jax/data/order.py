"""The order in which a run trains on its problems: epochs, sources with weights, a curriculum.

Within a source, an epoch is a permutation of the problems. Several sources take turns by their
weights. With a curriculum, a part of the draws goes to problems that the policy solves in some
attempts and not in others. Every draw follows from the seed and the cursor, which is in the
checkpoints, so a resumed run draws the same problems as an uninterrupted one.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from qerl_jax.errors import UserError

_KEY_CURRICULUM = 1  # tells the draws of the curriculum from the permutations of the epochs


@dataclasses.dataclass(frozen=True)
class Source:
    """Training problems of one origin, whose name is '' where a run has one.

    The part of the draws is relative to the weights of the other sources.
    """

    name: str
    size: int
    weight: float = 1.0


@dataclasses.dataclass(frozen=True)
class Order:
    """The rule by which the training problems are drawn."""

    sources: tuple[Source, ...]  # the sources, whose problems follow one another in one list
    seed: int = 0  # seed of all draws
    # Probability with which a draw goes to the curriculum; 0 turns it off.
    curriculum_share: float = 0.0

    @property
    def shares(self) -> list[float]:
        """The part of the draws of each source; the parts add up to 1."""
        total = sum(source.weight for source in self.sources)
        return [source.weight / total for source in self.sources]

    @property
    def starts(self) -> list[int]:
        """The index of the first problem of each source in the list of all problems."""
        ends = np.cumsum([source.size for source in self.sources])
        return [0, *ends[:-1].tolist()]

    def sources_of(self, places: Sequence[int]) -> np.ndarray:
        """The number of the source, int [P], that holds each of P places."""
        return np.searchsorted(self.starts, np.asarray(places, int), side="right") - 1


@dataclasses.dataclass(frozen=True)
class SourcePosition:
    """How far the training is in one source."""

    epoch: int = 0  # number of finished epochs
    index: int = 0  # number of problems of this epoch that were drawn
    credit: float = 0.0  # number of draws by which the source lags behind its share
    decided: int = 0  # number of draws that were divided between the epoch and the curriculum
    # By problem, how many completions of its last group were correct, and of how many.
    results: Mapping[int, tuple[int, int]] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The position as a JSON object, without the fields that no draw has changed."""
        fields: dict[str, Any] = {"epoch": self.epoch, "index": self.index}
        fields |= {"credit": self.credit} if self.credit else {}
        fields |= {"decided": self.decided} if self.decided else {}
        results = [[problem, *counts] for problem, counts in sorted(self.results.items())]
        return fields | ({"scored": results} if results else {})


@dataclasses.dataclass(frozen=True)
class Cursor:
    """How far the training is in all sources."""

    # The position in each source by its name; a source without a position is at its beginning.
    positions: Mapping[str, SourcePosition] = dataclasses.field(default_factory=dict)

    def position(self, source: Source) -> SourcePosition:
        """The position in a source."""
        return self.positions.get(source.name, SourcePosition())

    def at(self, source: Source, position: SourcePosition) -> "Cursor":
        """The cursor with another position in a source."""
        return Cursor({**self.positions, source.name: position})

    def without_scores(self) -> "Cursor":
        """The cursor without what a curriculum remembers."""
        positions = {
            name: dataclasses.replace(position, decided=0, results={})
            for name, position in self.positions.items()
        }
        return Cursor(positions)

    def to_json(self) -> dict[str, Any]:
        """The cursor as a JSON object: the only source's position, or the positions by name."""
        if self.positions.keys() <= {""}:
            return self.positions.get("", SourcePosition()).to_json()
        return {"sources": {name: position.to_json() for name, position in self.positions.items()}}


def read_cursor(saved: Mapping[str, Any]) -> Cursor:
    """Returns the cursor that `Cursor.to_json` gave.

    Raises:
        UserError: the content is that of no cursor.
    """
    sources = saved.get("sources", {"": saved})
    try:
        return Cursor({name: _read_position(position) for name, position in sources.items()})
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise UserError(f"a checkpoint holds no position in the data: {saved!r:.100}") from error


def _read_position(saved: Mapping[str, Any]) -> SourcePosition:
    position = SourcePosition(**{name: value for name, value in saved.items() if name != "scored"})
    results = {problem: (correct, total) for problem, correct, total in saved.get("scored", [])}
    counts = [position.epoch, position.index, position.decided, *results]
    counts += [count for pair in results.values() for count in pair]
    if not all(type(count) is int and 0 <= count < 2**62 for count in counts):
        raise ValueError("a count is no whole number")
    if not math.isfinite(position.credit):
        raise ValueError("a credit is no number")
    return dataclasses.replace(position, results=results)


def take_turns(order: Order, cursor: Cursor, n: int) -> tuple[list[int], Cursor]:
    """Divides the next n draws among the sources.

    Each draw goes to the source that lags behind its share of the draws the most, so that no source
    is ever a whole problem ahead of its share. Returns the number of the source of each draw, and
    the cursor with the new credits.
    """
    credits = [cursor.position(source).credit for source in order.sources]
    turns, credits = _divide(order.shares, credits, n)
    for source, credit in zip(order.sources, credits, strict=True):
        cursor = cursor.at(source, dataclasses.replace(cursor.position(source), credit=credit))
    return turns, cursor


def refill_turns(lack: Sequence[int] | np.ndarray, n: int) -> list[int]:
    """Divides n draws that replace others among the sources, in proportion to what they lack.

    Returns the number of the source of each draw.
    """
    shares = np.asarray(lack, float) / np.sum(lack)
    return _divide(shares.tolist(), [0.0] * len(shares), n)[0]


def draw_turns(
    order: Order, cursor: Cursor, turns: Sequence[int], *, exclude: Collection[int] = ()
) -> tuple[list[int], Cursor]:
    """Draws a problem from each of some sources.

    With a curriculum, a draw goes to it with the probability `curriculum_share`. It then takes a
    problem with a probability in proportion to its learnability p (1 - p), where p is the part of
    the last group of the problem that was correct: sampling for learnability (arXiv 2502.12272,
    which measures p by rollouts of its own and keeps the best problems in a buffer). All other
    draws, and those for which no such problem is left, continue the epoch, so that problems that
    were always or never solved are drawn once an epoch, and every problem is measured.

    Args:
        order: the rule.
        cursor: where the last call ended.
        turns: the number of the source of each draw. They may reach into its next epochs.
        exclude: problems that the curriculum does not take, as the step has them already.

    Returns:
        Places of the problems in the list of all problems, and the cursor for the next call.

    Raises:
        UserError: the cursor is past the end of a source, or a source has no problems.
    """
    places = []  # by source
    for number, (source, start) in enumerate(zip(order.sources, order.starts, strict=True)):
        position, count = cursor.position(source), turns.count(number)
        excluded = {problem - start for problem in exclude}
        rng = np.random.default_rng((order.seed, position.decided, number, _KEY_CURRICULUM))
        curriculum_count = (
            int(rng.binomial(count, order.curriculum_share)) if order.curriculum_share else 0
        )
        epoch_problems, position = _draw_epoch(
            source, position, count - curriculum_count, seed=(order.seed, number)
        )
        curriculum_problems = _draw_learnable(
            position, curriculum_count, rng, excluded.union(epoch_problems)
        )
        fill, position = _draw_epoch(
            source, position, curriculum_count - len(curriculum_problems), seed=(order.seed, number)
        )
        if order.curriculum_share:
            position = dataclasses.replace(position, decided=position.decided + count)
        problems = [*epoch_problems, *curriculum_problems, *fill]
        if order.curriculum_share:  # A larger rollout keeps its first groups, of either kind.
            rng.shuffle(problems)
        places.append(iter([start + problem for problem in problems]))
        cursor = cursor.at(source, position)
    return [next(places[number]) for number in turns], cursor


def record_results(
    order: Order, cursor: Cursor, problems: Sequence[int], correct: np.ndarray
) -> Cursor:
    """Remembers how the policy did on problems, for the curriculum.

    Args:
        order: the rule; without a curriculum nothing is remembered.
        cursor: the cursor after the problems were drawn.
        problems: P places in the list of all problems.
        correct: float [P, G], 1 where a completion is correct, 0 where it is not, and NaN where
            the score is missing. A group without any score is not remembered.
    """
    if not order.curriculum_share:
        return cursor
    for source, start in zip(order.sources, order.starts, strict=True):
        position = cursor.position(source)
        results = {
            problem - start: (int(np.nansum(row)), int(np.sum(~np.isnan(row))))
            for problem, row in zip(problems, correct, strict=True)
            if start <= problem < start + source.size and not np.isnan(row).all()
        }
        cursor = cursor.at(
            source, dataclasses.replace(position, results={**position.results, **results})
        )
    return cursor


def order_metrics(
    order: Order, before: Cursor, after: Cursor, problems: Sequence[int]
) -> dict[str, float]:
    """What the curriculum did in a step; {} without one.

    `problems` are the places of all that the step has drawn.

    Returns:
        `curriculum/success_rate`, the mean p of the drawn problems that had been measured before
        (NaN without one); `curriculum/measured`, the part of the drawn problems that had been
        measured; and `curriculum/seen`, the part of all problems that have been measured so far.
    """
    if not order.curriculum_share:
        return {}
    rates, sizes = [], [source.size for source in order.sources]
    for source, start in zip(order.sources, order.starts, strict=True):
        results = before.position(source).results
        rates += [results[i - start] for i in problems if i - start in results]
    return {
        "curriculum/success_rate": float(np.mean([a / b for a, b in rates])) if rates else np.nan,
        "curriculum/measured": len(rates) / len(problems),
        "curriculum/seen": sum(len(after.position(source).results) for source in order.sources)
        / sum(sizes),
    }


def source_metrics(
    order: Order,
    problems: Sequence[int],
    values: Mapping[str, np.ndarray],
    trained: Sequence[int] | None = None,
) -> dict[str, float]:
    """Means of the completions of each source in a mixture; {} where a run has one source.

    Args:
        order: the rule.
        problems: P places, in the list of all problems, of those that were sampled.
        values: float [P, G] of the completions by the name of the metric; NaN is missing.
        trained: places of the problems that the step trains on; None is all that were sampled.

    Returns:
        `source/NAME/METRIC`, NaN where the step has no value, and `source/NAME/share`, the part of
        the problems that the step trains on.
    """
    numbers = order.sources_of(problems)
    trained_numbers = numbers if trained is None else order.sources_of(trained)
    metrics: dict[str, float] = {}
    for number, source in enumerate(order.sources):
        if not source.name:
            continue
        mask = numbers == number
        for name, rows in values.items():
            present = rows[mask][~np.isnan(rows[mask])]
            metrics[f"source/{source.name}/{name}"] = present.mean() if present.size else np.nan
        metrics[f"source/{source.name}/share"] = (trained_numbers == number).mean()
    return {name: float(value) for name, value in metrics.items()}


def _divide(
    shares: Sequence[float], credits: Sequence[float], n: int
) -> tuple[list[int], list[float]]:
    """The number of the source of each of n draws, and the new credits."""
    turns, credits = [], list(credits)
    for _ in range(n):
        credits = [credit + share for credit, share in zip(credits, shares, strict=True)]
        turns.append(int(np.argmax(credits)))
        credits[turns[-1]] -= 1.0
    return turns, credits


def _draw_epoch(
    source: Source, position: SourcePosition, n: int, *, seed: tuple[int, int]
) -> tuple[list[int], SourcePosition]:
    """The next n problems of a source in its epochs.

    The seed is that of the run, and the number of the source.
    """
    epoch, index = position.epoch, position.index
    if index >= source.size:
        name = f" of the source {source.name!r}" if source.name else ""
        raise UserError(
            f"the data cursor is at problem {index} of {source.size}{name}: the "
            "training data is not what the run began with"
        )
    problems: list[int] = []
    while len(problems) < n:
        # A 0 at the end leaves a seed as it is, so the first source has the order of a run alone.
        rng = np.random.default_rng((seed[0], epoch, seed[1]))
        part = rng.permutation(source.size)[index : index + n - len(problems)].tolist()
        problems += part
        index += len(part)
        if index == source.size:
            epoch, index = epoch + 1, 0
    return problems, dataclasses.replace(position, epoch=epoch, index=index)


def _draw_learnable(
    position: SourcePosition, n: int, rng: np.random.Generator, exclude: Collection[int]
) -> list[int]:
    """At most n different problems, each with a probability in proportion to p (1 - p)."""
    learnability = {
        i: a * (b - a) / b**2 for i, (a, b) in sorted(position.results.items()) if 0 < a < b
    }
    candidates = {
        problem: value for problem, value in learnability.items() if problem not in exclude
    }
    count = min(n, len(candidates))
    if not count:
        return []
    weights = np.array(list(candidates.values()))
    return rng.choice(list(candidates), count, replace=False, p=weights / weights.sum()).tolist()
