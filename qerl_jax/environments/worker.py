"""The processes in which environments run: one for each environment that is alive.

    python -m qerl_jax.environments.worker FD

imports the user's modules once and forks a process for each environment, so that one starts in
milliseconds and its failure is its own.

All of them end with the process that started them, even if that one is killed, and so does what
they start. An environment may start a process that leaves its process group and whose parent
ends, as servers do. On Linux such an orphan becomes the child of the nearest ancestor that is a
subreaper, so a small process without any user code supervises each environment, and another one
supervises the process that imports and forks (`_supervise`).

Only the standard library, the names of signals and the user's modules are imported here.
"""

import asyncio
import contextlib
import ctypes
import importlib
import inspect
import itertools
import json
import math
import os
import pickle
import random
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from qerl_jax.system.signals import PARENT_DEATH_SIGNAL, STOP_SIGNALS

LONGEST_TEXT = 200_000  # characters of a text that an environment returns; the rest is cut off
_LONGEST_FACT = 10_000  # characters, as JSON, of an attribute or a list that rewards may read
_CHILD_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of Linux
_KILL_SECONDS = 2.0  # how long a supervisor tries to end processes, such as those of another user
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_NOT_TOOLS = ("reset", "get_reward", "step", "init", "close")


# --- Messages -------------------------------------------------------------------------------------


def send(connection: socket.socket, message: Any) -> None:
    """Sends a message; JSON, so that what comes from an environment is data and not code.

    A lone surrogate, which no tokenizer takes and no file holds, becomes a question mark.
    """
    data = json.dumps(message, ensure_ascii=False).encode(errors="replace")
    connection.sendall(struct.pack("!I", len(data)) + data)


def receive(connection: socket.socket) -> Any:
    """Receives what `send` has sent; raises EOFError where the other side has closed."""
    (size,) = struct.unpack("!I", _read(connection, 4))
    return json.loads(_read(connection, size))


def _read(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(min(1 << 20, size - len(data)))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


# --- Supervisors ----------------------------------------------------------------------------------


def _supervise(parent: int) -> None:
    """Forks, and returns in the new process alone.

    The old process waits until the new one, or its own parent, has ended, or for SIGALRM. Then it
    ends everything that is below it and exits.

    Args:
        parent: the process whose end is awaited, the parent of the caller.
    """
    _prctl(_CHILD_SUBREAPER, 1)
    _prctl(PARENT_DEATH_SIGNAL, signal.SIGCHLD)
    awaited = {signal.SIGCHLD, signal.SIGALRM}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    supervisor, child = os.getpid(), os.fork()
    if not child:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != supervisor:
            os._exit(1)
        return
    try:
        os.closerange(3, 1 << 20)  # An end of a connection that stays open would hide its end.
        while os.getppid() == parent and not _has_ended(child):
            if signal.sigwait(awaited) == signal.SIGALRM:
                break
        _end_descendants(child)
    finally:
        os._exit(0)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # It is a function of Linux.
        ctypes.CDLL(None).prctl(option, value)


def _has_ended(child: int) -> bool:
    """Whether a child has ended; it is not reaped, so that its number is not used again.

    Orphans that have become children of this process are reaped.
    """
    while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        if ended.si_pid == child:
            return True
        os.waitpid(ended.si_pid, 0)
    return False


def _end_descendants(child: int) -> None:
    """Ends a child and all processes below this one.

    A process that is killed leaves its children to this process, so the search is repeated. Without
    /proc only the group of the child is ended.
    """
    ends, found_none = time.monotonic() + _KILL_SECONDS, 0
    _kill(child, child)
    # One search may miss a process whose parent ends meanwhile.
    while found_none < 2 and time.monotonic() < ends:
        alive = False
        for pid, group, ended in _descendants():
            _kill(pid, group)
            alive |= not ended
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        found_none = 0 if alive else found_none + 1
        time.sleep(0.001 * alive)


def _kill(pid: int, group: int) -> None:
    """Kills a process, and at the same instant its group, whose members may be forking."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if group != os.getpgrp():
            os.killpg(group, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _descendants() -> list[tuple[int, int, bool]]:
    """Number and process group of all processes below this one, and whether they have ended."""
    children: dict[int, list[tuple[int, int, bool]]] = {}
    with contextlib.suppress(OSError):
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                state, parent, group = file.read().rpartition(b")")[2].split()[:3]
                children.setdefault(int(parent), []).append((int(name), int(group), state == b"Z"))
    found, parents = [], [os.getpid()]
    while parents:
        below = children.get(parents.pop(), [])
        found += below
        parents += [pid for pid, _, _ in below]
    return found


# --- The process that imports and forks -----------------------------------------------------------


def main(control: socket.socket) -> None:
    """Imports the user's modules, and forks a process for every connection that arrives."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # Where it is ignored, no end is noticed.
    # The step that is under way ends first. A program that is started does not inherit a handler,
    # as it does SIG_IGN, with which an environment could not terminate it.
    for number in _heard_signals():
        signal.signal(number, _ignore)
    _supervise(os.getppid())
    makers, error = {}, None
    for name, paths in receive(control).items():
        try:
            found = []
            for path in paths.split(","):
                module, _, attribute = path.strip().partition(":")
                found.append(getattr(importlib.import_module(module), attribute))
            makers[name] = found if len(found) > 1 else found[0]
        except BaseException as failure:
            error = paths, _line(failure)
            break
    # Modules may close the standard streams, whose numbers a connection would get, and ignore
    # SIGCHLD or reap what has ended.
    while os.open(os.devnull, os.O_RDWR) <= 2:
        pass
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    send(control, error)
    supervisors: dict[int, int] = {}  # of each process with an environment
    while not error:
        ready, _, _ = select.select([control], [], [], 1.0)
        for pid, supervisor in list(supervisors.items()):
            if os.waitpid(supervisor, os.WNOHANG)[0]:
                del supervisors[pid]
        if not ready:
            continue
        data, files, _, _ = socket.recv_fds(control, 16, 1)
        if not data:
            return
        if files:
            _start(files[0], control, makers, supervisors)
        elif (pid := int(data.split(b"\0")[0])) in supervisors:
            _kill(pid, pid)  # Its supervisor ends what it has started.


def _heard_signals() -> list[signal.Signals]:
    """The signals that ask to stop, but for those that this process ignores, as under nohup."""
    return [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


def _ignore(*_: Any) -> None:
    """Ignores a signal."""


def _let_forks_end() -> None:
    """Lets signals end what this process forks, also one that arrives while it forks."""
    numbers = _heard_signals()

    def after_in_child() -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)

    os.register_at_fork(
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, numbers),
        after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers),
        after_in_child=after_in_child,
    )


