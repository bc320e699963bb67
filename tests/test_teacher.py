"""On-policy distillation: the loss against NumPy, the teacher's tokens, its plan, and runs."""

import dataclasses
import itertools
import json
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_checkpoints
import tiny_run
import tokenizers
import trees
from environment_cases import CHANGES, TEMPLATE
from row_batch import row_batch
from row_loss import loss_config, row_loss
from safetensors.numpy import load_file, save_file
from tiny_checkpoints import VOCAB
from tiny_model import random_lora, random_tokens, tiny_policy

import qerl_jax.training.step
from qerl_jax.config.experiments import grpo_gsm8k
from qerl_jax.errors import UserError
from qerl_jax.memory.report import check_fits, format_plan
from qerl_jax.memory.run_plan import Device, PlannedTeacher, plan_run
from qerl_jax.memory.update_plan import LongestRows, plan_update
from qerl_jax.policy.architectures import ARCHITECTURES
from qerl_jax.policy.lora import LoraConfig
from qerl_jax.policy.trainable import Trainable
from qerl_jax.quantization.base import describe_cost
from qerl_jax.rl import train_step
from qerl_jax.rl.losses import summarize_metrics
from qerl_jax.rl.packing import pack
from qerl_jax.training.dry_run import dry_run
from qerl_jax.training.loop import train
from qerl_jax.training.teacher import check_tokens, make_teacher, plan_teacher
from qerl_jax.training.validate import validate
from qerl_jax.weights.load import load
from qerl_jax.weights.peft import load_peft_adapter, save_peft_adapter

# --- The loss -------------------------------------------------------------------------------------


SLOW_LOSSES = "gspo_token", "cispo", "sapo", "dr_grpo"


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def test_the_gradient_is_that_of_the_reverse_kl():
    """Over all tokens with the probabilities of the policy: its expectation on samples."""
    policy, teacher = np.random.default_rng(0).standard_normal((2, 3, 7)).astype(np.float32)
    p, q = log_softmax(policy.astype(np.float64)), log_softmax(teacher.astype(np.float64))
    kl = (np.exp(p) * (p - q)).sum(axis=-1, keepdims=True)
    config = loss_config("dapo", teacher_coef=0.5)

    def loss(logits):
        return row_loss(
            jax.nn.log_softmax(logits),
            config=config,
            advantages=jnp.zeros(3),
            mask=np.ones((3, 7), np.float32),
            weights=np.exp(p).astype(np.float32),
            teacher_logprobs=q.astype(np.float32),
        )

    (value, _), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(policy)
    np.testing.assert_allclose(value, 0.5 * kl.sum(), rtol=1e-5)
    np.testing.assert_allclose(gradient, 0.5 * np.exp(p) * (p - q - kl), atol=1e-6)


@pytest.mark.parametrize("coef", [0.25, 1.0])
def test_the_reverse_kl_is_added_to_the_advantages(coef):
    """In a second update, whose ratio is clipped; and nothing is read outside of the mask."""
    rng = np.random.default_rng(1)
    old, teacher = rng.uniform(-3, -0.1, (2, 4, 6)).astype(np.float32)
    new = (old + rng.normal(0, 0.4, old.shape)).astype(np.float32)
    mask = (np.arange(6) < np.array([[6], [2], [5], [1]])).astype(np.float32)
    advantages = np.array([1.0, -0.5, 0.0, 0.3], np.float32)
    weights = mask / mask.sum()
    a = advantages[:, None] - coef * (old - teacher)
    ratio = np.exp(new - old)
    expected = -np.minimum(ratio * a, np.clip(ratio, 0.8, 1.28) * a)
    inputs = {"advantages": advantages, "mask": mask, "weights": weights}
    inputs |= {"old_logprobs": np.where(mask, old, np.nan)}
    inputs |= {"teacher_logprobs": np.where(mask, teacher, np.nan)}
    config = loss_config("dapo", teacher_coef=coef)
    value, metrics = jax.jit(lambda new: row_loss(new, config=config, **inputs))(new)
    assert float(value) == pytest.approx((weights * expected).sum(), rel=1e-5)
    found = float(summarize_metrics(metrics)["teacher/reverse_kl"])
    assert found == pytest.approx(((old - teacher) * mask).sum() / mask.sum(), rel=1e-5)


