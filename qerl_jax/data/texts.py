"""Rows of text to learn: prompts with their completions, conversations, and completions of a run.

The chat template writes a row as it writes what the policy samples: the prompt with the beginning
of the assistant's turn, then the turn, of which the tokens up to its end token are learned. Of a
conversation all turns of the assistant are learned, but those with a `weight` of 0, as in OpenAI's
format; what stands between them is context. A template that writes earlier turns in another way
once a conversation continues, as that of Qwen3 leaves out their reasoning, makes a row of its own
for each turn that this changes.
"""

import collections
import contextlib
import dataclasses
import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from ml_collections import ConfigDict

from qerl_jax.data.prompts import (
    Problem,
    Prompt,
    PromptConfig,
    TextRow,
    example_turns,
    prompt_config,
)
from qerl_jax.data.sources import (
    ABSENT,
    QUESTION_FIELDS,
    LeftOutError,
    Selection,
    as_text,
    column,
    is_missing,
    is_written_chat,
    text_of,
)
from qerl_jax.environments.chat import read_message
from qerl_jax.environments.gateway import RequestError
from qerl_jax.environments.harmony import is_harmony
from qerl_jax.environments.replies import ReplyWriter
from qerl_jax.errors import UserError, check_unicode
from qerl_jax.run.folder import RunFolder
from qerl_jax.system.paths import user_path
from qerl_jax.weights.tokenizer import Tokenizer

_CHATS = ("messages", *QUESTION_FIELDS)
_COMPLETIONS = ("completion", "answer", "solution")
# What chat templates read of a turn besides: each of them one of the two.
_REASONING = ("reasoning_content", "thinking")


@dataclasses.dataclass(frozen=True)
class TextSelection(Selection):
    """Reads rows to learn: `messages`, or a prompt and its completion, with or without `tools`.

    A text in place of messages is that of the user, or of the assistant.
    """

    def read(self, row: Mapping[str, Any], where: str) -> Problem:
        """Reads a row; `columns` of the problem are its messages and which are learned."""
        name, value = self.read_field(row, "question", _CHATS, where)
        present = (n for n in _COMPLETIONS if n in row)
        usual = min(present, key=lambda n: is_missing(row[n]), default="")
        answer = self.fields.get("answer") or usual
        completion = column(row, answer, ABSENT) if answer else ABSENT
        other_use = name == "messages" and not self.fields.get("answer")  # as for a reward
        if other_use or (is_missing(completion) and isinstance(value, list | tuple)):
            completion = ABSENT
        chat = _messages(value, "user", f"{where}: {name}")
        if completion is ABSENT and not isinstance(value, list | tuple):
            expected = answer or ", ".join(_COMPLETIONS)
            raise UserError(
                f"{where}: no field {expected} with the completion; it has {', '.join(row)}: name "
                "it, --config.data.fields.answer=NAME"
            )
        start = 0
        if completion is not ABSENT:
            start = len(chat)
            chat += _messages(completion, "assistant", f"{where}: {answer}")
        learned = [i for i in range(start, len(chat)) if _is_learned(chat[i])]
        if not learned or not learned[0]:
            raise UserError(
                f"{where}: {name} has no message of the assistant after another one, which the "
                "policy would learn: add it, or take the row out"
            )
        first, last = learned[0], learned[-1] + 1
        question = as_text([(one["role"], one["content"]) for one in chat[:first]])
        if not question.strip():
            raise UserError(f"{where}: the prompt is empty: fill it in, or take the row out")
        self.check_level(row, where)
        if not all(chat[i]["content"].strip() or chat[i].get("tool_calls") for i in learned):
            raise LeftOutError("an empty completion", "fill them in")
        text = chat[first]["content"] if last == first + 1 else json.dumps(chat[first:last])
        tools = _tools(row.get("tools"), f"{where}: tools")
        columns = {"messages": chat[:last], "first": first, "tools": tools, "where": where}
        return self.keep(Problem(question, text, (), columns))

    def question_of(self, row: Mapping[str, Any]) -> str | None:
        """The question of a row, as `read` has it; None of a row that it refuses."""
        try:
            return self.read(row, "").question
        except (UserError, LeftOutError):
            return None


