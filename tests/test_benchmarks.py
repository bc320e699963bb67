"""The pages and pictures match the results, the results match the runs, the example runs."""

import contextlib
import importlib
import json
import math
import pathlib
import re
import sys
import textwrap
import types

import jax
import numpy as np
import optax
import pytest
import tiny_checkpoints
import tiny_model
import tiny_run
from contrast import contrast

from benchmarks import (
    agreement,
    drafts,
    learning,
    pictures,
    result_tables,
    run_summary,
    source_tree,
    speedrun,
    step_tables,
    tables,
)
from benchmarks.result_tables import STEPS
from benchmarks.step import KEYS, make_parser, measure, merge, timed_steps
from qerl_jax.config.experiments import grpo_gsm8k
from qerl_jax.errors import UserError
from qerl_jax.policy.architectures import ARCHITECTURES
from qerl_jax.processes.group import ALONE
from qerl_jax.rewards.calls import call_of
from qerl_jax.rollout.progress import Statistics
from qerl_jax.training.loop import train

ROOT = pathlib.Path(__file__).resolve().parents[1]


def write_run(folder, rewards):
    folder.mkdir()
    rows = [
        {
            "step": step,
            "reward": reward,
            "accuracy": reward,
            "length": 8.0,
            "entropy": 1.0,
            "sigma": 0.0,
            **dict.fromkeys(run_summary._MEDIANS, float(step)),
        }
        for step, reward in enumerate(rewards, start=1)
    ]
    before = {"eval_accuracy_before": 0.25, "eval_truncated": 0.5}
    after = {"eval_accuracy": 0.75, "eval_truncated": 0.0}
    rows.insert(0, {"step": 0, "eval_seconds": 6.0} | before)
    rows.append({"step": len(rewards), "eval_seconds": 6.0} | after)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "git": {"commit": "0123456789"},
        "device": {"kind": "cpu"},
        "versions": {"jax": "0.11.2"},
        "command": "/home/x/bin/python -m experiments.x --config=configs/x.py --a=/data/b.py",
        "config": {"model": {"source": "/models/m.gguf"}, "data": {"source": "openai/gsm8k"}},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "summary.json").write_text(json.dumps({"peak_memory_bytes": 7}))
    return folder


def test_welch_t_by_hand():
    # Means 3 and 1, variances of the means 1/3 and 4/2.
    new, old = np.array([2.0, 3.0, 4.0]), np.array([-1.0, 3.0])
    assert learning.welch_t(new, old) == pytest.approx(2 / math.sqrt(1 / 3 + 8 / 2))


def test_learning_pools_the_fifths_of_all_seeds(tmp_path):
    rng = np.random.default_rng(0)
    rising = [np.linspace(0, 1, 20) + rng.normal(0, 0.01, 20) for _ in range(3)]
    folders = [write_run(tmp_path / f"{i}", list(run)) for i, run in enumerate(rising)]
    summary = learning.summarize(folders)
    assert (summary["runs"], summary["steps"]) == (3, 20)
    assert summary["reward"]["first_fifth"] == pytest.approx(np.mean([r[:4] for r in rising]))
    assert summary["reward"]["last_fifth"] == pytest.approx(np.mean([r[-4:] for r in rising]))
    assert summary["reward"]["welch_t"] > 20
    by_seed = {"before": [0.25] * 3, "after": [0.75] * 3}
    assert summary["eval_accuracy"] == {"before": 0.25, "after": 0.75, "by_seed": by_seed}
    assert summary["eval_truncated"] == {"before": 0.5, "after": 0.0}
    assert summary["by_step"]["reward"] == [list(run) for run in rising]
    flat = [write_run(tmp_path / f"flat{i}", list(rng.normal(0, 1, 20))) for i in range(3)]
    assert abs(learning.summarize(flat)["reward"]["welch_t"]) < 3


