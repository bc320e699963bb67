"""A run begins from another one, and goes on alone; a moved model or data file is found again."""

import contextlib
import dataclasses
import json
import shutil
import types

import jax
import numpy as np
import optax
import pytest
import tiny_run
from ml_collections import ConfigDict
from refusal import refused

from qerl_jax.errors import UserError
from qerl_jax.memory.run_plan import Device, plan_run
from qerl_jax.policy.lora import LoraConfig
from qerl_jax.policy.trainable import checksum
from qerl_jax.rl.train_step import TrainState
from qerl_jax.run.checkpoints import Checkpoints, read_latest
from qerl_jax.run.folder import RunFolder, open_run
from qerl_jax.run.ownership import write_config
from qerl_jax.training import begin, saving
from qerl_jax.training.loop import train
from qerl_jax.training.session import open_session
from qerl_jax.weights.peft import load_peft_adapter

CHANGES = {"eval.every": 0, "aqn.schedule": "constant", "aqn.stages": 4}


@pytest.fixture(scope="module")
def origin(tiny, tmp_path_factory):
    """A finished run of 2 steps; do not write to it."""
    folder = tmp_path_factory.mktemp("origin") / "run"
    return train(tiny.config(CHANGES | {"steps": 2, "checkpoint.every": 1}), workdir=folder)


class Stopped(BaseException):
    """Ends a run before its first step."""


@pytest.fixture
def begun(tiny, tmp_path, monkeypatch, capsys):
    """Begins a run, and returns what it said, its folder, and its first checkpoint."""

    def stop(*_, **__):
        raise Stopped

    def begin(changes, name="new"):
        states, save = {}, Checkpoints.save

        def recording(checkpoints, step, state, meta):
            states[step] = jax.device_get(state), meta
            save(checkpoints, step, state, meta)

        with monkeypatch.context() as patch:
            patch.setattr(Checkpoints, "save", recording)
            patch.setattr("qerl_jax.training.loop.take_step", stop)
            with pytest.raises(Stopped):
                train(tiny.config(CHANGES | changes), workdir=tmp_path / name)
        return capsys.readouterr().out, tmp_path / name, *states.get(0, (None, None))

    return begin


def same(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(x, y) for x, y in pairs)


def schedule_counts(state):
    is_schedule = lambda part: isinstance(part, optax.ScaleByScheduleState)  # noqa: E731
    parts = jax.tree.leaves(state.opt_state, is_leaf=is_schedule)
    return [int(part.count) for part in parts if is_schedule(part)]


def test_adapter_optimizer_and_cursor_are_taken_over(origin, begun):
    before = tiny_run.contents(origin)
    said, new, state, meta = begun({"init_from": str(origin), "rl.loss": "dapo", "steps": 7})
    assert tiny_run.contents(origin) == before
    step, old, old_meta = read_latest(origin / "checkpoints", state)
    assert step == 2
    assert same(state.trainable, old.trainable)
    assert schedule_counts(state) == [0]
    assert schedule_counts(old) == [2]
    zeroed = begin._reset_schedule(old)
    assert same(zeroed.opt_state, state.opt_state)
    assert not same(old.opt_state, state.opt_state)
    assert meta["cursor"] == old_meta["cursor"] != {"epoch": 0, "index": 0}
    assert "beginning from the checkpoint of step 2 of" in said
    assert "its optimizer state is kept; its position in the problems is kept" in said
    saved = json.loads((new / "config.json").read_text())
    assert saved["init_from"] == {
        "run": str(origin), "step": 2, "best": False, "optimizer": True, "cursor": meta["cursor"],
        "checksum": checksum(old.trainable),
    }  # fmt: skip


def test_a_run_from_before_a_field_has_its_default(tiny, origin, begun, tmp_path):
    """Such a run resumes, and others begin from it."""
    old = shutil.copytree(origin, tmp_path / "old")
    saved = json.loads((old / "config.json").read_text())
    for section, name in (("lora", "expert_rank"), ("rl", "routing_replay"), ("optimizer", "b2")):
        del saved["config"][section][name]
    write_config(old / "config.json", saved)
    with open_run(old, tiny.config(CHANGES | {"steps": 2, "checkpoint.every": 1})) as run:
        assert (run.resumed, run.note) == (True, "")
    other = tiny.config(CHANGES | {"lora.expert_rank": 2})
    refused(
        r"lora\.expert_rank: 0 -> 2", contextlib.ExitStack().enter_context, open_run(old, other)
    )
    said, *_ = begun({"init_from": str(old)})
    assert "its optimizer state is kept" in said
    refused("lora.expert_rank: 0 -> 2", begun, {"init_from": str(old), "lora.expert_rank": 2})


