"""Measures tilings on a Hopper GPU and writes the best of each shape to a table.

    python -m pallas_kernels.fp4_matmul.autotune --layers=7b,14b --m=8,16,32,64,128,256

The candidates fit into shared memory and registers by the arithmetic of `tiling`; its cost model
ranks them, and a few of each kind are kept. Threads compile them while the first ones are measured.
A candidate that does not fit into shared memory or spills registers is not measured, and a
candidate whose result is wrong does not count. Several commands may run at a time, for they take
turns to measure. An entry of the table is for all M from the next smaller entry up to its own, and
for adapters of rank 32; up to 128 rows it is the best for the product of a decode step, see
`decode_product`.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import re
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import fp4_matmul as fp4
from pallas_kernels.device import exit_unless_hopper
from pallas_kernels.fp4_matmul import benchmark, cases, tiling
from pallas_kernels.fp4_matmul.tiling import TileConfig
from pallas_kernels.gpu_lock import sole_use

_EPS = 1e-6  # epsilon of the norm before SwiGLU
_REPORT = "MOSAIC_GPU_DUMP_PTXAS"
_report = threading.Lock()


@contextlib.contextmanager
def compiler_reports() -> Generator[None]:
    """Makes the compiler report on every kernel, and hides its reports from the standard output.

    The reports go to the standard output of the process, which is discarded meanwhile, except what
    Python prints. Enter this before threads compile: they read the environment.
    """
    sys.stdout.flush()
    kept, asked = os.dup(1), os.environ.get(_REPORT)
    os.environ[_REPORT] = "1"
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        with open(kept, "w", closefd=False) as stdout, contextlib.redirect_stdout(stdout):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        if asked is None:
            del os.environ[_REPORT]
        else:
            os.environ[_REPORT] = asked


def spilled_bytes(lowered: jax.stages.Lowered) -> int:
    """The number of bytes of registers that a thread of a program's Mosaic kernels spills.

    To be called within `compiler_reports`. It compiles one program at a time.

    Raises:
        RuntimeError: the compiler reported nothing.
    """
    with _report, tempfile.TemporaryFile() as report:
        kept = os.dup(1)
        os.dup2(report.fileno(), 1)
        try:
            lowered.compile()
        finally:
            os.dup2(kept, 1)
            os.close(kept)
        report.seek(0)
        spills = re.findall(rb"(\d+) bytes spill stores", report.read())
    if not spills:
        raise RuntimeError("the compiler did not report how many bytes it spills")
    return sum(map(int, spills))


def shortlist(m: int, n: int, k: int, *, rank: int, num_sms: int, size: int) -> list:
    """The best tilings by the cost model, each in all its depths, and the best of every kind.

    The tiling that the shape has now is one of them: another replaces it only if it is faster in
    the same run.
    """

    def cost(config):
        return tiling.cost(config, m, n, k, num_sms)

    def cut(config):
        """The fields of a tiling that the cost model considers."""
        return dataclasses.replace(config, in_flight=0, ahead=False)

    found = tiling.candidates(m, n, k, rank=rank, num_sms=num_sms)
    ranked = sorted(found, key=cost)
    best = list(dict.fromkeys(map(cut, ranked)))[:size]
    chosen = [config for config in ranked if cut(config) in best]
    kinds = {}
    for config in ranked:
        kind = config.stream_k, config.split, config.slices, config.warpgroups > 3
        kinds.setdefault(kind, config)
    chosen += [config for config in kinds.values() if cost(config) < 1.4 * cost(ranked[0])]
    chosen.append(tiling.choose(m, n, k, rank=rank, num_sms=num_sms))
    return list(dict.fromkeys(chosen))


def decode_product(
    layer: str, m: int, n: int, k: int, *, rank: int, count: int
) -> tuple[Callable, Callable, list]:
    """The product of a layer in a decode step of M rows.

    Up to 128 rows the product of gate and up ends with SwiGLU, and the product of down computes
    x A^T itself. So does the output projection with more than eight rows; its epilogue of residual
    and RMSNorm is not timed, but up to 64 rows gate and up compute x A^T after it. Otherwise
    partials of x A^T are given, up to the number of rows for which the kernel adds them up.

    Args:
        layer: name of the layer, as "7b.gate_up"; an unknown name gets partials.
        m: number of rows.
        n: number of outputs.
        k: number of inputs.
        rank: rank of the layer's stacked adapters, or 0 for the product alone.
        count: number of weights.

    Returns:
        The product of tokens, a weight and other arguments, which takes a `config`; the same
        product by XLA; lists of the other arguments, with one element for each weight.
    """
    if not rank or m > tiling.MAX_ROWS_OF_PARTIALS:
        kernel, by_xla = (
            functools.partial(fp4.fp4_matmul, implementation=name) for name in ("mosaic", "xla")
        )
        return kernel, by_xla, []
    part = layer.rpartition(".")[2]
    ends = part == "gate_up" and m % 8 == 0
    if ends:
        inside = m <= tiling.MAX_ROWS_OF_NORM
    else:
        inside = (part == "o" and m > 8) or (part == "down" and (m > 8 or m % 8 == 0))
    xa_partials = None if inside else benchmark.random_xa_partials(m, k, rank)
    squares = jax.random.uniform(jax.random.key(4), (-(-k // 128), m), minval=0.5, maxval=1.5)
    swiglu = fp4.Swiglu(squares, _EPS) if ends else None

    def product(x, weight, lora, xa_partials, epilogue, config):
        return fp4.fp4_matmul(
            x,
            weight,
            lora=lora,
            xa_partials=xa_partials,
            epilogue=epilogue,
            implementation="mosaic",
            config=config,
        )

    def product_by_xla(x, weight, lora, xa_partials, epilogue):
        y = fp4.fp4_matmul(x, weight, lora=lora, xa_partials=xa_partials, implementation="xla")
        if epilogue is None:
            return y
        factor = lax.rsqrt(epilogue.square_partials.sum(axis=0) + epilogue.eps)
        gate, up = jnp.split(y.astype(jnp.float32) * factor[:, None], 2, axis=1)
        return jax.nn.silu(gate) * up

    adapters = benchmark.random_adapters(count, rank, n, k)
    return product, product_by_xla, [adapters, [xa_partials] * count, [swiglu] * count]


def tune(
    layer: str,
    m: int,
    n: int,
    k: int,
    *,
    rank: int = 0,
    num_sms: int = tiling.NUM_SMS,
    size: int = 10,
    threads: int = 8,
) -> tuple[TileConfig, float]:
    """Finds the fastest tiling of a layer's product.

    Args:
        layer: name of the layer, as in `decode_product`.
        m: number of rows.
        n: number of outputs.
        k: number of inputs.
        rank: rank of the layer's stacked adapters, or 0 for the product alone.
        num_sms: number of SMs of the device.
        size: number of candidates by the cost model's rank.
        threads: number of threads that compile.

    Returns:
        The tiling and the product's seconds.
    """
    with sole_use():
        weights = benchmark.random_weights(
            lambda key, n, k: fp4.to_tiles(benchmark.random_weight(key, n, k)), n, k, bits=4.5
        )
        product, by_xla, others = decode_product(layer, m, n, k, rank=rank, count=len(weights))
        args = [benchmark.random_tokens(len(weights), m, k), weights, *others]
        expected = jax.jit(by_xla)(*(arg[0] for arg in args)).astype(jnp.float32)
        jax.block_until_ready((args, expected))
    padded = tiling.padded_rank(rank)
    configs = shortlist(m, n, k, rank=padded, num_sms=num_sms, size=size)
    if expected.shape[1] < n:  # SwiGLU wants all tokens in one tile.
        configs = [config for config in configs if config.tile_m >= m]

    results = measured(configs, product, args, expected, threads=threads)
    if not results:
        raise ValueError(f"no tiling works for M {m}, N {n}, K {k}")
    finalists = sorted(results, key=lambda result: result[0])[:3]
    with sole_use():
        medians = [
            (statistics.median(seconds_of(program, args) for _ in range(3)), config)
            for _, config, program in finalists
        ]
    best, config = min(medians, key=lambda result: result[0])
    return config, best


def measured(
    configs: list, product: Callable, args: list, expected: jax.Array, *, threads: int
) -> list[tuple[float, Any, Callable]]:
    """Measures a product in every tiling that compiles, spills nothing and is right.

    Args:
        configs: tilings, or schedules.
        product: function of tokens, a weight and other arguments, which takes a `config`.
        args: lists of the arguments, with one element for each weight.
        expected: float32 result for the first elements.
        threads: number of threads that compile.

    Returns:
        The seconds, the tiling and the program of each.
    """

    def compiled(config):
        operation = functools.partial(product, config=config)
        spills = spilled_bytes(jax.jit(operation).lower(*(arg[0] for arg in args)))
        return spills, None if spills else benchmark.repeated(operation).lower(*args).compile()

    results: list[tuple[float, Any, Callable]] = []
    with compiler_reports(), concurrent.futures.ThreadPoolExecutor(threads) as pool:
        programs = {pool.submit(compiled, config): config for config in configs}
        for done in concurrent.futures.as_completed(programs):
            config = programs[done]
            if (problem := done.exception()) is not None:
                print(f"    {config}: {problem}"[:200], flush=True)
                continue
            spills, program = done.result()
            if program is None:
                print(f"    {config}: spills {spills} bytes", flush=True)
                continue
            with sole_use():
                actual = program(*args)[0].astype(jnp.float32)
                error = float(jnp.linalg.norm(actual - expected) / jnp.linalg.norm(expected))
                if not error < 1e-2:
                    print(f"    {config}: off by {error:.1e}", flush=True)
                    continue
                results.append((seconds_of(program, args), config, program))
            print(f"    {1e6 * results[-1][0]:8.2f} us  {config}", flush=True)
    return results


def seconds_of(program: Callable, args: list) -> float:
    """The seconds of a product on the device, of a program that computes one for each weight."""
    return sum(time for _, time in benchmark.device_times(program, *args)) / len(args[0])


def merge(path: pathlib.Path, entries: list[dict]) -> None:
    """Writes entries to a table, where they replace entries of the same shape.

    The devices that passed the self-test of the kernel (`also_verified`) stay listed while the
    kernel and jax are the same.
    """
    device = jax.devices()[0]
    table: dict = {"entries": []}
    if path.exists():
        table = json.loads(path.read_text(encoding="utf-8"))
    merged = {(entry["n"], entry["k"], entry["m"]): entry for entry in table["entries"] + entries}
    about = {"jax": jax.__version__, "kernel": tiling.kernel_digest()}
    verified = table.get("also_verified") if about.items() <= table.items() else None
    table = {
        "device": device.device_kind,
        **({"also_verified": verified} if verified else {}),
        "multiprocessors": device.core_count,
        **about,
        "entries": [merged[key] for key in sorted(merged)],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Parses the command line and tunes each shape."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", default="7b", help="models and layers, as 7b.gate_up,14b")
    parser.add_argument(
        "--m",
        default="8,16,32,64,96,128,160,192,256,320,384,448,512,1024,2048",
        help="numbers of tokens; the default has batch sizes to which rollouts compact",
    )
    parser.add_argument(
        "--size", type=int, default=10, help="number of candidates by the cost model's rank"
    )
    parser.add_argument(
        "--rank", type=int, default=32, help="rank of each projection's adapter, which must fit"
    )
    parser.add_argument(
        "--out", type=benchmark.user_path, help="table; by default the device's table in tuned/"
    )
    args = parser.parse_args()
    device = jax.devices()[0]
    exit_unless_hopper()
    name = device.device_kind.lower().replace(" ", "_")
    path = args.out or tiling.TUNED / f"{name}.json"
    tuned = set()
    for layer, (n, k) in benchmark.shapes(args.layers).items():
        rank = cases.rank_of(layer, args.rank)
        for m in map(int, args.m.split(",")):
            if (m, n, k) in tuned:
                continue
            tuned.add((m, n, k))
            print(f"{layer} M {m}", flush=True)
            config, seconds = tune(
                layer, m, n, k, rank=rank, num_sms=device.core_count, size=args.size
            )
            print(f"{layer} M {m}: {1e6 * seconds:.2f} us  {config}", flush=True)
            entry = {"n": n, "k": k, "m": m, "config": config.to_json()}
            with sole_use():
                merge(path, [entry | {"us": round(1e6 * seconds, 2)}])


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # for several commands
    main()
