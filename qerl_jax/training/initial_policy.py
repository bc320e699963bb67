"""The policy that training starts from: the first trained parameters, and the reference policy."""

import hashlib

import jax
import numpy as np
from ml_collections import ConfigDict

from qerl_jax.errors import UserError
from qerl_jax.policy import lora as lora_lib
from qerl_jax.policy.lora import LoraConfig
from qerl_jax.policy.policy import Policy
from qerl_jax.policy.trainable import Trainable, current_policy, trained_params
from qerl_jax.weights.load import LoadedModel
from qerl_jax.weights.peft import load_peft_adapter

# Folded into the key of the run. The steps fold their number into the same key, from 0 on.
KEY_LORA = 2**32 - 1


def first_trainable(
    config: ConfigDict, model: LoadedModel, lora_config: LoraConfig, key: jax.Array
) -> Trainable:
    """The trained parameters before the first step: a new or a given adapter, norms, or all.

    Args:
        config: the resolved config.
        model: the model before training.
        lora_config: rank, scale and targets of the adapter.
        key: key of the run.

    Raises:
        UserError: the given adapter cannot be read, or does not fit the config.
    """
    parameters = config.train.parameters
    if parameters == "full":
        return Trainable(lora=None, params=trained_params(model.params, parameters))
    if not config.lora.init:
        lora = lora_lib.init(jax.random.fold_in(key, KEY_LORA), model.config, lora_config)
        return Trainable(lora=lora, params=trained_params(model.params, parameters))
    adapter = load_peft_adapter(config.lora.init, model.config, lora_config)
    if adapter.params and parameters == "lora":
        raise UserError(
            f"{config.lora.init}: the adapter comes with trained norms: pass "
            "--config.train.parameters=lora+norms"
        )
    policy = current_policy(model.params, adapter)
    return Trainable(lora=adapter.lora, params=trained_params(policy, parameters))


def reference_policy(
    config: ConfigDict, model: LoadedModel, lora_config: LoraConfig, key: jax.Array
) -> Policy:
    """Returns the policy that the KL of the loss is measured to: the one that training starts from.

    A new adapter is zero, so the policy is then the model itself. A given adapter (`lora.init`) is
    read once more, because updates overwrite the buffers of the trained one. TRL freezes a copy of
    a loaded adapter in the same way.

    Args:
        config: the resolved config.
        model: the model before training.
        lora_config: rank, scale and targets of the adapter.
        key: key of the run.

    Returns:
        The policy. Without a KL in the loss it is the model's.

    Raises:
        UserError: the given adapter cannot be read, or does not fit the config.
    """
    if not _starts_from_an_adapter(config):
        return Policy(model.params, None)
    start = first_trainable(config, model, lora_config, key)
    return Policy(current_policy(model.params, start), start.lora)


def reference_digest(config: ConfigDict, reference: Policy) -> str | None:
    """Returns the identity of a reference policy that is not the model itself, else None.

    Args:
        config: the resolved config.
        reference: as `reference_policy` returns it.
    """
    if not _starts_from_an_adapter(config):
        return None
    return policy_digest(reference)


def policy_digest(policy: Policy) -> str:
    """Digest of the norms and the adapter of a policy."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves((trained_params(policy.params, "lora+norms"), policy.lora)):
        digest.update(np.asarray(leaf, np.float32).tobytes())
    return digest.hexdigest()


def check_reference(config: ConfigDict, saved: str | None, current: str | None) -> None:
    """Refuses a reference policy that is not the one of a checkpoint.

    Args:
        config: the resolved config.
        saved: digest of the reference policy when the checkpoint was saved.
        current: digest of the reference policy of this start.

    Raises:
        UserError: the digests differ.
    """
    if saved == current:
        return
    raise UserError(
        f"the adapter of lora.init={config.lora.init} is not the adapter that this run began with, "
        f"to which rl.kl_coef={config.rl.kl_coef} measures the KL; restore it or pass another "
        "--workdir"
    )


def _starts_from_an_adapter(config: ConfigDict) -> bool:
    """Whether the KL is measured to a policy with an adapter."""
    return bool(config.rl.kl_coef and config.lora.init and config.train.parameters != "full")
