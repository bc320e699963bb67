"""Conversations with environments: prompts and seeds, and what rewards and metrics get of them."""

import collections
import dataclasses
import hashlib
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax

from qerl_jax.data.prompts import ChatTokenizer, Problem, Prompt, PromptConfig, encode_prompts
from qerl_jax.environments.episodes import Environments, Episode, Episodes
from qerl_jax.environments.pool import CallError
from qerl_jax.environments.roles import ENDINGS, FAILURE, Turn
from qerl_jax.errors import UserError
from qerl_jax.rewards.functions import CONVERSATION_COLUMNS
from qerl_jax.rollout.progress import Statistics


@dataclasses.dataclass(frozen=True)
class RunEnvironments:
    """The environments of a run, and how their prompts are written."""

    environments: Environments
    tokenizer: ChatTokenizer
    prompts: PromptConfig
    max_prompt_tokens: int

    def begin(
        self,
        key: jax.Array,
        prompts: Sequence[Prompt],
        group_size: int,
        on_wait: Callable[[], None] | None = None,
        *,
        numbers: Sequence[int] | None = None,
    ) -> tuple[list[Prompt], Episodes]:
        """Begins the episodes of a rollout.

        The environments of a group have one seed, which follows from the key and from the number of
        the prompt, by default its index.

        Returns:
            The prompts with what the environments say at their reset, and the episodes of all rows.
            Where this is too long, the prompt is without it and the rows fail.
        """
        seeds = [environment_seed(key, number) for number in numbers or range(len(prompts))]
        columns = [columns_of(prompt.problem) for prompt in prompts]
        texts = self.environments.resets(columns, seeds, on_wait)
        prompts, refusals = list(prompts), [""] * len(prompts)
        for number, text in enumerate(texts):
            if text:
                try:
                    prompts[number] = self._with_text(prompts[number], text)
                except UserError as error:
                    refusals[number] = str(error)

        def rows(values: Sequence[Any]) -> list[Any]:
            return [value for value in values for _ in range(group_size)]

        return prompts, Episodes(
            self.environments,
            rows(columns),
            rows(seeds),
            rows(texts),
            refusals=rows(refusals),
            in_reasoning=rows([prompt.text.rstrip().endswith("<think>") for prompt in prompts]),
        )

    def with_reset(self, key: jax.Array, prompt: Prompt) -> Prompt:
        """Returns a prompt with what its environment says at its reset.

        The seed of the environment follows from the key.

        Raises:
            UserError: the reset fails, or the prompt is too long.
        """
        columns, seed = columns_of(prompt.problem), environment_seed(key, 0)
        request = self.environments.reset_request(columns, seed)
        try:
            answer = self.environments.pool.ask(request, limit=self.environments.time_limit)
        except CallError as error:
            raise UserError(
                f"environment.function: reset: {error}: correct the environment, or the columns of "
                f"the problem {prompt.problem.question!r:.60}"
            ) from error
        return self._with_text(prompt, answer["text"]) if answer["text"] else prompt

    def reset_lengths(self, key: jax.Array, prompts: Sequence[Prompt]) -> list[int]:
        """Returns the tokens of prompts with what their environments say at their reset.

        The length of a prompt whose reset fails is that without it.
        """
        columns = [columns_of(prompt.problem) for prompt in prompts]
        seeds = [environment_seed(key, number) for number in range(len(prompts))]
        texts = self.environments.resets(columns, seeds)
        unlimited = dataclasses.replace(self, max_prompt_tokens=sys.maxsize)
        return [
            len((unlimited._with_text(prompt, text) if text else prompt).ids)
            for prompt, text in zip(prompts, texts, strict=True)
        ]

    def one_turn(self, key: jax.Array, prompt: Prompt, turns: Sequence[Sequence[int]]) -> Episodes:
        """Returns the episodes of one prompt that have ended after one turn each.

        Args:
            key: key of the seed of the environments.
            prompt: a prompt.
            turns: token ids of the turns, without those that end a turn.
        """
        _, episodes = self.begin(key, [prompt], len(turns))
        end = self.environments.tokenizer.eos_ids[0]
        with episodes:
            for row, ids in enumerate(turns):
                episodes.submit(Turn(row, [*ids, end], complete=True, space=0))
            ended = 0
            while ended < len(turns):
                ended += len(episodes.replies(1.0))
        return episodes

    def _with_text(self, prompt: Prompt, text: str) -> Prompt:
        (changed,) = encode_prompts(
            [prompt.problem],
            self.tokenizer,
            self.prompts,
            observation=text,
            max_prompt_tokens=self.max_prompt_tokens,
            what="prompts with what environment.function says at its reset",
        )
        return changed


def environment_seed(key: jax.Array, number: int) -> int:
    """Returns the seed of the environment of a prompt, from 0 to 2^31 - 1."""
    data = jax.device_get(jax.random.key_data(key)).tobytes() + number.to_bytes(8, "little")
    return int.from_bytes(hashlib.sha256(data).digest()[:4], "little") >> 1


def columns_of(problem: Problem) -> dict[str, Any]:
    """Returns what an environment gets of a problem: its row, its question and its answer."""
    return {"question": problem.question, "answer": problem.answer} | dict(problem.columns)


def conversation_columns(episode: Episode) -> dict[str, Any]:
    """Returns what rewards get of a conversation, see `rewards.functions.CONVERSATION_COLUMNS`."""
    values = (
        episode.reward,
        types.SimpleNamespace(**episode.facts),
        [text for role, text in episode.parts if role == "assistant"],
    )
    return dict(zip(CONVERSATION_COLUMNS, values, strict=True))


def conversation_metrics(
    episodes: Sequence[Episode], work: Sequence[Statistics]
) -> dict[str, float]:
    """Returns values to log of the conversations of a step."""
    calls = sum(episode.calls for episode in episodes)
    endings = collections.Counter(episode.ending for episode in episodes)
    decoded = sum(one.decoded for one in work)
    right = sum(episode.calls > episode.failed_calls for episode in episodes)
    metrics = {
        "environment/turns": sum(episode.turns for episode in episodes) / len(episodes),
        "environment/failures": endings[FAILURE],
        "environment/waiting_seconds": sum(one.waiting_seconds for one in work),
        "environment/idle_share": sum(one.idle for one in work) / decoded if decoded else 0.0,
        "environment/calls": calls / len(episodes),
        "environment/rows_with_right_call": right / len(episodes),
    }
    if calls:
        failed = sum(episode.failed_calls for episode in episodes)
        metrics["environment/failed_calls"] = failed / calls
    if replies := sum(role == "environment" for episode in episodes for role, _ in episode.parts):
        cut = sum(episode.cut_replies for episode in episodes)
        metrics["environment/cut_replies"] = cut / replies
    return metrics | {
        f"environment/ending/{name}": endings[number] / len(episodes)
        for number, name in enumerate(ENDINGS)
        if endings[number]
    }
