"""Configs of the experiments."""
