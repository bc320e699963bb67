r"""How fast rollouts are: milliseconds of a decode step, and tokens per second.

    python -m benchmarks.rollout --model=qwen2.5-7b,qwen2.5-14b --format=nvfp4,bf16
    python -m benchmarks.rollout --model=qwen2.5-7b --format=bf16 --lora-rank=32,0
    python -m benchmarks.rollout --model=qwen2.5-7b --format=nvfp4 --batch=64 --parts
    python -m benchmarks.rollout --source=MODEL --data=gsm8k_test.jsonl --prompts=64
    python -m benchmarks.rollout --model=qwen2.5-7b --format=nvfp4 --startup

Without --source the weights are random, made on the device in the shapes of the model. The adapter
has the rank --lora-rank on all seven projections; 0 is none, which is what weights with the adapter
merged into them cost. With --data problems are completed end to end by a real model, with the
system message of `experiments.evaluate`. --startup tells the time from the command to the first
tokens, with every program compiled that a rollout of these prompts can need; on a GPU they are kept
in JAX_COMPILATION_CACHE_DIR, so that a second run says what that saves.

Several commands may run at a time, as one measures after the other, if the memory holds them
(XLA_PYTHON_CLIENT_PREALLOCATE=false); --startup waits for no other.

Every measurement prints a line, and writes its row to --out, {device, rows: [...]}, at once; a run
replaces the rows of its own policy, options and lengths and keeps the others. What is in a row is
told in `benchmarks/rollout/benchmark.py`.
"""

import argparse
import os
import time

from experiments import cli

_BEGAN = time.time()  # What takes long to import comes later.


def make_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rollout",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="qwen2.5-7b", help="comma-separated presets (default: qwen2.5-7b)")
    add("--source", default="", help="real weights instead: a folder, a .gguf file, a hub id")
    add("--format", default="nvfp4,bf16", help="comma-separated: nvfp4, mxfp4, nf4, bf16")
    add("--lora-rank", default="32", help="comma-separated, of all seven projections; 0: none")
    add("--chunk-steps", type=int, default=16, help="decode steps of a program (default: 16)")
    add("--dequantize", choices=("once", "step"), default="once", help="where no kernel runs")
    add("--kv-cache-dtype", choices=("", "bfloat16", "float8"), default="")
    add("--head-format", default="", help="nvfp4: the head in 4 bits (default: as the embedding)")
    add("--seed", type=int, default=0)
    add("--bandwidth", type=float, default=0.0, help="bytes per second of the roofline")
    add("--out", default="benchmarks/results/rollout.json", help="the file of the rows")
    add("--commit", default="", help="instead of git's")

    group = parser.add_argument_group("decode steps")
    add = group.add_argument
    add("--batch", default="1,8,32,64,256", help="comma-separated (default: 1,8,32,64,256)")
    add("--prompt", type=int, default=256, help="tokens of each prompt (default: 256)")
    add("--new-tokens", type=int, default=144, help="of each row (default: 144)")
    add("--parts", action="store_true", help="split the step by part, on a GPU")

    group = parser.add_argument_group("whole rollouts")
    add = group.add_argument
    add("--data", default="", help="FILE.jsonl with question and answer; needs --source")
    add("--startup", action="store_true", help="how long rollouts take to begin, compiled")
    add("--prompts", type=int, default=64, help="of them (default: 64)")
    add("--group", type=int, default=16, help="completions of each (default: 16)")
    add("--max-new-tokens", type=int, default=1024)
    add("--max-rows", type=int, default=0, help="that decode together (default: what fits)")
    add("--system-prompt", help="instead of that of `experiments.evaluate`")
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Measures."""
    from benchmarks.rollout.benchmark import benchmark
    from benchmarks.rollout.subject import BenchmarkConfig
    from qerl_jax.errors import UserError
    from qerl_jax.evaluation.tasks import SYSTEM_PROMPT

    def numbers(flag: str, text: str) -> tuple[int, ...]:
        try:
            return tuple(int(number) for number in text.split(","))
        except ValueError as error:
            raise UserError(f"{flag}={text}: numbers with commas, like 1,8,32") from error

    given = dict(vars(arguments))
    if given["system_prompt"] is None:
        given["system_prompt"] = SYSTEM_PROMPT
    benchmark(
        BenchmarkConfig(
            models=tuple(given.pop("model").split(",")),
            formats=tuple(given.pop("format").split(",")),
            batches=numbers("--batch", given.pop("batch")),
            lora_ranks=numbers("--lora-rank", given.pop("lora_rank")),
            began=_BEGAN,
            **given,
        )
    )


def main() -> None:
    """Runs the command line."""
    # What draws weights compiles in less than the second from which on JAX keeps programs.
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    cli.run_command(make_parser(), run)


if __name__ == "__main__":
    main()
