"""The routes of a rollout reach the trainer, whose routers would choose others.

The tiny mixtures take one expert for each token, whose weight is 1 whatever the router says. With
another router in the trainer its log-probabilities are those of the rollout if every token has the
expert that it had there, at every position, and only then.
"""

import dataclasses
import functools
import itertools
import types

import agent_cases
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_rollout
import tiny_run
from row_loss import loss_config
from tiny_model import random_lora, tiny_policy
from tiny_rollout import KEY, PROMPTS, TURNS, Dialog

from qerl_jax.errors import UserError
from qerl_jax.evaluation.load_policy import open_policy
from qerl_jax.export.write import ExportConfig, export
from qerl_jax.policy import transformer
from qerl_jax.policy.config import ExpertsConfig
from qerl_jax.policy.policy import Policy
from qerl_jax.policy.trainable import Trainable
from qerl_jax.rewards.scored import Scores
from qerl_jax.rl import programs as rl_programs
from qerl_jax.rl.batch import make_batch
from qerl_jax.rl.packing import pack
from qerl_jax.rl.train_step import UpdateConfig, init_state
from qerl_jax.rollout import row as rows_lib
from qerl_jax.rollout.completions import Rollout
from qerl_jax.rollout.replicas import rows_of
from qerl_jax.training import experience as experience_lib
from qerl_jax.training.experience import Experience, gather
from qerl_jax.training.loop import train
from qerl_jax.weights import peft

GROUP = 4
EOS = tuple(range(20, 30))  # a third of the vocabulary: turns end soon
ONE = np.float32(1)
SHARED = [[7, 8, 9, *prompt] for prompt in PROMPTS]  # prompts that begin alike


@functools.cache
def policies(model):
    """An architecture with one expert for each token, a policy, and one with other routers."""
    experts = ExpertsConfig(6, 1, 16, 16 if model == "qwen3_5_moe" else 0, normalized=True)
    layers = {"num_layers": 2, "recurrent_layers": (0,)} if model == "qwen3_5_moe" else {}
    config, params = tiny_policy(model, experts=experts, mlp_dim=experts.active_width, **layers)
    lora = random_lora(config)
    others = [
        layer | {"router": jax.random.normal(jax.random.key(number), layer["router"].shape)}
        for number, layer in enumerate(params["layers"])
    ]
    return config, Policy(params, lora), Policy(params | {"layers": others}, lora)


def rollout_of(model, prompts=PROMPTS, *, dialog=None, **options):
    config, policy, _ = policies(model)
    options = {"max_new_tokens": 14, "eos_ids": EOS, "group_size": GROUP} | options
    sampler = tiny_rollout.sampler(records_routes=True, **options)
    turns = None if dialog is None else TURNS
    sampler = dataclasses.replace(sampler, model_config=config, turns=turns)
    return sampler.rollout(KEY, policy, prompts, dialog=dialog)


def of_agents(model, episode, **options):
    """The trained rows of a rollout of agents, and the prompt of each."""
    config, policy, _ = policies(model)

    def sample(gateway, sessions, model, **options):
        sampler = agent_cases.sampler(records_routes=True, **options)
        sampler = dataclasses.replace(sampler, model_config=config)
        *_, last = sampler.steps(KEY, policy, [[1]] * sessions, dialog=gateway)
        return last

    gateway, last = agent_cases.rollout(episode, model=model, sample=sample, **options)
    assert not agent_cases.errors_of(gateway)
    trained = [pair for record in gateway.records() for pair in record.trained_rows()]
    numbers = [row.number for row, _ in trained]
    lengths = np.array([end - row.prompt for row, end in trained], np.int32)
    rollout = jax.tree.map(lambda x: x[numbers], last.rollout).replace(lengths=lengths)
    return rollout, [row.ids[: row.prompt] for row, _ in trained]


