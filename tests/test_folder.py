"""The run folder: name, lock, saved config."""

import concurrent.futures
import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from qerl_jax.errors import UserError
from qerl_jax.quantization import cache
from qerl_jax.run import folder
from qerl_jax.system import locks
from qerl_jax.system.atomic import write_atomic
from qerl_jax.system.staging import staged_folder

ROOT = Path(__file__).resolve().parents[1]


def make_config(**changes):
    config = ConfigDict(
        {
            "experiment": "grpo",
            "preset": "tiny",
            "steps": 10,
            "seed": 0,
            "rl": {"loss": "grpo", "aggregation": "", "clip_low": 0.2, "clip_high": 0.28},
            "lora": {"targets": ("q_proj", "v_proj")},
            "rollout": {"max_rows": 128, "top_p": 1.0},
            "train": {"micro_batch_rows": 8},
            "data": {"options": {}},
            "log": {"completions": 4},
            "checkpoint": {"every": 5},
        }
    )
    config.update_from_flattened_dict({k.replace("__", "."): v for k, v in changes.items()})
    return config.lock()


def test_config_dict_survives_json():
    fields = folder.config_dict(make_config())
    assert fields["lora"]["targets"] == ["q_proj", "v_proj"]
    assert json.loads(json.dumps(fields)) == fields


def test_config_dict_rejects_what_json_cannot_hold():
    with pytest.raises(UserError, match=r"config\.reward is a function.*import path"):
        folder.config_dict(ConfigDict({"reward": lambda: 0.0}))


def test_fingerprint_depends_on_every_field_that_may_not_change():
    base = folder.config_digest(make_config())
    assert len(base) == 8
    assert int(base, 16) >= 0
    for free in ("steps", "log__completions", "checkpoint__every", "rollout__max_rows"):
        assert folder.config_digest(make_config(**{free: 99})) == base
    assert folder.config_digest(make_config(train__micro_batch_rows=99)) == base
    for fixed in ({"seed": 1}, {"rl__clip_high": 0.2}, {"rl__loss": "bnpo"}):
        assert folder.config_digest(make_config(**fixed)) != base
    # The denominators of this loss are those of a micro-batch.
    bnpo = {"rl__loss": "bnpo"}
    assert folder.config_digest(
        make_config(**bnpo, train__micro_batch_rows=99)
    ) != folder.config_digest(make_config(**bnpo))
    assert folder.default_folder(make_config()) == Path("runs") / f"grpo-tiny-{base}"


def test_first_start_writes_the_config(tmp_path):
    path = tmp_path / "runs" / "a"
    with folder.open_run(path, make_config()) as run:
        assert (run.path, run.schedule_steps, run.resumed) == (path, 10, False)
    saved = json.loads((path / "config.json").read_text())
    assert saved["config"] == folder.config_dict(make_config())
    assert saved["versions"]["jax"]
    assert saved["versions"]["python"].startswith("3.")
    assert saved["device"]["count"] >= 1
    assert saved["command"]
    assert "git" in saved


def test_no_path_means_the_default_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with folder.open_run(None, make_config()) as run:
        assert run.path == folder.default_folder(make_config())


def refuse(path, words, **changes):
    """Asserts that a run is refused, in one line; returns the line."""
    refusal = pytest.raises(UserError, match=words)
    with refusal as caught, folder.open_run(path, make_config(**changes)):
        pass
    assert "\n" not in str(caught.value)
    return str(caught.value)


def begin(path):
    """Opens a run, which logs a step."""
    with folder.open_run(path, make_config()):
        (path / "metrics.jsonl").write_text('{"step": 1}\n')


def test_more_steps_extend_the_run_and_leave_the_schedules(tmp_path):
    begin(tmp_path / "a")
    before = (tmp_path / "a" / "config.json").read_bytes()
    changed = make_config(steps=50, log__completions=0, checkpoint__every=1)
    with folder.open_run(tmp_path / "a", changed) as run:
        assert (run.schedule_steps, run.resumed) == (10, True)
    assert (tmp_path / "a" / "config.json").read_bytes() == before


