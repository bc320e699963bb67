r"""Times products on a GPU and writes a row for each to a JSON file.

    python -m pallas_kernels.fp4_matmul.benchmark --layers=7b.gate_up,7b.down --m=1,16,64 \
        --impls=nvfp4,nvfp4_lora32,bf16,xla --out=benchmarks/results/kernel.json

device_us is the time on the device, by CUPTI, of all kernels of one call: the median of three
measurements over different weights that fill 512 MB, because a single weight would stay in the L2.
floor_us is the time that the bytes (weight, tokens, result) and operations need at the copy
bandwidth, which is measured first, and at 790 TFLOP/s. Implementations:

    nvfp4          the kernel
    nvfp4_lora32   the kernel with an adapter of rank 32 for each fused projection, x A^T included
    mma            the kernel for up to 64 tokens on every GPU since Ampere
    mma_lora32     the same with an adapter, as nvfp4_lora32
    bf16           cuBLAS on a dense weight, for one token `pallas_kernels.matvec.matvec`
    xla            XLA's dequantize-and-dot of the packed weight
    nf4            bitsandbytes, if it is installed
    dx, dx_bf16    the gradient with respect to x of nvfp4 and of bf16

What measures the kernel `mma`, on any GPU from Ampere on (a Hopper card runs the same code as the
others): its tests; the schedules; products beside cuBLAS and, on Hopper, beside the other kernel;
decode steps; and a run that is resumed bit for bit:

    pytest -n 0 -m gpu tests/test_fp4_mma_gpu.py
    pytest -n 0 -m gpu tests/test_decode_layer.py -k every_gpu
    python -m pallas_kernels.fp4_matmul.mma_autotune --layers=7b --m=8,16,32,64 --out=schedules.json
    python -m pallas_kernels.fp4_matmul.benchmark --layers=7b --m=1,8,16,32,64,128 \
        --impls=mma,mma_lora32,nvfp4,bf16,xla --out=kernel_mma.json
    python -m benchmarks.rollout --model=qwen2.5-7b --format=nvfp4 --batch=1,8,32 \
        --implementation=mma
    python -m benchmarks.rollout --model=qwen2.5-7b --format=nvfp4 --batch=1,8,32 \
        --implementation=xla --dequantize=step
    QERL_FP4_KERNEL=mma pytest -n 0 -m gpu tests/test_resume_gpu.py

A run replaces the rows of the same layer, M and implementation, and keeps the others. Most of its
time is compilation: several commands may run at a time, for they take turns to measure. Rows name
the commit of git; the environment variable QERL_COMMIT names it where git is absent.
"""

import argparse
import collections
import concurrent.futures
import concurrent.futures.process
import datetime
import functools
import importlib
import json
import math
import multiprocessing
import os
import pathlib
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib

from pallas_kernels import fp4_matmul as fp4
from pallas_kernels import matvec
from pallas_kernels.fp4_matmul import api, cases, tiling
from pallas_kernels.gpu_lock import sole_use
from pallas_kernels.provenance import git_state

FLOPS = 790e12  # bfloat16 products of an H100 SXM or H200 on random data
ROTATED_BYTES = 512e6
BITS = {"bf16": 16, "dx_bf16": 16, "nf4": 4.125}  # bits of a weight; NVFP4 has 4.5

Times = list[tuple[str, float]]  # names and seconds of kernels, in order


