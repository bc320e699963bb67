"""The tile schedule: which CTA computes which tiles and which steps of K."""

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

# CTAs in clusters that are resident at a time on an H100 SXM or H200, at least.
_RESIDENT_IN_CLUSTERS = 96


class WorkTile(NamedTuple):
    """A tile of the result, or a run of its steps, that one CTA computes."""

    tile: Any  # index of the tile
    first: Any  # first step of K
    steps: Any  # number of steps of K; fewer than the tile has if CTAs split it


class Fixup(NamedTuple):
    """The part that one CTA has in the fix-up of a split tile."""

    tile: Any  # index of the tile
    first_peer: Any  # first CTA with a run of the tile's steps
    peers: Any  # number of these CTAs; 0 if the work tile is a whole tile or does not exist
    begin: Any  # first unit of tokens that the CTA adds up
    end: Any  # the unit after the last


class _ClusterWork(NamedTuple):
    """The work of a CTA in a cluster."""

    cluster: Any  # index of the cluster
    member: Any  # index of the CTA in the cluster
    whole: Any  # number of tiles that the CTA computes alone
    split: Any  # 1 if the cluster splits one more tile, or 0


@dataclasses.dataclass(frozen=True)
class TileSchedule:
    """Which CTA computes what. A step is one pipeline stage of K.

    A CTA computes whole tiles. With stream-K every CTA gets the same number of them, and the CTAs
    split the tiles left over: the steps of these tiles form a line that is cut into equal runs, one
    for each CTA. A run is no longer than a tile, so it touches two tiles at most, and a CTA begins
    with it: its partial sums are on their way while it computes whole tiles. With clusters, tiles
    belong to clusters of CTAs. Each CTA of a cluster computes the same number of whole tiles; the
    steps of the tile left over, if there is one, are cut into runs, with which the CTAs end.

    For SwiGLU row tiles are paired, with 32 rows of each half of the weight. A tile has the upper
    or the lower halves of as many whole row tiles, which are one box for the TMA.
    """

    config: TileConfig  # tiling of the kernel
    m_tiles: int  # number of tiles along the tokens
    n_tiles: int  # number of tiles along the outputs
    row_tiles: int  # number of tiles of 64 rows of the weight
    steps: int  # number of steps of a tile
    blocks: int  # number of CTAs
    split: int  # number of CTAs of a cluster; with 1 every CTA is a cluster
    simulated: bool  # whether the interpreter runs the kernel, which has no clusters
    paired: bool = False  # whether row tiles are paired for SwiGLU

    @property
    def members(self) -> int:
        """Number of CTAs that have a tile of the result together, beside each other."""
        return 2 if self.config.multicast and not self.simulated else 1

    @property
    def rows(self) -> int:
        """Number of row tiles of a tile of the result."""
        return self.config.warpgroups_n * self.members

    @property
    def tiles(self) -> int:
        """Number of tiles of the result."""
        return self.m_tiles * self.n_tiles

    @property
    def split_tiles(self) -> int:
        """Number of tiles that stream-K splits: the tiles left over, which are the first ones."""
        return self.tiles % self.blocks if self.config.stream_k else 0

    @property
    def splitting_blocks(self) -> int:
        """Number of CTAs with a run of a split tile, which are the first ones."""
        return min(self.blocks, self.split_tiles * self.steps)

    @property
    def clusters(self) -> int:
        """Number of clusters."""
        return self.blocks // self.split

    @property
    def in_clusters(self) -> bool:
        """Whether the CTAs of a cluster access the shared memory of each other."""
        return self.split > 1 and not self.simulated

    @property
    def resident_blocks(self) -> int:
        """Number of the first CTAs that certainly run at a time: all CTAs wait for them."""
        return self.blocks if self.split == 1 else min(self.blocks, _RESIDENT_IN_CLUSTERS)

    @property
    def partial_slots(self) -> int:
        """Number of slots for the partial sums of split tiles."""
        return self.splitting_blocks + self.split_tiles - 1

    @property
    def max_peers(self) -> int:
        """Bound on the CTAs that split one tile: the inner ones have whole runs of it."""
        shortest = self.split_tiles * self.steps // self.splitting_blocks
        return -(-(self.steps - 1) // shortest) + 1

    @property
    def longest_run(self) -> int:
        """Number of steps of the longest run."""
        return -(-self.split_tiles * self.steps // self.splitting_blocks)

    @property
    def unit(self) -> int:
        """Tokens that a CTA adds up at a time; if possible, each peer has at most one unit.

        A unit has up to 64 tokens, for which a thread holds 32 sums.
        """
        fewest_peers = -(-self.steps // self.longest_run)
        tokens = min(64, -(-self.config.tile_m // (8 * fewest_peers)) * 8)
        return next(unit for unit in range(tokens, 0, -8) if self.config.tile_m % unit == 0)

    @property
    def units(self) -> int:
        """Number of units of a tile."""
        return self.config.tile_m // self.unit

    @property
    def stores_whole_tiles(self) -> bool:
        """Whether any CTA computes a whole tile; the other tiles are stored in parts."""
        if self.split_tiles:
            return self.tiles > self.blocks or self.longest_run == self.steps
        return self.split == 1 or self.tiles > self.clusters

    @property
    def stored_tokens(self) -> int:
        """The most tokens that a warpgroup stores at a time."""
        if self.stores_whole_tiles:
            return self.config.tile_m
        return self.unit if self.split_tiles else self.config.tile_m // self.config.receivers

    @property
    def arrivals(self) -> int:
        """Number of TMA copies of a stage: codes, scales, and tokens by 128 columns."""
        return 2 + self.tiles_per_stage

    @property
    def tiles_per_stage(self) -> int:
        """Number of tiles of 128 columns in a stage."""
        return self.config.block_k // TILE_COLUMNS

    @property
    def tile_outputs(self) -> int:
        """Number of outputs of a row tile."""
        return TILE_ROWS // 2 if self.paired else TILE_ROWS

    def shrink_turns(self, rank: int, k: int) -> int:
        """Number of units that a CTA makes of the partials of x A^T, A [rank, K].

        See `make_partials.compute_partials`.
        """
        units = k // TILE_COLUMNS * -(-rank // PARTIAL_COLUMNS)
        return -(-units // self.resident_blocks)

    def supports_lora_shrink(self, rank: int, k: int) -> bool:
        """Whether CTAs can make the partials of x A^T of what their first stage holds."""
        columns, rest = divmod(k, TILE_COLUMNS)
        return (
            supports_xa_partials(self.config)
            and not self.config.e4m3  # A is bfloat16
            and self.config.stages > 1
            and self.m_tiles == 1
            and not rest
            and columns >= MIN_PARTIALS
            and self.shrink_turns(rank, k) <= self.tiles_per_stage
        )

    def supports_add_residual(self, tokens: int) -> bool:
        """Whether the product can add to the residual: one tile has all tokens.

        The scaled sum is stored beside the sum, which takes shared memory.
        """
        config = self.config
        more = max(0, 2 * self.stored_tokens - config.tile_m)
        more *= config.warpgroups_n * TILE_ROWS * 2
        return tokens == config.tile_m and config.smem_bytes() + more <= SMEM_LIMIT

    def coordinates(self, tile) -> tuple[Any, Any]:
        """Indices along tokens and outputs; tiles that run at a time read the same lines of L2."""
        if self.m_tiles == 1:
            return jnp.int32(0), tile
        return plgpu.planar_snake(tile, (self.m_tiles, self.n_tiles), 0, 8)

    def row_tile(self, n_tile, row):
        """The row tile of a tile that consumer warpgroup `row` computes."""
        if self.paired:
            first, half = self.whole_row_tiles(n_tile)
            return 2 * (first + row) + half
        return n_tile * self.rows + row

    def whole_row_tiles(self, n_tile) -> tuple[Any, Any]:
        """The first whole row tile of a paired tile, and which half of each the tile has."""
        return lax.div(n_tile, 2) * self.config.warpgroups_n, lax.rem(n_tile, 2)

    def this_block(self):
        """Index of the CTA that runs this code; the CTAs of a cluster follow one another."""
        block = lax.axis_index("block")
        return block * self.split + lax.axis_index("member") if self.in_clusters else block

    def first_row(self):
        """The first of this CTA's row tiles in a tile of the result."""
        if self.members == 1:
            return 0
        return lax.axis_index("member") * self.config.warpgroups_n

    def num_work_tiles(self, block):
        """Number of work tiles of a CTA."""
        if self.split > 1:
            work = self._cluster_work(block)
            return work.whole + work.split
        if not self.split_tiles:
            return lax.div(self.tiles - block + self.blocks - 1, self.blocks)
        return self.num_split_work_tiles(block) + self.tiles // self.blocks

    def num_split_work_tiles(self, block):
        """Number of the work tiles, the first ones, that are runs of split tiles: 0 to 2."""
        first, last = self._first_step(block), self._first_step(block + 1) - 1
        return lax.div(last, self.steps) - lax.div(first, self.steps) + 1

    def work_tile(self, block, index) -> WorkTile:
        """The work tile of a CTA with this index."""
        if self.split > 1:
            return self._work_tile_of_cluster(block, index)
        if not self.split_tiles:
            return WorkTile(block + index * self.blocks, 0, self.steps)
        first, end = self._first_step(block), self._first_step(block + 1)
        tile = lax.div(first, self.steps) + index
        begin = jnp.maximum(first, tile * self.steps)
        count = jnp.minimum(end, (tile + 1) * self.steps) - begin
        whole_index = index - self.num_split_work_tiles(block)
        split = whole_index < 0
        return WorkTile(
            jnp.where(split, tile, self.split_tiles + block + whole_index * self.blocks),
            jnp.where(split, begin - tile * self.steps, 0),
            jnp.where(split, count, self.steps),
        )

    def xa_awaited_after(self, block):
        """Index of the work tile after which a CTA waits for x A^T: the first that begins a tile.

        Of split work tiles only the last can begin a tile; a CTA in which no work tile does waits
        after its last one.
        """
        if not self.split_tiles:
            return 0
        last_split = jnp.maximum(self.num_split_work_tiles(block) - 1, 0)
        _, first, _ = self.work_tile(block, last_split)
        return jnp.minimum(last_split + jnp.where(first > 0, 1, 0), self.num_work_tiles(block) - 1)

    def first_stored(self, block):
        """Index of the first work tile that is a whole tile, or else of the last work tile."""
        if not self.split_tiles:
            return 0
        _, _, count = self.work_tile(block, 0)
        after_split = jnp.minimum(self.num_split_work_tiles(block), self.num_work_tiles(block) - 1)
        return jnp.where(count == self.steps, 0, after_split)

    def fixup(self, block, index) -> Fixup:
        """The part of a CTA in the fix-up of its work tile 0 or 1."""
        tile, _, count = self.work_tile(block, index)
        partial = (index < self.num_split_work_tiles(block)) & (count < self.steps)
        tile = jnp.where(partial, tile, 0)
        first, last = self._block_of(tile * self.steps), self._block_of((tile + 1) * self.steps - 1)
        peers = last - first + 1
        begin, end = (lax.div((block - first + i) * self.units, peers) for i in (0, 1))
        return Fixup(tile, first, *(jnp.where(partial, i, 0) for i in (peers, begin, end)))

    def partial_slot(self, block, tile):
        """Slot of a CTA's partial sum of a split tile; along the line, CTA or tile rises."""
        return block + tile

    def next_slot(self, slot):
        """The next slot of the pipeline; the remainder by its depth would be a division."""
        return jnp.where(slot == self.config.stages - 1, 0, slot + 1)

    def _work_tile_of_cluster(self, block, index) -> WorkTile:
        cluster, member, whole, _ = self._cluster_work(block)
        split = index == whole
        turn = jnp.where(split, self._tiles_of(cluster) - 1, index * self.split + member)
        first, end = (lax.div((member + i) * self.steps, self.split) for i in (0, 1))
        return WorkTile(
            cluster + turn * self.clusters,
            jnp.where(split, first, 0),
            jnp.where(split, end - first, self.steps),
        )

    def _tiles_of(self, cluster):
        return lax.div(self.tiles - cluster + self.clusters - 1, self.clusters)

    def _cluster_work(self, block) -> _ClusterWork:
        cluster = lax.div(block, self.split)
        member = block - cluster * self.split
        count = self._tiles_of(cluster)
        split = jnp.where(lax.rem(count, self.split) == 1, 1, 0)
        whole = lax.div(count - split - member + self.split - 1, self.split)
        return _ClusterWork(cluster, member, whole, split)

    def _first_step(self, block):
        line = jnp.minimum(block, self.splitting_blocks) * self.split_tiles * self.steps
        return lax.div(line, self.splitting_blocks)

    def _block_of(self, step):
        """The last CTA that begins at or before a step of the line."""
        return lax.div((step + 1) * self.splitting_blocks - 1, self.split_tiles * self.steps)


def adds_adapter(first: Any) -> Any:
    """Whether a work tile with this first step adds xa B^T to its tile: it begins the tile.

    Of the split work tiles of a CTA only the last can begin a tile: x A^T has time to be added up.
    """
    return first == 0


def make_schedule(
    config: TileConfig,
    m: int,
    row_tiles: int,
    k: int,
    num_sms: int,
    *,
    simulated: bool = False,
    paired: bool = False,
) -> TileSchedule:
    """The schedule of a product of M tokens, tiles of 64 rows, and K columns.

    `num_sms` bounds the number of CTAs. The interpreter may run the kernel, and row tiles may be
    paired for SwiGLU.
    """
    members = 2 if config.multicast and not simulated else 1
    num_sms //= members
    m_tiles, n_tiles = -(-m // config.tile_m), -(-row_tiles // (config.warpgroups_n * members))
    if paired:
        n_tiles = 2 * -(-row_tiles // (2 * config.warpgroups_n))
    tiles, steps = m_tiles * n_tiles, -(-k // config.block_k)
    split = config.split if config.split <= steps else 1
    clusters = clusters_of(tiles, split, num_sms)
    if not clusters:
        split, clusters = 1, min(tiles * (steps if config.stream_k else 1), num_sms)
    return TileSchedule(
        config=config,
        m_tiles=m_tiles,
        n_tiles=n_tiles,
        row_tiles=row_tiles,
        steps=steps,
        blocks=clusters * split,
        split=split,
        simulated=simulated,
        paired=paired,
    )
