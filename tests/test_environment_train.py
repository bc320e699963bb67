"""Whole runs of a tiny model that talk to an environment: rows, rewards, metrics, resume."""

import dataclasses
import functools
import itertools
import json
import pathlib
import re
import shlex
import shutil
import textwrap
import threading
import types

import jax
import numpy as np
import pytest
import tiny_checkpoints
import tiny_run
from environment_cases import CHANGES, TEMPLATE
from finished_run import write_run
from refusal import refused

from benchmarks import environments
from benchmarks.result_tables import agents_table, environment_table
from qerl_jax.commands import sweep
from qerl_jax.data import environment_config
from qerl_jax.environments import episodes
from qerl_jax.environments.roles import SAMPLED
from qerl_jax.errors import UserError
from qerl_jax.evaluation import greedy
from qerl_jax.evaluation.evaluate import evaluate
from qerl_jax.evaluation.results_folder import EvaluateConfig
from qerl_jax.evaluation.sample import SampleConfig, chat, sample
from qerl_jax.evaluation.tasks import TaskOverrides
from qerl_jax.policy import sharding
from qerl_jax.policy.policy import Policy
from qerl_jax.rollout.replicas import deal
from qerl_jax.rollout.sampler import Sampler
from qerl_jax.show.html import page
from qerl_jax.show.terminal import show
from qerl_jax.show.view import open_views
from qerl_jax.system.jsonl import read_jsonl
from qerl_jax.training import experience
from qerl_jax.training.dry_run import dry_run
from qerl_jax.training.loop import train


def turns_of(prompts, completions, turns, environments, conversations):
    """A reward that takes lists, and what an environment was in the end."""
    assert [one[-1] for one in turns] == completions
    assert [list(one.turns) for one in environments] == turns
    for messages, texts in zip(conversations, turns, strict=True):
        assert [m["content"] for m in messages if m["role"] == "assistant"] == texts
        assert {m["role"] for m in messages[1::2]} <= {"user"}
    return [len(one) for one in turns]


def has_talked(completions, environments):
    """A reward that reads what only an environment that has not failed is in the end."""
    assert len(completions) == len(environments)
    return [float(len(one.turns) > 0) for one in environments]


@pytest.fixture(scope="module")
def talker(tmp_path_factory, compile_cache):
    """The inputs of runs, with a chat template whose turns end."""
    folder = tmp_path_factory.mktemp("talker")
    tiny = tiny_run.write_tiny(folder, compile_cache)
    tiny_checkpoints.write_tokenizer(tiny.model, chat_template=TEMPLATE)
    return tiny


def untimed(run):
    """The rows of the steps without what depends on the time of environments."""
    times = "rollout_live_share", "environment/idle_share", "environment/waiting_seconds"
    return [{k: v for k, v in row.items() if k not in times} for row in tiny_run.results(run)]


@pytest.fixture(scope="module")
def run(talker, tmp_path_factory):
    return train(talker.config(CHANGES), workdir=tmp_path_factory.mktemp("runs") / "run")


def test_a_run_trains_on_conversations(run):
    rows = tiny_run.results(run)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert 1 < row["environment/turns"] <= 3
        assert row["environment/failures"] == 0
        assert row["environment/calls"] == row["environment/rows_with_right_call"] == 0
        assert row["logprob_diff_mean"] < 1e-5 or row["sigma"]
        assert row["reward/format"] == row["environment/turns"]
        assert row["length"] <= 10
        endings = [v for k, v in row.items() if k.startswith("environment/ending/")]
        assert sum(endings) == pytest.approx(1)
    assert tiny_run.evaluations(run).keys() == {0, 2, 4}


@pytest.mark.slow  # 60 s
@pytest.mark.parametrize("drafts", ["off", "on"])
def test_a_run_of_gpt_oss_trains_on_conversations(drafts, tmp_path, compile_cache):
    """Rows outgrow the window in turns; the update has the log-probabilities of the rollout."""
    tiny = tiny_run.write_tiny(tmp_path, compile_cache, model_type="gpt_oss", window=4)
    tiny_checkpoints.write_tokenizer(tiny.model, chat_template=TEMPLATE)
    changes = {"model.format": "mxfp4", "lora.targets": ("q_proj", "o_proj"), "steps": 3}
    changes |= {"rollout.drafts": drafts, "aqn.schedule": "off"}
    rows = tiny_run.results(train(tiny.config(CHANGES | changes), workdir=tmp_path / "run"))
    for row in rows:
        assert 1 < row["environment/turns"] <= 3
        assert row["logprob_diff_mean"] < 1e-5
        assert row["routes_differ"] == 0
        assert row["grad_norm"] > 0


