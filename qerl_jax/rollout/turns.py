"""What happens when a turn of a row has ended: the row ends, or hands it to an environment.

A policy says how long a turn may be, what its end does to the row, and which replies are there. A
reply comes back as token ids, which are prefilled on the row's live cache together with those of
other rows, and the next turn begins.

When an environment replies depends on the time, and so does which rows are in a batch. So all
batches of a rollout with conversations have one size: a row has the same numbers whatever the other
rows do.

Agents bring the prompts, too: a rollout of sessions begins without rows, and each request that does
not extend a row begins one.
"""

from collections.abc import Sequence
from typing import Protocol

from qerl_jax.environments.roles import ANSWER, CONTEXT, OPEN, TOKENS, Reply, Request, Turn
from qerl_jax.rollout.completions import TurnSamples
from qerl_jax.rollout.config import TurnConfig
from qerl_jax.rollout.row import Row, State

_ROOT_BITS = 20  # the further rows of a session have other identities than all first rows


class Dialog(Protocol):
    """The part of the environments' episodes that a rollout uses."""

    def submit(self, turn: Turn, /) -> None:
        """Hands a turn to the environment of its row, without waiting."""
        ...

    def replies(self, seconds: float, /) -> Sequence[Reply]:
        """Returns the replies that are there, or waits until one is or the seconds have passed."""
        ...

    def part(self, rows: Sequence[int], /) -> "Dialog":
        """Returns the dialog of some of the rows, in which they are numbered from 0.

        Another thread may use it while others use the parts of other rows.
        """
        ...


class Agents(Protocol):
    """The part of the agents' episodes that a rollout uses."""

    def part(self, sessions: Sequence[int], /) -> "Requests":
        """Returns the requests of some sessions, in which they are numbered from 0.

        The parts of different sessions may be used by different threads.
        """
        ...


class Requests(Protocol):
    """The part of the agents' gateway that a rollout on one group of devices uses."""

    @property
    def is_open(self) -> bool:
        """Whether a session is open, or will be."""
        ...

    def began(self, row: int, prompt: int, /) -> None:
        """Takes the number of tokens that the prompt of a new row has."""
        ...

    def forget(self, row: int, /) -> None:
        """Makes a row of its own of what continues a row, which has lost what it keeps."""
        ...

    def submit(self, turn: Turn, /) -> None:
        """Answers the request of a row."""
        ...

    def requests(self, seconds: float, /) -> Sequence[Request | Reply]:
        """Returns the requests that are there, or waits until one is or the seconds have passed.

        A `Reply` ends a row.
        """
        ...


class _FixedRows:
    """The rows of a rollout all of which are there when it begins."""

    is_open = False  # whether further rows may come
    forgets = False  # whether a row that waits may lose what it keeps

    def arrivals(self) -> Sequence[Row]:
        """Returns the rows that have come since the last call."""
        return ()

    def forget(self, row: Row) -> None:
        """Tells that a row has lost what it keeps; is not called."""


class OneTurn(_FixedRows):
    """Completions of one turn: a row ends with it."""

    keeps_cache = False  # whether a row keeps its slot when its turn has its last tokens
    host_bytes = 0  # bytes of the host for what rows keep that wait without a slot

    def __init__(self, max_new_tokens: int) -> None:
        self._max_new_tokens = max_new_tokens

    def turn_tokens(self, row: Row, length: int) -> int:
        """Returns the limit of the next turn of a row after `length` tokens."""
        return self._max_new_tokens - row.sampled

    def end_turn(self, row: Row, samples: TurnSamples, *, complete: bool) -> None:
        """Ends the row; the turn is `complete` where no limit has ended it."""
        row.end(ANSWER if complete else TOKENS)

    def replies(self, seconds: float) -> Sequence[Reply]:
        """Returns no reply."""
        return ()


