"""`attention.attend_whole` on a Hopper GPU, by Pallas's Mosaic GPU backend.

A CTA is one warpgroup. It has a key head of a row and the query heads that share it. TMA brings
tiles of 64 keys and values to shared memory, each as soon as a stage is free. Scores are computed
as K q^T, because a group has few queries and the first operand of wgmma has 64 rows.

The CTA requests everything else that it reads before the first tiles, or it would wait behind them.
It writes the new key and value to the cache, and they come back with the last tile.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import nvvm

from pallas_kernels.attention.tiles_sm90 import filled, meet, operand
from pallas_kernels.decode.attention import AttentionInputs, AttentionParts
from pallas_kernels.decode.attention_queries import Chunk, Queries, by_tokens
from pallas_kernels.decode.row import QUERIES, halves_of, load_row, padded_group, projected
from pallas_kernels.fp4_matmul.sm90.synchronize import fence_async_proxy
from pallas_kernels.warpgroup import WARPS, Warpgroup

HEAD_DIM = 128
_HALVES = halves_of(HEAD_DIM)
_TILE = 64  # cache positions in a tile
_COPIED = 16  # cache positions in a copy: with fewer, less is read after a row's end
_MOST_QUERIES = 64  # of a CTA with several tokens of a row
_LOG2_E = 1.4426950408889634
_EMPTY = float(jnp.finfo(jnp.float32).min)  # the score of a position that is not filled
# Half of one head, which all warps have.
_HEAD = plgpu.Layout.TILED(
    plgpu.Tiling(((64,), (2,))),
    warp_dims=(plgpu.Replicated(WARPS),),
    lane_dims=(-2,),
    vector_dim=-1,
)


def supports_attention(keys: jax.Array | jax.ShapeDtypeStruct, num_heads: int) -> bool:
    """Whether the kernel exists for cached keys [M, K, S, H] and a number of query heads.

    Queries are read in groups of eight, which must not end after the last head of a row. The cache
    is also divided into groups of eight positions, as the rows of a wgmma operand are.
    """
    _, kv_heads, positions, head_dim = keys.shape
    group = num_heads // kv_heads
    return (
        head_dim == HEAD_DIM
        and keys.dtype == jnp.bfloat16
        and positions % 8 == 0
        and positions >= _TILE
        and (kv_heads - 1) * group + padded_group(group) <= num_heads + 2 * kv_heads
    )


class _SharedMemory(NamedTuple):
    """What a CTA has in shared memory."""

    keys: Any  # bfloat16 [stages, 64, H] tiles of keys
    values: Any  # bfloat16 [stages, 64, H] tiles of values
    queries: Any  # bfloat16 [group padded to eights, H]
    weights: Any  # bfloat16 [group padded, 64] softmax weights of a tile
    attended: Any  # bfloat16 [group padded, H] result
    keys_full: Any  # a barrier per stage that tells when a tile of keys has arrived
    values_full: Any  # a barrier per stage that tells when a tile of values has arrived
    all_threads: Any  # a barrier for all threads of the CTA

    @classmethod
    def types(cls, padded: int, stages: int) -> "_SharedMemory":
        """The types to allocate for a padded group and a number of stages."""
        full = plgpu.Barrier(num_barriers=stages, num_arrivals=_TILE // _COPIED)
        return cls(
            keys=operand(stages, _TILE, HEAD_DIM),
            values=operand(stages, _TILE, HEAD_DIM),
            queries=operand(padded, HEAD_DIM),
            weights=operand(padded, _TILE),
            attended=plgpu.SMEM((padded, HEAD_DIM), jnp.bfloat16),
            keys_full=full,
            values_full=full,
            all_threads=plgpu.Barrier(),
        )


def attend(
    inputs: AttentionInputs,
    *,
    eps: float,
    num_sms: int,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Does what `attention.attend_whole` does, where `supports_attention`."""
    m, kv_heads, _, head_dim = inputs.keys.shape
    heads = inputs.num_heads
    total = heads + 2 * kv_heads
    padded = padded_group(heads // kv_heads)
    operands = inputs._replace(
        qkv=inputs.qkv.reshape(m, total, head_dim),
        bias=None if inputs.bias is None else inputs.bias.reshape(total, head_dim),
        keys=jax.new_ref(inputs.keys),
        values=jax.new_ref(inputs.values),
    )
    # A CTA that is alone on its SM requests the next tiles while it computes.
    stages = 2 if m * kv_heads <= num_sms else 1

    def body(operands, result, **scratch):
        shared = _SharedMemory(**scratch)
        _attend(operands, result, shared, eps, simulated=interpret is not None)

    attended = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((m, heads, head_dim), inputs.qkv.dtype),
        scratch_types=_SharedMemory.types(padded, stages)._asdict(),
        grid=(kv_heads, m),
        grid_names=("head", "row"),
        kernel_name="attention_sm90",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            reduction_scratch_bytes=128 * padded,  # all columns at a time
            approx_math=True,
        ),
        interpret=interpret,
    )(operands)
    keys, values = (jax.freeze(cache) for cache in (operands.keys, operands.values))
    return attended.reshape(m, heads * head_dim), keys, values


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """The tiles of keys, or of values, of one head of a row, and the stages that hold them."""

    source: Any  # [S, H] in global memory
    stages: Any  # [stages, 64, H] in shared memory
    full: Any  # a barrier per stage that tells when its tile has arrived
    all_threads: Any  # a barrier for all threads of the CTA
    length: Any  # cache position of the newest token
    begin: Any = 0  # index of the first tile
    end: Any = None  # index after the last tile; None for all up to that of the newest token

    @property
    def last(self) -> Any:
        """Index of the last tile."""
        return lax.div(self.length, _TILE) if self.end is None else self.end - 1

    def request(self, tile: Any) -> None:
        """Copies a tile to its stage, by TMA.

        Positions after the row's end are left out, unless nothing has been in the stage before:
        what is multiplied by zero must be a finite number.
        """
        count = self.stages.shape[0]
        stage = lax.rem(tile, count)
        full = self.full.at[stage]

        @pl.loop(0, _TILE // _COPIED)
        def copy_positions(i):
            first = tile * _TILE + i * _COPIED
            needed = (first <= self.length) | (tile < self.begin + count)

            @pl.when(needed)
            def copy():
                destination = self.stages.at[stage, pl.ds(i * _COPIED, _COPIED)]
                source = self.source.at[pl.ds(first, _COPIED)]
                plgpu.copy_gmem_to_smem(source, destination, full)

            @pl.when(~needed)
            def leave_out():
                plgpu.barrier_arrive(full)

    def request_first(self, needed: Callable[[int], Any]) -> None:
        """Requests the tiles that are needed among those that the empty stages can hold."""
        for i in range(self.stages.shape[0]):
            tile = self.begin + i
            pl.when(needed(tile))(functools.partial(self.request, jnp.int32(tile)))

    def use(self, tile: Any, multiply: Callable[[Any], jax.Array]) -> jax.Array:
        """Waits for a tile, multiplies with it, and requests the next tile for its stage."""
        count = self.stages.shape[0]
        stage = lax.rem(tile, count)
        plgpu.barrier_wait(self.full.at[stage])
        result = multiply(self.stages.at[stage])
        meet(self.all_threads)
        pl.when(tile + count <= self.last)(functools.partial(self.request, tile + count))
        return result


def _attend(
    operands: AttentionInputs,
    attended: Any,
    shared: _SharedMemory,
    eps: float,
    *,
    simulated: bool,
) -> None:
    """What a CTA does, of operands and a result [M, N, H] in global memory, and shared memory."""
    row, head = lax.axis_index("row"), lax.axis_index("head")
    threads, kv_heads = Warpgroup((row, head), simulated), operands.keys.shape[1]
    group = attended.shape[1] // kv_heads
    read = load_row(threads, operands, group, kv_heads, row, head, _HEAD)
    keys, values = (
        _Tiles(cache.at[row, head], stages, full, shared.all_threads, read.length)
        for cache, stages, full in (
            (operands.keys, shared.keys, shared.keys_full),
            (operands.values, shared.values, shared.values_full),
        )
    )
    last = keys.last
    for tiles in (keys, values):
        tiles.request_first(lambda tile: tile < last)

    factor = read.norm_factor(eps)
    key = read.key_rotation.rotated(projected(read.key, factor), eps)
    value = projected(read.value, factor)
    for cache, new in ((operands.keys, key), (operands.values, value)):
        for dims, half in zip(_HALVES, new, strict=True):
            cache.at[row, head, read.length, dims][...] = half.astype(jnp.bfloat16)
    if not simulated:
        fence_async_proxy(nvvm.ProxyKind.async_global)
    for i, halves in enumerate(read.queries):
        queries = read.query_rotation.rotated(projected(halves, factor), eps)
        for dims, half in zip(_HALVES, queries, strict=True):
            target = shared.queries.at[pl.ds(i * QUERIES, QUERIES), dims]
            target[...] = half.astype(jnp.bfloat16)
    plgpu.commit_smem()
    meet(shared.all_threads)
    for tiles in (keys, values):
        tiles.request_first(lambda tile: tile == last)

    threads.store(shared.attended.T, _transposed(_attend_to_tiles(keys, values, shared)))
    plgpu.commit_smem()
    for i in range(group):
        plgpu.copy_smem_to_gmem(shared.attended.at[i], attended.at[row, head * group + i])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def attend_queries(
    inputs: Queries,
    *,
    count: int,
    num_sms: int,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> AttentionParts:
    """Does what `attention_queries.attend` does, where `supports_attention` of the cache."""
    rows, kv_heads, total, _ = inputs.queries.shape
    # All CTAs have as many queries.
    most = max(x for x in range(QUERIES, _MOST_QUERIES + 1, QUERIES) if total % x == 0)
    results, computed, chunks = inputs.parts(num_sms, most)
    parts = len(results.sums)
    # As in `attend`: a CTA that is alone on its SM has all of its memory.
    stages = 4 if rows * chunks * kv_heads * parts <= num_sms else 1

    def body(inputs, *results, **scratch):
        place = tuple(map(lax.axis_index, ("row", "head", "part")))
        threads = Warpgroup(place, interpret is not None)
        _attend_chunk(threads, inputs, AttentionParts(*results), scratch, computed)

    shared = _SharedMemory.types(_MOST_QUERIES, stages)._asdict()
    shared.pop("attended")
    stored = AttentionParts(
        *(plgpu.SMEM((_MOST_QUERIES, *x.shape[3:]), jnp.float32) for x in results)
    )
    outs = plgpu.kernel(
        body,
        out_type=tuple(results),
        scratch_types=shared | {"stored": stored, "queries_full": plgpu.Barrier()},
        grid=(parts, kv_heads, rows * chunks),
        grid_names=("part", "head", "row"),
        kernel_name="attend_queries_sm90",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            approx_math=True,
        ),
        interpret=interpret,
    )(inputs)
    return by_tokens(AttentionParts(*outs), rows * count)


def _attend_chunk(
    threads: Warpgroup, inputs: Queries, attended: AttentionParts, scratch: dict, computed: int
) -> None:
    """What a CTA does for some queries of a row."""
    _, head, part = threads.cta
    queries_full, stored = (scratch.pop(name) for name in ("queries_full", "stored"))
    shared = _SharedMemory(**scratch, attended=None)
    own = Chunk.of(inputs, threads.cta, attended.sums.shape[0], computed)
    bounds = own.newest, own.begin, own.end
    keys, values = (
        _Tiles(cache.at[own.row, head], stages, full, shared.all_threads, *bounds)
        for cache, stages, full in (
            (inputs.keys, shared.keys, shared.keys_full),
            (inputs.values, shared.values, shared.values_full),
        )
    )
    # What the other rows of the operand hold stays in their rows, which are not stored.
    own_queries = shared.queries.at[pl.ds(0, computed)]
    plgpu.copy_gmem_to_smem(inputs.queries.at[own.queries], own_queries, queries_full)
    for tiles in (keys, values):
        tiles.request_first(lambda tile: tile < own.end)
    newest = inputs.newest.at[pl.ds(own.first, _MOST_QUERIES)]
    newest = threads.load(newest, plgpu.Layout.WGMMA.reduce(1))
    plgpu.barrier_wait(queries_full)
    sums, weights, largest = _sum_tiles(keys, values, shared, newest)
    results = AttentionParts(sums, jnp.sum(weights, axis=1), largest)
    for ref, numbers in zip(stored, results, strict=True):
        ref[...] = numbers
    plgpu.commit_smem()
    target = part, head, pl.ds(own.first, computed)
    for ref, result in zip(stored, attended, strict=True):
        plgpu.copy_smem_to_gmem(ref.at[pl.ds(0, computed)], result.at[target])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _sum_tiles(
    keys: _Tiles, values: _Tiles, shared: _SharedMemory, newest: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """An online softmax of 64 queries over the tiles.

    `newest`, int32 [64], are the last positions that queries see. Returns float32 sums of values
    [64, H], weights [64, 64], which are still to be added up along the rows, and the largest scores
    [64].
    """
    rows = len(newest)

    def over_columns(numbers, columns):
        return lax.broadcast_in_dim(numbers, (rows, columns), (0,))

    def add_tile(tile, carry):
        total, weight, largest = carry
        scores = keys.use(tile, lambda stage: _product(shared.queries, stage.T))
        position = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
        scores *= HEAD_DIM**-0.5 * _LOG2_E
        # No number, where a part has no key of a query.
        scores = jnp.where(tile * _TILE + position <= over_columns(newest, _TILE), scores, -jnp.inf)
        top = jnp.maximum(largest, jnp.max(scores, axis=1))
        weights = jnp.exp2(scores - over_columns(top, _TILE))
        keep = jnp.exp2(largest - top)
        shared.weights[...] = weights.astype(jnp.bfloat16)
        plgpu.commit_smem()
        added = values.use(tile, lambda stage: _product(shared.weights, stage))
        total = over_columns(keep, HEAD_DIM) * total + added
        return total, over_columns(keep, _TILE) * weight + weights, top

    zeros = [filled((rows, columns), 0.0, plgpu.Layout.WGMMA) for columns in (HEAD_DIM, _TILE)]
    start = *zeros, filled((rows,), _EMPTY, plgpu.Layout.WGMMA.reduce(1))
    return lax.fori_loop(keys.begin, keys.end, add_tile, start)


def _attend_to_tiles(keys: _Tiles, values: _Tiles, shared: _SharedMemory) -> jax.Array:
    """The main loop: an online softmax over the tiles; float32 [H, padded group]."""
    padded = shared.queries.shape[0]

    def over_rows(numbers, rows):
        return lax.broadcast_in_dim(numbers, (rows, padded), (1,))

    def add_tile(tile, carry):
        total, weight, largest = carry
        scores = keys.use(tile, lambda stage: _product(stage, shared.queries.T))
        position = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=plgpu.Layout.WGMMA)
        scores *= HEAD_DIM**-0.5 * _LOG2_E
        scores = jnp.where(tile * _TILE + position <= keys.length, scores, _EMPTY)
        top = jnp.maximum(largest, jnp.max(scores, axis=0))
        weights = jnp.exp2(scores - over_rows(top, _TILE))
        keep = jnp.exp2(largest - top)
        shared.weights.T[...] = _transposed(weights)
        plgpu.commit_smem()
        added = values.use(tile, lambda stage: _product(stage.T, shared.weights.T))
        total = over_rows(keep, HEAD_DIM) * total + added
        return total, over_rows(keep, _TILE) * weight + weights, top

    zeros = [filled((rows, padded), 0.0, plgpu.Layout.WGMMA) for rows in (HEAD_DIM, _TILE)]
    start = *zeros, filled((padded,), _EMPTY, plgpu.Layout.WGMMA.reduce(0))
    total, weight, _ = lax.fori_loop(0, keys.last + 1, add_tile, start)
    return total / over_rows(jnp.sum(weight, axis=0), HEAD_DIM)


def _product(a: Any, b: Any) -> jax.Array:
    """The product of two matrices in shared memory, in float32."""

    def accumulate(acc):
        plgpu.wgmma(acc, a, b)
        plgpu.wgmma_wait(0)
        return acc[...]

    return pl.run_scoped(accumulate, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def _transposed(value: jax.Array) -> jax.Array:
    """A product of wgmma, rounded, as the transpose of a matrix in shared memory takes it."""
    return plgpu.layout_cast(value.astype(jnp.bfloat16), plgpu.Layout.WGMMA_TRANSPOSED)
