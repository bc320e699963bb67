"""Uploads of exports: what is refused before anything is made, and what is uploaded how."""

import json

import finished_run
import huggingface_hub
import pytest

from qerl_jax.errors import UserError
from qerl_jax.export import push
from qerl_jax.export.write import ExportConfig, export


class Hub:
    """The part of the hub's API that an upload uses; it remembers what it was asked."""

    def __init__(self, held=(), error=None):
        self.held, self.error, self.calls = dict(held), error, []

    def repo_exists(self, name):
        return name in self.held

    def list_repo_files(self, name):
        return self.held[name]

    def create_repo(self, name, *, private, exist_ok):
        if self.error:
            raise self.error
        assert exist_ok
        self.calls.append(("create", name, private))
        return f"https://hub/{name}"

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
    with pytest.raises(UserError, match="write it as USER/NAME"):
        push.check_push([name])


def test_a_missing_token_is_one_line(hub):
    hub(token=None)
    with pytest.raises(
        UserError, match=r"there is no token .* hf auth login, or set HF_TOKEN"
    ) as e:
        push.check_push(["user/name"])
    assert "\n" not in str(e.value)


def test_what_the_hub_holds_is_not_overwritten(hub):
    hub(held={"user/name": [".gitattributes"], "user/other": [".gitattributes", "README.md"]})
    push.check_push(["user/new", "user/name"])
    with pytest.raises(UserError, match=r"user/other: the repository exists and holds README\.md"):
        push.check_push(["user/name", "user/other"])


def test_an_upload_that_fails_says_what_is_left_to_do(hub, tmp_path):
    hub(error=PermissionError("403 Forbidden\nmore"))
    with pytest.raises(
        UserError, match=r"PermissionError: 403 Forbidden; .*hf upload user/n "
    ) as e:
        push.push(tmp_path, "user/n", public=False)
    assert "\n" not in str(e.value)


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


def test_nothing_is_made_where_an_upload_is_refused(hub, run, tmp_path):
    hub(token=None)
    with pytest.raises(UserError, match="no token"):
        export(ExportConfig(str(run), "peft", out=str(tmp_path / "out"), push="user/name"))
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="nothing is uploaded without --push"):
        export(ExportConfig(str(run), "peft", out=str(tmp_path / "out"), public=True))
