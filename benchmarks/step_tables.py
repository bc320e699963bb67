"""Tables of training steps, here and of other libraries, made of rows of benchmarks/results/."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from benchmarks.result_tables import markdown, table


def step_table(rows: Iterable[dict]) -> str:
    """Seconds and memory of every step that was measured, by model, card and weights.

    Args:
        rows: rows of step.json.
    """

    def devices(row: dict) -> str:
        processes = f", {row['processes']} processes" if row["processes"] > 1 else ""
        mesh = f" ({row['mesh']}{processes})" if row["devices"] > 1 else ""
        return f"{row['devices']} x {short_name(row['device'])}{mesh}"

    def completions(row: dict) -> str:
        length = f"mean {row['mean_length']}, at most " if row["mean_length"] else ""
        return f"{row['batch']} x {row['prompt']} + {length}{row['new_tokens']:,}"

    columns = {
        "model": "{model}",
        "weights": "{format}",
        "GPUs": devices,
        "completions": completions,
        "updates": "{updates}",
        "rollout s": "{rollout_s:.2f}",
        "update s": "{update_s:.2f}",
        "step s": "{step_s:.2f}",
        "update tokens/s": "{update_tokens_per_s:,.0f}",
        "buffers": "{update_buffers:.0f} x {buffer_tokens:,}",
        "recomputed": lambda row: "" if row["recompute"] == "none" else row["recompute"],
        "peak GB": "{peak_gb:.1f}",
        "plan GB": "{plan_gb:.1f}",
        "pool GB": lambda row: f"{pool:.1f}" if (pool := row.get("pool_gb")) else "",
        "commit": "{commit:.8}",
    }

    def order(row: dict) -> tuple:
        numbers = (row[name] for name in ("devices", "batch", "prompt", "new_tokens"))
        return _billions(row["model"]), row["device"], row["format"], *numbers

    return table(columns, sorted(rows, key=order))


def short_name(device: str) -> str:
    """The name of a card without its maker and memory, such as H100."""
    return device.removeprefix("NVIDIA ").partition(" ")[0]


def peer_steps(rows: Iterable[dict]) -> dict[tuple, list[dict]]:
    """The whole steps of peers by model, completions, lengths and card.

    Of a peer that was measured with several formats of the rollouts, only the fastest step is kept.

    Returns:
        For each (model, batch, prompt, new tokens, device) its rows, in the order of their peers.
    """
    fastest: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        if row["step_s"] is not None:
            key = tuple(row[name] for name in ("model", "batch", "prompt", "new_tokens", "device"))
            by_peer = fastest.setdefault(key, {})
            best = by_peer.get(row["peer"])
            if best is None or row["step_s"] < best["step_s"]:
                by_peer[row["peer"]] = row
    order = sorted(fastest, key=lambda key: (_billions(key[0]), *key[1:]))
    return {key: [fastest[key][name] for name in sorted(fastest[key])] for key in order}


def _billions(model: str) -> tuple[float, str]:
    """Orders models by the size in their names."""
    size = model.rpartition("-")[2]
    return (float(size[:-1]) if size[:-1].replace(".", "").isdecimal() else 0.0, model)


def peer_steps_table(rows: Iterable[dict], our_rows: Iterable[dict]) -> str:
    """Steps here beside those of peers: seconds (rollout + update), peak memory, tokens/s.

    The column of our step in NVFP4 says how much faster it is than each of the others.

    Args:
        rows: rows of peers.json.
        our_rows: rows of step.json, for bf16 LoRA in this engine.
    """
    steps, lines = peer_steps(rows), []
    names = _peers(steps)
    for key, our_step, others in _compared_steps(steps, our_rows):
        model, batch, prompt, new_tokens, _ = key
        factors = ", ".join(
            f"{faster(row['step_s'], our_step['step_s'])} than {name}"
            for name, row in zip(["bf16 LoRA here", *names], others, strict=True)
            if row
        )
        lines.append(
            [
                model,
                f"{batch} x {prompt} + {new_tokens:,}",
                f"{_step_cell(our_step, batch * new_tokens)}; {factors}",
                *(_step_cell(row, batch * new_tokens) if row else "" for row in others),
                ", ".join(sorted({row["commit"][:8] for row in steps[key]})),
            ]
        )
    header = ["model", "completions", "here, NVFP4", _BF16, *names, "commit"]
    return markdown(header, lines)


def short_steps_table(rows: Iterable[dict], our_rows: Iterable[dict]) -> str:
    """The same in a few figures: seconds and peak memory, and how much faster ours is.

    Args:
        rows: rows of peers.json.
        our_rows: rows of step.json, for bf16 LoRA in this engine.
    """
    steps, lines = peer_steps(rows), []
    for key, ours, others in _compared_steps(steps, our_rows):
        fastest = min(steps[key], key=lambda row: row["step_s"])
        factor = f"{faster(fastest['step_s'], ours['step_s'])} than {fastest['peer']}"
        lines.append(
            [
                key[0],
                f"{_short_cell(ours)}: **{factor}**",
                *(_short_cell(row) if row else "" for row in others),
            ]
        )
    return markdown(["model", "here, NVFP4", _BF16, *_peers(steps)], lines)


def _peers(steps: Mapping[tuple, list[dict]]) -> list[str]:
    return sorted({row["peer"] for peer_rows in steps.values() for row in peer_rows})


def _compared_steps(
    steps: Mapping[tuple, list[dict]], our_rows: Iterable[dict]
) -> Iterator[tuple[tuple, dict[str, Any], list[dict | None]]]:
    """Yields the key of a step, our figures in NVFP4, and the rows that they are compared with.

    Args:
        steps: the steps of peers, from `peer_steps`.
        our_rows: rows of step.json, for bf16 LoRA in this engine.

    Yields:
        The compared rows begin with bf16 LoRA here and go on in the order of `_peers`; None where a
        step was not measured.
    """
    bf16, names = _bf16_steps(our_rows), _peers(steps)
    for key, peer_rows in steps.items():
        by_peer = {row["peer"]: row for row in peer_rows}
        ours = {name: peer_rows[0][f"our_{name}"] for name in _MEASURED}
        yield key, ours, [bf16.get(key), *map(by_peer.get, names)]


def faster(seconds: float, our_seconds: float) -> str:
    """How our time is compared with another: '2.2x faster', or '1.3x slower'."""
    if seconds >= our_seconds:
        return f"{seconds / our_seconds:.1f}x faster"
    return f"{our_seconds / seconds:.1f}x slower"


def _short_cell(row: Mapping[str, Any]) -> str:
    peak = "" if row["peak_gb"] is None else f", {row['peak_gb']:.1f} GB"
    return f"{row['step_s']:.1f} s{peak}"


def _bf16_steps(our_rows: Iterable[dict]) -> dict[tuple, dict]:
    """Our steps in bf16 by model, completions, lengths and card."""
    names = ("model", "batch", "prompt", "new_tokens", "device")
    return {
        tuple(row[name] for name in names): row
        for row in our_rows
        if row["format"] == "bf16" and row["updates"] == 1 and not row["mean_length"]
    }


_BF16 = "here, bf16 LoRA"
_MEASURED = ("step_s", "rollout_s", "update_s", "peak_gb")


def _step_cell(row: Mapping[str, Any], tokens: int) -> str:
    """A step as '13.2 s (11.0 + 2.2), 37.8 GB, 1,240 tokens/s'."""
    peak = "" if row["peak_gb"] is None else f", {row['peak_gb']:.1f} GB"
    return (
        f"{row['step_s']:.1f} s ({row['rollout_s']:.1f} + {row['update_s']:.1f}){peak}, "
        f"{tokens / row['step_s']:,.0f} tokens/s"
    )


def peer_parts_table(rows: Iterable[dict]) -> str:
    """Rollouts and updates of peers alone, and beside them ours, with how much faster they are."""
    lines = []
    for row in sorted(rows, key=lambda row: (row["peer"], _billions(row["model"]), row["batch"])):
        cells = []
        for name in ("rollout_s", "update_s"):
            theirs, ours = row[name], row[f"our_{name}"]
            cells += (
                ["", ""]
                if theirs is None
                else [f"{theirs:.2f}", f"{ours:.2f} ({faster(theirs, ours)})"]
            )
        formats = dict.fromkeys(filter(None, (row["format"], row["rollout_format"])))
        lines.append(
            [
                row["peer"],
                row["model"],
                ", rollouts ".join(formats),
                f"{row['batch']} x {row['prompt']} + {row['new_tokens']:,}",
                *cells,
                "" if row["peak_gb"] is None else f"{row['peak_gb']:.1f}",
                row["commit"][:8],
            ]
        )
    header = (
        "peer", "model", "base weights", "completions", "rollout s", "here", "update s", "here",
        "peak GB", "commit",
    )  # fmt: skip
    return markdown(header, lines)


def peer_packages(rows: Iterable[dict]) -> str:
    """The packages of all peers with their versions, as `name version, name version`."""
    return ", ".join(
        dict.fromkeys(package for row in rows for package in row["packages"].split(", "))
    )


def adapter_sentence(rows: Iterable[dict]) -> str:
    """How much longer vLLM's rollouts take where each one begins with a new adapter.

    Args:
        rows: rows of peers.json; those of vLLM alone keep one adapter.

    Returns:
        A sentence, which is empty unless both were measured at the same size.
    """
    key_names = ("model", "rollout_format", "batch", "prompt", "new_tokens", "device")
    rows = sorted(rows, key=lambda row: _billions(row["model"]))
    alone = {tuple(row[name] for name in key_names): row for row in rows if row["peer"] == "vLLM"}
    pairs = [
        (row, alone[key])
        for row in rows
        if row["peer"] == "TRL (QLoRA) + vLLM"
        and (key := tuple(row[name] for name in key_names)) in alone
    ]
    texts = [
        f"{row['rollout_s'] - alone_row['rollout_s']:.1f} s ({row['model']})"
        for row, alone_row in pairs
    ]
    if not pairs:
        return ""
    first = pairs[0][0]
    return (
        "In a QLoRA step the trainer writes its adapter and vLLM reads it before each rollout: "
        f"{first['batch']} completions in {first['rollout_format']} then take "
        f"{' and '.join(texts)} longer than in vLLM with one adapter."
    )
