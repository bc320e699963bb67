"""Which block of threads computes what."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fp4_matmul.tiling import (
    MIN_PARTIALS,
    PARTIAL_COLUMNS,
    SMEM_LIMIT,
    TILE_COLUMNS,
    TILE_ROWS,
    TileConfig,
    clusters_of,
    supports_xa_partials,
)

_ADDERS_IN_CLUSTERS = 96  # blocks in clusters that run at a time on an H100 SXM or H200, at least


class _Place(NamedTuple):
    """A block in its cluster.

    Attributes:
        cluster: which one.
        member: which of its blocks.
        whole: tiles that the block computes alone.
        shared: 1 if it has a part of one more, or 0.
    """

    cluster: Any
    member: Any
    whole: Any
    shared: Any


@dataclasses.dataclass(frozen=True)
class Plan:
    """Who computes what. A step is one stage of K.

    A block computes whole tiles. When streamed, every block has the same number of them, and the
    tiles left over are shared: their steps form a line that is cut into equal runs, one a block.
    A run is no longer than a tile, so it touches two at most, and a block begins with it: its
    partial sums are on their way while it computes whole tiles. When split, tiles belong to
    clusters of blocks. Each block computes as many whole ones; the steps of the one left over, if
    any, are cut into runs, with which the blocks end.

    For SwiGLU row tiles are paired, with 32 rows of each half of the weight. A tile has the upper
    or the lower halves of as many whole row tiles, which are one box for the copy engine.
    """

    config: TileConfig
    m_tiles: int
    n_tiles: int
    row_tiles: int
    steps: int  # of a tile
    blocks: int
    split: int  # blocks of a cluster
    simulated: bool  # by the interpreter, which has no clusters
    paired: bool = False

    @property
    def tiles(self) -> int:
        """Tiles of the result."""
        return self.m_tiles * self.n_tiles

    @property
    def shared(self) -> int:
        """The first tiles, as many as are left over, are shared."""
        return self.tiles % self.blocks if self.config.stream_k else 0

    @property
    def sharing(self) -> int:
        """The first blocks, as many as have a run of shared steps."""
        return min(self.blocks, self.shared * self.steps)

    @property
    def clusters(self) -> int:
        """Clusters of blocks; with split 1 every block is one."""
        return self.blocks // self.split

    @property
    def in_clusters(self) -> bool:
        """Whether the blocks of a cluster see each other's shared memory."""
        return self.split > 1 and not self.simulated

    @property
    def adders(self) -> int:
        """The first blocks, as many as certainly run at a time: all wait for what they leave."""
        return self.blocks if self.split == 1 else min(self.blocks, _ADDERS_IN_CLUSTERS)

    @property
    def slots(self) -> int:
        """Places for partial sums."""
        return self.sharing + self.shared - 1

    @property
    def most_sharers(self) -> int:
        """A bound on the blocks that share a tile: the inner ones have whole runs of it."""
        shortest = self.shared * self.steps // self.sharing
        return -(-(self.steps - 1) // shortest) + 1

    @property
    def longest_run(self) -> int:
        """The most shared steps that a block has."""
        return -(-self.shared * self.steps // self.sharing)

    @property
    def unit(self) -> int:
        """Tokens that a sharer adds up at a time: if possible, each sharer has at most one unit.

        Up to 64, of which a thread holds 32 sums.
        """
        fewest_sharers = -(-self.steps // self.longest_run)
        tokens = min(64, -(-self.config.tile_m // (8 * fewest_sharers)) * 8)
        return next(unit for unit in range(tokens, 0, -8) if self.config.tile_m % unit == 0)

    @property
    def units(self) -> int:
        """Units of a tile."""
        return self.config.tile_m // self.unit

    @property
    def stores_tiles(self) -> bool:
        """Whether any block computes a whole tile; the others are added up in parts."""
        if self.shared:
            return self.tiles > self.blocks or self.longest_run == self.steps
        return self.split == 1 or self.tiles > self.clusters

    @property
    def stored_tokens(self) -> int:
        """The most tokens that a warpgroup stores at a time."""
        if self.stores_tiles:
            return self.config.tile_m
        return self.unit if self.shared else self.config.tile_m // self.config.receivers

    @property
    def arrivals(self) -> int:
        """Copies of a stage: codes, scales, and tokens by 128 columns."""
        return 2 + self.per_stage

    def turns_of_shares(self, rank: int, k: int) -> int:
        """Units that a block makes of the shares of x A^T, A [rank, K], see `make_shares`."""
        units = k // TILE_COLUMNS * -(-rank // PARTIAL_COLUMNS)
        return -(-units // self.adders)

    def supports_lora_shrink(self, rank: int, k: int) -> bool:
        """Whether blocks can make them, of what the first of their stages holds."""
        columns, rest = divmod(k, TILE_COLUMNS)
        return (
            supports_xa_partials(self.config)
            and self.config.stages > 1
            and self.m_tiles == 1
            and not rest
            and columns >= MIN_PARTIALS
            and self.turns_of_shares(rank, k) <= self.per_stage
        )

    def supports_add_residual(self, tokens: int) -> bool:
        """Whether the product can end with a norm's beginning: of tokens of which a tile has all.

        What is scaled is stored beside the sum.
        """
        config = self.config
        more = max(0, 2 * self.stored_tokens - config.tile_m) * config.warpgroups_n * TILE_ROWS * 2
        return tokens == config.tile_m and config.smem_bytes() + more <= SMEM_LIMIT

    @property
    def per_stage(self) -> int:
        """Tiles of 128 columns in a stage."""
        return self.config.block_k // TILE_COLUMNS

    def coordinates(self, tile) -> tuple[Any, Any]:
        """Tile of tokens and tile of outputs; tiles that run together share what is in the L2."""
        if self.m_tiles == 1:
            return jnp.int32(0), tile
        return plgpu.planar_snake(tile, (self.m_tiles, self.n_tiles), 0, 8)

    @property
    def height(self) -> int:
        """Outputs of a row tile."""
        return TILE_ROWS // 2 if self.paired else TILE_ROWS

    def row_tile(self, n_tile, row):
        """The row tile that a warpgroup has of a tile."""
        if self.paired:
            first, half = self.whole_row_tiles(n_tile)
            return 2 * (first + row) + half
        return n_tile * self.config.warpgroups_n + row

    def whole_row_tiles(self, n_tile) -> tuple[Any, Any]:
        """Of a paired tile, the first of the whole row tiles, and which half of each it has."""
        return lax.div(n_tile, 2) * self.config.warpgroups_n, lax.rem(n_tile, 2)

    def this_block(self):
        """The block of threads that asks; those of a cluster follow one another."""
        block = lax.axis_index("block")
        return block * self.split + lax.axis_index("member") if self.in_clusters else block

    def pieces(self, block):
        """How many tiles, or parts of tiles, a block computes."""
        if self.split > 1:
            place = self._in_cluster(block)
            return place.whole + place.shared
        if not self.shared:
            return lax.div(self.tiles - block + self.blocks - 1, self.blocks)
        return self.shared_pieces(block) + self.tiles // self.blocks

    def shared_pieces(self, block):
        """How many of them, the first ones, are of shared tiles: 0 to 2."""
        first, last = self._first_step(block), self._first_step(block + 1) - 1
        return lax.div(last, self.steps) - lax.div(first, self.steps) + 1

    def piece(self, block, index):
        """The tile of a piece, its first step of K and its number of steps."""
        if self.split > 1:
            cluster, member, whole, _ = self._in_cluster(block)
            shared = index == whole
            turn = jnp.where(shared, self._tiles_of(cluster) - 1, index * self.split + member)
            first, end = (lax.div((member + i) * self.steps, self.split) for i in (0, 1))
            return (
                cluster + turn * self.clusters,
                jnp.where(shared, first, 0),
                jnp.where(shared, end - first, self.steps),
            )
        if not self.shared:
            return block + index * self.blocks, 0, self.steps
        first, end = self._first_step(block), self._first_step(block + 1)
        tile = lax.div(first, self.steps) + index
        begin = jnp.maximum(first, tile * self.steps)
        count = jnp.minimum(end, (tile + 1) * self.steps) - begin
        behind = index - self.shared_pieces(block)
        shared = behind < 0
        return (
            jnp.where(shared, tile, self.shared + block + behind * self.blocks),
            jnp.where(shared, begin - tile * self.steps, 0),
            jnp.where(shared, count, self.steps),
        )

    def awaited_behind(self, block):
        """The piece behind which a block waits for x A^T: the first that begins a tile.

        Of shared pieces only the last can be one; a block without any waits behind its last piece.
        """
        if not self.shared:
            return 0
        last_shared = jnp.maximum(self.shared_pieces(block) - 1, 0)
        _, first, _ = self.piece(block, last_shared)
        return jnp.minimum(last_shared + jnp.where(first > 0, 1, 0), self.pieces(block) - 1)

    def first_stored(self, block):
        """The first piece that is a whole tile, which its block stores; else the last piece."""
        if not self.shared:
            return 0
        _, _, count = self.piece(block, 0)
        behind_shared = jnp.minimum(self.shared_pieces(block), self.pieces(block) - 1)
        return jnp.where(count == self.steps, 0, behind_shared)

    def share(self, block, index):
        """Whom a block adds up a tile with, and what of it.

        Args:
            block: the block.
            index: of the piece, 0 or 1.

        Returns:
            The tile; the first block that shares it; how many do, or 0 if the piece is a whole tile
            or there is none; the first of the units that this block adds up, and the one after the
            last.
        """
        tile, _, count = self.piece(block, index)
        partial = (index < self.shared_pieces(block)) & (count < self.steps)
        tile = jnp.where(partial, tile, 0)
        first, last = self._block_of(tile * self.steps), self._block_of((tile + 1) * self.steps - 1)
        sharers = last - first + 1
        begin, end = (lax.div((block - first + i) * self.units, sharers) for i in (0, 1))
        return tile, first, *(jnp.where(partial, i, 0) for i in (sharers, begin, end))

    def slot(self, block, tile):
        """Where a block leaves its partial sum of a tile; along the line, one of both rises."""
        return block + tile

    def next_slot(self, slot):
        """The next place of the pipeline; the remainder by its depth would be a division."""
        return jnp.where(slot == self.config.stages - 1, 0, slot + 1)

    def _tiles_of(self, cluster):
        return lax.div(self.tiles - cluster + self.clusters - 1, self.clusters)

    def _in_cluster(self, block):
        cluster = lax.div(block, self.split)
        member = block - cluster * self.split
        count = self._tiles_of(cluster)
        shared = jnp.where(lax.rem(count, self.split) == 1, 1, 0)
        whole = lax.div(count - shared - member + self.split - 1, self.split)
        return _Place(cluster, member, whole, shared)

    def _first_step(self, block):
        return lax.div(jnp.minimum(block, self.sharing) * self.shared * self.steps, self.sharing)

    def _block_of(self, step):
        """The last block that begins at or before a step."""
        return lax.div((step + 1) * self.sharing - 1, self.shared * self.steps)


def make_schedule(
    config: TileConfig,
    m: int,
    row_tiles: int,
    k: int,
    num_sms: int,
    *,
    simulated: bool = False,
    paired: bool = False,
) -> Plan:
    """The plan for M tokens, tiles of 64 rows and K columns."""
    m_tiles, n_tiles = -(-m // config.tile_m), -(-row_tiles // config.warpgroups_n)
    if paired:
        n_tiles = 2 * -(-row_tiles // (2 * config.warpgroups_n))
    tiles, steps = m_tiles * n_tiles, -(-k // config.block_k)
    split = config.split if config.split <= steps else 1
    clusters = clusters_of(tiles, split, num_sms)
    if not clusters:
        split, clusters = 1, min(tiles * (steps if config.stream_k else 1), num_sms)
    blocks = clusters * split
    return Plan(config, m_tiles, n_tiles, row_tiles, steps, blocks, split, simulated, paired)
