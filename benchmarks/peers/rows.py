"""What the scripts of the peers share: their flags, and the row of ours that is compared."""

import argparse
import importlib.metadata
import json
from collections.abc import Mapping
from typing import Any

from benchmarks import common
from qerl_jax.errors import UserError, check_limits
from qerl_jax.system.paths import user_path

KEYS = (
    *("peer", "model", "format", "rollout_format", "batch", "prompt", "new_tokens", "lora_rank"),
    "device",
)


def make_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """The arguments that every script has."""
    parser = common.make_parser(module, description, "benchmarks/results/peers.json")
    add = parser.add_argument
    add("--model", default="qwen2.5-7b", help="name of the shapes (default: qwen2.5-7b)")
    add("--rows", type=int, default=8, help="completions of one prompt (default: 8)")
    add("--prompt", type=int, default=256, help="tokens of the prompt (default: 256)")
    add("--new-tokens", type=int, default=2048, help="length of a completion (default: 2048)")
    add("--lora-rank", type=int, default=32, help="rank of the adapter (default: 32)")
    add("--steps", type=int, default=2, help="measurements, after a first one (default: 2)")
    folder = "bf16 checkpoint with random weights, which is written where it does not exist"
    add("--folder", type=user_path, required=True, help=folder)
    ours = "JSON file of benchmarks.step, with the row of this card that is compared"
    add("--ours", type=user_path, required=True, help=ours)
    return parser


def installed(requirements: str) -> str:
    """The versions of packages such as 'torch==2.11.0 peft==0.21.2', as `name version, ...`.

    Another version than the required one may work, and the row names the one that is installed.

    Raises:
        UserError: a package is not installed.
    """
    names = [requirement.partition("==")[0] for requirement in requirements.split()]
    try:
        return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    except importlib.metadata.PackageNotFoundError as error:
        raise UserError(
            f"{error.name}: not installed; this peer needs an environment with: pip install "
            f"{requirements}"
        ) from error


def begin(arguments: argparse.Namespace, requirements: str) -> dict[str, Any]:
    """What is known of a row before the measurement: settings, packages and our figures.

    Raises:
        UserError: an argument is out of range, a package is missing, --out cannot take the row, or
            --ours has no row of `benchmarks.step` in NVFP4 at the same lengths on this card.
    """
    from benchmarks.rollout.subject import check_names

    check_names([arguments.model], ["bf16"])
    given = {name: getattr(arguments, name) for name in ("prompt", "new_tokens", "lora_rank")}
    flags = {f"--{name.replace('_', '-')}": value for name, value in given.items()}
    limits = {flag: (value, 1) for flag, value in flags.items()}
    check_limits(limits | {"--steps": (arguments.steps, 1), "--rows": (arguments.rows, 2)})
    common.check_out(arguments.out, KEYS)
    packages, device, path = installed(requirements), device_name(), arguments.ours
    row = {"model": arguments.model, "batch": arguments.rows, **given, "device": device}
    wanted = {"format": "nvfp4", "group": arguments.rows, "updates": 1, "mean_length": 0}
    wanted |= row | {"devices": 1}
    measured = json.loads(path.read_bytes())["rows"] if path.exists() else []
    matches = [other for other in measured if wanted.items() <= other.items()]
    if not matches:
        lengths = " ".join(f"{flag}={value}" for flag, value in flags.items())
        raise UserError(
            f"{path}: holds no row of {device} to compare with; measure it first: python -m "
            f"benchmarks.step --model={arguments.model} --format=nvfp4 --group={arguments.rows} "
            f"{lengths} --out={path}"
        )
    ours = ("rollout_s", "update_s", "step_s", "peak_gb", "commit")
    return row | {"packages": packages} | {f"our_{name}": matches[-1][name] for name in ours}


def device_name() -> str:
    """The name of the card as PyTorch says it, which is also JAX's."""
    import torch  # pyrefly: ignore[missing-import]

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def save(arguments: argparse.Namespace, module: str, row: Mapping[str, Any]) -> None:
    """Prints a row and writes it to --out.

    The row is that of `begin` with what was measured: `peer`, `format`, `rollout_format`, seconds,
    `peak_gb` and options. A time that the peer does not have is None.
    """
    common.merge(arguments.out, {**row, **common.origin(module)}, KEYS)
