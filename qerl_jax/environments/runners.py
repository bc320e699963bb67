"""Starts the episodes of agents: functions of the user, or a taskset of verifiers.

Each episode has a process of its own, which is ended with everything that it has started once the
agent has returned, or once its session has ended. An agent that raises, hangs or ends its process
costs its session the reward; other sessions continue.
"""

import collections
import dataclasses
import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qerl_jax.environments.episodes import environment_of
from qerl_jax.environments.gateway import ClosedError, Job, Opens, Session
from qerl_jax.environments.pool import CallError, Pool, Process, wait_for_any
from qerl_jax.errors import UserError
from qerl_jax.system.atomic import replace_file
from qerl_jax.system.paths import cache_folder, needs_cache
from qerl_jax.system.safe_files import make_folder

_TICK = 0.1  # seconds between two looks whether sessions have ended
_DESCRIBE_SECONDS = 120.0
_AGENT = (
    "an agent is a function, package.module:function, which talks to the policy at base_url with "
    "api_key and returns a reward (docs/agents.md)"
)
_TASKSET = (
    "the interpreter environment.python needs verifiers 0.4 and the taskset, as by uv pip install "
    "--python PYTHON verifiers==0.4.0 (docs/agents.md)"
)
_MODULE = "qerl_jax.environments.taskset"  # which the other interpreter imports


