"""Says what a run would do without starting it: nothing is trained, loaded onto a device or kept.

It refuses what a start refuses before its model is loaded, a prompt that is too long, an
environment that the chat template cannot write, or whose first reset fails, and a reward that fails
for all completions that are made up for it.
"""

import functools
import itertools
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from ml_collections import ConfigDict

from qerl_jax.config.describe import describe_changes, describe_config
from qerl_jax.config.fields import learns_from_text
from qerl_jax.data.agents import RunAgents, made_up_episode
from qerl_jax.data.environment_config import make_environments
from qerl_jax.data.environments import RunEnvironments
from qerl_jax.data.from_config import (
    EVAL,
    TRAIN,
    check_positions,
    encode_problems,
    load_problems,
    order_of,
    training_prompts,
)
from qerl_jax.data.order import Order
from qerl_jax.data.prompt_rollout import AnyEnvironments, Ended
from qerl_jax.data.prompts import Problem, Prompt
from qerl_jax.environments.episodes import Episode, failures
from qerl_jax.environments.roles import FAILURE
from qerl_jax.errors import UserError, visible
from qerl_jax.memory.report import check_fits, format_plan
from qerl_jax.memory.run_plan import plan_run, this_device
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.sharding import make_mesh
from qerl_jax.processes.launch import read_rank
from qerl_jax.quantization.base import describe_cost
from qerl_jax.rewards.calls import announce_hosts
from qerl_jax.rewards.from_config import rewards_of
from qerl_jax.rewards.functions import Reward
from qerl_jax.rewards.score import Scoring
from qerl_jax.run.folder import RunFolder, check_run_folder, default_folder
from qerl_jax.run.metrics import check_trackers, read_steps
from qerl_jax.system.paths import user_path
from qerl_jax.training.begin import check_origin
from qerl_jax.training.saving import policy_folder
from qerl_jax.training.setup import (
    check_agent_rewards,
    check_method,
    longest_prompt,
    rows_of_step,
    settle_text,
)
from qerl_jax.training.teacher import check_tokens, has_own_weights, plan_teacher, teacher_errors
from qerl_jax.training.validate import check_extension, validate
from qerl_jax.weights import tokenizer
from qerl_jax.weights.checkpoint import open_checkpoint, read_architecture
from qerl_jax.weights.model_source import locate
from qerl_jax.weights.tokenizer import Tokenizer

_NOTHING_STARTED = "dry run: nothing was started and no folder was made"
_RESETS = 64  # environments of a split, at most, that say what they add to a prompt


def dry_run(
    config: ConfigDict,
    *,
    workdir: str | Path | None = None,
    write: Callable[[str], object] = print,
    rewards: Mapping[str, tuple[Reward, float]] | None = None,
    preset: ConfigDict | None = None,
) -> None:
    """Writes the resolved config, counts of the data, a rendered prompt and the plan of the memory.

    With `preset`, the config without what the command line sets, only what differs is written. The
    run folder is not made.

    Raises:
        UserError: the run could not start.
    """
    config, texts, schedule_steps = check_start(config, workdir=workdir)
    folder = RunFolder(_folder_path(config, workdir))
    rewards = {} if learns_from_text(config) else rewards_of(config, rewards)
    if not folder.checkpoints.is_dir():
        check_origin(config)
    check_method(config, rewards, schedule_steps=schedule_steps)
    write(describe_config(config) if preset is None else describe_changes(config, preset))
    write(_describe_folder(config, folder))
    problems = texts or load_problems(config, rewards)
    architecture, model_tokenizer = read_description(config.model.source)
    check_positions(config, architecture)
    environments = None
    if not learns_from_text(config):
        environments = make_environments(config, model_tokenizer)
        check_agent_rewards(config, environments, rewards)
    prompts = encode_problems(config, model_tokenizer, problems)
    write(_describe_prompts(prompts, order_of(config, prompts)))
    first = training_prompts(prompts)[0]
    key = jax.random.key(config.seed, impl="threefry2x32")
    if isinstance(environments, RunEnvironments):
        first = environments.with_reset(key, first)
        write(_describe_resets(prompts, environments, key))
    width = longest_prompt(config, prompts)
    rows = rows_of_step(config, prompts)
    teacher = plan_teacher(config, architecture, read_architecture)
    if has_own_weights(config):
        with teacher_errors(config):
            own_architecture, own_tokenizer = read_description(config.teacher.source)
            check_positions(config, own_architecture)
        check_tokens(config, model_tokenizer, own_tokenizer)
    plan = plan_run(config, architecture, this_device(), prompt=width, rows=rows, teacher=teacher)
    write(format_plan(plan, config) + describe_cost(config, architecture, teacher))
    check_fits(plan, config, architecture)
    if learns_from_text(config):
        (row, *_), decode = (
            first.rows,
            functools.partial(model_tokenizer.decode, skip_special=False),
        )
        learned = decode(itertools.compress(row.completion, row.learned))
        shown = f"the first training row:\n{decode([*row.prompt, *row.completion])}"
        write(visible(f"{shown}\n\nof which it learns:\n{learned}\n"))
        write(_NOTHING_STARTED)
        return
    tried = _try_turns(key, config, prompts, model_tokenizer, environments)
    write(visible(_try_rewards(config, rewards, tried)))
    shown = f"the first training prompt:\n{first.text}"
    if isinstance(environments, RunAgents):
        shown = f"the first problem, whose prompt its agent writes:\n{first.problem.question}"
    shown += f"\n\nits answer: {first.problem.answer}\n"
    write(visible(shown))  # Problems and template may come from another person.
    write(_NOTHING_STARTED)


