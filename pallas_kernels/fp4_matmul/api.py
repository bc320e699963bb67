"""`fp4_matmul`: checks its arguments, picks the implementation and owns the derivatives."""

import concurrent.futures
import dataclasses
import functools
import warnings
from types import ModuleType
from typing import TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import device
from pallas_kernels.fp4_matmul import layout, reference, tiling
from pallas_kernels.fp4_matmul.layout import Fp4Tiles
from pallas_kernels.fp4_matmul.reference import Fp4Weight
from pallas_kernels.fp4_matmul.tiling import TileConfig

_MAX_RANK = 512  # of an adapter inside the kernel; no larger one was tried


def fp4_matmul(
    x: jax.Array,
    weight: Fp4Weight | Fp4Tiles,
    *,
    lora: tuple[jax.Array, jax.Array] | None = None,
    bias: jax.Array | None = None,
    implementation: str | None = None,
    config: TileConfig | None = None,
) -> jax.Array:
    """Returns x W^T + (x A^T) B^T + bias for a frozen weight W in 4 bits.

    The gradient with respect to x comes from the packed weight again, so that no dequantised copy
    outlives the call. W itself has none.

    Args:
        x: [..., K], float32, bfloat16 or float16.
        weight: the packed weight [N, K], in checkpoint order or in tile order.
        lora: A [R, K] and B [N, R]; a scale belongs into A. The kernel reads 64 columns of B at a
            time and pads in every call, unless zeros fill B up to a multiple of that already.
        bias: [N].
        implementation: "mosaic" is the Hopper kernel, for a weight in tile order and bfloat16 x;
            "xla" dequantises and multiplies. None takes the kernel on a Hopper GPU, when it agrees
            with the definition there.
        config: the tiling of the kernel; None looks it up.

    Returns:
        [..., N] in x's dtype.

    Raises:
        ValueError: shapes or dtypes that do not fit together, or to the implementation.
    """
    _check(x, weight, lora, bias, implementation, config)
    if implementation is None:
        implementation = "mosaic" if _suits_kernel(weight, x) else "xla"
    if implementation == "mosaic":
        rows = x.reshape(-1, x.shape[-1])
        inside = lora is None or _has_room(
            len(rows), len(lora[1]), x.shape[-1], len(lora[0]), config
        )
        y = _kernel_matmul(rows, weight, lora if inside else None, bias, config)
        y = y.reshape(*x.shape[:-1], -1)
        return y if inside else y + _adapter(x, lora)
    y = _frozen_matmul(x, _in_rows(weight, x))
    if lora is not None:
        y = y + _adapter(x, lora)
    if bias is not None:
        y = y + bias.astype(x.dtype)
    return y


def _has_room(m: int, n: int, k: int, rank: int, config: TileConfig | None = None) -> bool:
    """Whether the kernel itself adds an adapter of this rank."""
    rank = tiling.padded_rank(rank)
    if rank > _MAX_RANK:
        return False
    if config is not None:
        return rank <= config.block_k
    return tiling.has_room(m, n, k, rank=rank, multiprocessors=device.multiprocessors())


def _adapter(x: jax.Array, lora: tuple[jax.Array, jax.Array]) -> jax.Array:
    a, b = lora
    b = b[:, : a.shape[0]]
    return reference.dot(reference.dot(x, a.astype(x.dtype)), b.astype(x.dtype))


