"""The commands that an installation has, and configs that are found by name from any directory."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import bytecode
import pytest

from qerl_jax.commands import cli
from qerl_jax.config.experiments import NAMES, config_file, installed_file
from qerl_jax.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
# What an installer writes for an entry point.
SCRIPT = "import sys\nfrom {module} import {name}\n\nsys.exit({name}())\n"


@pytest.fixture
def installed(tmp_path):
    """Runs a command as an installer would have written it, in an empty directory."""

    def run(command, *arguments):
        module, _, name = SCRIPTS[command].partition(":")
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / command).write_text(SCRIPT.format(module=module, name=name))
        (tmp_path / "empty").mkdir(exist_ok=True)
        return subprocess.run(
            [sys.executable, tmp_path / "bin" / command, *arguments],
            cwd=tmp_path / "empty",
            env=bytecode.ENVIRONMENT | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )

    return run


def test_a_release_tries_every_command_of_what_it_publishes():
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    (names,) = re.findall(r"^ *for name in (.*); do$", workflow, re.MULTILINE)
    assert [f"qerl-{name}" for name in names.split()] == list(SCRIPTS)
    assert re.findall(r"^  (\w+):\n(?:    needs: (\w+)\n)?    runs-on", workflow, re.MULTILINE) == [
        ("build", ""),
        ("try", "build"),
        ("publish", "try"),
    ]
    assert "[whl, tar.gz]" in workflow  # the wheel and the sdist
    assert "id-token: write" in workflow.partition("  publish:")[2]
    assert "secrets." not in workflow


@pytest.mark.e2e
@pytest.mark.slow
def test_an_installed_command_finds_its_configs(installed):
    done = installed("qerl-train", "--config=grpo_gsm8k:qwen2.5-7b,trl", "--print_config")
    assert (done.returncode, done.stderr) == (0, "")
    assert "preset = qwen2.5-7b-trl\n" in done.stdout
    done = installed("qerl-train", "--config", "dapo_math:qwen2.5-7b", "--print_config")
    assert "experiment = dapo_math\n" in done.stdout


@pytest.mark.e2e
@pytest.mark.slow
def test_an_installed_command_imports_rewards_from_the_working_directory(installed, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "my_rewards.py").write_text("def short(): return 1.0\n")
    name = "--config.rewards.short.function=my_rewards:short"
    done = installed("qerl-train", name, "--dry_run")
    assert done.returncode == 2
    assert "reward 'my_rewards:short': it must take" in done.stderr  # so it was imported


@pytest.mark.e2e
@pytest.mark.slow
def test_a_library_imports_nothing_from_the_working_directory(installed, tmp_path):
    """JAX imports every module of the package `jax_plugins`, wherever it lies."""
    plugin = tmp_path / "empty" / "jax_plugins" / "theirs"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text("open('imported', 'w').close()\n")
    done = installed("qerl-train", "--config.data.path=missing.jsonl", "--dry_run")
    assert (done.returncode, "missing.jsonl" in done.stderr) == (2, True)
    done = installed("qerl-sample", ".", "hi")
    assert done.returncode == 2
    assert not (tmp_path / "empty" / "imported").exists()


def test_a_file_comes_before_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in NAMES:
        assert config_file(f"{name}:preset,recipe") == f"{installed_file(name)}:preset,recipe"
        assert Path(installed_file(name)).exists()
    assert set(NAMES) == {"aqn_ablation", "dapo_math", "grpo_gsm8k", "sft"}
    (tmp_path / "grpo_gsm8k").touch()
    assert config_file("grpo_gsm8k") == "grpo_gsm8k"
    assert config_file("my.py:large") == "my.py:large"
    monkeypatch.setenv("HOME", "/home/x")
    assert config_file("~/my.py:large") == "/home/x/my.py:large"
    assert cli.with_files(["x", "--config=~/a.py", "-config", "~/b.py:c", "--config.seed=1"]) == [
        *("x", "--config=/home/x/a.py", "-config", "/home/x/b.py:c", "--config.seed=1")
    ]
    with pytest.raises(UserError, match=r"--config=grpo:x: there is no such file, .*dapo_math"):
        config_file("grpo:x")
