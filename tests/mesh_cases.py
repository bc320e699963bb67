"""What `test_mesh` compares: steps, rollouts and runs on meshes of 4 simulated devices.

XLA reads the number of devices when a process starts, so `test_mesh` runs this file in a process of
its own, which writes what it finds to a file.
"""

import dataclasses
import functools
import pathlib
import pickle
import re
import shutil
import sys
import tempfile

import agent_cases
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_rollout
import tiny_run
from row_batch import row_batch
from row_loss import loss_config
from safetensors.numpy import load_file
from tiny_checkpoints import VOCAB
from tiny_model import random_lora, random_tokens, tiny_policy
from warpgroup_kernel import use_decode_kernels

from qerl_jax.compile import executable_cache
from qerl_jax.compile.operation import Programs
from qerl_jax.compile.run_cache import set_cache_folder
from qerl_jax.policy import aqn, sharding, transformer
from qerl_jax.policy.config import RecurrentConfig
from qerl_jax.policy.layers import kinds
from qerl_jax.policy.lora import fuse
from qerl_jax.policy.policy import Policy
from qerl_jax.policy.tensor_parallel import shard_of
from qerl_jax.policy.trainable import Trainable
from qerl_jax.rl import data_parallel, logprobs
from qerl_jax.rl.data_parallel import deal_buffers
from qerl_jax.rl.packing import pack
from qerl_jax.rl.programs import functions
from qerl_jax.rl.train_step import UpdateConfig, init_state
from qerl_jax.rollout.sampler import Sampler
from qerl_jax.run import plots
from qerl_jax.run.checkpoints import Checkpoints
from qerl_jax.run.metrics import read_steps
from qerl_jax.training.loop import train

SHAPES = ((1, 1), (4, 1), (2, 2), (1, 4))  # (data, tensor)
FEW = ((1, 1), (2, 2))
# Four devices have two query heads each, one kv head, and one block of 16 inputs of o. The MLP's
# columns of one of two devices are whole tiles of 64; the 32 of one of four devices are padded.
CUT = {"num_layers": 1, "num_heads": 8, "num_kv_heads": 4, "mlp_dim": 128}
HYBRID = {
    "num_layers": 2,
    "recurrent": RecurrentConfig(key_heads=4, value_heads=8, key_dim=8, value_dim=6, window=4),
    "recurrent_layers": (0,),
}
BUFFER = 12  # positions of a buffer of a step
LENGTHS = (5, 2, 9, 4, 7)  # of prompts: 4 groups have 2, 1, 1 and 1 of them
COLLECTIVE = re.compile(r" = \(?(\w+)\[([\d,]*)\].* ([a-z]+-[a-z-]+?)(?:-start)?\(")
COLLECTIVES = "all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute"
# Everything that an update can compute: log-probabilities of a reference and, in `runs`, of a
# teacher; noise, and its KL.
MOVED = "(2, 2) to (1, 4)"
RUN = {
    "steps": 2,
    "rollout.prompts_per_step": 4,
    "train.parameters": "lora+norms",
    "aqn.correction": "noisy_forward",
    "aqn.kl_every": 1,
    "rl.kl_coef": 0.1,
    "rl.mini_batches": 2,
    "eval.every": 2,
    "eval.problems": 3,  # One of 4 groups has none.
}


def mesh_of(shape):
    return sharding.make_mesh(*shape, jax.devices()[: shape[0] * shape[1]])


def placed(tree, params, config, mesh):
    """A tree and a policy on a mesh."""
    beside = {name: leaf for name, leaf in params.items() if name != "layers"}
    cut = functools.partial(sharding.shard_params, config=config, mesh=mesh)
    params = cut(beside) | {"layers": [cut(layer) for layer in params["layers"]]}
    return sharding.shard((tree, params), mesh)


def collectives(text):
    """The operations between devices in a compiled program: kind, dtype and shape."""
    found = (match.groups() for match in map(COLLECTIVE.search, text.splitlines()) if match)
    return [(kind, dtype, shape) for dtype, shape, kind in found if kind in COLLECTIVES]


def host(tree):
    return jax.tree.map(np.asarray, tree)


@functools.cache
def policy(model_type="qwen2"):
    changes = CUT | (HYBRID if model_type.startswith("qwen3_5") else {})
    config, params = tiny_policy(model_type, quantized=True, **changes)
    return config, params, random_lora(config)


