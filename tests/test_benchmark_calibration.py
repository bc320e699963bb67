"""The benchmark of the calibration: its rows, and what it refuses."""

import json

import pytest
import tiny_run
from tiny_checkpoints import model_config

from benchmarks import calibration, common
from qerl_jax.errors import UserError
from qerl_jax.policy import architectures
from qerl_jax.policy.layers.kinds import PROJECTIONS


def run(*arguments):
    calibration.run(calibration.make_parser().parse_args(arguments))


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    # A process of its own takes seconds to start.
    monkeypatch.setattr(common, "in_process", lambda function, *args: function(*args))


@pytest.mark.slow  # two rollouts and three models compile
def test_choices_are_compared_on_held_out_text(tmp_path, monkeypatch, capsys):
    model = tiny_run.write_model(tmp_path / "model", max_position=512)
    problems = tiny_run.write_problems(tmp_path / "train.jsonl")
    out = tmp_path / "calibration.json"
    few = ("gptq", "gptq, scales do not grow", calibration.BY_16_BITS)
    monkeypatch.setattr(calibration, "CHOICES", {name: calibration.CHOICES[name] for name in few})
    run(
        str(model), f"--train={problems}", "--prompts=8", "--new-tokens=8", "--windows=8",
        "--width=32", f"--out={out}",
    )  # fmt: skip
    rows = {row["choice"]: row for row in json.loads(out.read_text())["rows"]}
    names = ["16 bits", "rounded", *few]
    assert set(rows) == set(names)
    for name in names[1:]:
        row = rows[name]
        assert row["above"] == pytest.approx(row["loss"] - rows["16 bits"]["loss"], abs=1e-5)
        assert row["above_gptq"] == pytest.approx(row["loss"] - rows["gptq"]["loss"], abs=1e-5)
        assert 0 < row["kl"] < rows["rounded"]["kl"] * 1.0001
        assert 0 < row["top1"] <= 1
        assert row["kl_interval"] > 0
        assert set(row["output_errors"]) == set(PROJECTIONS)
    for name in names[2:]:
        assert 0 <= rows[name]["compile_s"] <= rows[name]["seconds"]
        assert rows[name]["output_errors"]["q_proj"] < rows["rounded"]["output_errors"]["q_proj"]
    assert rows["gptq"]["compile_s"] > 0
    lines = [line for line in capsys.readouterr().out.splitlines() if ": loss " in line]
    assert len(lines) == len(names)


@pytest.mark.slow  # 3 s
def test_random_weights_take_their_time(tmp_path, monkeypatch, capsys):
    config = model_config("qwen2", num_layers=5)
    monkeypatch.setitem(architectures.ARCHITECTURES, "tiny", config)
    out = tmp_path / "calibration.json"
    run("--random=tiny", "--layers=3", "--windows=4", "--width=16", f"--out={out}")
    (row,) = json.loads(out.read_text())["rows"]
    assert row["computed"]
    later = row["seconds"] - row["first_layer_s"]
    assert row["layer_s"] == pytest.approx(later / 2)
    assert row["whole_s"] == pytest.approx(row["seconds"] + later)
    assert "model=tiny choice=gptq layers=3 device=cpu: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["model"], "pass MODEL and --train"),
        (["--random=gpt"], "unknown model 'gpt'"),
        (["model", "--train=x", "--width=2"], "--width=2"),
    ],
)
def test_bad_arguments_are_refused(tmp_path, arguments, named):
    with pytest.raises(UserError, match=named):
        run(*arguments, f"--out={tmp_path / 'x.json'}")


def test_too_few_problems_are_refused(tmp_path):
    model = tiny_run.write_model(tmp_path / "model")
    problems = tiny_run.write_problems(tmp_path / "train.jsonl", count=9)
    with pytest.raises(UserError, match=r"holds 9 problems, .* pass --prompts=4"):
        run(str(model), f"--train={problems}", "--prompts=5", f"--out={tmp_path / 'x.json'}")
