"""Supervised fine-tuning: what is learned of a row, its loss, and runs that learn from text."""

import dataclasses
import itertools
import json
import os
import pathlib
import runpy
import subprocess
import sys

import numpy as np
import pytest
import tiny_checkpoints
import tiny_run
from recorded_conversations import tokenizer_of
from refusal import refused

import qerl_jax
import qerl_jax.training.loop
from qerl_jax.config.experiments import sft
from qerl_jax.config.overrides import check_overrides
from qerl_jax.data.from_config import encode_problems, load_problems
from qerl_jax.data.prompts import Problem, Prompt, TextRow
from qerl_jax.data.texts import SavedSelection
from qerl_jax.evaluation.task_prompts import digest_of_prompts
from qerl_jax.export.write import ExportConfig, export
from qerl_jax.memory.report import check_fits, format_plan
from qerl_jax.memory.run_plan import Device, plan_run
from qerl_jax.rl.packing import pack
from qerl_jax.rl.train_step import buffer_loss
from qerl_jax.run.folder import RunFolder, default_folder
from qerl_jax.run.metrics import read_steps
from qerl_jax.show.runs import show_runs
from qerl_jax.system.jsonl import read_jsonl
from qerl_jax.training.dry_run import check_start, dry_run
from qerl_jax.training.loop import train
from qerl_jax.training.saving import lowest_loss
from qerl_jax.training.session import open_session
from qerl_jax.training.setup import settle_text
from qerl_jax.training.text_step import text_batch
from qerl_jax.training.validate import validate
from qerl_jax.weights.load import load
from qerl_jax.weights.tokenizer import from_folder

TRL = json.loads((pathlib.Path(__file__).parent / "golden" / "trl_sft.json").read_text())
# A turn of the assistant is t1 t2 ... <|im_end|> t3; of earlier ones `HIDES` leaves out t9.
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}t1 t2 {{ CONTENT }} <|im_end|> t3 "
    "{% else %}{{ m.content }} {% endif %}{% endfor %}{% if add_generation_prompt %}t1 t2 "
    "{% endif %}"
)
PLAIN = TEMPLATE.replace("CONTENT", "m.content")
HIDES = TEMPLATE.replace("CONTENT", "m.content if loop.last else m.content.replace('t9 ', '')")
END = 47
SETTINGS = {
    "sft.rows_per_step": 4,
    "sft.max_tokens": 24,
    "steps": 4,
    "checkpoint.every": 2,
    "eval.every": 2,
    "eval.problems": 4,
}


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def some_rows(count=20):
    rng = np.random.default_rng(0)

    def words(count):
        return " ".join(f"t{i}" for i in rng.integers(40, size=count))

    return [{"prompt": words(3), "completion": words(2 + n % 4)} for n in range(count)]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, compile_cache):
    """A tiny model whose template writes turns, and a file of rows."""
    folder = tmp_path_factory.mktemp("sft")
    tiny = tiny_run.write_tiny(folder, compile_cache)
    tiny_checkpoints.write_tokenizer(tiny.model, chat_template=PLAIN)
    write_rows(folder / "rows.jsonl", some_rows())
    return tiny


def text_config(inputs, **changes):
    """A config that learns from rows; `changes` by flattened name, with __ in place of a dot."""
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    path = {"data.path": str(inputs.problems.parent / "rows.jsonl")}
    return inputs.config(SETTINGS | path | changes)


@pytest.fixture(scope="module")
def run(inputs, tmp_path_factory):
    """A run of four steps."""
    return train(text_config(inputs), workdir=tmp_path_factory.mktemp("runs") / "text")


def encode(inputs, tmp_path, *rows, template=None, **changes):
    """The rows that are learned of rows of a file, as (prompt, completion, learned)."""
    folder = inputs.model
    if template:
        folder = tmp_path / "model"
        folder.mkdir()
        tiny_checkpoints.write_tokenizer(folder, chat_template=template)
    path = write_rows(tmp_path / "rows.jsonl", rows)
    config = text_config(inputs, data__path=path, eval__every=0, **changes)
    problems = load_problems(config, {})
    prompts = encode_problems(config, from_folder(folder), problems)["train"]
    return [
        (list(row.prompt), list(row.completion), list(row.learned))
        for p in prompts
        for row in p.rows
    ]


def chat(*turns, **fields):
    """A conversation whose messages are by the user and the assistant in turn."""
    roles = ("user", "assistant")
    return {
        "messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(turns)],
        **fields,
    }