class ProcessRunner:
    """The `gateway.Runner` of agents in processes; one thread of its own serves all episodes.

    Attributes:
        gives_rewards: whether an agent may return a reward.
    """

    gives_rewards = True

    def __init__(self, pool: Pool, names: Sequence[str], *, processes: int) -> None:
        """Takes the processes.

        Args:
            pool: starts the processes.
            names: names of the agents; where there are several, the column `environment` of a
                problem chooses one.
            processes: largest number of episodes that run at the same time.
        """
        self._pool, self._names, self._processes = pool, list(names), processes
        self._stops = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, server: Opens, jobs: Sequence[Job]) -> None:
        """Begins the episodes of a rollout, without waiting.

        Raises:
            UserError: no process can be started.
        """
        self.stop()
        if not self._pool.is_open:
            raise UserError(
                "the process that starts agents has ended, perhaps for lack of memory: run the "
                "same command again"
            )
        self._stops.clear()
        self._thread = threading.Thread(
            target=self._run, args=(server, jobs), name="agents", daemon=True
        )
        self._thread.start()

    def is_alive(self) -> bool:
        """Whether episodes may still begin or end."""
        return self._thread is not None and self._thread.is_alive()

    def stop(self) -> None:
        """Ends all episodes that still run."""
        self._stops.set()
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Ends all processes."""
        self.stop()
        self._pool.close()

    def _run(self, server: Opens, jobs: Sequence[Job]) -> None:
        """Runs the episodes of a rollout."""
        waiting, busy = collections.deque(jobs), dict[Process, Session]()
        try:
            while (waiting or busy) and not self._stops.is_set():
                while waiting and len(busy) < self._processes:
                    if not self._begin(server, waiting[0], busy):
                        break
                    waiting.popleft()
                wait_for_any(busy, _TICK)
                for process, session in list(busy.items()):
                    answer = process.answer()
                    if answer is not None or session.ended.is_set():
                        del busy[process]
                        self._pool.kill(process)
                        _close(server, session, answer or {"error": "its session has ended"})
        except ClosedError:  # The rollout has ended.
            pass
        finally:
            for process in busy:
                self._pool.kill(process)

    def _begin(self, server: Opens, job: Job, busy: dict[Process, Session]) -> bool:
        """Begins an episode; returns False where it must wait for the end of another one."""
        try:
            process = self._pool.take()
        except UserError as error:
            if busy and self._pool.is_open:
                return False
            _close(server, server.open(job), {"error": str(error)})
            return True
        try:
            session = server.open(job)
        except ClosedError:
            self._pool.kill(process)
            raise
        busy[process] = session
        chooses = {"environment"} if len(self._names) > 1 else set()
        request = {
            "op": "solve",
            "name": environment_of(job.columns, self._names),
            "columns": {name: job.columns[name] for name in job.columns if name not in chooses},
            "seed": job.seed,
            "session": {
                "base_url": session.base_url,
                "api_key": session.key,
                "root_url": session.root_url,
            },
        }
        process.send(request, limit=None)  # Where it fails, its answer says so.
        return True


def _close(server: Opens, session: Session, answer: Mapping[str, Any]) -> None:
    """Hands in what an episode has come to."""
    error = answer.get("error", "")
    server.close(
        session.id, reward=answer.get("reward"), error=error, info=answer.get("facts") or {}
    )


def agent_runner(functions: Mapping[str, str], *, python: str, processes: int) -> ProcessRunner:
    """Returns the runner of agents that are functions of the user.

    Args:
        functions: import paths of the functions by name.
        python: the interpreter that has them; '' for this one.
        processes: largest number of episodes that run at the same time.

    Raises:
        UserError: one cannot be imported, or is no agent.
    """
    field = "environment.agent"
    pool = Pool(functions, field=field, remedy=_AGENT, python=python)
    runner = ProcessRunner(pool, list(functions), processes=processes)
    runner.gives_rewards = False
    for name, path in functions.items():
        try:
            about = pool.ask({"op": "describe_agent", "name": name}, limit=_DESCRIBE_SECONDS)
        except CallError as error:
            pool.close()
            raise UserError(f"{field}={path}: {error}; {_AGENT}") from error
        runner.gives_rewards |= about["rewards"]
    return runner


@dataclasses.dataclass(frozen=True)
class Taskset:
    """A taskset of verifiers."""

    name: str  # its id
    python: str  # the interpreter that has it
    harness: str  # id of the harness; '' for that of the taskset
    options: Mapping[str, Any]  # further fields of its environment, as in a file of verifiers
    tasks: int  # largest number of tasks
    address: str = ""  # of an env server of verifiers that runs the episodes; '' for none

    def open(self, tokens: Mapping[str, Any], functions: Sequence[str]) -> Pool:
        """Starts the processes, which import some functions of `taskset`.

        Raises:
            UserError: verifiers or the taskset cannot be imported, or refuse the options.
        """
        settings = {
            "taskset": self.name,
            "harness": self.harness,
            "options": dict(self.options),
            "address": self.address,
            "tasks": self.tasks,
            **tokens,
        }
        return Pool(
            {name: f"{_MODULE}:{name}" for name in functions},
            field=f"environment.verifiers={self.name}",
            remedy=_TASKSET,
            python=self.python,
            # A fork of a process whose tokenizer has threads would wait for them.
            variables={"QERL_JAX_TASKSET": json.dumps(settings), "TOKENIZERS_PARALLELISM": "false"},
        )

    def rows(self) -> list[dict[str, Any]]:
        """Returns the tasks as rows of problems: `question`, and `index`, which names the task.

        Raises:
            UserError: as in `open`.
        """
        pool = self.open({"tokenizer": ""}, ["rows"])
        try:
            return pool.ask({"op": "rows", "name": "rows"}, limit=_DESCRIBE_SECONDS)["rows"]
        except CallError as error:
            raise UserError(f"environment.verifiers={self.name}: {error}") from error
        finally:
            pool.close()


class TasksetRunner(ProcessRunner):
    """The runner of a taskset of verifiers, which reads the files of the tokenizer."""

    def __init__(
        self,
        taskset: Taskset,
        tokens: Mapping[str, Any],
        files: Mapping[str, bytes],
        *,
        processes: int,
    ) -> None:
        """Loads the taskset.

        Args:
            taskset: the taskset.
            tokens: `template_args`, `eos_ids` and `tool_form`, see `taskset`.
            files: files of the tokenizer, as transformers reads them.
            processes: largest number of episodes that run at the same time.

        Raises:
            UserError: as in `Taskset.open`.
        """
        pool = taskset.open({"tokenizer": str(_tokenizer_folder(files)), **tokens}, ["solve"])
        super().__init__(pool, ["solve"], processes=processes)


def _tokenizer_folder(files: Mapping[str, bytes]) -> Path:
    """Writes files to a folder of the cache that is named after them.

    A temporary folder would remain after a kill.
    """
    digest = hashlib.sha256(b"".join(name.encode() + files[name] for name in sorted(files)))
    folder = cache_folder("tokenizers") / digest.hexdigest()[:24]
    with needs_cache(folder, "train without environment.verifiers"):
        for name, data in files.items():
            if not (path := folder / name).exists():
                make_folder(path.parent)
                with replace_file(path) as temporary:
                    temporary.write_bytes(data)
    return folder