def check_routes(model, rollout, prompts):
    """The routes of rows are those of a forward pass over the whole of them."""
    _, policy, _ = policies(model)
    for row, prompt in enumerate(prompts):
        length = rollout.lengths[row]
        ids = np.zeros((1, 48), np.int32)
        ids[0, : len(prompt) + length] = [*prompt, *rollout.tokens[row, :length]]
        routes = np.asarray(forward(model)(*policy, ids, np.array([len(prompt) + length]))[2])[:, 0]
        recorded = rollout.prompt_routes[row][:-1], rollout.routes[row][:length]
        np.testing.assert_array_equal(
            np.moveaxis(np.concatenate(recorded), 0, 1), routes[:, : len(prompt) + length - 1]
        )


@functools.cache
def forward(model):
    config = policies(model)[0]
    return jax.jit(functools.partial(transformer.prefill, config=config, cache_positions=48))


def buffers_of(rollout, prompts, *, buffer_tokens=64):
    batch = make_batch(
        prompts,
        rollout,
        np.resize([1.0, -1.0], len(rollout.lengths)),
        mask_truncated=False,
        aggregation="token",
        pad_id=0,
    )
    return pack(batch, rollout.lengths > 0, buffer_tokens=buffer_tokens)


@functools.cache
def updates(model):
    """The functions of an update."""
    loss = loss_config("grpo")
    update = UpdateConfig(policies(model)[0], loss, replays_routes=True)
    table = rl_programs.functions(update, optax.sgd(1.0))
    return {name: functools.partial(x.function, **x.static) for name, x in table.items()}


def distance(model, policy, buffer, temperature=1.0, **changes):
    """The largest difference of log-probabilities to those of the rollout."""
    divisor = np.float32(temperature)
    found = updates(model)["buffer_logprobs"](*policy, buffer.replace(**changes), divisor)
    return np.abs(found - buffer.rollout_logprobs)[buffer.mask > 0].max()


@pytest.mark.parametrize(
    ("model", "prompts", "options"),
    [
        ("qwen3_moe", PROMPTS, {"max_rows": 5, "drafts": "on", "temperature": 0.5}),
        ("qwen3_moe", SHARED, {"shared_tokens": 3, "max_rows": 12}),
        ("qwen3_moe", PROMPTS, {"max_rows": 2, "chunk_steps": 2, "stop": ("aB", "cA")}),
        pytest.param(
            *("qwen3_5_moe", PROMPTS, {"max_rows": 2, "chunk_steps": 2}), marks=pytest.mark.slow
        ),
    ],
    ids=["few slots", "shared prompt", "turns", "turns, recurrent"],
)
def test_replay_gives_the_logprobs_of_the_rollout(model, prompts, options, monkeypatch):
    """Rows wait for slots and are evicted, and stop strings leave further tokens in the cache."""
    monkeypatch.setattr(rows_lib, "_PATIENCE", 0.01)
    dialog = Dialog(0.02) if "chunk_steps" in options else None
    rollout = rollout_of(model, prompts, dialog=dialog, **options)
    assert rollout.routes[0].dtype == np.uint8
    if dialog is not None:
        assert (rollout.roles == 1).any()
    _, policy, other = policies(model)
    prompts = [prompt for prompt in prompts for _ in range(GROUP)]
    check_routes(model, rollout, prompts)
    for row in range(len(prompts)):
        assert rollout.prompt_routes[row] is rollout.prompt_routes[row - row % GROUP]
    buffers, temperature = buffers_of(rollout, prompts), options.get("temperature", 1.0)
    assert len(buffers) > 1
    for buffer in buffers:
        assert distance(model, policy, buffer, temperature) < 2e-5
        assert distance(model, other, buffer, temperature) < 2e-5
        assert distance(model, other, buffer, temperature, routes=None) > 0.1
        moved = np.roll(buffer.routes, 1, axis=0)
        assert distance(model, policy, buffer, temperature, routes=moved) > 0.1


