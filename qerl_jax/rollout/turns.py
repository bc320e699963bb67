"""The host's side of a rollout in which rows talk to an environment.

A row's token ids only grow. When a turn of the policy has ended, the row hands it to the dialog and
waits; what the environment writes comes back as token ids, which are prefilled on the row's live
cache together with those of other rows, and the next turn begins. A row that waits for long while
others have no slot gives up its slot; its keys and values are computed again when it goes on.
"""

import dataclasses
import time
from typing import Any, NamedTuple, Protocol

import numpy as np

from qerl_jax.environments.roles import ANSWER, DONE, OPEN, Reply, Turn
from qerl_jax.rollout.config import TurnConfig
from qerl_jax.rollout.decode import Samples
from qerl_jax.rollout.progress import Statistics
from qerl_jax.rollout.scheduler import _NO_ROW, Scheduler

_PATIENCE = 4  # chunks after which a row that waits may lose its slot
_TICK = 0.05  # seconds between two looks at whether an environment has replied


class Dialog(Protocol):
    """The part of the environments' episodes that a rollout uses."""

    def submit(self, turn: Turn, /) -> None:
        """Hands a turn to the environment of its row, without waiting."""
        ...

    def replies(self, seconds: float, /) -> list[Reply]:
        """Returns the replies that are there, or waits until one is or the seconds have passed."""
        ...


