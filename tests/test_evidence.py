"""The comparison on GSM8K: its arms, the rows of its runs, its page; the speedrun."""

import argparse
import gzip
import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import (
    claims,
    differences,
    evidence_tables,
    gsm8k,
    gsm8k_arms,
    long_runs,
    pictures,
    speedrun,
    tables,
)
from benchmarks import evidence as page
from benchmarks.gsm8k import RESULTS
from experiments.arms import evidence, evidence_math
from qerl_jax.config.overrides import check_overrides
from qerl_jax.errors import UserError
from qerl_jax.quantization import cache as calibrated
from qerl_jax.run import jobs as processes
from qerl_jax.run.folder import config_dict, flatten
from qerl_jax.run.jobs import Job
from qerl_jax.system.signals import StoppedError
from qerl_jax.training.setup import make_method
from qerl_jax.training.validate import validate
from qerl_jax.weights.peft import WEIGHTS_FILE

DOCS = pathlib.Path(page.__file__).resolve().parents[1] / "docs"
FIELDS = {
    "arm", "seed", "learning_rate", "steps", "completions_per_step", "n", "pass1_start",
    "pass1_end", "ci95", "pass16", "device_minutes", "main",
}  # fmt: skip
ARM = "nvfp4-lora-aqn-kl0.01"


# --- Arms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", evidence.ARMS)
def test_an_arm_differs_only_in_what_it_names(arm):
    config = evidence.get_config(arm)
    validate(config)
    check_overrides(config, evidence.ARMS[arm])
    make_method(config, config.steps)
    fields, common = (
        flatten(config_dict(c)) for c in (config, evidence.get_config("nvfp4-lora-aqn-paper"))
    )
    different = {name for name in fields if fields[name] != common[name]}
    allowed = {*evidence.ARMS[arm], "preset", "optimizer.learning_rate"}
    assert different <= allowed
    assert (config.preset, config.experiment) == (arm, "grpo_gsm8k")
    assert config.eval.problems == 473


def test_the_grid_of_an_arm_has_three_rates_and_a_seed_of_its_own():
    for arm in evidence.ARMS:
        runs = evidence.get_sweep(arm)
        rates = {run["optimizer.learning_rate"] for run in runs}
        assert len(rates) == len(runs) == 3
        assert not {run["seed"] for run in runs} & set(evidence.SEEDS)
        assert evidence.LEARNING_RATES[arm] in rates


@pytest.mark.parametrize("study", evidence.STUDIES)
def test_a_study_has_two_seeds(study):
    config, runs = evidence.get_config(study), evidence.get_sweep(study)
    validate(config)
    settings = [tuple(v for k, v in run.items() if k != "seed") for run in runs]
    assert {settings.count(setting) for setting in settings} == {2}


def test_an_unknown_arm():
    with pytest.raises(UserError, match=r"unknown arm 'fp8'.*bf16-lora.*schedules"):
        evidence.get_config("fp8")


# --- Runs ---------------------------------------------------------------------------------------


def write_evaluation(folder, *, correct, samples=1, finished=True):
    """An evaluation; odd problems have the right form."""
    folder.mkdir(parents=True)
    value = {"value": float(np.mean(correct)), "low": 0.3, "high": 0.5}
    figures = {"problems": len(correct), "samples": samples, "accuracy": value, "finished": 0.75}
    figures |= {"mean_tokens": 200.0, "pass@16": value | {"value": 0.9}}
    figures |= {"pass@64": value | {"value": 0.95}}
    task = {"max_new_tokens": 1024} | (figures if finished else {})
    results = {"tasks": {"gsm8k": task}, "git": {"commit": "a" * 40}, "device": {"kind": "cpu"}}
    results["command"] = "python -m experiments.evaluate /data/runs/x"
    weights = folder.parents[1] / "adapter" / WEIGHTS_FILE
    digest = hashlib.sha256(weights.read_bytes()).hexdigest() if weights.exists() else None
    results["settings"] = {"adapter_sha256": digest}
    (folder / "results.json").write_text(json.dumps(results))
    rows = [
        {"problem": i, "sample": 0, "correct": bool(c), "format": i % 2 == 1}
        for i, c in enumerate(correct)
    ]
    (folder / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_training(run, *, arm=ARM, seed=1, rate=None):
    """A run that has been trained."""
    run.mkdir(parents=True)
    config = evidence.get_config(arm)
    config.seed, config.steps = seed, 4
    if rate is not None:
        config.optimizer.learning_rate = rate
    about = {
        "git": {"commit": "b" * 40},
        "device": {"kind": "NVIDIA H100"},
        "versions": {},
        "command": "python -m experiments.grpo_gsm8k --config.model.source=/data/m.gguf",
        "config": config_dict(config),
    }
    (run / "config.json").write_text(json.dumps(about))
    rows = [
        {
            "step": step,
            "sigma": 0.0 if step < 3 else 0.1,
            "logprob_diff_mean": 0.001 * step,
            "rollout_tokens": 100,
            "step_seconds": 30.0,
            "accuracy": 0.5,
            "entropy": 0.3 if step < 3 else 0.2,
            "reward": 0.1 * step,
            "advantage_zero_groups": 0.25,
            "length": 100.0,
            "noise_kl": 0.01 * (step > 2),
        }
        for step in range(1, 5)
    ]
    rows.insert(0, {"step": 0, "eval_accuracy_before": 0.25, "eval_seconds": 1.0})
    rows.append({"step": 4, "eval_accuracy": 0.5, "eval_seconds": 1.0})
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "summary.json").write_text(json.dumps({"steps": 4, "peak_memory_bytes": 7}))
    (run / "adapter").mkdir()
    (run / "adapter" / WEIGHTS_FILE).write_bytes(b"weights after 4 steps")


def write_run(workdir, *, arm=ARM, seed=1, correct=(1, 1, 0, 1), without=()):
    """A finished run with its evaluations but for some parts."""
    run = workdir / gsm8k.run_name(arm, seed)
    write_training(run, arm=arm, seed=seed)
    for part, folder in gsm8k.evaluation_folders(run, arm).items():
        if part not in without and not folder.exists():
            start = part.startswith("start")
            samples = 64 if part.endswith("samples") else 1
            write_evaluation(folder, correct=(0, 1, 0, 0) if start else correct, samples=samples)
    return run


