"""Exports what a run trained to transformers, PEFT, vLLM, llama.cpp and Ollama.

uv run python -m experiments.export --help
"""

from qerl_jax.commands.export import main

if __name__ == "__main__":
    main()