def test_a_prompt_and_its_completion_up_to_the_end_token(inputs, tmp_path):
    expected = [([5, 6, 1, 2], [7, 8, END], [True] * 3)]
    row = {"prompt": "t5 t6", "completion": "t7 t8"}
    messages = [{"role": "user", "content": "t5 t6"}]
    turn = [{"role": "assistant", "content": "t7 t8"}]
    assert encode(inputs, tmp_path, row) == expected
    assert encode(inputs, tmp_path, {"prompt": messages, "completion": turn}) == expected
    assert encode(inputs, tmp_path, chat("t5 t6", "t7 t8")) == expected
    assert (
        encode(
            inputs,
            tmp_path,
            {"q": "t5 t6", "r": {"a": "t7 t8"}},
            data__fields__question="q",
            data__fields__answer="r.a",
        )
        == expected
    )
    gsm8k = {"question": "t5 t6", "answer": "t7 t8"}
    assert encode(inputs, tmp_path, gsm8k) == expected
    others = {
        "data__system_prompt": "t30",
        "data__question_suffix": " t31",
        "data__examples": ("t32", "t33"),
    }
    (found,) = encode(inputs, tmp_path, row, **others)
    assert found == ([30, 32, 31, 1, 2, 33, END, 3, 5, 6, 31, 1, 2], [7, 8, END], [True] * 3)


def test_all_turns_of_the_assistant_are_learned(inputs, tmp_path):
    (row,) = encode(inputs, tmp_path, chat("t5", "t6", "t7", "t8", "t9"))
    assert row[0] == [5, 1, 2]
    assert row[1] == [6, END, 3, 7, 1, 2, 8, END]
    assert row[2] == [True, True, False, False, False, False, True, True]


@pytest.mark.parametrize(
    ("unlearned", "prompt", "completion", "learned"),
    [
        ([1], [5, 1, 2, 6, END, 3, 7, 1, 2], [8, END], [True] * 2),
        ([3], [5, 1, 2], [6, END], [True] * 2),
        (
            [3, 5],
            [5, 1, 2],
            [6, END, 3, 7, 1, 2, 8, END, 3, 9, 1, 2, 10, END, 3, 11, 1, 2, 12, END],
            [True] * 2 + [False] * 16 + [True] * 2,
        ),
    ],
)
def test_turns_of_weight_0_are_context(inputs, tmp_path, unlearned, prompt, completion, learned):
    row = chat(*(f"t{n}" for n in range(5, 13 if 5 in unlearned else 9)))
    for number, message in enumerate(row["messages"]):
        message["weight"] = None if number % 2 == 0 else int(number not in unlearned)
    (found,) = encode(inputs, tmp_path, row)
    assert found == (prompt, completion, learned)


@pytest.mark.parametrize("weights", [(1, 1), (True, 1.0), (None, 1), (0.5, 1)])
def test_only_a_weight_of_0_of_the_assistant_is_kept(inputs, tmp_path, weights):
    rows = [chat("t5", "t6", "t7", "t8") for _ in range(2)]
    for number, message in enumerate(rows[1]["messages"]):
        message["weight"] = weights[number % 2]
    config = text_config(inputs, data__path=str(tmp_path / "rows.jsonl"), eval__every=0)
    found = []
    for row in rows:
        write_rows(tmp_path / "rows.jsonl", [row])
        found.append(load_problems(config, {}))
    assert found[0] == found[1]


def test_of_a_prompt_with_turns_the_completion_alone_is_learned(inputs, tmp_path):
    messages = chat("t5", "t6", "t7")["messages"]
    (row,) = encode(inputs, tmp_path, {"prompt": messages, "completion": "t8"})
    assert row == ([5, 1, 2, 6, END, 3, 7, 1, 2], [8, END], [True, True])


def test_turns_that_a_template_rewrites_are_rows_of_their_own(inputs, tmp_path):
    rows = encode(inputs, tmp_path, chat("t5", "t9 t6", "t7", "t8"), template=HIDES)
    assert rows == [
        ([5, 1, 2], [9, 6, END], [True] * 3),
        ([5, 1, 2, 6, END, 3, 7, 1, 2], [8, END], [True] * 2),
    ]


