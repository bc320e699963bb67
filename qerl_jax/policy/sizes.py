"""Bytes of a policy and of what trains it, by arithmetic: nothing is loaded or made."""

import math
from collections.abc import Iterator

from pallas_kernels import experts, fp4_matmul
from pallas_kernels.fp4_matmul.tiling import TILE_COLUMNS
from qerl_jax.errors import UserError
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.layers.kinds import (
    ALL_FUSED,
    ARRAYS,
    STACKS,
    array_shapes,
    fused_counts,
    has_experts,
    packed_of,
    projection_shapes,
    stack_shapes,
)
from qerl_jax.policy.lora import check_targets


def weight_bytes(config: ModelConfig, *, format: str, itemsize: int) -> int:
    """Returns the bytes of a policy's parameters in the order of checkpoints.

    The order of the Hopper kernel takes as many, up to the padding to whole tiles.

    Args:
        config: architecture of the policy.
        format: number format of the projections, as in `load.load`.
        itemsize: bytes of a number that is neither packed nor in a norm.
    """
    (dense, norms), packed = _unpacked_numbers(config), packed_of(config)
    projections = sum(
        count * _projection_bytes(*shape, format if fused in packed else "bf16", itemsize)
        for fused, shape, count in _projections(config)
    )
    return itemsize * dense + 4 * norms + projections


def packed_bytes(config: ModelConfig, format: str) -> int:
    """Returns the bytes of the projections of all layers that are packed, 0 if none is."""
    if format == "bf16":
        return 0
    return sum(
        count * _projection_bytes(*shape, format, 0)
        for fused, shape, count in _projections(config)
        if fused in packed_of(config)
    )


def dense_layers_bytes(config: ModelConfig, itemsize: int, *, stacks: bool = True) -> int:
    """Returns the bytes of all projections that are packed, once they are dequantized.

    Those of routed experts are among them, unless `stacks` is false.
    """
    return itemsize * packed_numbers(config, stacks=stacks)


def packed_numbers(config: ModelConfig, *, stacks: bool = True) -> int:
    """Returns how many weights a format of 4 bits packs; `stacks` as in `dense_layers_bytes`."""
    packed = packed_of(config).keys() - (() if stacks else STACKS)
    sizes = _projections(config)
    return sum(count * math.prod(shape) for fused, shape, count in sizes if fused in packed)


def tile_padding(config: ModelConfig) -> float:
    """Returns by what factor tile order has more bytes than all packed weights in rows."""
    sizes = [size for size in _projections(config) if size[0] in packed_of(config)]
    numbers = [
        sum(count * rows * -(-columns // tile) * tile for _, (rows, columns), count in sizes)
        for tile in (1, TILE_COLUMNS)
    ]
    return numbers[1] / max(1, numbers[0])


def head_copy_bytes(config: ModelConfig, head_format: str) -> int:
    """Returns the bytes of the copy of the head that rollouts have, as in `head.rollout_head`."""
    if not head_format:
        return 0
    return _projection_bytes(config.vocab_size, config.embed_dim, head_format, 0)


def route_bytes(config: ModelConfig) -> int:
    """Returns the bytes of the experts of a token in all layers, as a rollout records them."""
    return config.empty_routes().nbytes if has_experts(config) else 0


def trained_numbers(
    config: ModelConfig,
    *,
    parameters: str,
    rank: int,
    targets: tuple[str, ...],
    expert_rank: int = 0,
) -> int:
    """Returns how many numbers are trained.

    Args:
        config: architecture of the policy.
        parameters: as in `trainable.trained_params`.
        rank: rank of the adapter.
        targets: projections with an adapter.
        expert_rank: rank of the adapters of routed experts, 0 for none.

    Raises:
        UserError: the model does not have a target, or routed experts to adapt; norms are to be
            trained whose scales its checkpoints store minus 1; or experts are to be trained.
    """
    if parameters == "full" and has_experts(config):
        raise UserError(
            f"train.parameters='full': the experts of a {config.model_type} have no gradient; pass "
            "train.parameters=lora"
        )
    if parameters == "lora+norms" and config.centered_norms:
        raise UserError(
            f"train.parameters='lora+norms': the norms of a {config.model_type} are stored minus "
            "1, which adapter folders do not have; pass train.parameters=lora or full"
        )
    if parameters != "full":
        check_targets(config, targets, expert_rank)
    sizes = list(_projections(config))
    if parameters == "full":
        projections = sum(count * math.prod(shape) for _, shape, count in sizes)
        return sum(_unpacked_numbers(config)) + projections
    shapes, counts = projection_shapes(config), fused_counts(config)
    adapter = rank * sum(
        counts[fused] * sum(shapes[name])
        for fused in counts
        for name in ALL_FUSED[fused]
        if name in targets
    )
    norms = 2 * config.embed_dim if parameters == "lora+norms" else 0
    return adapter + _expert_adapter_numbers(config, expert_rank) + config.num_layers * norms


def fused_adapter_bytes(
    config: ModelConfig, *, rank: int, targets: tuple[str, ...], itemsize: int, expert_rank: int = 0
) -> int:
    """Returns the bytes of the adapter as `lora.fuse` stacks it for the Hopper kernels."""
    shapes = projection_shapes(config)
    numbers = _expert_adapter_numbers(config, experts.kernel_rank(expert_rank))
    for fused, count in fused_counts(config).items():
        members = ALL_FUSED[fused]
        ranks = rank * sum(name in targets for name in members)
        if ranks:
            rows = sum(shapes[name][0] for name in members)
            of_layer = ranks * shapes[members[0]][1] + fp4_matmul.padded_rank(ranks) * rows
            numbers += count * of_layer
    return itemsize * numbers


def _expert_adapter_numbers(config: ModelConfig, rank: int) -> int:
    """Returns the numbers of the adapters of all routed experts."""
    layers = (stack_shapes(config, layer).values() for layer in range(config.num_layers))
    return sum(rank * count * (rows + columns) for own in layers for count, rows, columns in own)


def _projections(config: ModelConfig) -> Iterator[tuple[str, tuple[int, int], int]]:
    """Yields the name, the shape and the number of layers of each weight, stacks too."""
    shapes = projection_shapes(config)
    for fused, count in fused_counts(config).items():
        rows = sum(shapes[name][0] for name in ALL_FUSED[fused])
        yield fused, (rows, shapes[ALL_FUSED[fused][0]][1]), count
    for layer in range(config.num_layers):
        for name, (count, rows, columns) in stack_shapes(config, layer).items():
            yield name, (count * rows, columns), 1


def _projection_bytes(rows: int, columns: int, format: str, itemsize: int) -> int:
    if format == "bf16":
        return itemsize * rows * columns
    form = fp4_matmul.FORMATS[format]
    scales = rows * columns // form.block * form.scale_dtype.itemsize
    return rows * columns // 2 + scales + (4 * rows if form.global_scale else 0)


def _unpacked_numbers(config: ModelConfig) -> tuple[int, int]:
    """Returns how many numbers besides the projections are in the policy's dtype, and in float32.

    The first are embedding, head, biases and convolutions, the others norms and gates of recurrent
    layers.
    """
    tables = (1 if config.tie_embeddings else 2) * config.vocab_size * config.embed_dim
    numbers = {False: tables, True: (2 * config.num_layers + 1) * config.embed_dim}
    for layer in range(config.num_layers):
        for name, shape in array_shapes(config, layer).items():
            numbers[ARRAYS[name].is_wide] += math.prod(shape)
    return numbers[False], numbers[True]
