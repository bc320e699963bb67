"""Bytes of a policy and of what trains it, by arithmetic: nothing is loaded or made."""

import math

from pallas_kernels import fp4_matmul
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.lora import FUSED, projection_shapes


def weight_bytes(config: ModelConfig, *, format: str, itemsize: int) -> int:
    """Returns the bytes of a policy's parameters in the order of checkpoints.

    The order of the Hopper kernel takes as many, up to the padding to whole tiles.

    Args:
        config: architecture of the policy.
        format: number format of the projections, as in `load.load`.
        itemsize: bytes of a number that is neither packed nor in a norm.
    """
    dense, norms = _unpacked_numbers(config)
    projections = sum(
        _projection_bytes(rows, columns, format, itemsize)
        for rows, columns in projection_shapes(config).values()
    )
    return itemsize * dense + 4 * norms + config.num_layers * projections


def packed_bytes(config: ModelConfig, format: str) -> int:
    """Returns the bytes of the projections of all layers, 0 if they are not packed."""
    if format == "bf16":
        return 0
    shapes = projection_shapes(config).values()
    return config.num_layers * sum(_projection_bytes(*shape, format, 0) for shape in shapes)


def dense_layers_bytes(config: ModelConfig, itemsize: int) -> int:
    """Returns the bytes of all projections once they are dequantized."""
    shapes = projection_shapes(config).values()
    return itemsize * config.num_layers * sum(map(math.prod, shapes))


def head_copy_bytes(config: ModelConfig, head_format: str) -> int:
    """Returns the bytes of the copy of the head that rollouts have, as in `head.rollout_head`."""
    if not head_format:
        return 0
    return _projection_bytes(config.vocab_size, config.embed_dim, head_format, 0)


def trained_numbers(
    config: ModelConfig, *, parameters: str, rank: int, targets: tuple[str, ...]
) -> int:
    """Returns how many numbers are trained.

    Args:
        config: architecture of the policy.
        parameters: as in `trainable.trained_params`.
        rank: rank of the adapter.
        targets: projections with an adapter.
    """
    shapes = projection_shapes(config)
    if parameters == "full":
        projections = sum(map(math.prod, shapes.values()))
        return sum(_unpacked_numbers(config)) + config.num_layers * projections
    adapter = rank * sum(sum(shapes[name]) for name in targets)
    norms = 2 * config.embed_dim if parameters == "lora+norms" else 0
    return config.num_layers * (adapter + norms)


def fused_adapter_bytes(
    config: ModelConfig, *, rank: int, targets: tuple[str, ...], itemsize: int
) -> int:
    """Returns the bytes of the adapter as `lora.fuse` stacks it for the Hopper kernel."""
    shapes = projection_shapes(config)
    numbers = 0
    for members in FUSED.values():
        ranks = rank * sum(name in targets for name in members)
        if ranks:
            rows = sum(shapes[name][0] for name in members)
            numbers += ranks * shapes[members[0]][1] + fp4_matmul.padded_rank(ranks) * rows
    return itemsize * config.num_layers * numbers


def _projection_bytes(rows: int, columns: int, format: str, itemsize: int) -> int:
    if format == "bf16":
        return itemsize * rows * columns
    form = fp4_matmul.FORMATS[format]
    scales = rows * columns // form.block * form.scale_dtype.itemsize
    return rows * columns // 2 + scales + (4 * rows if form.global_scale else 0)


def _unpacked_numbers(config: ModelConfig) -> tuple[int, int]:
    """Returns how many numbers embedding, head and biases have, and how many the norms have."""
    tables = (1 if config.tie_embeddings else 2) * config.vocab_size * config.embed_dim
    biases = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    norms = 2 * config.embed_dim + (2 * config.head_dim if config.qk_norm else 0)
    layers = config.num_layers
    return (
        tables + (layers * biases if config.attention_bias else 0),
        layers * norms + config.embed_dim,
    )
