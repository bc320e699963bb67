"""Runs as one page for a browser: it holds all it shows and asks nothing of the network.

Text of a model reaches the page as JSON in an element that browsers do not execute, and the page's
own script shows it as text. The page's policy allows that script by its digest, and nothing else.
"""

import base64
import hashlib
import html
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qerl_jax.errors import UserError, visible
from qerl_jax.show.view import Condition, View, conversation_of, curves, parts_of
from qerl_jax.system.atomic import write_atomic
from qerl_jax.system.jsonl import is_number
from qerl_jax.system.paths import user_path
from qerl_jax.system.safe_files import open_to_read

LIMIT_BYTES = 20_000_000
_HERE = Path(__file__).parent
_POINTS = 400  # of a curve; of a longer one each point is the mean of several steps
_MARGIN_BYTES = 10_000  # for a run's names and notes
# A completion longer than this is shortened before whole steps are left out.
_LONGEST_TEXT = 20_000
_NO_STEP = "<p>no step is logged yet</p>"
_FIRST_LINES = "<!doctype html>\n<!-- Written by qerl_jax.show. -->\n"
# Readable on light and on dark pages.
_COLORS = ("#2166ac", "#d6604d", "#1b7837", "#9970ab", "#bf812d", "#35978f", "#c51b7d", "#777777")


def page(
    views: Sequence[View],
    *,
    conditions: Sequence[Condition] = (),
    steps: tuple[int, int] | None = None,
    limit: int = 0,
    limit_bytes: int = LIMIT_BYTES,
) -> str:
    """The page of runs, side by side, as HTML.

    Completions fulfill all conditions, are those of the first to the last of `steps` (None is all),
    and at most `limit` of a step (0 is all). To stay below `limit_bytes` of UTF-8 they are cut
    and then whole steps are left out, and the page says so.
    """
    style, script = (_HERE.joinpath(name).read_text("utf-8") for name in ("page.css", "page.js"))
    keys, unchanged = curves(views)
    figures = "".join(_figure(key, views) for key in keys)
    if unchanged:
        values = ", ".join(f"{visible(key)} {_value_text(v)}" for key, v in unchanged.items())
        figures += f"<p class=note>unchanged: {html.escape(values)}</p>"
    fixed = len((style + script + figures).encode()) + _MARGIN_BYTES * len(views)
    runs, notes = _completions(views, conditions, steps, limit, limit_bytes - fixed)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    title = html.escape(visible(", ".join(view.name for view in views)))
    heads = "".join(_head(number, view) for number, view in enumerate(views))
    note_lines = "".join(f"<p class=note>{html.escape(visible(note))}</p>" for note in notes)
    return (
        f'{_FIRST_LINES}<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{style}</style></head>\n<body>"
        f"<header><h1>{title}</h1>{heads}</header>\n"
        f"<main><details open><summary><h2>Curves</h2></summary>"
        f"<div class=curves>{figures or _NO_STEP}</div></details>\n"
        f"<h2>Completions</h2>{note_lines}<noscript><p>Completions need JavaScript.</p></noscript>"
        "<form id=controls hidden></form><div id=completions></div></main>\n"
        f'<script type="application/json" id="data">{_script_safe(runs)}</script>\n'
        f"<script>{script}</script></body></html>\n"
    )


def write_page(path: str, views: Sequence[View], **options: Any) -> Path:
    """Writes what `page` returns into a file, of which only such a page is replaced.

    Raises:
        UserError: the file holds something else, or cannot be written.
    """
    target = user_path(path)
    try:
        if target.exists():
            with open_to_read(target) as file:
                is_page = file.read(len(_FIRST_LINES)) == _FIRST_LINES.encode()
            if not is_page:
                raise UserError(f"--html={path} exists and is not such a page; choose another name")
        write_atomic(target.resolve(), page(views, **options))
    except OSError as error:
        raise UserError(f"--html={path} cannot be written: {error.strerror}") from error
    return target


