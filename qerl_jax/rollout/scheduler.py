"""The host's side of a rollout: it gives slots to rows, and starts the programs of the device.

Rows take slots in their order. The rows of a group need not do so together: the prefill of a prompt
is kept until the last row of its group has a slot. A row that has lost its slot while it waited for
an environment has its keys and values in memory of the host, so that it does not depend on it.
"""

import collections
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

import jax
import numpy as np

from qerl_jax.environments.roles import OPEN
from qerl_jax.policy.layers.part import Kept, NewTokens
from qerl_jax.policy.policy import Policy
from qerl_jax.rollout import decode
from qerl_jax.rollout.completions import Completions
from qerl_jax.rollout.decode import Samples
from qerl_jax.rollout.drafts import NOTHING, DraftLength
from qerl_jax.rollout.programs import RolloutPrograms, compactions
from qerl_jax.rollout.progress import RolloutProgress, Statistics
from qerl_jax.rollout.row import NO_SLOT, Row, State, array_of, next_rows
from qerl_jax.rollout.shapes import kept_bytes
from qerl_jax.rollout.turns import TurnPolicy

_TICK = 0.05  # seconds between two looks whether replies are there


class _InFlight(NamedTuple):
    """Samples [R, steps] that the device computes, and the rows [N] of some of them.

    Each row has the index of its samples, and its turn: if that has ended since, they are ignored.
    """

    rows: Sequence[Row]
    indices: np.ndarray
    turns: list[int]
    samples: Samples
    # With the first samples, the rows that were inserted, the prompt of each among those prefilled,
    # and the routes of these.
    prompts: tuple[Sequence[Row], np.ndarray, jax.Array] | None = None