def _start(
    file: int,
    control: socket.socket,
    makers: Mapping[str, Callable[[], Any]],
    supervisors: dict[int, int],
) -> None:
    parent, (reads, writes) = os.getpid(), os.pipe()
    supervisor = os.fork()
    if supervisor:
        os.close(file)
        os.close(writes)
        with open(reads, "rb") as number:
            pid = int(number.read())
        supervisors[pid] = supervisor
        send(control, pid)
        return
    code = 1
    try:
        control.close()
        os.close(reads)
        _supervise(parent)
        os.setsid()
        os.write(writes, str(os.getpid()).encode())
        os.close(writes)
        _let_forks_end()
        _serve(socket.socket(fileno=file), makers)
        code = 0
    finally:
        os._exit(code)


# --- A process with one environment ---------------------------------------------------------------


def _serve(connection: socket.socket, makers: Mapping[str, Callable[[], Any]]) -> None:
    """Answers requests until the other side closes."""
    host, pid = _Host(makers), os.getpid()
    while True:
        try:
            request = pickle.loads(_read(connection, struct.unpack("!I", _read(connection, 4))[0]))
        except (EOFError, OSError):
            return
        try:
            reply = getattr(host, request.pop("op"))(**request)
        except BaseException as error:
            reply = {"error": _line(error)}
        if os.getpid() != pid:
            return  # The environment forked, and this is the copy.
        try:
            send(connection, reply)
        except (TypeError, ValueError) as error:
            send(connection, {"error": f"it returned no data: {_line(error)}"})


