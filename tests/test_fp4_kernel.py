"""The Hopper kernel, simulated on a CPU with a search for races, against float64."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fp4_oracles import check_dequantize, check_derivatives
from jax.experimental.pallas import mosaic_gpu as plgpu
from simulated_kernel import (
    ROUNDING,
    check_kernel,
    float64,
    normal,
    product,
    random_weight,
    relative_error,
)

from pallas_kernels import fp4_matmul as fp4
from pallas_kernels.fp4_matmul import dispatch, e4m3, layout, lora_shrink, sm90, tiling
from pallas_kernels.fp4_matmul.sm90 import producer, xa_partials
from pallas_kernels.fp4_matmul.tiling import TileConfig

VARIANTS = {
    "whole tiles": ((8, 64, 256), TileConfig(8, warpgroups_n=1, stages=2), 0, 2),
    "tokens and rows that do not fill a tile": (
        (11, 136, 192),
        TileConfig(8, warpgroups_n=2, stages=2),
        0,
        2,
    ),
    "an adapter": ((8, 64, 256), TileConfig(8, warpgroups_n=1, stages=2), 64, 2),
    "split tiles": ((16, 128, 640), TileConfig(16, warpgroups_n=1, stages=3, stream_k=True), 64, 3),
    "split tiles that the rows do not fill": (
        (16, 160, 384),
        TileConfig(16, warpgroups_n=2, stages=3, stream_k=True),
        64,
        3,
    ),
    "a split tile with fewer steps than there are CTAs": (
        (8, 256, 256),
        TileConfig(8, warpgroups_n=1, stages=2, stream_k=True),
        64,
        3,
    ),
    "a tile for every two CTAs": (
        (16, 128, 640),
        TileConfig(16, warpgroups_n=1, stages=3, split=2),
        64,
        4,
    ),
    "a tile for each CTA of a cluster and an odd one": (
        (8, 256, 640),
        TileConfig(8, warpgroups_n=1, stages=3, split=3),
        64,
        3,
    ),
    "the next stage dequantized ahead": (
        (8, 64, 1024),
        TileConfig(8, warpgroups_n=1, block_k=256, stages=3, in_flight=2, ahead=True),
        64,
        1,
    ),
    "slices": (
        (8, 64, 640),
        TileConfig(8, warpgroups_n=1, slices=2, block_k=512, stages=2, in_flight=1),
        64,
        1,
    ),
    "slices of split tiles": (
        (8, 192, 768),
        TileConfig(8, warpgroups_n=1, slices=2, block_k=256, stages=2, stream_k=True),
        64,
        2,
    ),
}


SLOW_VARIANTS = (
    "whole tiles",
    "split tiles",
    "a tile for every two CTAs",
    "a split tile with fewer steps than there are CTAs",
    "slices of split tiles",
)


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [
        *((name, "bfloat16") for name in VARIANTS if name not in SLOW_VARIANTS),
        *(pytest.param(name, "bfloat16", marks=pytest.mark.slow) for name in SLOW_VARIANTS),
        pytest.param("tokens and rows that do not fill a tile", "float32", marks=pytest.mark.slow),
        pytest.param("slices of split tiles", "float32", marks=pytest.mark.slow),
        pytest.param("split tiles that the rows do not fill", "float32", marks=pytest.mark.slow),
    ],
)
def test_kernel(variant, dtype, simulated):
    shape, config, rank, blocks = VARIANTS[variant]
    assert config.problem() is None
    check_kernel(sm90.matmul, shape, config, rank, dtype=dtype, num_sms=blocks, interpret=simulated)


@pytest.mark.parametrize(
    "variant",
    [
        "an adapter",
        "the next stage dequantized ahead",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("split tiles", "slices")),
    ],
)
def test_rows_in_e4m3(variant, simulated):
    (m, n, k), config, rank, blocks = VARIANTS[variant]
    weight, x = random_weight(n, k), normal(m, k).astype(jnp.float8_e4m3fn)
    extra = {"xa": normal(m, rank, seed=1), "b": normal(n, rank, seed=2), "bias": normal(n)}
    y = sm90.matmul(
        e4m3.pairs(e4m3.in_register_order(x)),
        fp4.to_tiles(weight),
        config=dataclasses.replace(config, e4m3=True),
        num_sms=blocks,
        interpret=simulated,
        **extra,
    )

    exact = fp4.dequantize(weight._replace(global_scale=jnp.ones(n)), jnp.float32)
    rounded = (exact / layout.E4M3_UNIT).astype(jnp.float8_e4m3fn)
    values = float64(rounded) * layout.E4M3_UNIT / float64(weight.global_scale)[:, None]
    assert 0.02 < relative_error(values, float64(fp4.dequantize(weight, jnp.float32))) < 0.03
    expected = float64(x) @ values.T + float64(extra["xa"]) @ float64(extra["b"]).T
    assert relative_error(y, expected + float64(extra["bias"])) < ROUNDING


def test_a_producer_that_awaits_arrivals(simulated, monkeypatch):
    """The producer observes every phase of the barriers, in order."""
    monkeypatch.setattr(producer, "_BYTES_IN_FLIGHT", 1)
    config = TileConfig(8, warpgroups_n=1, stages=4, stream_k=True)
    check_kernel(sm90.matmul, (8, 192, 1408), config, 64, num_sms=2, interpret=simulated)


@pytest.mark.parametrize("form", ["nvfp4", "mxfp4"])
def test_dequantize(form, simulated):
    dequantize = functools.partial(sm90.dequantize, num_sms=2, interpret=simulated)
    check_dequantize(dequantize, 136, 192, form, seed=0)


@pytest.mark.usefixtures("simulated_api")
def test_product_and_derivatives():
    config = TileConfig(8, warpgroups_n=1, stages=2)
    matmul = functools.partial(fp4.fp4_matmul, implementation="mosaic", config=config)
    # dA, dB and y use the rounded x A^T or dy B.
    check_derivatives(matmul, (2, 3), 64, 128, 4, tolerance=4e-3, seed=0)


@pytest.mark.usefixtures("simulated_api")
@pytest.mark.parametrize(
    ("n", "block_k", "kernels"),
    # The first stages of two CTAs hold the tokens of four partials, but that of one CTA does not.
    [(128, 512, []), (64, 128, ["shrink"])],
)
def test_which_kernel_shrinks(n, block_k, kernels, monkeypatch):
    ran = []

    def shrink(x, a):
        ran.append("shrink")
        return lora_shrink.shrink(x, a, interpret=True)

    def dot(x, a):
        ran.append("dot")
        return plain_dot(x, a)

    plain_dot = dispatch.reference.dot
    fake = types.SimpleNamespace(shrink=shrink, COLUMNS=lora_shrink.COLUMNS)
    monkeypatch.setattr(dispatch, "_lora_shrink", lambda: fake)
    monkeypatch.setattr(dispatch.reference, "dot", dot)
    k, rank = 512, 40
    weight, x, a, b = random_weight(n, k), normal(3, k), normal(rank, k, seed=1), normal(n, 64)
    y = fp4.fp4_matmul(
        x,
        fp4.to_tiles(weight),
        lora=(a, b),
        implementation="mosaic",
        config=TileConfig(8, warpgroups_n=1, block_k=block_k, stages=2),
    )
    assert ran == kernels
    xa = float64(x) @ float64(a).T
    assert relative_error(y, product(x, weight, xa=xa, b=b[:, :rank])) < 4e-3  # x A^T is rounded


@pytest.mark.usefixtures("simulated_api")
def test_an_adapter_that_no_stage_holds():
    """The adapter is added to the kernel's product."""
    n, k, rank = 64, 128, 192
    weight, x = random_weight(n, k), normal(3, k)
    a, b = normal(rank, k, seed=1), normal(n, rank, seed=2)
    y = fp4.fp4_matmul(x, fp4.to_tiles(weight), lora=(a, b), implementation="mosaic")
    expected = product(x, weight, xa=float64(x) @ float64(a).T, b=b)
    assert relative_error(y, expected) < 6e-3  # x A^T and both products are rounded


