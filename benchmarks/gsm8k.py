"""Trains an arm of the comparison on GSM8K and scores it on test problems before and after.

    uv run --extra cuda python -m benchmarks.gsm8k --arm=nvfp4-lora --seed=0 \
        --model=qwen2.5-coder-1.5b.gguf --train=gsm8k_train.jsonl --test=gsm8k_test_first1000.jsonl
    uv run python -m benchmarks.gsm8k    # only the rows of the runs that are finished
    uv run python -m benchmarks.gsm8k --grid=runs/evidence-nvfp4-lora   # a grid of learning rates

The arms are those of experiments/arms/evidence.py. A run lies in runs/evidence/ARM-sSEED
(`--workdir` names another folder than runs/evidence). Each part is a command of its own:

    train      experiments.grpo_gsm8k
    end        experiments.evaluate, greedy, 1,024 new tokens, with the last adapter
    samples    the same with 64 samples of each of the first 200 problems, for pass@k
    start, start-samples    both without the adapter: once for arms of the same weights

The same command continues where it was stopped, and skips what is finished. A run that has all
parts gets a row in benchmarks/results/gsm8k.json, unless it has one, and its metrics go to
benchmarks/results/gsm8k/ARM-sSEED.jsonl.gz. Arguments --config.FIELD=VALUE are passed to the
training.
"""

import argparse
import gzip
import hashlib
import json
import pathlib
import shlex
import signal
import subprocess
import sys
from typing import Any

from benchmarks.run_summary import describe_run
from experiments.arms import evidence
from qerl_jax.errors import UserError
from qerl_jax.run.folder import RunFolder
from qerl_jax.run.jobs import environment_of
from qerl_jax.run.metrics import read_evaluations, read_steps
from qerl_jax.run.provenance import without_folders
from qerl_jax.system.atomic import write_json
from qerl_jax.system.jsonl import read_jsonl
from qerl_jax.system.paths import user_path
from qerl_jax.system.signals import STOP_SIGNALS

_ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = _ROOT / "benchmarks" / "results"
_CONFIG = "experiments/arms/evidence.py"
_TASK = "gsm8k"
_WEIGHTS = "adapter_model.safetensors"  # as in `weights.peft`, which imports JAX
_NEW_TOKENS, _SAMPLES, _SAMPLED_PROBLEMS = 1024, 64, 200


def run_name(arm: str, seed: int) -> str:
    """The name of a run, of its folder and of its file of metrics."""
    return f"{arm}-s{seed}"


def weights_of(arm: str) -> str:
    """The name of the weights that an arm begins with: their format, and how they got it."""
    model = evidence.get_config(arm).model
    if model.format != "nvfp4":
        return model.format
    return "nvfp4-rounded" if model.calibration == "none" else f"nvfp4-{model.calibration}"


def evaluation_folders(run: pathlib.Path, arm: str) -> dict[str, pathlib.Path]:
    """Where the evaluations of a run lie; arms of the same weights share those of the start."""
    shared = run.parent / f"start-{weights_of(arm)}"
    return {
        "end": run / "evaluations" / "end",
        "samples": run / "evaluations" / "samples",
        "start": shared / "greedy",
        "start-samples": shared / "samples",
    }


def commands(arm: str, seed: int, args: argparse.Namespace) -> dict[str, list[str]]:
    """The commands of the parts, as arguments of Python, in their order."""
    config = evidence.get_config(arm)
    run = args.workdir / run_name(arm, seed)
    folders = evaluation_folders(run, arm)
    policy = "model" if config.train.parameters == "full" else "adapter"
    train = ["-m", "experiments.grpo_gsm8k", f"--config={_CONFIG}:{arm}", f"--config.seed={seed}"]
    if args.model:
        train.append(f"--config.model.source={args.model}")
    if args.train:
        train.append(f"--config.data.path={args.train}")
    by_part = {"train": [*train, *args.rest, f"--workdir={run}"]}
    for part, folder in folders.items():
        adapter = "none" if part.startswith("start") else policy
        by_part[part] = ["-m", "experiments.evaluate", str(run), f"--adapter={adapter}"]
        by_part[part] += [f"--tasks={_TASK}", f"--max-new-tokens={_NEW_TOKENS}", f"--out={folder}"]
        if args.test:
            by_part[part].append(f"--data={_TASK}={args.test}")
        if part.endswith("samples"):
            by_part[part] += [f"--samples={_SAMPLES}", f"--limit={_SAMPLED_PROBLEMS}"]
    return by_part


