"""Completions by a loaded model: from token ids to token ids, and from messages to answers."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from qerl_jax.data.prompts import Problem, PromptConfig, render_prompt
from qerl_jax.errors import UserError
from qerl_jax.policy.lora import Lora
from qerl_jax.policy.policy import Policy
from qerl_jax.rollout.completions import Rollout, detokenize
from qerl_jax.rollout.config import DEFAULT_ENGINE, EngineConfig, SamplingConfig
from qerl_jax.rollout.sampler import Sampler
from qerl_jax.weights.load import LoadedModel


def generate(
    key: jax.Array,
    model: LoadedModel,
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: SamplingConfig,
    engine: EngineConfig = DEFAULT_ENGINE,
    group_size: int = 1,
) -> Rollout:
    """Samples `group_size` completions of every prompt.

    Args:
        key: PRNG key; a sample depends on it, on the row and on the position only.
        model: the model, of which the architecture and the tokenizer are used.
        policy: parameters and adapter that sample, such as `Policy(model.params, lora=None)`.
        prompts: P lists of token ids.
        sampling: distribution and length of the completions; a temperature of 0 is greedy.
        engine: settings of the engine.
        group_size: G, number of completions of each prompt.

    Returns:
        The B = P G completions, as NumPy arrays.

    Raises:
        UserError: there is no prompt, a prompt is empty or too long, or the memory does not hold a
            row.
    """
    sampler = Sampler(model.config, model.tokenizer, sampling, engine, group_size)
    return sampler.rollout(key, policy, prompts)


def complete(
    model: LoadedModel,
    questions: str | Sequence[str],
    *,
    sampling: SamplingConfig,
    lora: Lora | None = None,
    system: str = "",
    examples: Sequence[str] = (),
    chat_template_args: Mapping[str, Any] | None = None,
    group_size: int = 1,
    seed: int = 0,
    engine: EngineConfig = DEFAULT_ENGINE,
) -> list[list[str]]:
    """Answers questions in the chat template of a model.

    Args:
        model: the model.
        questions: P messages of a user; a text alone is one message.
        sampling: distribution and length of the completions; a temperature of 0 is greedy.
        lora: adapter of the policy, or None.
        system: the system message; with '' the template decides.
        examples: solved examples before each question, as in `PromptConfig`.
        chat_template_args: further variables of the template, such as Qwen3's `enable_thinking`.
        group_size: G, number of completions of each question.
        seed: seed of the samples.
        engine: settings of the engine.

    Returns:
        G completions for each of P questions.

    Raises:
        UserError: there is no question, a question is no text, the model has no chat template, a
            prompt cannot be rendered, or is too long.
    """
    questions = [questions] if isinstance(questions, str) else list(questions)
    if not questions:
        raise UserError("there is no question to complete")
    for number, question in enumerate(questions):
        if not isinstance(question, str):
            raise UserError(
                f"question {number} is {question!r:.60}, not a text: pass a list of texts"
            )
    prompt = PromptConfig(system, "", examples, chat_template_args or {})
    texts = [render_prompt(Problem(text, ""), model.tokenizer, prompt) for text in questions]
    rollout = generate(
        jax.random.key(seed, impl="threefry2x32"),
        model,
        Policy(model.params, lora),
        [model.tokenizer.encode(text) for text in texts],
        sampling=sampling,
        engine=engine,
        group_size=group_size,
    )
    completions = detokenize(rollout, model.tokenizer.answer)
    return [completions[row : row + group_size] for row in range(0, len(completions), group_size)]
