r"""Measures how long it takes to read a checkpoint onto the device, and the memory of the host.

    python -m benchmarks.loading --model=qwen2.5-7b --folder=7b
    python -m benchmarks.loading --model=qwen2.5-32b --stored=nvfp4 --folder=32b

A folder that does not exist is first written: shards of 5 GB with random weights in the shapes of
the model, projections in NVFP4 with --stored=nvfp4. A folder that exists is read as it is; delete
it to measure another model. Every measurement is a process of its own, after the device has
started: 'cold' drops the files from the page cache before, 'warm' reads a file that was just read.

Every measurement prints a line and at once writes its row to --out. A run replaces the rows of the
same model, formats, cache and device:

    seconds           from the open folder to all parameters on the device
    read_s, transfer_s, quantize_s
                      seconds in which at least one thread read files, sent chunks to the device, or
                      waited for the device to quantize or arrange them; they overlap
    rest_s            seconds in which no thread did any of these
    compile_s         seconds in which at least one thread compiled; part of quantize_s
    gb, shard_gb      bytes of all tensors, and of the largest file
    host_peak_gb, host_before_gb
                      largest memory of the process, and its memory before the load
    device_gb         bytes of the parameters on the device
"""

import argparse
import os
import pathlib
import resource
import time
from typing import Any

from benchmarks import common
from qerl_jax.commands import cli
from qerl_jax.system.paths import user_path

KEYS = ("model", "stored", "format", "cache", "device")
_FORMAT = "nvfp4"  # on the device
_STAGES = {"read_s": ("read",), "transfer_s": ("transfer",), "quantize_s": ("quantize", "arrange")}


def make_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    parser = common.make_parser("benchmarks.loading", __doc__, "benchmarks/results/loading.json")
    add = parser.add_argument
    add("--model", default="qwen2.5-7b", help="name of the shapes (default: qwen2.5-7b)")
    stored = "how the weights are stored (default: bf16)"
    add("--stored", choices=("bf16", "nvfp4"), default="bf16", help=stored)
    folder = "model folder, which is written where it does not exist"
    add("--folder", type=user_path, required=True, help=folder)
    return parser


def drop_from_cache(folder: pathlib.Path) -> None:
    """Writes the files of a folder to the disk and drops them from the page cache.

    The system may keep pages; it gives no error then.
    """
    for path in sorted(folder.iterdir()):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def measure(folder: str) -> dict[str, Any]:
    """What it took to load a model folder in NVFP4; for a process that does nothing else."""
    import jax

    from qerl_jax.compile.count import count_compilations
    from qerl_jax.system.live_line import progress_line
    from qerl_jax.weights.checkpoint import open_checkpoint
    from qerl_jax.weights.load import DTYPES, read_params
    from qerl_jax.weights.stream import Meter

    show, meters = progress_line(), []

    def on_progress(meter: Meter) -> None:
        meters[:] = [meter]
        show(meter)

    device = jax.block_until_ready(jax.device_put(0.0)).device
    bytes_before = _resident()
    began = time.perf_counter()
    with count_compilations() as compiled:
        checkpoint = open_checkpoint(folder)
        params = read_params(
            checkpoint, format=_FORMAT, dtype=DTYPES["bfloat16"], on_progress=on_progress
        )
    seconds = time.perf_counter() - began
    (meter,) = meters
    row = {name: meter.busy_seconds(*stages) for name, stages in _STAGES.items()}
    busy = meter.busy_seconds(*(stage for stages in _STAGES.values() for stage in stages))
    return {
        "seconds": seconds,
        **row,
        "rest_s": seconds - busy,
        "compile_s": compiled.take()["compile_seconds"],
        "gb": meter.total_bytes / 1e9,
        "shard_gb": max(path.stat().st_size for path in pathlib.Path(folder).iterdir()) / 1e9,
        "host_before_gb": bytes_before / 1e9,
        "host_peak_gb": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e9,
        "device_gb": sum(leaf.nbytes for leaf in jax.tree.leaves(params)) / 1e9,
        "device": device.device_kind,
        **common.origin("benchmarks.loading"),
    }


def _resident() -> int:
    """Returns the bytes of this process that are in memory."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def run(arguments: argparse.Namespace) -> None:
    """Runs the benchmark with the parsed arguments."""
    from benchmarks.random_checkpoint import write_random
    from benchmarks.rollout.subject import check_names
    from qerl_jax.policy.architectures import ARCHITECTURES

    check_names([arguments.model], [_FORMAT])
    common.check_out(arguments.out, KEYS)
    folder = arguments.folder
    if not folder.exists():
        began = time.perf_counter()
        packed = arguments.stored == "nvfp4"
        size = write_random(folder, ARCHITECTURES[arguments.model], packed=packed)
        seconds = time.perf_counter() - began
        print(f"wrote {size / 1e9:.1f} GB to {folder} in {seconds:.0f} s", flush=True)
    for cache in ("cold", "warm"):
        if cache == "cold":
            drop_from_cache(folder)
        row = {
            "model": arguments.model,
            "stored": arguments.stored,
            "format": _FORMAT,
            "cache": cache,
            "cores": len(os.sched_getaffinity(0)),
            **common.in_process(measure, str(folder)),
        }
        common.merge(arguments.out, row, KEYS)


if __name__ == "__main__":
    cli.run_command(make_parser(), run)
