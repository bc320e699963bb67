"""Sampling completions from the policy that is being trained, out of the same arrays.

A prompt is read once and its keys and values are copied for its group. The rows decode together in
jitted chunks of a fixed number of steps, and between two chunks the host gives the seats of rows
that have ended to rows that wait; when none waits, the batch shrinks with the rows. What a chunk
has drawn is looked at while the next one runs, so that the device never waits for the host.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import numpy as np
from flax import struct

from qerl_jax.errors import UserError
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.lora import Lora
from qerl_jax.rollout import ahead, budget, decode, programs
from qerl_jax.rollout.budget import Plan
from qerl_jax.rollout.programs import Programs
from qerl_jax.rollout.sampling import SamplingConfig

Array = Any  # NumPy on the host, jax.Array inside of jit

_NOBODY = -1  # in place of a row


@struct.dataclass
class Rollout:
    """Completions of P prompts, G each; the rows of a group are neighbours (B = P G).

    Attributes:
        tokens: int32 [B, C] completions, padded on the right.
        lengths: int32 [B] tokens of each completion, its end-of-sequence token included.
        finished: bool [B], whether it ended with an end-of-sequence token or a stop string.
        logprobs: float32 [B, C], log-probability of each token under the sampling temperature.
        entropies: float32 [B, C], entropy of the distribution each token was drawn from, in nats.
    """

    tokens: Array
    lengths: Array
    finished: Array
    logprobs: Array
    entropies: Array


@dataclasses.dataclass(frozen=True)
class Statistics:
    """What a rollout cost.

    Attributes:
        prompts_read: prompts that were read, what fills up a batch of them included.
        decoded: steps times seats, of all chunks.
        live: those that drew a token of a completion.
    """

    prompts_read: int
    decoded: int
    live: int


def generate(
    key: jax.Array,
    params: dict,
    lora: Lora | None,
    prompts: Sequence[Sequence[int]],
    *,
    config: ModelConfig,
    sampling: SamplingConfig,
    eos_ids: Sequence[int],
    pad_id: int,
    group_size: int = 1,
    prompt_ids: Sequence[int] | None = None,
    prompt_width: int = 0,
    decode_text: Callable[[Sequence[int]], str] | None = None,
    compiled_ahead: Programs | None = None,
    compiled: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
    on_tokens: Callable[[np.ndarray, np.ndarray], None] | None = None,
    on_statistics: Callable[[Statistics], None] | None = None,
) -> Rollout:
    """Samples `group_size` completions of every prompt.

    Rows take seats in their order. The rows of a group need not do so together: what was read of
    a prompt is kept until the last of its rows has a seat.

    Args:
        key: the draws depend on it, on the row and on the position only.
        params: the policy.
        lora: its adapter, or None.
        prompts: P lists of token ids.
        config: the architecture.
        sampling: how to sample.
        eos_ids: a completion ends with the first of these.
        pad_id: fills what follows a completion.
        group_size: G.
        prompt_ids: the identity of each prompt, which the draws of its rows depend on; by default
            its number. Whoever generates for some prompts at a time passes them.
        prompt_width: the longest prompt there is, if known: then one width is compiled.
        decode_text: token ids to text, for stop strings. A completion is cut after the token that
            completes one of them.
        compiled_ahead: of `ahead.compile_ahead`, for a policy of these shapes on this device;
            jit compiles what is not among them.
        compiled: whether all programs are compiled already; then compiling is an error.
        on_progress: called with the rows that have ended and the tokens drawn, after every chunk
            but the last.
        on_tokens: called with the tokens [B, C] and lengths [B] of a `Rollout` so far, when there
            are new ones.
        on_statistics: called at the end.

    Returns:
        A Rollout of NumPy arrays.

    Raises:
        UserError: no prompt, an empty one, one that is too long, or memory for less than a row.
        RuntimeError: a program was compiled although all of them should be.
    """
    longest = _longest(prompts, prompt_width)
    if sampling.stop and decode_text is None:
        raise UserError(f"stop={sampling.stop!r}: stop strings need decode_text, ids to text")
    plan = budget.make_plan(
        params,
        prompts=len(prompts),
        longest=longest,
        group_size=group_size,
        config=config,
        sampling=sampling,
    )
    key, params, lora = programs.bound((key, params, lora))
    compiled_ahead = compiled_ahead or {}
    rules = decode.rules(config, sampling, eos_ids)
    ids = np.arange(len(prompts)) if prompt_ids is None else np.asarray(prompt_ids)
    with contextlib.ExitStack() as stack:
        if compiled:
            stack.enter_context(_no_compilation(plan))
        host = _Host(
            key,
            programs.dequantized(params, rules, compiled_ahead),
            lora,
            prompts,
            (ids[:, None] * group_size + np.arange(group_size)).reshape(-1).astype(np.int32),
            plan=plan,
            rules=rules,
            compiled_ahead=compiled_ahead,
            stop=sampling.stop,
            pad_id=pad_id,
            decode_text=decode_text,
            on_tokens=on_tokens,
        )
        stack.callback(host.leave)
        while not host.ended.all():
            host.seat_waiting()
            older = len(host.unseen)
            if host.needed.any():
                host.shrink()
                host.decode_chunk()
            host.look(older)
            if on_progress is not None and not host.ended.all():
                on_progress(int(host.ended.sum()), int(host.rollout.lengths.sum()))
    if on_statistics is not None:
        live = int(host.rollout.lengths.sum()) - len(host.ended)
        on_statistics(Statistics(prompts_read=host.prompts_read, decoded=host.decoded, live=live))
    return host.rollout


def detokenize(rollout: Rollout, decode_text: Callable[[Sequence[int]], str]) -> list[str]:
    """Returns the B completions of a rollout as text; `decode_text` maps token ids to text."""
    return [
        decode_text(tokens[:length].tolist())
        for tokens, length in zip(rollout.tokens, rollout.lengths, strict=True)
    ]


def live_share(costs: Sequence[Statistics]) -> float:
    """Of the row-steps that rollouts decoded, those that drew a token; 1 where none was decoded."""
    decoded = sum(cost.decoded for cost in costs)
    return sum(cost.live for cost in costs) / decoded if decoded else 1.0


def progress_after(
    on_progress: Callable[[int, int], None] | None, *, rows: int, tokens: int
) -> Callable[[int, int], None] | None:
    """`on_progress` for a part of the work that comes after `rows` and `tokens` of other parts."""
    if on_progress is None:
        return None
    return lambda ended, drawn: on_progress(rows + ended, tokens + drawn)


def pad_prompts(
    prompts: Sequence[Sequence[int]], *, width: int, pad_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """Right-pads prompts to a common width.

    Returns:
        int32 tokens [P, T] and int32 lengths [P].
    """
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.full((len(prompts), width), pad_id, np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    return tokens, lengths


def _longest(prompts: Sequence[Sequence[int]], prompt_width: int) -> int:
    if not len(prompts):
        raise UserError("there is no prompt to complete: pass at least one")
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise UserError(f"prompt {number} is empty: it needs at least one token")
    return max(prompt_width, *map(len, prompts))


# --- The host's side of a rollout -----------------------------------------------------------------


class _Host:
    """Who has which seat, who waits, and what has been drawn.

    Attributes:
        rollout: what has been looked at.
        ended: bool [rows], whether there is nothing to add to a row.
        unseen: rows, and what is being drawn for them, in the order of the device.
        prompts_read: see `Statistics`.
        decoded: likewise.
    """

    def __init__(
        self,
        key: jax.Array,
        params: dict,
        lora: Lora | None,
        prompts: Sequence[Sequence[int]],
        identities: np.ndarray,
        *,
        plan: Plan,
        rules: decode.Rules,
        compiled_ahead: Programs,
        stop: tuple[str, ...],
        pad_id: int,
        decode_text: Callable[[Sequence[int]], str] | None,
        on_tokens: Callable[[np.ndarray, np.ndarray], None] | None,
    ):
        self._key, self._params, self._lora = key, params, lora
        self._prompts, self._identities = prompts, identities
        self._plan, self._rules, self._pad_id = plan, rules, pad_id
        self._compiled_ahead = compiled_ahead
        self._stop, self._decode_text, self._on_tokens = stop, decode_text, on_tokens
        rows, width = len(identities), rules.max_new_tokens
        self.rollout = Rollout(
            tokens=np.full((rows, width), pad_id, np.int32),
            lengths=np.zeros(rows, np.int32),
            finished=np.zeros(rows, bool),
            logprobs=np.zeros((rows, width), np.float32),
            entropies=np.zeros((rows, width), np.float32),
        )
        self.ended = np.zeros(rows, bool)
        self.unseen: list[tuple[np.ndarray, decode.Drawn]] = []
        self.prompts_read = self.decoded = 0
        self._batch = decode.empty_batch(
            plan.batches[0],
            plan.slots,
            config=rules.config,
            dtype=plan.dtype,
            sharding=params["embed_tokens"].sharding,
        )
        self._seated = np.full(plan.batches[0], _NOBODY)  # the row in each seat
        self._promised = np.zeros(rows, int)  # tokens of each row when the device is done
        self._waiting = 0  # the first row without a seat
        self._read: decode.Prompts | None = None
        self._first_read = 0  # the first prompt of these

    @property
    def needed(self) -> np.ndarray:
        """The seats, bool [B], of rows that may go on when the device has done what it was told."""
        rows = self._seated
        over = self.ended[rows] | (self._promised[rows] >= self._rules.max_new_tokens)
        return (rows != _NOBODY) & ~over

    @functools.cached_property
    def _fused_lora(self) -> list[dict]:
        return self._run(programs.fuse_adapter(self._rules, self._params), self._lora)

    def _run(self, program: programs.Program, *arguments: Any) -> Any:
        return program.run(self._compiled_ahead, *arguments)

    def seat_waiting(self) -> None:
        """Gives the seats that nobody needs to rows that wait, and reads their prompts."""
        plan, rows = self._plan, len(self.ended)
        group_size = rows // len(self._prompts)
        free = np.flatnonzero(~self.needed)
        while len(free) and self._waiting < rows:
            if self._read is None:
                self._read = self._read_prompts()
            read = self._read
            end = min(rows, (self._first_read + plan.prompts) * group_size)
            count = min(len(free), plan.seatings[-1], end - self._waiting)
            size = next(size for size in plan.seatings if size >= count)
            chosen = np.full(size, _NOBODY)
            chosen[:count] = self._waiting + np.arange(count)
            seats = np.full(size, len(self._seated), np.int32)
            seats[:count] = free[:count]
            self._batch, drawn = self._run(
                programs.seat_rows(plan, self._rules, read.width, size),
                self._key,
                self._batch,
                read,
                seats,
                np.maximum(chosen // group_size - self._first_read, 0).astype(np.int32),
                self._identities[chosen],
            )
            self._seated[free[:count]] = chosen[:count]
            self._expect(chosen, drawn)
            free = free[count:]
            self._waiting += count
            if self._waiting == end:
                # None of these may live on while others are read.
                self._read = read = None
                self._first_read += plan.prompts

    def _read_prompts(self) -> decode.Prompts:
        plan = self._plan
        prompts = self._prompts[self._first_read : self._first_read + plan.prompts]
        longest = max(map(len, prompts))
        # The last ones are filled up, so that all have a compiled shape.
        filled = [*prompts, *[prompts[0]] * (plan.prompts - len(prompts))]
        width = next(w for w in plan.widths if w >= longest)
        tokens, lengths = pad_prompts(filled, width=width, pad_id=self._pad_id)
        self.prompts_read += plan.prompts
        program = programs.read_prompts(plan, self._rules, width)
        return self._run(program, self._params, self._lora, tokens, lengths)

    def shrink(self) -> None:
        """Closes up when nobody waits and the rows that are left fit a smaller batch."""
        if self._waiting < len(self.ended):
            return
        rows = self.needed.sum()
        # One after the other: few pairs of sizes are compiled.
        for size in [size for size in self._plan.batches if rows <= size < len(self._seated)]:
            kept = np.argsort(~self.needed, stable=True)[:size].astype(np.int32)
            self._seated = np.where(self.needed, self._seated, _NOBODY)[kept]
            self._batch = jax.tree.map(functools.partial(self._take, seats=kept), self._batch)

    def _take(self, x: jax.Array, seats: np.ndarray) -> jax.Array:
        """Some rows of an array that is given away, so that one at a time exists twice."""
        kept = self._run(programs.take_rows(x, len(seats)), x, seats)
        x.delete()
        return kept

    def decode_chunk(self) -> None:
        """Lets the device decode a chunk."""
        needed = self.needed
        self._batch, drawn = self._run(
            programs.decode_chunk(self._plan, self._rules, len(needed)),
            self._key,
            self._params,
            self._fused_lora,
            self._batch,
            needed,
        )
        self.decoded += len(needed) * self._plan.steps
        self._expect(np.where(needed, self._seated, _NOBODY), drawn)

    def look(self, count: int) -> None:
        """Waits for the oldest `count` of what is drawn, and keeps it."""
        for _ in range(count):
            rows, drawn = self.unseen.pop(0)
            self._keep(rows, jax.device_get(drawn))
            if self._on_tokens is not None:
                self._on_tokens(self.rollout.tokens.copy(), self.rollout.lengths.copy())

    def leave(self) -> None:
        """On a CPU, waits for the chunk that nobody needs: to exit while it runs is to abort."""
        device, *_ = self._params["embed_tokens"].devices()
        if device.platform == "cpu":
            jax.block_until_ready([drawn for _, drawn in self.unseen])

    def _expect(self, rows: np.ndarray, drawn: decode.Drawn) -> None:
        for array in jax.tree.leaves(drawn):
            array.copy_to_host_async()
        self._promised[rows[rows != _NOBODY]] += drawn.tokens.shape[1]
        self.unseen.append((rows, drawn))

    def _keep(self, rows: np.ndarray, drawn: decode.Drawn) -> None:
        """Appends what was drawn to the rows that have not ended, up to where they end."""
        rollout, limit = self.rollout, self._rules.max_new_tokens
        live = np.flatnonzero((rows != _NOBODY) & ~self.ended[rows])
        rows, tokens = rows[live], np.asarray(drawn.tokens)[live]
        before = rollout.lengths[rows]
        ends = np.isin(tokens, self._rules.eos_ids)
        ends &= np.arange(tokens.shape[1]) < (limit - before)[:, None]
        finished = ends.any(axis=1)
        counts = np.where(finished, ends.argmax(axis=1) + 1, tokens.shape[1])
        counts = np.minimum(counts, limit - before)
        for i, row in enumerate(rows) if self._stop else ():
            cut = self._cut(rollout.tokens[row, : before[i]], tokens[i, : counts[i]])
            if cut is not None:
                counts[i], finished[i] = cut, True
        row, step = np.nonzero(np.arange(tokens.shape[1]) < counts[:, None])
        place = rows[row], before[row] + step
        rollout.tokens[place] = tokens[row, step]
        rollout.logprobs[place] = drawn.logprobs[live[row], step]
        rollout.entropies[place] = drawn.entropies[live[row], step]
        rollout.lengths[rows] = before + counts
        rollout.finished[rows] = finished
        self.ended[rows] = finished | (rollout.lengths[rows] == limit)

    def _cut(self, old: np.ndarray, new: np.ndarray) -> int | None:
        """How many of the new tokens complete a stop string; None: all of them do not.

        It begins among as many bytes before the new tokens as it has. A token that has text has a
        byte, special tokens have none.
        """
        stop, text = self._stop, self._decode_text
        assert text is not None
        window = longest = max(len(s.encode()) for s in stop)
        while window < len(old) and len(text(old[-window:].tolist())) < longest:
            window *= 2
        before = old[-window:].tolist()

        def complete(count: int) -> bool:
            found = text(before + new[:count].tolist())
            return any(s in found for s in stop)

        if not complete(len(new)):
            return None
        return next(count for count in range(1, len(new) + 1) if complete(count))


@contextlib.contextmanager
def _no_compilation(plan: Plan) -> Generator[None]:
    """Raises at the end if one of the programs was compiled meanwhile."""
    with ahead.compilations() as compiled:
        yield
    if compiled:
        raise RuntimeError(
            f"{', '.join(compiled)} compiled in the middle of a run, for a rollout of {plan}: the "
            "shapes of its arguments, or where they lie, must not change from step to step"
        )
