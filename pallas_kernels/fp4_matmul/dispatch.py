"""Which products the kernels support, and the product by one of them in its tiling.

"mosaic" is the kernel for Hopper GPUs (`sm90`), "mma" the one for every GPU since Ampere (`mma`).
"""

import dataclasses
import functools
import os
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import device
from pallas_kernels.fp4_matmul import mma_schedule, reference, self_test, tiling
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
    return _agrees(self_check)


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
    return _agrees(lambda: self_test.relative_error_of_mma(mma_kernel().matmul))


def _agrees(measure_error: Callable[[], float]) -> bool:
    """Whether a kernel runs, and agrees with the definition; warns where it does not."""
    try:
        error = measure_error()
    except Exception as problem:  # Whatever an untested version of jax raises.
        first_line = f"{type(problem).__name__}: {problem}".splitlines()[0]
        _warn_once(f"the FP4 kernel does not run, dequantizing instead ({first_line})")
        return False
    if not error < 1e-2:
        _warn_once(f"the FP4 kernel is off by {error:.1e}, dequantizing instead")
        return False
    return True


def device_kernel() -> str:
    """What multiplies packed weights on the default device: "mosaic", "mma" or "xla"."""
    if supports_device():
        return "mosaic"
    return "mma" if supports_mma_device() else "xla"


def supports_tiles() -> bool:
    """Whether a kernel for the default device reads weights in tile order."""
    return device_kernel() != "xla"


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


def self_check() -> float:
    """The largest relative error of the kernel's small products, see `self_test`."""
    return self_test.relative_error(kernel().matmul)


def supports_weight(
    weight: Fp4Weight | Fp4Tiles, x: jax.Array | jax.ShapeDtypeStruct
) -> TypeGuard[Fp4Tiles]:
    """Whether "mosaic" multiplies x by the weight; warns where only x's dtype prevents it."""
    return isinstance(weight, Fp4Tiles) and supports_device() and _supports_dtype(x.dtype)


def implementation_of(weight: Fp4Weight | Fp4Tiles, x: jax.Array | jax.ShapeDtypeStruct) -> str:
    """What multiplies x by the weight on the default device: "mosaic", "mma" or "xla"."""
    if supports_weight(weight, x):
        return "mosaic"
    return "mma" if supports_mma(weight, x) else "xla"


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
    """The kernel's `TileSchedule`.

    Args:
        x: tokens [M, K].
        weight: packed weight [N, K].
        rank: number of columns of the adapter's B; 0 without an adapter.
        config: tiling of the kernel; None looks it up.
        paired: whether the product ends with SwiGLU.
    """
    (m, k), n, num_sms = x.shape, weight.divisor.shape[0], device.num_sms()
    if config is None:
        config = tiling.choose(m, n, k, rank=rank, num_sms=num_sms)
    return kernel().make_schedule(config, m, len(weight.codes), k, num_sms, paired=paired)


def supports_lora_shrink(
    x: jax.Array | jax.ShapeDtypeStruct,
    weight: Fp4Weight | Fp4Tiles,
    lora: tuple[jax.Array, jax.Array],
) -> bool:
    """Whether the kernel itself computes x A^T, for x [M, K] and A and B of `fp4_matmul`.

    Otherwise another kernel computes it before.
    """
    a, b = lora
    if not supports_weight(weight, x):
        return False
    if not fits_adapter(len(x), len(b), x.shape[1], b.shape[1]):
        return False
    return schedule_of(x, weight, tiling.padded_rank(b.shape[1])).supports_lora_shrink(*a.shape)


def run(
    x: jax.Array,
    weight: Fp4Tiles,
    config: TileConfig | None = None,
    *,
    a: jax.Array | None = None,
    b: jax.Array | None = None,
    xa_partials: jax.Array | None = None,
    **options: Any,
) -> Any:
    """The kernel's product.

    The kernel computes x A^T of `a`, or adds up `xa_partials`, if there are few rows and its tiling
    supports that; otherwise another kernel does so before.

    Args:
        x: bfloat16 [..., K].
        weight: packed weight [N, K].
        config: tiling; None looks it up.
        a: A [R, K] of an adapter, or None.
        b: B [N, R''] of an adapter, or None.
        xa_partials: float32 [S, M, R'], whose sum over S is x A^T, or None.
        **options: further arguments of `sm90.matmul`.

    Returns:
        [..., N], or the tuple that `sm90.matmul` returns with a residual.
    """
    rows = x.reshape(-1, x.shape[-1])
    rank = 0 if b is None else b.shape[1]
    schedule = schedule_of(rows, weight, rank, config, paired="square_partials" in options)
    tiles = schedule.config
    if a is not None:
        if schedule.supports_lora_shrink(*a.shape):
            options["a"] = a
        elif _shrinks_to_partials(tiles, rows.shape[1]):
            xa_partials = _lora_shrink().shrink(rows, a)
        else:
            options["xa"] = padded(reference.dot(rows, a), len(a))
    if xa_partials is not None and b is not None:
        few = len(rows) <= tiling.MAX_ROWS_OF_PARTIALS and len(xa_partials) >= tiling.MIN_PARTIALS
        if few and tiling.supports_xa_partials(tiles):
            options["xa_partials"] = xa_partials
        else:
            options["xa"] = sum_xa_partials(xa_partials, rows, b)
    y = kernel().matmul(rows, weight, config=tiles, num_sms=device.num_sms(), b=b, **options)
    if isinstance(y, tuple):
        return y
    return y.reshape(*x.shape[:-1], -1)


def _shrinks_to_partials(config, columns):
    """Whether `lora_shrink` computes x A^T, and the product adds up its partials."""
    if not tiling.supports_xa_partials(config):
        return False
    return columns > (tiling.MIN_PARTIALS - 1) * _lora_shrink().COLUMNS


def sum_xa_partials(xa_partials: jax.Array, x: jax.Array, b: jax.Array) -> jax.Array:
    """Returns x A^T [M, R''] in x's dtype, for arguments of `fp4_matmul_with_xa_partials`."""
    product = xa_partials.sum(axis=0)[:, : b.shape[1]].astype(x.dtype)
    return jnp.pad(product, ((0, 0), (0, b.shape[1] - product.shape[1])))


def supports_mma(
    weight: Fp4Weight | Fp4Tiles, x: jax.Array | jax.ShapeDtypeStruct
) -> TypeGuard[Fp4Tiles]:
    """Whether "mma" multiplies x by the weight; warns where only x's dtype prevents it."""
    return isinstance(weight, Fp4Tiles) and supports_mma_device() and _supports_dtype(x.dtype)


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
    """The product by the kernel of `mma`, or for many rows by XLA on a dequantized copy.

    Args:
        x: bfloat16 [M, K].
        weight: packed weight [N, K].
        config: schedule; None looks it up.
        a: A [R, K] of an adapter, or None.
        b: B [N, R''] of an adapter, or None.
        xa: x A^T [M, R] in place of `a`, or None.
        xa_partials: float32 [S, M, R'], whose sum over S is x A^T, in place of `a`, or None.
        bias: bias [N], or None.
        dtype: dtype of the result, bfloat16 or float32.

    Returns:
        [M, N].
    """
    (m, k), n = x.shape, weight.shape[0]
    if a is not None:
        xa = reference.dot(x, a)
    elif xa_partials is not None:
        xa = xa_partials.sum(axis=0).astype(x.dtype)
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
