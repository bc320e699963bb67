"""Completions of texts by a loaded model: from messages to answers in one call."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from qerl_jax.errors import UserError
from qerl_jax.policy.lora import Lora
from qerl_jax.rollout.config import DEFAULT_ENGINE, EngineConfig, SamplingConfig
from qerl_jax.rollout.engine import detokenize, generate
from qerl_jax.weights.load import LoadedModel


def complete(
    model: LoadedModel,
    questions: Sequence[str],
    *,
    sampling: SamplingConfig,
    lora: Lora | None = None,
    system: str = "",
    chat_template_args: Mapping[str, Any] | None = None,
    group_size: int = 1,
    seed: int = 0,
    engine: EngineConfig = DEFAULT_ENGINE,
) -> list[list[str]]:
    """Answers questions in the chat template of a model.

    Args:
        model: the model.
        questions: P messages of a user.
        sampling: distribution and length of the completions; a temperature of 0 is greedy.
        lora: adapter of the policy, or None.
        system: the system message; with '' the template decides.
        chat_template_args: further variables of the template, such as Qwen3's `enable_thinking`.
        group_size: G, number of completions of each question.
        seed: seed of the samples.
        engine: settings of the engine.

    Returns:
        G completions for each of P questions.

    Raises:
        UserError: there is no question, the model has no chat template, or a prompt is too long.
    """
    if not questions:
        raise UserError("there is no question to complete")
    start = [{"role": "system", "content": system}] if system else []
    texts = [
        model.tokenizer.apply_chat_template(
            [*start, {"role": "user", "content": question}], **(chat_template_args or {})
        )
        for question in questions
    ]
    rollout = generate(
        jax.random.key(seed, impl="threefry2x32"),
        model.params,
        lora,
        [model.tokenizer.encode(text) for text in texts],
        config=model.config,
        sampling=sampling,
        tokenizer=model.tokenizer,
        engine=engine,
        group_size=group_size,
    )
    completions = detokenize(rollout, model.tokenizer.decode)
    return [completions[row : row + group_size] for row in range(0, len(completions), group_size)]
