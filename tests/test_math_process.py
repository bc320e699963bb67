"""The process of math-verify: answers, comparisons that do not finish, and how it ends."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from qerl_jax.rewards import functions, math_process
from qerl_jax.rewards import score as scoring
from qerl_jax.rewards.math_process import verify

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Python computes such integers in C code: no signal handler runs until it is done.
ENDLESS = r"\boxed{7^{7^{7^{7}}} + 99999999!}"


@pytest.fixture(scope="module", autouse=True)
def started():
    verify("1", "1")


def running(worker):
    return worker.poll() is None


def test_it_verifies():
    assert verify(r"\frac{1}{2}", r"\boxed{0.5}") is True
    assert verify(r"\left( 3, \frac{\pi}{2} \right)", r"\boxed{(3, \pi/2)}") is True
    assert verify("7", r"\boxed{8}") is False
    assert verify("\n3", "two\nlines \u2028 and more") is False


@pytest.mark.parametrize(
    ("reference", "answer", "equal"),
    [
        (r"3.1\times10^{-20}", r"3.1\times10^{-19}", False),
        (r"\frac{1}{10^{10}}", "0.000000001", False),
        (r"\frac{1}{10^{10}}", "0.0000000001", True),
        (r"\frac{1}{10^{10}}", "0.0", False),
        (r"(\frac{1}{10^{10}}, 2)", "(0.000000001, 2)", False),
        (r"(\frac{1}{10^{10}}, 2)", "(0.0000000001, 2)", True),
        ("e^{-50}", "0.00000001", False),
        ("2^{53} + 1", "9007199254740992.0", False),
        (r"\frac{1}{3}", "0.333333", True),
        (r"\frac{1}{3}", "0.3333", False),
        (r"\frac{1}{60}", "0.016667", True),
        (r"\frac{0}{5}", "0.0", True),
        (r"50\%", "0.5", True),
        (r"9\%", "9", True),
        (r"\pi", "3.141592654", True),
    ],
)
def test_small_numbers_are_compared_by_their_size(reference, answer, equal):
    assert functions.math_answer("", rf"\boxed{{{answer}}}", reference, 9, True) == equal


@pytest.mark.parametrize(
    ("reference", "completion", "equal"),
    [
        ("5e3", "It is $5000$.", True),
        ("5e3", "It is $5001$.", False),
        ("-2.5E-3", r"\boxed{-\frac{1}{400}}", True),
        ("1e-12", r"\boxed{10^{-12}}", True),
        ("1e-12", r"\boxed{2\cdot 10^{-12}}", False),
        (r"6.022\times 10^{23}", r"\boxed{6.022e+23}", True),
        ("15e", r"\boxed{5e3}", False),
        ("2e", r"\boxed{e + e}", True),
    ],
)
def test_the_e_of_a_number_is_its_exponent(reference, completion, equal):
    assert functions.math_answer("", completion, reference, 9, True) == equal


@pytest.mark.parametrize("pair", [("3.1e-10", "3.1e-9"), ("5e-20", "0"), ("-3e-10", "3e-10")])
def test_small_numbers_without_math_verify(pair):
    for reference, answer in (pair, pair[::-1]):
        assert functions.math_answer("", rf"\boxed{{{answer}}}", reference, 9, True) == 0.0
        assert functions.math_answer("", rf"\boxed{{{answer}}}", answer, 9, True) == 1.0


def test_the_worker_is_kept():
    assert math_process.start() is math_process.start()
    verify("1", "1")
    assert running(math_process.start())


def test_a_failure_is_an_error_of_this_pair_only(monkeypatch):
    with pytest.raises(TypeError):
        verify("7", object())  # A value that is not text never reaches the worker.
    assert verify("7", r"\boxed{7}")


def test_the_callers_time_limit_ends_the_worker():
    worker = math_process.start()
    named = {"correctness": (functions.math_answer, 1.0)}
    began = time.perf_counter()
    scores = scoring.score(named, ["", ""], [ENDLESS, r"\boxed{7}"], ["8", "7"], [1, 1], [1, 1],
                           time_limit=1.0)  # fmt: skip
    assert time.perf_counter() - began < 20
    assert "exceeded the time limit" in scores.errors[0]
    assert not running(worker)
    assert verify("7", r"\boxed{7}")


def test_its_own_time_limit():
    script = (
        "from qerl_jax.rewards import math_process\n"
        "math_process.SECONDS = 1.0\n"
        "math_process._serve()\n"
    )
    worker = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    pairs = (["1", r"\boxed{1}"], ["8", ENDLESS])
    output, _ = worker.communicate("".join(json.dumps(p) + "\n" for p in pairs), timeout=60)
    assert output == "true\n"
    assert worker.returncode == -signal.SIGALRM


def test_a_worker_that_was_killed_is_replaced():
    math_process.start().kill()
    with pytest.raises(TimeoutError, match="did not end within 20 s and 4 GiB"):
        verify("7", r"\boxed{7}")
    assert verify("7", r"\boxed{7}")


def test_it_ends_with_the_process_that_started_it():
    script = (
        "import os, signal\n"
        "from qerl_jax.rewards import math_process\n"
        "math_process.verify('1', '1')\n"
        "print(math_process.start().pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    parent = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    worker = int(parent.stdout)
    deadline = time.monotonic() + 10
    while alive(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(worker)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # An orphan that no process waits for remains as a zombie.
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
