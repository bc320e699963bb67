"""The Hopper kernels of `fp4_matmul`. They use an API of jax that may change."""

from pallas_kernels.fp4_matmul.sm90.dense import dequantize
from pallas_kernels.fp4_matmul.sm90.plan import make_plan
from pallas_kernels.fp4_matmul.sm90.product import TRACED_EVENTS, matmul

__all__ = ["TRACED_EVENTS", "dequantize", "make_plan", "matmul"]
