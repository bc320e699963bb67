"""What fits a card or two hosts, and the least that decode steps and networks take, on paper."""

from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any

import jax.numpy as jnp

from benchmarks.exchange import handed_out
from benchmarks.result_tables import STEPS, rows_of, short_name, table
from qerl_jax.config.experiments import grpo_gsm8k
from qerl_jax.errors import UserError
from qerl_jax.memory import cards, report, run_plan
from qerl_jax.policy import sizes
from qerl_jax.policy.architectures import ARCHITECTURES
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.lora import PROJECTIONS
from qerl_jax.policy.tensor_parallel import shard_of
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

# Bytes of a card, and its compute capability.
CARDS = {
    "24 GB (RTX 4090)": cards.CARDS["rtx-4090"],
    "32 GB (RTX 5090)": cards.CARDS["rtx-5090"],
    "48 GB (L40S)": (48 * 10**9, 8.9),
    "80 GB (H100)": cards.CARDS["h100-80gb"],
}
STEP_ROWS = 128  # completions of a step in the preset's recipe
_SIZES = ("1.5b", "3b", "7b", "14b", "32b", "72b")  # of Qwen2.5
_MIXTURES = ("qwen3-30b-a3b", "qwen3.6-35b-a3b", "gpt-oss-20b")
_HOSTS, _GPUS = 2, 8  # hosts, and GPUs of each
_CARD = "h100-80gb"
# Weights and new tokens of a run on the hosts.
_RUNS = (("4 bits", 1024), ("4 bits", 16_384), ("bf16", 1024), ("bf16", 16_384))
LINKS = 25, 100  # Gbit/s between the hosts
_ON_PAPER = ("qwen2.5-7b", "qwen2.5-32b", "qwen2.5-72b", "qwen3.6-35b-a3b")
TOKEN_BYTES = 12  # of a completion in an exchange, see `training.experience`


def step_seconds(format: str, rows: int, bandwidth: float) -> float:
    """The time in which a card reads what a step of the 7B needs, at `bandwidth` bytes a second."""
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

    def seconds(format: str, card: tuple) -> str:
        return " / ".join(f"{1e3 * step_seconds(format, rows, card[1][0]):.1f}" for rows in ROWS)

    rows = " / ".join(map(str, ROWS))
    columns = [
        ("card", lambda card: card[0]),
        ("capability", lambda card: f"{card[1][1]}"),
        (f"nvfp4, {rows} rows, ms", lambda card: seconds("nvfp4", card)),
        (f"bf16, {rows} rows, ms", lambda card: seconds("bf16", card)),
    ]
    return table(columns, BANDWIDTHS.items())


def paths_table(rollout: dict) -> str:
    """Milliseconds of a measured step of Qwen2.5-7B by what multiplies the packed weights."""
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
    columns = [
        ("rows", lambda line: f"{line[0]}"),
        *(
            (path, lambda line, path=path: f"{line[1][path]:.2f}" if path in line[1] else "")
            for path in paths
        ),
    ]
    lines = [line for line in sorted(times.items()) if "the kernel of other GPUs" in line[1]]
    return table(columns, lines)


def memory_table(measured: Iterable[dict[str, Any]]) -> str:
    """How many of a step's 128 rows decode together on each card; and the peak of a measured step.

    The rows have 1,024 new tokens, as in the recipe `first_run`. `measured` has at most one row of
    step.json for each model.
    """
    peaks = {row["model"]: f"{row['peak_gb']:.1f} GB" for row in measured}

    def plans(model: str) -> dict[str, Any]:
        config = grpo_gsm8k.get_config(f"{model},first_run")
        row: dict[str, Any] = {"model": model, "peak": peaks.get(model, "")}
        for card, facts in CARDS.items():
            plan = run_plan.plan_run(config, ARCHITECTURES[model], run_plan.device_of(*facts))
            fits = plan.fits and report.largest_rows(plan, config, ARCHITECTURES[model])
            row |= {"weights": plan.weights / 1e9, card: min(fits, STEP_ROWS) if fits else "-"}
        return row

    columns = [("model", "{model}"), ("weights", "{weights:.1f} GB")]
    columns += [(card, lambda row, card=card: f"{row[card]}") for card in CARDS]
    columns += [("measured, 8 rows", "{peak}")]
    return table(
        columns, [plans(model) for model in (*(f"qwen2.5-{size}" for size in _SIZES), *_MIXTURES)]
    )


# --- Two hosts ------------------------------------------------------------------------------------