def test_tools_and_their_calls(inputs, tmp_path):
    call = "{{ c.function.name }} {{ c.function.arguments.x }}"
    template = "{% if tools %}{{ tools[0].function.name }} {% endif %}" + PLAIN.replace(
        "t1 t2 {{ m.content }}",
        f"t1 t2 {{{{ m.content }}}}{{% for c in m.tool_calls %}}{call}{{% endfor %}}",
    )
    call = {"type": "function", "function": {"name": "t11", "arguments": '{"x": "t12"}'}}
    messages = [
        {"role": "user", "content": "t5"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "name": "t11", "content": "t13"},
        {"role": "assistant", "content": "t14", "tool_calls": None},
    ]
    tools = [{"type": "function", "function": {"name": "t11", "parameters": {}}}]
    for number, value in enumerate((tools, json.dumps(tools))):
        folder = tmp_path / str(number)
        folder.mkdir()
        row = {"messages": messages, "tools": value}
        ((prompt, completion, learned),) = encode(inputs, folder, row, template=template)
        assert prompt == [11, 5, 1, 2]
        assert completion == [11, 12, END, 3, 13, 1, 2, 14, END]
        assert learned == [True] * 3 + [False] * 4 + [True] * 2
    call["function"]["arguments"] = None
    template = template.replace("{{ c.function.arguments.x", "t{{ c.function.arguments | length")
    ((_, completion, _),) = encode(inputs, tmp_path, row, template=template)
    assert completion[:3] == [11, 0, END]


def test_a_null_of_a_table_is_no_value(inputs, tmp_path):
    """A file of rows of several forms has all of their columns."""
    nulls = dict.fromkeys(("messages", "tools", "question", "prompt", "completion", "answer"))
    messages = [{"role": "user", "content": "t5"}, {"role": "tool", "content": "t6"}]
    messages[1] |= {"tool_call_id": None, "name": None}
    rows = [
        nulls | {"prompt": "t5", "completion": "t7"},
        nulls | {"question": "t5", "answer": "t7"},
        nulls | {"prompt": chat("t5", "t7")["messages"]},
        nulls | chat("t5", "t7"),
        nulls | {"prompt": messages, "completion": "t7"},
    ]
    expected = ([5, 1, 2], [7, END], [True] * 2)
    *others, tool = encode(inputs, tmp_path, *rows)
    assert others == [expected] * 4
    assert tool[0] == [5, 6, 1, 2]


def call_of(arguments):
    return {"type": "function", "function": {"name": "add", "arguments": arguments}}


def called(**fields):
    """A conversation whose turn is a call of the tool add."""
    turn = {"role": "assistant", "content": "", "tool_calls": [call_of("{}")]}
    return {"messages": [{"role": "user", "content": "t5"}, turn | fields]}


@pytest.mark.parametrize(
    ("row", "changes", "words"),
    [
        (called(), {}, ("rows.jsonl:2", "leaves out the call of 'add'", "out of the row")),
        (
            chat("t5", "t6", tools=[{"type": "function", "function": {"name": "add"}}]),
            {},
            ("rows.jsonl:2", "leaves out the tool 'add'", "out of the row"),
        ),
        (
            called(tool_calls=[], content="t6", reasoning_content="t7"),
            {},
            ("rows.jsonl:2", "leaves out the reasoning 't7'", "out of the row"),
        ),
        (called(tool_calls=[call_of("{")]), {}, ("rows.jsonl:2", "'add'", "'{'", "JSON object")),
        (called(tool_calls=[call_of([1])]), {}, ("rows.jsonl:2", "messages[1]", "JSON object")),
        (called(function_call={"name": "t1"}), {}, ("rows.jsonl:2", "write it as tool_calls")),
        (called(weight=0.5), {}, ("rows.jsonl:2", "messages[1].weight is 0.5", "write 1")),
        (called(weight=0), {}, ("rows.jsonl:2", "no message of the assistant")),
        (called(thinking=["t7"]), {}, ("rows.jsonl:2", "messages[1].thinking", "string")),
        ({"prompt": "t5"}, {}, ("rows.jsonl:2", "completion", "data.fields.answer")),
        ({"completion": "t5"}, {}, ("rows.jsonl:2", "messages", "data.fields.question")),
        ({"prompt": " ", "completion": "t5"}, {}, ("rows.jsonl:2", "empty", "take the row out")),
        ({"messages": []}, {}, ("rows.jsonl:2", "messages", "empty")),
        (chat("t5"), {}, ("rows.jsonl:2", "assistant", "take the row out")),
        ({"messages": [{"role": "assistant", "content": "t5"}]}, {}, ("rows.jsonl:2", "assistant")),
        (
            {"messages": [{"role": "robot", "content": "t5"}]},
            {},
            ("rows.jsonl:2", "robot", "system"),
        ),
        ({"messages": ["t5"]}, {}, ("rows.jsonl:2", "role")),
        ({"prompt": 5.5, "completion": ["t5"]}, {}, ("rows.jsonl:2", "completion", "role")),
        ({"prompt": "t5", "completion": {"a": 1}}, {}, ("rows.jsonl:2", "completion", "string")),
        (
            {"prompt": str(chat("t5")["messages"]), "completion": "t6"},
            {},
            ("rows.jsonl:2", "list itself"),
        ),
        (chat("t5", "t6", tools="{"), {}, ("rows.jsonl:2", "tools", "JSON")),
        (chat("t5", "t6", tools=[3]), {}, ("rows.jsonl:2", "tools", "schemas")),
        (chat("t5", "t6", tools=[{"function": {}}]), {}, ("rows.jsonl:2", "tools", "name")),
        (chat("t5", "\ud800"), {}, ("rows.jsonl:2", "Unicode")),
        (
            {"messages": [{"role": "system", "content": "t4"}, *chat("t5", "t6")["messages"]]},
            {"data__system_prompt": "t3"},
            ("rows.jsonl:2", "system", "data.system_prompt="),
        ),
        (chat("t5", "t6 <|im_end|> t7"), {}, ("rows.jsonl:2", "<|im_end|>", "take it out")),
        (
            chat("t5", "t6", tools=[{"name": "\ud800"}]),
            {"template": "{{ tools[0].name if tools }} " + PLAIN},
            ("rows.jsonl:2", "Unicode"),
        ),
        (
            chat("t4", "t6"),
            {"template": PLAIN.replace("{% else %}", "{% elif m.content != 't4' %}")},
            ("rows.jsonl:2", "leaves out the user message 't4'"),
        ),
        (
            chat("t4", "t6"),
            {"template": "{{ raise_exception('no t4') if messages[0].content == 't4' }}" + PLAIN},
            ("rows.jsonl:2", "no t4"),
        ),
        (chat("t5 " * 30, "t6"), {}, ("1 of 2 rows", "rows.jsonl:2", "34", "sft.max_tokens=34")),
    ],
)
def test_bad_rows_are_named(inputs, tmp_path, row, changes, words):
    line = refused(words[0], encode, inputs, tmp_path, chat("t5", "t6"), row, **changes)
    assert [word for word in words if word not in line] == []


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (PLAIN.replace("<|im_end|> ", ""), ("rows.jsonl:1", "end-of-sequence")),
        (PLAIN.replace("%}t1 t2 {{", "%}t1 {{"), ("rows.jsonl:1", "chat_template_args")),
    ],
)
def test_templates_that_do_not_fit_are_refused(inputs, tmp_path, template, words):
    line = refused(words[0], encode, inputs, tmp_path, chat("t5", "t6"), template=template)
    assert [word for word in words if word not in line] == []


