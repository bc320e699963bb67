"""How well a policy predicts a text, and how far another one is from it there."""

import functools
import itertools
import json
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.errors import UserError, check_unicode, first_line
from qerl_jax.policy.lora import Lora
from qerl_jax.rl.logprobs import completion_logprobs, row_divergences
from qerl_jax.system import hub
from qerl_jax.system.paths import user_path
from qerl_jax.weights.load import LoadedModel
from qerl_jax.weights.tokenizer import Tokenizer

_ROWS = 4  # number of windows in a forward pass
_HUB_ROWS = 20_000  # number of rows that are read of a dataset
_MAX_BYTES = 256 << 20


class Divergence(NamedTuple):
    """How far a policy is from a reference, as means over the tokens of each window of a text."""

    losses: np.ndarray  # float32 [B] negative log-likelihoods under the policy, in nats per token
    kl: np.ndarray  # float32 [B] KL(reference | policy), in nats per token
    # float32 [B] fractions of the tokens at which both find the same token the likeliest.
    agreement: np.ndarray


def read_documents(source: str) -> list[str]:
    """Reads the documents of a text in their order.

    Args:
        source: a .jsonl file, any other text file, or the hub id of a dataset as
            `owner/name:configuration`. Each line of a .jsonl file is an object: its field `text` is
            a document, or, without this field, all its text fields joined in their order (a
            question, then its answer). In any other file each paragraph is a document. The training
            split of a dataset is read like the lines of a .jsonl file.

    Raises:
        UserError: the source cannot be read, or holds no text.
    """
    path = user_path(source)
    if path.suffix == ".jsonl":
        documents = [_row_text(row) for row in _json_lines(path, _read(path))]
    elif path.exists() or source.count("/") != 1:
        documents = _read(path).replace("\r\n", "\n").split("\n\n")
    else:
        documents = [_row_text(row) for row in _hub_rows(source)]
    documents = [document for document in documents if document.strip()]
    if not documents:
        raise UserError(f"{source}: there is no text in it; pass a source with text")
    return documents


def windows(
    tokenizer: Tokenizer, documents: Iterable[str], *, width: int, count: int
) -> np.ndarray:
    """Cuts a text into windows of tokens without padding; the documents are concatenated.

    Each window begins as the tokenizer begins a text: with a beginning-of-sequence token for Llama.

    Args:
        tokenizer: tokenizer of the policy.
        documents: documents of the text, as in `read_documents`.
        width: number of tokens T of a window.
        count: largest number of windows.

    Returns:
        int32 [B, T] token ids of the first windows.

    Raises:
        UserError: the text does not fill one window.
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
        raise UserError(
            f"the text has only {len(ids)} tokens, a window needs {body}; pass a longer text"
        )
    rows = np.array(ids[: full * body], np.int32).reshape(full, body)
    return np.concatenate([np.tile(np.array(start, np.int32), (full, 1)), rows], axis=1)


def window_losses(model: LoadedModel, lora: Lora | None, tokens: np.ndarray) -> np.ndarray:
    """Computes the mean negative log-likelihood of each window.

    The perplexity is exp of the mean over all windows. The first token of a window is not
    predicted.

    Args:
        model: model of the policy.
        lora: LoRA of the policy, or None.
        tokens: int32 [B, T] token ids, as in `windows`.

    Returns:
        float32 [B] losses in nats per token.
    """
    compute_logprobs = jax.jit(
        functools.partial(
            completion_logprobs,
            width=tokens.shape[1] - 1,
            model_config=model.config,
            temperature=1.0,
        )
    )
    losses = []
    first = jnp.ones(_ROWS, jnp.int32)
    for rows in _batches(tokens):
        logprobs, _ = compute_logprobs(model.params, lora, rows, first, first * rows.shape[1])
        losses.append(-np.asarray(logprobs).mean(axis=1))
    return np.concatenate(losses)[: len(tokens)]


def window_divergences(
    reference: LoadedModel, model: LoadedModel, tokens: np.ndarray
) -> Divergence:
    """Compares a model with a reference on each window of a text; both are on the device.

    Args:
        reference: the reference, such as the weights in 16 bits.
        model: a model of the same architecture.
        tokens: int32 [B, T] token ids, as in `windows`.
    """
    compare = jax.jit(functools.partial(row_divergences, model_config=model.config))
    batches = [compare(reference.params, model.params, rows) for rows in _batches(tokens)]
    logprobs, kl, agrees = (
        np.concatenate([np.asarray(part, np.float32).mean(axis=1) for part in parts])
        for parts in zip(*batches, strict=True)
    )
    return Divergence(*(values[: len(tokens)] for values in (-logprobs, kl, agrees)))


def _batches(tokens: np.ndarray) -> Iterator[jax.Array]:
    """Yields the windows in batches; the last one is filled up, so that one program is compiled."""
    for start in range(0, len(tokens), _ROWS):
        yield jnp.asarray(np.resize(tokens[start : start + _ROWS], (_ROWS, tokens.shape[1])))


def _read(path: pathlib.Path) -> str:
    try:
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise UserError(
                f"{path}: it has {size} bytes, the limit is {_MAX_BYTES}; pass a part of it"
            )
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot read the text: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8: {error}") from error


def _json_lines(path: pathlib.Path, text: str) -> Iterable[Mapping[str, Any]]:
    # Not `splitlines`, which also ends a line at U+2028 and others that JSON allows in a string.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}:{number}: not JSON: {first_line(error)}") from error
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number}: an object is needed, not {type(row).__name__}")
        for name, value in row.items():
            if isinstance(value, str):
                check_unicode(value, f"{path}:{number}: {name}")
        yield row


def _hub_rows(source: str) -> Iterable[Mapping[str, Any]]:
    import datasets  # imported here because files do not need it

    name, _, configuration = source.partition(":")
    if mistake := hub.local_mistake(name):
        raise UserError(f"{source}: {mistake}; pass a file, or the hub id of a dataset")
    try:
        with hub.asking(name):
            rows = datasets.load_dataset(name, configuration or None, split="train", streaming=True)
            return list(itertools.islice(rows, _HUB_ROWS))
    # A missing dataset, a denied access and a missing network raise exceptions without a common
    # class.
    except Exception as error:
        raise UserError(
            f"{source} is neither a file nor a dataset that can be read from the Hugging Face hub "
            f"({type(error).__name__}: {first_line(error)})"
        ) from error


def _row_text(row: Mapping[str, Any]) -> str:
    if isinstance(row.get("text"), str):
        return row["text"]
    return "\n".join(value for value in row.values() if isinstance(value, str))