def test_the_benchmark_refuses_no_steps_before_it_makes_weights():
    options = environments.make_parser().parse_args(["step", "--steps=0"])
    with pytest.raises(UserError, match="--steps=0: it must be at least 1"):
        environments.measure_step("qwen2.5-7b", (1, 1), options, None)


def test_runs_are_summarized_for_the_page(run):
    part = environments.summarize_learning([str(run), str(run)])
    accuracies = tiny_run.evaluations(run)
    assert part["eval_accuracy"] == 2 * [{"before": accuracies[0], "after": accuracies[4]}]
    steps = [row.get("step_seconds", 0) for row in read_jsonl(run / "metrics.jsonl")]
    assert part["seconds"][0] > sum(steps)
    assert part["last"]["reward"] == tiny_run.results(run)[-1]["reward"]
    lines = environment_table({"runs": part, "control": part}, "replies", "won").splitlines()
    won = [f"{accuracies[step]:.2f}" for step in (0, 4)]
    assert [line.split(" | ")[2:4] for line in lines[2:]] == 4 * [won]
    result = {"runs": part, "control": part | {"steps": 3}}
    assert len(agents_table({"words": result}).splitlines()) == 2  # It has no agent.
    part["run"]["config"]["environment"]["verifiers"] = "words"
    *_, line = agents_table({"words": result}).splitlines()
    shares = 2 * [f"{part[when]['accuracy']:.2f}" for when in ("first", "last")]
    name, _, _, *cells = line.strip("| ").split(" | ")
    assert [name, *cells[:-1]] == ["`words` of verifiers", "4, 3", *shares]


def test_completions_show_the_conversation(run):
    for row in read_jsonl(run / "completions.jsonl"):
        turns = row["conversation"]
        texts = [turn["text"] for turn in turns if turn["role"] == "assistant"]
        assert turns[0]["role"] == turns[-1]["role"] == "assistant"
        assert row["reward"] == sum(len(text.split()) for text in texts)
        assert row["completion"] == texts[-1]
        assert row["ending"] in ("done", "turns", "tokens")
        # What the environment said at its reset is the end of the message.
        assert len(row["prompt"].split()) >= 5


def unfinished(run, folder):
    """A copy of the run as it was after its second step."""
    shutil.copytree(run, folder)
    shutil.rmtree(folder / "checkpoints" / "4")
    for name in ("summary.json", "adapter", "best_adapter"):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return folder


def test_a_run_that_goes_on_is_the_run_that_did_not_stop(talker, run, tmp_path):
    again = unfinished(run, tmp_path / "again")
    train(talker.config(CHANGES), workdir=again)
    assert untimed(again) == untimed(run)
    jax.tree.map(np.testing.assert_array_equal, tiny_run.adapter(again), tiny_run.adapter(run))


def test_the_time_of_an_environment_changes_nothing(talker, run, tmp_path):
    """Also where it has no limit."""
    changes = {"environment.function": "environment_cases:SlowEcho", "environment.time_limit": 0.0}
    changes = CHANGES | changes
    slow = train(talker.config(changes), workdir=tmp_path / "slow")
    assert untimed(slow) == untimed(run)


def test_groups_of_devices_have_parts_of_the_conversations(talker, run, tmp_path, monkeypatch):
    """Two groups, which share the device of this process, sample in threads of their own."""
    groups, samplers, threads = sharding.groups_of, Sampler._group_samplers, set()
    monkeypatch.setattr(sharding, "groups_of", lambda tree: 2 * groups(tree))
    monkeypatch.setattr(Sampler, "_group_samplers", lambda *sizes: 2 * samplers(*sizes))
    submit = episodes.Episodes.submit
    monkeypatch.setattr(
        episodes.Episodes,
        "submit",
        lambda self, turn: threads.add(threading.get_ident()) or submit(self, turn),
    )
    ours = train(talker.config(CHANGES), workdir=tmp_path / "run")
    assert len(threads - {threading.get_ident()}) > 1
    assert untimed(ours) == untimed(run)
    assert completions(ours) == completions(run)