def test_what_moves_only_memory_may_change_and_is_said(tmp_path, capsys):
    begin(tmp_path / "a")
    changed = make_config(rollout__max_rows=64, train__micro_batch_rows=4, steps=20)
    with folder.open_run(tmp_path / "a", changed) as run:
        assert (run.resumed, run.schedule_steps) == (True, 10)
    first = "changed: rollout.max_rows: 128 -> 64, train.micro_batch_rows: 8 -> 4. "
    assert run.note.startswith(first)
    assert "no longer bit for bit" in run.note
    assert "\n" not in run.note
    with folder.open_run(tmp_path / "a", changed) as run:
        assert run.note == ""
    with folder.open_run(tmp_path / "a", make_config(train__micro_batch_rows=4)) as run:
        assert "rollout.max_rows: 64 -> 128. " in run.note
    assert capsys.readouterr().out == ""  # The start may still be refused.
    saved = json.loads((tmp_path / "a" / "config.json").read_text())
    assert (saved["config"]["rollout"]["max_rows"], saved["config"]["steps"]) == (128, 10)
    assert saved["changes"] == [
        {"rollout.max_rows": "128 -> 64", "train.micro_batch_rows": "8 -> 4"},
        {"rollout.max_rows": "64 -> 128"},
    ]


def test_a_start_that_is_refused_records_no_change(tmp_path, capsys):
    """Such as one whose memory does not suffice, or with more devices than there are."""
    begin(tmp_path)
    scratch = tmp_path / "checkpoints" / "2.orbax-checkpoint-tmp"
    scratch.mkdir(parents=True)
    before = (tmp_path / "config.json").read_bytes()
    refused = folder.open_run(tmp_path, make_config(rollout__max_rows=64))

    def fail():
        scratch.rmdir()  # as `Checkpoints` does
        raise UserError("this run does not fit")

    with pytest.raises(UserError, match="does not fit"), refused:
        fail()
    assert (tmp_path / "config.json").read_bytes() == before
    assert "changed" not in capsys.readouterr().out
    with folder.open_run(tmp_path, make_config()) as run:
        assert run.note == ""


def test_a_finished_run_keeps_the_values_that_it_ran_with(tmp_path):
    begin(tmp_path)
    (tmp_path / "summary.json").write_text('{"steps": 10}')
    (tmp_path / "checkpoints" / "10").mkdir(parents=True)
    before = (tmp_path / "config.json").read_bytes()
    with folder.open_run(tmp_path, make_config(rollout__max_rows=64)) as run:
        assert run.note == ""
        assert (tmp_path / "config.json").read_bytes() == before
    with folder.open_run(tmp_path, make_config(rollout__max_rows=64, steps=11)) as run:
        assert run.note.startswith("changed: rollout.max_rows: 128 -> 64. ")


