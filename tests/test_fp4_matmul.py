"""The definition of a weight in 4 bits, its product and the derivatives, against NumPy."""

import math
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import fp4_matmul as fp4
from pallas_kernels.fp4_matmul import reference

N, K, R = 48, 64, 4
FORMATS = list(fp4.FORMATS)


def defined(weight):
    """codebook[code] * scale, the product in float64; NVFP4's scale is a quotient in float32."""
    form = fp4.format_of(weight.scales.dtype)
    packed = np.asarray(weight.packed)
    nibbles = [packed & 15, packed >> 4]
    codes = np.stack(nibbles[::-1] if form.high_first else nibbles, axis=-1)
    scales = np.asarray(weight.scales).astype(np.float32)
    if form.name == "nvfp4":
        scales = scales / np.asarray(weight.global_scale)[:, None]
    codebook = np.array(form.codebook, np.float32).astype(np.float64)
    values = codebook[codes.reshape(len(packed), -1)]
    return values * np.repeat(scales, form.block, axis=1).astype(np.float64)


def random_weight(n=N, k=K, seed=0, *, format="nvfp4"):
    rng = np.random.default_rng(seed)
    form = fp4.FORMATS[format]
    scales = rng.uniform(50, 448, (n, k // form.block))
    if format != "nvfp4":
        scales = scales / 2000
    if format == "mxfp4":
        scales = 2.0 ** np.round(np.log2(scales))
    return fp4.Fp4Weight(
        packed=jnp.asarray(rng.integers(0, 256, (n, k // 2), np.uint8)),
        scales=jnp.asarray(scales.astype(form.scale_dtype)),
        global_scale=jnp.asarray(rng.uniform(1000, 3000, n), jnp.float32)
        if form.global_scale
        else None,
    )


def random_arguments(dtype=jnp.float32, *, rows=(3, 5)):
    """x, (A, B) and bias."""
    rng = np.random.default_rng(1)

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    return draw(*rows, K), (draw(R, K), draw(N, R)), draw(N)


def float64(x):
    return np.asarray(x).astype(np.float64)


def every_code_under_many_scales(format):
    """With all scales of NVFP4 under some divisors, and of MXFP4 those of normal numbers."""
    form, divisors = fp4.FORMATS[format], None
    if format == "nvfp4":
        scales = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
        scales = scales[~np.isnan(scales.astype(np.float32))]
        assert len(scales) == 254
        divisors = np.array([1.0, 448.0, 2688.0 / 0.0371, 3.1e-3, 7.7e5], np.float32)
    elif format == "mxfp4":
        scales = np.arange(2, 253, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu)
    else:
        scales = np.random.default_rng(0).lognormal(-3, 3, 251).astype(np.float32)
    codes = np.tile(np.arange(16, dtype=np.uint8), len(scales) * form.block // 16)
    even, odd = codes[0::2], codes[1::2]
    packed = even << 4 | odd if form.high_first else even | odd << 4
    rows = 1 if divisors is None else len(divisors)
    return fp4.Fp4Weight(
        packed=jnp.asarray(np.tile(packed, (rows, 1))),
        scales=jnp.asarray(np.tile(scales, (rows, 1))),
        global_scale=None if divisors is None else jnp.asarray(divisors),
    )


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("format", FORMATS)
def test_every_code_under_many_scales(format, dtype, jit):
    weight = every_code_under_many_scales(format)
    dequantize = jax.jit(fp4.dequantize, static_argnums=1) if jit else fp4.dequantize
    values = dequantize(weight, jnp.dtype(dtype))
    expected = defined(weight).astype(np.float32).astype(dtype)
    assert values.dtype == dtype
    np.testing.assert_array_equal(float64(values), float64(expected))


@pytest.mark.parametrize(
    ("format", "values"),
    [("nvfp4", (0.5, 3)), ("mxfp4", (2, 12)), ("nf4", (0, -0.5250730514526367 * 2))],
)
def test_which_nibble_holds_the_even_column(format, values):
    form = fp4.FORMATS[format]
    weight = fp4.Fp4Weight(
        packed=jnp.full((1, form.block // 2), 0x72, jnp.uint8),
        scales=jnp.full((1, 1), 1.0 if form.global_scale else 2.0, form.scale_dtype),
        global_scale=jnp.full(1, 2.0) if form.global_scale else None,
    )
    first = fp4.dequantize(weight, jnp.float32)[0, :4]
    np.testing.assert_array_equal(first, np.float32([*values, *values]))


@pytest.mark.parametrize("rows", [(), (1,), (7,), (2, 3)], ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_product_with_lora_and_bias(dtype, tolerance, rows):
    weight = random_weight()
    x, (a, b), bias = random_arguments(dtype, rows=rows)
    y = fp4.fp4_matmul(x, weight, lora=(a, b), bias=bias)
    assert y.dtype == dtype
    assert y.shape == (*rows, N)
    dense = float64(defined(weight).astype(dtype))
    expected = float64(x) @ dense.T + float64(x) @ float64(a).T @ float64(b).T + float64(bias)
    np.testing.assert_allclose(float64(y), expected, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize("format", FORMATS)
def test_product_alone(format):
    weight = random_weight(format=format)
    x, _, _ = random_arguments()
    expected = float64(x) @ defined(weight).T
    np.testing.assert_allclose(fp4.fp4_matmul(x, weight), expected, atol=1e-5)


@pytest.mark.parametrize("order", [lambda weight: weight, fp4.to_tiles], ids=["rows", "tiles"])
def test_float32_of_bfloat16(order):
    weight = random_weight()
    x, _, _ = random_arguments("bfloat16", rows=(2, 3))
    y = fp4.fp4_matmul(x, order(weight), dtype=jnp.float32)
    assert y.dtype == jnp.float32
    expected = float64(x) @ float64(defined(weight).astype("bfloat16")).T
    np.testing.assert_allclose(y, expected, atol=1e-5)
    with pytest.raises(ValueError, match="x has 8 inputs"):
        fp4.fp4_matmul(x[..., :8], weight, dtype=jnp.float32)


def loss(x, lora, bias, weight, dy):
    return jnp.sum(fp4.fp4_matmul(x, weight, lora=lora, bias=bias).astype(jnp.float32) * dy)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 3e-2)])
@pytest.mark.parametrize(
    ("format", "wrap"),
    [
        ("nvfp4", lambda f: f),
        ("nvfp4", jax.jit),
        ("nvfp4", jax.checkpoint),
        ("mxfp4", jax.jit),
        ("nf4", jax.jit),
    ],
)
def test_derivatives(format, wrap, dtype, tolerance):
    weight = random_weight(format=format)
    x, (a, b), bias = random_arguments(dtype)
    dy = np.random.default_rng(2).standard_normal((3, 5, N)).astype(dtype).astype(np.float32)
    dx, (da, db), dbias = jax.grad(wrap(loss), argnums=(0, 1, 2))(x, (a, b), bias, weight, dy)

    def flat(x):
        return float64(x).reshape(-1, x.shape[-1])

    dense = float64(defined(weight).astype(dtype))
    through_b = flat(dy) @ float64(b)
    expected = {
        "dx": (dx, flat(dy) @ dense + through_b @ float64(a)),
        "dA": (da, through_b.T @ flat(x)),
        "dB": (db, flat(dy).T @ (flat(x) @ float64(a).T)),
        "dbias": (dbias, flat(dy).sum(axis=0)),
    }
    for name, (actual, want) in expected.items():
        assert actual.dtype == dtype, name
        actual = float64(actual).reshape(want.shape)
        tolerated = tolerance * np.abs(want).max()
        np.testing.assert_allclose(actual, want, atol=tolerated, err_msg=name)


@pytest.mark.parametrize("format", ["nvfp4", "nf4"])  # The scales of MXFP4 have no zero.
def test_the_weight_has_no_gradient(format):
    weight = random_weight(format=format)
    x, lora, bias = random_arguments()
    grad = jax.grad(loss, argnums=3, allow_int=True)(x, lora, bias, weight, jnp.ones((3, 5, N)))
    assert grad.packed.dtype == jax.dtypes.float0
    for gradient in jax.tree.leaves((grad.scales, grad.global_scale)):
        assert not np.asarray(gradient).astype(np.float32).any()


def dense_residuals(function, x):
    """The floating-point arrays of N K elements that wait for the backward pass."""
    residuals = jax.tree.leaves(jax.vjp(function, x)[1])
    assert residuals
    return [r for r in residuals if r.size >= N * K and jnp.issubdtype(r.dtype, jnp.floating)]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["", "jit", "remat"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("format", FORMATS)
def test_no_dense_weight_waits_for_the_backward_pass(format, dtype, wrap):
    weight = random_weight(format=format)
    x, lora, bias = random_arguments(dtype)
    function = wrap(lambda x: fp4.fp4_matmul(x, weight, lora=lora, bias=bias))
    assert not dense_residuals(function, x)
    # It would be seen.
    assert dense_residuals(lambda x: reference.matmul(x, weight), x)


def carried_by_loops(function, *args):
    """The largest number of floats in an array that a compiled while loop carries."""
    text = jax.jit(function).lower(*args).compile().as_text()
    loops = [line.split(" while(")[0] for line in text.splitlines() if " while(" in line]
    assert loops
    shapes = re.findall(r"(?:f32|bf16)\[([\d,]*)\]", " ".join(loops))
    return max(math.prod(int(n) for n in shape.split(",") if n) for shape in shapes)


@pytest.mark.parametrize("derivative", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_a_loop_does_not_carry_a_dense_weight(format, derivative):
    weight = random_weight(64, 64, format=format)
    x = jax.random.normal(jax.random.key(0), (4, 64), jnp.bfloat16)

    def repeated(matmul):
        def total(x, w):
            return jnp.sin(matmul(x, w)).astype(jnp.float32).sum()

        step = jax.grad(total) if derivative else matmul
        return lambda x, w: jax.lax.fori_loop(0, 9, lambda _, x: jnp.sin(step(x, w)), x)

    assert carried_by_loops(repeated(fp4.fp4_matmul), x, weight) <= 64 * 64 // 4
    # It would be seen.
    dense = fp4.dequantize(weight, jnp.bfloat16)
    assert carried_by_loops(repeated(fp4.dot), x, dense) == 64 * 64


@pytest.mark.gpu
@pytest.mark.parametrize("remat", [False, True])
def test_no_dense_weight_waits_in_compiled_memory(remat):
    # XLA may merge the dequantization of the two passes and keep its result.
    size, depth = 1024, 8
    weights = [random_weight(size, size, seed) for seed in range(depth)]

    def total(x, weights):
        def layer(x, weight):
            return jnp.tanh(fp4.fp4_matmul(x, weight))

        for weight in weights:
            x = (jax.checkpoint(layer) if remat else layer)(x, weight)
        return x.astype(jnp.float32).sum()

    x = jnp.ones((8, size), jnp.bfloat16)
    memory = jax.jit(jax.grad(total)).lower(x, weights).compile().memory_analysis()
    assert memory.temp_size_in_bytes < depth / 2 * size * size * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": np.ones((2, K), np.int32)}, "x is int32, expected float32, bfloat16 or float16"),
        ({"x": np.ones((2, K - 1), np.float32)}, "x has 63 inputs, the weight 64"),
        ({"packed": np.zeros((N, K // 2), np.int8)}, "packed is int8, expected uint8"),
        (
            {"scales": np.ones((N, 3), jnp.float8_e4m3fn)},
            r"nvfp4 scales are \(48, 3\), expected \(48, 4\)",
        ),
        (
            {"scales": np.ones((N, 4), np.uint8)},
            r"scales are uint8, expected float8_e4m3fn \(nvfp4\), float8_e8m0fnu \(mxfp4\), "
            r"float32 \(nf4\)",
        ),
        ({"global_scale": np.ones(1)}, r"nvfp4 global_scale is \(1,\), expected \(48,\)"),
        ({"global_scale": None}, r"nvfp4 global_scale is None, expected \(48,\)"),
        (
            {"scales": np.ones((N, 2), jnp.float8_e8m0fnu)},
            r"mxfp4 global_scale is \(48,\), expected None",
        ),
        (
            {"scales": np.ones((N, 4), np.float32), "global_scale": None},
            r"nf4 scales are \(48, 4\), expected \(48, 1\)",
        ),
        (
            {"lora": (np.ones((R, K)), np.ones((N, R + 1)))},
            r"lora is \(4, 64\), \(48, 5\), expected \(R, 64\), \(48, R\)",
        ),
        ({"lora": (np.ones((R, N)), np.ones((N, R)))}, r"lora is \(4, 48\), \(48, 4\)"),
        ({"bias": np.ones(K)}, r"bias is \(64,\), expected \(48,\)"),
    ],
)
def test_errors_name_the_values(changes, message):
    x, lora, bias = random_arguments()
    arrays = {"x": x, "lora": lora, "bias": bias, **random_weight()._asdict()} | changes
    weight = fp4.Fp4Weight(*(arrays.pop(name) for name in fp4.Fp4Weight._fields))
    with pytest.raises(ValueError, match=message):
        fp4.fp4_matmul(arrays.pop("x"), weight, **arrays)


@pytest.mark.parametrize(("format", "inputs"), [("nvfp4", 24), ("mxfp4", 48), ("nf4", 96)])
def test_inputs_are_a_multiple_of_the_block(format, inputs):
    form = fp4.FORMATS[format]
    weight = random_weight(N, inputs, format=format)
    message = f"the {format} weight has {inputs} inputs, expected a multiple of {form.block}"
    with pytest.raises(ValueError, match=message):
        fp4.fp4_matmul(jnp.ones((2, inputs)), weight)


def test_several_errors_come_together():
    x, _, _ = random_arguments()
    with pytest.raises(ValueError, match=r"inputs.*bias"):
        fp4.fp4_matmul(x[..., 1:], random_weight(), bias=jnp.ones(1))
