"""Evaluations of a tiny model in this process: counting, saving, continuing, refusing."""

import asyncio
import dataclasses
import datetime
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import types
from unittest import mock

import jax
import numpy as np
import pytest
import tiny_checkpoints
import tiny_run
from problem_sets import load_problems
from refusal import refused
from tiny_model import random_lora

import qerl_jax.evaluation.evaluate
import qerl_jax.evaluation.load_policy
import qerl_jax.quantization.base
import qerl_jax.training.setup
from qerl_jax.data.prompts import encode_prompts
from qerl_jax.errors import UserError
from qerl_jax.evaluation import results_folder
from qerl_jax.evaluation.evaluate import evaluate
from qerl_jax.evaluation.greedy import GreedyScore, greedy_accuracy, score_completions
from qerl_jax.evaluation.load_policy import OWN, open_policy
from qerl_jax.evaluation.results_folder import EvaluateConfig
from qerl_jax.evaluation.tasks import TaskOverrides
from qerl_jax.export import card_scores
from qerl_jax.memory import report
from qerl_jax.memory.run_plan import Device, plan_run
from qerl_jax.policy.layers.kinds import PROJECTIONS
from qerl_jax.policy.lora import LoraConfig
from qerl_jax.policy.policy import Policy
from qerl_jax.policy.trainable import Trainable
from qerl_jax.rollout.completions import detokenize
from qerl_jax.rollout.config import EngineConfig, SamplingConfig, TurnConfig
from qerl_jax.rollout.sampler import Sampler
from qerl_jax.rollout.shapes import dequantize_mode
from qerl_jax.run import ownership
from qerl_jax.run.folder import config_dict, open_run
from qerl_jax.run.statistics import interval, majority, pass_at_k
from qerl_jax.system.jsonl import read_jsonl
from qerl_jax.system.signals import StoppedError
from qerl_jax.training.setup import prepare
from qerl_jax.weights.chat_template import template_date
from qerl_jax.weights.load import load
from qerl_jax.weights.peft import save_peft_adapter

SCORERS = {"scorer": ("tiny_run:even_end",), "format_scorer": ("tiny_run:low_fraction",)}
ROW = {
    "task", "problem", "sample", "question", "gold", "completion", "tokens", "finished",
    "extracted", "correct", "format",
}  # fmt: skip


@pytest.fixture
def settings(tiny, tmp_path):
    """Makes configs of 8 problems with 3 samples each, 9 rows of which decode together."""

    def make(**changes):
        overrides = {"system_prompt": ("",), "max_new_tokens": ("6",)} | SCORERS
        overrides |= changes.pop("overrides", {})
        config = EvaluateConfig(
            source=str(tiny.model),
            tasks=(str(tiny.problems),),
            overrides=TaskOverrides(**overrides),
            dtype="float32",
            samples=3,
            limit=8,
            max_rows=9,
            out=str(tmp_path / "out"),
        )
        return dataclasses.replace(config, **changes)

    return make


@pytest.fixture
def rollouts(monkeypatch):
    """Records the number of prompts and of rows that decode together in each rollout."""
    return record_rollouts(monkeypatch, lambda sampler, ids: (len(ids), sampler.engine.max_rows))


def record_rollouts(monkeypatch, read):
    """A list to which each rollout adds what `read` finds in its sampler and prompts."""
    seen, steps = [], Sampler.steps

    def recording(sampler, key, policy, prompts, **options):
        seen.append(read(sampler, prompts))
        return steps(sampler, key, policy, prompts, **options)

    monkeypatch.setattr(Sampler, "steps", recording)
    return seen


def results_of(folder):
    return json.loads((folder / "results.json").read_text())


def stop_at_chunk(number, monkeypatch):
    """Sends SIGTERM between two chunks of decoding."""
    watch = qerl_jax.evaluation.evaluate._watch
    calls = iter(range(1, 100))

    def stopping(*arguments):
        on_progress = watch(*arguments)

        def wrapped(ended, tokens):
            if next(calls) == number:
                os.kill(os.getpid(), signal.SIGTERM)
            on_progress(ended, tokens)

        return wrapped

    monkeypatch.setattr(qerl_jax.evaluation.evaluate, "_watch", stopping)


def greedy_inputs(tiny, count, sampling, *, format="nvfp4", **engine):
    """A sampler, the policy and the prompts of the first problems."""
    model = load(str(tiny.model), format=format, dtype="float32")
    problems = load_problems("", eval_path=str(tiny.problems), split="eval", eval_size=count)
    prompts = encode_prompts(problems, model.tokenizer, max_prompt_tokens=16)
    sampler = Sampler(model.config, model.tokenizer, sampling, EngineConfig(**engine))
    return sampler, Policy(model.params, None), prompts


def test_greedy_accuracy_is_the_fraction_of_correct_greedy_completions(tiny):
    sampling = SamplingConfig(max_new_tokens=4, temperature=0.7, top_k=3, top_p=0.5)
    sampler, policy, prompts = greedy_inputs(tiny, 10, sampling, max_rows=4)
    found = greedy_accuracy(sampler, policy, prompts, correctness=tiny_run.even_end, time_limit=1.0)
    likeliest = SamplingConfig(max_new_tokens=4, temperature=0.0)
    rollout = dataclasses.replace(sampler, sampling=likeliest).rollout(
        jax.random.key(0), policy, [prompt.ids for prompt in prompts]
    )
    texts = detokenize(rollout, sampler.tokenizer.decode)
    expected = [tiny_run.even_end("", text, "", 1, True) for text in texts]
    assert found.accuracy == np.mean(expected)
    assert 0 < found.accuracy < 1
    assert found.truncated == pytest.approx(np.mean(~rollout.finished))
    assert found.truncated > 0
    assert found.answers == [
        {
            "question": prompts[i].problem.question,
            "answer": prompts[i].problem.answer,
            "completion": texts[i],
            "finished": bool(rollout.finished[i]),
            "correct": bool(expected[i]),
        }
        for i in range(2)
    ]


