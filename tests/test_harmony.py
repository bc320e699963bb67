"""Turns of gpt-oss: channels and calls as openai-harmony reads them, and replies that append."""

import dataclasses
import itertools
import json
import operator
import pathlib
import types

import numpy as np
import pytest
import tiny_run
import tokenizers
from refusal import refused
from tokenizers import decoders, models, pre_tokenizers

from qerl_jax.config.experiments.grpo_gsm8k import get_config
from qerl_jax.data.environment_config import _reply_writer, make_runner
from qerl_jax.data.prompts import Problem
from qerl_jax.data.texts import SavedSelection, TextSelection, encode_texts
from qerl_jax.environments import harmony
from qerl_jax.environments.tools import message_of, read_calls, tool_format
from qerl_jax.evaluation.sample import stream_text
from qerl_jax.show.view import conversation_of
from qerl_jax.system.jsonl import read_jsonl
from qerl_jax.training.loop import train
from qerl_jax.training.saving import sample_rows
from qerl_jax.weights import tokenizer as tokenizer_lib

GOLDEN = pathlib.Path(__file__).parent / "golden"
FACTS = json.loads((GOLDEN / "harmony.json").read_text(encoding="utf-8"))
TEMPLATE = (GOLDEN / "gptoss.jinja").read_text(encoding="utf-8")  # TRL 1.16.0, Apache-2.0
MARKS = ("start", "end", "message", "channel", "constrain", "return", "call", "endoftext")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer of single bytes as a folder, whose files name one of the two ends alone."""
    path = tmp_path_factory.mktemp("gpt_oss")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([f"<|{mark}|>" for mark in MARKS])
    backend.save(str(path / "tokenizer.json"))
    settings = {"eos_token": "<|return|>", "pad_token": "<|endoftext|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return tokenizer_lib.from_folder(folder)


@pytest.mark.parametrize("case", FACTS["cases"], ids=range(len(FACTS["cases"])))
def test_messages_are_those_of_openai_harmony(case, tokenizer):
    for text in (case["text"], case["text"].removesuffix("<|return|>").removesuffix("<|call|>")):
        assert [list(message) for message in harmony.messages_of(text)] == case["messages"]
    answers = [text for channel, to, text in case["messages"] if channel == "final" and not to]
    assert tokenizer.answer(tokenizer.encode(case["text"])) == "\n".join(answers)
    assert all(tokenizer.backend.token_to_id(x) in tokenizer.eos_ids for x in FACTS["end_tokens"])
    calls = read_calls(case["text"], "harmony", tools=TOOLS)
    recipients = [to for _, to, _ in case["messages"] if to]
    assert [call.name for call in calls] == [
        to.removeprefix("functions.") if "functions." in to else "" for to in recipients
    ]
    message = message_of(case["text"], calls, "harmony")
    if not any(call.error for call in calls):
        assert all(call.arguments == {"a": 1, "b": [2, "x\n"]} for call in calls)
        said = answers or [m[2] for m in case["messages"] if m[0] == "commentary" and not m[1]]
        assert message["content"] == "\n".join(said).strip()
        thoughts = [m[2] for m in case["messages"] if m[0] == "analysis" and not m[1]]
        assert message.get("reasoning_content", "") == "\n".join(thoughts).strip()
        assert len(message.get("tool_calls", ())) == len(recipients)


@pytest.mark.parametrize(
    ("text", "name", "error"),
    [
        (" to=functions.add<|channel|>commentary json<|message|>{'a': 1}", "", "not valid JSON"),
        (" to=functions.add<|channel|>commentary json<|message|>[1]", "add", "no JSON object"),
        (" to=python<|channel|>analysis code<|message|>1", "", "expected to=functions.NAME"),
        ("to=functions.<|channel|>commentary<|message|>{}", "", "expected to=functions.NAME"),
    ],
)
def test_calls_that_cannot_be_read(text, name, error):
    (call,) = read_calls(text, "harmony")
    assert call.name == name
    assert error in call.error
    assert message_of(text, [call], "harmony")["content"] == text.strip()


def test_what_is_no_message():
    call = "<|channel|>commentary to=functions.add json<|message|>{}"
    both = read_calls(f"{call}<|end|><|start|>assistant{call}", "harmony")
    assert [call.error for call in both] == ["", "a turn has one call"]
    for text in ("4", "<|channel|>final", "<|end|><|start|>user<|channel|>final<|message|>4"):
        assert harmony.answer(text) == ""
        assert read_calls(text, "harmony") == []
    assert harmony.answer("<|channel|>final<|message|>4<|endoftext|>") == "4"


def test_people_see_all_channels(tokenizer):
    """A streamed answer names them while it grows; a row of a run has them before its answer."""
    call = "<|end|><|start|>assistant<|channel|>commentary to=functions.add<|message|>{}<|call|>"
    final = "<|end|><|start|>assistant<|channel|>final<|message|>It is 4.<|return|>"
    think = "<|channel|>analysis<|message|>2 + 2 é"
    ids, written = tokenizer.encode(think + final), []
    show = stream_text(tokenizer, written.append)
    for end in range(len(ids) + 1):
        show(ids[:end])
    show(ids, final=True)
    assert "".join(written) == "[analysis]\n2 + 2 é\n\n[final]\nIt is 4."
    assert tokenizer.reasoning(ids) == [("analysis", "2 + 2 é")]
    said = tokenizer.reasoning(tokenizer.encode(think + call))
    assert said == [("analysis", "2 + 2 é"), ("commentary to=functions.add", "{}")]
    garbage, written = tokenizer.encode("four"), []
    stream_text(tokenizer, written.append)(garbage, final=True)
    assert written == ["four"]
    plain = dataclasses.replace(tokenizer, chat_template="{{ messages }}")
    assert plain.reasoning(ids) == []
    assert plain.transcript(ids) == plain.answer(ids) == plain.decode(ids)
    logged = [logged_row(one, ids) for one in (tokenizer, plain)]
    assert logged[0]["completion"] == "It is 4."
    turns = [("assistant analysis", "2 + 2 é"), ("assistant", "It is 4.")]
    assert conversation_of(logged[0]) == turns
    assert "conversation" not in logged[1]


def logged_row(tokenizer, ids):
    """The row of completions.jsonl of a rollout that has one completion."""
    experience = types.SimpleNamespace(
        texts=[tokenizer.answer(ids)],
        rollout=types.SimpleNamespace(tokens=np.array([ids]), lengths=[len(ids)]),
        row_prompts=[types.SimpleNamespace(text="2 + 2?", problem=Problem("2 + 2?", "4"))],
        scores=types.SimpleNamespace(total=np.ones(1), parts={}),
        lengths=[len(ids)],
        finished=[True],
        owners=None,
        episodes=[],
    )
    result = types.SimpleNamespace(experience=experience, advantages=np.zeros(1))
    (row,) = sample_rows(result, 1, 1, tokenizer=tokenizer)
    return row


@pytest.mark.slow  # 40 s
def test_rewards_of_a_run_get_the_answer_and_the_number_of_all_tokens(
    folder, tmp_path, compile_cache
):
    """What a random policy writes has no final channel, so every answer is empty."""
    tiny = tiny_run.write_tiny(
        tmp_path, compile_cache, model_type="gpt_oss", vocab_size=272, max_position=1024
    )
    for file in folder.iterdir():
        (tiny.model / file.name).write_bytes(file.read_bytes())
    (tiny.model / "generation_config.json").unlink()
    seen = []

    def reward(prompt, completion, answer, num_tokens, finished):
        seen.append((completion, num_tokens))
        return num_tokens / 6

    changes = {"model.format": "mxfp4", "lora.targets": ("q_proj",), "steps": 1, "eval.every": 1}
    changes |= {"data.max_prompt_tokens": 700, "aqn.schedule": "off", "checkpoint.every": 1}
    config = tiny.config(changes)
    run = train(config, workdir=tmp_path / "run", rewards={"correctness": (reward, 1.0)})
    assert {completion for completion, _ in seen} == {""}
    assert max(count for _, count in seen) == config.rollout.max_new_tokens
    rows = read_jsonl(run / "completions.jsonl")
    assert {row["completion"] for row in rows} == {""}
    assert all(row["reward"] == pytest.approx(row["tokens"] / 6) for row in rows)


def test_the_format_of_the_template(tokenizer):
    assert tool_format(tokenizer.chat_template) == "harmony"
    text = tokenizer.apply_chat_template([{"role": "user", "content": "2 + 2?"}], tools=TOOLS)
    assert "type add = (_: {\na?: number,\n}) => any;" in text
    assert text.endswith("<|start|>user<|message|>2 + 2?<|end|><|start|>assistant")


def test_replies_of_tools_append(tokenizer, capsys):
    writer = _reply_writer(tokenizer, {"reasoning_effort": "low"}, calls=True, system="Add.")
    ids = writer.write(["4"], [("add", "")])
    assert tokenizer.decode(ids, skip_special=False) == (
        '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"4"<|end|>'
        "<|start|>assistant"
    )
    assert tokenizer.backend.id_to_token(writer.end_id()) == "<|call|>"
    assert not capsys.readouterr().out


def test_replies_of_the_user_append_to_turns_that_stay(tokenizer, capsys):
    """OpenAI's template would drop their reasoning, and end them in another way."""
    writer = _reply_writer(tokenizer, {}, calls=False, system="Be brief.")
    assert "the reasoning of earlier turns stays" in capsys.readouterr().out
    ids = writer.write(["And 3?"])
    want = "<|start|>user<|message|>And 3?<|end|><|start|>assistant"
    assert tokenizer.decode(ids, skip_special=False) == want
    turns = [
        {"role": "user", "content": "2?"},
        {"role": "assistant", "content": "4", "thinking": "Two."},
        {"role": "user", "content": "3?"},
    ]
    keeping = writer.tokenizer
    texts = [
        keeping.apply_chat_template(turns[:count], add_generation_prompt=count != 2)
        for count in (1, 2, 3)
    ]
    assert texts[1].startswith(texts[0])
    assert texts[2] == f"{texts[1]}<|start|>user<|message|>3?<|end|><|start|>assistant"
    assert "<|channel|>analysis<|message|>Two.<|end|>" in texts[2]
    assert texts[0] == tokenizer.apply_chat_template(turns[:1])


