"""Scores completions with rewards, and survives rewards that fail, wait or never end.

A reward that takes one completion is called as soon as the completion has ended, and one that waits
(`async def`) is awaited together with all others, in the event loop of a thread of its own. Rewards
that take lists are called once, when all completions have ended.
"""

import asyncio
import collections
import concurrent.futures
import contextlib
import copy
import functools
import inspect
import itertools
import math
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence, Set
from types import FrameType
from typing import Any

import numpy as np

from qerl_jax.errors import UserError, first_line, visible
from qerl_jax.rewards.calls import CONVERSATIONS, LISTS, Call, call_of
from qerl_jax.rewards.functions import LARGEST, Reward
from qerl_jax.rewards.scored import Completion, Scores
from qerl_jax.rewards.table import Rewards, table_of
from qerl_jax.rewards.url import RewardError

_TICK = 0.1  # seconds between two looks at whether the wait for a reward shall end
# Errors of a reward for TRL that takes a text for a list of messages, or for one.
_TAKEN_FOR_MESSAGES = "string indices must be integers", "'str' object has no attribute 'get'"
_GRACE = 0.5  # seconds that a reward which blocks the event loop may exceed its time limit


class _OutOfTimeError(BaseException):
    """Raised at the time limit; no Exception, so that `except Exception` cannot catch it."""


def score(
    rewards: Rewards,
    prompts: Sequence[str],
    completions: Sequence[str],
    answers: Sequence[str],
    num_tokens: Sequence[int] | np.ndarray,
    finished: Sequence[bool] | np.ndarray,
    *,
    columns: Sequence[Mapping[str, Any]] | None = None,
    unscored: Set[int] = frozenset(),
    time_limit: float = 5.0,
    on_wait: Callable[[], None] | None = None,
) -> Scores:
    """Scores B completions with every reward.

    A reward that raises, exceeds the time limit, or returns a value that is not a finite number is
    missing (NaN) for that completion, and `errors` reports it; if it has a weight, the completion
    has no total. A reward that returns None does not apply to the completion: it is missing without
    a report, and the total is that of the others.

    Args:
        rewards: reward functions and their weights, by name, or as `table_of` takes them.
        prompts: B prompts as text.
        completions: B completions as text.
        answers: B reference answers.
        num_tokens: B completion lengths in tokens.
        finished: B flags, True where the completion ended by itself.
        columns: B rows of the problems, whose columns reach the rewards; None for no columns.
        unscored: indices of completions that no reward gets, such as conversations whose
            environment failed; their scores are NaN.
        time_limit: as in `Scoring`.
        on_wait: as in `Scoring`.

    Returns:
        The rewards of each completion.

    Raises:
        UserError: the lists have unequal lengths, or a reward is no function.
    """
    rewards = table_of(rewards)
    lists = {
        "prompts": prompts,
        "completions": completions,
        "answers": answers,
        "num_tokens": num_tokens,
        "finished": finished,
        **({} if columns is None else {"columns": columns}),
    }
    counts = {name: len(values) for name, values in lists.items()}
    if text := next((name for name, values in lists.items() if isinstance(values, str)), ""):
        raise UserError(f"{text} is a text, not a list: pass a list with one item per completion")
    if len(set(counts.values())) > 1:
        raise UserError(
            f"lists of unequal length: {', '.join(f'{n} {name}' for name, n in counts.items())}; "
            "each needs one item per completion"
        )
    lengths, flags = np.asarray(num_tokens).tolist(), np.asarray(finished).tolist()
    rows = [{}] * len(prompts) if columns is None else columns
    records = zip(prompts, completions, answers, lengths, flags, rows, strict=True)
    with Scoring(rewards, len(prompts), time_limit=time_limit, on_wait=on_wait) as scoring:
        completed = enumerate(itertools.starmap(Completion, records))
        scoring.add({i: completion for i, completion in completed if i not in unscored})
        return scoring.finish()


