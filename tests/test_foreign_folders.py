"""Folders of another person are data: whatever they hold, nothing outside of them changes.

Each case copies a run, an adapter or a model, puts links, odd types and hostile values into it, and
runs a command on it. The command works or raises an error of one line. A folder beside the copy
stays as it is, a server gets no request, a secret is printed and written nowhere, and no code runs.

A failure names its case, whose number is the seed of all that is random in it:

    QERL_FOREIGN_CASES=17,250-260 uv run pytest tests/test_foreign_folders.py -n 0
"""

import contextlib
import copy
import functools
import hashlib
import itertools
import json
import os
import pathlib
import pickle
import random
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import traceback

import pytest
from odd_places import places_of, put

from qerl_jax.commands import quantize
from qerl_jax.commands import show as show_command
from qerl_jax.errors import UserError, visible
from qerl_jax.evaluation.evaluate import evaluate
from qerl_jax.evaluation.results_folder import EvaluateConfig
from qerl_jax.evaluation.sample import SampleConfig, sample
from qerl_jax.evaluation.tasks import TaskOverrides
from qerl_jax.export.write import ExportConfig, export
from qerl_jax.run.folder import RunFolder, flatten
from qerl_jax.system.staging import scratch_of
from qerl_jax.training import loop
from qerl_jax.weights import model_source

CASES = 20  # of the default run; the slow test has more
SECONDS = 60  # far more than a case takes; a reader of a pipe would wait forever
SECRET = "secret-of-the-user-17"
TOKEN = "QERL_TEST_WATCHED_TOKEN"
MODULE = "module_that_a_folder_names"
REWARDS = "qerl_jax.rewards.functions:"
RUN_CHANGES = {
    "steps": 2,
    "rewards.correctness.function": f"{REWARDS}exact_answer",
    "rewards.format.function": f"{REWARDS}think_format",
    "log.tensorboard": True,
}
NEW_TOKENS = 4
OTHER_PLACES = (
    *("checkpoints/9", "checkpoints/9.orbax-checkpoint-tmp", "checkpoints/damaged-2"),
    *("lock.0123456789abcdef", "wandb/latest-run", "profile/plugins", "evaluations/old"),
)
# What commands read of config.json, which the cases change more often than the rest.
TOP = ("command", "created", "device", "versions", "git")
READ = ("data", "eval", "model", "rewards", "rollout", "reward_time_limit")
# Commands by what they read, with the number of their cases among ten.
COMMANDS = {
    "run": {"show": 3, "export": 3, "evaluate": 2, "resume": 2, "init_from": 2, "sample": 1},
    "adapter": {"export": 2, "sample": 1, "evaluate": 1},
    "model": {"sample": 2, "evaluate": 2, "quantize": 1},
}
SOURCES = ("run", "run", "run", "adapter", "model")


class Touch:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


# --- What is watched ------------------------------------------------------------------------------


def digest(folder):
    """Names, contents, times and modes of all that is in a folder."""
    found = []
    for path in sorted((folder, *folder.rglob("*"))):
        about = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(about.st_mode) else b""
        found.append((str(path), about.st_mode, about.st_mtime_ns, content))
    return hashlib.sha256(repr(found).encode()).hexdigest()


class Server:
    """A server that keeps what it gets and answers nothing."""

    def __init__(self):
        self.requests = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/score"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(1)
                with contextlib.suppress(OSError):
                    self.requests.append(connection.recv(4096))

    def close(self):
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@pytest.fixture
def server():
    made = Server()
    yield made
    made.close()


# --- The folders before they are changed ----------------------------------------------------------


@pytest.fixture(scope="module")
def templates(tiny, tmp_path_factory):
    """A run that has taken its steps and was evaluated and exported, an adapter and a model."""
    folder = tmp_path_factory.mktemp("templates")
    with contextlib.chdir(folder):
        run = loop.train(tiny.config(RUN_CHANGES), workdir=folder / "run")
        evaluate(EvaluateConfig(str(run), limit=1))
        export(ExportConfig(str(run), "peft", score_problems=0))
    (run / "programs").mkdir()
    (run / "programs" / "jit_f-0123-cache").touch()
    (run / "programs" / "rollout-0123").touch()
    shutil.copytree(run / "adapter", folder / "adapter")
    shutil.copytree(run / "adapter", run / "best_adapter")
    (run / "best.json").write_text('{"step": 1, "accuracy": 0.5}\n')
    shutil.copytree(tiny.model, folder / "model")
    return folder


