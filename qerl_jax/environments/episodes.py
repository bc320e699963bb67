"""The episodes of a rollout: each row's turns go to its environment, and its replies come back.

Nothing here waits for an environment unless it is asked to: requests are sent to processes, and
their answers are taken as they arrive. An environment that raises, hangs or ends its process costs
its row the reward, or the policy one message; it is counted, and other rows continue.
"""

import collections
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from qerl_jax.environments.pool import Pool, Process, wait_for_any
from qerl_jax.environments.replies import ReplyWriter, TemplateTokenizer
from qerl_jax.environments.roles import (
    ANSWER,
    CONTEXT,
    DONE,
    FAILURE,
    OPEN,
    TOKENS,
    TURNS,
    Reply,
    Turn,
)
from qerl_jax.environments.tools import Call, message_of, read_calls
from qerl_jax.environments.worker import LONGEST_TEXT
from qerl_jax.errors import visible

_TICK = 0.1  # seconds between two calls of `on_wait`


@dataclasses.dataclass(frozen=True)
class Contract:
    """What an environment is."""

    kind: str  # 'tools', whose methods the policy calls, or 'text', which reads what it writes
    tools: tuple[Mapping[str, Any], ...] = ()  # JSON schemas of its tools
    rewards: bool = False  # whether it gives rewards


