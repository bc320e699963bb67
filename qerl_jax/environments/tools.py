"""Tools in the chat templates of Qwen 2.5 to 3.6, Llama 3 and Mistral: reading their calls."""

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from qerl_jax.errors import UserError

_BEGIN, _END = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^\n>]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^\n>]+)>")
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}  # as Jinja writes them
_LLAMA = re.compile(r"\s*(<\|python_tag\|>\s*)?(?=\{\s*\"(name|type|function)\")")
_MISTRAL = "[TOOL_CALLS]"
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
    """Returns how a chat template writes calls: as 'hermes', 'xml', 'llama' or 'mistral'.

    'hermes' is that of Qwen 2.5 and 3, 'xml' that of Qwen 3.5 and 3.6.

    Raises:
        UserError: the template has no tools, or writes their calls in another way.
    """
    if re.search(r"\btools\b", template):
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
        "Llama 3.1 and Mistral do: take one of these models, or an environment of texts with a "
        "method step"
    )


def read_calls(
    text: str, form: str, *, in_reasoning: bool = False, tools: Sequence[Mapping[str, Any]] = ()
) -> list[Call]:
    """Reads the calls in a turn of the policy, in their order; an unreadable one has an error.

    What the policy writes while it reasons is no call. The text has its special tokens, but not the
    token that ends the turn. By the JSON schemas of the tools 'xml' tells a number from a text.
    """
    if "</think>" in text:
        text = text.rpartition("</think>")[2]
    elif in_reasoning or "<think>" in text:
        return []
    if form == "hermes":
        return _tagged(text, lambda body: _call(json.loads(body)))
    if form == "xml":
        functions = [tool["function"] for tool in tools]
        types = {one["name"]: one["parameters"].get("properties", {}) for one in functions}
        return _tagged(text, lambda body: _xml_call(body, types))
    if form == "mistral":
        if _MISTRAL not in text:
            return []
        return _array(text.partition(_MISTRAL)[2])
    match = _LLAMA.match(text)
    return _objects(text[match.end() :]) if match else []


def _tagged(text: str, read: Callable[[str], Call]) -> list[Call]:
    # A regular expression would search the rest of the text again for each tag that has no end,
    # of which a policy that repeats itself writes thousands.
    calls = []
    while _BEGIN in text:
        body, end, text = text.partition(_BEGIN)[2].partition(_END)
        if not end:
            calls.append(Call("", {}, error=f"the call has no end, {_END}"))
            break
        try:
            calls.append(read(body))
        except _NO_JSON as error:
            calls.append(_unreadable(error))
    return calls


def _xml_call(body: str, types: Mapping[str, Mapping[str, Any]]) -> Call:
    match = _FUNCTION.fullmatch(body)
    if match is None:
        return Call("", {}, error="expected <function=NAME>...</function>")
    name, arguments = match[1], {}
    for part in match[2].split("</parameter>")[:-1]:
        if (opening := _PARAMETER.search(part)) is None:
            continue
        # The template puts a line break on either side of a value; all else is the value's own.
        key = opening[1]
        value = part[opening.end() :].removeprefix("\n").removesuffix("\n")
        arguments[key] = value
        if types.get(name, {}).get(key, {}).get("type", "string") != "string":
            with contextlib.suppress(*_NO_JSON):  # A wrong type is an error of the call.
                arguments[key] = json.loads(_CONSTANTS.get(value.strip(), value))
    return Call(name, arguments)


def _array(text: str) -> list[Call]:
    try:
        values, _ = json.JSONDecoder().raw_decode(text.strip())
    except _NO_JSON as error:
        return [_unreadable(error)]
    if not isinstance(values, list) or not values:
        return [Call("", {}, error="expected a JSON list of calls")]
    return [_call(value) for value in values]


def _objects(text: str) -> list[Call]:
    calls, decoder = [], json.JSONDecoder()
    while text := text.strip().removeprefix(";").strip():
        try:
            value, end = decoder.raw_decode(text)
        except _NO_JSON as error:
            # Text after a call is an answer, and no call.
            return calls if calls and not text.startswith("{") else [*calls, _unreadable(error)]
        calls.append(_call(value))
        text = text[end:]
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
