"""Products by the Hopper kernel with an epilogue: SwiGLU, or residual and RMSNorm."""

import jax
import jax.numpy as jnp

from pallas_kernels.fp4_matmul import dispatch, tiling
from pallas_kernels.fp4_matmul.layout import Fp4Tiles
from pallas_kernels.fp4_matmul.reference import Fp4Weight
from pallas_kernels.fp4_matmul.tiling import TileConfig


def fp4_swiglu(
    x: jax.Array,
    weight: Fp4Weight | Fp4Tiles,
    b: jax.Array,
    square_partials: jax.Array,
    *,
    xa_partials: jax.Array | None = None,
    a: jax.Array | None = None,
    eps: float,
    config: TileConfig | None = None,
) -> jax.Array:
    """Returns SwiGLU of x W^T + (x A^T) B^T with deferred normalization of x.

    The rows of x are multiplied by the norm's scale already; their factor 1 / sqrt(mean square +
    eps) is applied to the product. Gate, up, the activation and the result are rounded to bfloat16.
    `supports_swiglu` says where the kernel does this.

    Args:
        x: bfloat16 [M, K], rows times the norm's scale.
        weight: packed weight [2 F, K], whose first half is the gate's.
        b: B [N, R''] of `fp4_matmul_with_xa_partials`.
        square_partials: float32 [S, M], whose sum over S is the mean square of a row.
        xa_partials: float32 [S, M, R'] of `fp4_matmul_with_xa_partials`, or None with `a`.
        a: bfloat16 [R, K], of which the product x A^T is computed, or None with `xa_partials`.
        eps: epsilon of the norm.
        config: tiling of the kernel; None looks it up.

    Returns:
        bfloat16 [M, F].

    Raises:
        ValueError: arguments or a tiling that the SwiGLU epilogue does not support.
    """
    if problems := _misfits_of_swiglu(x, weight, b, square_partials, xa_partials, a, config):
        raise ValueError("fp4_swiglu: " + "; ".join(problems))
    assert isinstance(weight, Fp4Tiles)  # as there are no problems
    return dispatch.run(
        x,
        weight,
        config,
        a=a,
        b=b,
        xa_partials=xa_partials,
        square_partials=square_partials,
        eps=eps,
    )


def supports_swiglu(
    x: jax.Array | jax.ShapeDtypeStruct,
    weight: Fp4Weight | Fp4Tiles,
    b: jax.Array,
    square_partials: jax.Array | None = None,
    *,
    xa_partials: jax.Array | None = None,
    a: jax.Array | None = None,
) -> bool:
    """Whether the kernel runs `fp4_swiglu` for such arguments.

    With `a`, whether it also computes x A^T itself. Without `square_partials`, for the partials of
    `fp4_matmul_add_rmsnorm`.
    """
    if not dispatch.supports_weight(weight, x):
        return False
    if _misfits_of_swiglu(x, weight, b, square_partials, xa_partials, a):
        return False
    if a is None:
        return True
    schedule = dispatch.schedule_of(x, weight, b.shape[1], paired=True)
    return schedule.supports_lora_shrink(*a.shape)


def _misfits_of_swiglu(x, weight, b, square_partials, xa_partials, a, config=None):
    """Why the kernel does not support `fp4_swiglu` of these arguments."""
    problems = _misfits_of_adapter(xa_partials, a, x, b)
    problems += _misfits_of_epilogue(x, weight, b, config)
    if problems:
        return problems
    (m, _), (n, rank) = x.shape, b.shape
    config = dispatch.schedule_of(x, weight, rank, config, paired=True).config
    if not (m <= config.tile_m and tiling.supports_xa_partials(config)):
        problems.append(f"SwiGLU wants {m} tokens in one tile and a reducer, got {config}")
    if m % 8 or n % (2 * tiling.TILE_ROWS):
        wanted = f"a multiple of 8 tokens and of {2 * tiling.TILE_ROWS} outputs"
        problems.append(f"SwiGLU wants {wanted}, got {m} and {n}")
    for name, partials in (("square_partials", square_partials), ("xa_partials", xa_partials)):
        if partials is not None and len(partials) < tiling.MIN_PARTIALS:
            problems.append(f"{name} are {len(partials)}, expected at least {tiling.MIN_PARTIALS}")
    if xa_partials is not None and xa_partials.shape[2] > rank:
        problems.append(f"xa_partials have {xa_partials.shape[2]} columns, B {rank}")
    return problems


