r"""Measures how fast rollouts are: milliseconds of a decode step, and tokens per second.

    python -m benchmarks.rollout --model=qwen2.5-7b,qwen2.5-14b --format=nvfp4,bf16
    python -m benchmarks.rollout --model=qwen2.5-7b --format=bf16 --lora-rank=32,0
    python -m benchmarks.rollout --model=qwen2.5-7b --format=nvfp4 --batch=64 --parts
    python -m benchmarks.rollout --source=MODEL --data=gsm8k_test.jsonl --prompts=64
    python -m benchmarks.rollout --model=qwen2.5-72b --format=nvfp4 --batch=1,8,32 --tensor=2
    python -m benchmarks.rollout --model=qwen2.5-7b --format=nvfp4 --startup

Without --source the weights are random, made on the device in the shapes of the model. The adapter
has the rank --lora-rank on all projections, and --expert-rank on routed experts, whose rows are of
kinds of their own; rank 0 means no adapter, which costs the same as weights with a merged adapter.
With --data a real model completes problems, with the system message of `experiments.evaluate`.
--startup measures the time from the command to the first tokens, with every program compiled that a
rollout of these prompts can need. On a GPU the programs are kept in JAX_COMPILATION_CACHE_DIR; a
second run measures the start with a full cache.

Several commands may run at the same time if the memory holds them
(XLA_PYTHON_CLIENT_PREALLOCATE=false): they take turns in measuring. --startup does not wait.

Every measurement prints a line and at once writes its row to --out, {device, rows: [...]}. A run
replaces the rows of its own policy, options and lengths and keeps all others.
`benchmarks/rollout/benchmark.py` explains the fields of a row. On a copy of the project without
git, the environment variable QERL_COMMIT names the commit of the rows.
"""

import argparse
import os
import time

from benchmarks import common
from qerl_jax.commands import cli

_BEGAN = time.time()  # before the imports that take long


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: numbers with commas, like 1,8,32") from error


def make_parser() -> argparse.ArgumentParser:
    """The arguments of the command; `began` is the time when it began."""
    parser = common.make_parser("benchmarks.rollout", __doc__, "benchmarks/results/rollout.json")
    parser.set_defaults(began=_BEGAN)
    add = parser.add_argument
    models = "comma-separated models (default: qwen2.5-7b)"
    add("--model", type=_names, default="qwen2.5-7b", help=models)
    source = "real weights: a folder, a .gguf file or a hub id (default: random)"
    add("--source", default="", help=source)
    formats = "comma-separated weight formats: nvfp4, mxfp4, nf4, bf16"
    add("--format", type=_names, default="nvfp4,bf16", help=formats)
    ranks = "comma-separated ranks of the adapter; 0: no adapter (default: 32)"
    add("--lora-rank", type=_numbers, default="32", help=ranks)
    experts = (
        "rank of the adapters of routed experts, where --lora-rank is not 0; 0: none (default)"
    )
    add("--expert-rank", type=int, default=0, help=experts)
    tensor = "devices of this host that the weights are cut between (default: 1)"
    add("--tensor", type=int, default=1, help=tensor)
    add("--chunk-steps", type=int, default=16, help="decode steps per program call (default: 16)")
    dequantize = (
        "dequantize once per rollout or in every step, where no kernel reads packed weights"
    )
    add("--dequantize", choices=("once", "step"), default="once", help=dequantize)
    kernel = "kernel of packed weights (default: the Hopper kernel, where it runs)"
    add("--implementation", choices=("", "mosaic", "mma", "xla"), default="", help=kernel)
    add("--head-format", default="", help="nvfp4: a head in 4 bits (default: as the embedding)")

    add = parser.add_argument_group("decode steps").add_argument
    batches = "comma-separated batch sizes (default: 1,8,32,64,256)"
    add("--batch", type=_numbers, default="1,8,32,64,256", help=batches)
    add("--prompt", type=int, default=256, help="tokens per prompt (default: 256)")
    add("--new-tokens", type=int, default=144, help="new tokens per row (default: 144)")

    add = parser.add_mutually_exclusive_group().add_argument
    add("--parts", action="store_true", help="also measure the parts of a step, on a GPU")
    add("--data", default="", help="measure rollouts of FILE.jsonl with question and answer")
    add("--startup", action="store_true", help="measure the time to the first tokens instead")

    add = parser.add_argument_group("whole rollouts").add_argument
    add("--prompts", type=int, default=64, help="number of prompts per rollout (default: 64)")
    add("--group", type=int, default=16, help="completions per prompt (default: 16)")
    add("--max-new-tokens", type=int, default=1024, help="completion limit (default: 1024 tokens)")
    add("--max-rows", type=int, default=0, help="largest decode batch in rows (default: what fits)")
    return parser


def run(options: argparse.Namespace) -> None:
    """Runs the benchmark with the parsed arguments."""
    from benchmarks.rollout.benchmark import benchmark
    from pallas_kernels import fp4_matmul

    if options.implementation:
        os.environ[fp4_matmul.KERNEL_VARIABLE] = options.implementation
    benchmark(options)


def main() -> None:
    """Runs the command line."""
    # JAX keeps only programs that compile for a second or more; drawing weights takes less.
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    cli.run_command(make_parser(), run, tensor_of=lambda options: options.tensor)


if __name__ == "__main__":
    main()
