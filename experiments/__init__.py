"""Command lines: each experiment is a docstring, a config and a main function."""
