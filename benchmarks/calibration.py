r"""Measures what each choice of the calibration gains on held-out text, and its time and memory.

    uv run --extra cuda python -m benchmarks.calibration qwen2.5-coder-1.5b.gguf \
        --train=gsm8k_train.jsonl
    uv run --extra cuda python -m benchmarks.calibration --random=qwen2.5-72b --layers=10

The first command calibrates a model once for each choice, on completions of training problems by
the rounded model, and compares the results with the weights in 16 bits on completions of other
training problems by the 16-bit model at temperature 1. Its rows, kind "choice":

    loss, above       nats a token, and the loss above that in 16 bits
    above_gptq        the loss above that of the row "gptq", which has the defaults
    kl, top1          KL(16 bits, 4 bits) in nats a token, and the fraction of tokens at which both
                      find the same one the likeliest; `NAME_interval` is half a 95 % interval over
                      windows
    output_errors     by projection, the mean over layers of the mean squared error of the outputs
                      on the calibration text, relative to their mean square
    seconds, compile_s, peak_gb
                      from the file in 16 bits to that in 4 bits; the seconds in which programs were
                      compiled; the largest memory

The second command calibrates layers of random weights in the shapes of a model, which it writes to
a temporary folder in 16 bits. Its row, kind "random", has the seconds of the first layer (which
compiles), the mean of the others, and those of the whole model, which are computed from the two
where `layers` are not all (`computed`).

Each part is a process of its own, which alone takes the device. Rows of the same model, choice and
device are replaced in --out. On a copy of the project without git, QERL_COMMIT names the commit.
"""

import argparse
import pathlib
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from benchmarks import common
from qerl_jax.commands import cli

KEYS = ("kind", "model", "choice", "layers", "device")
DEFAULT, ROUNDED, BY_16_BITS = "gptq", "rounded", "gptq, completions of the 16-bit model"
# Choice -> what it changes of `CalibrationOptions`.
CHOICES: dict[str, dict[str, Any]] = {
    DEFAULT: {},
    "gptq, scales do not grow": {"grow": False},
    "gptq, columns as they stand": {"orders": False},
    "gptq, damping 0.001": {"damping": 0.001},
    "gptq, damping 0.1": {"damping": 0.1},
    BY_16_BITS: {},
}
_PROMPTS_OF = "qwen2.5-coder-1.5b"  # preset of grpo_gsm8k that prompts are rendered as


def make_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    out = "benchmarks/results/calibration.json"
    parser = common.make_parser("benchmarks.calibration", __doc__, out)
    add = parser.add_argument
    add("model", nargs="?", default="", help="folder, .gguf file or hub id of a model in 16 bits")
    add("--train", default="", help="FILE.jsonl with question and answer")
    add("--prompts", type=int, default=400, help="problems of a text (default: 400)")
    add("--new-tokens", type=int, default=512, help="limit of a completion (default: 512)")
    add("--windows", type=int, default=160, help="windows of a text (default: 160)")
    add("--width", type=int, default=512, help="tokens of a window (default: 512)")
    add("--random", default="", help="name of the shapes of random weights")
    add("--layers", type=int, default=0, help="layers of random weights (default: all)")
    return parser


def sample(source: str, form: str, train: str, parts: dict[str, str], text: dict[str, int]) -> None:
    """Samples texts from a model whose weights are loaded in format `form`.

    `parts` names the file to write by what it holds: completions of the 'calibration' problems of
    the file `train`, or of the 'held-out' ones; `text` has the fields of `TextConfig`.

    Raises:
        UserError: there are too few problems for a text that is held out.
    """
    import dataclasses

    import numpy as np

    from qerl_jax.config.experiments import grpo_gsm8k
    from qerl_jax.data.from_config import encode_problems
    from qerl_jax.data.splits import ProblemConfig, load_split
    from qerl_jax.errors import UserError
    from qerl_jax.quantization.calibration_text import TextConfig, choose_prompts, sample_windows
    from qerl_jax.rollout.config import EngineConfig
    from qerl_jax.weights.load import load

    config = grpo_gsm8k.get_config(_PROMPTS_OF)
    model = load(source, format=form, dtype=_dtype())
    problems = load_split(ProblemConfig(path=train))
    prompts = [
        p.ids for p in encode_problems(config, model.tokenizer, {"train": problems})["train"]
    ]
    options = TextConfig(**text)
    # The prompts of a smaller choice are the first of a larger one.
    chosen = choose_prompts(prompts, dataclasses.replace(options, prompts=2 * options.prompts))
    if len(chosen) < 2 * options.prompts:
        raise UserError(
            f"{train}: holds {len(prompts)} problems, and two texts of --prompts={options.prompts} "
            f"take twice as many; pass --prompts={len(prompts) // 2}"
        )
    halves = {"calibration": chosen[: options.prompts], "held-out": chosen[options.prompts :]}
    engine = EngineConfig(chunk_steps=config.rollout.chunk_steps, compact="once")
    for name, file in parts.items():
        np.save(file, sample_windows(model, halves[name], options, engine))


