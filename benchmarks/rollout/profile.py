"""Splits the device's time by part of the policy.

The parts are the `jax.named_scope`s of the policy and of the rollout. The metadata of a compiled
program holds them for each instruction, and kernels are named after or labeled with instructions.
"""

import contextlib
import pathlib
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.profiler import ProfileData, ProfileEvent, ProfileOptions

PARTS = ("linears", "lora", "attention", "recurrence", "norms", "mlp", "head", "sampling", "other")

_FP4 = "fp4_"  # prefix of the names of the Hopper kernel's programs
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = .*?\bop_name=\"([^\"]*)\"", re.MULTILINE)

Kernels = list[tuple[str, float]]  # name of instruction or kernel, milliseconds


def parts_of(hlo: str) -> dict[str, str]:
    """The part of each instruction of a compiled program's text, by its name.

    A fusion belongs to the part of its last operation. Products with LoRA's A that are fused into
    the kernels between the projections belong to those kernels. SwiGLU, or adding to the residual,
    belongs to the linears where it is an epilogue of their kernel. In a packed linear, everything
    beside that kernel belongs to the adapter.
    """
    paths = dict(_INSTRUCTION.findall(hlo))
    packed = any(_FP4 in path for path in paths.values())
    return {name: _part(path, packed) for name, path in paths.items()}


def _part(path: str, packed: bool) -> str:
    scopes = [scope for scope in path.split("/") if scope in PARTS]
    if not scopes:
        return "other"
    # The kernel counts its slices in memory that starts at zero.
    kernel = _FP4 in path or path.endswith("/broadcast_in_dim")
    if scopes[-1] == "linears" and packed and not kernel:
        return "lora"
    return scopes[-1]


def split(kernels: Iterable[tuple[str, float]], parts: Mapping[str, str]) -> dict[str, float]:
    """Milliseconds by part; kernels without an instruction of the program are "other".

    Args:
        kernels: instruction or kernel, and milliseconds. Kernels have the names of instructions
            with underscores in place of dots and dashes.
        parts: part of each instruction, as `parts_of` returns it.
    """
    part_of_kernel = {_as_kernel(name): part for name, part in parts.items()}
    times = dict.fromkeys(PARTS, 0.0)
    for name, milliseconds in kernels:
        default = "linears" if _FP4 in name else "other"
        times[part_of_kernel.get(_as_kernel(name), default)] += milliseconds
    # Most models have no recurrent layer.
    return {part: time for part, time in times.items() if time or part != "recurrence"}


def _as_kernel(name: str) -> str:
    return re.sub(r"\W", "_", name)


def device_kernels(run: Callable[[], Any]) -> Kernels:
    """The kernels that the second call of `run` starts on a GPU.

    XLA's profiler reports the instruction that started each kernel, also for kernels of libraries,
    unless the kernel is in a CUDA graph. If it reports no kernels, CUPTI gives their own names.
    """
    kernels: Kernels = []
    for profile in _profiles(run, host_tracer_level=0):
        kernels += kernels_in(profile)
    return kernels or _cupti_kernels(run)


def graph_launches(run: Callable[[], Any]) -> int:
    """The number of CUDA graphs that the second call of `run` launches."""
    return sum(graph_launches_in(profile) for profile in _profiles(run, host_tracer_level=2))


def graph_launches_in(profile: ProfileData) -> int:
    """The launches of CUDA graphs in a profile."""
    return sum(
        event.name.startswith("cuGraphLaunch")
        for plane in profile.planes
        if plane.name.startswith("/host:")
        for line in plane.lines
        for event in line.events
    )


def _profiles(run: Callable[[], Any], *, host_tracer_level: int) -> list[ProfileData]:
    """The profiles of the second call of `run`, by XLA's profiler."""
    jax.block_until_ready(run())
    with tempfile.TemporaryDirectory() as folder:
        options = ProfileOptions()
        options.host_tracer_level, options.python_tracer_level = host_tracer_level, 0
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(run())
        files = pathlib.Path(folder).rglob("*.xplane.pb")
        return [ProfileData.from_file(str(file)) for file in files]


def kernels_in(profile: ProfileData) -> Kernels:
    """The kernels of a profile in order of time, named by instruction where it is known."""
    events: list[tuple[float, str, float]] = []
    for plane in profile.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue  # Other lines repeat these events in sums.
            for event in line.events:
                stats = _stats(event)
                if "memcpy_details" in stats or "memset_details" in stats:
                    continue
                name = str(stats.get("hlo_op", event.name))
                events.append((event.start_ns, name, 1e-6 * event.duration_ns))
    return [(name, milliseconds) for _, name, milliseconds in sorted(events)]


def _stats(event: ProfileEvent) -> dict[str | None, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about the iterator's type
        return dict(event.stats)


def _cupti_kernels(run: Callable[[], Any]) -> Kernels:
    from jax.experimental.mosaic.gpu import profiler

    class Program(jax.stages.Wrapped):  # a type that `measure` does not compile again
        def __call__(self):
            return run()

    with contextlib.suppress(RuntimeError):
        return profiler.measure(Program(), aggregate=False)()[1] or []
    return []


def per_step(
    kernels: Sequence[tuple[str, float]],
    parts: Mapping[str, str],
    *,
    wall_ms: float,
    steps: int,
    layers: int,
) -> dict[str, float]:
    """Milliseconds of a decode step by part.

    Args:
        kernels: kernels of a chunk, as `device_kernels` returns them.
        parts: part of each instruction, as `parts_of` returns it.
        wall_ms: milliseconds of a chunk without a profiler.
        steps: decode steps of the chunk.
        layers: layers of the policy.

    Returns:
        The parts; "gaps", the wall time without a kernel, negative where kernels overlap; and
        "kernels_per_layer", the kernels of a step divided by the layers.
    """
    times = {part: time / steps for part, time in split(kernels, parts).items()}
    times["gaps"] = wall_ms / steps - sum(times.values())
    return {part: round(time, 4) for part, time in times.items()} | {
        "kernels_per_layer": round(len(kernels) / steps / layers, 1)
    }
