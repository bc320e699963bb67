"""What training changes: the adapter, the adapter and the layers' norms, or every parameter."""

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from qerl_jax.errors import UserError
from qerl_jax.policy import aqn
from qerl_jax.policy.layers import kinds
from qerl_jax.policy.lora import Lora
from qerl_jax.policy.quant import QuantTensor

PARAMETERS = ("lora", "lora+norms", "full")


@struct.dataclass
class Trainable:
    """The trained part of a policy."""

    lora: Lora | None  # the adapter, or None where every parameter is trained
    # A tree of the trained parameters only, in float32: {} for 'lora', the two norms of each layer
    # for 'lora+norms', every parameter for 'full'.
    params: dict


def trained_params(params: dict, parameters: str) -> dict:
    """Returns the part of a parameter tree that is trained besides the adapter, in float32.

    The dtype is float32 whatever the policy computes in, because an update of 1e-6 would vanish in
    bfloat16.

    Args:
        params: the parameters of the policy.
        parameters: 'lora', 'lora+norms' or 'full'.

    Raises:
        UserError: `parameters` is unknown, or it is 'full' and weights are packed or of experts.
    """
    match parameters:
        case "lora":
            return {}
        case "lora+norms":
            layers = params["layers"]
            part = {"layers": [{n: layer[n] for n in aqn.LAYER_NORMS} for layer in layers]}
        case "full":
            part = params
        case _:
            raise UserError(
                f"unknown train.parameters {parameters!r}: choose from {', '.join(PARAMETERS)}"
            )
    if parameters == "full" and any(kinds.STACKS.keys() & layer for layer in params["layers"]):
        raise UserError(
            "train.parameters='full' trains the weights, but those of experts have no gradient: "
            "pass train.parameters=lora"
        )
    leaves = jax.tree.leaves(part, is_leaf=lambda leaf: isinstance(leaf, QuantTensor))
    if any(isinstance(leaf, QuantTensor) for leaf in leaves):
        raise UserError(
            "train.parameters='full' trains the weights, but packed weights have no gradient: pass "
            "--config.model.format=bf16, or train.parameters=lora"
        )
    return jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), part)


def checksum(trainable: Trainable) -> int:
    """Returns the CRC-32 of the trained parameters."""
    crc = 0
    for leaf in jax.tree.leaves(trainable):
        crc = zlib.crc32(np.ascontiguousarray(leaf).view(np.uint8), crc)
    return crc


def current_policy(params: dict, trainable: Trainable, noise: aqn.Noise | None = None) -> dict:
    """Returns the current policy: frozen parameters, trained parameters and noise together.

    Args:
        params: the parameters before training; those that are not trained are returned as the same
            objects.
        trainable: the trained part, which is rounded to the dtypes of `params`.
        noise: the noise on the norm scales, or None.
    """
    params = _replace(params, trainable.params)
    return params if noise is None else aqn.add_noise(params, noise)


def _replace(tree: Any, replacement: Any) -> Any:
    """Returns `tree` with those leaves replaced that `replacement` also has."""
    if isinstance(replacement, dict):
        return tree | {name: _replace(tree[name], value) for name, value in replacement.items()}
    if isinstance(replacement, list):
        return [_replace(*pair) for pair in zip(tree, replacement, strict=True)]
    return replacement.astype(tree.dtype)
