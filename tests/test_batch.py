"""Batches of completions: masks, weights and micro-batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.buckets import bucket
from qerl_jax.errors import UserError
from qerl_jax.rl import losses
from qerl_jax.rl.batch import longest_first, make_batch, micro_batches

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
    return make_batch(
        PROMPTS, COMPLETIONS, lengths, finished, ADVANTAGES, logprobs, **defaults | options
    )


def lengths_mask(lengths):
    return (np.arange(4) < np.array(lengths)[:, None]).astype(np.float32)


def test_tokens_are_contiguous_and_padded():
    batch = batch_of()
    expected = [
        [5, EOS, 7, 11, 12, EOS, PAD, PAD],
        [5, EOS, 7, EOS, PAD, PAD, PAD, PAD],
        [8, 13, EOS, 14, 15, PAD, PAD, PAD],
        [8, 16, 17, PAD, PAD, PAD, PAD, PAD],
    ]
    np.testing.assert_array_equal(batch.tokens, expected)
    np.testing.assert_array_equal(batch.prompt_lengths, [3, 3, 1, 1])
    np.testing.assert_array_equal(batch.lengths, [6, 4, 5, 3])
    assert batch.tokens.dtype == batch.lengths.dtype == np.int32
    floats = (batch.loss_mask, batch.weights, batch.advantages, batch.rollout_logprobs)
    assert all(x.dtype == np.float32 for x in floats)
    np.testing.assert_array_equal(batch.rollout_logprobs, -lengths_mask(LENGTHS))


@pytest.mark.parametrize(("longest", "width"), [(6, 8), (8, 8), (9, 16), (33, 48), (65, 96)])
def test_width_is_the_bucket_of_the_longest_row(longest, width):
    rest = np.zeros((2, 4)), np.array([1, 4]), np.ones(2, bool), np.zeros(2), np.zeros((2, 4))
    options = {"mask_truncated": False, "aggregation": "token", "pad_id": PAD}
    batch = make_batch([[5], [5] * (longest - 4)], *rest, **options)
    assert batch.lengths.max() == longest
    assert batch.tokens.shape == (2, width)
    limited = make_batch([[5], [5] * (longest - 4)], *rest, max_prompt=longest - 4, **options)
    assert limited.tokens.shape == (2, -(-longest // 8) * 8)


def test_buckets_are_few_and_close():
    lengths = np.arange(1, 4097)
    widths = np.array([bucket(int(length)) for length in lengths])
    assert (widths >= lengths).all()
    assert (widths % 8 == 0).all()
    assert (widths <= np.maximum(lengths + 7, 1.5 * lengths)).all()
    assert len(set(widths.tolist())) == 4 + 2 * 7
    assert all(bucket(width) == width for width in set(widths.tolist()))


def test_mask_follows_lengths_not_ids():
    # The padding is an EOS, prompts contain it, and a completion continues after it: none of this
    # matters.
    np.testing.assert_array_equal(batch_of().loss_mask, lengths_mask([3, 1, 4, 2]))


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
    config = losses.LossConfig(aggregation, kl_coef=0.1, tis_cap=2.0)
    loss, gradient = jax.value_and_grad(loss_of)(jnp.full((4, 4), -2.0), batch, config)
    assert np.isfinite(loss)
    assert np.isfinite(gradient).all()
    assert np.isfinite(batch.weights).all()
    assert bool(gradient.any()) == bool(batch.loss_mask.any())


def loss_of(logprobs, batch, config):
    """Returns the loss of some rows with a reference policy that is half a nat away."""
    return losses.policy_loss(
        logprobs,
        old_logprobs=batch.old_logprobs,
        advantages=batch.advantages,
        mask=batch.loss_mask,
        weights=batch.weights,
        config=config,
        ref_logprobs=logprobs - 0.5,
        rollout_logprobs=batch.rollout_logprobs,
    )[0]


def test_the_constant_denominator_counts_the_tokens_that_may_be_sampled():
    # The longest completion has three tokens in eight columns; twenty may be sampled.
    lengths, completions = np.array([3, 1]), np.ones((2, 20), int)
    batch = make_batch(
        *(PROMPTS[:2], completions, lengths, lengths > 0, ADVANTAGES[:2], np.zeros((2, 20))),
        mask_truncated=False,
        aggregation="constant",
        pad_id=PAD,
    )
    assert batch.weights.shape == (2, 8)
    np.testing.assert_allclose(batch.weights[batch.loss_mask > 0], 1 / 40)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("aggregation", [a for a in losses.AGGREGATIONS if a != "micro_batch"])
def test_micro_batches_have_the_loss_of_the_batch(rows, aggregation):
    config = losses.LossConfig(aggregation, kl_coef=0.1, tis_cap=2.0)
    old = -np.arange(16, dtype=np.float32).reshape(4, 4) / 8
    batch = batch_of(aggregation=aggregation).replace(old_logprobs=jnp.asarray(old))
    micro = micro_batches(batch, rows)
    number = -(-4 // rows)
    assert len(micro) == number
    assert all(len(leaf) == rows for leaf in jax.tree.leaves(micro))
    for part in micro:
        assert part.ref_logprobs is None
        assert part.lengths.min() >= 1
        assert part.prompt_lengths.min() >= 1
    total = sum(float(loss_of(jnp.full((rows, 4), -1.2), part, config)) for part in micro)
    whole = float(loss_of(jnp.full((4, 4), -1.2), batch, config))
    assert total == pytest.approx(whole, rel=1e-5)
    np.testing.assert_array_equal(np.concatenate([part.tokens for part in micro])[:4], batch.tokens)


def test_micro_batches_are_as_wide_as_their_rows():
    rng = np.random.default_rng(0)
    lengths = np.array([200, 3, 90, 60, 30, 1, 128, 0])
    prompts = [[1] * (5 + row) for row in range(8)]
    completions = rng.integers(0, 9, (8, 240))
    batch = make_batch(
        prompts,
        completions,
        lengths,
        np.ones(8, bool),
        np.arange(8.0),
        rng.standard_normal((8, 240)),
        mask_truncated=False,
        aggregation="sequence",
        pad_id=PAD,
    )
    assert batch.tokens.shape == (8, 256)
    assert batch.weights.shape == (8, 240)
    ordered = longest_first(batch)
    assert ordered.lengths.tolist() == [205, 139, 97, 68, 39, 12, 11, 9]
    assert ordered.advantages.tolist() == [0, 6, 2, 3, 4, 7, 5, 1]
    micro = micro_batches(ordered, 3)
    assert [part.tokens.shape for part in micro] == [(3, 256), (3, 128), (3, 64)]
    assert [part.weights.shape for part in micro] == [(3, 240), (3, 128), (3, 64)]
    assert sum(part.weights.sum() for part in micro) == pytest.approx(batch.weights.sum())
    for part in micro:
        for tokens, length, prompt, advantage in zip(
            part.tokens, part.lengths, part.prompt_lengths, part.advantages, strict=True
        ):
            if length == prompt == 1:
                continue
            row = int(advantage)
            expected = [*prompts[row], *completions[row, : lengths[row]]]
            assert tokens[:length].tolist() == expected
            assert (tokens[length:] == PAD).all()


def test_means_of_micro_batches_depend_on_the_micro_batches():
    config = losses.LossConfig("micro_batch")
    logprobs = jnp.full((4, 4), -2.0)
    old = -np.arange(16, dtype=np.float32).reshape(4, 4) / 8

    def loss(rows):
        batch = batch_of(aggregation="micro_batch", micro_batch_rows=rows)
        parts = micro_batches(batch.replace(old_logprobs=old), rows)
        return [float(loss_of(logprobs[:rows], part, config)) for part in parts]

    def token_mean(start, stop):
        rows = slice(start, stop)
        mask = lengths_mask(LENGTHS)[rows]
        ratio = np.exp(-2.0 - old[rows])
        advantages = ADVANTAGES[rows, None]
        terms = -np.minimum(ratio * advantages, ratio.clip(0.8, 1.28) * advantages)
        return (mask * terms).sum() / mask.sum()

    np.testing.assert_allclose(loss(4), [token_mean(0, 4)], rtol=1e-5)
    halves = [token_mean(0, 2) / 2, token_mean(2, 4) / 2]
    np.testing.assert_allclose(loss(2), halves, rtol=1e-5)
    assert abs(sum(halves) - token_mean(0, 4)) > 1e-2


def test_empty_prompt():
    arguments = COMPLETIONS, LENGTHS, FINISHED, ADVANTAGES, np.zeros((4, 4))
    options = {"mask_truncated": False, "aggregation": "token", "pad_id": PAD}
    with pytest.raises(UserError, match="prompt 2 is empty"):
        make_batch([[1], [1], [], [1]], *arguments, **options)


def test_shapes_are_checked():
    options = {"mask_truncated": False, "aggregation": "token", "pad_id": PAD}
    with pytest.raises(AssertionError):
        make_batch(PROMPTS, COMPLETIONS, LENGTHS, FINISHED, ADVANTAGES, np.zeros((4, 3)), **options)
