"""Runs on several sources and with a curriculum: what they draw, log, save, refuse and resume."""

import itertools
import json
import pathlib
import re
import shutil
import types

import numpy as np
import pytest
import tiny_run
from ml_collections import ConfigDict
from problem_sets import draw, load_mixture

from qerl_jax.commands.cli import _ConfigParser
from qerl_jax.config.overrides import check_overrides
from qerl_jax.data.mixture import MixtureSource, divide, read_mixture
from qerl_jax.data.order import Cursor, Order, Source, draw_turns, source_metrics, take_turns
from qerl_jax.errors import UserError
from qerl_jax.evaluation.tasks import _held_out_problems
from qerl_jax.export.model_card import _training
from qerl_jax.rewards.scored import Scores
from qerl_jax.rollout.completions import Rollout
from qerl_jax.run.checkpoints import read_latest_meta
from qerl_jax.show.view import curves, open_views
from qerl_jax.system.jsonl import read_jsonl
from qerl_jax.training import collect, dry_run
from qerl_jax.training.experience import Experience, choose, concatenate
from qerl_jax.training.loop import train
from qerl_jax.training.saving import sample_rows

CHANGES = {
    "steps": 4,
    "eval.every": 0,
    "rollout.prompts_per_step": 4,
    "rewards.correctness.function": "tiny_run:rare",
}