@pytest.mark.parametrize(
    "loss", [{"rl__loss": "bnpo"}, {"rl__loss": "dapo", "rl__aggregation": "micro_batch"}]
)
def test_micro_batches_that_the_loss_depends_on_may_not_change(loss, tmp_path):
    with folder.open_run(tmp_path, make_config(**loss)):
        (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    changed = loss | {"train__micro_batch_rows": 4, "rollout__max_rows": 64}
    refuse(tmp_path, r"another config \(train\.micro_batch_rows: 8 -> 4\)", **changed)


def test_another_config_is_refused_by_field(tmp_path):
    begin(tmp_path / "a")
    changed = {"rl__clip_high": 0.2, "lora__targets": ("q_proj",), "data__options": {"digits": 2}}
    message = refuse(tmp_path / "a", "rl.clip_high: 0.28 -> 0.2", **changed, steps=99)
    assert 'lora.targets: ["q_proj", "v_proj"] -> ["q_proj"]' in message
    assert "data.options.digits: (absent) -> 2" in message
    assert "steps" not in message
    assert "clip_low" not in message


def test_an_evaluation_before_training_does_not_begin_a_run(tmp_path):
    with folder.open_run(tmp_path / "a", make_config()) as run:
        run.metrics.write_text('{"step": 0, "eval_accuracy_before": 0.5, "eval_seconds": 1.0}\n')
    with folder.open_run(tmp_path / "a", make_config(seed=1)) as run:
        assert not run.resumed


@pytest.mark.parametrize(
    "left",
    [
        *("metrics.jsonl", "checkpoints/", "checkpoints/1.orbax-checkpoint-tmp/", "programs/"),
        *("checkpoints/07/", "checkpoints/٣/", "checkpoints/7"),
    ],
)
def test_a_start_that_failed_before_its_first_step_takes_another_config(left, tmp_path):
    with folder.open_run(tmp_path / "a", make_config()):
        path = tmp_path / "a" / left
        path.parent.mkdir(exist_ok=True)
        path.mkdir() if left.endswith("/") else path.touch()
    with folder.open_run(tmp_path / "a", make_config(seed=1, steps=20)) as run:
        assert (run.schedule_steps, run.resumed) == (20, False)
    saved = json.loads((tmp_path / "a" / "config.json").read_text())
    assert (saved["config"]["seed"], saved["schedule_steps"]) == (1, 20)


def test_a_checkpoint_begins_a_run(tmp_path):
    with folder.open_run(tmp_path / "a", make_config()):
        (tmp_path / "a" / "checkpoints" / "1").mkdir(parents=True)
    refuse(tmp_path / "a", "another config", seed=1)


def test_interrupted_first_start_is_a_first_start(tmp_path):
    (tmp_path / "lock").touch()
    for name in ("config.json.tmp", "config.json.host.lan-12-1a2b3c4d.tmp"):
        (tmp_path / name).write_text('{"conf')
    with folder.open_run(tmp_path, make_config()) as run:
        assert not run.resumed


def test_a_failed_start_leaves_no_folder(tmp_path):
    path = tmp_path / "runs" / "new" / "a"

    def fail(run):
        run.checkpoints.mkdir()
        (run.programs / "x").mkdir(parents=True)
        raise UserError("bad")

    with pytest.raises(UserError, match="bad"), folder.open_run(path, make_config()) as run:
        fail(run)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "runs").mkdir()
    with pytest.raises(KeyboardInterrupt), folder.open_run(path, make_config()):
        raise KeyboardInterrupt
    assert [child.name for child in tmp_path.iterdir()] == ["runs"]
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize("kept", ["metrics.jsonl", "checkpoints/0", "wandb/x", "notes.txt"])
def test_a_failed_start_keeps_what_may_be_worth_keeping(tmp_path, kept):
    path = tmp_path / "a" / kept

    def fail():
        path.mkdir(parents=True) if "/" in kept else path.write_text('{"step": 0}\n')
        raise UserError("bad")

    with pytest.raises(UserError, match="bad"), folder.open_run(tmp_path / "a", make_config()):
        fail()
    assert path.exists()
    assert (tmp_path / "a" / "config.json").exists()


def test_a_failed_start_leaves_a_folder_that_was_there(tmp_path):
    begin(tmp_path / "a")
    (tmp_path / "empty").mkdir()
    for name in ("a", "empty"):
        with pytest.raises(UserError, match="bad"), folder.open_run(tmp_path / name, make_config()):
            raise UserError("bad")
        assert (tmp_path / name / "config.json").exists()


