"""Configs of the experiments; `defaults` explains every field."""
