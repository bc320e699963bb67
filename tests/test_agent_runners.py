"""What starts the episodes of agents: each failure costs its own session, and nothing is left."""

import contextlib
import json
import os
import pathlib
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import tiny_checkpoints
import tiny_run
from environment_cases import TEMPLATE
from refusal import refused
from runner_cases import Server, until

from qerl_jax.data.problem_list import with_problems
from qerl_jax.environments.gateway import Job
from qerl_jax.environments.pool import Pool
from qerl_jax.environments.runners import ProcessRunner, Taskset, agent_runner
from qerl_jax.errors import UserError
from qerl_jax.system.jsonl import read_jsonl
from qerl_jax.training.dry_run import dry_run
from qerl_jax.training.loop import train
from qerl_jax.training.validate import validate


class Answers(BaseHTTPRequestHandler):
    """Answers every request of an open session with its own key."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        session, key = self.path.split("/")[2], self.headers["Authorization"].split()[-1]
        content = f"{session} {key} {body['messages'][-1]['content']}"
        data = json.dumps({"choices": [{"message": {"content": content}}]}).encode()
        self.send_response(409 if session in self.server.closed else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def address():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.closed = set()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()


@pytest.fixture(scope="module")
def pool():
    names = ("solve", "faults", "from_command")
    pool = Pool({name: f"agent_functions:{name}" for name in names}, field="environment.agent")
    yield pool
    pool.close()


@pytest.fixture
def server(address):
    address.closed.clear()
    return Server(f"http://127.0.0.1:{address.server_port}", address.closed)


def runner_of(pool, name, processes=4):
    return ProcessRunner(pool, [name], processes=processes)


def run(pool, server, name, questions, **options):
    """Runs an episode for each question; returns reward, error and facts of each."""
    runner = runner_of(pool, name, **options)
    runner.start(server, jobs(questions))
    until(lambda: not runner.is_alive())
    return [server.results[f"s{number}"] for number in range(len(questions))]


def jobs(questions):
    return [
        Job(number, number, {"question": text, "answer": "7", "self": "a column"}, 10 + number)
        for number, text in enumerate(questions)
    ]


def alive(pid):
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_an_agent_talks_to_its_own_session(pool, server):
    results = run(pool, server, "solve", ["a", "bb", "ccc", "d", "e"], processes=2)
    said = [f"s{n} key{n} {text}" for n, text in enumerate(["a", "bb", "ccc", "d", "e"])]
    assert results == [
        (float(len(text)), "", {"answer": text, "seed": 10 + n}) for n, text in enumerate(said)
    ]
    assert server.most == 2


def test_a_command_finds_its_session_in_the_environment(pool, server, monkeypatch):
    """Also where a proxy is set, which does not reach this machine."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    folder = str(pathlib.Path(__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{folder}/tests")
    pool = Pool({"agent": "agent_functions:from_command"}, field="environment.agent")
    try:
        [(reward, error, _)] = run(pool, server, "agent", ["question"])
    finally:
        pool.close()
    assert (reward, error) == (len("s0 key0 question"), "")


def test_failures_cost_their_session_alone(pool, server):
    cases = {
        "raise": r"RuntimeError: broken (agent_functions.py:",
        "exit": "SystemExit: 3",
        "die": "its process ended",
        "text": "TypeError: it returned 'good', expected a number",
        "digits": "TypeError: it returned '1.0', expected a number",
        "list": "TypeError: it returned [1.0], expected a number",
        "pair": "TypeError: it returned (1.0, 2.0), expected",
        "object": "TypeError: it returned <object object",
        "nan": "ValueError: its reward is nan",
        "unheard": "KeyError: 'unheard'",
    }
    right = {
        "none": (None, {}),
        "number": (2.0, {}),
        "true": (1.0, {}),
        "facts": (0.5, {"tries": 3}),
        "facts alone": (None, {"tries": 3}),
        "variables": (None, {"right": True}),
    }
    results = run(pool, server, "faults", [*cases, *right], processes=16)
    for (reward, error, info), expected in zip(results, cases.values(), strict=False):
        assert (reward, info) == (None, {})
        assert error.startswith(expected)
    assert results[len(cases) :] == [(reward, "", info) for reward, info in right.values()]


def test_what_an_agent_started_ends_with_its_episode(pool, server):
    [(reward, _, info)] = run(pool, server, "faults", ["child"])
    assert reward == 1.0
    until(lambda: not alive(info["pid"]))