class Conversations(_FixedRows):
    """Completions of several turns, after each of which an environment replies or ends the row."""

    keeps_cache = True

    def __init__(self, dialog: Dialog, limits: TurnConfig, max_new_tokens: int) -> None:
        self._dialog, self._limits, self._max_new_tokens = dialog, limits, max_new_tokens
        self.host_bytes = limits.host_cache_bytes

    def turn_tokens(self, row: Row, length: int) -> int:
        """Returns the limit of the next turn."""
        return self._limits.next_turn(length, row.sampled, self._max_new_tokens)

    def end_turn(self, row: Row, samples: TurnSamples, *, complete: bool) -> None:
        """Submits the turn."""
        row.state = State.AT_ENVIRONMENT
        ids = samples.ids
        limits, length = self._limits, row.start + len(ids)
        space, limit = min(limits.reply_tokens, limits.context_tokens - length - 1), CONTEXT
        if row.sampled >= self._max_new_tokens:
            space, limit = 0, TOKENS
        self._dialog.submit(Turn(row.number, ids.tolist(), complete, max(0, space), limit))

    def replies(self, seconds: float) -> Sequence[Reply]:
        """Returns those of the environments."""
        return self._dialog.replies(seconds)


class Sessions:
    """Rows of agents: each begins with a request, grows with others, and ends with its session."""

    keeps_cache = True
    forgets = True  # An agent may wait for the answer to another request, which needs a slot.

    def __init__(
        self,
        gateway: Requests,
        limits: TurnConfig,
        *,
        first_turn: int | None = None,
    ) -> None:
        """Makes the policy.

        `first_turn` is the limit on the first turn of a row that the device has, where what a row
        keeps cannot go back to an earlier position; None where it can.
        """
        self._gateway, self._first_turn = gateway, first_turn
        self._context, self.host_bytes = limits.context_tokens, limits.host_cache_bytes
        self._identities: Sequence[int] = ()
        self._width = 0
        self._limits: dict[int, int] = {}  # of the turn that comes next, by row
        self._prompts: dict[tuple[int, ...], int] = {}  # groups of equal prompts
        self._rows: list[Row] = []
        self.count = 0  # number of rows that were begun

    def begin(self, identities: Sequence[int], width: int) -> int:
        """Begins a rollout, and returns the tokens that a row may have.

        The samples of the first row of a session depend on the identity of the session. `width` is
        the number of tokens of the longest prompt that is prefilled as a whole.
        """
        self._identities, self._width = identities, width
        return width + self._context

    @property
    def is_open(self) -> bool:
        """Whether further rows may come."""
        return self._gateway.is_open

    def turn_tokens(self, row: Row, length: int) -> int:
        """Returns the limit that the request has set."""
        return self._limits.pop(row.number)

    def end_turn(self, row: Row, samples: TurnSamples, *, complete: bool) -> None:
        """Answers the request."""
        row.state = State.AT_ENVIRONMENT
        ids, logprobs = samples.ids.tolist(), samples.logprobs.tolist()
        self._gateway.submit(Turn(row.number, ids, complete, 0, logprobs=logprobs))

    def replies(self, seconds: float) -> Sequence[Reply]:
        """Returns the further requests of rows, and the ends of rows whose session has ended."""
        replies = []
        for request in self._gateway.requests(seconds):
            if isinstance(request, Reply):
                replies.append(request)
                continue
            self._limits[request.row] = request.limit
            if request.session is None:
                replies.append(Reply(request.row, request.ids, OPEN))
            else:
                self._rows.append(self._begun(request, request.session))
        return replies

    def arrivals(self) -> Sequence[Row]:
        """Returns the rows that have come since the last call."""
        rows, self._rows = self._rows, []
        return rows

    def forget(self, row: Row) -> None:
        """Tells that a row has lost what it keeps."""
        self._gateway.forget(row.number)

    def _begun(self, request: Request, session: int) -> Row:
        """The row that a request begins.

        What does not fit into a prefill, or must be sampled with a limit of its own, extends it.
        """
        split = min(len(request.ids), self._width)
        if self._first_turn is not None and request.limit < self._first_turn:
            split = min(split, len(request.ids) - 1)
        prompt = tuple(request.ids[:split])
        group = self._prompts.setdefault(prompt, len(self._prompts))
        self._gateway.began(request.row, split)
        self.count += 1
        identity = (self._identities[session] + (request.root << _ROOT_BITS)) % 2**31
        return Row(request.row, identity, group, prompt, reply=request.ids[split:])


type TurnPolicy = OneTurn | Conversations | Sessions
