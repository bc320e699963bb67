"""Tables of training steps, here and of other libraries, made of rows of benchmarks/results/."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from benchmarks.result_tables import filled, short_name, table

_SIZE = ("model", "batch", "prompt", "new_tokens", "device")
_MEASURED = ("step_s", "rollout_s", "update_s", "peak_gb")
_BF16 = "here, bf16 LoRA"
_COMPLETIONS = ("completions", "{batch} x {prompt} + {new_tokens:,}")


# --- Our steps ----------------------------------------------------------------------------------


def step_table(rows: Iterable[dict]) -> str:
    """Seconds and memory of every step that was measured, by model, card and weights."""

    def devices(row: dict) -> str:
        processes = f", {row['processes']} processes" if row["processes"] > 1 else ""
        mesh = f" ({row['mesh']}{processes})" if row["devices"] > 1 else ""
        return f"{row['devices']} x {short_name(row['device'])}{mesh}"

    def completions(row: dict) -> str:
        length = f"mean {row['mean_length']}, at most " if row["mean_length"] else ""
        return f"{row['batch']} x {row['prompt']} + {length}{row['new_tokens']:,}"

    columns = [
        ("model", "{model}"),
        ("weights", "{format}"),
        ("GPUs", devices),
        ("completions", completions),
        ("updates", "{updates}"),
        ("rollout s", "{rollout_s:.2f}"),
        ("update s", "{update_s:.2f}"),
        ("step s", "{step_s:.2f}"),
        ("update tokens/s", "{update_tokens_per_s:,.0f}"),
        ("buffers", "{update_buffers:.0f} x {buffer_tokens:,}"),
        ("recomputed", lambda row: "" if row["recompute"] == "none" else row["recompute"]),
        ("peak GB", "{peak_gb:.1f}"),
        ("plan GB", "{plan_gb:.1f}"),
        ("pool GB", lambda row: f"{pool:.1f}" if (pool := row.get("pool_gb")) else ""),
        ("commit", "{commit:.8}"),
    ]

    def order(row: dict) -> tuple:
        numbers = (row[name] for name in ("devices", "batch", "prompt", "new_tokens"))
        return _billions(row["model"]), row["device"], row["format"], *numbers

    return table(columns, sorted(rows, key=order))


def preset_table(rows: Iterable[dict]) -> str:
    """Memory and seconds of presets that were not trained, of a step with random weights each."""

    def work(row: dict) -> str:
        products = row["recompute"].replace(",", ", ")
        suffix = "" if products == "none" else f"; recomputed: {products}"
        return filled(
            "a step of {batch} rows, {prompt} + {new_tokens:,} tokens each, random weights: "
            f"rollout {{rollout_s:.1f}} s, update {{update_s:.1f}} s{suffix}",
            row,
        )

    columns = [
        ("preset", "`{model}`"),
        ("measured on", lambda row: f"{row['devices']} x {row['device']}".removeprefix("1 x ")),
        ("peak memory", "{peak_gb:.1f} GB"),
        ("a step", "{step_s:.1f} s"),
        ("what it does", work),
    ]
    return table(columns, rows)


def scaling_table(rows: Iterable[dict]) -> str:
    """Completions per second of a step on several GPUs, where one GPU was measured, too."""
    columns = [
        ("model", "{model}"),
        ("GPUs", "{devices} x {device}"),
        ("mesh", "{mesh}"),
        ("processes", "{processes}"),
        ("completions", "{batch} x {prompt} + {new_tokens}"),
        ("rollout s", "{rollout_s:.2f}"),
        ("step s", "{step_s:.2f}"),
        ("completions/s", "{samples_per_s:.2f}"),
        (
            "against one GPU",
            lambda row: f"{row['samples_per_s'] / row['samples_per_s_of_one']:.2f}",
        ),
        ("commit", "{commit:.8}"),
    ]
    return table(columns, (row for row in rows if row.get("samples_per_s_of_one")))


def environment_scaling_table(rows: Iterable[dict]) -> str:
    """The same of conversations with environments, where one GPU took such steps, too."""
    rows = [row | {"new_tokens": "{turns} x {turn_tokens}".format_map(row)} for row in rows]

    def case(row: dict) -> tuple:
        names = ("model", "device", "prompt", "new_tokens", "commit")
        return *map(row.get, names), row["batch"] // row["devices"]

    rates = {case(row): row["samples_per_s"] for row in rows if row["devices"] == 1}
    return scaling_table(row | {"samples_per_s_of_one": rates.get(case(row))} for row in rows)


def largest_scaling(rows: Iterable[dict]) -> str:
    """The largest number of completions per second on several GPUs against one, by model."""
    best: dict[str, tuple[int, float]] = {}
    for row in rows:
        if single_rate := row.get("samples_per_s_of_one"):
            scaling = row["devices"], row["samples_per_s"] / single_rate
            best[row["model"]] = max(scaling, best.get(row["model"], scaling))
    return ", ".join(f"{ratio:.2f} on {n} GPUs ({model})" for model, (n, ratio) in best.items())


def long_rows_table(rows: Iterable[dict], published: Iterable[dict]) -> str:
    """Updates on rows that were drawn, and the figures that other libraries publish."""

    def optional(name: str, form: str) -> Callable[[dict], str]:
        return lambda row: "" if row[name] is None else format(row[name], form)

    ours = [
        row
        | {
            "library": "here",
            "tokens": row["prompt"] + row["new_tokens"],
            "tokens_per_s": row["update_tokens_per_s"],
            "origin": f"commit {row['commit']:.8}",
        }
        for row in rows
    ]
    theirs = [row | {"origin": f"[published]({row['source']}), {row['date']}"} for row in published]
    columns = [
        ("library", "{library}"),
        ("model", "{model}"),
        ("weights", "{format}"),
        ("rows x tokens", lambda row: f"{row['batch'] or '?'} x {row['tokens']:,}"),
        ("LoRA rank", optional("lora_rank", "d")),
        ("update s", optional("update_s", ".2f")),
        ("tokens/s", optional("tokens_per_s", ",.0f")),
        ("peak GB", "{peak_gb:.1f}"),
        ("recomputed", lambda row: row["recompute"] or "?"),
        ("card", "{device}"),
        ("from", "{origin}"),
    ]
    order = sorted(
        [*ours, *theirs], key=lambda row: (_billions(row["model"].lower())[0], row["tokens"])
    )
    return table(columns, order)


# --- Steps of other libraries -------------------------------------------------------------------


def peer_steps(rows: Iterable[dict]) -> dict[tuple, list[dict]]:
    """The rows of peers with whole steps by model, completions, lengths and card.

    Of a peer that was measured with several formats of the rollouts, only the fastest step is kept.
    """
    fastest: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        if row["step_s"] is not None:
            by_peer = fastest.setdefault(_size(row), {})
            best = by_peer.get(row["peer"])
            if best is None or row["step_s"] < best["step_s"]:
                by_peer[row["peer"]] = row
    order = sorted(fastest, key=lambda key: (_billions(key[0]), *key[1:]))
    return {key: [fastest[key][name] for name in sorted(fastest[key])] for key in order}


def _size(row: Mapping[str, Any]) -> tuple:
    return tuple(row[name] for name in _SIZE)


def _billions(model: str) -> tuple[float, str]:
    """Orders models by the size in their names."""
    size = re.search(r"-([\d.]+)[bm](?=-|$)", model)  # of all experts, which comes first
    return float(size[1]) if size else 0.0, model


def peer_steps_table(rows: Iterable[dict], our_rows: Iterable[dict]) -> str:
    """Steps here beside those of peers: seconds (rollout + update), peak memory, tokens/s.

    The column of our step in NVFP4 says how much faster it is than each of the others.
    """

    def ours(line: dict) -> str:
        factors = ", ".join(
            f"{faster(row['step_s'], line['ours']['step_s'])} than "
            + ("bf16 LoRA here" if name == _BF16 else name)
            for name, row in line["others"].items()
            if row
        )
        return f"{cell(line['ours'], line)}; {factors}"

    def cell(row: Mapping[str, Any], line: dict) -> str:
        """A step as '13.2 s (11.0 + 2.2), 37.8 GB, 1,240 tokens/s'."""
        seconds = filled("{step_s:.1f} s ({rollout_s:.1f} + {update_s:.1f})", row)
        tokens = line["batch"] * line["new_tokens"]
        return f"{seconds}{_peak(row)}, {tokens / row['step_s']:,.0f} tokens/s"

    lines = list(_compared_steps(rows, our_rows))
    columns = [
        ("model", "{model}"),
        _COMPLETIONS,
        ("here, NVFP4", ours),
        *(
            (name, lambda line, name=name: cell(row, line) if (row := line["others"][name]) else "")
            for name in lines[0]["others"]
        ),
        ("commit", "{commits}"),
    ]
    return table(columns, lines)


def short_steps_table(rows: Iterable[dict], our_rows: Iterable[dict]) -> str:
    """The same for the most completions of each model: seconds, peak memory, how much faster."""

    def ours(line: dict) -> str:
        peers = [(row["step_s"], name) for name, row in line["others"].items() if row]
        seconds, name = min(peer for peer in peers if peer[1] != _BF16)
        return f"{cell(line['ours'])}: **{faster(seconds, line['ours']['step_s'])} than {name}**"

    def cell(row: Mapping[str, Any]) -> str:
        return filled("{step_s:.1f} s", row) + _peak(row)

    lines = {line["model"]: line for line in _compared_steps(rows, our_rows)}
    columns = [
        ("model", "{model}"),
        ("here, NVFP4", ours),
        *(
            (name, lambda line, name=name: cell(row) if (row := line["others"][name]) else "")
            for name in next(iter(lines.values()))["others"]
        ),
    ]
    return table(columns, lines.values())


def _compared_steps(rows: Iterable[dict], our_rows: Iterable[dict]) -> Iterator[dict[str, Any]]:
    """Yields the steps that a peer was measured in, smaller models and fewer completions first.

    They have the fields of `_SIZE`, `commits`, `ours` in NVFP4, and `others` by name: bf16 LoRA
    here and every peer, None where it was not measured.
    """
    steps = peer_steps(rows)
    bf16 = {
        _size(row): row
        for row in our_rows
        if row["format"] == "bf16" and row["updates"] == 1 and not row["mean_length"]
    }
    names = sorted({row["peer"] for peer_rows in steps.values() for row in peer_rows})
    for key, peer_rows in steps.items():
        by_peer = {row["peer"]: row for row in peer_rows}
        yield dict(zip(_SIZE, key, strict=True)) | {
            "commits": ", ".join(sorted({row["commit"][:8] for row in peer_rows})),
            "ours": {name: peer_rows[0][f"our_{name}"] for name in _MEASURED},
            "others": {_BF16: bf16.get(key)} | {name: by_peer.get(name) for name in names},
        }


def faster(seconds: float, our_seconds: float) -> str:
    """How our time is compared with another: '2.2x faster', or '1.3x slower'."""
    if seconds >= our_seconds:
        return f"{seconds / our_seconds:.1f}x faster"
    return f"{our_seconds / seconds:.1f}x slower"


def _peak(row: Mapping[str, Any]) -> str:
    return "" if row["peak_gb"] is None else f", {row['peak_gb']:.1f} GB"


def peer_parts_table(rows: Iterable[dict]) -> str:
    """Rollouts and updates of peers alone, and beside them ours, with how much faster they are."""

    def ours(name: str, row: dict) -> str:
        theirs, our_seconds = row[name], row[f"our_{name}"]
        return "" if theirs is None else f"{our_seconds:.2f} ({faster(theirs, our_seconds)})"

    def formats(row: dict) -> str:
        return ", rollouts ".join(
            dict.fromkeys(filter(None, (row["format"], row["rollout_format"])))
        )

    def optional(name: str, form: str, row: dict) -> str:
        return "" if row[name] is None else format(row[name], form)

    columns = [
        ("peer", "{peer}"),
        ("model", "{model}"),
        ("base weights", formats),
        _COMPLETIONS,
        ("rollout s", lambda row: optional("rollout_s", ".2f", row)),
        ("here", lambda row: ours("rollout_s", row)),
        ("update s", lambda row: optional("update_s", ".2f", row)),
        ("here", lambda row: ours("update_s", row)),
        ("peak GB", lambda row: optional("peak_gb", ".1f", row)),
        ("here", lambda row: "" if row["update_s"] is None else f"{row['our_peak_gb']:.1f}"),
        ("commit", "{commit:.8}"),
    ]
    order = sorted(rows, key=lambda row: (row["peer"], _billions(row["model"]), row["batch"]))
    return table(columns, order)


def decode_of_vllm_table(rows: Iterable[dict]) -> str:
    """Milliseconds of a decode step of vLLM by the number of rows, over ours, and ours."""
    lines: dict[str, dict[int, str]] = {}
    for row in rows:
        adapter = f"LoRA rank {row['lora_rank']}" if row["lora_rank"] else "no adapter"
        cell = filled("{ms_per_step:.2f}", row)
        cell += f" ({row['ms_per_step'] / row['our_ms_per_step']:.2f}x)"
        lines.setdefault(f"vLLM, {adapter}", {})[row["batch"]] = cell
        if row["lora_rank"]:
            lines.setdefault(f"here, {adapter}", {})[row["batch"]] = filled(
                "{our_ms_per_step:.2f}", row
            )
    batches = sorted({batch for by_batch in lines.values() for batch in by_batch})
    columns = [("", lambda line: line[0])]
    columns += [(f"{n}", lambda line, n=n: line[1].get(n, "")) for n in batches]
    return table(columns, sorted(lines.items(), reverse=True))


def peer_packages(rows: Iterable[dict]) -> str:
    """The packages of all peers with their versions, as `name version, name version`."""
    return ", ".join(
        dict.fromkeys(package for row in rows for package in row["packages"].split(", "))
    )


def adapter_seconds(rows: Iterable[dict]) -> str:
    """How much longer vLLM's rollouts take where each one begins with a new adapter, by model.

    The rows of vLLM alone keep one adapter.
    """
    rows = sorted(rows, key=lambda row: _billions(row["model"]))
    alone = {
        (*_size(row), row["rollout_format"]): row["rollout_s"]
        for row in rows
        if row["peer"] == "vLLM"
    }
    return " and ".join(
        f"{row['rollout_s'] - alone[key]:.1f} s ({row['model']})"
        for row in rows
        if row["peer"] == "TRL (QLoRA) + vLLM"
        and (key := (*_size(row), row["rollout_format"])) in alone
    )
