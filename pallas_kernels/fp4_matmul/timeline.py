"""Where the time of one product goes, inside the kernel.

    python -m pallas_kernels.fp4_matmul.timeline --layers=7b.o,7b.down --m=1,64 --rank=32
    python -m pallas_kernels.fp4_matmul.timeline --layers=7b.gate_up --m=8 --rank=32 --block=40

Every warpgroup notes the clock where it begins and ends to wait, to multiply and to add up. A line
says how many cycles the warpgroups that multiply spend on what, in the mean; "first stage" is the
wait for the first data, weights or, in blocks that make x A^T, tokens for that, "await stage" that
for all later ones. A product that waits is held back by memory, one that multiplies by the issue of
instructions. "span" is what all of it takes, from a warpgroup's first note to its last. The notes
take shared memory, so the pipeline may be shorter, and a little time; there are no more than 96 of
a warpgroup. --block also prints the notes of one block of threads, a line for each warpgroup, the
one that copies and the one that adds up shares last: what, at which cycle + for how many.
"""

import argparse
import collections
import dataclasses
import json
import pathlib
import tempfile
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pallas_kernels import fp4_matmul as fp4
from pallas_kernels.device import exit_unless_hopper, num_sms
from pallas_kernels.fp4_matmul import benchmark, cases, sm90, tiling
from pallas_kernels.fp4_matmul.tiling import TileConfig
from pallas_kernels.gpu_lock import sole_use


def room_for_notes(config: TileConfig) -> TileConfig:
    """The tiling with as many stages as leave room for the notes in shared memory."""
    notes = 16 * sm90.TRACED_EVENTS * (config.warpgroups + tiling.helper_warpgroups(True))
    while config.smem_bytes() + notes > tiling.SMEM_LIMIT:
        config = dataclasses.replace(config, stages=config.stages - 1)
    return config


def summary(trace: dict) -> dict[str, float]:
    """Cycles by what was done, a mean over the warpgroups that multiply.

    Args:
        trace: events in Chrome's format, of which a "tid" is a warpgroup, "ts" in 1000 cycles.
    """
    spent: dict[str, float] = collections.defaultdict(float)
    count = 0
    for events in _by_warpgroup(trace).values():
        if not any(event["name"] == "multiply" for event in events):
            continue  # It copies, or adds up shares.
        count += 1
        waited = False
        for name, _, cycles, outer in _spans(events):
            if outer is not None:
                spent[outer] -= cycles
            if name == "await stage":
                name = name if waited else "first stage"
                waited = True
            spent[name] += cycles
        spent["span"] += 1000 * (events[-1]["ts"] - events[0]["ts"])
    return {name: cycles / count for name, cycles in spent.items()}


def notes_of_block(trace: dict, block: int, warpgroups: int) -> list[str]:
    """A line for each warpgroup of a block of threads.

    Args:
        trace: see `summary`.
        block: which one.
        warpgroups: of a block.
    """
    first = 1 + block * warpgroups
    found = _by_warpgroup(trace)
    mine = [found.get(tid, []) for tid in range(first, first + warpgroups)]
    start = min((event["ts"] for events in mine for event in events), default=0.0)
    lines = []
    for index, events in enumerate(mine):
        spans = sorted(
            (1000 * (begin - start), cycles, name) for name, begin, cycles, _ in _spans(events)
        )
        notes = [f"{name} {at:.0f}+{cycles:.0f}" for at, cycles, name in spans]
        lines.append(f"warpgroup {index}: " + "; ".join(notes))
    return lines


def _spans(events: list[dict]) -> Iterator[tuple[str, float, float, str | None]]:
    """What a warpgroup did, when it began, in 1000 cycles, for how many cycles, and within what.

    In the order of the ends.
    """
    begun = []
    for event in events:
        if event["ph"] == "B":
            begun.append((event["name"], event["ts"]))
            continue
        name, begin = begun.pop()
        outer = begun[-1][0] if begun else None
        yield name, begin, 1000 * (event["ts"] - begin), outer


def _by_warpgroup(trace: dict) -> dict[int, list[dict]]:
    warpgroups = collections.defaultdict(list)
    for event in trace["traceEvents"]:
        warpgroups[event["tid"]].append(event)
    return warpgroups


def record(m: int, n: int, k: int, *, rank: int = 0) -> tuple[dict, int]:
    """Traces a product of random numbers, with data that no cache holds.

    Args:
        m: tokens.
        n: outputs.
        k: inputs.
        rank: of the adapter, 0 for none; of x A^T the kernel makes a share for each 128 inputs, or
            gets them where it has no room for that.

    Returns:
        The trace, see `summary`, and the warpgroups of a block of threads.
    """
    keys = jax.random.split(jax.random.key(0))
    weight = fp4.to_tiles(benchmark.random_weight(keys[0], n, k))
    x = jax.random.normal(keys[1], (m, k), jnp.bfloat16)
    config = room_for_notes(
        tiling.choose(m, n, k, rank=tiling.padded_rank(rank), num_sms=num_sms())
    )
    adapter = {}
    plan = sm90.make_schedule(config, m, len(weight.codes), k, num_sms())
    if rank and plan.supports_lora_shrink(rank, k):
        ((adapter["a"], adapter["b"]),) = benchmark.random_adapters(1, rank, n, k)
    elif rank:
        adapter["xa_partials"], adapter["b"] = benchmark.random_xa_partials(m, n, k, rank)
    flush = jax.jit(lambda z: z + 1)
    with tempfile.TemporaryDirectory() as folder:

        @jax.jit
        def product(x, weight, adapter):
            return sm90.matmul(
                x,
                weight,
                config=config,
                num_sms=num_sms(),
                trace=folder,
                **adapter,
            )

        for _ in range(2):  # The first one loads the program, and both write the same file.
            for trace in pathlib.Path(folder).glob("*-trace.json"):
                trace.unlink()
            with sole_use():
                flush(jnp.zeros(2**27)).block_until_ready()
                product(x, weight, adapter).block_until_ready()
                jax.effects_barrier()
        (trace,) = pathlib.Path(folder).glob("*-trace.json")
        warpgroups = config.warpgroups + tiling.helper_warpgroups(rank > 0)
        return json.loads(trace.read_text(encoding="utf-8")), warpgroups


def main() -> None:
    """Parses the command line and prints a line for each product."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", default="7b", help="7b.gate_up,14b")
    parser.add_argument("--m", default="1,64")
    parser.add_argument("--rank", type=int, default=0, help="of each projection's adapter")
    parser.add_argument("--block", type=int, help="also print the notes of this block of threads")
    args = parser.parse_args()
    exit_unless_hopper()
    for layer, (n, k) in benchmark.shapes(args.layers).items():
        for m in map(int, args.m.split(",")):
            trace, warpgroups = record(m, n, k, rank=cases.rank_of(layer, args.rank))
            parts = "  ".join(f"{name} {number:.0f}" for name, number in summary(trace).items())
            print(f"{layer:12} {m:5}  {parts}", flush=True)
            if args.block is not None:
                print("\n".join(notes_of_block(trace, args.block, warpgroups)), flush=True)


if __name__ == "__main__":
    main()