@dataclasses.dataclass(frozen=True)
class SavedSelection(Selection):
    """Reads completions.jsonl of a run: what has enough reward, each text once."""

    appended: ClassVar[bool] = True
    min_reward: float = 1.0
    seen: set[tuple[str, str]] = dataclasses.field(default_factory=set, compare=False, repr=False)

    def read(self, row: Mapping[str, Any], where: str) -> Problem:
        """Reads a row; the prompt is the rendered chat."""
        prompt, completion = (
            text_of(row.get(n), f"{where}: {n}") for n in ("prompt", "completion")
        )
        reward = row.get("reward")
        if "conversation" in row:
            raise UserError(
                f"{where}: completions of several messages, of environments, agents and gpt-oss, "
                "are not saved as their tokens: write them as rows with `messages`, and pass "
                "data.path"
            )
        if not isinstance(reward, int | float) or not reward >= self.min_reward:
            raise LeftOutError(f"a reward below {self.min_reward:g}", "lower sft.min_reward")
        if row.get("finished") is not True or not completion.strip():
            raise LeftOutError("no end", "raise rollout.max_new_tokens of that run")
        if (prompt, completion) in self.seen:
            raise LeftOutError("the text of another", "sample more of them")
        self.seen.add((prompt, completion))
        return self.keep(Problem(prompt, completion, (), {"where": where}))

    def asked_in(self, evaluation: Sequence[Problem], problems: Sequence[Problem]) -> set[str]:
        """The prompts that hold all that the user of a row of the evaluation says."""
        prompts, asked = {problem.question for problem in problems}, set[str]()
        having = collections.defaultdict[str, set[str]](set)  # the prompts with a word
        for prompt in prompts:
            for word in re.findall(r"\w+", prompt):
                having[word].add(prompt)
        for columns in (problem.columns for problem in evaluation):
            turns = columns["messages"][: columns["first"]]
            chat = [(turn["role"], text) for turn in turns if (text := turn["content"].strip())]
            of_user = [text for role, text in chat if role == "user"]
            texts = of_user or [text for _, text in chat[-1:]]
            words = {word for text in texts for word in re.findall(r"\w+", text)}
            found = set.intersection(*sorted((having[word] for word in words), key=len), prompts)
            found -= asked
            for text in texts:
                # What comes directly before or after a text does not make its words longer.
                whole = re.compile(rf"(?!\B\w){re.escape(text)}(?<!\w\B)")
                found = {one for one in found if text in one and whole.search(one)}
            asked |= found if texts else set()
        return asked


def text_source(config: Mapping[str, Any] | ConfigDict) -> dict[str, Any]:
    """The fields of `splits.ProblemConfig` by which a run reads texts."""
    run = config["sft"]["completions_of"]
    if not run:
        return {"reads": TextSelection, "reads_evaluation": TextSelection}
    file = RunFolder(user_path(run)).completions
    if not file.is_file():
        raise UserError(
            f"sft.completions_of={run}: there is no {file.name}: pass the folder of a run that "
            "sampled, with log.completions above 0"
        )
    reads = functools.partial(SavedSelection, min_reward=config["sft"]["min_reward"])
    own = {"reads": reads, "path": str(file), "source": ""}
    return own | {"reads_evaluation": TextSelection}


def encode_texts(
    config: ConfigDict, tokenizer: Tokenizer, problems: Sequence[Problem], what: str
) -> list[Prompt]:
    """Renders and tokenizes rows to learn.

    Raises:
        UserError: a row is longer than sft.max_tokens, or the chat template does not fit it.
    """
    prompts = prompt_config(
        config.data, chat_template_args=config.data.chat_template_args.to_dict()
    )
    writer = _Writer(tokenizer.keeping_history(), prompts)
    encoded = [writer.write(problem) for problem in problems]
    limit = config.sft.max_tokens
    lengths = [
        max(len(row.prompt) + len(row.completion) for row in prompt.rows) for prompt in encoded
    ]
    if too_long := [number for number, length in enumerate(lengths) if length > limit]:
        raise UserError(
            f"{len(too_long)} of {len(encoded)} {what} are over {limit} tokens, the first is "
            f"{problems[too_long[0]].columns['where']} and the longest has {max(lengths)}; instead "
            f"of sft.max_tokens={limit} pass --config.sft.max_tokens={max(lengths)}, or take them "
            "out"
        )
    return encoded


