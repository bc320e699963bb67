"""One optimizer step: micro-batches, gradients that are not finite, traces, learning rates."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_model import random_lora, random_tokens, tiny_policy

from qerl_jax.errors import UserError
from qerl_jax.policy import aqn
from qerl_jax.policy.trainable import Trainable
from qerl_jax.rl.batch import make_batch, micro_batches
from qerl_jax.rl.logprobs import completion_kl, completion_logprobs
from qerl_jax.rl.losses import loss_config
from qerl_jax.rl.train_step import batch_logprobs, init_state, make_optimizer, mean_kl, train_step

ROWS, WIDTH = 8, 6
LENGTHS = np.array([6, 3, 1, 5, 6, 2, 4, 6])
SGD = optax.sgd(1.0)
ADAMW = {
    "learning_rate": 1e-3,
    "schedule": "constant",
    "final_fraction": 0.1,
    "warmup_updates": 0,
    "total_updates": 10,
    "b1": 0.9,
    "b2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
}


@functools.cache
def policy():
    config, params = tiny_policy("llama", quantized=True, num_layers=1)
    return config, params, random_lora(config)


def batch_of(loss="dapo", *, seed=0, advantages=None):
    """Makes random completions; old and reference log-probabilities are near the current ones."""
    rng = np.random.default_rng(seed)
    if advantages is None:
        advantages = rng.standard_normal(ROWS)
    batch = make_batch(
        [random_tokens(1 + row % 4, seed=row).tolist() for row in range(ROWS)],
        random_tokens(ROWS, WIDTH, seed=seed),
        LENGTHS,
        LENGTHS < WIDTH,
        advantages,
        rng.uniform(-4, -3, (ROWS, WIDTH)),
        mask_truncated=False,
        aggregation=loss_config(loss).aggregation,
        pad_id=0,
    )
    config, params, lora = policy()
    (ours,) = batch_logprobs(
        params, lora, micro_batches(batch, ROWS), config=config, temperature=1.0
    )
    nearby = [np.asarray(ours + 0.2 * rng.standard_normal(ours.shape), np.float32) for _ in "ab"]
    return batch.replace(old_logprobs=nearby[0], ref_logprobs=nearby[1])


def step(batch, *, rows=ROWS, state=None, optimizer=SGD, loss="dapo", remat=False):
    """Runs a train_step of the tiny policy; returns the new state and the metrics."""
    config, params, lora = policy()
    if state is None:
        state = init_state(Trainable(lora, {}), optimizer)
    return train_step(
        jax.tree.map(jnp.array, state),  # a copy, because the step donates the state
        params,
        micro_batches(batch, rows),
        config=config,
        loss=loss_config(loss, kl_coef=0.05, tis_cap=2.0),
        optimizer=optimizer,
        temperature=1.0,
        remat=remat,
    )


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


# With micro-batches of 3 rows the last one is filled up.
@pytest.mark.parametrize(
    ("loss", "splits"), [pytest.param("dapo", (2, 4), marks=pytest.mark.slow), ("grpo", (3,))]
)
def test_micro_batches_do_not_change_the_update(loss, splits):
    batch = batch_of(loss)
    state, metrics = step(batch, loss=loss)
    lora = policy()[-1]
    moved = jax.tree.map(
        lambda new, old: float(jnp.abs(new - old).max()), state.trainable.lora, lora
    )
    assert min(jax.tree.leaves(moved)) > 1e-4
    for rows in splits:
        other, other_metrics = step(batch, rows=rows, loss=loss)
        for a, b in zip(
            jax.tree.leaves(state.trainable.lora),
            jax.tree.leaves(other.trainable.lora),
            strict=True,
        ):
            np.testing.assert_allclose(a, b, atol=1e-6)
        assert metrics.keys() == other_metrics.keys()
        for name, value in metrics.items():
            np.testing.assert_allclose(other_metrics[name], value, 1e-4, 1e-6, err_msg=name)


def test_remat_does_not_change_the_update():
    batch = batch_of()
    plain, remat = (step(batch, remat=remat)[0] for remat in (False, True))
    for a, b in zip(
        jax.tree.leaves(plain.trainable), jax.tree.leaves(remat.trainable), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_metrics():
    batch = batch_of()
    _, metrics = step(batch)
    _, params, lora = policy()
    assert float(metrics["grad_norm"]) > 0
    assert not metrics["update_skipped"]
    mask = batch.loss_mask > 0
    ours, entropies = (np.asarray(x) for x in logprobs_of(params, lora, batch))
    ratio = np.exp(ours - batch.old_logprobs)[mask]
    difference = np.abs(batch.old_logprobs - batch.rollout_logprobs)[mask]
    expected = {
        "train_entropy": entropies[mask].mean(),
        "ratio_mean": ratio.mean(),
        "ratio_max": ratio.max(),
        "logprob_diff_mean": difference.mean(),
        "logprob_diff_max": difference.max(),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-4, err_msg=name)


def logprobs_of(params, lora, batch, function=completion_logprobs):
    return function(
        params,
        lora,
        batch.tokens,
        batch.prompt_lengths,
        batch.lengths,
        width=WIDTH,
        config=policy()[0],
        temperature=1.0,
    )


def test_gradients_that_are_not_finite_are_skipped_and_counted():
    optimizer = make_optimizer(**ADAMW)
    good, bad = batch_of(), batch_of(advantages=np.array([1.0, np.inf, 0, 0, 0, 0, 0, 0]))
    before, metrics = step(good, optimizer=optimizer)
    assert not metrics["update_skipped"]
    state = before
    for skipped in (1, 2):
        state, metrics = step(bad, state=state, optimizer=optimizer)
        assert metrics["update_skipped"]
        assert not np.isfinite(metrics["grad_norm"])
        assert_same((state.trainable, state.opt_state), (before.trainable, before.opt_state))
        assert int(state.skipped_in_a_row) == skipped
    after, metrics = step(good, state=state, optimizer=optimizer)
    assert not metrics["update_skipped"]
    assert int(after.skipped_in_a_row) == 0
    # The result is the same as without the bad batches.
    expected, _ = step(good, state=before, optimizer=optimizer)
    assert_same((after.trainable, after.opt_state), (expected.trainable, expected.opt_state))


def test_steps_of_equal_shapes_compile_once():
    traces = []

    def update(grad, state, params=None):
        traces.append(1)
        return SGD.update(grad, state, params)

    optimizer = optax.GradientTransformation(SGD.init, update)
    state, _ = step(batch_of(), rows=4, optimizer=optimizer)
    step(batch_of(seed=1), rows=4, optimizer=optimizer, state=state)
    assert len(traces) == 1


def test_the_state_is_donated():
    config, params, lora = policy()
    state = jax.tree.map(jnp.array, init_state(Trainable(lora, {}), SGD))
    train_step(
        state,
        params,
        micro_batches(batch_of(), ROWS),
        config=config,
        loss=loss_config("dapo", kl_coef=0.05, tis_cap=2.0),
        optimizer=SGD,
        temperature=1.0,
        remat=False,
    )
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.trainable.lora))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((params, lora)))


def test_batch_logprobs_and_mean_kl():
    config, params, lora = policy()
    batch = batch_of()
    shared = {"config": config, "temperature": 1.0}
    scored = np.concatenate(batch_logprobs(params, lora, micro_batches(batch, 3), **shared))
    assert scored.shape == (9, WIDTH)
    mask = batch.loss_mask > 0
    expected = np.asarray(logprobs_of(params, lora, batch)[0])
    np.testing.assert_allclose(scored[:8][mask], expected[mask], atol=1e-5)
    noisy = aqn.perturb_norms(jax.random.key(0), params, 5e-2)
    kl = functools.partial(completion_kl, noisy)
    expected = np.asarray(logprobs_of(params, lora, batch, kl))[mask].mean()
    assert expected > 1e-3
    np.testing.assert_allclose(mean_kl(noisy, params, lora, batch, **shared), expected, rtol=1e-4)
    assert mean_kl(params, params, lora, batch, **shared) == 0


def learning_rates(updates, **options):
    """Returns the sizes of AdamW's first updates: without moments and eps, the learning rates."""
    options = {"b1": 0.0, "b2": 0.0, "eps": 0.0, "max_grad_norm": 1e9, **options}
    optimizer = make_optimizer(**ADAMW | options)
    params = jnp.zeros(())
    state, sizes = optimizer.init(params), []
    for _ in range(updates):
        update, state = optimizer.update(jnp.float32(3.0), state, params)
        sizes.append(-float(update))
    return np.array(sizes)