@pytest.mark.usefixtures("simulated_api")
def test_float32(monkeypatch):
    monkeypatch.setattr(dispatch, "supports_device", lambda: True)
    weight, x = random_weight(136, 128), normal(2, 3, 128)
    y = fp4.fp4_matmul(x, fp4.to_tiles(weight), dtype=jnp.float32)
    assert y.shape == (2, 3, 136)
    assert y.dtype == jnp.float32
    assert relative_error(y, product(x, weight)) < 1e-5


def product_with_partials(m, count=5):
    """The product of M rows with partials of x A^T, and the expected result."""
    n, k, rank = 64, 128, 24
    weight, x = random_weight(n, k), normal(m, k)
    b = jnp.pad(normal(n, rank, seed=1), ((0, 0), (0, 64 - rank)))
    xa_partials = np.random.default_rng(2).standard_normal((count, m, 32)).astype(np.float32)
    xa_partials[:, :, rank:] = 0
    y = fp4.fp4_matmul(
        x, fp4.to_tiles(weight), lora=(normal(rank, k), b), xa_partials=jnp.asarray(xa_partials)
    )
    return y, product(x, weight, xa=float64(xa_partials).sum(axis=0), b=b[:, :32])


@pytest.mark.usefixtures("simulated_api")
@pytest.mark.parametrize(
    ("m", "count"), [(3, 5), (3, 2), pytest.param(130, 5, marks=pytest.mark.slow)]
)
def test_xa_partials(m, count, monkeypatch):
    monkeypatch.setattr(dispatch, "supports_device", lambda: True)
    y, expected = product_with_partials(m, count)
    assert relative_error(y, expected) < 4e-3  # x A^T is rounded


