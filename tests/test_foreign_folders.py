"""Folders of another person are data: whatever they hold, nothing outside of them changes.

A folder of the user is watched: it stays as it is, its secrets are printed and written nowhere, a
server gets no request, nothing waits for a pipe, and no code of the folder runs. The first tests
put one odd thing at each place and expect an error of one line; the last ones run commands on
folders with random changes. A failure names its case, whose number is the seed:

    QERL_FOREIGN_CASES=250-260 uv run pytest tests/test_foreign_folders.py -n 0
"""

import contextlib
import copy
import functools
import http.server
import json
import os
import pathlib
import pickle
import random
import re
import shutil
import signal
import sys
import threading
import traceback

import numpy as np
import pytest
from finished_run import META, write_run
from odd_places import ODD_VALUES, SECRET, changed, digest, dumps, places_of, put, write_watched

from qerl_jax.commands import quantize, sweep
from qerl_jax.commands import show as show_command
from qerl_jax.errors import UserError, visible
from qerl_jax.evaluation.evaluate import evaluate
from qerl_jax.evaluation.load_policy import read_run
from qerl_jax.evaluation.results_folder import EvaluateConfig
from qerl_jax.evaluation.sample import SampleConfig, sample
from qerl_jax.evaluation.tasks import TaskOverrides
from qerl_jax.export.write import ExportConfig, export
from qerl_jax.processes.folder import open_run_together
from qerl_jax.processes.group import Processes
from qerl_jax.rewards import calls
from qerl_jax.run import folder as run_folder
from qerl_jax.run import ownership
from qerl_jax.run.checkpoints import Checkpoints, read_latest, read_latest_meta
from qerl_jax.run.event_file import EventFile
from qerl_jax.run.folder import RunFolder, flatten, lock_holder, open_run
from qerl_jax.run.jobs import run_jobs
from qerl_jax.run.metrics import MetricsLog
from qerl_jax.run.provenance import provenance
from qerl_jax.run.saved_fields import check_meta, check_run, is_shallow, is_time
from qerl_jax.show.view import open_views
from qerl_jax.system import safe_files
from qerl_jax.system.atomic import write_atomic, write_json
from qerl_jax.system.jsonl import read_number
from qerl_jax.system.staging import scratch_of, staged_folder
from qerl_jax.training import loop
from qerl_jax.weights import model_source
from qerl_jax.weights.load import load
from qerl_jax.weights.save import companion_files

CASES = 20  # of the default run; the slow test has more
SECONDS = 120  # far more than a case takes; a reader of a pipe would wait forever
TOKEN = "QERL_TEST_WATCHED_TOKEN"
MODULE = "module_that_a_folder_names"
REWARDS = "qerl_jax.rewards.functions:"
LINKS = ("link", "keys", "empty", "dangling")
ODD = (*LINKS, "pipe", "socket")
RUN_CHANGES = {
    "steps": 2,
    "rewards.correctness.function": f"{REWARDS}exact_answer",
    "rewards.format.function": f"{REWARDS}think_format",
    "log.tensorboard": True,
}
# What commands read of config.json.
TOP = ("command", "created", "device", "versions", "git")
READ = ("data", "eval", "model", "rewards", "rollout", "reward_time_limit")


