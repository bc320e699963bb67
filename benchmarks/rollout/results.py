"""What tells the rows of the rollout benchmarks apart, and their decode rows by policy."""

from collections.abc import Callable, Iterable

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