def test_foreign_folder_is_refused_and_untouched(tmp_path):
    (tmp_path / "thesis.tex").touch()
    refuse(tmp_path, r"not a run folder.*thesis\.tex")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", '{"model_type": "llama", "hidden_size": 64}'),
        ("config.json", '{"config": {"lr": 0.1}, "epoch": 3}'),  # another trainer's output
        ("config.json", '{"schedule_steps": 10}'),
        ("lock", "opam-version: 2.0"),
        ("config.yaml.tmp", ""),
    ],
)
def test_files_of_others_are_refused_and_untouched(name, content, tmp_path):
    (tmp_path / name).write_text(content)
    refuse(tmp_path, r"not a run folder.*new or empty folder")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, content)]


@pytest.mark.parametrize("rows", ["", '{"step": 1}\n'])
@pytest.mark.parametrize("left", ["summary.json", "adapter", "model", "best_adapter", "best_model"])
def test_outputs_without_their_checkpoints_are_refused(left, rows, tmp_path):
    """A start that was killed before its first checkpoint leaves rows and a best policy at most."""
    with folder.open_run(tmp_path, make_config()):
        (tmp_path / left).touch() if "." in left else (tmp_path / left).mkdir()
        (tmp_path / "metrics.jsonl").write_text(rows)
        (tmp_path / "checkpoints" / "2.orbax-checkpoint-tmp").mkdir(parents=True)
    if not rows:
        shutil.rmtree(tmp_path / "checkpoints")
    before = (tmp_path / "config.json").read_text()
    if rows and left.startswith("best"):
        with folder.open_run(tmp_path, make_config()) as run:
            assert run.resumed
        return
    refuse(tmp_path, f"holds {left} but no checkpoint", steps=99)
    with pytest.raises(UserError, match=f"holds {left} but no checkpoint"):
        folder.check_run_folder(tmp_path, make_config())
    assert (tmp_path / "config.json").read_text() == before


def test_the_home_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with folder.open_run("~/runs/a", make_config()) as run:
        assert run.path == tmp_path / "runs" / "a"
    refuse("~no-such-user/a", "home folder of '~no-such-user' is unknown")


@pytest.mark.parametrize("content", ["", "[]", '{"config": {}}', "{"])
def test_unreadable_config_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    refuse(tmp_path, r"not a run folder: no run wrote its config\.json.*--workdir")
    assert (tmp_path / "config.json").read_text() == content


def test_path_of_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    refuse(tmp_path / "file", "as a run folder")


def test_a_cache_that_is_removed_while_a_run_waits_for_it_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    waits, locked = threading.Event(), threading.Event()

    def remove():
        shutil.rmtree(cache.cache_folder())
        waits.set()

    def hold():
        with cache.lock("a"):
            locked.set()
            waits.wait(20)

    monkeypatch.setattr(cache, "_wait", remove)
    thread = threading.Thread(target=hold)
    thread.start()
    assert locked.wait(20)
    with pytest.raises(UserError, match=r"a\.lock was removed while"), cache.lock("a"):
        pass
    thread.join()
    with cache.lock("a"):
        pass


HOLDER = """
import contextlib, os, resource, sys, time
from pathlib import Path
from qerl_jax.run.folder import _lock_run
with _lock_run(Path(sys.argv[1])):
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]),) * 2)
    with contextlib.suppress(OSError):
        for _ in range(64):
            os.dup(0)
    if not os.fork():
        print("held", flush=True)
    time.sleep(60)
"""
ASKER = """
import pathlib, sys
from qerl_jax.run.folder import lock_holder
print(lock_holder(pathlib.Path(sys.argv[1])))
"""


@pytest.mark.parametrize("files", [1000, 40])  # With 40 the holder can open no other file.
def test_lock_keeps_a_second_process_out_and_dies_with_its_holder(tmp_path, files):
    begin(tmp_path)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path), str(files)],
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    try:
        assert holder.stdout.readline() == b"held\n"
        refuse(tmp_path, rf"in use by process {holder.pid} on .*--workdir")
        holder.kill()
        holder.wait()
        # Its forked child is still alive.
        with folder.open_run(tmp_path, make_config()) as run:
            assert run.resumed
    finally:
        subprocess.run(["kill", "-9", "--", f"-{holder.pid}"], check=False)
        holder.stdout.close()


