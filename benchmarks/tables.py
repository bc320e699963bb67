"""Writes every generated page and picture.

    uv run python -m benchmarks.tables

writes docs/benchmarks.md, docs/config.md, parts of the pages in `PAGES`, and the pictures
(`benchmarks/pictures.py`). Every figure comes from a
file under benchmarks/results/. The list of folders in CONTRIBUTING.md is made of the first
docstring line of each package (`benchmarks/source_tree.py`), docs/config.md of the rows of
`qerl_jax/config/fields.py`.
"""

import json
import pathlib
import statistics
import textwrap

from benchmarks.card_table import card_table, paths_table
from benchmarks.config_page import config_page
from benchmarks.memory_table import memory_table
from benchmarks.mesh_tables import scaling_sentence, scaling_table, tensor_ratios
from benchmarks.pictures import draw_pictures
from benchmarks.result_tables import (
    SAME,
    STEPS,
    accuracy_table,
    agreement_table,
    environment_table,
    kernel_part,
    learning_table,
    loading_table,
    markdown,
    parts_table,
    problems_table,
    provenance,
    replace_part,
    rollout_table,
    rows_of,
    run_table,
    startup_table,
    step_text,
)
from benchmarks.source_tree import source_tree
from benchmarks.step_tables import (
    adapter_sentence,
    peer_packages,
    peer_parts_table,
    peer_steps,
    peer_steps_table,
    short_name,
    short_steps_table,
    step_table,
)
from qerl_jax.config import models

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_RESULTS = _ROOT / "benchmarks" / "results"
_DECODE_PICTURE = "![Time of a decode step in NVFP4 and in bf16](%s)"
PAGES = ("README.md", "docs/environments.md", "docs/examples.md", "CONTRIBUTING.md")  # in parts
_GPU_RUN = "grpo_qwen2.5-coder-1.5b_h100.json"


def _read(name: str) -> dict:
    return json.loads((_RESULTS / name).read_text(encoding="utf-8"))


def trained_table() -> str:
    """What is known of the presets that were trained: hardware, memory, seconds a step, result."""
    learning, run = _read("learning_sums.json")["learning"], _read(_GPU_RUN)
    device = learning["device"]
    speedrun = _read("speedrun.json")
    lines = [
        [
            f"`{models.STAND_IN}`",
            f"CPU, cores: {device['cores']}, {device['vectors']}",
            "not recorded",
            f"{60 * learning['minutes'] / learning['steps']:.0f} s",
            f"greedy accuracy {_before_and_after(learning)} on held-out sums up to 20, "
            f"{learning['steps']} steps, seeds: {learning['runs']}",
        ],
        [
            "`qwen2.5-coder-1.5b`",
            run["device"]["kind"],
            f"{run['peak_memory_bytes'] / 1e9:.1f} GB",
            f"{run['median']['step_seconds']:.1f} s",
            f"{run['steps']} steps of GSM8K (512 new tokens) in {run['total_seconds']:.0f} s, mean "
            f"reward {run['reward_mean']:.2f}; greedy accuracy in the speedrun "
            f"{speedrun['pass1_start']:.1f} -> {speedrun['pass1_end']:.1f} %",
        ],
    ]
    return markdown(("preset", "trained on", "peak memory", "a step", "result"), lines)


def _before_and_after(learning: dict) -> str:
    accuracy = learning["eval_accuracy"]
    return f"{accuracy['before']:.2f} -> {accuracy['after']:.2f}"


def _preset_steps() -> dict[str, dict]:
    """For each model with a measured step of 8 rows in NVFP4 the row that counts, by model."""
    rows = [
        row for row in _read("step.json")["rows"]
        if row["format"] == "nvfp4" and row["batch"] == 8 and row["updates"] == 1
        and not row["mean_length"]
    ]  # fmt: skip
    # The last row of a model counts: the one on the fewest cards, if possible on a card of 80 GB,
    # with the longest rows, and then in the least memory.
    rows.sort(
        key=lambda row: (
            -row["devices"], "80GB" in row["device"], row["new_tokens"], row["prompt"],
            -row["peak_gb"],
        )
    )  # fmt: skip
    steps = {row["model"]: row for row in rows}
    return {model: steps[model] for model in models.MODELS if model in steps}


def preset_steps_table() -> str:
    """The steps of presets that were not trained, with random weights: memory and seconds."""
    lines = []
    for model, row in _preset_steps().items():
        cards = f"{row['devices']} x " if row["devices"] > 1 else ""
        memory, seconds = f"{row['peak_gb']:.1f} GB", f"{row['step_s']:.1f} s"
        lines.append([f"`{model}`", cards + row["device"], memory, seconds, step_text(row)])
    return markdown(("preset", "measured on", "peak memory", "a step", "what it does"), lines)


