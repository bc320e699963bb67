"""A small attention by `attention_sm90`, compared with its definition in float64."""

import concurrent.futures
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.decode.attention import AttentionInputs


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
    run = jax.jit(functools.partial(attend, eps=0.0, num_sms=1))
    # The caller may be tracing a program. Tracing belongs to a thread, so another thread computes.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        results = thread.submit(run, inputs).result()
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
    pairs = [(attended, expected.reshape(m, -1)), *zip((new_keys, new_values), caches, strict=True)]
    return float(np.max([np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in pairs]))
