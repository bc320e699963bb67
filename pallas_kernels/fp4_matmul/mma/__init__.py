"""The FP4 product of few rows by warp-level mma.sync, on every NVIDIA GPU since Ampere.

It uses Mosaic GPU, an API of jax that may change.
"""

from pallas_kernels.fp4_matmul.mma.dequantize import dequantize
from pallas_kernels.fp4_matmul.mma.kernel import matmul

__all__ = ["dequantize", "matmul"]
