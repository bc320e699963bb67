"""Problems from files, generators and the hub, their order, and their prompts."""

import dataclasses
import datetime
import decimal
import functools
import hashlib
import json
import os
import re
import sys
import types

import ml_collections
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import reasoning_gym
from problem_sets import load_problems, load_splits
from refusal import refused

from qerl_jax.config.experiments.grpo_gsm8k import get_config
from qerl_jax.data import sources as problem_sources
from qerl_jax.data import splits
from qerl_jax.data.prompts import Problem, PromptConfig, encode_prompts, render_prompt
from qerl_jax.data.sources import text_of
from qerl_jax.errors import UserError
from qerl_jax.rewards import answers, functions
from qerl_jax.rewards.answers import answer_part, last_marked
from qerl_jax.rewards.calls import Timed
from qerl_jax.rewards.functions import math_answer

CHAIN_SUM = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


class WordTokenizer:
    """A tokenizer with one token for each word."""

    def apply_chat_template(self, messages, *, add_generation_prompt=True):
        text = " ".join(f"<{message['role']}> {message['content']}" for message in messages)
        return text + " <assistant>" * add_generation_prompt

    def check_kept(self, messages, text):
        assert all(message["content"] in text for message in messages)

    def encode(self, text):
        return [len(word) for word in text.split()]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def numbered(count):
    return [Problem(f"q{i}", str(i)) for i in range(count)]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"question": "q", "answer": "48/2 = 24\n#### 72"}, Problem("q", "72")),
        ({"question": "q", "answer": "#### 1,000 "}, Problem("q", "1000")),
        ({"question": "q", "answer": "#### -3"}, Problem("q", "-3")),
        ({"question": "q", "answer": "a = 1,000\n\n#### $2,000.5\n"}, Problem("q", "$2000.5")),
        ({"question": "q", "solution": "Add. So it is.\n####7"}, Problem("q", "7")),
        # Only the form of GSM8K is read so; every other answer stays as it is.
        ({"question": "q", "answer": "#### Title\nf(1,000)"}, None),
        ({"question": "q", "answer": "x = 1  #### first, then 2"}, None),
        ({"question": "q", "answer": "a, b #### 7"}, None),
        ({"question": "q", "answer": "#### 5,000 and 6"}, None),
        ({"question": "q", "answer": "##### 5"}, None),
        ({"question": "q", "answer": "(1,2)"}, None),
        ({"problem": "q", "answer": r"\left( 3, \frac{\pi}{2} \right)"}, None),
        ({"problem": "q", "answer": " 025 ", "level": 5}, Problem("q", "025")),
        ({"problem": "q", "solution": r"so \boxed{7}"}, Problem("q", "7")),
        ({"problem": "q", "solution": r"<think>\boxed{6}</think> So 7"}, Problem("q", "So 7")),
        ({"prompt": "q", "solution": "42"}, Problem("q", "42")),
        ({"problem": "q", "solution": r"\boxed{7}", "answer": "8"}, Problem("q", "8")),
        ({"question": "q", "answer": r"\boxed{7}"}, None),
        ({"question": "q", "answer": r"Either \boxed{3} or \boxed{4}"}, None),
        ({"question": "q", "answer": 18}, Problem("q", "18")),
        ({"question": "a\u2028b \u00e9", "answer": "1"}, Problem("a\u2028b \u00e9", "1")),
    ],
)
def test_jsonl_rows(tmp_path, row, problem):
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(row, ensure_ascii=False) + "\n\n", encoding="utf-8-sig")
    expected = problem or Problem("q", row["answer"])
    for fields in ({}, get_config().data.fields.to_dict()):  # absent, and '' as in a config
        assert load_problems("openai/gsm8k", path=str(path), fields=fields) == [expected]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "train.jsonl: no problems: the file is empty"),
        (b"\n \n", "train.jsonl: no problems: the file is empty"),
        (b'{"question": "q", "answer": "1"}\n{"question": ', "train.jsonl:2: not a JSON object"),
        (b'{"question": "\xff", "answer": "1"}', "train.jsonl:1: not a JSON object in UTF-8"),
        (b"[" * 100_000, "train.jsonl:1: not a JSON object"),
        (b"[1]", "train.jsonl:1: a JSON object is needed, not list"),
        (b'{"answer": "1"}', "train.jsonl:1: no field question or problem or prompt; it has answ"),
        (
            b'{"question": "q"}',
            "train.jsonl:1: no field answer or solution; it has question: name it, "
            "--config.data.fields.answer=NAME, which the reward math_answer reads, or pass a "
            "reward that reads none",
        ),
        (b"{}", "it has none"),
        (b'{"question": "q", "answer": null}', "train.jsonl:1: answer must be a string, not None"),
        (b'{"question": "q", "answer": true}', "train.jsonl:1: answer must be a string, not True"),
        (
            b'{"question": "q", "answer": NaN}',
            "train.jsonl:1: answer must be a string, not nan: wr",
        ),
        (
            b'{"question": "q", "answer": -1e999}',
            "train.jsonl:1: answer must be a string, not -inf",
        ),
        (
            b'{"question": Infinity, "answer": 1}',
            "train.jsonl:1: question must be a string, not inf",
        ),
        (
            b'{"question": "t3 \\ud83d", "answer": "1"}',
            r"train.jsonl:1: question: not valid Unicode: character 4 is the lone surrogate \ud83d",
        ),
        (
            b'{"question": "q", "answer": "1"}\n{"question": "q", "answer": "\\udfff"}',
            r"train.jsonl:2: answer: not valid Unicode: character 1 is the lone surrogate \udfff;",
        ),
        (b'{"question": " ", "answer": "1"}', "train.jsonl:1: the question is empty"),
        (
            b'{"question": "q", "answer": ""}',
            "train.jsonl: no problems for train: left out 1 with an empty answer (remedy: fill "
            "them in, or name their column as data.fields.answer; the reward math_answer reads "
            "them)",
        ),
    ],
)
def test_bad_jsonl_names_file_and_line(tmp_path, content, message):
    path = tmp_path / "train.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=re.escape(message)) as error:
        load_problems("openai/gsm8k", path=str(path))
    assert "\n" not in str(error.value)


