"""Measures tilings on a Hopper GPU and writes the best of each shape to a table.

    python -m pallas_kernels.fp4_matmul.autotune --layers=7b,14b --m=8,16,32,64,128,256

The candidates fit into shared memory and registers by the arithmetic of `tiling`; its cost model
ranks them, and a few of each kind are kept. Threads compile them while the first ones are measured.
A candidate that does not fit into shared memory or spills registers is not measured, and a
candidate whose result is wrong does not count. Several commands may run at a time, for they take
turns to measure. An entry of the table is for all M from the next smaller entry up to its own, and
for adapters of rank 32; up to 256 rows it is the best for the product of a decode step, see
`decode_product`. The default of --m has batch sizes to which rollouts compact.
"""

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
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import fp4_matmul as fp4
from pallas_kernels import timing
from pallas_kernels.device import exit_unless_hopper
from pallas_kernels.fp4_matmul import cases, tiling
from pallas_kernels.fp4_matmul.tiling import TileConfig
from pallas_kernels.gpu_lock import sole_use

_CANDIDATES = 10  # by the cost model, each in all its depths
_EPS = 1e-6  # epsilon of the norm before SwiGLU
_RANK = 32  # of each projection's adapter
_REPORT = "MOSAIC_GPU_DUMP_PTXAS"


@contextlib.contextmanager
def compiler_reports() -> Iterator[Callable[[jax.stages.Lowered], int]]:
    """Yields a function of a program: the bytes of registers that a thread of its kernels spills.

    It compiles one program at a time, and raises RuntimeError where the compiler reports nothing.
    The compiler reports on Mosaic kernels to the standard output of the process: that is a file
    meanwhile, except for what Python prints. Enter this before threads compile: they read the
    environment.
    """
    one_at_a_time = threading.Lock()
    with (
        unittest.mock.patch.dict(os.environ, {_REPORT: "1"}),
        tempfile.TemporaryFile() as report,
        contextlib.ExitStack() as stack,
    ):
        sys.stdout.flush()
        kept = os.dup(1)
        stack.callback(os.close, kept)
        stack.callback(os.dup2, kept, 1)
        os.dup2(report.fileno(), 1)
        stdout = stack.enter_context(open(kept, "w", closefd=False))
        stack.enter_context(contextlib.redirect_stdout(stdout))

        def spilled_bytes(lowered):
            with one_at_a_time:
                start = os.fstat(1).st_size
                lowered.compile()
                text = os.pread(1, os.fstat(1).st_size - start, start)
            spills = re.findall(rb"(\d+) bytes spill stores", text)
            if not spills:
                raise RuntimeError("the compiler did not report how many bytes it spills")
            return sum(map(int, spills))

        yield spilled_bytes


