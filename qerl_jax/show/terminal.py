"""Runs on a plain terminal: curves of block characters, then completions step by step."""

import itertools
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from qerl_jax.errors import visible
from qerl_jax.run.lines import format_row
from qerl_jax.show.columns import pad, shorten, width, wrap
from qerl_jax.show.view import Condition, View, conversation_of, curves, parts_of
from qerl_jax.system.jsonl import is_number

BLOCKS = " ▁▂▃▄▅▆▇█"
_ASCII = " .:-=+*#%"
_GAP = " | "
_FEWEST_COLUMNS = 20  # of a text, whatever the terminal has
# Columns of the name of a curve, of its first and last value, and of the curve itself, at least.
_LABEL, _NUMBERS, _SHORTEST_CURVE = 26, 20, 16


def show(
    views: Sequence[View],
    write: Callable[[str], object],
    *,
    steps: tuple[int, int] | None,
    conditions: Sequence[Condition] = (),
    limit: int = 0,
    columns: int = 80,
    unicode: bool = True,
) -> None:
    """Writes the curves of runs and the completions of some steps.

    Args:
        views: the runs; two are shown side by side, more below each other.
        write: receives each line.
        steps: first and last step whose completions are shown; None is the last step of which all
            runs have some, or else the last of all.
        conditions: what completions must fulfill.
        limit: largest number of completions of a step; 0 is all.
        columns: width of the terminal.
        unicode: whether the terminal can show block characters.
    """

    def say(line: str) -> None:
        write(visible(line))

    for view in views:
        source, form = view.setting("model.source"), view.setting("model.format")
        say(f"{view.name}: {view.state}")
        say(f"  {source} in {form}, preset {view.setting('preset', '')}")
    say("")
    for line in _curve_lines(views, columns, BLOCKS if unicode else _ASCII):
        say(line)
    logged = sorted({step for view in views for step in view.steps()})
    if all(view.setting("sft.rows_per_step") for view in views):
        return  # They learn from text, and sample nothing.
    if not logged:
        say("no completions are logged" + _advice(views))
        return
    shared = set(logged).intersection(*(view.steps() for view in views))
    latest = max(shared or logged)
    first, last = steps or (latest, latest)
    selection = [step for step in logged if first <= step <= last]
    if not selection:
        say(f"no completions in the steps {first} to {last}; {_steps_with_completions(logged)}")
        return
    count = 0
    for step in selection:
        count += _show_step(views, say, step, conditions, limit, columns)
    if conditions and not count:
        say("no completion fulfills --where in these steps")
    if steps is None and len(logged) > 1:
        say(f"--step=N, --step=FROM:TO and --step=all show more: {_steps_with_completions(logged)}")
    say("a step shows the completions that the run logged" + _advice(views))


def _steps_with_completions(logged: Sequence[int]) -> str:
    return f"{len(logged)} steps from {logged[0]} to {logged[-1]} have completions"


def _advice(views: Sequence[View]) -> str:
    text = ", ".join(f"{view.logged} of {view.sampled}" for view in views)
    more = any(view.logged != view.sampled for view in views)
    return f" ({text} of a step)" + more * "; --config.log.completions=N logs more"


def _curve_lines(views: Sequence[View], columns: int, blocks: str) -> list[str]:
    """A line for each metric and run: first and last value, and the curve."""
    (keys, unchanged), lines, rows = curves(views), [], []
    end = max((step for view in views for key in keys for step, _ in view.series(key)), default=0)
    for key in keys:
        series = [view.series(key) for view in views]
        values = [value for curve in series for _, value in curve]
        for number, curve in enumerate(series):
            suffix = "" if len(views) == 1 else f" ({number + 1})"
            text = f"{_number(curve[0][1])} -> {_number(curve[-1][1])}" if curve else "not logged"
            rows.append((visible(key), suffix, text, curve, (min(values), max(values))))
    # Every curve begins in the same column, after the longest name and the longest numbers.
    numbers = max([_NUMBERS, *(width(text) for _, _, text, _, _ in rows)])
    longest = max([_LABEL, *(width(name + suffix) for name, suffix, _, _, _ in rows)])
    label = min(longest, max(12, columns - numbers - 2 - _SHORTEST_CURVE))
    bar_columns = max(_SHORTEST_CURVE, columns - label - numbers - 2)
    for name, suffix, text, curve, limits in rows:
        head = f"{pad(shorten(name, label - width(suffix)) + suffix, label)} {pad(text, numbers)} "
        lines.append((head + _bars(curve, end, bar_columns, limits, blocks)).rstrip())
    if unchanged:
        values = ", ".join(f"{visible(key)} {_number(v)}" for key, v in unchanged.items())
        lines += textwrap.wrap(f"unchanged: {values}", columns)
    if len(views) > 1 and lines:
        names = ", ".join(f"({number}) {visible(v.name)}" for number, v in enumerate(views, 1))
        lines.append(f"runs: {names}")
    return [*lines, ""] if lines else ["no step is logged yet", ""]