def test_another_system_message_is_a_warning(origin, tiny, capsys):
    for message in ("Add.\nThen stop.", ""):
        begin.check_origin(
            tiny.config(CHANGES | {"init_from": str(origin), "data.system_prompt": message})
        )
        warning = f"data.system_prompt was '' and is {message!r}: the policy was trained on other"
        assert capsys.readouterr().err.count(warning) == bool(message)


def test_the_schedules_of_an_own_optimizer_begin_again():
    transform = optax.inject_hyperparams(optax.adam)(optax.linear_schedule(1.0, 0.0, 10))
    params = {"a": np.float32(1.0)}
    fresh = state = transform.init(params)
    first, _ = transform.update(params, fresh, params)
    for _ in range(9):
        _, state = transform.update(params, state, params)
    zeroed = begin._reset_schedule(TrainState(None, state, np.int32(3)))
    again, _ = transform.update(params, zeroed.opt_state, params)
    assert float(again["a"]) == pytest.approx(float(first["a"]), rel=1e-5)


def test_another_architecture_of_the_same_weights_is_refused(origin, begun, tiny, tmp_path):
    model = shutil.copytree(tiny.model, tmp_path / "model")
    content = json.loads((model / "config.json").read_text()) | {"rms_norm_eps": 0.5}
    (model / "config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"the architecture \(config.json\) of .*model is not that"):
        begun({"init_from": str(origin), "model.source": str(model)})


def test_the_noise_and_the_draws_of_the_other_run_are_not_drawn_again(
    origin, tiny, tmp_path, monkeypatch
):
    keys = []

    def stop(setup, *_, **__):
        keys.append(jax.random.key_data(setup.key).tolist())
        raise Stopped

    monkeypatch.setattr("qerl_jax.training.loop.take_step", stop)
    for name, changes in (
        ("alone", {}),
        ("new", {"init_from": str(origin)}),
        ("new", {"init_from": str(origin)}),  # which goes on
        ("third", {"init_from": str(tmp_path / "new"), "seed": 1}),
    ):
        with pytest.raises(Stopped):
            train(tiny.config(CHANGES | {"steps": 7} | changes), workdir=tmp_path / name)
    alone, new, resumed, third = keys
    assert new == resumed
    assert new not in (alone, third)


@pytest.mark.slow  # 6 s
def test_the_new_run_needs_the_other_only_once(origin, tiny, tmp_path, capsys):
    run = shutil.copytree(origin, tmp_path / "other")
    config = tiny.config(CHANGES | {"init_from": str(run), "rl.kl_coef": 0.1, "steps": 1})
    new = train(config, workdir=tmp_path / "new")
    shutil.rmtree(run)
    (first,) = tiny_run.results(new)
    assert first["sigma"] == 0  # The first stage of the noise has none.
    assert first["kl"] == pytest.approx(0, abs=1e-9)  # measured to the adapter of the other run
    expected = tiny_run.adapter(origin)
    assert same(tiny_run.adapter(new, "first_adapter"), expected)
    assert not same(tiny_run.adapter(new), expected)
    config.steps = 2
    train(config, workdir=tmp_path / "new")
    assert "resuming after step 1" in capsys.readouterr().out
    assert [row["step"] for row in tiny_run.results(new)] == [1, 2]
    assert tiny_run.results(new)[1]["kl"] > 1e-4


def test_an_optimizer_with_other_fields_starts_anew(origin, begun):
    said, _, state, meta = begun({"init_from": str(origin), "optimizer.b2": 0.9})
    assert "the optimizer starts anew, as optimizer.b2 changed" in said
    assert not any(leaf.any() for leaf in jax.tree.leaves(state.opt_state))
    assert same(state.trainable.lora, tiny_run.adapter(origin))
    assert meta["cursor"] != {"epoch": 0, "index": 0}


@pytest.mark.parametrize("change", ["data", "seed"])
def test_other_data_begin_at_the_first_problem(origin, begun, tmp_path, change):
    problems = tiny_run.write_problems(tmp_path / "others.jsonl", count=12)
    changes = {"data.path": str(problems)} if change == "data" else {"seed": 7}
    said, _, _, meta = begun({"init_from": str(origin)} | changes)
    assert meta["cursor"] == {"epoch": 0, "index": 0}
    assert ("problems are others" if change == "data" else "another seed") in said


@pytest.fixture
def best(origin, tiny, tmp_path, monkeypatch):
    """A run with a best adapter, and a function that saves another one as the run does.

    Before the function writes best.json, it calls its argument.
    """
    monkeypatch.setattr(begin, "_PAUSE", 0.01)
    run = shutil.copytree(origin, tmp_path / "other")
    saved = json.loads((run / "config.json").read_text())["config"]
    lora = {name: saved["lora"][name] for name in ("rank", "alpha", "rslora")}
    options = LoraConfig(**lora, targets=tuple(saved["lora"]["targets"]))
    architecture = tiny_run.architecture(tiny.model)

    def save(step, between=lambda: None):
        trainable = load_peft_adapter(run / "adapter", architecture, options)
        trainable = jax.tree.map(lambda x: x + step, trainable)
        write = saving.write_atomic

        def late(*arguments):
            between()
            write(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(saving, "write_atomic", late)
            method = types.SimpleNamespace(lora_config=options)
            model = types.SimpleNamespace(source="base", config=architecture)
            config = ConfigDict({"train": {"parameters": "lora"}})
            setup = types.SimpleNamespace(method=method, model=model, config=config)
            saving.save_best(
                RunFolder(run), setup, trainable, step=step, score={"accuracy": step / 10}
            )
        return checksum(trainable)

    method = types.SimpleNamespace(lora_config=options)
    model = types.SimpleNamespace(config=architecture)
    config = ConfigDict({"init_from": f"{run}:best"})
    setup = types.SimpleNamespace(config=config, method=method, model=model)

    def read():
        step, trainable = begin._read_best(setup, RunFolder(run))
        return step, checksum(trainable)

    return types.SimpleNamespace(run=run, save=save, read=read)


def test_the_best_adapter(best, begun):
    refused("has no best adapter yet; leave out :best", begun, {"init_from": f"{best.run}:best"})
    best.save(1)
    said, _, state, _ = begun({"init_from": f"{best.run}:best"})
    assert "beginning from the best adapter of step 1 of" in said
    assert "its state is that of the last step" in said
    assert same(state.trainable.lora, tiny_run.adapter(best.run, "best_adapter"))
    assert not any(leaf.any() for leaf in jax.tree.leaves(state.opt_state))
    (best.run / "best.json").write_text('{"step": 1, "accuracy": 0.5}')
    refused(r"best\.json is damaged: it has no number 'checksum'", best.read)


def test_the_best_adapter_and_its_step_are_those_of_one_save(best, monkeypatch):
    """The other run saves the next one before, while and after they are read."""
    crcs = {step: best.save(step) for step in (1, 2, 3)}
    assert best.read() == (3, crcs[3])
    load, saves = begin.load_peft_adapter, [1]

    def slow(*arguments):
        loaded = load(*arguments)
        if saves:
            best.save(saves.pop())
        return loaded

    with monkeypatch.context() as patch:
        patch.setattr(begin, "load_peft_adapter", slow)
        assert best.read() == (1, crcs[1])
    # The folder is that of step 2, and best.json stays that of step 1 or comes later.
    refused(r"best_adapter and best.json are of different steps", best.save, 2, between=best.read)
    assert json.loads((best.run / "best.json").read_text())["step"] == 1
    record = {"step": 2, "accuracy": 0.2, "checksum": crcs[2]}
    write = lambda _: (best.run / "best.json").write_text(json.dumps(record))  # noqa: E731
    monkeypatch.setattr(begin.time, "sleep", write)
    assert best.read() == (2, crcs[2])


@pytest.mark.parametrize("fact", [None, {}, {"checksum": None}, {"checksum": 2**32}])
def test_a_run_without_the_checksum_of_its_beginning_is_damaged(fact, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"init_from": fact}))
    setup = types.SimpleNamespace(config=ConfigDict({"init_from": "other"}))
    with pytest.raises(UserError, match=r"is damaged: init_from\.checksum is .*--workdir"):
        begin._restore_origin(setup, RunFolder(tmp_path))


