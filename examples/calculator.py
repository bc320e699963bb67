"""A calculator for grade-school problems: a tool that the policy calls, on a GPU and without a hub.

    uv run python -m experiments.grpo_gsm8k --config=grpo_gsm8k:qwen2.5-1.5b \
        --config.model.source=FOLDER --config.data.source=reasoning_gym:gsm_symbolic \
        --config.environment.function=examples.calculator:Calculator \
        --config.environment.max_turns=6 --config.environment.reply_tokens=64 \
        --config.rollout.max_new_tokens=768 --config.data.max_prompt_tokens=640 \
        --config.data.system_prompt="Solve the problem step by step. Use the tool calculate for \
    all arithmetic. Then write the final number between <answer> and </answer>." \
        --config.rewards.format.weight=0.0 --config.steps=40 --config.eval.every=0

The control is the same command without the four lines of the environment and the tool's sentence.
FOLDER holds Qwen2.5-1.5B-Instruct; without --config.model.source it comes from the hub.
"""

import ast
import operator

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


def _value(node):
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.operand))
    raise ValueError("write numbers with + - * / // % and parentheses")
