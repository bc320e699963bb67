"""Says what a run takes of a card's memory before it starts, and what would fit.

uv run python -m experiments.plan --help
"""

from qerl_jax.commands.plan import main

if __name__ == "__main__":
    main()