ROWS = [
    {"question": f"q{i}", "answer": f"so\n#### {i}", "tests": [i], "meta": {"gold": f"g{i}"}}
    for i in range(3)
]


def write_json(path):
    path.write_text(json.dumps(ROWS, indent=2), encoding="utf-8-sig")


def write_parquet(path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)


@pytest.mark.parametrize(
    ("name", "save"),
    [("a.json", write_json), ("a.parquet", write_parquet), ("a.jsonl", lambda p: write(p, ROWS))],
)
def test_local_files_keep_the_columns_of_a_row(tmp_path, name, save):
    save(tmp_path / name)
    problems = load_problems("", path=str(tmp_path / name))
    assert problems == numbered(3)
    assert [problem.columns for problem in problems] == ROWS


def test_a_folder_is_read_by_the_names_of_its_files(tmp_path):
    for name, rows in (("train-2.jsonl", ROWS[:1]), ("train-1.jsonl", ROWS[1:2]), ("notes.md", [])):
        write(tmp_path / name, rows)
    assert load_problems("", path=str(tmp_path)) == [Problem("q1", "1"), Problem("q0", "0")]
    write(tmp_path / "test-1.jsonl", ROWS[2:])
    train, test = load_splits("", path=str(tmp_path), eval_path=str(tmp_path), eval_size=5)
    assert (train, test) == ([Problem("q1", "1"), Problem("q0", "0")], [Problem("q2", "2")])
    (tmp_path / "inner").mkdir()
    with pytest.raises(UserError, match=r"no file of problems for train .*the folder has no files"):
        load_problems("", path=str(tmp_path / "inner"))


def test_a_split_is_no_other_one_whose_name_begins_alike(tmp_path):
    for name in ("train", "train_1M", "test", "test_hard", "train-math"):
        write(tmp_path / f"{name}-00000-of-00001.jsonl", [{"question": f"{name}?", "answer": "1"}])
    read = lambda split: [  # noqa: E731
        p.question for p in load_problems("", path=str(tmp_path), train_split=split)
    ]
    for name in ("train", "train_1M", "test", "test_hard", "train-math"):
        assert read(name) == [f"{name}?"]
    (found,) = load_problems("", eval_path=str(tmp_path), split="eval", eval_size=9)
    assert found.question == "test?"
    with pytest.raises(UserError, match=r"no file of problems for tr .* named tr or tr-00000-of-"):
        read("tr")
    (tmp_path / "train-00000-of-00001.jsonl").unlink()
    with pytest.raises(UserError, match=r"no file of problems for train .*train_1M-00000"):
        read("train")


@pytest.mark.parametrize(
    "name",
    [
        "train.jsonl",
        "train-3.jsonl",
        "train-00000-of-00002.jsonl",
        "train-00000-of-00002-0123456789abcdef.jsonl",
    ],
)
def test_the_names_of_the_parts_of_a_split(tmp_path, name):
    write(tmp_path / name, ROWS[:1])
    write(tmp_path / "train_1M.jsonl", ROWS[1:])
    assert load_problems("", path=str(tmp_path)) == [Problem("q0", "0")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b"[{}, 1]", "a.json:2: a JSON object is needed, not int"),
        ("a.json", b'[{"question": ', "a.json: not a JSON object in UTF-8"),
        ("a.csv", b"question,answer\nq,1\n", "(char 0); problems are one object on a line, an"),
        ("a.json", b'{\n  "question": "q"\n}', "(char 1); problems are one object on a line, an"),
        ("a.json", b"[]", "a.json: no problems: the file is empty"),
        ("a.parquet", b"PAR1", "a.parquet: not a parquet file"),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=re.escape(message)):
        load_problems("", path=str(tmp_path / name))


@pytest.mark.parametrize(
    ("rows", "length", "message"),
    [
        (200_000, 20, "a.parquet: its header names 200000 rows in [0-9]{4} bytes"),
        (2_000, 50_000, "a.parquet: its [0-9]{5} bytes unpack to more than [0-9]{7}"),
    ],
)
def test_a_table_that_unpacks_to_far_more_than_its_file_is_refused(
    rows, length, message, tmp_path, monkeypatch
):
    """Such as rows that share one text, which the file stores once."""
    monkeypatch.setattr(problem_sources, "_LARGEST_TABLE", 0)
    text = np.random.default_rng(0).bytes(length // 2).hex()
    shared = pyarrow.DictionaryArray.from_arrays(np.zeros(rows, np.int32), [text])
    table = pyarrow.table({"question": shared, "answer": ["1"] * rows})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    refused(message, load_problems, "", path=str(tmp_path / "a.parquet"))
    pyarrow.parquet.write_table(table.slice(0, 10), tmp_path / "b.parquet")
    assert len(load_problems("", path=str(tmp_path / "b.parquet"))) == 10


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "/dev/zero"])
def test_what_is_no_file_is_not_read(tmp_path, name):
    """A pipe would be waited for, and a device has no end."""
    path = tmp_path / name  # `/dev/zero` as it is
    if not path.exists():
        os.mkfifo(path)
    for given in {str(path), str(path.parent)} - {"/dev"}:
        with pytest.raises(UserError, match=r"is a (named pipe|device), not a file"):
            load_problems("", path=given)


@pytest.mark.parametrize("path", ["a\0b.jsonl", "\ud800.jsonl", f"{'x' * 300}.jsonl"])
def test_what_is_no_path_is_named(path):
    with pytest.raises(UserError, match=r"cannot be a path"):
        load_problems("", path=path)