def test_xa_partials_without_the_kernel():
    y, expected = product_with_partials(3)
    assert relative_error(y, expected) < 6e-3  # and the two products


@pytest.mark.slow  # 12 s
@pytest.mark.parametrize("form", ["nvfp4", "mxfp4"])
@pytest.mark.usefixtures("simulated_api")
def test_self_check_while_tracing(form, monkeypatch):
    """It finds no error, and its products cover what it says."""
    kernel, schedules = dispatch.kernel(), {}

    def matmul(x, tiles, *, config, num_sms, **extra):
        shrinks, epilogue = "a" in extra, extra.get("epilogue")
        paired, adds = (isinstance(epilogue, kind) for kind in (fp4.Swiglu, fp4.AddRmsNorm))
        assert tiles.format == form
        schedule = sm90.make_schedule(
            config, len(x), len(tiles.codes), x.shape[1], num_sms, paired=paired
        )
        schedules["shrinks" if shrinks else "adds" if adds else "paired"] = schedule
        if shrinks:
            assert schedule.supports_lora_shrink(*extra["a"].shape)
        assert tiling.supports_xa_partials(config)
        assert shrinks == ("xa_partials" not in extra)
        assert shrinks == ("bias" in extra)
        assert shrinks == (not (paired or adds))
        assert shrinks == bool(tiles.shape[0] % tiling.TILE_ROWS)
        return kernel.matmul(x, tiles, config=config, num_sms=num_sms, **extra)

    monkeypatch.setattr(dispatch, "kernel", lambda: types.SimpleNamespace(matmul=matmul))
    errors = []
    jax.eval_shape(lambda x: (errors.append(dispatch.self_check(form)), x)[1], jnp.ones(1))
    assert errors[0] < ROUNDING
    for schedule in schedules.values():
        config = schedule.config
        assert config.problem() is None
        assert schedule.steps > config.stages
        assert config.stages * config.stage_bytes() > producer._BYTES_IN_FLIGHT
    for name in ("paired", "adds"):
        assert schedules[name].split_tiles > 0
        assert schedules[name].tiles > schedules[name].blocks  # whole tiles, too
    clustered = schedules["shrinks"]
    assert clustered.split == 2
    assert clustered.tiles == 3 * clustered.clusters