@dataclasses.dataclass(frozen=True)
class _Writer:
    """Writes rows with a chat template."""

    tokenizer: Tokenizer
    config: PromptConfig

    def write(self, problem: Problem) -> Prompt:
        """Returns a prompt, which is what comes before the first learned turn, with its rows."""
        where = problem.columns["where"]
        if "messages" not in problem.columns:
            return self._saved(problem, where)
        chat, first = self._chat(problem, where)
        arguments = dict(self.config.chat_template_args)
        arguments |= {"tools": tools} if (tools := problem.columns["tools"]) else {}
        rows: list[TextRow] = []
        text, ids, learned, opening = "", list[int](), list[bool](), ""
        for index in range(first, len(chat)):
            if not _is_learned(chat[index]):
                continue
            before, turn = self._turn(chat[: index + 1], arguments, where)
            if not opening:
                _check_written(where, "tool", map(_name_of, problem.columns["tools"]), before)
            calls = (call["function"]["name"] for call in chat[index].get("tool_calls", ()))
            _check_written(where, "call of", calls, turn)
            reasoning = [chat[index][name] for name in _REASONING if name in chat[index]]
            if not any(_flat(text) in _flat(turn) for text in reasoning):
                _check_written(where, "reasoning", reasoning, turn)
            opening = opening or before
            if not text or not before.startswith(text):  # The template rewrites what came before.
                rows += [_row(ids, learned)] if text else []
                text, ids, learned = "", [], []
            between = self.tokenizer.encode(before[len(text) :])
            turn_ids, end = self._until_end(turn, where)
            ids += [*between, *turn_ids]
            learned += [False] * len(between) + [True] * len(turn_ids)
            text = before + turn[:end]
        with _row_errors(where):  # Results of tools are often written as JSON.
            self.tokenizer.check_kept([m for m in chat if m["role"] in ("system", "user")], text)
        return Prompt(
            problem, opening, tuple(self.tokenizer.encode(opening)), (*rows, _row(ids, learned))
        )

    def _chat(self, problem: Problem, where: str) -> tuple[list[dict[str, Any]], int]:
        """The messages with those of the config, and the number of the first learned one."""
        chat, first = list(problem.columns["messages"]), problem.columns["first"]
        config, last = self.config, problem.columns["messages"][first - 1]
        if last["role"] == "user":
            chat[first - 1] = last | {"content": last["content"] + config.question_suffix}
        added = [
            {"role": role, "content": content}
            for role, content in example_turns(config.examples, config.question_suffix)
        ]
        start = int(chat[0]["role"] == "system")
        if config.system_prompt and start:
            raise UserError(
                f"{where}: the row has a system message of its own, and data.system_prompt is "
                f"{config.system_prompt!r:.60}: pass --config.data.system_prompt="
            )
        if config.system_prompt:
            added.insert(0, {"role": "system", "content": config.system_prompt})
        chat[start:start] = added
        return chat, first + len(added)

    def _turn(
        self, chat: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any], where: str
    ) -> tuple[str, str]:
        """What comes before the last message, an assistant's turn, and the turn, as texts."""
        render = self.tokenizer.apply_chat_template
        with _row_errors(where):
            before = render(chat[:-1], add_generation_prompt=True, **arguments)
            after = render(chat, add_generation_prompt=False, **arguments)
            check_unicode(after, "the row")
        if not after.startswith(before):
            raise UserError(
                f"{where}: the chat template begins the assistant's turn with "
                f"{before[-40:]!r}, and writes message {len(chat)} otherwise: pass other "
                "data.chat_template_args, such as enable_thinking, or write the turn as the policy "
                "would"
            )
        return before, after[len(before) :]

    def _until_end(self, turn: str, where: str) -> tuple[list[int], int]:
        """The ids of a turn up to its end token, and where that one ends in the text."""
        ids = self.tokenizer.encode(turn)
        ends = [number for number, token in enumerate(ids) if token in self.tokenizer.eos_ids]
        if not ends:
            raise UserError(
                f"{where}: the chat template does not end the assistant's turn with an "
                "end-of-sequence token, which the policy would learn to end with: take another "
                "model, or correct its template"
            )
        end = self.tokenizer.decode([ids[ends[-1]]], skip_special=False)
        if len(ends) > 1:
            raise UserError(
                f"{where}: a turn of the assistant has an end-of-sequence token, such as {end}, in "
                "its text, where the policy would end: take it out"
            )
        return ids[: ends[-1] + 1], turn.rfind(end) + len(end)

    def _saved(self, problem: Problem, where: str) -> Prompt:
        """A completion that a run saved; its prompt has been rendered."""
        if is_harmony(self.tokenizer.chat_template or ""):
            raise UserError(
                f"{where}: the completions of gpt-oss are saved without the names of their "
                "messages: write them as rows with `messages`, and pass data.path"
            )
        if not problem.question.endswith(self._generation):
            raise UserError(
                f"{where}: its prompt ends with {problem.question[-40:]!r}, and the chat template "
                f"of the model begins a turn with {self._generation!r}: pass the model.source and "
                "data.chat_template_args of that run"
            )
        prompt = tuple(self.tokenizer.encode(problem.question))
        ids = [*self.tokenizer.encode(problem.answer), self._end_id]
        row = TextRow(prompt, tuple(ids), (True,) * len(ids))
        return Prompt(problem, problem.question, prompt, (row,))

    @functools.cached_property
    def _end_id(self) -> int:
        return ReplyWriter(self.tokenizer, self.config.chat_template_args, calls=False).end_id()

    @functools.cached_property
    def _generation(self) -> str:
        """What the template puts at the end of a prompt, where the assistant begins."""
        render = functools.partial(
            self.tokenizer.apply_chat_template,
            [{"role": "user", "content": "dummy"}],
            **self.config.chat_template_args,
        )
        return render().removeprefix(render(add_generation_prompt=False))