def completions(run):
    """The completions that a run shows."""
    return (run / "completions.jsonl").read_text()


def test_processes_exchange_conversations(talker):
    """Each process has the conversations of all, and the prompts with what resets said."""
    from qerl_jax.training.session import open_session, train_step

    session, result = train_step(open_session(talker.config(CHANGES | {"eval.every": 0})))
    whole, shares = result.experience, [np.array([1]), np.array([0])]
    first, own = (experience.choose(whole, share) for share in shares)
    peers = types.SimpleNamespace(
        count=2, exchange=lambda share: [experience._exchange_arrays(first), share]
    )
    # A process knows the prompts of others without what their environments said.
    prompts = [session.setup.train_prompts[place] for place in whole.places]
    assert all(len(a.ids) < len(b.ids) for a, b in zip(prompts, whole.prompts, strict=True))
    tokenizer = session.setup.model.tokenizer
    options = {"tokenizer": tokenizer, "processes": peers}
    found = experience.gather(own, prompts, whole.places, shares, **options)
    assert found.prompts == whole.prompts
    assert found.episodes == whole.episodes
    assert found.texts == whole.texts
    jax.tree.map(np.testing.assert_array_equal, found.rollout, whole.rollout)


def test_an_evaluation_of_several_processes_has_the_environments_of_one(
    talker, monkeypatch, capsys
):
    """A seed follows from the number of its prompt among all of them; a failure is said once."""
    from qerl_jax.training.session import open_session

    monkeypatch.setattr(greedy, "_SHOWN", 4)
    setup = open_session(talker.config(CHANGES)).setup
    measure = functools.partial(
        greedy.greedy_accuracy,
        dataclasses.replace(setup.eval_sampler, executables=None),
        Policy(setup.params, None),
        setup.eval_prompts,
        correctness=setup.rewards["correctness"][0],
        time_limit=5.0,
        environments=setup.collect.environments,
    )
    whole = measure().answers
    assert len(whole) == 4
    share, own_share = deal([len(prompt.ids) for prompt in setup.eval_prompts], 2)
    assert len(own_share) == 2
    errors = json.dumps(["step: it is broken", ""])
    other = {"right": np.ones(1), "finished": np.ones(2, bool), "errors": np.array(errors)}
    other["answers"] = np.array(json.dumps([(int(i), whole[i]) for i in share]))
    peers = types.SimpleNamespace(index=1, count=2, exchange=lambda share: [other, share])
    assert measure(processes=peers).answers == whole
    warning = "warning: the environment failed in 1 of 4 rows: step: it is broken\n"
    assert capsys.readouterr().err == warning


def test_dynamic_sampling_replaces_conversations(talker, tmp_path):
    changes = {"rl.dynamic_sampling": True, "rl.dynamic_sampling_metric": "total", "steps": 1}
    changes |= {"eval.every": 0, "rl.overlong_buffer": 4}
    run = train(talker.config(CHANGES | changes), workdir=tmp_path / "run")
    assert tiny_run.results(run)[0]["sampled_groups"] >= 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"environment.function": "environment_cases:Nothing"}, "environment_cases:Nothing"),
        ({"environment.function": "environment_cases:NoTools"}, "method step"),
        ({"environment.function": "environment_cases:NoDocstring"}, "docstring"),
        ({"environment.function": "environment_cases:Calculator"}, "does not write tools"),
        ({"environment.function": "a=environment_cases:Echo,"}, "package.module:Class"),
        (
            {"environment.function": "a=environment_cases:Echo, b=environment_cases:Faults"},
            "a problem has environment=None",
        ),
        ({"rewards.correctness.function": "tiny_run:even_end"}, "environment_reward"),
        ({"rollout.max_new_tokens": 1}, "at least 2"),
        ({"environment.time_limit": 1e10}, "from 0 to 1000000"),
        ({"reward_time_limit": 1e10}, "from 0 to 1000000"),
        ({"environment.turn_tokens": 8, "environment.context_tokens": 5}, "context_tokens=5"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value.values())),
)
def test_what_does_not_work_is_refused(talker, tmp_path, changes, message):
    config = talker.config(CHANGES | {"rewards.format.function": "tiny_run:low_fraction"} | changes)
    refused(message, train, config, workdir=tmp_path / "run")
    refused(message, dry_run, config, workdir=tmp_path / "dry", write=lambda text: None)