@pytest.mark.parametrize(
    "name", ["grpo", *(pytest.param(x, marks=pytest.mark.slow) for x in SLOW_LOSSES)]
)
def test_a_teacher_equal_to_the_policy_has_no_loss_and_no_gradient(name):
    old = np.random.default_rng(2).uniform(-9, 0, (2, 5)).astype(np.float32)
    ones = np.ones_like(old)

    def loss(logprobs):
        options = {"advantages": jnp.zeros(2), "mask": ones, "weights": ones}
        options |= {"old_logprobs": old, "teacher_logprobs": old}
        return row_loss(logprobs, config=loss_config(name, teacher_coef=1.0), **options)[0]

    value, gradient = jax.jit(jax.value_and_grad(loss))(old)
    assert float(value) == 0
    assert not np.any(gradient)


# --- Its log-probabilities ------------------------------------------------------------------------


def test_the_teacher_knows_fewer_tokens_and_no_routes():
    """Others are read as its last one and hardly ever written; routes are not taken."""
    config, params = tiny_policy("qwen3_moe", num_layers=1)
    rollout = random_tokens(1, 5), np.array([5]), np.array([True]), np.zeros(1), np.zeros((1, 5))
    options = {"mask_truncated": False, "aggregation": "token", "pad_id": 0}
    batch = row_batch([random_tokens(4, seed=1).tolist()], *rollout, **options)
    (buffer,) = pack(batch, np.array([True]), buffer_tokens=16)
    unknown = dataclasses.replace(
        buffer,
        tokens=np.where(buffer.tokens == buffer.tokens[1], VOCAB + 5, buffer.tokens),
        targets=np.where(np.arange(16) == 1, VOCAB + 9, buffer.targets),
        routes=np.zeros_like(config.empty_routes(16)),
    )
    last = dataclasses.replace(
        buffer,
        tokens=np.where(buffer.tokens == buffer.tokens[1], VOCAB - 1, buffer.tokens),
        targets=np.where(np.arange(16) == 1, VOCAB - 1, buffer.targets),
    )
    policy = params, random_lora(config)
    one, static = np.float32(1), {"model_config": config}
    found = train_step.teacher_logprobs(*policy, unknown, one, **static)
    expected = np.array(train_step.buffer_logprobs(*policy, last, one, **static))
    assert expected[1] > -20
    expected[1] = -20
    trees.assert_equal(np.asarray(found), expected)


# --- What it must be ------------------------------------------------------------------------------


def tokenizer(*words):
    """A tokenizer with these ids; words in angle brackets are special tokens."""
    vocabulary = {word: number for number, word in enumerate(words) if word}
    special = [word for word in vocabulary if word.startswith("<")]
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    backend.add_special_tokens(special)
    if [*words[-1:]] == special:  # The last ones can be outside of the model's own vocabulary.
        del vocabulary[special[0]]
        backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
        backend.add_special_tokens(special)
    return types.SimpleNamespace(backend=backend)


SOURCES = {"teacher.source": "big", "model.source": "small"}


def config_of(changes):
    config = grpo_gsm8k.get_config("qwen2.5-7b")
    config.update_from_flattened_dict(changes)
    return config


