"""Runs of a sweep at the same time, one on each device; the processes only pretend to train."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from qerl_jax.errors import UserError
from qerl_jax.run import jobs
from qerl_jax.run.jobs import devices_of
from qerl_jax.run.sweep_folder import Run, train_all
from qerl_jax.system.signals import StoppedError

TRAIN = """
import json, os, pathlib, signal, sys, time
folder, seconds, code = pathlib.Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
folder.mkdir(exist_ok=True)
began, stopped = time.time(), []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
(folder / "began").touch()
while time.time() < began + seconds and not stopped:
    time.sleep(0.01)
if stopped:
    (folder / "saved").touch()
    sys.exit(143)
row = {"step": 1, "reward": 0.5, "device": os.environ.get("CUDA_VISIBLE_DEVICES")}
row |= {"began": began, "ended": time.time(), "own_session": os.getsid(0) == os.getpid()}
(folder / "metrics.jsonl").write_text(json.dumps(row) + "\\n")
print("the last line")
if not code:
    (folder / "summary.json").write_text('{"steps": 1}')
sys.exit(code)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(jobs, "_POLL_SECONDS", 0.02)


def make_runs(folder, count, *, seconds=0.2, codes=()):
    codes = [*codes, *[0] * count]
    return [
        Run(
            name=f"run{n}",
            overrides={},
            config={"steps": 1},
            folder=folder / f"run{n}",
            command=("-c", TRAIN, str(folder / f"run{n}"), str(seconds), str(codes[n])),
        )
        for n in range(count)
    ]


def rows(runs):
    return [json.loads((run.folder / "metrics.jsonl").read_text()) for run in runs]


def overlap(a, b):
    return a["began"] < b["ended"] and b["began"] < a["ended"]


def test_runs_share_out_the_devices(tmp_path, capsys):
    runs = make_runs(tmp_path, 5, seconds=1, codes=[0, 3])  # They overlap on a busy machine.
    failures = train_all(runs, tmp_path, ["2", "5"])
    assert failures == {"run1": f"exit code 3: the last line, see {tmp_path}/logs/run1.log"}
    found = rows(runs)
    assert {row["device"] for row in found} == {"2", "5"}
    assert all(row["own_session"] for row in found)  # so that Ctrl-C reaches each of them once
    pairs = [(a, b) for i, a in enumerate(found) for b in found[i + 1 :] if overlap(a, b)]
    assert pairs
    assert all(a["device"] != b["device"] for a, b in pairs)
    out = capsys.readouterr().out
    assert "run 1/5 run0 on GPU 2: see " in out
    assert "run 2/5 run1: failed after" in out
    assert "run 5/5 run4: last reward 0.500 after" in out
    assert train_all(runs[2:], tmp_path, ["2", "5"]) == {}
    assert capsys.readouterr().out.count(": is finished") == 3


def test_a_last_step_without_any_reward_does_not_end_the_sweep(tmp_path, capsys):
    runs = make_runs(tmp_path, 2, seconds=0.05)
    code = TRAIN.replace('"reward": 0.5', '"reward": None')
    runs[0] = dataclasses.replace(runs[0], command=("-c", code, *runs[0].command[2:]))
    assert train_all(runs, tmp_path) == {}
    out = capsys.readouterr().out
    assert "run0: last reward missing after" in out
    assert "run1: last reward 0.500 after" in out


