"""A run that ends early and starts again is the run that did not end early."""

import datetime
import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import types

import jax
import pytest
import tiny_checkpoints
import tiny_run
import trees
from refusal import refused

import qerl_jax.training.loop
import qerl_jax.training.saving
from qerl_jax.errors import UserError
from qerl_jax.evaluation.greedy import GreedyScore
from qerl_jax.evaluation.load_policy import open_policy
from qerl_jax.run.checkpoints import Checkpoints
from qerl_jax.system.jsonl import read_jsonl
from qerl_jax.system.signals import StoppedError
from qerl_jax.training.loop import train

CHANGES = {
    "seed": 30,
    "steps": 6,
    "checkpoint.every": 2,
    "aqn.stages": 3,
    "rl.loss": "dapo",
    "rl.updates_per_rollout": 2,
    "rl.dynamic_sampling": True,
    "rl.dynamic_sampling_rounds": 2,
    "rewards.correctness.function": "tiny_run:rare",  # Some groups have equal rewards.
    "rewards.format.weight": 0.0,
    "optimizer.schedule": "cosine",
}
# By the number of the call of correctness: 4 in each evaluation, 8 or 16 in a step.
EVALUATION_0, STEP_1, STEP_2, STEP_3, STEP_4 = 2, 9, 15, 40, 60
STEP_2_SECOND_ROUND, EVALUATION_2, STEP_6, EVALUATION_6 = 25, 30, 80, 94
CALLS = 96


def kill():
    raise tiny_run.KilledError


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def hang_up():
    os.kill(os.getpid(), signal.SIGHUP)


def rewards_that(act, *, at):
    """The rewards of the config; `act` is called in call number `at` of correctness."""
    calls = itertools.count(1)

    def correctness(*arguments):
        if next(calls) == at:
            act()
        return tiny_run.rare(*arguments)

    return {"correctness": (correctness, 1.0), "format": (tiny_run.low_fraction, 0.0)}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, compile_cache):
    """A model of two layers, for which the calls are counted."""
    return tiny_run.write_tiny(tmp_path_factory.mktemp("tiny"), compile_cache)


