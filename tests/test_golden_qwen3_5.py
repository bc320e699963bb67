"""Qwen3.5 computes what transformers does (generator: golden/make_qwen3_5.py)."""

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
from qerl_jax.policy.layers import kinds
from qerl_jax.policy.layers.attention import rotary_angles
from qerl_jax.rollout.scheduler import pad_prompts
from qerl_jax.weights import names
from qerl_jax.weights.load import load

FOLDER = pathlib.Path(__file__).parent / "golden" / "qwen3_5"
ROWS = range(3)
PROMPT = 70  # tokens of the prompt of the group
COMPLETIONS = 2, 64, 9


@functools.cache
def golden():
    """Returns the model in float32, and what transformers computes."""
    model = load(str(FOLDER), format="bf16", dtype="float32")
    return model, load_file(FOLDER / "outputs.safetensors")


def padded_rows():
    """Returns the rows padded to one width, and their lengths."""
    rows = [golden()[1][f"ids_{row}"] for row in ROWS]
    tokens, lengths = pad_prompts(rows, width=max(map(len, rows)) + 3, pad_id=77)
    return jnp.asarray(tokens), jnp.asarray(lengths)


def test_logits():
    model, expected = golden()
    forward = jax.jit(functools.partial(transformer.forward, config=model.config))
    logits = forward(model.params, None, *padded_rows())
    for row in ROWS:
        want = expected[f"logits_{row}"]
        np.testing.assert_allclose(logits[row, : len(want)], want, atol=1e-4, rtol=0)


def test_hidden_states_after_each_layer():
    model, expected = golden()
    tokens, lengths = padded_rows()
    x = model.params["embed_tokens"][tokens]
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    angles = rotary_angles(positions, model.config)
    forward = functools.partial(transformer.layer_with_inputs, config=model.config)
    forward = jax.jit(forward, static_argnums=0)
    for number, layer in enumerate(model.params["layers"]):
        x, inputs = forward(kinds.layer_of(model.config, number), layer, x, lengths, angles)
        assert set(inputs) == set(kinds.fused_of(model.config, number))
        for row in ROWS:
            want = expected[f"hidden_{row}_{number}"]
            np.testing.assert_allclose(x[row, : len(want)], want, atol=5e-4, rtol=0)  # up to 20


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_decode_token_by_token(dtype):
    """A decode step gives the logits of transformers, from a prefill of prompts of any length."""
    model, expected = golden()
    if dtype == "bfloat16":
        model = load(str(FOLDER), format="bf16", dtype=dtype)
    atol = 1e-4 if dtype == "float32" else 0.35  # of logits of up to 20
    tokens, lengths = padded_rows()
    prompts = np.array([1, 66, 64], np.int32)
    sizes = {"config": model.config, "cache_positions": 160}
    prefill = jax.jit(functools.partial(transformer.prefill, **sizes))
    logits, cache, _ = prefill(model.params, None, tokens[:, :66], prompts)
    adapters = lora_lib.fuse(None, model.config, jnp.dtype(dtype))
    step = jax.jit(functools.partial(transformer.decode_step, config=model.config))
    for number in range(int((lengths - prompts).max()) + 1):
        for row in ROWS:
            if prompts[row] + number <= lengths[row]:
                want = expected[f"logits_{row}"][prompts[row] + number - 1]
                np.testing.assert_allclose(logits[row], want, atol=atol, rtol=0)
        index = jnp.minimum(prompts + number, tokens.shape[1] - 1)
        logits, cache, _ = step(model.params, adapters, tokens[jnp.arange(3), index], cache)


