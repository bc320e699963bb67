"""Packed buffers, and their attention and its gradients in float64, for tests."""

import jax
import jax.numpy as jnp
import numpy as np


def packed_ids(*groups, total):
    """Ids of groups (prompt, completion, completion, ...), which are numbers of tokens."""
    ids = []
    for index, (prompt, *completions) in enumerate(groups):
        for part, count in enumerate((prompt, *completions)):
            ids += [index << 12 | part] * count
    assert len(ids) <= total
    return np.array(ids + [-1] * (total - len(ids)), np.int32)


def random_ids(rng, total):
    """Ids of random groups: some without completions, some completions empty, some long."""
    groups, used = [], 0
    while used < total - 1 and len(groups) < 12:
        limit = rng.choice([5, 40, 300])
        counts = [1 + rng.integers(limit), *rng.integers(0, limit, rng.integers(0, 9))]
        counts = [int(n) for n in counts]
        while used + sum(counts) > total:
            counts[int(np.argmax(counts))] //= 2
        if not counts[0]:
            break
        groups.append(counts)
        used += sum(counts)
    return packed_ids(*groups, total=total)


def visibility(ids):
    """Bool [T, T], which keys each query sees."""
    index = np.arange(len(ids))
    same = (ids[:, None] == ids) | ((ids[:, None] & ~4095) == ids)
    return same & (index <= index[:, None])


def draw_operands(length, heads, kv_heads, head_dim, ids, dtype=jnp.bfloat16):
    """Random q, k, v and the gradient by the attention, which is zero at padding."""
    shapes = [(length, n, head_dim) for n in (heads, kv_heads, kv_heads, heads)]
    keys = jax.random.split(jax.random.key(heads + length), 4)
    q, k, v, d_out = (
        jax.random.normal(key, shape, jnp.float32).astype(dtype)
        for key, shape in zip(keys, shapes, strict=True)
    )
    return q, k, v, jnp.where((ids >= 0)[:, None, None], d_out, 0)


def row_positions(ids):
    """The position of each token in its row: of a completion that after the prompt's."""
    positions = np.zeros(len(ids), np.int32)
    for number in set(ids.tolist()) - {-1}:
        own = ids == number
        prompt = 0 if number % 4096 == 0 else (ids == number // 4096 * 4096).sum()
        positions[own] = prompt + np.arange(own.sum())
    return positions


def oracle(q, k, v, d_out, ids, sinks=None, window=0):
    """The attention and its gradients by q, k and v, in float64."""
    q, k, v, d_out = (np.asarray(x, np.float64) for x in (q, k, v, d_out))
    heads, head_dim = q.shape[1:]
    group = heads // k.shape[1]
    visible, positions = visibility(ids), row_positions(ids)
    if window:
        visible &= positions[:, None] - positions < window
    out, dq, dk, dv = (np.zeros_like(x) for x in (q, q, k, v))
    for head in range(heads):
        shared = head // group
        scores = np.where(visible, q[:, head] @ k[:, shared].T / head_dim**0.5, -np.inf)
        top = scores.max(axis=1, keepdims=True)
        weights, sink = np.exp(scores - top), 0.0
        if sinks is not None:
            sink = np.exp(np.float64(sinks[head]) - top)
        weights /= weights.sum(axis=1, keepdims=True) + sink
        out[:, head] = weights @ v[:, shared]
        delta = (out[:, head] * d_out[:, head]).sum(axis=1, keepdims=True)
        d_scores = weights * (d_out[:, head] @ v[:, shared].T - delta) / head_dim**0.5
        dq[:, head] = d_scores @ k[:, shared]
        dk[:, shared] += d_scores.T @ q[:, head]
        dv[:, shared] += weights.T @ d_out[:, head]
    return out, dq, dk, dv


def errors(actual, expected, ids):
    """Relative errors of attention and gradients; attention at padding is only finite."""
    found = []
    for i, (x, y) in enumerate(zip(actual, expected, strict=True)):
        x = np.asarray(x, np.float64)
        assert np.isfinite(x).all()
        live = ids >= 0 if i == 0 else slice(None)
        found.append(np.linalg.norm((x - y)[live]) / np.linalg.norm(y[live]))
    return found
