"""Compares policies for a model card: scores on held-out problems, and KL on probe prompts."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.data.prompts import Problem, Prompt, encode_prompts
from qerl_jax.errors import UserError, visible
from qerl_jax.evaluation.greedy import GreedyScore, greedy_accuracy, tokens_of_examples
from qerl_jax.evaluation.load_policy import LoadedPolicy
from qerl_jax.evaluation.tasks import TaskOverrides, make_tasks
from qerl_jax.export.model_card import FORMAT_NAMES, Card
from qerl_jax.policy import transformer
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.lora import Lora
from qerl_jax.policy.policy import Policy
from qerl_jax.rewards.calls import announce_hosts, resolve
from qerl_jax.rollout.config import EngineConfig, SamplingConfig
from qerl_jax.rollout.sampler import Sampler
from qerl_jax.rollout.shapes import dequantize_mode
from qerl_jax.system.command import command_name
from qerl_jax.system.live_line import waiting
from qerl_jax.weights.chat_template import template_date
from qerl_jax.weights.load import LoadedModel

_PROBE_PROMPTS = 8
_PROBE_TOKENS = 64
# Probe prompts for a policy without held-out problems.
_QUESTIONS = (
    "What is 17 + 25?",
    "Tom has 12 apples and gives 5 of them to Ann. How many are left?",
    "A train goes 60 miles in an hour. How far does it go in three and a half hours?",
    "What is the capital of France?",
)


class HeldOutSet(NamedTuple):
    """The problems that a run held out, and `accuracy(model, lora, on_progress=...)` on them."""

    prompts: list[Prompt]
    accuracy: Callable[..., GreedyScore]


class Probe(NamedTuple):
    """Greedy completions of the trained policy for P probe prompts, as token ids."""

    prompts: list[Sequence[int]]
    completions: list[list[int]]
    logprobs: list[np.ndarray]  # of the trained policy, as in `host_logprobs`


def open_held_out_set(
    policy: LoadedPolicy,
    limit: int | None,
    folder: Path | None = None,
    *,
    overrides: TaskOverrides | None = None,
    trusted: bool = False,
) -> HeldOutSet | None:
    """Loads the problems that a run held out, at most `limit`; the others are as in `make_tasks`.

    Returns:
        None if the limit is 0, or if the limit is None and there are no held-out problems or the
        reward of the run cannot be imported; the latter is printed.

    Raises:
        UserError: there is a limit above 0, but no held-out problems or no such reward.
    """
    if limit == 0:
        return None
    run = None if policy.run is None else policy.run["config"]
    try:
        (task,) = make_tasks(
            ["run"],
            run=run,
            overrides=overrides or TaskOverrides(),
            folder=folder,
            trusted=trusted,
        )
        correctness = resolve(task.scorer, **task.options.get("scorer", {}))
    except UserError as error:
        if limit is not None:
            raise
        print(
            visible(f"not scored: {error}; {command_name('evaluate')} scores on other problems"),
            flush=True,
        )
        return None
    assert run is not None
    announce_hosts([correctness])
    with template_date(policy.created):
        prompts = encode_prompts(
            task.problems[:limit],
            policy.model.tokenizer,
            task.prompt,
            max_prompt_tokens=run["data"]["max_prompt_tokens"],
        )
    rollout = run["rollout"]
    sampling = SamplingConfig(max_new_tokens=task.max_new_tokens, stop=task.stop)
    engine = EngineConfig(
        max_rows=rollout["max_rows"] or rollout["prompts_per_step"] * rollout["group_size"],
        chunk_steps=rollout["chunk_steps"],
        dequantize=dequantize_mode(policy.model.params, rollout["dequantize"]),
        kv_cache_dtype=task.kv_cache_dtype,
        shared_tokens=tokens_of_examples(prompts, task.prompt.examples),
    )

    def accuracy(
        model: LoadedModel, lora: Lora | None, on_progress: Callable[[int, int], None]
    ) -> GreedyScore:
        return greedy_accuracy(
            Sampler(model.config, model.tokenizer, sampling, engine),
            Policy(model.params, lora),
            prompts,
            correctness=correctness,
            time_limit=run["reward_time_limit"],
            on_progress=on_progress,
        )

    return HeldOutSet(prompts=prompts, accuracy=accuracy)


def add_trained_scores(card: Card, held_out: HeldOutSet, policy: LoadedPolicy) -> None:
    """Scores the policy as it was trained, and its base, and adds the scores to the card."""
    name = f"{FORMAT_NAMES[policy.base.format]} base"
    if policy.lora is None:
        add_score(card, held_out, "the policy as trained", policy.model, None)
        return
    add_score(card, held_out, name, policy.base, None)
    add_score(card, held_out, f"{name} + adapter", policy.model, policy.lora)


def add_score(
    card: Card, held_out: HeldOutSet, name: str, model: LoadedModel, lora: Lora | None
) -> None:
    """Scores a policy on the held-out problems, prints the score and adds it to the card.

    The card has no score of a policy where the reward failed for a completion: the rows of its
    table are about the same problems.
    """
    total = len(held_out.prompts)
    # Programs are compiled meanwhile, of which XLA may write to stderr: `waiting` keeps its line.
    with waiting(f"scoring {name}") as say:

        def on_progress(count: int, tokens: int) -> None:
            del tokens
            say(f"scoring {name}: {count}/{total}")

        score = held_out.accuracy(model, lora, on_progress=on_progress)
    if score.missing:
        print(
            f"no pass@1: {score.missing} of {total} completions have no score: {name}", flush=True
        )
        return
    print(f"pass@1 {score.accuracy:.3f} on {total} held-out problems: {name}", flush=True)
    card.problems = total
    card.scores.append((name, score.accuracy))


def make_probe(policy: LoadedPolicy, held_out: HeldOutSet | None) -> Probe:
    """Completes held-out problems, or else fixed questions, greedily with the trained policy."""
    model, prompts = policy.model, _probe_prompts(policy, held_out)
    stop = () if policy.run is None else tuple(policy.run["config"]["rollout"]["stop"])
    sampling = SamplingConfig(max_new_tokens=_PROBE_TOKENS, temperature=0.0, stop=stop)
    sampler = Sampler(model.config, model.tokenizer, sampling)
    rollout = sampler.rollout(jax.random.key(0, impl="threefry2x32"), policy.policy, prompts)
    rows = zip(rollout.tokens.tolist(), rollout.lengths.tolist(), strict=True)
    completions = [tokens[:length] for tokens, length in rows]
    logprobs = host_logprobs(model, policy.lora, prompts, completions)
    return Probe(prompts=prompts, completions=completions, logprobs=logprobs)


def _probe_prompts(policy: LoadedPolicy, held_out: HeldOutSet | None) -> list[Sequence[int]]:
    if held_out is not None:
        return [prompt.ids for prompt in held_out.prompts[:_PROBE_PROMPTS]]
    tokenizer = policy.model.tokenizer
    if tokenizer.chat_template is None:
        return [tokenizer.encode(question) for question in _QUESTIONS]
    prompts = encode_prompts(
        [Problem(question, "") for question in _QUESTIONS],
        tokenizer,
        policy.prompt,
        max_prompt_tokens=policy.model.config.max_position,
    )
    return [prompt.ids for prompt in prompts]


def add_divergence(
    card: Card, probe: Probe, name: str, model: LoadedModel, lora: Lora | None = None
) -> None:
    """Adds the KL of the trained policy to another one to the card, under the name of that."""
    other_logprobs = host_logprobs(model, lora, probe.prompts, probe.completions)
    kl, same = probe_kl(probe.logprobs, other_logprobs)
    card.divergences.append((name, kl, same))


def host_logprobs(
    model: LoadedModel,
    lora: Lora | None,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
) -> list[np.ndarray]:
    """Computes log-probabilities over the whole vocabulary on the host: float32 [C, V] per prompt.

    A row is that of a token of the completion, whose length C may differ between prompts.
    """
    texts = [[*pair[0], *pair[1]] for pair in zip(prompts, completions, strict=True)]
    width, logprobs = max(map(len, texts)), []
    for prompt, text in zip(prompts, texts, strict=True):
        tokens = np.zeros((1, width), np.int32)
        tokens[0, : len(text)] = text
        logits = _forward(model.params, lora, tokens, config=model.config)
        logprobs.append(np.asarray(jax.nn.log_softmax(logits[0, len(prompt) - 1 : len(text) - 1])))
    return logprobs


@functools.partial(jax.jit, static_argnames="config")
def _forward(params: dict, lora: Lora | None, tokens: jax.Array, *, config: ModelConfig):
    lengths = jnp.full(len(tokens), tokens.shape[1])
    return transformer.forward(params, lora, tokens, lengths, config=config)


def probe_kl(
    logprobs: Sequence[np.ndarray], other_logprobs: Sequence[np.ndarray]
) -> tuple[float, float]:
    """Compares two policies by `host_logprobs`.

    Returns:
        The mean KL(policy | other policy) in nats per token, and the fraction of the tokens at
        which both find the same one the likeliest.
    """
    p, q = np.concatenate(logprobs), np.concatenate(other_logprobs)
    kl = np.sum(np.exp(p) * (p - q), axis=-1)
    return float(kl.mean()), float((p.argmax(axis=-1) == q.argmax(axis=-1)).mean())
