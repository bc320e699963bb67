"""The run folder: its files, metrics, checkpoints, pictures; and how a signal stops a run."""
