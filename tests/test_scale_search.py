"""Scales of NVFP4 blocks: the search finds the least error, and rounds as the quantizer does."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from qerl_jax.export import scale_search
from qerl_jax.policy.quant import dequantize, quantize_nvfp4

BFLOAT16 = ml_dtypes.bfloat16
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
NUMBERS = np.concatenate([-E2M1[:0:-1], E2M1])
SCALES = np.arange(1, 127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)  # all that are above 0


def weights(seed=0, outputs=24, inputs=64):
    return np.random.default_rng(seed).standard_t(4, (outputs, inputs)).astype(BFLOAT16)


def blocks_of(weight):
    return np.asarray(weight, np.float64).reshape(len(weight), -1, 16)


def values(packed):
    return np.asarray(dequantize(packed, jnp.float32))


def searched(members):
    """The scales that are found for a fused group, and how it is rounded without them."""
    packed = quantize_nvfp4(members)
    weight, divisor = np.concatenate(members), packed.global_scale[0]
    return np.asarray(scale_search.best_scales(weight, packed.scales, divisor)), packed


def errors(packed, weight):
    return np.square(blocks_of(values(packed)) - blocks_of(weight)).sum(axis=-1)


def test_no_scale_that_clips_nothing_is_better_than_the_one_that_is_found():
    weight = weights()
    default = quantize_nvfp4([weight])
    least = np.full(default.scales.shape, np.inf)
    for scale in SCALES:
        numbers = NUMBERS * (float(scale) / default.global_scale[0])
        nearest = numbers[np.abs(blocks_of(weight)[..., None] - numbers).argmin(axis=-1)]
        error = np.square(nearest - blocks_of(weight)).sum(axis=-1)
        larger = scale.astype(np.float32) >= default.scales.astype(np.float32)
        least = np.where(larger, np.minimum(least, error), least)
    found = quantize_nvfp4([weight], searched([weight])[0])
    np.testing.assert_allclose(errors(found, weight), least, rtol=1e-4)
    assert (errors(found, weight) <= errors(default, weight) * 1.00001).all()
    assert 0.3 < (found.scales != default.scales).mean() < 0.8


def test_the_error_of_normal_weights():
    weight = np.random.default_rng(0).standard_normal((256, 1024)).astype(BFLOAT16)

    def error(scales=None):
        found = errors(quantize_nvfp4([weight], scales), weight)
        return (found.sum() / np.square(blocks_of(weight)).sum()) ** 0.5

    assert error() == pytest.approx(0.095, abs=0.001)
    best, _ = searched([weight])
    assert error(best) == pytest.approx(0.083, abs=0.001)


@pytest.mark.parametrize("zeros", [False, True])
def test_rounding_is_that_of_the_quantizer(zeros):
    last = weights(4, 4) * BFLOAT16(0.1)
    last[:, :16] = 0
    if zeros:  # llm-compressor then divides the scales by 1.0, whatever the other members are.
        last[:] = 0
    members = [weights(2, 8), weights(3) * BFLOAT16(30), last]
    best, packed = searched(members)
    weight = jnp.asarray(np.concatenate(members), jnp.float32)
    blocks, divisor = weight.reshape(len(weight), -1, 16), packed.global_scale[0]
    rounded = scale_search.round_blocks(blocks, packed.scales, divisor).reshape(weight.shape)
    np.testing.assert_allclose(np.asarray(rounded), values(packed), rtol=1e-6)
    np.testing.assert_array_equal(best[-4:, :1], packed.scales[-4:, :1])  # blocks of zeros
    again = quantize_nvfp4(members, packed.scales)
    jax.tree.map(np.testing.assert_array_equal, again, packed)
    np.testing.assert_array_equal(quantize_nvfp4(members, best).scales, best)
