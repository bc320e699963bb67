"""The base of a run: its model, calibrated where the config asks for it."""

import functools
import json
import re
import sys
from collections.abc import Mapping

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from qerl_jax.data.from_config import check_positions, encode_problems, training_prompts
from qerl_jax.data.prompts import Problem, Prompt
from qerl_jax.errors import UserError
from qerl_jax.policy.sharding import shard_params
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


def load_base(
    config: ConfigDict,
    problems: Mapping[str, list[Problem]],
    *,
    mesh: Mesh | None,
    processes: Processes,
    folder: RunFolder | None,
) -> tuple[LoadedModel, dict[str, list[Prompt]]]:
    """Loads the model before training, and renders the problems; refuses lengths that do not fit.

    In NVFP4 a model of 16 bits is calibrated on the training problems before the first step. A run
    that resumes, and one that begins from another one, take exactly the base that was recorded.

    Args:
        config: the resolved config.
        problems: problems by split, as `data.from_config.load_problems` names them.
        mesh: devices of the run; None for one device.
        processes: processes of the run.
        folder: the run folder, which records the base and keeps the text that it was calibrated
            on; None for a run without one.

    Returns:
        The model, and the prompts by split.

    Raises:
        UserError: the model cannot be loaded or calibrated, or its recorded base is missing.
    """
    _announce(config)
    place = functools.partial(shard_params, mesh=mesh)
    source, form, dtype = config.model.source, config.model.format, config.model.dtype
    checkpoint = open_checkpoint(source) if is_calibrated(config.model) else None
    if checkpoint is None or checkpoint.packed or checkpoint.tokenizer is None:
        model = load(source, format=form, dtype=dtype, place=place)
        check_positions(config, model.config)
        return model, encode_problems(config, model.tokenizer, problems)
    check_positions(config, checkpoint.config)
    prompts = encode_problems(config, checkpoint.tokenizer, problems)
    entry = None
    if processes.writes:
        entry = _base(config, checkpoint, prompts, processes=processes, folder=folder)
    digest = processes.broadcast_from_first(entry and entry.digest)
    entry = entry or cache.find(digest)
    if entry is None:
        raise UserError(
            f"the calibrated base {digest[:16]} is not in {cache.cache_folder()} of this host: "
            "copy it there, or set XDG_CACHE_HOME to a folder that all hosts share"
        )
    return load_calibrated(entry, checkpoint, dtype=dtype, place=place), prompts


def _base(
    config: ConfigDict,
    checkpoint: Checkpoint,
    prompts: Mapping[str, list[Prompt]],
    *,
    processes: Processes,
    folder: RunFolder | None,
) -> Entry:
    """Returns the calibrated base that is recorded, or else a new one, and records it."""
    own = {} if folder is None else json.loads(read_bytes(folder.config))
    if folder is not None and (digest := recorded_digest(own)):
        return restored_base(checkpoint, digest, folder.calibration)
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
    if folder is not None:
        # The text first: a run whose base is recorded has the text to make it from.
        with replace_file(folder.calibration) as temporary:
            temporary.write_bytes(read_bytes(entry.tokens))
        record_fact(folder, FACT, {"digest": entry.digest})
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
