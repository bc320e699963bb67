"""Shows what the warpgroups of the kernel spend their time on in one product.

    python -m pallas_kernels.fp4_matmul.timeline --layers=7b.o,7b.down --m=1,64 --rank=32
    python -m pallas_kernels.fp4_matmul.timeline --layers=7b.gate_up --m=8 --rank=32 --block=40

Every warpgroup records the clock when it begins and ends to wait, to multiply and to add up. A line
states the cycles that the consumer warpgroups spend on each, in the mean; "first stage" is the wait
for the first data (weights, or tokens for the LoRA shrink), "await stage" the wait for all later
stages. A product that waits is limited by memory, one that multiplies by the issue of instructions.
"span" is the time from a warpgroup's first event to its last. The events take shared memory, so the
pipeline may be shorter, and a little time; a warpgroup has no more than 96. --block also prints the
events of one CTA, a line for each warpgroup, with producer and reducer last: the name, the cycle at
which it begins + the number of cycles.
"""

import collections
import dataclasses
import functools
import json
import pathlib
import tempfile
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pallas_kernels.device import exit_unless_hopper, num_sms
from pallas_kernels.fp4_matmul import cases, sm90, tiling
from pallas_kernels.fp4_matmul.tiling import TileConfig
from pallas_kernels.gpu_lock import sole_use


def traceable(config: TileConfig) -> TileConfig:
    """The tiling with as few stages as the events need shared memory for."""
    events = 16 * sm90.TRACED_EVENTS * (config.warpgroups + tiling.helper_warpgroups(True))
    while config.smem_bytes() + events > tiling.SMEM_LIMIT:
        config = dataclasses.replace(config, stages=config.stages - 1)
    return config


def summary(trace: dict) -> dict[str, float]:
    """The cycles by name, the mean over the consumer warpgroups.

    The trace has events in Chrome's format: "tid" is a warpgroup, and "ts" counts 1000 cycles.
    """
    spent: dict[str, float] = collections.defaultdict(float)
    count = 0
    for events in _by_warpgroup(trace).values():
        if not any(event["name"] == "multiply" for event in events):
            continue  # the producer or the reducer
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


def events_of_block(trace: dict, block: int, warpgroups: int) -> list[str]:
    """A line for each warpgroup of the CTA `block`: its events in a trace, as in `summary`."""
    first = 1 + block * warpgroups
    found = _by_warpgroup(trace)
    mine = [found.get(tid, []) for tid in range(first, first + warpgroups)]
    start = min((event["ts"] for events in mine for event in events), default=0.0)
    lines = []
    for index, events in enumerate(mine):
        spans = sorted((begin, cycles, name) for name, begin, cycles, _ in _spans(events))
        texts = [f"{name} {1000 * (at - start):.0f}+{cycles:.0f}" for at, cycles, name in spans]
        lines.append(f"warpgroup {index}: " + "; ".join(texts))
    return lines


def _spans(events: list[dict]) -> Iterator[tuple[str, float, float, str | None]]:
    """Yields name, beginning, cycles and the name of the event around it of each, by their ends."""
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

    With an adapter the kernel computes x A^T itself where its tiling supports that; elsewhere it
    gets partials.

    Returns:
        The trace, as in `summary`, and the number of warpgroups of a CTA.
    """
    keys = jax.random.split(jax.random.key(0))
    weight = cases.random_tiles(keys[0], n, k)
    x = jax.random.normal(keys[1], (m, k), jnp.bfloat16)
    config = traceable(tiling.choose(m, n, k, rank=tiling.padded_rank(rank), num_sms=num_sms()))
    adapter: dict[str, jax.Array] = {}
    schedule = sm90.make_schedule(config, m, len(weight.codes), k, num_sms())
    if rank:
        ((a, adapter["b"]),) = cases.random_adapters(1, rank, n, k)
        if schedule.supports_lora_shrink(rank, k):
            adapter["a"] = a
        else:
            adapter["xa_partials"] = cases.random_xa_partials(m, k, rank)
    flush = jax.jit(lambda z: z + 1)
    with tempfile.TemporaryDirectory() as folder:
        options = {"config": config, "num_sms": num_sms(), "trace": folder}
        product = jax.jit(functools.partial(sm90.matmul, **options))
        for _ in range(2):  # The first run loads the program, and both write the same file.
            for trace in pathlib.Path(folder).glob("*-trace.json"):
                trace.unlink()
            with sole_use():
                flush(jnp.zeros(2**27)).block_until_ready()
                product(x, weight, **adapter).block_until_ready()
                jax.effects_barrier()
        (trace,) = pathlib.Path(folder).glob("*-trace.json")
        warpgroups = config.warpgroups + tiling.helper_warpgroups(rank > 0)
        return json.loads(trace.read_text(encoding="utf-8")), warpgroups


def main() -> None:
    """Parses the command line and prints a line for each product."""
    parser = cases.parser(__doc__, m="1,64")
    parser.add_argument("--rank", type=int, default=0, help="rank of each projection's adapter")
    parser.add_argument("--block", type=int, help="index of a CTA whose events are printed, too")
    args = parser.parse_args()
    exit_unless_hopper()
    for layer, m, n, k in cases.products(args):
        trace, warpgroups = record(m, n, k, rank=cases.rank_of(layer, args.rank))
        parts = "  ".join(f"{name} {number:.0f}" for name, number in summary(trace).items())
        print(f"{layer:12} {m:5}  {parts}", flush=True)
        if args.block is not None:
            print("\n".join(events_of_block(trace, args.block, warpgroups)), flush=True)


if __name__ == "__main__":
    main()
