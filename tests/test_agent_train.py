"""Whole runs of a tiny model that agents talk to: rows, rewards, metrics, resume."""

import concurrent.futures
import dataclasses
import shutil
import types

import agent_cases
import jax
import numpy as np
import pytest
import tiny_checkpoints
import tiny_run
from environment_cases import CHANGES, TEMPLATE
from refusal import refused

from qerl_jax.data import environment_config
from qerl_jax.data.environment_config import serve_agents
from qerl_jax.data.order import Cursor
from qerl_jax.errors import UserError
from qerl_jax.evaluation.run_environments import environments_of
from qerl_jax.policy import sharding
from qerl_jax.rollout.sampler import Sampler
from qerl_jax.system.jsonl import read_jsonl
from qerl_jax.training import experience, setup, step
from qerl_jax.training.kept_sessions import KeptSessions
from qerl_jax.training.loop import train
from qerl_jax.training.session import open_session, train_step

AGENTS = {name: value for name, value in CHANGES.items() if name != "environment.function"} | {
    "environment.agent": "agent_cases:converse",
    "rewards.format.function": "test_agent_train:turns_of",
}


def turns_of(completions, turns, environments, conversations):
    """A reward that takes lists, and what an agent has handed in."""
    assert [one[-1] for one in turns] == completions
    assert all(one.words == 2 for one in environments)
    for messages, texts in zip(conversations, turns, strict=True):
        assert [m["content"] for m in messages if m["role"] == "assistant"] == texts
        assert {m["role"] for m in messages[1::2]} <= {"user"}
    return [len(one) for one in turns]


def write_talker(folder, compile_cache, **changes):
    """The inputs of runs, with a chat template whose turns end."""
    tiny = tiny_run.write_tiny(folder, compile_cache, **changes)
    tiny_checkpoints.write_tokenizer(tiny.model, chat_template=TEMPLATE)
    return tiny


@pytest.fixture(scope="module")
def talker(tmp_path_factory, compile_cache):
    return write_talker(tmp_path_factory.mktemp("talker"), compile_cache)


@pytest.fixture
def agents(monkeypatch):
    """Makes runs take a function as their agent: `agents(solve)`."""

    def serve(solve):
        def make(config, tokenizer):
            return serve_agents(config, tokenizer, agent_cases.Threads(solve))

        monkeypatch.setattr(setup, "make_environments", make)

    return serve


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "qwen3_moe"])
def test_a_run_trains_on_sessions(agents, tmp_path, compile_cache, model):
    agents(agent_cases.converse)
    talker = write_talker(tmp_path, compile_cache, model_type=model)
    targets = {"lora.targets": ("q_proj", "k_proj", "v_proj", "o_proj"), "lora.expert_rank": 2}
    changes = AGENTS | (targets if model == "qwen3_moe" else {})
    run = train(talker.config(changes), workdir=tmp_path / "run")
    rows = tiny_run.results(run)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert 1 < row["environment/turns"] <= 3
        assert row["environment/failures"] == 0
        assert row["environment/rows"] == 1
        assert row["environment/further_rows"] == row["environment/retries"] == 0
        assert row["logprob_diff_mean"] < 1e-5 or row["sigma"]
        assert row["reward/format"] == row["environment/turns"]
        assert row["length"] <= 10
        if model == "qwen3_moe":
            assert (row["routes_differ"] > 0) == (row["sigma"] > 0)
    assert tiny_run.evaluations(run).keys() == {0, 2, 4}
    for row in read_jsonl(run / "completions.jsonl"):
        turns = row["conversation"]
        assert [turn["role"] for turn in turns] == len(turns) // 2 * ["environment", "assistant"]
        assert turns[0]["text"].endswith("t1 t2")
        assert turns[-1]["text"] == row["completion"]
        assert row["ending"] in ("done", "tokens")
    assert np.isfinite([row["loss"] for row in rows]).all()


