"""The most memory of the device that programs compiled ahead have in use."""

import functools
from typing import Any

import jax

from qerl_jax.rollout.programs import Executables


class PeakMemory:
    """Looks at the memory whenever a program that it watches is called.

    A device tells the peak of a whole process, which for all measurements but the largest is that
    of another one. While a program runs, it has what was in use before, its results, but for those
    that take the place of an argument, and what it needs in between, which is fixed at compilation.
    """

    def __init__(self):
        self._device = jax.local_devices()[0]
        self._most = 0

    def watched(self, programs: Executables) -> Executables:
        """The programs, each with a look before it runs: for runs that are not timed."""
        if self._device.memory_stats() is None:  # A CPU, whose memory is not looked after.
            return programs
        return Executables(
            {key: functools.partial(self._run, program) for key, program in programs.items()}
        )

    def _run(self, program: Any, *arguments: Any) -> Any:
        sizes = program.memory_analysis()
        assert sizes is not None
        own = sizes.output_size_in_bytes - sizes.alias_size_in_bytes + sizes.temp_size_in_bytes
        self._most = max(self._most, self._device.memory_stats()["bytes_in_use"] + own)
        return program(*arguments)

    @property
    def gigabytes(self) -> float | None:
        """The peak so far, in 10^9 bytes; None where nothing was seen."""
        return round(self._most / 1e9, 3) if self._most else None