def test_greedy_accuracy_leaves_missing_scores_out(tiny, capsys):
    inputs = greedy_inputs(tiny, 8, SamplingConfig(max_new_tokens=4))
    for judge, expected in ((no_opinion, (1.0, 4)), (away, (None, 8))):
        found = greedy_accuracy(*inputs, correctness=judge, time_limit=1.0)
        assert (None if np.isnan(found.accuracy) else found.accuracy, found.missing) == expected
    assert [answer["correct"] for answer in found.answers] == [None, None]
    assert "reward 'correct' is missing for 8 of 8" in capsys.readouterr().err


def away(*arguments):
    raise ConnectionError("the judge is away")


def test_the_time_limit_of_a_scorer_is_that_of_the_run(settings, tiny, monkeypatch):
    seen = []

    def scoring(*arguments, time_limit, **options):
        seen.append(time_limit)
        return score_completions(*arguments, time_limit=time_limit, **options)

    def opened(*arguments, **options):
        config = config_dict(tiny.config({"reward_time_limit": 60.0}))
        run = {"config": config, "created": "", OWN: True}
        return dataclasses.replace(open_policy(*arguments, **options), run=run)

    monkeypatch.setattr(qerl_jax.evaluation.evaluate, "score_completions", scoring)
    evaluate(settings(limit=1, samples=1))
    assert set(seen) == {5.0}
    seen.clear()
    monkeypatch.setattr(qerl_jax.evaluation.evaluate, "open_policy", opened)
    monkeypatch.setattr(qerl_jax.evaluation.evaluate, "describe_policy", lambda *_, **__: None)
    evaluate(settings(limit=1, samples=1))
    assert set(seen) == {60.0}
    seen.clear()
    evaluate(settings(limit=1, samples=1, time_limit=7.0))
    assert set(seen) == {7.0}


def test_a_mistyped_policy_is_named_before_problems_are_loaded(tmp_path):
    """Without --tasks a model is evaluated on GSM8K, which the hub may not give either."""
    source = str(tmp_path / "run_of_yesterday")
    refused(r"'.*run_of_yesterday' is neither a folder", evaluate, EvaluateConfig(source=source))


def test_what_is_saved_is_what_is_counted(settings, tiny, rollouts, capsys):
    (folder,) = evaluate(settings())
    rows = read_jsonl(folder / "problems.jsonl")
    places = [(row["problem"], row["sample"]) for row in rows]
    assert places == [(problem, sample) for problem in range(8) for sample in range(3)]
    given = load_problems("", eval_path=str(tiny.problems), split="eval", eval_size=8)
    for row in rows:
        assert row.keys() == ROW
        problem = given[row["problem"]]
        assert (row["question"], row["gold"]) == (problem.question, problem.answer)
        assert row["correct"] == (tiny_run.even_end("", row["completion"], "", 1, True) > 0.5)
        low = tiny_run.low_fraction("", row["completion"], "", row["tokens"], True)
        assert row["format"] == (low > 0.5)
        assert row["finished"] or row["tokens"] == 6
    # The samples of a problem differ, and so do the samples of the batches.
    assert len({row["completion"] for row in rows}) > 12

    results = results_of(folder)
    figures = results["tasks"]["problems"]
    correct = np.array([row["correct"] for row in rows]).reshape(8, 3)
    means = correct.mean(axis=1)
    low, high = interval(means, samples=3)
    assert figures["accuracy"] == {"value": means.mean(), "low": low, "high": high}
    assert 0 < low < means.mean() < high < 1
    chances = [pass_at_k(3, int(c), 2) for c in correct.sum(axis=1)]
    assert figures["pass@2"]["value"] == pytest.approx(np.mean(chances))
    assert "pass@4" not in figures
    assert figures["pass@3"]["value"] == pytest.approx(correct.any(axis=1).mean())
    votes_of = lambda row: "right" if row["correct"] else row["extracted"]  # noqa: E731
    answers = [[votes_of(rows[3 * p + s]) for s in range(3)] for p in range(8)]
    votes = [majority(a, c) for a, c in zip(answers, correct.tolist(), strict=True)]
    assert figures["maj@3"]["value"] == pytest.approx(np.mean(votes))
    assert figures["format"]["value"] == pytest.approx(np.mean([row["format"] for row in rows]))
    assert figures["finished"] == pytest.approx(np.mean([row["finished"] for row in rows]))
    assert figures["mean_tokens"] == pytest.approx(np.mean([row["tokens"] for row in rows]))
    assert (figures["problems"], figures["samples"], figures["not_judged"]) == (8, 3, 0)

    assert results["settings"]["temperature"] == 1.0
    assert results["settings"]["format"] == "bf16"
    assert results["settings"]["dtype"] == "float32"
    assert results["settings"]["fingerprint"] == load(str(tiny.model)).fingerprint
    assert figures["judge"] == "tiny_run:even_end"
    assert {"command", "git", "versions", "device", "created"} <= results.keys()
    assert rollouts == [(8, 9)]
    out = capsys.readouterr().out
    assert str(folder) in out
    percent = f"{100 * means.mean():.1f} % [{100 * low:.1f}, {100 * high:.1f}]"
    assert percent in out
    assert "24/24 completions" in out
    assert "avg@3" in out


