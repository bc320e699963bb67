"""Rollouts of a tiny policy, for the tests of the engine and of its programs."""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Generator, Sequence

import jax
from tiny_model import random_lora, random_tokens, tiny_policy

from qerl_jax.compile.aot import compile_rollout
from qerl_jax.compile.run_cache import cached_in
from qerl_jax.rollout.config import EngineConfig, SamplingConfig
from qerl_jax.rollout.engine import RolloutProgress, generate_steps

PAD = 0
PROMPTS = [list(random_tokens(length, seed=length)) for length in (5, 2, 9)]
KEY = jax.random.key(5)


def letters(ids):
    """Every token is two letters, which no other token has."""
    return "".join(f"{chr(ord('a') + i % 16)}{chr(ord('A') + i // 16)}" for i in ids)


@dataclasses.dataclass(frozen=True)
class TinyTokenizer:
    """The part of a tokenizer that the engine uses."""

    eos_ids: Sequence[int] = ()
    pad_id: int = PAD
    text: object = letters

    def decode(self, ids):
        return self.text(ids)


@functools.cache
def policy(quantized=False, layers=2):
    """The architecture, the parameters and an adapter."""
    config, params = tiny_policy("qwen3", quantized=quantized, num_layers=layers)
    return config, params, random_lora(config)


def configs(options):
    """The SamplingConfig and the EngineConfig that options belong to, and the other options."""
    fields = {field.name for field in dataclasses.fields(SamplingConfig)}
    sampling = SamplingConfig(**{n: v for n, v in options.items() if n in fields})
    rest = {n: v for n, v in options.items() if n not in fields}
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    engine = EngineConfig(**{n: v for n, v in rest.items() if n in fields})
    return sampling, engine, {n: v for n, v in rest.items() if n not in fields}


def progress(
    prompts=PROMPTS,
    *,
    params=None,
    quantized=False,
    layers=2,
    eos_ids=(),
    decode_text=letters,
    key=KEY,
    **options,
) -> Generator[RolloutProgress]:
    """The progress of a rollout of the tiny policy, made with options of three functions.

    They are those of `generate_steps`, `SamplingConfig` and `EngineConfig`.
    """
    config, frozen, lora = policy(quantized, layers)
    sampling, engine, others = configs({"max_new_tokens": 9, "chunk_steps": 4} | options)
    assert others.keys() <= set(inspect.signature(generate_steps).parameters)
    return generate_steps(
        key,
        frozen if params is None else params,
        lora,
        prompts,
        config=config,
        sampling=sampling,
        tokenizer=TinyTokenizer(eos_ids, text=decode_text),
        engine=engine,
        **others,
    )


def rollout(*arguments, **options):
    """The completions of `progress`."""
    return last(*arguments, **options).rollout


def last(*arguments, **options) -> RolloutProgress:
    """The last of `progress`."""
    *_, end = progress(*arguments, **options)
    return end


def compiled(
    folder,
    *,
    quantized=False,
    adapted=True,
    prompts=3,
    clear=True,
    on_progress=None,
    **changes,
):
    """The executables of a rollout of one layer, with a folder as the cache.

    Args:
        folder: folder of the cache; None for that which JAX has.
        quantized: whether the weights are packed.
        adapted: whether there is an adapter.
        prompts: number of prompts.
        clear: whether jit forgets its programs first, as in a new process.
        on_progress: as in `compile_rollout`.
        **changes: options of `SamplingConfig` and `EngineConfig`.
    """
    config, params, lora = policy(quantized, layers=1)
    options = {"max_new_tokens": 9, "chunk_steps": 4, "prompt_width": 9} | changes
    sampling, engine, _ = configs(options)
    if clear:
        jax.clear_caches()
    with contextlib.nullcontext() if folder is None else cached_in(folder):
        return compile_rollout(
            KEY,
            params,
            lora if adapted else None,
            prompts=prompts,
            config=config,
            sampling=sampling,
            tokenizer=TinyTokenizer((3,)),
            engine=engine,
            on_progress=on_progress,
        )
