"""Adapters merged into weights, and what remains of the update after the weights are rounded.

A merged weight is W + scale * B A, summed in float32 and rounded once: to bfloat16, or to NVFP4.
The update is small beside the weights, so rounding can swallow it. Where the weights lie on the
4-bit grid already, as those of an NVFP4 base do, an update of less than half a step between two
code points changes nothing at all. `Kept` counts what remains in the weights, `mean_kl` in the
policy.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from qerl_jax.policy import transformer
from qerl_jax.policy.aqn import LAYER_NORMS
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.lora import FUSED, Lora, merge_layer, projection_shapes
from qerl_jax.policy.quant import QuantTensor, dequantize, quantize
from qerl_jax.weights.load import LoadedModel


@dataclasses.dataclass
class Kept:
    """How much of the update dW of some weights is in the weights that are written.

    With `change`, the difference that the update makes to them: all three are sums over elements.

    Attributes:
        overlap: of change * dW.
        update: of dW^2.
        error: of (change - dW)^2.
    """

    overlap: float = 0.0
    update: float = 0.0
    error: float = 0.0

    def add(self, sums: Sequence[float]) -> None:
        """Adds the sums over more weights."""
        self.overlap += float(sums[0])
        self.update += float(sums[1])
        self.error += float(sums[2])

    @property
    def share(self) -> float:
        """<change, dW> / <dW, dW>: 1 where the update is there, 0 where it is lost."""
        return self.overlap / self.update

    @property
    def relative_error(self) -> float:
        """|change - dW| / |dW|."""
        return (self.error / self.update) ** 0.5


def merged_layers(
    model: LoadedModel, lora: Lora | None, *, packed: bool, kept: dict[str, Kept]
) -> Iterator[dict]:
    """The layers of a parameter tree with the adapter merged into them, one at a time.

    Args:
        model: the weights to merge into, dense or packed.
        lora: the adapter; None where the weights themselves were trained.
        packed: round to NVFP4, as llm-compressor would round the merged bfloat16 weights, instead
            of to bfloat16.
        kept: what is kept of the update is added here, by projection; one without an update is
            left out.

    Yields:
        Layers with the projections in bfloat16 or packed, as NumPy arrays.

    Raises:
        UserError: a merged weight cannot be packed.
    """
    scale = 0.0 if lora is None else lora.scale
    merge = jax.jit(functools.partial(merge_layer, config=model.config, scale=scale))
    shapes = projection_shapes(model.config)
    for number, layer in enumerate(model.params["layers"]):
        merged, updates = merge(layer, {} if lora is None else lora.layers[number])
        for fused, members in FUSED.items():
            ends = np.cumsum([shapes[member][0] for member in members])
            before = _rounded(layer[fused], ends, packed=packed)
            after = _rounded(merged[fused], ends, packed=packed)
            sums = np.asarray(_row_sums(before, after, updates[fused]), np.float64)
            for member, rows in zip(members, np.split(sums, ends[:-1], axis=1), strict=True):
                if rows[1].any():
                    kept.setdefault(member, Kept()).add(rows.sum(axis=1).tolist())
            merged[fused] = jax.device_get(after)
        yield merged


def norms_kept(before: dict, after: dict) -> dict[str, Kept]:
    """What bfloat16 keeps of the norms that were trained beside an adapter.

    Args:
        before: the parameter tree before the training.
        after: the one after it.

    Returns:
        {'norms': ...}, or {} where none was trained.
    """
    kept = Kept()
    for old, new in zip(before["layers"], after["layers"], strict=True):
        for norm in LAYER_NORMS:
            update = np.asarray(new[norm], np.float64) - np.asarray(old[norm], np.float64)
            ends = [np.asarray(layer[norm], ml_dtypes.bfloat16) for layer in (old, new)]
            change = ends[1].astype(np.float64) - ends[0].astype(np.float64)
            sums = (change * update, update**2, (change - update) ** 2)
            kept.add([x.sum() for x in sums])
    return {"norms": kept} if kept.update else {}


def _rounded(
    weight: jax.Array | QuantTensor, ends: np.ndarray, *, packed: bool
) -> np.ndarray | QuantTensor:
    """A fused weight as it is written; one that is in NVFP4 already stays as it is."""
    if isinstance(weight, QuantTensor):
        if packed and weight.format == "nvfp4":
            return weight
        weight = _dense(weight)
    dense = np.asarray(weight).astype(ml_dtypes.bfloat16)
    return quantize(np.split(dense, ends[:-1]), format="nvfp4") if packed else dense


@jax.jit
def _dense(weight: QuantTensor) -> jax.Array:
    return dequantize(weight, jnp.float32)


@jax.jit
def _row_sums(before, after, update):
    """float32 [3, N]: the sums of `Kept` over each row of [N, K]."""
    before, after = (
        dequantize(weight, jnp.float32)
        if isinstance(weight, QuantTensor)
        else weight.astype(jnp.float32)
        for weight in (before, after)
    )
    change = after - before
    sums = (change * update, jnp.square(update), jnp.square(change - update))
    return jnp.stack([jnp.sum(x, axis=1) for x in sums])


def completion_logprobs(
    model: LoadedModel,
    lora: Lora | None,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
) -> list[np.ndarray]:
    """The log-probabilities of every token of the vocabulary at every place of some completions.

    Args:
        model: the policy.
        lora: its adapter, or None.
        prompts: P lists of ids.
        completions: P lists of ids, C of them in each.

    Returns:
        float32 [C, V] for every prompt.
    """
    texts = [[*pair[0], *pair[1]] for pair in zip(prompts, completions, strict=True)]
    width, found = max(map(len, texts)), []
    for prompt, text in zip(prompts, texts, strict=True):
        tokens = np.zeros((1, width), np.int32)
        tokens[0, : len(text)] = text
        logits = _forward(model.params, lora, tokens, config=model.config)
        found.append(np.asarray(jax.nn.log_softmax(logits[0, len(prompt) - 1 : len(text) - 1])))
    return found


@functools.partial(jax.jit, static_argnames="config")
def _forward(params: dict, lora: Lora | None, tokens: jax.Array, *, config: ModelConfig):
    lengths = jnp.full(len(tokens), tokens.shape[1])
    return transformer.forward(params, lora, tokens, lengths, config=config)


def mean_kl(logprobs: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> float:
    """KL(policy | other), the mean over all places, in nats; see `completion_logprobs`."""
    kl = [np.sum(np.exp(p) * (p - q), axis=-1) for p, q in zip(logprobs, others, strict=True)]
    return float(np.concatenate(kl).mean())
