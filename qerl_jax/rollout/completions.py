"""The completions of a rollout on the host, which grow with every chunk of samples."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from flax import struct

from qerl_jax.environments.roles import ENVIRONMENT, SAMPLED
from qerl_jax.rollout.config import SamplingConfig, Tokenizer, TurnConfig
from qerl_jax.rollout.decode import Samples

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
    """

    tokens: Array
    lengths: Array
    finished: Array
    logprobs: Array
    entropies: Array
    roles: Array | None = None
    endings: Array | None = None

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


class Completions:
    """The completions so far, and which of them have ended.

    Args:
        rows: B, number of completions.
        sampling: limit of their lengths, and stop strings.
        tokenizer: tokenizer of the policy.
        turns: limits of conversations with an environment; None without one.

    Attributes:
        rollout: the completions; NumPy arrays that `append` writes to.
        ended: bool [B], whether a completion, or its turn, is complete.
        limits: int [B], length at which a completion, or its turn, is cut off.
        starts: int [B], length at which the turn began.
    """

    def __init__(
        self,
        rows: int,
        sampling: SamplingConfig,
        tokenizer: Tokenizer,
        turns: TurnConfig | None = None,
    ) -> None:
        width = sampling.max_new_tokens if turns is None else turns.context_tokens
        self._sampling, self._tokenizer = sampling, tokenizer
        # Stop strings, and the function to the text in which they are looked for.
        self._stops: list[tuple[list[str], Callable[[Sequence[int]], str]]] = []
        for special in (False, True):
            strings = [text for text in sampling.stop if tokenizer.has_special(text) == special]
            if strings:
                options = {"skip_special": False} if special else {}
                self._stops.append((strings, functools.partial(tokenizer.decode, **options)))
        self.rollout = Rollout(
            tokens=np.full((rows, width), tokenizer.pad_id, np.int32),
            lengths=np.zeros(rows, np.int32),
            finished=np.zeros(rows, bool),
            logprobs=np.zeros((rows, width), np.float32),
            entropies=np.zeros((rows, width), np.float32),
            roles=None if turns is None else np.zeros((rows, width), np.int8),
            endings=None if turns is None else np.zeros(rows, np.int8),
        )
        self.ended = np.zeros(rows, bool)
        self.starts = np.zeros(rows, int)
        first = sampling.max_new_tokens
        if turns is not None:
            first = turns.next_turn(0, 0, first)
        self.limits = np.full(rows, first)

    @property
    def pad_id(self) -> int:
        """The token id that fills up rows."""
        return self._tokenizer.pad_id

    @property
    def temperature(self) -> np.float32:
        """The number that the logits are divided by."""
        return self._sampling.divisor

    def append(self, rows: np.ndarray, samples: Samples) -> None:
        """Appends samples to the completions that have not ended, up to the ends of their turns.

        Args:
            rows: int [R], completion that each row of the samples belongs to, or -1.
            samples: samples [R, steps] on the host.
        """
        rollout = self.rollout
        live = np.flatnonzero((rows >= 0) & ~self.ended[rows])
        rows, tokens = rows[live], np.asarray(samples.tokens)[live]
        starts, limits = rollout.lengths[rows], self.limits[rows]
        ends = np.isin(tokens, self._tokenizer.eos_ids)
        ends &= np.arange(tokens.shape[1]) < (limits - starts)[:, None]
        finished = ends.any(axis=1)
        counts = np.where(finished, ends.argmax(axis=1) + 1, tokens.shape[1])
        counts = np.minimum(counts, limits - starts)
        for i, row in enumerate(rows) if self._stops else ():
            for stop, decode in self._stops:
                context = rollout.tokens[row, self.starts[row] : starts[i]]
                added = tokens[i, : counts[i]]
                count = _tokens_to_stop(context, added, stop, decode)
                if count is not None:
                    counts[i], finished[i] = count, True
        row, step = np.nonzero(np.arange(tokens.shape[1]) < counts[:, None])
        index = rows[row], starts[row] + step
        rollout.tokens[index] = tokens[row, step]
        rollout.logprobs[index] = samples.logprobs[live[row], step]
        rollout.entropies[index] = samples.entropies[live[row], step]
        if rollout.roles is not None:
            rollout.roles[index] = SAMPLED
        rollout.lengths[rows] = starts + counts
        rollout.finished[rows] = finished
        self.ended[rows] = finished | (rollout.lengths[rows] == limits)

    def go_on(self, row: int, ids: Sequence[int], *, limit: int) -> None:
        """Appends what an environment wrote to a completion whose turn has ended.

        Args:
            row: number of the completion.
            ids: the environment's tokens.
            limit: length of the completion at which its next turn is cut off.
        """
        rollout, start = self.rollout, int(self.rollout.lengths[row])
        end = start + len(ids)
        rollout.tokens[row, start:end] = ids
        rollout.roles[row, start:end] = ENVIRONMENT  # pyrefly: ignore[unsupported-operation]
        rollout.lengths[row], self.starts[row], self.limits[row] = end, end, limit
        rollout.finished[row] = self.ended[row] = False


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