def _preset_section() -> str:
    known = {models.STAND_IN, "qwen2.5-coder-1.5b", *_preset_steps()}
    others = ", ".join(f"`{model}`" for model in models.MODELS if model not in known)
    return _section(
        "What to expect of a preset",
        "Presets that were trained:",
        trained_table(),
        "Of these only steps were measured, with random weights; they were not trained:",
        preset_steps_table(),
        f"Not run yet: {others}.",
    )


def _peer_rows() -> list[dict]:
    """The rows of peers.json, if there is one."""
    path = _RESULTS / "peers.json"
    return json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []


def speed_text() -> str:
    """What the README states about speed: whole steps beside those of other libraries.

    It has a line for the most completions of each model. Where no peer was measured, it shows the
    time of a decode step instead.
    """
    rows = _peer_rows()
    steps = peer_steps(rows)
    if not steps:
        return _DECODE_PICTURE % "docs/decode.svg"
    most_rows = {key[0]: key[1] for key in steps}
    rows = [row for row in rows if most_rows.get(row["model"]) == row["batch"]]
    batch, prompt, new_tokens = next(key[1:4] for key in steps if key[1] == most_rows[key[0]])
    devices = sorted({short_name(key[-1]) for key in steps})
    sentence = (
        f"A GRPO step on one {', one '.join(devices)}, {batch} completions of {new_tokens:,} "
        f"tokens after prompts of {prompt}, random weights, LoRA of rank 32: seconds and peak "
        "memory. "
        "`docs/benchmarks.md` has the parts, the versions and every other figure."
    )
    return "\n\n".join(
        (
            "![A step here and of other libraries](docs/peers.svg)",
            _filled(sentence),
            short_steps_table(rows, _read("step.json")["rows"]),
        )
    )


def _summary_section() -> str:
    """What the figures of this page say, in two sentences."""
    rollout = _read("rollout.json")
    times: dict[tuple, float] = {}
    for row in rows_of(
        rollout, "decode", STEPS | {"lora_rank": 32, "head_format": "", "tensor": 1}
    ):
        times[row["model"], row["batch"], row["format"]] = row["ms_per_step"]
    fractions = {
        (model, batch): times[model, batch, "nvfp4"] / time
        for (model, batch, form), time in times.items()
        if form == "bf16" and (model, batch, "nvfp4") in times
    }

    def span(family: str, batches: range) -> str:
        """Lowest and highest percentage of a family of models at these numbers of rows."""
        percentages = [
            100 * fraction
            for (model, batch), fraction in fractions.items()
            if model.startswith(family) and batch in batches
        ]
        return f"{min(percentages):.0f} to {max(percentages):.0f} %"

    few, many = range(1, 65), range(65, 10**6)
    (problems,) = rows_of(rollout, "gsm8k", SAME | {"lora_rank": 32})
    sentences = (
        f"In 4 bits a decode step takes {span('qwen2.5', few)} of the time of bf16 up to 64 rows, "
        f"and {span('qwen2.5', many)} beyond (Qwen2.5 of 7B, 14B and 32B, random weights); with "
        f"Qwen3.5 of 4B and 27B {span('qwen3.5', few)}. GSM8K rollouts of a 1.5B model reach "
        f"{problems['tokens_per_s']:,.0f} tokens per second on one {rollout['device']}. "
        + scaling_sentence(_read("step.json")["rows"]),
        speedrun_sentence(_read("speedrun.json")),
    )
    return _section("In short", "\n".join(f"- {sentence}" for sentence in sentences))


def speedrun_sentence(result: dict) -> str:
    """What the pages state of the speedrun.

    Args:
        result: content of speedrun.json.
    """
    text = (
        f"`benchmarks.speedrun` takes Qwen2.5-Coder-1.5B from {result['pass1_start']:.1f} to "
        f"{result['pass1_end']:.1f} % of {result['n']:,} GSM8K test problems on one "
        f"{short_name(result['device'])}"
    )
    if result["cache"] == "cold":
        return f"{text} in {_cold_seconds(result)}."
    text += f" in {result['seconds']:.0f} s"
    if "cold" not in result:
        return f"{text} with warm caches."
    return f"{text} with warm caches; with empty ones it takes {_cold_seconds(result['cold'])}."


def _cold_seconds(result: dict) -> str:
    calibration = result.get("calibration_seconds")
    also = f" and {calibration:.0f} s of calibration" if calibration else ""
    return f"{result['seconds']:.0f} s, compilation{also} included"


