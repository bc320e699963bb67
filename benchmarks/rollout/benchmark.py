"""Measures the rollout engine: decode steps on random weights, or rollouts of a real model.

The time of a decode step is the time of a generation from the moment when the host receives the
first chunk of tokens to the end, divided by the steps between. Prefill comes before and does not
count: its time varies by more than a step takes. Everything is compiled, and every generation runs
once, before the clock starts; each time is the best of two. Tokens are drawn at temperature 1, and
no token ends a row.

Fields of a "decode" row:

    ms_per_step             milliseconds of a step of all rows; tokens_per_s follows from it
    prefill_tokens_per_s    prompt tokens over the seconds of a generation of one token
    roofline_share          fraction of the step that the bytes need at the card's bandwidth: packed
                            weights, head, and the keys and values of a row in the middle of the
                            measured steps
    padding_waste           fraction of the computed positions that hold no token of a row
    peak_gb                 peak memory in 10^9 bytes, as `peak_memory.PeakMemory` measures it

A "parts" row has the fields of a decode row, and in `parts` the milliseconds of a step by part, as
`profile.per_step` returns them.

A "gsm8k" row measures rollouts of a file of problems: completion tokens over the seconds of a whole
`generate`, and as `live_share` the fraction of decoded tokens that belong to a completion. A
"startup" row has what `startup.measure_startup` returns; `warm` means that every program was found
in the cache.
"""

import collections
import contextlib
import dataclasses
import functools
import gc
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.rollout.peak_memory import PeakMemory
from benchmarks.rollout.results import format_row, merge, origin, table
from benchmarks.rollout.startup import measure_startup
from benchmarks.rollout.step_breakdown import step_parts
from benchmarks.rollout.subject import (
    NO_TEXT,
    BenchmarkConfig,
    Subject,
    check,
    check_fits,
    engine_of,
    first_problems,
    make_subject,
    plan_of,
    random_prompts,
    row_settings,
    sampling_of,
    with_adapter,
)
from pallas_kernels.gpu_lock import sole_use
from qerl_jax.compile.aot import compile_operations
from qerl_jax.compile.operation import Executables, commit
from qerl_jax.data.prompts import PromptConfig, encode_prompts
from qerl_jax.errors import memory_errors
from qerl_jax.policy.lora import ALL_FUSED, projection_shapes
from qerl_jax.policy.quant import QuantTensor
from qerl_jax.policy.sharding import replicate_like, shard_config
from qerl_jax.rollout import decode, shapes
from qerl_jax.rollout.config import EngineConfig
from qerl_jax.rollout.programs import operations
from qerl_jax.rollout.progress import RolloutProgress, Statistics, live_fraction
from qerl_jax.rollout.sampler import Sampler
from qerl_jax.system.live_line import LiveLine
from qerl_jax.system.paths import user_path

BITS = {"nvfp4": 4.5, "mxfp4": 4.25, "nf4": 4.5}  # bits per weight, scales included
BANDWIDTHS = {"NVIDIA H200": 4.3e12}  # bytes read and written per second by a copy

_REPEATS = 2
_TOO_LARGE = (
    "does not fit with these options; pass smaller numbers to --batch or --max-rows, or lower "
    "--new-tokens; what was measured is kept"
)


