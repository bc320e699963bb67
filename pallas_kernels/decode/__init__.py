"""The small operations of a decode step on an NVIDIA GPU, fused; see `kernels`."""

import functools
import importlib.util

import jax
import jax.numpy as jnp


def kernels_run(cache_dtype: jnp.dtype) -> bool:
    """Whether the default device is an NVIDIA GPU with bfloat16, and with the dtype of the cache.

    That is the Ampere generation or later, and for float8_e4m3fn Ada or later.
    """
    device = jax.devices()[0]
    if device.platform != "gpu" or "cuda" not in device.client.platform_version.lower():
        return False
    oldest = 8.9 if cache_dtype == jnp.float8_e4m3fn else 8.0
    return float(device.compute_capability) >= oldest and _has_backend()


def multiprocessors() -> int:
    """Of the default device; an H200's where programs are compiled for one elsewhere."""
    device = jax.devices()[0]
    return device.core_count if device.platform == "gpu" else 132


@functools.cache
def _has_backend() -> bool:
    """Whether this version of jax has the backend of the kernels, which is to be removed."""
    return importlib.util.find_spec("jax.experimental.pallas.triton") is not None
