"""Sweeps: how overrides combine, what is refused, and that a killed sweep is the whole one."""

import json
import math
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from qerl_jax.commands import sweep
from qerl_jax.compile.program_cache import SHARED
from qerl_jax.config.experiments import aqn_ablation
from qerl_jax.config.experiments.grpo_gsm8k import get_config
from qerl_jax.config.sweep import chain, product, zipped
from qerl_jax.errors import UserError
from qerl_jax.run import sweep_folder
from qerl_jax.run.folder import config_dict
from qerl_jax.run.jobs import environment_of
from qerl_jax.run.plots import plot_sweep
from qerl_jax.run.statistics import half_interval
from qerl_jax.run.sweep_folder import MEASURES, Run, format_table, is_finished, make_table, settings
from qerl_jax.training.loop import train

# --- Overrides ----------------------------------------------------------------------------------


def test_product_varies_the_last_part_fastest():
    assert product({"a": [1, 2]}, {"b": [3, 4]}) == [
        {"a": 1, "b": 3},
        {"a": 1, "b": 4},
        {"a": 2, "b": 3},
        {"a": 2, "b": 4},
    ]
    assert product({"a": [1, 2], "b": [3, 4]}) == product({"a": [1, 2]}, {"b": [3, 4]})
    assert product() == [{}]
    assert product({"a": []}, {"b": [1]}) == []


def test_chain_and_zipped():
    parts = chain({"a": [1]}, {"a": [2], "b": [3, 4]}, [{"c": 5}])
    assert parts == [{"a": 1}, {"a": 2, "b": 3}, {"a": 2, "b": 4}, {"c": 5}]
    assert zipped({"a": [1, 2], "b": [3, 4]}) == [{"a": 1, "b": 3}, {"a": 2, "b": 4}]
    assert product(parts[:1], {"seed": range(2)}) == [{"a": 1, "seed": 0}, {"a": 1, "seed": 1}]


def test_the_sweep_of_the_guide_has_its_runs(tmp_path, monkeypatch):
    """docs/sweeps.md: each run has fields that a run of its config reads."""
    page = (pathlib.Path(__file__).resolve().parents[1] / "docs" / "sweeps.md").read_text()
    (code,) = re.findall(r"^    # my_sweep.py\n((?:    .*\n)+)", page, re.MULTILINE)
    (tmp_path / "my_sweep.py").write_text(textwrap.dedent(code))
    monkeypatch.chdir(tmp_path)
    for preset in ("", ":qwen2.5-1.5b"):
        runs = sweep.plan(f"my_sweep.py{preset}", {}, tmp_path / "sweep")
        assert len(runs) == len({run.folder for run in runs}) == 4 * 2 * 3
        assert len(sweep._part(runs, "2/4")) == 6


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: product({"a": [1]}, {"a": [2]}), "sets a twice: 1, 2"),
        (lambda: product({"a": "off"}), "over a needs a list of values, not 'off'"),
        (lambda: chain({"a": ("q_proj",)}), "over a needs a list"),
        (lambda: zipped({"a": [1], "b": [1, 2]}), "{'a': 1, 'b': 2}"),
    ],
)
def test_bad_parts(make, words):
    with pytest.raises(UserError, match=words):
        make()


# --- The plan -----------------------------------------------------------------------------------


@pytest.fixture
def planned(tmp_path):
    """Returns a function that plans a sweep of the shipped config."""

    def plan(runs, common=None):
        file = tmp_path / "config.py"
        file.write_text(
            "from qerl_jax.config.experiments.grpo_gsm8k import get_config\n"
            f"def get_sweep(): return {runs!r}\n"
        )
        return sweep.plan(str(file), common or {}, tmp_path / "sweep")

    return plan


@pytest.mark.parametrize("runs", [{"seed": {"0": {}}}, ["off"], "off"])
def test_overrides_that_are_no_list_are_refused(planned, runs):
    with pytest.raises(UserError, match="must return a list of overrides"):
        planned(runs)


