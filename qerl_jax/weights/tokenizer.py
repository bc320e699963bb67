"""Turns text into token ids and back, with the chat template and every id that ends a reply."""

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from qerl_jax.environments import harmony
from qerl_jax.errors import UserError, first_line
from qerl_jax.system import json_file
from qerl_jax.system.safe_files import read_bytes, read_text
from qerl_jax.weights.added_tokens import mark_special, read_added_tokens
from qerl_jax.weights.chat_template import render, to_json, variables

# Tokens that end a turn or a document in the supported families. With a GGUF file they end a reply
# in addition to the tokens that the file names, whatever their type, as in llama.cpp. With a folder
# only the tokens that its files name end a reply, as in transformers' generate() and vLLM; these
# are used where the files name none.
_END_TOKENS = (
    *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>"),
    *harmony.END_TOKENS,
)
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Marks belong to the letters before them.
_QWEN3_5_SPLIT = _QWEN2_SPLIT.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(
    r"\s\p{L}", r"\s\p{L}\p{M}"
)
_SPLITS = {
    "qwen2": _QWEN2_SPLIT,
    "qwen35": _QWEN3_5_SPLIT,
    "llama-bpe": _QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|"),
    # gpt-oss; contractions belong to the word before them.
    "gpt-4o": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    # Mistral Nemo and later
    "tekken": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
_PRE_TOKENIZERS = ("smollm", *_SPLITS)
# Those with which llama.cpp keeps a word that is in the vocabulary whole, whatever the merges say,
# and begins a text with the first token of a sequence where the file does not say otherwise.
_WHOLE_WORDS = ("llama-bpe", "tekken")
# Files of SentencePiece and of mistral-common (Tekken), which hold a tokenizer in other forms.
_OTHER_FILES = ("tokenizer.model", "tokenizer.model.v3", "tekken.json")
TEMPLATES = "additional_chat_templates"  # folder with the templates of a model by their names
# What conversations with tools have with SmolLM2, whose own chat template knows none.
_SMOLLM_TOOLS = pathlib.Path(__file__).with_name("smollm_tools.jinja")
# Token types in GGUF.
_NORMAL = 1
_CONTROL = 3
_USER_DEFINED = 4
_UNUSED = 5
# Added tokens that llama.cpp's converter takes for special ones, whatever the tokenizer says.
_CONTROL_TEXTS = ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
_CONTROL_ENDS = ("<|", "|>"), ("<\uff5c", "\uff5c>"), ("<unused", ">")
_MORE_ENDS = ("eot", "eom")  # Tokens in addition to eos that end a reply, by their names in GGUF.


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A tokenizer with its chat template."""

    backend: tokenizers.Tokenizer  # the tokenizer of the `tokenizers` package
    chat_template: str | None  # the chat template in Jinja, or None
    # Texts of special tokens by their name in templates, such as 'eos_token'.
    special_tokens: Mapping[str, str]
    eos_ids: tuple[int, ...]  # every id that ends a reply, ascending
    pad_id: int  # the id that pads rows; its positions are never read
    template_source: str = ""  # what holds the chat template, for error messages; may be ''
    # The chat template named `tool_use`, which conversations with tools have, and what holds it.
    tool_template: str | None = None
    tool_template_source: str = ""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, including the ids of added tokens."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text; special tokens in it are recognized, and none are added."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Returns the text of token ids, by default without the special tokens."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def answer(self, ids: Iterable[int]) -> str:
        """Returns the text of a reply that rewards get: of gpt-oss the final channel alone.

        Of others it is that of `decode`.
        """
        if self._is_harmony:
            return harmony.answer(self.decode(ids, skip_special=False))
        return self.decode(ids)

    def transcript(self, ids: Iterable[int]) -> str:
        """Returns the text of a reply for people: of gpt-oss with all channels and their names."""
        if self._is_harmony:
            return harmony.transcript(self.decode(ids, skip_special=False))
        return self.decode(ids)

    def reasoning(self, ids: Iterable[int]) -> list[tuple[str, str]]:
        """Returns what `answer` leaves out: the names of messages of gpt-oss, and their texts."""
        if self._is_harmony:
            return harmony.other_messages(self.decode(ids, skip_special=False))
        return []

    @property
    def _is_harmony(self) -> bool:
        return harmony.is_harmony(self.chat_template or "")

    def keeping_history(self) -> "Tokenizer":
        """Returns the tokenizer with a chat template of gpt-oss that keeps earlier turns."""
        if not self._is_harmony:
            return self
        template = harmony.keeping_history(self.chat_template or "")
        return dataclasses.replace(self, chat_template=template)

    def has_special(self, text: str) -> bool:
        """Returns whether a text holds a special token, which `decode` leaves out by default."""
        added = self.backend.get_added_tokens_decoder().values()
        return any(token.special and token.content in text for token in added)

    def for_tools(self) -> "Tokenizer":
        """Returns the tokenizer with the chat template of conversations with tools.

        It is the one named `tool_use`, where the tokenizer has several, as in transformers.
        """
        if self.tool_template is None:
            return self
        return dataclasses.replace(
            self,
            chat_template=self.tool_template,
            template_source=self.tool_template_source,
            tool_template=None,
        )

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **arguments: Any,
    ) -> str:
        """Renders a conversation.

        Args:
            messages: dicts with 'role' and 'content'.
            add_generation_prompt: whether to append the beginning of the assistant's reply.
            tools: JSON schemas of tools that the policy may call; None for no tools.
            **arguments: further variables of the template, such as Qwen3's `enable_thinking`.

        Raises:
            UserError: the tokenizer has no chat template, the template rejects the messages, or it
                does not read an argument.
        """
        if tools is not None and self.tool_template is not None:
            return self.for_tools().apply_chat_template(
                messages, add_generation_prompt=add_generation_prompt, tools=tools, **arguments
            )
        if self.chat_template is None:
            raise UserError("the tokenizer has no chat template; use an instruction-tuned model")
        standard_variables = {"messages": messages, "tools": tools, "documents": None}
        standard_variables |= {
            "add_generation_prompt": add_generation_prompt,
            **self.special_tokens,
        }
        try:
            read = variables(self.chat_template) if arguments else frozenset()
            unread = [name for name in arguments if name not in read or name in standard_variables]
            if not unread:
                return render(self.chat_template, standard_variables | arguments)
        except Exception as error:  # a template is a program and can raise any class
            kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
            message = " ".join(str(error).split())  # syntax errors quote their lines
            raise UserError(
                f"{self._source_prefix}the chat template failed: {kind}{message:.300}"
            ) from error
        others = sorted(read - standard_variables.keys())
        raise UserError(
            f"{self._source_prefix}the chat template does not read {', '.join(unread)} of "
            f"data.chat_template_args; it reads {', '.join(others) or 'no argument'}: leave out "
            "the others, --config.data.chat_template_args={} leaves out all"
        )

    def check_kept(self, messages: Sequence[Mapping[str, str]], text: str) -> None:
        """Checks that a rendered conversation holds the text of its messages.

        Args:
            messages: dicts with 'role' and 'content', as in `apply_chat_template`.
            text: the rendered conversation.

        Raises:
            UserError: the template left out a message; whitespace may differ.
        """
        flat_text, position = " ".join(text.split()), 0
        for message in messages:
            content = " ".join(message["content"].split())
            # Most templates keep the order, in which the text is searched once.
            found = flat_text.find(content, position)
            found = flat_text.find(content) if found < 0 else found
            position = found + len(content)
            if found < 0:
                raise UserError(
                    f"{self._source_prefix}the chat template leaves out the {message['role']} "
                    f"message {message['content']!r:.100}; correct the template, or leave out the "
                    "message"
                )

    @property
    def _source_prefix(self) -> str:
        return f"{self.template_source}: " if self.template_source else ""


def from_folder(folder: pathlib.Path | str) -> Tokenizer:
    """Reads the tokenizer of a Hugging Face folder.

    Args:
        folder: folder with tokenizer.json or vocab.json and, optionally, the other tokenizer files.

    Raises:
        UserError: the folder has no tokenizer, or one of its files is malformed.
    """
    folder = pathlib.Path(folder)
    backend = _read_backend(folder)
    backend.no_padding()
    backend.no_truncation()
    settings = _read_json(folder / "tokenizer_config.json")
    special_tokens = read_added_tokens(folder, settings, backend)
    eos_ids, others = [], []
    for file in ("generation_config.json", "config.json"):
        content = _read_json(folder / file)
        ids = content.get("eos_token_id")
        eos_ids += ids if isinstance(ids, list) else [ids]
        others += [content.get("bos_token_id"), content.get("pad_token_id")]
    added = backend.get_added_tokens_decoder()
    mark_special(backend, [added[i].content for i in others if type(i) is int and i in added])
    return _finish(
        backend,
        templates=_read_chat_templates(folder, settings),
        special_tokens=special_tokens,
        eos_ids=eos_ids,
        pad_id=None,
        well_known=False,
    )


def missing(folder: pathlib.Path) -> str:
    """Says which file of the tokenizer a folder lacks, and where it comes from."""
    remedy = "copy it from the model that this one was made from"
    if other := next((name for name in _OTHER_FILES if (folder / name).exists()), None):
        remedy = (
            f"{other} is another program's form of it, which transformers converts: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    return f"there is no tokenizer (tokenizer.json or vocab.json); a policy needs one: {remedy}"


def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Builds the tokenizer that the metadata of a GGUF file describes.

    Raises:
        UserError: the metadata is incomplete, or describes a tokenizer that is not supported.
    """
    model = metadata.get("tokenizer.ggml.model")
    pre: Any = metadata.get("tokenizer.ggml.pre")
    if model != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise UserError(
            f"GGUF tokenizer {model!r:.50} with pre-tokenizer {pre!r:.50} is not supported; "
            f"supported: 'gpt2' with {', '.join(_PRE_TOKENIZERS)}; pass the folder of the model"
        )
    tokens = _metadata_list(metadata, "tokens", str)
    types = _metadata_list(metadata, "token_type", int)
    merges = [tuple(merge.split(" ")) for merge in _metadata_list(metadata, "merges", str)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if not tokens or len(types) != len(tokens) or any(len(merge) != 2 for merge in merges):
        raise UserError("the tokenizer metadata of the GGUF file is incomplete or malformed")
    try:
        bpe = models.BPE(vocabulary, merges, ignore_merges=pre in _WHOLE_WORDS)
    except Exception as error:  # tokenizers raises no narrower class
        raise UserError(f"the tokenizer metadata of the GGUF file is malformed: {error}") from error
    backend = tokenizers.Tokenizer(bpe)
    backend.pre_tokenizer = _pre_tokenizer(pre)
    if pre in ("qwen2", "qwen35"):
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(
        [
            tokenizers.AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    ids = {
        key: metadata.get(f"tokenizer.ggml.{name}_token_id")
        for key, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
    }
    special_tokens = {
        f"{key}_token": tokens[i]
        for key, i in ids.items()
        if i is not None and _token_id(i) < len(tokens)
    }
    if metadata.get("tokenizer.ggml.add_bos_token", pre in _WHOLE_WORDS):
        backend.post_processor = _bos_first(special_tokens.get("bos_token"), ids["bos"])
    templates = {
        name: (metadata.get(key), f"{key} of the GGUF file")
        for name, key in (
            ("default", "tokenizer.chat_template"),
            ("tool_use", "tokenizer.chat_template.tool_use"),
        )
    }
    if pre == "smollm" and "<|im_start|>" in vocabulary and templates["tool_use"][0] is None:
        templates["tool_use"] = _SMOLLM_TOOLS.read_text("utf-8"), _SMOLLM_TOOLS.name
    return _finish(
        backend,
        templates=templates,
        special_tokens=special_tokens,
        eos_ids=[ids["eos"], *(metadata.get(f"tokenizer.ggml.{x}_token_id") for x in _MORE_ENDS)],
        pad_id=backend.token_to_id(special_tokens.get("pad_token", "")),
        well_known=True,
    )


def to_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Returns the files of a tokenizer by name, as `from_folder` and transformers read them."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "pad_token": tokenizer.backend.id_to_token(tokenizer.pad_id),
        **tokenizer.special_tokens,
    }
    files = {
        "tokenizer.json": tokenizer.backend.to_str(pretty=True),
        "tokenizer_config.json": to_json(settings, indent=2) + "\n",
        "generation_config.json": to_json(token_ids(tokenizer), indent=2) + "\n",
    }
    if tokenizer.chat_template is not None:
        files["chat_template.jinja"] = tokenizer.chat_template
    if tokenizer.tool_template is not None:
        files[f"{TEMPLATES}/tool_use.jinja"] = tokenizer.tool_template
    return {name: text.encode() for name, text in files.items()}


def to_gguf(tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    """Returns the metadata of a GGUF file that describe a tokenizer, as llama.cpp's converter does.

    Ids without a token, up to `vocab_size`, get the names [PAD0] and so on.

    Raises:
        UserError: it is no byte-level BPE with a pre-tokenizer that `from_gguf` knows.
    """
    backend = tokenizer.backend
    model = json.loads(backend.to_str())["model"]
    is_bpe = model["type"] == "BPE" and isinstance(backend.decoder, decoders.ByteLevel)
    if not is_bpe or (pre := _pre_name(backend)) is None:
        raise UserError(
            f"the tokenizer ({model['type']}) has no name in GGUF that is known here: it must be a "
            f"byte-level BPE with a pre-tokenizer of {', '.join(_PRE_TOKENIZERS)}; export with "
            "--format=merged, and convert that folder with llama.cpp's convert_hf_to_gguf.py"
        )
    added, tokens = backend.get_added_tokens_decoder(), [f"[PAD{i}]" for i in range(vocab_size)]
    types = [_UNUSED] * vocab_size
    for token, i in backend.get_vocab(with_added_tokens=True).items():
        looks_special = token in _CONTROL_TEXTS or any(
            token.startswith(begin) and token.endswith(end) for begin, end in _CONTROL_ENDS
        )
        kind = _CONTROL if looks_special or (i in added and added[i].special) else _USER_DEFINED
        tokens[i], types[i] = token, kind if i in added else _NORMAL
    roles = {name: backend.token_to_id(text) for name, text in tokenizer.special_tokens.items()}
    # llama.cpp finds well-known ends by itself.
    first, *others = sorted(tokenizer.eos_ids, key=lambda i: (i != roles.get("eos_token"), i))
    ends = [first, *(i for i in others if tokens[i] not in _END_TOKENS)]
    ids = dict(zip(("eos", *_MORE_ENDS), ends, strict=False))
    ids |= {"bos": roles.get("bos_token"), "padding": tokenizer.pad_id}
    ids |= {"unknown": roles.get("unk_token")}
    found = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [
            m if isinstance(m, str) else " ".join(m) for m in model["merges"]
        ],
    } | {f"tokenizer.ggml.{name}_token_id": i for name, i in ids.items() if i is not None}
    begins = ids["bos"] is not None and backend.encode("a").ids[0] == ids["bos"]
    found["tokenizer.ggml.add_bos_token"] = begins
    if tokenizer.chat_template is not None:
        found["tokenizer.chat_template"] = tokenizer.chat_template
    if tokenizer.tool_template is not None:
        found["tokenizer.chat_templates"] = ["tool_use"]
        found["tokenizer.chat_template.tool_use"] = tokenizer.tool_template
    return found


def token_ids(tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns the special token ids under their keys in config.json and generation_config.json."""
    bos_id = tokenizer.backend.token_to_id(tokenizer.special_tokens.get("bos_token", ""))
    ids = {
        "bos_token_id": bos_id,
        "eos_token_id": list(tokenizer.eos_ids),
        "pad_token_id": tokenizer.pad_id,
    }
    return {key: value for key, value in ids.items() if value is not None}


def _finish(
    backend: tokenizers.Tokenizer,
    *,
    templates: Mapping[str, tuple[str | None, str]],
    special_tokens: Mapping[str, Any],
    eos_ids: Sequence[int | None],
    pad_id: int | None,
    well_known: bool,
) -> Tokenizer:
    """Builds a Tokenizer.

    `templates` are chat templates by name, each with what holds it. The `eos_ids` of the tokenizer
    are the argument, the id of its `eos_token` and, with `well_known`, those of well-known end
    tokens.
    """
    chat_template, template_source = templates.get("default", (None, ""))
    tool_template, tool_template_source = templates.get("tool_use", (None, ""))
    texts = {"chat_template": chat_template or "", "tool_use template": tool_template or ""}
    for name, text in {**texts, **special_tokens}.items():
        if not isinstance(text, str):
            raise UserError(f"the tokenizer's {name} is {text!r:.50}, must be a string")
    eos_id = backend.token_to_id(special_tokens.get("eos_token", ""))
    end_ids = {_token_id(i) for i in (*eos_ids, eos_id) if i is not None}
    if well_known:
        end_ids |= {i for i in map(backend.token_to_id, _END_TOKENS) if i is not None}
    elif not end_ids:
        added = backend.get_added_tokens_decoder()
        end_ids |= {
            i for i, token in added.items() if token.special and token.content in _END_TOKENS
        }
    if not end_ids:
        raise UserError("the tokenizer names no end-of-sequence token")
    of_turns = map(backend.token_to_id, harmony.END_TOKENS)
    both = {i for i in of_turns if i is not None}
    if both & end_ids:  # A turn of gpt-oss ends with an answer or a call.
        end_ids |= both
    if pad_id is None and "pad_token" in special_tokens:
        pad_id = backend.token_to_id(special_tokens["pad_token"])
    # Tokens with a role and ends are special, whatever their type in the files.
    ends = [backend.id_to_token(i) for i in sorted(end_ids)]
    mark_special(backend, [*special_tokens.values(), *(text for text in ends if text is not None)])
    return Tokenizer(
        backend=backend,
        chat_template=chat_template,
        special_tokens=special_tokens,
        eos_ids=tuple(sorted(end_ids)),
        pad_id=min(end_ids) if pad_id is None else pad_id,
        template_source=template_source,
        tool_template=tool_template,
        tool_template_source=tool_template_source,
    )


def _metadata_list(metadata: Mapping[str, Any], name: str, kind: type) -> list:
    """Returns a list from a GGUF file's metadata, or [] where it is absent."""
    values = metadata.get(f"tokenizer.ggml.{name}", [])
    if not isinstance(values, list) or not all(type(item) is kind for item in values):
        raise UserError(f"tokenizer.ggml.{name} of the GGUF file must be a list of {kind.__name__}")
    return values


def _token_id(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**31:
        raise UserError(f"{value!r:.50} is not a token id")
    return value


def _bos_first(token: str | None, token_id: int | None) -> processors.PostProcessor | None:
    """Returns a processor that puts the beginning-of-sequence token first.

    It acts only where a caller asks for special tokens.
    """
    if token is None:
        return None
    return processors.TemplateProcessing(
        single=f"{token}:0 $A:0",
        pair=f"{token}:0 $A:0 {token}:1 $B:1",
        special_tokens=[(token, token_id)],
    )


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre == "smollm":
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(_SPLITS[pre]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _pre_name(backend: tokenizers.Tokenizer) -> str | None:
    """Returns llama.cpp's name of the pre-tokenizer, or None for one without a name here."""

    def parts(pre_tokenizer: Any) -> list[dict[str, Any]]:
        state = json.loads(pre_tokenizer.__getstate__())
        steps = state["pretokenizers"] if state["type"] == "Sequence" else [state]
        # The offsets of tokens in a text are no matter of their ids.
        return [{k: v for k, v in step.items() if k != "trim_offsets"} for step in steps]

    if backend.pre_tokenizer is None:
        return None
    own = parts(backend.pre_tokenizer)
    return next((pre for pre in _PRE_TOKENIZERS if parts(_pre_tokenizer(pre)) == own), None)


def _read_backend(folder: pathlib.Path) -> tokenizers.Tokenizer:
    file = folder / "tokenizer.json"
    if file.exists():
        try:
            return tokenizers.Tokenizer.from_buffer(read_bytes(file))
        except OSError as error:
            raise UserError(f"{file}: cannot be read: {error.strerror}") from error
        except UserError:
            raise
        except Exception as error:  # tokenizers raises no narrower class
            raise UserError(f"{file}: malformed: {first_line(error):.300}") from error
    if not (folder / "vocab.json").exists():
        raise UserError(f"{folder}: {missing(folder)}")
    import transformers  # takes two seconds; needed only for folders older than tokenizer.json

    try:
        read: Any = transformers.AutoTokenizer
        # Without the argument it would ask on the terminal whether to run code of the folder.
        return read.from_pretrained(folder, trust_remote_code=False).backend_tokenizer
    except Exception as error:  # a malformed file can lead to any class
        raise UserError(
            f"{folder}: the tokenizer cannot be read: {first_line(error):.300}"
        ) from error


def _read_chat_templates(
    folder: pathlib.Path, settings: dict[str, Any]
) -> dict[str, tuple[str | None, str]]:
    """Returns the chat templates of a folder by name, each with the file that holds it.

    As in transformers, files of templates replace those of tokenizer_config.json.
    """
    files = {path.stem: path for path in (folder / TEMPLATES).glob("*.jinja")}
    if (file := folder / "chat_template.jinja").exists():
        files["default"] = file
    templates: dict[str, tuple[str | None, str]] = {}
    for name, file in files.items():
        try:
            templates[name] = read_text(file), str(file)
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{file}: cannot be read: {error}") from error
    if "default" in templates:
        return templates
    file = folder / "chat_template.json"
    template = _read_json(file).get("chat_template")
    if not template:
        file, template = folder / "tokenizer_config.json", settings.get("chat_template")
    named: Any = template if isinstance(template, dict) else {"default": template}
    if isinstance(template, list):  # several templates, each with a name
        named = {i.get("name"): i.get("template") for i in template if isinstance(i, dict)}
    return {str(name): (text, str(file)) for name, text in named.items()} | templates


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    """Reads a JSON object, or returns {} where the file does not exist."""
    return json_file.read_object(path) if path.exists() else {}
