"""Summarizes one run as a JSON file: rewards, seconds, tokens per second, memory.

    uv run python -m benchmarks.run_summary RUN --out=benchmarks/results/NAME.json
    uv run python -m benchmarks.run_summary RUN --out=FILE -- python -m experiments.grpo_gsm8k ...

The second form first runs the command after `--`, which writes RUN, and adds its seconds from start
to end. Medians leave out the first step.
"""

import json
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

from benchmarks import common
from qerl_jax.errors import UserError
from qerl_jax.run.folder import RunFolder
from qerl_jax.run.metrics import read_steps
from qerl_jax.run.provenance import without_folders
from qerl_jax.system import json_file
from qerl_jax.system.atomic import write_json
from qerl_jax.system.paths import user_path

_MEDIANS = (
    "step_seconds",
    "rollout_seconds",
    "train_seconds",
    "rollout_tokens_per_second",
    "train_tokens_per_second",
    "logprob_diff_mean",
    "forwarded_fraction",
)
_SERIES = (
    "reward",
    "accuracy",
    "length",
    "entropy",
    "sigma",
    "noise_kl",
    "forwarded_fraction",
    "rollout_seconds",
    "train_seconds",
    "step_seconds",
    "compile_seconds",
)


def describe_run(folder: pathlib.Path) -> dict:
    """Commit, device, versions, command and config of a run; of each path only the last part.

    With a calibrated base there is also `calibration`, which has its digest.
    """
    text = RunFolder(folder).config.read_text(encoding="utf-8")
    config = json.loads(without_folders(text))
    about = {key: config[key] for key in ("git", "device", "versions", "command", "config")}
    return about | ({"calibration": config["calibration"]} if "calibration" in config else {})


def timed(command: Sequence[str]) -> float:
    """Runs a command and returns its seconds from start to end.

    Raises:
        UserError: the command fails.
    """
    began = time.perf_counter()
    code = subprocess.run(command, check=False).returncode
    if code:
        raise UserError(f"the command ended with exit code {code}: {' '.join(command)}")
    return time.perf_counter() - began


def summarize(folder: pathlib.Path) -> dict:
    """The figures of a run.

    Raises:
        UserError: the run is not finished, or has less than two steps.
    """
    ended = json_file.read_object(RunFolder(folder).summary, remedy="let the run end first")
    rows = read_steps(RunFolder(folder).metrics)
    if len(rows) < 2:
        raise UserError(f"{folder} has {len(rows)} steps: a summary needs at least 2")
    return {
        "steps": len(rows),
        "reward_mean": statistics.mean(row["reward"] for row in rows),
        "accuracy_mean": statistics.mean(row["accuracy"] for row in rows),
        "median": {
            key: statistics.median(values)
            for key in _MEDIANS
            if (values := [row[key] for row in rows[1:] if row.get(key) is not None])
        },
        "fastest_step_seconds": min(row["step_seconds"] for row in rows),
        "peak_memory_bytes": ended["peak_memory_bytes"],
        "by_step": {key: [row.get(key) for row in rows] for key in _SERIES},
    } | describe_run(folder)


def main(arguments: Sequence[str]) -> None:
    """Parses the command line and writes the JSON file."""
    parser = common.make_parser("benchmarks.run_summary", __doc__)
    parser.add_argument("run", type=user_path, help="run folder to summarize")
    end = arguments.index("--") if "--" in arguments else len(arguments)
    args, command = parser.parse_args(arguments[:end]), arguments[end + 1 :]
    try:
        seconds = {"total_seconds": timed(command)} if command else {}
        summary = seconds | summarize(args.run)
    except UserError as error:
        sys.exit(f"error: {error}")
    write_json(args.out, summary)


if __name__ == "__main__":
    main(sys.argv[1:])
