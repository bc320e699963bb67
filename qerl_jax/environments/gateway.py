"""The sessions of agents: what they asked and got, and how their requests become rows.

An agent talks to the policy through a server (`agent_server`), and each of its episodes is a
session. A request that continues what a row of its session has extends the row: its ids only
grow. Any other request begins a further row. The record of a session has the ids that were sampled
and those that were sent, and the rows that are trained on follow from it.

The thread of the server asks; the threads that sample take the requests and answer them.
"""

import collections
import concurrent.futures
import dataclasses
import itertools
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from qerl_jax.environments.roles import DONE, FAILURE, OPEN, TOKENS, Reply, Request, Turn
from qerl_jax.errors import visible

MOST_ROWS = 64  # of a session
MOST_WAITING = 256  # requests of a session that wait for answers


class ClosedError(Exception):
    """A session cannot be opened, because the rollout has ended."""


class RequestError(Exception):
    """A request that cannot be answered: the status of HTTP, a text, and OpenAI's code."""

    def __init__(self, status: int, message: str, code: str = "invalid_request_error"):
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


class Job(NamedTuple):
    """An episode that a runner starts; the jobs of a group have equal columns and one seed."""

    number: int  # number of its session within the rollout
    group: int  # number of its problem within the rollout
    columns: Mapping[str, Any]  # the columns of the problem, with question and answer
    seed: int  # from 0 to 2^31 - 1


class Session(NamedTuple):
    """An open session, as an agent reaches it."""

    id: str
    base_url: str  # of the chat route, with /v1 at its end
    key: str  # bearer token, which names the session as well
    root_url: str  # of the server, for the token route
    ended: threading.Event  # set once the session has ended, also by its time limit


class Opens(Protocol):
    """The part of the server that a runner uses."""

    def open(self, job: Job, /) -> Session:
        """Opens the session of an episode; raises `ClosedError` once the rollout has ended."""
        ...

    def close(
        self,
        session: str,
        /,
        reward: float | None = None,
        error: str = "",
        info: Mapping[str, Any] = {},
    ) -> bool:
        """Ends a session by its id, and returns whether it was open."""
        ...


class Runner(Protocol):
    """What starts the episodes of a run."""

    def start(self, server: Opens, jobs: Sequence[Job], /) -> None:
        """Begins the episodes of a rollout, and does not wait for them."""
        ...

    def is_alive(self) -> bool:
        """Whether episodes may still open and close sessions."""
        ...

    def stop(self) -> None:
        """Ends all episodes that still run; afterwards nothing of them does."""
        ...

    def close(self) -> None:
        """Ends what the runner has for the whole run."""
        ...


@dataclasses.dataclass(frozen=True)
class SessionLimits:
    """The limits of the sessions of a rollout."""

    context: int  # largest number of tokens of a row, the prompt included
    max_new_tokens: int  # largest number of sampled tokens of a row
    turn_tokens: int  # largest number of sampled tokens of a turn; 0 is that of the row
    vocab_size: int  # number of token ids of the model
    seconds: float | None = None  # time of a session; None for no limit


@dataclasses.dataclass(eq=False)
class Asked:
    """A turn of the policy: what was asked, and the answer once it is there."""

    row: "RowRecord"
    key: bytes  # equal for requests with the same prompt
    start: int  # number of the row's ids before the turn, those of the request included
    added: Sequence[int]  # ids that the request brought
    limit: int  # largest number of sampled tokens
    future: concurrent.futures.Future = dataclasses.field(default_factory=lambda: _future())
    ids: list[int] = dataclasses.field(default_factory=list)  # sampled ids
    logprobs: list[float] = dataclasses.field(default_factory=list)
    complete: bool = False  # whether the policy ended the turn, and not the limit
    order: int = 0  # number of the answer within the session; 0 without one
    delivered: bool = False  # whether a client has got the answer
    extended: bool = False  # whether a later request continues it
    messages: Any = None  # of the chat route: the conversation with the answer, as it is compared
    reply: Any = None  # of the chat route: the answer as a message
    conversation: Any = None  # of the chat route: all messages with the answer
    sent: int = 0  # of the chat route: number of messages of the request

    @property
    def end(self) -> int:
        """The number of the row's ids after the turn."""
        return self.start + len(self.ids)