class _Piece(NamedTuple):
    """Tokens of a row to prefill.

    Attributes:
        row: number of the row.
        place: its cache row.
        first: the first token of the row.
        tokens: the tokens.
        start: position of the first of them.
        length: number of all tokens of the row.
    """

    row: int
    place: int
    first: int
    tokens: list[int]
    start: int
    length: int


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
        self._waits: dict[int, int] = {}  # row -> chunk in which it began to wait
        self._ready: dict[int, Reply] = {}
        self._evicted: set[int] = set()  # rows that wait or are ready without a slot
        self._chunks = self._idle = self._extended = 0
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

    def compact(self) -> None:
        """Moves the rows to a smaller batch, if no row waits for a slot and they fit one."""
        if not self._evicted:
            super().compact()

    def decode_chunk(self) -> None:
        """Starts the decoding of a chunk."""
        self._chunks += 1
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
        for row in np.flatnonzero(began & self.completions.ended).tolist():
            self._end_turn(row)

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
                self._evicted.discard(reply.row)
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
        pieces: list[list[_Piece]] = []
        for row in sorted(self._ready, key=lambda row: row in self._evicted):
            if row in self._evicted:
                if not free:
                    continue
                # The rows are not compacted before, so that slots are cache rows.
                self._rows[free[0]] = row
                places[row] = free.pop(0)
            pieces.append(self._go_on(row, places[row], whole=row in self._evicted))
            self._evicted.discard(row)
        while pieces:
            batch = [row.pop(0) for row in pieces[: self._shapes.extend_sizes[-1]]]
            self._extend(batch)
            pieces = [row for row in pieces if row]

    def _end_turn(self, row: int) -> None:
        """Submits a turn that has ended."""
        completions, turns = self.completions, self._turns
        start, end = int(completions.starts[row]), int(completions.rollout.lengths[row])
        self._turn[row] += 1
        self._sampled[row] += end - start
        space = min(turns.reply_tokens, turns.context_tokens - end - 1)
        if self._sampled[row] >= self._budget:
            space = 0
        ids = completions.rollout.tokens[row, start:end].tolist()
        self._waits[row] = self._chunks
        complete = bool(completions.rollout.finished[row])
        self._dialog.submit(Turn(row, ids, complete, max(0, space)))

    def _evict(self) -> None:
        """Takes the slots of rows that have waited for long, where others have none."""
        wanted = len(self._evicted & self._ready.keys())
        wanted += len(self._identities) - self._next_row
        wanted -= int((~self.occupied).sum())
        patience = _PATIENCE if self.active.any() else 0
        for row, chunk in sorted(self._waits.items(), key=lambda item: item[1]):
            if wanted <= 0 or self._chunks - chunk < patience:
                break
            if row not in self._evicted:
                self._rows[self._rows == row] = _NO_ROW
                self._evicted.add(row)
                wanted -= 1

    def _go_on(self, row: int, place: int, *, whole: bool) -> list[_Piece]:
        """Appends the environment's tokens to a row, and returns what is to be prefilled.

        Args:
            row: number of the row.
            place: its cache row.
            whole: whether the cache row holds nothing of the row yet.
        """
        completions, turns = self.completions, self._turns
        rollout, reply = completions.rollout, self._ready.pop(row)
        length = int(rollout.lengths[row]) + len(reply.ids)
        sampled = min(self._budget - int(self._sampled[row]), turns.turn_tokens or self._budget)
        completions.go_on(row, reply.ids, limit=min(length + sampled, turns.context_tokens))
        self._scheduled_tokens[row] = length
        self._extended += 1
        group_size = len(self._identities) // len(self._prompts)
        prompt = self._prompts[row // group_size]
        tokens = [*prompt, *rollout.tokens[row, :length].tolist()]
        # The newest token of a turn is not in the cache, and after a limit others follow it.
        first = 0 if whole else len(tokens) - len(reply.ids) - 1
        size = self._shapes.extend_widths[-1] - 1
        return [
            _Piece(row, place, tokens[0], tokens[start : start + size], start, len(tokens))
            for start in range(first, len(tokens), size)
        ]

    def _extend(self, batch: list[_Piece]) -> None:
        """Prefills a piece of some rows; those whose last piece it is sample a token.

        A cache row of a row that does not decode has its first position overwritten in every step.
        So each piece begins with the row's first token, which depends on no other one.
        """
        shapes = self._shapes
        count = next(size for size in shapes.extend_sizes if size >= len(batch))
        longest = max(1 + len(piece.tokens) for piece in batch)
        width = next(width for width in shapes.extend_widths if width >= longest)
        tokens = np.full((count, width), self.completions.pad_id, np.int32)
        positions = np.full((count, width), shapes.cache_positions, np.int32)
        zeros = np.zeros((6, count), np.int32)
        last, source, slots, lengths, numbers, counts = zeros
        target = np.full(count, len(self._rows), np.int32)
        slots[:] = shapes.batch_sizes[0]
        rows = np.full(count, _NO_ROW)
        for i, piece in enumerate(batch):
            head = 0 if piece.start == 0 else 1
            end = head + len(piece.tokens)
            tokens[i, :end] = [piece.first, *piece.tokens] if head else piece.tokens
            positions[i, head:end] = piece.start + np.arange(len(piece.tokens))
            positions[i, 0] = 0
            last[i], source[i], target[i] = end - 1, piece.place, piece.place
            lengths[i], numbers[i] = piece.length, self._identities[piece.row]
            counts[i] = self._sampled[piece.row]
            if piece.start + len(piece.tokens) == piece.length:
                slots[i], rows[i] = self._slots[piece.place], piece.row
        state, size = self._state, len(self._rows)
        take, restore = self._programs["take", size, count], self._programs["restore", size, count]
        logits, keys, values = self._programs["extend", count, width](
            *(self._params, self._lora_layers),
            *([take(x, source) for x in cache] for cache in (state.keys, state.values)),
            *(tokens, positions, last),
        )
        keys = [restore(x, part, target) for x, part in zip(state.keys, keys, strict=True)]
        values = [restore(x, part, target) for x, part in zip(state.values, values, strict=True)]
        state, samples = self._programs["resume", count](
            *(self._key, dataclasses.replace(state, keys=[], values=[]), logits),
            *(slots, lengths, numbers, counts, self.completions.temperature),
        )
        self._state = dataclasses.replace(state, keys=keys, values=values)
        self._enqueue(rows, samples)

    def _enqueue(self, rows: np.ndarray, samples: Samples) -> None:
        super()._enqueue(rows, samples)
        self._stamps.append(self._turn[rows])
