"""Whole optimizer steps equal those of TRL (generator: golden/make_trl_step.py)."""

import json
import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from row_batch import row_batch
from row_loss import loss_config
from safetensors.numpy import load_file

from qerl_jax.compile.operation import Programs
from qerl_jax.data.prompts import Problem, Prompt, TextRow
from qerl_jax.policy.lora import LoraConfig
from qerl_jax.policy.trainable import (
    PARAMETERS,
    Trainable,
    current_policy,
    trained_params,
)
from qerl_jax.rl.advantages import group_advantages
from qerl_jax.rl.packing import pack
from qerl_jax.rl.programs import functions
from qerl_jax.rl.train_step import OptimizerConfig, UpdateConfig, init_state, make_optimizer
from qerl_jax.rollout.scheduler import pad_prompts
from qerl_jax.training import text_step
from qerl_jax.training.step import update
from qerl_jax.training.text_step import TEXT_LOSS, text_batch
from qerl_jax.weights.load import load
from qerl_jax.weights.names import layer_module, peft_tensor
from qerl_jax.weights.peft import load_peft_adapter
from qerl_jax.weights.save import checkpoint_tensors

GOLDEN = pathlib.Path(__file__).parent / "golden"
STEP = GOLDEN / "trl_step"
# An optimizer that updates nothing and keeps the gradient as its state.
KEEP_GRADIENT = optax.GradientTransformation(
    init=lambda params: jax.tree.map(jnp.zeros_like, params),
    update=lambda grad, state, params: (grad, grad),
)


def assert_close(actual, expected, name=""):
    """Asserts that two tensors differ by at most 1e-5 of the norm of the expected tensor."""
    expected = np.asarray(expected)
    distance = np.linalg.norm(np.asarray(actual, np.float64) - expected)
    assert distance <= 1e-5 * np.linalg.norm(expected), f"{name}: {distance}"


def assert_tensors(found, tensors, prefix):
    """Asserts that tensors equal the golden tensors whose names begin with a prefix."""
    assert found.keys() == {n.removeprefix(prefix) for n in tensors if n.startswith(prefix)}
    for name, value in found.items():
        assert_close(value, tensors[prefix + name], name)


def adapter_tensors(lora):
    """Returns a tree of the adapter's shape under PEFT's names."""
    return {
        peft_tensor(layer, projection, matrix): value
        for layer, adapters in enumerate(lora.layers)
        for projection, matrices in adapters.items()
        for matrix, value in matrices.items()
    }


def trained_tensors(trainable, model):
    """Returns the trained tensors under PEFT's or, without an adapter, Hugging Face's names."""
    if trainable.lora is None:
        return dict(checkpoint_tensors(trainable.params, model.config, dtype="float32"))
    norms = {
        f"base_model.model.{layer_module(i, name)}.weight": value
        for i, layer in enumerate(trainable.params.get("layers", []))
        for name, value in layer.items()
    }
    return adapter_tensors(trainable.lora) | norms


def step_batch(aggregation, tensors):
    """Returns the fixed rollout as a batch."""
    rollout = json.loads((STEP / "rollout.json").read_text())
    completions = [ids for group in rollout["completions"] for ids in group]
    advantages = group_advantages(np.array(rollout["rewards"]), scale="group", eps=1e-4).reshape(-1)
    np.testing.assert_allclose(advantages, tensors["advantages"], atol=1e-6)
    padded, lengths = pad_prompts(completions, width=tensors["mask"].shape[1], pad_id=0)
    group_size = len(rollout["completions"][0])
    batch = row_batch(
        [prompt for prompt in rollout["prompts"] for _ in range(group_size)],
        padded,
        lengths,
        np.array([ids[-1] == rollout["eos_id"] for ids in completions]),
        advantages,
        np.full(padded.shape, np.nan),
        mask_truncated=True,
        aggregation=aggregation,
        pad_id=0,
    )
    np.testing.assert_array_equal(batch.loss_mask, tensors["mask"])
    return batch


