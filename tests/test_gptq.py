"""GPTQ: llm-compressor's codes, a reference in float64, and inputs that are hard to quantize."""

import pathlib

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from qerl_jax.policy.quant import dequantize, quantize_nvfp4
from qerl_jax.quantization.gptq import block_scales, gptq

GOLDEN = np.load(pathlib.Path(__file__).parent / "golden" / "gptq.npz")
CASES = ("many", "few")
E4M3 = ml_dtypes.float8_e4m3fn
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
NUMBERS = np.concatenate([E2M1, -E2M1])
SCALES = np.arange(1, 127, dtype=np.uint8).view(E4M3)  # all that are above 0
DAMPING = 0.01


def golden(case):
    """The weight, the moments, the scales and their divisor of a case."""
    weight, upper, scales, divisor = (
        GOLDEN[f"{case}_{name}"] for name in ("weight", "hessian", "scales", "divisor")
    )
    inputs = weight.shape[1]
    hessian = np.zeros((inputs, inputs), np.float32)
    hessian[np.triu_indices(inputs)] = upper
    return weight, np.triu(hessian) + np.triu(hessian, 1).T, scales.view(E4M3), divisor


def values(codes, scales, divisor):
    steps = np.repeat(np.asarray(scales, np.float64) / float(divisor), 16, axis=1)
    return NUMBERS[np.asarray(codes)] * steps


def smallest_scales(weight, divisor):
    """The scales that map the largest weight of each block to 6."""
    blocks = np.abs(np.asarray(weight, np.float64)).reshape(len(weight), -1, 16)
    return (blocks.max(axis=-1) / 6 * divisor).astype(np.float32).astype(E4M3)


def error(quantized, weight, hessian):
    difference = np.asarray(quantized, np.float64) - np.asarray(weight, np.float64)
    return ((difference @ np.asarray(hessian, np.float64)) * difference).sum()


def correlated(tokens, inputs, *, rank, noise, seed=0):
    """Inputs [tokens, inputs] that mostly lie in a space of few dimensions."""
    rng = np.random.default_rng(seed)
    mixed = rng.standard_normal((tokens, rank)) @ rng.standard_normal((rank, inputs))
    return mixed + noise * rng.standard_normal((tokens, inputs))


def moments(x):
    return (x.T @ x / len(x)).astype(np.float32)


def random_weight(outputs=32, inputs=128, seed=1):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((outputs, inputs)).astype(ml_dtypes.bfloat16).astype(np.float32)


def quantized(weight, hessian, **options):
    """The codes, scales and divisor of a weight, and whether they are finite."""
    grow = options.pop("grow", True)
    scales, divisor = block_scales(weight, jnp.diagonal(jnp.asarray(hessian)), grow=grow)
    codes, is_finite = gptq(weight, hessian, scales, divisor, **options)
    return np.asarray(codes), np.asarray(scales), float(divisor), bool(is_finite)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("orders", "name"), [(False, "codes"), (True, "ordered_codes")])
def test_codes_are_those_of_llm_compressor(case, orders, name):
    weight, hessian, scales, divisor = golden(case)
    codes, is_finite = gptq(weight, hessian, scales, divisor, DAMPING, orders=orders)
    assert is_finite
    np.testing.assert_array_equal(codes, GOLDEN[f"{case}_{name}"])


@pytest.mark.parametrize("case", CASES)
def test_scales_that_do_not_grow_are_those_of_llm_compressor(case):
    weight, hessian, expected, expected_divisor = golden(case)
    scales, divisor = block_scales(weight, np.diagonal(hessian), grow=False)
    np.testing.assert_array_equal(np.asarray(scales).view(np.uint8), expected.view(np.uint8))
    # A float32 quotient is computed in another order.
    np.testing.assert_allclose(divisor, expected_divisor, rtol=2e-7)


def by_inverse(weight, hessian, scales, divisor):
    """GPTQ as its authors write it: columns by descending energy, in float64."""
    hessian, weight = np.asarray(hessian, np.float64), np.array(weight, np.float64)
    energy = np.diagonal(hessian)
    order = np.argsort(-energy, kind="stable")
    damped = hessian + DAMPING * energy.mean() * np.eye(len(hessian))
    inverse = np.linalg.inv(damped[np.ix_(order, order)])
    factor = np.linalg.cholesky(inverse).T
    steps = np.repeat(np.asarray(scales, np.float64) / divisor, 16, axis=1)[:, order]
    rest = weight[:, order]
    codes = np.zeros(weight.shape, np.uint8)
    for j, column in enumerate(order):
        numbers = rest[:, j] / steps[:, j]
        code = np.abs(numbers[:, None] - NUMBERS).argmin(axis=1).astype(np.uint8)
        codes[:, column] = code
        moved = (rest[:, j] - NUMBERS[code] * steps[:, j]) / factor[j, j]
        rest[:, j + 1 :] -= moved[:, None] * factor[j, j + 1 :]
    return codes


