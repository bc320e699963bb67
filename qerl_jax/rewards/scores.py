"""What is scored, and the scores."""

import dataclasses
from collections.abc import Mapping
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


@dataclasses.dataclass
class Scores:
    """The rewards of B completions.

    Attributes:
        total: float64 [B] weighted sums of the rewards that are present; NaN where no reward with a
            non-zero weight is present.
        parts: float64 [B] unweighted values of each reward, by name; NaN where a reward is missing.
        errors: one line for each distinct failure, with its count.
        seconds: time in which this process called rewards or waited for them.
    """

    total: np.ndarray
    parts: dict[str, np.ndarray]
    errors: list[str]
    seconds: float = 0.0