# --- What is watched ------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def nothing_waits():
    def fail(signum, frame):
        raise KeyboardInterrupt("a pipe is waited for, or a loop does not end")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory with the folder of another person, and one of the user to watch."""
    place = tmp_path / "place"
    (place / "theirs").mkdir(parents=True)
    write_watched(place / "watched")
    modules = tmp_path / "modules"
    modules.mkdir()
    code = f"import os\nos.mkdir({str(place / 'ran')!r})\ndef function(*_):\n    return 1.0\n"
    (modules / f"{MODULE}.py").write_text(code)
    monkeypatch.syspath_prepend(modules)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(modules), *sys.path]))
    monkeypatch.setenv(TOKEN, SECRET)
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    monkeypatch.chdir(place)
    return place


@pytest.fixture
def watched(place):
    """The folder to watch, which is the same after the test."""
    before = digest(place / "watched")
    yield place / "watched"
    assert digest(place / "watched") == before


@pytest.fixture
def server():
    """A server whose answers are rewards; it keeps the tokens of its requests."""
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

        def send_error(self, *_):
            tokens.append("no POST")

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


def refuse(action, path, kinds, watched, match="."):
    """Requires an error of one line that names the path, for each odd kind at it."""
    for kind in kinds:
        put(path, kind, watched)
        with pytest.raises(UserError, match=match) as error:
            action()
        assert str(path if path.name != "config.json" else path.parent) in str(error.value), kind
        assert "\n" not in str(error.value)


# --- One odd place --------------------------------------------------------------------------------

RUN = RunFolder(pathlib.Path("run"))
FILES = (
    "config",
    "calibration",
    "teacher_calibration",
    "lock",
    "metrics",
    "completions",
    "curves",
    "summary",
    "best",
)
FILE_NAMES = {getattr(RUN, name).name for name in FILES}
PLACES = sorted(path.name for path in places_of(RUN))
TRAINED = [path for path in PLACES if path.endswith(("adapter", "model"))]
INSIDE = [
    *("checkpoints/4", "checkpoints/damaged-4", "checkpoints/4/state", "programs/jit_f-12-cache"),
    *("checkpoints/5.orbax-checkpoint-tmp", "tensorboard/events", "profile/plugins"),
    *("lock.0123456789abcdef", *(f".{name}.partial" for name in TRAINED)),
]


def test_every_place_of_a_run_folder_is_a_file_or_a_folder():
    folders = {*RUN.filled_by_libraries(), *RUN.replaced_as_a_whole()}
    folders |= {RUN.evaluations, RUN.exports, RUN.wandb}
    assert {path.name for path in RUN.files()} == FILE_NAMES
    assert not folders & {*RUN.files()}
    assert places_of(RUN) == folders | {*RUN.files()}
    assert scratch_of(pathlib.Path("a/b")) == pathlib.Path("a/.b.partial")


@pytest.fixture
def begun(tiny, place):
    """A run folder in which a run has logged a step."""
    with open_run(place / "run", tiny.config()) as folder:
        folder.metrics.write_text('{"step": 1, "reward": 0.5}\n')
    return folder.path


def enter(path, config):
    with open_run(path, config) as folder:
        return folder


@pytest.mark.parametrize("name", [*PLACES, *INSIDE])
def test_a_run_is_not_opened_over_an_odd_place(name, begun, tiny, watched):
    is_file = name in FILE_NAMES or name.startswith("lock.")
    kinds = ODD
    if is_file or name in PLACES or name.startswith("."):  # Else a library may have made either.
        kinds = (*ODD, "folder" if is_file else "file")
    action = functools.partial(enter, begun, tiny.config())
    refuse(action, begun / name, kinds, watched)


def test_a_run_folder_may_itself_be_reached_through_a_link(begun, tiny, place):
    (place / "runs").symlink_to(place)
    (place / "of_the_user").symlink_to(begun)
    for path in (place / "runs" / "run", place / "of_the_user"):
        assert enter(path, tiny.config()).resumed


def test_marks_for_other_processes_are_no_links(begun, tiny):
    (begun / "lock.0123456789abcdef").touch()  # left by a process that was killed
    with open_run_together(begun, tiny.config(), Processes()):
        assert not [*begun.glob("lock.*")]


# Each writer alone: other commands call it without `open_run`.
def stage(path):
    with staged_folder(path, replace=True) as folder:
        (folder / "x").touch()


def log(path, act):
    with MetricsLog(path.parent, tensorboard=False, wandb=False, trackio=False, run_name="r") as x:
        act(x)


def open_sweep(path):
    folder = next(parent for parent in path.parents if parent.name == "folder")
    (folder / "commands.sh").write_text("# python -m experiments.sweep --config=x\n")
    sweep._make_folder(folder)


def open_checkpoints(path):
    with Checkpoints(path.parent, keep=1):
        pass


# Each writer, and what else is wrong at its place; a place that is emptied may hold either.
WRITERS = {
    "table.json": (lambda path: write_json(path, {}), "folder"),
    "table.md": (lambda path: write_atomic(path, "x"), "folder"),
    "lock": (lambda path: lock_holder(path.parent), "folder"),
    "metrics.jsonl": (lambda path: log(path, lambda x: x.write({"step": 1})), "folder"),
    "metrics.jsonl ": (lambda path: log(path, lambda x: x.sync()), "folder"),
    "completions.jsonl": (
        lambda path: log(path, lambda x: x.write_completions(1, [{"a": 1}])),
        "folder",
    ),
    "tensorboard": (lambda path: EventFile(path, purge_step=None), "file"),
    "logs": (lambda path: run_jobs((), path.parent), "file"),
    "logs ": (open_sweep, "file"),
    "programs-node": (open_sweep, "file"),
    "programs-node/a-cache": (open_sweep, ""),
    "5.orbax-checkpoint-tmp": (open_checkpoints, ""),
    "staged": (stage, "file"),
    ".staged.partial": (lambda path: stage(path.with_name("staged")), "file"),
    ".staged.partial/old": (lambda path: stage(path.parents[1] / "staged"), ""),
    "new": (safe_files.make_folder, "file"),
    "old": (safe_files.remove_tree, ""),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_writer_refuses_an_odd_place(name, place, watched):
    write, wrong = WRITERS[name]
    path = place / "folder" / name.strip()
    kinds = (*LINKS, "pipe", *filter(None, [wrong]))
    if name.endswith(" "):  # of another writer; what is not there is not synced
        kinds = ("keys", "pipe", wrong)
    refuse(lambda: write(path), path, kinds, watched, "is a")


@pytest.fixture
def run(tiny, place):
    return write_run(place / "run", tiny, own=True)


def export_with_base(run):
    options = {"base_format": "nvfp4", "with_base": True, "score_problems": 0}
    export(ExportConfig(str(run), "peft", **options))


def evaluate_one(run, _=None):
    return evaluate(EvaluateConfig(str(run), limit=1))


# Commands on a finished run with the places that they write, and then that they read.
COMMAND_PLACES = [
    *(
        (export_with_base, name, (*LINKS[:1], "empty", "dangling", "pipe", "file"))
        for name in (
            "exports",
            "exports/peft",
            "exports/.peft.partial",
            "exports/.peft-base.partial",
        )
    ),
    *(
        (evaluate_one, name, ("link", "dangling", "pipe"))
        for name in ("evaluations", "programs", "programs/a-cache")
    ),
    *(
        (export_with_base, name, ("pipe", "socket", "folder"))
        for name in (
            "config.json",
            "adapter/adapter_config.json",
            "adapter/adapter_model.safetensors",
        )
    ),
]


@pytest.mark.parametrize(("command", "name", "kinds"), COMMAND_PLACES)
def test_a_command_refuses_an_odd_place(command, name, kinds, run, watched):
    refuse(lambda: command(run), run / name, kinds, watched)


def test_a_finished_evaluation_writes_through_no_link(run, watched):
    (folder,) = evaluate_one(run)
    (rows,) = folder.glob("*.jsonl")
    for path in (folder, folder / "results.json", rows):
        saved = path.with_name("saved")
        path.rename(saved)
        refuse(lambda: evaluate_one(run), path, ("link", "keys", "pipe"), watched)
        put(path, "dangling", watched)
        with pytest.raises(UserError, match=re.escape(str(folder))):
            evaluate_one(run)
        path.unlink()
        saved.rename(path)


@pytest.mark.parametrize("name", PLACES)
def test_show_reads_what_can_be_read_and_writes_nothing(name, begun, watched):
    for kind in (*ODD, "folder"):
        put(begun / name, kind, watched)
        before = digest(begun)
        with contextlib.suppress(UserError):
            open_views([str(begun)])
        assert digest(begun) == before


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_pipe_in_a_model_folder_is_one_line(name, tiny, place, watched):
    model = shutil.copytree(tiny.model, place / "model")
    match = f"{name} is a named pipe"
    refuse(lambda: load(str(model), format="stored"), model / name, ["pipe"], watched, match)


def test_checkpoints_with_an_odd_place_are_not_read(place, watched):
    state = {"a": np.zeros(4, np.float32)}
    saved = place / "saved"
    with Checkpoints(saved, keep=1) as checkpoints:
        checkpoints.save(4, state, {"a": 1})
    assert read_latest_meta(saved) == {"a": 1}
    for kind in ("link", "pipe"):
        for path in sorted((saved / "4").rglob("*")):
            folder = shutil.copytree(saved, place / "copy")
            put(folder / path.relative_to(saved), kind, watched)
            assert read_latest_meta(folder) == {}
            with pytest.raises(UserError, match=r"no checkpoint in .* can be read .* is a "):
                read_latest(folder, state)
            shutil.rmtree(folder)


def test_an_export_copies_files_of_the_hub_cache_and_no_others(tiny, place, watched):
    cache = place / "models--user--name"
    model = shutil.copytree(tiny.model, cache / "snapshots" / "0123")
    (cache / "blobs").mkdir()
    for number, path in enumerate(sorted(model.iterdir())):
        path.rename(cache / "blobs" / str(number))
        path.symlink_to(f"../../blobs/{number}")
    assert "config.json" in companion_files(load(str(model), format="stored"), packed=False)
    put(model / "generation_config.json", "secret.json", watched)
    with pytest.raises(UserError, match="a symbolic link to a file outside of its folder"):
        companion_files(load(str(model), format="stored"), packed=False)


# --- What config.json and other files say ---------------------------------------------------------

CONFIG = pathlib.Path("config.json")


@pytest.fixture(scope="module")
def saved(tiny, tmp_path_factory):
    """The content of the config.json of a run."""
    run = write_run(tmp_path_factory.mktemp("saved") / "run", tiny)
    return json.loads((run / "config.json").read_text())


def with_field(saved, name, *value):
    """A copy of a JSON object in which a field has another value, or is absent."""
    saved = copy.deepcopy(saved)
    *sections, last = name.split(".")
    inside = functools.reduce(lambda part, section: part[section], sections, saved)
    inside.pop(last, None)
    inside |= {last: value[0]} if value else {}
    return saved


def nested(depth):
    return json.loads("[" * depth + "]" * depth)


def test_what_a_run_writes_is_accepted(saved):
    assert is_time(provenance()["created"])
    for change in ({}, {"versions": {"jax": "1", "python": "3", "qerl-jax": None}}, {"git": None}):
        check_run(CONFIG, saved | provenance() | change)
    # Memory is no count; runs of earlier versions lack the field.
    for value in ((), (0,), (2**33,), (2**40,)):
        check_run(CONFIG, with_field(saved, "config.environment.host_cache_bytes", *value))
    assert is_shallow(nested(20))
    assert is_shallow("x")
    assert not is_shallow(nested(22))
    assert not is_shallow({"a": nested(900)})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("created", [(), "x", 5, "0001-01-01T00:00:00+0000", "2026-01-01"]),
        ("python_rewards", [[], {"correctness": 1}]),
        ("versions", [{"jax": 1}]),
        ("git", [(), {}, "x"]),
        ("config", [()]),
        ("config.data", [(), "x", []]),
        ("config.data.path", [()]),
        ("config.data.system_prompt", [1, {}]),
        ("config.data.fields", [{"answer": 1}]),
        ("config.data.mixture", [{"a": 1}, {"a": {"weight": 0.0}}, {"a": {"path": 5}}]),
        ("config.eval.problems", [-1, True, 0.5, 2**31, "1", float("nan")]),
        ("config.environment", [{"time_limit": 1e10}]),
        ("config.environment.host_cache_bytes", [-1, 0.5, True, "1"]),
        ("config.reward_time_limit", [-1, 1e10, float("inf"), float("nan"), "5", None]),
        ("config.rewards", [{"a": {}}, {"a": {"function": "a:b", "x": 1}}]),
        ("config.rewards.correctness", [{"function": "a:b", "time_limit": x} for x in (-1, 1e10)]),
        ("config.rollout.stop", [(), "x", [1], None]),
        ("config.data.levels", ["x", [[]], None]),
        ("config.train", ["x", 0, None]),
        ("config.train.parameters", [1, None]),
        ("config.read_by_none", [nested(30), nested(900)]),
    ],
)
def test_what_no_run_writes_is_refused(name, values, saved):
    for value in values:
        changes = () if value == () else (value,)
        match = "is absent" if value == () else "not the config of a run"
        with pytest.raises(UserError, match=rf"config\.json: .*{match}") as error:
            check_run(CONFIG, with_field(saved, name, *changes))
        assert "\n" not in str(error.value)


def test_readers_check_what_they_read(saved, place):
    path = place / "theirs" / "config.json"
    path.write_bytes(dumps(saved | {"created": 5}))
    with pytest.raises(UserError, match="created is 5 and not a time"):
        read_run(path.parent)
    path.write_bytes(dumps(saved | {"steps": "@deep 900@"}))
    assert run_folder.read_run(path) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"steps": "x"}', '{"steps": NaN}', "[" * 9999])
def test_a_damaged_summary_is_one_line(text, saved, place):
    folder = place / "theirs"
    (folder / "summary.json").write_text(text)
    with pytest.raises(UserError, match=r"summary\.json.*remove it"):
        RunFolder(folder).finished_steps()
    with pytest.raises(UserError, match=r"summary\.json.*remove it"):
        read_number(folder / "summary.json", "steps")
    (folder / "config.json").write_bytes(dumps(saved))
    (view,) = open_views([str(folder)])  # It shows what it can read.
    assert not view.finished


@pytest.mark.parametrize(
    "change",
    [
        {"cursor": None},
        {"fingerprint": 5},
        {"noise": {"a": 1}},
        {"noise": {"sigma": "x"}},
        {"problems": []},
        {"problems": {"train": 1}},
        {"prompts": 1},
        {"reference": []},
    ],
)
def test_what_is_saved_with_arrays_is_checked(change):
    check_meta(CONFIG, META)
    for meta in (META | change, {name: META[name] for name in META if name not in change}):
        with pytest.raises(UserError, match="no run wrote"):
            check_meta(CONFIG, meta)


# --- What a folder names --------------------------------------------------------------------------


def theirs(run, section="rewards", **rewards):
    """Changes the rewards of a run, as another person does."""
    content = json.loads((run / "config.json").read_text())
    named = content["config"]["rewards"]
    if section == "python_rewards":
        named = content["python_rewards"] = copy.deepcopy(named)
    named |= rewards
    (run / "config.json").write_bytes(dumps(content))


def commands(run, place, *, judge="", token_env=()):
    """An evaluation and an export of a run."""
    scorer = (judge,) if judge else ()
    overrides = TaskOverrides(scorer=scorer, token_env=token_env)
    config = EvaluateConfig(source=str(run), limit=1, overrides=overrides)
    yield lambda: evaluate(config)
    out = str(place / f"export-{len(list(place.iterdir()))}")
    options = {"score_problems": 2, "token_env": token_env} | ({"judge": judge} if judge else {})
    yield lambda: export(ExportConfig(source=str(run), format="peft", out=out, **options))


@pytest.mark.parametrize("section", ["rewards", "python_rewards"])
@pytest.mark.parametrize("function", ["", f"{MODULE}:function", "timeit:repeat"])
def test_no_reward_that_a_folder_names_is_called(section, function, run, place, server):
    url, tokens = server
    named = {"function": function or url, "weight": 1.0, "token_env": TOKEN}
    built_in = {
        name: {"function": f"{REWARDS}{name}", "weight": 1.0}
        for name in ("exact_answer", "think_format")
    }
    theirs(run, correctness=built_in["exact_answer"], format=built_in["think_format"])
    own = (run / "config.json").read_bytes()
    match = rf"'{function or url}' is named by .* by --(format-)?judge .*--trust"
    for allowed in ({}, {"token_env": (TOKEN,)}):
        theirs(run, section, correctness=named)
        for command in commands(run, place, **allowed):
            with pytest.raises(UserError, match=match):
                command()
        (run / "config.json").write_bytes(own)
    theirs(run, section, format=named)
    evaluation, export_of_one = commands(run, place)
    with pytest.raises(UserError, match=match):
        evaluation()
    export_of_one()  # It has no use for the reward of the format.
    (run / "config.json").write_bytes(own)
    theirs(run, section, third=named)  # which neither calls
    for command in commands(run, place):
        command()
    assert tokens == []
    assert not (place / "ran").exists()
    assert MODULE not in sys.modules
    assert not ownership.is_own(run)


def test_a_token_is_sent_where_the_user_says_so(run, place, server, capsys):
    """The user names the variable also where the folder is trusted, or the user's own."""
    url, tokens = server
    reward = {"function": url, "weight": 1.0, "token_env": TOKEN}
    theirs(run, correctness=reward, format=reward | {"weight": 0.0})
    ownership.adopt(run)
    for command in commands(run, place):
        with pytest.raises(UserError, match=f"'{TOKEN}', which is sent only if .*--token-env"):
            command()
    assert tokens == []
    for command in commands(run, place, token_env=(TOKEN,)):
        command()
    assert SECRET not in capsys.readouterr().out
    assert set(tokens) == {f"Bearer {SECRET}"}