def test_one_run_at_a_time_sees_what_the_sweep_sees(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    runs = make_runs(tmp_path, 2, seconds=0.05)
    assert train_all(runs, tmp_path) == {}
    first, second = rows(runs)
    assert first["device"] == second["device"] == "7"
    assert not overlap(first, second)


def test_a_run_of_another_process_waits_while_others_go_on(tmp_path, capsys):
    runs = make_runs(tmp_path, 3, seconds=0.05)
    runs[0].folder.mkdir()
    lock = runs[0].folder / "lock"
    code = (
        "import fcntl, sys\n"
        "lock = open(sys.argv[1], 'w')\n"
        "fcntl.lockf(lock, fcntl.LOCK_EX)\n"
        "print('process 5 on host', file=lock, flush=True)\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    pipe = subprocess.PIPE
    holder = subprocess.Popen([sys.executable, "-c", code, lock], stdin=pipe, stdout=pipe)
    assert holder.stdout.readline() == b"locked\n"

    def release():
        while not (runs[2].folder / "summary.json").exists():
            time.sleep(0.01)
        time.sleep(0.2)  # The sweep asks again.
        holder.communicate()

    thread = threading.Thread(target=release)
    thread.start()
    assert train_all(runs, tmp_path) == {}
    thread.join()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "run0: waiting for process 5 on host"
    assert sum("waiting" in line for line in lines) == 1
    assert [line.split(":")[0] for line in lines[1::2]] == [
        f"run {n}/3 run{n - 1}" for n in (2, 3, 1)
    ]


def test_a_signal_ends_the_wait_for_another_process(tmp_path, monkeypatch):
    def lock_holder(folder):
        os.kill(os.getpid(), signal.SIGINT)
        return "process 5 on host"

    monkeypatch.setattr(jobs, "lock_holder", lock_holder)
    with pytest.raises(StoppedError) as stopped:
        train_all(make_runs(tmp_path, 1, seconds=60), tmp_path)
    assert stopped.value.exit_code == 130


def test_a_signal_reaches_every_run(tmp_path, capsys):
    runs = make_runs(tmp_path, 3, seconds=60)

    def stop():
        while not all((run.folder / "began").exists() for run in runs[:2]):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR1)

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(StoppedError) as stopped:
        train_all(runs, tmp_path, ["0", "1"])
    thread.join()
    assert stopped.value.exit_code == 128 + signal.SIGUSR1
    assert [(run.folder / "saved").exists() for run in runs] == [True, True, False]
    assert "the same command continues the sweep" in capsys.readouterr().out


def test_a_run_that_ends_without_its_work_has_failed(tmp_path):
    runs = make_runs(tmp_path, 2, seconds=0.05)
    runs[0] = dataclasses.replace(runs[0], command=("-c", "print('idle')"))
    assert train_all(runs, tmp_path) == {"run0": f"exit code 0: idle, see {tmp_path}/logs/run0.log"}
    assert rows(runs[1:])


def test_a_signal_is_passed_on_to_the_jobs_once(tmp_path):
    code = (
        "import os, signal, sys, time\n"
        "told = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: told.append(1))\n"
        "os.kill(os.getppid(), signal.SIGTERM)\n"
        "while not told: time.sleep(0.05)\n"
        "time.sleep(0.5)\n"
        "print(len(told))\n"
    )
    (run,) = make_runs(tmp_path, 1)
    with pytest.raises(StoppedError):
        train_all([dataclasses.replace(run, command=("-c", code))], tmp_path)
    assert (tmp_path / "logs" / "run0.log").read_text() == "1\n"


def test_the_devices_of_a_sweep(monkeypatch):
    monkeypatch.setattr(jobs, "number_of_gpus", lambda: 2)
    assert devices_of(0, {"CUDA_VISIBLE_DEVICES": "3"}) == [None]
    assert devices_of(2, {}) == ["0", "1"]
    assert devices_of(2, {"CUDA_VISIBLE_DEVICES": "4, GPU-1a,6"}) == ["4", "GPU-1a"]
    assert devices_of(3, {"CUDA_VISIBLE_DEVICES": "4,5,6"}) == ["4", "5", "6"]
    for gpus, words in ((4, "--gpus=4: .*names 1 devices; pass --gpus=1"), (-1, "--gpus=-1")):
        with pytest.raises(UserError, match=words):
            devices_of(gpus, {"CUDA_VISIBLE_DEVICES": "0"})
    with pytest.raises(UserError, match=r"--gpus=4: JAX can use 2 NVIDIA GPUs .*; pass --gpus=2,"):
        devices_of(4, {})
    monkeypatch.setattr(jobs, "number_of_gpus", lambda: 0)
    assert devices_of(0, {}) == [None]
    with pytest.raises(UserError, match=r"--gpus=4: JAX can use 0 NVIDIA GPUs .*; leave it out"):
        devices_of(4, {})
