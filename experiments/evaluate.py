"""Evaluates a model, a run or an adapter on benchmarks or on a file of problems.

uv run python -m experiments.evaluate --help
"""

from qerl_jax.commands.evaluate import main

if __name__ == "__main__":
    main()
