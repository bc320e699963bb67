"""Which experts the tokens of a decode step have, in one kernel: top-k, softmax, and the table.

The router's product has come with the norm in front of it (`decode.norms.add_rmsnorm`), as partial
sums, which lack the factor of the norm. A CTA adds them up for a few tokens, chooses their experts,
and stores the tokens with the factor. The CTA that comes last makes the table of all tokens.

A row of an expert is found by counting: for each expert, the tokens that have it are bits of words
in shared memory, one word for 32 tokens. Bits may be set in any order; nothing else depends on it.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels import warp_mma, warpgroup
from pallas_kernels.experts.table import (
    MIN_TILE,
    Table,
    table,
    tile_bound,
    tile_rows,
    tiles_at_a_time,
    unit_bound,
    with_units,
)
from pallas_kernels.fp4_matmul.mma import copies
from pallas_kernels.fp4_matmul.sm90.synchronize import opaque
from pallas_kernels.warpgroup import WARPS, Layout, Warpgroup

_THREADS = 32 * WARPS
_TOKENS = 256  # of a step, at most
_ROWS = 8  # tokens of a CTA, if it has all of them
_SHARED_ROWS = 4  # tokens of a CTA of several
_WORD = 32  # tokens of a word
_NUMBERS_IN_FLIGHT = 64  # of a thread, of partial sums
_LOG2_E = 1.4426950408889634
_TAKEN = -(2**31)  # less than the key of any number


class Scores(NamedTuple):
    """What a norm leaves for the router, of M tokens; see `decode.norms.DeferredNorm`."""

    scaled: jax.Array  # bfloat16 [M, D], the norm without its factor
    square_partials: jax.Array  # float32 [P, M]
    logit_partials: jax.Array  # float32 [S, M, E'], the products of `scaled` with the router
    shared_gate: jax.Array | None = None  # [1, D] of an expert that all tokens have, or None
    bias: jax.Array | None = None  # [E], which is added to the logits, or None


class Routing(NamedTuple):
    """What the router chose for M tokens with k experts each, and their table."""

    states: jax.Array  # bfloat16 [M, D], the norm
    routes: jax.Array  # int32 [M, k], from the largest logit to the smallest
    weights: jax.Array  # float32 [M k], the weights of the pairs
    opened: jax.Array | None  # float32 [M], the factors of the shared expert, if there is one
    table: Table


class Router(NamedTuple):
    """What a router does."""

    experts: int  # number E of experts
    top_k: int  # experts of a token
    normalized: bool  # whether the weights are a softmax over the chosen experts, or over all
    eps: float  # of the norm
    tile: int | None = None  # rows of a tile of the table; None for those of `tile_rows`

    def tile_rows(self, tokens: int) -> int:
        """Rows of a tile of the table of some tokens."""
        return self.tile or tile_rows(tokens * self.top_k, self.experts)

    def together(self, tokens: int) -> int:
        """Tiles that a kernel multiplies at a time, 1 where these are none of eight rows."""
        if self.tile_rows(tokens) != MIN_TILE:
            return 1
        return tiles_at_a_time(tokens * self.top_k, self.experts)


def supports(scores: Scores, router: Router) -> bool:
    """Whether the kernel routes these tokens."""
    m, width = scores.scaled.shape
    return (
        m <= _TOKENS
        and width % _WORD == 0
        and router.top_k <= min(16, router.experts)
        and router.experts <= 1024
    )


def reference(scores: Scores, router: Router) -> Routing:
    """Returns what `route` does, by XLA."""
    factor = lax.rsqrt(scores.square_partials.sum(axis=0) + router.eps)[:, None]
    logits = scores.logit_partials.sum(axis=0) * factor
    states = (scores.scaled.astype(jnp.float32) * factor).astype(scores.scaled.dtype)
    opened = None
    if scores.shared_gate is not None:
        gate = scores.shared_gate.astype(jnp.float32)
        products = jnp.dot(scores.scaled.astype(jnp.float32), gate.T, precision="highest")
        opened = jax.nn.sigmoid(products * factor)[:, 0]
    logits = logits[:, : router.experts]
    if scores.bias is not None:
        logits = logits + scores.bias.astype(jnp.float32)
    values, routes = lax.top_k(logits, router.top_k)
    if router.normalized:
        weights = jax.nn.softmax(values)
    else:
        weights = jnp.exp(values - jax.nn.logsumexp(logits, axis=1, keepdims=True))
    own_table = table(routes, experts=router.experts, rows=router.tile)
    return Routing(states, routes, weights.reshape(-1), opened, own_table)


def route(scores: Scores, router: Router, *, interpret: bool = False) -> Routing:
    """Returns the experts of the tokens of a decode step, where `supports`.

    Args:
        scores: what the norm leaves.
        router: what the router does.
        interpret: whether to simulate the kernel on a CPU.
    """
    m, top_k = len(scores.scaled), router.top_k
    pairs = m * top_k
    bound = tile_bound(pairs, router.experts, router.tile)
    size = bound * router.tile_rows(m)
    rows = 1 << min(m, _ROWS if m <= _ROWS else _SHARED_ROWS).bit_length() - 1
    ctas = pl.cdiv(m, rows)
    operands = {name: x for name, x in scores._asdict().items() if x is not None}
    if scores.bias is not None:
        missing = pl.cdiv(router.experts, 32) * 32 - router.experts
        operands["bias"] = jnp.pad(scores.bias, (0, missing))
    if ctas > 1:
        # Zero before and after every call: all calls of a program use the same array.
        operands["counter"] = jnp.zeros(1, jnp.int32)
    results = {
        "states": jax.ShapeDtypeStruct(scores.scaled.shape, scores.scaled.dtype),
        "routes": jax.ShapeDtypeStruct((m, top_k), jnp.int32),
        "weights": jax.ShapeDtypeStruct((m, top_k), jnp.float32),
        "place": jax.ShapeDtypeStruct((pairs,), jnp.int32),
        "source": jax.ShapeDtypeStruct((size,), jnp.int32),
        "owner": jax.ShapeDtypeStruct((bound,), jnp.int32),
        "used": jax.ShapeDtypeStruct((1,), jnp.int32),
    }
    if (together := router.together(m)) > 1:
        units = unit_bound(pairs, router.experts, together)
        results["units"] = jax.ShapeDtypeStruct((units,), jnp.int32)
    if scores.shared_gate is not None:
        results["opened"] = jax.ShapeDtypeStruct((m,), jnp.float32)
    words = (pl.cdiv(m, _WORD), pl.cdiv(router.experts, _THREADS) * _THREADS)
    outs = warpgroup.run(
        functools.partial(_body, router, rows, ctas),
        "route_experts",
        (ctas,),
        operands,
        results,
        scratch={
            "bits": (words, jnp.int32),
            "starts": (words, jnp.int32),
            "totals": ((8,), jnp.int32),
            "chosen": ((rows, top_k), jnp.int32),
        },
        interpret=interpret,
    )
    return Routing(
        states=outs["states"],
        routes=outs["routes"],
        weights=outs["weights"].reshape(-1),
        opened=outs.get("opened"),
        table=Table(
            place=outs["place"],
            source=outs["source"],
            owner=outs["owner"],
            used=outs["used"].reshape(()),
            units=outs.get("units"),
        ),
    )


def _body(router, rows, ctas, threads: Warpgroup, operands, _, results, **shared):
    """What a CTA does."""
    (cta,) = threads.cta
    m = results["routes"].shape[0]
    own = pl.ds(jnp.minimum(cta * rows, m - rows), rows)
    builder = _TableBuilder(threads, results, shared, router)
    builder.clear(cta, ctas)
    states = _States(threads, operands, own)
    width = pl.cdiv(router.experts, 32) * 32
    layout = _row_layout(rows, width, 4)
    total, mean_square = _add_partials(threads, operands, own, width, layout)
    factor = lax.rsqrt(mean_square + router.eps)
    logits = total * lax.broadcast_in_dim(factor, total.shape, (0,))
    if "bias" in operands:
        bias = threads.load(operands["bias"].at[pl.ds(0, width)], layout.reduce(0))
        logits += lax.broadcast_in_dim(bias.astype(jnp.float32), logits.shape, (1,))
    _choose(threads, router, (logits, layout), results, own, shared["chosen"])
    if ctas == 1:
        threads.meet()
        builder.build(shared["chosen"])
    else:
        last = _is_last(threads, operands["counter"], shared["totals"], ctas)
        pl.when(last)(lambda: builder.build(results["routes"]))
    # Last, as nothing else waits for it; the tokens have come meanwhile.
    states.store(results, factor)


def _row_layout(rows: int, width: int, most: int, *, spread: bool = False) -> Layout:
    """How registers have [rows, width]: a warp has a row, a thread `most` neighbors at most.

    Fewer rows than warps are those of several warps; or these divide the columns, if `spread`.
    """
    warps = min(WARPS, rows)
    spare = WARPS // warps
    vector, columns = most, spare if spread else 1
    while width % (32 * vector * columns):
        vector //= 2
    if columns > 1:
        tiles = (warps, 32 * vector * columns), (32 * vector,), (vector,)
        dims = (*((-4,) if warps > 1 else ()), -3)
    else:
        tiles = (warps, 32 * vector), (vector,)
        shared = (plgpu.Replicated(spare),) if spare > 1 else ()
        dims = (*((-3,) if warps > 1 else ()), *shared)
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), warp_dims=dims, lane_dims=(-2,), vector_dim=-1)


def _choose(threads: Warpgroup, router: Router, scores, results, own, chosen) -> None:
    """Chooses the experts of some tokens, of their logits [rows, width] and the logits' layout.

    The experts are stored in shared memory, too: `chosen`, int32 [rows, k].
    """
    (logits, layout), experts = scores, router.experts
    rows, width = logits.shape
    lanes = _row_layout(rows, 32, 1)

    def over(numbers, width=width, layout=layout):
        return lax.broadcast_in_dim(numbers, (rows, width), (0,))

    over_lanes = functools.partial(over, width=32, layout=lanes)
    expert, lane = threads.iota((rows, width), 1, layout), threads.iota((rows, 32), 1, lanes)
    keys = jnp.maximum(_turned(lax.bitcast_convert_type(logits, jnp.int32)), _TAKEN + 1)
    keys = jnp.where(logits == 0, jnp.zeros_like(keys), keys)  # Zeros of both signs are equal.
    if width > experts:
        keys = jnp.where(expert < experts, keys, jnp.full_like(keys, _TAKEN))

    def take(j, carry):
        """Takes the largest key; lane j has it, and its expert."""
        keys, largest, found = carry
        key = jnp.max(keys, axis=1)
        is_largest = keys == over(key)
        # The largest of a warp's integers is found by one instruction, the smallest is not.
        first = -jnp.max(jnp.where(is_largest, -expert, jnp.full_like(expert, -width)), axis=1)
        largest = jnp.where(lane == j, over_lanes(key), largest)
        found = jnp.where(lane == j, over_lanes(first), found)
        return jnp.where(expert == over(first), jnp.full_like(keys, _TAKEN), keys), largest, found

    none = threads.cast(jnp.full((rows, 32), _TAKEN, jnp.int32), lanes)
    # Unrolled, the loop would be most of the code.
    turns = router.top_k if threads.simulated else opaque(jnp.int32(router.top_k))
    _, largest, found = lax.fori_loop(0, turns, take, (keys, none, none))
    values = lax.bitcast_convert_type(_turned(largest), jnp.float32)
    top = lax.bitcast_convert_type(_turned(jnp.max(largest, axis=1)), jnp.float32)
    powers = jnp.exp2(_LOG2_E * (values - over_lanes(top)))
    powers = jnp.where(lane < router.top_k, powers, jnp.zeros_like(powers))
    others = powers
    if not router.normalized:
        others = jnp.exp2(_LOG2_E * (logits - over(top)))
        if width > experts:
            others = jnp.where(expert < experts, others, jnp.zeros_like(others))
    weights = powers / over_lanes(jnp.sum(others, axis=1))
    _store_lanes(threads, results["routes"], own.start, found)
    _store_lanes(threads, results["weights"], own.start, weights)
    _store_lanes(threads, chosen, 0, found)


def _turned(bits: jax.Array) -> jax.Array:
    """From the bits of float32 to integers in the order of the numbers, or back."""
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _store_lanes(threads: Warpgroup, ref: Any, start: Any, value: jax.Array) -> None:
    """Stores the first k of 32 columns of some rows, from one on, to an array [M, k]."""
    rows, top_k = len(value), ref.shape[1]
    if threads.simulated:
        ref[pl.ds(start, rows), :] = value[:, :top_k]
        return
    warps = min(WARPS, rows)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT, _row_layout(rows, 32, 1)))
    def store(_, ref, start, value):
        is_shared = mgpu.utils.is_smem_ref(ref)
        thread = mgpu.utils.thread_idx()
        lane = arith.andi(thread, _i32(31))
        row = arith.divui(thread, _i32(32 * WARPS // warps))
        row = arith.addi(start.registers.item(), row)
        index = arith.addi(arith.muli(row, _i32(top_k)), lane)
        place = _element(copies.address(ref) if is_shared else copies.pointer(ref), index)
        space = "shared" if is_shared else "global"
        for i, register in enumerate(value.registers.flat):
            _ptx(
                "{ .reg .pred there; "
                f"setp.lt.u32 there, $2, {top_k}; "
                f"@there st.{space}.b32 [$0+{4 * i * warps * top_k}], $1; }}",
                place,
                warp_mma.numbers(register)[0],
                lane,
            )

    store(ref, jnp.int32(start), value)


def _add_partials(threads: Warpgroup, operands, own, width: int, layout: Layout):
    """The logits without the factor, float32 [rows, width], and mean squares [rows]."""
    partials, squares = operands["logit_partials"], operands["square_partials"]
    numbers = max(1, own.size // WARPS) * width // 32  # of a thread, of a partial sum
    batch = max(1, _NUMBERS_IN_FLIGHT // numbers)

    def add_batch(count, first, total):
        places = [(first + i, own, pl.ds(0, width)) for i in range(count)]
        loaded = [threads.load(partials.at[place], layout) for place in places]
        return functools.reduce(jnp.add, loaded, total)

    total = threads.cast(jnp.zeros((own.size, width), jnp.float32), layout)
    count = partials.shape[0]
    rest = count % batch if count > batch else count
    if count > batch:
        total = lax.fori_loop(
            0, count // batch, lambda i, total: add_batch(batch, i * batch, total), total
        )
    total = add_batch(rest, count - rest, total)
    loaded = [threads.load(squares.at[i, own], layout.reduce(1)) for i in range(squares.shape[0])]
    return total, functools.reduce(jnp.add, loaded)


class _States:
    """Some tokens, which are requested at once, and stored when the factor of the norm is known."""

    def __init__(self, threads: Warpgroup, operands, own: Any):
        self.threads, self.own, self.gate = threads, own, operands.get("shared_gate")
        scaled = operands["scaled"]
        width, block = scaled.shape[1], 1024 if self.gate is None and own.size == 1 else 256
        while width % block and width < block:
            block //= 2
        # The sum over the columns of a token is that of a warp.
        spread = self.gate is None and block >= 32 * WARPS
        self.layout = _row_layout(own.size, block, 8, spread=spread)
        self.shape = own.size, block
        # The last block begins earlier, and repeats a part of the one before.
        self.starts = {start: min(start, width - block) for start in range(0, width, block)}
        self.tokens = [
            threads.load(scaled.at[own, pl.ds(first, block)], self.layout)
            for first in self.starts.values()
        ]

    def store(self, results, factor: jax.Array) -> None:
        """Stores the tokens with the factor, and the sigmoids of a shared expert's gate."""
        threads, shape = self.threads, self.shape
        factor = threads.cast(factor, self.layout.reduce(1))
        logits = threads.cast(jnp.zeros(shape, jnp.float32), self.layout)
        for (start, first), tokens in zip(self.starts.items(), self.tokens, strict=True):
            x, columns = tokens.astype(jnp.float32), pl.ds(first, shape[1])
            states = (x * lax.broadcast_in_dim(factor, shape, (0,))).astype(tokens.dtype)
            threads.store(results["states"].at[self.own, columns], states)
            if self.gate is not None:
                weight = threads.load(self.gate.at[0, columns], self.layout.reduce(0))
                product = x * lax.broadcast_in_dim(weight.astype(jnp.float32), shape, (1,))
                if first < start:
                    column = threads.iota(shape, 1, self.layout)
                    product = jnp.where(column >= start - first, product, jnp.zeros_like(product))
                logits += product
        if self.gate is not None:
            logit = factor * jnp.sum(logits, axis=1)
            opened = 1.0 / (1.0 + jnp.exp2(-_LOG2_E * logit))
            threads.store(results["opened"].at[self.own], opened)


