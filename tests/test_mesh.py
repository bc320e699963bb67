"""Steps, rollouts and runs on a mesh, whose shape does not change the results."""

import collections
import concurrent.futures
import functools
import itertools
import os
import pathlib
import pickle
import subprocess
import sys
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mesh_cases import CUT, FEW, LENGTHS, MOVED, SHAPES, head_loss, packed
from refusal import refused
from tiny_checkpoints import VOCAB
from tiny_model import tiny_policy

from qerl_jax.compile.aot import FirstRunAlone
from qerl_jax.config.experiments.grpo_gsm8k import get_config
from qerl_jax.environments.roles import ENVIRONMENT
from qerl_jax.errors import UserError
from qerl_jax.policy import sharding, transformer
from qerl_jax.rollout.progress import RolloutProgress, Statistics
from qerl_jax.rollout.replicas import deal, in_threads
from qerl_jax.training.validate import validate
from qerl_jax.weights.chat_template import render, template_date

DEVICES = 4
LAYER_SUMS = 2 * CUT["num_layers"]  # over the devices of a group: attention and MLP


# A few shapes belong to the tier of whole runs, all of them to that of each night.
WHOLE_RUN = (pytest.mark.e2e, pytest.mark.slow)


def by_tier(values):
    """Marks shapes, or pairs of them, with their tiers."""
    few = [*FEW, *itertools.permutations(FEW, 2)]
    return [pytest.param(v, marks=WHOLE_RUN if v in few else pytest.mark.slow) for v in values]


@pytest.fixture
def found(request, cases):
    """What `mesh_cases` finds on simulated devices, on all shapes for a test of each night."""
    return cases(request.node.get_closest_marker("e2e") is None)


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """Returns a function that runs `mesh_cases` once, on all shapes or on a few."""
    return functools.cache(lambda whole: run_cases(tmp_path_factory.mktemp("mesh"), whole))


def run_cases(folder, whole):
    path = folder / "found"
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    environment = {
        "XLA_FLAGS": flags,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(sys.path),
        # The tier of whole runs compiles as users do.
        **({"JAX_DISABLE_MOST_OPTIMIZATIONS": "True"} if whole else {}),
        "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),  # for what is compiled again as text
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [sys.executable, str(pathlib.Path(__file__).with_name("mesh_cases.py")), str(path)]
    command += ["--all"] if whole else []
    subprocess.run(command, env=os.environ | environment, check=True, stdout=subprocess.DEVNULL)
    return pickle.loads(path.read_bytes())


def assert_near(a, b, rtol=1e-5, atol=1e-6):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol, atol)


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("shape", by_tier(SHAPES[1:]))
def test_a_step_does_not_depend_on_the_mesh(found, shape):
    alone, ours = found["steps"][1, 1]["results"], found["steps"][shape]["results"]
    assert float(alone["metrics"]["grad_norm"]) > 0.1
    assert abs(float(alone["metrics"]["loss"])) > 1e-3
    assert alone["kl"] > 1e-3
    assert_near(ours, alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "trained", "shape"),
    [
        *(("hybrids", "in_proj_qkv", shape) for shape in SHAPES[1:]),
        ("mixtures", "shared_expert.up_proj", SHAPES[1]),
    ],
)
def test_other_layers_do_not_depend_on_the_mesh(found, family, trained, shape):
    (step, rollouts), (own_step, own_rollouts) = (found[family][s] for s in ((1, 1), shape))
    assert np.abs(step["results"]["gradient"].layers[0][trained]["b"]).max() > 1e-3
    assert_near(own_step["results"], step["results"], 1e-4, 1e-5)
    for temperature in (0.0, 1.0):
        assert_same(own_rollouts[temperature].tokens, rollouts[temperature].tokens)
        assert_near(own_rollouts[temperature].logprobs, rollouts[temperature].logprobs, 1e-4, 1e-5)


