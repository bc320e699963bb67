"""y = x W^T for a frozen weight W in NVFP4, with LoRA and bias."""

from pallas_kernels.fp4_matmul.api import fp4_matmul
from pallas_kernels.fp4_matmul.reference import BLOCK, Fp4Weight, dequantize, dot

__all__ = ["BLOCK", "Fp4Weight", "dequantize", "dot", "fp4_matmul"]