def test_one_sample_is_greedy(settings, tiny, rollouts):
    (folder,) = evaluate(settings(samples=1, max_rows=0))
    figures = results_of(folder)["tasks"]["problems"]
    assert not [name for name in figures if name.startswith(("pass@", "maj@"))]
    assert rollouts == [(8, 8)]
    inputs = greedy_inputs(tiny, 8, SamplingConfig(max_new_tokens=6), format="bf16")
    found = greedy_accuracy(*inputs, correctness=tiny_run.even_end, time_limit=1.0)
    assert figures["accuracy"]["value"] == found.accuracy
    assert figures["finished"] == pytest.approx(1 - found.truncated)
    (again,) = evaluate(settings(samples=1, out=str(folder / "other")))
    assert read_jsonl(again / "problems.jsonl") == read_jsonl(folder / "problems.jsonl")


def test_a_continued_evaluation_is_one_that_was_not_interrupted(
    settings, rollouts, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(qerl_jax.evaluation.evaluate, "EngineConfig", small_chunks)
    (whole,) = evaluate(settings(out=str(tmp_path / "whole")))
    expected = (whole / "problems.jsonl").read_bytes()
    file = tmp_path / "out" / "problems.jsonl"
    done, lefts = 0, []
    for _ in range(2):
        with monkeypatch.context() as patch:
            stop_at_chunk(5, patch)
            with pytest.raises(StoppedError):
                evaluate(settings())
        rows = read_jsonl(file)
        assert done < len(rows) < 24
        done = len(rows)
        assert "accuracy" not in results_of(tmp_path / "out")["tasks"]["problems"]
        assert "the same command continues" in capsys.readouterr().out
        complete = [p for p in range(8) if sum(row["problem"] == p for row in rows) == 3]
        lefts.append((8 - len(complete), 9))
        file.write_bytes(file.read_bytes() + expected[:20])  # A kill can leave half a line.

    # What is left decodes in the programs that were compiled for all problems.
    (folder,) = evaluate(settings())
    assert file.read_bytes() == expected
    assert rollouts == [(8, 9), (8, 9), *lefts]
    figures = [results_of(path)["tasks"] for path in (whole, folder)]
    assert figures[0] == figures[1]
    rollouts.clear()
    evaluate(settings())
    assert rollouts == []
    assert file.read_bytes() == expected


def test_completions_of_another_architecture_are_not_continued(settings, tiny, tmp_path):
    model = shutil.copytree(tiny.model, tmp_path / "model")
    evaluate(settings(source=str(model)))
    content = json.loads((model / "config.json").read_text()) | {"rms_norm_eps": 0.5}
    (model / "config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"holds completions with other settings \(architecture: "):
        evaluate(settings(source=str(model)))


def test_stopped_before_a_completion_has_ended(settings, monkeypatch, capsys, recwarn):
    monkeypatch.setattr(qerl_jax.evaluation.evaluate, "EngineConfig", small_chunks)
    stop_at_chunk(1, monkeypatch)
    with pytest.raises(StoppedError):
        evaluate(settings(seed=0))  # of the first draws, none ends a completion
    said = capsys.readouterr().out
    assert "the same command continues" in said
    assert "correct so far" not in said
    assert not recwarn.list


def small_chunks(**options):
    return EngineConfig(chunk_steps=2, **options)


def test_two_rollouts_have_the_same_programs_and_the_same_completions(
    settings, rollouts, tmp_path, monkeypatch, capsys
):
    (whole,) = evaluate(settings())
    monkeypatch.setattr(qerl_jax.evaluation.evaluate, "_ROLLOUT_TOKENS", 5 * 3 * 6)
    capsys.readouterr()
    (divided,) = evaluate(settings(out=str(tmp_path / "divided")))
    assert rollouts == [(8, 9), (5, 9), (3, 9)]
    assert capsys.readouterr().out.count("programs in") == 1
    assert read_jsonl(divided / "problems.jsonl") == read_jsonl(whole / "problems.jsonl")


def test_a_signal_while_a_judge_is_waited_for_keeps_the_completions(
    settings, rollouts, tmp_path, monkeypatch
):
    expected = (
        evaluate(settings(out=str(tmp_path / "whole"), limit=2))[0] / "problems.jsonl"
    ).read_bytes()
    rollouts.clear()

    async def judge(prompt, completion, answer, num_tokens, finished):
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(60)

    with monkeypatch.context() as patch:
        patch.setattr(tiny_run, "even_end", judge)
        began = time.perf_counter()
        with pytest.raises(StoppedError):
            evaluate(settings(limit=2, time_limit=60.0))
        assert time.perf_counter() - began < 30
    rows = read_jsonl(tmp_path / "out" / "problems.jsonl")
    assert len(rows) == 6
    assert "correct" not in rows[0]
    evaluate(settings(limit=2))
    assert (tmp_path / "out" / "problems.jsonl").read_bytes() == expected
    assert len(rollouts) == 1  # Nothing was generated again.


def test_a_continued_evaluation_keeps_its_rows(settings, rollouts, monkeypatch):
    monkeypatch.setattr(qerl_jax.evaluation.evaluate, "_estimate_rows", lambda job: 6)
    (folder,) = evaluate(settings(max_rows=0, limit=3))
    assert results_of(folder)["tasks"]["problems"]["max_rows"] == 6
    monkeypatch.setattr(qerl_jax.evaluation.evaluate, "_estimate_rows", lambda job: 99)
    evaluate(settings(max_rows=0, limit=5))
    assert rollouts == [(3, 6), (2, 6)]
    rollouts.clear()
    evaluate(settings(max_rows=3, limit=8))  # a value that is passed takes precedence
    assert rollouts == [(3, 3)]


@pytest.mark.parametrize(
    ("gigabytes", "in_use", "format", "rows", "dequantize"),
    [
        (None, 0, "bf16", 32, "once"),
        (80, 0, "bf16", 256, "once"),
        (1e-3, 0, "bf16", 128, "once"),
        (1e-3, 0.5e-3, "bf16", 64, "once"),
        (1e-3, 0, "nvfp4", 128, "once"),
        (5e-5, 0, "nvfp4", 6, "step"),
        (5e-5, 5e-5, "nvfp4", 1, "step"),
    ],
)
def test_rows_follow_from_the_memory(
    tmp_path, monkeypatch, gigabytes, in_use, format, rows, dequantize
):
    # 15 360 weights in the layers. A row of 6 and 4 tokens has 16 cache positions of 256 bytes, and
    # logits of 192 bytes, held four times; one of the four arrays of the cache may be moved. So
    # 5888 bytes of a row fit 152, 67, 142 and 7 times.
    folder = tiny_run.write_model(tmp_path / "model")
    model = load(str(folder), format=format, dtype="float32")
    memory = gigabytes and {"bytes_limit": int(gigabytes * 1e9), "bytes_in_use": int(in_use * 1e9)}

    class Device:
        def memory_stats(self):
            return memory

    prompt, task = mock.Mock(ids=range(6)), mock.Mock(max_new_tokens=4, kv_cache_dtype="")
    job = mock.Mock(
        policy=mock.Mock(model=model), prompts=[prompt], task=task, environments=None, turns=None
    )
    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    assert qerl_jax.evaluation.evaluate._estimate_rows(job) == rows
    job.prompts = [prompt] * 1000  # As many in one prefill leave no memory for a row.
    many = qerl_jax.evaluation.evaluate._fit(job, 256)
    assert many == (
        (256, 1000) if gigabytes in (None, 80) else (rows if in_use != gigabytes else 0, 1)
    )
    job.prompts, task.max_new_tokens = [prompt], 500
    alone = qerl_jax.evaluation.evaluate._estimate_rows(job)
    job.turns = TurnConfig(max_turns=2, turn_tokens=0, reply_tokens=500, context_tokens=500)
    extended = qerl_jax.evaluation.evaluate._estimate_rows(job)
    assert extended < alone if gigabytes == 1e-3 else extended == alone
    assert dequantize_mode(model.params) == dequantize


def test_programs_are_compared_with_the_memory_before_a_rollout(
    settings, rollouts, monkeypatch, capsys
):
    monkeypatch.setattr(report, "this_device", lambda: Device(10**4, "xla", 0.0))
    said = r"the program '\w+' takes .* GB that JAX has; lower --max-rows=9, --samples=3"
    refused(said, evaluate, settings())
    assert rollouts == []
    monkeypatch.setattr(report, "_compare", lambda *_, planned, held, remedy: [f"more, {remedy}"])
    monkeypatch.setattr(qerl_jax.evaluation.evaluate, "_fit", lambda job, rows: (rows, 2))
    engines = record_rollouts(monkeypatch, lambda sampler, ids: sampler.engine.prefill_prompts)
    evaluate(settings())
    assert "warning: more, --max-rows=9, --samples=3" in capsys.readouterr().err
    assert engines == [2]


def test_too_many_rows_is_one_line(settings, monkeypatch):
    def full(*arguments, **options):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory\nwhile allocating")

    monkeypatch.setattr(Sampler, "steps", full)
    refused(r"9 rows do not fit.*--max-rows=9, --samples=3", evaluate, settings())


@pytest.mark.parametrize(
    "max_rows", [3, *(pytest.param(rows, marks=pytest.mark.slow) for rows in (1, 24))]
)
def test_samples_depend_on_the_seed_and_not_on_the_rows_that_decode_together(
    settings, tmp_path, max_rows
):
    changes = ({}, {"max_rows": max_rows}, {"seed": 1})
    folders = [
        evaluate(settings(out=str(tmp_path / str(number)), **change))[0]
        for number, change in enumerate(changes)
    ]
    first, few, other = (read_jsonl(folder / "problems.jsonl") for folder in folders)
    assert few == first
    same = [a["completion"] == b["completion"] for a, b in zip(first, other, strict=True)]
    assert sum(same) < 8


@pytest.mark.slow  # `test_sampling` has such cuts
def test_sampling_among_the_most_likely_token_is_greedy(settings, tmp_path):
    (folder,) = evaluate(settings(top_p=1e-6))
    (greedy,) = evaluate(settings(samples=1, max_rows=3, out=str(tmp_path / "greedy")))
    rows, expected = (read_jsonl(path / "problems.jsonl") for path in (folder, greedy))
    texts = [row["completion"] for row in expected for _ in range(3)]
    assert [row["completion"] for row in rows] == texts


def test_more_problems_are_added(settings, rollouts):
    (folder,) = evaluate(settings(limit=4))
    before = read_jsonl(folder / "problems.jsonl")
    evaluate(settings(limit=8))
    rows = read_jsonl(folder / "problems.jsonl")
    assert rows[:12] == before
    assert len(rows) == 24
    rollouts.clear()
    evaluate(settings(limit=4))  # What is there is not lost.
    assert rollouts == []
    assert read_jsonl(folder / "problems.jsonl") == rows
    figures = results_of(folder)["tasks"]["problems"]
    assert figures["problems"] == 4
    assert figures["accuracy"]["value"] == pytest.approx(
        np.mean([row["correct"] for row in before])
    )


def test_another_scorer_needs_no_completions(settings, rollouts):
    (folder,) = evaluate(settings())
    first = read_jsonl(folder / "problems.jsonl")
    rollouts.clear()
    changes = {"scorer": ("test_evaluate:odd_problem",), "format_scorer": ("",)}
    evaluate(settings(overrides=changes))
    assert rollouts == []
    rows = read_jsonl(folder / "problems.jsonl")
    assert [row["completion"] for row in rows] == [row["completion"] for row in first]
    assert [row["correct"] for row in rows] == [row["problem"] % 2 == 1 for row in rows]
    assert {row["format"] for row in rows} == {None}
    figures = results_of(folder)["tasks"]["problems"]
    assert figures["judge"] == "test_evaluate:odd_problem"
    assert figures["accuracy"]["value"] == 0.5
    assert "format" not in figures


def odd_problem(prompt, completion, answer, num_tokens, finished):
    return float(int(answer) % 2)


def no_opinion(prompt, completion, answer, num_tokens, finished):
    if int(answer) % 4 == 0:
        raise ValueError("no idea")
    return None if int(answer) % 4 == 1 else 1.0


def test_a_missing_score_is_neither_right_nor_wrong(settings, capsys):
    (folder,) = evaluate(settings(overrides={"scorer": ("test_evaluate:no_opinion",)}))
    figures = results_of(folder)["tasks"]["problems"]
    assert figures["accuracy"]["value"] == 1.0
    assert figures["not_judged"] == 12
    rows = read_jsonl(folder / "problems.jsonl")
    assert {row["problem"] % 4 for row in rows if row["correct"] is None} == {0, 1}
    said = capsys.readouterr()
    assert "no idea" in said.err
    assert "100.0 % correct so far" in said.out
    assert "problems: 12 completions have no score and count neither as right" in said.out
    # A judge that is there again scores them, and nothing is generated.
    evaluate(settings(overrides={"scorer": ("test_evaluate:odd_problem",)}))
    assert results_of(folder)["tasks"]["problems"]["not_judged"] == 0


def test_votes_are_counted_as_the_scorer_compares(settings, rollouts):
    (folder,) = evaluate(settings(limit=1))
    path = folder / "problems.jsonl"
    rows = read_jsonl(path)
    texts = [r"\boxed{\frac{1}{2}}", r"\boxed{0.5}", rf"\boxed{{{rows[0]['gold']}}}"]
    changes = [row | {"completion": text} for row, text in zip(rows, texts, strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in changes))
    rollouts.clear()
    for scorer, value in (("math_answer", 0.0), ("exact_answer", 1 / 3)):
        overrides = {"scorer": (f"qerl_jax.rewards.functions:{scorer}",)}
        evaluate(settings(limit=1, overrides=overrides))
        figures = results_of(folder)["tasks"]["problems"]
        assert figures["accuracy"]["value"] == pytest.approx(1 / 3)
        assert figures["maj@3"]["value"] == pytest.approx(value)
    assert rollouts == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 1}, ["seed: 0 -> 1", "--out"]),
        ({"samples": 2}, ["samples: 3 -> 2"]),
        ({"format": "nvfp4"}, ['format: "bf16" -> "nvfp4"']),
        ({"overrides": {"question_suffix": ("t1",)}}, ['problems.question_suffix: "" -> "t1"']),
        ({"overrides": {"max_new_tokens": ("5",)}}, ["problems.max_new_tokens: 6 -> 5"]),
    ],
)
def test_a_folder_holds_completions_with_the_same_settings(settings, changes, words):
    (folder,) = evaluate(settings(limit=3))
    before = tiny_run.contents(folder)
    error = refused(".", evaluate, settings(limit=3, **changes))
    assert all(word in error for word in words), error
    assert tiny_run.contents(folder) == before