@pytest.mark.parametrize("shape", by_tier([(1, 1), (2, 2)]))
def test_the_gradient_by_a_cut_head_is_that_of_a_log_softmax(found, shape):
    config, params = tiny_policy("qwen2", **CUT)
    buffer = packed()[0]
    hidden, _ = transformer.packed_hidden_states(
        params, None, buffer.tokens, buffer.positions, buffer.segments, config=config
    )

    def loss(head):
        logits = jnp.matmul(hidden[buffer.order], head.T, precision="highest")
        whole = jax.nn.log_softmax(logits / 0.7)
        entropies = -(jnp.exp(whole) * whole).sum(axis=-1)
        return head_loss((whole[jnp.arange(len(whole)), buffer.targets], entropies))

    expected = jax.grad(loss, has_aux=True)(params["lm_head"])
    assert jnp.abs(expected[0]).max() > 0.1
    assert_near(found["trained head"][shape], expected, atol=1e-5)


@pytest.mark.parametrize("shape", by_tier(SHAPES[1:]))
def test_the_tokens_of_a_row_do_not_depend_on_the_mesh(found, shape):
    alone, ours = found["rollouts"][1, 1], found["rollouts"][shape]
    for temperature in (0.0, 1.0):
        for name in ("tokens", "lengths", "finished"):
            assert_same(getattr(ours[temperature], name), getattr(alone[temperature], name))
        assert_near(ours[temperature].logprobs, alone[temperature].logprobs, 1e-4, 1e-5)
    assert len(np.unique(alone[1.0].tokens, axis=0)) == 2 * len(LENGTHS)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES[1:])
def test_conversations_do_not_depend_on_the_mesh(found, shape):
    alone, ours = found["conversations"][1, 1], found["conversations"][shape]
    for name in ("tokens", "lengths", "finished", "roles", "endings"):
        assert_same(getattr(ours, name), getattr(alone, name))
    assert_near(ours.logprobs, alone.logprobs, 1e-4, 1e-5)
    assert (alone.roles == ENVIRONMENT).sum() > len(alone.lengths)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_sessions_of_agents_do_not_depend_on_the_mesh(found, shape):
    """Those of a prompt are in one group of devices, and their rows have the same samples."""
    (alone, _, count, _), (ours, parts, rows, ended) = (
        found["sessions"][one] for one in ((1, 1), shape)
    )
    assert [ids for ids, _ in ours] == [ids for ids, _ in alone]
    for (_, logprobs), (_, expected) in zip(ours, alone, strict=True):
        assert_near(np.array(logprobs), np.array(expected), 1e-4, 1e-5)
    # 5 prompts, each with a session of one row and one of two.
    assert sum(parts) == rows == ended == count == 15
    assert sorted(parts, reverse=True) == {1: [15], 2: [9, 6], 4: [6, 3, 3, 3]}[shape[0]]


