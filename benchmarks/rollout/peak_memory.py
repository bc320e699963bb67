"""Peak device memory of the programs of a rollout.

The device reports only the peak of the whole process, which for all measurements but the largest
comes from another measurement. While a program runs, the memory holds what was in use before, the
results except for those that reuse a donated argument, and the temporary memory of the program,
which is fixed at compilation.
"""

import functools
from typing import Any

import jax

from qerl_jax.compile.operation import Executables


def watched(programs: Executables, peaks: list[int]) -> Executables:
    """The programs, each of which adds the bytes that a run needs to `peaks`: for untimed runs."""
    device = jax.local_devices()[0]
    if device.memory_stats() is None:  # A CPU reports none.
        return programs

    def run(program: Any, *arguments: Any) -> Any:
        sizes = program.memory_analysis()
        results = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
        in_use = device.memory_stats()["bytes_in_use"]
        peaks.append(in_use + results + sizes.temp_size_in_bytes)
        return program(*arguments)

    return Executables({key: functools.partial(run, value) for key, value in programs.items()})


def largest(peaks: list[int]) -> float | None:
    """The largest of these, in 10^9 bytes; None if nothing was watched."""
    return round(max(peaks) / 1e9, 3) if peaks else None
