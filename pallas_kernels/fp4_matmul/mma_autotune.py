"""Measures schedules of the kernel for every GPU since Ampere, and prints them by time.

    python -m pallas_kernels.fp4_matmul.mma_autotune --layers=7b --m=8,32 --out=schedules.json

`mma_schedule.choose` is made from what this prints on an H200. The product has no adapter.
"""

import argparse
import functools
import itertools
import json
import os
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pallas_kernels import fp4_matmul as fp4
from pallas_kernels.fp4_matmul import autotune, benchmark
from pallas_kernels.fp4_matmul.mma_schedule import MmaConfig
from pallas_kernels.fp4_matmul.tiling import TILE_COLUMNS, TILE_ROWS
from pallas_kernels.gpu_lock import sole_use

_WIDTHS = (128, 3), (128, 4), (256, 2), (256, 3), (512, 2)  # columns of a step, and stages
_ROWS = TILE_ROWS, 2 * TILE_ROWS, 4 * TILE_ROWS
_LARGEST = 128 * 256  # weights of a step: with more, CTAs are few
_SPLITS = 1, 2, 3, 4, 6, 8, 12
_CTAS = 1.5, 10  # for each SM, fewest and most


def candidates(m: int, n: int, k: int, num_sms: int) -> Iterator[MmaConfig]:
    """Yields schedules that occupy all SMs, and whose CTAs have a step or more."""
    for rows, (columns, stages) in itertools.product(_ROWS, _WIDTHS):
        if rows * columns <= _LARGEST:
            for split in _SPLITS:
                config = MmaConfig(rows, columns, stages, split)
                ctas = -(-n // rows) * split
                steps = -(-k // TILE_COLUMNS) / split / (columns // TILE_COLUMNS)
                fits = _CTAS[0] * num_sms <= ctas <= _CTAS[1] * num_sms
                if fits and steps >= 1 and config.problem(m) is None:
                    yield config


def measure(m: int, n: int, k: int, *, threads: int) -> list[tuple[float, MmaConfig]]:
    """The seconds of a product in every candidate that works, the shortest first."""
    with sole_use():
        weights = benchmark.random_weights(
            lambda key, n, k: fp4.to_tiles(benchmark.random_weight(key, n, k)), n, k, bits=4.5
        )
        args = [benchmark.random_tokens(len(weights), m, k), weights]
        by_xla = functools.partial(fp4.fp4_matmul, implementation="xla")
        expected = jax.jit(by_xla)(*(arg[0] for arg in args)).astype(jnp.float32)
    configs = list(candidates(m, n, k, jax.devices()[0].core_count))
    product = functools.partial(fp4.fp4_matmul, implementation="mma")
    results = autotune.measured(configs, product, args, expected, threads=threads)
    return sorted(((seconds, config) for seconds, config, _ in results), key=lambda x: x[0])


def main() -> None:
    """Parses the command line and measures each shape."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", default="7b", help="models and layers, as 7b.gate_up,14b")
    parser.add_argument("--m", default="8,16,32,64", help="numbers of tokens, at most 64")
    parser.add_argument("--threads", type=int, default=8, help="number of threads that compile")
    parser.add_argument("--out", type=benchmark.user_path, help="JSON file of all measurements")
    args = parser.parse_args()
    rows = []
    for layer, (n, k) in benchmark.shapes(args.layers).items():
        for m in map(int, args.m.split(",")):
            print(f"{layer} M {m}", flush=True)
            results = measure(m, n, k, threads=args.threads)
            for seconds, config in results[:3]:
                print(f"{layer} M {m}: {1e6 * seconds:.2f} us  {config}", flush=True)
            rows += [
                {"layer": layer, "m": m, "us": round(1e6 * seconds, 2)} | vars(config)
                for seconds, config in results
            ]
            if args.out:
                args.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # for several commands
    main()
