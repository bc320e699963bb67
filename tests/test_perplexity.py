"""Perplexity: documents, windows, and the losses of a policy on them."""

import json
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusal import refused
from tiny_checkpoints import VOCAB, model_config, random_tensors, write_folder
from tokenizers import processors

from qerl_jax.errors import UserError
from qerl_jax.evaluation.perplexity import (
    read_documents,
    window_divergences,
    window_losses,
    windows,
)
from qerl_jax.policy import transformer
from qerl_jax.weights.load import load


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    config = model_config("qwen3")
    tensors = {
        name: tensor if "norm" in name else (tensor / 4).astype(tensor.dtype)
        for name, tensor in random_tensors(config).items()
    }
    folder = write_folder(tmp_path_factory.mktemp("model"), config, tensors)
    return load(str(folder), format="bf16", dtype="float32")


def logprobs_of(model, tokens):
    """Log-probabilities [B, T - 1, V] of the tokens after each one."""
    lengths = jnp.full(*tokens.shape, jnp.int32)
    logits = transformer.forward(model.params, None, tokens, lengths, config=model.config)
    return np.asarray(jax.nn.log_softmax(logits))[:, :-1]


def test_losses_are_those_of_the_next_tokens(model):
    tokens = np.random.default_rng(0).integers(0, VOCAB, (6, 9), np.int32)
    losses = window_losses(model, None, tokens)
    logprobs = logprobs_of(model, tokens)
    expected = -np.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1)[..., 0].mean(axis=1)
    assert losses.shape == (6,)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_divergences_are_those_of_the_logits(model, monkeypatch):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (6, 9), np.int32)
    noise = {"norm": model.params["norm"] + 0.3 * rng.standard_normal(32, np.float32)}
    other = types.SimpleNamespace(params=model.params | noise, config=model.config)
    p, q = (logprobs_of(m, tokens) for m in (model, other))
    for chunk_bytes in (256 << 20, 10 * 4 * VOCAB):
        monkeypatch.setattr("qerl_jax.rl.logprobs._CHUNK_BYTES", chunk_bytes)
        result = window_divergences(model, other, tokens)
        kl = (np.exp(p) * (p - q)).sum(axis=-1).mean(axis=1)
        assert kl.min() > 1e-3
        np.testing.assert_allclose(result.kl, kl, rtol=1e-4)
        np.testing.assert_allclose(result.losses, window_losses(other, None, tokens), rtol=1e-5)
        agreement = (p.argmax(axis=-1) == q.argmax(axis=-1)).mean(axis=1)
        assert 0 < agreement.mean() < 1
        np.testing.assert_allclose(result.agreement, agreement, rtol=1e-6)
    same = window_divergences(model, model, tokens)
    np.testing.assert_array_equal(same.kl, np.zeros(6))
    np.testing.assert_array_equal(same.agreement, np.ones(6))


def test_a_line_of_json_may_hold_separators_of_unicode(tmp_path):
    texts = ["one\u2028two", "three\x85four", "five"]
    path = tmp_path / "text.jsonl"
    lines = [json.dumps({"text": text}, ensure_ascii=False) + "\r\n" for text in texts]
    path.write_bytes("".join(lines).encode())
    assert read_documents(str(path)) == texts


def test_windows_are_full_and_concatenate_the_documents(model):
    documents = ["t1 t2 t3", "t4", "t5 t6 t7 t8"]
    expected = np.arange(1, 9).reshape(2, 4)
    np.testing.assert_array_equal(windows(model.tokenizer, documents, width=4, count=9), expected)
    np.testing.assert_array_equal(
        windows(model.tokenizer, documents, width=4, count=1), expected[:1]
    )
    assert windows(model.tokenizer, documents, width=5, count=9).shape == (1, 5)
    with pytest.raises(UserError, match="only 8 tokens, a window needs 9"):
        windows(model.tokenizer, documents, width=9, count=1)


def test_windows_begin_as_the_tokenizer_begins_a_text(tmp_path):
    config = model_config()
    folder = write_folder(tmp_path, config, random_tensors(config))
    model = load(str(folder))
    model.tokenizer.backend.post_processor = processors.TemplateProcessing(
        single="t9:0 $A:0", special_tokens=[("t9", 9)]
    )
    rows = windows(model.tokenizer, ["t1 t2 t3 t4"], width=3, count=2)
    np.testing.assert_array_equal(rows, [[9, 1, 2], [9, 3, 4]])


def test_documents_of_files(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("one\ntwo\n\n\nthree\r\n\r\n  \n\nfour")
    assert read_documents(str(text)) == ["one\ntwo", "\nthree", "four"]
    rows = tmp_path / "rows.jsonl"
    lines = [{"text": "a", "id": "x"}, {"question": "b", "level": 3, "answer": "c"}]
    rows.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    assert read_documents(str(rows)) == ["a", "b\nc"]


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("a.jsonl", b'{"text": 3}', "there is no text"),
        ("a.jsonl", b"[1]", "a.jsonl:1: an object"),
        ("a.jsonl", b'{"text": "x"}\n{', "a.jsonl:2: not JSON"),
        ("a.jsonl", b'{"text": "b\\ud83d"}', "a.jsonl:1: text: not valid Unicode: character 2 is"),
        ("a.txt", b" \n\n ", "there is no text"),
        ("a.txt", b"\xff\xfe", "not UTF-8"),
        ("a.jsonl", None, "cannot read"),
        ("a.txt", None, "cannot read"),
    ],
)
def test_texts_that_cannot_be_read(tmp_path, file, content, named):
    if content is not None:
        (tmp_path / file).write_bytes(content)
    refused(named, read_documents, str(tmp_path / file))


def test_a_dataset_of_the_hub(monkeypatch):
    asked = []

    def load_dataset(name, configuration, *, split, streaming):
        if name == "owner/absent":
            raise ConnectionError("no route\nto host")
        asked.append((name, configuration, split, streaming))
        return iter([{"text": "a"}, {"text": "b"}])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert read_documents("owner/name:small") == ["a", "b"]
    assert asked == [("owner/name", "small", "train", True)]
    refused(r"neither a file nor a dataset .*no route\)", read_documents, "owner/absent")