def fp4_matmul_with_shares(
    x: jax.Array,
    weight: Fp4Weight | Fp4Tiles,
    shares: jax.Array,
    b: jax.Array,
    *,
    config: TileConfig | None = None,
) -> jax.Array:
    """Returns x W^T + (x A^T) B^T where shares of x A^T are known; without derivatives.

    The kernel adds them up beside its main loop, if there are few rows.

    Args:
        x: [M, K], see `fp4_matmul`.
        weight: likewise.
        shares: float32 [S, M, R'], whose sum over S is x A^T; R' is a multiple of 32, and what is
            behind R is 0.
        b: [N, R'']; R'' >= R.
        config: the tiling of the kernel; None looks it up.

    Returns:
        [M, N] in x's dtype.

    Raises:
        ValueError: shares of another shape, or a tiling that cannot be.
    """
    rank = b.shape[1]
    if config is not None and (problem := config.problem()):
        raise ValueError(f"fp4_matmul_with_shares: {problem}")
    if shares.ndim != 3 or shares.shape[1] != len(x) or shares.shape[2] % tiling.SHARE_COLUMNS:
        raise ValueError(
            f"fp4_matmul_with_shares: shares are {shares.shape} for {len(x)} rows, expected "
            f"(S, {len(x)}, a multiple of {tiling.SHARE_COLUMNS})"
        )
    inside = (
        _suits_kernel(weight, x)
        and shares.shape[2] <= rank == tiling.padded_rank(rank)
        and _has_room(len(x), len(b), x.shape[1], rank, config)
    )
    if not inside:
        return fp4_matmul(x, weight, config=config) + reference.dot(sum_of_shares(shares, x, b), b)
    return _run_kernel(x, weight, config, shares=shares, b=b)


def fp4_swiglu(
    x: jax.Array,
    weight: Fp4Weight | Fp4Tiles,
    b: jax.Array,
    squares: jax.Array,
    *,
    shares: jax.Array | None = None,
    a: jax.Array | None = None,
    eps: float,
    config: TileConfig | None = None,
) -> jax.Array:
    """Returns SwiGLU of x W^T + (x A^T) B^T behind a norm, where `serves_swiglu`.

    Gate, what it multiplies, the activation and the product of the two are rounded to bfloat16.

    Args:
        x: bfloat16 [M, K], a row times the norm's scale, but not over its root mean square.
        weight: [2 F, K]; the first half is the gate's.
        b: see `fp4_matmul_with_shares`.
        squares: float32 [S, M], whose sum over S is the mean square.
        shares: see `fp4_matmul_with_shares`.
        a: in their place, bfloat16 [R, K].
        eps: of the norm.
        config: the tiling of the kernel; None looks it up.

    Returns:
        [M, F].

    Raises:
        ValueError: arguments, or a tiling, with which the kernel cannot end with SwiGLU.
    """
    plan = _plan_of_ending("fp4_swiglu", x, weight, b, shares, a, config, paired=True)
    problems = []
    if not _ends_with_swiglu(plan.config, len(x)):
        problems.append(
            f"SwiGLU wants {len(x)} tokens in one tile and room for shares, got {plan.config}"
        )
    if len(x) % 8 or len(b) % (2 * tiling.TILE_ROWS):
        problems.append(
            f"SwiGLU wants a multiple of 8 tokens and of {2 * tiling.TILE_ROWS} outputs, got "
            f"{len(x)} and {len(b)}"
        )
    counts = {"squares": len(squares)} | ({} if shares is None else {"shares": len(shares)})
    for name, count in counts.items():
        if count < tiling.MIN_SHARES:
            problems.append(f"{name} are {count}, expected at least {tiling.MIN_SHARES}")
    if problems:
        raise ValueError("fp4_swiglu: " + "; ".join(problems))
    options = {"a": a, "b": b, "shares": shares, "squares": squares, "eps": eps}
    return _run_kernel(x, weight, config, **options)


def serves_swiglu(
    x: jax.Array | jax.ShapeDtypeStruct,
    weight: Fp4Weight | Fp4Tiles,
    b: jax.Array,
    squares: jax.Array | None = None,
    *,
    shares: jax.Array | None = None,
    a: jax.Array | None = None,
) -> bool:
    """Whether the kernel ends with SwiGLU for such arguments of `fp4_swiglu`.

    With `a` only where the kernel makes x A^T, too; without squares for those of `fp4_begin_norm`.
    """
    if not _suits_kernel(weight, x):
        return False
    (m, k), n, rank = x.shape, weight.shape[0], b.shape[1]
    fits = (
        m % 8 == 0
        and n % (2 * tiling.TILE_ROWS) == 0
        and rank == tiling.padded_rank(rank)
        and _has_room(m, n, k, rank)
    )
    if not fits:
        return False
    plan = _plan_of(x, weight, rank, paired=True)
    if not _ends_with_swiglu(plan.config, m):
        return False
    if squares is not None and len(squares) < tiling.MIN_SHARES:
        return False
    if a is not None:
        return plan.makes_shares(*a.shape)
    return shares is not None and len(shares) >= tiling.MIN_SHARES and shares.shape[2] <= rank


