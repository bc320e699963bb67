"""What other commands read of a saved run is what runs write."""

import copy
import json
import math
import pathlib

import pytest
from finished_run import META, write_run

from qerl_jax.errors import UserError
from qerl_jax.evaluation.load_policy import read_run
from qerl_jax.run.folder import RunFolder
from qerl_jax.run.folder import read_run as read_run_of_training
from qerl_jax.run.provenance import provenance
from qerl_jax.run.saved_fields import check_meta, check_run, is_shallow, is_time
from qerl_jax.show.view import open_views
from qerl_jax.system.jsonl import read_number

PATH = pathlib.Path("config.json")


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("saved") / "run", tiny)


def nested(depth):
    return json.loads("[" * depth + "]" * depth)


def test_what_a_run_writes_is_accepted(run):
    saved = json.loads((run / "config.json").read_text()) | provenance()
    assert is_time(saved["created"])
    check_run(PATH, saved)
    saved["versions"]["qerl-jax"] = None  # a clone that is not installed
    check_run(PATH, saved)
    saved["git"] = None  # a copy without git
    check_run(PATH, saved)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("created", ["x", 5, "0001-01-01T00:00:00+0000", "2026-01-01"]),
        ("python_rewards", [[], {"correctness": 1}]),
        ("versions", [{"jax": 1}]),
        ("git", [{}, "x"]),
        ("config.data", ["x", []]),
        ("config.data.system_prompt", [1, {}]),
        ("config.data.fields", [{"answer": 1}]),
        ("config.data.mixture", [{"a": 1}, {"a": {"weight": 0.0}}, {"a": {"path": 5}}]),
        ("config.eval.problems", [-1, True, 0.5, 2**31, "1", math.nan]),
        ("config.reward_time_limit", [-1, math.inf, math.nan, "5", None]),
        ("config.rewards", [{"a": {}}, {"a": {"function": "a:b", "x": 1}}]),
        ("config.rewards.correctness", [{"function": "a:b", "time_limit": -1}]),
        ("config.rollout.stop", ["x", [1], None]),
        ("config.data.levels", ["x", [[]], None]),
        ("config.steps", [nested(30), nested(900)]),
    ],
)
def test_what_no_run_writes_is_refused(name, values, run):
    saved = json.loads((run / "config.json").read_text())
    for value in values:
        changed = copy.deepcopy(saved)
        *sections, last = name.split(".")
        inside = changed
        for section in sections:
            inside = inside[section]
        inside[last] = value
        with pytest.raises(UserError, match="not the config of a run") as error:
            check_run(PATH, changed)
        assert "\n" not in str(error.value)


def test_readers_check_what_they_read(run, tiny, tmp_path):
    saved = json.loads((run / "config.json").read_text())
    other = tmp_path / "runs" / "other"
    other.mkdir(parents=True)
    (other / "config.json").write_text(json.dumps(saved | {"created": 5}))
    with pytest.raises(UserError, match="created is 5 and not a time"):
        read_run(other)
    deep = json.dumps(saved).replace('"steps": 4', f'"steps": {json.dumps(nested(900))}')
    (other / "config.json").write_text(deep)
    assert read_run_of_training(other / "config.json") is None


def test_depth():
    assert is_shallow(nested(20))
    assert not is_shallow(nested(22))
    assert not is_shallow({"a": nested(900)})
    assert is_shallow("x")


@pytest.mark.parametrize(
    "name", ["config", "config.data", "config.data.path", "config.rollout.stop", "created", "git"]
)
def test_a_field_that_is_read_must_be_there(name, run):
    saved = json.loads((run / "config.json").read_text())
    *sections, last = name.split(".")
    inside = saved
    for section in sections:
        inside = inside[section]
    del inside[last]
    with pytest.raises(UserError, match=r"config.json: not the config of a run: .* is absent"):
        check_run(PATH, saved)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"steps": "x"}', '{"steps": NaN}', "[" * 9999])
def test_a_damaged_summary_is_one_line(text, run, tmp_path):
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(UserError, match=r"summary\.json.*remove it"):
        RunFolder(tmp_path).finished_steps()
    with pytest.raises(UserError, match=r"summary\.json.*remove it"):
        read_number(tmp_path / "summary.json", "steps")
    (tmp_path / "config.json").write_text((run / "config.json").read_text())
    (view,) = open_views([str(tmp_path)])  # It shows what it can read.
    assert not view.finished


@pytest.mark.parametrize(
    "change",
    [
        {"cursor": None},
        {"fingerprint": 5},
        {"noise": {"a": 1}},
        {"noise": {"sigma": "x"}},
        {"problems": []},
        {"problems": {"train": 1}},
        {"prompts": 1},
        {"reference": []},
    ],
)
def test_what_lies_beside_arrays_is_checked(change):
    check_meta(PATH, META)
    with pytest.raises(UserError, match="no run wrote"):
        check_meta(PATH, META | change)
    with pytest.raises(UserError, match="no run wrote"):
        check_meta(PATH, {name: META[name] for name in META if name not in change})