class _Host:
    """An environment, of any of the contracts, and what it is asked to do."""

    def __init__(self, makers: Mapping[str, Callable[[], Any]]):
        self._makers, self._name = makers, ""
        self._environment: Any = None

    def describe(self, name: str) -> dict[str, Any]:
        """Returns the kind of an environment, its tools as JSON schemas, and if it has a reward."""
        if _is_skyrl(self._makers[name]):  # Its constructor needs the columns of a problem.
            return {"kind": "text", "tools": [], "rewards": True}
        environment = self._make(name, {})
        tools = _tools(environment)
        if hasattr(environment, "step"):
            return {"kind": "text", "tools": [], "rewards": True}
        if not callable(getattr(environment, "reset", None)):
            if inspect.isroutine(self._makers[name]):
                raise TypeError(
                    "a function without a required argument makes an environment, and what it made "
                    f"is {environment!r:.60}, without a method reset; as a tool, put it into a list"
                )
            raise TypeError("it has no method reset")
        if not tools:
            raise TypeError(
                "it has neither a method step, as an environment of texts has, nor a public method "
                "that is a tool"
            )
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        from transformers.utils.chat_template_utils import get_json_schema

        schemas = [get_json_schema(tool) for tool in tools.values()]
        return {"kind": "tools", "tools": schemas, "rewards": hasattr(environment, "get_reward")}

    def reset(self, name: str, columns: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """Begins an episode; the instance of the last one is used again, as in TRL."""
        if self._environment is None or name != self._name:
            _seed(seed)
            self._environment, self._name = self._make(name, columns), name
        _seed(seed)  # Again, as the constructor may draw, which only a new process runs.
        environment = self._environment
        if not hasattr(environment, "reset"):  # skyrl-gym: the constructor gets the columns.
            with contextlib.suppress(Exception):
                environment.close()
            self._environment = self._make(name, columns)
            self._environment.init([])
            return {"text": None}
        text = _call(environment.reset, {"seed": seed, **columns})
        if text is not None and not isinstance(text, str):
            raise TypeError(f"reset returned a {type(text).__name__}, expected a text or None")
        return {"text": None if text is None else text[:LONGEST_TEXT]}

    def calls(self, calls: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
        """Calls tools one after the other.

        Returns:
            Of each the text, whether it succeeded, and a list that it returned, which is data.
        """
        tools, results = _tools(self._environment), []
        for name, arguments in calls:
            try:
                if name not in tools:
                    raise ValueError(f"Tool {name} not found.")
                value = _awaited(tools[name](**arguments))
                text, succeeded = str(value), True
            except BaseException as error:
                value, text, succeeded = None, str({"error": str(error)}), False
            # As in TRL a list is the content of its message, and anything else its text.
            kept = value if isinstance(value, list) and _is_data(value) else None
            results.append((text[:LONGEST_TEXT], succeeded, kept))
        return {"results": results}

    def step(self, text: str) -> dict[str, Any]:
        """Takes a text of the policy; returns the environment's text, a reward, and if it ends."""
        result = _awaited(self._environment.step(text))
        if isinstance(result, Mapping):
            observation, reward, done = (
                result.get("observations"),
                result.get("reward"),
                result.get("done"),
            )
            if not isinstance(observation, str | None):
                observation = "\n".join(str(message["content"]) for message in observation)
        else:
            observation, reward, done = result
        if not done and not isinstance(observation, str):
            raise TypeError(f"step returned {observation!r:.50}, expected a text")
        return {
            "text": (observation or "")[:LONGEST_TEXT],
            "reward": None if reward is None else float(reward),
            "done": bool(done),
        }

    def finish(self) -> dict[str, Any]:
        """Ends the episode: its reward, if there is one, and the attributes that are data."""
        environment, reward = self._environment, None
        if hasattr(environment, "get_reward"):
            reward = _awaited(environment.get_reward())
        facts = _facts(getattr(environment, "__dict__", {}))
        return {"reward": None if reward is None else float(reward), "facts": facts}

    def describe_agent(self, name: str) -> dict[str, Any]:
        """Refuses what cannot be called as an agent, and says whether it may return a reward."""
        agent = self._makers[name]
        if not callable(agent):
            raise TypeError(f"it is {agent!r:.60}, and no function")
        if inspect.isgeneratorfunction(agent) or inspect.isasyncgenfunction(agent):
            raise TypeError("it yields; return a reward")
        returned = inspect.signature(agent).return_annotation
        return {"rewards": returned not in (None, "None")}

    def rows(self, name: str) -> dict[str, Any]:
        """Returns the rows of problems that a function lists."""
        return {"rows": self._makers[name]()}

    def solve(
        self, name: str, columns: Mapping[str, Any], seed: int, session: Mapping[str, str]
    ) -> dict[str, Any]:
        """Runs the episode of an agent; the environment variables of SDKs name its session."""
        os.environ["OPENAI_BASE_URL"] = session["base_url"]
        os.environ["OPENAI_API_KEY"] = session["api_key"]
        for variable in ("NO_PROXY", "no_proxy"):  # A proxy does not reach this machine.
            hosts = [os.environ.get(variable, ""), "127.0.0.1", "localhost"]
            os.environ[variable] = ",".join(filter(None, hosts))
        _seed(seed)
        result = _call(self._makers[name], {"seed": seed, **columns, **session})
        return _outcome(result)

    def _make(self, name: str, columns: Mapping[str, Any]) -> Any:
        make: Any = self._makers[name]
        if functions := _functions(make):
            return _Functions(functions)
        if _is_skyrl(make):
            extras = {"reward_spec": {"ground_truth": columns.get("answer", "")}} | dict(columns)
            return make({}, extras)
        if not callable(make):
            raise TypeError(f"it is {make!r:.60}: name a class, a function or a list of functions")
        return make()


class _Functions:
    """The environment whose tools are plain functions, and which keeps nothing."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]]):
        self._functions = functions

    def reset(self) -> None:
        """Begins an episode."""


def _functions(make: Any) -> dict[str, Callable[..., Any]]:
    """The functions that are tools, by name: those of a list, or one with a required argument.

    A function without a required argument makes an environment, as a class does.
    """
    if not isinstance(make, list | tuple):
        if not inspect.isroutine(make):
            return {}
        parameters = inspect.signature(make).parameters.values()
        if all(p.default is not p.empty or p.kind in _VARIABLE for p in parameters):
            return {}
        make = [make]
    functions: dict[str, Callable[..., Any]] = {}
    for number, one in enumerate(make, start=1):
        if not inspect.isroutine(one):
            raise TypeError(f"tool {number} of {len(make)} is {one!r:.60}, and no function")
        if inspect.isgeneratorfunction(one) or inspect.isasyncgenfunction(one):
            raise TypeError(f"the tool {one.__name__} yields; return one value, such as a list")
        if one.__name__ in functions:
            raise TypeError(f"two tools are named {one.__name__}; give each a name of its own")
        functions[one.__name__] = one
    if not functions:
        raise TypeError("the list of tools is empty")
    return functions


def _outcome(result: Any) -> dict[str, Any]:
    """The reward and the facts in what an agent returned.

    It is a number, None where rewards of the run decide alone, a dict with `reward` and facts, or
    a pair of a reward and a dict.
    """
    reward, facts = result, {}
    if isinstance(result, Mapping):
        facts = dict(result)
        reward = facts.pop("reward", None)
    elif isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        reward, facts = result
    try:
        if isinstance(reward, str | bytes):
            raise TypeError
        reward = None if reward is None else float(reward)
    except (TypeError, ValueError):
        raise TypeError(
            f"it returned {result!r:.60}, expected a number, None, or one of them and a dict"
        ) from None
    if reward is not None and not math.isfinite(reward):
        raise ValueError(f"its reward is {reward}")
    return {"reward": reward, "facts": _facts(facts)}


def _facts(values: Mapping[Any, Any]) -> dict[str, Any]:
    """The values that rewards may read, by name."""
    return {
        name: value
        for name, value in values.items()
        if isinstance(name, str) and not name.startswith("_") and _is_data(value)
    }


def _is_data(value: Any) -> bool:
    """Whether rewards may read a value: JSON has it, in few characters."""
    try:
        return len(json.dumps(value)) <= _LONGEST_FACT
    except (TypeError, ValueError, RecursionError):
        return False


def _seed(seed: int) -> None:
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


def _is_skyrl(make: Any) -> bool:
    """Whether it is a class in the contract of skyrl-gym, `init` and `step`."""
    return inspect.isclass(make) and hasattr(make, "init") and hasattr(make, "step")


def _tools(environment: Any) -> dict[str, Callable[..., Any]]:
    """The public functions of the class of an environment, as in TRL 1.16.

    That leaves class methods out, and does not evaluate properties.
    """
    if isinstance(environment, _Functions):
        return dict(environment._functions)
    members = inspect.getmembers(type(environment), predicate=inspect.isfunction)
    names = [name for name, _ in members if not name.startswith("_") and name not in _NOT_TOOLS]
    return {name: getattr(environment, name) for name in names}


def _call(function: Callable[..., Any], columns: Mapping[str, Any]) -> Any:
    """Calls a method with the columns that it has arguments for.

    Python passes no argument `self` by name to a method that has one: such a column is left out.
    """
    parameters = inspect.signature(function).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_ONLY]
    values = [columns.get(p.name, p.default) for p in positional]
    values = itertools.takewhile(lambda value: value is not inspect.Parameter.empty, values)
    taken = {p.name for p in positional}
    if inspect.ismethod(function):
        own = next(iter(inspect.signature(function.__func__).parameters.values()))
        taken |= {own.name} if own.kind is own.POSITIONAL_OR_KEYWORD else set()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        named = {p.name for p in parameters if p.kind is not p.VAR_POSITIONAL}
        columns = {name: value for name, value in columns.items() if name in named}
    return _awaited(function(*values, **{n: v for n, v in columns.items() if n not in taken}))


def _awaited(value: Any) -> Any:
    if inspect.iscoroutine(value):
        return asyncio.run(value)
    return value


def _line(error: BaseException) -> str:
    """An exception in one line, with the last line in the user's code."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    files = [frame.f_code.co_filename for frame in frames]
    own = [i for i, file in enumerate(files) if file != __file__]
    where = ""
    if own and not isinstance(error, ImportError):
        frame = frames[own[-1]]
        where = f" ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text}{where}" if text else f"{type(error).__name__}{where}"


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
