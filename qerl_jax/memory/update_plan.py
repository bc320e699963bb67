"""The memory of an update by arithmetic, before anything is compiled.

The plan chooses the size of the update's buffers and what their backward pass computes again. It
depends on the config, the architecture and the size of the device alone, so a resumed run makes the
same choice. `run_plan.py` is the plan of a whole run.
"""

import collections
import dataclasses
import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from qerl_jax.errors import UserError
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.layers import kinds
from qerl_jax.policy.layers.linear import PRODUCTS
from qerl_jax.policy.layers.part import PlannedBuffer
from qerl_jax.rl.logprobs import logits_chunk
from qerl_jax.rl.packing import layout

# What 'auto' computes again, from the least to the most memory saved. The results of the MLP's
# first product are by far the largest. Moving the inputs of the
# layers to the host as well frees nothing: XLA ends each copy as late as it may, and keeps the
# input on the device until then (72B, 12 layers, 4480 tokens: 4.26 GB with and without).
RECOMPUTATIONS: tuple[tuple[str, ...], ...] = (
    (),
    ("gate_up_proj",),
    ("gate_up_proj", "o_proj"),
    # Without the attention, whose time grows with the rows: with 65,536 tokens an update of
    # Qwen3-4B takes 25.2 s in place of 28.9.
    ("qkv_proj", "o_proj", "gate_up_proj"),
    PRODUCTS,
)

_LARGEST_BUFFER = 12288  # tokens; a larger buffer is no faster
_TOKENS_OF_A_CALL = 400  # what a call costs besides its tokens: dequantized weights, the launch
_MULTIPLE = 128  # tokens of a tile of the attention kernel
_CPU_BUFFER = 512  # tokens; on a CPU the mask of the attention is dense
_CPU_MULTIPLE = 8


class Kernels(NamedTuple):
    """Which kernels of Hopper GPUs compute an update; the others are programs of XLA."""

    attention: bool = True  # packed attention
    layers: bool = True  # grouped products of experts, chunks of recurrent layers


_HOPPER = Kernels()


