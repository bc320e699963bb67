"""Which parts each layer of a model has, and what follows from those of all layers.

`layer_of` decides by the `ModelConfig`; everything else in the project goes through it.
"""

import collections
import functools
import itertools
import math
from typing import NamedTuple

import jax.numpy as jnp

from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.layers import attention, experts, mlp, recurrent
from qerl_jax.policy.layers.part import Array, Kept, Mixer, Mlp, Part, Stack, Weight

# A new kind comes last: the order decides the random keys of adapters (`lora.init`) and the order
# of the tensors of exports.
PARTS: tuple[Part, ...] = (attention, mlp, recurrent, experts)
MIXERS: tuple[Mixer, ...] = (attention, recurrent)

WEIGHTS: dict[str, Weight] = {weight.name: weight for part in PARTS for weight in part.WEIGHTS}
STACKS: dict[str, Stack] = {stack.name: stack for part in PARTS for stack in part.STACKS}
ARRAYS: dict[str, Array] = {name: array for part in PARTS for name, array in part.ARRAYS.items()}
# The projections that a layer stores stacked in one weight, by the name of that weight; and those
# of them that a format of 4 bits packs.
ALL_FUSED = {weight.name: weight.members for weight in WEIGHTS.values()}
FUSED = {name: members for name, members in ALL_FUSED.items() if WEIGHTS[name].packed}
# Those of layers of attention and a plain MLP.
PROJECTIONS = tuple(
    name for part in (attention, mlp) for weight in part.WEIGHTS for name in weight.members
)
ALL_PROJECTIONS = tuple(name for members in ALL_FUSED.values() for name in members)
# All weights that a format of 4 bits packs: the projections that are quantized together, of a stack
# those of one expert, by the name of the weight.
PACKED = FUSED | {stack.name: stack.members for stack in STACKS.values()}


def packed_of(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Returns the part of `PACKED` that a format of 4 bits packs in a model."""
    if config.packs_projections:
        return PACKED
    return {name: members for name, members in PACKED.items() if name in STACKS}


class Layer(NamedTuple):
    """The kinds of the two parts of a layer; layers of equal kinds share their programs."""

    mixer: Mixer
    mlp: Mlp


def layer_of(config: ModelConfig, number: int) -> Layer:
    """Returns the kinds of the parts of a layer by its number."""
    mixer = recurrent if number in config.recurrent_layers else attention
    return Layer(mixer, mlp if config.experts is None else experts)


@functools.cache
def layers_of(config: ModelConfig) -> tuple[Layer, ...]:
    """Returns the kinds of all layers of a model."""
    return tuple(layer_of(config, number) for number in range(config.num_layers))


@functools.cache
def parts_of(config: ModelConfig) -> tuple[Part, ...]:
    """Returns the kinds of parts that any layer of a model has, in the order of `PARTS`."""
    own = {part for layer in layers_of(config) for part in layer}
    return tuple(part for part in PARTS if part in own)


def mixers_of(config: ModelConfig) -> tuple[Mixer, ...]:
    """Returns the kinds of mixers that a model has, in the order of its layers."""
    return tuple(dict.fromkeys(layer.mixer for layer in layers_of(config)))


def row_shapes(config: ModelConfig, positions: int, dtype: jnp.dtype) -> list[Kept]:
    """Returns the shapes of what a row keeps in every layer, see `part.Mixer.row_shapes`."""
    shapes = {mixer: mixer.row_shapes(config, positions, dtype) for mixer in mixers_of(config)}
    return [shapes[layer.mixer] for layer in layers_of(config)]


def projection_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Returns the shape (outputs, inputs) of each projection that layers of the model have."""
    return {
        name: shape
        for part in parts_of(config)
        for name, shape in part.projection_shapes(config).items()
    }


def fused_of(config: ModelConfig, layer: int) -> dict[str, tuple[str, ...]]:
    """Returns the part of `ALL_FUSED` that a layer has, by the number of the layer."""
    own = {
        weight.name
        for part in layer_of(config, layer)
        for weight in part.WEIGHTS
        if weight.members[0] in part.projection_shapes(config)
    }
    return {fused: members for fused, members in ALL_FUSED.items() if fused in own}


def fused_counts(config: ModelConfig) -> dict[str, int]:
    """Returns how many layers have each weight of `ALL_FUSED`, at least one."""
    own = [fused_of(config, layer) for layer in range(config.num_layers)]
    counts = {fused: sum(fused in weights for weights in own) for fused in ALL_FUSED}
    return {fused: count for fused, count in counts.items() if count}


def stack_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, int, int]]:
    """Returns the shapes (E, N, K) of the stacks of experts that a layer has, by their names."""
    parts = layer_of(config, layer)
    return {stack.name: stack.shape(config) for part in parts for stack in part.STACKS}


def has_experts(config: ModelConfig) -> bool:
    """Returns whether layers route tokens to experts."""
    return any(part.STACKS for part in parts_of(config))


def product_sizes(config: ModelConfig) -> dict[str, int]:
    """Returns how many weights of all layers a token is multiplied by, by names of `PRODUCTS`.

    'down_proj' is no name of `PRODUCTS`, as the backward pass does not read its result.
    """
    shapes, sizes = projection_shapes(config), collections.Counter()
    for fused, count in fused_counts(config).items():
        numbers = sum(math.prod(shapes[name]) for name in WEIGHTS[fused].members)
        sizes[WEIGHTS[fused].product] += count * numbers
    for layer in range(config.num_layers):
        for name, (_, rows, columns) in stack_shapes(config, layer).items():
            assert config.experts is not None
            sizes[STACKS[name].product] += config.experts.top_k * rows * columns
    return sizes


def member_bounds(fused: str, config: ModelConfig) -> list[int]:
    """The rows of a fused weight, of `ALL_FUSED`, at which its second and later members begin."""
    rows = [projection_shapes(config)[member][0] for member in ALL_FUSED[fused]]
    return list(itertools.accumulate(rows))[:-1]


def other_tensors(config: ModelConfig, layer: int) -> dict[str, dict[str, tuple[int, ...]]]:
    """Returns by name of an array of `ARRAYS` that a layer has the tensors that it stacks.

    They are pairs of the name in the layer, as 'self_attn.q_norm.weight', and the shape.
    """
    found = {}
    for part in layer_of(config, layer):
        shapes = part.tensor_shapes(config)
        for name, array in part.ARRAYS.items():
            for tensors in filter(None, (array.tensors, array.others)):
                if tensors[0] in shapes:
                    found[name] = {f"{part.MODULE}.{x}": shapes[x] for x in tensors}
    return found


def array_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the arrays of `ARRAYS` that a layer has."""
    found: dict[str, tuple[int, ...]] = {}
    for name, tensors in other_tensors(config, layer).items():
        (first, *rest), *others = tensors.values()
        found[name] = (first + sum(shape[0] for shape in others), *rest)
    return found