def test_the_name_of_a_file_cannot_write_to_the_terminal(tmp_path, capsys):
    rows = '{"question": "a", "answer": ""}\n{"question": "b", "answer": "1"}\n'
    (tmp_path / "a\x1b[2J.jsonl").write_text(rows)
    load_problems("", path=str(tmp_path / "a\x1b[2J.jsonl"), split="train")
    said = capsys.readouterr().out
    assert r"a\x1b[2J.jsonl:1" in said
    assert "\x1b" not in said


def test_rows_may_name_their_fields(tmp_path):
    path = write(tmp_path / "a.jsonl", [row | {"hard": 3 - row["tests"][0]} for row in ROWS])
    fields = {"question": "question", "answer": "meta.gold", "level": "hard"}
    found = load_problems("", path=path, fields=fields, levels=(2, 3))
    assert found == [Problem("q0", "g0"), Problem("q1", "g1")]
    with pytest.raises(UserError, match=r"no field meta.lost \(data.fields.answer\); it has quest"):
        load_problems("", path=path, fields={"answer": "meta.lost"})
    # Of a solution its box is the answer, and any other field is an answer as it stands.
    text = r"Add. So \boxed{7} it is."
    path = write(tmp_path / "b.jsonl", [{"question": "q", "gold": text, "solution": text}])
    for name, answer in (("gold", text), ("solution", "7")):
        (problem,) = load_problems("", path=path, fields={"answer": name}, rewards=[])
        assert problem.answer == answer


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "3 + 4?"},
    {"role": "assistant", "content": "7"},
    {"role": "user", "content": "And 1 more?"},
]


def test_a_prompt_may_be_a_chat(tmp_path):
    rows = [{"prompt": CHAT, "answer": "8"}, {"prompt": CHAT[1:2], "answer": "7"}]
    chat, single = load_problems("", path=write(tmp_path / "a.jsonl", rows))
    assert single == Problem("3 + 4?", "7")
    assert chat.messages == tuple((m["role"], m["content"]) for m in CHAT)
    assert chat.question == "system: Be brief.\nuser: 3 + 4?\nassistant: 7\nuser: And 1 more?"
    assert render_prompt(chat, WordTokenizer(), PromptConfig(question_suffix=" Go.")) == (
        "<system> Be brief. <user> 3 + 4? <assistant> 7 <user> And 1 more? Go. <assistant>"
    )
    thinking = PromptConfig(system_prompt="Think.")
    with pytest.raises(UserError, match=r"system message of its own.*--config.data.system_prompt="):
        render_prompt(chat, WordTokenizer(), thinking)
    assert render_prompt(single, WordTokenizer(), thinking).startswith("<system")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "the last message must be the user's"),
        (CHAT[:3], "the last message must be the user's.*: leave out the messages after it"),
        (["hi"], "message 1 is 'hi'"),
        ([{"role": "tool", "content": "x"}], "role of system, user, assistant"),
        (
            [{"role": "user", "content": [{"type": "image"}]}],
            "the content of message 1 must be a s",
        ),
    ],
)
def test_bad_chats_are_named(tmp_path, messages, message):
    path = write(tmp_path / "a.jsonl", [{"prompt": messages, "answer": "8"}])
    with pytest.raises(UserError, match=f"a.jsonl:1: prompt: .*{message}"):
        load_problems("", path=path)


def test_the_fingerprint_has_the_columns_that_rewards_read():
    plain, tests = Problem("q", "1"), Problem("q", "1", columns={"tests": [1], "id": 7})
    assert splits.digest_of_problems([plain]) == splits.digest_of_problems([tests])
    # Checkpoints hold this digest.
    text = json.dumps([["q", "1"]])
    assert splits.digest_of_problems([tests]) == hashlib.sha256(text.encode()).hexdigest()
    other = dataclasses.replace(tests, columns={"tests": [2], "id": 7})
    assert splits.digest_of_problems([tests], ["tests"]) != splits.digest_of_problems(
        [other], ["tests"]
    )
    assert splits.digest_of_problems([tests], ["id"]) == splits.digest_of_problems([other], ["id"])


def test_generated_problems_have_the_columns_of_their_task():
    (problem,) = load_problems("reasoning_gym:chain_sum", options=CHAIN_SUM, size=1)
    assert problem.columns["metadata"]["source_dataset"] == "chain_sum"


def test_a_number_of_any_size_is_an_answer(tmp_path):
    path = write(tmp_path / "train.jsonl", [{"question": "q", "answer": 9**999}])
    assert load_problems("", path=path) == [Problem("q", str(9**999))]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (72.0, "72"),
        (-3.0, "-3"),
        (-0.0, "0"),
        (2.5, "2.5"),
        (1200.0, "1200"),
        (1e-7, "0.0000001"),
        (1e22, "1" + 22 * "0"),
        (1e23, "1" + 23 * "0"),
        (float(2**53), str(2**53)),
        (np.float64(72), "72"),
        (np.float32(0.1), "0.1"),
        (np.int64(72), "72"),
        (decimal.Decimal("72.00"), "72"),
        (decimal.Decimal("1E+3"), "1000"),
        (10**30, str(10**30)),
        ("72.0", "72.0"),
        (True, None),
        (np.True_, None),
        (None, None),
        (float("nan"), None),
        (decimal.Decimal("NaN"), None),
        (float("inf"), None),
        (datetime.date(2026, 7, 1), None),
    ],
    ids=str,
)
def test_a_number_is_what_the_file_meant(value, text):
    if text is None:
        refused(
            "^f must be a string, not .*: write a string or a finite number", text_of, value, "f"
        )
    else:
        assert text_of(value, "f") == text


