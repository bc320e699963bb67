"""Checkpoints: what is saved comes back, and damage is noticed."""

import concurrent.futures
import json
import shutil
import signal
from pathlib import Path

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorstore
import tiny_run
import trees
from refusal import refused

from qerl_jax.errors import UserError
from qerl_jax.run import checkpoints as checkpoint
from qerl_jax.run.checkpoints import Checkpoints
from qerl_jax.system.signals import StoppedError


@flax.struct.dataclass
class State:
    lora: list
    opt_state: optax.OptState
    key: jax.Array
    packed: jax.Array


def make_state(seed):
    key = jax.random.key(seed)
    lora = [{"q_proj": {"a": jax.random.normal(key, (64, 256))}}]
    return State(
        lora=lora,
        opt_state=optax.adamw(1e-3).init(lora),
        key=key,
        packed=jnp.arange(8, dtype=jnp.uint8) + seed,
    )


def meta_of(step):
    return {"cursor": [step, {"epoch": 0}], "best": 0.1 * step, "base": "ab12", "none": None}


@pytest.fixture
def saved(tmp_path):
    """A folder with checkpoints of the steps 10, 20 and 30."""
    folder = tmp_path / "checkpoints"
    with Checkpoints(folder, keep=3) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, make_state(step), meta_of(step))
    return folder


def restore(folder, like=None):
    with Checkpoints(folder, keep=3) as checkpoints:
        return checkpoints.restore_latest(make_state(0) if like is None else like)


def largest_file(folder):
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def test_nothing_saved(tmp_path):
    assert restore(tmp_path / "checkpoints") is None


def test_round_trip_from_an_abstract_state(saved, capsys):
    step, state, meta = restore(saved, jax.eval_shape(lambda: make_state(0)))
    assert (step, meta) == (30, meta_of(30))
    trees.assert_equal(state, make_state(30))
    assert capsys.readouterr().err == ""


def test_keeps_the_newest_and_ignores_a_second_save_of_a_step(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (1, 2, 3, 3):
            checkpoints.save(step, make_state(step), {})
        checkpoints.wait()
        assert checkpoints.steps == [2, 3]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2", "3"]


def test_state_may_be_donated_after_save(tmp_path):
    update = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 + 7, s), donate_argnums=0)
    state = {"a": jnp.arange(2**20, dtype=jnp.float32)}
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state, {})
        update(state)
        _, restored, _ = checkpoints.restore_latest({"a": jax.ShapeDtypeStruct((2**20,), "f4")})
    np.testing.assert_array_equal(restored["a"], np.arange(2**20, dtype=np.float32))


def cut(folder):
    path = largest_file(folder)
    path.write_bytes(path.read_bytes()[:1000])


def zero_a_page(folder):
    path = largest_file(folder)
    data = bytearray(path.read_bytes())
    data[8192:12288] = bytes(4096)
    path.write_bytes(data)


def lose_the_arrays(folder):
    shutil.rmtree(folder / "state")


def lose_the_metadata(folder):
    (folder / "_CHECKPOINT_METADATA").unlink()


def lose_everything(folder):
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize(
    "damage",
    [cut, zero_a_page, tiny_run.damage, lose_the_arrays, lose_the_metadata, lose_everything],
)
def test_damaged_checkpoint_falls_back_loudly(saved, capsys, damage):
    damage(saved / "30")
    with Checkpoints(saved, keep=3) as checkpoints:
        step, state, meta = checkpoints.restore_latest(make_state(0))
        assert (step, meta) == (20, meta_of(20))
        trees.assert_equal(state, make_state(20))
        warning = capsys.readouterr().err
        assert warning.count("\n") == 1
        assert "WARNING: the checkpoint of step 30 is damaged" in warning
        assert "Resuming from step 20" in warning
        # The step can be reached and saved again.
        checkpoints.save(30, make_state(31), meta_of(30))
    assert (saved / "damaged-30").is_dir()
    step, state, _ = restore(saved)
    assert step == 30
    trees.assert_equal(state, make_state(31))


def test_all_damaged_is_an_error_and_nothing_is_moved(saved):
    for step in (10, 20, 30):
        cut(saved / str(step))
    refused(r"30: .*; 20: .*; 10: .*--workdir", restore, saved)
    assert sorted(p.name for p in saved.iterdir()) == ["10", "20", "30"]


