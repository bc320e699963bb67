r"""Measures rollouts of vLLM: the time of a decode step, and of completions of full length.

    python -m benchmarks.peers.decode --model=qwen2.5-7b --format=bf16,nvfp4 --folder=7b \
        --ours=ours.json

It needs vllm 0.22.0, and with --format=nf4 bitsandbytes 0.50.2. The weights are random: bf16 and
nf4 read the checkpoint of --folder, which bitsandbytes quantizes while it loads, and nvfp4 takes
vLLM's dummy weights in the layout of compressed-tensors. The adapter lies on all seven projections
and is not merged; --lora-rank is its rank. Every row has the same number of new tokens. The rows of
a rollout share a prompt, as those of a group do, and every rollout has a new prompt. vLLM keeps its
defaults: compiled layers, CUDA graphs, prefix caching, asynchronous scheduling. It runs in this
process, so that outputs are not copied between processes.

    rollout_s     seconds of a rollout, from token ids to token ids: the median of --steps
    ms_per_step   milliseconds of a decode step: rollout_s minus the seconds of a rollout of 16 new
        tokens, divided by the difference in tokens

Our row is `benchmarks.step` in NVFP4 at the same lengths.
"""

import argparse
import json
import os
import pathlib
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.peers import common
from qerl_jax.commands import cli

FORMATS = ("bf16", "nvfp4", "nf4")
PACKAGES = {"vllm": "0.22.0", "torch": "2.11.0", "transformers": "5.17.0"}
_FEW = 16  # new tokens of the short rollout


def make_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    parser = common.make_parser("benchmarks.peers.decode", __doc__)
    add = parser.add_argument
    add("--format", default="bf16,nvfp4", help="comma-separated formats: bf16, nvfp4, nf4")
    return parser


def set_environment() -> None:
    """Sets the variables that vLLM reads at its import: one process, no network; those set stay.

    FlashInfer's sampler is off, because it is for top-p and top-k, which are off here.
    """
    defaults = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def engine_fraction(model: str, format: str, *, rows: int, tokens: int) -> float:
    """The part of the card that vLLM may take: weights, keys and values, and 5 GB to work in.

    Args:
        model: name of the shapes.
        format: weight format.
        rows: rows of a batch.
        tokens: tokens of a row.
    """
    import numpy as np
    import torch  # pyrefly: ignore[missing-import]

    from qerl_jax.policy.architectures import ARCHITECTURES
    from qerl_jax.policy.sizes import packed_numbers, weight_bytes
    from qerl_jax.rollout.shapes import position_bytes, state_bytes

    model_config = ARCHITECTURES[model]
    weights = weight_bytes(model_config, format="bf16", itemsize=2)
    if format != "bf16":
        weights -= 1.4 * packed_numbers(model_config)
    caches = rows * (tokens * position_bytes(model_config, np.dtype(np.uint16)))
    caches += rows * state_bytes(model_config)
    if not torch.cuda.is_available():
        return 0.5
    total = torch.cuda.get_device_properties(0).total_memory
    return round((weights + 1.2 * caches + 5e9) / total, 3)


def make_engine(
    arguments: argparse.Namespace, folder: pathlib.Path, format: str, rows: int, **options: Any
) -> Any:
    """An engine of vLLM with an adapter, with CUDA graphs for up to this many rows.

    Args:
        arguments: parsed arguments of `common.make_parser`.
        folder: model folder.
        format: 'bf16' or 'nf4' with weights in the folder, 'nvfp4' with a config in it.
        rows: largest batch.
        options: further options of `vllm.LLM`.
    """
    from vllm import LLM  # pyrefly: ignore[missing-import]

    tokens = arguments.prompt + arguments.new_tokens
    if format == "nf4":
        options |= {"quantization": "bitsandbytes"}
    return LLM(
        model=str(folder),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=tokens,
        max_num_seqs=rows,
        gpu_memory_utilization=engine_fraction(arguments.model, format, rows=rows, tokens=tokens),
        enable_lora=True,
        max_loras=1,
        max_lora_rank=arguments.lora_rank,
        disable_log_stats=True,
        **options,
    )


def generate(
    engine: Any, prompts: Sequence[Sequence[int]], new_tokens: int, adapter: Any
) -> list[Any]:
    """Completes prompts at temperature 1 to full length; returns vLLM's outputs.

    Args:
        engine: from `make_engine`.
        prompts: token ids of each prompt.
        new_tokens: length of a completion.
        adapter: a `LoRARequest`.
    """
    from vllm import SamplingParams  # pyrefly: ignore[missing-import]

    sampling = SamplingParams(
        temperature=1.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
    )
    inputs = [{"prompt_token_ids": list(ids)} for ids in prompts]
    return engine.generate(inputs, sampling, lora_request=adapter, use_tqdm=False)


