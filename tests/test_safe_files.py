"""Links and other odd types inside folders that the project writes: refused, nothing is touched."""

import contextlib
import pathlib
import shutil
import signal

import finished_run
import numpy as np
import pytest
from odd_places import places_of, put

from qerl_jax.commands import sweep
from qerl_jax.errors import UserError
from qerl_jax.evaluation.evaluate import EvaluateConfig, evaluate
from qerl_jax.export.write import ExportConfig, export
from qerl_jax.processes.folder import open_run_together
from qerl_jax.processes.group import Processes
from qerl_jax.run.checkpoints import Checkpoints, read_latest, read_latest_meta
from qerl_jax.run.event_file import EventFile
from qerl_jax.run.folder import RunFolder, lock_holder, open_run
from qerl_jax.run.jobs import run_jobs
from qerl_jax.run.metrics import MetricsLog
from qerl_jax.show.view import open_views
from qerl_jax.system import safe_files
from qerl_jax.system.atomic import write_atomic, write_json
from qerl_jax.system.staging import scratch_of, staged_folder
from qerl_jax.weights.load import load
from qerl_jax.weights.save import companion_files

SECONDS = 20  # far more than any call here takes; a reader of a pipe would wait forever


@pytest.fixture(autouse=True)
def nothing_waits():
    def fail(signum, frame):
        raise KeyboardInterrupt("a pipe is waited for")  # which nothing suppresses

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def watched(tmp_path):
    """A folder of the user beside the run, and its content, which must stay as it is."""
    folder = tmp_path / "watched"
    (folder / "documents").mkdir(parents=True)
    (folder / "documents" / "thesis.tex").write_text("years of work")
    (folder / "keys").write_text("ssh-ed25519 AAAA me\n")
    (folder / "secret.json").write_text('{"token": "secret"}')
    (folder / "empty").mkdir()
    before = content(folder)
    yield folder
    assert content(folder) == before


def content(folder):
    return sorted(
        (str(path.relative_to(folder)), path.read_text() if path.is_file() else None)
        for path in folder.rglob("*")
    )


FILES = ("config", "calibration", "lock", "metrics", "completions", "curves", "summary", "best")
PLACES = sorted(path.name for path in places_of(RunFolder(pathlib.Path("run"))))
FILE_NAMES = {getattr(RunFolder(pathlib.Path("run")), name).name for name in FILES}
TRAINED = [path for path in PLACES if path.endswith(("adapter", "model"))]
INSIDE = [
    *("checkpoints/4", "checkpoints/damaged-4", "checkpoints/4/state", "programs/jit_f-12-cache"),
    *("checkpoints/5.orbax-checkpoint-tmp", "tensorboard/events", "profile/plugins"),
    *("lock.0123456789abcdef", *(f".{name}.partial" for name in TRAINED)),
]


def test_every_place_of_a_run_folder_is_a_file_or_a_folder():
    folder = RunFolder(pathlib.Path("run"))
    folders = {*folder.filled_by_libraries(), *folder.replaced_as_a_whole()}
    folders |= {folder.evaluations, folder.exports, folder.wandb}
    assert {path.name for path in folder.files()} == FILE_NAMES
    assert not folders & {*folder.files()}
    assert places_of(folder) == folders | {*folder.files()}


@pytest.fixture
def config(tiny):
    return tiny.config()


@pytest.fixture
def begun(config, tmp_path):
    """A run folder in which a run has logged a step."""
    with open_run(tmp_path / "run", config) as folder:
        folder.metrics.write_text('{"step": 1, "reward": 0.5}\n')
    return folder.path


@pytest.mark.parametrize("place", [*PLACES, *INSIDE])
def test_a_run_is_not_opened_over_an_odd_place(place, begun, config, watched):
    is_file = place in FILE_NAMES or place.startswith("lock.")
    kinds = ["link", "keys", "empty", "dangling", "pipe", "socket"]
    if is_file or place in PLACES or place.startswith("."):  # Else a library may have made either.
        kinds.append("folder" if is_file else "file")
    for kind in kinds:
        put(begun / place, kind, watched)
        with pytest.raises(UserError) as error, open_run(begun, config):
            pass
        assert str(begun / place) in str(error.value) or place == "config.json"
        assert "\n" not in str(error.value)