@pytest.mark.parametrize(
    "own",
    [
        ("a", "b", "<end>"),
        ("a", "b", "<end>", "more", "[PAD4]"),
        ("a", "b"),
        ("a", "b", "<end>", "[PAD3]", "[PAD4]"),
    ],
)
def test_tokens_are_compared_up_to_the_shorter_vocabulary(own):
    check_tokens(config_of(SOURCES), tokenizer("a", "b", "<end>", "[PAD3]"), tokenizer(*own))


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (("a", "b", "<stop>"), "1 of 3 ids differ, 2 is '<end>' and '<stop>'; take"),
        (("a", "c", "", "d"), "2 of 4 ids differ, 1 is 'b' and 'c', 2 is '<end>' and None; take"),
    ],
)
def test_other_tokens_are_refused_by_name(own, words):
    with pytest.raises(UserError, match=r"teacher\.source=big has other tokens than") as error:
        check_tokens(config_of(SOURCES), tokenizer("a", "b", "<end>", "d"), tokenizer(*own))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rl.loss": "gspo", "rl.updates_per_rollout": 1}, "pass rl.loss=gspo_token"),
        ({"rl.dynamic_sampling": True, "teacher.rewards": False}, "by rewards that are not"),
        ({"teacher.coef": 0.0}, "teacher.coef"),
        ({"rollout.group_size": 1}, "group_size=1: .*at least 2.*teacher.rewards=false"),
    ],
)
def test_what_does_not_work_with_a_teacher_is_refused(changes, words):
    alone = "rollout.group_size" in changes
    right = SOURCES if alone else {}
    validate(config_of(right | changes | {"teacher.rewards": not alone, "teacher.coef": 1.0}))
    with pytest.raises(UserError, match=words):
        validate(config_of(SOURCES | changes))


def test_a_curriculum_needs_several_completions_of_a_problem():
    changes = SOURCES | {"teacher.rewards": False, "data.curriculum": "learnability"}
    validate(config_of(changes | {"rollout.group_size": 2}))
    words = "curriculum='learnability' with rollout.group_size=1"
    with pytest.raises(UserError, match=words):
        validate(config_of(changes | {"rollout.group_size": 1}))


# --- Its memory -----------------------------------------------------------------------------------

H100 = Device(int(0.92 * 85e9), "mosaic", 9.0)


def plan(device=H100, **options):
    changes = {"rollout.prompts_per_step": 1, "rollout.group_size": 8}
    config = config_of(changes | {"rollout.max_new_tokens": 2048})
    return config, plan_run(config, ARCHITECTURES["qwen2.5-7b"], device, **options)


def test_the_plan_counts_the_teacher():
    teacher = PlannedTeacher(ARCHITECTURES["qwen2.5-32b"], format="nvfp4")
    _, alone = plan()
    config, taught = plan(teacher=teacher)
    assert taught.fits
    assert 20e9 < taught.teacher_weights < 22e9
    assert taught.held == alone.held + taught.teacher_weights
    assert taught.update.teacher > 1e9
    assert "teacher                  2" in format_plan(taught, config)
    assert "nvfp4; its pass over a buffer takes" in format_plan(taught, config)
    first, second = describe_cost(config, ARCHITECTURES["qwen2.5-7b"], teacher).splitlines()
    assert "the first step: about" in first
    assert "the first step: of the teacher, about" in second
    # Under another adapter the base of the policy takes no more memory.
    adapter = LoraConfig(rank=32, alpha=32.0)
    _, own = plan(teacher=PlannedTeacher(ARCHITECTURES["qwen2.5-7b"], adapter))
    assert own.teacher_weights == 4 * 80_740_352
    small = Device(24 * 10**9, "mma", 8.9)
    config, tight = plan(small, teacher=teacher)
    with pytest.raises(UserError, match=r"GB the teacher, and may take 22.8 GB of the 24.0 GB"):
        check_fits(tight, config, ARCHITECTURES["qwen2.5-7b"])


def test_a_mesh_that_does_not_divide_the_teacher_is_refused():
    config = config_of({"mesh.tensor": 8})
    teacher = PlannedTeacher(ARCHITECTURES["qwen2.5-7b"], format="nvfp4")
    with pytest.raises(UserError, match=r"^the teacher, a qwen2: mesh\.tensor=8 "):
        plan_run(config, ARCHITECTURES["qwen2.5-72b"], H100, teacher=teacher)


