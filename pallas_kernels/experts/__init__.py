"""Products of tokens with the weights of the experts that they were routed to."""

from pallas_kernels.experts.api import grouped_matmul
from pallas_kernels.experts.table import Table, table, to_pairs, to_rows

__all__ = ["Table", "grouped_matmul", "table", "to_pairs", "to_rows"]
