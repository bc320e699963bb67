"""y = x W^T for a frozen weight W in 4 bits (NVFP4, MXFP4 or NF4), with LoRA and bias."""

from pallas_kernels.fp4_matmul.api import (
    fp4_matmul,
    fp4_matmul_float32,
    fp4_matmul_with_xa_partials,
)
from pallas_kernels.fp4_matmul.dispatch import (
    KERNEL_VARIABLE,
    chosen_kernel,
    device_kernel,
    load_kernel,
    reads_tiles,
    sum_xa_partials,
    supports_device,
    supports_lora_shrink,
    supports_tiles,
)
from pallas_kernels.fp4_matmul.epilogues import (
    fp4_matmul_add_rmsnorm,
    fp4_swiglu,
    supports_add_rmsnorm,
    supports_swiglu,
)
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
)
from pallas_kernels.fp4_matmul.tiling import TileConfig, padded_rank

__all__ = [
    "BLOCK",
    "FORMATS",
    "KERNEL_VARIABLE",
    "MMA_ROWS",
    "Format",
    "Fp4Tiles",
    "Fp4Weight",
    "TileConfig",
    "chosen_kernel",
    "dequantize",
    "device_kernel",
    "dot",
    "format_of",
    "fp4_matmul",
    "fp4_matmul_add_rmsnorm",
    "fp4_matmul_float32",
    "fp4_matmul_with_xa_partials",
    "fp4_swiglu",
    "from_tiles",
    "load_kernel",
    "padded_rank",
    "reads_tiles",
    "sum_xa_partials",
    "supports_add_rmsnorm",
    "supports_device",
    "supports_lora_shrink",
    "supports_swiglu",
    "supports_tiles",
    "to_tiles",
]
