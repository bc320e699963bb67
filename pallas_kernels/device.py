"""What the default device is."""

import functools
import importlib.util
import sys

import jax

NUM_SMS = 132  # of an H100 SXM and an H200


def cuda_capability() -> float:
    """The compute capability of an NVIDIA GPU, 9.0 for Hopper; 0 of any other device."""
    device = jax.devices()[0]
    if device.platform != "gpu" or "cuda" not in device.client.platform_version.lower():
        return 0.0
    return float(device.compute_capability)


def exit_unless_hopper() -> None:
    """Ends a command that measures the Hopper kernel on another device."""
    if cuda_capability() != 9.0:
        sys.exit(f"error: the kernel runs on Hopper GPUs, this is {jax.devices()[0].device_kind}")


@functools.cache
def has_triton() -> bool:
    """Whether this version of jax has Pallas's Triton backend, which is to be removed."""
    return importlib.util.find_spec("jax.experimental.pallas.triton") is not None


def supports_triton(oldest: float = 8.0) -> bool:
    """Whether Pallas's Triton kernels run on the default device.

    Args:
        oldest: the least compute capability; that of Ampere, the first with bfloat16.
    """
    return cuda_capability() >= oldest and has_triton()


def num_sms() -> int:
    """Of a GPU; an H200's where programs are compiled for one elsewhere."""
    device = jax.devices()[0]
    return device.core_count if device.platform == "gpu" else NUM_SMS
