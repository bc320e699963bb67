"""Digests of the FP4 kernel's PTX for an H200, by which two checkouts are compared.

    uv run --group aot python tests/kernel_code.py --out=before.json
    uv run --group aot python tests/kernel_code.py --out=after.json
    uv run python tests/kernel_code.py --compare before.json after.json

A case is a product of a model's layer in the tiling that it gets, with the adapter and the epilogue
of a decode step or of training, or a tiling that covers a branch of the kernel. No GPU is needed: a
case takes two seconds to lower and about three to compile. The digest covers the PTX without
comments, line information and the kernel's name, so equal digests mean equal code.
"""

import argparse
import contextlib
import hashlib
import json
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Callable, Iterator

import h200
import jax.numpy as jnp
from h200 import array, tiles

from pallas_kernels.fp4_matmul import AddRmsNorm, Swiglu, cases, sm90, tiling
from pallas_kernels.fp4_matmul.tiling import TileConfig

SMS = 132
RANK = 32  # of each projection's adapter
# Tilings that no layer of 7B has, for branches of the kernel that only they take.
SPECIAL = {
    "slices, split tiles": TileConfig(16, 1, 4, 512, 3, True),
    "two slices, split tiles": TileConfig(16, 2, 2, 256, 4, True),
    "three slices in a cluster": TileConfig(16, 1, 2, 256, 6, split=3),
    "dequantized ahead, split tiles": TileConfig(64, 2, 1, 256, 3, True, 1, ahead=True),
    "two products in flight": TileConfig(16, 1, 1, 256, 4, False, 2, 2, ahead=True),
    "one warpgroup": TileConfig(16, 1, stages=6),
    "six warpgroups": TileConfig(16, 6, stages=4),
}


def named_cases(model: str, tokens: list[int]) -> Iterator[tuple[str, Callable, tuple]]:
    """Yields the name, the function and the abstract arguments of each case."""
    for m in tokens:
        for layer, (n, k) in cases.MODELS[model].items():
            rank = cases.rank_of(layer, RANK)
            config = tiling.choose(m, n, k, rank=tiling.padded_rank(rank))
            for kind, options in variants(layer, config, m, n, k, rank):
                name = f"{model}.{layer} M {m} {kind}"
                yield name, *product(config, m, n, k, options)
    for name, config in SPECIAL.items():
        m, n, k = config.tile_m - 3, 4096, 8960
        for kind, options in variants("", config, m, n, k, RANK):
            yield f"{name}, {kind}", *product(config, m, n, k, options)
    m, n, k = 64, 152064, 3584
    config = tiling.choose(m, n, k)
    yield "float32", *product(config, m, n, k, {"dtype": jnp.dtype("float32")})
    yield (
        "dequantize",
        lambda weight: sm90.dequantize(weight, inputs=3584, num_sms=SMS),
        (tiles(37888, 3584),),
    )


