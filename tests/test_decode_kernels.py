"""The fused kernels of a decode step against the operations that they are made of, in float64."""

import contextlib
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu
from triton_kernel import BACKENDS, assert_close, on_gpu, wide

from pallas_kernels import decode, device
from pallas_kernels.decode import attend_sm90, kernels, to_cache
from qerl_jax.policy import transformer
from qerl_jax.policy.attention import attend_to_cache, rotate

EMPTY = float(np.finfo(np.float32).min)  # the largest score of no key


def draw(index, *shape, dtype=jnp.bfloat16):
    key = jax.random.fold_in(jax.random.key(0), index)
    return jax.random.normal(key, shape, jnp.float32).astype(dtype)


def rounded(x):
    return wide(jnp.asarray(x, jnp.float32).astype(jnp.bfloat16))


def assert_shares(shares, x, a):
    """Whether they add up to x A^T, in whole groups of columns; None without an A."""
    if a is None:
        assert shares is None
        return
    assert shares.shape[1:] == (len(x), -(-len(a) // 32) * 32)
    product = wide(shares).sum(axis=0)
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
def test_where_the_kernels_run(platform, capability, dtype, expected, monkeypatch):
    client = types.SimpleNamespace(platform_version="CUDA 13000")
    device = types.SimpleNamespace(platform=platform, client=client, compute_capability=capability)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert decode.kernels_run(jnp.dtype(dtype)) == expected


@pytest.mark.parametrize("interpret", BACKENDS)
@pytest.mark.parametrize(
    ("rows", "width", "rank"),
    [(1, 576, 24), (5, 1100, 96), (70, 640, 32), (130, 512, 40), (3, 96, 0)],
)
def test_norm_project(rows, width, rank, interpret):
    x, y = draw(1, rows, width), draw(2, rows, width)
    scale, a = draw(3, width, dtype=jnp.float32), draw(4, rank, width) if rank else None
    run = jax.jit(functools.partial(kernels.norm_project, interpret=interpret))
    got = run(x, y, scale, a)
    residual = rounded(wide(x) + wide(y))
    np.testing.assert_array_equal(wide(got.residual), residual)
    assert_close(got.scaled, residual * wide(scale))
    assert_close(wide(got.squares).sum(axis=0), np.mean(residual**2, axis=1), 1e-6)
    assert_shares(got.shares, got.scaled, a)
    for _ in range(3):
        again = run(x, y, scale, a)
        for name in ("residual", "scaled", "squares"):
            np.testing.assert_array_equal(getattr(again, name), getattr(got, name))
        if rank:
            np.testing.assert_array_equal(again.shares[:, :rows], got.shares[:, :rows])


def shares_of(factor, count=3):
    """Mean squares of rows in shares, by which a norm without eps has this factor."""
    parts = jnp.arange(1, count + 1)[:, None] / (count * (count + 1) / 2)
    return (parts / factor**2).astype(jnp.float32)


@pytest.mark.parametrize("interpret", BACKENDS)
@pytest.mark.parametrize(("rows", "width", "rank"), [(1, 1100, 32), (17, 576, 64), (70, 640, 0)])
def test_silu_project(rows, width, rank, interpret):
    gate_up, factor = draw(1, rows, 2 * width), jnp.abs(draw(2, rows, dtype=jnp.float32))
    a = draw(3, rank, width) if rank else None
    z, shares = kernels.silu_project(gate_up, shares_of(factor), a, eps=0.0, interpret=interpret)
    gate, up = np.split(wide(gate_up) * wide(factor)[:, None], 2, axis=1)
    assert_close(z, gate / (1 + np.exp(-gate)) * up, 6e-3)
    assert_shares(shares, z, a)


def reference_attention(qkv, factor, bias, norms, angles, keys, values, lengths):
    """What `transformer` makes of a projection that lacks its norm's factor and bias."""
    rows, kv_heads, _, head_dim = keys.shape
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    projected = jnp.asarray(wide(qkv) * wide(factor)[:, None] + wide(bias), jnp.float32)
    projected = projected.astype(qkv.dtype).reshape(rows, 1, -1, head_dim)
    q, k, v = jnp.split(projected, (heads, heads + kv_heads), axis=2)
    if norms:
        q, k = (transformer._rms_norm(x, norm, 1e-6) for x, norm in zip((q, k), norms, strict=True))
    q, k = (rotate(x, tuple(part[:, None, None] for part in angles)) for x in (q, k))
    slot = *jnp.ogrid[:rows, :kv_heads], lengths[:, None]
    keys = keys.at[slot].set(to_cache(k[:, 0], keys.dtype))
    values = values.at[slot].set(to_cache(v[:, 0], values.dtype))
    attended = attend_to_cache(*(x.astype(jnp.float32) for x in (q, keys, values)), lengths + 1)
    return wide(attended).reshape(rows, -1), keys, values


def assert_same_cache(new, old):
    """A product that rounds otherwise may move a key by its last bit."""
    assert (wide(new) != wide(old)).mean() < 1e-3
    assert_close(new, wide(old))


@pytest.mark.parametrize("interpret", BACKENDS)
@pytest.mark.parametrize(
    ("dtype", "qk_norm"),
    [
        (jnp.bfloat16, True),
        pytest.param(jnp.bfloat16, False, marks=pytest.mark.slow),
        (jnp.float8_e4m3fn, False),
        pytest.param(jnp.float8_e4m3fn, True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("kv_heads", "group", "slots", "head_dim", "multiprocessors"),
    [
        pytest.param(2, 7, 200, 64, 132, marks=pytest.mark.slow),
        (1, 3, 133, 128, 132),
        pytest.param(2, 1, 70, 64, 1, marks=pytest.mark.slow),
        (1, 17, 64, 32, 132),
        (1, 2, 600, 32, 132),
        pytest.param(1, 2, 129, 256, 132, marks=pytest.mark.slow),
    ],
)
def test_attention(dtype, qk_norm, kv_heads, group, slots, head_dim, multiprocessors, interpret):
    lengths = jnp.asarray([0, slots - 1, slots // 2, 63, min(128, slots - 1)], jnp.int32)
    rows, heads = len(lengths), kv_heads * group
    qkv = draw(1, rows, (heads + 2 * kv_heads) * head_dim)
    factor, bias = jnp.abs(draw(2, rows, dtype=jnp.float32)), draw(3, qkv.shape[1])
    angle = draw(4, rows, head_dim // 2, dtype=jnp.float32)
    angles = jnp.cos(angle), jnp.sin(angle)
    keys, values = (draw(i, rows, kv_heads, slots, head_dim).astype(dtype) for i in (5, 6))
    norms = [draw(i, head_dim, dtype=jnp.float32) for i in (7, 8)] if qk_norm else None

    def run(keys, values, *, finish=False):
        parts, keys, values = kernels.attend(
            qkv,
            shares_of(factor) - 1e-6 / 3,
            angles,
            keys,
            values,
            lengths,
            bias=bias,
            qk_norm=norms,
            eps=1e-6,
            multiprocessors=multiprocessors,
            finish=finish,
            interpret=interpret,
        )
        if isinstance(parts, jax.Array):
            return parts, None, keys, values
        a = draw(9, 32, heads * head_dim)
        merged = kernels.merge_project(parts, a, dtype=qkv.dtype, interpret=interpret)
        return *merged, keys, values

    attended, shares, new_keys, new_values = jax.jit(run)(keys, values)
    finished, none, *caches = jax.jit(functools.partial(run, finish=True))(keys, values)
    for other, new in zip(caches, (new_keys, new_values), strict=True):
        np.testing.assert_array_equal(wide(other), wide(new))
    assert (none is None) == (multiprocessors < 2 * rows * kv_heads or slots <= 128)
    np.testing.assert_array_equal(wide(finished), wide(attended))
    expected, keys, values = reference_attention(
        qkv, factor, bias, norms, angles, keys, values, lengths
    )
    assert_close(attended, expected)
    assert_shares(shares, attended, draw(9, 32, heads * head_dim))
    assert_same_cache(new_keys, keys)
    assert_same_cache(new_values, values)


@pytest.fixture
def simulated():
    """Parameters of a simulation; races that it found fail the test."""
    yield plgpu.InterpretGPUParams(detect_races=True)
    races = interpret_pallas_call.get_races()
    interpret_pallas_call.reset_gpu_interpret_mode_state()
    assert not races.races_found


def check_attention_on_hopper(
    kv_heads, group, slots, lengths, interpret, *, norm, multiprocessors, biased=True, shares=3
):
    lengths, head_dim = jnp.asarray(lengths, jnp.int32), attend_sm90.HEAD_DIM
    rows, heads = len(lengths), kv_heads * group
    qkv = draw(1, rows, (heads + 2 * kv_heads) * head_dim)
    factor = jnp.abs(draw(2, rows, dtype=jnp.float32))
    bias = draw(3, qkv.shape[1]) if biased else jnp.zeros(qkv.shape[1])
    angle = draw(4, rows, head_dim // 2, dtype=jnp.float32)
    angles = jnp.cos(angle), jnp.sin(angle)
    keys, values = (draw(i, rows, kv_heads, slots, head_dim) for i in (5, 6))
    norms = [draw(i, head_dim, dtype=jnp.float32) for i in (7, 8)] if norm else None
    assert attend_sm90.serves(keys, heads)

    @jax.jit
    def run(keys, values):
        return attend_sm90.attend(
            qkv,
            shares_of(factor, shares) - 1e-6 / shares,
            angles,
            keys,
            values,
            lengths,
            bias=bias if biased else None,
            qk_norm=norms,
            eps=1e-6,
            multiprocessors=multiprocessors,
            interpret=interpret,
        )

    kept = wide(keys)
    results = run(keys, values)
    np.testing.assert_array_equal(wide(keys), kept)  # the caller's are not written to
    attended, keys, values = reference_attention(
        qkv, factor, bias, norms, angles, keys, values, lengths
    )
    assert_close(results[0], attended)
    assert_same_cache(results[1], keys)
    assert_same_cache(results[2], values)
    return run, results


@pytest.mark.parametrize(
    ("kv_heads", "group", "lengths", "norm", "biased", "multiprocessors"),
    [
        (2, 5, [0, 135], False, True, 1),
        (1, 7, [64, 130], True, False, 132),
        pytest.param(2, 5, [63, 100], True, True, 132, marks=pytest.mark.slow),
        pytest.param(1, 15, [17, 128], False, False, 132, marks=pytest.mark.slow),
    ],
)
def test_attention_on_hopper(kv_heads, group, lengths, norm, biased, multiprocessors, simulated):
    """Shares of the norm's mean squares are read by 32 of them and one by one."""
    options = {"norm": norm, "biased": biased, "multiprocessors": multiprocessors}
    options["shares"] = 70 if norm else 3
    check_attention_on_hopper(kv_heads, group, 136, lengths, simulated, **options)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("kv_heads", "group", "slots", "rows"),
    [(8, 5, 1000, 70), (4, 7, 400, 24), (2, 6, 2048, 33), (8, 8, 64, 5), (1, 15, 1304, 9)],
)
def test_attention_on_a_hopper_gpu(kv_heads, group, slots, rows, norm):
    """With a bias where there is no norm, as in Qwen2.5 and Qwen3."""
    if device.cuda_capability() != 9.0:
        pytest.skip("needs a Hopper GPU")
    fixed = [length for length in (0, 15, 16, 63, 64, 127, 128) if length < slots][: rows - 1]
    fixed.append(slots - 1)
    lengths = [*fixed, *np.random.default_rng(rows).integers(0, slots, rows - len(fixed))]
    options = {"norm": norm, "biased": not norm, "multiprocessors": 132, "shares": 8 * rows}
    run, results = check_attention_on_hopper(kv_heads, group, slots, lengths, None, **options)
    caches = [draw(i, rows, kv_heads, slots, attend_sm90.HEAD_DIM) for i in (5, 6)]
    for _ in range(20):  # a race would show
        for new, old in zip(run(*caches), results, strict=True):
            np.testing.assert_array_equal(wide(new), wide(old))


def test_attention_on_hopper_checks_itself(simulated, monkeypatch):
    assert attend_sm90.self_check(simulated) < 4e-3
    spoiled = attend_sm90._LOG2_E * 1.5
    monkeypatch.setattr(attend_sm90, "_LOG2_E", spoiled)
    assert attend_sm90.self_check(simulated) > 1e-2


def cache(heads=8, slots=400, head_dim=128, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct((3, heads, slots, head_dim), dtype)


def test_where_attention_on_hopper_serves():
    assert attend_sm90.serves(cache(), 40)
    assert not attend_sm90.serves(cache(slots=401), 40)
    assert not attend_sm90.serves(cache(slots=56), 40)
    assert not attend_sm90.serves(cache(head_dim=64), 40)
    assert not attend_sm90.serves(cache(dtype=jnp.float8_e4m3fn), 40)
    # The last head's queries are read by eights, and would end behind those of the row.
    assert not attend_sm90.serves(cache(heads=2), 4)


@pytest.fixture
def hopper(monkeypatch):
    """The default device seems to be one, whose FP4 kernel runs."""
    monkeypatch.setattr(kernels.fp4_matmul, "supports_device", lambda: True)
    kernels._sm90_agrees.cache_clear()
    yield monkeypatch
    kernels._sm90_agrees.cache_clear()


@pytest.mark.parametrize(
    ("finish", "multiprocessors", "error", "expected"),
    [(True, 1, 0.0, True), (False, 1, 0.0, False), (True, 132, 0.0, False), (True, 1, 1.0, False)],
)
def test_which_kernel_attends(finish, multiprocessors, error, expected, hopper):
    """The one for Hopper GPUs does if it agrees, where one part of a row is to be finished."""
    served = []

    def attend(qkv, squares, angles, keys, values, lengths, **_):
        served.append(keys.shape)
        return jnp.zeros((len(qkv), 40 * 128)), keys, values

    hopper.setattr(attend_sm90, "attend", attend)
    hopper.setattr(attend_sm90, "self_check", lambda: error)
    shapes = [(3, 56 * 128), (28, 3), (3, 64), (3,)]
    qkv, squares, angle, lengths = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    lengths = lengths.update(dtype=jnp.int32)
    run = functools.partial(
        kernels.attend, eps=1e-6, multiprocessors=multiprocessors, finish=finish
    )
    arguments = qkv.update(dtype=jnp.bfloat16), squares, (angle, angle), cache(), cache(), lengths
    with pytest.warns(match="off by 1.0e") if error else contextlib.nullcontext():
        jax.eval_shape(run, *arguments)
    assert bool(served) == expected


def test_attention_on_hopper_that_does_not_compile(hopper):
    def self_check():
        raise NotImplementedError("gone")

    hopper.setattr(attend_sm90, "self_check", self_check)
    with pytest.warns(match="NotImplementedError: gone"):
        assert not kernels.served_by_sm90(cache(), 40)


@pytest.mark.parametrize("interpret", BACKENDS)
@pytest.mark.parametrize(("rows", "count", "rank"), [(130, 3, 40), (17, 1, 0)])
def test_merge_project(rows, count, rank, interpret):
    heads, head_dim = 3, 64
    largest = draw(1, count, rows, heads, dtype=jnp.float32).at[1:, ::2].set(EMPTY)
    weights = jnp.where(largest == EMPTY, 0, 1 + jnp.abs(draw(2, *largest.shape)))
    sums = draw(3, *largest.shape, head_dim, dtype=jnp.float32) * (weights > 0)[..., None]
    a = draw(4, rank, heads * head_dim) if rank else None
    parts = kernels.AttentionParts(sums, weights.astype(jnp.float32), largest)
    attended, shares = kernels.merge_project(parts, a, dtype=jnp.bfloat16, interpret=interpret)
    of_part = np.exp2(wide(largest))
    expected = np.sum(of_part[..., None] * wide(sums), axis=0)
    expected /= np.sum(of_part * wide(weights), axis=0)[..., None]
    assert_close(attended, expected.reshape(rows, -1))
    assert_shares(shares, attended, a)
