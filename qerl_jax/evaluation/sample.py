"""Shows the answers of a policy, to one question or in a chat, while they are decoded."""

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from qerl_jax.compile.run_cache import keep_programs
from qerl_jax.data.environments import RunEnvironments
from qerl_jax.data.prompt_rollout import AnyEnvironments, PromptRollout
from qerl_jax.data.prompts import Problem, Prompt, encode_prompts
from qerl_jax.data.sources import text_of
from qerl_jax.environments.episodes import environment_of
from qerl_jax.environments.roles import ENDINGS
from qerl_jax.errors import UserError, check_limits, memory_errors, visible
from qerl_jax.evaluation.flags import check_sampling, json_object, template_arguments
from qerl_jax.evaluation.load_policy import OWN, LoadedPolicy, open_policy
from qerl_jax.evaluation.run_environments import environments_of, has_environment, turns_of
from qerl_jax.memory.report import check_sampler
from qerl_jax.policy.lora import Lora
from qerl_jax.policy.policy import Policy
from qerl_jax.rollout.config import EngineConfig, SamplingConfig
from qerl_jax.rollout.sampler import Sampler
from qerl_jax.rollout.shapes import dequantize_mode
from qerl_jax.system.live_line import waiting
from qerl_jax.weights.chat_template import template_date
from qerl_jax.weights.load import LoadedModel
from qerl_jax.weights.tokenizer import Tokenizer

_CHUNK_STEPS = 4  # tokens between two updates of the text, few enough to look continuous
_MAX_NEW_TOKENS = 512
# Prompts are padded to one of few widths in tokens, so that a chat has few sets of programs: powers
# of two, and from the most on multiples of it, as the cache of a row takes memory for all of them.
_FEWEST_WIDTH, _MOST_WIDTH = 256, 4096
_REMEDY = "pass a smaller model, --format=nvfp4 or a lower --max-new-tokens"


@dataclasses.dataclass(frozen=True)
class SampleConfig:
    """The question, the policy that answers it, and how the answer is sampled."""

    source: str  # run folder, PEFT adapter folder or model, as in `open_policy`
    question: str  # message of the user
    # Adapter of the policy, as in `open_policy`; '' shows the answer of the base first and then the
    # answer with the default adapter.
    adapter: str = ""
    base: str = ""  # model to load instead of the one that the source names, as in `open_policy`
    format: str = ""  # format of the weights, as in `open_policy`
    # System message; None is the system message of the run, or of the chat template.
    system: str | None = None
    # Text that is appended to the question; None is the suffix of the run, or ''.
    suffix: str | None = None
    # Further variables of the chat template, as a JSON object; None are those of the run.
    chat_template_args: str | None = None
    # Columns of the problem for the environment of the run, as a JSON object; None for no columns.
    columns: str | None = None
    # Limit on new tokens; None is the limit of the run's evaluations, or 512.
    max_new_tokens: int | None = None
    temperature: float = 0.0  # sampling temperature; 0 is greedy
    # Cumulative probability of the tokens that are sampled from; 1 keeps all tokens.
    top_p: float = 1.0
    seed: int = 0  # seed of the samples


def sample(config: SampleConfig) -> None:
    """Prints the answers to stdout as they are decoded, and tokens per second to stderr.

    Args:
        config: the question, the policy and the sampling settings.

    Raises:
        UserError: a setting is invalid, the policy cannot be loaded, or the prompt is too long.
    """
    if not config.question.strip():
        raise UserError("the question is empty: pass a text")
    _check(config)
    with memory_errors(_REMEDY), keep_programs():
        for number, (name, policy, lora) in enumerate(_policies(config)):
            if name:
                print(f"{'\n' if number else ''}--- {visible(name)}", flush=True)
            _answer(config, policy, lora, (), {})


def _check(config: SampleConfig) -> None:
    new_tokens = 1 if config.max_new_tokens is None else config.max_new_tokens
    check_limits({"--max-new-tokens": (new_tokens, 1)})
    check_sampling(config.temperature, top_p=config.top_p, seed=config.seed)