def test_other_problems_of_the_same_name_are_noticed(settings, tiny, tmp_path):
    path = shutil.copy(tiny.problems, tmp_path / "mine.jsonl")
    evaluate(settings(limit=3, tasks=(str(path),)))
    tiny_run.write_problems(tmp_path / "mine.jsonl", count=20)
    refused(r"mine\.problems_sha256", evaluate, settings(limit=3, tasks=(str(path),)))
    # Under another name it is another task in the same folder.
    (folder,) = evaluate(settings(limit=3))
    assert results_of(folder)["tasks"].keys() == {"mine", "problems"}


def test_completions_of_other_prompts_are_not_continued(settings, tiny, tmp_path):
    """A hub id may get another chat template between two starts; weights and problems stay."""
    model = shutil.copytree(tiny.model, tmp_path / "model")
    (folder,) = evaluate(settings(limit=2, source=str(model)))
    before = tiny_run.contents(folder)
    template = tiny_run.TEMPLATE.replace("t1 t2", "t1 t3")
    tiny_checkpoints.write_tokenizer(model, chat_template=template)
    words = r"chat template of .*model makes other prompts .*evaluation of problems.*--out"
    refused(words, evaluate, settings(limit=4, source=str(model)))
    assert tiny_run.contents(folder) == before
    tiny_checkpoints.write_tokenizer(model, chat_template=tiny_run.TEMPLATE)
    assert evaluate(settings(limit=4, source=str(model))) == [folder]
    assert len(read_jsonl(folder / "problems.jsonl")) == 12
    assert results_of(folder)["tasks"]["problems"]["prompts_sha256"]