def test_a_run_has_the_config_and_the_command_of_its_overrides(planned):
    runs = planned(
        [
            {"aqn.schedule": "my_schedules:triangle", "lora.targets": ("q_proj", "v_proj")},
            {"optimizer.learning_rate": 1e-5, "rl.dynamic_sampling": True, "seed": 3},
            {"data.options": {"max_terms": 4}},
        ],
        common={"steps": 7},
    )
    configs = [get_config() for _ in runs]
    configs[0].aqn.schedule, configs[0].lora.targets = "my_schedules:triangle", ("q_proj", "v_proj")
    configs[1].optimizer.learning_rate, configs[1].rl.dynamic_sampling = 1e-5, True
    configs[1].seed = 3
    with configs[2].unlocked():
        configs[2].data.options = {"max_terms": 4}
    for run, config in zip(runs, configs, strict=True):
        config.steps = 7
        assert run.config == config_dict(config)
        assert run.folder.name == run.name
        assert run.command[:2] == ("-m", "qerl_jax.commands.train")
        assert run.command[-1] == f"--workdir={run.folder}"
    assert runs[0].name.startswith("aqn.schedule=my_schedules_triangle,lora.targets=")
    assert runs[1].setting == "optimizer.learning_rate=1e-05, rl.dynamic_sampling=True"
    assert runs[2].setting.startswith("data.options=")


def test_the_folder_follows_from_all_settings(planned):
    runs = {planned([{}], {"steps": steps})[0].name for steps in (3, 4, 3)}
    assert len(runs) == 2


def test_the_folder_does_not_depend_on_what_may_change_in_a_run(planned):
    (run,) = planned([{"seed": 1}], {"steps": 3})
    other = {"log.completions": 0, "rollout.max_rows": 7, "checkpoint.every": 3}
    assert planned([{"seed": 1}], {"steps": 3} | other)[0].name == run.name
    assert len({r.name for r in planned([{"rollout.max_rows": n} for n in (7, 8)])}) == 2