def test_metrics():
    """Two buffers: what the routers would choose, and how the tokens fill the experts."""
    model = "qwen3_moe"
    config, policy, other = policies(model)
    prompts = [prompt for prompt in PROMPTS for _ in range(GROUP)]
    functions, buffers = updates(model), buffers_of(rollout_of(model, max_rows=5), prompts)[-2:]
    state = init_state(Trainable(jax.tree.map(jnp.array, policy.lora), {}), optax.sgd(1.0))
    totals = functions["zero_totals"](state.trainable)
    assert (buffers[1].segments.ids < 0).any()  # padding
    differ, counts = [], np.zeros((config.num_layers, config.experts.count))
    for buffer in buffers:
        totals, _ = functions["add_gradient"](
            *(totals, state.trainable, other.params, None, buffer, np.bool_(True), ONE)
        )
        _, chosen = transformer.packed_hidden_states(
            *(*other, buffer.tokens, buffer.positions, buffer.segments),
            config=config,
            routes=np.moveaxis(buffer.routes, 1, 0).astype(np.int32),
        )
        is_token = buffer.segments.ids >= 0
        recorded = np.moveaxis(buffer.routes, 1, 0)[:, is_token, 0]
        differ.append(recorded != np.asarray(chosen)[:, is_token, 0])
        counts += [np.bincount(layer, minlength=config.experts.count) for layer in recorded]
    _, metrics = functions["apply_gradient"](state, totals)
    assert metrics["logprob_diff_max"] < 2e-5
    assert metrics["routes_differ"] == pytest.approx(np.concatenate(differ, axis=1).mean())
    assert 0.3 < metrics["routes_differ"] < 1
    means = counts.mean(axis=1, keepdims=True)
    assert metrics["expert_load_max"] == pytest.approx((counts / means).max())
    assert metrics["experts_unused"] == (counts == 0).sum()
    total, count = functions["own_routes_difference"](*other, buffers[0], ONE)
    assert count == buffers[0].mask.sum()
    assert total / count > 0.01
    # Without a buffer nothing is measured.
    state = init_state(Trainable(jax.tree.map(jnp.array, policy.lora), {}), optax.sgd(1.0))
    totals = functions["zero_totals"](state.trainable)
    _, metrics = functions["apply_gradient"](state, totals)
    names = "routes_differ", "expert_load_max", "experts_unused"
    assert np.isnan([metrics[name] for name in names]).all()