def packed():
    """Five buffers of random completions with a reference policy that is close to the current."""
    rng, (rows, width) = np.random.default_rng(0), (8, 6)
    lengths = np.array([6, 3, 1, 5, 6, 2, 4, 6])
    batch = row_batch(
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


def step(shape, model_type="qwen2"):
    """An update by SGD, so that the adapter moves by the gradient."""
    model, params, lora = policy(model_type)
    mesh = mesh_of(shape)
    loss = loss_config("grpo", kl_coef=0.05, tis_cap=2.0, entropy_coef=0.01)
    programs = Programs(functions(UpdateConfig(model, loss), optax.sgd(1.0), mesh))
    state = init_state(Trainable(jax.tree.map(jnp.array, lora), {}), optax.sgd(1.0))
    state, params = placed(state, params, model, mesh)
    totals, old = programs["zero_totals"](state.trainable), []
    buffers = deal_buffers(packed(), mesh)
    arguments = None, buffers[0], np.bool_(True), np.float32(1)
    program = programs["add_gradient"].func.lower(
        totals, state.trainable, params, *arguments, **programs["add_gradient"].keywords
    )
    for buffer in buffers:
        totals, logprobs = programs["add_gradient"](
            totals, state.trainable, params, None, buffer, np.bool_(True), np.float32(1)
        )
        old.append(np.asarray(logprobs).reshape(-1, BUFFER))
    kl = [programs["buffer_kl"](params, noisy(params), state.trainable.lora, x, np.float32(1))
          for x in buffers]  # fmt: skip
    state, metrics = programs["apply_gradient"](state, totals)
    gradient = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), lora, state.trainable.lora)
    logprobs = [x[y.mask > 0] for x, y in zip(np.concatenate(old), packed(), strict=False)]
    return {
        "results": {
            "gradient": gradient,
            "metrics": host(metrics),
            "logprobs": logprobs,
            "kl": sum(float(np.asarray(x).sum()) for x in kl),
        },
        "collectives": collectives(program.compile().as_text()),
    }


def head_loss(values):
    """A loss of log-probabilities and entropies, and these where they have a meaning."""
    (a, b), mask = np.random.default_rng(1).random((2, BUFFER)), packed()[0].mask
    logprobs, entropies = values
    value = jnp.sum(mask * (a * jnp.sin(logprobs) + b * jnp.cos(entropies)))
    return value, (logprobs * mask, entropies * mask)


def trained_head(shape):
    """The gradient by the head, whose vocabulary is cut, of a loss; and what the loss reads."""
    config, params = tiny_policy("qwen2", **CUT)
    mesh, own = mesh_of(shape), shard_of(config, shape[1])
    _, params = placed((), params, config, mesh)

    def loss(head, params):
        return head_loss(
            logprobs.packed_logprobs(
                params | {"lm_head": head},
                None,
                packed()[0],
                model_config=own,
                temperature=0.7,
                entropy_gradient=True,
            )[:2]
        )

    gradient, arguments = jax.grad(loss, has_aux=True), (params.pop("lm_head"), params)
    if mesh is not None:
        gradient = jax.shard_map(
            gradient,
            mesh=mesh,
            in_specs=(sharding.ROWS, sharding.specs(params, shape[1])),
            out_specs=(sharding.ROWS, sharding.WHOLE),
            check_vma=False,
        )
    return host(jax.jit(gradient)(*arguments))


def noisy(params):
    return aqn.perturb_norms(jax.random.key(3), params, 0.1, final_norm=True)


def rollouts(shape, model_type="qwen3"):
    """Greedy and sampled completions; programs of several groups are copies of the first one's."""
    model, params, lora = policy(model_type)
    (key, lora), params = placed((tiny_rollout.KEY, lora), params, model, mesh_of(shape))
    prompts = [list(random_tokens(length, seed=length)) for length in LENGTHS]
    found = {}
    for temperature in (0.0, 1.0):
        sampling, engine, _ = tiny_rollout.configs(
            {"max_new_tokens": 9, "chunk_steps": 4, "prompt_width": 9, "max_rows": 2}
            | {"temperature": temperature, "dequantize": "step" if temperature else "once"}
            | {"drafts": "on" if temperature and model_type == "qwen3" else "off"}
        )
        sampler = Sampler(model, tiny_rollout.TinyTokenizer((3,)), sampling, engine, 2)
        sampler = sampler.compiled(key, Policy(params, lora), num_prompts=len(prompts))
        programs = sampler.executables
        *_, before, last = sampler.steps(key, Policy(params, lora), prompts)
        found[temperature] = last.rollout
        found["before"] = before.ended_rows, before.tokens
        found["last"] = last.ended_rows, last.tokens, last.statistics
        found["compiled"] = len(programs.compiled), len(programs)
        found["collectives", temperature] = {
            key[0]: collectives(getattr(one, "program", one).as_text())
            for key, one in programs.items()
        }
    return found


