"""Noise whose sigma follows the measured KL: the controller alone, and in runs."""

import functools
import itertools
import math
import pathlib
import statistics
import types

import jax
import numpy as np
import pytest
import tiny_run
from refusal import refused

from qerl_jax.errors import UserError
from qerl_jax.policy import aqn
from qerl_jax.policy.kl_control import (
    LOWEST_TARGET,
    NOTHING_MEASURED,
    SigmaState,
    control_metrics,
    noise_level,
    sigma_of_step,
    update_state,
)
from qerl_jax.rl.logprobs import row_divergences
from qerl_jax.run.metrics import read_steps
from qerl_jax.system.jsonl import read_jsonl
from qerl_jax.training import step as step_module
from qerl_jax.training.loop import train
from qerl_jax.training.validate import validate
from qerl_jax.weights.load import load

OPTIONS = {
    "sigma_start": 1e-2,
    "sigma_end": 5e-4,
    "sigma_max": 0.3,
    "kl_target_start": 0.03,
    "kl_target_end": 0.003,
    "stages": 5,
    "total_steps": 20,
}
RUN = {
    "steps": 4,
    "aqn.schedule": "kl",
    "aqn.stages": 4,
    "aqn.kl_every": 1,
    "aqn.kl_target_start": 2e-3,
    "aqn.kl_target_end": 1e-3,
    "aqn.sigma_start": 1e-2,
    "rollout.temperature_schedule": "linear",
    "rollout.temperature": 1.1,
    "rollout.temperature_end": 0.8,
    "rl.entropy_coef": 0.01,
    "eval.every": 0,
}


def level(**changes):
    return noise_level("kl", **OPTIONS | changes)


def simulate(kl_of, *, steps=20, **changes):
    """Sigmas, KLs and metrics of steps whose KL is a function of sigma and step."""
    found, state, rows = level(**changes), NOTHING_MEASURED, []
    for step in range(steps):
        sigma = sigma_of_step(found, state, step)
        kl = kl_of(sigma, step) if sigma > 0 else 0.0
        state = update_state(found, state, sigma=sigma, kl=kl)
        metrics = control_metrics(found, state, sigma=sigma, step=step)
        rows.append({"sigma": sigma, "kl": kl} | metrics)
    return rows


@pytest.mark.parametrize("gain", [2.0, 40.0, 1000.0])
def test_sigma_comes_to_the_target_and_follows_it(gain):
    rows = simulate(lambda sigma, step: gain * sigma**2, steps=50, total_steps=50)
    assert [row["sigma"] for row in rows[:10]] == [0.0] * 10
    assert rows[10]["sigma"] == 1e-2
    targets = [0.03 * 0.1 ** (k / 3) for k in range(4)]
    for stage, target in enumerate(targets, start=1):
        row = rows[10 * stage + 9]
        assert row["noise_kl_target"] == pytest.approx(target, rel=1e-5)
        assert row["kl"] == pytest.approx(target, rel=1e-5)
        assert row["sigma_at_bound"] == 0
    ratios = [b["sigma"] / a["sigma"] for a, b in itertools.pairwise(rows[10:])]
    assert max(ratios) <= 2.0 + 1e-9
    assert min(ratios) >= 0.5 - 1e-9


def test_the_bounds_are_kept_and_logged():
    rows = simulate(lambda sigma, step: 1e-5 * sigma**2, sigma_max=0.05)
    assert rows[-1]["sigma"] == 0.05
    assert [row["sigma_at_bound"] for row in rows[4:8]] == [0, 0, 0, 1]
    # What rounding alone does is more than the target: sigma falls, and not to 0.
    rows = simulate(lambda sigma, step: 1.0, steps=60, total_steps=60, sigma_max=0.05)
    assert rows[-1]["sigma"] == pytest.approx(5e-6)
    assert rows[-1]["sigma_at_bound"] == 1


def test_a_kl_that_is_not_finite_leaves_sigma_and_is_counted():
    start = 20 // 2
    broken = {start + 1: math.nan, start + 2: math.inf}
    rows = simulate(lambda sigma, step: broken.get(step, 40.0 * sigma**2), stages=2)
    sigmas = [row["sigma"] for row in rows]
    assert sigmas[start + 1] == sigmas[start + 2] == sigmas[start + 3] == 2e-2
    assert sigmas[start + 4] == pytest.approx(math.sqrt(0.03 / 40.0))
    assert [row["noise_kl_not_finite"] for row in rows[start:]] == [0, 1, *[2] * 8]


def test_a_kl_that_rounding_made_negative_counts_as_too_small():
    state = SigmaState(sigma=1e-3, kl=-1e-9)
    assert sigma_of_step(level(), state, 4) == pytest.approx(2e-3)


def test_steps_without_a_measurement_keep_their_sigma():
    """With aqn.kl_every=2 the sigma of two neighboring steps of a stage is the same."""
    found, state, sigmas = level(stages=2), NOTHING_MEASURED, []
    for step in range(10, 20):
        sigmas.append(sigma_of_step(found, state, step))
        if step % 2 == 0:
            state = update_state(found, state, sigma=sigmas[-1], kl=40.0 * sigmas[-1] ** 2)
    assert sigmas[1:9:2] == sigmas[2:10:2]
    assert sigmas[-1] == pytest.approx(math.sqrt(0.03 / 40.0))


