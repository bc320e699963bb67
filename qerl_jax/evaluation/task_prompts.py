"""The prompts of an evaluation's tasks, and the check that a continued evaluation has the same."""

import hashlib
import sys
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from qerl_jax.data.prompts import Prompt, encode_prompts
from qerl_jax.errors import UserError
from qerl_jax.evaluation.tasks import Task
from qerl_jax.weights.load import LoadedModel


class TaskPrompts(NamedTuple):
    """The prompts of a task."""

    prompts: list[Prompt]  # the prompts of the problems that are evaluated
    digest: str  # digest of the prompts of all problems of the task, also with a limit


def encode_task(
    model: LoadedModel,
    task: Task,
    limit: int,
    *,
    new_tokens: int = 0,
) -> TaskPrompts:
    """Renders and tokenizes the problems of a task.

    A limit of 0 takes all problems, and `new_tokens` of 0 is the limit of the task.

    Raises:
        UserError: a prompt and a completion exceed the positions of the model.
    """
    all_prompts = encode_prompts(
        task.problems, model.tokenizer, task.prompt, max_prompt_tokens=sys.maxsize
    )
    prompts = all_prompts[: limit or None]
    positions, lengths = model.config.max_position, [len(prompt.ids) for prompt in prompts]
    new_tokens = new_tokens or task.max_new_tokens
    too_long = sum(length + new_tokens > positions for length in lengths)
    if too_long:
        raise UserError(
            f"{task.name}: {too_long} of {len(prompts)} prompts (up to {max(lengths)} tokens) with "
            f"{new_tokens} new tokens exceed the model's {positions} positions: pass "
            f"--max-new-tokens={max(1, positions - max(lengths))}, or leave out these problems"
        )
    return TaskPrompts(prompts, digest_of_prompts(all_prompts))


def digest_of_prompts(prompts: Iterable[Prompt]) -> str:
    """Digest of prompts as token ids, which tokenizer and chat template decide.

    Those of texts to learn follow their prompt.
    """
    digest = hashlib.sha256()
    for prompt in prompts:
        for ids in (prompt.ids, *(part for row in prompt.rows for part in row)):
            digest.update(np.array([len(ids), *ids], np.int32).tobytes())
    return digest.hexdigest()


def check_prompts(saved: str, current: str, *, model: str, what: str, option: str) -> None:
    """Refuses prompts that differ from those of the first start although the problems are the same.

    Args:
        saved: digest of the prompts of the first start.
        current: digest of the prompts of this start.
        model: source of the model.
        what: name of the run or evaluation, for the message.
        option: option that names another folder.

    Raises:
        UserError: the digests differ.
    """
    if saved != current:
        raise UserError(
            f"the tokenizer or the chat template of {model} makes other prompts of the problems "
            f"than when {what} began; restore its files, or pass another {option}"
        )
