"""Packed buffers: their layout, and the loss and gradients of the rows that they hold."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from row_batch import row_batch
from row_loss import loss_config, row_loss
from tiny_model import random_lora, random_tokens, tiny_policy

from qerl_jax.errors import UserError
from qerl_jax.policy import transformer
from qerl_jax.policy.trainable import Trainable
from qerl_jax.policy.transformer import PRODUCTS
from qerl_jax.rl import losses
from qerl_jax.rl.logprobs import completion_logprobs
from qerl_jax.rl.packing import layout, pack, packing_metrics, rows_that_teach
from qerl_jax.rl.train_step import UpdateConfig, add_gradient, zero_totals

PROMPTS = [[5, 6, 7, 8], [5, 6, 7, 8], [9], [9], [3, 4]]
COMPLETIONS = np.array(
    [[11, 12, 2, 0], [13, 14, 15, 16], [17, 2, 0, 0], [2, 0, 0, 0], [0, 0, 0, 0]], np.int32
)
LENGTHS = np.array([3, 4, 2, 1, 0])
ADVANTAGES = np.array([1.0, -1.0, 0.5, -0.5, 2.0])


def batch_of(**options):
    recorded = np.where(np.arange(4) < LENGTHS[:, None], -1.0, np.nan)
    options = {"mask_truncated": False, "aggregation": "token", "pad_id": 0} | options
    return row_batch(PROMPTS, COMPLETIONS, LENGTHS, LENGTHS < 4, ADVANTAGES, recorded, **options)


def test_a_buffer_holds_a_prompt_once():
    (buffer,) = pack(batch_of(), np.ones(5, bool), buffer_tokens=16)
    #                                       5  6  7 | 8 13 14 15 |  8 11 12 |  9 17 | 9 | padding
    np.testing.assert_array_equal(
        buffer.tokens, [5, 6, 7, 8, 13, 14, 15, 8, 11, 12, 9, 17, 9, 0, 0, 0]
    )
    np.testing.assert_array_equal(
        buffer.positions, [0, 1, 2, 3, 4, 5, 6, 3, 4, 5, 0, 1, 0, 0, 0, 0]
    )
    second = 1 << 12
    np.testing.assert_array_equal(
        buffer.segments.ids,
        [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, second | 1, second | 1, second | 2, -1, -1, -1],
    )
    np.testing.assert_array_equal(np.sort(buffer.order), np.arange(16))
    np.testing.assert_array_equal(buffer.order[:10], [3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    np.testing.assert_array_equal(buffer.targets[:10], [13, 14, 15, 16, 11, 12, 2, 17, 2, 2])
    np.testing.assert_array_equal(buffer.rows, [0] * 4 + [1] * 3 + [2] * 2 + [3] + [4] * 6)
    np.testing.assert_array_equal(buffer.mask, [1.0] * 10 + [0.0] * 6)
    np.testing.assert_array_equal(
        buffer.advantages, [-1] * 4 + [1] * 3 + [0.5] * 2 + [-0.5] + [0] * 6
    )
    np.testing.assert_allclose(buffer.weights, buffer.mask / 10)
    np.testing.assert_array_equal(buffer.rollout_logprobs, -buffer.mask)
    assert packing_metrics(batch_of(), [buffer]) == {
        "forwarded_fraction": 1.0,
        "packed_tokens": 13,
        "update_buffers": 1,
    }


def test_a_group_that_does_not_fit_is_divided_and_its_prompt_repeated():
    first, second = pack(batch_of(), np.ones(5, bool), buffer_tokens=9)
    np.testing.assert_array_equal(first.tokens, [5, 6, 7, 8, 13, 14, 15, 9, 17])
    np.testing.assert_array_equal(second.tokens, [5, 6, 7, 8, 11, 12, 9, 0, 0])
    assert packing_metrics(batch_of(), [first, second])["packed_tokens"] == 16


@pytest.mark.parametrize("seed", range(5))
def test_every_row_is_dealt_out_once_and_no_buffer_overflows(seed):
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(12), 8)
    prompts = np.repeat(rng.integers(0, 60, 12), 8)
    lengths = rng.integers(1, 90, 96)
    buffers = layout(prompts, lengths, groups, buffer_tokens=256)
    dealt = [row for buffer in buffers for part in buffer for row in part.rows]
    assert sorted(dealt) == list(range(96))
    sizes = [sum(p.prompt + lengths[p.rows].sum() for p in buffer) for buffer in buffers]
    assert max(sizes) <= 256
    for buffer in buffers:
        for part in buffer:
            assert len({groups[row] for row in part.rows}) == 1
            assert part.prompt == prompts[part.rows[0]]
    assert sum(sizes) > 0.9 * 256 * (len(buffers) - 1)
    assert layout(prompts, lengths, groups, buffer_tokens=256) == buffers


def test_rows_beyond_the_number_of_parts_go_into_the_next_buffer():
    count = (1 << 12) + 5
    ones = np.ones(count, np.int32)
    buffers = layout(ones, ones, 0 * ones, buffer_tokens=2 * count)
    assert [len(part.rows) for buffer in buffers for part in buffer] == [(1 << 12) - 1, 6]


def test_a_row_that_is_longer_than_a_buffer():
    with pytest.raises(UserError, match=r"takes 7 tokens, train.buffer_tokens is 6: raise it"):
        pack(batch_of(), np.ones(5, bool), buffer_tokens=6)
    assert pack(batch_of(), np.arange(5) > 1, buffer_tokens=6)


TERMS = {"kl_coef": 0.1}, {"entropy_coef": 0.1}, {"teacher_coef": 0.1}


@pytest.mark.parametrize("options", [{}, *TERMS], ids=str)
def test_rows_that_teach(options):
    loss = loss_config("grpo", **options)
    batch = batch_of(mask_truncated=True)  # The second row is truncated, the last one is empty.
    batch = batch.replace(advantages=np.array([1.0, 1.0, 0.0, -1.0, 1.0], np.float32))
    expected = [True, False, bool(options), True, False]
    np.testing.assert_array_equal(rows_that_teach(batch, loss), expected)
    # A policy that is NaN has equal rewards; the gradient must show it.
    broken = batch.replace(rollout_logprobs=np.full_like(batch.rollout_logprobs, np.nan))
    np.testing.assert_array_equal(rows_that_teach(broken, loss), [True, False, True, True, False])


def test_nothing_to_predict():
    assert pack(batch_of(), np.arange(5) == 4, buffer_tokens=8) == []
    assert pack(batch_of(), np.zeros(5, bool), buffer_tokens=8) == []
    empty = batch_of().replace(lengths=batch_of().prompt_lengths)
    assert packing_metrics(empty, [])["forwarded_fraction"] == 0.0


# --- The same loss and gradients as row by row --------------------------------------------------

# `test_losses` covers their values.
SLOW_LOSSES = "opsm", "gspo_token", "sapo", "bnpo", "dr_grpo", "cispo"
LOSSES = [
    *(
        pytest.param({"name": name}, marks=pytest.mark.slow if name in SLOW_LOSSES else ())
        for name in losses.LOSSES
    ),
    pytest.param({"name": "grpo", "kl_coef": 0.1, "kl_grad": "unbiased"}, marks=pytest.mark.slow),
    pytest.param({"name": "dapo", "tis_cap": 2.0, "dual_clip": 3.0}, marks=pytest.mark.slow),
    # `test_logprobs` has the gradient of the entropies.
    pytest.param({"name": "grpo", "entropy_coef": 0.3}, marks=pytest.mark.slow),
]
ROWS, WIDTH = 9, 24
TEMPERATURE = np.float32(0.9)


@functools.cache
def policy():
    config, params = tiny_policy("qwen3", quantized=True, num_layers=1)
    return config, params, random_lora(config)


def step_batch(options):
    """Three groups of three: one long row, one group with equal rewards, one without a prompt."""
    rng = np.random.default_rng(3)
    prompts = [random_tokens(size, seed=size).tolist() for size in (9, 9, 9, 1, 1, 1, 5, 5, 5)]
    lengths = np.array([24, 1, 7, 3, 0, 5, 4, 2, 6])
    return row_batch(
        prompts,
        random_tokens(ROWS, WIDTH, seed=4),
        lengths,
        lengths < WIDTH,
        np.array([1.0, -0.5, -0.5, 0.2, 0.3, -0.5, 0.0, 0.0, 0.0]),
        rng.uniform(-4, -3, (ROWS, WIDTH)),
        mask_truncated=False,
        aggregation=options.aggregation,
        micro_batch_rows=2,
        pad_id=0,
    )


def row_logprobs(lora, batch):
    """Log-probabilities and entropies [B, C] of whole rows, without packing."""
    config, params, _ = policy()
    return completion_logprobs(
        params,
        lora,
        batch.tokens,
        batch.prompt_lengths,
        batch.lengths,
        width=WIDTH,
        model_config=config,
        temperature=TEMPERATURE,
    )


def row_entropies(lora, batch):
    """Entropies [B, C] of whole rows by the dense formula, which jax differentiates itself."""
    config, params, _ = policy()
    logits = transformer.forward(params, lora, batch.tokens, batch.lengths, config=config)
    logprobs = jax.nn.log_softmax(logits / TEMPERATURE)
    entropies = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
    columns = jnp.asarray(batch.prompt_lengths)[:, None] - 1 + jnp.arange(WIDTH)
    return jnp.take_along_axis(entropies, jnp.minimum(columns, entropies.shape[1] - 1), axis=1)


@functools.cache
def nearby_logprobs():
    """Old and reference log-probabilities [B, C], near those of the policy."""
    logprobs, _ = jax.jit(row_logprobs)(policy()[-1], step_batch(loss_config("grpo")))
    noise = np.random.default_rng(5).standard_normal((2, *logprobs.shape))
    return [np.asarray(logprobs + 0.2 * part, np.float32) for part in noise]


@functools.partial(jax.jit, static_argnames="options")
def row_by_row(lora, batch, first, options):
    """Loss and gradient of whole rows."""
    old, ref = nearby_logprobs()

    def loss(lora):
        logprobs, _ = row_logprobs(lora, batch)
        return row_loss(
            logprobs,
            old_logprobs=jnp.where(first, jax.lax.stop_gradient(logprobs), old),
            advantages=batch.advantages,
            mask=batch.loss_mask,
            weights=batch.weights,
            config=options,
            ref_logprobs=ref if options.kl_coef else None,
            rollout_logprobs=batch.rollout_logprobs,
            entropies=row_entropies(lora, batch) if options.entropy_coef else None,
        )

    return jax.value_and_grad(loss, has_aux=True)(lora)


def packed(batch, values, *, options, buffer_tokens):
    """Buffers of a batch with values [B, C] of the predicted tokens, written by row and column."""
    flags = rows_that_teach(batch, options)
    places = batch.replace(
        rollout_logprobs=np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)
    )
    where = pack(places, flags, buffer_tokens=buffer_tokens)
    buffers = pack(batch, flags, buffer_tokens=buffer_tokens)
    return [
        buffer.replace(
            **{
                name: value.reshape(-1)[place.rollout_logprobs.astype(int)]
                for name, value in values.items()
            }
        )
        for buffer, place in zip(buffers, where, strict=True)
    ]


def accumulated(update, buffers, *, first):
    """The totals of buffers, and the old log-probabilities of each buffer."""
    _, params, lora = policy()
    trainable, old = Trainable(lora, {}), []
    totals = zero_totals(trainable, update_config=update)
    for buffer in buffers:
        arguments = totals, trainable, params, None, buffer, np.bool_(first), TEMPERATURE
        totals, logprobs = add_gradient(*arguments, update_config=update)
        old.append(logprobs)
    return totals, old


@pytest.mark.parametrize("options", LOSSES, ids=lambda row: "-".join(map(str, row.values())))
def test_loss_and_gradients_are_those_of_the_rows(options):
    options = loss_config(**options)
    config, _, lora = policy()
    batch, (old, ref) = step_batch(options), nearby_logprobs()
    values = {"old_logprobs": old} | ({"ref_logprobs": ref} if options.kl_coef else {})
    update = UpdateConfig(config, options)
    for first in (True, False):
        (loss, _), gradient = row_by_row(lora, batch, first, options)
        # The longest row takes more than half of a buffer, and one group is divided.
        buffers = packed(batch, values, options=options, buffer_tokens=40)
        assert len(buffers) > 1
        totals, logprobs = accumulated(update, buffers, first=first)
        if not first:
            for found, buffer in zip(logprobs, buffers, strict=True):
                np.testing.assert_array_equal(found, buffer.old_logprobs)
        assert float(totals.loss) == pytest.approx(float(loss), rel=1e-5, abs=1e-7)
        for ours, rows in zip(
            jax.tree.leaves(totals.gradient.lora), jax.tree.leaves(gradient), strict=True
        ):
            scale = float(jnp.abs(rows).max())
            assert scale > 0
            np.testing.assert_allclose(ours, rows, rtol=0, atol=1e-5 * scale)


def test_rows_that_teach_nothing_have_no_gradient():
    """The gradient of the rows that are left out is zero in the path that keeps them."""
    options = loss_config("dapo")
    batch = step_batch(options)
    left_out = ~rows_that_teach(batch, options)
    assert left_out.tolist() == [False] * 4 + [True] + [False] + [True] * 3
    only = batch.replace(weights=batch.weights * left_out[:, None])
    _, gradient = row_by_row(policy()[-1], only, True, options)
    assert not any(leaf.any() for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize(
    ("recompute", "buffer_tokens"),
    [(("gate_up_proj",), 40), pytest.param(PRODUCTS, 128, marks=pytest.mark.slow)],
)
def test_recomputation_and_buffer_size_do_not_change_the_gradient(recompute, buffer_tokens):
    options = loss_config("dapo")
    batch, found = step_batch(options), []
    for recomputed, tokens in (((), 128), (recompute, buffer_tokens)):
        update = UpdateConfig(policy()[0], options, recomputed)
        buffers = packed(batch, {}, options=options, buffer_tokens=tokens)
        found.append(accumulated(update, buffers, first=True)[0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), *found)
