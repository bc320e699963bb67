"""A source that looks like a path is a path; a hub is asked aloud, and not for long."""

import time

import huggingface_hub
import pytest
from huggingface_hub import constants
from problem_sets import load_problems
from refusal import refused

from qerl_jax.evaluation.perplexity import read_documents
from qerl_jax.system import hub
from qerl_jax.weights import load


@pytest.fixture
def unreachable(monkeypatch):
    """A hub that does not answer; asking it for a model fails unless the cache is asked alone."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "SECONDS", 0.05)

    class Session:
        def head(self, *_, **__):
            time.sleep(30.0)

    monkeypatch.setattr(huggingface_hub.utils, "get_session", Session)

    def snapshot_download(*_, **__):
        assert constants.HF_HUB_OFFLINE
        raise FileNotFoundError("no snapshot in the cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)


@pytest.mark.parametrize(
    "source", ["runs/first-adc", "./nothing", "runs/first-abc/adaptor", "/no/x"]
)
def test_a_mistyped_path_is_not_asked_for_on_a_hub(source, tmp_path, monkeypatch, capsys):
    def asking(name):
        raise AssertionError(f"the hub is asked for {name}")

    monkeypatch.setattr(hub, "asking", asking)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "first-abc" / "adapter").mkdir(parents=True)
    said = refused(r"neither a folder", load.load, source)
    advised = "hf download" in said
    assert advised == (source.count("/") == 1 and source[0] not in "./~")
    suggestion = {"runs/first-adc": "first-abc", "runs/first-abc/adaptor": "adapter"}.get(
        source, ""
    )
    assert (f"did you mean {suggestion}?" in said) == bool(suggestion)
    refused(r"--config\.data\.path=FILE\.jsonl", load_problems, source)
    if source == "runs/first-adc":
        refused("did you mean first-abc", read_documents, source)


def test_a_cached_hub_id_beside_a_folder_of_its_owner_stays_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen").mkdir()
    assert hub.local_mistake("Qwen/Qwen2.5-7B") == "the folder Qwen has no 'Qwen2.5-7B'"
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: "/cache/config.json")
    assert hub.local_mistake("Qwen/Qwen2.5-7B") == ""
    assert hub.local_mistake("meta-llama/Llama") == ""


def test_an_unreachable_hub_is_given_up_soon(unreachable, capsys):
    began = time.monotonic()
    refused(r"no answer from https://.* and no copy in the cache", load.load, "someone/model")
    assert time.monotonic() - began < 5.0
    assert capsys.readouterr().err == "someone/model: asking the Hugging Face hub\n"
    assert not constants.HF_HUB_OFFLINE


def test_a_hub_that_answers_is_asked(unreachable, monkeypatch):
    monkeypatch.setattr(hub, "_answers", lambda endpoint: True)
    with hub.asking("someone/model"):
        assert not constants.HF_HUB_OFFLINE
    with pytest.raises(KeyError), hub.asking("someone/model"):
        raise KeyError
