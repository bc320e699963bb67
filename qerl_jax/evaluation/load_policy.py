"""A policy as published or as trained: where evaluation, sampling and export begin."""

import dataclasses
import pathlib
from typing import Any

from qerl_jax.errors import UserError
from qerl_jax.policy.lora import Lora, LoraConfig
from qerl_jax.policy.trainable import current_policy
from qerl_jax.run.folder import RunFolder
from qerl_jax.weights import json_file, peft
from qerl_jax.weights.load import LoadedModel, load


@dataclasses.dataclass(frozen=True)
class Policy:
    """A model with the adapter that was trained on it, if any.

    Attributes:
        base: the model before training, or, where every parameter was trained, after it.
        model: the base, with the norms that were trained beside the adapter, if any.
        lora: its adapter, or None.
        lora_config: the adapter's options, or None.
        adapter: the folder of the adapter, or None.
        run: the config.json of the run folder that it comes from ('config', 'command', 'git',
            'versions', 'device'), or None.
    """

    base: LoadedModel
    model: LoadedModel
    lora: Lora | None
    lora_config: LoraConfig | None
    adapter: pathlib.Path | None
    run: dict[str, Any] | None


def open_policy(
    source: str, *, adapter: str = "", base: str = "", format: str = "", dtype: str = ""
) -> Policy:
    """Loads a run's policy, a PEFT adapter with its base, or a model.

    Args:
        source: a run folder, a PEFT adapter folder, or anything that `load` reads.
        adapter: which adapter: '' the best of a run, or its last where no evaluation was better
            than the one before training; 'best_adapter', 'adapter' (of a run that trained all
            parameters, 'best_model' and 'model') or another folder's path; 'none' the base alone.
        base: the model to load instead of the one that the run or the adapter names.
        format: see `load`; '' is the run's, else 'nvfp4' under an adapter, else what is stored.
        dtype: see `load`; '' is the run's, or bfloat16.

    Raises:
        UserError: something of it is missing or does not fit together.
    """
    path = pathlib.Path(source).expanduser()
    run = read_run(path)
    folder, named_base, settings = None, source, {}
    if run is not None:
        settings = run["config"]["model"]
        folder, named_base = _trained_folder(path, adapter), settings["source"]
        if folder is not None and not (folder / peft.CONFIG_FILE).exists():
            folder, named_base = None, str(folder)
    elif adapter not in ("", "none"):
        folder = pathlib.Path(adapter).expanduser()
    elif (path / peft.CONFIG_FILE).exists():
        folder = None if adapter == "none" else path
        named_base = peft.read_peft_config(path)[1]
    default_format = "stored" if folder is None else "nvfp4"
    model = load(
        base or named_base,
        format=format or settings.get("format", default_format),
        dtype=dtype or settings.get("dtype", "bfloat16"),
    )
    if folder is None:
        return Policy(base=model, model=model, lora=None, lora_config=None, adapter=None, run=run)
    lora_config, _ = peft.read_peft_config(folder)
    trained = peft.load_peft_adapter(folder, model.config, lora_config)
    return Policy(
        base=model,
        model=dataclasses.replace(model, params=current_policy(model.params, trained)),
        lora=trained.lora,
        lora_config=lora_config,
        adapter=folder,
        run=run,
    )


def read_run(path: pathlib.Path) -> dict[str, Any] | None:
    """The config.json of a run folder; None for anything else, such as a model's.

    Raises:
        UserError: it cannot be read, or lacks what every run has.
    """
    config_path = RunFolder(path).config
    if not config_path.exists() or not path.is_dir():
        return None
    found = json_file.read_object(config_path)
    if "schedule_steps" not in found:
        return None
    model = found["config"].get("model") if isinstance(found.get("config"), dict) else None
    fields = ("source", "format", "dtype")
    if not isinstance(model, dict) or not all(isinstance(model.get(f), str) for f in fields):
        raise UserError(
            f"{config_path}: not the config of a run: model.source, model.format or "
            "model.dtype is missing"
        )
    return found


def _trained_folder(run: pathlib.Path, adapter: str) -> pathlib.Path | None:
    """What to take of a run: an adapter, or a model where all parameters were trained."""
    if adapter == "none":
        return None
    folder = RunFolder(run)
    # In the order of preference: adapters, then models where all parameters were trained.
    trained = [make(best=best) for make in (folder.adapter, folder.model) for best in (True, False)]
    if adapter:
        named = [path for path in trained if path.name == adapter]
        if not named:
            return pathlib.Path(adapter).expanduser()
        trained = named
    for path in trained:
        if path.is_dir():
            return path
    raise UserError(
        f"{run}: the run has no {adapter or 'adapter'} yet: the last one is written when it ends, "
        "the best one after an evaluation; --adapter=none takes the base alone"
    )
