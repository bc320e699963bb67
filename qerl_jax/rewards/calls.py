"""How a reward is called: for one completion or for all, at once or awaited, with which columns.

    def f(prompt, completion, answer, num_tokens, finished)           one completion
    def f(prompt, completion, answer, num_tokens, finished, tests)    and its row's column `tests`
    async def f(...)                                                  all are awaited at once
    def f(...): return g(...)                                         so is what a wrapper returns
    def f(completions, answers, tests)                                lists: a call for a rollout
    def f(conversations, answers)                                     lists of chat messages, too
    http://localhost:8000/score                                       a POST for a rollout

A function with an argument named `completions`, `conversations` or `environments` takes lists, by
name: any of `prompts`, `completions`, `answers`, `num_tokens` and `finished`, the messages after
each prompt as `conversations`, and columns. A function of one
completion takes its first five arguments by position. Further arguments are columns of the row, by
name; one with a default value may be missing in a row, and `**columns` gets all columns. As in TRL,
the columns are the raw ones: the list `answers` holds the short reference answers, the column
`answer` what the row has.
"""

import dataclasses
import functools
import inspect
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from qerl_jax.errors import UserError
from qerl_jax.rewards import math_process
from qerl_jax.rewards.functions import BUILT_IN, CONVERSATION_COLUMNS, Reward, math_answer
from qerl_jax.rewards.url import UrlReward, check_json, is_url
from qerl_jax.system.import_path import import_function, path_of

LISTS = ("prompts", "completions", "answers", "num_tokens", "finished")
CONVERSATIONS = "conversations"  # the list that only a reward with an argument of this name gets
_ARGUMENTS = "(prompt, completion, answer, num_tokens, finished)"
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclasses.dataclass(frozen=True)
class Timed:
    """A reward with a time limit of its own, in seconds; as a function it is that reward."""

    function: Reward
    time_limit: float

    def __call__(self, /, *arguments: Any, **columns: Any) -> Any:
        """Calls the reward, without the time limit."""
        return self.function(*arguments, **columns)