def test_buffers_are_such_that_the_pass_of_the_teacher_fits():
    rows, free = LongestRows(320, 2048, 8, 16), 2 * 10**9
    dtype = jnp.dtype("bfloat16")
    options = {"adapter": 40_000_000, "dtype": dtype, "buffer_tokens": 0, "recompute": None}
    model = ARCHITECTURES["qwen2.5-1.5b"]
    alone = plan_update(model, rows, free=free, **options)
    taught = plan_update(model, rows, free=free, teacher=ARCHITECTURES["qwen2.5-72b"], **options)
    assert alone.teacher == 0 < taught.teacher <= taught.bytes <= free
    assert taught.buffer_tokens < alone.buffer_tokens


# --- Runs -----------------------------------------------------------------------------------------

QUIET = {"eval.every": 0, "aqn.schedule": "off", "aqn.kl_every": 0, "rl.loss": "dapo"}
ALONE = QUIET | {"teacher.rewards": False, "optimizer.weight_decay": 0.0}


@pytest.fixture(scope="module")
def teacher(tiny, tmp_path_factory):
    """A run whose adapter is a teacher."""
    changes = QUIET | {"steps": 10, "optimizer.learning_rate": 0.05}
    return train(tiny.config(changes), workdir=tmp_path_factory.mktemp("teacher") / "run")


def kl_of(run):
    return [row["teacher/reverse_kl"] for row in tiny_run.results(run)]


@pytest.mark.slow
def test_a_run_whose_teacher_is_its_policy_stays_where_it_is(tiny, teacher, tmp_path):
    own = {"lora.init": str(teacher / "adapter"), "teacher.adapter": str(teacher), "steps": 2}
    run = train(tiny.config(ALONE | own), workdir=tmp_path / "run")
    for row in tiny_run.results(run):
        assert (row["loss"], row["grad_norm"], row["teacher/reverse_kl"]) == (0, 0, 0)
    before, after = (folder / "adapter/adapter_model.safetensors" for folder in (teacher, run))
    assert before.read_bytes() == after.read_bytes()


@pytest.mark.slow
def test_a_fresh_adapter_learns_from_a_trained_one(tiny, teacher, tmp_path):
    """Its reverse KL falls to a tenth; that of a control, which learns nothing, stays."""
    changes = ALONE | {"teacher.adapter": str(teacher / "adapter"), "steps": 25}
    changes |= {"rollout.prompts_per_step": 4, "optimizer.learning_rate": 0.02}
    control = changes | {"optimizer.learning_rate": 0.0}
    learned, fixed = (
        kl_of(train(tiny.config(one), workdir=tmp_path / name))
        for name, one in (("learned", changes), ("control", control))
    )
    assert learned[0] == fixed[0] > 0.2
    assert np.mean(learned[-5:]) < 0.1 * np.mean(fixed[-5:])
    assert np.mean(fixed[-5:]) > 0.5 * fixed[0]


@pytest.mark.slow
@pytest.mark.e2e
def test_killed_and_resumed(tiny, teacher, tmp_path, capsys):
    """With rewards, mini-batches, truncated rows left out, and a teacher with other weights."""
    changes = QUIET | {"steps": 4, "checkpoint.every": 2, "rl.mini_batches": 2}
    changes |= {"teacher.source": str(tiny.model), "teacher.adapter": str(teacher)}
    changes |= {"teacher.format": "bf16", "rl.kl_coef": 0.1, "rl.mask_truncated": True}
    whole = train(tiny.config(changes), workdir=tmp_path / "whole")
    assert all(value != 0 for value in kl_of(whole))
    calls = itertools.count(1)

    def correctness(*arguments):
        if next(calls) == 3 * 8 + 2:
            raise tiny_run.KilledError
        return tiny_run.even_end(*arguments)

    rewards = {"correctness": (correctness, 1.0), "format": (tiny_run.low_fraction, 0.1)}
    run = tmp_path / "run"
    with pytest.raises(tiny_run.KilledError):
        train(tiny.config(changes), workdir=run, rewards=rewards)
    rewards["correctness"] = tiny_run.even_end, 1.0
    other = shutil.copytree(run, tmp_path / "other")
    train(tiny.config(changes), workdir=run, rewards=rewards)
    assert "resuming after step 2" in capsys.readouterr().out
    assert tiny_run.results(run) == tiny_run.results(whole)
    for file in ("completions.jsonl", "adapter/adapter_model.safetensors"):
        assert (run / file).read_bytes() == (whole / file).read_bytes()
    with pytest.raises(UserError, match=r"the teacher .* is not what this run began with"):
        train(tiny.config(changes | {"teacher.adapter": ""}), workdir=other)


