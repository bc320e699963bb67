"""The policy before the first step: the model, its first trained parameters, and the reference.

The model is calibrated where the config asks for it, once, before the first step.
"""

import functools
import hashlib
import json
import re
import sys
from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from qerl_jax.data.from_config import check_positions, encode_problems, training_prompts
from qerl_jax.data.prompts import Problem, Prompt
from qerl_jax.errors import UserError
from qerl_jax.policy import lora as lora_lib
from qerl_jax.policy.lora import LoraConfig
from qerl_jax.policy.policy import Policy
from qerl_jax.policy.sharding import shard_params
from qerl_jax.policy.trainable import Trainable, current_policy, trained_params
from qerl_jax.processes.group import Processes
from qerl_jax.quantization import cache
from qerl_jax.quantization.base import (
    FACT,
    calibrated_base,
    is_calibrated,
    load_calibrated,
    recorded_digest,
    restored_base,
)
from qerl_jax.quantization.cache import Entry
from qerl_jax.run.folder import RunFolder, origin_of, record_fact
from qerl_jax.system.atomic import replace_file
from qerl_jax.system.safe_files import read_bytes
from qerl_jax.weights.checkpoint import Checkpoint, open_checkpoint
from qerl_jax.weights.load import LoadedModel, load
from qerl_jax.weights.peft import load_peft_adapter
from qerl_jax.weights.tokenizer import Tokenizer

# Folded into the key of the run. The steps fold their number into the same key, from 0 on.
KEY_LORA = 2**32 - 1


# --- The model ------------------------------------------------------------------------------------


def load_base(
    config: ConfigDict,
    problems: Mapping[str, list[Problem]],
    *,
    mesh: Mesh | None,
    processes: Processes,
    folder: RunFolder | None,
    fact: str = FACT,
    tokenizer: Tokenizer | None = None,
) -> tuple[LoadedModel, dict[str, list[Prompt]]]:
    """Loads the model before training, and renders the problems; refuses lengths that do not fit.

    In NVFP4 a model of 16 bits is calibrated on the training problems before the first step. A run
    that resumes, and one that begins from another one, take exactly the base that was recorded.
    `folder` is the run folder, which records the base and keeps the text that it was calibrated on;
    None for a run without one. `fact` is the name under which it records the base, and `tokenizer`
    renders the problems in place of that of the model.

    Returns:
        The model, and the prompts by split.

    Raises:
        UserError: the model cannot be loaded or calibrated, or its recorded base is missing.
    """
    _announce(config)
    put = functools.partial(shard_params, mesh=mesh)
    source, form, dtype = config.model.source, config.model.format, config.model.dtype
    checkpoint = open_checkpoint(source) if is_calibrated(config.model) else None
    if checkpoint is None or checkpoint.packed or checkpoint.tokenizer is None:
        model = load(source, format=form, dtype=dtype, put=put)
        check_positions(config, model.config)
        return model, encode_problems(config, tokenizer or model.tokenizer, problems)
    check_positions(config, checkpoint.config)
    prompts = encode_problems(config, tokenizer or checkpoint.tokenizer, problems)
    entry = None
    if processes.writes:
        entry = _base(config, checkpoint, prompts, processes=processes, folder=folder, fact=fact)
    digest = processes.broadcast_from_first(entry and entry.digest)
    entry = entry or cache.find(digest)
    if entry is None:
        raise UserError(
            f"the calibrated base {digest[:16]} is not in {cache.cache_folder()} of this host: "
            "copy it there, or set XDG_CACHE_HOME to a folder that all hosts share"
        )
    return load_calibrated(entry, checkpoint, dtype=dtype, put=put), prompts


def _base(
    config: ConfigDict,
    checkpoint: Checkpoint,
    prompts: Mapping[str, list[Prompt]],
    *,
    processes: Processes,
    folder: RunFolder | None,
    fact: str,
) -> Entry:
    """Returns the calibrated base that is recorded as `fact`, or else a new one, and records it."""
    own = {} if folder is None else json.loads(read_bytes(folder.config))
    text = None
    if folder is not None:
        text = folder.calibration if fact == FACT else folder.teacher_calibration
    if text is not None and (digest := recorded_digest(own, fact)):
        return restored_base(checkpoint, digest, text)
    if config.init_from:
        origin, _ = origin_of(config.init_from)
        digest = recorded_digest(json.loads(read_bytes(origin.config)))
        if not digest:
            raise UserError(
                f"init_from={config.init_from}: the run has no calibrated base; pass "
                "--config.model.calibration=none"
            )
        entry = restored_base(checkpoint, digest, origin.calibration)
    else:
        chosen = training_prompts(prompts)
        entry = calibrated_base(config, checkpoint, chosen, processes=processes.count)
    if folder is not None and text is not None:
        # The text first: a run whose base is recorded has the text to make it from.
        with replace_file(text) as temporary:
            temporary.write_bytes(read_bytes(entry.tokens))
        record_fact(folder, fact, {"digest": entry.digest})
    return entry


def _announce(config: ConfigDict) -> None:
    """Prints what is loaded, and warns where a large model would run on a CPU."""
    device = jax.devices()[0]
    size = re.search(r"-([0-9.]+)b(?:-|$)", config.preset)
    if device.platform == "cpu" and size and float(size[1]) >= 1:
        print(
            f"warning: preset {config.preset} has {size[1]} billion parameters and runs on a CPU, "
            "where a step takes hours; on a machine with an NVIDIA GPU install the GPU version, "
            "uv run --extra cuda python ..., and ask a scheduler for a GPU (SLURM: --gres=gpu:1)",
            file=sys.stderr,
            flush=True,
        )
    devices = config.mesh.data * config.mesh.tensor
    kind = f"{devices} x {device.device_kind}" if devices > 1 else device.device_kind
    print(f"loading {config.model.source} as {config.model.format} on {kind}", flush=True)


# --- What is trained, and what it is compared with ------------------------------------------------


def first_trainable(
    config: ConfigDict, model: LoadedModel, lora_config: LoraConfig, key: jax.Array
) -> Trainable:
    """The trained parameters before the first step: a new or a given adapter, norms, or all.

    `key` is that of the run.

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

    A new adapter is zero, so the policy is then the model itself, as it is without a KL in the
    loss. A given adapter (`lora.init`) is read once more, because updates overwrite the buffers of
    the trained one. TRL freezes a copy of a loaded adapter in the same way.
    """
    if not _starts_from_an_adapter(config):
        return Policy(model.params, None)
    start = first_trainable(config, model, lora_config, key)
    return Policy(current_policy(model.params, start), start.lora)


def reference_digest(config: ConfigDict, reference: Policy) -> str | None:
    """Returns the identity of a reference policy that is not the model itself, else None."""
    return policy_digest(reference) if _starts_from_an_adapter(config) else None


def policy_digest(policy: Policy) -> str:
    """Digest of the norms and the adapter of a policy."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves((trained_params(policy.params, "lora+norms"), policy.lora)):
        digest.update(np.asarray(leaf, np.float32).tobytes())
    return digest.hexdigest()


def _starts_from_an_adapter(config: ConfigDict) -> bool:
    """Whether the KL is measured to a policy with an adapter."""
    return bool(config.rl.kl_coef and config.lora.init and config.train.parameters != "full")