def test_a_template_that_writes_the_date_writes_that_of_the_first_start(
    settings, tiny, tmp_path, monkeypatch
):
    """Llama 3.2's does: an evaluation that went on on another day had other prompts."""
    model = shutil.copytree(tiny.model, tmp_path / "model")
    template = tiny_run.TEMPLATE.replace("t1 t2", "t{{ strftime_now('%d') | int }} t2")
    tiny_checkpoints.write_tokenizer(model, chat_template=template)
    before = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=3)
    created = before.strftime("%Y-%m-%dT%H:%M:%S%z")
    texts = record_rollouts(
        monkeypatch, lambda sampler, prompts: [sampler.tokenizer.decode(ids) for ids in prompts]
    )
    with monkeypatch.context() as patch:
        clock = types.SimpleNamespace(strftime=lambda _: created)
        patch.setattr("qerl_jax.run.provenance.time", clock)
        # A new folder has no earlier start: its prompts have the date of today.
        patch.setattr(
            "qerl_jax.evaluation.evaluate.template_date", lambda _: template_date(created)
        )
        (folder,) = evaluate(settings(limit=2, source=str(model)))
    evaluate(settings(limit=4, source=str(model)))
    ends = {tuple(text.split()[-2:]) for part in texts for text in part}
    assert ends == {(f"t{before.day}", "t2")}
    assert results_of(folder)["created"] == created


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"samples": 0}, ["--samples=0", "at least 1"]),
        ({"samples": 2, "temperature": 0.0}, ["greedy samples are all the same"]),
        ({"temperature": -1.0}, ["--temperature=-1.0"]),
        ({"top_p": float("nan")}, ["--top-p=nan"]),
        ({"samples": 1, "top_p": 0.5}, ["--top-p=0.5 with greedy decoding"]),
        ({"samples": 1, "seed": 5}, ["--seed=5 with greedy decoding"]),
        ({"max_rows": -1}, ["--max-rows=-1"]),
        ({"overrides": {"max_new_tokens": ("125",)}}, ["8 of 8", "128", "--max-new-tokens=122"]),
        ({"overrides": {"scorer": ("absent:f",)}}, ["absent:f"]),
        ({"tasks": ("gsm7k",)}, ["no such task", "gsm7k"]),
        ({"tasks": ("absent.jsonl",)}, ["absent.jsonl", "cannot read"]),
    ],
)
def test_what_cannot_be_done(settings, tmp_path, changes, words):
    error = refused(".", evaluate, settings(**changes))
    assert all(word in error for word in words), error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("mine", "", "holds other files"),
        ("results.json", "{}", "'tasks' is not an object.*--out"),
        ("results.json", '{"tasks": [1]}', "'tasks' is not an object.*--out"),
        ("results.json", '{"tasks": {}}', "'settings' is not an object.*--out"),
        ("results.json", '{"tasks": [], "settings": {}}', "'tasks' .*not the result of an eval"),
    ],
)
def test_other_files_are_left_alone(settings, tmp_path, name, content, words):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text(content)
    refused(words, evaluate, settings())
    assert tiny_run.contents(tmp_path / "out") == {name: content.encode()}


