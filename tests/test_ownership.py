"""Whose run a folder holds: the user's key and the tag of config.json."""

import json
import os
import pathlib
import stat
import subprocess
import sys

import pytest
from finished_run import write_run
from odd_places import put

from qerl_jax.errors import UserError
from qerl_jax.run import ownership
from qerl_jax.run.folder import open_run, record_fact, record_sources
from qerl_jax.system import user_key


@pytest.fixture(autouse=True)
def config_home(tmp_path, monkeypatch):
    """A configuration folder without a key."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home" / "config"))
    return tmp_path / "home" / "config"


# --- The key --------------------------------------------------------------------------------------


def test_only_the_user_can_read_the_key(config_home):
    assert not user_key.is_signed(b"content", "run", "")
    assert not config_home.exists()  # A question makes no key.
    signature = user_key.sign(b"content", "run")
    key = config_home / "qerl-jax" / "key"
    assert user_key.key_path() == key
    assert [path.name for path in key.parent.iterdir()] == ["key"]
    assert len(key.read_bytes()) == 32
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE(key.parent.stat().st_mode) == 0o700
    assert user_key.sign(b"content", "run") == signature
    assert user_key.is_signed(b"content", "run", signature)
    for other in ((b"Content", "run", signature), (b"content", "program", signature)):
        assert not user_key.is_signed(*other)
    assert not user_key.is_signed(b"content", "run", "é")
    key.unlink()
    assert user_key.sign(b"content", "run") != signature


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda key: key.chmod(0o640), "can be read or replaced by other users"),
        (lambda key: key.parent.chmod(0o770), "can be read or replaced by other users"),
        (lambda key: put(key, "dangling", key.parent), "is a link"),
        (lambda key: put(key, "pipe", key.parent), "is not a file of this user"),
        (lambda key: put(key, "folder", key.parent), "is not a file of this user"),
        (lambda key: key.write_bytes(b""), "is not a key"),
    ],
)
def test_a_key_that_proves_nothing_is_refused(change, message, config_home):
    user_key.sign(b"", "run")
    change(config_home / "qerl-jax" / "key")
    with pytest.raises(UserError, match=f"key {message}.*next command makes"):
        user_key.sign(b"content", "run")
    with pytest.raises(UserError, match=message):
        user_key.is_signed(b"content", "run", "0" * 64)


def test_processes_that_begin_at_once_agree_on_the_key(config_home):
    code = (
        "import sys; from qerl_jax.system.user_key import sign; print(flush=True);"
        "sys.stdin.read();"
        "print(sign(b'content', 'run'))"
    )
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True)
        for _ in range(4)
    ]
    for process in processes:
        process.stdout.readline()
    for process in processes:
        process.stdin.close()
    signatures = {process.stdout.read() for process in processes}
    for process in processes:
        process.stdout.close()
        assert process.wait() == 0
    assert len(signatures) == 1
    assert user_key.is_signed(b"content", "run", signatures.pop().strip())
    assert len(list((config_home / "qerl-jax").iterdir())) == 1


def test_a_process_that_is_second_reads_the_key_of_the_first(monkeypatch):
    """The other process makes its key between the question and the link."""
    link = os.link

    def later(source, target):
        monkeypatch.setattr(os, "link", link)
        later.signature = user_key.sign(b"content", "run")
        link(source, target)

    monkeypatch.setattr(os, "link", later)
    assert user_key.sign(b"content", "run") == later.signature


@pytest.mark.parametrize("home", ["file", "no links"])
def test_without_a_place_for_the_key_nothing_is_signed(home, config_home, monkeypatch):
    if home == "file":
        config_home.parent.mkdir()
        config_home.touch()
    else:

        def refuse(*_):
            raise PermissionError("no hard links here")

        monkeypatch.setattr(os, "link", refuse)
    assert user_key.sign(b"content", "run") == ""
    assert not user_key.is_signed(b"content", "run", "")
    assert not list(config_home.rglob("key*"))


# --- The tag of a run -----------------------------------------------------------------------------


@pytest.fixture
def run(tiny, tmp_path):
    return write_run(tmp_path / "run", tiny, own=True)


def saved(run):
    return json.loads((run / "config.json").read_text())


def test_a_tag_is_that_of_the_content(run):
    assert list(saved(run))[-1] == ownership.TAG
    assert ownership.is_own(run)
    content = saved(run)
    (run / "config.json").write_text(json.dumps(content, sort_keys=True, indent=7))
    assert ownership.is_own(run)  # The form of the file is not its content.
    for change in (
        {"schedule_steps": 5},
        {"python_rewards": {"correctness": {"function": "a:b", "weight": 1.0}}},
        {"config": content["config"] | {"seed": 8}},
        {"tag": None},
        {"tag": "0" * 64},
        {"tag": content["tag"].upper()},
    ):
        (run / "config.json").write_text(json.dumps(content | change))
        assert not ownership.is_own(run), change
    for text in ("", "[]", "[" * 100_000, '{"tag": "\\ud800"}'):
        (run / "config.json").write_text(text)
        assert not ownership.is_own(run)
    assert not ownership.is_own(run / "absent")


def test_a_run_of_another_key_is_not_own(run, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "other"))
    assert not ownership.is_own(run)
    user_key.sign(b"", "run")
    assert not ownership.is_own(run)


def test_what_begins_a_run_signs_it_and_what_continues_it_adds_no_tag(tiny, tmp_path):
    config = tiny.config()
    with open_run(tmp_path / "run", config) as folder:
        assert ownership.is_own(folder.path)
        record_fact(folder, "fact", {"a": 1})
        assert ownership.is_own(folder.path)
        assert saved(folder.path)["fact"] == {"a": 1}
    (folder.path / "checkpoints" / "1").mkdir(parents=True)
    changed = tiny.config({"rollout.max_rows": 64})
    with open_run(folder.path, changed):
        assert ownership.is_own(folder.path)
    content = saved(folder.path) | {"fact": "theirs"}
    (folder.path / "config.json").write_text(json.dumps(content))
    with open_run(folder.path, config) as again:  # The command changes a field back.
        assert again.resumed
        assert "tag" not in saved(folder.path)
        record_fact(again, "other", {"b": 2})
        assert not ownership.is_own(folder.path)
        record_sources(again, config)
        assert not ownership.is_own(folder.path)
        ownership.adopt(folder.path)
        record_sources(again, config)
        assert ownership.is_own(folder.path)


def test_the_default_key_lies_in_the_home_folder(monkeypatch):
    for value in ("", "relative/config"):
        monkeypatch.setenv("XDG_CONFIG_HOME", value)
        assert user_key.key_path() == pathlib.Path.home() / ".config" / "qerl-jax" / "key"
