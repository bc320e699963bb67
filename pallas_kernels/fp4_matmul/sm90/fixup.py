"""What warpgroups and CTAs that split a tile along K do at its end: they add up their sums.

Slices of a CTA add up through shared memory, CTAs of a cluster through the shared memory of each
other, and CTAs that split tiles by stream-K through global memory. Every sum has a fixed order.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fp4_matmul.sm90.context import Consumer, load_rows
from pallas_kernels.fp4_matmul.sm90.epilogue import load_bias, load_residual, store
from pallas_kernels.fp4_matmul.sm90.synchronize import arrive, opaque, wait
from pallas_kernels.fp4_matmul.tiling import TILE_ROWS


def add_slices(consumer: Consumer, value: jax.Array, index: Any) -> jax.Array:
    """The sum of the slices' accumulators, in the warpgroup of the first slice."""
    smem, row, k_slice = consumer.smem, consumer.row, consumer.k_slice

    def collect(value):
        plgpu.barrier_wait(smem.sums_full.at[row])
        for other in range(consumer.schedule.config.slices - 1):
            value += plgpu.load(smem.sums.at[other, row], layout=plgpu.Layout.WGMMA)
        plgpu.barrier_arrive(smem.sums_empty.at[row])
        return value

    def publish(value):
        @pl.when(index > 0)
        def await_reading_of_the_last_sums():
            plgpu.barrier_wait(smem.sums_empty.at[row])

        smem.sums[k_slice - 1, row] = value
        plgpu.barrier_arrive(smem.sums_full.at[row])
        return value

    return lax.cond(k_slice == 0, collect, publish, value)


def add_cluster_parts(
    consumer: Consumer, value: jax.Array, bias: jax.Array | None, token: Any, row_tile: Any
) -> None:
    """Adds up a tile over the CTAs of the cluster, and stores it: each receiver some tokens.

    The sum of this CTA is float32 [64, tile_m], for the tokens from one on; the bias [64] may be
    None.
    """
    config, smem, row = consumer.schedule.config, consumer.smem, consumer.row
    member = opaque(lax.axis_index("member"))  # or what follows from it waits in registers
    width = config.tile_m // config.receivers
    full = smem.parts_full.at[row]
    parts = [
        lax.slice(value, (0, start), (TILE_ROWS, start + width))
        for start in range(0, config.receivers * width, width)
    ]
    first = token + jnp.minimum(member, config.receivers - 1) * width
    residual = load_residual(consumer, first, width, row_tile)  # requested before the wait
    own = parts[0]
    for receiver, theirs in enumerate(parts):

        @pl.when(member != receiver)
        def send_part(theirs=theirs, receiver=receiver):
            plgpu.async_store_smem(
                theirs,
                smem.parts.at[member - jnp.where(member > receiver, 1, 0), row],
                full,
                cluster_idx=jnp.int32(receiver),
                cluster_dim="member",
            )

        own = jnp.where(jnp.broadcast_to(member == receiver, own.shape), theirs, own)

    @pl.when(member < config.receivers)
    def receive_parts():
        plgpu.barrier_wait(full)
        total = own
        for other in range(consumer.schedule.split - 1):
            total += plgpu.load(smem.parts.at[other, row], layout=plgpu.Layout.WGMMA)
        store(consumer, total, bias, token + member * width, row_tile, residual)


def publish_partial(consumer: Consumer, value: jax.Array, tile: Any) -> None:
    """Writes the partial sum of a split tile to this CTA's slot of global memory."""
    schedule, block = consumer.schedule, consumer.block
    slot = schedule.partial_slot(block, tile) if schedule.split_tiles else block
    plgpu.store(consumer.gmem.partial.at[slot, consumer.row_of_tile], value, optimized=False)


def arrive_at_split_tiles(consumer: Consumer) -> None:
    """Tells the peers that this CTA's partial sums are written."""
    schedule, block = consumer.schedule, consumer.block
    arrive(_locks(consumer), [schedule.fixup(block, i).peers for i in (0, 1)])


def _locks(consumer: Consumer) -> list[Any]:
    """The locks of the two tiles that this CTA may split with others."""
    schedule, block = consumer.schedule, consumer.block
    tiles = [schedule.fixup(block, index).tile for index in (0, 1)]
    locks = [1 + tile * schedule.rows + consumer.row_of_tile for tile in tiles]
    return [consumer.gmem.locks.at[pl.ds(lock, 1)] for lock in locks]


def add_split_tiles(consumer: Consumer) -> None:
    """Adds up and stores this CTA's units of the tiles that it splits, in the peers' order."""
    schedule, block, row = consumer.schedule, consumer.block, consumer.row_of_tile
    config, unit = schedule.config, schedule.unit
    fixups = [schedule.fixup(block, index) for index in (0, 1)]
    awaited = [jnp.where(begin < end, peers, 0) for _, _, peers, begin, end in fixups]
    waiters = [jnp.minimum(peers, schedule.units) for peers in awaited]
    wait(_locks(consumer), awaited, waiters)

    @pl.loop(0, 2)
    def add_split_tile(index):
        tile, first, peers, begin, end = schedule.fixup(block, index)
        m_tile, n_tile = schedule.coordinates(tile)
        row_tile = schedule.row_tile(n_tile, row)

        @pl.loop(begin, end)
        def add_unit(i):
            tokens = pl.ds(i * unit, unit)
            token = m_tile * config.tile_m + i * unit
            residual = load_residual(consumer, token, unit, row_tile)
            total = _sum_over_peers(consumer, tile, first, peers, tokens)
            store(consumer, total, load_bias(consumer, row_tile), token, row_tile, residual)


def _sum_over_peers(
    consumer: Consumer, tile: Any, first: Any, peers: Any, tokens: pl.Slice
) -> jax.Array:
    """The sum of the peers' partial sums of one unit, float32 [64, unit]."""
    schedule = consumer.schedule
    # What a batch reads is in flight together, in registers of the accumulator and operands.
    fitting = max(1, (consumer.registers - 64) // (schedule.unit // 2))
    batches = -(-schedule.max_peers // min(8, fitting))
    batch = -(-schedule.max_peers // batches)
    zero = jnp.zeros((TILE_ROWS, schedule.unit), jnp.float32)

    @pl.loop(0, lax.div(peers + batch - 1, batch), init_carry=zero)
    def total(i, total):
        for j in range(batch):
            peer = i * batch + j
            slot = schedule.partial_slot(first + jnp.minimum(peer, peers - 1), tile)
            source = consumer.gmem.partial.at[slot, consumer.row_of_tile, slice(None), tokens]
            value = load_rows(source)
            # What fills up the last batch has been added before.
            counts = jnp.broadcast_to(peer < peers, value.shape)
            total += jnp.where(counts, value, zero)
        return total

    return total