def test_parts_that_are_larger_than_their_array_are_not_read(saved):
    """Orbax takes memory for a whole part; the process dies if it lacks it."""
    shutil.rmtree(saved / "10")
    shutil.rmtree(saved / "20")
    (saved / "\u00b2").mkdir()  # A digit, but no number.
    base = f"file://{saved}/30/state/"
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    name = b"packed/zarr.json"
    array = json.loads(store.read(name).result().value)
    array["chunk_grid"]["configuration"]["chunk_shape"] = [1 << 20]
    array["codecs"][0]["configuration"]["chunk_shape"] = [1 << 20]
    store.write(name, json.dumps(array).encode()).result()
    words = r"30: an array of the shape \(8,\) is stored in parts of \(1048576,\)"
    for read in (restore, lambda folder: checkpoint.read_latest(folder, make_state(0))):
        refused(words, read, saved)


def test_half_written_checkpoint_is_ignored_and_removed(saved, capsys):
    # What is on disk when a process is killed while it writes step 40.
    shutil.copytree(saved / "30", saved / "40.orbax-checkpoint-tmp")
    cut(saved / "40.orbax-checkpoint-tmp")
    step, state, _ = restore(saved)
    assert step == 30
    trees.assert_equal(state, make_state(30))
    assert capsys.readouterr().err == ""
    assert sorted(p.name for p in saved.iterdir()) == ["10", "20", "30"]


def test_no_disk_space_is_one_line_and_nothing_is_lost(saved, monkeypatch):
    def full(path, num_bytes):
        assert Path(path) == saved
        assert num_bytes > 3 * 64 * 256 * 4
        raise UserError("no disk space")

    monkeypatch.setattr(checkpoint, "require_free_space", full)
    with Checkpoints(saved, keep=3) as checkpoints:
        refused("no disk space", checkpoints.save, 40, make_state(40), {})
        assert checkpoints.steps == [10, 20, 30]
    assert restore(saved)[0] == 30


def test_require_free_space(tmp_path):
    checkpoint.require_free_space(tmp_path, 1)
    with pytest.raises(UserError, match=r"needs 1000000000\.00 GB and has [0-9.]+ GB free"):
        checkpoint.require_free_space(tmp_path, 10**18)


def test_failed_background_write_is_reported(saved, monkeypatch):
    checkpoints = Checkpoints(saved, keep=3)
    monkeypatch.setattr(
        checkpoints._checkpointer, "wait", lambda: (_ for _ in ()).throw(OSError("disk on fire"))
    )
    with pytest.raises(UserError, match=r"could not be written .*disk on fire.* intact"):
        checkpoints.save(40, make_state(40), {})
    monkeypatch.undo()
    checkpoints.close()


def test_keep_must_be_positive(tmp_path):
    refused("keep is 0", Checkpoints, tmp_path, keep=0)


def test_a_process_that_could_not_write_does_not_wait_for_the_others(monkeypatch):
    from orbax.checkpoint import multihost

    waited = []
    monkeypatch.setattr(multihost, "get_barrier_sync_fn", lambda: lambda **key: waited.append(key))

    def write(error):
        try:
            if error:
                raise error
        finally:  # as in Orbax
            checkpoint._wait_unless_failed(key="saved", timeout_ms=7)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with pytest.raises(OSError, match="full"):
            pool.submit(write, OSError("full")).result()
        assert not waited
        pool.submit(write, None).result()
    assert waited == [{"key": "saved", "timeout_ms": 7}]


def test_a_run_of_several_processes_saves_while_it_handles_a_signal(tmp_path, monkeypatch):
    """Orbax meets the other processes in the thread that asks for a save, too."""
    from orbax.checkpoint import multihost

    waited, context = [], checkpoint._write_from_first_process

    def of_several():
        with monkeypatch.context() as patch:
            patch.setattr(jax, "process_count", lambda: 2)
            return context()

    monkeypatch.setattr(checkpoint, "_write_from_first_process", of_several)
    monkeypatch.setattr(multihost, "get_barrier_sync_fn", lambda: lambda **key: waited.append(key))
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        try:
            raise StoppedError(signal.SIGTERM)
        except StoppedError:
            checkpoints.save(10, make_state(10), meta_of(10))
            checkpoints.wait()
    assert waited
    assert restore(tmp_path)[0] == 10
