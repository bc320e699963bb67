"""What a decode step takes at least on cards that were not measured, by its bytes."""

import jax.numpy as jnp

from benchmarks.result_tables import STEPS, markdown, rows_of
from qerl_jax.policy import sizes
from qerl_jax.policy.architectures import ARCHITECTURES
from qerl_jax.policy.lora import PROJECTIONS
from qerl_jax.rollout import shapes

# Bytes per second of the memory by the vendor's data sheet, and compute capability.
BANDWIDTHS = {
    "RTX 3090, 24 GB": (936e9, 8.6),
    "RTX 4090, 24 GB": (1008e9, 8.9),
    "RTX 5090, 32 GB": (1792e9, 12.0),
    "L4, 24 GB": (300e9, 8.9),
    "A100, 80 GB": (2039e9, 8.0),
    "DGX Spark, 128 GB": (273e9, 12.1),
}
ROWS = 1, 8, 32
_MODEL = "qwen2.5-7b"
_RANK = 32
_TOKENS = 512  # of a row in the cache


def step_seconds(format: str, rows: int, bandwidth: float) -> float:
    """The time in which a card reads what a step of the 7B needs.

    Args:
        format: format of the weights, as in `load.load`.
        rows: rows of the step.
        bandwidth: bytes per second.
    """
    model, dtype = ARCHITECTURES[_MODEL], jnp.dtype(jnp.bfloat16)
    packed = sizes.packed_bytes(model, format) or sizes.dense_layers_bytes(model, dtype.itemsize)
    head = model.vocab_size * model.embed_dim * dtype.itemsize
    adapter = sizes.fused_adapter_bytes(
        model, rank=_RANK, targets=PROJECTIONS, itemsize=dtype.itemsize
    )
    cache = rows * _TOKENS * shapes.position_bytes(model, dtype)
    return (packed + head + adapter + cache) / bandwidth


def card_table() -> str:
    """Milliseconds of a step of Qwen2.5-7B by bytes alone, with an adapter of rank 32."""
    lines = []
    for card, (bandwidth, capability) in BANDWIDTHS.items():
        cells = [
            " / ".join(f"{1e3 * step_seconds(format, rows, bandwidth):.1f}" for rows in ROWS)
            for format in ("nvfp4", "bf16")
        ]
        lines.append([card, f"{capability}", *cells])
    rows = " / ".join(map(str, ROWS))
    header = ("card", "capability", f"nvfp4, {rows} rows, ms", f"bf16, {rows} rows, ms")
    return markdown(header, lines)


def paths_table(rollout: dict) -> str:
    """Milliseconds of a measured step of Qwen2.5-7B by what multiplies the packed weights.

    Args:
        rollout: content of rollout.json.
    """
    paths = {
        "the Hopper kernel": {"format": "nvfp4"},
        "the kernel of other GPUs": {"format": "nvfp4", "implementation": "mma"},
        "dequantized in every step": {
            "format": "nvfp4", "implementation": "xla", "dequantize": "step",
        },
        "bf16": {"format": "bf16"},
    }  # fmt: skip
    times: dict[int, dict[str, float]] = {}
    for path, values in paths.items():
        options = STEPS | {"model": _MODEL, "lora_rank": _RANK, "head_format": "", "tensor": 1}
        for row in rows_of(rollout, "decode", options | values):
            times.setdefault(row["batch"], {})[path] = row["ms_per_step"]
    lines = [
        [f"{batch}", *(f"{by_path[path]:.2f}" if path in by_path else "" for path in paths)]
        for batch, by_path in sorted(times.items())
        if "the kernel of other GPUs" in by_path
    ]
    return markdown(("rows", *paths), lines)
