"""y = x W^T for a frozen weight W in 4 bits (NVFP4, MXFP4 or NF4), with LoRA and bias."""

from pallas_kernels.fp4_matmul.api import (
    fp4_matmul,
    fp4_matmul_float32,
    fp4_matmul_with_shares,
)
from pallas_kernels.fp4_matmul.endings import (
    fp4_begin_norm,
    fp4_behind_norm,
    fp4_swiglu,
    serves_norm,
    serves_swiglu,
)
from pallas_kernels.fp4_matmul.hopper import kernel_runs, load_kernel, makes_shares, sum_of_shares
from pallas_kernels.fp4_matmul.layout import Fp4Tiles, from_tiles, to_tiles
from pallas_kernels.fp4_matmul.reference import (
    BLOCK,
    FORMATS,
    Format,
    Fp4Weight,
    dequantize,
    dot,
    format_of,
)
from pallas_kernels.fp4_matmul.tiling import TileConfig, padded_rank

__all__ = [
    "BLOCK",
    "FORMATS",
    "Format",
    "Fp4Tiles",
    "Fp4Weight",
    "TileConfig",
    "dequantize",
    "dot",
    "format_of",
    "fp4_begin_norm",
    "fp4_behind_norm",
    "fp4_matmul",
    "fp4_matmul_float32",
    "fp4_matmul_with_shares",
    "fp4_swiglu",
    "from_tiles",
    "kernel_runs",
    "load_kernel",
    "makes_shares",
    "padded_rank",
    "serves_norm",
    "serves_swiglu",
    "sum_of_shares",
    "to_tiles",
]
