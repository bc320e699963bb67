"""A run on two hosts is that of one process, whatever happens to a host or to their cable.

The tests of failures continue the same run, each from where the one before ended it, and the last
one takes it to its end: then it has the bits of a run that nothing happened to. Each also runs
alone.
"""

import contextlib
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time
import types

import hosts
import numpy as np
import pytest
import tiny_run

from qerl_jax.system.jsonl import read_jsonl

pytestmark = pytest.mark.slow  # 7 min together on two cores

STEPS = 9
CHANGES = {
    "steps": STEPS,
    "mesh.data": 4,
    "rollout.prompts_per_step": 4,
    "rewards.correctness.function": "hosts:reward",
    "rl.advantage": "hosts:advantages",
    "train.parameters": "lora+norms",
    "aqn.correction": "noisy_forward",
    "aqn.kl_every": 1,
    "rl.kl_coef": 0.1,
    "eval.every": STEPS,
    "eval.problems": 3,
    "checkpoint.every": 1,
}
END_SECONDS = 120  # in which every host ends after a failure
BLINK_SECONDS = 5


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two hosts, and the command of runs on them."""
    if reason := hosts.why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("hosts")
    tiny = tiny_run.write_tiny(folder, folder / "cache", num_layers=1)
    file = tiny.config_file(folder / "config.py", CHANGES, sketches=True)
    file.write_text(f"import hosts\nhosts.set_up()\n{file.read_text()}")
    two = hosts.Hosts(folder)
    pause = folder / "pause"

    def command(name):
        return [
            *(sys.executable, "-m", "experiments.grpo_gsm8k", f"--config={file}"),
            *("--config.reward_time_limit=0", f"--workdir={two.shared / name}"),
        ]

    def run(name, **own):
        return two.run(command(name), tiny.environment(), **own)

    with contextlib.closing(two):
        yield types.SimpleNamespace(
            tiny=tiny,
            hosts=two,
            pause=pause,
            command=command,
            run=run,
            shown=lambda name: two.hosts[0].path(two.shared / name),
        )


@pytest.fixture(scope="module")
def alone(pair):
    """The folder of a run of one process with four devices, on the first host."""
    environment = pair.tiny.environment() | {
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
    }
    command = pair.hosts.hosts[0].command(pair.command("alone"))
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    return pair.shown("alone")


@pytest.fixture(scope="module")
def whole(pair):
    """The folder of a run on two hosts with clocks five minutes apart; process 0 comes last."""
    fast = {"HOSTS_CLOCK": "300"}
    run = pair.run("whole", of_2=fast, of_3=fast).start(1, 2, 3)
    time.sleep(10)
    assert all(process.poll() is None for process in run.processes.values()), run.all_said()
    run.start(0)
    assert set(run.wait(400).values()) == {0}, run.all_said()
    return pair.shown("whole")


class Broken:
    """The run that is continued: one start of it, which pauses in a process."""

    def __init__(self, pair, number, point, **variables):
        """Starts the run; process `number` pauses at a point as in `hosts`."""
        self._pair, self._folder = pair, pair.shown("broken")
        before = self.saved()
        pair.pause.unlink(missing_ok=True)
        own = {f"of_{n}": dict(variables) for n in range(4)}
        own[f"of_{number}"]["HOSTS_PAUSE"] = f"{point}:{pair.pause}"
        self.run = pair.run("broken", **own).start(0, 1, 2, 3)
        self.run.until(pair.pause.exists)
        # The step before the one that pauses is saved in the background.
        self.run.until(lambda: self.saved() > before)
        self.last = self.saved()  # which the harm that follows must not cost
        if before:
            assert f"resuming after step {before}\n" in self.run.said(0)
        self.harmed = time.monotonic()

    def saved(self):
        """The newest checkpoint; 0 without one."""
        return max((int(p.name) for p in self._folder.glob("checkpoints/[0-9]")), default=0)

    def resumes(self):
        self._pair.pause.unlink()

    def codes(self, *numbers):
        """The exit codes of processes, which end in time."""
        ends = self.harmed + END_SECONDS
        try:
            codes = [self.run.processes[n].wait(ends - time.monotonic()) for n in numbers]
        except subprocess.TimeoutExpired:
            pytest.fail(self.run.all_said())
        assert self.saved() >= self.last
        return codes

    def line(self, number):
        """The one line by which a process ends; it ends with the command that resumes the run."""
        lines = self.run.errors(number)
        assert len(lines) == 1, self.run.all_said()
        assert lines[0].endswith(f": {shlex.join(self._pair.command('broken'))}"), lines
        return lines[0]


def evaluations(folder):
    """The rows of evaluations in a run folder, without times and compilations."""
    times = "eval_seconds", "compiled_programs", "compile_seconds"
    rows = [row for row in read_jsonl(folder / "metrics.jsonl") if "eval_seconds" in row]
    assert [row["step"] for row in rows] == [0, STEPS]
    return [{name: row[name] for name in row.keys() - times} for row in rows]


def of(*numbers):
    """How a line names processes of hosts."""
    return " and ".join(f"process {n} on node{1 + n // 2}" for n in numbers)


@pytest.fixture(autouse=True)
def mended(request):
    """Ends what a test has left running, and mends cable and disks."""
    yield
    if "pair" in request.fixturenames:
        two = request.getfixturevalue("pair").hosts
        two.kill()
        two.plug()
        two.empty()


KILLED = """
import os, pathlib, sys, hosts
two = hosts.Hosts(pathlib.Path(sys.argv[1]))
print(*(host.holder.pid for host in two.hosts), flush=True)
os.kill(os.getpid(), 9)
"""


def test_nothing_is_left_of_hosts_whose_test_is_killed(pair, tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    done = subprocess.run(
        command, env=pair.tiny.environment(), stdout=subprocess.PIPE, text=True, timeout=60
    )
    assert done.returncode == -signal.SIGKILL
    networks = [pathlib.Path("/proc", number, "ns/net") for number in done.stdout.split()]
    assert len(networks) == 2
    ends = time.monotonic() + 60
    while any(network.exists() for network in networks):
        assert time.monotonic() < ends
        time.sleep(0.05)
    assert str(tmp_path) not in pathlib.Path("/proc/mounts").read_text()


def test_two_hosts_with_other_clocks_and_a_late_first_process_train_as_one_process(alone, whole):
    rows = tiny_run.results(alone), tiny_run.results(whole)
    assert [row["step"] for row in rows[1]] == list(range(1, STEPS + 1))
    for one, two in zip(*rows, strict=True):
        assert one.keys() == two.keys()
        for name, value in one.items():
            np.testing.assert_allclose(two[name], value, 1e-5, 5e-6, err_msg=name)
    assert evaluations(whole) == evaluations(alone)


@pytest.mark.parametrize(
    ("killed", "alive", "lost"),
    [((2, 3), (0, 1), f"{of(2, 3)} are lost"), ((0, 1), (2, 3), f"{of(0)} is lost")],
    ids=["host", "host of process 0"],
)
def test_a_host_that_dies_ends_the_other(pair, killed, alive, lost):
    broken = Broken(pair, 3, "update 2")
    pair.hosts.unplug()  # Nothing of it says so.
    for number in killed:
        broken.run.processes[number].kill()
    assert broken.codes(*alive) == [1, 1]
    for number in alive:
        assert broken.line(number).startswith(f"error: {lost}, which ends the run; ")


def test_a_cable_that_stays_out_ends_both_hosts(pair):
    broken = Broken(pair, 3, "rollout 2")
    pair.hosts.unplug()
    broken.resumes()
    assert broken.codes(0, 1, 2, 3) == [1] * 4
    for number in (0, 1):
        assert broken.line(number).startswith(f"error: {of(2, 3)} are lost, which ends the run; ")
    for number in (2, 3):
        assert broken.line(number).startswith(f"error: {of(0)} is lost, which ends the run; ")


@pytest.mark.parametrize(
    ("free", "variables"),
    [(0, {}), (20_000, {"HOSTS_QUOTA": "1"})],  # bytes: none, and enough for metrics alone
    ids=["full", "quota"],
)
def test_a_full_disk_of_the_run_folder_ends_both_hosts(pair, free, variables):
    broken = Broken(pair, 3, "update 2", **variables)
    pair.hosts.hosts[0].fill(pair.hosts.shared, free=free)
    broken.resumes()
    codes = broken.codes(0, 1, 2, 3)
    assert set(codes) <= {1, 2}
    assert codes[0] == 2
    for number in range(4):
        assert "o disk space" in broken.line(number) or "No space left" in broken.line(number)


def test_a_signal_on_one_host_saves_the_same_step_on_both(pair):
    broken = Broken(pair, 3, "rollout 2")
    broken.run.processes[3].send_signal(signal.SIGTERM)
    broken.resumes()
    assert broken.codes(0, 1, 2, 3) == [128 + signal.SIGTERM] * 4
    said = broken.run.said(0)
    pattern = r"^saved after step (\d+); the same command continues: (.+)$"
    ((step, command),) = re.findall(pattern, said, re.MULTILINE)
    assert int(step) == broken.saved()
    assert shlex.split(command) == pair.command("broken")


def test_a_cable_that_is_out_for_seconds_changes_nothing_of_a_run_that_failed_before(pair, whole):
    broken = Broken(pair, 3, "update 2")
    for host in pair.hosts.hosts:
        host.fill(host.folder)  # A run needs no disk but the shared one.
    pair.hosts.unplug()
    broken.resumes()
    time.sleep(BLINK_SECONDS)
    pair.hosts.plug()
    assert set(broken.run.wait(200).values()) == {0}, broken.run.all_said()
    folder = pair.shown("broken")
    assert tiny_run.results(folder) == tiny_run.results(whole)
    assert evaluations(folder) == evaluations(whole)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (folder / "adapter" / name).read_bytes() == (whole / "adapter" / name).read_bytes()