def test_other_schedules_need_no_control():
    found = noise_level("exponential", **OPTIONS)
    options = {"sigma_start": 1e-2, "sigma_end": 5e-4, "stages": 5, "total_steps": 20}
    expected = aqn.sigma_schedule("exponential", **options)
    for step in range(20):
        assert sigma_of_step(found, NOTHING_MEASURED, step) == float(np.asarray(expected(step)))
    assert update_state(found, NOTHING_MEASURED, sigma=1e-2, kl=math.nan) == NOTHING_MEASURED
    assert control_metrics(found, NOTHING_MEASURED, sigma=1e-2, step=3) == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kl_target_start": 5e-5}, f"kl_target_start=5e-05.*rounding.*pass {LOWEST_TARGET}"),
        ({"kl_target_end": math.nan}, "kl_target_end=nan"),
        ({"sigma_start": 0.0}, "sigma_start=0.0, aqn.sigma_max=0.3"),
        ({"sigma_start": 0.4}, "sigma_start=0.4, aqn.sigma_max=0.3"),
    ],
)
def test_bad_options(changes, message):
    refused(message, level, **changes)


def test_without_measurements_there_is_no_control(tiny):
    with pytest.raises(UserError, match=r"aqn.kl_every=0: sigma follows the measured KL, pass"):
        validate(tiny.config(RUN | {"aqn.kl_every": 0}))
    with pytest.raises(UserError, match=r"aqn.kl_every=4 and steps=4: only the first step"):
        validate(tiny.config(RUN | {"aqn.kl_every": 4}))
    validate(tiny.config(RUN | {"aqn.kl_every": 3}))


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory):
    """A finished run with all that changes from step to step; do not write to it."""
    return train(tiny.config(RUN), workdir=tmp_path_factory.mktemp("runs") / "kl")


def assert_follows(rows):
    """The sigmas of a run follow what was measured, and begin as `RUN` says."""
    assert rows[0]["sigma"] == rows[0]["noise_kl_target"] == 0
    assert rows[1]["sigma"] == 1e-2
    for before, row in itertools.pairwise(rows[1:]):
        assert before["noise_kl"] > 0
        change = math.sqrt(row["noise_kl_target"] / before["noise_kl"])
        assert row["sigma"] == pytest.approx(before["sigma"] * min(max(change, 0.5), 2.0))


@pytest.mark.slow
def test_a_run_of_a_mixture_follows_its_target(tmp_path, compile_cache):
    small = tiny_run.write_tiny(tmp_path, compile_cache, model_type="qwen3_moe", num_layers=1)
    targets = {"lora.targets": ("q_proj", "k_proj", "v_proj", "o_proj")}
    run = train(small.config(RUN | targets), workdir=tmp_path / "run")
    assert_follows(read_steps(run / "metrics.jsonl"))


def test_sigma_comes_to_the_target_of_a_mixture():
    """Of a trained one (golden/make_trained_moe.py): with few flips the KL grows as sigma."""
    folder = pathlib.Path(__file__).parent / "golden" / "trained_moe"
    text = np.load(folder / "held_out.npy").astype(np.int32)
    model = load(str(folder), format="bf16", dtype="float32")
    compare = jax.jit(functools.partial(row_divergences, model_config=model.config))

    def kl_of(sigma, step):
        noisy = aqn.perturb_norms(jax.random.key(step), model.params, sigma)
        return float(compare(noisy, model.params, text)[1].mean())

    targets = {"kl_target_start": 3e-3, "kl_target_end": 3e-4, "stages": 3, "total_steps": 30}
    rows = simulate(kl_of, steps=30, **targets)
    # A few tokens that flip make most of a small KL, which differs from draw to draw.
    for stage in (rows[14:20], rows[24:]):
        ratios = [row["kl"] / row["noise_kl_target"] for row in stage]
        assert 0.6 < statistics.geometric_mean(ratios) < 1.5
    assert rows[-1]["sigma"] < rows[19]["sigma"] / 2


def test_a_run_follows_its_target(finished):
    rows = read_steps(finished / "metrics.jsonl")
    assert [row["temperature"] for row in rows] == pytest.approx([1.1, 1.0, 0.9, 0.8])
    assert_follows(rows)
    for row in rows:
        assert row["sigma_at_bound"] == row["noise_kl_not_finite"] == 0
        # The trainer computes the sampler's log-probabilities at every temperature.
        if not row["sigma"]:
            assert row["logprob_diff_max"] < 1e-4
    # Neither sigma nor the temperature compiles anything after the first step.
    for row in read_jsonl(finished / "metrics.jsonl")[1:]:
        assert row["compiled_programs"] == 0


def test_a_resumed_run_repeats_its_sigmas(finished, tiny, tmp_path, monkeypatch):
    calls, measure = [], step_module._measure_noise

    def stop_in_the_third(*arguments, **options):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return measure(*arguments, **options)

    monkeypatch.setattr(step_module, "_measure_noise", stop_in_the_third)
    with pytest.raises(KeyboardInterrupt):
        train(tiny.config(RUN), workdir=tmp_path / "run")
    assert len(read_steps(tmp_path / "run" / "metrics.jsonl")) == 2
    train(tiny.config(RUN), workdir=tmp_path / "run")
    assert tiny_run.results(tmp_path / "run") == tiny_run.results(finished)


def test_a_run_goes_on_after_a_kl_that_is_not_finite():
    setup = types.SimpleNamespace(
        method=types.SimpleNamespace(sigma=level(stages=2)),
        config=types.SimpleNamespace(aqn=types.SimpleNamespace(kl_every=1)),
    )
    progress = step_module.Progress(step=12, state=None, cursor=None)
    state, metrics = step_module._measure_noise(setup, progress, lambda: math.nan, sigma=0.02)
    assert state == SigmaState(sigma=0.02, kl=None, not_finite=1)
    assert metrics["noise_kl_not_finite"] == 1
    assert sigma_of_step(setup.method.sigma, state, 13) == 0.02
