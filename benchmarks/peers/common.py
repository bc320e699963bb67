"""What the commands of the peers share: their arguments, packages, model folder and rows."""

import argparse
import importlib.metadata
import json
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from qerl_jax.errors import UserError, check_limits
from qerl_jax.system.paths import user_path

OUT = "benchmarks/results/peers.json"
KEYS = (
    *("peer", "model", "format", "rollout_format", "batch", "prompt", "new_tokens", "lora_rank"),
    "device",
)
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_OURS = ("rollout_s", "update_s", "step_s", "peak_gb")


def make_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """The arguments that every command of the peers has.

    Args:
        module: name of the module.
        description: text of its help.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="qwen2.5-7b", help="name of the shapes (default: qwen2.5-7b)")
    add("--rows", default="8,4,2", help="comma-separated numbers of completions (default: 8,4,2)")
    add("--prompt", type=int, default=256, help="tokens of the prompt (default: 256)")
    add("--new-tokens", type=int, default=2048, help="length of a completion (default: 2048)")
    add("--lora-rank", type=int, default=32, help="rank of the adapter (default: 32)")
    add("--steps", type=int, default=2, help="measurements, after a first one (default: 2)")
    add(
        "--folder",
        type=user_path,
        required=True,
        help="bf16 checkpoint with random weights, which is written where it does not exist",
    )
    add(
        "--ours",
        type=user_path,
        required=True,
        help="JSON file of benchmarks.step rows of this card; what is missing there is measured",
    )
    add("--out", type=user_path, default=OUT, help=f"JSON file of the rows (default: {OUT})")
    return parser


def check(arguments: argparse.Namespace) -> list[int]:
    """Checks the arguments that every command has, and returns the row counts, largest first.

    Raises:
        UserError: a value is out of its range, the model is unknown, or --out cannot take rows.
    """
    from benchmarks.rollout.results import check_out
    from benchmarks.rollout.subject import check_names

    check_names([arguments.model], ["bf16"])
    try:
        rows = [int(number) for number in arguments.rows.split(",")]
    except ValueError as error:
        raise UserError(f"--rows={arguments.rows}: numbers with commas, like 8,4,2") from error
    check_limits(
        {
            "--rows": (min(rows), 2),
            "--prompt": (arguments.prompt, 1),
            "--new-tokens": (arguments.new_tokens, 1),
            "--lora-rank": (arguments.lora_rank, 1),
            "--steps": (arguments.steps, 1),
        }
    )
    check_out(arguments.out, KEYS)
    return sorted(set(rows), reverse=True)


def installed(packages: Mapping[str, str]) -> str:
    """The versions of the packages of a peer, as `name version, name version`.

    Args:
        packages: version of each package that the command was written for. Another version may
            work, and the row names the one that is installed.

    Raises:
        UserError: a package is not installed.
    """
    versions, missing = [], []
    for name in packages:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        requirements = " ".join(f"{name}=={version}" for name, version in packages.items())
        raise UserError(
            f"{', '.join(missing)}: not installed; this peer needs an environment with: pip "
            f"install {requirements}"
        )
    return ", ".join(versions)


def our_rows(arguments: argparse.Namespace, counts: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Rows of `benchmarks.step` in NVFP4 for groups of these sizes, measured where missing.

    Each measurement is a process of its own, which has the whole card, so this must be called
    before a peer takes any memory.

    Args:
        arguments: parsed arguments of `make_parser`.
        counts: numbers of completions of one group.

    Returns:
        The row of each count.

    Raises:
        UserError: a measurement failed, or a row is from another card.
    """
    rows = {count: _our_row(arguments, count) for count in counts}
    device, devices = device_name(), {row["device"] for row in rows.values()}
    if devices - {device}:
        raise UserError(
            f"{arguments.ours}: holds rows of {', '.join(sorted(devices))}, this is {device}; pass "
            "another --ours"
        )
    return rows


def _our_row(arguments: argparse.Namespace, count: int) -> dict[str, Any]:
    settings = {
        "model": arguments.model,
        "format": "nvfp4",
        "batch": count,
        "group": count,
        "prompt": arguments.prompt,
        "new_tokens": arguments.new_tokens,
        "lora_rank": arguments.lora_rank,
        "updates": 1,
        "mean_length": 0,
        "devices": 1,
    }
    for _ in range(2):
        path = arguments.ours
        rows = json.loads(path.read_text())["rows"] if path.exists() else []
        matches = [row for row in rows if settings.items() <= row.items()]
        if matches:
            return matches[-1]
        command = [
            *(sys.executable, "-m", "benchmarks.step", "--format=nvfp4", f"--out={path}"),
            *(f"--model={arguments.model}", f"--group={count}", f"--prompt={arguments.prompt}"),
            *(f"--new-tokens={arguments.new_tokens}", f"--lora-rank={arguments.lora_rank}"),
        ]
        if subprocess.run(command).returncode:
            break
    raise UserError(f"{' '.join(command[1:])}: failed, so there is no row to compare with")


