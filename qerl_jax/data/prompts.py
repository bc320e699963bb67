"""A problem, and the prompt that it becomes: the rendered chat and its token ids."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from qerl_jax.environments.replies import TemplateTokenizer
from qerl_jax.errors import UserError, check_unicode


class ChatTokenizer(TemplateTokenizer, Protocol):
    """The part of a tokenizer that writes prompts."""

    def check_kept(self, messages: Sequence[Mapping[str, str]], text: str, /) -> None:
        """Raises a UserError where the text leaves out a message."""
        ...


@dataclasses.dataclass(frozen=True)
class Problem:
    """A question and its short reference answer (`72`, not the solution that leads to it)."""

    question: str  # the question; of a row with several chat messages, all of them as one text
    answer: str  # the reference answer
    # The chat as (role, content), of which a user's message is the last; () where the question is
    # the only message.
    messages: tuple[tuple[str, str], ...] = ()
    # The whole row that the problem was read from, whose columns reach the rewards.
    columns: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)


class TextRow(NamedTuple):
    """Token ids of a text to learn: what comes before the first learned token, and the rest."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    learned: tuple[bool, ...]  # which tokens of the completion are learned, the last of them is


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A problem as the model reads it: the rendered chat and its token ids."""

    problem: Problem
    text: str
    ids: tuple[int, ...]
    rows: tuple[TextRow, ...] = ()  # of supervised fine-tuning, else ()


@dataclasses.dataclass(frozen=True)
class PromptConfig:
    """How problems are written as prompts."""

    system_prompt: str = ""  # the system message; with '' the problem or the template decides
    # Text that is appended to the last message without a space in between.
    question_suffix: str = ""
    # Solved examples, a question and its answer in turn; they come before the problem as messages
    # of the user and the assistant, and their questions have the suffix too.
    examples: Sequence[str] = ()
    # Further variables of the chat template.
    chat_template_args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Function from a problem to the JSON schemas of the tools that the policy may call; None for no
    # tools.
    tools: Callable[[Problem], Sequence[Mapping[str, Any]] | None] | None = None


DEFAULT_PROMPT = PromptConfig()


def prompt_config(data: Mapping[str, Any], **changes: Any) -> PromptConfig:
    """Returns how a run writes prompts.

    `changes` are fields of `PromptConfig` with other values.
    """
    names = "system_prompt", "question_suffix", "examples", "chat_template_args"
    return PromptConfig(**{name: data[name] for name in names} | changes)


def render_prompt(
    problem: Problem,
    tokenizer: ChatTokenizer,
    config: PromptConfig = DEFAULT_PROMPT,
    *,
    observation: str = "",
) -> str:
    """Writes a problem as a chat that waits for the assistant.

    `observation` is what an environment says, after the last message and its suffix.

    Raises:
        UserError: the tokenizer has no chat template, the template rejects the messages or does not
            read an argument, a text is not valid Unicode, there are two system messages, or a
            solved example has no answer.
    """
    system_prompt, question_suffix = config.system_prompt, config.question_suffix
    for text, name in (
        (system_prompt, "the system message"),
        (problem.question, "the question"),
        (question_suffix, "the question suffix"),
        (observation, "what the environment says"),
        *((text, "a solved example") for text in config.examples),
    ):
        check_unicode(text, name)
    chat = list(problem.messages or [("user", problem.question)])
    if system_prompt and any(role == "system" for role, _ in chat):
        raise UserError(
            f"the problem {problem.question!r:.80} has a system message of its own, and "
            f"data.system_prompt is {system_prompt!r:.60}: pass --config.data.system_prompt="
        )
    role, content = chat.pop()
    chat.append((role, content + question_suffix + observation))
    if system_prompt:
        chat.insert(0, ("system", system_prompt))
    start = int(chat[0][0] == "system")
    chat[start:start] = example_turns(config.examples, question_suffix)
    messages = [{"role": role, "content": content} for role, content in chat]
    arguments = dict(config.chat_template_args)
    if "tools" in arguments:
        raise UserError(
            "data.chat_template_args: tools are those of environment.function, leave out 'tools'"
        )
    if config.tools is not None and (tools := config.tools(problem)):
        arguments["tools"] = tools
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **arguments)
    # A template may leave out the reasoning of an earlier answer, as that of Qwen3 does.
    tokenizer.check_kept([m for m in messages if m["role"] != "assistant"], text)
    return text


def example_turns(examples: Sequence[str], question_suffix: str) -> list[tuple[str, str]]:
    """Returns the messages of solved examples, pairs of a role and a content.

    Raises:
        UserError: the last example has no answer.
    """
    if len(examples) % 2:
        raise UserError(
            f"data.examples has {len(examples)} texts, the last {examples[-1]!r:.60}: pass a "
            "question and its answer for each example"
        )
    turns = []
    for question, answer in zip(examples[::2], examples[1::2], strict=True):
        turns += [("user", question + question_suffix), ("assistant", answer)]
    return turns


def encode_prompts(
    problems: Sequence[Problem],
    tokenizer: ChatTokenizer,
    config: PromptConfig = DEFAULT_PROMPT,
    *,
    observation: str = "",
    max_prompt_tokens: int,
    what: str = "prompts",
    remedy: str = "instead of data.max_prompt_tokens={limit} pass "
    "--config.data.max_prompt_tokens={longest}",
) -> list[Prompt]:
    """Renders and tokenizes problems.

    Args:
        problems: the problems to render.
        tokenizer: tokenizer with the chat template.
        config: how they are written.
        observation: what an environment says, as in `render_prompt`.
        max_prompt_tokens: largest number of tokens in a prompt.
        what: name of the prompts in the error message.
        remedy: advice for the error message; {limit} and {longest} are replaced by the number of
            tokens allowed and the number of tokens in the longest prompt.

    Raises:
        UserError: a prompt is longer than the limit.
    """
    prompts = []
    for problem in problems:
        text = render_prompt(problem, tokenizer, config, observation=observation)
        prompts.append(Prompt(problem, text, tuple(tokenizer.encode(text))))
    lengths = [len(prompt.ids) for prompt in prompts]
    too_long = sum(length > max_prompt_tokens for length in lengths)
    if too_long:
        advice = remedy.format(limit=max_prompt_tokens, longest=max(lengths))
        raise UserError(
            f"{too_long} of {len(prompts)} {what} are over {max_prompt_tokens} tokens, the longest "
            f"has {max(lengths)}; {advice}, or take them out"
        )
    return prompts
