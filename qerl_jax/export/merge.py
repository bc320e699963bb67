"""Merges an adapter into weights, and measures how much of the update the rounding keeps.

A merged weight is W + scale * B A, summed in float32 and rounded once, to bfloat16 or to 4 bits.
The update is small compared to the weights, so rounding can remove it. If the weights are on the
4-bit grid already, as the weights of an NVFP4 base are, an update of less than half the distance
between two code points changes nothing at all, unless the columns of a weight make up for the
errors of the columns before (`calibrated_merge`). `UpdateRetention` measures what remains of the
update in the weights; `card_scores.probe_kl` measures the effect on the policy.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from qerl_jax.data.prompts import encode_prompts
from qerl_jax.evaluation.load_policy import LoadedPolicy
from qerl_jax.evaluation.tasks import training_problems
from qerl_jax.policy.aqn import LAYER_NORMS
from qerl_jax.policy.layers.kinds import ALL_FUSED, FUSED, STACKS, member_bounds, stack_shapes
from qerl_jax.policy.lora import Lora, expert_update, merge_layer
from qerl_jax.policy.quant import QuantTensor, checkpoint_order, dequantize, quantize
from qerl_jax.quantization.calibration import calibrated_updates
from qerl_jax.quantization.calibration_text import TextConfig, choose_prompts, sample_windows
from qerl_jax.rollout.config import EngineConfig
from qerl_jax.rollout.shapes import dequantize_mode
from qerl_jax.system.live_line import waiting
from qerl_jax.weights.chat_template import template_date
from qerl_jax.weights.load import LoadedModel
from qerl_jax.weights.names import interleaves

_FOUR_BITS = ("nvfp4", "mxfp4")


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
    model: LoadedModel, lora: Lora | None, *, format: str, retention: dict[str, UpdateRetention]
) -> Iterator[dict]:
    """Yields the layers of a model with the adapter merged into them, as NumPy arrays.

    The measures of the kept update go into `retention` by projection, where there is an update.
    Experts are merged and rounded one after the other.

    Args:
        model: the model.
        lora: its adapter, or None.
        format: 'nvfp4' and 'mxfp4' round the weights of `kinds.PACKED` to these formats, NVFP4 as
            llm-compressor would round the merged bfloat16 weights. 'bf16' rounds to bfloat16, and
            so does 'q8_0', which GGUF files round further: that is measured as well.
        retention: where the measures go.

    Raises:
        UserError: a merged weight cannot be packed.
    """
    for number, (layer, merged, updates) in enumerate(_merged(model, lora)):
        adapters = {} if lora is None else lora.layers[number]
        experts = {}
        for name, shape in stack_shapes(model.config, number).items():
            update = None
            if lora is not None and name in adapters:
                update = functools.partial(expert_update, adapters[name], lora.scale)
            weight, form = layer[name], format
            if update is None and interleaves(model.config) and isinstance(weight, QuantTensor):
                # Those of gpt-oss are published in MXFP4.
                form = weight.format if weight.format == "mxfp4" else format
            experts[name] = _round_experts(
                weight, shape, name, update, format=form, retention=retention
            )
        for fused, update in updates.items():
            form = format if fused in FUSED else "bf16"
            bounds = member_bounds(fused, model.config)
            ends = [_round(weight[fused], bounds, format=form) for weight in (layer, merged)]
            seen = [_as_read(weight, format) for weight in ends]
            _retain(retention, ALL_FUSED[fused], bounds, (*seen, update))
            merged[fused] = jax.device_get(ends[1])
        yield merged | experts


def calibrated_merge(
    model: LoadedModel,
    lora: Lora,
    tokens: np.ndarray,
    *,
    retention: dict[str, UpdateRetention],
) -> Iterator[dict]:
    """Yields the layers of a model with the adapter merged into them, in NVFP4 by GPTQ.

    Weights that are in NVFP4 keep their scales: without the update they would keep their codes,
    too, so that all errors are those of the update. Its targets are dithered, so that it is kept on
    average, and GPTQ makes up for the noise. Experts in NVFP4 stay as they are, so the adapter must
    not change them. The measures of the update are as in `merged_layers`, but what changes are
    the weights of the model.

    Args:
        model: the model.
        lora: its adapter.
        tokens: int32 [B, T] token ids of a text of the trained policy.
        retention: where the measures go.

    Raises:
        UserError: as in `calibrate`.
    """
    waiting = []

    def layers() -> Iterator[tuple[dict, dict]]:
        for layer, merged, updates in _merged(model, lora):
            waiting.append((layer, updates))
            grids = {
                name: checkpoint_order(layer[name])
                for name in updates
                if isinstance(layer[name], QuantTensor) and layer[name].format == "nvfp4"
            }
            yield merged | {s: _in_order(layer[s]) for s in STACKS if s in layer}, grids

    for packed in calibrated_updates(model, layers(), tokens):
        layer, updates = waiting.pop()
        arrays = packed.arrays
        for fused, update in updates.items():
            bounds = member_bounds(fused, model.config)
            if not isinstance(arrays[fused], QuantTensor):
                arrays[fused] = _round(arrays[fused], bounds, format="bf16")
            _retain(retention, ALL_FUSED[fused], bounds, (layer[fused], arrays[fused], update))
        yield jax.device_get(arrays)


def calibration_windows(policy: LoadedPolicy, *, trusted: bool) -> np.ndarray:
    """Returns training prompts of the run of a policy with its own completions, int32 [B, T].

    Raises:
        UserError: the run is that of another person and not trusted, or its problems cannot be
            read.
    """
    assert policy.run is not None
    run, model = policy.run["config"], policy.model
    text = TextConfig(max_new_tokens=min(512, run["rollout"]["max_new_tokens"]))
    problems = choose_prompts(training_problems(run, trusted=trusted), text)
    limit = run["data"]["max_prompt_tokens"]
    with template_date(policy.created):
        prompts = encode_prompts(problems, model.tokenizer, policy.prompt, max_prompt_tokens=limit)
    engine = EngineConfig(
        max_rows=run["rollout"]["max_rows"] or 64,
        chunk_steps=run["rollout"]["chunk_steps"],
        dequantize=dequantize_mode(model.params, run["rollout"]["dequantize"]),
        kv_cache_dtype=run["rollout"]["kv_cache_dtype"],
        compact="once",
    )
    with waiting(f"sampling completions of {len(prompts)} prompts for the calibration"):
        ids = [prompt.ids for prompt in prompts]
        return sample_windows(model, ids, text, engine, policy.lora)


def _in_order(weight: jax.Array | QuantTensor) -> jax.Array | QuantTensor:
    return checkpoint_order(weight) if isinstance(weight, QuantTensor) else weight


def _merged(
    model: LoadedModel, lora: Lora | None
) -> Iterator[tuple[dict, dict, dict[str, jax.Array]]]:
    """Yields each layer, its arrays but for experts with the adapter merged, and the updates."""
    scale = 0.0 if lora is None else lora.scale
    merge = jax.jit(functools.partial(merge_layer, config=model.config, scale=scale))
    for number, layer in enumerate(model.params["layers"]):
        plain = {name: array for name, array in layer.items() if name not in STACKS}
        merged, updates = merge(plain, {} if lora is None else lora.layers[number])
        yield layer, merged, updates


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
    weight: jax.Array | QuantTensor, bounds: Sequence[int], *, format: str
) -> np.ndarray | QuantTensor:
    """Rounds a fused weight to 'nvfp4' or 'mxfp4', and otherwise to bfloat16.

    A weight in the format stays as it is.
    """
    if isinstance(weight, QuantTensor):
        if format == weight.format:
            return weight
        weight = _dense(weight)
    dense = np.asarray(weight).astype(ml_dtypes.bfloat16)
    return quantize(np.split(dense, bounds), format=format) if format in _FOUR_BITS else dense


def _round_experts(
    weight: jax.Array | QuantTensor,
    shape: tuple[int, int, int],
    name: str,
    update: Callable[[int], jax.Array] | None,
    *,
    format: str,
    retention: dict[str, UpdateRetention],
) -> np.ndarray | QuantTensor:
    """Rounds a stack of experts of a shape (E, N, K), as `_round` does with a fused weight.

    `update` returns what is added to an expert, float32 [N, K]; None for nothing.
    """
    if isinstance(weight, QuantTensor):
        weight = jax.device_get(checkpoint_order(weight))
        if format == weight.format and update is None:
            return weight
    members = [f"experts.{member}" for member in STACKS[name].members]
    bounds = [shape[1] // len(members) * member for member in range(1, len(members))]

    def rounded(expert: int) -> np.ndarray | QuantTensor:
        rows = slice(expert * shape[1], (expert + 1) * shape[1])
        own = jax.tree.map(lambda array: array[rows], weight)
        before = _round(own, bounds, format=format)
        if update is None:
            return before
        added = update(expert)
        dense = _dense(own) if isinstance(own, QuantTensor) else jnp.asarray(own, jnp.float32)
        after = _round(dense + added, bounds, format=format)
        seen = [_as_read(weight, format) for weight in (before, after)]
        _retain(retention, members, bounds, (*seen, added))
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


def _as_read(weight: np.ndarray | QuantTensor, format: str) -> jax.Array | np.ndarray | QuantTensor:
    """Returns a rounded weight as a reader of a file gets it; Q8_0 rounds once more."""
    return _as_q8_0(weight) if format == "q8_0" else weight


@jax.jit
def _as_q8_0(weight: jax.Array) -> jax.Array:
    """Returns what Q8_0 keeps of a weight [N, K]: 8 bits, and a float16 scale for 32 inputs."""
    if weight.shape[1] % 32:
        return weight
    blocks = weight.astype(jnp.float32).reshape(len(weight), -1, 32)
    scales = jnp.abs(blocks).max(axis=-1, keepdims=True) / 127
    codes = jnp.round(blocks / jnp.where(scales == 0, 1, scales))
    return (codes * scales.astype(jnp.float16).astype(jnp.float32)).reshape(weight.shape)


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
