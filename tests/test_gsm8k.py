"""The runner of the comparison on GSM8K, its arms and its rows; the speedrun."""

import argparse
import gzip
import hashlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import gsm8k, speedrun
from benchmarks.gsm8k import RESULTS
from experiments.arms import evidence, evidence_math
from qerl_jax.config.overrides import check_overrides
from qerl_jax.errors import UserError
from qerl_jax.quantization import cache as calibrated
from qerl_jax.run.folder import config_dict, flatten
from qerl_jax.training.setup import make_method
from qerl_jax.training.validate import validate
from qerl_jax.weights.peft import WEIGHTS_FILE

ROOT = pathlib.Path(__file__).resolve().parents[1]
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
    monkeypatch.setattr(gsm8k, "_run", lambda command, _: ran.append(command[1]) or 0)
    gsm8k.run_parts(ARM, 1, arguments(tmp_path))
    assert ran == ["experiments.grpo_gsm8k", *["experiments.evaluate"] * 2]


def test_an_adapter_may_be_deleted_after_its_evaluation(tmp_path):
    run = write_run(tmp_path)
    shutil.rmtree(run / "adapter")
    assert gsm8k.finished_evaluation(run / "evaluations" / "end") is not None
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
    assert gsm8k.collect(runs, results) == ["nvfp4-lora-s0"]
    rows = gsm8k.read_results(results)["rows"]
    assert [(row["arm"], row["main"]) for row in rows] == [("nvfp4-lora", True), (ARM, False)]
    assert (results / "gsm8k" / f"{ARM}-s1.jsonl.gz").read_bytes() == before
    assert (results / "gsm8k" / "nvfp4-lora-s0.jsonl.gz").exists()
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


def arguments(tmp_path, **changes):
    given = {"workdir": tmp_path, "model": "m.gguf", "train": "a.jsonl", "test": "b.jsonl"}
    return argparse.Namespace(**given | {"rest": []} | changes)


def test_the_commands_of_a_run(tmp_path):
    found = gsm8k.commands(ARM, 2, arguments(tmp_path, rest=["--config.steps=7"]))
    assert list(found) == ["train", "end", "samples", "start", "start-samples"]
    run = tmp_path / f"{ARM}-s2"
    assert found["train"] == [
        *("-m", "experiments.grpo_gsm8k", f"--config=experiments/arms/evidence.py:{ARM}"),
        *("--config.seed=2", "--config.model.source=m.gguf", "--config.data.path=a.jsonl"),
        *("--config.steps=7", f"--workdir={run}"),
    ]
    for part in list(found)[1:]:
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
    gsm8k.add_grid(tmp_path / "sweep", tmp_path)
    (row,) = gsm8k.read_results(tmp_path)["grids"][ARM]
    assert row["calibration"] == digest


def test_finished_parts_are_skipped_and_a_failure_ends_the_rest(tmp_path, monkeypatch):
    write_run(tmp_path, seed=1, without=["samples"])
    ran = []
    monkeypatch.setattr(gsm8k, "_run", lambda command, _: ran.append(command[1]) or len(ran) // 2)
    with pytest.raises(UserError, match=r"samples of .* exit code 1; the same command continues"):
        gsm8k.run_parts(ARM, 1, arguments(tmp_path))
    assert ran == ["experiments.grpo_gsm8k", "experiments.evaluate"]


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
        cwd=ROOT,
    )
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate()[0] == "code 130\n"
    assert (tmp_path / "saved").exists()


def test_arms_have_the_best_rates_of_the_published_grids():
    grids = gsm8k.read_results(gsm8k.RESULTS)["grids"]
    assert grids
    best = {
        arm: max((row["held_out_end"], -row["learning_rate"]) for row in grid)
        for arm, grid in grids.items()
    }
    rates = {arm: -rate for arm, (_, rate) in best.items()}
    assert (rates.pop("nvfp4-lora"), grids.pop("nvfp4-lora")[0]["steps"]) == (1e-4, 60)
    assert rates == {arm: evidence.LEARNING_RATES[arm] for arm in grids}


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
    """Runs without `model.calibration` have rounded weights, and an earlier name.

    So have the two arms whose learning rates became 5e-5 for the main one.
    """
    renamed = {"nvfp4-lora": "nvfp4-lora-lr1e-4", "nvfp4-lora-lr5e-5": "nvfp4-lora"}
    content = gsm8k.read_results(RESULTS)
    metrics = {path.name for path in RESULTS.glob("gsm8k/*")}
    assert metrics == {f"{name}.jsonl.gz" for name in content["runs"]}
    for row in content["rows"]:
        assert row.keys() == FIELDS
        about = content["runs"][gsm8k.run_name(row["arm"], row["seed"])]
        model, preset = about["config"]["model"], about["config"]["preset"]
        weights = evidence.get_config(row["arm"]).model
        assert model["format"] == weights.format
        if weights.format == "nvfp4":
            assert model.get("calibration", "none") == weights.calibration
            assert ("calibration" in about) == (weights.calibration == "gptq")
        if "calibration" not in model:
            preset = preset.replace("nvfp4-", "nvfp4-rounded-")
        assert renamed.get(preset, preset) == row["arm"]
        assert row["learning_rate"] == evidence.LEARNING_RATES[row["arm"]]


def test_metrics_are_compressed_to_the_same_bytes(tmp_path):
    run = write_run(tmp_path)
    gsm8k.add_metrics(run, tmp_path)
    (path,) = (tmp_path / "gsm8k").iterdir()
    first = path.read_bytes()
    gsm8k.add_metrics(run, tmp_path)
    assert path.read_bytes() == first
    assert gzip.decompress(first) == (run / "metrics.jsonl").read_bytes()


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


def test_a_warm_run_is_kept_beside_a_cold_one():
    cold, warm = {"cache": "cold", "seconds": 400}, {"cache": "warm", "seconds": 300}
    assert speedrun.merged({}, cold) == cold
    both = warm | {"cold": cold}
    assert speedrun.merged(cold, warm) == both
    assert speedrun.merged(warm, cold) == both
    assert speedrun.merged(both, warm | {"seconds": 290}) == both | {"seconds": 290}
    assert speedrun.merged(both, cold | {"seconds": 390})["cold"]["seconds"] == 390
    assert speedrun.merged({}, warm) == warm