def test_a_session_that_ends_ends_its_episode(pool, server):
    """As by its time limit; others begin in its place."""
    runner = runner_of(pool, "faults", processes=1)
    runner.start(server, jobs(["hang", "number"]))
    until(lambda: "s0" in server.sessions)
    assert runner.is_alive()
    time.sleep(0.2)
    assert not server.results
    server.sessions["s0"].ended.set()
    until(lambda: not runner.is_alive())
    assert server.results == {
        "s0": (None, "its session has ended", {}),
        "s1": (2.0, "", {}),
    }


@pytest.mark.parametrize("over", [False, True])
def test_the_end_of_a_rollout_ends_its_episodes(pool, server, over):
    runner = runner_of(pool, "faults", processes=2)
    before = set(pool._all)
    runner.start(server, jobs(["hang", "hang", "hang"]))
    until(lambda: len(server.sessions) == 2)
    pids = [process.pid for process in pool._all - before]
    assert len(pids) == 2
    if over:  # The next session cannot be opened.
        server.over = True
        server.sessions["s0"].ended.set()
        until(lambda: not runner.is_alive())
    runner.stop()
    assert not runner.is_alive()
    until(lambda: not any(map(alive, pids)))
    assert len(server.sessions) == 2


def test_a_rollout_waits_for_a_process_that_cannot_be_started(pool, server, monkeypatch):
    """The system allows one more: episodes follow each other, and none fails."""
    take, refusals = pool.take, []

    def only_one():
        if len(server.sessions) > len(server.results):
            refusals.append(1)
            refused_take()
        return take()

    def refused_take():
        raise UserError("no environment for another episode")

    monkeypatch.setattr(pool, "take", only_one)
    assert run(pool, server, "faults", ["number", "true"]) == [(2.0, "", {}), (1.0, "", {})]
    assert refusals


def test_a_pool_that_has_ended_fails_the_next_rollout(server):
    pool = Pool({"agent": "agent_functions:solve"}, field="environment.agent")
    runner = runner_of(pool, "agent")
    runner.close()
    refused("the process that starts agents has ended", lambda: runner.start(server, jobs(["a"])))


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("absent:solve", "ModuleNotFoundError: No module named 'absent'"),
        ("agent_functions:absent", "AttributeError: module 'agent_functions' has no attribute"),
        ("agent_functions:NO_AGENT", "TypeError: it is 7, and no function"),
        ("agent_functions:generator", "TypeError: it yields; return a reward"),
    ],
)
def test_what_is_no_agent_is_refused(path, reason):
    line = rf"environment\.agent={path}: {reason}.*returns a reward"
    refused(line, lambda: agent_runner({"agent": path}, python="", processes=1))


def test_several_agents_share_a_run(server):
    """The column that chooses among them is not one of the episode, and one needs no reward."""
    paths = {"solve": "agent_functions:solve", "faults": "agent_functions:faults"}
    runner = agent_runner(paths, python="", processes=2)
    try:
        rows = [{"question": "none", "environment": name} for name in paths]
        runner.start(server, [Job(n, n, row, 1) for n, row in enumerate(rows)])
        until(lambda: not runner.is_alive())
    finally:
        runner.close()
    assert [server.results[name][0] for name in ("s0", "s1")] == [len("s0 key0 none"), None]


def test_an_agent_may_have_another_interpreter(server, monkeypatch):
    """Of this project that one gets the modules of its processes, and no other package."""
    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path(__file__).parent))
    runner = agent_runner({"agent": "agent_functions:modules"}, python=sys.executable, processes=1)
    try:
        runner.start(server, jobs(["jax", "qerl_jax.environments.worker"]))
        until(lambda: not runner.is_alive())
    finally:
        runner.close()
    assert [server.results[name][0] for name in ("s0", "s1")] == [0.0, 1.0]


def test_another_interpreter_must_exist(tmp_path):
    def start(python):
        return Pool({"agent": "m:f"}, field="environment.agent", python=str(python))

    absent, no_python = tmp_path / "absent", tmp_path / "no_python"
    refused(r"environment\.python=.*absent: No such file", lambda: start(absent))
    no_python.write_text("#!/bin/sh\nexit 1\n")
    no_python.chmod(0o755)
    refused(r"environment\.agent: importing m:f ended the process", lambda: start(no_python))


