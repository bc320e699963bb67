"""Draws the pictures of the pages from benchmarks/results/, for `benchmarks.tables`.

They are docs/learning.svg, the reward of the default run and of its control, docs/decode.svg, the
time of a decode step by batch size, and docs/peers.svg, a step here and of other libraries. Each
file holds its data as JSON in its description, so that a test can compare it with the results.
"""

import io
import json
import pathlib
import statistics
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING

from benchmarks.result_tables import STEPS, short_name
from benchmarks.step_tables import peer_steps

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_RESULTS = _ROOT / "benchmarks" / "results"
_DECODE = STEPS | {
    "kind": "decode",
    "lora_rank": 32,
    "tensor": 1,
    "kv_cache_dtype": "bfloat16",
    "head_format": "",
}
_MODELS = {"qwen2.5-7b": "Qwen2.5-7B", "qwen2.5-32b": "Qwen2.5-32B"}
_COLORS = {"learning": "#2166ac", "control": "#8c8c8c", "nvfp4": "#2166ac", "bf16": "#d6604d"}
_LABELS = {"learning": "default", "control": "control, learning rate 0"}
_SECONDS = ("rollout_s", "update_s", "step_s")
# What each color is on a dark page, where the paper of a picture is dark too. Others stay.
DARK = {
    "#ffffff": "#0d1117",
    "#000000": "#c9d1d9",
    "#e6e6e6": "#30363d",
    "#2166ac": "#6cb0f2",
    "#d6604d": "#f0836f",
    "#8c8c8c": "#9da5ae",
}
_DESCRIPTION = "{http://purl.org/dc/elements/1.1/}description"


def learning_data() -> dict[str, dict]:
    """The reward of each step and seed of the default run and of its control."""
    path = _RESULTS / "learning_sums.json"
    result = json.loads(path.read_text(encoding="utf-8"))
    data = {}
    for name in ("learning", "control"):
        part = result[name]
        reward = [[round(value, 4) for value in seed] for seed in part["by_step"]["reward"]]
        data[name] = {"steps": part["steps"], "seeds": part["runs"], "reward": reward}
    return data


def decode_data() -> dict[str, dict[str, dict[str, float]]]:
    """Milliseconds of a decode step by model, weight format and batch size (measured in both)."""
    rows = json.loads((_RESULTS / "rollout.json").read_text(encoding="utf-8"))["rows"]
    data: dict = {model: {"nvfp4": {}, "bf16": {}} for model in _MODELS}
    for row in sorted(rows, key=lambda row: row.get("batch", 0)):
        if (
            row["model"] in data
            and row["format"] in ("nvfp4", "bf16")
            and _DECODE.items() <= row.items()
        ):
            data[row["model"]][row["format"]][str(row["batch"])] = row["ms_per_step"]
    for formats in data.values():
        batches = formats["nvfp4"].keys() & formats["bf16"].keys()
        for form, times in formats.items():
            formats[form] = {batch: time for batch, time in times.items() if batch in batches}
    return data


def peers_data() -> dict[str, dict]:
    """Whole steps here and of peers, of the most completions that were measured for a model.

    The steps of a model are ours first, and then from the fastest on.
    """
    rows = json.loads((_RESULTS / "peers.json").read_text(encoding="utf-8"))["rows"]
    data = {}
    for (model, batch, _, new_tokens, device), peer_rows in peer_steps(rows).items():  # ascending
        our_times = {name: peer_rows[0][f"our_{name}"] for name in _SECONDS}
        engines = {"here, NVFP4": our_times} | {
            row["peer"]: {name: row[name] for name in _SECONDS}
            for row in sorted(peer_rows, key=lambda row: row["step_s"])
        }
        data[model] = {"rows": batch, "new_tokens": new_tokens, "device": device, "steps": engines}
    return data


def draw_peers(data: dict) -> "Figure":
    """A bar for each engine, rollout and update one after the other, one panel for each model."""
    figure, panels = _figure(len(data))
    for axes, (model, part) in zip(panels, data.items(), strict=True):
        names, starts = list(part["steps"]), [0.0] * len(part["steps"])
        for label, color in (("rollout", "#2166ac"), ("update", "#d6604d")):
            seconds = [times[f"{label}_s"] for times in part["steps"].values()]
            axes.barh(names, seconds, left=starts, color=color, label=label, height=0.6)
            starts = [begin + second for begin, second in zip(starts, seconds, strict=True)]
        for name, end in zip(names, starts, strict=True):
            seconds = f"{part['steps'][name]['step_s']:.1f} s"
            offset = {"xytext": (4, 0), "textcoords": "offset points"}
            axes.annotate(seconds, (end, name), va="center", **offset)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set(
            xlim=(0, 1.25 * max(starts)),
            xlabel=f"seconds a step, {part['rows']} x {part['new_tokens']:,} tokens",
            title=f"{model} on one {short_name(part['device'])}",
        )
        axes.legend(frameon=False, loc="upper right")
    return figure


