"""Mixtures of experts compute what transformers does (generator: golden/make_experts.py)."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from pallas_kernels.attention import PART_BITS, segments
from qerl_jax.policy import lora as lora_lib
from qerl_jax.policy import transformer
from qerl_jax.policy.architectures import ARCHITECTURES
from qerl_jax.policy.layers import kinds
from qerl_jax.policy.layers.attention import rotary_angles
from qerl_jax.policy.layers.part import NewTokens
from qerl_jax.policy.quant import QuantTensor, dequantize, tile_order
from qerl_jax.rollout.scheduler import pad_prompts
from qerl_jax.weights import names
from qerl_jax.weights.load import load
from qerl_jax.weights.save import checkpoint_tensors

GOLDEN = pathlib.Path(__file__).parent / "golden"
ROWS, LAYERS = range(2), range(2)
PROMPT = 9  # tokens of the prompt of the group
FAMILIES = pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe", "gpt_oss"])
# The second family has all that the first one has but its norms and its attention.
FEW = pytest.mark.parametrize(
    "family",
    [
        pytest.param("qwen3_moe", marks=pytest.mark.slow),
        "qwen3_5_moe",
        pytest.param("gpt_oss", marks=pytest.mark.slow),
    ],
)


@functools.cache
def golden(family, format="bf16"):
    """Returns the model in float32, and what transformers computes."""
    model = load(str(GOLDEN / family), format=format, dtype="float32")
    return model, load_file(GOLDEN / family.removesuffix("_mxfp4") / "outputs.safetensors")


def padded_rows(family):
    """Returns the rows padded to one width, and their lengths."""
    rows = [golden(family)[1][f"ids_{row}"] for row in ROWS]
    tokens, lengths = pad_prompts(rows, width=max(map(len, rows)) + 3, pad_id=77)
    return jnp.asarray(tokens), jnp.asarray(lengths)


@FAMILIES
def test_logits_and_routes(family):
    model, expected = golden(family)
    prefill = functools.partial(transformer.prefill, config=model.config, cache_positions=64)
    tokens, lengths = padded_rows(family)
    logits, _, routes = jax.jit(prefill)(model.params, None, tokens, lengths)
    for row in ROWS:
        want = expected[f"logits_{row}"]
        np.testing.assert_allclose(logits[row], want[-1], atol=1e-4, rtol=0)
        for layer in LAYERS:
            want = expected[f"routes_{row}_{layer}"]
            np.testing.assert_array_equal(routes[layer, row, : len(want)], want)


def test_weights_that_do_not_add_up_to_1():
    model, expected = golden("qwen3_moe")
    experts = dataclasses.replace(model.config.experts, normalized=False)
    config = dataclasses.replace(model.config, experts=experts)
    ids = expected["ids_0"][None]
    logits = transformer.forward(model.params, None, ids, jnp.array([ids.size]), config=config)
    np.testing.assert_allclose(logits[0], expected["plain_logits_0"], atol=1e-4, rtol=0)


@FEW
def test_hidden_states_after_each_layer(family):
    model, expected = golden(family)
    tokens, lengths = padded_rows(family)
    x = model.params["embed_tokens"][tokens]
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    angles = rotary_angles(positions, model.config)
    forward = jax.jit(transformer.layer_with_inputs, static_argnums=0, static_argnames="config")
    for number, layer in enumerate(model.params["layers"]):
        kind, config = kinds.layer_of(model.config, number), model.config.of_layer(number)
        x, _ = forward(kind, layer, x, lengths, angles, config=config)
        for row in ROWS:
            want = expected[f"hidden_{row}_{number}"]
            np.testing.assert_allclose(x[row, : len(want)], want, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "family", [pytest.param("qwen3_moe", marks=pytest.mark.slow), "qwen3_5_moe", "gpt_oss"]
)
def test_steps_and_extensions(family):
    """Decode steps and an extension give the logits and the routes of whole rows."""
    model, expected = golden(family)
    tokens, lengths = padded_rows(family)
    prompts = np.array([1, 34], np.int32)
    sizes = {"config": model.config, "cache_positions": 48}
    prefill = jax.jit(functools.partial(transformer.prefill, **sizes))
    logits, cache, _ = prefill(model.params, None, tokens[:, :34], prompts)
    before, adapters = cache, lora_lib.fuse(None, model.config, jnp.dtype("float32"))
    step = jax.jit(functools.partial(transformer.decode_step, config=model.config))
    count = int((lengths - prompts).min())
    for number in range(count):
        at = prompts + number
        logits, cache, routes = step(model.params, adapters, tokens[jnp.arange(2), at], cache)
        for row in ROWS:
            want = expected[f"logits_{row}"][at[row]]
            np.testing.assert_allclose(logits[row], want, atol=1e-4, rtol=0)
            for layer in LAYERS:
                want = expected[f"routes_{row}_{layer}"][at[row]]
                np.testing.assert_array_equal(routes[layer, row], want)
    positions = prompts[:, None] + np.arange(count)
    ids = jnp.take_along_axis(tokens, jnp.asarray(positions), axis=1)
    if not all(mixer.REWINDS for mixer in kinds.mixers_of(model.config)):
        # The first token of each row again: a state has it, see `transformer.extend`.
        positions = np.pad(positions, ((0, 0), (1, 0)))
        ids = jnp.concatenate([tokens[:, :1], ids], axis=1)
    extend = jax.jit(functools.partial(transformer.extend, config=model.config))
    last = np.full(2, positions.shape[1] - 1)
    new = NewTokens(positions, last)
    extended, _, routes = extend(model.params, adapters, ids, new, before)
    np.testing.assert_allclose(extended, logits, atol=1e-4, rtol=0)
    for row in ROWS:
        for layer in LAYERS:
            want = expected[f"routes_{row}_{layer}"][prompts[row] : prompts[row] + count]
            np.testing.assert_array_equal(routes[layer, row, -count:], want)


@pytest.mark.slow  # 20 s
def test_yarn_beyond_its_first_context():
    """The rotation of gpt-oss-20b after 4,096 positions: of whole rows, steps and an extension."""
    own = ARCHITECTURES["gpt-oss-20b"]
    changes = {
        name: getattr(own, name)
        for name in ("rope_theta", "rope_scaling", "window", "swiglu_limit")
    }
    model, expected = golden("gpt_oss")[0], load_file(GOLDEN / "gpt_oss" / "long.safetensors")
    config = dataclasses.replace(model.config, **changes)
    ids, positions = expected["ids"][None], expected["positions"]
    want = dict(zip(positions.tolist(), expected["logits"], strict=True))
    logits = transformer.forward(model.params, None, ids, jnp.array([ids.size]), config=config)
    np.testing.assert_allclose(logits[0, positions], expected["logits"], atol=1e-5, rtol=0)
    begin, end = 4240, 4300
    sizes = {"config": config, "cache_positions": 4304}
    prefill = jax.jit(functools.partial(transformer.prefill, **sizes))
    _, before, _ = prefill(model.params, None, ids[:, :begin], jnp.array([begin]))
    cache, adapters = before, lora_lib.fuse(None, config, jnp.dtype("float32"))
    step = jax.jit(functools.partial(transformer.decode_step, config=config))
    for at in range(begin, begin + 20):
        found, cache, _ = step(model.params, adapters, ids[:, at], cache)
        np.testing.assert_allclose(found[0], want[at], atol=1e-5, rtol=0)
    extend = jax.jit(functools.partial(transformer.extend, config=config))
    new = NewTokens(np.arange(begin, end)[None], np.array([end - begin - 1]))
    found, _, _ = extend(model.params, adapters, ids[:, begin:end], new, before)
    np.testing.assert_allclose(found[0], want[end - 1], atol=1e-5, rtol=0)


def packed_group(expected):
    """Returns the group of transformers' loss as a packed buffer, and what it predicts.

    Returns:
        Token ids, positions, segments; index of each position that predicts, the predicted token,
        and the number of the token in its completion.
    """
    rows = [expected[f"loss_ids_{number}"] for number in range(3)]
    tokens, positions = list(rows[0][: PROMPT - 1]), list(range(PROMPT - 1))
    ids, index, targets, columns = [0] * (PROMPT - 1), [], [], []
    for part, row in enumerate(rows, start=1):
        count = len(row) - PROMPT
        index.extend(range(len(tokens), len(tokens) + count))
        targets.extend(row[PROMPT:])
        columns.extend(range(count))
        tokens.extend(row[PROMPT - 1 : -1])
        positions.extend(range(PROMPT - 1, len(row) - 1))
        ids.extend([part] * count)
    padding = [0] * 7
    buffer = np.array(tokens + padding, np.int32), np.array(positions + padding, np.int32)
    assert max(ids) < 1 << PART_BITS
    own_segments = segments(np.array(ids + [-1] * 7, np.int32))
    return (*buffer, own_segments), tuple(map(np.array, (index, targets, columns)))


@FAMILIES
@pytest.mark.parametrize(
    "recompute", [(), pytest.param(transformer.PRODUCTS, marks=pytest.mark.slow)]
)
def test_gradients_of_a_packed_buffer(family, recompute):
    """Gradients through routers and experts, whose own weights are frozen, are those of torch."""
    model, expected = golden(family)
    buffer, (index, targets, columns) = packed_group(expected)
    weights = expected["loss_weights"][columns]

    @jax.jit
    def loss(params):
        options = {"config": model.config, "recompute": recompute}
        hidden, _ = transformer.packed_hidden_states(params, None, *buffer, **options)
        logprobs = jax.nn.log_softmax(transformer.logits(params, hidden[index]))
        return (weights * logprobs[jnp.arange(len(index)), targets]).sum()

    value, gradient = jax.value_and_grad(loss)(model.params)
    np.testing.assert_allclose(value, expected["loss"], rtol=1e-5)
    found = {}
    for number in (-1, *LAYERS):
        arrays = gradient if number < 0 else gradient["layers"][number]
        for array, tensors in names.stored_tensors(model.config, number).items():
            if array not in kinds.STACKS:
                rows = np.cumsum([expected_rows(model, tensor) for tensor in tensors])[:-1]
                found |= dict(zip(tensors, np.split(arrays[array], rows), strict=True))
    checked = [name for name in expected if name.startswith("gradient.")]
    for name in checked:
        want = expected[name].squeeze()
        actual = found[f"model.{name.removeprefix('gradient.')}"]
        scale = np.abs(want).max()
        np.testing.assert_allclose(
            np.reshape(actual, want.shape) / scale, want / scale, atol=1e-4, err_msg=name
        )
    assert len(checked) >= 18


def expected_rows(model, tensor):
    """The rows of a stored tensor."""
    return names.expected_shapes(model.config)[tensor][0]


@FEW
def test_replayed_routes(family):
    """Recorded routes give equal numbers, others do not; the routers' own choice is returned."""
    model, expected = golden(family)
    ids = jnp.asarray(expected["ids_1"])
    buffer = ids, jnp.arange(len(ids)), segments(np.zeros(len(ids), np.int32))
    prefill = functools.partial(transformer.prefill, config=model.config, cache_positions=48)
    *_, routes = jax.jit(prefill)(model.params, None, ids[None], jnp.array([len(ids)]))

    @jax.jit
    def hidden(routes):
        options = {"config": model.config, "routes": routes}
        return transformer.packed_hidden_states(model.params, None, *buffer, **options)

    (free, own), (replayed, _) = hidden(None), hidden(routes[:, 0])
    np.testing.assert_array_equal(own, routes[:, 0])
    np.testing.assert_array_equal(replayed, free)
    logits = transformer.logits(model.params, replayed)
    np.testing.assert_allclose(logits, expected["logits_1"], atol=1e-4, rtol=0)
    others = (routes[:, 0] + 1) % model.config.experts.count
    moved, chosen = hidden(others)
    assert abs(moved - free).max() > 0.1
    np.testing.assert_array_equal(chosen[0], routes[0, 0])  # nothing before it has moved
    assert (chosen[1] != routes[1, 0]).any()