def game_text() -> str:
    """What docs/environments.md says of the guessing game."""
    result = _read("environments.json")["learning"]["guessing_game"]
    origin = provenance(result["runs"]["run"])
    table = environment_table(result, "replies", "won")
    return f"Games that are won greedily, of 27 held out ({origin}):\n\n{table}"


def calculator_text() -> str:
    """What docs/environments.md says of the calculator."""
    result = _read("environments.json")["learning"]["calculator"]
    part = result["runs"]
    first = 100 * statistics.fmean(steps[0] for steps in part["calls_by_step"])
    last = 100 * part["last"]["reward/calls"]
    problems, origin = part["run"]["config"]["eval"]["problems"], provenance(part["run"])
    control = provenance(result["control"]["run"])
    if control != origin:
        origin += f"; control: {control}"
    text = (
        f"Right answers, greedy, of {problems} held-out problems ({origin}; a run shared its card "
        f"with others). The share of rows that calculate went from {first:.0f} % in the first step "
        f"to {last:.0f} % in the last fifth of the steps:"
    )
    return f"{_filled(text)}\n\n{environment_table(result, 'calculator', 'right')}"


def waiting_text() -> str:
    """What docs/environments.md says of the time that slow replies cost."""
    part = _read("environments.json")["rollout"]
    device, model, seconds = part["device"], part["model"], max(part["by_reply_seconds"], key=float)
    equal = 100 * part["agreement"]["equal_tokens"]
    return _filled(
        f"Measured on an {device} with `{model}` in NVFP4: {part['episodes']} conversations on "
        f"{part['slots']} slots, {part['turns']} turns of {part['turn_tokens']} tokens each. With "
        f"replies after {seconds} s the rollout takes {part['slowdown']:.2f} times as long as with "
        f"instant ones, and {equal:.0f} % of the tokens are the same."
    )


def _filled(text: str) -> str:
    """A paragraph in lines of the width of the pages."""
    return textwrap.fill(text, 110, break_on_hyphens=False)


def _learning_section() -> str:
    learning = _read("learning_sums.json")
    commands = (
        "uv run python -m experiments.grpo_gsm8k --config.seed=SEED --workdir=runs/learn-SEED",
        "uv run python -m experiments.grpo_gsm8k --config.seed=SEED --workdir=runs/control-SEED "
        "--config.optimizer.learning_rate=0.0",
        "uv run python -m benchmarks.learning runs/learn-* --control runs/control-* "
        "--out=benchmarks/results/learning_sums.json",
    )
    return _section(
        "Does the default run learn?",
        "The default command trains SmolLM2-135M in NVFP4 on sums up to 20 "
        f"({provenance(learning['learning'])}, `benchmarks/learning.py`). Welch's t compares the "
        "rewards of the last fifth of the steps with those of the first fifth: above 3 the run "
        "learns, and a control with a learning rate of 0 stays below 2.",
        "![Reward of the default run and of its control](learning.svg)",
        learning_table(learning),
        "\n".join(f"    {command}" for command in commands),
    )


def _training_section() -> str:
    run = _read(_GPU_RUN)
    rollout, updates = run["config"]["rollout"], run["config"]["rl"]["updates_per_rollout"]
    return _section(
        "Training on a GPU",
        "Qwen2.5-Coder-1.5B-Instruct on GSM8K, read from a Q4_K_M GGUF and quantized to NVFP4 at "
        f"load. A step has 128 completions of at most {rollout['max_new_tokens']} tokens and "
        f"{updates} {'update' if updates == 1 else 'updates'} ({provenance(run)}, "
        "`benchmarks/run_summary.py`). With its programs in the cache the command took "
        f"{run['total_seconds']:.0f} s from start to end, without them "
        f"{run['cold']['total_seconds']:.0f} s, {run['cold']['compile_seconds']:.0f} s of it "
        "compilation before the first step; no later step compiled anything. "
        f"The median step forwards {100 * run['median']['forwarded_fraction']:.0f} % of the "
        "completion tokens, and the others teach nothing.",
        run_table(run),
        _command(run),
    )


