"""One optimizer step: buffers, gradients that are not finite, programs, learning rates."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import trees
from refusal import refused
from row_batch import row_batch
from row_loss import loss_config
from tiny_model import random_lora, random_tokens, tiny_policy

from qerl_jax.compile.aot import compile_operations
from qerl_jax.compile.operation import MissingProgramError, Programs, commit
from qerl_jax.policy.policy import Policy
from qerl_jax.policy.trainable import Trainable
from qerl_jax.rl.logprobs import packed_logprobs
from qerl_jax.rl.packing import pack
from qerl_jax.rl.programs import functions, operations
from qerl_jax.rl.train_step import OptimizerConfig, UpdateConfig, init_state, make_optimizer

ROWS, WIDTH = 8, 6
LENGTHS = np.array([6, 3, 1, 5, 6, 2, 4, 6])
ONE = np.float32(1)  # the temperature
SGD = optax.sgd(1.0)
ADAMW = OptimizerConfig(
    learning_rate=1e-3,
    schedule="constant",
    final_fraction=0.1,
    warmup_updates=0,
    total_updates=10,
    b1=0.9,
    b2=0.95,
    eps=1e-8,
    weight_decay=0.0,
    max_grad_norm=1.0,
)


def adamw(**changes):
    return make_optimizer(dataclasses.replace(ADAMW, **changes))


@functools.cache
def policy():
    config, params = tiny_policy("llama", quantized=True, num_layers=1)
    return config, params, random_lora(config)


def buffers_of(loss="dapo", *, seed=0, advantages=None, buffer_tokens=48):
    """Packed random completions; old and reference log-probabilities are near the current ones."""
    rng = np.random.default_rng(seed)
    if advantages is None:
        advantages = rng.standard_normal(ROWS)
    batch = row_batch(
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
    found = []
    for buffer in pack(batch, np.ones(ROWS, bool), buffer_tokens=buffer_tokens):
        ours = np.asarray(current_logprobs(buffer))
        # The noise of a token follows from the token, wherever it lies.
        shift = [np.sin(buffer.rollout_logprobs * 1e4 * k).astype(np.float32) for k in (1, 2)]
        found.append(
            buffer.replace(old_logprobs=ours + 0.2 * shift[0], ref_logprobs=ours + 0.2 * shift[1])
        )
    return found


def current_logprobs(buffer):
    _, params, lora = policy()
    return programs_of("dapo", SGD)["buffer_logprobs"](params, lora, buffer, ONE)


@functools.cache
def programs_of(loss, optimizer):
    config = UpdateConfig(policy()[0], loss_config(loss, kl_coef=0.05, tis_cap=2.0))
    return Programs(functions(config, optimizer))


def add(programs, totals, trainable, buffer, *, first):
    """Adds the gradient of a buffer; returns the totals and the old log-probabilities."""
    arguments = totals, trainable, policy()[1], None, buffer, np.bool_(first), ONE
    return programs["add_gradient"](*arguments)


def step(buffers, *, state=None, optimizer=SGD, loss="dapo", first=False):
    """Takes a step of the tiny policy; returns the new state and the metrics."""
    lora = policy()[-1]
    programs = programs_of(loss, optimizer)
    if state is None:
        state = init_state(Trainable(lora, {}), optimizer)
    state = jax.tree.map(jnp.array, state)  # a copy, because the step donates the state
    totals = programs["zero_totals"](state.trainable)
    for buffer in buffers:
        totals, _ = add(programs, totals, state.trainable, buffer, first=first)
    return programs["apply_gradient"](state, totals)


def test_metrics():
    (buffer,) = buffers_of()
    _, metrics = step([buffer])
    assert float(metrics["grad_norm"]) > 0
    assert not metrics["update_skipped"]
    config, params, lora = policy()
    ours, entropies = (
        np.asarray(x)[buffer.mask > 0]
        for x in packed_logprobs(params, lora, buffer, model_config=config, temperature=1.0)[:2]
    )
    old, recorded = (x[buffer.mask > 0] for x in (buffer.old_logprobs, buffer.rollout_logprobs))
    expected = {
        "train_entropy": entropies.mean(),
        "ratio_mean": np.exp(ours - old).mean(),
        "ratio_max": np.exp(ours - old).max(),
        "logprob_diff_mean": np.abs(old - recorded).mean(),
        "logprob_diff_max": np.abs(old - recorded).max(),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-4, err_msg=name)


@pytest.mark.parametrize("first", [True, False])
def test_the_first_update_is_on_the_old_policy(first):
    (buffer,) = buffers_of()
    programs = programs_of("dapo", SGD)
    trainable = Trainable(policy()[-1], {})
    totals = programs["zero_totals"](trainable)
    totals, old = add(programs, totals, trainable, buffer, first=first)
    if first:
        inside = buffer.mask > 0
        np.testing.assert_allclose(old[inside], current_logprobs(buffer)[inside], atol=1e-5)
        assert totals.metrics["ratio_max"] == 1.0
        assert totals.metrics["ratio_mean"][0] == buffer.mask.sum()
    else:
        np.testing.assert_array_equal(old, buffer.old_logprobs)
        assert totals.metrics["ratio_max"] > 1.05


def test_without_buffers_the_optimizer_takes_a_step_with_a_zero_gradient():
    optimizer = adamw(weight_decay=0.1)
    before, _ = step(buffers_of(), optimizer=optimizer)
    state, metrics = step([], state=before, optimizer=optimizer)
    assert metrics.pop("loss") == metrics.pop("grad_norm") == metrics.pop("update_skipped") == 0
    assert {"train_entropy", "ratio_mean", "ratio_max", "logprob_diff_max"} < metrics.keys()
    assert all(np.isnan(value) for value in metrics.values())  # Nothing was measured.
    count = functools.partial(optax.tree.get_all_with_path, key="count")
    assert [int(x) for _, x in count(state.opt_state)] == [2] * len(count(state.opt_state))
    # The moments decay, and the weights move by them and by the decay of the weights.
    (_, old_mu), (_, new_mu) = (
        optax.tree.get_all_with_path(s.opt_state, key="mu")[0] for s in (before, state)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(0.9 * a, b, rtol=1e-5), old_mu, new_mu)
    moved = jax.tree.map(
        lambda a, b: float(jnp.abs(a - b).max()), before.trainable, state.trainable
    )
    assert min(jax.tree.leaves(moved)) > 1e-5


def test_gradients_that_are_not_finite_are_skipped_and_counted():
    optimizer = adamw()
    good, bad = buffers_of(), buffers_of(advantages=np.array([1.0, np.inf, 0, 0, 0, 0, 0, 0]))
    before, metrics = step(good, optimizer=optimizer)
    assert not metrics["update_skipped"]
    state = before
    for skipped in (1, 2):
        state, metrics = step(bad, state=state, optimizer=optimizer)
        assert metrics["update_skipped"]
        assert not np.isfinite(metrics["grad_norm"])
        trees.assert_equal((state.trainable, state.opt_state), (before.trainable, before.opt_state))
        assert int(state.skipped_in_a_row) == skipped
    after, metrics = step(good, state=state, optimizer=optimizer)
    assert not metrics["update_skipped"]
    assert int(after.skipped_in_a_row) == 0
    # The result is the same as without the bad batches.
    expected, _ = step(good, state=before, optimizer=optimizer)
    trees.assert_equal((after.trainable, after.opt_state), (expected.trainable, expected.opt_state))


def test_the_state_is_donated():
    _, _, lora = policy()
    programs = programs_of("dapo", SGD)
    state = jax.tree.map(jnp.array, init_state(Trainable(lora, {}), SGD))
    programs["apply_gradient"](state, programs["zero_totals"](state.trainable))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.trainable.lora))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(lora))


def test_the_operations_are_those_of_a_run():
    config, params, lora = policy()
    state = init_state(Trainable(lora, {}), adamw())
    update = UpdateConfig(config, loss_config("dapo", kl_coef=0.05, tis_cap=2.0))

    def operations_of(optimizer):
        return operations(
            state,
            params,
            passes={"buffer_logprobs": Policy(params, None)},
            noise=None,
            buffer_tokens=48,
            update_config=update,
            optimizer=optimizer,
        )

    table, other = (
        operations_of(dataclasses.replace(ADAMW, learning_rate=rate)) for rate in (1e-3, 2e-3)
    )
    assert {name for name in table if table[name].key != other[name].key} == {"apply_gradient"}
    assert set(table) == {"zero_totals", "add_gradient", "apply_gradient", "buffer_logprobs"}
    assert len({operation.key for operation in table.values()}) == 4
    programs = Programs(table, compile_operations(commit((params, lora)), table.values()))
    (buffer,) = buffers_of()
    state = jax.device_put(jax.tree.map(jnp.array, state), jax.devices()[0])
    totals = programs["zero_totals"](state.trainable)
    totals, _ = add(programs, totals, state.trainable, buffer, first=False)
    state, metrics = programs["apply_gradient"](state, totals)
    expected, expected_metrics = step([buffer], optimizer=adamw())
    trees.assert_equal(state.trainable, expected.trainable)
    trees.assert_equal(metrics, expected_metrics)
    with pytest.raises(MissingProgramError, match="operation 'buffer_kl'"):
        programs["buffer_kl"](params, params, lora, buffer, ONE)


def learning_rates(updates, **options):
    """Returns the sizes of AdamW's first updates: without moments and eps, the learning rates."""
    options = {"b1": 0.0, "b2": 0.0, "eps": 0.0, "max_grad_norm": 1e9, **options}
    optimizer = adamw(**options)
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
    refused(r"exponential.*constant, cosine, linear", adamw, schedule="exponential")


def test_clip_and_weight_decay():
    options = {"b1": 0.0, "b2": 0.0, "eps": 1.0, "weight_decay": 0.1, "max_grad_norm": 1.0}
    optimizer = adamw(**options)
    matrix, vector = jnp.full((1, 1), 2.0), jnp.full(1, 2.0)  # norms and biases do not decay
    params = {"a": matrix, "b": vector}
    state = optimizer.init(params)
    for gradient, clipped in (((3.0, 4.0), (0.6, 0.8)), ((0.3, 0.4), (0.3, 0.4))):
        grad = {"a": jnp.full_like(matrix, gradient[0]), "b": jnp.full_like(vector, gradient[1])}
        update, _ = optimizer.update(grad, state, params)
        for name, value, decay in zip("ab", clipped, (0.2, 0.0), strict=True):
            expected = -1e-3 * (value / (value + 1.0) + decay)
            assert update[name].item() == pytest.approx(expected, rel=1e-4)
