"""Custom schedules, loss weights and rewards: functions outside the project, by import path."""

import contextlib
import importlib
import subprocess
import sys
import types

import numpy as np
import optax
import pytest
import tiny_run
from refusal import refused
from row_batch import row_batch
from row_loss import loss_config
from tiny_model import random_lora, tiny_policy

from qerl_jax.errors import UserError
from qerl_jax.policy import aqn
from qerl_jax.policy.trainable import Trainable
from qerl_jax.rl import advantages, losses
from qerl_jax.rl.packing import rows_that_teach
from qerl_jax.rl.programs import operations
from qerl_jax.rl.train_step import OptimizerConfig, UpdateConfig, init_state, make_optimizer
from qerl_jax.training import begin
from qerl_jax.training.loop import train
from qerl_jax.training.setup import prepare

MODULE = """
import jax.numpy as jnp
import numpy as np

def triangle(*, sigma_start, sigma_end, stages, total_steps):
    return lambda step: sigma_start * min(step, total_steps - 1 - step)

def sequence(mask, advantages, logprobs):
    return mask / (mask.sum(axis=1, keepdims=True).clip(1) * len(mask))

def surprising(mask, advantages, logprobs):
    weights = mask * (np.nan_to_num(logprobs) < -3.0)
    weights *= advantages[:, None] > 0
    mask[:] = 0.0  # The function gets a copy.
    return weights / weights.sum().clip(1)

def short(prompt, completion, answer, num_tokens, finished):
    return 1.0 - num_tokens / 6 if finished else None

def penalty(rewards, parts):
    return parts["low"] + parts["overlong"] - rewards.mean(axis=1, keepdims=True)

calls = []

def late(rewards, parts):
    calls.append(1)  # The first call is the check before training.
    if len(calls) == 4:
        raise ZeroDivisionError("a group without a reward")
    return rewards - rewards.mean(axis=1, keepdims=True)

def pg(ratio, advantages, logprobs, mask):
    return -ratio * advantages * mask

def asymmetric(ratio, advantages, logprobs, mask):
    return jnp.where(advantages > 0, -ratio * advantages, -0.5 * logprobs * advantages)

def pull(ratio, advantages, logprobs, mask):
    return -(advantages + 0.1) * logprobs

def total(ratio, advantages, logprobs, mask):
    return (ratio * advantages).sum()

def endless(ratio, advantages, logprobs, mask):
    return ratio / 0.0

def on_numpy(ratio, advantages, logprobs, mask):
    return np.asarray(ratio) * 2

def of_groups(mask, advantages, logprobs):
    best = advantages.reshape(2, 4).max(axis=1)  # 2 prompts with 4 completions each
    return mask * np.repeat(best, 4)[:, None]

def constant(mask, advantages, logprobs):
    return 1.0

def broken(mask, advantages, logprobs):
    return np.full_like(mask, np.inf)

def of_two(mask, advantages):
    return mask

def raising(mask, advantages, logprobs):
    raise ZeroDivisionError("no token\\nat all")

def words(mask, advantages, logprobs):
    return "all"

def leaving(*_, **__):
    raise SystemExit(3)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module outside the project that can be imported."""
    (tmp_path / "my_ideas.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "my_ideas"
    sys.modules.pop("my_ideas", None)


@pytest.mark.slow
def test_custom_functions_run_from_the_command_line(tiny, tmp_path):
    (tmp_path / "my_ideas.py").write_text(MODULE)
    config = tiny.config_file(tmp_path / "my_config.py", {"eval.every": 0, "aqn.kl_every": 1})
    command = [
        *(sys.executable, "-m", "experiments.grpo_gsm8k", "--config=my_config.py"),
        "--config.aqn.schedule=my_ideas:triangle",
        "--config.aqn.sigma_start=0.25",
        "--config.rl.aggregation=my_ideas:surprising",
        "--config.rewards.format.function=my_ideas:short",
        "--workdir=run",
    ]
    environment = tiny.environment()
    result = subprocess.run(
        command, cwd=config.parent, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr  # Slow loading says so there.
    rows = tiny_run.results(tmp_path / "run")
    assert [row["sigma"] for row in rows] == [0.0, 0.25, 0.25, 0.0]
    assert [row["noise_kl"] > 0 for row in rows] == [False, True, True, False]
    for row in rows:
        assert 0.0 <= row["reward/format"] <= 1.0
        assert row["rewards_missing"] == round(8 * (1.0 - row["finished"]))


def test_a_schedule_that_fails_at_a_later_step_is_refused_before_the_model_is_loaded(
    tiny, tmp_path, module
):
    """Also where an extension alone reaches the step: `triangle` is negative past the end."""
    changes = {"eval.every": 0, "aqn.schedule": f"{module}:triangle", "model.source": "/absent"}
    config = tiny.config(changes)
    for steps, fails in ((4, False), (5, True)):
        config.steps = steps
        message = "triangle' at step 4 failed: ValueError: sigma is -.*total_steps" if fails else ""
        with pytest.raises(UserError, match=message or "/absent") as caught:
            prepare(config, {"low": (tiny_run.low_fraction, 1.0)}, schedule_steps=4)
        assert "\n" not in str(caught.value)


def test_the_parts_of_an_own_advantage_are_those_of_a_step(tiny, tmp_path, module):
    """The check before the run names the length penalty, too."""
    changes = {"steps": 1, "eval.every": 0, "rl.advantage": f"{module}:penalty"}
    rewards = {"low": (tiny_run.low_fraction, 1.0)}
    config = tiny.config(changes | {"rl.overlong_buffer": 3})
    (row,) = tiny_run.results(train(config, workdir=tmp_path / "run", rewards=rewards))
    assert row["grad_norm"] > 0
    with pytest.raises(UserError, match="penalty' failed: KeyError: 'overlong'"):
        train(tiny.config(changes), workdir=tmp_path / "off", rewards=rewards)


def test_a_function_that_fails_in_a_step_does_not_cost_the_steps_before(
    tiny, tmp_path, module, capsys
):
    changes = {"eval.every": 0, "rl.advantage": f"{module}:late"}
    for printed in ("saved after step 2; ", "resuming after step 2"):
        with contextlib.suppress(UserError):
            train(tiny.config(changes), workdir=tmp_path / "run")
        assert printed in capsys.readouterr().out
    assert len(tiny_run.results(tmp_path / "run")) == tiny_run.STEPS


@pytest.mark.slow  # 13 s
def test_a_custom_loss_weight_trains(tiny, tmp_path, module):
    changes = {"steps": 2, "eval.every": 0}
    found = {}
    for name in ("sequence", f"{module}:sequence", f"{module}:surprising"):
        run = tmp_path / name
        train(tiny.config(changes | {"rl.aggregation": name}), workdir=run)
        found[name] = [row["grad_norm"] for row in tiny_run.results(run)]
    assert found[f"{module}:sequence"] == found["sequence"]
    assert found[f"{module}:surprising"] != pytest.approx(found["sequence"], rel=0.01)
    assert all(norm > 0 for norm in found[f"{module}:surprising"])


def batch(aggregation):
    return row_batch(
        [[1], [1, 2]],
        np.array([[3, 4, 5, 6], [3, 4, 5, 6]]),
        np.array([2, 4]),
        np.array([True, True]),
        np.array([1.0, -1.0]),
        np.array([[-1.0, -4.0, np.nan, np.nan], [-4.0, np.nan, -1.0, -2.0]]),
        mask_truncated=False,
        aggregation=aggregation,
        pad_id=0,
    )


def test_a_custom_weight_gets_mask_advantages_and_logprobs(module):
    custom = batch(f"{module}:surprising")
    np.testing.assert_array_equal(custom.weights, [[0, 1, 0, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(custom.loss_mask, [[1, 1, 0, 0], [1, 1, 1, 1]])
    np.testing.assert_array_equal(batch(f"{module}:sequence").weights, batch("sequence").weights)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("constant", r"shape \(\), \[B, C\] is \(2, 4\)"),
        ("broken", "not finite"),
        ("of_two", r"failed: TypeError.*f\(mask, advantages, logprobs\)"),
        ("raising", "failed: ZeroDivisionError: no token; "),
        ("words", "failed: ValueError"),
    ],
)
def test_bad_weights(module, function, words):
    with pytest.raises(UserError, match=rf"'{module}:{function}'.*{words}") as caught:
        batch(f"{module}:{function}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("my_ideas:constant", r"returned the shape \(\), \[B, C\] is \(8, 8\)"),
        ("my_ideas:of_two", "failed: TypeError"),
        ("json:dumps", "failed: TypeError"),
        ("my_ideas:of_groups", ""),  # It gets the rows of the run.
        ("my_ideas:surprising", ""),
    ],
)
def test_bad_weights_are_refused_before_the_model_is_loaded(tiny, module, function, words):
    changes = {"eval.every": 0, "rl.aggregation": function, "model.source": "/absent"}
    rewards = {"low": (tiny_run.low_fraction, 1.0)}
    match = f"loss weight '{function}'.*{words}" if words else "/absent"
    with pytest.raises(UserError, match=match) as caught:
        prepare(tiny.config(changes), rewards, schedule_steps=4)
    assert "\n" not in str(caught.value)


def make_own(part, function):
    """Makes the part of a run that the user's function is."""
    if part == "advantage":
        advantages.custom_advantages(function, np.ones((2, 4)), {})
    elif part == "noise schedule":
        options = {"sigma_start": 0.1, "sigma_end": 0.01, "stages": 2, "total_steps": 4}
        aqn.sigma_schedule(function, **options)
    elif part == "optimizer":
        rates = 1e-3, "constant", 0.1, 0, 10, 0.9, 0.95, 1e-8, 0.0, 1.0
        make_optimizer(OptimizerConfig(*rates, name=function))
    elif part == "loss weight":
        batch(function)
    else:
        loss_config(function)


@pytest.mark.parametrize(
    "part", ["advantage", "noise schedule", "optimizer", "loss weight", "loss"]
)
def test_a_function_that_exits_is_named(module, tmp_path, part):
    refused(
        f"{part} '{module}:leaving' failed: SystemExit: 3; it", make_own, part, "my_ideas:leaving"
    )
    (tmp_path / "my_exit.py").write_text("import sys\nsys.exit()\n")
    refused(f"{part} 'my_exit:f': cannot import my_exit: SystemExit", make_own, part, "my_exit:f")


@pytest.mark.parametrize("name", ["absent_module:f", "my_ideas:absent"])
def test_an_unknown_weight_is_named_at_once(module, name):
    with pytest.raises(UserError, match=f"loss weight '{name}'"):
        loss_config("grpo", aggregation=name)


@pytest.mark.slow  # `test_public_api` trains with an own loss
@pytest.mark.parametrize(
    ("own", "aggregation", "other"), [("pg", "sequence", "grpo"), ("asymmetric", "", "dapo")]
)
def test_an_own_loss_trains(own, aggregation, other, tiny, tmp_path, module):
    """The plain policy gradient is GRPO where nothing is clipped, and another loss is another."""
    changes = {"steps": 2, "eval.every": 0, "rl.updates_per_rollout": 1}
    found = []
    for name, aggregated in ((f"{module}:{own}", aggregation), (other, "")):
        config = tiny.config(changes | {"rl.loss": name, "rl.aggregation": aggregated})
        rows = tiny_run.results(train(config, workdir=tmp_path / name))
        assert ("clip_fraction" in rows[0]) == (":" not in name)
        found.append([row["grad_norm"] for row in rows])
    ours, theirs = found
    if own == "pg":
        assert ours == pytest.approx(theirs, rel=1e-5)
    else:
        assert ours != pytest.approx(theirs, rel=0.01)


def test_an_own_loss_gets_the_rows_whose_advantage_is_0(module):
    """Only of the built-in losses it is known that they have no gradient there."""
    batch = row_batch(
        [[1, 2]] * 2,
        np.ones((2, 3), int),
        np.full(2, 3),
        np.ones(2, bool),
        np.zeros(2),
        np.full((2, 3), -1.0),
        mask_truncated=False,
        aggregation="token",
        pad_id=0,
    )
    assert rows_that_teach(batch, loss_config(f"{module}:pull")).all()
    assert not rows_that_teach(batch, loss_config("dapo")).any()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("total", r"returned the shape \(\) for 4 tokens"),
        ("on_numpy", "failed: TracerArrayConversionError"),
        ("of_two", "failed: TypeError"),
        ("absent", "has no function"),
    ],
)
def test_a_bad_loss_is_refused_before_training(module, function, words):
    with pytest.raises(UserError, match=rf"loss '{module}:{function}'.*{words}") as caught:
        loss_config(f"{module}:{function}")
    assert "\n" not in str(caught.value)