class Scoring:
    """The scoring of B completions, which may end one after the other.

    At the end of the block, calls that still wait are canceled.
    """

    def __init__(
        self,
        rewards: Mapping[str, tuple[Reward, float]],
        count: int,
        *,
        time_limit: float,
        on_wait: Callable[[], None] | None = None,
    ):
        """Prepares the scoring.

        Args:
            rewards: reward functions and their weights, by name.
            count: B, number of completions.
            time_limit: time limit for one call in seconds; 0 sets no limit. A reward may have a
                limit of its own. The limit of a function that does not wait works by SIGALRM and
                therefore only in the main thread: other threads have no limit.
            on_wait: called every tenth of a second while a call lasts, also in a signal handler; an
                exception that it raises ends the scoring.
        """
        self._weights = {name: weight for name, (_, weight) in rewards.items()}
        self._calls = {name: call_of(reward) for name, (reward, _) in rewards.items()}
        self._limits = {
            name: time_limit if call.time_limit is None else call.time_limit
            for name, call in self._calls.items()
        }
        self._on_wait = on_wait or (lambda: None)
        self._parts = {name: np.full(count, np.nan) for name in rewards}
        self._has_failed = np.zeros(count, bool)  # in a reward with a weight
        self._completions: dict[int, Completion] = {}
        self._waiting: dict[concurrent.futures.Future, tuple[str, list[int], float]] = {}
        self._failures: dict[str, dict[Any, str]] = {name: {} for name in rewards}
        self._counts: dict[tuple[str, Any], int] = collections.Counter()
        self._seconds = 0.0

    def __enter__(self) -> "Scoring":
        return self

    def __exit__(self, *_: object) -> None:
        for future in self._waiting:
            future.cancel()

    def add(self, completions: Mapping[int, Completion]) -> None:
        """Scores completions that have ended, or begins to."""
        began = time.perf_counter()
        self._completions |= completions
        for name, call in self._calls.items():
            if call.takes_lists:
                continue
            for index, completion in completions.items():
                arguments, columns = completion[: len(LISTS)], call.columns(completion.columns)
                self._start(name, call, [index], arguments, columns)
        self._seconds += time.perf_counter() - began

    def finish(self) -> Scores:
        """Calls the rewards that take lists, waits for all, and returns the scores."""
        began = time.perf_counter()
        # Rewards that wait begin first: they continue while the other rewards work.
        for name, call in sorted(self._calls.items(), key=lambda item: not item[1].waits):
            if call.takes_lists and self._completions:
                indices = sorted(self._completions)
                completions = [self._completions[index] for index in indices]
                keywords: dict[str, list[Any]] = {
                    plural: [completion[index] for completion in completions]
                    for index, plural in enumerate(LISTS)
                    if call.takes_all or plural in call.lists
                }
                keywords |= call.columns_of_all([completion.columns for completion in completions])
                if CONVERSATIONS in call.lists:
                    keywords[CONVERSATIONS] = [
                        # Of its own, as a reward may change them.
                        copy.deepcopy(one.conversation)
                        or [{"role": "assistant", "content": one.completion}]
                        for one in completions
                    ]
                self._start(name, call, indices, (), keywords)
        self._wait()
        self._seconds += time.perf_counter() - began
        # A reward of weight 0 is only logged: it does not make up for a missing reward.
        weighted = [weight * self._parts[name] for name, weight in self._weights.items() if weight]
        size = len(self._completions)
        present = ~np.isnan(weighted).all(axis=0) if weighted else np.zeros_like(self._has_failed)
        # The sum of the others would punish a completion for a reward that is not known.
        present &= ~self._has_failed
        return Scores(
            total=np.where(present, np.nansum(weighted, axis=0), np.nan),
            parts=self._parts,
            errors=[
                f"reward {name!r} is missing for {self._counts[name, kind]} of {size} completions: "
                f"{visible(message)}"
                for name, failures in self._failures.items()
                for kind, message in failures.items()
            ],
            seconds=self._seconds,
        )

    def _start(
        self, name: str, call: Call, indices: list[int], arguments: Sequence[Any], keywords: dict
    ) -> None:
        """Calls a reward for some completions, or begins to wait for it."""
        limit = self._limits[name]
        if call.waits:
            self._await(name, indices, functools.partial(call.function, *arguments, **keywords))
            return
        try:
            # A reward may leave the working directory, to which the run folder may be relative.
            with contextlib.chdir("."), _time_limit(limit, self._on_wait):
                value = call.function(*arguments, **keywords)
        except (_OutOfTimeError, Exception, SystemExit) as error:
            value = error
        if isinstance(value, _OutOfTimeError):
            self._on_wait()  # It may be the reason, and raises then.
        if inspect.isawaitable(value):  # of a plain function around one that waits
            self._await(name, indices, lambda: value)
            return
        self._take(name, indices, value)

    def _await(self, name: str, indices: list[int], call: Callable[[], Any]) -> None:
        """Begins to wait for a call, which returns an awaitable."""
        limit = self._limits[name]
        coroutine = _await_within(call, limit)
        future = asyncio.run_coroutine_threadsafe(coroutine, _event_loop())
        ends = time.monotonic() + (limit + _GRACE if limit else math.inf)
        self._waiting[future] = name, indices, ends

    def _wait(self) -> None:
        """Takes the results of the rewards that wait, each until its time limit at the latest."""
        while self._waiting:
            ready, _ = concurrent.futures.wait(self._waiting, timeout=_TICK)
            now = time.monotonic()
            for future, (name, indices, ends) in list(self._waiting.items()):
                if future in ready:
                    self._take(name, indices, _result(future))
                elif now > ends:
                    future.cancel()
                    self._take(name, indices, _OutOfTimeError())
                else:
                    continue
                del self._waiting[future]
            if self._waiting:
                self._on_wait()

    def _take(self, name: str, indices: list[int], value: Any) -> None:
        """Notes what a call returned, or why it failed."""
        call = self._calls[name]
        values = [value]
        if isinstance(value, BaseException):
            values *= len(indices)
        elif call.takes_lists:
            try:
                if isinstance(value, str | Mapping | Set):  # which list() would take apart
                    raise TypeError(f"it returned a {type(value).__name__}, not a list of rewards")
                values = list(value)
                if len(values) != len(indices):
                    raise ValueError(
                        f"it returned {len(values)} rewards for {len(indices)} completions"
                    )
            except (TypeError, ValueError) as error:
                values = [error] * len(indices)
        for index, reward in zip(indices, values, strict=True):
            try:
                if isinstance(reward, BaseException):
                    raise reward
                self._parts[name][index] = np.nan if reward is None else _finite(reward)
            except BaseException as error:
                if error is not reward and not isinstance(error, Exception | SystemExit):
                    raise
                kind, message = _cause(error, self._limits[name])
                if call.takes_lists and str(error).startswith(_TAKEN_FOR_MESSAGES):
                    message += f"; completions are texts: messages are the argument {CONVERSATIONS}"
                self._has_failed[index] |= bool(self._weights[name])
                self._failures[name].setdefault(kind, message)
                self._counts[name, kind] += 1