def model_folder(arguments: argparse.Namespace) -> pathlib.Path:
    """The folder of a bf16 checkpoint with random weights and a tokenizer, written if missing.

    Every tensor repeats one block of normally distributed values, because a time depends on shapes
    alone. The tokenizer has a word for each token id, so that a prompt has as many tokens as words.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from benchmarks.random_checkpoint import write_random
    from qerl_jax.policy.architectures import ARCHITECTURES

    folder, config = arguments.folder, ARCHITECTURES[arguments.model]
    if not folder.exists():
        # Small files, so that many are written at a time.
        write_random(folder, config, packed=False, shard_bytes=1_000_000_000)
    if not (folder / "tokenizer.json").exists():
        words = {"<end>": 0} | {word(token): token for token in range(1, config.vocab_size)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="<end>"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyrefly: ignore[read-only]
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>"
        ).save_pretrained(folder)
    return folder


def word(token: int) -> str:
    """The word of a token id above 0 in the tokenizer of `model_folder`."""
    return f"w{token}"


def load_policy(folder: pathlib.Path, *, format: str, attention: str, rank: int) -> Any:
    """A PEFT model on the GPU (or the CPU): linear layers in bf16 or NF4, an adapter in bf16.

    By default PEFT keeps the adapter of a bf16 base in float32, and converts the input of every
    projection to it. TRL trains the adapter of a quantized base in bf16; here all adapters are.

    Args:
        folder: a bf16 checkpoint.
        format: 'bf16', or 'nf4' for bitsandbytes with bf16 products.
        attention: name of the attention implementation of transformers.
        rank: rank of the adapter, which lies on all seven projections.
    """
    import torch  # pyrefly: ignore[missing-import]
    from peft import LoraConfig, get_peft_model  # pyrefly: ignore[missing-import]
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16,
        attn_implementation=attention,
        device_map={"": 0 if torch.cuda.is_available() else "cpu"},
        **({"quantization_config": quantization} if format == "nf4" else {}),
    )
    adapter = LoraConfig(
        r=rank, lora_alpha=rank, target_modules=list(TARGETS), task_type="CAUSAL_LM"
    )
    model = get_peft_model(model, adapter)
    for value in model.parameters():
        if value.requires_grad:
            value.data = value.data.to(torch.bfloat16)
    return model


def device_name() -> str:
    """The name of the card as PyTorch says it, which is also JAX's; 'cpu' without one."""
    import torch  # pyrefly: ignore[missing-import]

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def synchronize() -> None:
    """Waits for the card."""
    import torch  # pyrefly: ignore[missing-import]

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_gb() -> float | None:
    """The largest memory of PyTorch's pool since `reset_peak`, in 10^9 bytes; None on a CPU."""
    import torch  # pyrefly: ignore[missing-import]

    return torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else None


def reset_peak() -> None:
    """Frees what nothing uses any more and begins a new measurement of the peak."""
    import gc

    import torch  # pyrefly: ignore[missing-import]

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def save_row(
    arguments: argparse.Namespace, module: str, row: Mapping[str, Any], our_row: Mapping[str, Any]
) -> None:
    """Prints a row beside ours and writes it to --out, in place of the row with the same keys.

    Args:
        arguments: parsed arguments of `make_parser`.
        module: name of the running module.
        row: what the peer measured: `peer`, `packages`, `format`, `rollout_format`, `batch`,
            seconds, `peak_gb` and options. A time that the peer does not have is None.
        our_row: row of `benchmarks.step` of the same card.
    """
    from benchmarks.rollout.results import origin
    from benchmarks.step import merge

    source = origin(module)
    merged = {
        "model": arguments.model,
        "prompt": arguments.prompt,
        "new_tokens": arguments.new_tokens,
        "lora_rank": arguments.lora_rank,
        **row,
        **{f"our_{name}": our_row[name] for name in _OURS},
        "our_commit": our_row["commit"],
        "device": our_row["device"],
        **{name: source[name] for name in ("commit", "date", "command")},
    }
    print(format_row(merged), flush=True)
    merge(arguments.out, merged, KEYS)


def format_row(row: Mapping[str, Any]) -> str:
    """A row as one line of text."""
    times = [
        f"{name} {row[f'{name}_s']:.2f} s (ours {row[f'our_{name}_s']:.2f})"
        for name in ("rollout", "update", "step")
        if row[f"{name}_s"] is not None
    ]
    peak = "" if row["peak_gb"] is None else f", peak {row['peak_gb']:.1f} GB"
    rollouts = f", rollouts in {row['rollout_format']}" if row["rollout_format"] else ""
    return (
        f"{row['peer']}: {row['model']} {row['format']}{rollouts}, {row['batch']} x "
        f"{row['prompt']}+{row['new_tokens']}: {', '.join(times)}{peak}"
    )