def test_a_loss_that_is_not_finite_is_named(tiny, tmp_path, module):
    changes = {"steps": 4, "eval.every": 0, "rl.loss": f"{module}:endless"}
    with pytest.raises(UserError, match=f"check that {module}:endless is finite"):
        train(tiny.config(changes), workdir=tmp_path / "run")


def test_processes_compare_the_code_of_their_loss(module):
    loss = loss_config(f"{module}:pg")
    found = {}
    setup = types.SimpleNamespace(
        update=types.SimpleNamespace(loss=loss, recompute=()),
        model=types.SimpleNamespace(fingerprint="f" * 16),
        memory=types.SimpleNamespace(buffer_tokens=48),
        processes=types.SimpleNamespace(check_same=lambda fields, _: found.update(fields)),
        reference_digest=None,
        teacher_digest=None,
    )
    begin._check_processes(setup, {}, None)
    assert found[f"code of {module}:pg"] == losses.custom_loss_digest(f"{module}:pg", 48)[:16]


def test_an_edited_loss_is_another_program(module, tmp_path):
    """Programs are cached by their keys, and an import path says nothing of its code."""

    def key(text):
        (tmp_path / "my_ideas.py").write_text(text)
        importlib.invalidate_caches()
        sys.modules.pop("my_ideas", None)
        config, params = tiny_policy("llama", num_layers=1)
        state = init_state(Trainable(lora=random_lora(config), params={}), optax.sgd(1.0))
        table = operations(
            state,
            params,
            passes={},
            noise=None,
            buffer_tokens=48,
            update_config=UpdateConfig(model=config, loss=loss_config(f"{module}:pg")),
            optimizer=OptimizerConfig(1e-3, "constant", 0.1, 0, 10, 0.9, 0.95, 1e-8, 0.0, 1.0),
        )
        return table["add_gradient"].key

    assert key(MODULE) == key(MODULE + "# and a comment")
    assert key(MODULE) != key(MODULE.replace("return -ratio * adv", "return -5.0 * ratio * adv"))