@pytest.mark.parametrize("shape", by_tier(SHAPES))
def test_the_progress_is_that_of_all_groups(found, shape):
    rollout = found["rollouts"][shape][1.0]
    ended, tokens, statistics = found["rollouts"][shape]["last"]
    assert (ended, tokens) == (len(rollout.lengths), rollout.lengths.sum())
    # The first token is the prefill's, and a step with a draft may have several.
    sampled = rollout.lengths.sum() - len(rollout.lengths)
    assert statistics.live + statistics.accepted == sampled
    assert statistics.prefilled_prompts == shape[0] * -(-len(LENGTHS) // shape[0])
    ended_before, tokens_before = found["rollouts"][shape]["before"]
    assert ended_before < ended
    assert 0 < tokens_before < tokens


@pytest.mark.parametrize("shape", by_tier([(4, 1), (2, 2)]))
def test_programs_are_compiled_once_for_all_groups(found, shape):
    compiled, programs = found["rollouts"][shape]["compiled"]
    assert compiled <= programs == found["rollouts"][1, 1]["compiled"][1]


@pytest.mark.slow
def test_programs_of_several_devices_are_loaded_from_their_files(found):
    first, files, again = found["cached"]
    compiled, programs = first["compiled"]
    assert compiled > 0
    assert files >= programs
    assert again["compiled"] == (0, programs)
    assert_same(again[1.0].tokens, first[1.0].tokens)


@pytest.mark.parametrize("shape", by_tier([(2, 2), (1, 4)]))
def test_an_update_gathers_no_weight(found, shape):
    kinds = [kind for kind, *_ in found["steps"][shape]["collectives"]]
    assert set(kinds) == {"all-reduce"}
    # Each sum of the forward pass has one in the backward pass. The others are the embedding's and
    # those of the softmax.
    assert len(kinds) >= 2 * LAYER_SUMS + 1
    assert {dtype for _, dtype, _ in found["steps"][shape]["collectives"]} == {"f32"}


@pytest.mark.e2e
@pytest.mark.slow
def test_a_weight_that_is_gathered_would_be_found(found):
    ((kind, dtype, _),) = found["gathered"]
    assert (kind, dtype) == ("all-gather", "u8")


@pytest.mark.parametrize("temperature", [0.0, 1.0])  # The weights are dequantized once, in steps.
@pytest.mark.parametrize("shape", by_tier([(2, 2), (1, 4)]))
def test_a_rollout_has_one_sum_for_each_block(found, shape, temperature):
    programs = found["rollouts"][shape]["collectives", temperature]
    assert set(programs) >= {"prefill", "insert", "decode", "fuse_adapter"}
    for name, operations in programs.items():
        if name not in ("prefill", "decode", "draft"):
            assert operations == []
            continue
        *sums, logits = sorted(operations, key=lambda operation: operation[0] == "all-gather")
        assert logits[:2] == ("all-gather", "f32")
        assert logits[2].split(",")[-1] == str(VOCAB)
        assert len(sums) == LAYER_SUMS + 1  # and the embedding
        embed_dim = str(tiny_policy(**CUT)[0].embed_dim)
        for kind, dtype, sizes in sums:
            assert (kind, dtype) == ("all-reduce", "f32")
            assert sizes.split(",")[-1] == embed_dim


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen2", "qwen3_5"])
def test_the_kernels_of_a_decode_step_add_up_over_devices(model, found):
    """In bfloat16 parts of a sum are rounded before they are added."""
    alone, ours = (found["fused steps"][model][shape] for shape in ((1, 1), (1, 2)))
    error = np.linalg.norm(ours - alone) / np.linalg.norm(alone)
    assert 0 < error < 2e-2


@pytest.mark.parametrize("shapes", by_tier(itertools.permutations(SHAPES, 2)))
def test_a_checkpoint_is_restored_on_another_mesh(found, shapes):
    assert_same(found["checkpoints"][shapes], found["checkpoints"]["saved"])


# By default `test_processes` trains on two devices as on one, and the tests above compare a step,
# the rollouts and the checkpoints of groups of two devices.
@pytest.mark.slow
@pytest.mark.parametrize("name", [*SHAPES[1:3], MOVED])
def test_a_run_does_not_depend_on_the_mesh(found, name):
    alone, ours = found["runs"][1, 1], found["runs"][name]
    assert_near(ours["rows"], alone["rows"], atol=5e-6)
    assert ours["evaluations"] == alone["evaluations"]
    assert_near(ours["adapter"], alone["adapter"], 1e-4, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES[1:3])
def test_a_mesh_compiles_nothing_after_the_first_step(found, shape):
    assert found["runs"][shape]["compiled"][1:] == [0]


def test_programs_of_several_devices_first_run_one_after_the_other():
    running, together = set(), []
    all_run = threading.Barrier(3)

    def program(name):
        if len(together) == 3:  # All have run before.
            return all_run.wait(timeout=60)
        running.add(name)
        time.sleep(0.05)
        together.append(len(running))
        return running.discard(name)

    lock = threading.Lock()
    programs = [FirstRunAlone(program, lock) for _ in range(3)]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        for _ in range(2):
            for future in [pool.submit(one, name) for name, one in enumerate(programs)]:
                future.result()
    assert together == [1, 1, 1]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 20])
