"""The kernels of one warpgroup compiled for every kind of GPU, and their code run without one.

uv run --group aot pytest -n 0 -m aot
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.aot

SCRIPT = pathlib.Path(__file__).with_name("target_kernels.py")


@pytest.fixture(params=[80, 86, 89, 90, 120])
def results_of(request):
    """A function of further arguments of the script, which returns its results for a target."""

    def run(*arguments):
        environment = os.environ | {"PYTHONPATH": str(SCRIPT.parents[1])}
        process = subprocess.run(
            [sys.executable, str(SCRIPT), str(request.param), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=500,
        )
        assert process.returncode == 0, process.stderr[-2000:]
        results = [json.loads(line) for line in process.stdout.splitlines()]
        for result in results:
            # The last bits of sums, and now and then of a bfloat16.
            assert max(result["errors"]) < 2e-3, result
        return results

    run.target = request.param
    return run


def test_the_code_computes_what_the_interpreter_does(results_of):
    results = results_of()
    assert len(results) >= 32
    assert max(result["spills"] for result in results) <= 64


def test_the_code_of_products_with_packed_weights(results_of):
    results = results_of("packed")
    assert len(results) == (21 if results_of.target == 90 else 19)
    assert not any(result["spills"] for result in results)
    # Instructions of a step of two tiles, and of one, for eight tokens. A tile has 4,608 bytes, and
    # an SM issues four instructions in a clock, one for each of its warps.
    for case, tiles in (("mma 8 ", 2), ("mma 7 ", 1)):
        (step,) = [result["loop"] for result in results if result["case"].startswith(case)]
        assert 100 < step / tiles <= 200