def test_a_process_opens_a_run_once(tmp_path):
    """Nor does anything that it does with the files of the folder give the lock away."""
    begin(tmp_path / "run")
    before = (tmp_path / "run" / "config.json").read_bytes()
    with folder.open_run(tmp_path / "run", make_config()):
        line = refuse(tmp_path / "run", "in use by another run of this process; .*--workdir")
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        (tmp_path / "link").symlink_to(tmp_path / "run")
        assert line.replace("/run", "/link") == refuse(tmp_path / "link", "this process")
        assert folder.lock_holder(tmp_path / "run") == "another run of this process"
        command = [sys.executable, "-c", ASKER, tmp_path / "run"]
        asked = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
        assert asked.stdout.startswith(f"process {os.getpid()} on ")
        with folder.open_run(tmp_path / "copy", make_config()):  # a folder of its own
            pass
    assert folder.lock_holder(tmp_path / "run") is None
    assert (tmp_path / "run" / "config.json").read_bytes() == before
    begin(tmp_path / "run")


def test_of_threads_that_begin_a_run_at_once_one_has_it(tmp_path):
    threads, opened = 8, []
    begins, ends = threading.Barrier(threads), threading.Barrier(threads)

    def start(number):
        begins.wait()
        try:
            with folder.open_run(tmp_path / "run", make_config(seed=number)):
                opened.append(number)
                ends.wait()
        except UserError as error:
            ends.wait()
            return str(error)
        return ""

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        errors = list(pool.map(start, range(threads)))
    assert [number for number, error in enumerate(errors) if not error] == opened
    assert len(opened) == 1
    assert all("in use by another run of this process" in error for error in errors if error)


def test_of_threads_that_lock_at_once_all_see_that_their_process_has_it(tmp_path):
    threads, here = 3, []
    begins, ends = threading.Barrier(threads), threading.Barrier(threads)

    def lock(path):
        with path.open("w") as file:
            begins.wait()
            try:
                with locks.hold(file.fileno(), path, remedy=""):
                    ends.wait()
            except locks.InUseError as error:
                here.append(error.here)
                ends.wait()

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for number in range(50):
            list(pool.map(lock, [tmp_path / str(number)] * threads))
    assert here == [True] * 50 * (threads - 1)


def test_a_config_that_another_start_has_just_written_is_no_other_file(tmp_path, monkeypatch):
    config = make_config()
    with folder.open_run(tmp_path / "run", config) as other:
        content = other.config.read_bytes()
        other.config.unlink()
        listed = Path.iterdir

        def written_before(path):
            other.config.write_bytes(content)
            return listed(path)

        monkeypatch.setattr(Path, "iterdir", written_before)
        with pytest.raises(UserError, match="in use by another run of this process"):
            folder.open_run(tmp_path / "run", config).__enter__()


def fail_with(monkeypatch, number):
    """Makes all locks fail with an error."""

    def fail(*_):
        raise OSError(number, os.strerror(number))

    for name in ("fcntl", "flock", "lockf"):
        monkeypatch.setattr(fcntl, name, fail)


