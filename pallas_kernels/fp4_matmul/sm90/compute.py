"""The warpgroups that compute: they decode, multiply, and add up what is shared."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fp4_matmul import layout
from pallas_kernels.fp4_matmul.sm90 import begin_norm, swiglu
from pallas_kernels.fp4_matmul.sm90.codes import (
    CODES,
    SCALES,
    decode_pair,
    decode_reference,
    decode_tile,
)
from pallas_kernels.fp4_matmul.sm90.make_shares import make_shares
from pallas_kernels.fp4_matmul.sm90.multiply import add_product
from pallas_kernels.fp4_matmul.sm90.pipeline import adds_adapter
from pallas_kernels.fp4_matmul.sm90.schedule import Plan
from pallas_kernels.fp4_matmul.sm90.synchronize import arrive, opaque, wait
from pallas_kernels.fp4_matmul.sm90.xa_partials import Shares, load_b, operand
from pallas_kernels.fp4_matmul.tiling import TILE_ROWS


def compute(
    plan: Plan,
    gm: dict[str, Any],
    sm: dict[str, Any],
    xa_partials: Shares | None,
    *,
    warpgroup: Any,
    registers: int,
) -> None:
    """Decodes its tiles of all stages of this block, multiplies, and stores the result.

    Args:
        plan: which pieces.
        gm: operands and results in global memory.
        sm: stages and barriers.
        xa_partials: of x A^T, or None.
        warpgroup: which one of those that compute.
        registers: of each of its threads.
    """
    config, simulated = plan.config, plan.simulated
    block = plan.this_block()
    row, part = lax.rem(warpgroup, config.warpgroups_n), lax.div(warpgroup, config.warpgroups_n)
    spare = registers - config.registers()

    def zeros(columns, dtype):
        value = jnp.zeros((TILE_ROWS, columns), dtype)
        return value if simulated else plgpu.layout_cast(value, plgpu.Layout.WGMMA)

    def decode(slot, j):
        """The weights of tile j of a stage, columns 0..63 and 64..127, [64, 64] each."""
        if simulated:
            place = (slot, slice(None), row, j) if plan.paired else (slot, row, j)
            codes, scales = sm["codes"][place], sm["scales"][place]
            if plan.paired:
                codes = codes.swapaxes(0, 1).reshape(4, 256)
                scales = scales.swapaxes(0, 1).reshape(128)
            return tuple(jnp.split(decode_reference(codes, scales), 2, axis=1))
        if plan.paired:
            place = slot, slice(None), row, j
            return decode_pair(sm["codes"].at[place], sm["scales"].at[place])
        return decode_tile(
            plgpu.load(sm["codes"].at[slot, row, j], layout=CODES),
            plgpu.load(sm["scales"].at[slot, row, j], layout=SCALES),
        )

    def multiply_tile(acc, slot, j, decoded):
        for half, weight in enumerate(decoded):
            place = slot, part, j, half
            acc = add_product(acc, weight, sm["x"], *place, simulated=simulated)
            if config.in_flight:
                plgpu.wgmma_wait(config.in_flight)
        return acc

    def await_stage(slot):
        with jax.named_scope("await stage"):
            plgpu.barrier_wait(sm["full"].at[slot])

    def decode_next(i, count, slot):
        """The first tile behind stage i, or nothing behind the last one.

        A branch of its own, or ptxas would decode when the products of stage i have ended.
        """

        def first_tile():
            await_stage(plan.next_slot(slot))
            return tuple(decode(plan.next_slot(slot), part))

        def nothing():
            return (zeros(64, jnp.bfloat16),) * 2

        return lax.cond(i < count - 1, first_tile, nothing)

    def multiply(done, count):
        """The products of so many stages, [64, T], and the slot behind them."""
        first = lax.rem(done, config.stages)
        decoded = ()
        if config.ahead:
            await_stage(first)
            decoded = decode(first, part)

        acc = zeros(config.tile_m, jnp.float32)

        @pl.loop(0, count, init_carry=(acc, first, *decoded))
        def carry(i, carry):
            acc, slot, *decoded = carry
            if not config.ahead:
                await_stage(slot)
                decoded = decode(slot, part)
            acc = multiply_tile(acc, slot, 0, decoded)
            for j in range(config.slices, plan.per_stage, config.slices):
                acc = multiply_tile(acc, slot, j, decode(slot, j + part))
            decoded = decode_next(i, count, slot) if config.ahead else ()
            # Where a loop turns back, ptxas gives away registers that a product in flight reads.
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(sm["empty"].at[slot])
            return acc, plan.next_slot(slot), *decoded

        return carry[:2]

    def add_slices(value, index):
        """The sum of the slices' accumulators, in the warpgroup of the first."""

        def collect(value):
            plgpu.barrier_wait(sm["sums_full"].at[row])
            for other in range(config.slices - 1):
                value += plgpu.load(sm["sums"].at[other, row], layout=plgpu.Layout.WGMMA)
            plgpu.barrier_arrive(sm["sums_empty"].at[row])
            return value

        def publish(value):
            @pl.when(index > 0)
            def _():
                plgpu.barrier_wait(sm["sums_empty"].at[row])

            sm["sums"][part - 1, row] = value
            plgpu.barrier_arrive(sm["sums_full"].at[row])
            return value

        return lax.cond(part == 0, collect, publish, value)

    def read(name, *place):
        """A matrix [64, .], or a number for each of its rows, from global memory."""
        source = gm[name].at[place]
        axis = plgpu.Layout.WGMMA if len(source.shape) == 2 else plgpu.Layout.WGMMA.reduce(1)
        return plgpu.load(source, layout=axis, optimized=False)

    def over_tokens(numbers, tokens=config.tile_m):
        return lax.broadcast_in_dim(numbers, (TILE_ROWS, tokens), (0,))

    def row_start(row_tile):
        """Its first row of the weight; a row tile beyond the weight has the last one's."""
        return jnp.minimum(row_tile, plan.row_tiles - 1) * plan.height

    def pair(row_start):
        """Rows of the gate and of what it multiplies."""
        return [
            pl.ds(start, plan.height)
            for start in (row_start, plan.row_tiles * plan.height + row_start)
        ]

    def divisors(row_start):
        if plan.paired:
            return swiglu.load_numbers(gm["divisor"], *pair(row_start), simulated=simulated)
        return read("divisor", pl.ds(row_start, TILE_ROWS))

    def adapter(row_start) -> list[Any]:
        """B [64, R] in parts of 64 columns; with shares, as `load_b` reads it."""
        rows = pl.ds(row_start, TILE_ROWS)
        columns = [pl.ds(column, 64) for column in range(0, gm["b"].shape[1], 64)]
        if xa_partials is not None:
            parts = pair(row_start) if plan.paired else [rows]
            return [load_b(*(gm["b"].at[some, part] for some in parts)) for part in columns]
        if plan.paired:  # and simulated
            gate, other = pair(row_start)
            return [swiglu.in_turn(gm["b"][gate, part], gm["b"][other, part]) for part in columns]
        return [read("b", rows, part) for part in columns]

    def add_adapter(acc, b, slot, first, row_start):
        """Adds B xa^T, once or not at all; xa is in the stage at a slot, if any is."""

        @pl.loop(0, jnp.where(adds_adapter(first), 1, 0), init_carry=acc)
        def acc(_, acc):
            columns = adapter(row_start) if b is None else b  # asked for before anything is awaited
            # Those that do not multiply wait too, as for every stage: who skips one takes its
            # arrivals for those of the next round of the pipeline.
            plgpu.barrier_wait(sm["full"].at[slot])

            @pl.loop(0, 1 if config.slices == 1 else jnp.where(part == 0, 1, 0), init_carry=acc)
            def acc(_, acc):
                for j, part_of_b in enumerate(columns):
                    weight = part_of_b if xa_partials is None else operand(part_of_b, slot)
                    place = slot, 0, j // 2, j % 2
                    acc = add_product(acc, weight, sm["x"], *place, simulated=simulated)
                plgpu.wgmma_wait(0)
                return acc

            plgpu.barrier_arrive(sm["empty"].at[slot])
            return acc

        return acc

    def stream_of(token, width, row_tile):
        """What the residual stream has for so many tokens and a row tile, [64, .]; or None."""
        if "residual" not in gm:
            return None
        tokens, rows = pl.ds(token, width), pl.ds(row_start(row_tile), TILE_ROWS)
        return begin_norm.load(gm["residual"].at[tokens, rows])

    def store(value, bias, token, row_tile, residual):
        """Starts to store the outputs [64, .] of a row tile, of the tokens from one on."""
        width = value.shape[1]
        tokens, rows = pl.ds(token, width), pl.ds(row_tile * plan.height, plan.height)
        if plan.paired:
            factor = gm["factor"] if simulated else sm["factor"]
            value = swiglu.apply(value, factor.at[tokens], simulated=simulated)
        elif bias is not None:
            value += over_tokens(bias.astype(jnp.float32), width)
        if gm["y"].dtype == jnp.float32:
            gm["y"].at[rows, tokens][...] = value
            return
        values = {"y": value}
        if residual is not None:
            scale = read("scale", pl.ds(row_start(row_tile), TILE_ROWS))
            values["y"], values["scaled"], sums = begin_norm.add(value, residual, scale)
            sums *= 1 / gm["scale"].shape[0]
            if plan.n_tiles * config.warpgroups_n > plan.row_tiles:
                inside = jnp.broadcast_to(row_tile < plan.row_tiles, sums.shape)
                sums = jnp.where(inside, sums, jnp.zeros_like(sums))
            count = begin_norm.SQUARES_OF_ROW_TILE
            gm["square_partials"].at[pl.ds(row_tile * count, count), tokens][...] = sums
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the last one
        places = {name: sm["y"].at[row, pl.ds(i * width, width)] for i, name in enumerate(values)}
        for name, value in values.items():
            if plan.paired:
                places[name][...] = value
            else:
                places[name].T[...] = plgpu.layout_cast(
                    value.astype(jnp.bfloat16), plgpu.Layout.WGMMA_TRANSPOSED
                )
        plgpu.commit_smem()
        for name, place in places.items():
            plgpu.copy_smem_to_gmem(place, gm[name].at[tokens, rows])

    def bias_of(row_tile):
        return read("bias", pl.ds(row_start(row_tile), TILE_ROWS)) if "bias" in gm else None

    def add_parts(value, bias, token, row_tile):
        """Adds up a tile over the blocks of the cluster: each receiver some of its tokens."""
        member = opaque(lax.axis_index("member"))  # or what follows from it waits in registers
        width = config.tile_m // config.receivers
        full = sm["parts_full"].at[row]
        parts = [
            lax.slice(value, (0, start), (TILE_ROWS, start + width))
            for start in range(0, config.receivers * width, width)
        ]
        first = token + jnp.minimum(member, config.receivers - 1) * width
        residual = stream_of(first, width, row_tile)  # asked for before anything is awaited
        own = parts[0]
        for receiver, theirs in enumerate(parts):

            @pl.when(member != receiver)
            def _(theirs=theirs, receiver=receiver):
                plgpu.async_store_smem(
                    theirs,
                    sm["parts"].at[member - jnp.where(member > receiver, 1, 0), row],
                    full,
                    cluster_idx=jnp.int32(receiver),
                    cluster_dim="member",
                )

            own = jnp.where(jnp.broadcast_to(member == receiver, own.shape), theirs, own)

        @pl.when(member < config.receivers)
        def _():
            plgpu.barrier_wait(full)
            total = own
            for other in range(plan.split - 1):
                total += plgpu.load(sm["parts"].at[other, row], layout=plgpu.Layout.WGMMA)
            store(total, bias, token + member * width, row_tile, residual)

    def locks():
        """Those of the two tiles that this block may share."""
        tiles = [plan.share(block, index)[0] for index in (0, 1)]
        return [gm["locks"].at[pl.ds(1 + tile * config.warpgroups_n + row, 1)] for tile in tiles]

    def add_shared_tiles():
        """Adds up this block's units of the tiles that it shares, in the order of the sharers."""
        parts = [plan.share(block, index) for index in (0, 1)]
        awaited = [jnp.where(begin < end, sharers, 0) for _, _, sharers, begin, end in parts]
        waiters = [jnp.minimum(sharers, plan.units) for sharers in awaited]
        wait(locks(), awaited, waiters)
        # What a batch reads is in flight together, in registers of the accumulator and operands.
        room = max(1, (registers - 64) // (plan.unit // 2))
        batches = -(-plan.most_sharers // min(8, room))
        batch = -(-plan.most_sharers // batches)

        @pl.loop(0, 2)
        def _(index):
            tile, first, sharers, begin, end = plan.share(block, index)
            m_tile, n_tile = plan.coordinates(tile)
            row_tile = plan.row_tile(n_tile, row)

            @pl.loop(begin, end)
            def _(unit):
                tokens = pl.ds(unit * plan.unit, plan.unit)
                token = m_tile * config.tile_m + unit * plan.unit
                residual = stream_of(token, plan.unit, row_tile)
                zero = jnp.zeros((TILE_ROWS, plan.unit), jnp.float32)

                @pl.loop(0, lax.div(sharers + batch - 1, batch), init_carry=zero)
                def total(i, total):
                    for j in range(batch):
                        sharer = i * batch + j
                        slot = plan.slot(first + jnp.minimum(sharer, sharers - 1), tile)
                        value = read("partial", slot, row, slice(None), tokens)
                        # What fills the last batch has been added before.
                        counts = jnp.broadcast_to(sharer < sharers, value.shape)
                        total += jnp.where(counts, value, zero)
                    return total

                store(total, bias_of(row_tile), token, row_tile, residual)

    begun = jnp.int32(0)
    if xa_partials is not None and xa_partials.a is not None:
        with jax.named_scope("make shares"):
            begun = make_shares(plan, sm, warpgroup, xa_partials)

    @pl.loop(0, plan.pieces(block), init_carry=begun)
    def _(index, done):
        tile, first, count = plan.piece(block, index)
        m_tile, n_tile = plan.coordinates(tile)
        row_tile = plan.row_tile(n_tile, row)
        begin = row_start(row_tile)
        divisor = divisors(begin)
        bias = bias_of(row_tile)
        # Early if there are registers, as what comes late is waited for.
        b = adapter(begin) if "b" in gm and spare >= gm["b"].shape[1] // 4 else None

        with jax.named_scope("multiply"):
            value, slot = multiply(done, count)
        if config.slices > 1:
            with jax.named_scope("add slices"):
                value = add_slices(value, index)
        token = m_tile * config.tile_m
        residual = stream_of(token, config.tile_m, row_tile) if plan.stores_tiles else None
        value *= over_tokens(layout.UNIT / divisor)
        if "b" in gm:
            with jax.named_scope("add adapter"):
                value = add_adapter(value, b, slot, first, begin)

        if plan.paired and not simulated:
            # Not before anything is stored: x A^T is added up before the factor.
            @pl.when((part == 0) & (index == plan.first_stored(block)))
            def _():
                plgpu.barrier_wait(sm["factor_full"])

        @pl.when((part == 0) & (count == plan.steps))
        def _():
            with jax.named_scope("store"):
                store(value, bias, token, row_tile, residual)

        if plan.in_clusters:

            @pl.when((part == 0) & (count < plan.steps))
            def _():
                with jax.named_scope("add parts"):
                    add_parts(value, bias, token, row_tile)

        if "partial" in gm:

            @pl.when((part == 0) & (count < plan.steps))
            def _():
                slot = plan.slot(block, tile) if plan.shared else block
                gm["partial"].at[slot, row][...] = value

        if plan.shared and not simulated:
            # Once for both tiles, for to publish takes longer than to compute a stage.
            @pl.when((part == 0) & (index == plan.shared_pieces(block) - 1))
            def _():
                with jax.named_scope("publish"):
                    arrive(locks(), [plan.share(block, i)[2] for i in (0, 1)])

        return done + count + (jnp.where(adds_adapter(first), 1, 0) if "b" in gm else 0)

    if plan.shared and not simulated:

        @pl.when(part == 0)
        def _():
            with jax.named_scope("add shared tiles"):
                add_shared_tiles()

    if config.slices > 1:
        # The last sums have been read.
        @pl.when((part > 0) & (plan.pieces(block) > 0))
        def _():
            plgpu.barrier_wait(sm["sums_empty"].at[row])

    # A block may end once its shared memory has been read.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