def test_completions_without_the_stop_strings_are_not_continued(settings, tmp_path):
    (folder,) = evaluate(settings(limit=1, samples=1))
    results = results_of(folder)
    for stop, shown in ({"stop": ["t1"]}, r'\["t1"\]'), ({}, "null"):
        task = results["tasks"]["problems"]
        task.pop("stop", None)
        (folder / "results.json").write_text(
            json.dumps(results | {"tasks": {"problems": task | stop}})
        )
        refused(rf"problems.stop: {shown} -> \[\]", evaluate, settings(limit=1, samples=1))


# --- Runs -----------------------------------------------------------------------------------------


@pytest.fixture
def run(tiny, tmp_path):
    """A run folder with an adapter."""
    return write_run(tmp_path / "run", run_config(tiny))


def run_config(tiny, **changes):
    """The config of a run that evaluates 8 problems with 6 new tokens."""
    return tiny.config({"eval.problems": 8, "eval.max_new_tokens": 6} | changes)


def write_run(path, config):
    with open_run(path, config) as folder:
        write_adapter(folder.path / "adapter", seed=1)
    return folder.path


def write_adapter(folder, *, seed):
    config = json.loads((folder.parent / "config.json").read_text())["config"]
    architecture = tiny_run.architecture(config["model"]["source"])
    lora = random_lora(architecture, scale=2.0, seed=seed)
    lora_config = LoraConfig(rank=4, alpha=8.0, rslora=False, targets=PROJECTIONS)
    save_peft_adapter(folder, Trainable(lora, {}), lora_config, base_model="")


@pytest.mark.e2e
@pytest.mark.parametrize(
    "changes", [{}, {"rollout.stop": ("t1", "t3")}, {"data.examples": ("t5", "t6")}]
)
def test_a_run_is_evaluated_as_during_its_training(tiny, tmp_path, monkeypatch, changes):
    config = run_config(tiny, **changes)
    run = write_run(tmp_path / "run", config)
    engines, compiled = [], qerl_jax.evaluation.evaluate._compile

    def recording(job, sampler, received):
        engines.append(sampler.engine)
        return compiled(job, sampler, received)

    monkeypatch.setattr(qerl_jax.evaluation.evaluate, "_compile", recording)
    (folder,) = evaluate(EvaluateConfig(source=str(run)))
    assert folder.parent == run / "evaluations"
    assert folder.name.startswith("adapter-greedy-")
    results = results_of(folder)
    figures = results["tasks"]["run"]
    assert figures["judge"] == "tiny_run:even_end"
    assert figures["format_judge"] == "tiny_run:low_fraction"
    assert results["settings"]["format"] == "nvfp4"
    assert results["settings"]["adapter"] == str(run / "adapter")

    setup = prepare(config, {"correctness": (tiny_run.even_end, 1.0)}, schedule_steps=4)
    rewarded = []

    def correctness(prompt, completion, answer, num_tokens, finished):
        rewarded.append((completion, num_tokens, finished))
        return tiny_run.even_end(prompt, completion, answer, num_tokens, finished)

    expected = greedy_accuracy(
        setup.eval_sampler,
        Policy(setup.params, tiny_run.adapter(run)),
        setup.eval_prompts,
        correctness=correctness,
        time_limit=1.0,
    )
    saved = read_jsonl(folder / "run.jsonl")
    assert rewarded == [(row["completion"], row["tokens"], row["finished"]) for row in saved]
    assert figures["accuracy"]["value"] == expected.accuracy
    assert figures["finished"] == pytest.approx(1 - expected.truncated)
    assert figures["problems"] == 8
    # Shared tokens round differently, so that a run and the command share the same.
    shared = setup.eval_sampler.engine.shared_tokens
    assert [engine.shared_tokens for engine in engines] == [shared]
    assert (shared > 0) == ("data.examples" in changes)
    # What is decoded beyond a stop string is another text.
    words = [word for completion, *_ in rewarded for word in completion.split()[:-1]]
    stopped = any(word.startswith(("t1", "t3")) for word in words)
    assert stopped == ("rollout.stop" not in changes)


