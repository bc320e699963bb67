"""Command lines: each experiment is a docstring, a config and a main function."""

# `python -m experiments.NAME` imports this package to find the module; `qerl_jax.commands` then
# ends in one line at Ctrl-C, while it imports.
import qerl_jax.commands  # noqa: F401