@pytest.mark.parametrize(
    ("variant", "buffer_tokens"),
    [
        # `test_golden_losses` has its loss; the others have other losses of one step.
        pytest.param("grpo", 64, marks=pytest.mark.slow),
        pytest.param("dapo", 512, marks=pytest.mark.slow),  # two updates begin with one
        ("dapo_kl", 64),
        pytest.param("dapo_two_updates", 512, marks=[pytest.mark.e2e, pytest.mark.slow]),
        ("dapo_mini_batches", 512),
        pytest.param("lora+norms", 64, marks=pytest.mark.slow),  # norms are in all parameters
        ("full", 64),
    ],
)
def test_optimizer_step(variant, buffer_tokens):
    tensors = load_file(STEP / f"{variant}.safetensors")
    record = json.loads((STEP / f"{variant}.json").read_text())
    settings = record["settings"]
    model = load(str(STEP), format="bf16", dtype="float32")
    parameters = variant if variant in PARAMETERS else "lora"
    lora = None
    if parameters != "full":
        lora = load_peft_adapter(STEP / "adapter", model.config, LoraConfig(rank=4, alpha=8)).lora
    trainable = Trainable(lora, trained_params(model.params, parameters))
    loss = loss_config(
        settings["loss_type"],
        clip_low=settings["epsilon"],
        clip_high=settings["epsilon_high"],
        kl_coef=settings["beta"],
        kl_grad="unbiased" if settings.get("use_bias_correction_kl") else "k3",
    )
    optimizer_config = OptimizerConfig(
        learning_rate=settings["learning_rate"],
        schedule=settings["lr_scheduler_type"],
        final_fraction=0.1,
        warmup_updates=settings["warmup_steps"],
        total_updates=len(record["updates"]),
        b1=settings["adam_beta1"],
        b2=settings["adam_beta2"],
        eps=settings["adam_epsilon"],
        weight_decay=settings["weight_decay"],
        max_grad_norm=settings["max_grad_norm"],
    )
    batch, count = step_batch(loss.aggregation, tensors), settings.get("steps_per_generation", 1)
    batch = batch.replace(weights=count * batch.weights)
    mask = batch.loss_mask > 0
    optimizer = optax.chain(KEEP_GRADIENT, make_optimizer(optimizer_config))
    config = UpdateConfig(model.config, loss)
    temperature = np.float32(settings["temperature"])
    programs = Programs(functions(config, optimizer))
    # TRL also forwards rows that teach nothing, and its metrics count them.
    in_loss, every = mask.any(axis=1), range(len(mask))
    parts = [np.isin(every, one.get("rows", every)) for one in record["updates"][:count]]

    def packed(part, **changes):
        return pack(batch.replace(**changes), in_loss & parts[part], buffer_tokens=buffer_tokens)

    def assert_logprobs(trainable, name, part=0):
        """Compares with what the goldens record by row, in the order of the buffers."""
        policy = current_policy(model.params, trainable)
        for buffer in packed(part, rollout_logprobs=tensors[name]):
            found = programs["buffer_logprobs"](policy, trainable.lora, buffer, temperature)
            inside = buffer.mask > 0
            assert_close(np.asarray(found)[inside], buffer.rollout_logprobs[inside])

    mini_batches = [packed(part) for part in range(count)]
    if settings["beta"]:
        assert_logprobs(Trainable(None, {}), "ref_logprobs")
        for buffers in mini_batches:
            for i, buffer in enumerate(buffers):
                found = programs["buffer_logprobs"](model.params, None, buffer, temperature)
                buffers[i] = buffer.replace(ref_logprobs=found)
    begun, numbers = [], iter(range(len(record["updates"])))

    def zero_totals(trainable):
        number = len(begun)
        assert_logprobs(trainable, f"logprobs.{number}", number % count)
        begun.append(number)
        return programs["zero_totals"](trainable)

    def apply_gradient(state, totals):
        state, metrics = programs["apply_gradient"](state, totals)
        number = next(numbers)
        expected = record["updates"][number]
        if parameters != "full":
            assert_tensors(adapter_tensors(state.opt_state[0].lora), tensors, f"grad.{number}.")
        assert_tensors(trained_tensors(state.trainable, model), tensors, f"after.{number}.")
        assert_close(metrics["loss"], expected["loss"], "loss")
        assert_close(metrics["grad_norm"], expected["grad_norm"], "grad_norm")
        assert_close(metrics["train_entropy"], expected["entropy"], "entropy")
        np.testing.assert_allclose(metrics["clip_fraction"], expected["clip_fraction"], atol=1e-6)
        assert not metrics["update_skipped"]
        return state, metrics

    watched = {name: programs[name] for name in ("add_gradient", "old_logprobs")}
    watched |= {"zero_totals": zero_totals, "apply_gradient": apply_gradient}
    _, metrics, updates = update(
        init_state(trainable, optimizer),
        model.params,
        mini_batches,
        None,
        temperature,
        programs=watched,
        number=settings["num_iterations"],
    )
    assert updates == len(record["updates"]) == len(begun)
    assert metrics["loss"] == pytest.approx(
        np.mean([one["loss"] for one in record["updates"]]), 1e-5
    )


