"""A command that starts a process for each group of GPUs."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import tiny_run

from qerl_jax.errors import UserError
from qerl_jax.processes import launch
from qerl_jax.processes.spawn import _Child, environments

STEPS = 2
CHANGES = {"steps": STEPS, "mesh.data": 2, "eval.every": STEPS, "aqn.kl_every": 0}


def places(data, tensor, gpus, **environment):
    return environments(data=data, tensor=tensor, environment=environment, gpus=gpus)


def test_each_process_sees_the_gpus_of_its_group():
    first, second = places(2, 2, 4)
    assert first["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert second["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert first["JAX_NUM_PROCESSES"] == second["JAX_NUM_PROCESSES"] == "2"
    assert (first["JAX_PROCESS_ID"], second["JAX_PROCESS_ID"]) == ("0", "1")
    assert first["JAX_COORDINATOR_ADDRESS"] == second["JAX_COORDINATOR_ADDRESS"]


def test_the_gpus_are_those_that_the_user_shows():
    found = places(2, 1, 8, CUDA_VISIBLE_DEVICES="5, GPU-1a,7")
    assert [place["CUDA_VISIBLE_DEVICES"] for place in found] == ["5", "GPU-1a"]
    found = places(2, 1, 1, CUDA_VISIBLE_DEVICES="MIG-1,MIG-2")
    assert [place["CUDA_VISIBLE_DEVICES"] for place in found] == ["MIG-1", "MIG-2"]


def test_a_proxy_is_not_asked_for_another_process():
    assert "no_grpc_proxy" not in places(2, 1, 2)[0]
    found = places(2, 1, 2, http_proxy="http://proxy:8080")
    assert [place["no_grpc_proxy"] for place in found] == ["localhost", "localhost"]


LISTENING = """
import os, pathlib, threading, time
from qerl_jax.processes.launch import _initialize, read_rank
place = read_rank(os.environ, devices=2)
port = f":{int(place.address.rpartition(':')[2]):04X}"
def look():
    while True:
        for table in ("tcp", "tcp6"):
            for line in pathlib.Path("/proc/net", table).read_text().splitlines()[1:]:
                number, local, other, state, *_ = line.split()
                if state == "0A" and local.endswith(port):
                    print(local.removesuffix(port), flush=True)
                    os._exit(0)
        time.sleep(0.05)
threading.Thread(target=look, daemon=True).start()
_initialize(place)
"""


def test_processes_of_one_machine_listen_on_its_loopback_address_alone():
    place = {k: v for k, v in places(2, 1, 2)[0].items() if k.startswith("JAX")}
    done = subprocess.run(
        [sys.executable, "-c", LISTENING],
        env=os.environ | place | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    # 127.0.0.1, or the same as an IPv6 address
    assert done.stdout.strip() in ("0100007F", "0000000000000000FFFF00000100007F")


def test_nccl_listens_on_the_interface_that_the_user_names():
    assert [place["NCCL_SOCKET_IFNAME"] for place in places(2, 1, 2)] == ["lo", "lo"]
    assert "NCCL_SOCKET_IFNAME" not in places(2, 1, 2, NCCL_SOCKET_IFNAME="eth1")[0]


@pytest.mark.parametrize(
    ("address", "bind"),
    [
        ("localhost:99", "127.0.0.1:99"),
        ("127.0.0.2:99", "127.0.0.2:99"),
        ("[::1]:99", "[::1]:99"),
        ("node7:99", None),
        ("10.0.0.7:99", None),
    ],
)
def test_the_user_decides_where_processes_of_several_hosts_listen(address, bind):
    assert launch._bind_address(address, {}) == bind
    assert launch._bind_address(address, {"JAX_COORDINATOR_BIND_ADDRESS": "a:1"}) is None


@pytest.mark.parametrize(
    ("data", "tensor", "gpus", "environment"),
    [
        (1, 2, 8, {}),
        (2, 1, 1, {}),
        (2, 2, 3, {}),
        (2, 1, 0, {"CUDA_VISIBLE_DEVICES": "0,1"}),  # JAX_PLATFORMS=cpu
        (2, 1, 8, {"CUDA_VISIBLE_DEVICES": "3"}),
        (2, 1, 8, {"CUDA_VISIBLE_DEVICES": ""}),
        (2, 1, 8, {"CUDA_VISIBLE_DEVICES": "-1"}),
        (2, 1, 8, {"CUDA_VISIBLE_DEVICES": "0,-1,1"}),  # CUDA shows those before a wrong one.
        (2, 1, 8, {"CUDA_VISIBLE_DEVICES": "0,8,1"}),
        (2, 1, 8, {"CUDA_VISIBLE_DEVICES": "1,1,2"}),
        (2, 1, 8, {"JAX_LOCAL_DEVICE_IDS": "0,1"}),
        (2, 1, 8, {"JAX_CUDA_VISIBLE_DEVICES": "0,1"}),
        (2, 1, 8, {"JAX_NUM_PROCESSES": "1"}),
        (
            *(2, 1, 8),
            {
                "JAX_NUM_PROCESSES": "2",
                "JAX_PROCESS_ID": "1",
                "JAX_COORDINATOR_ADDRESS": "node7:99",
            },
        ),
        (
            *(2, 1, 8),
            {
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_PROCID": "0",
                "SLURM_STEP_NODELIST": "node7",
                "SLURM_JOB_ID": "1",
                "SLURM_STEP_ID": "0",
            },
        ),
    ],
)
def test_nothing_is_started(data, tensor, gpus, environment):
    assert places(data, tensor, gpus, **environment) == []


def test_incomplete_variables_are_refused():
    with pytest.raises(UserError, match="without JAX_NUM_PROCESSES and JAX_PROCESS_ID"):
        places(2, 1, 8, JAX_COORDINATOR_ADDRESS="node7:99")


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Starts the command and returns its process, and its folder."""
    folder = tmp_path_factory.mktemp("spawn")
    tiny = tiny_run.write_tiny(folder, folder / "cache", num_layers=1)
    file, pause = tiny.config_file(folder / "config.py", CHANGES), folder / "pause"
    script = pathlib.Path(__file__).with_name("spawn_cases.py")

    def started(name, *flags, pauses_at=None):
        environment = tiny.environment() | {"JAX_PLATFORMS": "cpu"}
        if pauses_at:
            environment["TINY_RUN_PAUSE"] = f"{pauses_at}:{pause}"
        process = subprocess.Popen(
            [sys.executable, str(script), f"--config={file}", f"--workdir={name}", *flags],
            env=environment,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,  # which a terminal sends Ctrl-C to
        )
        return process, folder / name

    return started


