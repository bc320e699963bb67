"""Chat templates: programs in Jinja that write a conversation as one text."""

import contextlib
import contextvars
import dataclasses
import datetime
import functools
import json
import re
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.sandbox
import jinja2.utils

_SECONDS = 10.0  # of computing, for one conversation
_CHARACTERS = 1 << 26  # of all texts that the template makes for one conversation
_POINTER = 8  # bytes of an item of a list, which counts as that many characters
_BITS = 1 << 14  # of an integer that it computes with
_WIDTH_BITS = 20  # of an integer that a method of texts or a filter gets: a width, an indent
# A width or a precision in the text of `%`, and one that is a value.
_WIDTH = re.compile(r"(?<![0-9])([0-9]{7,}+)(?:\.[0-9]*+)?[hlL]?[a-zA-Z]")
_STAR = re.compile(r"\*[.0-9]*+[hlL]?[a-zA-Z]")
_DIGITS = re.compile(r"\d{7,}")

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
    # Lists and objects by their `id`, each with its size, see `_size`.
    sizes: dict[int, tuple[Any, int]] = dataclasses.field(default_factory=dict)


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
        left = _left.get() or _Left(0.0)
        size = _size(value, left.sizes)
        length = len(value) * (1 if isinstance(value, str | bytes) else _POINTER)
        _spend(size if size > left.characters else length)
    return value


def _size(value: Any, sizes: dict[int, tuple[Any, int]]) -> int:
    """The characters and items of a value; what a list holds twice counts twice, as in its text."""
    if not isinstance(value, list | tuple | dict):
        return len(value) if isinstance(value, str | bytes) else 1
    if id(value) not in sizes:
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        sizes[id(value)] = value, 1 + sum(_size(part, sizes) for part in parts)
    return sizes[id(value)][1]


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


def _check_format(text: Any, values: Any) -> None:
    """Refuses `text % values` where it has a width as in '%9999999d', or '%*d'."""
    if isinstance(text, str | bytes):
        text = text if isinstance(text, str) else text.decode("latin-1")
        _check_widths(*(int(digits[:_WIDTH_BITS]) for digits in _WIDTH.findall(text)))
        if _STAR.search(text) and isinstance(values, tuple):
            _check_widths(*values)


def _format(text: str, *values: Any, **named: Any) -> str:
    """The filter `format`."""
    _check_format(text, values)
    return str(text) % (named or values)


class _Formatter(jinja2.sandbox.SandboxedFormatter):
    """Refuses a width of `str.format`, as in '{:9999999}'."""

    def format_field(self, value: Any, format_spec: str) -> str:
        _check_widths(*(int(digits[:_WIDTH_BITS]) for digits in _DIGITS.findall(format_spec)))
        return super().format_field(value, format_spec)


class _Namespace(jinja2.utils.Namespace):
    """A namespace whose text does not have its values, which nothing has counted."""

    __repr__ = object.__repr__


def _in_made(visit: Callable[..., None]) -> Callable[..., None]:
    def wrapped(self: jinja2.compiler.CodeGenerator, node: Any, frame: Any) -> None:
        stores = getattr(node, "ctx", "load") != "load"  # `a, b` on the left of an assignment
        self.write("" if stores else "environment.made(")
        visit(self, node, frame)
        self.write("" if stores else ")")

    return wrapped


class _Code(jinja2.compiler.CodeGenerator):
    """The Python of a template, with the limits of loops, of `~` and of lists."""

    def visit_For(self, node, frame):  # noqa: N802
        tick = jinja2.nodes.EnvironmentAttribute("tick()")  # The name is written as it is.
        if node.test is None:
            node.body.insert(0, jinja2.nodes.ExprStmt(tick))
        else:
            node.test = jinja2.nodes.And(tick, node.test)
        super().visit_For(node, frame)

    visit_Concat = _in_made(jinja2.compiler.CodeGenerator.visit_Concat)  # noqa: N815
    visit_List = _in_made(jinja2.compiler.CodeGenerator.visit_List)  # noqa: N815
    visit_Tuple = _in_made(jinja2.compiler.CodeGenerator.visit_Tuple)  # noqa: N815
    visit_Dict = _in_made(jinja2.compiler.CodeGenerator.visit_Dict)  # noqa: N815


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
        if isinstance(getattr(function, "__self__", None), str | bytes | int):
            _check_widths(*arguments, *keywords.values())
        return _run(super().call, context, function, *arguments, **keywords)

    def wrap_str_format(self, value):
        wrapper = super().wrap_str_format(value)
        if wrapper is None:
            return None

        def checked(*arguments, **keywords):
            is_map = value.__name__ == "format_map"
            given = ((), *arguments) if is_map else (arguments, keywords)
            _Formatter(self).vformat(value.__self__, *given)
            return wrapper(*arguments, **keywords)

        return checked

    def call_binop(self, context, operator, left, right):
        if operator == "%":
            _check_format(left, right)
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
    filters: dict[str, Any] = environment.filters | {"tojson": to_json, "format": _format}
    for name, function in filters.items():
        run = _run if name in ("format", "default", "d") else _filter  # Their values may be large.
        environment.filters[name] = functools.update_wrapper(
            functools.partial(run, function), function
        )
    environment.globals["namespace"] = _Namespace
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
