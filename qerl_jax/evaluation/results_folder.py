"""The settings of an evaluation, and the folder of its results.

results.json holds the settings, versions, commit and command, when the evaluation began, and the
figures of every task. An interrupted evaluation continues if the settings that decide the
completions, and the prompts, are the same. Paths and scorers may change.
"""

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qerl_jax.config.fields import LONGEST_LIMIT
from qerl_jax.errors import UserError, check_limits
from qerl_jax.evaluation.flags import check_sampling
from qerl_jax.evaluation.load_policy import LoadedPolicy, policy_folder
from qerl_jax.evaluation.task_prompts import check_prompts
from qerl_jax.evaluation.tasks import Task, TaskOverrides
from qerl_jax.run.folder import RunFolder
from qerl_jax.run.provenance import provenance
from qerl_jax.run.saved_fields import is_time
from qerl_jax.system import json_file
from qerl_jax.system.atomic import write_json
from qerl_jax.system.paths import user_path
from qerl_jax.system.safe_files import check_inside

_RESULTS = "results.json"
_SECONDS = 5.0  # for a call of a scorer where neither the command nor a run says otherwise
_SAME_SETTINGS = (
    "fingerprint", "format", "dtype", "adapter_sha256", "samples", "temperature", "top_p", "seed",
)  # fmt: skip
_SAME_MODEL_FILES = ("architecture", "end_ids")  # from config.json and generation_config.json
_SAME_TASK = (
    "problems_sha256", "system_prompt", "question_suffix", "max_new_tokens", "stop",
    "kv_cache_dtype", "chat_template_args", "examples",
)  # fmt: skip
_OVERRIDE_KEYS = _SAME_TASK[1:4]  # the settings of a task that `TaskOverrides` has


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
    """What to evaluate, and how.

    Attributes:
        source: run folder, PEFT adapter folder or model, as in `open_policy`.
        tasks: names of the tasks, as in `make_tasks`.
        overrides: settings that replace the settings of the tasks.
        adapters: adapters to evaluate one after the other, each as in `open_policy`.
        base: model to load instead of the one that the source names, as in `open_policy`.
        format: format of the weights, as in `open_policy`.
        dtype: dtype of the activations, as in `open_policy`.
        samples: number of completions per problem.
        temperature: sampling temperature; None is 0 (greedy) for one sample and 1 for several.
        top_p: cumulative probability of the tokens that are sampled from; 1 keeps all tokens.
        seed: seed of the samples.
        limit: number of problems to take from the start of each task; 0 takes all.
        max_rows: number of rows that decode together; 0 is the number that fits into memory.
        time_limit: time limit for one call of a scorer in seconds; a reward of a run keeps the
            limit that the run gave it alone. None is the run's for all rewards, or 5.
        trust: whether the functions, URLs and programs of a run of another person are used, whose
            folder becomes the user's own.
        out: folder of the results, with a subfolder per policy if there are several; '' names the
            folder after the policy and the settings.
    """

    source: str
    tasks: Sequence[str] = ()
    overrides: TaskOverrides = dataclasses.field(default_factory=TaskOverrides)
    adapters: Sequence[str] = ("",)
    base: str = ""
    format: str = ""
    dtype: str = ""
    samples: int = 1
    temperature: float | None = None
    top_p: float = 1.0
    seed: int = 0
    limit: int = 0
    max_rows: int = 0
    time_limit: float | None = None
    trust: bool = False
    out: str = ""


def validate(config: EvaluateConfig) -> None:
    """Raises a UserError for a setting that is invalid."""
    check_limits(
        {
            "--samples": (config.samples, 1),
            "--limit": (config.limit, 0),
            "--max-rows": (config.max_rows, 0),
            "--time-limit": (time_limit_of(config, None), 0, LONGEST_LIMIT),
        }
    )
    if config.samples > 1 and config.temperature == 0:
        raise UserError(
            f"--samples={config.samples} --temperature=0: greedy samples are all the same; raise "
            "--temperature or leave out --samples"
        )
    check_sampling(temperature_of(config), top_p=config.top_p, seed=config.seed)


def temperature_of(config: EvaluateConfig) -> float:
    """Returns the sampling temperature: the configured one, or else the default."""
    if config.temperature is not None:
        return config.temperature
    return 0.0 if config.samples == 1 else 1.0