def chat(config: SampleConfig, lines: Iterable[str]) -> None:
    """Answers one message after the other, each with the conversation so far.

    Args:
        config: the policy and the sampling settings; the question is not used. With the adapter ''
            the trained policy answers.
        lines: messages of the user. An empty one is skipped, '/new' begins another conversation and
            '/quit' ends the chat.

    Raises:
        UserError: as in `sample`.
    """
    _check(config)
    with memory_errors(_REMEDY), keep_programs():
        name, policy, lora = _policies(config)[-1]
        if name:
            print(f"--- {visible(name)}", file=sys.stderr, flush=True)
        if has_environment(policy.run):
            raise UserError(
                "the policy talks to an environment of its own in each chat: pass one question"
            )
        suffix = policy.prompt.question_suffix if config.suffix is None else config.suffix
        messages: tuple[tuple[str, str], ...] = ()
        samplers: dict[int, Sampler] = {}
        for line in lines:
            question = line.strip()
            if question == "/quit":
                return
            if question == "/new":
                messages = ()
            elif question:
                asked = dataclasses.replace(config, question=question)
                answer = _answer(asked, policy, lora, messages, samplers)
                messages += ("user", question + suffix), ("assistant", answer)


def stream_text(tokenizer: Tokenizer, write: Callable[[str], object]) -> Callable[..., None]:
    """Returns a function that writes the text of a growing list of token ids.

    The function is called as `show(ids)` with all ids so far and writes the text that is new. A
    character whose bytes are spread over several tokens is written after the last of these tokens;
    `show(ids, final=True)` also writes incomplete characters.
    """
    written = 0

    def show(ids: Sequence[int], *, final: bool = False) -> None:
        nonlocal written
        text = tokenizer.transcript(ids)
        if not final:
            text = text.rstrip("\ufffd")
        elif not text:  # no message of any channel
            text = tokenizer.decode(ids)
        if len(text) > written:
            write(text[written:])
            written = len(text)

    return show


def _write(text: str) -> None:
    """Writes a piece of text to stdout: to a file as it is, to a terminal without control text."""
    print(visible(text) if sys.stdout.isatty() else text, end="", flush=True)


def _policies(config: SampleConfig) -> list[tuple[str, LoadedPolicy, Lora | None]]:
    """Returns the policies to show, with name and LoRA: the named one, or base and trained one."""
    open_source = functools.partial(
        open_policy, config.source, base=config.base, format=config.format
    )
    policy = open_source(adapter=config.adapter)
    trains_all = policy.lora is None and policy.run is not None
    if config.adapter or (policy.lora is None and not trains_all):
        return [("", policy, policy.lora)]
    if trains_all:
        base = open_source(adapter="none")
        return [(_name(base), base, None), (policy.base.path.name, policy, None)]
    assert policy.adapter is not None
    base = dataclasses.replace(policy, model=policy.base)
    return [(_name(base), base, None), (str(policy.adapter), policy, policy.lora)]


def _name(base: LoadedPolicy) -> str:
    return f"{base.base.source} in {base.base.format}"


def _answer(
    config: SampleConfig,
    policy: LoadedPolicy,
    lora: Lora | None,
    messages: tuple[tuple[str, str], ...],
    samplers: dict[int, Sampler],
) -> str:
    """Prints the answer to the question while it is decoded, and returns it.

    `samplers` have the programs of this policy by the width of prompts; a new width is added.
    """
    model = policy.model
    settings: dict[str, Any] = {} if policy.run is None else policy.run["config"]["rollout"]
    own = policy.run is not None and policy.run[OWN]
    environments = environments_of(policy.run, model.tokenizer, trusted=own)
    with template_date(policy.created):
        prompt, limit = _prompt(config, policy, messages, environments)
    turns = None
    if environments is not None and policy.run is not None:
        turns = turns_of(policy.run, limit)
    width = _prompt_width(prompt, environments, turns.context_tokens if turns else limit, model)
    weights = Policy(model.params, lora)
    key = jax.random.key(config.seed, impl="threefry2x32")
    if width not in samplers:
        engine = EngineConfig(
            chunk_steps=_CHUNK_STEPS,
            dequantize=dequantize_mode(model.params, settings.get("dequantize", "auto")),
            kv_cache_dtype=settings.get("kv_cache_dtype", ""),
            prompt_width=width,
            num_prompts=1,
        )
        sampling = SamplingConfig(
            max_new_tokens=limit,
            temperature=config.temperature,
            top_p=config.top_p,
            stop=tuple(settings.get("stop", ())),
        )
        sampler = Sampler(model.config, model.tokenizer, sampling, engine, turns=turns)
        with waiting("compiling the programs of this prompt's length"):
            samplers[width] = sampler.compiled(key, weights, num_prompts=1)
        for line in check_sampler(samplers[width], key, weights, remedy="--max-new-tokens"):
            print(f"warning: {line}", file=sys.stderr, flush=True)
    if environments is not None and policy.run is not None:
        return _converse(samplers[width], key, weights, prompt, environments)
    show = stream_text(model.tokenizer, _write)
    updates: list[tuple[float, int]] = []  # (time, number of tokens)
    for step in samplers[width].steps(key, weights, [prompt.ids]):
        rollout, length = step.rollout, step.tokens
        updates.append((time.perf_counter(), length))
        show(rollout.tokens[0, :length].tolist())
    show(rollout.tokens[0, :length].tolist(), final=True)
    print(flush=True)
    facts = [f"{length} tokens"] + ([] if rollout.finished[0] else ["cut off by the limit"])
    # The rate counts from the second update on: before it the programs first run.
    if len(updates) > 2 and updates[-1][1] > updates[1][1]:
        rate = (updates[-1][1] - updates[1][1]) / (updates[-1][0] - updates[1][0])
        facts.append(f"{rate:.1f} tokens/s")
    print(", ".join(facts), file=sys.stderr, flush=True)
    return model.tokenizer.answer(rollout.tokens[0, :length].tolist())


