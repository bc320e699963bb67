"""Peak device memory of the programs of a rollout."""

import functools
from typing import Any

import jax

from qerl_jax.compile.operation import Executables


class PeakMemory:
    """Reads the memory in use at every call of a watched program.

    The device reports only the peak of the whole process, which for all measurements but the
    largest comes from another measurement. While a program runs, the memory holds what was in use
    before, the results except for those in the place of a donated argument, and the temporary
    memory of the program, which is fixed at compilation.
    """

    def __init__(self):
        self._device = jax.local_devices()[0]
        self._most = 0

    def watched(self, programs: Executables) -> Executables:
        """The programs, each with a reading of the memory before it runs: for untimed runs."""
        if self._device.memory_stats() is None:  # A CPU reports none.
            return programs
        return Executables(
            {key: functools.partial(self._run, program) for key, program in programs.items()}
        )

    def _run(self, program: Any, *arguments: Any) -> Any:
        sizes = program.memory_analysis()
        assert sizes is not None
        program_bytes = (
            sizes.output_size_in_bytes - sizes.alias_size_in_bytes + sizes.temp_size_in_bytes
        )
        self._most = max(self._most, self._device.memory_stats()["bytes_in_use"] + program_bytes)
        return program(*arguments)

    @property
    def gigabytes(self) -> float | None:
        """The peak so far, in 10^9 bytes; None if no call was watched."""
        return round(self._most / 1e9, 3) if self._most else None