def test_learning_needs_equal_runs(tmp_path):
    folders = [write_run(tmp_path / "a", [0.0] * 20), write_run(tmp_path / "b", [0.0] * 10)]
    with pytest.raises(UserError, match="equal length, at least 10"):
        learning.summarize(folders)


def test_a_summary_has_medians_and_no_paths_of_a_machine(tmp_path):
    summary = run_summary.summarize(write_run(tmp_path / "run", [0.5, 0.25, 0.0]))
    assert summary["median"]["step_seconds"] == 2.5  # without the first step
    assert summary["peak_memory_bytes"] == 7
    assert summary["by_step"]["reward"] == [0.5, 0.25, 0.0]
    assert summary["command"] == "python -m experiments.x --config=configs/x.py --a=b.py"
    assert summary["config"] == {"model": {"source": "m.gguf"}, "data": {"source": "openai/gsm8k"}}


def test_a_summary_times_the_command_that_writes_the_run(tmp_path):
    folder, out = write_run(tmp_path / "run", [0.5, 0.25, 0.0]), tmp_path / "summary.json"
    command = [sys.executable, "-c", "import time; time.sleep(0.2)"]
    run_summary.main([str(folder), f"--out={out}", "--", *command])
    assert 0.2 <= json.loads(out.read_text())["total_seconds"] < 20
    failing = [sys.executable, "-c", "raise SystemExit(3)"]
    with pytest.raises(SystemExit, match="exit code 3"):
        run_summary.main([str(folder), f"--out={tmp_path / 'none.json'}", "--", *failing])
    assert not (tmp_path / "none.json").exists()


@pytest.mark.slow  # `test_engine` compares the two
def test_the_engine_agrees_with_the_trainer_and_an_error_shows(monkeypatch):
    config, params = tiny_model.tiny_policy("qwen2")
    lora = tiny_model.random_lora(config)
    tokenizer = types.SimpleNamespace(eos_ids=(1,), pad_id=0)
    model = types.SimpleNamespace(config=config, params=params, tokenizer=tokenizer)
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12]]
    result = agreement.compare(model, lora, prompts, new_tokens=6, seed=0)
    assert 2 <= result["greedy_tokens"] <= 12
    assert result["greedy_largest_gap"] < 1e-5
    assert result["logprob_diff_mean"] < 1e-5

    make_batch = agreement.make_batch

    def other_tokens(*args, **options):
        batch = make_batch(*args, **options)
        in_prompt = np.arange(batch.tokens.shape[1]) < batch.prompt_lengths[:, None]
        return batch.replace(tokens=np.where(in_prompt, batch.tokens, batch.tokens ^ 1))

    monkeypatch.setattr(agreement, "make_batch", other_tokens)
    wrong = agreement.compare(model, lora, prompts, new_tokens=6, seed=0)
    assert wrong["greedy_largest_gap"] > 0.01
    assert wrong["logprob_diff_mean"] > 0.01


def test_the_pages_are_up_to_date():
    pages = tables.read_pages()
    assert tables.generated(pages) == pages, "run python -m benchmarks.tables"
    for text, message in (
        ("", "no page has marks of: folders"),
        ("<!-- others -->x<!-- / -->", "'others' is no part"),
        ("<!-- folders -->x<!-- end of others -->", "CONTRIBUTING.md: a mark is not closed"),
    ):
        with pytest.raises(ValueError, match=message):
            tables.generated(pages | {"CONTRIBUTING.md": text})


