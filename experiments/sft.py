"""Learns from rows of text with supervised fine-tuning and a policy in 4 bits.

    uv run python -m experiments.sft
    uv run python -m experiments.sft --config=sft:qwen2.5-1.5b --config.data.path=rows.jsonl

The first command needs no GPU and no hub: a small stand-in that learns to write sums.
`--help` lists the presets, `--explain=all` and docs/config.md every field.
"""

from qerl_jax.commands import train
from qerl_jax.config.experiments.sft import get_config

__all__ = ["get_config", "main"]


def main() -> None:
    """Parses the flags and trains."""
    train.main("sft", description=__doc__)


if __name__ == "__main__":
    main()
