"""The fused kernels of a decode step, compared with plain operations in float64."""

import contextlib
import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from warpgroup_kernel import BACKENDS, assert_close, on_gpu, use_decode_kernels, wide

from pallas_kernels import decode, device
from pallas_kernels.decode import (
    attention,
    attention_queries,
    attention_sm90,
    delta,
    gated_attention,
    layer,
    norms,
    self_test,
    to_cache,
)
from pallas_kernels.decode import attention_products as products
from pallas_kernels.decode.attention import AttentionInputs, AttentionParts
from pallas_kernels.fp4_matmul import e4m3, lora_shrink
from qerl_jax.policy.layers.attention import attend_from, attend_to_cache, rotate
from qerl_jax.policy.layers.linear import rms_norm

EMPTY = float(np.finfo(np.float32).min)  # the largest score of a part without a key


def draw(index, *shape, dtype=jnp.bfloat16):
    key = jax.random.fold_in(jax.random.key(0), index)
    return jax.random.normal(key, shape, jnp.float32).astype(dtype)


def rounded(x):
    return wide(jnp.asarray(x, jnp.float32).astype(jnp.bfloat16))


def assert_xa_partials(partials, x, a):
    """Asserts that partials add up to x A^T, in whole groups of columns; or are None without A."""
    if a is None:
        assert partials is None
        return
    assert partials.shape[1:] == (len(x), -(-len(a) // 32) * 32)
    product = wide(partials).sum(axis=0)
    assert_close(product[:, : len(a)], wide(x) @ wide(a).T, 1e-5)
    assert not product[:, len(a) :].any()


@pytest.mark.parametrize(
    ("platform", "capability", "dtype", "expected"),
    [
        ("gpu", "9.0", jnp.float8_e4m3fn, True),
        ("gpu", "12.0", jnp.bfloat16, True),
        ("gpu", "8.0", jnp.bfloat16, True),
        ("gpu", "8.6", jnp.float8_e4m3fn, False),
        ("gpu", "7.5", jnp.bfloat16, False),
        ("cpu", "", jnp.bfloat16, False),
    ],
)
def test_which_devices_are_supported(platform, capability, dtype, expected, monkeypatch):
    client = types.SimpleNamespace(platform_version="CUDA 13000")
    device = types.SimpleNamespace(platform=platform, client=client, compute_capability=capability)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert decode.supports_device(jnp.dtype(dtype)) == expected


@pytest.mark.parametrize("interpret", BACKENDS)
@pytest.mark.parametrize(
    ("rows", "width", "rank"),
    [
        pytest.param(1, 576, 24, marks=pytest.mark.slow),
        (5, 1100, 96),
        pytest.param(70, 640, 32, marks=pytest.mark.slow),
        (130, 512, 40),
        (3, 96, 0),
    ],
)
def test_add_rmsnorm(rows, width, rank, interpret):
    x, y = draw(1, rows, width), draw(2, rows, width)
    scale, a = draw(3, width, dtype=jnp.float32), draw(4, rank, width) if rank else None
    run = jax.jit(functools.partial(norms.add_rmsnorm, interpret=interpret))
    got = run(x, y, scale, a)
    residual = rounded(wide(x) + wide(y))
    np.testing.assert_array_equal(wide(got.residual), residual)
    assert_close(got.scaled, residual * wide(scale))
    assert_close(wide(got.square_partials).sum(axis=0), np.mean(residual**2, axis=1), 1e-6)
    assert_xa_partials(got.xa_partials, got.scaled, a)
    for _ in range(3):
        again = run(x, y, scale, a)
        for name in ("residual", "scaled", "square_partials"):
            np.testing.assert_array_equal(getattr(again, name), getattr(got, name))
        if rank:
            np.testing.assert_array_equal(again.xa_partials[:, :rows], got.xa_partials[:, :rows])


def square_partials_of(factor, count=3):
    """Partial mean squares of rows with which a norm without epsilon has this factor."""
    parts = jnp.arange(1, count + 1)[:, None] / (count * (count + 1) / 2)
    return (parts / factor**2).astype(jnp.float32)


@pytest.mark.parametrize("interpret", BACKENDS)
@pytest.mark.parametrize(
    ("rows", "width", "rank"),
    [(1, 1100, 32), pytest.param(17, 576, 64, marks=pytest.mark.slow), (70, 640, 0)],
)
def test_swiglu(rows, width, rank, interpret):
    gate_up, factor = draw(1, rows, 2 * width), jnp.abs(draw(2, rows, dtype=jnp.float32))
    a = draw(3, rank, width) if rank else None
    partials = square_partials_of(factor)
    hidden, xa_partials = norms.swiglu(gate_up, partials, a, eps=0.0, interpret=interpret)
    gate, up = np.split(wide(gate_up) * wide(factor)[:, None], 2, axis=1)
    assert_close(hidden, gate / (1 + np.exp(-gate)) * up, 6e-3)
    assert_xa_partials(xa_partials, hidden, a)


def draw_inputs(rows, group, cache_shape, lengths, *, norm, biased, partials=3, dtype=jnp.bfloat16):
    """Random inputs of attention, and the factor of each row's norm."""
    kv_heads, _, head_dim = cache_shape
    outputs = kv_heads * (group + 2) * head_dim
    factor = jnp.abs(draw(2, rows, dtype=jnp.float32))
    angle = draw(4, rows, head_dim // 2, dtype=jnp.float32)
    inputs = AttentionInputs(
        qkv=draw(1, rows, outputs),
        square_partials=square_partials_of(factor, partials) - 1e-6 / partials,
        cosines=jnp.cos(angle),
        sines=jnp.sin(angle),
        lengths=jnp.asarray(lengths, jnp.int32),
        bias=draw(3, outputs) if biased else None,
        q_norm=draw(7, head_dim, dtype=jnp.float32) if norm else None,
        k_norm=draw(8, head_dim, dtype=jnp.float32) if norm else None,
        keys=draw(5, rows, *cache_shape).astype(dtype),
        values=draw(6, rows, *cache_shape).astype(dtype),
    )
    return inputs, factor


def reference_attention(inputs, factor, **limits):
    """What `transformer` computes from a product that lacks its norm's factor and bias."""
    rows, kv_heads, _, head_dim = inputs.keys.shape
    heads = inputs.num_heads
    bias = 0.0 if inputs.bias is None else wide(inputs.bias)
    projected = jnp.asarray(wide(inputs.qkv) * wide(factor)[:, None] + bias, jnp.float32)
    projected = projected.astype(inputs.qkv.dtype).reshape(rows, 1, -1, head_dim)
    q, k, v = jnp.split(projected, (heads, heads + kv_heads), axis=2)
    if inputs.q_norm is not None:
        q = rms_norm(q, inputs.q_norm, 1e-6)
        k = rms_norm(k, inputs.k_norm, 1e-6)
    angles = inputs.cosines[:, None, None], inputs.sines[:, None, None]
    q, k = (rotate(x, angles) for x in (q, k))
    new = *jnp.ogrid[:rows, :kv_heads], inputs.lengths[:, None]
    keys = inputs.keys.at[new].set(to_cache(k[:, 0], inputs.keys.dtype))
    values = inputs.values.at[new].set(to_cache(v[:, 0], inputs.values.dtype))
    operands = (x.astype(jnp.float32) for x in (q, keys, values))
    attended = attend_to_cache(*operands, inputs.lengths + 1, **limits)
    return wide(attended).reshape(rows, -1), keys, values


def assert_same_cache(new, old):
    """Other roundings may change the last bit of a few keys, also before they are rotated.

    A rotation keeps the length of a pair of numbers, of which one may come out near zero.
    """
    new, old, step = wide(new), wide(old), float(jnp.finfo(old.dtype).eps)
    assert (new != old).mean() < 1e-3
    pairs = np.hypot(*np.split(old, 2, axis=-1))
    np.testing.assert_array_less(abs(new - old), step * (np.tile(pairs, 2) + 2**-6))


# Of `test_attention`: heads of the cache, queries of each, positions, width of a head, and SMs.
SIZES = (
    (2, 7, 200, 64, 132),
    (1, 3, 133, 128, 132),
    (2, 1, 70, 64, 1),
    (1, 17, 64, 32, 132),
    (1, 2, 600, 32, 132),
    (1, 2, 129, 256, 132),
)
FAST = ((SIZES[1], (jnp.float8_e4m3fn, False)), (SIZES[4], (jnp.bfloat16, True)))


@pytest.mark.parametrize("interpret", BACKENDS)
@pytest.mark.parametrize(
    ("kv_heads", "group", "positions", "head_dim", "num_sms", "dtype", "qk_norm"),
    [
        pytest.param(*sizes, *kind, marks=() if (sizes, kind) in FAST else pytest.mark.slow)
        for sizes in SIZES
        for kind in itertools.product((jnp.bfloat16, jnp.float8_e4m3fn), (True, False))
    ],
)
def test_attention(dtype, qk_norm, kv_heads, group, positions, head_dim, num_sms, interpret):
    lengths = [0, positions - 1, positions // 2, 63, min(128, positions - 1)]
    cache_shape = kv_heads, positions, head_dim
    inputs, factor = draw_inputs(
        len(lengths), group, cache_shape, lengths, norm=qk_norm, biased=True, dtype=dtype
    )
    a = draw(9, 32, kv_heads * group * head_dim)
    options = {"eps": 1e-6, "num_sms": num_sms, "interpret": interpret}

    @jax.jit
    def run(inputs):
        parts, keys, values = attention.attend(inputs, **options)
        merged = attention.merge_parts(parts, a, dtype=inputs.qkv.dtype, interpret=interpret)
        return *merged, keys, values

    attended, xa_partials, *caches = run(inputs)
    split = num_sms >= 2 * len(lengths) * kv_heads and positions > 128
    assert (attention.num_parts(inputs.keys, num_sms) > 1) == split
    if not split:
        whole = jax.jit(functools.partial(attention.attend_whole, **options))(inputs)
        for actual, expected in zip(whole, (attended, *caches), strict=True):
            np.testing.assert_array_equal(wide(actual), wide(expected))
    expected, keys, values = reference_attention(inputs, factor)
    assert_close(attended, expected)
    assert_xa_partials(xa_partials, attended, a)
    assert_same_cache(caches[0], keys)
    assert_same_cache(caches[1], values)


def with_hidden(inputs, first):
    """The inputs with NaN in the cache before the first position [M] of what a row may read.

    The last positions of a cache are always read as a whole block.
    """
    first = jnp.minimum(jnp.asarray(first), inputs.keys.shape[2] - products.BLOCK)
    is_hidden = jnp.arange(inputs.keys.shape[2]) < first[:, None]
    assert is_hidden.any()
    is_hidden = is_hidden[:, None, :, None]
    return is_hidden, inputs._replace(
        keys=jnp.where(is_hidden, jnp.nan, inputs.keys),
        values=jnp.where(is_hidden, jnp.nan, inputs.values),
    )


def shown(is_hidden, inputs, caches):
    """The caches with the numbers of the inputs at hidden positions, which still are NaN."""
    for cache in caches:
        assert np.isnan(wide(cache)[np.broadcast_to(is_hidden, cache.shape)]).all()
    olds = inputs.keys, inputs.values
    return [jnp.where(is_hidden, x, y) for x, y in zip(olds, caches, strict=True)]


def lengths_at_borders(positions, window):
    """Lengths of rows whose window begins in the first block, at the border of one, or beyond."""
    begins = {0, 1, 63, 64, 65, 128, 255, 256, 257, positions - window}
    lengths = {0, *(first + window - 1 for first in begins), window - 2, positions // 2}
    return sorted(length for length in lengths if 0 <= length < positions)


@pytest.mark.parametrize("interpret", BACKENDS)
@pytest.mark.parametrize(
    ("kv_heads", "group", "positions", "window", "num_sms"),
    [
        (1, 2, 400, 128, 132),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (1, 3, 333, 130, 132),
                (2, 8, 600, 128, 132),
                (2, 8, 300, 1, 1),
                (1, 9, 200, 64, 132),
            )
        ),
    ],
)
def test_attention_with_sinks_and_a_window(kv_heads, group, positions, window, num_sms, interpret):
    """Of rows shorter and longer than the window; what is before it is not read."""
    lengths = lengths_at_borders(positions, window)
    cache_shape, heads = (kv_heads, positions, 64), kv_heads * group
    options = {"norm": False, "biased": True}
    inputs, factor = draw_inputs(len(lengths), group, cache_shape, lengths, **options)
    sinks, a = draw(10, heads, dtype=jnp.float32), draw(9, 32, heads * 64)
    is_hidden, given = with_hidden(inputs, inputs.lengths + 1 - window)

    @jax.jit
    def run(inputs):
        options = {"eps": 1e-6, "num_sms": num_sms, "interpret": interpret}
        parts, keys, values = attention.attend(inputs, window=window, **options)
        options = {"dtype": inputs.qkv.dtype, "interpret": interpret}
        return *attention.merge_parts(parts, a, sinks=sinks, **options), keys, values

    attended, xa_partials, *caches = run(given)
    expected, *right = reference_attention(inputs, factor, sinks=sinks, window=window)
    assert_close(attended, expected)
    assert_xa_partials(xa_partials, attended, a)
    for cache, want in zip(shown(is_hidden, inputs, caches), right, strict=True):
        assert_same_cache(cache, want)


def several_tokens(a, attend, count, interpret, sinks=None):
    """Returns attention of several tokens of each row, x A^T, and the updated keys and values."""

    @jax.jit
    def run(inputs):
        written = attention_queries.write(inputs, eps=1e-6, interpret=interpret)
        parts = attend(written, count=count)
        options = {"heads": inputs.num_heads, "interpret": interpret, "sinks": sinks}
        merged = attention.merge_parts(parts, a, dtype=inputs.qkv.dtype, **options)
        return *merged, written.keys, written.values

    return run


def draw_several(count, group, cache_shape, lengths, **options):
    """As `draw_inputs`, of several tokens of each row."""
    rows = len(lengths)
    inputs, factor = draw_inputs(rows * count, group, cache_shape, lengths, **options)
    return inputs._replace(keys=inputs.keys[:rows], values=inputs.values[:rows]), factor


def assert_several(inputs, factor, attended, keys, values, **limits):
    """Compares with the definition, one token after the other; some of them are not written."""
    rows, positions = len(inputs.lengths), inputs.keys.shape[2]
    count, expected = len(factor) // rows, inputs
    for token in range(count):
        own = slice(token, None, count)
        written = (inputs.lengths > 0) | (token == 0)
        expected = expected._replace(
            qkv=inputs.qkv[own],
            square_partials=inputs.square_partials[:, own],
            cosines=inputs.cosines[own],
            sines=inputs.sines[own],
            lengths=jnp.where(written, inputs.lengths + token, positions),
        )
        right, *caches = reference_attention(expected, factor[own], **limits)
        seen = np.asarray(expected.lengths) < positions
        assert seen.any()
        # The last bit of a new key is an eighth of it in a cache of float8.
        tolerance = 4e-3 if keys.dtype == jnp.bfloat16 else 8e-3
        assert_close(attended[own][seen], right[seen], tolerance)
        expected = expected._replace(keys=caches[0], values=caches[1])
    assert_same_cache(keys, expected.keys)
    assert_same_cache(values, expected.values)


@pytest.mark.parametrize("interpret", BACKENDS)
@pytest.mark.parametrize(
    ("kv_heads", "group", "positions", "window"),
    [
        (1, 2, 400, 128),
        *(
            pytest.param(2, 8, *case, marks=pytest.mark.slow)
            for case in ((333, 130), (200, 5), (133, 64))
        ),
    ],
)
def test_several_tokens_with_sinks_and_a_window(kv_heads, group, positions, window, interpret):
    """No block is read that is before the window of a row's first token."""
    lengths = lengths_at_borders(positions, window)
    options, heads = {"norm": False, "biased": True}, kv_heads * group
    inputs, factor = draw_several(4, group, (kv_heads, positions, 64), lengths, **options)
    sinks, a = draw(10, heads, dtype=jnp.float32), draw(9, 32, heads * 64)
    block = products.BLOCK
    is_hidden, given = with_hidden(inputs, (inputs.lengths + 1 - window) // block * block)
    attend = functools.partial(
        attention_queries.attend, num_sms=132, window=window, interpret=interpret
    )
    attended, _, *caches = several_tokens(a, attend, 4, interpret, sinks)(given)
    caches = shown(is_hidden, inputs, caches)
    assert_several(inputs, factor, attended, *caches, sinks=sinks, window=window)


@pytest.mark.parametrize("interpret", BACKENDS)
@pytest.mark.parametrize(
    ("count", "kv_heads", "group", "positions", "head_dim", "num_sms", "dtype", "qk_norm"),
    [
        (3, 1, 6, 133, 32, 132, jnp.float8_e4m3fn, True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (8, 2, 7, 200, 64, 132, jnp.bfloat16, False),
                (2, 2, 1, 70, 32, 1, jnp.bfloat16, True),
                (4, 1, 5, 330, 128, 1000, jnp.bfloat16, True),
                (2, 1, 9, 129, 256, 132, jnp.bfloat16, False),
                (7, 1, 3, 40, 128, 132, jnp.bfloat16, False),
            )
        ),
    ],
)
def test_attention_of_several_tokens(
    count, kv_heads, group, positions, head_dim, num_sms, dtype, qk_norm, interpret
):
    """Of a row that waits, of short ones, and of some that reach the end of the cache."""
    lengths = [0, 1, min(62, positions - 9), positions - count, positions - 1]
    inputs, factor = draw_several(
        *(count, group, (kv_heads, positions, head_dim), lengths),
        norm=qk_norm,
        biased=True,
        dtype=dtype,
    )
    a = draw(9, 32, kv_heads * group * head_dim)
    attend = functools.partial(attention_queries.attend, num_sms=num_sms, interpret=interpret)
    attended, xa_partials, *caches = several_tokens(a, attend, count, interpret)(inputs)
    assert_xa_partials(xa_partials, attended, a)
    assert_several(inputs, factor, attended, *caches)


@pytest.mark.parametrize("interpret", BACKENDS)
@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "dtype", "in_order"),
    [
        (1, 2, 32, jnp.bfloat16, False),
        pytest.param(2, 7, 128, jnp.bfloat16, True, marks=pytest.mark.slow),
        pytest.param(2, 2, 64, jnp.float8_e4m3fn, False, marks=pytest.mark.slow),
    ],
)
def test_attention_of_an_extension(
    kv_heads, group, head_dim, dtype, in_order, interpret, monkeypatch
):
    """Rows begin with their first token again, and end with padding; one is not there."""
    use_decode_kernels(monkeypatch, interpret)
    tokens, positions, counts, begins = 12, 136, (12, 9, 2), (125, 100, 1)
    places = np.full((3, tokens), positions, np.int32)
    for row, (count, begin) in enumerate(zip(counts, begins, strict=True)):
        places[row, :count] = [0, *range(begin, begin + count - 1)]
    rows = None if in_order else jnp.asarray([3, 1, 4], jnp.int32)
    live = [0, 1, 2] if in_order else [3, 1]
    queries = draw(1, 3, tokens, kv_heads * group, head_dim)
    cache_shape = 3 if in_order else 4, kv_heads, positions, head_dim
    keys, values = (draw(seed, *cache_shape).astype(dtype) for seed in (2, 3))
    attended = jax.jit(layer.attend_from)(queries, keys, values, places, rows)
    assert attended.dtype == queries.dtype
    for row, source in enumerate(live):
        own = queries[row : row + 1].astype(jnp.float32)
        caches = (x[source : source + 1].astype(jnp.float32) for x in (keys, values))
        expected = attend_from(own, *caches, places[row : row + 1])
        assert_close(attended[row, : counts[row]], wide(expected)[0, : counts[row]])


@pytest.mark.slow  # `test_sm90_attention_of_several_tokens_tests_itself` has one by default.
@pytest.mark.parametrize(
    ("count", "kv_heads", "group", "positions", "lengths", "num_sms"),
    [
        (8, 2, 7, 136, [0, 50], 1),
        (3, 1, 5, 200, [0, 64, 199], 132),
        (2, 1, 6, 136, [62, 135], 132),
        (8, 1, 12, 72, [70, 1], 132),  # more queries than a CTA has
    ],
)
def test_sm90_attention_of_several_tokens(
    count, kv_heads, group, positions, lengths, num_sms, simulated
):
    inputs, factor = draw_several(
        *(count, group, (kv_heads, positions, attention_sm90.HEAD_DIM), lengths),
        norm=True,
        biased=False,
    )
    attend = functools.partial(attention_sm90.attend_queries, num_sms=num_sms, interpret=simulated)
    attended, _, *caches = several_tokens(None, attend, count, True)(inputs)
    assert_several(inputs, factor, attended, *caches)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(
    ("count", "kv_heads", "group", "positions", "rows"),
    [(8, 4, 7, 1000, 8), (2, 2, 6, 448, 33), (4, 8, 4, 456, 5), (8, 4, 16, 1304, 3)],
)
def test_sm90_attention_of_several_tokens_on_a_hopper_gpu(count, kv_heads, group, positions, rows):
    if device.cuda_capability() != 9.0:
        pytest.skip("needs a Hopper GPU")
    lengths = [0, positions - 2, *np.random.default_rng(rows).integers(1, positions, rows - 2)]
    inputs, factor = draw_several(
        *(count, group, (kv_heads, positions, attention_sm90.HEAD_DIM), lengths),
        norm=True,
        biased=True,
    )
    attend = functools.partial(attention_sm90.attend_queries, num_sms=132)
    run = several_tokens(None, attend, count, False)
    attended, _, *caches = run(inputs)
    assert_several(inputs, factor, attended, *caches)
    for _ in range(20):  # a race would show
        again, _, *caches_again = run(inputs)
        pairs = zip(caches_again, caches, strict=True)
        written = np.asarray(inputs.lengths)[:, None] + np.arange(count) < positions
        written &= (np.asarray(inputs.lengths)[:, None] > 0) | (np.arange(count) == 0)
        valid = written.reshape(-1)
        np.testing.assert_array_equal(wide(again)[valid], wide(attended)[valid])
        for new, old in pairs:
            np.testing.assert_array_equal(wide(new), wide(old))


@pytest.mark.slow
def test_sm90_attention_of_several_tokens_tests_itself(simulated, monkeypatch):
    attend = functools.partial(attention_sm90.attend_queries, interpret=simulated)
    assert self_test.queries_error(attend) < 4e-3
    monkeypatch.setattr(attention_sm90, "_LOG2_E", attention_sm90._LOG2_E * 1.5)
    assert self_test.queries_error(attend) > 1e-2


def check_sm90_attention(inputs, factor, interpret, *, num_sms):
    """Compares the kernel with the definition; returns a function that runs it, and its results."""
    assert attention_sm90.supports_attention(inputs.keys, inputs.num_heads)
    options = {"eps": 1e-6, "num_sms": num_sms, "interpret": interpret}
    run = jax.jit(functools.partial(attention_sm90.attend, **options))
    kept = wide(inputs.keys)
    results = run(inputs)
    np.testing.assert_array_equal(wide(inputs.keys), kept)  # the caller's keys are not written to
    attended, keys, values = reference_attention(inputs, factor)
    assert_close(results[0], attended)
    assert_same_cache(results[1], keys)
    assert_same_cache(results[2], values)
    return run, results


@pytest.mark.parametrize(
    ("kv_heads", "group", "lengths", "norm", "biased", "num_sms"),
    [
        pytest.param(2, 5, [0, 135], False, True, 1, marks=pytest.mark.slow),
        # `test_sm90_attention_tests_itself` has one by default.
        pytest.param(1, 7, [64, 130], True, False, 132, marks=pytest.mark.slow),
        pytest.param(2, 5, [63, 100], True, True, 132, marks=pytest.mark.slow),
        pytest.param(1, 15, [17, 128], False, False, 132, marks=pytest.mark.slow),
    ],
)
def test_sm90_attention(kv_heads, group, lengths, norm, biased, num_sms, simulated):
    """The kernel reads partial mean squares in vectors of 32 and one by one."""
    options = {"norm": norm, "biased": biased, "partials": 70 if norm else 3}
    inputs, factor = draw_inputs(
        2, group, (kv_heads, 136, attention_sm90.HEAD_DIM), lengths, **options
    )
    check_sm90_attention(inputs, factor, simulated, num_sms=num_sms)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("kv_heads", "group", "positions", "rows"),
    [(8, 5, 1000, 70), (4, 7, 400, 24), (2, 6, 2048, 33), (8, 8, 64, 5), (1, 15, 1304, 9)],
)
def test_sm90_attention_on_a_hopper_gpu(kv_heads, group, positions, rows, norm):
    """The product has a bias where there is no norm, as in Qwen2.5 and Qwen3."""
    if device.cuda_capability() != 9.0:
        pytest.skip("needs a Hopper GPU")
    fixed = [length for length in (0, 15, 16, 63, 64, 127, 128) if length < positions][: rows - 1]
    fixed.append(positions - 1)
    random = np.random.default_rng(rows).integers(0, positions, rows - len(fixed))
    options = {"norm": norm, "biased": not norm, "partials": 8 * rows}
    cache_shape = kv_heads, positions, attention_sm90.HEAD_DIM
    inputs, factor = draw_inputs(rows, group, cache_shape, [*fixed, *random], **options)
    run, results = check_sm90_attention(inputs, factor, None, num_sms=132)
    for _ in range(20):  # a race would show; caches are large, so the device compares them
        assert all(map(jnp.array_equal, run(inputs), results))