def time_limit_of(config: EvaluateConfig, run: Mapping[str, Any] | None) -> float:
    """Returns the time limit for one call of a scorer without its own, in seconds."""
    if config.time_limit is not None:
        return config.time_limit
    return _SECONDS if run is None else run["config"]["reward_time_limit"]


def locate_results(policy: LoadedPolicy, config: EvaluateConfig) -> tuple[str, Path]:
    """Returns the name of a policy and its folder, which need not exist."""
    name = _policy_name(policy, config)
    return name, _folder_path(name, policy, _settings(policy, config), config)


def first_start(folder: Path) -> str:
    """Returns when an evaluation began, as `template_date` takes it; '' in a new folder."""
    file = folder / _RESULTS
    return _created(json_file.read_object(file)) if file.exists() else ""


def _created(results: Mapping[str, Any]) -> str:
    created = results.get("created")
    return created if is_time(created) else ""


def _settings(policy: LoadedPolicy, config: EvaluateConfig) -> dict[str, Any]:
    adapter = policy.adapter
    return {
        "source": config.source,
        "weights": str(policy.model.path),
        "fingerprint": policy.model.fingerprint,
        "architecture": policy.model.config.digest,
        "end_ids": list(policy.model.tokenizer.eos_ids),
        "format": policy.model.format,
        "dtype": policy.model.params["embed_tokens"].dtype.name,
        "adapter": None if adapter is None else str(adapter),
        "adapter_sha256": policy.adapter_sha256,
        "samples": config.samples,
        "temperature": temperature_of(config),
        "top_p": config.top_p,
        "seed": config.seed,
    }


def check_folder(
    folder: Path, policy: LoadedPolicy, tasks: Sequence[Task], config: EvaluateConfig
) -> dict[str, Any]:
    """Returns the content of results.json in the folder of a policy, {} without one.

    The policy needs no weights.

    Raises:
        UserError: the folder holds completions that were made with other settings, or other files.
    """
    check_inside(user_path(config.out or config.source), folder)
    if not (folder / _RESULTS).exists():
        if folder.is_dir() and any(folder.iterdir()):
            raise UserError(f"{folder}: it holds other files but no {_RESULTS}; pass another --out")
        return {}
    results = json_file.read_object(folder / _RESULTS)
    saved_tasks = _object(results, "tasks", folder)
    same = (*_SAME_SETTINGS, *_SAME_MODEL_FILES)
    _check_same(folder, "", _object(results, "settings", folder), _settings(policy, config), same)
    for task in tasks:
        if task.name in saved_tasks:
            entry = _object(saved_tasks, task.name, folder)
            _check_same(folder, f"{task.name}.", entry, _task_entry(task, config), _SAME_TASK)
            max_rows = entry.get("max_rows", 0)
            if type(max_rows) is not int or max_rows < 0:
                raise UserError(
                    f"{folder / _RESULTS}: max_rows={max_rows!r:.60} of {task.name} is no number; "
                    "pass another --out"
                )
    return results


def _task_entry(task: Task, config: EvaluateConfig) -> dict[str, Any]:
    return {
        "source": task.source,
        "problems_sha256": task.problems_digest,
        "system_prompt": task.prompt.system_prompt,
        "question_suffix": task.prompt.question_suffix,
        "max_new_tokens": task.max_new_tokens,
        "stop": list(task.stop),
        "kv_cache_dtype": task.kv_cache_dtype,
        "chat_template_args": dict(task.prompt.chat_template_args),
        "examples": list(task.prompt.examples),
        "judge": task.scorer,
        "format_judge": task.format_scorer,
    } | ({"max_rows": config.max_rows} if config.max_rows else {})


def open_folder(
    folder: Path,
    policy: LoadedPolicy,
    tasks: Sequence[Task],
    digests: Mapping[str, str],
    config: EvaluateConfig,
) -> dict[str, Any]:
    """Opens the folder of a policy, or creates it.

    Takes the digest of the prompts by the name of the task.

    Returns:
        The content of results.json so far.

    Raises:
        UserError: as in `check_folder`, the prompts were others, or the folder cannot be created.
    """
    saved = check_folder(folder, policy, tasks, config)
    saved_tasks, task_entries = saved.get("tasks", {}), {}
    for task in tasks:
        entry = _task_entry(task, config) | {"prompts_sha256": digests[task.name]}
        if task.name in saved_tasks:
            saved_entry = saved_tasks[task.name]
            check_prompts(
                saved_entry.get("prompts_sha256", ""),
                digests[task.name],
                model=policy.model.source,
                what=f"the evaluation of {task.name} in {folder}",
                option="--out",
            )
            # A continued evaluation has the batches that it began with.
            entry = {"max_rows": saved_entry.get("max_rows", 0)} | entry
        task_entries[task.name] = entry
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{folder}: cannot create it: {error.strerror}; pass another --out"
        ) from error
    results = {
        "settings": _settings(policy, config),
        **provenance(),
        **({"created": created} if (created := _created(saved)) else {}),
        "tasks": saved_tasks | task_entries,
    }
    save_results(folder, results)
    return results


