"""The kernels that route the tokens of a decode step and add their experts up."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from warpgroup_kernel import BACKENDS, assert_close, normal, wide

from pallas_kernels.decode import layer, norms, self_test
from pallas_kernels.experts import combine, route
from pallas_kernels.experts.combine import ExpertSums
from pallas_kernels.experts.route import Router, Scores
from pallas_kernels.experts.table import table, with_units

EPS = 1e-6


def scores_of(logits, factor=1.0, width=64, *, shared=False):
    """What a norm leaves whose logits are these numbers times a factor, in two partial sums."""
    logits = jnp.asarray(logits, jnp.float32)
    m = len(logits)
    columns = -(-logits.shape[1] // 32) * 32
    logits = jnp.pad(logits, ((0, 0), (0, columns - logits.shape[1])), constant_values=9e9)
    square = jnp.full((2, m), (factor**-2 - EPS) / 2, jnp.float32)
    gate = normal(4, 1, width) / 8 if shared else None
    return Scores(normal(3, m, width), square, jnp.stack([logits / 2, logits / 2]), gate)


def routed(scores, router, interpret):
    run = jax.jit(functools.partial(route.route, router=router, interpret=interpret))
    assert route.supports(scores, router)
    return run(scores)


@pytest.mark.parametrize("interpret", BACKENDS)
@pytest.mark.parametrize(
    ("m", "width", "router"),
    [
        (1, 64, Router(128, 8, normalized=True, eps=EPS)),
        pytest.param(3, 64, Router(6, 2, normalized=False, eps=EPS), marks=pytest.mark.slow),
        (37, 96, Router(40, 3, normalized=True, eps=EPS)),
        pytest.param(8, 512, Router(256, 8, normalized=True, eps=EPS), marks=pytest.mark.slow),
        pytest.param(256, 288, Router(128, 8, normalized=False, eps=EPS), marks=pytest.mark.slow),
        # As many pairs of an expert as in tiles of 64 rows, which the kernel does not multiply.
        pytest.param(
            256, 64, Router(32, 4, normalized=True, eps=EPS, tile=8), marks=pytest.mark.slow
        ),
    ],
)
def test_routes_weights_and_table(m, width, router, interpret):
    """Against float64, with the scale of the norm's factor inside."""
    rng = np.random.default_rng(m)
    logits = rng.standard_normal((m, router.experts)).astype(np.float32)
    scores = scores_of(logits, 3.0, width, shared=m > 1)
    found = routed(scores, router, interpret)
    assert_close(found.states, 3.0 * wide(scores.scaled), 4e-3)
    logits = 3.0 * wide(logits)
    routes = np.argsort(-logits, axis=1, kind="stable")[:, : router.top_k]
    np.testing.assert_array_equal(found.routes, routes)
    powers = np.exp(logits)
    taken = np.take_along_axis(powers, routes, axis=1)
    total = (taken if router.normalized else powers).sum(axis=1, keepdims=True)
    assert_close(found.weights, (taken / total).reshape(-1), 1e-5)
    if m > 1:
        gate = 3.0 * wide(scores.scaled) @ wide(scores.shared_gate)[0]
        assert_close(found.opened, 1 / (1 + np.exp(-gate)), 1e-5)
    expected = table(jnp.asarray(routes, jnp.int32), experts=router.experts, rows=router.tile)
    assert (found.table.units is None) == (m < 256)
    if m == 256:
        count = {128: 3, 32: 5}[router.experts]
        expected = with_units(expected, count, experts=router.experts)
    for new, old in zip(jax.tree.leaves(found.table), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(new, old)


def test_what_the_kernel_routes():
    router = Router(128, 8, normalized=True, eps=EPS)
    scores = [scores_of(np.zeros((m, 128)), width=width) for m, width in ((256, 64), (257, 64))]
    assert route.supports(scores[0], router)
    assert not route.supports(scores[1], router)
    assert not route.supports(scores_of(np.zeros((1, 128)), width=40), router)
    assert not route.supports(scores[0], router._replace(top_k=17))


@pytest.mark.parametrize("interpret", BACKENDS)
def test_ties_and_numbers_that_are_none(interpret):
    """Of equal logits, as zeros of both signs, the lower id is taken, and no expert twice."""
    logits = np.zeros((4, 8), np.float32)
    logits[0, [1, 6]] = -0.0
    logits[1, [5, 2, 7]] = 1.0
    logits[2] = -np.inf
    logits[3] = np.nan
    router = Router(8, 3, normalized=True, eps=EPS)
    found = routed(scores_of(logits), router, interpret)
    np.testing.assert_array_equal(found.routes[:2], [[0, 1, 2], [2, 5, 7]])
    for row in np.asarray(found.routes):
        assert len(set(row)) == 3
        assert set(row) <= set(range(8))
    expected = route.reference(scores_of(np.abs(logits)), router)
    np.testing.assert_array_equal(found.routes[:2], expected.routes[:2])


@pytest.mark.parametrize("interpret", BACKENDS)
@pytest.mark.parametrize(
    ("m", "width", "shared"),
    [(5, 200, True), pytest.param(1, 128, False, marks=pytest.mark.slow)],
)
def test_a_norm_adds_experts_up_and_multiplies_by_a_router(m, width, shared, interpret):
    x, y, scale = normal(1, m, width), normal(2, m, width), jnp.linspace(0.5, 2, width)
    rows, a, weight = normal(3, 40, width), normal(4, 40, width), normal(5, 9, width)
    place = jax.random.permutation(jax.random.key(6), 40)[: 3 * m].reshape(m, 3)
    sums = ExpertSums(rows, place)
    added = wide(rows)[np.asarray(place)].sum(axis=1)
    if shared:
        sums = sums._replace(shared=y, opened=jnp.linspace(0, 1, m))
        added += np.linspace(0, 1, m)[:, None] * wide(y)
    assert_close(combine.total(sums), added)
    run = jax.jit(functools.partial(norms.add_rmsnorm, interpret=interpret))
    for factor in (a, None):
        norm = run(x, sums, scale, factor, router=weight)
        assert_close(norm.residual, wide(x) + added)
        assert norm.logit_partials.shape[2] == 32
        product = wide(norm.logit_partials).sum(axis=0)
        assert_close(product[:, :9], wide(norm.scaled) @ wide(weight).T, 1e-5)
        assert not product[:, 9:].any()
        if factor is not None:
            product = wide(norm.xa_partials).sum(axis=0)
            assert_close(product[:, :40], wide(norm.scaled) @ wide(a).T, 1e-5)
            assert not product[:, 40:].any()


@pytest.mark.parametrize("error", [0.0, 1.0, None])
def test_kernels_that_disagree_or_do_not_compile_are_not_used(error, monkeypatch, recwarn):
    def routing_error():
        if error is None:
            raise NotImplementedError("gone")
        return error

    monkeypatch.setattr(self_test, "routing_error", routing_error)
    layer._experts_agree.cache_clear()
    try:
        assert layer._experts_agree() == (error == 0.0)
    finally:
        layer._experts_agree.cache_clear()
    assert len(recwarn) == (error != 0.0)


@pytest.mark.slow
def test_the_kernels_test_themselves(monkeypatch):
    assert self_test.routing_error(interpret=True) < 1e-5
    monkeypatch.setattr(route, "_LOG2_E", route._LOG2_E * 1.5)
    assert self_test.routing_error(interpret=True) > 1e-2
