"""The problems of a run: read, rendered as prompts, and checked against the model."""

from collections.abc import Iterable, Mapping

from ml_collections import ConfigDict

from qerl_jax.data import Problem, Prompt, encode_prompts, fingerprint, load_splits
from qerl_jax.errors import UserError
from qerl_jax.policy.config import ModelConfig
from qerl_jax.rl.rewards import Reward
from qerl_jax.scoring.calls import check_columns, columns_read
from qerl_jax.weights.tokenizer import Tokenizer


def load_problems(
    config: ConfigDict, rewards: Mapping[str, tuple[Reward, float]]
) -> dict[str, list[Problem]]:
    """Loads the problems by split, 'train' and, with evaluations, 'eval'.

    Raises:
        UserError: they cannot be read, lack a column that a reward needs, or there is no reward
            that evaluates them.
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
        fields=dict(config.data.fields.items()),
        options=config.data.options.to_dict(),
    )
    if config.eval.every and evaluation and "correctness" not in rewards:
        raise UserError("an evaluation needs a reward named 'correctness'; or pass eval.every=0")
    problems = {"train": train} | ({"eval": evaluation} if config.eval.every else {})
    for name, (reward, _) in rewards.items():
        for split, found in problems.items():
            if split == "train" or name == "correctness":
                check_columns(name, reward, [problem.columns for problem in found])
    return problems


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
            chat_template_args=config.data.chat_template_args.to_dict(),
            max_prompt_tokens=config.data.max_prompt_tokens,
        )
        for split, found in problems.items()
    }


def fingerprints(
    prompts: Mapping[str, Iterable[Prompt]], rewards: Mapping[str, tuple[Reward, float]]
) -> dict[str, str]:
    """Digests of the problems by split, with the columns that the rewards read.

    Args:
        prompts: prompts by split.
        rewards: function and weight by name.
    """
    read = {split: [prompt.problem for prompt in found] for split, found in prompts.items()}
    functions = [reward for reward, _ in rewards.values()]
    return {
        split: fingerprint(problems, columns_read(functions, [p.columns for p in problems]))
        for split, problems in read.items()
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