@dataclasses.dataclass(frozen=True)
class Call:
    """How a reward is called."""

    function: Reward  # the reward
    takes_lists: bool  # whether one call scores all completions
    waits: bool  # whether a call returns an awaitable
    # Those of `LISTS`, and `CONVERSATIONS`, that it has arguments for, if it takes lists.
    lists: tuple[str, ...]
    needed: tuple[str, ...]  # columns without which it cannot be called
    optional: tuple[str, ...]  # columns that it gets where a row has them
    takes_all: bool  # whether it gets every column, and every one of `LISTS`
    reserved: frozenset[str]  # names of other arguments; a column of such a name is not passed
    time_limit: float | None  # time limit of a call in seconds; None for the common one

    def columns(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the columns of a row that the reward gets."""
        names = row if self.takes_all else (*self.needed, *self.optional)
        return {name: row[name] for name in names if name in row and name not in self.reserved}

    def columns_of_all(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
        """Returns the columns as lists over the rows; None where a row lacks one."""
        row_columns = [self.columns(row) for row in rows]
        names = dict.fromkeys(name for columns in row_columns for name in columns)
        return {name: [columns.get(name) for columns in row_columns] for name in names}


def plain(reward: Reward) -> Reward:
    """Returns the reward without its time limit."""
    return reward.function if isinstance(reward, Timed) else reward


def call_of(reward: Reward) -> Call:
    """Reads from the signature of a reward how it is called."""
    function = plain(reward)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some functions in C have no signature
        parameters = []
    keywords = [parameter for parameter in parameters if parameter.kind in _NAMED]
    marks = ("completions", CONVERSATIONS, "environments")
    takes_lists = any(parameter.name in marks for parameter in keywords)
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    if takes_lists:
        names = {parameter.name for parameter in keywords}
        lists = tuple(name for name in (*LISTS, CONVERSATIONS) if name in names)
        reserved = frozenset((*LISTS, *lists))
    else:
        keyword_only = [p for p in keywords if p.kind is inspect.Parameter.KEYWORD_ONLY]
        positional = [
            p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        lists, reserved = (), frozenset(parameter.name for parameter in positional[:5])
        keywords = [p for p in positional[5:] if p.kind in _NAMED] + keyword_only
    reserved |= _bound(function)
    columns = [parameter for parameter in keywords if parameter.name not in reserved]
    return Call(
        function=function,
        takes_lists=takes_lists,
        waits=inspect.iscoroutinefunction(function)
        or inspect.iscoroutinefunction(getattr(function, "__call__", None)),  # noqa: B004
        lists=lists,
        needed=tuple(p.name for p in columns if p.default is p.empty),
        optional=tuple(p.name for p in columns if p.default is not p.empty),
        takes_all=takes_all,
        reserved=reserved,
        time_limit=reward.time_limit if isinstance(reward, Timed) else None,
    )


def _bound(function: Reward) -> frozenset[str]:
    """Names of arguments that have their value, such as `self`, which no column can have."""
    if isinstance(function, functools.partial):
        inner, count = function.func, len(function.args)
    elif inspect.ismethod(function):
        inner, count = function.__func__, 1
    else:
        inner, count = type(function).__call__, int(not inspect.isroutine(function))
    try:
        parameters = inspect.signature(inner).parameters.values()
    except (TypeError, ValueError):
        return frozenset()
    bound = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = frozenset(p.name for p in bound[:count] if p.kind is p.POSITIONAL_OR_KEYWORD)
    return names | (_bound(inner) if isinstance(function, functools.partial) else frozenset())


def resolve(
    path: str, *, time_limit: float = 0.0, retries: int | None = None, token_env: str = ""
) -> Reward:
    """Makes a reward from what a config says about it.

    Args:
        path: import path of a function, `package.module:function`, or a URL.
        time_limit: time limit of a call in seconds; 0 keeps the common one.
        retries: number of further attempts to reach a URL; None keeps the usual number.
        token_env: name of the environment variable with the token for a URL; '' sends none.

    Returns:
        The function, or a callable that asks the URL.

    Raises:
        UserError: the module or the function does not exist, the function does not take the
            arguments of a reward, or the URL or its token is malformed.
    """
    if is_url(path):
        options = {} if retries is None else {"retries": retries}
        function = UrlReward(path, token_env=token_env, **options)
        function.token()  # A missing token is an error before anything is loaded.
    elif retries is not None or token_env:
        raise UserError(
            f"reward {path!r}: retries and token_env are read for a URL, not for a function; leave "
            "them out"
        )
    else:
        function = import_function(path, what="reward")
        _check_arguments(path, function)
    if function is math_answer:
        # The worker takes seconds to start, which would exceed the time limit of the first call.
        math_process.verify("1", "1")
    return Timed(function, time_limit) if time_limit else function


def is_built_in(path: str) -> bool:
    """Returns whether an import path is that of one of the project's own rewards."""
    return path in {f"{reward.__module__}:{reward.__name__}" for reward in BUILT_IN}


def announce_hosts(rewards: Iterable[Reward]) -> None:
    """Prints once to which hosts completions, and a token, are sent."""
    for reward in map(plain, rewards):
        if isinstance(reward, UrlReward):
            host = urllib.parse.urlsplit(reward.url).netloc
            token = f", with the token in {reward.token_env}" if reward.token_env else ""
            _print_once(f"completions are sent to {host} for their rewards{token}")


@functools.cache
def _print_once(line: str) -> None:
    print(line, flush=True)


def reward_entry(reward: Reward) -> dict[str, Any]:
    """Returns what a config would say about a reward, from which `resolve` makes it again.

    Its `function` is '' where no import path leads to it, such as that of a lambda.
    """
    function = plain(reward)
    if isinstance(function, UrlReward):
        entry = {"function": function.url, "retries": function.retries}
        entry |= {"token_env": function.token_env} if function.token_env else {}
    else:
        entry = {"function": path_of(function)}
    return entry | ({"time_limit": reward.time_limit} if isinstance(reward, Timed) else {})


def _check_arguments(path: str, function: Reward) -> None:
    call = call_of(function)
    if call.takes_lists:
        return
    try:
        columns = dict.fromkeys(call.needed)
        inspect.signature(function).bind("", "", "", 0, True, **columns)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"reward {path!r}: it must take {_ARGUMENTS} and then columns, or lists, of which one "
            f"is named completions: {error}"
        ) from error


def columns_read(rewards: Iterable[Reward], rows: Sequence[Mapping[str, Any]]) -> set[str]:
    """Returns the names of the columns of some rows that rewards get."""
    calls = [call_of(reward) for reward in rewards]
    return {name for call in calls for row in rows for name in call.columns(row)}


def check_columns(
    name: str,
    reward: Reward,
    rows: Sequence[Mapping[str, Any]],
    *,
    converses: bool = False,
) -> None:
    """Refuses rows that lack a column that a reward needs, or have one that it cannot get or send.

    With `converses` rows will have the columns of a conversation, `CONVERSATION_COLUMNS`.

    Raises:
        UserError: a row lacks a column, has one without a form in JSON where a server needs it, or
            one whose name is that of an argument that the run gives.
    """
    call = call_of(reward)
    given = CONVERSATION_COLUMNS if converses else ()
    if not isinstance(call.function, UrlReward):
        later = [column for column in (*call.needed, *call.optional) if column in given]
        for column in (*call.lists, *later):
            if any(column in row for row in rows):
                raise UserError(
                    f"reward {name!r} takes the argument {column!r}, which the run gives, and the "
                    "problems have a column of this name: rename the column"
                )
    rows = [{**row, **dict.fromkeys(given)} for row in rows]
    if isinstance(call.function, UrlReward):
        check_json(name, [call.columns(row) for row in rows])
    for column in call.needed:
        lacking = [row for row in rows if column not in row]
        if lacking and column in CONVERSATION_COLUMNS:
            raise UserError(
                f"reward {name!r} takes the argument {column!r}, which only a run with an "
                "environment gives: set environment.function, or give the argument a default value"
            )
        if lacking:
            raise UserError(
                f"reward {name!r} takes the argument {column!r}, a column that {len(lacking)} of "
                f"{len(rows)} problems lack; the first of them has "
                f"{', '.join(map(str, lacking[0])) or 'no columns'}: give the argument the name of "
                "a column, or a default value"
            )
