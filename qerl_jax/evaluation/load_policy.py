"""Opens the policy of a run, an adapter with its base, or a model."""

import contextlib
import dataclasses
import functools
import pathlib
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from qerl_jax.data.prompts import DEFAULT_PROMPT, PromptConfig, prompt_config
from qerl_jax.errors import UserError, visible
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.lora import Lora, LoraConfig
from qerl_jax.policy.policy import Policy
from qerl_jax.policy.trainable import Trainable, current_policy
from qerl_jax.quantization.base import describe_base_of_run, load_base_of_run
from qerl_jax.rewards.from_config import PYTHON_REWARDS
from qerl_jax.run.folder import RunFolder
from qerl_jax.run.ownership import adopt, has_own_tag, trusts
from qerl_jax.run.saved_fields import check_run
from qerl_jax.system import json_file
from qerl_jax.system.paths import user_path
from qerl_jax.system.safe_files import sha256_of
from qerl_jax.weights import peft
from qerl_jax.weights.load import LoadedModel, describe, load

OWN = "own"  # added to the content of config.json


@dataclasses.dataclass(frozen=True)
class LoadedPolicy:
    """A model with the adapter that was trained on it, if any.

    Attributes:
        base: model before training; if all parameters were trained, the model after training.
        model: base with the norms that were trained together with the adapter, if any.
        lora: LoRA of the policy, or None.
        lora_config: options of the LoRA, or None.
        trainable: the adapter as it was read, with the norms that were trained with it, or None.
        adapter: folder of the adapter, or None.
        adapter_sha256: digest of the adapter's weights as they were read, or None; a run under way
            replaces them with every checkpoint.
        run: content of config.json of the run folder ('config', 'command', 'git', 'versions',
            'device'), or None if the policy does not come from a run folder.
    """

    base: LoadedModel
    model: LoadedModel
    lora: Lora | None
    lora_config: LoraConfig | None
    trainable: Trainable | None
    adapter: pathlib.Path | None
    adapter_sha256: str | None
    run: dict[str, Any] | None

    def __repr__(self) -> str:
        return f"LoadedPolicy({self.model!r}, adapter={str(self.adapter or '')!r})"

    @property
    def policy(self) -> Policy:
        """The arrays of the policy."""
        return Policy(self.model.params, self.lora)

    @property
    def created(self) -> str:
        """When its run was first started, as `template_date` takes it; '' without a run."""
        return "" if self.run is None else self.run["created"]

    @property
    def prompt(self) -> PromptConfig:
        """How its run writes prompts; without a run, the question alone."""
        return DEFAULT_PROMPT if self.run is None else prompt_config(self.run["config"]["data"])


@dataclasses.dataclass(frozen=True)
class _Names:
    """What a source names: a base with its settings, and an adapter."""

    run: dict[str, Any] | None  # content of config.json of the run that the source is, or None
    owner: RunFolder  # folder of the run whose base it is; it need not exist
    # Content of its config.json, or None where the base is that of no run.
    owner_run: dict[str, Any] | None
    base: str  # the model
    adapter: pathlib.Path | None  # folder of the adapter, or None
    format: str  # format of the weights
    dtype: str  # dtype of the activations


