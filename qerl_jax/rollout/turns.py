"""The host's side of a rollout in which rows talk to an environment.

A row's token ids only grow. When a turn of the policy has ended, the row hands it to the dialog and
waits; what the environment writes comes back as token ids, which are prefilled on the row's live
cache together with those of other rows, and the next turn begins. A row that waits for long, or
while no other row decodes, gives up its slot to one that has none. The host keeps its keys and
values.

When an environment replies depends on the time, and so does which rows are in a batch. So all
batches of a rollout have one size: a row has the same numbers whatever the other rows do.
"""

import dataclasses
import time
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from qerl_jax.environments.roles import ANSWER, CONTEXT, DONE, OPEN, TOKENS, Reply, Turn
from qerl_jax.rollout.config import TurnConfig
from qerl_jax.rollout.decode import Samples
from qerl_jax.rollout.progress import Statistics
from qerl_jax.rollout.scheduler import _NO_ROW, Scheduler

_PATIENCE = 0.3  # seconds after which a row that waits may lose its slot
_TICK = 0.05  # the same where no row decodes; and between two looks whether replies are there


class Dialog(Protocol):
    """The part of the environments' episodes that a rollout uses."""

    def submit(self, turn: Turn, /) -> None:
        """Hands a turn to the environment of its row, without waiting."""
        ...

    def replies(self, seconds: float, /) -> list[Reply]:
        """Returns the replies that are there, or waits until one is or the seconds have passed."""
        ...


class _Extension(NamedTuple):
    """What a row goes on with.

    Attributes:
        row: number of the row.
        place: its cache row.
        first: the first token of the row.
        tokens: the newest token of the turn and those of the environment.
        length: number of all tokens of the row.
        limit: number of sampled tokens at which its next turn is cut off.
    """

    row: int
    place: int
    first: int
    tokens: list[int]
    length: int
    limit: int


