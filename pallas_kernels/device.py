"""Properties of the default device."""

import functools
import importlib.util
import sys

import jax

NUM_SMS = 132  # SMs of an H100 SXM and of an H200


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


@functools.cache
def has_triton() -> bool:
    """Whether this version of jax has Pallas's Triton backend, which jax is going to remove."""
    return importlib.util.find_spec("jax.experimental.pallas.triton") is not None


def supports_triton(oldest: float = 8.0) -> bool:
    """Whether Pallas's Triton kernels run on the default device.

    Args:
        oldest: lowest compute capability; 8.0 is Ampere, the first with bfloat16.
    """
    return cuda_capability() >= oldest and has_triton()


def num_sms() -> int:
    """Number of SMs of the GPU; those of an H200 where programs are compiled for one elsewhere."""
    device = jax.devices()[0]
    return device.core_count if device.platform == "gpu" else NUM_SMS