def test_an_own_loss_has_no_dual_clip(module):
    with pytest.raises(UserError, match="does not clip the ratio"):
        loss_config(f"{module}:pg", dual_clip=3.0)


BASE = "return -ratio * adv"
# Pieces of a loss before and after an edit; of the first, four tokens show everything.
EDITS = {
    "code": (BASE, "return -2.0 * ratio * adv"),
    "size of a buffer": (
        "return -ratio * adv * (1.0 if ratio.shape[0] < 100 else 1.0)",
        "return -ratio * adv * (1.0 if ratio.shape[0] < 100 else 7.0)",
    ),
    "gradient alone": (
        "return -jax.lax.stop_gradient(ratio) * adv * logprobs",
        "return -ratio * adv * logprobs",
    ),
    "table": (
        "return -ratio * adv * row(0)[idx(adv)]",
        "return -ratio * adv * row(1)[idx(adv)]",
    ),
    "helper": (
        "return -ratio * adv * by_size(ratio, 1.0)",
        "return -ratio * adv * by_size(ratio, 7.0)",
    ),
    "backward pass": ("return -doubled(ratio) * adv", "return -tripled(ratio) * adv"),
}
HELPERS = """
import jax
import jax.numpy as jnp
import numpy as np

TABLE = np.arange(10000, dtype=np.float32).reshape(2, -1)
TABLE[1] = TABLE[0]
TABLE[1, 2500] = 1e6

def row(number):
    return jnp.asarray(TABLE[number])

def idx(adv):
    return (adv * 100).astype(int)

def by_size(ratio, factor):
    return factor if ratio.shape[0] > 100 else 1.0

def with_slope(slope):
    same = jax.custom_vjp(lambda x: x)
    same.defvjp(lambda x: (x, None), lambda _, g: (slope * g,))
    return same

doubled, tripled = with_slope(2.0), with_slope(3.0)

def loss(ratio, adv, logprobs, mask):
    return CHOICE(ratio, adv, logprobs)
"""


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("where", ["function", "closure"])
def test_the_digest_of_a_loss_sees_all_of_it(edit, where, monkeypatch):
    """A cached program of the code before the edit would be run."""

    def digest(line):
        namespace = {"__name__": "my_losses"}
        exec(f"{HELPERS}\ndef choice(ratio, adv, logprobs):\n    {line}\n", namespace)
        namespace["CHOICE"] = namespace["choice"]
        module = types.ModuleType("my_losses")
        module.f = namespace["loss"]
        if where == "closure":
            chosen = namespace["choice"]
            module.f = lambda ratio, adv, logprobs, mask: chosen(ratio, adv, logprobs)
        monkeypatch.setitem(sys.modules, "my_losses", module)
        return losses.custom_loss_digest("my_losses:f", 128)

    before, after = map(digest, EDITS[edit])
    assert before != after
    assert before == digest(EDITS[edit][0])


def test_the_source_of_a_loss_is_part_of_its_digest(monkeypatch):
    """Where a loss depends on another number of tokens than that of the program."""

    def first(ratio, adv, logprobs, mask):
        return -ratio * adv * (2.0 if ratio.shape[0] == 37 else 1.0)

    def second(ratio, adv, logprobs, mask):
        return -ratio * adv * (7.0 if ratio.shape[0] == 37 else 1.0)

    module = types.ModuleType("my_losses")
    monkeypatch.setitem(sys.modules, "my_losses", module)
    digests = []
    for module.f in (first, second):
        digests.append(losses.custom_loss_digest("my_losses:f"))
    assert digests[0] != digests[1]
