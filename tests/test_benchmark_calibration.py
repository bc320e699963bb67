"""The benchmark of the calibration: its rows, and what it refuses."""

import json
import time

import finished_run
import numpy as np
import pytest
import tiny_run
from tiny_checkpoints import model_config

from benchmarks import calibration, common, merges
from qerl_jax.errors import UserError
from qerl_jax.policy import architectures
from qerl_jax.policy.layers.kinds import PROJECTIONS


def run(*arguments):
    calibration.run(calibration.make_parser().parse_args(arguments))


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    # A process of its own takes seconds to start.
    monkeypatch.setattr(common, "in_process", lambda function, *args: function(*args))


@pytest.mark.slow  # a rollout and two models compile
def test_choices_are_compared_with_16_bits(tiny, tmp_path, monkeypatch, capsys):
    problems = tiny_run.write_problems(tmp_path / "train.jsonl")
    test = tiny_run.write_problems(tmp_path / "test.jsonl", count=6)
    base = finished_run.write_run(tmp_path / "run", tiny, own=True, size=0.3)
    out = tmp_path / "calibration.json"
    few = ("gptq", "gptq, text 1", "gptq, scales do not grow", "gptq, four times the text")
    kept = "gptq, down_proj in 16 bits"
    run(
        str(tiny.model), f"--train={problems}", f"--test={test}", "--prompts=8", "--new-tokens=8",
        "--windows=8", "--width=32", f"--choices={';'.join([*few, kept])}", f"--runs={base}",
        "--samples=4", f"--sampled={';'.join(['rounded', *few, 'run run'])}", "--seed=2",
        f"--out={out}",
    )  # fmt: skip
    rows = {row["choice"]: row for row in json.loads(out.read_text())["rows"]}
    four_bits = ["rounded", *few]
    assert {row["seeds"] for row in rows.values()} == {"2"}
    assert set(rows) == {"16 bits", "run run", "gptq, mean of texts", kept, *four_bits}
    for name in four_bits:
        assert 0 < rows[name]["kl"] < rows["rounded"]["kl"] * 1.0001
        assert 0 < rows[name]["top1"] <= 1
        assert 0 < abs(rows[name]["entropy"]) < 0.1
        assert set(rows[name]["output_errors"]) == set(PROJECTIONS)
    for name in few:
        assert rows[name]["output_errors"]["q_proj"] < rows["rounded"]["output_errors"]["q_proj"]
    assert rows["gptq"]["kl"] != rows["gptq, text 1"]["kl"]
    assert rows["gptq, four times the text"]["text_tokens"] > rows["gptq"]["text_tokens"]
    assert rows["run run"]["kl"] > rows["rounded"]["kl"]
    assert rows["16 bits"]["difference"] == 0
    assert rows[kept]["kl"] not in (0, rows["gptq"]["kl"])
    assert "samples" not in rows.pop(kept)
    assert rows.pop("16 bits")["samples"] == 8
    assert {row["samples"] for row in rows.values()} == {4}
    assert rows["gptq, mean of texts"]["texts"] == 2
    assert len(rows["gptq"]["solved"].split()) == 6
    lines = [line for line in capsys.readouterr().out.splitlines() if ": accuracy " in line]
    assert lines


@pytest.mark.slow  # a rollout and two models compile
def test_mathematics_has_the_training_problems_of_its_arms(tiny, tmp_path, monkeypatch):
    rows = [json.loads(line) for line in tiny_run.write_problems(tmp_path / "x").open()]
    rows = [row | {"level": 2 + number % 3} for number, row in enumerate(rows)]
    rows[1]["question"] = "t1 " * 1000  # longer than a question of the arms
    train, texts = tmp_path / "train.jsonl", []
    train.write_text("".join(json.dumps(row) + "\n" for row in rows))
    test = tmp_path / "test.jsonl"
    test.write_text("".join(json.dumps({"question": f"t{n}", "answer": "1"}) + "\n" for n in "123"))
    monkeypatch.setattr(calibration, "choose_prompts", lambda own, _: texts.extend(own) or own[:8])
    run(
        str(tiny.model), f"--train={train}", f"--test={test}", "--task=math", "--prompts=8",
        "--new-tokens=8", "--windows=4", "--width=32", "--choices=gptq",
        f"--out={tmp_path / 'out.json'}",
    )  # fmt: skip
    assert len(texts) == 15  # of 24, those of levels 3 and 4 but the long one