def check_start(
    config: ConfigDict, *, workdir: str | Path | None = None, reads_rows: bool = True
) -> tuple[ConfigDict, Mapping[str, list[Problem]] | None, int]:
    """Refuses what a start refuses before it calls a function or reads a model.

    Without `reads_rows` the steps of epochs, which are those of the rows of text, are not counted.

    Returns:
        The config and the problems of `settle_text`, as the folder of a run has the steps of its
        epochs, and the number of steps that the schedules span.

    Raises:
        UserError: a value is out of range, a tracker is not installed, the mesh has devices that
            are absent, or the folder holds no run, or one that this config cannot resume.
    """
    validate(config)
    if not reads_rows and learns_from_text(config) and config.sft.epochs:
        config = config.copy_and_resolve_references()
        config.update_from_flattened_dict({"sft.epochs": 0.0, "steps": 1})
    config, texts = settle_text(config)
    check_trackers(config)
    data, tensor = config.mesh.data, config.mesh.tensor
    if read_rank(os.environ, devices=data * tensor) is None:  # One process sees all devices.
        make_mesh(data, tensor)
    path = _folder_path(config, workdir)
    schedule_steps = check_run_folder(path, config)
    target = policy_folder(RunFolder(path), config)
    check_extension(config, schedule_steps=schedule_steps, target=target)
    return config, texts, schedule_steps


def _folder_path(config: ConfigDict, workdir: str | Path | None) -> Path:
    return default_folder(config) if workdir is None else user_path(workdir)


def read_description(source: str) -> tuple[ModelConfig, Tokenizer]:
    """Reads the architecture and the tokenizer of a model, and no weights.

    A hub is asked for the small files alone.

    Raises:
        UserError: they cannot be found or read, or are not supported.
    """
    path, _ = locate(source, weights=False)
    if path.suffix == ".gguf":
        checkpoint = open_checkpoint(source)
        assert checkpoint.tokenizer is not None, "a GGUF file holds its tokenizer"
        return checkpoint.config, checkpoint.tokenizer
    return read_architecture(str(path)), tokenizer.from_folder(path)


def _describe_prompts(prompts: Mapping[str, Sequence[Prompt]], order: Order) -> str:
    shares = dict(zip((source.name for source in order.sources), order.shares, strict=True))
    lines = []
    for split, split_prompts in prompts.items():
        lengths = [
            max((len(row.prompt) + len(row.completion) for row in prompt.rows), default=0)
            or len(prompt.ids)
            for prompt in split_prompts
        ]
        what, measured = ("rows", "they") if split_prompts[0].rows else ("problems", "prompts")
        kind, _, name = split.partition("/")
        kind = "training" if kind == TRAIN else "held-out"
        source_text = f" of {name}, {shares[name]:.1%} of the draws" if name else ""
        lines.append(
            f"{len(split_prompts):,} {kind} {what}{source_text}; {measured} have {min(lengths)} to "
            f"{max(lengths)} tokens, {statistics.median(lengths):.0f} in the median"
        )
    return "\n".join(lines) + "\n"


