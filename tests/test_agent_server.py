"""The server of agents: both routes, what requests join, and clients that behave badly."""

import concurrent.futures
import contextlib
import http.client
import json
import random
import socket
import threading
import time
import urllib.request

import agent_cases
import pytest
from agent_cases import errors_of, post
from recorded_conversations import FORMATS, RECORDED, tokenizer_of

from qerl_jax.environments import agent_server
from qerl_jax.environments.agent_server import AgentServer
from qerl_jax.environments.chat import ChatWriter
from qerl_jax.environments.gateway import MOST_ROWS, ClosedError, Gateway
from qerl_jax.environments.roles import FAILURE
from qerl_jax.errors import UserError

FAMILY = "qwen2_5"


class Engine(agent_cases.Engine):
    """That of a family of templates."""

    def __init__(self, family=FAMILY, jobs=1, **options):
        tokenizer = tokenizer_of(family)
        writer = ChatWriter(tokenizer, tokenizer, {}, FORMATS[family])
        super().__init__(tokenizer, writer, jobs, **options)


def chat(session, messages, headers=(), **body):
    url = f"{session.base_url}/chat/completions"
    return post(url, {"model": "policy", "messages": messages} | body, session.key, headers)


def generate(session, ids, headers=(), **sampling):
    url = f"{session.root_url}/inference/v1/generate"
    return post(url, {"token_ids": ids, "sampling_params": sampling}, session.key, headers)


def user(text):
    return {"role": "user", "content": text}


