"""The settings of a rollout: which distribution is sampled, and how the engine samples it."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from ml_collections import ConfigDict

from qerl_jax.errors import UserError

ACTIVATIONS = "", "float8"  # see `EngineConfig.activations`


class Tokenizer(Protocol):
    """The part of a tokenizer that the engine uses."""

    @property
    def eos_ids(self) -> Sequence[int]:
        """Token ids that end a completion."""
        ...

    @property
    def pad_id(self) -> int:
        """Token id that fills a row after its completion."""
        ...

    def answer(self, ids: Sequence[int], /) -> str:
        """Returns the text of a completion that rewards get."""
        ...

    def decode(self, ids: Sequence[int], /, *, skip_special: bool = True) -> str:
        """Returns the text of token ids, which is needed for stop strings only."""
        ...

    def has_special(self, text: str, /) -> bool:
        """Returns whether a text, such as a stop string, holds a special token."""
        ...


def check_fields(config: Any, **limits: tuple[bool, str]) -> None:
    """Refuses a field that does not hold what is expected; each has whether it does, and that."""
    for name, (holds, expected) in limits.items():
        if not holds:
            raise UserError(f"{name} is {getattr(config, name)!r}, expected {expected}")


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """The completions that are sampled.

    Attributes:
        max_new_tokens: C, number of tokens of the longest completion.
        temperature: divisor of the logits; 0 is greedy decoding.
        top_k: number of likeliest tokens that are sampled from; 0 is all tokens.
        top_p: probability of the smallest set of likeliest tokens that is sampled from; 1 is all
            tokens.
        min_p: tokens with less than this part of the likeliest token's probability are left out,
            before top_k and top_p; 0 leaves out none.
        stop: strings that end a completion, which is cut after the token that completes one. One
            that holds a special token is looked for in the text with special tokens, any other in
            the text without them.

    Raises:
        UserError: a value is out of its range.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()

    @property
    def greedy(self) -> bool:
        """Whether the largest logit is taken."""
        return self.temperature == 0

    @property
    def divisor(self) -> np.float32:
        """What the logits are divided by: the temperature, or 1 where it is 0."""
        return np.float32(self.temperature or 1.0)

    def __post_init__(self) -> None:
        check_fields(
            self,
            max_new_tokens=(self.max_new_tokens >= 1, "at least 1"),
            temperature=(0 <= self.temperature < math.inf, "a number of at least 0"),
            top_k=(self.top_k >= 0, "at least 0"),
            top_p=(0 < self.top_p <= 1, "over 0 and at most 1"),
            min_p=(0 <= self.min_p <= 1, "from 0 to 1"),
            stop=("" not in self.stop, "strings that are not empty"),
        )


