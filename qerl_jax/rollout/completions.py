"""The completions of a rollout on the host, which grow with every chunk of samples."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from flax import struct

from qerl_jax.rollout.config import SamplingConfig, Tokenizer
from qerl_jax.rollout.decode import Samples

Array = Any  # NumPy on the host, jax.Array inside of jit


@struct.dataclass
class Rollout:
    """Completions of P prompts, G of each; the rows of a group are neighbors (B = P G).

    Attributes:
        tokens: int32 [B, C] completions, padded on the right.
        lengths: int32 [B], number of tokens of each completion, its end-of-sequence token included.
        finished: bool [B], whether it ended with an end-of-sequence token or a stop string.
        logprobs: float32 [B, C], log-probability of each token under the sampling temperature.
        entropies: float32 [B, C], entropy of the distribution of each token, in nats.
    """

    tokens: Array
    lengths: Array
    finished: Array
    logprobs: Array
    entropies: Array


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

    Attributes:
        rollout: the completions; NumPy arrays that `append` writes to.
        ended: bool [B], whether a completion is complete.
    """

    def __init__(self, rows: int, sampling: SamplingConfig, tokenizer: Tokenizer) -> None:
        width = sampling.max_new_tokens
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
        )
        self.ended = np.zeros(rows, bool)

    @property
    def pad_id(self) -> int:
        """The token id that fills up rows."""
        return self._tokenizer.pad_id

    @property
    def temperature(self) -> np.float32:
        """The number that the logits are divided by."""
        return self._sampling.divisor

    def append(self, rows: np.ndarray, samples: Samples) -> None:
        """Appends samples to the completions that have not ended, up to their ends.

        Args:
            rows: int [R], completion that each row of the samples belongs to, or -1.
            samples: samples [R, steps] on the host.
        """
        rollout, limit = self.rollout, self._sampling.max_new_tokens
        live = np.flatnonzero((rows >= 0) & ~self.ended[rows])
        rows, tokens = rows[live], np.asarray(samples.tokens)[live]
        starts = rollout.lengths[rows]
        ends = np.isin(tokens, self._tokenizer.eos_ids)
        ends &= np.arange(tokens.shape[1]) < (limit - starts)[:, None]
        finished = ends.any(axis=1)
        counts = np.where(finished, ends.argmax(axis=1) + 1, tokens.shape[1])
        counts = np.minimum(counts, limit - starts)
        for i, row in enumerate(rows) if self._stops else ():
            for stop, decode in self._stops:
                context, added = rollout.tokens[row, : starts[i]], tokens[i, : counts[i]]
                count = _tokens_to_stop(context, added, stop, decode)
                if count is not None:
                    counts[i], finished[i] = count, True
        row, step = np.nonzero(np.arange(tokens.shape[1]) < counts[:, None])
        index = rows[row], starts[row] + step
        rollout.tokens[index] = tokens[row, step]
        rollout.logprobs[index] = samples.logprobs[live[row], step]
        rollout.entropies[index] = samples.entropies[live[row], step]
        rollout.lengths[rows] = starts + counts
        rollout.finished[rows] = finished
        self.ended[rows] = finished | (rollout.lengths[rows] == limit)


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