def test_a_row_by_hand(tmp_path):
    row, about = gsm8k.row_of(write_run(tmp_path))
    assert row.keys() == FIELDS
    assert row == {
        "arm": ARM,
        "seed": 1,
        "learning_rate": evidence.LEARNING_RATES[ARM],
        "steps": 4,
        "completions_per_step": 128,
        "n": 4,
        "pass1_start": 25.0,
        "pass1_end": 75.0,
        "ci95": pytest.approx(10.0),
        "pass16": 90.0,
        "device_minutes": 2.0,
        "main": ARM == evidence.MAIN,
    }
    assert about["command"].endswith("--config.model.source=m.gguf")
    assert about["held_out_accuracy"] == {"0": 25.0, "4": 50.0}
    assert about["largest_mismatch_without_noise"] == 0.002
    end = about["evaluations"]["end"]
    # Problems 1 and 3 have the right form, and both are correct.
    assert end["well_formed"] == {"share": 50.0, "accuracy": 100.0}
    assert end["correct"] == "1101"
    assert "correct" not in about["evaluations"]["samples"]
    assert "/data" not in json.dumps(about)


@pytest.mark.parametrize("part", ["end", "samples", "start"])
def test_a_row_waits_for_its_evaluations(part, tmp_path):
    run = write_run(tmp_path, without=[part])
    assert gsm8k.row_of(run) is None
    folder = gsm8k.evaluation_folders(run, ARM)[part]
    write_evaluation(folder, correct=[1], finished=False)
    assert gsm8k.row_of(run) is None
    assert gsm8k.row_of(tmp_path / "absent-s0") is None


def test_an_evaluation_of_an_earlier_adapter_is_not_finished(tmp_path, monkeypatch):
    """As after `--config.steps=120`, which extends a run that was trained and evaluated."""
    run = write_run(tmp_path)
    assert gsm8k.row_of(run) is not None
    (run / "adapter" / WEIGHTS_FILE).write_bytes(b"weights after 8 steps")
    assert gsm8k.row_of(run) is None
    ran = []
    monkeypatch.setattr(gsm8k, "_run", lambda command, _: ran.append(command[-3:]) or 0)
    gsm8k.run_parts(ARM, 1, arguments(tmp_path, only=["end", "samples", "start"]))
    assert len(ran) == 2


def test_an_adapter_is_read_once_and_may_be_deleted(tmp_path, monkeypatch):
    run = write_run(tmp_path)
    folder, weights = run / "evaluations" / "end", run / "adapter" / WEIGHTS_FILE
    weights.write_bytes(b"weights after 8 steps")
    assert gsm8k.finished_evaluation(folder) is None
    with monkeypatch.context() as patch:
        patch.setattr(gsm8k.hashlib, "file_digest", None)
        patch.setattr(gsm8k.hashlib, "sha256", None)
        assert gsm8k.finished_evaluation(folder) is None
    shutil.rmtree(run / "adapter")
    assert gsm8k.finished_evaluation(folder) is not None
    assert gsm8k.row_of(run) is not None


def test_answers_without_the_right_form_have_no_accuracy():
    rows = [{"correct": True, "format": False}, {"correct": True, "format": None}]
    assert gsm8k.well_formed(rows) == {"share": 0.0, "accuracy": None}


def test_rows_are_added_once_and_in_the_order_of_the_arms(tmp_path, monkeypatch):
    results, runs = tmp_path / "results", tmp_path / "runs"
    write_run(runs, seed=1)
    assert gsm8k.collect(runs, results) == [f"{ARM}-s1"]
    before = (results / "gsm8k" / f"{ARM}-s1.jsonl.gz").read_bytes()
    (runs / f"{ARM}-s1" / "metrics.jsonl").unlink()  # A row that exists is not made again.
    write_run(runs, arm="nvfp4-lora", seed=0)
    monkeypatch.setattr(evidence, "MAIN", ARM)
    assert gsm8k.collect(runs, results) == ["nvfp4-lora-s0"]
    rows = gsm8k.read_results(results)["rows"]
    assert [(row["arm"], row["main"]) for row in rows] == [("nvfp4-lora", False), (ARM, True)]
    assert (results / "gsm8k" / f"{ARM}-s1.jsonl.gz").read_bytes() == before
    steps = differences.read_metrics(results / "gsm8k" / "nvfp4-lora-s0.jsonl.gz")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    monkeypatch.setattr(gsm8k, "write_json", None)
    assert gsm8k.collect(runs, results) == []


def test_a_grid_by_hand(tmp_path):
    sweep, results = tmp_path / "sweep", tmp_path / "results"
    with pytest.raises(UserError, match=r"finished runs of \[\]"):
        gsm8k.add_grid(sweep, results)
    for rate in (1e-4, 2e-5):
        run = write_run(sweep / str(rate))
        run = run.rename(sweep / f"run-{rate}")
        saved = json.loads((run / "config.json").read_text())
        saved["config"]["steps"] = 4
        saved["config"]["optimizer"]["learning_rate"] = rate
        (run / "config.json").write_text(json.dumps(saved))
    assert gsm8k.add_grid(sweep, results) == ARM
    rows = gsm8k.read_results(results)["grids"][ARM]
    assert [row["learning_rate"] for row in rows] == [2e-5, 1e-4]
    assert {(row["held_out_start"], row["held_out_end"]) for row in rows} == {(25.0, 50.0)}
    table = page.page_parts(gsm8k.read_results(results), results)["evidence"]
    assert f"| `{ARM}` | 2e-05: 50.0, 1e-04: 50.0 | 25.0 | 4 | bbbbbbbb |" in table
    assert table.endswith("No arm has run yet.")


def arguments(tmp_path, **changes):
    given = {"workdir": tmp_path, "model": "m.gguf", "train": "a.jsonl", "test": "b.jsonl"}
    return argparse.Namespace(**given | {"rest": [], "only": list(gsm8k.PARTS)} | changes)


def test_the_commands_of_a_run(tmp_path):
    found = gsm8k.commands(ARM, 2, arguments(tmp_path, rest=["--config.steps=7"]))
    assert tuple(found) == gsm8k.PARTS
    run = tmp_path / f"{ARM}-s2"
    assert found["train"] == [
        *("-m", "experiments.grpo_gsm8k", f"--config=experiments/arms/evidence.py:{ARM}"),
        *("--config.seed=2", "--config.model.source=m.gguf", "--config.data.path=a.jsonl"),
        *("--config.steps=7", f"--workdir={run}"),
    ]
    for part in gsm8k.PARTS[1:]:
        base = part.startswith("start")
        assert found[part][2:4] == [str(run), f"--adapter={'none' if base else 'adapter'}"]
        assert "--data=gsm8k=b.jsonl" in found[part]
        assert ("--samples=64" in found[part]) == part.endswith("samples")
    full = gsm8k.commands("bf16-full", 0, arguments(tmp_path))
    assert full["end"][3] == "--adapter=model"


