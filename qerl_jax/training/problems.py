"""The problems of a run: loading them, writing them as prompts, and knowing them again."""

from collections.abc import Iterable, Mapping

import jax
from ml_collections import ConfigDict

from qerl_jax.data import HELD_OUT, Problem, Prompt, encode_prompts, fingerprint, load_splits
from qerl_jax.errors import UserError
from qerl_jax.rl.rewards import Reward
from qerl_jax.scoring.calls import check_columns, columns_read
from qerl_jax.weights.load import LoadedModel


def load_problems(
    config: ConfigDict, rewards: Mapping[str, tuple[Reward, float]]
) -> dict[str, list[Problem]]:
    """Loads the problems of a run.

    Args:
        config: the resolved config.
        rewards: function and weight by name.

    Returns:
        The problems by split, 'train' and, with evaluations, 'eval'.

    Raises:
        UserError: the problems cannot be loaded, or lack a column that a reward needs.
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
    problems = {"train": train} | ({"eval": evaluation} if config.eval.every else {})
    for name, (reward, _) in rewards.items():
        for split, found in problems.items():
            if split == "train" or name == "correctness":
                check_columns(name, reward, [problem.columns for problem in found])
    return problems


def encode_problems(
    config: ConfigDict, model: LoadedModel, problems: Mapping[str, list[Problem]]
) -> dict[str, list[Prompt]]:
    """Writes the problems as prompts, and prints the sizes of the model and of the data.

    Args:
        config: the resolved config.
        model: the model.
        problems: problems by split, from `load_problems`.

    Raises:
        UserError: a prompt is too long, or the chat template refuses it.
    """
    prompts = {
        split: encode_prompts(
            found,
            model.tokenizer,
            system_prompt=config.data.system_prompt,
            question_suffix=config.data.question_suffix,
            chat_template_args=config.data.chat_template_args.to_dict(),
            max_prompt_tokens=config.data.max_prompt_tokens,
        )
        for split, found in problems.items()
    }
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    held_out = f"{len(prompts.get('eval', []))} held out"
    if config.eval.every and not config.eval.problems:
        held_out += " (at most 256 and a tenth; --config.eval.problems=N changes it)"
    print(
        f"{model.config.num_layers} layers, {size / 1e9:.2f} GB of weights; "
        f"{len(prompts['train'])} training prompts, {held_out}",
        flush=True,
    )
    return prompts


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


def check_problems(config: ConfigDict, saved: Mapping[str, str], found: Mapping[str, str]) -> None:
    """Refuses problems that are not the problems of a checkpoint.

    Args:
        config: the resolved config.
        saved: fingerprints of the problems by split when the checkpoint was saved; empty in a
            checkpoint of an earlier version, whose problems are not compared.
        found: fingerprints of the problems of this start.

    Raises:
        UserError: the problems differ.
    """
    source = config.data.path or config.data.source
    eval_source = config.data.eval_path or config.data.eval_source
    for split, name, place in (
        ("train", "training", source),
        ("eval", "evaluation", source if eval_source in ("", HELD_OUT) else eval_source),
    ):
        if saved.get(split, found[split]) != found[split]:
            raise UserError(
                f"the {name} problems of {place} are not the problems that this run began with; "
                "restore them, or pass another --workdir to begin a run with the new ones"
            )
