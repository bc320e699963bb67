"""Messages name the command that the reader has, and commands import no more than they need."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import bytecode
import pytest

from qerl_jax.config import describe
from qerl_jax.config.experiments.grpo_gsm8k import get_config
from qerl_jax.system import command

ROOT = Path(__file__).resolve().parents[1]
MODULES = "|".join(command.MODULES.values())
CAPTURED = {"capture_output": True, "text": True}


def test_a_checkout_has_modules(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/x/experiments/evaluate.py", "run"])
    assert command.command_name("evaluate") == "python -m experiments.evaluate"
    assert command.command_name("export") == "python -m experiments.export"
    assert command.command_name("train") == "python -m experiments.grpo_gsm8k"
    text = "`qerl-plan` and qerl-sweep, qerl-jax"
    expected = "`python -m experiments.plan` and python -m experiments.sweep, qerl-jax"
    assert command.name_commands(text) == expected
    monkeypatch.chdir(ROOT)
    for path in (str(ROOT / "experiments" / "sft.py"), "experiments/sft.py"):
        monkeypatch.setattr(sys, "argv", [path])
        assert command.command_name("train") == "python -m experiments.sft"
    assert command.command_name("show") == "python -m experiments.show"
    monkeypatch.setattr(sys, "argv", [str(ROOT / "experiments" / "sweep.py")])
    assert command.command_name("train") == "python -m experiments.grpo_gsm8k"
    for module in command.MODULES.values():
        assert (ROOT / "experiments" / f"{module}.py").exists()


def test_an_installation_has_scripts(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/qerl-sample", "run"])
    assert command.command_name("evaluate") == "qerl-evaluate"
    monkeypatch.setattr(sys, "argv", ["my_program.py"])
    monkeypatch.setattr(command, "_ROOT", tmp_path)  # site-packages, without experiments
    assert command.command_name("evaluate") == "qerl-evaluate"
    assert "python -m" not in describe.explain("rollout.max_rows", get_config("qwen2.5-7b"))


def printed_texts(tree):
    """The constant texts of a module without its docstrings."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in docstrings:
            yield str(node.value)


def test_no_message_names_a_module():
    hits = {
        (path.relative_to(ROOT).as_posix(), text)
        for path in (ROOT / "qerl_jax").rglob("*.py")
        for text in printed_texts(ast.parse(path.read_text()))
        if re.search(rf"\bexperiments\.({MODULES})\b", text)
        or (path.name != "command.py" and text in ("experiments", "-m experiments"))
    }
    assert not hits


def test_no_help_names_a_module():
    """The docstring of a command is its --help, which `name_commands` writes for the reader."""
    for path in (ROOT / "qerl_jax" / "commands").glob("*.py"):
        assert "experiments." not in (ast.get_docstring(ast.parse(path.read_text())) or "")


@pytest.mark.parametrize("name", sorted(command.MODULES))
def test_help_answers_without_jax(name):
    """JAX takes seconds to import."""
    module = "train" if name == "train" else command.MODULES[name]
    program = (
        f"import runpy, sys\nsys.argv = ['qerl-{name}', '--help']\ntry:\n"
        f"    runpy.run_module('qerl_jax.commands.{module}', run_name='__main__')\n"
        "except SystemExit:\n    pass\n"
        "heavy = {'jax', 'orbax', 'datasets', 'transformers', 'matplotlib', 'reasoning_gym'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=bytecode.ENVIRONMENT, **CAPTURED
    )
    assert done.returncode == 0, done.stderr
    assert f"qerl-{name}" in done.stdout
    assert "experiments." not in done.stdout


def test_training_step_by_step_imports_nothing_that_saves():
    program = (
        "import sys, qerl_jax\nqerl_jax.open_session, qerl_jax.train\n"
        "heavy = {'orbax', 'datasets', 'transformers', 'matplotlib', 'reasoning_gym'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, **CAPTURED)
    assert done.returncode == 0, done.stderr
