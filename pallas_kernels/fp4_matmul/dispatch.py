"""Which products the kernels support, and the product by one of them in its tiling.

"mosaic" is the kernel for Hopper GPUs (`sm90`), "mma" the one for every GPU since Ampere (`mma`).
"""

import dataclasses
import functools
import os
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import device
from pallas_kernels.fp4_matmul import mma_schedule, reference, self_test, tiling
from pallas_kernels.fp4_matmul.epilogues import AddRmsNorm, Epilogue, Swiglu
from pallas_kernels.fp4_matmul.layout import Fp4Tiles
from pallas_kernels.fp4_matmul.mma_schedule import MmaConfig
from pallas_kernels.fp4_matmul.reference import Fp4Weight
from pallas_kernels.fp4_matmul.tiling import TileConfig

_MAX_RANK = 512  # rank of an adapter inside the kernel; no larger one was tried
KERNEL_VARIABLE = "QERL_FP4_KERNEL"  # environment: "mosaic", "mma" or "xla"


@functools.cache
def supports_device() -> bool:
    """Whether the default device is a Hopper GPU on which the kernel agrees with the definition.

    A table that was tuned with this device, version of jax and kernel proves the agreement;
    elsewhere the kernel computes small products once.
    """
    if device.cuda_capability() != 9.0 or chosen_kernel() not in (None, "mosaic"):
        return False
    if tiling.verified(jax.devices()[0].device_kind, jax.__version__):
        return True
    return agrees(self_check)


@functools.cache
def supports_mma_device() -> bool:
    """Whether "mma" multiplies on the default device: it agrees with the definition there.

    It computes small products once, as no table knows the GPU. On a Hopper card the user has to
    choose it, unless the kernel for Hopper does not agree.
    """
    if device.cuda_capability() < 8.0 or chosen_kernel() not in (None, "mma"):
        return False
    if chosen_kernel() is None and supports_device():
        return False
    return agrees(functools.partial(_self_check_of_mma, "nvfp4"))


@functools.cache
def _supports_mxfp4(kernel: str) -> bool:
    """Whether the kernel that was chosen by products of NVFP4 agrees for MXFP4, too.

    The scales of MXFP4 have a layout of their own. Where programs are compiled for a GPU that is
    elsewhere, the kernel is taken to agree.
    """
    if not device.cuda_capability():
        return True
    if kernel == "mosaic" and tiling.verified(jax.devices()[0].device_kind, jax.__version__):
        return True
    check = self_check if kernel == "mosaic" else _self_check_of_mma
    return agrees(functools.partial(check, "mxfp4"), "the FP4 kernel with weights in MXFP4")


def agrees(
    measure_error: Callable[[], float],
    what: str = "the FP4 kernel",
    instead: str = "dequantizing instead",
) -> bool:
    """Whether a kernel runs, and agrees with the definition; warns where it does not.

    `measure_error` returns the relative error of the kernel's results; a warning names the kernel
    and what happens instead.
    """
    try:
        error = measure_error()
    except Exception as problem:  # Whatever an untested version of jax raises.
        first_line = f"{type(problem).__name__}: {problem}".splitlines()[0]
        _warn_once(f"{what} does not run, {instead} ({first_line})")
        return False
    if not error < 1e-2:
        _warn_once(f"{what} is off by {error:.1e}, {instead}")
        return False
    return True


def agrees_on_hopper(measure_error: Callable[[], float], what: str, instead: str) -> bool:
    """Whether the default device is a Hopper GPU on which a kernel agrees with the definition.

    The arguments are those of `agrees`; every kernel is measured once. Where programs are compiled
    for a Hopper GPU that is elsewhere, the kernel is taken to agree.
    """
    if device_kernel() != "mosaic":
        return False
    return device.cuda_capability() != 9.0 or _agrees_once(measure_error, what, instead)


_agrees_once = functools.cache(agrees)


def device_kernel() -> str:
    """What multiplies packed weights on the default device: "mosaic", "mma" or "xla"."""
    if supports_device():
        return "mosaic"
    return "mma" if supports_mma_device() else "xla"


def format_kernel(form: str) -> str:
    """What multiplies weights of a format in tile order: `device_kernel`, if it agrees for it."""
    kernel = device_kernel()
    return kernel if form == "nvfp4" or kernel == "xla" or _supports_mxfp4(kernel) else "xla"


