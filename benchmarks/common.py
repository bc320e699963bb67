"""What the benchmarks share: the row of a measurement, its origin, its file, its line of text."""

import argparse
import concurrent.futures
import datetime
import json
import multiprocessing
import pathlib
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pallas_kernels.provenance import git_state
from qerl_jax.errors import UserError
from qerl_jax.run.provenance import versions, without_folders
from qerl_jax.system.atomic import write_json
from qerl_jax.system.paths import user_path
from qerl_jax.system.staging import check_writable

type Keys = Sequence[str] | Mapping[str, Sequence[str]]

ORIGIN = ("commit", "date", "versions", "command")
_BY_PROBLEM = "solved"  # the name of a figure that is too long for a line


def make_parser(module: str, description: str | None, out: str = "") -> argparse.ArgumentParser:
    """A parser whose --help is a module's docstring, with --out, required without a default."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = f" (default: {out})" if out else ""
    parser.add_argument(
        "--out",
        type=user_path,
        required=not out,
        default=out or None,
        help=f"JSON file of the rows{default}",
    )
    return parser


def origin(module: str) -> dict[str, Any]:
    """Commit, date, versions and command of a row; of each path only the last part.

    The commit ends with `-dirty` if files differ from it, as with git describe. The environment
    variable QERL_COMMIT names it where git is absent.
    """
    git, installed = git_state() or {"commit": "unknown", "dirty": None}, versions()
    return {
        "commit": git["commit"] + ("-dirty" if git["dirty"] else ""),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {name: installed[name] for name in ("jax", "jaxlib", "python")},
        "command": f"python -m {module} {without_folders(shlex.join(sys.argv[1:]))}",
    }


def read_rows(path: pathlib.Path, keys: Keys, device: str = "") -> list[dict[str, Any]]:
    """The rows of a JSON file, {rows: [...]} or {device, rows: [...]}; [] without a file.

    Every row has the fields `keys`; `device` is the kind of the device of a file that has only one.

    Raises:
        UserError: the file holds something else, or rows of another device.
    """
    wrong = UserError(f"{path}: holds no rows of this benchmark; pass another --out")
    try:
        content = json.loads(path.read_bytes()) if path.exists() else {"rows": [], "device": device}
        rows, holder = content["rows"], content["device"] if device else ""
        if not all(row.keys() >= set(_keys_of(row, keys)) for row in rows):
            raise wrong
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise wrong from error
    if holder != device:
        raise UserError(f"{path}: holds rows of {holder}, this is {device}; pass another --out")
    return rows


def _keys_of(row: Mapping[str, Any], keys: Keys) -> Sequence[str]:
    return keys[row["kind"]] if isinstance(keys, Mapping) else keys


def check_out(path: pathlib.Path, keys: Keys = (), device: str = "") -> None:
    """Refuses a file that could not take the rows of a measurement, before the measurement.

    Without `keys` the file is replaced.

    Raises:
        UserError: the file cannot be written, or holds something else.
    """
    if path.is_dir():
        raise UserError(f"{path}: it is a folder; pass a file as --out")
    check_writable(path)
    if keys:
        read_rows(path, keys, device)


def merge(path: pathlib.Path, row: Mapping[str, Any], keys: Keys, device: str = "") -> None:
    """Prints a row and writes it to a JSON file, in place of the row with the same keys.

    `keys` are the fields that tell rows apart, by the `kind` of a row where they differ.
    """
    print(describe(row, _keys_of(row, keys)), flush=True)
    by_key = {
        tuple(other[key] for key in _keys_of(other, keys)): other
        for other in [*read_rows(path, keys, device), row]
    }
    content = ({"device": device} if device else {}) | {"rows": [by_key[k] for k in sorted(by_key)]}
    write_json(path, content, indent=1)


def describe(row: Mapping[str, Any], keys: Sequence[str]) -> str:
    """A row as one line of text: the fields that tell it apart, then its figures."""
    settings = (f"{key}={row[key]}" for key in keys if row[key] != "")
    hidden = (*keys, *ORIGIN, _BY_PROBLEM)
    figures = {name: value for name, value in row.items() if name not in hidden}
    return f"{' '.join(settings)}: {', '.join(_figures(figures))}"


def _figures(row: Mapping[str, Any]) -> Iterator[str]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield f"{name} ({', '.join(_figures(value))})"
        elif isinstance(value, float):
            yield f"{name} {value:,.0f}" if abs(value) >= 1000 else f"{name} {value:.4g}"
        elif value is not None:
            yield f"{name} {value}"


def in_process[Result](function: Callable[..., Result], *arguments: Any) -> Result:
    """Calls a function in a process of its own, which alone takes the device."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as process:
        return process.submit(function, *arguments).result()


def peak_gb() -> float | None:
    """The largest memory of the device so far in 10^9 bytes; None where it is not known."""
    import jax

    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return None if peak is None else peak / 1e9