def _check_written(where: str, what: str, texts: Iterable[str], written: str) -> None:
    """Refuses a template that leaves out what the policy should learn or know."""
    for text in texts:
        if _flat(text) not in _flat(written):
            raise UserError(
                f"{where}: the chat template leaves out the {what} {text!r:.60}: take a model "
                "whose template writes it, or leave it out of the row"
            )


def _flat(text: str) -> str:
    return " ".join(text.split())


def _name_of(tool: Mapping[str, Any]) -> str:
    """The name in the schema of a tool, with or without OpenAI's `function` around it."""
    inner = tool.get("function")
    return str((inner if isinstance(inner, Mapping) else tool).get("name", ""))


@contextlib.contextmanager
def _row_errors(where: str) -> Iterator[None]:
    """Names the row in an error of the chat template."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _row(ids: Sequence[int], learned: Sequence[bool]) -> TextRow:
    start = learned.index(True)
    return TextRow(tuple(ids[:start]), tuple(ids[start:]), tuple(learned[start:]))


def _is_learned(message: Mapping[str, Any]) -> bool:
    """Whether a message is the assistant's, without the `weight` of 0 that `_messages` keeps."""
    return message["role"] == "assistant" and "weight" not in message


def _messages(value: Any, role: str, where: str) -> list[dict[str, Any]]:
    """Reads messages of a chat, or a text, which is a message of the role."""
    if not isinstance(value, list | tuple):
        text = text_of(value, where)
        if is_written_chat(text):
            raise UserError(
                f"{where} is a text with a list of chat messages in it, {text!r:.60}: write the "
                "list itself into the file, as json.loads or ast.literal_eval returns it"
            )
        return [{"role": role, "content": text}]
    messages = []
    for number, message in enumerate(value):
        try:
            read = read_message(message, number)
        except RequestError as error:
            raise UserError(f"{where}: {error}: correct it, or take the row out") from error
        for function in (call["function"] for call in read.get("tool_calls", ())):
            arguments = function["arguments"] = function["arguments"] or {}
            if not isinstance(arguments, Mapping):
                raise UserError(
                    f"{where}[{number}]: a call of {function['name']!r:.60} has the arguments "
                    f"{arguments!r:.60}: write a JSON object, or its text"
                )
        if message.get("function_call"):
            raise UserError(f"{where}[{number}] has a function_call: write it as tool_calls")
        for name in _REASONING:
            if (text := message.get(name)) is not None:
                text = text_of(text, f"{where}[{number}].{name}")
                read = (dict.fromkeys(_REASONING, text) | read | {name: text}) if text else read
        weight = message.get("weight")
        if read["role"] == "assistant" and not is_missing(weight):
            if weight not in (0, 1):
                raise UserError(
                    f"{where}[{number}].weight is {weight!r:.60}: write 1 for a turn to learn, or "
                    "0 for one that is context"
                )
            if not weight:  # A weight of 1 is the same as none.
                read["weight"] = 0
        messages.append(read)
    if not messages:
        raise UserError(f"{where} is an empty list: write its messages, or take the row out")
    return messages


def _tools(value: Any, where: str) -> list[dict[str, Any]]:
    """Reads the JSON schemas of tools; a table may have them as a text."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: not JSON ({error}): write a list of JSON schemas") from error
    if not value:
        return []
    named = isinstance(value, list) and all(isinstance(x, Mapping) and _name_of(x) for x in value)
    if not named:
        raise UserError(f"{where} is {value!r:.60}: write a list of JSON schemas with their names")
    return [dict(tool) for tool in value]
