"""The kernel on a Hopper GPU: dequantization, products against float64, derivatives, programs."""

import dataclasses
import functools

import adapter_cases
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from fp4_oracles import check_dequantize, check_derivatives, float64
from hopper_cases import (
    CONFIGS,
    ROUNDING,
    check_adapters,
    check_layers_in_a_loop,
    check_product,
    random_weight,
    skip_unless_hopper,
    whole_products,
)
from jax.sharding import PartitionSpec

from pallas_kernels import fp4_matmul as fp4
from pallas_kernels.fp4_matmul import dispatch, sm90, tiling, timeline
from pallas_kernels.fp4_matmul.tiling import TileConfig

pytestmark = pytest.mark.gpu

SHAPES = [
    (1, 256, 1024),
    (8, 4608, 3584),
    (16, 3584, 18944),
    (33, 576, 576),
    (40, 1024, 8960),
    (64, 136, 160),
    (200, 2048, 1536),
    (512, 37888, 3584),
    (1111, 512, 1024),
    (32768, 512, 1024),
]


@pytest.fixture(autouse=True, scope="module")
def a_hopper_gpu():
    skip_unless_hopper()


def every_code_under_every_scale():
    """NVFP4 [128, 256]: 127 scales with 16 codes each, divisors of 1."""
    pairs = np.arange(0, 16, 2, dtype=np.uint8)
    packed = np.tile(pairs | pairs + 1 << 4, (128, 16))
    scales = (np.arange(128 * 16) % 127).astype(np.uint8).reshape(128, 16)
    packed[np.repeat(scales == 0, 8, axis=1)] = 0
    return fp4.Fp4Weight(
        packed=jnp.asarray(packed),
        scales=jnp.asarray(scales.view(ml_dtypes.float8_e4m3fn)),
        global_scale=jnp.ones(128, jnp.float32),
    )


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_dequantization_is_exact(config):
    weight = every_code_under_every_scale()
    columns = jax.jit(functools.partial(fp4.fp4_matmul, implementation="mosaic", config=config))(
        jnp.eye(256, dtype=jnp.bfloat16), fp4.to_tiles(weight)
    )
    np.testing.assert_array_equal(
        float64(columns).T, float64(fp4.dequantize(weight, jnp.float32)) + 0.0
    )


@pytest.mark.parametrize("form", ["nvfp4", "mxfp4"])
def test_dequantize(form):
    check_dequantize(functools.partial(sm90.dequantize, num_sms=132), 4608, 3584, form)


def products():
    """What a caller gets in every shape and format; every kind of tiling in three ragged shapes."""
    yield from whole_products(SHAPES)
    for config in CONFIGS[1:]:
        for m, n, k in ((33, 576, 576), (40, 1024, 8960), (200, 2056, 1520)):
            yield config, (m, n, k), True, "nvfp4"
    # 28 clusters of four blocks, each with a whole tile and a run of one more; two blocks add up.
    for tokens, stages in ((16, 6), (48, 4)):
        config = TileConfig(tokens, warpgroups_n=1, stages=stages, split=4)
        yield config, (tokens, 8960, 1024), True, "nvfp4"
    yield TileConfig(96, warpgroups_n=3, stages=3, stream_k=True), (90, 3584, 4096), True, "nvfp4"


@pytest.mark.parametrize(("config", "shape", "adapter", "form"), list(products()), ids=str)
def test_product(config, shape, adapter, form):
    check_product("mosaic", config, shape, adapter, form)


@pytest.mark.parametrize("m", [1, 16, 33, 200])
def test_float32(m):
    rng = np.random.default_rng()
    weight = random_weight(rng, 32000, 1024)
    x = jnp.asarray(rng.standard_normal((m, 1024)), jnp.bfloat16)
    tiles = fp4.to_tiles(weight)
    run = jax.jit(functools.partial(fp4.fp4_matmul, dtype=jnp.float32))
    y = np.asarray(run(x, tiles))
    expected = float64(x) @ float64(fp4.dequantize(weight, jnp.float32)).T
    assert np.linalg.norm(y - expected) / np.linalg.norm(expected) < 1e-5
    np.testing.assert_array_equal(y, run(x, tiles))