def test_process_0_chooses_the_checkpoint(origin, begun, monkeypatch):
    """The other run may save between the reads of two processes, or remove what one has read."""
    monkeypatch.setattr(begin, "_PAUSE", 0.0)
    *_, state, _ = begun({"init_from": str(origin)})
    states = {step: read_latest(origin / "checkpoints", state, step=step) for step in (1, 2)}
    crcs = {step: checksum(found[1].trainable) for step, found in states.items()}
    assert crcs[1] != crcs[2]
    values = []

    def read(first, *, writes, absent=()):
        def exchange(value):
            values.append(value)
            return [value if writes else first, value]

        def read_latest_of_this_process(*arguments, step):
            return None if step in absent else read_latest(*arguments, step=step)

        monkeypatch.setattr(begin, "read_latest", read_latest_of_this_process)
        setup = types.SimpleNamespace(
            config=ConfigDict({"init_from": str(origin)}),
            state_shapes=state,
            processes=types.SimpleNamespace(writes=writes, exchange_json=exchange),
        )
        return begin._read_together(setup, RunFolder(origin), best=False)[0]

    assert read(None, writes=True) == 2
    assert read([1, 1, crcs[1]], writes=False) == 1
    assert values[-2:] == [[2, 2, crcs[2]], [1, 1, crcs[1]]]
    with pytest.raises(UserError, match="read other checkpoints than process 0"):
        read([1, 1, crcs[1]], writes=False, absent=[1])
    # the same step of another run
    refused("read other checkpoints than process 0", read, [1, 1, crcs[2]], writes=False)
    refused("has no checkpoint yet", read, None, writes=False)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora.rank": 2}, r"lora.rank: 4 -> 2"),
        ({"lora.targets": ("q_proj",)}, r"lora.targets: \["),
        ({"lora.alpha": 4.0}, r"lora.alpha: 8.0 -> 4.0"),
        ({"model.format": "bf16"}, r"model.format: \"nvfp4\" -> \"bf16\""),
        ({"train.parameters": "lora+norms"}, r"train.parameters: \"lora\" -> \"lora\+norms\""),
        ({"lora.init": "somewhere"}, "both are where the adapter comes from"),
    ],
)
def test_another_adapter_is_refused(origin, begun, tmp_path, changes, words):
    refused(words, begun, {"init_from": str(origin)} | changes)
    assert not (tmp_path / "new").exists()


