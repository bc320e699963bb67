"""What rollouts and environments say to each other: roles, turns, replies and endings."""

from collections.abc import Sequence
from typing import NamedTuple

# Roles of the tokens of a completion, int8; 0 is past its end.
SAMPLED, ENVIRONMENT = 1, 2

# What ends a row with an environment, int8 as an index.
ENDINGS = ("", "answer", "done", "turns", "tokens", "context", "failure")
# answer: the policy ended a turn without a call; done: the environment is done. Both are ends by
# itself. The others are the limits on turns, sampled tokens and all tokens, and a failure of the
# environment, which leaves the row without the environment's reward.
OPEN, ANSWER, DONE, TURNS, TOKENS, CONTEXT, FAILURE = range(len(ENDINGS))


class Turn(NamedTuple):
    """A turn of the policy that has ended."""

    row: int  # number of the row
    ids: Sequence[int]  # its sampled tokens
    complete: bool  # whether the policy or a stop string ended it, and not a limit
    # Largest number of tokens that an environment may add; 0 where the row must end, because a
    # limit is reached.
    space: int
    limit: int = TOKENS  # what ends the row where it must, TOKENS or CONTEXT
    logprobs: Sequence[float] = ()  # log-probabilities of the tokens, where an agent gets them


class Request(NamedTuple):
    """What an agent asks for: a turn after tokens that begin a row, or extend one."""

    row: int  # number of the row
    ids: Sequence[int]  # the prompt of a new row, or the tokens that are added to a row
    limit: int  # largest number of sampled tokens of the turn
    session: int | None = None  # number of the session of a new row; None for a row that is there
    root: int = 0  # number of a new row within its session


class Reply(NamedTuple):
    """What comes back for a turn: tokens that the policy continues, or the end of the row."""

    row: int  # number of the row
    ids: Sequence[int]  # the environment's tokens; () where the row ends
    ending: int  # what ends the row, one of the above; OPEN where it continues
