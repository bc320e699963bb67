"""A layer of a decode step on an NVIDIA GPU, out of fused kernels; see `layer`."""

import jax
import jax.numpy as jnp

from pallas_kernels.device import supports_warpgroup

_HEAD_DIMS = 32, 64, 128, 256
ANGLES = 32  # angles that rotate a head with a gate come in multiples
MAX_TOKENS = 8  # new tokens of a row whose attention `layer.decode_layer` computes
HEAD_OF_STATE = 128  # widths of a key and of a value whose state `delta` computes


def supports_device(cache_dtype: jnp.dtype) -> bool:
    """Whether the default device is an NVIDIA GPU with bfloat16 and with the dtype of the cache.

    A bfloat16 cache needs Ampere or later, a float8_e4m3fn cache Ada or later.
    """
    return supports_warpgroup(_oldest(cache_dtype))


def _oldest(cache_dtype: jnp.dtype) -> float:
    return 8.9 if cache_dtype == jnp.float8_e4m3fn else 8.0


def supports_layer(
    dtype: jnp.dtype,
    keys: jax.Array | jax.ShapeDtypeStruct,
    capability: float | None = None,
) -> bool:
    """Whether `layer.decode_layer` exists for a policy and runs on a device.

    Args:
        dtype: dtype of the computation.
        keys: [B, K, S, H] cached keys of a layer.
        capability: CUDA compute capability of a planned device, like 9.0; None asks the default
            device.
    """
    oldest = _oldest(keys.dtype)
    return (
        dtype == jnp.bfloat16
        and keys.shape[-1] in _HEAD_DIMS
        and keys.size <= 2**31  # the kernels count elements in 32 bits
        and (supports_device(keys.dtype) if capability is None else capability >= oldest)
    )


def supports_state(dtype: jnp.dtype, state: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Whether `delta.step` takes states through a token on the default device.

    Args:
        dtype: dtype of the computation.
        state: float32 [B, N, Dk, Dv] states of a layer.
    """
    fits = (
        dtype == jnp.bfloat16
        and state.shape[2:] == (HEAD_OF_STATE, HEAD_OF_STATE)
        and state.size <= 2**31  # the kernel counts elements in 32 bits
        and supports_device(jnp.dtype(dtype))
    )
    if not fits:
        return False
    # The module uses an API of jax that may change, and is loaded when needed.
    from pallas_kernels.decode.layer import delta_agrees

    return delta_agrees()


def to_cache(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rounds keys or values to the dtype of a cache; attention casts them back, without a scale.

    float8_e4m3fn has no infinity, and values above its largest number, 448, would become NaN: they
    are clipped.
    """
    if dtype == jnp.float8_e4m3fn:
        limit = float(jnp.finfo(dtype).max)
        x = jnp.clip(x.astype(jnp.float32), -limit, limit)
    return x.astype(dtype)