def test_marks_surround_what_is_generated(tmp_path, monkeypatch):
    result = {"rows": [{"share": 0.125, "seconds": 7.25}], "git": {"commit": "0123456789"}}
    result |= {"device": {"kind": "cpu"}, "versions": {"jax": "1.2"}}
    (tmp_path / "a.b.json").write_text(json.dumps(result))
    monkeypatch.setattr(tables, "_RESULTS", tmp_path)
    columns = [("s", "{seconds:.1f} s"), ("half", lambda row: f"{row['share'] / 2:.4f}"), ("s", "")]
    monkeypatch.setattr(
        tables, "PARTS", {"part": (lambda rows: result_tables.table(columns, rows), "a.b/rows")}
    )
    page = (
        "Took <!-- a.b/rows/0 {seconds:.1f} s, {share:.1%} -->x<!-- / -->, <!-- a.b origin -->"
        "<!-- / -->\n<!-- part: python -m benchmarks.tables -->\nold\n<!-- end of part -->\n"
    )
    text = tables.generated({"page": page})["page"]
    assert re.sub("<!--.*?-->", "", text) == (
        "Took 7.2 s, 12.5 %, commit 01234567, cpu, jax 1.2\n\n"
        "| s | half | s |\n| --- | --- | --- |\n| 7.2 s | 0.0625 |  |\n\n"
    )
    assert tables.generated({"page": text})["page"] == text


def test_the_speedrun_names_its_result():
    result = tables.value_at("speedrun")
    said = " ".join(speedrun.__doc__.split())
    assert f"from {result['pass1_start']:.1f} to {result['pass1_end']:.1f} %" in said
    assert f"in {result['seconds']:.0f} s with a warm cache" in said
    assert f"command took {result['cold']['seconds']:.0f} s" in said


def test_a_config_names_its_results():
    learning = tables.value_at("learning_sums/learning")
    accuracy = learning["eval_accuracy"]
    assert f"{accuracy['before']:.2f} -> {accuracy['after']:.2f}" in grpo_gsm8k.__doc__
    for path in tables._RESULTS.glob("first_run_*.json"):
        minutes = json.loads(path.read_text())["total_seconds"] / 60
        assert f"{learning['steps']} steps, {minutes:.0f} minutes" in grpo_gsm8k.__doc__
    run = tables.value_at(tables._GPU_RUN)
    assert f"{run['peak_memory_bytes'] / 1e9:.1f} GB" in grpo_gsm8k.__doc__
    assert f"mean reward {run['reward_mean']:.2f}" in grpo_gsm8k.__doc__


def test_the_pictures_are_up_to_date():
    for name in ("learning", "decode", "peers"):
        data = getattr(pictures, f"{name}_data")()
        drawn = pictures.data_in(ROOT / "docs" / f"{name}.svg")
        assert drawn == data, "run python -m benchmarks.tables"


def test_a_picture_of_rewards_by_step(tmp_path):
    part = {"steps": 4, "seeds": 2, "reward": [[0.0, 0.25, 0.5, 0.75], [0.5, 0.75, 1.0, 0.25]]}
    data = {"learning": part, "control": part | {"seeds": 1, "reward": [[0.0, 0.1, 0.0, 0.1]]}}
    figure = pictures.draw_learning(data)
    (axes,) = figure.axes
    assert [len(line.get_ydata()) for line in axes.lines] == [4] * 4  # two seeds, two means
    assert list(axes.lines[2].get_ydata()) == [0.25, 0.5, 0.75, 0.5]
    pictures.save(figure, tmp_path / "x.svg", data)
    assert pictures.data_in(tmp_path / "x.svg") == data
    assert "control, learning rate 0</text>" in (tmp_path / "x.svg").read_text()


def is_readable_in_the_dark(text):
    """Whether each color of a picture, or what stands for it on a dark page, is seen there."""
    start, dark, rest = text.partition("@media (prefers-color-scheme: dark)")
    rules, _, drawing = rest.partition("</style>")
    colors = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", start + drawing))
    changed = {
        light: other
        for kind, light, other in re.findall(
            r'\[style\*="(fill|stroke): (\S+)"\]\{\1: (\S+) !important\}', rules
        )
    }
    paper = changed.get("#ffffff", "#ffffff")
    lines = colors - {"#ffffff", "#e6e6e6"}  # the paper, and the grid on it
    return bool(dark) and all(contrast(changed.get(color, color), paper) >= 3 for color in lines)