def test_the_folder_of_something_else_is_refused_and_untouched(tmp_path):
    for name in ("commands.sh", "curves.png"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_text("make all")
        with pytest.raises(UserError, match=f"not the folder of a sweep: it holds {name}"):
            sweep._make_folder(folder)
        assert [(p.name, p.read_text()) for p in folder.iterdir()] == [(name, "make all")]
    begun = tmp_path / "begun"
    sweep._make_folder(begun)
    (begun / "commands.sh.host-1-2a.tmp").touch()  # Another task has begun to write.
    sweep._make_folder(begun)
    (begun / "commands.sh").write_text("# python -m experiments.sweep --config=c.py\n")
    (begun / "logs").mkdir()
    sweep._make_folder(begun)


@pytest.mark.parametrize(
    ("runs", "common", "words"),
    [
        ([{"aqn.sigma_strat": 0.1}], {}, ["aqn.sigma_strat", '"sigma_start"']),
        ([{"aqn.sigma_start": "high"}], {}, ["aqn.sigma_start=high"]),
        ([{"seed": None}], {}, ["seed=None", "NoneType"]),
        ([{"aqn.schedule": "off", "aqn.sigma_start": 0.1}], {}, ["aqn.sigma_start", "noise"]),
        ([{"aqn.schedule": "off"}], {"aqn.form": "relative"}, ["aqn.schedule=off", "aqn.form"]),
        ([{"aqn.tis_cap": 3.0}], {}, ["aqn.tis_cap", "aqn.correction='tis'"]),
        ([{"seed": 0}, {"seed": 1}, {"seed": 0}], {}, ["same settings", "'seed': 0"]),
        ([{"seed": 0}, {}], {}, ["same settings", "'seed': 0", "{}"]),
        ([{"seed": 0}], {"seed": 1}, ["sets seed itself"]),
        ([], {}, ["no runs"]),
    ],
)
def test_what_a_plan_refuses(planned, runs, common, words):
    with pytest.raises(UserError) as error:
        planned(runs, common)
    for word in words:
        assert word in str(error.value)


def test_a_config_without_a_sweep(tmp_path):
    with pytest.raises(UserError, match=r"grpo_gsm8k\.py has no get_sweep"):
        sweep.plan("experiments/grpo_gsm8k.py", {}, tmp_path)


@pytest.mark.parametrize("preset", ["", ":qwen2.5-3b"])
def test_the_shipped_sweep_is_sound(preset, tmp_path):
    file = f"{pathlib.Path(aqn_ablation.__file__)}{preset}"
    groups = settings(sweep.plan(file, {}, tmp_path))
    assert {len(runs) for runs in groups.values()} == {3}
    assert list(groups)[:2] == ["aqn.schedule=off", "aqn.schedule=exponential"]


def test_parts_for_several_machines():
    runs = list(range(7))
    parts = [sweep._part(runs, f"{i}/3") for i in (1, 2, 3)]
    assert parts == [[0, 3, 6], [1, 4], [2, 5]]
    assert sweep._part(runs, None) == runs
    for only in ("0/3", "4/3", "1", "a/b"):
        with pytest.raises(UserError, match="--only"):
            sweep._part(runs, only)


# --- The table ----------------------------------------------------------------------------------


def write_run(folder, overrides, rewards, *, finished=True):
    """A run of the shipped config with made up metrics."""
    config = get_config()
    config.update_from_flattened_dict(overrides | {"steps": len(rewards)})
    name = "-".join(map(str, overrides.values()))
    run = Run(name, overrides, config_dict(config), folder / name, ())
    run.folder.mkdir(parents=True)
    rows = [
        {"step": step, "reward": reward, "entropy": 1.0, "sigma": 0.1}
        | ({"noise_kl": 0.5 * step} if step % 2 else {})
        for step, reward in enumerate(rewards, start=1)
    ]
    rows.append({"step": len(rewards), "eval_accuracy": 0.5, "eval_seconds": 1.0})
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if finished:
        (run.folder / "summary.json").write_text(json.dumps({"steps": len(rewards)}))
    origin = {"git": None, "device": {"kind": "cpu"}, "versions": {}}
    (run.folder / "config.json").write_text(json.dumps(origin))
    return run


def test_table_over_seeds(tmp_path):
    runs = [
        write_run(tmp_path, {"aqn.schedule": "off", "seed": 0}, [0.0] * 10 + [0.1, 0.3]),
        write_run(tmp_path, {"aqn.schedule": "off", "seed": 1}, [0.0] * 10 + [0.3, 0.5]),
        write_run(tmp_path, {"aqn.schedule": "cosine", "seed": 0}, [0.0] * 9 + [None]),
        write_run(tmp_path, {"aqn.schedule": "cosine", "seed": 1}, [0.0] * 10, finished=False),
    ]
    table = make_table(runs)
    off, cosine = table["settings"]
    assert (off["setting"], off["seeds"], off["missing_seeds"]) == ("aqn.schedule=off", [0, 1], [])
    assert off["overrides"] == {"aqn.schedule": "off"}
    # The mean of 0.2 and 0.4; Student's t of one degree of freedom is 12.7062.
    assert off["reward"]["mean"] == pytest.approx(0.3)
    assert off["reward"]["interval"] == pytest.approx(12.7062 * math.sqrt(0.02 / 2), rel=1e-5)
    assert off["noise_kl"] == {"mean": 0.5 * (1 + 3 + 5 + 7 + 9 + 11) / 6, "interval": 0.0, "n": 2}
    assert off["accuracy"]["mean"] == 0.5
    assert (cosine["seeds"], cosine["missing_seeds"]) == ([0], [1])
    assert cosine["reward"] == {"mean": 0.0, "interval": None, "n": 1}
    assert table["missing"] == [runs[3].name]
    assert [run["run"] for run in table["runs"]] == [run.name for run in runs[:3]]
    assert len(table["made_with"]) == 1
    assert set(MEASURES) <= set(off)

    text = format_table(table)
    assert "| setting | runs | reward | accuracy | entropy | noise KL |\n" in text
    assert "| aqn.schedule=off | 2 | 0.300 ± 1.271 | 0.500 ± 0.000 |" in text
    assert "| aqn.schedule=cosine | 1 | 0.000 | 0.500 |" in text
    assert "Not finished: cosine-1." in text


def test_runs_that_learn_from_text_have_their_held_out_loss(tmp_path):
    run = write_run(tmp_path, {"seed": 0}, [0.1, 0.2])
    rows = [{"step": 2, "loss": 0.5}, {"step": 0, "eval_loss": 2.0, "eval_seconds": 1.0}]
    rows += [{"step": 2, "eval_loss": 1.25, "eval_seconds": 1.0}]
    (run.folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert sweep_folder._last_result(run) == "last loss 0.500"
    text = format_table(make_table([run]))
    assert "| noise KL | held-out loss |\n|---|---|---|---|---|---|---|\n" in text
    assert text.count("| 1.250 |") == 1
    assert "held-out rows of text" in text


def test_a_run_that_was_extended_by_hand_counts_with_the_steps_of_the_sweep(tmp_path):
    run = write_run(tmp_path, {"seed": 0}, [0.1, 0.2])
    expected = make_table([run])["settings"]
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "reward": 9.0, "entropy": 7.0, "sigma": 0.3}) + "\n")
        file.write(json.dumps({"step": 3, "eval_accuracy": 1.0, "eval_seconds": 1.0}) + "\n")
    (run.folder / "summary.json").write_text('{"steps": 3}')
    assert is_finished(run)
    assert make_table([run])["settings"] == expected


