r"""Measures rollouts of a real model with drafts and without, back to back.

    python -m benchmarks.drafts --source=MODEL --data=gsm8k.jsonl,math500.jsonl \
        --new-tokens=512,2048 --rollouts=1x8,2x16,8x16

Each rollout samples a number of prompts with a number of completions each: 2x16 are two prompts
with 16 completions. The first rollouts of each kind are not timed: a program is loaded when it
first runs, so they take all lengths of drafts in turn. Then rollouts of the first problems of a
file are sampled in both ways, each of which is first in half of them, until --groups groups have
been sampled in each. A rollout is timed from an idle device to an idle device. The programs of all
files and sizes are compiled before. The policy has an adapter of rank --lora-rank, as it is before
training. Several commands may run at the same time if the memory holds them
(XLA_PYTHON_CLIENT_PREALLOCATE=false): they take turns, two rollouts at a time.

Fields of a row, of which those of tokens and seconds are sums over its rollouts:

    faster                  tokens per second with drafts, over those without
    lowest, highest         the same of one rollout
    tokens_off, seconds_off   without drafts
    tokens_on, seconds_on     with drafts
    equal                   share of the tokens without drafts that are also those with drafts, up
                            to the first one of a completion that differs
    tokens_per_row_step     tokens that a row gained in a decode step with drafts
    acceptance              share of the drafted tokens that were accepted
    programs                number of programs with drafts
"""

import argparse
import collections
import contextlib
import dataclasses
import gc
import itertools
import time
from typing import Any
from unittest import mock

from benchmarks import common
from qerl_jax.commands import cli

KEYS = "model", "format", "lora_rank", "data", "max_new_tokens", "prompts", "group"

_UNTIMED = 3  # rollouts


def _sizes(text: str) -> tuple[tuple[int, int], ...]:
    try:
        pairs = [tuple(map(int, part.split("x"))) for part in text.split(",")]
        return tuple((prompts, group) for prompts, group in pairs)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: sizes with commas, like 1x8,2x16") from error


def make_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    parser = common.make_parser("benchmarks.drafts", __doc__, "benchmarks/results/drafts.json")
    add = parser.add_argument
    add("--source", required=True, help="weights: a folder, a .gguf file or a hub id")
    add("--format", default="nvfp4", help="format of the weights (default: nvfp4)")
    add("--lora-rank", type=int, default=32, help="rank of the adapter (default: 32)")
    add("--data", required=True, help="JSONL files of problems, with commas")
    add("--new-tokens", default="512", help="most tokens of a completion, for each file")
    sizes = "prompts and completions of each, like 1x8,2x16 (default: 1x8,2x16,8x16)"
    add("--rollouts", type=_sizes, default="1x8,2x16,8x16", help=sizes)
    add("--groups", type=int, default=10, help="groups of each kind of rollout (default: 10)")
    add("--chunk-steps", type=int, default=16, help="decode steps per program call (default: 16)")
    return parser


def compiled(subject: Any, prompts: list, options: argparse.Namespace, size: Any) -> list[Any]:
    """The samplers of one kind of rollouts without drafts and with them, with all programs."""
    import jax

    from qerl_jax.rollout.config import EngineConfig, SamplingConfig
    from qerl_jax.rollout.sampler import Sampler

    count, group = size
    engine = EngineConfig(
        chunk_steps=options.chunk_steps,
        max_rows=count * group,
        prompt_width=max(map(len, prompts)),
        drafts="off",
    )
    sampling = SamplingConfig(max_new_tokens=options.limit)
    plain = Sampler(subject.model_config, subject.loaded.tokenizer, sampling, engine, group)
    drafting = dataclasses.replace(plain, engine=dataclasses.replace(engine, drafts="on"))
    key = jax.random.key(0)
    return [s.compiled(key, subject.policy, num_prompts=count) for s in (plain, drafting)]


