"""How fast the rollout engine is: decode steps on random weights, or rollouts of a real model.

A decode step is what a generation takes from the host's look at the first chunk of tokens to its
end, over the steps between: prompts are read before, and their time, which varies by more than a
step takes, is not in it. Everything is compiled before, and every generation runs once before the
clock starts; each time is the best of two. Tokens are drawn at temperature 1, nothing ends a row.

Rows of a decode benchmark:

    ms_per_step             of all rows together; tokens_per_s follows from it
    prefill_tokens_per_s    prompt tokens over the time of a generation of one token
    roofline_share          the time that the packed weights, the head and the keys and values of
                            a row in the middle of these steps take at the card's bandwidth, over
                            the step's
    padding_waste           of the positions that are computed, those without a token of a row
    peak_gb                 the most memory in use; where an earlier row of the process used more,
                            what is in use between the programs
    parts                   a step's milliseconds by part, see `parts.per_step`

and of rollouts of a file of problems, kind "gsm8k": tokens up to and including the end over the
seconds of a whole `generate`, and the share of the row-steps that drew one of them. Of kind
"startup" see `startup.measure_startup`; `cached` is whether JAX's cache had every program.
"""

import contextlib
import dataclasses
import datetime
import functools
import gc
import itertools
import math
import pathlib
import platform
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from qerl_jax.data import encode_prompts, load_problems
from qerl_jax.errors import UserError
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.lora import FUSED, Lora
from qerl_jax.policy.quant import QuantTensor
from qerl_jax.rollout import budget, decode
from qerl_jax.rollout.engine import (
    Rollout,
    SamplingConfig,
    Statistics,
    bound,
    compile_ahead,
    compile_programs,
    generate,
    programs,
)
from qerl_jax.rollout.head import check_head_format, rollout_head
from qerl_jax.run.architectures import ARCHITECTURES
from qerl_jax.run.folder import provenance, without_folders
from qerl_jax.run.parts import device_kernels, parts_of, per_step
from qerl_jax.run.random_policy import normal, random_lora, random_params
from qerl_jax.run.rollout_rows import describe, merge, table
from qerl_jax.run.startup import measure_startup
from qerl_jax.weights.load import FORMATS, LoadedModel, load

BITS = {"nvfp4": 4.5, "mxfp4": 4.25, "nf4": 4.5}  # of a weight, scales included
BANDWIDTHS = {"NVIDIA H200": 4.3e12}  # of a copy, bytes read and written per second

_REPEATS = 2
_CHUNKS = 4  # that are timed together for the parts
_NOTHING_ENDS = (-1,)  # no token has this id


@dataclasses.dataclass(frozen=True)
class BenchmarkConfig:
    """What to measure.

    Attributes:
        models: names of `architectures.ARCHITECTURES`; unused with `source`.
        source: real weights, see `load.load`; '' makes random ones.
        formats: see `load.load`.
        batches: rows that decode together.
        prompt: tokens of each prompt.
        new_tokens: of each row.
        lora_rank: of the adapter on all seven projections; 0 is none.
        chunk_steps: see `SamplingConfig`.
        dequantize: likewise.
        kv_cache_dtype: likewise.
        head_format: see `head.rollout_head`.
        parts: also split the step by part.
        startup: measure how long rollouts of `prompts` and `group` take to begin instead.
        began: `time.time()` when the command began.
        data: a JSONL file of problems to complete with the weights of `source`, instead of the
            decode benchmark; '' is none.
        prompts: problems of it.
        group: completions of each.
        max_new_tokens: of a completion.
        max_rows: see `SamplingConfig`.
        system_prompt: of the problems.
        seed: of weights, tokens and draws.
        bandwidth: bytes per second; 0 is the device's, where it is known.
        out: the JSON file of the rows.
        commit: instead of git's.
    """

    models: tuple[str, ...]
    source: str
    formats: tuple[str, ...]
    batches: tuple[int, ...]
    prompt: int
    new_tokens: int
    lora_rank: int
    chunk_steps: int
    dequantize: str
    kv_cache_dtype: str
    head_format: str
    parts: bool
    startup: bool
    began: float
    data: str
    prompts: int
    group: int
    max_new_tokens: int
    max_rows: int
    system_prompt: str
    seed: int
    bandwidth: float
    out: str
    commit: str


