"""Conversations of the chat route as token ids, and turns of the policy as its messages.

A conversation that continues what a row has is not written anew: its further messages become the
ids that the chat template puts after a turn, see `replies`. Messages are compared as agents send
them back: a turn by its text and its calls, whatever else clients drop or add.
"""

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from qerl_jax.environments.gateway import Asked, RequestError
from qerl_jax.environments.replies import ReplyWriter, TemplateTokenizer
from qerl_jax.environments.tools import NO_ID, message_of, read_calls
from qerl_jax.errors import UserError, check_unicode

_ROLES = {name: name for name in ("system", "user", "assistant", "tool")} | {"developer": "system"}
_CHARACTERS = 64  # of a token, at most, before a long conversation is encoded


@dataclasses.dataclass(frozen=True)
class ChatWriter:
    """Writes conversations with a chat template, and reads turns."""

    tokenizer: TemplateTokenizer  # tokenizer of the policy
    tool_tokenizer: TemplateTokenizer  # the same with the template of conversations with tools
    arguments: Mapping[str, Any]  # further variables of the chat template
    form: str  # how the template writes calls of tools; '' where it has none

    def prompt(self, messages: Any, tools: Any, context: int) -> "ChatPrompt":
        """Returns the prompt of a request with `messages` and `tools`, as JSON has them.

        Raises:
            RequestError: they are malformed, or the chat template has no tools.
        """
        if not isinstance(messages, list) or not messages:
            raise RequestError(400, "messages: a list of at least one message is needed")
        if tools is not None and not isinstance(tools, list):
            raise RequestError(400, "tools: a list is needed")
        if tools and not self.form:
            raise RequestError(400, "the chat template of the policy has no tools: send no `tools`")
        for tool in tools or ():
            function = tool.get("function") if isinstance(tool, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise RequestError(
                    400, 'tools: {"type": "function", "function": {"name": ...}} is needed'
                )
            schema = function.get("parameters") or {}
            if not isinstance(schema, dict) or not isinstance(schema.get("properties", {}), dict):
                text = f"tools: {function['name']:.80}.parameters: a JSON schema with an object "
                raise RequestError(400, f"{text}'properties' is needed, or leave it out")
        chat = [read_message(message, number) for number, message in enumerate(messages)]
        return ChatPrompt(self, chat, tools or [], context)

    def ids(self, prompt: "ChatPrompt") -> list[int]:
        """Returns the ids of a whole conversation, which waits for the policy."""
        tools = {"tools": prompt.tools} if prompt.tools else {}
        tokenizer = self.tool_tokenizer if tools else self.tokenizer
        try:
            text = tokenizer.apply_chat_template(
                prompt.messages, add_generation_prompt=True, **tools, **self.arguments
            )
        except UserError as error:
            raise RequestError(400, str(error)) from error
        if len(text) > _CHARACTERS * prompt.context:
            raise RequestError(
                400,
                f"This model's maximum context length is {prompt.context} tokens. The messages "
                f"have {len(text)} characters: shorten them",
                "context_length_exceeded",
            )
        return list(tokenizer.encode(text))

    def added(self, prompt: "ChatPrompt", turn: Asked) -> list[int] | None:
        """Returns the ids of the messages after a turn; None where the template writes it anew."""
        further = prompt.messages[len(turn.messages) :]
        calls = {call["id"]: call for call in turn.reply.get("tool_calls", ())}
        if any(message["role"] == "assistant" for message in further):
            return None
        messages = []
        for message in further:
            if message["role"] == "tool":
                call = calls.get(message["tool_call_id"])
                name = message.get("name") or (call["function"]["name"] if call else "unknown")
                message = message | {"name": name}
            messages.append(message)
        is_tool = messages[0]["role"] == "tool"
        tokenizer = self.tool_tokenizer if prompt.tools or is_tool else self.tokenizer
        writer = ReplyWriter(tokenizer, self.arguments, calls=is_tool)
        try:
            end = [] if turn.ids[-1] in self.tokenizer.eos_ids else [writer.end_id()]
            return [*end, *writer.follow(messages)]
        except UserError:
            return None

    def reply(self, prompt: "ChatPrompt", turn: Asked) -> dict[str, Any]:
        """Returns the answer of a turn as a message of OpenAI, and remembers it with the turn."""
        if turn.reply is not None:
            return turn.reply
        ids = turn.ids
        if turn.complete and ids and ids[-1] in self.tokenizer.eos_ids:
            ids = ids[:-1]
        if not prompt.tools and self.form != "harmony":
            reply: dict[str, Any] = {"role": "assistant", "content": self.tokenizer.decode(ids)}
        else:
            marked = self.tokenizer.decode(ids, skip_special=False)
            opened = self.tokenizer.decode(turn.row.ids[: turn.start][-32:], skip_special=False)
            in_reasoning = opened.rstrip().endswith("<think>")
            functions = [one["function"] for one in prompt.tools]
            tools = [{"function": f | {"parameters": f.get("parameters") or {}}} for f in functions]
            calls = read_calls(marked, self.form, in_reasoning=in_reasoning, tools=tools)
            reply = message_of(marked, calls, self.form, in_reasoning=in_reasoning)
            if readable := [call for call in calls if not call.error]:
                reply["tool_calls"] = [
                    {
                        "id": call.id if call.id != NO_ID else f"call{turn.order:03}{number:02}",
                        "type": "function",
                        "function": {
                            "name": call.name,
                            "arguments": json.dumps(call.arguments, ensure_ascii=False),
                        },
                    }
                    for number, call in enumerate(readable)
                ]
        turn.messages = [*prompt.compared, _compared(read_message(reply, 0))]
        turn.conversation, turn.sent = [*prompt.messages, reply], len(prompt.messages)
        turn.reply = reply
        return reply


class ChatPrompt:
    """The messages of a request."""

    def __init__(
        self,
        writer: ChatWriter,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        context: int,
    ):
        self._writer, self.messages, self.tools, self.context = writer, messages, tools, context
        self.compared = [_compared(message) for message in messages]
        self.tools_key = json.dumps(tools, sort_keys=True) if tools else ""
        self.key = json.dumps([self.compared, self.tools_key]).encode()

    def continues(self, turn: Asked) -> int:
        """Returns how many messages precede what is new."""
        if turn.messages is None or turn.row.tools != self.tools_key:
            return 0
        count = len(turn.messages)
        return count if count < len(self.messages) and self.compared[:count] == turn.messages else 0

    def added(self, turn: Asked) -> list[int] | None:
        """Returns the ids after a turn."""
        return self._writer.added(self, turn)

    def whole(self) -> list[int]:
        """Returns the ids of the whole conversation."""
        return self._writer.ids(self)


def read_message(message: Any, number: int) -> dict[str, Any]:
    """A message as chat templates take it.

    Raises:
        RequestError: it is malformed, or has something else than text.
    """
    where = f"messages[{number}]"
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestError(400, f"{where}.role is {role!r:.80}: system, user, assistant or tool")
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) < len(parts):
            raise RequestError(400, f"{where}.content has a part that is no text: leave it out")
        content = "".join(texts)
    if content is None:
        content = ""
    if not isinstance(content, str):
        raise RequestError(400, f"{where}.content: a text, or a list of texts, is needed")
    try:
        check_unicode(content, f"{where}.content")
    except UserError as error:
        raise RequestError(400, str(error)) from error
    out: dict[str, Any] = {"role": _ROLES[role], "content": content}
    if role == "tool":
        out["tool_call_id"] = str(message.get("tool_call_id") or "")
        if isinstance(message.get("name"), str):
            out["name"] = message["name"]
    if role == "assistant" and (calls := message.get("tool_calls")):
        if not isinstance(calls, list):
            raise RequestError(400, f"{where}.tool_calls: a list is needed")
        out["tool_calls"] = [_call(call, where) for call in calls]
    return out


def _call(call: Any, where: str) -> dict[str, Any]:
    """A call of a message of the assistant, its arguments as a dict where they are one."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(400, f"{where}.tool_calls: each needs a function with a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    number = str(call.get("id") or NO_ID)
    return {
        "type": "function",
        "id": number,
        "function": {"name": function["name"], "arguments": arguments},
    }


def _compared(message: Mapping[str, Any]) -> list[Any]:
    """What two messages must have in common to be the same."""
    content = message["content"]
    if message["role"] != "assistant":
        return [message["role"], content, message.get("tool_call_id", "")]
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return ["assistant", content.strip(), json.dumps(functions, sort_keys=True)]