@pytest.fixture(scope="module")
def uninterrupted(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "uninterrupted"
    return train(tiny.config(CHANGES), workdir=folder)


@pytest.fixture
def interrupted(uninterrupted, tiny, tmp_path):
    """Returns a function that starts a run, or starts it again, and calls `act` in it."""

    def start(act, *, at):
        run = tmp_path / "run"
        with pytest.raises((tiny_run.KilledError, StoppedError)) as error:
            train(tiny.config(CHANGES), workdir=run, rewards=rewards_that(act, at=at))
        assert getattr(error.value, "exit_code", 143) == (129 if act is hang_up else 143)
        return run

    return start


def steps(run):
    path = run / "metrics.jsonl"
    return [row["step"] for row in tiny_run.results(run)] if path.exists() else []


def rows(run):
    """The step and the number of keys of each row: the order in which a run writes."""
    return [(row["step"], len(row)) for row in read_jsonl(run / "metrics.jsonl")]


def assert_same(run, uninterrupted):
    """Metrics, sampled texts and adapters are the same, and all that ends a run is there."""
    assert tiny_run.results(run) == tiny_run.results(uninterrupted)
    assert tiny_run.evaluations(run) == tiny_run.evaluations(uninterrupted)
    assert rows(run) == rows(uninterrupted)
    files = ["completions.jsonl", "summary.json"]
    files += [str(path.relative_to(uninterrupted)) for path in uninterrupted.rglob("adapter_*.*")]
    assert len(files) == 6
    for file in files:
        assert (run / file).read_bytes() == (uninterrupted / file).read_bytes(), file
    assert (run / "curves.png").exists()


def test_the_calls_are_where_the_tests_expect_them(uninterrupted):
    rounds = [row["sampled_groups"] // 2 for row in tiny_run.results(uninterrupted)]
    assert rounds == [1, 2, 2, 2, 1, 2]
    assert 4 * 4 + 8 * sum(rounds) == CALLS
    evaluations = tiny_run.evaluations(uninterrupted)
    assert evaluations[0] < evaluations[2]  # There is a best adapter.


@pytest.mark.e2e
@pytest.mark.parametrize(
    "at", [STEP_3, *(pytest.param(at, marks=pytest.mark.slow) for at in (STEP_1, STEP_6))]
)
def test_killed(uninterrupted, interrupted, tiny, capsys, at):
    run = interrupted(kill, at=at)
    assert steps(run) == {STEP_1: [], STEP_3: [1, 2], STEP_6: [1, 2, 3, 4, 5]}[at]
    for name in ("metrics.jsonl", "completions.jsonl"):
        with (run / name).open("a") as file:
            file.write('{"step": 3, "rew')
    capsys.readouterr()
    events = []

    def record(event, **_):
        events.append(event)

    jax.monitoring.register_event_listener(record)
    try:
        train(tiny.config(CHANGES), workdir=run)
    finally:
        jax.monitoring.unregister_event_listener(record)
    assert ("resuming after step" in capsys.readouterr().out) == (at != STEP_1)
    assert_same(run, uninterrupted)
    # On a GPU, other programs could round differently.
    assert "/jax/compilation_cache/cache_misses" not in events


@pytest.mark.parametrize(
    ("at", "saved"),
    [
        (EVALUATION_0, 0),
        pytest.param(STEP_1, 1, marks=pytest.mark.slow),
        # in its second round, which `test_a_run_that_is_not_finished_can_be_used` has too
        pytest.param(STEP_2, 1, marks=pytest.mark.slow),
        # in the evaluation that follows
        pytest.param(STEP_2_SECOND_ROUND, 2, marks=pytest.mark.slow),
        pytest.param(EVALUATION_2, 2, marks=pytest.mark.slow),
        pytest.param(EVALUATION_6, 6, marks=pytest.mark.slow),
    ],
)
def test_terminated(uninterrupted, interrupted, tiny, capsys, at, saved):
    run = interrupted(terminate, at=at)
    assert f"saved after step {saved}; " in capsys.readouterr().out
    train(tiny.config(CHANGES), workdir=run)
    assert f"resuming after step {saved}\n" in capsys.readouterr().out
    assert_same(run, uninterrupted)


@pytest.mark.parametrize(("stop", "at", "saved"), [(terminate, STEP_2, 1), (kill, STEP_3, 2)])
def test_a_run_that_is_not_finished_can_be_used(interrupted, monkeypatch, stop, at, saved):
    states, save = {}, Checkpoints.save

    def recording(checkpoints, step, state, meta):
        states[step] = jax.device_get(state.trainable.lora)
        save(checkpoints, step, state, meta)

    monkeypatch.setattr(Checkpoints, "save", recording)
    monkeypatch.setattr(qerl_jax.training.saving, "PICTURE_SECONDS", 0.0)
    run = interrupted(stop, at=at)
    policy = open_policy(str(run), adapter="adapter")
    trees.assert_equal(policy.lora, states[saved])
    assert policy.adapter_sha256
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert not (run / "summary.json").exists()


def test_a_print_that_is_not_read_saves(tiny, tmp_path, monkeypatch):
    """Such as that to `| tee`, whose terminal was closed."""

    def unread(row, *_):
        if row["step"] == 2:
            raise BrokenPipeError
        return ""

    monkeypatch.setattr(qerl_jax.training.loop, "format_row", unread)
    with pytest.raises(BrokenPipeError):
        train(tiny.config(CHANGES | {"eval.every": 0}), workdir=tmp_path / "run")
    assert steps(tmp_path / "run") == [1, 2]
    assert (tmp_path / "run" / "checkpoints" / "2").exists()


@pytest.mark.parametrize("refuses", ["_compile", "_evaluate"])
def test_a_start_that_is_refused_does_not_say_that_the_run_continues(
    uninterrupted, tiny, tmp_path, monkeypatch, capsys, refuses
):
    run = shutil.copytree(uninterrupted, tmp_path / "run")

    def refuse(*_):
        raise UserError("it does not fit")

    monkeypatch.setattr(qerl_jax.training.loop, "_compile", lambda run: None)
    monkeypatch.setattr(qerl_jax.training.loop, refuses, refuse)
    with pytest.raises(UserError, match="it does not fit"):
        train(tiny.config(CHANGES | {"steps": 7, "rollout.max_rows": 3}), workdir=run)
    said = capsys.readouterr().out
    assert ("rollout.max_rows: 0 -> 3" in said) == (refuses == "_evaluate")


def test_hung_up_and_then_killed(uninterrupted, interrupted, tiny):
    run = interrupted(hang_up, at=STEP_4)
    assert steps(run) == [1, 2, 3, 4]
    assert 4 not in tiny_run.evaluations(run)
    interrupted(kill, at=4 + 1)
    assert steps(run) == [1, 2, 3, 4]
    assert 4 in tiny_run.evaluations(run)
    train(tiny.config(CHANGES), workdir=run)
    assert_same(run, uninterrupted)


@pytest.mark.slow  # programs of other shapes compile; test_folder has the rule
def test_stopped_and_resumed_in_less_memory(uninterrupted, interrupted, tiny, capsys):
    run = interrupted(terminate, at=STEP_3)
    (last,) = steps(run)[-1:]
    less = {"train.buffer_tokens": 64, "train.recompute": "all", "rollout.max_rows": 3}
    capsys.readouterr()
    train(tiny.config(CHANGES | less), workdir=run)
    said = capsys.readouterr().out.splitlines()
    (change,) = [line for line in said if "no longer bit for bit" in line]
    first = "changed: rollout.max_rows: 0 -> 3, train.buffer_tokens: 0 -> 64, "
    assert change.startswith(first)
    assert said.index(f"resuming after step {last}") < said.index(change)
    found, expected = tiny_run.results(run), tiny_run.results(uninterrupted)
    assert found[:last] == expected[:last]
    # The next step samples the same completions and has the same loss, up to rounding.
    for name in ("reward", "length", "entropy", "grad_norm"):
        assert found[last][name] == pytest.approx(expected[last][name], rel=1e-3)
    assert steps(run) == [1, 2, 3, 4, 5, 6]
    assert (run / "summary.json").exists()


def test_the_best_adapter_does_not_depend_on_interruptions(tiny, tmp_path, monkeypatch):
    accuracies = {0: 0.1, 2: 0.5, 4: 0.3, 6: 0.4}
    changes = CHANGES | {"rl.dynamic_sampling": False}
    changes.pop("rl.dynamic_sampling_rounds")
    made, ends = [], iter([None, terminate, None, kill])

    def greedy_accuracy(sampler, policy, prompts, *, on_progress, **options):
        if (end := next(ends, None)) is not None:
            end()
        on_progress(0, 0)
        made.append(jax.device_get(policy.lora))
        return GreedyScore(accuracy=accuracies[2 * (len(made) - 1)], truncated=0.0)

    monkeypatch.setattr(qerl_jax.training.loop, "greedy_accuracy", greedy_accuracy)
    run = tmp_path / "run"
    # The first start stops in the evaluation after step 2. The second one makes it, and dies in the
    # evaluation after step 4, before a checkpoint holds anything of the evaluation after step 2.
    for error in (StoppedError, tiny_run.KilledError):
        with pytest.raises(error):
            train(tiny.config(changes), workdir=run)
    train(tiny.config(changes), workdir=run)
    assert tiny_run.evaluations(run) == accuracies
    trees.assert_equal(tiny_run.adapter(run, "best_adapter"), made[1])
    assert json.loads((run / "summary.json").read_text())["best_accuracy"] == 0.5


def killed_after(step, config, run, *, saves):
    """Starts a run that dies after a step, before or after it `saves` it."""
    save = qerl_jax.training.loop._save_or_stop

    def save_or_die(run):
        if saves or run.progress.step < step:
            save(run)
        if run.progress.step == step:
            raise tiny_run.KilledError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qerl_jax.training.loop, "_save_or_stop", save_or_die)
        with pytest.raises(tiny_run.KilledError):
            train(config, workdir=run)


def best_adapter(run):
    return (run / "best_adapter" / "adapter_model.safetensors").read_bytes()


@pytest.fixture
def scores(monkeypatch):
    """The accuracies of the evaluations that follow, as an iterator to extend."""
    accuracies = []

    def greedy_accuracy(*_, **__):
        return GreedyScore(accuracy=accuracies.pop(0), truncated=0.0)

    monkeypatch.setattr(qerl_jax.training.loop, "greedy_accuracy", greedy_accuracy)
    return accuracies


def test_the_best_adapter_outlives_an_evaluation_that_is_not_repeated(tiny, tmp_path, scores):
    """A run of 2 steps evaluates the last one, and dies before the step is saved.

    A longer run takes the step again, but does not evaluate it.
    """
    scores += [0.1, 0.5, 0.4]
    run, changes = tmp_path / "run", CHANGES | {"eval.every": 3, "checkpoint.every": 1}
    killed_after(2, tiny.config(changes | {"steps": 2}), run, saves=False)
    assert tiny_run.evaluations(run) == {0: 0.1, 2: 0.5}
    best = best_adapter(run)
    train(tiny.config(changes | {"steps": 3}), workdir=run)
    assert tiny_run.evaluations(run) == {0: 0.1, 3: 0.4}
    assert best_adapter(run) == best
    record = json.loads((run / "best.json").read_text())
    assert record.pop("checksum") in range(2**32)
    assert record == {"step": 2, "accuracy": 0.5}
    assert json.loads((run / "summary.json").read_text())["best_accuracy"] == 0.5


def test_a_start_without_a_checkpoint_has_no_best_adapter(tiny, tmp_path, scores, monkeypatch):
    """The best one of a start that was killed before its first checkpoint is that of no run.

    The next one forgets the rows as well, is killed before it has any, and is no obstacle.
    """
    scores += [0.1, 0.5, 0.6, 0.4, 0.3, 0.2]
    run, config = tmp_path / "run", tiny.config(CHANGES | {"eval.every": 1, "steps": 2})
    killed_after(1, config, run, saves=False)
    assert best_adapter(run)
    with monkeypatch.context() as patch:
        patch.setattr(qerl_jax.training.loop, "take_step", lambda *_, **__: kill())
        with pytest.raises(tiny_run.KilledError):
            train(config, workdir=run)
    train(config, workdir=run)
    assert tiny_run.evaluations(run) == {0: 0.4, 1: 0.3, 2: 0.2}
    assert not (run / "best_adapter").exists()
    assert open_policy(str(run)).adapter.name == "adapter"


def test_the_first_policy_is_written_after_its_checkpoint(tiny, tmp_path, monkeypatch):
    """Killed in between, a run has none: the next start takes one for a run of the user's."""
    events = []

    def recorded(name, call):
        def record(*arguments, **options):
            call(*arguments, **options)
            events.append(name)

        return record

    monkeypatch.setattr(Checkpoints, "wait", recorded("waited", Checkpoints.wait))
    for name in ("save_checkpoint", "save_policy"):
        function = recorded(name, getattr(qerl_jax.training.saving, name))
        monkeypatch.setattr(qerl_jax.training.saving, name, function)
    changes = {"eval.every": 0, "checkpoint.every": 1}
    killed_after(1, tiny.config(CHANGES | changes), tmp_path / "run", saves=True)
    first = events.index("save_policy")
    assert events[first - 2 : first] == ["save_checkpoint", "waited"]


def test_an_evaluation_with_missing_scores_is_logged_once(tiny, tmp_path, monkeypatch):
    made = []

    def greedy_accuracy(*_, **__):
        made.append(len(made))
        return GreedyScore(accuracy=0.5, truncated=0.0, missing=len(made) == 2)

    monkeypatch.setattr(qerl_jax.training.loop, "greedy_accuracy", greedy_accuracy)
    run, changes = tmp_path / "run", CHANGES | {"eval.every": 2, "checkpoint.every": 2, "steps": 4}
    killed_after(2, tiny.config(changes), run, saves=True)
    train(tiny.config(changes), workdir=run)
    rows = [row for row in read_jsonl(run / "metrics.jsonl") if "eval_seconds" in row]
    assert [row["step"] for row in rows] == [0, 2, 4]
    assert [row.get("eval_missing") for row in rows] == [None, 1, None]
    assert len(made) == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rows: rows[:-4][::-1] + rows[-4:], "the training problems of {0} are not the pr"),
        (lambda rows: [rows[0] | {"answer": "7"}, *rows[1:]], "the training problems of {0} are"),
        (lambda rows: [*rows, {"question": "t1", "answer": "1"}], "the training problems of {0}"),
        (lambda rows: [*rows[:-1], rows[-1] | {"answer": "7"}], "the evaluation problems of {0}"),
        (lambda rows: [row | {"level": 3} for row in rows], None),
    ],
)
def test_problems_that_changed_under_a_run_are_refused(
    uninterrupted, tiny, tmp_path, change, words
):
    run = shutil.copytree(uninterrupted, tmp_path / "run")
    rows = read_jsonl(tiny.problems)
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in change(rows)))
    saved = json.loads((run / "config.json").read_text())
    saved["config"]["data"]["path"] = str(path)
    (run / "config.json").write_text(json.dumps(saved))
    config = tiny.config(CHANGES | {"data.path": str(path), "steps": 7})
    before = tiny_run.contents(run)

    def stop(*_, **__):
        raise tiny_run.KilledError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qerl_jax.training.loop, "take_step", stop)
        with pytest.raises((UserError, tiny_run.KilledError)) as error:
            train(config, workdir=run)
    if words is None:
        assert isinstance(error.value, tiny_run.KilledError)
        return
    assert str(error.value).startswith(words.format(path))
    assert str(error.value).endswith("or pass another --workdir to begin a run with the new ones")
    assert tiny_run.contents(run) == before


