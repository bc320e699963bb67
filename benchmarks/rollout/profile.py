"""Which part of the policy the device's time goes to.

The parts are the `jax.named_scope`s of the policy and of the rollout. They are in the metadata of
the compiled program, whose instructions the kernels are named after or labelled with.
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

PARTS = ("linears", "lora", "attention", "norms", "mlp", "head", "sampling", "other")

_FP4 = "fp4_"  # begins the names of the Hopper kernel's programs
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = .*?\bop_name=\"([^\"]*)\"", re.MULTILINE)

Kernels = list[tuple[str, float]]  # instruction or kernel, and milliseconds


def parts_of(hlo: str) -> dict[str, str]:
    """The part of each instruction of a compiled program's text, by its name.

    A fusion belongs to what its last operation belongs to; where the products with A are part of
    the kernels between the projections, they belong to those, and SwiGLU, or the sum that a norm
    begins with, belongs to the linears where their kernel ends with it. Beside that kernel nothing
    but the adapter runs in a packed linear.
    """
    paths = dict(_INSTRUCTION.findall(hlo))
    packed = any(_FP4 in path for path in paths.values())
    return {name: _part(path, packed) for name, path in paths.items()}


def _part(path: str, packed: bool) -> str:
    found = [scope for scope in path.split("/") if scope in PARTS]
    if not found:
        return "other"
    # The kernel's slices count in memory that begins at zero.
    kernel = _FP4 in path or path.endswith("/broadcast_in_dim")
    if found[-1] == "linears" and packed and not kernel:
        return "lora"
    return found[-1]


def split(kernels: Iterable[tuple[str, float]], parts: Mapping[str, str]) -> dict[str, float]:
    """Milliseconds by part; what no instruction of the program explains is "other".

    Args:
        kernels: instruction or kernel, and milliseconds. Kernels have the names of instructions
            with underscores in place of dots and dashes.
        parts: of the instructions, see `parts_of`.
    """
    known = {_as_kernel(name): part for name, part in parts.items()}
    times = dict.fromkeys(PARTS, 0.0)
    for name, milliseconds in kernels:
        default = "linears" if _FP4 in name else "other"
        times[known.get(_as_kernel(name), default)] += milliseconds
    return times


def _as_kernel(name: str) -> str:
    return re.sub(r"\W", "_", name)


def device_kernels(run: Callable[[], Any]) -> Kernels:
    """The kernels that `run` starts on a GPU, the second time.

    XLA's profiler says which instruction started a kernel, those of libraries too, unless the
    kernel is in a CUDA graph. Where it finds none, CUPTI gives the kernels' own names.
    """
    kernels: Kernels = []
    for profile in _profiles(run, host_tracer_level=0):
        kernels += kernels_in(profile)
    return kernels or _cupti_kernels(run)


def graph_launches(run: Callable[[], Any]) -> int:
    """How many CUDA graphs `run` launches, the second time."""
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
    """What XLA's profiler sees of `run`, the second time."""
    jax.block_until_ready(run())
    with tempfile.TemporaryDirectory() as folder:
        options = ProfileOptions()
        options.host_tracer_level, options.python_tracer_level = host_tracer_level, 0
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(run())
        files = pathlib.Path(folder).rglob("*.xplane.pb")
        return [ProfileData.from_file(str(file)) for file in files]


def kernels_in(profile: ProfileData) -> Kernels:
    """The kernels of a profile's GPUs, by instruction where it is known, in order."""
    found: list[tuple[float, str, float]] = []
    for plane in profile.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue  # The same again, summed up in other ways.
            for event in line.events:
                stats = _stats(event)
                if "memcpy_details" in stats or "memset_details" in stats:
                    continue
                name = str(stats.get("hlo_op", event.name))
                found.append((event.start_ns, name, 1e-6 * event.duration_ns))
    return [(name, milliseconds) for _, name, milliseconds in sorted(found)]


def _stats(event: ProfileEvent) -> dict[str | None, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the iterator's type, by Python
        return dict(event.stats)


def _cupti_kernels(run: Callable[[], Any]) -> Kernels:
    from jax.experimental.mosaic.gpu import profiler

    class Program(jax.stages.Wrapped):  # what `measure` does not compile once more
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
    """A decode step: milliseconds by part, of the gaps, and the kernels of a layer.

    Args:
        kernels: of a chunk, see `device_kernels`.
        parts: see `parts_of`.
        wall_ms: of a chunk that nobody observed.
        steps: of the chunk.
        layers: of the policy.

    Returns:
        The parts; "gaps", what the kernels leave of the wall time, below zero where they overlap;
        "kernels_per_layer", all kernels of a step over the layers.
    """
    times = {part: time / steps for part, time in split(kernels, parts).items()}
    times["gaps"] = wall_ms / steps - sum(times.values())
    return {part: round(time, 4) for part, time in times.items()} | {
        "kernels_per_layer": round(len(kernels) / steps / layers, 1)
    }
