"""What happens when a turn of a row has ended: the row ends, or hands it to an environment.

A policy says how long a turn may be, what its end does to the row, and which replies are there. A
reply comes back as token ids, which are prefilled on the row's live cache together with those of
other rows, and the next turn begins.

When an environment replies depends on the time, and so does which rows are in a batch. So all
batches of a rollout with conversations have one size: a row has the same numbers whatever the other
rows do.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from qerl_jax.environments.roles import ANSWER, CONTEXT, TOKENS, Reply, Turn
from qerl_jax.rollout.config import TurnConfig
from qerl_jax.rollout.row import Row, State


class Dialog(Protocol):
    """The part of the environments' episodes that a rollout uses."""

    def submit(self, turn: Turn, /) -> None:
        """Hands a turn to the environment of its row, without waiting."""
        ...

    def replies(self, seconds: float, /) -> Sequence[Reply]:
        """Returns the replies that are there, or waits until one is or the seconds have passed."""
        ...

    def part(self, rows: Sequence[int], /) -> "Dialog":
        """Returns the dialog of some of the rows, in which they are numbered from 0.

        Another thread may use it while others use the parts of other rows.
        """
        ...


class OneTurn:
    """Completions of one turn: a row ends with it."""

    keeps_cache = False  # whether a row keeps its slot when its turn has its last tokens
    host_bytes = 0  # bytes of the host for what rows keep that wait without a slot

    def __init__(self, max_new_tokens: int) -> None:
        self._max_new_tokens = max_new_tokens

    def turn_tokens(self, length: int, sampled: int) -> int:
        """Returns the limit of the next turn after `length` tokens, `sampled` of them sampled."""
        return self._max_new_tokens - sampled

    def end_turn(self, row: Row, ids: np.ndarray, *, complete: bool) -> None:
        """Ends the row; the turn is `complete` where no limit has ended it."""
        row.end(ANSWER if complete else TOKENS)

    def replies(self, seconds: float) -> Sequence[Reply]:
        """Returns no reply."""
        return ()


class Conversations:
    """Completions of several turns, after each of which an environment replies or ends the row."""

    keeps_cache = True

    def __init__(self, dialog: Dialog, limits: TurnConfig, max_new_tokens: int) -> None:
        self._dialog, self._limits, self._max_new_tokens = dialog, limits, max_new_tokens
        self.host_bytes = limits.host_cache_bytes

    def turn_tokens(self, length: int, sampled: int) -> int:
        """Returns the limit of the next turn."""
        return self._limits.next_turn(length, sampled, self._max_new_tokens)

    def end_turn(self, row: Row, ids: np.ndarray, *, complete: bool) -> None:
        """Submits the turn."""
        row.state = State.AT_ENVIRONMENT
        limits, length = self._limits, row.start + len(ids)
        space, limit = min(limits.reply_tokens, limits.context_tokens - length - 1), CONTEXT
        if row.sampled >= self._max_new_tokens:
            space, limit = 0, TOKENS
        self._dialog.submit(Turn(row.number, ids.tolist(), complete, max(0, space), limit))

    def replies(self, seconds: float) -> Sequence[Reply]:
        """Returns those of the environments."""
        return self._dialog.replies(seconds)


type TurnPolicy = OneTurn | Conversations