def _describe_resets(
    prompts: Mapping[str, Sequence[Prompt]], environments: RunEnvironments, key: jax.Array
) -> str:
    """Says how long prompts are with what environments say; refuses those that are too long."""
    lengths = []
    for split_prompts in prompts.values():
        some = list(split_prompts[:: -(-len(split_prompts) // _RESETS)])
        some.append(max(split_prompts, key=lambda prompt: len(prompt.ids)))
        lengths += environments.reset_lengths(key, some)
    limit = environments.max_prompt_tokens
    if max(lengths) > limit:
        raise UserError(
            f"{sum(length > limit for length in lengths)} of {len(lengths)} prompts with what "
            f"environment.function says at its reset are over {limit} tokens, the longest has "
            f"{max(lengths)}; instead of data.max_prompt_tokens={limit} pass "
            f"--config.data.max_prompt_tokens={max(lengths)} or more"
        )
    return (
        f"with what the environment says at its reset, {len(lengths)} of them have {min(lengths)} "
        f"to {max(lengths)} tokens, {statistics.median(lengths):.0f} in the median\n"
    )


def _try_turns(
    key: jax.Array,
    config: ConfigDict,
    prompts: Mapping[str, Sequence[Prompt]],
    model_tokenizer: Tokenizer,
    environments: AnyEnvironments | None,
) -> list[Ended]:
    """Makes up a group of completions of the first problem of each training source.

    They are in turn its answer and its question as the tokenizer decodes them, and each of them is
    the one turn of a conversation.
    """
    ended = []
    for split, (prompt, *_) in prompts.items():
        if split == EVAL:
            continue
        texts = [text for text in (prompt.problem.answer, prompt.problem.question) if text]
        size = config.rollout.group_size
        turns = [list(model_tokenizer.encode(texts[n % len(texts)])) for n in range(size)]
        episodes: Sequence[Episode | None] = [None] * size
        if isinstance(environments, RunAgents):
            texts = [model_tokenizer.decode(ids) for ids in turns]
            episodes = [made_up_episode(text) for text in texts]
        elif environments is not None:
            dialog = environments.one_turn(key, prompt, turns)
            episodes = dialog.episodes
            if all(episode.ending == FAILURE for episode in dialog.episodes):
                lines = failures([episode.error for episode in dialog.episodes])
                raise UserError(f"{'; '.join(lines)}: correct the environment")
        ended += [
            Ended(prompt, model_tokenizer.decode(ids), len(ids), True, episode)
            for ids, episode in zip(turns, episodes, strict=True)
        ]
    return ended


def _try_rewards(
    config: ConfigDict, rewards: Mapping[str, tuple[Reward, float]], ended: Sequence[Ended]
) -> str:
    """Calls each reward for made-up completions; refuses one that fails for all of them."""
    announce_hosts(reward for reward, _ in rewards.values())
    with Scoring(rewards, len(ended), time_limit=config.reward_time_limit) as scoring:
        scoring.add({i: one.to_score() for i, one in enumerate(ended) if not one.has_failed})
        scores = scoring.finish()
    made_up = (
        f"{len(ended)} made-up completion{'s' * (len(ended) != 1)}, each the answer or the "
        "question of a problem"
    )
    for name, values in scores.parts.items():
        errors = [error for error in scores.errors if error.startswith(f"reward {name!r} ")]
        if errors and np.isnan(values).all():
            raise UserError(f"of {made_up}: {'; '.join(errors)}: correct the reward")
    means = [f"{name} {_mean(values)}" for name, values in scores.parts.items()]
    return "".join(
        f"{line}\n" for line in (f"rewards of {made_up}: {', '.join(means)}", *scores.errors)
    )


def _mean(values: np.ndarray) -> str:
    present = values[~np.isnan(values)]
    return f"{present.mean():.3g}" if len(present) else "none"


def _describe_folder(config: ConfigDict, folder: RunFolder) -> str:
    if not folder.metrics.exists():
        return f"run folder: {folder.path}, which would be new\n"
    last_step = max((row["step"] for row in read_steps(folder.metrics)), default=0)
    return f"run folder: {folder.path}, which holds {last_step} of {config.steps} steps\n"
