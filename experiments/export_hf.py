"""Exports what a run trained to transformers, PEFT and vLLM.

uv run python -m experiments.export_hf --help
"""

from qerl_jax.commands.export_hf import main

if __name__ == "__main__":
    main()
