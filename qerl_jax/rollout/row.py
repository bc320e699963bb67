"""A row of a rollout, from its prompt to what ends it; and the decision which row comes next."""

import dataclasses
import enum
import itertools
from collections.abc import Callable, Collection, Sequence
from operator import attrgetter
from typing import NamedTuple

import jax
import numpy as np

from qerl_jax.environments.roles import OPEN

NO_SLOT = -1
_PATIENCE = 0.3  # seconds after which a row that is at its environment may lose its slot
_PATIENCE_ALONE = 0.05  # the same where no row decodes


class State(enum.Enum):
    """What a row does."""

    WAITING = enum.auto()  # has had no slot yet
    DECODING = enum.auto()
    AT_ENVIRONMENT = enum.auto()  # its turn has ended, and the reply is not there
    READY = enum.auto()  # the reply is there, and is to be prefilled
    ENDED = enum.auto()


@dataclasses.dataclass(slots=True, eq=False)
class Row:
    """A completion that is sampled; its token ids, which only grow, are in the rollout."""

    number: int  # index of the row
    identity: int  # what its samples depend on, besides the key and their positions
    group: int  # index of its prompt
    prompt: Sequence[int]  # token ids
    state: State = State.WAITING
    cache_row: int = NO_SLOT  # index of its keys and values in the batch
    kept: list[jax.Array] | None = None  # these in memory of the host, if it has lost its slot
    start: int = 0  # length of the completion at which its turn began
    limit: int = 0  # length of the completion at which its turn is cut off
    scheduled: int = 0  # smallest length once the device has finished what is in flight
    turn: int = 0  # number of turns that have ended; samples of an earlier one are ignored
    sampled: int = 0  # number of sampled tokens of these turns
    since: float = 0.0  # time at which the last of them ended, in seconds
    reply: Sequence[int] = ()  # token ids that the environment wrote after it
    filled: int = 0  # length of the completion that the cache holds before an extension
    ending: int = OPEN  # what ended the row, see `environments.roles`

    @property
    def decodes(self) -> bool:
        """Whether the row may continue after the samples in flight."""
        return self.state is State.DECODING and self.scheduled < self.limit

    def begin_turn(self, length: int, tokens: int) -> None:
        """Begins a turn of at most `tokens` tokens after the first `length` of the completion."""
        self.state, self.limit = State.DECODING, length + tokens
        self.start = self.scheduled = length

    def end(self, ending: int) -> None:
        """Ends the row, which gives up its slot."""
        self.state, self.ending = State.ENDED, ending
        self.cache_row, self.kept = NO_SLOT, None


class Next(NamedTuple):
    """Which rows come next."""

    evicted: list[Row]  # rows that give up their slots to others
    resumed: list[Row]  # rows whose next turn begins; without a slot, they get the first free ones
    begun: int  # how many rows that have had no slot get one


def next_rows(
    live: Collection[Row],
    *,
    waiting: int,
    slots: int,
    now: float,
    fits: Callable[[Row], bool] = lambda _: True,
) -> Next:
    """Decides which rows come next.

    Rows whose environment has replied come before rows that have had no slot. A row that is at its
    environment for long, or while no row decodes, gives up its slot to one that needs it, if what
    it keeps `fits` on the host together with that of those before; else it keeps the slot.
    """
    ready = [row for row in live if row.state is State.READY]
    if not (ready or waiting):
        return Next([], [], 0)
    ready.sort(key=attrgetter("number"))
    resumed = [row for row in ready if row.kept is None]
    returning = [row for row in ready if row.kept is not None]
    free = slots - sum(row.cache_row != NO_SLOT for row in live)
    evicted: list[Row] = []
    if (wanted := len(returning) + waiting - free) > 0:
        before = now - (_PATIENCE if any(row.decodes for row in live) else _PATIENCE_ALONE)
        patient = [
            row
            for row in live
            if row.state is State.AT_ENVIRONMENT and row.kept is None and row.since <= before
        ]
        patient.sort(key=attrgetter("since", "number"))
        evicted = list(itertools.islice(filter(fits, patient), wanted))
    free += len(evicted)
    returning = returning[:free]
    return Next(evicted, resumed + returning, min(waiting, free - len(returning)))


def array_of(rows: Sequence[Row], name: str) -> np.ndarray:
    """Returns an attribute of rows as an array: int [R]."""
    return np.fromiter(map(attrgetter(name), rows), int, len(rows))