def draw_learning(data: dict) -> "Figure":
    """Reward by step: the mean over the seeds as a thick line, each seed as a thin one."""
    figure, (axes,) = _figure(1)
    for name, part in data.items():
        steps, color = range(1, part["steps"] + 1), _COLORS[name]
        if len(part["reward"]) > 1:
            for seed in part["reward"]:
                axes.plot(steps, seed, color=color, linewidth=0.8, alpha=0.4)
        mean = [statistics.mean(values) for values in zip(*part["reward"], strict=True)]
        axes.plot(steps, mean, color=color, linewidth=2.4, label=_LABELS[name])
    seeds = data["learning"]["seeds"]
    seed_text = "1 seed" if seeds == 1 else f"{seeds} seeds"
    axes.set(
        xlabel="step",
        ylabel="reward",
        ylim=(0, 1),
        title=f"SmolLM2-135M learns sums up to 20 on a CPU ({seed_text})",
    )
    axes.legend(frameon=False, loc="upper left")
    return figure


def draw_decode(data: dict) -> "Figure":
    """Milliseconds of a decode step by batch size, one panel for each model."""
    figure, panels = _figure(len(data))
    for axes, (model, formats) in zip(panels, data.items(), strict=True):
        for form, times in formats.items():
            axes.plot(
                [int(batch) for batch in times],
                list(times.values()),
                color=_COLORS[form],
                marker="o",
                markersize=5,
                linewidth=2.2,
                label={"nvfp4": "NVFP4", "bf16": "bf16"}[form],
            )
        batches = sorted({int(batch) for times in formats.values() for batch in times})
        all_times = [time for times in formats.values() for time in times.values()]
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="batch size, rows",
            ylabel="milliseconds per decode step",
            title=f"{_MODELS[model]} with LoRA, one H200",
        )
        _ticks(axes.xaxis, [batch for batch in batches if batch != 384])
        powers = [2**power for power in range(8)]
        low, high = 0.9 * min(all_times), 1.1 * max(all_times)
        _ticks(axes.yaxis, [power for power in powers if low < power < high])
        axes.legend(frameon=False, loc="upper left")
    return figure


def _ticks(axis: "Axis", values: list[int]) -> None:
    """Plain numbers at these values of a logarithmic axis."""
    axis.set_ticks(values, labels=[str(value) for value in values])
    axis.set_ticks([], minor=True)


def _figure(panels: int) -> "tuple[Figure, list[Axes]]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * panels if panels > 1 else 7.2, 3.6), layout="constrained")
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color="#e6e6e6")
        panel.set_axisbelow(True)
    return figure, axes


def save(figure: "Figure", path: pathlib.Path, data: dict) -> None:
    """Writes the picture as SVG with text as text, and the data in its description.

    On a dark page it has the colors of `DARK`.
    """
    import matplotlib

    svg = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.name}):
        figure.savefig(svg, format="svg", metadata={"Description": json.dumps(data), "Date": None})
    text = svg.getvalue().replace("</style>", f"{_dark_style()}</style>", 1)
    path.write_text(text, encoding="utf-8")


def _dark_style() -> str:
    """Rules for dark pages; matplotlib writes each color into the style of an element."""
    rules = [f"text{{fill: {DARK['#000000']}}}"]
    rules += [
        f'[style*="{kind}: {light}"]{{{kind}: {dark} !important}}'
        for light, dark in DARK.items()
        for kind in ("fill", "stroke")
    ]
    lines = "\n".join(rules)
    return f"\n@media (prefers-color-scheme: dark) {{\n{lines}\n}}\n"


def data_in(path: pathlib.Path) -> dict:
    """The data that a picture was drawn from."""
    return json.loads(next(ET.parse(path).iter(_DESCRIPTION)).text or "")


def draw_pictures(docs: pathlib.Path) -> None:
    """Draws the pictures into a folder."""
    for name, data, draw in (
        ("learning", learning_data(), draw_learning),
        ("decode", decode_data(), draw_decode),
        ("peers", peers_data(), draw_peers),
    ):
        save(draw(data), docs / f"{name}.svg", data)