def _converse(
    sampler: Sampler,
    key: jax.Array,
    policy: Policy,
    prompt: Prompt,
    environments: AnyEnvironments,
) -> str:
    """Prints a conversation with an environment turn by turn, and returns the last turn."""
    rollout = PromptRollout(sampler, key, policy, [prompt], environments=environments)
    (episode,), shown = rollout.episodes, 0
    with rollout:
        for progress in rollout:
            rollout.take(progress)
            (episode,) = rollout.episodes
            for role, text in episode.parts[shown:]:
                _write(f"[{role}] {text}\n")
            shown = len(episode.parts)
    facts = [f"ended by {ENDINGS[episode.ending]}", f"{episode.turns} turns"]
    facts += [f"{episode.calls} calls"] if episode.calls else []
    facts += [] if episode.reward is None else [f"reward {episode.reward:g}"]
    if episode.error:
        facts += [visible(episode.error), "--columns passes what it reads of a problem"]
    print(", ".join(facts), file=sys.stderr, flush=True)
    return episode.answer


def _prompt_width(
    prompt: Prompt, environments: AnyEnvironments | None, new_tokens: int, model: LoadedModel
) -> int:
    """Returns the number of tokens that the prompt is padded to, for which there are programs."""
    tokens = len(prompt.ids)
    if environments is not None:  # It writes into the prompt.
        tokens = max(tokens, environments.max_prompt_tokens)
    step = min(_MOST_WIDTH, max(_FEWEST_WIDTH, 1 << (tokens - 1).bit_length()))
    return max(tokens, min(-(-tokens // step) * step, model.config.max_position - new_tokens))


def _prompt(
    config: SampleConfig,
    policy: LoadedPolicy,
    messages: tuple[tuple[str, str], ...],
    environments: AnyEnvironments | None,
) -> tuple[Prompt, int]:
    """Returns the prompt and the limit on new tokens."""
    changes: dict[str, Any] = {}
    if config.system is not None:
        changes["system_prompt"] = config.system
    if config.suffix is not None:
        changes["question_suffix"] = config.suffix
    if config.chat_template_args is not None:
        changes["chat_template_args"] = template_arguments(config.chat_template_args)
    columns = {}
    if config.columns is not None:
        if environments is None:
            raise UserError("--columns are read by the environment of a run: leave them out")
        columns = json_object("--columns", config.columns, '{"answer": "7"}')
    problem = Problem(
        config.question,
        text_of(columns.get("answer", ""), "--columns: answer"),
        (*messages, ("user", config.question)),
        columns,
    )
    if environments is not None:
        changes["tools"] = environments.prompts.tools
    if isinstance(environments, RunEnvironments):
        names = list(environments.environments.contracts)
        if environment_of(columns, names) not in names:
            raise UserError(
                f"the run has the environments {', '.join(names)}: name one of them, "
                f"""--columns='{{"environment": "{names[0]}"}}'"""
            )
    (prompt,) = encode_prompts(
        [problem],
        policy.model.tokenizer,
        dataclasses.replace(policy.prompt, **changes),
        max_prompt_tokens=sys.maxsize,
    )
    own_limit = _MAX_NEW_TOKENS
    if policy.run is not None:
        own_limit = policy.run["config"]["eval"]["max_new_tokens"]
    limit = config.max_new_tokens or own_limit
    positions = policy.model.config.max_position
    if len(prompt.ids) + limit > positions:
        raise UserError(
            f"the prompt has {len(prompt.ids)} tokens and with {limit} new tokens exceeds the "
            f"model's {positions} positions: shorten it or pass a smaller --max-new-tokens"
        )
    return prompt, limit
