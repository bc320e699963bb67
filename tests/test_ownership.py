"""Whose run a folder holds: the user's key, the tag of config.json, and what a folder may name."""

import http.server
import json
import os
import pathlib
import stat
import subprocess
import sys
import threading

import pytest
from finished_run import write_run

from qerl_jax.errors import UserError
from qerl_jax.evaluation.evaluate import evaluate
from qerl_jax.evaluation.results_folder import EvaluateConfig
from qerl_jax.evaluation.tasks import TaskOverrides
from qerl_jax.export.write import ExportConfig, export
from qerl_jax.rewards import calls
from qerl_jax.run import ownership
from qerl_jax.run.folder import RunFolder, open_run, record_fact, record_sources
from qerl_jax.system import user_key

TOKEN = "TEST_OWNERSHIP_TOKEN"


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


def readable(key):
    key.chmod(0o640)


def in_an_open_folder(key):
    key.parent.chmod(0o770)


def a_link(key):
    key.rename(key.with_name("other"))
    key.symlink_to("other")


def a_pipe(key):
    key.unlink()
    os.mkfifo(key, 0o600)


def a_folder(key):
    key.unlink()
    key.mkdir()


def short(key):
    key.write_bytes(b"")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (readable, "can be read or replaced by other users"),
        (in_an_open_folder, "can be read or replaced by other users"),
        (a_link, "is a link"),
        (a_pipe, "is not a file of this user"),
        (a_folder, "is not a file of this user"),
        (short, "is not a key"),
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


def theirs(run, **rewards):
    """Changes the rewards of a run, as another person does."""
    content = saved(run)
    content["config"]["rewards"] |= rewards
    (run / "config.json").write_text(json.dumps(content))
    return content


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
    theirs(folder.path, third={"function": "a:b", "weight": 0.0})
    content = saved(folder.path) | {"fact": "theirs"}
    content["config"] = saved(folder.path)["config"] | {"rewards": config.rewards.to_dict()}
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


def test_trust_adopts_a_run(tiny, run, tmp_path, capsys):
    theirs(run, format={"function": "tiny_run:even_end", "weight": 1.0})
    (run / "programs").mkdir()
    (run / "programs" / "rollout-0").write_bytes(b"program")
    options = {"source": str(run), "limit": 1}
    with pytest.raises(UserError, match=r"'tiny_run:even_end' is named .*--judge .*--trust"):
        evaluate(EvaluateConfig(**options))
    evaluate(EvaluateConfig(**options, trust=True))
    assert ownership.is_own(run)
    assert (run / "programs" / "rollout-0").read_bytes().startswith(b"qerl-jax program 1\n")
    evaluate(EvaluateConfig(**options))
    with pytest.raises(UserError, match=r"--trust: .*model is not a run folder"):
        evaluate(EvaluateConfig(source=str(tiny.model), trust=True))


def test_a_variable_stands_for_trust(run, monkeypatch, tmp_path):
    theirs(run)
    monkeypatch.setenv("XDG_CONFIG_HOME", "/dev/null")  # a home that holds no key
    with pytest.raises(UserError, match="--trust"):
        evaluate(EvaluateConfig(source=str(run), limit=1))
    monkeypatch.setenv(ownership.VARIABLE, "1")
    before = (run / "config.json").stat()
    evaluate(EvaluateConfig(source=str(run), limit=1))
    assert not ownership.is_own(run)
    assert (run / "config.json").stat() == before  # Without a key, nothing is written.


# --- What a folder names --------------------------------------------------------------------------


@pytest.fixture
def server():
    """A server whose answers are rewards; it keeps the tokens that it gets."""
    tokens = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            tokens.append(self.headers.get("Authorization"))
            data = json.dumps([1.0] * len(body["completions"])).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    found = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.daemon_threads = True
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{found.server_port}/score", tokens
    found.shutdown()
    found.server_close()
    thread.join()


def commands(run, tmp_path, **options):
    """An evaluation and an export of a run."""
    judge, tokens = options.pop("judge", ()), options.pop("token_env", ())
    overrides = TaskOverrides(scorer=judge, token_env=tokens)
    yield lambda: evaluate(EvaluateConfig(source=str(run), limit=1, overrides=overrides, **options))
    options |= {"judge": judge[0]} if judge else {}
    out = str(tmp_path / f"export-{len(list(tmp_path.iterdir()))}")
    yield lambda: export(
        ExportConfig(
            source=str(run), format="peft", out=out, score_problems=2, token_env=tokens, **options
        )
    )


