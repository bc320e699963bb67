"""Rollouts of agents: their sessions begin, and what they did becomes rows, rewards and metrics."""

import collections
import dataclasses
import math
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from qerl_jax.data.environments import columns_of, environment_seed
from qerl_jax.data.prompts import Prompt, PromptConfig
from qerl_jax.environments.episodes import Episode
from qerl_jax.environments.gateway import (
    Asked,
    Gateway,
    Job,
    Opens,
    Part,
    Runner,
    SessionLimits,
    SessionRecord,
)
from qerl_jax.environments.replies import TemplateTokenizer
from qerl_jax.environments.roles import DONE, FAILURE
from qerl_jax.rollout.completions import Rollout
from qerl_jax.rollout.sampler import Sampler


class SessionRows(NamedTuple):
    """The rows of sessions that are trained on; those of a session are neighbors."""

    rollout: Rollout  # B' rows
    owners: np.ndarray  # int [B'], number of the session of each row
    own_prompts: list[tuple[int, ...]]  # token ids of the prompt of each row


class Server(Opens, Protocol):
    """The part of `agent_server.AgentServer` that a run uses."""

    gateway: Gateway

    def stop(self) -> None:
        """Ends the server."""
        ...


class RunAgents:
    """What serves the agents of a run, and starts their episodes.

    Attributes:
        max_prompt_tokens: tokens of the longest prompt that is prefilled as a whole.
        prompts: how the prompts of problems are written, which agents do not read.
        gives_rewards: whether an agent may return a reward.
    """

    def __init__(
        self,
        server: Server,
        runner: Runner,
        tokenizer: TemplateTokenizer,
        prompts: PromptConfig,
        *,
        max_prompt_tokens: int,
        time_limit: float | None,
        gives_rewards: bool = True,
    ):
        """Takes the server and the runner, which end with this object or with the process.

        `time_limit` is that of a session in seconds; None sets no limit.
        """
        self.prompts, self.max_prompt_tokens = prompts, max_prompt_tokens
        self._server, self._runner, self._tokenizer = server, runner, tokenizer
        self._time_limit, self.gives_rewards = time_limit, gives_rewards
        self._finalizer = weakref.finalize(self, _close, runner, server)

    def close(self) -> None:
        """Ends the runner and the server."""
        self._finalizer()

    def begin(
        self, key: jax.Array, prompts: Sequence[Prompt], sampler: Sampler, numbers: Sequence[int]
    ) -> "AgentEpisodes":
        """Starts the episodes of a rollout, G of each of P prompts.

        The seed of those of a group follows from the key and from the number of the prompt.
        """
        assert sampler.turns is not None
        limits, size = sampler.turns, sampler.group_size
        jobs = [
            Job(group * size + i, group, columns_of(prompt.problem), environment_seed(key, number))
            for group, (prompt, number) in enumerate(zip(prompts, numbers, strict=True))
            for i in range(size)
        ]
        width = max(sampler.engine.prompt_width, *(len(prompt.ids) for prompt in prompts))
        self._server.gateway.begin(
            jobs,
            SessionLimits(
                context=width + limits.context_tokens,
                max_new_tokens=sampler.sampling.max_new_tokens,
                turn_tokens=limits.turn_tokens,
                vocab_size=sampler.model_config.vocab_size,
                seconds=self._time_limit,
            ),
            self._runner.is_alive,
        )
        return AgentEpisodes(self._server, self._runner, self._tokenizer, jobs)


def _close(runner: Runner, server: Server) -> None:
    try:
        runner.close()
    finally:
        server.stop()