def test_the_host_is_printed_before_the_first_request(run, place, server, capsys):
    url, tokens = server
    built_in = {"function": f"{REWARDS}think_format", "weight": 1.0}
    theirs(run, correctness={"function": url, "weight": 1.0}, format=built_in)
    host = url.removeprefix("http://").removesuffix("/score")
    line = f"completions are sent to {host} for their rewards, with the token in {TOKEN}"
    for command in commands(run, place, judge=url, token_env=(TOKEN,)):
        calls._print_once.cache_clear()  # as in another process
        for _ in range(2):
            calls.announce_hosts([calls.resolve(url, token_env=TOKEN)])
        assert capsys.readouterr().out.splitlines().count(line) == 1
        calls._print_once.cache_clear()
        command()
        assert capsys.readouterr().out.splitlines().count(line) == 1
    assert set(tokens) == {f"Bearer {SECRET}"}
    assert not ownership.is_own(run)


def test_a_judge_that_the_user_names_is_imported(run, place):
    built_in = {"function": f"{REWARDS}think_format", "weight": 1.0}
    theirs(run, correctness={"function": f"{MODULE}:function", "weight": 1.0}, format=built_in)
    evaluation, _ = commands(run, place, judge=f"{MODULE}:function")
    evaluation()
    assert (place / "ran").exists()
    del sys.modules[MODULE]