def test_a_table_that_lacks_values_has_whole_numbers(tmp_path):
    """Its columns of whole numbers are floats, in the file and in each row."""
    columns = {
        "question": ["a", "b", "c"],
        "answer": [72.0, 0.5, 9.0],
        "level": [3.0, 3.0, None],
        "meta": [{"level": 3.0}, {"level": None}, {"level": 3.0}],
    }
    path = tmp_path / "t.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    assert [p.answer for p in load_problems("", path=str(path))] == ["72", "0.5", "9"]
    kept = load_problems("", path=str(path), levels=(3,))
    assert [p.question for p in kept] == ["a", "b"]
    kept = load_problems("", path=str(path), levels=(3,), fields={"level": "meta.level"})
    assert [p.question for p in kept] == ["a", "c"]
    assert kept[0].columns["level"] == 3.0  # Rewards get the columns as they are.


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_a_number_of_a_table_has_no_more_digits_than_its_type(tmp_path, kind):
    answers = pyarrow.array([kind(0.1), None, kind(3)], pyarrow.from_numpy_dtype(kind))
    table = pyarrow.table({"question": ["a", "b", "c"], "answer": answers})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    problems = load_problems("", path=str(tmp_path / "t.parquet"), rewards=[by_length])
    assert [p.answer for p in problems] == ["0.1", "", "3"]


@pytest.mark.parametrize("missing", [None, float("nan"), ["a"], {"a": 1}, True])
def test_an_answer_that_nobody_reads_may_be_missing(tmp_path, missing):
    path = write(tmp_path / "a.jsonl", [{"question": "q", "answer": missing}])
    assert load_problems("", path=path, rewards=[by_length]) == [Problem("q", "")]


ODD_CHAT = [
    {"role": "system", "content": 'it\'s "x" {y} [z]'},
    {"role": "user", "content": "3\n\\d"},
]


@pytest.mark.parametrize(
    "question",
    [
        json.dumps(ODD_CHAT),
        f" {json.dumps(ODD_CHAT, indent=2)}\n",
        json.dumps(json.dumps(ODD_CHAT)),
        json.dumps({"messages": ODD_CHAT}),
        json.dumps(ODD_CHAT[1]),
        json.dumps([{"from": "human", "value": "hi"}]),
        '[{"role": "user", "content": "a line\nbreak"}]',
        repr(ODD_CHAT),
        repr(tuple(ODD_CHAT)),
        repr(json.dumps(ODD_CHAT)),
        str(np.array(ODD_CHAT, dtype=object)),
        repr(np.array(ODD_CHAT, dtype=object)),
        [{"role": "user", "content": json.dumps(ODD_CHAT)}],
    ],
)
def test_the_text_of_a_chat_is_no_question(tmp_path, question):
    path = write(tmp_path / "a.jsonl", [{"prompt": question, "answer": "1"}])
    words = r"a\.jsonl:1: prompt is a text with a list of chat messages .* write the list itself"
    refused(words, load_problems, "", path=path)


@pytest.mark.parametrize(
    "question",
    [
        "[1, 2, 3]: what is the sum?",
        "[[1, 0], [0, 1]]",
        f"{json.dumps(ODD_CHAT)} Which role comes first?",
        f"{json.dumps(ODD_CHAT)} is a chat. Write it as [{{'from': 'human', 'value': '...'}}]",
        '[{"question": "Which role has the content?"}]',
        '{"task": "Name the role of the content"}',
        "(content, role)",
        '"role" and "content"',
        "[INST] the role of content [/INST]",
        "[{role content" + "[{'role': 'content', " * 5000,
    ],
)
def test_a_question_may_begin_with_a_bracket(tmp_path, question):
    path = write(tmp_path / "a.jsonl", [{"prompt": question, "answer": "1"}])
    assert load_problems("", path=path) == [Problem(question, "1")]


def test_an_error_says_why_no_problem_is_left(tmp_path):
    rows = [{"question": f"q{i}", "answer": "" if i < 3 else "1", "level": 1} for i in range(5)]
    path = write(tmp_path / "a.jsonl", rows)
    line = refused("a.jsonl: no problems", load_problems, "", path=path, levels=(2,))
    assert "left out 5 with a level other than 2 (remedy: choose other levels" in line
    other = write(tmp_path / "b.jsonl", [{"question": "q", "answer": "1"}])
    options = {"eval_path": other, "eval_size": 1}
    assert line == refused("a.jsonl", load_splits, "", path=path, levels=(2,), **options)
    write(tmp_path / "a.jsonl", [*rows[:3], {"question": "long" * 9, "answer": "1"}])
    line = refused(
        "a.jsonl", load_problems, "", path=path, max_question_chars=9, rewards=[math_answer]
    )
    assert "no problems for train: left out 3 with an empty answer (remedy: fill" in line
    assert "1 with a question over 9 characters (remedy: raise data.max_question_chars)" in line
    assert "data.levels" not in line
    options = {"path": other, "eval_path": path, "eval_size": 2}
    write(tmp_path / "a.jsonl", rows[:3])
    refused("no evaluation problems: left out 3 with an empty answer", load_splits, "", **options)


def test_rows_that_are_left_out_are_counted_on_the_screen(tmp_path, capsys):
    answers = ["1", "", "####", "so 12\n####", r"\boxed{}", "$$", "Let x = 2. Then it holds.", " "]
    rows = [{"question": f"q{i}", "answer": answer} for i, answer in enumerate(answers)]
    rows += [
        {"question": "q" * 99, "answer": "1"},
        {"question": "p", "solution": "Clear. So be it."},
        {"question": "r", "answer": r"\boxed{\text{}}"},
        {"question": "s", "answer": "Let x = 2 and by induction the claim holds for all"},
    ]
    path = write(tmp_path / "train.jsonl", rows)
    assert load_problems("", path=path, max_question_chars=98) == [Problem("q0", "1")]
    assert capsys.readouterr().out.splitlines() == [
        f"left out 2 problems with an empty answer; the first: {path}:2",
        f"left out 7 problems with an answer that math_answer cannot read; the first: {path}:3",
        f"left out 1 problem with a question over 98 characters; the first: {path}:9",
        r"left out 1 problem with a solution that marks no answer by \boxed{} or a last line "
        f"'#### NUMBER'; the first: {path}:10",
    ]
    load_problems("", path=write(tmp_path / "a.jsonl", [{"question": "q", "answer": "1"}]))
    assert capsys.readouterr().out == ""


