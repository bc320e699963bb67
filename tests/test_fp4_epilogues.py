"""Products with SwiGLU, or with residual and RMSNorm, simulated, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simulated_kernel import (
    ROUNDING,
    float64,
    normal,
    product,
    random_weight,
    relative_error,
)

from pallas_kernels import device
from pallas_kernels import fp4_matmul as fp4
from pallas_kernels.fp4_matmul import AddRmsNorm, Swiglu, dispatch, layout, sm90, tiling
from pallas_kernels.fp4_matmul.tiling import TileConfig


def swiglu_inputs(m, n, k, rank=64):
    """x, the weight, partial mean squares for which the product has the size of one, and B."""
    weight, x = random_weight(n, k), normal(m, k)
    rng = np.random.default_rng(3)
    size = np.sqrt(np.mean(product(x, weight) ** 2))
    square_partials = jnp.asarray(rng.uniform(0.2, 2, (19, m)) * size**2 / 19, jnp.float32)
    return x, weight, square_partials, normal(n, rank, seed=2)


def swiglu_of(x, weight, xa, b, square_partials, eps):
    """In float64."""
    y = product(x, weight, xa=xa, b=b)
    y /= np.sqrt(float64(square_partials).sum(axis=0) + eps)[:, None]
    gate, up = np.split(y, 2, axis=1)
    return gate / (1 + np.exp(-gate)) * up


SWIGLU_VARIANTS = {
    "tiles in turn": ((8, 256, 256), TileConfig(8, warpgroups_n=1, stages=2), 3),
    "tiles of even rows, some beyond the weight": (
        (16, 640, 192),
        TileConfig(16, warpgroups_n=2, stages=2),
        2,
    ),
    "tiles of odd rows, the next stage dequantized ahead": (
        (8, 512, 1024),
        TileConfig(8, warpgroups_n=3, block_k=256, stages=3, in_flight=2, ahead=True),
        4,
    ),
    "slices": ((8, 128, 640), TileConfig(8, slices=2, warpgroups_n=1, block_k=512, stages=2), 1),
    "split tiles": ((16, 512, 384), TileConfig(24, warpgroups_n=1, stages=3, stream_k=True), 3),
    "several tiles of tokens": ((32, 256, 256), TileConfig(24, warpgroups_n=1, stages=2), 3),
    "several tiles of tokens, split ones": (
        (32, 512, 384),
        TileConfig(24, warpgroups_n=1, stages=3, stream_k=True),
        5,
    ),
    "a tile for each CTA of a cluster and an odd one": (
        (8, 384, 640),
        TileConfig(8, warpgroups_n=2, stages=3, split=3),
        3,
    ),
}


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(
            name, marks=() if "even rows" in name or name.endswith("tokens") else pytest.mark.slow
        )
        for name in SWIGLU_VARIANTS
    ],
)
def test_the_swiglu_epilogue(variant, simulated):
    (m, n, k), config, blocks = SWIGLU_VARIANTS[variant]
    x, weight, square_partials, b = swiglu_inputs(m, n, k)
    xa = normal(m, 64, seed=1)
    y = sm90.matmul(
        x,
        layout.to_tiles(weight),
        config=config,
        num_sms=blocks,
        xa=xa,
        b=b,
        epilogue=Swiglu(square_partials, 1e-6),
        interpret=simulated,
    )
    assert y.shape == (m, n // 2)
    # Gate, what it multiplies, its activation and the result are rounded.
    assert (
        relative_error(y, swiglu_of(x, weight, float64(xa), b, square_partials, 1e-6))
        < 2 * ROUNDING
    )


@pytest.mark.usefixtures("simulated_api")
@pytest.mark.parametrize("made", [False, True])
def test_swiglu(made):
    """With given partials, and with A, of which the simulation computes them."""
    m, n, k, rank = 8, 128, 512, 32 if made else 40
    x, weight, square_partials, b = swiglu_inputs(m, n, k)
    a, b = 0.1 * normal(rank, k, seed=1), b.at[:, rank:].set(0)
    xa, xa_partials, config = float64(x) @ float64(a).T, None, None
    if made:
        config = TileConfig(8, warpgroups_n=1, block_k=256, stages=2)
    else:
        drawn = np.random.default_rng(4).standard_normal((5, m, 64))
        xa_partials = jnp.asarray(drawn, jnp.float32).at[:, :, rank:].set(0)
        xa = float64(xa_partials.sum(axis=0))[:, :rank]
    y = fp4.fp4_matmul(
        x,
        fp4.to_tiles(weight),
        lora=(a, b),
        xa_partials=xa_partials,
        epilogue=Swiglu(square_partials, 0.5),
        config=config,
    )
    expected = swiglu_of(x, weight, xa, b[:, :rank], square_partials, 0.5)
    assert relative_error(y, expected) < 3 * ROUNDING  # x A^T is rounded, too


def test_where_the_kernel_supports_swiglu(monkeypatch):
    """Not where it does not run, nor for arguments that it does not take."""
    monkeypatch.setattr(device, "num_sms", lambda: 132)
    x, weight, square_partials, _ = swiglu_inputs(16, 256, 512)
    tiles = fp4.to_tiles(weight)

    def serves(m=16, k=512, weight=tiles, squares=square_partials, rank=64, count=4):
        lora = normal(rank, k), jnp.zeros((256, rank), jnp.bfloat16)
        xa_partials = jnp.zeros((count, m, rank)) if count else None
        x = jnp.zeros((m, k), jnp.bfloat16)
        epilogue = Swiglu(squares, 0.5)
        return fp4.supports(x, weight, lora=lora, xa_partials=xa_partials, epilogue=epilogue)

    assert not serves()
    monkeypatch.setattr(dispatch, "supports_device", lambda: True)
    assert serves()
    assert serves(m=8)
    assert not serves(m=12)
    assert not serves(weight=fp4.to_tiles(random_weight(192, 512)))
    assert not serves(weight=weight)
    assert not serves(squares=square_partials[:3])
    assert serves(squares=None)
    assert not serves(count=3)
    assert serves(count=0)
    short = fp4.to_tiles(random_weight(256, 256))
    assert serves(k=256, weight=short)
    assert not serves(k=256, weight=short, count=0)  # too few columns to make partials of
    assert serves(m=256)
    assert not serves(m=264)
    assert serves(rank=512)
    assert not serves(rank=576)  # more than a stage holds
    assert not fp4.supports(x, tiles, lora=None, epilogue=Swiglu(square_partials, 0.5))


def test_where_a_product_adds_up_x_a(monkeypatch):
    """With a tiling that has a reducer, of a weight in tile order, and on a Hopper GPU."""
    monkeypatch.setattr(device, "num_sms", lambda: 132)
    weight = random_weight(256, 512)
    tiles = fp4.to_tiles(weight)

    def adds(m=16, weight=tiles, rank=64):
        x = jax.ShapeDtypeStruct((m, 512), jnp.bfloat16)
        lora = (normal(rank, 512), normal(256, rank)) if rank else None
        return fp4.adds_xa_partials(x, weight, lora)

    assert not adds()
    monkeypatch.setattr(dispatch, "supports_device", lambda: True)
    assert adds()
    assert adds(m=256)
    assert not adds(m=264)
    assert not adds(rank=576)  # more than a stage holds
    assert adds(rank=0)
    assert not adds(rank=0, m=264)
    assert not adds(weight=weight)
    assert not adds(weight=normal(256, 512))
    without = TileConfig(136, warpgroups_n=2, stages=2)
    monkeypatch.setattr(tiling, "choose", lambda *_, **__: without)
    assert not adds(m=256)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lora": None, "xa_partials": None}, "is for 'mosaic' with lora and without bias"),
        ({"bias": normal(256)}, "is for 'mosaic' with lora and without bias"),
        ({"dtype": jnp.float32}, "is for 'mosaic' with lora and without bias"),
        ({"implementation": "xla"}, "is for 'mosaic' with lora and without bias"),
        ({"dtype": jnp.float16}, "dtype is float16, expected float32 or None"),
        (
            {"x": normal(12, 512), "xa_partials": jnp.zeros((4, 12, 64))},
            "a multiple of 8 tokens and of 128 outputs, got 12 and 256",
        ),
        (
            {"lora": (normal(576, 512), normal(256, 576)), "xa_partials": None},
            "an adapter that a stage holds, got rank 576",
        ),
        ({"xa_partials": jnp.zeros((3, 16, 64))}, "xa_partials are 3, expected at least 4"),
        ({"xa_partials": jnp.zeros((4, 8, 64))}, r"are \(4, 8, 64\), expected \(S, 16, 64\)"),
        (
            {"epilogue": Swiglu(jnp.ones((2, 16)), 1.0)},
            "square_partials are 2, expected at least 4",
        ),
        ({"x": jnp.zeros((16, 512))}, "wants bfloat16 and Fp4Tiles, got float32"),
        (
            {"config": TileConfig(136, warpgroups_n=3, stages=2)},
            "a reducer, got 16 and TileConfig.tile_m=136",
        ),
        ({"config": TileConfig(12)}, "tile_m is 12, expected a multiple of 8"),
    ],
)
def test_arguments_without_swiglu(changed, message, monkeypatch):
    monkeypatch.setattr(device, "num_sms", lambda: 132)
    x, weight, square_partials, b = swiglu_inputs(16, 256, 512)
    given = {
        "x": x,
        "lora": (normal(64, 512), b),
        "xa_partials": jnp.zeros((4, 16, 64)),
        "epilogue": Swiglu(square_partials, 1.0),
    }
    with pytest.raises(ValueError, match=message):
        fp4.fp4_matmul(weight=fp4.to_tiles(weight), **(given | changed))


def norm_inputs(m, n, k):
    """x, the weight, the residual, the norm's scale, A and B."""
    scale = jnp.asarray(np.random.default_rng(5).uniform(0.5, 2, n), jnp.float32)
    residual = (k**0.5 * float64(normal(m, n, seed=6))).astype(jnp.bfloat16)
    return normal(m, k), random_weight(n, k), residual, scale, normal(32, k, seed=1), normal(n, 64)


