"""Measures how fast rollouts are: decode steps, whole rollouts, startup."""
