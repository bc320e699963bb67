"""Tilings and random weights for tests of the kernel on a Hopper GPU."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import fp4_matmul as fp4
from pallas_kernels.fp4_matmul.tiling import TileConfig

ROUNDING = 2e-3  # relative error of results stored in bfloat16
# One tiling of every kind; `None` is the one that a caller gets.
CONFIGS = [
    None,
    TileConfig(16, warpgroups_n=1),
    TileConfig(16, warpgroups_n=4, block_k=256, stages=4, in_flight=1),
    TileConfig(16, warpgroups_n=5, block_k=256, stages=3),
    TileConfig(16, warpgroups_n=6, stages=4),
    TileConfig(16, warpgroups_n=2, slices=2, block_k=512, stages=3, in_flight=1),
    TileConfig(16, warpgroups_n=1, slices=4, block_k=512, stages=3),
    TileConfig(16, warpgroups_n=2, stages=6, stream_k=True),
    TileConfig(16, warpgroups_n=3, stages=6, stream_k=True),
    TileConfig(16, warpgroups_n=1, slices=4, block_k=512, stages=3, stream_k=True),
    TileConfig(16, warpgroups_n=2, stages=6, split=2),
    TileConfig(16, warpgroups_n=1, slices=2, block_k=256, stages=6, split=3),
    TileConfig(32, warpgroups_n=3, block_k=256, stages=3, split=4),
    TileConfig(16, warpgroups_n=1, block_k=256, stages=4, in_flight=2, split=2, ahead=True),
    TileConfig(64, warpgroups_n=3, block_k=256, stages=3, in_flight=2, split=2, ahead=True),
    TileConfig(64, warpgroups_n=2, block_k=256, stages=3, stream_k=True, in_flight=1, ahead=True),
    TileConfig(64, warpgroups_n=3, block_k=128, stages=4, split=4),
    TileConfig(64, warpgroups_n=4, stages=5),
    TileConfig(64, warpgroups_n=3, stages=5, stream_k=True),
    TileConfig(64, warpgroups_n=4, stages=5, stream_k=True),
    TileConfig(96, warpgroups_n=4, stages=3),
    TileConfig(128, warpgroups_n=3, stages=3),
    TileConfig(128, warpgroups_n=2, stages=3, stream_k=True),
    TileConfig(192, warpgroups_n=2, stages=2),
    TileConfig(256, warpgroups_n=2, stages=2),
]


def skip_unless_hopper():
    device = jax.devices()[0]
    if device.platform != "gpu" or device.compute_capability != "9.0":
        pytest.skip(f"needs a Hopper GPU, this is {device.device_kind}")


def random_weight(rng, n, k, form="nvfp4"):
    packed = jnp.asarray(rng.integers(0, 256, (n, k // 2), np.uint8))
    if form == "mxfp4":
        scales = rng.integers(110, 125, (n, k // 32), np.uint8).view(ml_dtypes.float8_e8m0fnu)
        return fp4.Fp4Weight(packed, jnp.asarray(scales))
    scales = rng.integers(1, 127, (n, k // 16), np.uint8).view(ml_dtypes.float8_e4m3fn)
    divisors = jnp.asarray(rng.uniform(1000, 3000, n), jnp.float32)
    return fp4.Fp4Weight(packed, jnp.asarray(scales), divisors)
