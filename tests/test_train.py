"""Whole runs of a tiny model, in this process."""

import asyncio
import dataclasses
import functools
import itertools
import json
import math
import shutil
import time
import types
from contextlib import nullcontext
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_run
from refusal import refused
from safetensors.numpy import load_file, save_file

import qerl_jax.training.loop
import qerl_jax.training.setup
import qerl_jax.training.step
from pallas_kernels import device
from qerl_jax.compile.operation import Executables, Programs
from qerl_jax.config.experiments.grpo_gsm8k import get_config
from qerl_jax.errors import UserError
from qerl_jax.evaluation.evaluate import evaluate
from qerl_jax.evaluation.greedy import GreedyScore
from qerl_jax.evaluation.load_policy import open_policy
from qerl_jax.evaluation.results_folder import EvaluateConfig
from qerl_jax.export.card_scores import open_held_out_set
from qerl_jax.rewards.calls import Timed
from qerl_jax.rewards.scored import Scores
from qerl_jax.run.metrics import read_steps
from qerl_jax.system import live_line
from qerl_jax.system.jsonl import read_jsonl
from qerl_jax.training import collect
from qerl_jax.training.loop import train
from qerl_jax.training.validate import check_extension, how_to_train_on, validate

ALWAYS = {
    "step", "reward", "reward_std", "accuracy", "format", "reward/correctness", "reward/format",
    "length", "finished", "entropy", "sigma", "temperature", "perturbed_norms",
    "advantage_zero_groups",
    "sampled_groups", "rewards_missing", "loss", "grad_norm", "update_skipped", "clip_fraction",
    "ratio_mean", "ratio_max", "logprob_diff_mean", "logprob_diff_max", "train_entropy",
    "rollout_tokens", "rollout_live_share", "rollout_seconds", "rollout_tokens_per_second",
    "reward_seconds",
    "train_seconds", "train_tokens_per_second", "step_seconds", "remaining_seconds",
    "compiled_programs", "compile_seconds", "forwarded_fraction", "packed_tokens", "update_buffers",
}  # fmt: skip
# What a step does not know in which no row teaches: nothing is forwarded.
UNMEASURED = {
    "train_entropy", "ratio_mean", "ratio_max", "logprob_diff_mean", "logprob_diff_max",
    "clip_fraction", "clip_fraction_low", "clip_fraction_high",
}  # fmt: skip


