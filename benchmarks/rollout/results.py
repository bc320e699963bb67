"""The rows of the rollout benchmarks: their file, and their form as a line and as a table."""

import datetime
import json
import pathlib
import platform
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Sequence

import jax
import jaxlib

from qerl_jax.errors import UserError
from qerl_jax.run.provenance import provenance, without_folders
from qerl_jax.system.atomic import write_json
from qerl_jax.system.staging import check_writable

_POLICY = (
    "kind", "model", "format", "weights", "lora_rank", "kv_cache_dtype", "head_format",
    "chunk_steps", "dequantize", "implementation", "tensor",
)  # fmt: skip
_STEPS = (*_POLICY, "batch", "prompt", "new_tokens")
_ROLLOUTS = (*_POLICY, "prompts", "group", "max_new_tokens")
KEYS = {
    "decode": _STEPS,
    "parts": _STEPS,
    "gsm8k": (*_ROLLOUTS, "rows"),
    "startup": (*_ROLLOUTS, "max_rows", "warm"),
    "agreement": ("kind", "model", "format", "lora_rank", "prompts", "max_new_tokens", "seed"),
}


def check_out(path: pathlib.Path, keys: Collection[str] = ()) -> None:
    """Refuses a file that could not take the result of a measurement, before the measurement.

    Args:
        path: value of --out.
        keys: fields that every row of the file must have; () for a file that is replaced.

    Raises:
        UserError: the file cannot be written, or holds something else.
    """
    if path.is_dir():
        raise UserError(f"{path}: it is a folder; pass a file as --out")
    check_writable(path)
    try:
        rows = json.loads(path.read_bytes())["rows"] if keys and path.exists() else []
        is_valid = all(row.keys() >= set(keys) for row in rows)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        is_valid = False
    if not is_valid:
        raise UserError(f"{path}: holds no rows of this benchmark; pass another --out")


def merge(path: pathlib.Path, device: str, rows: Iterable[dict]) -> None:
    """Writes rows to a JSON file, in place of the rows with the same keys.

    Raises:
        UserError: the file holds rows of another device, or something else.
    """
    result: dict = {"device": device, "rows": []}
    if path.exists():
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
            holder, by_key = result["device"], {_key(row): row for row in result["rows"]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path}: holds no rows of this benchmark; pass another --out"
            ) from error
        if holder != device:
            raise UserError(f"{path}: holds rows of {holder}, this is {device}; pass another --out")
    else:
        by_key = {}
    by_key |= {_key(row): row for row in rows}
    result["rows"] = [by_key[key] for key in sorted(by_key)]
    try:
        write_json(path, result, indent=1)
    except (OSError, UserError) as error:
        raise UserError(f"{path}: cannot write rows there ({error}); pass another --out") from error


def _key(row: dict) -> tuple:
    return tuple(row[name] for name in KEYS[row["kind"]])


def origin(module: str) -> dict:
    """Commit, date, versions and command of a row; of each path only the last part.

    The commit ends with `-dirty` if files differ from it, as with git describe. The environment
    variable QERL_COMMIT names it where git is absent.

    Args:
        module: name of the running module.
    """
    git = provenance()["git"] or {"commit": "unknown", "dirty": None}
    return {
        "commit": git["commit"] + ("-dirty" if git["dirty"] else ""),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "python": platform.python_version(),
        },
        "command": f"python -m {module} {without_folders(shlex.join(sys.argv[1:]))}",
    }


def numbers_of(row: dict) -> str:
    """How a row's policy is stored: 'nvfp4', or 'nvfp4, float8 cache, tensor=2'."""
    text = row["format"]
    if row["head_format"]:
        text += f", {row['head_format']} head"
    if row["kv_cache_dtype"].startswith("float8"):
        text += ", float8 cache"
    if row["tensor"] > 1:
        text += f", tensor={row['tensor']}"
    return text


def format_row(row: dict) -> str:
    """A row as one line of text."""
    name = f"{row['model']} {numbers_of(row)} lora {row['lora_rank']}"
    if row["kind"] == "startup":
        cached = "all" if row["warm"] else row["kept"]
        return (
            f"{name}, {row['prompts']} x {row['group']}: first tokens after "
            f"{row['first_tokens_s']:.1f} s, weights {row['weights_s']:.1f}, {row['programs']} "
            f"programs {row['compiled_s']:.1f}, {cached} of them in the cache"
        )
    memory = "" if row["peak_gb"] is None else f", {row['peak_gb']:.1f} GB"
    padding = f"{100 * row['padding_waste']:.1f} % padding"
    if row["kind"] == "gsm8k":
        return (
            f"{name}, {row['prompts']} x {row['group']}: {row['tokens_per_s']:,.0f} tokens/s, "
            f"{row['tokens']:,} in {row['seconds']:.1f} s, {100 * row['live_share']:.1f} % live, "
            f"{100 * row['finished']:.0f} % finished, {padding}{memory}"
        )
    share = row["roofline_share"]
    roofline = "" if share is None else f", {100 * share:.1f} % of the roofline"
    parts = "".join(f"\n    {part:18}{value:9.4f}" for part, value in row.get("parts", {}).items())
    return (
        f"{name}, batch {row['batch']}: {row['ms_per_step']:.3f} ms a step, "
        f"{row['tokens_per_s']:,.0f} tokens/s, prefill {row['prefill_tokens_per_s']:,.0f}"
        f"{roofline}, {padding}{memory}{parts}"
    )


def by_policy(rows: Iterable[dict], cell: Callable[[dict], str]) -> tuple[list[int], dict]:
    """The decode rows as a table.

    Args:
        rows: rows of any kind; only decode rows count.
        cell: function that gives the text of a row.

    Returns:
        The batch sizes, ascending, and for each policy (model, numbers, rank) its cells:
        one for each batch size, '' without a row.
    """
    cells: dict[tuple, dict[int, str]] = {}
    for row in rows:
        if row["kind"] == "decode":
            policy = row["model"], numbers_of(row), row["lora_rank"]
            cells.setdefault(policy, {})[row["batch"]] = cell(row)
    batches = sorted(set().union(*cells.values()))
    return batches, {policy: [c.get(b, "") for b in batches] for policy, c in cells.items()}


def table(rows: Sequence[dict]) -> str:
    """The decode rows as a table: milliseconds per step and tokens per second by policy."""
    batches, policies = by_policy(
        rows, lambda row: f"{row['ms_per_step']:.2f} ({row['tokens_per_s']:.0f})"
    )
    lines = [["model", "format", "lora", *map(str, batches)]] if policies else []
    lines += [[*map(str, policy), *cells] for policy, cells in policies.items()]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
