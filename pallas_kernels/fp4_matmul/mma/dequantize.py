"""The whole weight in bfloat16, for products of many rows by another library."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import warpgroup
from pallas_kernels.fp4_matmul import layout
from pallas_kernels.fp4_matmul.layout import Fp4Tiles
from pallas_kernels.fp4_matmul.mma import codes, epilogue
from pallas_kernels.fp4_matmul.tiling import TILE_COLUMNS, TILE_ROWS
from pallas_kernels.warpgroup import Warpgroup


def dequantize(weight: Fp4Tiles, *, inputs: int, interpret: bool = False) -> jax.Array:
    """Returns the weight [N, K] in bfloat16; `inputs` is K."""
    n = weight.shape[0]
    row_tiles, column_tiles, _ = weight.codes.shape
    shape = row_tiles * TILE_ROWS, column_tiles * TILE_COLUMNS
    operands = {
        "codes": weight.codes.reshape(row_tiles, column_tiles, 4, 256),
        "scales": weight.scales,
        "divisor": jnp.pad(weight.divisor, (0, shape[0] - n), constant_values=1),
    }
    dense = warpgroup.run(
        _body,
        "fp4_dequantize_mma",
        (row_tiles, column_tiles),
        operands,
        jax.ShapeDtypeStruct(shape, jnp.bfloat16),
        interpret=interpret,
    )
    return dense[:n, :inputs]


def _body(threads: Warpgroup, operands: dict[str, Any], _, dense: Any) -> None:
    """A CTA has a tile."""
    row, column = threads.cta
    scales = codes.scales_layout(operands["scales"].shape[-1])
    words = [
        threads.load(operands[name].at[row, column], kind)
        for name, kind in (("codes", codes.CODES), ("scales", scales))
    ]
    divisor = epilogue.load_rows(threads, operands["divisor"], row)
    value = codes.dequantize_tile(threads, *words).astype(jnp.float32)
    value *= lax.broadcast_in_dim(layout.UNIT / divisor, value.shape, (0,))
    rows = pl.ds(row * TILE_ROWS, TILE_ROWS)
    target = dense.at[rows, pl.ds(column * TILE_COLUMNS, TILE_COLUMNS)]
    threads.store(target, value.astype(jnp.bfloat16))
