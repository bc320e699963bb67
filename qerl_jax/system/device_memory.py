"""How much of a GPU's memory a command takes, decided before JAX starts.

JAX takes three quarters of the memory and leaves a quarter unused. A command here takes the part
that `pool_of` returns, or what is free if that is less, unless the user has set one of JAX's own
variables.
"""

import ctypes
import importlib.util
import os
import sys
from collections.abc import Mapping

_POOL = 0.92  # part of the memory; CUDA, its libraries and the programs take some of the rest
# On GPUs that share the weights NCCL takes some, too: decoding Qwen2.5-72B on four H100s at three
# batch sizes ran out of the 6.4 GB that 0.92 leaves.
_POOL_OF_GROUP = 0.85
FRACTION = "XLA_CLIENT_MEM_FRACTION"
# The variables by which a user decides: the part, in two spellings, or that there is no pool.
_FRACTIONS = (FRACTION, "XLA_PYTHON_CLIENT_MEM_FRACTION")
_OTHERS = ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR")
_MARGIN = 0.98  # part of the free memory that is taken where less than the pool is free
_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")


def pool_of(tensor: int) -> float:
    """The part of a GPU's memory that JAX takes, where `tensor` GPUs share the weights."""
    return _POOL if tensor == 1 else _POOL_OF_GROUP


def take_memory(tensor: int = 1) -> None:
    """Sets JAX's variables for this process and those that it starts; prints a line if need be.

    It must run before JAX starts its backend. Without an NVIDIA GPU that JAX would use it does
    nothing. As many GPUs as `tensor` share the weights.
    """
    if not _uses_gpus():
        return
    sizes = _gpu_memory()
    if not sizes:
        return
    free, total = min(sizes, key=lambda size: size[0] / size[1])
    variables, line = settings(free, total, os.environ, pool=pool_of(tensor))
    os.environ.update(variables)
    if line:
        print(line, file=sys.stderr, flush=True)


def number_of_gpus() -> int:
    """The number of NVIDIA GPUs of this machine, as far as JAX would use them.

    CUDA is not started, which would fix what this process sees.
    """
    if not _uses_gpus():
        return 0
    try:
        management = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    count = ctypes.c_uint()
    if management.nvmlInit_v2() or management.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return 0
    management.nvmlShutdown()
    return count.value


def _uses_gpus() -> bool:
    if os.environ.get("JAX_PLATFORMS", "cuda").split(",")[0] not in ("cuda", "gpu"):
        return False
    return any(map(importlib.util.find_spec, _PLUGINS))


def settings(
    free: int, total: int, environment: Mapping[str, str], *, pool: float
) -> tuple[dict[str, str], str | None]:
    """Decides how much memory JAX takes: the part `pool` of `total` bytes, or less if less is free.

    Returns:
        The variables to set, and a line for the user where less is free than wanted, else None.
        A variable that the user has set in the environment stays as it is.
    """
    user_names = [name for name in _FRACTIONS if environment.get(name)]
    if not user_names and any(environment.get(name) for name in _OTHERS):
        return {}, None
    try:
        part = float(environment[user_names[0]]) if user_names else pool
    except ValueError:
        return {}, None  # JAX refuses it
    name, target = user_names[0] if user_names else FRACTION, int(part * total)
    if free >= target:
        return {} if user_names else {FRACTION: str(pool)}, None
    line = (
        f"warning: {_gb(free)} of the GPU's {_gb(total)} GB are free, {_gb(target)} GB are wanted"
    )
    if user_names:
        return {}, f"{line} by {name}={environment[name]}: lower it, or end the other processes"
    part = max(0.01, int(100 * _MARGIN * free / total) / 100)
    return {FRACTION: f"{part:g}"}, (
        f"{line}: taking {_gb(int(part * total))} GB; end the other processes, or share the GPU by "
        f"setting {name} for each, such as {name}=0.45"
    )


def _gpu_memory() -> list[tuple[int, int]]:
    """Free and total bytes of each GPU that CUDA shows to this process; [] without one."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return []
    sizes = []
    for number in range(count.value):
        device, context = ctypes.c_int(), ctypes.c_void_p()
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        if cuda.cuDeviceGet(ctypes.byref(device), number):
            continue
        # JAX uses the same context later; it is made here because only a context tells what is
        # free, and released at the end for JAX to count it.
        if cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
            continue
        if not cuda.cuCtxPushCurrent_v2(context):
            if not cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)):
                sizes.append((free.value, total.value))
            cuda.cuCtxPopCurrent_v2(ctypes.byref(context))
        cuda.cuDevicePrimaryCtxRelease_v2(device)
    return sizes


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f}"