def test_sm90_attention_tests_itself(simulated, monkeypatch):
    attend = functools.partial(attention_sm90.attend, interpret=simulated)
    assert self_test.relative_error(attend) < 4e-3
    monkeypatch.setattr(attention_sm90, "_LOG2_E", attention_sm90._LOG2_E * 1.5)
    assert self_test.relative_error(attend) > 1e-2


def cache(heads=8, positions=400, head_dim=128, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct((3, heads, positions, head_dim), dtype)


def test_which_caches_sm90_attention_supports():
    assert attention_sm90.supports_attention(cache(), 40)
    assert not attention_sm90.supports_attention(cache(positions=401), 40)
    assert not attention_sm90.supports_attention(cache(positions=56), 40)
    assert not attention_sm90.supports_attention(cache(head_dim=64), 40)
    assert not attention_sm90.supports_attention(cache(dtype=jnp.float8_e4m3fn), 40)
    # The last group's queries are read in groups of eight, which would end after the row's heads.
    assert not attention_sm90.supports_attention(cache(heads=2), 4)


@pytest.fixture
def hopper(monkeypatch):
    """Makes the default device seem to be a Hopper GPU on which the FP4 kernel runs."""
    monkeypatch.setattr(layer.fp4_matmul, "device_kernel", lambda: "mosaic")
    layer._sm90_attention_agrees.cache_clear()
    yield monkeypatch
    layer._sm90_attention_agrees.cache_clear()


@pytest.mark.parametrize("error", [0.0, 1.0, None])
def test_sm90_attention_that_disagrees_or_does_not_compile_is_not_used(error, hopper):
    def relative_error(_):
        if error is None:
            raise NotImplementedError("gone")
        return error

    hopper.setattr(self_test, "relative_error", relative_error)
    warns = pytest.warns(match="off by 1.0e|NotImplementedError: gone")
    with contextlib.nullcontext() if error == 0.0 else warns:
        assert layer.supports_sm90_attention(cache(), 40) == (error == 0.0)
    assert not layer.supports_sm90_attention(cache(positions=401), 40)


@pytest.mark.parametrize("interpret", BACKENDS)
@pytest.mark.parametrize(("rows", "count", "rank"), [(130, 3, 40), (17, 1, 0)])
def test_merge_parts(rows, count, rank, interpret):
    heads, head_dim = 3, 64
    largest = draw(1, count, rows, heads, dtype=jnp.float32).at[1:, ::2].set(EMPTY)
    weights = jnp.where(largest == EMPTY, 0, 1 + jnp.abs(draw(2, *largest.shape)))
    sums = draw(3, *largest.shape, head_dim, dtype=jnp.float32) * (weights > 0)[..., None]
    a = draw(4, rank, heads * head_dim) if rank else None
    parts = AttentionParts(sums, weights.astype(jnp.float32), largest)
    merge = functools.partial(attention.merge_parts, dtype=jnp.bfloat16, interpret=interpret)
    attended, xa_partials = merge(parts, a)
    of_part = np.exp2(wide(largest))
    expected = np.sum(of_part[..., None] * wide(sums), axis=0)
    expected /= np.sum(of_part * wide(weights), axis=0)[..., None]
    assert_close(attended, expected.reshape(rows, -1))
    assert_xa_partials(xa_partials, attended, a)


def assert_rounded(rounded, x, xa_partials, a):
    """Asserts that rows are x in e4m3, and that partials are of x times their powers of two.

    Returns these powers [M].
    """
    expected, power = e4m3.rounded(x), 1 / wide(rounded.inverse)
    np.testing.assert_array_equal(rounded.inverse, expected.inverse)
    same = np.asarray(rounded.pairs).view(np.uint16) == np.asarray(expected.pairs).view(np.uint16)
    assert same.mean() > 0.99  # x may be off by its last bit
    numbers = wide(e4m3.of_pairs(rounded.pairs)) / power[:, None]
    error = np.linalg.norm(numbers - e4m3.in_register_order(wide(x)), axis=1)
    size = np.linalg.norm(wide(x), axis=1)
    assert (error < 0.04 * size + 1e-30).all()
    if a is not None:
        product = wide(xa_partials).sum(axis=0)[:, : len(a)]
        assert_close(product, power[:, None] * (wide(x) @ wide(a).T), 1e-2)
    return power


@pytest.mark.parametrize("interpret", BACKENDS)
@pytest.mark.parametrize(("rows", "rank"), [(70, 40), (130, 0)])
def test_kernels_that_round_to_e4m3(rows, rank, interpret):
    """Rows of any size, some of which begin with zeros."""
    width, eps, run = 384, 1e-2, {"interpret": interpret}
    size = jnp.exp2(jnp.arange(rows, dtype=jnp.float32) % 40 - 20)[:, None]
    x, y = ((size * draw(i, rows, width)).astype(jnp.bfloat16) for i in (1, 2))
    x, y = (z.at[::3, :20].set(0) for z in (x, y))
    a = draw(3, rank, width) if rank else None

    rounded = lora_shrink.round_rows(x, a, **run)
    assert_rounded(rounded[0], x, rounded[1], a)

    scale = draw(4, width, dtype=jnp.float32)
    inverse = jnp.exp2(jnp.arange(rows, dtype=jnp.float32) % 5)
    product = e4m3.Scaled((y / inverse[:, None]).astype(jnp.bfloat16), inverse)
    norm = norms.add_rmsnorm(x, product, scale, a, rounded_eps=eps, **run)
    unrounded = norms.add_rmsnorm(x, e4m3.unscaled(product), scale, a, interpret=True)
    np.testing.assert_array_equal(norm.residual, unrounded.residual)
    power = assert_rounded(norm.scaled, unrounded.scaled, norm.xa_partials, a)
    mean = wide(norm.square_partials).sum(axis=0) + eps
    assert_close(mean, power**2 * (wide(unrounded.square_partials).sum(axis=0) + eps), 1e-5)

    squares = square_partials_of(jnp.abs(draw(5, rows, dtype=jnp.float32)))
    gate_up = jnp.concatenate([draw(6, rows, width), y], axis=1)
    rounded = norms.swiglu(gate_up, squares, a, eps=0.0, rounds=True, **run)
    hidden, _ = norms.swiglu(gate_up, squares, a, eps=0.0, interpret=True)
    assert_rounded(rounded[0], hidden, rounded[1], a)

    parts = AttentionParts(
        draw(7, 2, rows, 3, 128, dtype=jnp.float32),
        1 + jnp.abs(draw(8, 2, rows, 3, dtype=jnp.float32)),
        draw(9, 2, rows, 3, dtype=jnp.float32),
    )
    merge = functools.partial(attention.merge_parts, dtype=jnp.bfloat16)
    rounded = merge(parts, a, rounds=True, **run)
    assert_rounded(rounded[0], merge(parts, a, interpret=True)[0], rounded[1], a)


def delta_inputs(rows, key_heads, ratio, window, partials):
    """Random inputs of a step of the delta rule, the first row of which stays, and its factors."""
    heads, width = key_heads * ratio, decode.HEAD_OF_STATE
    channels = (2 * key_heads + heads) * width
    factor = jnp.abs(draw(2, rows, dtype=jnp.float32))
    wide = {"dtype": jnp.float32}
    inputs = delta.DeltaInputs(
        parts=draw(1, rows, channels + heads * (width + 2), **wide),
        square_partials=square_partials_of(factor, partials) - 1e-6 / partials,
        lengths=jnp.arange(rows, dtype=jnp.int32),
        conv=draw(3, channels, 1, window),
        a_log=draw(4, heads, **wide),
        dt_bias=20 * draw(5, heads, **wide),
        scale=draw(6, width, **wide),
        state=draw(7, rows, heads, width, width, **wide),
        window=draw(8, rows, channels, window - 1).astype(jnp.float32),
    )
    return inputs, factor


@pytest.mark.parametrize("interpret", BACKENDS)
@pytest.mark.parametrize(
    ("rows", "key_heads", "ratio", "window", "partials", "rank"),
    [
        (2, 2, 3, 4, 35, 40),  # rows of the product do not begin at 16 bytes
        pytest.param(2, 1, 1, 2, 3, 0, marks=pytest.mark.slow),
        pytest.param(9, 16, 2, 4, 20, 32, marks=pytest.mark.slow),
    ],
)
def test_delta_step(rows, key_heads, ratio, window, partials, rank, interpret):
    inputs, factor = delta_inputs(rows, key_heads, ratio, window, partials)
    a = draw(9, rank, key_heads * ratio * decode.HEAD_OF_STATE) if rank else None
    run = jax.jit(functools.partial(delta.step, eps=1e-6, interpret=interpret))
    out, xa_partials, state, moved = run(inputs, a)
    expected = self_test.delta_reference(inputs, wide(factor), eps=1e-6)
    for actual, right, tolerance in zip(
        (out, state, moved), expected, (6e-3, 2e-3, 2e-3), strict=True
    ):
        assert_close(actual, right, tolerance)
    assert_xa_partials(xa_partials, out, a)
    np.testing.assert_array_equal(state[0], inputs.state[0])
    np.testing.assert_array_equal(moved[0], inputs.window[0])
    again = run(inputs, a)
    np.testing.assert_array_equal(wide(out), wide(again[0]))
    np.testing.assert_array_equal(state, again[2])


@pytest.mark.slow
def test_delta_step_tests_itself(monkeypatch):
    assert self_test.delta_error(interpret=True) < 4e-3
    monkeypatch.setattr(delta, "_LOG2_E", delta._LOG2_E * 1.5)
    assert self_test.delta_error(interpret=True) > 1e-2


@pytest.mark.parametrize("error", [0.0, 1.0, None])
def test_recurrent_layers_without_a_kernel_that_agrees_are_not_fused(error, monkeypatch):
    def delta_error():
        if error is None:
            raise NotImplementedError("gone")
        return error

    monkeypatch.setattr(self_test, "delta_error", delta_error)
    monkeypatch.setattr(decode, "supports_device", lambda _: True)
    layer.delta_agrees.cache_clear()
    state = jax.ShapeDtypeStruct((3, 2, 128, 128), jnp.float32)
    warns = pytest.warns(match="recurrent layers without .*(off by 1.0e|NotImplementedError: gone)")
    with contextlib.nullcontext() if error == 0.0 else warns:
        assert decode.supports_state(jnp.dtype("bfloat16"), state) == (error == 0.0)
    layer.delta_agrees.cache_clear()
    # Neither other heads nor other dtypes have the kernel.
    other = jax.ShapeDtypeStruct((3, 2, 128, 64), jnp.float32)
    assert not decode.supports_state(jnp.dtype("bfloat16"), other)
    assert not decode.supports_state(jnp.dtype("float32"), state)


@pytest.mark.slow  # `test_a_step_is_the_policys` has one layer by default.
@pytest.mark.parametrize("interpret", BACKENDS)
@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "angles"), [(2, 3, 256, 32), (1, 4, 128, 64)]
)
def test_attention_with_gates(kv_heads, group, head_dim, angles, interpret):
    """Queries with gates and a rotation of a few dimensions, against plain operations."""
    rows, positions, heads = 3, 70, kv_heads * group
    cache_shape = kv_heads, positions, head_dim
    inputs, factor = draw_inputs(rows, group, cache_shape, [0, 69, 5], norm=True, biased=False)
    angle = draw(4, rows, angles, dtype=jnp.float32)
    inputs = inputs._replace(cosines=jnp.cos(angle), sines=jnp.sin(angle))
    plain = inputs.qkv.reshape(rows, -1, head_dim)
    gates = draw(10, rows, heads, head_dim)
    pairs = jnp.stack([plain[:, :heads], gates], axis=2).reshape(rows, 2 * heads, head_dim)
    whole = jnp.concatenate([pairs, plain[:, heads:]], axis=1).reshape(rows, -1)
    a = draw(9, 32, heads * head_dim)

    @jax.jit
    def run(inputs):
        own, gates = gated_attention.split(inputs, eps=1e-6, interpret=interpret)
        parts, *caches = attention.attend(own, eps=1e-6, num_sms=132, interpret=interpret)
        merged = attention.merge_parts(
            parts, a, dtype=gates.dtype, gates=gates, interpret=interpret
        )
        return *merged, *caches

    attended, xa_partials, *caches = run(inputs._replace(qkv=whole))
    expected, keys, values = reference_attention(inputs, factor)
    opened = rounded(wide(gates) * wide(factor)[:, None, None]).reshape(rows, -1)
    assert_close(attended, expected / (1 + np.exp(-opened)), 8e-3)
    assert_xa_partials(xa_partials, attended, a)
    assert_same_cache(caches[0], keys)
    assert_same_cache(caches[1], values)