def test_killed_before_the_end_is_written(uninterrupted, tiny, tmp_path, monkeypatch, capsys):
    def plot_run(folder):
        raise tiny_run.KilledError

    monkeypatch.setattr(qerl_jax.training.saving, "plot_run", plot_run)
    with pytest.raises(tiny_run.KilledError):
        train(tiny.config(CHANGES), workdir=tmp_path / "run")
    monkeypatch.undo()
    train(tiny.config(CHANGES), workdir=tmp_path / "run")
    assert "finished after step 6" in capsys.readouterr().out
    assert_same(tmp_path / "run", uninterrupted)


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("config.json", {"rms_norm_eps": 0.5}, r"architecture \(config.json\) of .*model is not"),
        ("generation_config.json", {"eos_token_id": [2, 5]}, "the tokens that end a reply .*model"),
        (
            "tokenizer_config.json",
            {"chat_template": tiny_run.TEMPLATE.replace("t1 t2", "t1 t3")},
            r"chat template of .*model makes other prompts",
        ),
    ],
)
def test_other_files_with_the_same_weights_are_refused(tiny, tmp_path, file, change, words):
    """A hub id may get them while a run is stopped; weights and problems are the same."""
    model, run = shutil.copytree(tiny.model, tmp_path / "model"), tmp_path / "run"
    changes = {"model.source": str(model), "eval.every": 0}
    train(tiny.config(changes | {"steps": 1}), workdir=run)
    before = tiny_run.contents(run)
    path = model / file
    saved = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(saved | change))
    refused(words, train, tiny.config(changes | {"steps": 2}), workdir=run)
    assert tiny_run.contents(run) == before