ANSWERS = ["18 eggs", "-3", r"\frac{1}{2}", "no", "It is so. I say.", ""]


def by_length(prompt, completion, answer, num_tokens, finished):
    del answer
    return float(num_tokens)


def by_answer(prompt, completion, answer, num_tokens, finished):
    return sum(word in answer for word in completion.split())


@pytest.mark.parametrize(
    ("scorers", "count"),
    [
        (None, 4),
        ([functions.numeric_answer], 2),
        ([functions.think_format, functions.tagged_answer], 2),
        ([functions.math_answer], 4),
        ([functions.exact_answer], 5),
        ([by_answer, by_length], 5),
        ([lambda *row: 1.0], 5),
        ([by_length, functions.boxed_format], 6),
        ([], 6),
    ],
)
def test_what_the_scorers_cannot_read_is_left_out(tmp_path, capsys, scorers, count):
    rows = [{"question": f"q{i}", "answer": answer} for i, answer in enumerate(ANSWERS)]
    path = write(tmp_path / "train.jsonl", rows)
    found = load_problems("", path=path, rewards=scorers)
    assert [problem.answer for problem in found] == ANSWERS[:count]
    left_out = re.findall(r"left out (\d)", capsys.readouterr().out)
    assert sum(map(int, left_out)) == len(ANSWERS) - count
    kept = load_problems("", eval_path=path, split="eval", eval_size=6, rewards=scorers)
    assert [problem.answer for problem in kept] == ANSWERS[:count]


def test_without_a_need_for_answers_a_row_needs_none(tmp_path):
    path = write(
        tmp_path / "train.jsonl", [{"question": "q"}, {"prompt": "p", "solution": "A. B."}]
    )
    found = load_problems("", path=path, rewards=[by_length])
    assert found == [Problem("q", ""), Problem("p", "A. B.")]


def test_missing_file():
    with pytest.raises(UserError, match=r"no\.jsonl: cannot read the problems: No such file"):
        load_problems("openai/gsm8k", path="no.jsonl")


def test_jsonl_holds_out_the_last(tmp_path):
    rows = [{"question": f"q{i}", "answer": str(i)} for i in (0, 1, 2, 4, 3, 4)]
    path = write(tmp_path / "train.jsonl", rows)
    load = lambda split: load_problems("", path=path, split=split, eval_size=2)  # noqa: E731
    assert [problem.question for problem in load("eval")] == ["q3", "q4"]
    assert [problem.question for problem in load("train")] == ["q0", "q1", "q2"]
    assert len(load_problems("", path=path)) == 6
    words = r"train\.jsonl: .*it has 5 different questions, and eval\.problems=6 .*=4 or lower"
    with pytest.raises(UserError, match=words):
        load_problems("", path=path, eval_size=6)
    with pytest.raises(UserError, match=r"no problems for train, as .*train\.jsonl \(data\.eval_p"):
        load_problems("", path=path, eval_path=path, eval_size=6)


@pytest.mark.parametrize(
    ("count", "held_out"), [(2, 1), (9, 1), (10, 1), (300, 30), (2559, 255), (3000, 256)]
)
def test_at_most_a_tenth_is_held_out(tmp_path, count, held_out):
    rows = [{"question": f"q{i}", "answer": str(i)} for i in range(count)]
    path = write(tmp_path / "train.jsonl", rows)
    train, evaluation = load_splits("", path=path, eval_size=None)
    assert [p.question for p in train + evaluation] == [row["question"] for row in rows]
    assert len(evaluation) == held_out
    # A number that is asked for is taken.
    assert len(load_splits("", path=path, eval_size=1)[1]) == 1
    # Another file is not trained on, so that up to 256 of its problems are taken.
    assert len(load_splits("", path=path, eval_path=path, train=False, eval_size=None)[1]) == (
        min(count, 256)
    )


def test_generated_problems_hold_out_at_most_a_tenth():
    load = functools.partial(chain_sum, size=1000, eval_size=None)
    assert (len(load()), len(load(split="eval"))) == (180, 20)


def test_eval_path(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"question": f"q{i}", "answer": "1"} for i in range(4)])
    other = write(tmp_path / "b.jsonl", [{"question": f"q{i}", "answer": "1"} for i in (9, 3, 0)])
    load = lambda split: load_problems(  # noqa: E731
        "", path=path, eval_path=other, split=split, eval_size=2
    )
    assert [problem.question for problem in load("eval")] == ["q9", "q3"]
    assert [problem.question for problem in load("train")] == ["q0", "q1", "q2"]


@pytest.mark.parametrize("form", ["{}", "Level {}", "{}.0", "Level {}.0"])
def test_levels(tmp_path, form):
    rows = [
        {"problem": f"q{level}", "answer": "1", "level": form.format(level)} for level in (1, 3, 5)
    ]
    path = write(tmp_path / "math.jsonl", rows)
    assert [p.question for p in load_problems("", path=path, levels=(3, 5))] == ["q3", "q5"]
    assert len(load_problems("", path=path)) == 3
    with pytest.raises(UserError, match=r"no problems for train: left out 3 with a level other"):
        load_problems("", path=path, levels=(2,))


@pytest.mark.parametrize("level", [None, "Level ?"])
def test_a_problem_of_unknown_level_is_left_out(tmp_path, capsys, level):
    rows = [{"problem": "q", "answer": "1", "level": value} for value in (3, level)]
    path = write(tmp_path / "math.jsonl", rows)
    assert len(load_problems("", path=path, levels=(3,))) == 1
    assert f"left out 1 problem with no known level; the first: {path}:2" in capsys.readouterr().out