def write_adapter(folder: pathlib.Path, model: str, rank: int) -> pathlib.Path:
    """Writes a random adapter as PEFT stores it, and returns its folder."""
    import torch  # pyrefly: ignore[missing-import]
    from safetensors.torch import save_file

    from qerl_jax.policy.architectures import ARCHITECTURES
    from qerl_jax.policy.lora import projection_shapes, targets_of
    from qerl_jax.weights.names import layer_module

    model_config, tensors = ARCHITECTURES[model], {}
    for layer in range(model_config.num_layers):
        for name in targets_of(model_config, layer, common.TARGETS):
            n, k = projection_shapes(model_config)[name]
            module = f"base_model.model.{layer_module(layer, name)}"
            for part, shape in (("A", (rank, k)), ("B", (n, rank))):
                value = 0.01 * torch.randn(shape, dtype=torch.bfloat16)
                tensors[f"{module}.lora_{part}.weight"] = value
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    text = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank}
    text |= {"target_modules": list(common.TARGETS), "bias": "none", "lora_dropout": 0.0}
    (folder / "adapter_config.json").write_text(json.dumps(text))
    return folder


def _dummy_folder(folder: pathlib.Path, source: pathlib.Path) -> pathlib.Path:
    """A folder with the config of a checkpoint in NVFP4, and no weights."""
    from qerl_jax.weights.save import QUANTIZATION_CONFIG

    folder.mkdir()
    for path in source.glob("*.json"):
        if "index" not in path.name:
            shutil.copy(path, folder)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = QUANTIZATION_CONFIG
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def measure(
    arguments: argparse.Namespace, format: str, counts: Sequence[int]
) -> dict[int, dict[str, Any]]:
    """The rollouts of one format: seconds by number of rows."""
    from vllm.lora.request import LoRARequest  # pyrefly: ignore[missing-import]

    from qerl_jax.policy.architectures import ARCHITECTURES

    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder, work = common.model_folder(arguments), pathlib.Path(scratch)
        options = {}
        if format == "nvfp4":
            folder, options = _dummy_folder(work / "model", folder), {"load_format": "dummy"}
        lora = write_adapter(work / "lora", arguments.model, arguments.lora_rank)
        engine = make_engine(arguments, folder, format, max(counts), **options)
        adapter = LoRARequest("adapter", 1, str(lora))
        draw, vocab = random.Random(0), ARCHITECTURES[arguments.model].vocab_size

        def seconds(rows: int, new_tokens: int) -> float:
            prompt = [draw.randrange(1, vocab) for _ in range(arguments.prompt)]
            began = time.perf_counter()
            outputs = generate(engine, [prompt] * rows, new_tokens, adapter)
            assert all(len(output.outputs[0].token_ids) == new_tokens for output in outputs)
            return time.perf_counter() - began

        for rows in counts:
            seconds(rows, _FEW)
            few_seconds = statistics.median(seconds(rows, _FEW) for _ in range(arguments.steps))
            rollout_seconds = statistics.median(
                seconds(rows, arguments.new_tokens) for _ in range(arguments.steps)
            )
            between = arguments.new_tokens - _FEW
            results[rows] = {
                "rollout_s": rollout_seconds,
                "ms_per_step": 1e3 * (rollout_seconds - few_seconds) / between,
                "peak_gb": common.peak_gb(),
            }
    return results


def run(arguments: argparse.Namespace) -> None:
    """Runs the benchmark with the parsed arguments."""
    import concurrent.futures
    import multiprocessing

    from qerl_jax.errors import UserError, check_limits

    counts, formats = common.check(arguments), arguments.format.split(",")
    check_limits({"--new-tokens": (arguments.new_tokens, _FEW + 1)})
    if not set(formats) <= set(FORMATS):
        choices = ", ".join(FORMATS)
        raise UserError(f"--format={arguments.format}: choose from {choices}, with commas between")
    needed = PACKAGES | ({"bitsandbytes": "0.50.2"} if "nf4" in formats else {})
    packages = common.installed(needed)
    our_rows = common.our_rows(arguments, counts)
    set_environment()
    spawn = multiprocessing.get_context("spawn")
    for format in formats:
        # An engine gives its memory back when its process ends.
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as process:
            results = process.submit(measure, arguments, format, counts).result()
            for rows, result in results.items():
                row = {
                    "peer": "vLLM",
                    "packages": packages,
                    "format": format,
                    "rollout_format": format,
                    "batch": rows,
                    "update_s": None,
                    "step_s": None,
                    **result,
                }
                common.save_row(arguments, "benchmarks.peers.decode", row, our_rows[rows])


if __name__ == "__main__":
    cli.run_command(make_parser(), run)
