"""What is scored, and the scores."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


class Completion(NamedTuple):
    """A completion to score: its texts, its length in tokens, whether it ended, and its row."""

    prompt: str
    completion: str
    answer: str
    num_tokens: int
    finished: bool
    columns: Mapping[str, Any]
    # The chat messages after the prompt, as TRL has them; () where the completion is the only one.
    conversation: Sequence[Mapping[str, Any]] = ()


@dataclasses.dataclass
class Scores:
    """The rewards of B completions.

    Attributes:
        total: float64 [B] weighted sums of the rewards that are present; NaN where none with a
            non-zero weight is present, or where one has failed.
        parts: float64 [B] unweighted values of each reward, by name; NaN where a reward is missing.
        errors: one line for each distinct failure, with its count.
        seconds: time in which this process called rewards or waited for them.
    """

    total: np.ndarray
    parts: dict[str, np.ndarray]
    errors: list[str]
    seconds: float = 0.0

    def parts_of_groups(self, group_size: int) -> dict[str, np.ndarray]:
        """The rewards [P, G] by name; NaN in a completion without a total, which takes no part."""
        has_total = ~np.isnan(self.total)
        return {
            name: np.where(has_total, part, np.nan).reshape(-1, group_size)
            for name, part in self.parts.items()
        }