@pytest.mark.parametrize(
    "model", ["qwen3_moe", pytest.param("qwen3_5_moe", marks=pytest.mark.slow)]
)
def test_replay_gives_the_logprobs_of_what_agents_asked_for(model):
    """Prompts beyond a prefill, replies beyond an extension, equal prompts, and few slots."""

    def episode(gateway, record):
        number = record.job.number
        ids = agent_cases.tokens((2, 2, 9, 10, 25)[number], seed=number // 2)
        for reply in (0, 9, 3):  # None, more than 8, a few.
            ids += agent_cases.ask(gateway, record, ids, max_tokens=1 + number).ids
            if len(ids) > 30:
                break
            ids += agent_cases.tokens(reply, seed=50 + reply)
        agent_cases.ask(gateway, record, ids[:2])  # a row of its own after a longer prompt
        return 1.0

    options = {"sessions": 5, "max_rows": 3, "prefill_prompts": 2}
    rollout, prompts = of_agents(model, episode, **options)
    assert len(prompts) == 8
    check_routes(model, rollout, prompts)
    _, _, other = policies(model)
    for buffer in buffers_of(rollout, prompts):
        assert distance(model, other, buffer) < 2e-5
        assert distance(model, other, buffer, routes=None) > 0.1


def test_processes_exchange_routes():
    """Each process has the routes of all, and one array for the prompt of a group."""
    rng, config = np.random.default_rng(0), policies("qwen3_moe")[0]
    prompts = [types.SimpleNamespace(ids=[1] * length) for length in (3, 1, 2)]
    lengths, shares = np.array([2, 0, 3, 1, 2, 4], np.int32), [np.array([1]), np.array([0, 2])]
    routes, of_prompts = np.empty(6, object), np.empty(6, object)
    for row in range(6):
        routes[row] = rng.integers(6, size=config.empty_routes(4).shape, dtype=np.uint8)
    for group, prompt in enumerate(prompts):
        shape = config.empty_routes(len(prompt.ids)).shape
        of_prompts[2 * group : 2 * group + 2] = [rng.integers(6, size=shape, dtype=np.uint8)] * 2
    zeros = np.zeros((6, 4), np.float32)

    def local(share):
        rows = rows_of(share, 2)
        arrays = zeros.astype(np.int32), lengths, lengths > 2, zeros, zeros, None, None
        rollout = jax.tree.map(lambda x: x[rows], Rollout(*arrays, routes, of_prompts))
        own, scores = [prompts[i] for i in share], Scores(zeros[rows, 0], {}, [], 0.0)
        return Experience(own, list(share), [""] * len(rows), rollout, scores, [], 0.0)

    first, own = map(local, shares)
    peers = types.SimpleNamespace(
        count=2, exchange=lambda share: [experience_lib._exchange_arrays(first), share]
    )
    options = {"tokenizer": tiny_rollout.TinyTokenizer(), "processes": peers}
    whole = gather(own, prompts, [0, 1, 2], shares, **options).rollout
    for row, length in enumerate(lengths):
        np.testing.assert_array_equal(whole.routes[row], routes[row][:length])
        np.testing.assert_array_equal(whole.prompt_routes[row], of_prompts[row])
        assert whole.prompt_routes[row] is whole.prompt_routes[row - row % 2]


def test_ids_of_many_experts():
    config = policies("qwen3_moe")[0]
    for count, dtype in ((256, np.uint8), (257, np.uint16)):
        experts = dataclasses.replace(config.experts, count=count)
        assert dataclasses.replace(config, experts=experts).empty_routes(2).dtype == dtype


RUN = {
    "steps": 4,
    "seed": 3,
    "lora.targets": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "lora.expert_rank": 2,
    "aqn.sigma_start": 0.3,
    "aqn.sigma_end": 0.3,
    "rl.kl_coef": 0.1,
    "rl.routing_check_every": 2,
    "checkpoint.every": 2,
}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory, compile_cache):
    folder = tmp_path_factory.mktemp("mixture")
    return tiny_run.write_tiny(folder, compile_cache, model_type="qwen3_moe", num_layers=1)


def weights(run):
    return (run / "adapter" / peft.WEIGHTS_FILE).read_bytes()


def resumed(tiny, changes, folder, *, reward, at):
    """A run that ends abruptly in call number `at` of a reward, and begins again."""
    calls = itertools.count(1)

    def killing(*arguments):
        if next(calls) == at:
            raise tiny_run.KilledError
        return reward(*arguments)

    with pytest.raises(tiny_run.KilledError):
        train(tiny.config(changes), workdir=folder, rewards={"correctness": (killing, 1.0)})
    return train(tiny.config(changes), workdir=folder, rewards={"correctness": (reward, 1.0)})


def test_a_run_goes_on_bit_for_bit(mixture, tmp_path):
    """It evaluates, and noise in the rollout changes the routes that the trainer would choose."""
    low = tiny_run.low_fraction
    whole = train(
        mixture.config(RUN), workdir=tmp_path / "whole", rewards={"correctness": (low, 1.0)}
    )
    rows = tiny_run.results(whole)
    for row in rows:
        assert (row["routes_differ"] > 0.01) if row["sigma"] else row["routes_differ"] == 0
        assert row["logprob_diff_mean"] < 1e-5 or row["sigma"]
        assert row["expert_load_max"] > 1
        assert ("logprob_diff_own_routes" in row) == (row["step"] in (1, 3))
    assert rows[0]["logprob_diff_own_routes"] < 1e-5
    assert rows[2]["logprob_diff_own_routes"] > 1e-3
    assert tiny_run.evaluations(whole).keys() == {0, 2, 4}
    # 4 calls in each of two evaluations and 8 in each of three steps come before step 4.
    again = resumed(mixture, RUN, tmp_path / "killed", reward=low, at=2 * 4 + 3 * 8 + 2)
    assert tiny_run.results(again) == rows
    assert weights(again) == weights(whole)


