"""The kinds of layers: nothing outside of their modules asks what a layer is."""

import dataclasses
import pathlib
import re

from tiny_checkpoints import model_config

from qerl_jax.policy.layers import attention, experts, kinds, mlp, recurrent

ROOT = pathlib.Path(__file__).resolve().parents[1]
# The ways in which the kind of a layer could be asked for.
QUESTIONS = re.compile(
    r'"in_proj" in|recurrent_layers|\.recurrent\b|\.gated_attention\b|\.qk_norm\b|config\.experts\b'
)
# Those that answer, and those that read and write config.json and other files of architectures.
ANSWERS = (
    *("policy/layers/", "policy/config.py", "policy/architectures.py"),
    *("weights/gguf.py", "weights/save_gguf.py"),
)


def test_nobody_asks_a_layer_what_it_is():
    asking = [
        f"{path.relative_to(ROOT)}:{number}"
        for package in ("qerl_jax", "benchmarks", "experiments", "pallas_kernels")
        for path in (ROOT / package).rglob("*.py")
        if not path.relative_to(ROOT / package).as_posix().startswith(ANSWERS)
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if QUESTIONS.search(line)
    ]
    assert not asking


def test_a_layer_has_the_kinds_of_its_config():
    config = model_config("qwen3_5", num_layers=3, recurrent_layers=(0, 2))
    assert kinds.layers_of(config) == ((recurrent, mlp), (attention, mlp), (recurrent, mlp))
    assert kinds.parts_of(config) == (attention, mlp, recurrent)
    assert kinds.mixers_of(config) == (recurrent, attention)
    mixture = model_config("qwen3_5_moe")
    assert kinds.layers_of(mixture) == (*[(recurrent, experts)] * 2, (attention, experts))
    assert kinds.stack_shapes(mixture, 0) == {
        "experts_gate_up": (6, 32, 32),
        "experts_down": (6, 32, 16),
    }


def test_names_are_those_of_one_part():
    """Names of arrays, of projections and of what rows keep tell the part: rules go by them."""
    arrays = [
        name
        for part in kinds.PARTS
        for name in (*(weight.name for weight in (*part.WEIGHTS, *part.STACKS)), *part.ARRAYS)
    ]
    kept = [field.name for mixer in kinds.MIXERS for field in dataclasses.fields(mixer.KEPT)]
    for names in (arrays, [*arrays, *kept], list(kinds.ALL_PROJECTIONS)):
        assert len(names) == len(set(names))


def test_the_order_of_projections_decides_random_keys():
    assert (
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
        *(f"shared_expert.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
    ) == kinds.ALL_PROJECTIONS


def test_every_stored_tensor_has_an_array():
    for family in ("qwen2", "qwen3", "qwen3_5", "qwen3_moe", "qwen3_5_moe"):
        config = model_config(family)
        for number, layer in enumerate(kinds.layers_of(config)):
            found = kinds.other_tensors(config, number)
            stored = {tensor for tensors in found.values() for tensor in tensors}
            expected = {
                f"{part.MODULE}.{name}" for part in layer for name in part.tensor_shapes(config)
            }
            assert stored == expected
            assert found.keys() == kinds.array_shapes(config, number).keys()
