"""Products of tokens with the weights of the experts that they were routed to."""

from pallas_kernels.experts.api import (
    DENSE_NUMBERS,
    PART_NUMBERS,
    PRODUCT_NUMBERS,
    grouped_lora,
    grouped_matmul,
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
    "Table",
    "grouped_lora",
    "grouped_matmul",
    "has_hopper_kernel",
    "table",
    "tile_bound",
    "tile_rows",
    "to_pairs",
    "to_rows",
]