def measure(subject: Any, prompts: list, groups: int, size: Any, samplers: list[Any]) -> dict:
    """The figures of one kind of rollouts, which the module explains."""
    import jax
    import numpy as np

    from pallas_kernels.gpu_lock import sole_use
    from qerl_jax.rollout.drafts import DraftLength
    from qerl_jax.rollout.progress import draft_metrics

    def idle() -> None:
        jax.block_until_ready(jax.device_put(0) + 1)

    def timed(sampler: Any, key: Any, chosen: list) -> tuple[Any, float]:
        idle()
        began = time.perf_counter()
        end = collections.deque(sampler.steps(key, subject.policy, chosen), maxlen=1)[0]
        idle()  # A chunk may still run for rows that have ended.
        return end, time.perf_counter() - began

    def in_turn(_: Any, rows: int, choices: list[int]) -> int:
        return choices[number % len(choices)]

    # Looking through all objects of the programs takes up to a second, in whichever rollout it is.
    gc.collect()
    gc.freeze()
    (count, _), key = size, jax.random.key(0)
    seconds, tokens, work, equal = np.zeros((2, 0)), np.zeros((2, 0)), [], 0
    warm = [0] * _UNTIMED
    for number, first in enumerate(itertools.chain(warm, range(0, groups, count))):
        chosen = [prompts[i % len(prompts)] for i in range(first, first + count)]
        own_key = jax.random.fold_in(key, number)
        choice = mock.patch.object(DraftLength, "choose", in_turn)
        order = (0, 1) if number % 2 else (1, 0)
        with sole_use(), choice if number < _UNTIMED else contextlib.nullcontext():
            ends = dict(sorted((way, timed(samplers[way], own_key, chosen)) for way in order))
        if number < _UNTIMED:
            continue
        (off, _), (on, _) = ends.values()
        seconds = np.c_[seconds, [time for _, time in ends.values()]]
        tokens = np.c_[tokens, [end.tokens for end, _ in ends.values()]]
        work.append(on.statistics)
        same = np.cumprod(off.rollout.tokens == on.rollout.tokens, axis=1).sum(axis=1)
        equal += int(np.minimum(same, off.rollout.lengths).sum())
    rates, drafts = tokens / seconds, draft_metrics(work)
    sums = {"tokens": tokens.sum(axis=1), "seconds": seconds.sum(axis=1)}
    return {
        "num_rollouts": rates.shape[1],
        "faster": round(float(np.divide(*(sums["tokens"] / sums["seconds"])[::-1])), 3),
        "lowest": round(float((rates[1] / rates[0]).min()), 3),
        "highest": round(float((rates[1] / rates[0]).max()), 3),
        **{
            f"{name}_{way}": round(float(values[i]), 3)
            for name, values in sums.items()
            for i, way in enumerate(("off", "on"))
        },
        "equal": round(equal / float(sums["tokens"][0]), 4),
        "tokens_per_row_step": round(drafts.get("rollout_tokens_per_row_step", 1.0), 3),
        "acceptance": round(drafts.get("rollout_draft_acceptance", 0.0), 3),
        "programs": len(samplers[1].executables or ()),
    }


def run(options: argparse.Namespace) -> None:
    """Runs the benchmark with the parsed arguments."""
    import pathlib

    import jax

    from benchmarks.rollout.subject import Subject, check_names, first_problems, model_name
    from qerl_jax.compile.operation import commit
    from qerl_jax.errors import UserError
    from qerl_jax.policy import lora
    from qerl_jax.weights.load import load

    check_names((), (options.format,))
    paths, limits = options.data.split(","), [int(n) for n in options.new_tokens.split(",")]
    if len(limits) not in (1, len(paths)):
        raise UserError(f"--new-tokens={options.new_tokens}: pass one number, or one for each file")
    device = jax.devices()[0].device_kind
    common.check_out(options.out, KEYS, device)
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    loaded = load(options.source, format=options.format, dtype=dtype)
    config = lora.LoraConfig(options.lora_rank, options.lora_rank)
    # Each rollout would commit them again, which takes longer than ten decode steps.
    params, adapter = commit((loaded.params, lora.init(jax.random.key(0), loaded.config, config)))
    subject = Subject(
        *(model_name(options.source), options.format, loaded.config, params),
        lora_rank=options.lora_rank,
        lora=adapter,
        loaded=loaded,
    )
    limits *= len(paths) // len(limits)
    kinds = list[tuple[dict, list, Any, list]]()
    for path, options.limit in zip(paths, limits, strict=True):
        prompts = first_problems(loaded, path, options.groups, options.limit)
        for size in options.rollouts:
            settings = {
                "model": subject.model,
                "format": options.format,
                "lora_rank": options.lora_rank,
                "data": pathlib.Path(path).stem,
                "max_new_tokens": options.limit,
                "prompts": size[0],
                "group": size[1],
                "chunk_steps": options.chunk_steps,
                "device": device,
            }
            samplers = compiled(subject, prompts, options, size)
            kinds.append((settings, prompts, size, samplers))
    for settings, prompts, size, samplers in kinds:
        row = settings | measure(subject, prompts, options.groups, size, samplers)
        row |= common.origin("benchmarks.drafts")
        common.merge(options.out, row, KEYS, device)


if __name__ == "__main__":
    cli.run_command(make_parser(), run)
