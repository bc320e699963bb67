"""Turns sampled completions into the arrays of an update, on the host."""

from collections.abc import Sequence
from typing import Any, Protocol

import chex
import flax.struct
import numpy as np

from qerl_jax.environments.roles import SAMPLED
from qerl_jax.errors import UserError
from qerl_jax.rl.losses import custom_weights, token_weights
from qerl_jax.system.import_path import names_function

Array = Any  # a NumPy array on the host, a jax.Array under jit


@flax.struct.dataclass
class TrainBatch:
    """Prompts with their completions, left-aligned.

    Arrays [B, C] have one column per completion token. C is the length of the longest completion,
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
            token without a record, 0 for the tokens of an environment and past the end of a
            completion.
        sampled: float32 [B, C] mask, 1 for the tokens that the policy sampled. All tokens of a
            completion are, but for those of an environment.
        routes: object [B], of each completion the experts [C, L, k] of the token before each of its
            tokens, as in `rollout.completions.Rollout`; None to let the routers choose.
        prompt_routes: object [B], those of the tokens of each prompt [P, L, k]; None as well.
    """

    tokens: Array
    prompt_lengths: Array
    lengths: Array
    loss_mask: Array
    advantages: Array
    weights: Array
    rollout_logprobs: Array
    sampled: Array
    routes: Array = None
    prompt_routes: Array = None


class SampledRows(Protocol):
    """The part of a rollout of B completions that a batch reads."""

    tokens: Array  # int [B, M] sampled token ids; M is the limit on sampled tokens
    lengths: Array  # int [B] completion lengths in tokens, EOS included; may be 0
    finished: Array  # bool [B] flags, True where the completion ended by itself
    # [B, M] log-probabilities that the sampler recorded; NaN for a token without a record.
    logprobs: Array
    # int [B, M] where each token comes from, see `environments.roles`; None where the policy
    # sampled all of them.
    roles: Array | None
    # object [B] of a mixture of experts, see `TrainBatch`; None where they are not recorded.
    routes: Array
    prompt_routes: Array


def draw_mini_batches(
    rows: int, count: int, *, unit: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Deals the rows of a step out to mini-batches at random.

    Args:
        rows: B, number of rows.
        count: number of mini-batches; 1 has all rows.
        unit: number of neighboring rows that stay together.
        rng: what draws.

    Returns:
        bool [B] flags of the rows of each mini-batch.
    """
    units = np.arange(rows) // unit
    parts = np.array_split(rng.permutation(units[-1] + 1), count)
    return [np.isin(units, part) for part in parts]


def make_batch(
    prompts: Sequence[Sequence[int]],
    rollout: SampledRows,
    advantages: np.ndarray,
    *,
    mask_truncated: bool,
    aggregation: str,
    pad_id: int,
    micro_batch_rows: int | None = None,
    max_new_tokens: int | None = None,
) -> TrainBatch:
    """Returns the batch of one rollout.

    The masks follow from the lengths and roles, never from token ids, so the padding may be an EOS:
    the tokens that the policy sampled, its first EOS included, are in the loss, and what an
    environment wrote or what follows is not. A token or row that is masked out does not count in a
    denominator over tokens.

    Args:
        prompts: B non-empty lists of token ids.
        rollout: B completions.
        advantages: [B] advantages.
        mask_truncated: whether unfinished completions are left out of the loss (DAPO's overlong
            filtering).
        aggregation: how the token losses become one, as in `losses.token_weights`, or the import
            path of a user function, as in `losses.custom_weights`.
        pad_id: token id that fills `tokens` past the end of a row.
        micro_batch_rows: number of consecutive rows whose tokens form a denominator; only the
            aggregation 'micro_batch' needs it.
        max_new_tokens: limit on sampled tokens of a completion; None is M.

    Returns:
        The batch, as NumPy arrays.

    Raises:
        UserError: a prompt is empty.
    """
    rows, width = rollout.tokens.shape
    chex.assert_shape(rollout.logprobs, (rows, width))
    columns = max(1, int(np.max(rollout.lengths)))
    completions = np.asarray(rollout.tokens, np.int32)[:, :columns]
    rollout_logprobs = rollout.logprobs[:, :columns]
    lengths, finished = np.asarray(rollout.lengths, np.int32), np.asarray(rollout.finished, bool)
    chex.assert_shape([lengths, finished, advantages], (rows,))
    prompt_lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    chex.assert_shape(prompt_lengths, (rows,))
    if not prompt_lengths.all():
        raise UserError(
            f"prompt {int(np.argmin(prompt_lengths))} is empty: it needs at least one token"
        )
    total_lengths = prompt_lengths + lengths

    tokens = np.full((rows, int(total_lengths.max())), pad_id, np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
        tokens[row, len(prompt) : total_lengths[row]] = completions[row, : lengths[row]]

    in_completion = np.arange(completions.shape[1]) < lengths[:, None]
    sampled = in_completion
    if (roles := getattr(rollout, "roles", None)) is not None:
        sampled = in_completion & (np.asarray(roles)[:, :columns] == SAMPLED)
    in_loss = sampled & finished[:, None] if mask_truncated else sampled
    loss_mask = in_loss.astype(np.float32)
    advantages = np.asarray(advantages, np.float32)
    rollout_logprobs = np.where(sampled, rollout_logprobs, 0.0).astype(np.float32)
    if names_function(aggregation):
        weights = custom_weights(
            loss_mask, aggregation, advantages=advantages, logprobs=rollout_logprobs
        )
    else:
        weights = token_weights(
            loss_mask,
            aggregation,
            max_new_tokens=max_new_tokens or width,
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
        sampled=sampled.astype(np.float32),
        routes=getattr(rollout, "routes", None),
        prompt_routes=getattr(rollout, "prompt_routes", None),
    )