@FEW
def test_nvfp4_is_the_dense_model_of_its_values(family):
    """Each expert has its own scale for gate and up, and one for down."""
    model, expected = golden(family, "nvfp4")
    ids = expected["ids_1"][None]
    dense = transformer.dequantize_params(model.params)
    for layer in model.params["layers"]:
        for name in kinds.stack_shapes(model.config, 0):
            weight = layer[name]
            assert isinstance(weight, QuantTensor)
            scales = np.asarray(weight.global_scale).reshape(model.config.experts.count, -1)
            assert (scales == scales[:, :1]).all()
            assert (
                len(np.unique(scales[:, 0])) > 1 or family == "gpt_oss"
            )  # all have a largest code
    config = model.config

    @jax.jit
    def hidden(params, routes):
        buffer = ids[0], jnp.arange(ids.size), segments(np.zeros(ids.size, np.int32))
        options = {"config": config, "routes": routes}
        return transformer.packed_hidden_states(params, None, *buffer, **options)[0]

    routes = jnp.stack([jnp.asarray(expected[f"routes_1_{layer}"]) for layer in LAYERS])
    packed = hidden(model.params, routes)
    np.testing.assert_allclose(packed, hidden(dense, routes), atol=1e-4, rtol=0)
    assert 0.01 < abs(packed - hidden(golden(family)[0].params, routes)).max() < 3