@dataclasses.dataclass(eq=False)
class RowRecord:
    """A row: a prompt, and turns with what was sent in between."""

    session: "SessionRecord"
    root: int  # number of the row within its session
    ids: list[int]  # all ids so far
    turns: list[Asked] = dataclasses.field(default_factory=list)
    part: "Part | None" = None  # what samples the row, once it is sampled
    number: int = 0  # number of the row in its part
    prompt: int = 0  # number of its first ids that are its prompt; the others are the completion
    forgotten: bool = False  # whether what continues it is another row
    tools: str = ""  # of the chat route: the tools that the prompt describes, as they are compared

    @property
    def sampled(self) -> int:
        """The number of sampled tokens."""
        return sum(len(turn.ids) for turn in self.turns)


@dataclasses.dataclass(eq=False)
class SessionRecord:
    """What has happened in a session."""

    job: Job
    id: str
    key: str
    deadline: float  # of `time.monotonic`
    ended: threading.Event = dataclasses.field(default_factory=threading.Event)
    rows: list[RowRecord] = dataclasses.field(default_factory=list)
    asked: list[Asked] = dataclasses.field(default_factory=list)  # all turns, as they were asked
    waiting: int = 0  # number of requests that wait for an answer
    joined: int = 0  # number of requests that got the answer of another one
    answers: int = 0  # number of answered turns
    reward: float | None = None
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ending: int = OPEN
    error: str = ""

    @property
    def was_cut(self) -> bool:
        """Whether a limit has ended the turn that was answered last."""
        last = max(self.asked, key=lambda turn: turn.order, default=None)
        return last is not None and last.order > 0 and not last.complete

    def trained_rows(self) -> list[tuple[RowRecord, int]]:
        """Returns the rows that are trained on, each with its number of ids.

        Of several answers to one prompt those train that the agent continued, or else the last
        one: the others had no part in the outcome.
        """
        rows = []
        by_key: dict[bytes, list[Asked]] = {}
        for turn in self.asked:
            if turn.order:
                by_key.setdefault(turn.key, []).append(turn)
        for row in self.rows:
            turns = [turn for turn in row.turns if turn.order]
            while turns and not _trains(turns[-1], by_key[turns[-1].key]):
                turns.pop()
            if turns:
                rows.append((row, turns[-1].end))
        return rows


def _trains(turn: Asked, siblings: Sequence[Asked]) -> bool:
    if turn.extended or len(siblings) == 1:
        return True
    last = max(siblings, key=lambda sibling: sibling.order)
    return turn is last and not any(sibling.extended for sibling in siblings)


def _future() -> concurrent.futures.Future:
    """A future that those that wait for it cannot cancel."""
    future: concurrent.futures.Future = concurrent.futures.Future()
    future.set_running_or_notify_cancel()
    return future


class Prompt(Protocol):
    """What a request sends: the tokens, or the messages, before the turn that it asks for."""

    @property
    def key(self) -> bytes:
        """Equal for requests with the same prompt."""
        ...

    @property
    def tools_key(self) -> str:
        """Equal for requests with the same tools; '' without any."""
        ...

    def continues(self, turn: Asked, /) -> int:
        """Returns how much of the prompt a turn and all before it are; 0 without them."""
        ...

    def added(self, turn: Asked, /) -> list[int] | None:
        """Returns the ids after a turn; None where they cannot be appended to its row."""
        ...

    def whole(self) -> list[int]:
        """Returns the ids of the prompt."""
        ...


class TokenPrompt:
    """A prompt of token ids."""

    tools_key = ""

    def __init__(self, ids: Sequence[int]):
        self._ids = [int(token) for token in ids]
        self.key = b"".join(token.to_bytes(4, "little") for token in self._ids)

    def continues(self, turn: Asked) -> int:
        """Returns how many ids precede what is new."""
        end = turn.end
        return end if self._ids[:end] == turn.row.ids[:end] else 0

    def added(self, turn: Asked) -> list[int]:
        """Returns the ids after a turn."""
        return self._ids[turn.end :]

    def whole(self) -> list[int]:
        """Returns the ids."""
        return self._ids