def listing(folder):
    return sorted(path.relative_to(folder) for path in folder.rglob("*"))


def places_of_a_run(run):
    """The places in which a run, or a command on it, writes or reads; those of libraries last."""
    places = RunFolder(pathlib.Path())
    staged = [*places.replaced_as_a_whole(), places.exports / "peft", places.exports / "merged"]
    found = {
        *places_of(places),
        *staged,
        *map(scratch_of, staged),
        *map(pathlib.Path, OTHER_PLACES),
    }
    found |= {scratch_of(path) / "old" for path in staged[-2:]}
    inside = {path for path in listing(run) if path.parts[0] in ("checkpoints", "tensorboard")}
    found |= {*listing(run)} - inside
    return sorted(found), sorted(inside | found)


def places_of_a_model(model):
    """All places of a folder of a model or an adapter that are read."""
    names = {name.replace("*", "jinja") for name in model_source._HUB_FILES}
    found = sorted({*map(pathlib.Path, names), *listing(model)})
    return found, found


# --- What a case puts there -----------------------------------------------------------------------

KINDS = ("pipe", "socket", "folder", "file", "dangling", "link", "keys", "secret.jsonl", "pickle")
LINKS = ("link", "keys", "secret.jsonl", "empty", "dangling")


def replace(path, kind, watched, marker):
    """Puts something odd at a place, unless there is a link or a file on the way to it."""
    if any(parent.is_symlink() or parent.is_file() for parent in path.parents):
        return
    put(path, "file" if kind == "pickle" else kind, watched)
    if kind == "pickle":
        path.write_bytes(pickle.dumps(Touch(marker)))


def dumps(value):
    """JSON of a value, in which a text such as '@deep 900@' is a list of that depth."""
    return re.sub(r'"@deep (\d+)@"', lambda m: "[" * int(m[1]) + "]" * int(m[1]), json.dumps(value))


def hostile(rng, like, *, url, watched, marker):
    """A value that another person may write, often of the type `like`."""
    outside = [watched, watched / "secret.jsonl", watched / "keys", "/dev/zero", "/proc/self/mem"]
    texts = [
        *(f"{MODULE}:function", f"{MODULE}.inside:function", "timeit:repeat", "os:system"),
        *(url, url.replace("http", "HTTP"), f"{url}?api_key={SECRET}", url.replace("/score", "")),
        *map(str, outside),
        *(os.path.relpath(path, pathlib.Path.cwd()) for path in outside),
        *("../watched", "../../watched/keys", "~", "~/x", "", ".", "..", "a/../../..", "/"),
        *(
            "\x1b]0;owned\x07\x1b[2J",
            "a\rb",
            "a\nb\x7f",
            "\u202e\u2066x",
            "\ud800",
            "a\0b",
            "x" * 5000,
        ),
        *("package:os", "package:../x", "reasoning_gym:../x", "pandas", "owner/name:x"),
        f"{{{{ cycler.__init__.__globals__.os.mkdir('{marker}') }}}}",
        "{% for x in ().__class__.__base__.__subclasses__() %}{{ x }}{% endfor %}",
        *("nan", "1e999", "9" * 30, "-1", "{}", "$\\frac{$", "<script>x</script>", "%s%n", TOKEN),
    ]
    numbers = [0, -1, 1, 2, 7, 2**31, 2**63, 10**30, -(10**30), 10**400, 0.5, -0.5, 1e308, 1e-320]
    numbers += [float("nan"), float("inf"), -float("inf"), True, False, None]
    others = [[], {}, [None], [[]], {"": {}}, ["x", 1], {"a": 1}, {"function": url}]
    others += [{"function": f"{MODULE}:function", "weight": 1.0}, [TOKEN], {"token_env": TOKEN}]
    others += ["@deep 60@", "@deep 450@", "@deep 900@", "@deep 4000@", "@deep 100000@"]
    kinds = {str: texts, int: numbers, float: numbers}
    chosen = kinds.get(like) if rng.random() < 0.6 else None
    return copy.deepcopy(rng.choice(chosen or rng.choice((texts, numbers, others))))


