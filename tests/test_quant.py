"""The quantizers: code points, ties, signs, scales and errors."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from refusal import refused

from pallas_kernels.fp4_matmul import FORMATS
from qerl_jax.errors import UserError
from qerl_jax.policy.quant import (
    bfloat16_bits,
    dequantize,
    kernel_weight,
    quantize,
    quantize_nvfp4,
)


def codes_of(quantized):
    packed = np.asarray(quantized.packed)
    nibbles = [packed & 15, packed >> 4]
    if quantized.format == "nf4":
        nibbles.reverse()
    return np.stack(nibbles, axis=-1).reshape(len(packed), -1)


def random_weight(outputs=8, inputs=64, *, size=1.0, seed=0):
    return size * np.random.default_rng(seed).standard_normal((outputs, inputs), np.float32)


def unit_block(values):
    """Returns a row whose scale is exactly 1: the largest weight 6 gives the global scale 448."""
    block = np.zeros((1, 16), np.float32)
    block[0, : len(values)] = values
    block[0, 15] = 6.0
    return block


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (0.0, 0), (0.5, 1), (1.0, 2), (1.5, 3), (2.0, 4), (3.0, 5), (4.0, 6), (6.0, 7),
        # Ties go to the even code, and their neighbors in bfloat16 to the nearer code.
        (0.25, 0), (0.251953125, 1), (0.2490234375, 0),
        (0.75, 2), (0.74609375, 1), (0.75390625, 2),
        (1.25, 2), (1.2578125, 3), (1.2421875, 2),
        (1.75, 4), (1.7421875, 3), (1.7578125, 4),
        (2.5, 4), (2.515625, 5), (2.484375, 4),
        (3.5, 6), (3.484375, 5), (3.515625, 6),
        (5.0, 6), (5.03125, 7), (4.96875, 6),
    ],
)  # fmt: skip
def test_codes_are_the_nearest_and_ties_are_even(value, code):
    quantized = quantize_nvfp4([unit_block([value, -value])])
    assert quantized.global_scale[0] == 448
    assert quantized.scales[0, 0] == 448
    codes = codes_of(quantized)[0]
    assert codes[0] == code
    assert codes[1] == (code + 8 if value else 0)
    assert codes[15] == 7


def test_a_device_rounds_to_bfloat16_as_numpy_does():
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 100_000, np.uint32)
    # Zero, subnormal numbers, ties, the largest number and infinity; both signs.
    special = np.array([0, 1, 0x8000, 0x18000, 0x7F7FFFFF, 0x7F800000, 0x3F808000], np.uint32)
    values = np.concatenate([bits, special, special | 0x80000000]).view(np.float32)
    values = values[~np.isnan(values)]
    found = np.asarray(bfloat16_bits(jnp.asarray(values)))
    np.testing.assert_array_equal(found, values.astype(ml_dtypes.bfloat16).view(np.uint16))
    nan = np.asarray(bfloat16_bits(jnp.array([np.nan, -np.nan], jnp.float32)))
    assert np.isnan(nan.view(ml_dtypes.bfloat16)).all()


@pytest.mark.parametrize("size", [1e-4, 1.0, 300.0])
@pytest.mark.parametrize(
    ("format", "bound"),
    [
        # Where the largest weight is 6, the widest step is 4 to 6; FP8 rounds the scale by 1/16.
        ("nvfp4", 1 / 6 + 1 / 16),
        # The same step where the largest weight is 4, or where it is 8, which becomes 6.
        ("mxfp4", 1 / 4),
        ("nf4", (1 - 0.696) / 2),
    ],
)
def test_the_error_is_half_a_step_at_most(format, bound, size):
    weight = random_weight(32, 128, size=size).astype(ml_dtypes.bfloat16).astype(np.float32)
    quantized = quantize([weight], format=format)
    error = np.abs(np.asarray(dequantize(quantized, jnp.float32)) - weight)
    block = FORMATS[format].block
    largest = np.abs(weight).reshape(32, -1, block).max(axis=-1)
    assert (error <= bound * np.repeat(largest, block, axis=1) + 1e-12).all()
    assert np.sqrt(np.mean(error**2)) < 0.12 * np.sqrt(np.mean(weight**2))


@pytest.mark.parametrize(
    ("format", "scales"),
    [
        ("nvfp4", (ml_dtypes.float8_e4m3fn, (16, 12))),
        ("mxfp4", (ml_dtypes.float8_e8m0fnu, (16, 6))),
        ("nf4", (np.float32, (16, 3))),
    ],
)
def test_stored_types_and_shapes(format, scales):
    members = [random_weight(rows, 192) for rows in (8, 4, 4)]
    quantized = quantize(members, format=format)
    assert quantized.shape == (16, 192)
    assert quantized.format == format
    weight = kernel_weight(quantized)
    assert (weight.packed.dtype, weight.packed.shape) == (np.uint8, (16, 96))
    assert (weight.scales.dtype, weight.scales.shape) == scales
    if format == "nvfp4":
        assert weight.global_scale.dtype == np.float32
        assert weight.global_scale.shape == (16,)
    else:
        assert weight.global_scale is None


@pytest.mark.parametrize("format", FORMATS)
def test_weights_are_rounded_to_bfloat16_first(format):
    weight = random_weight()
    rounded = quantize([weight.astype(ml_dtypes.bfloat16)], format=format)
    jax.tree.map(np.testing.assert_array_equal, quantize([weight], format=format), rounded)


@pytest.mark.parametrize(("format", "inputs"), [("nvfp4", 24), ("mxfp4", 48), ("nf4", 96)])
def test_inputs_must_fill_their_blocks(format, inputs):
    block = FORMATS[format].block
    message = rf"{format} needs a multiple of {block} .*\(8, {inputs}\).*model.format=bf16"
    refused(message, quantize, [random_weight(8, inputs)], format=format)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("member", [0, 1])
@pytest.mark.parametrize("format", FORMATS)
def test_weights_must_be_finite(format, member, value):
    members = [random_weight(8), random_weight(4)]
    members[member][2, 5] = value
    refused(rf"\({8 - 4 * member}, 64\).*not finite", quantize, members, format=format)


def test_an_unknown_format_is_named():
    with pytest.raises(UserError, match="format='fp8': must be one of nvfp4, mxfp4, nf4"):
        quantize([random_weight()], format="fp8")


# Bits of bfloat16 magnitudes: all finite ones, subnormal and small ones, and the largest.
BITS = ((0, 0x7F80), (0, 0x1000), (0x0400, 0x0600), (0x3F00, 0x4100), (0x7000, 0x7F80))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("format", FORMATS)
def test_codes_and_scales_equal_float_arithmetic_by_numpy(format, bits):
    generator = np.random.default_rng(0)
    signs = generator.integers(0, 2, (64, 256)) << 15
    stored = (generator.integers(*bits, (64, 256)) | signs).astype(np.uint16)
    weight = stored.view(ml_dtypes.bfloat16)
    quantized = quantize([weight], format=format)
    blocks = weight.astype(np.float32).reshape(64, -1, FORMATS[format].block)
    amax = np.abs(blocks).max(axis=-1)
    if format == "nvfp4":
        divisor = quantized.global_scale[0]
        ideal = (amax / np.float32(6)).astype(ml_dtypes.bfloat16).astype(np.float32) * divisor
        scales = np.clip(ideal, 0, 448).astype(ml_dtypes.float8_e4m3fn)
        scales = np.where(scales == 0, ml_dtypes.float8_e4m3fn(0.125), scales)
        ratios = blocks / (scales.astype(np.float32) / divisor)[..., None]
    elif format == "mxfp4":
        exponents = np.maximum(np.where(amax > 0, np.frexp(amax)[1] - 3, -127), -127)
        scales = (exponents + 127).astype(np.uint8)
        ratios = blocks * np.ldexp(np.float32(1), -exponents)[..., None]
    else:
        scales = amax
        ratios = blocks * (np.float32(1) / np.maximum(amax, np.float32(1e-38)))[..., None]
    np.testing.assert_array_equal(quantized.scales.view(np.uint8), scales.view(np.uint8))
    if format == "nf4":
        codebook = np.array(FORMATS["nf4"].codebook, np.float32)
        codes = np.searchsorted((codebook[:-1] + codebook[1:]) / 2, ratios.reshape(64, -1))
    else:
        size = np.abs(ratios.reshape(64, -1))
        codes = 8 * (ratios.reshape(64, -1) < 0)
        codes += sum(size > midpoint for midpoint in (0.25, 1.25, 2.5, 5.0))
        codes += sum(size >= midpoint for midpoint in (0.75, 1.75, 3.5))
    np.testing.assert_array_equal(codes_of(quantized), codes)


@pytest.mark.parametrize("amax", [7.8e-36, 1e-38, 1e-40, 0.0])
def test_a_global_scale_that_would_overflow_is_1(amax):
    """compressed-tensors writes 1.0; the smallest weight with a finite scale is 8e-36."""
    quantized = quantize([np.full((4, 32), amax, np.float32)], format="nvfp4")
    assert (quantized.scales.astype(np.float32) > 0).all()
    np.testing.assert_array_equal(quantized.global_scale, np.ones(4))
    assert not np.asarray(dequantize(quantized, jnp.float32)).any()
    finite = quantize([np.full((4, 32), 9e-36, np.float32)], format="nvfp4").global_scale
    assert (finite > 1e38).all()
    assert np.isfinite(finite).all()