def folders_of(config: EvaluateConfig) -> list[Path | None]:
    """Returns the folders of the adapters that are evaluated, as `policy_folder` does.

    Raises:
        UserError: one of them is missing.
    """
    options = {"base": config.base, "format": config.format, "dtype": config.dtype}
    return [policy_folder(config.source, adapter=a, **options) for a in config.adapters]


def _policy_name(policy: LoadedPolicy, config: EvaluateConfig) -> str:
    """Returns a name that distinguishes the policies of a source, '' if there is only one."""
    several = len(config.adapters) > 1
    if policy.adapter is not None:
        alone = policy.adapter == user_path(config.source) and not several
        return "" if alone else _name_apart(policy.adapter, config)
    folder = policy.model.path
    models = {user_path(adapter) for adapter in config.adapters}
    if policy.run is not None and (folder.parent == user_path(config.source) or folder in models):
        return _name_apart(folder, config)  # of a run that trained all parameters, or of an export
    return "base" if policy.run is not None or several else ""


def _name_apart(folder: Path, config: EvaluateConfig) -> str:
    """Returns the last part of a path, and as many parts before it as the other adapters need.

    No part of the path of another adapter has this name, and neither has the base.
    """

    def ends(path: Path) -> list[str]:
        parts = Path(os.path.abspath(path)).parts[1:]
        return ["-".join(parts[start:]) for start in reversed(range(len(parts)))]

    names = ends(folder)
    others = [end for end in map(ends, filter(None, folders_of(config))) if end[-1] != names[-1]]
    taken = {name for end in others for name in end} | (
        {"base"} if len(config.adapters) > 1 else set()
    )
    return next((name for name in names if name not in taken), names[-1])


def _folder_path(
    name: str, policy: LoadedPolicy, settings: Mapping[str, Any], config: EvaluateConfig
) -> Path:
    if config.out:
        return user_path(config.out) / (name if len(config.adapters) > 1 else "")
    identity = {key: settings[key] for key in _SAME_SETTINGS}
    identity |= {key: getattr(config.overrides, key) for key in ("data", *_OVERRIDE_KEYS)}
    if config.overrides.chat_template_args:
        identity["chat_template_args"] = config.overrides.chat_template_args
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
    mode = "greedy" if settings["temperature"] == 0 else f"samples{config.samples}"
    if policy.run is not None:
        run = RunFolder(user_path(config.source))
        return run.evaluations / f"{name}-{mode}-{digest}"
    model = re.sub(r"[^\w.-]+", "_", re.split("[/:]", config.source.rstrip("/"))[-1])
    parts = [model.removesuffix(".gguf"), name, mode, digest]
    return Path("evaluations") / "-".join(filter(None, parts))


def _object(results: Mapping[str, Any], name: str, folder: Path) -> dict[str, Any]:
    value = results.get(name)
    if not isinstance(value, dict):
        raise UserError(
            f"{folder / _RESULTS}: {name!r} is not an object, so this is not the result of an "
            "evaluation; pass another --out"
        )
    return value


def _check_same(
    folder: Path,
    prefix: str,
    saved: Mapping[str, Any],
    current: Mapping[str, Any],
    keys: Sequence[str],
) -> None:
    changes = [
        f"{prefix}{key}: {json.dumps(saved.get(key))} -> {json.dumps(current[key])}"
        for key in keys
        if key not in saved or saved[key] != current[key]
    ]
    if changes:
        raise UserError(
            f"{folder} holds completions with other settings ({', '.join(changes)}); use the same "
            "settings or pass another --out"
        )


def save_results(folder: Path, results: Mapping[str, Any]) -> None:
    """Writes results.json into the folder."""
    write_json(folder / _RESULTS, results)
