"""What experts add to the residual stream: the sums over the pairs of tokens.

No kernel of its own adds the pairs up: the first one of the next layer reads their rows, wherever
they are, and adds them in float32 in the order of a token's experts.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.fp4_matmul.lora_shrink import Tile


class ExpertSums(NamedTuple):
    """What is still to be added up: for M tokens with k experts each.

    Attributes:
        rows: bfloat16 [R, D], what the experts computed, times the weights of the pairs.
        place: int32 [M, k], the row of each pair.
        shared: bfloat16 [M, D], what an expert of all tokens computed; None without one.
        opened: float32 [M], the factors of `shared`.
    """

    rows: jax.Array
    place: jax.Array
    shared: jax.Array | None = None
    opened: jax.Array | None = None


def total(sums: ExpertSums) -> jax.Array:
    """Returns the sums [M, D] by XLA."""
    added = sums.rows[sums.place].sum(axis=1, dtype=jnp.float32)
    if sums.shared is not None and sums.opened is not None:
        added += sums.opened[:, None] * sums.shared.astype(jnp.float32)
    return added.astype(sums.rows.dtype)


def load(tile: Tile, refs: ExpertSums) -> jax.Array:
    """The sums of a tile of tokens and columns, float32, in a kernel with references to them."""
    added = None
    for j in range(refs.place.shape[1]):
        rows = _load_rows(tile, refs.rows, tile.load_rows(refs.place.at[:, j])).astype(jnp.float32)
        added = rows if added is None else added + rows
    assert added is not None
    if refs.shared is not None:
        opened = tile.over_columns(tile.load_rows(refs.opened))
        added += opened * tile.load(refs.shared).astype(jnp.float32)
    return added


def _load_rows(tile: Tile, ref: Any, places: jax.Array) -> jax.Array:
    """The columns of a tile of some rows, one for each row of the tile, of an array [R, K]."""
    threads, shape = tile.threads, (tile.rows.size, tile.width)
    if threads.simulated:
        return lax.dynamic_slice_in_dim(ref[...], tile.column, tile.width, axis=1)[places]
    first = places * ref.shape[1] + tile.column
    index = tile.over_columns(first) + threads.iota(shape, 1, tile.layout)
    result = plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.bfloat16), layout=tile.layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), tile.layout), return_type=result)
    def gather(_, ref, index):
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        start = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(ref))
        out = index.registers.copy()
        for place, numbers in enumerate(index.registers.flat):
            (count,) = ir.VectorType(numbers.type).shape
            own = arith.extui(i64, vector.extract(numbers, [], [0]))
            own = arith.addi(start, arith.muli(own, mgpu.utils.c(2, i64)))
            words = count // 2
            names = ", ".join(f"${i}" for i in range(words))
            loaded = mgpu.utils.inline_ptx(
                f"ld.global.v{words}.b32 {{{names}}}, [${words}];",
                own,
                result_types=[i32] * words,
            )
            pairs = vector.from_elements(ir.VectorType.get((words,), i32), list(loaded))
            kind = ir.VectorType.get((count,), ir.BF16Type.get())
            out.flat[place] = vector.bitcast(kind, pairs)
        return mgpu.FragmentedArray(_registers=out, _layout=index.layout, _is_signed=None)

    return gather(ref, index)