def _cause(error: BaseException, limit: float) -> tuple[Any, str]:
    """The kind of a failure, by which failures are counted, and its message."""
    if isinstance(error, _OutOfTimeError):
        return "time", f"exceeded the time limit of {limit:g} s"
    if isinstance(error, RewardError):
        return str(error), str(error)
    kind, line = type(error).__name__, _line_of(error)
    return (kind, line), f"{kind}: {first_line(error)[:200]} ({line})"


def _finite(value: Any) -> float:
    if isinstance(value, str | bytes):
        raise TypeError(f"it returned the text {value!r:.60}; a reward is a number")
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()
        raise TypeError("it returned a call that waits; await it in the reward")
    number = float(value)
    if not abs(number) <= LARGEST:
        raise ValueError(f"it returned {number:g}; a reward is a number up to {LARGEST:g}")
    return number


def _line_of(error: BaseException) -> str:
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    return f"{os.path.basename(frame.f_code.co_filename)}:{line}"


# --- Time limits ----------------------------------------------------------------------------------


@contextlib.contextmanager
def _time_limit(seconds: float, on_wait: Callable[[], None]) -> Generator[None]:
    """Raises _OutOfTimeError in the block after `seconds` (0: never) or when `on_wait` raises."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    active, ends = True, time.monotonic() + (seconds or math.inf)

    def interrupt(signum: int, frame: FrameType | None) -> None:
        del signum, frame
        if not active:
            return
        try:
            on_wait()
        except Exception:
            raise _OutOfTimeError from None  # The caller calls `on_wait` again.
        if time.monotonic() >= ends - 1e-3:
            raise _OutOfTimeError

    # The timer repeats, because a bare `except:` can swallow the first exception.
    tick = seconds / math.ceil(seconds / _TICK) if 0 < seconds < math.inf else _TICK
    handler = signal.signal(signal.SIGALRM, interrupt)
    timer = signal.setitimer(signal.ITIMER_REAL, tick, tick)
    try:
        yield
    finally:
        active = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)


async def _await_within(call: Callable[[], Any], seconds: float) -> Any:
    """Awaits a call; returns an exception as a value, as it must not end the event loop.

    No KeyboardInterrupt in this thread is that of the user.
    """
    limit = asyncio.timeout(seconds or None)
    try:
        async with limit:
            return await call()
    except TimeoutError as error:
        return _OutOfTimeError() if limit.expired() else error
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return error


def _result(future: concurrent.futures.Future) -> Any:
    try:
        return future.result()
    except concurrent.futures.CancelledError as error:  # The reward canceled itself.
        return error


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """The event loop of all rewards that wait, in a thread that ends with the process.

    It stays the same from step to step, so that a reward may keep connections open. Where a task or
    a callback of a reward exits or stops the loop, all others continue, and a reward that
    awaits the task gets its exception.
    """
    loop = asyncio.new_event_loop()

    def run() -> None:
        while True:
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                loop.run_forever()

    threading.Thread(target=run, name="rewards", daemon=True).start()
    return loop