@pytest.mark.parametrize("variant", [pytest.param("rows", marks=pytest.mark.slow), "packed"])
def test_supervised_step(variant, monkeypatch):
    """The loss and the gradient of rows of text (generator: golden/make_trl_sft.py)."""
    expected = load_file(GOLDEN / "trl_sft.safetensors")
    model = load(str(GOLDEN / "trl_step"), format="bf16", dtype="float32")
    adapter = load_peft_adapter(
        GOLDEN / "trl_step" / "adapter", model.config, LoraConfig(rank=4, alpha=8)
    )
    problem = Problem("", "")
    prompts = []
    for ids, learned in json.loads((GOLDEN / "trl_sft.json").read_text())["rows"]:
        start = learned.index(1)
        row = TextRow(tuple(ids[:start]), tuple(ids[start:]), tuple(map(bool, learned[start:])))
        prompts.append(Prompt(problem, "", row.prompt, (row,)))
    batch = text_batch(prompts, 0)
    buffers = pack(batch, batch.lengths > 0, buffer_tokens={"rows": 24, "packed": 64}[variant])
    assert len(buffers) == {"rows": 2, "packed": 1}[variant]
    programs = Programs(functions(UpdateConfig(model.config, TEXT_LOSS), KEEP_GRADIENT))
    one = np.float32(1)
    state = init_state(adapter, KEEP_GRADIENT)
    monkeypatch.setattr(text_step, "_ROWS_AT_ONCE", 2)
    sampler = types.SimpleNamespace(tokenizer=types.SimpleNamespace(pad_id=0))
    setup = types.SimpleNamespace(
        mesh=None,
        buffer_tokens=len(buffers[0].tokens),
        collect=types.SimpleNamespace(sampler=sampler),
    )
    seen = []

    def held_out(params, trainable):
        setup.params = params
        return text_step.held_out_loss(
            setup,
            types.SimpleNamespace(state=types.SimpleNamespace(trainable=trainable)),
            prompts,
            programs=programs,
            on_progress=lambda *counts: seen.append(counts),
        )

    loss = held_out(model.params, adapter)
    assert_close(loss, expected[f"loss.{variant}"], "held-out loss")
    assert seen == [(2, 7), (4, 13), (5, 34)]
    norms = jax.tree.map(lambda x: 1.5 * x, trained_params(model.params, "lora+norms"))
    with_norms = Trainable(adapter.lora, norms)
    merged = held_out(current_policy(model.params, with_norms), adapter)
    assert held_out(model.params, with_norms) == merged != loss
    state, metrics, _ = update(
        state, model.params, [buffers], None, one, programs=programs, number=1
    )
    assert_close(metrics["loss"], expected[f"loss.{variant}"], "loss")
    assert_tensors(adapter_tensors(state.opt_state.lora), expected, f"grad.{variant}.")
