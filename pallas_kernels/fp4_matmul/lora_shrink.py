"""Arrays [M, K] that are made tile by tile, and their products with A of a LoRA adapter.

A product is a sum over K, and a block of threads has a few columns. What they contribute to it is a
share: who reads the product adds the shares up, in an order that never changes, and no block waits
for another.

All of this is Pallas's Triton backend. A block of threads executes its code once, so what counts is
how little code there is: small tiles, and as few of them unrolled as possible.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.fp4_matmul.tiling import PARTIAL_COLUMNS

COLUMNS = 128  # of a block
_RANK = PARTIAL_COLUMNS  # rows of A of a block


def shrink(x: jax.Array, a: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Returns x A^T in shares.

    Args:
        x: bfloat16 [M, K].
        a: bfloat16 [R, K].
        interpret: run on a CPU.

    Returns:
        float32 [S, M, R'], whose sum over S it is; R' is R, up to a multiple of PARTIAL_COLUMNS,
        and the columns from R on are 0.
    """

    def value(refs, tile):
        return tile.load(refs["x"]).astype(x.dtype)

    m, k = x.shape
    return shrink_tiles("lora_shrink", value, {"x": x}, {}, a, (m, k), interpret=interpret)[
        "xa_partials"
    ]


class Tile(NamedTuple):
    """The rows and columns of a block of threads.

    Attributes:
        rows: int32 [16] or [32].
        dims: int32 [block], columns counted from the first of the tile,
        cols: int32 [block], and from the first of all.
        index: which block of columns it is.
        first: whether it is the first of the blocks with these rows and columns, one for every
            `_RANK` rows of A; that one stores.
        shape: [M, K] of what is cut into tiles.
    """

    rows: Any
    dims: Any
    cols: Any
    index: Any
    first: Any
    shape: tuple[int, int]

    @property
    def _mask(self):
        return (self.rows < self.shape[0])[:, None] & (self.cols < self.shape[1])[None, :]

    def load(self, ref, offset: int = 0) -> jax.Array:
        """The tile of an array, float32 and zero beyond its edges."""
        place = ref.at[self.rows[:, None], offset + self.cols[None, :]]
        return plt.load(place, mask=self._mask, other=0.0).astype(jnp.float32)

    def store(self, ref, value) -> None:
        """Writes the tile of an array."""
        plt.store(ref.at[self.rows[:, None], self.cols[None, :]], value, mask=self._mask)


def shrink_tiles(
    name: str,
    value: Callable[[dict, Tile], jax.Array],
    operands: dict[str, jax.Array],
    results: dict[str, jax.ShapeDtypeStruct],
    a: jax.Array | None,
    shape: tuple[int, int],
    *,
    block: int = COLUMNS,
    warps: int = 4,
    interpret: bool,
) -> dict[str, Any]:
    """Makes an array [M, K] tile by tile, and its product with A.

    Args:
        name: of the kernel.
        value: makes and stores a tile.
        operands: by name, whole.
        results: of `value`, likewise.
        a: [R, K], or None.
        shape: [M, K].
        block: columns of a tile.
        warps: of a block of threads.
        interpret: run on a CPU.

    Returns:
        The results, and the "shares" of the product, see `shrink`; None without A.
    """
    m, width = shape
    rows = 16 if m <= 128 else 32
    rank, parts = 0, 1
    operands, results = dict(operands), dict(results)
    blocks = pl.cdiv(width, block)
    if a is not None:
        rank = a.shape[0]
        parts = pl.cdiv(rank, _RANK)
        operands["a"] = a
        results["xa_partials"] = jax.ShapeDtypeStruct((blocks, m, parts * _RANK), jnp.float32)

    def body(*refs):
        refs = dict(zip((*operands, *results), refs, strict=True))
        i, index, part = (pl.program_id(axis) for axis in range(3))
        dims = jnp.arange(block)
        tile = Tile(
            rows=i * rows + jnp.arange(rows),
            dims=dims,
            cols=index * block + dims,
            index=index,
            first=part == 0,
            shape=shape,
        )
        if a is None:
            value(refs, tile)
            return
        ranks = part * _RANK + jnp.arange(_RANK)
        mask = (ranks < rank)[:, None] & (tile.cols < width)[None, :]
        factors = plt.load(refs["a"].at[ranks[:, None], tile.cols[None, :]], mask=mask, other=0.0)
        # A branch that is always taken: otherwise the compiler makes the tile a second time, as the
        # operand of the product, each warp all of it.
        tokens = lax.cond(
            index >= 0,
            lambda: value(refs, tile),
            lambda: jnp.zeros((rows, block), a.dtype),
        )
        share = plt.dot(tokens, factors, trans_b=True)
        place = refs["xa_partials"].at[index, tile.rows[:, None], ranks[None, :]]
        plt.store(place, share, mask=(tile.rows < m)[:, None])

    outs = pl.pallas_call(
        body,
        grid=(pl.cdiv(m, rows), blocks, parts),
        out_shape=tuple(results.values()),
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
        name=name,
        interpret=interpret,
    )(*operands.values())
    return {"xa_partials": None} | dict(zip(results, outs, strict=True))