def test_warm_up():
    rates = learning_rates(6, warmup_updates=3)
    np.testing.assert_allclose(rates, 1e-3 * np.array([0.25, 0.5, 0.75, 1, 1, 1]), rtol=1e-5)


@pytest.mark.parametrize("warmup", [0, 2])
@pytest.mark.parametrize("final", [0.1, 0.0])
@pytest.mark.parametrize(
    ("schedule", "decay"),
    [
        ("constant", lambda u, final: np.ones_like(u)),
        ("linear", lambda u, final: 1 - (1 - final) * u),
        ("cosine", lambda u, final: final + (1 - final) * (1 + np.cos(np.pi * u)) / 2),
    ],
)
def test_decay_to_a_fraction_at_the_end(schedule, decay, final, warmup):
    total = 8 + warmup
    rates = learning_rates(
        total + 3,
        schedule=schedule,
        final_fraction=final,
        warmup_updates=warmup,
        total_updates=total,
    )
    progress = np.minimum(np.arange(8 + 3) / 8, 1.0)
    np.testing.assert_allclose(rates[warmup:], 1e-3 * decay(progress, final), rtol=1e-4, atol=1e-9)
    assert (np.diff(rates[: warmup + 1]) > 0).all()


def test_unknown_schedule():
    with pytest.raises(UserError, match=r"exponential.*constant, cosine, linear"):
        make_optimizer(**ADAMW | {"schedule": "exponential"})


def test_clip_and_weight_decay():
    options = {"b1": 0.0, "b2": 0.0, "eps": 1.0, "weight_decay": 0.1, "max_grad_norm": 1.0}
    optimizer = make_optimizer(**ADAMW | options)
    matrix, vector = jnp.full((1, 1), 2.0), jnp.full(1, 2.0)  # norms and biases do not decay
    params = {"a": matrix, "b": vector}
    state = optimizer.init(params)
    for gradient, clipped in (((3.0, 4.0), (0.6, 0.8)), ((0.3, 0.4), (0.3, 0.4))):
        grad = {"a": jnp.full_like(matrix, gradient[0]), "b": jnp.full_like(vector, gradient[1])}
        update, _ = optimizer.update(grad, state, params)
        for name, value, decay in zip("ab", clipped, (0.2, 0.0), strict=True):
            expected = -1e-3 * (value / (value + 1.0) + decay)
            assert update[name].item() == pytest.approx(expected, rel=1e-4)