def _head(number: int, view: View) -> str:
    source, form, seed = (view.setting(n) for n in ("model.source", "model.format", "seed"))
    facts = f"{source} in {form}, seed {seed}"
    color = _COLORS[number % len(_COLORS)]
    return (
        f'<p><span class=key style="background:{color}"></span>'
        f"<b>{html.escape(visible(view.name))}</b> {html.escape(visible(view.state))}; "
        f"{html.escape(visible(facts))}</p>"
    )


# --- Completions ---------------------------------------------------------------------------------


def _completions(
    views: Sequence[View],
    conditions: Sequence[Condition],
    steps: tuple[int, int] | None,
    limit: int,
    budget: int,
) -> tuple[list[dict[str, Any]], list[str]]:
    """The completions that fit, by run and step, and notes on what is not there."""
    samples: list[dict[int, list[dict[str, Any]]]] = []
    for view in views:
        by_step: dict[int, list[dict[str, Any]]] = {}
        for sample in view.completions:
            in_range = steps is None or steps[0] <= sample["step"] <= steps[1]
            if in_range and all(condition.holds(sample) for condition in conditions):
                group = by_step.setdefault(sample["step"], [])
                if not limit or len(group) < limit:
                    group.append(_plain(sample))
        samples.append(by_step)
    notes = [_note(view) for view in views if view.completions]
    if conditions:
        condition_text = " and ".join(f"{c.name} {c.comparison} {c.value:g}" for c in conditions)
        notes.append(f"Only completions with {condition_text} are on this page.")
    logged_steps = sorted({step for by_step in samples for step in by_step})
    if not logged_steps:
        notes.append("No completions to show: --config.log.completions=N logs N of each step.")
    page_steps = logged_steps
    if _size(samples, page_steps) > budget:
        shortened = sum(_shorten(s) for by_step in samples for g in by_step.values() for s in g)
        if shortened:
            notes.append(
                f"{shortened} completions or prompts are cut after {_LONGEST_TEXT:,} characters to "
                "keep this page small; completions.jsonl holds them whole."
            )
    stride = 1
    while page_steps and _size(samples, page_steps) > budget:
        stride *= 2
        page_steps = logged_steps[::-1][::stride][::-1] if stride < len(logged_steps) else []
    if len(page_steps) < len(logged_steps):
        notes.append(
            f"Completions of {len(logged_steps) - len(page_steps)} of {len(logged_steps)} steps "
            "are left out to keep this page small; completions.jsonl holds all, and "
            "--step=FROM:TO chooses others."
        )
    runs = [
        {
            "name": visible(view.name),
            "color": _COLORS[number % len(_COLORS)],
            "steps": {str(step): by_step[step] for step in page_steps if step in by_step},
        }
        for number, (view, by_step) in enumerate(zip(views, samples, strict=True))
    ]
    return runs, notes


def _note(view: View) -> str:
    more = (view.logged != view.sampled) * "; --config.log.completions=N logs more"
    return (
        f"{view.name}: the run logged {view.logged} of the {view.sampled} completions of a step"
        f"{more}."
    )


def _plain(sample: Mapping[str, Any]) -> dict[str, Any]:
    """A completion as the page needs it: safe texts, and numbers or null."""
    parts = {visible(k): v if is_number(v) else None for k, v in parts_of(sample).items()}
    texts = {
        key: visible(sample[key]) for key in ("prompt", "completion", "answer") if key in sample
    }
    if turns := conversation_of(sample):
        texts["completion"] = "\n".join(f"[{visible(r)}]\n{visible(text)}" for r, text in turns)
    numbers = {
        key: sample[key] if is_number(sample[key]) else None
        for key in ("reward", "advantage", "tokens")
        if key in sample
    }
    end = {"finished": bool(sample["finished"])} if "finished" in sample else {}
    return texts | numbers | end | {"parts": parts}


