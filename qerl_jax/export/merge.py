"""Merges an adapter into weights, and measures how much of the update the rounding keeps.

A merged weight is W + scale * B A, summed in float32 and rounded once, to bfloat16 or to NVFP4. The
update is small compared to the weights, so rounding can remove it. If the weights are on the 4-bit
grid already, as the weights of an NVFP4 base are, an update of less than half the distance between
two code points changes nothing at all. `UpdateRetention` measures what remains of the update in the
weights; `card_scores.probe_kl` measures the effect on the policy.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from qerl_jax.policy.aqn import LAYER_NORMS
from qerl_jax.policy.layers.kinds import ALL_FUSED, FUSED, STACKS, member_bounds, stack_shapes
from qerl_jax.policy.lora import Lora, expert_update, merge_layer
from qerl_jax.policy.quant import QuantTensor, checkpoint_order, dequantize, quantize
from qerl_jax.weights.load import LoadedModel


@dataclasses.dataclass
class UpdateRetention:
    """Measures how much of the update dW of some weights is in the weights that are written.

    Let `change` be the difference that the update makes in the written weights. The fields are sums
    over all elements.
    """

    overlap: float = 0.0  # change * dW
    update: float = 0.0  # dW^2
    error: float = 0.0  # (change - dW)^2

    def add(self, sums: Sequence[float]) -> None:
        """Adds the sums (overlap, update, error) over more weights."""
        self.overlap += float(sums[0])
        self.update += float(sums[1])
        self.error += float(sums[2])

    @property
    def kept_fraction(self) -> float:
        """<change, dW> / <dW, dW>: 1 if the update is kept, 0 if it is lost."""
        return self.overlap / self.update

    @property
    def relative_error(self) -> float:
        """|change - dW| / |dW|: 0 if the update is kept exactly, 1 if it is lost."""
        return (self.error / self.update) ** 0.5


def merged_layers(
    model: LoadedModel, lora: Lora | None, *, packed: bool, retention: dict[str, UpdateRetention]
) -> Iterator[dict]:
    """Yields the layers of a model with the adapter merged into them, as NumPy arrays.

    With `packed` the weights are rounded to NVFP4, as llm-compressor would round the merged
    bfloat16 weights, instead of to bfloat16; only those of `kinds.PACKED` are. The measures of
    the kept update go into `retention` by projection, where there is an update. Experts are merged
    and rounded one after the other.

    Raises:
        UserError: a merged weight cannot be packed.
    """
    scale = 0.0 if lora is None else lora.scale
    merge = jax.jit(functools.partial(merge_layer, config=model.config, scale=scale))
    for number, layer in enumerate(model.params["layers"]):
        adapters = {} if lora is None else lora.layers[number]
        experts = {}
        for name, shape in stack_shapes(model.config, number).items():
            update = (
                functools.partial(expert_update, adapters[name], scale)
                if name in adapters
                else None
            )
            experts[name] = _round_experts(
                layer[name], shape, name, update, packed=packed, retention=retention
            )
        layer = {name: array for name, array in layer.items() if name not in experts}
        merged, updates = merge(layer, adapters)
        for fused, members in ALL_FUSED.items():
            if fused not in layer:
                continue
            packs = packed and fused in FUSED
            bounds = member_bounds(fused, model.config)
            before = _round(layer[fused], bounds, packed=packs)
            after = _round(merged[fused], bounds, packed=packs)
            _retain(retention, members, bounds, (before, after, updates[fused]))
            merged[fused] = jax.device_get(after)
        yield merged | experts


def norm_retention(before: dict, after: dict) -> dict[str, UpdateRetention]:
    """Measures how much of the update of trained norms bfloat16 keeps.

    Returns:
        The measure under the key 'norms', or {} if no norm was trained.
    """
    retention = UpdateRetention()
    for layer_before, layer_after in zip(before["layers"], after["layers"], strict=True):
        for norm in LAYER_NORMS:
            ends = [np.asarray(layer[norm]) for layer in (layer_before, layer_after)]
            update = np.subtract(ends[1], ends[0], dtype=np.float64)
            rounded = [end.astype(ml_dtypes.bfloat16).astype(np.float64) for end in ends]
            change = rounded[1] - rounded[0]
            sums = (change * update, update**2, (change - update) ** 2)
            retention.add([x.sum() for x in sums])
    return {"norms": retention} if retention.update else {}


def _round(
    weight: jax.Array | QuantTensor, bounds: Sequence[int], *, packed: bool
) -> np.ndarray | QuantTensor:
    """Rounds a fused weight to the written format; an NVFP4 weight stays as it is."""
    if isinstance(weight, QuantTensor):
        if packed and weight.format == "nvfp4":
            return weight
        weight = _dense(weight)
    dense = np.asarray(weight).astype(ml_dtypes.bfloat16)
    return quantize(np.split(dense, bounds), format="nvfp4") if packed else dense


def _round_experts(
    weight: jax.Array | QuantTensor,
    shape: tuple[int, int, int],
    name: str,
    update: Callable[[int], jax.Array] | None,
    *,
    packed: bool,
    retention: dict[str, UpdateRetention],
) -> np.ndarray | QuantTensor:
    """Rounds a stack of experts of a shape (E, N, K), as `_round` does with a fused weight.

    `update` returns what is added to an expert, float32 [N, K]; None for nothing.
    """
    if isinstance(weight, QuantTensor):
        weight = jax.device_get(checkpoint_order(weight))
        if packed and weight.format == "nvfp4" and update is None:
            return weight
    members = [f"experts.{member}" for member in STACKS[name].members]
    bounds = [shape[1] // len(members) * member for member in range(1, len(members))]

    def rounded(expert: int) -> np.ndarray | QuantTensor:
        rows = slice(expert * shape[1], (expert + 1) * shape[1])
        own = jax.tree.map(lambda array: array[rows], weight)
        before = _round(own, bounds, packed=packed)
        if update is None:
            return before
        added = update(expert)
        dense = _dense(own) if isinstance(own, QuantTensor) else jnp.asarray(own, jnp.float32)
        after = _round(dense + added, bounds, packed=packed)
        _retain(retention, members, bounds, (before, after, added))
        return after

    parts = map(rounded, range(shape[0]))
    return jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)


def _retain(
    retention: dict[str, UpdateRetention],
    members: Sequence[str],
    bounds: Sequence[int],
    weights: tuple,
) -> None:
    """Adds the measures of a weight before and after its update, and of that, by its members."""
    sums = np.asarray(_row_sums(*weights), np.float64)
    for member, rows in zip(members, np.split(sums, bounds, axis=1), strict=True):
        if rows[1].any():
            retention.setdefault(member, UpdateRetention()).add(rows.sum(axis=1).tolist())


@jax.jit
def _dense(weight: QuantTensor) -> jax.Array:
    return dequantize(weight, jnp.float32)


@jax.jit
def _row_sums(before, after, update):
    """Returns the sums of `UpdateRetention` over each row of weights [N, K], float32 [3, N]."""
    before, after = (
        dequantize(weight, jnp.float32)
        if isinstance(weight, QuantTensor)
        else weight.astype(jnp.float32)
        for weight in (before, after)
    )
    change = after - before
    sums = (change * update, jnp.square(update), jnp.square(change - update))
    return jnp.stack([jnp.sum(x, axis=1) for x in sums])