def fp4_begin_norm(
    x: jax.Array,
    weight: Fp4Weight | Fp4Tiles,
    stream: jax.Array,
    scale: jax.Array,
    b: jax.Array,
    *,
    shares: jax.Array | None = None,
    a: jax.Array | None = None,
    config: TileConfig | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Adds x W^T + (x A^T) B^T to the residual stream and begins a norm, where `serves_norm`.

    The product and the sum are rounded to bfloat16.

    Args:
        x: bfloat16 [M, K].
        weight: [N, K].
        stream: bfloat16 [M, N].
        scale: float32 [N], of the norm.
        b: see `fp4_matmul_with_shares`.
        shares: likewise.
        a: in their place, bfloat16 [R, K].
        config: the tiling of the kernel; None looks it up.

    Returns:
        The sum and the sum times the scale, [M, N]; and float32 [S, M], whose sum over S is the
        mean square of the former.

    Raises:
        ValueError: arguments, or a tiling, with which the kernel cannot begin a norm.
    """
    plan = _plan_of_ending("fp4_begin_norm", x, weight, b, shares, a, config)
    n, problems = len(b), []
    if plan.config.tile_m != len(x):
        problems.append(f"a norm wants tiles of {len(x)} tokens, got {plan.config}")
    elif not plan.adds_to_stream(len(x)):
        problems.append(f"no room for the sum and what is scaled: {plan.config}")
    if n % tiling.TILE_ROWS:
        problems.append(f"a norm wants outputs by {tiling.TILE_ROWS}, got {n}")
    if stream.shape != (len(x), n) or stream.dtype != x.dtype or scale.shape != (n,):
        problems.append(
            f"stream is {stream.dtype} {stream.shape} and scale {scale.shape}, expected {x.dtype} "
            f"{(len(x), n)} and {(n,)}"
        )
    if problems:
        raise ValueError("fp4_begin_norm: " + "; ".join(problems))
    options = {"a": a, "b": b, "shares": shares, "stream": stream, "scale": scale}
    return _run_kernel(x, weight, config, **options)


def serves_norm(x: jax.Array, weight: Fp4Weight | Fp4Tiles, b: jax.Array) -> bool:
    """Whether the kernel adds to the stream for such arguments of `fp4_begin_norm`.

    Not with so many rows that a norm of its own is faster.
    """
    if not _suits_kernel(weight, x):
        return False
    (m, k), n, rank = x.shape, weight.shape[0], b.shape[1]
    return (
        m % 8 == 0
        and m <= tiling.MAX_ROWS_OF_NORM
        and n % tiling.TILE_ROWS == 0
        and rank == tiling.padded_rank(rank)
        and _has_room(m, n, k, rank)
        and _plan_of(x, weight, rank).adds_to_stream(m)
    )


def _plan_of_ending(name, x, weight, b, shares, a, config, *, paired=False):
    """What the kernel does for a product that does more, if its operands fit together."""
    if not isinstance(weight, Fp4Tiles) or x.dtype != jnp.bfloat16:
        raise ValueError(f"{name} wants bfloat16 and Fp4Tiles, got {x.dtype} and {type(weight)}")
    if (shares is None) == (a is None):
        raise ValueError(f"{name} wants shares of x A^T or A, one of both")
    if config is not None and (problem := config.problem()):
        raise ValueError(f"{name}: {problem}")
    rank = b.shape[1]
    if b.shape != (weight.shape[0], tiling.padded_rank(rank)) or not _has_room(
        len(x), len(b), x.shape[1], rank, config
    ):
        raise ValueError(
            f"{name}: B is {b.shape}, expected {weight.shape[0]} rows and a multiple of 64 columns "
            "that a stage holds"
        )
    return _plan_of(x, weight, rank, config, paired=paired)


def _plan_of(x, weight, rank, config=None, *, paired=False):
    """What the kernel does for x [M, K]."""
    (m, k), n, count = x.shape, weight.divisor.shape[0], device.multiprocessors()
    if config is None:
        config = tiling.choose(m, n, k, rank=rank, multiprocessors=count)
    return _kernel().make_plan(config, m, len(weight.codes), k, count, paired=paired)


def _ends_with_swiglu(config: TileConfig, m: int) -> bool:
    return m <= config.tile_m and tiling.takes_shares(config)


def sum_of_shares(shares: jax.Array, x: jax.Array, b: jax.Array) -> jax.Array:
    """Returns x A^T [M, R''] in x's dtype, see `fp4_matmul_with_shares`."""
    product = shares.sum(axis=0)[:, : b.shape[1]].astype(x.dtype)
    return jnp.pad(product, ((0, 0), (0, b.shape[1] - product.shape[1])))


def fp4_matmul_float32(x: jax.Array, weight: Fp4Weight | Fp4Tiles) -> jax.Array:
    """Returns x W^T as it was accumulated, not rounded to x's dtype; without derivatives.

    Args:
        x: see `fp4_matmul`.
        weight: likewise.

    Returns:
        float32 [..., N].
    """
    _check(x, weight, None, None, None, None)
    if _suits_kernel(weight, x):
        return _run_kernel(x, weight, dtype=jnp.float32)
    return reference.matmul(x, _in_rows(weight, x), dtype=jnp.float32)


def _in_rows(weight: Fp4Weight | Fp4Tiles, x: jax.Array) -> Fp4Weight:
    """The weight in checkpoint order, with x's inputs: a shard by columns has not all of them."""
    if isinstance(weight, Fp4Tiles):
        return layout.from_tiles(dataclasses.replace(weight, inputs=x.shape[-1]))
    return weight


@jax.custom_vjp
def _frozen_matmul(x: jax.Array, weight: Fp4Weight) -> jax.Array:
    return reference.matmul(x, weight)


def _frozen_matmul_fwd(x, weight):
    return reference.matmul(x, weight), weight


def _frozen_matmul_bwd(weight, dy):
    return reference.matmul_transposed(dy, weight), None


_frozen_matmul.defvjp(_frozen_matmul_fwd, _frozen_matmul_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _kernel_matmul(x, weight, lora, bias, config):
    """The product for x [M, K] with the adapter and the bias, by the kernel."""
    if lora is None or len(x) > tiling.MAX_ROWS_OF_SHARES:
        return _kernel_matmul_fwd(x, weight, lora, bias, config)[0]
    a, b = (matrix.astype(x.dtype) for matrix in lora)
    return _run_kernel(x, weight, config, bias=bias, a=a, b=_padded(b, len(a)))


def _kernel_matmul_fwd(x, weight, lora, bias, config):
    adapter, xa = {}, None
    if lora is not None:
        a, b = (matrix.astype(x.dtype) for matrix in lora)
        xa = reference.dot(x, a)
        adapter = {"b": _padded(b, len(a)), "xa": _padded(xa, len(a))}
    y = _run_kernel(x, weight, config, bias=bias, **adapter)
    return y, (x if lora is not None else x[:0], xa, weight, lora, bias)


def _padded(b, rank):
    """B, or x A^T, of an adapter of this rank with the columns that the kernel reads."""
    return jnp.pad(b, ((0, 0), (0, tiling.padded_rank(rank) - b.shape[1])))


def _run_kernel(x, weight, config=None, *, a=None, b=None, shares=None, **options):
    """The kernel's product for x [..., K], with the tiling that suits it.

    It makes x A^T itself, or adds up shares of it, if there are few rows and room for that.
    """
    rows = x.reshape(-1, x.shape[-1])
    rank = 0 if b is None else b.shape[1]
    plan = _plan_of(rows, weight, rank, config, paired="squares" in options)
    config = plan.config
    if a is not None:
        if plan.makes_shares(*a.shape):
            options["a"] = a
        elif _projects_in_shares(config, rows.shape[1]):
            shares = _projection().project(rows, a)
        else:
            options["xa"] = _padded(reference.dot(rows, a), len(a))
    if shares is not None and b is not None:
        few = len(rows) <= tiling.MAX_ROWS_OF_SHARES and len(shares) >= tiling.MIN_SHARES
        if few and tiling.takes_shares(config):
            options["shares"] = shares
        else:
            options["xa"] = sum_of_shares(shares, rows, b)
    y = _kernel().matmul(
        rows, weight, config=config, multiprocessors=device.multiprocessors(), b=b, **options
    )
    return y if "stream" in options else y.reshape(*x.shape[:-1], -1)


def _projects_in_shares(config, columns):
    """Whether a kernel of its own makes x A^T, and leaves its sum over K to the product."""
    if not tiling.takes_shares(config) or not device.has_triton():
        return False
    return columns > (tiling.MIN_SHARES - 1) * _projection().COLUMNS


def _kernel_matmul_bwd(_, residuals, dy):
    x, xa, weight, lora, bias = residuals
    dx = kernel_transposed(dy, weight, inputs=x.shape[1])
    dlora = None
    if lora is not None:
        a, b = lora
        rank = a.shape[0]
        through = jnp.dot(dy, b[:, :rank].astype(dy.dtype))
        dx += reference.dot(through, a.astype(dy.dtype).T)
        db = jnp.dot(dy.T, xa, preferred_element_type=jnp.float32).astype(b.dtype)
        dlora = (
            jnp.dot(through.T, x, preferred_element_type=jnp.float32).astype(a.dtype),
            jnp.pad(db, ((0, 0), (0, b.shape[1] - rank))),
        )
    dbias = None if bias is None else dy.sum(axis=0, dtype=jnp.float32).astype(bias.dtype)
    return dx, None, dlora, dbias


def kernel_transposed(dy: jax.Array, weight: Fp4Tiles, *, inputs: int) -> jax.Array:
    """The gradient by x without the adapter: dy [M, N] times the weight, [M, K] in dy's dtype.

    The kernel dequantises, XLA multiplies; as in `reference.matmul` no loop may carry what is
    dequantised. Both parts of a gradient are rounded before they are added, for in float32 each
    would be written and read at twice the size, which takes longer than to dequantise.
    """
    dy, codes = jax.lax.optimization_barrier((dy, weight.codes))
    weight = dataclasses.replace(weight, codes=codes)
    dense = _kernel().dequantize(weight, inputs=inputs, multiprocessors=device.multiprocessors())
    return reference.dot(dy, dense.T)


_kernel_matmul.defvjp(_kernel_matmul_fwd, _kernel_matmul_bwd)


def _suits_kernel(
    weight: Fp4Weight | Fp4Tiles, x: jax.Array | jax.ShapeDtypeStruct
) -> TypeGuard[Fp4Tiles]:
    if not isinstance(weight, Fp4Tiles) or not kernel_runs():
        return False
    if x.dtype != jnp.bfloat16:
        _warn_once(f"the FP4 kernel multiplies bfloat16, not {x.dtype}: dequantising instead")
        return False
    return True


@functools.cache
def kernel_runs() -> bool:
    """Whether the kernel serves this process: a Hopper GPU, on which it agrees with the definition.

    The agreement is known where a table was tuned with this device, version of jax and kernel;
    elsewhere a small product is computed once.
    """
    if device.cuda_capability() != 9.0:
        return False
    if tiling.verified(jax.devices()[0].device_kind, jax.__version__):
        return True
    try:
        error = self_check()
    except Exception as problem:  # Whatever an untested version of jax raises.
        first_line = f"{type(problem).__name__}: {problem}".splitlines()[0]
        _warn_once(f"the FP4 kernel does not run, dequantising instead ({first_line})")
        return False
    if not error < 1e-2:
        _warn_once(f"the FP4 kernel is off by {error:.1e}, dequantising instead")
        return False
    return True


def load_kernel() -> None:
    """Loads what a compiled program with the kernel in it needs, if the kernel serves this process.

    To lower such a program does so, too; one that another process compiled is not lowered.
    """
    if kernel_runs():
        _kernel()


def self_check() -> float:
    """The relative error of a small product with an adapter, the larger of two tilings'.

    One shares tiles, is given shares of x A^T, and ends with SwiGLU or begins a norm. The other
    makes them, and has clusters with a tile for each block and an odd one, a bias, and an N within
    a tile. A tile has more steps than the pipeline stages. Without slices and `ahead`, which few
    tilings have: they take longer to lower.
    """
    shared = TileConfig(8, rows=2, stages=7, stream=True)
    split = dataclasses.replace(shared, stream=False, split=2)
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
    stream = rng.normal(0, 10, (m, gate_up.shape[0])).astype(jnp.bfloat16)
    scale = rng.uniform(0.5, 2, gate_up.shape[0]).astype(np.float32)
    x_parts, a_parts = (array.astype(np.float32).reshape(len(array), 4, -1) for array in (x, a))
    shares = np.einsum("msk,rsk->smr", x_parts, a_parts)
    matmul = functools.partial(_kernel().matmul, x)

    def dense(tiles, _):
        return reference.dequantize(layout.from_tiles(tiles), jnp.float32)

    def ends_with_swiglu(gate_up, squares):
        extra = {"shares": shares, "b": b[: gate_up.shape[0]], "squares": squares}
        return matmul(gate_up, config=shared, multiprocessors=5, **extra)

    def begins_norm(half, _):
        extra = {"shares": shares, "b": b[: half.shape[0]], "stream": stream, "scale": scale}
        total, scaled, parts = matmul(half, config=shared, multiprocessors=5, **extra)
        return total, scaled, parts.sum(axis=0)

    def makes_shares(tiles, _):
        return matmul(tiles, config=split, multiprocessors=8, a=a, b=b, bias=bias)

    functions = (
        (dense, tiles),
        (ends_with_swiglu, gate_up),
        (begins_norm, gate_up),
        (makes_shares, tiles),
    )
    squares = np.zeros((tiling.MIN_SHARES + 1, m), np.float32)  # no whole number of batches
    # The caller may be tracing a program, of which other threads know nothing. One thread lowers,
    # as Python runs in one at a time; what is lowered compiles meanwhile.
    with concurrent.futures.ThreadPoolExecutor(5) as threads:

        def start():
            return [
                threads.submit(jax.jit(one).lower(weight, squares).compile)
                for one, weight in functions
            ]

        programs = [started.result() for started in threads.submit(start).result()]

        def run(i):
            result = threads.submit(programs[i], functions[i][1], squares).result()
            return jax.tree.map(lambda array: np.asarray(array, np.float64), result)

        xa = shares.sum(axis=0).astype(jnp.bfloat16).astype(np.float64)
        product = x.astype(np.float64) @ run(0).T + xa @ b[:, :rank].astype(np.float64).T
        squares += rng.uniform(0.5, 2, squares.shape) * np.mean(product**2) / len(squares)
        gate, up = (
            _rounded(half / np.sqrt(squares.sum(axis=0, dtype=np.float64))[:, None])
            for half in np.split(product[:, : gate_up.shape[0]], 2, axis=1)
        )
        total = _rounded(_rounded(product[:, : gate_up.shape[0]]) + stream.astype(np.float64))
        pairs = (
            (run(1), _rounded(gate / (1 + np.exp(-gate))) * up),
            *zip(run(2), (total, total * scale, np.mean(total**2, axis=1)), strict=True),
            (run(3), product + bias.astype(np.float64)),
        )
    return float(np.max([np.linalg.norm(y - z) / np.linalg.norm(z) for y, z in pairs]))


def _rounded(x: np.ndarray) -> np.ndarray:
    return x.astype(jnp.bfloat16).astype(np.float64)


def _kernel() -> ModuleType:
    """The kernel's module. It uses an API of jax that may change: it is loaded when needed."""
    from pallas_kernels.fp4_matmul import sm90

    return sm90


def _projection() -> ModuleType:
    """Likewise."""
    from pallas_kernels import projection

    return projection


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=2)


def _check(x, weight, lora, bias, implementation, config):
    problems = []
    if isinstance(weight, Fp4Tiles):
        n, k = weight.divisor.shape[0], x.shape[-1]
        problems += _misfits_of_tiles(weight, n, k)
    else:
        n, k = weight.packed.shape[0], 2 * weight.packed.shape[1]
        if weight.packed.dtype != jnp.uint8:
            problems.append(f"packed is {weight.packed.dtype}, expected uint8")
        problems += _misfits(weight, n, k)
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        problems.append(f"x is {x.dtype}, expected float32, bfloat16 or float16")
    if x.shape[-1] != k:
        problems.append(f"x has {x.shape[-1]} inputs, the weight {k}")
    if lora is not None:
        a, b = lora
        columns = len(a), tiling.padded_rank(len(a))
        if a.ndim != 2 or a.shape[1] != k or b.shape not in [(n, count) for count in columns]:
            problems.append(f"lora is {a.shape}, {b.shape}, expected (R, {k}), ({n}, R)")
    if bias is not None and bias.shape != (n,):
        problems.append(f"bias is {bias.shape}, expected {(n,)}")
    if implementation not in (None, "mosaic", "xla"):
        problems.append(f"implementation is {implementation!r}, expected 'mosaic', 'xla' or None")
    if implementation == "mosaic" and not (
        isinstance(weight, Fp4Tiles) and x.dtype == jnp.bfloat16
    ):
        kind = type(weight).__name__
        problems.append(f"mosaic wants bfloat16 and Fp4Tiles, got {x.dtype} and {kind}")
    if config is not None and (problem := config.problem()):
        problems.append(problem)
    if problems:
        raise ValueError("fp4_matmul: " + "; ".join(problems))


def _misfits(weight: Fp4Weight, n: int, k: int) -> list[str]:
    """What is wrong with the scales of an [n, k] weight."""
    try:
        form = reference.format_of(weight.scales.dtype)
    except ValueError as error:
        return [str(error)]
    problems = []
    if k % form.block:
        problems.append(
            f"the {form.name} weight has {k} inputs, expected a multiple of {form.block}"
        )
    if weight.scales.shape != (n, k // form.block):
        expected = (n, k // form.block)
        problems.append(f"{form.name} scales are {weight.scales.shape}, expected {expected}")
    shape = None if weight.global_scale is None else weight.global_scale.shape
    expected = (n,) if form.global_scale else None
    if shape != expected:
        problems.append(f"{form.name} global_scale is {shape}, expected {expected}")
    return problems


def _misfits_of_tiles(tiles: Fp4Tiles, n: int, k: int) -> list[str]:
    """What is wrong with the arrays of an [n, k] weight; a shard's k is not the whole weight's."""
    count = (-(-n // tiling.TILE_ROWS), -(-k // tiling.TILE_COLUMNS))
    problems = []
    for name, words in (("codes", layout.CODE_WORDS), ("scales", layout.SCALE_WORDS)):
        array, expected = getattr(tiles, name), (*count, words)
        if array.shape != expected or array.dtype != jnp.uint32:
            problems.append(
                f"{name} of the tiles are {array.dtype} {array.shape}, expected uint32 {expected} "
                f"for {n} outputs and x's {k} inputs"
            )
    return problems
