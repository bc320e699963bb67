"""Packs the rows of a step into buffers of a fixed number of tokens, on the host.

One program serves every update of a run, because every buffer has the same shape. A buffer holds
groups one after the other, and a group's prompt only once:

    token      p0 p1 p2 | p3 a0 a1 | p3 b0 b1 b2 | q0 | q1 c0 c1 ... padding
    position    0  1  2 |  3  4  5 |  3  4  5  6 |  0 |  1  2  3 ...
    predicts            | a0 a1 a2 | b0 b1 b2 b3 |    | c0 c1 c2

Each completion begins with a copy of the prompt's last token, so that no position predicts more
than one token of the loss: otherwise the gradients of all completions would add up at that token,
in an order that a GPU does not promise. The last token of a completion predicts nothing and is left
out. A completion of L tokens thus takes L positions, and a prompt of P tokens takes P - 1.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.struct
import numpy as np

from pallas_kernels.attention import PADDING, PART_BITS, Segments, segments
from qerl_jax.errors import UserError
from qerl_jax.rl.batch import TrainBatch
from qerl_jax.rl.losses import LossConfig
from qerl_jax.system.import_path import names_function

Array = Any  # a NumPy array on the host, a jax.Array under jit

MAX_PARTS = (1 << PART_BITS) - 1  # largest number of completions of a group in one buffer


@flax.struct.dataclass
class PackedBuffer:
    """A buffer of N positions.

    The first four attributes describe the positions. The others describe the predicted tokens, in
    the order of `order`: what the policy sampled, completion after completion, then entries without
    a meaning, whose mask is 0.
    """

    tokens: Array  # int32 [N] token ids
    # int32 [N] positions for the rotary embedding; those of a completion continue the positions of
    # its prompt.
    positions: Array
    segments: Segments  # which positions see each other, as in `attend_packed`
    order: Array  # int32 [N] permutation of the positions; entry m predicts at position order[m]
    targets: Array  # int32 [N] predicted token ids
    rows: Array  # int32 [N] number of the completion within the buffer, ascending
    # float32 [N] mask, ones for the sampled tokens in front of zeros: log-probs are computed up to
    # the sum of the mask.
    mask: Array
    advantages: Array  # float32 [N] advantage of the completion
    weights: Array  # float32 [N] weights of the tokens in the loss, 0 outside the mask
    # float32 [N] log-probabilities that the sampler recorded; NaN for a token without a record.
    rollout_logprobs: Array
    # float32 [N] log-probabilities under the policy before the first update of the rollout; zeros
    # before they are known.
    old_logprobs: Array
    # float32 [N] log-probabilities under the reference policy, or None.
    ref_logprobs: Array | None = None
    teacher_logprobs: Array | None = None  # float32 [N], the same under the teacher
    # [N, L, k] experts of the token at each position in every layer, as the rollout recorded them,
    # in the dtype of `ModelConfig.empty_routes`; None to let the routers choose.
    routes: Array | None = None


class Part(NamedTuple):
    """The rows of one group in one buffer."""

    prompt: int  # number of prompt positions, P - 1
    rows: list[int]  # indices of the rows in the batch


def rows_that_teach(batch: TrainBatch, loss: LossConfig) -> np.ndarray:
    """Returns bool [B] flags of the rows that can change the gradient.

    A row cannot if no token has a weight, or if its advantage is 0 and the loss is a built-in one
    without a teacher, a KL and an entropy term: then every term of `policy_loss` and every
    derivative of it is 0. A user function may have a gradient at an advantage of 0. A row whose
    recorded log-probabilities are not finite is kept. A policy that has become NaN gives every
    group equal rewards, and only a gradient that is not finite tells.

    Args:
        batch: all rows of the step.
        loss: definition of the loss.
    """
    weighted = (np.asarray(batch.weights) != 0).any(axis=1)
    broken = ~np.isfinite(batch.rollout_logprobs).all(axis=1)
    always = any((loss.kl_coef, loss.entropy_coef, loss.teacher_coef))
    always |= names_function(loss.objective)
    return weighted & ((batch.advantages != 0) | always | broken)


def layout(
    prompts: np.ndarray, lengths: np.ndarray, groups: np.ndarray, *, buffer_tokens: int
) -> list[list[Part]]:
    """Deals rows out to buffers.

    The groups are dealt out from the longest to the shortest, and so are the rows of a group. A
    buffer takes every row that still fits; the rest of a group goes into later buffers, with its
    prompt repeated. A row is never cut.

    Args:
        prompts: int [B] prompt positions of each row, the same for the rows of a group.
        lengths: int [B] completion positions of each row, at least 1.
        groups: int [B] group of each row.
        buffer_tokens: positions of a buffer, N.

    Returns:
        The parts of each buffer. It is a function of the arguments alone.

    Raises:
        UserError: a row is longer than a buffer.
    """
    longest = int(np.max(prompts + lengths, initial=0))
    if longest > buffer_tokens:
        raise UserError(
            f"a prompt with its completion takes {longest} tokens, train.buffer_tokens is "
            f"{buffer_tokens}: raise it to at least {longest}, or 0 to choose it"
        )
    queue: list[tuple[int, list[int]]] = []
    for group in dict.fromkeys(groups.tolist()):
        rows = np.flatnonzero(groups == group)
        rows = rows[np.argsort(-lengths[rows], kind="stable")]
        queue.append((int(prompts[rows[0]]), rows.tolist()))
    queue.sort(key=lambda part: -(part[0] + int(lengths[part[1]].sum())))  # a stable sort
    buffers, sizes = [], lengths.tolist()
    while queue:
        buffer, later, free = [], [], buffer_tokens
        for prompt, rows in queue:
            fitting, postponed, space = [], [], free - prompt
            for number, row in enumerate(rows):
                if sizes[rows[-1]] > space or len(fitting) == MAX_PARTS:
                    postponed += rows[number:]  # The shortest row is the last one.
                    break
                if sizes[row] <= space:
                    fitting.append(row)
                    space -= sizes[row]
                else:
                    postponed.append(row)
            if fitting:
                buffer.append(Part(prompt, fitting))
                free = space
            if postponed:
                later.append((prompt, postponed))
        buffers.append(buffer)
        queue = later
    return buffers


def pack(batch: TrainBatch, rows: np.ndarray, *, buffer_tokens: int) -> list[PackedBuffer]:
    """Packs rows of a batch into buffers.

    Rows with equal prompts share them. All tokens of a completion are predicted, and the mask
    leaves out those of an environment. Rows without a token take no positions.

    Args:
        batch: all rows of a step.
        rows: bool [B] flags of the rows to pack.
        buffer_tokens: positions of a buffer, N.

    Returns:
        As many buffers as are needed, as NumPy arrays; none if there is nothing to predict.

    Raises:
        UserError: a row is longer than a buffer.
    """
    lengths = batch.lengths - batch.prompt_lengths
    indices = np.flatnonzero(rows & (lengths > 0))
    numbers: dict[bytes, int] = {}
    groups = [
        numbers.setdefault(batch.tokens[row, : batch.prompt_lengths[row]].tobytes(), len(numbers))
        for row in indices
    ]
    parts = layout(
        batch.prompt_lengths[indices] - 1,
        lengths[indices],
        np.array(groups, np.int32),
        buffer_tokens=buffer_tokens,
    )
    return [
        _buffer(batch, [Part(p, indices[r].tolist()) for p, r in buffer], buffer_tokens)
        for buffer in parts
    ]


def _buffer(batch: TrainBatch, parts: Sequence[Part], size: int) -> PackedBuffer:
    """Writes one buffer."""
    tokens, positions, ids = (np.zeros(size, np.int32) for _ in range(3))
    ids[:] = PADDING
    predicts = np.zeros(size, bool)
    routes, recorded = None, batch.routes
    if recorded is not None:
        like = recorded[parts[0].rows[0]]
        routes = np.zeros((size, *like.shape[1:]), like.dtype)
    sampled = []  # for each completion its row and the columns of the tokens that were sampled
    start = 0
    for group, (prompt, rows) in enumerate(parts):
        stop = start + prompt
        tokens[start:stop] = batch.tokens[rows[0], :prompt]
        positions[start:stop] = np.arange(prompt)
        ids[start:stop] = group << PART_BITS
        if routes is not None:
            routes[start:stop] = batch.prompt_routes[rows[0]][:prompt]
        for number, row in enumerate(rows, start=1):
            start, stop = stop, stop + int(batch.lengths[row] - batch.prompt_lengths[row])
            tokens[start:stop] = batch.tokens[row, prompt : prompt + stop - start]
            positions[start:stop] = prompt + np.arange(stop - start)
            ids[start:stop] = group << PART_BITS | number
            if routes is not None:
                routes[start:stop] = recorded[row][: stop - start]
            is_sampled = batch.sampled[row, : stop - start] > 0
            predicts[start:stop] = is_sampled
            sampled.append((row, np.flatnonzero(is_sampled)))
        start = stop
    columns = np.concatenate([columns for _, columns in sampled])
    counts = [len(columns) for _, columns in sampled]
    rows = np.repeat([row for row, _ in sampled], counts)

    def predicted(values, fill=0.0):
        """Writes one value for each predicted token, [M], in front of the fill value."""
        out = np.full(size, fill, values.dtype)
        out[: len(values)] = values
        return out

    return PackedBuffer(
        tokens=tokens,
        positions=positions,
        segments=segments(ids),
        order=np.argsort(~predicts, kind="stable").astype(np.int32),
        targets=predicted(batch.tokens[rows, batch.prompt_lengths[rows] + columns]),
        rows=predicted(np.repeat(np.arange(len(sampled), dtype=np.int32), counts), len(sampled)),
        mask=predicted(batch.sampled[rows, columns]),
        advantages=predicted(batch.advantages[rows]),
        weights=predicted(batch.weights[rows, columns]),
        rollout_logprobs=predicted(batch.rollout_logprobs[rows, columns]),
        old_logprobs=np.zeros(size, np.float32),
        routes=routes,
    )


def empty_buffer(buffer_tokens: int) -> PackedBuffer:
    """Returns a buffer of padding, without log-probabilities of a reference policy."""
    zeros, ids = np.zeros(buffer_tokens, np.float32), np.zeros(buffer_tokens, np.int32)
    return PackedBuffer(
        tokens=ids,
        positions=ids,
        segments=segments(np.full(buffer_tokens, PADDING, np.int32)),
        order=np.arange(buffer_tokens, dtype=np.int32),
        targets=ids,
        rows=ids,
        mask=zeros,
        advantages=zeros,
        weights=zeros,
        rollout_logprobs=zeros,
        old_logprobs=zeros,
    )


def packing_metrics(batch: TrainBatch, buffers: Sequence[PackedBuffer]) -> dict[str, float]:
    """Returns how much of a step its updates compute.

    Args:
        batch: all rows of the step.
        buffers: its buffers.

    Returns:
        forwarded_fraction, sampled tokens in the buffers as a fraction of all sampled tokens of the
        step; packed_tokens, number of positions that hold a token; update_buffers, number
        of buffers.
    """
    sampled_tokens = float(batch.sampled.sum())
    forwarded_tokens = sum(float(buffer.mask.sum()) for buffer in buffers)
    return {
        "forwarded_fraction": forwarded_tokens / sampled_tokens if sampled_tokens else 0.0,
        "packed_tokens": sum(int((buffer.segments.ids != PADDING).sum()) for buffer in buffers),
        "update_buffers": len(buffers),
    }