def test_the_scores_of_an_export_end_at_the_stop_strings(run, monkeypatch):
    settings = json.loads((run / "config.json").read_text())
    settings["config"]["rollout"] |= {"stop": ["t1", "t3"], "kv_cache_dtype": "bfloat16"}
    ownership.write_config(run / "config.json", settings)
    sampled = []

    def recording(sampler, *_, **options):
        sampled.append((sampler.sampling.stop, sampler.engine.kv_cache_dtype))
        return GreedyScore(accuracy=0.5, truncated=0.0)

    policy = open_policy(str(run))
    monkeypatch.setattr(card_scores, "greedy_accuracy", recording)
    held_out = card_scores.open_held_out_set(policy, None, run, trusted=ownership.is_own(run))
    held_out.accuracy(policy.model, policy.lora, print)
    assert sampled == [(("t1", "t3"), "bfloat16")]
    probe = card_scores.make_probe(policy, None)
    texts = [policy.model.tokenizer.decode(tokens) for tokens in probe.completions]
    assert all("t1" not in text.rpartition(" ")[0] for text in texts)


def test_a_run_evaluates_in_the_rows_of_its_plan(tiny, monkeypatch):
    config = tiny.config({"eval.problems": 8})

    def few_rows(*arguments, **options):
        plan = plan_run(*arguments, **options)
        evaluation = dataclasses.replace(plan.evaluation, rows=2, prefill_prompts=1)
        rollout = dataclasses.replace(plan.rollout, rows=3)
        return dataclasses.replace(plan, rollout=rollout, evaluation=evaluation)

    monkeypatch.setattr(qerl_jax.training.setup, "plan_run", few_rows)
    setup = prepare(config, {"correctness": (tiny_run.even_end, 1.0)}, schedule_steps=4)
    assert setup.collect.sampler.engine.max_rows == 3
    engine = setup.eval_sampler.engine
    assert (engine.max_rows, engine.prefill_prompts) == (2, 1)


def test_an_evaluation_in_a_run_shares_the_tokens_of_solved_examples(tiny):
    def prepared(changes):
        rewards = {"correctness": (tiny_run.even_end, 1.0)}
        changes |= {"eval.problems": 4, "data.system_prompt": "t1 t2", "data.max_prompt_tokens": 40}
        return prepare(tiny.config(changes), rewards, schedule_steps=4)

    setup = prepared({"data.examples": ("t3", "t4")})
    shared = setup.eval_sampler.engine.shared_tokens
    assert setup.collect.sampler.engine.shared_tokens == 0 < shared  # as updates round
    ids = [prompt.ids for prompt in setup.eval_prompts]
    assert len({tokens[:shared] for tokens in ids}) == 1 < len({t[: shared + 1] for t in ids})
    assert prepared({}).eval_sampler.engine.shared_tokens == 0  # Others round as they did.


def test_base_and_adapter_are_compared(run, tmp_path, capsys, monkeypatch):
    loads = []

    def counting(source, **options):
        loads.append(source)
        return load(source, **options)

    monkeypatch.setattr(qerl_jax.quantization.base, "load", counting)
    base, adapter = evaluate(EvaluateConfig(source=str(run), adapters=("none", "adapter")))
    assert len(loads) == 1
    assert base.name.startswith("base-greedy-")
    assert results_of(base)["settings"]["adapter"] is None
    rows = [read_jsonl(folder / "run.jsonl") for folder in (base, adapter)]
    assert [row["completion"] for row in rows[0]] != [row["completion"] for row in rows[1]]
    accuracies = [np.mean([row["correct"] for row in part]) for part in rows]
    assert "difference" not in results_of(base)["tasks"]["run"]
    difference = results_of(adapter)["tasks"]["run"]["difference"]
    assert difference["to"] == str(base)
    assert difference["value"] == pytest.approx(accuracies[1] - accuracies[0])
    assert difference["low"] <= difference["value"] <= difference["high"]
    table = capsys.readouterr().out.splitlines()[-3:]
    assert "difference" in table[0]
    assert table[1].startswith("base run")
    assert table[2].startswith("adapter run")

    out = str(tmp_path / "out")
    config = EvaluateConfig(source=str(run), adapters=("none", "adapter"), out=out)
    assert evaluate(config) == [tmp_path / "out" / "base", tmp_path / "out" / "adapter"]
    # All policies are compared with the first one.
    config = EvaluateConfig(source=str(run), adapters=("adapter", "none", "adapter"))
    loads.clear()
    monkeypatch.setattr(qerl_jax.evaluation.load_policy, "_read_adapter", None)
    assert evaluate(config) == [adapter, base, adapter]
    assert loads == []  # All completions are there.
    figures = results_of(adapter)["tasks"]["run"]["difference"]
    assert figures == {"to": str(adapter), "value": 0, "low": 0, "high": 0}


def unsure(prompt, completion, answer, num_tokens, finished):
    if len(completion) % 3 == 0:
        raise ConnectionError("the judge is away")
    return tiny_run.even_end(prompt, completion, answer, num_tokens, finished)


