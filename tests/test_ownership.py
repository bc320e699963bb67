"""Whose run a folder holds: the user's key and the tag of config.json."""

import errno
import json
import os
import pathlib
import pwd
import stat
import subprocess
import sys

import pytest
from finished_run import write_run
from odd_places import put
from refusal import refused

from qerl_jax.compile import program_cache, run_cache
from qerl_jax.data.problem_list import with_problems
from qerl_jax.errors import UserError
from qerl_jax.evaluation.run_environments import check_trusted
from qerl_jax.evaluation.scorers import check_scorers
from qerl_jax.export.push import check_names_no_folder
from qerl_jax.quantization import cache
from qerl_jax.run import ownership
from qerl_jax.run.folder import open_run, record_fact, record_sources
from qerl_jax.run.saved_config import saved_config
from qerl_jax.system import user_key


@pytest.fixture
def without_home(monkeypatch):
    """No HOME, and no entry of the user in the system, as in a container with a number as user."""

    def absent(number):
        raise KeyError(number)

    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", absent)


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


def test_without_a_home_folder_nothing_is_signed(without_home):
    assert user_key.key_path() is None
    assert user_key.sign(b"content", "run") == ""
    assert not user_key.is_signed(b"content", "run", "")
    assert user_key.why_no_key() == "HOME is not set, and the user has no home folder"


def test_the_reason_without_a_key_is_that_of_its_folder(config_home):
    config_home.parent.mkdir()
    config_home.touch()
    key = config_home / "qerl-jax" / "key"
    assert user_key.why_no_key() == f"{key} cannot be made: File exists"
    config_home.unlink()
    assert user_key.why_no_key() == ""
    assert key.is_file()


def test_a_run_that_is_not_signed_says_so_once_and_later_why(tiny, config_home, tmp_path, capsys):
    config_home.parent.mkdir()
    config_home.touch()
    with open_run(tmp_path / "run", tiny.config()) as folder:
        record_fact(folder, "fact", {"a": 1})
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"warning: {folder.path} is not signed as your run, because {config_home}" in err
    assert "cannot be made: File exists; " in err
    assert err.endswith(
        "set XDG_CONFIG_HOME to a folder that can be written, or QERL_TRUST_RUNS=1\n"
    )
    key = config_home / "qerl-jax" / "key"
    words = f"not recognized if it began without {key} or with another one, and QERL_TRUST_RUNS=1"
    refused(words, saved_config, folder.path, trust=False)
    run = {"config": {"environment": {"function": "a:B"}}}
    refused(words, check_trusted, run, trusted=False)
    settings = {"scorer": "a:b", "options": {"scorer": {}}}
    refused(words, check_scorers, settings, {}, trusted=False)


def test_who_trusts_all_runs_needs_no_key(tiny, config_home, tmp_path, monkeypatch, capsys):
    config_home.parent.mkdir()
    config_home.touch()
    monkeypatch.setenv("QERL_TRUST_RUNS", "1")
    with open_run(tmp_path / "run", tiny.config()):
        assert capsys.readouterr().err == ""


# --- The cache ------------------------------------------------------------------------------------

PROBLEMS = [{"question": "t1", "answer": "1"}]


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("spoiled", ["parent", "file", "link", "full", "no home"])
@pytest.mark.parametrize("name", ["problems", "calibrated"])
def test_a_cache_that_a_command_needs_ends_it_in_one_line(
    name, spoiled, tiny, tmp_path, monkeypatch, request
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, words = (
        tmp_path / "cache" / "qerl_jax" / name,
        "cannot be written: .*; set XDG_CACHE_HOME to",
    )
    if spoiled == "parent":
        (tmp_path / "cache").touch()
    elif spoiled == "full":
        monkeypatch.setattr(os, "mkdir", full)
    elif spoiled == "no home":
        request.getfixturevalue("without_home")
        words = "HOME is not set, and the user with the number .*; set XDG_CACHE_HOME to a folder"
    else:
        folder.parent.mkdir(parents=True)
        folder.touch() if spoiled == "file" else folder.symlink_to(tmp_path / "absent")
        words = f"{folder} is a (file|symbolic link) and not a folder: .* move it away"
    if name == "problems":
        refused(words, with_problems, tiny.config(), PROBLEMS)
    else:
        refused(words, cache.lock("ab").__enter__)


def test_a_full_disk_at_the_problems_leaves_no_file(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        refused("problems cannot be written: No space left", with_problems, tiny.config(), PROBLEMS)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert with_problems(tiny.config(), PROBLEMS).data.path.startswith(str(tmp_path))


def test_programs_are_not_kept_without_a_home_folder(without_home, monkeypatch, capsys):
    monkeypatch.setattr(run_cache, "_common_folder", lambda: None)
    with run_cache.keep_programs():
        assert program_cache.current().shared is None
    err = capsys.readouterr().err
    assert err.startswith("warning: compiled programs are not kept for later runs: the cache has")


def test_an_export_is_pushed_without_a_home_folder(without_home, tmp_path):
    (tmp_path / "README.md").write_text(f"made in {tmp_path}")
    check_names_no_folder(tmp_path, "me/it", [])
    refused(
        "names .*, a folder of this machine", check_names_no_folder, tmp_path, "me/it", [tmp_path]
    )


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