def held(layout, shape):
    """The flat indices of the elements of each thread in a layout: [warp, lane, ...]."""
    layout = layout.to_mgpu()
    array = np.arange(np.prod(shape)).reshape(shape)
    for tile in layout.tiling.tiles:
        outer = array.ndim - len(tile)
        lead, cut = array.shape[:outer], array.shape[outer:]
        pairs = [part for size, one in zip(cut, tile, strict=True) for part in (size // one, one)]
        array = array.reshape(*lead, *pairs)
        counts = [outer + 2 * i for i in range(len(tile))]
        array = array.transpose(*range(outer), *counts, *(axis + 1 for axis in counts))
    warps = [axis for axis in layout.warp_dims if isinstance(axis, int)]
    threads = [array.ndim + axis for axis in (*warps, *layout.lane_dims)]
    others = [axis for axis in range(array.ndim) if axis not in threads]
    array = array.transpose(*threads, *others)
    return array.reshape(4 if warps else 1, 32, -1)


def test_what_is_written_of_x_a_fits_how_b_is_read():
    written = held(xa_partials._WRITTEN, (32,))[0, :, 0]  # the lane has the column of its number
    order = np.argsort(written)
    operand = held(plgpu.Layout.WGMMA, (64, 64)).reshape(4, 32, 8, 2, 2)
    read = held(xa_partials._READ, (64, 64)).reshape(4, 32, 2, 2, 4, 2)  # half, part, word, pair
    given = read.transpose(0, 1, 3, 4, 2, 5).reshape(4, 32, 8, 2, 2)
    rows, columns = np.divmod(operand, 64)
    given_rows, given_columns = np.divmod(given, 64)
    np.testing.assert_array_equal(given_rows, rows)
    np.testing.assert_array_equal(given_columns, 32 * (columns // 32) + order[columns % 32])


def test_tiles_on_a_cpu_go_through_the_definition():
    weight, x = random_weight(70, 160), normal(3, 160)
    tiles = fp4.to_tiles(weight)
    assert fp4.device_kernel() == "xla"
    for function in (fp4.fp4_matmul, jax.jit(fp4.fp4_matmul)):
        np.testing.assert_array_equal(float64(function(x, tiles)), float64(function(x, weight)))
    grad = jax.grad(lambda x, w: fp4.fp4_matmul(x, w).astype(jnp.float32).sum())
    np.testing.assert_array_equal(float64(grad(x, tiles)), float64(grad(x, weight)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": np.ones((2, 384), np.float32)}, r"codes of the tiles are uint32 \(1, 2, 1024\)"),
        (
            {"implementation": "cuda"},
            "implementation is 'cuda', expected 'mosaic', 'mma', 'xla' or None",
        ),
        (
            {"implementation": "mosaic", "x": np.ones((2, 256), np.float32)},
            "mosaic wants bfloat16 and Fp4Tiles, got float32 and Fp4Tiles",
        ),
        ({"config": TileConfig(12)}, "tile_m is 12, expected a multiple of 8"),
        ({"config": TileConfig(8, slices=2)}, "block_k is 128, expected a multiple of 256"),
        ({"config": TileConfig(256, stages=9)}, "bytes of shared memory, limit"),
        ({"config": TileConfig(8, warpgroups_n=8)}, "8 consumer warpgroups, expected at most 7"),
        ({"config": TileConfig(8, in_flight=2)}, "in_flight is 2, expected 0 to 1"),
        (
            {"config": TileConfig(8, block_k=256, stages=1, in_flight=1, ahead=True)},
            "ahead needs 2 stages of 4 products",
        ),
    ],
)
def test_errors_name_the_values(changes, message):
    arguments = {"x": normal(2, 256), "weight": fp4.to_tiles(random_weight(64, 256))} | changes
    with pytest.raises(ValueError, match=message):
        fp4.fp4_matmul(**arguments)