def test_a_table_of_a_folder_that_is_not_there_makes_none(tmp_path):
    command = ["-m", "qerl_jax.commands.sweep", "--table", f"--workdir={tmp_path}/typo"]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.endswith("typo is not there, and holds no run of this sweep\n")
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_run_of_a_sweep_is_one_line(tmp_path):
    run = write_run(tmp_path, {"seed": 0}, [0.1, 0.2])
    good = (run.folder / "metrics.jsonl").read_text()
    row = {"step": 2, "reward": {}, "entropy": "x", "noise_kl": [], "eval_accuracy": "x"}
    (run.folder / "metrics.jsonl").write_text(f"[]\n{json.dumps(row)}\n")
    (found,) = make_table([run])["runs"]
    assert [found[name] for name in MEASURES] == [None] * len(MEASURES)
    (run.folder / "metrics.jsonl").write_text("[]\n")
    with pytest.raises(UserError, match="has no step"):
        make_table([run])
    (run.folder / "metrics.jsonl").write_text(good)
    for text in ("[]", "{}", "x", "[" * 9999):
        (run.folder / "config.json").write_text(text)
        with pytest.raises(UserError, match=r"config\.json is not the config of a run"):
            make_table([run])


def test_jax_has_no_cache_in_the_folder_of_a_sweep(tmp_path, monkeypatch):
    """It would execute what lies there, and the folder may come from another person."""
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    found = environment_of(tmp_path)
    assert not any(str(tmp_path) in v for name, v in found.items() if name.startswith("JAX_"))
    assert found[SHARED].startswith(str(tmp_path.resolve() / "programs-"))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/of/the/user")
    assert environment_of(tmp_path)["JAX_COMPILATION_CACHE_DIR"] == "/of/the/user"