def write(path, first, count):
    """Problems whose questions no other range of numbers has."""
    rows = [
        {"question": f"t{number % 40} t{number // 40} t1", "answer": str(number)}
        for number in range(first, first + count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    return {
        "long": write(folder / "long.jsonl", 0, 40),
        "short": write(folder / "short.jsonl", 40, 5),
    }


@pytest.fixture
def mixed(tiny, files):
    """Makes a config that draws three of four problems from `short`."""

    def make(changes=None):
        config = tiny.config(CHANGES | {"data.path": ""} | (changes or {}))
        with config.data.mixture.unlocked():
            config.data.mixture.long = ConfigDict({"path": files["long"]})
            config.data.mixture.short = ConfigDict({"path": files["short"], "weight": 3.0})
        return config

    return make


METRICS = ("reward", "accuracy", "share")
CURRICULUM = {
    "steps": 6,
    "data.curriculum": "learnability",
    "data.curriculum_share": 0.5,
    "rl.dynamic_sampling": True,
    "rl.dynamic_sampling_rounds": 2,
    "checkpoint.every": 2,
}


@pytest.fixture(scope="module")
def whole(tiny, files, tmp_path_factory):
    """A run on a mixture with a curriculum; do not write to it."""
    config = tiny.config(CHANGES | CURRICULUM | {"data.path": ""})
    with config.data.mixture.unlocked():
        for name, weight in (("long", 1.0), ("short", 3.0)):
            config.data.mixture[name] = ConfigDict({"path": files[name], "weight": weight})
    return train(config, workdir=tmp_path_factory.mktemp("whole") / "run")


def test_draws_metrics_and_cursors(mixed, tmp_path):
    run = train(mixed({"log.completions": 16}), workdir=tmp_path / "run")
    rows = tiny_run.results(run)
    completions = read_jsonl(run / "completions.jsonl")
    for row in rows:
        assert row["source/short/share"] == 0.75
        assert row["source/long/share"] == 0.25
        ours = [c for c in completions if c["step"] == row["step"]]
        for name, of in (("long", range(40)), ("short", range(40, 45))):
            part = [c for c in ours if int(c["answer"]) in of]
            assert len(part) == {"long": 4, "short": 12}[name]
            rewards = [c["reward"] for c in part]
            assert row[f"source/{name}/reward"] == pytest.approx(sum(rewards) / len(rewards))
            correct = [c["reward/correctness"] for c in part]
            assert row[f"source/{name}/accuracy"] == pytest.approx(sum(correct) / len(correct))
    meta = read_latest_meta(run / "checkpoints")
    assert meta["cursor"] == {
        "sources": {"long": {"epoch": 0, "index": 4}, "short": {"epoch": 2, "index": 2}}
    }
    assert set(meta["problems"]) == {"train/long", "train/short", "eval"}


@pytest.mark.parametrize("per_rollout", [8, 12])
@pytest.mark.parametrize(("rates", "rounds"), [((0.7, 0.7), 3), ((0.9, 0.3), 12), ((1.0, 0.0), 3)])
def test_dynamic_sampling_trains_on_the_shares_of_the_weights(rates, rounds, per_rollout):
    """A source whose groups are often uninformative has more draws, and no smaller part."""
    size, group = 8, 2
    order = Order((Source("a", 100), Source("b", 100)))
    options = types.SimpleNamespace(
        prompts_per_step=size,
        prompts_per_rollout=per_rollout,
        sampler=types.SimpleNamespace(group_size=group),
        rounds=rounds,
        metric="correctness",
        order=order,
    )
    rng, cursor, trained, informative_shares = np.random.default_rng(0), Cursor(), [], []

    def sample(index, cursor, turns, tokens):
        places, cursor = draw_turns(order, cursor, turns)
        assert len(places) == per_rollout
        mixed = rng.random(per_rollout) < np.array(rates)[order.sources_of(places)]
        correct = np.stack([mixed, np.zeros(per_rollout)], axis=1).reshape(-1)
        rows = per_rollout * group
        zeros = np.zeros((rows, 1), np.float32)
        rollout = Rollout(zeros, np.ones(rows, int), zeros[:, 0], zeros, zeros)
        scores = Scores(correct, {"correctness": correct}, [])
        return Experience(places, places, [""] * rows, rollout, scores, [], 1.0), cursor

    for _ in range(60):
        turns, cursor = take_turns(order, cursor, size)
        assert sorted(turns) == [0] * 4 + [1] * 4
        parts, informative, cursor = collect._sample_rounds(sample, cursor, turns, options)
        whole = concatenate(parts)
        groups = collect._choose_groups(whole.places, informative, turns, order)
        trained += choose(whole, groups).places
        of_step = order.sources_of(whole.places)[groups]
        informative_shares.append(np.mean(of_step[informative[groups]] == 0))
    assert source_metrics(order, trained, {})["source/a/share"] == 0.5
    if rounds == 12:
        assert set(informative_shares) == {0.5}
        sampled = cursor.positions["b"].epoch * 100 + cursor.positions["b"].index
        assert sampled > 2 * (cursor.positions["a"].epoch * 100 + cursor.positions["a"].index)


def logged(order, prompts, count, steps, known=True):
    """The sources, as letters, of the completions that some steps log."""
    group, cursor, sources = 8, Cursor(), []
    for step in range(steps):
        places, cursor = draw(order, cursor, prompts)
        rows = prompts * group
        experience = types.SimpleNamespace(
            places=places,
            texts=[str(row) for row in range(rows)],
            row_prompts=[
                types.SimpleNamespace(
                    text="abcd"[order.sources_of([place])[0]],
                    problem=types.SimpleNamespace(answer=""),
                )
                for place in places
                for _ in range(group)
            ],
            scores=types.SimpleNamespace(total=np.zeros(rows), parts={}),
            lengths=np.ones(rows),
            finished=np.ones(rows),
            owners=None,
            episodes=(),
        )
        progress = types.SimpleNamespace(step=step)
        result = types.SimpleNamespace(
            experience=experience, advantages=np.zeros(rows), progress=progress
        )
        found = sample_rows(result, group, count, order if known else None)
        assert len({row["completion"] for row in found}) == len(found) == min(count, rows)
        sources.append("".join(row["prompt"] for row in found))
    return sources


def test_the_logged_completions_are_those_of_all_sources():
    thirds = Order((Source("a", 100), Source("b", 100), Source("c", 100, 2.0)))
    assert set("".join(logged(thirds, 16, 4, 20, known=False))) == set("abc")
    assert all(set(found) == set("abc") for found in logged(thirds, 16, 4, 20))
    rare = Order((Source("a", 50, 14.0), Source("b", 50), Source("c", 50), Source("d", 50)))
    assert all(set(found) == set("abcd") for found in logged(rare, 17, 4, 20))
    assert set("".join(logged(rare, 17, 1, 40))) == set("abcd")
    # All completions of a step, and the first of each group where there is one source.
    assert len(logged(thirds, 4, 99, 1)[0]) == 32
    single = Order((Source("", 9),))
    assert logged(single, 3, 4, 1) == ["aaaa"]


@pytest.mark.slow
def test_a_mixture_of_one_source_is_the_run_on_that_source(tiny, files, tmp_path):
    alone = train(tiny.config(CHANGES | {"data.path": files["long"]}), workdir=tmp_path / "alone")
    config = tiny.config(CHANGES | {"data.path": ""})
    with config.data.mixture.unlocked():
        config.data.mixture.it = ConfigDict({"path": files["long"], "weight": 0.3})
    run = train(config, workdir=tmp_path / "mixture")
    rows = tiny_run.results(run)
    for row in rows:
        assert row.pop("source/it/share") == 1
        assert row.pop("source/it/reward") == row["reward"]
        assert row.pop("source/it/accuracy") == row["accuracy"]
    assert rows == tiny_run.results(alone)
    assert (run / "completions.jsonl").read_bytes() == (alone / "completions.jsonl").read_bytes()


@pytest.mark.parametrize("call", [pytest.param(20, marks=pytest.mark.slow), 75])
def test_a_resumed_run_equals_an_uninterrupted_one(whole, mixed, tmp_path, call):
    calls = itertools.count(1)

    def correctness(*arguments):
        if next(calls) == call:
            raise tiny_run.KilledError
        return tiny_run.rare(*arguments)

    rewards = {"correctness": (correctness, 1.0), "format": (tiny_run.low_fraction, 0.1)}
    with pytest.raises(tiny_run.KilledError):
        train(mixed(CURRICULUM), workdir=tmp_path / "run", rewards=rewards)
    run = train(mixed(CURRICULUM), workdir=tmp_path / "run")
    assert tiny_run.results(run) == tiny_run.results(whole)
    for file in ("completions.jsonl", "adapter/adapter_model.safetensors"):
        assert (run / file).read_bytes() == (whole / file).read_bytes()
    found = [read_latest_meta(folder / "checkpoints")["cursor"] for folder in (run, whole)]
    assert found[0] == found[1]


def test_what_a_curriculum_logs_and_saves(whole, tiny, files, tmp_path):
    rows = tiny_run.results(whole)
    assert rows[0]["curriculum/success_rate"] is None
    assert rows[0]["curriculum/measured"] == 0
    seen = [row["curriculum/seen"] for row in rows]
    assert seen == sorted(seen)
    assert any(row["curriculum/success_rate"] for row in rows[1:])
    saved = read_latest_meta(whole / "checkpoints")["cursor"]["sources"]
    scored = [counts for place in saved.values() for counts in place["scored"]]
    assert len(scored) == round(seen[-1] * 45)
    assert all(0 <= correct <= of == 4 for _, correct, of in scored)
    # Without a curriculum nothing of it is in the metrics and the checkpoints.
    run = train(tiny.config(CHANGES | {"data.path": files["long"]}), workdir=tmp_path / "run")
    assert not [key for row in tiny_run.results(run) for key in row if "/" in key[7:]]
    assert read_latest_meta(run / "checkpoints")["cursor"] == {"epoch": 0, "index": 16}


@pytest.mark.slow  # 5 s
def test_a_run_begins_from_another_with_its_cursors(whole, mixed, tmp_path):
    cursor = read_latest_meta(whole / "checkpoints")["cursor"]
    origin = {"init_from": str(whole), "steps": 1}
    run = train(mixed(CURRICULUM | origin | {"rl.loss": "dapo"}), workdir=tmp_path / "same")
    later = read_latest_meta(run / "checkpoints")["cursor"]["sources"]
    for name, place in cursor["sources"].items():
        known = {problem for problem, *_ in place["scored"]}
        assert known <= {problem for problem, *_ in later[name]["scored"]}
        assert later[name]["decided"] > place["decided"]
    said = json.loads((run / "config.json").read_text())["init_from"]["cursor"]["sources"]
    assert all(place.keys() <= {"epoch", "index", "credit"} for place in said.values())
    # A problem less in one source: all of them begin anew.
    other = mixed(CURRICULUM | origin)
    other.data.mixture.long.path = write(tmp_path / "other.jsonl", 0, 39)
    run = train(other, workdir=tmp_path / "other")
    assert json.loads((run / "config.json").read_text())["init_from"]["cursor"] == {
        "epoch": 0, "index": 0,
    }  # fmt: skip


@pytest.mark.slow  # 5 s
def test_moved_sources_are_found_again_and_others_refused(mixed, files, tmp_path, capsys):
    run = train(mixed({"steps": 1}), workdir=tmp_path / "run")
    moved = mixed({"steps": 2})
    moved.data.mixture.short.path = shutil.copy(files["short"], str(tmp_path / "moved.jsonl"))
    train(moved, workdir=run)
    saved = json.loads((run / "config.json").read_text())["config"]["data"]["mixture"]
    assert saved["short"] == {"path": str(tmp_path / "moved.jsonl"), "weight": 3.0}
    assert saved["long"] == {"path": files["long"]}
    # Problems that changed the source with all of them: the list of all stays as it was.
    rows = [pathlib.Path(files[name]).read_text().splitlines() for name in ("long", "short")]
    for name, lines in (("long", rows[0][:-1]), ("short", rows[0][-1:] + rows[1])):
        other = tmp_path / f"{name}.jsonl"
        other.write_text("\n".join(lines))
        moved.data.mixture[name].path = str(other)
    moved.steps = 3
    with pytest.raises(UserError, match=r"the training problems of .*long.jsonl are not the prob"):
        train(moved, workdir=run)
    moved = mixed({"steps": 3})
    moved.data.mixture.short.weight = 1.0
    with pytest.raises(UserError, match=r"data.mixture.short.weight: 3.0 -> 1.0"):
        train(moved, workdir=run)


def test_the_model_card_names_the_sources(whole):
    run = json.loads((whole / "config.json").read_text())
    text = _training(run)["fields"]
    assert re.search(r"data.mixture.short +\| .*short.jsonl, 75.0% of the draws", text)
    assert "| data.source" not in text


def test_the_curves_of_sources_and_of_the_curriculum_are_shown(whole):
    found, unchanged = curves(open_views([str(whole)]))
    starts = ("source/", "curriculum/")
    parts = [key for key in found if key.startswith(starts)]
    assert {*parts, *(key for key in unchanged if key.startswith(starts))} == {
        *(f"source/{name}/{of}" for name in ("long", "short") for of in METRICS),
        *("curriculum/success_rate", "curriculum/measured", "curriculum/seen"),
    }
    assert found.index("reward/format") < found.index(parts[0]) < found.index("accuracy")


def test_a_dry_run_counts_the_problems_of_each_source(mixed, tmp_path):
    parts = []
    dry_run.dry_run(mixed({"eval.every": 2}), write=parts.append, workdir=tmp_path / "run")
    text = "\n".join(parts)
    assert "39 training problems of long, 25.0% of the draws; prompts have" in text
    assert "2 training problems of short, 75.0% of the draws; prompts have" in text
    assert "4 held-out problems; prompts have" in text
    assert "\ndata.mixture.short.weight = 3.0\n" in text


def test_a_prompt_that_is_too_long_names_its_source(mixed, tmp_path):
    config = mixed()
    config.data.mixture.short.path = str(tmp_path / "wide.jsonl")
    (tmp_path / "wide.jsonl").write_text(json.dumps({"question": "t1 " * 30, "answer": "1"}))
    with pytest.raises(UserError, match="1 of 1 prompts of short are over 16 tokens"):
        dry_run.dry_run(config, write=lambda text: None, workdir=tmp_path / "run")


def test_evaluation_problems_come_from_every_source_or_have_their_own(tmp_path, files):
    sources = {"long": MixtureSource(files["long"]), "short": MixtureSource(files["short"])}
    train_, held_out = load_mixture(sources, eval_source="held_out", eval_size=4)
    assert [int(p.answer) for p in held_out] == [38, 43, 39, 44]
    assert [len(found) for found in train_.values()] == [38, 3]
    # No number given: at most a tenth of each source.
    _, held_out = load_mixture(sources, eval_source="held_out", eval_size=None)
    assert [int(p.answer) for p in held_out] == [36, 37, 44, 38, 39]
    # A source that is rarely drawn is not evaluated.
    rare = sources | {"short": MixtureSource(files["short"], weight=1e-3)}
    train_, held_out = load_mixture(rare, eval_source="held_out", eval_size=None)
    assert [int(p.answer) for p in held_out] == [36, 37, 38, 39]
    assert [len(found) for found in train_.values()] == [36, 5]
    # A question of one source that is evaluated is trained on in none.
    own = write(tmp_path / "eval.jsonl", 30, 12)
    train_, held_out = load_mixture(sources, eval_path=own, eval_size=20)
    assert [int(p.answer) for p in held_out] == list(range(30, 42))
    assert [len(found) for found in train_.values()] == [30, 3]
    twice = {"a": MixtureSource(files["long"]), "b": MixtureSource(files["long"], weight=3.0)}
    train_, held_out = load_mixture(twice, eval_source="held_out", eval_size=4)
    assert [int(p.answer) for p in held_out] == [37, 39, 38]  # one question of both sources
    assert [len(found) for found in train_.values()] == [37, 37]
    with pytest.raises(UserError, match=r"long.jsonl: .* its share of eval.problems, 40, .*lower"):
        load_mixture(sources, eval_source="held_out", eval_size=80)
    with pytest.raises(UserError, match=r"mixture.short: all questions of .*short.jsonl are eval"):
        load_mixture(sources, eval_path=files["short"], eval_size=5)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(UserError, match="no problems: the file is empty"):
        load_mixture({"a": MixtureSource(str(tmp_path / "empty.jsonl"))})


def test_the_held_out_problems_of_a_run_are_found_again(mixed, tmp_path):
    run = train(mixed({"steps": 1, "eval.every": 1, "eval.problems": 6}), workdir=tmp_path / "run")
    config = json.loads((run / "config.json").read_text())["config"]
    # They take turns: what a limit takes is of both sources.
    found = _held_out_problems(config, run, None, flag_values=None)
    assert [int(p.answer) for p in found] == [41, 38, 42, 43, 39, 44]
    # Problems of their own need no training data, which may lie on another machine.
    own = json.loads(json.dumps(config))
    own["data"]["eval_path"] = config["data"]["mixture"]["long"]["path"]
    own["data"]["mixture"]["long"]["path"] = "absent.jsonl"
    assert [int(p.answer) for p in _held_out_problems(own, None, None, flag_values=None)] == list(
        range(6)
    )
    config["data"]["mixture"]["short"]["weight"] = 1.0
    with pytest.raises(UserError, match="held out have changed since"):
        _held_out_problems(config, run, None, flag_values=None)


@pytest.mark.slow  # 8 s
def test_sources_differ_in_split_fields_and_levels(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "train.jsonl", 0, 3)
    write(folder / "extra.jsonl", 10, 2)
    rows = [{"task": f"q{level}", "gold": "1", "hard": level} for level in range(4)]
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found, _ = load_mixture(
        {
            "folder": MixtureSource(str(folder), split="extra"),
            "other": MixtureSource(
                str(other),
                levels=(2, 3),
                fields={"question": "task", "answer": "gold", "level": "hard"},
            ),
            "sums": MixtureSource(
                source="reasoning_gym:chain_sum", options={"min_terms": 2, "max_terms": 2}
            ),
        }
    )
    assert [p.answer for p in found["folder"]] == ["10", "11"]
    assert [p.question for p in found["other"]] == ["q2", "q3"]
    assert len(found["sums"]) > 100


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"path": "a", "weight": 0.0}, r"data.mixture.x.weight=0.0: it must be positive and fin"),
        ({"path": "a", "weight": -1.0}, r"weight=-1.0: it must be positive and finite"),
        ({"path": "a", "weight": float("nan")}, r"weight=nan: it must be positive and finite"),
        ({"path": "a", "weight": float("inf")}, r"weight=inf: it must be positive and finite"),
        ({"path": "a", "weight": "much"}, r"weight='much' must be of the kind of 1.0"),
        ({"path": "a", "wieght": 1.0}, r"data.mixture.x has no 'wieght'; it has path, source, we"),
        ({"weight": 1.0}, r"data.mixture.x: give it a path or a source, not neither"),
        ({"path": "a", "source": "b/c"}, r"give it a path or a source, not both"),
        ({"path": "a", "fields": {"query": "q"}}, r"fields has no query; it has question, answer"),
        ({"path": "a", "options": {"n": 1}}, r"data.mixture.x.options is set and not read: a is"),
        ({"source": "reasoning_gym:chain_sum", "levels": (1,)}, r"is generated problems"),
        ({"source": "a/b", "options": {}}, r"a/b is a dataset on the hub"),
        ("a.jsonl", r"data.mixture.x='a.jsonl': give it a path or a source, {'path': 'FILE.json"),
    ],
)
def test_tables_that_are_refused(table, words):
    with pytest.raises(UserError, match=words) as caught:
        read_mixture({"mixture": {"x": table}, "path": ""})
    assert "\n" not in str(caught.value)