def test_mxfp4_of_gpt_oss_has_the_values_of_transformers():
    """The published blocks are read without rounding: weights and logits are those of torch."""
    (dense, expected), model = golden("gpt_oss"), golden("gpt_oss_mxfp4", "mxfp4")[0]
    for layer, own in zip(model.params["layers"], dense.params["layers"], strict=True):
        for name in layer:
            is_stack = name in kinds.STACKS
            assert isinstance(layer[name], QuantTensor) == is_stack
            values = dequantize(layer[name], jnp.float32) if is_stack else layer[name]
            np.testing.assert_array_equal(values, own[name])
    ids = expected["ids_1"][None]
    logits = transformer.forward(model.params, None, ids, jnp.array([40]), config=model.config)
    np.testing.assert_allclose(logits[0], expected["logits_1"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("form", ["bf16", "mxfp4", "tiles"])
def test_gpt_oss_is_written_byte_for_byte(form):
    """Blocks and dense experts are those of the file, also from the order of the kernels."""
    family, format = ("gpt_oss", "bf16") if form == "bf16" else ("gpt_oss_mxfp4", "mxfp4")
    model = golden(family, format)[0]
    layers = model.params["layers"]
    if form == "tiles":
        layers = [
            {n: tile_order(x) if isinstance(x, QuantTensor) else x for n, x in layer.items()}
            for layer in layers
        ]
        assert layers[0]["experts_gate_up"].tiles is not None
    params = model.params | {"layers": layers}
    written = dict(checkpoint_tensors(params, model.config, dtype="float32"))
    stored = load_file(GOLDEN / family / "model.safetensors")
    assert written.keys() == stored.keys()
    for name, tensor in stored.items():
        assert written[name].dtype == tensor.dtype
        np.testing.assert_array_equal(written[name], tensor, err_msg=name)
