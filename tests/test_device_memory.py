"""How much of a GPU a command takes: from free and total bytes and the environment."""

import pytest

from qerl_jax.system import device_memory
from qerl_jax.system.device_memory import FRACTION, settings, take_memory

GB = 10**9
OLD = "XLA_PYTHON_CLIENT_MEM_FRACTION"


def test_a_free_gpu_is_taken_without_a_word():
    assert settings(84 * GB, 85 * GB, {}, pool=0.92) == ({FRACTION: "0.92"}, None)


@pytest.mark.parametrize(("free", "part"), [(78 * GB, "0.89"), (40 * GB, "0.46"), (GB, "0.01")])
def test_less_than_the_pool_is_taken_with_one_line(free, part):
    chosen, line = settings(free, 85 * GB, {}, pool=0.92)
    assert chosen == {FRACTION: part}
    assert float(part) * 85 * GB <= free
    assert f"{free / GB:.1f} of the GPU's 85.0 GB are free, 78.2 GB are wanted" in line
    assert FRACTION in line
    assert "\n" not in line


@pytest.mark.parametrize("name", [FRACTION, OLD])
def test_the_part_of_the_user_wins(name):
    assert settings(84 * GB, 85 * GB, {name: "0.5"}, pool=0.92) == ({}, None)
    chosen, line = settings(40 * GB, 85 * GB, {name: "0.5"}, pool=0.92)
    assert not chosen
    assert f"42.5 GB are wanted by {name}=0.5" in line
    assert settings(40 * GB, 85 * GB, {name: "half"}, pool=0.92) == ({}, None)  # JAX says why


@pytest.mark.parametrize(
    "environment",
    [{"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}],
)
def test_without_a_pool_nothing_is_wanted(environment):
    assert settings(GB, 85 * GB, environment, pool=0.92) == ({}, None)


def test_the_fullest_gpu_counts_and_the_line_is_printed(monkeypatch, capsys):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    for name in (*device_memory._FRACTIONS, *device_memory._OTHERS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(device_memory.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(device_memory, "_gpu_memory", lambda: [(85 * GB, 85 * GB), (GB, 85 * GB)])
    monkeypatch.setattr(device_memory.os, "environ", environment := {})
    take_memory()
    assert environment == {FRACTION: "0.01"}
    assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.setattr(device_memory.os, "environ", environment := {"JAX_PLATFORMS": "cpu"})
    take_memory()
    assert environment == {"JAX_PLATFORMS": "cpu"}


def test_gpus_that_share_the_weights_leave_more_to_their_communication(monkeypatch):
    monkeypatch.setattr(device_memory, "_uses_gpus", lambda: True)
    monkeypatch.setattr(device_memory, "_gpu_memory", lambda: [(85 * GB, 85 * GB)] * 2)
    for tensor, part in ((1, "0.92"), (2, "0.85"), (4, "0.85")):
        monkeypatch.setattr(device_memory.os, "environ", environment := {})
        take_memory(tensor)
        assert environment == {FRACTION: part}