def test_a_run_folder_may_itself_be_reached_through_a_link(begun, config, tmp_path):
    (tmp_path / "runs").symlink_to(tmp_path)
    (tmp_path / "of_the_user").symlink_to(begun)
    for path in (tmp_path / "runs" / "run", tmp_path / "of_the_user"):
        with open_run(path, config) as folder:
            assert folder.resumed


def test_the_holder_of_a_lock_is_read_through_no_link(begun, watched):
    for kind in ("keys", "dangling", "pipe", "folder"):
        put(begun / "lock", kind, watched)
        with pytest.raises(UserError, match="lock is a"):
            lock_holder(begun)


# Each writer alone: other commands call it without `open_run`.
def stage(path):
    with staged_folder(path, replace=True) as folder:
        (folder / "x").touch()


def log_row(path):
    with MetricsLog(path.parent, tensorboard=False, wandb=False, trackio=False, run_name="r") as x:
        x.write({"step": 1}) if path.name == "metrics.jsonl" else x.write_completions(1, [{"a": 1}])


def sync(path):
    with MetricsLog(path.parent, tensorboard=False, wandb=False, trackio=False, run_name="r") as x:
        x.sync()


def open_sweep(path):
    folder = next(parent for parent in path.parents if parent.name == "place")
    (folder / "commands.sh").write_text("# python -m experiments.sweep --config=x\n")
    sweep._make_folder(folder)


def open_checkpoints(path):
    with Checkpoints(path.parent, keep=1):
        pass


