"""Readers of text whose length a policy, a server, a template or a user decides.

Each reads n and 4n repetitions of each of its marks: the time of a linear reader grows by 4, that
of a quadratic one by 16.
"""

import asyncio
import contextlib
import gc
import json
import time

import pytest
from tiny_checkpoints import write_tokenizer

from qerl_jax.data.prompts import Problem, render_prompt
from qerl_jax.data.sources import Selection, read_problems
from qerl_jax.environments.replies import ReplyWriter
from qerl_jax.environments.tools import read_calls
from qerl_jax.errors import UserError, first_line, visible
from qerl_jax.evaluation.tasks import extracted_answer
from qerl_jax.rewards import functions, references
from qerl_jax.rewards.url import RewardError, UrlReward, without_keys
from qerl_jax.show.columns import shorten, wrap
from qerl_jax.show.view import read_condition
from qerl_jax.system.jsonl import read_jsonl
from qerl_jax.weights import tokenizer as tokenizer_lib

CHARACTERS = 20_000  # of the longest text
INSTANT = 0.02  # seconds of the longest text below which its growth is no matter
REWARDS = (
    functions.numeric_answer,
    functions.tagged_answer,
    functions.think_format,
    functions.equation_format,
)


def seconds(read, text):
    began = time.thread_time()  # which does not grow while other processes have the core
    read(text)
    return time.thread_time() - began


