"""Writes an NVFP4 checkpoint that transformers, vLLM and this project can read.

uv run python -m experiments.quantize --help
"""

from qerl_jax.commands.quantize import main

if __name__ == "__main__":
    main()