def several_rows(session, job):
    """An agent with parallel calls and a rewritten history; every third session fails."""
    url = f"{session.base_url}/chat/completions"
    first = {"role": "user", "content": job.columns["question"]}

    def ask(*messages, **body):
        status, answer = agent_cases.post(url, {"messages": messages} | body, session.key)
        assert status == 200, answer
        return answer["choices"][0]["message"]

    reply = ask(first, max_tokens=3)
    if job.number % 3 == 2:
        raise RuntimeError("broken")
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        list(pool.map(ask, [{"role": "user", "content": f"t{n} t5"} for n in range(3)]))
    ask(first, reply, {"role": "user", "content": "t7"}, max_tokens=2)
    return float(job.number)


@pytest.mark.slow
def test_a_session_with_several_rows_trains_all_of_them(talker, agents, tmp_path, monkeypatch):
    agents(several_rows)
    changes = {"eval.every": 0, "steps": 2, "rewards.format.function": "tiny_run:low_fraction"}
    changes |= {"rl.mini_batches": 2, "rl.updates_per_rollout": 2}
    batches = []
    make_batch = step.make_batch

    def recorded(*arguments, **options):
        batches.append(make_batch(*arguments, **options))
        return batches[-1]

    monkeypatch.setattr(step, "make_batch", recorded)
    run = train(talker.config(AGENTS | changes), workdir=tmp_path / "run")
    for row, batch in zip(tiny_run.results(run), batches, strict=True):
        assert row["environment/failures"] == 2
        assert row["environment/rows"] == (6 * 4 + 2) / 8
        assert row["environment/further_rows"] == 6 * 3 / 8
        assert len(batch.lengths) == 26
        # The rows of a session have its advantage; those of failures have none.
        assert sorted(np.unique(batch.advantages, return_counts=True)[1]) == [2, *[4] * 6]
    assert (tmp_path / "run" / "sessions").is_dir()


def test_a_resumed_run_repeats_what_was_scored(talker, agents, tmp_path, capsys):
    """A step whose sessions are kept is the same bit for bit, and needs no agent."""
    agents(several_rows)
    changes = {"eval.every": 0, "steps": 3, "rewards.format.function": "tiny_run:low_fraction"}
    config = talker.config(AGENTS | changes | {"checkpoint.every": 2})
    whole = tmp_path / "whole"
    kept = {}

    def keep(row):
        if row["step"] == 3:
            kept["files"] = shutil.copytree(whole / "sessions", tmp_path / "sessions")

    train(config, workdir=whole, on_step=keep)
    assert [path.name for path in sorted((tmp_path / "sessions").iterdir())] == ["2.npz"]
    assert not list((whole / "sessions").iterdir())
    again = shutil.copytree(whole, tmp_path / "again")
    shutil.rmtree(again / "checkpoints" / "3")
    for name in ("summary.json", "adapter"):
        path = again / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(tmp_path / "sessions", again / "sessions", dirs_exist_ok=True)

    def no_agent(session, job):
        raise AssertionError("it is not asked again")

    agents(no_agent)
    capsys.readouterr()
    train(config, workdir=again)
    assert "steps whose sessions are scored and kept: 3;" in capsys.readouterr().out
    assert tiny_run.results(again) == tiny_run.results(whole)
    jax.tree.map(np.testing.assert_array_equal, tiny_run.adapter(again), tiny_run.adapter(whole))
    assert read_jsonl(again / "completions.jsonl") == read_jsonl(whole / "completions.jsonl")


def forked(session, job):
    """An agent that begins another conversation and continues the first; every third one fails."""
    url = f"{session.base_url}/chat/completions"
    texts = [{"role": "user", "content": f"{job.columns['question']} t{n}"} for n in range(3)]
    first = texts[:1]
    for messages in (first, texts[1:2], first):
        if job.number % 3 == 2 and messages is not first:
            raise RuntimeError("broken")
        body = {"messages": messages, "max_tokens": 3}
        status, answer = agent_cases.post(url, body, session.key)
        assert status == 200, answer
        messages += [answer["choices"][0]["message"], texts[2]]
    return float(job.number)


