"""The text that a model is calibrated on: training prompts with completions of the model."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from qerl_jax.errors import UserError
from qerl_jax.policy.lora import Lora
from qerl_jax.policy.policy import Policy
from qerl_jax.rollout.config import EngineConfig, SamplingConfig
from qerl_jax.rollout.sampler import Sampler
from qerl_jax.weights.load import LoadedModel

_LARGEST_TOKENS = 1 << 24


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """How much text there is at most, and how it is sampled."""

    prompts: int = 400  # each of which is completed once
    max_new_tokens: int = 512
    windows: int = 160
    width: int = 512  # tokens of a window; fewer where the whole text has fewer
    # Of the choice of prompts and of the samples. It is not that of a run, so that the runs of one
    # model share a base.
    seed: int = 0


def choose_prompts[T](prompts: Sequence[T], config: TextConfig) -> list[T]:
    """Chooses prompts at random, the same ones each time."""
    order = np.random.default_rng(config.seed).permutation(len(prompts))
    return [prompts[index] for index in order[: config.prompts]]


def sample_windows(
    model: LoadedModel,
    prompts: Sequence[Sequence[int]],
    config: TextConfig,
    engine: EngineConfig,
    lora: Lora | None = None,
) -> np.ndarray:
    """Completes prompts at temperature 1 and cuts all of them into windows without padding.

    Args:
        model: the policy that samples, without its adapter.
        prompts: token ids of the prompts.
        config: lengths and seed.
        engine: settings of the rollout.
        lora: its adapter, or None.

    Returns:
        int32 [B, T] token ids.

    Raises:
        UserError: the memory does not hold a row.
    """
    sampling = SamplingConfig(max_new_tokens=config.max_new_tokens, temperature=1.0)
    engine = dataclasses.replace(engine, prompt_width=max(map(len, prompts)))
    sampler = Sampler(model.config, model.tokenizer, sampling, engine, group_size=1)
    key, policy = jax.random.key(config.seed, impl="threefry2x32"), Policy(model.params, lora)
    if jax.default_backend() == "gpu":  # Several programs compile at a time.
        sampler = sampler.compiled(key, policy, num_prompts=len(prompts))
    rollout = sampler.rollout(key, policy, prompts)
    ids: list[int] = []
    for prompt, tokens, length in zip(prompts, rollout.tokens, rollout.lengths, strict=True):
        ids += [*prompt, *tokens[:length].tolist()]
    return cut_windows(ids, width=config.width, count=config.windows)


def cut_windows(ids: Sequence[int], *, width: int, count: int) -> np.ndarray:
    """Returns at most `count` windows of a text, int32 [B, T]; a shorter text is one window.

    A rest that fills no window is left out.
    """
    width = min(width, len(ids))
    full = min(len(ids) // width, count)
    return np.array(ids[: full * width], np.int32).reshape(full, width)


def check_tokens(tokens: np.ndarray, vocab_size: int, where: object) -> np.ndarray:
    """Refuses windows, read from `where`, that are none: they may come from another person.

    Raises:
        UserError: another type, no token, too many, or an id that the model does not have.
    """
    is_text = tokens.dtype == np.int32 and tokens.ndim == 2 and 0 < tokens.size <= _LARGEST_TOKENS
    if not is_text or tokens.min() < 0 or tokens.max() >= vocab_size:
        raise UserError(
            f"{where}: it is not a text of this model (int32 ids below {vocab_size}, at most "
            f"{_LARGEST_TOKENS} of them); restore the file"
        )
    return tokens