@pytest.mark.slow  # 40 s
def test_a_run_learns(mixture, tmp_path):
    changes = {"steps": 8, "aqn.schedule": "off", "optimizer.learning_rate": 2e-2, "eval.every": 0}
    changes |= {"rollout.prompts_per_step": 8, "rollout.group_size": 8}
    changes |= {"lora.targets": RUN["lora.targets"]}
    rewards = {"reward": (tiny_run.low_fraction, 1.0)}
    run = train(mixture.config(changes), workdir=tmp_path / "run", rewards=rewards)
    rows = tiny_run.results(run)
    assert max(row["logprob_diff_mean"] for row in rows) < 1e-4
    rewards = [row["reward"] for row in rows]
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.1


@pytest.mark.slow  # 90 s
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe", "gpt_oss"])
def test_adapters_of_experts_alone_learn(family, tmp_path, compile_cache):
    """The reward rises against a control; a killed run resumes, and its export is the policy."""
    layers = {"num_layers": 2, "recurrent_layers": (0,)} if family == "qwen3_5_moe" else {}
    tiny = tiny_run.write_tiny(tmp_path, compile_cache, model_type=family, **layers)
    changes = {"steps": 10, "aqn.schedule": "off", "optimizer.learning_rate": 2e-2, "eval.every": 0}
    changes |= {"rollout.prompts_per_step": 8, "rollout.group_size": 8, "checkpoint.every": 4}
    form = "mxfp4" if family == "gpt_oss" else "nvfp4"
    changes |= {"lora.targets": (), "lora.expert_rank": 4, "model.format": form}
    low = tiny_run.low_fraction
    runs = {
        name: train(
            tiny.config(changes | {"optimizer.learning_rate": rate}),
            workdir=tmp_path / name,
            rewards={"correctness": (low, 1.0)},
        )
        for name, rate in (("run", 2e-2), ("control", 1e-9))
    }
    rewards = {
        name: np.mean([row["reward"] for row in tiny_run.results(run)[-3:]])
        for name, run in runs.items()
    }
    assert rewards["run"] > rewards["control"] + 0.1
    again = resumed(tiny, changes, tmp_path / "killed", reward=low, at=6 * 64 + 5)
    assert tiny_run.results(again) == tiny_run.results(runs["run"])
    assert weights(again) == weights(runs["run"])

    policy = open_policy(str(again))
    out = export(ExportConfig(str(again), "peft", out=str(tmp_path / "out"), score_problems=0))
    exported = open_policy(str(out), base=str(tiny.model), format=form, dtype="float32")
    ids = np.arange(2, 14, dtype=np.int32)[None]
    logits = [
        transformer.forward(p.model.params, p.lora, ids, np.array([12]), config=p.model.config)
        for p in (policy, exported)
    ]
    np.testing.assert_array_equal(*logits)
    without = transformer.forward(
        policy.model.params, None, ids, np.array([12]), config=policy.model.config
    )
    assert abs(logits[0] - without).max() > 0.1


@pytest.mark.slow  # 20 s
def test_a_run_without_replay(mixture, tmp_path):
    """The routers choose again, and nothing is known of the rollout's routes."""
    changes = {"rl.routing_replay": "none", "steps": 2, "eval.every": 0, "rl.kl_coef": 0.0}
    changes |= {"rl.routing_check_every": 0}
    run = train(mixture.config(RUN | changes), workdir=tmp_path / "run")
    for row in tiny_run.results(run):
        assert "routes_differ" not in row
        assert row["expert_load_max"] > 1


@pytest.mark.parametrize(
    ("model", "changes", "reason"),
    [
        ("tiny", {}, "a llama has no experts"),
        ("mixture", RUN | {"rl.routing_replay": "none"}, "rl.routing_replay=none"),
    ],
)
def test_without_replay_there_is_nothing_to_check(model, changes, reason, request, tmp_path):
    config = request.getfixturevalue(model).config(changes | {"rl.routing_check_every": 2})
    with pytest.raises(UserError, match=f"check_every=2, but no routes are replayed: {reason}; p"):
        train(config, workdir=tmp_path / "run")
