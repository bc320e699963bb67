"""Runs of several processes: the results are those of one, and the end of one ends all.

The processes run on one machine and connect over loopback, with Gloo in place of NCCL.
"""

import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types

import environment_cases
import jax
import numpy as np
import pytest
import tiny_checkpoints
import tiny_run
from refusal import refused
from safetensors.numpy import load_file

from benchmarks import step
from qerl_jax.config.experiments.grpo_gsm8k import get_config
from qerl_jax.errors import UserError
from qerl_jax.policy import sharding
from qerl_jax.processes import folder as folder_lib
from qerl_jax.processes import group, launch
from qerl_jax.processes.group import Processes
from qerl_jax.processes.launch import Rank, local_devices, read_rank
from qerl_jax.run.metrics import read_steps
from qerl_jax.system.jsonl import read_jsonl
from qerl_jax.system.signals import StoppedError
from qerl_jax.training.loop import train

STEPS = 3
# Everything that an update can compute, and fewer problems of an evaluation than fit the devices.
CHANGES = {
    "steps": STEPS,
    "mesh.data": 2,
    "rollout.prompts_per_step": 4,
    "rewards.correctness.function": "tiny_run:rare",
    "train.parameters": "lora+norms",
    "aqn.correction": "noisy_forward",
    "aqn.kl_every": 1,
    "rl.kl_coef": 0.1,
    "eval.every": STEPS,
    "eval.problems": 3,
    "checkpoint.every": 1,
}
# Conversations, of which some fail.
TALKS = (
    {name: value for name, value in CHANGES.items() if name != "train.parameters"}
    | environment_cases.CHANGES
    | {
        "environment.function": "good=environment_cases:Echo, bad=environment_cases:Broken",
        "rewards.correctness.function": "tiny_run:rare",
        "rewards.format.function": "qerl_jax.rewards.functions:environment_reward",
        "eval.problems": 8,
        "checkpoint.every": 1,
        "log.completions": 16,
    }
)
SERVES = TALKS | {
    "environment.function": "",
    "environment.agent": "agent_functions:talks",
    "environment.turn_tokens": 5,
    "steps": 4,
    "checkpoint.every": 2,
    "eval.every": 4,
}
ROWS = 8  # completions that each of two processes scores in a step
EVALUATED = 2  # and in an evaluation, at most
LOST_SECONDS = 60


def free_port():
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


