"""Measures schedules of the kernel for every GPU since Ampere, and prints them by time.

    python -m pallas_kernels.fp4_matmul.mma_autotune --layers=7b --m=8,32 --out=schedules.json

`mma_schedule.choose` is made from what this prints on an H200. The product, of at most 64 tokens,
has no adapter.
"""

import functools
import itertools
import os
from collections.abc import Iterator

import jax

from pallas_kernels import fp4_matmul as fp4
from pallas_kernels import timing
from pallas_kernels.fp4_matmul import autotune, cases
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
    for rows, (columns, stages), split in itertools.product(_ROWS, _WIDTHS, _SPLITS):
        config = MmaConfig(rows, columns, stages, split)
        ctas = -(-n // rows) * split
        steps = -(-k // TILE_COLUMNS) / split / (columns // TILE_COLUMNS)
        fits = rows * columns <= _LARGEST and _CTAS[0] * num_sms <= ctas <= _CTAS[1] * num_sms
        if fits and steps >= 1 and config.problem(m) is None:
            yield config


def main() -> None:
    """Parses the command line and measures each shape."""
    parser = cases.parser(__doc__, m="8,16,32,64")
    parser.add_argument("--out", type=timing.user_path, help="JSON file of all measurements")
    args = parser.parse_args()
    product, by_xla = (
        functools.partial(fp4.fp4_matmul, implementation=name) for name in ("mma", "xla")
    )
    rows = []
    for layer, m, n, k in cases.products(args):
        print(f"{layer} M {m}", flush=True)
        with sole_use():
            operands = jax.block_until_ready(cases.random_operands(m, n, k))
        configs = list(candidates(m, n, k, jax.devices()[0].core_count))
        results = autotune.measured(configs, product, by_xla, operands)
        for seconds, config, _ in results[:3]:
            print(f"{layer} M {m}: {1e6 * seconds:.2f} us  {config}", flush=True)
        rows += [
            {"layer": layer, "m": m, "us": round(1e6 * seconds, 2)} | vars(config)
            for seconds, config, _ in results
        ]
        if args.out:
            timing.write_json(args.out, rows)


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # for several commands
    main()