def fields(value, path=()):
    """The paths of everything in a JSON value."""
    children = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in list(children):
        yield (*path, key)
        if isinstance(child, dict | list):
            yield from fields(child, (*path, key))


def change(value, rng, make):
    """Gives a few fields of a JSON value other values, adds or removes some."""
    for _ in range(rng.choice((1, 1, 2, 6))):
        found = list(fields(value)) if isinstance(value, dict | list) else []
        if not found:
            return value
        if rng.random() < 0.6:
            found = [p for p in found if p[0] != "config" or set(p[1:2]) & {*READ}] or found
        *path, key = rng.choice(found)
        parent = value
        for step in path:
            parent = parent[step]
        match rng.randrange(8):
            case 0:
                del parent[key]
            case 1 if isinstance(parent, dict):
                new = rng.choice(("token_env", "retries", "python_rewards", "own", str(make())))
                parent[new] = make()
            case _:
                parent[key] = make(type(parent[key]))
    return value


def is_json(path):
    if path.suffix in (".json", ".jsonl"):
        return True
    return path.name in ("_CHECKPOINT_METADATA", "_METADATA", "_sharding", "process_0")


def change_file(path, rng, make):
    """Changes a file of JSON, or of lines of JSON; puts a text into any other file."""
    if not is_json(path):
        path.write_bytes(str(make()).encode(errors="surrogatepass"))
        return
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    if not lines:
        return
    number = rng.randrange(len(lines))
    if rng.random() < 0.1:
        lines[number] = dumps(make())
    else:
        lines[number] = dumps(change(json.loads(lines[number]), rng, make))
    path.write_text("\n".join(lines) + "\n")


def change_rewards(path, rng, make, url):
    """Lets a run name a reward, and the variable of a token."""
    saved = json.loads(path.read_text())
    function = rng.choice((url, f"{MODULE}:function", "timeit:repeat", make()))
    reward = {"function": function, "weight": 1.0, "token_env": TOKEN}
    for section in rng.choice((["config"], ["python"], ["config", "python"])):
        content = saved["config"]["rewards"] if section == "config" else {}
        content = copy.deepcopy(content)
        for name in rng.choice((("correctness",), ("format",), ("correctness", "format", "x"))):
            content[name] = dict(reward)
        if section == "config":
            saved["config"]["rewards"] = content
        else:
            saved["python_rewards"] = content
    path.write_text(dumps(saved))


# --- The commands ---------------------------------------------------------------------------------


def call(command, kind, folder, tiny, rng):
    """Runs a command as another process would, but in this one."""
    out = pathlib.Path("out")
    problems = TaskOverrides(
        system_prompt=("",), max_new_tokens=(str(NEW_TOKENS),), scorer=(f"{REWARDS}exact_answer",)
    )
    match command:
        case "show":
            arguments = [str(folder), *rng.choice(([], ["--step=all"], ["--html=page.html"]))]
            show_command.run(show_command.make_parser().parse_args(arguments))
        case "export":
            form = rng.choice(("peft", "peft", "merged"))
            place = "" if kind == "run" and rng.random() < 0.7 else str(out)
            count = rng.choice((0, 0, None))
            export(ExportConfig(str(folder), form, out=place, score_problems=count))
        case "export_here":
            export(ExportConfig(str(folder), "peft", score_problems=0))
        case "export_scored":
            export(ExportConfig(str(folder), "peft", score_problems=1))
        case "evaluate" if kind == "run":
            evaluate(EvaluateConfig(str(folder), limit=1))
        case "evaluate":
            tasks = (str(tiny.problems),)
            evaluate(EvaluateConfig(str(folder), tasks=tasks, limit=1, overrides=problems))
        case "sample":
            adapter = rng.choice(("", "", "none"))
            sample(SampleConfig(str(folder), "t1 t2", adapter=adapter, max_new_tokens=2))
        case "quantize":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sys, "excepthook", sys.excepthook)
                patch.setattr(sys, "argv", ["quantize", str(folder), str(out)])
                quantize.main()
        case "resume":
            loop.train(tiny.config(RUN_CHANGES), workdir=folder)
        case "init_from":
            best = rng.choice(("", "", ":best"))
            config = tiny.config(RUN_CHANGES | {"init_from": f"{folder}{best}"})
            loop.train(config, workdir="new")


