"""Rollouts of a tiny policy, for the tests of the engine and of its programs."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Generator, Sequence

import jax
import numpy as np
from tiny_model import random_lora, random_tokens, tiny_policy

from qerl_jax.compile.run_cache import set_cache_folder
from qerl_jax.environments.roles import CONTEXT, DONE, OPEN, Reply
from qerl_jax.policy.policy import Policy
from qerl_jax.rl.logprobs import completion_logprobs
from qerl_jax.rollout.config import EngineConfig, SamplingConfig, TurnConfig
from qerl_jax.rollout.progress import RolloutProgress
from qerl_jax.rollout.sampler import Sampler

PAD = 0
PROMPTS = [list(random_tokens(length, seed=length)) for length in (5, 2, 9)]
KEY = jax.random.key(5)
TURNS = TurnConfig(max_turns=3, turn_tokens=6, reply_tokens=8, context_tokens=32)


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

    answer = decode

    def reasoning(self, ids):
        return []

    def has_special(self, text):
        return False


@dataclasses.dataclass
class Dialog:
    """Replies with tokens that depend on the row and the turn, at once or after a while."""

    seconds: float = 0.0
    turns: dict = dataclasses.field(default_factory=dict)
    due: list = dataclasses.field(default_factory=list)
    rows: Sequence[int] = range(1000)  # those of a whole rollout, of which this may be a part

    def part(self, rows):
        return Dialog(self.seconds, rows=rows)

    def submit(self, turn):
        number = self.turns.setdefault(turn.row, []).append(turn) or len(self.turns[turn.row])
        row = self.rows[turn.row]
        ids = random_tokens(2 + (row + number) % 7, seed=100 * row + number).tolist()
        if not turn.space:
            reply = Reply(turn.row, (), turn.limit)
        elif number == TURNS.max_turns:
            reply = Reply(turn.row, (), DONE)
        elif len(ids) > turn.space:
            reply = Reply(turn.row, (), CONTEXT)
        else:
            reply = Reply(turn.row, ids, OPEN)
        # Rows differ in their time, so that they come back in another order.
        self.due.append((time.monotonic() + self.seconds * (1 + turn.row % 3), reply))

    def replies(self, seconds):
        ends = time.monotonic() + (seconds if self.due else 0)
        while not (ready := [x for x in self.due if x[0] <= time.monotonic()]):
            if time.monotonic() >= ends:
                return []
            time.sleep(0.001)
        self.due = [x for x in self.due if x not in ready]
        return [reply for _, reply in ready]


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


def sampler(
    *,
    quantized=False,
    layers=2,
    eos_ids=(),
    decode_text=letters,
    group_size=1,
    executables=None,
    **options,
) -> Sampler:
    """A sampler of the tiny policy, with options of `SamplingConfig` and `EngineConfig`."""
    config, _, _ = policy(quantized, layers)
    sampling, engine, others = configs({"max_new_tokens": 9, "chunk_steps": 4} | options)
    assert not others
    tokenizer = TinyTokenizer(eos_ids, text=decode_text)
    return Sampler(config, tokenizer, sampling, engine, group_size, executables)


def progress(
    prompts=PROMPTS, *, params=None, key=KEY, ids=None, quantized=False, layers=2, **options
) -> Generator[RolloutProgress]:
    """The progress of a rollout of the tiny policy, with options of `sampler`."""
    _, frozen, lora = policy(quantized, layers)
    tiny_policy = Policy(frozen if params is None else params, lora)
    made = sampler(quantized=quantized, layers=layers, **options)
    return made.steps(key, tiny_policy, prompts, ids=ids)


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
        on_progress: as in `Sampler.compiled`.
        **changes: options of `SamplingConfig` and `EngineConfig`.
    """
    _, params, lora = policy(quantized, layers=1)
    tiny_policy = Policy(params, lora if adapted else None)
    options = {"quantized": quantized, "layers": 1, "eos_ids": (3,), "prompt_width": 9}
    made = sampler(**options, **changes)
    if clear:
        jax.clear_caches()
    with contextlib.nullcontext() if folder is None else set_cache_folder(folder):
        return made.compiled(
            KEY, tiny_policy, num_prompts=prompts, on_progress=on_progress
        ).executables


def conversation_logprobs(config, policy, prompts, rollout):
    """The trainer's log-probs and entropies [B, C] of whole rows, each with its prompt."""
    starts = np.array([len(prompt) for prompt in prompts], np.int32)
    width = rollout.tokens.shape[1]
    tokens = np.zeros((len(prompts), starts.max() + width), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
        tokens[row, len(prompt) : len(prompt) + width] = rollout.tokens[row]
    return completion_logprobs(
        *(policy.params, policy.lora, tokens, starts, starts + rollout.lengths),
        width=width,
        model_config=config,
        temperature=1.0,
    )