def test_a_template_that_writes_the_date_writes_that_of_the_first_start(
    tiny, tmp_path, monkeypatch
):
    """Llama 3.2's does: a run that went on on another day had other prompts."""
    model = shutil.copytree(tiny.model, tmp_path / "model")
    template = tiny_run.TEMPLATE.replace("t1 t2", "t{{ strftime_now('%d') | int }} t2")
    tiny_checkpoints.write_tokenizer(model, chat_template=template)
    changes, run = {"model.source": str(model), "eval.every": 0}, tmp_path / "run"
    before = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=3)
    created = before.strftime("%Y-%m-%dT%H:%M:%S%z")
    with monkeypatch.context() as patch:
        clock = types.SimpleNamespace(strftime=lambda _: created)
        patch.setattr("qerl_jax.run.provenance.time", clock)
        train(tiny.config(changes | {"steps": 1}), workdir=run)
    train(tiny.config(changes | {"steps": 2}), workdir=run)
    rows = read_jsonl(run / "completions.jsonl")
    assert {row["step"] for row in rows} == {1, 2}
    assert {tuple(row["prompt"].split()[-2:]) for row in rows} == {(f"t{before.day}", "t2")}


@pytest.mark.slow  # four processes; the tests above stop a run at the same places within one
def test_signals_to_a_process(uninterrupted, tiny, tmp_path):
    run, pause = tmp_path / "run", tmp_path / "pause"
    command = [
        *(sys.executable, "-m", "experiments.grpo_gsm8k", f"--workdir={run}"),
        f"--config={tiny.config_file(tmp_path / 'config.py', CHANGES)}",
        "--config.reward_time_limit=0",
    ]

    def start(stop, at):
        """Starts the command, and sends the signal `stop` in call `at` of correctness."""
        process = subprocess.Popen(
            command,
            env=tiny.environment() | {"TINY_RUN_PAUSE": f"{at}:{pause}"},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            while not pause.exists() and process.poll() is None:
                time.sleep(0.01)
            if stop is not None:
                process.send_signal(stop)
            pause.unlink(missing_ok=True)
            out, err = process.communicate(timeout=300)
        finally:
            process.kill()
        # On a slow machine these show their progress.
        waits = "importing", "load", "compiling"
        said = [line for line in err.splitlines() if line and not line.startswith(waits)]
        return process.returncode, out, said

    code, _, _ = start(signal.SIGKILL, STEP_3)
    assert code == -signal.SIGKILL
    assert steps(run) == [1, 2]
    code, out, _ = start(signal.SIGKILL, 16 + 8 + 4 + 5)
    assert code == -signal.SIGKILL
    code, out, err = start(signal.SIGTERM, 5)
    assert code == 128 + signal.SIGTERM
    last = steps(run)[-1]
    assert f"saved after step {last};" in out
    assert err == ["SIGTERM: saving and stopping"]
    goes_on = f"python -m experiments.grpo_gsm8k --workdir={run} --config.steps=6\n"
    assert f"; the same command continues: {goes_on}" in out
    command[1:] = shlex.split(goes_on)[1:]  # with the saved config
    code, out, err = start(None, 1000)
    assert (code, err) == (0, [])
    assert f"resuming after step {last}\n" in out
    assert f"finished after step 6: {run}/adapter" in out
    assert_same(run, uninterrupted)
