"""Rollouts that talk to an environment, compiled for an H200 without one: the memory they take.

uv run --group aot pytest -n 0 -m aot
"""

import dataclasses
import types

import h200
import jax
import pytest
from jax.sharding import SingleDeviceSharding

from pallas_kernels import decode as decode_kernels
from pallas_kernels.decode import layer as decode_layer
from pallas_kernels.fp4_matmul import dispatch
from qerl_jax.config.experiments import grpo_gsm8k
from qerl_jax.memory.cards import CARDS
from qerl_jax.memory.run_plan import device_of, plan_run
from qerl_jax.policy import lora, transformer
from qerl_jax.policy.architectures import ARCHITECTURES
from qerl_jax.policy.lora import LoraConfig
from qerl_jax.policy.policy import Policy
from qerl_jax.rollout import programs
from qerl_jax.rollout.config import EngineConfig, SamplingConfig, turn_config
from qerl_jax.rollout.decode import UNTUNED, decode_config
from qerl_jax.rollout.shapes import plan_shapes

pytestmark = pytest.mark.aot

GB = 10**9


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Those of an H200, but for cuDNN, which is not there: attention of prompts is XLA's."""
    monkeypatch.setattr(dispatch, "supports_device", lambda: True)
    monkeypatch.setattr(decode_kernels, "supports_device", lambda _: True)
    for name in ("_sm90_attention_agrees", "_sm90_queries_agree", "_experts_agree", "delta_agrees"):
        monkeypatch.setattr(decode_layer, name, lambda: True)


def compiled(model, layers, changes):
    """The plan of a run on an H200, and the bytes of each program of a rollout by its name."""
    config = grpo_gsm8k.get_config(model)
    config.update_from_flattened_dict(changes | {"environment.function": "module:Class"})
    architecture = ARCHITECTURES[model]
    recurrent = tuple(number for number in architecture.recurrent_layers if number < layers)
    architecture = dataclasses.replace(architecture, num_layers=layers, recurrent_layers=recurrent)
    plan = plan_run(config, architecture, device_of(*CARDS["h200-141gb"]))
    sampling = SamplingConfig(max_new_tokens=config.rollout.max_new_tokens)
    engine = EngineConfig(
        max_rows=plan.rollout.rows, prefill_prompts=plan.rollout.prefill_prompts, chunk_steps=32
    )
    own = LoraConfig(rank=config.lora.rank, alpha=32.0, targets=tuple(config.lora.targets))
    turns = turn_config(config)
    adapter = jax.eval_shape(lambda: lora.init(jax.random.key(0), architecture, own))
    key = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32"))
    sizes = {}
    with h200.compiler() as compile_for_h200:
        sharding = SingleDeviceSharding(compile_for_h200.mesh.devices.flat[0])
        key, policy = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            (key, Policy(h200.policy(architecture), adapter)),
        )
        shapes = plan_shapes(
            policy.params,
            num_prompts=config.rollout.prompts_per_step,
            longest=config.data.max_prompt_tokens,
            group_size=config.rollout.group_size,
            model_config=architecture,
            sampling=sampling,
            engine=engine,
            turns=turns,
        )
        static = decode_config(
            architecture, sampling, engine, types.SimpleNamespace(eos_ids=(1,)), turns
        )
        for name, operation in programs.operations(key, policy, shapes, static).items():
            arguments = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operation.arguments()
            )
            program = compile_for_h200(operation.function, *arguments, **operation.static)
            memory = program.memory_analysis()
            size = memory.temp_size_in_bytes + memory.output_size_in_bytes
            sizes[name] = size - memory.alias_size_in_bytes
    return plan, sizes


@pytest.mark.parametrize(
    ("model", "layers", "changes", "most"),
    [
        (
            "qwen2.5-7b",
            28,
            {
                "environment.reply_tokens": 512,
                "environment.max_turns": 8,
                "rollout.max_new_tokens": 2048,
                "rollout.prompts_per_step": 16,
                "rollout.group_size": 8,
                "data.max_prompt_tokens": 1024,
            },
            1.2 * GB,
        ),
        # A prefill of recurrent layers once held inputs of all of them.
        (
            "qwen3.5-27b",
            8,
            {"environment.reply_tokens": 500, "data.max_prompt_tokens": 1024},
            3 * GB,
        ),
        (
            "qwen3.6-35b-a3b",
            4,
            {"environment.reply_tokens": 500, "data.max_prompt_tokens": 1024},
            4 * GB,
        ),
    ],
    ids=["attention", "recurrent", "experts"],
)
def test_every_program_takes_what_the_plan_has_for_it(model, layers, changes, most):
    plan, sizes = compiled(model, layers, changes)
    assert {"take", "put", "extend", "resume"} <= {name[0] for name in sizes}
    for name, size in sizes.items():
        planned = plan.program_bytes("rollout", name if isinstance(name, str) else name[0])
        assert size <= 1.02 * planned + 32 * 2**20, name
    extensions = [size for name, size in sizes.items() if name[0] == "extend"]
    assert 0.6 * plan.rollout.extension < max(extensions) < most


def test_a_head_is_not_copied_for_one_row(monkeypatch):
    model = ARCHITECTURES["qwen2.5-7b"]
    head = h200.array(model.vocab_size, model.embed_dim)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with h200.compiler() as compile_for_h200:
        row = h200.array(1, model.embed_dim)
        params = {"embed_tokens": head}
        program = compile_for_h200(transformer.logits, params, row, options=UNTUNED)
    assert program.memory_analysis().temp_size_in_bytes < 0.1 * GB