def calibrate(source: str, choice: str, text: str, folder: str) -> dict[str, Any]:
    """The seconds, the memory and the errors by projection of a calibration on a file of text."""
    import numpy as np

    from qerl_jax.compile.count import count_compilations
    from qerl_jax.quantization.calibration import CalibrationOptions, calibrated_layers
    from qerl_jax.quantization.rounding import PackedLayer, fill_packed
    from qerl_jax.system.staging import staged_folder
    from qerl_jax.weights.checkpoint import open_checkpoint

    rounded_errors: list[dict[str, float]] = []
    options = CalibrationOptions(reports_errors=True, **CHOICES[choice])
    began = time.perf_counter()

    def layers() -> Iterator[PackedLayer]:
        for layer in calibrated_layers(checkpoint, np.load(text), options):
            rounded_errors.append(layer.rounded_errors)
            yield layer

    with count_compilations() as compiled:
        checkpoint = open_checkpoint(source)
        with staged_folder(folder) as new:
            errors = fill_packed(new, checkpoint, layers())
    seconds = time.perf_counter() - began
    print(f"{choice}: {seconds:.0f} s", flush=True)
    return {
        "seconds": seconds,
        "compile_s": compiled.take()["compile_seconds"],
        "peak_gb": common.peak_gb(),
        "layers": checkpoint.config.num_layers,
        "output_errors": _mean_squares(errors),
        "rounded_errors": _mean_squares(rounded_errors),
    }


def _mean_squares(errors: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(row[name] ** 2 for row in errors) / len(errors) for name in errors[0]}


def compare(source: str, models: dict[str, str], held_out: str) -> list[dict[str, Any]]:
    """The rows of 16 bits (`source`), and of models in 4 bits (`models`: sources by choice).

    They are compared on the text of the file `held_out`.
    """
    import jax
    import numpy as np

    from qerl_jax.evaluation.perplexity import window_divergences, window_losses
    from qerl_jax.run.statistics import half_interval
    from qerl_jax.weights.load import load

    tokens = np.load(held_out)
    reference = load(source, format="bf16", dtype=_dtype())
    losses = window_losses(reference, None, tokens)
    shared = {
        "held_out_tokens": int(tokens.size),
        "device": jax.devices()[0].device_kind,
        **common.origin("benchmarks.calibration"),
    }
    results = {
        name: window_divergences(reference, load(folder, format="nvfp4", dtype=_dtype()), tokens)
        for name, folder in models.items()
    }

    def with_interval(name: str, values: np.ndarray) -> dict[str, float | None]:
        half = half_interval(values) if len(values) > 1 else None
        return {name: float(values.mean()), f"{name}_interval": half}

    rows = [{"choice": "16 bits", "loss": float(losses.mean()), **shared}]
    for name, result in results.items():
        rows.append(
            {
                "choice": name,
                "loss": float(result.losses.mean()),
                **with_interval("above", result.losses - losses),
                **with_interval("above_gptq", result.losses - results[DEFAULT].losses),
                **with_interval("kl", result.kl),
                **with_interval("top1", result.agreement),
                **shared,
            }
        )
    return rows


