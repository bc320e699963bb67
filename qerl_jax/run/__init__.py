"""The run folder: its files, metrics, checkpoints, pictures; and whose it is."""