def test_trust_adopts_a_run(tiny, run):
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


def test_a_variable_stands_for_trust(run, monkeypatch):
    theirs(run)
    monkeypatch.setenv("XDG_CONFIG_HOME", "/dev/null")  # a home that holds no key
    with pytest.raises(UserError, match="--trust"):
        evaluate_one(run)
    monkeypatch.setenv(ownership.VARIABLE, "1")
    before = (run / "config.json").stat()
    evaluate_one(run)
    assert not ownership.is_own(run)
    assert (run / "config.json").stat() == before  # Without a key, nothing is written.


# --- Commands on changed folders ------------------------------------------------------------------


def export_one(run, _=None, form="peft", out="", score_problems=0):
    export(ExportConfig(str(run), form, out=out, score_problems=score_problems))


def export_scored(run, _):
    export_one(run, score_problems=1)


def export_out(folder, _):
    export_one(folder, out="out")


def export_merged(folder, _):
    export_one(folder, form="merged", out="out")


def evaluate_folder(folder, tiny):
    overrides = TaskOverrides(
        system_prompt=("",), max_new_tokens=("4",), scorer=(f"{REWARDS}exact_answer",)
    )
    evaluate(EvaluateConfig(str(folder), (str(tiny.problems),), limit=1, overrides=overrides))


