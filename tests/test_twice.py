"""Each public function that opens files, and each command, twice in a process and after Ctrl-C.

What a call leaves in the process is what it found: handlers of signals, settings of JAX and its
cache, the environment, standard output, locks, and no open file in its folders. That holds for a
call that is interrupted as well, and the next one gives what the first one gave.
"""

import argparse
import contextlib
import json
import os
import pathlib
import signal
import sys
import threading

import jax
import numpy as np
import pytest
import tiny_run
from finished_run import write_run

import qerl_jax
from qerl_jax.commands import quantize
from qerl_jax.compile import program_cache
from qerl_jax.compile.run_cache import set_cache_folder
from qerl_jax.evaluation.sample import SampleConfig, sample
from qerl_jax.run.jobs import Job, run_jobs
from qerl_jax.system import locks
from qerl_jax.system.signals import StoppedError
from qerl_jax.weights import chat_template

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
PROBLEMS = [{"question": f"t{n} t{n + 1}", "answer": "1"} for n in range(24)]
GREEDY = qerl_jax.SamplingConfig(max_new_tokens=2, temperature=0.0)


def left_in_process(folder):
    """What a call could change in the process, with the open files of a folder."""
    names = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    files = [os.readlink(name) for name in names if os.path.islink(name)]
    return {
        "signals": [signal.getsignal(number) for number in SIGNALS],
        "settings of jax": dict(jax.config.values),
        "cache of jax": program_cache._JAX.get_file_cache,
        "current": (program_cache._current_cache.get(), chat_template._now.get()),
        "replaced": list(program_cache._replaced),
        "environment": dict(os.environ),
        "locks": dict(locks._held),
        "streams": (sys.stdout, sys.stderr, os.getcwd()),
        "files": [file for file in files if file.startswith(str(folder))],
    }


def count_calls(call, limit=None):
    """Makes a call; returns its result and how many functions of the package it called here.

    With a limit SIGINT arrives when as many are called.
    """
    root, count = str(pathlib.Path(qerl_jax.__file__).parent), 0

    def watch(frame, event, _):
        nonlocal count
        if event == "call" and frame.f_code.co_filename.startswith(root):
            count += 1
            if count == limit:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)

    sys.setprofile(watch)
    try:
        return call(), count
    finally:
        sys.setprofile(None)


def train(tiny, run, out):
    config = tiny.config({"steps": 2, "eval.every": 0, "checkpoint.every": 1})
    out = qerl_jax.train(config, workdir=out, problems=PROBLEMS)
    return tiny_run.results(out), (out / "adapter" / "adapter_model.safetensors").read_bytes()


def take_step(tiny, run, out):
    session = qerl_jax.open_session(tiny.config({"eval.every": 0}), problems=PROBLEMS)
    session, result = qerl_jax.train_step(session)
    return {k: v for k, v in result.metrics.items() if not k.endswith(("seconds", "per_second"))}


def evaluate(tiny, run, out):
    settings = {"source": str(run), "dtype": "float32", "limit": 4, "samples": 1}
    (folder,) = qerl_jax.evaluate(qerl_jax.EvaluateConfig(**settings, out=str(out)))
    return json.loads((folder / "results.json").read_text())["tasks"]


def export(tiny, run, out):
    config = qerl_jax.ExportConfig(str(run), "peft", out=str(out), score_problems=0)
    qerl_jax.export_policy(config)
    return (out / "adapter_model.safetensors").read_bytes()


def complete(tiny, run, out):
    policy = qerl_jax.open_policy(str(run), dtype="float32")
    return qerl_jax.complete(policy.base, "t1 t2", sampling=GREEDY, lora=policy.lora)


def answer(tiny, run, out):
    sample(SampleConfig(str(run), "t1 t2", max_new_tokens=2))


def show(tiny, run, out):
    return qerl_jax.show_runs(run, html=f"{out}.html").read_text()


def score(tiny, run, out):
    lists = ["a"] * 2, ["1", "2"], ["1"] * 2, [1] * 2, [True] * 2
    rewards = qerl_jax.score(qerl_jax.numeric_answer, *lists)
    return qerl_jax.group_advantages(rewards.total.reshape(1, 2))


def write_in_four_bits(tiny, run, out):
    texts = {"calibrate": "", "perplexity": "", "windows": None, "width": None}
    model = {"model": str(tiny.model), "out": str(out), "format": "nvfp4"}
    quantize.run(argparse.Namespace(**model, **texts))
    return (out / "model.safetensors").read_bytes()


def plan(tiny, run, out):
    return str(qerl_jax.plan(qerl_jax.get_config("qwen2.5-7b"), card="h100-80gb"))


def sweep(tiny, run, out):
    code = f"import time, pathlib; time.sleep(0.2); pathlib.Path({str(out / 'done')!r}).touch()"
    job = Job(
        name="run",
        title="run 1/1",
        command=["-c", code],
        run=out / "run",
        is_finished=(out / "done").exists,
        progress=lambda: "",
        result=lambda: "",
    )
    return run_jobs([job], out)


CALLS = [
    *(train, take_step, evaluate, export, complete, answer, write_in_four_bits, plan, sweep),
    *(show, score),
]


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    """A run of the user that looks finished."""
    return write_run(tmp_path_factory.mktemp("run") / "run", tiny, own=True)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_twice_and_after_an_interrupt(call, tiny, run, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    found = left_in_process(tmp_path)
    first = call(tiny, run, tmp_path / "first")
    assert left_in_process(tmp_path) == found
    second, calls = count_calls(lambda: call(tiny, run, tmp_path / "second"))
    np.testing.assert_equal(second, first)
    assert left_in_process(tmp_path) == found
    for share in (0.4, 0.8):
        out = tmp_path / f"third-{share}"
        with pytest.raises((KeyboardInterrupt, StoppedError)):
            count_calls(lambda out=out: call(tiny, run, out), limit=max(1, int(calls * share)))
        assert left_in_process(tmp_path) == found
        np.testing.assert_equal(call(tiny, run, out), first)
        assert left_in_process(tmp_path) == found


def test_settings_of_jax_are_those_found_once_the_last_of_two_threads_ends(tmp_path):
    """The second begins while the first lasts, and lasts longer."""
    found = left_in_process(tmp_path)
    begins, ends = threading.Event(), threading.Event()

    @contextlib.contextmanager
    def block(folder):
        with set_cache_folder(folder), program_cache.install(folder, common=None):
            yield

    def second():
        with block(tmp_path / "second"):
            begins.set()
            assert ends.wait(60)
            assert jax.config.jax_compilation_cache_dir == str(tmp_path / "second")

    thread = threading.Thread(target=second)
    with block(tmp_path / "first"):
        thread.start()
        assert begins.wait(60)
    ends.set()
    thread.join()
    assert left_in_process(tmp_path) == found


def test_two_threads_train_in_one_folder(tiny, tmp_path):
    """One of them does; the metrics of the run are its own."""
    outcomes = []

    def go():
        try:
            train(tiny, None, tmp_path / "run")
            outcomes.append("")
        except qerl_jax.UserError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=go) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(bool, outcomes)) == [False, True]
    assert "is in use by another run of this process" in max(outcomes)
    assert [row["step"] for row in tiny_run.results(tmp_path / "run")] == [1, 2]