def fp4_matmul_add_rmsnorm(
    x: jax.Array,
    weight: Fp4Weight | Fp4Tiles,
    residual: jax.Array,
    scale: jax.Array,
    b: jax.Array,
    *,
    xa_partials: jax.Array | None = None,
    a: jax.Array | None = None,
    config: TileConfig | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Adds x W^T + (x A^T) B^T to the residual and writes the RMSNorm's partial mean squares.

    The normalization is deferred: the kernel that reads the result applies the factor 1 /
    sqrt(mean square + eps). The product and the sum are rounded to bfloat16.
    `supports_add_rmsnorm` says where the kernel does this.

    Args:
        x: bfloat16 [M, K].
        weight: packed weight [N, K].
        residual: bfloat16 [M, N].
        scale: float32 [N], scale of the norm.
        b: B [N, R''] of `fp4_matmul_with_xa_partials`.
        xa_partials: float32 [S, M, R'] of `fp4_matmul_with_xa_partials`, or None with `a`.
        a: bfloat16 [R, K], of which the product x A^T is computed, or None with `xa_partials`.
        config: tiling of the kernel; None looks it up.

    Returns:
        The sum [M, N], the sum times the scale [M, N], and float32 partials [S, M], whose sum over
        S is the mean square of a row of the sum.

    Raises:
        ValueError: arguments or a tiling that the epilogue does not support.
    """
    problems = _misfits_of_adapter(xa_partials, a, x, b)
    problems += _misfits_of_add_rmsnorm(x, weight, b, config)
    shape = len(x), len(b)
    if residual.shape != shape or residual.dtype != x.dtype or scale.shape != shape[1:]:
        problems.append(
            f"residual is {residual.dtype} {residual.shape} and scale {scale.shape}, expected "
            f"{x.dtype} {shape} and {shape[1:]}"
        )
    if problems:
        raise ValueError("fp4_matmul_add_rmsnorm: " + "; ".join(problems))
    assert isinstance(weight, Fp4Tiles)  # as there are no problems
    return dispatch.run(
        x, weight, config, a=a, b=b, xa_partials=xa_partials, residual=residual, scale=scale
    )


def supports_add_rmsnorm(
    x: jax.Array | jax.ShapeDtypeStruct, weight: Fp4Weight | Fp4Tiles, b: jax.Array
) -> bool:
    """Whether the kernel runs `fp4_matmul_add_rmsnorm` for such arguments.

    Only for numbers of rows with which it was measured.
    """
    return (
        len(x) <= tiling.MAX_ROWS_OF_NORM
        and dispatch.supports_weight(weight, x)
        and not _misfits_of_add_rmsnorm(x, weight, b)
    )


def _misfits_of_add_rmsnorm(x, weight, b, config=None):
    """Why the kernel does not support `fp4_matmul_add_rmsnorm` of these arguments."""
    if problems := _misfits_of_epilogue(x, weight, b, config):
        return problems
    m, (n, rank) = len(x), b.shape
    schedule = dispatch.schedule_of(x, weight, rank, config)
    if schedule.config.tile_m != m:
        problems.append(f"RMSNorm wants tiles of {m} tokens, got {schedule.config}")
    elif not schedule.supports_add_residual(m):
        problems.append(f"shared memory does not hold sum and scaled sum: {schedule.config}")
    if n % tiling.TILE_ROWS:
        problems.append(f"RMSNorm wants a multiple of {tiling.TILE_ROWS} outputs, got {n}")
    return problems


def _misfits_of_adapter(xa_partials, a, x, b):
    if (xa_partials is None) == (a is None):
        return ["wants xa_partials or A, one of both"]
    problems, rank, inputs = [], b.shape[1], x.shape[1]
    if b.dtype != x.dtype:
        problems.append(f"B is {b.dtype}, expected {x.dtype}")
    fits = a is None or (a.ndim == 2 and a.shape[1] == inputs and len(a) <= rank)
    if not fits or (a is not None and a.dtype != x.dtype):
        wanted = f"{x.dtype}, {inputs} columns and {rank} rows at most"
        problems.append(f"A is {a.dtype} {a.shape}, expected {wanted}")
    return problems


def _misfits_of_epilogue(x, weight, b, config):
    """Why the kernel supports no epilogue for these arguments."""
    if not isinstance(weight, Fp4Tiles) or x.dtype != jnp.bfloat16:
        return [f"wants bfloat16 and Fp4Tiles, got {x.dtype} and {type(weight).__name__}"]
    if config is not None and (problem := config.problem()):
        return [problem]
    n, rank = weight.shape[0], b.shape[1]
    fits = b.shape == (n, tiling.padded_rank(rank))
    if not fits or not dispatch.fits_adapter(len(x), n, x.shape[1], rank, config):
        wanted = f"{n} rows and a multiple of 64 columns that a stage holds"
        return [f"B is {b.shape}, expected {wanted}"]
    return []
