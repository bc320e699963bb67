r"""Measures rollouts of vLLM: the time of a decode step, and of completions of full length.

    python -m benchmarks.peers.decode --model=qwen2.5-7b --format=nvfp4 --folder=7b --ours=ours.json

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

from benchmarks.peers import rows
from qerl_jax.commands import cli

REQUIREMENTS = "vllm==0.22.0 torch==2.11.0 transformers==5.17.0"
NF4 = " bitsandbytes==0.50.2"
_FEW = 16  # new tokens of the short rollout


def make_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    parser = rows.make_parser("benchmarks.peers.decode", __doc__)
    formats = ("bf16", "nvfp4", "nf4")
    parser.add_argument("--format", choices=formats, default="bf16", help="(default: bf16)")
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


def engine_fraction(arguments: argparse.Namespace, format: str) -> float:
    """The part of the card that vLLM may take: weights, keys and values, and 5 GB to work in."""
    import numpy as np
    import torch  # pyrefly: ignore[missing-import]

    from qerl_jax.policy.architectures import ARCHITECTURES
    from qerl_jax.policy.sizes import packed_numbers, weight_bytes
    from qerl_jax.rollout.shapes import position_bytes, state_bytes

    model_config = ARCHITECTURES[arguments.model]
    weights = weight_bytes(model_config, format="bf16", itemsize=2)
    if format != "bf16":
        weights -= 1.4 * packed_numbers(model_config)
    tokens = arguments.prompt + arguments.new_tokens
    row = tokens * position_bytes(model_config, np.dtype(np.uint16)) + state_bytes(model_config)
    total = torch.cuda.get_device_properties(0).total_memory
    return round((weights + 1.2 * arguments.rows * row + 5e9) / total, 3)


def make_engine(
    arguments: argparse.Namespace, folder: pathlib.Path, format: str, **options: Any
) -> Any:
    """An engine of vLLM with an adapter, with CUDA graphs for up to --rows rows.

    The folder holds weights for 'bf16' and 'nf4', and the config of the weights for 'nvfp4'.
    """
    from vllm import LLM  # pyrefly: ignore[missing-import]

    if format == "nf4":
        options |= {"quantization": "bitsandbytes"}
    return LLM(
        model=str(folder),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=arguments.prompt + arguments.new_tokens,
        max_num_seqs=arguments.rows,
        gpu_memory_utilization=engine_fraction(arguments, format),
        enable_lora=True,
        max_loras=1,
        max_lora_rank=arguments.lora_rank,
        disable_log_stats=True,
        **options,
    )


def generate(
    engine: Any, prompts: Sequence[Sequence[int]], new_tokens: int, adapter: Any
) -> list[list[int]]:
    """Token ids of completions at temperature 1 and of full length, with a `LoRARequest`."""
    from vllm import SamplingParams  # pyrefly: ignore[missing-import]

    sampling = SamplingParams(
        temperature=1.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
    )
    inputs = [{"prompt_token_ids": list(ids)} for ids in prompts]
    outputs = engine.generate(inputs, sampling, lora_request=adapter, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def write_adapter(folder: pathlib.Path, model: str, rank: int) -> None:
    """Writes a random adapter as PEFT stores it."""
    import jax

    from benchmarks.rollout.random_policy import random_lora
    from qerl_jax.policy.architectures import ARCHITECTURES
    from qerl_jax.policy.lora import LoraConfig
    from qerl_jax.policy.trainable import Trainable
    from qerl_jax.weights.peft import save_peft_adapter

    jax.config.update("jax_platforms", "cpu")  # The card is the peer's.
    lora = random_lora(jax.random.key(0), ARCHITECTURES[model], rank=rank)
    config = LoraConfig(rank=rank, alpha=float(rank))
    save_peft_adapter(folder, Trainable(lora, {}), config, base_model=model)


def _without_weights(folder: pathlib.Path, source: pathlib.Path) -> pathlib.Path:
    """A folder with the config of a checkpoint in NVFP4, and no weights."""
    from qerl_jax.weights.save import QUANTIZATION_CONFIG

    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = QUANTIZATION_CONFIG
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def measure(arguments: argparse.Namespace, work: pathlib.Path) -> dict[str, Any]:
    """The seconds of rollouts; `work` is a folder for files."""
    import torch  # pyrefly: ignore[missing-import]
    from vllm.lora.request import LoRARequest  # pyrefly: ignore[missing-import]

    from benchmarks.random_checkpoint import model_folder
    from qerl_jax.policy.architectures import ARCHITECTURES

    folder, options = model_folder(arguments.folder, arguments.model), {}
    if arguments.format == "nvfp4":
        folder, options = _without_weights(work / "model", folder), {"load_format": "dummy"}
    write_adapter(work / "lora", arguments.model, arguments.lora_rank)
    adapter = LoRARequest("adapter", 1, str(work / "lora"))
    engine = make_engine(arguments, folder, arguments.format, **options)
    draw, vocab = random.Random(0), ARCHITECTURES[arguments.model].vocab_size

    def seconds(new_tokens: int) -> float:
        prompt = [draw.randrange(1, vocab) for _ in range(arguments.prompt)]
        began = time.perf_counter()
        completions = generate(engine, [prompt] * arguments.rows, new_tokens, adapter)
        took = time.perf_counter() - began
        assert all(len(tokens) == new_tokens for tokens in completions)
        return took

    def median(new_tokens: int) -> float:
        return statistics.median(seconds(new_tokens) for _ in range(arguments.steps))

    seconds(_FEW)
    few, all_seconds = median(_FEW), median(arguments.new_tokens)
    return {
        "rollout_s": all_seconds,
        "ms_per_step": 1e3 * (all_seconds - few) / (arguments.new_tokens - _FEW),
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
    }


def run(arguments: argparse.Namespace) -> None:
    """Runs the benchmark with the parsed arguments."""
    from qerl_jax.errors import check_limits

    check_limits({"--new-tokens": (arguments.new_tokens, _FEW + 1)})
    row = rows.begin(arguments, REQUIREMENTS + (NF4 if arguments.format == "nf4" else ""))
    row |= {"peer": "vLLM", "update_s": None, "step_s": None}
    row |= {"format": arguments.format, "rollout_format": arguments.format}
    set_environment()
    with tempfile.TemporaryDirectory() as scratch:
        row |= measure(arguments, pathlib.Path(scratch))
    rows.save(arguments, "benchmarks.peers.decode", row)


if __name__ == "__main__":
    cli.run_command(make_parser(), run)