def test_a_path_beside_a_mixture_and_a_bad_name_are_refused(mixed, tiny, files):
    config = mixed({"data.path": files["long"]})
    with pytest.raises(UserError, match=r"data.path=.* and data.mixture \(long, short\): make"):
        train(config)
    with pytest.raises(UserError, match=r"data.mixture.a/b: a name has letters, digits"):
        read_mixture({"mixture": {"a/b": {"path": "x"}}, "path": ""})
    assert divide(10, {n: MixtureSource("a", weight=w) for n, w in (("x", 1.0), ("y", 2.0))}) == {
        "x": 3, "y": 7,
    }  # fmt: skip


def test_a_curriculum_needs_a_correctness(tiny, tmp_path):
    config = tiny.config(CHANGES | {"data.curriculum": "learnability"})
    rewards = {"format": (tiny_run.low_fraction, 1.0)}
    with pytest.raises(UserError, match="needs a reward named 'correctness', whose success rate"):
        train(config, workdir=tmp_path / "run", rewards=rewards)
    with pytest.raises(UserError, match=r"unknown data.curriculum 'hard': choose from off, learn"):
        train(tiny.config({"data.curriculum": "hard"}))


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("data.source", "needs an empty data.path and no data.mixture"),
        ("data.levels", "needs a run without data.mixture"),
        ("data.options", "no data.mixture"),
        ("data.fields.answer", "with data.mixture those of data.eval_path or data.eval_source"),
        ("data.curriculum_share", "needs data.curriculum other than 'off'"),
    ],
)
def test_fields_that_a_mixture_does_not_read(mixed, field, words):
    with pytest.raises(UserError, match=words):
        check_overrides(mixed(), [field])
    read = mixed({"data.eval_path": "x.jsonl", "data.curriculum": "learnability"})
    check_overrides(read, {"data.fields.answer", "data.curriculum_share"} & {field})


class _Given:
    """A parser of a config file that gives a config."""

    def __init__(self, config):
        self.config = config

    def parse(self, argument):
        return self.config


def test_the_command_line_names_sources(tiny):
    fields = ["data.mixture.a.path", "data.mixture.a.weight", "data.mixture.b.fields.answer"]
    config = _ConfigParser(_Given(tiny.config()), fields).parse("")
    assert config.data.mixture.to_dict() == {
        "a": {"path": "", "weight": 1.0}, "b": {"fields": {"answer": ""}},
    }  # fmt: skip
    for field, words in (
        ("data.mixture.a.wieght", "data.mixture.a has no 'wieght'; it has path, source"),
        ("data.mixture.a.fields.gold", "has no 'fields.gold'; it has fields.question"),
        ("data.mixture.a.path.x", "has no 'path.x'"),
    ):
        with pytest.raises(UserError, match=words):
            _ConfigParser(_Given(tiny.config()), [field]).parse("")