def test_pictures_are_readable_on_a_dark_page(tmp_path):
    for path in (ROOT / "docs").glob("*.svg"):
        text = path.read_text(encoding="utf-8")
        if path.name == "data_flow.svg":  # written by hand, with classes
            assert "@media (prefers-color-scheme: dark)" in text
        else:
            assert is_readable_in_the_dark(text), path
    figure, (axes,) = pictures._figure(1)
    axes.plot([1, 2], color="#2166ac")
    pictures.save(figure, tmp_path / "x.svg", {})
    text = (tmp_path / "x.svg").read_text()
    assert is_readable_in_the_dark(text)
    assert not is_readable_in_the_dark(text.replace("@media", ""))
    axes.plot([1, 2], color="#202020")
    pictures.save(figure, tmp_path / "x.svg", {})
    assert not is_readable_in_the_dark((tmp_path / "x.svg").read_text())


def test_the_folders_of_the_project(tmp_path):
    for folder, text in {"qerl_jax": "The package.\n\nMore.", "qerl_jax/rl": "Losses."}.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text(f'"""{text}"""\n')
    lines = source_tree.source_tree(tmp_path).splitlines()
    assert [line.split(maxsplit=1) for line in lines[:2]] == [
        ["qerl_jax/", "The package."],
        ["rl/", "Losses."],
    ]
    assert lines[1].startswith(" " * 6 + "rl/")