def make_case(number, templates, place, server):
    """Makes the folder of a case; returns command, kind, folder and a text that describes it."""
    rng = random.Random(number)
    kind = rng.choice(SOURCES)
    command = rng.choices(*zip(*COMMANDS[kind].items(), strict=True))[0]
    folder = place / "theirs" / kind
    shutil.copytree(templates / kind, folder)
    watched, marker = place / "watched", place / "ran"
    made = []

    def make(like=None):
        return hostile(rng, like, url=server.url, watched=watched, marker=marker)

    if kind == "run" and command == "resume" and rng.random() < 0.8:
        (folder / "summary.json").unlink()  # Else the run has nothing to do.
    if kind == "run" and command == "export":
        shutil.rmtree(folder / "exports" / "peft")  # It would be the end of the command.
    places, more = places_of_a_run(folder) if kind == "run" else places_of_a_model(folder)
    if command in ("evaluate", "export") and kind == "run" and rng.random() < 0.3:
        change_rewards(folder / "config.json", rng, make, server.url)
        made.append("rewards")
    count = rng.choice((1, 1, 1, 2, 4)) + len(made)
    while len(made) < count:
        if rng.random() < 0.4:
            odd = rng.choice(LINKS if rng.random() < 0.6 else KINDS)
            path = rng.choice(places if rng.random() < 0.8 else more)
            replace(folder / path, odd, watched, marker)
            made.append(f"{path}: {odd}")
        else:
            main = [p for p in places if p.parent == pathlib.Path() and is_json(p)]
            main += [pathlib.Path("config.json")] * (8 if kind == "run" else 2)
            path = rng.choice(main if rng.random() < 0.8 else more)
            if (folder / path).is_file() and not (folder / path).is_symlink():
                with contextlib.suppress(ValueError, RecursionError):  # It is odd already.
                    change_file(folder / path, rng, make)
                    made.append(f"{path}: {(folder / path).read_bytes()[-3000:]!r}")
    return command, kind, folder, rng, f"case {number}: {command} of a {kind} with {made}"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory with the folder of another person, and one of the user to watch."""
    place = tmp_path / "place"
    (place / "theirs").mkdir(parents=True)
    watched = place / "watched"
    (watched / "documents").mkdir(parents=True)
    (watched / "documents" / "thesis.tex").write_text(f"years of work {SECRET}")
    (watched / "keys").write_text(f"ssh-ed25519 {SECRET}\n")
    rows = [{"question": f"t{n} {SECRET}", "answer": SECRET} for n in range(4)]
    (watched / "secret.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (watched / "empty").mkdir()
    (watched / "keys").chmod(0o600)
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


def check_outcome(place, before, server, said, what):
    """Checks what must hold after any command."""
    assert digest(place / "watched") == before, f"the folder of the user changed: {what}"
    assert server.requests == [], f"the server got a request: {what}"
    assert not (place / "ran").exists(), f"code ran: {what}"
    assert MODULE not in sys.modules, f"a module was imported: {what}"
    assert "Traceback" not in said, f"a traceback: {what}\n{said}"
    assert visible(said) == said, f"raw text reached the terminal: {what}\n{said!r}"
    own = f"years of work {SECRET}", f"ssh-ed25519 {SECRET}"
    assert not any(text in said for text in own), f"a secret was printed: {what}\n{said}"
    for path in place.rglob("*"):
        if path.is_file() and not path.is_symlink() and not path.is_relative_to(place / "watched"):
            content = path.read_bytes()
            assert not any(t.encode() in content for t in own), f"{path} has a secret: {what}"


def run_case(case, place, server, tiny, capfd):
    """Runs a case, and returns whether the command worked."""
    command, kind, folder, rng, what = case
    before = digest(place / "watched")
    if command == "show":
        theirs = digest(folder)

    def fail(signum, frame):
        raise AssertionError(f"a pipe is waited for, or a loop does not end: {what}")

    handler = signal.signal(signal.SIGALRM, fail)
    signal.alarm(SECONDS)
    capfd.readouterr()
    message = ""
    try:
        call(command, kind, folder, tiny, rng)
    except UserError as error:
        message = str(error)
    except SystemExit as error:  # of a command, after its line
        if error.code != 2:
            raise AssertionError(f"exit code {error.code}: {what}") from error
        message = "exit"
    except Exception as error:
        trace = "".join(traceback.format_exception(error)[-4:])
        raise AssertionError(f"{trace}{what}") from error
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
    said = "".join(capfd.readouterr())
    # The command line prints the message of an error as this does.
    check_outcome(place, before, server, said + visible(message), what)
    if command == "show":
        assert digest(folder) == theirs, f"show wrote: {what}"
    return not message


def numbers(text):
    """The numbers of '17,250-260'."""
    found = [re.fullmatch(r"(\d+)(?:-(\d+))?", part) for part in text.split(",")]
    return [n for f in found for n in range(int(f[1]), int(f[2] or f[1]) + 1)]


@pytest.fixture
def without_steps(monkeypatch):
    """Lets a run begin and end without a step: a step reads nothing of a folder."""
    monkeypatch.setattr(loop, "_train_steps", lambda run: None)


def run_cases(cases, place, server, tiny, capfd):
    """Runs cases, each of which is made when its turn comes; returns how many worked."""
    worked, failures = 0, []
    for make in cases:
        try:
            worked += run_case(make(), place, server, tiny, capfd)
        except AssertionError as error:
            failures.append(str(error))
        server.requests.clear()
        for path in place.iterdir():
            if path.name != "watched":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert not failures, "\n\n".join((f"{len(failures)} cases failed", *failures))
    return worked


@pytest.mark.usefixtures("without_steps")
def test_a_folder_of_another_person_is_data(templates, place, server, tiny, capfd):
    asked = os.environ.get("QERL_FOREIGN_CASES")
    chosen = numbers(asked) if asked else range(CASES)
    cases = [functools.partial(make_case, n, templates, place, server) for n in chosen]
    worked = run_cases(cases, place, server, tiny, capfd)
    assert asked or worked > CASES // 10  # Else the cases would test little but their first check.


def copied(templates, place):
    return shutil.copytree(templates / "run", place / "theirs" / "run")


def with_odd_place(templates, place, command, path, odd):
    folder = copied(templates, place)
    if command == "export_here":
        shutil.rmtree(folder / "exports" / "peft")
    if command == "resume":
        (folder / "summary.json").unlink()
    replace(folder / path, odd, place / "watched", place / "ran")
    return command, "run", folder, random.Random(0), f"{command} with {path}: {odd}"


@pytest.mark.usefixtures("without_steps")
@pytest.mark.parametrize("kinds", [1, pytest.param(len(LINKS), marks=pytest.mark.slow)])
def test_nothing_is_written_through_a_place_of_a_run(kinds, templates, place, server, tiny, capfd):
    """Each place that a command writes; they are too many for the cases of the other test."""
    exports = ("exports", "exports/peft", "exports/.peft.partial", "exports/.peft.partial/old")
    places = {
        "resume": [
            path for path in places_of_a_run(templates / "run")[0] if "exports" not in path.parts
        ],
        "export_here": list(map(pathlib.Path, exports)),
        "evaluate": [pathlib.Path(p) for p in ("evaluations", "programs", "programs/rollout-0123")],
    }
    rng = random.Random(0)
    cases = [
        functools.partial(with_odd_place, templates, place, command, path, odd)
        for command, paths in places.items()
        for path in paths
        for odd in (("link", "keys") if command != "resume" else rng.sample(LINKS, kinds))
    ]
    run_cases(cases, place, server, tiny, capfd)


def with_rewards(templates, place, command, section, name, function):
    folder = copied(templates, place)
    saved = json.loads((folder / "config.json").read_text())
    reward = {"function": function, "weight": 1.0, "token_env": TOKEN}
    if section == "python_rewards":
        saved["python_rewards"] = copy.deepcopy(saved["config"]["rewards"])
    (saved["config"]["rewards"] if section == "rewards" else saved[section])[name] = reward
    (folder / "config.json").write_text(json.dumps(saved))
    shutil.rmtree(folder / "exports" / "peft")
    return command, "run", folder, random.Random(0), f"{command} with {section}.{name}={function}"


def test_no_reward_of_a_run_is_called(templates, place, server, tiny, capfd):
    functions = (server.url, f"{MODULE}:function", "timeit:repeat")
    cases = [
        functools.partial(with_rewards, templates, place, *choices)
        for choices in itertools.product(
            ("evaluate", "export_scored"),
            ("rewards", "python_rewards"),
            ("correctness", "format"),
            functions,
        )
    ]
    worked = run_cases(cases, place, server, tiny, capfd)
    assert worked == len(functions) * 2  # An export has no use for the reward of the format.


def with_field(templates, place, command, name, value):
    folder = copied(templates, place)
    saved = json.loads((folder / "config.json").read_text())
    *sections, last = name.split(".")
    inside = functools.reduce(lambda part, section: part[section], sections, saved)
    inside[last] = value
    (folder / "config.json").write_text(dumps(saved))
    shutil.rmtree(folder / "exports" / "peft")
    shutil.rmtree(folder / "evaluations")
    return command, "run", folder, random.Random(0), f"{command} with {name}={value!r}"


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
    found = {name: value for name, value in found.items() if not re.search(unread, name)}
    made = []
    for number, (name, value) in enumerate(sorted(found.items())):
        command = ("evaluate", "export_scored")[number % 2]
        if name in ("command", "device", "versions"):
            command = "export_here"
        others = {str: [5, ["x"]], int: ["x", -1], float: ["x", {}], bool: [{}, "x"]}
        made += [(command, name, value) for value in others.get(type(value), ["x", "@deep 600@"])]
    hostile_text = f"{place}/\x1b]0;owned\x07\u202e.jsonl"
    for name in ("model.source", "model.format", "model.dtype", "data.path", "data.eval_path"):
        made.append(("evaluate", f"config.{name}", hostile_text))
    cases = [functools.partial(with_field, templates, place, *some) for some in made[::share]]
    run_cases(cases, place, server, tiny, capfd)


@pytest.mark.slow  # minutes
@pytest.mark.usefixtures("without_steps")
def test_more_folders_of_another_person(templates, place, server, tiny, capfd):
    cases = range(CASES, 20 * CASES)
    made = [functools.partial(make_case, n, templates, place, server) for n in cases]
    run_cases(made, place, server, tiny, capfd)


@pytest.mark.e2e
@pytest.mark.slow
def test_commands_end_in_one_line(templates, place, server, tiny):
    """What the cases above call is what the commands call."""
    before = digest(place / "watched")
    theirs = {}
    for command in ("evaluate", "export_hf", "show", "sample"):
        theirs[command] = place / "theirs" / command
        shutil.copytree(templates / "run", theirs[command])
    path = theirs["evaluate"] / "config.json"
    saved = json.loads(path.read_text())
    reward = {"function": server.url, "weight": 1.0, "token_env": TOKEN}
    saved["config"]["rewards"] = {"correctness": reward, "format": reward}
    path.write_text(json.dumps(saved))
    shutil.rmtree(theirs["export_hf"] / "exports" / "peft")
    put(theirs["export_hf"] / "exports" / ".peft.partial", "link", place / "watched")
    row = {"step": 2, "prompt": "\x1b]0;owned\x07", "completion": "\x9b2J", "reward": 1}
    (theirs["show"] / "completions.jsonl").write_text(json.dumps(row) + "\n")
    os.remove(theirs["sample"] / "config.json")
    os.mkfifo(theirs["sample"] / "config.json")
    arguments = {"export_hf": ["--format=peft", "--score-problems=0"], "sample": ["t1 t2"]}
    pipe = subprocess.PIPE
    started = {
        command: subprocess.Popen(
            [
                sys.executable,
                "-m",
                f"experiments.{command}",
                str(folder),
                *arguments.get(command, []),
            ],
            env=tiny.environment(),
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
        )
        for command, folder in theirs.items()
    }
    said = {command: process.communicate(timeout=300) for command, process in started.items()}
    for command, process in started.items():
        assert process.returncode == (0 if command == "show" else 2), (command, said[command])
        # On a slow machine a command shows what it waits for.
        lines = [x for x in said[command][1].splitlines() if not x.startswith("importing ")]
        assert len(lines) == (command != "show"), (command, said[command])
        check_outcome(place, before, server, "".join(said[command]), command)
    assert r"\x1b]0;owned\x07" in said["show"][0]