@pytest.mark.usefixtures("simulated_api")
@pytest.mark.parametrize("made", [False, True])
def test_add_rmsnorm(made):
    """With given partials, and with A, of which the simulation computes them."""
    x, weight, residual, scale, a, b = norm_inputs(16, 192, 512)
    b = b.at[:, 32:].set(0)
    xa = float64(x) @ float64(a).T
    xa_partials = None if made else jnp.asarray([xa / 4] * 4, jnp.float32)
    config = TileConfig(16, warpgroups_n=1, block_k=256, stages=2)
    total, scaled, square_partials = fp4.fp4_matmul(
        x,
        fp4.to_tiles(weight),
        lora=(a, b),
        xa_partials=xa_partials,
        epilogue=AddRmsNorm(residual, scale),
        config=config,
    )
    expected = product(x, weight, xa=xa, b=b[:, :32], bias=residual)
    assert relative_error(total, expected) < 2 * ROUNDING
    assert relative_error(scaled, expected * float64(scale)) < 2 * ROUNDING
    means = float64(square_partials).sum(axis=0)
    np.testing.assert_allclose(means, np.mean(float64(total) ** 2, axis=1), rtol=1e-5)


def test_where_the_kernel_adds_to_the_residual(monkeypatch):
    """Not where it does not run, nor for arguments that it does not take."""
    monkeypatch.setattr(device, "num_sms", lambda: 132)
    x, weight, residual, scale, *_ = norm_inputs(72, 3584, 512)
    tiles = fp4.to_tiles(weight)

    def serves(m=32, weight=tiles, n=3584, rank=32):
        lora = normal(rank, 512), jnp.zeros((n, rank), jnp.bfloat16)
        epilogue = AddRmsNorm(residual[:m, :n], scale[:n])
        return fp4.supports(x[:m], weight, lora=lora, epilogue=epilogue)

    assert not serves()
    monkeypatch.setattr(dispatch, "supports_device", lambda: True)
    assert serves()
    assert serves(m=8)
    assert not serves(m=12)
    assert serves(m=64)
    assert not serves(m=72)
    assert not serves(weight=weight)
    assert serves(weight=fp4.to_tiles(random_weight(192, 512)), n=192)
    assert not serves(weight=fp4.to_tiles(random_weight(200, 512)), n=200)
    assert not serves(rank=576)  # more than a stage holds


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"residual": normal(16, 128)}, r"residual is bfloat16 \(16, 128\)"),
        ({"residual": jnp.zeros((16, 256))}, r"residual is float32 \(16, 256\)"),
        ({"scale": jnp.ones(128)}, r"scale \(128,\), expected bfloat16 \(16, 256\) and \(256,\)"),
        ({"x": normal(12, 512), "residual": normal(12, 256)}, "RMSNorm wants tiles of 12 tokens"),
        ({"config": TileConfig(8, warpgroups_n=1)}, "RMSNorm wants tiles of 16 tokens"),
        (
            {"config": TileConfig(16, warpgroups_n=5, stages=8)},
            "shared memory does not hold sum and scaled sum",
        ),
        ({"config": TileConfig(12)}, "tile_m is 12, expected a multiple of 8"),
    ],
)
def test_arguments_without_add_rmsnorm(changed, message, monkeypatch):
    monkeypatch.setattr(device, "num_sms", lambda: 132)
    x, weight, residual, scale, a, b = norm_inputs(16, 256, 512)
    given = {"x": x, "residual": residual, "scale": scale} | changed
    given["epilogue"] = AddRmsNorm(given.pop("residual"), given.pop("scale"))
    with pytest.raises(ValueError, match=message):
        fp4.fp4_matmul(weight=fp4.to_tiles(weight), lora=(a, b), **given)
