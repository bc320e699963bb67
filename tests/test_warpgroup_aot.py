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


@pytest.mark.parametrize("target", [80, 86, 89, 90, 120])
def test_the_code_computes_what_the_interpreter_does(target):
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parents[1])}
    process = subprocess.run(
        [sys.executable, str(SCRIPT), str(target)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    results = [json.loads(line) for line in process.stdout.splitlines()]
    assert len(results) >= 25
    for result in results:
        # The last bits of sums, and now and then of a bfloat16.
        assert max(result["errors"]) < 2e-3, result
        assert result["spills"] <= (0 if result["case"].startswith("mma") else 64), result
    # Instructions of a step of two tiles, for eight tokens: a tile has 4608 bytes, and a SM issues
    # four instructions a clock, one for each warp.
    (step,) = [result["loop"] for result in results if result["case"].startswith("mma 8 ")]
    assert 100 < step / 2 <= 200
