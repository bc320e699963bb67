"""Trains on grade-school arithmetic with GRPO and a policy in 4 bits.

    uv run python -m experiments.grpo_gsm8k
    uv run python -m experiments.grpo_gsm8k --config=grpo_gsm8k:qwen2.5-7b

The first command needs no GPU and no hub: a small stand-in that shows the whole method within
minutes. `qerl_jax/config/build.py` lists the presets and explains every field.
"""

from pathlib import Path

from qerl_jax.commands import cli

_CONFIG = Path(__file__).parent / "configs" / "grpo_gsm8k.py"

run = cli.trainer("train on GSM8K: --config=grpo_gsm8k:qwen2.5-1.5b")


def main() -> None:
    """Parses the flags and trains."""
    cli.main(run, str(_CONFIG), description=__doc__)


if __name__ == "__main__":
    main()
