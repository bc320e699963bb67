"""Trains on grade-school arithmetic with GRPO and a policy in 4 bits.

    uv run python -m experiments.grpo_gsm8k
    uv run python -m experiments.grpo_gsm8k --config=grpo_gsm8k:qwen2.5-7b

The first command needs no GPU and no hub: a small stand-in that shows the whole method within
minutes. `--help` lists the presets, `--explain=all` and docs/config.md every field.
"""

from qerl_jax.commands import train
from qerl_jax.config.experiments.grpo_gsm8k import get_config

__all__ = ["get_config", "main"]


def main() -> None:
    """Parses the flags and trains."""
    train.main("grpo_gsm8k", description=__doc__)


if __name__ == "__main__":
    main()