@pytest.mark.parametrize("row", [{}, {"level": "hard"}])
def test_rows_without_a_level(tmp_path, row):
    path = write(tmp_path / "math.jsonl", [{"question": "q", "answer": "1"} | row])
    with pytest.raises(UserError, match=r"math.jsonl:1: data.levels=\[3\], but the level of this"):
        load_problems("", path=path, levels=(3,))


def test_long_questions_are_not_trained_on(tmp_path, monkeypatch):
    rows = [{"question": "q" * length, "answer": "1"} for length in (3, 4, 5)]
    path = write(tmp_path / "math.jsonl", rows)
    fake_hub(monkeypatch, lambda *_: {"train": rows, "test": rows})
    for arguments in ({"path": path}, {}):
        load = functools.partial(load_problems, "me/math", max_question_chars=4, **arguments)
        assert {len(problem.question) for problem in load()} == {3, 4}
    assert len(load(split="eval", eval_size=3)) == 3
    assert len(chain_sum(max_question_chars=1000, size=5)) == 5


def test_generated_problems_have_no_level():
    with pytest.raises(UserError, match=r"data.levels=\[3\], but generated problems have no level"):
        chain_sum(levels=(3,))


def test_eval_source(tmp_path, monkeypatch):
    rows = [{"problem": f"q{i}", "answer": str(i)} for i in range(4)]
    hub = {"me/big": {"train": rows}, "you/small": {"test": rows[3:0:-1]}, "it/none": {"train": []}}
    fake_hub(monkeypatch, lambda name, _: hub[name])
    load = functools.partial(load_problems, eval_source="you/small", eval_size=2)
    path = write(tmp_path / "math.jsonl", rows)
    for where in ({"source": "me/big"}, {"source": "", "path": path}):
        assert [p.question for p in load(**where, split="eval")] == ["q3", "q2"]
        assert [p.question for p in load(**where)] == ["q0", "q1"]
    assert len(load_problems("me/big", eval_source="you/small")) == 4
    with pytest.raises(UserError, match="it/none: no split 'test'; it has train"):
        load_problems("me/big", eval_source="it/none", eval_size=1)


def test_an_unreachable_eval_source(monkeypatch):
    fake_hub(monkeypatch, unreachable)
    with pytest.raises(UserError, match=r"you/small: .*--config.data.eval_path=FILE.jsonl"):
        load_problems("reasoning_gym:chain_sum", eval_source="you/small", eval_size=1)


def chain_sum(**arguments):
    return load_problems("reasoning_gym:chain_sum", options=CHAIN_SUM, **arguments)


def test_generated_problems():
    train = chain_sum(size=40, eval_size=10, seed=3)
    held_out = chain_sum(size=40, eval_size=10, seed=3, split="eval")
    questions = [problem.question for problem in train + held_out]
    assert (len(train), len(held_out), len(set(questions))) == (40, 10, 50)
    assert train == chain_sum(size=40, eval_size=10, seed=3)
    assert train != chain_sum(size=40, eval_size=10, seed=4)
    assert held_out == chain_sum(size=80, eval_size=10, seed=3, split="eval")
    for problem in train:
        left, sign, right = re.findall(r"(\d) ([+-]) (\d) =$", problem.question)[0]
        assert int(problem.answer) == int(left) + int(right) * (1 if sign == "+" else -1)


def test_a_small_task_gives_all_its_problems():
    train = chain_sum(size=1_000, eval_size=50)
    held_out = chain_sum(size=1_000, eval_size=50, split="eval")
    assert len(train) + len(held_out) == 200  # 10 * 10 pairs of digits with two signs
    assert not {p.question for p in train} & {p.question for p in held_out}


def test_sums():
    load = functools.partial(load_problems, "qerl_jax:sums", options={"largest": 12})
    train, held_out = load(eval_size=100), load(eval_size=100, split="eval")
    assert (len(train), len(held_out)) == (69, 100)
    assert len({p.question for p in train + held_out}) == 13 * 13
    for problem in train + held_out:
        a, b = map(int, re.fullmatch(r"What is (\d+) \+ (\d+)\?", problem.question).groups())
        assert problem.answer == f"{a} + {b} = {a + b}"
    assert load(seed=1) != load(seed=0)
    assert {p.question for p in load(seed=1)} == {p.question for p in load(seed=0)}
    assert len(load(size=5)) == 5


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("qerl_jax:sum", {}, "qerl_jax:sum: no such task; there is qerl_jax:sums"),
        ("qerl_jax:sums", {"seed": 1}, "no option 'seed'; it has largest: pass data.options={}"),
        ("qerl_jax:sums", {"largest": 0}, "largest=0: pass a whole number from 1 to 99"),
        ("qerl_jax:sums", {"largest": 2.0}, "largest=2.0: pass a whole number from 1 to 99"),
        ("reasoning_gym:chain_sums", {}, "no such task; there are ab, acre,"),
        ("reasoning_gym:chain_sum", {"terms": 2}, "no option 'terms'; it has allow_negation, max_"),
        ("reasoning_gym:chain_sum", {"seed": 2}, "no option 'seed'"),
        ("reasoning_gym:chain_sum", {"largest": 20}, "or --config.data.options={} for none"),
        ("reasoning_gym:chain_sum", {"min_terms": 9}, "max_terms must be >= min_terms"),
        ("reasoning_gym:chain_sum", {"min_terms": "two"}, "options {'min_terms': 'two'}"),
    ],
)
def test_bad_generated_source(source, options, message):
    with pytest.raises(UserError, match=re.escape(message)):
        load_problems(source, options=options, size=2)


def by_its_scorer(prompt, completion, answer, num_tokens, finished, metadata):
    """The scorer of the task, as docs/data.md has it."""
    score = reasoning_gym.get_score_answer_fn(metadata["source_dataset"])
    found = last_marked(answer_part(prompt, completion))
    return score(found, {"answer": answer, "metadata": metadata})


