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

import concurrent.futures
import datetime
import functools
import importlib
import json
import multiprocessing
import os
import pathlib
import shlex
import sys
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import jaxlib

from pallas_kernels import fp4_matmul as fp4
from pallas_kernels import matvec, timing
from pallas_kernels.fp4_matmul import api, cases, tiling
from pallas_kernels.gpu_lock import sole_use
from pallas_kernels.provenance import git_state

FLOPS = 790e12  # bfloat16 products of an H100 SXM or H200 on random data
BITS = {"bf16": 16, "dx_bf16": 16, "nf4": 4.125}  # bits of a weight; NVFP4 has 4.5


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a copy of 2 GB."""
    array = jnp.arange(2**29, dtype=jnp.float32)
    add = jax.jit(lambda x: x + 1)
    seconds = min(sum(time for _, time in timing.device_times(add, array)) for _ in range(3))
    return 2 * array.nbytes / seconds


def bytes_of(impl: str, m: int, n: int, k: int) -> float:
    """The bytes of a product: weight, tokens and result."""
    return n * k * BITS.get(impl, 4.5) / 8 + 2 * m * (n + k)


def floor_seconds(impl: str, m: int, n: int, k: int, *, bandwidth: float) -> float:
    """The shortest time of a product, by bytes or by operations."""
    return max(bytes_of(impl, m, n, k) / bandwidth, 2 * m * n * k / FLOPS)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _dense(key, n, k):
    return 0.02 * jax.random.normal(key, (n, k), jnp.bfloat16)


def time_product(impl: str, layer: str, m: int, n: int, k: int) -> tuple[float, dict]:
    """The seconds of one call of an implementation, and of its kernels by name."""
    if impl == "nf4":
        # In a process of its own: torch's profiler and that of jax cannot share one.
        spawn = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(1, spawn) as process:
            process.submit(_load_bitsandbytes).result()  # It takes long, while others measure.
            with sole_use():
                return process.submit(_time_nf4, m, n, k).result()
    make = {"bf16": _dense, "dx_bf16": _dense, "xla": cases.random_weight}
    kernel, mma, xla = (
        functools.partial(fp4.fp4_matmul, implementation=name) for name in ("mosaic", "mma", "xla")
    )
    operations = {
        "nvfp4": kernel,
        "nvfp4_lora32": lambda x, w, lora: kernel(x, w, lora=lora),
        "mma": mma,
        "mma_lora32": lambda x, w, lora: mma(x, w, lora=lora),
        "xla": xla,
        "bf16": matvec.matmul,
        "dx": lambda dy, w: api.kernel_transposed(dy, w, inputs=k),
        "dx_bf16": lambda dy, w: jnp.dot(dy, w),
    }
    with sole_use():
        args = cases.random_operands(
            *(m, n, k),
            make=make.get(impl, cases.random_tiles),
            bits=BITS.get(impl, 4.5),
            transposed=impl.startswith("dx"),
        )
        count = len(args[0])
        if impl.endswith("_lora32"):
            args.append(cases.random_adapters(count, cases.rank_of(layer, 32), n, k))
        jax.block_until_ready(args)
    lowered = timing.repeated(operations[impl]).lower(*args)
    program = lowered.compile() if impl.startswith(("nvfp4", "mma")) else None
    with sole_use():  # XLA compiles its products by measuring, too.
        return timing.median_times(program or lowered.compile(), *args, calls=count)


def _load_bitsandbytes() -> None:
    importlib.import_module("bitsandbytes")


def _time_nf4(m: int, n: int, k: int) -> tuple[float, dict]:
    """Times the product of bitsandbytes with doubly quantized scales, as QLoRA uses it."""
    import bitsandbytes  # pyrefly: ignore[missing-import]
    import torch  # pyrefly: ignore[missing-import]

    count = cases.rotated(n * k * BITS["nf4"] / 8)
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
    return timing.medians(runs)


def provenance() -> dict:
    """The commit, date, versions and command that every row names."""
    state = git_state()
    return {
        "commit": "unknown" if state is None else state["commit"],
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {"jax": jax.__version__, "jaxlib": jaxlib.__version__},
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
    result["rows"] = timing.merged([*result["rows"], *rows], "layer", "m", "impl")
    timing.write_json(path, result)


def main() -> None:
    """Parses the command line, prints a line for each product and writes the rows."""
    parser = cases.parser(__doc__, m="1,16,32,64,128,256,512,2048")
    parser.add_argument(
        "--impls", default="nvfp4,nvfp4_lora32,bf16,xla", help="implementations of the list above"
    )
    parser.add_argument("--out", type=timing.user_path, required=True, help="JSON file of the rows")
    args = parser.parse_args()
    device = jax.devices()[0].device_kind
    with sole_use():
        merge(args.out, device, [])  # A file that does not take rows must not cost measurements.
        bandwidth = copy_bandwidth()
    print(f"{device}, copy {bandwidth / 1e12:.2f} TB/s", flush=True)
    origin = provenance()
    measured: dict[tuple, tuple[float, dict]] = {}  # Two models can have the same layer.
    for layer, m, n, k in cases.products(args):
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
            floor = floor_seconds(impl, m, n, k, bandwidth=bandwidth)
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
            print(
                f"{layer:12} {m:5} {impl:12} {1e6 * seconds:9.2f} us  floor {1e6 * floor:8.2f} "
                f"= {100 * floor / seconds:5.1f} %  "
                f"{bytes_of(impl, m, n, k) / seconds / 1e9:6.0f} GB/s  "
                f"{2e-12 * m * n * k / seconds:6.1f} TFLOP/s  {len(kernels)} kernels",
                flush=True,
            )
        with sole_use():
            merge(args.out, device, rows)


if __name__ == "__main__":
    # bitsandbytes needs memory, too.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    main()