@pytest.mark.slow
def test_the_teacher_alone_needs_no_reward(tiny, teacher, tmp_path):
    """Where every reward fails, and with noise, which the teacher does not have."""

    def failing(*_):
        raise ValueError("no server")

    changes = ALONE | {"steps": 2, "teacher.adapter": str(teacher), "aqn.schedule": "constant"}
    changes |= {"aqn.sigma_start": 0.3, "aqn.correction": "noisy_forward", "rollout.group_size": 1}
    rewards = {"correctness": (failing, 1.0)}
    run = train(tiny.config(changes), workdir=tmp_path / "run", rewards=rewards)
    assert all(row["grad_norm"] > 0 for row in tiny_run.results(run))
    with pytest.raises(UserError, match="nothing can be learned"):
        train(
            tiny.config(changes | {"teacher.rewards": True, "rollout.group_size": 2}),
            workdir=tmp_path / "needs",
            rewards=rewards,
        )


@pytest.fixture
def random_teacher(tiny, tmp_path):
    """The model, and the folder of a random adapter of another rank and other targets."""
    model = load(str(tiny.model), format="nvfp4", dtype="float32")
    options = LoraConfig(rank=2, alpha=4.0, targets=("q_proj", "down_proj"))
    lora = random_lora(model.config, rank=2, targets=options.targets)
    trainable = Trainable(dataclasses.replace(lora, scale=options.scale), {})
    folder = tmp_path / "random"
    save_peft_adapter(folder, trainable, options, base_model=str(tiny.model))
    return model, load_peft_adapter(folder, model.config, options).lora, folder


def test_a_step_learns_the_log_probabilities_of_the_teacher(
    tiny, tmp_path, random_teacher, monkeypatch
):
    model, lora, folder = random_teacher
    seen, real = [], qerl_jax.training.step.update

    def update(state, params, mini_batches, *arguments, **options):
        seen.extend(buffer for buffers in mini_batches for buffer in buffers)
        return real(state, params, mini_batches, *arguments, **options)

    monkeypatch.setattr(qerl_jax.training.step, "update", update)
    changes = ALONE | {"teacher.adapter": str(folder), "steps": 1, "rollout.temperature": 0.7}
    changes |= {"rollout.group_size": 1, "rollout.prompts_per_step": 8}
    run, config = tmp_path / "run", {"model_config": model.config}
    train(tiny.config(changes), workdir=run)
    difference = []
    for buffer in seen:
        inside, bare = buffer.mask > 0, buffer.replace(teacher_logprobs=None)
        mine, other = (
            np.asarray(train_step.buffer_logprobs(model.params, x, bare, np.float32(0.7), **config))
            for x in (None, lora)
        )
        np.testing.assert_allclose(buffer.teacher_logprobs[inside], other[inside], atol=1e-4)
        assert not buffer.advantages.any()
        difference += (mine - other)[inside].tolist()
    (row,) = tiny_run.results(run)
    assert row["teacher/reverse_kl"] == pytest.approx(np.mean(difference), rel=1e-4)
    assert abs(row["teacher/reverse_kl"]) > 0.1
    file = folder / "adapter_model.safetensors"
    save_file({name: 1.01 * value for name, value in load_file(file).items()}, file)
    with pytest.raises(UserError, match=r"the teacher .* is not what this run began with"):
        train(tiny.config(changes | {"steps": 2}), workdir=run)