def packed_group(junk_lengths=((5, (3, 1)), (1, (70,)))):
    """Returns a buffer that holds the group between two others, and what it predicts.

    Returns:
        Token ids, positions, segments; index of each position that predicts, the predicted token,
        and the number of the token in its completion.
    """
    _, expected = golden()
    rng = np.random.default_rng(0)
    tokens, positions, ids, index, targets, columns = [], [], [], [], [], []

    def add(group, rows, prompt, predicts):
        tokens.extend(rows[0][: prompt - 1])
        positions.extend(range(prompt - 1))
        ids.extend([group << PART_BITS] * (prompt - 1))
        for part, row in enumerate(rows, start=1):
            count = len(row) - prompt
            if predicts:
                index.extend(range(len(tokens), len(tokens) + count))
                targets.extend(row[prompt:])
                columns.extend(range(count))
            tokens.extend(row[prompt - 1 : -1])
            positions.extend(range(prompt - 1, len(row) - 1))
            ids.extend([group << PART_BITS | part] * count)

    group = [expected[f"loss_ids_{number}"] for number in range(len(COMPLETIONS))]
    junk = [
        [rng.integers(0, 96, prompt + count) for count in counts] for prompt, counts in junk_lengths
    ]
    add(0, junk[0], junk_lengths[0][0], predicts=False)
    add(1, group, PROMPT, predicts=True)
    add(2, junk[1], junk_lengths[1][0], predicts=False)
    padding = 7
    ids += [-1] * padding
    arrays = (np.array(x + [0] * padding, np.int32) for x in (tokens, positions))
    predicted = tuple(map(np.array, (index, targets, columns)))
    return (*arrays, segments(np.array(ids, np.int32))), predicted


@pytest.mark.parametrize(
    "recompute",
    [
        pytest.param((), marks=[pytest.mark.e2e, pytest.mark.slow]),
        pytest.param(transformer.PRODUCTS, marks=pytest.mark.slow),
    ],
)
def test_gradients_of_a_packed_buffer(recompute):
    """Completions of a group begin at the state after their prompt, and groups at zero."""
    model, expected = golden()
    (tokens, positions, buffer_segments), (index, targets, columns) = packed_group()
    weights = expected["loss_weights"][columns]

    @jax.jit
    def loss(params):
        hidden, _ = transformer.packed_hidden_states(
            params,
            None,
            tokens,
            positions,
            buffer_segments,
            config=model.config,
            recompute=recompute,
        )
        logprobs = jax.nn.log_softmax(transformer.logits(params, hidden[index]))
        return (weights * logprobs[jnp.arange(len(index)), targets]).sum()

    value, gradient = jax.value_and_grad(loss)(model.params)
    np.testing.assert_allclose(value, expected["loss"], rtol=1e-5)
    checked = 0
    for number, layer in enumerate(gradient["layers"]):
        shapes = kinds.projection_shapes(model.config)
        for array, tensors in names.stored_tensors(model.config, number).items():
            rows = 0
            for tensor in tensors:
                projection = tensor.split(".")[-2]
                count = shapes[projection][0] if len(tensors) > 1 else len(layer[array])
                actual = layer[array][rows : rows + count]
                rows += count
                want = expected.get(f"gradient.{tensor.removeprefix('model.')}")
                if want is not None:
                    scale = np.abs(want).max()
                    np.testing.assert_allclose(actual / scale, want / scale, atol=1e-4)
                    checked += 1
    assert checked == sum(name.startswith("gradient.") for name in expected)


def test_padding_and_other_groups_change_nothing():
    """The hidden states of a group are equal bits, whatever its neighbors in the buffer hold."""
    model, _ = golden()

    @jax.jit
    def hidden(tokens, positions, buffer_segments):
        return transformer.packed_hidden_states(
            model.params, None, tokens, positions, buffer_segments, config=model.config
        )[0]

    (tokens, positions, buffer_segments), (index, *_) = packed_group()
    others = np.ones(len(tokens), bool)
    others[buffer_segments.ids >> PART_BITS == 1] = False
    changed = np.where(others, 95 - tokens, tokens).astype(np.int32)
    before = hidden(tokens, positions, buffer_segments)[index]
    np.testing.assert_array_equal(hidden(changed, positions, buffer_segments)[index], before)
