"""Asks a policy one question and shows the answer while it is decoded.

uv run python -m experiments.sample --help
"""

from qerl_jax.commands.sample import main

if __name__ == "__main__":
    main()