def test_devices_and_processes_have_parts_of_the_sessions(talker, agents, monkeypatch, tmp_path):
    """Two groups, which share the device of this process; then the sessions of two processes."""
    agents(forked)
    changes = {"eval.every": 0, "rewards.format.function": "tiny_run:low_fraction"}
    config = talker.config(AGENTS | changes)
    session, result = train_step(open_session(config))
    groups, samplers = sharding.groups_of, Sampler._group_samplers
    monkeypatch.setattr(sharding, "groups_of", lambda tree: 2 * groups(tree))
    monkeypatch.setattr(Sampler, "_group_samplers", lambda *sizes: 2 * samplers(*sizes))
    whole = result.experience
    assert np.bincount(whole.owners).tolist() == [2, 2, 1, 2, 2, 1, 2, 2]
    no_routes = {"routes": None, "prompt_routes": None}
    shares, rng = [np.array([1]), np.array([0])], np.random.default_rng(0)
    lengths = whole.rollout.lengths, [len(ids) for ids in whole.own_prompts]
    routes = [
        experience.split_routes(rng.integers(9, size=(sum(rows), 2, 1)), np.array(rows))
        for rows in lengths
    ]
    routed = whole.rollout.replace(routes=routes[0], prompt_routes=routes[1])
    routed = dataclasses.replace(whole, rollout=routed)
    other, own = (experience.choose(routed, share) for share in shares)
    peers = types.SimpleNamespace(
        count=2, exchange=lambda share: [experience._exchange_arrays(other), share]
    )
    options = {"tokenizer": session.setup.model.tokenizer, "processes": peers}
    gathered = experience.gather(own, whole.prompts, whole.places, shares, **options)
    kept = KeptSessions(tmp_path, dict(zip(whole.places, whole.prompts, strict=True)))
    kept.collect(0, lambda: (routed, {}, Cursor()))
    kept = kept.collect(0, None)[0]
    for found in (gathered, kept):
        recorded = found.rollout.routes, found.rollout.prompt_routes
        jax.tree.map(
            np.testing.assert_array_equal, *(list(map(list, x)) for x in (recorded, routes))
        )
    for found in (train_step(open_session(config))[1].experience, gathered, kept):
        for name in ("prompts", "places", "texts", "episodes", "own_prompts"):
            assert getattr(found, name) == getattr(whole, name), name
        found = dataclasses.replace(found, rollout=found.rollout.replace(**no_routes))
        parts = [(one.rollout, one.owners, one.scores.total) for one in (found, whole)]
        jax.tree.map(np.testing.assert_array_equal, *parts)


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04 and more", b"text"], ids=len)
def test_damaged_sessions_are_named(tmp_path, data):
    (tmp_path / "0.npz").write_bytes(data)
    refused("0.npz is damaged: remove it", KeptSessions(tmp_path, []).collect, 0, None)


def test_a_server_that_does_not_start_ends_the_runner(talker, monkeypatch):
    """Its processes would run as long as the program that called the library."""
    closed = []
    runner = types.SimpleNamespace(gives_rewards=True, close=lambda: closed.append(True))

    def serve(*_, gives_rewards):
        raise UserError("no port")

    monkeypatch.setattr(environment_config, "make_runner", lambda *_: runner)
    monkeypatch.setattr(environment_config, "serve_agents", serve)
    refused("no port", environment_config.make_environments, talker.config(AGENTS), None)
    assert closed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rl.loss": "bnpo"}, "no fixed number"),
        ({"environment.function": "environment_cases:Echo"}, "a run has one of them"),
        ({"environment.verifiers": "guess"}, "a run has one of them"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_what_does_not_work_is_refused(talker, tmp_path, changes, message):
    refused(message, train, talker.config(AGENTS | changes), workdir=tmp_path / "run")


def test_an_evaluation_starts_the_episodes_of_one_group_of_devices(talker, monkeypatch):
    found = []

    def runner(functions, *, python, processes):
        found.append(processes)
        raise UserError("it is not started")

    monkeypatch.setattr(environment_config, "agent_runner", runner)
    config = talker.config(AGENTS | {"mesh.data": 4, "environment.processes": 3})
    refused("not started", environment_config.make_environments, config, None)
    run = {"config": config.to_dict()}
    refused("not started", environments_of, run, None, trusted=True)
    assert found == [12, 3]
    assert run["config"]["mesh"]["data"] == 4