@pytest.mark.slow  # two models compile
@pytest.mark.parametrize(
    ("model_type", "kept", "absent"),
    [("qwen3_moe", "qkv_proj", "down_proj"), ("qwen3_5", "qkv_proj", "")],
)
def test_weights_stay_in_16_bits_where_layers_have_them(tmp_path, model_type, kept, absent):
    model = tiny_run.write_model(tmp_path / "model", model_type=model_type)
    problems = tiny_run.write_problems(tmp_path / "train.jsonl")
    test = tmp_path / "test.jsonl"
    test.write_text(json.dumps({"question": "t1", "answer": "1"}) + "\n")
    sizes = "--prompts=8", "--new-tokens=8", "--windows=8", "--width=32"
    arguments = str(model), f"--train={problems}", f"--test={test}", *sizes
    arguments += (f"--out={tmp_path / 'out.json'}",)
    run(*arguments, f"--choices=gptq;gptq, {kept} in 16 bits")
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    kls = {row["choice"]: row["kl"] for row in rows}
    assert kls.pop(f"gptq, {kept} in 16 bits") not in (0, kls["gptq"])
    if absent:
        with pytest.raises(UserError, match=f"{absent} in 16 bits: no layer of .* has this weight"):
            run(*arguments, f"--choices=gptq, {absent} in 16 bits")


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
        (["model", "--train=x"], "pass MODEL, --train"),
        (["model", "--train=x", "--test=y", "--choices=gtpq"], "--choices=gtpq: choose from gptq;"),
        (["model", "--train=x", "--test=y", "--sampled=gtpq"], "--sampled=gtpq: choose from 16 b"),
        (["model", "--train=x", "--test=y", "--sampled=gptq"], "--sampled: .*pass --samples"),
        (["model", "--train=x", "--test=y", "--runs=a/s0,b/s0"], "a/s0 and b/s0 would have"),
        (["--random=gpt"], "unknown model 'gpt'"),
        (["model", "--train=x", "--width=2"], "--width=2"),
    ],
)
def test_bad_arguments_are_refused(tmp_path, arguments, named):
    with pytest.raises(UserError, match=named):
        run(*arguments, f"--out={tmp_path / 'x.json'}")


class FewProblems:
    """Two problems: a policy solves the first or not; every other turn solves the second."""

    def correct(self, policy, number):
        return [np.array([policy, number % (2 * merges.GROUP) == 1], float)] * merges.GROUP


def test_turns_are_spread_evenly_and_all_samples_count():
    samples = {"16 bits": 16, "rounded": 4, "gptq": 8}
    make = {name: lambda name=name: float(name == "16 bits") for name in samples}
    turns = list(merges.take_turns(FewProblems(), make, samples, 0))
    names, passes = [name for name, _ in turns], turns[-1][1]
    assert names == ["16 bits", "gptq", "16 bits", "rounded", "16 bits", "gptq", "16 bits"]
    assert {name: len(own) for name, own in passes.items()} == samples
    # The second problem is solved in every other turn: never if only the first turn counted.
    row = merges.accuracies(passes["rounded"], passes["16 bits"])
    assert (row["accuracy"], row["difference"], row["samples"]) == (0.5, -0.25, 4)