def test_rows_without_a_completion_are_left_out(inputs, tmp_path, capsys):
    rows = encode(inputs, tmp_path, chat("t5", "t6"), chat("t7", " "))
    assert len(rows) == 1
    assert "left out 1 problem with an empty completion" in capsys.readouterr().out
    refused("1 with an empty completion .remedy: fill", encode, inputs, tmp_path, chat("t7", " "))


def test_a_run_has_the_same_tokens_to_learn_when_it_is_resumed():
    """The digest tells apart rows with one prompt, which a chat template may write otherwise."""
    rows = [TextRow((5,), (6, 7), learned) for learned in ((True, True), (False, True))]
    rows += [TextRow((5,), (6, 8), (True, True)), TextRow((5, 6), (7,), (True,))]
    prompts = [Prompt(Problem("t5", "t6"), "t5", (5,), (row,)) for row in rows]
    assert len({digest_of_prompts([prompt]) for prompt in prompts}) == 4


def test_weights_are_one_over_the_learned_tokens(inputs, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [chat("t5", "t6", "t7", "t8"), chat("t5 t6", "t7")])
    config = text_config(inputs, data__path=path, eval__every=0)
    tokenizer = from_folder(inputs.model)
    prompts = encode_problems(config, tokenizer, load_problems(config, {}))["train"]
    batch = text_batch(prompts, tokenizer.pad_id)
    assert batch.loss_mask.sum() == 6
    np.testing.assert_allclose(batch.weights, batch.loss_mask / 6)
    assert batch.tokens[0, : batch.lengths[0]].tolist() == [5, 1, 2, 6, END, 3, 7, 1, 2, 8, END]


def loss_of(inputs, lora, split):
    """The mean loss of the rows of a split under an adapter."""
    model = load(str(inputs.model), format="nvfp4", dtype="float32")
    config = text_config(inputs)
    prompts = encode_problems(config, model.tokenizer, load_problems(config, {}))[split]
    batch = text_batch(prompts, model.tokenizer.pad_id)
    buffers = pack(batch, batch.lengths > 0, buffer_tokens=64)
    options = {"model_config": model.config}
    sums = [buffer_loss(model.params, lora, b, np.float32(1), **options) for b in buffers]
    return sum(map(float, sums)) / batch.loss_mask.sum()


