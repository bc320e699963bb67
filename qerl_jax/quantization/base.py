"""The base of a run in NVFP4: calibrated once, or exactly that of a saved run."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from qerl_jax.data.prompts import Prompt
from qerl_jax.errors import UserError
from qerl_jax.memory.run_plan import PlannedTeacher, plan_run, this_device
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.layers.kinds import has_experts
from qerl_jax.policy.sharding import make_mesh, shard, shard_params
from qerl_jax.policy.sizes import packed_numbers, weight_bytes
from qerl_jax.quantization import cache
from qerl_jax.quantization.cache import Entry
from qerl_jax.quantization.calibration import CalibrationOptions, calibrated_layers
from qerl_jax.quantization.calibration_text import (
    TextConfig,
    check_tokens,
    choose_prompts,
    sample_windows,
)
from qerl_jax.quantization.rounding import (
    ExpertLoad,
    PackedLayer,
    describe_loads,
    fill_packed,
)
from qerl_jax.rollout.config import EngineConfig
from qerl_jax.run.provenance import versions
from qerl_jax.system.live_line import waiting
from qerl_jax.system.staging import staged_folder
from qerl_jax.weights.checkpoint import Checkpoint, open_checkpoint
from qerl_jax.weights.load import LoadedModel, Put, describe, load

FACT = "calibration"  # in config.json of a run: the digest of its base
# Sampling, compiling and writing; and quantizing, on an H100 (benchmarks/results/calibration.json).
_SECONDS, _SECONDS_PER_WEIGHT = 75, 3.3e-9
_VERSION = 1  # of what a base is made of; another one makes each base again


def is_calibrated(model: Mapping[str, Any]) -> bool:
    """Whether the section `model` of a config asks for a calibrated base."""
    return model.get("format") == "nvfp4" and model.get("calibration") == "gptq"


def recorded_digest(run: Mapping[str, Any], name: str = FACT) -> str:
    """The digest of the calibrated base that config.json of a run records; '' where it has none."""
    fact = run.get(name)
    return fact.get("digest", "") if isinstance(fact, Mapping) else ""


def check_calibrates(model: ModelConfig) -> None:
    """Raises a UserError for a model that is not calibrated."""
    if not model.packs_projections:
        raise UserError(
            f"model.calibration='gptq': a {model.model_type} is not calibrated, as it was trained "
            "with experts in MXFP4; pass --config.model.format=mxfp4, or for experts of 16 bits "
            "--config.model.calibration=none"
        )


def calibration_cost(model: ModelConfig) -> tuple[int, int]:
    """Estimates the seconds on an H100 and the bytes on the disk that a calibrated base takes.

    Raises:
        UserError: the model is not calibrated.
    """
    check_calibrates(model)
    seconds = _SECONDS + _SECONDS_PER_WEIGHT * packed_numbers(model)
    return round(seconds), weight_bytes(model, format="nvfp4", itemsize=2)


def describe_cost(
    config: ConfigDict, model: ModelConfig, teacher: PlannedTeacher | None = None
) -> str:
    """Returns a line that says what the calibrated base of a run takes; '' for a run without one.

    A teacher with weights of its own has another line. Whether a model is in NVFP4 already, and
    then stays as it is, is not looked up.
    """
    bases = [("", config.model.format, model)]
    if teacher is not None:
        bases.append(("of the teacher, ", teacher.format, teacher.model))
    lines = []
    for whose, form, architecture in bases:
        if is_calibrated({"format": form, "calibration": config.model.calibration}):
            seconds, size = calibration_cost(architecture)
            lines.append(
                f"calibration of 16-bit weights before the first step: {whose}about {seconds} s on "
                f"an H100 and {size / 1e9:.1f} GB in {cache.cache_folder()}, once for all runs of "
                "this model on these problems\n"
            )
    return "".join(lines)


def calibrated_base(
    config: ConfigDict, checkpoint: Checkpoint, prompts: Sequence[Prompt], *, processes: int = 1
) -> Entry:
    """Returns the calibrated base of a new run: from the cache, or calibrated now.

    The rounded policy, which fits wherever the run fits, completes training prompts. Then one layer
    after the other is quantized on the first device, with the text of the completions. Of several
    processes this one samples with its own devices.

    Raises:
        UserError: the cache cannot be written, or the model cannot be quantized.
    """
    check_calibrates(checkpoint.config)
    text = TextConfig(max_new_tokens=min(512, config.rollout.max_new_tokens))
    chosen = choose_prompts([prompt.ids for prompt in prompts], text)
    facts = _facts(checkpoint) | {
        "prompts": cache.key_of({"ids": [list(ids) for ids in chosen]}),
        "text": dataclasses.asdict(text),
        # The policy that samples the text rounds by them.
        "dtype": config.model.dtype,
        "kv_cache_dtype": config.rollout.kv_cache_dtype,
    }

    def sample() -> np.ndarray:
        mesh = make_mesh(
            config.mesh.data // processes,
            config.mesh.tensor,
            jax.local_devices() if processes > 1 else None,
        )
        model = load(
            config.model.source,
            dtype=config.model.dtype,
            put=functools.partial(shard_params, mesh=mesh),
        )
        if mesh is not None:
            model = dataclasses.replace(model, params=shard(model.params, mesh))
        print(f"calibrating on completions of {len(chosen)} training prompts", flush=True)
        sampling = config.copy_and_resolve_references()
        with sampling.unlocked():
            sampling.rollout.dequantize = "auto"  # The text is that of bf16 arithmetic.
            sampling.sft.rows_per_step = 0  # A run that learns from text samples here alone.
        plan = plan_run(sampling, checkpoint.config, this_device()).rollout
        engine = EngineConfig(
            chunk_steps=config.rollout.chunk_steps,
            max_rows=plan.rows,
            prefill_prompts=plan.prefill_prompts,
            kv_cache_dtype=config.rollout.kv_cache_dtype,
            dequantize=plan.dequantize,
            compact="once",
        )
        with waiting(f"sampling completions of {len(chosen)} prompts for the calibration"):
            return sample_windows(model, chosen, text, engine)

    return _entry(checkpoint, facts, sample)


def restored_base(checkpoint: Checkpoint, digest: str, tokens: Path) -> Entry:
    """Returns exactly the calibrated base that a run was trained on, by the digest it recorded.

    Where the cache lacks it, it is calibrated again on the text that the run kept in a file.

    Raises:
        UserError: the base is not in the cache, and cannot be made again or came out different.
    """
    if (entry := cache.find(digest)) is not None:
        return entry
    remedy = (
        f"copy {cache.cache_folder()} from the machine of the run, or export there with "
        "`export RUN --with-base`"
    )
    if not tokens.exists():
        raise UserError(
            f"the calibrated base of the run ({digest[:16]}) is not in the cache, and the run has "
            f"no {tokens.name} to make it from; {remedy}"
        )
    windows = check_tokens(cache.read_tokens(tokens), checkpoint.config.vocab_size, tokens)
    facts = _facts(checkpoint) | {"tokens": cache.key_of({"ids": windows.tolist()})}
    entry = _entry(checkpoint, facts, lambda: windows)
    if entry.digest != digest:
        raise UserError(
            f"the calibrated base of the run is {digest[:16]}, and the weights of "
            f"{checkpoint.path} give {entry.digest[:16]} on this machine; {remedy}"
        )
    return entry


def load_calibrated(
    entry: Entry, checkpoint: Checkpoint, *, dtype: str, put: Put | None = None
) -> LoadedModel:
    """Loads a calibrated base, as `load` does, under the name of the model it was made from."""
    model = load(str(entry.path), format="nvfp4", dtype=dtype, put=put)
    return _named_as(model, entry, checkpoint)


def _named_as(model: LoadedModel, entry: Entry, checkpoint: Checkpoint) -> LoadedModel:
    assert checkpoint.tokenizer is not None
    return dataclasses.replace(
        model,
        config=checkpoint.config,
        tokenizer=checkpoint.tokenizer,
        source=checkpoint.source,
        path=checkpoint.path,
        packed=False,
        calibrated=entry.path,
    )


def load_base_of_run(
    source: str, run: Mapping[str, Any], tokens: Path, *, format: str, dtype: str
) -> LoadedModel:
    """Loads the base of a saved run: calibrated in NVFP4, as it was, or as `load` does.

    `run` is the content of its config.json, and `tokens` the file of the text that it keeps.

    Raises:
        UserError: as in `load` and `restored_base`.
    """
    digest = recorded_digest(run)
    if format != "nvfp4" or not digest:
        return load(source, format=format, dtype=dtype)
    checkpoint = open_checkpoint(source)
    if checkpoint.packed:  # such as the base that was exported with an adapter
        return load(source, format=format, dtype=dtype)
    entry = restored_base(checkpoint, digest, tokens)
    return load_calibrated(entry, checkpoint, dtype=dtype)


def describe_base_of_run(
    source: str, run: Mapping[str, Any], *, format: str, dtype: str
) -> LoadedModel | None:
    """Returns what `load_base_of_run` returns without its weights, as `load.describe` does.

    Returns:
        The description; None where the calibrated base is not in the cache.
    """
    digest = recorded_digest(run)
    if format != "nvfp4" or not digest or (checkpoint := open_checkpoint(source)).packed:
        return describe(source, format=format, dtype=dtype)
    if (entry := cache.find(digest)) is None:
        return None
    return _named_as(describe(str(entry.path), format="nvfp4", dtype=dtype), entry, checkpoint)


def _facts(checkpoint: Checkpoint) -> dict[str, Any]:
    options: dict[str, Any] = dataclasses.asdict(CalibrationOptions())
    model = checkpoint.config
    if not has_experts(model):
        del options["shared_tokens"]  # Nothing depends on it, so that older entries stay valid.
    return {
        "weights": cache.weights_digest(checkpoint.path),
        "architecture": checkpoint.config.digest,  # which config.json may change without them
        "options": options,
        "version": _VERSION,
        "versions": {name: versions()[name] for name in ("qerl-jax", "jax")},
    }


def _entry(
    checkpoint: Checkpoint, facts: Mapping[str, Any], sample: Callable[[], np.ndarray]
) -> Entry:
    """Returns the entry of the cache that is made from `facts`, which is made if it is missing."""
    key = cache.key_of(facts)
    path = cache.entry_path(key)
    with cache.lock(key):
        if (entry := cache.open_entry(path)) is not None:
            return entry
        began = time.perf_counter()
        tokens = sample()
        sampled = time.perf_counter() - began
        loads: list[dict[str, ExpertLoad]] = []

        def layers() -> Iterator[PackedLayer]:
            for layer in calibrated_layers(checkpoint, tokens):
                loads.append(layer.loads)
                yield layer

        with staged_folder(path, replace=True) as folder:
            fill_packed(folder, checkpoint, layers())
            seconds = time.perf_counter() - began
            record = {**facts, "source": checkpoint.source, "seconds": round(seconds, 1)}
            if any(loads):
                record["experts"] = [{n: x._asdict() for n, x in own.items()} for own in loads]
            record = cache.complete_entry(folder, tokens, record)
        if of_experts := describe_loads(loads):
            print(of_experts)
        print(
            f"calibrated on {tokens.size} tokens in {seconds:.0f} s ({sampled:.0f} s of them for "
            f"the completions); kept in {path}",
            flush=True,
        )
        return Entry(path, record["digest"], record)
