"""Products by the Hopper kernel that end with what a kernel behind them would do."""

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
    """Returns SwiGLU of x W^T + (x A^T) B^T behind a norm, where `supports_swiglu`.

    Gate, what it multiplies, the activation and the product of the two are rounded to bfloat16.

    Args:
        x: bfloat16 [M, K], a row times the norm's scale, but not over its root mean square.
        weight: [2 F, K]; the first half is the gate's.
        b: see `fp4_matmul_with_xa_partials`.
        square_partials: float32 [S, M], whose sum over S is the mean square.
        xa_partials: see `fp4_matmul_with_xa_partials`.
        a: in their place, bfloat16 [R, K].
        eps: of the norm.
        config: the tiling of the kernel; None looks it up.

    Returns:
        [M, F].

    Raises:
        ValueError: arguments, or a tiling, with which the kernel cannot end with SwiGLU.
    """
    if problems := _misfits_of_swiglu(x, weight, b, square_partials, xa_partials, a, config):
        raise ValueError("fp4_swiglu: " + "; ".join(problems))
    assert isinstance(weight, Fp4Tiles)  # as there are no problems
    options = {
        "a": a,
        "b": b,
        "xa_partials": xa_partials,
        "square_partials": square_partials,
        "eps": eps,
    }
    return dispatch.run(x, weight, config, **options)


def supports_swiglu(
    x: jax.Array | jax.ShapeDtypeStruct,
    weight: Fp4Weight | Fp4Tiles,
    b: jax.Array,
    square_partials: jax.Array | None = None,
    *,
    xa_partials: jax.Array | None = None,
    a: jax.Array | None = None,
) -> bool:
    """Whether the kernel ends with SwiGLU for such arguments of `fp4_swiglu`.

    With `a` only where the kernel makes x A^T, too; without square_partials for those of
    `fp4_matmul_add_rmsnorm`.
    """
    if not dispatch.supports_weight(weight, x) or _misfits_of_swiglu(
        x, weight, b, square_partials, xa_partials, a
    ):
        return False
    return a is None or dispatch.schedule_of(
        x, weight, b.shape[1], paired=True
    ).supports_lora_shrink(*a.shape)


