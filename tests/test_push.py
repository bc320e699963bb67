"""Uploads of exports: what is refused before anything is made, and what is uploaded how."""

import json
import os
import pathlib
import shutil
import types

import finished_run
import gguf_cases
import huggingface_hub
import pytest
from refusal import refused

from qerl_jax.errors import UserError
from qerl_jax.export import push
from qerl_jax.export.write import ExportConfig, export


class Hub:
    """The part of the hub's API that an upload uses; it remembers what it was asked."""

    def __init__(self, held=(), error=None, shown=(), becomes_public=False):
        self.held, self.error, self.calls = dict(held), error, []
        self.shown, self.becomes_public = set(shown), becomes_public

    def repo_exists(self, name):
        return name in self.held

    def list_repo_files(self, name):
        return self.held[name]

    def create_repo(self, name, *, private, exist_ok):
        if self.error:
            raise self.error
        assert exist_ok
        self.calls.append(("create", name, private))
        if name not in self.held and (self.becomes_public or not private):
            self.shown.add(name)
        self.held.setdefault(name, [])
        return f"https://hub/{name}"

    def repo_info(self, name):
        assert name in self.held
        return types.SimpleNamespace(private=name not in self.shown)

    def upload_folder(self, *, repo_id, folder_path, commit_message):
        self.calls.append(("upload", repo_id, folder_path))


@pytest.fixture
def hub(monkeypatch):
    def use(token="hf_x", **options):
        found = Hub(**options)
        monkeypatch.setattr(huggingface_hub, "get_token", lambda: token)
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: found)
        return found

    return use


@pytest.mark.parametrize("name", ["name", "user/name/x", "/name", "user/", "../name", "a b/c"])
def test_names_of_another_form_are_refused(hub, name):
    hub()
    refused("write it as USER/NAME", push.check_push, [name])


def test_a_missing_token_is_one_line(hub):
    hub(token=None)
    with pytest.raises(UserError, match=r"^.*there is no token .* hf auth login, or set HF_TOKEN"):
        push.check_push(["user/name"])


def test_what_the_hub_holds_is_not_overwritten(hub):
    hub(held={"user/name": [".gitattributes"], "user/other": [".gitattributes", "README.md"]})
    push.check_push(["user/new", "user/name"])
    with pytest.raises(UserError, match=r"user/other: the repository exists and holds README\.md"):
        push.check_push(["user/name", "user/other"])


def test_an_upload_that_fails_says_what_is_left_to_do(hub, tmp_path):
    hub(error=PermissionError("403 Forbidden\nmore"))
    with pytest.raises(UserError, match=r"PermissionError: 403 Forbidden; .*hf upload user/n "):
        push.push(tmp_path, "user/n", public=False)


@pytest.fixture
def run(tiny, tmp_path):
    return finished_run.write_run(tmp_path / "run", tiny)


@pytest.mark.parametrize("public", [False, True])
def test_an_adapter_and_its_base_are_uploaded_with_their_cards(hub, run, tmp_path, public, capsys):
    found = hub()
    out = tmp_path / "out"
    options = {"push": "user/name", "public": public, "score_problems": 0, "with_base": True}
    export(ExportConfig(str(run), "peft", out=str(out), **options))
    assert found.calls == [
        ("create", "user/name-base", not public),
        ("upload", "user/name-base", f"{out}-base"),
        ("create", "user/name", not public),
        ("upload", "user/name", str(out)),
    ]
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "user/name-base"
    card = (out / "README.md").read_text()
    assert "vllm serve user/name-base --enable-lora" in card
    assert str(tmp_path) not in card
    assert "https://hub/user/name\n" in capsys.readouterr().out


@pytest.mark.parametrize("merge", ["", "q8_0"])
def test_files_of_llama_cpp_are_uploaded_with_commands_that_fetch_them(hub, merge, tiny, tmp_path):
    found, out = hub(), tmp_path / "out"
    model = gguf_cases.write_folder(tmp_path / "model", "qwen2")
    own = {"data.max_prompt_tokens": 64, "data.system_prompt": "a"}
    run = finished_run.write_run(tmp_path / "run", tiny, own=True, model=model, **own)
    options = {"merge": merge, "push": "user/name", "score_problems": 0}
    export(ExportConfig(str(run), "gguf", out=str(out), **options))
    assert found.calls == [("create", "user/name", True), ("upload", "user/name", str(out))]
    card, names = (out / "README.md").read_text(), {path.name for path in out.iterdir()}
    assert "hf download user/name --local-dir name\n" in card
    if merge:
        assert names == {"README.md", "Modelfile", "model-Q8_0.gguf"}
        assert "llama-cli -m name/model-Q8_0.gguf --temp 0\n" in card
        assert "ollama create run -f name/Modelfile\n" in card
    else:
        assert names == {"README.md", "base-NVFP4.gguf", "adapter.gguf"}
        assert "llama-cli -m name/base-NVFP4.gguf --lora name/adapter.gguf --temp 0\n" in card
    for path in out.iterdir():  # metadata of the files included
        assert os.fsencode(tmp_path) not in path.read_bytes()


