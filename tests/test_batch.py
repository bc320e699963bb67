"""Batches of completions: masks and weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusal import refused
from row_batch import row_batch
from row_loss import loss_config, row_loss

from qerl_jax.rl import losses
from qerl_jax.rl.batch import draw_mini_batches
from qerl_jax.rollout.shapes import bucket

EOS = PAD = 2
PROMPTS = [[5, EOS, 7], [5, EOS, 7], [8], [8]]
COMPLETIONS = np.array(
    [[11, 12, EOS, 99], [EOS, 99, 99, 99], [13, EOS, 14, 15], [16, 17, 99, 99]], np.int32
)
LENGTHS = np.array([3, 1, 4, 2])
FINISHED = np.array([True, True, False, True])
ADVANTAGES = np.array([1.0, -1.0, 0.5, -0.5])


def batch_of(lengths=LENGTHS, finished=FINISHED, **options):
    defaults = {"mask_truncated": False, "aggregation": "token", "pad_id": PAD}
    defaults["micro_batch_rows"] = 2
    logprobs = np.where(np.arange(4) < lengths[:, None], -1.0, np.nan)
    return row_batch(
        PROMPTS, COMPLETIONS, lengths, finished, ADVANTAGES, logprobs, **defaults | options
    )


def lengths_mask(lengths):
    return (np.arange(4) < np.array(lengths)[:, None]).astype(np.float32)


def test_tokens_are_contiguous_and_padded():
    batch = batch_of()
    expected = [
        [5, EOS, 7, 11, 12, EOS],
        [5, EOS, 7, EOS, PAD, PAD],
        [8, 13, EOS, 14, 15, PAD],
        [8, 16, 17, PAD, PAD, PAD],
    ]
    np.testing.assert_array_equal(batch.tokens, expected)
    np.testing.assert_array_equal(batch.prompt_lengths, [3, 3, 1, 1])
    np.testing.assert_array_equal(batch.lengths, [6, 4, 5, 3])
    assert batch.tokens.dtype == batch.lengths.dtype == np.int32
    floats = (batch.loss_mask, batch.weights, batch.advantages, batch.rollout_logprobs)
    assert all(x.dtype == np.float32 for x in floats)
    # The padding is an EOS, prompts contain it, and a completion continues after it.
    np.testing.assert_array_equal(batch.loss_mask, lengths_mask(LENGTHS))
    np.testing.assert_array_equal(batch.rollout_logprobs, -lengths_mask(LENGTHS))


@pytest.mark.parametrize(
    ("rows", "count", "unit"), [(8, 1, 1), (8, 1, 3), (8, 2, 1), (8, 8, 1), (12, 2, 3), (4, 2, 2)]
)
def test_mini_batches_are_drawn_from_all_rows(rows, count, unit):
    drawn = [
        draw_mini_batches(rows, count, unit=unit, rng=np.random.default_rng(seed))
        for seed in range(20)
    ]
    for parts in drawn:
        np.testing.assert_array_equal(np.sum(parts, axis=0), np.ones(rows))
        assert {part.sum() for part in parts} == {rows // count}
        for part in parts:
            starts = part[::unit]
            np.testing.assert_array_equal(part, np.repeat(starts, unit)[:rows])
    # Another key deals them out in another way, where there are several.
    assert (len({np.array(parts).tobytes() for parts in drawn}) > 1) == (count > 1)


def test_buckets_are_few_and_close():
    lengths = np.arange(1, 4097)
    widths = np.array([bucket(int(length)) for length in lengths])
    assert (widths >= lengths).all()
    assert (widths % 8 == 0).all()
    assert (widths <= np.maximum(lengths + 7, 1.5 * lengths)).all()
    assert len(set(widths.tolist())) == 4 + 2 * 7
    assert all(bucket(width) == width for width in set(widths.tolist()))


@pytest.mark.parametrize("aggregation", losses.AGGREGATIONS)
def test_truncated_rows_leave_the_mask_and_the_token_count(aggregation):
    batch = batch_of(mask_truncated=True, aggregation=aggregation)
    expected = lengths_mask([3, 1, 0, 2])
    np.testing.assert_array_equal(batch.loss_mask, expected)
    denominators = {
        "token": [6, 6, 1, 6],
        "sequence": [12, 4, 1, 8],
        "sequence_sum": [4, 4, 1, 4],
        "constant": [16, 16, 1, 16],  # four rows of at most four tokens
        "micro_batch": [8, 8, 1, 4],
    }[aggregation]
    np.testing.assert_allclose(batch.weights, expected / np.array(denominators)[:, None])


@pytest.mark.parametrize("aggregation", losses.AGGREGATIONS)
@pytest.mark.parametrize(
    "lengths", [LENGTHS, np.array([3, 0, 4, 2]), np.array([0, 0, 0, 0])], ids=str
)
@pytest.mark.parametrize("all_truncated", [False, True])
def test_loss_is_finite_whatever_is_empty(aggregation, lengths, all_truncated):
    finished = FINISHED & (not all_truncated)
    batch = batch_of(lengths, finished, mask_truncated=True, aggregation=aggregation)
    config = loss_config("grpo", aggregation=aggregation, kl_coef=0.1, tis_cap=2.0)
    logprobs = jnp.full(batch.weights.shape, -2.0)
    loss, gradient = jax.value_and_grad(loss_of)(logprobs, batch, config)
    assert np.isfinite(loss)
    assert np.isfinite(gradient).all()
    assert np.isfinite(batch.weights).all()
    assert bool(gradient.any()) == bool(batch.loss_mask.any())


def loss_of(logprobs, batch, config):
    """Returns the loss of some rows with a reference policy that is half a nat away."""
    return row_loss(
        logprobs,
        old_logprobs=None,
        advantages=batch.advantages,
        mask=batch.loss_mask,
        weights=batch.weights,
        config=config,
        ref_logprobs=logprobs - 0.5,
        rollout_logprobs=batch.rollout_logprobs,
    )[0]


def test_the_constant_denominator_counts_the_tokens_that_may_be_sampled():
    # The longest completion has three tokens; twenty may be sampled.
    lengths, completions = np.array([3, 1]), np.ones((2, 20), int)
    batch = row_batch(
        *(PROMPTS[:2], completions, lengths, lengths > 0, ADVANTAGES[:2], np.zeros((2, 20))),
        mask_truncated=False,
        aggregation="constant",
        pad_id=PAD,
    )
    assert batch.weights.shape == (2, 3)
    np.testing.assert_allclose(batch.weights[batch.loss_mask > 0], 1 / 40)


def test_empty_prompt():
    arguments = COMPLETIONS, LENGTHS, FINISHED, ADVANTAGES, np.zeros((4, 4))
    options = {"mask_truncated": False, "aggregation": "token", "pad_id": PAD}
    refused("prompt 2 is empty", row_batch, [[1], [1], [], [1]], *arguments, **options)


def test_shapes_are_checked():
    options = {"mask_truncated": False, "aggregation": "token", "pad_id": PAD}
    with pytest.raises(AssertionError):
        row_batch(PROMPTS, COMPLETIONS, LENGTHS, FINISHED, ADVANTAGES, np.zeros((4, 3)), **options)
