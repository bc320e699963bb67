"""y = x W^T for a frozen weight W in 4 bits (NVFP4, MXFP4 or NF4), with LoRA and bias."""

from pallas_kernels.fp4_matmul.api import dense, fp4_matmul
from pallas_kernels.fp4_matmul.dispatch import (
    KERNEL_VARIABLE,
    adds_xa_partials,
    chosen_kernel,
    device_kernel,
    format_kernel,
    load_kernel,
    reads_tiles,
    supports,
)
from pallas_kernels.fp4_matmul.epilogues import AddRmsNorm, Epilogue, Swiglu
from pallas_kernels.fp4_matmul.layout import Fp4Tiles, from_tiles, to_tiles
from pallas_kernels.fp4_matmul.mma_schedule import MAX_ROWS as MMA_ROWS
from pallas_kernels.fp4_matmul.reference import (
    BLOCK,
    FORMATS,
    Format,
    Fp4Weight,
    dequantize,
    dot,
    format_of,
    lora_product,
    sum_xa_partials,
)
from pallas_kernels.fp4_matmul.tiling import TileConfig, padded_rank

__all__ = [
    "BLOCK",
    "FORMATS",
    "KERNEL_VARIABLE",
    "MMA_ROWS",
    "AddRmsNorm",
    "Epilogue",
    "Format",
    "Fp4Tiles",
    "Fp4Weight",
    "Swiglu",
    "TileConfig",
    "adds_xa_partials",
    "chosen_kernel",
    "dense",
    "dequantize",
    "device_kernel",
    "dot",
    "format_kernel",
    "format_of",
    "fp4_matmul",
    "from_tiles",
    "load_kernel",
    "lora_product",
    "padded_rank",
    "reads_tiles",
    "sum_xa_partials",
    "supports",
    "to_tiles",
]
