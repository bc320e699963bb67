"""`kernels.attend` on a Hopper GPU, for rows that are not split, by Pallas's Mosaic GPU backend.

A block of threads has a key head of a row and the query heads that share it. The copy engine brings
tiles of 64 keys and values to shared memory, each as soon as there is a place for it. Scores are
computed as K q^T, as a group has few queries, and wgmma's first operand 64 rows.

What else a block reads it asks for before the first tiles, or it would wait behind them.
The new key and value go to the cache, and come back with the last tile.
"""

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import nvvm

from pallas_kernels.fp4_matmul.sm90.codes import OPERAND
from pallas_kernels.fp4_matmul.sm90.synchronize import fence_async_proxy, opaque

HEAD_DIM = 128
_SLOTS = 64  # of a tile
_COPIED = 16  # of them at a time: fewer are read behind a row's end
_QUERIES = 8  # columns of wgmma, or a multiple
_HALVES = pl.ds(0, HEAD_DIM // 2), pl.ds(HEAD_DIM // 2, HEAD_DIM // 2)
_LOG2_E = 1.4426950408889634
_EMPTY = float(jnp.finfo(jnp.float32).min)  # the score of what is not there

# Halves of eight heads: a warp has two of them, a lane four dimensions.
_HEADS = plgpu.Layout.TILED(
    plgpu.Tiling(((_QUERIES, 64), (2, 64), (4,))),
    warp_dims=(-5,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)
# Half of one head, which all warps have.
_HEAD = plgpu.Layout.TILED(
    plgpu.Tiling(((64,), (2,))),
    warp_dims=(plgpu.Replicated(4),),
    lane_dims=(-2,),
    vector_dim=-1,
)
# A number of each lane, which all warps have.
_LANES = plgpu.Layout.TILED(
    plgpu.Tiling(((32,), (1,))),
    warp_dims=(plgpu.Replicated(4),),
    lane_dims=(-2,),
    vector_dim=-1,
)


def serves(keys: jax.Array, heads: int) -> bool:
    """Whether the kernel exists for keys [M, K, S, H] and so many heads of queries.

    Queries are read by eights, which must not end behind the last head of a row. The cache is cut
    into eights, too, as the rows of an operand of wgmma are.
    """
    _, kv_heads, slots, head_dim = keys.shape
    group = heads // kv_heads
    return (
        head_dim == HEAD_DIM
        and keys.dtype == jnp.bfloat16
        and slots % 8 == 0
        and slots >= _SLOTS
        and (kv_heads - 1) * group + _padded(group) <= heads + 2 * kv_heads
    )


def attend(
    qkv: jax.Array,
    squares: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    keys: jax.Array,
    values: jax.Array,
    lengths: jax.Array,
    *,
    bias: jax.Array | None = None,
    qk_norm: tuple[jax.Array, jax.Array] | None = None,
    eps: float,
    multiprocessors: int,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns attention [M, N H], keys and values; the arguments are those of `kernels.attend`."""
    m, kv_heads, _, head_dim = keys.shape
    total = qkv.shape[1] // head_dim
    heads = total - 2 * kv_heads
    padded = _padded(heads // kv_heads)
    operands = {
        "qkv": qkv.reshape(m, total, head_dim),
        "squares": squares,
        "cos": angles[0],
        "sin": angles[1],
        "lengths": lengths,
    }
    if bias is not None:
        operands["bias"] = bias.reshape(total, head_dim)
    if qk_norm is not None:
        operands["q_norm"], operands["k_norm"] = qk_norm
    caches = {"keys": jax.new_ref(keys), "values": jax.new_ref(values)}
    names = *operands, *caches, "attended"
    # A block that is alone on its multiprocessor asks for the next tiles while it has others.
    tiles = 2 if m * kv_heads <= multiprocessors else 1

    def body(*refs, **sm):
        _attend(dict(zip(names, refs, strict=True)), sm, eps, simulated=interpret is not None)

    def operand(*shape):
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=OPERAND)

    full = plgpu.Barrier(num_barriers=tiles, num_arrivals=_SLOTS // _COPIED)
    attended = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((m, heads, head_dim), qkv.dtype),
        scratch_types={
            "keys": operand(tiles, _SLOTS, head_dim),
            "values": operand(tiles, _SLOTS, head_dim),
            "queries": operand(padded, head_dim),
            "weights": operand(padded, _SLOTS),
            "attended": plgpu.SMEM((padded, head_dim), jnp.bfloat16),
            "keys_full": full,
            "values_full": full,
            "all": plgpu.Barrier(),
        },
        grid=(kv_heads, m),
        grid_names=("head", "row"),
        kernel_name="attend_sm90",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            reduction_scratch_bytes=128 * padded,  # all columns at a time
            approx_math=True,
        ),
        interpret=interpret,
    )(*operands.values(), *caches.values())
    keys, values = (jax.freeze(cache) for cache in caches.values())
    return attended.reshape(m, heads * head_dim), keys, values


def self_check(interpret: plgpu.InterpretGPUParams | None = None) -> float:
    """The relative error of attention in a small cache, a row's last tile not being full."""
    m, kv_heads, group, slots = 2, 2, 5, 200
    rng = np.random.default_rng(0)
    shapes = [(m, kv_heads * (group + 2) * HEAD_DIM), *[(m, kv_heads, slots, HEAD_DIM)] * 2]
    qkv, keys, values = (rng.standard_normal(shape).astype(jnp.bfloat16) for shape in shapes)
    lengths = np.array([150, 20], np.int32)
    squares = np.full((36, m), 1 / 36, np.float32)  # for a factor of one
    angles = np.ones((m, HEAD_DIM // 2), np.float32), np.zeros((m, HEAD_DIM // 2), np.float32)
    run = functools.partial(attend, eps=0.0, multiprocessors=1, interpret=interpret)
    # The caller may be tracing a program, of which another thread knows nothing.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        results = thread.submit(jax.jit(run), qkv, squares, angles, keys, values, lengths).result()
    attended, new_keys, new_values = (np.asarray(x, np.float64) for x in results)
    q, k, v = np.split(
        qkv.astype(np.float64).reshape(m, -1, HEAD_DIM),
        (group * kv_heads, (group + 1) * kv_heads),
        axis=1,
    )
    expected = np.empty((m, kv_heads, group, HEAD_DIM))
    caches = []
    for cache, new in ((keys, k), (values, v)):
        caches.append(cache.astype(np.float64))
        caches[-1][np.arange(m), :, lengths] = new
    for row, length in enumerate(lengths):
        filled_keys, filled_values = (cache[row, :, : length + 1] for cache in caches)
        queries = q[row].reshape(kv_heads, group, HEAD_DIM)
        weights = np.exp(queries @ filled_keys.transpose(0, 2, 1) / HEAD_DIM**0.5)
        expected[row] = weights / weights.sum(axis=-1, keepdims=True) @ filled_values
    pairs = [(attended, expected.reshape(m, -1)), *zip((new_keys, new_values), caches, strict=True)]
    return float(np.max([np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in pairs]))


def _padded(group: int) -> int:
    return -(-group // _QUERIES) * _QUERIES


class _Read(NamedTuple):
    """What a block reads beside keys and values, as it lies in memory.

    Attributes:
        length: filled slots of the row.
        squares: shares of its mean square, first by lanes, then those left over.
        queries: by eights of heads, the halves of their projection, each with its bias or None.
        key: likewise, the halves of one head.
        value: likewise.
        query_rotation: cosines, sines, and the halves of the norm's scales if there is one.
        key_rotation: likewise.
    """

    length: jax.Array
    squares: tuple[list[jax.Array], list[jax.Array]]
    queries: list[list[tuple]]
    key: list[tuple]
    value: list[tuple]
    query_rotation: list[jax.Array]
    key_rotation: list[jax.Array]


def _read(gm: dict[str, Any], row: Any, head: Any, padded: int, *, simulated: bool) -> _Read:
    kv_heads, heads = gm["keys"].shape[1], gm["attended"].shape[1]

    def read(name, place, layout):
        return plgpu.load(gm[name].at[place], layout=layout, optimized=False)

    def projection(some, layout):
        return [
            (
                read("qkv", (row, some, dims), layout),
                read("bias", (some, dims), layout) if "bias" in gm else None,
            )
            for dims in _HALVES
        ]

    def rotation(row, norm, layout):
        scales = [read(norm, (dims,), layout) for dims in _HALVES] if norm in gm else []
        return [read(name, (row,), layout) for name in ("cos", "sin")] + scales

    length = gm["lengths"][row]
    count = gm["squares"].shape[0]
    by_lanes = [read("squares", (pl.ds(i, 32), row), _LANES) for i in range(0, count - 31, 32)]
    left = [gm["squares"][i, row] for i in range(count // 32 * 32, count)]
    key = projection(heads + head, _HEAD)
    value = projection(heads + kv_heads + head, _HEAD)
    first = head * (heads // kv_heads)
    starts = range(0, padded, _QUERIES)
    queries = [projection(pl.ds(first + i, _QUERIES), _HEADS) for i in starts]
    key_rotation = rotation(row, "k_norm", _HEAD)
    # Opaque, or the compiler would take both readings for one, which has one layout.
    query_rotation = [
        lax.broadcast_in_dim(x, (_QUERIES, x.shape[0]), (1,))
        for x in rotation(row if simulated else opaque(row), "q_norm", _HEADS.reduce(0))
    ]
    return _Read(length, (by_lanes, left), queries, key, value, query_rotation, key_rotation)


def _rounded(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def _projected(halves: list[tuple], factor: jax.Array) -> list[jax.Array]:
    """The halves of a projection with its norm's factor and its bias."""
    products = [(factor * x.astype(jnp.float32), bias) for x, bias in halves]
    return [_rounded(x if bias is None else x + bias.astype(jnp.float32)) for x, bias in products]


def _rotated(halves: list[jax.Array], rotation: list[jax.Array], eps: float) -> list[jax.Array]:
    """The halves of queries or keys, normed if they have a norm."""
    first, second = halves
    cos, sin, *scales = rotation
    if scales:
        mean = (jnp.sum(first * first, axis=-1) + jnp.sum(second * second, axis=-1)) / HEAD_DIM
        over = lax.rsqrt(mean + eps)
        if first.ndim == 2:
            over = lax.broadcast_in_dim(over, first.shape, (0,))
        first, second = (
            _rounded(x * over * scale) for x, scale in zip(halves, scales, strict=True)
        )
    return [first * cos - second * sin, second * cos + first * sin]


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """The tiles of keys and values of a head of a row.

    Attributes:
        gm: operands in global memory.
        sm: places for tiles, and barriers.
        row: of the batch.
        head: of keys and values.
        length: the slot of the new key.
    """

    gm: dict[str, Any]
    sm: dict[str, Any]
    row: Any
    head: Any
    length: Any

    @property
    def last(self):
        """The tile with the new key."""
        return lax.div(self.length, _SLOTS)

    def copy(self, name: str, tile: Any) -> None:
        """Asks for a tile of keys or values.

        But not for what is behind the row, unless nothing has been in its place before: what is
        multiplied by zero must be a number.
        """
        places = self.sm[name].shape[0]
        place = lax.rem(tile, places)
        full = self.sm[name + "_full"].at[place]

        @pl.loop(0, _SLOTS // _COPIED)
        def _(i):
            first = tile * _SLOTS + i * _COPIED
            needed = (first <= self.length) | (tile < places)

            @pl.when(needed)
            def _():
                slots, mine = pl.ds(first, _COPIED), pl.ds(i * _COPIED, _COPIED)
                source = self.gm[name].at[self.row, self.head, slots]
                plgpu.copy_gmem_to_smem(source, self.sm[name].at[place, mine], full)

            @pl.when(~needed)
            def _():
                plgpu.barrier_arrive(full)

    def copy_first(self, needed: Callable[[int], Any]) -> None:
        """Asks for those of the first tiles, for which there are places, that are needed."""
        for name in ("keys", "values"):
            for tile in range(self.sm[name].shape[0]):
                pl.when(needed(tile))(functools.partial(self.copy, name, jnp.int32(tile)))

    def use(self, name: str, tile: Any, multiply: Callable[[Any], jax.Array]) -> jax.Array:
        """What a tile of keys or values is for; then another one takes its place."""
        places = self.sm[name].shape[0]
        place = lax.rem(tile, places)
        plgpu.barrier_wait(self.sm[name + "_full"].at[place])
        result = multiply(self.sm[name].at[place])
        self.meet()
        pl.when(tile + places <= self.last)(functools.partial(self.copy, name, tile + places))
        return result

    def meet(self) -> None:
        """All threads wait for one another."""
        plgpu.barrier_arrive(self.sm["all"])
        plgpu.barrier_wait(self.sm["all"])


def _attend(gm: dict[str, Any], sm: dict[str, Any], eps: float, *, simulated: bool) -> None:
    """What a block of threads does, a warpgroup.

    Args:
        gm: operands and results in global memory.
        sm: tiles and barriers.
        eps: of the norms.
        simulated: by the interpreter, which takes no inline PTX.
    """
    row, head = lax.axis_index("row"), lax.axis_index("head")
    group, padded = gm["attended"].shape[1] // gm["keys"].shape[1], sm["queries"].shape[0]
    read = _read(gm, row, head, padded, simulated=simulated)
    tiles = _Tiles(gm, sm, row, head, read.length)
    last = tiles.last
    tiles.copy_first(lambda tile: tile < last)

    by_lanes, left = read.squares
    numbers = ([jnp.sum(sum(by_lanes[1:], start=by_lanes[0]))] if by_lanes else []) + left
    factor = lax.rsqrt(sum(numbers[1:], start=numbers[0]) + eps)
    key = _rotated(_projected(read.key, factor), read.key_rotation, eps)
    for name, new in (("keys", key), ("values", _projected(read.value, factor))):
        for dims, half in zip(_HALVES, new, strict=True):
            gm[name].at[row, head, read.length, dims][...] = half.astype(jnp.bfloat16)
    if not simulated:
        fence_async_proxy(nvvm.ProxyKind.async_global)
    for i, halves in enumerate(read.queries):
        queries = _rotated(_projected(halves, factor), read.query_rotation, eps)
        for dims, half in zip(_HALVES, queries, strict=True):
            sm["queries"].at[pl.ds(i * _QUERIES, _QUERIES), dims][...] = half.astype(jnp.bfloat16)
    plgpu.commit_smem()
    tiles.meet()
    tiles.copy_first(lambda tile: tile == last)

    def product(a, b):
        def run(acc):
            plgpu.wgmma(acc, a, b)
            plgpu.wgmma_wait(0)
            return acc[...]

        return pl.run_scoped(run, plgpu.ACC((a.shape[0], padded), jnp.float32))

    def over_rows(numbers, rows):
        return lax.broadcast_in_dim(numbers, (rows, padded), (1,))

    def full(shape, value, layout):
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    zeros = [full((rows, padded), 0.0, plgpu.Layout.WGMMA) for rows in (HEAD_DIM, _SLOTS)]

    def add(tile, carry):
        total, weight, largest = carry
        scores = tiles.use("keys", tile, lambda keys: product(keys, sm["queries"].T))
        slot = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=plgpu.Layout.WGMMA)
        scores *= HEAD_DIM**-0.5 * _LOG2_E
        scores = jnp.where(tile * _SLOTS + slot <= read.length, scores, _EMPTY)
        top = jnp.maximum(largest, jnp.max(scores, axis=0))
        weights = jnp.exp2(scores - over_rows(top, _SLOTS))
        keep = jnp.exp2(largest - top)
        sm["weights"].T[...] = _transposed(weights)
        plgpu.commit_smem()
        added = tiles.use("values", tile, lambda values: product(values.T, sm["weights"].T))
        total = over_rows(keep, HEAD_DIM) * total + added
        return total, over_rows(keep, _SLOTS) * weight + weights, top

    start = *zeros, full((padded,), _EMPTY, plgpu.Layout.WGMMA.reduce(0))
    total, weight, _ = lax.fori_loop(0, last + 1, add, start)
    sm["attended"].T[...] = _transposed(total / over_rows(jnp.sum(weight, axis=0), HEAD_DIM))
    plgpu.commit_smem()
    for i in range(group):
        plgpu.copy_smem_to_gmem(sm["attended"].at[i], gm["attended"].at[row, head * group + i])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _transposed(value: jax.Array) -> jax.Array:
    """A product of wgmma, rounded, as the transpose of a matrix in shared memory takes it."""
    return plgpu.layout_cast(value.astype(jnp.bfloat16), plgpu.Layout.WGMMA_TRANSPOSED)