def test_nothing_is_made_where_an_upload_is_refused(hub, run, tmp_path):
    hub(token=None)
    with pytest.raises(UserError, match="no token"):
        export(ExportConfig(str(run), "peft", out=str(tmp_path / "out"), push="user/name"))
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="nothing is uploaded without --push"):
        export(ExportConfig(str(run), "peft", out=str(tmp_path / "out"), public=True))


def test_nothing_goes_to_a_public_repository_without_a_word(hub, run, tmp_path):
    found = hub(held={"user/name": []}, shown=["user/name"])
    out = tmp_path / "out"
    options = {"push": "user/name", "score_problems": 0}
    with pytest.raises(UserError, match="everyone can see this repository; pass --public"):
        export(ExportConfig(str(run), "merged", out=str(out), **options))
    assert not out.exists()
    assert not found.calls
    export(ExportConfig(str(run), "merged", out=str(out), public=True, **options))
    assert found.calls[-1][0] == "upload"


def test_a_repository_that_is_made_public_gets_no_files(hub, tmp_path):
    found = hub(becomes_public=True)
    push.check_push(["user/name"])
    with pytest.raises(UserError, match=r"everyone can see .*hf upload user/name"):
        push.push(tmp_path, "user/name", public=False)
    assert [call for call, *_ in found.calls] == ["create"]


def texts(folder):
    return {p.name: p.read_text() for p in folder.iterdir() if p.suffix in (".md", ".json")}


def test_an_adapter_over_a_local_base_needs_a_name_of_the_base(hub, run, tiny, tmp_path):
    found = hub()
    out = tmp_path / "out"
    options = {"out": str(out), "push": "user/name", "score_problems": 0}
    with pytest.raises(UserError, match=r"a path of this machine; .*--base-name=USER/NAME"):
        export(ExportConfig(str(run), "peft", **options))
    assert not out.exists()
    with pytest.raises(UserError, match="--base-name=models: write it as USER/NAME"):
        export(ExportConfig(str(run), "peft", base_name="models", **options))
    export(ExportConfig(str(run), "peft", base_name="user/base", **options))
    assert found.calls[-1][0] == "upload"
    written = texts(out)
    assert json.loads(written["adapter_config.json"])["base_model_name_or_path"] == "user/base"
    assert "base_model: user/base\n" in written["README.md"]
    assert not [name for name, text in written.items() if str(tiny.model) in text]
    for form in ("merged", "nvfp4"):
        out = export(ExportConfig(str(run), form, **options | {"out": str(tmp_path / form)}))
        assert not [name for name, text in texts(out).items() if str(tiny.model) in text]


def test_a_last_look_finds_folders_of_this_machine(hub, run, tiny, tmp_path, monkeypatch):
    found = hub()
    model = shutil.copytree(tiny.model, tmp_path / "model")
    saved = json.loads((model / "tokenizer_config.json").read_text())
    saved["_name_or_path"] = str(model / "checkpoint")
    (model / "tokenizer_config.json").write_text(json.dumps(saved))
    options = {"out": str(tmp_path / "out"), "push": "user/name", "score_problems": 0}
    with pytest.raises(UserError, match=r"tokenizer_config\.json names .*hf upload user/name"):
        export(ExportConfig(str(run), "merged", base=str(model), **options))
    assert not found.calls


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("see /home/me/runs/a.", True),
        ('{"path": "/home/me"}', True),
        ("file:///home/me/x", True),
        ("--data=RUN:/home/me/x", True),
        ("/home/mean/x", False),
        ("https://host/home/me", False),
        ('{"/srv": 5, "/srv.": 6}', False),
        ("/srv/runs/a", True),
    ],
)
def test_folders_of_this_machine_in_a_text(text, named, tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text(text)
    folders = [pathlib.Path("/home/me"), pathlib.Path("/srv")]
    if named:
        with pytest.raises(UserError, match=r"tokenizer\.json names /"):
            push.check_names_no_folder(tmp_path, "user/name", folders)
    else:
        push.check_names_no_folder(tmp_path, "user/name", folders)


def test_a_folder_with_other_characters_is_found_in_json(tmp_path):
    own = tmp_path / "mod\u00e8les"
    (tmp_path / "config.json").write_text(json.dumps({"path": os.fspath(own)}))
    refused("names", push.check_names_no_folder, tmp_path, "user/name", [own])


def test_a_key_in_a_url_is_kept_out_of_the_card(run, tmp_path):
    url = "https://judge.example/score?model=a&api_key=S3CRET&x=1"
    saved = json.loads((run / "config.json").read_text())
    saved["config"]["rewards"]["judge"] = {"function": url, "weight": 1.0}
    saved["command"] += f" --config.rewards.judge.function={url}"
    (run / "config.json").write_text(json.dumps(saved))
    out = tmp_path / "out"
    export(ExportConfig(str(run), "merged", out=str(out), score_problems=0))
    card = (out / "README.md").read_text()
    assert card.count("https://judge.example/score?model=a&api_key=***&x=1") == 2
    assert "S3CRET" not in card