def test_arms_share_the_start_of_their_weights(tmp_path):
    starts = {}
    for arm in ("bf16-lora", "nf4-lora", "nvfp4-lora", ARM, "nvfp4-rounded-lora"):
        start = gsm8k.commands(arm, 0, arguments(tmp_path))["start"]
        (folder,) = [word.partition("=")[2] for word in start if word.startswith("--out=")]
        starts[arm] = pathlib.Path(folder).relative_to(tmp_path).parts[0]
    assert list(starts.values()) == [
        *("start-bf16", "start-nf4", "start-nvfp4-gptq", "start-nvfp4-gptq", "start-nvfp4-rounded")
    ]


def test_a_row_names_the_calibrated_weights_of_its_run(tmp_path):
    run = write_run(tmp_path)
    assert "calibration" not in gsm8k.row_of(run)[1]
    saved = json.loads((run / "config.json").read_text())
    digest = {"digest": "c" * 64}
    (run / "config.json").write_text(json.dumps(saved | {"calibration": digest}))
    assert gsm8k.row_of(run)[1]["calibration"] == digest
    (tmp_path / "sweep").mkdir()
    run.rename(tmp_path / "sweep" / "lr5e-05")
    saved["config"]["steps"] = 4
    text = json.dumps(saved | {"calibration": digest})
    (tmp_path / "sweep" / "lr5e-05" / "config.json").write_text(text)
    _, (row,) = gsm8k.grid_of(tmp_path / "sweep")
    assert row["calibration"] == digest


