"""The problems of a run: read, rendered as prompts, and checked against the model."""

from collections.abc import Mapping

from ml_collections import ConfigDict

from qerl_jax.data import Problem, Prompt, encode_prompts, load_splits
from qerl_jax.errors import UserError
from qerl_jax.policy.config import ModelConfig
from qerl_jax.rl.rewards import Reward
from qerl_jax.weights.tokenizer import Tokenizer


def load_problems(
    config: ConfigDict, rewards: Mapping[str, tuple[Reward, float]]
) -> dict[str, list[Problem]]:
    """Loads the problems by split, 'train' and, with evaluations, 'eval'.

    Raises:
        UserError: they cannot be read, or there is no reward that evaluates them.
    """
    train, evaluation = load_splits(
        config.data.source,
        path=config.data.path,
        eval_source=config.data.eval_source,
        eval_path=config.data.eval_path,
        eval_size=(config.eval.problems or None) if config.eval.every else 0,
        rewards=[function for function, _ in rewards.values()],
        levels=tuple(config.data.levels),
        max_question_chars=config.data.max_question_chars,
        options=config.data.options.to_dict(),
    )
    if config.eval.every and evaluation and "correctness" not in rewards:
        raise UserError("an evaluation needs a reward named 'correctness'; or pass eval.every=0")
    return {"train": train} | ({"eval": evaluation} if config.eval.every else {})


def encode_problems(
    config: ConfigDict, tokenizer: Tokenizer, problems: Mapping[str, list[Problem]]
) -> dict[str, list[Prompt]]:
    """Renders and tokenizes the problems of each split.

    Raises:
        UserError: a prompt is longer than data.max_prompt_tokens.
    """
    return {
        split: encode_prompts(
            found,
            tokenizer,
            system_prompt=config.data.system_prompt,
            question_suffix=config.data.question_suffix,
            max_prompt_tokens=config.data.max_prompt_tokens,
        )
        for split, found in problems.items()
    }


def check_positions(config: ConfigDict, architecture: ModelConfig) -> None:
    """Refuses lengths that a model has no positions for."""
    for part in ("rollout", "eval") if config.eval.every else ("rollout",):
        longest = config.data.max_prompt_tokens + config[part].max_new_tokens
        if longest > architecture.max_position:
            raise UserError(
                f"data.max_prompt_tokens + {part}.max_new_tokens = {longest}, the model has "
                f"{architecture.max_position} positions: lower one of the two"
            )
