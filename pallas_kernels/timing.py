"""What commands that measure kernels share: arguments, times on the device, rows in JSON files."""

import argparse
import collections
import json
import pathlib
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import jax


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser without options, whose help shows a module's docstring as it is."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def user_path(text: str) -> pathlib.Path:
    """The path with `~` at its start expanded, which a shell leaves as it is in `--out=~/FILE`."""
    try:
        return pathlib.Path(text).expanduser()
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from error


def repeated(operation: Callable) -> jax.stages.Wrapped:
    """A program that calls an operation with each element of its arguments, which are lists.

    XLA would make one product of calls with the same tokens.
    """
    once = jax.jit(operation)  # so that it is lowered once

    def program(*args):
        return [once(*one) for one in zip(*args, strict=True)]

    return jax.jit(program)


def device_times(function: Callable, *args: Any) -> list[tuple[str, float]]:
    """Names and seconds of the kernels of one run, in order, by CUPTI, after a run to warm up."""
    from jax.experimental.mosaic.gpu import profiler

    _, kernels = profiler.measure(function, aggregate=False)(*args)
    return [(name, 1e-3 * milliseconds) for name, milliseconds in kernels or []]


def median_times(
    function: Callable, *args: Any, runs: int = 3, calls: int = 1, label: Callable = str
) -> tuple[float, dict[str, float]]:
    """The seconds of one of a function's calls, and of its kernels: medians of several runs.

    `label` gives the name under which the kernels of a name are added up.
    """
    measured = []
    for _ in range(runs):
        times: dict[str, float] = collections.defaultdict(float)
        for name, seconds in device_times(function, *args):
            times[label(name)] += seconds / calls
        measured.append(times)
    return medians(measured)


def medians(runs: list[dict[str, float]]) -> tuple[float, dict[str, float]]:
    """The median of the sums of runs, each the seconds of kernels by name; and of each kernel."""
    kernels = {name: statistics.median(run.get(name, 0.0) for run in runs) for name in runs[0]}
    return statistics.median(sum(run.values()) for run in runs), kernels


def merged(rows: Iterable[dict], *fields: str) -> list[dict]:
    """The rows sorted by some fields; of those that are equal in them, the last one."""
    last = {tuple(row[field] for field in fields): row for row in rows}
    return [last[key] for key in sorted(last)]


def write_json(path: pathlib.Path, content: Any) -> None:
    """Writes a JSON file, in a folder that may not exist yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