async def async_callback(row):
    """A callback whose result would have to be awaited."""


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory):
    """A finished run; do not write to it."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    return train(tiny.config({"log.tensorboard": True, "aqn.stages": 4}), workdir=folder)


def test_a_callback_gets_the_row_of_each_step_and_changes_nothing(finished, tiny, tmp_path, capsys):
    def fails_after_the_second(row):
        seen.append(dict(row))
        row.clear()
        assert len(seen) != 2, "the\x1b second\nstep"

    seen, options = [], {"log.tensorboard": True, "aqn.stages": 4, "log.print_completions": 3}
    call = functools.partial(train, tiny.config(options), workdir=tmp_path / "run")
    words = r"on_step after step 2 failed: AssertionError: the\\x1b second; it is a function, not"
    refused(words, call, on_step=fails_after_the_second)
    printed = capsys.readouterr().out
    assert "saved after step 2; the same command continues" in printed
    # After the line of a step a question and its completion, three times.
    after = printed.partition("step 1/4 ")[2].splitlines()[1:7]
    kept = read_jsonl(finished / "completions.jsonl")[:2]
    for row, question, answer in zip(kept, after[:4:2], after[1:4:2], strict=True):
        assert row["prompt"].startswith(f"{question} ")
        assert answer.startswith(f"  reward {row['reward']:.3f}: {row['completion']}")
    run = call(on_step=fails_after_the_second)
    assert tiny_run.results(run) == tiny_run.results(finished)
    assert seen == read_steps(run / "metrics.jsonl")
    assert (run / "completions.jsonl").read_bytes() == (finished / "completions.jsonl").read_bytes()


@pytest.mark.parametrize("bad", ["print", 3, async_callback])
def test_a_callback_is_a_function(bad, tiny, tmp_path):
    words = r"on_step=.*: it is a function, not an async one, that is called with a dict"
    refused(words, train, tiny.config(), workdir=tmp_path / "run", on_step=bad)
    assert not (tmp_path / "run").exists()


def assert_finite(rows, allowed=()):
    for row in rows:
        for key, value in row.items():
            if key not in allowed:
                assert value is not None, f"{key} of step {row['step']}"
                assert math.isfinite(value)


def norms(tiny):
    """The number of norms that noise perturbs."""
    return 2 * tiny_run.architecture(tiny.model).num_layers


def same_adapters(a, b):
    return all(
        np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


@pytest.mark.e2e
def test_rows(finished, tiny):
    written = read_jsonl(finished / "metrics.jsonl")
    assert [row["step"] for row in written] == [0, 1, 2, 2, 3, 4, 4]
    assert all(len(row.pop("eval_answers")) == 2 for row in written if "eval_seconds" in row)
    assert_finite(written)
    evaluation = {"step", "eval_seconds", "eval_truncated", "compiled_programs", "compile_seconds"}
    assert written[0].keys() == evaluation | {"eval_accuracy_before"}
    for row in (written[3], written[6]):
        assert row.keys() == evaluation | {"eval_accuracy"}
    rows = read_steps(finished / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        step = row["step"]
        expected = ALWAYS | ({"noise_kl"} if step in (1, 3) else set())
        assert expected <= row.keys()
        assert row.keys() - expected <= {"clip_fraction_low", "clip_fraction_high"}
        assert row["rollout_tokens"] == row["length"] * 8
    assert [row["perturbed_norms"] for row in rows] == [0, *[norms(tiny)] * 3]
    assert [row["sigma"] for row in rows] == pytest.approx(
        [0, 1e-2, 1e-2 * 0.05 ** (1 / 3), 1e-2 * 0.05 ** (2 / 3)]
    )
    assert written[0]["compiled_programs"] > 0 < written[0]["compile_seconds"]
    for row in written[2:]:
        assert row["compiled_programs"] == row["compile_seconds"] == 0
    assert rows[0]["noise_kl"] == 0 < rows[2]["noise_kl"]
    assert rows[0]["logprob_diff_max"] < 1e-4 < rows[1]["logprob_diff_max"]


@pytest.mark.slow  # 12 s
def test_a_run_on_a_cpu_without_amx(tiny, tmp_path, monkeypatch):
    """Its products are in float32, and it does what a run with products in bfloat16 does."""
    rows, changes = [], {"model.dtype": "bfloat16", "steps": 2, "aqn.kl_every": 1, "eval.every": 0}
    for has_amx in (True, False):
        monkeypatch.setattr(device, "_has_amx", lambda has_amx=has_amx: has_amx)
        jax.clear_caches()
        run = train(tiny.config(changes), workdir=tmp_path / str(has_amx))
        rows.append(read_steps(run / "metrics.jsonl"))
    (with_amx, _), (without, last) = rows
    assert with_amx["grad_norm"] != without["grad_norm"]
    assert with_amx["grad_norm"] == pytest.approx(without["grad_norm"], rel=0.03)
    assert with_amx["train_entropy"] == pytest.approx(without["train_entropy"], rel=0.01)
    assert with_amx["reward"] == without["reward"]
    assert last["noise_kl"] > 0
    assert not last["compiled_programs"]


def test_files(finished):
    samples = read_jsonl(finished / "completions.jsonl")
    assert [sample["step"] for sample in samples] == [1, 1, 2, 2, 3, 3, 4, 4]
    for sample in samples:
        assert sample["prompt"].endswith(" t1 t2")
        parts = sample["reward/correctness"] + 0.1 * sample["reward/format"]
        assert sample["reward"] == pytest.approx(parts)
        words = len(sample["completion"].split())
        assert sample["tokens"] - words in (0, 1)
    assert len({samples[0]["prompt"], samples[1]["prompt"]}) == 2
    assert (finished / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert len(list((finished / "tensorboard").glob("events*"))) == 1
    assert any(
        leaf.any() for leaf in (m["b"] for m in tiny_run.adapter(finished).layers[0].values())
    )


def test_a_finished_run_is_left_alone(finished, tiny, capsys):
    before = tiny_run.contents(finished)
    train(tiny.config({"log.tensorboard": True, "aqn.stages": 4}), workdir=finished)
    assert tiny_run.contents(finished) == before
    out = capsys.readouterr().out
    assert "finished after step 4" in out
    rows = read_jsonl(finished / "metrics.jsonl")
    first, _, last = (row["eval_answers"] for row in rows if "eval_answers" in row)
    for before, after in zip(first, last, strict=True):
        assert before["question"] == after["question"]
        assert f"{before['question']}\n  before: {before['completion']} (" in out
        assert f"\n  after:  {after['completion']} (" in out
    assert f"--workdir={finished} --config.steps=8" in out
    *_, shows, asks, exports, ends = out.splitlines()
    assert shows == f"python -m experiments.show {finished}  # shows its curves and completions"
    assert asks.startswith(f"python -m experiments.sample {finished} QUESTION  # ")
    assert exports.startswith(
        f"python -m experiments.export {finished} --format=peft --with-base  # "
    )
    assert ends.startswith("finished after step 4: ")
    fewer = {"log.tensorboard": True, "aqn.stages": 4, "steps": 3}
    train(tiny.config(fewer), workdir=finished)
    assert "steps=3: the run has taken 4, nothing is trained\n" in capsys.readouterr().out


def test_more_steps_extend_a_finished_run(finished, tiny, tmp_path, monkeypatch):
    run = shutil.copytree(finished, tmp_path / "run")
    spans = []
    make_optimizer = qerl_jax.training.setup.make_optimizer

    def recording(config):
        spans.append(config.total_updates)
        return make_optimizer(config)

    monkeypatch.setattr(qerl_jax.training.setup, "make_optimizer", recording)
    changes = {"log.tensorboard": True, "aqn.stages": 4, "steps": 8}
    train(tiny.config(changes), workdir=run)
    rows = tiny_run.results(run)
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert rows[:4] == tiny_run.results(finished)
    # A schedule of 8 steps would give step 5 the sigma of the third stage of four.
    assert {row["sigma"] for row in rows[4:]} == {rows[3]["sigma"]}
    assert spans == [4]
    assert not same_adapters(tiny_run.adapter(run), tiny_run.adapter(finished))


def test_steps_at_a_learning_rate_of_zero_are_refused(tiny, tmp_path, capsys):
    changes = {"optimizer.schedule": "linear", "optimizer.final_fraction": 0.0, "eval.every": 0}
    run = train(tiny.config(changes | {"steps": 1}), workdir=tmp_path / "run")
    anew = f"begin a new run with --config.lora.init={run}/adapter and another --workdir"
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("finished after step 1")
    assert said.endswith(f"its learning rate has decayed to 0; to train on, {anew}")
    before = tiny_run.contents(run)
    with pytest.raises(UserError, match=r"steps=2 .* 1 steps .*final_fraction=0.0") as caught:
        train(tiny.config(changes | {"steps": 2}), workdir=run)
    assert anew in str(caught.value)
    assert "\n" not in str(caught.value)
    assert tiny_run.contents(run) == before


@pytest.mark.parametrize(
    ("preset", "changes", "ends"),
    [
        ("qwen2.5-7b,trl", {}, True),
        ("qwen2.5-7b,reference_code", {}, True),
        ("qwen2.5-7b,reference_code", {"optimizer.final_fraction": 1e-40}, True),
        ("qwen2.5-7b,trl", {"optimizer.final_fraction": 0.1}, False),
        ("qwen2.5-7b,trl", {"optimizer.learning_rate": 0.0}, False),  # a control
        ("qwen2.5-7b,verl", {}, False),
        ("qwen2.5-7b", {"optimizer.final_fraction": 0.0}, False),  # constant
    ],
)
def test_recipes_whose_learning_rate_decays_to_zero(preset, changes, ends):
    config = get_config(preset)
    config.update_from_flattened_dict(changes | {"steps": 80})
    trained = Path("run/adapter")
    options = {"schedule_steps": 80, "target": trained}
    check_extension(config, **options)
    advice = how_to_train_on(config, 80, workdir=Path("run"), **options)
    assert ("--config.steps=" in advice) == (not ends)
    assert ("--config.lora.init=run/adapter" in advice) == ends
    # A run that ended before the end of its schedule can be extended up to there.
    shorter = how_to_train_on(config, 60, workdir=Path("run"), **options)
    assert shorter.endswith(f"--config.steps={80 if ends else 120}")
    own = how_to_train_on(config, 60, workdir=Path("run"), **options, python_rewards=True)
    assert f"train(config, workdir='run', rewards=...) with steps={80 if ends else 120}" in own
    spaced = how_to_train_on(config, 60, workdir=Path("my run"), **options)
    assert "python -m experiments.grpo_gsm8k --workdir='my run' --config.steps=" in spaced
    config.steps = 81
    with pytest.raises(UserError, match=r"steps=81 .* 80 steps") if ends else nullcontext():
        check_extension(config, **options)
    with config.unlocked():
        config.train.parameters = "full"
    advice = how_to_train_on(config, 80, workdir=Path("run"), **options)
    assert ("--config.model.source=" in advice) == ends


def test_the_kl_is_measured_to_the_adapter_that_a_run_starts_from(finished, tiny, tmp_path):
    start = shutil.copytree(finished / "adapter", tmp_path / "adapter")
    changes = {"lora.init": str(start), "rl.kl_coef": 0.1, "eval.every": 0}
    whole = train(tiny.config(changes | {"steps": 2}), workdir=tmp_path / "whole")
    first, second = tiny_run.results(whole)
    assert first["kl"] == pytest.approx(0, abs=1e-9)
    assert second["kl"] > 1e-4
    run = train(tiny.config(changes | {"steps": 1}), workdir=tmp_path / "run")
    more, files = tiny.config(changes | {"steps": 2}), tiny_run.contents(run)
    weights = (start / "adapter_model.safetensors").read_bytes()
    tensors = load_file(start / "adapter_model.safetensors")
    tensors[max(tensors)] += 1e-3
    save_file(tensors, start / "adapter_model.safetensors")
    refused(f"lora.init={start} is not the adapter", train, more, workdir=run)
    assert tiny_run.contents(run) == files
    (start / "adapter_model.safetensors").write_bytes(weights)
    train(more, workdir=run)
    assert tiny_run.results(run) == tiny_run.results(whole)
    assert same_adapters(tiny_run.adapter(run), tiny_run.adapter(whole))


def test_the_best_adapter_is_the_first_of_an_evaluation_with_all_scores(
    tiny, tmp_path, monkeypatch, capsys
):
    accuracies, missing = (0.25, 1.0, 0.5, 0.5, 0.375, math.nan), (0, 3, 0, 0, 0, 4)
    scores, adapters = zip(accuracies, missing, strict=True), []

    def greedy_accuracy(sampler, policy, problems, **options):
        adapters.append(jax.device_get(policy.lora))
        accuracy, count = next(scores)
        return GreedyScore(accuracy=accuracy, truncated=0.0, missing=count)

    monkeypatch.setattr(qerl_jax.training.loop, "greedy_accuracy", greedy_accuracy)
    quick = functools.partial(live_line.waiting, every=0.001)
    monkeypatch.setattr(qerl_jax.training.loop, "waiting", quick)
    for steps in (2, 5):  # The best is remembered where a run goes on.
        run = train(tiny.config({"eval.every": 1, "steps": steps}), workdir=tmp_path / "run")
    assert tiny_run.evaluations(run) == {0: 0.25, 2: 0.5, 3: 0.5, 4: 0.375}
    assert same_adapters(tiny_run.adapter(run, "best_adapter"), adapters[2])
    assert same_adapters(tiny_run.adapter(run), adapters[5])
    assert not same_adapters(adapters[2], adapters[3])
    rows = [row for row in read_jsonl(run / "metrics.jsonl") if "eval_seconds" in row]
    assert [row.get("eval_missing", 0) for row in rows] == list(missing)
    assert [row.get("eval_accuracy") for row in rows[1:]] == [1.0, 0.5, 0.5, 0.375, None]
    assert json.loads((run / "summary.json").read_text())["best_accuracy"] == 0.5
    said, waits = capsys.readouterr()
    assert "\ncompiling programs, " in waits
    assert "after step 1: 1.000  no score 3: not compared\n" in said
    assert "after step 5: -  no score 4: not compared\n" in said


def ramp(*, sigma_start, sigma_end, stages, total_steps):
    """A noise schedule of the user."""
    return lambda step: sigma_start * (step + 1) / total_steps


VARIANTS = {
    "dapo": {
        "rl.loss": "dapo",
        "aqn.correction": "tis",
        "rl.kl_coef": 0.1,
        "rl.updates_per_rollout": 2,
        "rl.overlong_buffer": 4,
        "rl.advantage_scale": "batch",
        "optimizer.schedule": "cosine",
        "optimizer.warmup_steps": 1,
        "train.buffer_tokens": 32,
    },
    "noisy_forward": {
        "aqn.correction": "noisy_forward",
        "aqn.schedule": f"{__name__}:ramp",
        "aqn.final_norm": True,
        "aqn.form": "relative",
        "rl.kl_coef": 0.1,
        "rl.kl_grad": "unbiased",
        "lora.targets": ("q_proj", "down_proj"),
        "lora.rslora": True,
        "model.format": "bf16",
        "train.recompute": "all",
    },
    "truncated": {
        "seed": 2,  # No completion of two tokens ends with it.
        "model.dtype": "bfloat16",
        "rl.mask_truncated": True,
        "rollout.max_new_tokens": 2,
        "rollout.temperature": 0.01,
        "rl.advantage_scale": "none",
        "rollout.top_k": 20,
        "rollout.top_p": 0.9,
        "rollout.dequantize": "step",
        "optimizer.schedule": "linear",
    },
}


@pytest.fixture(scope="module")
def variant(tiny, tmp_path_factory):
    """Runs a variant for two steps, the second with noise, whose metrics are finite; each once."""
    folder = tmp_path_factory.mktemp("variants")
    done = {}

    def run(name):
        if name not in done:
            config = tiny.config(VARIANTS[name] | {"steps": 2, "eval.every": 0})
            done[name] = train(config, workdir=folder / name)
        rows = tiny_run.results(done[name])
        assert_finite(rows, UNMEASURED if name == "truncated" else ())
        assert [row["update_skipped"] for row in rows] == [0, 0]
        return rows

    return run


@pytest.mark.slow  # `test_trainable` compares the policies in one step
def test_noisy_forward_trains_the_policy_that_sampled(variant, tiny):
    rows = variant("noisy_forward")
    assert [row["sigma"] for row in rows] == pytest.approx([5e-3, 1e-2])
    assert [row["perturbed_norms"] for row in rows] == [norms(tiny) + 1] * 2
    assert all(row["logprob_diff_max"] < 1e-4 for row in rows)
    # The reference is the policy without adapter and without noise.
    assert all(row["kl"] > 0 < row["grad_norm"] for row in rows)


def test_dapo_with_several_updates(variant, tiny):
    rows = variant("dapo")
    assert [row["perturbed_norms"] for row in rows] == [0, norms(tiny)]
    assert all(row["ratio_max"] > 1 for row in rows)
    assert all(-1 <= row["reward/overlong"] < 0 for row in rows)
    assert rows[0]["tis_weight"] == pytest.approx(1, abs=1e-5)
    assert rows[1]["logprob_diff_max"] > 1e-3
    assert abs(rows[1]["tis_weight"] - 1) > 1e-5
    assert all(row["kl"] > 0 < row["grad_norm"] for row in rows)


@pytest.mark.parametrize("loss", ["grpo", "bnpo"])
def test_mini_batches_have_the_weight_of_a_rollout(loss, tiny, tmp_path):
    """The mean of their losses at one policy is the loss of the rollout, which no rate changes."""
    changes = {"steps": 1, "eval.every": 0, "rl.loss": loss, "optimizer.learning_rate": 0.0}
    changes |= {"train.micro_batch_rows": 2} if loss == "bnpo" else {}
    changes |= {"rl.entropy_coef": 0.1}

    def step(count):
        config = tiny.config(changes | {"rl.mini_batches": count})
        return tiny_run.results(train(config, workdir=tmp_path / str(count)))[0]

    whole, halves = step(1), step(2)
    assert abs(whole["loss"]) > 1e-3
    assert halves["loss"] == pytest.approx(whole["loss"], 1e-5)
    assert halves["ratio_max"] == pytest.approx(1, abs=1e-5)
    assert halves["forwarded_fraction"] == whole["forwarded_fraction"]
    assert halves["reward"] == whole["reward"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rl.mini_batches": 3}, r"rl\.mini_batches=3 does not divide the 8 rows of a step \("),
        ({"rl.mini_batches": 16}, r"rl\.mini_batches=16 does not divide the 8 rows"),
        (
            {"rl.mini_batches": 4, "rl.loss": "bnpo", "train.micro_batch_rows": 4},
            r"the 8 rows of a step of train\.micro_batch_rows=4 \(.*: pass a divisor",
        ),
        ({"rl.mini_batches": 0}, r"rl\.mini_batches=0: it must be at least 1"),
        ({"rl.mini_batches": 2, "rl.loss": "gspo"}, r"rl\.clip_low=3e-4, rl\.clip_high=4e-4"),
    ],
)
def test_mini_batches_are_equal_parts(changes, words, tiny):
    refused(words, validate, tiny.config(changes))


@pytest.mark.slow
def test_fully_truncated_batch_has_no_gradient(variant):
    for row in variant("truncated"):
        assert row["finished"] == row["loss"] == row["grad_norm"] == 0
        assert {key for key, value in row.items() if value is None} == UNMEASURED


def test_equal_rewards_change_nothing_but_the_weight_decay(tiny, tmp_path):
    changes = {"rl.dynamic_sampling": True, "rl.dynamic_sampling_rounds": 3}
    equal, adapters = {"correctness": (lambda *_: 1.0, 1.0)}, []
    for steps in (1, 2):
        config = tiny.config(changes | {"steps": steps})
        run = train(config, workdir=tmp_path / "run", rewards=equal)
        adapters.append(tiny_run.adapter(run))
    for row in tiny_run.results(run):
        assert row["advantage_zero_groups"] == 1
        assert row["sampled_groups"] == 6
        assert row["grad_norm"] == row["loss"] == row["reward_std"] == 0
        assert not row["update_skipped"]
    decay = 1 - config.optimizer.learning_rate * config.optimizer.weight_decay
    for before, after in zip(*map(jax.tree.leaves, adapters), strict=True):
        np.testing.assert_allclose(after, before * decay, rtol=1e-6)


def test_dynamic_sampling_replaces_uninformative_groups(tiny, tmp_path):
    changes = {"rl.dynamic_sampling": True, "rl.dynamic_sampling_rounds": 2, "steps": 3}
    changes |= {"rl.dynamic_sampling_prompts": 4}  # a step trains on two
    rare = {"correctness": (lambda p, completion, *_: float("t7" in completion.split()), 1.0)}
    run = train(tiny.config(changes), workdir=tmp_path / "run", rewards=rare)
    rows = tiny_run.results(run)
    assert {row["sampled_groups"] for row in rows} <= {4, 8}
    for row in rows:
        informative = round(row["sampled_groups"] * (1 - row["advantage_zero_groups"]))
        assert (informative >= 2) == (row["sampled_groups"] < 8) or row["sampled_groups"] == 8
        assert (row["grad_norm"] > 0) == (informative > 0)


@pytest.mark.parametrize(
    ("name", "weights", "penalty", "metric"),
    [
        ("", {"correctness": 1.0, "format": 0.2}, True, "correctness"),
        ("", {"correctness": 0.0, "format": 0.2}, False, "total"),  # It is only logged.
        ("", {"style": 1.0}, False, "total"),
        ("total", {"correctness": 1.0}, False, "total"),
        ("format", {"correctness": 1.0, "format": 0.0}, False, "format"),
        ("overlong", {"correctness": 1.0}, True, "overlong"),
    ],
)
def test_the_metric_of_dynamic_sampling(name, weights, penalty, metric):
    found = collect.dynamic_sampling_metric(name, weights, has_length_penalty=penalty)
    assert found == metric


def test_a_step_logs_only_what_it_measures(tiny, tmp_path):
    def reward(prompt, completion, answer, num_tokens, finished):
        return 1.0 if next(calls) <= 8 else tiny_run.low_fraction(0, completion, 0, num_tokens, 0)

    calls = itertools.count(1)  # All completions of the first step have one reward.
    config = tiny.config({"steps": 2, "eval.every": 0, "rl.updates_per_rollout": 2})
    run = train(config, workdir=tmp_path / "run", rewards={"correctness": (reward, 1.0)})
    nothing, something = read_steps(run / "metrics.jsonl")
    unmeasured = {name for name, value in nothing.items() if value is None}
    assert unmeasured == {*UNMEASURED, "train_tokens_per_second", "format"}
    assert nothing["packed_tokens"] == nothing["update_buffers"] == 0
    assert nothing["forwarded_fraction"] == nothing["grad_norm"] == nothing["loss"] == 0
    assert nothing["entropy"] > 0  # that of the rollout
    assert {name for name, value in something.items() if value is None} == {"format"}
    tokens = something["train_tokens_per_second"] * something["train_seconds"]
    assert tokens == pytest.approx(2 * something["packed_tokens"])


def test_the_metric_of_dynamic_sampling_must_exist(tiny, tmp_path):
    changes = {"rl.dynamic_sampling": True, "rl.dynamic_sampling_metric": "acuracy"}
    with pytest.raises(UserError, match=r"'acuracy': choose from correctness, format, total, or"):
        train(tiny.config(changes), workdir=tmp_path / "run")


# DAPO, Eq. 11: a group stays if 0 < correct < G. Five groups of two completions: all correct with
# one bad format, one correct, none correct with a length penalty, one reward missing. Of the fifth
# one the totals are equal, and gdpo alone, which tells the parts apart, could learn from it.
CORRECT = np.array([1.0, 1.0, 0.0, 1.0, 0.0, 0.0, np.nan, 1.0, 0.0, 1.0])
REWARD = np.array([1.0, 0.5, 0.5, 1.0, 0.0, -1.0, 0.5, 1.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("metric", "advantage", "informative"),
    [
        ("correctness", "grpo", [False, True, False, False, True]),
        ("total", "grpo", [True, True, True, True, False]),
        ("total", "my_method:centered", [True, True, True, True, False]),
    ],
)
def test_groups_are_informative_by_the_metric(metric, advantage, informative):
    scores = Scores(total=REWARD, parts={"correctness": CORRECT}, errors=[])
    sampler = types.SimpleNamespace(group_size=2)
    options = types.SimpleNamespace(metric=metric, advantage=advantage, sampler=sampler)
    # pyrefly: ignore[bad-argument-type]  The part of the options that is read.
    assert collect._is_informative(scores, options).tolist() == informative


@pytest.mark.parametrize(
    "name", ["dequantize", pytest.param("zero_totals", marks=pytest.mark.slow)]
)
def test_a_missing_program_ends_the_run_after_a_checkpoint(name, tiny, tmp_path, monkeypatch):
    take_step = qerl_jax.training.step.take_step

    def losing(setup, progress, *, programs, **options):
        if progress.step == 1 and name == "dequantize":
            sampler = dataclasses.replace(setup.collect.sampler, executables=Executables())
            collect = dataclasses.replace(setup.collect, sampler=sampler)
            setup = dataclasses.replace(setup, collect=collect)
        if progress.step == 1 and name == "zero_totals":
            programs = Programs({})
        return take_step(setup, progress, programs=programs, **options)

    config = tiny.config({"steps": 2, "eval.every": 0, "checkpoint.every": 9})
    with monkeypatch.context() as patch:
        patch.setattr(qerl_jax.training.loop, "take_step", losing)
        with pytest.raises(UserError, match=f"no program is compiled for the operation .*{name}"):
            train(config, workdir=tmp_path / "run")
    assert [row["step"] for row in read_steps(tmp_path / "run" / "metrics.jsonl")] == [1]
    run = train(config, workdir=tmp_path / "run")
    assert [row["step"] for row in read_steps(run / "metrics.jsonl")] == [1, 2]


def test_failing_rewards_are_missing_and_reported(tiny, tmp_path, capsys):
    calls = iter(range(1000))

    def failing(prompt, completion, answer, num_tokens, finished):
        match next(calls) % 8:
            case 0:
                raise ValueError("no such tag")
            case 1:
                time.sleep(5)
            case 2:
                return None
            case 3:
                return math.inf
        return 1.0

    changes = {"reward_time_limit": 0.05, "eval.every": 0, "steps": 2}
    rewards = {"failing": (failing, 1.0), "format": (tiny_run.low_fraction, 1.0)}
    run = train(tiny.config(changes), workdir=tmp_path / "run", rewards=rewards)
    rows = tiny_run.results(run)
    assert_finite(rows, allowed=("accuracy",))
    assert [row["rewards_missing"] for row in rows] == [4, 4]
    assert [row["reward/failing"] for row in rows] == [1, 1]
    assert all(row["accuracy"] is None for row in rows)
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 6
    for text in ("ValueError: no such tag", "exceeded the time limit of 0.05 s", "returned inf"):
        expected = [
            w
            for w in warnings
            if w.startswith("warning: reward 'failing' is missing for 1 of 8") and text in w
        ]
        assert len(expected) == 2


def test_rewards_that_all_fail_save_and_end_the_run(tiny, tmp_path, capsys):
    calls = iter(range(1000))

    def failing(*_):
        if next(calls) >= 8:  # the second step's
            raise ZeroDivisionError("by zero")
        return 1.0

    config = tiny.config({"eval.every": 0, "steps": 4, "rl.overlong_buffer": 2})
    folder, words = tmp_path / "run", "no completion has a reward.*for 8 of 8.*by zero"
    refused(words, train, config, workdir=folder, rewards={"failing": (failing, 1.0)})
    assert len(tiny_run.results(folder)) == 1
    assert "saved after step 1; the same command continues" in capsys.readouterr().out
    train(config, workdir=folder, rewards={"failing": (tiny_run.low_fraction, 1.0)})
    assert "resuming after step 1" in capsys.readouterr().out
    with pytest.raises(UserError, match=words):  # In the first step there is nothing to save.
        train(config, workdir=tmp_path / "new", rewards={"failing": (failing, 1.0)})
    assert "saved" not in capsys.readouterr().out
    changed = tiny.config({"eval.every": 0, "steps": 1, "seed": 5})
    train(changed, workdir=tmp_path / "new", rewards={"low": (tiny_run.low_fraction, 1.0)})
    assert len(tiny_run.results(folder)) == 4


@pytest.mark.parametrize("fails", [(2, 3), (1, 3), (1, 2, 3)])
def test_a_round_whose_rewards_all_fail_is_one_without_usable_groups(fails, tiny, tmp_path, capsys):
    """A judge that was out of reach for one round ended a step that had rewards."""
    calls = iter(range(1, 100))

    def judge(completions):
        if next(calls) in fails:
            raise ConnectionError("out of reach")
        return [0.0, 1.0, 0.0, 1.0, *[1.0] * 4]  # one group to learn from, and one that is equal

    changes = {"rl.dynamic_sampling": True, "rl.dynamic_sampling_rounds": 3, "steps": 1}
    changes |= {"rl.dynamic_sampling_metric": "judge", "rl.overlong_buffer": 2, "eval.every": 0}
    config, rewards = tiny.config(changes), {"judge": (judge, 1.0)}
    if len(fails) == 3:
        with pytest.raises(UserError, match=r"no completion has a reward.*for 8 of 8.*reach"):
            train(config, workdir=tmp_path / "run", rewards=rewards)
        assert next(calls) == 4
        return
    run = train(config, workdir=tmp_path / "run", rewards=rewards)
    (row,) = tiny_run.results(run)
    assert (row["sampled_groups"], row["rewards_missing"]) == (6, 16)
    assert row["reward/judge"] == 0.75
    assert row["grad_norm"] > 0
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 2
    assert all("missing for 8 of 8 completions: ConnectionError" in line for line in warnings)


@pytest.mark.parametrize("fails", ["round", "wrong"])
def test_a_group_whose_completions_have_no_total_is_not_informative(fails, tiny, tmp_path):
    """Its correctness differs, but a judge that has a weight as well was out of reach."""
    calls = iter(range(1, 100))

    def correctness(completions):
        return [0.0, 1.0] * (len(completions) // 2)

    async def judge(completions):
        if fails == "round" and next(calls) == 1:
            raise ConnectionError("out of reach")
        # Without a number only the correct completions of a group have a total, and it is equal.
        return [float(i % 2) if i % 2 or fails == "round" else "?" for i in range(len(completions))]

    changes = {"rl.dynamic_sampling": True, "rl.dynamic_sampling_rounds": 2, "steps": 1}
    config = tiny.config(changes | {"eval.every": 0})
    rewards = {"correctness": (correctness, 1.0), "judge": (judge, 0.5)}
    (row,) = tiny_run.results(train(config, workdir=tmp_path / "run", rewards=rewards))
    assert row["sampled_groups"] == 4
    assert (row["grad_norm"] > 0) == (fails == "round")
    assert row["advantage_zero_groups"] == (0.5 if fails == "round" else 1.0)


async def waiting(prompt, completion, answer, num_tokens, finished, question):
    """A reward that waits, and gets a column of its row."""
    await asyncio.sleep(0.2)
    assert question in prompt
    return tiny_run.low_fraction(prompt, completion, answer, num_tokens, finished)


@pytest.mark.slow  # 10 s
def test_rewards_that_wait_train_the_same_with_any_advantage(tiny, tmp_path):
    """The same rewards give the same steps, however they are called; all wait at once."""

    def lists(completions, num_tokens):
        pairs = zip(completions, num_tokens, strict=True)
        return [tiny_run.low_fraction("", text, "", n, True) for text, n in pairs]

    found = {}
    for advantage in ("grpo", "gdpo"):
        for name, reward in (
            ("waits", waiting),
            ("lists", lists),
            ("plain", tiny_run.low_fraction),
        ):
            config = tiny.config({"eval.every": 0, "steps": 1, "rl.advantage": advantage})
            rewards = {"low": (reward, 1.0), "even": (tiny_run.even_end, 0.5)}
            run = train(config, workdir=tmp_path / advantage / name, rewards=rewards)
            (found[advantage, name],) = tiny_run.results(run)
            (row,) = read_steps(run / "metrics.jsonl")
            assert (row["reward_seconds"] > 0.19) == (name == "waits")
            assert row["reward_seconds"] < 0.8  # 8 completions that waited one by one take 1.6 s
        assert found[advantage, "waits"] == found[advantage, "lists"] == found[advantage, "plain"]
    assert found["grpo", "plain"]["grad_norm"] != found["gdpo", "plain"]["grad_norm"]


@pytest.mark.parametrize(("advantage", "uninformative"), [("grpo", 1), ("gdpo", 0)])
def test_groups_whose_rewards_differ_train_gdpo_though_totals_do_not(
    tiny, tmp_path, advantage, uninformative
):
    def half_high(*arguments):
        return 0.5 * (1.0 - tiny_run.low_fraction(*arguments))

    config = tiny.config({"eval.every": 0, "steps": 1, "rl.advantage": advantage})
    rewards = {"low": (tiny_run.low_fraction, 1.0), "high": (half_high, 2.0)}
    (row,) = tiny_run.results(train(config, workdir=tmp_path / "run", rewards=rewards))
    assert row["advantage_zero_groups"] == uninformative
    assert (row["grad_norm"] > 0) == (advantage == "gdpo")


@pytest.mark.parametrize("advantage", ["grpo", "gdpo"])
@pytest.mark.parametrize("eps", [0.0, 1e-4])
def test_groups_that_differ_by_rounding_alone_train_nothing(tiny, tmp_path, advantage, eps):
    def low(*arguments):
        return float(tiny_run.low_fraction(*arguments) > 0.4)

    def high(*arguments):
        return 1.0 - low(*arguments)

    changes = {"rl.advantage": advantage, "rl.advantage_eps": eps}
    config = tiny.config({"eval.every": 0, "steps": 1, "log.completions": 8} | changes)
    rewards = {"a": (low, 0.3), "b": (high, 0.1), "c": (high, 0.2)}  # 0.3 and 0.1 + 0.2
    run = train(config, workdir=tmp_path / "run", rewards=rewards)
    samples = read_jsonl(run / "completions.jsonl")
    assert len({sample["reward"] for sample in samples}) == 2
    assert {sample["advantage"] for sample in samples} == {0.0}
    (row,) = tiny_run.results(run)
    assert row["advantage_zero_groups"] == 1
    assert row["grad_norm"] == 0


def test_another_default_for_the_keys_of_jax_changes_nothing(tiny, tmp_path):
    """JAX_DEFAULT_PRNG_IMPL=rbg makes faster draws elsewhere; the programs here have their own."""
    found = []
    for number, (implementation, seed) in enumerate(
        (("threefry2x32", 0), ("rbg", 0), ("threefry2x32", 1))
    ):
        config = tiny.config({"steps": 1, "eval.every": 1, "seed": seed})
        with jax.default_prng_impl(implementation):
            run = train(config, workdir=tmp_path / str(number))
        found.append((tiny_run.results(run), tiny_run.evaluations(run)))
    assert found[0] == found[1]
    assert found[0][0][0]["entropy"] != found[2][0][0]["entropy"]


@pytest.mark.parametrize("advantage", ["grpo", "gdpo"])
def test_a_completion_that_is_left_out_has_no_advantage_by_its_length(tiny, tmp_path, advantage):
    calls = iter(range(8))

    def some(*arguments):
        return tiny_run.low_fraction(*arguments) if next(calls) % 3 else None

    changes = {"rl.advantage": advantage, "rl.overlong_buffer": 4, "log.completions": 8}
    config = tiny.config({"eval.every": 0, "steps": 1} | changes)
    run = train(config, workdir=tmp_path / "run", rewards={"some": (some, 1.0)})
    samples = read_jsonl(run / "completions.jsonl")
    left_out = [sample for sample in samples if sample["reward/some"] is None]
    assert 0 < len(left_out) < len(samples)
    assert all(sample["advantage"] == 0 and sample["reward"] is None for sample in left_out)
    assert any(sample["advantage"] for sample in samples)
    (row,) = tiny_run.results(run)
    assert row["rewards_missing"] == len(left_out)


def test_rewards_that_are_given_in_python_are_recorded(tiny, tmp_path, capsys):
    """Evaluations and exports judged by the rewards of the config, which the run did not use."""
    changes, folder = {"steps": 1, "eval.problems": 4}, tmp_path / "run"
    limited = Timed(tiny_run.low_fraction, 2.0)
    rewards = {"correctness": (limited, 1), "even": (lambda *_: 1.0, 0.5)}
    train(tiny.config(changes), workdir=folder, rewards=rewards)
    saved = json.loads((folder / "config.json").read_text())
    assert saved["python_rewards"] == {
        "correctness": {"function": "tiny_run:low_fraction", "time_limit": 2.0, "weight": 1.0},
        "even": {"function": "", "weight": 0.5},
    }
    assert saved["config"]["rewards"]["correctness"]["function"] == "tiny_run:even_end"
    (results,) = evaluate(EvaluateConfig(source=str(folder), out=str(tmp_path / "out")))
    task = json.loads((results / "results.json").read_text())["tasks"]["run"]
    assert (task["judge"], task["format_judge"]) == ("tiny_run:low_fraction", "")

    lost = {"correctness": (lambda *_: 1.0, 1.0)}
    train(tiny.config(changes | {"steps": 2}), workdir=folder, rewards=lost)
    words = "run: it has no scorer that can be imported, the run's was given in Python; .*--judge="
    refused(words, evaluate, EvaluateConfig(source=str(folder), out=str(tmp_path / "out")))
    capsys.readouterr()
    assert open_held_out_set(open_policy(str(folder)), None, folder) is None
    assert "not scored: run: it has no scorer that can be imported" in capsys.readouterr().out

    train(tiny.config(changes | {"steps": 3}), workdir=folder)  # by the rewards of the config
    (results,) = evaluate(EvaluateConfig(source=str(folder), out=str(tmp_path / "last")))
    task = json.loads((results / "results.json").read_text())["tasks"]["run"]
    assert task["judge"] == "tiny_run:even_end"


def needy(prompt, completion, answer, num_tokens, finished, tests):
    """A reward whose column no problem has."""


@pytest.mark.parametrize(
    ("name", "reward", "weight", "words"),
    [
        ("overlong", tiny_run.low_fraction, 1.0, "'overlong' is the name of the length penalty"),
        ("total", tiny_run.low_fraction, 1.0, "'total' is the name of the weighted sum"),
        ("low", tiny_run.low_fraction, 0.0, r"no reward has a weight \(low\)"),
        ("low", tiny_run.low_fraction, math.nan, "the weight of the reward low=nan"),
        ("needy", needy, 1.0, r"'needy' takes the argument 'tests', a column that 24 of"),
    ],
)
def test_rewards_that_are_given_in_python_are_checked_as_those_of_a_config(
    tiny, tmp_path, name, reward, weight, words
):
    config = tiny.config({"eval.every": 0, "steps": 1, "rl.overlong_buffer": 2})
    refused(words, train, config, workdir=tmp_path / "run", rewards={name: (reward, weight)})


def test_a_token_is_nowhere_in_the_run_folder(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", "s3cr3t-t0ken")
    config = tiny.config({"eval.every": 0, "steps": 1})
    judge = {"function": "http://127.0.0.1:9/", "weight": 0.0, "token_env": "JUDGE_TOKEN"}
    with config.unlocked():
        config.rewards.judge = judge | {"retries": 0, "time_limit": 5.0}
    run = train(config, workdir=tmp_path / "run")
    (row,) = tiny_run.results(run)
    assert row["rewards_missing"] == 8
    assert row["reward/judge"] is None
    assert all(b"s3cr3t" not in data for data in tiny_run.contents(run).values())
    with config.unlocked():
        config.rewards.judge.weight = 1.0  # beside `correctness`, which has no failure
    with pytest.raises(UserError, match="nothing can be learned: reward 'judge' is missing for 8"):
        train(config, workdir=tmp_path / "judged")
    monkeypatch.delenv("JUDGE_TOKEN")
    with pytest.raises(UserError, match="the environment variable that its token_env names"):
        train(config, workdir=tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory\nwhile allocating", "buffer_tokens.*max_rows"),
        ("INTERNAL: a bug", None),
    ],
)
def test_a_device_out_of_memory_is_one_line(message, words, tiny, tmp_path, monkeypatch):
    def full(*_, **__):
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(qerl_jax.training.step, "update", full)
    config = tiny.config({"eval.every": 0})
    expected = UserError if words else jax.errors.JaxRuntimeError
    with pytest.raises(expected, match=words) as caught:
        train(config, workdir=tmp_path / "run")
    assert words is None or "\n" not in str(caught.value)


def test_without_any_reward_nothing_is_learned(tiny, tmp_path, capsys):
    rewards = {"correctness": (lambda *_: None, 1.0), "logged": (tiny_run.low_fraction, 0.0)}
    run = train(tiny.config({"steps": 2}), workdir=tmp_path / "run", rewards=rewards)
    rows = tiny_run.results(run)
    assert [(row["reward"], row["grad_norm"]) for row in rows] == [(None, 0)] * 2
    line = "warning: no completion has a reward: every function with a weight returned None"
    assert capsys.readouterr().err.splitlines() == [line] * 2
    assert tiny_run.evaluations(run) == {}  # without scores nothing was evaluated
    assert not (run / "best_adapter").exists()
    assert json.loads((run / "summary.json").read_text())["best_accuracy"] is None


def test_start_from_an_adapter(finished, tiny, tmp_path, capsys):
    start = shutil.copytree(finished / "adapter", tmp_path / "start")
    config = json.loads((start / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "other/base"
    (start / "adapter_config.json").write_text(json.dumps(config))
    changes = {"lora.init": str(start), "optimizer.learning_rate": 0.0, "steps": 1}
    run = train(tiny.config(changes), workdir=tmp_path / "run")
    assert same_adapters(tiny_run.adapter(run), tiny_run.adapter(finished))
    train(tiny.config(changes | {"steps": 2}), workdir=run)
    assert same_adapters(tiny_run.adapter(run), tiny_run.adapter(finished))
    said = capsys.readouterr().err
    assert said.count(f"warning: the adapter {start} names the base other/base, and is used") == 1


@pytest.mark.parametrize("updates", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_non_finite_gradients_are_skipped_and_then_stop_the_run(finished, tiny, tmp_path, updates):
    broken = shutil.copytree(finished / "adapter", tmp_path / "broken")
    tensors = load_file(broken / "adapter_model.safetensors")
    name = min(tensors)
    tensors[name] = np.full_like(tensors[name], 1e38)  # overflows in the product
    save_file(tensors, broken / "adapter_model.safetensors")
    config = tiny.config(
        {"lora.init": str(broken), "eval.every": 0, "rl.updates_per_rollout": updates, "steps": 9}
    )
    for last in (3, 4):  # Starting it again goes on with the next step.
        message = f"{last} updates in a row were not finite, up to step {last}; "
        refused(message, train, config, workdir=tmp_path / "run")
        rows = tiny_run.results(tmp_path / "run")
        assert [(row["step"], row["update_skipped"]) for row in rows] == [
            (step, 1) for step in range(1, last + 1)
        ]


def test_one_non_finite_gradient_does_not_stop_the_run(tiny, tmp_path):
    calls = iter(range(1000))

    def huge_once(prompt, completion, answer, num_tokens, finished):
        return (1e30 if next(calls) < 8 else 1.0) * len(set(completion.split()))

    changes = {"rl.advantage_scale": "none", "eval.every": 0, "steps": 3}
    run = train(tiny.config(changes), workdir=tmp_path / "run", rewards={"huge": (huge_once, 1.0)})
    rows = tiny_run.results(run)
    assert [row["update_skipped"] for row in rows] == [1, 0, 0]
    assert rows[0]["grad_norm"] is None
    assert all(row["grad_norm"] > 0 for row in rows[1:])


def test_fewer_problems_than_prompts_in_a_step(tiny, tmp_path):
    problems = tiny_run.write_problems(tmp_path / "three.jsonl", count=3)
    changes = {
        "data.path": str(problems),
        "eval.every": 0,
        "aqn.kl_every": 0,
        "rollout.prompts_per_step": 4,
        "log.completions": 3,
        "steps": 1,
    }
    run = train(tiny.config(changes), workdir=tmp_path / "run")
    prompts = [sample["prompt"] for sample in read_jsonl(run / "completions.jsonl")]
    assert len(set(prompts)) == len(prompts) == 3


@pytest.mark.slow
def test_profile(tiny, tmp_path):
    changes = {"profile.start": 2, "profile.stop": 3, "eval.every": 0}
    run = tmp_path / "run"
    train(tiny.config(changes | {"steps": 2}), workdir=run)
    assert list((run / "profile").rglob("*.xplane.pb"))
    # Continued inside of the window.
    train(tiny.config(changes), workdir=run)
    assert len(tiny_run.results(run)) == 4