def mesh_table() -> str:
    """The mesh of two hosts with 8 GPUs each by model, weights and length of completions.

    It is the one that cuts the weights least. `x rows` are those that decode together in a group.
    """

    def mesh(model: str, format: str, new_tokens: int) -> str:
        config = grpo_gsm8k.get_config(f"{model},first_run")
        config.rollout.max_new_tokens = new_tokens
        if format == "bf16":  # else 4 bits in the format of the preset
            config.model.format = format
        for tensor in (1, 2, 4, 8):
            config.mesh.data, config.mesh.tensor = _HOSTS * _GPUS // tensor, tensor
            device = run_plan.device_of(*cards.CARDS[_CARD], tensor=tensor)
            try:
                plan = run_plan.plan_run(config, ARCHITECTURES[model], device)
            except UserError:  # The model cannot be cut so.
                return "-"
            if plan.fits:
                rows = report.largest_rows(plan, config, ARCHITECTURES[model])
                return f"{config.mesh.data} x {tensor}, {rows:,} rows"
        return "-"

    columns = [("model", lambda model: model)]
    columns += [
        (f"{run[0]}, {run[1]:,} new tokens", lambda model, run=run: mesh(model, *run))
        for run in _RUNS
    ]
    return table(columns, [*(f"qwen2.5-{size}" for size in _SIZES), *_MIXTURES])


def gradient_bytes(config: ModelConfig, *, data: int, tensor: int, **adapter: Any) -> float:
    """Bytes that each of two hosts sends to the other one, to add up the gradient of an adapter.

    First each device sends all others their parts of the sum, of which half are on the other host;
    then NCCL passes the sums around in rings, each of which leaves a host once.
    """
    shard = shard_of(config, tensor)
    of_device = 4 * sizes.trained_numbers(shard, parameters="lora", **adapter)
    total = 4 * sizes.trained_numbers(config, parameters="lora", **adapter)
    return _GPUS * of_device * (1 - 1 / _HOSTS) + total * (1 - 1 / data)


def exchange_bytes(completions: float, processes: int) -> float:
    """Bytes that leave the host of process 0 where all exchange completions.

    `completions` are the bytes of all of them, of which each process of another host reads those
    of all but itself from process 0.
    """
    readers = processes * (1 - 1 / _HOSTS)
    return readers * completions * (1 - 1 / processes)


def network_table(
    measured: Mapping[str, dict[str, Any]], exchanges: Iterable[dict[str, Any]]
) -> str:
    """What two hosts send in a step of 8 completions a group, and its part of a measured step.

    `measured` are rows of step.json by model: a group of the hosts takes their step. `exchanges`
    are those of exchange.json, of which the one of the most processes counts.
    """
    rate = max(exchanges, key=itemgetter("processes"))["mb_per_second"]

    def line(model: str) -> dict[str, Any]:
        row, config = measured[model], grpo_gsm8k.get_config(model)
        tensor = row["devices"]  # of one group
        data = _HOSTS * _GPUS // tensor
        adapter = {"rank": row["lora_rank"], "targets": tuple(config.lora.targets)}
        gradient = gradient_bytes(ARCHITECTURES[model], data=data, tensor=tensor, **adapter)
        numbers = sizes.trained_numbers(ARCHITECTURES[model], parameters="lora", **adapter)
        tokens = data * row["batch"] * row["new_tokens"]
        completions = tokens * TOKEN_BYTES
        if config.rl.routing_replay == "rollout":
            tokens += data * row["prompt"]  # of one prompt in each group
            completions += tokens * sizes.route_bytes(ARCHITECTURES[model])
        exchanged = exchange_bytes(completions, data)
        result = row | {
            "mesh": f"{data} x {tensor}",
            "own": 4 * numbers / 1e6,
            "gradient": gradient / 1e6,
            "exchanged": exchanged / 1e6,
            "handed out": handed_out(completions / 1e6, data) / rate,
            "card": short_name(row["device"]),
        }
        for link in LINKS:
            seconds = 8 * (row["updates"] * gradient + exchanged) / (link * 1e9)
            result[f"at {link}"] = f"{seconds:.2f} s, {seconds / (row['step_s'] + seconds):.1%}"
        return result

    columns = [
        ("model", "{model}"),
        ("mesh", "{mesh}"),
        ("gradient", "{own:,.0f} MB"),
        ("sent by a host for its sum", "{gradient:,.0f} MB"),
        ("completions, sent by process 0", "{exchanged:,.0f} MB"),
        ("and handed out to all", "{handed out:.1f} s"),
        ("measured step of a group", "{step_s:.1f} s ({card})"),
        *((f"both at {link} Gbit/s", f"{{at {link}}}") for link in LINKS),
    ]
    return table(columns, map(line, _ON_PAPER))
