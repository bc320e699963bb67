"""Exports what a run trained to transformers, PEFT, vLLM, llama.cpp and Ollama.

    qerl-export RUN --format=peft               # the adapter
    qerl-export RUN --format=peft --with-base   # and its NVFP4 base
    qerl-export RUN --format=merged             # one model in bfloat16
    qerl-export RUN --format=nvfp4              # one model in 4 bits
    qerl-export RUN --format=nvfp4 --calibration=gptq    # merged into the NVFP4 base
    qerl-export RUN --format=gguf               # the adapter and its base for llama.cpp
    qerl-export RUN --format=gguf --merge=q8_0  # one model for llama.cpp and Ollama
    qerl-export RUN --format=peft --push=USER/NAME

RUN is a run folder, or the folder of a PEFT adapter. Each export contains the tokenizer, the chat
template and a model card; the command prints the line that serves it with vLLM.

An adapter that was trained on an NVFP4 base belongs to that base. `merged` adds it to the base's
dequantized weights and is nearly the same policy; --onto=bf16 adds it to the weights before
quantization. `nvfp4` rounds the sum to 4 bits, which keeps only part of the update; the command
measures and prints how much. It starts from the weights before quantization by default, because
weights that lie on the 4-bit grid are rounded back to their old values (--onto=trained). To serve
in 4 bits without a loss, serve the adapter over its base.

With --calibration=gptq the columns of a weight make up for what rounding the columns before lost,
on completions of training prompts by the trained policy: see docs/export.md for what it keeps.

`gguf` writes the adapter as a GGUF LoRA, and its base with the exact codes and scales of NVFP4 or
MXFP4. llama.cpp stops where an adapter changes the weights of an MLP in NVFP4, so that these are in
Q8_0 there, as are embedding and head (--dense=bf16: in BF16); an adapter of attention alone has an
exact base. With --merge it writes one model in q8_0, bf16, mxfp4 or nvfp4. llama-quantize makes
K-quants of that in BF16; the command prints the line.

--push uploads the export with its model card to a new repository of the Hugging Face hub, private
unless --public is given, with the token of `hf auth login` or HF_TOKEN. What is uploaded names no
folder of this machine: the base of an adapter needs a hub id, --base-name where the run has it as a
folder.

The exported policies are scored on the run's held-out problems; --score-problems=0 skips this. Of a
run of another person only the project's own rewards are called, until --trust adopts its folder or
--judge names the reward again. A token is sent to a server only if --token-env names its variable.
"""

import argparse

from qerl_jax.commands import cli
from qerl_jax.system.signals import exit_on_stop_signals

FORMATS = ("peft", "merged", "nvfp4", "gguf")


def make_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    parser = cli.new_parser("export", __doc__)
    add = parser.add_argument
    add("source", metavar="RUN", help="run folder or PEFT adapter folder")
    add("--format", required=True, choices=FORMATS, help="what to write")
    add("--out", default="", help="folder to write (default: RUN/exports/FORMAT)")
    add(
        "--adapter",
        default="",
        help="adapter: best_adapter, adapter or a folder (default: the best)",
    )
    add("--base", default="", help="base model of the adapter (default: the one it names)")
    add(
        "--base-format",
        default="",
        help="weight format of the base (default: the run's, or as stored)",
    )
    add(
        "--onto",
        default="",
        choices=("trained", "bf16"),
        help="weights to merge into: as trained, or before quantization",
    )
    add(
        "--merge",
        default="",
        choices=("q8_0", "bf16", "mxfp4", "nvfp4"),
        help="number format of one merged GGUF file (default: the adapter and its base)",
    )
    add(
        "--dense",
        default="q8_0",
        choices=("q8_0", "bf16"),
        help="number format of other weights in a GGUF file (default: q8_0)",
    )
    add(
        "--calibration",
        default="none",
        choices=("none", "gptq"),
        help="how a merged model is rounded to NVFP4 (default: none)",
    )
    add("--with-base", action="store_true", help="also write the NVFP4 base")
    add(
        "--score-problems",
        type=int,
        metavar="N",
        help="number of problems to score on (default: all)",
    )
    add(
        "--base-name",
        default="",
        metavar="USER/NAME",
        help="hub id of the base, where this machine has it as a folder",
    )
    add("--judge", default="", help="reward MODULE:FUNCTION or URL (default: the run's)")
    add(
        "--token-env",
        action="append",
        default=[],
        help="variable with the token of a URL, A or A,B",
    )
    add(
        "--trust", action="store_true", help="call what a run of another person names, and adopt it"
    )
    add("--push", default="", metavar="USER/NAME", help="upload to the Hugging Face hub")
    add("--public", action="store_true", help="let everyone see what --push uploads")
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Exports."""
    with cli.importing():
        from qerl_jax.compile.run_cache import keep_programs
        from qerl_jax.export.write import ExportConfig, export

    with exit_on_stop_signals(), keep_programs():
        export(ExportConfig(**vars(arguments)))


def main() -> None:
    """Parses the arguments and runs."""
    cli.run_command(make_parser(), run)


if __name__ == "__main__":
    main()