@dataclasses.dataclass(frozen=True)
class Environments:
    """The environments of a run, and how the policy talks to them."""

    pool: Pool  # processes in which they run
    contracts: Mapping[str, Contract]  # what each of them is, by name
    writers: Mapping[str, ReplyWriter]  # writer of the replies of each, by name
    form: str  # how the chat template writes calls; '' where no environment has tools
    tokenizer: TemplateTokenizer  # tokenizer of the policy
    max_turns: int  # largest number of turns of the policy
    time_limit: float | None  # seconds of a request, with all calls of a turn; None for no limit
    processes: int  # largest number of environments that are alive at the same time

    def name_of(self, columns: Mapping[str, Any]) -> str:
        """Returns the name of the environment of a problem."""
        return environment_of(columns, list(self.contracts))

    def resets(
        self,
        columns: Sequence[Mapping[str, Any]],
        seeds: Sequence[int],
        on_wait: Callable[[], None] | None = None,
    ) -> list[str | None]:
        """Returns what environments say at their reset; None where one says nothing, or fails.

        `on_wait` is called every tenth of a second; an exception that it raises ends the wait.
        """
        texts: list[str | None] = [None] * len(columns)
        waiting = collections.deque(range(len(columns)))
        busy: dict[Process, int] = {}
        try:
            while waiting or busy:
                while waiting and len(busy) < self.processes:
                    process = self.pool.take()
                    number = busy[process] = waiting.popleft()
                    request = self.reset_request(columns[number], seeds[number])
                    if not process.send(request, limit=self.time_limit):
                        self.pool.kill(process)
                        del busy[process]
                wait_for_any(busy, _TICK)
                for process, number in list(busy.items()):
                    if (answer := process.answer()) is not None:
                        texts[number] = answer.get("text")
                        self.pool.give(process, dead="dead" in answer)
                        del busy[process]
                if on_wait is not None:
                    on_wait()
        finally:
            for process in busy:  # after an exception
                self.pool.kill(process)
        return texts

    def reset_request(self, columns: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """Returns the request that begins an episode.

        As in TRL, a column that chooses among several environments is not one of the episode.
        """
        chooses = {"environment"} if len(self.contracts) > 1 else set()
        return {
            "op": "reset",
            "name": self.name_of(columns),
            "columns": {name: value for name, value in columns.items() if name not in chooses},
            "seed": seed,
        }


def environment_of(columns: Mapping[str, Any], names: Sequence[str]) -> str:
    """Returns the name of the environment of a problem: its column where there are several."""
    return str(columns.get("environment")) if len(names) > 1 else names[0]


@dataclasses.dataclass
class Episode:
    """What has happened to a row."""

    # Role ('assistant' or 'environment') and text of everything after the prompt; turns of the
    # policy as rewards get them.
    parts: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    # The same as chat messages, as TRL gives them to rewards.
    messages: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    turns: int = 0  # number of turns of the policy
    calls: int = 0  # number of calls of tools
    failed_calls: int = 0  # number of those that failed or could not be read
    cut_replies: int = 0  # number of texts of the environment that were cut
    reward: float | None = None  # sum of the environment's rewards; None without any
    # The environment's attributes at the end, those that are data.
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    ending: int = OPEN  # what ended the row, see `environments.roles`; OPEN until it ends
    error: str = ""  # why the environment failed; '' where it did not
    # Of an agent: the number of its conversations, and of requests that got another one's answer.
    rows: int = 1
    retries: int = 0

    @property
    def answer(self) -> str:
        """The text of the policy's last turn."""
        return next((text for role, text in reversed(self.parts) if role == "assistant"), "")


def failures(errors: Sequence[str], *, agents: bool = False) -> list[str]:
    """Returns one line for each distinct failure of an environment, or an agent, with its count.

    `errors` are those of all rows or sessions, '' where it did not fail.
    """
    counts = collections.Counter(visible(error) for error in errors if error)
    what, rows = ("agent", "sessions") if agents else ("environment", "rows")
    return [
        f"the {what} failed in {count} of {len(errors)} {rows}: {error}"
        for error, count in counts.items()
    ]


class Episodes:
    """The episodes of a rollout of B rows, the `Dialog` of the sampler."""

    def __init__(
        self,
        environments: Environments,
        columns: Sequence[Mapping[str, Any]],
        seeds: Sequence[int],
        observations: Sequence[str | None],
        *,
        refusals: Sequence[str] | None = None,
        in_reasoning: Sequence[bool] | None = None,
    ):
        """Prepares the episodes; an environment begins when the first turn of its row has ended.

        Args:
            environments: the environments.
            columns: columns of the problem of each row.
            seeds: seed of the environment of each row.
            observations: what each environment must say at its reset, as it is in the prompt.
            refusals: why the prompt of a row lacks its observation; '' where it does not. None for
                no row.
            in_reasoning: whether the prompt of each row has opened the reasoning; None for no row.
        """
        self._all, self._columns, self._seeds = environments, columns, seeds
        self._observations = observations
        self._refusals = refusals or [""] * len(columns)
        self._in_reasoning = in_reasoning or [False] * len(columns)
        self._names = [environments.name_of(one) for one in columns]
        self.episodes = [Episode() for _ in columns]
        self._parts: list[Episodes] = []
        self._requests = [collections.deque[dict[str, Any]]() for _ in columns]
        self._turn: dict[int, tuple[Turn, list[Call]]] = {}
        self._process: dict[int, Process] = {}
        self._busy: dict[Process, int] = {}
        self._starved: collections.deque[int] = collections.deque()
        self._out: list[Reply] = []

    def __enter__(self) -> "Episodes":
        return self

    def __exit__(self, *_: object) -> None:
        for part in self._parts:
            part.__exit__()
        for process in self._process.values():
            self._all.pool.kill(process)

    def part(self, rows: Sequence[int]) -> "Episodes":
        """Returns the episodes of some rows, as `turns.Dialog` has it; they end with these.

        What happens to a row is seen here, too. A part may have as many processes as these.
        """

        def of_rows(values: Sequence[Any]) -> list[Any]:
            return [values[row] for row in rows]

        part = Episodes(
            self._all,
            of_rows(self._columns),
            of_rows(self._seeds),
            of_rows(self._observations),
            refusals=of_rows(self._refusals),
            in_reasoning=of_rows(self._in_reasoning),
        )
        part.episodes = of_rows(self.episodes)
        self._parts.append(part)
        return part

    def submit(self, turn: Turn) -> None:
        """Hands a turn to the environment of its row."""
        row, episode = turn.row, self.episodes[turn.row]
        episode.turns += 1
        ids = list(turn.ids)
        if turn.complete and ids[-1] in self._all.tokenizer.eos_ids:
            ids = ids[:-1]
        text = self._all.tokenizer.answer(ids)
        reasoning = self._all.tokenizer.reasoning(ids)
        episode.parts += [(f"assistant {name}", said) for name, said in reasoning]
        episode.parts.append(("assistant", text))
        if episode.turns == 1:
            self._request(row, self._all.reset_request(self._columns[row], self._seeds[row]))
        calls: list[Call] = []
        if self._all.contracts[self._names[row]].kind == "text":
            episode.messages.append({"role": "assistant", "content": text})
            self._request(row, {"op": "step", "text": text})
        else:
            marked = self._all.tokenizer.decode(ids, skip_special=False)
            calls = read_calls(
                marked,
                self._all.form,
                in_reasoning=self._in_reasoning[row],
                tools=self._all.contracts[self._names[row]].tools,
            )
            message = message_of(
                marked, calls, self._all.form, in_reasoning=self._in_reasoning[row]
            )
            episode.messages.append(message)
            ending = self._ending_of_calls(turn, calls, episode)
            if ending != OPEN:
                self._finish(row, ending)
            else:
                episode.calls += len(calls)
                episode.failed_calls += len(calls)  # until they have succeeded
                readable = [(call.name, call.arguments) for call in calls if not call.error]
                self._request(row, {"op": "calls", "calls": readable})
        self._turn[row] = turn, calls
        self._advance(row)

    def replies(self, seconds: float) -> list[Reply]:
        """Returns the replies that are there, or waits until one is or the seconds have passed."""
        ends = time.monotonic() + seconds
        while True:
            while self._starved and len(self._process) < self._all.processes:
                self._advance(self._starved.popleft())
            if self._out or not self._busy:
                replies, self._out = self._out, []
                return replies
            now = time.monotonic()
            waits = min([ends, *(process.deadline for process in self._busy)]) - now
            wait_for_any(self._busy, waits)
            for process, row in list(self._busy.items()):
                if (answer := process.answer()) is not None:
                    del self._busy[process]
                    self._take(row, answer)
            if not self._out and time.monotonic() >= ends:
                return []

    def _ending_of_calls(self, turn: Turn, calls: Sequence[Call], episode: Episode) -> int:
        """What a turn of an environment of tools ends the row with; OPEN where calls are made."""
        if turn.complete and not calls:
            return ANSWER
        if not turn.space:
            return turn.limit
        if not calls:
            return TOKENS
        return TURNS if episode.turns >= self._all.max_turns else OPEN

    def _request(self, row: int, request: dict[str, Any]) -> None:
        self._requests[row].append(request)

    def _finish(self, row: int, ending: int) -> None:
        self.episodes[row].ending = ending
        self._request(row, {"op": "finish"})

    def _advance(self, row: int) -> None:
        """Sends the next request of a row, if it has one and a process is free."""
        if not self._requests[row]:
            return
        process = self._process.get(row)
        if process is None:
            if len(self._process) >= self._all.processes:
                self._starved.append(row)
                return
            process = self._process[row] = self._all.pool.take()
        if process.send(self._requests[row][0], limit=self._all.time_limit):
            self._busy[process] = row
        else:
            self._fail(row, "its process has ended", dead=True)

    def _take(self, row: int, answer: dict[str, Any]) -> None:
        """Takes the answer to the oldest request of a row."""
        request = self._requests[row].popleft()
        if "error" in answer:
            self._fail(row, f"{request['op']}: {answer['error']}", dead="dead" in answer)
            return
        take = {
            "reset": self._take_reset,
            "step": self._take_step,
            "calls": self._take_calls,
            "finish": self._take_finish,
        }
        take[request["op"]](row, answer)
        self._advance(row)

    def _take_reset(self, row: int, answer: dict[str, Any]) -> None:
        error = self._refusals[row]
        if not error and answer["text"] != self._observations[row]:
            error = "it says another thing to the same columns and seed"
        if error:
            self._requests[row].clear()
            self._fail(row, f"reset: {error}")

    def _take_step(self, row: int, answer: dict[str, Any]) -> None:
        episode, (turn, _) = self.episodes[row], self._turn[row]
        if answer["reward"] is not None:
            episode.reward = (episode.reward or 0.0) + answer["reward"]
        if answer["done"]:
            self._finish(row, DONE)
        elif not turn.space:
            self._finish(row, turn.limit)
        elif episode.turns >= self._all.max_turns:
            self._finish(row, TURNS)
        else:
            self._reply(row, [answer["text"]], (), [answer["text"]])

    def _take_calls(self, row: int, answer: dict[str, Any]) -> None:
        results, texts, contents = iter(answer["results"]), list[str](), list[Any]()
        episode, (_, calls) = self.episodes[row], self._turn[row]
        for call in calls:
            failed = str({"error": call.error}), False, None
            text, succeeded, value = failed if call.error else next(results)
            episode.failed_calls -= succeeded
            texts.append(text)
            contents.append(text if value is None else value)
        self._reply(row, texts, [(call.name or "unknown", call.id) for call in calls], contents)

    def _take_finish(self, row: int, answer: dict[str, Any]) -> None:
        episode = self.episodes[row]
        if answer["reward"] is not None:
            episode.reward = (episode.reward or 0.0) + answer["reward"]
        episode.facts = answer["facts"]
        self._out.append(Reply(row, (), episode.ending))
        self._all.pool.give(self._process.pop(row))

    def _reply(
        self,
        row: int,
        texts: Sequence[str],
        calls: Sequence[tuple[str, str]],
        contents: Sequence[Any],
    ) -> None:
        """Sends an environment's texts to the policy, or ends a row that has no tokens for them.

        `contents` are those of the messages.
        """
        writer, (turn, _) = self._all.writers[self._names[row]], self._turn[row]
        end = []
        if turn.ids[-1] not in self._all.tokenizer.eos_ids:
            end = [writer.end_id()]
        ids, cut = writer.fit(texts, calls, turn.space - len(end))
        if not ids:
            self._finish(row, CONTEXT)
            return
        cut = cut or any(len(text) == LONGEST_TEXT for text in texts)
        self.episodes[row].cut_replies += cut
        # A text that was cut is what the policy reads, and what the page of a run shows.
        text = "\n".join(texts) if not cut else self._all.tokenizer.decode(ids)
        self.episodes[row].parts.append(("environment", text))
        frames = [{"role": "tool", "name": name} for name, _ in calls] or [{"role": "user"}]
        self.episodes[row].messages += [
            {**frame, "content": one} for frame, one in zip(frames, contents, strict=True)
        ]
        self._out.append(Reply(row, [*end, *ids], OPEN))

    def _fail(self, row: int, error: str, *, dead: bool = False) -> None:
        """Ends a row whose environment has failed."""
        episode, process = self.episodes[row], self._process.pop(row)
        self._requests[row].clear()
        episode.ending, episode.reward, episode.error = FAILURE, None, error
        self._out.append(Reply(row, (), FAILURE))
        self._all.pool.give(process, dead=dead)