def _step_section() -> str:
    rows = _read("step.json")["rows"]
    return _section(
        "A training step by model",
        "Random weights in the shapes of the models, LoRA of rank 32, every group with mixed "
        f"rewards (jax {rows[0]['versions']['jax']}, `benchmarks/step.py`). The update is "
        "everything from scored completions to the new adapter; its tokens are those of all rows, "
        "times the updates. Without a mean length every completion is of full length. The plan "
        "gives the buffers of an update what memory is left and recomputes what does not fit, so "
        "the same step takes more memory in a larger pool, which is the memory that JAX has. "
        "Beyond 64 rows, in rollouts and in every update, products in 4 bits and in bf16 are bound "
        "by the same tensor cores, so the formats come close to each other.",
        step_table(rows),
        "    uv run --extra cuda python -m benchmarks.step --model=qwen2.5-7b --format=nvfp4,bf16",
    )


def _peer_sections() -> list[str]:
    rows = _peer_rows()
    if not rows:
        return []
    devices = sorted({row["device"] for row in rows})
    return [
        _section(
            "Beside other libraries",
            "One group of completions of full length, LoRA of rank 32, one update, random weights "
            f"({', '.join(devices)}, `benchmarks/peers`). Each pair was measured on the cards of "
            "one host, and the column of our step says how much faster it is. A peer's memory is "
            "that of PyTorch, in which vLLM holds its weights and as many keys and values as the "
            "rows need.",
            peer_steps_table(rows, _read("step.json")["rows"]),
            f"The parts, and peers that are only one part of a step ({peer_packages(rows)}). "
            + adapter_sentence(rows),
            peer_parts_table(rows),
            "    python -m benchmarks.peers.step --model=qwen2.5-7b --folder=FOLDER --ours=FILE\n"
            "    python -m benchmarks.peers.update --model=qwen2.5-7b --folder=FOLDER --ours=FILE\n"
            "    python -m benchmarks.peers.decode --model=qwen2.5-7b --folder=FOLDER --ours=FILE",
        )
    ]


def _loading_sections() -> list[str]:
    rows = _read("loading.json")["rows"]
    return [
        _section(
            "Loading",
            "Seconds from the open folder to all parameters on the device, random weights in the "
            f"shapes of the models ({rows[0]['device']}, {rows[0]['cores']} cores, jax "
            f"{rows[0]['versions']['jax']}, `benchmarks/loading.py`). 'cold' reads from the disk, "
            "'warm' from the page cache. Reading, transfer and quantization overlap: each figure "
            "counts the seconds in which at least one thread did it.",
            loading_table(rows),
            "    uv run --extra cuda python -m benchmarks.loading --folder=FOLDER",
        )
    ]


def _accuracy_section() -> str:
    results = [_read(f"gsm8k_qwen2.5-coder-1.5b_{form}_h200.json") for form in ("bf16", "nvfp4")]
    return _section(
        "Accuracy by weight format",
        "The same model on the first 256 problems of GSM8K's test set, at most 320 new tokens "
        f"({provenance(results[0])}, `qerl_jax/commands/evaluate.py`).",
        accuracy_table(results),
        *map(_command, results),
    )


def _rollout_sections() -> list[str]:
    rollout, h100 = _read("rollout.json"), _read("rollout_h100.json")
    versions = f"{rollout['device']}, jax {rollout['rows'][0]['versions']['jax']}"
    return [
        _section(
            "Decode step",
            "Decode step time in milliseconds, and tokens per second in brackets, by batch size: "
            f"256 prompt tokens, 144 new tokens, random weights ({versions}, "
            "`benchmarks/rollout`). The commits are in the order of the batch sizes; cells without "
            "a figure were not measured.",
            _DECODE_PICTURE % "decode.svg",
            rollout_table(rollout),
        ),
        _section(
            "Decode step on an H100",
            f"The same on one {h100['device']}, and with `--tensor` on several. Their time divided "
            f"by that of one: {tensor_ratios(h100)}.",
            rollout_table(h100),
        ),
        _section(
            "Parts of a decode step",
            "Milliseconds by part, summed over the layers, from separate profiled runs "
            "(`--parts`). 'gaps' is the time in which no kernel runs; it is negative where "
            "kernels overlap. Parts that are fused into another kernel count there.",
            parts_table(rollout),
        ),
        _section(
            "Whole rollouts",
            "GSM8K problems with an adapter of rank 32 (`--data`). 'useful' is the fraction of "
            "decoded tokens that end up in a completion; the rest is decoded after a row has "
            "ended.",
            problems_table(rollout),
        ),
        _section(
            "Agreement of sampler and trainer",
            "The rollout engine against the trainer's forward pass on prompts of GSM8K. At "
            "temperature 1 the log-probabilities of the sampled tokens are compared. At "
            "temperature 0 a token counts as different where the forward pass prefers another "
            "one, and the gap is between the two logits (`benchmarks/agreement.py`).",
            agreement_table(rollout),
        ),
        _section(
            "Startup",
            "Seconds from the command to the first tokens, with every program of the rollout "
            "compiled (`--startup`). Executables of an earlier process are found in "
            "JAX_COMPILATION_CACHE_DIR; a training run keeps its own in the run folder. The start "
            "with 80 programs and an empty cache compiled in several processes, which the code no "
            "longer does.",
            startup_table(rollout),
        ),
    ]