def conversations(shape):
    """Conversations of rows that wait on the host while others have the one slot of a group."""
    model, params, lora = policy("qwen3")
    (key, lora), params = placed((tiny_rollout.KEY, lora), params, model, mesh_of(shape))
    prompts = [list(random_tokens(length, seed=length)) for length in LENGTHS]
    sampling, engine, _ = tiny_rollout.configs(
        {"max_new_tokens": 14, "chunk_steps": 4, "prompt_width": 9, "max_rows": 1, "drafts": "on"}
    )
    sampler = Sampler(model, tiny_rollout.TinyTokenizer(range(20, 30)), sampling, engine, 2)
    sampler = dataclasses.replace(sampler, turns=tiny_rollout.TURNS)
    sampler = sampler.compiled(key, Policy(params, lora), num_prompts=len(prompts))
    steps = sampler.steps(key, Policy(params, lora), prompts, dialog=tiny_rollout.Dialog(0.1))
    *_, last = steps
    return last.rollout


def sessions(shape):
    """Rows that agents ask for, two of every other session: what was sampled, and its log-probs."""
    model, params, lora = policy("qwen3")
    (key, lora), params = placed((tiny_rollout.KEY, lora), params, model, mesh_of(shape))
    sampling, engine, _ = tiny_rollout.configs(
        {"max_new_tokens": 14, "chunk_steps": 4, "prompt_width": agent_cases.LONGEST}
        | {"max_rows": 2, "drafts": "off"}
    )
    sampler = Sampler(model, tiny_rollout.TinyTokenizer(agent_cases.EOS), sampling, engine, 2)
    sampler = dataclasses.replace(sampler, turns=agent_cases.SESSIONS)
    sampler = sampler.compiled(key, Policy(params, lora), num_prompts=len(LENGTHS))

    def episode(gateway, record):
        number = record.job.number
        for root in range(1 + number % 2):
            ids = agent_cases.tokens(LENGTHS[number // 2], seed=number + root)
            for reply in (agent_cases.tokens(3, seed=number), None):
                turn = agent_cases.ask(gateway, record, ids, max_tokens=5)
                ids = [*turn.row.ids, *(reply or ())]
        return 1.0

    def sample(gateway, count, *_, group_size):
        prompts = [[1]] * (count // group_size)
        *_, last = sampler.steps(key, Policy(params, lora), prompts, dialog=gateway)
        return last

    gateway, last = agent_cases.rollout(episode, 2 * len(LENGTHS), group_size=2, sample=sample)
    assert not agent_cases.errors_of(gateway), agent_cases.errors_of(gateway)
    found = []
    for record in gateway.records():
        for row, end in record.trained_rows():
            number, length = gateway.number_of(row), end - row.prompt
            assert last.rollout.tokens[number, :length].tolist() == row.ids[row.prompt : end]
            found.append((row.ids, last.rollout.logprobs[number, :length].tolist()))
    parts = [len(part.rows) for part in gateway._parts]
    return found, parts, len(last.rollout.tokens), int(last.ended.sum())


def cached(shape, folder):
    """Rollouts whose programs are compiled, and the same with those that a file brings."""
    with pytest.MonkeyPatch.context() as patch, set_cache_folder(folder):
        patch.setattr(executable_cache, "_is_used", lambda: True)  # as on a GPU
        jax.clear_caches()  # JAX has the programs of the same rollouts in memory.
        first = rollouts(shape)
        files = len(list(folder.glob("rollout-*")))
        jax.clear_caches()
        return first, files, rollouts(shape)


def fused_step(shape, model_type="qwen2"):
    """The logits of a decode step out of the kernels that a GPU has, in the interpreter."""
    changes = CUT | {"embed_dim": 64, "head_dim": 32}
    if model_type == "qwen3_5":
        heads = RecurrentConfig(key_heads=2, value_heads=4, key_dim=128, value_dim=128, window=4)
        changes |= HYBRID | {"recurrent": heads, "head_dim": 128, "rotary_dim": 64}
    config, params = tiny_policy(model_type, **changes)
    unrounded = {name for name, array in kinds.ARRAYS.items() if array.is_wide}
    unrounded |= {"norm", "input_layernorm", "post_attention_layernorm"}
    params = jax.tree.map_with_path(
        lambda path, x: x if path[-1].key in unrounded else x.astype(jnp.bfloat16), params
    )
    mesh, lora, prompts = mesh_of(shape), random_lora(config), random_tokens(3, 9)
    own = shard_of(config, shape[1])
    lora, params = placed(lora, params, config, mesh)

    def step(params, lora, prompts):
        lengths = jnp.asarray([9, 1, 5])
        _, cache, _ = transformer.prefill(
            params, lora, prompts, lengths, config=own, cache_positions=16
        )
        lora_layers = fuse(lora, own, jnp.bfloat16)
        return transformer.decode_step(params, lora_layers, prompts[:, 0], cache, config=own)[0]

    if mesh is not None:
        specs = tuple(sharding.specs(argument, shape[1]) for argument in (params, lora, prompts))
        step = jax.shard_map(
            step, mesh=mesh, in_specs=specs, out_specs=sharding.WHOLE, check_vma=False
        )
    with pytest.MonkeyPatch.context() as patch:
        use_decode_kernels(patch, True)
        return np.asarray(jax.jit(step)(params, lora, prompts))


def checkpoints(folder, shapes):
    """A state that is saved and restored on every pair of different shapes."""
    like = init_state(Trainable(policy()[-1], {}), optax.adamw(1e-3))
    found = {"saved": host(like)}
    for before in shapes:
        with Checkpoints(folder / f"{before}", keep=1) as kept:
            kept.save(1, sharding.shard(like, mesh_of(before)), {})
            for after in shapes:
                _, state, _ = kept.restore_latest(sharding.shard(like, mesh_of(after)))
                groups = sharding.groups_of(state.trainable)
                assert (len(groups), len(groups[0])) == after
                found[before, after] = host(state)
    return found


def runs(folder):
    """Runs on meshes, one of which changes its mesh after a step."""
    tiny = tiny_run.write_tiny(folder, folder / "cache", model_type="qwen2", **CUT)
    on = {shape: folder / "on{}x{}".format(*shape) for shape in SHAPES[:3]}
    taught = RUN | {"teacher.source": str(tiny.model), "teacher.format": "bf16"}
    taught |= {"checkpoint.every": 1}
    for (data, tensor), run in on.items():
        mesh = {"mesh.data": data, "mesh.tensor": tensor}
        train(tiny.config(taught | mesh), workdir=run)
    again = folder / "again"
    shutil.copytree(on[2, 2], again)
    shutil.rmtree(again / "checkpoints/2")
    assert (again / "checkpoints/1").is_dir()
    train(tiny.config(taught | {"mesh.tensor": 4}), workdir=again)
    return {name: _outcome(run) for name, run in {**on, MOVED: again}.items()}


def _outcome(run):
    return {
        "rows": tiny_run.results(run),
        "evaluations": tiny_run.evaluations(run),
        "adapter": load_file(run / "adapter/adapter_model.safetensors"),
        "compiled": [row["compiled_programs"] for row in read_steps(run / "metrics.jsonl")],
    }


def gathered():
    """The operations between devices of a program that gathers a packed weight."""
    model, params, _ = policy()
    mesh = mesh_of((1, 4))
    _, params = placed((), params, model, mesh)
    whole = jax.sharding.NamedSharding(mesh, sharding.WHOLE)
    copy = jax.jit(lambda x: x, out_shardings=whole)
    return collectives(copy.lower(params["layers"][0]["qkv_proj"].packed).compile().as_text())


def main(path, shapes):
    data_parallel._TOGETHER = 500  # The adapter is added up in several parts.
    plots._make_axes = tiny_run.sketch
    logprobs._CHUNK_BYTES = 4 * 5 * VOCAB  # The logits of a buffer are in several chunks.
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        found: dict = {
            "steps": {shape: step(shape) for shape in shapes},
            "trained head": {shape: trained_head(shape) for shape in [(1, 1), (2, 2)]},
            "rollouts": {shape: rollouts(shape) for shape in shapes},
            "checkpoints": checkpoints(folder / "checkpoints", shapes),
            "gathered": gathered(),
        }
        if shapes == SHAPES:
            found["runs"] = runs(folder)
            found["conversations"] = {shape: conversations(shape) for shape in SHAPES}
            found["sessions"] = {shape: sessions(shape) for shape in SHAPES}
            found["hybrids"] = {
                shape: (step(shape, "qwen3_5"), rollouts(shape, "qwen3_5")) for shape in SHAPES
            }
            found["mixtures"] = {
                shape: (step(shape, "qwen3_5_moe"), rollouts(shape, "qwen3_5_moe"))
                for shape in SHAPES[:2]
            }
            found["cached"] = cached((2, 2), folder / "programs")
            found["fused steps"] = {
                model: {shape: fused_step(shape, model) for shape in [(1, 1), (1, 2)]}
                for model in ("qwen2", "qwen3_5")
            }
    pathlib.Path(path).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], SHAPES if "--all" in sys.argv else FEW)