class Scheduler:
    """Takes the rows of a rollout from their prompts to their ends; rows of a group are neighbors.

    The parameters of the policy are those that decode steps read.

    Attributes:
        in_flight: samples that the device computes, in its order.
    """

    def __init__(
        self,
        key: jax.Array,
        policy: Policy,
        rows: Sequence[Row],
        *,
        turns: TurnPolicy,
        programs: RolloutPrograms,
        completions: Completions,
    ) -> None:
        self._key, (self._params, self._lora) = key, policy
        self._shapes, config, self._programs = programs
        self._rows, self._turns, self._completions = list(rows), turns, completions
        self.in_flight: list[_InFlight] = []
        self._state = decode.empty_state(
            self._shapes.batch_sizes[0],
            self._shapes.cache_positions,
            model_config=config.model,
            dtype=self._shapes.dtype,
            sharding=self._key.sharding,
            has_turns=config.turn_limit is not None,
            histories=self._shapes.histories,
        )
        self._num_histories = math.prod(self._shapes.histories or ())
        self._draft_length = DraftLength()
        self._compactions = compactions(config.model, self._shapes)
        # The slot of each cache row. Before a compaction slots are cache rows.
        self._slots = np.arange(self._shapes.batch_sizes[0], dtype=np.int32)
        self._waiting = collections.deque(rows)
        self._live: list[Row] = []  # the rows that have begun and have not ended
        self._prefilled: decode.Prefilled | None = None
        self._sources: dict[int, int] = {}  # group -> index of its prompt in `_prefilled`
        self._kept_sharding = jax.tree.leaves(self._state.layers)[0].sharding
        self._kept_bytes = {  # of a row that waits on the host, by its positions
            positions: config.model.shards * kept_bytes(config.model, positions, self._shapes.dtype)
            for positions in self._shapes.kept_positions
        }
        self._prefilled_prompts = self._decoded = self._idle = 0
        self._waiting_seconds = 0.0

    @property
    def has_ended(self) -> bool:
        """Whether all rows have ended."""
        return not (self._waiting or self._live or self._turns.is_open)

    @property
    def progress(self) -> RolloutProgress:
        """The rollout so far."""
        completions = self._completions
        return RolloutProgress(
            ended=completions.ended.copy(),
            tokens=completions.tokens,
            statistics=Statistics(
                self._prefilled_prompts,
                decoded=self._decoded,
                # The first token of a turn comes from a prefill.
                live=completions.tokens - completions.turns - completions.accepted,
                idle=self._idle,
                waiting_seconds=self._waiting_seconds,
                drafted=completions.drafted,
                accepted=completions.accepted,
            ),
            rollout=completions.rollout,
        )

    def decoding(self) -> list[Row]:
        """Returns the rows that may continue after the samples in flight."""
        return [row for row in self._live if row.decodes]

    def admit(self) -> None:
        """Gives slots to the rows that come next, and samples the first tokens of their turns."""
        self._take_replies()
        coming = next_rows(
            self._live,
            waiting=len(self._waiting),
            slots=len(self._slots),
            now=time.monotonic(),
            fits=self._host_space(),
        )
        for row in coming.evicted:
            self._evict(row)
        if not (coming.resumed or coming.begun):
            return
        taken = {row.cache_row for row in self._live}
        free = [cache_row for cache_row in range(len(self._slots)) if cache_row not in taken]
        for row in coming.resumed:
            if row.kept is not None:
                self._restore(row, free.pop(0))
            length = self._completions.extend(row)
            row.begin_turn(length, self._turns.turn_tokens(row, length))
            # The newest token of the last turn precedes a reply, if there was one.
            row.filled = max(0, length - len(row.reply) - 1)
        self._extend_in_parts(coming.resumed)
        for count, width in self._shapes.extensions:
            # So does the first token of the row.
            size = count, width
            own = [
                row
                for row in coming.resumed
                if self._shapes.extension(1 + row.start - row.filled) == size
            ]
            for rows in itertools.batched(own, count):
                self._extend(rows, width)
        free = free[: coming.begun]
        while free:
            self._prefill()
            free = free[self._insert(free) :]

    def compact(self, rows: Sequence[Row]) -> None:
        """Moves the rows that decode to a smaller batch, if no row waits and they fit one."""
        if self._waiting:
            return
        # One size after the other, so that only neighboring sizes have a program.
        for size in self._shapes.all_batches:
            if len(rows) <= size < len(self._slots):
                order = np.argsort(~self._mask(rows), stable=True)[:size].astype(np.int32)
                self._compact_cache(order, (len(self._slots), size))
                self._slots = self._slots[order]
                for cache_row, row in enumerate(sorted(rows, key=attrgetter("cache_row"))):
                    row.cache_row = cache_row

    def decode_chunk(self, rows: Sequence[Row]) -> None:
        """Starts the decoding of a chunk, in which some rows are active."""
        size, shapes = len(self._slots), self._shapes
        positions = self._draft_length.choose(size, shapes.positions(size))
        name = ("decode", size) if positions == 1 else ("draft", size, positions)
        steps = shapes.chunk_steps if positions == 1 else shapes.draft_steps
        self._state, samples = self._programs[name](
            self._key,
            self._params,
            self._lora_layers,
            self._state,
            decode.CacheRows(self._slots, self._mask(rows), self._places(rows)),
            self._completions.temperature,
        )
        self._decoded += size * steps
        if len(rows) < len(self._live):
            self._idle += (self._held() - len(rows)) * steps
        self._enqueue(rows, array_of(rows, "cache_row"), samples)

    def drain(self, count: int) -> None:
        """Waits for the oldest `count` samples in flight, and ends the turns that end in them."""
        turns_ended: dict[Row, bool] = {}  # and whether they are complete
        for _ in range(count):
            rows, indices, turns, samples, prompts = self.in_flight.pop(0)
            if prompts is not None:
                inserted, sources, routes = prompts
                self._completions.append_prompts(inserted, sources, jax.device_get(routes))
            is_current = [row.turn == turn for row, turn in zip(rows, turns, strict=True)]
            rows = list(itertools.compress(rows, is_current))
            samples, indices = jax.device_get(samples), indices[is_current]
            ended = self._completions.append(rows, indices, samples)
            if samples.taken is not None:
                self._take_drafts(rows, samples.taken[indices], samples.tokens.shape[1])
            for row in ended:
                row.turn += 1
            turns_ended |= ended
        # Rows that end together wait from the same moment, so that they leave together: the first
        # of them would let others decode, for which the last ones then wait longer.
        now = time.monotonic()
        for row in sorted(turns_ended, key=attrgetter("number")):
            samples = self._completions.turn(row)
            row.sampled += len(samples.ids)
            row.since = now
            self._turns.end_turn(row, samples, complete=turns_ended[row])
        self._remove_ended(turns_ended)

    def _take_drafts(self, rows: Sequence[Row], taken: np.ndarray, columns: int) -> None:
        """Notes how many samples rows took in each step of a chunk, int [N, steps]."""
        steps = taken.shape[1]
        for row, more in zip(rows, (taken.sum(axis=1) - steps).tolist(), strict=True):
            row.scheduled += more
            self._leave_if_full(row)
        if not self._turns.keeps_cache:  # Which rows are in a chunk does not depend on the time.
            self._draft_length.observe(taken, columns // steps)

    def _leave_if_full(self, row: Row) -> None:
        """Takes the slot of a row that has all tokens of its only turn once the device is done."""
        if row.scheduled >= row.limit and not self._turns.keeps_cache:
            row.cache_row = NO_SLOT

    def close(self) -> None:
        """On a CPU, waits for the samples in flight: XLA aborts a process that exits before."""
        device, *_ = self._params["embed_tokens"].devices()
        if device.platform == "cpu":
            jax.block_until_ready([flight.samples for flight in self.in_flight])

    def _take_replies(self) -> None:
        """Takes the replies of environments, for which it waits if nothing else can be done."""
        waits = not (
            self.in_flight
            or (self._waiting and self._held() < len(self._slots))
            or any(row.decodes or row.state is State.READY for row in self._live)
        )
        began, ended = time.perf_counter(), list[Row]()
        for reply in self._turns.replies(_TICK if waits else 0.0):
            row = self._rows[reply.row]
            if reply.ending == OPEN:
                row.state, row.reply = State.READY, reply.ids
            else:
                if row.state is State.WAITING:  # Its session has ended before it had a slot.
                    self._waiting.remove(row)
                row.end(reply.ending)
                row.turn += 1  # What is in flight is ignored.
                ended.append(row)
        for row in self._turns.arrivals():
            self._rows.append(row)
            self._waiting.append(row)
        self._completions.reserve(len(self._rows))
        self._free_prefilled()
        if waits:
            self._waiting_seconds += time.perf_counter() - began
        self._remove_ended(ended)

    def _remove_ended(self, rows: Iterable[Row]) -> None:
        """Removes those of some rows that have ended."""
        if ended := {row for row in rows if row.state is State.ENDED}:
            for row in ended:
                self._completions.end(row)
            self._live = [row for row in self._live if row not in ended]

    def _held(self) -> int:
        """Returns the number of rows that have a slot."""
        return sum(row.cache_row != NO_SLOT for row in self._live)

    def _mask(self, rows: Sequence[Row]) -> np.ndarray:
        """Returns which cache rows are those of the rows: bool [R]."""
        mask = np.zeros(len(self._slots), bool)
        mask[array_of(rows, "cache_row")] = True
        return mask

    def _places(self, rows: Sequence[Row]) -> np.ndarray | None:
        """Returns where the history has the tokens of each cache row: int32 [R]."""
        if self._shapes.histories is None:
            return None
        places = np.full(len(self._slots), self._num_histories, np.int32)
        places[array_of(rows, "cache_row")] = [self._place(row) for row in rows]
        return places

    def _place(self, row: Row) -> int:
        """Returns where the history has the tokens of a row.

        With environments it is that of its slot: which rows decode together depends on the time.
        """
        return row.cache_row if self._turns.keeps_cache else row.number % self._num_histories

    def _begin_history(self, rows: Sequence[Row], size: tuple[int, int]) -> None:
        """Brings the tokens of at most R rows to the device, of which a row has at most W."""
        if self._shapes.histories is None:
            return
        places = np.full(size[0], self._num_histories, np.int32)
        tokens, rollout = np.full(size, NOTHING, np.int32), self._completions.rollout
        for i, row in enumerate(rows):
            prompt, length = len(row.prompt), rollout.lengths[row.number]
            places[i], tokens[i, :prompt] = self._place(row), row.prompt
            tokens[i, prompt : prompt + length] = rollout.tokens[row.number, :length]
        history = self._programs["begin", *size](self._state.history, places, tokens)
        self._state = dataclasses.replace(self._state, history=history)

    def _prefill(self) -> None:
        """Starts the prefill of the next prompts, unless rows of the last ones still wait."""
        if self._prefilled is not None:
            return
        shapes, prompts = self._shapes, dict[int, Sequence[int]]()
        for row in self._waiting:
            if row.group not in prompts and len(prompts) == shapes.prefill_batch:
                break
            prompts[row.group] = row.prompt
        self._sources = {group: source for source, group in enumerate(prompts)}
        longest = max(map(len, prompts.values()))
        # The last batch is filled up, so that all batches have compiled shapes.
        first = self._waiting[0].prompt
        batch = [*prompts.values(), *[first] * (shapes.prefill_batch - len(prompts))]
        width = next(width for width in shapes.prompt_widths if width >= longest)
        tokens, lengths = pad_prompts(batch, width=width, pad_id=self._completions.pad_id)
        self._prefilled_prompts += shapes.prefill_batch
        self._prefilled = self._programs["prefill", width](
            self._params, self._lora, tokens, lengths
        )

    def _insert(self, free: Sequence[int]) -> int:
        """Inserts rows of the prefilled prompts, and returns how many free slots they take."""
        most = min(len(free), self._shapes.insert_sizes[-1])
        rows = list(
            itertools.takewhile(
                lambda row: row.group in self._sources, itertools.islice(self._waiting, most)
            )
        )
        count = len(rows)
        size = next(size for size in self._shapes.insert_sizes if size >= count)
        slots = np.full(size, len(self._slots), np.int32)
        sources, identities = np.zeros((2, size), np.int32)
        slots[:count], identities[:count] = free[:count], array_of(rows, "identity")
        sources[:count] = [self._sources[row.group] for row in rows]
        for row, cache_row in zip(rows, free, strict=False):
            row.cache_row = cache_row
            if row.reply:  # The rest of a long prompt.
                row.state = State.READY
            else:
                row.begin_turn(0, self._turns.turn_tokens(row, 0))
            self._live.append(self._waiting.popleft())
        self._state, samples = self._programs["insert", size](
            self._key,
            self._state,
            self._prefilled,
            slots,
            sources,
            identities,
            self._completions.temperature,
        )
        self._begin_history(rows, (size, self._shapes.prompt_widths[-1]))
        routes = self._prefilled.routes  # pyrefly: ignore[missing-attribute]
        prompts = None if routes is None else (rows, sources[:count], routes)
        begun = np.flatnonzero([row.state is State.DECODING for row in rows])
        self._enqueue([rows[i] for i in begun], begun, samples, prompts)
        self._free_prefilled()
        return count

    def _free_prefilled(self) -> None:
        """Frees the prefilled prompts once no row waits for them, before others are prefilled."""
        if not (self._waiting and self._waiting[0].group in self._sources):
            self._prefilled = None

    def _filled(self, row: Row) -> int:
        """Returns of how many positions a row is kept that waits without a slot."""
        filled = len(row.prompt) + int(self._completions.rollout.lengths[row.number])
        return self._shapes.kept(filled)

    def _host_space(self) -> Callable[[Row], bool]:
        """Returns a function that reserves memory of the host for rows, while there is some."""
        left = self._host_bytes_left()

        def fits(row: Row) -> bool:
            nonlocal left
            size = self._kept_bytes[self._filled(row)]
            if size > left:
                return self._turns.forgets
            left -= size
            return True

        return fits

    def _host_bytes_left(self) -> int:
        kept = sum(array.nbytes for row in self._live for array in row.kept or ())
        return self._turns.host_bytes - kept

    def _evict(self, row: Row) -> None:
        """Takes the slot of a row, and keeps what it has filled of the cache on the host.

        A row for which the host lacks memory is forgotten: what continues it is another row.
        """
        if self._kept_bytes[self._filled(row)] > self._host_bytes_left():
            self._turns.forget(row)
            row.end(OPEN)
            self._remove_ended([row])
            return
        take = self._programs["take", self._filled(row)]
        taken = take(self._state.layers, np.int32(row.cache_row))
        row.kept = jax.device_put(taken, self._kept_sharding.with_memory_kind("pinned_host"))
        row.cache_row = NO_SLOT

    def _restore(self, row: Row, cache_row: int) -> None:
        """Gives a row that lost its slot another one."""
        kept = jax.device_put(row.kept, self._kept_sharding)
        put = self._programs["put", self._filled(row)]
        layers = put(self._state.layers, kept, np.int32(cache_row))
        self._state = dataclasses.replace(self._state, layers=layers)
        row.cache_row, row.kept = cache_row, None

    def _extend_in_parts(self, rows: Sequence[Row]) -> None:
        """Prefills of what is longer than the widest extension all but the last part."""
        if not rows:
            return
        count, width = self._shapes.extensions[-1]
        while long := [row for row in rows if 1 + row.start - row.filled > width]:
            for batch in itertools.batched(long, count):
                ends = [row.filled + width - 1 for row in batch]
                *_, routes = self._extend_layers(batch, width, ends=ends)
                if routes is not None:
                    self._completions.append_part(batch, jax.device_get(routes))
            for row in long:
                row.filled += width - 1

    def _extend(self, rows: Sequence[Row], width: int) -> None:
        """Prefills what environments wrote to rows, and samples the first tokens of their turns.

        The tokens of a row fit into the width.

        A cache row that does not decode has its first position overwritten in every step. So the
        row's first token, which depends on no other one, is prefilled again. A turn that a stop
        string has ended may have further tokens in the cache; they are overwritten or not seen.
        """
        count, _ = self._shapes.extension(width)
        lengths, identities, counts, limits = np.zeros((4, count), np.int32)
        slots = np.full(count, self._shapes.batch_sizes[0], np.int32)
        for i, row in enumerate(rows):
            lengths[i], slots[i] = len(row.prompt) + row.start, self._slots[row.cache_row]
            identities[i], counts[i] = row.identity, row.sampled
            limits[i] = row.sampled + row.limit - row.start
        ends = [row.start for row in rows]
        logits, layers, routes = self._extend_layers(rows, width, ends=ends)
        state, samples = self._programs["resume", count](
            self._key,
            dataclasses.replace(self._state, layers=[]),
            logits,
            decode.NextTurns(slots, lengths, identities, counts, limits),
            self._completions.temperature,
        )
        self._state = dataclasses.replace(state, layers=layers)
        self._begin_history(rows, (count, self._shapes.cache_positions))
        self._enqueue(rows, np.arange(len(rows)), dataclasses.replace(samples, routes=routes))

    def _extend_layers(
        self, rows: Sequence[Row], width: int, *, ends: Sequence[int]
    ) -> tuple[jax.Array, list[Kept], jax.Array | None]:
        """Prefills the tokens of rows from what is filled up to some lengths of the completions."""
        shapes, written = self._shapes, self._completions.rollout.tokens
        count, _ = shapes.extension(width)
        tokens = np.full((count, width), self._completions.pad_id, np.int32)
        positions = np.full((count, width), shapes.cache_positions, np.int32)
        last, cache_rows = (
            np.zeros(count, np.int32),
            np.full(count, shapes.batch_sizes[0], np.int32),
        )
        for i, (row, end) in enumerate(zip(rows, ends, strict=True)):
            added = written[row.number, row.filled : end]
            tokens[i, : 1 + len(added)] = [row.prompt[0], *added]
            last[i], cache_rows[i] = len(added), row.cache_row
            positions[i, 0] = 0
            positions[i, 1 : 1 + len(added)] = len(row.prompt) + np.arange(row.filled, end)
        logits, layers, routes = self._programs["extend", count, width](
            self._params,
            self._lora_layers,
            self._state.layers,
            tokens,
            NewTokens(positions, last, cache_rows),  # pyrefly: ignore[bad-argument-type]
        )
        self._state = dataclasses.replace(self._state, layers=layers)
        return logits, layers, routes

    def _compact_cache(self, order: np.ndarray, sizes: tuple[int, int]) -> None:
        """Gathers cache rows of the arrays of all layers, and frees these after each program."""
        arrays, treedef = jax.tree.flatten(self._state.layers)
        for name, numbers in self._compactions:
            old = [arrays[number] for number in numbers]
            new = self._programs[name, *sizes](old, order)
            for number, before, after in zip(numbers, old, new, strict=True):
                before.delete()
                arrays[number] = after
        self._state = dataclasses.replace(self._state, layers=treedef.unflatten(arrays))

    @functools.cached_property
    def _lora_layers(self) -> list[dict]:
        return self._programs["fuse_adapter"](self._lora)

    def _enqueue(
        self,
        rows: Sequence[Row],
        indices: np.ndarray,
        samples: Samples,
        prompts: tuple[Sequence[Row], np.ndarray, jax.Array] | None = None,
    ) -> None:
        """Puts samples of rows in flight."""
        for array in jax.tree.leaves((samples, prompts and prompts[-1])):
            array.copy_to_host_async()
        # With drafts a row takes one token in each step at least.
        steps = (samples.tokens if samples.taken is None else samples.taken).shape[1]
        for row in rows:
            row.scheduled += steps
            self._leave_if_full(row)
        turns = [row.turn for row in rows]
        self.in_flight.append(_InFlight(rows, indices, turns, samples, prompts))


def pad_prompts(
    prompts: Sequence[Sequence[int]], *, width: int, pad_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """Pads prompts on the right to a common width.

    Returns:
        int32 tokens [P, T] and int32 lengths [P].
    """
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.full((len(prompts), width), pad_id, np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    return tokens, lengths