def check_linear(read, begin, mark, end):
    """Checks that the time of reading a repeated mark grows with its length and not its square."""
    count = max(4, CHARACTERS // len(mark))
    short, long = (begin + mark * n + end for n in (count // 4, count))
    gc.disable()  # After other tests a collection of garbage may take longer than the text.
    try:
        for _attempt in range(3):
            before, after = seconds(read, short), seconds(read, long)
            if after < max(INSTANT, 8 * before):
                return
    finally:
        gc.enable()
    pytest.fail(f"{begin!r} + {mark!r} * n + {end!r}: {before:.3f} s, {after:.3f} s")


# --- Calls of tools -------------------------------------------------------------------------------

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<think></think>", "[TOOL_CALLS]")
TAGS += ("<tool_call></tool_call>", "<|python_tag|>", " ", "\n", "[", "{", '"', "\\", "9", "a", ";")
XML = ("<function=", "<function=a>", "</function>", "<parameter=", "<parameter=a>", "</parameter>")
XML += ("<parameter=a>\n1\n</parameter>\n", "<function=a></function>", ">", *TAGS)
CALL = '{"name": "a", "arguments": {}}'
TOOL = {"name": "f", "parameters": {"properties": {"a": {}, "b": {"type": "string"}}}}
CALLS = [
    *(("hermes", *text) for tag in TAGS for text in (("", tag, ""), ("<tool_call>", tag, "x"))),
    ("hermes", "", f"<tool_call>{CALL}</tool_call>", ""),
    ("hermes", '<tool_call>{"name": "', "<think>", '"}</tool_call>'),
    *(("xml", "<tool_call>", tag, "</tool_call>") for tag in XML),
    *(("xml", "<tool_call><function=f>", tag, "</function></tool_call>") for tag in XML),
    *(
        ("xml", "<tool_call><function=f><parameter=a>", tag, "</parameter></function></tool_call>")
        for tag in XML
    ),
    *(
        ("xml", "<tool_call><function=f>", tag, "</parameter></function></tool_call>")
        for tag in XML
    ),
    ("xml", "", "<tool_call><function=f></function></tool_call>", ""),
    *(("mistral", "[TOOL_CALLS] ", mark, "") for mark in TAGS),
    ("mistral", "[TOOL_CALLS] [", f"{CALL}, ", f"{CALL}]"),
    *(("llama", begin, mark, "") for begin in ("", '{"name": "') for mark in TAGS),
    ("llama", "", f"{CALL}; ", ""),
    ("llama", "", f"{CALL}\n", "x"),
    ("llama", '{"name": "a"', " ", ""),
]


@pytest.mark.parametrize(("form", "begin", "mark", "end"), CALLS)
def test_calls(form, begin, mark, end):
    tools = [{"type": "function", "function": TOOL}]
    check_linear(lambda text: read_calls(text, form, tools=tools), begin, mark, end)


# --- Answers --------------------------------------------------------------------------------------

MARKS = (
    "\\boxed{", "\\boxed{1}", "\\boxed 1 ", "\\boxed1", "$\\boxed 1", "\\boxed", "\\boxed \\)",
    "\\fbox{1} ", "<think>", "</think>", "<think></think>", "<answer>", "<answer>1</answer>",
    "####", "#### 1\n", "{", "}", "{}", "$", "\\", "\\frac{", "\\frac{1", "\\frac{{}", "\\frac",
    "\\frac{1}{", "\\over ", "\\text{a}", "1,", "11,", "1,111", "1 000 ", "1 / ", "-$", "9", ".",
    "a1", "a", "a ", " ", "\n", "x =", "= ", "ab^", "1e9", "e", "and ", "\\quad", "(", "+ ", ", ",
    "\\,", "\\thinspace ", "**", "5%", "\u2212", "\u00b2", "m 1 ", "18 m^2 ", "What? ",
)  # fmt: skip
FRAMES = [("", ""), ("$", "$ 1"), ("<answer>", "</answer>"), ("\\boxed{1", "2}")]


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize(("begin", "end"), FRAMES)
def test_answers(begin, mark, end):
    def read(text):
        for reward in REWARDS:
            reward("", text, "18", 9, True)
        for scorer in ("numeric_answer", "math_answer", "other"):
            extracted_answer(text, f"qerl_jax.rewards.functions:{scorer}")
        for reward in (functions.numeric_answer, functions.math_answer):
            references.can_read(reward, text)

    check_linear(read, begin, mark, end)


# --- Chat templates and tokenizers ----------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|im_start|>", "<|im_end|>", " ", "\n", "a", " a", "9", "{{ 1 }}", "</think>", "\u0301")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """A tokenizer that splits words as that of Qwen 2.5 does."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, chat_template=TEMPLATE)
    found = tokenizer_lib.from_folder(folder)
    found.backend.pre_tokenizer = tokenizer_lib._pre_tokenizer("qwen2")
    return found


@pytest.mark.parametrize("mark", SPECIAL)
def test_prompts_and_replies(tokens, mark):
    writer = ReplyWriter(tokens, {}, calls=False)

    def read(text):
        ids = tokens.encode(render_prompt(Problem(f"t1{text}t2", "1"), tokens))
        tokens.decode(ids)
        writer.fit([text, "t3"], (), 64)

    check_linear(read, "t3", mark, "t4")


@pytest.mark.parametrize("role", ["user", "system"])
def test_prompts_of_many_messages(tokens, role):
    def read(text):
        messages = [(role, f"t{i}") for i in range(len(text))]
        render_prompt(Problem("", "1", (*messages, ("user", "t3"))), tokens)

    check_linear(read, "", "12345678", "")


# --- Files, servers and screens -------------------------------------------------------------------


@pytest.mark.parametrize("mark", ["{}\n", "1\n", "\n", "[", " ", "9", '"a"'])
def test_lines_of_json(tmp_path, mark):
    path = tmp_path / "rows.jsonl"

    def read(text):
        path.write_text(text)
        read_jsonl(path)

    check_linear(read, "{}\n", mark, "")


@pytest.mark.parametrize("mark", ["a", " ", "\n", "####", "\\boxed{1} ", "</think>", "<think>"])
def test_solutions_of_a_file(tmp_path, mark):
    path = tmp_path / "rows.jsonl"

    def read(text):
        path.write_text(json.dumps({"question": text, "solution": f"{text}\n#### 1"}))
        read_problems(str(path), Selection())

    check_linear(read, "a", mark, "")


@pytest.mark.parametrize("mark", ["a", " ", "ab ", "\n", "\t", "\x1b", "\u6f22", "\u0301"])
def test_texts_on_a_screen(mark):
    def read(text):
        wrap(visible(text), 40)
        shorten(visible(text), 40)
        first_line(ValueError(text))

    check_linear(read, "", mark, "a")


@pytest.mark.parametrize("mark", [" ", "a", " a", "<", " =", "\n", "1", " 1"])
@pytest.mark.parametrize("begin", ["", "a", "a<"])
def test_conditions_of_a_command_line(begin, mark):
    def read(text):
        with contextlib.suppress(UserError):
            read_condition(text, [])

    check_linear(read, begin, mark, " x")


@pytest.mark.parametrize("mark", ["://", "a", "?a=b", "&key=", "@", "/", "%41", "://a@"])
def test_secrets_of_a_command_line(mark):
    check_linear(without_keys, "http://", mark, "")


class Body:
    """A client, and the answer of its server in chunks of one byte."""

    status_code = 200

    def __init__(self, text):
        self.parts = [character.encode() for character in text]

    def stream(self, *_, **__):
        return self

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass

    async def aiter_bytes(self):
        for part in self.parts:
            yield part


@pytest.mark.parametrize("mark", [" ", "[", "9", "1,", '"'])
@pytest.mark.parametrize("status", [200, 400, 503])
def test_answers_of_a_server(monkeypatch, mark, status):
    reward = UrlReward("http://127.0.0.1:1/", retries=0)
    monkeypatch.setattr(Body, "status_code", status)

    def read(text):
        monkeypatch.setattr("httpx2.AsyncClient", lambda **_: Body(text))
        with contextlib.suppress(RewardError):
            asyncio.run(reward(["p"], ["c"], ["a"], [1], [True]))

    check_linear(read, "[", mark, "1]")
