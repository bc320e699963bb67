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
    return jnp.asarray(weight, jnp.float32).reshape(len(weight), -1, 16)


def values(packed):
    return np.asarray(dequantize(packed, jnp.float32))


def least_errors(weight, divisor, moments, default):
    """The least error of each block over all FP8 scales that are at least `default`, in float64."""
    blocks = np.asarray(blocks_of(weight), np.float64)
    least = np.full(blocks.shape[:2], np.inf)
    for scale in SCALES.astype(np.float64) / divisor:
        numbers = NUMBERS * scale
        nearest = numbers[np.abs(blocks[..., None] - numbers).argmin(axis=-1)]
        changed = nearest - blocks
        error = np.einsum("nia,iab,nib->ni", changed, moments, changed)
        allowed = scale >= default.astype(np.float64) / divisor
        least = np.where(allowed, np.minimum(least, error), least)
    return least


@pytest.mark.parametrize("weighted", [False, True])
def test_no_scale_is_better_than_the_one_that_is_found(weighted):
    weight = weights()
    divisor = scale_search.global_scale([jnp.asarray(weight, jnp.float32)])
    inputs = np.random.default_rng(1).standard_normal((200, 64)) * np.linspace(0.1, 3, 64)
    moments = np.stack([inputs[:, i : i + 16].T @ inputs[:, i : i + 16] for i in range(0, 64, 16)])
    if not weighted:
        moments = np.stack([np.eye(16)] * 4)
    given = jnp.asarray(moments, jnp.float32) if weighted else None
    found = scale_search.best_scales(blocks_of(weight), divisor, given)
    changed = values(quantize_nvfp4([weight], np.asarray(found))) - weight.astype(np.float64)
    changed = changed.reshape(len(weight), -1, 16)
    error = np.einsum("nia,iab,nib->ni", changed, moments, changed)
    default = quantize_nvfp4([weight]).scales if not weighted else np.zeros(error.shape)
    np.testing.assert_allclose(error, least_errors(weight, divisor, moments, default), rtol=1e-4)


def test_the_error_of_normal_weights():
    weight = np.random.default_rng(0).standard_normal((256, 1024)).astype(BFLOAT16)
    exact = weight.astype(np.float32)

    def error(scales=None):
        return np.linalg.norm(values(quantize_nvfp4([weight], scales)) - exact)

    whole = np.linalg.norm(exact)
    assert error() / whole == pytest.approx(0.095, abs=0.001)
    best = np.asarray(scale_search.best_weight_scales([weight]))
    assert error(best) / whole == pytest.approx(0.083, abs=0.001)


@pytest.mark.parametrize("zeros", [False, True])
def test_scales_and_rounding_are_those_of_the_quantizer(zeros):
    last = weights(4, 4) * BFLOAT16(0.1)
    last[:, :16] = 0
    if zeros:  # llm-compressor then divides the scales by 1.0, whatever the other members are.
        last[:] = 0
    members = [weights(2, 8), weights(3) * BFLOAT16(30), last]
    packed = quantize_nvfp4(members)
    weight = jnp.asarray(np.concatenate(members), jnp.float32)
    divisor = scale_search.global_scale([jnp.asarray(part, jnp.float32) for part in members])
    blocks = blocks_of(weight)
    assert set(packed.global_scale.tolist()) == {float(divisor)}
    scales = scale_search.default_scales(blocks, divisor)
    np.testing.assert_array_equal(np.asarray(scales), packed.scales)
    rounded = scale_search.round_blocks(blocks, scales, divisor).reshape(weight.shape)
    np.testing.assert_allclose(np.asarray(rounded), values(packed), rtol=1e-6)
    best = np.asarray(scale_search.best_weight_scales(members))
    np.testing.assert_array_equal(best[-4:, :1], packed.scales[-4:, :1])  # blocks of zeros
    for given, wanted in ((packed.scales, packed), (best, quantize_nvfp4(members, best))):
        again = quantize_nvfp4(members, given)
        jax.tree.map(np.testing.assert_array_equal, again, wanted)
        np.testing.assert_array_equal(again.scales, given)