def python_on_the_pages():
    """The indented blocks of code that define functions, by page; fenced ones have a language."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    found = {}
    for page in pages:
        text = page.read_text(encoding="utf-8")
        fenced = re.findall(r"^```(\w+)\n", text, re.MULTILINE)
        blocks = re.findall(r"(?:^    .*\n(?:\n(?=    ))?)+", text, re.MULTILINE)
        code = [
            textwrap.dedent(block)
            for block in blocks
            if re.search(r"^    (async )?def ", block, re.M)
        ]
        if fenced or code:
            found[page.name] = (fenced, code)
    return found


@pytest.fixture
def readme_modules(tmp_path, monkeypatch):
    """Writes the modules of both pages to the import path; returns their names."""
    found = python_on_the_pages()
    assert found.keys() == {
        "README.md",
        "agents.md",
        "data.md",
        "environments.md",  # tests/test_environment_train.py runs it.
        "learn_from_text.md",  # rows in JSON
        "python.md",
        "rewards.md",
        "sweeps.md",
    }  # Nothing else needs a test.
    fenced, (methods,) = found["python.md"]  # tests/test_readme.py runs what is fenced.
    assert fenced == ["python"] * 5
    exec(methods, names := {"optax": optax, "config": grpo_gsm8k.get_config()})
    assert names["centered"](np.array([[1.0, 3.0]]), {}).tolist() == [[-1.0, 1.0]]
    assert isinstance(names["lion"](1e-3), optax.GradientTransformation)
    *_, toss = found["agents.md"][1]  # Its agents need packages that are not installed here.
    exec(toss.partition("\n...")[0], names)
    assert names["toss"]("p", "c", "a", 1, True) in (0.0, 1.0)
    fenced, (reward,) = found["README.md"]
    assert fenced == ["python"]  # tests/test_readme.py runs it.
    code = reward + found["rewards.md"][1][-1]
    start, *parts = re.split(r"^# (my_\w+)\.py\b", code, flags=re.MULTILINE)
    assert not start
    names = parts[::2]
    for name, text in zip(names, parts[1::2], strict=True):
        (tmp_path / f"{name}.py").write_text(f"#{text}")
    monkeypatch.syspath_prepend(tmp_path)
    yield names
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.slow  # 7 s
def test_the_modules_of_the_readme_run_past_the_end(readme_modules, tiny, tmp_path):
    assert readme_modules == ["my_rewards", "my_schedules", "my_config"]
    assert importlib.import_module("my_config").get_config("qwen2.5-7b").rl.loss == "dapo"
    assert importlib.import_module("my_config").get_config().preset == "smollm2-135m-paper"
    changes = {"aqn.schedule": "my_schedules:triangle", "aqn.sigma_start": 0.25, "eval.every": 0}
    for steps in (2, 4):
        config = tiny.config(changes | {"steps": steps})
        with config.unlocked():
            config.rewards.short = {"function": "my_rewards:short", "weight": 0.1}
        train(config, workdir=tmp_path / "run")
    rows = tiny_run.results(tmp_path / "run")
    assert [row["sigma"] for row in rows] == [0.0, 0.25, 0.0, 0.0]
    assert [row["reward/short"] for row in rows] == [row["finished"] for row in rows]


def test_the_rewards_of_the_page_are_what_it_says():
    fenced, blocks = python_on_the_pages()["rewards.md"]
    assert fenced == []
    exec("\n".join(blocks), names := {})
    found = {
        name: (call.takes_lists, call.waits, call.needed)
        for name in ("short", "passes", "judge", "similar")
        if (call := call_of(names[name]))
    }
    assert found == {
        "short": (False, False, ()),
        "passes": (False, False, ("tests",)),
        "judge": (False, True, ()),
        "similar": (True, False, ()),
    }
    assert [names["short"]("p", "c", "a", n, True) for n in (99, 100)] == [1.0, 0.0]
    ratio, advantages = np.float32([1.0, 2.0]), np.float32([1.0, -1.0])
    loss = names["pg"](ratio, advantages, -ratio, np.ones(2, np.float32))
    np.testing.assert_array_equal(loss, [-1.0, 1.0])


def test_a_step_on_several_gpus_is_compared_with_that_on_one_of_its_commit(tmp_path):
    fixed = dict.fromkeys(KEYS, 0) | {"model": "a", "device": "H100", "commit": "c"}
    fixed |= {"rollout_s": 0.5, "step_s": 1.0, "processes": 1}

    def add(devices: int, batch: int, samples_per_s: float, **changes: str | int) -> None:
        mesh = f"data={devices},tensor=1"
        sizes = {"devices": devices, "mesh": mesh, "batch": batch, "samples_per_s": samples_per_s}
        merge(tmp_path / "step.json", fixed | sizes | changes)

    add(1, 4, 3.0)
    add(1, 8, 4.0)
    add(2, 16, 7.0)
    add(2, 16, 8.0, processes=2)
    add(4, 32, 9.0, commit="d")
    add(2, 16, 9.0, model="not on one")
    add(1, 8, 1.0, commit="d")  # takes the place of the row that the others were compared with
    rows = json.loads((tmp_path / "step.json").read_text())["rows"]
    assert step_tables.largest_scaling(rows) == "2.00 on 2 GPUs (a)"
    table = step_tables.scaling_table(rows)
    assert table.count("\n") == 3
    assert "| 1 | 16 x 0 + 0 | 0.50 | 1.00 | 7.00 | 1.75 | c |" in table
    assert "| 2 | 16 x 0 + 0 | 0.50 | 1.00 | 8.00 | 2.00 | c |" in table
    turns = [row | {"turns": 3, "turn_tokens": 5} for row in rows]
    assert step_tables.environment_scaling_table(turns).count("\n") == 4  # those of one GPU, and d
    table = step_tables.environment_scaling_table([row | {"commit": "c"} for row in turns])
    assert table.count("\n") == 6
    assert "| 1 | 4 x 0 + 3 x 5 | 0.50 | 1.00 | 3.00 | 1.00 | c |" in table
    assert "| 2 | 16 x 0 + 3 x 5 | 0.50 | 1.00 | 8.00 | 8.00 | c |" in table


def test_the_time_on_several_gpus_is_divided_by_that_on_one():
    fixed = STEPS | {"kind": "decode", "format": "nvfp4", "model": "a"}
    rows = [
        fixed | {"batch": batch, "tensor": tensor, "ms_per_step": ms}
        for batch, tensor, ms in (
            (1, 1, 10.0),
            (1, 2, 7.5),
            (8, 1, 10.0),
            (8, 2, 8.0),
            (32, 2, 9.0),
        )
    ]
    rows += [row | {"model": "b", "ms_per_step": 4 / row["tensor"]} for row in rows[:2]]
    rows.append(rows[0] | {"tensor": 4, "ms_per_step": 5.0})
    expected = "a on 2 GPUs 0.75 at 1 row, 0.80 at 8 rows; b on 2 GPUs 0.50 at 1 row; "
    expected += "a on 4 GPUs 0.50 at 1 row"
    assert result_tables.tensor_ratios({"rows": rows}) == expected


def test_a_step_that_compiles_is_no_measurement():
    def step():
        new = jax.jit(lambda x: x + 1.0)
        return {"loss": float(new(1.0))}

    (row,) = timed_steps(step, 1)
    assert row["loss"] == 2.0
    assert row["step_seconds"] > 0
    with pytest.raises(UserError, match=r"step 2 compiled \d+ programs in .* no measurement"):
        timed_steps(step, 2)
    assert len(timed_steps(dict, 3)) == 3


def test_the_update_of_rows_that_are_drawn(monkeypatch):
    model = tiny_checkpoints.model_config("qwen2", vocab_size=100, num_layers=1)
    monkeypatch.setitem(ARCHITECTURES, "qwen2.5-1.5b", model)
    length = model.max_position + 5  # the positions grow with the rows
    sizes = ["--drawn", "--group=2", "--prompt=5", f"--new-tokens={length - 5}", "--steps=1"]
    arguments = make_parser().parse_args([*sizes, "--lora-rank=2"])
    row = measure(arguments, "qwen2.5-1.5b", "bf16", (1, 1), ALONE)
    assert row["rollout_s"] is row["step_s"] is row["samples_per_s"] is None
    assert row["logprob_diff_mean"] is None
    assert row["update_tokens_per_s"] == pytest.approx(2 * length / row["update_s"])
    assert row["update_buffers"] * row["buffer_tokens"] >= 2 * (length - 5)


def test_the_meshes_of_steps(capsys):
    texts = ["data=2", "tensor=4", "data=1,tensor=2"]
    arguments = make_parser().parse_args([f"--mesh={text}" for text in texts])
    assert arguments.mesh == [(2, 1), (1, 4), (1, 2)]
    for text in ("rows=2", "data=0", "tensor=x", "2"):
        with pytest.raises(SystemExit):
            make_parser().parse_args([f"--mesh={text}"])
        assert f"'{text}': write data=N,tensor=M" in capsys.readouterr().err


def test_rollouts_with_drafts_take_turns_with_other_commands_in_pairs(monkeypatch):
    events = []

    @contextlib.contextmanager
    def sole_use():
        events.append([])
        yield

    class Sampler:
        executables = None

        def __init__(self, way, accepted):
            self.way, self.statistics = way, Statistics(1, 6, live=6, drafted=9, accepted=accepted)

        def steps(self, key, policy, prompts):
            events[-1].append(self.way)
            tokens = np.arange(6).reshape(2, 3) + 10 * (self.way == "on")
            rollout = types.SimpleNamespace(tokens=tokens, lengths=np.array([3, 3]))
            yield types.SimpleNamespace(tokens=6, statistics=self.statistics, rollout=rollout)

    monkeypatch.setattr("pallas_kernels.gpu_lock.sole_use", sole_use)
    samplers = [Sampler("off", 0), Sampler("on", 3)]
    subject = types.SimpleNamespace(policy=None)
    row = drafts.measure(subject, [(1,), (2,)], 4, (2, 1), samplers)
    assert [set(pair) for pair in events] == [{"off", "on"}] * 5
    assert {tuple(pair) for pair in events[3:]} == {("off", "on"), ("on", "off")}
    assert (row["num_rollouts"], row["tokens_off"], row["equal"]) == (2, 12.0, 0.0)
    assert row["tokens_per_row_step"] == 1.5