def test_another_base_is_refused(origin, begun, tiny, tmp_path):
    layers = tiny_run.architecture(tiny.model).num_layers
    model = tiny_run.write_model(tmp_path / "model", model_type="qwen2", num_layers=layers)
    with pytest.raises(UserError, match="trained on other weights"):
        begun({"init_from": str(origin), "model.source": str(model)})


def test_runs_without_anything_to_begin_from(origin, begun, tmp_path):
    refused("is not a run folder", begun, {"init_from": str(tmp_path)})
    with pytest.raises(UserError, match=r"is not a run folder.*FOLDER:best for its best adapter"):
        begun({"init_from": f"{tmp_path}:last"})
    empty = shutil.copytree(origin, tmp_path / "empty")
    shutil.rmtree(empty / "checkpoints")
    refused("has no checkpoint yet", begun, {"init_from": str(empty)})


def test_a_session_does_not_begin_anew_in_place_of_another_run(origin, tiny):
    with pytest.raises(UserError, match="a session has no run folder to begin from another run"):
        open_session(tiny.config(CHANGES | {"init_from": str(origin)}))


def test_the_plan_counts_the_adapter_that_the_kl_is_measured_to(tiny):
    sizes = [
        plan_run(
            tiny.config({"rl.kl_coef": 0.1, **changes}),
            tiny_run.architecture(tiny.model),
            Device(None, "xla", 0.0),
        ).training
        for changes in ({}, {"init_from": "run"}, {"lora.init": "adapter"})
    ]
    assert sizes[0] < sizes[1] == sizes[2]


def test_a_full_run_begins_from_a_model(origin, begun, tmp_path):
    run = shutil.copytree(origin, tmp_path / "other")
    saved = json.loads((run / "config.json").read_text())
    saved["config"]["train"]["parameters"], saved["config"]["model"]["format"] = "full", "bf16"
    (run / "config.json").write_text(json.dumps(saved))
    full = {"train.parameters": "full", "model.format": "bf16", "init_from": f"{run}:best"}
    refused(f"--config.model.source={run}/best_model", begun, full)
    with pytest.raises(UserError, match=f"or begin from its model, --config.model.source={run}/"):
        begun({"init_from": str(run)})


def test_a_damaged_checkpoint_is_skipped_and_left(origin, begun, tmp_path):
    run = shutil.copytree(origin, tmp_path / "other")
    tiny_run.damage(run / "checkpoints" / "2")
    before = tiny_run.contents(run)
    said, *_ = begun({"init_from": str(run)})
    assert "beginning from the checkpoint of step 1 of" in said
    assert tiny_run.contents(run) == before


def test_a_moved_model_and_moved_problems_are_found_again(origin, tiny, tmp_path):
    run = shutil.copytree(origin, tmp_path / "run")
    moved = dataclasses.replace(
        tiny,
        model=shutil.copytree(tiny.model, tmp_path / "model"),
        problems=shutil.copy(tiny.problems, tmp_path / "moved.jsonl"),
    )
    train(moved.config(CHANGES | {"steps": 3}), workdir=run)
    assert [row["step"] for row in tiny_run.results(run)] == [1, 2, 3]
    saved = json.loads((run / "config.json").read_text())["config"]
    assert saved["model"]["source"] == str(tmp_path / "model")
    assert saved["data"]["path"] == str(tmp_path / "moved.jsonl")
    before = tiny_run.contents(run)
    other = tiny_run.write_problems(tmp_path / "other.jsonl", count=9)
    with pytest.raises(UserError, match=r"the training problems of .*other\.jsonl are not"):
        train(tiny.config(CHANGES | {"steps": 4, "data.path": str(other)}), workdir=run)
    assert tiny_run.contents(run) == before