def test_rows_are_compared_with_all_samples_of_16_bits():
    samples = {"gptq": 4, "16 bits": 8, "kept": 0}
    make = {name: lambda name=name: float(name == "16 bits") for name in samples}
    rows, order = {}, []
    for name, passes in merges.take_turns(FewProblems(), make, samples, 0):
        found = merges.changed(name, passes, "16 bits")
        order.append(sorted(found))
        rows |= found
    # The second turn of 16 bits does not solve the second problem, and comes last.
    assert order == [["16 bits"], ["gptq"], ["16 bits", "gptq"]]
    assert rows["16 bits"]["accuracy"] == 0.75
    assert rows["gptq"]["difference"] == -0.25
    assert not merges.changed("gptq", {"gptq": [np.ones(2)], "16 bits": []}, "16 bits")


def test_a_turn_that_would_end_too_late_does_not_begin():
    end = time.perf_counter() - 1
    turns = list(merges.take_turns(FewProblems(), {"gptq": lambda: 0.0}, {"gptq": 8}, end))
    assert [name for name, _ in turns] == ["gptq"]


def test_turns_are_numbered_from_the_first():
    make, held = {"gptq": lambda: 0.0}, FewProblems()
    *_, (_, passes) = merges.take_turns(held, make, {"gptq": 8}, 0, first=5)
    # The second problem is solved in turn 9 and not in turn 5.
    assert [own[1] for own in passes["gptq"]] == [0] * 4 + [1] * 4


def test_8_bits_are_integers_of_each_row():
    weight = np.array([[127.0, 1.4, -2.6], [0.0, 0.0, 0.0], [1.0, -0.5, 0.2]], np.float32)
    rounded = np.array([[127, 1, -3], [0, 0, 0], [1, -64 / 127, 25 / 127]])
    np.testing.assert_allclose(calibration.in_8_bits(weight), rounded, rtol=1e-6)


def write_rows(path, seed, samples, **fields):
    """Rows of a command: the correct samples of two problems, and all samples, by choice."""
    names = *calibration.KEYS, *common.ORIGIN
    shared = dict.fromkeys(names, "x") | {"seeds": seed} | fields
    rows = [
        shared | {"choice": choice, "solved": solved, "samples": count}
        for choice, (solved, count) in samples.items()
    ]
    not_sampled = shared | {"choice": "gptq, text 2", "kl": 1.0}
    path.write_text(json.dumps({"rows": [*rows, not_sampled]}))
    return path


def test_texts_of_several_commands_have_a_mean(tmp_path):
    first = {"16 bits": ("4 0", 4), "gptq": ("1 0", 4)}
    second = {"16 bits": ("0 4", 8), "gptq, text 1": ("0 1", 2), "gptq, text 3": ("0 2", 2)}
    files = write_rows(tmp_path / "a", "1", first), write_rows(tmp_path / "b", "2", second)
    run(f"--join={files[0]},{files[1]}", f"--out={tmp_path / 'out'}")
    rows = json.loads((tmp_path / "out").read_text())["rows"]
    by_name = {(row["choice"], row["seeds"]): row for row in rows}
    assert len(rows) == len(by_name) == 8
    mean = by_name["gptq, mean of texts", "1, 2"]
    # 1/8, 1/4 and 1/2, less 1/2, 1/4 and 1/4, which their commands have in 16 bits.
    assert mean["accuracy"] == pytest.approx((1 / 8 + 1 / 4 + 1 / 2) / 3)
    assert mean["difference"] == pytest.approx(-1 / 8 / 3)
    assert (mean["samples"], mean["texts"]) == (2, 3)


@pytest.mark.parametrize(
    ("fields", "named"), [({}, "rows of the same --seed"), ({"task": "math"}, "several models")]
)
def test_rows_that_cannot_be_joined_are_refused(tmp_path, fields, named):
    samples = {"16 bits": ("4 0", 4)}
    files = (
        write_rows(tmp_path / "a", "3", samples),
        write_rows(tmp_path / "b", "3", samples, **fields),
    )
    with pytest.raises(UserError, match=named):
        run(f"--join={files[0]},{files[1]}", f"--out={tmp_path / 'out'}")
    with pytest.raises(UserError, match="there is no "):
        run(f"--join={files[0]},{tmp_path / 'absent'}", f"--out={tmp_path / 'out'}")
