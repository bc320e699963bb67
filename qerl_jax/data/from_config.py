"""The problems of a run: read, rendered as prompts, and checked against the model."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from ml_collections import ConfigDict

from qerl_jax.config.fields import learns_from_text
from qerl_jax.data.environment_config import check_problems, contracts_of, tools_of
from qerl_jax.data.mixture import MixtureSource, read_mixture
from qerl_jax.data.order import Order, Source
from qerl_jax.data.prompts import Problem, Prompt, encode_prompts, prompt_config
from qerl_jax.data.splits import ProblemConfig, digest_of_problems, load_mixture, load_splits
from qerl_jax.data.texts import encode_texts, text_source
from qerl_jax.errors import UserError
from qerl_jax.policy.config import ModelConfig
from qerl_jax.rewards.calls import check_columns, columns_read
from qerl_jax.rewards.functions import Reward
from qerl_jax.rollout.config import completion_tokens, has_turns
from qerl_jax.weights.tokenizer import Tokenizer

TRAIN, EVAL = "train", "eval"  # names of the splits


def load_problems(
    config: ConfigDict, rewards: Mapping[str, tuple[Reward, float]]
) -> dict[str, list[Problem]]:
    """Loads the problems by split.

    Returns:
        The problems of 'train', or of 'train/NAME' for each source of a mixture; and, with
        evaluations, of 'eval'.

    Raises:
        UserError: they cannot be read, lack a column that a reward needs, or there is no reward
            that evaluates them.
    """
    train, evaluation = _load(config, [function for function, _ in rewards.values()])
    if learns_from_text(config):
        return train | ({EVAL: evaluation} if config.eval.every else {})
    if "correctness" not in rewards and config.data.curriculum != "off":
        raise UserError(
            f"data.curriculum={config.data.curriculum!r} needs a reward named 'correctness', whose "
            "success rate it follows; or pass data.curriculum=off"
        )
    if config.eval.every and evaluation and "correctness" not in rewards:
        raise UserError("an evaluation needs a reward named 'correctness'; or pass eval.every=0")
    problems = train | ({EVAL: evaluation} if config.eval.every else {})
    for name, (reward, _) in rewards.items():
        for split, split_problems in problems.items():
            if split != EVAL or name == "correctness":
                rows = [problem.columns for problem in split_problems]
                check_columns(name, reward, rows, converses=has_turns(config))
    for split_problems in problems.values():
        check_problems(split_problems, config)
    return problems


def _load(
    config: ConfigDict, rewards: Sequence[Reward]
) -> tuple[dict[str, list[Problem]], list[Problem]]:
    """The training problems by split, and the evaluation problems."""
    problems = ProblemConfig(
        source=config.data.source,
        path=config.data.path,
        eval_source=config.data.eval_source,
        eval_path=config.data.eval_path,
        eval_size=(config.eval.problems or None) if config.eval.every else 0,
        rewards=rewards,
        levels=tuple(config.data.levels),
        max_question_chars=config.data.max_question_chars,
        fields=dict(config.data.fields.items()),
        options=config.data.options.to_dict(),
    )
    if learns_from_text(config):
        problems = dataclasses.replace(problems, **text_source(config))
    if sources := mixture_of(config):
        by_name, evaluation = load_mixture(sources, problems)
        return {
            f"{TRAIN}/{name}": source_problems for name, source_problems in by_name.items()
        }, evaluation
    train, evaluation = load_splits(problems)
    return {TRAIN: train}, evaluation


def mixture_of(config: ConfigDict) -> dict[str, MixtureSource]:
    """The sources of a mixture by name; {} where the run has one source."""
    return read_mixture({"mixture": config.data.mixture.to_dict(), "path": config.data.path})


def training_prompts(prompts: Mapping[str, list[Prompt]]) -> list[Prompt]:
    """The prompts of all sources in one list."""
    return [
        prompt
        for split, split_prompts in prompts.items()
        if split != EVAL
        for prompt in split_prompts
    ]


def order_of(config: ConfigDict, prompts: Mapping[str, list[Prompt]]) -> Order:
    """The rule by which the prompts of `training_prompts` are drawn."""
    mixture = mixture_of(config)
    sources = []
    for split, split_prompts in prompts.items():
        if split != EVAL:
            name = split.removeprefix(TRAIN).removeprefix("/")
            sources.append(Source(name, len(split_prompts), mixture[name].weight if name else 1.0))
    curriculum = config.data.curriculum != "off"
    share = config.data.curriculum_share if curriculum else 0.0
    return Order(tuple(sources), config.seed, share)


def by_source(order: Order, prompts: Sequence[Prompt]) -> dict[str, Sequence[Prompt]]:
    """The training prompts by split, as `load_problems` names them."""
    return {
        f"{TRAIN}/{source.name}" if source.name else TRAIN: prompts[start : start + source.size]
        for source, start in zip(order.sources, order.starts, strict=True)
    }


def encode_problems(
    config: ConfigDict, tokenizer: Tokenizer, problems: Mapping[str, list[Problem]]
) -> dict[str, list[Prompt]]:
    """Renders and tokenizes the problems of each split.

    Raises:
        UserError: a prompt is longer than data.max_prompt_tokens.
    """
    names = {
        split: f" of {split.removeprefix(f'{TRAIN}/')}" if "/" in split else ""
        for split in problems
    }
    if learns_from_text(config):
        return {
            split: encode_texts(config, tokenizer, split_problems, f"rows{names[split]}")
            for split, split_problems in problems.items()
        }
    prompts = prompt_config(
        config.data,
        chat_template_args=config.data.chat_template_args.to_dict(),
        tools=tools_of(contracts_of(config)),
    )
    return {
        split: encode_prompts(
            split_problems,
            tokenizer,
            prompts,
            max_prompt_tokens=config.data.max_prompt_tokens,
            what=f"prompts{names[split]}",
        )
        for split, split_problems in problems.items()
    }


def problem_digests(
    prompts: Mapping[str, Iterable[Prompt]],
    rewards: Mapping[str, tuple[Reward, float]],
    *,
    whole_rows: bool = False,
) -> dict[str, str]:
    """Digests of the problems by split, with the columns that the rewards read.

    With `whole_rows` all columns are read, as environments do.
    """
    problems = {
        split: [prompt.problem for prompt in split_prompts]
        for split, split_prompts in prompts.items()
    }
    functions = [reward for reward, _ in rewards.values()]
    return {
        split: digest_of_problems(
            split_problems,
            {name for p in split_problems for name in p.columns}
            if whole_rows
            else columns_read(functions, [p.columns for p in split_problems]),
        )
        for split, split_problems in problems.items()
    }


def training_digests(digests: Mapping[str, str]) -> dict[str, str]:
    """The digests of the training problems among those of all splits."""
    return {split: digest for split, digest in digests.items() if split != EVAL}


def check_positions(config: ConfigDict, architecture: ModelConfig) -> None:
    """Refuses lengths that a model has no positions for."""
    if learns_from_text(config):
        if config.sft.max_tokens > architecture.max_position:
            raise UserError(
                f"sft.max_tokens={config.sft.max_tokens}: the model has "
                f"{architecture.max_position} positions: pass --config.sft.max_tokens="
                f"{architecture.max_position} or less"
            )
        return
    for part in ("rollout", "eval") if config.eval.every else ("rollout",):
        new_tokens = completion_tokens(config, config[part].max_new_tokens)
        longest = config.data.max_prompt_tokens + new_tokens
        if longest > architecture.max_position:
            limit = "environment.context_tokens" if has_turns(config) else ""
            raise UserError(
                f"data.max_prompt_tokens + {limit or f'{part}.max_new_tokens'} = {longest}, the "
                "model has "
                f"{architecture.max_position} positions: lower one of the two"
            )
