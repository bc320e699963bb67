"""The most memory that watched programs have in use, on a device that tells."""

import types

from benchmarks.rollout import peak_memory
from qerl_jax.compile.operation import Executables


class Device:
    def __init__(self, in_use):
        self.in_use = in_use

    def memory_stats(self):
        return None if self.in_use is None else {"bytes_in_use": self.in_use}


class Compiled:
    def __init__(self, device, *, temp, output, alias):
        self._device, self._left = device, output - alias
        self._sizes = types.SimpleNamespace(
            temp_size_in_bytes=temp, output_size_in_bytes=output, alias_size_in_bytes=alias
        )

    def memory_analysis(self):
        return self._sizes

    def __call__(self, argument):
        self._device.in_use += self._left
        return 2 * argument


def test_the_peak_is_that_of_the_call_that_needs_most(monkeypatch):
    device = Device(in_use=5_000_000_000)
    monkeypatch.setattr(peak_memory.jax, "local_devices", lambda: [device])
    peak = peak_memory.PeakMemory()
    assert peak.gigabytes is None
    programs = peak.watched(
        Executables(
            {
                "read": Compiled(device, temp=2_000_000_000, output=1_000_000_000, alias=0),
                "step": Compiled(
                    device, temp=500_000_000, output=3_000_000_000, alias=2_900_000_000
                ),
            }
        )
    )
    assert programs["step"](7) == 14
    assert peak.gigabytes == 5.6
    programs["read"](7)
    assert peak.gigabytes == 8.1  # on top of what the step has left
    programs["step"](7)
    assert peak.gigabytes == 8.1


def test_a_device_that_does_not_tell(monkeypatch):
    monkeypatch.setattr(peak_memory.jax, "local_devices", lambda: [Device(in_use=None)])
    peak = peak_memory.PeakMemory()
    programs = Executables({"step": len})
    assert peak.watched(programs) == programs
    assert peak.gigabytes is None