def reads_tiles(rows: int) -> bool:
    """Whether products of this many rows read weights in tile order packed.

    For more rows "mma" dequantizes a weight every time.
    """
    return device_kernel() != "mma" or rows <= mma_schedule.MAX_ROWS


def chosen_kernel() -> str | None:
    """The kernel that the user chose, "mosaic", "mma" or "xla"; None for the fastest that runs.

    Raises:
        ValueError: the environment variable has another value.
    """
    choice = os.environ.get(KERNEL_VARIABLE)
    if choice not in (None, "mosaic", "mma", "xla"):
        raise ValueError(f"{KERNEL_VARIABLE} is {choice!r}, expected 'mosaic', 'mma' or 'xla'")
    return choice


def load_kernel() -> None:
    """Loads what a compiled program with kernels in it needs, if the device has any.

    Lowering such a program loads it, too, but a program from a cache is not lowered.
    """
    if device.supports_warpgroup():
        _lora_shrink()
    if supports_device():
        kernel()
    elif supports_mma_device():
        mma_kernel()


def self_check(form: str = "nvfp4") -> float:
    """The largest relative error of small products with weights of a format, see `self_test`."""
    return self_test.relative_error(kernel().matmul, form)


def _self_check_of_mma(form):
    return self_test.relative_error_of_mma(mma_kernel().matmul, form)


def implementation_of(
    weight: jax.Array | Fp4Weight | Fp4Tiles, x: jax.Array | jax.ShapeDtypeStruct
) -> str:
    """What multiplies x by the weight on the default device: "mosaic", "mma" or "xla".

    Warns where only x's dtype, or the weight's format, prevents a kernel.
    """
    if device_kernel() == "xla" or not isinstance(weight, Fp4Tiles):
        return "xla"
    return format_kernel(weight.format) if _supports_dtype(x.dtype) else "xla"


def _supports_dtype(dtype: jnp.dtype) -> bool:
    if dtype != jnp.bfloat16:
        _warn_once(f"the FP4 kernel multiplies bfloat16, not {dtype}: dequantizing instead")
        return False
    return True


def fits_adapter(m: int, n: int, k: int, rank: int, config: TileConfig | None = None) -> bool:
    """Whether a stage of the kernel's pipeline holds x A^T of an adapter of this rank."""
    rank = tiling.padded_rank(rank)
    if rank > _MAX_RANK:
        return False
    if config is not None:
        return rank <= config.block_k
    return tiling.fits_adapter(m, n, k, rank=rank, num_sms=device.num_sms())


def adapter_inside(
    implementation: str,
    x: jax.Array,
    lora: tuple[jax.Array, jax.Array],
    config: TileConfig | MmaConfig | None,
) -> bool:
    """Whether a kernel's product of x [M, K] takes the adapter A [R, K], B [N, R'']."""
    if implementation == "xla":
        return False
    (m, k), (a, b) = x.shape, lora
    if implementation == "mma" or isinstance(config, MmaConfig):
        return len(a) <= _MAX_RANK
    return fits_adapter(m, len(b), k, len(a), config)


def schedule_of(
    x: jax.Array | jax.ShapeDtypeStruct,
    weight: Fp4Tiles,
    rank: int,
    config: TileConfig | None = None,
    *,
    paired: bool = False,
) -> Any:
    """The kernel's `TileSchedule` for tokens [M, K]; `rank` is the number of columns of B, or 0.

    None looks the tiling up. `paired` says whether the product ends with SwiGLU.
    """
    (m, k), n, num_sms = x.shape, weight.divisor.shape[0], device.num_sms()
    if config is None:
        config = tiling.choose(m, n, k, rank=rank, num_sms=num_sms)
    return kernel().make_schedule(config, m, len(weight.codes), k, num_sms, paired=paired)


def supports(
    x: jax.Array | jax.ShapeDtypeStruct,
    weight: Any,
    *,
    lora: tuple[jax.Array, jax.Array] | None,
    xa_partials: jax.Array | None = None,
    epilogue: Epilogue,
) -> bool:
    """Whether `fp4_matmul` with an epilogue runs on the default device and saves time.

    RMSNorm does for numbers of rows with which it was measured, SwiGLU where no other kernel has to
    compute x A^T first.

    Args:
        x: [M, K].
        weight: weight [N, K], packed or dense.
        lora: argument of `fp4_matmul`.
        xa_partials: argument of `fp4_matmul`.
        epilogue: argument of `fp4_matmul`.
    """
    if lora is None or implementation_of(weight, x) != "mosaic":
        return False
    if misfits(x, weight, lora, xa_partials, epilogue):
        return False
    if isinstance(epilogue, AddRmsNorm):
        return len(x) <= tiling.MAX_ROWS_OF_NORM
    a, _ = lora
    schedule = schedule_of(x, weight, tiling.padded_rank(len(a)), paired=True)
    return xa_partials is not None or schedule.supports_lora_shrink(*a.shape)


