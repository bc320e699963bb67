"""The table of a grouped product: which rows of a padded buffer belong to which expert.

A pair is a token and one of its k experts; there are P = T k of them. The pairs of an expert fill
whole tiles of m rows, one expert after the other, so that a product multiplies each tile by the
weight of one expert. How many tiles are used depends on the routes; their bound does not, so that
all shapes are static.

Nothing is sorted, and no gradient is added up by atomics: a pair finds its row by counting the
earlier pairs of its expert, and gathers are the gradients of gathers.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import device
from pallas_kernels.fp4_matmul import dispatch

_BLOCK = 256  # pairs that are compared with each other
MIN_TILE, _MAX_TILE = 8, 128  # rows of a tile: the kernels' smallest, and largest
HOPPER_TILE = 64  # rows of a tile of the Hopper kernel for many rows
# Tiles of an expert that the kernel of a decode step multiplies at a time, and that by wgmma.
_MOST_TILES, _MOST_OF_WGMMA = 5, 10


class Table(NamedTuple):
    """The rows of T tokens, with k experts each, in a buffer of R = tiles x m rows.

    Attributes:
        place: int32 [P], the row of each pair, in the order of tokens.
        source: int32 [R], the pair of each row; P for a row without one.
        owner: int32 [tiles], the expert of each tile; of unused tiles any one.
        used: int32 [], number of tiles that have pairs, the first ones.
        units: int32 [units], the first tile of each unit, as `with_units` makes it; or None.
    """

    place: jax.Array
    source: jax.Array
    owner: jax.Array
    used: jax.Array
    units: jax.Array | None = None


def has_hopper_kernel() -> bool:
    """Whether the kernel of `dense_sm90` multiplies tiles of many rows on the default device."""
    what = "the grouped kernel of experts"
    return dispatch.agrees_on_hopper(_relative_error, what, "multiplying in blocks instead")


def _relative_error():
    # Mosaic GPU takes seconds to import, and only a Hopper GPU needs it.
    from pallas_kernels.experts import dense_sm90

    return dense_sm90.relative_error()


def tile_rows(pairs: int, experts: int, hopper: bool | None = None) -> int:
    """Returns the rows of a tile: at most half of the pairs of an expert, on average.

    The Hopper kernel has tiles of one size, and takes more of them for fewer pairs. `hopper` says
    whether it multiplies them; None asks the default device.
    """
    rows = MIN_TILE
    if 4 * rows * experts <= pairs and (has_hopper_kernel() if hopper is None else hopper):
        return HOPPER_TILE
    while rows < _MAX_TILE and 4 * rows * experts <= pairs:
        rows *= 2
    return rows


def tile_bound(pairs: int, experts: int, rows: int | None = None) -> int:
    """Returns the largest number of tiles of `tile_rows`, or some rows, that any routes use."""
    touched = min(experts, pairs)
    return touched + (pairs - touched) // (rows or tile_rows(pairs, experts))


def tiles_at_a_time(pairs: int, experts: int) -> int:
    """Returns how many tiles of an expert the kernel of a decode step multiplies at a time.

    They are as many as most experts have, when routes are uniform.
    """
    most = _MOST_OF_WGMMA if device.cuda_capability() == 9.0 else _MOST_TILES
    return min(most, math.ceil(pairs / experts / MIN_TILE + 0.5))


def unit_bound(pairs: int, experts: int, count: int) -> int:
    """Returns the largest number of units, some tiles of an expert each, that any routes have."""
    touched = min(experts, pairs)
    return touched + (pairs - touched) // (MIN_TILE * count)


def with_units(own: Table, count: int, *, experts: int) -> Table:
    """Returns the table with units: the tiles of each expert, some at a time.

    Args:
        own: the table, with tiles of eight rows.
        count: tiles of a unit.
        experts: number of experts.

    Returns:
        The table with the first tile of each unit, in the order of tiles; -1 after the last one.
    """
    tile = jnp.arange(len(own.owner))
    is_before = tile < tile[:, None]
    place = ((own.owner[:, None] == own.owner) & is_before).sum(axis=1)
    begins = (place % count == 0) & (tile < own.used)
    number = jnp.where(begins, (begins & is_before).sum(axis=1), -1)
    units = jnp.arange(unit_bound(len(own.place), experts, count))
    found = jnp.where(number == units[:, None], tile, -1).max(axis=1).astype(jnp.int32)
    return own._replace(units=found)


@jax.named_scope("routes")
def table(routes: jax.Array, *, experts: int, rows: int | None = None) -> Table:
    """Returns the table of tokens.

    Args:
        routes: int32 [T, k], the experts of each token, from 0 to E - 1. Pairs of a token may have
            the same expert, as those of padding.
        experts: number E of experts.
        rows: rows of a tile; those of `tile_rows` if it is not given.
    """
    expert = routes.reshape(-1)
    pairs, rows = len(expert), rows or tile_rows(routes.size, experts)
    # Earlier pairs of the same expert: in earlier blocks, and in the block of the pair.
    blocks = jnp.pad(expert, (0, -pairs % _BLOCK), constant_values=experts).reshape(-1, _BLOCK)
    sizes = (blocks[:, :, None] == jnp.arange(experts)).sum(axis=1, dtype=jnp.int32)
    before = jnp.cumsum(sizes, axis=0) - sizes
    same = blocks[:, :, None] == blocks[:, None, :]
    inside = jnp.tril(same, -1).sum(axis=2, dtype=jnp.int32).reshape(-1)[:pairs]
    rank = before[jnp.arange(pairs) // _BLOCK, expert] + inside

    tiles = -(-sizes.sum(axis=0, dtype=jnp.int32) // rows)
    ends = jnp.cumsum(tiles)
    # XLA would find the place of a pair again for every number of its row.
    place = jax.lax.optimization_barrier((ends - tiles)[expert] * rows + rank)
    bound = tile_bound(pairs, experts, rows)
    owner = (ends <= jnp.arange(bound)[:, None]).sum(axis=1, dtype=jnp.int32)
    source = jnp.full(bound * rows, pairs, jnp.int32)
    source = source.at[place].set(jnp.arange(pairs, dtype=jnp.int32), unique_indices=True)
    return Table(place, source, jnp.minimum(owner, experts - 1), ends[-1])


@jax.custom_vjp
def to_rows(values: jax.Array, table: Table) -> jax.Array:
    """Returns values of tokens [T, C], or of pairs [P, C], as rows [R, C]; others are zeros.

    The gradient of a token is the sum over its pairs, in float32 and in their order.
    """
    pairs = len(table.place)
    index = jnp.minimum(table.source, pairs - 1) // (pairs // len(values))
    return jnp.where((table.source < pairs)[:, None], values[index], 0)


def _to_rows_fwd(values, table):
    return to_rows(values, table), (table, values[:, :0])


def _to_rows_bwd(residuals, gradient):
    table, like = residuals
    pairs = to_pairs(gradient, table).reshape(len(like), -1, gradient.shape[1])
    return pairs.sum(axis=1, dtype=jnp.float32).astype(gradient.dtype), None


to_rows.defvjp(_to_rows_fwd, _to_rows_bwd)


@jax.custom_vjp
def to_pairs(rows: jax.Array, table: Table) -> jax.Array:
    """Returns the rows [P, C] of the pairs, of rows [R, C]."""
    return rows[table.place]


def _to_pairs_fwd(rows, table):
    return to_pairs(rows, table), table


def _to_pairs_bwd(table, gradient):
    return to_rows(gradient, table), None


to_pairs.defvjp(_to_pairs_fwd, _to_pairs_bwd)
