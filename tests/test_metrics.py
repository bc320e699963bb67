"""Metrics rows, their views, and the lines on the terminal."""

import io
import json
import math
import os
import re
import shutil
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
from refusal import refused

from qerl_jax.processes.group import ALONE
from qerl_jax.run import lines as run_lines
from qerl_jax.run import metrics
from qerl_jax.run.folder import open_run
from qerl_jax.run.metrics import MetricsLog
from qerl_jax.system.jsonl import read_jsonl
from qerl_jax.training.dry_run import check_start
from qerl_jax.training.loop import _metrics_log


def open_log(folder, **options):
    options = {"tensorboard": False, "wandb": False, "trackio": False, "run_name": "r"} | options
    return metrics.MetricsLog(folder, **options)


def test_rows_round_trip_bit_for_bit(tmp_path):
    reward = float(np.float32(0.1))
    row = {"step": 1, "reward": np.float32(0.1), "loss": jnp.float32(1e-7), "entropy": 0.1 + 0.2}
    with open_log(tmp_path) as log:
        log.write(row | {"finished": np.int64(3), "update_skipped": True, "note": "a\u2028b"})
    (read,) = read_jsonl(tmp_path / "metrics.jsonl")
    assert read == {
        "step": 1,
        "reward": reward,
        "loss": float(np.float32(1e-7)),
        "entropy": 0.1 + 0.2,
        "finished": 3,
        "update_skipped": True,
        "note": "a\u2028b",
    }
    assert type(read["finished"]) is int


@pytest.mark.parametrize("value", [math.nan, math.inf, jnp.float32("nan"), np.float64("-inf")])
def test_nan_and_infinities_become_null(tmp_path, value):
    log = open_log(tmp_path)
    log.write({"step": 1, "noise_kl": value})
    log.write_completions(1, [{"reward": value}])
    assert "null" in (tmp_path / "metrics.jsonl").read_text()
    assert read_jsonl(tmp_path / "completions.jsonl") == [{"step": 1, "reward": None}]


@pytest.mark.parametrize("value", [np.zeros(2), object()])
def test_what_is_no_scalar_is_refused_by_name(tmp_path, value):
    with pytest.raises(TypeError, match="grad_norm"):
        open_log(tmp_path).write({"step": 1, "grad_norm": value})
    assert not (tmp_path / "metrics.jsonl").exists()


def test_rows_come_to_the_disk_where_a_checkpoint_asks_for_it(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.fstat(number).st_size))
    with open_log(tmp_path) as log:
        log.sync()
        assert synced == []
        log.write({"step": 1, "reward": 0.5})
        log.sync()
        log.write_completions(1, [{"text": "a"}])
        log.sync()
    sizes = [(tmp_path / name).stat().st_size for name in ("metrics.jsonl", "completions.jsonl")]
    assert synced == [sizes[0], *sizes]