def sample_one(folder, _, adapter=""):
    sample(SampleConfig(str(folder), "t1 t2", adapter=adapter, max_new_tokens=2))


def sample_base(folder, _):
    sample_one(folder, _, adapter="none")


def show(run, _):
    before = digest(run)
    for more in ([], ["--step=all"], ["--html=page.html"]):
        show_command.run(show_command.make_parser().parse_args([str(run), *more]))
    assert digest(run) == before, "show wrote"


def quantize_folder(folder, _):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "excepthook", sys.excepthook)
        patch.setattr(sys, "argv", ["quantize", str(folder), "out"])
        quantize.main()


def train(run, tiny):
    loop.train(tiny.config(RUN_CHANGES), workdir=run)


def train_from(run, tiny, best=""):
    loop.train(tiny.config(RUN_CHANGES | {"init_from": f"{run}{best}"}), workdir="new")


def train_from_best(run, tiny):
    train_from(run, tiny, ":best")


# Commands by what they read, as another process would run them.
COMMANDS = {
    "run": (
        *(show, show, export_one, export_merged, export_scored, evaluate_one, evaluate_one),
        *(train, train, train_from, train_from_best, sample_one),
    ),
    "adapter": (export_out, export_merged, sample_one, evaluate_folder),
    "model": (sample_one, sample_base, evaluate_folder, quantize_folder),
}
KINDS = (*LINKS * 3, "pipe", "socket", "folder", "file", "secret.jsonl", "pickle")


