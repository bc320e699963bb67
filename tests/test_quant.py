"""The NVFP4 quantiser: code points, ties, signs, scales and errors."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from qerl_jax.errors import UserError
from qerl_jax.policy.quant import dequantize, kernel_weight, quantize_nvfp4


def codes_of(quantized):
    packed = np.asarray(quantized.packed)
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)


def random_weight(outputs=8, inputs=64, *, size=1.0, seed=0):
    return size * np.random.default_rng(seed).standard_normal((outputs, inputs), np.float32)


def unit_block(values):
    """One row whose scale is exactly 1: a largest weight of 6 has the global scale 448."""
    block = np.zeros((1, 16), np.float32)
    block[0, : len(values)] = values
    block[0, 15] = 6.0
    return block


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (0.0, 0), (0.5, 1), (1.0, 2), (1.5, 3), (2.0, 4), (3.0, 5), (4.0, 6), (6.0, 7),
        # Ties go to the even code, their neighbours in bfloat16 to the nearer one.
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


def test_signs_of_what_rounds_to_zero():
    # A weight that rounds to zero keeps its sign; a weight that is zero has none.
    codes = codes_of(quantize_nvfp4([unit_block([0.0, -0.0, 0.125, -0.125])]))
    np.testing.assert_array_equal(codes[0, :4], [0, 0, 0, 8])


def test_the_even_column_is_in_the_low_nibble():
    packed = quantize_nvfp4([unit_block([0.5, -6.0, 1.0])]).packed
    np.testing.assert_array_equal(packed[0, :2], [0xF1, 0x02])


def test_all_zero_weight():
    quantized = quantize_nvfp4([np.zeros((4, 32), np.float32)])
    assert not quantized.packed.any()
    np.testing.assert_array_equal(quantized.global_scale, np.ones(4))
    assert (quantized.scales.astype(np.float32) > 0).all()
    assert not np.asarray(dequantize(quantized, jnp.float32)).any()


def test_zero_and_tiny_blocks_in_a_weight():
    weight = random_weight(4, 64)
    weight[0, :16] = 0.0
    weight[1, 16:32] *= 1e-7
    quantized = quantize_nvfp4([weight])
    values = np.asarray(dequantize(quantized, jnp.float32))
    assert not values[0, :16].any()
    assert np.isfinite(values).all()
    assert (quantized.scales.astype(np.float32) > 0).all()
    np.testing.assert_allclose(values[1, 16:32], 0, atol=1e-4)


@pytest.mark.parametrize("size", [1e-4, 1.0, 300.0])
def test_the_error_is_half_a_step_at_most(size):
    weight = random_weight(32, 128, size=size).astype(ml_dtypes.bfloat16).astype(np.float32)
    quantized = quantize_nvfp4([weight])
    error = np.abs(np.asarray(dequantize(quantized, jnp.float32)) - weight)
    largest = np.repeat(np.abs(weight).reshape(32, 8, 16).max(axis=-1), 16, axis=1)
    # The widest step is from 4 to 6 of the largest weight's 6; FP8 rounds the scale by 1/16.
    assert (error <= (1 / 6 + 1 / 16) * largest + 1e-12).all()
    assert np.sqrt(np.mean(error**2)) < 0.12 * np.sqrt(np.mean(weight**2))


def test_stored_types_and_shapes():
    members = [random_weight(8), random_weight(4), random_weight(4)]
    quantized = quantize_nvfp4(members)
    assert quantized.shape == (16, 64)
    assert quantized.format == "nvfp4"
    stored = {name: (x.dtype, x.shape) for name, x in kernel_weight(quantized)._asdict().items()}
    assert stored == {
        "packed": (np.uint8, (16, 32)),
        "scales": (ml_dtypes.float8_e4m3fn, (16, 4)),
        "global_scale": (np.float32, (16,)),
    }


def test_members_share_the_smallest_global_scale():
    small, large = random_weight(8, size=0.1), random_weight(4, size=5.0, seed=1)
    together = quantize_nvfp4([small, large])
    alone = quantize_nvfp4([large])
    assert quantize_nvfp4([small]).global_scale[0] > alone.global_scale[0]
    np.testing.assert_array_equal(together.global_scale, np.full(12, alone.global_scale[0]))
    np.testing.assert_array_equal(together.packed[8:], alone.packed)
    np.testing.assert_array_equal(together.scales[8:].view(np.uint8), alone.scales.view(np.uint8))
    stacked = quantize_nvfp4([np.concatenate([small, large])])
    jax.tree.map(np.testing.assert_array_equal, together, stacked)


def test_weights_are_rounded_to_bfloat16_first():
    weight = random_weight()
    rounded = quantize_nvfp4([weight.astype(ml_dtypes.bfloat16)])
    jax.tree.map(np.testing.assert_array_equal, quantize_nvfp4([weight]), rounded)


def test_a_packed_weight_goes_through_jit():
    quantized = quantize_nvfp4([random_weight()])
    traced = jax.jit(dequantize, static_argnums=1)(quantized, jnp.float32)
    np.testing.assert_array_equal(traced, dequantize(quantized, jnp.float32))


def test_inputs_must_fill_their_blocks():
    with pytest.raises(UserError, match=r"multiple of 16 .*\(8, 24\).*model.format=bf16"):
        quantize_nvfp4([random_weight(8, 24)])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("member", [0, 1])
def test_weights_must_be_finite(member, value):
    members = [random_weight(8), random_weight(4)]
    members[member][2, 5] = value
    with pytest.raises(UserError, match=rf"\({8 - 4 * member}, 64\).*not finite"):
        quantize_nvfp4(members)