def test_a_dry_run_shows_what_an_environment_says_at_its_reset(talker, tmp_path):
    parts, config = [], talker.config(CHANGES)
    dry_run(config, write=parts.append, workdir=tmp_path / "run")
    question = read_jsonl(pathlib.Path(talker.problems))[0]["question"]
    shown = rf"the first training prompt:\n{question} t\d+ t1 t2\n"
    assert re.search(shown, "\n".join(parts))
    config.environment.function = "environment_cases:NeedsColumn"
    with pytest.raises(UserError, match=r"reset: TypeError: .*'number'.*: correct the environment"):
        dry_run(config, write=parts.append, workdir=tmp_path / "run")


def reads_what_is_not_there(environments, **columns):
    return [one.no_such_attribute for one in environments]


def test_a_dry_run_counts_what_environments_say_and_calls_rewards(talker, tmp_path):
    function = {"environment.function": "environment_cases:SaysALength"}
    says = functools.partial(dry_run, workdir=tmp_path / "run")
    parts = []
    says(talker.config(CHANGES | function | {"data.max_prompt_tokens": 20}), write=parts.append)
    shown = "\n".join(parts)
    questions = [row["question"] for row in read_jsonl(pathlib.Path(talker.problems))]
    lengths = [len(q.split()) + int(q.split()[0][1:]) % 10 + 2 for q in questions]
    words = f"have {min(lengths)} to {max(lengths)} tokens, "
    assert (
        f"with what the environment says at its reset, {len(questions) + 2} of them {words}"
        in shown
    )
    assert re.search("rewards of 4 made-up completions.*: correctness .*, format 1$", shown, re.M)
    assert lengths[0] < max(lengths) - 1
    longest = (
        rf"are over {max(lengths) - 1} tokens, the longest has {max(lengths)}; instead of data"
    )
    short = {"data.max_prompt_tokens": max(lengths) - 1}
    refused(longest, says, talker.config(CHANGES | function | short), write=parts.append)
    for changes, message in (
        (
            {"rewards.format.function": "test_environment_train:reads_what_is_not_there"},
            "'format' is missing .* has no attribute 'no_such_attribute'",
        ),
        (
            {"environment.function": "environment_cases:Broken"},
            "failed in 4 of 4 rows: step: RuntimeError: broken .*: correct the environment",
        ),
    ):
        refused(message, says, talker.config(CHANGES | changes), write=parts.append)


def test_a_question_may_come_with_columns(talker, tmp_path, capsys):
    functions = "echo=environment_cases:Echo, number=environment_cases:NeedsColumn"
    changes = CHANGES | {"environment.function": functions}
    asked = {"source": str(write_run(tmp_path / "run", talker, own=True, **changes))}
    asked |= {"question": "t3 t4", "adapter": "adapter"}
    with pytest.raises(UserError, match="environments echo, number: name one of them, --columns="):
        sample(SampleConfig(**asked))
    sample(SampleConfig(**asked, columns='{"environment": "number"}'))
    assert "ended by failure, 1 turns, reset: TypeError" in (said := capsys.readouterr().err)
    assert "--columns passes what it reads of a problem" in said
    sample(SampleConfig(**asked, columns='{"environment": "number", "number": 3}'))
    assert "ended by done, 1 turns, reward 3" in capsys.readouterr().err
    refused("--columns=3: a JSON object is needed", sample, SampleConfig(**asked, columns="3"))
    with pytest.raises(UserError, match="read by the environment of a run: leave them out"):
        sample(SampleConfig(str(talker.model), "t3", columns="{}"))