def test_a_run_learns_and_saves(inputs, run):
    rows = read_steps(run / "metrics.jsonl")
    assert all(row["learned_tokens"] < row["packed_tokens"] for row in rows)
    losses = {
        r["step"]: r["eval_loss"] for r in read_jsonl(run / "metrics.jsonl") if "eval_loss" in r
    }
    assert list(losses) == [0, 2, 4]
    assert losses[4] < losses[0]
    assert losses[0] == pytest.approx(np.log(48), rel=0.3)
    assert losses[4] == pytest.approx(loss_of(inputs, tiny_run.adapter(run), "eval"), rel=1e-5)
    best = json.loads((run / "best.json").read_text())
    assert best["loss"] == losses[best["step"]] == min(losses[2], losses[4])
    assert json.loads((run / "summary.json").read_text())["best_loss"] == best["loss"]
    assert tiny_run.adapter(run).layers
    assert (run / "curves.png").exists()
    assert not (run / "completions.jsonl").exists()


def test_the_best_loss_outlives_an_evaluation_that_is_not_repeated(tmp_path):
    folder = RunFolder(tmp_path)
    assert lowest_loss(folder) == np.inf
    write_rows(folder.metrics, [{"step": 0, "eval_loss": 2.0}, {"step": 1, "loss": 1.0}])
    assert lowest_loss(folder) == 2.0
    write_rows(folder.best, [{"step": 2, "loss": 1.5}])
    assert lowest_loss(folder) == 1.5


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3", "qwen3_5_nothink"])
def test_conversations_of_assistant_only_loss_of_trl(inputs, tmp_path, family):
    """TRL also learns what the template puts around a turn, which no policy samples."""
    begins = "<think>\n\n</think>\n\n" if family == "qwen3_5_nothink" else ""
    tokenizer = tokenizer_of(family)
    for conversation in TRL["conversations"][family]:
        row = {name: conversation[name] for name in ("messages", "tools") if name in conversation}
        path = write_rows(tmp_path / "rows.jsonl", [row])
        changes = {"data__path": path, "eval__every": 0, "sft__max_tokens": 5000}
        config = text_config(inputs, **changes)
        (prompt,) = encode_problems(config, tokenizer, load_problems(config, {}))["train"]
        found = [begins + text for one in prompt.rows for text in turns_of(tokenizer, *one[1:])]
        ids, learned = conversation["ids"], conversation["learned"]
        assert found == [text.strip("\n") for text in turns_of(tokenizer, ids, learned)]
        if family == "qwen2_5":  # The others leave out the reasoning of earlier turns.
            (row,) = prompt.rows
            whole = tokenizer.decode(row.prompt + row.completion, skip_special=False)
            assert tokenizer.decode(ids, skip_special=False).rstrip("\n") == whole


def turns_of(tokenizer, ids, learned):
    """The texts of the neighboring tokens that are learned."""
    groups = itertools.groupby(zip(ids, learned, strict=True), lambda pair: bool(pair[1]))
    turns = [[token for token, _ in group] for is_learned, group in groups if is_learned]
    return [tokenizer.decode(turn, skip_special=False) for turn in turns]


def test_epochs_give_the_number_of_steps(inputs, tmp_path, capsys):
    """16 of 20 rows are not held out: 1.5 passes in steps of 4 rows."""
    dry_run(text_config(inputs, sft__epochs=1.5), workdir=tmp_path / "run", write=print)
    shown = capsys.readouterr().out
    assert "sft.epochs=1.5 of 16 training rows: 6 steps of 4 rows" in shown
    assert "16 training rows; they have 8 to 11 tokens" in shown
    assert '"steps": 6' in shown or "steps = 6" in shown or "steps: 6" in shown
    assert "of which it learns:" in shown
    assert not (tmp_path / "run").exists()
    config = text_config(inputs, sft__epochs=1.5)
    refused("steps .needs sft.epochs=0", check_overrides, config, ["steps"])
    refused("needs a policy that samples", check_overrides, config, ["rollout.top_k"])


def test_a_warm_up_is_compared_with_the_steps_of_the_epochs(inputs):
    warm = {"optimizer__warmup_steps": 5}
    for epochs, steps in ((1.0, 600), (5.0, 4)):
        config = text_config(inputs, sft__epochs=epochs, steps=steps, **warm)
        validate(config)
        if epochs > 1:
            assert settle_text(config)[0].steps == 20
        else:
            refused("warmup_steps=5 with steps=4", settle_text, config)
    refused("warmup_steps=5 with steps=4", validate, text_config(inputs, steps=4, **warm))