@dataclasses.dataclass(frozen=True)
class Subject:
    """A policy to measure.

    Attributes:
        model: what rows call it.
        format: of its projections.
        config: the architecture.
        params: the parameter tree.
        lora: its adapter, or None.
        loaded: the model that was loaded, or None for random weights.
    """

    model: str
    format: str
    config: ModelConfig
    params: dict
    lora: Lora | None
    loaded: LoadedModel | None = None


def benchmark(config: BenchmarkConfig) -> list[dict]:
    """Measures, prints a line for each row and a table, and writes the rows.

    Raises:
        UserError: something asked for does not exist or does not fit.
    """
    check(config)
    device = jax.devices()[0]
    print(device.device_kind, flush=True)
    origin = _origin(config.commit)
    path, rows = pathlib.Path(config.out), []
    merge(path, device.device_kind, [])  # A file of another device is told before the work.

    def keep(row: dict) -> None:
        rows.append(row | origin)
        print(describe(row), flush=True)
        merge(path, device.device_kind, rows[-1:])

    for model in config.models if not config.source else (config.source,):
        for format in config.formats:
            subject = _subject(config, model, format)
            with _memory_errors(subject):
                if config.startup:
                    keep(_startup(subject, config))
                elif config.data:
                    keep(measure_rollouts(subject, config))
                else:
                    _check_fits(subject, config)
                    _compile(subject, config)
                    measured = []
                    for batch in config.batches:
                        measured.append(measure_decoding(subject, batch, config))
                        keep(measured[-1])
                    for row in measured if config.parts else ():
                        keep(row | {"parts": _step_parts(subject, row["batch"], config)})
            for leaf in jax.tree.leaves((subject.params, subject.lora)):
                leaf.delete()
            del subject
            jax.clear_caches()
            gc.collect()
    print(table(rows), flush=True)
    return rows


def check(config: BenchmarkConfig) -> None:
    """Refuses what cannot be measured, before any weight is made.

    Raises:
        UserError: a name that does not exist, or a number out of range.
    """
    for model in () if config.source else config.models:
        if model not in ARCHITECTURES:
            raise UserError(f"unknown model {model!r}: choose from {', '.join(ARCHITECTURES)}")
    for format in config.formats:
        if format not in FORMATS:
            raise UserError(f"unknown format {format!r}: choose from {', '.join(FORMATS)}")
    limits = {
        "batch": (min(config.batches, default=0), 1),
        "prompt": (config.prompt, 1),
        "new-tokens": (config.new_tokens, config.chunk_steps + 2),  # a second chunk
        "lora-rank": (config.lora_rank, 0),
        "chunk-steps": (config.chunk_steps, 1),
        "prompts": (config.prompts, 1),
        "group": (config.group, 1),
        "max-new-tokens": (config.max_new_tokens, 1),
        "max-rows": (config.max_rows, 0),
        "bandwidth": (config.bandwidth, 0),
    }
    for name, (value, least) in limits.items():
        if value < least:
            raise UserError(f"--{name}={value}: it must be at least {least}")
    check_head_format(config.head_format)
    if config.data and not config.source:
        raise UserError("--data: random weights answer nothing; pass real ones with --source=PATH")
    if config.startup and len(config.models) * len(config.formats) > 1:
        raise UserError("--startup: a process begins once; pass one --model, --format")
    if config.parts and jax.default_backend() != "gpu":
        raise UserError("--parts: the time of kernels is measured on an NVIDIA GPU only")
    if config.parts and len(config.models) * len(config.formats) > 1:
        raise UserError(
            "--parts: CUDA graphs are slower behind a profiler; pass one --model, --format"
        )


# --- Policies -------------------------------------------------------------------------------------


def _subject(config: BenchmarkConfig, model: str, format: str) -> Subject:
    began = time.perf_counter()
    key = jax.random.key(config.seed, impl="rbg")  # the fastest to draw
    if config.source:
        loaded = load(config.source, format=format)
        name = config.source.rstrip("/").rpartition("/")[2].removesuffix(".gguf")
        architecture, params = loaded.config, loaded.params
    else:
        loaded, name, architecture = None, model, ARCHITECTURES[model]
        params = random_params(key, architecture, format=format)
    params = params | rollout_head(params, config.head_format)
    lora = random_lora(key, architecture, rank=config.lora_rank) if config.lora_rank else None
    jax.block_until_ready((params, lora))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    seconds = time.perf_counter() - began
    print(f"{name} in {format}: {size / 1e9:.2f} GB of weights in {seconds:.0f} s", flush=True)
    return Subject(
        model=name, format=format, config=architecture, params=params, lora=lora, loaded=loaded
    )


