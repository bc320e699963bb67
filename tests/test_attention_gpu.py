"""Packed self-attention on a Hopper GPU: against the dense form in float32, and reproducibility."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper_cases import skip_unless_hopper
from packed_cases import draw_operands, errors, packed_ids, random_ids, row_positions

from pallas_kernels.attention import attend_packed, benchmark, segments, supports_attention

pytestmark = pytest.mark.gpu

LAYOUTS = {
    "ragged": packed_ids((37, 300, 1, 0, 200), (130, 5, 90), (1, 900), (64,), total=2048),
    "short": packed_ids(*[(20, *[30] * 8)] * 7, total=2048),
    "long": packed_ids((100, 900, 900), total=2048),
    "long prompt": packed_ids((1500, 100, 200), total=2048),
    "a group of one": packed_ids((100, 1948), total=2048),
    "random": random_ids(np.random.default_rng(0), 4096),
    "one tile": packed_ids((10, 20), total=128),
}
HEADS = [(12, 2, 128), (28, 4, 128), (9, 3, 64), (64, 8, 128), (16, 2, 256)]


@pytest.fixture(autouse=True, scope="module")
def a_hopper_gpu():
    skip_unless_hopper()


@functools.partial(jax.jit, static_argnames="window")
def run(q, k, v, d_out, packed, *, sinks=None, window=0):
    attend = functools.partial(attend_packed, segments=packed, sinks=sinks, window=window)
    out, pullback = jax.vjp(attend, q, k, v)
    return out, *pullback(d_out)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_against_the_dense_form(heads, layout):
    ids = LAYOUTS[layout]
    q, k, v, d_out = draw_operands(len(ids), *heads, ids)
    assert supports_attention(q)
    packed = segments(ids)
    expected = benchmark.dense_gradients(packed, d_out, q, k, v)
    actual = run(q, k, v, d_out, packed)
    expected = [np.asarray(x, np.float64) for x in expected]
    found = errors([np.asarray(x, np.float32) for x in actual], expected, ids)
    assert max(found) < 7e-3, found


@pytest.mark.parametrize("window", [0, 128, 100])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sinks_and_windows(layout, window):
    """Of gpt-oss: also where a sink is larger than every score."""
    ids, heads = LAYOUTS[layout], (64, 8, 64)
    q, k, v, d_out = draw_operands(len(ids), *heads, ids)
    sinks = jnp.linspace(-4, 12, 64).astype(jnp.bfloat16)
    limits = {"sinks": sinks, "window": window}
    packed = segments(ids)._replace(positions=row_positions(ids))
    expected = benchmark.dense_gradients(packed, d_out, q, k, v, **limits)
    actual = run(q, k, v, d_out, packed, **limits)
    expected = [np.asarray(x, np.float64) for x in expected]
    found = errors([np.asarray(x, np.float32) for x in actual], expected, ids)
    assert max(found) < 7e-3, found


@pytest.mark.parametrize("heads", HEADS[:3], ids=str)
@pytest.mark.parametrize("layout", ["ragged", "long", "random"])
def test_equal_bits_in_every_run(heads, layout):
    """Another program runs between two runs."""
    ids = LAYOUTS[layout]
    operands = draw_operands(len(ids), *heads, ids)
    packed = segments(ids)
    first = [np.asarray(x).view(np.uint16) for x in run(*operands, packed)]
    other = jnp.ones((2048, 2048))
    for _ in range(20):
        other = jnp.tanh(other @ other)
        for old, new in zip(first, run(*operands, packed), strict=True):
            np.testing.assert_array_equal(old, np.asarray(new).view(np.uint16))


def test_padding_alone_is_finite():
    ids = np.full(512, -1, np.int32)
    for x in run(*draw_operands(512, 4, 2, 128, ids), segments(ids)):
        assert np.isfinite(np.asarray(x, np.float32)).all()


def test_the_gradient_of_a_jitted_loss():
    """Segments are an argument of the program, and other layouts do not compile again."""
    ids = LAYOUTS["long"]
    q, k, v, _ = draw_operands(len(ids), 4, 2, 64, ids)
    live = (ids >= 0)[:, None, None]

    @jax.jit
    def loss(q, packed):
        return jnp.sum(jnp.where(live, attend_packed(q, k, v, packed), 0).astype(jnp.float32) ** 2)

    gradient = jax.jit(jax.grad(loss))
    for name in ("long", "ragged"):
        assert np.isfinite(np.asarray(gradient(q, segments(LAYOUTS[name])), np.float32)).all()
    assert gradient._cache_size() == 1
