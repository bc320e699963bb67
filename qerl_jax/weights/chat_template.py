"""Chat templates: programs in Jinja that write a conversation as one text."""

import contextlib
import contextvars
import datetime
import functools
import json
from collections.abc import Generator

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox

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


def _template_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The environment of chat templates.

    It is sandboxed, because templates come with the weights and are not trusted.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    return environment


@functools.lru_cache
def variables(source: str) -> frozenset[str]:
    """Returns the names that a chat template reads and does not set."""
    environment = _template_environment()
    names = jinja2.meta.find_undeclared_variables(environment.parse(source))
    return frozenset(names - _FUNCTIONS.keys())


@functools.lru_cache
def compile_template(source: str) -> jinja2.Template:
    """Compiles a chat template with the functions that templates expect."""
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
