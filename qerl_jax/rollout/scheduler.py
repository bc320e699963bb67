"""The host's side of a rollout: which row has which slot, which rows wait, what is in flight."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np

from qerl_jax.policy.layers.part import Kept
from qerl_jax.policy.policy import Policy
from qerl_jax.rollout import decode
from qerl_jax.rollout.completions import Completions
from qerl_jax.rollout.decode import Samples
from qerl_jax.rollout.programs import RolloutPrograms, compactions
from qerl_jax.rollout.progress import Statistics

_NO_ROW = -1


class Scheduler:
    """Assigns slots to rows, and starts the programs of the device.

    Rows take slots in their order. The rows of a group need not do so together: the prefill of a
    prompt is kept until the last row of its group has a slot.

    Args:
        key: PRNG key of the rollout.
        policy: the policy, with parameters as decode steps read them.
        prompts: P lists of token ids.
        identities: int32 [B], identity of each row, which its samples depend on.
        programs: the programs of the rollout, with its shapes.
        completions: the completions [B] that samples are appended to.

    Attributes:
        completions: the completions so far.
        in_flight: samples that the device computes, in its order, each with the row of each of its
            cache rows.
    """

    def __init__(
        self,
        key: jax.Array,
        policy: Policy,
        prompts: Sequence[Sequence[int]],
        identities: np.ndarray,
        *,
        programs: RolloutPrograms,
        completions: Completions,
    ) -> None:
        self._key, (self._params, self._lora) = key, policy
        self._prompts, self._identities = prompts, identities
        self._shapes, config, self._programs = programs
        self.completions = completions
        self.over = completions.ended  # bool [B], whether a row needs no more steps
        self.in_flight: list[tuple[np.ndarray, Samples]] = []
        shapes = self._shapes
        self._state = decode.empty_state(
            shapes.batch_sizes[0],
            shapes.cache_positions,
            model_config=config.model,
            dtype=shapes.dtype,
            sharding=self._key.sharding,
            has_turns=config.turn_limit is not None,
        )
        # The slot of each cache row, and the row in it. Before a compaction slots are cache rows.
        self._slots = np.arange(shapes.batch_sizes[0], dtype=np.int32)
        self._rows = np.full(shapes.batch_sizes[0], _NO_ROW)
        # Tokens that each row has once the device has finished what is in flight.
        self._scheduled_tokens = np.zeros(len(identities), int)
        self._next_row = 0  # the first row that waits
        self._prefilled: decode.Prefilled | None = None
        self._first_prefilled = 0  # index of the first prompt in `_prefilled`
        self._prefilled_prompts = self._decoded = 0

    @property
    def statistics(self) -> Statistics:
        """The work so far; the first token of a completion comes from its prefill."""
        lengths = self.completions.rollout.lengths
        live = int(lengths.sum()) - int((lengths > 0).sum())
        return Statistics(self._prefilled_prompts, decoded=self._decoded, live=live)

    @property
    def active(self) -> np.ndarray:
        """Cache rows, bool [R], whose rows may continue after the samples in flight."""
        rows, limits = self._rows, self.completions.limits
        over = self.completions.ended[rows] | (self._scheduled_tokens[rows] >= limits[rows])
        return (rows != _NO_ROW) & ~over

    def resume_rows(self) -> None:
        """Lets rows go on that have waited; completions of one turn do not wait."""

    @property
    def occupied(self) -> np.ndarray:
        """Cache rows, bool [R], whose keys and values are still needed."""
        return self.active

    @property
    def waiting(self) -> bool:
        """Whether a row has no slot yet."""
        return self._next_row < len(self._identities)

    def free_slots(self) -> np.ndarray:
        """Returns the slots that are not occupied while rows wait, and none otherwise."""
        return np.flatnonzero(~self.occupied) if self.waiting else np.array([], int)

    def prefill(self) -> None:
        """Starts the prefill of the next prompts, unless rows of the last ones still wait."""
        if self._prefilled is not None:
            return
        shapes, first = self._shapes, self._first_prefilled
        prompts = self._prompts[first : first + shapes.prefill_batch]
        longest = max(map(len, prompts))
        # The last batch is filled up, so that all batches have compiled shapes.
        batch = [*prompts, *[prompts[0]] * (shapes.prefill_batch - len(prompts))]
        width = next(width for width in shapes.prompt_widths if width >= longest)
        tokens, lengths = pad_prompts(batch, width=width, pad_id=self.completions.pad_id)
        self._prefilled_prompts += shapes.prefill_batch
        self._prefilled = self._programs["prefill", width](
            self._params, self._lora, tokens, lengths
        )

    def insert(self, free: np.ndarray) -> int:
        """Inserts rows of the prefilled prompts, and returns how many of the free slots they take.

        Args:
            free: slots without an active row.
        """
        group_size = len(self._identities) // len(self._prompts)
        end = (self._first_prefilled + self._shapes.prefill_batch) * group_size
        end = min(end, len(self._identities))
        count = min(len(free), self._shapes.insert_sizes[-1], end - self._next_row)
        size = next(size for size in self._shapes.insert_sizes if size >= count)
        rows = np.full(size, _NO_ROW)
        rows[:count] = self._next_row + np.arange(count)
        slots = np.full(size, len(self._slots), np.int32)
        slots[:count] = free[:count]
        self._state, samples = self._programs["insert", size](
            self._key,
            self._state,
            self._prefilled,
            slots,
            np.maximum(rows // group_size - self._first_prefilled, 0).astype(np.int32),
            self._identities[rows],
            self.completions.temperature,
        )
        self._rows[free[:count]] = rows[:count]
        self._enqueue(rows, samples)
        self._next_row += count
        if self._next_row == end:
            # Frees the memory of these prompts before others are prefilled.
            self._prefilled = None
            self._first_prefilled += self._shapes.prefill_batch
        return count

    def compact(self) -> None:
        """Moves the active rows to a smaller batch, if no row waits and they fit one."""
        if self.waiting:
            return
        count = self.active.sum()
        # One size after the other, so that only neighboring sizes have a program.
        for size in self._shapes.batch_sizes:
            if count <= size < len(self._rows):
                active = self.active
                indices = np.argsort(~active, stable=True)[:size].astype(np.int32)
                sizes = len(self._rows), size
                self._rows = np.where(active, self._rows, _NO_ROW)[indices]
                self._slots = self._slots[indices]
                self._state = dataclasses.replace(
                    self._state,
                    layers=self._gather(self._state.layers, indices, sizes),
                )

    def _gather(
        self, layers: list[Kept], indices: np.ndarray, sizes: tuple[int, int]
    ) -> list[Kept]:
        """Gathers rows of the arrays of all layers, and frees them one after the other."""
        arrays, treedef = jax.tree.flatten(layers)
        programs = [self._programs[name, *sizes] for name in compactions(layers)]
        pairs = zip(programs, arrays, strict=True)
        return treedef.unflatten([_gather_and_free(one, indices, array) for one, array in pairs])

    def decode_chunk(self) -> None:
        """Starts the decoding of a chunk."""
        active = self.active
        self._state, samples = self._programs["decode", len(active)](
            *(self._key, self._params, self._lora_layers, self._state),
            decode.CacheRows(self._slots, active),
            self.completions.temperature,
        )
        self._decoded += len(active) * self._shapes.chunk_steps
        self._enqueue(np.where(active, self._rows, _NO_ROW), samples)

    def drain(self, count: int) -> None:
        """Waits for the oldest `count` samples in flight, and appends them to the completions."""
        for _ in range(count):
            rows, samples = self.in_flight.pop(0)
            self.completions.append(rows, jax.device_get(samples))

    def close(self) -> None:
        """On a CPU, waits for the samples in flight: XLA aborts a process that exits before."""
        device, *_ = self._params["embed_tokens"].devices()
        if device.platform == "cpu":
            jax.block_until_ready([samples for _, samples in self.in_flight])

    @functools.cached_property
    def _lora_layers(self) -> list[dict]:
        return self._programs["fuse_adapter"](self._lora)

    def _enqueue(self, rows: np.ndarray, samples: Samples) -> None:
        for array in jax.tree.leaves(samples):
            array.copy_to_host_async()
        self._scheduled_tokens[rows[rows != _NO_ROW]] += samples.tokens.shape[1]
        self.in_flight.append((rows, samples))


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


def _gather_and_free(gather: Callable, indices: np.ndarray, x: jax.Array) -> jax.Array:
    """Gathers rows of one array and frees the array, so that one at a time exists twice."""
    rows = gather(x, indices)
    x.delete()
    return rows