class Touch:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


@pytest.fixture(scope="module")
def templates(tiny, tmp_path_factory):
    """A run that has taken its steps and was evaluated and exported, an adapter and a model."""
    folder = tmp_path_factory.mktemp("templates")
    with contextlib.chdir(folder):
        run = loop.train(tiny.config(RUN_CHANGES), workdir=folder / "run")
        evaluate_one(run)
        export_one(run)
    (run / "programs").mkdir()
    (run / "programs" / "jit_f-0123-cache").touch()
    shutil.copytree(run / "adapter", folder / "adapter")
    shutil.copytree(run / "adapter", run / "best_adapter")
    (run / "best.json").write_text('{"step": 1, "accuracy": 0.5}\n')
    shutil.copytree(tiny.model, folder / "model")
    return folder


@pytest.fixture
def without_steps(monkeypatch):
    """Lets a run begin and end without a step: a step reads nothing of a folder."""
    monkeypatch.setattr(loop, "_train_steps", lambda *_: None)


def places_in(kind, folder):
    """The places in which a command on a folder writes or reads."""
    found = {path.relative_to(folder) for path in folder.rglob("*")}
    if kind != "run":
        return sorted(
            found | {pathlib.Path(name.replace("*", "jinja")) for name in model_source._HUB_FILES}
        )
    staged = [pathlib.Path("exports", form) for form in ("peft", "merged")]
    found |= places_of(RunFolder(pathlib.Path())) | {*map(pathlib.Path, INSIDE), *staged}
    return sorted(found | {scratch_of(path) / "old" for path in staged})