def test_finished_parts_are_skipped_and_a_failure_ends_the_rest(tmp_path, monkeypatch):
    write_run(tmp_path, seed=1, without=["samples"])
    ran = []
    monkeypatch.setattr(gsm8k, "_run", lambda command, _: ran.append(command[1]) or len(ran) // 2)
    with pytest.raises(UserError, match=r"samples of .* exit code 1; the same command continues"):
        gsm8k.run_parts(ARM, 1, arguments(tmp_path))
    assert ran == ["experiments.grpo_gsm8k", "experiments.evaluate"]
    gsm8k.run_parts(ARM, 1, arguments(tmp_path, only=["end", "start"]))
    assert len(ran) == 2


SAVES = """
import pathlib, signal, sys, time
def save(*_):
    time.sleep(1.0)
    pathlib.Path(sys.argv[1]).touch()
    sys.exit(130)
signal.signal(signal.SIGINT, save)
print("ready", flush=True)
for _ in range(6000):
    time.sleep(0.01)  # Short: a signal just before a sleep is handled after it.
"""


def test_a_command_may_save_after_ctrl_c(tmp_path):
    """A terminal sends SIGINT to all processes in its foreground, as to this new group."""
    code = (
        "import os, sys; from benchmarks import gsm8k\n"
        "print('code', gsm8k._run(['-c', *sys.argv[1:]], dict(os.environ)))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, SAVES, str(tmp_path / "saved")],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=DOCS.parent,
    )
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate()[0] == "code 130\n"
    assert (tmp_path / "saved").exists()


# --- All arms -----------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(processes, "_POLL_SECONDS", 0.02)


def all_arms(tmp_path, *flags):
    given = [f"--workdir={tmp_path / 'work'}", f"--results={tmp_path / 'results'}", *flags]
    return gsm8k_arms.make_parser().parse_args(given)


def do_work(command, held_out):
    """Writes what a job leaves, by what its command says."""
    flags = dict(flag.lstrip("-").split("=", 1) for flag in command if "=" in flag)
    if "grpo_gsm8k" in command[1]:
        run = pathlib.Path(flags["workdir"])
        arm = flags["config"].rpartition(":")[2]
        rate = float(flags["config.optimizer.learning_rate"])
        write_training(run, arm=arm, seed=int(flags["config.seed"]), rate=rate)
        set_held_out(run, held_out(arm, rate))
    else:
        samples = int(flags.get("samples", 1))
        write_evaluation(pathlib.Path(flags["out"]), correct=(1, 0, 1, 1), samples=samples)


class Ended:
    """A process that has done its work."""

    returncode = 0

    def poll(self):
        return self.returncode

    def kill(self):
        pass

    wait = kill


def set_held_out(run, accuracy):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows[-1]["eval_accuracy"] = accuracy
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def end_at_once(monkeypatch, tmp_path, best):
    """Lets jobs do their work at once, with the best accuracy at these learning rates.

    Returns the list of names and devices of what is started.
    """
    started = []

    def start(job, device, workdir):
        started.append((job.name, device))
        do_work(job.command, lambda arm, rate: 0.6 if rate == best[arm] else 0.5)
        return processes._RunningJob(job, tmp_path / "log", Ended(), 0.0)

    monkeypatch.setattr(processes, "_start", start)
    return started


def test_arms_are_trained_with_the_best_rate_of_their_grids(tmp_path, monkeypatch, quick):
    best = {"bf16-lora": 2e-4, ARM: 1e-4}
    started = end_at_once(monkeypatch, tmp_path, best)
    flags = [f"--arms=bf16-lora,{ARM}", "--seeds=0,1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    gsm8k_arms.run(all_arms(tmp_path, *flags, "--gpus=2"))
    names = [name for name, _ in started]
    assert len(names) == len(set(names)) == 6 + 2 * 2 * 3 + 2 * 2
    assert {device for _, device in started} == {"0", "1"}
    assert all(name.startswith("grid-") for name in names[:6])
    content = gsm8k.read_results(tmp_path / "results")
    assert {arm: len(rows) for arm, rows in content["grids"].items()} == {"bf16-lora": 3, ARM: 3}
    assert {(row["arm"], row["seed"]): row["learning_rate"] for row in content["rows"]} == {
        (arm, seed): rate for arm, rate in best.items() for seed in (0, 1)
    }
    started.clear()
    gsm8k_arms.run(all_arms(tmp_path, *flags))
    assert not started
    gsm8k_arms.run(all_arms(tmp_path, f"--arms={ARM}", "--seeds=2"))
    parts = ("train", "samples", "end")
    assert [name for name, _ in started] == [f"{ARM}-s2-{part}" for part in parts]


def test_no_seeds_run_the_grids_alone(tmp_path, monkeypatch, quick):
    started = end_at_once(monkeypatch, tmp_path, {ARM: 1e-4})
    gsm8k_arms.run(all_arms(tmp_path, f"--arms={ARM}", "--seeds="))
    assert len(started) == 3
    assert all(name.startswith(f"grid-{ARM}") for name, _ in started)
    assert list(gsm8k.read_results(tmp_path / "results")["grids"]) == [ARM]


def test_published_grids_and_rows_are_not_done_again_without_their_folders(
    tmp_path, monkeypatch, quick
):
    started = end_at_once(monkeypatch, tmp_path, {ARM: 1e-4})
    gsm8k_arms.run(all_arms(tmp_path, f"--arms={ARM}", "--seeds=0"))
    shutil.rmtree(tmp_path / "work")
    started.clear()
    gsm8k_arms.run(all_arms(tmp_path, f"--arms={ARM}", "--seeds=0,1"))
    assert [name for name, _ in started] == [
        *(f"{ARM}-s1-{part}" for part in ("train", "samples")),
        *("start-samples-nvfp4-gptq", f"{ARM}-s1-end", "start-nvfp4-gptq"),
    ]
    rows = gsm8k.read_results(tmp_path / "results")["rows"]
    assert [(row["seed"], row["learning_rate"]) for row in rows] == [(0, 1e-4), (1, 1e-4)]


class PowerCutError(Exception):
    """The machine is gone."""


JOB_SECONDS = {"bf16": 166, "nvfp4": 142, "end": 70, "samples": 130, "calibration": 50}


class Machine:
    """Four GPUs whose jobs take as long as on a card, by a clock of its own.

    Attributes:
        now: the time in seconds.
        jobs: name, device, begin and end of each job.
    """

    def __init__(self, monkeypatch, tmp_path, ends_at=float("inf")):
        self.now, self.ends_at, self.calibrated, self.jobs = 0.0, ends_at, None, []
        self.tmp_path = tmp_path
        monkeypatch.setattr(processes, "_start", self.start)
        monkeypatch.setattr(processes, "time", self)

    def sleep(self, seconds):
        self.now += seconds
        if self.now >= self.ends_at:
            raise PowerCutError

    def perf_counter(self):
        return self.now

    def start(self, job, device, workdir):
        end = self.now + self.seconds(job)
        self.jobs.append((job.name, device, self.now, end))
        return processes._RunningJob(job, self.tmp_path / "log", Timed(self, job, end), self.now)

    def seconds(self, job):
        if job.run is None:
            return JOB_SECONDS["samples" if "samples" in job.name else "end"]
        if "bf16" in job.name:
            return JOB_SECONDS["bf16"]
        if self.calibrated is None:  # Others wait for its lock.
            self.calibrated = self.now + JOB_SECONDS["calibration"]
        return max(self.calibrated - self.now, 0) + JOB_SECONDS["nvfp4"]

    def idle(self):
        """GPU-seconds without a job until the last one ends."""
        return 4 * self.now - sum(end - begin for *_, begin, end in self.jobs)


class Timed(Ended):
    """A process whose work is done at some time."""

    def __init__(self, machine, job, end):
        self.machine, self.job, self.end, self.returncode = machine, job, end, None

    def poll(self):
        if self.returncode is None and self.machine.now >= self.end:
            do_work(self.job.command, lambda arm, rate: 0.6 if rate == 1e-4 else 0.5)
            self.returncode = 0
        return self.returncode


@pytest.fixture
def queue(tmp_path, monkeypatch):
    """The arguments of a queue of two arms; that in bf16 has its grid and three of five seeds."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    results = tmp_path / "results"
    content = gsm8k.read_results(RESULTS)
    content["grids"] = {"bf16-lora": content["grids"]["bf16-lora"]}
    content["rows"] = [row for row in content["rows"] if row["arm"] == "bf16-lora"][:3]
    names = {gsm8k.run_name(row["arm"], row["seed"]) for row in content["rows"]}
    content["runs"] = {name: content["runs"][name] for name in names}
    gsm8k.write_json(results / "gsm8k.json", content)
    flags = ["--arms=bf16-lora,nvfp4-lora", "--seeds=0,1,2,3,4", "--gpus=4"]
    return all_arms(tmp_path, *flags)


def test_a_queue_keeps_four_gpus_busy(queue, tmp_path, monkeypatch):
    machine = Machine(monkeypatch, tmp_path)
    gsm8k_arms.run(queue)
    names = [name for name, *_ in machine.jobs]
    # The grid of an arm does not hold up one whose grid is there.
    assert [name for name in names[:4] if "grid" not in name] == ["bf16-lora-s3-train"]
    new = [("bf16-lora", seed) for seed in (3, 4)] + [("nvfp4-lora", seed) for seed in range(5)]
    rows = gsm8k.read_results(queue.results)["rows"]
    assert {(row["arm"], row["seed"]) for row in rows[3:]} == set(new)
    assert len(names) == len(set(names)) == 3 + 3 * len(new) + 4
    assert machine.idle() < 0.06 * 4 * machine.now


def test_a_queue_that_was_killed_continues(queue, tmp_path, monkeypatch):
    first = Machine(monkeypatch, tmp_path, ends_at=560.0)
    with pytest.raises(PowerCutError):
        gsm8k_arms.run(queue)
    content = gsm8k.read_results(queue.results)
    assert "nvfp4-lora" in content["grids"]
    done = {name for name, _, _, end in first.jobs if end < first.now}
    second = Machine(monkeypatch, tmp_path)
    gsm8k_arms.run(queue)
    assert not done & {name for name, *_ in second.jobs}
    rows = gsm8k.read_results(queue.results)["rows"]
    assert [row for row in rows if row["arm"] == "bf16-lora"][:3] == content["rows"][:3]
    assert len(rows) == 10


def test_arms_have_the_best_rates_of_the_published_grids():
    grids = gsm8k.read_results(gsm8k.RESULTS)["grids"]
    assert grids
    best = {arm: gsm8k_arms.best_rate(grid) for arm, grid in grids.items()}
    assert best == {arm: evidence.LEARNING_RATES[arm] for arm in grids}


def test_of_equal_rates_the_lower_one_is_taken():
    grid = [{"learning_rate": rate, "held_out_end": 50.0} for rate in (2e-4, 1e-4, 2e-4)]
    assert gsm8k_arms.best_rate(grid) == 1e-4


def test_a_job_that_fails_is_named_and_the_others_go_on(tmp_path, monkeypatch, quick):
    codes = {"a": "import sys; sys.exit(3)", "b": "print('b ran')", "c": "print('c ran')"}
    codes["idle"] = "print('has not done its work')"
    done = tmp_path / "work" / "logs"

    def jobs(*_):
        for name, code in codes.items():
            works = len(name) == 1
            log = done / f"{name}.log"
            yield Job(name, ["-c", code], lambda log=log, works=works: works and log.exists())

    monkeypatch.setattr(gsm8k_arms, "jobs", jobs)
    with pytest.raises(UserError, match=r"failed: a, idle; see .*logs/NAME.log; the same command"):
        gsm8k_arms.run(all_arms(tmp_path, f"--arms={ARM}"))
    assert [(done / f"{name}.log").read_text() for name in "bc"] == ["b ran\n", "c ran\n"]


def test_a_signal_is_passed_on_to_the_jobs_once(tmp_path, monkeypatch):
    code = (
        "import os, signal, sys, time\n"
        "told = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: told.append(1))\n"
        "os.kill(os.getppid(), signal.SIGTERM)\n"
        "while not told: time.sleep(0.05)\n"
        "time.sleep(1.5)\n"
        "print(len(told))\n"
    )
    monkeypatch.setattr(gsm8k_arms, "jobs", lambda *_: [Job("a", ["-c", code], lambda: False)])
    with pytest.raises(StoppedError):
        gsm8k_arms.run(all_arms(tmp_path, f"--arms={ARM}"))
    assert (tmp_path / "work/logs/a.log").read_text() == "1\n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--arms=fp8"], "unknown arm 'fp8'"),
        ([f"--arms={ARM}", "--seeds=0,9"], r"--seeds=0,9: '9' is none of 0,1,2,3,4"),
        ([f"--arms={ARM}", "--gpus=-1"], r"--gpus=-1"),
    ],
)
def test_wrong_arguments_of_all_arms(tmp_path, flags, message):
    with pytest.raises(UserError, match=message):
        gsm8k_arms.run(all_arms(tmp_path, *flags))


# --- The page -----------------------------------------------------------------------------------


@pytest.fixture
def results(tmp_path):
    """Results of four runs of two arms."""
    runs = tmp_path / "runs"
    for seed, correct in enumerate([(1, 1, 0, 0), (1, 1, 1, 0), (1, 0, 0, 0)]):
        write_run(runs, seed=seed, correct=correct)
    write_run(runs, arm="nvfp4-lora", seed=0, correct=(0, 1, 0, 0))
    gsm8k.collect(runs, tmp_path / "results")
    return tmp_path / "results"


def test_the_tables(results):
    runs = differences.runs_by_arm(gsm8k.read_results(results))
    assert list(runs) == ["nvfp4-lora", ARM]
    # 50, 75 and 25 with t(0.975, 2) = 4.303 times their standard error of 14.43.
    for seeds, end in ("0, 1, 2", "50.0 ± 62.1"), ("0, 1", "62.5"):
        few = {ARM: runs[ARM][: len(seeds.split(","))]}
        row = evidence_tables.accuracy_table(few).splitlines()[-1]
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[:6] == [f"`{ARM}`", seeds, "5e-05", "25.0", end, "10.0"]
    _, _, row = evidence_tables.difference_table(runs).splitlines()
    # Differences of the problems 1, -1/3, 1/3, 0: their mean is 0.25.
    assert row.startswith(f"| `nvfp4-lora` | `{ARM}` | +25.0 [")
    assert row.endswith("| - |")
    runs["nvfp4-lora"] = [runs["nvfp4-lora"][0] | {"pass1_end": end} for end in (30, 40, 50)]
    # Means of 50 and 40, standard errors of 14.43 and 5.77: Welch's t has 2.62 degrees of freedom.
    assert evidence_tables.difference_table(runs).endswith("| +10.0 [-43.7, +63.7] |")


def test_an_arm_is_compared_with_what_it_changes():
    row = {"pass1_end": 50.0, "about": {"evaluations": {"end": {"correct": "01"}}}}
    low = evidence_tables.SAME_RATE
    names = ("bf16-lora", "nvfp4-rounded-lora", "nvfp4-lora", "nf4-lora", low, ARM)
    lines = evidence_tables.difference_table({name: [row] for name in names}).splitlines()[2:]
    pairs = [[cell.strip(" `") for cell in line.split("|")[1:3]] for line in lines]
    assert pairs == [
        *(["bf16-lora", name] for name in names[1:]),
        ["nvfp4-rounded-lora", "nvfp4-lora"],
        *(["nvfp4-lora", name] for name in (low, ARM)),
        *(["nf4-lora", name] for name in ("nvfp4-rounded-lora", "nvfp4-lora", low, ARM)),
        [low, ARM],
    ]


def test_what_noise_changes_at_one_rate_by_hand(results):
    rows = differences.runs_by_arm(gsm8k.read_results(results))[ARM]
    more = [row | {"pass1_end": row["pass1_end"] + 10.0} for row in rows]
    assert evidence_tables.same_rate_table({ARM: rows}, results) == ""
    control = "nvfp4-lora-temperature"
    runs = {ARM: more, evidence_tables.SAME_RATE: rows, control: rows[:2]}
    header, _, *lines = evidence_tables.same_rate_table(runs, results).splitlines()
    cells = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]
    assert [line[:2] for line in cells] == [
        [evidence_tables.SAME_RATE, ARM],
        [evidence_tables.SAME_RATE, control],
        [control, ARM],
    ]
    assert header.endswith("| pass@64 after, points | pass@1 after, points |")
    # 50, 75 and 25 and 10 points more: t(0.975, 4) = 2.776 times sqrt(2) times 14.43.
    assert cells[0][-1] == "+10.0 [-46.7, +66.7]"
    assert cells[0][2].startswith("+0.000 [")
    assert cells[1][2:] == cells[2][2:] == ["-"] * 5  # of two seeds


def test_intervals_by_hand():
    difference = differences.over_common_seeds({0: 1.0, 1: 2.0, 2: 3.0, 5: 9.0}, {0: 2, 1: 3, 2: 7})
    # Differences of 1, 1 and 4: t(0.975, 2) = 4.303 times a standard error of 1.
    assert difference == pytest.approx((2.0, 2.0 - 4.303, 2.0 + 4.303), abs=1e-3)
    assert differences.over_common_seeds({0: 1.0, 1: 2.0}, {0: 1.0, 1: 2.0, 2: 3.0}) is None
    # Newcombe (1998), 56/70 and 48/80: 0.2 from 0.0524 to 0.3339.
    value = {"value": 80.0, "low": 69.18, "high": 87.72}
    reference = {"value": 60.0, "low": 49.04, "high": 70.04}
    difference = differences.unpaired(reference, value)
    assert difference == pytest.approx((20.0, 5.24, 33.39), abs=0.05)


# The interval over seeds of a difference, and that over problems; what a claim gets.
UP, DOWN, WIDE = (
    differences.Difference(*numbers) for numbers in ((2, 1, 3), (-2, -3, -1), (0.5, -2, 3))
)


@pytest.mark.parametrize(
    ("problems", "seeds", "equal", "verdict"),
    [
        (UP, UP, False, "supported"),
        (DOWN, DOWN, False, "contradicted"),
        (WIDE, WIDE, False, "undecided"),
        (DOWN, WIDE, False, "undecided (contradicted by these seeds)"),
        (UP, None, False, "supported (few seeds)"),
        (None, None, False, "undecided (few seeds)"),
        (WIDE, None, True, "not contradicted (few seeds)"),
        (UP, UP, True, "exceeded"),
        (DOWN, DOWN, True, "contradicted"),
    ],
)
def test_the_verdict_follows_from_the_intervals(problems, seeds, equal, verdict):
    claim = claims._Claim("more", claims._ACCURACY, [], equal)
    rows = {"arm": "nvfp4-lora", "learning_rate": 1e-4}
    assert claims._verdict(claim, problems, seeds, ([rows], [rows])) == verdict
    rounded = rows | {"arm": "nvfp4-rounded-lora", "learning_rate": 2e-4}
    text = claims._verdict(claim, problems, seeds, ([rows], [rounded]))
    assert text.endswith("another rate; rounded)")


@pytest.fixture
def costs(tmp_path):
    """Results of the three arms that differ in their weights, three seeds each."""
    ends = {
        "bf16-lora": [(1, 1, 1, 0), (1, 1, 0, 1), (1, 1, 1, 1)],
        "nvfp4-rounded-lora": [(1, 0, 0, 0), (1, 1, 0, 0), (0, 0, 0, 1)],
        "nvfp4-lora": [(1, 1, 1, 0), (1, 1, 0, 0), (1, 1, 1, 1)],
    }
    for arm, seeds in ends.items():
        for seed, correct in enumerate(seeds):
            write_run(tmp_path / "runs", arm=arm, seed=seed, correct=correct)
    gsm8k.collect(tmp_path / "runs", tmp_path / "results")
    return tmp_path / "results"


def test_what_four_bits_cost(costs):
    content = gsm8k.read_results(costs)
    runs = differences.runs_by_arm(content)
    text = evidence_tables.cost_sentence(runs)
    assert text.startswith(
        "Of 4 GSM8K test problems Qwen2.5-Coder-1.5B solves 25.0 % in bf16, 25.0 % in calibrated "
        "NVFP4 and 25.0 % in NVFP4 rounded to nearest; after 4 steps with LoRA 83.3, 75.0 and "
        "33.3 %. Calibrated, four bits cost 8.3 points (95 % interval: "
    )
    # Differences by problem of 0, 0, 0, 1/3: their mean is 1/12, its standard error too.
    assert "-8.0 to 24.7 over problems" in text
    assert "Rounded to nearest, four bits cost 50.0 points" in text
    part = page.page_parts(content, costs)["cost"]
    assert text in part
    assert "| pass@1 after, over problems | -8.3 [-24.7, +8.0] | -50.0 [" in part
    del runs["nvfp4-lora"]
    assert "alibrated" not in evidence_tables.cost_sentence(runs)
    del runs["bf16-lora"]
    assert evidence_tables.cost_sentence(runs) == "What four bits cost was not measured."


@pytest.mark.parametrize(
    ("rounded", "calibrated", "expected"),
    [
        (0.1, 0.0, "Rounding to nearest raises it .*, calibration to the same format does not "
         "measurably change it .* Rounding alone supported the claim"),
        (0.1, 0.1, "raises it .*, calibration to the same format raises it .* nats\\)\\.$"),
        (0.0, 0.0, "does not .* change it .*, calibration .* does not .* change it .* nats\\)\\.$"),
        (0.1, None, "raises it .* calibrated weights were not measured yet\\.$"),
    ],
)  # fmt: skip
def test_whether_quantization_explores(rounded, calibrated, expected, monkeypatch):
    added = {"bf16-lora": 0.0, "nvfp4-rounded-lora": rounded, "nvfp4-lora": calibrated}
    runs = {
        arm: [{"arm": arm, "seed": seed} for seed in range(3)]
        for arm, value in added.items()
        if value is not None
    }
    noise = {arm: np.array([-0.01, 0.0, 0.01]) * number for number, arm in enumerate(added)}
    monkeypatch.setattr(
        differences,
        "steps_of",
        lambda row, _: [{"entropy": 0.3 + added[row["arm"]] + noise[row["arm"]][row["seed"]]}],
    )
    text = evidence_tables.exploration_sentence(runs, pathlib.Path())
    assert re.search(expected, text), text


MARKS = "".join(
    f"<!-- {name}: python -m benchmarks.tables -->\n<!-- end of {name} -->\n\n"
    for name in ("cost", "noise", "long", "math", "evidence", "claims")
)


@pytest.mark.parametrize("name", ["results", "costs"])
def test_the_page_and_its_figures(name, request, tmp_path):
    results, docs = request.getfixturevalue(name), tmp_path / "docs"
    docs.mkdir()
    (docs / "evidence.md").write_text(f"Above.\n\n{MARKS}Below.\n")
    page.write_evidence(results, docs)
    text = (docs / "evidence.md").read_text()
    assert text.startswith("Above.\n")
    assert text.endswith("Below.\n")
    content = gsm8k.read_results(results)
    curves = page.curves_data(content, results)
    assert pictures.data_in(docs / "evidence_curves.svg") == {"sha256": page.digest(curves)}
    assert pictures.data_in(docs / "evidence_accuracy.svg") == page.accuracy_data(content)
    if name == "results":
        explored = f"| `{ARM}` | 0.300, 0.300, 0.200 | 75, 75 | 0.150, 0.350 | 25.0 -> "
        (line,) = [line for line in text.splitlines() if line.startswith(explored)]
        assert line.endswith("| 90.0 -> 90.0 | 95.0 -> 95.0 |")
        assert curves["mixed_groups"][ARM] == [[0.75] * 4] * 3
        assert f"| `{ARM}` | 0, 1, 2 | bbbbbbbb | H100 | - | `python -m" in text
    page.write_evidence(results, docs)
    assert (docs / "evidence.md").read_text() == text


def test_the_evidence_is_up_to_date():
    content = gsm8k.read_results(RESULTS)
    text = (DOCS / "evidence.md").read_text(encoding="utf-8")
    for part in page.page_parts(content, RESULTS).values():
        assert part in text
    names = {gsm8k.run_name(row["arm"], row["seed"]) for row in content["rows"]}
    assert {path.name for path in RESULTS.glob("gsm8k/*")} == {f"{n}.jsonl.gz" for n in names}
    for row in content["rows"]:
        assert row.keys() == FIELDS
        assert row["main"] == (row["arm"] == evidence.MAIN)
    if names:
        digest = page.digest(page.curves_data(content, RESULTS))
        assert pictures.data_in(DOCS / "evidence_curves.svg") == {"sha256": digest}
        accuracy = page.accuracy_data(content)
        assert pictures.data_in(DOCS / "evidence_accuracy.svg") == accuracy
    long = long_runs.picture_data(long_runs.read_rows(RESULTS))
    assert pictures.data_in(DOCS / "evidence_steps.svg") == long


def test_long_runs_by_hand(tmp_path, capsys):
    runs = [write_run(tmp_path, seed=seed) for seed in (2, 1)]
    for _ in range(2):  # A run replaces its row.
        long_runs.main([*map(str, runs), f"--results={tmp_path}"])
    rows = long_runs.read_rows(tmp_path)
    assert [row["seed"] for row in rows] == [1, 2]
    assert rows[0]["accuracy"] == {"0": 25.0, "4": 50.0}
    assert rows[0]["minutes"] == {"0": 0.0, "4": 2.0}
    assert "| 25.0, 25.0 | 50.0, 50.0 | 2, 2 |" in capsys.readouterr().out
    arm = f"{ARM}, 5e-05"
    assert long_runs.picture_data(rows) == {arm: 2 * [[[0, 0.0, 25.0], [4, 2.0, 50.0]]]}
    assert long_runs.draw(long_runs.picture_data(rows)).axes[0].get_legend() is not None
    assert rows[0]["means"]["reward"] == [pytest.approx(0.25)]
    assert rows[0]["means"]["advantage_zero_groups"] == [0.25]
    (runs[0] / "summary.json").unlink()
    with pytest.raises(SystemExit, match="not finished"):
        long_runs.main([str(runs[0])])


def test_ends_of_long_runs_by_hand():
    ends = {"a": (70.0, 71.0, 72.0), "b": (69.0, 70.0, 71.0), "c": (60.0, 61.0)}
    rows = [
        {"arm": arm, "learning_rate": 1e-4, "steps": 4, "accuracy": {"0": 50.0, "4": end}}
        for arm, values in ends.items()
        for end in values
    ]
    # Welch: 4 degrees of freedom, t = 2.776, error sqrt(2 / 3); two seeds have no interval.
    assert long_runs.ends_text(rows) == (
        "Points at the end above `a, 1e-04`, with 95 % intervals over seeds: "
        "`b, 1e-04` -1.0 [-3.3, +1.3]."
    )
    assert long_runs.ends_text(rows[3:]) == ""


def test_noise_at_the_same_rate_by_hand():
    def run(arm, rate, end, entropy):
        means = {name: [0.0, 0.0] for name in ("advantage_zero_groups", "reward")}
        about = {"arm": arm, "learning_rate": rate, "steps": 4, "accuracy": {"4": end}}
        return about | {"means": means | {"entropy": entropy}}

    rows = [run("a", 1e-4, end, [0.3, end / 100]) for end in (70.0, 71.0, 72.0)]
    assert long_runs.noise_table(rows) == ""
    rows += [run("a-aqn-paper", 1e-4, end, [0.3, end / 100]) for end in (69.0, 70.0, 71.0)]
    rows += [run("a-aqn-paper", 5e-5, end, [0.3, 0.1]) for end in (1.0, 2.0, 3.0)]  # none without
    table = long_runs.noise_table(rows)
    assert table.startswith("| difference from the arm without noise | `a-aqn-paper, 1e-04` |\n")
    assert "| entropy, nats, first half of the steps | +0 " in table
    assert "| entropy, nats, second half of the steps | -0.01 [-0.0327, +0.0127] |" in table
    assert table.endswith("| accuracy at the end, % | -1 [-3.27, +1.27] |")


def test_metrics_of_long_runs_by_hand():
    means = {name: [0.0] for name in long_runs._METRICS}
    rows = [
        {"arm": "a", "learning_rate": 1e-4, "means": means | {"reward": values}}
        for values in ([0.25, 0.5, 1.0], [0.75, 0.5, 2.0])
    ]
    assert "| reward | 0.5 -> 1.5 |" in long_runs.metrics_table(rows)
    data = long_runs.metrics_data(rows)
    assert data["reward"] == {"a, 1e-04": [[0.25, 0.5, 1.0], [0.75, 0.5, 2.0]]}
    assert [list(line.get_xdata()) for line in long_runs.draw_metrics(data).axes[0].lines] == [
        [10, 20, 30]
    ] * 2


def test_arms_on_mathematics_differ_in_their_weights_alone():
    arms = {arm: evidence_math.get_config(arm) for arm in evidence_math.ARMS}
    fields = {arm: flatten(config_dict(config)) for arm, config in arms.items()}
    one, other = fields.values()
    assert {name for name in one if one[name] != other[name]} == {"model.format", "preset"}
    for config in arms.values():
        validate(config)
    with pytest.raises(UserError, match="choose from bf16-lora, nvfp4-lora"):
        evidence_math.get_config("bf16")


def test_rows_have_the_weights_that_their_arms_name():
    """Runs without `model.calibration` have rounded weights, and an earlier name."""
    content = gsm8k.read_results(RESULTS)
    for row in content["rows"]:
        about = content["runs"][gsm8k.run_name(row["arm"], row["seed"])]
        model, preset = about["config"]["model"], about["config"]["preset"]
        weights = evidence.get_config(row["arm"]).model
        assert model["format"] == weights.format
        if weights.format == "nvfp4":
            assert model.get("calibration", "none") == weights.calibration
            assert ("calibration" in about) == (weights.calibration == "gptq")
        if "calibration" not in model:
            preset = preset.replace("nvfp4-", "nvfp4-rounded-")
        assert preset == row["arm"]


def test_what_noise_gains(costs):
    runs = differences.runs_by_arm(gsm8k.read_results(costs))
    assert evidence_tables.noise_sentence(runs) == "What noise gains was not measured."
    runs["nvfp4-rounded-lora-aqn-paper"] = runs["bf16-lora"]
    text = evidence_tables.noise_sentence(runs)
    assert text.startswith(
        "Adaptive quantization noise (AQN) changes the accuracy after training, in points with 95 "
        "% intervals over seeds, in NVFP4 rounded to nearest by +50.0 [+"
    )
    assert text.endswith(
        "] with the paper's schedule. In calibrated NVFP4, a GPU's default, it was not measured "
        "yet. Each arm has its best learning rate, so a part may be the rate."
    )
    few = runs["bf16-lora"][:2]  # of two seeds, no interval over them
    runs["nvfp4-rounded-lora-aqn-kl0.01"] = few
    text = evidence_tables.noise_sentence(runs)
    assert "] (over problems, 2 seeds) at a KL of 0.01." in text
    runs["nvfp4-lora-aqn-paper"] = runs["bf16-lora"]
    text = evidence_tables.noise_sentence(runs)
    assert "over seeds, in calibrated NVFP4 by +8.3 [-" in text
    assert "In calibrated NVFP4, a GPU's default, no gain differs clearly from 0." in text
    assert "so a part may be the rate." in text
    runs[evidence_tables.SAME_RATE] = runs["bf16-lora"]
    text = evidence_tables.noise_sentence(runs)
    assert "best learning rate; at one rate, the gains in calibrated NVFP4 are +0.0 [-" in text
    assert "so a part may be" not in text
    runs["nvfp4-lora"] = [row | {"pass1_end": 1.0 + row["seed"]} for row in runs["nvfp4-lora"]]
    assert "clearly from 0" not in evidence_tables.noise_sentence(runs)


def test_the_readme_says_what_noise_gains():
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    sentence = evidence_tables.noise_sentence(differences.runs_by_arm(gsm8k.read_results(RESULTS)))
    assert sentence in " ".join(readme.split())


def test_the_readme_says_what_four_bits_cost():
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    text = tables.cost_text()
    assert text in readme
    assert readme.index(text) < readme.index("## Start")
    sentence = evidence_tables.cost_sentence(differences.runs_by_arm(gsm8k.read_results(RESULTS)))
    assert sentence in text.replace("\n", " ")
    assert "95 % interval" in sentence


def test_metrics_are_compressed_to_the_same_bytes(tmp_path):
    run = write_run(tmp_path)
    for name in ("a", "b"):
        gsm8k.compress_metrics(run, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert gzip.decompress((tmp_path / "a").read_bytes()) == (run / "metrics.jsonl").read_bytes()


# --- The speedrun -------------------------------------------------------------------------------


def test_a_speedrun_whose_result_cannot_be_written_does_not_begin(tmp_path, monkeypatch):
    (tmp_path / "test.jsonl").touch()
    (tmp_path / "file").touch()
    data = [f"--{name}={tmp_path}/test.jsonl" for name in ("model", "train", "test")]
    out = f"--out={tmp_path}/file/speedrun.json"
    monkeypatch.setattr(sys, "argv", ["speedrun", *data, f"--workdir={tmp_path}/runs", out])
    monkeypatch.setattr(speedrun, "timed", lambda _: pytest.fail("it trains"))
    with pytest.raises(SystemExit, match=r"error: .*file"):
        speedrun.main()


def test_the_result_of_a_speedrun(tmp_path):
    run = write_run(tmp_path / "runs", arm="speedrun")
    saved = json.loads((run / "config.json").read_text())
    changed = saved | {"config": saved["config"] | {"steps": 60}}
    known = {"seconds": 300.0, "entries": set(), "problems": 1000}
    (run / "config.json").write_text(json.dumps(changed))
    with pytest.raises(UserError, match=r"evaluations after steps \[0, 4\], not 0 and"):
        speedrun.result_of(run, state="warm", **known)
    (run / "config.json").write_text(json.dumps(saved))
    result = speedrun.result_of(run, state="warm", **known)
    assert (result["pass1_start"], result["pass1_end"], result["n"]) == (25.0, 50.0, 1000)
    assert (result["device"], result["commit"]) == ("NVIDIA H100", "b" * 40)
    assert "calibration" not in result
    assert speedrun.new_folder(tmp_path) == tmp_path / "run-1"
    (tmp_path / "run-1").mkdir()
    assert speedrun.new_folder(tmp_path) == tmp_path / "run-2"


def test_a_speedrun_is_cold_only_if_it_also_calibrates(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    entry = calibrated.entry_path("a" * 24)
    entry.mkdir(parents=True)
    (entry / "model.safetensors").write_bytes(b"weights")
    calibrated.complete_entry(entry, np.zeros((1, 2), np.int32), {"seconds": 40.5})
    digest = {"digest": json.loads((entry / "calibration.json").read_text())["digest"]}
    run = write_run(tmp_path / "runs", arm="speedrun")
    saved = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(saved | {"calibration": digest}))

    def result(state, entries):
        return speedrun.result_of(run, seconds=300.0, state=state, entries=entries, problems=9)

    cold, warm = result("cold", set()), result("warm", {entry})
    assert (cold["cache"], cold["calibration_seconds"]) == ("cold", 40.5)
    assert (warm["cache"], warm["calibration"]) == ("warm", digest)
    assert "calibration_seconds" not in warm
    for state, entries in ("cold", {entry}), ("warm", set()):
        with pytest.raises(UserError, match=f"{state} for compiled programs only: the next run"):
            result(state, entries)


def test_a_speedrun_keeps_its_caches_in_its_folder(tmp_path, monkeypatch):
    (tmp_path / "test.jsonl").write_text("{}\n")
    data = [f"--{name}={tmp_path}/test.jsonl" for name in ("model", "train", "test")]
    out = tmp_path / "speedrun.json"
    monkeypatch.setattr(sys, "argv", ["x", *data, f"--workdir={tmp_path}/runs", f"--out={out}"])
    for name in ("XDG_CACHE_HOME", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "of the user"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "1")

    def train(command):
        (run,) = [word.partition("=")[2] for word in command if word.startswith("--workdir=")]
        write_training(pathlib.Path(run), arm="speedrun")
        pathlib.Path(os.environ["JAX_COMPILATION_CACHE_DIR"], "program").touch()

    monkeypatch.setattr(speedrun, "timed", train)
    for state in ("cold", "warm"):
        speedrun.main()
        assert json.loads(out.read_text())["cache"] == state
        assert os.environ["XDG_CACHE_HOME"] == str(tmp_path / "runs" / "cache")
        assert os.environ["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / "runs/cache/programs")


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ({"cache": "cold"}, "on one H100 in 250 s, compilation included."),
        ({"cache": "warm"}, "on one H100 in 250 s with warm caches."),
        (
            {"cache": "warm", "cold": {"seconds": 330.4, "calibration_seconds": 41.6}},
            "in 250 s with warm caches; with empty ones it takes 330 s, compilation and 42 s of "
            "calibration included.",
        ),
    ],
)
def test_the_readme_says_what_a_speedrun_took(result, expected):
    known = {"seconds": 250.4, "pass1_start": 54.0, "pass1_end": 69.2, "n": 1000}
    text = tables.speedrun_sentence(known | {"device": "NVIDIA H100 80GB HBM3"} | result)
    assert text.endswith(expected)


def test_a_warm_run_is_kept_beside_a_cold_one():
    cold, warm = {"cache": "cold", "seconds": 400}, {"cache": "warm", "seconds": 300}
    assert speedrun.merged({}, cold) == cold
    both = warm | {"cold": cold}
    assert speedrun.merged(cold, warm) == both
    assert speedrun.merged(warm, cold) == both
    assert speedrun.merged(both, warm | {"seconds": 290}) == both | {"seconds": 290}
    assert speedrun.merged(both, cold | {"seconds": 390})["cold"]["seconds"] == 390
    assert speedrun.merged({}, warm) == warm
