"""The small operations of a decode step on an NVIDIA GPU, fused; see `kernels`."""

import jax


def kernels_run() -> bool:
    """Whether the default device is an NVIDIA GPU of the Ampere generation or later."""
    device = jax.devices()[0]
    if device.platform != "gpu" or "cuda" not in device.client.platform_version.lower():
        return False
    return float(device.compute_capability) >= 8.0