def hostile_values(place, url):
    """Values that another person may write into a file of JSON."""
    outside = [place / "watched" / name for name in (".", "secret.jsonl", "keys")]
    texts = [
        *(f"{MODULE}:function", f"{MODULE}.inside:function", "timeit:repeat", "os:system", TOKEN),
        *(url, url.replace("http", "HTTP"), f"{url}?api_key={SECRET}", url.replace("/score", "")),
        *map(str, outside),
        *(os.path.relpath(path, place) for path in outside),
        f"{{{{ cycler.__init__.__globals__.os.mkdir('{place / 'ran'}') }}}}",
        "{% for x in ().__class__.__base__.__subclasses__() %}{{ x }}{% endfor %}",
    ]
    others = [{"function": text, "weight": 1.0, "token_env": TOKEN} for text in texts[:5]]
    return [*ODD_VALUES, *texts * 2, *others]


def change_file(path, rng, values):
    """Changes a file of JSON, or a line of one; puts a text into any other file."""
    content = path.read_bytes()
    lines = content.splitlines() if path.suffix == ".jsonl" else [content]
    number = rng.randrange(len(lines) or 1)
    try:
        lines[number] = dumps(changed(json.loads(lines[number]), rng, values))
    except (ValueError, IndexError, RecursionError):  # not JSON, or odd already
        lines = [str(rng.choice(values)).encode(errors="surrogatepass")]
    path.write_bytes(b"\n".join(lines) + b"\n")


def random_cases(numbers, templates, place, url):
    """Commands, each with a folder that has random changes, and what they are."""
    for number in numbers:
        rng = random.Random(number)
        kind = rng.choice(("run", "run", "run", "adapter", "model"))
        folder = shutil.copytree(templates / kind, place / "theirs" / kind)
        chosen = rng.randrange(len(COMMANDS[kind]))
        if kind == "run" and rng.random() < 0.7:
            clear(folder)
        made = []
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            path = folder / rng.choice(["config.json", rng.choice(places_in(kind, folder))])
            if path.is_file() and not path.is_symlink() and rng.random() < 0.7:
                change_file(path, rng, hostile_values(place, url))
                made.append(f"{path.name}: {path.read_bytes()[-3000:]!r}")
            elif not any(part.is_symlink() or part.is_file() for part in path.parents):
                odd = rng.choice(KINDS)
                put(path, "file" if odd == "pickle" else odd, place / "watched")
                if odd == "pickle":
                    path.write_bytes(pickle.dumps(Touch(place / "ran")))
                made.append(f"{path}: {odd}")
        yield COMMANDS[kind][chosen], folder, f"case {number}: {kind}, command {chosen}, {made}"


def field_cases(fields, templates, place):
    """Commands, each with a run that has another value in a field of its config.json."""
    for command, name, value in fields:
        folder = shutil.copytree(templates / "run", place / "theirs" / "run")
        saved = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_bytes(dumps(with_field(saved, name, value)))
        clear(folder)
        yield command, folder, f"{name}={value!r}"


