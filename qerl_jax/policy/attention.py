"""Rotary positions, the key-value cache and attention."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from qerl_jax.policy.config import ModelConfig


@struct.dataclass
class KVCache:
    """Keys and values of the tokens so far, left-aligned: slot t holds position t.

    They may be stored in another dtype than the policy computes in, see `to_cache`.

    Attributes:
        keys: for every layer [B, S, K, H], after the rotation.
        values: for every layer [B, S, K, H].
        lengths: int32 [B], the number of filled slots of each row.
    """

    keys: list[jax.Array]
    values: list[jax.Array]
    lengths: jax.Array


def to_cache(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rounds keys or values to the dtype of a cache; attention casts them back, without a scale.

    float8_e4m3fn has no infinity, and what exceeds its 448 would become NaN: it is cut off there.
    """
    if dtype == jnp.float8_e4m3fn:
        limit = float(jnp.finfo(dtype).max)
        x = jnp.clip(x, -limit, limit)
    return x.astype(dtype)


def rotary_frequencies(config: ModelConfig) -> np.ndarray:
    """Angle per position of each pair of dimensions, float32 [H/2], with Llama 3's scaling."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / config.head_dim
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
    """Cosines and sines, float32 [B, T, 1, H/2], of int32 positions [B, T]."""
    angles = positions[..., None, None].astype(jnp.float32) * rotary_frequencies(config)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates x [B, T, N, H] in the planes (i, i + H/2), the convention of Hugging Face."""
    cos, sin = angles
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def attend(
    queries: jax.Array, keys: jax.Array, values: jax.Array, lengths: jax.Array, *, causal: bool
) -> jax.Array:
    """Grouped-query attention over right-padded rows.

    Args:
        queries: [B, T, N, H].
        keys: [B, S, K, H], N a multiple of K.
        values: [B, S, K, H].
        lengths: int32 [B], valid keys of each row.
        causal: query t sees the keys up to t (T = S); otherwise it sees all valid keys (T = 1).

    Returns:
        [B, T, N, H]. Queries beyond their row's length are finite and mean nothing.
    """
    if _use_cudnn(queries):
        return jax.nn.dot_product_attention(
            queries,
            keys,
            values,
            is_causal=causal,
            query_seq_lengths=lengths if causal else jnp.ones_like(lengths),
            key_value_seq_lengths=lengths,
            implementation="cudnn",
        )
    # With right padding a causal mask already hides the padding from every valid query.
    return jax.nn.dot_product_attention(
        queries,
        keys,
        values,
        is_causal=causal,
        key_value_seq_lengths=None if causal else lengths,
        implementation="xla",
    )


def _use_cudnn(queries: jax.Array) -> bool:
    head_dim = queries.shape[-1]
    return (
        queries.dtype in (jnp.bfloat16, jnp.float16)
        and head_dim % 8 == 0
        and head_dim <= 128
        and _has_cudnn_attention()
    )


def _has_cudnn_attention() -> bool:
    """Whether the default device is an NVIDIA GPU of the Ampere generation or later."""
    device = jax.devices()[0]
    if device.platform != "gpu" or "cuda" not in device.client.platform_version.lower():
        return False
    return float(device.compute_capability) >= 8.0
