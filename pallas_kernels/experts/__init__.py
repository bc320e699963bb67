"""Products of tokens with the weights of the experts that they were routed to."""

from pallas_kernels.experts.api import DENSE_NUMBERS, gated_matmul, grouped_matmul
from pallas_kernels.experts.table import Table, table, tile_bound, tile_rows, to_pairs, to_rows

__all__ = [
    "DENSE_NUMBERS",
    "Table",
    "gated_matmul",
    "grouped_matmul",
    "table",
    "tile_bound",
    "tile_rows",
    "to_pairs",
    "to_rows",
]