def clear(run):
    """Removes what commands have made, where they would have nothing to do."""
    shutil.rmtree(run / "exports")
    shutil.rmtree(run / "evaluations")
    (run / "summary.json").unlink()


def error_of(command, folder, tiny):
    """The error of one line with which a command ends, or an empty text."""
    signal.alarm(SECONDS)
    try:
        command(folder, tiny)
    except UserError as error:
        return str(error)
    except SystemExit as error:  # of a command, after its line
        return "exit" if error.code == 2 else f"Traceback: exit code {error.code}"
    except (Exception, KeyboardInterrupt) as error:
        return "Traceback: " + "".join(traceback.format_exception(error)[-4:])
    return ""


def run_cases(cases, place, tokens, tiny, capfd):
    """Runs cases, each of which is made when its turn comes; returns how many commands worked."""
    worked, failures, before = 0, [], digest(place / "watched")
    own = f"years of work {SECRET}", f"ssh-ed25519 {SECRET}"
    for command, folder, what in cases:
        capfd.readouterr()
        message = error_of(command, folder, tiny)
        worked += not message
        # The command line prints the message of an error as this does.
        said = "".join(capfd.readouterr()) + visible(message)
        files = [path for path in place.rglob("*") if path.is_file() and not path.is_symlink()]
        theirs = [path for path in files if not path.is_relative_to(place / "watched")]
        failures += [
            f"{rule}: {what}\n{said}"
            for rule, broken in {
                "the folder of the user changed": digest(place / "watched") != before,
                "the server got a request": tokens,
                "code ran": (place / "ran").exists() or MODULE in sys.modules,
                "a traceback": "Traceback" in said,
                "raw text reached the terminal": not all(
                    character in "\n\t" or character.isprintable() for character in said
                ),
                "a secret was printed": any(text in said for text in own),
                "a secret was written": any(
                    text.encode() in path.read_bytes() for path in theirs for text in own
                ),
            }.items()
            if broken
        ]
        tokens.clear()
        for path in place.iterdir():
            if path.name != "watched":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert not failures, "\n\n".join((f"{len(failures)} cases failed", *failures))
    return worked


@pytest.mark.usefixtures("without_steps")
@pytest.mark.parametrize(
    "cases", [range(CASES), pytest.param(range(CASES, 20 * CASES), marks=pytest.mark.slow)]
)
def test_a_folder_of_another_person_is_data(cases, templates, place, server, tiny, capfd):
    url, tokens = server
    asked = os.environ.get("QERL_FOREIGN_CASES")
    chosen = range(*map(int, asked.split("-"))) if asked else cases
    worked = run_cases(random_cases(chosen, templates, place, url), place, tokens, tiny, capfd)
    assert asked or worked > len(cases) // 10  # Else they would test little but their first check.


@pytest.mark.parametrize("share", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_each_field_of_a_run_may_hold_anything(share, templates, place, server, tiny, capfd):
    """Each field that is read gets a value of another type, and each text one that a run lacks.

    All cases run each night, one of `share` by default.
    """
    saved = json.loads((templates / "run" / "config.json").read_text())
    sections = {f"config.{name}": saved["config"][name] for name in READ}
    found = flatten(sections) | flatten({n: v for n, v in saved.items() if n in TOP}) | sections
    # With what no command reads of these sections, each case would take a second.
    unread = r"curriculum|head_format|kv_cache_bytes|rollout\.(temp|top_|max_new)|count|kind|dirty"
    others = {str: [5, ["x"]], int: ["x", -1], float: ["x", {}], bool: [{}, "x"]}
    made = []
    for number, (name, value) in enumerate(sorted(found.items())):
        command = (evaluate_one, export_scored)[number % 2]
        if name in ("command", "device", "versions"):
            command = export_one
        if not re.search(unread, name):
            made += [(command, name, new) for new in others.get(type(value), ["x", "@deep 600@"])]
    hostile_text = f"{place}/\x1b]0;owned\x07\u202e.jsonl"
    for name in ("model.source", "model.format", "model.dtype", "data.path", "data.eval_path"):
        made.append((evaluate_one, f"config.{name}", hostile_text))
    run_cases(field_cases(made[::share], templates, place), place, server[1], tiny, capfd)