# --- Measurements ---------------------------------------------------------------------------------


def measure_decoding(subject: Subject, batch: int, config: BenchmarkConfig) -> dict:
    """One row of the decode benchmark, see the module."""
    prompts = _random_prompts(subject.config, batch, config)
    plan = _plan(subject, [config.prompt] * batch, config.new_tokens, 1, config, max_rows=batch)
    costs: list[Statistics] = []
    looks: list[tuple[float, int]] = []  # when the host saw how many tokens of a row

    def run(new_tokens: int) -> Rollout:
        looks.clear()
        return generate(
            jax.random.key(config.seed),
            subject.params,
            subject.lora,
            prompts,
            config=subject.config,
            sampling=_sampling(config, new_tokens, batch),
            eos_ids=_NOTHING_ENDS,
            pad_id=0,
            compiled=True,
            on_progress=lambda _, tokens: looks.append((time.perf_counter(), tokens // batch)),
            on_statistics=costs.append,
        )

    def step() -> float:
        run(config.new_tokens)
        end = time.perf_counter()
        began, tokens = next(look for look in looks if look[1] > 1)
        chunks = math.ceil((config.new_tokens - tokens) / plan.steps)
        return (end - began) / (chunks * plan.steps)

    with _peak_memory() as peak:
        for new_tokens in (1, config.new_tokens):
            run(new_tokens)
        prefill = min(_seconds(run, 1) for _ in range(_REPEATS))
        ms_per_step = 1e3 * min(step() for _ in range(_REPEATS))
    return _described(subject, "decode", config) | {
        "batch": batch,
        "prompt": config.prompt,
        "new_tokens": config.new_tokens,
        "ms_per_step": round(ms_per_step, 4),
        "tokens_per_s": round(1e3 * batch / ms_per_step, 1),
        "prefill_tokens_per_s": round(batch * config.prompt / prefill, 1),
        "roofline_share": _roofline_share(subject, batch, ms_per_step, plan.steps, config),
        "peak_gb": peak(),
        "padding_waste": padding_waste([len(p) for p in prompts], plan, costs[-1]),
    }


def measure_rollouts(subject: Subject, config: BenchmarkConfig) -> dict:
    """The row of rollouts of a file of problems, see the module."""
    model = subject.loaded
    assert model is not None
    problems = load_problems("", path=config.data)[: config.prompts]
    if len(problems) < config.prompts:
        raise UserError(
            f"{config.data}: holds {len(problems)} problems; pass --prompts={len(problems)}"
        )
    prompts = [
        prompt.ids
        for prompt in encode_prompts(
            problems,
            model.tokenizer,
            system_prompt=config.system_prompt,
            max_prompt_tokens=model.config.max_position - config.max_new_tokens,
        )
    ]
    lengths = [len(prompt) for prompt in prompts]
    plan = _plan(
        subject, lengths, config.max_new_tokens, config.group, config, max_rows=config.max_rows
    )
    # The plan of an empty memory, as a run decides it.
    sampling = _sampling(config, config.max_new_tokens, plan.batches[0])
    key = jax.random.key(config.seed)
    how: dict[str, Any] = {
        "config": model.config,
        "sampling": sampling,
        "eos_ids": model.tokenizer.eos_ids,
        "group_size": config.group,
        "prompt_width": max(lengths),
    }
    costs: list[Statistics] = []

    def run(number: int) -> Rollout:
        return generate(
            jax.random.fold_in(key, number),
            subject.params,
            subject.lora,
            prompts,
            pad_id=model.tokenizer.pad_id,
            compiled=True,
            on_statistics=costs.append,
            **how,
        )

    with _peak_memory() as peak:
        began = time.perf_counter()
        compile_ahead(key, subject.params, subject.lora, prompts=len(prompts), **how)
        compile_seconds = time.perf_counter() - began
        run(0)
        times, rollouts = [], []
        for number in range(1, _REPEATS + 1):
            began = time.perf_counter()
            rollouts.append(run(number))
            times.append(time.perf_counter() - began)
    rates = [r.lengths.sum() / t for r, t in zip(rollouts, times, strict=True)]
    best = int(np.argmax(rates))
    rollout, cost = rollouts[best], costs[1 + best]
    return _described(subject, "gsm8k", config) | {
        "prompts": config.prompts,
        "group": config.group,
        "max_new_tokens": config.max_new_tokens,
        "rows": plan.batches[0],
        "tokens": int(rollout.lengths.sum()),
        "seconds": round(times[best], 3),
        "tokens_per_s": round(float(rates[best]), 1),
        "live_share": round(cost.live / cost.decoded, 4) if cost.decoded else 1.0,
        "finished": round(float(rollout.finished.mean()), 4),
        "mean_tokens": round(float(rollout.lengths.mean()), 1),
        "compile_seconds": round(compile_seconds, 1),
        "peak_gb": peak(),
        "padding_waste": padding_waste(lengths, plan, cost),
    }


def _startup(subject: Subject, config: BenchmarkConfig) -> dict:
    """The row of a process that has just begun."""
    measured = measure_startup(
        config.began,
        subject.params,
        subject.lora,
        _random_prompts(subject.config, config.prompts, config),
        config=subject.config,
        sampling=_sampling(config, config.max_new_tokens, config.max_rows),
        eos_ids=_NOTHING_ENDS,
        group_size=config.group,
    )
    return (
        _described(subject, "startup", config)
        | measured
        | {
            "prompts": config.prompts,
            "group": config.group,
            "max_new_tokens": config.max_new_tokens,
            "cached": measured["cache_misses"] == 0 < measured["cache_hits"],
        }
    )


def padding_waste(lengths: Sequence[int], plan: budget.Plan, cost: Statistics) -> float:
    """Of the positions of prompts and of the row-steps, the share without a token of a row.

    Args:
        lengths: tokens of each prompt.
        plan: of the rollout.
        cost: likewise.
    """
    computed = cost.decoded
    for first in range(0, len(lengths), plan.prompts):
        longest = max(lengths[first : first + plan.prompts])
        computed += plan.prompts * next(width for width in plan.widths if width >= longest)
    return round(1 - (sum(lengths) + cost.live) / computed, 4)


def _described(subject: Subject, kind: str, config: BenchmarkConfig) -> dict:
    return {
        "kind": kind,
        "model": subject.model,
        "format": subject.format,
        "lora_rank": config.lora_rank,
        "weights": "real" if config.source else "random",
        "chunk_steps": config.chunk_steps,
        "dequantize": config.dequantize,
        "kv_cache_dtype": str(budget.cache_dtype(config.kv_cache_dtype, jnp.dtype("bfloat16"))),
        "head_format": config.head_format,
        "device": jax.devices()[0].device_kind,
    }


def _sampling(config: BenchmarkConfig, new_tokens: int, max_rows: int) -> SamplingConfig:
    return SamplingConfig(
        max_new_tokens=new_tokens,
        chunk_steps=config.chunk_steps,
        max_rows=max_rows,
        kv_cache_dtype=config.kv_cache_dtype,
        dequantize=config.dequantize,
    )


def _plan(subject, lengths, new_tokens, group, config, *, max_rows) -> budget.Plan:
    return budget.make_plan(
        subject.params,
        prompts=len(lengths),
        longest=max(lengths),
        group_size=group,
        config=subject.config,
        sampling=_sampling(config, new_tokens, max_rows),
    )


def _random_prompts(config: ModelConfig, batch: int, how: BenchmarkConfig) -> list[list[int]]:
    rng = np.random.default_rng(how.seed)
    return rng.integers(0, config.vocab_size, (batch, how.prompt)).tolist()


def _check_fits(subject: Subject, config: BenchmarkConfig) -> None:
    """Refuses a batch that the memory does not hold, before the smaller ones are measured."""
    batch = max(config.batches)
    plan = _plan(subject, [config.prompt] * batch, config.new_tokens, 1, config, max_rows=batch)
    position = budget.position_bytes(subject.config, plan.dtype)
    fitting = budget.rows_left(
        subject.params,
        slots=plan.slots,
        config=subject.config,
        sampling=_sampling(config, config.new_tokens, batch),
        reserve=plan.prompts * plan.widths[-1] * position,
    )
    if fitting is not None and fitting < batch:
        raise UserError(
            f"--batch={batch}: beside {subject.model} in {subject.format} the memory holds "
            f"{fitting} rows of {plan.slots} tokens; take it out, or lower --new-tokens"
        )


@contextlib.contextmanager
def _memory_errors(subject: Subject) -> Iterator[None]:
    """Says in a line that the memory was not enough after all."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise UserError(
            f"{subject.model} in {subject.format}: out of memory; pass smaller numbers to --batch "
            "or --max-rows, or lower --new-tokens; what was measured is kept"
        ) from error


def _seconds(run: Callable[[int], Any], new_tokens: int) -> float:
    began = time.perf_counter()
    run(new_tokens)
    return time.perf_counter() - began


def step_bytes(subject: Subject, *, rows: int, tokens: int, kv_cache_dtype: str = "") -> float:
    """The fewest bytes of a decode step: projections, head, and the keys and values.

    Args:
        subject: the policy.
        rows: that decode together.
        tokens: in the cache of each row.
        kv_cache_dtype: see `SamplingConfig`.
    """
    config, dtype = subject.config, subject.params["embed_tokens"].dtype
    params = subject.params
    moved = 0.0
    for weight in (
        params.get("lm_head", params["embed_tokens"]),
        *(layer[fused] for layer in params["layers"] for fused in FUSED),
    ):
        packed = isinstance(weight, QuantTensor)
        bits = BITS[weight.format] if packed else 8 * weight.dtype.itemsize
        moved += math.prod(weight.shape) * bits / 8
    position = budget.position_bytes(config, budget.cache_dtype(kv_cache_dtype, dtype))
    return moved + rows * tokens * position


def _roofline_share(subject, batch, ms_per_step, steps, config) -> float | None:
    bandwidth = config.bandwidth or BANDWIDTHS.get(jax.devices()[0].device_kind)
    if not bandwidth:
        return None
    moved = step_bytes(
        subject,
        rows=batch,
        tokens=config.prompt + (1 + steps + config.new_tokens) // 2,
        kv_cache_dtype=config.kv_cache_dtype,
    )
    return round(1e3 * moved / bandwidth / ms_per_step, 4)


@contextlib.contextmanager
def _peak_memory() -> Iterator[Callable[[], float | None]]:
    """Watches the memory of the block; afterwards the function yielded gives its peak in GB.

    A device tells the peak of the whole process. Where the block does not raise it, the memory in
    use is looked at every few milliseconds.
    """
    device = jax.devices()[0]
    before = device.memory_stats()
    seen, over = [0], threading.Event()

    def look() -> None:
        while not over.wait(0.005):
            seen.append(max(seen.pop(), (device.memory_stats() or {})["bytes_in_use"]))

    def peak() -> float | None:
        after = device.memory_stats()
        if not before or not after:
            return None
        raised = after["peak_bytes_in_use"] > before["peak_bytes_in_use"]
        return round((after["peak_bytes_in_use"] if raised else seen[0]) / 1e9, 3)

    watcher = threading.Thread(target=look)
    if before:
        watcher.start()
    try:
        yield peak
    finally:
        over.set()
        if before:
            watcher.join()


def _compile(subject: Subject, config: BenchmarkConfig) -> None:
    """Compiles all programs, a few at a time."""
    began = time.perf_counter()
    needed = {}
    for batch, new_tokens in itertools.product(config.batches, (1, config.new_tokens)):
        plan = _plan(subject, [config.prompt] * batch, new_tokens, 1, config, max_rows=batch)
        needed |= programs(
            jax.random.key(config.seed),
            subject.params,
            subject.lora,
            dataclasses.replace(plan, batches=plan.batches[:1]),  # No row ends early.
            rules=decode.rules(subject.config, _sampling(config, new_tokens, batch), _NOTHING_ENDS),
        )
    compile_programs(needed)
    seconds = time.perf_counter() - began
    print(f"compiled {len(needed)} programs in {seconds:.0f} s", flush=True)


class _Chunk:
    """The chunks of a generation, with the arguments that the engine gives them."""

    def __init__(self, subject: Subject, batch: int, new_tokens: int, config: BenchmarkConfig):
        lengths = [config.prompt] * batch
        self.plan = _plan(subject, lengths, new_tokens, 1, config, max_rows=batch)
        self._config, self._rows = subject.config, batch
        self._sharding = subject.params["embed_tokens"].sharding
        key = jax.random.key(config.seed)
        key, params, lora = bound((key, subject.params, subject.lora))
        dtype = params["embed_tokens"].dtype
        self._policy = key, params, decode.fuse_adapter(lora, config=subject.config, dtype=dtype)
        self._how: dict[str, Any] = {
            "rules": decode.rules(
                subject.config, _sampling(config, new_tokens, batch), _NOTHING_ENDS
            ),
            "steps": self.plan.steps,
        }

    def empty_batch(self) -> decode.Batch:
        """Free seats for all rows."""
        return decode.empty_batch(
            self._rows,
            self.plan.slots,
            config=self._config,
            dtype=self.plan.dtype,
            sharding=self._sharding,
        )

    def lower(self, batch: decode.Batch) -> jax.stages.Lowered:
        """The program for a batch, or for the shapes of one."""
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._sharding), batch
        )
        needed = np.ones(self._rows, bool)
        return decode.decode_chunk.lower(*self._policy, shapes, needed, **self._how)

    def run(
        self, batch: decode.Batch, tokens: int, program: jax.stages.Compiled | None = None
    ) -> tuple[decode.Batch, decode.Drawn]:
        """A chunk behind so many tokens of each row; `program` in place of the engine's."""
        full = functools.partial(jnp.full, self._rows, device=self._sharding)
        batch = dataclasses.replace(
            batch,
            cache=dataclasses.replace(batch.cache, lengths=full(tokens, jnp.int32)),
            counts=full(0, jnp.int32),
            done=full(False, bool),
        )
        arguments = *self._policy, batch, np.ones(self._rows, bool)
        return program(*arguments) if program else decode.decode_chunk(*arguments, **self._how)


def _step_parts(subject: Subject, batch: int, config: BenchmarkConfig) -> dict[str, float]:
    """The parts of a decode step, out of chunks in the middle of the new tokens; {} if unknown."""
    chunk = _Chunk(subject, batch, config.new_tokens, config)
    steps = chunk.plan.steps
    middle = config.prompt + (config.new_tokens - steps) // 2
    held = [chunk.empty_batch()]  # A chunk is given its batch away, and returns the next one.
    key = jax.random.key(config.seed)
    cache = held[0].cache
    for index in range(subject.config.num_layers):
        for arrays in (cache.keys, cache.values):
            key, one = jax.random.split(key)
            drawn = normal(one, arrays[index].shape, jnp.bfloat16, 1.0)
            arrays[index] = drawn.astype(arrays[index].dtype)
    # Within a CUDA graph no kernel has the name of its instruction.
    observed = chunk.lower(jax.eval_shape(chunk.empty_batch)).compile(
        compiler_options={"xla_gpu_enable_command_buffer": ""}
    )

    def run(program: jax.stages.Compiled | None = None) -> decode.Drawn:
        after, drawn = chunk.run(held.pop(), middle, program)
        held.append(after)
        return drawn

    jax.block_until_ready(run())
    walls = []
    for _ in range(_REPEATS + 1):
        first, *others = [run() for _ in range(1 + _CHUNKS)]
        jax.block_until_ready(first)
        began = time.perf_counter()
        jax.block_until_ready(others)
        walls.append(1e3 * (time.perf_counter() - began) / _CHUNKS)
    try:
        kernels = device_kernels(lambda: run(observed))
    except Exception as error:  # What profilers raise must not cost the row.
        print(f"no parts: {type(error).__name__}: {error}"[:200], flush=True)
        return {}
    return per_step(
        kernels,
        parts_of(observed.as_text() or ""),
        wall_ms=min(walls),
        steps=steps,
        layers=subject.config.num_layers,
    )


def _origin(commit: str) -> dict:
    """What every row says of where it comes from; of paths only the last part."""
    found = provenance()
    arguments = without_folders(shlex.join(sys.argv[1:]))
    return {
        "commit": commit or (found["git"] or {}).get("commit", "unknown"),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "python": platform.python_version(),
        },
        "command": f"python -m experiments.benchmark_rollout {arguments}",
    }