class TurnScheduler(Scheduler):
    """Assigns slots to rows that wait for environments from time to time.

    Args:
        *arguments: arguments of a `Scheduler`.
        dialog: the environments.
        turns: limits of the conversations.
        max_new_tokens: largest number of sampled tokens of a row.
        **options: options of a `Scheduler`.

    Attributes:
        over: bool [B], whether a row has ended.
    """

    def __init__(
        self,
        *arguments: Any,
        dialog: Dialog,
        turns: TurnConfig,
        max_new_tokens: int,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        rows = len(self._identities)
        self._dialog, self._turns, self._budget = dialog, turns, max_new_tokens
        self.over = np.zeros(rows, bool)
        self._turn = np.zeros(rows, int)  # turns of each row that have ended
        self._sampled = np.zeros(rows, int)  # sampled tokens of the turns that have ended
        self._stamps: list[np.ndarray] = []  # the turn of each row of the samples in flight
        self._waits: dict[int, float] = {}  # row -> time at which it began to wait
        self._ready: dict[int, Reply] = {}
        # What rows that wait or are ready without a slot had in the cache, in memory of the host.
        self._kept: dict[int, list[jax.Array]] = {}
        self._idle = self._extended = 0
        self._seconds = 0.0

    @property
    def statistics(self) -> Statistics:
        """The work so far, with the row-steps of slots whose rows wait."""
        lengths = self.completions.rollout.sampled_lengths
        live = int(lengths.sum()) - int((lengths > 0).sum()) - self._extended
        return Statistics(
            self._prefilled_prompts,
            decoded=self._decoded,
            live=max(0, live),
            idle=self._idle,
            waiting_seconds=self._seconds,
        )

    @property
    def occupied(self) -> np.ndarray:
        """Cache rows, bool [R], whose rows have not ended."""
        return (self._rows != _NO_ROW) & ~self.over[self._rows]

    @property
    def stuck(self) -> bool:
        """Whether nothing can be done before an environment replies."""
        inserts = self.waiting and not self.occupied.all()
        return not (self.in_flight or self._ready or inserts or self.active.any())

    def decode_chunk(self) -> None:
        """Starts the decoding of a chunk."""
        idle = self.occupied & ~self.active
        self._idle += int(idle.sum()) * self._shapes.chunk_steps
        super().decode_chunk()

    def drain(self, count: int) -> None:
        """Takes the oldest `count` samples in flight, and submits the turns that have ended.

        Samples of a turn that has ended since they were started have no meaning.
        """
        began = ~self.over & ~self.completions.ended
        for _ in range(count):
            rows, samples = self.in_flight[0]
            current = (rows != _NO_ROW) & (self._turn[rows] == self._stamps.pop(0))
            self.in_flight[0] = np.where(current, rows, _NO_ROW), samples
            super().drain(1)
        now = time.monotonic()
        for row in np.flatnonzero(began & self.completions.ended).tolist():
            self._end_turn(row)
            # Rows that end together wait from the same moment, so that they leave together: the
            # first of them would let others decode, for which the last ones then wait longer.
            self._waits[row] = now

    def resume_rows(self) -> None:
        """Lets rows go on, on their live caches, whose environment has replied."""
        self.take_replies(waits=self.stuck)
        self.extend()

    def take_replies(self, *, waits: bool) -> None:
        """Takes the replies of environments.

        Args:
            waits: whether the device has nothing else to do, so that the host may wait a moment.
        """
        began = time.perf_counter()
        for reply in self._dialog.replies(_TICK if waits else 0.0):
            self._waits.pop(reply.row, None)
            if reply.ending == OPEN:
                self._ready[reply.row] = reply
            else:
                self.over[reply.row] = True
                self._kept.pop(reply.row, None)
                rollout = self.completions.rollout
                rollout.finished[reply.row] = reply.ending in (ANSWER, DONE)
                # pyrefly: ignore[unsupported-operation]  A rollout with turns has it.
                rollout.endings[reply.row] = reply.ending
        self._seconds += time.perf_counter() - began if waits else 0.0

    def extend(self) -> None:
        """Prefills what environments wrote, and samples the first token of the next turns."""
        self._evict()
        places = {int(row): place for place, row in enumerate(self._rows) if row != _NO_ROW}
        free = np.flatnonzero(~self.occupied).tolist()
        batch: list[_Extension] = []
        for row in sorted(self._ready, key=lambda row: (row in self._kept, row)):
            if row in self._kept:
                if not free:
                    continue
                places[row] = free.pop(0)
                self._restore(row, places[row])
            batch.append(self._go_on(row, places[row]))
        (size,) = self._shapes.extend_sizes
        for start in range(0, len(batch), size):
            self._extend(batch[start : start + size])

    def _end_turn(self, row: int) -> None:
        """Submits a turn that has ended."""
        completions, turns = self.completions, self._turns
        start, end = int(completions.starts[row]), int(completions.rollout.lengths[row])
        self._turn[row] += 1
        self._sampled[row] += end - start
        space = min(turns.reply_tokens, turns.context_tokens - end - 1)
        limit = CONTEXT
        if self._sampled[row] >= self._budget:
            space, limit = 0, TOKENS
        ids = completions.rollout.tokens[row, start:end].tolist()
        complete = bool(completions.rollout.finished[row])
        self._dialog.submit(Turn(row, ids, complete, max(0, space), limit))

    def _evict(self) -> None:
        """Takes the slots of rows that have waited for long, where others have none.

        What they have in the cache is kept on the host, so that a row does not depend on it.
        """
        wanted = len(self._kept.keys() & self._ready.keys())
        wanted += len(self._identities) - self._next_row
        wanted -= int((~self.occupied).sum())
        before = time.monotonic() - (_PATIENCE if self.active.any() else _TICK)
        rows = [row for row, began in self._waits.items() if began <= before]
        for row in [row for row in rows if row not in self._kept][: max(0, wanted)]:
            place = np.flatnonzero(self._rows == row)[0]
            taken = self._programs["take"](self._state.layers, place.astype(np.int32))
            on_host = self._key.sharding.with_memory_kind("pinned_host")
            self._kept[row] = jax.device_put(taken, on_host)
            self._rows[place] = _NO_ROW

    def _restore(self, row: int, place: int) -> None:
        """Gives a row that lost its slot another one."""
        kept = jax.device_put(self._kept.pop(row), self._key.sharding)
        layers = self._programs["put"](self._state.layers, kept, np.int32(place))
        self._state = dataclasses.replace(self._state, layers=layers)
        self._rows[place] = row

    def _go_on(self, row: int, place: int) -> _Extension:
        """Appends the environment's tokens to a row, and returns what is to be prefilled.

        Args:
            row: number of the row.
            place: its cache row.
        """
        completions, turns = self.completions, self._turns
        rollout, reply = completions.rollout, self._ready.pop(row)
        length = int(rollout.lengths[row])
        newest, end = int(rollout.tokens[row, length - 1]), length + len(reply.ids)
        sampled = int(self._sampled[row])
        most = turns.next_turn(end, sampled, self._budget)
        completions.go_on(row, reply.ids, limit=end + most)
        self._scheduled_tokens[row] = end
        self._extended += 1
        prompt = self._prompts[row // (len(self._identities) // len(self._prompts))]
        tokens = [newest, *reply.ids]
        return _Extension(row, place, prompt[0], tokens, len(prompt) + end, sampled + most)

    def _extend(self, batch: list[_Extension]) -> None:
        """Prefills the tokens of some rows, and samples the first token of their next turns.

        A cache row that does not decode has its first position overwritten in every step. So the
        row's first token, which depends on no other one, is prefilled again. A turn that a stop
        string has ended may have further tokens in the cache; they are overwritten or not seen.
        """
        shapes = self._shapes
        (count,), (width,) = shapes.extend_sizes, shapes.extend_widths
        tokens = np.full((count, width), self.completions.pad_id, np.int32)
        positions = np.full((count, width), shapes.cache_positions, np.int32)
        last, lengths, numbers, counts, limits = np.zeros((5, count), np.int32)
        slots, places = np.full((2, count), shapes.batch_sizes[0], np.int32)
        rows = np.full(count, _NO_ROW)
        for i, one in enumerate(batch):
            end = 1 + len(one.tokens)
            tokens[i, :end], last[i] = [one.first, *one.tokens], end - 1
            positions[i, 0] = 0
            positions[i, 1:end] = one.length - len(one.tokens) + np.arange(len(one.tokens))
            slots[i], places[i], rows[i] = self._slots[one.place], one.place, one.row
            lengths[i] = one.length
            numbers[i], counts[i] = self._identities[one.row], self._sampled[one.row]
            limits[i] = one.limit
        logits, layers = self._programs["extend", count, width](
            *(self._params, self._lora_layers, self._state.layers),
            *(places, tokens, positions, last),
        )
        state, samples = self._programs["resume", count](
            *(self._key, dataclasses.replace(self._state, layers=[]), logits),
            *(slots, lengths, numbers, counts, limits, self.completions.temperature),
        )
        self._state = dataclasses.replace(state, layers=layers)
        self._enqueue(rows, samples)

    def _enqueue(self, rows: np.ndarray, samples: Samples) -> None:
        super()._enqueue(rows, samples)
        self._stamps.append(self._turn[rows])