def benchmark(options: BenchmarkConfig) -> list[dict]:
    """Measures, prints a line for each row and a table, and writes the rows.

    Raises:
        UserError: an option names something that does not exist, or that does not fit in memory.
    """
    check(options)
    device = jax.devices()[0]
    print(device.device_kind, flush=True)
    provenance = origin("benchmarks.rollout")
    path, rows = user_path(options.out), []
    with sole_use():
        merge(path, device.device_kind, [])  # Reports a file of another device before the work.

    def keep(row: dict) -> None:
        """Prints and writes a row; the caller has sole use of the device and the file."""
        rows.append(row | provenance)
        print(format_row(row), flush=True)
        merge(path, device.device_kind, rows[-1:])

    for model in options.models if not options.source else (options.source,):
        for format in options.formats:
            memory_context = functools.partial(memory_errors, f"{model} in {format} {_TOO_LARGE}")
            with memory_context(), sole_use() if not options.startup else contextlib.nullcontext():
                subject = make_subject(options, model, format)
            for rank in options.lora_ranks:
                with memory_context():
                    subject = with_adapter(subject, rank, options.seed)
                    if options.startup or options.data:
                        row = (_startup if options.startup else measure_rollouts)(subject, options)
                        with sole_use():
                            keep(row)
                    else:
                        _measure_batches(subject, options, keep)
                for leaf in jax.tree.leaves(subject.lora):
                    leaf.delete()
                jax.clear_caches()
                gc.collect()
            for leaf in jax.tree.leaves(subject.params):
                leaf.delete()
            del subject
    print(table(rows), flush=True)
    return rows


def _measure_batches(
    subject: Subject, options: BenchmarkConfig, keep: Callable[[dict], None]
) -> None:
    """Measures and keeps the decode rows of a policy."""
    check_fits(subject, options)
    programs = _compile(subject, options)
    for batch in options.batches:
        with sole_use():
            row = measure_decoding(subject, batch, options, programs)
            if options.parts:
                row |= {"kind": "parts", "parts": step_parts(subject, batch, options)}
            keep(row)


