"""A rollout of prompts: its environments begin, rows are sampled, and texts are taken as they end.

Training, its greedy accuracy and evaluations share it.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from qerl_jax.data.environments import RunEnvironments, conversation_columns
from qerl_jax.data.prompts import Prompt
from qerl_jax.environments.episodes import Episode
from qerl_jax.environments.roles import FAILURE
from qerl_jax.policy.policy import Policy
from qerl_jax.rewards.scored import Completion
from qerl_jax.rollout.progress import RolloutProgress
from qerl_jax.rollout.sampler import Sampler


class Ended(NamedTuple):
    """A completion that has ended."""

    prompt: Prompt
    text: str  # of a conversation, the policy's last turn
    tokens: int  # number of sampled tokens
    finished: bool  # whether it ended by itself and not by a limit
    episode: Episode | None  # what happened between it and its environment, if it has one

    @property
    def has_failed(self) -> bool:
        """Whether its environment has failed, so that no reward gets it."""
        return self.episode is not None and self.episode.ending == FAILURE

    def to_score(self) -> Completion:
        """Returns what rewards get of it."""
        problem = self.prompt.problem
        columns: Mapping[str, Any] = problem.columns
        if self.episode is not None:
            columns = {**columns, **conversation_columns(self.episode)}
        return Completion(
            prompt=self.prompt.text,
            completion=self.text,
            answer=problem.answer,
            num_tokens=self.tokens,
            finished=self.finished,
            columns=columns,
            conversation=() if self.episode is None else self.episode.messages,
        )


class PromptRollout:
    """Completions of prompts, and conversations with environments, that are sampled.

    It iterates over the progress of the sampler. At the end of its block the devices stop, and so
    do environments that have not ended.

    Attributes:
        prompts: P prompts, with what environments said at their reset.
        texts: the completions that were taken, by row.
        episodes: what has happened to each row; [] without environments.
    """

    def __init__(
        self,
        sampler: Sampler,
        key: jax.Array,
        policy: Policy,
        prompts: Sequence[Prompt],
        *,
        ids: Sequence[int] | None = None,
        environments: RunEnvironments | None = None,
        on_wait: Callable[[], None] | None = None,
    ) -> None:
        """Begins the environments.

        Args:
            sampler: samples G completions of each prompt.
            key: PRNG key of the samples and of the environments.
            policy: the policy.
            prompts: P prompts.
            ids: identity [P] of each prompt, as in `Sampler.steps`; its environments depend on it.
            environments: what the policy talks to; None without environments.
            on_wait: as in `Environments.resets`.
        """
        self._dialog = None
        if environments is not None:
            prompts, self._dialog = environments.begin(
                key, prompts, sampler.group_size, on_wait, numbers=ids
            )
        self.prompts, self.texts = list(prompts), dict[int, str]()
        self.episodes = [] if self._dialog is None else self._dialog.episodes
        self._tokenizer, self._group_size = sampler.tokenizer, sampler.group_size
        self._steps = sampler.steps(
            key, policy, [prompt.ids for prompt in prompts], ids=ids, dialog=self._dialog
        )

    def __enter__(self) -> "PromptRollout":
        return self

    def __exit__(self, *_: object) -> None:
        with self._dialog or contextlib.nullcontext():
            self._steps.close()

    def __iter__(self) -> Iterator[RolloutProgress]:
        return self._steps

    def take(self, progress: RolloutProgress) -> dict[int, Ended]:
        """Returns the completions that have ended since the last call, by row."""
        rollout, taken = progress.rollout, {}
        tokens = rollout.sampled_lengths
        for row in progress.ended.nonzero()[0].tolist():
            if row in self.texts:
                continue
            if self.episodes:
                episode, text = self.episodes[row], self.episodes[row].answer
            else:
                ids = rollout.tokens[row, : rollout.lengths[row]].tolist()
                episode, text = None, self._tokenizer.decode(ids)
            self.texts[row], prompt = text, self.prompts[row // self._group_size]
            finished = bool(rollout.finished[row])
            taken[row] = Ended(prompt, text, int(tokens[row]), finished, episode)
        return taken
