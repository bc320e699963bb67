"""The kernel's check of itself, for a version of jax or an edit of which nothing is known."""

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.fp4_matmul import layout, reference, tiling
from pallas_kernels.fp4_matmul.layout import Fp4Tiles
from pallas_kernels.fp4_matmul.tiling import TileConfig


def relative_error(matmul: Callable) -> float:
    """The largest relative error of small products with an adapter, in two tilings.

    One shares tiles, is given shares of x A^T, and ends with SwiGLU or begins a norm. The other
    makes them, and has clusters with a tile for each block and an odd one, a bias, an N within a
    tile, and mean squares to pass on. A tile has more steps than the pipeline stages. Without
    slices and `ahead`, which few tilings have: they take longer to lower.

    Args:
        matmul: `sm90.matmul`, which uses an API of jax that may change.
    """
    shared = TileConfig(8, warpgroups_n=2, stages=7, stream_k=True)
    split = dataclasses.replace(shared, stream_k=False, split=2)
    m, n, k, rank = 8, 1470, 1024, 32
    count = -(-n // tiling.TILE_ROWS), k // tiling.TILE_COLUMNS
    rng = np.random.default_rng(0)
    scales = rng.integers(32, 151, (*count, 4 * layout.SCALE_WORDS), np.uint8).view(np.uint32)
    tiles = Fp4Tiles(
        codes=rng.integers(0, 2**32, (*count, layout.CODE_WORDS), np.uint32),
        scales=scales << 4 | scales >> 28,  # where `layout` has the four bytes of a word
        divisor=rng.uniform(1000, 3000, n).astype(np.float32),
        inputs=k,
        format="nvfp4",
    )
    whole = len(tiles.codes) // 2 * 2
    gate_up = dataclasses.replace(
        tiles,
        codes=tiles.codes[:whole],
        scales=tiles.scales[:whole],
        divisor=tiles.divisor[: whole * tiling.TILE_ROWS],
    )
    x, a, b, bias = (
        rng.normal(0, deviation, shape).astype(jnp.bfloat16)
        for deviation, shape in ((1, (m, k)), (0.05, (rank, k)), (1, (n, 64)), (1, (n,)))
    )
    residual = rng.normal(0, 10, (m, gate_up.shape[0])).astype(jnp.bfloat16)
    scale = rng.uniform(0.5, 2, gate_up.shape[0]).astype(np.float32)
    x_parts, a_parts = (array.astype(np.float32).reshape(len(array), 4, -1) for array in (x, a))
    xa_partials = np.einsum("msk,rsk->smr", x_parts, a_parts)
    matmul = functools.partial(matmul, x)

    def dense(tiles, _):
        return reference.dequantize(layout.from_tiles(tiles), jnp.float32)

    def ends_with_swiglu(gate_up, square_partials):
        extra = {
            "xa_partials": xa_partials,
            "b": b[: gate_up.shape[0]],
            "square_partials": square_partials[:few],
        }
        return matmul(gate_up, config=shared, num_sms=5, **extra)

    def begins_norm(half, _):
        extra = {
            "xa_partials": xa_partials,
            "b": b[: half.shape[0]],
            "residual": residual,
            "scale": scale,
        }
        total, scaled, parts = matmul(half, config=shared, num_sms=5, **extra)
        return total, scaled, parts.sum(axis=0)

    def supports_lora_shrink(tiles, square_partials):
        extra = {"a": a, "b": b, "bias": bias, "pass_squares": square_partials}
        return matmul(tiles, config=split, num_sms=8, **extra)

    functions = (
        (dense, tiles),
        (ends_with_swiglu, gate_up),
        (begins_norm, gate_up),
        (supports_lora_shrink, tiles),
    )
    few = tiling.MIN_PARTIALS + 1
    square_partials = np.zeros((17, m), np.float32)  # 16 are read at a time; of a few, 4
    # The caller may be tracing a program, of which other threads know nothing. One thread lowers,
    # as Python runs in one at a time; what is lowered compiles meanwhile.
    with concurrent.futures.ThreadPoolExecutor(5) as threads:

        def start():
            return [
                threads.submit(jax.jit(one).lower(weight, square_partials).compile)
                for one, weight in functions
            ]

        programs = [started.result() for started in threads.submit(start).result()]

        def run(i):
            result = threads.submit(programs[i], functions[i][1], square_partials).result()
            return jax.tree.map(lambda array: np.asarray(array, np.float64), result)

        xa = xa_partials.sum(axis=0).astype(jnp.bfloat16).astype(np.float64)
        product = x.astype(np.float64) @ run(0).T + xa @ b[:, :rank].astype(np.float64).T
        square_partials += rng.uniform(0.5, 2, square_partials.shape) * np.mean(product**2) / few
        gate, up = (
            _rounded(half / np.sqrt(square_partials[:few].sum(axis=0, dtype=np.float64))[:, None])
            for half in np.split(product[:, : gate_up.shape[0]], 2, axis=1)
        )
        total = _rounded(_rounded(product[:, : gate_up.shape[0]]) + residual.astype(np.float64))
        pairs = (
            (run(1), _rounded(gate / (1 + np.exp(-gate))) * up),
            *zip(run(2), (total, total * scale, np.mean(total**2, axis=1)), strict=True),
            *zip(
                run(3),
                (product + bias.astype(np.float64), square_partials.sum(axis=0, keepdims=True)),
                strict=True,
            ),
        )
    return float(np.max([np.linalg.norm(y - z) / np.linalg.norm(z) for y, z in pairs]))


def _rounded(x: np.ndarray) -> np.ndarray:
    return x.astype(jnp.bfloat16).astype(np.float64)