@pytest.mark.slow
def test_what_only_samples_need_changes_nothing(inputs, run, tmp_path):
    changes = {"rl.kl_coef": 0.1, "rl.mini_batches": 2, "rl.updates_per_rollout": 2}
    changes |= {"aqn.schedule": "tiny_run:loud", "aqn.correction": "noisy_forward"}
    changes |= {"rl.overlong_buffer": 2, "data.curriculum": "learnability"}
    other = train(text_config(inputs, **changes), workdir=tmp_path / "run")
    assert tiny_run.results(other) == tiny_run.results(run)


def test_a_dry_run_names_the_folder_that_a_run_with_epochs_takes(inputs, run):
    said = []
    dry_run(text_config(inputs, sft__epochs=1.5), write=said.append)
    own = default_folder(settle_text(text_config(inputs, sft__epochs=1.5))[0])
    assert any(line.startswith(f"run folder: {own}, ") for line in said)
    one_pass = text_config(inputs, sft__epochs=1.0)
    dry_run(one_pass, workdir=run, write=said.append)
    assert any("which holds 4 of 4 steps" in line for line in said)
    assert check_start(one_pass, workdir=run)[0].steps == 4
    # To print a config no rows are read, which a hub may have.
    not_read = text_config(inputs, sft__epochs=1.0, data__path="absent.jsonl")
    check_start(not_read, workdir=run, reads_rows=False)
    with not_read.unlocked():
        not_read.seed += 1
    refused("seed: 0 -> 1", check_start, not_read, workdir=run, reads_rows=False)