def measure_decoding(
    subject: Subject, batch: int, options: BenchmarkConfig, programs: Executables
) -> dict:
    """A decode row, with the fields that the module explains."""
    prompts, key = (
        random_prompts(subject.model_config, batch, options),
        jax.random.key(options.seed),
    )
    plan = plan_of(
        subject, [options.prompt] * batch, options.new_tokens, 1, options, max_rows=batch
    )
    sampler = Sampler(
        subject.model_config, NO_TEXT, sampling_of(options.new_tokens), engine_of(options, batch)
    )
    drains: list[tuple[float, int]] = []  # time and received tokens per row, but for the last chunk

    def run(new_tokens: int, programs: Executables = programs) -> Statistics:
        drains.clear()
        run_sampler = dataclasses.replace(
            sampler, sampling=sampling_of(new_tokens), executables=programs
        )
        for step in run_sampler.steps(key, subject.policy, prompts):
            if step.ended_rows < step.rows:
                drains.append((time.perf_counter(), step.tokens // batch))
        return step.statistics

    def step() -> float:
        run(options.new_tokens)
        end = time.perf_counter()
        began, tokens = next(drain for drain in drains if drain[1] > 1)
        chunks = math.ceil((options.new_tokens - tokens) / plan.chunk_steps)
        return (end - began) / (chunks * plan.chunk_steps)

    def prefill() -> float:
        began = time.perf_counter()
        run(1)
        return time.perf_counter() - began

    peak = PeakMemory()
    watched = peak.watched(programs)
    for new_tokens in (1, options.new_tokens):
        cost = run(new_tokens, watched)
    seconds = min(prefill() for _ in range(_REPEATS))
    ms_per_step = 1e3 * min(step() for _ in range(_REPEATS))
    return row_settings(subject, "decode", options) | {
        "batch": batch,
        "prompt": options.prompt,
        "new_tokens": options.new_tokens,
        "ms_per_step": round(ms_per_step, 4),
        "tokens_per_s": round(1e3 * batch / ms_per_step, 1),
        "prefill_tokens_per_s": round(batch * options.prompt / seconds, 1),
        "roofline_share": _roofline_share(subject, batch, ms_per_step, plan.chunk_steps, options),
        "peak_gb": peak.gigabytes,
        "padding_waste": padding_waste([len(p) for p in prompts], plan, cost),
    }


def measure_rollouts(subject: Subject, options: BenchmarkConfig) -> dict:
    """A gsm8k row, with the fields that the module explains."""
    model = subject.loaded
    assert model is not None
    prompts = [
        prompt.ids
        for prompt in encode_prompts(
            first_problems(options.data, options.prompts),
            model.tokenizer,
            PromptConfig(system_prompt=options.system_prompt),
            max_prompt_tokens=model.config.max_position - options.max_new_tokens,
            remedy="lower --max-new-tokens",
        )
    ]
    lengths = [len(prompt) for prompt in prompts]
    plan, engine = _plan_evaluation(subject, lengths, options)
    key = jax.random.key(options.seed)
    sampling = sampling_of(options.max_new_tokens)
    sampler = Sampler(model.config, model.tokenizer, sampling, engine, options.group)

    def run(number: int, programs: Executables) -> RolloutProgress:
        steps = dataclasses.replace(sampler, executables=programs).steps(
            jax.random.fold_in(key, number), subject.policy, prompts
        )
        (last,) = collections.deque(steps, maxlen=1)
        return last

    began = time.perf_counter()
    with _progress() as on_progress:
        programs = sampler.compiled(
            key, subject.policy, num_prompts=len(prompts), on_progress=on_progress
        ).executables
    assert programs is not None
    compile_seconds = time.perf_counter() - began
    times, runs, peak = [], [], PeakMemory()
    with sole_use():
        run(0, peak.watched(programs))
        for number in range(1, _REPEATS + 1):
            began = time.perf_counter()
            runs.append(run(number, programs))
            times.append(time.perf_counter() - began)
    rates = [r.tokens / t for r, t in zip(runs, times, strict=True)]
    best = int(np.argmax(rates))
    rollout, cost = runs[best].rollout, runs[best].statistics
    return row_settings(subject, "gsm8k", options) | {
        "prompts": options.prompts,
        "group": options.group,
        "max_new_tokens": options.max_new_tokens,
        "rows": plan.batch_sizes[0],
        "tokens": int(rollout.lengths.sum()),
        "seconds": round(times[best], 3),
        "tokens_per_s": round(float(rates[best]), 1),
        "live_share": round(live_fraction([cost]), 4),
        "finished": round(float(rollout.finished.mean()), 4),
        "mean_tokens": round(float(rollout.lengths.mean()), 1),
        "compile_seconds": round(compile_seconds, 1),
        "peak_gb": peak.gigabytes,
        "padding_waste": padding_waste(lengths, plan, cost),
    }


def _startup(subject: Subject, options: BenchmarkConfig) -> dict:
    """The startup row of this process."""
    prompts = random_prompts(subject.model_config, options.prompts, options)
    _, engine = _plan_evaluation(subject, [options.prompt] * len(prompts), options)
    sampling = sampling_of(options.max_new_tokens)
    with _progress() as on_compiled:
        measured = measure_startup(
            options.began,
            Sampler(subject.model_config, NO_TEXT, sampling, engine, options.group),
            jax.random.key(options.seed),
            subject.policy,
            prompts,
            on_compiled=on_compiled,
        )
    return (
        row_settings(subject, "startup", options)
        | measured
        | {
            "prompts": options.prompts,
            "group": options.group,
            "max_new_tokens": options.max_new_tokens,
            "max_rows": options.max_rows,
            "warm": measured["kept"] == measured["programs"],
        }
    )


def _plan_evaluation(
    subject: Subject, lengths: Sequence[int], options: BenchmarkConfig
) -> tuple[shapes.RolloutShapes, EngineConfig]:
    """The shapes of whole rollouts in an empty memory, and the settings that keep their rows."""
    plan = plan_of(
        subject, lengths, options.max_new_tokens, options.group, options, max_rows=options.max_rows
    )
    return plan, engine_of(options, plan.batch_sizes[0], max(lengths))


def padding_waste(lengths: Sequence[int], plan: shapes.RolloutShapes, cost: Statistics) -> float:
    """Of the positions of prompts and of the row-steps, the share without a token of a row.

    Args:
        lengths: tokens of each prompt.
        plan: shapes of the rollout.
        cost: statistics of the rollout.
    """
    computed = cost.decoded
    for first in range(0, len(lengths), plan.prefill_batch):
        longest = max(lengths[first : first + plan.prefill_batch])
        width = next(width for width in plan.prompt_widths if width >= longest)
        computed += plan.prefill_batch * width
    return round(1 - (sum(lengths) + cost.live) / computed, 4)


def step_bytes(subject: Subject, *, rows: int, tokens: int, kv_cache_dtype: str = "") -> float:
    """The fewest bytes that a device moves in a decode step: weights, keys, values and states.

    Args:
        subject: the policy.
        rows: number of rows in the batch.
        tokens: tokens per row in the cache.
        kv_cache_dtype: dtype of keys and values, as in `SamplingConfig`.

    Returns:
        The number of bytes.
    """
    params, dtype = subject.params, subject.params["embed_tokens"].dtype
    model_config = shard_config(subject.model_config, params)
    shapes_of = projection_shapes(model_config)

    def weight_bytes(weight: Any, rows: int, columns: int) -> float:
        packed = isinstance(weight, QuantTensor)
        bits = BITS[weight.format] if packed else 8 * weight.dtype.itemsize
        return rows * columns * bits / 8

    head = params.get("lm_head", params["embed_tokens"])
    moved = weight_bytes(head, model_config.vocab_size, model_config.embed_dim)
    for layer, (fused, members) in itertools.product(params["layers"], ALL_FUSED.items()):
        if fused not in layer:
            continue
        outputs = sum(shapes_of[name][0] for name in members)
        moved += weight_bytes(layer[fused], outputs, shapes_of[members[0]][1])
    position = shapes.position_bytes(model_config, shapes.cache_dtype(kv_cache_dtype, dtype))
    # A step reads and writes the states of recurrent layers.
    return moved + rows * (tokens * position + 2 * shapes.state_bytes(model_config))


def _roofline_share(subject, batch, ms_per_step, steps, options) -> float | None:
    bandwidth = options.bandwidth or BANDWIDTHS.get(jax.devices()[0].device_kind)
    if not bandwidth:
        return None
    moved = step_bytes(
        subject,
        rows=batch,
        tokens=options.prompt + (1 + steps + options.new_tokens) // 2,
        kv_cache_dtype=options.kv_cache_dtype,
    )
    return round(1e3 * moved / bandwidth / ms_per_step, 4)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A line on a terminal with the number of compiled programs."""
    live = LiveLine()
    try:
        yield lambda count, total: live.update(f"rollout programs {count}/{total}")
    finally:
        live.clear()


def _compile(subject: Subject, options: BenchmarkConfig) -> Executables:
    """Compiles all programs, a few at a time."""
    began = time.perf_counter()
    needed = []
    key = replicate_like(jax.random.key(options.seed), subject.params)
    key, policy = commit((key, subject.policy))
    shard = shard_config(subject.model_config, policy.params)
    for batch, new_tokens in itertools.product(options.batches, (1, options.new_tokens)):
        plan = plan_of(subject, [options.prompt] * batch, new_tokens, 1, options, max_rows=batch)
        # No row ends early and all prompts have one length, so fewer programs are enough.
        width = next(width for width in plan.prompt_widths if width >= options.prompt)
        plan = dataclasses.replace(
            plan, batch_sizes=plan.batch_sizes[:1], prompt_widths=(width, plan.prompt_widths[-1])
        )
        static = decode.decode_config(
            shard, sampling_of(new_tokens), engine_of(options, batch), NO_TEXT
        )
        needed += operations(key, policy, plan, static).values()
    with _progress() as on_progress:
        programs = compile_operations((key, *policy), needed, on_progress)
    seconds = time.perf_counter() - began
    print(f"compiled {len(programs)} programs in {seconds:.0f} s", flush=True)
    return programs
