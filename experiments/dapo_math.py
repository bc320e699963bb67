"""Trains on competition mathematics with DAPO and a policy in 4 bits.

    uv run python -m experiments.dapo_math
    uv run python -m experiments.dapo_math --config=dapo_math:qwen2.5-7b

The first command needs no GPU and no hub: a small stand-in that learns sums.
`--help` lists the presets, `--explain=all` and docs/config.md every field.
"""

from qerl_jax.commands import train
from qerl_jax.config.experiments.dapo_math import get_config

__all__ = ["get_config", "main"]


def main() -> None:
    """Parses the flags and trains."""
    train.main("dapo_math", description=__doc__)


if __name__ == "__main__":
    main()
