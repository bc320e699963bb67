"""Rotary positions, the key-value cache and attention."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from pallas_kernels.device import cuda_capability
from qerl_jax.policy.config import ModelConfig


@struct.dataclass
class KVCache:
    """Keys and values of the tokens so far, left-aligned.

    They may be stored in another dtype than the dtype of the computation, see `decode.to_cache`. A
    recurrent layer has a state in place of keys and a window in place of values, whose size does
    not depend on S; see `recurrent`.

    Attributes:
        keys: [B, K, S, H] keys of every layer, after the rotation; or the state, float32.
        values: [B, K, S, H] values of every layer; or the window.
        lengths: int32 [B], number of filled cache positions of each row.
    """

    keys: list[jax.Array]
    values: list[jax.Array]
    lengths: jax.Array


def rotary_frequencies(config: ModelConfig) -> np.ndarray:
    """Returns the angle per position of each pair of dimensions, with Llama 3's scaling.

    Args:
        config: the architecture.

    Returns:
        float32 [H/2], or of the rotated dimensions only.
    """
    rotated = config.rotary_dim or config.head_dim
    exponents = np.arange(0, rotated, 2, dtype=np.float32) / rotated
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies.astype(np.float32)
    wavelengths = 2 * math.pi / frequencies
    low = scaling.original_max_position / scaling.low_freq_factor
    high = scaling.original_max_position / scaling.high_freq_factor
    smooth = (scaling.original_max_position / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    scaled = np.where(wavelengths > low, frequencies / scaling.factor, frequencies)
    between = (wavelengths <= low) & (wavelengths >= high)
    return np.where(between, blended, scaled).astype(np.float32)


def rotary_angles(positions: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Returns the cosines and sines, float32 [B, T, 1, H/2], of int32 positions [B, T]."""
    angles = positions[..., None, None].astype(jnp.float32) * rotary_frequencies(config)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates x [B, T, N, H] in the planes (i, i + H/2), the convention of Hugging Face.

    Angles of fewer planes rotate the first dimensions alone.
    """
    cos, sin = angles
    if (rotated_dim := 2 * cos.shape[-1]) < x.shape[-1]:
        turned = rotate(x[..., :rotated_dim], angles)
        return jnp.concatenate([turned, x[..., rotated_dim:]], axis=-1)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def attend(queries: jax.Array, keys: jax.Array, values: jax.Array, lengths: jax.Array) -> jax.Array:
    """Causal grouped-query attention over right-padded rows, without a gradient on a GPU.

    cuDNN adds up the gradients of the queries in any order; training uses `attend_packed`.

    Args:
        queries: [B, T, N, H].
        keys: [B, T, K, H], N a multiple of K.
        values: [B, T, K, H].
        lengths: int32 [B], number of tokens in each row.

    Returns:
        [B, T, N, H], finite but undefined after a row's end.
    """
    if _use_cudnn(queries):
        return jax.nn.dot_product_attention(
            queries,
            keys,
            values,
            is_causal=True,
            query_seq_lengths=lengths,
            key_value_seq_lengths=lengths,
            implementation="cudnn",
        )
    # With right padding a causal mask already hides the padding from every valid query.
    return jax.nn.dot_product_attention(queries, keys, values, is_causal=True, implementation="xla")


def attend_to_cache(
    queries: jax.Array, keys: jax.Array, values: jax.Array, lengths: jax.Array
) -> jax.Array:
    """Grouped-query attention of one token per row to the cache.

    It consists of two products and a softmax of XLA, which always round alike; cuDNN does not.

    Args:
        queries: [B, 1, N, H].
        keys: [B, K, S, H], N a multiple of K.
        values: [B, K, S, H].
        lengths: int32 [B], number of filled cache positions of each row.

    Returns:
        [B, 1, N, H].
    """
    batch, kv_heads, positions, head_dim = keys.shape
    grouped = queries.reshape(batch, kv_heads, -1, head_dim)
    scores = jnp.einsum("bkgh,bksh->bkgs", grouped, keys, preferred_element_type=jnp.float32)
    valid = jnp.arange(positions) < lengths[:, None, None, None]
    weights = jax.nn.softmax(jnp.where(valid, head_dim**-0.5 * scores, -jnp.inf))
    out = jnp.einsum("bkgs,bksh->bkgh", weights.astype(values.dtype), values)
    return out.reshape(queries.shape)


def attend_from(
    queries: jax.Array, keys: jax.Array, values: jax.Array, positions: jax.Array
) -> jax.Array:
    """Grouped-query attention of several tokens per row to the cache that holds them.

    Args:
        queries: [B, T, N, H].
        keys: [B, K, S, H], N a multiple of K.
        values: [B, K, S, H].
        positions: int32 [B, T], cache position of each token, which sees those up to its own.

    Returns:
        [B, T, N, H].
    """
    batch, tokens, _, head_dim = queries.shape
    grouped = queries.reshape(batch, tokens, keys.shape[1], -1, head_dim)
    scores = jnp.einsum("btkgh,bksh->bkgts", grouped, keys, preferred_element_type=jnp.float32)
    seen = jnp.arange(keys.shape[2]) <= positions[:, None, None, :, None]
    weights = jax.nn.softmax(jnp.where(seen, head_dim**-0.5 * scores, -jnp.inf))
    out = jnp.einsum("bkgts,bksh->btkgh", weights.astype(values.dtype), values)
    return out.reshape(queries.shape)


def _use_cudnn(queries: jax.Array) -> bool:
    head_dim = queries.shape[-1]
    return (
        queries.dtype in (jnp.bfloat16, jnp.float16)
        and head_dim % 8 == 0
        and head_dim <= 128
        and cuda_capability() >= 8.0
    )
