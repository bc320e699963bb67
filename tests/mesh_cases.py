"""What `test_mesh` compares: steps, rollouts and runs on 1, 2 and 4 simulated devices.

XLA reads the number of devices when a process starts, so `test_mesh` runs this file in a process of
its own, which writes what it finds to a file.
"""

import functools
import itertools
import pathlib
import pickle
import shutil
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tiny_rollout
import tiny_run
from safetensors.numpy import load_file
from tiny_model import random_lora, random_tokens, tiny_policy

from qerl_jax import sharding
from qerl_jax.policy.trainable import Trainable
from qerl_jax.rl import data_parallel
from qerl_jax.rl.batch import make_batch
from qerl_jax.rl.data_parallel import deal_buffers
from qerl_jax.rl.losses import loss_config
from qerl_jax.rl.packing import pack
from qerl_jax.rl.programs import jitted
from qerl_jax.rl.train_step import UpdateConfig, init_state
from qerl_jax.rollout import replicas
from qerl_jax.rollout.aot import compile_operations, rollout_operations
from qerl_jax.run.checkpoints import Checkpoints
from qerl_jax.run.metrics import read_steps
from qerl_jax.training.loop import train

SHAPES = (1, 2, 4)
BUFFER = 12  # positions of a buffer of a step
LENGTHS = (5, 2, 9, 4, 7)  # of prompts: 4 devices have 2, 1, 1 and 1 of them
# Everything that an update can compute: log-probabilities of a reference, noise, and its KL.
RUN = {
    "steps": 2,
    "rollout.prompts_per_step": 4,
    "train.parameters": "lora+norms",
    "aqn.correction": "noisy_forward",
    "aqn.kl_every": 1,
    "rl.kl_coef": 0.1,
    "eval.every": 2,
    "eval.problems": 3,  # One of 4 devices has none.
}


def mesh_of(count):
    return sharding.make_mesh(count, 1, jax.devices()[:count])


def host(tree):
    return jax.tree.map(np.asarray, tree)


@functools.cache
def policy():
    config, params = tiny_policy("llama", quantized=True, num_layers=1)
    return config, params, random_lora(config)


def packed():
    """Five buffers of random completions with a reference policy that is close to the current."""
    rng, (rows, width) = np.random.default_rng(0), (8, 6)
    lengths = np.array([6, 3, 1, 5, 6, 2, 4, 6])
    batch = make_batch(
        [random_tokens(1 + row % 4, seed=row).tolist() for row in range(rows)],
        random_tokens(rows, width),
        lengths,
        lengths < width,
        rng.standard_normal(rows),
        rng.uniform(-4, -3, (rows, width)),
        mask_truncated=False,
        aggregation="sequence",
        pad_id=0,
    )
    buffers = pack(batch, np.ones(rows, bool), buffer_tokens=BUFFER)
    return [buffer.replace(ref_logprobs=buffer.rollout_logprobs) for buffer in buffers]


def step(count):
    """An update by SGD, so that the adapter moves by the gradient."""
    model, params, lora = policy()
    mesh, loss = mesh_of(count), loss_config("grpo", kl_coef=0.05, tis_cap=2.0)
    programs = jitted(UpdateConfig(model, loss), optax.sgd(1.0), mesh)
    state = init_state(Trainable(jax.tree.map(jnp.array, lora), {}), optax.sgd(1.0))
    params, state = sharding.placed((params, state), mesh)
    totals, old = programs.zero_totals(state.trainable), []
    for buffer in deal_buffers(packed(), mesh):
        totals, logprobs = programs.add_gradient(
            totals, state.trainable, params, None, buffer, np.bool_(True), np.float32(1)
        )
        old.append(np.asarray(logprobs).reshape(-1, BUFFER))
    state, metrics = programs.apply_gradient(state, totals)
    gradient = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), lora, state.trainable.lora)
    logprobs = [x[y.mask > 0] for x, y in zip(np.concatenate(old), packed(), strict=False)]
    return {"gradient": gradient, "metrics": host(metrics), "logprobs": logprobs}


def rollouts(count):
    """Greedy and sampled completions; programs of several devices are copies of the first one's."""
    config, params, lora = tiny_rollout.policy(quantized=True, layers=1)
    key, params, lora = sharding.placed((tiny_rollout.KEY, params, lora), mesh_of(count))
    groups = sharding.groups_of(params)
    prompts = [list(tiny_rollout.random_tokens(length, seed=length)) for length in LENGTHS]
    found = {}
    for temperature in (0.0, 1.0):
        sampling, engine, _ = tiny_rollout.configs(
            {"max_new_tokens": 9, "chunk_steps": 4, "prompt_width": 9, "max_rows": 2}
            | {"temperature": temperature}
        )
        how = {
            "config": config,
            "sampling": sampling,
            "tokenizer": tiny_rollout.TinyTokenizer((3,)),
            "engine": engine,
            "group_size": 2,
        }
        local = sharding.on_group((key, params, lora), groups[0])
        wanted = rollout_operations(*local, prompts=replicas.most(prompts, groups), **how)
        programs = compile_operations(local, wanted, others=groups[1:])
        arguments = key, params, lora, prompts
        *_, before, last = replicas.generate_steps(*arguments, executables=programs, **how)
        found[temperature] = last.rollout
        found["before"] = before.ended_rows, before.tokens
        found["last"] = last.ended_rows, last.tokens, last.statistics
        found["compiled"] = len(programs.compiled), len(programs)
    return found


def checkpoints(folder):
    """A state that is saved and restored on every pair of different shapes."""
    like = init_state(Trainable(policy()[-1], {}), optax.adamw(1e-3))
    found = {"saved": host(like)}
    for before, after in itertools.permutations(SHAPES, 2):
        with Checkpoints(folder / f"{before}-{after}", keep=1) as kept:
            kept.save(1, sharding.placed(like, mesh_of(before)), {})
            _, state, _ = kept.restore_latest(sharding.placed(like, mesh_of(after)))
        assert sharding.devices_of(state) == jax.devices()[:after]
        found[before, after] = host(state)
    return found


def runs(folder):
    """Runs on 1 and on 4 devices, and one that goes on on 1 device after a step on 4."""
    tiny = tiny_run.write_tiny(folder, folder / "cache", num_layers=1)
    on = {count: folder / f"on{count}" for count in (1, 4)}
    for count, run in on.items():
        train(tiny.config(RUN | {"mesh.data": count}), workdir=run)
    again = folder / "again"
    shutil.copytree(on[4], again)
    shutil.rmtree(again / "checkpoints/2")
    train(tiny.config(RUN), workdir=again)
    return {name: _outcome(run) for name, run in {**on, "4 to 1": again}.items()}


def _outcome(run):
    return {
        "rows": tiny_run.results(run),
        "evaluations": tiny_run.evaluations(run),
        "adapter": load_file(run / "adapter/adapter_model.safetensors"),
        "compiled": [row["compiled_programs"] for row in read_steps(run / "metrics.jsonl")],
    }


def main(path):
    data_parallel._TOGETHER = 500  # The adapter is added up in several parts.
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        found = {
            "steps": {count: step(count) for count in SHAPES},
            "rollouts": {count: rollouts(count) for count in SHAPES},
            "checkpoints": checkpoints(folder / "checkpoints"),
            "runs": runs(folder),
        }
    pathlib.Path(path).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