def open_policy(
    source: str,
    *,
    adapter: str = "",
    base: str = "",
    format: str = "",
    dtype: str = "",
    bases: dict[tuple, LoadedModel] | None = None,
) -> LoadedPolicy:
    """Loads the policy of a run, a PEFT adapter with its base, or a model.

    Args:
        source: run folder, PEFT adapter folder, or any source that `load` reads.
        adapter: adapter to load. '' is the best adapter of a run, or its last adapter if no
            evaluation was better than the one before training. 'best_adapter' and 'adapter' (in a
            run that trained all parameters 'best_model' and 'model') name one of them. 'none' loads
            the base alone, and any other text is the path of an adapter folder.
        base: model to load instead of the one that the run or the adapter names; '' keeps it.
            Where neither names one, as for a model, it is an error.
        format: format of the weights, as in `load`. '' is the format of the run, for a model that
            `adapter` names the stored format; without a run it is the format of the run in whose
            folder the adapter is, or the stored format.
        dtype: dtype of the activations, as in `load`; '' is the dtype of the run, or bfloat16.
        bases: holds the base that was loaded last, which is not loaded again; {} at first. None
            loads it.

    Returns:
        The policy.

    Raises:
        UserError: the run, the adapter or the model is missing, cannot be read, or does not fit the
            others.
    """
    names = _names(source, adapter=adapter, base=base, format=format, dtype=dtype)
    model = _load_base(names, {} if bases is None else bases)
    if names.adapter is None:
        return _without_adapter(names, model)
    lora_config, adapter_base, trainable, digest = _read_adapter(names.adapter, model.config)
    warn_of_another_base(names.adapter, adapter_base, (names.base, model.source))
    return LoadedPolicy(
        base=model,
        model=dataclasses.replace(model, params=current_policy(model.params, trainable)),
        lora=trainable.lora,
        lora_config=lora_config,
        trainable=trainable,
        adapter=names.adapter,
        adapter_sha256=digest,
        run=names.run,
    )


def describe_policy(
    source: str, *, adapter: str = "", base: str = "", format: str = "", dtype: str = ""
) -> LoadedPolicy | None:
    """Returns what `open_policy` returns, without weights and adapter.

    Its model is that of `load.describe`.

    Its arguments are those of `open_policy`, and its model is that of `load.describe`.

    Returns:
        The policy; None where only loading tells what it is.

    Raises:
        UserError: as in `open_policy`.
    """
    names = _names(source, adapter=adapter, base=base, format=format, dtype=dtype)
    options = {"format": names.format, "dtype": names.dtype}
    if names.owner_run is None:
        model = describe(names.base, **options)
    else:
        model = describe_base_of_run(names.base, names.owner_run, **options)
    if model is None:
        return None
    policy = _without_adapter(names, model)
    if names.adapter is None:
        return policy
    digest = _sha256(names.adapter / peft.WEIGHTS_FILE)
    return dataclasses.replace(policy, adapter=names.adapter, adapter_sha256=digest)


def policy_folder(
    source: str, *, adapter: str = "", base: str = "", format: str = "", dtype: str = ""
) -> pathlib.Path | None:
    """Returns the folder of the adapter that `open_policy` would load, or of the model instead.

    Its arguments are those of `open_policy`.

    Returns:
        The folder; None for the base alone.

    Raises:
        UserError: as in `open_policy`, as far as it is known without weights.
    """
    names = _names(source, adapter=adapter, base=base, format=format, dtype=dtype)
    if names.adapter is not None:
        if names.run is None:
            peft.read_peft_config(names.adapter)
        return names.adapter
    replaces_base = names.run is not None and names.owner_run is None and not base
    return user_path(names.base) if replaces_base else None


def _names(source: str, *, adapter: str, base: str, format: str, dtype: str) -> _Names:
    """Returns what a source names, with the arguments of `open_policy`."""
    if not source.strip():
        raise UserError("the source is empty; pass a run, an adapter folder or a model")
    path = user_path(source)
    run = read_run(path)
    folder, base_source, settings = None, source, {}
    names_base = True
    if run is not None:
        settings = run["config"]["model"]
        folder, base_source = _adapter_folder(path, adapter), _base_of_run(path, settings["source"])
        if folder is not None and not (folder / peft.CONFIG_FILE).exists():
            _check_model_folder(folder, RunFolder(path))
            folder, base_source, names_base = None, str(folder), False
            # Rounded to the format of the run, a merged model would be its base again.
            settings = settings | {"format": "stored"}
    elif adapter not in ("", "none"):
        folder, names_base = user_path(adapter), False
    elif (path / peft.CONFIG_FILE).exists():
        folder = None if adapter == "none" else path
        base_source = base or peft.read_peft_base(path)
    else:
        names_base = False
    if base and not names_base:
        raise UserError(
            f"--base={base}: {base_source} is itself the model, and no adapter names another one; "
            "leave out --base"
        )
    owner, owner_run = (RunFolder(path), run) if run is not None else _run_of(folder)
    if run is None and owner_run is not None:
        settings = {"format": owner_run["config"]["model"]["format"]}
    return _Names(
        run=run,
        owner=owner,
        owner_run=None if base or not names_base else owner_run,
        base=base or base_source,
        adapter=folder,
        format=format or settings.get("format", "stored"),
        dtype=dtype or settings.get("dtype", "bfloat16"),
    )


