"""Properties of the default device."""

import functools
import pathlib
import sys

import jax
import jax.numpy as jnp

NUM_SMS = 132  # SMs of an H100 SXM and of an H200
_CPU = pathlib.Path("/proc/cpuinfo")


def cuda_capability() -> float:
    """The compute capability of an NVIDIA GPU, 9.0 for Hopper; 0 for any other device."""
    device = jax.devices()[0]
    if device.platform != "gpu" or "cuda" not in device.client.platform_version.lower():
        return 0.0
    return float(device.compute_capability)


def exit_unless_hopper() -> None:
    """Ends a command that measures the Hopper kernel, if the device is no Hopper GPU."""
    if cuda_capability() != 9.0:
        sys.exit(f"error: the kernel runs on Hopper GPUs, this is {jax.devices()[0].device_kind}")


def product_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of dense weights whose products with inputs of a dtype take the least time.

    On a CPU with AMX, XLA multiplies bfloat16 in a quarter of the time of float32. Without AMX it
    widens both operands in every product, even where AVX-512 has instructions for bfloat16: with
    weights in float32 the same products take 0.6 to 0.85 of the time.

    Args:
        dtype: dtype of the inputs.
    """
    slow = dtype == jnp.bfloat16 and jax.default_backend() == "cpu" and not _has_amx()
    return jnp.dtype(jnp.float32) if slow else jnp.dtype(dtype)


@functools.cache
def _has_amx() -> bool:
    return _CPU.exists() and "amx_bf16" in _CPU.read_text(encoding="utf-8").split()


def supports_warpgroup(oldest: float = 8.0) -> bool:
    """Whether the kernels of `warpgroup` run on the default device.

    Args:
        oldest: lowest compute capability; 8.0 is Ampere, the first with bfloat16.
    """
    return cuda_capability() >= oldest


def num_sms() -> int:
    """Number of SMs of the GPU; those of an H200 where programs are compiled for one elsewhere."""
    device = jax.devices()[0]
    return device.core_count if device.platform == "gpu" else NUM_SMS
