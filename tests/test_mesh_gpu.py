"""A policy whose weights are cut between two GPUs, by the kernels, against the same on one GPU.

uv run --extra cuda pytest -n 0 -m gpu tests/test_mesh_gpu.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from row_batch import row_batch
from row_loss import loss_config
from tiny_checkpoints import model_config
from tiny_model import random_tokens

from benchmarks.rollout.random_policy import random_lora, random_params
from benchmarks.rollout.subject import NO_TEXT
from qerl_jax.compile.operation import Programs
from qerl_jax.policy import sharding
from qerl_jax.policy.policy import Policy
from qerl_jax.policy.trainable import Trainable
from qerl_jax.rl.data_parallel import deal_buffers
from qerl_jax.rl.packing import pack
from qerl_jax.rl.programs import functions
from qerl_jax.rl.train_step import UpdateConfig, init_state
from qerl_jax.rollout.config import SamplingConfig
from qerl_jax.rollout.sampler import Sampler

pytestmark = pytest.mark.gpu
# Each device has whole tiles of the kernels, and heads of 128 as attention has them.
CONFIG = model_config(
    "qwen2",
    vocab_size=2048,
    embed_dim=512,
    mlp_dim=2048,
    num_heads=8,
    num_kv_heads=2,
    head_dim=128,
    max_position=512,
)


@pytest.fixture(autouse=True, scope="module")
def two_devices():
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")


def on(shards):
    """The mesh, the policy and its adapter on one or two devices."""
    mesh = sharding.make_mesh(1, shards, jax.devices()[:shards])
    params = random_params(jax.random.key(0), CONFIG, format="nvfp4", mesh=mesh)
    lora = random_lora(jax.random.key(1), CONFIG, rank=32)
    return mesh, *sharding.shard((params, lora), mesh)


def rollout(shards, temperature, rows):
    _, params, lora = on(shards)
    sampling = SamplingConfig(max_new_tokens=33, temperature=temperature)
    return Sampler(CONFIG, NO_TEXT, sampling).rollout(
        sharding.replicate_like(jax.random.key(2), params),
        Policy(params, lora),
        [random_tokens(7 + n, seed=n).tolist() for n in range(rows)],
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rows", [3, 8, 32])  # They have different kernels.
def test_a_rollout(rows, temperature):
    """Rows are equal until bfloat16 rounds a token away; then they differ."""
    alone, ours = (rollout(shards, temperature, rows) for shards in (1, 2))
    equal = np.cumprod(alone.tokens == ours.tokens, axis=1).astype(bool)
    assert equal[:, 0].mean() > 0.9
    assert equal.mean() > 0.3
    assert np.abs(alone.logprobs - ours.logprobs)[equal].max() < 0.1


def gradient(shards):
    mesh, params, lora = on(shards)
    rng, (rows, width) = np.random.default_rng(0), (16, 40)
    batch = row_batch(
        [random_tokens(8, seed=row).tolist() for row in range(rows)],
        random_tokens(rows, width),
        np.full(rows, width),
        np.ones(rows, bool),
        rng.standard_normal(rows),
        np.full((rows, width), -5.0),
        mask_truncated=False,
        aggregation="sequence",
        pad_id=0,
    )
    optimizer = optax.sgd(1.0)
    programs = Programs(functions(UpdateConfig(CONFIG, loss_config("grpo")), optimizer, mesh))
    before = jax.tree.map(np.asarray, lora)
    state = sharding.shard(init_state(Trainable(lora, {}), optimizer), mesh)
    totals = programs["zero_totals"](state.trainable)
    for buffer in deal_buffers(pack(batch, np.ones(rows, bool), buffer_tokens=256), mesh):
        totals, _ = programs["add_gradient"](
            totals, state.trainable, params, None, buffer, np.bool_(True), np.float32(1)
        )
    state, metrics = programs["apply_gradient"](state, totals)
    moved = jax.tree.map(lambda a, b: a - np.asarray(b), before, state.trainable.lora)
    return moved, float(metrics["grad_norm"])


def test_an_update():
    (alone, norm), (ours, same_norm) = gradient(1), gradient(2)
    assert same_norm == pytest.approx(norm, rel=1e-2)
    for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(ours), strict=True):
        assert np.linalg.norm(a - b) < 3e-2 * np.linalg.norm(a)


def test_a_sum_in_bfloat16_is_equal_on_both_devices():
    """The devices of a group sample equal tokens only if their sums have equal bits."""
    mesh = sharding.make_mesh(1, 2, jax.devices()[:2])
    x = jax.random.normal(jax.random.key(0), (2, 64, 8192), jnp.bfloat16)
    x = jax.device_put(x, jax.sharding.NamedSharding(mesh, sharding.ROWS))
    total = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x, "tensor"),
            mesh=mesh,
            in_specs=sharding.ROWS,
            out_specs=sharding.WHOLE,
        )
    )(x)
    first, second = (np.asarray(shard.data) for shard in total.addressable_shards)
    assert first.tobytes() == second.tobytes()