def adds_xa_partials(
    x: jax.Array | jax.ShapeDtypeStruct, weight: Any, lora: tuple[jax.Array, jax.Array] | None
) -> bool:
    """Whether the Hopper kernel multiplies x [M, K], and adds up x A^T if there is an adapter.

    The product or `lora_shrink` makes the partials then. With other tilings XLA computes x A^T,
    which takes longer than partials that the kernel before the product leaves.
    """
    m, k = x.shape
    if m > tiling.MAX_ROWS_OF_PARTIALS or implementation_of(weight, x) != "mosaic":
        return False
    if lora is None:
        return True
    a, _ = lora
    if not fits_adapter(m, weight.shape[0], k, len(a)):
        return False
    schedule = schedule_of(x, weight, tiling.padded_rank(len(a)))
    return schedule.supports_lora_shrink(*a.shape) or _shrinks_to_partials(schedule.config, k)


def misfits(
    x: jax.Array | jax.ShapeDtypeStruct,
    weight: Fp4Tiles,
    lora: tuple[jax.Array, jax.Array],
    xa_partials: jax.Array | None,
    epilogue: Epilogue,
    config: TileConfig | None = None,
) -> list[str]:
    """Why the Hopper kernel cannot end `fp4_matmul` of x [M, K] with an epilogue."""
    (m, k), n, rank = x.shape, weight.shape[0], tiling.padded_rank(len(lora[0]))
    if not fits_adapter(m, n, k, rank, config):
        return [f"an epilogue wants an adapter that a stage holds, got rank {len(lora[0])}"]
    schedule = schedule_of(x, weight, rank, config, paired=isinstance(epilogue, Swiglu))
    if isinstance(epilogue, Swiglu):
        return _misfits_of_swiglu(m, n, epilogue, xa_partials, schedule.config)
    return _misfits_of_add_rmsnorm(m, n, epilogue, schedule)


def _misfits_of_swiglu(m, n, epilogue, xa_partials, config):
    problems, few = [], tiling.MIN_PARTIALS
    if m > tiling.MAX_ROWS_OF_PARTIALS or not tiling.supports_xa_partials(config):
        wanted = f"at most {tiling.MAX_ROWS_OF_PARTIALS} tokens and a reducer"
        problems.append(f"SwiGLU wants {wanted}, got {m} and {config}")
    if m % 8 or n % (2 * tiling.TILE_ROWS):
        wanted = f"a multiple of 8 tokens and of {2 * tiling.TILE_ROWS} outputs"
        problems.append(f"SwiGLU wants {wanted}, got {m} and {n}")
    squares = epilogue.square_partials
    for name, partials in (("square_partials", squares), ("xa_partials", xa_partials)):
        if partials is not None and len(partials) < few:
            problems.append(f"{name} are {len(partials)}, expected at least {few}")
    return problems


def _misfits_of_add_rmsnorm(m, n, epilogue, schedule):
    problems, residual, scale = [], epilogue.residual, epilogue.scale
    if residual.shape != (m, n) or residual.dtype != jnp.bfloat16 or scale.shape != (n,):
        problems.append(
            f"residual is {residual.dtype} {residual.shape} and scale {scale.shape}, expected "
            f"bfloat16 {(m, n)} and {(n,)}"
        )
    if schedule.config.tile_m != m:
        problems.append(f"RMSNorm wants tiles of {m} tokens, got {schedule.config}")
    elif not schedule.supports_add_residual(m):
        problems.append(f"shared memory does not hold sum and scaled sum: {schedule.config}")
    if n % tiling.TILE_ROWS:
        problems.append(f"RMSNorm wants a multiple of {tiling.TILE_ROWS} outputs, got {n}")
    return problems


