"""Trains on competition mathematics with DAPO and a policy in 4 bits.

    uv run python -m experiments.dapo_math
    uv run python -m experiments.dapo_math --config=dapo_math:qwen2.5-7b

The first command needs no GPU and no hub: a small stand-in that learns sums.
`qerl_jax/config/build.py` lists the presets and explains every field.
"""

from pathlib import Path

from qerl_jax.commands import cli

_CONFIG = Path(__file__).parent / "configs" / "dapo_math.py"

run = cli.trainer("train on BigMath: --config=dapo_math:qwen2.5-7b")


def main() -> None:
    """Parses the flags and trains."""
    cli.main(run, str(_CONFIG), description=__doc__)


if __name__ == "__main__":
    main()