def _shorten(sample: dict[str, Any]) -> int:
    """Cuts the long texts of a completion, and returns their number."""
    long = [k for k in ("prompt", "completion", "answer") if len(sample.get(k, "")) > _LONGEST_TEXT]
    for key in long:
        sample[key] = sample[key][:_LONGEST_TEXT] + " ..."
    return len(long)


def _size(samples: Sequence[Mapping[int, list[dict[str, Any]]]], steps: Sequence[int]) -> int:
    selection = [[by_step[step] for step in steps if step in by_step] for by_step in samples]
    return len(_script_safe(selection).encode()) + 20 * len(steps) * len(samples)


def _script_safe(value: Any) -> str:
    """JSON that may stand in an element `script`: no text in it can end the element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


# --- Curves --------------------------------------------------------------------------------------

_WIDTH, _HEIGHT, _RIGHT, _BOTTOM, _TOP = 360, 170, 8, 20, 10
_MINUS = "\u2212"


def _figure(key: str, views: Sequence[View]) -> str:
    """A metric of all runs over the steps, as SVG, with the values for the page's script."""
    series = [_downsample(view.series(key)) for view in views]
    points = [point for curve in series for point in curve]
    low, high = min(v for _, v in points), max(v for _, v in points)
    first, last = min(s for s, _ in points), max(s for s, _ in points)
    high_text, low_text = _value_text(high), _value_text(low) if high > low else ""
    # A digit is at most 0.65 of the font's 11 units wide; the longest is as in "-1.23e-05".
    left = max(44, 10 + math.ceil(7.2 * max(len(high_text), len(low_text))))

    def project(step: float, value: float) -> tuple[float, float]:
        x = (step - first) / (last - first) if last > first else 0.5
        y = (value - low) / (high - low) if high > low else 0.5
        inner = _HEIGHT - _BOTTOM - _TOP
        return left + x * (_WIDTH - left - _RIGHT), _TOP + (1 - y) * inner

    lines = []
    for number, curve in enumerate(series):
        color = _COLORS[number % len(_COLORS)]
        positions = [project(*point) for point in curve]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in positions)
        if len(positions) > 1:
            lines.append(f'<polyline points="{path}" stroke="{color}"/>')
        if len(positions) <= 40:
            lines += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{color}"/>' for x, y in positions
            ]
    axis = f"M{left},{_TOP}V{_HEIGHT - _BOTTOM}H{_WIDTH - _RIGHT}"
    labels = [
        (left - 4, _TOP + 4, "end", high_text),
        (left - 4, _HEIGHT - _BOTTOM, "end", low_text),
        (left, _HEIGHT - 5, "start", f"step {first:.0f}"),
        (_WIDTH - _RIGHT, _HEIGHT - 5, "end", f"{last:.0f}" if last > first else ""),
    ]
    texts = "".join(
        f'<text x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>'
        for x, y, anchor, text in labels
    )
    name = html.escape(visible(key))
    values = [[[_short(step), _short(value)] for step, value in curve] for curve in series]
    curve_data = {"left": left, "right": _WIDTH - _RIGHT, "first": first, "last": last}
    data = html.escape(json.dumps(curve_data | {"curves": values}, separators=(",", ":")))
    return (
        f"<figure><figcaption>{name} <output></output></figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{name}" '
        f'data-values="{data}">'
        f'<path d="{axis}"/>{"".join(lines)}{texts}</svg></figure>'
    )


def _value_text(value: float) -> str:
    """A value of an axis, with the sign that typography has for minus."""
    return f"{value:.3g}".replace("-", _MINUS)


def _short(value: float) -> float:
    """A number of few digits, which makes the page small."""
    short = float(f"{value:.5g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _downsample(series: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
    """At most `_POINTS` points, each the mean of as many steps as needed."""
    size = -(-len(series) // _POINTS) or 1
    groups = [series[start : start + size] for start in range(0, len(series), size)]
    return [
        (statistics.fmean(s for s, _ in group), statistics.fmean(v for _, v in group))
        for group in groups
    ]