COMPARING = [
    functions.numeric_answer,
    functions.boxed_answer,
    functions.tagged_answer,
    functions.exact_answer,
    functions.whole_answer,
    functions.math_answer,
]
SEVERAL = [
    "countdown",
    "puzzle24",
    "word_ladder",
    "n_queens",
    "tower_of_hanoi",
    "simple_integration",
]


@pytest.mark.parametrize("task", [*SEVERAL, "rubiks_cube"])
def test_a_task_with_several_right_answers_has_its_own_scorer(task):
    source = f"reasoning_gym:{task}"
    for reward in COMPARING:
        message = f"accepts several answers, of which {reward.__name__} knows one: name a reward"
        with pytest.raises(UserError, match=message):
            load_problems(source, size=2, rewards=[reward])
        with pytest.raises(UserError, match=message):
            load_problems(source, size=2, split="eval", eval_size=2, rewards=[Timed(reward, 9.0)])
    if task == "rubiks_cube":
        with pytest.raises(UserError, match="its problems have no single answer to compare with"):
            load_problems(source, size=2, rewards=[by_its_scorer])
        return
    for problem in load_problems(source, size=2, rewards=[by_its_scorer]):
        arguments = "", rf"So \boxed{{{problem.answer}}}", problem.answer, 9, True
        assert by_its_scorer(*arguments, problem.columns["metadata"]) == 1.0


def test_the_bare_target_is_no_right_answer_of_countdown():
    (problem,) = load_problems("reasoning_gym:countdown", size=1, rewards=[by_its_scorer])
    metadata = problem.columns["metadata"]
    # As a value, the target is equal to the expression that leads to it.
    bare = rf"\boxed{{{metadata['target']}}}"
    assert functions.math_answer("", bare, problem.answer, 9, True) == 1.0
    assert by_its_scorer("", bare, problem.answer, 9, True, metadata) < 0.5
    swapped = rf"\boxed{{0 + {problem.answer}}}".replace("0 + ", "")
    assert by_its_scorer("", swapped, problem.answer, 9, True, metadata) == 1.0


@pytest.mark.parametrize("task", problem_sources._ONE_ANSWER)
def test_the_scorers_of_other_tasks_accept_one_answer(task):
    """Up to letters and spaces, and numbers by their value."""
    entries = reasoning_gym.create_dataset(task, seed=0, size=12)
    words = lambda text: "".join(text.lower().split())  # noqa: E731
    for entry in entries:
        gold = entry["answer"]
        others = {other["answer"] for other in entries} | {
            gold[::-1], "x" + gold, gold[:-1], " ".join(reversed(gold.split())),
            ", ".join(reversed(gold.split(", "))), "",
        }  # fmt: skip
        assert entries.score_answer(gold, entry) == 1.0
        for other in others:
            number, value = answers.whole_number(other), answers.whole_number(gold)
            same = number is not None and number == value
            if not same and words(other) != words(gold):
                assert entries.score_answer(other, entry) < 1.0, (gold, other)


@pytest.mark.parametrize("task", ["word_sequence_reversal", "spell_backward", "caesar_cipher"])
def test_texts_are_no_formulas(task):
    with pytest.raises(UserError, match=r"its answers are texts, .* use exact_answer"):
        load_problems(f"reasoning_gym:{task}", size=2, rewards=[functions.math_answer])
    assert load_problems(f"reasoning_gym:{task}", size=2, rewards=[functions.exact_answer])


# --- Copies ---------------------------------------------------------------------------------------


def copies(path, times, distinct):
    rows = [{"question": f"q{i}?", "answer": str(i)} for i in range(distinct) for _ in range(times)]
    return write(path, rows)


def test_the_held_out_problems_of_a_file_with_copies_differ(tmp_path, capsys):
    path = copies(tmp_path / "copies.jsonl", 32, 30)
    train, held_out = load_splits("", path=path, eval_size=20)
    assert [p.question for p in held_out] == [f"q{i}?" for i in range(10, 30)]
    assert [p.question for p in train] == [f"q{i}?" for i in range(10) for _ in range(32)]
    line = "left out 620 problems whose question is held out for evaluation\n"
    assert capsys.readouterr().out == line
    # A tenth of the questions, not of the rows.
    _, held_out = load_splits("", path=path, eval_size=None)
    assert [p.question for p in held_out] == ["q27?", "q28?", "q29?"]


def test_the_copies_of_an_evaluation_file_are_left_out(tmp_path, capsys):
    path = copies(tmp_path / "copies.jsonl", 3, 4)
    found = load_problems("", eval_path=path, split="eval", eval_size=3)
    assert [p.question for p in found] == ["q0?", "q1?", "q2?"]
    line = "left out 8 problems to evaluate that have the question of another\n"
    assert capsys.readouterr().out == line


