"""A policy: the parameters of a model with the adapter that it samples and is trained with."""

from typing import NamedTuple

from qerl_jax.policy.lora import Lora


class Policy(NamedTuple):
    """The arrays of a policy, on one device or on a mesh.

    Attributes:
        params: parameters of the model, with the noise on them if there is any.
        lora: the adapter, or None.
    """

    params: dict
    lora: Lora | None