def _load_base(names: _Names, bases: dict[tuple, LoadedModel]) -> LoadedModel:
    """Loads a base, unless it is the one that was loaded last."""
    owner = None if names.owner_run is None else names.owner.path
    key = names.base, owner, names.format, names.dtype
    if key not in bases:
        bases.clear()  # The next one needs the memory.
        options = {"format": names.format, "dtype": names.dtype}
        if names.owner_run is None:
            bases[key] = load(names.base, **options)
        else:
            tokens = names.owner.calibration
            bases[key] = load_base_of_run(names.base, names.owner_run, tokens, **options)
    return bases[key]


def _without_adapter(names: _Names, model: LoadedModel) -> LoadedPolicy:
    return LoadedPolicy(
        base=model,
        model=model,
        lora=None,
        lora_config=None,
        trainable=None,
        adapter=None,
        adapter_sha256=None,
        run=names.run,
    )


def warn_of_another_base(
    folder: pathlib.Path | str, adapter_base: str, models: Sequence[str]
) -> None:
    """Prints a warning where an adapter names another base model than the one it is used on.

    Equal shapes do not tell models apart, such as a model and its instruct version. Only the last
    parts of names are compared: a hub id and a folder of that name are one model.

    Args:
        folder: the adapter.
        adapter_base: the base that it names, as hub id or path; '' for none.
        models: names of the model that it is used on, as hub id or path; the last one is printed.
    """
    if adapter_base and _last_part(adapter_base) not in map(_last_part, models):
        _print_once(
            f"warning: the adapter {folder} names the base {adapter_base}, and is used on "
            f"{models[-1]}: on other weights it is another policy"
        )


def _last_part(model: str) -> str:
    """The name of a model without the folders of its path, also of one in the cache of the hub."""
    name = re.sub(r"/snapshots/\w+/*$", "", model).rstrip("/").rpartition("/")[2]
    return re.sub(r"^models--(?:.*--)?", "", name).removesuffix(".gguf").lower()


@functools.cache
def _print_once(line: str) -> None:
    print(visible(line), file=sys.stderr, flush=True)


def read_run(path: pathlib.Path) -> dict[str, Any] | None:
    """Returns the content of config.json of a run folder, or None for any other path.

    Rewards that were given in Python replace those of the config, which the run did not use. The
    field `OWN` says whether the run is that of this user, see `run.ownership`.

    Args:
        path: path that may be a run folder; the config.json of a model does not make it one.

    Raises:
        UserError: config.json cannot be read, or holds what no run writes.
    """
    config_path = RunFolder(path).config
    if not config_path.exists() or not path.is_dir():
        return None
    content = json_file.read_object(config_path)
    if "schedule_steps" not in content:
        return None
    check_run(config_path, content)
    content[OWN] = has_own_tag(content)
    if python_rewards := content.get(PYTHON_REWARDS):
        content["config"]["rewards"] = python_rewards
    return content


def trusts_run(path: pathlib.Path, run: Mapping[str, Any] | None, *, trust: bool) -> bool:
    """Returns whether a command may call what a run names, and adopts the run where it is asked to.

    Args:
        path: the run folder.
        run: its content, as `read_run` returns it; None where the path is no run.
        trust: whether the command has --trust.

    Raises:
        UserError: --trust for something else than a run.
    """
    if run is None:
        if trust:
            raise UserError(f"--trust: {path} is not a run folder, and only a run names functions")
        return False
    if trusts(trust):
        adopt(path)
        return True
    return run[OWN]


