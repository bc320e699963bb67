"""Turns sampled completions into the arrays of an update, on the host."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import chex
import flax.struct
import jax
import numpy as np

from qerl_jax.buckets import bucket, narrower
from qerl_jax.errors import UserError
from qerl_jax.rl.losses import custom_weights, token_weights

Array = Any  # a NumPy array on the host, a jax.Array under jit


@flax.struct.dataclass
class TrainBatch:
    """Prompts with their completions, left-aligned.

    Arrays [B, C] have one column per completion token. C is the bucket of the longest completion,
    not the limit on sampled tokens. Completion token c of row b is at position
    prompt_lengths[b] + c of `tokens`. This position exists wherever the loss mask is 1; elsewhere
    it may be past the last column T - 1.

    Attributes:
        tokens: int32 [B, T] token ids: prompt, completion, padding.
        prompt_lengths: int32 [B] prompt lengths in tokens, at least 1.
        lengths: int32 [B] lengths of prompt and completion together.
        loss_mask: float32 [B, C] mask, 1 for the tokens in the loss.
        advantages: float32 [B] advantages.
        weights: float32 [B, C] weight of each token in the loss, 0 outside the mask.
        rollout_logprobs: float32 [B, C] log-probabilities that the sampler recorded; NaN for a
            token without a record, 0 past the end of a completion.
        old_logprobs: float32 [B, C] log-probabilities under the policy before the first update of
            this rollout, as the trainer computes them, or None.
        ref_logprobs: float32 [B, C] log-probabilities under the reference policy, or None.
    """

    tokens: Array
    prompt_lengths: Array
    lengths: Array
    loss_mask: Array
    advantages: Array
    weights: Array
    rollout_logprobs: Array
    old_logprobs: Array | None = None
    ref_logprobs: Array | None = None


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

    The masks follow from the lengths alone, never from token ids, so the padding may be an EOS: the
    tokens of a completion, its first EOS included, are in the loss, and what follows is not. A row
    that is masked out does not count in a denominator over tokens.

    Args:
        prompts: B non-empty lists of token ids.
        completions: int [B, M] sampled token ids; M is the limit on sampled tokens.
        lengths: int [B] completion lengths in tokens, EOS included; may be 0.
        finished: bool [B] flags, True where the completion ended by itself.
        advantages: [B] advantages.
        rollout_logprobs: [B, M] log-probabilities that the sampler recorded; NaN for a token
            without a record.
        mask_truncated: whether unfinished completions are left out of the loss (DAPO's overlong
            filtering).
        aggregation: how the token losses become one, as in `losses.token_weights`, or the import
            path of a user function, as in `losses.custom_weights`.
        pad_id: token id that fills `tokens` past the end of a row.
        micro_batch_rows: number of rows that will be passed to `micro_batches`; only the
            aggregation 'micro_batch' needs it.
        max_prompt: length in tokens of the longest prompt of the run; it bounds T by
            max_prompt + M, rounded up to a multiple of 8. None sets no bound.

    Returns:
        The batch, as NumPy arrays, without `old_logprobs` and `ref_logprobs`.

    Raises:
        UserError: a prompt is empty.
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
        weights = custom_weights(
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
    """Returns the batch sorted by length, longest row first, so that neighbors share a width."""
    order = np.argsort(-batch.lengths, kind="stable")
    return jax.tree.map(lambda x: np.asarray(x)[order], batch)


def micro_batches(batch: TrainBatch, rows: int) -> list[TrainBatch]:
    """Cuts the batch into micro-batches of `rows` rows, each about as wide as its rows need.

    A micro-batch is as wide as the batch or as the bucket of a half or a quarter of its T, and its
    arrays [B, C] are cut to the same width, so at most three programs are compiled. The last
    micro-batch is filled up with rows of one token that take no part in the loss.

    Args:
        batch: the batch, as NumPy arrays.
        rows: number of rows of each micro-batch.

    Returns:
        The micro-batches in the order of the rows.
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