def test_prompts_are_dealt_out_by_length(count):
    lengths = np.random.default_rng(count).integers(5, 60, 16)
    shares = deal(lengths, count)
    assert sorted(np.concatenate(shares).tolist()) == list(range(16))
    counts = [len(share) for share in shares]
    assert max(counts) - min(counts) <= 1
    if 16 % (2 * count) == 0:
        sums = [lengths[share].sum() for share in shares]
        assert max(sums) - min(sums) <= lengths.max()


@pytest.fixture
def ended():
    """The numbers of the parts that have ended."""
    return []


@pytest.fixture
def part(ended):
    """Makes an endless rollout, which fails after a number of steps if one is given."""

    def make(number, fails_after=None):
        try:
            for step in itertools.count():
                if step == fails_after:
                    raise UserError("no memory")
                work = Statistics(prefilled_prompts=1, decoded=step, live=step)
                yield RolloutProgress(np.zeros(1, bool), step, work, rollout=np.array([step]))
        finally:
            ended.append(number)

    return make


def test_a_rollout_that_fails_ends_the_others(part, ended):
    parts = [lambda n=n: part(n, 3 if n == 1 else None) for n in range(3)]
    refused("no memory", collections.deque, in_threads(parts), maxlen=0)
    assert sorted(ended) == [0, 1, 2]


def test_the_rollouts_end_with_their_reader(part, ended):
    steps = in_threads([lambda n=n: part(n) for n in range(3)])
    seen = {number: step.tokens for number, step in itertools.islice(steps, 100)}
    assert seen
    assert not ended
    steps.close()
    assert sorted(ended) == [0, 1, 2]


def test_the_rollouts_of_groups_have_the_date_of_chat_templates(part):
    found = []

    def rollout():
        found.append(render("{{ strftime_now('%Y-%m-%d') }}", {}))
        yield from itertools.islice(part(0), 1)

    with template_date("2024-02-03T04:05:06+00:00"):
        collections.deque(in_threads([rollout, rollout]), maxlen=0)
    assert found == ["2024-02-03"] * 2


@pytest.mark.parametrize(
    ("data", "tensor", "devices", "message"),
    [
        (3, 1, 2, r"mesh\.data=3 x mesh\.tensor=1 are 3 .* process has 2: pass mesh\.data=2$"),
        (1, 4, 2, r"mesh\.data=1 x mesh\.tensor=4 are 4 .* process has 2: pass two numbers"),
        (2, 1, 8, r"has 8: .*such as CUDA_VISIBLE_DEVICES=0,1$"),  # which hides the others
        (2, 4, [0, 0, 1, 1, 2, 2, 3, 3], r"mesh\.tensor=4 does not divide the 2 devices"),
    ],
)
def test_a_mesh_of_another_number_of_devices_is_refused(data, tensor, devices, message):
    """Devices are a number, or the processes that have them."""
    if isinstance(devices, int):
        devices = jax.devices() * devices
    else:
        devices = [types.SimpleNamespace(process_index=number) for number in devices]
    refused(message, sharding.make_mesh, data, tensor, devices)


def test_a_run_on_one_device_has_no_mesh():
    assert sharding.make_mesh(1, 1, jax.devices() * 8) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mesh.data": 3}, "rollout.prompts_per_step=16 is not divisible by mesh.data=3: .*18"),
        (
            {"mesh.tensor": 2, "train.parameters": "full", "model.format": "bf16"},
            "mesh.tensor=2 with train.parameters='full': .*pass mesh.tensor=1",
        ),
        ({"mesh.data": 0}, "mesh.data"),
        (
            {"rl.dynamic_sampling": True, "rl.dynamic_sampling_prompts": 12},
            "rl.dynamic_sampling_prompts=12 with rollout.prompts_per_step=16 .*pass 16",
        ),
        (
            {"rl.dynamic_sampling": True, "rl.dynamic_sampling_prompts": 31, "mesh.data": 4},
            "rl.dynamic_sampling_prompts=31 with .*mesh.data=4: .*pass 32",
        ),
    ],
)
def test_a_mesh_that_does_not_fit_the_config_is_refused(changes, message):
    config = get_config()
    config.update_from_flattened_dict({"rollout.prompts_per_step": 16} | changes)
    refused(message, validate, config)