def test_an_evaluation_talks_to_the_environment(run, tmp_path, capsys):
    config = EvaluateConfig(source=str(run), samples=2, out=str(tmp_path / "out"))
    (folder,) = evaluate(config)
    rows = read_jsonl(folder / "run.jsonl")
    assert len(rows) == 8
    for row in rows:
        texts = [turn["text"] for turn in row["conversation"] if turn["role"] == "assistant"]
        assert row["environments"]["turns"] == texts
        assert row["environment_reward"] == sum(len(text.split()) for text in texts)
        assert row["correct"] == (row["environment_reward"] > 0.5)
        assert row["ending"] in ("done", "turns", "tokens")
    # A part is there: what is missing is completed, and what is there stays.
    (folder / "run.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    evaluate(config)
    assert read_jsonl(folder / "run.jsonl") == rows
    sample(SampleConfig(str(run), "t3 t4", adapter="adapter", max_new_tokens=8))
    output = capsys.readouterr()
    assert "[assistant] t" in output.out
    assert "ended by " in output.err
    assert "reward " in output.err
    refused("pass one question", chat, SampleConfig(str(run), "", adapter="adapter"), ["t1"])


@pytest.mark.parametrize(
    ("name", "at"), [("train", 1), ("evaluate", 4), ("sample", 2), ("dry_run", 1)]
)
def test_an_interrupt_leaves_the_next_call_its_environments(
    name, at, talker, run, tmp_path, monkeypatch, capsys
):
    """Neither it nor the end of their processes is seen by later calls in the same Python."""
    config, numbers = talker.config(CHANGES), itertools.count()

    def call():
        capsys.readouterr()
        folder = tmp_path / str(next(numbers))
        if name == "train":
            return untimed(train(config, workdir=unfinished(run, folder)))
        if name == "evaluate":
            (results,) = evaluate(EvaluateConfig(str(run), samples=2, out=str(folder)))
            return read_jsonl(results / "run.jsonl")
        if name == "sample":
            sample(SampleConfig(str(run), "t3 t4", adapter="adapter", max_new_tokens=8))
        else:
            dry_run(config, workdir=tmp_path / "dry")
        return capsys.readouterr().out

    calls, wait = itertools.count(1), episodes.wait_for_any

    def interrupted(processes, seconds):
        if next(calls) == at:
            raise KeyboardInterrupt
        wait(processes, seconds)

    monkeypatch.setattr(episodes, "wait_for_any", interrupted)
    with pytest.raises(KeyboardInterrupt):
        call()
    monkeypatch.undo()
    pool, _ = environment_config._open({"environment": CHANGES["environment.function"]})
    assert pool._all == set(pool._idle)
    expected = call()
    assert name != "train" or expected == untimed(run)
    pool._parent.kill()
    pool._parent.wait()
    assert call() == expected


def test_an_environment_of_another_person_is_not_imported(talker, tmp_path):
    folder = write_run(tmp_path / "run", talker, **CHANGES)
    reward = "qerl_jax.rewards.functions:environment_reward"
    overrides = TaskOverrides(scorer=(reward,), format_scorer=("",))
    with pytest.raises(UserError, match="not yours, so it is not imported"):
        evaluate(EvaluateConfig(source=str(folder), overrides=overrides))
    with pytest.raises(UserError, match="not yours, so it is not imported"):
        sample(SampleConfig(str(folder), "t1", adapter="adapter"))


def test_a_template_without_ends_of_turns_is_refused(tiny, tmp_path):
    with pytest.raises(UserError, match="does not end the assistant's turn"):
        train(tiny.config(CHANGES), workdir=tmp_path / "run")


def test_a_failed_environment_costs_an_evaluation_its_own_rows(talker, tmp_path, capsys):
    """A reward that takes lists gets the others, in the evaluations of a run and by command."""
    rows = [
        {"question": f"t{n} t{n // 7}", "environment": "bad" if n % 4 == 1 else "good"}
        for n in range(16)
    ]
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = CHANGES | {
        "environment.function": "good=environment_cases:Echo, bad=environment_cases:Broken",
        "rewards.correctness.function": "test_environment_train:has_talked",
        "rewards.format.function": "qerl_jax.rewards.functions:environment_reward",
        "data.path": str(path),
        "steps": 1,
        "eval.every": 1,
        "eval.problems": 4,
    }
    run = train(talker.config(changes), workdir=tmp_path / "run")
    evaluations = [row for row in read_jsonl(run / "metrics.jsonl") if "eval_seconds" in row]
    assert [row["eval_missing"] for row in evaluations] == [1, 1]
    assert evaluations[1]["eval_accuracy"] == 1.0
    (folder,) = evaluate(EvaluateConfig(source=str(run), samples=2, out=str(tmp_path / "out")))
    judged = read_jsonl(folder / "run.jsonl")
    assert len(judged) == 8
    for row in judged:
        assert row["correct"] is (None if row["ending"] == "failure" else True)
    assert sum(row["ending"] == "failure" for row in judged) == 2
    assert "AttributeError" not in capsys.readouterr().err


def test_failures_cost_rows_their_reward(talker, tmp_path):
    problems = [
        {"question": f"t{n} t{n // 7}", "answer": "", "environment": name}
        for n, name in enumerate(["good", "bad", "good", "long"] * 4)
    ]
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    changes = CHANGES | {
        "environment.function": "good=environment_cases:Echo, bad=environment_cases:Broken, "
        "long=environment_cases:Talkative",
        "data.path": str(path),
        "steps": 2,
        "rollout.prompts_per_step": 6,
        "eval.every": 0,
    }
    run = train(talker.config(changes), workdir=tmp_path / "run")
    for row in tiny_run.results(run):
        assert 0 < row["environment/failures"] < 24
        assert row["rewards_missing"] == 2 * row["environment/failures"]
        assert row["environment/ending/failure"] == row["environment/failures"] / 24
    samples = read_jsonl(run / "completions.jsonl")
    errors = "\n".join(sample.get("error", "") for sample in samples)
    assert "RuntimeError: broken" in errors
    assert re.search(r"reset: .*over 12 tokens, the longest has 10\d; .*max_prompt_tokens", errors)


def test_roles_keep_tokens_of_environments_out_of_the_loss(talker, tmp_path):
    """The masks of a batch are the roles of its rollout."""
    from qerl_jax.training.session import open_session, train_step
    from qerl_jax.training.step import _batch

    config = talker.config(CHANGES | {"eval.every": 0})
    first = open_session(config)
    session, result = train_step(first)
    refused("this session has taken its step", train_step, first)
    batch = _batch(session.setup, result.experience, result.advantages)
    roles = result.experience.rollout.roles[:, : batch.sampled.shape[1]]
    np.testing.assert_array_equal(batch.sampled, roles == SAMPLED)
    np.testing.assert_array_equal(batch.loss_mask, batch.sampled)
    assert (batch.weights[roles != SAMPLED] == 0).all()
    assert (roles > SAMPLED).any()


@pytest.fixture
def first_command(tmp_path, monkeypatch):
    """The flags of the first command of docs/environments.md, in a folder with its module."""
    page = (pathlib.Path(__file__).parents[1] / "docs" / "environments.md").read_text()
    blocks = re.findall(r"(?<=\n\n)(?:    .*\n|\n(?=    ))+", page)
    code, command = map(textwrap.dedent, blocks[:2])
    _, _, module, *flags = shlex.split(command.removeprefix("uv run "))
    assert (command[:14], module) == ("uv run python ", "experiments.grpo_gsm8k")
    (tmp_path / "calculator.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return flags


@pytest.mark.e2e
@pytest.mark.slow  # begins 129 environments
def test_the_page_runs_from_its_first_line(first_command):
    """Without a hub; `--dry_run` begins the environments and calls the rewards."""
    config = sweep._parse(["--config=grpo_gsm8k", *first_command])
    said = []
    dry_run(config, write=said.append)
    text = "\n".join(said)
    assert '{"name": "add", "description": "Adds two numbers."' in text
    assert "</tool_call><|im_end|>\n<|im_start|>user\nWhat is " in text
    assert "called 0" in text  # no made-up completion is a call


@pytest.mark.slow  # compiles the default model, and takes its steps
def test_the_first_command_of_the_page_trains(first_command, tmp_path):
    config = sweep._parse(["--config=grpo_gsm8k", *first_command])
    config.steps, config.rollout.prompts_per_step = 1, 2
    (row,) = tiny_run.results(train(config, workdir=tmp_path / "run"))
    assert row["environment/failures"] == 0
    assert row["rewards_missing"] == 0
    assert row["environment/calls"] > 0
    assert row["reward/called"] <= row["environment/rows_with_right_call"]


def test_show_draws_the_roles(run):
    lines, (view,) = [], open_views([str(run)])
    show([view], lines.append, steps=(1, 4), columns=100)
    roles = [line for line in lines if line in ("assistant:", "environment:")]
    assert roles[0] == "assistant:"
    assert "environment:" in roles
    assert any("ended by " in line for line in lines)
    assert any(line.startswith("environment/turns ") for line in lines)
    text = page([view])
    assert "[environment]" in text
    assert "[assistant]" in text