def test_the_adapter_of_a_run_is_its_best_one_or_the_last_one(tiny, tmp_path, random_teacher):
    model, _, folder = random_teacher
    config = tiny.config({"teacher.adapter": str(tmp_path / "run")})

    def rank():
        return plan_teacher(config, model.config, lambda _: model.config).adapter.rank

    last = shutil.copytree(folder, tmp_path / "run" / "adapter")
    saved = json.loads((last / "adapter_config.json").read_text())
    (last / "adapter_config.json").write_text(json.dumps(saved | {"r": 4}))
    assert rank() == 4
    shutil.copytree(folder, tmp_path / "run" / "best_adapter")
    assert rank() == 2


def test_an_adapter_of_another_base_is_refused(tiny, tmp_path, random_teacher):
    model, _, folder = random_teacher
    file = folder / "adapter_model.safetensors"
    tensors = {name.replace("layers.0", "layers.9"): x for name, x in load_file(file).items()}
    save_file(tensors, file)
    config = tiny.config({"teacher.adapter": str(folder)})
    with pytest.raises(UserError, match=rf"^teacher\.adapter={folder}: .* lacks"):
        make_teacher(config, model, None)


def test_an_error_says_that_the_model_is_the_teacher(tiny, tmp_path):
    few = tiny_run.write_model(tmp_path / "few", num_layers=1, max_position=16)
    for source, words in ((few, "the model has 16 positions"), ("/none", "is neither a folder")):
        config = tiny.config(QUIET | {"teacher.source": str(source), "teacher.format": "bf16"})
        for start in (train, dry_run):
            with pytest.raises(UserError, match=rf"^teacher\.source={source}: .*{words}"):
                start(config, workdir=tmp_path / "run")


def test_an_adapter_that_is_none_is_refused(tiny, tmp_path):
    changes = {"teacher.adapter": str(tmp_path)}
    with pytest.raises(UserError, match="neither a run with an adapter nor the folder of a PEFT"):
        train(tiny.config(QUIET | changes), workdir=tmp_path / "run")


@pytest.mark.slow
def test_a_calibrated_teacher_is_made_again_from_the_text_of_the_run(
    tiny, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    own = tiny_run.write_model(tmp_path / "teacher", num_layers=2)
    changes = QUIET | {"model.calibration": "gptq", "teacher.source": str(own)}
    changes |= {"optimizer.schedule": "constant", "checkpoint.every": 1}
    run = train(tiny.config(changes | {"steps": 2}), workdir=tmp_path / "run")
    assert capsys.readouterr().out.count("calibrated on") == 2
    saved = json.loads((run / "config.json").read_text())
    assert saved["calibration"] != saved["teacher_calibration"]
    again = shutil.copytree(run, tmp_path / "again")
    train(tiny.config(changes | {"steps": 3}), workdir=run)
    assert "calibrated on" not in capsys.readouterr().out
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other home"))
    train(tiny.config(changes | {"steps": 3}), workdir=again)
    assert capsys.readouterr().out.count("calibrated on") == 2
    assert tiny_run.results(again) == tiny_run.results(run)


@pytest.mark.slow
def test_experts_and_an_environment_have_a_teacher(tmp_path, compile_cache):
    """Routes of the rollout are replayed in the policy, and tokens of replies are no part."""
    tiny = tiny_run.write_tiny(tmp_path, compile_cache, model_type="qwen3_moe", num_layers=1)
    tiny_checkpoints.write_tokenizer(tiny.model, chat_template=TEMPLATE)
    own = tiny_run.write_model(tmp_path / "teacher", num_layers=1)
    taught = {"teacher.source": str(own), "teacher.format": "bf16", "eval.every": 0}
    taught |= {"lora.targets": ("q_proj", "v_proj"), "lora.expert_rank": 2}
    run = train(tiny.config(CHANGES | taught | {"steps": 2}), workdir=tmp_path / "run")
    for row in tiny_run.results(run):
        assert row["teacher/reverse_kl"] > 0
        assert row["grad_norm"] > 0
        assert row["routes_differ"] < 0.1
