"""From sampled completions to the arrays of an update, on the host."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import chex
import flax.struct
import jax
import numpy as np

from qerl_jax.buckets import bucket, narrower
from qerl_jax.errors import UserError
from qerl_jax.rl.losses import own_weights, token_weights

Array = Any  # NumPy on the host, jax.Array inside of jit


@flax.struct.dataclass
class TrainBatch:
    """Prompts with their completions, left-aligned; the arrays [B, C] speak of the completions.

    C is the bucket of the longest completion, not the most that may be sampled.
    Completion token c of row b is at position prompt_lengths[b] + c of `tokens`. Where it is in the
    mask that position exists; beyond, it may be outside of T.
    """

    tokens: Array  # int32 [B, T]: prompt, completion, padding
    prompt_lengths: Array  # int32 [B], at least 1
    lengths: Array  # int32 [B]: prompt and completion
    loss_mask: Array  # float32 [B, C]: 1 for the tokens in the loss
    advantages: Array  # float32 [B]
    weights: Array  # float32 [B, C]: the weight of each token in the loss, 0 outside of the mask
    rollout_logprobs: Array  # float32 [B, C], as sampled; NaN where not recorded, 0 beyond the end
    old_logprobs: Array | None = None  # float32 [B, C]: the trainer's, before the first update
    ref_logprobs: Array | None = None  # float32 [B, C]: the reference policy's


def make_batch(
    prompts: Sequence[Sequence[int]],
    completions: np.ndarray,
    lengths: np.ndarray,
    finished: np.ndarray,
    advantages: np.ndarray,
    rollout_logprobs: np.ndarray,
    *,
    mask_truncated: bool,
    aggregation: str,
    pad_id: int,
    micro_batch_rows: int | None = None,
    max_prompt: int | None = None,
) -> TrainBatch:
    """Returns the batch of one rollout.

    Everything follows from the lengths and nothing from the ids, so padding may be an EOS: a
    completion's tokens, its first EOS included, are in the loss, what comes after is not. A row
    that is masked out has no part in a denominator over tokens.

    Args:
      prompts: B lists of token ids, none empty.
      completions: int [B, M], M the most tokens that are sampled.
      lengths: int [B], tokens of each completion, its EOS included; may be 0.
      finished: bool [B], whether the completion ended by itself.
      advantages: [B].
      rollout_logprobs: [B, M].
      mask_truncated: take unfinished completions out of the loss (DAPO's overlong filtering).
      aggregation: of the weights, see `losses.token_weights`; or a function of one's own, see
        `losses.own_weights`.
      pad_id: fills `tokens` beyond the end.
      micro_batch_rows: the rows that `micro_batches` is going to take; the aggregation
        'micro_batch' needs them, for the others they do not matter.
      max_prompt: the longest prompt of the run, in tokens; T need not exceed it plus M.

    Raises:
      UserError: an empty prompt.
    """
    rows, max_new_tokens = completions.shape
    chex.assert_shape(rollout_logprobs, (rows, max_new_tokens))
    columns = bucket(int(np.max(lengths)), limit=max_new_tokens)
    completions = np.asarray(completions, np.int32)[:, :columns]
    rollout_logprobs = rollout_logprobs[:, :columns]
    lengths, finished = np.asarray(lengths, np.int32), np.asarray(finished, bool)
    chex.assert_shape([lengths, finished, advantages], (rows,))
    prompt_lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    chex.assert_shape(prompt_lengths, (rows,))
    if not prompt_lengths.all():
        raise UserError(
            f"prompt {int(np.argmin(prompt_lengths))} is empty: it needs at least one token"
        )
    total_lengths = prompt_lengths + lengths

    limit = None if max_prompt is None else max_prompt + max_new_tokens
    width = bucket(int(total_lengths.max()), limit=limit)
    tokens = np.full((rows, width), pad_id, np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
        tokens[row, len(prompt) : total_lengths[row]] = completions[row, : lengths[row]]

    sampled = np.arange(completions.shape[1]) < lengths[:, None]
    in_loss = sampled & finished[:, None] if mask_truncated else sampled
    loss_mask = in_loss.astype(np.float32)
    advantages = np.asarray(advantages, np.float32)
    rollout_logprobs = np.where(sampled, rollout_logprobs, 0.0).astype(np.float32)
    if ":" in aggregation:
        weights = own_weights(
            loss_mask, aggregation, advantages=advantages, logprobs=rollout_logprobs
        )
    else:
        weights = token_weights(
            loss_mask,
            aggregation,
            max_new_tokens=max_new_tokens,
            micro_batch_rows=micro_batch_rows,
        )
    return TrainBatch(
        tokens=tokens,
        prompt_lengths=prompt_lengths,
        lengths=total_lengths,
        loss_mask=loss_mask,
        advantages=advantages,
        weights=weights,
        rollout_logprobs=rollout_logprobs,
    )


def longest_first(batch: TrainBatch) -> TrainBatch:
    """The batch with its rows in the order of their lengths: neighbours need the same width."""
    order = np.argsort(-batch.lengths, kind="stable")
    return jax.tree.map(lambda x: np.asarray(x)[order], batch)


def micro_batches(batch: TrainBatch, rows: int) -> list[TrainBatch]:
    """Cuts the batch into micro-batches of `rows` rows, each about as wide as its rows need.

    The widths of both kinds of arrays are the batch's or buckets of a half or a quarter of it, so
    that three programs serve. The last micro-batch is filled with rows of one token that have no
    part in the loss.
    """
    missing = -len(batch.lengths) % rows

    def pad(x, value=0):
        x = np.asarray(x)
        return np.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1), constant_values=value)

    padded = dataclasses.replace(
        jax.tree.map(pad, batch),
        lengths=pad(batch.lengths, 1),
        prompt_lengths=pad(batch.prompt_lengths, 1),
    )
    widths = narrower(batch.tokens.shape[1])
    found = []
    for first in range(0, len(padded.lengths), rows):
        longest = padded.lengths[first : first + rows].max()
        width = next(width for width in widths if width >= longest)
        part = np.s_[first : first + rows, :width]
        found.append(jax.tree.map(lambda x, part=part: x[part[: x.ndim]], padded))
    return found