def measure_random(model: str, layers: int, windows: int, width: int) -> dict[str, Any]:
    """The row of a calibration of layers of random weights; 0 is all layers."""
    import dataclasses
    import resource

    import jax
    import numpy as np

    from benchmarks.random_checkpoint import write_random
    from qerl_jax.policy.architectures import ARCHITECTURES
    from qerl_jax.quantization.calibration import calibrated_layers
    from qerl_jax.weights.checkpoint import open_checkpoint

    whole = ARCHITECTURES[model]
    count = min(layers or whole.num_layers, whole.num_layers)
    tokens = np.random.default_rng(0).integers(0, whole.vocab_size, (windows, width), np.int32)
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch) / "model"
        write_random(folder, dataclasses.replace(whole, num_layers=count), packed=False)
        times = [time.perf_counter()]
        for number, _ in enumerate(calibrated_layers(open_checkpoint(str(folder)), tokens)):
            times.append(time.perf_counter())
            print(f"layer {number}: {times[-1] - times[-2]:.2f} s", flush=True)
    seconds = np.diff(times)
    later = float(seconds[1:].mean()) if count > 1 else None
    return {
        "kind": "random",
        "model": model,
        "choice": DEFAULT,
        "layers": count,
        "layers_of_model": whole.num_layers,
        "tokens": int(tokens.size),
        "first_layer_s": float(seconds[0]),
        "layer_s": later,
        "seconds": float(seconds.sum()),
        "whole_s": float(seconds.sum() + (whole.num_layers - count) * (later or seconds[0])),
        "computed": count < whole.num_layers,
        "peak_gb": common.peak_gb(),
        "host_peak_gb": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e9,
        "device": jax.devices()[0].device_kind,
        **common.origin("benchmarks.calibration"),
    }


def _dtype() -> str:
    """The dtype of what is not packed: bfloat16 is slow on a CPU."""
    import jax

    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def measure_choices(source: str, train: str, text: dict[str, int]) -> list[dict[str, Any]]:
    """The rows of all choices; `text` has the fields of `TextConfig`."""
    from benchmarks.rollout.subject import model_name

    with tempfile.TemporaryDirectory() as scratch:
        rounded, exact, held_out = (f"{scratch}/{name}.npy" for name in ("4", "16", "held_out"))
        common.in_process(sample, source, "nvfp4", train, {"calibration": rounded}, text)
        parts = {"held-out": held_out, "calibration": exact}
        common.in_process(sample, source, "bf16", train, parts, text)
        folders = {choice: f"{scratch}/{number}" for number, choice in enumerate(CHOICES)}
        costs = {
            choice: common.in_process(
                calibrate, source, choice, exact if choice == BY_16_BITS else rounded, folder
            )
            for choice, folder in folders.items()
        }
        rows = common.in_process(compare, source, {ROUNDED: source, **folders}, held_out)
    default = costs[DEFAULT]
    shared = {"kind": "choice", "model": model_name(source), "layers": default["layers"]}
    for row in rows:
        row |= shared
        if row["choice"] == ROUNDED:
            row["output_errors"] = default["rounded_errors"]
        elif cost := costs.get(row["choice"]):
            row |= {key: value for key, value in cost.items() if key != "rounded_errors"}
    return rows


def run(arguments: argparse.Namespace) -> None:
    """Runs the benchmark with the parsed arguments."""
    from benchmarks.rollout.subject import check_names
    from qerl_jax.errors import UserError, check_limits

    limits = ("layers", 0), ("prompts", 1), ("new_tokens", 1), ("windows", 1), ("width", 8)
    check_limits(
        {f"--{name.replace('_', '-')}": (getattr(arguments, name), low) for name, low in limits}
    )
    common.check_out(arguments.out, KEYS)
    if arguments.random:
        check_names([arguments.random], [])
        shape = arguments.layers, arguments.windows, arguments.width
        rows = [common.in_process(measure_random, arguments.random, *shape)]
    else:
        if not (arguments.model and arguments.train):
            raise UserError("pass MODEL and --train=FILE.jsonl, or --random=NAME")
        names = ("prompts", "windows", "width")
        text = {name: getattr(arguments, name) for name in names}
        text["max_new_tokens"] = arguments.new_tokens
        rows = measure_choices(arguments.model, arguments.train, text)
    for row in rows:
        common.merge(arguments.out, row, KEYS)


if __name__ == "__main__":
    cli.run_command(make_parser(), run)
