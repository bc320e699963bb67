"""An evaluation as it was asked for, and the folder that it fills.

results.json holds the settings, versions, commit and command, and the figures of every task. An
evaluation that has begun goes on if the same completions are asked for: paths may change, and
judges.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qerl_jax.errors import UserError, check_limits
from qerl_jax.evaluation.load_policy import Policy
from qerl_jax.evaluation.tasks import Overrides, Task
from qerl_jax.run.atomic import write_atomic
from qerl_jax.run.folder import RunFolder
from qerl_jax.run.provenance import provenance
from qerl_jax.weights import json_file, peft

_RESULTS = "results.json"
_SAME_SETTINGS = (
    "fingerprint", "format", "dtype", "adapter_sha256", "samples", "temperature", "top_p", "seed",
)  # fmt: skip
_SAME_TASK = ("problems_sha256", "system_prompt", "question_suffix", "max_new_tokens")


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
    """What to evaluate, and how.

    Attributes:
        source: a run folder, a PEFT adapter folder or a model, see `restore.open_policy`.
        tasks: see `tasks.make_tasks`.
        overrides: likewise.
        adapters: one or several policies, see `restore.open_policy`; '' is its default.
        base: see `restore.open_policy`.
        format: likewise.
        dtype: likewise.
        samples: completions of every problem.
        temperature: None is greedy for one sample and 1 for several.
        top_p: 1 is off.
        seed: of the draws.
        limit: the first problems of each task; 0 is all of them.
        max_rows: rows that decode together; 0 is what fits.
        time_limit: seconds for one judgement.
        out: the folder, with a subfolder for each of several policies; '' names it after the
            policy and the settings.
    """

    source: str
    tasks: Sequence[str] = ()
    overrides: Overrides = dataclasses.field(default_factory=Overrides)
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
    time_limit: float = 5.0
    out: str = ""


def check(config: EvaluateConfig) -> None:
    """Raises a UserError for what cannot be evaluated."""
    check_limits(
        {
            "--samples": (config.samples, 1),
            "--temperature": (config.temperature or 0.0, 0.0),
            "--top-p": (config.top_p, 1e-6, 1),
            "--seed": (config.seed, 0, 2**32 - 1),
            "--limit": (config.limit, 0),
            "--max-rows": (config.max_rows, 0),
            "--time-limit": (config.time_limit, 0.0),
        }
    )
    if config.samples > 1 and config.temperature == 0:
        raise UserError(
            f"--samples={config.samples} --temperature=0: greedy samples are all the same; raise "
            "the temperature or leave out --samples"
        )


def temperature_of(config: EvaluateConfig) -> float:
    """The temperature of an evaluation that may leave it open."""
    if config.temperature is not None:
        return config.temperature
    return 0.0 if config.samples == 1 else 1.0


def open_folder(
    policy: Policy, tasks: Sequence[Task], config: EvaluateConfig
) -> tuple[str, Path, dict[str, Any]]:
    """The policy's name, its folder, and what results.json holds so far.

    Raises:
        UserError: the folder holds completions that were made otherwise.
    """
    adapter = policy.adapter
    settings = {
        "source": config.source,
        "weights": str(policy.model.path),
        "fingerprint": policy.model.fingerprint,
        "format": policy.model.format,
        "dtype": policy.model.params["embed_tokens"].dtype.name,
        "adapter": None if adapter is None else str(adapter),
        "adapter_sha256": None if adapter is None else _sha256(adapter / peft.WEIGHTS_FILE),
        "samples": config.samples,
        "temperature": temperature_of(config),
        "top_p": config.top_p,
        "seed": config.seed,
    }
    asked: dict[str, dict[str, Any]] = {
        task.name: {
            "source": task.source,
            "problems_sha256": task.fingerprint,
            "system_prompt": task.system_prompt,
            "question_suffix": task.question_suffix,
            "max_new_tokens": task.max_new_tokens,
            "judge": task.judge,
            "format_judge": task.format_judge,
        }
        | ({"max_rows": config.max_rows} if config.max_rows else {})
        for task in tasks
    }
    name = _policy_name(policy, config)
    folder = _named_folder(name, policy, settings, config)
    done: dict[str, Any] = {}
    if (folder / _RESULTS).exists():
        found = json_file.read_object(folder / _RESULTS)
        done = found["tasks"]
        _check_same(folder, "", found["settings"], settings, _SAME_SETTINGS)
        for task in asked.keys() & done.keys():
            _check_same(folder, f"{task}.", done[task], asked[task], _SAME_TASK)
            # A continued evaluation has the waves that it began with.
            asked[task] = {"max_rows": done[task].get("max_rows", 0)} | asked[task]
    elif folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"{folder}: holds other files and no {_RESULTS}: pass another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be made: {error.strerror}; pass --out") from error
    results = {"settings": settings, **provenance(), "tasks": done | asked}
    save_results(folder, results)
    return name, folder, results


def _policy_name(policy: Policy, config: EvaluateConfig) -> str:
    """What tells the policies of a source apart; '' for a model or an adapter by itself."""
    if policy.adapter is not None:
        return "" if policy.adapter == Path(config.source).expanduser() else policy.adapter.name
    if policy.run is not None and policy.model.path.parent == Path(config.source).expanduser():
        return policy.model.path.name  # a run that trained all parameters
    return "base" if policy.run is not None or "none" in config.adapters else ""


def _named_folder(
    name: str, policy: Policy, settings: Mapping[str, Any], config: EvaluateConfig
) -> Path:
    if config.out:
        return Path(config.out).expanduser() / (name if len(config.adapters) > 1 else "")
    same = {key: settings[key] for key in _SAME_SETTINGS}
    same |= {key: getattr(config.overrides, key) for key in ("data", *_SAME_TASK[1:])}
    digest = hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()[:8]
    mode = "greedy" if settings["temperature"] == 0 else f"samples{config.samples}"
    if policy.run is not None:
        run = RunFolder(Path(config.source).expanduser())
        return run.evaluations / f"{name}-{mode}-{digest}"
    model = re.sub(r"[^\w.-]+", "_", re.split("[/:]", config.source.rstrip("/"))[-1])
    parts = [model.removesuffix(".gguf"), name, mode, digest]
    return Path("evaluations") / "-".join(filter(None, parts))


def _check_same(
    folder: Path, what: str, old: Mapping[str, Any], new: Mapping[str, Any], keys: Sequence[str]
) -> None:
    changes = [
        f"{what}{key}: {json.dumps(old[key])} -> {json.dumps(new[key])}"
        for key in keys
        if old[key] != new[key]
    ]
    if changes:
        raise UserError(
            f"{folder} holds completions that were made otherwise ({', '.join(changes)}); restore "
            "that or pass another --out"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save_results(folder: Path, results: Mapping[str, Any]) -> None:
    """Writes results.json."""
    write_atomic(folder / _RESULTS, json.dumps(results, indent=2) + "\n")
