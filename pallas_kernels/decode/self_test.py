"""Small runs of kernels that may be left out, compared with their definitions."""

import concurrent.futures
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.decode import HEAD_OF_STATE, delta, norms
from pallas_kernels.decode.attention import AttentionInputs
from pallas_kernels.decode.attention_queries import Queries
from pallas_kernels.decode.delta import DeltaInputs
from pallas_kernels.experts import combine, route
from pallas_kernels.experts.combine import ExpertSums
from pallas_kernels.experts.route import Router, Scores
from pallas_kernels.fp4_matmul import e4m3


def relative_error(attend: Callable, *, head_dim: int = 128) -> float:
    """The largest relative error of a small attention and its cache, whose last tile is not full.

    `attend` is `attention_sm90.attend`, which uses an API of jax that may change.
    """
    m, kv_heads, group, positions = 2, 2, 5, 200
    rng = np.random.default_rng(0)
    shapes = [(m, kv_heads * (group + 2) * head_dim), *[(m, kv_heads, positions, head_dim)] * 2]
    qkv, keys, values = (rng.standard_normal(shape).astype(jnp.bfloat16) for shape in shapes)
    lengths = np.array([150, 20], np.int32)
    fields: dict[str, Any] = {
        "qkv": qkv,
        "square_partials": np.full((36, m), 1 / 36, np.float32),  # for a factor of one
        "cosines": np.ones((m, head_dim // 2), np.float32),
        "sines": np.zeros((m, head_dim // 2), np.float32),
        "lengths": lengths,
        "keys": keys,
        "values": values,
    }
    inputs = AttentionInputs(**fields, bias=None, q_norm=None, k_norm=None)
    results = _run(functools.partial(attend, eps=0.0, num_sms=1), inputs)
    attended, new_keys, new_values = (np.asarray(x, np.float64) for x in results)
    q, k, v = np.split(
        qkv.astype(np.float64).reshape(m, -1, head_dim),
        (group * kv_heads, (group + 1) * kv_heads),
        axis=1,
    )
    expected = np.empty((m, kv_heads, group, head_dim))
    caches = []
    for cache, new in ((keys, k), (values, v)):
        caches.append(cache.astype(np.float64))
        caches[-1][np.arange(m), :, lengths] = new
    for row, length in enumerate(lengths):
        filled_keys, filled_values = (cache[row, :, : length + 1] for cache in caches)
        queries = q[row].reshape(kv_heads, group, head_dim)
        weights = np.exp(queries @ filled_keys.transpose(0, 2, 1) / head_dim**0.5)
        expected[row] = weights / weights.sum(axis=-1, keepdims=True) @ filled_values
    return _largest((attended, new_keys, new_values), (expected.reshape(m, -1), *caches))


def queries_error(attend: Callable) -> float:
    """The largest relative error of attention of several tokens, in parts that are not full.

    `attend` is `attention_sm90.attend_queries`, which uses an API of jax that may change.
    """
    rows, kv_heads, group, count, positions, head_dim = 2, 1, 3, 8, 200, 128
    rng = np.random.default_rng(0)
    shapes = (count * group, head_dim), *[(positions, head_dim)] * 2
    queries, keys, values = (
        rng.standard_normal((rows, kv_heads, *shape)).astype(jnp.bfloat16) for shape in shapes
    )
    newest = np.array([[positions - 3], [126]], np.int32) + np.arange(count, dtype=np.int32)

    def run(queries, newest, keys, values):
        inputs = Queries.of(queries, newest, jnp.arange(rows)[::-1], keys[::-1], values[::-1])
        return attend(inputs, count=count, num_sms=4)

    parts = _run(run, queries, newest, keys, values)
    sums, weights, largest = (np.asarray(x, np.float64) for x in parts)
    factors = np.exp2(largest - largest.max(axis=0))
    found = (factors[..., None] * sums).sum(axis=0) / (factors * weights).sum(axis=0)[..., None]
    found = found.reshape(kv_heads, rows, -1, head_dim).swapaxes(0, 1)
    q, k, v = (x.astype(np.float64) for x in (queries, keys, values))
    seen = np.arange(positions) <= np.repeat(newest, group, axis=1)[:, None, :, None]
    weights = np.exp(q @ k.swapaxes(2, 3) / head_dim**0.5) * seen
    return _largest((found,), (weights / weights.sum(axis=-1, keepdims=True) @ v,))


def routing_error(*, interpret: bool = False) -> float:
    """The largest relative error of experts that `route` chooses and `norms` adds up.

    It is 1 if an expert or a row of the table differs. Both kernels have several CTAs.
    """
    m, width = 37, 256
    router = Router(experts=40, top_k=3, normalized=True, eps=1e-6)
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((router.experts, width)).astype(jnp.bfloat16)
    x, shared = (rng.standard_normal((m, width)).astype(jnp.bfloat16) for _ in range(2))
    rows = rng.standard_normal((m * router.top_k, width)).astype(jnp.bfloat16)
    scale = rng.standard_normal(width).astype(np.float32)

    def run(x, shared, rows, weights, scale):
        add = functools.partial(norms.add_rmsnorm, interpret=interpret)
        norm = add(x, shared, scale, None, router=weights)
        assert norm.logit_partials is not None
        assert not isinstance(norm.scaled, e4m3.Rounded)
        scores = Scores(norm.scaled, norm.square_partials, norm.logit_partials, shared[:1] / 16)
        found = route.route(scores, router, interpret=interpret)
        place = jnp.arange(len(rows), dtype=jnp.int32)[::-1].reshape(m, router.top_k)
        sums = ExpertSums(rows, place, shared, found.opened)
        wide = norm.scaled.astype(jnp.float32)
        logits = jnp.dot(wide, weights.astype(jnp.float32).T, precision="highest")[None]
        expected = route.reference(scores._replace(logit_partials=logits), router)
        added = add(x, sums, scale, None).residual, x + combine.total(sums)
        return found, expected, added

    found, expected, added = _run(run, x, shared, rows, weights, scale)
    exact = [(found.routes, expected.routes), *zip(found.table, expected.table, strict=True)]
    if not all(np.array_equal(*pair) for pair in exact):
        return 1.0
    values = [(getattr(found, x), getattr(expected, x)) for x in ("states", "weights", "opened")]
    return _largest(*zip(*values, added, strict=True))


def delta_error(*, interpret: bool = False) -> float:
    """The largest relative error of a small step of the delta rule, one of whose rows stays."""
    m, key_heads, ratio, width, taps, rank = 2, 2, 3, HEAD_OF_STATE, 4, 8
    heads = key_heads * ratio
    channels = (2 * key_heads + heads) * width
    rng = np.random.default_rng(0)

    def normal(*shape: int, dtype: Any = np.float32) -> np.ndarray:
        return rng.standard_normal(shape).astype(dtype)

    fields: dict[str, Any] = {
        "parts": normal(m, channels + heads * (width + 2)),
        "square_partials": np.full((36, m), 1 / 36, np.float32),  # for a factor of one
        "lengths": np.array([3, 0], np.int32),
        "conv": normal(channels, 1, taps, dtype=jnp.bfloat16),
        "a_log": normal(heads),
        "dt_bias": normal(heads),
        "scale": normal(width),
        "state": normal(m, heads, width, width),
        "window": normal(m, channels, taps - 1),
    }
    inputs, a = DeltaInputs(**fields), normal(rank, heads * width, dtype=jnp.bfloat16)
    run = functools.partial(delta.step, eps=0.0, interpret=interpret)
    out, xa_partials, state, window = (np.asarray(x, np.float64) for x in _run(run, inputs, a))
    expected = delta_reference(inputs, np.ones(m), eps=0.0)
    product = out @ a.astype(np.float64).T
    sums = xa_partials.sum(axis=0)[:, :rank]
    return _largest((out, sums, state, window), (expected[0], product, *expected[1:]))


def delta_reference(
    inputs: DeltaInputs, factor: np.ndarray, *, eps: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What `delta.step` returns besides the LoRA shrink, in float64.

    Args:
        inputs: as of `delta.step`.
        factor: [M] factors of the norm before the product.
        eps: epsilon of the gated norm.
    """
    wide = {name: np.asarray(x, np.float64) for name, x in inputs._asdict().items()}
    state, window = wide["state"], wide["window"]
    m, heads, width, _ = state.shape
    channels = window.shape[1]
    key_heads = (channels // width - heads) // 2
    parts = wide["parts"] * factor[:, None]
    new, gate, b, a = np.split(parts, np.cumsum([channels, heads * width, heads]), axis=1)
    is_live = (wide["lengths"] > 0)[:, None]
    whole = np.concatenate([window, new[..., None]], axis=2)
    mixed = _silu((whole * wide["conv"][:, 0]).sum(axis=2)).reshape(m, -1, width)
    q, k, v = np.split(mixed, (key_heads, 2 * key_heads), axis=1)
    q, k = (x / np.sqrt((x * x).sum(axis=2, keepdims=True) + 1e-6) for x in (q, k))
    q, k = (np.repeat(x, heads // key_heads, axis=1) for x in (q * width**-0.5, k))
    decay = np.exp(-np.exp(wide["a_log"]) * np.logaddexp(a + wide["dt_bias"], 0))
    decay = np.where(is_live, decay, 1)[..., None]
    rate = np.where(is_live, 1 / (1 + np.exp(-b)), 0)[..., None]
    state = decay[..., None] * state
    written = rate * (v - np.einsum("mhkv,mhk->mhv", state, k))
    state = state + k[..., None] * written[:, :, None]
    out = np.einsum("mhkv,mhk->mhv", state, q)
    out /= np.sqrt((out * out).mean(axis=2, keepdims=True) + eps)
    out = (out * wide["scale"]).reshape(m, -1) * _silu(gate)
    return out, state, np.where(is_live[..., None], whole[..., 1:], window)


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def _largest(actual: Sequence[Any], expected: Sequence[Any]) -> float:
    """The largest relative error of some arrays."""
    wide = ([np.asarray(x, np.float64) for x in arrays] for arrays in (actual, expected))
    pairs = list(zip(*wide, strict=True))
    return float(np.max([np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in pairs]))


def _run(function: Callable, *arguments: Any) -> Any:
    """The results of a program.

    The caller may be tracing one. Tracing belongs to a thread, so another thread computes.
    """
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(jax.jit(function), *arguments).result()