def test_codes_are_those_of_a_reference_in_float64():
    weight, hessian = random_weight(64, 96), moments(correlated(500, 96, rank=24, noise=0.3))
    codes, scales, divisor, _ = quantized(weight, hessian)
    expected = by_inverse(weight, hessian, scales, divisor)
    # Where float32 falls on the other side of a tie, the rest of a row may differ.
    assert (NUMBERS[codes] == NUMBERS[expected]).all(axis=1).mean() > 0.9
    errors = [error(values(c, scales, divisor), weight, hessian) for c in (codes, expected)]
    assert errors[0] == pytest.approx(errors[1], rel=0.01)


def test_correlated_inputs_have_a_fraction_of_the_error_of_rounding():
    weight, hessian = random_weight(64, 256), moments(correlated(2000, 256, rank=32, noise=0.1))
    rounded = error(dequantize(quantize_nvfp4([weight]), jnp.float32), weight, hessian)
    errors = {}
    for grow in (False, True):
        for orders in (False, True):
            codes, scales, divisor, _ = quantized(weight, hessian, grow=grow, orders=orders)
            errors[grow, orders] = error(values(codes, scales, divisor), weight, hessian)
    assert 4 * max(errors.values()) < rounded
    assert errors[True, True] < errors[False, False]


def test_independent_inputs_are_rounded():
    """Without correlation there is nothing to make up for."""
    weight = random_weight(8, 64)
    codes, scales, divisor, _ = quantized(weight, np.eye(64, dtype=np.float32), grow=False)
    steps = np.repeat(scales.astype(np.float64) / divisor, 16, axis=1)
    nearest = np.abs((weight / steps)[..., None] - NUMBERS).argmin(axis=-1)
    np.testing.assert_array_equal(NUMBERS[codes], NUMBERS[nearest])


def hard(name):
    """A weight, and inputs that make it hard to quantize."""
    weight, x = random_weight(), correlated(300, 128, rank=32, noise=0.3)
    if name == "dead columns":
        x[:, [0, 5, 64, 127]] = 0
    elif name == "all columns dead":
        x[:] = 0
    elif name == "one token":
        x = x[:1]
    elif name == "fewer tokens than columns":
        x = x[:50]
    elif name == "outlier channel":
        x[:, 7] *= 3000
    elif name == "blocks of zeros":
        weight[:, 16:32] = 0
        weight[3] = 0
    elif name == "zero weight":
        weight[:] = 0
    elif name == "tiny weight":
        weight *= 2.0**-120
    elif name == "blocks of other sizes":
        weight *= np.exp2(-np.arange(128) // 16 * 3).astype(np.float32)
    return weight, moments(x)


HARD = (
    "dead columns", "all columns dead", "one token", "fewer tokens than columns",
    "outlier channel", "blocks of zeros", "zero weight", "tiny weight", "blocks of other sizes",
)  # fmt: skip


@pytest.mark.parametrize("name", HARD)
def test_what_is_hard_to_quantize(name):
    weight, hessian = hard(name)
    codes, scales, divisor, is_finite = quantized(weight, hessian)
    assert is_finite
    assert codes.dtype == np.uint8
    assert codes.max() < 16
    assert np.isfinite(scales.astype(np.float32)).all()
    smallest = smallest_scales(weight, divisor)
    assert (scales.astype(np.float32) >= smallest.astype(np.float32)).all()
    assert scales.astype(np.float32).min() > 0
    result = values(codes, scales, divisor)
    rounded = dequantize(quantize_nvfp4([weight]), jnp.float32)
    assert error(result, weight, hessian) <= error(rounded, weight, hessian) * (1 + 1e-6)
    assert (result[:, np.diagonal(hessian) == 0] == 0).all()
    assert (result[(weight == 0).all(axis=1)] == 0).all()
    again = quantized(weight, hessian)
    np.testing.assert_array_equal(codes, again[0])
    np.testing.assert_array_equal(scales, again[1])


def test_moments_without_a_factor_are_reported():
    x = np.ones((1, 64), np.float32)
    assert not quantized(random_weight(8, 64), moments(x), damping=0.0)[3]
    assert quantized(random_weight(8, 64), moments(x), damping=DAMPING)[3]


def test_no_scale_that_clips_nothing_has_a_smaller_error():
    weight = random_weight(16, 64)
    energy = np.random.default_rng(2).exponential(size=64).astype(np.float32) ** 2
    scales, divisor = (np.asarray(part) for part in block_scales(weight, energy))
    blocks = weight.astype(np.float64).reshape(16, 4, 16)
    default = smallest_scales(weight, divisor)

    def errors(scale):
        step = np.asarray(scale, np.float64)[..., None, None] / float(divisor)
        nearest = np.abs(blocks[..., None] - NUMBERS * step).min(axis=-1)
        return (energy.reshape(4, 16) * nearest**2).sum(axis=-1)

    least = np.full(scales.shape, np.inf)
    for scale in SCALES:
        step = scale.view(np.uint8).astype(int) - default.view(np.uint8)
        allowed = (step >= 0) & (step <= 8)
        least = np.where(allowed, np.minimum(least, errors(np.full(scales.shape, scale))), least)
    np.testing.assert_allclose(errors(scales), least, rtol=1e-4)
    growth = scales.astype(np.float32) / default.astype(np.float32)
    assert growth.min() == 1
    assert 1.5 < growth.max() <= 2
    assert 0.3 < (growth > 1).mean() < 0.9