def device_times(function: Callable, *args: Any) -> Times:
    """The kernels of one run of a jitted or compiled function, after a run to warm up."""
    from jax.experimental.mosaic.gpu import profiler

    _, kernels = profiler.measure(function, aggregate=False)(*args)
    return [(name, 1e-3 * milliseconds) for name, milliseconds in kernels or []]


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a copy of 2 GB."""
    array = jnp.arange(2**29, dtype=jnp.float32)
    add = jax.jit(lambda x: x + 1)
    seconds = min(sum(time for _, time in device_times(add, array)) for _ in range(3))
    return 2 * array.nbytes / seconds


def floor_seconds(m: int, n: int, k: int, *, bits: float, bandwidth: float) -> float:
    """The shortest time of a product, by bytes or by operations."""
    moved = n * k * bits / 8 + 2 * m * (n + k)
    return max(moved / bandwidth, 2 * m * n * k / FLOPS)


def rotated(count_bytes: float) -> int:
    """Number of weights of this size to rotate through."""
    return max(2, math.ceil(ROTATED_BYTES / count_bytes))


@functools.partial(jax.jit, static_argnums=(1, 2))
def random_weight(key: jax.Array, n: int, k: int) -> fp4.Fp4Weight:
    """Random codes under scales of the size that a quantizer finds."""
    codes, scales = jax.random.split(key)
    scales = jax.random.randint(scales, (n, k // 16), 80, 127).astype(jnp.uint8)
    return fp4.Fp4Weight(
        packed=jax.random.bits(codes, (n, k // 2), jnp.uint8),
        scales=jax.lax.bitcast_convert_type(scales, jnp.float8_e4m3fn),
        global_scale=jnp.full(n, 1e4, jnp.float32),
    )


def random_weights(make: Callable, n: int, k: int, *, bits: float) -> list:
    """The weights `make(key, n, k)` to rotate through, see `rotated`."""
    keys = jax.random.split(jax.random.key(0), rotated(n * k * bits / 8))
    return [make(key, n, k) for key in keys]


def _tiles(key, n, k):
    return fp4.to_tiles(random_weight(key, n, k))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _dense(key, n, k):
    return 0.02 * jax.random.normal(key, (n, k), jnp.bfloat16)


def repeated(operation: Callable) -> jax.stages.Wrapped:
    """A program that calls an operation once for every weight, with different tokens each.

    XLA would make one product of calls with the same tokens.
    """
    once = jax.jit(operation)  # so that it is lowered once

    def program(*args):
        return [once(*one) for one in zip(*args, strict=True)]

    return jax.jit(program)


def random_tokens(count: int, m: int, k: int) -> list[jax.Array]:
    """Tokens [M, K] for each weight."""
    keys = jax.random.split(jax.random.key(1), count)
    return [jax.random.normal(key, (m, k), jnp.bfloat16) for key in keys]


def random_adapters(count: int, rank: int, n: int, k: int) -> list[tuple[jax.Array, jax.Array]]:
    """A [R, K] and B [N, R'], with all columns that the kernel reads, for each weight.

    XLA would compute one x A^T for calls with the same A.
    """
    keys = jax.random.split(jax.random.key(2), (count, 2))
    return [
        (
            0.02 * jax.random.normal(a, (rank, k), jnp.bfloat16),
            0.02 * jax.random.normal(b, (n, tiling.padded_rank(rank)), jnp.bfloat16),
        )
        for a, b in keys
    ]


def random_xa_partials(m: int, k: int, rank: int) -> jax.Array:
    """Partials [S, M, R'] of x A^T as in a decode step."""
    columns = -(-rank // tiling.PARTIAL_COLUMNS) * tiling.PARTIAL_COLUMNS
    return jax.random.normal(jax.random.key(3), (-(-k // 128), m, columns))


def measure(program: Callable, tokens: list, weights: list, *args: Any) -> tuple[float, dict]:
    """The seconds of one call, and of its kernels by name: medians of three measurements."""
    runs = []
    for _ in range(3):
        totals: dict[str, float] = collections.defaultdict(float)
        for name, seconds in device_times(program, tokens, weights, *args):
            totals[name] += seconds / len(weights)
        runs.append(totals)
    kernels = {name: statistics.median(run.get(name, 0.0) for run in runs) for name in runs[0]}
    return statistics.median(sum(run.values()) for run in runs), kernels


def time_product(impl: str, layer: str, m: int, n: int, k: int) -> tuple[float, dict]:
    """The seconds of one call of an implementation, and of its kernels by name."""
    if impl == "nf4":
        process = _process_of_nf4()
        try:
            process.submit(_load_bitsandbytes).result()  # It takes long, while others measure.
            with sole_use():
                return process.submit(_time_nf4, m, n, k).result()
        except concurrent.futures.process.BrokenProcessPool:
            _process_of_nf4.cache_clear()
            raise
    make = {"bf16": _dense, "dx_bf16": _dense, "xla": random_weight}.get(impl, _tiles)
    kernel = functools.partial(fp4.fp4_matmul, implementation="mosaic")
    mma = functools.partial(fp4.fp4_matmul, implementation="mma")
    operations = {
        "nvfp4": kernel,
        "nvfp4_lora32": lambda x, w, lora: kernel(x, w, lora=lora),
        "mma": mma,
        "mma_lora32": lambda x, w, lora: mma(x, w, lora=lora),
        "xla": functools.partial(fp4.fp4_matmul, implementation="xla"),
        "bf16": matvec.matmul,
        "dx": lambda dy, w: api.kernel_transposed(dy, w, inputs=k),
        "dx_bf16": lambda dy, w: jnp.dot(dy, w),
    }
    with sole_use():
        weights = random_weights(make, n, k, bits=BITS.get(impl, 4.5))
        args = [random_tokens(len(weights), m, n if impl.startswith("dx") else k), weights]
        if impl.endswith("_lora32"):
            args.append(random_adapters(len(weights), cases.rank_of(layer, 32), n, k))
        jax.block_until_ready(args)
    lowered = repeated(operations[impl]).lower(*args)
    program = lowered.compile() if impl.startswith(("nvfp4", "mma")) else None
    with sole_use():  # XLA compiles its products by measuring, too.
        return measure(program or lowered.compile(), *args)


@functools.cache
def _process_of_nf4() -> concurrent.futures.Executor:
    """A process for bitsandbytes: torch's profiler and that of jax cannot share a process."""
    return concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def _load_bitsandbytes() -> None:
    importlib.import_module("bitsandbytes")


def _time_nf4(m: int, n: int, k: int) -> tuple[float, dict]:
    """Times the product of bitsandbytes with doubly quantized scales, as QLoRA uses it."""
    import bitsandbytes  # pyrefly: ignore[missing-import]
    import torch  # pyrefly: ignore[missing-import]

    count = rotated(n * k * BITS["nf4"] / 8)
    weights = []
    for _ in range(count):
        dense = 0.02 * torch.randn(n, k, dtype=torch.bfloat16, device="cuda")
        weights.append(
            bitsandbytes.functional.quantize_4bit(dense, quant_type="nf4", compress_statistics=True)
        )
    x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")

    def run():
        for codes, state in weights:
            bitsandbytes.matmul_4bit(x, codes.t(), quant_state=state)
        torch.cuda.synchronize()

    run()
    runs = []
    for _ in range(3):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run()
        runs.append(
            {e.key: 1e-6 * e.self_device_time_total / count for e in profile.key_averages()}
        )
    kernels = {name: statistics.median(r.get(name, 0.0) for r in runs) for name in runs[0]}
    weights.clear()
    torch.cuda.empty_cache()
    return statistics.median(sum(r.values()) for r in runs), kernels


def provenance() -> dict:
    """The commit, date, versions and command that every row names."""
    state = git_state()
    return {
        "commit": "unknown" if state is None else state["commit"],
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "python": platform.python_version(),
        },
        "command": f"python -m {__spec__.name} {shlex.join(map(_without_folder, sys.argv[1:]))}",
    }


def _without_folder(argument: str) -> str:
    """An argument for publication: the file of --out without its folder."""
    flag, equals, path = argument.partition("=")
    return flag + equals + path.rpartition("/")[2] if equals else flag.rpartition("/")[2]


def merge(path: pathlib.Path, device: str, rows: Iterable[dict]) -> None:
    """Writes rows to a JSON file; they replace rows of the same layer, M and implementation."""
    result: dict = {"device": device, "rows": []}
    if path.exists():
        result = json.loads(path.read_text(encoding="utf-8"))
        if result["device"] != device:
            raise ValueError(f"{path} has rows of {result['device']}, this is {device}")
    merged = {(row["layer"], row["m"], row["impl"]): row for row in result["rows"]}
    merged |= {(row["layer"], row["m"], row["impl"]): row for row in rows}
    result["rows"] = [merged[key] for key in sorted(merged)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def shapes(names: str) -> dict[str, tuple[int, int]]:
    """The named layers [N, K] of a comma-separated list; a model's name stands for all of it."""
    found = {}
    for name in names.split(","):
        model, _, layer = (name, "", "") if name in cases.MODELS else name.rpartition(".")
        layers = cases.MODELS.get(model, {})
        chosen = [layer] if layer else list(layers)
        if not layers or any(part not in layers for part in chosen):
            known = ", ".join(cases.MODELS)
            raise ValueError(f"no layer {name!r}; models: {known}; layers: qkv, o, gate_up, down")
        found |= {f"{model}.{part}": layers[part] for part in chosen}
    return found


def user_path(text: str) -> pathlib.Path:
    """The path with `~` at its start expanded, which a shell leaves as it is in `--out=~/FILE`."""
    try:
        return pathlib.Path(text).expanduser()
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from error


def make_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", default="7b", help="models and layers, as 7b.gate_up,14b")
    parser.add_argument("--m", default="1,16,32,64,128,256,512,2048", help="numbers of tokens")
    parser.add_argument(
        "--impls", default="nvfp4,nvfp4_lora32,bf16,xla", help="implementations of the list above"
    )
    parser.add_argument("--out", type=user_path, required=True, help="JSON file of the rows")
    parser.add_argument(
        "--bandwidth",
        type=float,
        help="bytes per second to compute floors with, instead of measuring them",
    )
    return parser


def main() -> None:
    """Parses the command line, prints a line for each product and writes the rows."""
    args = make_parser().parse_args()
    device = jax.devices()[0].device_kind
    with sole_use():
        merge(args.out, device, [])  # A file that does not take rows must not cost measurements.
        bandwidth = args.bandwidth or copy_bandwidth()
    print(f"{device}, copy {bandwidth / 1e12:.2f} TB/s", flush=True)
    origin = provenance()
    measured: dict[tuple, tuple[float, dict]] = {}  # Two models can have the same layer.
    for layer, (n, k) in shapes(args.layers).items():
        for m in map(int, args.m.split(",")):
            rows = []
            for impl in args.impls.split(","):
                case = impl, m, n, k, cases.rank_of(layer, 32)
                try:
                    if case not in measured:
                        measured[case] = time_product(impl, layer, m, n, k)
                except Exception as error:  # A failure must not cost the other measurements.
                    print(f"{layer:12} {m:5} {impl:12} {type(error).__name__}: {error}"[:200])
                    continue
                seconds, kernels = measured[case]
                floor = floor_seconds(m, n, k, bits=BITS.get(impl, 4.5), bandwidth=bandwidth)
                row = {
                    "layer": layer,
                    "m": m,
                    "impl": impl,
                    "device_us": round(1e6 * seconds, 3),
                    "floor_us": round(1e6 * floor, 3),
                    "kernels_us": {name: round(1e6 * time, 3) for name, time in kernels.items()},
                    "bandwidth": round(bandwidth),
                }
                if impl == "nvfp4":
                    config = tiling.choose(m, n, k, num_sms=jax.devices()[0].core_count)
                    row["config"] = config.to_json()
                rows.append(row | origin)
                moved = n * k * BITS.get(impl, 4.5) / 8 + 2 * m * (n + k)
                print(
                    f"{layer:12} {m:5} {impl:12} {1e6 * seconds:9.2f} us  floor {1e6 * floor:8.2f} "
                    f"= {100 * floor / seconds:5.1f} %  {moved / seconds / 1e9:6.0f} GB/s  "
                    f"{2e-12 * m * n * k / seconds:6.1f} TFLOP/s  {len(kernels)} kernels",
                    flush=True,
                )
            with sole_use():
                merge(args.out, device, rows)


if __name__ == "__main__":
    # bitsandbytes needs memory, too.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    main()