def _kernel_section() -> str:
    parts = [
        "Device time in microseconds on the fused projections of Qwen2.5, by number of tokens "
        "(`pallas_kernels/fp4_matmul/benchmark.py`). In brackets: for NVFP4 the fraction of the "
        "roofline (the bandwidth of a copy, 790 TFLOP/s), for bf16 and NF4 the slowdown against "
        "NVFP4. The adapter has rank 32 per projection, and its x A^T is included. bf16 is "
        "cuBLAS, for one token `pallas_kernels/matvec.py`; NF4 is bitsandbytes. 'gradient' is the "
        "gradient with respect to the activations. Layers of equal shape share their rows.",
    ]
    for path in sorted(_RESULTS.glob("kernel*.json")):
        parts += kernel_part(_read(path.name))
    return _section("The FP4 kernel", *parts)


def _section(title: str, *paragraphs: str) -> str:
    return "\n\n".join([f"## {title}", *paragraphs])


def _command(result: dict) -> str:
    return "    " + result["command"].replace("python3", "uv run --extra cuda python")


def benchmarks_page() -> str:
    """The text of docs/benchmarks.md."""
    return "\n\n".join(
        [
            "# Benchmarks",
            "`uv run python -m benchmarks.tables` writes this page from the JSON files under "
            "`benchmarks/results/`. Each file holds the command, commit, device and versions of "
            "its figures; a command is that of its commit. Not reproduced yet: the GSM8K "
            "accuracies of the QeRL paper.",
            _summary_section(),
            _preset_section(),
            _learning_section(),
            _training_section(),
            _step_section(),
            _section(
                "Several GPUs",
                "Each GPU has the batch of the single GPU, whose row is in the table above "
                "(`benchmarks/step.py`).",
                scaling_table(_read("step.json")["rows"]),
                "    uv run --extra cuda python -m benchmarks.step --model=qwen2.5-7b "
                "--format=nvfp4 --mesh=data=1 --mesh=data=2",
            ),
            *_peer_sections(),
            *_loading_sections(),
            _accuracy_section(),
            *_rollout_sections(),
            _kernel_section(),
            _section(
                "Other cards",
                "Computed, not measured: what a decode step of Qwen2.5-7B takes at least, from its "
                "bytes and the bandwidth of the data sheet, with an adapter of rank 32 and 512 "
                "tokens of a row in the cache. Attention in an update is XLA's, exact and in "
                "bounded memory, at the speed of dense products under a mask.",
                card_table(),
                "There a kernel reads weights in 4 bits as they are, for up to 64 rows "
                "(`docs/kernel_notes.md`); more rows multiply by a dense copy where the memory "
                f"holds one. The same kernel on one {_read('rollout.json')['device']}, chosen by "
                "QERL_FP4_KERNEL=mma, milliseconds of a step:",
                paths_table(_read("rollout.json")),
            ),
        ]
    )


def with_generated_parts(page: str, text: str) -> str:
    """The text of a page whose generated parts are up to date.

    Args:
        page: one of `PAGES`.
        text: its text.

    Raises:
        ValueError: the page lacks the marks of a part.
    """
    parts = {
        "README.md": {
            "speed": speed_text,
            "memory": lambda: memory_table(_preset_steps().values()),
        },
        "docs/environments.md": {
            "calculator": calculator_text,
            "guessing game": game_text,
            "waiting": waiting_text,
        },
        "docs/examples.md": {"gsm8k": lambda: _filled(speedrun_sentence(_read("speedrun.json")))},
        "CONTRIBUTING.md": {"folders": lambda: source_tree(_ROOT)},
    }
    for name, part in parts[page].items():
        text = replace_part(text, name, part(), page=page)
    return text


def main() -> None:
    """Writes all generated pages, parts of pages, and pictures."""
    docs = _ROOT / "docs"
    for name, text in (("benchmarks", benchmarks_page()), ("config", config_page())):
        (docs / f"{name}.md").write_text(text + "\n", encoding="utf-8")
    for name in PAGES:
        path = _ROOT / name
        text = with_generated_parts(name, path.read_text(encoding="utf-8"))
        path.write_text(text, encoding="utf-8")
    draw_pictures(docs)


if __name__ == "__main__":
    main()