def variants(
    layer: str, config: TileConfig, m: int, n: int, k: int, rank: int
) -> Iterator[tuple[str, dict]]:
    """Yields the kind of a product, and arguments of `sm90.matmul` beside x and the weight."""
    padded = tiling.padded_rank(rank)
    xa = {"xa": array(m, padded), "b": array(n, padded)}
    if m > tiling.MAX_ROWS_OF_PARTIALS or not tiling.supports_xa_partials(config):
        yield "alone", {}
        yield "xa, bias", xa | {"bias": array(n)}
        return
    paired = layer == "gate_up"
    schedule = sm90.make_schedule(config, m, -(-n // tiling.TILE_ROWS), k, SMS, paired=paired)
    count = k // tiling.TILE_COLUMNS
    adapters = {
        "xa_partials": {
            "xa_partials": array(count, m, rank, dtype=jnp.float32),
            "b": array(n, padded),
        }
    }
    if schedule.supports_lora_shrink(rank, k):
        adapters["A"] = {"a": array(rank, k), "b": array(n, padded)}
    for name, adapter in adapters.items():
        if paired:
            swiglu = Swiglu(array(count, m, dtype=jnp.float32), 1e-6)
            yield f"{name}, SwiGLU", adapter | {"epilogue": swiglu}
        else:
            yield name, adapter
    if layer == "o" and schedule.supports_add_residual(m):
        norm = {"epilogue": AddRmsNorm(array(m, n), array(n, dtype=jnp.float32))}
        for name, adapter in ({"xa": xa} | adapters).items():
            yield f"{name}, add and RMSNorm", adapter | norm


def product(config: TileConfig, m: int, n: int, k: int, options: dict) -> tuple[Callable, tuple]:
    """A product in a tiling, and its abstract arguments."""
    arrays = dict(options)
    static = {name: arrays.pop(name) for name in ("dtype", "trace") if name in arrays}

    def run(x, weight, arrays):
        return sm90.matmul(x, weight, config=config, num_sms=SMS, **static, **arrays)

    return run, (array(m, k // 2 if config.e4m3 else k), tiles(n, k), arrays)


def normalized(ptx: str) -> str:
    """PTX without comments, line information and the name of the kernel."""
    name = re.search(r"\.entry (\w+)\(", ptx)
    if name is None:
        raise ValueError("the compiler wrote no PTX")
    ptx = ptx.replace(name[1], "kernel")
    ptx = re.sub(r"//.*", "", ptx.partition("\t.section")[0])
    lines = (line.strip() for line in ptx.splitlines())
    debug = (".loc", ".file", "$L__tmp", "$L__func")
    return "\n".join(line for line in lines if line and not line.startswith(debug))


@contextlib.contextmanager
def standard_output() -> Iterator[Callable[[], str]]:
    """Yields a function that reads what the process, and thus the compiler, has written."""
    with tempfile.TemporaryFile() as file:
        sys.stdout.flush()
        kept = os.dup(1)
        os.dup2(file.fileno(), 1)

        def read():
            file.seek(0)
            return file.read().decode()

        try:
            yield read
        finally:
            os.dup2(kept, 1)
            os.close(kept)


def main() -> None:
    """Writes the digests of this checkout, or compares two files of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, help="JSON file for a digest of each case")
    parser.add_argument("--compare", type=pathlib.Path, nargs=2, metavar=("A", "B"))
    parser.add_argument("--model", default="7b", help="model whose layers are compiled")
    parser.add_argument("--m", default="8,32,64,128,256", help="numbers of tokens")
    parser.add_argument("--only", default="", help="regular expression that a case must contain")
    parser.add_argument("--keep", type=pathlib.Path, help="folder for the normalized PTX")
    args = parser.parse_args()
    if args.compare:
        sys.exit(compare(*(json.loads(path.read_text(encoding="utf-8")) for path in args.compare)))
    digests = {}
    with h200.compiler() as compiled:
        os.environ.pop("MOSAIC_GPU_DUMP_PTXAS")
        os.environ["MOSAIC_GPU_DUMP_PTX"] = "1"
        for name, function, arguments in named_cases(args.model, list(map(int, args.m.split(",")))):
            if not re.search(args.only, name):
                continue
            with standard_output() as read:
                compiled(function, *arguments)
                code = normalized(read())
            digests[name] = hashlib.sha256(code.encode()).hexdigest()[:16]
            print(digests[name], name, flush=True)
            if args.keep:
                args.keep.mkdir(parents=True, exist_ok=True)
                (args.keep / f"{name}.ptx").write_text(code, encoding="utf-8")
            args.out.write_text(json.dumps(digests, indent=1) + "\n", encoding="utf-8")


def compare(before: dict[str, str], after: dict[str, str]) -> int:
    """Prints the cases that differ or are in one file only; returns 1 if there are any."""
    both = before.keys() & after.keys()
    different = sorted(name for name in both if before[name] != after[name])
    missing = sorted(before.keys() ^ after.keys())
    for label, names in (("differs", different), ("in one file only", missing)):
        for name in names:
            print(f"{label}: {name}")
    print(f"{len(both) - len(different)} of {len(both)} cases are equal")
    return 1 if different or missing else 0


if __name__ == "__main__":
    main()