def test_a_folder_gets_no_token_and_no_request(run, tmp_path, server, monkeypatch, capsys):
    """The script of a person whose config.json names a server and a variable of the user."""
    url, tokens = server
    monkeypatch.setenv(TOKEN, "secret")
    reward = {"function": url, "weight": 1.0, "token_env": TOKEN}
    theirs(run, correctness=reward, format=reward | {"weight": 0.0})
    for allowed in ({}, {"token_env": (TOKEN,)}):
        for command in commands(run, tmp_path, **allowed):
            with pytest.raises(UserError, match=f"'{url}' is named by .* --trust"):
                command()
    # Where the user trusts the folder, or it is the user's own, the variable is named all the same.
    ownership.adopt(run)
    for command in commands(run, tmp_path):
        with pytest.raises(UserError, match=f"'{TOKEN}', which is sent only if .*--token-env"):
            command()
    assert tokens == []
    capsys.readouterr()
    for command in commands(run, tmp_path, token_env=(TOKEN,)):
        command()
        said = capsys.readouterr().out
        assert "secret" not in said
    assert set(tokens) == {"Bearer secret"}


def test_the_host_is_printed_before_the_first_request(run, tmp_path, server, monkeypatch, capsys):
    url, tokens = server
    monkeypatch.setenv(TOKEN, "secret")
    built_in = {"function": "qerl_jax.rewards.functions:think_format", "weight": 1.0}
    theirs(run, correctness={"function": url, "weight": 1.0}, format=built_in)
    host = url.removeprefix("http://").removesuffix("/score")
    line = f"completions are sent to {host} for their rewards, with the token in {TOKEN}"
    for command in commands(run, tmp_path, judge=(url,), token_env=(TOKEN,)):
        calls._print_once.cache_clear()  # as in another process
        for _ in range(2):
            calls.announce_hosts([calls.resolve(url, token_env=TOKEN)])
        said = capsys.readouterr().out
        assert said.splitlines().count(line) == 1
        calls._print_once.cache_clear()
        command()
        said = capsys.readouterr().out
        assert said.splitlines().count(line) == 1
    assert set(tokens) == {"Bearer secret"}
    assert not ownership.is_own(run)


def test_a_module_that_a_folder_names_is_not_imported(run, tmp_path, monkeypatch):
    (tmp_path / "evil.py").write_text(
        f"import pathlib\npathlib.Path({str(tmp_path / 'imported')!r}).touch()\n"
        "def f(prompt, completion, answer, num_tokens, finished):\n    return 1.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    evil = {"function": "evil:f", "weight": 1.0}
    own = {"function": "qerl_jax.rewards.functions:exact_answer", "weight": 1.0}
    format_reward = own | {"function": "qerl_jax.rewards.functions:think_format"}
    content = theirs(run, correctness=evil, format=format_reward)
    for command in commands(run, tmp_path):
        with pytest.raises(UserError, match=r"'evil:f' is named by .* by --judge .*--trust"):
            command()
    # config.json names rewards in a second place, and other rewards than those that are called.
    rewards = content["config"]["rewards"]
    content["python_rewards"], content["config"]["rewards"] = rewards, {"correctness": own}
    (run / "config.json").write_text(json.dumps(content))
    for command in commands(run, tmp_path):
        with pytest.raises(UserError, match="'evil:f' is named by"):
            command()
    del content["python_rewards"]
    content["config"]["rewards"] = {"correctness": own, "format": format_reward, "third": evil}
    (run / "config.json").write_text(json.dumps(content))
    for command in commands(run, tmp_path):
        command()
    assert not (tmp_path / "imported").exists()
    theirs(run, correctness=evil)
    for command in commands(run, tmp_path, judge=("evil:f",)):
        command()
    assert (tmp_path / "imported").exists()
    assert RunFolder(run).finished_steps() == 4


def test_the_default_key_lies_in_the_home_folder(monkeypatch):
    for value in ("", "relative/config"):
        monkeypatch.setenv("XDG_CONFIG_HOME", value)
        assert user_key.key_path() == pathlib.Path.home() / ".config" / "qerl-jax" / "key"