def test_truncate_drops_later_rows_and_a_torn_line(tmp_path):
    log = open_log(tmp_path)
    for step in (1, 2, 3, 4):
        log.write({"step": step, "reward": step / 3})
        log.write_completions(step, [{"completion": "a"}, {"completion": "b"}])
    kept = b"".join((tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)[:2])
    for name in ("metrics.jsonl", "completions.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"step": 2, "rew')
    log = open_log(tmp_path)
    log.truncate(2)
    assert (tmp_path / "metrics.jsonl").read_bytes() == kept
    steps = [row["step"] for row in read_jsonl(tmp_path / "completions.jsonl")]
    assert steps == [1, 1, 2, 2]
    log.write({"step": 3, "reward": 1.0})
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_rows_of_steps_and_of_evaluations(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with open_log(tmp_path) as log:
        log.write({"step": 0, "eval_accuracy_before": 0.25, "eval_seconds": 1.0})
        log.write({"step": 1, "reward": 0.5})
        log.write({"step": 2, "reward": 0.75})
        log.write({"step": 2, "eval_accuracy": 0.5, "eval_seconds": 1.0})
    assert [row["step"] for row in metrics.read_steps(path)] == [1, 2]
    assert metrics.read_evaluations(path) == {0: 0.25, 2: 0.5}
    log = open_log(tmp_path)
    log.truncate(0)
    assert metrics.read_steps(path) == []
    assert metrics.read_evaluations(path) == {0: 0.25}


def test_truncate_without_files_is_fine(tmp_path):
    open_log(tmp_path).truncate(0)
    assert list(tmp_path.iterdir()) == []


def test_read_jsonl_names_a_damaged_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    refused("line 2 is not JSON", read_jsonl, path)
    refused(r"cannot read .*absent\.jsonl", read_jsonl, tmp_path / "absent.jsonl")


def read_events(folder):
    from tensorboardX.proto.event_pb2 import Event

    events = []
    for path in sorted(folder.iterdir(), key=lambda p: p.stat().st_mtime_ns):
        data = path.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            events.append(Event.FromString(data[12 : 12 + length]))
            data = data[12 + length + 4 :]
    return events


def test_tensorboard_has_sections_and_purges_on_resume(tmp_path):
    with open_log(tmp_path, tensorboard=True) as log:
        log.write({"step": 1, "reward": 0.5, "format": 0.9, "reward/format": 1.0, "loss": 2})
        log.write({"step": 2, "reward": 0.6, "train_seconds": 3.0})
        log.write({"step": 2, "eval_accuracy": 0.25, "eval_seconds": 4.0})
    with open_log(tmp_path, tensorboard=True) as log:
        log.truncate(1)
        log.write({"step": 2, "reward": 0.7})
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2
    events = read_events(tmp_path / "tensorboard")
    scalars = {(v.tag, e.step): v.simple_value for e in events for v in e.summary.value}
    assert scalars == {
        ("reward/reward", 1): 0.5,
        ("reward/format", 1): pytest.approx(0.9),
        ("rewards/format", 1): 1.0,
        ("train/loss", 1): 2.0,
        ("time/train_seconds", 2): 3.0,
        ("eval/eval_accuracy", 2): 0.25,
        ("time/eval_seconds", 2): 4.0,
        ("reward/reward", 2): pytest.approx(0.7),
    }
    starts = [e.step for e in events if e.HasField("session_log")]
    assert starts == [2]


def test_a_full_disk_is_an_error_where_a_row_is_written(tmp_path):
    def fill(log):
        log.write({"step": 1, "reward": 0.5})
        log._events._records._writer.close()
        log._events._records._writer = full
        for step in range(2, 1000):  # more than a buffer holds
            log.write({"step": step, "reward": 0.5})

    with open("/dev/full", "wb", buffering=0) as full:
        log = open_log(tmp_path, tensorboard=True)
        with pytest.raises(OSError, match="No space left"), log:
            fill(log)
    assert log._events is None


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_missing_tracker_names_the_command(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    refused(f"uv sync --extra {name}", open_log, tmp_path, **{name: True})
    config = tiny_run.Tiny(tmp_path, tmp_path, tmp_path).config({f"log.{name}": True})
    refused(f"pass --config.log.{name}=false", check_start, config)  # before a model is loaded


def test_a_folder_of_wandb_is_not_the_package(tmp_path, monkeypatch):
    """W&B keeps its runs in a folder of its own name, which Python would import."""
    (tmp_path / "wandb" / "offline-run-1").mkdir(parents=True)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    config = tiny_run.Tiny(tmp_path, tmp_path, tmp_path).config({"log.wandb": True})
    refused("wandb is not installed; run `uv sync --extra wandb`", metrics.check_trackers, config)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_tracker_gets_config_rows_and_finish(tmp_path, monkeypatch, name):
    calls = []
    fake = types.SimpleNamespace(
        init=lambda **kw: calls.append(("init", kw["name"], kw["config"], kw["project"])),
        log=lambda row, step: calls.append(("log", row, step)),
        finish=lambda: calls.append(("finish",)),
    )
    monkeypatch.setitem(sys.modules, name, fake)
    (tmp_path / "config.json").write_text(json.dumps({"config": {"seed": 0}}))
    with open_log(tmp_path, **{name: True}) as log:
        log.write({"step": 1, "entropy": np.float32(0.5), "kl": math.nan})
    assert calls == [
        ("init", "r", {"seed": 0}, "qerl-jax"),
        ("log", {"rollout/entropy": 0.5}, 1),
        ("finish",),
    ]


def test_wandb_gets_a_project_a_group_and_a_table_of_completions(tmp_path, monkeypatch):
    calls = []
    fake = types.SimpleNamespace(
        init=lambda **kw: calls.append((kw["project"], kw["group"])),
        log=lambda row, step: calls.append((row, step)),
        Table=lambda *, columns, data: (columns, data),
        finish=lambda: None,
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with open_log(tmp_path, wandb=True, project="p", group="g") as log:
        log.write_completions(3, [{"prompt": "a", "reward": math.nan}, {"prompt": "b", "x": 1}])
        log.write_completions(4, [])
    table = ["step", "prompt", "reward", "x"], [[3, "a", None, None], [3, "b", None, 1]]
    assert calls == [("p", "g"), ({"completions": table}, 3)]


def test_the_name_at_services_belongs_to_the_folder(tmp_path, monkeypatch):
    """Two runs of one config under one id: the rows of the second are dropped."""
    names = []
    monkeypatch.setattr(MetricsLog, "__init__", lambda *_, run_name, **__: names.append(run_name))
    monkeypatch.setattr(MetricsLog, "__exit__", lambda *_: None)
    config = tiny_run.Tiny(tmp_path, tmp_path, tmp_path).config({"log.wandb": True})

    def start(path):
        with open_run(path, config) as folder, _metrics_log(folder, config, ALONE):
            (folder.path / "checkpoints" / "1").mkdir(parents=True, exist_ok=True)
        return names[-1]

    first, second = start(tmp_path / "one" / "run"), start(tmp_path / "two" / "run")
    assert first != second
    assert re.fullmatch(r"run-[0-9a-f]{8}", first)
    assert (start(tmp_path / "one" / "run"), start(tmp_path / "two" / "run")) == (first, second)
    moved = shutil.move(tmp_path / "one", tmp_path / "moved") / "run"
    assert start(moved) == first
    copied = shutil.copytree(moved, tmp_path / "copied")
    other = start(copied)
    assert other not in (first, second)
    assert (start(copied), start(moved)) == (other, first)
    saved = json.loads((moved / "config.json").read_text())
    del saved["trackers"]
    (moved / "config.json").write_text(json.dumps(saved))
    refused(r"config.json has no 'trackers'.*--workdir", start, moved)
    strange = start(tmp_path / "a" / ("b#c?d%e:f" + "x" * 200))
    assert re.fullmatch(r"b-c-d-e-fx+-[0-9a-f]{8}", strange)
    assert len(strange) < 128


ROW = {
    "step": 7,
    "reward": 0.4123,
    "accuracy": 0.4,
    "format": 0.98,
    "length": 231.4,
    "entropy": 0.8121,
    "sigma": 0.01,
    "grad_norm": 0.2134,
    "rollout_tokens_per_second": 51234.0,
    "train_tokens_per_second": 812.3,
    "remaining_seconds": 3720.0,
}


def test_format_row():
    line = run_lines.format_row(ROW | {"update_skipped": True}, 600)
    assert line == (
        "step   7/600  reward  0.412  acc 0.40  format 0.98  len 231.4  entropy 0.812  "
        "sigma 1.0e-02  grad 0.213  rollout 51.2k train 812 tok/s  left 1h02m  UPDATE SKIPPED"
    )
    assert len(run_lines.format_row(ROW, 600)) <= 150
    assert run_lines.format_row({"step": 1, "reward": None}, 9) == "step 1/9  reward -"
    before = {"step": 0, "eval_accuracy_before": 0.25, "eval_seconds": 3.0}
    assert run_lines.format_row(before, 9) == "greedy accuracy before training: 0.250"
    after = {"step": 4, "eval_accuracy": 0.5, "eval_seconds": 3.0}
    assert run_lines.format_row(after, 9) == "greedy accuracy after step 4: 0.500"
    assert "format 1.00" in run_lines.format_row({"step": 1, "reward/format": 1.0}, 9)


@pytest.mark.parametrize("columns", [40, 60, 80, 100, 140])
def test_the_line_of_a_step_fits_its_columns(columns):
    row = ROW | {"step": 1007, "reward": -0.4123, "length": 1231.4, "update_skipped": True}
    line = run_lines.format_row(row, 2000, columns)
    whole = run_lines.format_row(row, 2000)
    assert len(line) <= columns < len(whole)
    # What is left out is the least important, and what stays keeps its order.
    assert line.startswith("step 1007/2000  ")
    assert line.endswith("UPDATE SKIPPED")
    parts = iter(whole.split("  "))
    assert all(part in parts for part in line.split("  "))
    assert ("reward -0.412" in line, "left 1h02m" in line) == (columns > 40, columns > 40)
    assert ("len 1231.4" in line, "tok/s" in line) == (columns > 60, False)
    assert run_lines.format_row(row, 2000, 5) == "step 1007/2000"


def test_a_log_has_the_whole_line_and_a_terminal_what_fits(monkeypatch):
    monkeypatch.setenv("COLUMNS", "72")
    stream = io.StringIO()
    assert run_lines.line_columns(stream) is None
    stream.isatty = lambda: True
    assert run_lines.line_columns(stream) == 72


@pytest.mark.parametrize("columns", [80, 72, 40])
def test_the_lines_of_an_evaluation_fit_their_columns(columns):
    row = {"step": 1007, "eval_accuracy": 0.5, "eval_seconds": 3.0}
    row |= {"eval_truncated": 0.26, "eval_missing": 12}
    whole = "greedy accuracy after step 1007: 0.500  cut off 26 %  no score 12: not compared"
    assert run_lines.format_row(row, 2000) == whole
    line = run_lines.format_row(row, 2000, columns)
    assert len(line) <= columns
    assert ("cut off" in line, "no score" in line) == (columns == 80, columns > 40)
    answers = [{"question": 9 * "is it ", "completion": 99 * "a" + "end", "finished": False}]
    lines = run_lines.format_answers(answers, answers, columns)
    assert {len(line) for line in lines[1:]} == {columns}
    assert all(line.endswith("aend (no score, cut off)") for line in lines[1:])
    assert len(lines[0]) == min(53, columns)


@pytest.mark.parametrize(("seconds", "text"), [(4.4, "4s"), (192, "3m12s"), (3599.9, "1h00m")])
def test_time_left(seconds, text):
    assert run_lines.format_row({"step": 1, "remaining_seconds": seconds}, 1).endswith(
        f"left {text}"
    )


def test_answers_before_and_after():
    def answer(question, completion, **changes):
        return {"question": question, "completion": completion, "finished": True} | changes

    before = [
        answer("What is\n1 + 2?", "It is 4\x1b", correct=False, finished=False),
        answer("q", "no", correct=None),
    ]
    after = [
        answer("What is\n1 + 2?", "1 + 2 = 3", correct=True),
        answer("q", 200 * "a" + "end", correct=False),
        answer("other", "x", correct=True),
    ]
    lines = run_lines.format_answers(before, after)
    assert lines == [
        "What is 1 + 2?",
        r"  before: It is 4\x1b (wrong, cut off)",
        "  after:  1 + 2 = 3 (right)",
        "q",
        "  before: no (no score)",
        f"  after:  ...{154 * 'a'}end (wrong)",
    ]
    assert run_lines.format_answers([], after) == []


def test_a_sampled_completion_is_two_lines_that_fit_and_that_a_terminal_does_not_obey():
    lines = run_lines.format_completion("What is\n1 + 2?", "It is\x1b[2J\n3", 1.2, finished=True)
    assert lines == ["What is 1 + 2?", r"  reward 1.200: It is\x1b[2J 3"]
    lines = run_lines.format_completion(
        90 * "q", 90 * "a" + "end", math.nan, finished=False, columns=40
    )
    assert [len(line) for line in lines] == [40, 40]
    assert lines[1] == f"  reward -: ...{12 * 'a'}end (cut off)"


def test_answers_are_read_by_step(tmp_path):
    with open_log(tmp_path) as log:
        for row in ({"step": 0, "eval_answers": [{"question": "q"}]}, {"step": 1, "reward": 0.5}):
            log.write(row)
        log.write({"step": 2, "eval_answers": [1, {"question": "p", "finished": np.bool_(True)}]})
    found = metrics.read_answers(tmp_path / "metrics.jsonl")
    assert found == {0: [{"question": "q"}], 2: [{"question": "p", "finished": True}]}
