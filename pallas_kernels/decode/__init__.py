"""The small operations of a decode step on an NVIDIA GPU, fused; see `kernels`."""

import jax
import jax.numpy as jnp

from pallas_kernels.device import supports_triton


def kernels_run(cache_dtype: jnp.dtype) -> bool:
    """Whether the default device is an NVIDIA GPU with bfloat16, and with the dtype of the cache.

    That is the Ampere generation or later, and for float8_e4m3fn Ada or later.
    """
    return supports_triton(8.9 if cache_dtype == jnp.float8_e4m3fn else 8.0)


def to_cache(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rounds keys or values to the dtype of a cache; attention casts them back, without a scale.

    float8_e4m3fn has no infinity, and what exceeds its 448 would become NaN: it is cut off there.
    """
    if dtype == jnp.float8_e4m3fn:
        limit = float(jnp.finfo(dtype).max)
        x = jnp.clip(x.astype(jnp.float32), -limit, limit)
    return x.astype(dtype)