def _bars(
    series: Sequence[tuple[int, float]],
    end: int,
    columns: int,
    limits: tuple[float, float],
    blocks: str,
) -> str:
    """A character for each range of steps: the mean of its values; a space without values."""
    columns = min(columns, end + 1)
    values_by_column: dict[int, list[float]] = {}
    for step, value in series:
        values_by_column.setdefault(step * columns // (end + 1), []).append(value)
    low, high = limits
    text = ""
    for column in range(columns):
        if column in values_by_column:
            level = (
                (statistics.fmean(values_by_column[column]) - low) / (high - low)
                if high > low
                else 0.5
            )
            text += blocks[1 + min(7, int(level * 8))]
        else:
            text += " "
    return text


def _show_step(
    views: Sequence[View],
    write: Callable[[str], object],
    step: int,
    conditions: Sequence[Condition],
    limit: int,
    columns: int,
) -> int:
    """Writes the completions of a step, and returns their number."""
    selection = []
    for view in views:
        samples = [
            sample
            for sample in view.completions
            if sample["step"] == step and all(c.holds(sample) for c in conditions)
        ]
        selection.append(samples[: limit or None])
    count = sum(map(len, selection))
    if conditions and not count:
        return 0
    for view in views:
        total = view.setting("steps")
        for row in view.rows:
            if row["step"] == step:
                # An extended run keeps the number of its first start.
                last = max(view.rows[-1]["step"], total if isinstance(total, int) else 0)
                write(format_row(row, last, columns))
    if len(views) == 2:
        half = max(_FEWEST_COLUMNS, (columns - len(_GAP)) // 2)
        for sample_left, sample_right in itertools.zip_longest(*selection):
            blocks = [
                _block(sample, step, half) if sample else []
                for sample in (sample_left, sample_right)
            ]
            for line_left, line_right in itertools.zip_longest(*blocks, fillvalue=""):
                write(f"{pad(line_left, half)}{_GAP}{line_right}".rstrip())
            write("")
        return count
    for view, samples in zip(views, selection, strict=True):
        if len(views) > 1 and samples:
            write(f"=== {visible(view.name)}")
        for sample in samples:
            for line in _block(sample, step, max(_FEWEST_COLUMNS, columns)):
                write(line)
            write("")
    return count


def _block(sample: Mapping[str, Any], step: int, columns: int) -> list[str]:
    """The lines of a completion: its rewards, prompt, text and expected answer."""
    parts = ", ".join(f"{name} {_number(value)}" for name, value in parts_of(sample).items())
    facts = [f"--- step {step}: reward {_number(sample.get('reward'))} ({parts})"]
    if is_number(sample.get("advantage")):
        facts.append(f"advantage {sample['advantage']:+.3f}")
    if is_number(sample.get("tokens")):
        facts.append(f"{sample['tokens']} tokens")
    if "finished" in sample:
        facts.append("finished" if sample["finished"] else "cut off")
    if isinstance(sample.get("ending"), str):
        facts.append(f"ended by {sample['ending']}")
    lines = wrap(visible(", ".join(facts)), columns)
    for title in ("prompt", "completion", "answer"):
        if title == "completion" and (turns := conversation_of(sample)):
            for role, text in turns:
                lines.append(f"{visible(role)}:")
                lines += [f"  {line}" for line in wrap(visible(text), columns - 2)]
        elif title in sample:
            lines.append(f"{title}:")
            lines += [f"  {line}" for line in wrap(visible(sample[title]), columns - 2)]
    return lines


def _number(value: Any) -> str:
    return f"{value:.4g}" if is_number(value) else "-"
