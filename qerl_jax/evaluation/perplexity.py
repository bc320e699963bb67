"""Perplexity: how well a policy predicts a text of the user's."""

import functools
import itertools
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.errors import UserError, first_line
from qerl_jax.policy.lora import Lora
from qerl_jax.rl.logprobs import completion_logprobs
from qerl_jax.weights.load import LoadedModel
from qerl_jax.weights.tokenizer import Tokenizer

_ROWS = 4  # windows that are read together
_HUB_ROWS = 20_000  # of a dataset
_MAX_BYTES = 256 << 20


def read_documents(source: str) -> list[str]:
    """The documents of a text, in order.

    Args:
        source: a .jsonl file, each line an object with `text`, or else its fields that are texts
            one after the other (a question, then its answer); any other file, whose paragraphs are
            the documents; or the hub id of a dataset, `owner/name:configuration`, whose training
            split is read like the lines of a .jsonl.

    Raises:
        UserError: it cannot be read, or there is no text in it.
    """
    path = pathlib.Path(source).expanduser()
    if path.suffix == ".jsonl":
        documents = [_row_text(row) for row in _json_lines(path, _read(path))]
    elif path.exists() or source.count("/") != 1:
        documents = _read(path).replace("\r\n", "\n").split("\n\n")
    else:
        documents = [_row_text(row) for row in _hub_rows(source)]
    documents = [document for document in documents if document.strip()]
    if not documents:
        raise UserError(f"{source}: there is no text in it")
    return documents


def windows(
    tokenizer: Tokenizer, documents: Iterable[str], *, width: int, count: int
) -> np.ndarray:
    """The first windows of a text, int32 [B, T], full of tokens; the documents are run together.

    Each begins as the tokenizer begins a text: with a beginning-of-sequence token for Llama.

    Args:
        tokenizer: encodes them.
        documents: see `read_documents`.
        width: T.
        count: the most windows.

    Raises:
        UserError: the text does not fill one.
    """
    start = tokenizer.backend.encode("").ids
    body = width - len(start)
    ids: list[int] = []
    for document in documents:
        ids += tokenizer.encode(document + "\n\n")
        if len(ids) >= body * count:
            break
    full = min(len(ids) // body, count)
    if not full:
        raise UserError(f"the text has only {len(ids)} tokens, a window needs {body}")
    rows = np.array(ids[: full * body], np.int32).reshape(full, body)
    return np.concatenate([np.tile(np.array(start, np.int32), (full, 1)), rows], axis=1)


def window_losses(model: LoadedModel, lora: Lora | None, tokens: np.ndarray) -> np.ndarray:
    """The mean negative log-likelihood of each window, float32 [B], in nats per token.

    exp of their mean is the perplexity. The first token of a window is not predicted.

    Args:
        model: the policy.
        lora: its adapter, or None.
        tokens: int32 [B, T], see `windows`.
    """
    logprobs = jax.jit(
        functools.partial(
            completion_logprobs, width=tokens.shape[1] - 1, config=model.config, temperature=1.0
        )
    )
    losses = []
    for start in range(0, len(tokens), _ROWS):
        # The last rows are filled up: one width, one program.
        rows = np.resize(tokens[start : start + _ROWS], (_ROWS, tokens.shape[1]))
        first = jnp.ones(_ROWS, jnp.int32)
        found, _ = logprobs(model.params, lora, jnp.asarray(rows), first, first * rows.shape[1])
        losses.append(-np.asarray(found).mean(axis=1))
    return np.concatenate(losses)[: len(tokens)]


def _read(path: pathlib.Path) -> str:
    try:
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise UserError(f"{path}: {size} bytes; at most {_MAX_BYTES} are read, pass a part")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot read the text: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8: {error}") from error


def _json_lines(path: pathlib.Path, text: str) -> Iterable[Mapping[str, Any]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}:{number}: not JSON: {first_line(error)}") from error
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number}: an object is needed, not {type(row).__name__}")
        yield row


def _hub_rows(source: str) -> Iterable[Mapping[str, Any]]:
    import datasets  # not needed for files

    name, _, configuration = source.partition(":")
    try:
        rows = datasets.load_dataset(name, configuration or None, split="train", streaming=True)
        return list(itertools.islice(rows, _HUB_ROWS))
    # Not found, no access, no network: each has classes of its own.
    except Exception as error:
        raise UserError(
            f"{source} is neither a file nor a dataset that can be read from the Hugging Face hub "
            f"({type(error).__name__}: {first_line(error)})"
        ) from error


def _row_text(row: Mapping[str, Any]) -> str:
    if isinstance(row.get("text"), str):
        return row["text"]
    return "\n".join(value for value in row.values() if isinstance(value, str))