def shortlist(m: int, n: int, k: int, *, rank: int, num_sms: int) -> list:
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
    best = list(dict.fromkeys(map(cut, ranked)))[:_CANDIDATES]
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
    """The product of a layer, as "7b.gate_up", in a decode step of M rows.

    The product of gate and up ends with SwiGLU, and that of down is given A. So is the output
    projection with more than eight rows; its epilogue of residual and RMSNorm is not timed, but up
    to 64 rows gate and up compute x A^T after it. Otherwise partials of x A^T are given, up to the
    number of rows for which the kernel adds them up. The rank is that of the layer's stacked
    adapters.

    Returns:
        The product of tokens, a weight and other arguments, which takes a `config`; the same
        product by XLA; lists of the other arguments, with an element for each of `count` weights.
    """
    kernel, by_xla = (
        functools.partial(fp4.fp4_matmul, implementation=name) for name in ("mosaic", "xla")
    )
    if m > tiling.MAX_ROWS_OF_PARTIALS:
        return kernel, by_xla, []
    part = layer.rpartition(".")[2]
    ends = part == "gate_up" and m % 8 == 0
    if ends:
        inside = m <= tiling.MAX_ROWS_OF_NORM
    else:
        inside = (part == "o" and m > 8) or (part == "down" and (m > 8 or m % 8 == 0))
    xa_partials = None if inside else cases.random_xa_partials(m, k, rank)
    squares = jax.random.uniform(jax.random.key(4), (-(-k // 128), m), minval=0.5, maxval=1.5)
    swiglu = fp4.Swiglu(squares, _EPS) if ends else None

    def product(x, weight, lora, xa_partials, epilogue, config):
        adapter = {"lora": lora, "xa_partials": xa_partials}
        return kernel(x, weight, epilogue=epilogue, config=config, **adapter)

    def product_by_xla(x, weight, lora, xa_partials, epilogue):
        y = by_xla(x, weight, lora=lora, xa_partials=xa_partials)
        if epilogue is None:
            return y
        factor = lax.rsqrt(epilogue.square_partials.sum(axis=0) + epilogue.eps)
        gate, up = jnp.split(y.astype(jnp.float32) * factor[:, None], 2, axis=1)
        return jax.nn.silu(gate) * up

    adapters = cases.random_adapters(count, rank, n, k)
    return product, product_by_xla, [adapters, [xa_partials] * count, [swiglu] * count]


def tune(layer: str, m: int, n: int, k: int, *, num_sms: int) -> tuple[TileConfig, float]:
    """The fastest tiling of a `decode_product`, and its seconds."""
    rank = cases.rank_of(layer, _RANK)
    with sole_use():
        args = cases.random_operands(m, n, k)
        product, by_xla, others = decode_product(layer, m, n, k, rank=rank, count=len(args[0]))
        args += others
        jax.block_until_ready(args)
    configs = shortlist(m, n, k, rank=tiling.padded_rank(rank), num_sms=num_sms)
    if others and others[-1][0] is not None:  # SwiGLU wants a reducer.
        configs = list(filter(tiling.supports_xa_partials, configs))

    results = measured(configs, product, by_xla, args)
    if not results:
        raise ValueError(f"no tiling works for M {m}, N {n}, K {k}")
    with sole_use():
        medians = [
            (statistics.median(seconds_of(program, args) for _ in range(3)), config)
            for _, config, program in results[:3]
        ]
    best, config = min(medians, key=lambda result: result[0])
    return config, best


def measured(
    configs: list, product: Callable, by_xla: Callable, args: list, *, threads: int = 8
) -> list[tuple[float, Any, Callable]]:
    """Measures a product in every tiling or schedule that compiles, spills nothing and is right.

    `product` takes tokens, a weight, further arguments and a `config`; `by_xla` takes the same
    arguments without one, and is right. `args` has a list of each argument.

    Returns:
        The seconds, the tiling and the program of each, the fastest first.
    """
    first = [arg[0] for arg in args]
    with sole_use():
        expected = jax.block_until_ready(jax.jit(by_xla)(*first).astype(jnp.float32))
    results: list[tuple[float, Any, Callable]] = []
    with (
        compiler_reports() as spilled_bytes,
        concurrent.futures.ThreadPoolExecutor(threads) as pool,
    ):

        def compiled(config):
            operation = functools.partial(product, config=config)
            if spills := spilled_bytes(jax.jit(operation).lower(*first)):
                raise ValueError(f"spills {spills} bytes")
            return timing.repeated(operation).lower(*args).compile()

        programs = {pool.submit(compiled, config): config for config in configs}
        for done in concurrent.futures.as_completed(programs):
            config = programs[done]
            if (problem := done.exception()) is not None:
                print(f"    {config}: {problem}"[:200], flush=True)
                continue
            with sole_use():
                program = done.result()
                actual = program(*args)[0].astype(jnp.float32)
                error = float(jnp.linalg.norm(actual - expected) / jnp.linalg.norm(expected))
                if not error < 1e-2:
                    print(f"    {config}: off by {error:.1e}", flush=True)
                    continue
                results.append((seconds_of(program, args), config, program))
            print(f"    {1e6 * results[-1][0]:8.2f} us  {config}", flush=True)
    return sorted(results, key=lambda result: result[0])


def seconds_of(program: Callable, args: list) -> float:
    """The seconds of a product on the device, of a program that computes one for each weight."""
    return sum(time for _, time in timing.device_times(program, *args)) / len(args[0])


def merge(path: pathlib.Path, entries: list[dict]) -> None:
    """Writes entries to a table, where they replace entries of the same shape.

    The devices that passed the self-test of the kernel (`also_verified`) stay listed while the
    kernel and jax are the same.
    """
    device = jax.devices()[0]
    table: dict = {"entries": []}
    if path.exists():
        table = json.loads(path.read_text(encoding="utf-8"))
    about = {"jax": jax.__version__, "kernel": tiling.kernel_digest()}
    verified = table.get("also_verified") if about.items() <= table.items() else None
    table = {
        "device": device.device_kind,
        **({"also_verified": verified} if verified else {}),
        "multiprocessors": device.core_count,
        **about,
        "entries": timing.merged([*table["entries"], *entries], "n", "k", "m"),
    }
    timing.write_json(path, table)


def main() -> None:
    """Parses the command line and tunes each shape."""
    parser = cases.parser(__doc__, m="8,16,32,64,96,128,160,192,256,320,384,448,512,1024,2048")
    parser.add_argument(
        "--out", type=timing.user_path, help="table; by default the device's table in tuned/"
    )
    args = parser.parse_args()
    device = jax.devices()[0]
    exit_unless_hopper()
    name = device.device_kind.lower().replace(" ", "_")
    path = args.out or tiling.TUNED / f"{name}.json"
    tuned = set()
    for layer, m, n, k in cases.products(args):
        if (m, n, k) in tuned:
            continue
        tuned.add((m, n, k))
        print(f"{layer} M {m}", flush=True)
        config, seconds = tune(layer, m, n, k, num_sms=device.core_count)
        print(f"{layer} M {m}: {1e6 * seconds:.2f} us  {config}", flush=True)
        entry = {"n": n, "k": k, "m": m, "config": config.to_json()}
        with sole_use():
            merge(path, [entry | {"us": round(1e6 * seconds, 2)}])


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # for several commands
    main()
