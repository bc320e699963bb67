"""Tile order: nothing is lost, and the two moves of the kernel give back every code and scale."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import fp4_matmul as fp4
from pallas_kernels.fp4_matmul import layout

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1 = np.concatenate([E2M1, -E2M1])


def nvfp4(n, k, seed=0):
    """Any bytes, scales from 0 to 448; codes under a scale of 0 are 0."""
    rng = np.random.default_rng(seed)
    scales = rng.integers(0, 127, (n, k // 16), np.uint8)
    packed = rng.integers(0, 256, (n, k // 2), np.uint8)
    return fp4.Fp4Weight(
        packed=jnp.asarray(np.where(np.repeat(scales == 0, 8, axis=1), 0, packed)),
        scales=jnp.asarray(scales.view(ml_dtypes.float8_e4m3fn)),
        global_scale=jnp.asarray(rng.uniform(1000, 3000, n), jnp.float32),
    )


def mxfp4(n, k, seed=0):
    """Exponents of a row at most 29 apart, and blocks of zeros with the exponent byte 0."""
    rng = np.random.default_rng(seed)
    exponents = rng.integers(30, 220, (n, 1)) + rng.integers(0, 30, (n, k // 32))
    exponents[:, 1::3] = 0
    packed = rng.integers(0, 256, (n, k // 2), np.uint8)
    packed[np.repeat(exponents == 0, 16, axis=1)] &= 0x88
    return fp4.Fp4Weight(
        packed=jnp.asarray(packed),
        scales=jnp.asarray(exponents.astype(np.uint8).view(ml_dtypes.float8_e8m0fnu)),
    )


def assert_same_bytes(actual, expected):
    np.testing.assert_array_equal(actual.packed, expected.packed)
    np.testing.assert_array_equal(
        np.asarray(actual.scales).view(np.uint8), np.asarray(expected.scales).view(np.uint8)
    )
    if expected.global_scale is not None:
        np.testing.assert_array_equal(actual.global_scale, expected.global_scale)


@pytest.mark.parametrize("shape", [(64, 128), (128, 384), (576, 576), (70, 160), (1, 32)], ids=str)
@pytest.mark.parametrize("make", [nvfp4, mxfp4])
def test_round_trip(make, shape):
    weight = make(*shape)
    tiles = layout.to_tiles(weight)
    assert tiles.shape == shape
    assert tiles.codes.shape == (-(-shape[0] // 64), -(-shape[1] // 128), 1024)
    assert_same_bytes(layout.from_tiles(tiles), weight)


@pytest.mark.parametrize(("make", "bits"), [(nvfp4, 4.5), (mxfp4, 4.25)])
def test_the_tiles_have_the_size_of_the_weight(make, bits):
    tiles = layout.to_tiles(make(128, 256))
    assert tiles.codes.nbytes + tiles.scales.nbytes == 128 * 256 * bits / 8


def test_a_code_under_a_scale_of_zero_stands_for_zero():
    weight = nvfp4(64, 128)
    zero = jnp.zeros_like(weight.scales)
    back = layout.from_tiles(layout.to_tiles(weight._replace(scales=zero)))
    assert not back.packed.any()
    assert not np.asarray(back.scales).astype(np.float32).any()


def bfloat16(bits):
    """float64 of bfloat16 bits, subnormal ones too."""
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def test_the_decode_of_the_kernel_is_exact():
    """Rotate, mask, multiply in bfloat16, as its instructions do it; the lanes as it reads them."""
    weight = nvfp4(64, 128)
    packed = np.asarray(weight.packed)
    scales = np.arange(64 * 8, dtype=np.uint8).reshape(64, 8) % 127  # every scale
    packed = np.where(np.repeat(scales == 0, 8, axis=1), 0, packed)
    weight = weight._replace(
        packed=jnp.asarray(packed), scales=jnp.asarray(scales.view(ml_dtypes.float8_e4m3fn))
    )
    tiles = layout.to_tiles(weight)
    codes = np.asarray(tiles.codes)[0, 0].reshape(64, 4, 4)  # row, lane of the row, word
    scale_words = np.asarray(tiles.scales)[0, 0].reshape(64, 2)

    decoded = np.full((64, 128), np.nan)
    for half in range(2):
        pairs = layout.pair_bits(
            jnp.asarray(codes[:, :, 2 * half]), jnp.asarray(codes[:, :, 2 * half + 1])
        )
        scale_pairs = [
            np.asarray(bits) | layout.SCALE_BITS
            for bits in layout.scale_bits(jnp.asarray(scale_words[:, half]))
        ]
        for q, bits in enumerate(pairs):
            scale = bfloat16(scale_pairs[q // 4] >> (16 if q // 2 % 2 else 0) & 0xFFFF)[:, None]
            for odd in range(2):
                columns = 8 * (8 * half + q) + 2 * np.arange(4) + odd
                product = bfloat16(np.asarray(bits) >> 16 * odd & 0xFFFF) * scale
                # The product is a bfloat16 and not a subnormal one.
                np.testing.assert_array_equal(product, product.astype(ml_dtypes.bfloat16))
                assert (np.abs(product[product != 0]) >= 2.0**-126).all()
                decoded[:, columns] = product
    nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(64, 128)
    values = np.repeat(np.asarray(weight.scales).astype(np.float64), 16, axis=1)
    np.testing.assert_array_equal(decoded * layout.UNIT, E2M1[nibbles] * values)


@pytest.mark.parametrize("byte", [0x7F, 0x80, 0xFF])
def test_scales_without_a_place_are_refused(byte):
    weight = nvfp4(64, 128)
    scales = np.asarray(weight.scales).view(np.uint8).copy()
    scales[3, 2] = byte
    weight = weight._replace(scales=jnp.asarray(scales.view(ml_dtypes.float8_e4m3fn)))
    with pytest.raises(ValueError, match="expected scales of 0 to 448"):
        layout.to_tiles(weight)


@pytest.mark.parametrize("exponents", [(100, 130), (255, 255), (0, 100)])
def test_exponents_too_far_apart_are_refused(exponents):
    weight = fp4.Fp4Weight(
        packed=jnp.full((64, 32), 0x11, jnp.uint8),
        scales=jnp.asarray(np.tile(np.uint8(exponents), (64, 1)).view(ml_dtypes.float8_e8m0fnu)),
    )
    with pytest.raises(ValueError, match=r"within 2\^29"):
        layout.to_tiles(weight)


def test_nf4_has_no_tile_order():
    weight = fp4.Fp4Weight(jnp.zeros((64, 64), jnp.uint8), jnp.ones((64, 2), jnp.float32))
    with pytest.raises(ValueError, match="the weight is nf4, expected nvfp4 or mxfp4"):
        layout.to_tiles(weight)
