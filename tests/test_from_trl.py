"""docs/from_trl.md names all fields of TRL's GRPOConfig; the ports of its scripts train."""

import collections
import json
import pathlib
import re
import sys

import pytest
import tiny_run

from qerl_jax.config.describe import SECTIONS, similar_fields
from qerl_jax.config.fields import ROWS
from qerl_jax.system.jsonl import read_jsonl

ROOT = pathlib.Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden"
PAGE = (ROOT / "docs" / "from_trl.md").read_text()
TABLES = PAGE.partition("\n## Rewards\n")[0]
CELLS = re.findall(r"^\| (\w+) \| (.*?) \| (.*?) \|$", TABLES, re.MULTILINE)
# A field in backticks: a name with a dot, an override of one, or a field without a section.
FIELD = re.compile(r"`(?:config\.)?([a-z]+\.[\w.]+|steps|seed)(?:=[^`]*)?`")
NAMED = FIELD.findall(PAGE)
FAMILY = "qwen2_5"  # of the chat template with tools


def test_the_page_names_every_field_and_argument_of_trl_once():
    """The list is that of tests/golden/make_trl_fields.py."""
    trl = json.loads((GOLDEN / "trl_fields.json").read_text())
    assert f"TRL {trl['version']}." in PAGE
    counts = collections.Counter(name for name, _, _ in CELLS)
    expected = {*trl["own"], *trl["trainer"]}
    assert expected <= set(counts)
    assert set(counts) <= expected | {*trl["inherited"], "argument", "field"}
    assert {name for name, count in counts.items() if count > 1} == {"field"}


def test_the_page_says_why_a_field_is_missing():
    """An empty note with an empty cell belongs to a row of the same group as the one above it."""
    group = ""
    for name, here, note in CELLS:
        assert here or note or name.partition("_")[0] in ("vllm", "entropy"), name
        group = note or group
    assert group


def test_the_fields_that_the_page_names_exist():
    names = [name for name in NAMED if not name.endswith((".py", ".md", ".jsonl"))]
    assert len(names) > 60
    assert [name for name in names if name not in ROWS and name not in SECTIONS] == []


def test_a_name_of_the_page_leads_to_its_field():
    """That of --explain=NAME."""
    rows = {name: FIELD.findall(here) for name, here, _ in CELLS}
    wrong = {n: f for n, f in rows.items() if f and not {*f} & {*similar_fields(n)}}
    assert wrong == {}


@pytest.fixture(scope="module")
def ports():
    sys.path.insert(0, str(ROOT))  # as for `python examples/from_trl.py`, whose tools are in it
    try:
        from examples import from_trl

        yield from_trl
    finally:
        sys.path.remove(str(ROOT))


@pytest.fixture(scope="module")
def caller(tmp_path_factory, compile_cache):
    """The inputs of runs with a tokenizer of single bytes and a chat template that has tools."""
    sys.path.insert(0, str(GOLDEN))
    try:
        from environment_tokenizer import make_backend
    finally:
        sys.path.remove(str(GOLDEN))
    backend = make_backend(FAMILY)
    folder, size = tmp_path_factory.mktemp("caller"), backend.get_vocab_size()
    tiny = tiny_run.write_tiny(folder, compile_cache, vocab_size=size, max_position=2048)
    families = json.loads((GOLDEN / "environment_trl.json").read_text())["families"]
    settings = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    settings["chat_template"] = families[FAMILY]["template"]
    (tiny.model / "tokenizer_config.json").write_text(json.dumps(settings))
    backend.save(str(tiny.model / "tokenizer.json"))
    return tiny


def test_a_game_merges_tiles_once_and_ends(ports):
    game = ports.Game2048()
    game.reset()
    assert sum(tile > 0 for tile in game.cells) == 2
    game.cells = [2, 2, 4, 0, *[0] * 4, 2, 2, 2, 2, *[0] * 4]
    game.move(" Left")
    assert (game.cells[:2], game.cells[8:10], game.score) == ([4, 4], [4, 4], 12.0)
    game.cells = [2, 0, 0, 0, 2, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0]
    game.move("down")
    assert [game.cells[i] for i in (8, 12)] == [4, 4]
    game.cells = [2, 4, 8, 16, 4, 8, 16, 2, 8, 16, 2, 16, 0, 2, 4, 8]
    assert "game over" in game.move("left")
    with pytest.raises(ValueError, match="the game is over"):
        game.move("up")


def test_the_rewards_of_the_database_read_its_messages(ports):
    def conversation(*queries):
        messages = []
        for text in queries:
            call = {"type": "function", "function": {"name": "query", "arguments": {}}}
            call["function"]["arguments"]["sql_command"] = text
            try:
                content = ports.query(text)
            except ports.sqlite3.Error as error:
                content = str({"error": str(error)})
            messages += [{"role": "assistant", "content": "", "tool_calls": [call]}]
            messages += [{"role": "tool", "name": "query", "content": content}]
        return [*messages, {"role": "assistant", "content": "*yes*"}]

    right = conversation("SELECT * FROM interactions WHERE gene_a = 'TP53'")
    assert right[1]["content"] == [("TP53", "MDM2")]
    wrong = conversation("drop table interactions", "select")
    rewards = ports.evidence([right, wrong, conversation()], ["yes", "no", "no"])
    assert rewards == pytest.approx([2.4, -4.5, -1.5])
    said = ["So *Yes*.", "*no*", "yes"]
    assert ports.right_answer(said, ["yes", "yes", "yes"]) == [0.6, -1.0, -0.5]
    assert ports.last_number(["#### 1,200", "1200"], ["1200", "1200"]) == [1.0, 0.0]


@pytest.mark.parametrize("script", ["game", "database", "gsm8k"])
def test_a_port_trains(script, ports, caller, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(ROOT)
    _, run = ports.SCRIPTS[script]
    changes = {"steps": 1, "eval.every": 0, "data.max_prompt_tokens": 1600, "log.completions": 8}
    if script != "gsm8k":
        changes |= {"environment.reply_tokens": 8, "environment.max_turns": 2}
    folder = run(caller.config(changes), workdir=tmp_path / "run")
    (row,) = tiny_run.results(folder)
    assert row["rewards_missing"] == 0
    rows = read_jsonl(folder / "completions.jsonl")
    tools = {"game": '"name": "move"', "database": '"name": "query"', "gsm8k": ports.TUTOR}
    assert all(tools[script] in one["prompt"] for one in rows)
    rewards = {"game": {0.0}, "database": {-2.0}, "gsm8k": {0.0}}  # of a model without a call
    assert {one["reward"] for one in rows} == rewards[script]