def test_another_template_that_changes_turns_is_refused(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    own = TEMPLATE.replace('+ message.content + "<|end|>"', '~ message.content ~ "<|end|>"')
    (tmp_path / "chat_template.jinja").write_text(own)
    other = tokenizer_lib.from_folder(tmp_path)
    options = {"calls": False, "system": ""}
    refused("writes earlier turns in another way", _reply_writer, other, {}, **options)
    _reply_writer(other, {}, calls=True, system="")


def learned_turns(tokenizer, reads, row):
    """What supervised fine-tuning learns of a row, with the context between turns in brackets."""
    config = get_config()
    config.update_from_flattened_dict({"data.system_prompt": "", "sft.max_tokens": 2000})
    prompts = encode_texts(config, tokenizer, [reads.read(row, "rows:1")], "rows")
    (learned,) = prompts[0].rows
    parts = itertools.groupby(
        zip(learned.completion, learned.learned, strict=True), key=operator.itemgetter(1)
    )
    texts = [
        (is_own, tokenizer.decode([i for i, _ in p], skip_special=False)) for is_own, p in parts
    ]
    return "".join(text if is_own else f"[{text}]" for is_own, text in texts)


@pytest.mark.parametrize("name", ["thinking", "reasoning_content"])
def test_reasoning_of_rows_is_learned_in_its_channel(name, tokenizer):
    """Whichever name a row has for it, and also of turns before the last one."""
    turns = ("2?", "Two.", "4"), ("3?", "Three.", "9")
    messages = [
        message
        for question, thought, said in turns
        for message in (
            {"role": "user", "content": question},
            {"role": "assistant", "content": said, name: thought},
        )
    ]
    written = [
        f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant"
        f"<|channel|>final<|message|>{said}<|return|>"
        for _, thought, said in turns
    ]
    between = "[<|start|>user<|message|>3?<|end|><|start|>assistant]"
    learned = learned_turns(tokenizer, TextSelection(rewards=()), {"messages": messages})
    assert learned == between.join(written)


def test_a_saved_answer_is_not_learned_without_its_channel(tokenizer):
    """Also of a completion that has a final message alone."""
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "2?"}])
    row = {"prompt": prompt, "completion": "4", "reward": 1.0, "finished": True}
    refused("rows:1: .*of gpt-oss.*messages", learned_turns, tokenizer, SavedSelection(), row)


def test_a_taskset_of_verifiers_is_refused(tokenizer):
    config = get_config()
    config.environment.verifiers = "tasks"
    refused("environment.verifiers=tasks: no renderer", make_runner, config, tokenizer)