class Started:
    """Processes of one run, and what they said."""

    def __init__(self, command, environments, folder):
        port = free_port()
        self.processes, self.files = [], []
        for number, environment in enumerate(environments):
            place = {
                "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
                "JAX_NUM_PROCESSES": str(len(environments)),
                "JAX_PROCESS_ID": str(number),
                "JAX_PLATFORMS": "cpu",
            }
            self.files.append(folder / f"said-{port}-{number}")
            with self.files[-1].open("w") as file:
                self.processes.append(
                    subprocess.Popen(
                        command(number),
                        env=environment | place,
                        cwd=folder,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                    )
                )

    def wait(self, seconds=LOST_SECONDS):
        """The exit codes."""
        ends = time.monotonic() + seconds
        try:
            return [process.wait(ends - time.monotonic()) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()

    def said(self, number):
        return self.files[number].read_text()

    def errors(self, number):
        return [line for line in self.said(number).splitlines() if line.startswith("error: ")]

    def until(self, happened):
        ends = time.monotonic() + 120
        while not happened():
            assert time.monotonic() < ends, [self.said(0), self.said(1)]
            assert all(p.poll() is None for p in self.processes), [self.said(0), self.said(1)]
            time.sleep(0.02)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Starts runs of two processes."""
    folder = tmp_path_factory.mktemp("processes")
    tiny = tiny_run.write_tiny(folder, folder / "cache", num_layers=1)
    file = tiny.config_file(folder / "config.py", CHANGES, sketches=True)
    pause = folder / "pause"

    def start(workdir, at=0, *flags):
        """Starts both processes; process 1 waits in a call of the reward where `at` is given."""
        environments = [tiny.environment(), tiny.environment()]
        environments[1]["TINY_RUN_PAUSE"] = f"{at}:{pause}"
        command = [
            *(sys.executable, "-m", "experiments.grpo_gsm8k", f"--config={file}"),
            *("--config.reward_time_limit=0", f"--workdir={workdir}", *flags),
        ]
        return Started(lambda number: command, environments, folder)

    return types.SimpleNamespace(tiny=tiny, folder=folder, pause=pause, start=start)


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """Starts two processes of `processes_cases`."""

    def start(case, *flags):
        script = pathlib.Path(__file__).with_name("processes_cases.py")
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        folder = tmp_path_factory.mktemp("cases")
        return Started(
            lambda number: [sys.executable, str(script), case, *flags], [environment] * 2, folder
        )

    return start


@pytest.fixture(scope="module")
def aborted(cases):
    """Processes of which one aborts: the other one waits for it for a while, as others run."""
    return cases("aborts")


@pytest.fixture(scope="module")
def trained(pair, aborted):
    """A run of one process with one device; the same with two processes, stopped."""
    # In step 2, which ends or is taken again; the signal alone saves.
    stopped = pair.start("two", EVALUATED + ROWS + 3, f"--config.checkpoint.every={STEPS}")
    alone = pair.tiny.config(CHANGES | {"mesh.data": 1, "reward_time_limit": 0.0})
    train(alone, workdir=pair.folder / "one")
    stopped.until(pair.pause.exists)
    stopped.processes[1].send_signal(signal.SIGUSR1)
    pair.pause.unlink()
    stopped_codes = stopped.wait()
    saved = sorted(path.name for path in (pair.folder / "two/checkpoints").glob("*"))
    ended = pair.start("two")
    return {
        "folder": pair.folder,
        "stopped": (stopped, stopped_codes, saved),
        "ended": (ended, ended.wait(120)),
    }


@pytest.mark.slow  # 40 s
def test_a_run_that_loses_a_process_ends_with_a_line_that_names_it_and_goes_on(pair):
    lost = pair.start("lost", EVALUATED + ROWS + 3)  # in step 2
    lost.until(lambda: pair.pause.exists() and (pair.folder / "lost/checkpoints/1").exists())
    lost.processes[1].send_signal(signal.SIGKILL)
    assert lost.wait() == [1, -signal.SIGKILL]
    pair.pause.unlink()
    (line,) = lost.errors(0)
    assert line.startswith(f"error: process 1 on {socket.gethostname()} is lost, which ends the ")
    again = pair.start("lost")
    assert again.wait(120) == [0, 0]
    assert "resuming after step 1\n" in again.said(0)


@pytest.mark.slow  # 60 s with the others of these processes
def test_a_signal_to_one_process_saves_the_same_step_in_all(trained):
    stopped, codes, saved = trained["stopped"]
    assert codes == [128 + signal.SIGUSR1] * 2
    assert f"saved after step {saved[-1]}; the same command continues: " in stopped.said(0)
    assert saved in (["1"], ["2"])
    assert "SIGUSR1: saving and stopping" in stopped.said(1)


@pytest.mark.slow  # 60 s with the others of these processes
def test_two_processes_train_as_one(trained):
    ended, codes = trained["ended"]
    assert codes == [0, 0], ended.said(1)
    last = int(trained["stopped"][2][-1])
    assert f"resuming after step {last}\n" in ended.said(0)
    one, two = (trained["folder"] / name for name in ("one", "two"))
    rows = tiny_run.results(one), tiny_run.results(two)
    assert [row["step"] for row in rows[1]] == list(range(1, STEPS + 1))
    for alone, ours in zip(*rows, strict=True):
        assert alone.keys() == ours.keys()
        for name, value in alone.items():
            np.testing.assert_allclose(ours[name], value, 1e-5, 5e-6, err_msg=name)
    compiled = [row["compiled_programs"] for row in read_steps(two / "metrics.jsonl")]
    # The first start began with step 1, and the second one with the step after the last.
    assert [compiled[step] for step in range(STEPS) if step not in (0, last)] == [0]
    assert tiny_run.evaluations(two) == tiny_run.evaluations(one)
    completions = [(run / "completions.jsonl").read_text() for run in (one, two)]
    assert completions[0].count("\n") == completions[1].count("\n") == 2 * STEPS


@pytest.mark.slow  # 60 s with the others of these processes
def test_one_process_writes_and_speaks(trained):
    ended, _ = trained["ended"]
    assert f"step {STEPS}/{STEPS}" in ended.said(0)
    assert "step" not in ended.said(1)


@pytest.mark.slow  # 60 s
def test_two_processes_that_cut_weights_train_as_one_on_the_same_mesh(tmp_path):
    """Each of two processes has a group of two devices, between which weights in bf16 are cut."""
    tiny = tiny_run.write_tiny(tmp_path, tmp_path / "cache", num_layers=1, mlp_dim=64)
    mesh = {"mesh.data": 2, "mesh.tensor": 2, "model.format": "bf16"}
    file = tiny.config_file(tmp_path / "config.py", CHANGES | {"steps": 2, "eval.every": 2} | mesh)
    command = [
        *(sys.executable, "-m", "experiments.grpo_gsm8k", f"--config={file}"),
        "--config.reward_time_limit=0",
    ]

    def environment(devices):
        flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
        return tiny.environment() | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}

    alone = [*command, "--workdir=one"]
    subprocess.run(alone, env=environment(4), cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    one, two = tmp_path / "one", tmp_path / "two"
    for resumed in (False, True):
        if resumed:
            shutil.rmtree(two / "checkpoints/2")
        started = Started(lambda _: [*command, "--workdir=two"], [environment(2)] * 2, tmp_path)
        assert started.wait(300) == [0, 0], started.said(0) + started.said(1)
        assert ("resuming after step 1\n" in started.said(0)) == resumed
    for expected, found in zip(tiny_run.results(one), tiny_run.results(two), strict=True):
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, 1e-5, err_msg=name)
    assert tiny_run.evaluations(two) == tiny_run.evaluations(one)
    adapters = [load_file(run / "adapter/adapter_model.safetensors") for run in (one, two)]
    assert adapters[0].keys() == adapters[1].keys()
    for name, value in adapters[0].items():
        np.testing.assert_allclose(adapters[1][name], value, 1e-4, 1e-6, err_msg=name)


@pytest.fixture(scope="module")
def talkers(pair, tmp_path_factory):
    """A run of one device that talks to environments; the same with two processes, killed."""
    folder = tmp_path_factory.mktemp("talkers")
    tiny = dataclasses.replace(
        pair.tiny, model=folder / "model", problems=folder / "problems.jsonl"
    )
    shutil.copytree(pair.tiny.model, tiny.model)
    tiny_checkpoints.write_tokenizer(tiny.model, chat_template=environment_cases.TEMPLATE)
    problems = [
        {"question": f"t{n} t{n // 7}", "environment": "bad" if n % 4 == 1 else "good"}
        for n in range(24)
    ]
    tiny.problems.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    file = tiny.config_file(folder / "config.py", TALKS, sketches=True)
    environment = tiny.environment() | {"TALKERS": str(folder)}
    # In step 2: an evaluation and a step of process 1 score 12 rows at most.
    paused = environment | {"TINY_RUN_PAUSE": f"13:{folder / 'pause'}"}
    command = [
        *(sys.executable, "-m", "experiments.grpo_gsm8k", f"--config={file}"),
        *("--config.reward_time_limit=0", "--workdir=two"),
    ]
    killed = Started(lambda _: command, [environment, paused], folder)
    train(tiny.config(TALKS | {"mesh.data": 1}), workdir=folder / "one")
    killed.until(lambda: (folder / "pause").exists() and (folder / "two/checkpoints/1").exists())
    killed.processes[1].send_signal(signal.SIGKILL)
    codes = killed.wait()
    (folder / "pause").unlink()
    ended = Started(lambda _: command, [environment] * 2, folder)
    return folder, codes, ended, ended.wait(120)


@pytest.mark.slow  # 60 s
def test_two_processes_talk_to_environments_as_one(talkers):
    folder, killed, ended, codes = talkers
    assert (killed, codes) == ([1, -signal.SIGKILL], [0, 0]), ended.said(1)
    one, two = folder / "one", folder / "two"
    times = "rollout_live_share", "environment/idle_share", "environment/waiting_seconds"
    for alone, ours in zip(tiny_run.results(one), tiny_run.results(two), strict=True):
        assert alone.keys() == ours.keys()
        for name in alone.keys() - set(times):
            np.testing.assert_allclose(ours[name], alone[name], 1e-5, 5e-6, err_msg=name)
    assert tiny_run.evaluations(two) == tiny_run.evaluations(one)
    for rows in zip(*(read_jsonl(run / "completions.jsonl") for run in (one, two)), strict=True):
        texts = [[row[name] for name in ("prompt", "conversation", "ending")] for row in rows]
        assert texts[0] == texts[1]


@pytest.mark.slow  # 60 s
def test_two_processes_serve_agents_as_one(pair, tmp_path):
    """Each has a server; a step whose sessions were scored is not sampled again after a kill."""
    tiny = dataclasses.replace(pair.tiny, model=tmp_path / "model")
    shutil.copytree(pair.tiny.model, tiny.model)
    tiny_checkpoints.write_tokenizer(tiny.model, chat_template=environment_cases.TEMPLATE)
    file = tiny.config_file(tmp_path / "config.py", SERVES, sketches=True)
    command = [
        *(sys.executable, "-m", "experiments.grpo_gsm8k", f"--config={file}", "--workdir=two")
    ]
    environments = [tiny.environment()] * 2
    killed = Started(lambda _: command, environments, tmp_path)
    one, two = tmp_path / "one", tmp_path / "two"
    train(tiny.config(SERVES | {"mesh.data": 1}), workdir=one)
    killed.until((two / "sessions/2.npz").exists)
    killed.processes[1].send_signal(signal.SIGKILL)
    assert killed.wait() == [1, -signal.SIGKILL], killed.said(0)
    ended = Started(lambda _: command, environments, tmp_path)
    assert ended.wait(120) == [0, 0], ended.said(0) + ended.said(1)
    assert re.search(r"sessions are scored and kept: 3(, 4)?;", ended.said(0)), ended.said(0)
    times = "rollout_live_share", "environment/idle_share", "environment/waiting_seconds"
    rows = list(zip(tiny_run.results(one), tiny_run.results(two), strict=True))
    for name in ("environment/further_rows", "environment/failures"):
        assert any(alone[name] for alone, _ in rows)
    for alone, ours in rows:
        assert alone.keys() == ours.keys()
        for name in alone.keys() - set(times):
            np.testing.assert_allclose(ours[name], alone[name], 1e-5, 5e-6, err_msg=name)
    assert tiny_run.evaluations(two) == tiny_run.evaluations(one)


@pytest.mark.slow  # 60 s with the other one of these processes
def test_a_failure_is_counted_once_and_nothing_is_left_of_a_killed_process(talkers):
    folder, _, ended, _ = talkers
    failures = [int(row["environment/failures"]) for row in tiny_run.results(folder / "two")]
    said = re.findall(r"warning: the environment failed in (\d+) of 16 rows: .*", ended.said(0))
    assert said == [str(count) for count in failures[1:] if count]
    assert said
    name = f"TALKERS={folder}".encode()
    files = list(pathlib.Path("/proc").glob("[0-9]*/environ"))
    assert files
    assert not [path for path in files if name in contents(path)]


def contents(path):
    """The bytes of a file of a process, b"" where it has ended or is that of another person."""
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return b""


def test_processes_that_differ_are_refused_and_the_loss_of_the_first_has_a_line(cases):
    started = cases("differs")
    codes = started.wait()
    host = socket.gethostname()
    for number in (0, 1):
        assert (
            f"process 0 on {host} and process 1 on {host} differ: optimizer.learning_rate is 1e-05 "
            "and 2e-05; start all of them with the same command, versions and devices\n"
        ) in started.said(number)
    assert codes == [-signal.SIGABRT, 1]
    (line,) = started.errors(1)
    assert line.startswith(f"error: process 0 on {socket.gethostname()} is lost, which ends ")


@pytest.mark.slow  # 60 s with the others of these processes
def test_a_lost_process_ends_the_others_with_a_line_that_names_it(aborted):
    assert aborted.wait() == [1, -signal.SIGABRT]
    (line,) = aborted.errors(0)
    assert line.startswith(f"error: process 1 on {socket.gethostname()} is lost, which ends the ")


@pytest.mark.parametrize(
    ("answer", "is_lost"), [(b"settings", False), (b"", True), (None, True)], ids=str
)
def test_the_first_process_is_lost_unless_it_answers(monkeypatch, answer, is_lost):
    """With None it says nothing, as a frozen process, for which the kernel still connects."""
    monkeypatch.setattr(group, "_ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        processes = Processes(address=f"127.0.0.1:{port}")

        def serve():
            connection, _ = server.accept()
            if answer is not None:
                connection.sendall(answer)
                connection.close()
            kept.append(connection)

        kept = []
        thread = threading.Thread(target=serve)
        thread.start()
        line = processes.why_aborted()
        thread.join()
        for connection in kept:
            connection.close()
    assert (line is not None) == is_lost
    assert processes.why_aborted().startswith("error: process 0 is lost, ")  # It has ended.


@pytest.mark.slow  # 30 s
@pytest.mark.parametrize("frozen", [0, 1])
def test_a_process_that_no_longer_answers_ends_the_others_and_ends_once_it_does(cases, frozen):
    """As where its host has no memory: the kernel still accepts connections for it."""
    started = cases("sleeps")
    started.until(lambda: all(f"connected {number}\n" in started.said(number) for number in (0, 1)))
    started.processes[frozen].send_signal(signal.SIGSTOP)
    other = 1 - frozen
    assert started.processes[other].wait(LOST_SECONDS) == 1
    (line,) = started.errors(other)
    host = socket.gethostname()
    assert line.startswith(f"error: process {frozen} on {host} is lost, which ends the run; ")
    started.processes[frozen].send_signal(signal.SIGCONT)
    assert started.wait() == [1, 1]
    (line,) = started.errors(frozen)
    ends = f"{other} on {host} is lost", f"{frozen} on {host} was silent for .* s, and then lost"
    assert re.match(f"error: process ({'|'.join(ends)}), which ends the run; ", line)


@pytest.mark.slow  # 10 s
def test_an_error_of_one_process_ends_the_others(cases):
    started = cases("fails")
    assert started.wait() == [1, 1]
    (line,) = started.errors(0)
    assert line.endswith("failed, which ends the run: the device is out of memory")


@pytest.mark.slow  # 10 s
def test_a_measured_exchange_has_the_bytes_that_process_0_hands_out(tmp_path):
    path = tmp_path / "exchange.json"
    command = [sys.executable, "-m", "benchmarks.exchange", "--processes=2", "--megabytes=4"]
    done = subprocess.run(
        [*command, f"--out={path}"], cwd=step.__file__.rpartition("/benchmarks/")[0], check=True,
        stdout=subprocess.PIPE, text=True, timeout=120,
    )  # fmt: skip
    (row,) = json.loads(path.read_text())["rows"]
    # Each of two processes reads the half of the other.
    assert row["mb_per_second"] == pytest.approx(4 / row["seconds"])
    (line,) = [line for line in done.stdout.splitlines() if "[Gloo]" not in line]
    assert line.startswith("processes=2 megabytes=4: ")


@pytest.mark.slow  # 25 s
def test_a_measured_step_of_two_processes_has_one_row(cases, tmp_path):
    path = tmp_path / "step.json"
    old = dict.fromkeys(step.KEYS, 0) | {"processes": 1, "devices": 1, "commit": ""}
    old |= dict.fromkeys(("model", "format", "recompute", "mesh", "device"), "")
    path.write_text(json.dumps({"rows": [old]}))
    step.merge(path, old | {"new": True})
    step.merge(path, old | {"processes": 2})
    started = cases("measures", f"--out={path}")
    assert started.wait(180) == [0, 0], started.said(0) + started.said(1)
    rows = json.loads(path.read_text())["rows"]
    assert [row["processes"] for row in rows if not row["model"]] == [1, 2]
    (row,) = (row for row in rows if row["model"])
    assert (row["processes"], row["devices"], row["batch"]) == (2, 2, 4)
    assert row["mesh"] == "data=2,tensor=1"
    # A prompt of 5 tokens and 8 new ones for each of the 4 completions of both processes.
    assert row["update_tokens_per_s"] == pytest.approx(4 * 13 / row["update_s"])
    assert 0 < row["rollout_s"] < row["step_s"]
    (line,) = (line for line in started.said(0).splitlines() if "samples_per_s" in line)
    assert line.startswith("model=qwen2.5-1.5b format=bf16 batch=4 prompt=5 new_tokens=8 ")
    assert "samples_per_s" not in started.said(1)


@pytest.mark.slow  # 10 s
def test_a_measured_mesh_has_all_devices_of_several_processes(cases, tmp_path):
    path = tmp_path / "step.json"
    started = cases("measures", f"--out={path}", "--mesh=data=4")
    assert started.wait() in ([2, 2], [1, 2], [2, 1])  # The first to fail may end the other.
    for number in (0, 1):
        assert (
            "--mesh=data=4,tensor=1 has 4 devices, the 2 processes have 2: every mesh of several "
            "processes has all of their devices\n"
        ) in started.said(number)
    assert not path.exists()


@pytest.mark.slow  # 10 s
def test_a_checkpoint_that_one_process_cannot_read_is_set_aside_by_all(cases, tmp_path):
    folder = tmp_path / "checkpoints"
    started = cases("damaged", str(folder))
    assert started.wait() == [0, 0], started.said(0) + started.said(1)
    for number in (0, 1):
        assert f"step 1: {[1.0] * 8}\n" in started.said(number)
    warning = "WARNING: the checkpoint of step 2 is damaged (process 1: its arrays do not match "
    assert started.said(0).count(warning) == 1
    assert warning not in started.said(1)
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2", "damaged-2"]


def test_a_share_may_take_longer_to_arrive_than_a_look():
    """The client of JAX gives a value up that has not arrived when the time is over."""

    class Slow:
        def __init__(self):
            self.values, self.deleted, self.asked = {}, [], []

        def key_value_set(self, key, value):
            self.values[key] = value

        key_value_set_bytes = key_value_set

        def blocking_key_value_get(self, key, milliseconds):
            """Another process gives what this one gives, after two looks."""
            self.asked.append(key)
            if self.asked.count(key) < 3:
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: timed out")
            return self.values[key.replace("/1/is", "/0/is")]

        def blocking_key_value_get_bytes(self, key, milliseconds):
            if milliseconds < 1000 * LOST_SECONDS:
                raise AssertionError(f"{key}: has not arrived after {milliseconds} ms")
            return self.values[key.replace("/1/share", "/0/share")]

        def key_value_delete(self, key):
            self.deleted.append(key)

    processes = Processes()
    processes.count, processes._client = 2, Slow()
    for value in (7, 8):
        shares = processes.exchange({"x": np.array([value])})
        assert [share["x"].tolist() for share in shares] == [[value], [value]]
    assert processes._client.deleted == ["exchange/0/0"]


def test_a_line_about_an_end_has_the_command(monkeypatch):
    processes = Processes()
    processes.names = [f"process {number} on node" for number in range(4)]
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "x", "--workdir=my run"])
    ends = "; the same command in all processes continues from the last checkpoint: "
    ends += "python -m x '--workdir=my run'"
    assert processes._loss_error([2, 3]).endswith(f"lost, which ends the run{ends}")
    assert processes.with_command("no memory") == "no memory"  # A refused start is not repeated.
    processes.has_checkpoint = True
    assert processes.with_command("no memory") == f"no memory{ends}"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(errno.ENOSPC, "full", "run/a"), "no disk space: run/a; free some and run the "),
        (OSError(errno.EDQUOT, "quota"), "no disk space: [Errno 122] quota; free some"),
        (UserError("no reward"), "no reward"),
        (OSError(errno.EIO, "broken", "run/a"), None),
        (ValueError("a bug"), None),
    ],
)
def test_an_error_of_a_process_names_the_command_where_the_user_has_a_remedy(
    monkeypatch, error, text
):
    """Other errors stay as they are: a bug has a traceback."""

    class Connected(Processes):
        def begin(self):
            self.has_checkpoint = True

        def fail(self, error):
            pass

    monkeypatch.setattr(launch, "read_rank", lambda *_, **__: Rank("node1:99", 1, 0))
    monkeypatch.setattr(launch, "_initialize", lambda _: None)
    monkeypatch.setattr(launch, "Processes", lambda *_: Connected())
    with (
        pytest.raises(type(error) if text is None else UserError) as raised,
        launch.connect(devices=4),
    ):
        raise error
    if text is None:
        assert raised.value is error
    else:
        assert str(raised.value).startswith(text)
        assert str(raised.value).endswith(f" checkpoint: {shlex.join(sys.orig_argv)}")


PLAIN = {
    "JAX_COORDINATOR_ADDRESS": "node1:1234",
    "JAX_NUM_PROCESSES": "4",
    "JAX_PROCESS_ID": "3",
}
SLURM = {
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NODELIST": "node[07-12,15],gpu1",
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_ID": "2",
}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, None),
        (PLAIN, Rank("node1:1234", 4, 3)),
        (SLURM, Rank("node07:61443", 2, 1)),
        (SLURM | PLAIN, Rank("node1:1234", 4, 3)),
        (SLURM | {"JAX_NUM_PROCESSES": "1"}, None),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
        (SLURM | {"SLURM_STEP_NODELIST": "a-b7,a-b9"}, Rank("a-b7:61443", 2, 1)),
        (SLURM | {"SLURM_STEP_NODELIST": "gpu[3,5]"}, Rank("gpu3:61443", 2, 1)),
        (SLURM | {"SLURM_STEP_NODELIST": "node[1-2,4]-ib"}, Rank("node1-ib:61443", 2, 1)),
        (SLURM | {"SLURM_STEP_NODELIST": "r[1-2]n[3-4]"}, Rank("r1n3:61443", 2, 1)),
        (SLURM | {"SLURM_JOB_ID": str(2**31 + 4097)}, Rank("node07:61443", 2, 1)),  # a federation
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, None),  # a batch script
    ],
)
def test_the_environment_names_the_processes(environment, place):
    assert read_rank(environment, devices=4) == place


def test_the_environment_lists_the_devices_of_a_process():
    assert local_devices({}) == []
    assert local_devices({"JAX_LOCAL_DEVICE_IDS": "0,3"}) == [0, 3]
    with pytest.raises(UserError, match="JAX_LOCAL_DEVICE_IDS=all: it must be a whole number"):
        local_devices({"JAX_LOCAL_DEVICE_IDS": "all"})


def test_runs_on_one_device_do_not_connect_under_slurm():
    assert read_rank(SLURM, devices=1) is None


@pytest.mark.parametrize(
    ("changes", "devices", "message"),
    [
        ({"JAX_PROCESS_ID": ""}, 4, "JAX_NUM_PROCESSES=4, .* without JAX_PROCESS_ID: "),
        ({"JAX_PROCESS_ID": "4"}, 4, "process 4 of 4 processes: .* from 0"),
        ({"JAX_PROCESS_ID": "-1"}, 4, "JAX_PROCESS_ID=-1: it must be a whole number"),
        ({"JAX_COORDINATOR_ADDRESS": "node1"}, 4, "=node1: it must be HOST:PORT"),
        ({"JAX_COORDINATOR_ADDRESS": "node1:0"}, 4, "=node1:0: .* a port from 1 to 65535"),
        ({"JAX_COORDINATOR_ADDRESS": "node1:99999"}, 4, "=node1:99999: .* a port from 1"),
        ({"JAX_COORDINATOR_ADDRESS": "node1:\u0663"}, 4, "a port from 1 to 65535"),
        ({}, 1, "JAX_NUM_PROCESSES=4 with mesh.data=1 .*: pass --config.mesh.data"),
    ],
)
def test_an_environment_that_is_wrong_is_refused(changes, devices, message):
    with pytest.raises(UserError, match=message):
        read_rank(PLAIN | changes, devices=devices)


@pytest.mark.parametrize("value", [None, ""])
@pytest.mark.parametrize("name", list(SLURM))
def test_a_variable_that_a_site_lacks_is_named(name, value):
    environment = {key: text for key, text in SLURM.items() if key != name}
    environment |= {} if value is None else {name: value}
    remedy = "set JAX_NUM_PROCESSES, JAX_PROCESS_ID and JAX_COORDINATOR_ADDRESS=HOST:PORT"
    refused(
        f"a SLURM step without {name}, which srun sets: .*{remedy}",
        read_rank,
        environment,
        devices=4,
    )
    assert read_rank(environment, devices=1) is None
    assert read_rank(environment | PLAIN, devices=4) == Rank("node1:1234", 4, 3)


def test_all_variables_that_a_site_lacks_are_named():
    refused(
        "without SLURM_PROCID and SLURM_STEP_NODELIST and SLURM_JOB_ID and SLURM_STEP_ID, which",
        read_rank,
        {"SLURM_STEP_NUM_TASKS": "2"},
        devices=4,
    )


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (name, value, f"{name}={value}: it must be a whole number")
        for name in ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_JOB_ID", "SLURM_STEP_ID")
        for value in ("two", "-1", "1.5", "12345678901", "\u00b2")
    ]
    + [
        ("SLURM_STEP_NODELIST", value, "it must be a list of hosts, such as node")
        for value in (
            ",",
            "[",
            "node[",
            "node[]",
            "node[7",
            "node[a]",
            " ",
            "a b",
            "a]",
            "a:1",
            "\n",
        )
    ]
    + [("SLURM_PROCID", "2", "process 2 of 2 processes: they are numbered from 0")],
)
def test_a_variable_of_slurm_that_is_malformed_is_refused(name, value, message):
    refused(message, read_rank, SLURM | {name: value}, devices=4)


def test_a_mesh_of_all_processes_names_both_numbers():
    devices = [types.SimpleNamespace(process_index=number // 4) for number in range(8)]
    for data, remedy in (
        (2, ", or show each process 1 of its 4 devices"),
        (4, ", or start 1 process instead of 2"),
        (5, ""),
        (9, ""),
    ):
        with pytest.raises(UserError) as refused:
            sharding.make_mesh(data, 1, devices)
        assert str(refused.value) == (
            f"mesh.data={data} x mesh.tensor=1 are {data} devices, and the 2 processes have 8: "
            f"pass mesh.data=8{remedy}"
        )
    with pytest.raises(
        UserError, match=r"mesh.tensor=8 does not divide the 4 devices of each proc"
    ):
        sharding.make_mesh(1, 8, devices)


def test_a_folder_that_another_process_does_not_see_is_refused(tmp_path, monkeypatch):
    class Blind(Processes):
        """Process 1 of two, on a host without the folder."""

        def exchange_json(self, value):
            elsewhere = {"mark": str(tmp_path / "gone/run/lock.1"), "schedule_steps": 1}
            return [elsewhere, None] if value is None else [True, value]

    monkeypatch.setattr(folder_lib, "_SEEN_SECONDS", 0.0)
    processes = Blind()
    processes.index, processes.count = 1, 2
    processes.names = ["process 0 on node1", "process 1 on node2"]
    with (
        pytest.raises(UserError, match=r"/run of process 0 on node1 is not seen by process 1 on"),
        folder_lib.open_run_together(None, None, processes),
    ):
        pass


def test_the_mark_of_a_killed_start_does_not_stay(tmp_path):
    """Process 0 of two, and then a run of one process, open the folder of a killed start."""

    class First(Processes):
        def exchange_json(self, value):
            self.seen = sorted(path.name for path in folder.glob("lock.*"))
            return [value, True]

    folder, stale, other = tmp_path / "run", "lock.0123456789abcdef", "lock.txt"
    processes = First()
    processes.count = 2
    config = get_config()
    with folder_lib.open_run_together(folder, config, processes):
        assert sorted(path.name for path in folder.iterdir()) == ["config.json", "lock"]
        (folder / stale).touch()
        (folder / other).touch()
        # A live mark stays: the start that finds the run locked changes nothing.
        command = [sys.executable, "-c", _OPEN, str(folder)]
        refused = subprocess.run(command, capture_output=True, text=True)
        assert "is in use by process" in refused.stderr
        assert (folder / stale).exists()
    for processes.count in (2, 1):
        with folder_lib.open_run_together(folder, config, processes):
            assert sorted(path.name for path in folder.glob("lock.*")) == [other]
        assert stale not in processes.seen
        (folder / stale).touch()


_OPEN = """
import sys
from qerl_jax.config.experiments.grpo_gsm8k import get_config
from qerl_jax.processes.folder import open_run_together
from qerl_jax.processes.group import ALONE
with open_run_together(sys.argv[1], get_config(), ALONE):
    pass
"""


def test_a_start_that_fails_leaves_neither_mark_nor_folder(tmp_path):
    class Failing(Processes):
        """Process 0 of two; process 1 fails before it looks for the folder."""

        def exchange_json(self, value):
            if value is True:
                raise StoppedError(signal.SIGTERM)
            return [value, None]

    processes = Failing()
    processes.count = 2
    with (
        pytest.raises(StoppedError),
        folder_lib.open_run_together(tmp_path / "run", get_config(), processes),
    ):
        pass
    assert not (tmp_path / "run").exists()


@pytest.mark.slow  # 40 s: two processes that compile
def test_one_of_two_processes_calibrates_the_base(tmp_path):
    tiny = tiny_run.write_tiny(tmp_path, tmp_path / "programs", num_layers=1)
    changes = {"steps": 1, "mesh.data": 2, "eval.every": 0, "model.calibration": "gptq"}
    file = tiny.config_file(tmp_path / "config.py", changes)
    environment = tiny.environment() | {"XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "experiments.grpo_gsm8k", f"--config={file}", "--workdir=run"]
    started = Started(lambda _: command, [environment] * 2, tmp_path)
    assert started.wait(300) == [0, 0], [started.said(0), started.said(1)]
    assert len(list((tmp_path / "qerl_jax" / "calibrated").glob("*/calibration.json"))) == 1
    assert "calibration" in json.loads((tmp_path / "run" / "config.json").read_text())
