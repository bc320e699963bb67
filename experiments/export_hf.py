"""Writes what a run trained for transformers, PEFT and vLLM.

    uv run python -m experiments.export_hf RUN --format=peft               # the adapter
    uv run python -m experiments.export_hf RUN --format=peft --with-base   # and its NVFP4 base
    uv run python -m experiments.export_hf RUN --format=merged             # one model in bfloat16
    uv run python -m experiments.export_hf RUN --format=nvfp4              # one model in 4 bits

RUN is a run folder, or the folder of a PEFT adapter. Each export has its tokenizer, chat template
and a model card, and prints the line that serves it with vLLM.

An adapter that was trained on an NVFP4 base belongs to that base. `merged` adds it to the base's
weights, dequantised, and is nearly the same policy; --onto=bf16 adds it to the weights before they
were quantised. `nvfp4` rounds the sum to 4 bits, which keeps only part of the update: how much is
measured and printed. By default it starts from the weights before they were quantised, as those
that lie on the 4-bit grid are rounded back to where they were (--onto=trained). To serve in 4 bits
without a loss, serve the adapter over its base.

The policies are scored on the problems that the run held out. With --score-problems=0 none is run.
"""

import argparse
import signal
import sys

from experiments import cli


def make_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.export_hf",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("source", metavar="RUN", help="a run folder or a PEFT adapter folder")
    add("--format", required=True, choices=("peft", "merged", "nvfp4"))
    add("--out", default="", help="the folder to write (default: RUN/exports/FORMAT)")
    add("--adapter", default="", help="best_adapter, adapter or a folder (default: the best)")
    add("--base", default="", help="the model under the adapter, instead of the one it names")
    add("--base-format", default="", help="what it was trained in (default: the run's, or nvfp4)")
    add("--onto", default="", choices=("trained", "bf16"), help="what to merge into")
    add("--with-base", action="store_true", help="write the NVFP4 base beside the adapter")
    add("--score-problems", type=int, metavar="N", help="how many to score on (default: all)")
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Exports."""
    from qerl_jax.export.write import ExportConfig, export

    # What was begun is removed on the way out.
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    export(ExportConfig(**vars(arguments)))


if __name__ == "__main__":
    cli.run_command(make_parser(), run)