def _base_of_run(run: pathlib.Path, source: str) -> str:
    """Returns the model of a run, also where its path is relative to the folder of the start.

    The adapters of the run name a local model by its full path.
    """
    if source.startswith("package:") or user_path(source).is_absolute():
        return source
    for best in (False, True):
        with contextlib.suppress(UserError):  # The run has no adapter, or replaces it just now.
            _, base = peft.read_peft_config(RunFolder(run).adapter(best=best))
            if pathlib.PurePath(base).is_absolute() and pathlib.Path(base).exists():
                return base
    return source


def _read_adapter(
    folder: pathlib.Path, model_config: ModelConfig
) -> tuple[LoraConfig, str, Trainable, str]:
    """Reads an adapter, its base and the digest of its weights, once more if they change meanwhile.

    A run under way replaces its adapter by two renames: between them there is no folder.
    """
    weights = folder / peft.WEIGHTS_FILE
    for last in (False, False, True):
        try:
            digest = _sha256(weights)
            lora_config, adapter_base = peft.read_peft_config(folder)
            trainable = peft.load_peft_adapter(folder, model_config, lora_config)
            if last or _sha256(weights) == digest:
                return lora_config, adapter_base, trainable, digest
        except (UserError, OSError):
            if last:
                raise
        time.sleep(0.1)
    raise AssertionError("the last reading returns or raises")


def _sha256(path: pathlib.Path) -> str:
    if not path.is_file():
        return ""  # The reader of the adapter says what is missing.
    return sha256_of(path)


def _run_of(adapter: pathlib.Path | None) -> tuple[RunFolder, dict[str, Any] | None]:
    """Returns the run in whose folder an adapter lies, and its content; None outside of a run."""
    # An adapter is in the run folder itself or, if it was exported, in the folder of exports.
    for folder in [] if adapter is None else adapter.resolve().parents[:2]:
        if (run := read_run(folder)) is not None:
            return RunFolder(folder), run
    return RunFolder(pathlib.Path()), None


def _adapter_folder(run: pathlib.Path, adapter: str) -> pathlib.Path | None:
    """Returns the folder of an adapter, or of a model if all parameters were trained."""
    if adapter == "none":
        return None
    folder = RunFolder(run)
    # In the order of preference: adapters, then models where all parameters were trained.
    folders = [make(best=best) for make in (folder.adapter, folder.model) for best in (True, False)]
    if adapter:
        matches = [path for path in folders if path.name == adapter]
        if not matches:
            return _user_adapter(adapter, folders)
        folders = matches
    for path in folders:
        if path.is_dir():
            return path
    last = [path.name for path in (folder.adapter(), folder.model()) if path.is_dir()]
    others = "".join(f"--adapter={name} is the last one, " for name in last)
    raise UserError(
        f"{run}: the run has no {adapter or 'adapter'} yet: it writes the last one with each "
        "checkpoint (--config.checkpoint.every) and when a signal stops it, and the best one after "
        f"an evaluation that is better than the one before training; {others}"
        "--adapter=none loads the base alone"
    )


def _check_model_folder(folder: pathlib.Path, run: RunFolder) -> None:
    """Refuses an adapter of a run of which a part is missing, as it is no model either."""
    others = {run.adapter(best=best) for best in (True, False)}
    if folder in others:
        (other,) = others - {folder}
        remedy = f"; --adapter={other.name} is another one" if other.is_dir() else ""
        raise UserError(
            f"{folder}: the adapter is incomplete, {peft.CONFIG_FILE} is missing{remedy}"
        )


def _user_adapter(adapter: str, folders: Sequence[pathlib.Path]) -> pathlib.Path:
    """Returns the folder of an adapter that is none of those that a run writes."""
    folder = user_path(adapter)
    if not folder.is_dir():
        names = [path.name for path in folders if path.is_dir()]
        raise UserError(
            f"--adapter={adapter}: there is no such folder, and {folders[0].parent} has "
            f"{', '.join(names) or 'no adapter yet'}; none is the base alone"
        )
    return folder
