"""The FP4 product of few rows by warp-level mma.sync, on every NVIDIA GPU since Ampere."""

from pallas_kernels.fp4_matmul.mma.kernel import matmul
from pallas_kernels.fp4_matmul.mma.schedule import MAX_ROWS, MmaConfig, choose

__all__ = ["MAX_ROWS", "MmaConfig", "choose", "matmul"]