@pytest.mark.slow
def test_the_example_trains(inputs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(qerl_jax, "get_config", lambda _: inputs.config(), raising=False)
    path = pathlib.Path(__file__).resolve().parents[1] / "examples" / "sft_from_trl.py"
    rows = read_steps(runpy.run_path(str(path))["main"]() / "metrics.jsonl")
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_every_row_is_drawn_once_in_an_epoch(run):
    rows = read_steps(run / "metrics.jsonl")
    assert [row["epoch"] for row in rows] == [0.25, 0.5, 0.75, 1.0]


def test_a_run_that_goes_on_is_the_run_that_was_not_stopped(inputs, run, tmp_path, monkeypatch):
    """Metrics, adapters and the best one, after an end as abrupt as this process can survive."""
    again, calls = tmp_path / "run", itertools.count(1)
    real = qerl_jax.training.loop.take_text_step

    def kill(*arguments, **options):
        if next(calls) == 4:
            raise tiny_run.KilledError
        return real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(qerl_jax.training.loop, "take_text_step", kill)
        with pytest.raises(tiny_run.KilledError):
            train(text_config(inputs), workdir=again)
    assert not (again / "summary.json").exists()
    train(text_config(inputs), workdir=again)
    assert tiny_run.results(again) == tiny_run.results(run)
    for name in (
        "adapter/adapter_model.safetensors",
        "best_adapter/adapter_model.safetensors",
        "best.json",
    ):
        assert (again / name).read_bytes() == (run / name).read_bytes(), name


@pytest.mark.slow  # a process of its own, with programs for two devices
def test_two_devices_compute_the_same(inputs, run, tmp_path):
    config = json.loads((run / "config.json").read_text())["config"]
    changes = SETTINGS | {"data.path": config["data"]["path"], "mesh.data": 2}
    file = inputs.config_file(tmp_path / "config.py", changes)
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    command = [sys.executable, "-m", "experiments.sft", f"--config={file}"]
    command += [f"--workdir={tmp_path / 'run'}"]
    environment = inputs.environment() | {"XLA_FLAGS": flags}
    subprocess.run(command, env=environment, cwd=tiny_run.ROOT, check=True)
    runs = tmp_path / "run", run
    for name in ("loss", "grad_norm", "learned_tokens"):
        found, expected = ([row[name] for row in tiny_run.results(one)] for one in runs)
        assert found == pytest.approx(expected, rel=1e-4), name
    logged = (read_jsonl(one / "metrics.jsonl") for one in runs)
    found, expected = ([row["eval_loss"] for row in rows if "eval_loss" in row] for rows in logged)
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_what_a_run_leaves_is_shown_and_exported(run, tmp_path, capsys):
    show_runs(run)
    shown = capsys.readouterr().out
    assert "eval_loss" in shown
    page = show_runs(run, html=str(tmp_path / "page.html"))
    assert "eval_loss" in page.read_text()
    folder = export(ExportConfig(source=str(run), format="merged", out=str(tmp_path / "merged")))
    assert "the run learned from text" in capsys.readouterr().out
    card = (folder / "README.md").read_text()
    assert "trained with supervised fine-tuning" in card
    assert "sft.rows_per_step" in card
    assert "grpo" not in card.partition("<details>")[0]


def test_grpo_begins_from_the_adapter(inputs, run, tmp_path, capsys):
    changes = {"steps": 1, "eval.every": 0, "aqn.schedule": "off", "init_from": f"{run}:best"}
    grpo = train(inputs.config(changes), workdir=tmp_path / "grpo")
    assert "beginning from the best adapter of step" in capsys.readouterr().out
    step = json.loads((run / "best.json").read_text())["step"]
    assert json.loads((grpo / "config.json").read_text())["init_from"]["step"] == step


@pytest.mark.slow
def test_the_optimizer_of_grpo_starts_anew(inputs, run, tmp_path, capsys):
    changes = {"steps": 1, "eval.every": 0, "aqn.schedule": "off", "init_from": str(run)}
    grpo = train(inputs.config(changes), workdir=tmp_path / "grpo")
    reason = "the optimizer starts anew, as one of the runs learns from rows of text"
    assert reason in capsys.readouterr().out
    assert json.loads((grpo / "config.json").read_text())["init_from"]["step"] == 4


def saved(prompt="t5 t1 t2 ", completion="t6", reward=1.0, *, finished=True, **fields):
    """A row of completions.jsonl."""
    row = {"step": 1, "prompt": prompt, "completion": completion, "reward": reward}
    return row | {"finished": finished} | fields


def read_saved(inputs, folder, *rows, **changes):
    """What is learned of the completions that a run saved, as `encode`."""
    folder.mkdir()
    if rows:
        write_rows(folder / "completions.jsonl", rows)
    changes = {"data__path": "", "eval__every": 0, "sft__completions_of": str(folder)} | changes
    config = text_config(inputs, **changes)
    validate(config)
    prompts = encode_problems(config, from_folder(inputs.model), load_problems(config, {}))
    rows = [row for prompt in prompts["train"] for row in prompt.rows]
    return [tuple(map(list, row)) for row in rows]


def test_completions_of_a_run_with_a_reward(inputs, tmp_path, capsys):
    rows = [saved(), saved(completion="t7", reward=0.9), saved(), saved(finished=False)]
    expected = [([5, 1, 2], [6, END], [True] * 2)]
    assert read_saved(inputs, tmp_path / "a", *rows) == expected
    shown = capsys.readouterr().out
    for words in ("a reward below 1", "the text of another", "no end"):
        assert f"left out 1 problem with {words}" in shown
    lower = read_saved(inputs, tmp_path / "b", *rows, sft__min_reward=0.5)
    assert [row[1] for row in lower] == [[6, END], [7, END]]


def test_completions_of_a_run_that_writes_them_now(inputs, tmp_path):
    """Its last line may be incomplete; and rows of any form measure what was learned."""
    folder = tmp_path / "run"
    folder.mkdir()
    rows = write_rows(folder / "completions.jsonl", [saved(), saved(completion="t7")])
    with open(rows, "a") as file:
        file.write('{"step": 2, "prom')
    path = write_rows(tmp_path / "rows.jsonl", some_rows())
    changes = {"data__path": "", "sft__completions_of": str(folder), "data__eval_path": path}
    problems = load_problems(text_config(inputs, **changes), {})
    assert [problem.answer for problem in problems["train"]] == ["t6", "t7"]
    assert len(problems["eval"]) == 4
    with open(rows, "a") as file:
        file.write("\n{}\n")
    refused("line 3 is not JSON", load_problems, text_config(inputs, **changes), {})


def test_completions_of_questions_that_are_held_out_are_not_learned(inputs, tmp_path, capsys):
    """The run had another system message and wrote the prompts with the chat template."""
    rows = [
        {"prompt": " t5 t6", "completion": "t1"},
        {"messages": [*({"role": "user", "content": text} for text in ("t7", "t8")),
                      {"role": "assistant", "content": "t1"}]},
    ]  # fmt: skip
    path = write_rows(tmp_path / "rows.jsonl", rows)
    asked = [saved(f"t30 {text} t1 t2 ") for text in ("t5 t6", "t8 t7", "t5 t6\n")]
    other = [saved(f"t30 {text} t1 t2 ") for text in ("t5 t66", "at5 t6", "t7 t9", "t5 t9 t6")]
    changes = {"data__eval_path": path, "eval__every": 1}
    learned = read_saved(inputs, tmp_path / "run", *asked, *other, **changes)
    assert len(learned) == len(other)
    assert "left out 3 problems whose question is held out" in capsys.readouterr().out
    words = "no problems for train, as .*rows.jsonl .*has all of its questions"
    refused(words, read_saved, inputs, tmp_path / "all", *asked, **changes)


@pytest.mark.parametrize(
    ("evaluated", "prompt", "is_asked"),
    [
        (["Is 2 > 1?"], "user: Is 2 > 1?Think.", True),  # a question suffix without a space
        (["= 2, why?"], "1 + 1= 2, why?", True),
        (["Is 2 > 1"], "Is 2 > 13?", False),
        (["2 + 2?"], "12 + 2?", False),
        (["a b", "c"], "c; a b", True),
        (["a b", "c"], "a b; cd", False),
        (["a b"], "b a", False),
        ([" ", ""], "a", False),
    ],
)
def test_the_prompts_that_hold_what_is_evaluated(evaluated, prompt, is_asked):
    turns = [{"role": "user", "content": text} for text in evaluated]
    columns = {"messages": [*turns, {"role": "assistant", "content": "x"}], "first": len(turns)}
    asked = SavedSelection().asked_in([Problem("", "", (), columns)], [Problem(prompt, "x")])
    assert asked == ({prompt} if is_asked else set())


def test_completions_of_gpt_oss_are_refused(inputs, tmp_path):
    """Of one without reasoning the file has the answer alone, and no conversation."""
    write_rows(tmp_path / "completions.jsonl", [saved("t5 <|start|>assistant")])
    changes = {"data__path": "", "eval__every": 0, "sft__completions_of": str(tmp_path)}
    config, tokenizer = text_config(inputs, **changes), from_folder(inputs.model)
    template = (pathlib.Path(__file__).parent / "golden" / "gptoss.jinja").read_text()
    of_gpt_oss = dataclasses.replace(tokenizer, chat_template=template)
    problems = load_problems(config, {})
    refused("completions.jsonl:1: .*names of their", encode_problems, config, of_gpt_oss, problems)


@pytest.mark.parametrize(
    ("rows", "changes", "words"),
    [
        ([], {}, "no completions.jsonl"),
        ([saved(reward=0.0)], {}, "1 with a reward below 1 .remedy: lower sft.min_reward"),
        ([saved(reward=None)], {}, "1 with a reward below 1"),
        ([saved(conversation=[])], {}, "completions.jsonl:1.*messages.*data.path"),
        ([saved(prompt="t5")], {}, "completions.jsonl:1.*'t1 t2 '.*model.source"),
        ([saved(prompt=5)], {"sft__min_reward": 2.0}, "reward below 2"),
        ([saved()], {"data__path": "rows.jsonl"}, "completions_of.*data.path.*leave out"),
    ],
)
def test_saved_completions_that_cannot_be_learned(inputs, tmp_path, rows, changes, words):
    refused(words, read_saved, inputs, tmp_path / "run", *rows, **changes)


def test_what_a_run_that_samples_needs_is_refused(inputs):
    talks = text_config(inputs, environment__function="my_env:Game")
    refused("sft.rows_per_step=4 with environment.function", validate, talks)
    taught = text_config(inputs, teacher__source="a/b")
    refused("sft.rows_per_step=4 with teacher.source", validate, taught)
    config = text_config(inputs)
    refused("needs a policy that samples", check_overrides, config, ["rewards.format.weight"])
    refused("needs a policy that samples", check_overrides, config, ["teacher.coef"])
    check_overrides(config, ["sft.max_tokens", "eval.problems", "data.path", "lora.rank", "steps"])
    refused("needs rows of text", check_overrides, inputs.config(), ["sft.epochs"])
    no_rows = sft.get_config()
    no_rows.sft.rows_per_step = 0
    line = refused("sft.rows_per_step=0: .* at least 1", validate, no_rows)
    assert "pass --config.sft.rows_per_step=16" in line
    refused("rewards with sft.rows_per_step", train, config, rewards={"a": (tiny_run.rare, 1.0)})
    refused("sft.rows_per_step.*qerl_jax.train", open_session, config)
    refused(
        "sft.max_tokens=129: the model has 128 positions.*=128 or less",
        train,
        text_config(inputs, sft__max_tokens=129),
    )


def test_the_plan_has_no_rollout(inputs):
    config = text_config(inputs)
    architecture = tiny_run.architecture(inputs.model)
    plan = plan_run(config, architecture, Device(10**9, "mma", 8.9))
    assert plan.fits
    assert plan.rollout_peak == plan.weights + plan.training
    assert plan.longest.prompt - 1 + plan.longest.new_tokens == 24
    text = format_plan(plan, config)
    assert "keys" not in text
    assert "update buffer" in text
    small = plan_run(config, architecture, Device(10**5, "mma", 8.9))
    refused("smaller model|sft.max_tokens", check_fits, small, config, architecture)