class AgentEpisodes:
    """The episodes of a rollout, whose parts are the `Requests` of the sampler.

    Attributes:
        episodes: what has happened in each session, once it has ended.
    """

    def __init__(
        self, server: Server, runner: Runner, tokenizer: TemplateTokenizer, jobs: Sequence[Job]
    ):
        """Starts the episodes."""
        self._gateway, self._runner, self._tokenizer = server.gateway, runner, tokenizer
        self.episodes = [Episode() for _ in jobs]
        self._taken: set[int] = set()
        runner.start(server, jobs)

    def __enter__(self) -> "AgentEpisodes":
        return self

    def __exit__(self, *_: object) -> None:
        self._gateway.fail_all("the rollout has ended")
        self._runner.stop()

    def part(self, rows: Sequence[int]) -> Part:
        """Returns the requests of some sessions, for one group of devices."""
        return self._gateway.part(rows)

    def ended(self) -> np.ndarray:
        """Returns which sessions have ended, bool [B]."""
        ended = np.zeros(len(self.episodes), bool)
        ended[[number for number, _ in self._gateway.ended()]] = True
        return ended

    def take(self) -> list[int]:
        """Returns the numbers of sessions that have ended since the last call, ascending."""
        ended = []
        for number, record in sorted(self._gateway.ended(), key=lambda one: one[0]):
            if number not in self._taken:
                self._taken.add(number)
                self.episodes[number] = _episode(record, self._tokenizer)
                ended.append(number)
        return ended

    def sampled_tokens(self, number: int) -> int:
        """Returns how many tokens were sampled in a session."""
        return sum(len(turn.ids) for turn in self._gateway.record(number).asked)

    def rows(self, rollout: Rollout, pad_id: int) -> SessionRows:
        """Returns the rows that are trained on.

        Args:
            rollout: all rows, as they were sampled.
            pad_id: token id that fills rows.
        """
        records = self._gateway.records()
        found = [
            (number, row, end)
            for number, record in enumerate(records)
            for row, end in record.trained_rows()
        ]
        numbers = np.array([self._gateway.number_of(row) for _, row, _ in found], int)
        lengths = np.array([end - row.prompt for _, row, end in found], np.int32)
        cut = jax.tree.map(lambda x: x[numbers], rollout)
        is_past = np.arange(cut.tokens.shape[1]) >= lengths[:, None]
        for array, fill in (
            *((cut.tokens, pad_id), (cut.logprobs, 0), (cut.entropies, 0)),
            (cut.roles, 0),
        ):
            array[is_past] = fill
        ended = [records[number].ending for number, _, _ in found]
        # Further turns of the row may have no answer, or lost against another answer.
        whole = [any(t.complete and t.end == end for t in row.turns) for _, row, end in found]
        finished = np.array([e != FAILURE and w for e, w in zip(ended, whole, strict=True)], bool)
        return SessionRows(
            dataclasses.replace(
                cut, lengths=lengths, finished=finished, endings=np.array(ended, np.int8)
            ),
            np.array([number for number, _, _ in found], int),
            [tuple(row.ids[: row.prompt]) for _, row, _ in found],
        )


def made_up_episode(text: str) -> Episode:
    """Returns a session of one turn, for a try of the rewards."""
    messages = [{"role": "assistant", "content": text}]
    parts = [("assistant", text)]
    return Episode(parts=parts, messages=messages, turns=1, reward=0.0, ending=DONE)


def session_metrics(episodes: Sequence[Episode], rows: int) -> dict[str, float]:
    """Returns values to log of sessions, with the number of rows that are trained on.

    The facts of agents that are numbers are among them, as means.
    """
    count, facts = len(episodes), collections.defaultdict[str, list[float]](list)
    for episode in episodes:
        for name, value in episode.facts.items():
            if isinstance(value, int | float) and math.isfinite(value):
                facts[name].append(value)
    return {f"agent/{name}": sum(values) / len(values) for name, values in facts.items()} | {
        "environment/rows": rows / count,
        # Conversations that did not continue another one of their session.
        "environment/further_rows": sum(max(0, one.rows - 1) for one in episodes) / count,
        "environment/retries": sum(one.retries for one in episodes) / count,
    }


def _episode(record: SessionRecord, tokenizer: TemplateTokenizer) -> Episode:
    """What rewards, metrics and pages get of a session."""
    answered = sorted((turn for turn in record.asked if turn.order), key=lambda turn: turn.order)
    parts, calls = list[tuple[str, str]](), 0
    for turn in answered:
        parts.append(("environment", tokenizer.decode(turn.added, skip_special=False)))
        reasoning = tokenizer.reasoning(turn.ids)
        parts += [(f"assistant {name}", said) for name, said in reasoning]
        parts.append(("assistant", _text(turn, tokenizer)))
        calls += len((turn.reply or {}).get("tool_calls", ()))
    return Episode(
        parts=parts,
        messages=_messages(answered[-1], tokenizer) if answered else [],
        turns=len(answered),
        calls=calls,
        reward=record.reward,
        facts=dict(record.info),
        ending=record.ending,
        error=record.error,
        rows=len(record.rows),
        retries=record.joined,
    )


def _text(turn: Asked, tokenizer: TemplateTokenizer) -> str:
    """The text of a turn, without the token that ends it."""
    cut = turn.complete and turn.ids[-1] in tokenizer.eos_ids
    return tokenizer.answer(turn.ids[:-1] if cut else turn.ids)


def _messages(last: Asked, tokenizer: TemplateTokenizer) -> list[dict[str, Any]]:
    """The messages after the first prompt of the row of a turn, up to that turn."""
    if last.conversation is not None:
        return last.conversation[last.row.turns[0].sent :]
    messages: list[dict[str, Any]] = []
    for turn in last.row.turns:
        if turn is not last.row.turns[0]:
            text = tokenizer.decode(turn.added)
            messages.append({"role": "user", "content": text})
        messages.append({"role": "assistant", "content": _text(turn, tokenizer)})
    return messages
