"""Trains every run of a sweep, one or several at a time, and makes one table and one picture.

uv run python -m experiments.sweep --help
"""

from qerl_jax.commands.sweep import main

if __name__ == "__main__":
    main()
