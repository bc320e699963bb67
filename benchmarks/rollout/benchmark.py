"""Measures the rollout engine: decode steps on random weights, or rollouts of a real model.

The time of a decode step is the time of a generation from the moment when the host receives the
first chunk of tokens to the end, divided by the steps between. Prefill comes before and does not
count: its time varies by more than a step takes. Everything is compiled, and every generation runs
once, before the clock starts; each time is the best of two. Tokens are drawn at temperature 1, and
no token ends a row.

Fields of a "decode" row:

    ms_per_step             milliseconds of a step of all rows; tokens_per_s follows from it
    prefill_tokens_per_s    prompt tokens over the seconds of a generation of one token
    peak_gb                 largest memory of the process so far in 10^9 bytes
    distinct_experts        of a mixture, the experts of a layer that a step's tokens have; a mean

A "parts" row has the fields of a decode row, and in `parts` the milliseconds of a step by part, as
`profile.per_step` returns them.

A "gsm8k" row measures rollouts of a file of problems: completion tokens over the seconds of a whole
`generate`, and as `live_share` the fraction of decoded tokens that belong to a completion.

A "startup" row has the seconds from the beginning of the command until the weights were made
(`weights_s`), until all programs were compiled (`compiled_s`) and until the host received the first
tokens (`first_tokens_s`); the number of `programs`, how many of them were found in the cache
(`kept`), and whether all were (`warm`).
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import gc
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.common import check_out, merge, origin, peak_gb
from benchmarks.rollout.profile import step_parts
from benchmarks.rollout.results import KEYS
from benchmarks.rollout.subject import (
    NO_TEXT,
    Subject,
    check,
    check_fits,
    engine_of,
    first_problems,
    make_subject,
    operations_of_steps,
    plan_of,
    plan_of_steps,
    random_prompts,
    row_settings,
    with_adapter,
)
from pallas_kernels.gpu_lock import sole_use
from qerl_jax.compile.aot import compile_operations
from qerl_jax.compile.operation import Executables
from qerl_jax.errors import memory_errors
from qerl_jax.rollout import shapes
from qerl_jax.rollout.config import SamplingConfig
from qerl_jax.rollout.progress import RolloutProgress, live_fraction
from qerl_jax.rollout.sampler import Sampler

_REPEATS = 2
_TOO_LARGE = (
    "does not fit with these options; pass smaller numbers to --batch or --max-rows, or lower "
    "--new-tokens; what was measured is kept"
)


def benchmark(options: argparse.Namespace) -> None:
    """Measures, prints a line for each row, and writes the rows.

    Raises:
        UserError: an option names something that does not exist, or that does not fit in memory.
    """
    check(options)
    device = jax.devices()[0].device_kind
    print(device, flush=True)
    provenance = origin("benchmarks.rollout")
    check_out(options.out, KEYS, device)

    def keep(row: dict) -> None:
        """Prints and writes a row; the caller has sole use of the device and the file."""
        merge(options.out, row | provenance, KEYS, device)

    for model in options.model if not options.source else (options.source,):
        for format in options.format:
            memory_context = functools.partial(memory_errors, f"{model} in {format} {_TOO_LARGE}")
            with memory_context(), sole_use() if not options.startup else contextlib.nullcontext():
                subject = make_subject(options, model, format)
            for rank in options.lora_rank:
                with memory_context():
                    subject = with_adapter(subject, rank, options.expert_rank)
                    if options.startup or options.data:
                        measure = measure_startup if options.startup else measure_rollouts
                        row = measure(subject, options)
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


def _measure_batches(
    subject: Subject, options: argparse.Namespace, keep: Callable[[dict], None]
) -> None:
    """Measures and keeps the decode rows of a policy."""
    check_fits(subject, options)
    programs = compile_steps(subject, options)
    for batch in options.batch:
        with sole_use():
            row = measure_decoding(subject, batch, options, programs)
            if options.parts:
                row |= row_settings(subject, "parts", options)
                row |= {"parts": step_parts(subject, batch, options)}
            keep(row)


def compile_steps(subject: Subject, options: argparse.Namespace) -> Executables:
    """Compiles all programs, a few at a time."""
    began = time.perf_counter()
    arrays, needed = None, []
    for batch, new_tokens in itertools.product(options.batch, (1, options.new_tokens)):
        arrays, table = operations_of_steps(subject, batch, options, new_tokens)
        needed += table.values()
    programs = compile_operations(arrays, needed)
    seconds = time.perf_counter() - began
    print(f"compiled {len(programs)} programs in {seconds:.0f} s", flush=True)
    return programs


def measure_decoding(
    subject: Subject, batch: int, options: argparse.Namespace, programs: Executables
) -> dict:
    """A decode row, with the fields that the module explains."""
    prompts = random_prompts(subject.model_config, batch, options)
    key, plan = jax.random.key(0), plan_of_steps(subject, batch, options)
    engine, sampling = engine_of(options, batch), SamplingConfig(max_new_tokens=options.new_tokens)
    sampler = Sampler(subject.model_config, NO_TEXT, sampling, engine, executables=programs)
    drains: list[tuple[float, int]] = []  # time and received tokens per row, but for the last chunk
    last: RolloutProgress | None = None

    def run(new_tokens: int) -> None:
        nonlocal last
        drains.clear()
        run_sampler = dataclasses.replace(
            sampler, sampling=SamplingConfig(max_new_tokens=new_tokens)
        )
        for last in run_sampler.steps(key, subject.policy, prompts):
            if last.ended_rows < last.rows:
                drains.append((time.perf_counter(), last.tokens // batch))

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

    for new_tokens in (1, options.new_tokens):
        run(new_tokens)
    seconds = min(prefill() for _ in range(_REPEATS))
    ms_per_step = 1e3 * min(step() for _ in range(_REPEATS))
    assert last is not None
    return row_settings(subject, "decode", options) | {
        "batch": batch,
        "prompt": options.prompt,
        "new_tokens": options.new_tokens,
        "ms_per_step": round(ms_per_step, 4),
        "tokens_per_s": round(1e3 * batch / ms_per_step, 1),
        "prefill_tokens_per_s": round(batch * options.prompt / seconds, 1),
        "peak_gb": peak_gb(),
        **distinct_experts(last.rollout.routes),
    }


def distinct_experts(routes: np.ndarray | None) -> dict[str, float]:
    """How many experts of a layer the tokens of a step have, on average.

    `routes` are those of a rollout whose rows have equally many tokens, or None.
    """
    if routes is None:
        return {}
    # [tokens, L, pairs], in which equal experts follow each other.
    experts = np.sort(np.concatenate(list(routes), axis=2), axis=2)
    counts = 1 + (np.diff(experts.astype(np.int32), axis=2) != 0).sum(axis=2)
    return {"distinct_experts": round(float(counts.mean()), 1)}


def measure_rollouts(subject: Subject, options: argparse.Namespace) -> dict:
    """A gsm8k row, with the fields that the module explains."""
    model = subject.loaded
    assert model is not None
    prompts = first_problems(model, options.data, options.prompts, options.max_new_tokens)
    key, began = jax.random.key(0), time.perf_counter()
    sampler, plan = _compiled_sampler(subject, model.tokenizer, prompts, options)
    compile_seconds = time.perf_counter() - began
    times, runs = [], []

    def run(number: int) -> RolloutProgress:
        steps = sampler.steps(jax.random.fold_in(key, number), subject.policy, prompts)
        (last,) = collections.deque(steps, maxlen=1)
        return last

    with sole_use():
        run(0)
        for number in range(1, _REPEATS + 1):
            began = time.perf_counter()
            runs.append(run(number))
            times.append(time.perf_counter() - began)
    rates = [r.tokens / t for r, t in zip(runs, times, strict=True)]
    best = int(np.argmax(rates))
    rollout = runs[best].rollout
    return (
        row_settings(subject, "gsm8k", options)
        | _rollout_settings(options)
        | {
            "rows": plan.batch_sizes[0],
            "tokens": int(rollout.lengths.sum()),
            "seconds": round(times[best], 3),
            "tokens_per_s": round(float(rates[best]), 1),
            "live_share": round(live_fraction([runs[best].statistics]), 4),
            "finished": round(float(rollout.finished.mean()), 4),
            "mean_tokens": round(float(rollout.lengths.mean()), 1),
            "compile_seconds": round(compile_seconds, 1),
            "peak_gb": peak_gb(),
        }
    )


def measure_startup(subject: Subject, options: argparse.Namespace) -> dict:
    """The startup row of this process, with the fields that the module explains."""
    prompts = random_prompts(subject.model_config, options.prompts, options)
    times = {"weights_s": time.time()}
    sampler, _ = _compiled_sampler(subject, NO_TEXT, prompts, options)
    times["compiled_s"] = time.time()
    for _ in sampler.steps(jax.random.key(0), subject.policy, prompts):
        times.setdefault("first_tokens_s", time.time())
    programs = sampler.executables
    assert programs is not None
    return (
        row_settings(subject, "startup", options)
        | {name: round(seconds - options.began, 2) for name, seconds in times.items()}
        | {"programs": len(programs), "kept": len(programs) - len(programs.compiled)}
        | _rollout_settings(options)
        | {"max_rows": options.max_rows, "warm": not programs.compiled}
    )


def _compiled_sampler(
    subject: Subject, tokenizer: Any, prompts: Sequence[Sequence[int]], options: argparse.Namespace
) -> tuple[Sampler, shapes.RolloutShapes]:
    """A sampler with every program that rollouts of these prompts can need, and its shapes."""
    lengths, sampling = (
        [len(prompt) for prompt in prompts],
        SamplingConfig(max_new_tokens=options.max_new_tokens),
    )
    plan = plan_of(
        subject, lengths, options.max_new_tokens, options.group, options, max_rows=options.max_rows
    )
    # The rows that fit an empty memory stay the bound.
    engine = engine_of(options, plan.batch_sizes[0], max(lengths))
    sampler = Sampler(subject.model_config, tokenizer, sampling, engine, options.group)
    key = jax.random.key(0)
    return sampler.compiled(key, subject.policy, num_prompts=len(prompts)), plan


def _rollout_settings(options: argparse.Namespace) -> dict[str, int]:
    return {name: getattr(options, name) for name in ("prompts", "group", "max_new_tokens")}
