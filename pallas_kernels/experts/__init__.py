"""Products of tokens with the weights of the experts that they were routed to."""

from pallas_kernels.experts.api import (
    DENSE_NUMBERS,
    PART_NUMBERS,
    PRODUCT_NUMBERS,
    Gated,
    activated,
    bias_of,
    gated_matmul,
    grouped_lora,
    grouped_matmul,
    kernel_rank,
    mlp,
    pad_ranks,
    takes_shared,
)
from pallas_kernels.experts.table import (
    Table,
    has_hopper_kernel,
    table,
    tile_bound,
    tile_rows,
    to_pairs,
    to_rows,
)

__all__ = [
    "DENSE_NUMBERS",
    "PART_NUMBERS",
    "PRODUCT_NUMBERS",
    "Gated",
    "Table",
    "activated",
    "bias_of",
    "gated_matmul",
    "grouped_lora",
    "grouped_matmul",
    "has_hopper_kernel",
    "kernel_rank",
    "mlp",
    "pad_ranks",
    "table",
    "takes_shared",
    "tile_bound",
    "tile_rows",
    "to_pairs",
    "to_rows",
]
