"""The most memory that watched programs have in use, on a device that tells."""

import types

import pytest

from benchmarks.rollout import peak_memory
from qerl_jax.compile.operation import Executables


class Compiled:
    def __init__(self, device, *, temp, output, alias):
        self._device, self._left = device, output - alias
        self._sizes = types.SimpleNamespace(
            temp_size_in_bytes=temp, output_size_in_bytes=output, alias_size_in_bytes=alias
        )

    def memory_analysis(self):
        return self._sizes

    def __call__(self, argument):
        self._device.stats["bytes_in_use"] += self._left
        return 2 * argument


@pytest.fixture
def device(monkeypatch):
    device = types.SimpleNamespace(stats={"bytes_in_use": 5_000_000_000})
    device.memory_stats = lambda: device.stats
    monkeypatch.setattr(peak_memory.jax, "local_devices", lambda: [device])
    return device


def test_the_peak_is_that_of_the_call_that_needs_most(device):
    read = Compiled(device, temp=2_000_000_000, output=1_000_000_000, alias=0)
    step = Compiled(device, temp=500_000_000, output=3_000_000_000, alias=2_900_000_000)
    peaks = []
    programs = peak_memory.watched(Executables({"read": read, "step": step}), peaks)
    assert peak_memory.largest(peaks) is None
    assert programs["step"](7) == 14
    assert peak_memory.largest(peaks) == 5.6
    programs["read"](7)
    assert peak_memory.largest(peaks) == 8.1  # on top of what the step has left
    programs["step"](7)
    assert peak_memory.largest(peaks) == 8.1


def test_a_device_that_does_not_tell(device):
    device.stats, peaks = None, []
    programs = Executables({"step": len})
    assert peak_memory.watched(programs, peaks) == programs
    assert peak_memory.largest(peaks) is None