def _not_started(job: Job, error: str = "its episode was not started") -> SessionRecord:
    """The record of a job that has no session."""
    return SessionRecord(job, "", "", math.inf, ending=FAILURE, error=error)


class Gateway:
    """The sessions of a rollout, whose requests samplers take and answer, each those of a part."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: collections.deque[Asked] = collections.deque()
        self._records: dict[int, SessionRecord] = {}  # by the number of the job
        self._by_id: dict[str, SessionRecord] = {}
        self._by_key: dict[str, SessionRecord] = {}
        self._parts: list[Part] = []
        self._jobs: Sequence[Job] = ()
        self._open = False
        self._is_alive: Callable[[], bool] = lambda: True
        self.limits: SessionLimits | None = None

    # --- the rollout ------------------------------------------------------------------------------

    def begin(
        self,
        jobs: Sequence[Job],
        limits: SessionLimits,
        is_alive: Callable[[], bool] = lambda: True,
    ) -> None:
        """Begins a rollout, and forgets the sessions of the one before.

        Once `is_alive` returns False, sessions that are open or were not opened have failed.
        """
        with self._changed:
            self._queue.clear()
            for values in (self._records, self._by_id, self._by_key, self._parts):
                values.clear()
            self._jobs, self.limits, self._open = list(jobs), limits, True
            self._is_alive = is_alive

    def part(self, sessions: Sequence[int]) -> "Part":
        """Returns the requests of some sessions, which a thread of their own may take."""
        with self._changed:
            part = Part(self, sessions)
            self._parts.append(part)
            return part

    def number_of(self, row: RowRecord) -> int:
        """Returns the number of a sampled row among those of all parts, one after the other."""
        before = itertools.takewhile(lambda part: part is not row.part, self._parts)
        return sum(len(part.rows) for part in before) + row.number

    def records(self) -> list[SessionRecord]:
        """Returns the records of all jobs; that of one that was never opened has failed."""
        with self._changed:
            return [self._records.get(job.number) or _not_started(job) for job in self._jobs]

    def record(self, number: int) -> SessionRecord:
        """Returns the record of a job whose session was opened, or has failed."""
        with self._changed:
            return self._records[number]

    def fail_all(self, error: str) -> None:
        """Ends the rollout: sessions that are open or were not opened have failed."""
        with self._changed:
            self._open = False
            for record in list(self._records.values()):
                self._end(record, FAILURE, error=error)
            for job in self._jobs:
                self._records.setdefault(job.number, _not_started(job, error))
            self._changed.notify_all()

    def ended(self) -> list[tuple[int, SessionRecord]]:
        """Returns the sessions that have ended, with their numbers."""
        with self._changed:
            records = self._records.items()
            return [(number, one) for number, one in records if one.ending != OPEN]

    # --- the runner -------------------------------------------------------------------------------

    def open(self, job: Job) -> SessionRecord:
        """Opens the session of a job.

        Raises:
            ClosedError: the rollout has ended, or the job has a session.
        """
        with self._changed:
            own = self._jobs[job.number : job.number + 1]  # Seeds differ from step to step.
            known = any(job.seed == one.seed for one in own)
            if not self._open or not known or job.number in self._records:
                raise ClosedError("the rollout has ended, or the job has had its session")
            seconds = self.limits.seconds if self.limits else None
            record = SessionRecord(
                job,
                id=secrets.token_hex(8),
                key=secrets.token_urlsafe(24),
                deadline=math.inf if seconds is None else time.monotonic() + seconds,
            )
            self._records[job.number] = record
            self._by_id[record.id] = self._by_key[record.key] = record
            return record

    def close(
        self,
        session: str,
        reward: float | None = None,
        error: str = "",
        info: Mapping[str, Any] | None = None,
    ) -> bool:
        """Ends a session, with its reward or with an error; returns whether it was open."""
        with self._changed:
            record = self._by_id.get(session)
            if record is None or record.ending != OPEN:
                return False
            if reward is not None and not math.isfinite(reward):
                error = error or f"its reward is {reward}"
            if not record.answers:
                error = error or "it returned without a request that the policy answered"
            record.info = dict(info or {})
            if error:
                self._end(record, FAILURE, error=error)
            else:
                record.reward = None if reward is None else float(reward)
                self._end(record, TOKENS if record.was_cut else DONE)
            self._changed.notify_all()
            return True

    # --- the server -------------------------------------------------------------------------------

    def find(self, key: str) -> SessionRecord | None:
        """Returns the session of this rollout that a key belongs to."""
        with self._changed:
            return self._by_key.get(key)

    def ask(
        self, record: SessionRecord, prompt: Prompt, *, max_tokens: int | None, retry: bool
    ) -> Asked:
        """Returns the turn that answers a request; its future ends with the answer.

        The same prompt again joins the request in flight, and gets the same answer if it is marked
        as a retry, or if no client has got the answer. All calls come from one thread.

        Raises:
            RequestError: the request is refused.
        """
        with self._changed:
            self._check_open(record)
            same = [turn for turn in record.asked if turn.key == prompt.key]
            for turn in same:
                if not turn.order or ((retry or not turn.delivered) and turn is same[-1]):
                    record.joined += 1
                    return turn
            before = [(prompt.continues(turn), turn) for turn in record.asked if turn.order]
            for length, turn in before:
                turn.extended |= length > 0
            ends = [(n, turn) for n, turn in before if n and turn is turn.row.turns[-1]]
        _, last = max(ends, key=lambda end: end[0], default=(0, None))
        added = None if last is None else prompt.added(last)
        ids = prompt.whole() if last is None or added is None else [*last.row.ids, *added]
        with self._changed:
            self._check_open(record)
            if last is None or added is None or last.row.forgotten:
                row = RowRecord(record, len(record.rows), [], tools=prompt.tools_key)
                added = ids
            else:
                row = last.row
            limit = self._turn_limit(record, row, ids, max_tokens)
            if not row.turns:
                record.rows.append(row)
            row.ids = list(ids)
            turn = Asked(row, prompt.key, len(ids), added, limit)
            row.turns.append(turn)
            record.asked.append(turn)
            self._queue.append(turn)
            self._changed.notify_all()
        return turn

    def waits(self, record: SessionRecord, change: int) -> None:
        """Counts a request of a session that begins to wait, or ends.

        Raises:
            RequestError: too many wait.
        """
        with self._changed:
            if change > 0 and record.waiting >= MOST_WAITING:
                raise RequestError(
                    429,
                    f"{record.waiting} requests of the session wait for answers, as many as may: "
                    "send further ones once these are answered",
                    "rate_limit_exceeded",
                )
            record.waiting += change

    # --- under the lock ---------------------------------------------------------------------------

    def _unfinished(self, sessions: Iterable[int]) -> bool:
        records = self._records
        return self._open and any(n not in records or records[n].ending == OPEN for n in sessions)

    def _check_open(self, record: SessionRecord) -> None:
        if record.ending != OPEN:
            reason = f": {record.error}" if record.error else ""
            raise RequestError(409, f"the session {record.id} has ended{reason}", "session_closed")

    def _turn_limit(
        self, record: SessionRecord, row: RowRecord, ids: Sequence[int], max_tokens: int | None
    ) -> int:
        """The largest number of tokens of the turn after some ids."""
        assert self.limits is not None
        limits, too_long = self.limits, "context_length_exceeded"
        if len(ids) < 2:  # A row of recurrent layers begins with one and is extended by the other.
            raise RequestError(400, f"the prompt has {len(ids)} tokens: it needs at least 2")
        if not 0 <= min(ids) <= max(ids) < limits.vocab_size:
            raise RequestError(
                400,
                f"the prompt has token ids from {min(ids)} to {max(ids)}, the model has those from "
                f"0 to {limits.vocab_size - 1}",
            )
        if len(ids) >= limits.context:
            raise RequestError(
                400,
                f"This model's maximum context length is {limits.context} tokens. The prompt has "
                f"{len(ids)}, and the answer needs at least one more: shorten it, or raise "
                "environment.context_tokens",
                too_long,
            )
        left = limits.max_new_tokens - row.sampled
        if left < 1:
            raise RequestError(
                400,
                f"the conversation has the {limits.max_new_tokens} sampled tokens of "
                "rollout.max_new_tokens, its maximum length: raise it",
                too_long,
            )
        if not row.turns and len(record.rows) >= MOST_ROWS:
            raise RequestError(
                429,
                f"the session has begun {MOST_ROWS} conversations, as many as one may have: "
                "continue those that were answered",
                "rate_limit_exceeded",
            )
        asked = left if max_tokens is None else max_tokens
        return min(asked, left, limits.turn_tokens or left, limits.context - len(ids))

    def _end(self, record: SessionRecord, ending: int, *, error: str = "") -> None:
        """Ends a session, its rows and its requests, unless it has ended."""
        if record.ending != OPEN:
            return
        record.ending, record.error = ending, visible(error)
        record.ended.set()
        self._queue = collections.deque(t for t in self._queue if t.row.session is not record)
        for row in record.rows:
            if row.part is not None and not row.forgotten:
                row.part.ends.append(Reply(row.number, (), ending))
        for turn in record.asked:
            if not turn.future.done():
                turn.future.set_result(None)

    def _end_late_sessions(self) -> None:
        now = time.monotonic()
        for record in self._records.values():
            if record.ending == OPEN and record.deadline <= now:
                seconds = self.limits.seconds if self.limits else None
                error = f"exceeded environment.session_time_limit of {seconds:g} s"
                self._end(record, FAILURE, error=error)


class Part:
    """The requests of some sessions, which with their rows are numbered from 0: `turns.Requests`.

    Attributes:
        rows: the rows that are sampled, by number.
        ends: ends of rows that were not taken.
    """

    def __init__(self, gateway: Gateway, sessions: Sequence[int]):
        self._gateway, self._changed = gateway, gateway._changed
        self._numbers = {session: number for number, session in enumerate(sessions)}
        self.rows: list[RowRecord] = []
        self.ends: list[Reply] = []

    @property
    def is_open(self) -> bool:
        """Whether a session is open or will be, or ends of rows were not taken."""
        with self._changed:
            return self._gateway._unfinished(self._numbers) or bool(self.ends)

    def requests(self, seconds: float) -> list[Request | Reply]:
        """Returns the requests that are there, or waits until one is or the seconds have passed.

        Sessions beyond their time limit end first.
        """
        gateway, ends = self._gateway, time.monotonic() + seconds
        if not gateway._is_alive():
            gateway.fail_all("what runs the agents has ended")
        with self._changed:
            while True:
                gateway._end_late_sessions()
                taken: list[Request | Reply] = [*self.ends]
                self.ends.clear()
                own = [t for t in gateway._queue if t.row.session.job.number in self._numbers]
                for turn in own:
                    gateway._queue.remove(turn)
                    taken.append(self._taken(turn))
                left = ends - time.monotonic()
                if taken or left <= 0 or not gateway._unfinished(self._numbers):
                    return taken
                self._changed.wait(left)

    def began(self, row: int, prompt: int) -> None:
        """Takes the number of tokens that the prompt of a new row has."""
        self.rows[row].prompt = prompt

    def forget(self, row: int) -> None:
        """Makes a row of its own of what continues a row, which has lost what it keeps."""
        with self._changed:
            old = self.rows[row]
            old.forgotten, asked = True, old.turns[-1]
            if not asked.order:  # It has been asked for and not been taken.
                old.turns.pop()
                new = RowRecord(
                    old.session, len(old.session.rows), old.ids, [asked], tools=old.tools
                )
                asked.row, asked.added, old.ids = new, new.ids, old.ids[: old.turns[-1].end]
                old.session.rows.append(new)

    def submit(self, turn: Turn) -> None:
        """Answers the request of a row."""
        with self._changed:
            row = self.rows[turn.row]
            record, asked = row.session, row.turns[-1]
            if record.ending != OPEN:
                return
            asked.ids, asked.logprobs = list(turn.ids), list(turn.logprobs)
            asked.complete = turn.complete
            row.ids += asked.ids
            record.answers += 1
            asked.order = record.answers
            asked.future.set_result(None)

    def _taken(self, turn: Asked) -> Request:
        """What the sampler gets of a request."""
        row = turn.row
        if row.part is not None:
            return Request(row.number, turn.added, turn.limit)
        row.part, row.number = self, len(self.rows)
        self.rows.append(row)
        number = self._numbers[row.session.job.number]
        return Request(row.number, turn.added, turn.limit, session=number, root=row.root)
