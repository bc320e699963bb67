"""`fp4_matmul`: checks its arguments, picks the implementation and owns the derivatives."""

import dataclasses
import functools
import warnings
from types import ModuleType
from typing import TypeGuard

import jax
import jax.numpy as jnp

from pallas_kernels import device
from pallas_kernels.fp4_matmul import check, layout, reference, tiling
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
    if problems := _misfits_of_swiglu(x, weight, b, squares, shares, a, config):
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
    if not _suits_kernel(weight, x) or _misfits_of_swiglu(x, weight, b, squares, shares, a):
        return False
    return a is None or _plan_of(x, weight, b.shape[1], paired=True).makes_shares(*a.shape)


def _misfits_of_swiglu(x, weight, b, squares, shares, a, config=None):
    """Why the kernel cannot end with SwiGLU, see `fp4_swiglu`."""
    problems = _misfits_of_adapter(shares, a) + _misfits_of_ending(x, weight, b, config)
    if problems:
        return problems
    (m, _), (n, rank) = x.shape, b.shape
    config = _plan_of(x, weight, rank, config, paired=True).config
    if not (m <= config.tile_m and tiling.takes_shares(config)):
        problems.append(f"SwiGLU wants {m} tokens in one tile and room for shares, got {config}")
    if m % 8 or n % (2 * tiling.TILE_ROWS):
        wanted = f"a multiple of 8 tokens and of {2 * tiling.TILE_ROWS} outputs"
        problems.append(f"SwiGLU wants {wanted}, got {m} and {n}")
    for name, parts in (("squares", squares), ("shares", shares)):
        if parts is not None and len(parts) < tiling.MIN_SHARES:
            problems.append(f"{name} are {len(parts)}, expected at least {tiling.MIN_SHARES}")
    if shares is not None and shares.shape[2] > rank:
        problems.append(f"shares have {shares.shape[2]} columns, B {rank}")
    return problems


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
    problems = _misfits_of_adapter(shares, a) + _misfits_of_norm(x, weight, b, config)
    shape = len(x), len(b)
    if stream.shape != shape or stream.dtype != x.dtype or scale.shape != shape[1:]:
        problems.append(
            f"stream is {stream.dtype} {stream.shape} and scale {scale.shape}, expected {x.dtype} "
            f"{shape} and {shape[1:]}"
        )
    if problems:
        raise ValueError("fp4_begin_norm: " + "; ".join(problems))
    options = {"a": a, "b": b, "shares": shares, "stream": stream, "scale": scale}
    return _run_kernel(x, weight, config, **options)


def serves_norm(x: jax.Array, weight: Fp4Weight | Fp4Tiles, b: jax.Array) -> bool:
    """Whether the kernel adds to the stream for such arguments of `fp4_begin_norm`.

    Not with so many rows that a norm of its own is faster.
    """
    return (
        len(x) <= tiling.MAX_ROWS_OF_NORM
        and _suits_kernel(weight, x)
        and not _misfits_of_norm(x, weight, b)
    )


def _misfits_of_norm(x, weight, b, config=None):
    """Why the kernel cannot begin a norm, see `fp4_begin_norm`."""
    if problems := _misfits_of_ending(x, weight, b, config):
        return problems
    m, (n, rank) = len(x), b.shape
    plan = _plan_of(x, weight, rank, config)
    if plan.config.tile_m != m:
        problems.append(f"a norm wants tiles of {m} tokens, got {plan.config}")
    elif not plan.adds_to_stream(m):
        problems.append(f"no room for the sum and what is scaled: {plan.config}")
    if n % tiling.TILE_ROWS:
        problems.append(f"a norm wants a multiple of {tiling.TILE_ROWS} outputs, got {n}")
    return problems


def _misfits_of_adapter(shares, a):
    return ["wants shares of x A^T or A, one of both"] if (shares is None) == (a is None) else []


def _misfits_of_ending(x, weight, b, config):
    """Why the kernel can do nothing more behind the product."""
    if not isinstance(weight, Fp4Tiles) or x.dtype != jnp.bfloat16:
        return [f"wants bfloat16 and Fp4Tiles, got {x.dtype} and {type(weight).__name__}"]
    if config is not None and (problem := config.problem()):
        return [problem]
    n, rank = weight.shape[0], b.shape[1]
    fits = b.shape == (n, tiling.padded_rank(rank))
    if not fits or not _has_room(len(x), n, x.shape[1], rank, config):
        wanted = f"{n} rows and a multiple of 64 columns that a stage holds"
        return [f"B is {b.shape}, expected {wanted}"]
    return []


def _plan_of(x, weight, rank, config=None, *, paired=False):
    """What the kernel does for x [M, K]."""
    (m, k), n, count = x.shape, weight.divisor.shape[0], device.multiprocessors()
    if config is None:
        config = tiling.choose(m, n, k, rank=rank, multiprocessors=count)
    return _kernel().make_plan(config, m, len(weight.codes), k, count, paired=paired)


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
    """The relative error of small products of the kernel, see `check`."""
    return check.relative_error(_kernel().matmul)


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