AGENTS = {
    "environment.max_turns": 3,
    "environment.turn_tokens": 4,
    "environment.reply_tokens": 6,
    "rollout.max_new_tokens": 10,
    "data.max_prompt_tokens": 12,
    "rewards.correctness.function": "qerl_jax.rewards.functions:environment_reward",
    "rewards.format.function": "qerl_jax.rewards.functions:equation_format",
    "rewards.format.weight": 0.0,
}


@pytest.fixture(scope="module")
def talker(tmp_path_factory, compile_cache):
    """The inputs of runs, with a chat template whose turns end."""
    tiny = tiny_run.write_tiny(tmp_path_factory.mktemp("talker"), compile_cache)
    tiny_checkpoints.write_tokenizer(tiny.model, chat_template=TEMPLATE)
    return tiny


def with_numbers(path):
    """Two problems with a column `number`."""
    rows = [{"question": f"t{n} t4", "answer": "7", "number": n} for n in range(2)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_run_starts_its_agents(talker, tmp_path, capsys):
    """All problems are in the step; the sessions of one of them fail."""
    changes = {
        "environment.agent": "agent_functions:twice",
        "data.path": with_numbers(tmp_path / "problems.jsonl"),
        "eval.every": 0,
        "steps": 1,
    }
    config = talker.config(AGENTS | changes)
    before = processes()
    [row] = tiny_run.results(train(config, workdir=tmp_path / "run"))
    assert row["environment/failures"] == 4
    assert (row["agent/asked"], row["environment/rows"]) == (2.0, 2.0)
    assert "agent/odd" not in row
    assert "agent/text" not in row
    assert row["reward"] > 0
    line = "the agent failed in 4 of 8 sessions: RuntimeError: broken (agent_functions.py:"
    assert line in capsys.readouterr().err
    until(lambda: not processes() - before)
    # The prompt of the run, which the policy has not read, is not shown as one.
    shown = read_jsonl(tmp_path / "run" / "completions.jsonl")
    assert {one["prompt"] for one in shown} <= {"t0 t4", "t1 t4"}


def processes():
    """The processes that serve agents, but for those that other workers of pytest have started."""
    own = f"PYTEST_XDIST_WORKER={os.environ.get('PYTEST_XDIST_WORKER', '')}\0".encode()
    found = set()
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                serves = b"environments.worker" in (entry / "cmdline").read_bytes()
                others = b"PYTEST_XDIST_WORKER=" in (
                    environment := (entry / "environ").read_bytes()
                )
                if serves and (own in environment or not others):
                    found.add(entry.name)
    return found


def test_a_reward_that_nothing_reads_is_refused(talker, tmp_path):
    changes = {"environment.agent": "agent_functions:solve"}
    changes |= {"rewards.correctness.function": "qerl_jax.rewards.functions:whole_answer"}
    config = talker.config(AGENTS | changes)
    line = r"environment\.agent=agent_functions:solve gives rewards .*or annotate an agent"
    refused(line, lambda: dry_run(config, workdir=tmp_path / "run"))
    config.environment.agent = "agent_functions:rated"
    said = []
    dry_run(config, workdir=tmp_path / "run", write=said.append)
    assert "the first problem, whose prompt its agent writes:\n" in "".join(said)


def test_a_problem_must_name_one_of_several_agents(talker, tmp_path):
    paths = "a=agent_functions:solve, b=agent_functions:rated"
    config = talker.config(AGENTS | {"environment.agent": paths})
    line = r"environment=None; environment\.agent names a, b: correct the column"
    refused(line, lambda: dry_run(config, workdir=tmp_path / "run"))


def test_a_taskset_needs_an_interpreter(talker):
    config = talker.config({"environment.verifiers": "tasks"})
    refused(r"environment\.verifiers=tasks without environment\.python", lambda: validate(config))


def test_the_tasks_of_a_taskset_are_the_problems(talker, monkeypatch):
    rows = [{"question": f"t{n} t4", "index": n} for n in range(3)]
    monkeypatch.setattr(Taskset, "rows", lambda taskset: rows[: taskset.tasks])
    changes = {"environment.verifiers": "tasks", "environment.tasks": 2, "data.path": ""}
    config = with_problems(talker.config(changes), None)
    lines = pathlib.Path(config.data.path).read_text().splitlines()
    assert [json.loads(line) for line in lines] == rows[:2]
    own = talker.config(changes | {"data.path": "own.jsonl"})
    assert with_problems(own, None).data.path == "own.jsonl"