@pytest.mark.parametrize(
    ("opens", "remedy"),
    [
        (lambda path: folder.open_run(path, make_config()), "pass a --workdir on a file system"),
        (lambda path: contextlib.nullcontext(folder.lock_holder(path)), "pass a --workdir on a"),
        (staged_folder, "write it to a folder on a file system with locks"),
        (lambda _: cache.lock("ab" * 12), "set XDG_CACHE_HOME to a folder on a file system"),
    ],
    ids=["run", "sweep", "export", "calibration"],
)
@pytest.mark.parametrize(
    "number", [errno.ENOLCK, errno.ENOSYS, errno.EIO, errno.EOPNOTSUPP, errno.EINVAL]
)
def test_a_lock_that_fails_is_not_held_by_another_process(
    opens, remedy, number, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if remedy.endswith("on a"):  # A sweep asks for locks that are there.
        begin(tmp_path / "run")
    fail_with(monkeypatch, number)
    words = f"cannot be locked: {os.strerror(number)}; {remedy}"
    with pytest.raises(UserError, match=words) as caught, opens(tmp_path / "run"):
        pass
    assert not re.search(r"in use|another process|\n", str(caught.value))


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EACCES])
def test_a_lock_that_is_held_is_in_use(number, tmp_path, monkeypatch):
    fail_with(monkeypatch, number)
    refuse(tmp_path / "run", "is in use by another process; wait for it")
    with pytest.raises(UserError, match="is in use: another process writes there; wait for it"):
        staged_folder(tmp_path / "out").__enter__()


@pytest.mark.parametrize("has_name", [True, False])
def test_where_opened_files_have_no_locks_of_their_own(has_name, tmp_path, monkeypatch):
    """Such as another system, and a kernel that does not know them."""
    if has_name:
        monkeypatch.setattr(fcntl, "fcntl", lambda *_: os.read(-1, 1))  # EBADF
    else:
        monkeypatch.delattr(fcntl, "F_OFD_SETLK", raising=False)
    run = tmp_path / "run"
    with folder.open_run(run, make_config()):
        refuse(run, "in use by another run of this process")
        shutil.copytree(run, tmp_path / "copy")
        refuse(run, "in use by another run of this process")
    assert folder.lock_holder(run) is None


def test_a_lock_whose_file_was_removed_meanwhile_is_not_taken(tmp_path, monkeypatch):
    """As by a start that failed after this one had opened the lock, and before it had it."""
    lock = locks._lock

    def later(descriptor, *, waits):
        (tmp_path / "run" / "lock").unlink()
        lock(descriptor, waits=waits)

    monkeypatch.setattr(locks, "_lock", later)
    refuse(tmp_path / "run", "in use by another process")
    assert not locks._held


def test_a_full_disk_at_the_lock_is_one_line(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    refuse(tmp_path / "run", "cannot use .* as a run folder: .*No space left on device")
    assert not locks._held


def test_a_lock_with_other_text_names_no_holder(tmp_path, monkeypatch):
    begin(tmp_path)
    (tmp_path / "lock").write_bytes(b"\xff\x1b[2J" + b"x" * 1000)
    fail_with(monkeypatch, errno.EAGAIN)
    assert "\x1b" not in refuse(tmp_path, r"in use by .\\x1b\[2Jx{200,300}; wait")


def test_one_export_at_a_time_writes_a_folder(tmp_path):
    with staged_folder(tmp_path / "out") as new:
        (new / "a").touch()
        with pytest.raises(UserError, match="is in use: this process writes there; wait for it"):
            staged_folder(tmp_path / "out").__enter__()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "a"]


def test_of_threads_that_calibrate_one_model_the_second_waits(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    order = []

    def second():
        with cache.lock("ab"):
            order.append("second")

    thread = threading.Thread(target=second)
    with cache.lock("ab"):
        thread.start()
        while "waiting for another run" not in capsys.readouterr().out:
            time.sleep(0.01)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_writers_of_one_file_do_not_disturb_each_other(tmp_path):
    path = tmp_path / "x.json"
    texts = [str(digit) * 1000 for digit in range(8)]

    def write(text):
        for _ in range(10):
            write_atomic(path, text)
            assert path.read_text() in texts

    with concurrent.futures.ThreadPoolExecutor(len(texts)) as pool:
        list(pool.map(write, texts))
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_content(tmp_path):
    path = tmp_path / "x.json"
    write_atomic(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "\ud800")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("x.json", "old")]