def refused(answer, status, part):
    """Checks the form of an error of OpenAI."""
    code, body = answer
    assert code == status, body
    assert part in body["error"]["message"], body
    assert set(body["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("family", FORMATS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_with_tools_has_the_ids_and_masks_of_trl(family, stream):
    case, texts = RECORDED["families"][family], list(RECORDED["families"][family]["turns"])
    with Engine(family) as engine:
        engine.answer = lambda ids: engine.ids(texts.pop(0))
        session, messages = engine.open(), list(RECORDED["prompt"])
        reason = ""
        while reason != "stop":
            code, answer = chat(session, messages, tools=RECORDED["tools"], stream=stream)
            assert code == 200
            message, reason = (from_events if stream else from_json)(answer)
            messages.append(message)
            for call in message.get("tool_calls", []):
                content = result_of(call["function"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        assert engine.server.close(session.id, reward=0.5)
        (record,) = engine.gateway.records()
        ((row, end),) = record.trained_rows()
    prompt = len(case["prompt_ids"])
    assert row.ids[:prompt] == case["prompt_ids"]
    assert row.ids[prompt:end] == case["completion_ids"]
    mask = [0] * end
    for turn in row.turns:
        mask[turn.start : turn.end] = [1] * len(turn.ids)
    assert mask[prompt:] == case["mask"]
    assert record.reward == 0.5


def result_of(function):
    """What the calculator of the recorded conversations says."""
    values = json.loads(function["arguments"])
    if function["name"] != "add":
        return "{'error': 'Tool mul not found.'}"
    if set(values) != {"a", "b"}:
        error = "Calculator.add() got an unexpected keyword argument 'c'"
        return str({"error": error})
    return str(values["a"] + values["b"])


def from_json(answer):
    choice = answer["choices"][0]
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return choice["message"], choice["finish_reason"]


def from_events(text):
    events = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    assert events.pop() == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events]
    message = {k: v for choice in choices for k, v in choice["delta"].items()}
    for number, call in enumerate(message.get("tool_calls", [])):
        assert call.pop("index") == number
    return message, choices[-1]["finish_reason"]


def test_the_token_route_answers_as_vllm_does():
    with Engine() as engine:
        session = engine.open()
        code, answer = generate(session, [1, 2, 3], temperature=1.0, logprobs=1)
        (choice,) = answer["choices"]
        assert code == 200
        ids = engine.ids("fine")
        assert choice["token_ids"] == ids
        assert choice["finish_reason"] == "stop"
        content = choice["logprobs"]["content"]
        assert [one["token"] for one in content] == [f"token_id:{i}" for i in ids]
        assert [one["logprob"] for one in content] == [-0.5 - i for i in range(len(ids))]
        longer = [1, 2, 3, *ids, 4]
        _, answer = generate(session, longer, max_tokens=2, stop_token_ids=[engine.end])
        assert answer["choices"][0]["token_ids"] == ids[:2]
        assert answer["choices"][0]["finish_reason"] == "length"
        generate(session, [9, 9])
        assert [request.row for request in engine.asked] == [0, 0, 1]
        models = f"{session.root_url}/v1/models"
        listed = urllib.request.Request(models, headers={"Authorization": f"Bearer {session.key}"})
        with urllib.request.urlopen(listed) as answered:
            (model,) = json.loads(answered.read())["data"]
        assert (model["id"], model["max_model_len"]) == ("policy", 4000)
        # Under the path of the session there are the same routes.
        root = f"{session.root_url}/sessions/{session.id}/inference/v1/generate"
        assert post(root, {"token_ids": [7, 7]}, session.key)[0] == 200


def test_the_chat_route_has_token_ids_where_they_are_asked_for():
    with Engine() as engine:
        session = engine.open()
        messages = [user("hello")]
        _, answer = chat(session, messages, return_token_ids=True, logprobs=True, max_tokens=3)
        (choice,) = answer["choices"]
        (request,) = engine.asked
        assert answer["prompt_token_ids"] == request.ids
        assert choice["token_ids"] == engine.ids("fine")[:3]
        assert len(choice["logprobs"]["content"]) == 3
        assert choice["finish_reason"] == "length"
        # A turn that was cut gets its end before what follows it.
        messages += [choice["message"], user("and now?")]
        assert chat(session, messages)[0] == 200
        assert engine.asked[1].row == 0
        assert engine.asked[1].ids[0] == engine.end
        _, plain = chat(session, [user("other")])
        assert "prompt_token_ids" not in plain


def test_messages_are_the_same_whatever_clients_add_or_drop():
    with Engine() as engine:
        engine.answer = lambda ids: engine.ids("  padded ")
        session = engine.open()
        chat(session, [user("hello")])
        parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
        mine = {"role": "assistant", "content": "padded", "refusal": None, "reasoning": "x"}
        chat(session, [{"role": "user", "content": parts}, mine, user("more")])
        assert [request.row for request in engine.asked] == [0, 0]
        rewritten = mine | {"content": "something else"}
        chat(session, [user("hello"), rewritten, user("more")])
        assert engine.asked[2].row == 1


def test_other_tools_or_a_rewritten_history_begin_a_row():
    with Engine() as engine:
        session, tools = engine.open(), RECORDED["tools"]
        _, answer = chat(session, [user("hello")], tools=tools)
        history = [user("hello"), answer["choices"][0]["message"]]
        chat(session, [*history, user("more")])
        chat(session, [user("summary"), user("more")], tools=tools)
        chat(session, [*history, user("more")], tools=tools)
        assert [request.row for request in engine.asked] == [0, 1, 2, 0]
        engine.server.close(session.id, 1.0)
        (record,) = engine.gateway.records()
        assert [row.root for row, _ in record.trained_rows()] == [0, 1, 2]


def test_retries_join_or_get_the_same_answer():
    with Engine() as engine:
        release = threading.Event()
        engine.answer = lambda ids: release.wait(20) and engine.ids(f"number {len(engine.asked)}")
        session = engine.open()
        with concurrent.futures.ThreadPoolExecutor(20) as pool:
            storm = [pool.submit(generate, session, [1, 2]) for _ in range(20)]
            time.sleep(0.3)
            release.set()
            answers = [one.result() for one in storm]
        assert len(engine.asked) == 1
        assert all(answer == answers[0] for answer in answers)
        marked = {"x-stainless-retry-count": "1"}
        assert generate(session, [1, 2], marked) == answers[0]
        assert len(engine.asked) == 1
        # Not marked it is another answer to the same prompt: the one that is continued trains.
        first = answers[0][1]["choices"][0]["token_ids"]
        _, other = generate(session, [1, 2])
        assert other["choices"][0]["token_ids"] != first
        generate(session, [1, 2, *first, 3])
        engine.server.close(session.id, 1.0)
        (record,) = engine.gateway.records()
        assert [row.root for row, _ in record.trained_rows()] == [0]
        assert record.joined == 20


def test_of_two_answers_the_last_one_trains_and_a_fork_trains_each_turn_once():
    with Engine() as engine:
        engine.answer = lambda ids: engine.ids(f"number {len(engine.asked)}")
        session = engine.open()
        _, first = generate(session, [1, 2])
        ids = [1, 2, *first["choices"][0]["token_ids"]]
        generate(session, [*ids, 5])
        generate(session, [*ids, 5])
        generate(session, [*ids, 6])
        engine.server.close(session.id, 1.0)
        (record,) = engine.gateway.records()
        rows = record.trained_rows()
    # Row 0 has its first turn alone: its second one lost against its sibling, row 1.
    assert [(row.root, end) for row, end in rows] == [
        (0, len(ids)),
        (1, rows[1][0].turns[0].end),
        (2, rows[2][0].turns[0].end),
    ]
    assert [len(row.turns) for row, _ in rows] == [2, 1, 1]


def test_an_answer_that_no_client_got_is_kept_for_the_next_one():
    with Engine() as engine:
        release = threading.Event()
        engine.answer = lambda ids: release.wait(20) and engine.ids("late")
        session = engine.open()
        connection = http.client.HTTPConnection(session.root_url.removeprefix("http://"))
        headers = {"Authorization": f"Bearer {session.key}"}
        connection.request("POST", "/inference/v1/generate", '{"token_ids": [1, 2]}', headers)
        while not engine.asked:
            time.sleep(0.01)
        connection.close()
        time.sleep(0.2)
        release.set()
        time.sleep(0.3)
        code, answer = generate(session, [1, 2])
        assert code == 200
        assert answer["choices"][0]["token_ids"] == engine.ids("late")
        assert len(engine.asked) == 1


def tool(**function):
    return {"type": "function", "function": {"name": "f"} | function}


BAD_CHATS = {
    "two answers": ({"n": 2}, "n=2"),
    "stop": ({"stop": ["x"]}, "stop="),
    "a forced tool": ({"tool_choice": "required"}, "tool_choice="),
    "json": ({"response_format": {"type": "json_object"}}, "response_format="),
    "max_tokens 0": ({"max_tokens": 0}, "max_tokens=0"),
    "max_tokens text": ({"max_tokens": "7"}, "max_tokens='7'"),
    "no messages": ({"messages": []}, "messages"),
    "text for messages": ({"messages": "hello"}, "messages"),
    "a role": ({"messages": [{"role": "robot", "content": "x"}]}, "role is 'robot'"),
    "no role": ({"messages": [{"content": "x"}]}, "role is None"),
    "a number": ({"messages": [{"role": "user", "content": 7}]}, "content"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "no text",
    ),
    "a call": (
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
        "tool_calls",
    ),
    "calls": ({"messages": [{"role": "assistant", "tool_calls": 7}]}, "tool_calls"),
    "tools": ({"tools": [{"name": "f"}]}, "tools"),
    "text for tools": ({"tools": "f"}, "tools"),
    "a text for a schema": ({"tools": [tool(parameters="x")]}, "f.parameters"),
    "a schema without properties": ({"tools": [tool(parameters={"properties": None})]}, "f.param"),
    "options of a stream": ({"stream": True, "stream_options": [1]}, "stream_options=[1]"),
    "a long text": ({"messages": [user("x" * 5000)]}, "maximum context length is 4000"),
    "a megabyte": ({"messages": [user("x" * 1_000_000)]}, "maximum context length is 4000"),
}


def test_bad_requests_are_refused_and_the_session_continues():
    with Engine() as engine:
        session = engine.open()
        for name, (body, part) in BAD_CHATS.items():
            refused(chat(session, **({"messages": [user("hello")]} | body)), 400, part), name
        for ids in ("abc", None, [1.5], [True], [[1]], {}):
            refused(generate(session, ids), 400, "token_ids")
        refused(generate(session, []), 400, "0 tokens")
        refused(generate(session, [1]), 400, "1 tokens")
        refused(generate(session, [1, 300]), 400, "300")
        refused(generate(session, [1, -1]), 400, "-1")
        refused(generate(session, [1, 1 << 40]), 400, str(1 << 40))
        refused(generate(session, [1] * 4000), 400, "maximum context length is 4000")
        refused(generate(session, [1, 2], n=2), 400, "n=2")
        refused(generate(session, [1, 2], stop_token_ids=[7]), 400, "stop_token_ids=[7]")
        url = f"{session.base_url}/chat/completions"
        for data in (b"", b"{", b"[]", b"7", b"\xff", b'"' + b"[" * 100_000, b"[" * 100_000):
            refused(post(url, data, session.key), 400, "JSON")
        surrogate = b'{"messages": [{"role": "user", "content": "\\ud800"}]}'
        refused(post(url, surrogate, session.key), 400, "JSON")
        refused(post(f"{session.root_url}/v1/completions", {}, session.key), 404, "/v1/completions")
        refused(post(f"{session.root_url}/v1/models", {}, session.key), 405, "/v1/models")
        assert not engine.asked
        assert chat(session, [user("hello")])[0] == 200


def test_only_its_key_opens_a_session():
    with Engine(jobs=2) as engine:
        session, other = engine.open(0), engine.open(1)
        url = f"{session.base_url}/chat/completions"
        for key in ("", "x", "é".encode().decode("latin-1"), session.id):
            refused(post(url, {"messages": [user("hello")]}, key), 401, "Incorrect API key")
        refused(post(url, {"messages": [user("hello")]}, other.key), 401, "not that of the session")
        unknown = url.replace(session.id, "0" * 16)
        refused(post(unknown, {"messages": [user("hello")]}, session.key), 401, "0" * 16)
        root = f"{session.root_url}/v1/chat/completions"
        assert post(root, {"messages": [user("hello")]}, other.key)[0] == 200
        assert engine.gateway.records()[1].answers == 1


def test_a_session_that_is_closed_refuses_and_answers_those_that_wait():
    with Engine(jobs=2, answer=lambda ids: None) as engine:
        session = engine.open()
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            waiting = [pool.submit(generate, session, [1, i]) for i in range(4)]
            while len(engine.asked) < 4:
                time.sleep(0.01)
            assert engine.server.close(session.id, error="the agent has failed")
            for one in waiting:
                refused(one.result(), 409, "the agent has failed")
        assert session.ended.is_set()
        assert not engine.server.close(session.id, reward=1.0)
        refused(generate(session, [1, 2]), 409, "has ended")
        refused(chat(session, [user("hello")]), 409, "has ended")
        while len(engine.ended) < 4:
            time.sleep(0.01)
        assert {reply.ending for reply in engine.ended} == {FAILURE}
        assert errors_of(engine.gateway)["the agent has failed"] == 1
        with pytest.raises(ClosedError):
            engine.open()
        empty = engine.open(1)
        assert engine.server.close(empty.id, reward=1.0)
        assert engine.gateway.records()[1].error.startswith("it returned without a request")


def test_a_session_that_nobody_closes_ends_by_its_time_limit():
    with Engine(jobs=2, answer=lambda ids: None, seconds=0.5) as engine:
        session = engine.open()
        refused(generate(session, [1, 2]), 409, "environment.session_time_limit of 0.5 s")
        assert session.ended.wait(1)
        assert engine.part.is_open  # The other job has no session yet.
        engine.gateway.fail_all("what runs the agents has ended")
        engine.thread.join(timeout=10)
        assert [record.ending for record in engine.gateway.records()] == [FAILURE, FAILURE]


def test_limits_on_sampled_tokens_and_rows_are_errors():
    with Engine(max_new_tokens=8, turn_tokens=5) as engine:
        engine.answer = lambda ids: engine.ids("aaaaaaaaaaaaaaaa")
        session = engine.open()
        ids = [1, 2]
        for count in (5, 3):
            _, answer = generate(session, ids)
            new = answer["choices"][0]["token_ids"]
            assert len(new) == count
            ids += [*new, 4]
        refused(generate(session, ids), 400, "the 8 sampled tokens of rollout.max_new_tokens")
        for number in range(MOST_ROWS - 1):
            assert generate(session, [3, number])[0] == 200
        refused(generate(session, [3, 299]), 429, "conversations")


def test_half_a_request_and_a_hundred_megabytes(monkeypatch):
    monkeypatch.setattr(agent_server, "_BODY_SECONDS", 0.5)
    with Engine() as engine:
        session = engine.open()
        host, port = session.root_url.removeprefix("http://").split(":")
        head = (
            f"POST /inference/v1/generate HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
            f"{session.key}\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
        ).encode()
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head + b'{"token_ids": [1')
            assert b"408" in connection.recv(4096).split(b"\r\n")[0]
        for data in (b"", b"nonsense\r\n\r\n", head[:40], head, head + b"{"):
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(data)
        monkeypatch.setattr(agent_server, "_BODY_SECONDS", 30.0)
        connection = http.client.HTTPConnection(host, int(port), timeout=60)
        chunks = (b"x" * (1 << 20) for _ in range(100))
        headers = {"Authorization": f"Bearer {session.key}"}
        connection.request("POST", "/inference/v1/generate", chunks, headers, encode_chunked=True)
        answer = connection.getresponse()
        refused((answer.status, json.loads(answer.read())), 413, "104857600 bytes")
        connection.close()
        assert generate(session, [1, 2])[0] == 200


@pytest.mark.parametrize("sent", [b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"])
def test_a_connection_without_a_request_is_closed(monkeypatch, sent):
    """Also one that was kept after an answer, or whose head arrives byte by byte."""
    monkeypatch.setattr(agent_server, "_HEAD_SECONDS", 0.4)
    with Engine() as engine:
        session = engine.open()
        host, port = session.root_url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            began = time.monotonic()
            for byte in sent[:3]:
                connection.sendall(bytes([byte]))
                time.sleep(0.15)
            answer = connection.recv(4096)
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert json.loads(answer.split(b"\r\n\r\n")[1])["error"]["code"]
            assert connection.recv(10) == b""
            assert 0.3 < time.monotonic() - began < 10
        connection = http.client.HTTPConnection(host, int(port), timeout=20)
        for _ in range(2):
            headers = {"Authorization": f"Bearer {session.key}"}
            connection.request("GET", "/v1/models", headers=headers)
            assert connection.getresponse().read()
        connection.sock.sendall(sent)
        assert connection.sock.recv(4096).startswith(b"HTTP/1.1 408 ")
        connection.close()
        assert generate(session, [1, 2])[0] == 200


def test_connections_leave_files_for_the_run(monkeypatch):
    """Those that are too many are refused, and those that are open are served."""
    monkeypatch.setattr(agent_server.resource, "getrlimit", lambda _: (8, 8))
    with Engine() as engine, contextlib.ExitStack() as stack:
        session = engine.open()
        host, port = session.root_url.removeprefix("http://").split(":")
        connections = [
            stack.enter_context(socket.create_connection((host, int(port)), timeout=20))
            for _ in range(6)
        ]
        for connection in connections[4:]:
            assert connection.recv(4096).startswith(b"HTTP/1.1 503 ")
            assert connection.recv(10) == b""
        for connection in connections[:4]:
            connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 401 ")
        connections[0].close()
        assert generate(session, [1, 2])[0] == 200


@pytest.mark.slow
def test_a_thousand_sessions():
    with Engine(jobs=1000) as engine:

        def episode(number):
            session = engine.open(number)
            ids = [1, 2 + number % 200]
            for _ in range(2):
                code, answer = generate(session, ids)
                assert code == 200, answer
                ids += [*answer["choices"][0]["token_ids"], 3]
            return engine.server.close(session.id, reward=float(number))

        with concurrent.futures.ThreadPoolExecutor(32) as pool:
            assert all(pool.map(episode, range(1000)))
        engine.thread.join(timeout=20)
        records = engine.gateway.records()
        assert [record.reward for record in records] == list(range(1000))
        assert all(len(record.trained_rows()) == 1 for record in records)
        assert len(engine.ended) == 1000


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(agent_server.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'qerl-jax\[agents\]'"):
        AgentServer(Gateway(), ChatWriter(tokenizer_of(FAMILY), tokenizer_of(FAMILY), {}, ""))


def test_a_template_that_changes_earlier_turns_begins_a_row_for_each_turn():
    with Engine("qwen3") as engine:
        session, messages = engine.open(), [user("hello")]
        for _ in range(2):
            _, answer = chat(session, messages)
            messages += [answer["choices"][0]["message"], user("more")]
        assert [request.row for request in engine.asked] == [0, 1]
        assert engine.server.close(session.id, 1.0)
        (record,) = engine.gateway.records()
        assert len(record.trained_rows()) == 2


@pytest.mark.parametrize("seed", range(3))
def test_random_requests_keep_the_record_whole(seed):
    """Continued, forked, repeated and new prompts: each sampled token trains once at most."""
    rng = random.Random(seed)
    with Engine(answer=lambda ids: [rng.randrange(3) for _ in range(rng.randint(1, 3))]) as engine:
        session = engine.open()
        known = [[1, 2]]
        for _ in range(120):
            ids = list(rng.choice(known))
            cut = rng.randint(2, len(ids)) if rng.random() < 0.3 else len(ids)
            ids = ids[:cut] + [rng.randrange(3) for _ in range(rng.randint(0, 2))]
            headers = {"x-stainless-retry-count": str(rng.randint(0, 1))}
            status, answer = generate(session, ids, headers)
            if status == 429:
                break
            assert status == 200, answer
            known.append([*ids, *answer["choices"][0]["token_ids"]])
        engine.server.close(session.id, 1.0)
        (record,) = engine.gateway.records()
        rows = record.trained_rows()
    sampled = [turn for row, end in rows for turn in row.turns if turn.order and turn.end <= end]
    assert len({id(turn) for turn in sampled}) == len(sampled) <= record.answers
    for row, end in rows:
        position = 0
        for turn in row.turns:
            assert position <= turn.start
            assert row.ids[turn.start : turn.end] == turn.ids
            position = turn.end
        assert end == max(turn.end for turn in row.turns if turn.end <= end)
    # What an agent continued trains, and so does one answer to every prompt.
    assert {turn.key for turn in sampled} == {turn.key for turn in record.asked}
    assert {id(turn) for turn in record.asked if turn.extended} <= {id(turn) for turn in sampled}