def run(
    x: jax.Array,
    weight: Fp4Tiles,
    config: TileConfig | None = None,
    *,
    a: jax.Array | None = None,
    b: jax.Array | None = None,
    xa_partials: jax.Array | None = None,
    epilogue: Epilogue | None = None,
    **options: Any,
) -> Any:
    """The kernel's product, of operands as in `sm90.kernel.Product`.

    The kernel computes x A^T of `a`, or adds up `xa_partials`, if there are few rows and its tiling
    supports that; otherwise another kernel does so before. A config of None is looked up.
    """
    rank = 0 if b is None else b.shape[1]
    schedule = schedule_of(x, weight, rank, config, paired=isinstance(epilogue, Swiglu))
    tiles = schedule.config
    if a is not None and xa_partials is None:
        if schedule.supports_lora_shrink(*a.shape):
            options["a"] = a
        elif _shrinks_to_partials(tiles, x.shape[1]):
            xa_partials = _lora_shrink().shrink(x, a)
        else:
            options["xa"] = padded(reference.dot(x, a), len(a))
    if xa_partials is not None and b is not None:
        few = len(x) <= tiling.MAX_ROWS_OF_PARTIALS and len(xa_partials) >= tiling.MIN_PARTIALS
        if few and tiling.supports_xa_partials(tiles):
            options["xa_partials"] = xa_partials
        else:
            options["xa"] = reference.sum_xa_partials(xa_partials, x, b)
    return kernel().matmul(
        x, weight, config=tiles, num_sms=device.num_sms(), b=b, epilogue=epilogue, **options
    )


def _shrinks_to_partials(config, columns):
    """Whether `lora_shrink` computes x A^T, and the product adds up its partials."""
    if not tiling.supports_xa_partials(config):
        return False
    return columns > (tiling.MIN_PARTIALS - 1) * _lora_shrink().COLUMNS


def run_mma(
    x: jax.Array,
    weight: Fp4Tiles,
    config: MmaConfig | None = None,
    *,
    a: jax.Array | None = None,
    b: jax.Array | None = None,
    xa: jax.Array | None = None,
    xa_partials: jax.Array | None = None,
    bias: jax.Array | None = None,
    dtype: DTypeLike = jnp.bfloat16,
) -> jax.Array:
    """The product [M, N] by the kernel of `mma`, or for many rows by XLA on a dequantized copy.

    x is bfloat16 [M, K], the bias [N], and an adapter's B [N, R'']; with it come A [R, K], x A^T
    [M, R] or float32 [S, M, R'], whose sum over S is x A^T. A config of None is looked up.
    """
    (m, k), n = x.shape, weight.shape[0]
    if xa_partials is not None:
        xa = xa_partials.sum(axis=0).astype(x.dtype)
    elif a is not None:
        xa = reference.dot(x, a)
    if m <= mma_schedule.MAX_ROWS:
        config = config or mma_schedule.choose(m, n, k, device.num_sms())
        return mma_kernel().matmul(x, weight, config=config, xa=xa, b=b, bias=bias, dtype=dtype)
    # As in `reference.matmul`, no loop may carry the dequantized weight.
    x, codes = jax.lax.optimization_barrier((x, weight.codes))
    weight = dataclasses.replace(weight, codes=codes)
    y = reference.dot(x, mma_kernel().dequantize(weight, inputs=k), dtype)
    if xa is not None and b is not None:
        rank = min(xa.shape[1], b.shape[1])  # columns after the smaller one are zero
        y += reference.dot(xa[:, :rank], b[:, :rank], dtype)
    return y if bias is None else y + bias.astype(dtype)


def mma_kernel() -> ModuleType:
    """The kernels for every GPU since Ampere, loaded when needed, as `kernel`."""
    from pallas_kernels.fp4_matmul import mma

    return mma


def padded(b: jax.Array, rank: int) -> jax.Array:
    """B, or x A^T, of an adapter of this rank with the columns that the kernel reads."""
    return jnp.pad(b, ((0, 0), (0, tiling.padded_rank(rank) - b.shape[1])))


def kernel() -> ModuleType:
    """The kernel's module, loaded when needed: it uses an API of jax that may change."""
    from pallas_kernels.fp4_matmul import sm90

    return sm90


def _lora_shrink() -> ModuleType:
    """The module of x A^T, loaded when needed: it uses an API of jax that may change."""
    from pallas_kernels.fp4_matmul import lora_shrink

    return lora_shrink


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=2)
