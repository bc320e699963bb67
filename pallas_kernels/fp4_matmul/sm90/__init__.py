"""The Hopper (SM90) kernels of `fp4_matmul`, in Mosaic GPU, an API of jax that may change."""

from pallas_kernels.fp4_matmul.sm90.dequantize import dequantize
from pallas_kernels.fp4_matmul.sm90.kernel import TRACED_EVENTS, matmul
from pallas_kernels.fp4_matmul.sm90.schedule import make_schedule

__all__ = ["TRACED_EVENTS", "dequantize", "make_schedule", "matmul"]