@dataclasses.dataclass(frozen=True)
class LongestRows:
    """The longest rows that a step may sample.

    `prompt` and `new_tokens` are tokens; the buffers are dealt out to the devices.
    """

    prompt: int
    new_tokens: int
    group_size: int
    num_prompts: int
    devices: int = 1


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes of an update on one buffer, without weights and training state."""

    activations: int  # what the forward pass keeps for the backward pass
    head: int  # temporary arrays of the head on one chunk of the tokens
    layer: int  # temporary arrays of the backward pass of one layer
    buffer_tokens: int  # positions of a buffer
    recompute: tuple[str, ...]  # products that the backward pass computes again
    teacher: int = 0  # temporary arrays of the teacher's pass over the buffer, before the update

    @property
    def bytes(self) -> int:
        """Bytes of the largest moment: the head runs before the backward pass of the layers."""
        return max(self.activations + max(self.head, self.layer), self.teacher)


def plan_update(
    model: ModelConfig,
    rows: LongestRows,
    *,
    adapter: int,
    dtype: jnp.dtype,
    buffer_tokens: int,
    recompute: tuple[str, ...] | None,
    free: int | None,
    kernels: Kernels = _HOPPER,
    adapts_experts: bool = False,
    teacher: ModelConfig | None = None,
) -> MemoryPlan:
    """Chooses the buffers of the update.

    `adapter` is the number of bytes of the adapter in `dtype`, that of the computation. A size of 0
    and a recomputation of None are chosen, by the bytes that weights and training state leave
    `free` on the device; None where they are unknown, as on a CPU. `kernels` are those of the
    device, and `adapts_experts` says whether routed experts have adapters. A `teacher` passes over
    every buffer as well.

    Returns:
        The plan. Without a known memory a buffer is about one group. Where nothing fits, it is the
        plan that needs the least memory.

    Raises:
        UserError: a row does not fit into the wanted size.
    """
    longest = rows.prompt - 1 + rows.new_tokens
    if buffer_tokens and buffer_tokens < longest:
        raise UserError(
            f"train.buffer_tokens={buffer_tokens} is less than the {longest} tokens of the longest "
            "row (prompt and completion): raise it, or pass 0 to choose it"
        )

    def plan(tokens: int, again: tuple[str, ...]) -> MemoryPlan:
        own = update_memory(
            model,
            tokens=tokens,
            recompute=again,
            dtype=dtype,
            adapter=adapter,
            kernels=kernels,
            adapts_experts=adapts_experts,
        )
        if teacher is None:
            return own
        options = {"tokens": tokens, "dtype": dtype, "kernels": kernels}
        passes = update_memory(teacher, recompute=PRODUCTS, adapter=0, **options)
        # At most what one layer or the head takes with its gradient.
        return dataclasses.replace(own, teacher=max(passes.head, passes.layer))

    if free is None:
        group = rows.prompt - 1 + rows.group_size * rows.new_tokens
        size = _round_up(max(longest, min(group, _CPU_BUFFER)), _CPU_MULTIPLE)
        return plan(buffer_tokens or size, recompute or ())
    smallest = _round_up(buffer_tokens or longest, _MULTIPLE)
    largest = smallest if buffer_tokens else max(smallest, _LARGEST_BUFFER)
    choices = RECOMPUTATIONS if recompute is None else (recompute,)
    costs: dict[MemoryPlan, float] = {}
    for size in range(smallest, largest + 1, _MULTIPLE):
        plans = [plan(size, again) for again in choices]
        fitting = [option for option in plans if option.bytes <= free]
        if not fitting:
            break
        positions = _computed_positions(rows, size)
        costs |= {option: positions * _relative_time(model, option.recompute) for option in fitting}
    return min(costs, key=lambda option: costs[option]) if costs else plan(smallest, choices[-1])


@functools.lru_cache(maxsize=4096)
def _computed_positions(rows: LongestRows, size: int) -> float:
    """Positions that a device computes in an update with buffers of a size.

    They are those of the longest batch, what each call costs besides, and half a buffer of padding,
    because a batch of shorter rows ends anywhere in its last buffer.
    """
    groups = np.repeat(np.arange(rows.num_prompts), rows.group_size)
    ones = np.ones_like(groups)
    parts = layout((rows.prompt - 1) * ones, rows.new_tokens * ones, groups, buffer_tokens=size)
    return -(-len(parts) // rows.devices) * (size + _TOKENS_OF_A_CALL) + size / 2


@functools.cache
def _relative_time(model: ModelConfig, again: tuple[str, ...]) -> float:
    """Time of an update that computes some products again, relative to one that computes none.

    A frozen weight has one product in the forward pass and one in the backward pass. Computing the
    first one again makes three of two.
    """
    sizes = kinds.product_sizes(model)
    return 1 + sum(sizes.get(name, 0) for name in again) / (2 * sum(sizes.values()))


def recomputation(value: str) -> tuple[str, ...] | None:
    """Returns the products that train.recompute names, None for 'auto'.

    Raises:
        UserError: a name is unknown.
    """
    if value == "auto":
        return None
    shorthands = {"none": (), "all": PRODUCTS}
    names = shorthands.get(value, tuple(name.strip() for name in value.split(",")))
    if not set(names) <= set(PRODUCTS):
        raise UserError(
            f"train.recompute={value!r}: choose 'auto', 'none', 'all', or names from "
            f"{', '.join(PRODUCTS)}, separated by commas"
        )
    return tuple(name for name in PRODUCTS if name in names)


def update_memory(
    model: ModelConfig,
    *,
    tokens: int,
    recompute: tuple[str, ...],
    dtype: jnp.dtype,
    adapter: int,
    kernels: Kernels = _HOPPER,
    adapts_experts: bool = False,
) -> MemoryPlan:
    """Returns the bytes of an update on a buffer of `tokens` positions.

    They equal those of XLA's memory analysis of the compiled program to 1 %, and with recurrent
    layers to 3 %, without their kernel about to 10 %. The forward pass keeps the results of the
    products of every layer. `tokens` are the positions of the buffer; the others are as in
    `plan_update`.
    """
    buffer, itemsize = PlannedBuffer(dtype, tokens, recompute, kernels.layers), dtype.itemsize
    costs = {part: part.memory(model, buffer) for part in kinds.parts_of(model)}
    layers, widths = collections.Counter(kinds.layers_of(model)), {}
    kept_width = model.num_layers * model.embed_dim
    for (mixer, mlp), count in layers.items():
        own = costs[mixer].kept | costs[mlp].kept
        kept_width += count * sum(size for name, size in own.items() if name not in recompute)
        widths |= {name: max(size, widths.get(name, 0)) for name, size in own.items()}
    loose = kept_width
    if "gate_up_proj" not in recompute:
        loose -= model.num_layers * widths["gate_up_proj"]
    kept_width += int((max(costs[mixer].spread for mixer, _ in layers) - 1) * loose)
    # One layer while its backward pass runs: its adapter; its states, and where weights are cut
    # two that are summed over devices; the products that it computes again; and the temporary
    # arrays of its parts, of which those of mixers and of MLPs do not exist at the same time.
    states = model.embed_dim * (4 if model.shards == 1 else 6)
    recomputed_width = sum(widths[name] for name in recompute if name != "gate_up_proj")
    layer = itemsize * tokens * (states + recomputed_width)
    scores = 0 if kernels.attention else max(costs[mixer].scores for mixer, _ in layers)
    mixing = max(costs[mixer].backward for mixer, _ in layers)
    of_mixers = max(costs[mixer].adapter for mixer, _ in layers)
    layer += max(
        scores,
        *(
            costs[mlp].backward + adapts_experts * max(costs[mlp].adapter, of_mixers)
            for _, mlp in layers
        ),
    )
    own_adapter = adapter // model.num_layers
    if adapts_experts:
        # The gradients of all layers in float32, which the totals are added to at the end; and of
        # a layer what they are made of.
        floats = 4 * adapter // itemsize
        own_adapter = floats + 3 * floats // model.num_layers
    # Final states and their gradients; the logits of a chunk in float32, and their gradient.
    logits = min(logits_chunk(model.vocab_size), tokens) * model.vocab_size
    head = itemsize * 4 * tokens * model.embed_dim
    # The experts that a rollout recorded and those that the routers choose, in int32.
    routes = 2 * 4 * model.num_layers * model.experts.top_k if model.experts else 0
    return MemoryPlan(
        activations=tokens * (itemsize * kept_width + routes),
        head=head + (4 + itemsize) * logits,
        layer=max(layer, mixing) + own_adapter,
        buffer_tokens=tokens,
        recompute=recompute,
    )


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
