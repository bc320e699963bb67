"""The plan of a run against the memory that XLA says of its compiled programs."""

import dataclasses
from unittest import mock

import jax
import numpy as np
import pytest
import tiny_checkpoints
import tiny_run
from refusal import refused

from qerl_jax.memory import report
from qerl_jax.memory.report import check_programs, check_sampler
from qerl_jax.memory.run_plan import Device
from qerl_jax.policy.layers import attention
from qerl_jax.policy.policy import Policy
from qerl_jax.rewards.from_config import rewards_of
from qerl_jax.training import compile as training_compile
from qerl_jax.training.begin import first_progress
from qerl_jax.training.setup import prepare

POOL = 10**9
# Long replies and conversations, of which the scores would be by far the largest array.
LONG = {
    "environment.function": "environment_cases:Echo",
    "environment.max_turns": 3,
    "data.max_prompt_tokens": 12,
    "rollout.max_rows": 5,
    "rewards.correctness.function": "qerl_jax.rewards.functions:environment_reward",
    "environment.reply_tokens": 500,
    "rollout.max_new_tokens": 200,
    "eval.max_new_tokens": 200,
}
TEMPLATE = (
    "{% for message in messages %}{{ message.content }} "
    "{% if message.role == 'assistant' %}<|im_end|> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}t1 t2{% endif %}"
)
FEW = 100_000  # bytes of what no plan names


@pytest.fixture(scope="module")
def compiled(compile_cache, tmp_path_factory):
    """The plan of a run with an environment, and the bytes of its programs by part."""
    found = []
    folder = tmp_path_factory.mktemp("long")
    tiny = tiny_run.write_tiny(folder, compile_cache, num_layers=2, max_position=4096)
    tiny_checkpoints.write_tokenizer(tiny.model, chat_template=TEMPLATE)
    config = tiny.config(LONG)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_SCORES", 2**20)
        patch.setattr(training_compile, "check_programs", lambda *args: found.append(args) or [])
        setup = prepare(config, rewards_of(config, None), schedule_steps=1)
        plan = dataclasses.replace(setup.memory, device=Device(POOL, "xla", 0.0))
        setup = dataclasses.replace(setup, memory=plan)
        state = first_progress(setup).state
        setup, _ = training_compile.compile_programs(setup, state, trains=True, evaluates=True)
    return *found[0], setup, Policy(setup.params, state.trainable.lora)


def test_every_program_takes_what_the_plan_has_for_it(compiled):
    plan, programs, _, _ = compiled
    rollout = {"dequantize", "prefill", "insert", "fuse_adapter", "decode", "take", "put"}
    rollout |= {"extend", "resume"}
    update = {"zero_totals", "add_gradient", "apply_gradient", "buffer_kl"}
    assert {part: set(sizes) for part, sizes in programs.items()} == {
        "rollout": rollout,
        "evaluation": rollout,
        "update": update,
    }
    for part, sizes in programs.items():
        for name, size in sizes.items():
            planned = plan.program_bytes(part, name)
            assert size <= planned + FEW, (part, name)
            if name in ("extend", "add_gradient"):
                assert size >= 0.6 * planned, (part, name)
    assert check_programs(plan, programs) == []


@pytest.mark.parametrize("part", ["rollout", "evaluation", "update"])
def test_a_program_that_does_not_fit_is_refused_by_name(compiled, part):
    plan, programs, _, _ = compiled
    name = "add_gradient" if part == "update" else "extend"
    field = "train.buffer_tokens" if part == "update" else "rollout.max_rows"
    for taken, refuses in ((POOL, True), (0.97 * POOL, False)):
        other = programs | {part: programs[part] | {name: int(taken - plan.weights)}}
        if refuses:
            said = refused(
                f"the program '{name}' of the {part} takes 1.0 GB", check_programs, plan, other
            )
        else:
            (said,) = check_programs(plan, other)
        assert field in said
        limit = "more than the 1.0 GB that JAX has" if refuses else "of the 1.0 GB that JAX has"
        assert limit in said
    # Without a known memory, as on a CPU, nothing is compared.
    unknown = dataclasses.replace(plan, device=Device(None, "xla", 0.0))
    assert check_programs(unknown, other) == []


def test_an_evaluation_outside_of_a_run_has_the_same_plan(compiled, monkeypatch):
    """`evaluate` and `sample` plan by the sampler and the policy, before they begin."""
    plan, programs, setup, policy = compiled
    compared, compare = {}, report._compare

    def recording(device, title, size, *, planned, held, remedy):
        compared[title.split("'")[1]] = size, planned, held
        return compare(device, title, size, planned=planned, held=held, remedy=remedy)

    monkeypatch.setattr(report, "_compare", recording)
    monkeypatch.setattr(attention, "_SCORES", 2**20)
    in_use = plan.weights + plan.training
    pool = {"bytes_limit": POOL, "bytes_in_use": in_use}
    monkeypatch.setattr(jax, "local_devices", lambda: [mock.Mock(memory_stats=lambda: pool)])
    arguments = setup.eval_sampler, setup.key, policy
    assert check_sampler(*arguments, remedy="--x") == []
    assert compared.keys() == programs["evaluation"].keys()
    for name, (size, planned, held) in compared.items():
        assert size == programs["evaluation"][name]
        # The plan of a run has the adapter as the kernels of a Hopper GPU read it, padded.
        padding = plan.held_bytes("evaluation", name, compared) - held
        assert 0 <= padding < plan.evaluation.policy_copy
        if name != "fuse_adapter":
            assert planned == plan.program_bytes("evaluation", name)
    pool["bytes_in_use"] = POOL - 1000
    said = r"more than the 1\.0 GB that JAX has; lower --x"
    refused(said, check_sampler, *arguments, remedy="--x")
    pool["bytes_in_use"] = 51 * POOL  # The numbers are right where what is held alone is too much.
    said = r"what is held meanwhile takes 51\.\d GB: together 51\.\d GB, more than the 1\.0 GB"
    refused(said, check_sampler, *arguments, remedy="--x")
    pool.clear()  # As on a CPU, of which the memory is unknown.
    assert check_sampler(*arguments, remedy="--x") == []


def test_long_prompts_attend_in_blocks(monkeypatch):
    """On a device whose attention is XLA's: the scores of all tokens do not exist together."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 500, heads, 16)).astype(np.float32) for heads in (4, 2, 2))
    lengths = np.array([500, 300], np.int32)

    def compiled():
        return jax.jit(lambda *x: attention.attend(*x)).lower(q, k, v, lengths).compile()

    whole = compiled()
    monkeypatch.setattr(attention, "_SCORES", 2**20)
    blocks = compiled()
    size, most = (x.memory_analysis().temp_size_in_bytes for x in (blocks, whole))
    assert size < 5 * 2**20 < most
    for row, length in enumerate(lengths):
        expected = whole(q, k, v, lengths)[row, :length]
        np.testing.assert_allclose(blocks(q, k, v, lengths)[row, :length], expected, atol=1e-5)
