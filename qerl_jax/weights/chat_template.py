"""Chat templates: programs in Jinja that write a conversation as one text."""

import contextlib
import contextvars
import dataclasses
import datetime
import functools
import json
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.sandbox

_SECONDS = 10.0  # of computing, for one conversation
_CHARACTERS = 1 << 26  # of all texts that the template makes for one conversation
_BITS = 1 << 14  # of an integer that it computes with
_WIDTH_BITS = 20  # of an integer that a method of texts or a filter gets: a width, an indent

_now: contextvars.ContextVar[datetime.datetime | None] = contextvars.ContextVar(
    "_now", default=None
)


@contextlib.contextmanager
def template_date(created: str) -> Generator[None]:
    """Lets templates that write the date, such as Llama 3.2's, write that of a run's first start.

    Args:
        created: `created` of the run's config.json; '' is the moment of the rendering.
    """
    form = "%Y-%m-%dT%H:%M:%S%z"  # as `provenance` writes it
    token = _now.set(datetime.datetime.strptime(created, form) if created else None)
    try:
        yield
    finally:
        _now.reset(token)


class _Generation(jinja2.ext.Extension):
    """The tag {% generation %}, which marks the assistant's tokens for other trainers.

    Its body is rendered as plain text.
    """

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# --- Limits ---------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Left:
    """What a template may still use for a conversation."""

    ends: float  # value of `time.thread_time` at which it must have ended
    characters: int = _CHARACTERS


_left: contextvars.ContextVar[_Left | None] = contextvars.ContextVar("_left", default=None)


def _tick() -> bool:
    """Ends a template that computes for too long; every round of a loop calls it."""
    left = _left.get()
    if left is not None and time.thread_time() > left.ends:
        raise jinja2.TemplateError(
            f"it computes for more than {_SECONDS:g} s to write one conversation: correct its loops"
        )
    return True


def _spend(characters: int) -> None:
    """Ends a template that makes too much text."""
    left = _left.get() or _Left(0.0)
    left.characters -= characters
    if left.characters < 0:
        raise jinja2.TemplateError(
            f"it makes more than {_CHARACTERS:,} characters to write one conversation: correct its "
            "loops"
        )


def _made(value: Any) -> Any:
    if isinstance(value, str | bytes | list | tuple | dict):
        _spend(len(value))
    return value


def _run(function: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Any:
    _tick()
    return _made(function(*arguments, **keywords))


def _filter(function: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Any:
    _check_widths(*arguments[1:], *keywords.values())
    return _run(function, *arguments, **keywords)


def _check_widths(*values: Any) -> None:
    for value in values:
        if isinstance(value, int):
            _check_bits(value.bit_length(), _WIDTH_BITS)


def _check_bits(bits: int, most: int) -> None:
    """Refuses an integer that would be a text of gigabytes, or take minutes to compute."""
    if bits > most:
        raise jinja2.TemplateError(f"it has an integer of {bits} bits where {most} are the limit")


class _Code(jinja2.compiler.CodeGenerator):
    """The Python of a template, with the limits of loops and of `~`."""

    def visit_For(self, node, frame):  # noqa: N802
        tick = jinja2.nodes.EnvironmentAttribute("tick()")  # The name is written as it is.
        if node.test is None:
            node.body.insert(0, jinja2.nodes.ExprStmt(tick))
        else:
            node.test = jinja2.nodes.And(tick, node.test)
        super().visit_For(node, frame)

    def visit_Concat(self, node, frame):  # noqa: N802
        self.write("environment.made(")
        super().visit_Concat(node, frame)
        self.write(")")


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The environment of chat templates, with limits of what they compute.

    It is a sandbox, because templates come with the weights and are not trusted.
    """

    code_generator_class = _Code
    intercepted_binops = frozenset({"+", "*", "%", "**"})
    tick, made = staticmethod(_tick), staticmethod(_made)

    @staticmethod
    def concat(parts: Iterable[str]) -> str:  # of what a template, a macro or a block writes
        return "".join(map(_made, parts))

    def call(self, context, function, /, *arguments, **keywords):
        if isinstance(getattr(function, "__self__", None), str | bytes):
            _check_widths(*arguments, *keywords.values())
        return _run(super().call, context, function, *arguments, **keywords)

    def call_binop(self, context, operator, left, right):
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length()
            _check_bits(max(bits, right.bit_length()), _BITS)
        elif operator == "*" and isinstance(left, int | str | list | tuple):
            value, count = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(value, str | list | tuple) and isinstance(count, int):
                _spend(len(value) * abs(count))
        return _run(super().call_binop, context, operator, left, right)


def _template_environment() -> _Sandbox:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    filters: dict[str, Any] = environment.filters | {"tojson": to_json}
    for name, function in filters.items():
        environment.filters[name] = functools.update_wrapper(
            functools.partial(_filter, function), function
        )
    del environment.globals["lipsum"]  # has a loop of its own
    return environment


@functools.lru_cache
def variables(source: str) -> frozenset[str]:
    """Returns the names that a chat template reads and does not set."""
    environment = _template_environment()
    names = jinja2.meta.find_undeclared_variables(environment.parse(source))
    return frozenset(names - _FUNCTIONS.keys())


def render(source: str, variables: Mapping[str, Any]) -> str:
    """Writes a conversation with a chat template.

    Raises:
        jinja2.TemplateError: the template is malformed, rejects its variables, or computes or
            writes without a bound.
        Exception: what the code of the template raises.
    """
    token = _left.set(_Left(time.thread_time() + _SECONDS))
    try:
        return _compile(source).render(variables)
    finally:
        _left.reset(token)


@functools.lru_cache
def _compile(source: str) -> jinja2.Template:
    return _template_environment().from_string(source, globals=_FUNCTIONS)


def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """The filter `tojson` of chat templates: JSON with every character as it is."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(form):
    return (_now.get() or datetime.datetime.now()).strftime(form)


def _raise_exception(message):
    raise jinja2.TemplateError(message)


_FUNCTIONS = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