def test_the_copies_of_a_test_split_are_left_out(monkeypatch, capsys):
    row = lambda i: {"question": f"q{i}", "answer": f"#### {i}"}  # noqa: E731
    dataset = {"train": [row(i) for i in range(4)], "test": [row(i // 2) for i in range(2, 10)]}
    fake_hub(monkeypatch, lambda *_: dataset)
    train, found = load_splits("openai/gsm8k", eval_size=2)
    assert ([p.answer for p in train], [p.answer for p in found]) == (["0", "3"], ["1", "2"])
    found = load_problems("", eval_source="you/small", split="eval", eval_size=2)
    assert [p.answer for p in found] == ["1", "2"]
    assert capsys.readouterr().out.count("left out 4 problems to evaluate that have") == 2


def test_options_as_a_config_dict():
    options = ml_collections.ConfigDict(CHAIN_SUM)
    assert load_problems("reasoning_gym:chain_sum", options=options, size=5) == chain_sum(size=5)


def fake_hub(monkeypatch, load_dataset):
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))


def test_hub(monkeypatch):
    calls = []
    row = lambda i: {"question": f"q{i}", "answer": f"#### {i}"}  # noqa: E731

    def load_dataset(*arguments):
        calls.append(arguments)
        return {"train": [row(i) for i in range(4)], "test": [row(i) for i in (9, 3, 8)]}

    fake_hub(monkeypatch, load_dataset)
    load = load_problems
    assert load("openai/gsm8k", split="eval", eval_size=2) == [
        Problem("q9", "9"),
        Problem("q3", "3"),
    ]
    assert [p.answer for p in load("openai/gsm8k", eval_size=2)] == ["0", "1", "2"]
    assert len(load("me/math:hard")) == 4
    assert calls == [("openai/gsm8k", "main"), ("openai/gsm8k", "main"), ("me/math", "hard")]


def test_a_dataset_in_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "math").mkdir()
    calls = []
    rows = {"train": [{"question": "q", "answer": "1"}]}
    fake_hub(monkeypatch, lambda *arguments: calls.append(arguments) or rows)
    assert load_problems("~/math:hard") == [Problem("q", "1")]
    assert calls == [(str(tmp_path / "math"), "hard")]


def test_the_test_split_is_neither_trained_on_nor_held_out(monkeypatch, capsys):
    row = lambda i: {"question": f"q{i}", "answer": f"#### {i}"}  # noqa: E731
    unlabeled = {"question": "q3", "answer": None}
    dataset = {"train": [row(i) for i in range(50)], "test": [row(99), unlabeled]}
    fake_hub(monkeypatch, lambda *_: dataset)
    train, evaluation = load_splits("openai/gsm8k", eval_source=splits.HELD_OUT, eval_size=None)
    assert [int(p.answer) for p in train] == [i for i in range(46) if i != 3]
    assert [int(p.answer) for p in evaluation] == [46, 47, 48, 49]
    out = capsys.readouterr().out
    assert out == "left out 1 problem whose question is in the test split\n"


def test_hub_without_a_test_split_holds_out_the_last(monkeypatch):
    rows = [{"prompt": f"q{i}", "solution": str(i)} for i in range(5)]
    fake_hub(monkeypatch, lambda *_: {"train": rows})
    assert [p.answer for p in load_problems("me/math", split="eval", eval_size=2)] == [
        "3",
        "4",
    ]
    assert len(load_problems("me/math", eval_size=2)) == 3


def unreachable(*_):
    raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub\nwith more lines")


@pytest.mark.parametrize(
    ("load_dataset", "message"),
    [
        (
            unreachable,
            "openai/gsm8k: cannot load it from the Hugging Face hub (Couldn't reach 'openai/gsm8k' "
            "on the Hub); pass a local copy of the same fields, --config.data.path=FILE.jsonl, or "
            "train on generated problems, --config.data.source=reasoning_gym:gsm_symbolic",
        ),
        (lambda *_: {"dev": []}, "openai/gsm8k: no split 'train'; it has dev"),
        (lambda *_: {"train": []}, "openai/gsm8k: no problems for train"),
        (lambda *_: {"train": [{"a": "b"}]}, "openai/gsm8k[train]:1: no field question"),
    ],
)
def test_hub_errors(monkeypatch, load_dataset, message):
    fake_hub(monkeypatch, load_dataset)
    with pytest.raises(UserError, match=re.escape(message)):
        load_problems("openai/gsm8k")


@pytest.mark.parametrize(
    ("system_prompt", "suffix", "text"),
    [
        ("", "", "<user> 1 + 1 = <assistant>"),
        ("Be short.", "\nUse tags.", "<system> Be short. <user> 1 + 1 =\nUse tags. <assistant>"),
    ],
)
def test_render_prompt(system_prompt, suffix, text):
    problem = Problem("1 + 1 =", "2")
    config = PromptConfig(system_prompt, suffix)
    assert render_prompt(problem, WordTokenizer(), config) == text
    (prompt,) = encode_prompts([problem], WordTokenizer(), config, max_prompt_tokens=20)
    assert (prompt.problem, prompt.text) == (problem, text)
    assert prompt.ids == tuple(len(word) for word in text.split())


def test_solved_examples_come_before_the_question():
    examples = ("2 + 2 =", "4", "1 + 3 =", "5")

    def render(problem, **options):
        config = PromptConfig(**{"examples": examples} | options)
        return render_prompt(problem, WordTokenizer(), config)

    turns = "<user> 2 + 2 = Go. <assistant> 4 <user> 1 + 3 = Go. <assistant> 5"
    text = render(Problem("1 + 1 =", "2"), system_prompt="Be brief.", question_suffix=" Go.")
    assert text == f"<system> Be brief. {turns} <user> 1 + 1 = Go. <assistant>"
    chat = (("system", "Think."), ("user", "a"), ("assistant", "b"), ("user", "c"))
    text = render(Problem("", "2", chat), question_suffix=" Go.")
    assert text == f"<system> Think. {turns} <user> a <assistant> b <user> c Go. <assistant>"
    with pytest.raises(UserError, match=r"data.examples has 3 texts, the last '1 \+ 3 ='"):
        render(Problem("q", "1"), examples=examples[:3])
    with pytest.raises(UserError, match=r"a solved example: not valid Unicode"):
        render(Problem("q", "1"), examples=("\ud800", "1"))


def test_a_prompt_over_the_limit_is_an_error():
    problems = [Problem("a " * count, "1") for count in (1, 9, 3, 4, 8)]
    assert len(encode_prompts(problems, WordTokenizer(), max_prompt_tokens=11)) == 5
    message = (
        "2 of 5 prompts are over 6 tokens, the longest has 11; instead of "
        "data.max_prompt_tokens=6 pass --config.data.max_prompt_tokens=11, or take them out"
    )
    with pytest.raises(UserError, match=re.escape(message)):
        encode_prompts(problems, WordTokenizer(), max_prompt_tokens=6)
