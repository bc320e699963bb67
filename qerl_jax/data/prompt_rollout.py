"""A rollout of prompts: its environments begin, rows are sampled, and texts are taken as they end.

Training, its greedy accuracy and evaluations share it.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from qerl_jax.data.agents import AgentEpisodes, RunAgents
from qerl_jax.data.environments import RunEnvironments, conversation_columns
from qerl_jax.data.prompts import Prompt
from qerl_jax.environments.episodes import Episode
from qerl_jax.environments.roles import DONE, FAILURE
from qerl_jax.policy.policy import Policy
from qerl_jax.rewards.scored import Completion
from qerl_jax.rollout.progress import RolloutProgress
from qerl_jax.rollout.sampler import Sampler

type AnyEnvironments = RunEnvironments | RunAgents


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

    It iterates over the progress of the sampler, for agents that of their sessions. At the end of
    its block the devices stop, and so do environments that have not ended.

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
        environments: AnyEnvironments | None = None,
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
        if isinstance(environments, RunAgents):
            numbers = range(len(prompts)) if ids is None else ids
            self._dialog = environments.begin(key, prompts, sampler, numbers)
        elif environments is not None:
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
        dialog = self._dialog
        if not isinstance(dialog, AgentEpisodes):
            return self._steps
        return (dataclasses.replace(step, ended=dialog.ended()) for step in self._steps)

    def rows(self, progress: RolloutProgress) -> dict[str, Any]:
        """Returns the rows that are trained on, by the fields of `Experience`.

        Of agents these are the rollout, the owners of its rows and their own prompts.
        """
        if not isinstance(self._dialog, AgentEpisodes):
            return {"rollout": progress.rollout}
        return self._dialog.rows(progress.rollout, self._tokenizer.pad_id)._asdict()

    def _take_sessions(self, dialog: AgentEpisodes) -> dict[int, Ended]:
        taken = {}
        for number in dialog.take():
            episode = dialog.episodes[number]
            self.texts[number], finished = episode.answer, episode.ending == DONE
            tokens, prompt = dialog.sampled_tokens(number), self.prompts[number // self._group_size]
            taken[number] = Ended(prompt, episode.answer, tokens, finished, episode)
        return taken

    def take(self, progress: RolloutProgress) -> dict[int, Ended]:
        """Returns the completions that have ended since the last call, by row.

        Those of agents are by session, and have the text of the last turn.
        """
        if isinstance(self._dialog, AgentEpisodes):
            return self._take_sessions(self._dialog)
        rollout, taken = progress.rollout, {}
        tokens = rollout.sampled_lengths
        for row in progress.ended.nonzero()[0].tolist():
            if row in self.texts:
                continue
            if self.episodes:
                episode, text = self.episodes[row], self.episodes[row].answer
            else:
                ids = rollout.tokens[row, : rollout.lengths[row]].tolist()
                episode, text = None, self._tokenizer.answer(ids)
            self.texts[row], prompt = text, self.prompts[row // self._group_size]
            finished = bool(rollout.finished[row])
            taken[row] = Ended(prompt, text, int(tokens[row]), finished, episode)
        return taken
