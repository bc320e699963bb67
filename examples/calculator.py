"""A calculator for grade-school problems, as a tool and as an environment of texts, on a GPU.

    uv run --extra cuda python examples/calculator.py --model=FILE.gguf --seed=0
    uv run --extra cuda python examples/calculator.py --model=FILE.gguf --control    # without one

FILE.gguf holds Qwen2.5-Coder-1.5B-Instruct; without --model it comes from the hub. This model was
not trained to call tools: it does not write the tags of its template, not even after an example.
So it writes <calculate>3 * 4</calculate> as text, as the solved example does, and the environment
answers with the value.

A model that calls tools needs neither an example nor tags of its own, only the class `Calculator`:

    uv run --extra cuda python -m experiments.grpo_gsm8k --config=grpo_gsm8k:qwen2.5-1.5b \
        --config.data.source=reasoning_gym:gsm_symbolic --config.data.max_prompt_tokens=640 \
        --config.data.system_prompt="Solve the problem step by step. Use the tool calculate for \
    all arithmetic. Then write the final number between <answer> and </answer>." \
        --config.environment.function=examples.calculator:Calculator \
        --config.environment.max_turns=6 --config.rollout.max_new_tokens=768 \
        --config.rewards.format.weight=0.0
"""

import argparse
import ast
import operator
import re

import qerl_jax as qj
from qerl_jax.rewards.functions import tagged_answer

ANSWER = "Then write the final number between <answer> and </answer>."
QUESTION = "A box holds 12 pens at $3 each. How much do 5 boxes cost?"
EXAMPLE = (
    *(QUESTION, "Each box costs 12 * 3 dollars.\n<calculate>12 * 3</calculate>"),
    *("36", "There are 5 boxes.\n<calculate>5 * 36</calculate>"),
    *("180", "The boxes cost 180 dollars.\n<answer>180</answer>"),
)
CONTROL_EXAMPLE = (
    QUESTION,
    "Each box costs 12 * 3 = 36 dollars. 5 boxes cost 5 * 36 = 180 dollars.\n<answer>180</answer>",
)

_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


class Calculator:
    """An environment of tools in the contract of TRL: its public methods are what may be called."""

    def reset(self, **columns):
        """Begins an episode; nothing is said in addition to the question."""
        self.results = []

    def calculate(self, expression: str) -> str:
        """Calculates an arithmetic expression.

        Args:
            expression: an expression of numbers with + - * / // % and parentheses, such as
                "3 * (17 + 25)".

        Returns:
            The value.
        """
        value = _value(ast.parse(expression.strip(), mode="eval").body)
        self.results.append(value)
        return f"{value:.10g}"


class TextCalculator(Calculator):
    """An environment of texts: a turn without an expression is the answer."""

    def step(self, text):
        """Returns the values of the expressions in a turn, no reward, and whether it is the end."""
        expressions = re.findall(r"<calculate>(.*?)</calculate>", text, re.DOTALL)
        try:
            values = [self.calculate(expression) for expression in expressions]
        # Thousands of signs in a row are too deep for Python.
        except (ArithmeticError, MemoryError, RecursionError, SyntaxError, ValueError) as error:
            return f"error: {error}", 0.0, False
        return "\n".join(values), 0.0, not expressions


def calls(environments, **columns):
    """1 for a row with an expression that has a value, 0 for others."""
    return [float(bool(getattr(environment, "results", ()))) for environment in environments]


def _value(node):
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.operand))
    raise ValueError("write numbers with + - * / // % and parentheses")


def main():
    """Trains with or without the calculator; a run that was stopped is resumed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="", help="a .gguf file or a folder (default: the hub)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--control", action="store_true", help="train without the calculator")
    arguments = parser.parse_args()
    config = qj.get_config("grpo_gsm8k:qwen2.5-coder-1.5b")
    config.experiment = "no_calculator" if arguments.control else "calculator"
    config.update_from_flattened_dict(
        {
            "seed": arguments.seed,
            "steps": 40,
            "model.source": arguments.model or config.model.source,
            "data.source": "reasoning_gym:gsm_symbolic",
            "data.max_prompt_tokens": 512,
            "rollout.max_new_tokens": 512,
            "rl.updates_per_rollout": 1,
            "optimizer.learning_rate": 1e-4,
            "aqn.schedule": "off",
            "eval.every": 40,
            "eval.problems": 256,
            "eval.max_new_tokens": 512,
        }
    )
    if arguments.control:
        config.data.system_prompt = f"Solve the problem step by step. {ANSWER}"
        config.data.examples = CONTROL_EXAMPLE
        return qj.train(config, rewards={"correctness": tagged_answer})
    config.data.system_prompt = (
        "Solve the problem with a calculator. Write an expression between <calculate> and "
        f"</calculate>, and the user answers with its value. {ANSWER}"
    )
    config.data.examples = EXAMPLE
    config.environment.function = "examples.calculator:TextCalculator"
    config.environment.max_turns = 8
    # Rewarded for right answers alone, this policy does the sums itself (docs/environments.md).
    return qj.train(config, rewards={"correctness": tagged_answer, "calls": (calls, 0.5)})


if __name__ == "__main__":
    main()