@pytest.mark.slow  # 30 s; `test_processes` trains in two
def test_one_flag_trains_in_two_processes(start):
    process, run = start("run")
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert "starting 2 processes, one for each group of GPUs\n" in said
    assert said.count(f"step {STEPS}/{STEPS}") == 1
    assert [row["step"] for row in tiny_run.results(run)] == list(range(1, STEPS + 1))


@pytest.mark.slow  # 10 s
def test_a_process_that_fails_before_it_connects_ends_the_first(start):
    process, _ = start("failed", "--fails")
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "process 1 has no memory\n" in said
    assert said.endswith("error: process 1 ended with exit code 1, which ends the run\n")


@pytest.mark.parametrize(
    ("code", "shown", "line"),
    [
        ("sys.exit('note\\nerror: no memory')", "", "failed, which ends the run: no memory"),
        ("sys.exit('no memory')", "no memory\n", "ended with exit code 1, which ends the run"),
        (
            "os.write(2, b'bad\\n'); os.abort()",
            "bad\n",
            "ended by signal 6, which ends the run",
        ),
        ("sys.exit(128 + 15)", "", "ended with exit code 143, which ends the run"),
        ("sys.exit(0)", "", "ended with exit code 0, which ends the run"),
    ],
)
def test_the_end_of_a_process_has_one_line(capfd, code, shown, line):
    child = _Child(1, [sys.executable, "-c", f"import os, sys; {code}"], os.environ)
    child.process.wait(60)
    assert child.report_end() == f"error: process 1 {line}"
    assert capfd.readouterr().err == shown


def test_a_bug_shows_its_traceback(capfd):
    child = _Child(1, [sys.executable, "-c", "raise ValueError(9)"], os.environ)
    child.process.wait(60)
    assert child.report_end() == "error: process 1 ended with exit code 1, which ends the run"
    shown = capfd.readouterr().err
    assert shown.startswith("Traceback ")
    assert shown.endswith("\nValueError: 9\n")


@pytest.mark.slow  # 20 s
def test_bad_data_has_one_line(start):
    process, run = start("bad", "--config.data.path=nowhere.jsonl")
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 2, said
    (line,) = [line for line in said.splitlines() if "error:" in line]
    assert line.startswith("error: ")
    assert line.endswith("nowhere.jsonl: cannot read the problems: No such file or directory")
    assert not run.exists()


def started_child(process):
    """The number of the process that a command has started, once it runs its program."""
    for line in process.stdout:
        if line.startswith("starting"):
            break
    children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not children.read_text():
        assert process.poll() is None
    (child,) = map(int, children.read_text().split())
    while b"spawn_cases" not in pathlib.Path(f"/proc/{child}/cmdline").read_bytes():
        assert process.poll() is None
    return child


def test_an_interrupt_while_the_processes_connect_has_one_line(start):
    process, _ = start("interrupted")
    child = started_child(process)
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert said == "interrupted\n"
    wait_for_end(child)


def test_no_process_outlives_the_first(start):
    process, _ = start("killed")
    child = started_child(process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    wait_for_end(child)


def wait_for_end(process):
    deadline = time.monotonic() + 60
    command = pathlib.Path(f"/proc/{process}/cmdline")
    with contextlib.suppress(FileNotFoundError):
        while command.read_bytes():  # It is empty for a process that has ended.
            assert time.monotonic() < deadline
            time.sleep(0.05)
