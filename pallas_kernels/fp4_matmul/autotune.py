"""Measures tilings on a Hopper GPU and writes the best of each shape to a table.

    python -m pallas_kernels.fp4_matmul.autotune --layers=7b,14b --m=8,16,32,64,128,256

The candidates fit into shared memory and registers by `tiling`'s arithmetic; the model ranks them
and keeps a few of each kind. They are compiled in threads while the first ones are measured. One
that the compiler has no room for, in shared memory or in registers, is not measured, and one whose
result is off does not count. Several commands may run at a time, for one measures after the other.
An entry of the table serves all M from the one below up to its own, and adapters of rank 32; up to
128 rows it is the best for the product as a decode step has it, see `decode_product`.
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

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import fp4_matmul as fp4
from pallas_kernels.device import exit_unless_hopper
from pallas_kernels.fp4_matmul import benchmark, cases, tiling
from pallas_kernels.fp4_matmul.tiling import TileConfig
from pallas_kernels.gpu_lock import sole_use

_EPS = 1e-6  # of the norm in front of SwiGLU
_REPORT = "MOSAIC_GPU_DUMP_PTXAS"
_report = threading.Lock()


@contextlib.contextmanager
def compiler_reports() -> Generator[None]:
    """Has the compiler report on every kernel, and Python alone print.

    The reports go to the standard output of the process, which leads nowhere meanwhile. To be
    entered before there are threads that compile: they read the environment.
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
    """How many bytes of registers a thread of a program's Mosaic kernels spills.

    Within `compiler_reports`. One program at a time is compiled here.

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
    """The best tilings by the model, each in all its depths, and the best of every kind.

    Also what serves the shape now: another one takes its place if it is faster in the same run.
    """

    def cost(config):
        return tiling.cost(config, m, n, k, num_sms)

    def cut(config):
        """All that the model knows of a tiling."""
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
    """What a layer of a decode step of M rows makes of its tokens and its weight.

    Up to 128 rows the product of gate and up ends with SwiGLU, and leaves x A^T to that of down.
    So does attention to the output projection, with more than eight; what that one may add to its
    product, the beginning of a norm, is not timed, but up to 64 rows gate and up make x A^T behind
    it. Otherwise shares of x A^T are given, but for so many rows that the kernel does not add them
    up.

    Args:
        layer: "7b.gate_up"; any other name is one that gets shares.
        m: rows.
        n: outputs.
        k: inputs.
        rank: of the layer's stacked adapters, or 0 for the product alone.
        count: weights.

    Returns:
        The product of tokens, a weight and other arguments, which takes a `config`; the same by
        XLA; lists of these arguments, with one for each weight.
    """
    by_xla = functools.partial(fp4.fp4_matmul, implementation="xla")
    if not rank or m > tiling.MAX_ROWS_OF_PARTIALS:
        return functools.partial(fp4.fp4_matmul, implementation="mosaic"), by_xla, []
    part = layer.rpartition(".")[2]
    xa_partials, b = benchmark.random_xa_partials(m, n, k, rank)
    square_partials = jax.random.uniform(
        jax.random.key(4), xa_partials.shape[:2], minval=0.5, maxval=1.5
    )
    adapters = benchmark.random_adapters(count, rank, n, k)

    def with_adapter(x, weight, lora, config):
        return fp4.fp4_matmul(x, weight, lora=lora, implementation="mosaic", config=config)

    def with_adapter_by_xla(x, weight, lora):
        return by_xla(x, weight, lora=lora)

    def with_shares(x, weight, xa_partials, b):
        return by_xla(x, weight) + fp4.dot(fp4.sum_xa_partials(xa_partials, x, b), b)

    def swiglu(y, square_partials):
        y = y.astype(jnp.float32) * lax.rsqrt(square_partials.sum(axis=0) + _EPS)[:, None]
        gate, up = jnp.split(y, 2, axis=1)
        return jax.nn.silu(gate) * up

    if (part == "o" and m > 8) or (part == "down" and (m > 8 or m % 8 == 0)):
        return with_adapter, with_adapter_by_xla, [adapters]
    if part != "gate_up" or m % 8:
        return fp4.fp4_matmul_with_xa_partials, with_shares, [[xa_partials] * count, [b] * count]
    if m <= tiling.MAX_ROWS_OF_NORM:
        return (
            lambda x, weight, lora, square_partials, config: fp4.fp4_swiglu(
                x, weight, lora[1], square_partials, a=lora[0], eps=_EPS, config=config
            ),
            lambda x, weight, lora, square_partials: swiglu(
                with_adapter_by_xla(x, weight, lora), square_partials
            ),
            [adapters, [square_partials] * count],
        )
    return (
        lambda x, weight, xa_partials, b, square_partials, config: fp4.fp4_swiglu(
            x, weight, b, square_partials, xa_partials=xa_partials, eps=_EPS, config=config
        ),
        lambda x, weight, xa_partials, b, square_partials: swiglu(
            with_shares(x, weight, xa_partials, b), square_partials
        ),
        [[xa_partials] * count, [b] * count, [square_partials] * count],
    )


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
    """The fastest tiling of a shape in its layer, see `decode_product`, and its seconds."""
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

    def compiled(config):
        operation = functools.partial(product, config=config)
        spills = spilled_bytes(jax.jit(operation).lower(*(arg[0] for arg in args)))
        return spills, None if spills else benchmark.repeated(operation).lower(*args).compile()

    def seconds(program):
        times = benchmark.device_times(program, *args)
        return sum(time for _, time in times) / len(weights)

    results = []
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
                results.append((seconds(program), config, program))
            print(f"    {1e6 * results[-1][0]:8.2f} us  {config}", flush=True)
    if not results:
        raise ValueError(f"no tiling works for M {m}, N {n}, K {k}")
    finalists = sorted(results, key=lambda result: result[0])[:3]
    with sole_use():
        measured = [
            (statistics.median(seconds(program) for _ in range(3)), config)
            for _, config, program in finalists
        ]
    best, config = min(measured, key=lambda result: result[0])
    return config, best


def merge(path: pathlib.Path, entries: list[dict]) -> None:
    """Writes entries to a table, over those of the same shape."""
    device = jax.devices()[0]
    table: dict = {"entries": []}
    if path.exists():
        table = json.loads(path.read_text(encoding="utf-8"))
    merged = {(entry["n"], entry["k"], entry["m"]): entry for entry in table["entries"] + entries}
    table = {
        "device": device.device_kind,
        "multiprocessors": device.core_count,
        "jax": jax.__version__,
        "kernel": tiling.kernel_digest(),
        "entries": [merged[key] for key in sorted(merged)],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Parses the command line and tunes one shape after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", default="7b", help="7b.gate_up,14b")
    parser.add_argument(
        "--m",
        default="8,16,32,64,96,128,160,192,256,320,384,448,512,1024,2048",
        help="tokens; the default has batches that rollouts shrink to",
    )
    parser.add_argument(
        "--size", type=int, default=10, help="candidates by the model's rank, without depths"
    )
    parser.add_argument("--rank", type=int, default=32, help="of the adapters that must fit")
    parser.add_argument("--out", type=pathlib.Path, help="default: in tuned/, by the device")
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