# Each writer, and what else is wrong at its place; a place that is emptied may hold either.
WRITERS = {
    "table.json": (lambda path: write_json(path, {}), "folder"),
    "table.md": (lambda path: write_atomic(path, "x"), "folder"),
    "metrics.jsonl": (log_row, "folder"),
    "completions.jsonl": (log_row, "folder"),
    "tensorboard": (lambda path: EventFile(path, purge_step=None), "file"),
    "logs": (lambda path: run_jobs((), path.parent), "file"),
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
def test_a_writer_refuses_an_odd_place(name, tmp_path, watched):
    write, wrong = WRITERS[name]
    path = tmp_path / "place" / name
    for kind in filter(None, ("link", "keys", "empty", "dangling", "pipe", wrong)):
        put(path, kind, watched)
        with pytest.raises(UserError, match="is a") as error:
            write(path)
        assert str(path) in str(error.value)
        assert "\n" not in str(error.value)


def test_rows_are_not_synced_through_an_odd_place(tmp_path, watched):
    for kind in ("keys", "pipe", "folder"):
        put(tmp_path / "place" / "metrics.jsonl", kind, watched)
        with pytest.raises(UserError, match="is a"):
            sync(tmp_path / "place" / "metrics.jsonl")


def test_marks_for_other_processes_are_no_links(begun, config, watched):
    (begun / "lock.0123456789abcdef").touch()  # left by a process that was killed
    with open_run_together(begun, config, Processes()):
        assert not [*begun.glob("lock.*")]


# --- Commands -------------------------------------------------------------------------------------


@pytest.fixture
def run(tiny, tmp_path):
    return finished_run.write_run(tmp_path / "run", tiny, own=True)


@pytest.mark.parametrize(
    "place",
    ["exports", "exports/peft", "exports/.peft.partial", "exports/.peft-base.partial"],
)
def test_an_export_writes_through_no_link(place, run, watched):
    for kind in ("link", "empty", "dangling", "pipe", "file"):
        put(run / place, kind, watched)
        options = {"base_format": "nvfp4", "with_base": True, "score_problems": 0}
        with pytest.raises(UserError) as error:
            export(ExportConfig(str(run), "peft", **options))
        assert str(run / place) in str(error.value)


@pytest.mark.parametrize("place", ["evaluations", "programs", "programs/a-cache"])
def test_an_evaluation_writes_through_no_link(place, run, watched):
    for kind in ("link", "dangling", "pipe"):
        put(run / place, kind, watched)
        with pytest.raises(UserError) as error:
            evaluate(EvaluateConfig(str(run), limit=1))
        assert str(run / place) in str(error.value)


def test_a_finished_evaluation_writes_through_no_link(run, watched):
    (folder,) = evaluate(EvaluateConfig(str(run), limit=1))
    (rows,) = folder.glob("*.jsonl")
    for path in (folder, folder / "results.json", rows):
        saved = path.with_name("saved")
        path.rename(saved)
        for kind in ("link", "keys", "dangling", "pipe"):
            put(path, kind, watched)
            with pytest.raises(UserError) as error:
                evaluate(EvaluateConfig(str(run), limit=1))
            assert str(folder if kind == "dangling" else path) in str(error.value)
            path.unlink()
        saved.rename(path)


@pytest.mark.parametrize("place", PLACES)
def test_show_reads_what_can_be_read_and_writes_nothing(place, begun, watched):
    for kind in ("link", "keys", "dangling", "pipe", "socket", "folder"):
        put(begun / place, kind, watched)
        with contextlib.suppress(UserError):
            open_views([str(begun)])


@pytest.mark.parametrize(
    "name", ["config.json", "adapter/adapter_config.json", "adapter/adapter_model.safetensors"]
)
def test_readers_say_what_is_in_the_place_of_a_file(name, run, watched):
    for kind in ("pipe", "socket", "folder"):
        put(run / name, kind, watched)
        with pytest.raises(UserError, match=r"is a|not a run folder|is not") as error:
            export(ExportConfig(str(run), "peft", score_problems=0))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_pipe_in_a_model_folder_is_one_line(name, tiny, tmp_path, watched):
    model = shutil.copytree(tiny.model, tmp_path / "model")
    put(model / name, "pipe", watched)
    with pytest.raises(UserError, match=f"{name} is a named pipe"):
        load(str(model), format="stored")


def test_checkpoints_with_an_odd_place_are_not_read(tmp_path, watched):
    state = {"a": np.zeros(4, np.float32)}
    with Checkpoints(tmp_path / "saved", keep=1) as checkpoints:
        checkpoints.save(4, state, {"a": 1})
    assert read_latest_meta(tmp_path / "saved") == {"a": 1}
    for kind in ("link", "pipe"):
        for path in sorted((tmp_path / "saved" / "4").rglob("*")):
            folder = shutil.copytree(tmp_path / "saved", tmp_path / "copy")
            place = folder / path.relative_to(tmp_path / "saved")
            put(place, kind, watched)
            assert read_latest_meta(folder) == {}
            with pytest.raises(UserError, match=r"no checkpoint in .* can be read .* is a "):
                read_latest(folder, state)
            shutil.rmtree(folder)


def test_an_export_copies_no_file_that_a_link_names_elsewhere(tiny, tmp_path, watched):
    model = shutil.copytree(tiny.model, tmp_path / "model")
    put(model / "generation_config.json", "secret.json", watched)
    loaded = load(str(model), format="stored")
    with pytest.raises(UserError, match="a symbolic link to a file outside of its folder"):
        companion_files(loaded, packed=False)


def test_an_export_copies_files_of_the_hub_cache(tiny, tmp_path):
    cache = tmp_path / "models--user--name"
    model = shutil.copytree(tiny.model, cache / "snapshots" / "0123")
    (cache / "blobs").mkdir()
    for number, path in enumerate(sorted(model.iterdir())):
        path.rename(cache / "blobs" / str(number))
        path.symlink_to(f"../../blobs/{number}")
    loaded = load(str(model), format="stored")
    assert "config.json" in companion_files(loaded, packed=False)


def test_the_scratch_place_is_beside_the_folder():
    assert scratch_of(pathlib.Path("a/b")) == pathlib.Path("a/.b.partial")
