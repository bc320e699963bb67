"""Trains an arm with W4A8 over seeds, and scores it in bfloat16 arithmetic and in W4A8.

    python -m experiments.arms.fp8_job --arm=nvfp4-lora-fp8-rollout --seeds=0,1,2 --out=RESULTS \
        --workdir=RUNS --model=MODEL.gguf --train=gsm8k_train.jsonl --test=gsm8k_test.jsonl \
        --parts=train,end,end-fp8

Parts that are finished are left out, so the same command continues. RESULTS gets ARM-sSEED.json
(what the run is, with its config), gsm8k/ARM-sSEED.jsonl.gz (its metrics), and ARM-sSEED-PART.json
(figures of an evaluation, with the number of right answers of each problem).
"""

import argparse
import json
import pathlib
import subprocess
import sys
import time

from benchmarks import gsm8k
from benchmarks.run_summary import describe_run
from qerl_jax.run.folder import RunFolder
from qerl_jax.run.jobs import environment_of
from qerl_jax.system.jsonl import read_jsonl

# Part -> adapter and samples of each problem. With '-fp8' the arithmetic is W4A8.
EVALUATIONS = {
    "end": ("adapter", 1),
    "samples": ("adapter", 8),
    "start": ("none", 1),
    "start-samples": ("none", 8),
}


def train_command(args: argparse.Namespace, seed: int, run: pathlib.Path) -> list[str]:
    """The arguments of Python that train a run."""
    return [
        *("-m", "experiments.grpo_gsm8k", f"--config=experiments/arms/evidence.py:{args.arm}"),
        *(f"--config.seed={seed}", f"--config.model.source={args.model}"),
        *(f"--config.data.path={args.train}", "--config.train.buffer_tokens=4352"),
        *(*args.rest, f"--workdir={run}"),
    ]


def evaluate_command(
    args: argparse.Namespace, part: str, run: pathlib.Path, folder: pathlib.Path
) -> list[str]:
    """The arguments of Python that evaluate a run."""
    adapter, samples = EVALUATIONS[part.removesuffix("-fp8")]
    command = ["-m", "experiments.evaluate", str(run), f"--adapter={adapter}", "--tasks=gsm8k"]
    command += [f"--max-new-tokens={args.new_tokens}", f"--out={folder}"]
    command += [f"--data=gsm8k={args.test}"]
    return command + ([f"--samples={samples}"] if samples > 1 else [])


def figures(folder: pathlib.Path) -> dict:
    """Figures of an evaluation, in percent, and right answers of each problem."""
    rows = read_jsonl(folder / "gsm8k.jsonl")
    right = [0] * (1 + max(row["problem"] for row in rows))
    for row in rows:
        right[row["problem"]] += row["correct"] is True
    return (gsm8k._evaluation_figures(folder) or {}) | {"right": right}


def main() -> None:
    """Parses the command line and runs the parts."""
    parser = argparse.ArgumentParser()
    for name in ("arm", "seeds", "parts", "model", "train", "test"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--new-tokens", type=int, default=1024)
    args, args.rest = parser.parse_known_args()
    args.workdir.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)

    def python(command: list[str], **variables: str) -> None:
        began = time.monotonic()
        print("python", *command, variables, flush=True)
        environment = environment_of(args.workdir) | variables
        code = subprocess.call([sys.executable, "-u", *command], env=environment)
        print(f"took {time.monotonic() - began:.0f} s", flush=True)
        if code:
            sys.exit(f"exit code {code}")

    for seed in map(int, args.seeds.split(",")):
        name = gsm8k.run_name(args.arm, seed)
        run = args.workdir / name
        for part in args.parts.split(","):
            if part == "train":
                if RunFolder(run).finished_steps() is None:
                    python(train_command(args, seed, run))
                gsm8k.add_metrics(run, args.out)
                (args.out / f"{name}.json").write_text(json.dumps(describe_run(run)))
                continue
            folder = run / "evaluations" / part
            if gsm8k.finished_evaluation(folder) is None:
                mode = "fp8" if part.endswith("-fp8") else "auto"
                command = evaluate_command(args, part, run, folder)
                python(command, QERL_EVALUATE_DEQUANTIZE=mode)
            found = figures(folder)
            (args.out / f"{name}-{part}.json").write_text(json.dumps(found))
            print(name, part, found["accuracy"], flush=True)


if __name__ == "__main__":
    main()
