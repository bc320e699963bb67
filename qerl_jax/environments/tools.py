"""Tools in the chat templates of Qwen 2.5 to 3.6, Llama 3, Mistral and gpt-oss: their calls."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from qerl_jax.environments import harmony
from qerl_jax.errors import UserError

_BEGIN, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _PARAMETER, _PARAMETER_END = "<function=", "<parameter=", "</parameter>"
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}  # as Jinja writes them
_LLAMA = re.compile(r"\s*(<\|python_tag\|>\s*)?(?=\{\s*\"(name|type|function)\")")
_GAP = re.compile(r"\s*;?\s*")  # between calls of Llama
_MISTRAL = "[TOOL_CALLS]"
_THINK, _END_THINK = "<think>", "</think>"
# What may begin in a turn: reasoning or a call. A call of Llama has no mark: it begins the turn, or
# follows its reasoning.
_MARKS = {
    "hermes": re.compile(rf"{_THINK}|{_BEGIN}"),
    "xml": re.compile(rf"{_THINK}|{_BEGIN}"),
    "mistral": re.compile(rf"{_THINK}|{re.escape(_MISTRAL)}"),
    "llama": re.compile(_THINK),
}
_TYPES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
_NESTING = 8  # largest depth of schemas in a schema
_NO_JSON = (ValueError, RecursionError)  # what reading JSON raises, the latter for deep nesting
_ID = re.compile(r"[A-Za-z0-9]{9}")
NO_ID = "000000000"  # where a template wants an id of a call and the policy wrote none


class Call(NamedTuple):
    """A call of a tool that the policy wrote."""

    name: str  # name of the tool; '' where it cannot be read
    arguments: dict[str, Any]  # its arguments by name
    id: str = NO_ID  # id that the policy gave the call, or `NO_ID`
    error: str = ""  # why the call cannot be read; '' where it can


def tool_format(template: str, source: str = "") -> str:
    """Returns how a chat template writes calls: 'hermes', 'xml', 'llama', 'mistral' or 'harmony'.

    'hermes' is that of Qwen 2.5 and 3, 'xml' that of Qwen 3.5 and 3.6, 'harmony' that of gpt-oss.

    Raises:
        UserError: the template has no tools, or writes their calls in another way.
    """
    if re.search(r"\btools\b", template):
        if harmony.is_harmony(template) and harmony.FUNCTIONS in template:
            return "harmony"
        if _MISTRAL in template and "[ARGS]" not in template:
            return "mistral"
        if "<tool_call>" in template and '{"name": ' in template.replace("\\", ""):
            return "hermes"
        if all(tag in template for tag in ("<tool_call>", "<function=", "<parameter=")):
            return "xml"
        if "<|start_header_id|>" in template and '"parameters": ' in template.replace("\\", ""):
            return "llama"
    where = f"{source}: " if source else ""
    raise UserError(
        f"{where}the chat template does not write tools as those of Qwen2.5, Qwen3, Qwen3.5, "
        "Llama 3.1, Mistral and gpt-oss do: take one of these models, give the tokenizer such a "
        "template with the name tool_use, or take an environment of texts with a method step"
    )


def read_calls(
    text: str, form: str, *, in_reasoning: bool = False, tools: Sequence[Mapping[str, Any]] = ()
) -> list[Call]:
    """Reads the calls in a turn of the policy, in their order; an unreadable one has an error.

    What the policy writes while it reasons is no call. It reasons from the beginning, where the
    prompt has opened the reasoning (`in_reasoning`), or from `<think>`, up to the next `</think>`;
    inside of a call these tags are text. The text has its special tokens, but not the token that
    ends the turn. By the JSON schemas of the tools 'xml' tells a number from a text.
    """
    if form == "harmony":
        return _harmony_calls(text)
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    calls: list[Call] = []
    position = _after(text, _END_THINK, 0) if in_reasoning else 0
    while (mark := _next_call(text, form, position)) is not None:
        if form == "llama":
            return _objects(text, mark.end())
        if form == "mistral":
            return _array(text[mark.end() :])
        if (position := _after(text, _END, mark.end())) < 0:
            calls.append(Call("", {}, error=f"the call has no end, {_END}"))
        else:
            body = text[mark.end() : position - len(_END)]
            try:
                calls.append(_xml_call(body, schemas) if form == "xml" else _call(json.loads(body)))
            except _NO_JSON as error:
                calls.append(_unreadable(error))
    return calls


def message_of(
    text: str, calls: Sequence[Call], form: str, *, in_reasoning: bool = False
) -> dict[str, Any]:
    """Returns a turn as the message that TRL gives rewards, from its text and its calls.

    It has `content`, `reasoning_content` where the policy has reasoned, and `tool_calls` with the
    calls that can be read. With a call that cannot be read the content is the whole text.
    """
    message: dict[str, Any] = {"role": "assistant"}
    if form == "harmony" and all(not call.error for call in calls):
        parts = harmony.messages_of(text)
        if reasoning := harmony.channel_of(parts, "analysis").strip():
            message["reasoning_content"] = reasoning
        text = harmony.channel_of(parts, "final") or harmony.channel_of(parts, "commentary")
    elif all(not call.error for call in calls):
        position = _after(text, _END_THINK, 0) if in_reasoning else 0
        if mark := _next_call(text, form, position):
            text = text[: mark.start()]
        if in_reasoning or text.lstrip().startswith(_THINK):
            reasoning, _, text = text.partition(_END_THINK)
            message["reasoning_content"] = reasoning.lstrip().removeprefix(_THINK).strip()
    message["content"] = text.strip()
    functions = [{"name": c.name, "arguments": c.arguments} for c in calls if not c.error]
    if functions:
        message["tool_calls"] = [{"type": "function", "function": one} for one in functions]
    return message


def _next_call(text: str, form: str, position: int) -> re.Match[str] | None:
    """The mark of the next call that is not in reasoning; None without one, or before the text.

    Each search begins where the last one ended: a policy that repeats itself writes thousands of
    tags, and the thread that trains reads them.
    """
    while position >= 0:
        if form == "llama" and (match := _LLAMA.match(text, position)):
            return match
        mark = _MARKS[form].search(text, position)
        if mark is None or mark[0] != _THINK:
            return mark
        position = _after(text, _END_THINK, mark.end())
    return None


def _after(text: str, tag: str, start: int) -> int:
    """The position after the next tag; -1 without one."""
    found = text.find(tag, start)
    return found if found < 0 else found + len(tag)


# --- XML ------------------------------------------------------------------------------------------


def _xml_call(body: str, schemas: Mapping[str, Mapping[str, Any]]) -> Call:
    name, rest = _opened(body.strip(), _FUNCTION)
    if not name or not rest.endswith("</function>"):
        return Call("", {}, error="expected <function=NAME>...</function>")
    schema = schemas.get(name, {})
    declared, texts = schema.get("properties", {}), {}
    *parts, last = rest.removesuffix("</function>").split(_PARAMETER_END)
    for part in parts:
        key, value = _opened(part.lstrip(), _PARAMETER)
        if not key:
            return Call(name, {}, error=f"expected <parameter=NAME>, not {part.strip()!r:.60}")
        # The template puts a line break on either side of a value; all else is the value's own.
        texts[key] = value.removeprefix("\n").removesuffix("\n")
    # A parameter without an end is what follows the last one, or is inside of the one before it.
    inside = [key for key in declared if key not in texts]
    inside = [f"{_PARAMETER}{key}>" for key in inside]
    if last.strip() or any(tag in text for tag in inside for text in texts.values()):
        return Call(name, {}, error=f"a parameter has no end, {_PARAMETER_END}")
    arguments = {
        key: _argument(text, declared[key], schema) if key in declared else text
        for key, text in texts.items()
    }
    return Call(name, arguments)


def _opened(text: str, tag: str) -> tuple[str, str]:
    """The name in the tag that a text begins with, and the rest; '' where it begins with none."""
    name, end, rest = text.removeprefix(tag).partition(">")
    return (name, rest) if text.startswith(tag) and end and "\n" not in name else ("", "")


def _argument(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """The value of an argument that the template writes as a text, or as JSON if it is no text."""
    types = _types(schema, root)
    named = [part for part in (schema, *_parts(schema)) if isinstance(part, Mapping)]
    if types == {"string"} or any(text in part.get("enum", ()) for part in named):
        return text
    try:
        value = json.loads(_CONSTANTS.get(text.strip(), text))
    except _NO_JSON:  # A wrong type is an error of the call.
        return text
    kind = _TYPES[type(value)]
    fits = kind in types or (kind == "integer" and "number" in types)
    return text if "string" in types and (kind == "string" or not fits) else value


def _types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """The types of JSON that a schema allows; all of them where it names none."""
    if not isinstance(schema, Mapping) or depth > _NESTING:
        return set(_TYPES.values())
    types = schema.get("type")
    if types is not None:
        found = {types} if isinstance(types, str) else set(types)
    elif "$ref" in schema:
        target: Any = root
        for key in schema["$ref"].removeprefix("#").split("/")[1:]:
            target = target.get(key) if isinstance(target, Mapping) else None
        found = _types(target, root, depth + 1)
    elif parts := [_types(part, root, depth + 1) for part in _parts(schema)]:
        found = set.intersection(*parts) if "allOf" in schema else set.union(*parts)
    elif values := schema.get("enum", [schema["const"]] if "const" in schema else []):
        found = {_TYPES[type(value)] for value in values}
    else:
        found = set(_TYPES.values())
    return found | {"null"} if schema.get("nullable") else found


def _parts(schema: Any) -> list[Any]:
    """The schemas of which a schema is a union, or an intersection."""
    names = ("anyOf", "oneOf", "allOf") if isinstance(schema, Mapping) else ()
    return [part for name in names for part in schema.get(name, ())]


# --- Harmony --------------------------------------------------------------------------------------


def _harmony_calls(text: str) -> list[Call]:
    """The call of a turn of gpt-oss, which ends it; more than one are errors."""
    calls: list[Call] = []
    for message in harmony.messages_of(text):
        name = message.recipient.removeprefix(harmony.FUNCTIONS)
        if not message.recipient:
            continue
        if calls:
            calls.append(Call(name, {}, error="a turn has one call"))
        elif not name or name == message.recipient:
            error = f"expected to=functions.NAME, not to={message.recipient:.60}"
            calls.append(Call("", {}, error=error))
        else:
            try:
                calls.append(_call({"name": name, "arguments": json.loads(message.text)}))
            except _NO_JSON as error:
                calls.append(_unreadable(error))
    return calls


# --- JSON -----------------------------------------------------------------------------------------


def _array(text: str) -> list[Call]:
    try:
        values, _ = json.JSONDecoder().raw_decode(text.strip())
    except _NO_JSON as error:
        return [_unreadable(error)]
    if not isinstance(values, list) or not values:
        return [Call("", {}, error="expected a JSON list of calls")]
    return [_call(value) for value in values]


def _objects(text: str, position: int) -> list[Call]:
    """The calls of Llama from a position on, which a semicolon may separate."""
    calls, decoder = [], json.JSONDecoder()
    while (gap := _GAP.match(text, position)) and (position := gap.end()) < len(text):
        try:
            value, position = decoder.raw_decode(text, position)
        except _NO_JSON as error:
            # Text after a call is an answer, and no call.
            ends = calls and not text.startswith("{", position)
            return calls if ends else [*calls, _unreadable(error)]
        calls.append(_call(value))
    return calls


def _call(value: Any) -> Call:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str):
        return Call("", {}, error='expected {"name": ..., "arguments": {...}}')
    name = name.encode(errors="replace").decode()  # An escape may be half a surrogate pair.
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except _NO_JSON:
            arguments = None
    if not isinstance(arguments, dict):
        return Call(name, {}, error="the arguments are no JSON object")
    number = value.get("id")
    known = isinstance(number, str) and _ID.fullmatch(number)
    return Call(name, arguments, number if known else NO_ID)


def _unreadable(error: Exception) -> Call:
    return Call("", {}, error=f"the call is not valid JSON: {error}")
