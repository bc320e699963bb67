"""Measures how fast processes exchange the completions of a step, which pass through process 0.

    uv run python -m benchmarks.exchange
    uv run python -m benchmarks.exchange --processes=8 --megabytes=64

It starts the processes on this machine, and needs no GPU. Started with the three variables of
`qerl_jax.processes.launch`, such as on several hosts, it is one of their processes. A row has

    seconds          median of an exchange
    mb_per_second    what process 0 handed out in it: to each process the bytes of all others

Rows of the same number of processes and size are replaced in --out. On a copy of the project
without git, QERL_COMMIT names the commit.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks import common
from qerl_jax.commands import cli
from qerl_jax.errors import UserError, check_limits

KEYS = ("processes", "megabytes")
_EXCHANGES = 7  # of which the first one is not measured


def make_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    out = "benchmarks/results/exchange.json"
    parser = common.make_parser("benchmarks.exchange", __doc__, out)
    add = parser.add_argument
    add("--processes", type=int, default=4, help="number of processes (default: 4)")
    add("--megabytes", type=int, default=16, help="10^6 bytes of all completions (default: 16)")
    return parser


def handed_out(completions: float, processes: int) -> float:
    """Bytes that process 0 hands out where all exchange completions of as many bytes together."""
    return processes * completions * (1 - 1 / processes)


def measure(megabytes: int, processes: Any) -> dict[str, Any]:
    """The row of this process, one of `processes.group.Processes`."""
    import numpy as np

    share = {"tokens": np.zeros(1_000_000 * megabytes // processes.count, np.uint8)}
    seconds = []
    for _ in range(_EXCHANGES):
        processes.exchange_json(None)  # They begin together.
        began = time.perf_counter()
        processes.exchange(share)
        seconds.append(time.perf_counter() - began)
    median = statistics.median(seconds[1:])
    return {
        "processes": processes.count,
        "megabytes": megabytes,
        "cores": os.cpu_count(),
        "seconds": median,
        "mb_per_second": handed_out(megabytes, processes.count) / median,
        **common.origin("benchmarks.exchange"),
    }


def run(arguments: argparse.Namespace) -> None:
    """Measures, and writes the row."""
    from qerl_jax.processes.launch import ADDRESS, COUNT, INDEX, connect

    count = arguments.processes
    check_limits({"--processes": (count, 2, 256), "--megabytes": (arguments.megabytes, 1, 10_000)})
    common.check_out(arguments.out, KEYS)
    if os.environ.get(COUNT):
        with connect(devices=count) as processes:
            row = measure(arguments.megabytes, processes)
        if processes.writes:
            common.merge(arguments.out, row, KEYS)
        return
    with socket.socket() as found:
        found.bind(("localhost", 0))
        shared = {ADDRESS: f"localhost:{found.getsockname()[1]}", COUNT: str(count)}
    command = [sys.executable, *sys.orig_argv[1:]]
    environment = os.environ | shared | {"JAX_PLATFORMS": "cpu"}
    started = [
        subprocess.Popen(command, env=environment | {INDEX: str(index)}) for index in range(count)
    ]
    if any([process.wait() for process in started]):  # noqa: C419  All of them have ended then.
        raise UserError("a process failed: see its line")


def main() -> None:
    """Parses the arguments and measures."""
    cli.run_command(make_parser(), run)


if __name__ == "__main__":
    main()
