"""Shows runs: their curves so far, and prompts, completions and rewards step by step.

uv run python -m experiments.show --help
"""

from qerl_jax.commands.show import main

if __name__ == "__main__":
    main()
