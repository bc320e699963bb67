"""The completions of a rollout on the host, which grow with every chunk of samples."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import struct

from qerl_jax.environments.roles import ANSWER, DONE, ENVIRONMENT, SAMPLED
from qerl_jax.policy.config import ModelConfig
from qerl_jax.rollout.config import SamplingConfig, Tokenizer, TurnConfig
from qerl_jax.rollout.decode import Samples
from qerl_jax.rollout.row import Row, array_of

Array = Any  # NumPy on the host, jax.Array inside of jit


@struct.dataclass
class Rollout:
    """Completions of P prompts, G of each; the rows of a group are neighbors (B = P G).

    Attributes:
        tokens: int32 [B, C] completions, padded on the right.
        lengths: int32 [B], number of tokens of each completion, its end-of-sequence token included.
        finished: bool [B], whether it ended with an end-of-sequence token or a stop string; with an
            environment, whether the policy or the environment ended the conversation.
        logprobs: float32 [B, C], log-probability of each token under the sampling temperature.
        entropies: float32 [B, C], entropy of the distribution of each token, in nats.
        roles: int8 [B, C], whether the policy sampled a token or an environment wrote it, see
            `environments.roles`; None where the policy sampled all of them.
        endings: int8 [B], what ended a conversation, see `environments.roles`; None without one.
        routes: object [B], of each completion the experts [C, L, k] in every layer of the token
            before each of its tokens, which is the one that predicts it; None if not recorded.
        prompt_routes: object [B], those of the tokens of each prompt [P, L, k], which the rows of a
            group share; None if not recorded.
    """

    tokens: Array
    lengths: Array
    finished: Array
    logprobs: Array
    entropies: Array
    roles: Array | None = None
    endings: Array | None = None
    routes: Array = None
    prompt_routes: Array = None

    @property
    def sampled_lengths(self) -> Array:
        """Number of sampled tokens of each completion, int32 [B]."""
        if self.roles is None:
            return self.lengths
        return (self.roles == SAMPLED).sum(axis=1, dtype=np.int32)


def detokenize(rollout: Rollout, decode_text: Callable[[Sequence[int]], str]) -> list[str]:
    """Returns the B completions of a rollout as text.

    Args:
        rollout: the completions.
        decode_text: function from token ids to text.
    """
    return [
        decode_text(tokens[:length].tolist())
        for tokens, length in zip(rollout.tokens, rollout.lengths, strict=True)
    ]


class TurnSamples(NamedTuple):
    """What was sampled in a turn of n tokens."""

    ids: np.ndarray  # int32 [n]
    logprobs: np.ndarray  # float32 [n], as in `Rollout`


class Completions:
    """The token ids of B rows so far, which samples are appended to.

    Attributes:
        rollout: the completions; NumPy arrays that `append` writes to.
        ended: bool [B], whether a completion has ended.
        tokens: number of sampled tokens.
        turns: number of turns with a sampled token.
        drafted: number of tokens that were drafted.
        accepted: number of sampled tokens that came from a draft.
        pad_id: the token id that fills up rows.
        temperature: the number that the logits are divided by.
    """

    def __init__(
        self,
        rows: int,
        sampling: SamplingConfig,
        tokenizer: Tokenizer,
        turns: TurnConfig | None = None,
        *,
        routed: ModelConfig | None = None,
        width: int | None = None,
    ) -> None:
        if width is None:
            width = sampling.max_new_tokens if turns is None else turns.context_tokens
        self.pad_id, self.temperature = tokenizer.pad_id, sampling.divisor
        self._eos_ids = tokenizer.eos_ids
        # Stop strings, and the function to the text in which they are looked for.
        self._stops: list[tuple[list[str], Callable[[Sequence[int]], str]]] = []
        for special in (False, True):
            strings = [text for text in sampling.stop if tokenizer.has_special(text) == special]
            if strings:
                options = {"skip_special": False} if special else {}
                self._stops.append((strings, functools.partial(tokenizer.decode, **options)))
        self._empty = functools.partial(
            _empty_rollout, width=width, pad_id=self.pad_id, turns=turns, routed=routed
        )
        self.rollout = self._empty(rows)
        self._prompt_routes: dict[int, np.ndarray] = {}  # by group
        self.ended = np.zeros(rows, bool)
        self.tokens = self.turns = self.drafted = self.accepted = 0

    def append(self, rows: Sequence[Row], indices: np.ndarray, samples: Samples) -> dict[Row, bool]:
        """Appends samples [R, steps] to rows [N], up to the ends of their turns.

        Each row has the index of its samples. Returns the rows whose turns have ended, each with
        whether an end-of-sequence token or a stop string ended it, and not the limit.
        """
        rollout, tokens = self.rollout, np.asarray(samples.tokens)[indices]
        numbers = array_of(rows, "number")
        starts = rollout.lengths[numbers]
        most = array_of(rows, "limit") - starts
        available = np.full(len(rows), tokens.shape[1])
        if samples.taken is not None:
            available = np.asarray(samples.taken)[indices].sum(axis=1)
        counts = np.minimum(available, most)
        ends = np.isin(tokens, self._eos_ids) & (np.arange(tokens.shape[1]) < counts[:, None])
        complete = ends.any(axis=1)
        counts = np.where(complete, ends.argmax(axis=1) + 1, counts)
        for i, row in enumerate(rows) if self._stops else ():
            context = rollout.tokens[row.number, row.start : starts[i]]
            for stop, decode in self._stops:
                count = _tokens_to_stop(context, tokens[i, : counts[i]], stop, decode)
                if count is not None:
                    counts[i], complete[i] = count, True
        i, step = np.nonzero(np.arange(tokens.shape[1]) < counts[:, None])
        index = numbers[i], starts[i] + step
        rollout.tokens[index] = tokens[i, step]
        rollout.logprobs[index] = samples.logprobs[indices[i], step]
        rollout.entropies[index] = samples.entropies[indices[i], step]
        if rollout.roles is not None:
            rollout.roles[index] = SAMPLED
        if samples.routes is not None:
            routes = np.asarray(samples.routes)[indices]
            self._append_routes(rows, routes, tokens.shape[1], counts)
        rollout.lengths[numbers] = starts + counts
        self.tokens += int(counts.sum())
        self.turns += int((starts == array_of(rows, "start")).sum())
        if samples.taken is not None:
            self._count_drafts(np.asarray(samples.taken)[indices], counts, tokens.shape[1])
        ended = np.flatnonzero(complete | (counts == most))
        return {rows[i]: bool(complete[i]) for i in ended.tolist()}

    def _count_drafts(self, taken: np.ndarray, counts: np.ndarray, positions: int) -> None:
        """Counts the guesses for the kept samples [N], given those taken [N, steps] of a chunk."""
        before = np.cumsum(taken, axis=1) - taken
        row_steps = int(((taken > 0) & (before < counts[:, None])).sum())
        self.drafted += row_steps * (positions // taken.shape[1] - 1)
        self.accepted += int(counts.sum()) - row_steps

    def _append_routes(
        self, rows: Sequence[Row], routes: np.ndarray, steps: int, counts: np.ndarray
    ) -> None:
        """Writes down the routes [N, W, L, k] of some samples, and of an extension before them."""
        first = routes.shape[1] - steps  # column of the first sample
        for row, own, count in zip(rows, routes, counts.tolist(), strict=True):
            added = row.start - row.filled - 1 if first else 0
            end = int(self.rollout.lengths[row.number]) + count
            written = self.rollout.routes[row.number][end - count - added : end]
            written[:] = own[first - added : first + count]

    def append_part(self, rows: Sequence[Row], routes: np.ndarray) -> None:
        """Writes down the routes [N, W, L, k] of an extension that another one continues."""
        for row, own in zip(rows, routes, strict=False):
            self.rollout.routes[row.number][row.filled + 1 : row.filled + len(own)] = own[1:]

    def append_prompts(self, rows: Sequence[Row], sources: np.ndarray, routes: np.ndarray) -> None:
        """Writes down the routes [P, T, L, k] of prompts, given the prompt [N] of each row."""
        for row, source in zip(rows, sources.tolist(), strict=True):
            of_group = self._prompt_routes.get(row.group)
            if of_group is None:
                of_group = routes[source, : len(row.prompt)].copy()
                self._prompt_routes[row.group] = of_group
            self.rollout.prompt_routes[row.number] = of_group
            # Of a long prompt the rest may follow, and no sample.
            self.rollout.routes[row.number][:1] = of_group[-1]

    def turn(self, row: Row) -> TurnSamples:
        """Returns what was sampled in a row's turn."""
        index = row.number, slice(row.start, self.rollout.lengths[row.number])
        return TurnSamples(self.rollout.tokens[index], self.rollout.logprobs[index])

    def reserve(self, rows: int) -> None:
        """Grows the arrays to a number of rows, at least to twice their size."""
        if (more := rows - len(self.ended)) > 0:
            more = max(more, len(self.ended))
            arrays = self.rollout, self._empty(more)
            self.rollout = jax.tree.map(lambda *x: np.concatenate(x), *arrays)
            self.ended = np.concatenate([self.ended, np.zeros(more, bool)])

    def cut(self, rows: int) -> None:
        """Removes the rows that were reserved beyond a number of rows."""
        self.rollout = jax.tree.map(lambda x: x[:rows], self.rollout)
        self.ended = self.ended[:rows]

    def extend(self, row: Row) -> int:
        """Appends what an environment wrote to a row, and returns the length of the completion."""
        rollout, start = self.rollout, int(self.rollout.lengths[row.number])
        end = start + len(row.reply)
        rollout.tokens[row.number, start:end] = row.reply
        rollout.roles[row.number, start:end] = ENVIRONMENT  # pyrefly: ignore[unsupported-operation]
        rollout.lengths[row.number] = end
        return end

    def end(self, row: Row) -> None:
        """Writes down what has ended a row."""
        self.ended[row.number] = True
        self.rollout.finished[row.number] = row.ending in (ANSWER, DONE)
        if self.rollout.endings is not None:
            self.rollout.endings[row.number] = row.ending


