"""Tokenizers and chats of Mistral in both of its layouts equal those of transformers."""

import json

import pytest
import tokenizers
import transformers
from refusal import refused
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from qerl_jax.data.prompts import Problem, PromptConfig, render_prompt
from qerl_jax.weights import tokenizer

CONTROL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
WORDS = ["What", "is", "3", "plus", "4", "The", "sum", "says", "Be", "brief", "42", "it"]
# In the form of Mistral-7B-Instruct-v0.3: roles alternate, the system message stands in the last
# turn of the user, and the template itself begins with <s> and has no generation prompt.
TEMPLATE = """
{%- if messages[0]["role"] == "system" %}
    {%- set system, turns = messages[0]["content"], messages[1:] %}
{%- else %}
    {%- set turns = messages %}
{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set users = turns | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for message in turns %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("roles must alternate user/assistant/user/assistant/...") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in turns %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and message == users[-1] %}{{- "[TOOLS]" }}{%- endif %}
        {%- if loop.last and system is defined %}
            {{- "[INST] " + system + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""


def bpe(pieces):
    """A vocabulary and merges that make each piece from the left to the right."""
    alphabet = sorted({letter for piece in pieces for letter in piece})
    merges = [(piece[:end], piece[end]) for piece in pieces for end in range(1, len(piece))]
    return alphabet, list(dict.fromkeys(merges))


def sentencepiece():
    """The layout of version 0.3: SentencePiece's BPE with byte fallback."""
    alphabet, merges = bpe(["▁" + word for word in WORDS])
    tokens = [*CONTROL, *(f"<0x{byte:02X}>" for byte in range(256)), *alphabet]
    tokens = list(dict.fromkeys([*tokens, *(a + b for a, b in merges)]))
    vocabulary = {token: i for i, token in enumerate(tokens)}
    made = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return made


def tekken():
    """The layout of Mistral-Nemo: byte-level BPE that keeps words of the vocabulary whole."""
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet())]
    _, merges = bpe(["Ġ" + word for word in WORDS])
    tokens = list(dict.fromkeys([*CONTROL, *letters, *(a + b for a, b in merges)]))
    vocabulary = {token: i for i, token in enumerate(tokens)}
    made = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    split = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    return made


@pytest.fixture(params=[sentencepiece, tekken], ids=lambda make: make.__name__)
def folder(request, tmp_path):
    """A folder with the files of the tokenizer, as on the hub."""
    made = request.param()
    made.add_special_tokens(CONTROL)
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "chat_template": TEMPLATE,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    (tmp_path / "generation_config.json").write_text(json.dumps(ends))
    return tmp_path


CHATS = [
    [{"role": "user", "content": "What is 3 plus 4?"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is it?\n\n The  sum"},
        {"role": "assistant", "content": "42"},
        {"role": "user", "content": "And 4 ∑ é 🙂?"},
    ],
]


@pytest.mark.parametrize("chat", CHATS, ids=["one turn", "several turns"])
def test_chats_have_the_text_and_the_ids_of_transformers(folder, chat):
    ours, theirs = tokenizer.from_folder(folder), transformers.AutoTokenizer.from_pretrained(folder)
    text = ours.apply_chat_template(chat)
    assert text == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = ours.encode(text)
    expected = theirs.apply_chat_template(
        chat, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert ids == expected
    assert ids.count(1) == 1 == ids.index(1) + 1  # One <s>, the first.
    assert ids[-1] == 4
    assert CONTROL[3] not in ours.decode(ids)


@pytest.mark.parametrize("text", ["The sum is 42.", " it  says\n42", "∑ é 🙂", "says it"])
def test_completions_have_the_text_of_transformers(folder, text):
    ours, theirs = tokenizer.from_folder(folder), transformers.AutoTokenizer.from_pretrained(folder)
    ids = [*ours.encode(text), 2]
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == text


def test_ends_and_padding(folder):
    made = tokenizer.from_folder(folder)
    assert made.eos_ids == (2,)
    assert made.pad_id == 2  # Mistral names no padding.
    again_folder = folder / "again"
    again_folder.mkdir()
    for name, content in tokenizer.to_files(made).items():
        (again_folder / name).write_bytes(content)
    again = tokenizer.from_folder(again_folder)
    assert again.apply_chat_template(CHATS[1]) == made.apply_chat_template(CHATS[1])
    assert again.encode("What is 3?") == made.encode("What is 3?")


def test_a_problem_is_rendered_as_one_turn(folder):
    made = tokenizer.from_folder(folder)
    problem = Problem("What is 3 plus 4?", "7")
    text = render_prompt(problem, made, PromptConfig("Be brief.", " Say it."))
    assert text == "<s>[INST] Be brief.\n\nWhat is 3 plus 4? Say it.[/INST]"
    twice = Problem("a\nb", "1", messages=(("user", "a"), ("user", "b")))
    refused("the chat template failed: roles must alternate user/ass", render_prompt, twice, made)


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.model.v3", "tekken.json"])
def test_other_forms_of_a_tokenizer_are_named(folder, name):
    (folder / "tokenizer.json").unlink()
    (folder / name).touch()
    refused(rf"no tokenizer .*: {name} is another program's form of", tokenizer.from_folder, folder)