def _is_last(threads: Warpgroup, counter: Any, flag: Any, ctas: int) -> Any:
    """Whether this CTA is the last one, and sees what the others stored.

    The counter, int32 [1], is zero before and after the kernel; the flag is in shared memory.
    """
    if threads.simulated:  # CTAs run in order.
        return threads.cta[0] == ctas - 1
    result = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=plgpu.Layout.WG_SPLAT)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()), return_type=result)
    def count(_, counter, flag):
        mgpu.utils.warpgroup_barrier()
        _ptx(
            "{ .reg .pred first; .reg .b32 before; setp.eq.u32 first, $2, 0; "
            "@first fence.acq_rel.gpu; "
            f"@first atom.acq_rel.gpu.global.inc.u32 before, [$0], {ctas - 1}; "
            "@first fence.acq_rel.gpu; @first st.shared.u32 [$1], before; }",
            copies.pointer(counter),
            copies.address(flag),
            mgpu.utils.thread_idx(),
        )
        mgpu.utils.warpgroup_barrier()
        before = _ptx("ld.shared.u32 $0, [$1];", copies.address(flag), results=1)
        return mgpu.FragmentedArray.splat(before, (), is_signed=True)

    return count(counter, flag) == ctas - 1


class _TableBuilder:
    """Makes the table of all tokens, by the threads of one CTA; each has every 128th pair."""

    def __init__(self, threads: Warpgroup, results: dict, shared: dict, router: Router):
        self.threads, self.results, self.shared = threads, results, shared
        self.experts = router.experts
        self.tokens, self.top_k = results["routes"].shape
        self.rows = len(results["source"]) // len(results["owner"])  # of a tile: a power of two
        self.words, self.width = shared["bits"].shape
        self.together = router.together(self.tokens)

    def clear(self, cta: Any, ctas: int) -> None:
        """Sets rows to those without a pair, each CTA some of them, and the bits to zero."""
        threads, results = self.threads, self.results
        if threads.simulated:
            return
        pairs = self.tokens * self.top_k
        cleared = {"source": pairs, "owner": self.experts - 1, "units": -1}
        cleared = {name: value for name, value in cleared.items() if name in results}

        @plgpu.inline_mgpu(
            arg_types=([plgpu.RefType()] * (len(cleared) + 1), plgpu.Layout.WG_SPLAT)
        )
        def run(_, refs, cta):
            *refs, bits = refs
            thread = mgpu.utils.thread_idx()
            own = arith.addi(arith.muli(cta.registers.item(), _i32(_THREADS)), thread)
            for ref, value in zip(refs, cleared.values(), strict=True):
                (size,) = ir.MemRefType(ref.type).shape
                start, step = _element(copies.pointer(ref), own), _THREADS * ctas
                for first in range(0, size, step):
                    _ptx(
                        "{ .reg .pred inside; "
                        f"setp.lt.u32 inside, $1, {size - first}; "
                        f"@inside st.global.u32 [$0+{4 * first}], {value}; }}",
                        start,
                        own,
                    )
            start = arith.addi(copies.address(bits), arith.muli(thread, _i32(4)))
            for first in range(0, self.words * self.width, _THREADS):
                _ptx(f"st.shared.u32 [$0+{4 * first}], 0;", start)

        run([*(results[name] for name in cleared), self.shared["bits"]], cta)

    def build(self, routes: Any) -> None:
        """Makes the table, when all routes are stored and all threads have cleared the bits.

        The routes are in shared memory, if this CTA has chosen all of them, or in global memory.
        """
        results = self.results
        names = [name for name in Table._fields if name in results]
        if self.threads.simulated:
            built = table(routes[...], experts=self.experts, rows=self.rows)
            if "units" in names:
                built = with_units(built, self.together, experts=self.experts)
            for name in names:
                results[name][...] = getattr(built, name).reshape(results[name].shape)
            return
        shared = [self.shared[name] for name in ("bits", "starts", "totals")]

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), [plgpu.RefType()] * len(names), [plgpu.RefType()] * 3)
        )
        def run(_, routes, arrays, shared):
            pointers = dict(zip(names, map(copies.pointer, arrays), strict=True))
            bits, starts, totals = map(copies.address, shared)
            own = self._mark(routes, bits)
            mgpu.utils.warpgroup_barrier()
            self._count(bits, starts, totals, pointers)
            mgpu.utils.warpgroup_barrier()
            for number, pair in enumerate(own):
                self._place(number, pair, pointers, bits, starts)

        run(routes, [results[name] for name in names], shared)

    def _mark(self, routes: Any, bits: ir.Value) -> list[tuple]:
        """Sets the bits of the pairs; returns of the thread's pairs expert, place and bit."""
        thread, is_shared = mgpu.utils.thread_idx(), mgpu.utils.is_smem_ref(routes)
        load = "ld.shared.b32" if is_shared else "ld.relaxed.gpu.global.b32"
        first = _element(copies.address(routes) if is_shared else copies.pointer(routes), thread)
        starts = range(0, self.tokens * self.top_k, _THREADS)
        experts = [
            _ptx(
                "{ .reg .pred there; "
                f"setp.lt.u32 there, $2, {self.tokens * self.top_k - start}; mov.b32 $0, 0; "
                f"@there {load} $0, [$1+{4 * start}]; }}",
                first,
                thread,
                results=1,
            )
            for start in starts
        ]
        own = []
        for start, expert in zip(starts, experts, strict=True):
            token = arith.divui(arith.addi(thread, _i32(start)), _i32(self.top_k))
            token = arith.minui(token, _i32(self.tokens - 1))
            bit = arith.shli(_i32(1), arith.andi(token, _i32(_WORD - 1)))
            word = arith.muli(arith.shrui(token, _i32(5)), _i32(self.width))
            place = arith.muli(arith.addi(word, expert), _i32(4))
            self._if_there(start, "red.shared.or.b32 [$0], $1;", arith.addi(bits, place), bit)
            own.append((expert, place, bit))
        return own

    def _if_there(self, start: int, code: str, *operands: ir.Value) -> None:
        """Runs an instruction of two operands in threads that have a pair, from the first one."""
        _ptx(
            "{ .reg .pred there; "
            f"setp.lt.u32 there, $2, {self.tokens * self.top_k - start}; @there {code} }}",
            *operands,
            mgpu.utils.thread_idx(),
        )

    def _count(self, bits: ir.Value, starts: ir.Value, totals: ir.Value, pointers: dict) -> None:
        """Stores the first row of each expert's tokens of each word, and the number of tiles.

        A thread has neighboring experts, and a tile more of each than its tokens fill. Units are
        counted with the tiles, in the upper halves of the numbers.
        """
        thread = mgpu.utils.thread_idx()
        count, shift = self.width // _THREADS, self.rows.bit_length() - 1
        offset = arith.muli(thread, _i32(4 * count))
        ends, tiles = [], []
        for expert in range(count):
            total, before = _i32(0), []
            for word in range(self.words):
                at = 4 * (word * self.width + expert)
                before.append(total)
                number = _ptx(
                    f"{{ .reg .b32 word; ld.shared.u32 word, [$1+{at}]; popc.b32 $0, word; }}",
                    arith.addi(bits, offset),
                    results=1,
                )
                total = arith.addi(total, number)
            ends.append(before)
            tiles.append(arith.shrui(arith.addi(total, _i32(self.rows - 1)), _i32(shift)))
        counted = tiles
        if self.together > 1:
            units = [self._divided(number) for number in tiles]
            counted = [
                arith.addi(number, arith.shli(more, _i32(16)))
                for number, more in zip(tiles, units, strict=True)
            ]
        own = functools.reduce(arith.addi, counted)
        through = own  # the tiles of the warp's threads up to this one
        for distance in (1, 2, 4, 8, 16):
            through = _ptx(
                "{ .reg .pred there; .reg .b32 lane, other; and.b32 lane, $2, 31; "
                f"shfl.sync.up.b32 other, $1, {distance}, 0, 0xffffffff; "
                f"setp.ge.u32 there, lane, {distance}; mov.b32 $0, $1; "
                "@there add.u32 $0, $0, other; }",
                through,
                thread,
                results=1,
            )
        _ptx(
            "{ .reg .pred last; .reg .b32 lane, place; and.b32 lane, $2, 31; "
            "setp.eq.u32 last, lane, 31; shr.u32 place, $2, 5; shl.b32 place, place, 2; "
            "add.u32 place, place, $0; @last st.shared.u32 [place], $1; }",
            totals,
            through,
            thread,
        )
        mgpu.utils.warpgroup_barrier()
        start, everything = arith.subi(through, own), _i32(0)
        for warp in range(WARPS):
            tiles_of_warp = _ptx(f"ld.shared.u32 $0, [$1+{4 * warp}];", totals, results=1)
            everything = arith.addi(everything, tiles_of_warp)
            is_later = arith.cmpi(arith.CmpIPredicate.ugt, arith.shrui(thread, _i32(5)), _i32(warp))
            start = arith.addi(start, arith.select(is_later, tiles_of_warp, _i32(0)))
        for expert, (before, number) in enumerate(zip(ends, counted, strict=True)):
            tile = start
            if self.together > 1:
                tile = arith.andi(start, _i32(0xFFFF))
                self._store_units(pointers["units"], start, tile, tiles[expert])
            row = arith.muli(tile, _i32(self.rows))
            for word, earlier in enumerate(before):
                _ptx(
                    f"st.shared.u32 [$0+{4 * (word * self.width + expert)}], $1;",
                    arith.addi(starts, offset),
                    arith.addi(row, earlier),
                )
            start = arith.addi(start, number)
        _ptx(
            "{ .reg .pred first; setp.eq.u32 first, $2, 0; @first st.global.u32 [$0], $1; }",
            pointers["used"],
            arith.andi(everything, _i32(0xFFFF)) if self.together > 1 else everything,
            thread,
        )

    def _divided(self, tiles: ir.Value) -> ir.Value:
        """The number of units of some tiles."""
        return arith.divui(arith.addi(tiles, _i32(self.together - 1)), _i32(self.together))

    def _store_units(self, units: ir.Value, start: ir.Value, tile: ir.Value, tiles: ir.Value):
        """Stores the first tile of each unit of an expert, from the number of its first one on."""
        own = _element(units, arith.shrui(start, _i32(16)))
        most = -(-self.tokens // self.rows)  # tiles of an expert
        for number, first in enumerate(range(0, most, self.together)):
            _ptx(
                "{ .reg .pred there; .reg .b32 tile; "
                f"setp.gt.u32 there, $2, {first}; add.u32 tile, $1, {first}; "
                f"@there st.global.u32 [$0+{4 * number}], tile; }}",
                own,
                tile,
                tiles,
            )

    def _place(
        self, number: int, own: tuple, pointers: dict[str, ir.Value], bits: ir.Value, starts: Any
    ) -> None:
        """Stores the row of a pair of the thread, the pair of the row, and the tile's expert."""
        expert, place, bit = own
        row = _ptx(
            "{ .reg .b32 below, word, first; sub.u32 below, $3, 1; "
            "ld.shared.b32 word, [$1]; ld.shared.b32 first, [$2]; and.b32 word, word, below; "
            "popc.b32 word, word; add.u32 $0, first, word; }",
            arith.addi(bits, place),
            arith.addi(starts, place),
            bit,
            results=1,
        )
        start = number * _THREADS
        pair = arith.addi(mgpu.utils.thread_idx(), _i32(start))
        tile = arith.shrui(row, _i32(self.rows.bit_length() - 1))
        for name, index, value in (
            ("place", pair, row),
            ("source", row, pair),
            ("owner", tile, expert),
        ):
            self._if_there(start, "st.global.b32 [$0], $1;", _element(pointers[name], index), value)


def _ptx(code: str, *operands: ir.Value, results: int = 0) -> Any:
    """Runs PTX in the order of the code; returns its result, an i32, if it has one."""
    kind = ir.IntegerType.get_signless(32) if results else None
    return mgpu.utils.inline_ptx(code, *operands, result_types=kind, has_side_effects=True)


def _i32(value: int) -> ir.Value:
    return mgpu.utils.c(value, ir.IntegerType.get_signless(32))


def _element(pointer: ir.Value, index: ir.Value) -> ir.Value:
    """The address of a number of four bytes."""
    offset = arith.muli(index, _i32(4))
    if pointer.type == offset.type:  # in shared memory
        return arith.addi(pointer, offset)
    return copies.advanced(pointer, offset)