def run_parts(arm: str, seed: int, args: argparse.Namespace) -> None:
    """Runs the parts that are not finished, one process after the other.

    Raises:
        UserError: a command failed.
    """
    run = args.workdir / run_name(arm, seed)
    folders = evaluation_folders(run, arm)
    args.workdir.mkdir(parents=True, exist_ok=True)
    environment = environment_of(args.workdir)
    for part, command in commands(arm, seed, args).items():
        if part in folders and finished_evaluation(folders[part]) is not None:
            print(f"{part}: is finished", flush=True)
            continue
        print(f"{part}: python {shlex.join(command)}", flush=True)
        code = _run(command, environment)
        if code:
            raise UserError(
                f"{part} of {run} ended with exit code {code}; the same command continues"
            )


def _run(command: list[str], environment: dict[str, str]) -> int:
    """Runs a command of Python, which saves when a signal arrives; returns the exit code.

    The others are passed on to it. A terminal sends Ctrl-C to both, and this process waits.
    """
    process = subprocess.Popen([sys.executable, *command], env=environment)
    handlers: dict[signal.Signals, Any] = {
        number: lambda number, _: process.send_signal(number)
        for number in STOP_SIGNALS
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    handlers[signal.SIGINT] = lambda *_: None
    old_handlers = {signum: signal.signal(signum, handler) for signum, handler in handlers.items()}
    try:
        return process.wait()
    finally:
        for signum, handler in old_handlers.items():
            signal.signal(signum, handler)
        process.kill()
        process.wait()


# --- What finished runs say ---------------------------------------------------------------------


def finished_evaluation(folder: pathlib.Path) -> dict[str, Any] | None:
    """The results of an evaluation; None while it is not finished, or if its run has gone on.

    A run that was extended, or evaluated before its end, has another adapter by now. One whose
    adapter was deleted has not gone on.
    """
    path = folder / "results.json"
    if not path.exists():
        return None
    results = json.loads(path.read_text(encoding="utf-8"))
    if "accuracy" not in results["tasks"].get(_TASK, {}):
        return None
    digest = results["settings"].get("adapter_sha256")  # None for a base, or where all is trained
    weights = RunFolder(folder.parents[1]).adapter() / _WEIGHTS
    if not digest or not weights.exists():
        return results
    return results if hashlib.sha256(weights.read_bytes()).hexdigest() == digest else None


def well_formed(rows: list[dict[str, Any]]) -> dict[str, float | None]:
    """The share of completions with the right form, and the accuracy among them, in percent."""
    formed = [row["correct"] is True for row in rows if row["format"] is True]
    share = 100 * len(formed) / len(rows)
    return {"share": share, "accuracy": 100 * sum(formed) / len(formed) if formed else None}


def _evaluation_figures(folder: pathlib.Path) -> dict[str, Any] | None:
    """Figures of an evaluation, in percent."""
    results = finished_evaluation(folder)
    if results is None:
        return None
    figures = results["tasks"][_TASK]

    def percent(name: str) -> dict[str, float]:
        return {bound: 100 * value for bound, value in figures[name].items()}

    rows = read_jsonl(folder / f"{_TASK}.jsonl")
    # A digit for each problem, in their order, from which arms are compared problem by problem.
    greedy = figures["samples"] == 1
    correct = "".join(str(int(row["correct"] is True)) for row in rows) if greedy else None
    names = [name for name in figures if name.startswith(("pass@", "maj@"))]
    return {
        "problems": figures["problems"],
        "samples": figures["samples"],
        "max_new_tokens": figures["max_new_tokens"],
        **{name: percent(name) for name in ("accuracy", *names)},
        "well_formed": well_formed(rows),
        "finished": 100 * figures["finished"],
        "mean_tokens": figures["mean_tokens"],
        **({"correct": correct} if greedy else {}),
        "command": without_folders(results["command"]),
        "git": results["git"],
        "device": results["device"],
    }


def row_of(run: pathlib.Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The row of a run in gsm8k.json, and what else is published of it.

    None while the training or an evaluation is not finished.
    """
    if RunFolder(run).finished_steps() is None:
        return None
    about = describe_run(run)
    config = about["config"]
    folders = evaluation_folders(run, config["preset"])
    evaluations = {part: _evaluation_figures(folder) for part, folder in folders.items()}
    if None in evaluations.values():
        return None
    end, start, samples = (evaluations[part] or {} for part in ("end", "start", "samples"))
    metrics = RunFolder(run).metrics
    steps = read_steps(metrics)
    summary = json.loads(RunFolder(run).summary.read_text(encoding="utf-8"))
    row = {
        "arm": config["preset"],
        "seed": config["seed"],
        "learning_rate": config["optimizer"]["learning_rate"],
        "steps": len(steps),
        "completions_per_step": config["rollout"]["prompts_per_step"]
        * config["rollout"]["group_size"],
        "n": end["problems"],
        "pass1_start": start["accuracy"]["value"],
        "pass1_end": end["accuracy"]["value"],
        "ci95": (end["accuracy"]["high"] - end["accuracy"]["low"]) / 2,
        "pass16": samples["pass@16"]["value"],
        "device_minutes": sum(step["step_seconds"] for step in steps) / 60,
        "main": config["preset"] == evidence.MAIN,
    }
    quiet = [step["logprob_diff_mean"] for step in steps if not step["sigma"]]
    about["held_out_accuracy"] = {
        str(step): 100 * value for step, value in read_evaluations(metrics).items()
    }
    about["largest_mismatch_without_noise"] = max(quiet, default=None)
    about["sampled_tokens"] = sum(step["rollout_tokens"] for step in steps)
    about["peak_memory_bytes"] = summary["peak_memory_bytes"]
    return row, about | {"evaluations": evaluations}


def add_metrics(run: pathlib.Path, results: pathlib.Path) -> None:
    """Writes metrics.jsonl of a run compressed; the same rows give the same bytes."""
    path = results / "gsm8k" / f"{run.name}.jsonl.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(RunFolder(run).metrics.read_bytes(), mtime=0))


def read_results(results: pathlib.Path) -> dict[str, Any]:
    """The content of gsm8k.json, without rows where there is no file yet."""
    path = results / "gsm8k.json"
    if not path.exists():
        return {"rows": [], "runs": {}, "grids": {}}
    return json.loads(path.read_text(encoding="utf-8"))


def collect(workdir: pathlib.Path, results: pathlib.Path) -> list[str]:
    """Adds the rows of finished runs in `workdir` that have none; returns the names of these."""
    content, added = read_results(results), []
    for name in (run_name(arm, seed) for arm in evidence.ARMS for seed in evidence.SEEDS):
        if name in content["runs"] or (result := row_of(workdir / name)) is None:
            continue
        row, content["runs"][name] = result
        content["rows"].append(row)
        add_metrics(workdir / name, results)
        added.append(name)
    arms = list(evidence.ARMS)
    content["rows"].sort(key=lambda row: (arms.index(row["arm"]), row["seed"]))
    if added:
        write_json(results / "gsm8k.json", content, indent=1)
    return added


def add_grid(sweep: pathlib.Path, results: pathlib.Path) -> str:
    """Adds what each learning rate of an arm reached on the held-out problems; returns the arm.

    The runs in `sweep`, a folder of `experiments.sweep`, replace an earlier grid.

    Raises:
        UserError: the folder has no finished run, or runs of several arms.
    """
    rows, arms = [], set()
    for path in sorted(sweep.glob("*/summary.json")):
        about = describe_run(path.parent)
        config, accuracy = about["config"], read_evaluations(RunFolder(path.parent).metrics)
        arms.add(config["preset"])
        names = ("command", "git", "device", "calibration")
        rows.append(
            {
                "learning_rate": config["optimizer"]["learning_rate"],
                "seed": config["seed"],
                "steps": config["steps"],
                "held_out_start": 100 * accuracy[0],
                "held_out_end": 100 * accuracy[config["steps"]],
            }
            | {name: about[name] for name in names if name in about}
        )
    if len(arms) != 1:
        raise UserError(f"{sweep} holds finished runs of {sorted(arms)}, a grid is of one arm")
    (arm,) = arms
    content = read_results(results)
    grids = content["grids"] | {arm: sorted(rows, key=lambda row: row["learning_rate"])}
    content["grids"] = {name: grids[name] for name in evidence.ARMS if name in grids}
    write_json(results / "gsm8k.json", content, indent=1)
    return arm


def make_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gsm8k",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--arm", choices=list(evidence.ARMS), help="arm to train")
    add("--seed", type=int, choices=evidence.SEEDS, default=0, help="seed of the run (default: 0)")
    add("--grid", type=user_path, help="folder of a sweep over an arm's learning rates to add")
    add("--model", default="", help="GGUF file or folder of the model (default: the hub's)")
    add("--train", default="", help="JSONL file of training problems (default: the hub's)")
    add("--test", default="", help="JSONL file of test problems (default: the hub's)")
    add("--workdir", type=user_path, default=pathlib.Path("runs/evidence"), help="run folders")
    return parser


def main() -> None:
    """Parses the command line, runs the parts, and adds rows."""
    parser = make_parser()
    args, args.rest = parser.parse_known_args()
    if unknown := [argument for argument in args.rest if not argument.startswith("--config.")]:
        parser.error(f"unknown {unknown[0]}")
    try:
        if args.grid:
            print(f"grid of {add_grid(args.grid, RESULTS)}", flush=True)
        if args.arm:
            run_parts(args.arm, args.seed, args)
        added = collect(args.workdir, RESULTS)
    except UserError as error:
        sys.exit(f"error: {error}")
    rows = {run_name(row["arm"], row["seed"]): row for row in read_results(RESULTS)["rows"]}
    for name in added:
        print(f"new row {name}: {json.dumps(rows[name])}", flush=True)
    print(f"{RESULTS / 'gsm8k.json'}: {len(rows)} rows", flush=True)


if __name__ == "__main__":
    main()