@pytest.mark.parametrize("rewards", [[0.1, 0.2, 0.4], [0.0], [None, None]])
def test_picture_of_several_settings(tmp_path, rewards):
    for seed in (0, 1):
        write_run(tmp_path, {"aqn.schedule": "off", "seed": seed}, rewards)
    folders = sorted(tmp_path.iterdir())
    path = tmp_path / "curves.png"
    assert plot_sweep({"off": folders, "one": folders[:1], "none": []}, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert not plot_sweep({"none": []}, tmp_path / "nothing.png")


def test_half_interval():
    assert half_interval(np.array([1.0, 2.0, 3.0])) == pytest.approx(4.30265 / math.sqrt(3))


def test_runs_that_differ_in_their_seed_are_one_setting(planned):
    runs = planned(product({"lora.rank": [8, 16]}, {"seed": [0, 1]}))
    assert {name: len(group) for name, group in settings(runs).items()} == {
        "lora.rank=8": 2,
        "lora.rank=16": 2,
    }
    assert list(settings(planned([{"seed": 1}, {"seed": 2}]))) == ["as configured"]
    same = {"aqn.schedule": get_config().aqn.schedule}
    assert list(settings(planned([{"seed": 1}, same | {"seed": 2}]))) == ["as configured"]


# --- A sweep in processes -------------------------------------------------------------------------


SWEEP = """
def get_sweep():
    return [{"aqn.schedule": name} for name in ("off", "cosine", "unheard_of")]
"""


def start(tiny, tmp_path, *, pause=None):
    """Starts a sweep of three runs, of which the last one cannot work.

    With `pause`, the runs make this file in their second step, and wait.
    """
    changes = {
        "steps": 2,
        "eval.every": 0,
        "rewards.correctness.function": "tiny_run:rare",
        "reward_time_limit": 0.0,
    }
    config = tiny.config_file(tmp_path / "config.py", changes)
    config.write_text(config.read_text() + SWEEP)
    return subprocess.Popen(
        [sys.executable, "-m", "experiments.sweep", "--config=config.py", "--workdir=sweep"],
        env=tiny.environment() | {"TINY_RUN_PAUSE": f"{8 + 3 if pause else 0}:{pause}"},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def wait_for(process, pause):
    """Waits until a run of the sweep has come to its pause."""
    while not pause.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


@pytest.mark.slow
def test_killed_and_started_again(tiny, tmp_path, monkeypatch):
    folder = tmp_path / "sweep"
    process = start(tiny, tmp_path, pause=tmp_path / "pause1")
    wait_for(process, tmp_path / "pause1")
    (lock,) = folder.glob("*/lock")
    child = int(lock.read_text().split()[1])
    os.kill(child, signal.SIGSTOP)  # It keeps its lock, and hears later that the sweep is killed.
    process.kill()
    assert finish(process)[0] == -signal.SIGKILL

    process = start(tiny, tmp_path, pause=tmp_path / "pause2")
    line = process.stdout.readline()
    assert line == f"{lock.parent.name}: waiting for {lock.read_text()}"
    os.kill(child, signal.SIGCONT)
    wait_for(process, tmp_path / "pause2")
    process.send_signal(signal.SIGTERM)
    code, out, err = finish(process)
    assert code == 128 + signal.SIGTERM
    assert "the same command continues the sweep" in out
    first, log = (next(folder.glob(f"logs/aqn.schedule={name}-*")) for name in ("off", "cosine"))
    for text in (first.read_text(), log.read_text()):
        assert text.count("SIGTERM: saving and stopping") == 1
        assert "saved after step 1" in text
    assert not (folder / "table.json").exists()

    finish(start(tiny, tmp_path))
    code, out, err = finish(start(tiny, tmp_path))
    assert code == 1
    assert out.count(": is finished") == 2
    assert "FAILED aqn.schedule=unheard_of" in err
    assert "unknown aqn.schedule 'unheard_of'" in err
    assert "1 of 3 runs failed" in err
    assert first.read_text().count("resuming after step 1\n") == 1
    assert log.read_text().count("resuming after step 1\n") == 1

    # The runs, taken whole, give the very same table.
    monkeypatch.chdir(tmp_path)
    runs = sweep.plan("config.py", {}, pathlib.Path("whole"))
    for run in runs[:2]:
        train(sweep._parse(run.command[2:-1]), workdir=run.folder)
    assert json.loads((folder / "table.json").read_text()) == make_table(runs)
    assert (folder / "table.md").read_text() == format_table(make_table(runs))
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    whole, *commands = (folder / "commands.sh").read_text().splitlines()
    assert whole == "# python -m qerl_jax.commands.sweep --config=config.py --workdir=sweep"
    assert [shlex.split(line)[1:-1] for line in commands] == [list(r.command[:-1]) for r in runs]
