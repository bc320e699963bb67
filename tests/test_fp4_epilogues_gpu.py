"""The epilogues of the kernel on a Hopper GPU: SwiGLU, and residual and RMSNorm."""

import functools

import adapter_cases
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from fp4_oracles import float64
from hopper_cases import CONFIGS, ROUNDING, random_weight, skip_unless_hopper

from pallas_kernels import fp4_matmul as fp4
from pallas_kernels.fp4_matmul import AddRmsNorm, Swiglu, cases, tiling
from pallas_kernels.fp4_matmul.tiling import TileConfig

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, scope="module")
def a_hopper_gpu():
    skip_unless_hopper()


def swiglus():
    """Named shapes, and every kind of tiling with tiles beyond the weight."""
    for model in ("7b", "14b", "32b", "llama8b"):
        yield from ((None, m, *cases.MODELS[model]["gate_up"]) for m in (8, 24, 32, 64, 128, 256))
    # Few partial mean squares, and a width of 16 tokens.
    yield from ((None, m, 512, 1024) for m in (8, 48))
    for config in CONFIGS[1:]:
        if tiling.supports_xa_partials(config):
            yield config, 16, 128 * 37, 1024
            yield config, 248, 128 * 37, 1024
    # The last CTA's run of a split tile is a whole tile, which it stores before its others.
    yield TileConfig(16, warpgroups_n=2, stages=6, stream_k=True), 16, 128 * 262, 1024


@pytest.mark.parametrize(("config", "m", "n", "k"), list(swiglus()), ids=str)
def test_swiglu(config, m, n, k):
    """Against float64, and many times in a row."""
    rng = np.random.default_rng()
    weight = random_weight(rng, n, k)
    x, b = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((m, k), (n, 64)))
    xa_partials = jnp.asarray(rng.standard_normal((k // 128, m, 64)), jnp.float32)
    xa = float64(xa_partials).sum(axis=0).astype(ml_dtypes.bfloat16)
    product = float64(x) @ float64(fp4.dequantize(weight, jnp.float32)).T
    product += float64(xa) @ float64(b).T
    # Two norms, by which the calls take turns: a factor that is read too early is the other's.
    # As many partials as a product of K outputs leaves, or few.
    count = k // 16 if k > 1024 else k // 128 + 1
    square_partials = rng.uniform(0.5, 2, (2, count, m)) * np.mean(product**2) / count
    square_partials = square_partials.astype(np.float32)
    expected = []
    for parts in float64(square_partials):
        gate, up = np.split(product / np.sqrt(parts.sum(axis=0) + 0.1)[:, None], 2, axis=1)
        expected.append(gate / (1 + np.exp(-gate)) * up)
    tiles = fp4.to_tiles(weight)
    # A is not read, as its product is given.
    given = {"lora": (jnp.zeros((64, k), jnp.bfloat16), b), "xa_partials": xa_partials}
    assert fp4.supports(x, tiles, **given, epilogue=Swiglu(square_partials[0], 0.1))

    @jax.jit
    def run(x, tiles, given, square_partials):
        def swiglu(parts):
            return fp4.fp4_matmul(x, tiles, **given, epilogue=Swiglu(parts, 0.1), config=config)

        first = jnp.stack([swiglu(parts) for parts in square_partials])

        def again(i, differs):
            y = swiglu(square_partials[i % 2])
            return differs | jnp.any(y != first[i % 2])

        return first, jax.lax.fori_loop(0, 20, again, False)

    first, differs = run(x, tiles, given, square_partials)
    assert first.shape == (2, m, n // 2)
    for y, exact_y in zip(first, expected, strict=True):
        # Gate, what it multiplies, its activation and the result are rounded. Where there are few,
        # some weigh most: roundings alone were off by 0.0044 in 300 draws of 8 x 256 results.
        error = np.linalg.norm(float64(y) - exact_y) / np.linalg.norm(exact_y)
        assert error < (2 if n > 512 else 2.5) * ROUNDING
    assert not differs


def norms():
    """Named shapes, and every kind of tiling, with row tiles beyond the weight."""
    for model in ("1.5b", "7b", "14b", "32b", "llama8b"):
        for layer in ("o", "down"):
            yield from ((None, m, *cases.MODELS[model][layer]) for m in (8, 32, 64))
    for config in CONFIGS[1:]:
        shape = config.tile_m, 64 * 37, 1024
        if tiling.supports_xa_partials(config) and adapter_cases.schedule_of(
            config, *shape, 64
        ).supports_add_residual(config.tile_m):
            yield config, *shape
    # The last CTA's run of a split tile is a whole tile; all CTAs have a whole tile and a run.
    for tiles in (131, 200):
        yield TileConfig(16, warpgroups_n=2, stages=6, stream_k=True), 16, 128 * tiles, 1024
    # Three partials, which are added up outside.
    yield TileConfig(16, warpgroups_n=1, stages=6), 16, 64 * 37, 384


@pytest.mark.parametrize(("config", "m", "n", "k"), list(norms()), ids=str)
def test_add_rmsnorm(config, m, n, k):
    """With given partials and A: bit for bit the product and the sum."""
    rng = np.random.default_rng()
    weight = random_weight(rng, n, k)
    x, residual, a, b = (
        jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
        for shape in ((m, k), (m, n), (32, k), (n, 64))
    )
    residual *= np.float32(k**0.5).astype(jnp.bfloat16)
    scale = jnp.asarray(rng.standard_normal(n), jnp.float32)
    xa_partials = jnp.asarray(rng.standard_normal((k // 128, m, 32)), jnp.float32)
    tiles = fp4.to_tiles(weight)
    schedule = adapter_cases.schedule_of(config, m, n, k, 64)
    assert schedule.supports_add_residual(m)
    epilogue = AddRmsNorm(residual, scale)
    if config is None:
        served = fp4.supports(x, tiles, lora=(a, b), epilogue=epilogue)
        assert served == (m <= tiling.MAX_ROWS_OF_NORM)

    @jax.jit
    def run(x, tiles, epilogue, lora, xa_partials):
        product = functools.partial(
            fp4.fp4_matmul, x, tiles, lora=lora, xa_partials=xa_partials, config=config
        )
        first = product(epilogue=epilogue)

        def again(_, differs):
            same = product(epilogue=epilogue)
            return differs | jnp.any(
                jnp.stack([jnp.any(y != z) for y, z in zip(first, same, strict=True)])
            )

        return product(implementation="mosaic"), first, jax.lax.fori_loop(0, 20, again, False)

    for partials in (xa_partials, None):
        if partials is None and not schedule.supports_lora_shrink(*a.shape):
            continue
        y, (total, scaled, square_partials), differs = run(x, tiles, epilogue, (a, b), partials)
        expected = (y.astype(jnp.float32) + residual.astype(jnp.float32)).astype(jnp.bfloat16)
        np.testing.assert_array_equal(float64(total), float64(expected))
        np.testing.assert_array_equal(
            float64(scaled), float64((expected.astype(jnp.float32) * scale).astype(jnp.bfloat16))
        )
        means = np.mean(float64(total) ** 2, axis=1)
        np.testing.assert_allclose(float64(square_partials).sum(axis=0), means, rtol=1e-5)
        assert not differs