def test_policies_are_compared_where_both_have_a_score(run):
    overrides = TaskOverrides(scorer=("test_evaluate:unsure",))
    config = EvaluateConfig(source=str(run), adapters=("none", "adapter"), overrides=overrides)
    base, adapter = evaluate(config)
    rows = [read_jsonl(folder / "run.jsonl") for folder in (base, adapter)]
    scores = [[row["correct"] for row in part] for part in rows]
    pairs = [(x, y) for x, y in zip(*scores, strict=True) if x is not None and y is not None]
    assert [None in part for part in scores] == [True, True]
    assert 0 < len(pairs) < 8
    difference = results_of(adapter)["tasks"]["run"]["difference"]
    assert difference["value"] == pytest.approx(np.mean([y - x for x, y in pairs]))


def test_adapters_of_one_name_are_told_apart(run, tmp_path, capsys):
    for number, name in enumerate(("a", "b"), 1):
        write_adapter(run / "adapter", seed=number)
        shutil.copytree(run / "adapter", tmp_path / name / "x")
    adapters, out = tuple(str(tmp_path / name / "x") for name in ("a", "b")), tmp_path / "out"
    config = EvaluateConfig(source=str(run), adapters=adapters, out=str(out))
    assert evaluate(config) == [out / "a-x", out / "b-x"]
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[-2:]] == ["a-x", "b-x"]
    settings = [results_of(out / name)["settings"]["adapter"] for name in ("a-x", "b-x")]
    assert settings == list(adapters)
    assert evaluate(config) == [out / "a-x", out / "b-x"]  # continued
    # One that is missing is refused before another is evaluated.
    absent = dataclasses.replace(config, adapters=("adapter", "absent"), out=str(tmp_path / "new"))
    refused("--adapter=absent: there is no such folder", evaluate, absent)
    model = json.loads((run / "config.json").read_text())["config"]["model"]["source"]
    missing = (adapters[0], str(tmp_path / "absent"))
    refused("absent", evaluate, dataclasses.replace(absent, source=model, adapters=missing))
    # So is one whose folder holds completions with other settings, or other files.
    new = dataclasses.replace(config, out=absent.out)
    other = dataclasses.replace(new, adapters=adapters[1:], out=f"{new.out}/b-x", samples=2)
    evaluate(other)
    refused("b-x holds completions with other settings", evaluate, new)
    shutil.rmtree(other.out)
    os.makedirs(f"{other.out}/mine")
    refused("b-x: it holds other files", evaluate, new)
    assert os.listdir(new.out) == ["b-x"]


@pytest.mark.parametrize(
    ("adapters", "names"),
    [
        (("a/x", "b/x"), ["a-x", "b-x"]),
        (("a/x", "b/y"), ["x", "y"]),
        (("a/x", "./a/x/", "b/x"), ["a-x", "a-x", "b-x"]),
        (("none", "a/base"), ["base", "a-base"]),
        (("p/a/x", "q/a/x", "q/b/x"), ["p-a-x", "q-a-x", "b-x"]),
        (("a/x", "b/x", "c/a-x"), ["z-a-x", "b-x", "c-a-x"]),
        (("a/..", "b/x"), ["z", "x"]),
    ],
)
def test_names_of_adapters(adapters, names, monkeypatch, tmp_path):
    (tmp_path / "z").mkdir()
    monkeypatch.chdir(tmp_path / "z")
    monkeypatch.setattr(
        results_folder,
        "policy_folder",
        lambda source, *, adapter, **_: None if adapter == "none" else pathlib.Path(adapter),
    )
    config = EvaluateConfig(source="model", adapters=adapters)
    policies = [
        types.SimpleNamespace(
            adapter=None if adapter == "none" else pathlib.Path(adapter),
            model=types.SimpleNamespace(path=pathlib.Path("model")),
            run=None,
        )
        for adapter in adapters
    ]
    assert [results_folder._policy_name(policy, config) for policy in policies] == names


def test_an_adapter_that_changed_is_another_policy(run):
    config = EvaluateConfig(source=str(run))
    (folder,) = evaluate(config)
    assert evaluate(config) == [folder]
    write_adapter(run / "adapter", seed=2)
    (other,) = evaluate(config)
    assert other != folder
    assert other.parent == folder.parent
    refused("adapter_sha256", evaluate, dataclasses.replace(config, out=str(folder)))


def test_a_model_is_evaluated_beside_the_working_directory(settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (sampled,) = evaluate(settings(out=""))
    changes = {"scorer": ("test_evaluate:odd_problem",)}
    assert evaluate(settings(out="", overrides=changes)) == [sampled]
    assert sampled.parent.name == "evaluations"
    assert sampled.name.startswith("model-samples3-")
    (greedy,) = evaluate(settings(out="", samples=1, max_rows=0))
    assert greedy.name.startswith("model-greedy-")


# --- The command ----------------------------------------------------------------------------------


def test_the_command(tiny, tmp_path):
    arguments = [
        str(tiny.model), "--tasks=gsm8k", f"--data=gsm8k={tiny.problems}", "--samples=2",
        "--limit=1", "--max-new-tokens=1", "--system-prompt=", "--judge=gsm8k=tiny_run:even_end",
        "--format-judge=", "--out=here", "--seed=1", "--top-p=0.9", "--temperature=0.5",
        "--dtype=float32", "--format=nvfp4", "--max-rows=2", "--time-limit=2",
    ]  # fmt: skip
    result = subprocess.run(
        [sys.executable, "-m", "experiments.evaluate", *arguments],
        env=tiny.environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert "gsm8k  1" in result.stdout
    results = results_of(tmp_path / "here")
    expected = {
        "samples": 2, "temperature": 0.5, "top_p": 0.9, "seed": 1, "dtype": "float32",
        "format": "nvfp4",
    }  # fmt: skip
    assert results["settings"].items() >= expected.items()
    task = {"judge": "tiny_run:even_end", "format_judge": "", "max_new_tokens": 1}
    assert results["tasks"]["gsm8k"].items() >= task.items()
    assert "--samples=2" in results["command"]