def _misfits_of_swiglu(x, weight, b, square_partials, xa_partials, a, config=None):
    """Why the kernel cannot end with SwiGLU, see `fp4_swiglu`."""
    problems = _misfits_of_adapter(xa_partials, a, x, b) + _misfits_of_ending(x, weight, b, config)
    if problems:
        return problems
    (m, _), (n, rank) = x.shape, b.shape
    config = dispatch.schedule_of(x, weight, rank, config, paired=True).config
    if not (m <= config.tile_m and tiling.supports_xa_partials(config)):
        problems.append(f"SwiGLU wants {m} tokens in one tile and room for shares, got {config}")
    if m % 8 or n % (2 * tiling.TILE_ROWS):
        wanted = f"a multiple of 8 tokens and of {2 * tiling.TILE_ROWS} outputs"
        problems.append(f"SwiGLU wants {wanted}, got {m} and {n}")
    for name, parts in (("square_partials", square_partials), ("xa_partials", xa_partials)):
        if parts is not None and len(parts) < tiling.MIN_PARTIALS:
            problems.append(f"{name} are {len(parts)}, expected at least {tiling.MIN_PARTIALS}")
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

    The product and the sum are rounded to bfloat16. See `supports_add_rmsnorm`.

    Args:
        x: bfloat16 [M, K].
        weight: [N, K].
        residual: bfloat16 [M, N].
        scale: float32 [N], of the norm.
        b: see `fp4_matmul_with_xa_partials`.
        xa_partials: likewise.
        a: in their place, bfloat16 [R, K].
        config: the tiling of the kernel; None looks it up.

    Returns:
        The sum and the sum times the scale, [M, N]; and float32 [S, M], whose sum over S is the
        mean square of the former.

    Raises:
        ValueError: arguments, or a tiling, with which the kernel cannot begin a norm.
    """
    problems = _misfits_of_adapter(xa_partials, a, x, b) + _misfits_of_norm(x, weight, b, config)
    shape = len(x), len(b)
    if residual.shape != shape or residual.dtype != x.dtype or scale.shape != shape[1:]:
        problems.append(
            f"residual is {residual.dtype} {residual.shape} and scale {scale.shape}, expected "
            f"{x.dtype} {shape} and {shape[1:]}"
        )
    if problems:
        raise ValueError("fp4_matmul_add_rmsnorm: " + "; ".join(problems))
    assert isinstance(weight, Fp4Tiles)  # as there are no problems
    options = {"a": a, "b": b, "xa_partials": xa_partials, "residual": residual, "scale": scale}
    return dispatch.run(x, weight, config, **options)


def fp4_behind_norm(
    x: jax.Array,
    weight: Fp4Weight | Fp4Tiles,
    lora: tuple[jax.Array, jax.Array],
    square_partials: jax.Array,
    *,
    config: TileConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns x W^T + (x A^T) B^T behind a norm that was begun, where `supports_lora_shrink`.

    The norm's factor is left to who reads the product, and gets the mean squares for it. The tokens
    are a multiple of 8.

    Args:
        x: bfloat16 [M, K], of `fp4_matmul_add_rmsnorm`, what is scaled.
        weight: [N, K].
        lora: A of `fp4_matmul`, and B of `fp4_matmul_with_xa_partials`.
        square_partials: float32 [S, M], of `fp4_matmul_add_rmsnorm`.
        config: the tiling of the kernel; None looks it up.

    Returns:
        The product [M, N], and the sum of the squares, float32 [1, M].

    Raises:
        ValueError: arguments, or a tiling, with which the kernel does not make x A^T and add up.
    """
    a, b = lora
    problems = _misfits_of_ending(x, weight, b, config) or _misfits_of_adapter(None, a, x, b)
    if not problems:
        assert isinstance(weight, Fp4Tiles)
        if not dispatch.schedule_of(x, weight, b.shape[1], config).supports_lora_shrink(*a.shape):
            problems.append(f"no room to make x A^T: A is {a.shape}")
    if (
        square_partials.ndim != 2
        or square_partials.shape[1] != len(x)
        or len(square_partials) < tiling.MIN_PARTIALS
    ):
        wanted = f"({tiling.MIN_PARTIALS} or more, {len(x)})"
        problems.append(f"square_partials are {square_partials.shape}, expected {wanted}")
    if len(x) % 8:
        problems.append(f"wants a multiple of 8 tokens, got {len(x)}")
    if problems:
        raise ValueError("fp4_behind_norm: " + "; ".join(problems))
    assert isinstance(weight, Fp4Tiles)  # as there are no problems
    return dispatch.run(x, weight, config, a=a, b=b, pass_squares=square_partials)


def supports_add_rmsnorm(
    x: jax.Array | jax.ShapeDtypeStruct, weight: Fp4Weight | Fp4Tiles, b: jax.Array
) -> bool:
    """Whether the kernel adds to the stream for such arguments of `fp4_matmul_add_rmsnorm`.

    Only for as many rows as it was measured with.
    """
    return (
        len(x) <= tiling.MAX_ROWS_OF_NORM
        and dispatch.supports_weight(weight, x)
        and not _misfits_of_norm(x, weight, b)
    )


def _misfits_of_norm(x, weight, b, config=None):
    """Why the kernel cannot begin a norm, see `fp4_matmul_add_rmsnorm`."""
    if problems := _misfits_of_ending(x, weight, b, config):
        return problems
    m, (n, rank) = len(x), b.shape
    plan = dispatch.schedule_of(x, weight, rank, config)
    if plan.config.tile_m != m:
        problems.append(f"a norm wants tiles of {m} tokens, got {plan.config}")
    elif not plan.supports_add_residual(m):
        problems.append(f"no room for the sum and what is scaled: {plan.config}")
    if n % tiling.TILE_ROWS:
        problems.append(f"a norm wants a multiple of {tiling.TILE_ROWS} outputs, got {n}")
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
        problems.append(f"A in {a.dtype} {a.shape}, expected {wanted}")
    return problems


def _misfits_of_ending(x, weight, b, config):
    """Why the kernel can do nothing more behind the product."""
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
