"""Times a run from its command to its verdict: greedy accuracy on GSM8K's test problems.

    uv run --extra cuda python -m benchmarks.speedrun --model=qwen2.5-coder-1.5b.gguf \
        --train=gsm8k_train.jsonl --test=gsm8k_test_first1000.jsonl

trains the preset `speedrun` of experiments/arms/evidence.py in a new folder, with the first
1,000 test problems as its evaluation before the first step and after the last, at 1,024 new tokens.
The clock runs from the start of this command until the training command has ended, both evaluations
included. Compiled programs and calibrated weights are kept in runs/speedrun/cache: the run is cold
where this folder is empty, and then compiles and calibrates. The result goes to
benchmarks/results/speedrun.json: that of a warm run, beside which `cold` holds the cold run with
its seconds of calibration. Arguments --config.FIELD=VALUE are passed on.

On one H100 the accuracy went from 51.3 to 69.0 % in 167 s with a warm cache; with an empty one the
command took 356 s.
"""

import argparse
import json
import os
import pathlib
import shlex
import sys
import time
from typing import Any

from benchmarks import common
from benchmarks.run_summary import describe_run, timed
from qerl_jax.errors import UserError
from qerl_jax.quantization import cache as calibrated
from qerl_jax.run.folder import RunFolder
from qerl_jax.run.metrics import read_evaluations
from qerl_jax.run.provenance import without_folders
from qerl_jax.system.atomic import write_json
from qerl_jax.system.paths import user_path
from qerl_jax.system.staging import check_writable

_CONFIG = "experiments/arms/evidence.py:speedrun"
_PROBLEMS, _NEW_TOKENS = 1000, 1024


def training_command(args: argparse.Namespace, run: pathlib.Path) -> list[str]:
    """The command that trains and evaluates."""
    return [
        *(sys.executable, "-m", "experiments.grpo_gsm8k", f"--config={_CONFIG}"),
        f"--config.model.source={args.model}",
        f"--config.data.path={args.train}",
        f"--config.data.eval_path={args.test}",
        f"--config.eval.problems={_PROBLEMS}",
        f"--config.eval.max_new_tokens={_NEW_TOKENS}",
        *args.rest,
        f"--workdir={run}",
    ]


def result_of(
    run: pathlib.Path, *, seconds: float, state: str, entries: set[pathlib.Path], problems: int
) -> dict[str, Any]:
    """The result of a finished run, which took `seconds` from the command to the verdict.

    `state` of the cache of compiled programs before the run is 'warm' or 'cold'; `entries` are the
    calibrated models in the cache before it.

    Raises:
        UserError: the run has no evaluation before or after training, or it compiled nothing and
            calibrated, or the other way round.
    """
    about, evaluations = describe_run(run), read_evaluations(RunFolder(run).metrics)
    steps = about["config"]["steps"]
    if 0 not in evaluations or steps not in evaluations:
        raise UserError(
            f"{run} has evaluations after steps {sorted(evaluations)}, not 0 and {steps}"
        )
    calibration = {}
    if "calibration" in about:
        entry = calibrated.find(about["calibration"]["digest"])
        is_new = entry is not None and entry.path not in entries
        if is_new != (state == "cold"):
            raise UserError(
                f"{run} began with a cache that is {state} for compiled programs only: "
                "the next run is warm, and one without the folder of the cache is cold"
            )
        calibration = {"calibration": about["calibration"]}
        if entry is not None and is_new:
            calibration["calibration_seconds"] = entry.record["seconds"]
    return {
        "seconds": seconds,
        "cache": state,
        **calibration,
        "pass1_start": 100 * evaluations[0],
        "pass1_end": 100 * evaluations[steps],
        "n": problems,
        "device": about["device"]["kind"],
        "commit": about["git"]["commit"],
        "command": without_folders(shlex.join(["python", *sys.orig_argv[1:]])),
        "steps": steps,
        "training_command": about["command"],
    }


def merged(content: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """The content of speedrun.json, {} if new, with a result: the warm run with `cold` in it."""
    by_cache = {content.get("cache"): {k: v for k, v in content.items() if k != "cold"}}
    by_cache |= {"cold": content["cold"]} if "cold" in content else {}
    by_cache[result["cache"]] = result
    if "warm" not in by_cache:
        return by_cache["cold"]
    return by_cache["warm"] | ({"cold": by_cache["cold"]} if "cold" in by_cache else {})


def make_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    parser = common.make_parser("benchmarks.speedrun", __doc__, "benchmarks/results/speedrun.json")
    add = parser.add_argument
    add("--model", required=True, help="GGUF file, folder or hub id of the model")
    add("--train", required=True, help="JSONL file of training problems")
    add("--test", type=user_path, required=True, help="JSONL file of test problems")
    add("--workdir", type=user_path, default=pathlib.Path("runs/speedrun"), help="run folders")
    return parser


def main() -> None:
    """Parses the command line, runs, and writes the result."""
    began, parser = time.perf_counter(), make_parser()
    args, args.rest = parser.parse_known_args()
    unknown = [argument for argument in args.rest if not argument.startswith("--config.")]
    if unknown:
        parser.error(f"unknown argument {unknown[0]}")
    cache = args.workdir.resolve() / "cache"
    programs = cache / "programs"
    programs.mkdir(parents=True, exist_ok=True)
    state = "warm" if any(programs.iterdir()) else "cold"
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(programs)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["XDG_CACHE_HOME"] = str(cache)
    entries = set(calibrated.cache_folder().glob("*"))
    run = args.workdir / f"run-{time.time_ns()}"
    try:
        check_writable(args.out)
        content = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
        timed(training_command(args, run))
        seconds = time.perf_counter() - began
        problems = sum(bool(line.strip()) for line in args.test.read_bytes().splitlines())
        problems = min(problems, _PROBLEMS)
        result = result_of(run, seconds=seconds, state=state, entries=entries, problems=problems)
    except UserError as error:
        sys.exit(f"error: {error}")
    write_json(args.out, merged(content, result))
    suffix = ""
    if "calibration_seconds" in result:
        suffix = f", {result['calibration_seconds']:.0f} s of it calibration"
    print(
        f"{result['pass1_start']:.1f} -> {result['pass1_end']:.1f} % of {problems} problems in "
        f"{seconds:.0f} s ({state} cache{suffix}): {args.out}",
        flush=True,
    )


if __name__ == "__main__":
    main()