@dataclasses.dataclass(frozen=True)
class TurnConfig:
    """The limits of a conversation with an environment, besides that on all sampled tokens.

    Attributes:
        max_turns: largest number of turns of the policy.
        turn_tokens: largest number of sampled tokens of a turn; 0 is that of the conversation.
        reply_tokens: largest number of tokens of what an environment writes after a turn, those of
            the chat template included.
        context_tokens: largest number of tokens of a completion, those of the environment included.
        host_cache_bytes: pinned memory of the host for the keys and values of rows that wait for an
            environment while others have their slots. A row for which too little is left keeps its
            slot; its tokens are the same.
        sessions: whether agents send the prompts of rows, in any number, while the others are
            sampled. Their replies may be longer than `reply_tokens`, which are then the tokens of
            one extension.

    Raises:
        UserError: a value is out of its range.
    """

    max_turns: int
    turn_tokens: int
    reply_tokens: int
    context_tokens: int
    host_cache_bytes: int = 2**33
    sessions: bool = False

    def __post_init__(self) -> None:
        check_fields(
            self,
            max_turns=(self.max_turns >= 1, "at least 1"),
            turn_tokens=(self.turn_tokens >= 0, "at least 0"),
            reply_tokens=(self.reply_tokens >= 1, "at least 1"),
            context_tokens=(self.context_tokens >= 1, "at least 1"),
            host_cache_bytes=(self.host_cache_bytes >= 0, "at least 0"),
        )

    @property
    def longest_reply(self) -> int:
        """Largest number of tokens of a reply after which a conversation continues."""
        return min(self.reply_tokens, self.context_tokens)

    def next_turn(self, length: int, sampled: int, max_new_tokens: int) -> int:
        """Returns the largest number of tokens of the next turn of a completion."""
        left = max_new_tokens - sampled
        return min(left, self.turn_tokens or left, self.context_tokens - length)


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """How the engine samples: batches, memory and number formats.

    Attributes:
        chunk_steps: decode steps between two checks for rows that have ended; those of a run are
            `rollout.chunk_steps`, which has another default.
        max_rows: number of rows that decode together, while the others wait; 0 is as many as the
            memory holds.
        kv_cache_bytes: memory for keys and values, which also bounds the rows. 0 sets no bound
            besides max_rows, and where max_rows is 0 takes the free memory of the device.
        kv_cache_dtype: dtype of the stored keys and values, see `shapes.cache_dtype`.
        activations: 'float8' rounds the inputs of products, and the weights that these read, to
            E4M3 where that is faster, see `pallas_kernels.decode.layer`; '' does not.
        dequantize: 'once' dequantizes the packed weights once per rollout, which needs memory for a
            dense copy; 'step' does so in each decode step. Weights that a kernel reads packed, for
            as many rows, are not dequantized in either case.
        prompt_width: number of tokens of the longest prompt of all rollouts, so that rollouts of
            shorter prompts use the same programs; 0 is the longest prompt of each rollout.
        shared_tokens: number of tokens that all prompts of all rollouts begin with, and that each
            prefill computes once; 0 computes every prompt as a whole.
        num_prompts: number of prompts of the largest rollout, so that rollouts of fewer prompts use
            the same programs; 0 is the number of prompts of each rollout.
        prefill_prompts: largest number of prompts in one prefill; 0 is as many as the memory holds.
        records_routes: whether a rollout of a mixture of experts has the experts of its tokens.
        drafts: 'on' samples several tokens of a row in a step, as far as they were guessed, see
            `drafts`; 'off' does not, and 'auto' does so where it pays: on a GPU, for a policy whose
            layers all have attention and a dense MLP.
        compact: 'often' moves the rows to a smaller batch whenever a fifth to a third of them have
            ended; 'once' does so only when a quarter is left, so that few programs are compiled.

    Raises:
        UserError: a value is out of its range.
    """

    chunk_steps: int = 16
    max_rows: int = 0
    kv_cache_bytes: int = 0
    kv_cache_dtype: str = ""
    activations: str = ""
    dequantize: str = "once"
    prompt_width: int = 0
    shared_tokens: int = 0
    num_prompts: int = 0
    prefill_prompts: int = 0
    records_routes: bool = False
    drafts: str = "auto"
    compact: str = "often"

    def __post_init__(self) -> None:
        check_fields(
            self,
            chunk_steps=(self.chunk_steps >= 1, "at least 1"),
            max_rows=(self.max_rows >= 0, "at least 0"),
            kv_cache_bytes=(self.kv_cache_bytes >= 0, "at least 0"),
            activations=(self.activations in ACTIVATIONS, "'' or 'float8'"),
            dequantize=(self.dequantize in ("once", "step"), "'once' or 'step'"),
            prompt_width=(self.prompt_width >= 0, "at least 0"),
            shared_tokens=(self.shared_tokens >= 0, "at least 0"),
            num_prompts=(self.num_prompts >= 0, "at least 0"),
            prefill_prompts=(self.prefill_prompts >= 0, "at least 0"),
            drafts=(self.drafts in ("auto", "on", "off"), "'auto', 'on' or 'off'"),
            compact=(self.compact in ("often", "once"), "'often' or 'once'"),
        )


DEFAULT_ENGINE = EngineConfig()


def turn_config(config: ConfigDict, *, max_new_tokens: int = 0) -> TurnConfig | None:
    """Returns the limits of conversations; None where the run has no environment.

    Args:
        config: the resolved config.
        max_new_tokens: sampled tokens of a conversation; 0 is rollout.max_new_tokens.
    """
    if not has_turns(config):
        return None
    options, sampled = config.environment, max_new_tokens or config.rollout.max_new_tokens
    replies = (options.max_turns - 1) * options.reply_tokens
    return TurnConfig(
        max_turns=options.max_turns,
        turn_tokens=options.turn_tokens,
        reply_tokens=options.reply_tokens,
        context_tokens=options.context_tokens or sampled + replies,
        # Runs of earlier versions lack it.
        host_cache_bytes=options.get("host_cache_bytes", TurnConfig.host_cache_bytes),
        sessions=has_agents(config),
    )


def has_turns(config: ConfigDict) -> bool:
    """Returns whether the policy talks to environments or serves agents."""
    return bool(config.environment.function) or has_agents(config)


def has_agents(config: ConfigDict) -> bool:
    """Returns whether agents call the policy; runs of earlier versions lack the fields."""
    return any(config.environment.get(name) for name in ("agent", "verifiers"))


def rollout_prompts(config: ConfigDict) -> int:
    """Returns the number of prompts of a rollout, of which dynamic sampling may leave some out."""
    if config.rl.dynamic_sampling and config.rl.dynamic_sampling_prompts:
        return config.rl.dynamic_sampling_prompts
    return config.rollout.prompts_per_step


def completion_tokens(config: ConfigDict, max_new_tokens: int) -> int:
    """Returns the largest number of tokens of a completion, those of environments included."""
    turns = turn_config(config, max_new_tokens=max_new_tokens)
    return max_new_tokens if turns is None else turns.context_tokens