def _empty_rollout(
    rows: int, *, width: int, pad_id: int, turns: TurnConfig | None, routed: ModelConfig | None
) -> Rollout:
    """Returns rows without a token."""
    routes = prompt_routes = None
    if routed is not None:
        routes, prompt_routes = np.empty((2, rows), object)
        # Pages of which nothing is written take no memory.
        routes[:] = [routed.empty_routes(width) for _ in range(rows)]
    return Rollout(
        tokens=np.full((rows, width), pad_id, np.int32),
        lengths=np.zeros(rows, np.int32),
        finished=np.zeros(rows, bool),
        logprobs=np.zeros((rows, width), np.float32),
        entropies=np.zeros((rows, width), np.float32),
        roles=None if turns is None else np.zeros((rows, width), np.int8),
        endings=None if turns is None else np.zeros(rows, np.int8),
        routes=routes,
        prompt_routes=prompt_routes,
    )


def _tokens_to_stop(
    context: np.ndarray,
    tokens: np.ndarray,
    stop: Sequence[str],
    decode: Callable[[Sequence[int]], str],
) -> int | None:
    """Returns how many of the tokens complete a stop string; None if they complete none.

    A stop string begins in the tokens, or at most its own number of bytes before them. A token with
    text has at least one byte, but special tokens may have no text. So the window of the context
    grows until its text is at least as long as the longest stop string.
    """
    window = longest = max(len(s.encode()) for s in stop)
    while window < len(context) and len(decode(context[-window:].tolist())) < longest:
        window *= 2
    tail = context[-window:].tolist()

    def complete(count: int) -> bool:
        text = decode(tail + tokens[:count].tolist())
        return any(s in text for s in stop)

    if not complete(len(tokens)):
        return None
    return next(count for count in range(1, len(tokens) + 1) if complete(count))