@pytest.mark.parametrize(
    ("m", "n", "k", "rank", "count"),
    [
        (1, 256, 1024, 32, 8),
        (1, 37888, 3584, 64, 28),
        (8, 4608, 3584, 96, 28),
        (8, 3584, 18944, 32, 74),
        (33, 3584, 18944, 32, 148),
        (64, 37888, 3584, 64, 28),
        (64, 3584, 18944, 32, 148),
        (128, 256, 1024, 96, 8),  # more parts than CTAs
        (128, 3584, 18944, 64, 148),
        (200, 2056, 1520, 96, 13),
    ],
)
def test_xa_partials(m, n, k, rank, count):
    rng = np.random.default_rng()
    weight = random_weight(rng, n, k)
    x, b = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((m, k), (n, rank)))
    padded = jnp.pad(b, ((0, 0), (0, fp4.padded_rank(rank) - rank)))
    xa_partials = jnp.asarray(rng.standard_normal((2, count, m, rank)), jnp.float32)
    # A is not read, as its product is given.
    given = [{"lora": (jnp.zeros((rank, k)), padded), "xa_partials": one} for one in xa_partials]
    expected = [(float64(one).sum(axis=0), b) for one in xa_partials]
    check_adapters(fp4.fp4_matmul, x, weight, given, expected)


def adapters():
    """The listed ones, and every kind of tiling with a unit of x A^T for each of a few blocks."""
    yield from adapter_cases.CASES
    for config in CONFIGS[1:]:
        yield config, 13, 4096, 1024, 32, tiling.supports_xa_partials(config)


@pytest.mark.parametrize(("config", "m", "n", "k", "rank", "inside"), list(adapters()), ids=str)
def test_an_adapter_inside(config, m, n, k, rank, inside):
    assert adapter_cases.schedule_of(config, m, n, k, rank).supports_lora_shrink(rank, k) == inside
    rng = np.random.default_rng()
    weight = random_weight(rng, n, k)
    x, a, b = (
        jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
        for shape in ((m, k), (2, rank, k), (2, n, rank))
    )
    matmul = functools.partial(fp4.fp4_matmul, implementation="mosaic", config=config)
    given = [{"lora": lora} for lora in zip(a, b, strict=True)]
    expected = [(float64(x) @ float64(a[i]).T, b[i]) for i in (0, 1)]
    check_adapters(matmul, x, weight, given, expected)


@pytest.mark.parametrize(("m", "n", "k"), [(8, 3584, 3584), (64, 3584, 18944)])
def test_timeline(m, n, k):
    trace, warpgroups = timeline.record(m, n, k, rank=32)
    cycles = timeline.summary(trace)
    assert {"Init", "shrink", "first stage", "multiply", "add adapter"} <= set(cycles)
    assert min(cycles.values()) >= 0
    assert 1000 < cycles["span"] < 1e6
    *consumers, producer, reducer = timeline.events_of_block(trace, 0, warpgroups)
    assert all("multiply" in line for line in consumers)
    assert "await xa" in producer
    assert "add partials" in reducer


def test_derivatives():
    matmul = functools.partial(fp4.fp4_matmul, implementation="mosaic")
    check_derivatives(matmul, (192,), 1536, 1024, 32)


@pytest.mark.parametrize("form", ["nvfp4", "mxfp4"])
def test_the_self_test_finds_no_error(form):
    assert dispatch.self_check(form) < ROUNDING


def test_the_kernel_is_what_a_caller_gets():
    dispatch.supports_device.cache_clear()
    assert dispatch.supports_device()
    weight = random_weight(np.random.default_rng(), 512, 1024)
    x = jnp.ones((8, 1024), jnp.bfloat16)
    text = jax.jit(fp4.fp4_matmul).lower(x, fp4.to_tiles(weight)).as_text()
    assert "mosaic_gpu" in text


def test_layers_in_a_loop():
    """The locks of split tiles, which both tilings use, are zero after every call.

    One tiling has only split tiles, with five CTAs each; the other has whole tiles, too, and CTAs
    with runs of two tiles.
    """
    few, many = (
        TileConfig(16, warpgroups_n=2, stages=6, stream_k=True),
        TileConfig(16, warpgroups_n=1, stream_k=True),
    )

    def kernel(x, tiles):
        config = many if len(tiles.divisor) == 8192 else few
        return fp4.fp4_matmul(x, tiles, implementation="mosaic", config=config)

    check_layers_in_a_loop(kernel)


def test_shard_map():
    mesh = jax.make_mesh((1,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    weight = random_weight(np.random.default_rng(), 512, 1024)
    tiles = fp4.to_tiles(weight)
    x = jnp.ones((8, 1024), jnp.bfloat16)
    spec = dataclasses.replace(
        tiles,
        codes=PartitionSpec("tensor"),
        scales=PartitionSpec("tensor"),
        divisor=PartitionSpec("tensor"),
    )
    run = jax.shard_map(
        functools.partial(fp4.fp4_matmul, implementation="mosaic"),
        mesh=mesh,
        in_specs=(PartitionSpec(), spec),
        out_specs=PartitionSpec(None, "tensor"),
        check_vma=False,
    )
    np.testing.assert_array_equal(
        float64(jax.jit(run)(x, tiles)),
        float64(fp4.fp4_matmul(x, tiles, implementation="mosaic")),
    )


def test_the_choice_is_for_this_card():
    assert jax.devices()[0].core_count == tiling.NUM_SMS
