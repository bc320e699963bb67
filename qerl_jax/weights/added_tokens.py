"""Reads the tokens that the files of a tokenizer name in addition to tokenizer.json.

The precedence is that of transformers (`PreTrainedTokenizerBase._from_pretrained`, 5.23):
where tokenizer_config.json has added_tokens_decoder, added_tokens.json and special_tokens_map.json
are not read. Without it, special_tokens_map.json replaces the roles of tokenizer_config.json, and
tokenizer.json replaces the entries of added_tokens.json that have the same id.
"""

import pathlib
from collections.abc import Collection, Mapping
from typing import Any

import tokenizers

from qerl_jax.errors import UserError
from qerl_jax.system import json_file

_DECODER = "added_tokens_decoder"
_LISTS = ("extra_special_tokens", "additional_special_tokens")
_ATTRIBUTES = ("lstrip", "rstrip", "single_word", "normalized", "special")


def read_added_tokens(
    folder: pathlib.Path, settings: Mapping[str, Any], backend: tokenizers.Tokenizer
) -> dict[str, Any]:
    """Adds the tokens that the files of a folder name to the tokenizer of its tokenizer.json.

    Returns:
        Texts of special tokens by their name in templates, such as 'eos_token'.

    Raises:
        UserError: a file is malformed, or a token cannot have the id that its file states.
    """
    roles, special_texts = _roles(settings), _special_texts(settings)
    if settings.get(_DECODER) is not None:
        source, added = f"{folder / 'tokenizer_config.json'}: {_DECODER}", {}
        for i, token in _check_object(source, settings[_DECODER]).items():
            added[_parse_id(source, i)] = _parse_token(source, token)
    else:
        source = folder / "special_tokens_map.json"
        token_map = json_file.read_object(source) if source.exists() else {}
        roles = {k: v for k, v in roles.items() if k not in token_map} | _roles(token_map)
        special_texts = special_texts or _special_texts(token_map)
        source = folder / "added_tokens.json"
        ids = json_file.read_object(source) if source.exists() else {}
        special = {*special_texts, *(text for text in roles.values() if isinstance(text, str))}
        added = {
            _parse_id(source, i): tokenizers.AddedToken(
                text, special=text in special, normalized=text not in special
            )
            for text, i in ids.items()
            if i not in backend.get_added_tokens_decoder()
        }
    for i, token in sorted(added.items()):
        is_new = backend.token_to_id(token.content) is None
        backend.add_tokens([token])
        token_id = backend.token_to_id(token.content)
        if is_new and token_id != i:
            raise UserError(
                f"{source}: {token.content!r:.50} has the id {i}, but the next free id of the "
                f"vocabulary is {token_id}; use the tokenizer files that belong together"
            )
    mark_special(backend, special_texts)
    return roles


def mark_special(backend: tokenizers.Tokenizer, texts: Collection[str]) -> None:
    """Makes tokens special, so that `decode` leaves them out.

    A text without an id is left out, as no embedding has its row.
    """
    added_tokens = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for text in dict.fromkeys(texts):
        token = added_tokens.get(text)
        if backend.token_to_id(text) is None or (token is not None and token.special):
            continue
        attributes = {name: token is not None and getattr(token, name) for name in _ATTRIBUTES}
        backend.add_tokens([tokenizers.AddedToken(text, **(attributes | {"special": True}))])


def _roles(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tokens with a name."""
    extra = settings.get("extra_special_tokens")
    roles = {k: v for k, v in settings.items() if k.endswith("_token") and not isinstance(v, bool)}
    roles |= extra if isinstance(extra, dict) else {}
    return {key: _text(value) for key, value in roles.items() if value}


def _special_texts(settings: Mapping[str, Any]) -> list[str]:
    """Returns the special tokens without a name."""
    lists = [texts for key in _LISTS if isinstance(texts := settings.get(key), list)]
    return [text for text in map(_text, next(filter(None, lists), [])) if isinstance(text, str)]


def _text(value: Any) -> Any:
    return value.get("content") if isinstance(value, dict) else value


def _parse_token(source: str, value: Any) -> tokenizers.AddedToken:
    fields = _check_object(source, value)
    content = fields.get("content")
    attributes = {name: fields[name] for name in _ATTRIBUTES if name in fields}
    if not isinstance(content, str) or not all(isinstance(v, bool) for v in attributes.values()):
        raise UserError(f"{source}: {value!r:.100} is not a token")
    return tokenizers.AddedToken(content, **attributes)


def _check_object(source: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{source}: {value!r:.100}, must be an object")
    return value


def _parse_id(source: str | pathlib.Path, value: Any) -> int:
    text = str(value)  # a key of added_tokens_decoder is an id in decimal digits
    if isinstance(value, bool) or not (text.isascii() and text.isdecimal()) or int(text) >= 2**31:
        raise UserError(f"{source}: {value!r:.50} is not a token id")
    return int(text)
